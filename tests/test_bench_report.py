"""bench.report: a page that needs nothing else, plots of the input's numbers, bad files named."""

# ruff: noqa: E501 - a row of nccl-tests is longer than a line

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bench import report
from bench.parse import Record, Run
from bench.report_page import ratios

TEXT = """\
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 8 maxBytes 64 step: 8(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1
#  Rank  0 Group  0 Pid      1 on       host device  0 [0000:00:00] <b>GPU</b>
#  Rank  1 Group  0 Pid      2 on       host device  1 [0000:00:00] <b>GPU</b>
           8             2     float     sum      -1     2.00    0.50    0.25       0     4.00    0.25    0.12       0
          64            16     float     sum      -1     8.00    0.75    1.50       0    16.00    0.50    1.25       0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 0.78
"""
PEERS = {
    "version": 1,
    "machine": {"cpu": "a <script>"},
    "sides": {"ours": "1"},
    "rows": [
        {"op": "all_reduce", "ranks": 2, "bytes": size, "buffers": "plain", "load": load, "ours_us": us,
         "openmpi_us": 2 * us, "mpich_us": None, "gloo_us": 9.0, "roofline_us": us / 2, "met": met}
        for load in ("quiet", "one busy core")
        for size, us, met in ((8, 1.0, True), (64, 3.0, False))
    ],
}  # fmt: skip
OVERHEAD = {
    "kind": "call_overhead",
    "machine": {},
    "calls": [{"name": "all_reduce, out=", "us": 2.0, "above_c_us": 1.9, "target_us": 1.5, "met": False}],
    "imports": [{"name": "without CuPy", "beyond_numpy_ms": 40.0, "target_ms": 60.0, "met": True}],
}


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open.pop() != tag:  # <p> and <li> may be left open
            pass


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / name for name in ("a.txt", "b.txt", "peers.json", "overhead.json")]
    texts = (TEXT, TEXT.replace("   8.00", "   4.00"), json.dumps(PEERS), json.dumps(OVERHEAD))
    for file, text in zip(made, texts, strict=True):
        file.write_text(text)
    return made


def test_the_page_needs_no_other_file_and_escapes_what_it_is_given(files: list[Path], tmp_path: Path):
    out = tmp_path / "out"
    assert report.main([*map(str, files), "--out", str(out), "--title", "<i>T</i>"]) == 0
    text = (out / "index.html").read_text()
    reader = Reader()
    reader.feed(text)
    assert not reader.open and not {"script", "i", "b", "link"} & set(reader.tags)
    pictures = sorted(out.glob("*.png"))
    assert len(pictures) == 4 == len(reader.links)
    assert all(link.startswith("data:image/png;base64,") for link in reader.links)
    assert all(one.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and one.stat().st_size > 5000 for one in pictures)
    assert "&lt;i&gt;T&lt;/i&gt;" in text and "<td class=missed>missed</td>" in text


def test_the_plots_show_the_numbers_of_the_files(files: list[Path]):
    from bench.report_plots import plots

    inputs = report.load(files)
    drawn = {plot.title: plot.series for plot in plots(inputs.runs, inputs.peers, None)}
    latency = drawn["all_reduce_perf: latency"]
    assert latency["1: a.txt out of place"] == ((8, 64), (2.0, 8.0))
    assert latency["1: a.txt in place"] == ((8, 64), (4.0, 16.0))
    assert latency["2: b.txt out of place"] == ((8, 64), (2.0, 4.0))
    assert drawn["all_reduce_perf: bus bandwidth"]["1: a.txt out of place"] == ((8, 64), (0.25, 1.5))
    for load in ("quiet", "one busy core"):
        assert drawn[f"all_reduce, 2 ranks, {load} (peers.json)"] == {
            "ours, plain": ((8, 64), (1.0, 3.0)),
            "openmpi": ((8, 64), (2.0, 6.0)),
            "gloo": ((8, 64), (9.0, 9.0)),
            "roofline": ((8, 64), (0.5, 1.5)),
        }


def test_ratios_are_of_the_same_call_to_the_first_run():
    def run(*times: float) -> Run:
        rows = [Record(8 << i, 2, "float", "sum", -1, False, t, 1.0, 1.0, 0) for i, t in enumerate(times)]
        return Run(program="p", rows=tuple(rows))

    assert ratios([("a", run(4.0, 8.0, 1.0)), ("b", run(1.0, 16.0))]) == [
        ["p 8 float sum -1 out of place", "4.00", "0.250"],
        ["p 16 float sum -1 out of place", "8.00", "2.000"],
    ]
    assert ratios([("a", run(4.0))]) == []


@pytest.mark.parametrize(
    "text, words",
    [
        ('{\n "a": 1,\n}', "bad.json, line 3: not JSON"),
        ('{"sides": {}, "rows": [{"op": "x"}]}', "bad.json: row 1 lacks ranks, bytes"),
        ('{"sides": {}, "rows": 3}', "bad.json: a list of rows was expected, not int"),
        ("no benchmark\n", "bad.json: no line of it is nccl-tests'"),
    ],
)
def test_a_bad_file_is_named(text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "bad.json"
    file.write_text(text)
    assert report.main([str(file), "--out", str(tmp_path / "out")]) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_it_says_what_to_install(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.backends.backend_agg", None)
    assert report.main([str(files[0]), "--out", str(tmp_path / "out")]) == 1
    assert "pip install 'pynccl-anywhere[bench]'" in capsys.readouterr().err

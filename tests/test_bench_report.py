"""bench.report: a page that needs nothing else, with the numbers of its inputs, their failures, and what is 0."""

# ruff: noqa: E501 - a row of nccl-tests is longer than a line

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bench import report
from bench.parse import Record, Run, read
from bench.report_page import pictures_of
from bench.report_plots import COLOURS, colour, plots
from bench.report_tables import (
    Cell,
    disturbed_rows,
    failures,
    measured,
    notes,
    number,
    overhead,
    peer_rows,
    peer_summary,
    run_rows,
)

REAL = Path(__file__).parent / "fixtures" / "nccl_tests" / "alltoall_perf.txt"
TEXT = """\
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 8 maxBytes 64 step: 8(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1
#  Rank  0 Group  0 Pid      1 on       host device  0 [0000:00:00] <b>GPU</b>
#  Rank  1 Group  0 Pid      2 on       host device  1 [0000:00:00] <b>GPU</b>
           8             2     float     sum      -1     2.00    0.50    0.25       0     4.00    0.25    0.12       0
          64            16     float     sum      -1     8.00    0.75    1.50       0    16.00    0.50    1.25       0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 0.78
#
# Collective test concluded: all_reduce_perf
"""
PEERS: dict[str, Any] = {
    "version": 1,
    "machine": {"cpu": "a <script>", "cores": 2, "load_average": 0.25},
    "sides": {"ours": "pynccl 1", "openmpi": "Open MPI 5", "roofline": "64-byte vectors"},
    "failures": {},
    "rows": [
        {"op": "all_reduce", "ranks": 2, "bytes": size, "buffers": buffers, "load": load, "ours_us": us,
         "openmpi_us": 2.0, "mpich_us": None, "gloo_us": 9.0, "roofline_us": us / 2,
         "spread": {"ours": [us / 2, 2 * us], "openmpi": [1.0, 3.0]}, "fastest": "openmpi", "ratio": us / 2,
         "target": 0.75, "met": us <= 1.5, "roofline_fraction": 0.5, "roofline_target": 0.8 if size == 64 else None,
         "roofline_met": False if size == 64 else None, "others": 0.02, "why": None}
        for load in ("quiet", "one busy core")
        for buffers, size, us in (("plain", 8, 1.0), ("plain", 64, 4.0), ("mapped", 8, 0.5))
    ],
}  # fmt: skip
OVERHEAD: dict[str, Any] = {
    "kind": "call_overhead",
    "when": "2026-01-02T03:04:05Z",
    "machine": {"cpu": "C", "versions": {"numpy": "2.0", "cupy-cuda12x": None}},
    "rounds": 21,
    "calls": [
        {"name": "the C call", "us": 0.1, "above_c_us": 0.0, "target_us": None, "met": None},
        {"name": "all_reduce, out=", "us": 2.0, "above_c_us": 1.9, "target_us": 1.5, "met": False},
    ],
    "imports": [{"name": "without CuPy", "beyond_numpy_ms": 40.0, "target_ms": 60.0, "met": True}],
}


class Page(HTMLParser):
    """Tags, attributes, the text of each table's rows, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    def values(self, *names: str) -> list[str]:
        return [value for name, value in self.attributes if name in names]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return write(tmp_path)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a report of all four kinds writes."""
    folder = tmp_path_factory.mktemp("report")
    assert report.main([*map(str, write(folder)), "--out", str(folder / "out"), "--title", "<i>T</i>"]) == 0
    return folder / "out"


def write(folder: Path) -> list[Path]:
    made = [folder / name for name in ("a.txt", "b.txt", "peers.json", "overhead.json")]
    texts = (TEXT, TEXT.replace("   8.00", "   4.00"), json.dumps(PEERS), json.dumps(OVERHEAD))
    for file, text in zip(made, texts, strict=True):
        file.write_text(text)
    return made


def run_of(*records: tuple[int, float, float], name: str = "p", **about: Any) -> Run:
    rows = [
        Record(size, 2, "float", "sum", -1, False, time, busbw, busbw, 0) for size, time, busbw in records
    ]
    return Run(program=name, rows=tuple(rows), out_of_bounds=0, **about)


def cells(row: Any) -> list[str]:
    return [one.text if isinstance(one, Cell) else one for one in row]


# --- the page ------------------------------------------------------------------------------------------------


def test_the_page_needs_no_other_file_and_escapes_what_it_is_given(out: Path):
    text = (out / "index.html").read_text()
    page = Page(text)
    assert not page.open and not {"script", "i", "b>GPU", "link", "img"} & set(page.tags)
    assert "<b>GPU" not in text and "a <script>" in "".join(page.words) and "<i>T</i>" in page.words
    assert all(link.startswith("#") for link in page.values("src", "href", "xlink:href"))
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text) and "@import" not in text
    pictures = sorted(out.glob("*.png"))
    assert len(pictures) == 4 == page.tags.count("svg") == page.tags.count("figure")
    assert all(one.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and one.stat().st_size > 5000 for one in pictures)


def test_ids_differ_and_every_reference_has_its_id(out: Path):
    text = (out / "index.html").read_text()
    page = Page(text)
    ids = page.values("id")
    used = [value[1:] for value in page.values("href")] + re.findall(r"url\(#([^)]+)\)", text)
    assert len(ids) == len(set(ids)) and ids and set(used) == set(ids)


def test_pictures_take_the_colour_of_the_page(out: Path):
    text = (out / "index.html").read_text()
    assert "#000000" not in text and "currentColor" in text and "prefers-color-scheme: dark" in text
    assert "font-family" not in text  # the page's own


def test_every_title_is_there_once(out: Path):
    text = (out / "index.html").read_text()
    for title in (
        "bus bandwidth",
        "latency",
        "all_reduce, 2 ranks, quiet",
        "all_reduce, 2 ranks, one busy core",
    ):
        assert (
            text.count(f">{title}<") - text.count(f"<b>{title}<") == text.count(f"<figcaption>{title}<") == 1
        )
    assert text.count(">all_reduce_perf<") == 3  # a heading, and two inputs


def test_the_tables_of_the_page_have_the_numbers_of_the_files(out: Path):
    page = Page((out / "index.html").read_text())
    assert [
        "64",
        "out of place",
        "8.00",
        "1.50",
        "0",
        "4.00",
        "1.50",
        "0",
        "0.500",
    ] in page.rows
    assert [
        "64",
        "in place",
        "16.0",
        "1.25",
        "0",
        "16.0",
        "1.25",
        "0",
        "1.000",
    ] in page.rows
    assert [
        "all_reduce", "64 B", "plain", "4.00", "2.00–8.00", "2", "2.00", "2.000", "9.00", "0.444",
        "0.75", "missed", "2.00", "0.500", "0.8", "missed",
    ] in page.rows  # fmt: skip
    assert ["all_reduce, out=", "2.000", "–", "1.900", "1.5", "missed"] in page.rows
    assert ["without CuPy", "–", "40.0", "60", "met"] in page.rows


def test_failures_are_at_the_top_and_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bad, cut, peers = tmp_path / "bad.txt", tmp_path / "cut.txt", tmp_path / "peers.json"
    bad.write_text(TEXT.replace("0.25       0", "0.25       3"))
    cut.write_text(TEXT.partition("# Out of")[0] + "# error: rank <1> has gone\n")
    peers.write_text(json.dumps({**PEERS, "failures": {"gloo": "no torch for <this>"}}))
    assert report.main([*map(str, (bad, cut, peers)), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "index.html").read_text()
    top = text.partition("<h2>What was measured")[0]
    errors = capsys.readouterr().err
    for said in (
        "1: bad.txt: 3 wrong elements in 1 of 4 results, the first at 8 B, out of place",
        "2: cut.txt: error: rank <1> has gone",
        "2: cut.txt: the run did not end: its last lines are missing",
        "peers.json: gloo: no torch for <this>",
    ):
        assert f"FAILED {said}" in errors and said in "".join(Page(f"{top}</body></html>").words)
    assert "<h2>Failures</h2>" in top and "Nothing failed" not in text
    assert '<td class="wrong">3</td>' in text


def test_without_failures_it_says_so(files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert report.main([*map(str, files), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "index.html").read_text()
    assert "Nothing failed" in text and "Failures" not in text and not capsys.readouterr().err


def test_files_of_one_name_are_told_apart(tmp_path: Path):
    paths = [tmp_path / folder / "peers.json" for folder in ("x", "y")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(json.dumps(PEERS))
    assert report.main([*map(str, (*paths, paths[0])), "--out", str(tmp_path / "out")]) == 0
    assert len(list((tmp_path / "out").glob("*.png"))) == 6
    names = [name for name, _ in report.load([*paths, paths[0]]).peers]
    assert names == [str(paths[0]), str(paths[1]), f"{paths[0]} (2)"]


# --- plots ---------------------------------------------------------------------------------------------------


def test_the_plots_show_the_numbers_of_the_files(files: list[Path]):
    inputs = report.load(files)
    drawn = {plot.title: plot.series for plot in plots(inputs.runs, inputs.peers, None)}
    latency = drawn["latency"]
    assert latency["1: a.txt, out of place"] == ((8, 64), (2.0, 8.0))
    assert latency["1: a.txt, in place"] == ((8, 64), (4.0, 16.0))
    assert latency["2: b.txt, out of place"] == ((8, 64), (2.0, 4.0))
    assert drawn["bus bandwidth"]["1: a.txt, out of place"] == ((8, 64), (0.25, 1.5))
    for load in ("quiet", "one busy core"):
        assert drawn[f"all_reduce, 2 ranks, {load}"] == {
            "ours, plain": ((8, 64), (1.0, 4.0)),
            "ours, mapped": ((8,), (0.5,)),
            "Open MPI": ((8, 64), (2.0, 2.0)),
            "Gloo": ((8, 64), (9.0, 9.0)),
            "roofline": ((8, 64), (0.25, 2.0)),
        }


def test_spreads_missed_targets_and_the_roofline_are_drawn(files: list[Path]):
    inputs = report.load(files)
    bandwidth, _, quiet, _ = plots(inputs.runs, inputs.peers, 3.0)
    assert quiet.svg.count("fill-opacity: 0.18") == 2  # ours, plain, and Open MPI have more than one size
    assert ">misses its target</text>" in quiet.svg and ">roofline</text>" in quiet.svg
    assert ">roofline, 3 GB/s</text>" in bandwidth.svg


def test_a_run_has_one_colour_in_all_plots():
    """The second run lacks the first program; it keeps its colour."""
    runs = [
        ("a", run_of((8, 1.0, 1.0))),
        ("b", run_of((8, 2.0, 1.0), name="q")),
        ("c", run_of((8, 3.0, 2.0))),
    ]
    drawn = plots(runs, [], None)
    for plot in drawn:
        shown = [one for one in COLOURS if f"stroke: {one}" in plot.svg]
        assert shown == ([COLOURS[0], COLOURS[2]] if plot.section == "p" else [COLOURS[1]])
    assert len({colour(number) for number in range(40)}) == 40


def test_no_picture_takes_the_name_of_another():
    one = {**PEERS, "rows": PEERS["rows"][:1]}
    drawn = plots([], [("A b", one), ("a-b", one), ("a b", one)], None)
    assert [plot.file for plot in drawn] == [
        f"a-b-all_reduce-2-ranks-quiet{end}.png" for end in ("", "-2", "-3")
    ]
    titled = plots([("a", run_of((8, 1.0, 1.0))), ("b", run_of((8, 1.0, 1.0), name="P"))], [], None)
    assert len({plot.file for plot in titled}) == 4


# --- tables --------------------------------------------------------------------------------------------------


def test_pictures_of_an_earlier_report_go_and_other_files_stay(files: list[Path], tmp_path: Path):
    out = tmp_path / "out"
    assert report.main([*map(str, files), "--out", str(out)]) == 0
    mine = out / "my-own.png"
    mine.write_bytes(b"x")
    assert len(list(out.glob("*.png"))) == 5
    assert report.main([str(files[0]), "--out", str(out)]) == 0
    assert sorted(one.name for one in out.glob("*.png")) == [
        "all_reduce_perf-bus-bandwidth.png", "all_reduce_perf-latency.png", "my-own.png",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["../x.png", "/etc/x.png", "x.txt"])
def test_only_pictures_of_its_own_folder_can_be_named_by_a_page(name: str):
    assert pictures_of(f'<meta name="pynccl-pictures" content="{name} a-b.png">') == ["a-b.png"]


def test_the_real_run_is_in_the_table_whole():
    run = read(REAL)
    table = run_rows("alltoall_perf", [("real", run)])
    assert len(table.rows) == len(run.rows) == 48
    assert cells(table.rows[0]) == ["1,024", "out of place", "38.7", "0.02", "0"]
    assert table.caption == "alltoall_perf: all results (float)"
    assert cells(table.rows[-1])[2:] == ["193,528", "41.6", "N/A"]
    (_, facts), = measured([("real", run)], [], [])  # fmt: skip
    told = dict(facts)
    assert told["ranks"] == "16" and told["library"] == "NCCL 2.30.3" and told["average busbw"] == "21.0 GB/s"
    assert told["wrong elements"] == "0 (24 of 48 results checked)"
    assert told["machine"] == "node-1: 8 × NVIDIA Graphics Device; node-2: 8 × NVIDIA Graphics Device"


def test_inputs_tell_their_machine_versions_load_and_time():
    run = run_of(
        (8, 1.0, 1.0),
        when="2026-01-02 03:04:05",
        settings={"buffers": "plain", "hot": "true"},
        notes=("left out",),
    )
    shown = measured([("a", run)], [("p.json", PEERS)], [("o.json", OVERHEAD)])
    told = {name.text: dict(facts) for name, facts in shown}
    assert (
        told["1: a"]["when"] == "2026-01-02 03:04:05"
        and told["1: a"]["settings"] == "plain buffers; hot: true"
    )
    assert (
        told["p.json"]["machine"] == "a <script>, 2 cores, load 0.25"
        and told["p.json"]["Open MPI"] == "Open MPI 5"
    )
    assert told["p.json"]["roofline"] == "a C program with 64-byte vectors"
    old, new = (
        {"iters": "20", "warmup iters": "5", "agg iters": "1"},
        {"iterations": "20", "warmup_iters": "5"},
    )
    for settings in (old, new):
        (_, facts), = measured([("a", run_of((8, 1.0, 1.0), settings=settings))], [], [])  # fmt: skip
        assert dict(facts)["settings"] == "20 iterations; 5 to warm up"
    assert told["o.json"]["numpy"] == "2.0" and told["o.json"]["rounds"] == "21"
    assert told["o.json"]["when"] == "2026-01-02T03:04:05Z" and "cupy-cuda12x" not in told["o.json"]
    assert notes([("a", run)]) == [("1: a", "left out")]


def test_peers_are_counted_by_ranks_load_and_buffers():
    table = peer_summary(PEERS)
    assert [cells(row) for row in table.rows] == [
        ["2", load, buffers, *rest]
        for load in ("quiet", "one busy core")
        for buffers, *rest in (
            ("plain", "1 of 2", "0 of 1", "1 of 2", "2.000", "2.000", "0"),
            ("mapped", "1 of 1", "–", "1 of 1", "0.250", "0.250", "0"),
        )
    ]
    quiet, busy = peer_rows(PEERS)
    assert quiet.caption == "2 ranks, quiet: 3 cases, 1 miss a target" and busy.caption.startswith(
        "2 ranks, one busy"
    )
    assert quiet.rows[0][6] == Cell("2.00", "best") and quiet.rows[0][11] == Cell("met", "met")


def test_a_row_that_others_disturbed_counts_neither_as_met_nor_as_missed():
    rows = [{**row, "others": 0.48 if row["bytes"] == 64 else 0.05} for row in PEERS["rows"]]
    document = {**PEERS, "rows": rows}
    assert cells(peer_summary(document).rows[0]) == [
        "2", "quiet", "plain", "1 of 1", "–", "1 of 1", "0.500", "0.500", "1 of 2",
    ]  # fmt: skip
    quiet, _ = peer_rows(document)
    assert quiet.caption == "2 ranks, quiet: 3 cases, 0 miss a target; disturbed, not counted: 1"
    met, disturbed = quiet.rows[:2]
    assert met[5] == Cell("5") and met[11] == Cell("met", "met")
    assert disturbed[5] == Cell("48", "disturbed")
    assert disturbed[11] == disturbed[-1] == Cell("disturbed", "disturbed")
    said = disturbed_rows(document)
    assert said.startswith("Disturbed: 2 of 6 rows, in which other processes had more than 5%")
    assert "up to 48%" in said and "run again on a quiet machine" in said
    assert not disturbed_rows(PEERS)
    drawn, _ = plots([], [("p", document)], None)
    assert ">disturbed, not counted</text>" in drawn.svg and "misses its target" not in drawn.svg


def test_the_known_reason_of_a_miss_has_a_column():
    rows = [{**row, "why": "shared <caches>", "met": False, "ratio": 1.5} for row in PEERS["rows"]]
    table, _ = peer_rows({**PEERS, "rows": rows})
    assert table.heads[-1] == "known reason for rows of this kind" and table.rows[0][-1] == "shared <caches>"
    assert len(table.heads) == len(table.rows[0]) == sum(span for _, span in table.groups)


@pytest.mark.parametrize(
    "change", [{"ratio": 1.6}, {"others": 0.3}, {"load": "one busy core"}, {"met": True}]
)
def test_a_known_reason_is_not_told_where_it_cannot_explain(change: dict[str, Any]):
    row = {**PEERS["rows"][0], "why": "shared caches", "met": False, "ratio": 1.5}
    assert peer_rows({**PEERS, "rows": [row]})[0].heads[-1].startswith("known reason")
    assert peer_rows({**PEERS, "rows": [{**row, **change}]})[0].heads[-1] == "verdict"


def test_the_cost_of_a_call_counts_its_targets():
    calls, imports = overhead(OVERHEAD)
    assert calls.caption == "A call with the communication taken away: 0 of 1 targets met"
    assert cells(calls.rows[0]) == ["the C call", "0.100", "–", "0.000", "", ""]
    assert imports.caption == "The import: 1 of 1 targets met"


def test_a_run_without_results_or_with_bad_checks_has_failed():
    assert failures([("a", Run(program="p"))], []) == [("1: a", "no results")]
    bad = Run(program="p", rows=run_of((8, 1.0, 1.0)).rows, out_of_bounds=2)
    assert failures([("a", bad)], [("p", {**PEERS, "rows": []})]) == [
        ("1: a", "2 checks found wrong elements"),
        ("p", "no results"),
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (0, "0"),
        (0.001234, "0.00123"),
        (2.5, "2.50"),
        (12.34, "12.3"),
        (1234.5, "1,234"),
    ],
)
def test_numbers_have_three_digits_or_so(value: float | None, text: str):
    assert number(value) == text


# --- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, words",
    [
        ('{\n "a": 1,\n}', "bad.json, line 3: not JSON"),
        ('{"sides": {}, "rows": [{"op": "x"}]}', "bad.json: row 1 lacks ranks, bytes"),
        ('{"sides": {}, "rows": 3}', "bad.json: a list of rows was expected, not int"),
        (
            json.dumps({"sides": {}, "rows": [{**PEERS["rows"][0], "ours_us": "2"}]}),
            "bad.json: row 1: ours_us cannot be '2'",
        ),
        (json.dumps({**OVERHEAD, "imports": None}), "bad.json: a list of rows was expected, not NoneType"),
        ("no benchmark\n", "bad.json: no line of it is nccl-tests'"),
    ],
)
def test_a_bad_file_is_named(text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "bad.json"
    file.write_text(text)
    assert report.main([str(file), "--out", str(tmp_path / "out")]) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", ["0", "-1", "fast", "nan", "inf"])
def test_a_roofline_is_a_bandwidth(value: str, files: list[Path], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        report.main([str(files[0]), f"--roofline={value}"])
    assert f"'{value}' is no bandwidth: a number above 0, in GB/s" in capsys.readouterr().err


def test_without_matplotlib_it_says_what_to_install(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report.main([str(files[0]), "--out", str(tmp_path / "out")]) == 1
    assert "pip install 'pynccl-anywhere[bench]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("document, place", [(PEERS, "rows"), (OVERHEAD, "calls"), (OVERHEAD, "imports")])
@pytest.mark.parametrize("value", ["abc", [], {"a": 1}, True, 10**400, float("nan")])
def test_a_file_with_a_figure_of_another_kind_is_refused_in_one_sentence(
    document: dict[str, Any], place: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    broken = json.loads(json.dumps(document))
    row = broken[place][0]
    for key in [name for name in row if name.endswith(("_us", "_ms")) or name in ("us", "ratio", "spread")]:
        path = tmp_path / "broken.json"
        path.write_text(json.dumps(broken | {place: [row | {key: value}]}))
        if key == "spread" and value == []:
            continue
        assert report.main([str(path), "--out", str(tmp_path / "out")]) == 1, key
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and key in said and "broken.json" in said


@pytest.mark.parametrize("key, value", [("sides", None), ("sides", []), ("failures", 5), ("machine", "x")])
def test_a_file_with_a_part_of_another_kind_is_refused(
    key: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "broken.json").write_text(json.dumps(PEERS | {key: value}))
    assert report.main([str(tmp_path / "broken.json"), "--out", str(tmp_path / "out")]) == 1
    assert f"not as it is written here: {key} cannot be" in capsys.readouterr().err

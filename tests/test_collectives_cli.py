"""The command line of collectives: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import pynccl
from pynccl.collectives import IN, OUT, SCRATCH, Builder, Schedule, diagram, generate, verify
from pynccl.collectives.__main__ import main
from pynccl.collectives.diagram import LEGEND
from pynccl.collectives.msccl import from_msccl
from pynccl.collectives.options import sizes


def test_show_draws_and_proves(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "ring", "--ranks", "3"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("round  rank 0") and "proved, 24 steps in 4 rounds" in text
    assert f"\n{LEGEND}\n\nring all_reduce" in text


def test_the_legend_is_of_the_marks_that_a_drawing_has() -> None:
    """Each mark of the legend, drawn."""
    b = Builder("marks", "all_reduce", 3)
    b.copy(0, IN[0], OUT[0])
    b.reduce(0, SCRATCH[0], OUT[0])
    b.send(0, 1, IN[0])
    b.recv(0, 2, OUT[0])
    b.recv(0, 2, OUT[0], reduce=True)
    marks = set(diagram(b.build()).split())
    told = {word for word in LEGEND.replace(",", " ").replace(";", " ").split() if re.search(r"[>+=]", word)}
    assert told == {"i0>1", "2>o0", "2+o0", "o0=i0", "o0+s0"} <= marks


def test_show_prints_a_line_for_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "ring", "--ranks", "3", "--table", "-p", "channels=2"]) == 0
    text = capsys.readouterr().out
    assert "send in[0] to 1" in text and "on channel 1" in text
    assert "in[0], out[0], scratch[0]: chunks of these arrays, [2:4] is 2 and 3" in text


def test_show_gives_files_that_it_takes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = generate("ring", 4)
    for option, name, read in (
        ("--json", "ring.json", Schedule.from_json),
        ("--xml", "ring.xml", from_msccl),
    ):
        assert main(["show", "ring", option]) == 0
        file = tmp_path / name
        file.write_text(capsys.readouterr().out)
        assert read(file.read_text()).replace(params=schedule.params) == schedule
        assert main(["show", str(file)]) == 0
        assert "proved" in capsys.readouterr().out
        assert main(["cost", str(file)]) == 0
        assert "rounds     6" in capsys.readouterr().out
        assert main(["verify", str(file)]) == 0
        assert "1 schedules, 48 steps, 0 faults" in capsys.readouterr().out


def test_cost_prints_the_critical_path_and_writes_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    arguments = [
        "cost",
        "ring",
        "--ranks",
        "4",
        "--bytes",
        "1M",
        "--topology",
        "nodes:2",
        "--trace",
        str(trace),
    ]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "critical path" in text and "(network)" in text and "1048576 bytes, 2 nodes" in text
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("collective", "asked", "itemsize", "told"),
    [
        (
            "all_reduce",
            "3",
            "4",
            "0 bytes (3 rounded down to a multiple of 4: an element in each block), flat",
        ),
        (
            "all_reduce",
            "6",
            "4",
            "4 bytes (6 rounded down to a multiple of 4: an element in each block), flat",
        ),
        (
            "all_gather",
            "1K",
            "4",
            "1020 bytes (1024 rounded down to a multiple of 12: an element in each block)",
        ),
        ("all_gather", "12", "4", "12 bytes, flat"),
        ("all_reduce", "3", "1", "3 bytes, flat"),
    ],
)
def test_cost_says_when_it_rounds(
    collective: str, asked: str, itemsize: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["ring", "--ranks", "3", "--collective", collective, "--bytes", asked, "--itemsize", itemsize]
    assert main(["cost", *arguments]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"ring {collective}, 3 ranks, {told}")
    assert f"critical path of {told.split()[0]} bytes\n" in text
    assert main(["cost", *arguments, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["bytes"] == int(told.split()[0]) and found["asked"] == sizes(asked)[0]
    assert main(["compare", "--algorithms", *arguments]) == 0
    line = f"{found['asked']} bytes were rounded down to {found['bytes']}, a multiple of {found['unit']}:"
    assert (line in capsys.readouterr().out) == ("rounded" in told)


def test_cost_says_when_it_shows_the_end_of_a_path_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", "ring", "--ranks", "64", "--bytes", "1K,4K"]) == 0
    text = capsys.readouterr().out
    head, path = text.split("  critical path of 4096 bytes, the last 40 of ")
    assert int(path.split()[0]) > 40 and path.count(" round ") == 40


def test_the_trace_has_elements_of_the_size_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    ends = {}
    for itemsize in ("4", "1"):
        arguments = ["--ranks", "2", "--bytes", "2", "--itemsize", itemsize, "--trace", str(trace)]
        assert main(["cost", "ring", *arguments]) == 0
        assert f"wrote {trace}, of 2 bytes" in capsys.readouterr().err
        ends[itemsize] = sorted(event.get("dur", 0) for event in json.loads(trace.read_text())["traceEvents"])
    assert ends["4"] != ends["1"]  # nothing to send, and two bytes


def test_a_reader_that_leaves_is_no_error_of_its_own() -> None:
    command = [sys.executable, "-m", "pynccl.collectives", "show", "ring", "--ranks", "64", "--table"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as shown:
        assert shown.stdout is not None and shown.stderr is not None
        shown.stdout.close()
        assert shown.stderr.read() == b"" and shown.wait(60) == 128 + 13


def test_compare_marks_the_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--algorithms", "ring", "--ranks", "64", "--bytes", "1K,1M"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and all(line.endswith("*") for line in lines[2:4])
    assert lines[3].split()[:3] == ["ring", "1048576", "126"]


def test_algorithms_may_be_written_as_calls_write_them(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["show"], ["cost"], ["verify", "--ranks", "2"], ["compare", "--algorithms"]):
        seen = []
        for name in ("ring", "pynccl:ring"):
            assert main([*command, name]) == 0
            seen.append(re.sub(r"[\d.]+ s\n", "", capsys.readouterr().out))
        assert seen[0] == seen[1]


def test_compare_as_json_gives_all_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--ranks", "8", "--bytes", "1K,1M", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["bytes"] for row in rows} == {1024, 1 << 20}
    assert {row["name"] for row in rows} >= {"ring"}


def test_compare_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "times.png"
    assert main(["compare", "--algorithms", "ring", "--ranks", "4", "--png", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_verify_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = ["verify", "ring", "--collective", "all_reduce", "--ranks", "1-4,7", "--json", str(out)]
    assert main([*arguments, "--mutations", "20", "--seed", "0"]) == 0
    text = capsys.readouterr().out
    assert "15 schedules proved" in text and "0 faults" in text and "20 of 20 mutants caught" in text
    found = json.loads(out.read_text())
    assert found["proved"] == {"all_reduce ring": 15} and found["faults"] == []
    assert found["mutants"]["wrong"] == found["mutants"]["caught"] == 20 and found["mutants"]["missed"] == []


def test_a_fault_is_printed_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    b = Builder("bad", "broadcast", 2)
    b.copy(0, IN[0], OUT[0])
    file = tmp_path / "bad.json"
    file.write_text(b.build().to_json())
    assert main(["verify", str(file)]) == 1
    assert "fault: bad broadcast of 2 ranks: in the end out[0] of rank 1 is never" in capsys.readouterr().out
    assert main(["show", str(file)]) == 1
    assert "is never written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "rign"], "all_reduce has no algorithm 'rign'"),
        (["verify", "rign"], "no algorithm rign"),
        (["verify"], "no algorithm named"),
        (["show", "missing.json"], "missing.json"),
        (["cost", "ring", "--topology", "torus"], "write flat, nodes:8"),
        (["show", "ring", "--ranks", "0"], "take 1 or more"),
    ],
)
def test_wrong_arguments_are_refused_in_words(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cost", "ring", "--bytes", "1X"], "'1X' is no size"),
        (["verify", "--all", "--ranks", "a-b"], "is no number or range"),
        (["verify", "--all", "--ranks", "1-99999999999"], "'1-99999999999' are too many numbers; take"),
        (["show", "ring", "-p", "channels"], "write name=value"),
    ],
)
def test_arguments_that_cannot_be_read_are_refused_in_words(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert words in capsys.readouterr().err


def test_selftest_is_handed_on_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    execute = types.ModuleType("pynccl.collectives.execute")

    def selftest(arguments: list[str]) -> int:
        seen.append(arguments)
        return 3

    execute.selftest = selftest  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynccl.collectives.execute", execute)
    assert main(["selftest", "--quick"]) == 3 and seen == [["--quick"]]


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "pynccl.collectives", "show", "ring", "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "proved" in done.stdout


def test_the_module_s_proof_is_that_of_verify(capsys: pytest.CaptureFixture[str]) -> None:
    main(["show", "ring", "--ranks", "5"])
    assert capsys.readouterr().out.endswith(f"{verify(generate('ring', 5))}\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["selftest", "--algorithms", "nosuch"], "no algorithm 'nosuch'; there are ring"),
        (["selftest", "--algorithms", "bruck", "--collective", "reduce"], "reduce has no algorithm 'bruck'"),
        (["selftest", "--dtypes", "foo"], "dtype='foo' is no dtype"),
        (["selftest", "--counts", "1,x"], "'x' is no number"),
        (["selftest", "--json", "/nodir/x"], "has no directory '/nodir'"),
        (["tune", "--candidates", "nosuch"], "no algorithm 'nosuch'"),
        (["tune", "--candidates", "tree"], "reduce_scatter has no algorithm tree"),
        (["tune", "--collectives", "foo"], "no collective 'foo'"),
        (["tune", "--repeats", "0"], "take a whole number, 1 or more"),
        (["tune", "--sizes", "1X"], "'1X' is no size"),
        (["tune", "--sizes", "2"], "take 4 or more"),
        (["tune", "--out", "/nodir/x"], "has no directory '/nodir'"),
        (["tune", "--out", "/"], "is a directory"),
        (["verify", "ring", "--ranks", "3-1"], "'3-1' is empty; write 1-3"),
        (["verify", "ring", "--ranks", "0-2"], "--ranks 0; take 1 or more"),
        (["cost", "ring", "--itemsize", "0"], "'0': take a whole number, 1 or more"),
        (["cost", "ring", "--itemsize", "9" * 30], "take 1152921504606846976 at most"),
        (["cost", "ring", "--bytes", "9" * 30], "is too much; take 1152921504606846976 bytes at most"),
        (["cost", "ring", "--topology", "nodes:" + "9" * 20], "ranks, and there are "),
        (["show", "ring", "-p", "n=3"], "n is --ranks"),
        (["show", "ring", "-p", "chanels=2"], "no parameter 'chanels'; it has channels (int, otherwise 1)"),
        (["show", "ring", "-p", "channels=x"], "channels='x'; it has channels (int"),
        (["show", "binomial", "-p", "k=1"], "it has no parameters"),
        (["show", "hierarchical", "-p", "ranks_per_node=x"], "it has ranks_per_node (int | Sequence[int]"),
        (["show", "ring", "--collective", "reduce", "-p", "root=1.5"], "root=1.5"),
    ],
)
def test_nothing_is_started_with_a_wrong_argument(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pynccl, "init", lambda: pytest.fail("it was started"))
    try:
        status = main(arguments)
    except SystemExit as error:
        status = error.code  # type: ignore[assignment]
    assert status == 2 and words in capsys.readouterr().err


def test_compare_takes_files_of_schedules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, other = tmp_path / "mine.json", tmp_path / "other.json"
    mine.write_text(generate("ring", 3).to_json())
    other.write_text(generate("ring", 3, collective="all_gather").to_json())
    assert main(["compare", "--algorithms", f"{mine},direct"]) == 0
    title, header, first, second, legend = capsys.readouterr().out.splitlines()
    assert title.startswith("all_reduce, 3 ranks, flat") and header.split()[:3] == [
        "algorithm",
        "bytes",
        "rounds",
    ]
    assert first.split()[:3] == [str(mine), "1048576", "4"] and second.split()[0] == "direct"
    assert "bytes of the rank that has most" in legend and "*: fastest" in legend
    assert main(["compare", "--algorithms", f"{mine},direct", "--ranks", "5"]) == 2
    assert "is a schedule of 3 ranks, not of 5" in capsys.readouterr().err
    assert main(["compare", "--algorithms", f"{mine},{other}"]) == 2
    assert "other.json is all_gather of 3 ranks, compared is all_reduce of 3" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["show", "cost"])
def test_a_file_s_ranks_are_its_own(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ring.json"
    file.write_text(generate("ring", 3).to_json())
    assert main([command, str(file)]) == main([command, str(file), "--ranks", "3"]) == 0
    assert main([command, str(file), "--ranks", "9"]) == 2
    assert "is a schedule of 3 ranks, not of 9; leave out --ranks" in capsys.readouterr().err
    assert main([command, str(file), "-p", "channels=2"]) == 2
    assert "a file has no parameters" in capsys.readouterr().err

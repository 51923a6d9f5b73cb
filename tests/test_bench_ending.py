"""Runs that end early: what was measured is in the files, all ranks end, and the exit status says how."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import pynccl
from bench import algorithms_perf, call_overhead, peers, train_step
from bench.ending import Terminated, limited, terminated_by_signals
from bench.files import Rewritten, write_whole
from bench.parse import ParseError, read
from bench.runner import main

PROGRAM = "all_reduce_perf"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def host_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYNCCL_LIBRARY", "host")


class Started:
    """A sweep without end (-N 0), of which at least three rows are printed."""

    def __init__(self, repo: Path, folder: Path, ranks: str) -> None:
        self.json, self.csv = folder / "out.json", folder / "out.csv"
        words = f"-b 8 -e 64 -f 2 -n 2 -N 0 {ranks} -J {self.json} --csv {self.csv}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"bench.{PROGRAM}", *words.split()],
            env={**os.environ, "PYTHONPATH": str(repo)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.pids, rows = [], 0
        while rows < 3:
            line = self.process.stdout.readline()
            assert line, self.process.communicate()
            if match := re.match(r"#  Rank +\d+ Group +\d+ Pid +(\d+)", line):
                self.pids.append(int(match[1]))
            rows += bool(re.match(r" +\d+ +\d+ ", line))

    def end(self) -> tuple[int, str]:
        """The exit status, and what was on stderr."""
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@contextmanager
def started(repo: Path, folder: Path, ranks: str) -> Iterator[Started]:
    sweep = Started(repo, folder, ranks)
    try:
        yield sweep
    finally:
        sweep.process.kill()
        sweep.process.communicate()


@pytest.mark.parametrize("ranks", ["-g 2", "-t 2", "-g 1"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_sweep_whose_files_say_so(ranks: str, number: int, repo: Path, tmp_path: Path):
    with started(repo, tmp_path, ranks) as sweep:
        sweep.process.send_signal(number)
        assert sweep.end() == (128 + number, "")
        run = read(sweep.json)
        said = f"ended by {signal.Signals(number).name}"
        assert len(run.rows) >= 6 and run.errors == (said, "the run did not end: its last lines are missing")
        assert len(read(sweep.csv).rows) >= len(run.rows) - 2


@pytest.mark.parametrize("victim", ["a rank", "the first rank", "the launcher"])
def test_finished_rows_outlive_a_kill(victim: str, repo: Path, tmp_path: Path):
    with started(repo, tmp_path, "-g 2") as sweep:
        launcher, (first, other) = sweep.process.pid, sweep.pids
        os.kill({"a rank": other, "the first rank": first, "the launcher": launcher}[victim], signal.SIGKILL)
        status, errors = sweep.end()
        assert status == (-signal.SIGKILL if victim == "the launcher" else 128 + signal.SIGKILL)
        if victim != "the launcher":
            number = 1 if victim == "a rank" else 0
            assert f"pynccl.launch: rank {number} ended with signal 9 (SIGKILL)" in errors
        run = read(sweep.json)
        assert len(run.rows) >= 6 and not run.good
        with sweep.csv.open(newline="") as table:
            rows = list(csv.DictReader(table))
        assert len(rows) >= 6 and all(row["wrong"] == "0" for row in rows)


@pytest.mark.parametrize("ranks", ["-g 1", "-g 2"])
def test_the_reader_of_the_text_may_leave(ranks: str, repo: Path, tmp_path: Path):
    with started(repo, tmp_path, ranks) as sweep:
        assert sweep.process.stdout is not None
        sweep.process.stdout.close()
        sweep.process.stdout = None
        status, errors = sweep.end()
        assert status == 128 + signal.SIGPIPE and errors == ""
        run = read(sweep.json)
        assert len(run.rows) >= 6
        assert run.errors[0] == "ended by the reader of its output, which had gone"


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), terminated_by_signals():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


# ---- files


def test_a_file_is_replaced_whole(tmp_path: Path):
    file = tmp_path / "out.json"
    write_whole(file, "one")
    before = file.open()  # who reads the old text has all of it
    write_whole(file, "the other")
    assert before.read() == "one" and file.read_text() == "the other"
    before.close()
    assert [one.name for one in tmp_path.iterdir()] == ["out.json"]


def test_what_cannot_be_written_leaves_the_file_as_it_was(tmp_path: Path):
    file = Rewritten(str(tmp_path / "out.json"))
    file.write("one")
    with pytest.raises(UnicodeEncodeError):
        file.write("\ud800")
    assert file.path.read_text() == "one" and len(list(tmp_path.iterdir())) == 1


FOLDER_MISSING = "there is no folder {}/nowhere; make it first (mkdir -p {}/nowhere)"


@pytest.mark.parametrize("option, name", [("-J", "out.json"), ("--csv", "out.csv")])
@pytest.mark.parametrize("ranks", [("-t", "2"), ("-g", "2")])
def test_a_sweep_whose_file_has_no_folder_never_starts(
    option: str, name: str, ranks: tuple[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    file = tmp_path / "nowhere" / name
    assert main(PROGRAM, ["-b", "8", "-e", "8", *ranks, option, str(file)]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == f"{PROGRAM}: {option} {file}: {FOLDER_MISSING.format(tmp_path, tmp_path)}\n"


@pytest.mark.parametrize("program", [peers, call_overhead, train_step, algorithms_perf])
def test_it_is_the_same_for_every_program(program: object, tmp_path: Path, capsys: Capture):
    file = tmp_path / "nowhere" / "out.json"
    assert program.main(["--json", str(file)]) == 2  # type: ignore[attr-defined]
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert f"--json {file}: {FOLDER_MISSING.format(tmp_path, tmp_path)}" in captured.err
    assert program.main(["--json", str(tmp_path)]) == 2  # type: ignore[attr-defined]
    assert "that is a folder; give the name of a file in it" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_file_is_called_empty(text: str, tmp_path: Path):
    file = tmp_path / "out.json"
    file.write_text(text)
    with pytest.raises(ParseError, match=r"out\.json is empty: the run that was to write it ended"):
        read(file)


# ---- misuse is said once, before anything starts


@pytest.mark.parametrize(
    "program, line, said",
    [
        ("reduce_perf", "-g 3 -r 5", "-r 5: the ranks are 0 to 2"),
        ("reduce_perf", "-t 2 -g 2 -r 4", "-r 4: the ranks are 0 to 3"),
        ("all_reduce_perf", "-g 2 --library /none/lib.so", "--library /none/lib.so: there is no such file"),
        ("all_reduce_perf", "-g 2 -D 1", "-D 1 (--device_implementation): device-side kernels are CUDA code"),
    ],
)
def test_misuse_is_said_once(program: str, line: str, said: str, capfd: pytest.CaptureFixture[str]):
    assert main(program, ["-b", "8", "-e", "8", *line.split()]) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and said in captured.err
    assert "run on GPUs" not in captured.err  # where none of these would be any better


def test_a_root_is_one_of_the_ranks_of_the_smallest_group(monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    monkeypatch.setenv("NCCL_TESTS_SPLIT", "MOD 2")
    assert main("reduce_perf", "-g 5 -r 2 -b 8 -e 8".split()) == 2
    assert "-r 2: the ranks are 0 to 1" in capsys.readouterr().err


def test_too_little_bandwidth_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("NCCL_TESTS_MIN_BW", "1e9")
    assert main(PROGRAM, "-b 8 -e 8 -g 2 -n 2".split()) == 1
    captured = capfd.readouterr()
    assert re.search(r"# Avg bus bandwidth    : \S+ FAILED\n", captured.out) and captured.err == ""


# ---- time


def test_what_takes_too_long_is_aborted_and_called_a_time_out():
    aborted = threading.Event()
    with pytest.raises(pynccl.NcclTimeoutError, match=r"it took longer than -T 0\.01 s"):
        with limited(0.01, aborted.set, "it"):
            aborted.wait()


def test_an_error_in_time_stays_what_it_is():
    with pytest.raises(pynccl.InvalidUsageError), limited(3600, lambda: None, "it"):
        raise pynccl.InvalidUsageError("stumbled")


def test_without_a_limit_there_is_none():
    with limited(0, pytest.fail, "it"):
        pass


@pytest.mark.parametrize("ranks", ["-g 2", "-t 2"])
def test_a_long_measurement_ends_at_its_limit_on_every_rank(
    ranks: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """Each of its calls is short: only together they are too long."""
    file = tmp_path / "out.json"
    line = f"-b 16M -e 16M -n 100000 -T 1 {ranks} -J {file}"
    assert main(PROGRAM, line.split()) == 1
    said = "a measurement at 16777216 bytes took longer than -T 1 s"
    errors = capfd.readouterr().err.splitlines()
    assert errors and all(line.startswith(f"{PROGRAM}: {said}") for line in errors)
    document = json.loads(file.read_text())
    assert document["errors"][0].startswith(f"NcclTimeoutError: {said}") and document["results"] == []

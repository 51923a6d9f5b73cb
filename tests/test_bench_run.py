"""The program end to end on real ranks: right data passes, wrong data fails, and both are said."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pynccl
from bench.collectives import COLLECTIVES
from bench.options import DTYPES, OPS
from bench.runner import main
from pynccl.abi import Gpus

PROGRAM = "all_reduce_perf"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def host_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYNCCL_LIBRARY", "host")


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if re.match(r" *\d", line)]


def run_processes(repo: Path, *arguments: str, status: int = 0, **variables: str) -> str:
    """The output of the program started as a user starts it."""
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{PROGRAM}", *arguments],
        cwd=repo,
        env={**os.environ, "PYTHONPATH": str(repo), **variables},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def break_the_call(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any, Any], None]) -> None:
    """Make the operation end with `spoil(comm, result)`."""
    row = COLLECTIVES[PROGRAM]

    def call(comm: Any, case: Any, layout: Any, x: Any, out: Any, *rest: Any) -> Callable[[], Any]:
        right = row.call(comm, case, layout, x, out, *rest)

        def spoilt() -> None:
            right()
            spoil(comm, x if out is None else out)

        return spoilt

    monkeypatch.setitem(COLLECTIVES, PROGRAM, dataclasses.replace(row, call=call))


def test_processes_that_the_program_starts_itself(repo: Path, tmp_path: Path):
    file = tmp_path / "out.json"
    text = run_processes(repo, *"-b 8 -e 64K -f 8 -g 3 -n 3 -J".split(), str(file))
    lines = text.splitlines()
    assert lines[0] == f"# Writing JSON output to {file}"
    assert lines[3].startswith("# nThread 1 nGpus 3 minBytes 8 maxBytes 65536 step: 8(factor) ")
    devices = [line for line in lines if re.match(r"#  Rank +\d", line)]
    assert [line.split()[2] for line in devices] == ["0", "1", "2"]
    assert len({line.split()[6] for line in devices}) == 3  # three processes
    table = rows(text)
    assert [row[0] for row in table] == ["8", "64", "512", "4096", "32768"]
    assert {row[8] for row in table} == {row[12] for row in table} == {"0"}
    assert "# Out of bounds values : 0 OK" in lines
    document = json.loads(file.read_text())
    assert len(document["results"]) == 5 and document["errors"] == []
    assert [one["rank"] for one in document["config"]["devices"]] == [0, 1, 2]
    assert document["pynccl"]["library"] == "host"


def test_every_type_with_every_operation_between_threads(capsys: Capture):
    assert main(PROGRAM, "-d all -o all -e 4K -t 3 -n 2".split()) == 0
    table = rows(capsys.readouterr().out)
    assert [(row[2], row[3]) for row in table] == [(dtype, op) for dtype in DTYPES for op in OPS]
    assert {row[8] for row in table} == {row[12] for row in table} == {"0"}


@pytest.mark.parametrize(
    "line",
    [
        "-b 0 -e 64 -i 32",  # no elements at all
        "-b 3 -e 3 -d double",  # fewer bytes than one element
        "-m 4 -n 2",
        "-z 1 -N 2",
        "-z 3 -C 1 -a 3",
        "-u 1 -d half",
        "-R 1",
        "-R 2",
        "-I 1 -K 1 -S 1",
        "--buffers plain -y 1 -p 1 -T 60",
    ],
)
def test_options_keep_the_data_right(line: str, capsys: Capture):
    sizes = "" if "-b" in line.split() else "-b 8 -e 4K -f 16"
    assert main(PROGRAM, f"-t 2 -n 3 {sizes} {line}".split()) == 0
    table = rows(capsys.readouterr().out)
    assert table and all(row[8] == "0" for row in table)


@pytest.mark.parametrize("place", ["first", "last"])
def test_one_wrong_bit_on_one_rank_is_counted_and_fails(
    place: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
):
    def flip(comm: Any, result: Any) -> None:
        if comm.rank == 1:
            result.view("uint8")[0 if place == "first" else -1] ^= 1

    break_the_call(monkeypatch, flip)
    assert main(PROGRAM, "-b 4K -e 4K -t 2 -n 1".split()) == 1
    captured = capsys.readouterr().out
    (row,) = rows(captured)
    assert row[8] == row[12] == "1"
    assert "# Out of bounds values : 2 FAILED" in captured


def test_a_call_that_does_nothing_is_all_wrong(capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    nothing = dataclasses.replace(COLLECTIVES[PROGRAM], call=lambda *arguments: lambda: None)
    monkeypatch.setitem(COLLECTIVES, PROGRAM, nothing)
    assert main(PROGRAM, "-b 4K -e 4K -t 2 -n 1 -o max -d int32".split()) == 1
    (row,) = rows(capsys.readouterr().out)
    assert (
        row[8] == "2048"
    )  # the poison is no result; in place, where the input stays, the larger rank is right
    assert 500 < int(row[12]) < 1500


def test_no_check_is_not_applicable_rather_than_zero(capsys: Capture):
    assert main(PROGRAM, "-b 8 -e 8 -t 2 -n 1 -c 0".split()) == 0
    (row,) = rows(capsys.readouterr().out)
    assert row[8] == row[12] == "N/A"


@pytest.mark.parametrize(("least", "status", "said"), [("1e-9", 0, "OK"), ("1e9", 1, "FAILED")])
def test_too_little_bandwidth_is_a_failure(
    least: str, status: int, said: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NCCL_TESTS_MIN_BW", least)
    assert main(PROGRAM, "-b 4K -e 4K -t 2 -n 2".split()) == status
    assert re.search(rf"# Avg bus bandwidth    : \S+ {said}\n", capsys.readouterr().out)


def test_groups_of_processes_sweep_on_their_own(repo: Path):
    text = run_processes(repo, *"-b 64 -e 64 -g 4 -n 2".split(), NCCL_TESTS_SPLIT="MOD 2")
    groups = [line.split()[4] for line in text.splitlines() if re.match(r"#  Rank +\d", line)]
    assert groups == ["0", "1", "0", "1"]
    (row,) = rows(text)
    assert row[8] == row[12] == "0"


def test_inside_a_launcher_it_starts_no_ranks_of_its_own(repo: Path):
    line = f"-n 2 -m bench.{PROGRAM} -b 64 -e 64 -n 2"
    done = subprocess.run(
        [sys.executable, "-m", "pynccl.launch", *line.split()],
        cwd=repo,
        env={**os.environ, "PYTHONPATH": str(repo)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"#  Rank +\d", done.stdout)) == 2
    assert "# Out of bounds values : 0 OK" in done.stdout


def test_what_the_host_library_cannot_do_is_misuse(capsys: Capture):
    assert main(PROGRAM, "-b 8 -e 8 -G 2".split()) == 2
    assert "-G 2 (--cudagraph): a CUDA graph needs a GPU" in capsys.readouterr().err


def test_no_gpu_for_nvidias_library_is_said_before_any_rank_starts(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("bench.devices.gpus", lambda: Gpus((), "no driver"))
    assert main(PROGRAM, "-b 8 -e 8 -g 2 --library nccl".split()) == 2
    assert "no GPU is usable (no driver); --library host runs" in capsys.readouterr().err


def test_an_error_of_a_rank_ends_all_threads_and_is_said(capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    def fail(comm: Any, result: Any) -> None:
        if comm.rank == 1:
            raise pynccl.InvalidUsageError("rank 1 stumbled")

    break_the_call(monkeypatch, fail)
    assert main(PROGRAM, "-b 8 -e 8 -t 2 -n 1".split()) == 1
    assert "rank 1 stumbled" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize(
    "line", ["", "-d all -o all", "-G 2", "-I 1 -K 1", "-M 1", "-y 1", "-R 1", "-m 2 -T 60"]
)
def test_the_same_sweep_on_gpus(line: str, repo: Path):
    text = run_processes(
        repo, *f"-b 8 -e 4K -f 16 -g 2 -n 3 --library nccl {line}".split(), PYNCCL_LIBRARY="nccl"
    )
    table = rows(text)
    assert len(table) >= 3 and {row[8] for row in table} == {"0"}
    assert "# Out of bounds values : 0 OK" in text

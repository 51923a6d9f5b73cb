"""The eleven programs: their counts and bandwidths are nccl-tests', and each one's check finds wrong data."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import calls
from bench.__main__ import main as list_or_run
from bench.__main__ import programs
from bench.collectives import COLLECTIVES, Case, Layout
from bench.parse import Run, read
from bench.runner import main
from bench.trial import rotation_bytes

Capture = pytest.CaptureFixture[str]
K, M = 1024, 1024**2

ROOTED = ("broadcast_perf", "reduce_perf", "gather_perf", "scatter_perf")
REDUCING = ("all_reduce_perf", "reduce_scatter_perf", "reduce_perf")
NOT_IN_PLACE = ("alltoall_perf", "alltoallv_perf", "sendrecv_perf")
ON_ROOT_ONLY = ("reduce_perf", "gather_perf")


@pytest.fixture(autouse=True)
def host_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYNCCL_LIBRARY", "host")


def sweep(program: str, line: str, capsys: Capture, status: int = 0) -> Run:
    assert main(program, line.split()) == status
    return read(capsys.readouterr().out)


def spoil(monkeypatch: pytest.MonkeyPatch, program: str, change: Callable[[int, Any, Any], None]) -> None:
    """Let the operation of the program end with `change(rank, x, out)`; in place both may be one array."""
    row = COLLECTIVES[program]

    def call(comm: Any, case: Any, layout: Any, x: Any, out: Any, *rest: Any) -> Callable[[], Any]:
        right = row.call(comm, case, layout, x, out, *rest)

        def spoilt() -> None:
            right()
            change(comm.rank, x, x if out is None else out)

        return spoilt

    monkeypatch.setitem(COLLECTIVES, program, dataclasses.replace(row, call=call))


# ---- pure functions


def test_there_are_eleven_programs_each_with_its_file():
    assert len(COLLECTIVES) == 11
    assert set(COLLECTIVES) <= set(programs())
    assert {name for name, row in COLLECTIVES.items() if row.rooted} == set(ROOTED)
    assert {name for name, row in COLLECTIVES.items() if row.reduces} == set(REDUCING)


# Of 1000 elements over 3 ranks: 333 each, of which 332 floats or 332 doubles or 320 bytes are whole 16 bytes.
@pytest.mark.parametrize(
    ("dtype", "share"), [("float", 332), ("double", 332), ("half", 328), ("int8", 320), ("f8e4m3", 320)]
)
def test_counts_are_those_of_nccl_tests(dtype: str, share: int):
    case = Case("sum", dtype, 0, 3)
    whole, all_of_it = Layout(1000, 1000, 1000), 3 * share
    gathered = Layout(share, all_of_it, share, send_at=share)
    scattered = Layout(all_of_it, share, share, recv_at=share)
    expected = {
        "all_reduce_perf": whole,
        "broadcast_perf": whole,
        "reduce_perf": whole,
        "sendrecv_perf": whole,
        "all_gather_perf": gathered,
        "gather_perf": gathered,
        "hypercube_perf": gathered,
        "reduce_scatter_perf": scattered,
        "scatter_perf": scattered,
        "alltoall_perf": Layout(all_of_it, all_of_it, share),
    }
    for program, layout in expected.items():
        assert COLLECTIVES[program].layout(case, 1000) == layout, program


def test_bandwidths_are_those_of_nccl_tests():
    """Of 16 elements of 4 bytes on 4 ranks, 4 each where they are divided: what is moved, and the factor."""
    case = Case("sum", "float", 0, 4)
    found = {}
    for program, row in COLLECTIVES.items():
        found[program] = (row.bandwidth.moved(case, row.layout(case, 16)), row.bandwidth.factor(4))
    whole, divided = (64, 1.0), (64, 0.75)
    assert found == {
        "all_reduce_perf": (64, 1.5),
        "all_gather_perf": divided,
        "reduce_scatter_perf": divided,
        "broadcast_perf": whole,
        "reduce_perf": whole,
        "alltoall_perf": divided,
        "alltoallv_perf": (0 + 0 + 16 + 32, 0.75),  # 0, 10.7, 21.3 and 32 bytes to the four, in whole 16
        "gather_perf": divided,
        "scatter_perf": divided,
        "sendrecv_perf": whole,
        "hypercube_perf": (48, 1.0),
    }


def test_buffers_rotate_through_more_than_a_small_size():
    assert rotation_bytes(4 * K, calls=20, hot=False) == 20 * 4 * K
    assert rotation_bytes(8, calls=20, hot=False) == 20 * 128
    assert rotation_bytes(4 * M, calls=20, hot=False) == 32 * M
    assert rotation_bytes(64 * M, calls=20, hot=False) == 64 * M
    assert rotation_bytes(4 * K, calls=20, hot=True) == 4 * K


@pytest.mark.parametrize(
    ("line", "pieces"), [("-n 6", 6), ("-n 3 -m 2", 6), ("-n 6 --hot 1", 1), ("-b 0 -e 0", 1)]
)
def test_every_timed_call_has_a_piece_of_its_own_unless_it_is_to_be_hot(
    line: str, pieces: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch
):
    addresses: dict[int, set[int]] = {0: set(), 1: set()}

    def note(rank: int, x: Any, out: Any) -> None:
        addresses[rank].add(out.ctypes.data)

    spoil(monkeypatch, "broadcast_perf", note)
    # Not in place alone: both placements use the same receive buffer.
    sweep("broadcast_perf", f"-b 4K -e 4K -t 2 -c 0 -w 0 {line}", capsys)
    assert [len(each) for each in addresses.values()] == [pieces, pieces]


# ---- right data


@pytest.mark.parametrize("program", COLLECTIVES)
def test_every_type_operation_and_root_is_right(program: str, capsys: Capture):
    ranks = 4 if program == "hypercube_perf" else 3
    run = sweep(program, f"-b 8 -e 4K -f 512 -t {ranks} -n 2 -d all -o all -r all", capsys)
    assert run.good and run.ranks == ranks
    out = [row for row in run.rows if not row.in_place]
    ops, roots = 6 if program in REDUCING else 1, ranks if program in ROOTED else 1
    assert len(out) == 2 * 12 * ops * roots
    assert len({row.type for row in out}) == 12
    assert {row.root for row in out} == (set(range(ranks)) if program in ROOTED else {-1})
    assert {"none"} == {row.redop for row in out} or program in REDUCING
    assert {row.wrong for row in out} == {0}
    assert {row.wrong for row in run.rows if row.in_place} == ({None} if program in NOT_IN_PLACE else {0})


@pytest.mark.parametrize(
    "line", ["-m 3 -n 2", "-z 1", "-u 3 -R 1", "-R 2 -I 1", "--buffers plain --hot 1", "-t 1"]
)
@pytest.mark.parametrize("program", ["all_gather_perf", "sendrecv_perf", "hypercube_perf", "scatter_perf"])
def test_options_keep_the_data_right(program: str, line: str, capsys: Capture):
    run = sweep(program, f"-t 2 -b 8 -e 2K -f 16 -n 2 {line}", capsys)
    assert run.good and len(run.rows) == 6


@pytest.mark.parametrize("program", ["reduce_scatter_perf", "alltoallv_perf", "gather_perf"])
def test_the_same_between_processes(program: str, repo: Path):
    done = subprocess.run(
        [sys.executable, "-m", "bench", program, *"-b 8 -e 64K -f 8 -g 3 -n 2 -r all".split()],
        cwd=repo,
        env={**os.environ, "PYTHONPATH": str(repo)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = read(done.stdout)
    assert run.good and len({one.pid for one in run.devices}) == 3
    assert len(run.rows) == 2 * 5 * (3 if program in ROOTED else 1)


def test_hypercube_says_that_it_needs_a_power_of_two(capsys: Capture, tmp_path: Path):
    run = sweep("hypercube_perf", f"-b 8 -e 64 -f 8 -t 3 -J {tmp_path}/out.json", capsys)
    assert run.rows == () and run.notes == ("nRanks 3 is not a power of 2, skipping",)
    assert read(tmp_path / "out.json").notes == run.notes


# ---- wrong data: the checks can fail


@pytest.mark.parametrize("program", COLLECTIVES)
@pytest.mark.parametrize("place", [0, -1])
def test_one_wrong_bit_on_one_rank_is_counted_and_fails(
    program: str, place: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch
):
    rank = 1 if program not in ON_ROOT_ONLY else 0

    def flip(of_rank: int, x: Any, out: Any) -> None:
        if of_rank == rank:
            out.view("uint8")[place] ^= 1

    spoil(monkeypatch, program, flip)
    run = sweep(program, "-b 4K -e 4K -t 2 -n 1", capsys, status=1)
    assert [row.wrong for row in run.rows] == [1, None if program in NOT_IN_PLACE else 1]
    assert run.out_of_bounds == (1 if program in NOT_IN_PLACE else 2) and not run.good


@pytest.mark.parametrize("program", COLLECTIVES)
def test_a_call_that_does_nothing_is_all_wrong(
    program: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
):
    row = COLLECTIVES[program]
    monkeypatch.setitem(COLLECTIVES, program, dataclasses.replace(row, call=lambda *arguments: lambda: None))
    run = sweep(program, "-b 4K -e 4K -t 2 -n 1 -d int32", capsys, status=1)
    received = row.layout(Case("sum", "int32", 0, 2), K).recv * (1 if program in ON_ROOT_ONLY else 2)
    assert run.rows[0].wrong == received  # the poison is no result
    in_place = run.rows[1].wrong
    if in_place is not None:  # there, one's own data may already lie where it belongs
        assert 0.2 * received <= in_place <= received


@pytest.mark.parametrize("program", ON_ROOT_ONLY)
def test_what_is_written_where_nothing_is_received_is_wrong(
    program: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
):
    def scribble(rank: int, x: Any, out: Any) -> None:
        if rank == 1:
            out.view("uint8")[-8:] = 7

    spoil(monkeypatch, program, scribble)
    run = sweep(program, "-b 4K -e 4K -t 2 -n 1 -d int32 -r 0", capsys, status=1)
    assert [row.wrong for row in run.rows] == [2, 2]


@pytest.mark.parametrize("program", [name for name in COLLECTIVES if name not in ON_ROOT_ONLY])
def test_what_is_written_over_the_input_or_behind_the_result_is_wrong(
    program: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
):
    def overwrite(rank: int, x: Any, out: Any) -> None:
        if rank == 1 and not np.shares_memory(x, out):
            x.view("uint8")[:4] ^= 0xFF

    def overrun(rank: int, x: Any, out: Any) -> None:
        if rank == 1 and not np.shares_memory(x, out):
            behind = np.lib.stride_tricks.as_strided(out.view("uint8"), (out.nbytes + 8,))
            behind[out.nbytes :] ^= 0xFF

    for fault, elements in ((overwrite, 1), (overrun, 2)):
        with monkeypatch.context() as patch:
            spoil(patch, program, fault)
            run = sweep(program, "-b 4K -e 4K -t 2 -n 2 -d int32", capsys, status=1)
            assert run.rows[0].wrong == elements and not run.rows[1].wrong


@pytest.mark.parametrize("program", ["all_gather_perf", "alltoall_perf", "gather_perf", "hypercube_perf"])
def test_blocks_in_the_wrong_order_are_wrong(program: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    def swap(rank: int, x: Any, out: Any) -> None:
        if rank == 0:
            out[...] = np.concatenate(np.split(out, 2)[::-1])

    spoil(monkeypatch, program, swap)
    run = sweep(program, "-b 4K -e 4K -t 2 -n 1 -d int32", capsys, status=1)
    assert run.rows[0].wrong is not None and run.rows[0].wrong > 1000


def test_every_check_has_data_of_its_own(capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    sent: dict[int, list[bytes]] = {0: [], 1: []}
    spoil(monkeypatch, "all_gather_perf", lambda rank, x, out: sent[rank].append(x.tobytes()))
    sweep("all_gather_perf", "-b 4K -e 4K -t 2 -n 1 -w 0 -c 3", capsys)
    for each in sent.values():
        assert len(set(each)) == 1 + 3 + 3  # the ones of the timings, and three for each placement


def test_an_earlier_result_is_no_result(capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    """Each check has fresh data: a call that works only the first time is found by the second check."""
    row, made = COLLECTIVES["broadcast_perf"], [0, 0]

    def call(comm: Any, *arguments: Any) -> Callable[[], Any]:
        right = row.call(comm, *arguments)

        def once() -> None:
            made[comm.rank] += 1
            if made[comm.rank] <= 3:  # the untimed call, the timed one, and the first check
                right()

        return once

    monkeypatch.setitem(COLLECTIVES, "broadcast_perf", dataclasses.replace(row, call=call))
    run = sweep("broadcast_perf", "-b 4K -e 4K -t 2 -n 1 -w 0 -c 2 -d int32", capsys, status=1)
    assert run.rows[0].wrong == 2 * K


# ---- on GPUs


class Tape:
    """A stream that captures, as far as a sweep can tell: calls in between are kept, and made by `launch`."""

    def __init__(self) -> None:
        self.taken: list[Callable[[], None]] | None = None

    def begin_capture(self) -> None:
        self.taken = []

    def end_capture(self) -> Tape:
        graph = Tape()
        graph.taken, self.taken = self.taken, None
        return graph

    def launch(self, stream: Tape) -> None:
        assert self.taken and stream.taken is None
        for call in self.taken:
            call()


@pytest.mark.parametrize("right", [True, False])
def test_graphs_are_captured_launched_and_checked(
    right: bool, capsys: Capture, monkeypatch: pytest.MonkeyPatch
):
    row, made = COLLECTIVES["all_gather_perf"], {"at once": 0, "by a graph": 0}

    def call(comm: Any, case: Any, layout: Any, x: Any, out: Any, op: Any, stream: Tape) -> Callable[[], Any]:
        gather = row.call(comm, case, layout, x, out, op, None)

        def captured() -> None:
            made["by a graph"] += comm.rank == 0
            if right:
                gather()

        def at_once() -> None:
            if stream.taken is not None:
                stream.taken.append(captured)
            else:
                made["at once"] += comm.rank == 0
                gather()

        return at_once

    monkeypatch.setitem(COLLECTIVES, "all_gather_perf", dataclasses.replace(row, call=call))
    monkeypatch.setattr("bench.runner.refuse_what_cannot_apply", lambda options, kind: None)
    monkeypatch.setattr(
        "bench.devices.Host.stream", property(lambda host: host.__dict__.setdefault("tape", Tape()))
    )
    run = sweep("all_gather_perf", "-b 4K -e 4K -t 2 -w 0 -n 3 -G 5 -c 2", capsys, status=0 if right else 1)
    assert run.good is right
    checks = 2 if right else 1  # the first wrong one ends them
    assert made["by a graph"] == 2 * (3 * 5 + checks)  # in both placements
    assert made["at once"] == 2 * 3 + 2  # all over the buffers, and once before each timing


@pytest.mark.gpu
@pytest.mark.parametrize("line", ["", "-G 2", "-d all -o all -r all"])
@pytest.mark.parametrize("program", COLLECTIVES)
def test_the_programs_on_gpus(program: str, line: str, repo: Path):
    done = subprocess.run(
        [sys.executable, "-m", "bench", program, *f"-b 8 -e 4K -f 16 -g 2 -n 3 {line}".split()],
        cwd=repo,
        env={**os.environ, "PYTHONPATH": str(repo), "PYNCCL_LIBRARY": "nccl"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert read(done.stdout).good


# ---- the list of programs


def test_bench_lists_what_can_be_run_one_line_each(capsys: Capture):
    assert list_or_run([]) == 0
    listed = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert {line.split()[0] for line in listed} == set(programs()) and set(COLLECTIVES) <= set(programs())
    assert all(len(line) <= 130 and len(line.split()) > 4 for line in listed)


def test_bench_runs_a_program_by_its_short_name_too(capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["bench"])
    for name in ("all_reduce", "all_reduce_perf"):
        with pytest.raises(SystemExit) as end:
            list_or_run([name, *"-b 8 -e 8 -t 2 -n 1".split()])
        assert end.value.code == 0
        assert read(capsys.readouterr().out).program == "all_reduce_perf"


def test_bench_names_the_programs_when_there_is_none_of_that_name(capsys: Capture):
    assert list_or_run(["allreduce"]) == 2
    assert "'allreduce' is no program; one of " in capsys.readouterr().err


def test_every_call_is_a_programs():
    assert {row.call.__name__ for row in COLLECTIVES.values()} == set(calls.__all__)

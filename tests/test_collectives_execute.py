"""Schedules that run: interpreted and compiled, exact, in every form; and refused before anything is sent."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pynccl
from pynccl.collectives import (
    ALGORITHMS,
    IN,
    OUT,
    SCRATCH,
    Builder,
    Fault,
    Kind,
    Schedule,
    compile,
    generate,
    run,
)
from pynccl.collectives.rounds import messages
from pynccl.collectives.selftest import Tally, schedules, test_schedule
from pynccl.testing import run_ranks

test_schedule.__test__ = False  # type: ignore[attr-defined]

LONG = 3 * (1 << 18) + 5  # elements of float32: several slabs, and a last one that is short
NARROW = {"counts": (0, 1, 7, 1000), "dtypes": ("float32",), "ops": ("sum",)}


def everywhere(n: int, rank: Any, *arguments: Any, **options: Any) -> list[Any]:
    return run_ranks(n, rank, *arguments, processes=False, library="host", timeout=60, **options)


# --- every algorithm --------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_every_algorithm_gives_the_bits_of_the_library(n: int) -> None:
    def rank(comm: Any) -> Tally:
        tally = Tally()
        for row in ALGORITHMS.values():
            test_schedule(next(schedules(row, comm.size)), comm, tally, **NARROW)  # type: ignore[arg-type]
        return tally

    tallies = everywhere(n, rank)
    assert [tally.wrong for tally in tallies] == [[]] * n
    assert all(tally.runs >= 4 * 3 * len(ALGORITHMS) for tally in tallies)


def test_the_comparison_sees_a_schedule_that_is_wrong() -> None:
    ring = generate("ring", 3)
    columns = ring.columns.copy()
    last = np.flatnonzero(columns["kind"] == Kind.RECV_REDUCE)[-1]
    columns["kind"][last] = Kind.RECV
    columns["src_buffer"][last], columns["src_chunk"][last] = -1, 0
    wrong = ring.replace(columns=columns)
    vars(wrong)["_proved"] = True  # as if it had been

    def rank(comm: Any) -> list[str]:
        tally = Tally()
        test_schedule(wrong, comm, tally, **NARROW)  # type: ignore[arg-type]
        return tally.wrong

    found = [what for of_rank in everywhere(3, rank) for what in of_rank]
    for way in ("interpreted", "compiled:", "compiled on shared arrays"):
        assert any(way in what for what in found)


@pytest.mark.parametrize("name", ["ring", "tree", "halving_doubling", "one_shot", "hierarchical"])
@pytest.mark.parametrize("where", ["plain", "shared", "mixed"])
@pytest.mark.parametrize("n", [2, 4])  # slabs of shared arrays are short where each rank has a core
@pytest.mark.parametrize("streaming", [None, "0"], ids=["cached", "streamed"])
def test_long_arrays_go_in_slabs(
    n: int, name: str, where: str, streaming: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if streaming is not None:
        monkeypatch.setenv("PYNCCL_STREAMING_BYTES", streaming)

    def rank(comm: Any) -> None:
        shared = where == "shared" or (where == "mixed" and comm.rank == 1)
        make = comm.empty if shared else np.empty
        x, out = make(LONG, "float32"), make(LONG, "float32")
        x[...] = np.arange(LONG) % 17 + comm.rank
        wanted = comm.all_reduce(x.copy())
        reduce = compile(generate(name, comm.size), comm)
        np.testing.assert_array_equal(reduce(x, out), wanted)
        for op in ("max", "avg"):
            np.testing.assert_array_equal(reduce(x, out, op), comm.all_reduce(x.copy(), op=op))
        np.testing.assert_array_equal(reduce(x), wanted)  # in place, after x was read

    everywhere(n, rank)


# --- hand-made schedules, for what the algorithms do not do -------------------------------------------------


def rank_order(n: int) -> Schedule:
    """All send all to all, and reduce in rank order what came in one round: from left and from right."""
    b = Builder("rank order", "all_reduce", n)
    for r in range(n):
        for peer in range(n):
            if peer != r:
                b.send(r, peer, IN[0])
    for r in range(n):
        for peer in range(n):
            if peer != r:
                b.recv(r, peer, SCRATCH[peer])
    b.next_round()
    for r in range(n):
        b.copy(r, IN[0], SCRATCH[r])
        b.copy(r, SCRATCH[0], OUT[0])
        for peer in range(1, n):
            b.reduce(r, SCRATCH[peer], OUT[0])
    return b.build()


@pytest.mark.parametrize("way", [run, lambda schedule, comm, x: compile(schedule, comm)(x)])
def test_the_order_of_a_reduction_is_that_of_the_schedule(way: Any) -> None:
    values = np.array(
        [1e8, 1, -1e8, 1], np.float32
    )  # left to right 1; any other order of the first three 0 or 2

    def rank(comm: Any) -> Any:
        return way(rank_order(4), comm, np.full(5, values[comm.rank], np.float32))

    for result in everywhere(4, rank):
        np.testing.assert_array_equal(result, np.full(5, ((values[0] + values[1]) + values[2]) + values[3]))


def test_messages_on_channels_pass_each_other() -> None:
    b = Builder("crossed", "all_to_all", 2, parts=2, in_place=False)
    r, peer = b.ranks, 1 - b.ranks
    for part in range(2):
        b.copy(r, IN[2 * r + part], OUT[2 * r + part])
        b.send(r, peer, IN[2 * peer + part], channel=part, round=0)
    b.recv(r, peer, OUT[2 * peer + 1], channel=1, round=0)
    b.recv(r, peer, OUT[2 * peer], channel=0, round=0)
    crossed = b.build()

    def rank(comm: Any) -> None:
        x = np.arange(14) + 100 * comm.rank
        wanted = comm.all_to_all(x)
        np.testing.assert_array_equal(run(crossed, comm, x), wanted)
        np.testing.assert_array_equal(compile(crossed, comm)(x), wanted)

    everywhere(2, rank)


def test_both_ends_see_the_messages_of_a_pair_in_the_same_order() -> None:
    for row in ALGORITHMS.values():
        for schedule in schedules(row, 5):
            for rank in range(5):
                for sent in [messages(schedule, rank)[0]]:
                    for peer in set(schedule.columns["peer"][sent.own].tolist()):
                        received = messages(schedule, peer)[1]
                        to_peer = schedule.columns["peer"][sent.own] == peer
                        from_rank = schedule.columns["peer"][received.own] == rank
                        by_sender = sent.own[to_peer][np.argsort(sent.order[to_peer])]
                        by_receiver = received.other[from_rank][np.argsort(received.order[from_rank])]
                        np.testing.assert_array_equal(by_sender, by_receiver)


# --- the face, streams, groups ------------------------------------------------------------------------------


def test_a_call_takes_an_algorithm_by_name_as_a_schedule_and_compiled() -> None:
    def rank(comm: Any) -> None:
        x = np.arange(10.0) + comm.rank
        wanted = comm.all_reduce(x.copy())
        ring = generate("ring", comm.size)
        for algorithm in ("pynccl:tree", ring, compile(ring, comm)):
            np.testing.assert_array_equal(comm.all_reduce(x.copy(), algorithm=algorithm), wanted)
        np.testing.assert_array_equal(ring.run(comm, x.copy()), wanted)
        root = comm.size - 1
        result = comm.reduce(x.copy(), root=root, algorithm="pynccl:ring")
        assert (result is None) == (comm.rank != root)
        if comm.rank == root:
            np.testing.assert_array_equal(result, wanted)

    everywhere(3, rank)


def test_streams_and_groups() -> None:
    ring = generate("ring", 3)

    def rank(comm: Any) -> None:
        x = np.arange(LONG, dtype=np.float32) % 5 + comm.rank
        wanted = comm.all_reduce(x.copy())
        with pynccl.Stream() as stream:
            queued = [comm.all_reduce(x.copy(), algorithm="pynccl:ring"), run(ring, comm, x.copy())]
            queued.append(run(ring, comm, x.copy(), op=np.add))
        stream.synchronize()
        stream.close()
        with pynccl.group():
            queued += [comm.all_reduce(x.copy(), algorithm="pynccl:ring"), comm.all_reduce(x.copy())]
        for result in queued:
            np.testing.assert_array_equal(result, wanted)
        with pytest.raises(pynccl.InvalidUsageError, match="cannot be inside"), pynccl.group():
            run(ring, comm, x)

    everywhere(3, rank)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_non_blocking_communicator_is_waited_for(blocking: bool) -> None:
    def rank(comm: Any) -> None:
        with comm.split(0, key=comm.rank, config={"blocking": blocking}) as child:
            child.wait(30)
            x = np.arange(LONG, dtype=np.float32) % 7
            np.testing.assert_array_equal(run(generate("ring", 3), child, x.copy()), 3 * x)
            result = compile(generate("ring", 3), child)(x.copy())
            child.wait(30)
            np.testing.assert_array_equal(result, 3 * x)

    everywhere(3, rank)


def test_a_schedule_that_has_run_can_be_pickled() -> None:
    ring = generate("ring", 2)
    everywhere(2, lambda comm: compile(ring, comm)(np.ones(3)))
    again = pickle.loads(pickle.dumps(ring))
    assert again == ring and len(again.steps(0)) == len(ring.steps(0))


# --- reductions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (np.bitwise_xor, "int16"),
        (np.logaddexp, "float64"),
        (np.multiply, "complex128"),
        (np.gcd, "int64"),
        (lambda a, b: np.where(abs(a) >= abs(b), a, b), "float32"),
    ],
)
def test_any_function_of_two_arrays_reduces(op: Any, dtype: str) -> None:
    inputs = [(np.arange(11) * (rank + 2) % 9 + 1).astype(dtype) for rank in range(4)]
    wanted = inputs[0]
    for each in inputs[1:]:
        wanted = op(wanted, each)

    def rank(comm: Any) -> Any:
        return comm.all_reduce(inputs[comm.rank].copy(), op=op, algorithm="pynccl:ring")

    for result in everywhere(4, rank):
        np.testing.assert_allclose(result, wanted, rtol=1e-14 if dtype == "float64" else 0)


def test_max_passes_over_nan_as_the_library_does() -> None:
    def rank(comm: Any) -> None:
        x = np.array([np.nan, 1, comm.rank, np.nan if comm.rank else 3], np.float32)
        for op in ("max", "min"):
            wanted = comm.all_reduce(x.copy(), op=op)
            np.testing.assert_array_equal(run(generate("ring", 3), comm, x.copy(), op=op), wanted)

    everywhere(3, rank)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "float16"])
def test_averages_are_the_library_s(dtype: str) -> None:
    def rank(comm: Any) -> None:
        x = (np.arange(9) * 3 - (13 if dtype != "uint8" else 0) + comm.rank).astype(dtype)
        wanted = comm.all_reduce(x.copy(), op="avg")
        np.testing.assert_array_equal(run(generate("ring", 3), comm, x.copy(), op="avg"), wanted)
        np.testing.assert_array_equal(compile(generate("ring", 3), comm)(x.copy(), op="avg"), wanted)

    everywhere(3, rank)


# --- refused ------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_before_anything_is_sent() -> None:
    def rank(comm: Any) -> None:
        x = np.arange(6, dtype=np.float32)
        out_of_range = Builder("far", "all_reduce", 2)
        out_of_range.copy(0, IN[3], OUT[0])
        nothing = Builder("nothing", "all_reduce", 2).build()
        for go in (lambda s, **k: run(s, comm, x, **k), lambda s, **k: compile(s, comm, **k)):
            with pytest.raises(
                pynccl.InvalidArgumentError, match=r"for 3 ranks .* has 2; generate it with n="
            ):
                go(generate("ring", 3))
            with pytest.raises(Fault, match="never written"):
                go(nothing)
            with pytest.raises(Fault, match="outside"):
                go(out_of_range.build(), unchecked=True)
        with pytest.raises(pynccl.InvalidArgumentError, match="does not work on float32"):
            run(generate("ring", 2), comm, x, op=np.bitwise_or)
        with pytest.raises(TypeError, match="is no reduction"):
            run(generate("ring", 2), comm, x, op=3.5)
        with pytest.raises(pynccl.InvalidArgumentError, match="not possible for complex64"):
            run(generate("ring", 2), comm, x.astype(np.complex64), op="prod")
        with pytest.raises(pynccl.InvalidArgumentError, match="cannot be compiled"):
            compile(generate("ring", 2), comm)(x, op=np.logaddexp)
        with pytest.raises(pynccl.InvalidArgumentError, match="is one of all_reduce"):
            comm.all_gather(x, algorithm=generate("ring", 2))
        with pytest.raises(pynccl.InvalidArgumentError, match="has no algorithm 'rong'; it has ring"):
            comm.all_reduce(x, algorithm="pynccl:rong")
        with pytest.raises(pynccl.InvalidArgumentError, match="root is 0 and the call's 1"):
            comm.reduce(x, root=1, algorithm=generate("ring", 2, collective="reduce"))
        with pytest.raises(TypeError, match="must be a name"):
            comm.all_reduce(x, algorithm=7)
        apart = generate("ring", 2).replace(in_place=False)
        with pytest.raises(pynccl.InvalidArgumentError, match="cannot work in place"):
            run(apart, comm, x)
        np.testing.assert_array_equal(comm.all_reduce(x.copy()), 2 * x)  # nothing was left behind

    everywhere(2, rank)


def test_an_unproved_schedule_runs_when_that_is_asked_for() -> None:
    b = Builder("mine", "all_reduce", 2)
    b.copy(b.ranks, IN[0], OUT[0])
    local = b.build()

    def rank(comm: Any) -> None:
        x = np.full(3, comm.rank)
        np.testing.assert_array_equal(run(local, comm, x, np.empty_like(x), unchecked=True), x)
        np.testing.assert_array_equal(compile(local, comm, unchecked=True)(x, np.empty_like(x)), x)
        with pytest.raises(Fault):
            run(local, comm, x)

    everywhere(2, rank)


def test_different_schedules_are_an_error_on_all_ranks_and_the_communicator_goes_on() -> None:
    def rank(comm: Any) -> str:
        x = np.ones(9, np.float32)
        schedule = generate("ring", 3, channels=1 if comm.rank else 2)
        with pytest.raises(pynccl.InvalidUsageError, match="differs between ranks") as caught:
            compile(schedule, comm)(x)
        assert compile(generate("tree", 3), comm)(x)[0] == 3
        return str(caught.value).partition("differs")[2].partition(" [")[0]

    assert len(set(everywhere(3, rank))) == 1


def test_a_rank_that_does_not_come_is_named() -> None:
    def rank(comm: Any) -> None:
        if comm.rank == 1:
            comm.recv(np.empty(1), 0)  # until the others have given up
            return
        with pytest.raises(pynccl.NcclError, match="waited .* for rank 1"):
            compile(generate("ring", 2), comm)(np.ones(LONG, np.float32))
        raise RuntimeError("given up")

    def short(comm: Any) -> None:
        comm.library.pyncclSetTimeout(comm.handle, 0.5)
        rank(comm)

    with pytest.raises(Exception, match="given up"):
        everywhere(2, short)


def test_the_example_runs_on_three_ranks(repo: Path, tmp_path: Path) -> None:
    example = repo / "examples" / "write_your_own_all_reduce.py"
    assert len(example.read_text().splitlines()) < 40
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    environment = {**os.environ, "TMPDIR": str(there), "PYTHONPATH": str(repo)}
    command = [sys.executable, "-m", "pynccl.launch", "-n", "3", str(example)]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (
        "proved, 9 steps in 4 rounds" in done.stdout and "alone" not in done.stdout and "busbw" in done.stdout
    )
    assert "2>o0    o0>1" in done.stdout  # drawn
    assert done.stdout.count("sum [6. 6. 6. 6.]") == 3
    (trace,) = there.glob("*/relay.json")
    assert str(trace) in done.stdout and trace.stat().st_size > 100 and not list(here.iterdir())
    done = subprocess.run(
        command[:1] + command[-1:], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert f"python -m pynccl.launch -n 3 {example}" in done.stdout


def test_the_benchmark_compares_and_checks_every_way(repo: Path, tmp_path: Path) -> None:
    written = tmp_path / "out.json"
    command = [sys.executable, "-m", "bench.algorithms_perf", "-g", "2", "-b", "1K", "-e", "4K", "-c", "2"]
    done = subprocess.run(
        [*command, "-n", "2", "--algorithms", "ring", "--json", str(written)],
        cwd=repo,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(written.read_text())
    assert [row["bytes"] for row in report["rows"]] == [1024, 4096]
    for row in report["rows"]:
        assert list(row["ways"]) == ["library", "ring interpreted", "ring compiled"]
        assert all(way["exact"] and way["microseconds"] > 0 for way in row["ways"].values())
    assert done.stdout.count(" us ") == 6


def test_the_self_test_runs_under_the_launcher(repo: Path, tmp_path: Path) -> None:
    written = tmp_path / "out.json"
    command = [sys.executable, "-m", "pynccl.launch", "-n", "2", "-m", "pynccl.collectives", "selftest"]
    options = ["--algorithms", "ring", "--collective", "reduce_scatter", "--counts", "0,7"]
    done = subprocess.run(
        [*command, *options, "--json", str(written)], cwd=repo, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "1 algorithms" in done.stdout and "0 wrong" in done.stdout
    (algorithm,) = json.loads(written.read_text())["algorithms"]
    variants = 1 + len(ALGORITHMS["reduce_scatter", "ring"].variants)
    assert algorithm["runs"] == variants * 2 * 3 * 3 * 2 * 3 and algorithm["wrong"] == []


# --- prepared, and with a factor ----------------------------------------------------------------------------


@pytest.mark.parametrize("queued", [False, True])
def test_a_prepared_schedule_runs_each_time_it_is_called(queued: bool) -> None:
    def rank(comm: Any) -> None:
        stream = pynccl.Stream(comm.library) if queued else None
        x, out = np.zeros(1001, np.float32), np.zeros(1001, np.float32)
        ring = generate("ring", 3)
        steps = [
            comm.prepare("all_reduce", x, out=out, stream=stream, algorithm="pynccl:tree"),
            comm.prepare("all_reduce", x, out=out, stream=stream, algorithm=ring),
            comm.prepare("all_reduce", x, out=out, stream=stream, algorithm=compile(ring, comm)),
            comm.prepare("all_reduce", x, out=out, op=np.add, stream=stream, algorithm=ring),
        ]
        for number, step in enumerate(steps * 2):
            x[:] = np.arange(1001) + comm.rank + number
            assert step() is out
            if stream is not None:
                stream.synchronize()
            np.testing.assert_array_equal(out, 3 * (np.arange(1001) + number) + 3)
        with pynccl.group():
            steps[1]()
        if stream is not None:
            stream.close()
            for step in (steps[1], steps[3]):
                with pytest.raises(pynccl.InvalidUsageError, match="closed"):
                    step()
        comm.destroy()
        for step in steps:
            with pytest.raises(pynccl.InvalidUsageError, match="all_reduce by"):
                step()

    everywhere(3, rank)


def test_a_prepared_schedule_is_checked_when_it_is_prepared() -> None:
    def rank(comm: Any) -> None:
        x = np.ones(4)
        with pytest.raises(pynccl.InvalidArgumentError, match="for 3 ranks"):
            comm.prepare("all_reduce", x, algorithm=generate("ring", 3))
        with pytest.raises(pynccl.InvalidArgumentError, match="does not work on float64"):
            comm.prepare("all_reduce", x, op=np.bitwise_or, algorithm="pynccl:ring")
        with pytest.raises(pynccl.InvalidArgumentError, match="root is 0 and the call's 1"):
            comm.prepare("reduce", x, root=1, algorithm=generate("ring", 2, collective="reduce"))
        step = comm.prepare("broadcast", x, root=1, algorithm="pynccl:binomial")
        x[:] = comm.rank
        assert step().tolist() == [1.0] * 4

    everywhere(2, rank)


@pytest.mark.parametrize("dtype", ["float32", "complex64", "int32", "float16"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_sum_of_multiples_is_the_library_s(dtype: str, in_place: bool) -> None:
    def rank(comm: Any) -> None:
        x = (np.arange(9) - 4).astype(dtype)
        with comm.premul_sum(comm.rank + 2, dtype) as op:
            wanted = comm.all_reduce(x.copy(), op=op)
            assert wanted[0] == 9 * x[0]
            given = x.copy()
            out = given if in_place else np.empty_like(x)
            assert comm.all_reduce(given, out, op, algorithm="pynccl:ring") is out
            np.testing.assert_array_equal(out, wanted)
            if not in_place:
                np.testing.assert_array_equal(given, x)
            part = comm.reduce_scatter(x.copy(), op=op, algorithm="pynccl:ring")
            np.testing.assert_array_equal(part, wanted[comm.rank * 3 :][:3])
            reduced = comm.reduce(x.copy(), root=1, op=op, algorithm="pynccl:binomial")
            if comm.rank == 1:
                np.testing.assert_array_equal(reduced, wanted)
            with pynccl.Stream(comm.library) as stream:
                step = comm.prepare("all_reduce", x, op=op, out=out, algorithm="pynccl:ring")
                out[:] = 0
                step()
                stream.synchronize()
                stream.close()
            np.testing.assert_array_equal(out, wanted)

    everywhere(3, rank)


def test_a_sum_of_multiples_that_does_not_fit_is_refused_before_anything_is_sent() -> None:
    def rank(comm: Any) -> None:
        x = np.ones(4)
        op = comm.premul_sum(2, "float32")
        with pytest.raises(
            pynccl.InvalidArgumentError, match="premul_sum of float32 and the array is float64"
        ):
            comm.all_reduce(x, op=op, algorithm="pynccl:ring")
        with pytest.raises(pynccl.InvalidArgumentError, match="cannot be compiled"):
            compile(generate("ring", 2), comm)(x.astype("f4"), op=op)
        op.destroy()
        with pytest.raises(pynccl.InvalidUsageError, match="was destroyed"):
            comm.all_reduce(x.astype("f4"), op=op, algorithm="pynccl:ring")
        other = comm.split(0, comm.rank)
        with pytest.raises(pynccl.InvalidArgumentError, match="this communicator's premul_sum"):
            comm.all_reduce(x, op=other.premul_sum(2, "float64"), algorithm="pynccl:ring")
        other.destroy()
        np.testing.assert_array_equal(comm.all_reduce(x.copy(), algorithm="pynccl:ring"), 2 * x)

    everywhere(2, rank)

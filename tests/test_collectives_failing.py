"""A rank that fails within a run: the communicator ends for all of them, and no result is wrong."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import pynccl
from pynccl.collectives import Kind, Schedule, algorithms, compile, generate, run
from pynccl.collectives.codecs import Integers
from pynccl.collectives.compressed import Compressor
from pynccl.collectives.rounds import rounds
from pynccl.testing import run_ranks

REDUCING = [(name, call) for call in ("all_reduce", "reduce_scatter") for name in algorithms(call)]


def first_to_reduce(schedule: Schedule) -> int:
    """The first rank that calls the operation at all."""
    return next(
        r
        for r in range(schedule.n)
        if any(step[0] != Kind.COPY for one in rounds(schedule, r) for step in one.local)
    )


def outcomes(comm: Any, schedule: Schedule, failing: Any, sizes: tuple[int, ...] = (6, 6, 6)) -> list[str]:
    """What becomes of calls one after the other, the first with ``failing``, in a program that goes on."""
    results = []
    for call, size in enumerate(sizes):
        x, out = np.full(size * comm.size, 10.0 ** (call + 1)), np.zeros(size * comm.size)
        if schedule.collective == "reduce_scatter":
            out = out[:size]
        try:
            run(schedule, comm, x, out, failing if call == 0 else np.add)
        except BaseException as error:
            results.append(f"{type(error).__name__}: {error}")
        else:
            results.append("right" if (out == comm.size * 10.0 ** (call + 1)).all() else f"wrong: {out}")
    return results


@pytest.mark.parametrize("raised", [FloatingPointError, KeyboardInterrupt])
@pytest.mark.parametrize(("name", "collective"), REDUCING)
def test_an_op_that_raises_on_one_rank_ends_the_communicator_and_nothing_is_wrong(
    name: str, collective: str, raised: type[BaseException]
) -> None:
    n = 4
    schedule = generate(name, n, collective=collective)
    first = first_to_reduce(schedule)

    def rank(comm: Any) -> list[str]:
        def op(a: Any, b: Any) -> Any:
            if comm.rank == first and a.max() > 5:  # not of the zeros that it is tried on
                raise raised("not these numbers")
            return a + b

        return outcomes(comm, schedule, op)

    results = run_ranks(n, rank, library="host", timeout=30)
    assert results[first][0].startswith(f"{raised.__name__}: not these numbers")
    assert all("was revoked" in result for result in results[first][1:])
    for number, (one, *others) in enumerate(results):
        if number != first:
            assert one == "right" or (one.startswith("RemoteError") and f"rank {first} has" in one)
            assert all(result.startswith("RemoteError") for result in others)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            lambda a, b: a[:1] + b[:1],
            r"shape \(1,\) of two arrays of float64, shape \(6,\); it must keep both",
        ),
        (lambda a, b: (a + b).astype(np.float32), "op gave float32.* it must keep both"),
        (lambda a, b: a + b if len(a) == 1 else a / "", "does not work on float64"),
    ],
    ids=["shape", "dtype", "raises"],
)
@pytest.mark.parametrize("which", ["one", "all"])
def test_a_function_that_cannot_be_is_refused_before_anything_is_sent(
    wrong: Any, words: str, which: str
) -> None:
    def rank(comm: Any) -> list[str]:
        fails = which == "all" or comm.rank == 0
        return outcomes(comm, generate("ring", 3), wrong if fails else lambda a, b: a + b)

    results = run_ranks(3, rank, library="host", timeout=30)
    for number, (one, *others) in enumerate(results):
        if which == "all" or number == 0:
            assert re.search(words, one) and all("was revoked" in result for result in others)
        else:
            assert all(result.startswith("RemoteError") for result in (one, *others))


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize("name", ["ring", "tree", "halving_doubling"])
def test_what_a_function_raises_on_a_stream_is_raised_by_synchronize_and_nothing_void_is_taken(
    name: str, n: int
) -> None:
    """Three calls are queued at once, and the function fails in the second: whose inputs are void then?"""
    schedule = generate(name, n)
    first = first_to_reduce(schedule)

    def rank(comm: Any) -> tuple[str, list[bool]]:
        def picky(a: Any, b: Any) -> Any:
            if comm.rank == first and a.max() >= 10:
                raise FloatingPointError("not like this")
            assert a.min() == a.max() and b.min() == b.max(), "called with what a failed message left behind"
            return a + b

        stream = pynccl.Stream(comm.library)
        results = [np.full(1001, 10.0**call) for call in range(3)]
        errors: list[Exception] = []
        for x in results:
            try:
                run(schedule, comm, x, op=picky, stream=stream)
            except pynccl.NcclError as error:  # it failed already
                errors.append(error)
        try:
            stream.synchronize()
        except Exception as error:
            errors.insert(0, error)
        with pytest.raises(pynccl.NcclError, match="revoked" if comm.rank == first else f"rank {first} has"):
            comm.all_reduce(np.ones(2))
        stream.close()
        right = [x.tolist() == [n * 10.0**call] * 1001 for call, x in enumerate(results)]
        return f"{type(errors[0]).__name__}: {errors[0]}", right

    for number, (error, right) in enumerate(run_ranks(n, rank, library="host", timeout=30)):
        assert not right[2]
        if number == first:
            assert right[0] and error == "FloatingPointError: not like this"
        else:
            assert error.startswith("RemoteError") and f"rank {first} has" in error


def test_until_synchronize_says_why_later_runs_of_the_stream_are_no_error() -> None:
    def rank(comm: Any) -> None:
        def picky(a: Any, b: Any) -> Any:
            if comm.rank == 1 and a.max() > 0:
                raise FloatingPointError("not like this")
            return a + b

        stream = pynccl.Stream(comm.library)
        run(generate("ring", 2), comm, np.ones(6), op=picky, stream=stream)
        if comm.rank == 1:
            while not stream.query():
                pass
            run(generate("ring", 2), comm, np.ones(6), stream=stream)
            Compressor(comm, Integers(8)).all_reduce(np.ones(6, "f4"), key="x", stream=stream)
            with pytest.raises(FloatingPointError, match="not like this"):
                stream.synchronize()
            with pytest.raises(pynccl.InvalidUsageError, match="was revoked"):
                run(generate("ring", 2), comm, np.ones(6), stream=stream)
        else:
            with pytest.raises(pynccl.RemoteError, match="rank 1 has"):
                stream.synchronize()
        stream.close()

    run_ranks(2, rank, library="host", timeout=30)


# --- a rank that was refused, and goes on -------------------------------------------------------------------


def ring(comm: Any, x: Any, op: Any = "sum") -> Any:
    return run(generate("ring", 3), comm, x, op=op)


@pytest.mark.parametrize(
    "other",
    [
        lambda comm, x: ring(comm, x, "max"),
        lambda comm, x: ring(comm, x, np.add),
        lambda comm, x: run(generate("pairwise", 3, collective="all_to_all"), comm, x),
        lambda comm, x: comm.all_reduce(x),
        lambda comm, x: compile(generate("ring", 3), comm)(x),
        lambda comm, x: run(generate("ring", 3), comm, x[:0]),
    ],
    ids=["another operation", "a function", "another schedule", "the library's", "compiled", "no elements"],
)
def test_messages_of_calls_that_differ_are_never_taken_for_each_other(other: Any) -> None:
    """Rank 0 is refused in the first call, catches that, and makes the second while the others wait."""

    def rank(comm: Any) -> list[str]:
        results = []
        for call in (ring, other):
            try:
                call(comm, "no array" if comm.rank == 0 and call is ring else np.ones(6))
                results.append("no error")
            except Exception as error:
                results.append(f"{type(error).__name__}: {error}")
        return results

    results = run_ranks(3, rank, library="host", timeout=30)
    assert results[0][0].startswith("TypeError")
    assert not any("no error" in result for of_rank in results for result in of_rank)
    differs = [text for of_rank in results for text in of_rank if "differs between ranks" in text]
    assert any("InvalidUsageError" in text for text in differs)


@pytest.mark.parametrize("refused", range(4))
@pytest.mark.parametrize("name", ["tree", "ring", "recursive_doubling"])
def test_nor_on_a_stream_where_what_depends_on_them_is_queued_already(name: str, refused: int) -> None:
    def rank(comm: Any) -> str:
        schedule, stream = generate(name, comm.size), pynccl.Stream(comm.library)
        ops = ("max",) if comm.rank == refused else ("sum", "max")
        errors = []
        for op in (*ops, None):  # a call may be refused already
            try:
                if op is None:
                    stream.synchronize()
                else:
                    run(schedule, comm, np.ones(8), op=op, stream=stream)
            except pynccl.NcclError as error:
                errors.append(str(error))
        stream.close()
        return "; ".join(errors)

    results = run_ranks(4, rank, library="host", timeout=30)
    assert all("differs between ranks" in result for result in results), results


@pytest.mark.parametrize(
    "call", [ring, lambda comm, x: compile(generate("ring", 3), comm)(x), lambda comm, x: comm.all_reduce(x)]
)
def test_an_equal_call_of_a_rank_that_was_refused_is_the_one_that_the_others_wait_in(call: Any) -> None:
    """For want of anything that tells the two apart: the library's own collectives do the same."""

    def rank(comm: Any) -> Any:
        if comm.rank == 0:
            with pytest.raises(TypeError):
                call(comm, "no array")
        return call(comm, np.full(6, comm.rank + 1.0)).tolist()

    assert run_ranks(3, rank, library="host", timeout=30) == [[6.0] * 6] * 3


def test_what_is_raised_in_a_group_starts_nothing_and_the_communicator_goes_on() -> None:
    def rank(comm: Any) -> None:
        def picky(a: Any, b: Any) -> Any:
            raise FloatingPointError("not tried")

        compiled, x, y = compile(generate("ring", 3), comm), np.ones(6), np.ones(2)
        if comm.rank == 0:
            with pytest.raises(KeyError), pynccl.group():
                compiled(x)
                raise KeyError("rank 0 alone")
            with pytest.raises(pynccl.InvalidUsageError, match="cannot be inside"), pynccl.group():
                compiled(x)
                ring(comm, x, picky)
        with pynccl.group():
            compiled(x)
            comm.all_reduce(y)
        assert x.tolist() == [3.0] * 6 and y.tolist() == [3.0] * 2
        assert ring(comm, x).tolist() == [9.0] * 6

    run_ranks(3, rank, library="host", timeout=30)


def test_a_rank_with_no_elements_is_told_and_all_go_on() -> None:
    def rank(comm: Any) -> None:
        with pytest.raises(pynccl.InvalidUsageError, match="differs between ranks"):
            ring(comm, np.ones(0 if comm.rank == 0 else 4))
        for value in (1.0, 10.0):
            assert (ring(comm, np.full(4, value)) == 3 * value).all()

    run_ranks(3, rank, library="host", timeout=30)


def test_a_function_that_raises_while_a_call_is_prepared_ends_the_communicator_too() -> None:
    def rank(comm: Any) -> None:
        def op(a: Any, b: Any) -> Any:
            if comm.rank == 0:
                raise FloatingPointError("on rank 0 alone")
            return a + b

        if comm.rank == 0:
            with pytest.raises(pynccl.InvalidArgumentError, match="on rank 0 alone"):
                comm.prepare("all_reduce", np.ones(4), op=op, algorithm="pynccl:ring")
        else:
            with pytest.raises(pynccl.RemoteError, match="rank 0"):
                comm.prepare("all_reduce", np.ones(4), op=op, algorithm="pynccl:ring")()

    run_ranks(3, rank, library="host", timeout=30)

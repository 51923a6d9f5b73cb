"""The communicator on the host library: what each call does, how it begins and ends, and what it refuses."""

from __future__ import annotations

import gc
import pickle
import pydoc
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pynccl
from pynccl.abi.enums import Result
from pynccl.testing import run_ranks

N = 3


@pytest.fixture
def alone() -> Iterator[pynccl.Communicator]:
    """A communicator of one rank."""
    with pynccl.Communicator(1, pynccl.get_unique_id("host"), 0, library="host", name="alone") as comm:
        yield comm


def ranks(fn: Any, n: int = N, **options: Any) -> list[Any]:
    return run_ranks(n, fn, library="host", **options)


# --- collectives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [True, False])
def test_each_collective_moves_what_it_says(processes: bool) -> None:
    def rank(comm):
        r, n = comm.rank, comm.size
        mine = np.array([10.0 * r, 10.0 * r + 1])
        everything = np.array([[0.0, 1], [10, 11], [20, 21]])
        np.testing.assert_array_equal(comm.all_reduce(mine.copy()), [30, 33])
        np.testing.assert_array_equal(comm.all_gather(mine[None]), everything)
        np.testing.assert_array_equal(comm.all_gather(np.array(r)), [0, 1, 2])
        np.testing.assert_array_equal(comm.reduce_scatter(everything + r), [everything[r] * n + 3])
        np.testing.assert_array_equal(comm.broadcast(mine.copy(), root=1), [10, 11])
        np.testing.assert_array_equal(comm.all_to_all(np.arange(n) + 10 * r), 10 * np.arange(n) + r)
        np.testing.assert_array_equal(
            comm.scatter(everything if r == 2 else everything * 0, root=2)[0], everything[r]
        )
        gathered, reduced = comm.gather(mine, root=1), comm.reduce(mine.copy(), root=1)
        if r != 1:
            return gathered, reduced
        np.testing.assert_array_equal(gathered, everything.ravel())
        np.testing.assert_array_equal(reduced, [30, 33])
        return "root"

    assert ranks(rank, processes=processes) == [(None, None), "root", (None, None)]


def test_outputs_are_written_where_the_caller_says() -> None:
    def rank(comm):
        r, n = comm.rank, comm.size
        x, whole, block = np.full(2, r + 1.0), np.zeros(2 * n), np.zeros(2)
        assert comm.all_reduce(x, block, op="max") is block
        assert comm.all_gather(x, whole) is whole
        assert whole.tolist() == [1, 1, 2, 2, 3, 3]
        assert comm.reduce_scatter(whole, block) is block
        assert block.tolist() == [n * (r + 1.0)] * 2
        assert comm.broadcast(x if r == 0 else None, 0, block) is block
        assert comm.scatter(whole if r == 0 else None, 0, block) is block
        assert comm.reduce(x, 0, block) is (block if r == 0 else None)
        assert comm.gather(x, 0, whole) is (whole if r == 0 else None)
        return x.tolist(), block.tolist()

    assert ranks(rank) == [([1, 1], [6, 6]), ([2, 2], [2, 2]), ([3, 3], [3, 3])]


def test_in_place_forms_use_the_ranks_own_block() -> None:
    def rank(comm):
        r, n = comm.rank, comm.size
        whole = np.zeros((n, 4), "i8")
        whole[r] = r + 1
        comm.all_gather(whole[r], whole)
        assert whole[:, 0].tolist() == [1, 2, 3]
        comm.reduce_scatter(whole, whole[r : r + 1])
        return whole[r].tolist()

    assert ranks(rank) == [[3] * 4, [6] * 4, [9] * 4]


@pytest.mark.parametrize(
    ("op", "result"),
    [("sum", 6.0), ("prod", 6.0), ("max", 3.0), ("min", 1.0), ("avg", 2.0), (pynccl.ReduceOp.MAX, 3.0)],
)
def test_each_reduction_on_each_kind_of_number(op: Any, result: float) -> None:
    dtypes = (
        "i1",
        "u8",
        "f2",
        "f4",
        "f8",
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
    )

    def rank(comm):
        return [float(comm.all_reduce(np.full(5, comm.rank + 1, dtype), op=op)[4]) for dtype in dtypes]

    assert ranks(rank) == [[result] * len(dtypes)] * N


def test_booleans_and_complex_numbers_and_other_types() -> None:
    def rank(comm):
        flags = np.array([comm.rank == 1, True, False])
        z = np.array([1 + 2j * comm.rank], "c8")
        return (
            comm.all_reduce(flags.copy(), op="max").tolist(),
            comm.all_reduce(flags.copy(), op="min").tolist(),
            comm.all_reduce(z.copy()).tolist(),
            comm.all_reduce(z.copy(), op="avg").tolist(),
            comm.all_gather(np.array([comm.rank], "i2")).tolist(),
            comm.all_gather(np.array([f"r{comm.rank}"])).tolist(),
        )

    assert (
        ranks(rank)
        == [([True, True, False], [False, True, False], [3 + 6j], [1 + 2j], [0, 1, 2], ["r0", "r1", "r2"])]
        * N
    )


def test_fortran_arrays_reduce_element_by_element() -> None:
    def rank(comm):
        x = np.asfortranarray(np.arange(6.0).reshape(2, 3))
        comm.all_reduce(x)
        return x.tolist()

    assert ranks(rank) == [[[0, 3, 6], [9, 12, 15]]] * N


def test_a_premul_sum_scales_each_ranks_part_by_its_own_factor() -> None:
    def rank(comm):
        found = []
        for dtype in ("float32", "int32", "complex64", "bfloat16"):
            with comm.premul_sum(comm.rank + 1, dtype) as op:
                x = np.ones(2, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
                found.append(complex(comm.all_reduce(x, op=op)[0]))
        return found

    assert ranks(rank) == [[6, 6, 6, 6]] * N


def test_a_premul_sum_is_bound_to_its_dtype_and_its_communicator(alone: pynccl.Communicator) -> None:
    op = alone.premul_sum(2, "float32")
    with pytest.raises(pynccl.InvalidArgumentError, match=r"comm.premul_sum\(scalar, 'float64'\)"):
        alone.all_reduce(np.ones(2), op=op)
    with pynccl.Communicator(1, pynccl.get_unique_id("host"), 0, library="host") as other:
        with pytest.raises(pynccl.InvalidArgumentError, match="make one with this communicator's premul_sum"):
            other.all_reduce(np.ones(2, "f4"), op=op)
    op.destroy()
    op.destroy()
    with pytest.raises(pynccl.InvalidUsageError, match="was destroyed"):
        alone.all_reduce(np.ones(2, "f4"), op=op)


@pytest.mark.parametrize("op", [["sum"], None, 0, {}])
def test_what_is_no_reduction_is_refused(alone: pynccl.Communicator, op: Any) -> None:
    with pytest.raises(TypeError, match="all_reduce: op must be a name such as 'sum'"):
        alone.all_reduce(np.ones(2), op=op)


@pytest.mark.parametrize(
    ("scalar", "dtype", "match"),
    [
        (0.5, "int32", "not a whole number"),
        (2**40, "int32", "not a whole number that fits"),
        ([1, 2], "float32", "one real number"),
        ("2", "float32", "premul_sum: scalar='2' must be one real number"),
        (None, "float32", "premul_sum: scalar=None must be one real number"),
        (np.datetime64(1, "s"), "float32", "one real number"),
        (10**400, "float64", "one real number that fits float64"),
        (10**400, "int64", "one real number that fits int64"),
        (float("nan"), "int32", "not a whole number"),
        (1e30, "float16", r"scalar=1e\+30 is too large for float16"),
        (1e39, "float32", "too large"),
        (1e39, "bfloat16", "too large"),
        (1e4, "float8_e4m3fn", "too large"),
        (1j, "complex64", "one real number"),
        (1, "bool", "cannot be summed"),
        (1, "int16", "cannot be summed"),
    ],
)
def test_a_factor_that_the_dtype_cannot_hold_is_refused(
    alone: pynccl.Communicator, scalar: Any, dtype: str, match: str
) -> None:
    with pytest.raises(pynccl.InvalidArgumentError, match=match):
        alone.premul_sum(scalar, dtype)


@pytest.mark.parametrize(
    "scalar", [float("inf"), float("nan"), np.float32(2), ml_dtypes.bfloat16(2), 65504, 1e-9]
)
def test_a_factor_that_the_dtype_holds_is_taken(alone: pynccl.Communicator, scalar: Any) -> None:
    with alone.premul_sum(scalar, "float16") as op:
        x = alone.all_reduce(np.ones(1, "f2"), op=op)
        np.testing.assert_array_equal(x, np.float16(scalar))


def test_a_barrier_lets_nobody_pass_before_the_last_has_come() -> None:
    def rank(comm, arrived):
        for _ in range(50):
            arrived[comm.rank] += 1
            comm.barrier()
            assert min(arrived) == max(arrived)
            comm.barrier()
        return arrived[comm.rank]

    assert run_ranks(N, rank, [0] * N, library="host", processes=False) == [50] * N


# --- groups -------------------------------------------------------------------------------------------------


def test_sends_and_receives_in_a_group_pass_each_other() -> None:
    def rank(comm):
        here, n = comm.rank, comm.size
        x, y = np.full(1 << 16, here), np.empty(1 << 16, int)
        with pynccl.group():
            comm.send(x, (here + 1) % n)
            assert comm.recv(y, (here - 1) % n) is y
        return int(y.min()), int(y.max())

    assert ranks(rank) == [(2, 2), (0, 0), (1, 1)]


def test_an_exception_in_a_group_starts_nothing_and_the_communicator_goes_on() -> None:
    def rank(comm):
        x = np.ones(2)
        with pytest.raises(ZeroDivisionError):
            with pynccl.group():
                comm.all_reduce(x)
                comm.send(x, 0)
                raise ZeroDivisionError
        with pytest.raises(pynccl.InvalidArgumentError, match="do not divide"):
            with pynccl.group():
                comm.all_reduce(x)
                comm.reduce_scatter(np.ones(N + 1))
        assert x.tolist() == [1, 1]
        return comm.all_reduce(x).tolist()

    assert ranks(rank) == [[3, 3]] * N


def test_groups_nest_and_an_inner_one_that_fails_takes_only_its_own_calls() -> None:
    def rank(comm):
        x, y, z = np.ones(1), np.ones(1), np.ones(1)
        with pynccl.group() as outer:
            comm.all_reduce(x)
            with pynccl.group():
                comm.all_reduce(y)
            assert y.tolist() == [1]
            with pytest.raises(KeyError):
                with pynccl.group():
                    comm.all_reduce(z)
                    raise KeyError
            assert len(outer) == 2
        return x.tolist() + y.tolist() + z.tolist()

    assert ranks(rank) == [[3, 3, 1]] * N


def test_a_group_is_of_one_thread(alone: pynccl.Communicator) -> None:
    x = np.full(2, 5.0)
    with alone.premul_sum(2, "float64") as op, pynccl.group():
        other = threading.Thread(target=alone.all_reduce, args=(x,), kwargs={"op": op})
        other.start()
        other.join()
        assert x.tolist() == [10, 10]


def test_one_thread_drives_several_communicators_in_groups() -> None:
    comms = pynccl.Communicator.init_all(N, library="host", name="clique")
    assert [(c.rank, c.size) for c in comms] == [(0, 3), (1, 3), (2, 3)]
    with pynccl.group():
        summed = [c.all_reduce(np.full(3, c.rank + 1.0)) for c in comms]
    with pynccl.group():
        halves = [c.split(c.rank % 2, name="half") for c in comms]
        assert repr(halves[0]) == "<Communicator 'half' rank -1 of 0, host, being made>"
        with pytest.raises(pynccl.InvalidUsageError, match="made when the group ends"):
            halves[0].barrier()
    with pynccl.group():
        gathered = [c.all_gather(np.array(c.rank)) for c in halves]
    assert [x.tolist() for x in summed] == [[6, 6, 6]] * N
    assert [x.tolist() for x in gathered] == [[0, 1], [0], [0, 1]]
    for comm in (*halves, *comms):
        comm.destroy()


def test_a_group_of_inits_makes_a_clique_in_one_thread() -> None:
    uid = pynccl.get_unique_id("host")
    with pynccl.group():
        comms = [pynccl.Communicator(2, uid, rank, library="host") for rank in range(2)]
    with pynccl.group():
        xs = [comm.all_reduce(np.ones(1)) for comm in comms]
    assert [x.tolist() for x in xs] == [[2], [2]]
    for comm in comms:
        comm.destroy()


def test_a_communicator_of_a_group_that_is_given_up_was_never_made() -> None:
    with pytest.raises(ZeroDivisionError):
        with pynccl.group():
            comm = pynccl.Communicator(2, pynccl.get_unique_id("host"), 0, library="host")
            raise ZeroDivisionError
    assert comm.closed
    with pytest.raises(pynccl.InvalidUsageError, match="never made"):
        comm.barrier()


def test_a_simulated_group_changes_nothing(alone: pynccl.Communicator) -> None:
    x = np.ones(4)
    with alone.premul_sum(2, "float64") as op, pynccl.group(simulate=True) as simulated:
        alone.all_reduce(x, op=op)
    assert x.tolist() == [1, 1, 1, 1]
    assert simulated.estimated_time is not None
    with pytest.raises(pynccl.InvalidUsageError, match="simulate"):
        with pynccl.group(), pynccl.group(simulate=True):
            pass
    alone.barrier()


# --- prepared calls -----------------------------------------------------------------------------------------


def test_a_prepared_call_does_the_same_each_time_with_what_the_arrays_hold_now() -> None:
    def rank(comm):
        x, out = np.ones(2), np.zeros(2 * comm.size)
        add, collect = comm.prepare("all_reduce", x), comm.prepare("all_gather", x, out=out)
        assert add() is x
        assert add() is x
        x[:] += comm.rank
        assert collect() is out
        with pynccl.group():
            assert add() is x
        return x.tolist(), out.tolist()

    assert ranks(rank) == [([30, 30], [9, 9, 10, 10, 11, 11])] * N


def test_a_prepared_call_keeps_its_arrays_alive(alone: pynccl.Communicator) -> None:
    call = alone.prepare("all_gather", np.full(1 << 16, 7.0))
    gc.collect()
    assert call().tolist() == [7.0] * (1 << 16)


def test_a_prepared_call_is_checked_when_it_is_made(alone: pynccl.Communicator) -> None:
    with pytest.raises(
        ValueError, match="'allreduce' is not a collective; use one of all_reduce, all_gather"
    ):
        alone.prepare("allreduce", np.ones(2))
    with pytest.raises(pynccl.InvalidArgumentError, match="not contiguous"):
        alone.prepare("all_reduce", np.ones((4, 4))[:, ::2])


def test_a_prepared_call_of_an_ended_communicator_says_so() -> None:
    comm = pynccl.Communicator(1, pynccl.get_unique_id("host"), 0, library="host")
    call = comm.prepare("all_reduce", np.ones(2))
    comm.destroy()
    with pytest.raises(pynccl.InvalidUsageError, match="was destroyed"):
        call()


# --- memory and one-sided calls -----------------------------------------------------------------------------


def test_memory_of_the_library_is_an_ordinary_array() -> None:
    def rank(comm):
        x, scalar, none = comm.empty((64, 3), "f8"), comm.empty((), ml_dtypes.bfloat16), comm.empty(0, "i4")
        x[:], scalar[()] = comm.rank, 2
        comm.all_reduce(x)
        comm.all_reduce(scalar)
        comm.all_reduce(none)
        view = x[5:]
        del x
        gc.collect()
        return float(view.sum()), float(scalar), none.shape

    assert ranks(rank) == [(3.0 * 59 * 3, 6.0, (0,))] * N


def test_puts_arrive_before_the_signals_that_follow_them() -> None:
    def rank(comm):
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        mine = comm.empty(8, "f4")
        mine[:] = -1
        comm.barrier()
        with comm.register_window(mine) as window:
            assert window.array is mine
            comm.put(np.full(2, comm.rank, "f4"), right, window, offset=8)
            comm.wait_signal(left)
            found = mine.tolist()
            comm.signal(left, signal=1)
            comm.signal(left, signal=1)
            comm.wait_signal({right: 2}, signal=1)
            comm.barrier()
        return found

    assert ranks(rank) == [[-1, -1, left, left, -1, -1, -1, -1] for left in (2, 0, 1)]


def test_wrong_windows_offsets_and_counts_are_refused(alone: pynccl.Communicator) -> None:
    x = alone.empty(8, "f4")
    with alone.register_window(x) as window:
        for offset in (-1, 8 * 4 - 3, 8 * 4):
            with pytest.raises(pynccl.InvalidArgumentError, match="do not fit a window of 32 bytes"):
                alone.put(np.ones(1, "f4"), 0, window, offset)
        with pytest.raises(pynccl.InvalidArgumentError, match=r"put: x is float64 .* float32.*x\.view"):
            alone.put(np.ones(1), 0, window)
        alone.put(np.full(1, 7.0, "f4").view("u1"), 0, window)
        assert x[0] == 7
        with pytest.raises(TypeError, match="must be a Window"):
            alone.put(x, 0, x)
        with pytest.raises(pynccl.InvalidArgumentError, match="count=0"):
            alone.wait_signal(0, 0)
        with pytest.raises(pynccl.InvalidArgumentError, match="at least one rank"):
            alone.wait_signal([])
    with pytest.raises(pynccl.InvalidUsageError, match="has ended"):
        alone.put(np.ones(1, "f4"), 0, window)
    with pytest.raises(pynccl.InvalidArgumentError, match="comm.empty"):
        alone.register_window(alone.empty(9, "u1")[1:])


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda comm: comm.send(np.ones(1), "x"), "send: peer must be an integer, not str"),
        (lambda comm: comm.recv(np.ones(1), 1.5), "recv: peer must be an integer, not float"),
        (lambda comm: comm.broadcast(np.ones(1), None), "broadcast: root must be an integer, not NoneType"),
        (lambda comm: comm.split("red"), "split: color must be an integer, not str"),
        (lambda comm: comm.split(0, "first"), "split: key must be an integer, not str"),
        (lambda comm: comm.grow("more"), "grow: nranks must be an integer, not str"),
        (lambda comm: comm.signal(0, signal=None), "signal: signal must be an integer, not NoneType"),
        (lambda comm: comm.wait_signal({0: "all"}), "wait_signal: count must be an integer, not str"),
        (lambda comm: comm.empty("wide"), "empty: each axis of shape must be an integer, not str"),
        (lambda comm: comm.empty(3, "float31"), "empty: dtype='float31' is no dtype"),
        (lambda comm: comm.empty(3, "O"), "empty: dtype='O' is of Python objects"),
        (lambda comm: comm.empty(3, [("a", "i4"), ("b", "O")]), "empty: dtype=.* is of Python objects"),
        (lambda comm: comm.register_window(comm.empty(1), flags="fast"), "flags must be an integer, not str"),
        (lambda comm: comm.premul_sum(1, "float31"), "premul_sum: dtype='float31' is no dtype"),
        (lambda comm: comm.register([1]), "register: x must be an array"),
        (lambda comm: comm.register_window(3), "register_window: x must be an array"),
        (lambda comm: comm.put("x", 0, None), "put: x must be an array"),
        (lambda comm: pickle.dumps(comm), "a Communicator cannot be copied or pickled"),
    ],
)
def test_arguments_of_a_wrong_type_are_named_and_the_communicator_goes_on(
    alone: pynccl.Communicator, call: Any, match: str
) -> None:
    with pytest.raises(TypeError, match=match):
        call(alone)
    alone.barrier()


BEYOND_INT = [2**31, 2**32, 2**32 + 1, 2**40, 10**30]


@pytest.mark.parametrize("n", BEYOND_INT)
@pytest.mark.parametrize(
    "call",
    [
        lambda comm, n: pynccl.Communicator(n, pynccl.get_unique_id("host"), 0, library="host"),
        lambda comm, n: pynccl.Communicator.join(n, pynccl.get_unique_id("host"), 0, library="host"),
        lambda comm, n: pynccl.Communicator.init_all(n, library="host"),
        lambda comm, n: pynccl.Communicator.init_all(1, devices=[n], library="host"),
        lambda comm, n: comm.split(n),
        lambda comm, n: comm.split(0, n),
        lambda comm, n: comm.split(0, -n - 1),
        lambda comm, n: comm.grow(n),
        lambda comm, n: comm.signal(0, signal=n),
        lambda comm, n: comm.signal(0, context=n),
        lambda comm, n: comm.put(np.ones(1, "f4"), 0, comm.register_window(comm.empty(1)), signal=n),
        lambda comm, n: comm.wait_signal(0, n),
        lambda comm, n: comm.wait_signal({0: n}),
        lambda comm, n: comm.wait_signal(0, signal=n),
        lambda comm, n: comm.register_window(comm.empty(1), flags=n),
    ],
)
def test_a_number_that_c_would_cut_is_refused(alone: pynccl.Communicator, call: Any, n: int) -> None:
    with pytest.raises(
        pynccl.InvalidArgumentError, match=rf"={n} must be at most 2147483647|={-n - 1} must be"
    ):
        call(alone, n)
    alone.barrier()


@pytest.mark.parametrize(
    ("shape", "dtype", "match"),
    [
        ((1 << 40, 1 << 40), "f4", r"empty: shape=\(.*\) of float32 is \d+ bytes; there can be at most"),
        (2**61, "f8", "is 18446744073709551616 bytes"),  # 0 in 64 bits
        (2**63, "u1", "each axis of shape=9223372036854775808 must be at most"),
        (1 << 60, "u1", "empty: 1152921504606846976 bytes"),
        (3, "V0", "empty: dtype='V0' has no size"),
        (3, "S", "empty: dtype='S' has no size; give it one, such as S8"),
    ],
)
def test_memory_of_an_impossible_size_is_refused(
    alone: pynccl.Communicator, shape: Any, dtype: str, match: str
) -> None:
    with pytest.raises(pynccl.InvalidArgumentError, match=match):
        alone.empty(shape, dtype)


def test_registrations_end_by_themselves_with_the_communicator() -> None:
    comm = pynccl.Communicator(1, pynccl.get_unique_id("host"), 0, library="host")
    registered = comm.register(comm.empty(4))
    window = comm.register_window(comm.empty(4))
    comm.destroy()
    for ended in (registered, window):
        with pytest.raises(pynccl.InvalidUsageError, match="has ended"):
            _ = ended.handle


# --- objects ------------------------------------------------------------------------------------------------


def nested(depth: int) -> Any:
    """Dicts, tuples and lists in each other: ``depth`` containers."""
    value: Any = 0
    for i in range(depth):
        value = ({"a": value}, (value,), [value])[i % 3]
    return value


def test_objects_arrive_as_they_were_sent() -> None:
    value = {
        "none": None,
        "numbers": [True, -(2**80), 2.5, float("inf"), "text 😀 \udcff"],
        ("a", 1): b"\0\xff",
        3: (np.arange(6, dtype="i2").reshape(2, 3), np.float32(1.5), np.array("x")),
        "bf16": np.ones(2, ml_dtypes.bfloat16),
        "nothing": [[], (), {}, b"", np.zeros((0, 2))],
        "plain bytes": [np.array([b"ab", b"c"], "V3"), np.void(b"xyz"), np.array(["a", ""]), np.array([b""])],
        "dates": [np.datetime64(3, "ns"), np.arange(2, dtype="m8[s]"), np.arange(2, dtype=">i4")],
        2**64: [2**63, -(2**63), 2**64 - 1],
        "deep": nested(98),
    }

    def rank(comm):
        got = comm.broadcast_object(value if comm.rank == 1 else object(), root=1)
        assert repr(got) == repr(value)
        return comm.all_gather_object([comm.rank] * comm.rank)

    assert ranks(rank) == [[[], [1], [2, 2]]] * N


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({1, 2}, "obj is a set"),
        ([1, {"a": object()}], r"obj\[1\]\['a'\] is a object"),
        ({None: len}, r"obj\[None\]"),
    ],
)
def test_only_data_is_sent_as_an_object(alone: pynccl.Communicator, value: Any, where: str) -> None:
    with pytest.raises(TypeError, match=f"broadcast_object: {where}.*never pickled"):
        alone.broadcast_object(value)


def test_numbers_of_any_size_are_sent(alone: pynccl.Communicator) -> None:
    value = {10**5000: [-(10**5000), 0]}
    assert alone.broadcast_object(value) == value
    with pytest.raises(TypeError, match=r"obj\[<int>\]\[1\] is a set"):
        alone.broadcast_object({10**5000: [0, {1}]})


def released() -> memoryview:
    view = memoryview(b"abc")
    view.release()
    return view


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({1, 2}, "obj is a set"),
        (nested(101), r"101 containers deep; at most 100"),
        (nested(5000), r"101 containers deep; at most 100"),
        (released(), "obj cannot be sent (ValueError: "),
        (np.zeros(2, "V0"), "obj has elements of no size"),
    ],
)
def test_an_object_that_cannot_be_sent_is_an_error_on_every_rank_and_nobody_waits(
    bad: Any, words: str
) -> None:
    def rank(comm):
        obj = bad if comm.rank == 1 else 0
        errors = []
        for call in (lambda: comm.broadcast_object(obj, 1), lambda: comm.all_gather_object(obj)):
            with pytest.raises((TypeError, pynccl.InvalidArgumentError, pynccl.InvalidUsageError)) as caught:
                call()
            errors.append(str(caught.value))
        assert comm.all_gather_object(comm.rank) == [0, 1, 2]
        return errors

    others, one, _ = ranks(rank)
    assert all("object of rank 1 cannot be sent" in text for text in others)
    assert all(words in text for text in one)


def test_an_object_that_contains_itself_is_refused(alone: pynccl.Communicator) -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TypeError, match=r"obj\[0\] contains itself"):
        alone.broadcast_object(value)


def test_no_message_makes_the_reader_do_anything_but_build_values_or_refuse() -> None:
    from pynccl import objects

    good = objects.encode("call", {"a": [b"xyz", np.arange(3)]})
    assert repr(objects.decode("call", good)) == "{'a': [b'xyz', array([0, 1, 2])]}"
    for cut in range(len(good)):
        with pytest.raises(pynccl.InvalidArgumentError, match="damaged"):
            objects.decode("call", good[:cut])
    for text in (b'{"$":"array","t":"O","s":[1],"n":8}', b'{"$":"eval","v":"1"}', b'{"a":1}', b"[" * 100000):
        message = len(text).to_bytes(8, "little") + text + bytes(8)
        with pytest.raises(pynccl.InvalidArgumentError, match="damaged"):
            objects.decode("call", message)


# --- communicators from communicators -----------------------------------------------------------------------


def test_shrink_leaves_the_ranks_that_stay_in_order() -> None:
    def rank(comm):
        if comm.rank == 1:
            return None
        with comm.shrink([1], name="small") as small:
            return small.rank, small.size, small.all_gather(np.array(comm.rank)).tolist()

    assert ranks(rank) == [(0, 2, [0, 2]), None, (1, 2, [0, 2])]


@pytest.mark.parametrize("given", [lambda uid: uid, bytes], ids=["id", "bytes"])
def test_grow_takes_a_newcomer_in(given: Any) -> None:
    def rank(comm, box):
        if comm.rank == 0:
            box["id"] = given(comm.growth_id())

            def newcomer():
                with pynccl.Communicator.join(N + 1, box["id"], N, library="host", name="new") as grown:
                    box["new"] = grown.rank, grown.size, grown.all_gather(np.array(grown.rank)).tolist()

            thread = threading.Thread(target=newcomer)
            thread.start()
        with comm.grow(N + 1, box["id"] if comm.rank == 0 else None) as grown:
            found = grown.rank, grown.size, grown.all_gather(np.array(grown.rank)).tolist()
        if comm.rank == 0:
            thread.join()
        return found

    box: dict[str, Any] = {}
    found = run_ranks(N, rank, box, library="host", processes=False)
    assert [*found, box["new"]] == [(r, 4, [0, 1, 2, 3]) for r in range(4)]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda comm: comm.split(-2), "color=-2 must be 0 or more, or None"),
        (lambda comm: comm.shrink([]), "exclude is empty"),
        (lambda comm: comm.shrink([0]), "rank 0 excludes itself"),
        (lambda comm: comm.shrink([7]), "exclude=7 is not a rank"),
        (lambda comm: comm.grow(1), "nranks=1 must be more than the 1 ranks"),
        (lambda comm: comm.grow(2, b"short"), "5 bytes; a unique id has 128"),
        (lambda comm: comm.grow(2, "id"), "str is not bytes; pass bytes"),
        (lambda comm: type(comm).join(2, "id", 1, library="host"), "str is not bytes; pass bytes"),
    ],
)
def test_wrong_derivations_are_refused_and_the_parent_goes_on(
    alone: pynccl.Communicator, call: Any, match: str
) -> None:
    with pytest.raises((pynccl.InvalidArgumentError, TypeError), match=match):
        call(alone)
    alone.barrier()


# --- beginning, progress, end -------------------------------------------------------------------------------


def test_a_unique_id_travels_as_bytes_and_by_pickle() -> None:
    uid = pynccl.get_unique_id("host")
    assert len(bytes(uid)) == 128
    assert pynccl.UniqueId.from_bytes(bytes(uid)) == uid == pickle.loads(pickle.dumps(uid))
    assert pynccl.get_unique_id("host") != uid
    with pytest.raises(TypeError, match="str is not bytes"):
        pynccl.UniqueId("text")  # type: ignore[arg-type]
    with pytest.raises(pynccl.InvalidArgumentError, match="5 bytes; a unique id has 128"):
        pynccl.UniqueId.from_bytes(b"short")


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((0, 0), {}, pynccl.InvalidArgumentError, "nranks=0"),
        ((2, 2), {}, pynccl.InvalidArgumentError, "rank=2 is not a rank of this communicator; use 0 to 1"),
        ((1, 0), {"timeout": 0}, pynccl.InvalidArgumentError, "timeout=0"),
        ((1, 0), {"timeout": -1}, pynccl.InvalidArgumentError, "timeout=-1"),
        ((1, 0), {"timeout": float("nan")}, pynccl.InvalidArgumentError, "timeout=nan"),
        ((1, 0), {"timeout": "soon"}, TypeError, "timeout='soon'"),
        ((1.0, 0), {}, TypeError, "nranks must be an integer, not float"),
        ((1, "0"), {}, TypeError, "rank must be an integer, not str"),
        ((1, 0), {"config": 5}, TypeError, "config=5 must be a dict"),
        ((1, 0), {"name": 5}, TypeError, "commName"),
        ((1, 0), {"config": {"colour": 1}}, TypeError, "colour"),
        ((1, 0), {"library": "nonsense"}, pynccl.InvalidArgumentError, "nonsense"),
    ],
)
def test_wrong_arguments_of_init_are_refused(arguments: Any, options: Any, error: Any, match: str) -> None:
    nranks, rank = arguments
    with pytest.raises(error, match=match):
        pynccl.Communicator(nranks, pynccl.get_unique_id("host"), rank, **{"library": "host", **options})


@pytest.mark.parametrize("value", ["abc", "-1", "0", "nan", "5x"])
@pytest.mark.parametrize("timeout", [None, 5])
def test_a_bad_time_limit_in_the_environment_is_named_wherever_it_is_read(
    monkeypatch: pytest.MonkeyPatch, value: str, timeout: float | None
) -> None:
    uid = pynccl.get_unique_id("host")
    monkeypatch.setenv("PYNCCL_TIMEOUT", value)
    calls: dict[str, Callable[[], Any]] = {
        "init": lambda: pynccl.init(library="host", timeout=timeout),
        "Communicator": lambda: pynccl.Communicator(1, uid, 0, library="host", timeout=timeout),
        "Stream": pynccl.Stream,
    }
    for call, make in calls.items():
        with pytest.raises(pynccl.InvalidArgumentError, match=rf"^{call}: PYNCCL_TIMEOUT='{value}' must be"):
            make()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "5"])
def test_a_bad_time_limit_of_init_is_named(timeout: Any) -> None:
    with pytest.raises((TypeError, pynccl.InvalidArgumentError), match=f"^init: timeout={timeout!r} must be"):
        pynccl.init(library="host", timeout=timeout)


def test_a_wait_without_end_is_possible_and_a_bad_limit_of_it_is_refused() -> None:
    uid = pynccl.get_unique_id("host")
    with pynccl.Communicator(1, uid, 0, library="host", config={"blocking": 0}, timeout=float("inf")) as comm:
        comm.wait(float("inf"))
        comm.wait(0)
        for bad in (float("nan"), -1, "1"):
            with pytest.raises((TypeError, pynccl.InvalidArgumentError), match=r"^wait: timeout="):
                comm.wait(bad)  # type: ignore[arg-type]


def test_waiting_no_time_for_a_communicator_looks_once() -> None:
    uid = pynccl.get_unique_id("host")
    comm = pynccl.Communicator(2, uid, 0, library="host", config={"blocking": 0})
    with pytest.raises(pynccl.NcclTimeoutError, match="still in progress after 0 s"):
        comm.wait(0)
    comm.abort()


def test_init_with_no_launcher_is_a_job_of_one() -> None:
    with pynccl.init(library="host", name="single") as comm:
        assert (comm.rank, comm.size, comm.name, comm.device) == (0, 1, "single", None)
        assert comm.all_gather(np.array([4])).tolist() == [4]


def test_init_meets_at_a_file(tmp_path: Any) -> None:
    def rank(r, n, uid):
        with pynccl.init(f"file://{tmp_path}/meet", rank=r, size=n, library="host", timeout=20) as comm:
            return comm.rank, comm.all_reduce(np.ones(1)).tolist()

    assert run_ranks(N, rank, comm=False) == [(r, [3]) for r in range(N)]


def test_init_takes_an_id_that_came_some_other_way() -> None:
    def rank(r, n, uid):
        with pynccl.init(unique_id=bytes(uid), rank=r, size=n, library="host") as comm:
            return comm.all_reduce(np.ones(1)).tolist()

    assert run_ranks(N, rank, comm=False, library="host") == [[3]] * N


def test_init_says_when_ranks_use_different_libraries(tmp_path: Any) -> None:
    def rank(r, n, uid):
        from pynccl.abi import load

        lib = load("host")
        if r == 1:
            lib.version = 20000
        try:
            pynccl.init(f"file://{tmp_path}/meet", rank=r, size=n, library=lib, timeout=1).abort()
        except pynccl.NcclError as error:
            return str(error)

    first, second = run_ranks(2, rank, comm=False)
    assert "rank 1 has library host 20000" in second
    assert "set PYNCCL_LIBRARY" in second
    assert "rank 1" in first  # which never came


def test_a_non_blocking_communicator_is_waited_for() -> None:
    def rank(r, n, uid):
        comm = pynccl.Communicator(n, uid, r, library="host", config={"blocking": False}, name="patient")
        with comm:
            comm.wait(20)
            assert comm.async_error() == Result.SUCCESS
            x = comm.all_reduce(np.ones(2))
            comm.wait(20)
            child = comm.split(0)
            child.wait(20)
            y = child.all_reduce(np.ones(1))
            child.wait(20)
            child.destroy()
            return comm.rank, comm.size, x.tolist(), y.tolist()

    assert run_ranks(N, rank, comm=False, library="host") == [(r, N, [3, 3], [3]) for r in range(N)]


def test_a_non_blocking_communicator_that_is_not_ready_says_to_wait() -> None:
    uid = pynccl.get_unique_id("host")
    comm = pynccl.Communicator(2, uid, 0, library="host", config={"blocking": False}, timeout=20)
    assert comm.async_error() == Result.IN_PROGRESS  # rank 1 is not there
    with pytest.raises(pynccl.InProgressError, match=r"call comm.wait\(timeout\) first"):
        comm.barrier()
    with pytest.raises(pynccl.NcclTimeoutError, match="still in progress after 0.05 s"):
        comm.wait(0.05)
    comm.abort()
    assert comm.closed


@pytest.mark.parametrize("blocking", [0, 1])
@pytest.mark.parametrize("act", ["finalize", "revoke"])
def test_what_was_finalized_or_revoked_can_be_destroyed(act: str, blocking: int) -> None:
    uid = pynccl.get_unique_id("host")
    comm = pynccl.Communicator(1, uid, 0, library="host", config={"blocking": blocking})
    comm.wait(20)
    comm.register(np.ones(3))
    comm.register_window(comm.empty(8))
    comm.premul_sum(2)
    getattr(comm, act)()
    comm.wait(20)
    comm.destroy()
    assert comm.closed


@pytest.mark.parametrize("end", ["destroy", "abort"])
@pytest.mark.parametrize(
    "use",
    [
        lambda comm: comm.all_reduce(np.ones(1)),
        lambda comm: comm.all_reduce(np.ones(1), np.ones(1)),
        lambda comm: comm.send(np.ones(1), 0),
        lambda comm: comm.handle,
        lambda comm: comm.split(0),
        lambda comm: comm.premul_sum(1),
        lambda comm: comm.empty(1),
        lambda comm: comm.async_error(),
        lambda comm: comm.broadcast_object(1),
        lambda comm: comm.prepare("all_reduce", np.ones(1)),
        lambda comm: comm.__enter__(),
    ],
)
def test_after_its_end_every_use_says_how_it_ended(end: str, use: Any) -> None:
    comm = pynccl.Communicator(1, pynccl.get_unique_id("host"), 0, library="host", name="brief")
    getattr(comm, end)()
    comm.destroy()
    comm.abort()
    with pytest.raises(
        pynccl.InvalidUsageError, match=rf"communicator 'brief' of rank 0 was {end.rstrip('e')}ed"
    ):
        use(comm)


def test_an_error_inside_with_aborts_so_that_nobody_waits() -> None:
    def rank(comm):
        child = comm.split(0, name="child")
        try:
            with child:
                if comm.rank == 0:
                    raise KeyError("rank 0 alone")
                child.barrier()
        except (KeyError, pynccl.RemoteError) as error:
            return type(error).__name__, child.closed

    assert ranks(rank) == [("KeyError", True), ("RemoteError", True), ("RemoteError", True)]


def test_finalize_ends_the_calls_and_destroy_the_communicator(alone: pynccl.Communicator) -> None:
    comm = alone.split(0)
    comm.finalize()
    with pytest.raises(pynccl.NcclError):
        comm.barrier()
    comm.destroy()


def test_revoke_stops_the_calls_and_leaves_split() -> None:
    def rank(comm):
        comm.barrier()
        comm.revoke()
        with pytest.raises(pynccl.NcclError):
            comm.all_reduce(np.ones(4))
        comm.abort()
        return comm.closed

    assert ranks(rank) == [True] * N


def test_a_forgotten_communicator_is_a_warning_and_no_call() -> None:
    comm = pynccl.Communicator(1, pynccl.get_unique_id("host"), 0, library="host", name="forgotten")
    handle, library = comm.handle, comm.library
    with pytest.warns(ResourceWarning, match="'forgotten' rank 0 of 1.* was not destroyed"):
        del comm
        gc.collect()
    assert library.ncclCommAbort(handle) == 0  # it was still there


def test_an_ended_communicator_is_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        pynccl.Communicator(1, pynccl.get_unique_id("host"), 0, library="host").destroy()
        gc.collect()


def test_a_communicator_without_a_name_is_called_by_its_id_in_errors_and_in_its_repr() -> None:
    def rank(comm):
        with comm.split(0) as child, comm.split(0, name="chosen") as named:
            texts = []
            for each in (comm, child, named):
                with pytest.raises(pynccl.InvalidUsageError) as caught:
                    each.all_reduce(np.ones(1 + comm.rank))
                called = re.search(r'of communicator "(\w+)" differs', str(caught.value))
                texts.append((called and called[1], repr(each)))
            comm.barrier()
        return texts

    mine, other = run_ranks(2, rank, library="host")
    assert len({name for name, _ in mine}) == 3 and mine[2][0] == "chosen"
    for number, texts in enumerate((mine, other)):
        for name, text in texts:
            assert text == f"<Communicator {name!r} rank {number} of 2, host, open>"


def test_help_tells_attributes_and_calls_and_nothing_internal() -> None:
    text = pydoc.plain(pydoc.render_doc(pynccl.Communicator))
    attributes = text.partition("Attributes\n")[2].partition("Common to all calls")[0]
    for name in ("rank", "size", "name", "library", "on_gpu", "device", "handle", "closed"):
        assert re.search(rf"^ \|  .*\b{name}\b", attributes, re.MULTILINE), name
    for internal in ("check_open", "settle", "issue", "disown", "place", "fail"):
        assert not re.search(rf"^ \|  {internal}\b", text, re.MULTILINE), internal


@pytest.mark.parametrize(
    ("op", "remedy"),
    [("mean", "use 'avg'"), ("Product", "use 'prod'"), ("SUM", "use 'sum'"), ("xor", "use one of sum, prod")],
)
def test_a_reduction_by_another_name_is_an_error_with_the_right_one(
    alone: pynccl.Communicator, op: str, remedy: str
) -> None:
    with pytest.raises(pynccl.InvalidArgumentError, match=f"all_reduce: op='{op}' is not .*; {remedy}"):
        alone.all_reduce(np.ones(2), op=op)


def test_the_average_of_integers_drops_the_fraction() -> None:
    def rank(comm):
        return comm.all_reduce(np.array([-1, 1]) * (1 + comm.rank), op="avg").tolist()

    assert run_ranks(2, rank, library="host") == [[-1, 1]] * 2


def test_what_is_under_way_says_what_it_is(alone: pynccl.Communicator) -> None:
    x = np.ones(2)
    with pynccl.group() as together:
        assert repr(together) == "<Group of 0 calls>"
        alone.send(x, 0)
        alone.recv(x.copy(), 0)
        alone.send(x, 0)
        alone.recv(x.copy(), 0)
        assert repr(together) == "<Group of 4 calls: send, recv>"
    event = pynccl.Event()
    assert re.fullmatch(r"<Event 0x[0-9a-f]+ done>", repr(event))


def test_handles_are_for_other_code_that_speaks_nccl(alone: pynccl.Communicator) -> None:
    import ctypes

    count = ctypes.c_int()
    assert alone.library.ncclCommCount(alone.handle, ctypes.byref(count)) == 0
    assert count.value == 1


def test_algorithms_are_for_libraries_that_have_them(alone: pynccl.Communicator) -> None:
    with pytest.raises(pynccl.InvalidUsageError, match='algorithm "ring" means nothing to the host library'):
        alone.all_reduce(np.ones(2), algorithm="ring")
    with pytest.raises(pynccl.InvalidUsageError, match="leave algorithm=None"):
        alone.prepare("all_gather", np.ones(2), algorithm="tree")()
    with pytest.raises(TypeError, match="algorithm must be a name such as 'ring' .*not int"):
        alone.all_gather(np.ones(2), algorithm=3)
    alone.barrier()


def test_an_algorithm_names_the_release_that_an_older_library_lacks(
    alone: pynccl.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(alone.library), "has", lambda self, name: not name.endswith("Config"))
    with pytest.raises(
        pynccl.MissingFunctionError, match="needs ncclAllReduceConfig, which NCCL has since 2.31"
    ):
        alone.all_reduce(np.ones(2), algorithm="tree")


def test_nccl_without_a_gpu_is_a_cuda_error() -> None:
    with pytest.raises(pynccl.UnhandledCudaError, match="ncclCommInitRank"):
        pynccl.Communicator(1, pynccl.get_unique_id("nccl"), 0, library="nccl")
    with pytest.raises(pynccl.UnhandledCudaError, match="library='host'"):
        pynccl.init(library="nccl")


def test_importing_pynccl_imports_no_cupy() -> None:
    code = "import sys, pynccl; pynccl.init(library='host').destroy(); assert 'cupy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

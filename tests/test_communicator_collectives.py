"""What each collective does to which arrays, with which reductions, called or prepared."""

from __future__ import annotations

import gc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from communicator_ranks import N, ranks  # type: ignore[import-not-found]

import pynccl
from pynccl.testing import run_ranks

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


def test_the_average_of_integers_drops_the_fraction() -> None:
    def rank(comm):
        return comm.all_reduce(np.array([-1, 1]) * (1 + comm.rank), op="avg").tolist()

    assert run_ranks(2, rank, library="host") == [[-1, 1]] * 2


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

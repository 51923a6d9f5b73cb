"""Memory of the library, and one-sided calls on it."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest
from communicator_ranks import N, ranks  # type: ignore[import-not-found]

import pynccl


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


def test_registrations_end_by_themselves_with_the_communicator() -> None:
    comm = pynccl.Communicator(1, pynccl.get_unique_id("host"), 0, library="host")
    registered = comm.register(comm.empty(4))
    window = comm.register_window(comm.empty(4))
    comm.destroy()
    for ended in (registered, window):
        with pytest.raises(pynccl.InvalidUsageError, match="has ended"):
            _ = ended.handle

"""How communicators end: destroyed, finalized, revoked, aborted by an error, or forgotten."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import numpy as np
import pytest
from communicator_ranks import N, ranks  # type: ignore[import-not-found]

import pynccl


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

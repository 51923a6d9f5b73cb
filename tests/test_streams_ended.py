"""What is queued on a host stream when its communicator ends must not begin, whatever call it is of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pynccl
from pynccl.collectives import compile, generate
from pynccl.collectives.failing import ends_on_failure
from pynccl.testing import run_ranks


def grouped(comm: Any, x: Any, window: Any, stream: Any) -> None:
    with pynccl.group():
        comm.send(x[:2].copy(), 1 - comm.rank, stream=stream)
        comm.recv(x[2:4], 1 - comm.rank, stream=stream)


def message(comm: Any, x: Any, window: Any, stream: Any) -> None:
    (comm.recv if comm.rank else comm.send)(x, 1 - comm.rank, stream=stream)


def put(comm: Any, x: Any, window: Any, stream: Any) -> None:
    comm.wait_signal(0) if comm.rank else comm.put(x, 1, window, stream=stream)


def signal(comm: Any, x: Any, window: Any, stream: Any) -> None:
    comm.wait_signal(0) if comm.rank else comm.signal(1, stream=stream)


CALLS = {
    "collective": lambda comm, x, window, stream: comm.all_reduce(x, stream=stream),
    "prepared": lambda comm, x, window, stream: comm.prepare("all_reduce", x, stream=stream)(),
    "compiled": lambda comm, x, window, stream: compile(generate("ring", 2), comm)(x, stream=stream),
    "message": message,
    "group": grouped,
    "put": put,
    "signal": signal,
}


def revoked(comm: Any, stream: Any) -> Callable[[], None]:
    queued = threading.Event()

    def function() -> None:
        queued.wait(20)
        with ends_on_failure(comm, "a call"):
            raise FloatingPointError("not these numbers")

    stream.call(function)
    return queued.set


def broken(comm: Any, stream: Any) -> Callable[[], None]:
    comm.library.pyncclSetTimeout(comm.handle, 0.2)
    comm.wait_signal(1, signal=5, stream=stream)  # never raised
    return lambda: None


@pytest.mark.parametrize("ending", [revoked, broken])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_is_queued_behind_the_end_of_its_communicator_does_not_begin(call: Any, ending: Any) -> None:
    def rank(comm: Any) -> None:
        x, window_of = np.full(4, comm.rank + 1.0), comm.empty(4, "float64")
        window_of[:] = 7
        window = comm.register_window(window_of)
        comm.barrier()
        if comm.rank == 1:
            with pytest.raises(pynccl.RemoteError, match=r"rank 0 (has|reported: wait_signal)"):
                call(comm, x, window, None)
        else:
            stream = pynccl.Stream(comm.library)
            end = ending(comm, stream)
            call(comm, x, window, stream)
            end()
            with pytest.raises((FloatingPointError, pynccl.NcclTimeoutError)):
                stream.synchronize()
            stream.close()
        assert x.tolist() == [comm.rank + 1.0] * 4 and window_of.tolist() == [7] * 4

    run_ranks(2, rank, library="host", timeout=30)


@pytest.mark.parametrize("n", [1, 2])
def test_it_gets_the_error_of_a_call_that_is_made_afterwards(n: int) -> None:
    def rank(comm: Any) -> None:
        stream, queued, x = pynccl.Stream(comm.library), threading.Event(), np.full(4, 2.0)
        stream.call(lambda: queued.wait(20))
        comm.all_reduce(x, op=comm.premul_sum(3, "float64"), stream=stream)
        threading.Timer(0.1, queued.set).start()
        comm.revoke()  # waits for what is queued
        with pytest.raises(pynccl.InvalidUsageError, match="all_reduce: the communicator was revoked"):
            stream.synchronize()
        assert x.tolist() == [2.0] * 4
        stream.close()

    run_ranks(n, rank, library="host", timeout=30)


def test_each_later_call_names_the_failure_that_broke_the_communicator_and_no_other() -> None:
    def rank(comm: Any) -> None:
        if comm.rank == 1:
            with pytest.raises(pynccl.RemoteError):
                comm.barrier()
            return
        comm.library.pyncclSetTimeout(comm.handle, 0.2)
        with pytest.raises(pynccl.NcclTimeoutError):
            comm.recv(np.empty(3), 1)
        comm.library.ncclCommSplit(comm.handle, -7, 0, None, None)  # refused, in other words
        texts = []
        for _ in range(3):
            with pytest.raises(pynccl.NcclTimeoutError, match=r"earlier failure \(recv\(count=3") as caught:
                comm.barrier()
            texts.append(str(caught.value))
        assert len(set(texts)) == 1 and texts[0].count("broken since") == 1

    run_ranks(2, rank, library="host", timeout=30)

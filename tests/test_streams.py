"""Host streams and events: order, errors, what counts as a stream, and keeping arrays in flight alive."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import pynccl
from pynccl.abi.types import pyncclHostFn_t
from pynccl.streams import gpu_stream
from pynccl.testing import run_ranks


@pytest.fixture
def alone() -> Iterator[pynccl.Communicator]:
    with pynccl.Communicator(1, pynccl.get_unique_id("host"), 0, library="host") as comm:
        yield comm


@pytest.fixture
def stream() -> Iterator[pynccl.Stream]:
    stream = pynccl.Stream()
    yield stream
    stream.close()


class Gate:
    """Work that holds a stream up until ``open``: what is queued behind it cannot have run before."""

    def __init__(self, stream: pynccl.Stream) -> None:
        self._opened = threading.Event()
        self._wait = pyncclHostFn_t(lambda _: bool(self._opened.wait(30)) and None)
        assert stream.library.pyncclStreamLaunchHostFunc(stream.handle, self._wait, None) == 0

    def open(self) -> None:
        self._opened.set()


def test_a_call_on_a_stream_runs_when_the_stream_comes_to_it(
    alone: pynccl.Communicator, stream: pynccl.Stream
) -> None:
    gate, x = Gate(stream), np.full(4, 3.0)
    with alone.premul_sum(2, "float64") as double:
        assert alone.all_reduce(x, op=double, stream=stream) is x
        assert x.tolist() == [3] * 4
        assert not stream.query()
        gate.open()
        stream.synchronize()
    assert stream.query()
    assert x.tolist() == [6] * 4


def test_calls_on_one_stream_run_in_order() -> None:
    def rank(comm):
        stream, x = pynccl.Stream(), np.ones(1000)
        for _ in range(20):
            comm.all_reduce(x, op="sum", stream=stream)
            comm.all_reduce(x, op="avg", stream=stream)
        stream.synchronize()
        stream.close()
        return float(x.min()), float(x.max())

    assert run_ranks(2, rank, library="host") == [(2.0**20, 2.0**20)] * 2


def test_inside_with_stream_it_is_the_default(alone: pynccl.Communicator, stream: pynccl.Stream) -> None:
    inner, outer_gate = pynccl.Stream(), Gate(stream)
    x, y, z = np.ones(1), np.ones(1), np.ones(1)
    # One communicator's calls run in the order in which they were made, so each stream has a communicator
    # here.
    with alone.split(0) as second, alone.split(0) as third:
        inner_gate = Gate(inner)
        with stream:
            alone.all_reduce(x, op=alone.premul_sum(5, "float64"))
            with inner:
                second.all_reduce(y, op=second.premul_sum(5, "float64"))
            alone.all_reduce(x, op=alone.premul_sum(7, "float64"))
        third.all_reduce(z, op=third.premul_sum(5, "float64"))  # outside: at once
        assert (x[0], y[0], z[0]) == (1, 1, 5)
        inner_gate.open()
        inner.synchronize()
        assert (x[0], y[0]) == (1, 5)
        outer_gate.open()
        stream.synchronize()
        assert x[0] == 35
        inner.close()


def test_an_explicit_default_stream_waits_even_inside_with_stream(
    alone: pynccl.Communicator, stream: pynccl.Stream
) -> None:
    gate, x = Gate(stream), np.full(1, 1.0)
    with alone.premul_sum(5, "float64") as op, stream:
        for handle in (0, 1, 2):
            alone.all_reduce(x, op=op, stream=handle)
        assert x[0] == 125
        gate.open()
        stream.synchronize()


def test_a_function_runs_between_what_is_queued_before_and_after_it(
    alone: pynccl.Communicator, stream: pynccl.Stream
) -> None:
    gate, x, seen = Gate(stream), np.full(1, 1.0), []
    with alone.premul_sum(3, "float64") as triple:
        for _ in range(3):
            alone.all_reduce(x, op=triple, stream=stream)
            stream.call(lambda: seen.append((float(x[0]), threading.get_ident())))
        assert seen == []
        gate.open()
        stream.synchronize()
    assert [value for value, _ in seen] == [3, 9, 27]
    assert threading.get_ident() not in {thread for _, thread in seen}


def test_what_a_function_raises_is_raised_once_by_synchronize_and_later_work_still_runs(
    stream: pynccl.Stream,
) -> None:
    seen = []
    stream.call(lambda: 1 // 0)
    stream.call(lambda: [][1])
    stream.call(lambda: seen.append("after"))
    with pytest.raises(ZeroDivisionError):
        stream.synchronize()
    assert seen == ["after"]
    stream.synchronize()


def test_closing_a_stream_raises_what_its_last_function_raised() -> None:
    stream = pynccl.Stream()
    stream.call(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        stream.close()
    assert stream.closed


def test_a_queued_function_lives_until_it_has_run_and_no_longer(stream: pynccl.Stream) -> None:
    class Work:
        def __call__(self) -> None:
            seen.append("ran")

    seen: list[str] = []
    gate, work = Gate(stream), Work()
    gone = weakref.ref(work)
    stream.call(work)
    del work
    gc.collect()
    assert gone() is not None
    gate.open()
    stream.synchronize()
    gc.collect()
    assert seen == ["ran"] and gone() is None


def test_what_cannot_be_called_is_refused_before_it_is_queued(stream: pynccl.Stream) -> None:
    with pytest.raises(TypeError, match="cannot be called"):
        stream.call(3)  # type: ignore[arg-type]
    assert stream.query()


def test_events_order_streams(alone: pynccl.Communicator, stream: pynccl.Stream) -> None:
    other, x = pynccl.Stream(), np.full(1, 1.0)
    with alone.premul_sum(3, "float64") as triple:
        gate = Gate(stream)
        alone.all_reduce(x, op=triple, stream=stream)
        event = stream.record()
        other.wait_event(event)
        add_one = pyncclHostFn_t(lambda _: x.__iadd__(1) is None or None)
        assert other.library.pyncclStreamLaunchHostFunc(other.handle, add_one, None) == 0
        assert not event.query()
        gate.open()
        event.synchronize()
        other.synchronize()
    assert event.query()
    assert x[0] == 4  # 1 * 3 + 1, not (1 + 1) * 3
    other.close()


def test_waiting_for_a_stream_has_a_time_limit(stream: pynccl.Stream) -> None:
    gate = Gate(stream)
    with pytest.raises(TimeoutError, match=r"Stream\.synchronize"):
        stream.synchronize(timeout=0.05)
    with pytest.raises(TimeoutError, match=r"Event\.synchronize"):
        stream.record().synchronize(timeout=0.05)
    gate.open()
    stream.synchronize()


def test_an_error_of_queued_work_is_raised_by_synchronize_and_then_forgotten() -> None:
    def rank(comm):
        stream = pynccl.Stream()
        comm.all_reduce(np.ones(3 + comm.rank), stream=stream)
        with pytest.raises(
            pynccl.InvalidUsageError, match=r"rank 0 calls all_reduce\(count=3.*rank 1 .*count=4"
        ):
            stream.synchronize()
        stream.synchronize()
        stream.close()
        comm.abort()
        return True

    assert run_ranks(2, rank, library="host") == [True, True]


def test_a_prepared_call_stays_on_its_stream(alone: pynccl.Communicator, stream: pynccl.Stream) -> None:
    x = np.full(2, 1.0)
    with alone.premul_sum(2, "float64") as double:
        call = alone.prepare("all_reduce", x, op=double, stream=stream)
        gate = Gate(stream)
        call()
        call()
        assert x.tolist() == [1, 1]
        gate.open()
        stream.synchronize()
    assert x.tolist() == [4, 4]


def test_a_group_queues_its_calls_on_their_streams(alone: pynccl.Communicator, stream: pynccl.Stream) -> None:
    gate, x, y = Gate(stream), np.arange(3.0), np.zeros(3)
    with pynccl.group():
        alone.send(x, 0, stream=stream)
        alone.recv(y, 0, stream=stream)
    assert y.tolist() == [0, 0, 0]
    gate.open()
    stream.synchronize()
    assert y.tolist() == [0, 1, 2]


def test_a_barrier_on_a_stream_waits_for_what_is_queued_there(
    alone: pynccl.Communicator, stream: pynccl.Stream
) -> None:
    x = np.full(1, 1.0)
    with alone.premul_sum(2, "float64") as double:
        for _ in range(10):
            alone.all_reduce(x, op=double, stream=stream)
        alone.barrier(stream=stream)
        assert x[0] == 2**10


# --- arrays in flight ---------------------------------------------------------------------------------------


def test_arrays_of_queued_calls_live_until_the_stream_has_passed_them(
    alone: pynccl.Communicator, stream: pynccl.Stream
) -> None:
    gate, x = Gate(stream), np.arange(1000.0)
    out = np.zeros(1000)
    alive = weakref.ref(x)
    alone.all_reduce(x, out, stream=stream)
    del x
    gc.collect()
    assert alive() is not None
    gate.open()
    stream.synchronize()
    gc.collect()
    assert alive() is None
    assert out.tolist() == list(range(1000))


@pytest.mark.parametrize("grouped", [False, True])
def test_default_outputs_that_nobody_holds_are_safe_too(
    alone: pynccl.Communicator, stream: pynccl.Stream, grouped: bool
) -> None:
    gate = Gate(stream)
    with pynccl.group() if grouped else stream:
        dropped = weakref.ref(alone.all_gather(np.ones(100), stream=stream))
    gc.collect()
    assert dropped() is not None
    gate.open()
    stream.synchronize()
    gc.collect()
    assert dropped() is None


def test_no_more_is_held_than_was_queued(alone: pynccl.Communicator, stream: pynccl.Stream) -> None:
    for _ in range(100):
        alone.all_reduce(np.ones(10), stream=stream)
        stream.library.pyncclStreamSynchronize(
            stream.handle, 0.0
        )  # not through the Stream, which would let go
    assert len(stream._flight) == 1


def test_a_dropped_prepared_call_lives_until_the_stream_has_passed_it(
    alone: pynccl.Communicator, stream: pynccl.Stream
) -> None:
    gate = Gate(stream)
    call = alone.prepare("all_reduce", np.ones(10), stream=stream)
    alive = weakref.ref(call)
    call()
    del call
    gc.collect()
    assert alive() is not None
    gate.open()
    stream.synchronize()
    gc.collect()
    assert alive() is None


# --- what counts as a stream --------------------------------------------------------------------------------


def test_a_host_stream_is_named_by_object_or_handle(
    alone: pynccl.Communicator, stream: pynccl.Stream
) -> None:
    x = np.ones(2)
    for named in (stream, stream.handle, ctypes.c_void_p(stream.handle).value):
        alone.all_reduce(x, stream=named)
    stream.synchronize()


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ("fast", TypeError, "take a pynccl.Stream"),
        (object(), TypeError, "take a pynccl.Stream"),
        (12345, pynccl.InvalidArgumentError, "stream=0x3039 is not the handle of an open pynccl.Stream"),
    ],
)
def test_what_is_no_host_stream_is_refused(
    alone: pynccl.Communicator, wrong: Any, error: Any, match: str
) -> None:
    with pytest.raises(error, match=f"all_gather .*{match}"):
        alone.all_gather(np.ones(2), stream=wrong)
    alone.barrier()


def test_a_closed_stream_is_refused(alone: pynccl.Communicator) -> None:
    stream = pynccl.Stream()
    stream.close()
    stream.close()
    assert stream.closed
    with pytest.raises(pynccl.InvalidUsageError, match="stream is closed"):
        alone.all_reduce(np.ones(2), stream=stream)
    with pytest.raises(pynccl.InvalidUsageError, match="stream is closed"):
        with stream:
            pass


def test_a_forgotten_stream_is_a_warning() -> None:
    stream = pynccl.Stream()
    handle, library = stream.handle, stream.library
    with pytest.warns(ResourceWarning, match="was not closed"):
        del stream
        gc.collect()
    assert library.pyncclStreamDestroy(handle) == 0


class WithProtocol:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 0x77


class LikeCupy:
    ptr = 0x77


class LikeTorch:
    cuda_stream = 0x77


@pytest.mark.parametrize("stream", [0x77, WithProtocol(), LikeCupy(), LikeTorch()])
def test_cuda_streams_of_all_libraries_are_understood(stream: Any) -> None:
    assert gpu_stream("call", stream) == 0x77


def test_what_is_no_cuda_stream_is_refused(stream: pynccl.Stream) -> None:
    with pytest.raises(TypeError, match="is no CUDA stream"):
        gpu_stream("call", "fast")
    with pytest.raises(pynccl.InvalidArgumentError, match=r"a pynccl.Stream is for host memory"):
        gpu_stream("call", stream)

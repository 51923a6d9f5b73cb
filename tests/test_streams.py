"""Host streams and events: order, errors, what counts as a stream, and keeping arrays in flight alive."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import pynccl
from pynccl.abi.enums import Result
from pynccl.abi.types import pyncclHostFn_t
from pynccl.flight import HostFlight, hand_over
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


class Kept:
    """Something that can be watched."""


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


def test_waiting_no_time_looks_once(stream: pynccl.Stream) -> None:
    gate = Gate(stream)
    event = stream.record()
    for wait in (stream.synchronize, event.synchronize):
        with pytest.raises(TimeoutError):
            wait(timeout=0)
    gate.open()
    stream.synchronize(timeout=float("inf"))
    stream.synchronize(timeout=0)
    event.synchronize(timeout=0)


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("-inf"), "1"])
def test_a_time_limit_that_is_none_is_refused(stream: pynccl.Stream, timeout: Any) -> None:
    for wait in (stream.synchronize, stream.record().synchronize):
        with pytest.raises((TypeError, pynccl.InvalidArgumentError), match=r"\.synchronize: timeout="):
            wait(timeout=timeout)


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
    assert len(stream._flight) <= 1


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


def test_a_closed_stream_is_refused_by_name_and_with_a_remedy(alone: pynccl.Communicator) -> None:
    stream = pynccl.Stream()
    prepared = alone.prepare("all_reduce", np.ones(2), stream=stream)
    stream.close()
    calls: dict[str, Any] = {
        "Stream.synchronize": stream.synchronize,
        "Stream.query": stream.query,
        "Stream.record": stream.record,
        r"Stream.call": lambda: stream.call(print),
        "Stream.wait_event": lambda: stream.wait_event(pynccl.Event()),
        "Event.record": lambda: pynccl.Event().record(stream),
        r"all_gather \(ncclAllGather\)": lambda: alone.all_gather(np.ones(2), stream=stream),
        r"all_reduce \(ncclAllReduce\)": prepared,
    }
    for name, call in calls.items():
        with pytest.raises(pynccl.InvalidUsageError, match=f"^{name}: the stream is closed .*make a new one"):
            call()


def test_a_stream_that_cannot_be_waited_for_stays_open(
    monkeypatch: pytest.MonkeyPatch, stream: pynccl.Stream
) -> None:
    gate, seen = Gate(stream), []
    stream.call(lambda: seen.append("ran"))
    monkeypatch.setenv("PYNCCL_TIMEOUT", "0.05")
    with pytest.raises(pynccl.NcclTimeoutError, match=r"Stream\.close"):
        stream.close()
    assert not stream.closed and seen == []
    gate.open()
    stream.close()
    assert stream.closed and seen == ["ran"]


# --- dropped with work under way ----------------------------------------------------------------------------


class Native:
    """A stream by its handle: the object itself, and what holds it, may go."""

    def __init__(self, stream: pynccl.Stream) -> None:
        self._library, self._handle = stream.library, stream.handle

    def state(self) -> str:
        code = self._library.pyncclStreamQuery(self._handle)
        return {0: "idle", Result.IN_PROGRESS: "busy", Result.INVALID_ARGUMENT: "gone"}[code]

    def wait_until_idle(self) -> None:
        until = time.monotonic() + 30
        while self.state() != "idle":
            assert time.monotonic() < until


def test_a_forgotten_stream_is_a_warning_and_its_thread_ends() -> None:
    stream = pynccl.Stream()
    native = Native(stream)
    with pytest.warns(ResourceWarning, match="was not closed"):
        del stream
        gc.collect()
    assert native.state() == "gone"


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_dropped_stream_does_its_work_on_living_arrays_and_is_gone_after_it(
    alone: pynccl.Communicator,
) -> None:
    stream, x, out = pynccl.Stream(), np.arange(1000.0), np.zeros(1000)
    gate, alive, native, seen = Gate(stream), weakref.ref(x), Native(stream), []
    alone.all_reduce(x, out, stream=stream)
    alone.prepare("all_reduce", out, op="max", stream=stream)()
    stream.call(lambda: seen.append("ran"))
    del stream, x
    gc.collect()
    pynccl.Stream().close()  # a sweep, too early
    assert alive() is not None and native.state() == "busy"
    gate.open()
    native.wait_until_idle()
    pynccl.Stream().close()
    gc.collect()
    assert native.state() == "gone" and alive() is None
    assert out.tolist() == list(range(1000)) and seen == ["ran"]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_work_may_hold_the_last_reference_to_its_own_stream() -> None:
    stream, seen = pynccl.Stream(), []
    gate, native = Gate(stream), Native(stream)

    def use(stream: pynccl.Stream = stream) -> None:
        stream.call(lambda: seen.append("behind"))
        seen.append("ran")

    stream.call(use)
    del stream, use
    gc.collect()
    gate.open()
    native.wait_until_idle()
    assert seen == ["ran", "behind"]
    pynccl.Stream().close()
    assert native.state() == "gone"


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_work_on_a_dropped_stream_raises_is_a_warning() -> None:
    stream = pynccl.Stream()
    gate, native = Gate(stream), Native(stream)
    stream.call(lambda: 1 // 0)
    del stream
    gc.collect()
    gate.open()
    native.wait_until_idle()
    with pytest.warns(RuntimeWarning, match="a stream that was dropped failed: ZeroDivisionError"):
        pynccl.Stream().close()


@pytest.mark.parametrize("how", ["plain", "prepared", "grouped"])
def test_an_interrupt_right_after_queueing_frees_nothing_in_use(
    alone: pynccl.Communicator, stream: pynccl.Stream, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    gate, x = Gate(stream), np.ones(1000)
    alive = weakref.ref(x)

    def interrupt(flight: HostFlight, keep: object) -> None:
        raise KeyboardInterrupt

    def queue(x: np.ndarray) -> None:
        if how == "prepared":
            alone.prepare("all_reduce", x, stream=stream)()
        with pynccl.group() if how == "grouped" else contextlib.nullcontext():
            alone.all_reduce(x, stream=stream)

    with monkeypatch.context() as patched:
        patched.setattr(HostFlight, "hold", interrupt)
        with pytest.raises(KeyboardInterrupt):
            queue(x)
    del x
    gc.collect()
    assert alive() is not None
    gate.open()
    stream.synchronize()


def test_one_thing_handed_over_twice_at_once_is_kept_until_both_are_done() -> None:
    def interrupt(keep: Kept) -> None:
        hand_over(keep, int, lambda code: None)  # meanwhile another thread hands it over, and is done
        raise KeyboardInterrupt

    def watch(keep: Kept) -> weakref.ref[Kept]:
        with pytest.raises(KeyboardInterrupt):
            hand_over(keep, int, lambda code: interrupt(keep))
        return weakref.ref(keep)

    alive = watch(Kept())
    gc.collect()
    assert alive() is not None


def test_an_interrupt_right_after_registering_keeps_the_memory(
    alone: pynccl.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    def register(x: np.ndarray) -> None:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(alone, "_settle", interrupt)
            alone.register_window(x)

    x = alone.empty(8)
    owner = x
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    alive = weakref.ref(owner)
    del owner
    register(x)
    del x
    gc.collect()
    assert alive() is not None


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_dropped_communicator_keeps_what_its_running_calls_and_its_peers_use() -> None:
    def rank(rank, size, uid):
        comm = pynccl.Communicator(size, uid, rank, library="host", config={"blocking": False})
        comm.wait()
        x, shared = np.ones(1 << 20), comm.empty(1024)
        window = comm.register_window(shared)
        if rank == 1:
            return None  # without the call that rank 0 waits for in its own worker
        comm.all_reduce(x)
        alive = weakref.ref(x), weakref.ref(shared)
        del comm, x, shared, window
        gc.collect()
        return [thing() is not None for thing in alive]

    assert run_ranks(2, rank, comm=False, library="host") == [[True, True], None]


AT_EXIT = """
import atexit, os, sys, threading
import numpy as np, pynccl
comm = pynccl.Communicator(1, pynccl.get_unique_id("host"), 0, library="host")
begun, go = threading.Event(), threading.Event()
def busy(stream, arrays):
    for x in arrays:
        comm.all_gather(x, np.empty_like(x), stream=stream)
        stream.call(lambda: x.sum())
kept, dropped = pynccl.Stream(), pynccl.Stream()
parked = pynccl.Stream()
parked.call(lambda: (begun.set(), go.wait()))
parked.call(lambda: print("called too late"))
kept_arrays = [np.ones(1 << 18) for _ in range(300)]
busy(kept, kept_arrays)
busy(dropped, [np.ones(1 << 18) for _ in range(300)])
del dropped, kept_arrays
begun.wait()
print("end", flush=True)
"""


@pytest.mark.parametrize("attempt", range(3))
def test_the_interpreter_ends_with_work_under_way_and_neither_crashes_nor_waits(attempt: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60, env=os.environ
    )
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
    assert "Error" not in done.stderr


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
    for handle in (-1, 2**64):
        with pytest.raises(pynccl.InvalidArgumentError, match=r"call: stream=.* is no address"):
            gpu_stream("call", handle)
    with pytest.raises(pynccl.InvalidArgumentError, match=r"a pynccl.Stream is for host memory"):
        gpu_stream("call", stream)

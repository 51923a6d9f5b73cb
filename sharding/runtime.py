"""Where arrays live and how communication overlaps with computation: host memory, or a GPU.

A runtime makes memory, streams and marks (events), so that the engine reads the same for both. In host
memory the compute "stream" is the calling thread itself: what it has done is done, and waiting blocks it. On
a GPU computation is queued on CuPy's current stream; waiting is an event between streams and the CPU never
waits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["CudaRuntime", "HostRuntime", "naming", "runtime_for"]


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Around a wait: an error of a stream, which knows only its calls, says what the engine was doing."""
    try:
        yield
    except Exception as error:
        if error.args and isinstance(error.args[0], str):
            error.args = (f"{what}: {error.args[0]}", *error.args[1:])
        raise


class HostRuntime:
    """NumPy arrays, pynccl's host streams."""

    xp: Any = np

    def __init__(self, comm: Any, overlap: bool) -> None:
        self._comm = comm
        self._mapped = hasattr(comm, "empty")
        self._streams: list[Any] = []
        library = getattr(comm, "library", None)  # of a pynccl.Communicator, or of what wraps one
        self.overlap = overlap and getattr(library, "kind", None) == "host"

    def empty(self, elements: int, dtype: np.dtype) -> np.ndarray:
        """1-d memory, which peers can map where the communicator offers that: nothing is copied twice."""
        return (
            self._comm.empty((elements,), dtype) if self._mapped and elements else np.empty(elements, dtype)
        )

    def stream(self) -> Any:
        """A new communication stream, or None: collectives run in the calling thread."""
        if not self.overlap:
            return None
        import pynccl

        stream = pynccl.Stream(self._comm.library)
        self._streams.append(stream)
        return stream

    @staticmethod
    def on(stream: Any) -> dict[str, Any]:
        """The arguments that put a collective on a stream."""
        return {} if stream is None else {"stream": stream}

    def follow(self, stream: Any) -> None:
        """Work queued on `stream` from now on comes after what is computed so far: here it always does."""

    def mark(self, stream: Any, *comms: Any) -> Any:
        """The point that `stream` has reached when all it holds now is done. None: it has.

        `comms` are those whose calls it marks.
        """
        return None if stream is None else _HostMark(stream, stream.record(), comms)

    def wait(self, mark: Any) -> None:
        """Go on computing only after the mark; raises what the marked calls failed with."""
        if mark is not None:
            mark.wait()

    def settle(self) -> None:
        """Wait for all streams, and raise what went wrong on them: shards may be changed after this."""
        for stream in self._streams:
            stream.synchronize()

    def meet(self, mesh: Any) -> None:
        """Wait until every rank has come here."""
        mesh.meet(np.zeros(1, np.float32))

    def abandon(self) -> None:
        """Wait for all streams after the communicators were aborted: their errors are known to come of it."""
        for stream in self._streams:
            with contextlib.suppress(Exception):
                stream.synchronize()

    def stamp(self, stream: Any = None) -> Any:
        """The moment at which the calling thread, or `stream`, comes to this point: see `seconds`."""
        if stream is None:
            return time.perf_counter()
        stamp = _HostStamp()
        stream.call(stamp.set)
        return stamp

    @staticmethod
    def seconds(stamp: Any) -> float | None:
        """A stamp on the clock of time.perf_counter(); None if that point has not been reached."""
        return stamp.at if isinstance(stamp, _HostStamp) else stamp

    def catch_up(self) -> None:
        """Wait, on the CPU, until all that was queued so far is done."""
        self.settle()

    def close(self) -> None:
        """End the streams."""
        while self._streams:
            self._streams.pop().close()


@dataclass(frozen=True)
class _HostMark:
    stream: Any
    event: Any
    comms: tuple[Any, ...]

    def wait(self) -> None:
        """An event only says that the calls are over; their communicators know whether they failed."""
        self.event.synchronize()
        if self.stream.failed:  # a function of `Stream.call`, as compression makes
            self.stream.synchronize()
        for comm in self.comms:
            if comm is not None and (code := comm.async_error()):
                self.stream.synchronize()  # raises the error with its text
                raise RuntimeError(f"a collective failed: {code!r}")


class _HostStamp:
    at: float | None = None

    def set(self) -> None:
        """Called by the stream."""
        self.at = time.perf_counter()


class CudaRuntime:
    """CuPy arrays, CUDA streams and events. Nothing here waits on the CPU but `synchronize`."""

    def __init__(self, comm: Any, overlap: bool) -> None:
        import cupy

        self.xp = cupy
        self.overlap = overlap
        self._streams: list[Any] = []
        self._zero: tuple[Any, float] | None = None
        """An event, and when it was: from the first stamp on."""

    def empty(self, elements: int, dtype: np.dtype) -> Any:
        """1-d device memory."""
        return self.xp.empty(elements, dtype)

    def stream(self) -> Any:
        """A new stream that does not wait for the legacy default stream; without overlap the current one."""
        if not self.overlap:
            return self.xp.cuda.get_current_stream()
        stream = self.xp.cuda.Stream(non_blocking=True)
        self._streams.append(stream)
        return stream

    def follow(self, stream: Any) -> None:
        """Work queued on `stream` from now on comes after what is computed so far."""
        current = self.xp.cuda.get_current_stream()
        if stream.ptr != current.ptr:
            stream.wait_event(current.record(self.xp.cuda.Event(disable_timing=True)))

    def mark(self, stream: Any, *comms: Any) -> Any:
        """The point that `stream` has reached when all it holds now is done."""
        return stream.record(self.xp.cuda.Event(disable_timing=True))

    @staticmethod
    def on(stream: Any) -> dict[str, Any]:
        """The arguments that put a collective on a stream."""
        return {"stream": stream}

    def wait(self, mark: Any) -> None:
        """What is computed from now on comes after the mark."""
        if mark is not None:
            self.xp.cuda.get_current_stream().wait_event(mark)

    def settle(self) -> None:
        """What is computed from now on comes after all streams."""
        for stream in self._streams:
            self.wait(self.mark(stream))

    def meet(self, mesh: Any) -> None:
        """Nothing: on a GPU the CPU runs ahead and never waits; a rank learns later that another failed."""

    def abandon(self) -> None:
        """Wait, on the CPU, for all streams: the communicators were aborted."""
        for stream in self._streams:
            stream.synchronize()
        self.xp.cuda.get_current_stream().synchronize()

    def stamp(self, stream: Any = None) -> Any:
        """The moment at which the current stream, or `stream`, comes to this point. The first call waits."""
        cuda = self.xp.cuda
        if self._zero is None:
            zero = cuda.get_current_stream().record(cuda.Event())
            zero.synchronize()
            self._zero = zero, time.perf_counter()
        return (cuda.get_current_stream() if stream is None else stream).record(cuda.Event())

    def seconds(self, stamp: Any) -> float | None:
        """A stamp on the clock of time.perf_counter(); None if that point has not been reached."""
        assert self._zero is not None
        zero, at = self._zero
        return at + 1e-3 * self.xp.cuda.get_elapsed_time(zero, stamp) if stamp.done else None

    def catch_up(self) -> None:
        """Wait, on the CPU, until all that was queued so far is done."""
        self.abandon()

    def close(self) -> None:
        """Wait for the streams; CuPy frees them."""
        self.abandon()
        self._streams.clear()


def runtime_for(comm: Any, sample: Any, overlap: bool) -> HostRuntime | CudaRuntime:
    """The runtime of the arrays' kind: CuPy arrays live on a GPU, NumPy arrays in host memory."""
    if type(sample).__module__.partition(".")[0] == "cupy":
        return CudaRuntime(comm, overlap)
    return HostRuntime(comm, overlap)

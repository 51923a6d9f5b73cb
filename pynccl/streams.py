"""Streams: host streams and events as objects, and what counts as the stream of a call.

A host stream is a queue with a worker thread inside the host library; it goes wherever NCCL takes a
``cudaStream_t``. On GPUs the array libraries own the streams, and any of theirs (or a plain handle) is
accepted.
"""

from __future__ import annotations

import atexit
import ctypes
import operator
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from . import interrupts
from .abi.enums import Result
from .abi.errors import InvalidArgumentError, InvalidUsageError, check
from .abi.library import Library, load
from .abi.types import pyncclHostFn_t
from .flight import HostFlight, abandon, hand_over, leave, leave_to_parent, sweep
from .threadstate import current
from .timeouts import library_patience, timeout_from_environment


class Stream:
    """A queue of work in host memory, done in order by a thread of its own while the caller goes on.

    Pass it as ``stream=`` of any call, or make it current: inside ``with stream:`` calls on host arrays go to
    it. Leaving that block does not wait for them, as with CuPy's streams: results are there after
    ``synchronize`` (which also raises the first error of queued work) or ``close``.

    The arrays of queued calls are kept alive until the stream has passed them. Close it when done. One that
    is dropped instead goes on with its work and ends after it; ResourceWarning says so, and what its work
    raises is only a RuntimeWarning.

    >>> import pynccl, numpy as np                             # doctest: +SKIP
    >>> stream, x = pynccl.Stream(), np.ones(4)                # doctest: +SKIP
    >>> with stream:                                           # doctest: +SKIP
    ...     comm.all_reduce(x)                                 # the same as all_reduce(x, stream=stream)
    >>> stream.synchronize()                                   # doctest: +SKIP
    >>> stream.close()                                         # doctest: +SKIP
    """

    def __init__(self, library: str | Library | None = "host") -> None:
        self.library = library if isinstance(library, Library) else load(library)
        if self.library.kind != "host":
            raise InvalidUsageError(
                f"Stream: {self.library.path} has no host streams; on GPUs use your array library's streams "
                "(cupy.cuda.Stream, torch.cuda.Stream)"
            )
        timeout_from_environment("Stream")  # the library looks itself, and takes the default for nonsense
        interrupts.install(self.library)
        sweep()
        self._outer: list[Stream | None] = []
        box = ctypes.c_void_p()
        check(self.library, self.library.pyncclStreamCreate(ctypes.byref(box)), "Stream (pyncclStreamCreate)")
        assert box.value is not None
        self._flight = HostFlight(self.library, box.value)
        _streams[box.value] = self

    @property
    def handle(self) -> int:
        """The ``cudaStream_t`` that calls of this library take. InvalidUsageError once closed."""
        return self._open("Stream.handle")

    @property
    def closed(self) -> bool:
        """Whether it was closed, or belongs to the process that forked this one."""
        return self._flight.handle is None

    @property
    def failed(self) -> bool:
        """Whether a function of ``call`` has raised what nobody was told yet; ``synchronize`` raises it."""
        return bool(self._flight.raised)

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait until all work queued so far is done, and raise its first error.

        ``timeout`` is in seconds (None: ``PYNCCL_TIMEOUT``, else 600; 0: look once); NcclTimeoutError after
        that, and the work goes on.
        """
        call = "Stream.synchronize"
        code = self.library.pyncclStreamSynchronize(self._open(call), library_patience(call, timeout))
        self._flight.clear_completed()
        self._raise_first(code, call)

    def query(self) -> bool:
        """Whether all queued work is done."""
        call = "Stream.query"
        code = check(self.library, self.library.pyncclStreamQuery(self._open(call)), call)
        self._flight.clear_completed()
        return code == 0

    def call(self, fn: Callable[[], object]) -> None:
        """Call ``fn()`` in the stream's thread, after the work queued so far and before what is queued later.

        Its result is dropped. What it raises is raised by ``synchronize`` (or ``close``); work queued behind
        it runs all the same, as after any error that does not end the work's communicator. ``fn`` must not
        wait for its own stream.

        >>> done = []                                              # doctest: +SKIP
        >>> stream.call(lambda: done.append(time.perf_counter()))  # doctest: +SKIP
        """
        call = "Stream.call"
        if not callable(fn):
            raise TypeError(f"{call}: {fn!r} cannot be called; expected a function without arguments")
        handle, flight = self._open(call), self._flight
        raised = flight.raised

        def run(_: object) -> None:
            try:
                fn()
            except BaseException as error:  # there is no caller here: synchronize is where it is told
                raised.append(error)

        task = pyncclHostFn_t(run)

        def queued(code: int) -> None:
            check(self.library, code, call)
            flight.hold(task)

        hand_over(task, lambda: self.library.pyncclStreamLaunchHostFunc(handle, task, None), queued)

    def wait_event(self, event: Event) -> None:
        """Work queued from now on runs after ``event``."""
        call = "Stream.wait_event"
        self._check(self.library.pyncclStreamWaitEvent(self._open(call), event.handle), call)
        self._flight.hold((event,))

    def record(self, event: Event | None = None) -> Event:
        """An event (a new one, or the one given) that is done when the work queued so far is done."""
        self._open("Stream.record")
        event = event if event is not None else Event(self.library)
        event.record(self)
        return event

    def close(self) -> None:
        """Wait for the work, end the thread, and raise the first error of the work. Twice is fine.

        When the wait itself fails (NcclTimeoutError after ``PYNCCL_TIMEOUT``, Ctrl-C) the stream stays open:
        its work goes on, and close() may be called again.
        """
        call, flight = "Stream.close", self._flight
        handle = flight.handle
        if handle is None:
            return
        code = self.library.pyncclStreamSynchronize(handle, 0.0)
        flight.clear_completed()
        if flight.is_idle():
            _streams.pop(handle, None)
            code = flight.destroy() or code
        self._raise_first(code, call)

    def __enter__(self) -> Stream:
        self._open("with stream")
        self._outer.append(current.stream)
        current.set_stream(self)
        return self

    def __exit__(self, *exc: object) -> None:
        current.set_stream(self._outer.pop())

    def __repr__(self) -> str:
        handle = self._flight.handle
        return "<Stream closed>" if handle is None else f"<Stream {handle:#x}>"

    def __del__(self) -> None:
        flight = getattr(self, "_flight", None)  # it may never have been made
        if flight is None or flight.handle is None:
            return
        text = f"{self!r} was not closed; call close()"
        abandon(flight)  # before anything that may fail: its work may still write to the arrays it holds
        warnings.warn(text, ResourceWarning, source=self, stacklevel=2)

    def _open(self, call: str) -> int:
        """The handle, or an error that names the call."""
        handle = self._flight.handle
        if handle is None:
            raise InvalidUsageError(
                f"{call}: the stream is closed (or belongs to the process that forked this one); "
                "make a new one with pynccl.Stream()",
                call=call,
            )
        return handle

    def _check(self, code: int, call: str) -> None:
        if code:
            interrupts.reraise()
            check(self.library, code, call)

    def _raise_first(self, code: int, call: str) -> None:
        """As ``_check``, but what a function of ``call`` raised comes first."""
        raised = self._flight.raised
        first = raised[:1]
        del raised[: len(raised)]
        if first:
            raise first[0]
        self._check(code, call)


class Event:
    """A point in a host stream's work, to wait for from another stream (``wait_event``) or from Python."""

    def __init__(self, library: str | Library | None = "host") -> None:
        self.library = library if isinstance(library, Library) else load(library)
        box = ctypes.c_void_p()
        check(self.library, self.library.pyncclEventCreate(ctypes.byref(box)), "Event (pyncclEventCreate)")
        self.handle = box.value or 0
        # Freeing an event never waits, so the garbage collector may do it (not at exit, nor for a forking
        # parent).
        weakref.finalize(self, _destroy_event, self.library, self.handle, os.getpid()).atexit = False

    def record(self, stream: Stream) -> None:
        """The event is done when the work that ``stream`` holds now is done."""
        call = "Event.record"
        check(self.library, self.library.pyncclEventRecord(self.handle, stream._open(call)), call)
        stream._flight.hold((self,))

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait for the event; ``timeout`` as for ``Stream.synchronize``."""
        call = "Event.synchronize"
        code = self.library.pyncclEventSynchronize(self.handle, library_patience(call, timeout))
        if code:
            interrupts.reraise()
            check(self.library, code, call)

    def query(self) -> bool:
        """Whether the event is done."""
        return check(self.library, self.library.pyncclEventQuery(self.handle), "Event.query") == 0

    def __repr__(self) -> str:
        code = self.library.pyncclEventQuery(self.handle)
        return f"<Event {self.handle:#x} {_EVENT_STATES.get(code, 'of another process')}>"


_EVENT_STATES = {0: "done", int(Result.IN_PROGRESS): "pending"}
_streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()

# The default streams of CUDA: legacy 0 and 1, per thread 2. In host memory they all mean: now, in this
# thread.
DEFAULTS = (0, 1, 2)


def host_stream(call: str, library: Library, stream: Any) -> Stream | None:
    """The host stream that a call on host memory runs on; None: at once, in this thread."""
    if stream is None:
        stream = current.stream
        if stream is None:
            return None
    if not isinstance(stream, Stream):
        try:
            handle = operator.index(stream)
        except TypeError:
            raise TypeError(
                f"{call}: stream={stream!r} is no host stream; arrays in host memory take a pynccl.Stream "
                "(or None)"
            ) from None
        if handle in DEFAULTS:
            return None
        found = _streams.get(handle)
        if found is None:
            raise InvalidArgumentError(
                f"{call}: stream={handle:#x} is not the handle of an open pynccl.Stream"
            )
        stream = found
    if stream.library is not library:
        raise InvalidArgumentError(
            f"{call}: the stream belongs to {stream.library.path} and the communicator to {library.path}; "
            "make it with pynccl.Stream(comm.library)"
        )
    stream._open(call)
    return stream


def gpu_stream(call: str, stream: Any) -> int:
    """The ``cudaStream_t`` of a GPU stream object of any library, or of a plain handle."""
    if isinstance(stream, Stream):
        raise InvalidArgumentError(
            f"{call}: a pynccl.Stream is for host memory; pass a CUDA stream, e.g. CuPy's"
        )
    try:
        handle = operator.index(_cuda_handle(stream))
    except TypeError:
        raise TypeError(
            f"{call}: stream={stream!r} is no CUDA stream; pass a CuPy or PyTorch stream, an object with "
            "__cuda_stream__, or the handle as an int"
        ) from None
    if not 0 <= handle < 2**64:
        raise InvalidArgumentError(f"{call}: stream={handle:#x} is no address, so no cudaStream_t")
    return handle


def _cuda_handle(stream: Any) -> Any:
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        _version, handle = protocol() if callable(protocol) else protocol
        return handle
    for attribute in ("ptr", "cuda_stream"):
        if hasattr(stream, attribute):
            return getattr(stream, attribute)
    return stream


def _destroy_event(library: Library, handle: int, process: int) -> None:
    if process == os.getpid():
        check(library, library.pyncclEventDestroy(handle), "Event (pyncclEventDestroy)")


def _forked() -> None:
    for stream in list(_streams.values()):
        stream._flight.handle = None
    _streams.clear()
    leave_to_parent()
    current.set_stream(None)
    current.set_group(None)


def _at_exit() -> None:
    streams = list(_streams.values())
    for stream in streams:
        warnings.warn(
            f"{stream!r} was not closed; call close()", ResourceWarning, source=stream, stacklevel=2
        )
    leave([stream._flight for stream in streams])


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_forked)

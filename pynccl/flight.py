"""Arrays in flight: kept alive from the call that uses them until the stream has passed it.

The memory of a queued call may go only when the library is done with it, whatever happens to the Python
objects meanwhile: an exception of a signal handler between two bytecodes, a stream that nobody holds any
more, the end of the interpreter. Bookkeeping is bounded: every new call first drops what its stream has
completed, so no more is held than was queued.
"""

from __future__ import annotations

import ctypes
import math
import threading
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from . import gpu
from .abi.errors import NcclError, check
from .abi.library import Library

T = TypeVar("T")


class HostFlight:
    """A native host stream and what its queued work uses. It lives until the queue is empty: a ``Stream``
    that is dropped leaves it behind (``abandon``).
    """

    def __init__(self, library: Library, handle: int) -> None:
        self.library = library
        self.handle: int | None = handle
        """None once destroyed, or left to another process or to the end of this one."""
        self.raised: list[BaseException] = []
        """By functions that the stream called, and not told yet."""
        self._held: deque[tuple[float, Any]] = deque()  # in the order of the queue, by its count of tasks
        self._clearing = threading.Lock()

    def hold(self, keep: Any) -> None:
        """Keep ``keep`` alive until everything queued so far is done. Call it right after queueing."""
        code, enqueued, completed = self._progress()
        # What cannot be counted is kept as long as the stream.
        self._held.append((math.inf if code else enqueued, keep))
        if code:
            check(self.library, code, "keeping arrays alive (pyncclStreamProgress)")
        self._drop(completed)
        if _abandoned:
            sweep()

    def clear_completed(self) -> None:
        code, _, completed = self._progress()
        if code:
            check(self.library, code, "keeping arrays alive (pyncclStreamProgress)")
        self._drop(completed)

    def is_idle(self) -> bool:
        """Whether all queued work is done. Leaves the library's last-error text alone unless destroyed."""
        code, enqueued, completed = self._progress()
        return not code and enqueued == completed

    def destroy(self) -> int:
        """End the native stream, which is idle, and let go of everything; the library's code."""
        handle, self.handle = self.handle, None
        code = self.library.pyncclStreamDestroy(handle)
        self._held.clear()
        return code

    def __len__(self) -> int:
        return len(self._held)

    def _progress(self) -> tuple[int, int, int]:
        # Variables of each call's own: several threads may queue on one stream.
        enqueued, completed = ctypes.c_uint64(), ctypes.c_uint64()
        code = self.library.pyncclStreamProgress(self.handle, ctypes.byref(enqueued), ctypes.byref(completed))
        return code, enqueued.value, completed.value

    def _drop(self, completed: int) -> None:
        if self._clearing.acquire(blocking=False):  # else another thread is at it
            try:
                held = self._held
                while held and held[0][0] <= completed:
                    held.popleft()
            finally:
                self._clearing.release()


class GpuFlight:
    """What work on CUDA streams uses, by an event recorded behind each call.

    Needed only where memory could be reused too early: when a call runs on another stream than the array
    library's current one, or the array's library does not free in the order of a stream (see
    ``arrays.STREAM_ORDERED``).
    """

    def __init__(self) -> None:
        self._held: dict[int, deque[tuple[Any, Any]]] = {}
        self._clearing = threading.Lock()

    def hold(self, stream: int, keep: Any) -> None:
        """Keep ``keep`` alive until everything now on ``stream`` is done. Call it right after the call."""
        if gpu.is_capturing(stream):
            return  # a captured call runs at every replay: keeping its arrays is up to the graph's owner
        held = self._held.setdefault(stream, deque())
        if self._clearing.acquire(blocking=False):
            try:
                while held and held[0][0].done:
                    held.popleft()
            finally:
                self._clearing.release()
        held.append((gpu.record_event(stream), keep))

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))


gpu_flight = GpuFlight()


def hand_over(keep: Any, make: Callable[[], int], after: Callable[[int], T]) -> T:
    """``after(make())``: a call that is queued, and what holds its arrays from then on.

    In between, a signal handler may raise and unwind the caller, whose arrays the queued call still uses:
    then ``keep`` lives on here, to the end of the process.
    """
    key = object()  # the same prepared call may be handed over by several threads
    _handed_over[key] = keep
    try:
        result = after(make())
    except NcclError:  # the call itself failed: nothing is queued, or `after` has seen to it
        _handed_over.pop(key, None)
        raise
    _handed_over.pop(key, None)
    return result


_handed_over: dict[object, Any] = {}

# Dropped streams whose work was not done. Their order does not matter; a dict, since its single operations
# need no lock, and the garbage collector may come here at any moment.
_abandoned: dict[HostFlight, None] = {}


def abandon(flight: HostFlight) -> None:
    """Nobody holds the stream any more: destroy it when its work is done, at some later ``sweep``."""
    _abandoned[flight] = None
    sweep()


def sweep() -> None:
    """Destroy the abandoned streams whose work is done. Never waits for work.

    What that work raised has no caller any more, and is a RuntimeWarning.
    """
    for flight in list(_abandoned):
        if flight.handle is None or not flight.is_idle():
            continue
        if _abandoned.pop(flight, flight) is flight:
            continue  # another thread was quicker
        problem: BaseException | None = flight.raised[0] if flight.raised else None
        try:
            check(flight.library, flight.destroy(), "a stream that was dropped (pyncclStreamDestroy)")
        except NcclError as error:
            problem = problem or error
        if problem is not None:
            warnings.warn(
                f"work on a stream that was dropped failed: {type(problem).__name__}: {problem}; "
                "keep the stream and call synchronize(), which raises it",
                RuntimeWarning,
                stacklevel=2,
            )


def leave(flights: list[HostFlight]) -> None:
    """The interpreter ends: let the native streams run on without it, on memory that stays.

    Waiting for them could take for ever. Functions that they have not called yet are not called.
    """
    sweep()
    for library in {id(flight.library): flight.library for flight in (*flights, *_abandoned)}.values():
        library.pyncclStreamStopHostFuncs()
    for flight in (*flights, *_abandoned):
        keep_for_ever(flight)
        flight.handle = None
    _abandoned.clear()


def leave_to_parent() -> None:
    """In a forked child: the queues, and those who work on them, stayed in the parent."""
    for flight in _abandoned:
        flight.handle = None
    _abandoned.clear()
    _handed_over.clear()


def keep_for_ever(thing: Any) -> None:
    """Never free ``thing``, not even at the end of the interpreter: threads outside Python may use it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))

"""Arrays in flight: kept alive from the call that uses them until the stream has passed it.

Bookkeeping is bounded: every new call first drops what its stream has completed, so no more is held than was
queued.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

from . import gpu
from .abi.errors import check
from .abi.library import Library


class HostFlight:
    """What the queued work of one host stream uses, by the stream's own count of tasks."""

    def __init__(self, library: Library, handle: int) -> None:
        self._library, self._handle = library, handle
        self._enqueued, self._completed = ctypes.c_uint64(), ctypes.c_uint64()
        self._counters = ctypes.byref(self._enqueued), ctypes.byref(self._completed)
        self._held: deque[tuple[int, Any]] = deque()

    def hold(self, keep: Any) -> None:
        """Keep ``keep`` alive until everything queued so far is done. Call it right after queueing."""
        self.clear_completed()
        self._held.append((self._enqueued.value, keep))

    def clear_completed(self) -> None:
        code = self._library.pyncclStreamProgress(self._handle, *self._counters)
        if code:
            check(self._library, code, "keeping arrays alive (pyncclStreamProgress)")
        held, completed = self._held, self._completed.value
        while held and held[0][0] <= completed:
            held.popleft()

    def __len__(self) -> int:
        return len(self._held)


class GpuFlight:
    """What work on CUDA streams uses, by an event recorded behind each call.

    Needed only where memory could be reused too early: when a call runs on another stream than the array
    library's current one, or the array's library does not free in the order of a stream (see
    ``arrays.STREAM_ORDERED``).
    """

    def __init__(self) -> None:
        self._held: dict[int, deque[tuple[Any, Any]]] = {}

    def hold(self, stream: int, keep: Any) -> None:
        """Keep ``keep`` alive until everything now on ``stream`` is done. Call it right after the call."""
        if gpu.is_capturing(stream):
            return  # a captured call runs at every replay: keeping its arrays is up to the graph's owner
        held = self._held.setdefault(stream, deque())
        while held and held[0][0].done:
            held.popleft()
        held.append((gpu.record_event(stream), keep))

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))


gpu_flight = GpuFlight()

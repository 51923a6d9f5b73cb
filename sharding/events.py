"""Who wants to know what took how long, and when it can be told.

The parts of the engine say when something begins (`now`) and that it is over (`tell`); a collective is timed
on its own stream (`timed`). Where times are read only later, because a stream or a GPU has yet to come to the
point, listeners are told later. With no listener nothing is timed at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Events", "Listener"]

Listener = Callable[[str, str, float, float, str], None]
"""`listener(name, unit, start, stop, detail)`; times are those of time.perf_counter(), in seconds."""


class Events:
    """The listeners of one model. `runtime` reads clocks: see `runtime.py`."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._listeners: list[Listener] = []
        self._of_collectives: list[Listener] = []
        self._waiting: list[tuple[list[Listener], str, str, Any, Any, str]] = []

    def listen(self, listener: Listener, collectives: bool = False) -> None:
        """Call it from now on."""
        self._listeners.append(listener)
        if collectives:
            self._of_collectives.append(listener)

    def forget(self, listener: Listener) -> None:
        """Do not call it any more."""
        for listeners in (self._listeners, self._of_collectives):
            if listener in listeners:
                listeners.remove(listener)

    def now(self) -> Any:
        """This moment of the computation, for `tell`; None if nobody listens."""
        return self._runtime.stamp() if self._listeners else None

    def tell(self, name: str, unit: str, start: Any, detail: str = "") -> None:
        """What began at `start` is over."""
        if self._listeners and start is not None:
            self._waiting.append((self._listeners, name, unit, start, self._runtime.stamp(), detail))
            self.flush()

    @contextmanager
    def timed(self, name: str, unit: str, stream: Any, detail: str) -> Iterator[None]:
        """Around the call that puts a collective on a stream: its time is that in which it runs there."""
        if not self._of_collectives:
            yield
            return
        start = self._runtime.stamp(stream)
        yield
        self._waiting.append((self._of_collectives, name, unit, start, self._runtime.stamp(stream), detail))

    def flush(self) -> None:
        """Tell everything of which both times are known by now."""
        waiting, self._waiting = self._waiting, []
        for told in waiting:
            listeners, name, unit, start, stop, detail = told
            begun, ended = self._runtime.seconds(start), self._runtime.seconds(stop)
            if begun is None or ended is None:
                self._waiting.append(told)
                continue
            for listener in listeners:
                listener(name, unit, begun, ended, detail)

    def settle(self) -> None:
        """Wait, on the CPU, until everything queued is done, and tell it all."""
        if self._listeners:
            self._runtime.catch_up()
            self.flush()

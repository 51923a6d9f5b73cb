"""Prepared calls: checked and marshalled once, made many times (MPI calls these persistent)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .abi.enums import Result
from .flight import gpu_flight, hand_over
from .group import Deferred, nothing
from .operations import Operation, Plan
from .quick import function_of_record, record_of
from .streams import Stream
from .threadstate import busy, current

if TYPE_CHECKING:
    from .abi.library import Library
    from .core import Core


class Prepared:
    """One collective on fixed arrays: call it to run it. Made by ``comm.prepare``; keeps its arrays alive."""

    __slots__ = (
        "__weakref__",
        "_comm",
        "_function",
        "_held",
        "_hold",
        "_name",
        "_queue",
        "_stream",
        "_waits",
        "result",
    )

    def __init__(
        self,
        comm: Core,
        what: Operation,
        function: str,
        arguments: tuple[Any, ...],
        planned: Plan,
        queue: Stream | None,
        hold: bool,
    ) -> None:
        self._function, kept = _made(comm.library, what, function, arguments)
        self._comm: Core = comm
        self._name = f"{what.name} ({function})"
        self._queue, self._hold, self._stream = queue, hold, arguments[-1]
        self._waits = queue is None and not hold and comm._blocking
        self._held = (planned.buffers, arguments, kept)
        self.result = planned.result

    def __call__(self) -> Any:
        """Run the collective; returns its result (the same array each time), as the plain call does."""
        if busy and current.group is not None:
            self._comm._check_open(self._name)
            current.group._add(
                Deferred(self._comm.library, self._comm, self._name, self._make, self._done, nothing, self)
            )
            return self.result
        if self._waits:
            code = self._function()
            if code:
                self._comm._settle(code, self._name, self)
        else:
            if self._queue is not None:
                self._queue._open(self._name)
            hand_over(self, self._make, self._done)
        return self.result

    def _invalidate(self) -> None:
        """The communicator has ended: every later call says so."""
        self._function = self._refuse

    def _make(self) -> int:
        return self._function()

    def _done(self, code: int) -> None:
        if code not in (0, Result.IN_PROGRESS):
            self._comm._fail(code, self._name)
        if self._queue is not None:
            self._queue._flight.hold(self)
        if code:
            self._comm._settle(code, self._name, self)
        if self._hold:
            gpu_flight.hold(self._stream or 0, self)

    def _refuse(self) -> int:
        self._comm._check_open(self._name)
        raise AssertionError("an ended communicator is open")

    def __repr__(self) -> str:
        return f"<Prepared {self._name} on {self._comm!r}>"


def _made(
    library: Library, what: Operation, function: str, arguments: tuple[Any, ...]
) -> tuple[Callable[[], int], Any]:
    """What makes the call, and what must live as long."""
    if library.kind == "host" and function == what.function:
        record = record_of(what, arguments)
        return function_of_record(library, record), record
    made = getattr(library, function)
    last: tuple[Any, ...] = ()
    if function.endswith("Config"):
        *before, config, handle = arguments
        arguments, last = (*before, handle), (ctypes.byref(config),)
    types = made.argtypes[: len(arguments)]
    ready = [kind(value) for kind, value in zip(types, arguments, strict=True)]  # they pass through quickly
    return partial(made, *ready, *last), None

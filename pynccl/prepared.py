"""Prepared calls: checked and marshalled once, made many times (MPI calls these persistent)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .abi.enums import Result
from .flight import gpu_flight, hand_over
from .group import Deferred, nothing
from .operations import Operation, Plan
from .streams import Stream
from .threadstate import current

if TYPE_CHECKING:
    from .core import Core


class Prepared:
    """One collective on fixed arrays: call it to run it. Made by ``comm.prepare``; keeps its arrays alive."""

    __slots__ = (
        "__weakref__",
        "_arguments",
        "_comm",
        "_function",
        "_held",
        "_hold",
        "_name",
        "_queue",
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
        library = comm.library
        made = getattr(library, function)
        # Objects of ctypes pass through faster than numbers, and they are made only once.
        if function.endswith("Config"):
            *before, config, handle = arguments
            arguments = (*before, handle)
            last: tuple[Any, ...] = (ctypes.byref(config),)
        else:
            last = ()
        types = made.argtypes[: len(arguments)]
        self._arguments = tuple(kind(value) for kind, value in zip(types, arguments, strict=True)) + last
        # They have the types of the parameters, so a function that does not ask for them again will do: that
        # is 0.07 us of 0.44. (It releases the GIL as the other does; the library stays loaded with `comm`.)
        self._function: Callable[..., int] = ctypes.CFUNCTYPE(ctypes.c_int)(
            ctypes.cast(made, ctypes.c_void_p).value or 0
        )
        self._comm: Core = comm
        self._name = f"{what.name} ({function})"
        self._queue, self._hold = queue, hold
        self._waits = queue is None and not hold and comm._blocking
        self._held = (planned.buffers, arguments)
        self.result = planned.result

    def __call__(self) -> Any:
        """Run the collective; returns its result (the same array each time), as the plain call does."""
        if current.group is not None:
            self._comm._check_open(self._name)
            current.group._add(
                Deferred(self._comm.library, self._comm, self._name, self._make, self._done, nothing, self)
            )
            return self.result
        if self._waits:
            code = self._function(*self._arguments)
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
        return self._function(*self._arguments)

    def _done(self, code: int) -> None:
        if code not in (0, Result.IN_PROGRESS):
            self._comm._fail(code, self._name)
        if self._queue is not None:
            self._queue._flight.hold(self)
        if code:
            self._comm._settle(code, self._name, self)
        if self._hold:
            gpu_flight.hold(self._arguments[-1].value or 0, self)

    def _refuse(self, *arguments: Any) -> int:
        self._comm._check_open(self._name)
        raise AssertionError("an ended communicator is open")

    def __repr__(self) -> str:
        return f"<Prepared {self._name} on {self._comm!r}>"

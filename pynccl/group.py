"""Groups: calls that are started together, so that sends and receives cannot wait for each other.

Why the calls are collected in Python and not given to the library as they come: NCCL has no way to cancel a
group. After ``ncclGroupStart`` an exception in the caller's code would leave a choice between
``ncclGroupEnd``, which starts half a group that the other ranks never match, and no ``ncclGroupEnd``, which
swallows every later call of the thread. (``ncclGroupSimulateEnd`` discards, but only since 2.22, and it may
connect to peers first.) So inside ``with group()`` each call is checked and marshalled as always, and kept;
leaving the block normally makes all of them between ``ncclGroupStart`` and ``ncclGroupEnd``; leaving it by an
exception forgets them, and the library never knew. If the library itself refuses one of the calls,
``ncclGroupEnd`` discards the group and reports the error.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from . import interrupts
from .abi.errors import InvalidUsageError, check
from .abi.library import Library
from .abi.types import ncclSimInfo_t
from .flight import hand_over
from .threadstate import current

if TYPE_CHECKING:
    from .core import Core


class Deferred(NamedTuple):
    """One call of a group. ``function`` makes it and returns the code; ``done`` follows success."""

    library: Library
    comm: Core | None
    name: str
    function: Callable[[], int]
    done: Callable[[int], None]
    dropped: Callable[[], None]
    """Follows instead when the group fails, or is given up by an exception in the block."""
    keep: Any
    """What must live until the call is made and, by ``done``, until it is finished."""


class Group:
    """The calls collected so far. ``estimated_time`` (microseconds) is there after a simulated group."""

    def __init__(self, outer: Group | None, simulate: bool) -> None:
        self._outer, self._simulate = outer, simulate
        self._calls: list[Deferred] = []
        self.estimated_time: float | None = None

    def _add(self, call: Deferred) -> None:
        self._calls.append(call)

    def __len__(self) -> int:
        return len(self._calls)

    def __repr__(self) -> str:
        names = ", ".join(dict.fromkeys(call.name.partition(" ")[0] for call in self._calls))
        return f"<Group of {len(self)} calls{': ' + names if names else ''}>"


class Starting(Group):
    """What is open while a group's calls are made. Who calls then is a signal handler or a finalizer: the
    library would only queue the call, behind its back."""

    def _add(self, call: Deferred) -> None:
        raise InvalidUsageError(
            f"{call.name}: this thread is starting a group, so the call comes from a signal handler or a "
            "finalizer; make it elsewhere"
        )


def nothing() -> None:
    """For calls that need not know."""


def ignore(code: int) -> None:
    """For calls that have nothing to do afterwards."""


@contextmanager
def group(*, simulate: bool = False) -> Iterator[Group]:
    """Start all communication calls made in this block, in this thread, together when the block ends.

    Needed for sends and receives that depend on each other, for several communicators driven by one thread,
    and to fuse many small calls. Outputs are valid after the block (on a stream: after the stream). Blocks
    may be nested; the outermost one starts the calls. An exception in the block starts nothing, and the
    communicators stay usable.

    With ``simulate=True`` nothing is started at all: the library only estimates the time
    (``ncclGroupSimulateEnd``).

    >>> with pynccl.group():                                  # doctest: +SKIP
    ...     comm.send(x, (comm.rank + 1) % comm.size)
    ...     comm.recv(y, (comm.rank - 1) % comm.size)
    """
    outer = current.group
    if outer is not None and simulate:
        raise InvalidUsageError(
            "group: simulate=True inside another group; simulate the outermost group instead"
        )
    if isinstance(outer, Starting):
        raise InvalidUsageError(
            "group: this thread is starting a group, so this one is of a signal handler or a finalizer; "
            "open it elsewhere"
        )
    opened = Group(outer, simulate)
    try:
        try:
            current.set_group(opened)
            yield opened
        finally:
            current.set_group(outer)
        if outer is None:
            _start(opened)
        else:
            outer._calls.extend(opened._calls)
    except BaseException:
        for call in opened._calls:
            call.dropped()
        raise


def _start(opened: Group) -> None:
    by_library: dict[int, list[Deferred]] = {}
    for call in opened._calls:
        by_library.setdefault(id(call.library), []).append(call)
    for calls in by_library.values():
        _start_together(calls[0].library, calls, opened)


def _start_together(library: Library, calls: list[Deferred], opened: Group) -> None:
    def done(code: int) -> None:
        if not opened._simulate:
            for call in calls:
                call.done(code)

    hand_over(calls, lambda: _start_on(library, calls, opened), done)


def _start_on(library: Library, calls: list[Deferred], opened: Group) -> int:
    """Make one library's calls between GroupStart and GroupEnd; the code of the latter (0 or in progress)."""
    for call in calls:
        if call.comm is not None:
            call.comm._check_open(call.name)  # before GroupStart: an error here must start nothing
    failed: tuple[Deferred, int] | None = None
    ended = False
    starting = Starting(None, False)
    try:
        current.set_group(starting)
        check(library, library.ncclGroupStart(), "group (ncclGroupStart)")
        for call in calls:
            code = call.function()
            if code not in (0, 7):
                failed = call, code
                break
        if opened._simulate and failed is None:
            info = ncclSimInfo_t.initializer()
            code = library.ncclGroupSimulateEnd(ctypes.byref(info))
            opened.estimated_time = info.estimatedTime
        else:
            code = library.ncclGroupEnd()
        ended = True
    finally:
        if not ended:
            # A signal handler raised on the way. A call that is wrong lets the library discard the group, so
            # that no half of it is started. Where the group was not open or has ended, both are errors and
            # change nothing.
            library.ncclAllReduce(None, None, 0, 0, 0, None, None)
            library.ncclGroupEnd()
        current.set_group(None)
    if failed is not None:
        call, code = failed
        if call.comm is not None:
            call.comm._fail(code, call.name)
        interrupts.reraise()
        check(library, code, call.name)
    if code not in (0, 7):
        interrupts.reraise()
        comms = {id(call.comm): call.comm for call in calls if call.comm is not None}
        only = next(iter(comms.values())) if len(comms) == 1 else None
        names = ", ".join(dict.fromkeys(call.name for call in calls))
        if only is not None:
            only._fail(code, f"group of {names} (ncclGroupEnd)")
        check(library, code, f"group of {names} (ncclGroupEnd)")
    return code

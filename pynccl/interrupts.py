"""Ctrl-C (and every other Python signal handler) while a thread waits inside the host library.

Python runs signal handlers in the main thread, between bytecodes: a thread that waits in C runs none, and
Ctrl-C would do nothing until the deadline. So the library's slow waits call back every 50 ms, the handlers
run there, and when one raises, the wait gives up; the exception is raised again where the call was made.

The callback must not be a plain Python function. A function that runs in the main thread may be interrupted
at its very first instruction, before it can enter a ``try``; the exception would then be printed and lost. A
generator that is suspended *inside* a ``try`` has no such gap, and everything between ctypes and the
generator is written in C.
"""

from __future__ import annotations

import atexit
import functools
import operator
import threading
from collections.abc import Generator
from typing import Any

from .abi.library import Library
from .abi.types import pyncclInterruptCheck_t


class _Watcher(threading.local):
    """``poll`` asks this thread's watcher; in a thread without one it is ``int()``: nothing to report."""

    poll: Any = staticmethod(int)
    generator: Any = None
    raised: BaseException | None = None


_watcher = _Watcher()


def _watch() -> Generator[int, None, None]:
    answer = 0
    while True:
        try:
            while True:
                # Suspended here, inside the try. Resuming runs the pending signal handlers, and what one
                # raises is raised here.
                yield answer
                answer = 0
        except GeneratorExit:
            raise
        except BaseException as error:  # KeyboardInterrupt, SystemExit, a test's time-out: whatever it is
            _watcher.raised, answer = error, 1


def _attend() -> None:
    """Give the main thread a watcher, or a new one: a second signal within microseconds ends a generator."""
    if threading.current_thread() is threading.main_thread():
        generator = _watcher.generator
        if generator is None or generator.gi_frame is None:
            _watcher.generator = generator = _watch()
            next(generator)
            # An ended generator answers 1: the wait gives up, and this function is called again.
            _watcher.poll = functools.partial(next, generator, 1)


_check = pyncclInterruptCheck_t(functools.partial(operator.methodcaller("poll"), _watcher))
_installed: set[str] = set()
_attend()


def install(library: Library) -> None:
    """Let this host library's waits be interrupted. Does nothing for other libraries, or the second time."""
    _attend()
    if library.kind != "host" or library.path in _installed:
        return
    _installed.add(library.path)
    library.pyncclSetInterruptCheck(_check)
    # A thread that still waits when the interpreter is gone must not call into it.
    atexit.register(library.pyncclSetInterruptCheck, pyncclInterruptCheck_t())


def reraise() -> None:
    """Raise what a signal handler raised during the call that has just failed, if one did."""
    raised, _watcher.raised = _watcher.raised, None
    if raised is not None:
        _attend()
        raise raised

"""How a run ends before its end: told by a signal, left by the reader of its output, out of time.

Each becomes an exception where the run is, so that what was measured is written on the way out. This file
knows nothing of ranks and rows.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pynccl

__all__ = ["SAID", "Terminated", "discard_output", "in_words", "limited", "terminated_by_signals"]

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # SIGINT is Python's own: KeyboardInterrupt
BROKEN_PIPE = 128 + signal.SIGPIPE
INTERRUPTED = 128 + signal.SIGINT
# Exit statuses of a rank that has said why, or that was told to end: a launcher need not say it again.
SAID = (1, 2, BROKEN_PIPE, INTERRUPTED, *(128 + number for number in _SIGNALS))


class Terminated(BaseException):
    """This process was told to end. Like KeyboardInterrupt nothing handles it but the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def status(self) -> int:
        return 128 + self.number


@contextlib.contextmanager
def terminated_by_signals() -> Iterator[None]:
    """While this is entered, SIGTERM and SIGHUP raise Terminated in the main thread; ignored ones stay so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: FrameType | None) -> None:
        for one in _SIGNALS:  # told again: it is on its way
            signal.signal(one, signal.SIG_IGN)
        raise Terminated(number)

    before = {one: signal.getsignal(one) for one in _SIGNALS if signal.getsignal(one) is not signal.SIG_IGN}
    for one in before:
        signal.signal(one, end)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def in_words(error: BaseException) -> str:
    """Why a run did not come to its end, as its files say it."""
    if isinstance(error, Terminated):
        return f"ended by {signal.Signals(error.number).name}"
    if isinstance(error, KeyboardInterrupt):
        return "ended by SIGINT"
    if isinstance(error, BrokenPipeError):
        return "ended by the reader of its output, which had gone"
    return f"{type(error).__name__}: {error}"


def discard_output() -> None:
    """The reader of standard output has gone: what Python still holds for it goes nowhere, without a word."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


@contextlib.contextmanager
def limited(seconds: float, abort: Callable[[], None], what: str) -> Iterator[None]:
    """What is inside may take so long (0: for ever); then `abort` is called, and NcclTimeoutError raised.

    The clock is a timer of another thread, so that what is inside is not slowed down by looking at one. When
    the ranks run out of time together, the first of them to abort breaks the calls of the others: an error
    in the last part of the time is therefore the time-out of another rank, and is told as that, with its
    own words behind it.
    """
    if not seconds:
        yield
        return
    begun = time.monotonic()
    out_of_time = threading.Event()

    def end() -> None:
        out_of_time.set()
        abort()

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except pynccl.NcclError as error:
        if not out_of_time.is_set() and time.monotonic() - begun < max(seconds / 2, seconds - 1.0):
            raise
        raise _timeout(seconds, what) from error
    finally:
        timer.cancel()
    if out_of_time.is_set():
        raise _timeout(seconds, what)


def _timeout(seconds: float, what: str) -> pynccl.NcclTimeoutError:
    return pynccl.NcclTimeoutError(
        f"{what} took longer than -T {seconds:g} s; raise it, or lower -n, -m or -e"
    )

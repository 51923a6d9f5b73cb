"""Signs of life through files: a process touches one every second, others see whether it still does.

For processes that share a folder and must not use a communicator. Times are compared for being equal alone,
so that clocks may differ. Knows nothing of ranks and checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

__all__ = ["Beat", "Watch"]

BEAT_SECONDS = 1.0
_MOST_BETWEEN_LOOKS = 2.0


class Beat:
    """Touch `path`, made if it is not there, every second until `stop`, whatever other threads wait for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stop = threading.Event()
        if not path.exists():
            path.touch()  # by the caller, not by the thread: once this returns, nothing is made any more
        # A daemon: it must not keep a program alive.
        threading.Thread(target=self._run, name=f"signs of life in {path.name}", daemon=True).start()

    def _run(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            # What is removed needs no sign any more; a touch that fails is one that the others miss.
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def stop(self) -> None:
        """No more touches, but for one that is under way."""
        self._stop.set()


class Watch:
    """How long a path has not been touched, as far as this process has watched."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: int | None = None
        self._looked = time.monotonic()
        self._silence = 0.0

    def silence(self) -> float:
        """Seconds without a touch, as of now. To be called often.

        Of the time between two calls two seconds count at most: who was stopped himself (by a debugger, a
        suspended job) does not take the others for dead.
        """
        now, stamp = time.monotonic(), self._stamp()
        self._silence += min(now - self._looked, _MOST_BETWEEN_LOOKS)
        self._looked = now
        if stamp is not None and stamp != self._seen:
            self._seen, self._silence = stamp, 0.0
        return self._silence

    def _stamp(self) -> int | None:
        try:
            # Opened, because network file systems answer a mere stat from their cache.
            descriptor = os.open(self._path, os.O_RDONLY)
        except OSError:  # not there yet, or not to be seen: no sign of life
            return None
        try:
            return os.fstat(descriptor).st_mtime_ns
        finally:
            os.close(descriptor)

"""Signals in words."""

from __future__ import annotations

import signal


def signal_in_words(number: int) -> str:
    """As "signal 9 (SIGKILL)". Python has names only for the first and last of the real-time signals."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        if not signal.SIGRTMIN < number < signal.SIGRTMAX:
            return f"signal {number}"
        name = f"SIGRTMIN+{number - signal.SIGRTMIN}"
    return f"signal {number} ({name})"

"""Time limits in seconds: those given as arguments, and ``PYNCCL_TIMEOUT``."""

from __future__ import annotations

import os
from numbers import Real
from typing import Any

from .abi.errors import InvalidArgumentError

_LONGEST = 1e9  # 32 years; what infinity comes to, so that deadlines stay finite
_AT_ONCE = 1e-9  # to the host library 0 means its default


def check_timeout(call: str, timeout: Any) -> float | None:
    """A limit on waiting, or None. TypeError or InvalidArgumentError, naming ``call``, unless positive."""
    if timeout is None:
        return None
    seconds = _number(call, timeout)
    if not seconds > 0:
        raise InvalidArgumentError(f"{call}: timeout={timeout!r} must be a positive number of seconds")
    return min(seconds, _LONGEST)


def check_patience(call: str, timeout: Any) -> float | None:
    """As ``check_timeout``, for one wait: 0 is to look once and not wait."""
    if timeout is None:
        return None
    seconds = _number(call, timeout)
    if not seconds >= 0:
        raise InvalidArgumentError(
            f"{call}: timeout={timeout!r} must be a number of seconds: 0 to look once, more to wait, or None "
            "for the default"
        )
    return min(seconds, _LONGEST)


def library_patience(call: str, timeout: Any) -> float:
    """``check_patience`` as the host library takes it, to which 0 is its default."""
    seconds = check_patience(call, timeout)
    return 0.0 if seconds is None else max(seconds, _AT_ONCE)


def timeout_from_environment(call: str) -> float | None:
    """``PYNCCL_TIMEOUT`` in seconds; None when it is not set. InvalidArgumentError unless it is positive."""
    text = os.environ.get("PYNCCL_TIMEOUT")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise InvalidArgumentError(
            f"{call}: PYNCCL_TIMEOUT={text!r} must be a positive number of seconds, or unset"
        )
    return min(seconds, _LONGEST)


def _number(call: str, timeout: Any) -> float:
    if not isinstance(timeout, Real):
        raise TypeError(f"{call}: timeout={timeout!r} must be a number of seconds, or None")
    try:
        return float(timeout)
    except OverflowError as error:  # an int beyond all floats
        raise InvalidArgumentError(f"{call}: timeout={timeout!r} is more seconds than there are") from error

"""What nccl-tests reads from the environment: groups of processes, the first device, the least bandwidth.

Each is a function of a mapping, and raises UsageError, naming the variable, for what it cannot read.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping

from bench.options import UsageError

__all__ = ["first_device", "group_of", "least_bandwidth", "smallest_group"]

_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "AND": lambda process, value: process & value,
    "OR": lambda process, value: process | value,
    "MOD": lambda process, value: process % value,
    "DIV": lambda process, value: process // value,
}
_SIGNS = {"&": "AND", "|": "OR", "%": "MOD", "/": "DIV"}


def group_of(process: int, environment: Mapping[str, str]) -> int:
    """The group of a process: 0 for all, unless one of the two variables says otherwise.

    NCCL_TESTS_SPLIT_MASK (hexadecimal) is AND with that value; NCCL_TESTS_SPLIT is AND, OR, MOD, DIV (or one
    of & | % /) and a decimal, 0x or 0b number, as in "MOD 2".
    """
    if mask := environment.get("NCCL_TESTS_SPLIT_MASK"):
        return _OPERATIONS["AND"](process, _number("NCCL_TESTS_SPLIT_MASK", mask, 16))
    text = environment.get("NCCL_TESTS_SPLIT")
    if not text:
        return 0
    match = re.fullmatch(r"\s*(AND|OR|MOD|DIV|[&|%/])\s*(\w+)\s*", text, re.IGNORECASE)
    if not match:
        raise UsageError(
            f"NCCL_TESTS_SPLIT={text!r}: write an operation and a value, as in AND 0x7, MOD 2 or /4"
        )
    name = match[1].upper()
    value = _number("NCCL_TESTS_SPLIT", match[2], 0)
    if value == 0 and _SIGNS.get(name, name) in ("MOD", "DIV"):
        raise UsageError(f"NCCL_TESTS_SPLIT={text!r} divides by zero; give a value of at least 1")
    return _OPERATIONS[_SIGNS.get(name, name)](process, value)


def smallest_group(processes: int, threads: int, environment: Mapping[str, str]) -> int:
    """The ranks of the smallest group, with so many threads in each process."""
    sizes = Counter(group_of(process, environment) for process in range(processes))
    return threads * min(sizes.values())


def first_device(environment: Mapping[str, str]) -> int:
    """NCCL_TESTS_DEVICE: the number of the device that the first rank of this machine takes; 0 if not set."""
    return _number("NCCL_TESTS_DEVICE", environment.get("NCCL_TESTS_DEVICE", "0"), 0)


def least_bandwidth(environment: Mapping[str, str]) -> float | None:
    """NCCL_TESTS_MIN_BW: the average bus bandwidth in GB/s of which nine tenths must be reached, if any."""
    text = environment.get("NCCL_TESTS_MIN_BW")
    try:
        value = float(text) if text else None
    except ValueError:
        value = math.nan
    if value is not None and not 0 <= value < math.inf:
        raise UsageError(f"NCCL_TESTS_MIN_BW: {text!r} is not a bandwidth in GB/s of at least 0")
    return value


def _number(variable: str, text: str, base: int) -> int:
    try:
        return int(text, base)
    except ValueError:
        raise UsageError(f"{variable}: {text!r} is not a number (decimal, 0x.. or 0b..)") from None

"""How the command lines here read their options: sizes, lists of numbers and names, files to write.

Each reader is an argparse ``type=``: what it refuses ends the command with words and status 2, before
anything is started or measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

__all__ = ["algorithm", "at_least", "names_of", "numbers", "output", "param", "sizes"]

_MOST_BYTES = 1 << 60
_MOST = 1 << 20  # numbers of a range: far more than there is time for
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def sizes(text: str) -> list[int]:
    """Bytes: ``4096``, ``64K``, ``1M``, ``2G``, with commas between several."""
    found = []
    for each in text.upper().split(","):
        number = each.rstrip("KMGIB")
        unit = each[len(number) :].replace("I", "").replace("B", "")
        if not number.isdecimal() or unit not in _UNITS:
            raise argparse.ArgumentTypeError(f"{each!r} is no size; write 4096, 64K, 1M or 2G")
        found.append(int(number) * _UNITS[unit])
        if found[-1] > _MOST_BYTES:
            raise argparse.ArgumentTypeError(f"{each!r} is too much; take {_MOST_BYTES} bytes at most")
    return found


def numbers(text: str) -> list[int]:
    """Numbers and ranges: ``8``, ``1-33``, ``2,4,8``."""
    found: list[int] = []
    for each in text.split(","):
        first, dash, last = each.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise argparse.ArgumentTypeError(f"{each!r} is no number or range; write 8, 1-33 or 2,4,8")
        if dash and int(first) > int(last):
            raise argparse.ArgumentTypeError(f"{each!r} is empty; write {last}-{first}")
        if dash and int(last) - int(first) >= _MOST:
            raise argparse.ArgumentTypeError(f"{each!r} are too many numbers; take {_MOST} at most")
        found += range(int(first), int(last if dash else first) + 1)
    return found


def at_least(lowest: int) -> Callable[[str], int]:
    """A whole number, ``lowest`` or more."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if value < lowest:
            raise argparse.ArgumentTypeError(f"{text!r}: take a whole number, {lowest} or more")
        if value > _MOST_BYTES:
            raise argparse.ArgumentTypeError(f"{text!r}: take {_MOST_BYTES} at most")
        return value

    return read


def algorithm(text: str) -> str:
    """The name of an algorithm, as calls write it ("pynccl:ring") or without the prefix, or a file."""
    return text.strip().removeprefix("pynccl:")


def names_of(known: Iterable[str], what: str, *, prefix: str = "") -> Callable[[str], list[str]]:
    """Names out of ``known`` with commas between them; ``prefix`` may stand before each and is dropped."""
    allowed = list(dict.fromkeys(known))

    def read(text: str) -> list[str]:
        found = [each.strip().removeprefix(prefix) for each in text.split(",")]
        unknown = [each for each in found if each not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"no {what} {unknown[0]!r}; there are {', '.join(allowed)}")
        return found

    return read


def output(text: str) -> str:
    """The path of a file that can be written, as far as can be seen without writing it."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        why = "is a directory" if path.is_dir() else f"has no directory {str(path.parent)!r}"
        raise argparse.ArgumentTypeError(f"{text!r} {why}; give a file in a directory that exists")
    return text


def param(text: str) -> tuple[str, Any]:
    """``name=value`` of an algorithm's parameter; the value as JSON, or else as it stands."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: write name=value")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value

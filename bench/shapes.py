"""What a JSON document has to look like, as data, and where one does not: for files from anywhere.

A shape is a predicate; a dict of shapes by key ("?key": it may be missing); a list of one shape, for each
item; or `Each(shape)`, for each value of an object. This file knows no format.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Each", "fault", "number", "or_nothing", "pair", "printable", "word"]


@dataclass(frozen=True)
class Each:
    """An object whose keys are any, and whose values have one shape."""

    shape: Any


def fault(value: Any, shape: Any, where: str = "") -> str | None:
    """The first place where a value is not as the shape says, and what is there; None if there is none."""
    match shape:
        case dict():
            inner = [(key.lstrip("?"), key.startswith("?"), one) for key, one in shape.items()]
            if not isinstance(value, dict):
                return _said(value, where)
            for name, optional, one in inner:
                if name not in value and not optional:
                    return f"{where}{name} is missing"
                if name in value and (found := fault(value[name], one, f"{where}{name} ")):
                    return found
            return None
        case list():
            items: Any = enumerate(value, 1) if isinstance(value, list) else None
        case Each():
            items, shape = value.items() if isinstance(value, dict) else None, [shape.shape]
        case _:
            return None if shape(value) else _said(value, where)
    if items is None:
        return _said(value, where)
    return next((found for key, one in items if (found := fault(one, shape[0], f"{where}{key} "))), None)


def _said(value: Any, where: str) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)[:40] if isinstance(value, str) else ""
    return f"{where}cannot be {text!r}" if text else f"{where}cannot be of the kind {type(value).__name__}"


_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def printable(value: Any) -> Any:
    """The same with what no page and no picture can have, in any word of it, as U+FFFD."""
    if isinstance(value, str):
        return _UNPRINTABLE.sub("\ufffd", value)
    if isinstance(value, list):
        return [printable(one) for one in value]
    if isinstance(value, dict):
        return {printable(key): printable(one) for key, one in value.items()}
    return value


def number(value: Any) -> bool:
    """Finite, and no larger than arithmetic and plots take."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and not (isinstance(value, float) and not math.isfinite(value))
        and abs(value) < 1e100
    )


def word(value: Any) -> bool:
    return isinstance(value, str)


def pair(value: Any) -> bool:
    """Two numbers."""
    return isinstance(value, list) and len(value) == 2 and all(map(number, value))


def or_nothing(shape: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Or null."""
    return lambda value: value is None or shape(value)

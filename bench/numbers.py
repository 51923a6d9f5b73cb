"""Numbers of command lines, for argparse: whole ones and real ones between bounds."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

__all__ = ["real", "whole"]

MOST_WHOLE, MOST_REAL = 2**31 - 1, 1e9  # what waits and loops take; no bound of a sensible run


def whole(least: int, most: int = MOST_WHOLE) -> Callable[[str], int]:
    """A whole number in [least, most]."""

    def convert(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) <= 20 and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
        return int(text)

    return convert


def real(least: float, above: bool = False) -> Callable[[str], float]:
    """A number from `least`, or above it, to 1e9: neither infinite nor NaN."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (least < value if above else least <= value) or not value <= MOST_REAL:
            bound = f"above {least:g}" if above else f"from {least:g}"
            raise argparse.ArgumentTypeError(f"{text!r} is no number {bound} to {MOST_REAL:g}")
        return value

    return convert

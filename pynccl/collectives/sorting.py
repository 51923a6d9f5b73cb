"""Sorting by numbers that are small or come in runs, faster than NumPy's stable sort of 64-bit integers."""

from __future__ import annotations

import numpy as np

from pynccl.collectives.schedule import Array

__all__ = ["stable_order"]

_DIGIT = 1 << 16  # NumPy's stable sort of 16-bit integers is a radix sort: 5 times faster than of longer ones


def stable_order(*keys: Array) -> Array:
    """The indices that sort by the first key, then by the second and so on; equals keep their order."""
    order = None
    for key in reversed(keys):
        key = key if order is None else key[order]
        if len(key) and (key[1:] >= key[:-1]).all():
            continue  # sorted already, as much of a schedule is
        small = len(key) and 0 <= key.min() and key.max() < _DIGIT
        by_key = np.argsort(key.astype(np.uint16) if small else key, kind="stable")
        order = by_key if order is None else order[by_key]
    return np.arange(len(keys[0])) if order is None else order

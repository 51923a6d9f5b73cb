"""Casts between dtypes, in place into existing memory, in cache-sized blocks."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["cast_into"]

BLOCK = (
    1 << 15
)  # elements of a cast at a time: source, target and a float32 temporary stay in the second-level cache
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def cast_into(target: Any, source: Any) -> None:
    """`target[...] = source` in target's dtype, rounding to nearest even. Same size, both contiguous.

    bfloat16 and float32 exchange bits directly in NumPy: its own loops for the type handle one element at a
    time.
    """
    if not isinstance(target, np.ndarray) or target.dtype == source.dtype:
        target[...] = source
        return
    target, source = target.reshape(-1), source.reshape(-1)
    for start in range(0, target.size, BLOCK):
        out, block = target[start : start + BLOCK], source[start : start + BLOCK]
        if source.dtype == _BFLOAT16 and target.dtype == np.float32:
            bits = out.view(np.uint32)
            bits[...] = block.view(np.uint16)
            bits <<= 16
        elif source.dtype == np.float32 and target.dtype == _BFLOAT16:
            out.view(np.uint16)[...] = _round_to_bfloat16(block)
        else:
            with np.errstate(
                over="ignore"
            ):  # a float16 that overflows becomes infinity, which the loss scale looks for
                out[...] = block


def _round_to_bfloat16(block: np.ndarray) -> np.ndarray:
    """The upper 16 bits, rounded to nearest even; a NaN stays a NaN."""
    bits = block.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += bits
    rounded += 0x7FFF
    rounded >>= 16
    nan = np.isnan(block)
    if nan.any():
        rounded[nan] = 0x7FC0 | (bits[nan] >> 16 & 0x8000)
    return rounded

"""Formats of rows that are fewer bytes: 8-bit and 4-bit integers, float8, and the largest elements.

    codec = Integers(bits=4)
    packed = codec.encode(rows)             # float32 (r, m) to uint8 (r, codec.width(m))
    rows = codec.decode(packed, m)

Every rank must find the same width for the same row, so it follows from the length alone. Knows no
communicators. The NumPy paths are tested; the CuPy ones have not been run.
"""

from __future__ import annotations

import dataclasses
import importlib
import numbers
from typing import Any, Protocol

import numpy as np

from pynccl.abi.errors import InvalidArgumentError
from pynccl.operations import integer

__all__ = ["Codec", "Float8", "Integers", "TopK", "arrays_of"]

Array = Any


class Codec(Protocol):
    """A format of rows. Rows of equal length become rows of bytes of equal length."""

    def width(self, m: int) -> int:
        """Bytes of a row of ``m`` elements."""

    def encode(self, rows: Array) -> Array:
        """float32 of shape (r, m) as uint8 of shape (r, width(m)); rows and rank do not matter to a row."""

    def decode(self, packed: Array, m: int) -> Array:
        """What ``encode`` kept, as float32 of shape (r, m)."""


@dataclasses.dataclass(frozen=True)
class Integers:
    """Blocks of ``block`` elements as integers of ``bits`` (8 or 4), and a float32 scale for each block.

    The error of an element is at most half a step: the largest of its block / 254 (8 bits) or / 14 (4 bits).
    A block with a NaN or an infinity in it arrives as NaN.
    """

    bits: int = 8
    block: int = 256

    def __post_init__(self) -> None:
        if integer("Integers", "bits", self.bits) not in (4, 8):
            raise InvalidArgumentError(f"Integers: bits={self.bits!r}; there are 4 and 8")
        integer("Integers", "block", self.block, 1)

    @property
    def _most(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def width(self, m: int) -> int:
        return 4 * _blocks(m, self.block) + -(-m * self.bits // 8)

    def encode(self, rows: Array) -> Array:
        xp, (r, m) = arrays_of(rows), rows.shape
        scaled, scales = _scale(rows, self.block, self._most)
        whole = xp.rint(scaled).astype("int8")[:, :m]
        if self.bits == 4:
            low = xp.zeros((r, m + m % 2), "uint8")
            low[:, :m] = whole.view("uint8") & 15
            return _join(scales, low[:, 0::2] | (low[:, 1::2] << 4))
        return _join(scales, whole.view("uint8"))

    def decode(self, packed: Array, m: int) -> Array:
        xp = arrays_of(packed)
        scales, body = _cut(packed, m, self.block)
        if self.bits == 4:
            pairs = xp.stack([body & 15, body >> 4], axis=-1).reshape(len(body), -1)[:, :m]
            whole = ((pairs ^ 8).view("int8") - 8).astype("float32")  # the sign of four bits
        else:
            whole = body.view("int8").astype("float32")
        return _unscale(whole, scales, self.block)


@dataclasses.dataclass(frozen=True)
class Float8:
    """Blocks of ``block`` elements as float8_e4m3fn, and a float32 scale for each block.

    The error of an element is at most 1/16 of it, or for small ones 2^-10 / 448 of the largest of its block.
    A block with a NaN or an infinity in it arrives as NaN. In host memory only: CuPy has no such type.
    """

    block: int = 256

    def __post_init__(self) -> None:
        integer("Float8", "block", self.block, 1)

    def width(self, m: int) -> int:
        return 4 * _blocks(m, self.block) + m

    def encode(self, rows: Array) -> Array:
        dtype = _float8(rows)
        scaled, scales = _scale(rows, self.block, 448)
        return _join(scales, np.ascontiguousarray(scaled[:, : rows.shape[1]].astype(dtype)).view("uint8"))

    def decode(self, packed: Array, m: int) -> Array:
        dtype = _float8(packed)
        scales, body = _cut(packed, m, self.block)
        return _unscale(body.view(dtype).astype("float32"), scales, self.block)


@dataclasses.dataclass(frozen=True)
class TopK:
    """The ``fraction`` of elements that are largest in magnitude, as float32, with their places as int32.

    At least one of a row that has any. NaN and infinities are the largest.
    """

    fraction: float = 1 / 32

    def __post_init__(self) -> None:
        if not isinstance(self.fraction, numbers.Real) or not 0 < self.fraction <= 1:
            raise InvalidArgumentError(
                f"TopK: fraction={self.fraction!r}; give a number, more than 0 and at most 1"
            )

    def _kept(self, m: int) -> int:
        return min(m, max(1, int(m * self.fraction))) if m else 0

    def width(self, m: int) -> int:
        return 8 * self._kept(m)

    def encode(self, rows: Array) -> Array:
        xp, (r, m) = arrays_of(rows), rows.shape
        k = self._kept(m)
        if not k:
            return xp.zeros((r, 0), "uint8")
        at = xp.argpartition(xp.abs(rows), m - k, axis=1)[:, m - k :]
        at = xp.sort(at, axis=1)
        values = xp.take_along_axis(rows, at, axis=1)
        return xp.concatenate([_bytes(at.astype("int32")), _bytes(values)], axis=1)

    def decode(self, packed: Array, m: int) -> Array:
        xp, k = arrays_of(packed), self._kept(m)
        rows = xp.zeros((len(packed), m), "float32")
        if k:
            at = xp.ascontiguousarray(packed[:, : 4 * k]).view("int32")
            values = xp.ascontiguousarray(packed[:, 4 * k :]).view("float32")
            rows[xp.arange(len(packed))[:, None], at] = values
        return rows


# --- blocks with a scale ------------------------------------------------------------------------------------


def _blocks(m: int, block: int) -> int:
    return -(-m // block)


def _scale(rows: Array, block: int, most: int) -> tuple[Array, Array]:
    """Rows divided by the scales of their blocks, in [-most, most]; and these. Padded to whole blocks."""
    xp, (r, m) = arrays_of(rows), rows.shape
    count = _blocks(m, block)
    padded = xp.zeros((r, count * block), "float32")
    padded[:, :m] = rows
    cut = padded.reshape(r, count, block)
    largest = xp.abs(cut).max(axis=2) if cut.size else xp.zeros((r, count), "float32")
    scales = largest / np.float32(most)  # of a block with NaN: NaN
    usable = xp.isfinite(scales) & (scales > 0)
    # A block of zeros has scale 0, as has one whose scale would be below the smallest float: it arrives as 0.
    quotient = cut / xp.where(usable, scales, np.float32(1))[:, :, None]
    quotient = xp.where(usable[:, :, None], xp.clip(quotient, -most, most), np.float32(0))
    scales = xp.where(xp.isfinite(scales), scales, np.float32(np.nan))
    return quotient.reshape(r, -1), scales


def _unscale(whole: Array, scales: Array, block: int) -> Array:
    return whole * arrays_of(whole).repeat(scales, block, axis=1)[:, : whole.shape[1]]


def _join(scales: Array, body: Array) -> Array:
    return arrays_of(body).concatenate([_bytes(scales), body], axis=1)


def _cut(packed: Array, m: int, block: int) -> tuple[Array, Array]:
    xp, head = arrays_of(packed), 4 * _blocks(m, block)
    scales = xp.ascontiguousarray(packed[:, :head]).view("float32")
    return scales, xp.ascontiguousarray(packed[:, head:])


def _bytes(x: Array) -> Array:
    return arrays_of(x).ascontiguousarray(x).view("uint8")


def _float8(x: Array) -> Any:
    if not isinstance(x, np.ndarray):
        raise TypeError("Float8: CuPy has no float8_e4m3fn; use Integers(8), which sends as many bytes")
    return np.dtype(importlib.import_module("ml_dtypes").float8_e4m3fn)


def arrays_of(x: Any) -> Any:
    """NumPy or CuPy, whichever made x."""
    return np if isinstance(x, np.ndarray) else importlib.import_module(type(x).__module__.partition(".")[0])

"""Inputs for which every reduction is exact, whatever its order, and what must come out: to the last bit.

The idea is nccl-tests': the result of an element is drawn first, and then split over the ranks so that no
partial sum or product can round, in whichever order and grouping an algorithm takes them.

* sum: whole multiples of a power of two; half of the ranks add up to one number, the others take one away,
  and neither they nor any part of them needs more bits than the mantissa has;
* prod: powers of two with signs, and one rank's full mantissa;
* mulsum: as sum, with room for the doubling on odd ranks;
* avg of floats: two ranks are not zero; as 1/n may round, 2 units in the last place are allowed;
* max and min: any finite numbers; integers: any bits (sums and products wrap); copies: any bits.

Which rank plays which part changes from element to element, so a block that is missing, doubled or misplaced
is wrong in nearly every element. This file makes NumPy arrays and knows nothing of communicators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

__all__ = ["DTYPE", "count_wrong", "expected", "inputs", "premul_scalar", "tolerance"]

Array = NDArray[Any]

# By nccl-tests' names.
DTYPE: dict[str, np.dtype] = {
    **{name: np.dtype(name) for name in ("int8", "uint8", "int32", "uint32", "int64", "uint64")},
    "half": np.dtype(np.float16),
    "float": np.dtype(np.float32),
    "double": np.dtype(np.float64),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "f8e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "f8e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


def inputs(op: str, dtype: str, rank: int, ranks: int, seed: int, count: int) -> Array:
    """What `rank` of `ranks` gives to the reduction `op` ("copy": to a collective that only moves data)."""
    if op == "copy" or _is_integer(dtype) or op in ("max", "min"):
        make = _any_float if op in ("max", "min") and not _is_integer(dtype) else _any_bits
        array = _by_chunks(count, dtype, lambda index: make(dtype, _draw(index, seed, 1 + rank)))
        return np.where(array == 0, array.dtype.type(1), array) if op == "prod" else array
    return _by_chunks(count, dtype, lambda index: _FLOAT_INPUTS[op](dtype, _Parts(rank, ranks, seed, index)))


def expected(op: str, dtype: str, ranks: int, seed: int, count: int) -> Array:
    """What every rank must hold after `op` over the inputs of all `ranks` (not for "copy")."""
    if _is_integer(dtype) or op in ("max", "min"):
        return _reduced(op, dtype, ranks, seed, count)
    return _by_chunks(count, dtype, lambda index: _FLOAT_RESULTS[op](dtype, _Parts(0, ranks, seed, index)))


def tolerance(op: str, dtype: str) -> int:
    """Units in the last place by which a result may differ."""
    return 2 if op == "avg" and not _is_integer(dtype) else 0


def count_wrong(got: Array, want: Array, allowed: int = 0) -> int:
    """Elements whose bits differ from `want`'s by more than `allowed` units in the last place."""
    a, b = got.view(f"u{got.itemsize}"), want.view(f"u{want.itemsize}")
    if not allowed:
        return int(np.count_nonzero(a != b))
    return int(np.count_nonzero(np.where(a < b, b - a, a - b) > allowed))


def premul_scalar(rank: int) -> float:
    """What "mulsum" multiplies a rank's input by before the sum."""
    return 2.0 if rank % 2 else 1.0


# ---- where randomness comes from: a hash of (seed, rank or a constant, index), the same on every rank

CHUNK = 1 << 15  # elements: an 8-byte chunk and its few temporaries stay in a core's L2 cache


@dataclass(frozen=True)
class _Index:
    """Elements `start` to `start + size` of the whole array."""

    start: int
    size: int


def _by_chunks(count: int, dtype: str, make: Callable[[_Index], Array]) -> Array:
    out = np.empty(count, DTYPE[dtype])
    for start in range(0, count, CHUNK):
        index = _Index(start, min(CHUNK, count - start))
        out[start : start + index.size] = make(index)
    return out


def _draw(index: _Index, seed: int, stream: int) -> NDArray[np.uint32]:
    """32 random bits per element. Streams are independent; so are seeds."""
    salt = (seed * 0x9E3779B97F4A7C15 + stream * 0xC2B2AE3D27D4EB4F + index.start * 0x165667B19E3779F9) & (
        2**64 - 1
    )
    bits = _counter()[: index.size] + np.uint32((salt ^ salt >> 32) & 0xFFFFFFFF)
    for multiplier, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        bits ^= bits >> np.uint32(shift)
        bits *= np.uint32(multiplier)
    bits ^= bits >> np.uint32(16)
    return bits


@cache
def _counter() -> NDArray[np.uint32]:
    return np.arange(CHUNK, dtype=np.uint32) * np.uint32(0x9E3779B1)


def _is_integer(dtype: str) -> bool:
    return DTYPE[dtype].kind in "iu"


def _any_bits(dtype: str, bits: NDArray[np.uint32]) -> Array:
    kind = DTYPE[dtype]
    if kind.itemsize == 8:
        high = bits * np.uint32(0x85EBCA6B) ^ bits >> np.uint32(7)
        return (high.astype(np.uint64) << np.uint64(32) | bits).view(kind)
    return bits.astype(f"u{kind.itemsize}").view(kind)


def _reduced(op: str, dtype: str, ranks: int, seed: int, count: int) -> Array:
    """The generic way: reduce all ranks' inputs. Exact for integers (which wrap), and for max and min."""
    combine = {"prod": np.multiply, "max": np.maximum, "min": np.minimum}.get(op, np.add)
    total = inputs(op, dtype, 0, ranks, seed, count)
    for rank in range(1, ranks):
        one = inputs(op, dtype, rank, ranks, seed, count)
        total = combine(total, one * one.dtype.type(premul_scalar(rank)) if op == "mulsum" else one)
    if op == "avg":  # towards zero, as C divides
        quotient, rest = np.divmod(total if total.itemsize == 8 else total.astype(np.int64), ranks)
        total = (quotient + ((rest != 0) & (total < 0)).astype(quotient.dtype)).astype(total.dtype)
    return total


# ---- floats


@dataclass(frozen=True)
class _Format:
    """A floating-point type: mantissa bits without the leading one, exponents of its normal numbers."""

    mantissa: int
    least: int
    greatest: int
    maximum: float

    @property
    def units(self) -> int:
        """The largest number below which every whole number is exact, all mantissa bits set."""
        return 2 ** (self.mantissa + 1) - 1

    def scales(self) -> Array:
        """16 powers of two, over the range in which 1 to `units` times the scale are normal numbers."""
        top = self.greatest - self.mantissa
        while self.units * 2.0**top > self.maximum:
            top -= 1
        return np.array([2.0 ** (self.least + (top - self.least) * i // 15) for i in range(16)])


@cache
def _format(dtype: str) -> _Format:
    info = ml_dtypes.finfo(DTYPE[dtype])
    return _Format(
        int(info.nmant), int(info.minexp), int(np.floor(np.log2(float(info.max)))), float(info.max)
    )


@cache
def _work(dtype: str) -> tuple[np.dtype, np.dtype, Array, Array]:
    """Types to compute in that hold the format exactly, integer and float; scales; powers of two from 2^0."""
    integer, real = (np.int64, np.float64) if dtype == "double" else (np.int32, np.float32)
    powers = np.array([2.0**e for e in range(_format(dtype).greatest)])
    return np.dtype(integer), np.dtype(real), _format(dtype).scales().astype(real), powers.astype(real)


class _Parts:
    """The part that a rank plays in each element of a chunk, and the element's random numbers."""

    def __init__(self, rank: int, ranks: int, seed: int, index: _Index) -> None:
        self.rank, self.ranks, self._seed, self._index = rank, ranks, seed, index
        self.bits = _draw(index, seed, 0)

    def roles(self, ranks: int, rank: int) -> Array:
        """0 to ranks-1, another rank's at every element: a rotation by a random amount."""
        turned = (self.bits >> np.uint32(16)) * np.uint32(ranks) >> np.uint32(16)  # 0 to ranks-1
        turned += np.uint32(rank)
        return np.minimum(turned, turned - np.uint32(ranks))  # modulo ranks: below 0 it wraps far above

    def magnitudes(self, dtype: str, which: int, most: int) -> Array:
        """Whole numbers in about [most/2, most]; `most` is one less than a power of two."""
        integer = _work(dtype)[0]
        bits = _draw(self._index, self._seed, -1 - which)
        wide = _any_bits("int64", bits) if integer.itemsize == 8 else bits.view(np.int32)
        return integer.type(most) - (wide & integer.type(most >> 1))

    def scaled(self, dtype: str, whole: Array) -> Array:
        """The whole numbers times the element's random power of two and sign; 0 stays +0."""
        integer, real, scales, _ = _work(dtype)
        sign = integer.type(1) - (self.bits >> np.uint32(3) & np.uint32(2)).astype(integer)
        scale = scales.take((self.bits & np.uint32(15)).astype(np.intp))
        return ((whole * sign).astype(real) * scale).astype(DTYPE[dtype])


def _share(total: Array, role: Array, parts: int) -> Array:
    """A whole number in `parts` parts: equal ones, and the rest on top of the last."""
    if parts <= 1:
        return total if parts else np.zeros_like(total)
    each = total // total.dtype.type(parts)
    return np.where(role == parts - 1, total - each * total.dtype.type(parts - 1), each)


def _sum_totals(dtype: str, parts: _Parts) -> tuple[Array, Array]:
    units = _format(dtype).units
    added = parts.magnitudes(dtype, 0, units)
    return added, parts.magnitudes(dtype, 1, units) if parts.ranks > 1 else np.zeros_like(added)


def _sum_input(dtype: str, parts: _Parts) -> Array:
    added, taken = _sum_totals(dtype, parts)
    role = parts.roles(parts.ranks, parts.rank)
    half = role >> np.uint32(1)
    whole = np.where(
        role & np.uint32(1),
        -_share(taken, half, parts.ranks // 2),
        _share(added, half, (parts.ranks + 1) // 2),
    )
    return parts.scaled(dtype, whole)


def _sum_result(dtype: str, parts: _Parts) -> Array:
    added, taken = _sum_totals(dtype, parts)
    return parts.scaled(dtype, added - taken)


def _mulsum_totals(dtype: str, parts: _Parts) -> tuple[Array, Array]:
    """What the even ranks add up to, half of the units; and the odd ones, half of that, as it is doubled."""
    units = _format(dtype).units
    once = parts.magnitudes(dtype, 0, units >> 1)
    return once, parts.magnitudes(dtype, 1, units >> 2) if parts.ranks > 1 else np.zeros_like(once)


def _mulsum_input(dtype: str, parts: _Parts) -> Array:
    total = _mulsum_totals(dtype, parts)[parts.rank % 2]
    peers = (parts.ranks + 1 - parts.rank % 2) // 2
    whole = _share(total, parts.roles(peers, parts.rank // 2), peers)
    return parts.scaled(dtype, whole)


def _mulsum_result(dtype: str, parts: _Parts) -> Array:
    once, twice = _mulsum_totals(dtype, parts)
    return parts.scaled(dtype, once + 2 * twice)


def _prod_exponents(dtype: str, parts: _Parts) -> Array:
    """Below the greatest by one, so that any mantissa fits on top."""
    most = _format(dtype).greatest - 1
    return np.int32(most) - (parts.magnitudes("float", 0, 2**24 - 1) % np.int32(most // 2 + 1))


def _prod_mantissa(dtype: str, parts: _Parts) -> Array:
    return (
        parts.magnitudes(dtype, 1, _format(dtype).units).astype(_work(dtype)[1])
        * 2.0 ** -_format(dtype).mantissa
    )


def _prod_input(dtype: str, parts: _Parts) -> Array:
    role = parts.roles(parts.ranks, parts.rank)
    power = _work(dtype)[3][_share(_prod_exponents(dtype, parts), role, parts.ranks)]
    value: Array = np.where(role == 0, _prod_mantissa(dtype, parts) * power, power)
    return np.where(role & np.uint32(1), -value, value).astype(DTYPE[dtype])


def _prod_result(dtype: str, parts: _Parts) -> Array:
    value = _prod_mantissa(dtype, parts) * _work(dtype)[3][_prod_exponents(dtype, parts)]
    return (-value if parts.ranks // 2 % 2 else value).astype(DTYPE[dtype])


def _avg_pair(dtype: str, parts: _Parts) -> tuple[Array, Array]:
    most = 2 ** _format(dtype).mantissa - 1
    first, second = (parts.magnitudes(dtype, which, most) for which in (0, 1))
    return first, second if parts.ranks > 1 else np.zeros_like(second)


def _avg_input(dtype: str, parts: _Parts) -> Array:
    first, second = _avg_pair(dtype, parts)
    role = parts.roles(parts.ranks, parts.rank)
    return (
        np.where(role == 0, first, np.where(role == 1, second, 0))
        .astype(_work(dtype)[1])
        .astype(DTYPE[dtype])
    )


def _avg_result(dtype: str, parts: _Parts) -> Array:
    """Both terms divided and rounded, then added: what a library that scales before the sum gets."""
    real = _work(dtype)[1]
    nth = real.type(1 / parts.ranks)
    first, second = (
        (one.astype(real) * nth).astype(DTYPE[dtype]).astype(real) for one in _avg_pair(dtype, parts)
    )
    return (first + second).astype(DTYPE[dtype])


def _any_float(dtype: str, bits: NDArray[np.uint32]) -> Array:
    """Any sign and mantissa, the exponent from the middle half of its range: no zero, infinity or NaN."""
    kind, form = DTYPE[dtype], _format(dtype)
    raw = _any_bits(f"uint{8 * kind.itemsize}" if kind.itemsize != 2 else "uint32", bits)
    exponent_bits = 8 * kind.itemsize - 1 - form.mantissa
    unsigned = np.dtype(f"u{kind.itemsize}")
    clear = (2 ** (exponent_bits - 1)) << form.mantissa
    quarter = (2 ** (exponent_bits - 2)) << form.mantissa
    below = raw.astype(unsigned) & unsigned.type(2 ** (8 * kind.itemsize) - 1 - clear)
    return (below + unsigned.type(quarter)).view(kind)


_FLOAT_INPUTS = {"sum": _sum_input, "prod": _prod_input, "avg": _avg_input, "mulsum": _mulsum_input}
_FLOAT_RESULTS = {"sum": _sum_result, "prod": _prod_result, "avg": _avg_result, "mulsum": _mulsum_result}

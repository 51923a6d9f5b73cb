"""Collectives that send fewer bytes: 8-bit and 4-bit blocks, or the largest elements, with error feedback.

    gradients = Compressor(comm, Integers(bits=8))
    gradients.all_reduce(x, "avg", key="layer 3")
    print(gradients.report())

What a call leaves out is kept and added to what the next call of the same ``key`` sends, so that over many
steps nothing is lost: the error of a sum of calls is that of one. An all_reduce is two rounds, all_to_all and
all_gather, each of compressed rows; the rank that reduces a row compresses the result once, for all, so every
rank ends with the same bits. Owns the formats of rows and the feedback; how rows travel is the
communicator's.

Sources: D. Alistarh et al., "QSGD", NeurIPS 2017; S. Stich et al., "Sparsified SGD with memory", NeurIPS
2018; H. Tang et al., "DoubleSqueeze: parallel stochastic gradient descent with double-pass error-compensated
compression", ICML 2019, for the second feedback, of the rank that reduces. The NumPy paths are tested; the
CuPy ones have not been run.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, Protocol

import numpy as np

from pynccl.abi.errors import InvalidArgumentError, InvalidUsageError
from pynccl.threadstate import current

__all__ = ["Codec", "Compressor", "Float8", "Integers", "Report", "TopK"]

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
        if self.bits not in (4, 8):
            raise InvalidArgumentError(f"Integers: bits={self.bits!r}; there are 4 and 8")
        _check_block("Integers", self.block)

    @property
    def _most(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def width(self, m: int) -> int:
        return 4 * _blocks(m, self.block) + -(-m * self.bits // 8)

    def encode(self, rows: Array) -> Array:
        xp, (r, m) = _arrays_of(rows), rows.shape
        scaled, scales = _scale(rows, self.block, self._most)
        whole = xp.rint(scaled).astype("int8")[:, :m]
        if self.bits == 4:
            low = xp.zeros((r, m + m % 2), "uint8")
            low[:, :m] = whole.view("uint8") & 15
            return _join(scales, low[:, 0::2] | (low[:, 1::2] << 4))
        return _join(scales, whole.view("uint8"))

    def decode(self, packed: Array, m: int) -> Array:
        xp = _arrays_of(packed)
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
        _check_block("Float8", self.block)

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
        if not 0 < self.fraction <= 1:
            raise InvalidArgumentError(f"TopK: fraction={self.fraction!r}; give more than 0, and at most 1")

    def _kept(self, m: int) -> int:
        return min(m, max(1, int(m * self.fraction))) if m else 0

    def width(self, m: int) -> int:
        return 8 * self._kept(m)

    def encode(self, rows: Array) -> Array:
        xp, (r, m) = _arrays_of(rows), rows.shape
        k = self._kept(m)
        if not k:
            return xp.zeros((r, 0), "uint8")
        at = xp.argpartition(xp.abs(rows), m - k, axis=1)[:, m - k :]
        at = xp.sort(at, axis=1)
        values = xp.take_along_axis(rows, at, axis=1)
        return xp.concatenate([_bytes(at.astype("int32")), _bytes(values)], axis=1)

    def decode(self, packed: Array, m: int) -> Array:
        xp, k = _arrays_of(packed), self._kept(m)
        rows = xp.zeros((len(packed), m), "float32")
        if k:
            at = xp.ascontiguousarray(packed[:, : 4 * k]).view("int32")
            values = xp.ascontiguousarray(packed[:, 4 * k :]).view("float32")
            rows[xp.arange(len(packed))[:, None], at] = values
        return rows


@dataclasses.dataclass(frozen=True)
class Report:
    """What a compressor of this rank has done since it was made."""

    calls: int
    bytes_sent: int
    """To other ranks, counted from the arrays that were given to the library."""
    bytes_uncompressed: int
    """What the best algorithms send of float32 for the same: all_reduce 2(n-1)/n, others (n-1)/n."""
    error: float
    """Norm of what the last call left out of what it sent, relative to the norm of that."""
    feedback: float
    """Norm of all that is kept for later calls."""

    @property
    def ratio(self) -> float:
        """How many times fewer bytes; NaN if none were sent."""
        return self.bytes_uncompressed / self.bytes_sent if self.bytes_sent else float("nan")

    def __str__(self) -> str:
        return (
            f"{self.calls} calls sent {self.bytes_sent} bytes, {self.ratio:.2f} times fewer than float32; "
            f"relative error of the last {self.error:.2e}, norm of what is kept {self.feedback:.2e}"
        )


class Compressor:
    """Compressed collectives on a communicator, for float32 arrays. Every rank makes the same calls.

    ``codec``: `Integers`, `Float8`, `TopK`, or anything that does what `Codec` says; the same on every rank.
    ``feedback=False`` forgets what a call left out. Calls of one ``key`` share what was left out: give each
    parameter its own, and always the same shape. Elements that are not finite are passed on and never kept.
    Calls return when they are done (on a GPU: in the order of the current stream) and cannot be in a group.
    """

    def __init__(self, comm: Any, codec: Codec, *, feedback: bool = True) -> None:
        self.comm, self.codec, self.feedback = comm, codec, feedback
        self._kept: dict[tuple[str, Any], Array] = {}
        self._calls = self._sent = self._plain = 0
        self._last: tuple[Array, Array] | None = None

    def all_reduce(self, x: Array, op: str = "sum", *, key: Any = None) -> Array:
        """``x`` becomes the sum ("avg": the mean) over all ranks, with the same bits on every rank."""
        xp = self._check("all_reduce", x, op)
        n = self.comm.size
        m = -(-x.size // n)
        rows = xp.zeros(n * m, "float32")
        rows[: x.size] = x.reshape(-1)
        total = self._scattered("all_reduce", rows.reshape(n, m), op, key)
        whole = self._gathered("all_reduce", total, key)
        x[...] = whole.reshape(-1)[: x.size].reshape(x.shape)
        return x

    def reduce_scatter(self, x: Array, op: str = "sum", *, key: Any = None) -> Array:
        """Rank r gets block r of the sum (or mean): (n * k, ...) gives (k, ...), a new array."""
        self._check("reduce_scatter", x, op)
        n = self.comm.size
        if x.ndim < 1 or x.shape[0] % n:
            raise InvalidArgumentError(
                f"reduce_scatter: shape {x.shape} does not divide over {n} ranks; pad axis 0 to a multiple"
            )
        total = self._scattered("reduce_scatter", x.reshape(n, x.size // n), op, key)
        return total.reshape(x.shape[0] // n, *x.shape[1:])

    def all_gather(self, x: Array, *, key: Any = None) -> Array:
        """``x`` of all ranks in rank order, as compression left it: (k, ...) gives (n * k, ...), a new array.

        Every rank gets the same bits, of its own block too.
        """
        self._check("all_gather", x, "sum")
        whole = self._gathered("all_gather", x.reshape(1, x.size), key)
        return whole.reshape(self.comm.size * x.shape[0], *x.shape[1:]) if x.ndim else whole.reshape(-1)

    def report(self) -> Report:
        """Bytes and errors of this rank so far. On a GPU this waits for it."""
        error = 0.0
        if self._last is not None:
            meant, left = self._last
            size = _norm([meant])
            error = _norm([left]) / size if size else 0.0
        return Report(self._calls, self._sent, self._plain, error, _norm(list(self._kept.values())))

    def reset(self) -> None:
        """Forget what earlier calls left out (after loading a checkpoint, for instance)."""
        self._kept.clear()

    # --- the two rounds -------------------------------------------------------------------------------------

    def _scattered(self, call: str, rows: Array, op: str, key: Any) -> Array:
        """The sum of everybody's row of this rank: (1, m)."""
        n, m = rows.shape
        packed = self._encode((f"{call}, contributions", key), rows)
        if n > 1 and packed.size:
            packed = self.comm.all_to_all(packed, _arrays_of(rows).empty_like(packed))
        self._count((n - 1) * self.codec.width(m), (n - 1) * m)
        total = self.codec.decode(packed, m).sum(axis=0, keepdims=True)
        return total / np.float32(n) if op == "avg" else total

    def _gathered(self, call: str, row: Array, key: Any) -> Array:
        """Everybody's row, with the same bits everywhere: (n, m)."""
        n, m = self.comm.size, row.shape[1]
        packed = self._encode((f"{call}, result", key), row)
        if n > 1 and packed.size:
            packed = self.comm.all_gather(packed)
        self._count((n - 1) * self.codec.width(m), (n - 1) * m)
        return self.codec.decode(packed, m)

    def _encode(self, key: tuple[str, Any], rows: Array) -> Array:
        """The rows with what was left out before; what is left out now is kept."""
        xp, kept = _arrays_of(rows), self._kept.get(key)
        if kept is not None and kept.shape != rows.shape:
            raise InvalidArgumentError(
                f"{key[0]}: key {key[1]!r} was used for {kept.size} elements and now for {rows.size}; give "
                "each array a key of its own"
            )
        meant = rows if kept is None else rows + kept
        with np.errstate(all="ignore"):
            packed = self.codec.encode(meant)
            left = meant - self.codec.decode(packed, rows.shape[1])
        left = xp.where(xp.isfinite(left), left, np.float32(0))
        if self.feedback:
            self._kept[key] = left
        self._last = (meant, left)
        return packed

    def _count(self, sent: int, elements: int) -> None:
        self._sent += sent
        self._plain += 4 * elements

    def _check(self, call: str, x: Array, op: str) -> Any:
        self.comm._check_open(f"{call} (compressed)")
        if current.group is not None:
            raise InvalidUsageError(
                f"{call} (compressed): it uses what its messages bring, and in a group they come at the end; "
                "call it outside of pynccl.group()"
            )
        if op not in ("sum", "avg"):
            raise InvalidArgumentError(f"{call} (compressed): op={op!r}; there are 'sum' and 'avg'")
        if getattr(getattr(x, "dtype", None), "name", None) != "float32":
            raise TypeError(
                f"{call} (compressed): x is {getattr(x, 'dtype', type(x).__name__)}; pass a float32 array"
            )
        self._calls += 1
        return _arrays_of(x)


# --- blocks with a scale ------------------------------------------------------------------------------------


def _check_block(name: str, block: Any) -> None:
    if not isinstance(block, int) or block < 1:
        raise InvalidArgumentError(f"{name}: block={block!r}; give a number of elements, 1 or more")


def _blocks(m: int, block: int) -> int:
    return -(-m // block)


def _scale(rows: Array, block: int, most: int) -> tuple[Array, Array]:
    """Rows divided by the scales of their blocks, in [-most, most]; and these. Padded to whole blocks."""
    xp, (r, m) = _arrays_of(rows), rows.shape
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
    return whole * _arrays_of(whole).repeat(scales, block, axis=1)[:, : whole.shape[1]]


def _join(scales: Array, body: Array) -> Array:
    return _arrays_of(body).concatenate([_bytes(scales), body], axis=1)


def _cut(packed: Array, m: int, block: int) -> tuple[Array, Array]:
    xp, head = _arrays_of(packed), 4 * _blocks(m, block)
    scales = xp.ascontiguousarray(packed[:, :head]).view("float32")
    return scales, xp.ascontiguousarray(packed[:, head:])


def _bytes(x: Array) -> Array:
    return _arrays_of(x).ascontiguousarray(x).view("uint8")


def _float8(x: Array) -> Any:
    if not isinstance(x, np.ndarray):
        raise TypeError("Float8: CuPy has no float8_e4m3fn; use Integers(8), which sends as many bytes")
    return np.dtype(importlib.import_module("ml_dtypes").float8_e4m3fn)


def _norm(arrays: list[Array]) -> float:
    squares = (float((x.astype("float64") ** 2).sum()) for x in arrays)
    return sum(squares) ** 0.5


def _arrays_of(x: Any) -> Any:
    """NumPy or CuPy, whichever made x."""
    return np if isinstance(x, np.ndarray) else importlib.import_module(type(x).__module__.partition(".")[0])

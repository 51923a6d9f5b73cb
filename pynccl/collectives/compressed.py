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

import contextlib
import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from pynccl.abi.errors import InvalidArgumentError, InvalidUsageError
from pynccl.collectives.failing import Queued, ends_on_failure
from pynccl.streams import gpu_stream, host_stream
from pynccl.threadstate import current

__all__ = ["Codec", "Compressed", "Compressor", "Float8", "Integers", "Report", "TopK"]

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

    ``stream`` is as for the communicator's own calls: on a host stream, formats are computed in the stream's
    thread; on a GPU all of it is queued. Without one a call returns when it is done. Not in a group. What one
    compressor does belongs on one stream. A codec that raises ends the communicator, as an ``op`` of `run`
    does.
    """

    def __init__(self, comm: Any, codec: Codec, *, feedback: bool = True) -> None:
        self.comm, self.codec, self.feedback = comm, codec, feedback
        self._kept: dict[tuple[str, Any], Array] = {}
        self._shapes: dict[tuple[str, Any], tuple[int, ...]] = {}
        self._calls = self._sent = self._plain = 0
        self._last: tuple[Array, Array] | None = None

    def all_reduce(self, x: Array, op: str = "sum", *, key: Any = None, stream: Any = None) -> Array:
        """``x`` becomes the sum ("avg": the mean) over all ranks, with the same bits on every rank."""
        call, n = "all_reduce", self.comm.size
        xp = self._check(call, x, op)
        m = -(-x.size // n)
        self._check_shape(call, key, contributions=(n, m), result=(1, m))
        with self._on(call, x, stream) as (then, place):
            rows, total = xp.zeros((n, m), "float32"), xp.empty((1, m), "float32")
            whole = xp.empty((n, m), "float32")

            def before() -> None:
                rows.reshape(-1)[: x.size] = x.reshape(-1)

            def after() -> None:
                x[...] = whole.reshape(-1)[: x.size].reshape(x.shape)

            then(before)
            self._scatter(call, rows, total, op, key, then, place)
            self._gather(call, total, whole, key, then, place)
            then(after)
        return x

    def reduce_scatter(
        self, x: Array, op: str = "sum", *, out: Array = None, key: Any = None, stream: Any = None
    ) -> Array:
        """Rank r gets block r of the sum (or mean): (n * k, ...) gives (k, ...), in ``out`` or a new array.

        ``out`` is contiguous float32 of as many elements; it may be this rank's block of ``x``.
        """
        call, n = "reduce_scatter", self.comm.size
        xp = self._check(call, x, op)
        if x.ndim < 1 or x.shape[0] % n:
            raise InvalidArgumentError(
                f"reduce_scatter: shape {x.shape} does not divide over {n} ranks; pad axis 0 to a multiple"
            )
        m = x.size // n
        self._check_contiguous(call, x)
        out = self._check_out(call, out, xp, (x.shape[0] // n, *x.shape[1:]))
        self._check_shape(call, key, contributions=(n, m))
        with self._on(call, x, stream) as (then, place):
            self._scatter(call, x.reshape(n, m), out.reshape(1, m), op, key, then, place)
        return out

    def all_gather(self, x: Array, *, out: Array = None, key: Any = None, stream: Any = None) -> Array:
        """``x`` of all ranks in rank order, as compression left it: (k, ...) gives (n * k, ...).

        Every rank gets the same bits, of its own block too. In ``out`` (contiguous float32 of as many
        elements) or a new array.
        """
        call, n = "all_gather", self.comm.size
        xp = self._check(call, x, "sum")
        self._check_contiguous(call, x)
        out = self._check_out(call, out, xp, (n * x.shape[0], *x.shape[1:]) if x.ndim else (n,))
        self._check_shape(call, key, result=(1, x.size))
        with self._on(call, x, stream) as (then, place):
            self._gather(call, x.reshape(1, x.size), out.reshape(n, x.size), key, then, place)
        return out

    def report(self) -> Report:
        """Bytes and errors of this rank so far. Wait for the stream first; on a GPU this waits for it."""
        error = 0.0
        if self._last is not None:
            meant, left = self._last
            size = _norm([meant])
            error = _norm([left]) / size if size else 0.0
        return Report(self._calls, self._sent, self._plain, error, _norm(list(self._kept.values())))

    def reset(self) -> None:
        """Forget what earlier calls left out (after loading a checkpoint, for instance); streams are idle."""
        self._kept.clear()
        self._shapes.clear()

    # --- the two rounds -------------------------------------------------------------------------------------
    # `then(fn)` calls fn now or in the stream's thread; `place` are the arguments that put a call there, too.

    def _scatter(
        self, call: str, rows: Array, total: Array, op: str, key: Any, then: Any, place: dict[str, Any]
    ) -> None:
        """total (1, m) = the sum of everybody's row of this rank."""
        xp, (n, m) = _arrays_of(rows), rows.shape
        packed = xp.zeros((n, self.codec.width(m)), "uint8")
        arrived = packed if n == 1 else xp.empty_like(packed)
        then(lambda: self._encode((f"{call}, contributions", key), rows, packed))
        if n > 1 and packed.size:
            self.comm.all_to_all(packed, arrived, **place)
        self._count((n - 1) * packed.shape[1], (n - 1) * m)

        def finish() -> None:
            self.codec.decode(arrived, m).sum(axis=0, keepdims=True, out=total)
            if op == "avg":
                xp.divide(total, np.float32(n), out=total)

        then(finish)

    def _gather(
        self, call: str, row: Array, whole: Array, key: Any, then: Any, place: dict[str, Any]
    ) -> None:
        """whole (n, m) = everybody's row (1, m), with the same bits everywhere."""
        xp, (n, m) = _arrays_of(whole), whole.shape
        packed = xp.zeros((1, self.codec.width(m)), "uint8")
        arrived = packed if n == 1 else xp.empty((n, packed.shape[1]), "uint8")
        then(lambda: self._encode((f"{call}, result", key), row, packed))
        if n > 1 and packed.size:
            self.comm.all_gather(packed, arrived, **place)
        self._count((n - 1) * packed.shape[1], (n - 1) * m)

        def finish() -> None:
            whole[...] = self.codec.decode(arrived, m)

        then(finish)

    def _encode(self, key: tuple[str, Any], rows: Array, packed: Array) -> None:
        """The rows with what was left out before; what is left out now is kept."""
        xp, kept = _arrays_of(rows), self._kept.get(key)
        meant = rows.copy() if kept is None else rows + kept  # rows may be the caller's memory
        with np.errstate(all="ignore"):
            packed[...] = self.codec.encode(meant)
            left = meant - self.codec.decode(packed, rows.shape[1])
        left = xp.where(xp.isfinite(left), left, np.float32(0))
        if self.feedback:
            self._kept[key] = left
        self._last = (meant, left)

    def _count(self, sent: int, elements: int) -> None:
        self._sent += sent
        self._plain += 4 * elements

    # --- where, and whether ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _on(
        self, call: str, x: Array, stream: Any
    ) -> Iterator[tuple[Callable[[Callable[[], None]], None], dict[str, Any]]]:
        """(then, place) of a call on a stream; on a GPU the stream is CuPy's current one meanwhile."""
        if isinstance(x, np.ndarray):
            queue = host_stream(f"{call} (compressed)", self.comm.library, stream)
            name = f"{call} (compressed)"
            with ends_on_failure(self.comm, name):
                if queue is None:
                    yield _now, {"stream": 0}  # in this thread, whatever stream is current
                else:
                    queued = Queued(self.comm, name, queue)
                    with queued:
                        yield queued, {"stream": queue}
        elif stream is None:
            with ends_on_failure(self.comm, f"{call} (compressed)"):
                yield _now, {}
        else:
            cupy = importlib.import_module("cupy")
            place = cupy.cuda.ExternalStream(gpu_stream(f"{call} (compressed)", stream))
            with place, ends_on_failure(self.comm, f"{call} (compressed)"):
                yield _now, {}

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

    def _check_contiguous(self, call: str, x: Array) -> None:
        if not x.flags.c_contiguous:
            raise InvalidArgumentError(
                f"{call} (compressed): x is not contiguous (shape {x.shape}, strides {x.strides}); pass "
                "np.ascontiguousarray(x)"
            )

    def _check_out(self, call: str, out: Array, xp: Any, shape: tuple[int, ...]) -> Array:
        """``out``, or a new array of that shape."""
        if out is None:
            return xp.empty(shape, "float32")
        elements = math.prod(shape)
        if out.dtype != np.float32 or out.size != elements or not out.flags.c_contiguous:
            raise InvalidArgumentError(
                f"{call} (compressed): out is {out.dtype}, shape {out.shape}; pass a contiguous float32 "
                f"array of {elements} elements"
            )
        return out

    def _check_shape(self, call: str, key: Any, **rounds: tuple[int, int]) -> None:
        """What a key was used for is known from when the call is made, though it may run later."""
        for name, shape in rounds.items():
            known = self._shapes.setdefault((f"{call}, {name}", key), shape)
            if known != shape:
                raise InvalidArgumentError(
                    f"{call} (compressed): key {key!r} was used for {math.prod(known)} elements and now for "
                    f"{math.prod(shape)}; give each array a key of its own"
                )


def _now(fn: Callable[[], None]) -> None:
    fn()


@dataclasses.dataclass(frozen=True)
class Compressed:
    """How to make a `Compressor`, for whoever has the communicators: ``Compressed(Integers(8))(comm)``.

    `sharding.fully_shard` takes it as ``collectives={"reduce_scatter": Compressed(Integers(8))}``, also for
    "all_reduce". All ranks give an equal one.
    """

    codec: Codec
    feedback: bool = True

    def __call__(self, comm: Any) -> Compressor:
        return Compressor(comm, self.codec, feedback=self.feedback)

    def bytes_sent(self, call: str, elements: int, dtype: str, ranks: int) -> int:
        """Bytes that one rank sends for a whole buffer; TypeError or ValueError for what it is not for."""
        if call not in ("reduce_scatter", "all_reduce"):
            raise InvalidArgumentError(
                f"{call} by {self!r}: gathered weights are used as they are, and nothing feeds back what "
                "they lost; send them in a narrower dtype instead"
            )
        if dtype != "float32":
            raise TypeError(f"{call} by {self!r}: compression is of float32, and these are {dtype}")
        rounds = 2 if call == "all_reduce" else 1
        return rounds * (ranks - 1) * self.codec.width(-(-elements // ranks)) if elements else 0

    def bytes_kept(self, call: str, elements: int, ranks: int) -> int:
        """Bytes of memory in which one rank keeps what calls on such a buffer left out."""
        m = -(-elements // ranks)
        return 4 * m * (ranks + (call == "all_reduce")) if self.feedback else 0


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

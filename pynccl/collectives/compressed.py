"""Collectives that send fewer bytes: 8-bit and 4-bit blocks, or the largest elements, with error feedback.

    gradients = Compressor(comm, Integers(bits=8))
    gradients.all_reduce(x, "avg", key="layer 3")
    print(gradients.report())

What a call leaves out is kept and added to what the next call of the same ``key`` sends, so that over many
steps nothing is lost: the error of a sum of calls is that of one. An all_reduce is two rounds, all_to_all and
all_gather, each of compressed rows; the rank that reduces a row compresses the result once, for all, so every
rank ends with the same bits. Owns the feedback; the formats of rows are in `codecs.py`, and how rows travel
is the communicator's.

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
from typing import Any

import numpy as np

from pynccl.abi.errors import InvalidArgumentError, InvalidUsageError
from pynccl.arrays import Buffer, view
from pynccl.collectives import codecs
from pynccl.collectives.codecs import Codec, arrays_of
from pynccl.collectives.failing import Queued, agree, ends_on_failure
from pynccl.streams import gpu_stream, host_stream
from pynccl.threadstate import current

__all__ = ["Compressed", "Compressor", "Report"]

Array = Any


@dataclasses.dataclass(frozen=True)
class Report:
    """What a compressor of this rank has done since it was made."""

    calls: int
    bytes_sent: int
    """To other ranks, counted from the arrays that were given to the library."""
    bytes_uncompressed: int
    """What the best algorithms send of float32 for the same: all_reduce 2(n-1)/n, others (n-1)/n."""
    error: float
    """Norm of what the last call's encodings left out here, relative to the norm of what they were given.

    An all_reduce encodes twice, this rank's contributions and then its part of the result.
    """
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

    ``key`` names the array of a call: what the call leaves out is added to the next one of the same method
    and key, so each array (each gradient of a model, say) has its own, which stays the same from step to
    step. There is no default: two arrays of one shape would mix what was left out of them, and nothing could
    tell. A key that comes with another shape than before is refused. ``feedback=False`` forgets what a call
    left out, and then needs no key. Elements that are not finite are passed on and never kept.

    ``stream`` is as for the communicator's own calls: on a host stream, formats are computed in the stream's
    thread; on a GPU all of it is queued. Without one a call returns when it is done. Not in a group. What one
    compressor does belongs on one stream. TypeError or InvalidArgumentError, before anything is sent, for
    arrays or a key that cannot be used; a codec that raises ends the communicator, as an ``op`` of `run`
    does.
    """

    def __init__(self, comm: Any, codec: Codec, *, feedback: bool = True) -> None:
        _check_codec("Compressor", codec)
        self.comm, self.codec, self.feedback = comm, codec, feedback
        self._kept: dict[tuple[str, Any], Array] = {}
        self._shapes: dict[tuple[str, Any], tuple[int, ...]] = {}
        self._calls = self._sent = self._plain = 0
        self._last: list[tuple[Array, Array]] = []

    def all_reduce(self, x: Array, op: str = "sum", *, key: Any = None, stream: Any = None) -> Array:
        """``x`` becomes the sum ("avg": the mean) over all ranks, with the same bits on every rank."""
        call, n = "all_reduce", self.comm.size
        self._check(call, op)
        self._check_array(call, "x", x, written=True)
        self._begin(call, key, x)
        xp, m = arrays_of(x), -(-x.size // n)
        with self._on(call, x, op, stream) as (then, place):
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
        self._check(call, op)
        self._check_contiguous(call, self._check_array(call, "x", x))
        if x.ndim < 1 or x.shape[0] % n:
            raise InvalidArgumentError(
                f"reduce_scatter: shape {x.shape} does not divide over {n} ranks; pad axis 0 to a multiple"
            )
        m = x.size // n
        out = self._check_out(call, out, x, (x.shape[0] // n, *x.shape[1:]))
        self._begin(call, key, x)
        with self._on(call, x, op, stream) as (then, place):
            self._scatter(call, x.reshape(n, m), out.reshape(1, m), op, key, then, place)
        return out

    def all_gather(self, x: Array, *, out: Array = None, key: Any = None, stream: Any = None) -> Array:
        """``x`` of all ranks in rank order, as compression left it: (k, ...) gives (n * k, ...).

        Every rank gets the same bits, of its own block too. In ``out`` (contiguous float32 of as many
        elements) or a new array.
        """
        call, n = "all_gather", self.comm.size
        self._check(call, "sum")
        self._check_contiguous(call, self._check_array(call, "x", x))
        out = self._check_out(call, out, x, (n * x.shape[0], *x.shape[1:]) if x.ndim else (n,))
        self._begin(call, key, x)
        with self._on(call, x, None, stream) as (then, place):
            self._gather(call, x.reshape(1, x.size), out.reshape(n, x.size), key, then, place)
        return out

    def report(self) -> Report:
        """Bytes and errors of this rank so far. Wait for the stream first; on a GPU this waits for it."""
        size = _norm([meant for meant, _ in self._last])
        error = _norm([left for _, left in self._last]) / size if size else 0.0
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
        xp, (n, m) = arrays_of(rows), rows.shape
        packed = xp.zeros((n, self.codec.width(m)), "uint8")
        arrived = packed if n == 1 else xp.empty_like(packed)
        then(lambda: self._encode((f"{call}, contributions", key), rows, packed))
        if n > 1 and packed.size:
            self.comm.all_to_all(packed, arrived, **place)
            self._await(then)
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
        xp, (n, m) = arrays_of(whole), whole.shape
        packed = xp.zeros((1, self.codec.width(m)), "uint8")
        arrived = packed if n == 1 else xp.empty((n, packed.shape[1]), "uint8")
        then(lambda: self._encode((f"{call}, result", key), row, packed))
        if n > 1 and packed.size:
            self.comm.all_gather(packed, arrived, **place)
            self._await(then)
        self._count((n - 1) * packed.shape[1], (n - 1) * m)

        def finish() -> None:
            whole[...] = self.codec.decode(arrived, m)

        then(finish)

    def _await(self, then: Any) -> None:
        """A non-blocking communicator may not even have begun, and what reads the result is to follow."""
        if then is _now and not self.comm._blocking:
            self.comm.wait()

    def _encode(self, key: tuple[str, Any], rows: Array, packed: Array) -> None:
        """The rows with what was left out before; what is left out now is kept."""
        xp, kept = arrays_of(rows), self._kept.get(key)
        meant = rows.copy() if kept is None else rows + kept  # rows may be the caller's memory
        with np.errstate(all="ignore"):
            packed[...] = self.codec.encode(meant)
            left = meant - self.codec.decode(packed, rows.shape[1])
        left = xp.where(xp.isfinite(left), left, np.float32(0))
        if self.feedback:
            self._kept[key] = left
        second = key[0] == "all_reduce, result"  # of one call: what its first encoding left out counts, too
        self._last = [*self._last, (meant, left)] if second else [(meant, left)]

    def _count(self, sent: int, elements: int) -> None:
        self._sent += sent
        self._plain += 4 * elements

    # --- where, and whether ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _on(
        self, call: str, x: Array, op: str | None, stream: Any
    ) -> Iterator[tuple[Callable[[Callable[[], None]], None], dict[str, Any]]]:
        """(then, place) of a call on a stream; on a GPU the stream is CuPy's current one meanwhile."""
        if isinstance(x, np.ndarray):
            queue = host_stream(f"{call} (compressed)", self.comm.library, stream)
            name = f"{call} (compressed)"
            queued = None if queue is None else Queued(self.comm, name, queue)
            with queued or contextlib.nullcontext():
                agree(self.comm, name, queue, x.size, op, _format_of(self.codec))
            with ends_on_failure(self.comm, name), queued or contextlib.nullcontext():
                # In this thread, whatever stream is current, or on the stream.
                yield queued or _now, {"stream": queue or 0}
        elif stream is None:
            with ends_on_failure(self.comm, f"{call} (compressed)"):
                yield _now, {}
        else:
            cupy = importlib.import_module("cupy")
            place = cupy.cuda.ExternalStream(gpu_stream(f"{call} (compressed)", stream))
            with place, ends_on_failure(self.comm, f"{call} (compressed)"):
                yield _now, {}

    def _check(self, call: str, op: str) -> None:
        self.comm._check_open(f"{call} (compressed)")
        if current.group is not None:
            raise InvalidUsageError(
                f"{call} (compressed): it uses what its messages bring, and in a group they come at the end; "
                "call it outside of pynccl.group()"
            )
        if op not in ("sum", "avg"):
            raise InvalidArgumentError(f"{call} (compressed): op={op!r}; there are 'sum' and 'avg'")

    def _check_array(self, call: str, role: str, x: Array, *, written: bool = False) -> Buffer:
        """An error unless it is float32, of NumPy or CuPy, where the communicator takes arrays."""
        call = f"{call} (compressed)"
        buffer = view(call, role, x)
        if buffer.home.name not in ("NumPy", "CuPy") or buffer.keep is not x:
            raise TypeError(
                f"{call}: {role} is {type(x).__name__}, and what compresses it are NumPy and CuPy; pass "
                f"np.asarray({role}), or cupy.asarray of one on a GPU"
            )
        if buffer.element.name != "float32":
            raise TypeError(f"{call}: {role} is {buffer.element.name}; pass a float32 array")
        if (buffer.device is not None) != self.comm.on_gpu:
            place, other = ("a GPU", "host memory") if buffer.device is not None else ("host memory", "GPUs")
            raise InvalidArgumentError(
                f"{call}: {role} ({buffer}) is in {place} and this communicator is for {other}; copy it there"
            )
        if written and buffer.read_only:
            raise InvalidArgumentError(
                f"{call}: {role} ({buffer}) is written to and cannot be ({buffer.read_only}); pass a copy"
            )
        return buffer

    def _check_contiguous(self, call: str, buffer: Buffer) -> None:
        if not buffer.c_order:
            raise InvalidArgumentError(
                f"{call} (compressed): x is not contiguous ({buffer}, strides {buffer.array.strides}); pass "
                "np.ascontiguousarray(x)"
            )

    def _check_out(self, call: str, out: Array, x: Array, shape: tuple[int, ...]) -> Array:
        """``out``, or a new array of that shape."""
        if out is None:
            return arrays_of(x).empty(shape, "float32")
        buffer, elements = self._check_array(call, "out", out, written=True), math.prod(shape)
        if out.size != elements or not buffer.c_order:
            raise InvalidArgumentError(
                f"{call} (compressed): out is {buffer}, strides {out.strides}; pass a contiguous float32 "
                f"array of {elements} elements"
            )
        return out

    def _begin(self, call: str, key: Any, x: Array) -> None:
        """All else is checked. What a key is used for is known from now on, though the call may run later."""
        if self.feedback:
            if key is None:
                raise TypeError(
                    f"{call} (compressed): key= is missing: it names the array, so that what this call "
                    "leaves out is added to that array's next call and no other's. Pass one for each array, "
                    "such as key='layer 3', or make the Compressor with feedback=False"
                )
            try:
                known = self._shapes.setdefault((call, key), x.shape)
            except TypeError as error:
                raise TypeError(
                    f"{call} (compressed): key={key!r} cannot be looked up ({error}); pass a string, a "
                    "number or a tuple of them"
                ) from None
            if known != x.shape:
                raise InvalidArgumentError(
                    f"{call} (compressed): key {key!r} was used for an array of shape {known} and now for "
                    f"{x.shape}; give each array a key of its own"
                )
        self._calls += 1


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

    def __post_init__(self) -> None:
        _check_codec("Compressed", self.codec)

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


def _check_codec(what: str, codec: Any) -> None:
    parts = ("width", "encode", "decode")
    if isinstance(codec, type) or not all(callable(getattr(codec, part, None)) for part in parts):
        raise TypeError(
            f"{what}: codec={codec!r} is no codec; pass Integers(bits=8), Float8(), TopK(1 / 32), or an "
            f"object with {', '.join(parts)} as in pynccl.collectives.codecs.Codec"
        )


def _format_of(codec: Any) -> tuple[Any, ...]:
    """What the bytes of two codecs must have in common: a class of `codecs` that they are, and its fields."""
    kind = next((of for of in type(codec).__mro__ if of.__module__ == codecs.__name__), type(codec))
    fields = dataclasses.fields(codec) if dataclasses.is_dataclass(codec) else ()
    return (kind.__qualname__, *(getattr(codec, field.name) for field in fields))


def _norm(arrays: list[Array]) -> float:
    squares = (float((x.astype("float64") ** 2).sum()) for x in arrays)
    return sum(squares) ** 0.5

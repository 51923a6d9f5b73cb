"""Reductions that NCCL lacks: any ufunc, kernel or function of two arrays, Adasum, moments, arg max and min.

    all_reduce(comm, x, np.logaddexp)
    all_reduce(comm, gradients, ADASUM)
    number, mean, variance = moments(comm, x)

An operation says what it asks of a schedule (`Operation`), and the schedule's proof says whether it gives
that: contributions in rank order, for an operation that does not commute; whole arrays, for one that looks at
more than an element at a time. What the named ones take is a table, `TAKES`, and anything else is refused
before a message is sent. Everything runs by `execute.run`. The NumPy paths are tested; the CuPy ones use only
what both libraries have, and have not been run.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any, NamedTuple

import numpy as np

from pynccl.abi.errors import InvalidArgumentError
from pynccl.arrays import view
from pynccl.collectives.execute import run
from pynccl.collectives.registry import ALGORITHMS, algorithms, generate
from pynccl.collectives.schedule import Schedule
from pynccl.collectives.verify import Proof, verify

__all__ = [
    "ADASUM",
    "MOMENTS",
    "TAKES",
    "Moments",
    "Operation",
    "adasum",
    "all_reduce",
    "arg_max",
    "arg_min",
    "merge_moments",
    "moments",
    "operation_of",
    "reduce_scatter",
]

# Up to here the logarithmic number of rounds counts more than the bytes; `tune` measures where it is really.
_SMALL = 32 << 10

_INTEGERS = frozenset("bool int8 uint8 int16 uint16 int32 uint32 int64".split())  # that fit int64
_FLOATS = frozenset("float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2".split())

TAKES: dict[str, tuple[frozenset[str], str]] = {
    "adasum": (
        _FLOATS,
        "cast integers to float32, and view complex numbers as the floats they consist of "
        "(x.view('float32') of complex64)",
    ),
    "moments": (
        _INTEGERS | _FLOATS | {"uint64"},
        "of complex numbers take those of x.real and of x.imag, and cast anything else to float64",
    ),
    "merge_moments": (frozenset({"float64"}), "`moments` makes such states from data"),
    "arg_max": (_INTEGERS | _FLOATS, "cast x to float64 or int64; complex numbers have no order"),
    "arg_min": (_INTEGERS | _FLOATS, "cast x to float64 or int64; complex numbers have no order"),
    "better_pairs": (frozenset({"int64"}), "`arg_max` and `arg_min` make such pairs from data"),
}
"""The dtypes that each named operation takes, in native byte order, and what to do with others."""


@dataclasses.dataclass(frozen=True, repr=False)
class Operation:
    """A reduction and what it asks of a schedule.

    ``function`` takes two arrays and returns their reduction, of the same shape and dtype (or is a ufunc, or
    a CuPy elementwise kernel). ``commutative=False``: a op b is not b op a, so contributions are needed in
    rank order. ``whole=True``: it looks at all of an array, which must not be cut into chunks. ``dtypes``:
    the names of those that it takes, None: what the function can do. ``rows``: an array holds that many rows
    of equal length, one behind the other.
    """

    function: Any
    commutative: bool = True
    whole: bool = False
    dtypes: frozenset[str] | None = None
    rows: int = 1

    @property
    def name(self) -> str:
        """What messages call it."""
        return str(getattr(self.function, "__name__", self.function))

    def __call__(self, a: Any, b: Any) -> Any:
        return self.function(a, b)

    def __repr__(self) -> str:
        return f"<Operation {self.name}>"

    def check_array(self, call: str, dtype: str, elements: int) -> None:
        """InvalidArgumentError unless it can reduce so many elements of a dtype; asked as the next one is."""
        if self.dtypes is not None and dtype not in self.dtypes:
            raise InvalidArgumentError(
                f"{call}: x is {dtype} and {self.name} takes {', '.join(sorted(self.dtypes))}; "
                f"{_remedy(self.name)}"
            )
        if elements % self.rows:
            raise InvalidArgumentError(
                f"{call}: {elements} elements are not {self.rows} rows of equal length, as {self.name} "
                f"takes; {_remedy(self.name)}"
            )

    def check_schedule(self, schedule: Schedule, *, unchecked: bool = False) -> None:
        """InvalidArgumentError unless ``schedule`` gives what this asks for; whoever runs one calls this.

        ``unchecked``: the schedule is not to be proved, so nothing can be said of the order.
        """
        _check_whole(self, schedule)
        if not unchecked:
            _check_order(self, schedule)


def all_reduce(
    comm: Any,
    x: Any,
    op: Any,
    out: Any = None,
    *,
    algorithm: str | Schedule | None = None,
    stream: Any = None,
) -> Any:
    """Combine ``x`` of all ranks by ``op``, as ``comm.all_reduce`` does; every rank gets the same bits.

    ``op`` is an `Operation`, or a ufunc, kernel or function, which stands for an `Operation` that commutes
    and goes element by element. ``algorithm`` is a name ("ring") or a schedule; None takes one that fits.
    InvalidArgumentError, before anything is sent, for an algorithm whose proof does not give what ``op``
    asks for, and for a dtype that it does not take.

    >>> all_reduce(comm, x, np.logaddexp)                      # doctest: +SKIP
    """
    return _reduce("all_reduce", comm, x, op, out, algorithm, stream)


def reduce_scatter(
    comm: Any,
    x: Any,
    op: Any,
    out: Any = None,
    *,
    algorithm: str | Schedule | None = None,
    stream: Any = None,
) -> Any:
    """Combine ``x`` of all ranks by ``op``; rank r gets block r, as from ``comm.reduce_scatter``.

    ``op`` and ``algorithm`` are as in `all_reduce`; an ``op`` that needs whole arrays cannot be used.
    """
    return _reduce("reduce_scatter", comm, x, op, out, algorithm, stream)


def operation_of(op: Any) -> Any:
    """The `Operation` of a function of this file, which asks more than a function says; others as given."""
    return next((operation for operation in (ADASUM, MOMENTS) if operation.function is op), op)


def _reduce(call: str, comm: Any, x: Any, op: Any, out: Any, algorithm: Any, stream: Any) -> Any:
    op = operation_of(op)
    operation = op if isinstance(op, Operation) else Operation(op)
    if isinstance(op, str) or not callable(operation.function):
        raise TypeError(
            f"{call}: op={op!r} is no function of two arrays; for the library's own reductions call "
            f"comm.{call}"
        )
    if algorithm is None:
        algorithm = _fitting(call, operation, getattr(x, "nbytes", 0))
    return run(_schedule(call, algorithm, comm.size), comm, x, out, operation, stream=stream)


def _fitting(call: str, op: Operation, nbytes: int) -> str:
    if call == "reduce_scatter":
        return "ring" if op.commutative else "direct"
    if op.whole or nbytes <= _SMALL:
        return "recursive_doubling"  # in one piece, and in rank order
    return "ring" if op.commutative else "direct"


def _schedule(call: str, algorithm: Any, n: int) -> Schedule:
    if isinstance(algorithm, str):
        try:
            return _named(call, algorithm.removeprefix("pynccl:"), n)
        except ValueError as error:
            raise InvalidArgumentError(f"{call}: algorithm={algorithm!r}: {error}") from error
    if not isinstance(algorithm, Schedule):
        raise TypeError(
            f"{call}: algorithm must be a name such as 'ring' or a schedule, not {type(algorithm).__name__}"
        )
    if algorithm.collective != call:
        raise InvalidArgumentError(
            f"{call}: schedule {algorithm.name!r} is one of {algorithm.collective}; generate it with "
            f"collective={call!r}"
        )
    return algorithm


def _named(call: str, name: str, n: int) -> Schedule:
    row = ALGORITHMS.get((call, name))
    return _generated(call, name, n, row and row.generator)


@functools.lru_cache(maxsize=64)
def _generated(call: str, name: str, n: int, generator: Any) -> Schedule:
    return generate(name, n, collective=call)  # by `generator`, which a notebook may define again


def _prove(schedule: Schedule) -> Proof:
    kept = vars(schedule)
    if "_proof" not in kept:
        kept["_proof"] = verify(schedule)
        kept["_proved"] = True  # for `execute.check_proof`
    return kept["_proof"]


def _check_whole(op: Operation, schedule: Schedule) -> None:
    call = schedule.collective
    scatters = call == "reduce_scatter" and schedule.n > 1
    if op.whole and (scatters or schedule.parts != 1):
        cut = "blocks" if scatters else f"{schedule.parts} chunks"
        raise InvalidArgumentError(
            f"{call}: {op.name} looks at whole arrays and {schedule.name!r} cuts them into {cut}; use "
            "all_reduce with algorithm='recursive_doubling' or 'one_shot'"
        )


def _check_order(op: Operation, schedule: Schedule) -> None:
    if op.commutative or _prove(schedule).rank_order:
        return
    call, n = schedule.collective, schedule.n
    fit = [name for name in algorithms(call) if _prove(_named(call, name, n)).rank_order]
    raise InvalidArgumentError(
        f"{call}: {op.name} does not commute, and {schedule.name!r} of {n} ranks does not reduce in rank "
        f"order; use one that does: {', '.join(fit)}"
    )


# --- Adasum -------------------------------------------------------------------------------------------------


def adasum(a: Any, b: Any) -> Any:
    """Two gradients added as far as they say different things: orthogonal ones whole, equal ones averaged.

    a (1 - a.b / 2|a|^2) + b (1 - a.b / 2|b|^2), with products in float64, of floats of one dtype (`TAKES`).
    Swapping a and b changes no bit. Source: S. Maleki et al., "Scaling distributed training with adaptive
    summation", MLSys 2021, arXiv:2006.02924.
    """
    xp = _module("adasum", "a", a)
    if _module("adasum", "b", b) is not xp or (a.shape, a.dtype) != (b.shape, b.dtype):
        raise InvalidArgumentError(
            f"adasum: a is {a.dtype}, shape {a.shape}, and b {b.dtype}, shape {b.shape}; pass two alike"
        )
    wide_a, wide_b = a.astype("float64").ravel(), b.astype("float64").ravel()
    product, square_a, square_b = (wide_a * wide_b).sum(), (wide_a * wide_a).sum(), (wide_b * wide_b).sum()
    # Nothing to share with nothing: where one is zero so is the product.
    share_a = 1 - product / xp.where(square_a > 0, 2 * square_a, 1.0)
    share_b = 1 - product / xp.where(square_b > 0, 2 * square_b, 1.0)
    return (share_a * wide_a + share_b * wide_b).reshape(a.shape).astype(a.dtype)


ADASUM = Operation(adasum, whole=True, dtypes=TAKES["adasum"][0])
"""`adasum` for `all_reduce`, along the pairs of a butterfly. One array is one vector: a call a layer."""


# --- moments ------------------------------------------------------------------------------------------------


class Moments(NamedTuple):
    """How many samples there were, their mean, and their variance (divided by their number)."""

    samples: int
    mean: Any
    variance: Any


def moments(comm: Any, x: Any) -> Moments:
    """Mean and variance over the samples of all ranks, axis 0 of ``x`` (k, ...); k may differ, and be 0.

    Each rank's are computed alone, in float64, and merged, so no difference of large sums loses digits as in
    E[x^2] - E[x]^2. ``x`` holds booleans, integers or floats (`TAKES`). With no sample at all both are NaN.
    """
    xp = _module("moments", "x", x)
    if x.ndim < 1:
        raise InvalidArgumentError("moments: x has no axis of samples; pass an array of shape (k, ...)")
    k, shape = x.shape[0], x.shape[1:]
    wide = x.astype("float64")
    state = xp.zeros((3, *shape), "float64")
    if k:
        state[0], state[1] = k, wide.mean(axis=0)
        state[2] = ((wide - state[1]) ** 2).sum(axis=0)
    flat = state.reshape(-1)
    if flat.size:
        all_reduce(comm, flat, MOMENTS)
        count = int(flat[0])
    else:
        count = int(comm.all_reduce(xp.full(1, k, "int64"))[0])
    nothing = xp.full(shape, xp.nan)
    return Moments(count, state[1] if count else nothing, state[2] / count if count else nothing)


def merge_moments(a: Any, b: Any) -> Any:
    """Two states (counts, means, sums of squared differences), flat one behind the other, as one.

    Source: T. Chan, G. Golub and R. LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979, which is B. Welford's update for two sets.
    """
    xp, k = _module("merge_moments", "a", a), a.size // 3
    out = a.copy()
    (count_a, mean_a, square_a), (count_b, mean_b, square_b) = (
        (s[:k], s[k : 2 * k], s[2 * k : 3 * k]) for s in (a, b)
    )
    count = count_a + count_b
    some = xp.where(count > 0, count, 1.0)
    difference = mean_b - mean_a
    out[:k] = count
    # Written so that swapping a and b changes no bit.
    out[k : 2 * k] = (count_a * mean_a + count_b * mean_b) / some
    out[2 * k : 3 * k] = (square_a + square_b) + difference * difference * (count_a * count_b / some)
    return out


MOMENTS = Operation(merge_moments, whole=True, dtypes=TAKES["merge_moments"][0], rows=3)
"""`merge_moments` for `all_reduce`, on flat float64 arrays."""


# --- arg max and arg min ------------------------------------------------------------------------------------


def arg_max(comm: Any, x: Any, index: Any = None) -> tuple[Any, Any]:
    """The largest value of each element over all ranks, and where it is: its rank, or its ``index``.

    ``x`` holds booleans, integers or floats (`TAKES`: not uint64); ``index`` (of x's shape) integers that fit
    int64. Returns (values, int64 indices), of x's shape. Of equal values the one with the lowest index wins;
    NaN loses to any number.
    """
    return _extreme("arg_max", comm, x, index, sign=1)


def arg_min(comm: Any, x: Any, index: Any = None) -> tuple[Any, Any]:
    """As `arg_max`, the smallest."""
    return _extreme("arg_min", comm, x, index, sign=-1)


def _extreme(call: str, comm: Any, x: Any, index: Any, *, sign: int) -> tuple[Any, Any]:
    xp = _module(call, "x", x)
    if index is not None:
        places = view(call, "index", index)
        whole = places.element.name in _INTEGERS - {"bool"}
        if not whole or places.shape != x.shape or places.keep is not index or _home(index) is not xp:
            raise InvalidArgumentError(
                f"{call}: index is {type(index).__name__} ({places}); pass integers (not uint64) of x's "
                f"shape {x.shape}, in an array of {xp.__name__}"
            )
    wide = "int64" if x.dtype.name in _INTEGERS else "float64"
    pairs = xp.empty((2, x.size), "int64")
    pairs[0] = xp.ascontiguousarray(x).reshape(-1).astype(wide).view("int64")
    pairs[1] = comm.rank if index is None else index.reshape(-1)
    all_reduce(comm, pairs.reshape(-1), _PAIRS[wide, sign])
    return pairs[0].view(wide).astype(x.dtype).reshape(x.shape), pairs[1].reshape(x.shape)


def _better(wide: str, sign: int) -> Operation:
    def better_pairs(a: Any, b: Any) -> Any:
        xp, k = _module("better_pairs", "a", a), a.size // 2
        value_a, value_b = a[:k].view(wide), b[:k].view(wide)
        at_a, at_b = a[k : 2 * k], b[k : 2 * k]
        nan_a, nan_b = value_a != value_a, value_b != value_b
        more = value_a > value_b if sign > 0 else value_a < value_b
        tie = (value_a == value_b) | (nan_a & nan_b)
        first = more | (nan_b & ~nan_a) | (tie & (at_a < at_b))
        out = b.copy()
        for part in (slice(0, k), slice(k, 2 * k)):
            out[part] = xp.where(first, a[part], b[part])
        return out

    return Operation(better_pairs, whole=True, dtypes=TAKES["better_pairs"][0], rows=2)


_PAIRS = {(wide, sign): _better(wide, sign) for wide in ("int64", "float64") for sign in (1, -1)}


def _module(call: str, role: str, x: Any) -> Any:
    """NumPy or CuPy, whichever made x; an error that says what ``call`` takes for anything else."""
    buffer, (dtypes, remedy) = view(call, role, x), TAKES[call]
    if buffer.home.name not in ("NumPy", "CuPy") or buffer.keep is not x:
        raise TypeError(
            f"{call}: {role} is {type(x).__name__}, and what computes with it are NumPy and CuPy; pass "
            f"np.asarray({role}), or cupy.asarray of one on a GPU"
        )
    if buffer.element.name not in dtypes:
        raise InvalidArgumentError(
            f"{call}: {role} is {buffer.element.name}; it takes {', '.join(sorted(dtypes))}; {remedy}"
        )
    return _home(x)


def _home(x: Any) -> Any:
    return np if isinstance(x, np.ndarray) else importlib.import_module(type(x).__module__.partition(".")[0])


def _remedy(name: str) -> str:
    return TAKES[name][1] if name in TAKES else "cast x"

"""What one array element means to NCCL: the data type it moves as, and the reductions that are right for it.

NCCL knows twelve types. Array libraries know more, and two of them (bool, complex) still have reductions that
NCCL's types express exactly: "max" of booleans as bytes is logical or, a sum of complex numbers is a sum of
twice as many floats. This table says so for every type, by the name that NumPy, CuPy, ml_dtypes and PyTorch
share. A type that is not in it can be moved (as its bytes) and never reduced. Nothing here knows an array
library or a communicator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from .abi.errors import InvalidArgumentError
from .abi.types import DataType, RedOp


class ReduceOp(str, Enum):
    """The five reductions of NCCL. Each equals its name: ``op="sum"`` is ``op=ReduceOp.SUM``.

    >>> ReduceOp.SUM == "sum"
    True
    """

    SUM = "sum"
    PROD = "prod"
    MAX = "max"
    MIN = "min"
    AVG = "avg"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class ElementType:
    """One row of the table: how an element named ``name`` of ``itemsize`` bytes moves, and how it reduces."""

    name: str
    itemsize: int
    moves_as: DataType
    move_lanes: int
    """Library elements per array element when data is only moved (bytes for a type NCCL lacks)."""
    reduces_as: DataType | None
    reduce_lanes: int
    reductions: Mapping[str, RedOp]
    remedy: str
    """What to do instead, when a reduction is not in ``reductions``."""


_EVERY = {op.value: RedOp[op.name] for op in ReduceOp}
# What NumPy, PyTorch and MPI call them.
_OTHER_NAMES = {
    **dict.fromkeys(("mean", "average"), "avg"),
    **dict.fromkeys(("product", "mul", "multiply"), "prod"),
    **dict.fromkeys(("maximum", "amax", "or", "any", "lor"), "max"),
    **dict.fromkeys(("minimum", "amin", "and", "all", "land"), "min"),
    **dict.fromkeys(("add", "+"), "sum"),
    **{name: name for name in _EVERY},  # in capitals
}
_BY_A_SCHEDULE = "or reduce by a function and a schedule, such as op=np.add, algorithm='pynccl:ring'"
_NO_16_BIT = (
    "NCCL has no 16-bit integers; reduce x.astype('int32') (moving them, as in all_gather, is fine), "
    + _BY_A_SCHEDULE
)
_BOOLEANS = "use op='max' (any) or op='min' (all), or x.astype('int32') to count"
_COMPLEX = (
    "complex numbers reduce by 'sum' and 'avg' only; for a product pass op=np.multiply and "
    "algorithm='pynccl:ring'"
)

# name, bytes, NCCL's type, library elements per element, reductions, remedy
_ROWS: tuple[tuple[str, int, DataType | None, int, Mapping[str, RedOp], str], ...] = (
    ("int8", 1, DataType.INT8, 1, _EVERY, ""),
    ("uint8", 1, DataType.UINT8, 1, _EVERY, ""),
    ("int16", 2, None, 1, {}, _NO_16_BIT),
    ("uint16", 2, None, 1, {}, _NO_16_BIT),
    ("int32", 4, DataType.INT32, 1, _EVERY, ""),
    ("uint32", 4, DataType.UINT32, 1, _EVERY, ""),
    ("int64", 8, DataType.INT64, 1, _EVERY, ""),
    ("uint64", 8, DataType.UINT64, 1, _EVERY, ""),
    ("float16", 2, DataType.FLOAT16, 1, _EVERY, ""),
    ("float32", 4, DataType.FLOAT32, 1, _EVERY, ""),
    ("float64", 8, DataType.FLOAT64, 1, _EVERY, ""),
    ("bfloat16", 2, DataType.BFLOAT16, 1, _EVERY, ""),
    ("float8_e4m3fn", 1, DataType.FLOAT8E4M3, 1, _EVERY, ""),
    ("float8_e5m2", 1, DataType.FLOAT8E5M2, 1, _EVERY, ""),
    # A boolean is a byte holding 0 or 1: or is the largest, and (and the product) the smallest.
    ("bool", 1, DataType.UINT8, 1, {"max": RedOp.MAX, "min": RedOp.MIN, "prod": RedOp.MIN}, _BOOLEANS),
    # A complex number is two floats; sums and averages act on each part alone.
    ("complex64", 8, DataType.FLOAT32, 2, {"sum": RedOp.SUM, "avg": RedOp.AVG}, _COMPLEX),
    ("complex128", 16, DataType.FLOAT64, 2, {"sum": RedOp.SUM, "avg": RedOp.AVG}, _COMPLEX),
)

ELEMENTS: dict[str, ElementType] = {
    name: ElementType(
        name=name,
        itemsize=size,
        moves_as=DataType.UINT8 if code is None else code,
        move_lanes=size if code is None else lanes,
        reduces_as=code,
        reduce_lanes=lanes,
        reductions=reductions,
        remedy=remedy,
    )
    for name, size, code, lanes, reductions, remedy in _ROWS
}

FP8 = frozenset({DataType.FLOAT8E4M3, DataType.FLOAT8E5M2})


def as_bytes(name: str, itemsize: int) -> ElementType:
    """The row for a type NCCL does not have: moved as ``itemsize`` bytes, never reduced."""
    return ElementType(
        name=name,
        itemsize=itemsize,
        moves_as=DataType.UINT8,
        move_lanes=itemsize,
        reduces_as=None,
        reduce_lanes=1,
        reductions={},
        remedy=f"NCCL cannot reduce it; convert to a type it has, x.astype('float32'), {_BY_A_SCHEDULE}",
    )


def operation_name(call: str, op: object) -> str:
    """``op`` (a name, a ReduceOp, or the ABI's RedOp) as one of the five names; anything else is an error.

    A function is an error too: the executors of schedules, which can call it, do not ask here.
    """
    if isinstance(op, RedOp):
        op = op.name.lower()
    if isinstance(op, str):
        if op in _EVERY:
            return str(op)
        meant = _OTHER_NAMES.get(op.lower())
        instead = repr(meant) if meant else f"one of {', '.join(_EVERY)}"
        raise InvalidArgumentError(f"{call}: op={str(op)!r} is not a reduction; use {instead}")
    if callable(op):
        name = str(getattr(op, "__name__", None) or getattr(op, "name", op))
        meant = _OTHER_NAMES.get(name.lower())
        raise TypeError(
            f"{call}: op={name} is a function, which no library calls by itself: give algorithm= too, a "
            "schedule or 'pynccl:ring' and the like; pynccl.collectives.all_reduce and reduce_scatter take "
            f"one that fits{f'; or use op={meant!r}' if meant else ''}"
        )
    raise TypeError(
        f"{call}: op must be a name such as 'sum', a pynccl.ReduceOp or comm.premul_sum(...), not "
        f"{type(op).__name__}"
    )


def reduction(call: str, element: ElementType, op: str) -> RedOp:
    """The ABI's operation for reducing ``element`` by ``op``, or an error that says what to do instead."""
    found = element.reductions.get(op)
    if found is None:
        raise InvalidArgumentError(f"{call}: op={op!r} is not possible for {element.name}; {element.remedy}")
    return found

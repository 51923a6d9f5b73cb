"""The quick path of calls on NumPy arrays: the host library looks at the arrays itself.

In Python it takes a microsecond to ask an array for its address, length and dtype, and a ctypes call takes
half a one; a small all-reduce in shared memory takes a fifth. So a communicator of the host library keeps a
record of each kind of call, which says where in an array object the address, the lengths and the dtype are.
Of a record the library makes a function of Python's own, which takes the arrays as objects. What is not of
the plainest kind is *not taken*, and goes the general way (`operations.plan`).

How an array object lies in memory is NumPy's C interface (``PyArrayObject_fields``), and older than Python 3.
It is checked on real arrays nevertheless before it is used; if it does not hold, nothing is ever taken.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .abi.types import pyncclArrayCall_t, pyncclCall_t, pyncclElement_t, pyncclLayout_t, pyncclPython_t
from .elements import ELEMENTS, ElementType, ReduceOp
from .operations import OPERATIONS, Operation

if TYPE_CHECKING:
    from .abi.library import Library

__all__ = [
    "CLOSED",
    "KINDS",
    "NOT_TAKEN",
    "Records",
    "Take",
    "function_of_record",
    "new_result",
    "not_taken",
    "record_of",
]

NOT_TAKEN = -1
KINDS = {
    name: number
    for number, name in enumerate(
        "all_reduce reduce reduce_scatter broadcast all_gather gather scatter all_to_all send recv".split()
    )
}
"""The numbers that a record has for the calls."""

Take = Callable[..., int]
"""``take(x, out)`` makes a call; it returns the library's result code, or NOT_TAKEN with nothing done.
``take(x, out, None)`` does nothing: it returns 0 if it would take them, or NOT_TAKEN."""

_C_CONTIGUOUS, _WRITEABLE = 0x1, 0x400  # NumPy's flags


def not_taken(*arrays: Any) -> int:
    """What stands for a collective's function where the quick path is closed."""
    return NOT_TAKEN


CLOSED: dict[str, Any] = {
    what.name: {} if what.rooted or what.reduces else not_taken for what in OPERATIONS.values()
} | {"send": {}, "recv": {}}
"""By call: what stands for `Records.by_name` where the quick path is closed."""


class Records:
    """A communicator's quick calls. ``by_name`` has them by name, and then by what a method has at hand: by
    operation, by root or peer, or by root and then operation, where there are any; each is a `Take`.

    ``wrap``, with a collective's name and its call, makes what is kept for it.
    """

    def __init__(
        self,
        library: Library,
        comm: int,
        rank: int,
        size: int,
        wrap: Callable[[str, Take], Take],
    ) -> None:
        self._library, self._comm, self._rank, self._size, self._wrap = library, comm, rank, size, wrap
        self._kept: list[Any] = []  # records are passed by address
        self._elements: dict[str | None, Any] = {}
        layout = array_layout()
        self.by_name = CLOSED
        if layout is not None:
            self._layout = ctypes.pointer(layout)
            self.by_name = {what.name: self._of(what) for what in OPERATIONS.values()}
            for name in ("send", "recv"):
                self.by_name[name] = _ByRoot(size, partial(self._function, name, None))

    def close(self) -> None:
        """Let go of all calls."""
        self.by_name = CLOSED

    def _of(self, what: Operation) -> Any:
        if what.rooted:
            return _ByRoot(self._size, partial(self._at, what))
        return self._at(what, 0)

    def _at(self, what: Operation, root: int) -> Any:
        if not what.reduces:
            return self._take(what, root, None)
        return {op.value: self._take(what, root, op.value) for op in ReduceOp}  # which ReduceOp equals

    def _take(self, what: Operation, root: int, op: str | None) -> Take:
        return self._wrap(what.name, self._function(what.name, op, root))

    def _function(self, name: str, op: str | None, root: int) -> Take:
        if op not in self._elements:
            self._elements[op] = elements(op)
        table = self._elements[op]
        record = pyncclArrayCall_t(
            size=ctypes.sizeof(pyncclArrayCall_t),
            layout=self._layout,
            elements=table,
            nelements=len(table),
            kind=KINDS[name],
            root=root,
            rank=self._rank,
            nranks=self._size,
            comm=self._comm,
        )
        self._kept.append(record)
        return _function(self._library.pyncclFunctionOfArrays, record)


class _ByRoot(dict[int, Any]):
    """Made when a root is first asked for; KeyError for what is no rank."""

    def __init__(self, size: int, make: Callable[[int], Any]) -> None:
        self._size, self._make = size, make

    def __missing__(self, root: int) -> Any:
        if type(root) is not int or not 0 <= root < self._size:
            raise KeyError(root)
        self[root] = made = self._make(root)
        return made


def new_result(what: Operation, x: Any, size: int) -> np.ndarray | None:
    """What a call without ``out`` returns, to be filled; None where the general path has to see to it."""
    if type(x) is not np.ndarray:
        return None
    shape = x.shape
    if what.x_blocks != what.out_blocks:
        if what.out_blocks:
            shape = (size * shape[0], *shape[1:]) if shape else (size,)
        elif not shape or shape[0] % size:
            return None
        else:
            shape = (shape[0] // size, *shape[1:])
    try:
        return np.empty(shape, x.dtype)
    except (MemoryError, ValueError):  # something else may be wrong as well, and is said first
        return None


def function_of_record(library: Library, record: pyncclCall_t) -> Callable[[], int]:
    """What makes the call of the record, which must live as long, and returns the library's result code."""
    return _function(library.pyncclFunctionOfCall, record)


def _function(maker: Any, record: ctypes.Structure) -> Any:
    """The function that the library makes of a record: called as one of Python's own, not by ctypes."""
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object)
    make = prototype(ctypes.cast(maker, ctypes.c_void_p).value or 0)
    return make(ctypes.byref(_python_interface()), ctypes.addressof(record))


@cache
def _python_interface() -> pyncclPython_t:
    names = [field[0] for field in pyncclPython_t._fields_ if field[0].startswith("Py")]
    made = {name: ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in names}
    return pyncclPython_t(size=ctypes.sizeof(pyncclPython_t), **made)


def record_of(what: Operation, arguments: Sequence[Any]) -> pyncclCall_t:
    """The record of a call that is made with these ``arguments`` of the library's function."""
    names = ["send", "recv", "count", "dtype"]
    names += ["op"] * what.reduces + ["root"] * what.rooted + ["comm", "stream"]
    values = dict(zip(names, arguments, strict=True))
    return pyncclCall_t(size=ctypes.sizeof(pyncclCall_t), kind=KINDS[what.name], **values)


# --- what arrays are taken --------------------------------------------------------------------------------


def elements(op: str | None) -> Any:
    """The array of pyncclElement_t that a call takes which reduces by ``op``, or only moves."""
    made = [entry for element in ELEMENTS.values() for entry in _entries(element, op)]
    return (pyncclElement_t * len(made))(*made)


def _entries(element: ElementType, op: str | None) -> Iterator[pyncclElement_t]:
    try:
        dtype = np.dtype(element.name)
    except TypeError:
        return  # one of ml_dtypes', which has not been imported yet
    if op is None:
        code, lanes, reduction = element.moves_as, element.move_lanes, 0
    elif element.reduces_as is not None and op in element.reductions:
        code, lanes, reduction = element.reduces_as, element.reduce_lanes, int(element.reductions[op])
    else:
        return
    _DTYPES.add(dtype)
    yield pyncclElement_t(tag=id(dtype), bytes=dtype.itemsize, dtype=int(code), lanes=lanes, op=reduction)


_DTYPES: set[np.dtype] = set()  # their addresses are in use


# --- what an array is -------------------------------------------------------------------------------------


class _ArrayObject(ctypes.Structure):
    """What follows the header that every Python object has."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("axes", ctypes.c_int),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("base", ctypes.c_void_p),
        ("element", ctypes.c_void_p),
        ("flags", ctypes.c_int),
    ]


_PARTS = ("data", "axes", "shape", "element", "flags")  # that are looked at


@cache
def array_layout() -> pyncclLayout_t | None:
    """Where an array object of this NumPy and this Python has its parts; None if that cannot be confirmed."""
    header = object.__basicsize__  # with a reference count and, last, the type
    if not all(_is_as_expected(array, header) for array in _samples()):
        return None
    at = {f"{name}_at": header + getattr(_ArrayObject, name).offset for name in _PARTS}
    return pyncclLayout_t(
        type_at=_type_at(header),
        **at,
        flags=_C_CONTIGUOUS | _WRITEABLE,
        type=id(np.ndarray),
        none=id(None),
    )


def _type_at(header: int) -> int:
    return header - ctypes.sizeof(ctypes.c_void_p)


def _samples() -> Iterator[np.ndarray]:
    yield np.zeros(3, "f4")
    yield np.zeros((2, 5), "i8")
    yield np.zeros((4, 3, 2), "u1")[1:, :, ::2]
    yield np.asfortranarray(np.zeros((2, 3), "c16"))
    yield np.array(1.5)
    yield np.frombuffer(b"12345678", "i2")


def _is_as_expected(array: np.ndarray, header: int) -> bool:
    if ctypes.c_void_p.from_address(id(array) + _type_at(header)).value != id(np.ndarray):
        return False
    if type(array).__basicsize__ < header + ctypes.sizeof(_ArrayObject):
        return False
    found = _ArrayObject.from_address(id(array) + header)
    return (
        found.data == array.__array_interface__["data"][0]
        and found.axes == array.ndim
        and found.element == id(array.dtype)
        and found.flags == array.flags.num
        and tuple(found.shape[: found.axes]) == array.shape
        and tuple(found.strides[: found.axes]) == array.strides
        and bool(found.flags & _C_CONTIGUOUS) == array.flags.c_contiguous
        and bool(found.flags & _WRITEABLE) == array.flags.writeable
    )

"""Python values between ranks: data only, as JSON with arrays and bytes beside it. Never pickle.

Unpickling runs code that the sender chose; reading this format only builds values. It carries None, bool,
int, float, str, bytes, lists, tuples, dicts, and NumPy arrays and scalars of any dtype without Python objects
(ml_dtypes' too).

A message is: 8 bytes with the length of the JSON, the JSON, then the raw bytes of each array and bytes value
in turn. In the JSON an object ``{"$": kind, ...}`` stands for a value that JSON does not have; every dict is
one of these.
"""

from __future__ import annotations

import json
import reprlib
import struct
from typing import Any

import numpy as np

from . import gpu
from .abi.errors import InvalidArgumentError, InvalidUsageError
from .calls import Collectives
from .core import Core
from .operations import check_rank
from .threadstate import current

_LENGTH = struct.Struct("<Q")


def encode(call: str, value: Any) -> bytes:
    """``value`` as a message. TypeError, with the place inside the value, for what is not data;
    InvalidArgumentError for data that no message can be made of, whatever the reason.
    """
    blobs: list[bytes] = []
    try:
        text = json.dumps(_pack(call, value, (), blobs, ()), separators=(",", ":")).encode()
        return b"".join([_LENGTH.pack(len(text)), text, *blobs])
    except (TypeError, InvalidArgumentError):
        raise
    except Exception as error:  # a released memoryview, a dict that changes meanwhile, no memory, ...
        raise InvalidArgumentError(
            f"{call}: obj cannot be sent ({type(error).__name__}: {error}); no rank has got anything"
        ) from error


def decode(call: str, message: bytes | bytearray | memoryview) -> Any:
    """The value of a message. InvalidArgumentError when the message is damaged."""
    view = memoryview(message)
    try:
        (length,) = _LENGTH.unpack_from(view)
        end = _LENGTH.size + length
        if end > len(view):
            raise ValueError(f"{len(view)} bytes cannot hold {length} of JSON")
        blobs = _Blobs(view[end:])
        value = _unpack(json.loads(bytes(view[_LENGTH.size : end])), blobs)
        blobs.check_used()
        return value
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as error:
        raise InvalidArgumentError(f"{call}: the message received is damaged ({error})") from error


class Objects(Collectives):
    """A Communicator's calls for Python values."""

    def broadcast_object(self, obj: Any = None, root: int = 0) -> Any:
        """The root's ``obj`` on every rank (a copy, also on the root). Elsewhere ``obj`` is not looked at.

        It is data: None, bool, int, float, str, bytes, lists, tuples, dicts, NumPy arrays, up to 100 deep.
        TypeError for anything else, since nothing is pickled; the other ranks get an InvalidUsageError then.
        Waits for the result; not for use inside ``pynccl.group()``.
        """
        call = "broadcast_object"
        _check_now(self, call)
        root = check_rank(call, "root", root, self.size)
        message, problem = _try_encode(call, obj) if self.rank == root else (b"", None)
        size = _out(self, self.broadcast(_in(self, _size(message)), root))
        _raise_together(call, problem, [root] if size[0] == _NOT_DATA else [])
        data = (
            np.frombuffer(bytearray(message or b""), np.uint8)
            if self.rank == root
            else np.empty(int(size[0]), np.uint8)
        )
        return decode(call, _out(self, self.broadcast(_in(self, data), root)).data)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """``obj`` of every rank, in rank order, on every rank. See ``broadcast_object``."""
        call = "all_gather_object"
        _check_now(self, call)
        message, problem = _try_encode(call, obj)
        sizes = _out(self, self.all_gather(_in(self, _size(message))))
        _raise_together(call, problem, np.flatnonzero(sizes == _NOT_DATA).tolist())
        assert message is not None
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: len(message)] = np.frombuffer(message, np.uint8)
        rows = _out(self, self.all_gather(_in(self, padded))).reshape(self.size, len(padded))
        return [decode(call, row[: int(size)].data) for row, size in zip(rows, sizes, strict=True)]


def _check_now(comm: Core, call: str) -> None:
    comm._check_open(call)
    if current.busy:
        raise InvalidUsageError(
            f"{call}: it needs its result at once; call it outside pynccl.group() and `with stream:`"
        )


_NOT_DATA = -1  # instead of a size: the rank has no message, and all ranks raise


def _try_encode(call: str, obj: Any) -> tuple[bytes | None, Exception | None]:
    try:
        return encode(call, obj), None
    except (TypeError, InvalidArgumentError) as error:
        return None, error


def _size(message: bytes | None) -> np.ndarray:
    return np.array([_NOT_DATA if message is None else len(message)], np.int64)


def _raise_together(call: str, problem: Exception | None, ranks: list[int]) -> None:
    """A rank's object that cannot be sent is an error everywhere: nobody is left waiting for it."""
    if problem is not None:
        raise problem
    if ranks:
        raise InvalidUsageError(
            f"{call}: the object of rank {', '.join(map(str, ranks))} cannot be sent; see there"
        )


def _in(comm: Core, array: np.ndarray) -> Any:
    with gpu.on_device(comm.device):
        return gpu.to_gpu(array) if comm.on_gpu else array


def _out(comm: Core, array: Any) -> np.ndarray:
    return gpu.to_host(array) if comm.on_gpu else array


class _Blobs:
    """The raw bytes behind the JSON, taken in the order in which the JSON names them."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def take(self, size: int) -> bytes:
        if not isinstance(size, int) or size < 0 or self._at + size > len(self._view):
            raise ValueError(f"{size} bytes wanted where {len(self._view) - self._at} are left")
        taken = bytes(self._view[self._at : self._at + size])
        self._at += size
        return taken

    def check_used(self) -> None:
        if self._at != len(self._view):
            raise ValueError(f"{len(self._view) - self._at} bytes too many")


_DEEPEST = 100  # containers in each other; a reader may be deep in calls of its own already
_A_KEY = object()  # a step of a path: to a key and not to an item


def _pack(call: str, value: Any, path: tuple[Any, ...], blobs: list[bytes], inside: tuple[int, ...]) -> Any:
    """``value`` as JSON has it. ``path`` leads to it from obj; ``inside`` are the containers it is in."""
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:  # decimal digits are slow, and limited
        return value if value.bit_length() < 64 else {"$": "int", "v": hex(value)}
    if id(value) in inside:
        raise TypeError(f"{call}: {_place(path)} contains itself")
    inside = (*inside, id(value))
    if len(inside) > _DEEPEST:
        raise InvalidArgumentError(
            f"{call}: {_place(path)} is {len(inside)} containers deep; at most {_DEEPEST} can be sent"
        )
    if kind is list:
        return [_pack(call, item, (*path, i), blobs, inside) for i, item in enumerate(value)]
    if kind is tuple:
        return {
            "$": "tuple",
            "v": [_pack(call, item, (*path, i), blobs, inside) for i, item in enumerate(value)],
        }
    if kind is dict:
        pairs = [
            [
                _pack(call, key, (*path, _A_KEY), blobs, inside),
                _pack(call, item, (*path, key), blobs, inside),
            ]
            for key, item in value.items()
        ]
        return {"$": "dict", "v": pairs}
    if kind in (bytes, bytearray, memoryview):
        blobs.append(bytes(value))
        return {"$": "bytes", "n": len(blobs[-1])}
    if isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, np.ma.MaskedArray):
        array = np.asarray(value)
        if array.dtype.names is None and not array.dtype.hasobject:
            if not array.dtype.itemsize:
                raise TypeError(f"{call}: {_place(path)} has elements of no size (dtype {array.dtype.str})")
            blobs.append(array.tobytes())
            ml = array.dtype.kind == "V" and array.dtype.type is not np.void
            name = array.dtype.name if ml else array.dtype.str
            scalar = isinstance(value, np.generic)
            return {"$": "scalar" if scalar else "array", "t": name, "s": array.shape, "n": len(blobs[-1])}
    raise TypeError(
        f"{call}: {_place(path)} is a {kind.__name__}, and only data is sent: None, bool, int, float, str, "
        "bytes, list, tuple, dict, and NumPy arrays; convert it first (objects are never pickled)"
    )


def _place(path: tuple[Any, ...]) -> str:
    text = "obj"
    for step in path:
        text = f"a key of {text}" if step is _A_KEY else f"{text}[{_short(step)}]"
    return text


def _short(key: Any) -> str:
    try:
        return reprlib.repr(key)
    except ValueError:  # an int with more digits than Python writes
        return f"<{type(key).__name__}>"


def _unpack(value: Any, blobs: _Blobs) -> Any:
    if isinstance(value, list):
        return [_unpack(item, blobs) for item in value]
    if not isinstance(value, dict):
        return value
    return _UNPACK[value["$"]](value, blobs)


def _unpack_array(value: Any, blobs: _Blobs) -> np.ndarray:
    dtype = _dtype(value["t"])
    array = np.frombuffer(bytearray(blobs.take(value["n"])), np.uint8)
    return array.view(dtype).reshape([int(n) for n in value["s"]])


def _dtype(name: str) -> np.dtype:
    if name.startswith(("bfloat", "float4", "float6", "float8", "int2", "int4", "uint2", "uint4")):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    dtype = np.dtype(str(name))
    if dtype.hasobject or dtype.names is not None:
        raise ValueError(f"dtype {name!r} is not plain data")
    return dtype


_UNPACK: dict[str, Any] = {
    "int": lambda value, blobs: int(value["v"], 16),
    "tuple": lambda value, blobs: tuple(_unpack(item, blobs) for item in value["v"]),
    "dict": lambda value, blobs: {_unpack(key, blobs): _unpack(item, blobs) for key, item in value["v"]},
    "bytes": lambda value, blobs: blobs.take(value["n"]),
    "array": _unpack_array,
    "scalar": lambda value, blobs: _unpack_array(value, blobs)[()],
}

"""Arrays of any library as memory: address, elements, type, layout, place. Never copies, never casts.

``view(call, role, x)`` is the one way in. It asks the array's *home* (the library it belongs to: NumPy, CuPy,
PyTorch, or a protocol) and every home is one row of ``_HOMES``. A home also allocates like arrays, which is
how default outputs come from the array's own library, and knows the current stream of a GPU. This file knows
nothing about communicators and imports no array library but NumPy: CuPy and PyTorch are looked up when one of
their arrays shows up.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from . import dlpack
from .abi.errors import InvalidArgumentError
from .elements import ELEMENTS, ElementType, as_bytes


@dataclass(slots=True)
class Buffer:
    """An array as the library sees it. Valid while ``keep`` lives."""

    array: Any
    """What the caller passed."""
    keep: Any
    """What owns the memory for as long as this buffer is used."""
    address: int
    count: int
    element: ElementType
    shape: tuple[int, ...]
    device: int | None
    """The CUDA device, or None for host memory."""
    c_order: bool
    f_order: bool
    read_only: str
    """Why the memory must not be written, or an empty string."""
    home: Home

    @property
    def nbytes(self) -> int:
        return self.count * self.element.itemsize

    def __str__(self) -> str:
        return f"{self.element.name}, shape {self.shape}"


class Home(Protocol):
    """An array library (or protocol): how its arrays become buffers, and how to make one like another."""

    name: str

    def view(self, call: str, role: str, x: Any) -> Buffer: ...

    def empty(self, like: Buffer, shape: tuple[int, ...]) -> Any: ...

    def current_stream(self, device: int) -> int: ...


UNKNOWN_DEVICE = -1

addressof = ctypes.addressof
# A ctypes view of no bytes: the cheapest way to the address of memory that is writable and in C order (0.2
# us, where ndarray.ctypes takes 1 us). It refuses everything else, so it is the check of both as well.
view_writable: Any = (ctypes.c_char * 0).from_buffer


def view(call: str, role: str, x: Any) -> Buffer:
    """``x`` as a Buffer. ``call`` and ``role`` ("x", "out") are for the messages.

    Raises TypeError for what is no array, and InvalidArgumentError for an array whose memory cannot be used
    as it is.
    """
    if isinstance(x, np.ndarray):
        return _NUMPY.view(call, role, x)
    package = type(x).__module__.partition(".")[0]
    home = _HOMES.get(package)
    if home is not None and home.owns(x):
        return home.view(call, role, x)
    if isinstance(x, np.generic):
        raise TypeError(
            f"{call}: {role} is a NumPy scalar ({type(x).__name__}), which cannot be written; pass "
            f"np.array({role})"
        )
    if hasattr(x, "__cuda_array_interface__"):
        return _CUDA_INTERFACE.view(call, role, x)
    if hasattr(x, "__dlpack__"):
        return _DLPACK.view(call, role, x)
    if isinstance(x, (bytes, bytearray, memoryview)) or type(x).__module__ in ("array", "mmap"):
        return _NUMPY.view(call, role, np.asarray(memoryview(x)), array=x)
    raise TypeError(
        f"{call}: {role} must be an array (NumPy, CuPy, PyTorch, or anything with DLPack or "
        "__cuda_array_interface__), "
        f"not {type(x).__name__}; make one with np.asarray({role})"
    )


def numpy_element(call: str, role: str, dtype: np.dtype) -> ElementType:
    """The element type of a NumPy (or CuPy) dtype."""
    found = _NUMPY_ELEMENTS.get(dtype)
    if found is None:
        if dtype.hasobject:
            raise TypeError(
                f"{call}: {role} has dtype {dtype}: Python objects cannot be sent as memory; "
                "use comm.broadcast_object or comm.all_gather_object"
            )
        known = ELEMENTS.get(dtype.name) if dtype.isnative else None
        found = (
            known
            if known is not None and known.itemsize == dtype.itemsize
            else as_bytes(str(dtype), dtype.itemsize)
        )
        _NUMPY_ELEMENTS[dtype] = found
    return found


_NUMPY_ELEMENTS: dict[np.dtype, ElementType] = {}


def numpy_dtype(call: str, dtype: Any) -> np.dtype:
    """What ``dtype`` names for NumPy and ml_dtypes; a TypeError that names the call if it names nothing."""
    if isinstance(dtype, str) and dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, dtype))
    try:
        return np.dtype(dtype)
    except TypeError as error:
        raise TypeError(
            f"{call}: dtype={dtype!r} is no dtype ({error}); pass one such as 'float32'"
        ) from None


def is_contiguous(shape: Sequence[int], strides: Sequence[int] | None, itemsize: int) -> tuple[bool, bool]:
    """Whether strides (bytes; None = C order) describe C order, and whether they describe Fortran order."""
    if strides is None:
        return True, sum(n != 1 for n in shape) <= 1 or 0 in shape
    if 0 in shape:
        return True, True

    def packed(order: range) -> bool:
        step = itemsize
        for axis in order:
            if shape[axis] != 1:
                if strides[axis] != step:
                    return False
                step *= shape[axis]
        return True

    rank = len(shape)
    return packed(range(rank - 1, -1, -1)), packed(range(rank))


class _Numpy:
    name = "NumPy"

    def owns(self, x: Any) -> bool:
        return isinstance(x, np.ndarray)

    def view(self, call: str, role: str, x: np.ndarray, array: Any = None) -> Buffer:
        if type(x) is not np.ndarray and isinstance(x, np.ma.MaskedArray):
            raise TypeError(
                f"{call}: {role} is a masked array and its mask would be ignored; "
                f"pass {role}.data or {role}.filled(value)"
            )
        element = _NUMPY_ELEMENTS.get(x.dtype) or numpy_element(call, role, x.dtype)
        shape = x.shape
        try:
            address = addressof(view_writable(x))
        except (TypeError, ValueError):
            flags = x.flags
            read_only = "" if flags.writeable else "it is read-only"
            c_order, f_order, address = flags.c_contiguous, flags.f_contiguous, x.ctypes.data
        else:
            # In more than one dimension both orders at once is for arrays with an axis or two of length 1.
            read_only, c_order, f_order = "", True, len(shape) < 2 or x.flags.f_contiguous
        # By position: this is half the time of a small call.
        return Buffer(
            x if array is None else array,
            x,
            address,
            x.size,
            element,
            shape,
            None,
            c_order,
            f_order,
            read_only,
            self,
        )

    def empty(self, like: Buffer, shape: tuple[int, ...]) -> Any:
        dtype = like.keep.dtype if isinstance(like.keep, np.ndarray) else _element_dtype(like.element)
        return np.empty(shape, dtype)

    def current_stream(self, device: int) -> int:
        raise AssertionError("NumPy arrays have no GPU stream")


class _Cupy:
    name = "CuPy"

    def owns(self, x: Any) -> bool:
        return isinstance(x, _module("cupy").ndarray)

    def view(self, call: str, role: str, x: Any) -> Buffer:
        flags = x.flags
        return Buffer(
            array=x,
            keep=x,
            address=x.data.ptr,
            count=x.size,
            element=numpy_element(call, role, x.dtype),
            shape=x.shape,
            device=x.data.device_id,
            c_order=flags.c_contiguous,
            f_order=flags.f_contiguous,
            read_only="",
            home=self,
        )

    def empty(self, like: Buffer, shape: tuple[int, ...]) -> Any:
        cupy = cupy_module("allocating an output on the GPU")
        dtype = like.keep.dtype if self.owns(like.keep) else _element_dtype(like.element)
        with cupy.cuda.Device(like.device):
            return cupy.empty(shape, dtype)

    def current_stream(self, device: int) -> int:
        return _module("cupy").cuda.get_current_stream(device).ptr


class _Torch:
    name = "PyTorch"

    def owns(self, x: Any) -> bool:
        return isinstance(x, _module("torch").Tensor)

    def view(self, call: str, role: str, x: Any) -> Buffer:
        if x.is_sparse or x.is_quantized:
            raise TypeError(
                f"{call}: {role} is a sparse or quantized tensor; pass a dense one ({role}.to_dense())"
            )
        if x.device.type not in ("cpu", "cuda"):
            raise InvalidArgumentError(
                f"{call}: {role} is on {x.device}; only CPU and CUDA memory can be used"
            )
        if x.is_conj() or x.is_neg():
            raise InvalidArgumentError(
                f"{call}: {role} is a lazily conjugated or negated view; pass "
                f"{role}.resolve_conj().resolve_neg()"
            )
        itemsize = x.element_size()
        name = str(x.dtype).removeprefix("torch.")
        shape = tuple(x.shape)
        c_order, f_order = is_contiguous(shape, [step * itemsize for step in x.stride()], itemsize)
        return Buffer(
            array=x,
            keep=x,
            address=x.data_ptr(),
            count=x.numel(),
            element=ELEMENTS.get(name) or as_bytes(name, itemsize),
            shape=shape,
            device=x.device.index if x.device.type == "cuda" else None,
            c_order=c_order,
            f_order=f_order,
            read_only=f"it requires grad; pass {role}.detach()" if x.requires_grad else "",
            home=self,
        )

    def empty(self, like: Buffer, shape: tuple[int, ...]) -> Any:
        return _module("torch").empty(shape, dtype=like.array.dtype, device=like.array.device)

    def current_stream(self, device: int) -> int:
        return _module("torch").cuda.current_stream(device).cuda_stream


class _CudaArrayInterface:
    """Any object with ``__cuda_array_interface__`` (Numba, ...). New arrays and streams come from CuPy."""

    name = "__cuda_array_interface__"

    def owns(self, x: Any) -> bool:
        return hasattr(x, "__cuda_array_interface__")

    def view(self, call: str, role: str, x: Any) -> Buffer:
        described = x.__cuda_array_interface__
        if described.get("mask") is not None:
            raise TypeError(f"{call}: {role} has a mask, which would be ignored; pass its data alone")
        dtype = np.dtype(described["typestr"])
        shape = tuple(described["shape"])
        address, read_only = described["data"]
        c_order, f_order = is_contiguous(shape, described.get("strides"), dtype.itemsize)
        return Buffer(
            array=x,
            keep=x,
            address=address or 0,
            count=int(np.prod(shape, dtype=np.int64)),
            element=numpy_element(call, role, dtype),
            shape=shape,
            device=_device_of(address or 0),
            c_order=c_order,
            f_order=f_order,
            read_only="its __cuda_array_interface__ says read-only" if read_only else "",
            home=self,
        )

    def empty(self, like: Buffer, shape: tuple[int, ...]) -> Any:
        return _CUPY.empty(like, shape)

    def current_stream(self, device: int) -> int:
        return cupy_module("finding the current stream").cuda.get_current_stream(device).ptr


class _Dlpack:
    """Any object with ``__dlpack__`` (JAX and others). New arrays come from NumPy or CuPy."""

    name = "DLPack"

    def owns(self, x: Any) -> bool:
        return hasattr(x, "__dlpack__")

    def view(self, call: str, role: str, x: Any) -> Buffer:
        tensor = dlpack.read(call, role, x)
        c_order, f_order = is_contiguous(tensor.shape, tensor.strides, tensor.itemsize)
        read_only = "its exporter says read-only" if tensor.read_only else ""
        if type(x).__module__.startswith("jax"):
            read_only = "JAX arrays are immutable"
        return Buffer(
            array=x,
            keep=(x, tensor.capsule),
            address=tensor.address,
            count=tensor.elements,
            element=ELEMENTS.get(tensor.dtype) or as_bytes(tensor.dtype, tensor.itemsize),
            shape=tensor.shape,
            device=tensor.device,
            c_order=c_order,
            f_order=f_order,
            read_only=read_only,
            home=self,
        )

    def empty(self, like: Buffer, shape: tuple[int, ...]) -> Any:
        return (_NUMPY if like.device is None else _CUPY).empty(like, shape)

    def current_stream(self, device: int) -> int:
        return _CUDA_INTERFACE.current_stream(device)


_NUMPY = _Numpy()
_CUPY = _Cupy()
_TORCH = _Torch()
_CUDA_INTERFACE = _CudaArrayInterface()
_DLPACK = _Dlpack()
# By the top-level package of the array's class; classes of other packages come in by the protocol they
# implement.
_HOMES: dict[str, Any] = {"cupy": _CUPY, "torch": _TORCH}

# Homes whose allocator hands freed memory out again in the order of the current stream: memory used on that
# stream needs no keeping, exactly as for the library's own kernels.
STREAM_ORDERED: tuple[Any, ...] = (_CUPY, _TORCH)


def cupy_module(purpose: str) -> Any:
    """CuPy, imported now; an error that names the package to install when there is none."""
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            f"{purpose} needs CuPy: pip install cupy-cuda12x (or cupy-cuda13x)", name="cupy"
        ) from error
    return cupy


def _module(name: str) -> Any:
    """An array library that is imported already: an array of it is in our hands."""
    return sys.modules[name]


def _element_dtype(element: ElementType) -> np.dtype:
    """The dtype for new arrays of what another library holds; plain bytes for one NumPy lacks."""
    if element.name in ELEMENTS:
        return numpy_dtype("out", element.name)
    return np.dtype((np.void, element.itemsize))


def _device_of(address: int) -> int:
    """The device of GPU memory; UNKNOWN_DEVICE if CUDA cannot be asked (then no call can use it either)."""
    cupy = sys.modules.get("cupy")  # imported with the first communicator on GPUs
    if cupy is None:
        return UNKNOWN_DEVICE
    try:
        if address == 0:  # no elements
            return int(cupy.cuda.runtime.getDevice())
        return int(cupy.cuda.runtime.pointerGetAttributes(address).device)
    except cupy.cuda.runtime.CUDARuntimeError:
        return UNKNOWN_DEVICE

"""DLPack capsules read in place: the description of a tensor without taking it over.

NumPy's own ``from_dlpack`` refuses bfloat16 and fp8, so the C structures are read here. The capsule is never
renamed: its exporter stays the owner, and whoever uses the address keeps the capsule alive. Layouts are those
of dlpack.h 1.1.
"""

from __future__ import annotations

import ctypes
from math import prod
from typing import Any, NamedTuple

from .abi.errors import InvalidArgumentError

_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_READ_ONLY = 1

# (type code, bits) to the name that NumPy, ml_dtypes and PyTorch use.
_NAMES = {
    **{(0, bits): f"int{bits}" for bits in (8, 16, 32, 64)},
    **{(1, bits): f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{(2, bits): f"float{bits}" for bits in (16, 32, 64)},
    (4, 16): "bfloat16",
    (5, 64): "complex64",
    (5, 128): "complex128",
    (6, 8): "bool",
    (10, 8): "float8_e4m3fn",
    (12, 8): "float8_e5m2",
}


class Tensor(NamedTuple):
    """What a capsule says. ``strides``: bytes, or None for C order. ``device``: None for host memory."""

    capsule: Any
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str
    itemsize: int
    device: int | None
    read_only: bool

    @property
    def elements(self) -> int:
        return prod(self.shape)


def read(call: str, role: str, x: Any) -> Tensor:
    """The tensor that ``x.__dlpack__()`` describes, without synchronising any stream."""
    kind, device = (int(part) for part in x.__dlpack_device__())
    if kind not in (_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED):
        raise InvalidArgumentError(
            f"{call}: {role} is on DLPack device type {kind}; only CPU and CUDA memory can be used"
        )
    on_gpu = kind in (_CUDA, _CUDA_MANAGED)
    # -1: the producer shall not synchronise. The call runs on the producer's own current stream.
    options: dict[str, Any] = {"stream": -1} if on_gpu else {}
    try:
        capsule = x.__dlpack__(max_version=(1, 1), **options)
    except TypeError:  # an exporter from before DLPack 1.0 does not know max_version
        capsule = x.__dlpack__(**options)
    versioned = bool(_is_valid(capsule, b"dltensor_versioned"))
    name = b"dltensor_versioned" if versioned else b"dltensor"
    pointer = _get_pointer(capsule, name)
    if versioned:
        managed = _ManagedTensorVersioned.from_address(pointer)
        read_only = bool(managed.flags & _READ_ONLY)
        tensor = managed.tensor
    else:
        read_only = False
        tensor = _Tensor.from_address(pointer)
    bits = tensor.bits * tensor.lanes
    dtype = _NAMES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if bits % 8:
        raise InvalidArgumentError(f"{call}: {role} has elements of {bits} bits; they must be whole bytes")
    itemsize = bits // 8
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(step * itemsize for step in tensor.strides[: tensor.ndim]) if tensor.strides else None
    return Tensor(
        capsule=capsule,
        address=(tensor.data or 0) + tensor.byte_offset,
        shape=shape,
        strides=strides,
        dtype=dtype or f"dlpack type {tensor.code} of {bits} bits",
        itemsize=itemsize,
        device=device if on_gpu else None,
        read_only=read_only,
    )


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _ManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)

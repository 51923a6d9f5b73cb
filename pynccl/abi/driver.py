"""Which CUDA devices are usable, asked of the driver itself.

Owned here: the few calls of ``libcuda.so.1`` that decide between libnccl and the host library. No CUDA
toolkit, no CuPy. Asking initialises CUDA in this process, and CUDA does not survive ``fork``: a program that
forks its ranks should name its library (``PYNCCL_LIBRARY`` or ``library=``), so that nothing is asked.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple


class Gpu(NamedTuple):
    """One usable CUDA device, numbered as this process sees it (after ``CUDA_VISIBLE_DEVICES``)."""

    ordinal: int
    name: str
    memory_bytes: int


class Gpus(NamedTuple):
    """The usable devices, and in words why there are none."""

    devices: tuple[Gpu, ...]
    reason: str = ""
    cuda_version: str | None = None


class DriverError(Exception):
    """A driver call failed; the text is the whole reason."""


@functools.cache
def gpus() -> Gpus:
    """The CUDA devices this process can use; asked once."""
    return probe("libcuda.so.1")


def probe(driver: str) -> Gpus:
    """Ask the CUDA driver library ``driver`` for its devices."""
    try:
        cuda = ctypes.CDLL(driver)
        _call(cuda, "cuInit", ctypes.c_uint(0))
        count, version = ctypes.c_int(), ctypes.c_int()
        _call(cuda, "cuDeviceGetCount", ctypes.byref(count))
        _call(cuda, "cuDriverGetVersion", ctypes.byref(version))
        devices = tuple(_device(cuda, index) for index in range(count.value))
    except OSError as error:
        return Gpus((), f"the CUDA driver cannot be opened: {error}")
    except DriverError as error:
        return Gpus((), str(error))
    reason = "" if devices else "the CUDA driver reports 0 devices"
    return Gpus(devices, reason, f"{version.value // 1000}.{version.value % 1000 // 10}")


def _device(cuda: ctypes.CDLL, index: int) -> Gpu:
    device, name, memory = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    _call(cuda, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    _call(cuda, "cuDeviceGetName", name, ctypes.c_int(len(name)), device)
    _call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    return Gpu(index, name.value.decode(errors="replace"), memory.value)


def _call(cuda: ctypes.CDLL, name: str, *args: object) -> None:
    try:
        function = cuda[name]
    except AttributeError:
        raise DriverError(f"{cuda._name} has no {name}: not a CUDA driver") from None
    code = function(*args)
    if code:
        raise DriverError(f"{name} failed: {_error_name(cuda, code)}")


def _error_name(cuda: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    cuda.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
    return f"{text.value.decode()} ({code})" if text.value else f"CUDA error {code}"

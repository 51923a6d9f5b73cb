"""The little of CUDA that calls need besides NCCL: the device, streams, events. All of it is asked of CuPy.

CuPy is imported when a communicator on GPUs is made, and never before.
"""

from __future__ import annotations

import contextlib
from typing import Any

from .abi.errors import UnhandledCudaError
from .arrays import cupy_module


def _cupy() -> Any:
    return cupy_module("a communicator on GPUs (one in host memory needs PYNCCL_LIBRARY=host, no CuPy)")


def require() -> None:
    """Raise ImportError, naming the package, when CuPy is not installed."""
    _cupy()


def device_count() -> int:
    """How many GPUs this process can use; UnhandledCudaError when CUDA itself does not work."""
    runtime = _cupy().cuda.runtime
    try:
        return runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise UnhandledCudaError(
            f"init: NCCL was chosen and CUDA does not work ({error}); check nvidia-smi, or use "
            "library='host' or set PYNCCL_LIBRARY=host"
        ) from error


def use_device(device: int) -> None:
    """Make ``device`` this thread's current one; NCCL puts a new communicator on it."""
    _cupy().cuda.Device(device).use()


def current_device() -> int:
    return _cupy().cuda.runtime.getDevice()


def on_device(device: int | None) -> Any:
    """A block in which ``device`` is this thread's current one; None leaves it as it is."""
    return contextlib.nullcontext() if device is None else _cupy().cuda.Device(device)


def synchronize(stream: int) -> None:
    _cupy().cuda.runtime.streamSynchronize(stream)


def is_capturing(stream: int) -> bool:
    """Whether a CUDA graph is being captured on the stream."""
    return bool(_cupy().cuda.runtime.streamIsCapturing(stream))


def record_event(stream: int) -> Any:
    cuda = _cupy().cuda
    event = cuda.Event(disable_timing=True)
    cuda.runtime.eventRecord(event.ptr, stream)
    return event


def to_gpu(array: Any) -> Any:
    """A NumPy array's copy on the current device."""
    return _cupy().asarray(array)


def to_host(array: Any) -> Any:
    """A CuPy array's copy in host memory, when its stream has made it."""
    return _cupy().asnumpy(array)


def empty(shape: Any, dtype: Any) -> Any:
    return _cupy().empty(shape, dtype)


def array_at(address: int, nbytes: int, owner: Any, device: int, shape: Any, dtype: Any) -> Any:
    """Memory that ``owner`` owns as a CuPy array."""
    cupy = _cupy()
    memory = cupy.cuda.UnownedMemory(address, nbytes, owner, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def free_after_work(device: int, free: Any) -> None:
    """Call ``free`` on ``device`` after all its work: freeing NCCL's memory does not wait for streams."""
    with on_device(device):
        _cupy().cuda.Device(device).synchronize()
        free()

"""Where a rank's buffers live and how its time is taken: ordinary memory and the clock, or a GPU's stream.

Two classes with the same methods. Host memory needs no stream: calls return when they are done. CuPy is
imported only by `Gpu`. Buffers are NumPy or CuPy arrays of bytes, which the engine views as an element type.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

import pynccl
from bench.check import DTYPE
from bench.options import UsageError
from pynccl.abi import Result, gpus

__all__ = ["Gpu", "Host", "device_of", "require_a_device"]

POISON = 0xA5  # what a receive buffer is full of before a check


class Host:
    """Ordinary memory of this machine. `index` is the rank's number on it, as no device has one."""

    stream: Any = None
    pci = (0, 0, 0)

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = _processor()

    def allocate(self, comm: Any, nbytes: int, mapped: bool) -> Any:
        """Bytes, the library's (ncclMemAlloc) or plain. Written once, so that no timing pays page faults."""
        buffer = comm.empty(nbytes, "uint8") if mapped else np.empty(nbytes, "uint8")
        buffer.fill(0)
        return buffer

    def fill_with_ones(self, buffer: Any, dtype: str) -> None:
        usable = buffer.size // DTYPE[dtype].itemsize * DTYPE[dtype].itemsize
        buffer[:usable].view(DTYPE[dtype])[...] = DTYPE[dtype].type(1)

    def put(self, array: Any, values: Any) -> None:
        array[...] = values

    def get(self, array: Any) -> Any:
        """The values as a NumPy array."""
        return array

    def finish(self, comm: Any, timeout: float) -> None:
        """Waits until everything started is done: here it is. (The communicator itself has the time-out.)"""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds_between(self, first: Any, second: Any) -> float:
        return second - first

    def memory(self) -> int:
        """Bytes that buffers of all ranks of this machine may use together."""
        return _available_memory() * 4 // 5

    def used_memory(self) -> int:
        return 0

    def cannot(self, dtype: str) -> str:
        """Why this dtype cannot be used, or an empty string."""
        return ""


class Gpu:
    """One CUDA device through CuPy, with a stream of its own unless the default one is asked for."""

    def __init__(self, index: int, null_stream: bool) -> None:
        import cupy

        self.cupy = cupy
        # A launcher may show each rank its own GPU only, which then has number 0.
        self.index = index % cupy.cuda.runtime.getDeviceCount()
        cupy.cuda.Device(self.index).use()  # for this thread, which is the rank's
        self.stream = cupy.cuda.Stream.null if null_stream else cupy.cuda.Stream(non_blocking=True)
        properties = cupy.cuda.runtime.getDeviceProperties(self.index)
        name = properties["name"]
        self.name = name.decode() if isinstance(name, bytes) else str(name)
        self.pci = (properties["pciDomainID"], properties["pciBusID"], properties["pciDeviceID"])
        self.capability = (properties["major"], properties["minor"])

    def allocate(self, comm: Any, nbytes: int, mapped: bool) -> Any:
        buffer = comm.empty(nbytes, "uint8") if mapped else self.cupy.empty(nbytes, "uint8")
        buffer.fill(0)
        self.cupy.cuda.Device(self.index).synchronize()
        return buffer

    def fill_with_ones(self, buffer: Any, dtype: str) -> None:
        one = np.ones(1, DTYPE[dtype]).view("uint8")
        whole = buffer.size // one.size * one.size
        buffer[:whole].reshape(-1, one.size)[...] = self.cupy.asarray(one)
        self.cupy.cuda.Device(self.index).synchronize()

    def put(self, array: Any, values: Any) -> None:
        """Made on the CPU and copied: slow for gigabytes, and the same bits on every device."""
        array.view("uint8")[...] = self.cupy.asarray(np.ascontiguousarray(values).view("uint8"))
        self.cupy.cuda.Device(self.index).synchronize()

    def get(self, array: Any) -> Any:
        if not array.size:
            return np.empty(0, array.dtype)
        return self.cupy.asnumpy(array.view("uint8")).view(array.dtype)

    def finish(self, comm: Any, timeout: float) -> None:
        """Waits for the stream, looking for the communicator's errors and the end of `timeout` (0: none)."""
        begun = time.monotonic()
        while not self.stream.done:
            state = comm.async_error()
            if state not in (Result.SUCCESS, Result.IN_PROGRESS):
                comm.abort()
                raise pynccl.NcclError(f"the communicator failed while its stream ran: {state!r}")
            if timeout and time.monotonic() - begun > timeout:
                comm.abort()
                raise pynccl.NcclTimeoutError(
                    f"the operations took longer than -T {timeout:g} s; raise it, or set NCCL_DEBUG=INFO"
                )
            os.sched_yield()

    def mark(self) -> Any:
        return self.stream.record()

    def seconds_between(self, first: Any, second: Any) -> float:
        return self.cupy.cuda.get_elapsed_time(first, second) / 1e3

    def memory(self) -> int:
        """As nccl-tests: all but 1 GiB for each 16 GiB of the device (at most 4), and 1 GiB for the rest."""
        gib = 1 << 30
        total = self.cupy.cuda.runtime.memGetInfo()[1]
        return total - min(-(-total // (16 * gib)), 4) * gib - gib

    def used_memory(self) -> int:
        free, total = self.cupy.cuda.runtime.memGetInfo()
        return total - free

    def cannot(self, dtype: str) -> str:
        if dtype.startswith("f8") and self.capability < (9, 0):
            return f"{self.name} has no 8-bit floats: they need compute capability 9.0"
        try:
            self.cupy.empty(16, "uint8").view(DTYPE[dtype])
        except (TypeError, ValueError):
            return f"CuPy {self.cupy.__version__} has no arrays of {DTYPE[dtype].name}"
        return ""


def require_a_device(kind: str) -> None:
    """Raises UsageError when NVIDIA's library was chosen and there is no GPU for it."""
    found = gpus()
    if kind == "nccl" and not found.devices:
        raise UsageError(f"no GPU is usable ({found.reason}); --library host runs in host memory")


def device_of(kind: str, index: int, null_stream: bool) -> Host | Gpu:
    """The device number `index` of this machine, for a library of this kind."""
    return Host(index) if kind == "host" else Gpu(index, null_stream)


def _processor() -> str:
    """The name of the CPU, as the kernel tells it."""
    fields: dict[str, str] = {}
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    cores = len(os.sched_getaffinity(0))
    name = fields.get("model name") or fields.get("Model") or f"CPU {fields.get('CPU part', '')}".strip()
    return f"{name} ({cores} cores)"


def _available_memory() -> int:
    """Free memory in bytes, and no more than the container's limit leaves."""
    with open("/proc/meminfo", encoding="ascii") as file:
        free = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            most = limit.read().strip()
            return free if most == "max" else min(free, int(most) - int(used.read()))
    except OSError:  # no such file: no limit of this kind
        return free

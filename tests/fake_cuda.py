"""A machine with GPUs, as far as pynccl can tell: `cupy` in host memory, the host library passing for NCCL.

Everything that the Python face does for GPUs (devices, streams, events, memory, messages) runs against it, on
any machine. Its CUDA streams are host streams, so work really is asynchronous. It shows nothing about NCCL or
CUDA themselves: the tests in `gpu/` do.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pynccl import host
from pynccl.abi.library import Library


class _Current(threading.local):
    device = 0
    stream: Any = None


class CUDARuntimeError(RuntimeError):
    """CuPy's error."""


class FakeCuda:
    """State and modules of the fake. `events` are those recorded and not yet forgotten by their holder."""

    devices = 4

    def __init__(self) -> None:
        self.library = Library(str(host.library_path()))
        self.library.kind = "nccl"
        self.current = _Current()
        self.recorded = 0
        self.capturing: set[int] = set()
        self.freed: list[int] = []
        self.module = self._module()

    def stream(self) -> Any:
        box = ctypes.c_void_p()
        assert self.library.pyncclStreamCreate(ctypes.byref(box)) == 0
        return types.SimpleNamespace(ptr=box.value)

    def synchronize(self, stream: int) -> None:
        if stream:
            assert self.library.pyncclStreamSynchronize(stream, 20.0) == 0

    def _module(self) -> Any:
        fake, lib = self, self.library

        class Array:
            """What `cupy.ndarray` shows of itself, over a NumPy array."""

            def __init__(self, shape: Any, dtype: Any = "f4", memptr: Any = None, base: Any = None) -> None:
                if memptr is not None:
                    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
                    raw = (ctypes.c_ubyte * max(size, 1)).from_address(memptr.memory.ptr)
                    base = np.frombuffer(raw, np.uint8)[:size].view(dtype).reshape(shape)
                self.a = np.empty(shape, dtype) if base is None else base
                self.memory = memptr
                self.data = types.SimpleNamespace(ptr=self.a.ctypes.data, device_id=fake.current.device)

            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return getattr(self.a, name)

            @property
            def __cuda_array_interface__(self) -> Any:
                return {**self.a.__array_interface__, "version": 3}

            def __getitem__(self, key: Any) -> Any:
                return Array(None, base=self.a[key])

        Array.__name__, Array.__module__ = "ndarray", "cupy"

        class Device:
            def __init__(self, number: int) -> None:
                self.number = number

            def use(self) -> None:
                fake.current.device = self.number

            def synchronize(self) -> None:
                fake.synchronize(fake.current.stream.ptr if fake.current.stream else 0)

            def __enter__(self) -> Any:
                self.before, fake.current.device = fake.current.device, self.number
                return self

            def __exit__(self, *exc: object) -> None:
                fake.current.device = self.before

        class Event:
            def __init__(self, disable_timing: bool = False) -> None:
                assert disable_timing, "an event with timing costs more"
                box = ctypes.c_void_p()
                assert lib.pyncclEventCreate(ctypes.byref(box)) == 0
                self.ptr = box.value

            @property
            def done(self) -> bool:
                return lib.pyncclEventQuery(self.ptr) == 0

        def record(event: int, stream: int) -> None:
            fake.recorded += 1
            assert lib.pyncclEventRecord(event, stream) == 0

        def current_stream(device: int | None = None) -> Any:
            return fake.current.stream or types.SimpleNamespace(ptr=0)

        runtime = types.SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            getDeviceCount=lambda: fake.devices,
            getDevice=lambda: fake.current.device,
            streamSynchronize=fake.synchronize,
            streamIsCapturing=lambda stream: stream in fake.capturing,
            eventRecord=record,
            pointerGetAttributes=lambda pointer: types.SimpleNamespace(device=fake.current.device),
        )
        module: Any = types.ModuleType("cupy")
        module.ndarray = Array
        module.empty = Array
        module.asarray = lambda x: Array(None, base=np.array(x))
        module.asnumpy = lambda x: x.a.copy()
        module.cuda = types.SimpleNamespace(
            runtime=runtime,
            Device=Device,
            Event=Event,
            get_current_stream=current_stream,
            UnownedMemory=lambda ptr, size, owner, device: types.SimpleNamespace(ptr=ptr, owner=owner),
            MemoryPointer=lambda memory, offset: types.SimpleNamespace(memory=memory),
        )
        return module


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "cupy", fake.module)
    yield fake

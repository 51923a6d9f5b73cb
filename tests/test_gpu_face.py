"""What the Python face does for GPUs, on a fake CUDA (see fake_cuda.py). The real one: tests/gpu."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_cuda import CUDARuntimeError, FakeCuda, fake_cuda  # type: ignore[import-not-found]

import pynccl
from pynccl.abi.types import pyncclHostFn_t
from pynccl.flight import gpu_flight

__all__ = ["fake_cuda"]


@pytest.fixture
def comms(fake_cuda: FakeCuda) -> Iterator[list[pynccl.Communicator]]:
    """Two ranks in this thread, on GPUs 0 and 1."""
    made = pynccl.Communicator.init_all(2, library=fake_cuda.library)
    yield made
    for comm in made:
        comm.destroy()


@pytest.fixture
def alone(fake_cuda: FakeCuda) -> Iterator[pynccl.Communicator]:
    with pynccl.Communicator(
        1, pynccl.get_unique_id(fake_cuda.library), 0, library=fake_cuda.library
    ) as comm:
        yield comm


def on(fake: FakeCuda, device: int, values: Any, dtype: Any = "f4") -> Any:
    with fake.module.cuda.Device(device):
        return fake.module.asarray(np.array(values, dtype))


def test_calls_take_arrays_of_their_own_gpu(fake_cuda: FakeCuda, comms: list[pynccl.Communicator]) -> None:
    assert [comm.device for comm in comms] == [0, 1]
    xs = [on(fake_cuda, r, [r, r + 1]) for r in range(2)]
    with pynccl.group():
        for comm, x in zip(comms, xs, strict=True):
            assert comm.all_reduce(x) is x
    assert [x.a.tolist() for x in xs] == [[1, 3], [1, 3]]
    with pytest.raises(pynccl.InvalidArgumentError, match="is on GPU 1 and this communicator is on GPU 0"):
        comms[0].all_reduce(xs[1])


def test_default_outputs_are_made_on_the_arrays_gpu(
    fake_cuda: FakeCuda, comms: list[pynccl.Communicator]
) -> None:
    with pynccl.group():
        outs = [comm.all_gather(on(fake_cuda, comm.rank, [[comm.rank]])) for comm in comms]
    for r, out in enumerate(outs):
        assert type(out) is fake_cuda.module.ndarray
        assert (out.data.device_id, out.shape, out.a.tolist()) == (r, (2, 1), [[0], [1]])


def test_host_arrays_are_refused_with_the_way_out(comms: list[pynccl.Communicator]) -> None:
    with pytest.raises(pynccl.InvalidArgumentError, match=r"in host memory .*cupy.asarray\(x\)"):
        comms[0].all_reduce(np.ones(3))


def test_fp8_is_moved_as_bytes_since_old_gpus_refuse_even_that(
    fake_cuda: FakeCuda, alone: pynccl.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []
    original = fake_cuda.library.ncclAllGather

    def all_gather(*arguments: Any) -> int:
        sent.append(arguments[3])
        return original(*arguments)

    monkeypatch.setattr(fake_cuda.library, "ncclAllGather", all_gather)
    for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16):
        assert alone.all_gather(on(fake_cuda, 0, [1, 2], dtype)).a.tolist() == [1, 2]
    assert sent == [1, 1, 9]  # ncclUint8, ncclUint8, ncclBfloat16


class Held:
    """Work that holds a CUDA stream up until `open`."""

    def __init__(self, fake: FakeCuda, stream: Any) -> None:
        import threading

        self._opened = threading.Event()
        self._wait = pyncclHostFn_t(lambda _: bool(self._opened.wait(30)) and None)
        assert fake.library.pyncclStreamLaunchHostFunc(stream.ptr, self._wait, None) == 0

    def open(self) -> None:
        self._opened.set()


def test_a_call_runs_on_the_current_stream_of_the_arrays_library(
    fake_cuda: FakeCuda, alone: pynccl.Communicator
) -> None:
    stream = fake_cuda.current.stream = fake_cuda.stream()
    held, x = Held(fake_cuda, stream), on(fake_cuda, 0, [3.0])
    with alone.premul_sum(2, "float32") as op:
        alone.all_reduce(x, op=op)
        assert x.a.tolist() == [3]
        assert fake_cuda.recorded == 0  # CuPy's allocator itself reuses memory in the order of this stream
        held.open()
        alone.barrier()
        assert x.a.tolist() == [6]


def test_arrays_of_a_call_on_another_stream_live_until_it_has_passed(
    fake_cuda: FakeCuda, alone: pynccl.Communicator
) -> None:
    stream = fake_cuda.stream()
    held, x, out = Held(fake_cuda, stream), on(fake_cuda, 0, [1, 2]), on(fake_cuda, 0, [0, 0])
    alive = weakref.ref(x)
    alone.all_reduce(x, out, stream=stream)
    del x
    gc.collect()
    assert alive() is not None
    held.open()
    fake_cuda.synchronize(stream.ptr)
    alone.all_reduce(out, stream=stream)  # the next call on that stream lets go of what is done
    gc.collect()
    assert alive() is None
    fake_cuda.synchronize(stream.ptr)
    alone.all_reduce(out, stream=stream)
    assert len(gpu_flight._held[stream.ptr]) == 1


def test_nothing_is_recorded_in_a_captured_stream(fake_cuda: FakeCuda, alone: pynccl.Communicator) -> None:
    stream = fake_cuda.stream()
    fake_cuda.capturing.add(stream.ptr)
    alone.all_reduce(on(fake_cuda, 0, [1]), stream=stream)
    assert fake_cuda.recorded == 0


def test_arrays_of_other_libraries_are_always_held(fake_cuda: FakeCuda, alone: pynccl.Communicator) -> None:
    stream = fake_cuda.current.stream = fake_cuda.stream()
    base = np.ones(3, "f4")

    class Foreign:
        __cuda_array_interface__ = {
            "shape": (3,),
            "typestr": "<f4",
            "data": (base.ctypes.data, False),
            "version": 3,
        }

    x = Foreign()
    assert alone.all_reduce(x) is x
    assert fake_cuda.recorded == 1
    fake_cuda.synchronize(stream.ptr)


def test_prepared_calls_and_groups_use_the_stream_they_were_given(
    fake_cuda: FakeCuda, alone: pynccl.Communicator
) -> None:
    stream = fake_cuda.stream()
    held, x = Held(fake_cuda, stream), on(fake_cuda, 0, [1.0])
    with alone.premul_sum(2, "float32") as op:
        call = alone.prepare("all_reduce", x, op=op, stream=stream)
        call()
        with pynccl.group():
            call()
            alone.all_reduce(x, op=op, stream=stream)
        assert x.a.tolist() == [1]
        held.open()
        fake_cuda.synchronize(stream.ptr)
    assert x.a.tolist() == [8]


def test_a_host_stream_is_refused(fake_cuda: FakeCuda, alone: pynccl.Communicator) -> None:
    stream = pynccl.Stream()
    with pytest.raises(pynccl.InvalidArgumentError, match="pynccl.Stream is for host memory"):
        alone.all_reduce(on(fake_cuda, 0, [1]), stream=stream)
    with pytest.raises(pynccl.InvalidUsageError, match="has no host streams"):
        pynccl.Stream(fake_cuda.library)
    stream.close()


def test_objects_go_by_way_of_the_gpu(alone: pynccl.Communicator) -> None:
    assert alone.all_gather_object({"a": (1, b"x")}) == [{"a": (1, b"x")}]
    assert alone.broadcast_object([2.5]) == [2.5]


def test_memory_of_the_library_is_freed_after_the_gpus_work(
    fake_cuda: FakeCuda, alone: pynccl.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    original = fake_cuda.library.ncclMemFree

    def free(address: int) -> int:
        events.append("freed")
        return original(address)

    def synchronize(device: Any) -> None:
        events.append(f"GPU {device.number} is done")

    monkeypatch.setattr(fake_cuda.library, "ncclMemFree", free)
    monkeypatch.setattr(fake_cuda.module.cuda.Device, "synchronize", synchronize)
    x = alone.empty((4, 2), "f4")
    assert (type(x), x.shape, x.data.device_id) == (fake_cuda.module.ndarray, (4, 2), 0)
    with alone.register_window(x) as window:
        alone.put(on(fake_cuda, 0, [5.0]), 0, window, 4)
        alone.wait_signal(0)
        assert x.a[0, 1] == 5
    assert events == []
    del x, window
    gc.collect()
    assert events == ["GPU 0 is done", "freed"]


def test_a_factor_may_lie_on_the_gpu(fake_cuda: FakeCuda, alone: pynccl.Communicator) -> None:
    with alone.premul_sum(on(fake_cuda, 0, [4]), "float32") as op:
        assert alone.all_reduce(on(fake_cuda, 0, [1, 2]), op=op).a.tolist() == [4, 8]
    with pytest.raises(pynccl.InvalidArgumentError, match="must be one float64"):
        alone.premul_sum(on(fake_cuda, 0, [4]), "float64")


def test_with_a_time_limit_nccl_is_made_non_blocking_and_waited_for_here(fake_cuda: FakeCuda) -> None:
    lib = fake_cuda.library
    with pynccl.Communicator(1, pynccl.get_unique_id(lib), 0, library=lib, timeout=20) as comm:
        assert not comm._blocking
        assert comm.all_reduce(on(fake_cuda, 0, [1])).a.tolist() == [1]
    with pytest.raises(pynccl.NcclTimeoutError, match="still in progress after 0.1 s"):
        pynccl.Communicator(2, pynccl.get_unique_id(lib), 0, library=lib, timeout=0.1)


def test_the_environment_sets_the_time_limit_too(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    lib = fake_cuda.library
    monkeypatch.setenv("PYNCCL_TIMEOUT", "0.1")
    with pytest.raises(pynccl.NcclTimeoutError):
        pynccl.Communicator(2, pynccl.get_unique_id(lib), 0, library=lib)
    monkeypatch.setenv("PYNCCL_TIMEOUT", "soon")
    with pytest.raises(pynccl.InvalidArgumentError, match="PYNCCL_TIMEOUT='soon'"):
        pynccl.Communicator(1, pynccl.get_unique_id(lib), 0, library=lib)


@pytest.mark.parametrize(("local_rank", "device"), [("0", 0), ("3", 3), ("6", 2)])
def test_init_chooses_the_gpu_by_local_rank(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, local_rank: str, device: int
) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": "8",
    }.items():
        monkeypatch.setenv(name, value)
    with pynccl.init(library=fake_cuda.library):
        assert fake_cuda.current.device == device


def test_init_says_when_there_is_no_gpu(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_cuda, "devices", 0)
    with pytest.raises(pynccl.InvalidArgumentError, match="no GPU is visible; use library='host'"):
        pynccl.init(library=fake_cuda.library)

    def broken() -> int:
        raise CUDARuntimeError("cudaErrorInsufficientDriver")

    monkeypatch.setattr(fake_cuda.module.cuda.runtime, "getDeviceCount", broken)
    with pytest.raises(pynccl.UnhandledCudaError, match="cudaErrorInsufficientDriver.*library='host'"):
        pynccl.init(library=fake_cuda.library)


def test_without_cupy_a_gpu_communicator_names_the_package(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "cupy", None)
    lib = fake_cuda.library
    with pytest.raises(ImportError, match="pip install cupy-cuda12x"):
        pynccl.Communicator(1, pynccl.get_unique_id(lib), 0, library=lib)


def test_torch_tensors_are_used_in_place(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read of a tensor, on a stand-in: PyTorch is not a dependency of the tests."""
    import sys

    from pynccl import arrays

    class Tensor:
        is_sparse = is_quantized = False

        def __init__(self, base: np.ndarray, device: str = "cpu", grad: bool = False) -> None:
            self.base, self.requires_grad, self.dtype = base, grad, f"torch.{base.dtype.name}"
            self.shape = base.shape
            kind, _, index = device.partition(":")
            self.device = types.SimpleNamespace(type=kind, index=int(index) if index else None)

        def is_conj(self) -> bool:
            return False

        is_neg = is_conj

        def element_size(self) -> int:
            return self.base.itemsize

        def stride(self) -> tuple[int, ...]:
            return tuple(step // self.base.itemsize for step in self.base.strides)

        def data_ptr(self) -> int:
            return self.base.ctypes.data

        def numel(self) -> int:
            return self.base.size

    Tensor.__module__ = "torch"
    torch: Any = types.ModuleType("torch")
    torch.Tensor = Tensor
    torch.empty = lambda shape, dtype, device: Tensor(np.empty(shape, dtype.removeprefix("torch.")))
    monkeypatch.setitem(sys.modules, "torch", torch)

    base = np.arange(6, dtype="f4").reshape(2, 3)
    found = arrays.view("call", "x", Tensor(base))
    assert (found.address, found.shape, found.element.name, found.device) == (
        base.ctypes.data,
        (2, 3),
        "float32",
        None,
    )
    assert (found.c_order, found.f_order) == (True, False)
    assert arrays.view("call", "x", Tensor(base.T)).f_order
    assert arrays.view("call", "x", Tensor(base, "cuda:3")).device == 3
    assert arrays.view("call", "x", Tensor(np.ones(2, ml_dtypes.bfloat16))).element.name == "bfloat16"
    with pytest.raises(pynccl.InvalidArgumentError, match="only CPU and CUDA"):
        arrays.view("call", "x", Tensor(base, "mps:0"))
    with pynccl.init(library="host") as comm:
        made = comm.all_gather(Tensor(base))
        assert type(made) is Tensor
        assert made.base.tolist() == base.tolist()
        with pytest.raises(pynccl.InvalidArgumentError, match=r"requires grad; pass x.detach\(\)"):
            comm.all_reduce(Tensor(base, grad=True))

"""The same calls on real NCCL and CuPy, with several ranks on one GPU (NCCL_MULTI_RANK_GPU_ENABLE=1).

Run by ``make gpu-check``. Functions that ranks run are at the top level: ranks are spawned, since a process
that has used CUDA cannot be forked.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pynccl
from pynccl.testing import run_ranks

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def several_ranks_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")


def ranks(fn: Any, n: int = 2) -> list[Any]:
    return run_ranks(n, fn, library="nccl", start_method="spawn", timeout=100)


def collectives(comm: pynccl.Communicator) -> Any:
    import cupy

    r, n = comm.rank, comm.size
    mine = cupy.array([10.0 * r, 10.0 * r + 1], "f4")
    found = {
        "all_reduce": comm.all_reduce(mine.copy()),
        "max": comm.all_reduce(mine.copy(), op="max"),
        "all_gather": comm.all_gather(mine[None]),
        "scalars": comm.all_gather(cupy.array(r)),
        "reduce_scatter": comm.reduce_scatter(cupy.arange(2 * n)),
        "broadcast": comm.broadcast(mine.copy(), root=1),
        "all_to_all": comm.all_to_all(cupy.arange(n) + 10 * r),
        "gather": comm.gather(mine, root=1),
        "scatter": comm.scatter(cupy.arange(2 * n), root=0),
        "reduce": comm.reduce(mine.copy(), root=0),
    }
    comm.barrier()
    return {name: None if x is None else x.tolist() for name, x in found.items()}


def test_each_collective_on_the_gpu() -> None:
    first, second = ranks(collectives)
    common = {
        "all_reduce": [10, 12],
        "max": [10, 11],
        "all_gather": [[0, 1], [10, 11]],
        "scalars": [0, 1],
        "broadcast": [10, 11],
    }
    own = {
        "reduce_scatter": [0, 2],
        "all_to_all": [0, 10],
        "gather": None,
        "scatter": [0, 1],
        "reduce": [10, 12],
    }
    assert first == common | own
    own = {
        "reduce_scatter": [4, 6],
        "all_to_all": [1, 11],
        "gather": [0, 1, 10, 11],
        "scatter": [2, 3],
        "reduce": None,
    }
    assert second == common | own


def narrow_floats(comm: pynccl.Communicator) -> Any:
    import cupy

    found = []
    for dtype in (ml_dtypes.bfloat16, np.float16):
        host = np.array([1, 2, 3], dtype) * (comm.rank + 1)
        x = cupy.empty(3, dtype)
        x.set(host)
        comm.all_reduce(x)
        found.append(x.get().astype("f4").tolist())
    for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        x = cupy.empty(2, dtype)
        x.set(np.array([comm.rank, 2], dtype))
        found.append(comm.all_gather(x).get().astype("f4").tolist())
    return found


def test_bfloat16_is_reduced_and_fp8_moved() -> None:
    assert ranks(narrow_floats) == [[[3, 6, 9], [3, 6, 9], [0, 2, 1, 2], [0, 2, 1, 2]]] * 2


def on_streams(comm: pynccl.Communicator) -> Any:
    import cupy

    x = cupy.ones(1 << 20, "f4")
    cupy.cuda.get_current_stream().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    comm.all_reduce(x, stream=stream)
    comm.all_reduce(x, stream=stream.ptr)
    with stream:
        comm.all_reduce(x)
        y = x * 2  # ordered after the calls, on the same stream
    stream.synchronize()
    return float(y.min()), float(y.max())


def test_calls_run_on_the_stream_given_and_on_the_current_one() -> None:
    assert ranks(on_streams) == [(16, 16)] * 2


def dropped_arrays(comm: pynccl.Communicator) -> Any:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    out = cupy.zeros(1 << 22, "f4")
    cupy.cuda.get_current_stream().synchronize()
    for _ in range(20):
        x = cupy.ones(1 << 22, "f4")
        cupy.cuda.get_current_stream().synchronize()
        comm.all_reduce(x, out, stream=stream)
        del x
        cupy.full(1 << 22, 7, "f4")  # would be given x's memory, were it free
    stream.synchronize()
    return float(out.min()), float(out.max())


def test_arrays_in_flight_on_another_stream_are_kept() -> None:
    assert ranks(dropped_arrays) == [(2, 2)] * 2


def grouped(comm: pynccl.Communicator) -> Any:
    import cupy

    x, y = cupy.full(1 << 16, comm.rank), cupy.empty(1 << 16, int)
    other = 1 - comm.rank
    with pynccl.group():
        comm.send(x, other)
        comm.recv(y, other)
    with pytest.raises(ZeroDivisionError):
        with pynccl.group():
            comm.all_reduce(x)
            raise ZeroDivisionError
    total = comm.all_reduce(x)
    return int(y.min()), int(y.max()), int(total[0])


def test_groups_pass_messages_and_a_failed_one_starts_nothing() -> None:
    assert ranks(grouped) == [(1, 1, 1), (0, 0, 1)]


def prepared(comm: pynccl.Communicator) -> Any:
    import cupy

    x = cupy.ones(1000, "f8")
    step = comm.prepare("all_reduce", x)
    for _ in range(10):
        assert step() is x
    with comm.premul_sum(0.5, "float64") as half:
        comm.all_reduce(x, op=half)
    return float(x.min()), float(x.max())


def test_prepared_calls_and_premul_sums() -> None:
    assert ranks(prepared) == [(1024, 1024)] * 2


def refused(comm: pynccl.Communicator) -> Any:
    import cupy

    texts = []
    for x in (np.ones(3), cupy.ones((4, 4))[:, ::2], cupy.ones(3, bool)):
        with pytest.raises(pynccl.InvalidArgumentError) as caught:
            comm.all_reduce(x)
        texts.append(str(caught.value))
    return texts, comm.all_reduce(cupy.ones(1)).tolist()


def test_wrong_arrays_are_refused_and_the_communicator_goes_on() -> None:
    for (host, strided, boolean), total in ranks(refused):
        assert "cupy.asarray(x)" in host
        assert "not contiguous" in strided
        assert "op='max'" in boolean
        assert total == [2]


def derived(comm: pynccl.Communicator) -> Any:
    import cupy

    child = comm.split(0, key=-comm.rank, name="child")
    with child:
        rank, total = child.rank, child.all_reduce(cupy.ones(1)).tolist()
    assert comm.broadcast_object({"x": [1, b"y"]} if comm.rank == 0 else None) == {"x": [1, b"y"]}
    assert comm.all_gather_object(comm.rank) == [0, 1]
    mine = comm.empty(1 << 20, "f4")
    mine[:] = 1
    with comm.register(mine):
        comm.all_reduce(mine)
    return rank, total, float(mine.sum())


def test_split_objects_and_the_librarys_own_memory() -> None:
    assert ranks(derived) == [(1, [2], 2.0 * (1 << 20)), (0, [2], 2.0 * (1 << 20))]


def with_an_algorithm(comm: pynccl.Communicator) -> Any:
    import cupy

    if not comm.library.has("ncclAllReduceConfig"):
        with pytest.raises(pynccl.MissingFunctionError, match="2.31"):
            comm.all_reduce(cupy.ones(4), algorithm="ring")
        return [2]
    return comm.all_reduce(cupy.ones(1), algorithm="ring").tolist()


def test_an_algorithm_can_be_chosen_per_call() -> None:
    assert ranks(with_an_algorithm) == [[2], [2]]


def with_a_time_limit(rank: int, n: int, uid: pynccl.UniqueId) -> Any:
    import cupy

    comm = pynccl.Communicator(n, uid, rank, library="nccl", timeout=60, name="limited")
    with comm:
        return comm.all_reduce(cupy.ones(3)).tolist()


def alone_of_two(rank: int, n: int, uid: pynccl.UniqueId) -> Any:
    if rank == 1:
        return "never comes"
    with pytest.raises(pynccl.NcclTimeoutError, match="still in progress"):
        pynccl.Communicator(n, uid, rank, library="nccl", timeout=2)
    return "time-out"


def test_with_a_time_limit_an_init_ends_and_calls_work_as_ever() -> None:
    options: dict[str, Any] = {"comm": False, "library": "nccl", "start_method": "spawn", "timeout": 100}
    assert run_ranks(2, with_a_time_limit, **options) == [[2, 2, 2]] * 2
    assert run_ranks(2, alone_of_two, **options) == ["time-out", "never comes"]


def test_several_ranks_in_one_thread() -> None:
    import cupy

    uid = pynccl.get_unique_id("nccl")
    with pynccl.group():
        comms = [pynccl.Communicator(2, uid, rank, library="nccl") for rank in range(2)]
    xs = [cupy.full(4, comm.rank + 1.0) for comm in comms]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in comms]
    cupy.cuda.Device().synchronize()
    with pynccl.group():
        for comm, x, stream in zip(comms, xs, streams, strict=True):
            comm.all_reduce(x, stream=stream)
    for stream in streams:
        stream.synchronize()
    assert [x.tolist() for x in xs] == [[3.0] * 4] * 2
    for comm in comms:
        comm.destroy()


def test_a_captured_call_is_replayed() -> None:
    import cupy

    with pynccl.Communicator(1, pynccl.get_unique_id("nccl"), 0, library="nccl") as comm:
        x = cupy.ones(16, "f4")
        stream = cupy.cuda.Stream(non_blocking=True)
        comm.all_reduce(x, stream=stream)  # connects, outside the capture
        stream.synchronize()
        with comm.premul_sum(2, "float32") as double, stream:
            stream.begin_capture()
            comm.all_reduce(x, op=double, stream=stream)
            graph = stream.end_capture()
            for _ in range(3):
                graph.launch(stream)
            stream.synchronize()
        assert x.tolist() == [8.0] * 16

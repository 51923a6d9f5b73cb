"""How communicators begin: ids, init, time limits, waiting, and communicators made from communicators."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from communicator_ranks import N, ranks  # type: ignore[import-not-found]

import pynccl
from pynccl.abi.enums import Result
from pynccl.testing import run_ranks

# --- ids, init and waiting ----------------------------------------------------------------------------------


def test_a_unique_id_travels_as_bytes_and_by_pickle() -> None:
    uid = pynccl.get_unique_id("host")
    assert len(bytes(uid)) == 128
    assert pynccl.UniqueId.from_bytes(bytes(uid)) == uid == pickle.loads(pickle.dumps(uid))
    assert pynccl.get_unique_id("host") != uid
    with pytest.raises(TypeError, match="str is not bytes"):
        pynccl.UniqueId("text")  # type: ignore[arg-type]
    with pytest.raises(pynccl.InvalidArgumentError, match="5 bytes; a unique id has 128"):
        pynccl.UniqueId.from_bytes(b"short")


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((0, 0), {}, pynccl.InvalidArgumentError, "nranks=0"),
        ((2, 2), {}, pynccl.InvalidArgumentError, "rank=2 is not a rank of this communicator; use 0 to 1"),
        ((1, 0), {"timeout": 0}, pynccl.InvalidArgumentError, "timeout=0"),
        ((1, 0), {"timeout": -1}, pynccl.InvalidArgumentError, "timeout=-1"),
        ((1, 0), {"timeout": float("nan")}, pynccl.InvalidArgumentError, "timeout=nan"),
        ((1, 0), {"timeout": "soon"}, TypeError, "timeout='soon'"),
        ((1.0, 0), {}, TypeError, "nranks must be an integer, not float"),
        ((1, "0"), {}, TypeError, "rank must be an integer, not str"),
        ((1, 0), {"config": 5}, TypeError, "config=5 must be a dict"),
        ((1, 0), {"name": 5}, TypeError, "commName"),
        ((1, 0), {"config": {"colour": 1}}, TypeError, "colour"),
        ((1, 0), {"library": "nonsense"}, pynccl.InvalidArgumentError, "nonsense"),
    ],
)
def test_wrong_arguments_of_init_are_refused(arguments: Any, options: Any, error: Any, match: str) -> None:
    nranks, rank = arguments
    with pytest.raises(error, match=match):
        pynccl.Communicator(nranks, pynccl.get_unique_id("host"), rank, **{"library": "host", **options})


@pytest.mark.parametrize("value", ["abc", "-1", "0", "nan", "5x"])
@pytest.mark.parametrize("timeout", [None, 5])
def test_a_bad_time_limit_in_the_environment_is_named_wherever_it_is_read(
    monkeypatch: pytest.MonkeyPatch, value: str, timeout: float | None
) -> None:
    uid = pynccl.get_unique_id("host")
    monkeypatch.setenv("PYNCCL_TIMEOUT", value)
    calls: dict[str, Callable[[], Any]] = {
        "init": lambda: pynccl.init(library="host", timeout=timeout),
        "Communicator": lambda: pynccl.Communicator(1, uid, 0, library="host", timeout=timeout),
        "Stream": pynccl.Stream,
    }
    for call, make in calls.items():
        with pytest.raises(pynccl.InvalidArgumentError, match=rf"^{call}: PYNCCL_TIMEOUT='{value}' must be"):
            make()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "5"])
def test_a_bad_time_limit_of_init_is_named(timeout: Any) -> None:
    with pytest.raises((TypeError, pynccl.InvalidArgumentError), match=f"^init: timeout={timeout!r} must be"):
        pynccl.init(library="host", timeout=timeout)


def test_a_wait_without_end_is_possible_and_a_bad_limit_of_it_is_refused() -> None:
    uid = pynccl.get_unique_id("host")
    with pynccl.Communicator(1, uid, 0, library="host", config={"blocking": 0}, timeout=float("inf")) as comm:
        comm.wait(float("inf"))
        comm.wait(0)
        for bad in (float("nan"), -1, "1"):
            with pytest.raises((TypeError, pynccl.InvalidArgumentError), match=r"^wait: timeout="):
                comm.wait(bad)  # type: ignore[arg-type]


def test_waiting_no_time_for_a_communicator_looks_once() -> None:
    uid = pynccl.get_unique_id("host")
    comm = pynccl.Communicator(2, uid, 0, library="host", config={"blocking": 0})
    with pytest.raises(pynccl.NcclTimeoutError, match="still in progress after 0 s"):
        comm.wait(0)
    comm.abort()


def test_init_with_no_launcher_is_a_job_of_one() -> None:
    with pynccl.init(library="host", name="single") as comm:
        assert (comm.rank, comm.size, comm.name, comm.device) == (0, 1, "single", None)
        assert comm.all_gather(np.array([4])).tolist() == [4]


def test_init_meets_at_a_file(tmp_path: Any) -> None:
    def rank(r, n, uid):
        with pynccl.init(f"file://{tmp_path}/meet", rank=r, size=n, library="host", timeout=20) as comm:
            return comm.rank, comm.all_reduce(np.ones(1)).tolist()

    assert run_ranks(N, rank, comm=False) == [(r, [3]) for r in range(N)]


def test_init_takes_an_id_that_came_some_other_way() -> None:
    def rank(r, n, uid):
        with pynccl.init(unique_id=bytes(uid), rank=r, size=n, library="host") as comm:
            return comm.all_reduce(np.ones(1)).tolist()

    assert run_ranks(N, rank, comm=False, library="host") == [[3]] * N


def test_init_says_when_ranks_use_different_libraries(tmp_path: Any) -> None:
    def rank(r, n, uid):
        from pynccl.abi import load

        lib = load("host")
        if r == 1:
            lib.version = 20000
        try:
            pynccl.init(f"file://{tmp_path}/meet", rank=r, size=n, library=lib, timeout=1).abort()
        except pynccl.NcclError as error:
            return str(error)

    first, second = run_ranks(2, rank, comm=False)
    assert "rank 1 has library host 20000" in second
    assert "set PYNCCL_LIBRARY" in second
    assert "rank 1" in first  # which never came


def test_a_non_blocking_communicator_is_waited_for() -> None:
    def rank(r, n, uid):
        comm = pynccl.Communicator(n, uid, r, library="host", config={"blocking": False}, name="patient")
        with comm:
            comm.wait(20)
            assert comm.async_error() == Result.SUCCESS
            x = comm.all_reduce(np.ones(2))
            comm.wait(20)
            child = comm.split(0)
            child.wait(20)
            y = child.all_reduce(np.ones(1))
            child.wait(20)
            child.destroy()
            return comm.rank, comm.size, x.tolist(), y.tolist()

    assert run_ranks(N, rank, comm=False, library="host") == [(r, N, [3, 3], [3]) for r in range(N)]


def test_a_non_blocking_communicator_that_is_not_ready_says_to_wait() -> None:
    uid = pynccl.get_unique_id("host")
    comm = pynccl.Communicator(2, uid, 0, library="host", config={"blocking": False}, timeout=20)
    assert comm.async_error() == Result.IN_PROGRESS  # rank 1 is not there
    with pytest.raises(pynccl.InProgressError, match=r"call comm.wait\(timeout\) first"):
        comm.barrier()
    with pytest.raises(pynccl.NcclTimeoutError, match="still in progress after 0.05 s"):
        comm.wait(0.05)
    comm.abort()
    assert comm.closed


def test_nccl_without_a_gpu_is_a_cuda_error() -> None:
    with pytest.raises(pynccl.UnhandledCudaError, match="ncclCommInitRank"):
        pynccl.Communicator(1, pynccl.get_unique_id("nccl"), 0, library="nccl")
    with pytest.raises(pynccl.UnhandledCudaError, match="library='host'"):
        pynccl.init(library="nccl")


def test_importing_pynccl_imports_no_cupy() -> None:
    code = "import sys, pynccl; pynccl.init(library='host').destroy(); assert 'cupy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- communicators from communicators -----------------------------------------------------------------------


def test_shrink_leaves_the_ranks_that_stay_in_order() -> None:
    def rank(comm):
        if comm.rank == 1:
            return None
        with comm.shrink([1], name="small") as small:
            return small.rank, small.size, small.all_gather(np.array(comm.rank)).tolist()

    assert ranks(rank) == [(0, 2, [0, 2]), None, (1, 2, [0, 2])]


@pytest.mark.parametrize("given", [lambda uid: uid, bytes], ids=["id", "bytes"])
def test_grow_takes_a_newcomer_in(given: Any) -> None:
    def rank(comm, box):
        if comm.rank == 0:
            box["id"] = given(comm.growth_id())

            def newcomer():
                with pynccl.Communicator.join(N + 1, box["id"], N, library="host", name="new") as grown:
                    box["new"] = grown.rank, grown.size, grown.all_gather(np.array(grown.rank)).tolist()

            thread = threading.Thread(target=newcomer)
            thread.start()
        with comm.grow(N + 1, box["id"] if comm.rank == 0 else None) as grown:
            found = grown.rank, grown.size, grown.all_gather(np.array(grown.rank)).tolist()
        if comm.rank == 0:
            thread.join()
        return found

    box: dict[str, Any] = {}
    found = run_ranks(N, rank, box, library="host", processes=False)
    assert [*found, box["new"]] == [(r, 4, [0, 1, 2, 3]) for r in range(4)]

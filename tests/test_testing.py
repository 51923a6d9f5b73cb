"""`run_ranks` for users' tests: results, failures, hangs, threads; and the pytest marker and fixture."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pynccl
from pynccl.testing import RankError, run_ranks

REPO = Path(__file__).resolve().parent.parent
BOTH = pytest.mark.parametrize("processes", [True, False], ids=["processes", "threads"])


def rank_of(rank: int, n: int, unique_id: object) -> int:
    """Importable, so that a spawned process finds it."""
    return rank


def children() -> set[int]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    """After each test: the processes, threads and descriptors from before it."""
    resource_tracker.ensure_running()  # Python's own, one a process, which spawning needs
    before = children(), len(os.listdir("/proc/self/fd"))
    yield
    assert (children(), len(os.listdir("/proc/self/fd"))) == before
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")] == []


@BOTH
@pytest.mark.parametrize("n", [1, 2, 4])
def test_every_rank_has_a_communicator_and_gives_a_result(n: int, processes: bool) -> None:
    def rank(comm: Any, factor: float) -> tuple[int, int, float]:
        x = np.full(3, factor * (comm.rank + 1))
        comm.all_reduce(x)
        return comm.rank, comm.size, float(x[0])

    total = 2.0 * n * (n + 1) / 2
    results = run_ranks(n, rank, 2.0, processes=processes, library="host")
    assert results == [(r, n, total) for r in range(n)]


@BOTH
def test_without_a_communicator_ranks_get_the_unique_id(processes: bool) -> None:
    results = run_ranks(
        3, lambda rank, n, uid, x: (rank, n, bytes(uid), x), "x", comm=False, processes=processes
    )
    assert results == [(r, 3, results[0][2], "x") for r in range(3)]
    assert len(results[0][2]) == 128


def test_spawned_processes_run_an_importable_function() -> None:
    assert run_ranks(2, rank_of, comm=False, start_method="spawn") == [0, 1]


def test_a_large_result_passes_whole() -> None:
    results = run_ranks(2, lambda rank, n, uid: np.full(1 << 20, rank), comm=False)
    assert [int(x.sum()) for x in results] == [0, 1 << 20]


def test_a_result_in_the_communicators_memory_outlives_it() -> None:
    def rank(comm: Any) -> Any:
        x = comm.empty(5, "f4")
        x[:] = comm.rank
        return x

    assert [x.tolist() for x in run_ranks(2, rank, library="host")] == [[0.0] * 5, [1.0] * 5]


@BOTH
def test_all_failing_ranks_tracebacks_are_in_the_error(processes: bool) -> None:
    def rank(rank: int, n: int, uid: object) -> int:
        if rank != 1:
            raise ValueError(f"boom {rank}")
        return rank

    with pytest.raises(RankError) as caught:
        run_ranks(3, rank, comm=False, processes=processes)
    error = caught.value
    assert sorted(error.failures) == [0, 2] and error.ended == ()
    assert str(error).startswith("2 of 3 ranks failed\n--- rank 0 raised ValueError: boom 0\n")
    assert str(error).count('raise ValueError(f"boom {rank}")') == 2
    assert "testing.py" not in str(error).replace("test_testing.py", "")
    assert isinstance(error.failures[2].exception, ValueError)


@BOTH
def test_the_others_are_stopped_when_one_fails(processes: bool) -> None:
    """Rank 1 waits in the library, where only the end of its process or communicator reaches it."""

    def rank(comm: Any) -> None:
        if comm.rank == 0:
            raise ValueError("boom")
        comm.barrier()

    began = time.monotonic()
    with pytest.raises(RankError, match="rank 0 raised ValueError: boom"):
        run_ranks(2, rank, library="host", processes=processes)
    assert time.monotonic() - began < 20


def test_ranks_that_had_to_be_stopped_are_named() -> None:
    def rank(rank: int, n: int, uid: object) -> None:
        if rank == 1:
            raise ValueError("boom")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(100)

    with pytest.raises(RankError, match=r"--- ranks 0, 2 had not finished and had to be stopped") as caught:
        run_ranks(3, rank, comm=False)
    assert caught.value.ended == (0, 2)


@pytest.mark.parametrize(
    ("death", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 was killed by signal 9 (SIGKILL)"),
        (lambda: os.kill(os.getpid(), signal.SIGRTMIN + 3), "(SIGRTMIN+3)"),
        (lambda: os._exit(7), "rank 1 ended with exit status 7 and without a result"),
        (lambda: sys.exit(7), "rank 1 raised SystemExit: 7"),
        (lambda: threading.Lock(), "rank 1 raised TypeError: the result, lock, cannot be pickled"),
    ],
)
def test_a_rank_that_ends_without_a_result_is_reported(death: Callable[[], Any], words: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, lambda rank, n, uid: death() if rank == 1 else None, comm=False)
    assert words in str(caught.value)


def test_an_exception_that_cannot_be_pickled_is_told_in_words() -> None:
    class Local(Exception):
        def __init__(self, a: int, b: int):
            super().__init__(f"{a} and {b}")

    def rank(rank: int, n: int, uid: object) -> None:
        raise Local(1, 2)

    with pytest.raises(RankError, match="Local: 1 and 2") as caught:
        run_ranks(1, rank, comm=False)
    assert caught.value.failures[0].exception is None


@BOTH
def test_a_hang_is_a_failure_that_shows_where(processes: bool) -> None:
    released = threading.Event()

    def rank(rank: int, n: int, uid: object) -> None:
        if rank == 1:
            released.wait(100)

    with pytest.raises(RankError) as caught:
        run_ranks(3, rank, comm=False, timeout=1, processes=processes)
    released.set()
    for thread in threading.enumerate():
        if thread.name.startswith("rank "):
            thread.join(10)
    assert sorted(caught.value.failures) == [1]
    assert "rank 1 still ran after 1 s, in:" in str(caught.value)
    assert (
        "test_testing.py" in caught.value.failures[1].details and "wait" in caught.value.failures[1].details
    )


@BOTH
def test_a_hang_in_a_collective_is_ended(processes: bool) -> None:
    def rank(comm: Any) -> None:
        if comm.rank == 0:
            comm.barrier()

    began = time.monotonic()
    with pytest.raises(RankError, match="rank 0"):
        run_ranks(2, rank, library="host", timeout=2, processes=processes)
    assert time.monotonic() - began < 20


def test_a_stopped_process_is_ended_too() -> None:
    with pytest.raises(RankError, match="it did not answer"):
        run_ranks(1, lambda rank, n, uid: os.kill(os.getpid(), signal.SIGSTOP), comm=False, timeout=0.5)


def test_what_a_rank_started_is_ended_with_it(tmp_path: Path) -> None:
    def rank(rank: int, n: int, uid: object) -> int:
        return subprocess.Popen(["sleep", "100"]).pid

    (pid,) = run_ranks(1, rank, comm=False)
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":  # its parent is gone, and nobody else has waited for it yet
            return
        time.sleep(0.01)  # a poll, bounded by the loop
    raise AssertionError(f"process {pid} still runs")


def test_ctrl_c_ends_the_ranks() -> None:
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_ranks(2, lambda rank, n, uid: time.sleep(100), comm=False)
    timer.join()
    assert time.monotonic() - began < 20


def test_ranks_die_with_a_test_process_that_is_killed() -> None:
    script = """
import os, time
from pynccl.testing import run_ranks
def rank(rank, n, uid):
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(100)
run_ranks(2, rank, comm=False)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(REPO)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        pids = [process.stdout.readline(), process.stdout.readline()]
        process.kill()
        process.wait()
        assert process.stdout.read() == ""  # its end: no rank holds the pipe any more
    assert all(int(pid) > 0 for pid in pids)


def test_what_ranks_print_is_not_lost_or_doubled(capfd: pytest.CaptureFixture[str]) -> None:
    print("before")
    run_ranks(2, lambda rank, n, uid: print("from a rank"), comm=False)
    assert sorted(capfd.readouterr().out.split("\n")) == ["", "before", "from a rank", "from a rank"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: run_ranks(0, rank_of), "n=0"),
        (lambda: run_ranks(2, rank_of, timeout=0), "timeout=0"),
        (lambda: run_ranks(2, rank_of, start_method="thread"), "'thread'"),
        (lambda: run_ranks(2, 3), "fn=3"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        call()


# The pytest plugin, in a pytest of its own


def pytest_on(tmp_path: Path, tests: str) -> str:
    (tmp_path / "test_it.py").write_text(f"import os, pytest\nimport numpy as np\n{tests}")
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "pynccl.pytest_plugin", "-p", "no:cacheprovider", "-v", "-ra"]
        + ["--strict-markers", f"--rootdir={tmp_path}", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=100,
    )
    return process.stdout + process.stderr


def test_a_marked_test_runs_on_every_rank_of_every_size(tmp_path: Path) -> None:
    tests = """
@pytest.mark.ranks(2, 3, library="host")
def test_sum(comm, tmp_path):
    x = np.ones(4)
    comm.all_reduce(x)
    assert (x == comm.size).all()
    (tmp_path / f"{comm.rank}").touch()
    comm.barrier()
    assert len(list(tmp_path.iterdir())) == comm.size  # one folder for all ranks

class TestInAClass:
    @pytest.mark.ranks(2, library="host", processes=False)
    def test_threads(self, comm, request):
        assert comm.size == 2

def test_fixture(ranks):
    assert ranks(2, lambda comm: comm.rank, library="host") == [0, 1]
"""
    out = pytest_on(tmp_path, tests)
    assert "test_sum[2 ranks] PASSED" in out and "test_sum[3 ranks] PASSED" in out
    assert "4 passed" in out


def test_failures_and_skips_of_ranks_are_the_tests(tmp_path: Path) -> None:
    tests = """
@pytest.mark.ranks(2, library="host")
def test_fails(comm):
    assert comm.rank == 0, "only rank 1 says this"

@pytest.mark.ranks(2, library="host")
def test_skips(comm):
    pytest.skip("all ranks skip")

def test_unmarked(comm):
    pass
"""
    out = pytest_on(tmp_path, tests)
    assert "1 of 2 ranks failed" in out and "only rank 1 says this" in out
    assert "all ranks skip" in out
    assert "the comm fixture needs @pytest.mark.ranks(n)" in out
    assert "1 failed, 1 skipped, 1 error" in out


def test_a_wrong_marker_is_named(tmp_path: Path) -> None:
    assert "does not take the comm fixture" in pytest_on(
        tmp_path, "@pytest.mark.ranks(2)\ndef test_x(): pass"
    )
    assert "needs a number of ranks" in pytest_on(tmp_path, "@pytest.mark.ranks\ndef test_x(comm): pass")


@BOTH
def test_causes_are_told_before_consequences(processes: bool) -> None:
    def rank(comm: Any) -> None:
        if comm.rank == 1:
            raise KeyError("the cause")
        comm.all_reduce(np.ones(3))

    with pytest.raises(RankError) as caught:
        run_ranks(2, rank, processes=processes, library="host")
    text = str(caught.value)
    assert 0 < text.index("--- rank 1 raised KeyError") < text.index("--- rank 0 raised")
    assert isinstance(caught.value.failures[0].exception, pynccl.RemoteError)

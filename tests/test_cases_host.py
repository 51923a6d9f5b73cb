"""What people reported of NCCL, Gloo and MPI, on the host library: ranks that die, hang, abort, never come
or are too many.

Every case must end in the right bits or in an error that names the culprit, within the deadline, and leave
nothing behind.
"""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import pynccl
from pynccl.testing import RankError, run_ranks


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def test_more_than_2_to_the_31_elements_and_bytes() -> None:
    count = 2**31 + 5

    def rank(comm):
        x = np.full(count, comm.rank + 1, np.uint8)
        x[-1] = 10 * (comm.rank + 1)
        comm.all_reduce(x)
        return int(x[0]), int(x[2**31]), int(x[-1]), int(x.min()), int(x.max())

    assert run_ranks(2, rank, timeout=120, library="host") == [(3, 3, 30, 3, 30)] * 2


def test_abort_from_another_thread_unblocks_a_waiting_collective() -> None:
    def rank(comm):
        if comm.rank == 1:
            return "never calls"
        waits = threading.Event()
        errors: list[BaseException] = []

        def wait_for_ever():
            waits.set()
            try:
                comm.all_reduce(np.ones(4))
            except pynccl.NcclError as error:
                errors.append(error)

        waiter = threading.Thread(target=wait_for_ever)
        waiter.start()
        waits.wait()
        comm.abort()
        waiter.join(20)
        assert not waiter.is_alive()
        assert len(errors) == 1 and "abort" in str(errors[0])
        return "aborted"

    assert run_ranks(2, rank, library="host", processes=True) == ["aborted", "never calls"]


def test_a_peer_learns_that_a_rank_has_aborted() -> None:
    def rank(comm):
        if comm.rank == 0:
            comm.abort()
            return None
        with pytest.raises(pynccl.RemoteError, match="rank 0 has aborted") as caught:
            comm.all_reduce(np.ones(4))
        comm.abort()
        return str(caught.value)

    assert "all_reduce" in run_ranks(2, rank, library="host")[1]


def test_destroy_with_work_in_flight_waits_for_it() -> None:
    def rank(comm):
        x = np.full(1 << 20, comm.rank + 1.0, np.float32)
        stream = pynccl.Stream()
        for _ in range(5):
            comm.all_reduce(x, stream=stream)
        comm.destroy()
        stream.synchronize()
        return float(x[0]), float(x[-1])

    assert run_ranks(2, rank, library="host") == [(48.0, 48.0)] * 2


def test_kill_9_of_a_rank_in_a_collective_is_an_error_at_the_others_that_names_it() -> None:
    def rank(comm):
        x = np.ones(1000)
        comm.all_reduce(x)
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(pynccl.RemoteError, match=r"rank 1 \(process \d+\) is gone"):
            comm.all_reduce(x)
        assert time.monotonic() - start < 10
        with pytest.raises(pynccl.RemoteError, match="broken since an earlier failure .*is gone"):
            comm.all_reduce(x)  # from now on at once
        comm.abort()
        return "named it"

    with pytest.raises(RankError) as caught:
        run_ranks(3, rank, library="host")
    assert set(caught.value.failures) == {1}, caught.value  # the killed rank alone; the others returned


def test_kill_9_of_a_rank_during_a_long_send_is_an_error_at_its_peer() -> None:
    def rank(comm):
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(pynccl.RemoteError, match=r"rank 1 \(process \d+\) is gone"):
            comm.send(np.ones(1 << 20), 1)
        comm.abort()

    with pytest.raises(RankError) as caught:
        run_ranks(2, rank, library="host")
    assert set(caught.value.failures) == {1}, caught.value


def test_a_root_that_runs_ahead_of_a_killed_rank_gets_the_error_before_long() -> None:
    def rank(comm):
        x = np.ones(2)
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(pynccl.RemoteError, match=r"rank 1 \(process \d+\) is gone"):
            for _ in range(33):
                comm.broadcast(x)
        comm.abort()
        return "named it"

    with pytest.raises(RankError) as caught:
        run_ranks(2, rank, library="host")
    assert set(caught.value.failures) == {1}, caught.value


def test_what_a_root_gave_before_it_was_killed_arrives() -> None:
    def rank(comm):
        meeting = comm.split(0)  # the others begin when the root has given all
        x = np.full(100, -1.0)
        if comm.rank == 0:
            for k in range(20):
                comm.broadcast(np.full(100, float(k)))
            meeting.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        meeting.barrier()
        for k in range(20):
            comm.broadcast(x)
            assert (x == k).all()
        comm.abort()
        meeting.abort()
        return "all of it"

    with pytest.raises(RankError) as caught:
        run_ranks(3, rank, library="host")
    assert set(caught.value.failures) == {0}, caught.value


def test_a_rank_that_finishes_first_and_leaves_is_no_error() -> None:
    def rank(comm):
        x = np.full(300_000, comm.rank + 1.0)
        comm.all_reduce(x)
        if comm.rank == 0:
            comm.destroy()
            return float(x[-1])
        return float(x[-1])

    for _ in range(20):
        assert run_ranks(3, rank, library="host") == [6.0] * 3


def test_kill_9_of_all_ranks_leaves_nothing_in_dev_shm() -> None:
    before = shared_memory()

    def rank(comm):
        comm.all_reduce(comm.empty(100_000, np.float32))
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError) as caught:
        run_ranks(3, rank, library="host")
    assert set(caught.value.failures) == {0, 1, 2}
    assert shared_memory() == before


def test_kill_9_in_the_middle_of_init_leaves_nothing_and_is_an_error_at_the_others() -> None:
    before = shared_memory()

    def rank(rank, n, uid):
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(pynccl.NcclTimeoutError, match="rank 2 of 3"):
            pynccl.Communicator(n, uid, rank, library="host", timeout=1.0)

    with pytest.raises(RankError) as caught:
        run_ranks(3, rank, comm=False, library="host")
    assert set(caught.value.failures) == {2}, caught.value
    assert shared_memory() == before


@pytest.mark.parametrize("missing", [0, 1, 3])
def test_a_peer_that_never_arrives_at_init_is_a_time_out_that_names_it(missing: int) -> None:
    def rank(rank, n, uid):
        if rank == missing:
            return
        start = time.monotonic()
        with pytest.raises(pynccl.NcclTimeoutError, match=rf"rank {missing} of 4 has not called it"):
            pynccl.Communicator(n, uid, rank, library="host", timeout=0.5)
        assert time.monotonic() - start < 10

    run_ranks(4, rank, comm=False, library="host")


def test_ranks_that_disagree_on_the_number_of_ranks_all_hear_of_it() -> None:
    def rank(rank, n, uid):
        with pytest.raises(pynccl.InvalidArgumentError, match="rank 1 was given 3 ranks, rank 0 was given 2"):
            pynccl.Communicator(n + rank, uid, rank, library="host", timeout=20)

    run_ranks(2, rank, comm=False, library="host")


def test_shared_memory_that_cannot_be_had_is_an_error_with_the_size_needed() -> None:
    def rank(rank, n, uid):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        expected = pynccl.NcclSystemError if rank == 0 else pynccl.RemoteError
        with pytest.raises(
            expected, match="MiB.*raise the file size limit" if rank == 0 else "rank 0"
        ) as caught:
            pynccl.Communicator(n, uid, rank, library="host", timeout=20)
        return str(caught.value)

    run_ranks(2, rank, comm=False, library="host")


def test_memory_that_the_machine_does_not_have_is_refused_before_anything_is_killed() -> None:
    def rank(comm):
        with pytest.raises(pynccl.NcclSystemError, match="MiB available"):
            comm.empty(60 << 30, np.uint8)
        x = comm.empty(1000, np.float32)
        x[:] = 1
        comm.all_reduce(x)
        return float(x.sum())

    available = (
        int(next(line for line in open("/proc/meminfo") if line.startswith("MemAvailable")).split()[1]) << 10
    )
    assert available < 60 << 30, "this test needs a machine with less than 60 GiB free"
    assert run_ranks(2, rank, library="host") == [2000.0, 2000.0]


def test_a_tiny_dev_shm_as_in_docker_does_not_matter() -> None:
    """Docker gives a container 64 MB of /dev/shm; segments do not live there, so even 64 KB will do."""
    script = (
        "import numpy as np\nfrom pynccl.testing import run_ranks\n"
        "def rank(comm):\n    x = np.ones(3_000_000, 'f4')\n    comm.all_reduce(x)\n    return float(x[-1])\n"
        "print(run_ranks(4, rank, library='host'))\n"
    )
    mount = "mount -t tmpfs -o size=64k none /dev/shm && exec "
    command = [
        "unshare",
        "--mount",
        "--map-root-user",
        "sh",
        "-c",
        mount + f"{shlex.quote(sys.executable)} -c {shlex.quote(script)}",
    ]
    assert shutil.which("unshare"), "util-linux is everywhere"
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    if "unshare failed" in done.stderr or "mount:" in done.stderr:
        pytest.fail(f"no namespace to be had here: {done.stderr}")
    assert done.stdout.strip() == "[4.0, 4.0, 4.0, 4.0]", done.stderr


def test_init_from_several_threads_of_one_process() -> None:
    def rank(comm):
        x = np.full(50_000, comm.rank, np.float64)
        comm.all_reduce(x)
        return float(x[0])

    assert run_ranks(4, rank, processes=False, library="host") == [6.0] * 4


def test_the_same_bits_on_all_ranks_in_every_run_and_in_every_kind_of_memory() -> None:
    count = 200_003

    def rank(comm):
        mine = np.random.default_rng(comm.rank).standard_normal(count).astype(np.float32) * 10.0 ** (
            comm.rank * 3
        )
        results = []
        for _ in range(10):
            results.append(comm.all_reduce(mine, out=np.empty_like(mine)).tobytes())
        mapped = comm.empty(count, np.float32)
        mapped[:] = mine
        results.append(comm.all_reduce(mapped).tobytes())
        return len(set(results)), results[0]

    outcomes = run_ranks(3, rank, library="host")
    assert [kinds for kinds, _ in outcomes] == [1, 1, 1]
    assert len({bits for _, bits in outcomes}) == 1


def test_eight_communicators_of_one_process_used_from_eight_threads_at_once() -> None:
    def rank(rank, n, uids):
        totals: list[float] = [0.0] * len(uids)

        def use(i: int) -> None:
            with pynccl.Communicator(n, uids[i], rank, library="host") as comm:
                for k in range(30):
                    x = np.full(1 + 997 * (k % 5) * i, i + rank + k, np.float64)
                    comm.all_reduce(x)
                    assert x.min() == x.max() == 2 * (i + k) + 1
                    totals[i] += float(x[0])

        threads = [threading.Thread(target=use, args=(i,)) for i in range(len(uids))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return totals

    uids = [pynccl.get_unique_id("host") for _ in range(8)]
    want = [float(sum(2 * (i + k) + 1 for k in range(30))) for i in range(8)]
    assert run_ranks(2, lambda r, n, _: rank(r, n, uids), comm=False, library="host") == [want, want]


def test_eight_ranks_on_two_cores_make_progress() -> None:
    def rank(comm):
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:2]))
        total = 0.0
        for k in range(200):
            x = np.full(1 + 500 * (k % 3), comm.rank + k, np.float32)
            comm.all_reduce(x)
            total += float(x[-1])
        return total

    want = float(sum(28 + 8 * k for k in range(200)))
    assert run_ranks(8, rank, library="host") == [want] * 8


@pytest.mark.parametrize("call", ["split", "register_window", "grow"])
def test_a_call_that_makes_something_notices_a_peer_that_was_killed(call: str) -> None:
    def rank(comm):
        window = comm.empty(4096, np.uint8)
        comm.barrier()
        if comm.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(pynccl.RemoteError, match=r"rank 0 \(process \d+\) is gone"):
            {
                "split": lambda: comm.split(0),
                "register_window": lambda: comm.register_window(window),
                "grow": lambda: comm.grow(4),
            }[call]()
        assert time.monotonic() - start < 10
        comm.abort()

    with pytest.raises(RankError) as caught:
        run_ranks(3, rank, library="host")
    assert set(caught.value.failures) == {0}, caught.value


def test_ctrl_c_at_the_end_of_a_group_of_mixed_streams_ends_its_work_too() -> None:
    """Half of the group is queued, half is waited for: then nothing may touch the arrays again."""

    def rank(comm):
        x, y = np.full(1000, 1.0), np.full(1000, 1.0)
        if comm.rank == 1:
            with pytest.raises(pynccl.RemoteError, match="rank 0 reported: .*interrupted"):
                comm.recv(x, 0)
            comm.abort()
            return "told"
        stream = pynccl.Stream()
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt), pynccl.group():
            comm.all_reduce(x, stream=stream)
            comm.all_reduce(y)
        with pytest.raises(pynccl.NcclError):
            stream.synchronize()  # its half has ended, with an error
        stream.close()
        comm.abort()
        return "interrupted"

    assert run_ranks(2, rank, library="host") == ["interrupted", "told"]


def test_a_put_that_is_queued_outlives_its_window() -> None:
    def rank(comm):
        memory = comm.empty(1 << 16, np.uint8)
        window = comm.register_window(memory)
        comm.barrier()
        if comm.rank == 0:
            go = threading.Event()
            stream = pynccl.Stream()
            stream.call(go.wait)
            comm.put(np.full(1 << 16, 5, np.uint8), 1, window, stream=stream)
            window.destroy()
            go.set()
            stream.synchronize()
            stream.close()
        else:
            comm.wait_signal(0)
        comm.barrier()
        return int(memory.sum())

    assert run_ranks(2, rank, library="host") == [0, 5 << 16]


def test_memory_that_a_late_peer_may_still_write_to_is_not_given_out_again() -> None:
    """Rank 1 has been told where rank 0's array lies, and comes when rank 0 has given up and freed it."""

    def rank(rank, n, uid):
        comm = pynccl.Communicator(n, uid, rank, library="host", timeout=0.3 if rank == 0 else 30)
        x = comm.empty(100_000, np.float32)
        if rank == 1:
            with pytest.raises(pynccl.RemoteError):
                while True:
                    comm.recv(np.empty(1), 0)  # until rank 0 has given up
            comm.abort()
            return 0
        with pytest.raises(pynccl.NcclTimeoutError, match="rank 0 waited"):
            comm.all_reduce(x)
        comm.abort()
        before = x.ctypes.data
        del x
        with pynccl.Communicator(1, pynccl.get_unique_id("host"), 0, library="host") as alone:
            return abs(alone.empty(100_000, np.float32).ctypes.data - before)

    apart, _ = run_ranks(2, rank, comm=False, library="host")
    assert apart >= 400_000

"""What people reported of NCCL, Gloo and MPI, in Python: each ends in the right bits or in a named error.

The cases that need the host library's insides (dead ranks, memory, many ranks) are in test_cases_host.py.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

import pynccl
from pynccl.testing import run_ranks


def error_of(call: Any) -> str:
    """The message of the NcclError that the call ends with."""
    try:
        call()
    except pynccl.NcclError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def errors(rank: Any, n: int = 2) -> list[str]:
    """What each rank's ``rank(comm)`` fails with; the communicators are aborted afterwards."""

    def one(comm):
        text = error_of(lambda: rank(comm))
        comm.abort()
        return text

    return run_ranks(n, one, library="host", timeout=30)


# 1
def test_different_counts_are_an_error_on_all_ranks_naming_rank_and_both_counts() -> None:
    for text in errors(lambda comm: comm.all_reduce(np.ones(3 + (comm.rank == 2))), n=3):
        assert text.startswith("InvalidUsageError: all_reduce (ncclAllReduce): ")
        assert "rank 2" in text
        assert "count=3" in text
        assert "count=4" in text


# 2
@pytest.mark.parametrize(("sent", "received"), [(5, 6), (6, 5), (0, 1), (70000, 70001)])
def test_a_message_of_another_size_is_an_error_on_both_sides(sent: int, received: int) -> None:
    def rank(comm):
        if comm.rank == 0:
            comm.send(np.ones(sent), 1)
        else:
            comm.recv(np.ones(received), 0)

    for text in errors(rank):
        assert text.startswith("InvalidUsageError")
        assert f"count={sent}" in text
        assert f"count={received}" in text


@pytest.mark.parametrize("first", ["send", "recv"])
def test_ranks_that_wait_for_each_others_messages_are_told_of_groups(first: str) -> None:
    def rank(comm):
        x, peer = np.ones(3), 1 - comm.rank
        with pytest.raises(pynccl.NcclError, match=r"itself waits in .*with pynccl\.group\(\)"):
            getattr(comm, first)(x, peer)
        return True

    def one(number, size, uid):
        comm = pynccl.Communicator(size, uid, number, library="host", timeout=0.3)
        done = rank(comm)
        comm.abort()
        return done

    assert run_ranks(2, one, comm=False, library="host", timeout=30) == [True, True]


# 3
@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (
            lambda c: c.all_reduce(np.ones(4)),
            lambda c: c.all_gather(np.ones(4)),
            ("all_reduce", "all_gather"),
        ),
        (
            lambda c: c.all_reduce(np.ones(4)),
            lambda c: c.all_reduce(np.ones(4, "f4")),
            ("float64", "float32"),
        ),
        (lambda c: c.all_reduce(np.ones(4)), lambda c: c.all_reduce(np.ones(4), op="max"), ("sum", "max")),
        (lambda c: c.broadcast(np.ones(900), 0), lambda c: c.broadcast(np.ones(900), 1), ("root=0", "=1")),
        (lambda c: c.barrier(), lambda c: c.all_gather(np.ones(4)), ("as a barrier does", "all_gather")),
    ],
)
def test_different_calls_are_an_error_naming_both(first: Any, second: Any, words: tuple[str, str]) -> None:
    for text in errors(lambda comm: (first, second)[comm.rank](comm)):
        assert text.startswith("InvalidUsageError")
        assert all(word in text for word in words)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (lambda c: c.broadcast(np.ones(4), 0), lambda c: c.broadcast(np.ones(4), 1), ("root=0", "root=1")),
        (lambda c: c.broadcast(np.ones(4), 0), lambda c: c.broadcast(np.ones(5), 0), ("count=4", "count=5")),
        (lambda c: c.reduce(np.ones(4), 1), lambda c: c.gather(np.ones(4), 1), ("reduce", "gather")),
        (lambda c: c.scatter(np.ones(4), 0), lambda c: c.all_reduce(np.ones(4)), ("scatter", "all_reduce")),
    ],
)
@pytest.mark.parametrize("between", [0, 1, 100])
def test_a_rank_that_waited_for_nobody_is_told_of_different_calls_later(
    first: Any, second: Any, words: tuple[str, str], between: int
) -> None:
    """Where only the root waits, or only the others: at the next call for which all wait, or after 32."""

    def rank(comm):
        texts = [error_of(lambda: (first, second)[comm.rank](comm))]
        texts += [error_of(lambda: comm.broadcast(np.ones(2))) for _ in range(between)]
        texts.append(error_of(comm.barrier))
        comm.barrier()
        assert comm.all_reduce(np.ones(2))[0] == 2
        return texts

    for texts in run_ranks(2, rank, library="host", timeout=30):
        told = [text for text in texts if text != "no error"]
        assert told[0].startswith("InvalidUsageError")
        assert "operation 1 of communicator" in told[0]
        assert all(word in told[0] for word in words)
        assert texts[-1].startswith("InvalidUsageError")
        assert len(told) >= between - 32


def test_a_rank_that_only_ran_ahead_is_told_of_different_calls_when_it_ends() -> None:
    def rank(comm):
        comm.broadcast(np.ones(4), comm.rank)
        return error_of(comm.destroy)

    texts = run_ranks(2, rank, library="host", timeout=30)
    assert any("operation 1 of communicator" in text and "root=1" in text for text in texts), texts


@pytest.mark.parametrize(
    "call",
    [
        lambda comm, child: child.all_reduce(np.ones(4 + comm.rank)),
        lambda comm, child: child.broadcast(np.ones(4 + comm.rank)),
        lambda comm, child: (child.recv if comm.rank else child.send)(np.ones(4 + comm.rank), 1 - comm.rank),
    ],
    ids=["all_reduce", "broadcast", "message"],
)
def test_a_disagreement_on_a_non_blocking_communicator_is_its_state(call: Any) -> None:
    """Nobody waits for its operations one by one."""

    def rank(comm):
        child = comm.split(0, config={"blocking": 0})
        child.wait(30)

        def call_and_meet() -> None:
            call(comm, child)
            child.wait(30)
            child.barrier()
            child.wait(30)

        text = error_of(call_and_meet)
        child.abort()
        return text

    texts = run_ranks(2, rank, library="host", timeout=30)
    assert all("count=4" in text and "count=5" in text for text in texts), texts


# 4
def test_collectives_of_nothing_succeed_and_touch_nothing() -> None:
    def rank(comm):
        x, memory = np.empty(0), np.full(4, 7.0)
        comm.all_reduce(x)
        comm.broadcast(x)
        comm.reduce(x)
        comm.all_reduce(memory[2:2], memory[:0])
        assert comm.all_gather(np.empty((0, 3))).shape == (0, 3)
        assert comm.reduce_scatter(x).shape == (0,)
        assert comm.all_to_all(x).shape == (0,)
        assert comm.scatter(x).shape == (0,)
        comm.gather(x)
        comm.barrier()
        return memory.tolist()

    assert run_ranks(2, rank, library="host") == [[7.0] * 4] * 2


def test_a_message_of_nothing_pairs_with_one_of_nothing() -> None:
    def rank(comm):
        nothing, one = np.empty(0), np.full(1, comm.rank)
        if comm.rank == 0:
            comm.send(nothing, 1)
            comm.send(one, 1)
        else:
            comm.recv(nothing, 0)
            comm.recv(one, 0)
        return int(one[0])

    assert run_ranks(2, rank, library="host") == [0, 0]


# 5
def test_two_ranks_that_send_first_end_by_a_time_out_that_says_who_waits_for_whom() -> None:
    def rank(r, n, uid):
        comm = pynccl.Communicator(n, uid, r, library="host", timeout=0.5)
        big = np.ones(1 << 22)

        def send_first():
            comm.send(big, 1 - r)
            comm.recv(big, 1 - r)

        text = error_of(send_first)
        comm.abort()
        return text

    found = run_ranks(2, rank, comm=False, library="host")
    assert any(text.startswith("NcclTimeoutError") for text in found)
    for text in found:
        assert "send" in text
        assert "rank" in text


def test_two_ranks_that_send_first_are_fine_in_a_group() -> None:
    def rank(comm):
        x, y = np.full(1 << 20, comm.rank), np.empty(1 << 20, int)
        with pynccl.group():
            comm.send(x, 1 - comm.rank)
            comm.recv(y, 1 - comm.rank)
        return int(y.min()), int(y.max())

    assert run_ranks(2, rank, library="host") == [(1, 1), (0, 0)]


# 6
def test_a_message_to_oneself_is_a_copy_in_a_group_and_wrong_usage_outside() -> None:
    def rank(comm):
        x, y = np.arange(5.0), np.zeros(5)
        with pynccl.group():
            comm.send(x, comm.rank)
            comm.recv(y, comm.rank)
        return y.tolist(), error_of(lambda: comm.send(x, comm.rank))

    ((copied, text),) = run_ranks(1, rank, library="host")
    assert copied == [0, 1, 2, 3, 4]
    assert text.startswith("InvalidUsageError: send")


# 8
@pytest.mark.parametrize(
    ("dtype", "bits"), [("i1", 8), ("u1", 8), ("i4", 32), ("u4", 32), ("i8", 64), ("u8", 64)]
)
def test_integers_wrap_around(dtype: str, bits: int) -> None:
    top = np.iinfo(dtype).max

    def rank(comm):
        x = np.full(9, top, dtype)
        return int(comm.all_reduce(x.copy())[8]), int(comm.all_reduce(x.copy(), op="prod")[8])

    def wrapped(value: int) -> int:
        value %= 2**bits
        return value - 2**bits if dtype.startswith("i") and value >= 2 ** (bits - 1) else value

    assert run_ranks(3, rank, library="host") == [(wrapped(3 * top), wrapped(top**3))] * 3


# 9
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_max_and_min_ignore_nan_unless_all_are_nan(dtype: str) -> None:
    def rank(comm):
        x = np.array([np.nan if comm.rank != 1 else 5, comm.rank, np.nan], dtype)
        return [comm.all_reduce(x.copy(), op=op).tolist() for op in ("max", "min")]

    for biggest, smallest in run_ranks(3, rank, library="host"):
        assert biggest[:2] == [5, 2]
        assert smallest[:2] == [5, 0]
        assert np.isnan([biggest[2], smallest[2]]).all()


# 10
@pytest.mark.parametrize("count", [1, 3, 7, 1001, 65537])
@pytest.mark.parametrize("offset", [1, 3])
def test_odd_counts_at_any_aligned_address_are_right_and_nothing_beside_is_touched(
    count: int, offset: int
) -> None:
    def rank(comm):
        memory = np.full(offset + count + 1, 100.0, "f4")
        part = memory[offset:-1]
        part[:] = np.arange(count) % 64 + comm.rank
        comm.all_reduce(part)
        np.testing.assert_array_equal(part, 2 * (np.arange(count) % 64) + 1)
        return float(memory[:offset].min()), float(memory[-1])

    assert run_ranks(2, rank, library="host") == [(100, 100)] * 2


# 11
def test_a_rank_with_no_color_takes_part_in_a_split_and_gets_none() -> None:
    def rank(comm):
        child = comm.split(0 if comm.rank != 1 else None, key=-comm.rank)
        if child is None:
            return None
        with child:
            return child.rank, child.size

    assert run_ranks(3, rank, library="host") == [(1, 2), None, (0, 2)]


def test_a_negative_color_is_invalid() -> None:
    with pynccl.init(library="host") as comm:
        assert "color=-1 must be 0 or more, or None" in error_of(lambda: comm.split(-1))
        comm.barrier()


# 12
@pytest.mark.parametrize("how", ["plain", "prepared", "group"])
def test_abort_from_another_thread_ends_a_waiting_call(how: str) -> None:
    waiting, other = pynccl.Communicator.init_all(2, library="host")
    call = waiting.prepare("all_reduce", np.ones(4))
    calls: dict[str, Any] = {
        "plain": lambda: waiting.all_reduce(np.ones(4)),
        "prepared": call,
        "group": lambda: receive_in_a_group(waiting),
    }
    abort = threading.Timer(0.2, waiting.abort)
    abort.start()
    with pytest.raises(pynccl.NcclError, match="was aborted while it waited"):
        calls[how]()
    abort.join()
    assert waiting.closed
    with pytest.raises(pynccl.InvalidUsageError, match="was aborted"):
        call()
    other.abort()


# 14
def test_a_rank_that_never_comes_is_named_and_nothing_is_left() -> None:
    def rank(r, n, uid):
        if r == 1:
            return "stays away"
        before = threading.active_count(), len(os.listdir("/proc/self/fd"))
        text = error_of(lambda: pynccl.Communicator(n, uid, r, library="host", timeout=0.4, name="late"))
        assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before
        return text

    first, _, third = run_ranks(3, rank, comm=False, library="host")
    assert first.startswith("NcclTimeoutError: Communicator")
    assert "rank 1 of 3" in first
    assert third.startswith("NcclTimeoutError")


# 17
def test_a_communicator_used_in_a_forked_child_says_so_and_the_parent_goes_on() -> None:
    def rank(comm):
        stream, call = pynccl.Stream(), comm.prepare("all_reduce", np.ones(2))
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            uses = (
                lambda: comm.all_reduce(np.ones(2)),
                lambda: comm.barrier(),
                lambda: comm.split(0),
                call,
                stream.synchronize,
            )
            os.write(writer, "\n".join(error_of(use) for use in uses).encode())
            comm.destroy()  # nothing of the parent's is freed
            stream.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        os.close(writer)
        with os.fdopen(reader) as lines:
            texts = lines.read().splitlines()
        comm.all_reduce(np.ones(2), stream=stream)
        stream.synchronize()
        stream.close()
        return texts, call().tolist()

    for texts, result in run_ranks(2, rank, library="host"):
        assert len(texts) == 5
        for text in texts:
            assert text.startswith("InvalidUsageError")
            assert "forked" in text
        assert result == [2, 2]


# 18
def test_a_non_contiguous_array_is_refused_and_nothing_is_copied_or_sent() -> None:
    def rank(comm):
        square = np.arange(16.0).reshape(4, 4)
        text = error_of(lambda: comm.all_reduce(square[:, :2]))
        assert square.tolist() == np.arange(16.0).reshape(4, 4).tolist()
        comm.all_reduce(square)
        return text, square[3, 3]

    for text, last in run_ranks(2, rank, library="host"):
        assert text.startswith(
            "InvalidArgumentError: all_reduce: x (float64, shape (4, 2)) is not contiguous"
        )
        assert "np.ascontiguousarray(x)" in text
        assert last == 30


# 19
def test_a_result_code_that_nobody_knows_is_an_error_with_the_number() -> None:
    with pynccl.init(library="host", name="odd") as comm:
        with pytest.raises(
            pynccl.NcclError, match=r"all_reduce .*unknown result \(77\).*rank 0.*'odd'"
        ) as caught:
            comm._settle(77, "all_reduce (ncclAllReduce)")
        assert caught.value.code == 77
        comm.barrier()


# 20
def test_exit_without_destroy_is_quick_and_a_warning() -> None:
    code = """
        import numpy as np, pynccl, threading
        uid = pynccl.get_unique_id("host")
        comms = [None, None]
        def rank(r):
            comms[r] = pynccl.Communicator(2, uid, r, library="host", name=f"left{r}")
            if r == 1:
                comms[1].all_reduce(np.ones(4))    # waits for ever: rank 0 never calls
        threads = [threading.Thread(target=rank, args=(r,), daemon=True) for r in range(2)]
        for thread in threads:
            thread.start()
        threads[0].join()
        stream = pynccl.Stream()
        while comms[1] is None:
            pass
        comms[0].recv(np.ones(3), 1, stream=stream)    # so does this
        print("leaves")
    """
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert time.monotonic() - start < 20
    assert (done.returncode, done.stdout) == (0, "leaves\n"), done.stderr
    for name in ("left0", "left1"):
        assert f"'{name}' rank {name[-1]} of 2, host, open> was not destroyed" in done.stderr


# 21
def test_a_library_that_cannot_be_opened_is_an_error_with_the_places_searched(tmp_path: Any) -> None:
    wrong = tmp_path / "libnccl.so.2"
    wrong.write_text("no library")
    with pytest.raises(pynccl.LibraryNotFoundError, match=str(wrong)):
        pynccl.get_unique_id(str(wrong))


# 22
def test_ranks_that_are_threads_of_one_process_can_all_be_made_at_once() -> None:
    assert (
        run_ranks(8, lambda comm: comm.all_reduce(np.ones(1)).tolist(), library="host", processes=False)
        == [[8]] * 8
    )


# 23
def test_an_array_that_python_has_dropped_is_still_sent() -> None:
    def rank(comm):
        stream = pynccl.Stream()
        if comm.rank == 0:
            x = np.arange(1 << 18)
            dropped = weakref.ref(x)
            comm.send(x, 1, stream=stream)
            del x
            gc.collect()
            np.full(1 << 18, -1)  # would reuse the memory
            assert dropped() is not None
            comm.signal(1)  # not before this does rank 1 receive
        else:
            y = np.zeros(1 << 18, int)
            comm.wait_signal(0)
            comm.recv(y, 0)
            assert (y == np.arange(1 << 18)).all()
        stream.synchronize()
        stream.close()
        return comm.rank

    assert run_ranks(2, rank, library="host") == [0, 1]


# Ctrl-C
WAITS: dict[str, Any] = {
    "all_reduce": lambda comm, stream: comm.all_reduce(np.ones(4)),
    "all_reduce to out": lambda comm, stream: comm.all_reduce(np.ones(4), np.ones(4)),
    "barrier": lambda comm, stream: comm.barrier(),
    "prepared": lambda comm, stream: comm.prepare("all_reduce", np.ones(4))(),
    "group": lambda comm, stream: receive_in_a_group(comm),
    "split": lambda comm, stream: comm.split(0),
    "stream": lambda comm, stream: (comm.recv(np.ones(4), 1, stream=stream), stream.synchronize()),
    "event": lambda comm, stream: (comm.recv(np.ones(4), 1, stream=stream), stream.record().synchronize()),
    "object": lambda comm, stream: comm.all_gather_object("x"),
}


def receive_in_a_group(comm: pynccl.Communicator) -> None:
    with pynccl.group():
        comm.recv(np.ones(4), 1)


def interrupted(call: Any) -> bool:
    """Whether Ctrl-C, a little later, ends the call as KeyboardInterrupt and soon."""
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        call()
    return time.monotonic() - start < 5


@pytest.mark.parametrize("what", [*WAITS])
def test_ctrl_c_ends_a_waiting_call_at_once(what: str) -> None:
    reader, writer = os.pipe()  # the ranks are forked and have both ends

    def rank(comm):
        if comm.rank == 1:
            os.read(reader, 1)  # its end would wake rank 0 too
            comm.abort()
            return "never calls"
        stream = pynccl.Stream()
        ended = interrupted(lambda: WAITS[what](comm, stream))
        comm.abort()
        error_of(stream.close)  # the aborted call's error, where one was queued
        os.write(writer, b"x")
        return ended

    try:
        assert run_ranks(2, rank, library="host", timeout=30) == [True, "never calls"]
    finally:
        os.close(reader)
        os.close(writer)


class Gate:
    """A call queued on a stream behind a function that waits: work under way until ``open``."""

    def __init__(self, comm: pynccl.Communicator) -> None:
        self.x, self._stream, self._opened = np.full(4, 2.0), pynccl.Stream(), threading.Event()
        self._stream.call(lambda: self._opened.wait(30))
        comm.all_reduce(self.x, op="max", stream=self._stream)

    def open(self) -> None:
        self._opened.set()
        self._stream.close()


@pytest.mark.parametrize("after", ["ncclGroupStart", "ncclAllReduce", "ncclGroupEnd"])
def test_an_interrupt_anywhere_in_a_group_leaves_no_group_open(
    monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    with pynccl.Communicator(1, pynccl.get_unique_id("host"), 0, library="host") as comm:
        original = getattr(comm.library, after)
        pending = [KeyboardInterrupt]

        def interrupted(*arguments):
            code = original(*arguments)
            if pending:
                raise pending.pop()
            return code

        transposed = np.ones((2, 2)).T  # is called by the library's function of that name
        with monkeypatch.context() as patched:
            patched.setattr(comm.library, after, interrupted)
            with pytest.raises(KeyboardInterrupt), pynccl.group():
                for _ in range(2):
                    comm.all_gather(np.ones(1)) if after != "ncclAllReduce" else comm.all_reduce(transposed)
        # In a group that was left open nothing would be made before its end.
        with comm.split(0) as child:
            assert child.all_gather(np.full(1, 7.0)).tolist() == [7]
        with pynccl.group():
            gathered = comm.all_gather(np.full(1, 8.0))
        assert gathered.tolist() == [8]


def test_an_interrupt_in_a_group_starts_no_half_of_it() -> None:
    with pynccl.Communicator(1, pynccl.get_unique_id("host"), 0, library="host") as comm:
        x, out = np.full(4, 3.0), np.zeros(4)

        def interrupt() -> int:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), pynccl.group() as group:
            comm.all_reduce(x, out)
            comm.all_reduce(x, out)
            group._calls[1] = group._calls[1]._replace(function=interrupt)
        assert out.tolist() == [0] * 4
        assert comm.all_reduce(x, out).tolist() == [3] * 4


def test_a_destroy_that_timed_out_leaves_the_communicator_as_it_was() -> None:
    comm = pynccl.Communicator(1, pynccl.get_unique_id("host"), 0, library="host", timeout=0.1)
    prepared, gate = comm.prepare("all_reduce", np.ones(3)), Gate(comm)
    for _ in range(2):
        with pytest.raises(pynccl.NcclTimeoutError, match=r"destroy .* has not ended within 0\.1 s"):
            comm.destroy()
        assert not comm.closed
    gate.open()
    assert prepared().tolist() == [1] * 3
    comm.destroy()
    assert comm.closed


def test_a_with_block_ends_the_communicator_even_where_destroy_times_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comm = pynccl.Communicator(1, pynccl.get_unique_id("host"), 0, library="host", timeout=0.1)
    gate, abort = Gate(comm), comm.abort

    # Only when destroy has given up: abort waits for what a stream's function does.
    def open_and_abort() -> None:
        gate.open()
        abort()

    monkeypatch.setattr(comm, "abort", open_and_abort)
    with pytest.raises(pynccl.NcclTimeoutError, match="destroy"), comm:
        pass
    assert comm.closed


def test_ctrl_c_in_destroy_leaves_a_communicator_that_can_be_ended() -> None:
    def rank(comm):
        gate, ends = Gate(comm), []
        for call in (comm.destroy, comm.finalize):
            ends.append((interrupted(call), comm.closed))
        gate.open()
        comm.destroy()
        return ends, comm.closed

    assert run_ranks(1, rank, library="host", timeout=30) == [([(True, False)] * 2, True)]


def test_abort_from_another_thread_ends_a_waiting_destroy() -> None:
    reader, writer = os.pipe()  # the ranks are forked and have both ends

    def rank(comm):
        if comm.rank == 1:
            os.read(reader, 1)
            comm.abort()
            return "never calls"
        stream = pynccl.Stream()
        comm.all_reduce(np.ones(4), stream=stream)
        aborter = threading.Timer(0.2, comm.abort)
        aborter.start()
        text = error_of(comm.destroy)
        aborter.join()
        os.write(writer, b"x")
        return text, error_of(stream.close)

    try:
        (destroyed, queued), other = run_ranks(2, rank, library="host", timeout=30)
    finally:
        os.close(reader)
        os.close(writer)
    assert other == "never calls"
    # "no error" if the abort came before destroy: there was nothing left to do.
    assert "another thread ended this communicator" in destroyed or destroyed == "no error"
    assert "given up" in queued


@pytest.mark.parametrize("blocking", [True, False])
def test_ctrl_c_ends_an_init_that_waits_for_the_others(blocking: bool) -> None:
    def rank(r, n, uid):
        config = {"blocking": blocking}
        return interrupted(lambda: pynccl.Communicator(n, uid, r, library="host", config=config).wait())

    assert run_ranks(1, lambda r, n, uid: rank(0, 2, uid), comm=False, library="host", timeout=30) == [True]


def test_a_signal_handler_that_does_not_raise_runs_during_a_wait_and_ends_nothing() -> None:
    reader, writer = os.pipe()

    def rank(comm):
        if comm.rank == 1:
            assert os.read(reader, 1) == b"h"  # rank 0's handler has run, while rank 0 waits
        else:
            signal.signal(signal.SIGUSR1, lambda number, frame: os.write(writer, b"h"))
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        return comm.all_reduce(np.ones(2)).tolist()

    try:
        assert run_ranks(2, rank, library="host", timeout=30) == [[2, 2], [2, 2]]
    finally:
        os.close(reader)
        os.close(writer)


def test_what_any_signal_handler_raises_comes_out_of_the_waiting_call() -> None:
    class Late(Exception):
        pass

    def late(number, frame):
        raise Late("0.2 s are over")

    def alone(r, n, uid):
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Late, match="are over"):
            pynccl.Communicator(2, uid, 0, library="host")
        return True

    assert run_ranks(1, alone, comm=False, library="host", timeout=30) == [True]


def test_a_second_signal_in_the_watchers_one_gap_still_ends_the_wait() -> None:
    from pynccl import interrupts

    with contextlib.suppress(KeyboardInterrupt):
        interrupts._watcher.generator.throw(KeyboardInterrupt)  # caught, as a first signal is
    assert interrupts._watcher.poll() == 0
    assert type(interrupts._watcher.raised) is KeyboardInterrupt
    interrupts._watcher.generator.close()  # as a second one would, in the handler of the first
    assert interrupts._watcher.poll() == 1
    with pytest.raises(KeyboardInterrupt):
        interrupts.reraise()
    interrupts.reraise()  # nothing is left
    assert interrupts._watcher.poll() == 0


def test_a_launched_job_ends_on_ctrl_c(tmp_path: Any) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent("""
            import numpy as np, pynccl, signal
            with pynccl.init(library="host") as comm:
                comm.barrier()
                print("ready", flush=True)
                if comm.rank == 0:
                    comm.all_reduce(np.ones(4))    # rank 1 never calls
                while True:
                    signal.pause()
        """)
    )
    command = [sys.executable, "-m", "pynccl.launch", "-n", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as job:
        assert job.stdout is not None
        for _ in range(2):
            assert "ready" in job.stdout.readline()
        job.send_signal(signal.SIGINT)
        _, said = job.communicate(timeout=30)
    assert job.returncode != 0
    assert "KeyboardInterrupt" in said

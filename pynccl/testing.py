"""Run one function on several ranks, for tests: real processes or threads, all results or all reasons back.

Owns the life of the ranks (start, wait, stacks of those that hang, end) and nothing of what they do.

    def test_sum():
        def rank(comm):
            x = np.full(4, comm.rank + 1.0)
            comm.all_reduce(x)
            return x[0]

        assert run_ranks(3, rank) == [6.0, 6.0, 6.0]

The same as a pytest marker and fixture: `pynccl.pytest_plugin`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

from pynccl._parenthood import die_with_parent
from pynccl._signals import signal_in_words
from pynccl.abi.errors import RemoteError
from pynccl.rendezvous.errors import name_ranks

__all__ = ["RankError", "RankFailure", "run_ranks"]

_SETTLE_SECONDS = 1.0  # after the first failure, for the others to notice and say so
_END_SECONDS = 1.0  # from SIGTERM to SIGKILL
_STACK_SECONDS = 1.0  # for a rank that hangs to write its stacks
_QUIET_SECONDS = 0.1  # stacks are complete when nothing more came for so long
_STACKS_SIGNAL = signal.SIGRTMAX - 1  # unlike SIGUSR1 and 2, no program's own


def run_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    processes: bool = True,
    timeout: float = 60.0,
    library: str | None = None,
    comm: bool = True,
    start_method: str = "fork",
) -> list[Any]:
    """Call `fn(comm, *args)` on `n` ranks at once; their results, by rank.

    `comm`: each rank's `pynccl.Communicator`, made here and destroyed here (aborted if `fn` raises). With
    `comm=False` the call is `fn(rank, n, unique_id, *args)`, to test what happens before a communicator is
    there. `processes`: a process for each rank, or, if False, a thread of this process.
    `timeout`: seconds for everything. `library`: as for `pynccl.Communicator`.
    `start_method`: "fork" (any function and arguments, closures too; what the ranks inherit is a copy) or
    "spawn" (a fresh interpreter; function and arguments must be picklable; needed once this process has used
    a GPU). With "fork", threads of this process do not exist in the ranks, and locks that they held stay
    held.

    Results, arguments to spawned ranks and exceptions travel pickled between this process and its own
    children. An array in a communicator's memory is copied on the way; from a thread it is not, so return a
    copy.

    Raises RankError if any rank raises, ends without a result, or still runs at `timeout`; its message holds
    every failing rank's traceback, or the stacks of one that hangs. No rank is left, whatever happens:
    neither its process nor what that started.
    """
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"run_ranks: n={n!r}; expected a number of ranks, 1 or more")
    if not callable(fn):
        raise TypeError(f"run_ranks: fn={fn!r} cannot be called; expected run_ranks(n, fn, *args)")
    if not 0 < timeout < float("inf"):
        raise ValueError(f"run_ranks: timeout={timeout!r}; expected seconds, more than 0 and finite")
    if start_method not in ("fork", "spawn"):
        raise ValueError(f"run_ranks: start_method={start_method!r}; expected 'fork' or 'spawn'")
    import pynccl  # here: the package does not need its own test helper, and must not wait for it

    unique_id = pynccl.get_unique_id(library)
    jobs = [_Job(fn, args, rank, n, unique_id, library, comm) for rank in range(n)]
    if processes:
        return _Processes(jobs, timeout, start_method).run()
    return _Threads(jobs, timeout).run()


@dataclasses.dataclass(frozen=True)
class RankFailure:
    """Why one rank gave no result: `what` in a line, `details` with its traceback or stacks.

    `exception` is what it raised, or None if it raised nothing or something that cannot be pickled.
    """

    rank: int
    what: str
    details: str = ""
    exception: BaseException | None = None

    def __str__(self) -> str:
        return f"--- rank {self.rank} {self.what}\n{self.details}".rstrip()


class RankError(RuntimeError):
    """Some ranks failed, told with causes before consequences.

    `failures`: a RankFailure by rank; `ended`: the ranks that were stopped for it.
    """

    def __init__(self, n: int, failures: Mapping[int, RankFailure], ended: Sequence[int] = ()):
        self.n, self.failures, self.ended = n, dict(failures), tuple(ended)
        # A RemoteError tells what another rank did: causes come first.
        order = sorted(failures, key=lambda rank: (isinstance(failures[rank].exception, RemoteError), rank))
        lines = [f"{len(failures)} of {n} ranks failed", *(str(failures[rank]) for rank in order)]
        if ended:
            lines.append(f"--- {name_ranks(ended)} had not finished and had to be stopped")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.n, self.failures, self.ended)


@dataclasses.dataclass
class _Job:
    """What one rank does."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    n: int
    unique_id: Any
    library: str | None
    comm: bool
    communicator: Any = None

    def run(self, keep: Callable[[Any], Any]) -> Any:
        """`keep(result)`, taken while the communicator lives: the result may be an array in its memory."""
        if not self.comm:
            return keep(self.fn(self.rank, self.n, self.unique_id, *self.args))
        import pynccl

        comm = pynccl.Communicator(self.n, self.unique_id, self.rank, library=self.library)
        self.communicator = comm
        try:
            result = keep(self.fn(comm, *self.args))
            comm.destroy()
        except BaseException:
            comm.abort()
            raise
        return result


class _Run:
    """What processes and threads share: the wait for all ranks, and for a while longer after a failure."""

    def __init__(self, jobs: list[_Job], timeout: float):
        self.jobs, self.timeout = jobs, timeout
        self.results: dict[int, Any] = {}
        self.failures: dict[int, RankFailure] = {}

    def unfinished(self) -> list[int]:
        return [
            job.rank for job in self.jobs if job.rank not in self.results and job.rank not in self.failures
        ]

    def collect(self, take: Callable[[float], None]) -> bool:
        """Call `take(seconds)` until no rank is unfinished; True if the whole time was used up."""
        deadline = time.monotonic() + self.timeout
        settled = None
        while self.unfinished():
            now = time.monotonic()
            if self.failures and settled is None:
                settled = now + _SETTLE_SECONDS
            until = deadline if settled is None else min(deadline, settled)
            if now >= until:
                return now >= deadline
            take(until - now)
        return False

    def give(self, ended: Sequence[int]) -> list[Any]:
        if self.failures:
            raise RankError(len(self.jobs), self.failures, ended)
        return [self.results[job.rank] for job in self.jobs]


class _Processes(_Run):
    def __init__(self, jobs: list[_Job], timeout: float, start_method: str):
        super().__init__(jobs, timeout)
        self._context: ForkContext | SpawnContext
        if start_method == "fork":
            self._context = multiprocessing.get_context("fork")
        else:
            self._context = multiprocessing.get_context("spawn")
        self._processes: dict[int, BaseProcess] = {}
        self._ends: dict[int, int] = {}  # descriptors that can be read when the process has ended
        self._results: dict[int, Connection] = {}
        self._stacks: dict[int, Connection] = {}

    def run(self) -> list[Any]:
        try:
            for job in self.jobs:
                self._start(job)
            timed_out = self.collect(self._take)
            running = self.unfinished()
            if timed_out:
                stacks = self._read_stacks(running)
                for rank in running:
                    what = f"still ran after {self.timeout:g} s, in:"
                    self.failures[rank] = RankFailure(rank, what, stacks[rank])
        finally:
            self._end()
        return self.give([] if timed_out else running)

    def _start(self, job: _Job) -> None:
        results, to_results = self._context.Pipe(duplex=False)
        stacks, to_stacks = self._context.Pipe(duplex=False)
        self._results[job.rank], self._stacks[job.rank] = results, stacks
        with to_results, to_stacks, _no_fork_warning():
            process = self._context.Process(
                target=_be_rank, args=(job, to_results, to_stacks, os.getpid()), name=f"rank {job.rank}"
            )
            process.start()
            self._processes[job.rank] = process
            # Not the process's own sentinel, a pipe that its children may keep open.
            self._ends[job.rank] = os.pidfd_open(self._pid(job.rank))

    def _take(self, seconds: float) -> None:
        """Take what the ranks send; one that ended and sent nothing has failed."""
        running = self.unfinished()
        signs: list[Connection | int] = [*(self._results[rank] for rank in running)]
        signs += [self._ends[rank] for rank in running]
        ready = wait(signs, seconds)
        for rank in running:
            if self._results[rank] not in ready and self._ends[rank] not in ready:
                continue
            try:
                data = self._results[rank].recv_bytes() if self._results[rank].poll() else b""
            except EOFError:
                data = b""
            if not data:
                self.failures[rank] = RankFailure(rank, self._how_it_ended(rank))
                continue
            kind, *told = pickle.loads(data)
            if kind == "result":
                self.results[rank] = pickle.loads(told[0])
            else:
                what, details, exception = told
                self.failures[rank] = RankFailure(rank, what, details, _unpickled(exception))

    def _read_stacks(self, ranks: list[int]) -> dict[int, str]:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid(rank), _STACKS_SIGNAL)
        until = time.monotonic() + _STACK_SECONDS
        return {rank: _read_until_quiet(self._stacks[rank], until) for rank in ranks}

    def _end(self) -> None:
        """Leave no process: neither a rank nor what one started in its process group."""
        for rank in self._processes:
            self._signal_group(rank, signal.SIGTERM)
        until = time.monotonic() + _END_SECONDS
        remaining = set(self._ends)
        while remaining and (left := until - time.monotonic()) > 0:
            ended = wait([self._ends[rank] for rank in remaining], left)
            remaining = {rank for rank in remaining if self._ends[rank] not in ended}
        for rank in remaining:
            self._signal_group(rank, signal.SIGKILL)
        for process in self._processes.values():
            process.join()
            process.close()
        for end in self._ends.values():
            os.close(end)
        for pipe in [*self._results.values(), *self._stacks.values()]:
            pipe.close()

    def _how_it_ended(self, rank: int) -> str:
        if not wait([self._ends[rank]], _END_SECONDS):
            return "closed its pipe and went on without a result"
        self._processes[rank].join()
        code = self._processes[rank].exitcode
        assert code is not None
        if code < 0:
            return f"was killed by {signal_in_words(-code)}"
        return f"ended with exit status {code} and without a result"

    def _signal_group(self, rank: int, number: signal.Signals) -> None:
        pid = self._pid(rank)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)
            return
        with contextlib.suppress(ProcessLookupError):  # it had no time to make its group
            os.kill(pid, number)

    def _pid(self, rank: int) -> int:
        pid = self._processes[rank].pid
        assert pid is not None
        return pid


def _be_rank(job: _Job, to_results: Connection, to_stacks: Connection, parent: int) -> None:
    """The whole life of a rank's process, ended without tear-down: what it inherited is not its own."""
    code = 1
    try:
        os.setpgid(0, 0)
        # The parent's handlers may be anything; a rank ends when it is told to.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        faulthandler.register(_STACKS_SIGNAL, file=to_stacks.fileno(), all_threads=True)
        die_with_parent(parent)
        message = _told(job)
        to_results.send_bytes(pickle.dumps(message))
        code = 0 if message[0] == "result" else 1
    except BaseException:  # the machinery itself; there is nobody above to raise to
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it
                stream.flush()
        os._exit(code)


def _told(job: _Job) -> tuple[Any, ...]:
    try:
        return "result", job.run(_pickled)
    except BaseException as error:
        return "failure", f"raised {_named(error)}", _traceback(error), _pickled_if_possible(error)


def _pickled(result: Any) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(f"the result, {type(result).__name__}, cannot be pickled: {error}") from error


def _pickled_if_possible(error: BaseException) -> bytes | None:
    try:
        return pickle.dumps(error)
    except Exception:  # whatever its __reduce__ raises; the traceback's text says everything
        return None


def _unpickled(data: bytes | None) -> BaseException | None:
    if data is None:
        return None
    try:
        error = pickle.loads(data)
    except Exception:  # exceptions with arguments of their own often cannot be rebuilt
        return None
    return error if isinstance(error, BaseException) else None


class _Threads(_Run):
    def __init__(self, jobs: list[_Job], timeout: float):
        super().__init__(jobs, timeout)
        self._threads = {
            job.rank: threading.Thread(
                target=self._be_rank, args=(job,), name=f"rank {job.rank}", daemon=True
            )
            for job in jobs
        }
        self._lock = threading.Lock()
        self._finished = threading.Semaphore(0)  # released once by each rank

    def run(self) -> list[Any]:
        for thread in self._threads.values():
            thread.start()
        running: list[int] = []
        try:
            timed_out = self.collect(self._take)
            running = self.unfinished()
            stacks = self._read_stacks(running)
        except BaseException:
            self._release(self.unfinished())
            raise
        self._release(running)
        if timed_out:
            for rank in running:
                self.failures[rank] = RankFailure(
                    rank, f"still ran after {self.timeout:g} s, in:", stacks[rank]
                )
        else:
            # Stopping them made them raise: that is no failure of their own.
            with self._lock:
                self.failures = {rank: f for rank, f in self.failures.items() if rank not in running}
        return self.give([] if timed_out else running)

    def _take(self, seconds: float) -> None:
        self._finished.acquire(timeout=seconds)

    def _be_rank(self, job: _Job) -> None:
        try:
            result = job.run(lambda value: value)
        except BaseException as error:
            failure = RankFailure(job.rank, f"raised {_named(error)}", _traceback(error), error)
            with self._lock:
                self.failures.setdefault(job.rank, failure)
        else:
            self.results[job.rank] = result
        self._finished.release()

    def _release(self, ranks: list[int]) -> None:
        """A thread cannot be ended from outside; aborting its communicator makes its call return."""
        helpers = []
        for rank in ranks:
            comm = self.jobs[rank].communicator
            if comm is not None and not comm.closed:
                helpers.append(threading.Thread(target=comm.abort, daemon=True))
                helpers[-1].start()
        until = time.monotonic() + _END_SECONDS
        for thread in [*helpers, *(self._threads[rank] for rank in ranks)]:
            thread.join(max(0.0, until - time.monotonic()))

    def _read_stacks(self, ranks: list[int]) -> dict[int, str]:
        frames = sys._current_frames()
        stacks = {}
        for rank in ranks:
            frame = frames.get(self._threads[rank].ident or 0)
            stacks[rank] = (
                "".join(traceback.format_stack(frame)) if frame is not None else "(it has just ended)"
            )
        return stacks


def _read_until_quiet(pipe: Connection, until: float) -> str:
    read = b""
    while (left := until - time.monotonic()) > 0:
        # Raw bytes: faulthandler writes to the descriptor and knows no frames.
        chunk = (
            os.read(pipe.fileno(), 1 << 16) if pipe.poll(min(left, _QUIET_SECONDS if read else left)) else b""
        )
        if not chunk:
            break
        read += chunk
    return (
        read.decode(errors="replace")
        or "(it did not answer: stopped, or in a system call that cannot be left)"
    )


@contextlib.contextmanager
def _no_fork_warning() -> Iterator[None]:
    """Python 3.12 and later warn of a fork when there are threads; those of NumPy's BLAS survive it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        yield


def _named(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]


def _traceback(error: BaseException) -> str:
    """The traceback without the frames of this file, which say nothing about the failure."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__ and trace.tb_next is not None:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))

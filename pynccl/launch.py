"""Start the ranks of a job on this machine, pass their output on, and end them together.

    python -m pynccl.launch -n 4 train.py --epochs 3
    python -m pynccl.launch -n 4 -m bench.all_reduce_perf -b 8 -e 64M

Owns processes, their environment and output; knows nothing of communicators. Each rank leads a session of its
own, so that what it started ends with it, and is killed by the kernel should this launcher itself be killed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

from pynccl import _parenthood
from pynccl._signals import signal_in_words
from pynccl.abi import gpus
from pynccl.rendezvous import name_ranks, new_secret

__all__ = ["launch", "main"]

_LAST_LINES = 20  # of the failed rank, shown again at the end
_LONGEST_LINE = (
    1 << 16
)  # bytes; a longer one is broken, so that a rank which writes no newline cannot fill memory
_TIMED_OUT = 124  # as timeout(1) says
_DRAIN_SECONDS = 1.0
_POLL_SECONDS = 0.05  # the end of a rank's own children gives no event

# What a job inside another job must not inherit: it would name the outer one's meeting place.
_OUTER = ("PYNCCL_SECRET_FILE", "PYNCCL_PORT")
_OUTER_PREFIX = "TORCHELASTIC_"

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    if options.no_python and options.module:
        _parser().error("-m and --no-python exclude each other")
    python = [] if options.no_python else [sys.executable, *(["-m"] if options.module else [])]
    command = [*python, options.program, *options.arguments]
    return launch(command, options.n, output=options.output, timeout=options.timeout, grace=options.grace)


def launch(
    command: Sequence[str],
    n: int,
    *,
    output: str = "prefix",
    timeout: float | None = None,
    grace: float = 5.0,
    environ: Mapping[str, str] | None = None,
    silent: Collection[int] = (),
) -> int:
    """Run `command` in `n` processes, ranks 0 to n-1 of one job, and wait for all; returns an exit status.

    0: all ended with 0. Otherwise the status of the first rank that failed, 128+s if signal s killed it (and
    after the first failure the others get SIGTERM, and SIGKILL `grace` seconds later); 124 after `timeout`
    seconds (None: no limit); 128+s if this process was told to end by signal s. `output`: "prefix" (`[rank] `
    before each line), "raw" (unchanged), or a folder for one file a rank. `environ`: in place of
    `os.environ`. `silent`: exit statuses of a rank that has said why itself, so that nothing is said here.

    Call it in the main thread. No process is left when it returns or raises.
    """
    chosen = os.environ if environ is None else environ
    with _Job(command, n, output, timeout, grace, chosen, silent) as job:
        return job.run()


def rank_environments(n: int, environ: Mapping[str, str], say: Callable[[str], None]) -> list[dict[str, str]]:
    """The environment of each of `n` ranks; `say` gets a sentence about what a user may want otherwise."""
    common = {
        name: value
        for name, value in environ.items()
        if name not in _OUTER and not name.startswith(_OUTER_PREFIX)
    }
    common |= {
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "PYNCCL_SECRET": new_secret(),
    }
    common.setdefault(
        "PYTHONUNBUFFERED", "1"
    )  # a line appears when it is written, and is not lost with its rank
    common |= _thread_counts(n, environ, say)
    devices = _devices(n, environ, say)
    return [
        common
        | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        | ({"CUDA_VISIBLE_DEVICES": devices[rank % len(devices)]} if devices else {})
        for rank in range(n)
    ]


def _thread_counts(n: int, environ: Mapping[str, str], say: Callable[[str], None]) -> dict[str, str]:
    """Each rank's BLAS would start a thread for every core: n times too many."""
    if n == 1 or "OMP_NUM_THREADS" in environ:
        return {}
    cores = len(os.sched_getaffinity(0))
    threads = str(max(1, cores // n))
    chosen = {name: threads for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS") if name not in environ}
    settings = " ".join(f"{name}={value}" for name, value in chosen.items())
    say(f"{n} ranks on {cores} cores: {settings} for each (set OMP_NUM_THREADS yourself to change it)")
    return chosen


def _devices(n: int, environ: Mapping[str, str], say: Callable[[str], None]) -> list[str]:
    """The names of the GPUs to deal out, [] if there is none; those already chosen by the user, if so."""
    count = len(gpus().devices)
    if count == 0:
        return []
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    names = (
        [str(i) for i in range(count)] if visible is None else [name.strip() for name in visible.split(",")]
    )
    if n > count:
        shared = f"{n} ranks share {count} GPU{'s' if count > 1 else ''}"
        say(f"{shared}; NVIDIA's NCCL allows that only with NCCL_MULTI_RANK_GPU_ENABLE=1")
    return names[:count]


def _free_port() -> int:
    # Another program may take it before rank 0 does: then rank 0 takes one of the next.
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@dataclasses.dataclass
class _Rank:
    """One rank's process and what was last heard of it."""

    number: int
    process: subprocess.Popen[bytes]
    end: int  # descriptor that can be read when the process has ended
    file: Path | None
    streams: list[_Stream] = dataclasses.field(default_factory=list)
    last_lines: collections.deque[bytes] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_LAST_LINES)
    )


class _Stream:
    """One of a rank's pipes: cut into lines, each written on with the rank before it."""

    def __init__(self, rank: _Rank, pipe: IO[bytes], to: IO[bytes]):
        self.pipe = pipe
        self._rank, self.to = rank, to
        self.ended = False
        self._prefix = b"[%d] " % rank.number
        self._begun = b""
        os.set_blocking(pipe.fileno(), False)

    def pass_on(self) -> bool:
        """Write on some of what is there, so that no rank keeps others waiting; False if there is nothing."""
        try:
            chunk = os.read(self.pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        if not chunk:
            self.ended = True
            self.flush()
            return False
        *lines, self._begun = (self._begun + chunk).split(b"\n")
        if len(self._begun) > _LONGEST_LINE:
            lines, self._begun = [*lines, self._begun], b""
        self._write(lines)
        return True

    def flush(self) -> None:
        if self._begun:
            self._write([self._begun])
            self._begun = b""

    def _write(self, lines: list[bytes]) -> None:
        self._rank.last_lines.extend(lines)
        self.to.write(b"".join(self._prefix + line + b"\n" for line in lines))
        self.to.flush()


class _Job:
    def __init__(
        self,
        command: Sequence[str],
        n: int,
        output: str,
        timeout: float | None,
        grace: float,
        environ: Mapping[str, str],
        silent: Collection[int] = (),
    ):
        if n < 1:
            raise ValueError(f"launch: n={n}; expected a number of ranks, 1 or more")
        self._command, self._n, self._output, self._grace, self._environ = command, n, output, grace, environ
        self._began = time.monotonic()
        self._deadline = None if timeout is None else self._began + timeout
        self._timeout, self._silent = timeout, silent
        self._cleanup = contextlib.ExitStack()
        self._selector = self._cleanup.enter_context(selectors.DefaultSelector())
        self._running: dict[int, _Rank] = {}
        self._leftovers: dict[int, float] = {}  # groups whose leading rank has ended, and when to kill them
        self._kill_at: float | None = None  # the ranks
        self._signals: list[signal.Signals] = []
        self._status: int | None = None  # decided by the first failure, signal or time-out
        self._blame: _Rank | None = None

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever went wrong above, no process stays."""
        for rank in self._running.values():
            _signal_group(rank.process.pid, signal.SIGKILL)
            rank.process.wait()
        for group in self._leftovers:
            _signal_group(group, signal.SIGKILL)
        self._cleanup.close()

    def run(self) -> int:
        self._watch_signals()
        self._start()
        while self._running or self._leftovers:
            events = self._selector.select(self._seconds_to_next_event())
            ended: list[_Rank] = []
            for key, _ in events:
                if isinstance(key.data, _Stream):
                    self._pass_on(key.data)
                elif isinstance(key.data, _Rank):
                    ended.append(key.data)
                else:
                    key.data()
            self._take_ended(ended)
            self._obey_signals()
            self._obey_time()
        self._drain(time.monotonic() + _DRAIN_SECONDS)
        if self._blame is not None and self._blame.process.returncode not in self._silent:
            self._show_last_lines(self._blame)
        return self._status or 0

    # Start

    def _start(self) -> None:
        folder = None if self._output in ("prefix", "raw") else Path(self._output)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        for number, environ in enumerate(rank_environments(self._n, self._environ, self._say)):
            self._start_rank(number, environ, folder)

    def _start_rank(self, number: int, environ: dict[str, str], folder: Path | None) -> None:
        file = None if folder is None else folder / f"rank-{number:0{len(str(self._n - 1))}}.log"
        with contextlib.ExitStack() as opened:
            to: int | IO[bytes] | None = subprocess.PIPE if self._output == "prefix" else None
            if file is not None:
                to = opened.enter_context(open(file, "wb"))
            process = subprocess.Popen(
                # The small program first ties itself to us, then becomes the rank.
                [sys.executable, "-I", "-S", _parenthood.__file__, str(os.getpid()), *self._command],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=to,
                stderr=subprocess.STDOUT if file is not None else to,
                start_new_session=True,
            )
        end = os.pidfd_open(process.pid)
        self._cleanup.callback(os.close, end)
        rank = self._running[number] = _Rank(number, process, end, file)
        self._selector.register(end, selectors.EVENT_READ, rank)
        for pipe, own in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if pipe is not None:
                self._cleanup.callback(pipe.close)
                stream = _Stream(rank, pipe, own.buffer)
                rank.streams.append(stream)
                self._selector.register(pipe, selectors.EVENT_READ, stream)

    def _watch_signals(self) -> None:
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.setblocking(False)
            self._cleanup.callback(end.close)
        self._cleanup.callback(
            signal.set_wakeup_fd, signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        )
        for number in _FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background job
                self._cleanup.callback(signal.signal, number, signal.signal(number, self._note_signal))
        self._selector.register(reader, selectors.EVENT_READ, lambda: reader.recv(4096))

    def _note_signal(self, number: int, _: FrameType | None) -> None:
        self._signals.append(signal.Signals(number))

    # Go on

    def _pass_on(self, stream: _Stream) -> bool:
        try:
            went_on = stream.pass_on()
        except BrokenPipeError:
            # As in any shell's pipe: who reads our output has ended, so the job ends. Nothing can be said
            # there.
            _discard(stream.to)
            self._end_all(signal.SIGTERM, 128 + signal.SIGPIPE)
            return False
        if stream.ended:
            self._selector.unregister(stream.pipe)
        return went_on

    def _drain(self, until: float) -> None:
        """What the ranks wrote last. A process that left its rank's group may still hold a pipe, or write."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Stream):
                while self._pass_on(key.data) and time.monotonic() < until:
                    pass
                with contextlib.suppress(BrokenPipeError):
                    key.data.flush()

    def _take_ended(self, ended: list[_Rank]) -> None:
        failed = []
        for rank in ended:
            # While the ended rank is not waited for, its number still names its group: what it left there
            # ends too.
            _signal_group(rank.process.pid, signal.SIGTERM)
            self._selector.unregister(rank.end)
            self._leftovers[rank.process.pid] = time.monotonic() + self._grace
            if rank.process.wait() != 0:
                failed.append(rank)
            del self._running[rank.number]
        if failed and self._status is None:
            # Of two that ended at once, one that was killed is more likely the cause than one that gave up.
            self._blame = min(failed, key=lambda rank: (rank.process.returncode > 0, rank.number))
            code = self._blame.process.returncode
            self._end_all(signal.SIGTERM, code if code > 0 else 128 - code)

    def _obey_signals(self) -> None:
        signals, self._signals = self._signals, []
        for number in signals:
            if self._status is not None and self._kill_at is not None and number == signal.SIGINT:
                self._kill_at = time.monotonic()  # pressed again: no more waiting
            self._end_all(number, 128 + number)

    def _obey_time(self) -> None:
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline and self._status is None and self._running:
            self._say(f"time-out after {self._timeout:g} s; still running: {name_ranks(self._running)}")
            self._end_all(signal.SIGTERM, _TIMED_OUT)
        if self._kill_at is not None and now >= self._kill_at:
            for rank in self._running.values():
                _signal_group(rank.process.pid, signal.SIGKILL)
            self._kill_at = float("inf")  # the kernel does the rest
        for group, kill_at in list(self._leftovers.items()):
            if now >= kill_at:
                _signal_group(group, signal.SIGKILL)
            if now >= kill_at or not _group_exists(group):
                del self._leftovers[group]

    def _end_all(self, number: signal.Signals, status: int) -> None:
        for rank in self._running.values():
            _signal_group(rank.process.pid, number)
        if self._status is None:
            self._status = status
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._grace

    def _seconds_to_next_event(self) -> float | None:
        times = [
            t for t in (self._kill_at, self._deadline if self._status is None else None) if t is not None
        ]
        if self._leftovers:
            times.append(time.monotonic() + _POLL_SECONDS)
        first = min(times, default=float("inf"))
        return None if first == float("inf") else max(0.0, first - time.monotonic())

    # Say

    def _show_last_lines(self, rank: _Rank) -> None:
        code = rank.process.returncode
        how = f"exit status {code}" if code > 0 else signal_in_words(-code)
        others = "; the other ranks were ended" if self._n > 1 else ""
        lines = [line.decode(errors="replace") for line in rank.last_lines]
        if rank.file is not None:
            lines = _last_lines(rank.file)
        where = f" (all of them: {rank.file})" if rank.file else ""
        tail = (
            f". Its last lines{where}:" if lines else "." if self._output == "raw" else "; it wrote nothing."
        )
        self._say(f"rank {rank.number} ended with {how}{others}{tail}")
        self._write("".join(f"  [{rank.number}] {line}\n" for line in lines))

    def _say(self, text: str) -> None:
        self._write(f"pynccl.launch: {text}\n")

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except BrokenPipeError:
            _discard(sys.stderr)


def _discard(stream: IO[Any]) -> None:
    """From now on what is written to `stream` goes nowhere, what its buffer holds too."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def _last_lines(file: Path) -> list[str]:
    with open(file, "rb") as opened:
        opened.seek(max(0, file.stat().st_size - _LONGEST_LINE))
        return opened.read().decode(errors="replace").splitlines()[-_LAST_LINES:]


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(group, number)


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pynccl.launch",
        usage="python -m pynccl.launch -n N [options] [--] script.py [arguments]\n"
        "       python -m pynccl.launch -n N [options] -m module [arguments]",
        description="Start N ranks of a job on this machine. Each gets RANK, WORLD_SIZE, LOCAL_RANK, "
        "LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and PYNCCL_SECRET, which pynccl.init() reads, and one of "
        "the GPUs if there are any.",
        epilog="When a rank fails, the others are ended, its last lines are shown again, and its status is "
        "the exit status (128+s if signal s killed it). Ctrl-C and SIGTERM go to all ranks. Ranks have no "
        "standard input.",
    )
    parser.add_argument("-n", type=_count, required=True, metavar="N", help="number of ranks")
    parser.add_argument("-m", "--module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("--no-python", action="store_true", help="run a program that is no Python script")
    parser.add_argument(
        "--output",
        default="prefix",
        metavar="HOW",
        help="prefix: [rank] before each line (default); raw: unchanged; else a folder, for one file a rank",
    )
    parser.add_argument(
        "--timeout", type=_seconds, metavar="S", help="end the job after S seconds (status 124)"
    )
    parser.add_argument(
        "--grace",
        type=_seconds,
        default=5.0,
        metavar="S",
        help="from asking a rank to end to killing it (default 5)",
    )
    parser.add_argument("program", metavar="script.py", help="script, module or program")
    own = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    own.required = False  # it is named in no message about what is missing
    return parser


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks; expected 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; expected seconds, more than 0")
    return value


if __name__ == "__main__":
    sys.exit(main())

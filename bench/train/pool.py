"""The parent's side: start the ranks of a contestant, ask all of them, hear all of them, end all of them."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.train.problem import Problem

__all__ = ["DISTURBED", "Pool", "PoolError", "child_environment", "machine_time", "process_time", "turn"]

REPO = Path(__file__).resolve().parent.parent.parent

# One thread a rank, whatever library does the arithmetic.
_THREADS = "OPENBLAS_NUM_THREADS OMP_NUM_THREADS MKL_NUM_THREADS BLIS_NUM_THREADS NUMEXPR_NUM_THREADS"
THREADS = dict.fromkeys(_THREADS.split(), "1")
# They choose OpenBLAS's kernels, and may have been set for another machine or program. Together: an L2 size
# without its core type gives blocks that fit nothing.
BLAS_CHOICES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


class PoolError(RuntimeError):
    """A rank of a contestant ended or took too long; the message has the end of its log."""


def child_environment(environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """(what the ranks of all contestants get, the names of variables that were taken away)."""
    removed = [name for name in BLAS_CHOICES if name in environment]
    kept = {name: value for name, value in environment.items() if name not in removed}
    path = os.pathsep.join([str(REPO), *filter(None, [environment.get("PYTHONPATH")])])
    return {**kept, **THREADS, "PYTHONPATH": path}, removed


class Pool:
    """The ranks of one contestant: `python -m bench.train.NAME PROBLEM RANK MEETING`, one process each."""

    def __init__(
        self,
        name: str,
        python: str,
        module: str,
        problem: Problem,
        meeting: str,
        logs: Path,
        timeout: float,
        environ: Mapping[str, str],
        pin: bool,
    ) -> None:
        self.name, self.timeout = name, timeout
        self.logs = [logs / f"{name}.{rank}.log" for rank in range(problem.ranks)]
        self._ranks: list[subprocess.Popen[str]] = []
        cores = sorted(os.sched_getaffinity(0))
        for rank, log in enumerate(self.logs):
            command = [python, "-m", module, problem.to_json(), str(rank), meeting]
            if pin:
                command = ["taskset", "-c", str(cores[rank % len(cores)]), *command]
            with log.open("w") as file:
                self._ranks.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=file,
                        text=True,
                        env=dict(environ),
                        cwd=REPO,
                    )
                )
        self._hear()

    def ask(self, command: str) -> list[dict[str, Any]]:
        """Every rank's answer to a command, by rank."""
        for rank in self._ranks:
            assert rank.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended: _hear says so, with its log
                rank.stdin.write(command + "\n")
                rank.stdin.flush()
        return self._hear()

    def processor_time(self) -> int:
        """Used by all ranks since they started, in ticks."""
        return sum(process_time(rank.pid) for rank in self._ranks)

    def _hear(self) -> list[dict[str, Any]]:
        deadline = time.monotonic() + self.timeout
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for number, rank in enumerate(self._ranks):
                assert rank.stdout is not None
                selector.register(rank.stdout, selectors.EVENT_READ, number)
            while len(answers) < len(self._ranks):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    missing = sorted(set(range(len(self._ranks))) - set(answers))
                    self._fail(missing[0], f"has not answered within {self.timeout:.0f} s")
                for key, _ in ready:
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    if not line:
                        self._fail(key.data, "has ended")
                    answers[key.data] = json.loads(line)
                    selector.unregister(key.fileobj)
        return [answers[number] for number in range(len(self._ranks))]

    def _fail(self, rank: int, what: str) -> None:
        self.close(kill=True)
        log = self.logs[rank].read_text()[-4000:].strip()
        raise PoolError(f"{self.name}: rank {rank} {what}; the end of {self.logs[rank]}:\n{log}")

    def close(self, kill: bool = False) -> None:
        """End the ranks: politely, and for certain."""
        for rank in self._ranks:
            if kill:
                rank.kill()
            with contextlib.suppress(BrokenPipeError):
                assert rank.stdin is not None and rank.stdout is not None
                rank.stdin.close()
        for rank in self._ranks:
            try:
                rank.wait(20)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()
            assert rank.stdout is not None
            rank.stdout.close()


DISTURBED = 0.05  # of the machine's processor time, by others: a turn in which they take more says little


def turn(pool: Pool, command: str, patience: float) -> tuple[list[dict[str, Any]], float]:
    """(the answers to a command, the share of the machine's processor time that others had meanwhile).

    It is given when the machine is idle, and again while others disturbed it, for at most `patience` seconds;
    the least disturbed turn counts.
    """
    deadline = time.monotonic() + patience
    best: tuple[float, list[dict[str, Any]]] | None = None
    while True:
        _wait_for_quiet(deadline)
        used, elapsed, own = *machine_time(), pool.processor_time()
        answers = pool.ask(command)
        now_used, now_elapsed, now_own = *machine_time(), pool.processor_time()
        others = max(0, now_used - used - (now_own - own)) / max(1, now_elapsed - elapsed)
        if best is None or others < best[0]:
            best = others, answers
        if best[0] <= DISTURBED or time.monotonic() >= deadline:
            return best[1], best[0]


def _wait_for_quiet(deadline: float, window: float = 0.3) -> None:
    while time.monotonic() < deadline:
        used, elapsed = machine_time()
        time.sleep(window)
        now_used, now_elapsed = machine_time()
        if now_used - used <= DISTURBED * (now_elapsed - elapsed):
            return


def process_time(pid: int) -> int:
    """Used by a process since it started, in ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def machine_time() -> tuple[int, int]:
    """(used, used or not) by all processors since the machine started, in ticks."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(fields) - fields[3] - fields[4], sum(fields)

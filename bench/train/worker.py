"""One rank of a contestant: set up, then do steps when told to, and say how long each took.

The parent writes a line a command on standard input, and reads a line of JSON for each: `run 5` (steps, each
timed), `reset` (forget the peak of resident memory so far), `stop`. A rank that is not told anything waits in
a read and takes no processor time, so contestants that live side by side can take turns.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TextIO

from bench.train.problem import Problem

__all__ = ["Contestant", "peak_rss", "serve"]


class Contestant(Protocol):
    """What a contestant is to the worker."""

    def step(self) -> Any:
        """One whole training step."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def loss(self) -> float:
        """The last step's loss on this rank's rows, before its update."""

    def about(self) -> dict[str, Any]:
        """What to report beside times: model-state bytes, versions, counts."""

    def close(self) -> None:
        """The end."""


def serve(make: Callable[[Problem, int, str], Contestant]) -> None:
    """Be rank `argv[2]` of the problem `argv[1]`; the ranks meet at `argv[3]`."""
    problem, rank, meeting = Problem.from_json(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log, not between the answers
    contestant = make(problem, rank, meeting)
    _answer(answers, {"ready": os.getpid()})
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "run":
            _answer(answers, _run(contestant, int(arguments[0])))
        elif command == "reset":
            _reset_peak()
            _answer(answers, {})
        elif command == "stop":
            break
        else:
            raise ValueError(f"worker: {line!r} is no command; use run COUNT, reset or stop")
    contestant.close()


def _run(contestant: Contestant, count: int) -> dict[str, Any]:
    times, cpu = [], []
    for _ in range(count):
        contestant.barrier()
        start, busy = time.perf_counter(), time.process_time()
        contestant.step()
        times.append(time.perf_counter() - start)
        cpu.append(time.process_time() - busy)
    return {
        "seconds": times,
        "cpu_seconds": cpu,
        "loss": contestant.loss(),
        "peak_rss": peak_rss(),
        "pss": _pss(),
        "about": contestant.about(),
    }


def _answer(answers: TextIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def _field(path: str, name: str) -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no line {name}")


def peak_rss() -> int:
    """The most bytes that were resident at once since the start or the last reset.

    From VmHWM: getrusage counts what this process was before it became Python, too.
    """
    return _field("/proc/self/status", "VmHWM")


def _pss() -> int:
    """Bytes resident now, pages shared with n processes counted as 1/n each."""
    return _field("/proc/self/smaps_rollup", "Pss")


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")

"""What a rank's work costs with nobody to talk to: the parts of the ideal. All ranks do it at one time.

Each is a world of its own: the same loop on a model that is whole, and a copy between two large arrays.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np

import pynccl
from bench.train.ours import Ours
from bench.train.problem import Problem
from bench.train.worker import serve

COPIED = 64 << 20  # bytes: beyond the last-level cache


class Alone(Ours):
    """Times the user's code (forward, backward), the optimizer and a copy, apart."""

    def __init__(self, problem: Problem, comm: Any, rank: int) -> None:
        super().__init__(problem, comm, rank)
        self._parts: dict[str, list[float]] = {"compute": [], "optimizer": [], "copy": []}
        self._computed = 0.0
        self.model.on_event(self._event)
        self._source, self._target = np.ones(COPIED, np.uint8), np.ones(COPIED, np.uint8)

    def _event(self, name: str, unit: str, start: float, stop: float, detail: str) -> None:
        if name == "compute":
            self._computed += stop - start

    def step(self) -> None:
        """A step and a copy; only their parts count."""
        self._computed = 0.0
        with self.model.microbatch():
            self.forward()
            self.backward()
        self._parts["compute"].append(self._computed)
        start = time.perf_counter()
        self.optimizer.step()
        self._parts["optimizer"].append(time.perf_counter() - start)
        self.model.zero_grad()
        start = time.perf_counter()
        np.copyto(self._target, self._source)
        self._parts["copy"].append(time.perf_counter() - start)

    def about(self) -> dict[str, Any]:
        """Medians of the parts so far, in seconds, and bytes a second that a copy loads and stores."""
        medians = {name: statistics.median(values) for name, values in self._parts.items()}
        return super().about() | {
            "compute_seconds": medians["compute"],
            "optimizer_seconds": medians["optimizer"],
            "bytes_per_second": 2 * COPIED / medians["copy"],
        }


def make(problem: Problem, rank: int, meeting: str) -> Alone:
    """One rank, alone."""
    del meeting
    comm = pynccl.Communicator(1, pynccl.get_unique_id("host"), 0, library="host")
    return Alone(replace(problem, ranks=1), comm, rank)


if __name__ == "__main__":
    serve(make)

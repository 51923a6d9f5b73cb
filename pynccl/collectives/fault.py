"""The first thing that is wrong with a schedule."""

from __future__ import annotations

from typing import Any

import numpy as np

from pynccl.collectives.schedule import Schedule

__all__ = ["Fault"]


class Fault(ValueError):
    """A schedule does not do what its collective says.

    `rank`, `step` (index in the rank's list, as `Schedule.table` numbers it) and `chunk` (of the buffer that
    the words name) say where; -1 where there is no such thing. `what` says what is wrong. What the words mean
    and what to do: docs/collectives.md.
    """

    def __init__(self, schedule: str, rank: int, step: int, chunk: int, what: str) -> None:
        self.schedule, self.rank, self.step, self.chunk, self.what = schedule, rank, step, chunk, what
        super().__init__(
            f"{schedule}: rank {rank}, step {step}: {what}" if step >= 0 else f"{schedule}: {what}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.schedule, self.rank, self.step, self.chunk, self.what)

    @classmethod
    def at(cls, schedule: Schedule, row: Any, what: str, chunk: int | None = None) -> Fault:
        """The fault of a row of the columns, in the words "STEP: what"."""
        rank = int(np.searchsorted(schedule.first, row, side="right")) - 1
        index = int(row - schedule.first[rank])
        place = schedule.columns[row]
        if chunk is None:
            chunk = int(place["dst_chunk"] if place["dst_buffer"] >= 0 else place["src_chunk"])
        return cls(_title(schedule), rank, index, chunk, f"{schedule.step(rank, index)}: {what}")

    @classmethod
    def of(cls, schedule: Schedule, rank: int, step: int, chunk: int, what: str) -> Fault:
        """The fault of a rank at a step (-1: of no step in particular)."""
        return cls(_title(schedule), rank, step, chunk, what)


def _title(schedule: Schedule) -> str:
    return f"{schedule.name} {schedule.collective} of {schedule.n} ranks"

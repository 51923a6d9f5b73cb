"""What the command line prints: proofs of many schedules, comparisons of costs, a picture."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pynccl.collectives.cost import Cost
from pynccl.collectives.mutate import Report, mutation_test
from pynccl.collectives.registry import Row
from pynccl.collectives.schedule import Schedule
from pynccl.collectives.verify import find_fault

__all__ = ["Proofs", "comparison", "draw", "prove", "schedules_of"]

_MUTATED_RANKS = (1, 2, 3, 4, 5, 6, 7, 8)


@dataclasses.dataclass
class Proofs:
    """Schedules proved: of each algorithm how many, how long it took, and the faults."""

    seconds: float = 0.0
    proved: dict[str, int] = dataclasses.field(default_factory=dict)
    steps: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)
    mutants: Report | None = None

    @property
    def good(self) -> bool:
        """No fault, and no mutant missed."""
        return not self.faults and (self.mutants is None or self.mutants.caught == self.mutants.wrong)

    def mutate(self, rows: Iterable[Row], count: int, seed: int) -> None:
        """Test the verifier with `count` wrong schedules made from those of `rows`."""
        schedules = [schedule for row in rows for schedule in schedules_of(row, _MUTATED_RANKS)]
        self.mutants = mutation_test(schedules, count, seed)

    def as_json(self) -> dict[str, Any]:
        """The proofs as a dictionary."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        width = max(map(len, self.proved), default=0)
        lines = [f"{name:{width}}  {count:>5} schedules proved" for name, count in self.proved.items()]
        lines += [f"fault: {fault}" for fault in self.faults]
        total = f"{sum(self.proved.values())} schedules, {self.steps} steps, {len(self.faults)} faults"
        return "\n".join([*lines, f"{total}, {self.seconds:.1f} s"])


def prove(
    rows: Iterable[Row], ranks: Iterable[int], others: Iterable[Schedule], slots: Iterable[int]
) -> Proofs:
    """Prove the algorithms of `rows` for all of `ranks`, all variants and several roots; and `others`."""
    found, began = Proofs(), time.perf_counter()
    slots, ranks = tuple(slots), tuple(ranks)
    named = [(f"{row.collective} {row.name}", s) for row in rows for s in schedules_of(row, ranks)]
    for name, schedule in [*named, *((f"{s.collective} {s.name}", s) for s in others)]:
        found.proved.setdefault(name, 0)
        found.steps += len(schedule)
        fault = find_fault(schedule, slots=slots)
        if fault is None:
            found.proved[name] += 1
        else:
            found.faults.append(f"{fault} (parameters {dict(schedule.params)}, root {schedule.root})")
    found.seconds = time.perf_counter() - began
    return found


def schedules_of(row: Row, ranks: Iterable[int]) -> Iterator[Schedule]:
    """An algorithm's schedules for `ranks`, all variants; rooted ones from first, middle and last root."""
    for n in ranks:
        for variant in ({}, *row.variants):
            rooted = row.collective in ("broadcast", "reduce")
            for root in sorted({0, n // 2, n - 1}) if rooted else [None]:
                yield row.generator(n, **variant, **({} if root is None else {"root": root}))


def comparison(costs: dict[str, list[Cost]]) -> str:
    """A table: a line for each algorithm (key of `costs`) and size, the fastest of each size marked."""
    named = [(name, row) for name, of_name in costs.items() for row in of_name]
    rows = [row for _, row in named]
    best = {size: min(row.time for row in rows if row.bytes == size) for size in {row.bytes for row in rows}}
    width = max(map(len, costs))
    lines = [
        f"{rows[0].collective}, {rows[0].n} ranks, {rows[0].topology}",
        f"{'algorithm':{max(width, 9)}} {'bytes':>12} {'rounds':>7} {'sent':>12} {'traffic':>12} "
        f"{'time us':>12} {'busbw GB/s':>10}",
    ]
    for name, row in named:
        mark = "  *" if row.time == best[row.bytes] else ""
        lines.append(
            f"{name:{max(width, 9)}} {row.bytes:>12} {row.rounds:>7} {int(row.sent.max()):>12} "
            f"{int(row.traffic.max()):>12} {row.time * 1e6:>12.2f} {row.busbw / 1e9:>10.2f}{mark}"
        )
    legend = (
        "bytes: of the longer array; sent, traffic (of memory): bytes of the rank that has most; *: fastest"
    )
    rounded = {row.asked: row for row in rows if row.bytes != row.asked}
    lines += [
        f"{asked} bytes were rounded down to {row.bytes}, a multiple of {row.unit}: an element in each block"
        for asked, row in sorted(rounded.items())
    ]
    return "\n".join([*lines, legend])


def draw(costs: dict[str, list[Cost]], sizes: Sequence[int], path: str) -> None:
    """Draw the algorithms' times over sizes into an image file; needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("drawing needs matplotlib: python -m pip install matplotlib") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, row in costs.items():
        axes.loglog(sizes, [each.time * 1e6 for each in row], marker="o", markersize=3, label=name, base=2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    first = next(iter(costs.values()))[0]
    axes.set(
        xlabel="bytes", ylabel="microseconds", title=f"{first.collective}, {first.n} ranks, {first.topology}"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)

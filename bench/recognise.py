"""Which program an output is of that does not name it: older nccl-tests did not, and pasted rows do not.

What tells them apart is in the numbers: the bus bandwidth over the bandwidth, whether the size is the count
or the count of every rank, a reduction, a root, whether results in place are checked. Where that leaves
several programs, the name of the file decides. Pure functions of a `Run`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bench.factors import all_but_own, one, twice_all_but_own

if TYPE_CHECKING:
    from bench.parse import Record, Run

__all__ = ["PROGRAMS", "Signature", "named", "program_named"]


@dataclass(frozen=True)
class Signature:
    """What the rows of a program have in common. `reduces` None: it prints an operation, or none."""

    factor: Callable[[int], float]  # busbw / algbw
    divided: bool  # the size is the count times the ranks
    reduces: bool | None = False
    rooted: bool = False
    checked_in_place: bool = True
    moved: Callable[[int], float] = one  # algbw * time / size
    uneven: bool = False  # the size may be no multiple of the count
    names_itself: bool = False  # it is younger than the line that names the program


PROGRAMS = {
    "all_reduce_perf": Signature(twice_all_but_own, divided=False, reduces=True),
    "all_gather_perf": Signature(all_but_own, divided=True),
    "reduce_scatter_perf": Signature(all_but_own, divided=True, reduces=True),
    "broadcast_perf": Signature(one, divided=False, rooted=True),
    "reduce_perf": Signature(one, divided=False, reduces=True, rooted=True),
    "alltoall_perf": Signature(all_but_own, divided=True, checked_in_place=False),
    "alltoallv_perf": Signature(
        all_but_own, divided=True, checked_in_place=False, uneven=True, names_itself=True
    ),
    "gather_perf": Signature(all_but_own, divided=True, rooted=True),
    "scatter_perf": Signature(all_but_own, divided=True, rooted=True),
    "sendrecv_perf": Signature(one, divided=False, reduces=None, checked_in_place=False),
    "hypercube_perf": Signature(one, divided=True, reduces=None, moved=all_but_own),
}
_NAMES = (  # the longer before those that are parts of them
    ("all_?reduce", "all_reduce_perf"),
    ("all_?gather", "all_gather_perf"),
    ("reduce_?scatter", "reduce_scatter_perf"),
    ("broad_?cast|bcast", "broadcast_perf"),
    ("all_?to_?all_?v", "alltoallv_perf"),
    ("all_?to_?all", "alltoall_perf"),
    ("send_?recv", "sendrecv_perf"),
    ("hyper_?cube", "hypercube_perf"),
    ("gather", "gather_perf"),
    ("scatter", "scatter_perf"),
    ("reduce", "reduce_perf"),
)
_NAME = re.compile("|".join(f"({pattern})" for pattern, _ in _NAMES))
ITEM_SIZES = {
    **dict.fromkeys(("int8", "uint8", "char", "f8e4m3", "f8e5m2", "fp8_e4m3", "fp8_e5m2"), 1),
    **dict.fromkeys(("half", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "int", "float"), 4),
    **dict.fromkeys(("int64", "uint64", "double"), 8),
}
MOST_RANKS = 1 << 20


def program_named(text: str) -> str:
    """The program that a file's name, or a user, means: `all-reduce_h100.txt`; empty if none."""
    match = _NAME.search(text.lower().replace("-", "_"))
    return _NAMES[match.lastindex - 1][1] if match and match.lastindex else ""


def named(run: Run, file: str, told: str = "") -> Run:
    """The run with a program, if it has rows and names none; a note says how the program was found out.

    `file` is the name of the file, `told` the program that the user says: it decides where the numbers leave
    it possible, as they are of this one run. Where nothing decides, the note says what is possible.
    """
    if run.program or not run.rows:
        return run
    possible, hint = candidates(run), program_named(file)
    if told and (told in possible or not possible):
        return _with(run, told, "as the command line says")
    if hint not in possible:
        possible = [one for one in possible if not PROGRAMS[one].names_itself] or possible
    if len(possible) == 1:
        return _with(run, possible[0], f"by its numbers ({_evidence(run)})")
    if hint and (hint in possible or not possible):
        by_numbers = f"its numbers leave {_either(possible)}" if possible else "its numbers fit no program"
        return _with(run, hint, f"by the name of the file ({by_numbers})")
    said = f"by its numbers it may be {_either(possible)}" if possible else "its numbers fit no program"
    said += f", and the name of the file says {hint}" if hint else ""
    note = f"the output does not name its program; {said}; say which with --program"
    return replace(run, notes=(*run.notes, note))


def candidates(run: Run) -> list[str]:
    """The programs whose rows can look like these."""
    found = _Facts(run.rows, run.ranks)
    return [name for name, signature in PROGRAMS.items() if found.fit(signature)]


def _with(run: Run, program: str, how: str) -> Run:
    note = f"the output does not name its program: {program} {how}"
    return replace(run, program=program, program_by=how.partition(" (")[0], notes=(*run.notes, note))


def _either(programs: Sequence[str]) -> str:
    return " or ".join(programs)


class _Facts:
    """What rows tell of their program; None where they do not."""

    def __init__(self, rows: Sequence[Record], ranks: int) -> None:
        self.reduces = any(row.redop != "none" for row in rows)
        self.rooted = any(row.root >= 0 for row in rows)
        checked = {in_place: [row.wrong is not None for row in rows if row.in_place is in_place]
                   for in_place in (False, True)}  # fmt: skip
        # Where nothing was checked (-c 0), or nothing was in place, it tells nothing.
        self.checked_in_place = any(checked[True]) if any(checked[False]) and checked[True] else None
        times = [row.size / (row.count * ITEM_SIZES[row.type]) for row in rows
                 if row.count > 0 and row.type in ITEM_SIZES]  # fmt: skip
        self.multiple = times[0] if times and max(times) - min(times) < 1e-9 else None
        self.uneven = bool(times) and (self.multiple is None or self.multiple != round(self.multiple))
        self.ranks = ranks or (round(self.multiple) if self.multiple and self.multiple > 1.5 else 0)
        # The largest bandwidth has the most digits.
        best = max((row for row in rows if _positive(row)), key=lambda row: row.busbw, default=None)
        self.factor = best.busbw / best.algbw if best else None
        self.moved = best.algbw * best.time_us * 1e3 / best.size if best else None
        self.precision = 0.002 + (0.005 / best.algbw + 0.005 / best.busbw if best else 0)

    def fit(self, signature: Signature) -> bool:
        return (
            signature.reduces in (None, self.reduces)
            and signature.rooted is self.rooted
            and self.checked_in_place in (None, signature.checked_in_place)
            and self._sizes_fit(signature)
            and self._bandwidths_fit(signature)
        )

    def _sizes_fit(self, signature: Signature) -> bool:
        if self.uneven:
            return signature.uneven
        if self.multiple is None:
            return True
        if signature.divided and self.ranks:
            return round(self.multiple) == self.ranks
        return signature.divided == (self.multiple > 1)

    def _bandwidths_fit(self, signature: Signature) -> bool:
        if self.factor is None or self.moved is None:
            return True
        return any(
            self._near(self.factor, signature.factor(ranks))
            and self._near(self.moved, signature.moved(ranks))
            for ranks in ([self.ranks] if self.ranks else self._ranks(signature))
        )

    def _ranks(self, signature: Signature) -> Sequence[int]:
        """The numbers of ranks, not told, that the factor can be of."""
        assert self.factor is not None
        if signature.factor is one:
            return range(2, 3)
        whole = 2 if signature.factor is twice_all_but_own else 1
        most = min(MOST_RANKS, round(whole / max(whole - self.factor, 1e-6)) + 1)
        return range(max(2, most - 2), most + 1)

    def _near(self, value: float, wanted: float) -> bool:
        return abs(value - wanted) <= self.precision * max(value, wanted)


def _positive(row: Record) -> bool:
    return row.size > 0 and all(0 < one < math.inf for one in (row.algbw, row.busbw, row.time_us))


def _evidence(run: Run) -> str:
    facts = _Facts(run.rows, run.ranks)
    said = ["reduces" if facts.reduces else "reduces nothing", "a root" if facts.rooted else "no root"]
    if facts.multiple is not None:
        said.append("size = count" if facts.multiple == 1 else f"size = {facts.multiple:g} x count")
    if facts.factor is not None:
        of = f" on {facts.ranks} ranks" if facts.ranks else ""
        said.append(f"busbw = {facts.factor:.3g} x algbw{of}")
    return ", ".join(said)

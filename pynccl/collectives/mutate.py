"""Wrong schedules made from right ones, to see whether `verify` tells them apart.

A mutant is a schedule with one step changed. Whether it is *wrong* is for `simulate.py` to say, which plays
it with connections of several lengths and several orders of events. A wrong mutant that `verify` proves is a
miss. One that both find right does the same as the original (say, a copy done twice) and is counted apart.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pynccl.collectives.schedule import Buffer, Kind, Schedule, Span, Step
from pynccl.collectives.simulate import simulate
from pynccl.collectives.verify import find_fault

__all__ = ["MUTATIONS", "Mutant", "Report", "judge", "mutants", "mutation_test"]

_PLAYS = ((0, 0), (1, 1), (1, 2), (2, 3), (8, 4), (8, 5))  # slots and seed
_MOST_STEPS = 400  # of a schedule that is mutated; the simulator is plain Python

Steps = list[list[Step]]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A schedule with one step changed; `what` says which and how."""

    schedule: Schedule
    kind: str
    what: str


@dataclasses.dataclass
class Report:
    """How a mutation test went: numbers of wrong mutants, of those caught, and the others in words."""

    wrong: int = 0
    caught: int = 0
    missed: list[str] = dataclasses.field(default_factory=list)
    equivalent: list[str] = dataclasses.field(default_factory=list)
    stricter: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.caught} of {self.wrong} mutants caught"]
        lines += [f"  missed: {what}" for what in self.missed]
        lines += [f"{len(self.equivalent)} more do the same as the original:"] if self.equivalent else []
        lines += [f"  {what}" for what in self.equivalent]
        lines += (
            [f"{len(self.stricter)} more went well when played, but break a rule:"] if self.stricter else []
        )
        return "\n".join(lines + [f"  {what}" for what in self.stricter])

    def as_json(self) -> dict[str, Any]:
        """The report as a dictionary."""
        return dataclasses.asdict(self)


def _drop(steps: Steps, rank: int, i: int, chance: random.Random, s: Schedule) -> None:
    del steps[rank][i]


def _duplicate(steps: Steps, rank: int, i: int, chance: random.Random, s: Schedule) -> None:
    steps[rank].insert(i, steps[rank][i])


def _reorder(steps: Steps, rank: int, i: int, chance: random.Random, s: Schedule) -> None:
    """Swap with another step of the rank; each takes the other's round."""
    j = chance.randrange(len(steps[rank]))
    a, b = steps[rank][i], steps[rank][j]
    steps[rank][i] = dataclasses.replace(b, round=a.round)
    steps[rank][j] = dataclasses.replace(a, round=b.round)


def _retarget(steps: Steps, rank: int, i: int, chance: random.Random, s: Schedule) -> None:
    """Another peer, or for a local step another rank."""
    step = steps[rank][i]
    if step.peer >= 0:
        peer = (step.peer + chance.randrange(1, s.n + 1)) % (s.n + 1)  # s.n is nobody
        steps[rank][i] = dataclasses.replace(step, peer=peer)
    elif s.n > 1:
        other = steps[(rank + chance.randrange(1, s.n)) % s.n]
        del steps[rank][i]
        place = next((k for k, each in enumerate(other) if each.round > step.round), len(other))
        other.insert(place, step)


def _wrong_chunk(steps: Steps, rank: int, i: int, chance: random.Random, s: Schedule) -> None:
    def moved(span: Span) -> Span:
        return dataclasses.replace(span, chunk=span.chunk + chance.choice((-1, 1, s.parts, -s.parts)))

    _change_span(steps, rank, i, chance, moved)


def _wrong_buffer(steps: Steps, rank: int, i: int, chance: random.Random, s: Schedule) -> None:
    def moved(span: Span) -> Span:
        return dataclasses.replace(span, buffer=chance.choice([b for b in Buffer if b != span.buffer]))

    _change_span(steps, rank, i, chance, moved)


def _wrong_length(steps: Steps, rank: int, i: int, chance: random.Random, s: Schedule) -> None:
    step, more = steps[rank][i], chance.choice((-1, 1))
    spans: dict[str, Any] = {
        end: dataclasses.replace(span, chunks=span.chunks + more)
        for end, span in (("src", step.src), ("dst", step.dst))
        if span is not None
    }
    steps[rank][i] = dataclasses.replace(step, **spans)


def _swap_kind(steps: Steps, rank: int, i: int, chance: random.Random, s: Schedule) -> None:
    """A receive becomes a receive with reduction, a copy a reduction, a send a receive, and the other way."""
    step = steps[rank][i]
    kind = {
        Kind.SEND: Kind.RECV,
        Kind.RECV: Kind.RECV_REDUCE,
        Kind.RECV_REDUCE: Kind.RECV,
        Kind.COPY: Kind.REDUCE,
        Kind.REDUCE: Kind.COPY,
    }[step.kind]
    src, dst = (None if kind == Kind.RECV else step.src or step.dst), step.dst or step.src
    left = step.left and kind in (Kind.RECV_REDUCE, Kind.REDUCE)
    steps[rank][i] = dataclasses.replace(step, kind=kind, src=src, dst=dst, left=left)


def _change_channel(steps: Steps, rank: int, i: int, chance: random.Random, s: Schedule) -> None:
    step = steps[rank][i]
    steps[rank][i] = dataclasses.replace(step, channel=step.channel + 1 if step.peer >= 0 else step.channel)


def _shift_round(steps: Steps, rank: int, i: int, chance: random.Random, s: Schedule) -> None:
    """Into the round of the step before or after."""
    j = min(max(i + chance.choice((-1, 1)), 0), len(steps[rank]) - 1)
    steps[rank][i] = dataclasses.replace(steps[rank][i], round=steps[rank][j].round)


MUTATIONS: dict[str, Callable[[Steps, int, int, random.Random, Schedule], None]] = {
    "drop": _drop,
    "duplicate": _duplicate,
    "reorder": _reorder,
    "retarget": _retarget,
    "wrong chunk": _wrong_chunk,
    "wrong buffer": _wrong_buffer,
    "wrong length": _wrong_length,
    "swapped kind": _swap_kind,
    "other channel": _change_channel,
    "other round": _shift_round,
}


def _change_span(
    steps: Steps, rank: int, i: int, chance: random.Random, moved: Callable[[Span], Span]
) -> None:
    step = steps[rank][i]
    ends = [end for end in ("src", "dst") if getattr(step, end) is not None]
    end = chance.choice(ends)
    changed: dict[str, Any] = {end: moved(getattr(step, end))}
    steps[rank][i] = dataclasses.replace(step, **changed)


def mutants(schedules: Sequence[Schedule], seed: int = 0) -> Iterator[Mutant]:
    """Mutants of `schedules` without end, each kind of mutation as often as the others."""
    chance = random.Random(seed)
    small = [s for s in schedules if 0 < len(s) <= _MOST_STEPS]
    if not small:
        raise ValueError(f"mutants: no schedule of 1 to {_MOST_STEPS} steps among {len(schedules)}")
    while True:
        for kind, mutate in MUTATIONS.items():
            original = chance.choice(small)
            steps = list(original)
            rank = chance.choice([r for r, own in enumerate(steps) if own])
            i = chance.randrange(len(steps[rank]))
            what = f"{original.name} {original.collective} of {original.n}: {kind}: rank {rank} step {i}"
            what += f": {steps[rank][i]}"
            mutate(steps, rank, i, chance, original)
            fields = ("root", "scratch_chunks", "deterministic", "in_place", "parts", "params")
            mutant = Schedule.from_steps(
                original.name,
                original.collective,
                steps,
                **{field: getattr(original, field) for field in fields},
            )
            if mutant != original:
                yield Mutant(mutant, kind, what)


def judge(mutant: Schedule) -> tuple[str, str]:
    """What went wrong when the schedule was played ("" if nothing), and the verifier's fault ("" if none)."""
    played = ""
    for in_place in (False, True) if mutant.in_place else (False,):
        for slots, seed in _PLAYS:
            played = played or simulate(mutant, slots=slots, seed=seed, in_place=in_place).wrong
    return played, str(find_fault(mutant) or "")


def mutation_test(schedules: Sequence[Schedule], count: int, seed: int = 0) -> Report:
    """Judge mutants of `schedules` until `count` of them were wrong."""
    report = Report()
    for mutant in mutants(schedules, seed):
        if report.wrong >= count:
            break
        played, fault = judge(mutant.schedule)
        if played:
            report.wrong += 1
            report.caught += bool(fault)
            if not fault:
                report.missed.append(f"{mutant.what} ({played})")
        elif fault:
            report.stricter.append(f"{mutant.what} ({fault})")
        else:
            report.equivalent.append(mutant.what)
    return report

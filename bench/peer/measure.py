"""The order of a run: for each number of ranks all sides start; for each case they take turns, in rounds.

A round asks every side for the same case, one after another in an order of its own, so that what disturbs
the machine for seconds disturbs all of them. Figures are medians over rounds. Rounds in which other processes
took processor time are made again, within reason; the least disturbed ones count, whatever their times are.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench.peer.cases import Case
from bench.peer.sides import SIDES, Side, SideError
from bench.train.pool import DISTURBED, machine_time, process_time

__all__ = ["LOADS", "Outcome", "Plan", "Times", "kinds", "measure"]

LOADS = ("quiet", "one busy core")
PASSING_FROM = 64 << 10  # bytes; below, a meeting is most of it
STREAMING_FROM = 256 << 10  # bytes; below, stores past the caches cannot be the machine's best
PREPARED_TO = 4 << 10  # bytes; above, the checks that a prepared call saves are nothing beside the call
FEWEST, MOST = 3, 20000  # calls a round

SAY = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    cases: tuple[Case, ...]
    sides: tuple[str, ...]
    loads: tuple[int, ...] = (0,)  # of LOADS
    rounds: int = 7
    loaded_rounds: int = 7
    patience: float = 0.5  # for disturbed rounds, up to this part of the rounds again
    turn: float = 0.03  # seconds of a side in a round, roughly
    timeout: float = 90.0  # seconds that no answer of a rank may take


@dataclass
class Times:
    """Of one case under one load: seconds per round, by side and kind."""

    case: Case
    load: str
    rounds: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    others: list[float] = field(default_factory=list)  # per round: their part of the processor time


@dataclass
class Outcome:
    """All that a run found."""

    times: list[Times] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # of a side: what it said


def measure(plan: Plan, folder: Path, say: SAY, outcome: Outcome | None = None) -> Outcome:
    """Run the plan; logs and sockets go to `folder`. A peer that fails is said and left out from there.

    `outcome` is filled case by case, and returned; it keeps what there is if ours fails (SideError, OSError).
    """
    outcome = Outcome() if outcome is None else outcome
    with Burner() as burner:
        for ranks in sorted({case.ranks for case in plan.cases}):
            with _sides(plan, ranks, folder, outcome, say) as sides:
                for case in (case for case in plan.cases if case.ranks == ranks):
                    _measure_case(plan, case, sides, outcome, burner, say)
    return outcome


def kinds(side: str, case: Case) -> list[str]:
    """The ways in which a side is measured for a case."""
    skipped = set()
    if case.bytes > PREPARED_TO:
        skipped.add("prepared")
    if case.bytes < PASSING_FROM:
        skipped.add("passing")
    if case.bytes < STREAMING_FROM:
        skipped.add("streaming")
    return [kind for kind in SIDES[side].kinds if kind not in skipped]


def _measure_case(
    plan: Plan, case: Case, sides: dict[str, Side], outcome: Outcome, burner: Burner, say: SAY
) -> None:
    for name in list(sides):
        with _failing(name, case.ranks, sides, outcome, say):
            for kind in kinds(name, case):
                sides[name].set_up(case, kind)
    for load in plan.loads:
        if load and case.ranks > len(os.sched_getaffinity(0)):
            continue  # its ranks compete for the cores already
        with burner.on() if load else contextlib.nullcontext():
            times = _rounds(plan, case, load, sides, outcome, burner, say)
        outcome.times.append(times)
        say(_progress(times))
    for name in list(sides):
        with _failing(name, case.ranks, sides, outcome, say):
            sides[name].ask("forget")


def _rounds(
    plan: Plan, case: Case, load: int, sides: dict[str, Side], outcome: Outcome, burner: Burner, say: SAY
) -> Times:
    counts: dict[tuple[str, str], int] = {}
    for name in list(sides):
        with _failing(name, case.ranks, sides, outcome, say):
            for kind in kinds(name, case):
                counts[name, kind] = _calls(sides[name], kind, plan.turn)
    wanted = plan.loaded_rounds if load else plan.rounds
    made: list[tuple[float, dict[tuple[str, str], float]]] = []
    for number in range(wanted + round(plan.patience * wanted)):
        order = [key for key in counts if key[0] in sides]
        random.Random(number).shuffle(order)
        (used, elapsed), own = machine_time(), _own_time(sides, burner)
        seconds: dict[tuple[str, str], float] = {}
        for name, kind in order:
            if name in sides:
                with _failing(name, case.ranks, sides, outcome, say):
                    seconds[name, kind] = sides[name].seconds(kind, counts[name, kind])
        now_used, now_elapsed = machine_time()
        foreign = now_used - used - (_own_time(sides, burner) - own)
        made.append((max(0, foreign) / max(1, now_elapsed - elapsed), seconds))
        if sum(others <= DISTURBED for others, _ in made) >= wanted:
            break
    times = Times(case, LOADS[load])
    for others, seconds in sorted(made, key=lambda one: one[0])[:wanted]:
        times.others.append(others)
        for key, taken in seconds.items():
            if key[0] in sides:  # what failed on the way has no figure
                times.rounds.setdefault(key, []).append(taken)
    return times


def _own_time(sides: Mapping[str, Side], burner: Burner) -> int:
    """Of all ranks, the burning process and this one, in ticks."""
    here = sum(os.times()[:2]) * os.sysconf("SC_CLK_TCK")
    return round(here) + burner.processor_time() + sum(side.processor_time() for side in sides.values())


def _calls(side: Side, kind: str, turn: float) -> int:
    """So many that they take about `turn` seconds."""
    count = 1
    while True:
        taken = side.seconds(kind, count) * count
        if taken >= turn / 4 or count >= MOST:
            return max(FEWEST, min(MOST, round(count * turn / taken)))
        count = min(MOST, max(2 * count, round(count * turn / 3 / max(taken, 1e-9))))


@contextlib.contextmanager
def _sides(plan: Plan, ranks: int, folder: Path, outcome: Outcome, say: SAY) -> Iterator[dict[str, Side]]:
    sides: dict[str, Side] = {}
    everything: list[Side] = []
    try:
        for name in plan.sides:
            with _failing(name, ranks, sides, outcome, say):
                sides[name] = Side(name, ranks, folder, plan.timeout)
                everything.append(sides[name])
                outcome.versions[name] = sides[name].version
        yield sides
    finally:
        for side in everything:
            side.close()


@contextlib.contextmanager
def _failing(name: str, ranks: int, sides: dict[str, Side], outcome: Outcome, say: SAY) -> Iterator[None]:
    """What a peer fails with is said and kept, and the others go on; without ours there is no comparison."""
    try:
        yield
    except (SideError, OSError) as error:
        if name == "ours":
            raise
        sides.pop(name, None)
        outcome.failures[f"{name} on {ranks} ranks"] = str(error)
        say(f"left out from here on: {error}")


def _progress(times: Times) -> str:
    said = (f"{name}.{kind} {1e6 * median(rounds):.4g}" for (name, kind), rounds in times.rounds.items())
    return f"{times.case}, {times.load}: {'  '.join(said)} us"


# --- another process that wants a core ----------------------------------------------------------------------

REPO = Path(__file__).resolve().parent.parent.parent
_BURN = """
import os, sys
sys.path.insert(0, sys.argv[2])
from pynccl._parenthood import die_with_parent
die_with_parent(int(sys.argv[1]))
print(flush=True)
while True:
    pass
"""


class Burner:
    """A process that computes without end while it is on. It starts off."""

    def __enter__(self) -> Burner:
        command = [sys.executable, "-c", _BURN, str(os.getpid()), str(REPO)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self._process.send_signal(signal.SIGSTOP)
        return self

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """While this is entered, it computes."""
        self._process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGSTOP)

    def processor_time(self) -> int:
        """Used since its start, in ticks."""
        return process_time(self._process.pid)

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

"""The order of a run: for each number of ranks all sides start; for each case they take turns, round after round.

A round asks one side after another for the same case, so that what disturbs the machine for seconds disturbs
all of them; the first side of a round is another one each time. Figures are medians over rounds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench.peer.cases import Case
from bench.peer.sides import SIDES, Side, SideError

__all__ = ["LOADS", "Plan", "Times", "busy_core", "kinds", "measure"]

LOADS = ("quiet", "one busy core")
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
    turn: float = 0.03  # seconds of a side in a round, roughly
    timeout: float = 90.0  # seconds that no answer of a rank may take


@dataclass
class Times:
    """Of one case under one load: seconds per round, by side and kind; and the sides that failed in it."""

    case: Case
    load: str
    rounds: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    counts: dict[tuple[str, str], int] = field(default_factory=dict)


@dataclass
class Outcome:
    """All that a run found."""

    times: list[Times] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # of a side: what it said


def measure(plan: Plan, folder: Path, say: SAY) -> Outcome:
    """Run the plan; logs and sockets go to `folder`. A side that fails is reported and left out from there on."""
    outcome = Outcome()
    with busy_core() as toggle:
        for ranks in sorted({case.ranks for case in plan.cases}):
            with _sides(plan, ranks, folder, outcome, say) as sides:
                for case in (case for case in plan.cases if case.ranks == ranks):
                    _measure_case(plan, case, sides, outcome, toggle, say)
    return outcome


def kinds(side: str, case: Case) -> list[str]:
    """The ways in which a side is measured for a case."""
    skipped = set()
    if case.bytes > PREPARED_TO:
        skipped.add("prepared")
    if case.bytes < STREAMING_FROM:
        skipped.add("streaming")
    return [kind for kind in SIDES[side].kinds if kind not in skipped]


def _measure_case(
    plan: Plan,
    case: Case,
    sides: dict[str, Side],
    outcome: Outcome,
    toggle: Callable[[bool], None],
    say: SAY,
) -> None:
    for name in list(sides):
        with _failing(name, case.ranks, sides, outcome, say):
            for kind in kinds(name, case):
                sides[name].set_up(case, kind)
    for load in plan.loads:
        if load and case.ranks > len(os.sched_getaffinity(0)):
            continue  # its ranks compete for the cores already
        toggle(bool(load))
        times = Times(case, LOADS[load])
        for name in list(sides):
            with _failing(name, case.ranks, sides, outcome, say):
                for kind in kinds(name, case):
                    times.counts[name, kind] = _calls(sides[name], kind, plan.turn)
        for number in range(plan.loaded_rounds if load else plan.rounds):
            order = list(sides)
            for name in order[number % len(order) :] + order[: number % len(order)]:
                with _failing(name, case.ranks, sides, outcome, say):
                    for kind in kinds(name, case):
                        taken = sides[name].seconds(kind, times.counts[name, kind])
                        times.rounds.setdefault((name, kind), []).append(taken)
        toggle(False)
        outcome.times.append(times)
        say(_progress(times))
    for name in list(sides):
        with _failing(name, case.ranks, sides, outcome, say):
            sides[name].ask("forget")


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
    """What a peer fails with is said and kept, and the others go on. Without ours there is nothing to compare."""
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

_BURN = """
import os, sys
sys.path.insert(0, sys.argv[2])
from pynccl._parenthood import die_with_parent
die_with_parent(int(sys.argv[1]))
print(flush=True)
while True:
    pass
"""


@contextlib.contextmanager
def busy_core() -> Iterator[Callable[[bool], None]]:
    """Gives a switch for one process that computes without end. It starts switched off."""
    repo = Path(__file__).resolve().parent.parent.parent
    command = [sys.executable, "-c", _BURN, str(os.getpid()), str(repo)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()

        def toggle(on: bool) -> None:
            process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)

        try:
            toggle(False)
            yield toggle
        finally:
            process.kill()

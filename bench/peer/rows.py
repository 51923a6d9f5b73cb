"""What is made of the times: a row a case, load and kind of buffers, and the file of a run.

The file is `{"version": 1, "when", "machine", "load", "loads", "sides": {name: version},
"failures": {side: text}, "rows": [...]}`, and a row has

    op, ranks, bytes, buffers (plain, mapped or prepared), load (quiet or one busy core), rounds
    ours_us, openmpi_us, mpich_us, gloo_us, roofline_us: medians over the rounds of the mean per call of the
        slowest rank; null: not measured
    meeting_us: all ranks' processes wait for each other once, in C and shared memory; the least of all
        rounds, since two that woke up on one core need ten times as long
    passing_us: each process hands `bytes` to the next through shared memory, in C; null: not measured
    spread: {side: [p25, p75] in us}
    fastest, ratio, target, met: a peer, ours over it (of the medians), and what is asked
    roofline_fraction, roofline_target, roofline_met: the roofline's time over ours; null: nothing is asked
    gb_per_second: the operation's least traffic, of all ranks, over our time
    others: the part of the machine's processor time that other processes had in these rounds (median)
    why: of a miss, a known reason for rows of this kind, where it can explain the row
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.peer.measure import LOADS, Outcome, Times
from bench.peer.sides import PEERS, SIDES
from bench.peer.targets import ratio_target, roofline_target, why
from bench.train.outcome import quantile
from bench.train.pool import DISTURBED

__all__ = ["as_json", "counted", "document", "machine", "missed", "reason", "rows"]

VERSION = 1
# A known reason costs some microseconds, or the peers as much as us: it does not make a call half as slow
# again as the fastest peer's. A row beyond has to be looked at.
EXPLAINED = 1.5


def document(outcome: Outcome, cores: int) -> dict[str, Any]:
    """The whole file of a run."""
    made = [row for times in outcome.times for row in rows(times, cores)]
    loads = [load for load in LOADS if any(row["load"] == load for row in made)]
    return {
        "version": VERSION,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "load": ", ".join(loads),
        "loads": loads,
        "sides": outcome.versions,
        "failures": outcome.failures,
        "rows": made,
    }


def as_json(found: Mapping[str, Any]) -> str:
    """The file's text, one row a line, so that two runs can be compared as text."""
    head = json.dumps({key: value for key, value in found.items() if key != "rows"}, indent=1)
    lines = ",\n".join(json.dumps(row) for row in found["rows"])
    return f'{head.removesuffix("}").rstrip()},\n "rows": [\n{lines}\n ]\n}}\n'


def rows(times: Times, cores: int) -> list[dict[str, Any]]:
    """One a kind of our buffers, all beside the same peers and roofline."""
    case, quiet = times.case, times.load == LOADS[0]
    whole = max((len(rounds) for rounds in times.rounds.values()), default=0)
    taken = {
        side: {
            kind: rounds
            for (name, kind), rounds in times.rounds.items()
            if name == side and len(rounds) == whole  # fewer: it failed on the way
        }
        for side in SIDES
    }
    meeting, passing = (taken["roofline"].pop(kind, None) for kind in ("meeting", "passing"))
    others = {side: _best(taken[side]) for side in (*PEERS, "roofline")}
    made = []
    for kind in SIDES["ours"].kinds:
        if kind not in taken["ours"]:
            continue
        rounds = taken["ours"][kind]
        us = {side: 1e6 * quantile(its, 0.5) if its else None for side, its in others.items()}
        ours = 1e6 * quantile(rounds, 0.5)
        spread = {"ours": rounds, **{side: its for side, its in others.items() if its}}
        peers = {side: value for side in PEERS if (value := us[side]) is not None}
        fastest = min(peers, key=peers.__getitem__, default=None)
        ratio = None if fastest is None else ours / peers[fastest]
        limit = us["roofline"]
        fraction = None if limit is None else limit / ours
        target, floor = ratio_target(case, kind, cores, quiet), roofline_target(case, kind, cores, quiet)
        row = {
            "op": case.op,
            "ranks": case.ranks,
            "bytes": case.bytes,
            "buffers": kind,
            "load": times.load,
            "ours_us": ours,
            **{f"{side}_us": value for side, value in us.items()},
            "meeting_us": None if meeting is None else 1e6 * min(meeting),
            "passing_us": None if passing is None else 1e6 * quantile(passing, 0.5),
            "spread": {
                side: [1e6 * quantile(its, part) for part in (0.25, 0.75)] for side, its in spread.items()
            },
            "fastest": fastest,
            "ratio": ratio,
            "target": target,
            "met": None if ratio is None else ratio <= target,
            "roofline_fraction": fraction,
            "roofline_target": floor,
            "roofline_met": None if floor is None or fraction is None else fraction >= floor,
            "gb_per_second": case.least_bytes / ours / 1e3,
            "others": quantile(times.others, 0.5),
            "rounds": whole,
        }
        made.append(row | {"why": reason(row | {"why": why(row)})})
    return made


def missed(row: Mapping[str, Any]) -> bool:
    """Is a target of this row not met?"""
    return row["met"] is False or row["roofline_met"] is False


def counted(row: Mapping[str, Any]) -> bool:
    """Whether a row says something: others had next to nothing of the machine in its rounds (the median)."""
    others = row.get("others")
    return others is None or others <= DISTURBED


def reason(row: Mapping[str, Any]) -> str | None:
    """The known reason for rows of this kind (`why`), where it can explain this one; else None.

    It can explain a missed target on a quiet machine, up to `EXPLAINED` of the fastest peer's time.
    """
    quiet = row["load"] == LOADS[0] and counted(row)
    within = row["ratio"] is None or row["ratio"] <= EXPLAINED
    return row.get("why") if missed(row) and quiet and within else None


def _best(kinds: Mapping[str, Sequence[float]]) -> Sequence[float]:
    """The rounds of the kind with the least median: the roofline's two ways to store."""
    return min(kinds.values(), key=lambda rounds: quantile(rounds, 0.5), default=())


def machine() -> dict[str, Any]:
    """What this run was measured on."""
    info: dict[str, Any] = {"cpu": platform.machine(), "cores": len(os.sched_getaffinity(0))}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            info["cpu"] = line.partition(":")[2].strip()
            break
    for level in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        name, kind = (level / "level").read_text().strip(), (level / "type").read_text().strip()
        if kind != "Instruction":
            info[f"l{name}_cache"] = (level / "size").read_text().strip()
    return info | {
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }

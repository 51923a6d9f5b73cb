"""A few figures of ours beside those of bench/baseline.json, in under a minute: `python -m bench.smoke`.

Times of two machines, or of two days, do not compare. So each is divided by what the machine needs for the
same case: the least traffic, by as many processes, one meeting of them, for plain arrays the passing of as
many bytes from process to process (all by `bench.peer`'s roofline program, in the same rounds), and one call
from Python to C. That quotient is what is kept, and compared. It is a look, not a test: the exit status says
whether it could be measured, never how fast it was.

`--write-baseline` measures more rounds and writes the file.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import tempfile
import timeit
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pynccl
from bench.peer.cases import OPS, Case, size_in_words
from bench.peer.measure import Plan, measure
from bench.peer.rows import document
from bench.peer.sides import SideError
from bench.peer.table import aligned

__all__ = ["BASELINE", "compare", "main"]

BASELINE = Path(__file__).resolve().parent / "baseline.json"
RANKS, SIZES = (2, 4), (8, 64 << 10, 1 << 20, 16 << 20)
ROUNDS, BASELINE_ROUNDS = 5, 11
KEY = ("op", "ranks", "bytes", "buffers")
NOTABLE = (
    1.5  # slower, or faster, by this: a word for the reader; with ranks sharing cores, 1.3 is usual noise
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 if it could not be measured, 2 for misuse."""
    parser = argparse.ArgumentParser(prog="python -m bench.smoke", description=__doc__.partition("\n")[0])
    parser.add_argument("--write-baseline", action="store_true", help="keep what is measured, for later runs")
    parser.add_argument("--baseline", type=Path, default=BASELINE, help="the file (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        known = None if options.write_baseline else _read(options.baseline)
        found = _found(BASELINE_ROUNDS if options.write_baseline else ROUNDS)
        if options.write_baseline:
            rows = ",\n".join(json.dumps(row) for row in found["rows"])
            head = json.dumps(found["machine"])
            options.baseline.write_text(f'{{"version": 1, "machine": {head},\n"rows": [\n{rows}\n]}}\n')
    except (SideError, OSError, ValueError, pynccl.NcclError) as error:
        print(f"smoke: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(compare(found, known))
    return 0


def compare(found: Mapping[str, Any], known: Mapping[str, Any] | None) -> str:
    """Both as a table; rows that only one has show "-" for the other."""
    before = {tuple(row[name] for name in KEY): row for row in (known or {"rows": []})["rows"]}
    table = [
        ("op", "ranks", "size", "buffers", "ours us", "machine us", "quotient", "baseline", "change", "")
    ]
    for row in found["rows"]:
        old = before.get(tuple(row[name] for name in KEY))
        change = row["quotient"] / old["quotient"] if old else None
        word = (
            "" if change is None or 1 / NOTABLE < change < NOTABLE else "slower" if change > 1 else "faster"
        )
        table.append(
            (
                row["op"],
                str(row["ranks"]),
                size_in_words(row["bytes"]),
                row["buffers"],
                f"{row['ours_us']:.4g}",
                f"{row['machine_us']:.4g}",
                f"{row['quotient']:.2f}",
                f"{old['quotient']:.2f}" if old else "-",
                f"{change:.2f}" if change else "-",
                word,
            )
        )
    here, there = (_machine(one) for one in (found, known or found))
    lines = [
        f"here: {here}",
        f"baseline: {there}" if known else "no baseline: python -m bench.smoke --write-baseline makes one",
        "quotient: ours over the machine's time for the least traffic, a meeting of ranks, a ctypes call,",
        "and for plain arrays passing the bytes from process to process;",
        "change: quotient over the baseline's, below 1 is better",
    ]
    return "\n".join([*lines, "", *aligned(table)])


def _machine(run: Mapping[str, Any]) -> str:
    machine, others = run["machine"], statistics.median(row["others"] for row in run["rows"])
    return f"{machine['cpu']}, {machine['cores']} cores, of which other processes had {others:.0%}"


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    known: dict[str, Any] = json.loads(path.read_text())
    if known.get("version") != 1:
        raise ValueError(
            f"{path} has version {known.get('version')!r}, not 1; write it anew: --write-baseline"
        )
    return known


def _found(rounds: int) -> dict[str, Any]:
    cases = tuple(Case.of(op, ranks, size) for ranks in RANKS for op in OPS for size in SIZES)
    plan = Plan(cases, ("ours", "roofline"), rounds=rounds, turn=0.012, timeout=30)
    with tempfile.TemporaryDirectory(prefix="smoke.") as folder:
        outcome = measure(plan, Path(folder), lambda line: None)
    if outcome.failures:
        raise SideError("; ".join(f"{side}: {what}" for side, what in outcome.failures.items()))
    made = document(outcome, len(os.sched_getaffinity(0)))
    rows, call = [], _call_us()
    for row in made["rows"]:
        needs = row["roofline_us"] + row["meeting_us"] + call
        if row["buffers"] == "plain":  # these have to cross between the ranks' memories
            needs += row["passing_us"] or 0.0
        figures = {"ours_us": row["ours_us"], "machine_us": needs, "quotient": row["ours_us"] / needs}
        rows.append(
            {name: row[name] for name in KEY}
            | {name: float(f"{x:.4g}") for name, x in figures.items()}
            | {"others": round(row["others"], 3)}
        )
    return {"machine": made["machine"], "rows": rows}


def _call_us() -> float:
    """A call of ctypes that does next to nothing: the median of many batches."""
    function, batch = ctypes.CDLL(None).getppid, 1000
    times = timeit.repeat(function, number=batch, repeat=31)
    return 1e6 * statistics.median(times) / batch


if __name__ == "__main__":
    sys.exit(main())

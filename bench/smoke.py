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
import math
import os
import statistics
import sys
import tempfile
import timeit
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pynccl
from bench.ending import INTERRUPTED, Terminated, terminated_by_signals
from bench.files import refuse_unwritable, written
from bench.options import UsageError
from bench.peer.cases import OPS, Case, size_in_words
from bench.peer.measure import Plan, measure
from bench.peer.rows import document
from bench.peer.sides import SideError
from bench.peer.table import aligned

__all__ = ["BASELINE", "compare", "main"]

BASELINE = Path(__file__).resolve().parent / "baseline.json"
RANKS, SIZES = (2, 4), (8, 64 << 10, 1 << 20, 16 << 20)
ROUNDS, BASELINE_ROUNDS = 5, 11
REMEDY = "write it anew: python -m bench.smoke --write-baseline"
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
    baseline = str(options.baseline)
    try:
        if options.write_baseline:
            refuse_unwritable("--baseline", baseline)
        known = None if options.write_baseline else _read(options.baseline)
        with terminated_by_signals():
            found = _found(BASELINE_ROUNDS if options.write_baseline else ROUNDS)
    except UsageError as error:
        print(f"smoke: {error}", file=sys.stderr)
        return 2
    except (SideError, OSError, pynccl.NcclError) as error:
        print(f"smoke: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except Terminated as end:
        return end.status
    print(compare(found, known), flush=True)
    if not options.write_baseline:
        return 0
    rows = ",\n".join(json.dumps(row) for row in found["rows"])
    head = json.dumps(found["machine"])
    text = f'{{"version": 1, "machine": {head},\n"rows": [\n{rows}\n]}}\n'
    return 0 if written("smoke", "--baseline", baseline, text) else 1


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
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--baseline {path} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON ({error}); {REMEDY}") from None
    version = known.get("version") if isinstance(known, dict) else None
    if version != 1:
        raise UsageError(f"{path} has version {version!r}, not 1; {REMEDY}")
    if what := _missing(known):
        raise UsageError(f"{path} is no baseline: {what}; {REMEDY}")
    return dict(known)


def _missing(known: Mapping[str, Any]) -> str | None:
    """What `compare` could not do without, or None."""
    match known.get("machine"):
        case {"cpu": str(), "cores": int()}:
            pass
        case _:
            return '"machine" has no "cpu" and "cores"'
    rows = known.get("rows")
    if not isinstance(rows, list) or not rows:
        return '"rows" is no list of rows'
    for number, row in enumerate(rows, 1):
        match row:
            case {"op": str(), "ranks": int(), "bytes": int(), "buffers": str()}:
                pass
            case _:
                return f"row {number} does not say which case it is of"
        for name, above in (("quotient", True), ("others", False)):
            match row.get(name):
                case int() | float() as value if 0 <= value < math.inf and (value or not above):
                    pass
                case _:
                    return f'row {number} has no "{name}"'
    return None


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

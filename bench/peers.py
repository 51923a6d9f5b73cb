"""Ours against Open MPI, MPICH and Gloo, and against the machine's memory, in one interleaved run.

    python -m bench.peers --ranks 2,4 --ops all_reduce,all_gather,reduce_scatter,broadcast,alltoall \
        --sizes 8,256,4K,64K,1M,16M,64M --peers openmpi,mpich,gloo --load 0,1 --json out.json

All sides' rank processes live side by side and take turns for each case: see `bench.peer`. Calls are made
back to back on arrays that stay, float32, out of place (except broadcast, and Gloo's all_reduce, which has no
other way); each side's result is checked once a case. How a figure comes about, and what was found:
docs/performance.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pynccl
from bench.ending import (
    BROKEN_PIPE,
    INTERRUPTED,
    Terminated,
    discard_output,
    in_words,
    terminated_by_signals,
)
from bench.files import refuse_unwritable, write_whole, written
from bench.numbers import real
from bench.options import UsageError
from bench.peer import environment
from bench.peer.cases import OPS, Case
from bench.peer.measure import Outcome, Plan, measure
from bench.peer.rows import as_json, counted, document, missed
from bench.peer.sides import PEERS, SideError
from bench.peer.table import text

__all__ = ["main", "options_of", "plan_of"]

PATIENCE = (
    "rounds that other processes disturb are made again, up to this part of the rounds (default: 0.5); a row "
    "that is disturbed all the same is marked, and counts neither as met nor as missed"
)
QUICK = {"sizes": "8,4K,1M,16M", "rounds": 5, "turn_ms": 15}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 if a side failed or (with --strict) a target was missed; 2: misuse; 128+s: signal s.

    The file of --json has every finished case at every moment, and the table is printed whatever happened.
    """
    options = options_of(arguments)
    outcome, told = Outcome(), 0
    try:
        refuse_unwritable("--json", options.json)
        with terminated_by_signals():
            plan = _set_up(plan_of(options), outcome)
            if not options.set_up:
                with tempfile.TemporaryDirectory(prefix="peers.") as folder:
                    measure(plan, Path(folder), partial(_say_and_write, options.json, outcome), outcome)
    except UsageError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2
    except (SideError, OSError, pynccl.NcclError) as error:
        outcome.failures["ours"] = str(error)  # what was measured before is still worth a table
    except (KeyboardInterrupt, Terminated) as end:
        told = end.status if isinstance(end, Terminated) else INTERRUPTED
        outcome.failures["the run"] = in_words(end)
    if options.set_up:
        print("\n".join(outcome.failures.values()), file=sys.stderr)
        return told or (1 if outcome.failures else 0)
    found = document(outcome, len(os.sched_getaffinity(0)))
    try:
        print(text(found), flush=True)
    except BrokenPipeError:
        discard_output()
        told = told or BROKEN_PIPE
    kept = not options.json or written("peers", "--json", options.json, as_json(found))
    bad = (
        not kept
        or outcome.failures
        or (options.strict and any(counted(row) and missed(row) for row in found["rows"]))
    )
    return told or (1 if bad else 0)


def _say_and_write(path: str | None, outcome: Outcome, line: str) -> None:
    """A line of progress, after which there may be another case."""
    _say(line)
    if path:
        with contextlib.suppress(OSError):  # the last one, after the table, says so
            write_whole(Path(path), as_json(document(outcome, len(os.sched_getaffinity(0)))))


def plan_of(options: argparse.Namespace) -> Plan:
    """What the options ask for. Sizes that come to the same case are measured once."""
    cases = (
        Case.of(op, ranks, size) for ranks in options.ranks for op in options.ops for size in options.sizes
    )
    return Plan(
        cases=tuple(dict.fromkeys(cases)),
        sides=("ours", *options.peers, "roofline"),
        loads=tuple(options.load),
        rounds=options.rounds,
        loaded_rounds=options.loaded_rounds or options.rounds,
        patience=options.patience,
        turn=options.turn_ms / 1e3,
        timeout=options.timeout,
    )


def _set_up(plan: Plan, outcome: Outcome) -> Plan:
    """Make all that the plan needs, before anything is measured; what cannot be made is left out of it."""
    sides = []
    for name in plan.sides:
        try:
            if name == "roofline":
                environment.roofline_program()
            elif name in PEERS:
                environment.python_of(name)
            sides.append(name)
        except OSError as error:
            outcome.failures[name] = str(error)
            _say(f"left out: {name}: {error}")
    return replace(plan, sides=tuple(sides))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- the command line ---------------------------------------------------------------------------------------


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line; SystemExit for misuse."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--ranks", type=_list_of(_count), default="2,4", help="numbers of ranks (default: 2,4)")
    add("--ops", type=_list_of(_op), default=",".join(OPS), help=f"of {', '.join(OPS)} (default: all)")
    sizes = "8,256,4K,64K,1M,16M,64M"
    add("--sizes", type=_list_of(_size), help=f"bytes, with K, M or G of 1024 (default: {sizes})")
    add(
        "--peers",
        type=_list_of(_peer, empty=True),
        default=",".join(PEERS),
        help="'' for none (default: all)",
    )
    add("--load", type=_list_of(_load), default="0", help="0: quiet; 1: beside a process that burns a core")
    add("--rounds", type=_count, help="a case (default: 7)")
    add("--loaded-rounds", type=_count, help="a case beside the burning process (default: as --rounds)")
    add("--patience", type=real(0), default=0.5, help=PATIENCE)
    add("--turn-ms", type=_count, help="of a side in a round, roughly (default: 30)")
    add(
        "--timeout",
        type=real(0, above=True),
        default=90.0,
        help="seconds that no answer of a rank may take (default: 90)",
    )
    add("--quick", action="store_true", help=f"fewer: {QUICK}")
    add("--json", help="the file to write")
    add("--strict", action="store_true", help="a missed target is a failure")
    add("--set-up", action="store_true", help="make the environments, and measure nothing")
    options = parser.parse_args(arguments)
    defaults = QUICK if options.quick else {"sizes": sizes, "rounds": 7, "turn_ms": 30}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, _list_of(_size)(value) if name == "sizes" else value)
    return options


def _list_of(item, empty: bool = False):  # type: ignore[no-untyped-def]
    def parse(text: str) -> list:
        if not text and empty:
            return []
        return [item(part.strip()) for part in text.split(",")]

    parse.__name__ = "list"
    return parse


def _one_of(what: str, known: Sequence[str]):  # type: ignore[no-untyped-def]
    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text!r} is no {what}; use some of {', '.join(known)}")
        return text

    return parse


_op, _peer = _one_of("operation", tuple(OPS)), _one_of("peer", PEERS)


def _load(text: str) -> int:
    return int(_one_of("load", ("0", "1"))(text))


def _count(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1")
    return int(text)


def _size(text: str) -> int:
    found = re.fullmatch("([1-9][0-9]*)([KMG]?)", text.upper())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; use bytes, or a number with K, M or G")
    return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2]]


if __name__ == "__main__":
    sys.exit(main())

"""The cost of a call with the communication taken away, and of `import pynccl`.

    python -m bench.call_overhead
    python -m bench.call_overhead --json overhead.json

The calls go to a library that does nothing (built here), so what is left is the way through Python: plain
calls of every collective in every form, prepared calls, `cupy.cuda.nccl`, a bare ctypes call, and the C call.
All take turns in one process; numbers are medians of the rounds. docs/bench.md says what is in them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bench import machine
from bench.files import refuse_unwritable, written
from bench.options import UsageError
from bench.overhead.imports import has_cupy, import_times
from bench.overhead.null import Null, build_null
from bench.overhead.subjects import FORMS
from pynccl.host.__main__ import preload_environment
from pynccl.host.build import BuildError
from pynccl.operations import OPERATIONS

__all__ = ["main", "table"]

FILE_VERSION = 1
KIND = "call_overhead"
PLAIN_US, PREPARED_US, IMPORT_MS = 1.5, 0.5, 60.0
# An array is made in these, which is no part of the call.
NO_TARGET = ("new",)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; its exit status: 0, targets met or not, 1 if it could not measure, 2 for misuse."""
    options = _parser().parse_args(arguments)
    try:
        refuse_unwritable("--json", None if options.json == "-" else options.json)
        result = measure(build_null(), options.rounds, options.calls, options.imports)
    except UsageError as error:
        print(f"call_overhead: {error}", file=sys.stderr)
        return 2
    except (BuildError, RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        print(f"call_overhead: {error}", file=sys.stderr)
        return 1
    if options.json == "-":
        print(json.dumps(result, indent=1))
        return 0
    print(table(result), flush=True)
    kept = not options.json or written(
        "call_overhead", "--json", options.json, json.dumps(result, indent=1) + "\n"
    )
    return 0 if kept else 1


def measure(null: Null, rounds: int, calls: int, imports: int) -> dict[str, Any]:
    """Everything that the table and the file say."""
    packages = ("pynccl-anywhere", "numpy", "cupy-cuda12x", "cupy-cuda13x")
    result: dict[str, Any] = {
        "version": FILE_VERSION,
        "kind": KIND,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine.describe(*packages),
        "rounds": rounds,
        "calls_a_round": calls,
    }
    result["calls"] = [row | _verdict(row) for row in _call_times(null, rounds, calls)]
    result["imports"] = [
        row | {"target_ms": IMPORT_MS, "met": row["beyond_numpy_ms"] <= IMPORT_MS}
        for row in (import_times(imports) if imports else [])
    ]
    return result


def _call_times(null: Null, rounds: int, calls: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "bench.overhead.subjects", str(null.library), str(rounds), str(calls)]
    environment = dict(os.environ)
    if has_cupy():
        command.append("cupy")
        environment = preload_environment(environment, null.preload)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"the process that times calls failed:\n{done.stderr.strip()}")
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def _verdict(row: Mapping[str, Any]) -> dict[str, Any]:
    if row["form"] is None or row["form"] in NO_TARGET:
        return {"target_us": None, "met": None}
    target = PREPARED_US if row["form"] == "prepared" else PLAIN_US
    return {"target_us": target, "met": row["above_c_us"] <= target}


# --- what is printed ----------------------------------------------------------------------------------------


def table(result: Mapping[str, Any]) -> str:
    """The result for people. A cell that missed its target has a ``!``."""
    rows, where = result["calls"], result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    cells = {(row["collective"], row["form"]): row for row in rows if row["form"]}
    lines = [
        f"# {where['cpu']}, {where['cores']} cores, load {where['load'][0]:g}; Python {where['python']}, "
        f"{versions}",
        f"# us a call above the C call, median of {result['rounds']} rounds of {result['calls_a_round']} "
        f"calls; ! misses its target: plain {PLAIN_US:g}, prepared {PREPARED_US:g} us ('new' has none: it "
        "makes an array)",
        f"{'':14}" + "".join(f"{form:>10}" for form in FORMS),
    ]
    for name in OPERATIONS:
        lines.append(f"{name:14}" + "".join(_cell(cells.get((name, form))) for form in FORMS))
    lines.append("")
    for row in (row for row in rows if not row["form"]):
        lines.append(
            f"{row['name']:26} {row['us']:8.3f} us  (p25 {row['p25_us']:.3f}, p75 {row['p75_us']:.3f})"
        )
    if not any("cupy" in row["name"] for row in rows):
        lines.append(f"{'cupy.cuda.nccl':26} not measured: CuPy is not installed")
    for row in result["imports"]:
        verdict = "met" if row["met"] else "MISSED"
        lines.append(
            f"import pynccl {row['name']:12} {row['beyond_numpy_ms']:8.1f} ms  beyond NumPy's "
            f"{row['numpy_ms']:.1f} ({row['least_ms']:.1f} to {row['most_ms']:.1f}); "
            f"target {row['target_ms']:g}: {verdict}"
        )
    judged = [row["met"] for row in (*rows, *result["imports"]) if row["met"] is not None]
    lines.append(f"{sum(judged)} of {len(judged)} targets met")
    return "\n".join(lines)


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return f"{'-':>9} "
    return f"{row['above_c_us']:9.2f}{'!' if row['met'] is False else ' '}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.call_overhead", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rounds", type=_at_least(2), default=21, help="turns of each subject (default 21)")
    parser.add_argument("--calls", type=_at_least(1), default=2000, help="calls in a turn (default 2000)")
    parser.add_argument(
        "--imports", type=_at_least(0), default=7, help="fresh processes of each kind (default 7; 0: none)"
    )
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write JSON to FILE; to stdout without FILE"
    )
    return parser


def _at_least(least: int) -> Any:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
        return int(text)

    return parse


if __name__ == "__main__":
    sys.exit(main())

"""All-reduce by schedules, interpreted and compiled, against the library's own choice.

    python -m bench.algorithms_perf -g 4 -b 1K -e 16M --json out.json

Each way does the same all-reduce (float32 sum, out of place). Per size the ways take turns, `-c` cycles of
some calls each. The time of a cycle is the slowest rank's mean; that of a way is its fastest cycle, which
other work of the machine has disturbed least (the JSON has the median too). Every way's result is compared
with the library's to the bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import pynccl
from bench.devices import device_of
from bench.files import refuse_unwritable, write_whole, written
from bench.numbers import whole
from bench.options import MOST_RANKS, UsageError, parse_size
from pynccl.collectives import generate
from pynccl.collectives.compiled import compile
from pynccl.collectives.execute import run
from pynccl.launch import launch
from pynccl.rendezvous import find_launcher

__all__ = ["main"]

NAME = "algorithms_perf"
DEFAULT = "library"
CYCLE_SECONDS = 0.03  # of calls in a cycle, as far as -n and two calls allow


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; its exit status: 0, 1 if a result was wrong, 2 for a wrong argument."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(arguments)
    try:
        refuse_unwritable("--json", options.json)
    except UsageError as error:
        print(f"algorithms_perf: {error}", file=sys.stderr)
        return 2
    if options.gpus > 1 and find_launcher() is None:
        command = [sys.executable, "-m", "bench.algorithms_perf", *arguments]
        return launch(command, options.gpus, output="raw", environ={"OMP_NUM_THREADS": "1", **os.environ})
    with pynccl.init() as comm:
        try:
            return Comparison(comm, options).run()
        except ValueError as error:
            if comm.rank == 0:
                print(f"algorithms_perf: {error}", file=sys.stderr)
            return 2


Way = Callable[[Any, Any], Any]


class Comparison:
    """One rank's part of the benchmark."""

    def __init__(self, comm: Any, options: argparse.Namespace) -> None:
        self.comm, self.options = comm, options
        self.device = device_of(comm.library.kind, comm.rank, False)
        self.ways = dict(self._ways())
        self.wrong = 0

    def run(self) -> int:
        options = self.options
        buffers = [
            self.device.allocate(self.comm, options.end, options.buffers == "mapped") for _ in range(2)
        ]
        rows, size = [], options.begin
        if self.comm.rank == 0:
            print(f"# {self.comm.size} ranks, {self.comm.library.kind} library, {options.buffers} buffers")
            print(
                f"# all_reduce, float32 sum, out of place; microseconds, and times the library's ({DEFAULT})"
            )
            print(f"# {'bytes':>10} " + " ".join(f"{name:>28}" for name in self.ways))
        while size <= options.end:
            x, out = (buffer[:size].view(np.float32) for buffer in buffers)
            rows.append(self._size(size, x, out))
            size *= options.factor
            if self.comm.rank == 0 and options.json:
                with contextlib.suppress(OSError):  # the last one says so
                    write_whole(Path(options.json), self._report(rows))
        kept = self.comm.rank or not options.json or written(NAME, "--json", options.json, self._report(rows))
        return 1 if self.wrong or not kept else 0

    def _ways(self) -> Any:
        comm = self.comm
        yield DEFAULT, lambda x, out: comm.all_reduce(x, out)
        for name in self.options.algorithms.split(","):
            schedule = generate(name, comm.size)
            yield f"{name} interpreted", lambda x, out, s=schedule: run(s, comm, x, out)
            if comm.library.kind == "host":
                yield f"{name} compiled", compile(schedule, comm)

    def _size(self, size: int, x: Any, out: Any) -> dict[str, Any]:
        options, comm = self.options, self.comm
        self.device.put(x, (np.arange(x.size) % 13 + comm.rank).astype(np.float32))
        comm.all_reduce(x, out)
        wanted = np.array(self.device.get(out))
        exact = {}
        for name, way in self.ways.items():
            out.fill(0)
            way(x, out)
            exact[name] = bool((self.device.get(out) == wanted).all())
        warm = {name: self._time(way, x, out, options.warmup) for name, way in self.ways.items()}
        warm_ups = comm.all_gather_object(warm)
        calls = {
            name: min(options.iterations, max(2, int(CYCLE_SECONDS * 1e6 / max(w[name] for w in warm_ups))))
            for name in self.ways
        }
        times: dict[str, list[float]] = {name: [] for name in self.ways}
        for _ in range(options.cycles):
            for name, way in self.ways.items():
                times[name].append(self._time(way, x, out, calls[name]))
        every = np.array(comm.all_gather_object(list(times.values())))  # rank, way, cycle
        exacts = comm.all_gather_object(exact)
        slowest = every.max(axis=0)
        result: dict[str, Any] = {"bytes": size, "ways": {}}
        base = float(slowest[0].min())
        for name, cycles in zip(self.ways, slowest.tolist(), strict=True):
            good = all(of_rank[name] for of_rank in exacts)
            self.wrong += not good
            result["ways"][name] = {
                "microseconds": min(cycles),
                "median": statistics.median(cycles),
                "times_library": min(cycles) / base,
                "calls": calls[name],
                "exact": good,
            }
        if comm.rank == 0:
            cells = (
                f"{way['microseconds']:14.1f} us {way['times_library']:7.2f} x"
                + ("   " if way["exact"] else " !!")
                for way in result["ways"].values()
            )
            print(f"  {size:>10} " + " ".join(f"{cell:>28}" for cell in cells), flush=True)
        return result

    def _time(self, way: Way, x: Any, out: Any, calls: int) -> float:
        """Mean microseconds of a call on this rank."""
        self.comm.barrier()
        begun = self.device.mark()
        for _ in range(calls):
            way(x, out)
        ended = self.device.mark()
        self.device.finish(self.comm, 600.0)
        return float(self.device.seconds_between(begun, ended)) * 1e6 / calls

    def _report(self, rows: list[dict[str, Any]]) -> str:
        report = {
            "ranks": self.comm.size,
            "library": self.comm.library.version_string,
            "kind": self.comm.library.kind,
            "buffers": self.options.buffers,
            "cores": len(os.sched_getaffinity(0)),
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "rows": rows,
        }
        return json.dumps(report, indent=1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.algorithms_perf", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "-g", "--gpus", type=whole(1, MOST_RANKS), default=1, help="ranks to start (outside of a launcher)"
    )
    parser.add_argument("-b", "--begin", type=_size, default=1 << 10, help="smallest size, such as 1K")
    parser.add_argument("-e", "--end", type=_size, default=1 << 24, help="largest size, such as 16M")
    parser.add_argument("-f", "--factor", type=whole(2), default=4, help="from one size to the next")
    parser.add_argument(
        "-n", "--iterations", type=whole(1), default=100, help="at most so many calls a cycle"
    )
    parser.add_argument("-c", "--cycles", type=whole(1), default=7)
    parser.add_argument("-w", "--warmup", type=whole(1), default=2)
    parser.add_argument("--algorithms", default="ring,tree,halving_doubling")
    parser.add_argument("--buffers", choices=("mapped", "plain"), default="mapped", help="plain: np.empty")
    parser.add_argument("--json", help="write the numbers to this file")
    return parser


def _size(text: str) -> int:
    try:
        size = int(parse_size(text))
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size < 4:
        raise argparse.ArgumentTypeError(f"{text}: a size is at least one float32, 4 bytes")
    return size // 4 * 4


if __name__ == "__main__":
    sys.exit(main())

"""The command line: look at algorithms, prove them, compare what they cost.

    python -m pynccl.collectives show ring --ranks 4
    python -m pynccl.collectives cost ring --ranks 64 --bytes 1M --topology nodes:8 --trace ring.json
    python -m pynccl.collectives compare --algorithms ring,tree --ranks 64 --bytes 1M
    python -m pynccl.collectives verify --all --ranks 1-33 --json out.json --mutations 200 --seed 0
    python -m pynccl.launch -n 4 -m pynccl.collectives tune --out selection.json

Where an algorithm is named, the JSON or MSCCL XML file of a schedule will do.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pynccl.collectives import report
from pynccl.collectives.cost import cost
from pynccl.collectives.diagram import LEGEND, diagram
from pynccl.collectives.msccl import from_msccl, to_msccl
from pynccl.collectives.options import algorithm, at_least, numbers, output, param, sizes
from pynccl.collectives.registry import ALGORITHMS, algorithms, generate
from pynccl.collectives.schedule import COLLECTIVES, Schedule
from pynccl.collectives.topology import Topology, parse
from pynccl.collectives.trace import write_trace
from pynccl.collectives.verify import SLOTS, Fault, verify

__all__ = ["main"]

_RANKS, _COMPARED_RANKS = 4, 8  # where none are given
_MOST_COLUMNS = 16  # ranks in a drawing
_MOST_HOPS = 40  # of a critical path
_TABLE_LEGEND = (
    "in[0], out[0], scratch[0]: chunks of these arrays, [2:4] is 2 and 3; a round ends when its messages "
    "have come"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 0, 1 for a fault found, 2 for a wrong argument."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if arguments[:1] == ["selftest"]:  # these two run something, on ranks; their options are their own
            return importlib.import_module("pynccl.collectives.execute").selftest(arguments[1:])
        if arguments[:1] == ["tune"]:
            return importlib.import_module("pynccl.collectives.tune").main(arguments[1:])
        options = _parser().parse_args(arguments)
        status = options.run(options)
        sys.stdout.flush()  # what nobody reads any more is an error now, and not at exit
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE  # as of a program that its reader has left
    except Fault as fault:
        print(fault, file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"python -m pynccl.collectives {arguments[0]}: {error}", file=sys.stderr)
        return 2


def _show(options: argparse.Namespace) -> int:
    schedule = _load(options)
    if options.json:
        print(schedule.to_json())
    elif options.xml:
        print(to_msccl(schedule))
    else:
        drawn = not options.table and schedule.n <= _MOST_COLUMNS
        steps, legend = (diagram(schedule), LEGEND) if drawn else (schedule.table(), _TABLE_LEGEND)
        print(f"{steps}\n{legend}", verify(schedule), sep="\n\n")
    return 0


def _cost(options: argparse.Namespace) -> int:
    schedule = _load(options)
    topology = parse(options.topology, schedule.n)
    costs = [cost(schedule, size, topology, itemsize=options.itemsize) for size in options.bytes]
    if options.json:
        print(json.dumps([each.as_json() for each in costs]))
    else:
        print(*costs, sep="\n")
        last = costs[-1]
        few = f", the last {_MOST_HOPS} of {len(last.path)} hops" if len(last.path) > _MOST_HOPS else ""
        print(f"  critical path of {last.bytes} bytes{few}")
        for hop in last.path[-_MOST_HOPS:]:
            times = f"{hop.begin * 1e6:10.2f} - {hop.end * 1e6:10.2f} us"
            print(f"    {times}  rank {hop.rank} round {hop.round}: {hop.what}")
    if options.trace:
        size, itemsize = options.bytes[-1], options.itemsize
        path = write_trace(options.trace, schedule, size, topology, itemsize=itemsize)
        print(f"wrote {path}, of {size} bytes", file=sys.stderr)
    return 0


def _compare(options: argparse.Namespace) -> int:
    collective = options.collective
    names = options.algorithms or list(algorithms(collective))
    files = {name: _read(name, options.ranks) for name in names if Path(name).suffix in _READERS}
    n = next(
        (schedule.n for schedule in files.values()),
        _COMPARED_RANKS if options.ranks is None else options.ranks,
    )
    schedules = {name: files.get(name) or generate(name, n, collective=collective) for name in names}
    for name, schedule in schedules.items():
        if (schedule.n, schedule.collective) != (n, collective):
            raise ValueError(
                f"{name} is {schedule.collective} of {schedule.n} ranks, compared is {collective} of {n}; "
                "take schedules of one collective and one number of ranks"
            )
    topology: Topology = parse(options.topology, n)

    def costs(of: Sequence[int]) -> dict[str, list[Any]]:
        return {
            name: [cost(schedule, size, topology, itemsize=options.itemsize) for size in of]
            for name, schedule in schedules.items()
        }

    found = costs(options.bytes)
    if options.json:
        print(json.dumps([each.as_json() for row in found.values() for each in row]))
    else:
        print(report.comparison(found))
    if options.png:
        drawn = [1 << bits for bits in range(10, 31)]
        report.draw(costs(drawn), drawn, options.png)
        print(f"wrote {options.png}", file=sys.stderr)
    return 0


def _verify(options: argparse.Namespace) -> int:
    chosen = [row for row in ALGORITHMS.values() if options.all or row.name in options.algorithm]
    if options.collective:
        chosen = [row for row in chosen if row.collective == options.collective]
    files = [name for name in options.algorithm if Path(name).suffix in _READERS]
    unknown = [n for n in options.algorithm if n not in files and n not in {row.name for row in chosen}]
    if unknown or not (chosen or files):
        known = ", ".join(dict.fromkeys(name for _, name in ALGORITHMS))
        raise ValueError(
            f"no algorithm {', '.join(unknown) or 'named'}; take --all, a file, or some of {known}"
        )
    if options.ranks is not None and min(options.ranks) < 1:
        raise ValueError(f"--ranks {min(options.ranks)}; take 1 or more")
    if files and not chosen and (options.mutations or options.ranks is not None):
        raise ValueError(
            f"{files[0]}: a file is proved for its own number of ranks, and not mutated; leave out --ranks "
            "and --mutations, or name algorithms too"
        )
    ranks = range(1, 9) if options.ranks is None else options.ranks
    found = report.prove(chosen, list(ranks), [_read(name) for name in files], options.slots)
    print(found)
    if options.mutations:
        found.mutate(chosen, options.mutations, options.seed)
        print(found.mutants)
    if options.json:
        Path(options.json).write_text(json.dumps(found.as_json(), indent=1))
    return 0 if found.good else 1


def _load(options: argparse.Namespace) -> Schedule:
    if Path(options.algorithm).suffix in _READERS:
        if options.param:
            raise ValueError(f"{options.algorithm}: a file has no parameters; leave out -p")
        return _read(options.algorithm, options.ranks)
    params = dict(options.param)
    if not params.keys().isdisjoint(("n", "name", "collective")):
        raise ValueError(f"-p {', '.join(params)}: n is --ranks, and collective is --collective")
    return generate(
        options.algorithm,
        _RANKS if options.ranks is None else options.ranks,
        collective=options.collective,
        **params,
    )


_READERS = {".json": Schedule.from_json, ".xml": from_msccl}


def _read(path: str, ranks: int | None = None) -> Schedule:
    """The schedule of a file; ValueError unless it is of so many ranks (None: any number)."""
    try:
        schedule = _READERS[Path(path).suffix](Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if ranks not in (None, schedule.n):
        raise ValueError(f"{path} is a schedule of {schedule.n} ranks, not of {ranks}; leave out --ranks")
    return schedule


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pynccl.collectives", description=_first_line())
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="print the steps of an algorithm, and its proof")
    show.set_defaults(run=_show)
    _one_algorithm(show)
    form = show.add_mutually_exclusive_group()
    form.add_argument("--table", action="store_true", help="a line for each step instead of a drawing")
    form.add_argument("--json", action="store_true", help="the schedule as JSON")
    form.add_argument("--xml", action="store_true", help="the schedule as MSCCL XML")
    costs = commands.add_parser("cost", help="what an algorithm costs, and its critical path")
    costs.set_defaults(run=_cost)
    _one_algorithm(costs)
    _sizes(costs)
    costs.add_argument("--trace", type=output, help="write the timeline for Perfetto to this file")
    compare = commands.add_parser("compare", help="the costs of several algorithms side by side")
    compare.set_defaults(run=_compare)
    compare.add_argument(
        "--algorithms", type=_algorithms, help="ring,mine.json,...; none: all of the collective"
    )
    compare.add_argument("--ranks", type=at_least(1), help=f"{_COMPARED_RANKS} if not given, or a file's")
    compare.add_argument("--collective", default="all_reduce", choices=COLLECTIVES)
    _sizes(compare)
    compare.add_argument("--png", type=output, help="draw the times over sizes from 1K to 1G into this file")
    prove = commands.add_parser("verify", help="prove algorithms for many numbers of ranks")
    prove.set_defaults(run=_verify)
    prove.add_argument("algorithm", nargs="*", type=algorithm, help="names, or files of schedules")
    prove.add_argument("--all", action="store_true", help="every algorithm with all its variants and roots")
    prove.add_argument("--ranks", type=numbers, help="1-8 if not given; such as 8 or 1-33 or 2,4,8")
    prove.add_argument("--collective", choices=COLLECTIVES)
    prove.add_argument("--slots", type=numbers, default=list(SLOTS), help="messages that a connection holds")
    prove.add_argument("--json", type=output, help="write what was found to this file")
    prove.add_argument(
        "--mutations", type=at_least(0), default=0, help="test with this many wrong schedules, too"
    )
    prove.add_argument("--seed", type=int, default=0, help="of the choice of mutations")
    commands.add_parser(
        "selftest", help="run every algorithm against the library's own; start it with launch"
    )
    commands.add_parser("tune", help="measure which algorithm is best for which size; start it with launch")
    return parser


def _algorithms(text: str) -> list[str]:
    return [algorithm(each) for each in text.split(",")]


def _first_line() -> str:
    return (__doc__ or "").splitlines()[0]


def _one_algorithm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("algorithm", type=algorithm, help="its name, or the file of a schedule (.json, .xml)")
    parser.add_argument("--ranks", type=int, help=f"{_RANKS} if not given, or a file's")
    parser.add_argument("--collective", default="all_reduce", choices=COLLECTIVES)
    parser.add_argument("-p", "--param", type=param, action="append", default=[], help="such as channels=2")


def _sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bytes", type=sizes, default=[1 << 20], help="such as 1M or 1K,1M,1G")
    parser.add_argument("--itemsize", type=at_least(1), default=4, help="bytes of an element")
    parser.add_argument("--topology", default="flat", help="flat, nodes:8, rails:8, nodes:8,8,4")
    parser.add_argument("--json", action="store_true")


if __name__ == "__main__":
    sys.exit(main())

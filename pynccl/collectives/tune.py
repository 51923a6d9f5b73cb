"""Which algorithm for which size: measured on a communicator, written down, and used by one like it.

    table = tune(comm)                                          # every rank; some seconds
    table.save("selection.json")                                # on one of them
    comm = pynccl.Communicator(n, uid, rank, selection="selection.json")

    python -m pynccl.launch -n 4 -m pynccl.collectives tune --out selection.json

Candidates are the library's own choice and the schedules of `registry`, compiled or interpreted as
``algorithm="pynccl:..."`` would run them. Interpreted runs in host memory are measured too, to be seen, and
never chosen: nobody would get them. A table holds for as many ranks, spread over as many hosts in the same
way, on the same library; anything else is refused. Owns the measuring, the table and its check; that a call
looks into the table is in ``pynccl/calls.py``.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import functools
import hashlib
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pynccl.abi.errors import InvalidArgumentError, InvalidUsageError
from pynccl.arrays import view
from pynccl.collectives.execute import run
from pynccl.collectives.options import at_least, names_of, output
from pynccl.collectives.options import sizes as read_sizes
from pynccl.collectives.registry import ALGORITHMS, algorithms, generate
from pynccl.collectives.schedule import COLLECTIVES
from pynccl.operations import OPERATIONS, integer
from pynccl.quick import NOT_TAKEN, Take

__all__ = ["LIBRARY", "Measured", "Selection", "load", "main", "tune"]

LIBRARY = "library"
"""The candidate that leaves the choice to the library."""

_FORMAT = 1
_SIZES = tuple(1 << bits for bits in range(10, 25, 2))
_COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
# Below this a difference is noise: the library's own stays.
_WORTH = 0.95


@dataclasses.dataclass(frozen=True)
class Measured:
    """One candidate at one size: the median of the times of the slowest rank."""

    collective: str
    nbytes: int
    """Of the longer one of a rank's two arrays."""
    candidate: str
    """"library", "pynccl:ring", or "interpreted ring"."""
    seconds: float


@dataclasses.dataclass(frozen=True)
class Selection:
    """A table of choices, and where it holds. ``choices``: collective -> ((up to bytes, algorithm), ...).

    An algorithm is "library" or "pynccl:..." with a name of the `registry`. Sizes between two that were
    measured take the choice of the nearer one (of the ratio), those beyond the last that of the last.
    InvalidArgumentError or TypeError for choices that no call could follow.
    """

    size: int
    topology: str
    library: str
    choices: dict[str, tuple[tuple[int, str], ...]]
    measured: tuple[Measured, ...] = ()

    def __post_init__(self) -> None:
        integer("selection", "size", self.size, 1)
        choices = {name: tuple(_choices(name, rows)) for name, rows in self.choices.items()}
        object.__setattr__(self, "choices", choices)
        # What a call needs, so that where the library's own is chosen it costs next to nothing to find that
        # out: limits to bisect, and one choice more than limits. Nothing for what never chooses another.
        quick = {}
        for name, rows in choices.items():
            names = [None if algorithm == LIBRARY else algorithm for _, algorithm in rows]
            if any(names):
                quick[name] = [limit for limit, _ in rows], [*names, names[-1]]
        object.__setattr__(self, "_quick", quick)

    def choose(self, collective: str, nbytes: int) -> str | None:
        """The ``algorithm=`` for a call of so many bytes; None: the library's own."""
        rows = self._quick.get(collective)  # type: ignore[attr-defined]
        return None if rows is None else rows[1][bisect.bisect_left(rows[0], nbytes)]

    def choose_for(self, collective: str, x: Any, out: Any, ranks: int) -> str | None:
        """The same for a call on these arrays (``x`` may be None where only ``out`` is used)."""
        if collective not in self._quick or (x is None and out is None):  # type: ignore[attr-defined]
            return None  # what is wrong with no array at all the call says itself
        role, array = ("out", out) if x is None else ("x", x)
        nbytes = array.nbytes if type(array) is np.ndarray else view(collective, role, array).nbytes
        what = OPERATIONS[collective]
        if what.out_blocks and not what.x_blocks and role == "x":
            nbytes *= ranks  # of the longer of the two arrays
        return self.choose(collective, nbytes)

    def quick(self, collective: str, take: Take, ranks: int) -> Take:
        """A quick call (`pynccl.quick`) of a collective, left by the calls that the table has a schedule for.

        So those that it leaves to the library stay nearly as quick as without a table: 0.5 us more.
        """
        if collective not in self._quick:  # type: ignore[attr-defined]
            return take

        def take_or_leave(x: Any, out: Any) -> int:
            if type(x if x is not None else out) is not np.ndarray:
                return NOT_TAKEN
            return NOT_TAKEN if self.choose_for(collective, x, out, ranks) else take(x, out)

        return take_or_leave

    def check(self, comm: Any) -> None:
        """InvalidUsageError unless the table holds for ``comm``. All ranks call it and learn the same."""
        hosts, digests = zip(*comm.all_gather_object((platform.node(), self.digest)), strict=True)
        different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if different:
            raise InvalidUsageError(
                f"selection: rank {different[0]} has another table than rank 0; give every rank the same"
            )
        here = {"ranks": comm.size, "hosts": _topology(hosts), "library": _library(comm)}
        table = {"ranks": self.size, "hosts": self.topology, "library": self.library}
        wrong = [f"{what} {table[what]}, here {here[what]}" for what in here if table[what] != here[what]]
        if wrong:
            raise InvalidUsageError(
                f"selection: the table was made elsewhere ({'; '.join(wrong)}); make one here with "
                "pynccl.collectives.tune.tune(comm)"
            )

    @property
    def digest(self) -> str:
        """The same for equal tables."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The table as JSON, with what was measured."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Selection:
        """InvalidArgumentError, a ValueError, for what is no table or has choices no call could follow."""
        try:
            found = json.loads(text)
            if found.pop("format") != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT}")
            found["measured"] = tuple(Measured(**each) for each in found["measured"])
            return cls(**found)
        except InvalidArgumentError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidArgumentError(
                f"selection: this is no table of pynccl.collectives.tune ({type(error).__name__}: {error}); "
                "make one with tune(comm).save(path)"
            ) from error

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(self.to_json())

    def __str__(self) -> str:
        """What was measured, in microseconds, with the choices marked."""
        lines = [
            f"{self.size} ranks, hosts {self.topology}, {self.library}; microseconds, median of the slowest "
            "rank's times; *: chosen"
        ]
        for collective in self.choices:
            mine = [each for each in self.measured if each.collective == collective]
            sizes = sorted({each.nbytes for each in mine})
            times = {(each.candidate, each.nbytes): each.seconds for each in mine}
            lines.append(f"{collective + ', bytes:':28}" + "".join(f"{size:>12}" for size in sizes))
            chosen = {size: self.choose(collective, size) or LIBRARY for size in sizes}
            for candidate in dict.fromkeys(each.candidate for each in mine):
                cells = (
                    f"{times[candidate, size] * 1e6:10.1f}{' *' if chosen[size] == candidate else '  '}"
                    if (candidate, size) in times
                    else " " * 12
                    for size in sizes
                )
                lines.append(f"  {candidate:26}" + "".join(cells))
        return "\n".join(lines)


def load(table: Selection | str | Path) -> Selection:
    """A table, or that of a file; InvalidArgumentError, a ValueError, for a file that holds none."""
    if isinstance(table, Selection):
        return table
    if not isinstance(table, (str, Path)):
        raise TypeError(f"selection must be a Selection or the path of a file, not {type(table).__name__}")
    try:
        return Selection.from_json(Path(table).read_text())
    except ValueError as error:
        raise InvalidArgumentError(f"selection {str(table)!r}: {error}") from error


def _choices(collective: str, rows: Any) -> Iterator[tuple[int, str]]:
    """The rows of a table; an error that names what is wrong with one, and what it may be."""
    if collective not in COLLECTIVES:
        raise InvalidArgumentError(
            f"selection: no collective {collective!r} has schedules; choose for {', '.join(COLLECTIVES)}"
        )
    known = [f"pynccl:{name}" for name in algorithms(collective)]
    last = -1
    for limit, algorithm in rows:
        limit = integer("selection", f"a limit of {collective}", limit, 0, None)
        if limit <= last:
            raise InvalidArgumentError(
                f"selection: the limits of {collective} do not grow: {limit} bytes after {last}; put the "
                "rows in order of size"
            )
        if algorithm != LIBRARY and algorithm not in known:
            raise InvalidArgumentError(
                f"selection: {collective} has no algorithm {algorithm!r}; take {LIBRARY!r} or one of "
                f"{', '.join(known)}"
            )
        last = limit
        yield limit, algorithm


def tune(
    comm: Any,
    sizes: Iterable[int] = _SIZES,
    *,
    collectives: Sequence[str] = _COLLECTIVES,
    candidates: Sequence[str] | None = None,
    interpreted: bool = False,
    repeats: int = 5,
) -> Selection:
    """Measure the candidates on ``comm`` and return the table of the fastest, the same on every rank.

    ``sizes`` are bytes (of float32, in place for all_reduce); ``candidates`` names of algorithms, with or
    without "pynccl:" before them, None: all of each collective. ``interpreted``: measure interpreted runs in
    host memory as well. Every rank calls it with the same arguments, at a time when nothing else runs. The
    library's own is kept unless another takes less than 95 % of its time.
    """
    sizes = sorted({integer("tune", "a size", size, 4, None) for size in _listed("sizes", sizes)})
    if not sizes:
        raise InvalidArgumentError("tune: sizes=[]; give the sizes to measure, in bytes")
    repeats = integer("tune", "repeats", repeats, 1)
    if candidates is not None:
        candidates = [_name(each) for each in _listed("candidates", candidates)]
    _check_candidates(_listed("collectives", collectives), candidates)
    _check_alike(comm, (sizes, list(collectives), candidates, bool(interpreted), repeats))
    measured: list[Measured] = []
    choices: dict[str, tuple[tuple[int, str], ...]] = {}
    for collective in collectives:
        names = algorithms(collective) if candidates is None else candidates
        rows = []
        for nbytes in sizes:
            found = _measure(comm, collective, nbytes, names, interpreted, repeats)
            measured += found
            rows.append(_fastest(found))
        limits = [int((a * b) ** 0.5) for a, b in zip(sizes, sizes[1:], strict=False)] + [sizes[-1]]
        choices[collective] = tuple(zip(limits, rows, strict=True))
    hosts = comm.all_gather_object(platform.node())
    return Selection(comm.size, _topology(hosts), _library(comm), choices, tuple(measured))


def _listed(what: str, values: Any) -> list[Any]:
    """A TypeError for one value where several are meant, such as the letters of a name."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"tune: {what}={values!r} is not a list; pass [{values!r}]")
    return list(values)


def _name(candidate: Any) -> str:
    if not isinstance(candidate, str):
        raise TypeError(
            f"tune: candidates are names such as 'ring', which a table in a file can hold, and {candidate!r} "
            f"is of type {type(candidate).__name__}; give an algorithm of your own a row in "
            "pynccl/collectives/registry.py, or time it by itself with comm.prepare(..., algorithm=schedule)"
        )
    return candidate.removeprefix("pynccl:")


def _check_candidates(collectives: Sequence[str], candidates: Sequence[str] | None) -> None:
    """InvalidArgumentError, a ValueError, unless each collective has all candidates."""
    for collective in collectives:
        if collective not in COLLECTIVES:
            raise InvalidArgumentError(
                f"tune: no collective {collective!r} has schedules; take some of {', '.join(COLLECTIVES)}"
            )
        unknown = set(candidates or ()) - set(algorithms(collective))
        if unknown:
            raise InvalidArgumentError(
                f"tune: {collective} has no algorithm {', '.join(sorted(unknown))}; it has "
                f"{', '.join(algorithms(collective))} (the library's own is always measured)"
            )


def _check_alike(comm: Any, arguments: Any) -> None:
    """InvalidUsageError on all ranks unless all were called alike: else they would wait for each other."""
    everybodys = comm.all_gather_object(repr(arguments))
    different = next((rank for rank, theirs in enumerate(everybodys) if theirs != everybodys[0]), None)
    if different is not None:
        raise InvalidUsageError(
            f"tune: rank {different} was called with {everybodys[different]} and rank 0 with {everybodys[0]} "
            "(sizes, collectives, candidates, interpreted, repeats); call it alike on every rank"
        )


def _measure(
    comm: Any, collective: str, nbytes: int, names: Sequence[str], interpreted: bool, repeats: int
) -> list[Measured]:
    x, out = _arrays(comm, collective, nbytes)
    call = getattr(comm, collective)
    runs: dict[str, Callable[[], Any]] = {LIBRARY: functools.partial(call, x, out=out)}
    for name in names:
        runs[f"pynccl:{name}"] = functools.partial(call, x, out=out, algorithm=f"pynccl:{name}")
        if interpreted and not comm.on_gpu:
            schedule = generate(name, comm.size, collective=collective)
            runs[f"interpreted {name}"] = functools.partial(run, schedule, comm, x, out)
    seconds = np.empty((repeats, len(runs)))
    for each in runs.values():  # proofs, compilation and first touches are no part of it
        each()
    for turn in range(repeats):  # in turns, so that a disturbance meets all of them
        for index, each in enumerate(runs.values()):
            comm.barrier()
            begin = time.perf_counter()
            each()
            if comm.on_gpu:
                comm.barrier()
            seconds[turn, index] = time.perf_counter() - begin
    slowest = _everywhere(comm, seconds)
    medians = [statistics.median(column) for column in slowest.T.tolist()]
    return [Measured(collective, nbytes, name, median) for name, median in zip(runs, medians, strict=True)]


def _fastest(found: list[Measured]) -> str:
    can = {each.candidate: each.seconds for each in found if not each.candidate.startswith("interpreted")}
    best = min(can, key=lambda name: can[name])
    return best if can[best] < _WORTH * can[LIBRARY] else LIBRARY


def _arrays(comm: Any, collective: str, nbytes: int) -> tuple[Any, Any]:
    """x and out, the longer one of about ``nbytes``."""
    xp = sys.modules["cupy"] if comm.on_gpu else np
    block = max(1, nbytes // 4 // comm.size)
    if collective in ("all_reduce", "broadcast", "reduce"):
        return xp.zeros(max(1, nbytes // 4), "float32"), None
    long, short = xp.zeros(block * comm.size, "float32"), xp.zeros(block, "float32")
    return {"all_gather": (short, long), "reduce_scatter": (long, short)}.get(
        collective, (long, xp.zeros_like(long))
    )


def _everywhere(comm: Any, seconds: Any) -> Any:
    """The times of the slowest rank, so that every rank chooses the same."""
    rows = comm.all_gather_object(seconds.tolist())
    return np.array(rows).max(axis=0)


def _topology(hosts: Iterable[str]) -> str:
    """Which ranks share a host, without the names: "0,0,1,1"."""
    numbers: dict[str, int] = {}
    return ",".join(str(numbers.setdefault(host, len(numbers))) for host in hosts)


def _library(comm: Any) -> str:
    return f"{comm.library.kind} {comm.library.version_string}"


def _measurable(text: str) -> list[int]:
    found = read_sizes(text)
    if min(found) < 4:
        raise argparse.ArgumentTypeError(f"{min(found)} bytes hold no float32; take 4 or more")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line, on each of the ranks that a launcher started."""
    parser = argparse.ArgumentParser(
        prog="python -m pynccl.launch -n N -m pynccl.collectives tune",
        description="Measure which algorithm is best for which size.",
    )
    parser.add_argument("--out", type=output, help="rank 0 writes the table to this file")
    parser.add_argument("--sizes", type=_measurable, default=list(_SIZES), help="bytes, such as 1K,64K,1M")
    collectives = names_of(COLLECTIVES, "collective")
    parser.add_argument("--collectives", type=collectives, default=list(_COLLECTIVES))
    candidates = names_of((name for _, name in ALGORITHMS), "algorithm", prefix="pynccl:")
    parser.add_argument("--candidates", type=candidates, help="ring,tree,...; none: all of each collective")
    parser.add_argument("--interpreted", action="store_true", help="measure interpreted runs, too")
    parser.add_argument("--repeats", type=at_least(1), default=5)
    options = parser.parse_args(arguments)
    _check_candidates(options.collectives, options.candidates)
    import pynccl

    with pynccl.init() as comm:
        table = tune(
            comm,
            options.sizes,
            collectives=options.collectives,
            candidates=options.candidates,
            interpreted=options.interpreted,
            repeats=options.repeats,
        )
        if comm.rank == 0:
            print(table)
            if options.out:
                table.save(options.out)
    return 0

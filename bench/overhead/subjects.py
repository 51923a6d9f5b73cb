"""The process in which calls are timed: `python -m bench.overhead.subjects LIBRARY ROUNDS CALLS [cupy]`.

A subject is a statement and the names in it. All subjects take turns, some thousands of calls each, so what
disturbs the machine disturbs all of them; a turn is timed by `timeit`, whose loop (10 ns) is in the numbers.
Prints a JSON list of summaries.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import pynccl
from pynccl.abi.enums import DataType, RedOp
from pynccl.operations import OPERATIONS, Operation

__all__ = ["C_CALL", "FORMS", "Subject", "measure", "our_subjects"]

RANKS = 2
BLOCK = 8  # elements; nothing is moved, so it does not matter
C_CALL = "the C call"

# What a call can be made with. In this order they are the columns of the table.
FORMS = {
    "in place": "x alone, which the result replaces",
    "out=": "x and out=, apart from each other",
    "block": "in place of NCCL's kind: this rank's block of the larger array, and that array",
    "new": "x alone; a new array is made and returned",
    "off root": "rank 1 of a rooted call: what it must give, with root=0",
    "prepared": "comm.prepare(...) before, then called",
}


@dataclass(frozen=True)
class Subject:
    """What is timed. ``seconds`` runs it so many times, and returns the seconds of all."""

    name: str
    collective: str | None
    form: str | None
    seconds: Callable[[int], float]


@dataclass
class Times:
    """Microseconds of a call, one for each round."""

    subject: Subject
    rounds: list[float] = field(default_factory=list)

    def summary(self, floor: Sequence[float]) -> dict[str, Any]:
        quarter, median, three_quarters = statistics.quantiles(self.rounds, n=4, method="inclusive")
        above = (one - c_call for one, c_call in zip(self.rounds, floor, strict=True))
        return {
            "name": self.subject.name,
            "collective": self.subject.collective,
            "form": self.subject.form,
            "us": round(median, 4),
            "p25_us": round(quarter, 4),
            "p75_us": round(three_quarters, 4),
            "above_c_us": round(statistics.median(above), 4),
        }


def measure(subjects: Sequence[Subject], rounds: int, calls: int) -> list[dict[str, Any]]:
    """Summaries of all subjects, of ``rounds`` (at least 2) turns of ``calls`` each; one is `C_CALL`."""
    times = [Times(subject) for subject in subjects]
    for subject in subjects:
        subject.seconds(max(1, calls // 4))  # warm up
    for number in range(rounds):
        turn = number % len(times)  # another one begins each time
        for one in times[turn:] + times[:turn]:
            one.rounds.append(1e6 * one.subject.seconds(calls) / calls)
    floor = next(one.rounds for one in times if one.subject.name == C_CALL)
    return [one.summary(floor) for one in times]


def our_subjects(comms: Sequence[pynccl.Communicator]) -> Iterator[Subject]:
    """Every collective in every form that it has; ``comms`` are rank 0 and 1 of the same two ranks."""
    for what in OPERATIONS.values():
        yield from _subjects_of(what, comms)


def _subjects_of(what: Operation, comms: Sequence[pynccl.Communicator]) -> Iterator[Subject]:
    comm, name = comms[0], what.name
    x, out = _array(what.x_blocks), _array(what.out_blocks)
    if what.in_place_by_default:
        yield _call(name, "in place", f"comm.{name}(x)", comm=comm, x=x)
    else:
        yield _call(name, "new", f"comm.{name}(x)", comm=comm, x=x)
    yield _call(name, "out=", f"comm.{name}(x, out=out)", comm=comm, x=x, out=out)
    if what.may_be_in_place and what.reshapes:
        mine, whole = (out[:BLOCK], out) if what.out_blocks else (x[:BLOCK], x)
        x_and_out = {"x": mine, "out": whole} if what.out_blocks else {"x": whole, "out": mine}
        yield _call(name, "block", f"comm.{name}(x, out=out)", comm=comm, **x_and_out)
    if what.rooted:
        # A scatter's data is the root's alone; elsewhere there is only where it goes.
        statement = f"comm.{name}(None, out=out)" if what.x_on_root and what.reshapes else f"comm.{name}(x)"
        yield _call(name, "off root", statement, comm=comms[1], x=x, out=out)
    yield _call(name, "prepared", "prepared()", prepared=comm.prepare(name, x, out=out))


def _array(of_blocks: bool) -> np.ndarray:
    return np.zeros(RANKS * BLOCK if of_blocks else BLOCK, np.float32)


def _call(collective: str, form: str, statement: str, **names: Any) -> Subject:
    return _statement(f"{collective}, {form}", statement, names, collective, form)


def _statement(
    name: str, statement: str, names: Mapping[str, Any], collective: str | None, form: str | None = None
) -> Subject:
    # Assigned in the set-up they are local variables of the timed loop, as they would be in a function.
    setup = "\n".join(f"{one} = _{one}" for one in names)
    timer = timeit.Timer(statement, setup, globals={f"_{one}": value for one, value in names.items()})
    return Subject(name, collective, form, timer.timeit)


def _bare_subjects(comm: pynccl.Communicator) -> Iterator[Subject]:
    """The floor: an all_reduce from C, and from Python by nothing but ctypes."""
    library, x = comm.library, np.zeros(BLOCK, np.float32)
    numbers = (x.ctypes.data, x.ctypes.data, x.size, int(DataType.FLOAT32), int(RedOp.SUM), comm.handle, None)
    loop = ctypes.CDLL(library.path).nullSecondsPerCall
    loop.restype, loop.argtypes = (
        ctypes.c_double,
        [ctypes.c_size_t, *(ctypes.c_void_p,) * 2, ctypes.c_size_t, ctypes.c_void_p],
    )
    yield Subject(
        C_CALL, "all_reduce", None, lambda n: n * loop(n, x.ctypes.data, x.ctypes.data, x.size, comm.handle)
    )
    function = library.ncclAllReduce
    objects = tuple(kind(value) for kind, value in zip(function.argtypes, numbers, strict=True))
    for name, arguments in (("ctypes, ready objects", objects), ("ctypes, numbers", numbers)):
        names = dict(zip("abcdefg", arguments, strict=True))
        yield _statement(name, "call(a, b, c, d, e, f, g)", {"call": function, **names}, "all_reduce")


def _cupy_subject() -> Subject:
    from cupy.cuda import nccl

    comm, x = nccl.NcclCommunicator(RANKS, nccl.get_unique_id(), 0), np.zeros(BLOCK, np.float32)
    names = {"comm": comm, "x": x.ctypes.data, "n": x.size, "t": nccl.NCCL_FLOAT32, "op": nccl.NCCL_SUM}
    return _statement(
        "cupy.cuda.nccl, numbers", "comm.allReduce(x, x, n, t, op, 0)", {**names, "keep": x}, "all_reduce"
    )


def main(arguments: Sequence[str]) -> int:
    path, rounds, calls, with_cupy = arguments[0], int(arguments[1]), int(arguments[2]), arguments[3:]
    uid = pynccl.get_unique_id(path)
    comms = [pynccl.Communicator(RANKS, uid, rank, library=path) for rank in range(RANKS)]
    try:
        subjects = [*_bare_subjects(comms[0]), *our_subjects(comms)]
        if with_cupy:
            subjects.append(_cupy_subject())
        json.dump(measure(subjects, rounds, calls), sys.stdout)
    finally:
        for comm in comms:
            comm.destroy()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

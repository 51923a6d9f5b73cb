"""The quick path of the collectives: the same results and the same errors as the general one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pynccl
from pynccl.testing import run_ranks

Comm = Any
Make = Callable[[Comm], tuple[tuple[Any, ...], dict[str, Any]]]


def numbers(comm: Comm, n: int, dtype: str = "f4") -> np.ndarray:
    return (np.arange(n) % 50 + comm.rank).astype(dtype)


def read_only(n: int) -> np.ndarray:
    x = np.zeros(n, "f4")
    x.flags.writeable = False
    return x


def call(x: Any, **named: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (x,), named


def halves(comm: Comm, *, x_blocks: bool, block: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    whole = numbers(comm, 8)
    part = whole[4 * block : 4 * block + 4]
    return call(whole, out=part) if x_blocks else call(part, out=whole)


GROW, SHRINK = ("all_gather", "gather"), ("reduce_scatter", "scatter")
SAME = ("all_reduce", "broadcast", "reduce", "all_to_all")
ROOTED = ("broadcast", "reduce", "gather", "scatter")


def sizes(name: str) -> tuple[int, int]:
    return (4, 8) if name in GROW else (8, 4) if name in SHRINK else (8, 8)


def pair(name: str, dtype: str = "f4", **named: Any) -> Make:
    n, m = sizes(name)

    def make(comm: Comm) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x = None if name == "scatter" and comm.rank else numbers(comm, n, dtype)
        return call(x, out=np.zeros(m, dtype), **named)

    return make


QUICK: list[tuple[str, Make]] = [
    *((name, pair(name, dtype)) for name in (*GROW, *SHRINK, *SAME) for dtype in ("f4", "i8")),
    *((name, pair(name, dtype)) for name in ("all_gather", "all_to_all") for dtype in ("i2", "c16", "?")),
    *((name, lambda c: call(numbers(c, 8))) for name in ("all_reduce", "broadcast", "reduce")),
    ("all_gather", lambda c: halves(c, x_blocks=False, block=c.rank)),
    ("reduce_scatter", lambda c: halves(c, x_blocks=True, block=c.rank)),
    *((name, pair(name, op="max")) for name in ("all_reduce", "reduce_scatter", "reduce")),
]

GENERAL: list[tuple[str, Make]] = [
    *((name, pair(name, root=root)) for name in ROOTED for root in (2, -1, "0", 1.0)),
    *((name, lambda c: call(numbers(c, 7), out=np.zeros(5, "f4"))) for name in (*GROW[:1], *SHRINK[:1])),
    *((name, lambda c: call(numbers(c, 8), out=np.zeros(8, "f8"))) for name in ("all_gather", *SAME[::3])),
    *((name, lambda c: call(numbers(c, 8), out=read_only(8))) for name in SAME[::3]),
    *((name, lambda c: call(numbers(c, 16)[::2], out=np.zeros(8, "f4"))) for name in SAME[::3]),
    ("all_to_all", lambda c: call(read_only(8), out=np.zeros(8, "f4"))),
    ("all_gather", lambda c: halves(c, x_blocks=False, block=1 - c.rank)),
    ("reduce_scatter", lambda c: halves(c, x_blocks=True, block=1 - c.rank)),
    ("all_to_all", lambda c: call(x := numbers(c, 8), out=x)),
    ("reduce_scatter", pair("reduce_scatter", op="median")),
    ("reduce_scatter", pair("reduce_scatter", "i2")),
    ("all_gather", lambda c: call([1, 2], out=np.zeros(4))),
    ("all_gather", lambda c: call(numbers(c, 4), out=[0] * 8)),
]


def outcome(comm: Comm, name: str, make: Make) -> tuple[Any, ...]:
    arguments, named = make(comm)
    arrays = (*arguments, named.get("out"))
    try:
        result = getattr(comm, name)(*arguments, **named)
    except (TypeError, ValueError, pynccl.NcclError) as error:
        return type(error), str(error)
    which = [result is each for each in arrays if each is not None]
    return which, result is None, [np.asarray(each).tolist() for each in arrays if each is not None]


def both_ways(comm: Comm, cases: list[tuple[str, Make]]) -> list[tuple[Any, Any, int]]:
    tables = comm._quick, comm._moved
    general = comm._run
    taken = [0]

    def counted(*arguments: Any) -> Any:
        taken[0] += 1
        return general(*arguments)

    comm._run = counted
    told = []
    for name, make in cases:
        taken[0] = 0
        quick = outcome(comm, name, make)
        of_quick = taken[0]
        comm._quick, comm._moved = {}, {}
        slow = outcome(comm, name, make)
        comm._quick, comm._moved = tables
        told.append((quick, slow, of_quick))
    del comm._run
    return told


@pytest.mark.parametrize(("cases", "general"), [(QUICK, 0), (GENERAL, 1)], ids=["quick", "general"])
def test_both_paths_tell_the_same(cases: list[tuple[str, Make]], general: int) -> None:
    for told in run_ranks(2, both_ways, cases, processes=False, library="host"):
        for (name, _), (quick, slow, taken) in zip(cases, told, strict=True):
            assert quick == slow, name
            assert taken == general, f"{name} took the other path: {quick}"

"""One rank of a side: it makes arrays, checks a call, and times calls, when told to.

The parent listens on the Unix socket `argv[1]`; a rank connects, says `{"rank", "pid", "version"}`, and
answers each line with one of JSON:

    setup KEY OP BYTES LOADS STORES ELEMENTS    arrays for a case, a checked call -> {"wrong": elements}
    time KEY COUNT                              COUNT calls back to back after a barrier -> {"seconds": mean}
    forget                                      drop all arrays -> {}

A rank that nobody asks waits in a read of that socket, outside its library: it takes no processor time, so
all sides can live at once and take turns. The end of the socket is the end of the rank.

Standard library only: other libraries' environments import this. The three last words of `setup` are for
`roofline.c`, which moves streams and knows no operations.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol

from bench.peer.cases import FLOAT

__all__ = ["Calls", "Library", "check", "expected", "serve", "source"]

# The ranks slept until now, perhaps on one core: a part of the calls is made before those that are timed, so
# that the system can spread them.
WARM_UP = 8
# Of the values of an input, see `pattern`. A prime: no shift by a block or a half is a multiple of it, and
# its neighbours' values are far apart, so that no shift looks like another rank's data.
PERIOD, STEP = 65521, 40503


@dataclass
class Calls:
    """A collective on arrays that stay: what to call with what, all made before the clock starts."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    input: Any
    result: Any


class Library(Protocol):
    """What a side is to the worker. Arrays are one-dimensional float32: NumPy's or torch's."""

    rank: int
    ranks: int
    version: str

    def set_up(self, kind: str, op: str, elements: int) -> Calls:
        """Arrays and a call for `op`; `kind` is the KEY that the parent gave."""

    def floats(self, values: Sequence[int]) -> Any:
        """An array of them."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def forget(self) -> None:
        """The arrays of earlier set_ups are not used any more."""


def serve(library: Library) -> None:
    """Obey the parent until it ends."""
    with socket.socket(socket.AF_UNIX) as wire:
        wire.connect(sys.argv[1])
        lines = wire.makefile("r")
        known: dict[str, Calls] = {}
        hello = {"rank": library.rank, "pid": os.getpid(), "version": library.version}
        wire.sendall(json.dumps(hello).encode() + b"\n")
        for line in lines:
            wire.sendall(json.dumps(_obey(library, known, line.split())).encode() + b"\n")


def _obey(library: Library, known: dict[str, Calls], words: list[str]) -> dict[str, Any]:
    match words:
        case ["setup", key, op, size, _, _, _]:
            known[key] = library.set_up(key, op, int(size) // FLOAT)
            return {"wrong": check(library, op, known[key], int(size) // FLOAT)}
        case ["time", key, count]:
            return {"seconds": _mean_seconds(library, known[key], int(count))}
        case ["forget"]:
            known.clear()
            library.forget()
            gc.collect()
            return {}
    raise ValueError(f"worker: {' '.join(words)!r} is no command")


def _mean_seconds(library: Library, calls: Calls, count: int) -> float:
    call, args = calls.call, calls.args
    for _ in range(1 + count // WARM_UP):
        call(*args)
    library.barrier()
    start = time.perf_counter()
    for _ in repeat(None, count):
        call(*args)
    return (time.perf_counter() - start) / count


# --- is it right? -------------------------------------------------------------------------------------------


def check(library: Library, op: str, calls: Calls, elements: int) -> int:
    """Wrong elements of one call's result on this rank, and of its input if that is another array.

    The input stays as it is, for zeros can be faster than data; only where sums replace it it becomes zero,
    so that they stay finite.
    """
    rank, ranks = library.rank, library.ranks
    calls.result[:] = -1.0
    given = source(library, op, rank, ranks, elements)
    calls.input[:] = given
    library.barrier()
    calls.call(*calls.args)
    wrong = int((calls.result != expected(library, op, rank, ranks, elements)).sum())
    if calls.input is not calls.result:
        wrong += int((calls.input != given).sum())
    elif op == "all_reduce":
        calls.input[:] = 0.0
    return wrong


def pattern(library: Library, count: int) -> Any:
    """`count` values that differ over all of them: whatever part of it stands where another should is seen.

    Integers, from a permutation of 0 to PERIOD-1 that is one more each time it begins again. Their sums over
    up to 190 ranks are exact in float32 in any order, for arrays of up to 64 MiB.
    """
    begun = library.floats(range(-(-count // PERIOD)))
    permuted = library.floats([number * STEP % PERIOD for number in range(min(count, PERIOD))])
    return (begun[:, None] + permuted).reshape(-1)[:count]


def mark(rank: int) -> float:
    """What a rank adds to the pattern. Squares: no other choice of so many ranks (to 5) has the same sum."""
    return float((rank + 1) ** 2)


def source(library: Library, op: str, rank: int, ranks: int, elements: int) -> Any:
    """A rank's input: the pattern, and its mark."""
    return pattern(library, elements // ranks if op == "all_gather" else elements) + mark(rank)


def expected(library: Library, op: str, rank: int, ranks: int, elements: int) -> Any:
    """A rank's result."""
    block = elements // ranks
    mine = slice(rank * block, (rank + 1) * block)
    match op:
        case "all_reduce":
            return pattern(library, elements) * ranks + sum(map(mark, range(ranks)))
        case "reduce_scatter":
            return (pattern(library, elements) * ranks + sum(map(mark, range(ranks))))[mine]
        case "broadcast":
            return pattern(library, elements) + mark(0)
        case "all_gather" | "alltoall":
            got = pattern(library, block) if op == "all_gather" else pattern(library, elements)[mine]
            result = pattern(library, elements)
            for peer in range(ranks):
                result[peer * block : (peer + 1) * block] = got + mark(peer)
            return result
    raise ValueError(f"worker: {op!r} is no operation")

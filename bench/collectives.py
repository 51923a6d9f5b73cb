"""What differs between the programs, one row each: counts, traffic, inputs, expected results, the call.

Everything here is a pure function of counts and ranks, except the one line that makes the call. The engine in
`runner.py` knows no collective by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench import check

__all__ = ["COLLECTIVES", "Case", "Collective", "Layout"]


@dataclass(frozen=True)
class Layout:
    """Elements that a rank sends and receives, the count that the call takes, and where in-place data begins.

    In place, what is sent begins at element `send_at * rank` of the receive buffer, the result at
    `recv_at * rank`.
    """

    send: int
    recv: int
    count: int
    send_at: int = 0
    recv_at: int = 0


@dataclass(frozen=True)
class Case:
    """What a row of the sweep does, and which ranks do it."""

    op: str
    dtype: str
    root: int
    ranks: int


@dataclass(frozen=True)
class Collective:
    """One program. `layout` and `bandwidth` take elements, bytes per element and ranks."""

    program: str
    reduces: bool
    rooted: bool
    layout: Callable[[int, int, int], Layout]
    bytes_moved: Callable[[int, int, int], int]  # the S of algbw = S / time
    bus_factor: Callable[[int], float]  # busbw = algbw * factor
    inputs: Callable[[Case, int, int, Layout], Any]  # case, rank, seed, layout: what the rank sends
    expected: Callable[[Case, int, int, Layout], Any]  # and what it must receive
    call: Callable[
        ..., Callable[[], Any]
    ]  # comm, x, out (None: in place), op, root, stream: the call, ready to make


def _all_reduce(comm: Any, x: Any, out: Any, op: Any, root: int, stream: Any) -> Callable[[], Any]:
    return partial(comm.all_reduce, x, out, op, stream=stream)


COLLECTIVES = {
    row.program: row
    for row in (
        Collective(
            program="all_reduce_perf",
            reduces=True,
            rooted=False,
            layout=lambda count, itemsize, ranks: Layout(count, count, count),
            bytes_moved=lambda count, itemsize, ranks: count * itemsize,
            bus_factor=lambda ranks: 2 * (ranks - 1) / ranks,
            inputs=lambda case, rank, seed, layout: check.inputs(
                case.op, case.dtype, rank, case.ranks, seed, layout.send
            ),
            expected=lambda case, rank, seed, layout: check.expected(
                case.op, case.dtype, case.ranks, seed, layout.recv
            ),
            call=_all_reduce,
        ),
    )
}

"""What differs between the programs, one row each: counts, traffic, inputs, expected results, the call.

Everything but the call is a pure function of a case and of counts. The engine (`runner.py`, `ranks.py`,
`trial.py`) knows no collective by name. Counts and factors are nccl-tests': what is divided over the ranks is
rounded down to 16 bytes a rank, and a bus bandwidth is the bandwidth times what a ring has to move.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench import calls, check
from bench.factors import all_but_own, one, twice_all_but_own
from bench.traffic import GENERATED, Traffic

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
    """What the rows of a sweep do, and how many ranks do it. `root` is -1 where there is none."""

    op: str
    dtype: str
    root: int
    ranks: int
    traffic: Traffic = GENERATED

    @property
    def itemsize(self) -> int:
        return check.DTYPE[self.dtype].itemsize

    def share(self, count: int) -> int:
        """Elements of `count` for each rank: whole 16 bytes."""
        return count // self.ranks & ~(16 // self.itemsize - 1)

    def copied(self, rank: int, seed: int, count: int) -> Any:
        """Random bits: the data of `rank` where data is only moved."""
        return check.inputs("copy", self.dtype, rank, self.ranks, seed, count)


@dataclass(frozen=True)
class Bandwidth:
    """algbw is what `moved` gives over the time; busbw that times `factor` of the number of ranks."""

    moved: Callable[[Case, Layout], int]
    factor: Callable[[int], float]


@dataclass(frozen=True)
class Collective:
    """One program. Its functions take a case; `layout` the elements of a row's nominal size, too.

    `expected` (case, rank, seed, layout) is what the rank's receive buffer must begin with; what lies behind
    it must be as before the call, all of it where nothing is received.
    """

    program: str
    call: Callable[..., Callable[[], Any]]
    layout: Callable[[Case, int], Layout]
    bandwidth: Bandwidth
    expected: Callable[[Case, int, int, Layout], Any]
    reduces: bool = False
    rooted: bool = False
    checked_in_place: bool = True
    """Where the call has no in-place form its time is taken, and nothing is checked: as nccl-tests does."""
    varies: bool = False
    """Whether the NCCL_TESTS_ALLTOALLV_* variables say who sends how much."""
    refuses: Callable[[int], str] = lambda ranks: ""
    """Why so many ranks cannot run it, in words, or an empty string."""

    def inputs(self, case: Case, rank: int, seed: int, layout: Layout) -> Any:
        """What the rank sends."""
        op = case.op if self.reduces else "copy"
        return check.inputs(op, case.dtype, rank, case.ranks, seed, layout.send)


# ---- layouts


def _whole(case: Case, count: int) -> Layout:
    return Layout(count, count, count)


def _blocks(case: Case, count: int) -> Layout:
    """A block for each rank, sent and received."""
    share = case.share(count)
    return Layout(share * case.ranks, share * case.ranks, share)


def _gathered(case: Case, count: int) -> Layout:
    share = case.share(count)
    return Layout(share, share * case.ranks, share, send_at=share)


def _scattered(case: Case, count: int) -> Layout:
    share = case.share(count)
    return Layout(share * case.ranks, share, share, recv_at=share)


def _by_traffic(case: Case, count: int) -> Layout:
    """Room for the rank with the most to send, and the one with the most to receive."""
    share = 0 if case.traffic.matrix else case.share(count)
    send, recv = case.traffic.largest(case.ranks, share * case.ranks * case.itemsize)
    return Layout(send // case.itemsize, recv // case.itemsize, share)


# ---- bandwidths


def _count_bytes(case: Case, layout: Layout) -> int:
    return layout.count * case.itemsize


def _all_bytes(case: Case, layout: Layout) -> int:
    return layout.count * case.itemsize * case.ranks


def _bytes_of_others(case: Case, layout: Layout) -> int:
    return layout.count * case.itemsize * (case.ranks - 1)


def _most_bytes(case: Case, layout: Layout) -> int:
    return max(layout.send, layout.recv) * case.itemsize


# ---- what must be received: case, rank, seed, layout


def _reduced(case: Case, rank: int, seed: int, layout: Layout) -> Any:
    return check.expected(case.op, case.dtype, case.ranks, seed, layout.send)


def _reduced_block(case: Case, rank: int, seed: int, layout: Layout) -> Any:
    return _reduced(case, rank, seed, layout)[rank * layout.recv : (rank + 1) * layout.recv]


def _of_all(case: Case, rank: int, seed: int, layout: Layout) -> Any:
    return np.concatenate([case.copied(peer, seed, layout.send) for peer in range(case.ranks)])


def _of_root(case: Case, rank: int, seed: int, layout: Layout) -> Any:
    return case.copied(case.root, seed, layout.recv)


def _block_of_root(case: Case, rank: int, seed: int, layout: Layout) -> Any:
    block = slice(rank * layout.count, (rank + 1) * layout.count)
    return case.copied(case.root, seed, layout.send)[block]


def _of_previous(case: Case, rank: int, seed: int, layout: Layout) -> Any:
    return case.copied((rank - 1) % case.ranks, seed, layout.recv)


def _block_of_all(case: Case, rank: int, seed: int, layout: Layout) -> Any:
    block = slice(rank * layout.count, (rank + 1) * layout.count)
    return np.concatenate([case.copied(peer, seed, layout.send)[block] for peer in range(case.ranks)])


def _by_traffic_of_all(case: Case, rank: int, seed: int, layout: Layout) -> Any:
    total, parts = layout.count * case.ranks * case.itemsize, []
    for peer in range(case.ranks):
        counts = [nbytes // case.itemsize for nbytes in case.traffic.sent(peer, case.ranks, total)]
        begin = sum(counts[:rank])
        parts.append(case.copied(peer, seed, layout.send)[begin : begin + counts[rank]])
    return np.concatenate(parts)


def _on_root(expected: Callable[..., Any]) -> Callable[[Case, int, int, Layout], Any]:
    """Elsewhere the receive buffer stays as it is."""

    def only_there(case: Case, rank: int, seed: int, layout: Layout) -> Any:
        return (
            expected(case, rank, seed, layout) if rank == case.root else np.empty(0, check.DTYPE[case.dtype])
        )

    return only_there


def _refuse_unless_power_of_two(ranks: int) -> str:
    return "" if ranks & (ranks - 1) == 0 else f"nRanks {ranks} is not a power of 2, skipping"


_COUNT_ONCE, _ALL_BUT_OWN = Bandwidth(_count_bytes, one), Bandwidth(_all_bytes, all_but_own)

COLLECTIVES = {
    row.program: row
    for row in (
        Collective(
            "all_reduce_perf", calls.all_reduce, _whole, Bandwidth(_count_bytes, twice_all_but_own),
            _reduced, reduces=True,
        ),
        Collective("all_gather_perf", calls.all_gather, _gathered, _ALL_BUT_OWN, _of_all),
        Collective(
            "reduce_scatter_perf", calls.reduce_scatter, _scattered, _ALL_BUT_OWN,
            _reduced_block, reduces=True,
        ),
        Collective("broadcast_perf", calls.broadcast, _whole, _COUNT_ONCE, _of_root, rooted=True),
        Collective(
            "reduce_perf", calls.reduce, _whole, _COUNT_ONCE, _on_root(_reduced), reduces=True, rooted=True
        ),
        Collective(
            "alltoall_perf", calls.all_to_all, _blocks, _ALL_BUT_OWN, _block_of_all, checked_in_place=False
        ),
        Collective(
            "alltoallv_perf", calls.all_to_all_v, _by_traffic, Bandwidth(_most_bytes, all_but_own),
            _by_traffic_of_all, checked_in_place=False, varies=True,
        ),
        Collective("gather_perf", calls.gather, _gathered, _ALL_BUT_OWN, _on_root(_of_all), rooted=True),
        Collective("scatter_perf", calls.scatter, _scattered, _ALL_BUT_OWN, _block_of_root, rooted=True),
        Collective(
            "sendrecv_perf", calls.send_and_receive, _whole, _COUNT_ONCE, _of_previous, checked_in_place=False
        ),
        Collective(
            "hypercube_perf", calls.hypercube, _gathered, Bandwidth(_bytes_of_others, one), _of_all,
            refuses=_refuse_unless_power_of_two,
        ),
    )
}  # fmt: skip

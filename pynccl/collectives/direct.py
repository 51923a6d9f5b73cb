"""Direct exchange: everybody to everybody at once. Least latency where all ranks reach each other equally.

Source: the one-shot and two-shot kernels of shared-memory and NVLink libraries, for instance A. Shah et al.,
"MSCCL++: Rethinking GPU communication abstractions for cutting-edge AI applications", arXiv:2504.09014.
Reductions are in rank order, so the same on all ranks, also if they do not commute.
"""

from __future__ import annotations

import numpy as np

from pynccl.collectives.builder import IN, OUT, SCRATCH, Builder, Spans, choose
from pynccl.collectives.schedule import Array, Schedule

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "one_shot_all_reduce",
    "reduce",
    "reduce_in_order",
    "reduce_scatter",
]


def one_shot_all_reduce(n: int) -> Schedule:
    """One round: each rank sends all it has to all others, and reduces what it gets.

    Each rank sends (n-1) S bytes. Time: alpha + (n-1) S (beta + gamma).
    """
    b = Builder("one_shot", "all_reduce", n)
    source, target = _others(n)
    b.send(source, target, IN[0])
    _reduce_all(b, b.ranks, IN[0], OUT[0])
    return b.build()


def all_reduce(n: int) -> Schedule:
    """Two rounds, "two-shot": each rank reduces a chunk for all, and sends it to all.

    Each rank sends 2(n-1)/n S bytes. Time: 2 alpha + 2(n-1)/n S beta + (n-1)/n S gamma.
    """
    b = Builder("direct", "all_reduce", n, parts=n)
    source, target = _others(n)
    b.send(source, target, IN[target])
    _reduce_all(b, b.ranks, IN[b.ranks], OUT[b.ranks])
    b.next_round()
    b.move(source, target, OUT[source], OUT[source])
    return b.build()


def reduce_scatter(n: int) -> Schedule:
    """One round: each rank gets all contributions to its block and reduces them.

    Each rank sends n - 1 of the n blocks that make S bytes. Time: alpha + (n-1)/n S (beta + gamma).
    """
    b = Builder("direct", "reduce_scatter", n)
    source, target = _others(n)
    b.send(source, target, IN[target])
    _reduce_all(b, b.ranks, IN[b.ranks], OUT[0])
    return b.build()


def all_gather(n: int) -> Schedule:
    """One round: each rank sends its block to all others.

    Each rank sends n - 1 of the n blocks that make S bytes. Time: alpha + (n-1)/n S beta.
    """
    b = Builder("direct", "all_gather", n)
    source, target = _others(n)
    b.move(source, target, IN[0], OUT[source])
    b.copy(b.ranks, IN[0], OUT[b.ranks])
    return b.build()


def all_to_all(n: int) -> Schedule:
    """One round: each rank sends a block to each other.

    Each rank sends n - 1 of the n blocks that make S bytes. Time: alpha + (n-1)/n S beta.
    """
    b = Builder("direct", "all_to_all", n)
    source, target = _others(n)
    b.move(source, target, IN[target], OUT[source])
    b.copy(b.ranks, IN[b.ranks], OUT[b.ranks])
    return b.build()


def broadcast(n: int, *, root: int = 0) -> Schedule:
    """One round: the root sends (n-1) S bytes. Time: alpha + (n-1) S beta."""
    b = Builder("direct", "broadcast", n, root=root)
    others = (root + 1 + np.arange(n - 1)) % n
    b.move(root, others, IN[0], OUT[0])
    b.copy(root, IN[0], OUT[0])
    return b.build()


def reduce(n: int, *, root: int = 0) -> Schedule:
    """One round: the root gets (n-1) S bytes. Time: alpha + (n-1) S (beta + gamma)."""
    b = Builder("direct", "reduce", n, root=root)
    others = (root + 1 + np.arange(n - 1)) % n
    b.send(others, root, IN[0])
    _reduce_all(b, np.array([root]), IN[0], OUT[0])
    return b.build()


def _others(n: int) -> tuple[Array, Array]:
    """All pairs of ranks: everybody begins with another peer, so that no port is everybody's first."""
    source = np.repeat(np.arange(n), n - 1)
    return source, (source + 1 + np.tile(np.arange(n - 1), n)) % n


def _reduce_all(b: Builder, ranks: Array, mine: Spans, dst: Spans) -> None:
    """Each of `ranks` reduces its `mine` and the others' messages into `dst`, in rank order."""
    first = np.zeros(len(ranks), dtype=np.int64)
    reduce_in_order(b, ranks, first, first + b.n, mine, SCRATCH[dst.chunk], dst)


def reduce_in_order(
    b: Builder, ranks: Array, first: Array, count: Array, mine: Spans, keep: Spans, dst: Spans
) -> None:
    """`ranks[i]` reduces messages of the `count[i]` ranks from `first[i]` on, and for itself `mine`, into
    `dst`.

    The sum is kept in `keep`, because in place `dst` is `mine`, which has to wait for its turn. The three are
    of the ranks at i, or the same for all.
    """

    def of(place: Spans, i: Array) -> Spans:
        fields = (place.buffer, place.chunk, place.chunks)
        return Spans(*(np.broadcast_to(field, len(ranks))[i] for field in fields))

    for q in range(int(count.max(initial=0))):
        own, last = ranks == first + q, count == q + 1
        i = np.flatnonzero((count > q) & ~own)
        if q == 0:
            b.recv(ranks[i], first[i], of(keep, i))
        else:
            so_far = choose((ranks[i] == first[i]) & (q == 1), of(mine, i), of(keep, i))
            b.recv(ranks[i], first[i] + q, choose(last[i], of(dst, i), of(keep, i)), reduce=so_far)
        i = np.flatnonzero(own & last)
        if q == 0:
            b.copy(ranks[i], of(mine, i), of(dst, i))
        else:
            j = np.flatnonzero(own & (count > q))
            b.reduce(ranks[j], of(mine, j), of(keep, j))
            b.copy(ranks[i], of(keep, i), of(dst, i))

"""PAT, parallel aggregated trees: logarithmic with far ranks first, linear where buffers end.

Source: S. Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale",
arXiv:2506.20252; `PatAGAlgorithm` and `PatRSAlgorithm` of NCCL.

Each block has a binomial tree of all ranks, with its own rank as root: the rank at offset o of it has as
parent the one at o without its lowest set bit. Each round goes over edges of the same length in all n trees
at once. `aggregation` A, a power of two, bounds the blocks in a message: A subtrees go on at once, each of
n / A offsets, and each from its first offset to its last, an edge a round. A = n/2 is the whole logarithmic
algorithm (Bruck's with its dimensions reversed, and no blocks to be shifted at the end); A = 1 is linear.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pynccl.collectives.builder import IN, OUT, SCRATCH, Builder, choose
from pynccl.collectives.schedule import Array, Schedule

__all__ = ["all_gather", "reduce_scatter"]


def all_gather(n: int, *, aggregation: int | None = None) -> Schedule:
    """log2 A + n/A - 1 rounds (n rounded up to a power of two); A is n/2 unless given.

    Each rank sends n - 1 of the n blocks that make S bytes, at most A in a round (as messages of one round,
    since their places are not next to each other). Time: (log2 A + n/A - 1) alpha + (n-1)/n S beta.
    """
    a, edges = _edges(n, aggregation)
    b = Builder("pat", "all_gather", n, params={"aggregation": a})
    r = b.ranks[:, None]
    for _, (step, child) in zip(b.rounds(len(edges)), edges, strict=True):
        parent = child - step
        block = (r - parent) % n
        b.move(r, (r + step) % n, choose(parent == 0, IN[0], OUT[block]), OUT[block])
    b.copy(b.ranks, IN[0], OUT[b.ranks], round=0)
    return b.build()


def reduce_scatter(n: int, *, aggregation: int | None = None) -> Schedule:
    """The all_gather backwards, near ranks first: as many rounds, and as many bytes.

    Partial sums take A log2(n/A) blocks of scratch (n rounded up to a power of two), whatever the number of
    rounds. Time: (log2 A + n/A - 1) alpha + (n-1)/n S (beta + gamma).
    """
    a, edges = _edges(n, aggregation)
    b = Builder("pat", "reduce_scatter", n, params={"aggregation": a})
    r = b.ranks[:, None]
    subtree = _power(n) // a
    if n == 1:
        b.copy(0, IN[0], OUT[0])
    started = np.zeros(n, dtype=bool)

    def sums(offset: Array) -> Array:
        """The scratch of a partial sum: one for each subtree and level in it, as only one is open there."""
        low = offset % subtree
        level = np.where(low == 0, 0, np.frexp((low & -low).astype(float))[1] - 1)
        return level * a + offset // subtree

    for _, (step, child) in zip(b.rounds(len(edges)), edges[::-1], strict=True):
        parent = child - step
        block = (r - child) % n
        b.send(r, (r - step) % n, choose(started[child], SCRATCH[sums(child)], IN[block]))
        mine = (r - parent) % n
        dst = choose(parent == 0, OUT[0], SCRATCH[sums(parent)])
        b.recv(r, (r + step) % n, dst, reduce=choose(started[parent], dst, IN[mine]))
        started[parent] = True
    return b.build()


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _edges(n: int, aggregation: int | None) -> tuple[int, list[tuple[int, Array]]]:
    """A, and the rounds of an all_gather: the length of its edges, and the offsets of their children."""
    power = _power(n)
    a = max(power // 2, 1) if aggregation is None else aggregation
    if a < 1 or a & (a - 1):
        raise ValueError(f"pat: aggregation {a} is not a power of two; take 1, 2, 4, ... blocks a message")
    a = min(a, max(power // 2, 1))
    return a, [(step, child[child < n]) for step, child in _all_edges(power, a)]


def _all_edges(power: int, a: int) -> Iterator[tuple[int, Array]]:
    subtree = power // a
    step = power // 2
    while step >= subtree:  # to the roots of all subtrees, with twice as many of them a round
        yield step, np.arange(step, power, 2 * step)
        step //= 2
    for low in range(1, subtree):  # through all subtrees at once, from each offset to the next
        yield low & -low, np.arange(low, power, subtree)

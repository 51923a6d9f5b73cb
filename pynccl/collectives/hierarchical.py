"""Two levels: directly inside nodes, around rings between them, so that slow links carry little.

Source: the two-level scheme of NCCL's users and of hierarchical all-reduce in general, for instance X. Jia et
al., "Highly scalable deep learning training system with mixed-precision", arXiv:1807.11205. Nodes may have
different numbers of ranks: there are as many *rails* as the largest node has ranks, and in a node of m ranks
rail j is in the hands of its rank j mod m.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pynccl.collectives.builder import IN, OUT, SCRATCH, Builder
from pynccl.collectives.direct import reduce_in_order
from pynccl.collectives.schedule import Array, Schedule

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


def all_reduce(n: int, *, ranks_per_node: int | Sequence[int] = 8) -> Schedule:
    """Reduce-scatter inside nodes, a ring all-reduce of each rail's share between them, all-gather inside.

    `ranks_per_node`: a number (the last node may have fewer), or one for each node. With N nodes of m ranks,
    2 + 2(N-1) rounds; links inside (alpha1, beta1) and between (alpha2, beta2) nodes. Time: 2 alpha1 +
    2(m-1)/m S beta1 + 2(N-1) alpha2 + 2(N-1)/N S/m beta2 + ((m-1)/m + (N-1)/(N m)) S gamma.
    """
    nodes = _Nodes(n, ranks_per_node)
    count, rails = nodes.count, nodes.rails
    b = Builder("hierarchical", "all_reduce", n, parts=rails * count, params=nodes.params)
    node, rail = (x.reshape(-1) for x in np.mgrid[:count, :rails])
    share = rail * count
    owner, first, size = nodes.owner(node, rail), nodes.first[node], nodes.sizes[node]
    each, mate = nodes.mates(node, owner)
    shared = share[each]
    b.send(mate, owner[each], IN[shared : shared + count])
    reduce_in_order(
        b,
        owner,
        first,
        size,
        IN[share : share + count],
        SCRATCH[share : share + count],
        OUT[share : share + count],
    )
    following = nodes.owner((node + 1) % count, rail)
    for s in b.rounds(count - 1):
        c = share + (node - s) % count
        b.move(owner, following, OUT[c], OUT[c], reduce=True)
    for s in b.rounds(count - 1):
        c = share + (node + 1 - s) % count
        b.move(owner, following, OUT[c], OUT[c])
    b.next_round()
    b.move(owner[each], mate, OUT[shared : shared + count], OUT[shared : shared + count])
    return b.build()


def all_gather(n: int, *, ranks_per_node: int | Sequence[int] = 8) -> Schedule:
    """Blocks go around between nodes, and each node hands to all its ranks what it got in the round before.

    With N nodes of m ranks (see `all_reduce`), N rounds; each rank sends N - 1 blocks to another node and
    N (m-1) inside. Time for blocks of S/n bytes: (N-1) alpha2 + alpha1 + (N-1) S/n beta2 + (m-1) S/n beta1,
    where the links inside are not slower than m - 1 times those between.
    """
    nodes = _Nodes(n, ranks_per_node)
    b = Builder("hierarchical", "all_gather", n, params=nodes.params)
    for s in b.rounds(nodes.count):
        node, rail, block = nodes.blocks(-s)
        owner = nodes.owner(node, rail)
        src = IN[0] if s == 0 else OUT[block]
        if s < nodes.count - 1:
            b.move(owner, nodes.owner((node + 1) % nodes.count, rail), src, OUT[block])
        each, mate = nodes.mates(node, owner)
        src = IN[0] if s == 0 else OUT[block[each]]
        b.move(owner[each], mate, src, OUT[block[each]])
    b.copy(b.ranks, IN[0], OUT[b.ranks], round=0)
    return b.build()


def reduce_scatter(n: int, *, ranks_per_node: int | Sequence[int] = 8) -> Schedule:
    """The `all_gather` backwards: each node reduces the blocks of another node, adds what came from the node
    before, and hands it on in the next round.

    With N nodes of m ranks, N rounds; each rank sends N - 1 blocks to another node and N (m-1) inside.
    Time as of `all_gather`, with gamma for each byte received.
    """
    nodes = _Nodes(n, ranks_per_node)
    b = Builder("hierarchical", "reduce_scatter", n, params=nodes.params)
    for s in b.rounds(nodes.count):
        last = s == nodes.count - 1
        node, rail, block = nodes.blocks(-1 - s)
        owner = nodes.owner(node, rail)
        each, mate = nodes.mates(node, owner)
        b.send(mate, owner[each], IN[block[each]])
        reduce_in_order(
            b,
            owner,
            nodes.first[node],
            nodes.sizes[node],
            IN[block],
            SCRATCH[2 * rail + 1],
            OUT[0] if nodes.count == 1 else SCRATCH[2 * rail],
        )
        if s > 0:
            before = nodes.owner((node - 1) % nodes.count, rail)
            kept = SCRATCH[2 * rail]
            b.move(before, owner, kept, OUT[0] if last else kept, reduce=kept, left=True)
    return b.build()


class _Nodes:
    """Which ranks are in which nodes: `sizes` and `first` ranks of `count` nodes."""

    def __init__(self, n: int, ranks_per_node: int | Sequence[int]) -> None:
        if isinstance(ranks_per_node, int):
            if ranks_per_node < 1:
                raise ValueError(f"hierarchical: {ranks_per_node} ranks a node; take 1 or more")
            sizes = [min(ranks_per_node, n - begin) for begin in range(0, n, ranks_per_node)]
        else:
            sizes = [int(size) for size in ranks_per_node]
            if sum(sizes) != n or min(sizes, default=0) < 1:
                raise ValueError(
                    f"hierarchical: nodes of {sizes} ranks are not {n} ranks; each has 1 or more, {n} in all"
                )
        self.params = {"ranks_per_node": ranks_per_node if isinstance(ranks_per_node, int) else sizes}
        self.sizes: Array = np.array(sizes)
        self.first: Array = np.cumsum(self.sizes) - self.sizes
        self.count, self.rails = len(sizes), max(sizes)

    def owner(self, node: Array, rail: Array) -> Array:
        """The rank of a node that has a rail."""
        return self.first[node] + rail % self.sizes[node]

    def mates(self, node: Array, owner: Array) -> tuple[Array, Array]:
        """All other ranks of the owners' nodes: the index of the owner of each, and its rank."""
        size = self.sizes[node]
        each = np.repeat(np.arange(len(node)), size - 1)
        turn = np.arange(len(each)) - np.repeat(np.cumsum(size - 1) - (size - 1), size - 1) + 1
        first = self.first[node][each]
        return each, first + (owner[each] - first + turn) % size[each]

    def blocks(self, ahead: int) -> tuple[Array, Array, Array]:
        """For each node and each block of the node `ahead` of it: the node, the block's rail, the block."""
        node, rail = (x.reshape(-1) for x in np.mgrid[: self.count, : self.rails])
        whose = (node + ahead) % self.count
        there = rail < self.sizes[whose]
        node, rail, whose = node[there], rail[there], whose[there]
        return node, rail, self.first[whose] + rail

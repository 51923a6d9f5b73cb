"""Trees: binomial ones for little data, and pairs of pipelined binary trees for more.

Sources: binomial trees, R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication
operations in MPICH", International Journal of High Performance Computing Applications 19 (2005); two trees,
P. Sanders, J. Speck and J. L. Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
Parallel Computing 35 (2009), in the shape of NCCL's `ncclGetBtree` and `ncclGetDtree`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from pynccl.collectives.builder import IN, OUT, SCRATCH, Builder, Spans, choose
from pynccl.collectives.schedule import Array, Schedule

__all__ = [
    "all_reduce",
    "binomial_all_reduce",
    "binomial_broadcast",
    "binomial_reduce",
    "broadcast",
    "btree",
    "dtree",
    "reduce",
]

Sums = Callable[[Array, int], Spans]


def binomial_broadcast(n: int, *, root: int = 0) -> Schedule:
    """ceil(log2 n) rounds; in each, everybody who has the data sends it to somebody who has not.

    The root sends ceil(log2 n) S bytes. Time: ceil(log2 n)(alpha + S beta).
    """
    b = Builder("binomial", "broadcast", n, root=root)
    _spread(b, root, IN[0])
    b.copy(root, IN[0], OUT[0], round=0)
    return b.build()


def binomial_reduce(n: int, *, root: int = 0) -> Schedule:
    """ceil(log2 n) rounds, in each of which half of the ranks that are left hand over and are done.

    Each rank but the root sends S bytes. Time: ceil(log2 n)(alpha + S (beta + gamma)). From root 0 the
    contributions are reduced in rank order.
    """
    b = Builder("binomial", "reduce", n, root=root)
    _collect(b, root, lambda rank, c: choose(rank == root, OUT[c], SCRATCH[c]))
    return b.build()


def binomial_all_reduce(n: int) -> Schedule:
    """Reduce to rank 0, then broadcast: 2 ceil(log2 n) rounds.

    Time: 2 ceil(log2 n)(alpha + S beta) + ceil(log2 n) S gamma. Reduces in rank order.
    """
    b = Builder("binomial", "all_reduce", n)
    _collect(b, 0, lambda _, c: OUT[c])
    _spread(b, 0, OUT[0])
    return b.build()


def _spread(b: Builder, root: int, first: Spans) -> None:
    """From the root, which has the data in `first`, to everybody's OUT."""
    levels = (b.n - 1).bit_length()
    for s in b.rounds(levels):
        step = 1 << (levels - 1 - s)
        v = np.arange(0, b.n - step, 2 * step)
        b.move((v + root) % b.n, (v + step + root) % b.n, choose(v == 0, first, OUT[0]), OUT[0])


def _collect(b: Builder, root: int, sums: Sums) -> None:
    """To the root; `sums(rank, chunk)` is where a rank keeps its sum."""
    if b.n == 1:
        b.copy(0, IN[0], OUT[0])
    for s in b.rounds((b.n - 1).bit_length()):
        step = 1 << s
        v = np.arange(step, b.n, 2 * step)
        source, target = (v + root) % b.n, (v - step + root) % b.n
        src = choose((s > 0) & (v + 1 < b.n), sums(source, 0), IN[0])
        b.move(source, target, src, sums(target, 0), reduce=IN[0] if s == 0 else True)


def btree(n: int) -> Array:
    """The parents of NCCL's binary tree of n ranks, -1 for its root 0.

    With b the lowest set bit of r, the parent is (r ^ b) | 2b, or r ^ b if there is no such rank. So the
    subtree of r is a range of consecutive ranks around it.
    """
    r = np.arange(n)
    bit = r & -r
    up = (r ^ bit) | (bit << 1)
    up = np.where(up >= n, r ^ bit, up)
    up[:1] = -1
    return up


def dtree(n: int) -> tuple[Array, Array]:
    """The parents of NCCL's two trees of n ranks: `btree`, and its mirror (n even) or it moved on by one rank
    (n odd), so that no rank but one is an inner node of both.
    """
    one = btree(n)
    names = np.arange(n)[::-1] if n % 2 == 0 else (np.arange(n) + 1) % n
    two = np.full(n, -1)
    two[names] = np.where(one < 0, -1, names[one])
    return one, two


def all_reduce(n: int, *, chunks: int = 8) -> Schedule:
    """Two trees, each of which reduces half of the data to its root and hands it back, `chunks` chunks in
    a pipeline.

    2 depth - 1 + chunks rounds with depth = floor(log2 n) or one more; each rank sends and receives at most
    2S bytes. Time: about (2 log2 n + k) alpha + (log2 n + k) S/k (2 beta + gamma) with k chunks: for large S
    and many chunks 2S beta + S gamma, as much as a ring's.
    """
    b = Builder("tree", "all_reduce", n, parts=2 * chunks, params={"chunks": chunks})
    if n == 1:
        b.copy(0, IN[0 : 2 * chunks], OUT[0 : 2 * chunks])
    for channel, parent in enumerate(dtree(n)):
        tree = _Tree.of(parent)
        for i in range(chunks):
            c = channel * chunks + i
            _up(b, tree, c, lambda _, c: OUT[c], channel, i)
            _down(b, tree, c, OUT[c], channel, tree.depth + i)
    return b.build()


def broadcast(n: int, *, root: int = 0, chunks: int = 8) -> Schedule:
    """The root feeds the roots of two trees of the other ranks, half of the data each, in `chunks` chunks.

    depth - 1 + chunks rounds with depth = floor(log2(n-1)) + 1 or one more; no rank sends more than S bytes.
    Time: about (log2 n + k)(alpha + S/k beta) with k chunks, so S beta for large S and many chunks.
    """
    b = Builder("tree", "broadcast", n, parts=2 * chunks, root=root, params={"chunks": chunks})
    for channel, tree in enumerate(_under_root(n, root)):
        for i in range(chunks):
            c = channel * chunks + i
            _down(b, tree, c, IN[c], channel, i)
    b.copy(root, IN[0 : 2 * chunks], OUT[0 : 2 * chunks], round=0)
    return b.build()


def reduce(n: int, *, root: int = 0, chunks: int = 8) -> Schedule:
    """The `broadcast` the other way round: no rank receives more than S bytes.

    Time: about (log2 n + k)(alpha + S/k (beta + gamma)) with k chunks.
    """
    b = Builder("tree", "reduce", n, parts=2 * chunks, root=root, params={"chunks": chunks})
    if n == 1:
        b.copy(0, IN[0 : 2 * chunks], OUT[0 : 2 * chunks])
    for channel, tree in enumerate(_under_root(n, root)):
        for i in range(chunks):
            c = channel * chunks + i
            _up(b, tree, c, lambda rank, c: choose(rank == root, OUT[c], SCRATCH[c]), channel, i)
    return b.build()


@dataclasses.dataclass(frozen=True)
class _Tree:
    """The edges of a tree: children, and for each its parent, its level (1: under the root), whether it has
    children itself, and whether it is the first child of its parent. `depth`: the lowest level.
    """

    child: Array
    parent: Array
    level: Array
    inner: Array
    first: Array
    depth: int

    @classmethod
    def of(cls, parent: Array) -> _Tree:
        level = np.zeros(len(parent), dtype=np.int64)
        at = parent
        while (at >= 0).any():
            level += at >= 0
            at = np.where(at >= 0, parent[at], -1)
        child = np.flatnonzero(parent >= 0)
        first = np.zeros(len(child), dtype=bool)
        first[np.unique(parent[child], return_index=True)[1]] = True
        inner = np.isin(child, parent)
        return cls(child, parent[child], level[child], inner, first, int(level.max(initial=0)))


def _under_root(n: int, root: int) -> list[_Tree]:
    """Two trees of all ranks but the root, hung under the root."""
    names = (root + 1 + np.arange(n - 1)) % n
    trees = []
    for parent in dtree(n - 1):
        whole = np.full(n, -1)
        whole[names] = np.where(parent < 0, root, names[parent])
        trees.append(_Tree.of(whole))
    return trees


def _up(b: Builder, tree: _Tree, c: int, sums: Sums, channel: int, begin: int) -> None:
    """Reduce chunk c to the root, from round `begin` on; `sums(rank, chunk)`: where a rank keeps its sum."""
    for first in (True, False):
        some = np.flatnonzero(tree.first == first)
        child, parent = tree.child[some], tree.parent[some]
        b.move(
            child,
            parent,
            choose(tree.inner[some], sums(child, c), IN[c]),
            sums(parent, c),
            reduce=IN[c] if first else True,
            left=child < parent,
            channel=channel,
            round=begin + tree.depth - tree.level[some],
        )


def _down(b: Builder, tree: _Tree, c: int, first: Spans, channel: int, begin: int) -> None:
    """Hand chunk c down from the root, which has it in `first`, from round `begin` on."""
    src = choose(tree.level == 1, first, OUT[c])
    b.move(tree.parent, tree.child, src, OUT[c], channel=channel, round=begin + tree.level - 1)

"""Recursive doubling, and halving with doubling: in each round pairs of ranks exchange, ever farther apart.

Sources: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in
MPICH", International Journal of High Performance Computing Applications 19 (2005); R. Rabenseifner,
"Optimization of collective reduction operations", ICCS 2004.

They need p = 2^k ranks. Of other numbers n, with p the largest power of two in n, the first n - p pairs (2j,
2j + 1) act as one: before, the odd rank hands its data to the even one, and after, gets the result from it.
So the j-th of p stands for consecutive ranks, from `first_rank(n)[j]` on, which keeps sums in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pynccl.collectives.builder import IN, OUT, SCRATCH, Builder, choose
from pynccl.collectives.schedule import Array, Schedule

__all__ = [
    "butterfly",
    "doubling_all_gather",
    "doubling_all_reduce",
    "first_rank",
    "halving_all_reduce",
    "halving_reduce_scatter",
]


def first_rank(n: int) -> Array:
    """The first of the ranks that each of the p stands for, and n behind the last: p + 1 numbers."""
    p = 1 << (n.bit_length() - 1)
    j = np.arange(p + 1)
    return j + np.minimum(j, n - p)


def doubling_all_reduce(n: int) -> Schedule:
    """log2 n rounds, in each of which pairs exchange all they have reduced so far: S bytes sent in each.

    Time: log2 n (alpha + S (beta + gamma)); if n is not a power of two, two rounds more. Reduces in rank
    order.
    """
    b = Builder("recursive_doubling", "all_reduce", n)
    first = first_rank(n)
    r, extra = first[:-1], n - (len(first) - 1)
    _fold(b, 1)
    for s in b.rounds(len(r).bit_length() - 1):
        j = np.arange(len(r))
        peer = r[j ^ (1 << s)]
        mine = choose((s > 0) | (j < extra), OUT[0], IN[0])
        b.send(r, peer, mine)
        b.recv(r, peer, OUT[0], reduce=mine, left=peer < r)
    _unfold(b, 1)
    return b.build()


def halving_all_reduce(n: int) -> Schedule:
    """Reduce-scatter by halves, then all-gather by doubling: 2 log2 n rounds, 2(n-1)/n S bytes sent by each.

    Time: 2 log2 n alpha + 2(n-1)/n S beta + (n-1)/n S gamma; if n is not a power of two, with p for n and two
    rounds of S bytes more. Neighbours exchange most, half the data, and sums are in rank order.
    """
    p = len(first_rank(n)) - 1
    return butterfly("halving_doubling", n, [np.arange(p) ^ (1 << s) for s in range(p.bit_length() - 1)])


def butterfly(name: str, n: int, peers: Sequence[Array]) -> Schedule:
    """An all_reduce of log2 p rounds of halving and as many of doubling, with the peers of round s in
    `peers[s]`, for p ranks; for others see above.

    Round s of halving: a rank and its peer each keep, and reduce, half of what both have. What a rank keeps
    is an interval of chunks: of the two halves the lower goes to the rank from which, in the rounds to come,
    the lower ranks are reached.
    """
    first = first_rank(n)
    r, p = first[:-1], len(first) - 1
    b = Builder(name, "all_reduce", n, parts=p)
    extra, j = n - p, np.arange(p)
    _fold(b, p)
    position, lowest = np.zeros(p, dtype=np.int64), j
    for s, q in reversed(list(enumerate(peers))):
        position += np.where(lowest < lowest[q], 0, p >> (s + 1))
        lowest = np.minimum(lowest, lowest[q])
    for s in b.rounds(len(peers)):
        size, peer = p >> (s + 1), r[peers[s]]
        keep = position & -size
        give = keep ^ size
        has_sum = (s > 0) | (j < extra)
        b.send(r, peer, choose(has_sum, OUT[give : give + size], IN[give : give + size]))
        dst = OUT[keep : keep + size]
        b.recv(r, peer, dst, reduce=choose(has_sum, dst, IN[keep : keep + size]), left=peer < r)
    for s in b.rounds(len(peers)):
        size = 1 << s
        peer = r[peers[len(peers) - 1 - s]]
        have = position & -size
        get = have ^ size
        b.send(r, peer, OUT[have : have + size])
        b.recv(r, peer, OUT[get : get + size])
    _unfold(b, p)
    return b.build()


def _odd(n: int) -> Array:
    """The odd ranks of the pairs that act as one."""
    return 2 * np.arange(n - len(first_rank(n)) + 1) + 1


def _fold(b: Builder, parts: int) -> None:
    """The odd ranks of pairs hand all they have to the even ones."""
    if b.n == 1:
        b.copy(0, IN[0:parts], OUT[0:parts])
    odd = _odd(b.n)
    b.move(odd, odd - 1, IN[0:parts], OUT[0:parts], reduce=IN[0:parts])


def _unfold(b: Builder, parts: int) -> None:
    odd = _odd(b.n)
    b.move(odd - 1, odd, OUT[0:parts], OUT[0:parts])


def halving_reduce_scatter(n: int) -> Schedule:
    """log2 n rounds; in round s a rank hands half of the blocks it still has to the rank n / 2^(s+1) away.

    Each rank sends n - 1 of the n blocks that make S bytes. Time: log2 n alpha + (n-1)/n S (beta + gamma); if
    n is not a power of two, a round of S bytes more before, and one of S/n after.
    """
    b = Builder("halving", "reduce_scatter", n)
    first = first_rank(n)
    r, p = first[:-1], len(first) - 1
    extra, j = n - p, np.arange(p)
    if n == 1:
        b.copy(0, IN[0], OUT[0])
    odd = _odd(n)
    b.move(odd, odd - 1, IN[0:n], SCRATCH[0:n], reduce=IN[0:n])
    levels = p.bit_length() - 1
    for s in b.rounds(levels):
        size = p >> (s + 1)
        keep, give = j & -size, (j & -size) ^ size
        peer = r[j ^ size]
        has_sum = (s > 0) | (j < extra)
        low, high = first[give], first[give + size]
        b.send(r, peer, choose(has_sum, SCRATCH[low:high], IN[low:high]))
        low, high = first[keep], first[keep + size]
        mine = choose(has_sum, SCRATCH[low:high], IN[low:high])
        home = (s == levels - 1) & (j >= extra)
        b.recv(r, peer, choose(home, OUT[0], SCRATCH[low:high]), reduce=mine, left=peer < r)
    b.move(odd - 1, odd, SCRATCH[odd], OUT[0])
    b.copy(odd - 1, SCRATCH[odd - 1], OUT[0])
    return b.build()


def doubling_all_gather(n: int) -> Schedule:
    """log2 n rounds; in round s a rank exchanges the 2^s blocks that it has with the rank 2^s away.

    Each rank sends n - 1 of the n blocks that make S bytes. Time: log2 n alpha + (n-1)/n S beta; if n is not
    a power of two, a round of S/n bytes more before, and one of S after.
    """
    b = Builder("recursive_doubling", "all_gather", n)
    first = first_rank(n)
    r, p = first[:-1], len(first) - 1
    extra, j = n - p, np.arange(p)
    odd = _odd(n)
    b.move(odd, odd - 1, IN[0], OUT[odd])
    for s in b.rounds(p.bit_length() - 1):
        size = 1 << s
        have, get = j & -size, (j & -size) ^ size
        peer = r[j ^ size]
        low, high = first[have], first[have + size]
        b.send(r, peer, IN[0] if s == 0 and not extra else OUT[low:high])
        low, high = first[get], first[get + size]
        b.recv(r, peer, OUT[low:high])
    b.move(odd - 1, odd, OUT[0:n], OUT[0:n])
    b.copy(b.ranks, IN[0], OUT[b.ranks], round=0)
    return b.build()

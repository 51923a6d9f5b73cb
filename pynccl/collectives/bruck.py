"""Bruck's algorithms: as few rounds as can be, for any number of ranks, at the price of copies.

Source: J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal and D. Weathersby, "Efficient algorithms for all-to-all
communications in multiport message-passing systems", IEEE Transactions on Parallel and Distributed Systems 8
(1997).
"""

from __future__ import annotations

import numpy as np

from pynccl.collectives.builder import IN, OUT, SCRATCH, Builder, choose
from pynccl.collectives.schedule import Array, Schedule

__all__ = ["all_gather", "all_to_all"]


def all_gather(n: int) -> Schedule:
    """ceil(log2 n) rounds; in round s each rank sends the up to 2^s blocks that it has to rank r - 2^s.

    Scratch holds the blocks of ranks r, r + 1, ... around; two copies put them in their places.
    Each rank sends n - 1 of the n blocks that make S bytes. Time: ceil(log2 n) alpha + (n-1)/n S beta.
    """
    b = Builder("bruck", "all_gather", n)
    r, levels = b.ranks, (n - 1).bit_length()
    for s in b.rounds(levels):
        have = 1 << s
        blocks = min(have, n - have)
        src = IN[0] if s == 0 else SCRATCH[0:blocks]
        b.move(r, (r - have) % n, src, SCRATCH[have : have + blocks])
    b.copy(r, IN[0], SCRATCH[0] if n > 1 else OUT[0], round=0)
    if n > 1:
        b.copy(r, SCRATCH[0 : n - r], OUT[r:n], round=levels - 1)
        b.copy(r[1:], SCRATCH[n - r[1:] : n], OUT[0 : r[1:]], round=levels - 1)
    return b.build()


def all_to_all(n: int) -> Schedule:
    """ceil(log2 n) rounds; a block for rank r + d goes 2^s ranks further in each round s whose bit d has.

    A rank sends up to half of the n blocks that make S bytes in each round, gathered in scratch before and
    spread after. Time: ceil(log2 n)(alpha + S/2 beta) and the copies, so it is for small blocks.
    """
    b = Builder("bruck", "all_to_all", n)
    r = b.ranks[:, None]
    packed, arrived = n, n + n // 2  # scratch: the blocks by distance, those to send, those received
    b.copy(b.ranks, IN[b.ranks], OUT[b.ranks])
    going = _with_bit(n, 0)
    b.copy(r, IN[(r + going) % n], SCRATCH[packed + np.arange(len(going))])
    for s in b.rounds((n - 1).bit_length()):
        step, count = 1 << s, len(going)
        b.move(
            b.ranks,
            (b.ranks + step) % n,
            SCRATCH[packed : packed + count],
            SCRATCH[arrived : arrived + count],
        )
        home = going < 2 * step
        dst = choose(home, OUT[(r - going) % n], SCRATCH[going])
        b.copy(r, SCRATCH[arrived + np.arange(count)], dst)
        going = _with_bit(n, s + 1)
        fresh = going & (2 * step - 1) == 0  # not moved before
        src = choose(fresh, IN[(r + going) % n], SCRATCH[going])
        b.copy(r, src, SCRATCH[packed + np.arange(len(going))])
    return b.build()


def _with_bit(n: int, s: int) -> Array:
    distance = np.arange(n)
    return distance[(distance >> s) & 1 == 1]

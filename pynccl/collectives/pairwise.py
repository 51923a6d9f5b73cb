"""Pairwise exchange: an all_to_all in which each rank talks to one rank at a time.

Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in
MPICH", International Journal of High Performance Computing Applications 19 (2005).
"""

from __future__ import annotations

from pynccl.collectives.builder import IN, OUT, Builder
from pynccl.collectives.schedule import Schedule

__all__ = ["all_to_all"]


def all_to_all(n: int) -> Schedule:
    """n - 1 rounds; in round s each rank sends a block to rank r + s and receives one from rank r - s.

    Each rank sends n - 1 of the n blocks that make S bytes. Time: (n-1) alpha + (n-1)/n S beta.
    """
    b = Builder("pairwise", "all_to_all", n)
    r = b.ranks
    for s in b.rounds(n - 1):
        peer = (r + s + 1) % n
        b.move(r, peer, IN[peer], OUT[r])
    b.copy(r, IN[r], OUT[r], round=0)
    return b.build()

"""Swing: halving and doubling with peers that alternate between both sides, for rings and tori.

Source: D. De Sensi, T. Bonato, D. Saam and T. Hoefler, "Swing: Short-cutting Rings for Higher Bandwidth
Allreduce", NSDI 2024, arXiv:2401.09356. Here the logical ring of one dimension.
"""

from __future__ import annotations

import numpy as np

from pynccl.collectives.recursive import butterfly, first_rank
from pynccl.collectives.schedule import Schedule

__all__ = ["all_reduce"]


def all_reduce(n: int) -> Schedule:
    """As halving with doubling, but in round s even ranks exchange with r + rho(s), odd ones with r - rho(s).

    rho(s) = (1 - (-2)^(s+1)) / 3: 1, -1, 3, -5, 11, ... So the distances on a ring are a third shorter than
    powers of two, and both directions are in use. 2 log2 n rounds, 2(n-1)/n S bytes sent by each.
    Time: 2 log2 n alpha + 2(n-1)/n S beta + (n-1)/n S gamma, besides what distance costs; for n that is not a
    power of two as in `recursive.py`, with two rounds more (not as in the paper, which treats even n anew).
    """
    p = len(first_rank(n)) - 1
    r = np.arange(p)
    rho = [(1 - (-2) ** (s + 1)) // 3 for s in range(p.bit_length() - 1)]
    return butterfly("swing", n, [(r + np.where(r % 2 == 0, step, -step)) % p for step in rho])

"""Rings: rank r sends to rank r + 1. Least bytes for any number of ranks, latency linear in it.

Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
Journal of Parallel and Distributed Computing 69 (2009); the same rings as NCCL's.
"""

from __future__ import annotations

from pynccl.collectives.builder import IN, OUT, Builder
from pynccl.collectives.schedule import Schedule

__all__ = ["all_reduce"]


def all_reduce(n: int, *, channels: int = 1) -> Schedule:
    """Reduce-scatter around the ring, then all-gather: 2(n-1) rounds, 2(n-1)/n S bytes sent by each rank.

    Chunk c starts at rank c and gathers one contribution a hop. `channels` rings run side by side, each on
    every `channels`-th chunk. Time: 2(n-1) alpha + 2(n-1)/n S beta + (n-1)/n S gamma.
    """
    b = Builder("ring", "all_reduce", n, parts=n * channels, params={"channels": channels})
    r, right = b.ranks, (b.ranks + 1) % n
    if n == 1:
        b.copy(0, IN[0:channels], OUT[0:channels])
    for s in b.rounds(n - 1):
        for k in range(channels):
            c = (r - s) % n * channels + k
            b.move(r, right, IN[c] if s == 0 else OUT[c], OUT[c], reduce=IN[c], channel=k)
    for s in b.rounds(n - 1):
        for k in range(channels):
            c = (r + 1 - s) % n * channels + k
            b.move(r, right, OUT[c], OUT[c], channel=k)
    return b.build()

"""Rings: rank r sends to rank r + 1. Least bytes for any number of ranks, latency linear in it.

Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
Journal of Parallel and Distributed Computing 69 (2009); the same rings as NCCL's. `channels` rings run side
by side, each on a share of the chunks.
"""

from __future__ import annotations

import numpy as np

from pynccl.collectives.builder import IN, OUT, SCRATCH, Builder, choose
from pynccl.collectives.schedule import Schedule

__all__ = ["all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter"]


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


def reduce_scatter(n: int, *, channels: int = 1) -> Schedule:
    """n - 1 rounds; each rank sends n - 1 of the n blocks that make S bytes.

    Block c starts at rank c + 1 and gathers one contribution a hop until it is home. The partial sum is kept
    in scratch, because in place OUT is a block of IN that is still to be added.
    Time: (n-1) alpha + (n-1)/n S (beta + gamma).
    """
    b = Builder("ring", "reduce_scatter", n, parts=channels, params={"channels": channels})
    r, right = b.ranks, (b.ranks + 1) % n
    if n == 1:
        b.copy(0, IN[0:channels], OUT[0:channels])
    for s in b.rounds(n - 1):
        for k in range(channels):
            src = IN[(r - 1 - s) % n * channels + k] if s == 0 else SCRATCH[k]
            b.send(r, right, src, channel=k)
            mine, dst = IN[(r - 2 - s) % n * channels + k], OUT[k] if s == n - 2 else SCRATCH[k]
            b.recv(r, (r - 1) % n, dst, reduce=mine, channel=k)
    return b.build()


def all_gather(n: int, *, channels: int = 1) -> Schedule:
    """n - 1 rounds; each rank sends n - 1 of the n blocks that make S bytes.

    Time: (n-1) alpha + (n-1)/n S beta.
    """
    b = Builder("ring", "all_gather", n, parts=channels, params={"channels": channels})
    r, right = b.ranks, (b.ranks + 1) % n
    for s in b.rounds(n - 1):
        for k in range(channels):
            c = (r - s) % n * channels + k
            b.move(r, right, IN[k] if s == 0 else OUT[c], OUT[c], channel=k)
    b.copy(r, IN[0:channels], OUT[r * channels : (r + 1) * channels], round=0)
    return b.build()


def broadcast(n: int, *, root: int = 0, channels: int = 1, chunks: int = 8) -> Schedule:
    """A chain from the root around the ring, through which `chunks` chunks of each channel follow each other.

    n - 2 + chunks rounds; each rank but the last sends S bytes.
    Time: (n - 2 + k)(alpha + S/k beta) with k chunks.
    """
    parts = channels * chunks
    params = {"channels": channels, "chunks": chunks}
    b = Builder("ring", "broadcast", n, parts=parts, root=root, params=params)
    hop = np.arange(n - 1)
    source, target = (root + hop) % n, (root + hop + 1) % n
    for c in range(parts):
        channel, i = divmod(c, chunks)
        src = choose(hop == 0, IN[c], OUT[c])
        b.move(source, target, src, OUT[c], channel=channel, round=hop + i)
    b.copy(root, IN[0:parts], OUT[0:parts], round=0)
    return b.build()


def reduce(n: int, *, root: int = 0, channels: int = 1, chunks: int = 8) -> Schedule:
    """A chain from the rank after the root around the ring to the root; see `broadcast`.

    n - 2 + chunks rounds; each rank but the root sends S bytes, and each but the first reduces S.
    Time: (n - 2 + k)(alpha + S/k (beta + gamma)) with k chunks.
    """
    parts = channels * chunks
    params = {"channels": channels, "chunks": chunks}
    b = Builder("ring", "reduce", n, parts=parts, root=root, params=params)
    hop = np.arange(n - 1)
    source, target = (root + 1 + hop) % n, (root + 2 + hop) % n
    if n == 1:
        b.copy(0, IN[0:parts], OUT[0:parts])
    for c in range(parts):
        channel, i = divmod(c, chunks)
        src = choose(hop == 0, IN[c], SCRATCH[c])
        dst = choose(target == root, OUT[c], SCRATCH[c])
        b.move(source, target, src, dst, reduce=IN[c], left=True, channel=channel, round=hop + i)
    return b.build()

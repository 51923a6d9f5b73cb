"""What ours has to reach, as data: parts of the fastest peer's time, and of the machine's memory roofline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.peer.cases import Case

__all__ = [
    "KIB",
    "MIB",
    "MISSES",
    "TARGETS",
    "Band",
    "Bound",
    "Miss",
    "ratio_target",
    "roofline_target",
    "why",
]

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Bound:
    """At most this part of the fastest peer's time, by buffers: with a core a rank, and with fewer."""

    roomy: dict[str, float]
    crowded: dict[str, float]


@dataclass(frozen=True)
class Band:
    """Sizes from `least` to `most` bytes. Between bands and beyond them: no slower than any peer."""

    least: int
    most: int
    bound: Bound


TARGETS = (
    Band(
        1,
        4 * KIB,
        Bound(
            roomy={"plain": 0.7, "mapped": 0.7, "prepared": 0.4},
            crowded={"plain": 0.7, "mapped": 0.7, "prepared": 0.7},
        ),
    ),
    Band(
        64 * KIB,
        1 * MIB,
        Bound(
            roomy={"plain": 0.6, "mapped": 0.2, "prepared": 0.6},
            crowded={"plain": 0.8, "mapped": 0.5, "prepared": 0.8},
        ),
    ),
    Band(
        16 * MIB,
        64 * MIB,
        Bound(
            roomy={"plain": 0.6, "mapped": 0.25, "prepared": 0.6},
            crowded={"plain": 0.6, "mapped": 0.25, "prepared": 0.6},
        ),
    ),
)
NO_SLOWER = 1.0

ROOFLINE_FROM = 1 * MIB
ROOFLINE_TARGET = {"roomy": 0.8, "crowded": 0.7}  # at least, for mapped arrays


def ratio_target(case: Case, buffers: str, cores: int, quiet: bool = True) -> float:
    """Ours over the fastest peer is to be at most this. Beside a busy process: no slower than any peer."""
    for band in TARGETS if quiet else ():
        if band.least <= case.bytes <= band.most:
            return (band.bound.roomy if case.ranks <= cores else band.bound.crowded)[buffers]
    return NO_SLOWER


def roofline_target(case: Case, buffers: str, cores: int, quiet: bool = True) -> float | None:
    """Roofline's time over ours is to be at least this; None where nothing is asked."""
    if not quiet or buffers != "mapped" or case.bytes < ROOFLINE_FROM:
        return None
    return ROOFLINE_TARGET["roomy" if case.ranks <= cores else "crowded"]


# --- known misses -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Miss:
    """Why some rows miss, as measured; docs/performance.md has the measurement."""

    op: str  # "*": every operation
    ranks: int
    least: int
    most: int
    buffers: tuple[str, ...]
    why: str  # as in "3 rows, because the caches are shared:"
    load: str = "quiet"  # as in a row


_MOVING = ("all_gather", "broadcast", "alltoall")
_ALL, _PLAIN, _MAPPED = ("plain", "mapped", "prepared"), ("plain",), ("mapped",)
_CALL = (
    "because a prepared call takes 0.12 us in Python and a meeting of two cores 0.15-0.4 in C, of the "
    "0.75-1.2 that Open MPI takes for all"
)
_ROOT = "because Open MPI's root runs ahead as ours does, and its whole call takes 0.4 us"
_TURNS = "because ranks that share a core take turns: a meeting of 4 on 2 cores takes 2.7 us in C"
_TWICE = "because ordinary arrays are copied into shared memory and out of it, by the peers as by us"
_KERNEL = "because the kernel's copy from process to process is all that MPICH and Open MPI make, too"
_PAST = "because memory is the limit: two copies past the caches take what the peers' one through them takes"
_MEETING = "because the call, a meeting of the ranks and lines from another core's cache take 1-2 us"
_MEMORY = "because memory is the limit: the roofline alone takes about the wanted part of the peer's time"
_CACHED = (
    "because processes that wait for nobody make several calls in a slice of the scheduler, and read from "
    "the caches (up to 240 GB/s) what ours read from memory"
)

# The first that fits. With one busy core only "no slower than any peer" is asked.
MISSES: tuple[Miss, ...] = (
    Miss("broadcast", 2, 1, 256, _ALL, _ROOT),
    Miss("broadcast", 4, 1, 4 * KIB, _ALL, _ROOT),
    Miss("*", 2, 1, 4 * KIB, _ALL, _CALL),
    Miss("*", 4, 1, 4 * KIB, _ALL, _TURNS),
    Miss("*", 2, 64 * KIB, 1 * MIB, _PLAIN, _TWICE),
    Miss("*", 4, 64 * KIB, 1 * MIB, _PLAIN, _TWICE),
    Miss("*", 2, 64 * KIB, 1 * MIB, _MAPPED, _MEETING),
    Miss("*", 4, 64 * KIB, 1 * MIB, _MAPPED, _TURNS),
    *(Miss("broadcast", ranks, 16 * MIB, 64 * MIB, _PLAIN, _KERNEL) for ranks in (2, 4)),
    *(Miss(op, ranks, 16 * MIB, 64 * MIB, _PLAIN, _PAST) for op in _MOVING for ranks in (2, 4)),
    Miss("*", 2, 16 * MIB, 64 * MIB, _MAPPED, _MEMORY),
    *(Miss(op, 4, 16 * MIB, 64 * MIB, _MAPPED, _MEMORY) for op in _MOVING),
    Miss("reduce_scatter", 4, 16 * MIB, 64 * MIB, _MAPPED, _CACHED),
)


def why(row: Mapping[str, Any]) -> str | None:
    """What is known about a missed row, or None."""
    for miss in MISSES:
        if (
            miss.op in ("*", row["op"])
            and miss.ranks == row["ranks"]
            and miss.least <= row["bytes"] <= miss.most
            and row["buffers"] in miss.buffers
            and row["load"] == miss.load
        ):
            return miss.why
    return None

"""What is measured: an operation on float32 arrays, its sizes, and the bytes that it cannot do without.

Standard library only: the other libraries' environments import this too.

`bytes` of a case is nccl-tests' size: the array of an all_reduce or broadcast, the whole result of an
all_gather, the whole input of a reduce_scatter, the whole send buffer of a rank of an alltoall.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FLOAT", "OPS", "Case", "Streams", "size_in_words"]

FLOAT = 4  # bytes


@dataclass(frozen=True)
class Streams:
    """What a process does at least: load `loads` streams of `elements` floats, add, store to `stores`."""

    loads: int
    stores: int
    elements: int


@dataclass(frozen=True)
class Op:
    """An operation on p ranks: how many streams each loads and stores, and how long they are."""

    loads: str  # "1" or "p"
    stores: str  # "1", "p" or "p-1"
    elements_over: str  # a stream has bytes/4/p elements, or all of them
    in_place: bool = False


# The least traffic of p ranks together, for s bytes, is (see docs/performance.md)
#   all_reduce      2ps     each rank loads its slice of all inputs, and stores the sum to all outputs
#   all_gather      (p+1)s  each rank loads its own block, and stores it to all outputs
#   reduce_scatter  (p+1)s  each rank loads its slice of all inputs, and stores the sum to its own output
#   broadcast       ps      each rank loads its slice of the root's array, and stores it to the p-1 others
#   alltoall        2ps     each rank loads its input and stores all of it
OPS = {
    "all_reduce": Op("p", "p", "p"),
    "all_gather": Op("1", "p", "p"),
    "reduce_scatter": Op("p", "1", "p"),
    "broadcast": Op("1", "p-1", "p", in_place=True),
    "alltoall": Op("1", "1", "1"),
}


@dataclass(frozen=True)
class Case:
    """One operation at one size on one number of ranks."""

    op: str
    ranks: int
    bytes: int

    @classmethod
    def of(cls, op: str, ranks: int, size: int) -> Case:
        """The case of `size` bytes, or of the next size at which all ranks have as many elements, and any."""
        block = FLOAT * ranks if op in ("all_gather", "reduce_scatter", "alltoall") else FLOAT
        return cls(op, ranks, max(1, -(-size // block)) * block)

    @property
    def elements(self) -> int:
        """Of `bytes`."""
        return self.bytes // FLOAT

    @property
    def streams(self) -> Streams:
        """The least that each of the ranks' processes has to do."""
        op = OPS[self.op]
        count = {"1": 1, "p": self.ranks, "p-1": max(1, self.ranks - 1)}
        return Streams(count[op.loads], count[op.stores], -(-self.elements // count[op.elements_over]))

    @property
    def least_bytes(self) -> int:
        """Loaded and stored by all ranks together."""
        streams = self.streams
        return self.ranks * (streams.loads + streams.stores) * streams.elements * FLOAT

    def __str__(self) -> str:
        return f"{self.op} {size_in_words(self.bytes)} on {self.ranks} ranks"


def size_in_words(size: int) -> str:
    """4096 -> "4 KiB"."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"

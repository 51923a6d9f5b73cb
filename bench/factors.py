"""nccl-tests' factors from algorithm to bus bandwidth, of a number of ranks."""

from __future__ import annotations

__all__ = ["all_but_own", "one", "twice_all_but_own"]


def one(ranks: int) -> float:
    """Of what a single link carries once."""
    return 1.0


def all_but_own(ranks: int) -> float:
    """Of what all ranks but one send, or get."""
    return (ranks - 1) / ranks


def twice_all_but_own(ranks: int) -> float:
    """The same, there and back."""
    return 2 * (ranks - 1) / ranks

"""What a rendezvous raises. Every message says which place, what was seen there, and what to do."""

from __future__ import annotations

from collections.abc import Iterable

from pynccl.abi.errors import NcclError, NcclTimeoutError

# A rank that rank 0 has heard waits this much beyond its time-out: when their time ends together, it is rank
# 0's word, which names the missing ranks, that ends the wait.
VERDICT_SECONDS = 0.5
_NAMED = 16  # a message lists this many runs of ranks, then counts: a 10,000-rank job must stay readable


class RendezvousError(NcclError):
    """The ranks of a job could not meet."""


class RendezvousTimeoutError(RendezvousError, NcclTimeoutError):
    """Not all ranks came in time. `missing` holds the ranks known to be missing, lowest first."""

    def __init__(self, message: str, missing: Iterable[int] = ()):
        super().__init__(message)
        self.missing = tuple(missing)


class SecretError(RendezvousError):
    """The shared secret is absent where one is needed, or is kept where others can read it."""


def who_is_missing(missing: Iterable[int], ever: Iterable[int], size: int) -> str:
    """The time-out's words: of the `missing` ranks some never came, and some came and left before it."""
    left = sorted({*missing} & {*ever})
    never = sorted({*missing} - {*ever})
    words = [f"{name_ranks(never)} of {size} did not come"] if never else []
    words += [f"{name_ranks(left)} of {size} came and went away"] if left else []
    return " and ".join(words)


def name_ranks(ranks: Iterable[int]) -> str:
    """`[1, 2, 3, 7]` as "ranks 1-3, 7"; a single one as "rank 7"; long lists are cut with a count."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    names = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:_NAMED]]
    if len(runs) > _NAMED:
        names.append(f"and {sum(last - first + 1 for first, last in runs[_NAMED:])} more")
    return f"rank{'s' if len(ordered) != 1 else ''} {', '.join(names)}"

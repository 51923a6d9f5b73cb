"""What the engine asks of a communicator. `pynccl.Communicator` is one; a fake in a test can be another.

Calls are collective: every rank makes them in the same order. Arrays are 1-d and contiguous, of the dtypes
that the policies name. `stream` is passed only on streams that `runtime.py` made: those of pynccl's host
library, and CUDA streams.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

__all__ = ["Comm"]


@runtime_checkable
class Comm(Protocol):
    """The protocol. `empty` (memory that peers can map) is used where it exists."""

    rank: int
    size: int

    def all_gather(self, x: Any, out: Any = None, *, stream: Any = None) -> Any:
        """`out[r * len(x) : (r + 1) * len(x)]` = x of rank r; x may be this rank's block of out."""

    def reduce_scatter(self, x: Any, out: Any = None, op: Any = "sum", *, stream: Any = None) -> Any:
        """out = this rank's block of the reduction of x over all ranks; out may be that block of x."""

    def all_reduce(self, x: Any, out: Any = None, op: Any = "sum", *, stream: Any = None) -> Any:
        """x (or out) = the reduction of x over all ranks; op is "sum", "avg" or "max"."""

    def broadcast(self, x: Any, root: int = 0) -> Any:
        """x = x of the root."""

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Everybody's JSON-like object, by rank."""

    def split(self, color: int, key: int = 0) -> Any:
        """A communicator of the ranks with the same colour, ordered by key."""

    def destroy(self) -> None:
        """End a communicator that split made, after its last call."""

    def abort(self) -> None:
        """End it at once. Calls that wait in it, on this rank and on others, end with an error."""

"""Full-size buffers: few, persistent, reused. The rings that bound how much of the model is whole at once.

A ring has a fixed number of slots, each as large as the largest unit that uses it. A slot is taken when a
unit is gathered (or its gradients begin) and given back when it is released (or reduced): that is the whole
of "at most two live". Buffers are never freed while the engine lives, so no allocator can fragment and no
stream can read freed memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Counters", "Ring", "Slot", "poison"]

ALIGN = 64  # of a group inside a slot: a cache line


@dataclass
class Counters:
    """What really happened, to be held against what should: calls, bytes sent and buffers in use.

    Bytes are those that this rank sends, as `Transport.bytes_sent` has them: by the library's own collectives
    a gathered unit of s bytes on N ranks costs s * (N - 1) / N, as in a ring.
    """

    all_gather: int = 0
    reduce_scatter: int = 0
    all_reduce: int = 0
    all_gather_bytes: float = 0.0
    reduce_scatter_bytes: float = 0.0
    all_reduce_bytes: float = 0.0
    live_weight_buffers: int = 0
    peak_weight_buffers: int = 0
    live_grad_buffers: int = 0
    peak_grad_buffers: int = 0

    def calls(self) -> dict[str, int]:
        """Collectives by name."""
        return {
            "all_gather": self.all_gather,
            "reduce_scatter": self.reduce_scatter,
            "all_reduce": self.all_reduce,
        }

    def count(self, what: str, sent: float) -> None:
        """One collective, for which this rank sends so many bytes."""
        setattr(self, what, getattr(self, what) + 1)
        name = f"{what}_bytes"
        setattr(self, name, getattr(self, name) + sent)


@dataclass
class Slot:
    """One full-size buffer, as bytes, and the arrays that units see in it."""

    memory: Any
    views: dict[Any, list[Any]] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)
    """Of the units that have lain here, by name: unit.Weights."""

    def arrays(self, key: Any, shapes: Sequence[tuple[int, np.dtype]]) -> list[Any]:
        """1-d arrays of (elements, dtype), laid out one after another; made once for each `key`."""
        found = self.views.get(key)
        if found is None:
            found, at = [], 0
            for elements, dtype in shapes:
                stop = at + elements * dtype.itemsize
                found.append(self.memory[at:stop].view(dtype))
                at = -(-stop // ALIGN) * ALIGN
            self.views[key] = found
        return found


def slot_bytes(shapes: Sequence[tuple[int, np.dtype]]) -> int:
    """Bytes of a slot that holds these arrays."""
    return sum(-(-elements * dtype.itemsize // ALIGN) * ALIGN for elements, dtype in shapes)


class Ring:
    """`size` slots of `bytes` bytes, made when first needed."""

    def __init__(self, kind: str, size: int, bytes_: int, runtime: Any, counters: Counters) -> None:
        self.kind, self.size, self.bytes = kind, size, bytes_
        self._runtime, self._counters = runtime, counters
        self._all: list[Slot] = []
        self._free: list[Slot] = []

    @property
    def available(self) -> int:
        """How many slots can be taken now."""
        return len(self._free) + self.size - len(self._all)

    @property
    def bytes_made(self) -> int:
        """Bytes of memory in use or kept for use."""
        return len(self._all) * self.bytes

    def take(self) -> Slot:
        """A free slot. RuntimeError when there is none: the caller must release one first."""
        if self._free:
            slot = self._free.pop(0)
        elif len(self._all) < self.size:
            slot = Slot(self._runtime.empty(self.bytes, np.dtype("uint8")))
            self._all.append(slot)
        else:
            raise RuntimeError(
                f"all {self.size} full {self.kind} buffers are in use; close the context of a unit before "
                "opening more"
            )
        self._count(+1)
        return slot

    def give(self, slot: Slot) -> None:
        """Return a slot: what the caller does next may overwrite it."""
        self._free.append(slot)
        self._count(-1)

    def reset(self) -> None:
        """Every slot is free again, whoever had it: after a failure, when nothing reads or writes them."""
        self._count(len(self._free) - len(self._all))
        self._free = list(self._all)

    def _count(self, change: int) -> None:
        live = f"live_{self.kind}_buffers"
        setattr(self._counters, live, getattr(self._counters, live) + change)
        peak = f"peak_{self.kind}_buffers"
        setattr(self._counters, peak, max(getattr(self._counters, peak), getattr(self._counters, live)))


def poison(array: Any) -> None:
    """Fill a released buffer with NaN (all bits set, in every dtype), to find kept references."""
    array.view(np.uint8)[...] = 0xFF

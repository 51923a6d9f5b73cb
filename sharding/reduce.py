"""From full gradients to this rank's shard: begin (room to write), finish (reduce or accumulate), drain.

Full gradients lie in a ring of two slots, so that one unit's reduction runs while the next unit computes.
Where gradients are kept whole between microbatches (strategies that reduce once, `sync=False`) they are added
up in buffers of their own. All sums are in the reduce dtype; the division by the number of ranks happens
once, in the reduction.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .buffers import Counters, Ring, Slot, poison, slot_bytes
from .unit import Shard, Unit, padded_shapes, views_of

if TYPE_CHECKING:
    from .engine import ShardedModel

__all__ = ["Reducer"]


@dataclass
class _Pending:
    """A reduction on its way."""

    unit: Unit
    mark: Any
    slot: Slot | None
    sums: list[tuple[Shard, Any]]
    """Shards whose gradient the arrived part is to be added to."""


class Reducer:
    """The gradients' half of the engine."""

    def __init__(self, model: ShardedModel) -> None:
        self.model = model
        sizes = [slot_bytes(self._shapes(unit)) for unit in model.units]
        self._ring = Ring("grad", 2, max(sizes, default=0), model.runtime, model.counters)
        self._root_ring = Ring(
            "grad",
            1,
            slot_bytes(self._shapes(model.root)) if model.root else 0,
            model.runtime,
            Counters(),
        )
        self._stream = model.runtime.stream()
        self._pending: list[_Pending] = []
        self._arrays: dict[int, list[Any]] = {}

    @staticmethod
    def _shapes(unit: Unit) -> list[tuple[int, np.dtype]]:
        """In a slot: the full gradient of each trainable group, then room for the reduced shard of each."""
        return padded_shapes(unit.trainable, "reduce") + [
            (s.group.shard, s.dtypes.reduce) for s in unit.trainable
        ]

    # --- one unit -------------------------------------------------------------------------------------------

    def begin(self, unit: Unit, zero: bool) -> None:
        """Room for the unit's gradients, zero (or, with zero=False, only its padding)."""
        ring = self._root_ring if unit.kept else self._ring
        while not ring.available and self._pending:
            self._retire(self._pending.pop(0))
        unit.grad_slot = ring.take()
        full = self._full(unit)
        for shard, flat in zip(unit.trainable, full, strict=True):
            flat[0 if zero else shard.group.numel :] = 0
        self.reopen(unit)

    def reopen(self, unit: Unit) -> None:
        """Views of the gradients for the user; names that are tied get arrays of their own."""
        views: dict[str, Any] = {}
        for shard, flat in zip(unit.trainable, self._full(unit), strict=True):
            views.update(views_of(shard.group, flat))
        tied = {}
        for name in unit.shown:
            owner = unit.owner(name)
            if name not in views and self.model.is_trainable(owner):
                tied[name] = self._like(owner)
        unit.grads = views | tied
        unit.tied_grads = tied

    def _like(self, owner: str) -> Any:
        entry, shard = self.model.entry_of(owner)
        return self.model.runtime.xp.zeros(entry.shape, shard.dtypes.reduce)

    def _full(self, unit: Unit) -> list[Any]:
        assert unit.grad_slot is not None
        return unit.grad_slot.arrays(("grads", unit.name), self._shapes(unit))[: len(unit.trainable)]

    def add_tied(self, unit: Unit) -> None:
        """Add what was written under tied names to their owners' gradients."""
        for name, array in unit.tied_grads.items():
            owner = unit.owner(name)
            home = self.model.home_of(owner)
            target = next(
                views_of(shard.group, flat)[owner]
                for shard, flat in zip(home.trainable, self._full(home), strict=True)
                if any(entry.name == owner for entry in shard.group.entries)
            )
            target += array
        unit.tied_grads = {}

    def finish(self, unit: Unit, sync: bool) -> None:
        """The unit's gradients are written: accumulate them whole, or start their reduction."""
        model = self.model
        slot, full = unit.grad_slot, self._full(unit) if unit.trainable else []
        assert slot is not None
        room = slot.arrays(("grads", unit.name), self._shapes(unit))[len(full) :]
        unit.grad_slot, unit.grads = None, None
        ring = self._root_ring if unit.kept else self._ring
        if model.shard_size == 1:
            self._add_locally(unit, full)
            if sync and model.replicate_size > 1:
                self._all_reduce(unit)
            ring.give(slot)
            return
        if unit.whole is not None or not sync:
            self._add_whole(unit, full)
            if not sync:
                ring.give(slot)
                return
            full = unit.whole or []
        self._reduce_scatter(unit, full, room, slot)
        unit.whole_pending = False

    def _add_locally(self, unit: Unit, full: list[Any]) -> None:
        self._check_unreduced(unit)
        for shard, flat in zip(unit.trainable, full, strict=True):
            if shard.fresh:
                shard.grad[...] = flat
            else:
                shard.grad += flat
            shard.fresh = False
        unit.whole_pending = self.model.replicate_size > 1

    def _add_whole(self, unit: Unit, full: list[Any]) -> None:
        model = self.model
        self._check_unreduced(unit)
        if unit.whole is None:
            unit.whole = [model.runtime.empty(flat.size, flat.dtype) for flat in full]
        for whole, flat in zip(unit.whole, full, strict=True):
            if unit.whole_pending:
                whole += flat
            else:
                whole[...] = flat
        unit.whole_pending = True

    @staticmethod
    def _check_unreduced(unit: Unit) -> None:
        if unit.reduced:
            raise RuntimeError(
                f"{unit.name}: its gradients were reduced already in this step, and more would be reduced "
                "twice; call zero_grad() after the optimizer's step, and open only the last microbatch with "
                "last=True"
            )

    def _all_reduce(self, unit: Unit) -> None:
        model = self.model
        model.runtime.follow(self._stream)
        for shard in unit.trainable:
            if shard.group.numel:
                model.replicate_comm.all_reduce(shard.grad, op=model.reduce_op, **model._on(self._stream))
                model.counters.count("all_reduce", shard.grad.nbytes, model.replicate_size)
        unit.whole_pending, unit.reduced = False, True
        self._pending.append(_Pending(unit, model.runtime.mark(self._stream), None, []))

    def _reduce_scatter(self, unit: Unit, full: list[Any], room: list[Any], slot: Slot) -> None:
        model = self.model
        model.runtime.follow(self._stream)
        sums = []
        for shard, flat, part in zip(unit.trainable, full, room, strict=True):
            if not shard.group.numel:
                continue
            in_place = unit.whole is not None and not model.reduces_each
            target = shard.grad if shard.fresh or in_place else part
            model.reduce_comm.reduce_scatter(flat, out=target, op=model.reduce_op, **model._on(self._stream))
            model.counters.count("reduce_scatter", flat.nbytes, model.shard_size)
            if model.replicate_size > 1:
                model.replicate_comm.all_reduce(target, op=model.reduce_op, **model._on(self._stream))
                model.counters.count("all_reduce", target.nbytes, model.replicate_size)
            if target is part:
                sums.append((shard, part))
            shard.fresh = False
            unit.reduced = in_place
        self._pending.append(_Pending(unit, model.runtime.mark(self._stream), slot, sums))

    # --- their ends -----------------------------------------------------------------------------------------

    def _retire(self, pending: _Pending) -> None:
        start = time.perf_counter()
        self.model.runtime.wait(pending.mark)
        for shard, part in pending.sums:
            shard.grad += part
        if pending.slot is not None:
            if self.model.debug:
                poison(pending.slot.memory)
            (self._root_ring if pending.unit.kept else self._ring).give(pending.slot)
        self.model.event("reduce", pending.unit.name, start)

    def drain(self) -> None:
        """Wait for all reductions."""
        while self._pending:
            self._retire(self._pending.pop(0))

    def abandon(self) -> None:
        """Let go of everything after an exception; the streams are idle."""
        for pending in self._pending:
            if pending.slot is not None:
                (self._root_ring if pending.unit.kept else self._ring).give(pending.slot)
        self._pending.clear()
        for unit in self.model.all_units:
            if unit.grad_slot is not None:
                (self._root_ring if unit.kept else self._ring).give(unit.grad_slot)
            unit.grad_slot, unit.grads, unit.tied_grads = None, None, {}

    def forget(self) -> None:
        """Nothing accumulated counts any more."""
        for unit in self.model.all_units:
            unit.whole_pending = unit.reduced = False

    def pending(self) -> bool:
        """Whether gradients wait for a reduction that the last microbatch would have made."""
        return any(unit.whole_pending for unit in self.model.all_units)

    @property
    def bytes_made(self) -> int:
        """Bytes of full-gradient buffers."""
        whole = sum(w.nbytes for unit in self.model.all_units for w in unit.whole or [])
        return self._ring.bytes_made + self._root_ring.bytes_made + whole

"""From whole gradients to this rank's shard: begin (room to write), finish (reduce or accumulate), drain.

Whole gradients lie in a ring of two slots, so that one unit's reduction runs while the next unit computes.
Where gradients stay whole between microbatches (strategies that reduce once, `sync=False`) they are added up
in buffers of their own. All sums are in the reduce dtype; the division by the number of ranks happens once,
in the reduction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .buffers import Counters, Ring, Slot, poison, slot_bytes
from .runtime import naming
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
    """What it reads; free once it is done."""
    sums: list[tuple[Shard, Any]]
    """Shards whose gradient the arrived part is to be added to."""


class Reducer:
    """The gradients' half of the engine."""

    def __init__(self, model: ShardedModel) -> None:
        self.model = model
        self._stream = model.runtime.stream()
        self._pending: list[_Pending] = []
        self.resize()

    def resize(self) -> None:
        """Buffers for a new layout. The root unit has one of its own, which is not counted."""
        model = self.model
        sizes = [slot_bytes(padded_shapes(unit.trainable, "reduce")) for unit in model.units]
        self._ring = Ring("grad", 2, max(sizes, default=0), model.runtime, model.counters)
        root = slot_bytes(padded_shapes(model.root.trainable, "reduce")) if model.root is not None else 0
        self._root_ring = Ring("grad", 1, root, model.runtime, Counters())

    def _ring_of(self, unit: Unit) -> Ring:
        return self._root_ring if unit.kept else self._ring

    # --- one unit -------------------------------------------------------------------------------------------

    def begin(self, unit: Unit, zero: bool) -> None:
        """Room for the unit's gradients, zero (or, with zero=False, only its padding)."""
        if unit.trainable:
            ring = self._ring_of(unit)
            while not ring.available and self._pending:
                self._retire(self._pending.pop(0))
            unit.grad_slot = ring.take()
            for shard, flat in zip(unit.trainable, self._whole(unit), strict=True):
                flat[0 if zero else shard.group.numel :] = 0
        unit.written = False

    def open(self, unit: Unit) -> None:
        """Arrays for the user to write gradients into: views where nothing is yet, else zeros, to be added.

        Names that are tied are always added; so is all of the root unit when it is opened again.
        """
        views: dict[str, Any] = {}
        if not unit.written:
            for shard, flat in zip(unit.trainable, self._whole(unit), strict=True):
                views.update(views_of(shard.group, flat))
        unit.added_grads = {
            name: self._zeros_like(unit.owner(name))
            for name in unit.shown
            if name not in views and self.model.is_trainable(unit.owner(name))
        }
        unit.grads = views | unit.added_grads
        unit.written = True

    def _zeros_like(self, owner: str) -> Any:
        entry, shard = self.model.entry_of(owner)
        return self.model.runtime.xp.zeros(entry.shape, shard.dtypes.reduce)

    def _whole(self, unit: Unit) -> list[Any]:
        """The whole gradients being written, per trainable group."""
        if unit.grad_slot is None:
            return []
        return unit.grad_slot.arrays(("grads", unit.name), padded_shapes(unit.trainable, "reduce"))

    def close(self, unit: Unit) -> None:
        """Add what the user wrote into arrays of its own to the gradients where they lie."""
        for name, array in unit.added_grads.items():
            owner = unit.owner(name)
            home = self.model.home_of(owner)
            home.written = True
            for shard, flat in zip(home.trainable, self._whole(home), strict=True):
                views = views_of(shard.group, flat)
                if owner in views:
                    views[owner][...] += array
        if self.model.debug:
            for array in (unit.grads or {}).values():
                if isinstance(array, np.ndarray):
                    array.flags.writeable = False  # what is written after the context would be lost
        unit.grads, unit.added_grads = None, {}

    def finish(self, unit: Unit, sync: bool) -> None:
        """The unit's gradients are written: accumulate them whole, or start their reduction."""
        slot, whole = unit.grad_slot, self._whole(unit)
        unit.grad_slot = None
        if slot is None:
            return
        if self.model.shard_size == 1:
            self._add_to_shards(unit, whole)
            self._give(unit, slot)
            if sync and self.model.replicate_size > 1:
                self._all_reduce(unit)
            return
        if not sync or unit.whole_pending or not self.model.reduces_each:
            whole = self._accumulated(unit, whole)
            if not sync:
                self._give(unit, slot)
                return
        self._reduce_scatter(unit, whole, slot)

    def _add_to_shards(self, unit: Unit, whole: list[Any]) -> None:
        """Nothing is sharded: the shard is the whole gradient."""
        for shard, flat in zip(unit.trainable, whole, strict=True):
            if shard.fresh:
                shard.grad[...] = flat
            else:
                shard.grad += flat
            shard.fresh = False

    def _accumulated(self, unit: Unit, whole: list[Any]) -> list[Any]:
        """`whole` added to what waits to be reduced, in memory of its own."""
        if unit.whole is None:
            unit.whole = [self.model.runtime.empty(flat.size, flat.dtype) for flat in whole]
        for total, flat in zip(unit.whole, whole, strict=True):
            if unit.whole_pending:
                total += flat
            else:
                total[...] = flat
        unit.whole_pending = True
        return unit.whole

    def _all_reduce(self, unit: Unit) -> None:
        model = self.model
        model.runtime.follow(self._stream)
        for shard in unit.trainable:
            self._over_replicas(shard, shard.grad)
        self._pend(unit, None, [], model.mesh.replicas)

    def _over_replicas(self, shard: Shard, gradient: Any) -> None:
        if self.model.replicate_size > 1 and gradient.size:
            self._reduce("all_reduce", self.model.mesh.replicas, shard, gradient)

    def _reduce(self, what: str, comm: Any, shard: Shard, gradient: Any, **out: Any) -> None:
        """One collective on the stream, counted."""
        model = self.model
        try:
            with model.events.timed(what, shard.unit, self._stream, "reduce stream"):
                on = model.runtime.on(self._stream)
                sent = model.transport.call(what, comm, shard.key, gradient, op=model.reduce_op, **out, **on)
        except Exception:
            self.drain()  # what failed before on the stream, of another unit or of this one, is the reason
            with naming(self._doing(shard.unit)):
                model.runtime.wait(model.runtime.mark(self._stream))
            raise
        model.counters.count(what, sent)

    def _doing(self, unit: str) -> str:
        return f"reducing the gradients of unit {unit!r} ({self.model.phase.lower()})"

    def _reduce_scatter(self, unit: Unit, whole: list[Any], slot: Slot) -> None:
        """Into the shard's gradient if nothing is there yet, else in place, to be added on arrival."""
        model = self.model
        model.runtime.follow(self._stream)
        sums = []
        for shard, flat in zip(unit.trainable, whole, strict=True):
            first = model.shard_rank * shard.group.shard
            part = flat[first : first + shard.group.shard]
            target = shard.grad if shard.fresh else part
            if flat.size:
                self._reduce("reduce_scatter", model.mesh.reduce, shard, flat, out=target)
                self._over_replicas(shard, target)
            if target is part:
                sums.append((shard, part))
            shard.fresh = False
        unit.whole_pending = False
        self._pend(unit, slot, sums, model.mesh.reduce, model.mesh.replicas)

    def _pend(self, unit: Unit, slot: Slot | None, sums: list[tuple[Shard, Any]], *comms: Any) -> None:
        mark = self.model.runtime.mark(self._stream, *comms)
        self._pending.append(_Pending(unit, mark, slot, sums))

    # --- their ends -----------------------------------------------------------------------------------------

    def _retire(self, pending: _Pending) -> None:
        start = self.model.now()
        with naming(self._doing(pending.unit.name)):
            self.model.runtime.wait(pending.mark)
        for shard, part in pending.sums:
            shard.grad += part
        if pending.slot is not None:
            self._give(pending.unit, pending.slot)
        self.model.event("reduce", pending.unit.name, start)

    def _give(self, unit: Unit, slot: Slot) -> None:
        if self.model.debug:
            poison(slot.memory)
        self._ring_of(unit).give(slot)

    def drain(self) -> None:
        """Wait for all reductions."""
        while self._pending:
            self._retire(self._pending.pop(0))

    def abandon(self) -> None:
        """Let go of everything after a failure; the streams are idle."""
        self._pending.clear()
        self._ring.reset()
        self._root_ring.reset()
        for unit in self.model.all_units:
            unit.grad_slot, unit.grads, unit.added_grads = None, None, {}

    def forget(self) -> None:
        """Nothing accumulated counts any more."""
        for unit in self.model.all_units:
            unit.whole_pending = False
            for shard in unit.shards:
                shard.fresh = True

    @property
    def bytes_made(self) -> int:
        """Bytes of the buffers for whole gradients that were needed so far."""
        whole = sum(array.nbytes for unit in self.model.all_units for array in unit.whole or [])
        return self._ring.bytes_made + self._root_ring.bytes_made + whole

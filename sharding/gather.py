"""Whole weights: gathered into a ring of buffers, waited for, released. The weights' half of the engine.

Weights that stay (those of the root unit, and all where the strategy keeps them or nothing is sharded) lie
outside of the ring and are gathered only after they have changed. Nothing here knows phases, except that
backward may gather from fewer ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .buffers import Ring, poison, slot_bytes
from .precision import cast_into
from .runtime import naming
from .unit import Unit, Weights, padded_shapes

if TYPE_CHECKING:
    from .engine import ShardedModel

__all__ = ["Gatherer"]


class Gatherer:
    """Makes units whole and lets go of them."""

    def __init__(self, model: ShardedModel) -> None:
        self.model = model
        self._stream = model.runtime.stream()
        self._ring = self._new_ring()

    def _new_ring(self) -> Ring:
        model = self.model
        count = 2 if model.reshard_after_forward else max(2, len(model.units))
        sizes = [slot_bytes(_shapes(unit)) for unit in model.units if unit.kept_weights is None]
        return Ring("weight", count, max(sizes, default=0), model.runtime, model.counters)

    def resize(self) -> None:
        """The layout has changed: buffers of new sizes."""
        self._ring = self._new_ring()

    @property
    def bytes_made(self) -> int:
        """Bytes of the buffers that were needed so far, besides weights that stay."""
        return self._ring.bytes_made

    def has_room(self, units: Sequence[Unit]) -> bool:
        """Whether all of these can be whole at once, beside what is now."""
        needed = sum(unit.weights is None and unit.kept_weights is None for unit in units)
        return needed <= self._ring.available

    def start(self, unit: Unit) -> None:
        """Start to make a unit's weights whole; nothing to do if they are, or are about to be."""
        if unit.weights is not None:
            return
        if unit.kept_weights is None:
            unit.weights = self._in_slot(unit)
        else:
            unit.weights = unit.kept_weights
        if not unit.weights.started:
            unit.weights.started = True
            self._all_gather(unit, unit.weights)

    def _in_slot(self, unit: Unit) -> Weights:
        slot = self._ring.take()
        made = slot.weights.get(unit.name)
        if made is not None:
            made.started, made.mark, made.ready = False, None, False
            return made
        arrays = slot.arrays(("weights", unit.name), _shapes(unit))
        gathered, rest = arrays[: len(unit.shards)], iter(arrays[len(unit.shards) :])
        computed = [
            full if shard.dtypes.compute == shard.dtypes.gather else next(rest)
            for shard, full in zip(unit.shards, gathered, strict=True)
        ]
        slot.weights[unit.name] = Weights(gathered, computed, slot=slot)
        return slot.weights[unit.name]

    def _all_gather(self, unit: Unit, weights: Weights) -> None:
        model = self.model
        if model.shard_size == 1:
            return
        model.runtime.follow(self._stream)
        from_part = unit.part if model.phase == "BACKWARD" else None
        comm = model.mesh.gather if from_part is None else model.mesh.parts
        sources = [shard.source for shard in unit.shards] if from_part is None else from_part
        try:
            for shard, source, full in zip(unit.shards, sources, weights.gathered, strict=True):
                if full.size:
                    with model.events.timed("all_gather", unit.name, self._stream, "gather stream"):
                        on = model.runtime.on(self._stream)
                        sent = model.transport.call("all_gather", comm, shard.key, source, out=full, **on)
                    model.counters.count("all_gather", sent)
        except Exception:
            with naming("gathering weights"):  # what failed before on the stream may be the reason
                model.runtime.wait(model.runtime.mark(self._stream))
            raise
        weights.mark = model.runtime.mark(self._stream, comm)

    def ready(self, unit: Unit) -> None:
        """The weights may be computed with from here on."""
        weights = unit.weights
        if weights is None or weights.ready:
            return
        begin = self.model.now()
        with naming(f"gathering the weights of unit {unit.name!r} ({self.model.phase.lower()})"):
            self.model.runtime.wait(weights.mark)
        for full, computed in zip(weights.gathered, weights.computed, strict=True):
            if computed is not full:
                cast_into(computed, full)
        weights.ready = True
        self.model.event("gather", unit.name, begin)

    def release(self, unit: Unit, keep_part: bool = False) -> None:
        """The whole weights are not needed any more (weights that stay are only let go of).

        With `keep_part` and reshard_after_forward=k, this rank's 1/k of them stays, for backward.
        """
        weights, unit.weights = unit.weights, None
        if weights is None or weights.slot is None:
            return
        model = self.model
        keep_part = keep_part and model.mesh.parts is not None
        if keep_part or model.debug:
            model.runtime.wait(weights.mark)
        if keep_part:
            self._keep_part(unit, weights)
        if model.debug:
            poison(weights.slot.memory)
        self._ring.give(weights.slot)

    def _keep_part(self, unit: Unit, weights: Weights) -> None:
        parts, runtime = self.model.mesh.parts, self.model.runtime
        if unit.part is None:
            unit.part = [runtime.empty(full.size // parts.size, full.dtype) for full in weights.gathered]
        for part, full in zip(unit.part, weights.gathered, strict=True):
            part[...] = full[parts.rank * part.size : (parts.rank + 1) * part.size]

    def release_all(self) -> None:
        """Let go of every unit."""
        for unit in self.model.all_units:
            self.release(unit)

    def abandon(self) -> None:
        """After a failure, with the streams idle: what was gathered, or was being gathered, is void."""
        for unit in self.model.all_units:
            unit.weights = None
        self._ring.reset()
        self.changed()

    def changed(self) -> None:
        """The shards have changed: weights that stay must be gathered again."""
        for unit in self.model.all_units:
            if unit.kept_weights is not None:
                unit.kept_weights.mark = None
                unit.kept_weights.started = unit.kept_weights.ready = False


def _shapes(unit: Unit) -> list[tuple[int, np.dtype[Any]]]:
    """What a slot holds: each group in the gather dtype, then those that are computed with in another."""
    cast = [shard for shard in unit.shards if shard.dtypes.compute != shard.dtypes.gather]
    return padded_shapes(unit.shards, "gather") + padded_shapes(cast, "compute")

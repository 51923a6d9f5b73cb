"""Freezing and unfreezing parameters between steps: new flat groups, the same values.

Trainable and frozen parameters of a unit lie in different flat groups, so a change of trainability moves
elements between groups and ranks. One unit at a time is made whole (in its master dtype) and cut anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .agreement import agree
from .build import from_arrays, make_shards
from .inputs import compare_lines
from .layout import FlatGroup, Layout, Spec, UnitLayout, matcher, numpy_dtype, plan
from .policy import is_floating
from .transport import ring_bytes
from .unit import views_of
from .walk import PhaseError

if TYPE_CHECKING:
    from .engine import ShardedModel

__all__ = ["Relayout", "set_trainable"]

Key = tuple[str, int]
"""(unit, index of the group in it), as Shard.key."""


@dataclass(frozen=True)
class Relayout:
    """From one layout to another with the same units and parameters."""

    model: ShardedModel
    old: Layout
    new: Layout

    def move(self, arrays: Mapping[Key, Any]) -> dict[Key, Any]:
        """Arrays that go with shards (1-d, one element for each of `Shard.data`), as the new layout has them.

        Groups that are not in `arrays` have nothing to move; where a new group takes parameters from those
        and from others, the former get zero. A new group with nothing moved to it is left out. Collective:
        every rank passes the same keys and dtypes.
        """
        moved = {}
        for before, after in zip(self.old.units, self.new.units, strict=True):
            given = {
                i: arrays[before.name, i] for i in range(len(before.groups)) if (before.name, i) in arrays
            }
            if before == after:
                moved.update({(before.name, index): array for index, array in given.items()})
            elif given:
                moved.update(self._move_unit(before, after, given))
        return moved

    def tell(self) -> None:
        """Call everybody who asked with `ShardedModel.on_relayout`."""
        listeners = self.model.relayout_listeners
        listeners[:] = [each for each in listeners if each() is not None]
        for each in list(listeners):
            if (listener := each()) is not None:
                listener(self)

    def _move_unit(self, before: UnitLayout, after: UnitLayout, given: Mapping[int, Any]) -> dict[Key, Any]:
        whole: dict[str, Any] = {}
        for index, array in given.items():
            whole.update(self.whole(before.groups[index], array))
        made = {}
        for index, group in enumerate(after.groups):
            source = next((whole[e.name] for e in group.entries if e.name in whole), None)
            if source is not None:
                fresh = self.model.runtime.xp.zeros(group.shard, source.dtype)
                from_arrays(whole)(group, self.model.shard_rank, fresh)
                made[after.name, index] = fresh
        return made

    def whole(self, group: FlatGroup, array: Any) -> dict[str, Any]:
        """name -> whole array, in memory of its own, of a shard like this rank's `array`. Collective."""
        model = self.model
        flat = model.runtime.empty(group.padded, array.dtype)
        if model.shard_size == 1 or not group.numel:
            flat[...] = array
        else:
            model.mesh.gather.all_gather(array, out=flat)
            model.counters.count("all_gather", ring_bytes("all_gather", flat.nbytes, model.shard_size))
        return views_of(group, flat)


def set_trainable(model: ShardedModel, patterns: Sequence[str], trainable: bool) -> list[str]:
    """See ShardedModel.freeze and unfreeze."""
    call = "unfreeze()" if trainable else "freeze()"
    changed: list[str] = []
    error: Exception | None = None
    try:
        model.require_usable(call)
        model.check_resharded(call)
        if model.accumulating:
            raise PhaseError(
                f"{call} in the middle of a step: its gradients would be lost; call it after the optimizer's "
                "step, or after zero_grad()"
            )
        changed = _taken(model, patterns, trainable, call)
        new = _planned(model, set(changed))
        sizes = model.shard_size, model.replicate_size
        model.transport.check_layout(call, new, model.precision, *sizes)
    except (PhaseError, ValueError, TypeError) as caught:
        error = caught
    agree(model.comm, error)
    compare_lines(model.comm, changed, call)
    if changed:
        with model.ending_all_ranks():
            _lay_out(model, new)
    return changed


def _taken(model: ShardedModel, patterns: Sequence[str], trainable: bool, call: str) -> list[str]:
    """The parameters that change; ValueError for one that cannot."""
    takes = matcher(model.names, patterns, call)
    taken = dict.fromkeys(model.owners.get(name, name) for name in model.names if takes(name))
    for name in taken:
        dtype = model.entry_of(name)[1].group.dtype
        if trainable and not is_floating(numpy_dtype(dtype)):
            raise ValueError(f"{call}: {name!r} is {dtype}: only floating-point parameters have gradients")
    return [name for name in taken if model.is_trainable(name) != trainable]


def _planned(model: ShardedModel, changed: set[str]) -> Layout:
    """The layout with the trainability of some parameters changed."""
    specs = []
    for name in model.names:
        if name not in model.owners:
            entry, shard = model.entry_of(name)
            specs.append(Spec(name, entry.shape, shard.group.dtype, shard.trainable != (name in changed)))
    order = [unit.name for unit in model.layout.units]
    return plan(specs, model.homes, order, model.shard_size, model.owners)


def _lay_out(model: ShardedModel, new: Layout) -> None:
    """Make everything that is new, then put it in place: a failure before that changes nothing."""
    model.updated()  # nothing is unsharded
    relayout = Relayout(model, model.layout, new)
    made = {}
    for before, after in zip(model.layout.units, new.units, strict=True):
        unit = model[before.name]
        if before != after:
            whole: dict[str, Any] = {}
            for shard in unit.shards:
                whole.update(relayout.whole(shard.group, model.runtime.xp.asarray(shard.data)))
            made[after.name] = make_shards(model, after, unit.kept, from_arrays(whole))
    model.take_layout(new, made)
    relayout.tell()

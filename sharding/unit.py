"""A unit at work: its shards, its full weights while they are there, and the contexts that the user's loop
opens.

A unit knows its arrays and where they lie. When they are gathered and released is the engine's business: the
contexts below ask it. Weights are given as a tree of the user's names (nested dicts and lists below the
unit's common prefix; a bare array for a unit of one parameter), gradients likewise for the trainable ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .buffers import Slot
from .layout import FlatGroup, UnitLayout
from .policy import Dtypes
from .tree import common_prefix, fill, nest

if TYPE_CHECKING:
    from .engine import ShardedModel

__all__ = ["Shard", "Unit", "Weights"]


@dataclass(eq=False)
class Shard:
    """This rank's part of one flat group: 1-d arrays of `group.shard` elements. The padding is zero."""

    unit: str
    index: int
    group: FlatGroup
    dtypes: Dtypes
    data: Any
    """What the optimizer updates (master dtype)."""
    source: Any
    """What is gathered (gather dtype): `data` itself where the dtypes agree, else `updated` refreshes it."""
    grad: Any = None
    """The gradient (reduce dtype), complete after the last microbatch of a step. None for frozen groups."""
    fresh: bool = True
    """Nothing has been accumulated into `grad` since `zero_grad`."""

    @property
    def trainable(self) -> bool:
        """Whether it has a gradient."""
        return self.group.trainable

    @property
    def key(self) -> tuple[str, int]:
        """(unit, index of the group in the unit): what optimizers and checkpoints file it under."""
        return self.unit, self.index


@dataclass
class Weights:
    """The full weights of a unit, gathered or being gathered."""

    gathered: list[Any]
    """Per group, padded, in the gather dtype."""
    computed: list[Any]
    """Per group, padded, in the compute dtype: `gathered` itself where the dtypes agree."""
    mark: Any = None
    """When the gather is done."""
    ready: bool = False
    """It has been waited for, and cast."""
    slot: Slot | None = None
    """The ring slot they lie in; None for weights that stay."""


@dataclass(eq=False)
class Unit:
    """One unit of a ShardedModel, in declared order."""

    model: ShardedModel
    layout: UnitLayout
    shards: list[Shard]
    shown: tuple[str, ...]
    """The user's names in this unit, tied ones included."""
    owners: dict[str, str]
    """Of the shown names that are tied: the name that owns the memory."""
    kept: bool = False
    """Stays whole from the start of a microbatch to its end: the root unit, whose parameters others share."""
    weights: Weights | None = None
    kept_weights: Weights | None = None
    grads: dict[str, Any] | None = None
    """Views of the gradients being written, by name."""
    grad_slot: Slot | None = None
    whole: list[Any] | None = None
    """Full gradients accumulated but not reduced yet, per trainable group."""
    whole_pending: bool = False
    reduced: bool = False
    """The whole gradients of this step were reduced where they lie: add nothing before zero_grad."""
    tied_grads: dict[str, Any] = field(default_factory=dict)
    """Gradients being written under names that are tied."""
    part: list[Any] | None = None
    """With reshard_after_forward=k: this rank's 1/k of the gathered weights, from forward to backward."""
    _views: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        prefix = common_prefix(list(self.shown)) if self.shown else ""
        self._skeleton = nest(list(self.shown), prefix) if self.shown else {}
        trainable = [name for name in self.shown if self.model.is_trainable(self.owner(name))]
        self._grad_skeleton = nest(trainable, prefix) if trainable else {}

    @property
    def name(self) -> str:
        """The unit's name: `blocks.3`."""
        return self.layout.name

    @property
    def trainable(self) -> list[Shard]:
        """The shards that have gradients."""
        return [shard for shard in self.shards if shard.trainable]

    def owner(self, name: str) -> str:
        """The name under which the memory of `name` is kept."""
        return self.owners.get(name, name)

    # --- what the user's loop opens -------------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Iterator[Any]:
        """The unit's weights, whole, for its forward computation; the next unit's gather is started
        meanwhile.

        Gives a tree of arrays (compute dtype, read-only in NumPy) that must not be kept beyond the context.
        Units are opened in declared order; opening a later one first lets the skipped ones take part in
        what the other ranks do.
        """
        model = self.model
        model.open_forward(self)
        start = time.perf_counter()
        try:
            yield fill(self._skeleton, self.weight_views())
        finally:
            model.event("compute", self.name, start, "forward")
            model.close_forward(self)

    @contextmanager
    def backward(self, zero: bool = True) -> Iterator[tuple[Any, Any]]:
        """(weights, gradients) for the unit's backward computation; on exit the gradients are reduced.

        The gradients are a tree of arrays (reduce dtype), zero at the start: write or add this rank's. With
        `zero=False` they start undefined, which saves a pass over memory when every element is written.
        """
        model = self.model
        model.open_backward(self, zero)
        start = time.perf_counter()
        try:
            yield fill(self._skeleton, self.weight_views()), fill(self._grad_skeleton, self.gradient_views())
        except BaseException:
            model.abandon()
            raise
        model.event("compute", self.name, start, "backward")
        model.close_backward(self)

    def unshard(self) -> Any:
        """Gather the weights by hand, outside of the contexts; `reshard` releases them.

        Collective: every rank of the shard group must call it.
        """
        self.model.require("RESTING", f"{self.name}.unshard()")
        self.model.gather(self)
        self.model.ready(self)
        return fill(self._skeleton, self.weight_views())

    def reshard(self) -> None:
        """Release what `unshard` gathered."""
        self.model.require("RESTING", f"{self.name}.reshard()")
        self.model.release(self)

    def keep_part(self, comm: Any, weights: Weights) -> None:
        """Keep this rank's 1/comm.size of the gathered weights, for backward to gather from fewer ranks."""
        if self.part is None:
            self.part = [
                self.model.runtime.empty(full.size // comm.size, full.dtype) for full in weights.gathered
            ]
        for part, full in zip(self.part, weights.gathered, strict=True):
            part[...] = full[comm.rank * part.size : (comm.rank + 1) * part.size]

    # --- views ----------------------------------------------------------------------------------------------

    def weight_views(self) -> dict[str, Any]:
        """Full weights by the user's name."""
        assert self.weights is not None or not self.shards
        views = self._own_views()
        for name in self.shown:
            if name not in views:
                owner = self.owner(name)
                views = views | {name: self.model.owner_views(self, owner)[owner]}
        return views

    def _own_views(self) -> dict[str, Any]:
        if self.weights is None:
            return {}
        key = id(self.weights.computed[0]) if self.weights.computed else 0
        found = self._views.get(key)
        if found is None:
            found = {}
            for group, flat in zip(self.layout.groups, self.weights.computed, strict=True):
                found.update(views_of(group, flat, writeable=False))
            self._views[key] = found
        return found

    def own_weight_views(self) -> dict[str, Any]:
        """Full weights of the parameters whose memory is this unit's."""
        return self._own_views()

    def gradient_views(self) -> dict[str, Any]:
        """Gradients by the user's name; a tied name gets its own array, added to its owner's at the end."""
        assert self.grads is not None
        return self.grads


def views_of(group: FlatGroup, flat: Any, *, writeable: bool = True) -> dict[str, Any]:
    """A flat buffer as its parameters, by name."""
    views = {}
    for entry in group.entries:
        view = flat[entry.offset : entry.offset + entry.size].reshape(entry.shape)
        if not writeable and isinstance(view, np.ndarray):
            view.flags.writeable = False
        views[entry.name] = view
    return views


def padded_shapes(shards: Sequence[Shard], which: str) -> list[tuple[int, np.dtype]]:
    """(elements, dtype) of the full buffers of these shards, in dtype `which`: gather, compute or reduce."""
    return [(shard.group.padded, getattr(shard.dtypes, which)) for shard in shards]

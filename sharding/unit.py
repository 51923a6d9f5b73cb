"""A unit at work: its shards, its whole weights while they are there, and the contexts of the user's loop.

A unit knows its arrays and where they lie. When they are gathered and released is the engine's business: the
contexts below ask it. Weights are given as a tree of the user's names (nested dicts and lists below the
unit's common prefix; a bare array for a unit of one parameter), gradients likewise for the trainable ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .buffers import Slot
from .layout import FlatGroup, UnitLayout
from .policy import Dtypes
from .tree import common_prefix, fill, nest, replaced
from .walk import PhaseError

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
    """The whole weights of a unit, gathered or being gathered."""

    gathered: list[Any]
    """Per group, padded, in the gather dtype."""
    computed: list[Any]
    """Per group, padded, in the compute dtype: `gathered` itself where the dtypes agree."""
    slot: Slot | None = None
    """The ring slot they lie in; None for weights that stay."""
    started: bool = False
    """Their gather has been started, so that no rank starts it again."""
    mark: Any = None
    """When the gather is done."""
    ready: bool = False
    """It has been waited for, and cast."""
    views: dict[str, Any] | None = None
    """`computed` by name: made once, for the buffers persist."""


@dataclass(eq=False, repr=False)
class Unit:
    """One unit of a ShardedModel."""

    model: ShardedModel
    position: int
    """In the declared order; -1 for the root unit."""
    layout: UnitLayout
    shards: list[Shard]
    shown: tuple[str, ...]
    """The user's names in this unit, tied ones included."""
    owners: dict[str, str]
    """Of the shown names that are tied: the name that owns the memory."""
    kept_weights: Weights | None = None
    """The whole weights, where they stay in memory between uses."""
    whole: list[Any] | None = None
    """Whole gradients accumulated but not reduced yet, per trainable group."""
    whole_pending: bool = False
    """There is something in `whole`."""
    weights: Weights | None = None
    """The whole weights while somebody uses them, or is about to."""
    grads: dict[str, Any] | None = None
    """The gradients being written, by the user's name."""
    grad_slot: Slot | None = None
    added_grads: dict[str, Any] = field(default_factory=dict)
    """Those of them that are no views of the whole gradients, and will be added to them."""
    written: bool = False
    """Something may be in the whole gradients of this microbatch."""
    part: list[Any] | None = None
    """With reshard_after_forward=k: this rank's 1/k of the gathered weights, from forward to backward."""

    def __post_init__(self) -> None:
        self.install(self.layout, self.shards, self.kept_weights, self.whole)

    def install(
        self,
        layout: UnitLayout,
        shards: list[Shard],
        kept_weights: Weights | None,
        whole: list[Any] | None,
    ) -> None:
        """Take this layout and memory, at the start and when parameters are frozen or unfrozen."""
        self.layout, self.shards, self.kept_weights, self.whole = layout, shards, kept_weights, whole
        self.whole_pending, self.part = False, None
        trainable = [name for name in self.shown if self.model.is_trainable(self.owner(name))]
        prefix = common_prefix(list(self.shown)) if self.shown else ""
        mappings = self.model.mappings
        self._skeleton = nest(list(self.shown), prefix, mappings) if self.shown else {}
        self._grad_skeleton = nest(trainable, prefix, mappings) if trainable else {}

    def __repr__(self) -> str:
        size = sum(shard.group.numel for shard in self.shards)
        return f"<Unit {self.name!r}: {len(self.shown)} parameters, {size} elements>"

    @property
    def name(self) -> str:
        """The unit's name: `blocks.3`."""
        return self.layout.name

    @property
    def kept(self) -> bool:
        """Whether it is the root unit, whole through a microbatch: its parameters are everybody's."""
        return self.position < 0

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
        """The unit's weights, whole, for its forward computation; meanwhile the next unit is gathered.

        Gives a tree of arrays (compute dtype, read-only in NumPy) that must not be kept beyond the context.
        Units are opened in declared order; opening a later one first lets the skipped ones take part in
        what the other ranks do. The root unit may be opened at any time, also inside others.

        Raises PhaseError out of order or outside of a microbatch, ValueError if an array of the tree was
        replaced by another.
        """
        model = self.model
        model.walk.open_forward(self)
        views = self.weight_views()
        weights = fill(self._skeleton, views)
        start = model.now()
        try:
            yield weights
        finally:
            model.event("compute", self.name, start, "forward")
            model.walk.close_forward(self)
        if (where := replaced(self._skeleton, weights, views, "w")) is not None:
            raise ValueError(
                f"{self.name}.forward(): {where} was replaced, which changes nothing; weights change through "
                "the optimizer"
            )

    @contextmanager
    def backward(self, zero: bool = True) -> Iterator[tuple[Any, Any]]:
        """(weights, gradients) for the unit's backward computation; on exit the gradients are reduced.

        The gradients are a tree of arrays (reduce dtype), zero at the start: write or add this rank's. With
        `zero=False` they start undefined, which saves a pass over memory when every element is written.

        Raises PhaseError out of order, before any forward, or outside of a microbatch, ValueError if an array
        of the gradients' tree was replaced by another instead of being written into.
        """
        model = self.model
        model.walk.open_backward(self, zero)
        weights = fill(self._skeleton, self.weight_views())
        views = self.gradient_views()
        gradients = fill(self._grad_skeleton, views)
        start = model.now()
        try:
            yield weights, gradients
            if (where := replaced(self._grad_skeleton, gradients, views, "g")) is not None:
                raise ValueError(
                    f"{self.name}.backward(): {where} was replaced; write into it: {where}[...] = or +="
                )
        except BaseException as error:
            model.abandon(error)
            raise
        model.event("compute", self.name, start, "backward")
        model.walk.close_backward(self)

    def unshard(self) -> Any:
        """Gather the weights by hand, outside of microbatches; `reshard` releases them.

        Gives the tree of arrays that `forward` gives. Collective: every rank of the shard group calls it, and
        calls `reshard` before the next microbatch or change of weights.
        """
        model, call = self.model, f"{self.name}.unshard()"
        model.require_usable(call)
        if not model.gatherer.has_room(self._homes()):
            raise PhaseError(
                f"{call}: two units are unsharded already, and there is room for no more; call reshard() of "
                "one first, or take full_state_dict(); with reshard_after_forward=False all units have room"
            )
        with model.ending_all_ranks():
            for unit in self._homes():
                model.gatherer.start(unit)
                model.gatherer.ready(unit)
        return fill(self._skeleton, self.weight_views())

    def reshard(self) -> None:
        """Release what `unshard` gathered."""
        self.model.require_resting(f"{self.name}.reshard()")
        for unit in self._homes():
            self.model.gatherer.release(unit)

    def _homes(self) -> list[Unit]:
        """The units in which the memory of the shown names lies; this one first."""
        return list(dict.fromkeys([self, *(self.model.home_of(self.owner(name)) for name in self.shown)]))

    # --- views ----------------------------------------------------------------------------------------------

    def weight_views(self) -> dict[str, Any]:
        """Whole weights by the user's name."""
        views = dict(self.own_weight_views())
        for name in self.shown:
            if name not in views:
                owner = self.owner(name)
                home = self.model.home_of(owner)
                self.model.gatherer.ready(home)
                views[name] = home.own_weight_views()[owner]
        return views

    def as_tree(self, leaves: dict[str, Any]) -> Any:
        """The tree that `forward` gives, with these leaves (by the user's name) in place of the weights."""
        return fill(self._skeleton, leaves)

    def own_weight_views(self) -> dict[str, Any]:
        """Whole weights of the parameters whose memory is this unit's."""
        weights = self.weights
        if weights is None:
            return {}
        if weights.views is None:
            weights.views = {}
            for group, flat in zip(self.layout.groups, weights.computed, strict=True):
                weights.views.update(views_of(group, flat, writeable=False))
        return weights.views

    def gradient_views(self) -> dict[str, Any]:
        """The gradients being written, by the user's name."""
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
    """(elements, dtype) of the whole buffers of these shards, in dtype `which`: gather, compute or reduce."""
    return [(shard.group.padded, getattr(shard.dtypes, which)) for shard in shards]

"""The engine as the training loop sees it: units, microbatches, gradients, and what goes wrong.

It holds what the parts share and hands each thing to the part that owns it: the order of a microbatch to
`walk.py`, whole weights to `gather.py`, gradients to `reduce.py`, norms to `norms.py`, frozen parameters to
`freeze.py`. How it all starts is `start.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import freeze, norms
from .buffers import Counters
from .build import Fill, make_shards
from .events import Events, Listener
from .gather import Gatherer
from .layout import ROOT, Entry, Layout
from .precision import cast_into
from .reduce import Reducer
from .report import Report, summary
from .unit import Shard, Unit
from .walk import PhaseError, Walk

if TYPE_CHECKING:
    from .start import Setup

__all__ = ["PhaseError", "ShardedModel"]


class ShardedModel:
    """A model whose parameters, gradients and optimizer state are divided over ranks. Made by `fully_shard`.

    Iterating gives the units in declared order, `reversed(model)` backwards, `model["blocks.3"]` one by name;
    `model.root` is the unit of parameters that no pattern took or that several units share (None if there are
    none, or if it is the only unit). Use it as a context manager, or call `close`, to end its communicators.

    If an exception leaves a microbatch, it ends that microbatch on all ranks: the others' next collective
    raises an error that names this rank. `zero_grad()`, on all ranks, makes the model usable again.
    """

    def __init__(self, setup: Setup, runtime: Any, fill: Fill, *, prefetch: bool, debug: bool) -> None:
        self.comm, self.mesh, self.runtime = setup.comm, setup.mesh, runtime
        self.rank, self.size = setup.comm.rank, setup.comm.size
        self.layout, self.strategy, self.precision = setup.layout, setup.strategy, setup.precision
        self.reduce_op, self.reshard_after_forward = setup.reduce_op, bool(setup.reshard)
        self.prefetch, self.debug = prefetch, debug
        self.transport = setup.transport
        self.names, self.homes, self.owners = setup.names, setup.homes, setup.owners
        self.mappings = setup.mappings
        self.counters = Counters()
        self.unscaled: bool | None = None
        """Whether a loss scale found all gradients of this step finite. None: none has looked."""
        self.accumulating = False
        """Gradients have been started and no step has used them."""
        self._complete = False
        """The last microbatch of a step is done."""
        self._used = False
        """An optimizer has used these gradients."""
        self.wrote = False
        """Since `zero_grad`, a backward was opened on this rank, or it had no data and opened nothing."""
        self._steps = 0
        """Steps since the start or a load: equal on all ranks, or training ends."""
        self._broken: str | None = None
        self._cleared = True
        """Nothing is left of what broke."""
        self._closed = False
        self.events = Events(runtime)
        self.relayout_listeners: list[Callable[[], Callable[[Any], None] | None]] = []
        """Weak: gives None once the optimizer is gone."""
        self.walk = Walk(self)
        self.units: list[Unit] = []
        self.root: Unit | None = None
        self._index_names()
        for layout in self.layout.units:
            kept = layout.name == ROOT and len(self.layout.units) > 1
            made = make_shards(self, layout, kept, fill)
            position = -1 if kept else len(self.units)
            unit = Unit(self, position, layout, made[0], setup.shown[layout.name], self.owners, *made[1:])
            if kept:
                self.root = unit
            else:
                self.units.append(unit)
        self._by_name = {unit.name: unit for unit in self.all_units}
        self.gatherer, self.reducer = Gatherer(self), Reducer(self)
        self.updated()

    def _index_names(self) -> None:
        self._entries = {e.name: (unit, index, e) for unit, index, e in self.layout.parameters()}
        self._unit_layouts = {unit.name: unit for unit in self.layout.units}

    def __repr__(self) -> str:
        ranks = f"{self.strategy.name} over {self.size} {'rank' if self.size == 1 else 'ranks'}"
        return f"<ShardedModel of {len(self.all_units)} units, {self.layout.numel} parameters, {ranks}>"

    # --- what it is -----------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Unit]:
        return iter(self.units)

    def __reversed__(self) -> Iterator[Unit]:
        return reversed(self.units)

    def __len__(self) -> int:
        return len(self.units)

    def __getitem__(self, name: str | int) -> Unit:
        if isinstance(name, int):
            return self.units[name]
        if name not in self._by_name:
            raise KeyError(f"there is no unit {name!r}; the units are {', '.join(self._by_name)}")
        return self._by_name[name]

    @property
    def all_units(self) -> list[Unit]:
        """The units, with the root unit first where there is one beside them."""
        return ([self.root] if self.root is not None else []) + self.units

    @property
    def shards(self) -> list[Shard]:
        """This rank's state, in unit order: what optimizers update and checkpoints save."""
        return [shard for unit in self.all_units for shard in unit.shards]

    @property
    def shard_rank(self) -> int:
        """This rank's place in the group that its state is divided over."""
        return self.mesh.shard_rank

    @property
    def shard_size(self) -> int:
        """How many ranks the state is divided over."""
        return self.mesh.shard_size

    @property
    def replicate_rank(self) -> int:
        """This rank's place among those that hold equal shards."""
        return self.mesh.replicate_rank

    @property
    def replicate_size(self) -> int:
        """How many ranks hold equal shards: hybrid_shard's replicas, or all ranks of no_shard."""
        return self.mesh.replicate_size

    @property
    def collectives(self) -> dict[str, list[Any]]:
        """What the objects in `fully_shard(collectives=...)` have made, by collective, since the last reset.

        Of `pynccl.collectives.Compressed` these are compressors: `model.collectives["reduce_scatter"][0]
        .report()` tells bytes and errors, between microbatches.
        """
        return self.transport.made()

    @property
    def phase(self) -> str:
        """RESTING, FORWARD or BACKWARD."""
        return self.walk.phase

    @property
    def reduces_each(self) -> bool:
        """Whether each microbatch's gradients are reduced; where nothing is sharded only the last's are."""
        return self.strategy.reduces_each and self.shard_size > 1

    def is_trainable(self, name: str) -> bool:
        """Whether the parameter of that name (its owner's, if it is tied) has a gradient."""
        unit, index, _ = self._entries[name]
        return unit.groups[index].trainable

    def home_of(self, owner: str) -> Unit:
        """The unit in which the parameter's memory lies."""
        return self._by_name[self._entries[owner][0].name]

    def entry_of(self, owner: str) -> tuple[Entry, Shard]:
        """A parameter's place, and the shard of its group."""
        _, index, entry = self._entries[owner]
        return entry, self.home_of(owner).shards[index]

    # --- microbatches ---------------------------------------------------------------------------------------

    @contextmanager
    def microbatch(self, last: bool = True, sync: bool = True) -> Iterator[ShardedModel]:
        """One forward and backward over all units. On exit everything is reduced that the strategy reduces.

        `last=False` says that more microbatches follow before the optimizer's step. `sync=False` keeps this
        microbatch's gradients whole on this rank and adds them to the next reduction (more memory, less
        traffic); the last must sync. Gradients add up over microbatches: scale the loss by 1 / microbatches
        for a mean.

        Raises PhaseError inside another, and after the last one of a step until `zero_grad()`.
        """
        self.require_usable("microbatch()")
        self.check_resharded("microbatch()")
        if self._complete:
            raise PhaseError(
                "microbatch(): the gradients of the last step are still there; call zero_grad() after the "
                "optimizer's step, and open all microbatches of a step but the last with last=False"
            )
        if last and not sync:
            raise ValueError(
                "microbatch(last=True, sync=False): the last microbatch of a step must reduce; pass sync=True"
            )
        self.accumulating = True
        with self.walk.run(forward_only=False, sync=sync and (last or self.reduces_each)):
            yield self
        self._complete = last
        self.wrote |= self.walk.wrote or not self.walk.opened

    @contextmanager
    def evaluate(self) -> Iterator[ShardedModel]:
        """A forward pass alone: no gradients, no change of any state. Between microbatches."""
        self.require_usable("evaluate()")
        self.check_resharded("evaluate()")
        with self.walk.run(forward_only=True, sync=False):
            yield self

    def abandon(self, error: BaseException) -> None:
        """After an exception inside of a collective or a microbatch: end it here and on all other ranks.

        The communicators are aborted, so that the others do not wait for a rank that has left; gradients are
        void until `zero_grad`.
        """
        self.walk.abandon()
        if self._broken is None:
            self._broken, self._cleared = f"{type(error).__name__} ended what all ranks do together", False
        self._clear()

    def _clear(self) -> None:
        """Let go of everything, once; an interrupt may end this, and then it is done again."""
        if not self._cleared:
            self.mesh.abort()
            self.runtime.abandon()
            self.reducer.abandon()
            self.gatherer.abandon()
            self.transport.forget()
            self._cleared = True

    @contextmanager
    def ending_all_ranks(self) -> Iterator[None]:
        """Around collectives outside of microbatches: what fails here fails on every rank."""
        try:
            yield
        except BaseException as error:
            self.abandon(error)
            raise

    # --- between microbatches -------------------------------------------------------------------------------

    def updated(self) -> None:
        """`Shard.data` has changed (a step, a load): refresh what is gathered, forget what was whole."""
        self.require_resting("updated()")
        self.check_resharded("updated()")
        for shard in self.shards:
            if shard.source is not shard.data:
                cast_into(shard.source, shard.data)
        self.gatherer.changed()

    def stepped(self) -> None:
        """An optimizer has used the gradients."""
        self.accumulating, self._used = False, True
        self._steps += 1
        self.updated()

    def skipped(self) -> None:
        """The gradients are not to be used: the step is over without one."""
        self.accumulating = False

    def loaded(self) -> None:
        """All weights are those of a checkpoint, on every rank. Collective if `zero_grad` is."""
        self._steps = 0
        self.transport.forget()
        self.zero_grad()
        self.updated()

    def zero_grad(self) -> None:
        """Forget the gradients: the next microbatch starts a new sum.

        After an exception left a microbatch, this is collective, and waits until every rank has come here.
        Raises PhaseError, on every rank, if the exception came so late that some ranks have made a step that
        others have not: then only loading a checkpoint makes them one model again.
        """
        self.require_resting("zero_grad()")
        if self._broken is not None:
            self._clear()
            self.mesh.connect()
            self._compare_steps()
        self.reducer.forget()
        self._broken = None
        self.accumulating = self._complete = self._used = self.wrote = False
        self.unscaled = None

    def _compare_steps(self) -> None:
        steps = self.comm.all_gather_object(self._steps)
        for rank, theirs in enumerate(steps):
            if theirs != steps[0]:
                self.mesh.abort()
                raise PhaseError(
                    f"zero_grad(): rank 0 has made {steps[0]} steps and rank {rank} {theirs}: the exception "
                    "came after the last gradients were reduced, and their weights differ now; load the last "
                    "checkpoint on every rank"
                )

    def check_step(self, call: str) -> None:
        """PhaseError unless complete gradients are there to be used."""
        self.require_usable(call)
        self.check_resharded(call)
        if not self._complete:
            what = (
                "the gradients of this step are not complete; open the last microbatch with last=True"
                if self.accumulating
                else "nothing has been accumulated since zero_grad(); run a microbatch first"
            )
            raise PhaseError(f"{call}: {what}")
        if self.size == 1 and not self.wrote and self.layout.numel:
            raise PhaseError(
                f"{call}: no unit's backward() was opened since zero_grad(), so all gradients are zero; run "
                "the backward pass; a forward pass alone belongs in evaluate()"
            )

    def check_unused(self, call: str) -> None:
        """PhaseError if a step has used these gradients already."""
        if self._used:
            raise PhaseError(
                f"{call}: a step has used these gradients already; call zero_grad() and run a microbatch "
                "first"
            )

    def grad_norm(self, p: float = 2.0) -> float:
        """The p-norm of all gradients, over all ranks and parameters.

        Each tied one counts once, padding and replicas never. p = inf gives the largest absolute value. One
        all-reduce. NaN or inf if any gradient of any rank is.
        """
        self.check_step("grad_norm()")
        return norms.grad_norm(self, p)

    def clip_grad_norm(self, max_norm: float, p: float = 2.0) -> float:
        """Scale all gradients so that their p-norm is at most `max_norm`; returns the norm before.

        A norm that is not finite is returned as it is, and the gradients are left alone: skip the step.
        """
        self.check_step("clip_grad_norm()")
        return norms.clip_grad_norm(self, max_norm, p)

    def clip_grad_value(self, value: float) -> None:
        """Limit every element of every gradient to [-value, value]."""
        self.check_step("clip_grad_value()")
        norms.clip_grad_value(self, value)

    # --- frozen parameters ----------------------------------------------------------------------------------

    def freeze(self, *patterns: str) -> list[str]:
        """Give the parameters that the patterns take no gradient from now on; returns those that changed.

        Patterns are those of `fully_shard(frozen=...)`. Collective, between steps. Values stay; gradients are
        forgotten; optimizers made by `sharding.optim` drop the state of frozen parameters and start that of
        unfrozen ones. Raises PhaseError during an accumulation, ValueError for a pattern that takes nothing.
        """
        return freeze.set_trainable(self, patterns, False)

    def unfreeze(self, *patterns: str) -> list[str]:
        """Give the parameters that the patterns take gradients from now on: see `freeze`."""
        return freeze.set_trainable(self, patterns, True)

    def on_relayout(self, callback: Callable[[Any], None]) -> None:
        """`callback(relayout)` after freeze and unfreeze; `relayout.move` moves arrays like `Shard.data`.

        Of a bound method the object is not kept alive: it is called as long as somebody else holds it.
        """
        bound = hasattr(callback, "__self__")
        self.relayout_listeners.append(weakref.WeakMethod(callback) if bound else lambda: callback)

    def take_layout(self, layout: Layout, made: Mapping[str, tuple[Any, ...]]) -> None:
        """Another layout of the same units; `made` (from build.make_shards) has the units that changed."""
        self.layout = layout
        self._index_names()
        for unit in self.all_units:
            memory = made.get(unit.name, (unit.shards, unit.kept_weights, unit.whole))
            unit.install(self._unit_layouts[unit.name], *memory)
        self.gatherer.resize()
        self.reducer.resize()
        self.transport.forget()
        self.zero_grad()
        self.updated()

    # --- the whole model ------------------------------------------------------------------------------------

    def full_state_dict(self, rank0_only: bool = False) -> dict[str, Any]:
        """name -> full NumPy array of every parameter, on all ranks or on rank 0: see `sharding.export`.

        Collective; all ranks call it, also with `rank0_only`.
        """
        from .export import full_state_dict  # here: it stands on the engine

        return full_state_dict(self, rank0_only)

    # --- phases ---------------------------------------------------------------------------------------------

    def require_resting(self, call: str) -> None:
        """PhaseError inside a microbatch."""
        self.walk.require_resting(call)
        if self._closed:
            raise PhaseError(f"{call}: the engine was closed; make a new one with fully_shard")

    def require_usable(self, call: str) -> None:
        """PhaseError inside a microbatch, and after an exception until `zero_grad`."""
        self.require_resting(call)
        if self._broken:
            raise PhaseError(f"{call}: {self._broken}; call zero_grad() on every rank, and redo the step")

    def check_resharded(self, call: str) -> None:
        """PhaseError while a unit is unsharded by hand."""
        for unit in self.all_units:
            if unit.weights is not None:
                raise PhaseError(f"{call}: unit {unit.name!r} is unsharded; call its reshard() first")

    # --- observation ----------------------------------------------------------------------------------------

    def on_event(self, callback: Listener, *, collectives: bool = False) -> None:
        """`callback(name, unit, start, stop, detail)` after each of what the calling thread spends a step on.

        Names: "gather" and "reduce" (waits for communication; a gather's includes the cast), "compute"
        (detail "forward" or "backward"), "optimizer". With `collectives` also "all_gather",
        "reduce_scatter", "all_reduce" as they run on their streams (detail: which). Times are those of
        time.perf_counter(), in seconds; on a GPU, those at which the GPU came to it, told some time later.
        `sharding.Tracer` makes logs and pictures of it.
        """
        self.events.listen(callback, collectives)

    def now(self) -> Any:
        """The start of something, for `event`."""
        return self.events.now()

    def event(self, name: str, unit: str, start: Any, detail: str = "") -> None:
        """Tell the listeners of something that ends now; `start` is from `now`."""
        self.events.tell(name, unit, start, detail)

    def summary(self, optimizer: Any = "adamw", *, microbatches: int = 1, sync: bool = True) -> Report:
        """Bytes of weights, gradients, optimizer state and live buffers, and bytes sent per step: print it.

        `optimizer`: its name (see `report.SLOTS`), or one of this model. Steps have `microbatches`
        microbatches, opened with `sync`. `report.check` holds it against what happened.
        """
        return summary(self, optimizer, microbatches=microbatches, sync=sync)

    def close(self) -> None:
        """Wait for what is in flight and end the engine's streams and communicators. Twice is fine."""
        if self._closed:
            return
        self.walk.require_resting("close()")
        self._closed = True
        try:
            self.runtime.close()
        finally:
            self.mesh.destroy()

    def __enter__(self) -> ShardedModel:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is not None:
            # The other ranks may never come to the end that close waits for.
            self.mesh.abort()
        self.close()

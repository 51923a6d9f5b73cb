"""The engine: which unit is whole when, and which collectives run in which order.

A phase machine, RESTING -> FORWARD -> BACKWARD -> RESTING, walks the units in declared order (backwards in
BACKWARD). Every rank walks all units in every microbatch, whether its data needs them or not: a unit that the
user skips is gathered and released (and its zero gradient reduced) in passing, so that collectives pair on
all ranks. That, and streams that keep order, is why no rank can hang another. How gradients are reduced is
`reduce.py`; how it all starts is `start.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from . import norms
from .buffers import Counters, Ring, poison, slot_bytes
from .layout import Entry, Layout
from .policy import MixedPrecision, Strategy
from .precision import cast_into
from .reduce import Reducer
from .unit import Shard, Unit, Weights, padded_shapes

__all__ = ["PhaseError", "ShardedModel"]

RESTING, FORWARD, BACKWARD = "RESTING", "FORWARD", "BACKWARD"


class PhaseError(RuntimeError):
    """A call that does not fit the phase: the message says what came before and what is expected."""


class ShardedModel:
    """A model whose parameters, gradients and optimizer state are divided over ranks. Made by `fully_shard`.

    Iterating gives the units in declared order, `reversed(model)` backwards, `model["blocks.3"]` one by name;
    `model.root` is the unit of parameters that no pattern took or that several units share (None if there are
    none, or if it is the only unit).
    """

    comm: Any
    rank: int
    size: int
    layout: Layout
    strategy: Strategy
    precision: MixedPrecision | None
    shard_rank: int
    shard_size: int
    """Of the group that the state is divided over."""
    replicate_rank: int
    replicate_size: int
    """Of the group that holds equal shards: hybrid_shard's replicas, or all ranks of no_shard."""
    gather_comm: Any
    reduce_comm: Any
    replicate_comm: Any
    part_comm: Any
    reduce_op: str
    reshard_after_forward: bool
    prefetch: bool
    debug: bool
    runtime: Any
    _own_comms: list[Any]
    _trainable: dict[str, bool]
    _home: dict[str, Unit]

    def __init__(self, setup: Any) -> None:
        """`setup` is start.Setup: everything decided before the first gather."""
        self.__dict__.update(setup.engine_fields())
        self.phase = RESTING
        self.counters = Counters()
        self.units: list[Unit] = []
        self.root: Unit | None = None
        self._by_name: dict[str, Unit] = {}
        self._position = 0
        self._opened: Unit | None = None
        self._open_root = 0
        self._forward_only = False
        self._last, self._sync = True, True
        self._broken: str | None = None
        self.accumulating = False
        self.unscaled = False
        """A loss scale has divided the gradients of this step, or found them not finite."""
        self._stale = True
        self._listeners: list[Callable[..., None]] = []
        self._norm: tuple[float, float] | None = None
        setup.build_units(self)
        ring = 2 if self.reshard_after_forward else max(2, len(self.units))
        weights = [
            slot_bytes(padded_shapes(u.shards, "gather") + self._cast_shapes(u))
            for u in self.units
            if not self.stays(u)
        ]
        self._weights = Ring("weight", ring, max(weights, default=0), self.runtime, self.counters)
        self._gather_stream = self.runtime.stream()
        self.reducer = Reducer(self)

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
    def reduces_each(self) -> bool:
        """Whether each microbatch's gradients are reduced. Where nothing is sharded they can wait, whole,
        for the last.
        """
        return self.strategy.reduces_each and self.shard_size > 1

    def is_trainable(self, name: str) -> bool:
        """Whether the parameter of that name has a gradient."""
        return self._trainable[name]

    def stays(self, unit: Unit) -> bool:
        """Whether the unit's weights lie outside of the ring: kept whole by the strategy, or the root
        unit.
        """
        return unit.kept or self.strategy.keeps_weights or self.shard_size == 1

    @staticmethod
    def _cast_shapes(unit: Unit) -> list[tuple[int, np.dtype]]:
        return [
            (s.group.padded, s.dtypes.compute) for s in unit.shards if s.dtypes.compute != s.dtypes.gather
        ]

    # --- microbatches ---------------------------------------------------------------------------------------

    @contextmanager
    def microbatch(self, last: bool = True, sync: bool = True) -> Iterator[ShardedModel]:
        """One forward and backward over all units. On exit everything is reduced that the strategy reduces.

        `last=False` says that more microbatches follow before the optimizer's step. `sync=False` keeps this
        microbatch's gradients whole on this rank and adds them to the next reduction (more memory, less
        traffic); the last must sync. Gradients add up over microbatches: scale the loss by 1 / microbatches
        for a mean.
        """
        self.require(RESTING, "microbatch()")
        self._check_usable("microbatch()")
        if last and not sync:
            raise ValueError(
                "microbatch(last=True, sync=False): the last microbatch of a step must reduce; pass sync=True"
            )
        self._last, self._sync, self._forward_only = last, sync and (last or self.reduces_each), False
        self.accumulating = True
        self._norm = None
        with self._walk():
            yield self

    @contextmanager
    def evaluate(self) -> Iterator[ShardedModel]:
        """A forward pass alone: no gradients, no change of any state."""
        self.require(RESTING, "evaluate()")
        self._forward_only = True
        with self._walk():
            yield self

    @contextmanager
    def _walk(self) -> Iterator[None]:
        self._enter_forward()
        try:
            yield
            if self.phase == FORWARD:
                self._finish_forward()
            if not self._forward_only:
                if self.phase == FORWARD:
                    self._enter_backward()
                self._finish_backward()
        except BaseException:
            self.abandon()
            raise
        finally:
            if self._forward_only and self.phase == FORWARD:
                self._rest()

    def _enter_forward(self) -> None:
        self.phase, self._position = FORWARD, 0
        if self.root is not None:
            self.gather(self.root)
        self._prefetch(0)

    def _finish_forward(self) -> None:
        self._pass_by(len(self.units))
        if self._forward_only:
            self._rest()

    def _enter_backward(self) -> None:
        """Every unit has been through forward; those still whole stay so until their backward."""
        self._pass_by(len(self.units))
        self.phase, self._position = BACKWARD, len(self.units) - 1
        if self.root is not None:
            self.reducer.begin(self.root, zero=True)
        self._prefetch(self._position)

    def _finish_backward(self) -> None:
        self._pass_by(-1)
        if self.root is not None:
            self.reducer.finish(self.root, self._sync)
        self.reducer.drain()
        self._rest()

    def _rest(self) -> None:
        for unit in self.all_units:
            if unit.weights is not None:
                self.release(unit)
        self.phase, self._opened = RESTING, None

    def abandon(self) -> None:
        """After an exception inside a microbatch: release everything; its gradients are void until
        `zero_grad`.
        """
        if self.phase == RESTING:
            return
        if not self._forward_only:
            self._broken = "an exception ended a microbatch"
        self.runtime.synchronize()
        self.reducer.abandon()
        self._rest()

    # --- the contexts of units ------------------------------------------------------------------------------

    def open_forward(self, unit: Unit) -> None:
        """Make a unit whole for its forward, and start the next one's gather."""
        if self.phase == RESTING:
            raise PhaseError(
                f"{unit.name}.forward() outside of a microbatch; open one: `with model.microbatch():`, or "
                "`with model.evaluate():` for a forward pass alone"
            )
        if self.phase == BACKWARD:
            raise PhaseError(
                f"{unit.name}.forward() after backward began in this microbatch; recompute inside its "
                "backward() instead"
            )
        if unit.kept:
            self.ready(unit)
            return
        index = self.units.index(unit)
        if index < self._position:
            raise PhaseError(
                f"{unit.name}.forward(): this microbatch has passed unit {unit.name!r} already and expects "
                f"{self._expected(self._position)}; open each unit once, in declared order"
            )
        self._check_closed(unit, "forward")
        self._pass_by(index)
        self.gather(unit)
        self._position = index + 1
        self._prefetch(index + 1)
        self.ready(unit)
        self._opened = unit

    def close_forward(self, unit: Unit) -> None:
        """The forward of a unit is over."""
        if unit.kept or self.phase != FORWARD:
            return
        self._opened = None
        if self.reshard_after_forward or self._forward_only:
            self.release(unit, keep_part=not self._forward_only)

    def open_backward(self, unit: Unit, zero: bool) -> None:
        """Make a unit whole for its backward, with room for its gradients, and start the previous one's
        gather.
        """
        if self.phase == RESTING:
            raise PhaseError(
                f"{unit.name}.backward() outside of a microbatch; open one: `with model.microbatch():`"
            )
        if self._forward_only:
            raise PhaseError(
                f"{unit.name}.backward() inside evaluate(), which is a forward pass alone; use microbatch()"
            )
        if self.phase == FORWARD:
            if self._position == 0 and not unit.kept:
                raise PhaseError(f"{unit.name}.backward() before any forward(); run the forward pass first")
            self._enter_backward()
        if unit.kept:
            self.ready(unit)
            self.reducer.reopen(unit)
            return
        index = self.units.index(unit)
        if index > self._position:
            raise PhaseError(
                f"{unit.name}.backward(): this microbatch has passed it already and expects "
                f"{self._expected(self._position)}; open each unit once, in reverse order"
            )
        self._check_closed(unit, "backward")
        self._pass_by(index)
        self.gather(unit)
        self._position = index - 1
        self._prefetch(index - 1)
        self.reducer.begin(unit, zero)
        self.ready(unit)
        self._opened = unit

    def close_backward(self, unit: Unit) -> None:
        """The backward of a unit is over: reduce its gradients, release its weights."""
        self.reducer.add_tied(unit)
        if unit.kept:
            return
        self._opened = None
        self.release(unit)
        self.reducer.finish(unit, self._sync)

    def _pass_by(self, index: int) -> None:
        """Take part in the collectives of the units between here and `index`, which the user skipped."""
        step = 1 if self.phase == FORWARD else -1
        while (index - self._position) * step > 0:
            unit = self.units[self._position]
            self.gather(unit)
            self._position += step
            self._prefetch(self._position)
            if self.phase == FORWARD:
                if self.reshard_after_forward or self._forward_only:
                    self.release(unit, keep_part=not self._forward_only)
                continue
            self.reducer.begin(unit, zero=True)
            self.release(unit)
            self.reducer.finish(unit, self._sync)

    def _expected(self, position: int) -> str:
        return f"unit {self.units[position].name!r}" if 0 <= position < len(self.units) else "no further unit"

    def _check_closed(self, unit: Unit, what: str) -> None:
        if self._opened is not None:
            raise PhaseError(
                f"{unit.name}.{what}() inside the context of unit {self._opened.name!r}; close that one first"
            )

    # --- gathering ------------------------------------------------------------------------------------------

    def gather(self, unit: Unit) -> None:
        """Start to make a unit's weights whole; nothing to do if they are, or are about to be."""
        if unit.weights is not None:
            return
        if unit.kept_weights is not None:
            unit.weights = unit.kept_weights
            if not unit.weights.ready and unit.weights.mark is None:
                self._start_gather(unit, unit.weights)
            return
        slot = self._weights.take()
        shapes = padded_shapes(unit.shards, "gather")
        cast = self._cast_shapes(unit)
        arrays = slot.arrays(("weights", unit.name), shapes + cast)
        gathered, extra = arrays[: len(shapes)], iter(arrays[len(shapes) :])
        computed = [
            next(extra) if s.dtypes.compute != s.dtypes.gather else full
            for s, full in zip(unit.shards, gathered, strict=True)
        ]
        unit.weights = Weights(gathered, computed, slot=slot)
        self._start_gather(unit, unit.weights)

    def _start_gather(self, unit: Unit, weights: Weights) -> None:
        if self.shard_size == 1:
            return
        self.runtime.follow(self._gather_stream)
        part = unit.part if self.phase == BACKWARD else None
        for index, (shard, full) in enumerate(zip(unit.shards, weights.gathered, strict=True)):
            if not shard.group.numel:
                continue
            if part is not None:
                comm, source = self.part_comm, part[index]
            else:
                comm, source = self.gather_comm, shard.source
            comm.all_gather(source, out=full[: source.size * comm.size], **self._on(self._gather_stream))
            self.counters.count("all_gather", full.nbytes, comm.size)
        weights.mark = self.runtime.mark(self._gather_stream)

    def ready(self, unit: Unit) -> None:
        """The weights may be computed with from here on."""
        weights = unit.weights
        if weights is None or weights.ready:
            return
        start = time.perf_counter()
        self.runtime.wait(weights.mark)
        for full, computed in zip(weights.gathered, weights.computed, strict=True):
            if computed is not full:
                cast_into(computed, full)
        weights.ready = True
        self.event("gather", unit.name, start)

    def release(self, unit: Unit, keep_part: bool = False) -> None:
        """The full weights are not needed any more (weights that stay are only let go of)."""
        weights, unit.weights = unit.weights, None
        if weights is None or weights.slot is None:
            return
        if keep_part and self.part_comm is not None:
            self.runtime.wait(weights.mark)
            unit.keep_part(self.part_comm, weights)
        if self.debug:
            self.runtime.wait(weights.mark)
            poison(weights.slot.memory)
        self._weights.give(weights.slot)

    def _prefetch(self, index: int) -> None:
        if self.prefetch and 0 <= index < len(self.units):
            unit = self.units[index]
            if unit.weights is None and (unit.kept_weights is not None or self._weights.available):
                self.gather(unit)

    @staticmethod
    def _on(stream: Any) -> dict[str, Any]:
        return {} if stream is None else {"stream": stream}

    def home_of(self, owner: str) -> Unit:
        """The unit in which the parameter's memory lies."""
        return self._home[owner]

    def entry_of(self, owner: str) -> tuple[Entry, Shard]:
        """A parameter's place, and the shard of its group."""
        for shard in self._home[owner].shards:
            for entry in shard.group.entries:
                if entry.name == owner:
                    return entry, shard
        raise KeyError(owner)

    def owner_views(self, unit: Unit, owner: str) -> dict[str, Any]:
        """Full weights that `unit` shows but does not own: the root unit's, or its own by another name."""
        home = self._home[owner]
        if home is not unit:
            self.ready(home)
        return home.own_weight_views()

    # --- between microbatches -------------------------------------------------------------------------------

    def updated(self) -> None:
        """`Shard.data` has changed (a step, a load): refresh what is gathered, forget what was whole."""
        self.require(RESTING, "updated()")
        for unit in self.all_units:
            for shard in unit.shards:
                if shard.source is not shard.data:
                    cast_into(shard.source, shard.data)
            if unit.kept_weights is not None:
                unit.kept_weights.mark = None
                unit.kept_weights.ready = False

    def stepped(self) -> None:
        """An optimizer has used the gradients."""
        self.accumulating = False
        self.updated()

    def zero_grad(self) -> None:
        """Forget the gradients: the next microbatch starts a new sum."""
        self.require(RESTING, "zero_grad()")
        for shard in self.shards:
            shard.fresh = True
        self.reducer.forget()
        self._broken, self._norm, self.accumulating, self.unscaled = None, None, False, False

    def check_step(self, call: str) -> None:
        """PhaseError unless complete gradients are there to be used."""
        self.require(RESTING, call)
        self._check_usable(call)
        if self.reducer.pending():
            raise PhaseError(
                f"{call}: gradients of this step are not reduced yet; the last microbatch must be opened "
                "with last=True"
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

    def require(self, phase: str, call: str) -> None:
        """PhaseError unless the engine is in that phase."""
        if self.phase != phase:
            where = (
                f"inside {self.phase.lower()} of a microbatch"
                if self.phase != RESTING
                else "outside of a microbatch"
            )
            raise PhaseError(
                f"{call} {where}; it belongs "
                f"{'outside of microbatches' if phase == RESTING else 'in ' + phase}"
            )

    def _check_usable(self, call: str) -> None:
        if self._broken:
            raise PhaseError(
                f"{call}: {self._broken}, so the gradients of this step are incomplete; call zero_grad() "
                "first"
            )

    # --- observation ----------------------------------------------------------------------------------------

    def on_event(self, callback: Callable[[str, str, float, float, str], None]) -> None:
        """`callback(name, unit, start, stop, detail)` after each wait, computation and optimizer step.

        Times are those of time.perf_counter(), in seconds.
        """
        self._listeners.append(callback)

    def event(self, name: str, unit: str, start: float, detail: str = "") -> None:
        """Tell the listeners of something that ends now."""
        if self._listeners:
            stop = time.perf_counter()
            for listener in self._listeners:
                listener(name, unit, start, stop, detail)

    def close(self) -> None:
        """Wait for what is in flight and end the engine's streams and communicators."""
        self.runtime.synchronize()
        self.runtime.close()
        for comm in self._own_comms:
            comm.destroy()
        self._own_comms.clear()

    def __enter__(self) -> ShardedModel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

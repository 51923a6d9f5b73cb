"""The driver of optimizers over shards. The usual ones, by name, are in `optim.py`.

An optimizer sees this rank's shards alone (`ShardedModel.shards`) and never communicates: where several
ranks hold the same data they compute the same update from the same gradients. What is done to a block is a
rule (`updates.py`), which parameters get which numbers is `groups.py`, how the blocks are walked is
`blocks.py` in host memory and `fused.py` on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .blocks import HostUpdater, working_dtype
from .engine import PhaseError
from .groups import Group, Segment, by_name, resolve, segments
from .policy import is_floating
from .precision import rounding_key
from .updates import Hyper, Rule

if TYPE_CHECKING:
    from .engine import ShardedModel
    from .unit import Shard

__all__ = ["Groups", "LearningRate", "Optimizer"]

LearningRate = float | Callable[[int], float]
Groups = Mapping[str, Mapping[str, Any]] | None
State = dict[str, Any]


class Optimizer:
    """Updates a sharded model's weights by a rule: `Optimizer(model, rule, lr=...)`, for rules of your own
    too.

    rule
        See `updates.Rule`.
    lr
        A number, or a schedule: a function of the number of steps done (0 before the first).
    groups
        Glob pattern over whole dotted names -> hyper-parameters that differ for the names it takes:
        `groups={"*.bias": {"weight_decay": 0.0}, "embed*": {"lr": 1e-4}}`. Later patterns win.
    stochastic_rounding
        A seed. bfloat16 weights that are trained without float32 masters (`MixedPrecision(master=None)`) are
        rounded up or down at random so that small updates count on average. The bits depend on seed, step,
        parameter and element alone: any number of ranks gives the same weights.
    offload
        On a GPU, keep the optimizer's state and the master weights in pinned host memory; they pass through
        the GPU a few million elements at a time. In host memory they are there already: it changes nothing.
    hyper
        The rule's other hyper-parameters, for all parameters that no group changes.

    Parameters whose gradient is fresh (nothing was accumulated since `zero_grad`) are left alone, with their
    state and their step count, as torch does for a gradient that is None.

    Raises ValueError for a pattern that takes nothing, TypeError for a hyper-parameter that the rule does
    not have and for a parameter that is not floating point.
    """

    def __init__(
        self,
        model: ShardedModel,
        rule: Rule,
        *,
        lr: LearningRate,
        groups: Groups = None,
        stochastic_rounding: int | None = None,
        offload: bool = False,
        **hyper: Any,
    ) -> None:
        if not hasattr(model, "shards"):
            raise TypeError(
                f"{rule.kind}: model is a {type(model).__name__}; pass the model from "
                "fully_shard(params, comm)"
            )
        self.model, self.rule = model, rule
        self.steps = 0
        """Steps done; skipped ones do not count."""
        self.stochastic_rounding = stochastic_rounding
        self._shards = [shard for shard in model.shards if shard.trainable]
        if not self._shards:
            raise ValueError(
                f"{rule.kind}: nothing in the model is trainable: all its parameters are frozen, or "
                "integers; unfreeze() some first"
            )
        _check_dtypes(rule.kind, self._shards, stochastic_rounding)
        self._given = {"lr": lr, **hyper}, groups
        hypers = by_name(model.layout, rule, *self._given, rule.kind)
        self._begun: dict[str, int] = {}
        self._offload = offload
        self._updater = _updater_for(model, rule, offload)
        self.state: dict[tuple[str, int], State] = {}
        """(unit, index of the group in it) -> slot name -> 1-d array, like `Shard.data` in the working
        dtype."""
        self._make_state({slot: {} for slot in rule.slots})
        self._regroup(hypers)
        model.on_relayout(self._relaid)

    def _make_state(self, values: Mapping[str, Mapping[tuple[str, int], Any]]) -> None:
        """State for every shard, with the values that there are (slot -> shard's key -> array), else zero."""
        self.state = {}
        for shard in self._shards:
            dtype = working_dtype(np.dtype(shard.data.dtype))
            made: State = {}
            for slot in self.rule.slots:
                made[slot] = self._updater.zeros(shard.data.size, dtype)
                if shard.key in values[slot]:
                    moved = values[slot][shard.key]
                    made[slot][...] = moved.get() if self._offload and hasattr(moved, "get") else moved
            self.state[shard.key] = made

    def _relaid(self, relayout: Any) -> None:
        """After freeze and unfreeze: state goes with its parameters; that of unfrozen ones starts anew."""
        model, asarray = self.model, self.model.runtime.xp.asarray
        values = {
            slot: relayout.move({key: asarray(state[slot]) for key, state in self.state.items()})
            for slot in self.rule.slots
        }
        before = self._by_name()
        hypers = by_name(model.layout, self.rule, *self._given, self.rule.kind)
        self._begun = {name: self._begun.get(name, 0) if name in before else self.steps for name in hypers}
        self._shards = [shard for shard in model.shards if shard.trainable]
        self._updater = _updater_for(model, self.rule, self._offload)
        self._make_state(values)
        self._regroup({name: before.get(name, hyper) for name, hyper in hypers.items()})

    # --- the step -------------------------------------------------------------------------------------------

    def step(self, *, check_finite: bool = False) -> bool:
        """Update the weights by the gradients of this step; True, or False if the step was skipped.

        `check_finite`: skip, on all ranks together, if any gradient on any rank is infinite or NaN (this
        takes `model.grad_norm(2)`: one pass and one all-reduce). A skipped step changes nothing.

        Raises PhaseError inside a microbatch, while gradients are not there or not complete, and if a step
        has used them already.
        """
        model = self.model
        model.check_step("step()")
        model.check_unused("step()")
        live = [shard for shard in self._shards if not shard.fresh]
        if not live and any(shard.group.numel for shard in self._shards):
            raise PhaseError(
                "step(): nothing has been accumulated since zero_grad(); run a microbatch with a backward "
                "pass first"
            )
        numbers = self._numbers()
        if check_finite and not math.isfinite(model.grad_norm(2.0)):
            model.skipped()
            return False
        for shard in live:
            start = model.now()
            self._update(shard, numbers)
            model.event("optimizer", shard.unit, start)
        self._updater.finish()
        self._count_skipped()
        self.steps += 1
        model.stepped()
        return True

    def _numbers(self) -> dict[Group, Callable[[int], Hyper]]:
        """For each group, what the rule's update gets at a step; all schedules are called before anything
        changes."""
        prepare = self.rule.prepare
        made: dict[Group, Callable[[int], Hyper]] = {}
        for group in self.groups:
            now = group.now(self.steps)
            found: dict[int, Hyper] = {}

            def at(step: int, now: Hyper = now, found: dict[int, Hyper] = found) -> Hyper:
                if step not in found:
                    found[step] = prepare(now, step) if prepare is not None else now
                return found[step]

            made[group] = at
        return made

    def _update(self, shard: Shard, numbers: Mapping[Group, Callable[[int], Hyper]]) -> None:
        state = self.state[shard.key]
        for segment in self._segments[shard.key]:
            part = slice(segment.start, segment.stop)
            step = self.steps + 1 - self._begun.get(segment.name, 0)
            key = None
            if self.stochastic_rounding is not None and _is_bfloat16(shard.data):
                key = rounding_key(self.stochastic_rounding, self.steps, segment.name)
            self._updater.update(
                shard.data[part],
                shard.grad[part],
                {slot: array[part] for slot, array in state.items()},
                numbers[segment.group](step),
                step,
                key,
                segment.param_start,
            )

    def _count_skipped(self) -> None:
        """Parameters without a gradient in this step are one step behind from now on."""
        skipped = [shard for shard in self._shards if shard.fresh and shard.group.numel]
        for shard in skipped:
            for entry in shard.group.entries:
                self._begun[entry.name] = self._begun.get(entry.name, 0) + 1

    def _by_name(self) -> dict[str, dict[str, Any]]:
        """name -> hyper-parameters, as they are now."""
        return {name: group.hyper for group in self.groups for name in group.names}

    def _regroup(self, hypers: Mapping[str, Mapping[str, Any]]) -> None:
        """Groups and segments anew, from the hyper-parameters by name."""
        self.groups = resolve(hypers)
        """Parameters with equal hyper-parameters; change `groups[i].hyper["lr"]` between steps if you
        like."""
        of = {name: group for group in self.groups for name in group.names}
        self._segments: dict[tuple[str, int], list[Segment]] = {}
        for shard in self._shards:
            split = self.stochastic_rounding is not None and _is_bfloat16(shard.data)
            self._segments[shard.key] = segments(shard.group, self.model.shard_rank, of, self._begun, split)

    def __repr__(self) -> str:
        lr = f"lr={self.lr:g}" if self.groups else "nothing to update"
        return f"<{self.rule.kind} after {self.steps} steps: {lr}, {self.state_bytes} bytes of state>"

    # --- what it is -----------------------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """The learning rate of the next step, of the first of `groups`. ValueError if all is frozen now."""
        if not self.groups:
            raise ValueError(f"{self.rule.kind}: all parameters are frozen, so there is no learning rate")
        return float(self.groups[0].now(self.steps)["lr"])

    def hyper(self, name: str) -> dict[str, Any]:
        """One parameter's hyper-parameters, `lr` as a number for the next step. KeyError for a name
        without."""
        for group in self.groups:
            if name in group.names:
                return dict(group.now(self.steps))
        raise KeyError(f"{self.rule.kind} updates no parameter {name!r}")

    @property
    def state_bytes(self) -> int:
        """Bytes of the state on this rank."""
        return sum(array.nbytes for state in self.state.values() for array in state.values())

    # --- checkpoints ----------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the arrays of `state`, JSON-like and the same on all ranks.

        `kind`, `steps`, `slots`; `groups`: a list of `hyper` and `names`; `begun`: names whose state is not
        as old as the optimizer, and by how many steps; `stochastic_rounding`.
        """
        return {
            "kind": self.rule.kind,
            "steps": self.steps,
            "slots": list(self.rule.slots),
            "groups": [group.saved(self.steps) for group in self.groups],
            "begun": {name: steps for name, steps in sorted(self._begun.items()) if steps},
            "stochastic_rounding": self.stochastic_rounding,
        }

    def restore(self, saved: Mapping[str, Any], *, hyper: bool = True) -> None:
        """Continue from `describe()`: the step count and, unless `hyper=False`, each name's hyper-parameters.

        Learning rates that were schedules are functions, which no file holds: give the same schedule to the
        new optimizer, and it goes on at the right step. A number that was saved comes
        back, also where the new optimizer has a schedule.
        Parameters that the saved optimizer did not update (frozen then) keep their new hyper-parameters and
        start at step 1.

        Raises ValueError, with nothing changed, for another kind of optimizer, for names that this model
        does not have, and where a schedule was saved and this optimizer has none.
        """
        for what, mine in (("kind", self.rule.kind), ("slots", list(self.rule.slots))):
            if saved[what] != mine:
                raise ValueError(
                    f"restore: the saved optimizer has {what} {saved[what]!r} and this one {mine!r}; "
                    "make the optimizer that was saved"
                )
        known = {entry.name for _, _, entry in self.model.layout.parameters()}
        hypers = self._by_name()
        seen = set()
        for group in saved["groups"]:
            for name in group["names"]:
                if name not in known:
                    raise ValueError(
                        f"restore: the saved optimizer updated {name!r}, which this model does not have"
                    )
                seen.add(name)
                if name in hypers and hyper:
                    hypers[name] = _restored(name, group["hyper"], hypers[name])
        self.steps = int(saved["steps"])
        self._begun = {name: int(steps) for name, steps in saved["begun"].items() if name in known}
        self._begun.update({name: self.steps for name in hypers if name not in seen})
        self._regroup(hypers)


def _restored(name: str, saved: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()}
    if isinstance(saved["lr"], Mapping):
        if callable(mine["lr"]):
            return {**mine, **found, "lr": mine["lr"]}
        raise ValueError(
            f"restore: {name!r} was saved with the learning rate schedule {saved['lr']['schedule']}, and "
            "this optimizer has "
            f"lr={mine['lr']!r}; pass a schedule as lr=, or hyper=False to go on with the new "
            "hyper-parameters"
        )
    return {**mine, **found}


# --- checks and choices -------------------------------------------------------------------------------------


def _updater_for(model: ShardedModel, rule: Rule, offload: bool) -> Any:
    if model.runtime.xp is np:
        return HostUpdater(rule)
    from .fused import CudaUpdater, OffloadedUpdater  # needs CuPy

    return OffloadedUpdater(model, rule) if offload else CudaUpdater(rule)


def _is_bfloat16(array: Any) -> bool:
    return array.dtype.name == "bfloat16"


def _check_dtypes(call: str, shards: list[Shard], stochastic_rounding: int | None) -> None:
    for shard in shards:
        if not is_floating(np.dtype(shard.data.dtype)):
            names = ", ".join(entry.name for entry in shard.group.entries)
            raise TypeError(
                f"{call}: {names} (unit {shard.unit}) has dtype {shard.data.dtype}, which no step can "
                "change; "
                "name it in fully_shard(..., frozen=[...])"
            )
    if stochastic_rounding is None:
        return
    if isinstance(stochastic_rounding, bool) or not isinstance(stochastic_rounding, int):
        raise TypeError(
            f"{call}: stochastic_rounding={stochastic_rounding!r}; expected a seed (an int), or None"
        )
    if not any(_is_bfloat16(shard.data) for shard in shards):
        dtypes = ", ".join(sorted({shard.data.dtype.name for shard in shards}))
        raise ValueError(
            f"{call}: stochastic_rounding={stochastic_rounding!r}, but the weights that it updates are "
            f"{dtypes}; it is for bfloat16 "
            "weights without float32 masters: MixedPrecision(param='bfloat16', master=None) and bfloat16 "
            "parameters"
        )

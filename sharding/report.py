"""What a sharded model costs: bytes in memory and bytes sent, per unit and in total, predicted and checked.

A prediction follows from the layout and the policies alone (`Setting`): no arrays, no communication. So the
same code serves `model.summary()`, `python -m sharding.estimate`, and `check`, which holds the prediction
against what the engine counted. All sizes are bytes on one rank.

With P parameters in W-byte weights, R-byte gradients and M-byte masters on N ranks, and S optimizer slots
like the masters (AdamW: 2), a rank keeps between steps

| strategy        | weights               | gradients | optimizer | float32 AdamW | 16 bit, float32 master |
|-----------------|-----------------------|-----------|-----------|---------------|------------------------|
| no_shard        | W P + M P             | R P       | S M P     | 16 P          | 16 P                   |
| shard_optimizer | W P + M P/N           | R P       | S M P/N   | 8 P + 8 P/N   | 4 P + 12 P/N           |
| shard_grad_op   | W P + M P/N           | R P/N     | S M P/N   | 4 P + 12 P/N  | 2 P + 14 P/N           |
| full_shard      | W P/N + M P/N         | R P/N     | S M P/N   | 16 P/N        | 16 P/N                 |

where M counts in `weights` only if the master is another array than what is gathered (another dtype), and the
16-bit column has 16-bit gradients. hybrid_shard is full_shard with N the ranks of a shard group. Beside that
live two units of weights and two of gradients at a time (`live`). Sent per step of m microbatches, in bytes
for each of P x (N - 1) / N elements: no_shard 2 R, shard_optimizer W + R, shard_grad_op W + m R, full_shard
2 m W + m R.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .buffers import slot_bytes
from .layout import Layout, UnitLayout
from .policy import Dtypes, MixedPrecision, Strategy, dtypes_of
from .transport import LIBRARY, Transport, ring_bytes

if TYPE_CHECKING:
    from .engine import ShardedModel

__all__ = [
    "COLLECTIVES",
    "SLOTS",
    "MismatchError",
    "Report",
    "Setting",
    "UnitCost",
    "check",
    "predict",
    "setting_of",
    "summary",
]

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")

SLOTS = {"none": 0, "sgd": 0, "sgd_momentum": 1, "lion": 1, "adam": 2, "adamw": 2}
"""State arrays, each like the master weights, that an optimizer keeps."""


class MismatchError(RuntimeError):
    """The engine did not do what was predicted: the message lists each count, predicted and counted."""


@dataclass(frozen=True)
class Setting:
    """What a prediction depends on beside the layout."""

    strategy: Strategy
    shard_size: int
    replicate_size: int = 1
    reshard_after_forward: bool | int = True
    """As for `fully_shard`: a number is how many ranks backward gathers from."""
    precision: MixedPrecision | None = None
    root: str | None = None
    """The unit that stays whole through a microbatch, if there is one."""
    slots: int = 2
    """State arrays of the optimizer."""
    transport: Transport = LIBRARY
    """How the collectives travel."""
    shard_rank: int = 0
    replicate_rank: int = 0
    """Whose bytes are told: by a schedule not all ranks send equally many."""

    @property
    def reduces_each(self) -> bool:
        """Gradients are reduced after each microbatch."""
        return self.strategy.reduces_each and self.shard_size > 1

    def sent(self, what: str, elements: int, dtype: np.dtype, ranks: int) -> float:
        """Bytes that this rank sends for a whole buffer in a group of so many ranks."""
        rank = self.replicate_rank if what == "all_reduce" else self.shard_rank % ranks
        return self.transport.bytes_sent(what, elements, dtype, ranks, rank)

    def stays(self, unit: str) -> bool:
        """The unit's weights are whole between uses."""
        return unit == self.root or self.strategy.keeps_weights or self.shard_size == 1


@dataclass(frozen=True)
class UnitCost:
    """One unit, or all. Bytes on this rank; of collectives, calls and bytes sent in one step."""

    name: str
    parameters: int
    """Elements, of all ranks together."""
    weights: int
    gradients: int
    optimizer: int
    live: int
    """Buffers in use only while the unit is: its full weights and gradients."""
    calls: Mapping[str, int] = field(default_factory=dict)
    sent: Mapping[str, float] = field(default_factory=dict)

    @property
    def state(self) -> int:
        """What is kept between steps."""
        return self.weights + self.gradients + self.optimizer

    @property
    def bytes_sent(self) -> float:
        """By all collectives of a step."""
        return sum(self.sent.values())


@dataclass(frozen=True)
class Report:
    """A model's cost: `print(report)` for the table."""

    setting: Setting
    units: tuple[UnitCost, ...]
    total: UnitCost
    """`live` is what the rings hold: two slots of the largest unit, not the sum."""
    microbatches: int

    def __str__(self) -> str:
        return _table(self)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the same numbers, in bytes."""
        return {
            "strategy": self.setting.strategy.name,
            "zero": self.setting.strategy.zero,
            "ranks": self.setting.shard_size * self.setting.replicate_size,
            "mesh": [self.setting.replicate_size, self.setting.shard_size],
            "microbatches": self.microbatches,
            **_unit_dict(self.total),
            "units": [{"name": unit.name, **_unit_dict(unit)} for unit in self.units],
        }


# --- the prediction -----------------------------------------------------------------------------------------


def predict(
    layout: Layout, setting: Setting, *, microbatches: int = 1, sync: bool = True, norms: int = 0
) -> Report:
    """What one step of `microbatches` forward and backward passes over all units costs.

    `sync=False`: the microbatches before the last were opened with `sync=False`. `norms`: how often a step
    asks for a gradient norm (an all-reduce of one float64).
    """
    units = tuple(_unit(unit, setting, microbatches, sync) for unit in layout.units)
    rings = _rings(layout, setting)
    calls = {name: sum(unit.calls[name] for unit in units) for name in COLLECTIVES}
    sent = {name: math.fsum(unit.sent[name] for unit in units) for name in COLLECTIVES}
    if setting.shard_size > 1:
        calls["all_reduce"] += norms
        sent["all_reduce"] += norms * ring_bytes("all_reduce", 8, setting.shard_size)
    total = UnitCost(
        "total",
        sum(unit.parameters for unit in units),
        sum(unit.weights for unit in units),
        sum(unit.gradients for unit in units),
        sum(unit.optimizer for unit in units),
        rings,
        calls,
        sent,
    )
    return Report(setting, units, total, microbatches)


def _unit(unit: UnitLayout, setting: Setting, microbatches: int, sync: bool) -> UnitCost:
    stays, n = setting.stays(unit.name), setting.shard_size
    weights = gradients = optimizer = 0
    calls = dict.fromkeys(COLLECTIVES, 0)
    sent = dict.fromkeys(COLLECTIVES, 0.0)

    def count(what: str, times: int, elements: int, dtype: np.dtype, ranks: int) -> None:
        calls[what] += times
        sent[what] += times * setting.sent(what, elements, dtype, ranks)

    for group in unit.groups:
        dtypes = dtypes_of(group, setting.precision)
        full = group.padded * dtypes.gather.itemsize
        weights += full if stays else group.shard * dtypes.gather.itemsize
        if stays and dtypes.compute != dtypes.gather:
            weights += group.padded * dtypes.compute.itemsize
        if dtypes.master != dtypes.gather:
            weights += group.shard * dtypes.master.itemsize
        if n > 1 and group.numel:
            if stays:
                count("all_gather", 1, group.padded, dtypes.gather, n)
            else:
                count("all_gather", microbatches, group.padded, dtypes.gather, n)
                if setting.reshard_after_forward:
                    near = _gathered_from(setting)
                    count("all_gather", microbatches, group.padded, dtypes.gather, near)
        if not group.trainable:
            continue
        whole = not setting.reduces_each
        gradients += (group.padded if whole else group.shard) * dtypes.reduce.itemsize
        if setting.reduces_each and not sync and microbatches > 1:
            gradients += group.padded * dtypes.reduce.itemsize
        optimizer += setting.slots * group.shard * _slot_dtype(dtypes).itemsize
        reductions = microbatches if setting.reduces_each and sync else 1
        if group.numel:
            if n > 1:
                count("reduce_scatter", reductions, group.padded, dtypes.reduce, n)
                gradients += setting.transport.bytes_kept("reduce_scatter", group.padded, n)
            if setting.replicate_size > 1:
                replicas = setting.replicate_size
                count("all_reduce", reductions, group.shard, dtypes.reduce, replicas)
                gradients += setting.transport.bytes_kept("all_reduce", group.shard, replicas)
    live = (0 if stays else slot_bytes(_weight_shapes(unit, setting))) + slot_bytes(
        _gradient_shapes(unit, setting)
    )
    parameters = sum(group.numel for group in unit.groups)
    return UnitCost(unit.name, parameters, weights, gradients, optimizer, live, calls, sent)


def _gathered_from(setting: Setting) -> int:
    k = setting.reshard_after_forward
    return setting.shard_size if isinstance(k, bool) else k


def _slot_dtype(dtypes: Dtypes) -> np.dtype:
    """Optimizers keep their state in the master's dtype, or float32 for 16-bit masters."""
    return dtypes.master if dtypes.master.itemsize >= 4 else np.dtype("float32")


def _weight_shapes(unit: UnitLayout, setting: Setting) -> list[tuple[int, np.dtype]]:
    every = [(group, dtypes_of(group, setting.precision)) for group in unit.groups]
    return [(group.padded, dtypes.gather) for group, dtypes in every] + [
        (group.padded, dtypes.compute) for group, dtypes in every if dtypes.compute != dtypes.gather
    ]


def _gradient_shapes(unit: UnitLayout, setting: Setting) -> list[tuple[int, np.dtype]]:
    return [
        (group.padded, dtypes_of(group, setting.precision).reduce) for group in unit.groups if group.trainable
    ]


def _rings(layout: Layout, setting: Setting) -> int:
    """Bytes of full buffers: two slots each for weights and gradients; the root unit's gradients apart.

    Where nothing is sharded there is nothing to gather, and gradients move on before the next unit's begin.
    """
    others = [unit for unit in layout.units if unit.name != setting.root]
    gathered = [unit for unit in others if not setting.stays(unit.name)]
    slots = 2 if setting.reshard_after_forward else max(2, len(others))
    reducing = 2 if setting.shard_size > 1 else 1
    weights = [slot_bytes(_weight_shapes(unit, setting)) for unit in gathered]
    gradients = [slot_bytes(_gradient_shapes(unit, setting)) for unit in others]
    root = [slot_bytes(_gradient_shapes(unit, setting)) for unit in layout.units if unit.name == setting.root]
    parts = 0
    k = setting.reshard_after_forward
    if not isinstance(k, bool) and setting.shard_size > 1:
        parts = sum(
            group.padded // k * dtypes_of(group, setting.precision).gather.itemsize
            for unit in gathered
            for group in unit.groups
        )
    return (
        min(slots, len(gathered)) * max(weights, default=0)
        + min(reducing, len(others)) * max(gradients, default=0)
        + sum(root)
        + parts
    )


# --- of a model ---------------------------------------------------------------------------------------------


def setting_of(model: ShardedModel, optimizer: Any = "adamw") -> Setting:
    """The setting of a model. `optimizer`: one of `SLOTS`, or an optimizer of this model."""
    if isinstance(optimizer, str):
        if optimizer not in SLOTS:
            raise ValueError(f"optimizer={optimizer!r} is unknown; use one of {', '.join(SLOTS)}")
        slots = SLOTS[optimizer]
    else:
        slots = max((len(arrays) for arrays in optimizer.state.values()), default=0)
    reshard: bool | int = model.reshard_after_forward
    if reshard and model.mesh.parts is not None:
        reshard = model.mesh.parts.size
    return Setting(
        model.strategy,
        model.shard_size,
        model.replicate_size,
        reshard,
        model.precision,
        model.root.name if model.root is not None else None,
        slots,
        model.transport,
        model.shard_rank,
        model.replicate_rank,
    )


def summary(
    model: ShardedModel, optimizer: Any = "adamw", *, microbatches: int = 1, sync: bool = True, norms: int = 0
) -> Report:
    """The cost of a model, per unit and in total, for steps of so many microbatches: see `predict`."""
    return predict(
        model.layout, setting_of(model, optimizer), microbatches=microbatches, sync=sync, norms=norms
    )


def check(
    model: ShardedModel, steps: int, microbatches: int = 1, *, sync: bool = True, norms: int = 0
) -> Report:
    """Hold the prediction against `model.counters`: every collective and every byte of `steps` whole steps.

    The steps are all that the model has done (forward passes by `evaluate` or `unshard` count too, and are
    not predicted). An optimizer step, or `updated()`, ends each. Also held: no more live buffers than the
    rings allow. Raises MismatchError, listing what differs; returns the report of one step.
    """
    if steps < 0 or microbatches < 1:
        raise ValueError(
            f"check: steps={steps}, microbatches={microbatches}; expected whole steps that were done"
        )
    report = summary(model, microbatches=microbatches, sync=sync, norms=norms)
    counted = model.counters
    wrong = []
    for name in COLLECTIVES:
        calls, sent = steps * report.total.calls[name], steps * report.total.sent[name]
        if getattr(counted, name) != calls:
            wrong.append(f"{name}: predicted {calls} calls, counted {getattr(counted, name)}")
        # The counter adds up floats, whose sum is exact but where 2 s / 3 and the like are added.
        if not math.isclose(getattr(counted, f"{name}_bytes"), sent, rel_tol=1e-12):
            wrong.append(
                f"{name}: predicted {sent:.0f} bytes sent, counted {getattr(counted, f'{name}_bytes'):.0f}"
            )
    rings = 2 if model.reshard_after_forward else max(2, len(model.units))
    for kind, most in (("weight", rings), ("grad", 2)):
        peak = getattr(counted, f"peak_{kind}_buffers")
        if peak > most:
            wrong.append(f"full {kind} buffers: at most {most} may live, counted {peak}")
    if wrong:
        raise MismatchError(
            f"{steps} steps of {microbatches} microbatches with {model.strategy.name} on "
            f"{model.size} ranks: " + "; ".join(wrong)
        )
    return report


# --- as text ------------------------------------------------------------------------------------------------

_COLUMNS = ("unit", "parameters", "weights", "gradients", "optimizer", "state", "live", "sent/step")


def human(size: float) -> str:
    """Bytes with three digits: `134.3 MB` (powers of ten, as memory formulae have them)."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size:.0f} B"


def _table(report: Report) -> str:
    setting, total = report.setting, report.total
    rows = [_row(unit) for unit in (*report.units, total)]
    calls = ", ".join(f"{count} {name}" for name, count in total.calls.items() if count) or "no collective"
    mesh = f" as {setting.replicate_size} x {setting.shard_size}" if setting.replicate_size > 1 else ""
    lines = [
        f"{setting.strategy.name} (ZeRO-{setting.strategy.zero}) on "
        f"{setting.shard_size * setting.replicate_size} ranks{mesh}; bytes on each rank",
        *render([_COLUMNS, *rows], rule_before=(1, len(rows))),
        f"one step of {report.microbatches} microbatch(es): {calls}; live in total: what the rings hold",
    ]
    return "\n".join(lines)


def _row(unit: UnitCost) -> tuple[str, ...]:
    sizes = (unit.weights, unit.gradients, unit.optimizer, unit.state, unit.live, unit.bytes_sent)
    return (unit.name, f"{unit.parameters:,}", *map(human, sizes))


def render(rows: Sequence[Sequence[str]], rule_before: Sequence[int] = ()) -> list[str]:
    """Rows as aligned lines: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for number, row in enumerate(rows):
        if number in rule_before:
            lines.append("  ".join("-" * width for width in widths))
        cells = [row[0].ljust(widths[0])] + [
            cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _unit_dict(unit: UnitCost) -> dict[str, Any]:
    fields = dataclasses.asdict(unit)
    del fields["name"]
    return {f"{k}_bytes" if isinstance(v, int) and k != "parameters" else k: v for k, v in fields.items()} | {
        "state_bytes": unit.state,
        "sent_bytes": unit.bytes_sent,
    }

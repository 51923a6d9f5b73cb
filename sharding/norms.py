"""Norms and clipping of sharded gradients. Each rank sees its shards; one all-reduce makes the rest."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .transport import ring_bytes

if TYPE_CHECKING:
    from .engine import ShardedModel

__all__ = ["clip_grad_norm", "clip_grad_value", "grad_norm"]

_SAFE = (1e-280, math.inf)  # sums of powers outside may have lost what the norm is made of
BLOCK = 1 << 16  # elements: a float64 copy of a block stays in the second-level cache


def _sum_of_powers(array: Any, p: float, unit: float) -> Any:
    """Sum of |x / unit| ** p in float64, in blocks: float32 would overflow at 1e19 and lose small terms."""
    if not isinstance(array, np.ndarray):
        wide = array.astype("float64") / unit
        return (abs(wide) ** p).sum()
    total = 0.0
    for start in range(0, array.size, BLOCK):
        block = array[start : start + BLOCK].astype(np.float64)
        if unit != 1:
            block /= unit
        if p == 2:
            total += float(np.dot(block, block))
        else:
            total += float((np.abs(block) ** p).sum())
    return total


def _largest(array: Any) -> Any:
    return abs(array).max().astype("float64") if array.size else 0.0


def grad_norm(model: ShardedModel, p: float) -> float:
    """See ShardedModel.grad_norm. Replicas hold equal gradients: the shard group alone is summed over."""
    if not p > 0:
        raise ValueError(f"grad_norm: p={p!r}; expected a positive number or math.inf")
    grads = [shard.grad for shard in model.shards if shard.trainable and not shard.fresh]
    with np.errstate(all="ignore"):  # infinities and NaN are answers here
        if math.isinf(p):
            return _all_largest(model, grads)
        total = _total(model, sum(_sum_of_powers(grad, p, 1.0) for grad in grads), "sum")
        if not math.isnan(total) and not _SAFE[0] < total < _SAFE[1]:
            # Zero, or powers beyond float64: the norm itself may be a number. All ranks see the same total.
            unit = _all_largest(model, grads)
            if unit == 0 or not math.isfinite(unit):
                return unit
            scaled = _total(model, sum(_sum_of_powers(grad, p, unit) for grad in grads), "sum")
            return unit * scaled ** (1 / p)
        return math.sqrt(total) if p == 2 else total ** (1 / p)


def _all_largest(model: ShardedModel, grads: list[Any]) -> float:
    values = [_largest(grad) for grad in grads]
    # A maximum ignores NaN on the wire: send it as the infinity that it must not hide behind.
    local = math.inf if any(value != value for value in values) else max(values, default=0.0)
    if model.shard_size == 1 and any(value != value for value in values):
        return math.nan
    return _total(model, local, "max")


def _total(model: ShardedModel, value: Any, op: str) -> float:
    """Over the shard group."""
    local = model.runtime.xp.asarray(value, dtype="float64").reshape(1)
    if model.shard_size > 1:
        with model.ending_all_ranks():
            model.mesh.reduce.all_reduce(local, op=op)
        model.counters.count("all_reduce", ring_bytes("all_reduce", 8, model.shard_size))
    return float(local[0])


def clip_grad_norm(model: ShardedModel, max_norm: float, p: float) -> float:
    """See ShardedModel.clip_grad_norm."""
    if not max_norm >= 0:
        raise ValueError(f"clip_grad_norm: max_norm={max_norm!r}; expected a number of at least 0")
    norm = grad_norm(model, p)
    if math.isfinite(norm) and norm > max_norm:
        scale = max_norm / norm
        for shard in model.shards:
            if shard.trainable and not shard.fresh:
                shard.grad *= shard.grad.dtype.type(scale)
    return norm


def clip_grad_value(model: ShardedModel, value: float) -> None:
    """See ShardedModel.clip_grad_value."""
    if not value >= 0:
        raise ValueError(f"clip_grad_value: value={value!r}; expected a number of at least 0")
    for shard in model.shards:
        if shard.trainable and not shard.fresh:
            model.runtime.xp.clip(shard.grad, -value, value, out=shard.grad)

"""Policies: what is sharded, when it is reduced, and in which dtypes. Frozen data, checked when made.

| strategy        | ZeRO | weights           | gradients                      | optimizer |
|-----------------|------|-------------------|--------------------------------|-----------|
| no_shard        | 0    | whole             | whole, all-reduced once a step | whole     |
| shard_optimizer | 1    | whole             | whole, reduce-scattered once   | sharded   |
| shard_grad_op   | 2    | whole             | sharded, each microbatch       | sharded   |
| full_shard      | 3    | sharded, gathered | sharded, each microbatch       | sharded   |
| hybrid_shard    | 3    | as full_shard inside a group of `mesh[1]` ranks; gradients averaged over groups |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .layout import FlatGroup, numpy_dtype

__all__ = ["STRATEGIES", "Dtypes", "MixedPrecision", "Strategy", "strategy_named"]


@dataclass(frozen=True)
class Strategy:
    """One row of the table above."""

    name: str
    zero: int
    shards: bool
    """Weights, gradients or optimizer state are divided over the shard group at all."""
    keeps_weights: bool
    """The whole weights stay in memory between uses."""
    reduces_each: bool
    """Gradients are reduced after each microbatch (else accumulated whole, and reduced once)."""


STRATEGIES = {
    row.name: row
    for row in (
        Strategy("no_shard", 0, shards=False, keeps_weights=True, reduces_each=False),
        Strategy("shard_optimizer", 1, shards=True, keeps_weights=True, reduces_each=False),
        Strategy("shard_grad_op", 2, shards=True, keeps_weights=True, reduces_each=True),
        Strategy("full_shard", 3, shards=True, keeps_weights=False, reduces_each=True),
        Strategy("hybrid_shard", 3, shards=True, keeps_weights=False, reduces_each=True),
    )
}


def strategy_named(name: str | Strategy) -> Strategy:
    """The strategy of that name; ValueError lists them."""
    if isinstance(name, Strategy):
        return name
    if name not in STRATEGIES:
        raise ValueError(f"strategy={name!r} is unknown; use one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


_FLOATS = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of floating-point parameters and gradients. None: as the parameter.

    param
        What the user computes with: the dtype of the arrays that `forward()` gives.
    reduce
        Gradients: the arrays that `backward()` gives, their reduction over ranks and their accumulation.
        None: float32, or float64 for float64 parameters.
    output
        What the user casts a unit's output to; the engine only carries it (`fs.precision.output`).
    gather
        What travels when weights are gathered. None: `param`. Narrower than `param` (gather in bfloat16,
        compute in float32) halves the traffic for libraries that have no arithmetic for 16-bit floats, like
        NumPy.
    master
        What the optimizer updates. None: the parameter's own dtype, which for 16-bit parameters means
        training without float32 masters.
    """

    param: str | None = None
    reduce: str | None = None
    output: str | None = None
    gather: str | None = None
    master: str | None = "float32"

    def __post_init__(self) -> None:
        for field in ("param", "reduce", "output", "gather", "master"):
            value = getattr(self, field)
            if value is not None and value not in _FLOATS:
                raise ValueError(
                    f"MixedPrecision: {field}={value!r}; use one of {', '.join(_FLOATS)}, or None"
                )


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one flat group, after all policies."""

    master: np.dtype
    gather: np.dtype
    compute: np.dtype
    reduce: np.dtype


def is_floating(dtype: np.dtype) -> bool:
    """Whether it is a floating-point type, those of ml_dtypes included (whose NumPy kind is not "f")."""
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))


def dtypes_of(group: FlatGroup, precision: MixedPrecision | None) -> Dtypes:
    """What a group is kept, sent, computed and reduced in. Integers keep their dtype."""
    own = numpy_dtype(group.dtype)
    if not is_floating(own):
        return Dtypes(own, own, own, own)
    wide = np.dtype("float64") if own == np.float64 else np.dtype("float32")
    if precision is None:
        return Dtypes(own, own, own, wide)

    def pick(*names: str | None) -> np.dtype:
        return next((numpy_dtype(name) for name in names if name is not None), own)

    compute = pick(precision.param)
    master = own if own == np.float64 and precision.master == "float32" else pick(precision.master)
    reduce = numpy_dtype(precision.reduce) if precision.reduce is not None else wide
    return Dtypes(master, pick(precision.gather, precision.param), compute, reduce)

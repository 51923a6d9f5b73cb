"""Fully sharded data parallelism over plain arrays: weights, gradients and optimizer state over the ranks.

>>> model = fully_shard(params, comm, units=["embed", "blocks.*", "head"])        # doctest: +SKIP
>>> with model.microbatch():                                                     # doctest: +SKIP
...     for unit, layer in zip(model, layers):
...         with unit.forward() as w:
...             h = layer.forward(w, h)

It sees `pynccl` through its public face alone, and any communicator with the protocol of `sharding.Comm`
will do.
"""

from .checkpoint import (
    CheckpointError,
    DifferentModelError,
    Loaded,
    NoCheckpointError,
    SaveHandle,
    load,
    save,
    save_async,
    saved_steps,
)
from .comm import Comm
from .engine import PhaseError, ShardedModel
from .export import export_safetensors
from .layout import Layout, by_layer, by_size
from .optim import SGD, Adam, AdamW, Lion, Optimizer
from .policy import STRATEGIES, MixedPrecision, Strategy
from .scaling import DynamicLossScale, StaticLossScale, token_scale, total_tokens
from .schedules import constant, cosine, linear_warmup, step_decay
from .start import fully_shard
from .trace import Tracer
from .transport import Way
from .unit import Shard, Unit
from .updates import Rule

__all__ = [
    "SGD",
    "STRATEGIES",
    "Adam",
    "AdamW",
    "CheckpointError",
    "Comm",
    "DifferentModelError",
    "DynamicLossScale",
    "Layout",
    "Lion",
    "Loaded",
    "MixedPrecision",
    "NoCheckpointError",
    "Optimizer",
    "PhaseError",
    "Rule",
    "SaveHandle",
    "Shard",
    "ShardedModel",
    "StaticLossScale",
    "Strategy",
    "Tracer",
    "Unit",
    "Way",
    "by_layer",
    "by_size",
    "constant",
    "cosine",
    "export_safetensors",
    "fully_shard",
    "linear_warmup",
    "load",
    "save",
    "save_async",
    "saved_steps",
    "step_decay",
    "token_scale",
    "total_tokens",
]

"""Fully sharded data parallelism over plain arrays: weights, gradients and optimizer state over the ranks.

>>> model = fully_shard(params, comm, units=["embed", "blocks.*", "head"])        # doctest: +SKIP
>>> with model.microbatch():                                                     # doctest: +SKIP
...     for unit, layer in zip(model, layers):
...         with unit.forward() as w:
...             h = layer.forward(w, h)

It sees `pynccl` through its public face alone, and any communicator with the protocol of `sharding.Comm`
will do.
"""

from .comm import Comm
from .engine import PhaseError, ShardedModel
from .layout import Layout, by_size
from .policy import STRATEGIES, MixedPrecision, Strategy
from .start import fully_shard
from .unit import Shard, Unit

__all__ = [
    "STRATEGIES",
    "Comm",
    "Layout",
    "MixedPrecision",
    "PhaseError",
    "Shard",
    "ShardedModel",
    "Strategy",
    "Unit",
    "by_size",
    "fully_shard",
]

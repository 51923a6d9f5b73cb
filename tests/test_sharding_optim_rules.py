"""Optimizers of one's own, and what every rule must leave as it is."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from optim_ranks import ONES, PARAMS, alone, flat, give, weights  # type: ignore[import-not-found]
from sharding_ranks import each_n  # type: ignore[import-not-found]

from pynccl.testing import run_ranks
from sharding import Optimizer, Rule, fully_shard
from sharding.blocks import BLOCK_BYTES, HostUpdater
from sharding.layout import pieces
from sharding.updates import RULES


def _signed(data: Any, grad: Any, state: Any, hyper: Any, step: int) -> None:
    state["momentum"] += grad
    np.sign(state["momentum"], out=state["change"])
    state["change"] *= hyper["lr"] * hyper["strength"]
    data -= state["change"]


SIGN = Rule("Sign", _signed, defaults={"strength": 1.0}, slots=("momentum",), temporaries=("change",))


@each_n
def test_an_optimizer_of_ones_own_is_a_function_and_a_declaration(n: int) -> None:
    def rank(comm: Any) -> Any:
        model = fully_shard(PARAMS, comm, reduce_op="sum")
        opt = Optimizer(model, SIGN, lr=0.5, groups={"embed": {"strength": 2.0}})
        for _ in range(2):
            give(model, ONES)
            opt.step()
        assert opt.describe()["kind"] == "Sign"
        found = weights(model)
        model.close()
        return found

    for found in run_ranks(n, rank, library="host"):
        for name, array in flat(PARAMS):
            assert np.array_equal(found[name], array - (2.0 if name == "embed" else 1.0))


def test_a_rule_cannot_write_to_the_gradient() -> None:
    def greedy(data: Any, grad: Any, state: Any, hyper: Any, step: int) -> None:
        grad *= 0

    def rank(comm: Any) -> None:
        model = fully_shard(PARAMS, comm)
        give(model, ONES)
        with pytest.raises(ValueError, match="read-only"):
            Optimizer(model, Rule("Greedy", greedy), lr=0.1).step()

    alone(rank)


@pytest.mark.parametrize("n", (2, 3, 4))
def test_padding_is_zero_and_stays_zero_whatever_the_rule(n: int) -> None:
    def drift(data: Any, grad: Any, state: Any, hyper: Any, step: int) -> None:
        data += 1
        state["count"] += 1

    def rank(comm: Any) -> None:
        model = fully_shard({"w": np.zeros(5, np.float32)}, comm)
        opt = Optimizer(model, Rule("Drift", drift, slots=("count",)), lr=0.1)
        give(model, {"w": 1})
        opt.step()
        for shard in model.shards:
            owned = sum(p.shard_stop - p.shard_start for p in pieces(shard.group, model.shard_rank))
            assert np.array_equal(shard.data, [1.0] * owned + [0.0] * (shard.data.size - owned))
            assert np.array_equal(opt.state[shard.key]["count"], shard.data)
        model.close()

    run_ranks(n, rank, library="host")


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.kind)
def test_an_update_allocates_no_full_size_memory(rule: Rule) -> None:
    size = 16 * BLOCK_BYTES // 4 + 3
    updater = HostUpdater(rule)
    data, grad = np.ones(size, np.float32), np.ones(size, np.float32)
    slots = {slot: updater.zeros(size, data.dtype) for slot in rule.slots}
    hyper = {"lr": 0.1, **rule.defaults, "weight_decay": 0.1}
    numbers = rule.prepare(hyper, 1) if rule.prepare else hyper
    updater.update(data, grad, slots, numbers, 1)  # makes the scratch memory
    tracemalloc.start()
    updater.update(data, grad, slots, numbers, 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < BLOCK_BYTES // 4
    assert np.all(data == data[0])  # the last, short block like the others

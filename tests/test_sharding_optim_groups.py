"""Hyper-parameters by pattern, schedules, and the errors that name a wrong one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from optim_ranks import (  # type: ignore[import-not-found]
    ONES,
    PARAMS,
    alone,
    flat,
    give,
    give_all,
    same_bits,
    weights,
)
from sharding_ranks import each_n  # type: ignore[import-not-found]

from pynccl.testing import run_ranks
from sharding import SGD, AdamW, Lion, Optimizer, fully_shard
from sharding.layout import pieces
from sharding.updates import ADAMW

WRONG: dict[str, Any] = {"lr": "fast", "betas": 0.9, "seed": 0.5}


@each_n
def test_patterns_set_hyper_parameters_by_name_and_later_ones_win(n: int) -> None:
    def rank(comm: Any) -> Any:
        model = fully_shard(PARAMS, comm, units=["blocks.*"], reduce_op="sum")
        opt = SGD(model, lr=1.0, groups={"*.bias": {"lr": 2.0}, "head.*": {"lr": 4.0}, "embed": {"lr": 0.5}})
        give_all(model)
        opt.step()
        rates = {name: opt.hyper(name)["lr"] for name in ONES}
        moved = by_piece(model)
        model.close()
        return rates, moved

    for rates, moved in run_ranks(n, rank, library="host"):
        expected = {name: 2.0 if name.endswith("bias") else 1.0 for name in ONES}
        expected |= {"head.bias": 4.0, "embed": 0.5}
        assert rates == expected
        for name, start, values in moved:
            original = dict(flat(PARAMS))[name].reshape(-1)[start : start + values.size]
            assert np.array_equal(values, original - np.float32(expected[name]))


def by_piece(model: Any) -> list[tuple[str, int, np.ndarray]]:
    """(name, first element, values) of what this rank owns."""
    return [
        (piece.name, piece.param_start, np.array(shard.data[piece.shard_start : piece.shard_stop]))
        for shard in model.shards
        for piece in pieces(shard.group, model.shard_rank)
    ]


def test_adjacent_parameters_with_equal_numbers_are_one_segment() -> None:
    def rank(comm: Any) -> None:
        model = fully_shard(PARAMS, comm)
        assert [len(found) for found in AdamW(model)._segments.values()] == [1]
        opt = AdamW(model, groups={"blocks.0.w": {"lr": 1.0}})
        assert [len(found) for found in opt._segments.values()] == [3]

    alone(rank)


@pytest.mark.parametrize("n", (1, 3))
def test_a_pattern_that_takes_nothing_is_named_on_every_rank(n: int) -> None:
    def rank(comm: Any) -> None:
        model = fully_shard(PARAMS, comm)
        with pytest.raises(
            ValueError, match=r"AdamW: .*pattern '\*\.biass' takes no parameter; there are embed"
        ):
            AdamW(model, groups={"*.biass": {"weight_decay": 0.0}})
        model.close()

    run_ranks(n, rank, library="host")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda m: AdamW(m, groups={"*": {"momentum": 0.9}}),
            TypeError,
            r"groups\['\*'\]: 'momentum' is not one",
        ),
        (lambda m: AdamW(m, lr=-1.0), ValueError, r"AdamW: lr is -1.0; expected a finite number"),
        (lambda m: Optimizer(m, ADAMW, lr=WRONG["lr"]), ValueError, r"lr is 'fast'"),
        (lambda m: AdamW(m, betas=(0.9, 1.0)), ValueError, r"betas=\(0.9, 1.0\); expected two numbers"),
        (lambda m: AdamW(m, weight_decay=-0.1), ValueError, r"weight_decay=-0.1"),
        (lambda m: Lion(m, betas=WRONG["betas"]), ValueError, r"Lion: betas=0.9"),
        (lambda m: SGD(m, 0.1, nesterov=True), ValueError, r"nesterov=True with momentum=0.0"),
        (
            lambda m: SGD(m, 0.1, groups={"embed": {"momentum": -1}}),
            ValueError,
            r"groups\['embed'\]: momentum=-1",
        ),
        (
            lambda m: Optimizer(m, ADAMW, lr=0.1, beta=3),
            TypeError,
            r"'beta' is not one of .*: lr, betas, eps",
        ),
        (lambda m: AdamW(m, stochastic_rounding=1), ValueError, r"that it updates are float32"),
        (lambda m: AdamW(m, stochastic_rounding=WRONG["seed"]), TypeError, r"expected a seed"),
    ],
)
def test_wrong_hyper_parameters_are_named(make: Any, error: type[Exception], message: str) -> None:
    def rank(comm: Any) -> None:
        with pytest.raises(error, match=message):
            make(fully_shard(PARAMS, comm))

    alone(rank)


def test_a_parameter_that_is_not_floating_point_is_left_alone() -> None:
    def rank(comm: Any) -> None:
        params = {"w": np.ones(3, np.float32), "position": np.arange(3)}
        model = fully_shard(params, comm)
        assert list(AdamW(model).state) == [s.key for s in model.shards if s.trainable]

    alone(rank)


def test_a_tied_parameter_goes_by_all_its_names() -> None:
    def rank(comm: Any) -> None:
        shared = np.ones((2, 2), np.float32)
        model = fully_shard({"embed": shared, "head": {"w": shared}, "b": np.ones(2, np.float32)}, comm)
        opt = AdamW(model, groups={"head.*": {"lr": 5.0}})
        assert opt.hyper("embed")["lr"] == 5.0 and opt.hyper("b")["lr"] == 1e-3

    alone(rank)


@pytest.mark.parametrize("n", (1, 3))
def test_a_schedule_gets_the_number_of_steps_done(n: int) -> None:
    def rank(comm: Any) -> Any:
        asked = []

        def schedule(step: int) -> float:
            asked.append(step)
            return 2.0**-step

        model = fully_shard({"w": np.full(5, 8.0, np.float32)}, comm, reduce_op="sum")
        opt = SGD(model, lr=schedule)
        for _ in range(3):
            give(model, {"w": 1})
            opt.step()
        assert asked == [0, 1, 2]
        assert opt.lr == 0.125
        found = weights(model)["w"]
        model.close()
        return found

    for found in run_ranks(n, rank, library="host"):
        assert np.array_equal(found, np.full(5, 8.0 - 1.75, np.float32))


def test_a_schedule_that_gives_nonsense_is_named_before_anything_changes() -> None:
    def rank(comm: Any) -> None:
        model = fully_shard(PARAMS, comm)

        def broken(step: int) -> float:
            return float("nan")

        opt = AdamW(model, lr=1e-3, groups={"head.bias": {"lr": broken}})
        give(model, ONES)
        before = weights(model)
        with pytest.raises(ValueError, match=r"broken\(0\) returned nan"):
            opt.step()
        assert same_bits(weights(model), before) and opt.steps == 0

    alone(rank)


def test_the_learning_rate_may_be_changed_between_steps() -> None:
    def rank(comm: Any) -> None:
        model = fully_shard({"w": np.zeros(3, np.float32)}, comm)
        opt = SGD(model, lr=1.0)
        opt.groups[0].hyper["lr"] = 0.25
        give(model, {"w": 1})
        opt.step()
        assert np.array_equal(weights(model)["w"], np.full(3, -0.25, np.float32))

    alone(rank)

"""What a step changes, and what it leaves alone: frozen parameters, non-finite gradients, other dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from optim_ranks import (  # type: ignore[import-not-found]
    ONES,
    PARAMS,
    alone,
    give,
    give_all,
    same_bits,
    weights,
)
from sharding_ranks import each_n  # type: ignore[import-not-found]

from pynccl.testing import run_ranks
from sharding import AdamW, PhaseError, fully_shard


def test_a_fresh_gradient_leaves_weights_state_and_step_count_alone() -> None:
    def rank(comm: Any) -> None:
        params = {"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)}
        model = fully_shard(params, comm, units=["a", "b"])
        opt = AdamW(model, lr=0.1)
        first, second = model.shards
        give(model, {"a": 1, "b": 1})
        second.fresh = True  # as if no backward had reached it
        opt.step()
        assert np.array_equal(second.data, np.ones(4)) and not opt.state[second.key]["exp_avg"].any()
        moved = first.data.copy()
        assert not np.array_equal(moved, np.ones(4))
        assert opt.describe()["begun"] == {"b": 1}
        give(model, {"a": 1, "b": 1})
        opt.step()
        assert np.array_equal(second.data, moved)  # its own first step
        assert opt.steps == 2

    alone(rank)


def test_a_step_without_gradients_is_a_clear_error() -> None:
    def rank(comm: Any) -> None:
        model = fully_shard(PARAMS, comm)
        opt = AdamW(model)
        with pytest.raises(PhaseError, match=r"step\(\): nothing has been accumulated since zero_grad"):
            opt.step()
        give(model, ONES)
        assert opt.step()
        model.zero_grad()
        with pytest.raises(PhaseError, match="nothing has been accumulated"):
            opt.step()

    alone(rank)


def test_a_step_inside_a_microbatch_is_a_clear_error() -> None:
    def rank(comm: Any) -> None:
        model = fully_shard(PARAMS, comm)
        opt = AdamW(model)
        with pytest.raises(PhaseError, match=r"step\(\) inside forward of a microbatch"), model.microbatch():
            opt.step()
        assert opt.steps == 0

    alone(rank)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@each_n
def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all(n: int, bad: float) -> None:
    def rank(comm: Any) -> None:
        model = fully_shard(PARAMS, comm, units=["blocks.*"], reduce_op="sum")
        opt = AdamW(model, lr=0.1)
        give_all(model)
        assert opt.step(check_finite=True)
        data = [shard.data.copy() for shard in model.shards]
        state = [array.copy() for slots in opt.state.values() for array in slots.values()]
        model.zero_grad()
        with model.microbatch():
            for unit in model:
                with unit.forward():
                    pass
            with model["blocks.1"].backward() as (_, grad):
                if model.rank == model.size - 1:
                    grad["bias"][1] = bad
        assert opt.step(check_finite=True) is False
        assert opt.steps == 1
        assert all(np.array_equal(s.data, d) for s, d in zip(model.shards, data, strict=True))
        now = [array for slots in opt.state.values() for array in slots.values()]
        assert all(np.array_equal(a, b) for a, b in zip(now, state, strict=True))
        give_all(model)
        assert opt.step(check_finite=True)
        model.close()

    run_ranks(n, rank, library="host")


def test_frozen_parameters_have_no_state_and_do_not_move() -> None:
    def rank(comm: Any) -> None:
        model = fully_shard(PARAMS, comm, frozen=["embed"], reduce_op="sum")
        opt = AdamW(model, lr=0.1)
        give(model, ONES)
        opt.step()
        assert np.array_equal(weights(model)["embed"], PARAMS["embed"])
        assert opt.state_bytes == sum(2 * s.data.nbytes for s in model.shards if s.trainable)
        model.close()

    run_ranks(2, rank, library="host")


@each_n
def test_mixed_dtypes_in_a_unit_keep_their_dtypes_and_float32_state(n: int) -> None:
    def rank(comm: Any) -> Any:
        params = {
            "half": np.ones(5, np.float16),
            "single": np.ones(5, np.float32),
            "double": np.ones((), np.float64),
            "brain": np.ones(5, ml_dtypes.bfloat16),
            "none": np.ones((0, 3), np.float32),
        }
        model = fully_shard(params, comm, reduce_op="sum")
        opt = AdamW(model, lr=0.5, weight_decay=0.0)
        give(model, dict.fromkeys(params, 1))
        opt.step()
        kinds = {s.data.dtype.name: opt.state[s.key]["exp_avg"].dtype.name for s in model.shards}
        assert kinds == dict.fromkeys(("float16", "float32", "bfloat16"), "float32") | {"float64": "float64"}
        found = weights(model)
        model.close()
        return found

    for found in run_ranks(n, rank, library="host"):
        for name in ("half", "single", "double", "brain"):
            np.testing.assert_allclose(
                found[name].astype(np.float64), np.full(found[name].shape, 0.5), rtol=1e-6
            )


@each_n
def test_state_goes_with_its_parameters_through_freeze_and_unfreeze(n: int) -> None:
    """Of three parameters "a" trains always, "b" is frozen from the third step on, "c" trains from there."""

    def rank(comm: Any) -> Any:
        params = {name: np.full((3, 2), 4.0, np.float32) for name in "abc"}
        model = fully_shard(params, comm, frozen=["c"], reduce_op="sum")
        opt = AdamW(model, lr=0.1, weight_decay=0.0, groups={"a": {"lr": 0.2}})
        for step in range(4):
            if step == 2:
                opt.groups[0].hyper["lr"] = 0.4  # stays what it was set to
                model.freeze("b")
                model.unfreeze("c")
            give(model, {"a": 1 + step, "b": 1 + step, "c": 1 + step % 2})
            opt.step()
        assert opt.describe()["begun"] == {"c": 2}
        assert [opt.hyper(name)["lr"] for name in "ac"] == [0.4, 0.1]
        found = weights(model)
        model.close()
        return found

    def adam(lrs: list[float], grads: list[int]) -> float:
        w, m, v = 4.0, 0.0, 0.0
        for step, (lr, g) in enumerate(zip(lrs, grads, strict=True), 1):
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            w -= lr * m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
        return w

    expected = {
        "a": adam([0.2, 0.2, 0.4, 0.4], [1, 2, 3, 4]),
        "b": adam([0.1, 0.1], [1, 2]),
        "c": adam([0.1, 0.1], [1, 2]),
    }
    for found in run_ranks(n, rank, library="host"):
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-6)


def test_offload_changes_nothing_in_host_memory() -> None:
    def steps(comm: Any, **options: Any) -> Any:
        model = fully_shard(PARAMS, comm, reduce_op="sum")
        opt = AdamW(model, lr=0.1, **options)
        give(model, ONES)
        opt.step()
        return weights(model)

    plain, offloaded = alone(steps), alone(lambda comm: steps(comm, offload=True))
    assert same_bits(plain, offloaded)


def test_listeners_hear_of_each_units_update() -> None:
    def rank(comm: Any) -> None:
        model = fully_shard(PARAMS, comm, units=["blocks.*"])
        heard = []
        model.on_event(lambda name, unit, start, stop, detail: heard.append((name, unit, stop >= start)))
        opt = AdamW(model)
        give_all(model)
        opt.step()
        updates = [event for event in heard if event[0] == "optimizer"]
        assert updates == [("optimizer", shard.unit, True) for shard in model.shards]

    alone(rank)

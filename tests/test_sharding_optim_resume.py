"""What an optimizer says of itself, restored into another one."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from optim_ranks import ONES, PARAMS, alone, give, same_bits, weights  # type: ignore[import-not-found]
from sharding_ranks import each_n  # type: ignore[import-not-found]

from pynccl.testing import run_ranks
from sharding import SGD, Adam, AdamW, fully_shard

HYPER: dict[str, Any] = {"lr": 0.1, "groups": {"*.bias": {"weight_decay": 0.0, "lr": 0.2}}}


def _continue(comm: Any, remake: bool, fresh: dict[str, Any]) -> Any:
    """Two steps, and two more: with the same optimizer, or with a new one that restores the description."""
    model = fully_shard(PARAMS, comm, reduce_op="sum")
    opt = AdamW(model, **HYPER)
    for step in range(4):
        if step == 2 and remake:
            saved = json.loads(json.dumps(opt.describe()))
            state = {key: {slot: a.copy() for slot, a in slots.items()} for key, slots in opt.state.items()}
            opt = AdamW(model, **fresh)
            opt.restore(saved)
            for key, slots in opt.state.items():
                for slot, array in slots.items():
                    array[...] = state[key][slot]
            assert opt.steps == 2
        give(model, dict.fromkeys(ONES, step + 1))
        opt.step()
    described = opt.describe()
    found = weights(model)
    model.close()
    return found, described


@each_n
def test_restored_groups_and_steps_continue_with_the_same_bits(n: int) -> None:
    through = run_ranks(n, _continue, False, {}, library="host")[0]
    for found, described in run_ranks(n, _continue, True, {"lr": 7.0}, library="host"):
        assert same_bits(found, through[0])
        assert described == through[1]


def test_restoring_what_does_not_fit_names_it_and_changes_nothing() -> None:
    def rank(comm: Any) -> None:
        model = fully_shard(PARAMS, comm)
        saved = AdamW(model, **HYPER).describe() | {"steps": 9}
        opt = Adam(model)
        with pytest.raises(ValueError, match=r"has kind 'AdamW' and this one 'Adam'"):
            opt.restore(saved)
        with pytest.raises(ValueError, match=r"slots \['momentum_buffer'\] and this one \[\]"):
            SGD(model, 0.1).restore(SGD(model, 0.1, momentum=0.9).describe())
        other = AdamW(fully_shard({"embed": PARAMS["embed"]}, comm))
        with pytest.raises(ValueError, match=r"updated 'blocks.0.w', which this model does not have"):
            other.restore(saved)
        assert other.steps == 0 and other.hyper("embed")["lr"] == 1e-3

    alone(rank)


def test_a_saved_schedule_asks_for_the_schedule_again() -> None:
    def rank(comm: Any) -> None:
        model = fully_shard(PARAMS, comm)

        def halving(step: int) -> float:
            return 0.5**step

        saved = json.loads(json.dumps(AdamW(model, lr=halving).describe())) | {"steps": 3}
        assert saved["groups"][0]["hyper"]["lr"] == {"schedule": "halving", "value": 1.0}
        with pytest.raises(ValueError, match=r"schedule halving.*lr=0.001; pass a schedule"):
            AdamW(model).restore(saved)
        opt = AdamW(model, lr=halving)
        opt.restore(saved)
        assert opt.lr == 0.125
        opt = AdamW(model, lr=0.3)
        opt.restore(saved, hyper=False)
        assert opt.lr == 0.3 and opt.steps == 3

    alone(rank)


def test_a_parameter_unfrozen_on_resume_begins_at_its_first_step() -> None:
    def rank(comm: Any) -> None:
        frozen = fully_shard(PARAMS, comm, frozen=["embed"])
        saved = AdamW(frozen, lr=0.1).describe() | {"steps": 1000}
        model = fully_shard(PARAMS, comm)
        opt = AdamW(model, lr=0.1, weight_decay=0.0)
        opt.restore(saved)
        give(model, ONES)
        opt.step()
        moved = weights(model)
        # Adam's first step is lr, whatever the gradient; the thousandth, from empty moments, thrice that.
        np.testing.assert_allclose(PARAMS["embed"] - moved["embed"], 0.1, rtol=1e-5)
        assert opt.describe()["begun"] == {"embed": 1000}

    alone(rank)

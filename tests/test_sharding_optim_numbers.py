"""What optimizers compute: the numbers of torch and of papers, with the same bits on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from optim_ranks import alone, give, same_bits, weights  # type: ignore[import-not-found]
from sharding_ranks import each_n  # type: ignore[import-not-found]

from pynccl.testing import run_ranks
from sharding import SGD, Adam, AdamW, Lion, MixedPrecision, fully_shard

with np.load(Path(__file__).with_name("fixtures") / "torch_optimizers.npz") as file:
    FIXTURE = dict(file)  # read now: ranks would share the position in an open file
NAMES = ("w", "bias", "scale")

# The fixture's cases: see make_torch_optimizers.py.
TORCH: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (AdamW, {"lr": 1e-2, "groups": {"bias": {"weight_decay": 0.0}}}),
    "adamw_betas": (
        AdamW,
        {
            "lr": 3e-3,
            "betas": (0.8, 0.95),
            "eps": 1e-6,
            "weight_decay": 0.1,
            "groups": {"bias": {"lr": 1e-3}},
        },
    ),
    "adam": (Adam, {"lr": 1e-2}),
    "adam_l2": (Adam, {"lr": 1e-2, "weight_decay": 0.1, "groups": {"bias": {"weight_decay": 0.0}}}),
    "sgd": (SGD, {"lr": 1e-2}),
    "sgd_l2": (SGD, {"lr": 1e-2, "weight_decay": 0.1, "groups": {"bias": {"lr": 1e-3}}}),
    "sgd_momentum": (SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
    "sgd_nesterov": (
        SGD,
        {
            "lr": 1e-2,
            "momentum": 0.9,
            "nesterov": True,
            "weight_decay": 0.01,
            "groups": {"bias": {"weight_decay": 0.0}},
        },
    ),
}


def fixture(what: str) -> dict[str, np.ndarray]:
    return {name: FIXTURE[f"{what}/{name}"] for name in NAMES}


def steps_of_torch(comm: Any, case: str, **options: Any) -> dict[int, dict[str, np.ndarray]]:
    optimizer, hyper = TORCH[case]
    model = fully_shard(fixture("start"), comm, reduce_op="sum", **options)
    opt = optimizer(model, **hyper)
    grads, found = fixture("grad"), {}
    for step in range(50):
        give(model, {name: grads[name][step] for name in NAMES})
        assert opt.step()
        if step + 1 in FIXTURE["kept"]:
            found[step + 1] = weights(model)
    assert opt.steps == 50
    model.close()
    return found


@each_n
@pytest.mark.parametrize("case", TORCH)
def test_the_numbers_are_those_of_torch_after_50_steps(case: str, n: int) -> None:
    for found in run_ranks(n, steps_of_torch, case, library="host"):
        for step, params in found.items():
            for name in NAMES:
                expected = FIXTURE[f"{case}/{step}/{name}"]
                np.testing.assert_allclose(params[name], expected, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("n", "options"),
    [
        (2, {"strategy": "no_shard"}),
        (3, {"strategy": "shard_optimizer"}),
        (3, {"strategy": "shard_grad_op"}),
        (4, {"strategy": "hybrid_shard", "mesh": (2, 2)}),
        (4, {"units": ["w", "bias", "scale"]}),
    ],
)
def test_every_strategy_and_number_of_ranks_gives_the_same_bits(n: int, options: dict[str, Any]) -> None:
    alone = run_ranks(1, steps_of_torch, "adamw", library="host")[0]
    for found in run_ranks(n, lambda comm: steps_of_torch(comm, "adamw", **options), library="host"):
        assert all(same_bits(found[step], alone[step]) for step in alone)


@each_n
def test_lion_is_the_papers_formula_in_float64(n: int) -> None:
    rng = np.random.default_rng(7)
    start = {"a": rng.standard_normal((3, 5)), "b": rng.standard_normal(4)}
    grads = [{name: rng.standard_normal(array.shape) for name, array in start.items()} for _ in range(20)]
    expected = {name: array.copy() for name, array in start.items()}
    average = {name: np.zeros_like(array) for name, array in start.items()}
    for grad in grads:
        for name, w in expected.items():
            m, g = average[name], grad[name]
            w -= 0.01 * (np.sign(0.9 * m + 0.1 * g) + 0.1 * w)
            m[...] = 0.99 * m + 0.01 * g

    def rank(comm: Any) -> Any:
        model = fully_shard(start, comm, reduce_op="sum")
        opt = Lion(model, lr=0.01, weight_decay=0.1)
        for grad in grads:
            give(model, grad)
            opt.step()
        assert all(slots["exp_avg"].dtype == np.float64 for slots in opt.state.values())
        found = weights(model)
        model.close()
        return found

    for found in run_ranks(n, rank, library="host"):
        for name in start:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-13, atol=1e-14)


MASTER_FREE = MixedPrecision(param="bfloat16", master=None)


def _master_free(comm: Any, seed: int | None, units: Any = None, steps: int = 40) -> dict[str, np.ndarray]:
    params = {
        "a": np.ones((50, 41), ml_dtypes.bfloat16),
        "b": np.ones(77, ml_dtypes.bfloat16),
    }
    model = fully_shard(params, comm, units=units, precision=MASTER_FREE, reduce_op="sum")
    opt = SGD(model, lr=2.0**-12, stochastic_rounding=seed)
    for _ in range(steps):
        give(model, {"a": -1, "b": -1})
        opt.step()
    found = {name: array.view(np.uint16) for name, array in weights(model).items()}
    model.close()
    return found


def test_small_updates_of_bfloat16_are_lost_to_nearest_and_count_on_average_stochastically() -> None:
    lost = alone(lambda comm: _master_free(comm, None))
    assert np.all(lost["a"].view(ml_dtypes.bfloat16) == 1)
    kept = alone(lambda comm: _master_free(comm, 5))["a"].view(ml_dtypes.bfloat16).astype(np.float64)
    # A sum of 40 draws of 2**-7 with probability 2**-5: mean 40 * 2**-12, deviation below 2**-7 * 1.12.
    assert abs(kept.mean() - 1 - 40 * 2.0**-12) < 5 * 2.0**-7 * 1.12 / np.sqrt(kept.size)


@pytest.mark.parametrize("n", (2, 3, 4))
@pytest.mark.parametrize("units", [None, ["a", "b"]])
def test_stochastic_rounding_gives_the_same_bits_on_any_number_of_ranks(n: int, units: Any) -> None:
    expected = run_ranks(1, _master_free, 5, library="host")[0]
    assert not same_bits(expected, run_ranks(1, _master_free, 6, library="host")[0])
    for found in run_ranks(n, _master_free, 5, units, library="host"):
        assert same_bits(found, expected)

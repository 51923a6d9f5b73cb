"""What optimizers do to shards: the numbers of torch, on any number of ranks, and what is left alone."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pynccl.testing import run_ranks
from sharding import SGD, Adam, AdamW, Lion, MixedPrecision, Optimizer, PhaseError, Rule, fully_shard
from sharding.blocks import BLOCK_BYTES, HostUpdater
from sharding.layout import pieces
from sharding.updates import ADAMW, RULES

RANKS = (1, 2, 3, 4)
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


def give(model: Any, grads: dict[str, Any]) -> None:
    """A microbatch whose summed gradients are exactly `grads`: rank 0 gives them, the others give zeros."""
    model.zero_grad()
    with model.microbatch():
        for unit in model:
            with unit.forward():
                pass
        for unit in reversed(model):
            with unit.backward():
                if model.rank == 0:
                    for name, view in unit.gradient_views().items():
                        view[...] = grads[name]


def weights(model: Any) -> dict[str, np.ndarray]:
    """All parameters, whole, in the dtype that is gathered."""
    found = {}
    with model.evaluate():
        for unit in model:
            with unit.forward():
                found.update({name: np.array(view) for name, view in unit.weight_views().items()})
    return found


def same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


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


@pytest.mark.parametrize("n", RANKS)
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


@pytest.mark.parametrize("n", RANKS)
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


# --- groups and schedules -----------------------------------------------------------------------------------

WRONG: dict[str, Any] = {"lr": "fast", "betas": 0.9, "seed": 0.5}

PARAMS: dict[str, Any] = {
    "embed": np.arange(12, dtype=np.float32).reshape(4, 3),
    "blocks": [{"w": np.ones((3, 3), np.float32), "bias": np.ones(3, np.float32)} for _ in range(2)],
    "head": {"bias": np.ones(5, np.float32)},
}
ONES: dict[str, Any] = {
    "embed": 1,
    "blocks.0.w": 1,
    "blocks.0.bias": 1,
    "blocks.1.w": 1,
    "blocks.1.bias": 1,
    "head.bias": 1,
}


@pytest.mark.parametrize("n", RANKS)
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


def flat(tree: Any) -> list[tuple[str, np.ndarray]]:
    from sharding.tree import flatten

    return list(flatten(tree))


def give_all(model: Any) -> None:
    """Gradients of 1 for everything, the root unit's included."""
    model.zero_grad()
    with model.microbatch():
        for unit in model:
            with unit.forward():
                pass
        for unit in reversed(model):
            with unit.backward():
                one_on_rank_0(model, unit)
        if model.root is not None:
            with model.root.backward():
                one_on_rank_0(model, model.root)


def one_on_rank_0(model: Any, unit: Any) -> None:
    for view in unit.gradient_views().values():
        view[...] = model.rank == 0


def by_piece(model: Any) -> list[tuple[str, int, np.ndarray]]:
    """(name, first element, values) of what this rank owns."""
    return [
        (piece.name, piece.param_start, np.array(shard.data[piece.shard_start : piece.shard_stop]))
        for shard in model.shards
        for piece in pieces(shard.group, model.shard_rank)
    ]


def alone(fn: Any) -> Any:
    return run_ranks(1, fn, library="host", processes=False)[0]


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


# --- rules of one's own -------------------------------------------------------------------------------------


def _signed(data: Any, grad: Any, state: Any, hyper: Any, step: int) -> None:
    state["momentum"] += grad
    np.sign(state["momentum"], out=state["change"])
    state["change"] *= hyper["lr"] * hyper["strength"]
    data -= state["change"]


SIGN = Rule("Sign", _signed, defaults={"strength": 1.0}, slots=("momentum",), temporaries=("change",))


@pytest.mark.parametrize("n", RANKS)
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


# --- what is left alone -------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("n", RANKS)
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


@pytest.mark.parametrize("n", RANKS)
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


@pytest.mark.parametrize("n", RANKS)
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


# --- master-free training -----------------------------------------------------------------------------------

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


# --- checkpoints --------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("n", RANKS)
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

"""autograd, functions of whole trees and recomputed activations give the unsharded model's gradients."""

from __future__ import annotations

import sys
import weakref
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import autograd
import autograd.numpy as anp
import numpy as np
import pytest

from pynccl.testing import RankError, run_ranks
from sharding import MixedPrecision, PhaseError, adapters, fully_shard
from sharding.layout import pieces
from sharding.recompute import Layer, checkpointed
from sharding.tree import flatten

RANKS = (1, 2, 3, 4)
UNITS = ["embed", "blocks.*", "head"]
WAYS: dict[str, dict[str, Any]] = {
    "full_shard": {},
    "kept after forward": {"reshard_after_forward": False},
    "poisoned": {"debug": True},
    "no_shard": {"strategy": "no_shard"},
    "shard_grad_op": {"strategy": "shard_grad_op"},
}


def parameters() -> dict[str, Any]:
    """A tied embedding, three blocks, a scalar, and one parameter that no unit's pattern takes."""
    rng = np.random.default_rng(0)
    embed = rng.standard_normal((5, 6))
    return {
        "embed": embed,
        "blocks": [{"w": rng.standard_normal((6, 6)), "b": rng.standard_normal(6)} for _ in range(3)],
        "head": {"w": embed, "s": np.array(1.5)},
        "temperature": np.array([0.5]),
    }


def whole_batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.integers(0, 5, 12), rng.standard_normal((12, 5))


def part(comm: Any) -> tuple[np.ndarray, np.ndarray]:
    x, t = whole_batch()
    return x[comm.rank :: comm.size], t[comm.rank :: comm.size]


def loss_of_tree(p, x, t):
    h = p["embed"][x]
    for block in p["blocks"]:
        h = anp.tanh(anp.dot(h, block["w"]) + block["b"])
    y = p["head"]["s"] * anp.dot(h, p["head"]["w"].T)
    return anp.mean((y - t) ** 2) * p["temperature"][0]


def reference() -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of one rank with everything."""
    loss, tree = autograd.value_and_grad(loss_of_tree)(parameters(), *whole_batch())
    gradients = {name: np.asarray(leaf) for name, leaf in flatten(tree)}
    gradients["embed"] = gradients["embed"] + gradients.pop("head.w")
    return float(loss), gradients


def gradients_differ_by(model: Any, expected: dict[str, np.ndarray]) -> float:
    """The largest difference in this rank's shard."""
    worst = 0.0
    for shard in model.shards:
        for piece in pieces(shard.group, model.shard_rank) if shard.trainable else ():
            mine = shard.grad[piece.shard_start : piece.shard_stop]
            theirs = expected[piece.name].reshape(-1)[piece.param_start : piece.param_stop]
            worst = max(worst, float(abs(mine - theirs).max()))
    return worst


def sharded_loss(model: Any) -> Callable[..., Any]:
    """The same function as `loss_of_tree`, made of sharded units."""
    embed = adapters.sharded(model["embed"], lambda w, x: w[x])
    blocks = [
        adapters.sharded(model[f"blocks.{i}"], lambda w, h: anp.tanh(anp.dot(h, w["w"]) + w["b"]))
        for i in range(3)
    ]
    head = adapters.sharded(model["head"], lambda w, h: w["s"] * anp.dot(h, w["w"].T))
    scale = adapters.sharded(model.root, lambda w, loss: loss * w["temperature"][0])

    def loss(x, t):
        h = embed(x)
        for block in blocks:
            h = block(h)
        return scale(anp.mean((head(h) - t) ** 2))

    return loss


def by_sharded_units(model: Any, x: Any, t: Any) -> float:
    return adapters.loss_and_backward(model, sharded_loss(model), x, t)


def by_a_function_of_the_tree(model: Any, x: Any, t: Any) -> float:
    return adapters.value_and_grad(model, autograd.value_and_grad(loss_of_tree))(x, t)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", [by_sharded_units, by_a_function_of_the_tree])
@pytest.mark.parametrize("n", RANKS)
def test_loss_and_gradients_are_those_of_the_unsharded_model(n: int, how: Any, way: str):
    loss, gradients = reference()

    def rank(comm):
        with fully_shard(parameters(), comm, units=UNITS, **WAYS[way]) as model:
            with model.microbatch():
                value = how(model, *part(comm))
            return value, gradients_differ_by(model, gradients)

    results = run_ranks(n, rank)
    assert np.mean([value for value, _ in results]) == pytest.approx(loss, rel=1e-14)
    assert max(worst for _, worst in results) < 1e-14


def test_weights_are_gathered_for_forward_and_again_for_backward():
    """5 units and the root unit, which stays whole: 5 + 5 + 1 gathers, 6 reductions."""

    def rank(comm):
        with fully_shard(parameters(), comm, units=UNITS) as model:
            with model.microbatch():
                by_sharded_units(model, *part(comm))
            return model.counters.calls(), model.counters.peak_weight_buffers

    calls, peak = run_ranks(2, rank)[0]
    # embed's own memory is empty: it is tied, so it lies in the root unit
    assert calls == {"all_gather": 4 + 4 + 1, "reduce_scatter": 5, "all_reduce": 0}
    assert peak <= 2


def test_microbatches_add_up_with_a_scale():
    loss, gradients = reference()

    def rank(comm):
        x, t = part(comm)
        with fully_shard(parameters(), comm, units=UNITS) as model:
            function = sharded_loss(model)
            total = 0.0
            for last in (False, True):
                half = slice(int(last), None, 2)
                with model.microbatch(last=last):
                    total += adapters.loss_and_backward(model, function, x[half], t[half], scale=0.5) / 2
            return total, gradients_differ_by(model, gradients)

    results = run_ranks(3, rank)
    assert np.mean([value for value, _ in results]) == pytest.approx(loss, rel=1e-14)
    assert max(worst for _, worst in results) < 1e-14


def test_gradients_of_inputs_come_out_of_autograds_own_functions():
    x = np.random.default_rng(3).standard_normal((4, 6))
    tree = parameters()["blocks"][:1]

    def loss(w, x):
        return anp.sum(anp.tanh(anp.dot(x, w["w"]) + w["b"]) ** 2)

    d_w, d_x = autograd.grad(loss, (0, 1))(tree[0], x)

    def rank(comm):
        with fully_shard(tree, comm, units=["*"]) as model:
            unit = adapters.sharded(model["0"], loss)
            with model.microbatch():
                found = autograd.grad(unit)(x)
            return found, gradients_differ_by(model, {f"0.{name}": g for name, g in d_w.items()})

    for found, worst in run_ranks(2, rank):
        assert np.array_equal(found, d_x) and worst < 1e-14


def test_units_that_do_not_depend_on_each_other_go_backward_in_reverse_order():
    """autograd is free to take b before c, or c before b: the engine is not."""
    tree = {name: np.eye(3) * k for k, name in enumerate("abcd", 1)}
    x = np.arange(6.0).reshape(2, 3)

    def rank(comm):
        order = []
        with fully_shard(tree, comm, units=list("abcd")) as model:

            def recorded(w, h):
                order.append(w[0, 0] if isinstance(w, np.ndarray) else w[0, 0]._value)
                return anp.dot(h, w)

            a, b, c, d = (adapters.sharded(unit, recorded) for unit in model)

            def loss(x):
                h = a(x)
                one, other = b(h), c(h)
                return anp.sum(d(other * 2 + one))

            with model.microbatch():
                adapters.loss_and_backward(model, loss, x)
            return order, [np.array(shard.grad) for shard in model.shards]

    reference = autograd.grad(
        lambda p: anp.sum(
            anp.dot(2 * anp.dot(anp.dot(x, p["a"]), p["c"]) + anp.dot(anp.dot(x, p["a"]), p["b"]), p["d"])
        )
    )(tree)
    order, gradients = run_ranks(1, rank)[0]
    assert order == [1, 2, 3, 4, 4, 3, 2, 1]
    for found, name in zip(gradients, "abcd", strict=True):
        assert np.array_equal(found[:9], reference[name].reshape(-1)), name
    run_ranks(2, rank)  # in any other order this raises PhaseError


def test_an_output_that_is_a_view_of_the_weights_outlives_them():
    def rank(comm):
        with fully_shard([np.arange(8.0), np.ones(8)], comm, units=["*"], debug=True) as model:
            first = adapters.sharded(model["0"], lambda w: w[2:6])
            second = adapters.sharded(model["1"], lambda w, h: (h * w[:4], {"twice": 2 * h}))

            def loss():
                product, more = second(first())
                return anp.sum(product) + anp.sum(more["twice"])

            with model.microbatch():
                value = adapters.loss_and_backward(model, loss)
            norm = model.grad_norm()
            return value, norm

    for value, norm in run_ranks(2, rank):
        assert value == (2 + 3 + 4 + 5) * 3
        assert norm == pytest.approx(np.sqrt(4 * 9 + 4 + 9 + 16 + 25), rel=1e-15)


def test_frozen_weights_get_no_gradient_and_the_others_get_theirs():
    _, gradients = reference()
    frozen = ["blocks.1", "head.s"]

    def rank(comm, how):
        with fully_shard(parameters(), comm, units=UNITS, frozen=frozen) as model:
            with model.microbatch():
                how(model, *part(comm))
            count = sum(shard.group.numel for shard in model.shards if shard.trainable)
            return count, gradients_differ_by(model, gradients)

    total = sum(leaf.size for leaf in gradients.values())
    for how in (by_sharded_units, by_a_function_of_the_tree):
        for count, worst in run_ranks(2, rank, how):
            assert count == total - 42 - 1 and worst < 1e-14


def test_evaluation_needs_no_differentiation():
    loss, _ = reference()

    def rank(comm):
        with fully_shard(parameters(), comm, units=UNITS) as model:
            with model.evaluate():
                first = float(sharded_loss(model)(*part(comm)))
            with model.evaluate():
                second = float(loss_of_tree(adapters.parameters(model), *part(comm)))
            return first, second, model.counters.reduce_scatter

    results = run_ranks(3, rank)
    assert np.mean([first for first, _, _ in results]) == pytest.approx(loss, rel=1e-14)
    assert all(first == second and reductions == 0 for first, second, reductions in results)


def test_undifferentiated_weights_in_a_microbatch_are_an_error_with_the_remedy():
    def rank(comm):
        with fully_shard(parameters(), comm, units=UNITS) as model:
            with pytest.raises(
                RuntimeError, match="nothing differentiates unit 'blocks.0'.*loss_and_backward"
            ):
                with model.microbatch():
                    adapters.sharded(model["blocks.0"], lambda w, h: anp.dot(h, w["w"]))(np.ones((2, 6)))
            model.zero_grad()
            with model.microbatch():
                by_sharded_units(model, *part(comm))
            return gradients_differ_by(model, reference()[1])

    assert max(run_ranks(2, rank)) < 1e-14


def test_a_loss_that_is_no_scalar_is_an_error():
    def rank(comm):
        with fully_shard(parameters(), comm, units=UNITS) as model, model.microbatch():
            adapters.loss_and_backward(model, adapters.sharded(model["embed"], lambda w, x: w[x]), [0, 1])

    with pytest.raises(RankError, match=r"the loss has shape \(2, 6\); return a scalar"):
        run_ranks(1, rank)


def test_without_autograd_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "autograd"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "autograd", None)
    with pytest.raises(ImportError, match="pip install autograd"):
        adapters.sharded(None, None)  # type: ignore[arg-type]


# ---- functions of a whole tree


def test_parameters_are_the_gathered_memory_where_it_stays_and_copies_where_it_does_not():
    def rank(comm, keep):
        with fully_shard(parameters(), comm, units=UNITS, reshard_after_forward=not keep) as model:
            with model.microbatch():
                leaves = dict(flatten(adapters.parameters(model)))
                writeable = [name for name, leaf in leaves.items() if leaf.flags.writeable]
            return writeable

    assert run_ranks(2, rank, True) == [[], []]
    # what lies in the root unit stays whole anyway
    copied = [f"blocks.{i}.{name}" for i in range(3) for name in "wb"] + ["head.s"]
    assert run_ranks(2, rank, False) == [copied, copied]


def test_a_tree_of_the_users_containers_comes_with_like():
    Pair = namedtuple("Pair", ["w", "b"])
    tree = {"layer": Pair(np.arange(4.0), np.ones(()))}
    flat = {"layer.0": tree["layer"].w, "layer.1": tree["layer"].b}

    def rank(comm, like):
        seen = []

        def function(p):
            seen.append(type(p["layer"]) if "layer" in p else sorted(p))
            return 1.5, p

        with fully_shard(tree, comm) as model:
            with model.microbatch():
                value = adapters.value_and_grad(model, function, like=like)()
            return value, seen[0].__name__ if isinstance(seen[0], type) else seen[0], model.grad_norm()

    assert run_ranks(2, rank, tree)[1] == (1.5, "Pair", pytest.approx(np.sqrt(15)))
    assert run_ranks(2, rank, None)[1] == (1.5, "list", pytest.approx(np.sqrt(15)))
    assert run_ranks(2, rank, flat)[1] == (1.5, ["layer.0", "layer.1"], pytest.approx(np.sqrt(15)))
    with pytest.raises(RankError, match="there is no parameter 'layer.w'; the names are layer.0, layer.1"):
        run_ranks(2, rank, {"layer": {"w": tree["layer"].w}})


def test_what_comes_with_the_loss_is_handed_on_and_each_weight_is_converted():
    def rank(comm):
        with fully_shard({"w": np.arange(3.0)}, comm) as model:
            step = adapters.value_and_grad(
                model, lambda p, x: ((x, "more"), {"w": p["w"]}), convert=lambda leaf: leaf * 2
            )
            with model.microbatch():
                value = step(0.25)
            return value, model.grad_norm()

    assert run_ranks(2, rank) == [((0.25, "more"), pytest.approx(2 * np.sqrt(5)))] * 2


@pytest.mark.parametrize(
    "gradients, message",
    [
        ({"w": np.ones(3)}, "'b' has no gradient"),
        ({"w": np.ones(3), "b": np.ones(2), "c": np.ones(1)}, "there is no parameter 'c'"),
        ({"w": np.ones(3), "b": np.ones(1)}, r"gradient of 'b' has shape \(1,\), and the parameter \(2,\)"),
        ({"w": np.ones(3), "b": None}, "'b' has no gradient"),
    ],
)
def test_gradients_of_another_tree_are_an_error_and_the_next_step_works(gradients: Any, message: str):
    def rank(comm):
        with fully_shard({"w": np.zeros(3), "b": np.zeros(2)}, comm) as model:
            with pytest.raises(ValueError, match=message):
                with model.microbatch():
                    adapters.value_and_grad(model, lambda p: (0.0, gradients))()
            model.zero_grad()
            with model.microbatch():
                adapters.value_and_grad(model, lambda p: (0.0, {"w": np.ones(3), "b": np.ones(2)}))()
            return model.grad_norm()

    assert run_ranks(2, rank) == [pytest.approx(np.sqrt(5))] * 2


def test_outside_of_a_microbatch_there_is_nothing_to_call():
    def rank(comm):
        with fully_shard({"w": np.zeros(3)}, comm) as model:
            with pytest.raises(PhaseError, match="microbatch"):
                adapters.value_and_grad(model, lambda p: (0.0, p))()
            return True

    assert run_ranks(2, rank) == [True, True]


def test_bfloat16_weights_reach_the_function_and_float32_gradients_the_optimizer():
    def rank(comm):
        precision = MixedPrecision(param="bfloat16")
        with fully_shard({"w": np.full(4, 1.01, np.float32)}, comm, precision=precision) as model:
            with model.microbatch():
                step = adapters.value_and_grad(model, lambda p: (p["w"].dtype.name, {"w": p["w"]}))
                name = step()
            return name, model.shards[0].grad.dtype.name, model.grad_norm()

    exact = float(np.float32(1.0078125)) * 2
    assert run_ranks(2, rank) == [("bfloat16", "float32", exact)] * 2


# ---- activations computed again


class Recording:
    """Layers y = tanh(x @ w) that know which of their activations are alive."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[np.ndarray]] = []
        self.forwards = 0

    def forward(self, w: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, Any]:
        self.forwards += 1
        before = x @ w
        y = np.tanh(before)
        self.made.append(weakref.ref(before))
        return y, (x, before)

    def backward(self, w: np.ndarray, g: np.ndarray, saved: Any, dy: np.ndarray) -> np.ndarray:
        x, before = saved
        d_before = dy * (1 - np.tanh(before) ** 2)
        g[...] = x.T @ d_before
        return d_before @ w.T

    @property
    def live(self) -> int:
        return sum(reference() is not None for reference in self.made)


def walk(comm: Any, recompute: bool) -> tuple[Any, ...]:
    """(live activations after forward, forwards, collectives, the gradients' bits)."""
    rng = np.random.default_rng(5)
    weights = [rng.standard_normal((7, 7)) for _ in range(5)]
    x = rng.standard_normal((6, 7))[comm.rank :: comm.size]
    recording = Recording()
    layer = Layer(recording.forward, recording.backward)
    if recompute:
        layer = checkpointed(*layer)
    with fully_shard(weights, comm, units=["*"], debug=True) as model:
        saved = []
        with model.microbatch():
            h = x
            for unit in model:
                with unit.forward() as w:
                    h, kept = layer.forward(w, h)
                saved.append(kept)
            live, d = recording.live, h
            most = 0
            for unit in reversed(model):
                with unit.backward() as (w, g):
                    d = layer.backward(w, g, saved.pop(), d)
                most = max(most, recording.live)
        bits = [shard.grad.tobytes() for shard in model.shards]
        return live, most, recording.forwards, model.counters.calls(), bits


@pytest.mark.parametrize("n", RANKS)
def test_recomputed_activations_are_not_kept_and_give_the_same_gradients_bit_for_bit(n: int):
    for plain, again in zip(run_ranks(n, walk, False), run_ranks(n, walk, True), strict=True):
        live, _, forwards, calls, bits = plain
        assert live == 5 and forwards == 5
        live, most, forwards, calls_again, bits_again = again
        assert live == 0 and most <= 1 and forwards == 10
        assert calls_again == calls, "recomputing must not gather again"
        assert bits_again == bits


def test_dropout_drops_the_same_elements_again_and_the_generator_goes_on():
    rng = np.random.default_rng(11)
    drawn = []

    def forward(w, x):
        mask = rng.integers(0, 2, x.shape)
        drawn.append(mask)
        return x * mask * w, (x, mask)

    def backward(w, g, saved, dy):
        x, mask = saved
        g[...] = (x * mask * dy).sum()
        return dy * mask * w

    layer = checkpointed(forward, backward, rng=rng)
    g = np.zeros(())
    _, saved = layer.forward(2.0, np.arange(16.0))
    between = rng.integers(0, 1000, 4)
    layer.backward(2.0, g, saved, np.ones(16))
    after = rng.integers(0, 1000, 4)
    assert np.array_equal(drawn[0], drawn[1]) and float(g) == (np.arange(16.0) * drawn[0]).sum()
    fresh = np.random.default_rng(11)
    fresh.integers(0, 2, 16)
    assert np.array_equal(between, fresh.integers(0, 1000, 4))
    assert np.array_equal(after, fresh.integers(0, 1000, 4))

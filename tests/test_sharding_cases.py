"""Cases from public reports of people who train with FSDP and ZeRO, each on 1, 2, 3 and 4 ranks.

The reference is one rank on the concatenated batch. What belongs to checkpoints is in
test_sharding_checkpoint_*.py.
"""

from __future__ import annotations

import re
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from sharding_ranks import (  # type: ignore[import-not-found]
    RANKS,
    assert_shards,
    backward,
    batch,
    chain,
    flat,
    forward,
    give,
    reference,
    run_threads,
    stepped,
    train,
    ways,
)

from pynccl.testing import RankError, run_ranks
from sharding import SGD, MixedPrecision, PhaseError, fully_shard, token_scale

each_n = pytest.mark.parametrize("n", RANKS)
LR = 2.0**-4


def host(n: int, fn: Any) -> list[Any]:
    return run_ranks(n, fn, library="host", timeout=60)


def sharded(comm: Any, params: Any = None, **way: Any) -> Any:
    given = {"units": ["layers.*"], "reduce_op": "sum", **way}
    return fully_shard(chain() if params is None else params, comm, **given)


# --- norms --------------------------------------------------------------------------------------------------


@each_n
def test_the_gradient_norm_counts_no_padding_and_no_replica(n: int) -> None:
    def rank(comm: Any) -> None:
        for way in ways(n).values():
            with fully_shard({"w": np.zeros(7)}, comm, **way) as model:
                give(model, {"w": np.arange(7.0)})  # the mean over ranks is the same
                for p in (1, 2, 3, float("inf")):
                    assert model.grad_norm(p) == pytest.approx(np.linalg.norm(np.arange(7.0), p), rel=1e-15)

    host(n, rank)


@each_n
def test_the_norm_of_tied_and_frozen_parameters_is_that_of_the_plain_model(n: int) -> None:
    def rank(comm: Any) -> None:
        shared = np.zeros(5)
        params = {"a": shared, "b": np.zeros(3), "c": shared, "d": np.zeros(2)}
        with fully_shard(params, comm, units=["a", "b", "c", "d"], frozen=["d"], reduce_op="sum") as model:
            give(model, {"a": 1.0, "b": 2.0, "c": 3.0})
            assert model.grad_norm() == np.sqrt(5 * (4.0 * n) ** 2 + 3 * (2.0 * n) ** 2)

    host(n, rank)


@each_n
@pytest.mark.parametrize("bad", (np.inf, -np.inf, np.nan))
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(n: int, bad: float) -> None:
    def rank(comm: Any) -> Any:
        params = chain()
        with sharded(comm, params) as model:
            opt = SGD(model, lr=LR)
            give(model, {"layers.1.b": bad if comm.rank == n - 1 else 1.0})
            before = model.counters.all_reduce
            norm = model.clip_grad_norm(1.0)
            assert not np.isfinite(norm) and not norm < 0
            assert not np.isfinite(model.grad_norm(float("inf")))
            before += 1 if n > 1 else 0
            assert opt.step(check_finite=True) is False
            assert model.counters.all_reduce - before <= (4 if n > 1 else 0)
            assert_shards(model, "data", flat(params))
            model.zero_grad()
            train(model, *batch(comm.rank, n))
            assert opt.step(check_finite=True) is True
            assert_shards(model, "data", flat(stepped(params, reference(params), LR)))

    host(n, rank)


@each_n
def test_clipping_takes_one_all_reduce_and_scales_by_the_whole_norm(n: int) -> None:
    def rank(comm: Any) -> None:
        with sharded(comm) as model:
            train(model, *batch(comm.rank, n))
            expected = reference(chain())
            total = np.sqrt(sum((g**2).sum() for g in expected.values()))
            assert model.clip_grad_norm(total / 4) == total
            assert model.counters.all_reduce == (1 if n > 1 else 0)
            assert_shards(model, "grad", {name: g / 4 for name, g in expected.items()})

    host(n, rank)


# --- memory and order ---------------------------------------------------------------------------------------


@each_n
def test_of_50_units_at_most_two_whole_weights_and_two_whole_gradients_are_live(n: int) -> None:
    def rank(comm: Any) -> None:
        params = {"layers": [{"w": np.eye(3)[[1, 2, 0]], "b": np.zeros(3)} for _ in range(50)]}
        with sharded(comm, params) as model:
            for step in range(2):
                train(model, *batch(comm.rank, n, step))
                assert_shards(model, "grad", reference(params, step))
                model.zero_grad()
            counts = model.counters
            assert counts.live_weight_buffers == counts.live_grad_buffers == 0
            assert counts.peak_weight_buffers == (2 if n > 1 else 0)
            assert counts.peak_grad_buffers == (2 if n > 1 else 1)
            assert counts.calls() == {
                "all_gather": 2 * 50 * 2 if n > 1 else 0,
                "reduce_scatter": 2 * 50 if n > 1 else 0,
                "all_reduce": 0,
            }

    host(n, rank)


@each_n
def test_a_rank_that_skips_units_or_has_no_batch_adds_zero(n: int) -> None:
    def rank(comm: Any) -> None:
        params = chain()
        x, t = batch(0, 1)
        for way in ways(n).values():
            with sharded(comm, params, **way) as model:
                for kind in ("nothing opened", "an empty batch", "one unit opened"):
                    if comm.rank == 0:
                        train(model, x, t)
                    elif kind == "an empty batch":
                        train(model, x[:0], t[:0])
                    else:
                        with model.microbatch():
                            if kind == "one unit opened":
                                with model[1].forward():
                                    pass
                                with model[1].backward():
                                    pass
                    assert_shards(model, "grad", reference(params))
                    model.zero_grad()

    host(n, rank)


@each_n
def test_an_earlier_unit_after_a_later_one_is_a_clear_error(n: int) -> None:
    def rank(comm: Any) -> None:
        with sharded(comm) as model:
            train(model, *batch(comm.rank, n))
            model.zero_grad()
            with model.microbatch():
                with model[1].forward():
                    pass
                with (
                    pytest.raises(
                        PhaseError,
                        match=r"layers\.0\.forward\(\).* passed .* expects unit 'layers\.2'.*declared order",
                    ),
                    model[0].forward(),
                ):
                    pass
                with model[0].backward():
                    pass
                with (
                    pytest.raises(
                        PhaseError, match=r"layers\.1\.backward\(\).*expects no further unit.*reverse order"
                    ),
                    model[1].backward(),
                ):
                    pass
            model.zero_grad()
            train(model, *batch(comm.rank, n))
            assert_shards(model, "grad", reference(chain()))

    host(n, rank)


# --- kinds of parameters ------------------------------------------------------------------------------------


@each_n
def test_a_tied_parameter_has_one_storage_and_the_sum_of_both_gradients(n: int) -> None:
    def rank(comm: Any) -> None:
        shared = np.arange(10.0).reshape(5, 2)
        params = {"embed": shared, "mid": {"w": np.arange(3.0)}, "head": {"w": shared, "s": np.ones(1)}}
        for units in (["embed", "mid", "head"], None, [["embed", "head"], "mid"]):
            for way in ways(n).values():
                with fully_shard(params, comm, units=units, reduce_op="sum", **way) as model:
                    opt = SGD(model, lr=LR)
                    owned = sum(entry.size for _, _, entry in model.layout.parameters())
                    assert owned == 10 + 3 + 1 and model.layout.aliases == (("head.w", "embed"),)
                    give(model, {"embed": 2.0, "head.w": 3.0, "mid.w": 1.0})
                    assert_shards(
                        model, "grad", {"embed": np.full(10, 5.0 * n), "mid.w": np.full(3, 1.0 * n)}
                    )
                    opt.step()
                    model.zero_grad()
                    with model.evaluate():
                        seen = {}
                        for unit in model:
                            with unit.forward():
                                seen.update({k: v.copy() for k, v in unit.weight_views().items()})
                    for name in ("embed", "head.w"):
                        np.testing.assert_array_equal(seen[name], shared - LR * 5 * n)

    host(n, rank)


@each_n
def test_dtypes_mixed_in_a_unit_are_kept(n: int) -> None:
    def rank(comm: Any) -> None:
        params: dict[str, Any] = {
            "wide": np.arange(5, dtype=np.float32),
            "half": np.arange(7, dtype=np.float16),
            "brain": np.arange(3).astype(ml_dtypes.bfloat16),
            "double": np.arange(2.0),
            "ids": np.arange(4, dtype=np.int32),
            "mask": np.array([True, False, True]),
        }
        for way in ways(n).values():
            with fully_shard(params, comm, reduce_op="sum", **way) as model:
                opt = SGD(model, lr=LR)
                for step in range(2):
                    with model.microbatch():
                        with model[0].forward() as w:
                            assert {name: array.dtype for name, array in w.items()} == {
                                name: array.dtype for name, array in params.items()
                            }
                            np.testing.assert_array_equal(w["ids"], params["ids"])
                            np.testing.assert_array_equal(w["mask"], params["mask"])
                            np.testing.assert_array_equal(w["half"], params["half"] - step * LR * n)
                            np.testing.assert_array_equal(w["wide"], params["wide"] - step * LR * n)
                        with model[0].backward() as (w, g):
                            assert set(g) == {"wide", "half", "brain", "double"}
                            assert g["half"].dtype == g["brain"].dtype == np.float32
                            for array in g.values():
                                array[...] = 1
                    opt.step()
                    model.zero_grad()

    host(n, rank)


@each_n
def test_frozen_parameters_send_no_gradient_and_do_not_change_until_unfrozen(n: int) -> None:
    def rank(comm: Any) -> None:
        params = chain()
        for way in ways(n).values():
            with sharded(comm, params, frozen=["*.b", "layers.1"], **way) as model:
                opt = SGD(model, lr=LR)
                train_frozen(model, comm.rank, n)
                sent = sum(
                    s.group.padded * 8 * (n_ - 1) / n_
                    for s in model.shards
                    if s.trainable and (n_ := model.shard_size) > 1
                )
                assert model.counters.reduce_scatter_bytes == sent
                assert all(s.grad is None for s in model.shards if not s.trainable)
                opt.step()
                model.zero_grad()
                grads = reference(params)
                moving = {"layers.0.w": grads["layers.0.w"], "layers.2.w": grads["layers.2.w"]}
                held = {name: np.zeros_like(g) for name, g in grads.items()} | moving
                after = stepped(params, held, LR)
                assert_shards(model, "data", flat(after))

                assert model.unfreeze("*.b") == ["layers.0.b", "layers.1.b", "layers.2.b"]
                assert model.unfreeze("layers.*") == ["layers.1.w"]
                assert_shards(model, "data", flat(after))
                train(model, *batch(comm.rank, n, 1))
                grads = reference(after, 1)
                assert_shards(model, "grad", grads)
                opt.step()
                assert_shards(model, "data", flat(stepped(after, grads, LR)))

    host(n, rank)


def train_frozen(model: Any, rank: int, n: int) -> None:
    """A microbatch that writes the gradients that there are."""
    x, t = batch(rank, n)
    with model.microbatch():
        saved = forward(model, x)
        grad = t
        for position in (2, 1, 0):
            with model[position].backward() as (w, g):
                if position != 1:
                    assert set(g) == {"w"}
                    g["w"][...] = saved[position].T @ grad
                else:
                    assert g == {}
                grad = grad @ w["w"].T


@each_n
def test_small_shapes_train(n: int) -> None:
    def rank(comm: Any) -> None:
        params = {
            "scalar": np.array(2.0),
            "one": np.ones(1),
            "three": np.arange(3.0),
            "none": np.zeros((0, 4)),
        }
        for units in (None, ["scalar", "one", "three", "none"]):
            for way in ways(n).values():
                with fully_shard(params, comm, units=units, reduce_op="sum", **way) as model:
                    opt = SGD(model, lr=LR)
                    give(model, dict.fromkeys(params, 1.0))
                    assert model.grad_norm() == n * np.sqrt(5)
                    opt.step()
                    expected = {name: array - LR * n for name, array in params.items()}
                    assert_shards(model, "data", expected)
                    model.zero_grad()
                    with model.evaluate():
                        for unit in model:
                            with unit.forward():
                                for name, view in unit.weight_views().items():
                                    assert view.shape == params[name].shape
                                    np.testing.assert_array_equal(view, expected[name])

    host(n, rank)


# --- accumulation and precision -----------------------------------------------------------------------------


@each_n
@pytest.mark.parametrize("sync", (True, False))
def test_four_microbatches_are_one_batch_with_an_exact_count_of_collectives(n: int, sync: bool) -> None:
    def rank(comm: Any) -> None:
        params = chain()
        x, t = batch(comm.rank, n)
        for name, way in ways(n).items():
            with sharded(comm, params, **way) as model:
                for _ in range(2):
                    model.zero_grad()
                    before = model.counters.calls()
                    for k in range(4):
                        train(model, x[k::4], t[k::4], last=k == 3, sync=sync or k == 3)
                    assert_shards(model, "grad", reference(params))
                    counts = {k: v - before[k] for k, v in model.counters.calls().items()}
                model.updated()
                before = model.counters.calls()
                model.zero_grad()
                for k in range(4):
                    train(model, x[k::4], t[k::4], last=k == 3, sync=sync or k == 3)
                counts = {k: v - before[k] for k, v in model.counters.calls().items()}
                assert counts == expected_counts(model, name, sync, n), name

    host(n, rank)


def expected_counts(model: Any, name: str, sync: bool, n: int) -> dict[str, int]:
    """Of a step of four microbatches, after a change of the weights."""
    units, shard = len(model), model.shard_size
    reduces = 4 if sync and model.strategy.reduces_each else 1
    gathers = 1 if model.strategy.keeps_weights else 4 if "kept after" in name else 8
    replicated = model.replicate_size > 1
    if shard == 1:
        return {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 2 * units * replicated // 2}
    return {
        "all_gather": units * gathers,
        "reduce_scatter": units * reduces,
        "all_reduce": units * reduces * replicated,
    }


@pytest.mark.parametrize("n", (*RANKS, 8))
def test_small_float16_gradients_survive_a_reduction_in_float32(n: int) -> None:
    def rank(comm: Any) -> None:
        mine = 1.0 if comm.rank == 0 else 2.0**-12
        for way in ways(n).values():
            with fully_shard({"w": np.zeros(5, np.float16)}, comm, reduce_op="sum", **way) as model:
                give(model, {"w": np.float16(mine)})
                assert_shards(model, "grad", {"w": np.full(5, 1 + (n - 1) * 2.0**-12)})
        narrow = MixedPrecision(param="float16", reduce="float16", master=None)
        with fully_shard({"w": np.zeros(5, np.float16)}, comm, reduce_op="sum", precision=narrow) as model:
            give(model, {"w": np.float16(mine)})
            assert {s.grad.dtype for s in model.shards} == {np.dtype(np.float16)}

    host(n, rank)


@each_n
def test_gather_narrow_compute_wide_reduce_wide(n: int) -> None:
    def rank(comm: Any) -> None:
        precision = MixedPrecision(param="float32", gather="bfloat16", reduce="float32")
        params = {"w": np.array([1, 1 + 2.0**-10, 3, -5], np.float32)}
        for way in ways(n).values():
            with fully_shard(params, comm, precision=precision, reduce_op="sum", **way) as model:
                with model.microbatch():
                    with model[0].forward() as w:
                        assert w.dtype == np.float32
                        np.testing.assert_array_equal(w, [1, 1, 3, -5])  # through bfloat16
                    with model[0].backward() as (w, g):
                        np.testing.assert_array_equal(w, [1, 1, 3, -5])
                        g[...] = 1
                assert_shards(model, "data", params)  # the master is exact
                if model.shard_size > 1:
                    whole = model.shards[0].group.padded * 2
                    gathers = 1 if model.strategy.keeps_weights or not model.reshard_after_forward else 2
                    assert model.counters.all_gather == gathers
                    if way.get("reshard_after_forward") != 2:
                        size = model.shard_size
                        assert model.counters.all_gather_bytes == gathers * whole * (size - 1) / size

    host(n, rank)


@each_n
def test_ranks_with_unequal_tokens_give_the_mean_over_all_tokens(n: int) -> None:
    def rank(comm: Any) -> None:
        tokens = [5, 3, 0, 8][: comm.size]
        mine = tokens[comm.rank]
        values = np.arange(16.0)[sum(tokens[: comm.rank]) :][:mine]  # d loss / d w of each token
        mean = np.arange(16.0)[: sum(tokens)].mean()
        for reduce_op in ("avg", "sum"):
            with fully_shard({"w": np.zeros(3)}, comm, reduce_op=reduce_op) as model:
                scale = token_scale(model, mine)
                give(model, {"w": scale * values.mean() if mine else 0.0})
                for shard in model.shards:
                    owned = shard.grad[: max(0, 3 - model.shard_rank * shard.group.shard)]
                    np.testing.assert_allclose(owned, mean, rtol=1e-15)

    host(n, rank)


# --- streams ------------------------------------------------------------------------------------------------


class Delayed:
    """A communicator that holds up every collective, on the stream it is queued on: the injected fault."""

    def __init__(self, inner: Any, seconds: Any) -> None:
        self._inner, self._seconds = inner, seconds

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in ("all_gather", "reduce_scatter", "all_reduce"):
            return value

        def delayed(*args: Any, **kwargs: Any) -> Any:
            pause = self._seconds()
            stream = kwargs.get("stream")
            if stream is None:
                time.sleep(pause)
            else:
                stream.call(lambda: time.sleep(pause))
            return value(*args, **kwargs)

        return delayed

    def split(self, color: int, key: int = 0) -> Delayed:
        return Delayed(self._inner.split(color, key), self._seconds)


@each_n
def test_delays_before_every_collective_and_step_change_no_result(n: int) -> None:
    def rank(comm: Any) -> None:
        random = np.random.default_rng(comm.rank)

        def pause() -> float:
            return 0.002 * int(random.integers(2))

        for way in ways(n).values():
            params = chain()
            with sharded(Delayed(comm, pause), params, debug=True, **way) as model:
                assert n == 1 or model.runtime.overlap == model.prefetch
                opt = SGD(model, lr=LR)
                for step in range(3):
                    x, t = batch(comm.rank, n, step)
                    if step == 1:  # the last gathers of this one are nobody's: they may still run at the end
                        with model.microbatch():
                            pass
                    else:
                        for k in range(2):
                            train(model, x[k::2], t[k::2], last=k == 1)
                        grads = reference(params, step)
                        params = stepped(params, grads, LR)
                    time.sleep(pause())
                    opt.step()
                    model.zero_grad()
                    assert_shards(model, "data", flat(params))
                    with model.evaluate():
                        if step == 2:
                            np.testing.assert_array_equal(forward(model, x)[-1], plain_forward(params, x))

    host(n, rank)


def plain_forward(params: Any, x: np.ndarray) -> np.ndarray:
    for layer in params["layers"]:
        x = x @ layer["w"] + layer["b"]
    return x


# --- starts and ends ----------------------------------------------------------------------------------------


@each_n
def test_ranks_start_from_the_weights_of_rank_0(n: int) -> None:
    def rank(comm: Any) -> None:
        for way in ways(n).values():
            for root in {0, n - 1}:
                params = {"a": np.arange(5.0) + comm.rank, "b": np.full((2, 3), comm.rank, np.int8)}
                with fully_shard(params, comm, broadcast_from=root, **way) as model:
                    assert_shards(model, "data", {"a": np.arange(5.0) + root, "b": np.full(6, root)})

    host(n, rank)


@pytest.mark.parametrize("n", RANKS[1:])
def test_unequal_weights_without_a_broadcast_are_named_on_every_rank(n: int) -> None:
    def rank(comm: Any) -> None:
        params = {"a": np.arange(5.0), "b": np.array([0.0, comm.rank == n - 1])}
        with pytest.raises(
            ValueError, match=f"parameter 'b' differs between ranks 0 and {n - 1};.*broadcast_from=0"
        ):
            fully_shard(params, comm, broadcast_from=None)
        params["b"][1] = 0
        with fully_shard(params, comm, broadcast_from=None) as model:
            assert_shards(model, "data", params)

    host(n, rank)


@each_n
@pytest.mark.parametrize("place", ("forward", "between", "backward", "last backward"))
def test_after_an_exception_on_every_rank_the_next_step_is_the_reference(n: int, place: str) -> None:
    def rank(comm: Any) -> None:
        for way in ways(n).values():
            params = chain()
            with sharded(comm, params, **way) as model:
                opt = SGD(model, lr=LR)
                train(model, *batch(comm.rank, n), last=False)
                with pytest.raises(ZeroDivisionError):
                    train_until(model, place, *batch(comm.rank, n))
                assert model.phase == "RESTING"
                with pytest.raises(
                    PhaseError, match=r"step\(\): ZeroDivisionError ended.*call zero_grad\(\)"
                ):
                    opt.step()
                with (
                    pytest.raises(PhaseError, match=r"microbatch\(\): ZeroDivisionError"),
                    model.microbatch(),
                ):
                    pass
                model.zero_grad()
                for step in range(2):
                    train(model, *batch(comm.rank, n, step))
                    params = stepped(params, reference(params, step), LR)
                    opt.step()
                    model.zero_grad()
                assert_shards(model, "data", flat(params))
                assert model.counters.live_weight_buffers == model.counters.live_grad_buffers == 0

    host(n, rank)


def train_until(model: Any, place: str, x: np.ndarray, t: np.ndarray) -> None:
    with model.microbatch():
        if place == "forward":
            with model[0].forward():
                pass
            with model[1].forward():
                1 / 0  # noqa: B018
        saved = forward(model, x)
        if place == "between":
            1 / 0  # noqa: B018
        with model[2].backward():
            if place == "backward":
                1 / 0  # noqa: B018
        backward_rest = model[0] if place == "last backward" else model[1]
        with backward_rest.backward():
            1 / 0  # noqa: B018
        assert saved


@pytest.mark.parametrize("n", RANKS[1:])
def test_an_exception_on_one_rank_is_an_error_that_names_it_on_the_others(n: int) -> None:
    def rank(comm: Any) -> str:
        params = chain()
        with sharded(comm, params) as model:
            opt = SGD(model, lr=LR)
            try:
                x, t = batch(comm.rank, n)
                with model.microbatch():
                    saved = forward(model, x)
                    if comm.rank == n - 1:
                        raise KeyError("mine")
                    backward(model, saved, t)
                model.clip_grad_norm(1.0)
                raise AssertionError("nobody told this rank")
            except Exception as error:
                said = str(error)
            model.zero_grad()  # every rank comes here, and all go on
            train(model, *batch(comm.rank, n))
            opt.step()
            assert_shards(model, "data", flat(stepped(params, reference(params), LR)))
            return said

    *others, mine = host(n, rank)
    assert mine == "'mine'"
    for said in others:
        assert re.search("rank . has aborted its communicator", said)
        assert n > 2 or "rank 1" in said  # with more, one that was told may have left before the first


@pytest.mark.parametrize("n", RANKS[1:])
def test_weights_that_did_not_arrive_are_never_seen(n: int) -> None:
    def rank(comm: Any) -> None:
        params = chain()
        for way in ways(n).values():
            with sharded(comm, params, **way) as model:
                seen = {}
                with pytest.raises(Exception) as caught, model.microbatch():
                    if comm.rank == n - 1:
                        raise KeyError("mine")
                    for unit in model:
                        with unit.forward() as w:
                            seen[unit.name] = {k: v.copy() for k, v in w.items()}
                    for unit in reversed(model):
                        with unit.backward():
                            pass
                assert (caught.type is KeyError) == (comm.rank == n - 1)
                for i, layer in enumerate(params["layers"]):
                    for k, v in seen.get(f"layers.{i}", {}).items():
                        np.testing.assert_array_equal(v, layer[k])
                model.zero_grad()
                train(model, *batch(comm.rank, n))
                assert_shards(model, "grad", reference(params))

    host(n, rank)


class Failing(Delayed):
    """A communicator whose gathers fail on their streams, from the one numbered `since` on."""

    def __init__(self, inner: Any, since: int) -> None:
        self.count = 0
        self._since = since
        super().__init__(inner, lambda: 0)

    def all_gather(self, *args: Any, stream: Any = None, **kwargs: Any) -> Any:
        def fail() -> None:
            raise OverflowError("injected")

        self.count += 1
        if self.count > self._since:
            stream.call(fail)
        return self._inner.all_gather(*args, stream=stream, **kwargs)

    def split(self, color: int, key: int = 0) -> Failing:
        return Failing(self._inner.split(color, key), self._since)


def test_a_gather_that_fails_while_nobody_waits_for_it_is_an_error_of_its_microbatch() -> None:
    def rank(comm: Any) -> None:
        with sharded(Failing(comm, 3)) as model:
            with pytest.raises(OverflowError, match="injected"), model.microbatch():
                for unit in model:  # these three arrive, those for the backward that is left out do not
                    with unit.forward():
                        pass
            with pytest.raises(PhaseError, match="OverflowError ended"):
                model.grad_norm()

    host(2, rank)


@pytest.mark.parametrize("n", RANKS[1:])
def test_a_rank_that_ends_in_the_middle_of_a_step_ends_all(n: int) -> None:
    def rank(comm: Any) -> None:
        with sharded(comm) as model:
            x, t = batch(comm.rank, n)
            with model.microbatch():
                saved = forward(model, x)
                if comm.rank == 0:
                    raise KeyError("mine")
                backward(model, saved, t)

    with pytest.raises(RankError) as caught:
        host(n, rank)
    assert set(caught.value.failures) == set(range(n)) and caught.value.ended == ()


@each_n
def test_steps_and_norms_in_the_middle_of_an_accumulation_are_clear_errors(n: int) -> None:
    def rank(comm: Any) -> None:
        params = chain()
        x, t = batch(comm.rank, n)
        for way in ways(n).values():
            with sharded(comm, params, **way) as model:
                opt = SGD(model, lr=LR)
                train(model, x[::2], t[::2], last=False)
                assert model.accumulating
                for call in (opt.step, model.grad_norm, lambda m=model: m.clip_grad_norm(1.0)):
                    with pytest.raises(PhaseError, match="not complete; open the last .* last=True"):
                        call()
                with pytest.raises(PhaseError, match=r"freeze\(\) in the middle of a step"):
                    model.freeze("layers.0")
                train(model, x[1::2], t[1::2])
                norm = model.clip_grad_norm(1e9)
                opt.step()
                assert not model.accumulating
                grads = reference(params)
                assert norm == pytest.approx(np.sqrt(sum((g**2).sum() for g in grads.values())))
                assert_shards(model, "data", flat(stepped(params, grads, LR)))

    host(n, rank)


def test_the_whole_of_it_needs_nothing_but_the_protocol() -> None:
    def rank(comm: Any) -> None:
        for way in ways(comm.size).values():
            params = chain()
            with sharded(comm, params, **way) as model:
                opt = SGD(model, lr=LR)
                for step in range(2):
                    train(model, *batch(comm.rank, comm.size, step))
                    params = stepped(params, reference(params, step), LR)
                    opt.step()
                    model.zero_grad()
                assert_shards(model, "data", flat(params))

    for n in RANKS:
        run_threads(n, rank)

"""Norms, clipping, accumulation and precision: the gradients are those of one rank.

Cases from public reports of people who train with FSDP and ZeRO, each on 1, 2, 3 and 4 ranks; the reference
is one rank on the concatenated batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sharding_ranks import (  # type: ignore[import-not-found]
    LR,
    RANKS,
    assert_shards,
    batch,
    chain,
    each_n,
    flat,
    give,
    host,
    reference,
    sharded,
    stepped,
    train,
    ways,
)

from sharding import SGD, MixedPrecision, PhaseError, fully_shard, token_scale

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

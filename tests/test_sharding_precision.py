"""Casts, stochastic rounding, loss scales and the scale of unequal batches."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pynccl.testing import run_ranks
from sharding import (
    SGD,
    AdamW,
    DynamicLossScale,
    MixedPrecision,
    StaticLossScale,
    constant,
    cosine,
    fully_shard,
    linear_warmup,
    step_decay,
    token_scale,
    total_tokens,
)
from sharding.precision import BLOCK, cast_into, cast_stochastically, random_bits, rounding_key

RANKS = (1, 2, 3, 4)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
EVERY_16_BITS = np.arange(1 << 16, dtype=np.uint16)


def same_numbers(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bits, except that any NaN equals any NaN."""
    size = np.dtype(f"u{a.dtype.itemsize}")
    with np.errstate(invalid="ignore"):  # signalling NaN
        nan, other_nan = a != a, b != b
    return bool(np.array_equal(nan, other_nan) and np.array_equal(a.view(size)[~nan], b.view(size)[~nan]))


# --- casts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
@pytest.mark.parametrize("wide", [np.float32, np.float64])
def test_every_16_bit_float_widens_exactly(dtype: Any, wide: Any) -> None:
    source = EVERY_16_BITS.view(dtype)
    target = np.empty(source.size, wide)
    cast_into(target, source)
    with np.errstate(invalid="ignore"):  # signalling NaN
        assert same_numbers(target, source.astype(wide))


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
def test_float32_narrows_to_nearest_even(dtype: Any) -> None:
    exact = EVERY_16_BITS.view(dtype).astype(np.float32)
    exact = exact[np.isfinite(exact)]
    ulp = np.spacing(exact)
    random = np.random.default_rng(0).integers(0, 2**32, 50_000, np.uint32).view(np.float32)
    random = random[random == random]
    between = exact[1:] / 2 + exact[:-1] / 2
    source = np.concatenate([exact, exact + ulp, between, random, [np.inf, -np.inf, np.nan, 1e38, -1e-45]])
    source = source.astype(np.float32)
    target = np.empty(source.size, dtype)
    cast_into(target, source)
    with np.errstate(over="ignore"):
        assert same_numbers(target, source.astype(dtype))


def test_a_float16_that_overflows_becomes_infinity_without_a_warning(
    recwarn: pytest.WarningsRecorder,
) -> None:
    target = np.empty(2, np.float16)
    cast_into(target, np.array([1e6, -1e6], np.float32))
    assert np.array_equal(target, [np.inf, -np.inf]) and not recwarn.list


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 5])
def test_casts_cover_every_element_of_any_size_and_shape(size: int) -> None:
    source = np.arange(size, dtype=np.float32).reshape(1, size)
    target = np.full((1, size), -1.0)
    cast_into(target, source)
    assert np.array_equal(target, source)


# --- stochastic rounding ------------------------------------------------------------------------------------


def test_random_bits_depend_on_key_and_index_alone() -> None:
    key, size = rounding_key(1, 2, "w"), 3 * BLOCK
    whole = random_bits(np.empty(size, np.uint32), key, 100).copy()
    for start, stop in ((0, 7), (BLOCK - 3, BLOCK + 3), (5, size)):
        part = random_bits(np.empty(stop - start, np.uint32), key, 100 + start)
        assert np.array_equal(part, whole[start:stop])
    for other in (rounding_key(2, 2, "w"), rounding_key(1, 3, "w"), rounding_key(1, 2, "v")):
        assert np.mean(random_bits(np.empty(size, np.uint32), other, 100) == whole) < 1e-3


def test_random_bits_go_on_beyond_indices_of_32_bits() -> None:
    key, edge = rounding_key(1, 2, "w"), 1 << 32
    across = random_bits(np.empty(64, np.uint32), key, edge - 32).copy()
    after = random_bits(np.empty(32, np.uint32), key, edge).copy()
    begin = random_bits(np.empty(32, np.uint32), key, 0)
    assert np.array_equal(across[32:], after)
    assert not np.any(after == begin)


def test_random_bits_are_uniform_and_neighbours_independent() -> None:
    size = 1 << 18
    bits = random_bits(np.empty(size, np.uint32), rounding_key(0, 0, "w"), 0).copy()
    low = bits & 0xFFFF  # the part that rounds
    for bit in range(32):
        assert abs(np.mean(bits >> bit & 1) - 0.5) < 5 * 0.5 / np.sqrt(size)
    counts = np.bincount(low >> 8, minlength=256)
    expected = size / 256
    assert np.sum((counts - expected) ** 2 / expected) < 255 + 6 * np.sqrt(2 * 255)  # chi squared
    next_step = random_bits(np.empty(size, np.uint32), rounding_key(0, 1, "w"), 0) & 0xFFFF
    for a, b in ((low[1:], low[:-1]), (low[256:], low[:-256]), (low, next_step)):
        correlation = np.corrcoef(a.astype(np.float64), b.astype(np.float64))[0, 1]
        assert abs(correlation) < 5 / np.sqrt(a.size)


@pytest.mark.parametrize("value", [1.0 + 2.0**-9, -3.0 - 2.0**-10, 1e-20, 2.0**-130 + 2.0**-140])
def test_stochastic_rounding_takes_one_of_two_neighbours_with_the_right_mean(value: float) -> None:
    source = np.full(200_000, value, np.float32)
    target = np.empty(source.size, BFLOAT16)
    cast_stochastically(target, source, rounding_key(3, 1, "w"))
    exact = float(source[0])
    bits = source[:1].view(np.uint32) >> 16
    ends = set((bits.astype(np.uint16) + np.array([0, 1], np.uint16)).view(BFLOAT16).astype(np.float64))
    found = target.astype(np.float64)
    assert set(np.unique(found)) == ends
    assert abs(found.mean() - exact) < 5 * (max(ends) - min(ends)) / 2 / np.sqrt(source.size)


def test_stochastic_rounding_keeps_what_is_exact_or_not_finite() -> None:
    exact = EVERY_16_BITS.view(BFLOAT16).astype(np.float32)
    target = np.empty(exact.size, BFLOAT16)
    cast_stochastically(target, exact, rounding_key(3, 1, "w"))
    assert same_numbers(target, EVERY_16_BITS.view(BFLOAT16))
    hidden = np.array([0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF], np.uint32).view(np.float32)  # NaN in the low bits
    out = np.empty(3, BFLOAT16)
    cast_stochastically(out, hidden, rounding_key(3, 1, "w"))
    assert np.isnan(out.astype(np.float32)).all()


# --- loss scales --------------------------------------------------------------------------------------------

PARAMS = {"a": np.full(5, 8.0, np.float32), "b": np.full((2, 3), 8.0, np.float32)}


def give(model: Any, value: float, bad: float | None = None) -> None:
    """One microbatch: gradients of `value` (their sum over ranks); `bad` somewhere on the last rank."""
    model.zero_grad()
    with model.microbatch():
        for unit in model:
            with unit.forward():
                pass
        for unit in reversed(model):
            with unit.backward():
                for name, view in unit.gradient_views().items():
                    view[...] = value if model.rank == 0 else 0
                    if bad is not None and name == "b" and model.rank == model.size - 1:
                        view[1, 1] = bad


def everything(model: Any, opt: Any) -> list[np.ndarray]:
    arrays = [shard.data for shard in model.shards]
    return [a.copy() for a in arrays + [array for slots in opt.state.values() for array in slots.values()]]


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_scaled_loss_gives_the_same_step_and_the_same_norm(n: int, strategy: str) -> None:
    def rank(comm: Any) -> None:
        model = fully_shard(PARAMS, comm, units=["a", "b"], strategy=strategy, reduce_op="sum")
        opt, scale = SGD(model, lr=0.5), StaticLossScale(1024.0)
        give(model, 3.0 * scale.scale)
        assert scale.unscale(model)
        assert model.clip_grad_norm(1e9) == pytest.approx(3.0 * np.sqrt(11), rel=1e-14)
        assert scale.step(opt)
        for shard in model.shards:
            owned = shard.data[shard.data != 0]
            assert np.array_equal(owned, np.full(owned.size, 6.5, np.float32))
        model.close()

    run_ranks(n, rank, library="host")


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("n", RANKS)
def test_an_overflow_on_one_rank_skips_on_all_and_leaves_everything(n: int, bad: float) -> None:
    def rank(comm: Any) -> float:
        model = fully_shard(PARAMS, comm, units=["a", "b"], reduce_op="sum")
        opt, scale = AdamW(model, lr=0.5), DynamicLossScale(8.0, interval=2)
        give(model, 8.0)
        assert scale.step(opt)
        before = everything(model, opt)
        give(model, 8.0, bad)
        assert scale.step(opt) is False
        after = everything(model, opt)
        assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))
        assert (opt.steps, scale.skipped, scale.scale) == (1, 1, 4.0)
        give(model, 8.0)
        assert scale.step(opt) and opt.steps == 2
        model.close()
        return scale.scale

    assert run_ranks(n, rank, library="host") == [4.0] * n


def test_a_dynamic_scale_grows_after_an_interval_and_falls_at_once() -> None:
    def rank(comm: Any) -> list[float]:
        model = fully_shard(PARAMS, comm)
        opt, scale, seen = SGD(model, lr=0.0), DynamicLossScale(16.0, interval=3), []
        for bad in (None, None, None, None, None, np.inf, None, None, None, np.nan, np.nan):
            give(model, 1.0, bad)
            scale.step(opt)
            seen.append(scale.scale)
        assert json.loads(json.dumps(scale.describe())) == scale.describe()
        again = DynamicLossScale(interval=3)
        again.restore(scale.describe())
        assert again.describe() == scale.describe() and again.scale == scale.scale
        return seen

    seen = run_ranks(1, rank, library="host")[0]
    assert seen == [16.0, 16.0, 32.0, 32.0, 32.0, 16.0, 16.0, 16.0, 32.0, 16.0, 8.0]


def test_the_defaults_are_those_of_torchs_grad_scaler() -> None:
    scale = DynamicLossScale()
    assert (scale.scale, scale.growth, scale.backoff, scale.interval) == (65536.0, 2.0, 0.5, 2000)


def test_unscaling_twice_is_an_error_and_an_abandoned_step_can_be_repeated() -> None:
    def rank(comm: Any) -> None:
        model = fully_shard(PARAMS, comm)
        opt, scale = SGD(model, lr=0.5), StaticLossScale(2.0)
        give(model, 2.0)
        scale.unscale(model)
        with pytest.raises(RuntimeError, match="unscaled already"):
            scale.unscale(model)
        give(model, 2.0)  # begins anew
        assert scale.step(opt)
        assert np.array_equal(model.shards[0].data[:5], np.full(5, 7.5, np.float32))

    run_ranks(1, rank, library="host", processes=False)


@pytest.mark.parametrize("n", (1, 2))
def test_one_scale_for_two_models_keeps_what_it_found_in_each(n: int) -> None:
    def rank(comm: Any) -> None:
        first, second = fully_shard(PARAMS, comm), fully_shard(PARAMS, comm)
        opts, scale = (SGD(first, lr=1.0), SGD(second, lr=1.0)), StaticLossScale(2.0)
        give(first, 1.0, np.inf)
        give(second, 1.0)
        before = everything(first, opts[0])
        assert not scale.unscale(first) and scale.unscale(second)
        assert not scale.step(opts[0]) and scale.step(opts[1])
        for array, was in zip(everything(first, opts[0]), before, strict=True):
            assert np.array_equal(array, was)
        first.close()
        second.close()

    run_ranks(n, rank, library="host")


@pytest.mark.parametrize("n", (1, 2))
def test_a_norm_is_that_of_the_gradients_as_they_are_now(n: int) -> None:
    def rank(comm: Any) -> None:
        params = {name: array.astype(np.float64) for name, array in PARAMS.items()}
        with fully_shard(params, comm, reduce_op="sum") as model:
            opt = SGD(model, lr=1.0)
            give(model, 1.0)
            norm = model.grad_norm()
            for factor in (2.0**600, 2.0**-600):  # the squares are beyond float64, the norm is not
                for shard in model.shards:
                    shard.grad *= factor
                for p in (2.0, 3.0):
                    assert model.grad_norm(p) == pytest.approx(11 ** (1 / p) * factor, rel=1e-14)
                for shard in model.shards:
                    shard.grad /= factor
            assert model.grad_norm() == norm == pytest.approx(11**0.5)
            for shard in model.shards:
                shard.grad[...] = np.inf
            assert opt.step(check_finite=True) is False

    run_ranks(n, rank, library="host")


def test_float16_gradients_cannot_be_unscaled_in_place() -> None:
    def rank(comm: Any) -> None:
        precision = MixedPrecision(param="float16", reduce="float16")
        model = fully_shard(PARAMS, comm, precision=precision)
        opt = SGD(model, lr=0.5)
        give(model, 2.0)
        with pytest.raises(TypeError, match=r"gradients of unit root are float16.*reduce in float32"):
            StaticLossScale(2.0).step(opt)
        assert opt.steps == 0

    run_ranks(1, rank, library="host", processes=False)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.inf, np.nan])
def test_a_scale_must_be_positive_and_finite(scale: float) -> None:
    with pytest.raises(ValueError, match=r"StaticLossScale: scale=.*expected a finite number above 0"):
        StaticLossScale(scale)


# --- unequal batches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("reduce_op", ["avg", "sum"])
def test_the_token_scale_makes_the_mean_over_all_tokens(n: int, reduce_op: str) -> None:
    tokens = [5, 3, 0, 8][:n]
    values = [np.arange(count, dtype=np.float64) * 2 + rank for rank, count in enumerate(tokens)]
    expected = np.concatenate(values).mean()

    def rank(comm: Any) -> list[float]:
        model = fully_shard({"w": np.zeros(3)}, comm, reduce_op=reduce_op)
        mine = values[comm.rank]
        factor = token_scale(model, np.int64(mine.size))
        model.zero_grad()
        with model.microbatch():
            for unit in model:
                with unit.forward():
                    pass
                with unit.backward() as (_, grad):
                    grad[...] = mine.mean() * factor if mine.size else 0.0
        SGD(model, lr=1.0).step()
        found = [float(x) for shard in model.shards for x in shard.data]
        model.close()
        return found

    found = [x for part in run_ranks(n, rank, library="host") for x in part if x]
    np.testing.assert_allclose(found, [-expected] * 3, rtol=1e-14)


@pytest.mark.parametrize("n", (1, 3))
def test_with_microbatches_each_is_weighed_by_the_tokens_of_the_step(n: int) -> None:
    def rank(comm: Any) -> list[float]:
        counts = [comm.rank + 1, 2]
        total = total_tokens(comm, sum(counts))
        return [token_scale(comm, count, total) for count in counts]

    found = run_ranks(n, rank, library="host")
    total = sum(rank + 3 for rank in range(n))
    assert found == [[(rank + 1) * n / total, 2 * n / total] for rank in range(n)]


@pytest.mark.parametrize(("bad", "message"), [(-1, "-1 tokens on rank 1"), (2.5, "2.5 tokens on rank 1")])
def test_a_wrong_count_of_one_rank_is_an_error_on_all(bad: Any, message: str) -> None:
    def rank(comm: Any) -> None:
        with pytest.raises(ValueError, match=message):
            token_scale(comm, bad if comm.rank == 1 else 4)

    run_ranks(3, rank, library="host")


def test_no_token_anywhere_is_an_error_on_all() -> None:
    def rank(comm: Any) -> None:
        with pytest.raises(ValueError, match="no rank has any token"):
            token_scale(comm, 0)

    run_ranks(2, rank, library="host")


# --- schedules ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (constant(0.5), {0: 0.5, 99: 0.5}),
        (linear_warmup(1.0, 4), {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 99: 1.0}),
        (cosine(2.0, 8), {0: 2.0, 4: 1.0, 8: 0.0, 99: 0.0}),
        (cosine(2.0, 10, warmup=2, final=1.0), {0: 1.0, 1: 2.0, 2: 2.0, 6: 1.5, 10: 1.0, 11: 1.0}),
        (step_decay(1.0, 10, 0.5), {0: 1.0, 9: 1.0, 10: 0.5, 25: 0.25}),
        (linear_warmup(step_decay(1.0, 4, 0.5), 2), {0: 0.5, 1: 1.0, 4: 0.5}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_schedule_gives(schedule: Any, expected: dict[int, float]) -> None:
    assert {step: pytest.approx(schedule(step), abs=1e-15) for step in expected} == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: linear_warmup(1.0, 0), "linear_warmup: steps=0"),
        (
            lambda: cosine(1.0, 10, warmup=10),
            "cosine: warmup=10; expected at least 0 and fewer than steps=10",
        ),
        (lambda: step_decay(1.0, 2.5), "step_decay: every=2.5"),  # type: ignore[arg-type]
    ],
)
def test_a_schedule_of_no_steps_is_an_error(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()

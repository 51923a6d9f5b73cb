"""The arrays that the engine lends: replaced, kept too long, written too late, and cleared."""

from __future__ import annotations

import numpy as np
import pytest
from sharding_ranks import (  # type: ignore[import-not-found]
    SIZES,
    FakeComm,
    abc,
    alone,
    assert_shards,
    chain,
    run_threads,
    ways,
)

from sharding import fully_shard
from sharding.buffers import Counters, Ring
from sharding.runtime import HostRuntime

# --- arrays that were replaced ------------------------------------------------------------------------------


def test_a_gradient_that_was_replaced_is_an_error_that_names_it() -> None:
    def rank(comm: FakeComm) -> None:
        with fully_shard(chain(), comm, units=["layers.*"]) as model:
            for replace in (
                lambda g: g.update(w=np.ones((3, 3))),
                lambda g: g.pop("w"),
            ):
                with pytest.raises(
                    ValueError, match=r"layers\.2\.backward\(\): g\['w'\] was replaced; write"
                ):
                    with model.microbatch():
                        with model[0].forward():
                            pass
                        with model[2].backward() as (_, g):
                            replace(g)
                model.zero_grad()
            with pytest.raises(ValueError, match=r"layers\.0\.forward\(\): w\['b'\] was replaced.*optimizer"):
                with model.microbatch(), model[0].forward() as w:
                    w["b"] = w["b"] - 1
            model.zero_grad()
            with model.microbatch():
                with model[0].forward():
                    pass
                with model[2].backward() as (_, g):
                    g["w"] += 1  # in place: this is fine
            assert model.grad_norm() == 3.0

    alone(rank)


def test_debug_mode_refuses_gradients_written_too_late() -> None:
    def rank(comm: FakeComm) -> None:
        with fully_shard(chain(), comm, units=["layers.*"], debug=True) as model:
            with model.microbatch():
                with model[0].forward():
                    pass
                with model[2].backward() as (_, g):
                    g["w"][...] = 1
                with pytest.raises(ValueError, match="read-only"):
                    g["w"][...] = 2

    alone(rank)


# --- buffers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ("full_shard", "full_shard, no prefetch", "hybrid_shard"))
def test_debug_mode_finds_an_array_that_was_kept(way: str) -> None:
    def rank(comm: FakeComm) -> None:
        params = {name: np.ones(size) for name, size in SIZES.items()}
        with fully_shard(params, comm, units=list(SIZES), debug=True, **ways(2)[way]) as model:
            kept = {}
            if model.shard_size == 1:
                return
            with model.microbatch():
                for unit in model:
                    with unit.forward() as w:
                        assert (w == 1).all()
                        kept[unit.name] = w
                    assert np.isnan(kept[unit.name]).all()
                for unit in reversed(model):
                    with unit.backward() as (w, g):
                        assert (w == 1).all() and not g.any()
                        kept[unit.name], kept["grad"] = w, g
                    assert np.isnan(kept[unit.name]).all()
            assert np.isnan(kept["grad"]).all()
            kept["whole"] = model["a"].unshard()
            model["a"].reshard()
            assert np.isnan(kept["whole"]).all()

    run_threads(2, rank)


def test_without_debug_mode_nothing_is_poisoned() -> None:
    def rank(comm: FakeComm) -> None:
        with abc(comm) as model, model.evaluate():
            with model["a"].forward() as w:
                pass
            assert not np.isnan(w).any()

    run_threads(2, rank)


def test_weights_are_read_only_and_gradients_start_at_zero() -> None:
    def rank(comm: FakeComm) -> None:
        with abc(comm) as model:
            for _ in range(3):
                with model.microbatch():
                    with model["a"].forward() as w, pytest.raises(ValueError, match="read-only"):
                        w[0] = 1
                    for unit in reversed(model):
                        with unit.backward() as (w, g):
                            assert not g.any() and g.dtype == w.dtype
                            g[...] = 7
                model.zero_grad()

    run_threads(2, rank)


def test_with_zero_false_only_the_padding_is_cleared() -> None:
    def rank(comm: FakeComm) -> None:
        params = {"a": np.ones(7), "b": np.ones(5)}
        with fully_shard(params, comm, units=["a", "b"], reduce_op="sum", debug=True) as model:
            for _ in range(2):
                with model.microbatch():
                    with model["a"].forward():
                        pass
                    for unit in reversed(model):
                        with unit.backward(zero=False) as (_, g):
                            g[...] = 1
                assert_shards(model, "grad", {"a": np.full(7, 2.0), "b": np.full(5, 2.0)})
                assert model.grad_norm() == np.sqrt(12 * 4)
                model.zero_grad()

    run_threads(2, rank)


def test_a_ring_gives_what_it_has_and_says_when_there_is_no_more() -> None:
    counters = Counters()
    ring = Ring("grad", 2, 64, HostRuntime(None, False), counters)
    first, second = ring.take(), ring.take()
    assert ring.available == 0 and ring.bytes_made == 128 and counters.peak_grad_buffers == 2
    with pytest.raises(RuntimeError, match="all 2 full grad buffers are in use; close the context"):
        ring.take()
    ring.give(first)
    assert ring.take() is first and ring.bytes_made == 128
    ring.give(first)
    ring.give(second)
    assert counters.live_grad_buffers == 0

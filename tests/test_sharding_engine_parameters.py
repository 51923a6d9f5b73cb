"""The root unit, tied parameters, and parameters that are frozen and unfrozen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sharding_ranks import (  # type: ignore[import-not-found]
    LR,
    RANKS,
    FakeComm,
    assert_shards,
    batch,
    chain,
    each_n,
    give,
    run_threads,
    train,
    ways,
)

from sharding import SGD, AdamW, MixedPrecision, fully_shard
from sharding.layout import pieces

# --- the root unit and tied parameters ----------------------------------------------------------------------


@each_n
def test_the_root_unit_can_be_opened_anywhere_and_again(n: int) -> None:
    def rank(comm: FakeComm) -> None:
        params = {"norm": np.arange(3.0), "a": np.zeros(4), "b": np.zeros(4)}
        for way in ways(n).values():
            with fully_shard(params, comm, units=["a", "b"], reduce_op="sum", **way) as model:
                for last in (False, True):
                    with model.microbatch(last=last):
                        with model["root"].forward() as w:
                            np.testing.assert_array_equal(w, params["norm"])
                        with model["a"].forward(), model["root"].forward() as w:
                            np.testing.assert_array_equal(w, params["norm"])
                        with model["b"].backward() as (_, g):
                            g[...] = 1
                            with model["root"].backward() as (_, root):
                                root[...] = 1
                        with model["a"].backward() as (_, g), model["root"].backward() as (w, root):
                            root += 2
                            np.testing.assert_array_equal(w, params["norm"])
                        with model["root"].backward() as (_, root):
                            root[...] = 4
                expected = {"norm": np.full(3, 14.0 * n), "b": np.full(4, 2.0 * n), "a": np.zeros(4)}
                assert_shards(model, "grad", expected)

    run_threads(n, rank)


@each_n
def test_a_tied_parameter_that_is_written_in_one_place_only(n: int) -> None:
    def rank(comm: FakeComm) -> None:
        shared = np.arange(4.0)
        for name in ("a", "c"):
            params = {"a": shared, "b": np.ones(2), "c": shared}
            with fully_shard(params, comm, units=["a", "b", "c"], reduce_op="sum") as model:
                give(model, {name: 3.0})
                assert_shards(model, "grad", {"a": np.full(4, 3.0 * n), "b": np.zeros(2)})

    run_threads(n, rank)


def test_three_names_of_one_array_and_a_frozen_tie() -> None:
    def rank(comm: FakeComm) -> None:
        shared = np.arange(4.0)
        params = {"a": shared, "b": {"x": shared, "y": shared}, "c": np.ones(2)}
        with fully_shard(params, comm, units=["a", "b", "c"], reduce_op="sum") as model:
            give(model, {"a": 1.0, "b.x": 2.0, "b.y": 4.0})
            assert_shards(model, "grad", {"a": np.full(4, 14.0), "c": np.zeros(2)})
            model.zero_grad()
            with model.microbatch():
                with model["a"].forward():
                    pass
                with model["b"].backward() as (_, g):
                    g["x"][...] = 1
                with model["root"].backward() as (_, g):
                    g[...] = 2  # beside what its other names have added
            assert_shards(model, "grad", {"a": np.full(4, 6.0), "c": np.zeros(2)})
            model.zero_grad()
            assert model.freeze("b.y") == ["a"]  # one array: frozen by any of its names
            with model.microbatch():
                for unit in model:
                    with unit.forward():
                        pass
                with model["c"].backward() as (_, g):
                    g[...] = 1
                with model["b"].backward() as (w, g):
                    assert g == {} and set(w) == {"x", "y"}
        with fully_shard(params, comm, frozen=["b.x"]) as model:
            assert not model.is_trainable("a")

    run_threads(2, rank)


# --- freezing -----------------------------------------------------------------------------------------------


@each_n
def test_optimizer_state_goes_with_its_parameters_when_others_are_frozen_and_unfrozen(n: int) -> None:
    def rank(comm: FakeComm) -> None:
        params = chain()
        for way in ways(n).values():
            with (
                fully_shard(params, comm, units=["layers.*"], reduce_op="sum", **way) as model,
                fully_shard(params, comm, units=["layers.*"], reduce_op="sum", **way) as plain,
            ):
                opt, other = SGD(model, lr=LR, momentum=0.5), SGD(plain, lr=LR, momentum=0.5)
                digest = model.layout.digest()
                for step in range(4):
                    train(model, *batch(comm.rank, n, step))
                    train(plain, *batch(comm.rank, n, step))
                    opt.step()
                    other.step()
                    model.zero_grad()
                    plain.zero_grad()
                    if step == 1:  # frozen and unfrozen with no step between: only its own state is lost
                        assert model.freeze("layers.1.b") == ["layers.1.b"]
                        assert model.layout.digest() != digest
                        assert model.unfreeze("layers.1") == ["layers.1.b"]
                        assert model.layout.digest() == digest
                        twins = states_of(plain, other)
                        for name, mine in states_of(model, opt).items():
                            theirs = twins.pop(name)
                            if name == "layers.1.b":
                                assert not mine.any()
                            else:
                                np.testing.assert_array_equal(mine, theirs)
                        assert not twins
                        for shard, twin in zip(model.shards, plain.shards, strict=True):
                            np.testing.assert_array_equal(shard.data, twin.data)

    run_threads(n, rank)


def states_of(model: Any, opt: Any) -> dict[str, np.ndarray]:
    """Parts of the momentum by name."""
    return {
        piece.name: next(iter(opt.state[shard.key].values()))[piece.shard_start : piece.shard_stop]
        for shard in model.shards
        if shard.trainable
        for piece in pieces(shard.group, model.shard_rank)
    }


@each_n
def test_freezing_keeps_float32_masters_and_drops_gradient_memory(n: int) -> None:
    def rank(comm: FakeComm) -> None:
        params = {"a": np.ones(5, np.float32), "b": np.ones(7, np.float32)}
        precision = MixedPrecision(param="bfloat16")
        for way in ways(n).values():
            with fully_shard(params, comm, precision=precision, reduce_op="sum", **way) as model:
                opt = AdamW(model, lr=2.0**-12)
                give(model, {"a": 1.0, "b": 1.0})
                opt.step()
                model.zero_grad()
                value = max(shard.data.max() for shard in model.shards)  # 0: this rank has none
                assert model.freeze("b") == ["b"]
                masters = {s.group.entries[0].name: s for s in model.shards}
                assert masters["a"].data.dtype == masters["b"].data.dtype == np.float32
                assert masters["b"].grad is None and set(opt.state) == {masters["a"].key}
                assert value == 0 or 0.999 < value < 1
                assert_shards(model, "data", {name: np.full(9, value) for name in ("a", "b") if value})
                give(model, {"a": 1.0})
                opt.step()
                model.zero_grad()
                assert model.unfreeze("*") == ["b"]
                give(model, {"a": 1.0, "b": 1.0})
                opt.step()
                assert opt.describe()["begun"] == {"b": 2}

    run_threads(n, rank)


@pytest.mark.parametrize("n", RANKS[1:])
def test_freezing_what_ranks_do_not_agree_on_changes_nothing(n: int) -> None:
    def rank(comm: FakeComm) -> None:
        params = {"a": np.ones(5), "b": np.ones(7), "ids": np.arange(3)}
        with fully_shard(params, comm, frozen=["b"]) as model:
            layout = model.layout
            with pytest.raises(
                ValueError, match=r"freeze\(\): the ranks differ: rank 0 has a, and rank 1 has"
            ):
                model.freeze("a" if comm.rank != 1 else "b")
            with pytest.raises(ValueError, match=r"unfreeze\(\): the pattern 'x' takes no parameter"):
                model.unfreeze("x" if comm.rank == n - 1 else "b")
            with pytest.raises(ValueError, match="'ids' is int64: only floating-point"):
                model.unfreeze("*")
            assert model.layout is layout and model.freeze("b") == []
            give(model, {"a": 1.0})

    run_threads(n, rank)

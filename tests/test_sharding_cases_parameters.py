"""Tied, mixed, frozen and tiny parameters, and the weights that ranks start from.

Cases from public reports of people who train with FSDP and ZeRO, each on 1, 2, 3 and 4 ranks; the reference
is one rank on the concatenated batch.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
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
    forward,
    give,
    host,
    reference,
    sharded,
    stepped,
    train,
    ways,
)

from sharding import SGD, fully_shard

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


# --- the weights at the start -------------------------------------------------------------------------------


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

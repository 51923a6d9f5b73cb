"""The order of collectives and computation, on threads with a communicator that notes every call.

What the engine computes with them is in the files test_sharding_cases_*.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sharding_ranks import (  # type: ignore[import-not-found]
    SIZES,
    WAYS,
    FakeComm,
    abc,
    assert_shards,
    batch,
    chain,
    each_n,
    forward,
    give,
    reference,
    run_threads,
    story,
    train,
    walk,
    ways,
)

from sharding import fully_shard

FORWARD = ["gather a", "gather b", "forward a", "gather c", "forward b", "forward c"]
BACKWARD = [
    *("gather c", "gather b", "backward c", "reduce c"),
    *("gather a", "backward b", "reduce b", "backward a", "reduce a"),
]
FORWARD_EACH = ["gather a", "forward a", "gather b", "forward b", "gather c", "forward c"]
BACKWARD_EACH = [
    *("gather c", "backward c", "reduce c", "gather b", "backward b", "reduce b"),
    *("gather a", "backward a", "reduce a"),
]


def without(story: list[str], *kinds: str) -> list[str]:
    return [line for line in story if not line.startswith(kinds)]


ORDERS = {
    "full_shard": FORWARD + BACKWARD,
    "full_shard, kept after forward": FORWARD + without(BACKWARD, "gather"),
    "full_shard, halves kept": FORWARD + BACKWARD,
    "full_shard, no prefetch": FORWARD_EACH + BACKWARD_EACH,
    "shard_grad_op": FORWARD + without(BACKWARD, "gather"),
    "shard_optimizer": FORWARD + without(BACKWARD, "gather"),
}


@pytest.mark.parametrize("way", ORDERS)
def test_the_exact_order_of_collectives_and_computation(way: str) -> None:
    def rank(comm: FakeComm) -> None:
        with abc(comm, **WAYS[way]) as model:
            assert walk(model, comm) == ORDERS[way]
            model.zero_grad()
            model.updated()
            assert walk(model, comm) == ORDERS[way]

    run_threads(2, rank)


def test_no_shard_reduces_after_each_backward_and_gathers_nothing() -> None:
    def rank(comm: FakeComm) -> None:
        with abc(comm, strategy="no_shard") as model:
            expected = [
                *("forward a", "forward b", "forward c", "backward c", "over replicas c"),
                *("backward b", "over replicas b", "backward a", "over replicas a"),
            ]
            assert walk(model, comm, last=False) == without(expected, "over")
            assert walk(model, comm) == expected

    run_threads(2, rank)


def test_hybrid_reduces_over_replicas_right_after_its_shard_group() -> None:
    def rank(comm: FakeComm) -> None:
        with abc(comm, strategy="hybrid_shard", mesh=(2, 2)) as model:
            found = walk(model, comm)
            assert without(found, "over") == ORDERS["full_shard"]
            over = [line for line in found if not line.startswith(("gather", "forward", "backward"))]
            assert over == [f"{what} {name}" for name in "cba" for what in ("reduce", "over replicas")]

    run_threads(4, rank)


def test_part_of_the_weights_is_gathered_from_the_near_ranks_alone() -> None:
    def rank(comm: FakeComm) -> None:
        with abc(comm, reshard_after_forward=2) as model:
            start = len(comm.log)
            walk(model, comm)
            gathers = [entry for entry in comm.log[start:] if entry[0] == "all_gather"]
            forward_title, backward_title = gathers[0][1], gathers[3][1]
            assert [entry[1] for entry in gathers] == [forward_title] * 3 + [backward_title] * 3
            assert model.mesh.gather.title == forward_title and model.mesh.gather.size == 4
            assert model.mesh.parts.title == backward_title and model.mesh.parts.size == 2

    run_threads(4, rank)


@pytest.mark.parametrize(
    "way", ("full_shard", "full_shard, no prefetch", "shard_grad_op", "full_shard, kept after forward")
)
@pytest.mark.parametrize("skip", ("a", "b", "c", "ab", "bc", "ac", "abc"))
def test_a_rank_that_skips_units_does_the_same_collectives_in_the_same_order(way: str, skip: str) -> None:
    def rank(comm: FakeComm) -> list[Any]:
        with abc(comm, **WAYS[way]) as model:
            found = []
            for _ in range(3):  # weights that stay must not be gathered again, by nobody
                found.append(walk(model, comm, skip if comm.rank == 1 else ""))
                model.zero_grad()
            return [[x.split()[1] for x in story if x.startswith(kind)] for story in found
                    for kind in ("gather", "reduce")]  # fmt: skip

    first, second = run_threads(2, rank)
    assert first == second
    gathers, reductions = ORDERS[way], ["c", "b", "a"]
    assert first[0] == [line.split()[1] for line in gathers if line.startswith("gather")]
    assert first[1::2] == [reductions] * 3


def test_the_root_unit_is_gathered_first_and_reduced_last() -> None:
    def rank(comm: FakeComm) -> None:
        params = {name: np.zeros(size) for name, size in SIZES.items()}
        with fully_shard(params, comm, units=["a", "c"]) as model:
            assert [unit.name for unit in model] == ["a", "c"] and model.root is model["root"]
            expected = [
                *("gather b", "gather a", "gather c", "forward a", "forward c"),
                *("gather c", "gather a", "backward c", "reduce c", "backward a", "reduce a", "reduce b"),
            ]
            assert walk(model, comm) == expected
            model.zero_grad()
            assert walk(model, comm) == expected[1:]  # it is whole as long as the weights are the same
            model.zero_grad()
            model.updated()
            assert walk(model, comm) == expected

    run_threads(2, rank)


def test_evaluation_gathers_once_and_reduces_nothing() -> None:
    def rank(comm: FakeComm) -> None:
        with abc(comm, reshard_after_forward=False) as model:
            with model.evaluate():
                for unit in model:
                    with unit.forward():
                        comm.log.append(f"forward {unit.name}")
            assert story(comm) == FORWARD
            assert model.counters.live_weight_buffers == 0

    run_threads(2, rank)


def test_accumulating_without_sync_reduces_the_sum_once() -> None:
    def rank(comm: FakeComm) -> None:
        with abc(comm, reduce_op="sum") as model:
            for k in range(3):
                start = len(comm.log)
                give(model, dict.fromkeys(SIZES, 2.0**k), last=k == 2, sync=k == 2)
                reductions = [x for x in story(comm, start) if x.startswith("reduce")]
                assert reductions == (["reduce c", "reduce b", "reduce a"] if k == 2 else [])
            assert_shards(model, "grad", {name: np.full(size, 14.0) for name, size in SIZES.items()})

    run_threads(2, rank)


@each_n
def test_synced_and_unsynced_microbatches_mix(n: int) -> None:
    def rank(comm: FakeComm) -> None:
        for way in ways(n).values():
            with abc(comm, reduce_op="sum", **way) as model:
                for _ in range(2):
                    for k, sync in enumerate((True, False, True, False, True)):
                        give(model, dict.fromkeys(SIZES, 2.0**k), last=k == 4, sync=sync)
                    expected = {name: np.full(size, 31.0 * n) for name, size in SIZES.items()}
                    assert_shards(model, "grad", expected)
                    model.zero_grad()

    run_threads(n, rank)


@each_n
def test_an_evaluation_in_the_middle_of_an_accumulation_changes_nothing(n: int) -> None:
    def rank(comm: FakeComm) -> None:
        params = chain()
        x, t = batch(comm.rank, n)
        for way in ways(n).values():
            for sync in (True, False):
                with fully_shard(params, comm, units=["layers.*"], reduce_op="sum", **way) as model:
                    train(model, x[::2], t[::2], last=False, sync=sync)
                    with model.evaluate():
                        forward(model, x)
                    train(model, x[1::2], t[1::2])
                    with model.evaluate():
                        forward(model, x)
                    assert_shards(model, "grad", reference(params))

    run_threads(n, rank)


@each_n
def test_clipping_by_value_limits_every_element(n: int) -> None:
    def rank(comm: FakeComm) -> None:
        for way in ways(n).values():
            with fully_shard({"w": np.zeros(7)}, comm, **way) as model:
                give(model, {"w": np.arange(7.0) - 3})
                norm = model.grad_norm()
                model.clip_grad_value(2.0)
                assert_shards(model, "grad", {"w": [-2, -2, -1, 0, 1, 2, 2]})
                assert model.grad_norm() == np.sqrt(18) < norm
                for bad in (-1.0, float("nan")):
                    with pytest.raises(ValueError, match=f"clip_grad_value: value={bad}"):
                        model.clip_grad_value(bad)
                    with pytest.raises(ValueError, match=f"clip_grad_norm: max_norm={bad}"):
                        model.clip_grad_norm(bad)
                for bad in (0, -1.0, float("nan")):
                    with pytest.raises(ValueError, match=f"grad_norm: p={bad}"):
                        model.grad_norm(bad)

    run_threads(n, rank)

"""An exception on one rank or on all: who is told, what is seen, and how training goes on.

Cases from public reports of people who train with FSDP and ZeRO, each on 1, 2, 3 and 4 ranks; the reference
is one rank on the concatenated batch.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from sharding_ranks import (  # type: ignore[import-not-found]
    LR,
    RANKS,
    assert_shards,
    backward,
    batch,
    chain,
    each_n,
    flat,
    forward,
    host,
    reference,
    sharded,
    stepped,
    train,
    ways,
)

from pynccl.testing import RankError
from sharding import SGD, PhaseError


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

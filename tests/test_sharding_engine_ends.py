"""A world of one, and how engines end."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import numpy as np
import pytest
from sharding_ranks import (  # type: ignore[import-not-found]
    FakeComm,
    abc,
    alone,
    assert_shards,
    each_n,
    flat,
    run_threads,
    stepped,
    train,
    walk,
    ways,
)

from pynccl.testing import run_ranks
from sharding import SGD, PhaseError, fully_shard


def test_a_world_of_one_is_the_plain_loop_bit_for_bit_without_a_collective() -> None:
    rng = np.random.default_rng(0)
    params = {"layers": [{"w": rng.standard_normal((5, 5)), "b": rng.standard_normal(5)} for _ in range(3)]}
    rows = rng.standard_normal((4, 2, 6, 5))

    def rank(comm: FakeComm) -> None:
        for way in ways(1).values():
            with fully_shard(params, comm, units=["layers.*"], **way) as model:
                opt, plain = SGD(model, lr=0.1), params
                for step in range(2):
                    total: dict[str, Any] = {}
                    for k in range(2):
                        x, t = rows[2 * step + k]
                        train(model, x, t, last=k == 1)
                        saved, grad = [x], t
                        for layer in plain["layers"]:
                            saved.append(saved[-1] @ layer["w"] + layer["b"])
                        for i in (2, 1, 0):
                            for name, g in (("w", saved[i].T @ grad), ("b", grad.sum(0))):
                                key = f"layers.{i}.{name}"
                                total[key] = total[key] + g if key in total else g
                            grad = grad @ plain["layers"][i]["w"].T
                    assert_shards(model, "grad", total)
                    opt.step()
                    model.zero_grad()
                    plain = stepped(plain, total, 0.1)
                    assert_shards(model, "data", flat(plain))
            assert [entry for entry in comm.log if entry[0] != "broadcast"] == []
            assert model.counters.calls() == {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}

    alone(rank)


@each_n
def test_closing_ends_the_engines_communicators_once_and_leaves_the_users_alone(n: int) -> None:
    def rank(comm: FakeComm) -> None:
        model = abc(comm)
        walk(model, comm)
        mine = [c for c in (model.mesh.gather, model.mesh.reduce) if c is not None]
        model.close()
        model.close()
        assert {c.ended for c in mine} == ({"destroyed"} if n > 1 else set()) and comm.ended is None
        with pytest.raises(PhaseError, match=r"microbatch\(\): the engine was closed"):
            walk(model, comm)
        with pytest.raises(PhaseError, match=r"a\.unshard\(\): the engine was closed"):
            model["a"].unshard()

    run_threads(n, rank)


def test_nothing_is_left_behind_by_engines_on_host_streams() -> None:
    def rank(comm: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ResourceWarning)
            for _ in range(3):
                with abc(comm) as model, model.microbatch():
                    pass
                with pytest.raises(ValueError, match="shape"):
                    fully_shard(comm=comm, init=lambda *_: np.zeros(3), shapes={"a": ((2,), "float32")})
                del model
                gc.collect()

    run_ranks(2, rank, library="host", timeout=30)

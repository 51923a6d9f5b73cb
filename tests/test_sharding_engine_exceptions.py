"""An exception, an interrupt or a failed collective ends the microbatch on all ranks; then they can go on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sharding_ranks import (  # type: ignore[import-not-found]
    RANKS,
    SIZES,
    WAYS,
    FakeComm,
    LeftError,
    abc,
    alone,
    assert_shards,
    backward,
    batch,
    chain,
    forward,
    give,
    opened,
    reference,
    run_threads,
    train,
    walk,
)

from sharding import SGD, PhaseError, fully_shard, load, save


def test_an_exception_that_is_caught_inside_the_microbatch_is_not_forgotten() -> None:
    def rank(comm: FakeComm) -> None:
        with abc(comm) as model:
            with pytest.raises(PhaseError, match="ended a unit's backward.*gradients are void.*zero_grad"):
                with model.microbatch():
                    with model["a"].forward():
                        pass
                    try:
                        with model["c"].backward():
                            raise KeyError
                    except KeyError:
                        pass
            model.zero_grad()
            walk(model, comm)

    alone(rank)


@pytest.mark.parametrize("n", RANKS[1:])
def test_an_exception_reaches_ranks_that_are_anywhere(n: int) -> None:
    """In a microbatch, in the next one, in a norm: they raise, and zero_grad joins them again."""

    def rank(comm: FakeComm) -> None:
        params = chain()
        with fully_shard(params, comm, units=["layers.*"], reduce_op="sum") as model:
            x, t = batch(comm.rank, n)
            for where in ("forward", "backward", "norm", "evaluate"):
                expected = KeyError if comm.rank == 0 else LeftError
                with pytest.raises(expected) as caught:
                    if where == "norm":
                        train(model, x, t)
                        if comm.rank == 0:
                            with model.ending_all_ranks():
                                raise KeyError
                        model.grad_norm()
                    elif where == "evaluate":
                        with model.evaluate():
                            with model[0].forward():
                                pass
                            if comm.rank == 0:
                                raise KeyError
                    else:
                        with model.microbatch():
                            if comm.rank == 0 and where == "forward":
                                raise KeyError
                            saved = forward(model, x)
                            if comm.rank == 0:
                                raise KeyError
                            backward(model, saved, t)
                assert comm.rank == 0 or "rank 0 has left" in str(caught.value)
                with pytest.raises(PhaseError, match="call zero_grad"), model.evaluate():
                    pass
                assert model.mesh.gather.ended == "aborted" and comm.ended is None
                model.zero_grad()
                train(model, x, t)
                assert_shards(model, "grad", reference(params))
                model.zero_grad()

    run_threads(n, rank)


def test_an_interrupt_ends_a_microbatch_like_an_exception() -> None:
    def rank(comm: FakeComm) -> None:
        with abc(comm) as model:
            with pytest.raises(KeyboardInterrupt if comm.rank == 0 else LeftError), model.microbatch():
                with model["a"].forward():
                    pass
                if comm.rank == 0:
                    raise KeyboardInterrupt
            assert model.phase == "RESTING" and model.counters.live_weight_buffers == 0

    run_threads(2, rank)


class FailingComm:
    """Of an engine's communicator: `left[0]` more calls, then each fails as when another rank has left."""

    def __init__(self, comm: Any, left: list[int]) -> None:
        self._comm, self._left = comm, left

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        if name not in ("all_gather", "reduce_scatter", "all_reduce"):
            return found

        def call(*args: Any, **kinds: Any) -> Any:
            self._left[0] -= 1
            if self._left[0] < 0:
                raise LeftError("failed on purpose")
            return found(*args, **kinds)

        return call


@pytest.mark.parametrize("debug", (False, True))
@pytest.mark.parametrize(
    "way", ("full_shard", "full_shard, no prefetch", "full_shard, halves kept", "hybrid_shard")
)
def test_a_failure_at_any_collective_loses_no_buffer(way: str, debug: bool) -> None:
    def rank(comm: FakeComm) -> None:
        params = {"root": np.zeros(16), **{name: np.zeros(size) for name, size in SIZES.items()}}
        given = {**WAYS[way], "mesh": (1, 2)} if "mesh" in WAYS[way] else WAYS[way]
        with fully_shard(params, comm, units=list(SIZES), debug=debug, **given) as model:
            give(model, lambda name: 1.0)
            done = sum(model.counters.calls().values())
            model.zero_grad()
            for calls in range(done):
                left = [calls]
                for name in ("gather", "reduce", "replicas", "parts"):
                    if getattr(model.mesh, name) is not None:
                        setattr(model.mesh, name, FailingComm(getattr(model.mesh, name), left))
                with pytest.raises(LeftError):
                    give(model, lambda name: 1.0)
                assert model.counters.live_grad_buffers == model.counters.live_weight_buffers == 0
                model.zero_grad()
            give(model, lambda name: 1.0)
            assert_shards(model, "grad", {name: np.ones(array.size) for name, array in params.items()})

    run_threads(2, rank)


def test_an_exception_after_the_last_reduction_ends_the_microbatch_on_all_ranks() -> None:
    """The other rank has its gradients already, and must not make the step alone. Nor in a forward pass."""

    def rank(comm: FakeComm) -> None:
        with abc(comm) as model:
            opt = SGD(model, lr=1.0)
            with pytest.raises(KeyError if comm.rank == 1 else LeftError), model.microbatch():
                for _ in opened(model):
                    pass
                if comm.rank == 1:
                    raise KeyError
            model.zero_grad()
            with pytest.raises(KeyError if comm.rank == 1 else LeftError), model.evaluate():
                for unit in model:
                    with unit.forward():
                        if comm.rank == 1 and unit.name == "b":
                            raise KeyError
            model.zero_grad()
            give(model, lambda name: 1.0)
            assert opt.step() and opt.steps == 1
            assert_shards(model, "data", {name: np.full(size, -1.0) for name, size in SIZES.items()})

    run_threads(2, rank)


def test_ranks_that_are_at_different_steps_when_an_exception_comes_do_not_go_on(tmp_path: Any) -> None:
    """One rank's loop left out a step, which nobody could see; the exception is when they compare."""

    def rank(comm: FakeComm) -> None:
        with abc(comm) as model:
            opt = SGD(model, lr=1.0)
            give(model, lambda name: 1.0)
            opt.step()
            model.zero_grad()
            save(tmp_path, model, opt)
            give(model, lambda name: 1.0)
            if comm.rank == 0:
                opt.step()
            model.zero_grad()
            with pytest.raises(KeyError if comm.rank == 1 else LeftError), model.microbatch():
                if comm.rank == 1:
                    raise KeyError
            for _ in range(2):
                with pytest.raises(PhaseError, match="rank 0 has made 2 steps and rank 1 1: .*load the last"):
                    model.zero_grad()
            load(tmp_path, model, opt)
            assert opt.steps == 1
            give(model, lambda name: 1.0)
            assert opt.step()
            assert_shards(model, "data", {name: np.full(size, -2.0) for name, size in SIZES.items()})

    run_threads(2, rank)


def test_an_interrupt_while_an_error_is_cleared_up_leaves_a_model_that_goes_on() -> None:
    def rank(comm: FakeComm) -> None:
        with abc(comm) as model:
            plain, times = model.runtime.abandon, []

            def abandon() -> None:
                times.append(1)
                if len(times) < 3:
                    raise KeyboardInterrupt
                plain()

            model.runtime.abandon = abandon
            with pytest.raises(KeyboardInterrupt):
                with model.microbatch():
                    with model["a"].forward():
                        pass
                    with model["c"].backward():
                        raise KeyError
            model.zero_grad()
            assert len(times) == 3 and model.counters.live_grad_buffers == 0
            walk(model, comm)

    run_threads(2, rank)


def test_leaving_by_an_exception_aborts_instead_of_waiting() -> None:
    def rank(comm: FakeComm) -> None:
        with pytest.raises(KeyError), abc(comm) as model:
            raise KeyError
        assert model.mesh.gather.ended == "aborted"

    run_threads(2, rank)

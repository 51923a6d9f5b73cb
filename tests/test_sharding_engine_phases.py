"""Calls at the wrong moment are errors that say what is expected, and change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sharding_ranks import (  # type: ignore[import-not-found]
    LR,
    SIZES,
    FakeComm,
    abc,
    alone,
    assert_shards,
    batch,
    chain,
    each_n,
    flat,
    forward,
    give,
    reference,
    run_threads,
    stepped,
    train,
    walk,
    ways,
)

from sharding import SGD, AdamW, PhaseError, fully_shard, load, save


@each_n
def test_calls_inside_a_microbatch_that_belong_outside_are_errors_that_change_nothing(n: int) -> None:
    def rank(comm: FakeComm) -> None:
        params = chain()
        with fully_shard(params, comm, units=["layers.*"], reduce_op="sum") as model:
            opt = SGD(model, lr=LR)
            x, t = batch(comm.rank, n)
            calls: dict[str, Any] = {
                r"step\(\)": opt.step,
                r"microbatch\(\)": lambda: model.microbatch().__enter__(),
                r"evaluate\(\)": lambda: model.evaluate().__enter__(),
                r"zero_grad\(\)": model.zero_grad,
                r"updated\(\)": model.updated,
                r"grad_norm\(\)": model.grad_norm,
                r"clip_grad_norm\(\)": lambda: model.clip_grad_norm(1.0),
                r"clip_grad_value\(\)": lambda: model.clip_grad_value(1.0),
                r"layers\.0\.unshard\(\)": model[0].unshard,
                r"layers\.0\.reshard\(\)": model[0].reshard,
                r"close\(\)": model.close,
            }
            with model.microbatch():
                for call, fn in calls.items():
                    with pytest.raises(PhaseError, match=f"^{call} inside forward of a microbatch.*outside"):
                        fn()
                saved = forward(model, x)
                with model[2].backward() as (w, g):
                    for call, fn in calls.items():
                        with pytest.raises(PhaseError, match=f"^{call} inside backward of a microbatch"):
                            fn()
                    g["w"][...], g["b"][...] = saved[2].T @ t, t.sum(0)
                    grad = t @ w["w"].T
                for i in (1, 0):
                    with model[i].backward() as (w, g):
                        g["w"][...], g["b"][...] = saved[i].T @ grad, grad.sum(0)
                        grad = grad @ w["w"].T
            assert_shards(model, "grad", reference(params))
            opt.step()
            assert_shards(model, "data", flat(stepped(params, reference(params), LR)))

    run_threads(n, rank)


def test_units_out_of_phase_say_what_is_expected() -> None:
    def rank(comm: FakeComm) -> None:
        with abc(comm) as model:
            with pytest.raises(PhaseError, match=r"a\.forward\(\) outside of a microbatch; open one"):
                model["a"].forward().__enter__()
            with pytest.raises(PhaseError, match=r"a\.backward\(\) outside of a microbatch; open one"):
                model["a"].backward().__enter__()
            with model.evaluate(), model["a"].forward():
                with pytest.raises(PhaseError, match=r"a\.backward\(\) inside evaluate\(\)"):
                    model["a"].backward().__enter__()
                with pytest.raises(PhaseError, match=r"step\(\) inside a forward pass \(evaluate\)"):
                    SGD(model, lr=1.0).step()
            with model.microbatch():
                with pytest.raises(PhaseError, match=r"c\.backward\(\) before any forward\(\)"):
                    model["c"].backward().__enter__()
                with model["a"].forward():
                    for context in (model["b"].forward(), model["c"].backward()):
                        with pytest.raises(PhaseError, match="inside the context of unit 'a'; close that"):
                            context.__enter__()
                with pytest.raises(PhaseError, match=r"a\.forward\(\).*passed.*expects unit 'b'"):
                    model["a"].forward().__enter__()
                with model["c"].backward():
                    pass
                with pytest.raises(PhaseError, match=r"b\.forward\(\) after backward began"):
                    model["b"].forward().__enter__()
                with pytest.raises(PhaseError, match=r"c\.backward\(\).*passed.*expects unit 'b'"):
                    model["c"].backward().__enter__()

    alone(rank)


def test_steps_that_have_no_gradients_or_old_ones_are_errors() -> None:
    def rank(comm: FakeComm) -> None:
        with abc(comm) as model:
            opt = SGD(model, lr=1.0)
            with pytest.raises(PhaseError, match="nothing has been accumulated since zero_grad"):
                opt.step()
            walk(model, comm)
            opt.step()
            with pytest.raises(
                PhaseError, match=r"microbatch\(\): the gradients of the last step.*zero_grad"
            ):
                walk(model, comm)
            model.zero_grad()
            with pytest.raises(PhaseError, match="nothing has been accumulated"):
                model.grad_norm()
            with pytest.raises(ValueError, match=r"last=True, sync=False.*pass sync=True"):
                walk(model, comm, sync=False)
            walk(model, comm)

    alone(rank)


def test_a_microbatch_that_ends_inside_a_unit_is_an_error() -> None:
    def rank(comm: FakeComm) -> None:
        with abc(comm) as model:
            held = model["a"].forward()
            with pytest.raises(PhaseError, match="ends inside the context of unit 'a'"), model.microbatch():
                held.__enter__()
            model.zero_grad()
            walk(model, comm)

    alone(rank)


def test_a_step_needs_a_backward_and_new_gradients() -> None:
    def rank(comm: FakeComm) -> None:
        with abc(comm) as model:
            opt = AdamW(model)
            with model.microbatch(), model["a"].forward():
                pass
            with pytest.raises(PhaseError, match=r"step\(\): no unit's backward.*evaluate\(\)"):
                opt.step()
            model.zero_grad()
            give(model, lambda name: 1.0)
            opt.step()
            with pytest.raises(PhaseError, match=r"step\(\): a step has used these gradients already"):
                opt.step()
            assert opt.steps == 1

    alone(rank)


def test_a_rank_without_data_needs_no_backward() -> None:
    def rank(comm: FakeComm) -> None:
        with abc(comm, reduce_op="sum") as model:
            opt = SGD(model, lr=1.0)
            if comm.rank == 0:
                give(model, lambda name: 1.0)
            else:
                with model.microbatch():
                    pass
            assert opt.step()
            assert_shards(model, "data", {name: -np.ones(size) for name, size in SIZES.items()})

    run_threads(2, rank)


@each_n
def test_freeze_and_load_refuse_an_unsharded_unit_with_nothing_changed(n: int, tmp_path: Any) -> None:
    def rank(comm: FakeComm) -> None:
        with fully_shard(chain(), comm, units=["layers.*"]) as model:
            opt = SGD(model, lr=1.0)
            save(tmp_path, model, opt)
            x, t = batch(comm.rank, n)
            train(model, x, t)
            opt.step()
            model.zero_grad()
            model[0].unshard()
            for call in (lambda: load(tmp_path, model, opt), lambda: model.freeze("*.b")):
                with pytest.raises(PhaseError, match="unit 'layers.0' is unsharded"):
                    call()
            assert opt.steps == 1
            model[0].reshard()
            train(model, x, t)

    run_threads(n, rank)


@each_n
def test_unshard_and_reshard_by_hand(n: int) -> None:
    def rank(comm: FakeComm) -> None:
        params = chain()
        for way in ways(n).values():
            with fully_shard(params, comm, units=["layers.*"], **way) as model:
                for i in range(3):
                    w = model[i].unshard()
                    np.testing.assert_array_equal(w["w"], params["layers"][i]["w"])
                    assert not w["w"].flags.writeable
                    for call in (model.updated, lambda m=model: m.microbatch().__enter__()):
                        with pytest.raises(PhaseError, match=rf"unit 'layers\.{i}' is unsharded;.*reshard"):
                            call()
                    model[i].reshard()
                model[0].reshard()  # nothing to do
                train(model, *batch(comm.rank, n))

    run_threads(n, rank)


def test_a_third_unit_unsharded_by_hand_is_an_error_on_every_rank() -> None:
    def rank(comm: FakeComm) -> None:
        with abc(comm) as model:
            model["a"].unshard()
            model["b"].unshard()
            before = len(comm.log)
            with pytest.raises(
                PhaseError, match=r"c\.unshard\(\): two units are unsharded.*reshard\(\) of one"
            ):
                model["c"].unshard()
            assert comm.log[before:] == []
            model["a"].reshard()
            model["c"].unshard()
            model["b"].reshard()
            model["c"].reshard()
            walk(model, comm)

    run_threads(2, rank)

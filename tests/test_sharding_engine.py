"""How the engine behaves, on threads with a communicator that notes every call: orders, phases, buffers.

What it computes is in test_sharding_cases.py.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from sharding_ranks import (  # type: ignore[import-not-found]
    RANKS,
    WAYS,
    FakeComm,
    LeftError,
    assert_shards,
    backward,
    batch,
    chain,
    flat,
    forward,
    give,
    reference,
    run_threads,
    stepped,
    train,
    ways,
)

from pynccl.testing import run_ranks
from sharding import SGD, AdamW, MixedPrecision, PhaseError, by_layer, cosine, fully_shard, load, save
from sharding.buffers import Counters, Ring
from sharding.layout import pieces
from sharding.runtime import HostRuntime

each_n = pytest.mark.parametrize("n", RANKS)
LR = 2.0**-4
# Units of different sizes, so that a call in the log says whose it is.
SIZES = {"a": 48, "b": 144, "c": 240}


def abc(comm: Any, **way: Any) -> Any:
    return fully_shard({name: np.zeros(size) for name, size in SIZES.items()}, comm, units=list(SIZES), **way)


def story(comm: FakeComm, start: int = 0) -> list[str]:
    """The log in words: `gather a`, `reduce a`, `over replicas a`, and what the test itself noted."""
    kinds = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "over replicas"}
    names = {size: name for name, size in SIZES.items()}
    names |= {size // 2: name for name, size in SIZES.items() if size // 2 not in names}
    found = []
    for entry in comm.log[start:]:
        if isinstance(entry, str):
            found.append(entry)
        elif entry[0] == "all_reduce" and entry[2] == 1:
            continue  # the meeting at the end
        elif entry[0] in kinds:
            found.append(f"{kinds[entry[0]]} {names[entry[2]]}")
    return found


def walk(model: Any, comm: FakeComm, skip: str = "", **kinds: bool) -> list[str]:
    """A microbatch that notes when each unit computes; its story."""
    start = len(comm.log)
    with model.microbatch(**kinds):
        for unit in model:
            if unit.name not in skip:
                with unit.forward():
                    comm.log.append(f"forward {unit.name}")
        for unit in reversed(model):
            if unit.name not in skip:
                with unit.backward():
                    comm.log.append(f"backward {unit.name}")
    return story(comm, start)


# --- the order of collectives -------------------------------------------------------------------------------

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


# --- phases -------------------------------------------------------------------------------------------------


def alone(fn: Any) -> Any:
    return run_threads(1, fn)[0]


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


def test_a_microbatch_that_ends_inside_a_unit_is_an_error() -> None:
    def rank(comm: FakeComm) -> None:
        with abc(comm) as model:
            held = model["a"].forward()
            with pytest.raises(PhaseError, match="ends inside the context of unit 'a'"), model.microbatch():
                held.__enter__()
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
                for unit in model:
                    with unit.forward():
                        pass
                for unit in reversed(model):
                    with unit.backward():
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


def test_optimizers_say_what_they_need_and_what_they_are() -> None:
    def rank(comm: FakeComm) -> None:
        with pytest.raises(TypeError, match="AdamW: model is a dict; pass the model from fully_shard"):
            AdamW(chain())
        with fully_shard(chain(), comm, units="layers.*") as model:
            assert [unit.name for unit in model] == ["layers.0", "layers.1", "layers.2"]
            assert repr(model) == "<ShardedModel of 3 units, 36 parameters, full_shard over 1 rank>"
            assert repr(model[0]) == "<Unit 'layers.0': 2 parameters, 12 elements>"
            opt = SGD(model, lr=0.5)
            assert repr(opt) == "<SGD after 0 steps: lr=0.5, 0 bytes of state>"
            assert len(model.relayout_listeners) == 1
            gone = weakref.ref(opt)
            del opt
            gc.collect()
            assert gone() is None
            model.freeze("*")
            assert model.relayout_listeners == []
            with pytest.raises(ValueError, match="AdamW: nothing in the model is trainable"):
                AdamW(model)

    alone(rank)


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


def test_load_can_leave_the_hyper_parameters_alone(tmp_path: Any) -> None:
    def rank(comm: FakeComm) -> None:
        with fully_shard(chain(), comm, units=["layers.*"]) as model:
            old = SGD(model, cosine(1.0, steps=9), groups={"*.b": {"lr": 0.25}})
            save(tmp_path, model, old)
            new = SGD(model, cosine(3.0, steps=9))
            load(tmp_path, model, new)
            assert (new.hyper("layers.0.w")["lr"], new.hyper("layers.0.b")["lr"]) == (3.0, 0.25)
            plain = SGD(model, 7.0)
            load(tmp_path, model, plain, hyper=False)
            assert plain.hyper("layers.0.b")["lr"] == 7.0

    alone(rank)


def test_a_save_names_the_first_field_in_which_optimizers_differ(tmp_path: Any) -> None:
    def rank(comm: FakeComm) -> None:
        with fully_shard(chain(), comm, units=["layers.*"]) as model:
            opt = SGD(model, lr=0.5 + comm.rank)
            with pytest.raises(
                ValueError,
                match=r"optimizer\['groups'\]\[0\]\['hyper'\]\['lr'\] differs.*0.5 on rank 0, 1.5 on rank 1",
            ):
                save(tmp_path, model, opt)

    run_threads(2, rank)


def test_a_checkpoint_given_instead_of_its_folder_is_said_to_be_one(tmp_path: Any) -> None:
    def rank(comm: FakeComm) -> None:
        with fully_shard(chain(), comm) as model:
            path = save(tmp_path, model, step=3)
            with pytest.raises(
                FileNotFoundError, match="is itself a checkpoint; pass the folder that it lies in"
            ):
                load(path, model)

    alone(rank)


def test_what_no_checkpoint_can_hold_is_refused_at_once() -> None:
    def rank(comm: FakeComm) -> None:
        with pytest.raises(
            TypeError, match="parameter 'a' has dtype float8_e4m3b11fnuz, which no checkpoint"
        ):
            fully_shard({"a": np.zeros(3, ml_dtypes.float8_e4m3b11fnuz)}, comm)

    alone(rank)


def test_by_layer_with_a_parameter_named_root_says_what_to_rename() -> None:
    def rank(comm: FakeComm) -> None:
        with pytest.raises(ValueError, match=r"unit of root.w 'root'.*by_layer.*rename that, or pass a dict"):
            fully_shard({"root": {"w": np.zeros(3)}, "a": np.zeros(3)}, comm, units=by_layer)

    alone(rank)


# --- by hand ------------------------------------------------------------------------------------------------


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


# --- one rank, and ends -------------------------------------------------------------------------------------


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


def test_leaving_by_an_exception_aborts_instead_of_waiting() -> None:
    def rank(comm: FakeComm) -> None:
        with pytest.raises(KeyError), abc(comm) as model:
            raise KeyError
        assert model.mesh.gather.ended == "aborted"

    run_threads(2, rank)


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


def test_events_tell_of_waits_and_computation_in_their_order() -> None:
    def rank(comm: FakeComm) -> None:
        with abc(comm) as model:
            seen: list[tuple[Any, ...]] = []
            model.on_event(lambda *event: seen.append(event))
            walk(model, comm)
            told = [(name, unit, detail) for name, unit, _, _, detail in seen]
            assert told[:2] == [("gather", "a", ""), ("compute", "a", "forward")]
            assert [unit for name, unit, _ in told if name == "reduce"] == ["c", "b", "a"]
            assert all(start <= stop for _, _, start, stop, _ in seen)

    run_threads(2, rank)


def test_units_are_found_by_name_and_position() -> None:
    def rank(comm: FakeComm) -> None:
        with abc(comm) as model:
            assert len(model) == 3 and model[1] is model["b"] and list(reversed(model)) == list(model)[::-1]
            with pytest.raises(KeyError, match="no unit 'd'; the units are a, b, c"):
                model["d"]

    alone(rank)

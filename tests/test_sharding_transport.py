"""Collectives of the user's own in the engine: the same training, true bytes, feedback, what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from sharding_ranks import (  # type: ignore[import-not-found]
    RANKS,
    backward,
    batch,
    chain,
    forward,
    give,
    run_threads,
    train,
    ways,
)

import pynccl
import sharding
from pynccl.collectives import Builder, Compressed, Compressor, Integers, Schedule, TopK, generate
from pynccl.testing import run_ranks
from sharding import SGD, AdamW, MixedPrecision, fully_shard, report

LR = 2.0**-4


def host(n: int, fn: Any, *args: Any, **options: Any) -> list[Any]:
    return run_ranks(n, fn, *args, library="host", timeout=100, **options)


def used(way: dict[str, Any]) -> tuple[str, ...]:
    """The collectives that a strategy has."""
    strategy = way.get("strategy", "full_shard")
    if strategy == "no_shard":
        return ("all_reduce",)
    return ("all_gather", "reduce_scatter", *(("all_reduce",) if strategy == "hybrid_shard" else ()))


def sharded(comm: Any, params: Any = None, **way: Any) -> Any:
    given = {"units": ["layers.*"], "reduce_op": "sum", **way}
    return fully_shard(chain() if params is None else params, comm, **given)


# --- schedules ----------------------------------------------------------------------------------------------


def exact(comm: Any) -> None:
    """Integers in float64: the same bits in any order of sums, so by any algorithm, in every kind of step."""
    for name, way in ways(comm.size).items():
        models = [sharded(comm, **way)]
        for algorithm in ("pynccl:ring", "pynccl:direct"):
            models.append(sharded(comm, **way, collectives=dict.fromkeys(used(way), algorithm)))
        found = []
        for model in models:
            with model:
                for step in range(2):
                    train(model, *batch(comm.rank, comm.size, 2 * step), last=False)
                    train(model, *batch(comm.rank, comm.size, 2 * step + 1))
                    SGD(model, lr=LR).step()
                    model.zero_grad()
                found.append(model.full_state_dict())
                report.check(model, 2, 2)
        for other in found[1:]:
            for key, wanted in found[0].items():
                np.testing.assert_array_equal(other[key], wanted, err_msg=f"{name}: {key}")


@pytest.mark.parametrize("n", RANKS)
def test_training_by_schedules_is_training_bit_for_bit(n: int) -> None:
    host(n, exact)


def relayed(n: int) -> Schedule:
    """Every rank sends its block to rank 0 in turn, and rank 0 sends all of them to every rank."""
    from pynccl.collectives import IN, OUT

    b = Builder("relayed", "all_gather", n)
    for r in range(n):
        b.copy(r, IN[0], OUT[r])
    b.next_round()
    for r in range(1, n):
        b.move(r, 0, OUT[r], OUT[r])
    b.next_round()
    for r in range(1, n):
        b.move(0, r, OUT[0:n], OUT[0:n])
    return b.build()


def by_hand(comm: Any) -> tuple[float, float]:
    with sharded(comm) as plain, sharded(comm, collectives={"all_gather": relayed(comm.size)}) as model:
        for each in (plain, model):
            train(each, *batch(comm.rank, comm.size))
            SGD(each, lr=LR).step()
        for key, wanted in plain.full_state_dict().items():
            np.testing.assert_array_equal(model.full_state_dict()[key], wanted)
        report.check(model, 1)
        return model.counters.all_gather_bytes, plain.counters.all_gather_bytes


def test_a_schedule_of_ones_own_is_used_and_its_bytes_are_those_of_each_rank() -> None:
    found = host(3, by_hand)
    whole = 1.5 * found[0][1]  # two thirds of it are what a rank sends in a ring
    assert [sent for sent, _ in found] == [2 * whole, whole / 3, whole / 3]


def test_elements_sent_are_those_of_the_steps() -> None:
    for n, count in ((3, 7), (4, 0), (5, 1001)):
        for name in ("ring", "direct", "bruck"):
            schedule = generate(name, n, collective="all_gather")
            total = sum(schedule.elements_sent(rank, count) for rank in range(n))
            assert total == n * (n - 1) * count
        ring = generate("ring", n)
        assert sum(ring.elements_sent(rank, count) for rank in range(n)) == 2 * (n - 1) * count


# --- compression --------------------------------------------------------------------------------------------

WIDTH = 64


def regression(comm: Any, steps: int, **way: Any) -> dict[str, Any]:
    """A deep linear model in float32 on data of each rank's own: the loss over all ranks, and the bytes."""
    random = np.random.default_rng(5)
    params = {"layers": [{"w": np.eye(WIDTH, dtype="f4"), "b": np.zeros(WIDTH, "f4")} for _ in range(3)]}
    truth = random.normal(0, 0.3, (WIDTH, WIDTH)).astype("f4")
    mine = np.random.default_rng(100 + comm.rank)
    x = mine.normal(size=(96, WIDTH)).astype("f4")
    y = x @ truth + mine.normal(0, 0.3, (96, WIDTH)).astype("f4")
    with fully_shard(params, comm, units=["layers.*"], **way) as model:
        optimizer = AdamW(model, lr=1e-2, weight_decay=0.0)
        for _ in range(steps):
            with model.microbatch():
                saved = forward(model, x)
                backward(model, saved, (saved[-1] - y) * np.float32(2 / x.size))
            optimizer.step()
            model.zero_grad()
        with model.evaluate():
            out = forward(model, x)[-1]
        loss = comm.all_reduce(np.array([((out - y) ** 2).mean()], "f8"), op="avg")[0]
        sent = {call: getattr(model.counters, f"{call}_bytes") for call in sharding.transport.CALLS}
        made = {call: [c.report() for c in many] for call, many in model.collectives.items()}
        keys = sorted({key for many in model.collectives.values() for c in many for _, key in c._kept})
        weights = model.full_state_dict()
    same = len(set(comm.all_gather_object([float(w.sum()) for w in weights.values()].__repr__()))) == 1
    return {"loss": loss, "sent": sent, "made": made, "keys": keys, "same": same}


def trained(comm: Any, way: dict[str, Any], codec: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    calls = [call for call in used(way) if call != "all_gather"]
    plain = regression(comm, 150, **way)
    return plain, regression(comm, 150, **way, collectives=dict.fromkeys(calls, Compressed(codec)))


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("n", "way"),
    [
        (2, {}),
        (3, {}),
        (2, {"prefetch": False}),
        (2, {"strategy": "shard_grad_op"}),
        (2, {"strategy": "shard_optimizer"}),
        (2, {"strategy": "no_shard"}),
        (4, {"strategy": "hybrid_shard", "mesh": (2, 2)}),
    ],
    ids=str,
)
def test_compressed_training_ends_within_a_hundredth_and_sends_a_quarter(n: int, way: dict[str, Any]) -> None:
    for plain, compressed in host(n, trained, way, Integers(8)):
        assert plain["loss"] < 0.12  # of 6 at the start; 0.09 is noise
        assert compressed["loss"] == pytest.approx(plain["loss"], rel=0.01)
        assert compressed["same"]
        for call in used(way):
            if call == "all_gather":
                assert compressed["sent"][call] == plain["sent"][call]
                continue
            (told,) = compressed["made"][call]
            assert compressed["sent"][call] == told.bytes_sent  # the engine's count is the compressor's
            assert plain["sent"][call] / told.bytes_sent > 3.8
        assert compressed["keys"] == [(f"layers.{i}", 0) for i in range(3)]


def overlapped(comm: Any) -> None:
    """With prefetch the compression runs in the reduce stream's thread, and not in the caller's."""
    import threading

    threads = set()

    @dataclasses.dataclass(frozen=True)
    class Watched(Integers):
        def encode(self, rows: Any) -> Any:
            threads.add(threading.current_thread() is threading.main_thread())
            return super().encode(rows)

    for prefetch, in_caller in ((True, False), (False, True)):
        threads.clear()
        way = {"reduce_scatter": Compressed(Watched(8))}
        with sharded(comm, floats(), collectives=way, prefetch=prefetch) as model:
            train(model, *floats(batch(comm.rank, comm.size)))
        assert threads == {in_caller}


def floats(values: Any = None) -> Any:
    """The chain, or the arrays given, in float32."""
    if values is None:
        return {"layers": [{k: v.astype("f4") for k, v in layer.items()} for layer in chain()["layers"]]}
    return tuple(value.astype("f4") for value in values)


def test_compression_overlaps_with_computation_where_gradients_do() -> None:
    host(2, overlapped)


def kept(model: Any) -> dict[Any, np.ndarray]:
    (compressor,) = model.collectives["reduce_scatter"]
    assert isinstance(compressor, Compressor)
    return {key: value.copy() for (_, key), value in compressor._kept.items()}


def feedback(comm: Any, folder: str) -> None:
    """What was left out is each unit's own, is added to the next step, and is dropped where it is void."""
    way = {"reduce_scatter": Compressed(TopK(1 / 3))}
    with sharded(comm, floats(), collectives=way) as model:
        optimizer = SGD(model, lr=0.0)
        for _ in range(2):
            train(model, *floats(batch(comm.rank, comm.size)))
            optimizer.step()
            first = kept(model)
            model.zero_grad()
        assert list(first) == [("layers.2", 0), ("layers.1", 0), ("layers.0", 0)]
        for unit in model:
            (shard,) = unit.shards
            assert first[unit.name, 0].shape == (comm.size, shard.group.shard)
        assert any(value.any() for value in first.values())
        sharding.save(folder, model, optimizer)
        sharding.load(folder, model, optimizer)
        assert model.collectives == {}  # a checkpoint holds weights, and no rank's leftovers

        train(model, *floats(batch(comm.rank, comm.size)))
        optimizer.step()
        model.zero_grad()
        assert kept(model)
        model.freeze("layers.0")  # the groups have changed
        assert model.collectives == {}
        gradient = {"layers.1.w": 1.0 + comm.rank}
        give(model, gradient)
        assert set(kept(model)) == {("layers.1", 0), ("layers.2", 0)}
        model.zero_grad()

        words = "left on purpose" if comm.rank == 0 else "gathering the weights"
        with pytest.raises(Exception, match=words), model.microbatch():
            for unit in model:
                if comm.rank == 0 and unit.name == "layers.1":
                    raise RuntimeError("left on purpose")
                with unit.forward():
                    pass
        assert model.collectives == {}
        model.zero_grad()
        give(model, gradient)
        assert kept(model)


def test_feedback_belongs_to_units_and_is_dropped_where_it_would_be_void(tmp_path: Any) -> None:
    host(2, feedback, str(tmp_path / "checkpoints"))


def sums(comm: Any) -> None:
    """Over many steps of one gradient the mean of what arrives is that gradient, unit by unit."""
    way = {"reduce_scatter": Compressed(Integers(4))}
    with sharded(comm, floats()) as plain, sharded(comm, floats(), collectives=way) as model:
        train(plain, *floats(batch(comm.rank, comm.size)))
        total = [np.zeros_like(shard.grad) for shard in model.shards]
        for _ in range(64):
            train(model, *floats(batch(comm.rank, comm.size)))
            for sum_, shard in zip(total, model.shards, strict=True):
                sum_ += shard.grad
            model.zero_grad()
        for sum_, shard in zip(total, plain.shards, strict=True):
            largest = np.abs(shard.grad).max(initial=1) * comm.size * 4
            assert np.abs(sum_ / 64 - shard.grad).max(initial=0) <= 2 * largest / 7 / 64


def test_what_a_step_leaves_out_comes_with_later_ones() -> None:
    host(2, sums)


def fails(comm: Any) -> None:
    class Broken(Integers):
        def encode(self, rows: Any) -> Any:
            raise RuntimeError("no room")

    # One rank alone: the others hear of it, and get nothing that it has not sent.
    codec = Broken(8) if comm.rank == 1 else Integers(8)
    way = {"reduce_scatter": Named(Compressed(codec))}
    with sharded(comm, floats(), collectives=way) as model:
        words = "reducing the gradients of unit 'layers.2'.*no room" if comm.rank == 1 else "rank 1"
        with pytest.raises(Exception, match=words):
            train(model, *floats(batch(comm.rank, comm.size)))
        way["reduce_scatter"].inner = Compressed(Integers(8))
        model.zero_grad()
        train(model, *floats(batch(comm.rank, comm.size)))
        SGD(model, lr=LR).step()


class Named:
    """Compression that says on all ranks that it is the same."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return "compression"

    def __call__(self, comm: Any) -> Any:
        return self.inner(comm)

    def bytes_sent(self, *arguments: Any) -> Any:
        return self.inner.bytes_sent(*arguments)

    def bytes_kept(self, *arguments: Any) -> Any:
        return self.inner.bytes_kept(*arguments)


def test_an_error_in_one_rank_s_stream_ends_the_microbatch_on_all_and_training_goes_on() -> None:
    host(3, fails)


def test_the_prediction_knows_the_bytes_and_the_memory_of_feedback() -> None:
    def rank(comm: Any) -> None:
        way = {"reduce_scatter": Compressed(Integers(8))}
        with sharded(comm, floats()) as plain, sharded(comm, floats(), collectives=way) as model:
            train(model, *floats(batch(comm.rank, comm.size)))
            SGD(model, lr=LR).step()
            report.check(model, 1)
            told, usual = model.summary("sgd"), plain.summary("sgd")
            (compressor,) = model.collectives["reduce_scatter"]
            held = sum(each.nbytes for each in compressor._kept.values())
            assert told.total.gradients - usual.total.gradients == held > 0
            assert told.total.sent["reduce_scatter"] == compressor.report().bytes_sent
            assert told.total.sent["all_gather"] == usual.total.sent["all_gather"]

    host(2, rank, processes=False)


# --- an object of one's own, on any communicator ------------------------------------------------------------


def test_an_object_of_ones_own_gets_every_call_with_its_unit() -> None:
    noted: list[Any] = []

    @dataclasses.dataclass(frozen=True)
    class Noting:
        def __call__(self, comm: Any) -> Any:
            class One:
                def reduce_scatter(self, x: Any, *, out: Any, op: str, key: Any) -> None:
                    noted.append((comm.rank, key, x.size, op))
                    comm.reduce_scatter(x, out=out, op=op)

            return One()

        def bytes_sent(self, call: str, elements: int, dtype: str, ranks: int) -> int:
            return 7

        def bytes_kept(self, call: str, elements: int, ranks: int) -> int:
            return 0

    def rank(comm: Any) -> None:
        with sharded(comm, collectives={"reduce_scatter": Noting()}) as model:
            train(model, *batch(comm.rank, 2))
            assert model.counters.reduce_scatter_bytes == 3 * 7

    run_threads(2, rank)
    sizes = [(f"layers.{i}", 0) for i in (2, 1, 0)]
    for rank_ in range(2):
        assert [key for r, key, *_ in noted if r == rank_] == sizes
    assert {note[2:] for note in noted} == {(12, "sum")}


# --- refused ------------------------------------------------------------------------------------------------

WRONG = [
    (3, TypeError, "collectives=3; pass a dict"),
    ({"gather": "ring"}, ValueError, r"collectives\['gather'\]: the engine has all_gather"),
    ({"all_reduce": "ring"}, ValueError, "full_shard has no such collective; it has all_gather"),
    ({"all_gather": 3}, TypeError, r"collectives\['all_gather'\]=3: pass the name of an algorithm"),
    ({"all_gather": len}, TypeError, "lacks bytes_sent, bytes_kept"),
    ({"all_gather": "pynccl:rong"}, ValueError, "has no algorithm 'rong'; it has"),
    ({"all_gather": generate("ring", 2)}, ValueError, "is one of all_reduce; generate it with collective="),
    ({"all_gather": generate("ring", 3, collective="all_gather")}, ValueError, "is for 3 ranks, and a group"),
    (
        {"all_gather": generate("ring", 2, collective="all_gather").replace(in_place=False)},
        ValueError,
        "cannot work in place",
    ),
    ({"all_gather": Builder("none", "all_gather", 2).build()}, ValueError, "none all_gather of 2 ranks"),
    ({"all_gather": Compressed(Integers(8))}, ValueError, "unit 'layers.0'.*send them in a narrower dtype"),
    ({"reduce_scatter": Compressed(Integers(8))}, TypeError, "unit 'layers.0'.*and these are float64"),
]


@pytest.mark.parametrize(("ways_", "kind", "words"), WRONG, ids=[words[:30] for *_, words in WRONG])
def test_what_cannot_be_is_refused_on_every_rank(ways_: Any, kind: type[Exception], words: str) -> None:
    def rank(comm: Any) -> None:
        with pytest.raises(kind, match=words):
            sharded(comm, collectives=ways_)
        assert comm.made == []  # nothing was connected

    run_threads(2, rank)


def test_ranks_that_differ_are_told_so() -> None:
    def rank(comm: Any) -> None:
        with pytest.raises(ValueError, match="collectives"):
            sharded(comm, collectives={"all_gather": "pynccl:ring" if comm.rank else "pynccl:direct"})

    run_threads(2, rank)


def unknown(comm: Any) -> None:
    for call in ("reduce_scatter", "all_gather"):
        with pytest.raises(pynccl.NcclError, match="rong"):
            sharded(comm, collectives={call: "rong"})
    with sharded(comm) as model:  # nothing was left behind
        train(model, *batch(comm.rank, comm.size))


def test_a_name_that_the_library_does_not_know_is_refused_at_the_start() -> None:
    host(2, unknown)


def test_unfreezing_what_cannot_be_compressed_is_refused_with_nothing_changed() -> None:
    def rank(comm: Any) -> None:
        params = floats()
        params["layers"][0]["w"] = params["layers"][0]["w"].astype("f8")
        way = {"reduce_scatter": Compressed(Integers(8))}
        with sharded(comm, params, collectives=way, frozen=["layers.0"]) as model:
            with pytest.raises(TypeError, match=r"unfreeze\(\): unit 'layers.0'.*float64"):
                model.unfreeze("layers.0.w")
            assert model.unfreeze("layers.0.b") == ["layers.0.b"]

    host(2, rank, processes=False)


def test_sixteen_bit_gradients_cannot_be_compressed_and_float32_ones_of_sixteen_bit_weights_can() -> None:
    def rank(comm: Any) -> None:
        way = {"reduce_scatter": Compressed(Integers(8))}
        with pytest.raises(TypeError, match="and these are bfloat16"):
            narrow = MixedPrecision(param="bfloat16", reduce="bfloat16")
            sharded(comm, floats(), collectives=way, precision=narrow)
        narrow = MixedPrecision(param="float32", gather="bfloat16")
        with sharded(comm, floats(), collectives=way, precision=narrow) as model:
            train(model, *floats(batch(comm.rank, comm.size)))
            assert model.counters.reduce_scatter == 3

    host(2, rank, processes=False)

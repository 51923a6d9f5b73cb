"""What was saved at one number of ranks comes back at any other, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy as numpy_files
from checkpoint_ranks import (  # type: ignore[import-not-found]
    assert_same,
    assert_unchanged,
    joined,
    make,
    reference,
    saved,
    state_of,
    train,
)
from sharding_ranks import FakeComm, alone, chain  # type: ignore[import-not-found]

from pynccl.testing import run_ranks
from sharding import SGD, MixedPrecision, cosine, fully_shard
from sharding.checkpoint import DifferentModelError, load, save, save_async
from sharding.layout import by_size, pieces
from sharding.tensorfile import TensorFile


@pytest.fixture(scope="module")
def after() -> dict[int, dict[str, Any]]:
    """What one uninterrupted rank has after 3 and after 4 steps."""
    return {steps: reference(steps) for steps in (3, 4)}


def resume_rank(comm: Any, folder: Path, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    # Another learning rate, other values and steps already done: all of it must give way.
    model, opt = make(comm, lr=0.75, **options)
    train(model, opt, 1)
    loaded = load(folder, model, opt)
    first = state_of(model, opt)
    train(model, opt, 1)
    return loaded, first, state_of(model, opt)


OTHERS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (1, {"strategy": "no_shard", "units": None}),
    (2, {"strategy": "shard_optimizer"}),
    (2, {"strategy": "no_shard", "units": by_size(64)}),
    (3, {"strategy": "shard_grad_op", "units": by_size(100)}),
    (4, {}),
    (4, {"strategy": "hybrid_shard", "mesh": (2, 2), "units": lambda name: name.split(".")[0]}),
    (5, {"units": None}),
]


@pytest.mark.parametrize(("n", "options"), OTHERS)
def test_what_three_ranks_saved_resumes_bit_for_bit_at_any_number_of_ranks(
    at_three: Path, after: dict[int, Any], n: int, options: dict[str, Any]
) -> None:
    ranks = run_ranks(n, resume_rank, at_three, options, library="host")
    assert_same(joined([first for _, first, _ in ranks]), after[3])
    assert_same(joined([second for _, _, second in ranks]), after[4])
    for loaded, _, _ in ranks:
        assert loaded.step == 3
        assert loaded.user == {"tokens": 12, "losses": [1.5, 1.25]}
        assert (loaded.strategy, loaded.ranks, loaded.fresh) == ("full_shard", 3, ())


@pytest.mark.parametrize(
    ("n", "options", "files"),
    [
        (1, {}, 1),
        (3, {"strategy": "no_shard"}, 1),
        (2, {"strategy": "shard_optimizer", "units": None}, 2),
        (4, {"strategy": "hybrid_shard", "mesh": (2, 2)}, 2),
        (4, {"strategy": "shard_grad_op"}, 4),
    ],
)
def test_only_ranks_that_hold_no_replica_write_and_three_ranks_resume(
    tmp_path: Path, after: dict[int, Any], n: int, options: dict[str, Any], files: int
) -> None:
    path = saved(tmp_path, n, **options)
    expected = [f"rank-{r:05d}-of-{files:05d}.safetensors" for r in range(files)]
    assert sorted(each.name for each in path.iterdir()) == ["index.json", *expected]
    ranks = run_ranks(3, resume_rank, tmp_path, {}, library="host")
    assert_same(joined([first for _, first, _ in ranks]), after[3])
    assert_same(joined([second for _, _, second in ranks]), after[4])


def test_each_rank_reads_the_bytes_of_its_shards_and_no_more(
    at_three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(comm: Any) -> tuple[int, int]:
        read = []
        original = TensorFile.read

        def counting(self: TensorFile, name: str, start: int, target: Any) -> None:
            read.append(target.nbytes)
            original(self, name, start, target)

        monkeypatch.setattr(TensorFile, "read", counting)
        model, opt = make(comm)
        load(at_three, model, opt)
        parts = state_of(model, opt)
        owned = sum(part[1].nbytes for key, part in parts.items() if key not in ("hyper", "steps"))
        return sum(read), owned

    for read, owned in run_ranks(2, rank, library="host"):
        assert read == owned


def test_padding_stays_zero(at_three: Path) -> None:
    def rank(comm: Any) -> None:
        model, opt = make(comm)
        load(at_three, model, opt)
        for shard in model.shards:
            used = sum(p.param_stop - p.param_start for p in pieces(shard.group, model.shard_rank))
            for array in (shard.data, *opt.state.get(shard.key, {}).values()):
                assert not array[used:].any()

    run_ranks(4, rank, library="host")


def test_the_index_says_what_is_where(at_three: Path) -> None:
    index = json.loads((at_three / "step-00000003" / "index.json").read_text())
    assert index["step"] == 3 and index["strategy"] == "full_shard" and index["mesh"] == [1, 3]
    assert index["aliases"] == {"head.w": "embed"}
    embed = index["parameters"]["embed"]
    assert embed["shape"] == [5, 3] and embed["dtype"] == "float64" and embed["trainable"]
    assert embed["slots"] == {"exp_avg": "float64", "exp_avg_sq": "float64"}
    stops = [piece["stop"] for piece in embed["pieces"]]
    assert [piece["start"] for piece in embed["pieces"]] == [0, *stops[:-1]] and stops[-1] == 15
    assert index["parameters"]["head.frozen"]["slots"] == {}
    assert index["parameters"]["head.none"]["pieces"] == []
    assert index["optimizer"]["kind"] == "AdamW" and index["optimizer"]["steps"] == 3
    for entry in index["files"]:
        assert (at_three / "step-00000003" / entry["name"]).stat().st_size == entry["bytes"]


def test_the_files_are_plain_safetensors(at_three: Path) -> None:
    arrays: dict[str, list[Any]] = {}
    for path in sorted((at_three / "step-00000003").glob("*.safetensors")):
        for name, array in numpy_files.load_file(path).items():
            arrays.setdefault(name, []).append(array)
    expected = {key: value for key, value in reference(3).items() if key not in ("hyper", "steps")}
    assert_same({name: np.concatenate(parts) for name, parts in arrays.items()}, expected)


def test_ranks_that_are_threads_save_and_load_too(tmp_path: Path) -> None:
    def rank(comm: Any) -> Any:
        model, opt = make(comm)
        train(model, opt, 3)
        save_async(tmp_path, model, opt).wait()
        train(model, opt, 2)
        load(tmp_path, model, opt)
        return state_of(model, opt)

    assert_same(joined(run_ranks(3, rank, library="host", processes=False)), reference(3))


# --- other precisions, frozen and tied ----------------------------------------------------------------------


def test_float32_masters_of_16_bit_parameters_are_kept_whole(tmp_path: Path) -> None:
    half = {"w": np.arange(1, 8).astype(ml_dtypes.bfloat16), "v": np.arange(1, 6).astype(np.float16)}

    def build(comm: Any, precision: Any) -> Any:
        return fully_shard(half, comm, precision=precision)

    def save_masters(comm: Any) -> None:
        model = build(comm, MixedPrecision(param="bfloat16"))
        for shard in model.shards:
            assert shard.data.dtype == np.float32
            shard.data[: len(shard.data) // 2] += 2.0**-12  # more digits than bfloat16 has
        model.updated()
        save(tmp_path, model, step=0)

    def load_masters(comm: Any, precision: Any) -> Any:
        model = build(comm, precision)
        for shard in model.shards:
            shard.data[...] = 0
        load(tmp_path, model)
        return {key: (start, values) for key, (start, values) in state_of(model, None).items()}

    run_ranks(2, save_masters, library="host")
    whole = joined(run_ranks(1, load_masters, MixedPrecision(param="bfloat16"), library="host"))
    assert whole["param/w"].dtype == np.float32
    assert sorted(set(whole["param/w"] - np.arange(1, 8))) == [0, 2.0**-12]
    rounded = joined(run_ranks(3, load_masters, None, library="host"))
    assert rounded["param/w"].dtype == ml_dtypes.bfloat16
    assert rounded["param/w"].tolist() == list(range(1, 8)) and rounded["param/v"].dtype == np.float16


def test_16_bit_parameters_without_masters_come_back_bit_for_bit(tmp_path: Path) -> None:
    params = {"w": np.linspace(-3, 3, 11).astype(ml_dtypes.bfloat16)}

    def rank(comm: Any, saving: bool) -> Any:
        model = fully_shard(params if saving else {"w": np.zeros(11, ml_dtypes.bfloat16)}, comm)
        if saving:
            save(tmp_path, model, step=0)
        else:
            load(tmp_path, model)
        return state_of(model, None)

    expected = joined(run_ranks(2, rank, True, library="host"))
    assert_same(joined(run_ranks(3, rank, False, library="host")), expected)
    assert expected["param/w"].tobytes() == params["w"].tobytes()


def test_a_parameter_that_was_frozen_begins_its_optimizer_state_at_zero(at_three: Path) -> None:
    def rank(comm: Any) -> Any:
        model, opt = make(comm, frozen=["blocks.1.w"])
        train(model, opt, 2)
        loaded = load(at_three, model, opt)
        return loaded.fresh, state_of_names(model, opt)

    def state_of_names(model: Any, opt: Any) -> Any:
        return {
            f"{kind}/{piece.name}": (piece.param_start, np.array(array[piece.shard_start : piece.shard_stop]))
            for shard in model.shards
            for kind, array in {"param": shard.data, **opt.state.get(shard.key, {})}.items()
            for piece in pieces(shard.group, model.shard_rank)
        }

    ranks = run_ranks(2, rank, library="host")
    assert all(fresh == ("head.frozen",) for fresh, _ in ranks)
    whole, expected = joined([state for _, state in ranks]), reference(3)
    assert not whole["exp_avg/head.frozen"].any() and not whole["exp_avg_sq/head.frozen"].any()
    assert whole["param/head.frozen"].tolist() == list(range(6))
    assert "exp_avg/blocks.1.w" not in whole
    for key in ("param/blocks.1.w", "param/embed", "exp_avg/embed", "exp_avg_sq/blocks.0.b"):
        assert whole[key].tobytes() == expected[key].tobytes()


def test_parameters_load_without_their_optimizer_and_not_with_one_that_was_not_saved(tmp_path: Path) -> None:
    def rank(comm: Any) -> None:
        model, opt = make(comm)
        train(model, opt, 1)
        before = state_of(model, None)
        save(tmp_path / "with", model, opt)
        save(tmp_path / "without", model, step=1)
        train(model, opt, 1)
        load(tmp_path / "with", model)
        assert_unchanged(state_of(model, None), before)
        with pytest.raises(DifferentModelError, match="saved without an optimizer"):
            load(tmp_path / "without", model, opt)

    run_ranks(2, rank, library="host")


def test_another_kind_of_optimizer_is_refused_and_nothing_changes(at_three: Path) -> None:
    def rank(comm: Any) -> None:
        model, _ = make(comm)
        opt = SGD(model, lr=0.5, momentum=0.5)
        before = state_of(model, opt)
        with pytest.raises(DifferentModelError, match="exp_avg.*momentum_buffer"):
            load(at_three, model, opt)
        assert_unchanged(state_of(model, opt), before)

    run_ranks(2, rank, library="host")


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


# --- random generators and user state -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PCG64", "MT19937", "Philox"])
def test_each_rank_gets_its_random_generator_back(tmp_path: Path, kind: str) -> None:
    def generator(seed: int) -> np.random.Generator:
        return np.random.Generator(getattr(np.random, kind)(seed))

    def save_generator(comm: Any) -> tuple[list[int], list[int]]:
        model = fully_shard({"w": np.zeros(4)}, comm)
        data, own = generator(1), generator(100 + comm.rank)
        data.random(3), own.random(comm.rank)
        save(tmp_path, model, step=0, rng={"data": data, "own": own})
        return data.integers(1 << 30, size=4).tolist(), own.integers(1 << 30, size=4).tolist()

    def load_generator(comm: Any) -> tuple[list[int], list[int]]:
        model = fully_shard({"w": np.zeros(4)}, comm)
        data, own = generator(8), generator(9)
        load(tmp_path, model, rng={"data": data, "own": own})
        return data.integers(1 << 30, size=4).tolist(), own.integers(1 << 30, size=4).tolist()

    expected = run_ranks(2, save_generator, library="host")
    assert run_ranks(2, load_generator, library="host") == expected
    more = run_ranks(4, load_generator, library="host")
    assert [data for data, _ in more] == [expected[0][0]] * 4  # equal on all ranks: stays so
    assert [own for _, own in more[:2]] == [own for _, own in expected]
    assert len({tuple(own) for _, own in more}) == 4  # nobody draws what another rank draws


def test_a_generator_that_was_not_saved_is_an_error(at_three: Path) -> None:
    def rank(comm: Any) -> None:
        model, opt = make(comm)
        with pytest.raises(ValueError, match="no state for rng"):
            load(at_three, model, opt, rng=np.random.default_rng())
        with pytest.raises(TypeError, match="rng is a RandomState"):
            load(at_three, model, opt, rng=np.random.RandomState(0))  # type: ignore[arg-type]

    run_ranks(2, rank, library="host")

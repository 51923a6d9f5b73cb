"""Checkpoints: what is saved at one number of ranks comes back at any other, or an error says why not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy as numpy_files

from pynccl import NcclError
from pynccl.testing import RankError, run_ranks
from sharding import AdamW, MixedPrecision, PhaseError, export_safetensors, fully_shard
from sharding import alive as alive_module
from sharding import export as export_module
from sharding import saving as saving_module
from sharding import store as store_module
from sharding import tensorfile as tensorfile_module
from sharding.checkpoint import (
    CheckpointError,
    DifferentModelError,
    NoCheckpointError,
    load,
    save,
    save_async,
    saved_steps,
)
from sharding.layout import by_size, numpy_dtype, pieces
from sharding.tensorfile import Source, TensorFile, TensorSpec, verify_blocks, write_tensors

UNITS: list[Any] = ["embed", "blocks.*", "head"]
GROUPS = {"*.b": {"weight_decay": 0.0, "lr": 0.5}, "embed": {"lr": 0.125}}


def parameters() -> dict[str, Any]:
    """Small and awkward: a scalar, one element, three, none, two dtypes in a unit, a tied matrix."""
    rng = np.random.default_rng(7)
    embed = rng.standard_normal((5, 3))
    return {
        "embed": embed,
        "blocks": [
            {"w": rng.standard_normal((3, 4)), "b": rng.standard_normal(3).astype(np.float32)}
            for _ in range(2)
        ],
        "head": {
            "w": embed,
            "scale": np.array(1.5),
            "one": np.ones(1),
            "none": np.zeros((0, 4)),
            "frozen": np.arange(6, dtype=np.float32),
        },
    }


NAMES = ["embed", "blocks.0.w", "blocks.0.b", "blocks.1.w", "blocks.1.b", "head.scale", "head.one"]
NAMES += ["head.none", "head.frozen"]


def make(comm: Any, lr: float = 0.25, params: Any = None, **options: Any) -> tuple[Any, Any]:
    """The model and its optimizer; `options` of fully_shard."""
    settings = {"units": UNITS, "frozen": ["head.frozen"], "reduce_op": "sum", **options}
    model = fully_shard(parameters() if params is None else params, comm, **settings)
    return model, AdamW(model, lr=lr, groups=GROUPS)


def train(model: Any, opt: Any, steps: int) -> None:
    """Steps whose gradients depend on the name, the element and the step alone: rank 0 brings them."""
    for _ in range(steps):
        backward(model, opt.steps)
        opt.step()
        model.zero_grad()


def backward(model: Any, seed: int, last: bool = True) -> None:
    with model.microbatch(last=last):
        for unit in model:
            with unit.forward():
                pass
        for unit in reversed(model):
            with unit.backward():
                if model.rank == 0:
                    for name, grad in unit.gradient_views().items():
                        grad[...] = np.arange(grad.size).reshape(grad.shape) % 5 + len(name) + seed - 4


def state_of(model: Any, opt: Any) -> dict[str, Any]:
    """This rank's part of everything: array/name -> (start, values); and the optimizer's own words."""
    found: dict[str, Any] = {}
    for shard in model.shards:
        slots = opt.state.get(shard.key, {}) if opt is not None else {}
        for kind, array in {"param": shard.data, **slots}.items():
            for piece in pieces(shard.group, model.shard_rank):
                values = np.array(array[piece.shard_start : piece.shard_stop])
                found[f"{kind}/{piece.name}"] = (piece.param_start, values)
    if opt is not None:
        found["hyper"] = {name: opt.hyper(name) for name in NAMES if name != "head.frozen"}
        found["steps"] = opt.steps
    return found


def joined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Whole flat arrays from the ranks' parts (replicas must agree)."""
    whole: dict[str, Any] = {}
    for rank in ranks:
        for key, part in rank.items():
            if key in ("hyper", "steps"):
                assert whole.setdefault(key, part) == part
                continue
            start, values = part
            known = whole.setdefault(key, {})
            for at, value in enumerate(values):
                assert known.setdefault(start + at, value) == value
    return {
        key: np.array([part[i] for i in range(len(part))]) if key not in ("hyper", "steps") else part
        for key, part in whole.items()
    }


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bitwise."""
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, np.ndarray):
            assert got[key].dtype == value.dtype
            assert got[key].tobytes() == value.tobytes(), key
        else:
            assert got[key] == value, key


def assert_unchanged(part: dict[str, Any], before: dict[str, Any]) -> None:
    """Bitwise, of one rank's part."""
    assert part.keys() == before.keys()
    for key, value in before.items():
        if key in ("hyper", "steps"):
            assert part[key] == value
        else:
            assert part[key][0] == value[0] and part[key][1].tobytes() == value[1].tobytes(), key


def reference(steps: int) -> dict[str, Any]:
    """The state after so many steps on one rank that never stopped."""

    def rank(comm: Any) -> dict[str, Any]:
        model, opt = make(comm)
        train(model, opt, steps)
        return state_of(model, opt)

    return joined(run_ranks(1, rank, library="host"))


def save_rank(comm: Any, folder: Path, steps: int, options: dict[str, Any], keywords: dict[str, Any]) -> str:
    model, opt = make(comm, **options)
    train(model, opt, steps)
    return str(save(folder, model, opt, **keywords))


def saved(folder: Path, n: int = 3, steps: int = 3, keywords: Any = None, **options: Any) -> Path:
    """A checkpoint after `steps` steps on `n` ranks."""
    return Path(run_ranks(n, save_rank, folder, steps, options, keywords or {}, library="host")[0])


@pytest.fixture(scope="module")
def at_three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of step 3, saved at 3 ranks with full_shard."""
    folder = tmp_path_factory.mktemp("checkpoints")
    saved(folder, keywords={"user": {"tokens": 12, "losses": [1.5, 1.25]}})
    return folder


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
    from sharding import SGD

    def rank(comm: Any) -> None:
        model, _ = make(comm)
        opt = SGD(model, lr=0.5, momentum=0.5)
        before = state_of(model, opt)
        with pytest.raises(DifferentModelError, match="exp_avg.*momentum_buffer"):
            load(at_three, model, opt)
        assert_unchanged(state_of(model, opt), before)

    run_ranks(2, rank, library="host")


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


# --- bad input: the same error on every rank, nothing changed -----------------------------------------------


def endless() -> list[Any]:
    """It contains itself."""
    found: list[Any] = [1]
    found.append({"again": found})
    return found


@pytest.mark.parametrize(
    ("keywords", "kind", "message"),
    [
        (lambda rank: {"step": -1}, ValueError, "step=-1"),
        (lambda rank: {"keep_last": 0}, ValueError, "keep_last=0"),
        (lambda rank: {"keep_last": True}, ValueError, "keep_last=True"),
        (lambda rank: {"user": {"x": 10**5000}}, ValueError, r"user\['x'\] is an integer of 16610 bits"),
        (lambda rank: {"user": endless()}, ValueError, "nested more than 100 deep"),
        (lambda rank: {"user": {"x": {1, 2}}}, TypeError, r"user\['x'\] is a set"),
        (lambda rank: {"user": {1: 2}}, TypeError, "the key 1"),
        (lambda rank: {"user": {"rank": rank}}, ValueError, "user differs between ranks"),
        (lambda rank: {"step": rank}, ValueError, "step differs between ranks: 0 on rank 0, 1 on rank 1"),
        (lambda rank: {"step": 5 if rank else -1}, ValueError, "step=-1"),
        (lambda rank: {"rng": 5}, TypeError, "rng is a int"),
    ],
)
def test_bad_arguments_of_save_are_an_error_on_every_rank(
    tmp_path: Path, keywords: Callable[[int], Any], kind: type[Exception], message: str
) -> None:
    def rank(comm: Any) -> None:
        model, opt = make(comm)
        with pytest.raises(kind, match=message):
            save(tmp_path, model, opt, **keywords(comm.rank))

    run_ranks(2, rank, library="host")
    assert list(tmp_path.iterdir()) == []


def test_a_save_needs_a_step_or_an_optimizer(tmp_path: Path) -> None:
    def rank(comm: Any) -> None:
        model, _ = make(comm)
        with pytest.raises(TypeError, match="step is missing"):
            save(tmp_path, model)

    run_ranks(1, rank, library="host")


def test_saving_in_the_middle_of_an_accumulation_is_an_error_and_after_the_step_it_is_not(
    tmp_path: Path,
) -> None:
    def rank(comm: Any, strategy: str) -> None:
        model, opt = make(comm, strategy=strategy)
        with model.microbatch():
            with pytest.raises(PhaseError, match="save"):
                save(tmp_path, model, opt)
            with pytest.raises(PhaseError, match="load"):
                load(tmp_path, model, opt)
        model.zero_grad()
        backward(model, 0, last=False)
        for way in (save, save_async):
            with pytest.raises(PhaseError, match="no optimizer has used"):
                way(tmp_path, model, opt)
        backward(model, 1)
        model.clip_grad_norm(1.0)
        with pytest.raises(PhaseError, match="no optimizer has used"):
            save(tmp_path, model, opt)
        assert not list(tmp_path.iterdir())
        comm.all_gather_object(None)  # the others have looked at the folder
        opt.step()
        save(tmp_path / strategy, model, opt)
        model.zero_grad()
        save(tmp_path / strategy, model, opt, overwrite=True)
        comm.all_gather_object(None)
        if comm.rank == 0:
            shutil.rmtree(tmp_path / strategy)

    for strategy in ("full_shard", "shard_optimizer", "no_shard"):
        run_ranks(2, rank, strategy, library="host")


def changed(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    params = parameters()
    change(params)
    return params


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: p["blocks"].append({"w": np.zeros((3, 4))}),
            r"'blocks.2.w' .* is missing in the checkpoint",
        ),
        (lambda p: p["blocks"].pop(), r"the checkpoint has parameter 'blocks.1.w'"),
        (
            lambda p: p["head"].update(one=np.ones(2)),
            r"'head.one' has shape \(1,\) in the checkpoint, \(2,\)",
        ),
        (
            lambda p: p["head"].update(scale=np.array(1, np.float32)),
            "'head.scale' is float64 in the checkpoint",
        ),
        (lambda p: p["head"].update(w=p["embed"].copy()), "'head.w' is tied to 'embed' in the checkpoint"),
        (
            lambda p: p["blocks"][1].update(w=p["blocks"][0]["w"]),
            "'blocks.1.w' is tied to 'blocks.0.w' in the model",
        ),
    ],
)
def test_a_checkpoint_of_another_model_names_the_parameter_and_changes_nothing(
    at_three: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    def rank(comm: Any) -> None:
        model = fully_shard(changed(change), comm, units=["embed"], frozen=["head.frozen"])
        before = state_of(model, None)
        with pytest.raises(DifferentModelError, match=message):
            load(at_three, model)
        assert_unchanged(state_of(model, None), before)

    run_ranks(2, rank, library="host")


def test_tied_parameters_may_be_kept_under_another_of_their_names(tmp_path: Path) -> None:
    shared = np.arange(6.0)

    def rank(comm: Any) -> Any:
        first = fully_shard({"a": shared, "b": shared}, comm)
        save(tmp_path, first, step=0)
        zeros = np.zeros(6)
        second = fully_shard({"b": zeros, "a": zeros}, comm)
        load(tmp_path, second)
        return state_of(second, None)

    assert joined(run_ranks(2, rank, library="host"))["param/b"].tolist() == list(range(6))


def test_where_there_is_no_checkpoint_the_error_lists_what_there_is(at_three: Path, tmp_path: Path) -> None:
    def rank(comm: Any) -> None:
        model, opt = make(comm)
        with pytest.raises(NoCheckpointError, match="no complete checkpoint; there is none at all"):
            load(tmp_path / "nowhere", model, opt)
        with pytest.raises(NoCheckpointError, match="of step 5; there are those of steps 3"):
            load(at_three, model, opt, step=5)
        with pytest.raises(ValueError, match="step differs between ranks: 3 on rank 0, 2 on rank 1"):
            load(at_three, model, opt, step=3 - comm.rank)

    run_ranks(2, rank, library="host")


def damage_body(path: Path) -> Path:
    file = path / "rank-00001-of-00003.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file


def damage_header(path: Path) -> Path:
    file = path / "rank-00002-of-00003.safetensors"
    data = file.read_bytes()
    file.write_bytes(data.replace(b"F64", b"I64", 1))
    return file


def truncate(path: Path) -> Path:
    file = path / "rank-00000-of-00003.safetensors"
    os.truncate(file, file.stat().st_size - 8)
    return file


def remove(path: Path) -> Path:
    file = path / "rank-00002-of-00003.safetensors"
    file.unlink()
    return file


def damage_index(path: Path) -> Path:
    file = path / "index.json"
    file.write_text(file.read_text().replace('"step": 4', '"step": 5'))
    return file


def truncate_index(path: Path) -> Path:
    file = path / "index.json"
    os.truncate(file, file.stat().st_size // 2)
    return file


def remove_index(path: Path) -> Path:
    file = path / "index.json"
    file.unlink()
    return file


HARMS = [damage_body, damage_header, truncate, remove, damage_index, truncate_index, remove_index]


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("n", [1, 4])
def test_a_damaged_file_is_named_on_every_rank_and_the_checkpoint_before_it_still_loads(
    at_three: Path, tmp_path: Path, harm: Callable[[Path], Path], n: int
) -> None:
    shutil.copytree(at_three, tmp_path / "c")
    shutil.copytree(four_steps(at_three), tmp_path / "c" / "step-00000004")
    culprit = harm(tmp_path / "c" / "step-00000004")

    def rank(comm: Any) -> Any:
        model, opt = make(comm)
        before = state_of(model, opt)
        for optimizer in (opt, None):  # what is not loaded is checked too
            with pytest.raises(CheckpointError) as caught:
                load(tmp_path / "c", model, optimizer)
            assert str(culprit) in str(caught.value)
            assert str(caught.value).endswith("load(..., step=3) loads the one before")
        assert_unchanged(state_of(model, opt), before)
        assert load(tmp_path / "c", model, opt, step=3).step == 3
        return state_of(model, opt)

    assert_same(joined(run_ranks(n, rank, library="host")), reference(3))


def four_steps(at_three: Path) -> Path:
    """Beside `at_three`: a checkpoint of step 4."""
    other = at_three.parent / "four"
    return other / "step-00000004" if saved_steps(other) else saved(other, steps=4)


# --- folders: keeping, replacing, cleaning up ---------------------------------------------------------------


def test_the_last_k_are_kept_and_later_steps_are_left_alone(tmp_path: Path) -> None:
    def rank(comm: Any) -> None:
        model, _ = make(comm)
        for step in (1, 2, 3):
            save(tmp_path, model, step=step)
        save(tmp_path, model, step=10)
        save(tmp_path, model, step=4, keep_last=2)
        save(tmp_path, model, step=5, keep_last=1)

    run_ranks(2, rank, library="host")
    assert saved_steps(tmp_path) == [5, 10]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-00000005", "step-00000010"]


def test_older_checkpoints_are_removed_only_after_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(comm: Any) -> None:
        model, _ = make(comm)
        save(tmp_path, model, step=1, keep_last=1)
        if comm.rank == 0:
            monkeypatch.setattr(store_module.Place, "publish", full_disk)
        with pytest.raises(OSError, match="no space"):
            save(tmp_path, model, step=2, keep_last=1)
        assert load(tmp_path, model).step == 1

    run_ranks(2, rank, library="host")
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("way", ["save", "save_async"])
@pytest.mark.parametrize("keywords", [{"step": 2, "keep_last": 1}, {"step": 1, "overwrite": True}])
def test_what_cannot_be_removed_after_a_save_is_a_warning_and_goes_with_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, keywords: dict[str, Any]
) -> None:
    def once(folder: Path, **options: Any) -> Path:
        if way == "save":
            return save(folder, model_of[0], **options)
        return save_async(folder, model_of[0], timeout=60, **options).wait()

    model_of: list[Any] = []

    def rank(comm: Any) -> list[str]:
        model_of[:] = [make(comm)[0]]
        save(tmp_path, model_of[0], step=1)
        remove = shutil.rmtree

        def busy(path: Any, *args: Any, **options: Any) -> None:
            if str(path).endswith(".old"):
                raise OSError(16, "busy", str(path))
            remove(path, *args, **options)

        monkeypatch.setattr(shutil, "rmtree", busy)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert once(tmp_path, **keywords) == tmp_path / f"step-{keywords['step']:08d}"
            assert load(tmp_path, model_of[0]).step == keywords["step"]
            once(tmp_path, step=3)  # still busy
        monkeypatch.undo()
        comm.all_gather_object(None)
        save(tmp_path, model_of[0], step=4)
        return [str(each.message) for each in caught]

    first, second = run_ranks(2, rank, library="host")
    assert len(first) == 2 and second == []
    assert "is complete, but what it replaces could not be removed" in first[0] and "busy" in first[0]
    assert "left by an earlier save, could not be removed" in first[1]
    assert saved_steps(tmp_path) == [keywords["step"], 3, 4]
    assert all(not each.name.startswith(".") for each in tmp_path.iterdir())


def full_disk(*_: Any) -> Any:
    raise OSError(28, "no space left")


def test_a_step_that_is_there_is_replaced_only_if_asked(tmp_path: Path) -> None:
    def rank(comm: Any) -> None:
        model = fully_shard({"w": np.zeros(5)}, comm)
        save(tmp_path, model, step=1, user="first")
        with pytest.raises(FileExistsError, match="overwrite=True"):
            save(tmp_path, model, step=1, user="second")
        assert load(tmp_path, model).user == "first"
        save(tmp_path, model, step=1, user="second", overwrite=True)
        assert load(tmp_path, model).user == "second"
        save_async(tmp_path, model, step=1, user="third", overwrite=True).wait()
        assert load(tmp_path, model).user == "third"

    run_ranks(2, rank, library="host")
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000001"]


def test_the_checkpoint_to_be_replaced_comes_back_if_the_new_one_cannot_have_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(comm: Any) -> Any:
        model = fully_shard({"w": np.zeros(5)}, comm)
        save(tmp_path, model, step=1, user="first")
        rename = Path.rename

        def failing(self: Path, target: Path) -> Path:
            return full_disk() if self.suffix == ".tmp" else rename(self, target)

        monkeypatch.setattr(Path, "rename", failing)
        with pytest.raises(OSError, match="no space left"):
            save(tmp_path, model, step=1, user="second", overwrite=True)
        return load(tmp_path, model).user

    assert run_ranks(2, rank, library="host") == ["first"] * 2
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000001"]


def test_an_error_while_one_rank_writes_is_an_error_on_all_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(comm: Any) -> None:
        model, opt = make(comm)
        if comm.rank == 1:
            monkeypatch.setattr(saving_module, "write_tensors", full_disk)
        with pytest.raises(OSError, match="no space left" if comm.rank == 1 else "rank 1: .*no space left"):
            save(tmp_path, model, opt)

    run_ranks(3, rank, library="host")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", ["save", "save_async"])
def test_all_is_on_the_disk_before_the_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    def rank(comm: Any) -> list[tuple[str, str]]:
        model, opt = make(comm)
        seen: list[tuple[str, str]] = []
        fsync, rename = os.fsync, Path.rename

        def watched_fsync(descriptor: int) -> None:
            seen.append(("on the disk", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
            fsync(descriptor)

        def watched_rename(self: Path, target: Path) -> Path:
            if target.suffix != ".marker":
                seen.append(("renamed", target.name))
            return rename(self, target)

        monkeypatch.setattr(os, "fsync", watched_fsync)
        monkeypatch.setattr(Path, "rename", watched_rename)
        if way == "save":
            save(tmp_path, model, opt)
        else:
            save_async(tmp_path, model, opt).wait()
        return seen

    first, second = run_ranks(2, rank, library="host")
    assert second == [("on the disk", "rank-00001-of-00002.safetensors")]
    file, index, folder, renamed, parent = first
    assert file == ("on the disk", "rank-00000-of-00002.safetensors")
    assert index == ("on the disk", "index.json")
    assert folder[1].startswith(".step-00000000.") and renamed == ("renamed", "step-00000000")
    assert parent == ("on the disk", tmp_path.name)


def test_ranks_that_are_threads_save_and_load_too(tmp_path: Path) -> None:
    def rank(comm: Any) -> Any:
        model, opt = make(comm)
        train(model, opt, 3)
        save_async(tmp_path, model, opt).wait()
        train(model, opt, 2)
        load(tmp_path, model, opt)
        return state_of(model, opt)

    assert_same(joined(run_ranks(3, rank, library="host", processes=False)), reference(3))


# --- killed in the middle -----------------------------------------------------------------------------------

# Where rank 0 or 1 is killed: (module or class, function, before or after it has done its work).
MOMENTS = {
    "before its file": (0, saving_module, "write_tensors", False),
    "after its file": (1, saving_module, "write_tensors", True),
    "before the rename": (0, store_module.Place, "publish", False),
    "with the old one set aside": (0, store_module.Place, "_set_aside", True),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("way", ["save", "save_async"])
def test_a_save_that_is_killed_is_never_loaded_and_the_next_one_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, way: str
) -> None:
    victim, owner, function, afterwards = MOMENTS[moment]
    set_aside = function == "_set_aside"

    def rank(comm: Any, kill: bool) -> Any:
        model, opt = make(comm)
        if kill:
            train(model, opt, 1)
            save(tmp_path, model, opt)
            save(tmp_path, model, opt, step=2)
            train(model, opt, 1)
            if comm.rank == victim:
                monkeypatch.setattr(owner, function, killing(getattr(owner, function), afterwards))
            if way == "save":
                save(tmp_path, model, opt, overwrite=set_aside, step=2 if set_aside else 3)
            else:
                step = 2 if set_aside else 3
                save_async(tmp_path, model, opt, overwrite=set_aside, step=step, timeout=5).wait()
        loaded = load(tmp_path, model, opt)
        hidden = len([each for each in tmp_path.iterdir() if each.name.startswith(".")])
        comm.all_gather_object(None)
        train(model, opt, 2)
        save(tmp_path, model, opt)
        return loaded.step, hidden, state_of(model, opt)

    with pytest.raises(RankError) as caught:
        run_ranks(2, rank, True, library="host")
    assert "SIGKILL" in caught.value.failures[victim].what
    ranks = run_ranks(3, rank, False, library="host")
    for step, hidden, _ in ranks:
        assert step == (1 if set_aside else 2)
        if victim == 0:  # else rank 0 may have heard of it and cleaned up
            assert hidden == (2 if set_aside else 1)
    assert_same(joined([state for _, _, state in ranks]), reference(3))
    assert all(not each.name.startswith(".") for each in tmp_path.iterdir())
    assert saved_steps(tmp_path) == ([1, 3] if set_aside else [1, 2, 3])


def killing(function: Callable[..., Any], afterwards: bool) -> Callable[..., Any]:
    def killed(*args: Any, **keywords: Any) -> Any:
        if afterwards:
            function(*args, **keywords)
        os.kill(os.getpid(), signal.SIGKILL)

    return killed


# --- asynchronous -------------------------------------------------------------------------------------------


def held(function: Callable[..., Any], gate: threading.Event) -> Callable[..., Any]:
    """`function`, once the gate is open."""

    def waiting(*args: Any, **keywords: Any) -> Any:
        assert gate.wait(60)
        return function(*args, **keywords)

    return waiting


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_what_an_asynchronous_save_saves_is_what_was_there_at_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    def rank(comm: Any) -> Any:
        model, opt = make(comm, strategy=strategy)
        train(model, opt, 3)
        gate = threading.Event()
        monkeypatch.setattr(saving_module, "write_tensors", held(saving_module.write_tensors, gate))
        user = {"list": [1]}
        handle = save_async(tmp_path, model, opt, user=user)
        user["list"].append(2)
        assert not handle.done() and saved_steps(tmp_path) == []
        with pytest.raises(TimeoutError, match="still runs"):
            handle.wait(0.001)
        train(model, opt, 2)  # while it is not even written
        gate.set()
        assert handle.wait() == tmp_path / "step-00000003" and handle.done() and handle.step == 3
        loaded = load(tmp_path, model, opt)
        assert loaded.user == {"list": [1]}
        return state_of(model, opt)

    assert_same(joined(run_ranks(2, rank, library="host")), reference(3))


def test_one_asynchronous_save_is_in_flight_and_the_next_waits_for_it(tmp_path: Path) -> None:
    def rank(comm: Any) -> list[bool]:
        model, _ = make(comm)
        handles = [save_async(tmp_path, model, step=step, keep_last=2) for step in range(4)]
        done = [handle.done() for handle in handles[:3]]
        save(tmp_path, model, step=9)
        return [*done, handles[3].done()]

    assert run_ranks(3, rank, library="host") == [[True] * 4] * 3
    assert saved_steps(tmp_path) == [2, 3, 9]


def test_an_error_of_an_asynchronous_save_shows_in_wait_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(comm: Any) -> None:
        model, opt = make(comm)
        if comm.rank == 1:
            monkeypatch.setattr(saving_module, "write_tensors", full_disk)
        handle = save_async(tmp_path, model, opt)
        for _ in range(2):
            with pytest.raises((OSError, CheckpointError), match="no space left"):
                handle.wait()
        monkeypatch.undo()
        comm.all_gather_object(None)
        save(tmp_path, model, opt)  # it has been seen

    run_ranks(3, rank, library="host")
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000000"]


def test_an_error_of_an_asynchronous_save_that_nobody_saw_shows_in_the_next_save_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(comm: Any) -> None:
        model, opt = make(comm)
        if comm.rank == 0:
            monkeypatch.setattr(store_module.Place, "publish", full_disk)
        save_async(tmp_path, model, opt)
        with pytest.raises(CheckpointError, match="save of step 0 failed.*no space left"):
            save(tmp_path, model, opt)
        monkeypatch.undo()
        save_async(tmp_path, model, opt).wait()

    run_ranks(2, rank, library="host")
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000000"]


def test_a_rank_whose_file_never_comes_is_named_when_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(comm: Any) -> None:
        model, opt = make(comm)
        gate = threading.Event()
        if comm.rank == 2:
            monkeypatch.setattr(saving_module, "write_tensors", held(saving_module.write_tensors, gate))
        handle = save_async(tmp_path, model, opt, timeout=0.2)
        if comm.rank != 2:
            with pytest.raises(CheckpointError, match="rank 2 had not written .* after 0.2 s"):
                handle.wait()
        comm.all_gather_object(None)
        gate.set()
        with pytest.raises(CheckpointError, match="rank 2 had not written"):
            handle.wait()

    run_ranks(3, rank, library="host")
    assert saved_steps(tmp_path) == []


@pytest.mark.parametrize("dead", [0, 1])
@pytest.mark.parametrize("abandoned", [False, True])
def test_a_rank_that_died_is_named_long_before_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: int, abandoned: bool
) -> None:
    monkeypatch.setattr(alive_module, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(store_module, "SILENT_SECONDS", 1000.0 if abandoned else 1.5)
    monkeypatch.setattr(store_module, "SILENT_SECONDS_ABANDONED", 1.5 if abandoned else 1000.0)

    def rank(comm: Any) -> str:
        model, opt = make(comm)
        if comm.rank == dead:  # its thread does nothing, as that of a process which was killed
            monkeypatch.setattr(saving_module.SaveHandle, "_write", lambda *_: None)
        handle = save_async(tmp_path, model, opt, timeout=1000)
        if abandoned:
            with pytest.raises((ZeroDivisionError, NcclError)), model.microbatch():
                if comm.rank == dead:
                    raise ZeroDivisionError
                for unit in model:
                    with unit.forward():
                        pass
                for unit in reversed(model):
                    with unit.backward():
                        pass
        if comm.rank == dead:
            comm.all_gather_object(None)
            return f"rank {dead} has given no sign of life for 1.5 s"
        with pytest.raises(CheckpointError) as caught:
            handle.wait()
        comm.all_gather_object(None)
        return str(caught.value)

    for told in run_ranks(3, rank, library="host"):
        assert told.startswith(f"rank {dead} has given no sign of life for 1.5 s")
    assert saved_steps(tmp_path) == []


def test_a_rank_that_is_slow_but_alive_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alive_module, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(store_module, "SILENT_SECONDS", 1.5)

    def rank(comm: Any) -> None:
        model, opt = make(comm)
        gate, looks = threading.Event(), [0]
        if comm.rank == 1:
            monkeypatch.setattr(saving_module, "write_tensors", held(saving_module.write_tensors, gate))
        else:
            original = store_module.FileMeeting._look

            def counting(meeting: Any, ranks: set[int]) -> None:
                original(meeting, ranks)
                looks[0] += 1
                if looks[0] > 1 and time.monotonic() - began > 2.5:
                    gate.set()

            monkeypatch.setattr(store_module.FileMeeting, "_look", counting)
        began = time.monotonic()
        handle = save_async(tmp_path, model, opt)
        if comm.rank == 0:
            assert gate.wait(60)  # it has looked for longer than a silent rank would have had
        comm.all_gather_object(None)
        gate.set()
        handle.wait()

    run_ranks(2, rank, library="host")
    assert saved_steps(tmp_path) == [0]


def test_a_watch_that_was_stopped_itself_takes_nobody_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(alive_module.time, "monotonic", lambda: now[0])
    path = tmp_path / "sign"
    watch = alive_module.Watch(path)

    def after(seconds: float) -> float:
        now[0] += seconds
        return watch.silence()

    assert [after(0.5), after(0.5)] == [0.5, 1.0]  # it is not there yet
    path.touch()
    assert [after(0.5), after(0.5), after(0.5)] == [0.0, 0.5, 1.0]
    assert after(3600) == 3.0
    os.utime(path, ns=(1, 1))  # another clock
    assert after(3600) == 0.0


def test_a_process_whose_peer_was_killed_while_saving_ends_in_bounded_time(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING_UNTIL_A_RANK_DIES)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(port), "PYNCCL_LIBRARY": "host"}
    jobs = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "c")],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert jobs[1].wait(60) == -signal.SIGKILL
        _, said = jobs[0].communicate(timeout=30)  # the interpreter waits for the save's thread
        assert jobs[0].returncode == 1 and "RemoteError" in said
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert saved_steps(tmp_path / "c") == []


TRAINING_UNTIL_A_RANK_DIES = """
import os, sys, threading
import numpy as np
import pynccl
from sharding import AdamW, fully_shard, save_async, saving

comm = pynccl.init()
model = fully_shard({"w": np.ones(8)}, comm)
opt = AdamW(model)
if comm.rank == 1:
    saving.write_tensors = lambda *_: os.kill(os.getpid(), 9)
save_async(sys.argv[1], model, opt)
while True:
    with model.microbatch():
        for unit in model:
            with unit.forward():
                pass
        for unit in reversed(model):
            with unit.backward():
                pass
    opt.step()
    model.zero_grad()
"""


@pytest.mark.parametrize("victim, function", [(0, "write_tensors"), (1, "write_tensors"), (0, "publish")])
def test_an_asynchronous_save_that_failed_leaves_no_large_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int, function: str
) -> None:
    def rank(comm: Any) -> None:
        model, opt = make(comm)
        if comm.rank == victim:
            if function == "write_tensors":
                write = saving_module.write_tensors
                monkeypatch.setattr(saving_module, function, lambda *a: (write(*a), full_disk())[1])
            else:
                monkeypatch.setattr(store_module.Place, function, full_disk)
        handle = save_async(tmp_path, model, opt, timeout=60)
        with pytest.raises((OSError, CheckpointError), match="no space left"):
            handle.wait()

    run_ranks(3, rank, library="host")
    assert not list(tmp_path.glob("**/*.safetensors"))


def test_a_load_waits_for_the_asynchronous_save_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(comm: Any) -> tuple[int, int]:
        model, opt = make(comm)
        save(tmp_path, model, opt, step=1)
        gate = threading.Event()
        monkeypatch.setattr(saving_module, "write_tensors", held(saving_module.write_tensors, gate))
        save_async(tmp_path, model, opt, step=2)
        join = threading.Thread.join

        def opening(thread: threading.Thread, timeout: float | None = None) -> None:
            gate.set()
            join(thread, timeout)

        monkeypatch.setattr(threading.Thread, "join", opening)
        other, _ = make(comm)
        return load(tmp_path, other).step, load(tmp_path, model).step

    assert run_ranks(2, rank, library="host") == [(2, 2)] * 2


def test_a_load_tells_of_an_asynchronous_save_that_failed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(comm: Any) -> int:
        model, opt = make(comm)
        save(tmp_path, model, opt, step=1)
        if comm.rank == 0:
            monkeypatch.setattr(store_module.Place, "publish", full_disk)
        save_async(tmp_path, model, opt, step=2)
        with pytest.raises(CheckpointError, match="step 2 failed: .*no space left.*nothing was loaded"):
            load(tmp_path, model, opt)
        return load(tmp_path, model, opt).step

    assert run_ranks(2, rank, library="host") == [1, 1]


# --- the whole model: full_state_dict and exports -----------------------------------------------------------


def whole_parameters() -> dict[str, np.ndarray]:
    """name -> array, tied names included."""
    params = parameters()
    blocks = {
        f"blocks.{i}.{key}": array for i, block in enumerate(params["blocks"]) for key, array in block.items()
    }
    head = {f"head.{key}": array for key, array in params["head"].items()}
    return {"embed": params["embed"], **blocks, **head}


@pytest.mark.parametrize(
    ("n", "options"),
    [(1, {}), (2, {"strategy": "no_shard"}), (3, {}), (4, {"strategy": "hybrid_shard", "mesh": (2, 2)})],
)
def test_the_full_state_dict_is_the_whole_model_under_all_its_names(n: int, options: dict[str, Any]) -> None:
    def rank(comm: Any, rank0_only: bool) -> Any:
        model, _ = make(comm, **options)
        found = model.full_state_dict(rank0_only=rank0_only)
        if found:
            assert found["head.w"] is found["embed"]
        return found

    expected = whole_parameters()
    for found in run_ranks(n, rank, False, library="host"):
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            assert found[name].dtype == array.dtype and found[name].shape == array.shape
            assert found[name].tobytes() == array.tobytes()
    first, *others = run_ranks(n, rank, True, library="host")
    assert first.keys() == expected.keys() and others == [{}] * (n - 1)


def test_the_full_state_dict_is_a_copy_of_the_masters() -> None:
    def rank(comm: Any) -> None:
        params = {"w": np.arange(1, 5).astype(ml_dtypes.bfloat16)}
        model = fully_shard(params, comm, precision=MixedPrecision(param="bfloat16"))
        for shard in model.shards:
            shard.data += 2.0**-12
        model.updated()
        found = model.full_state_dict()["w"]
        assert found.dtype == np.float32 and found.tolist() == [i + 2.0**-12 for i in range(1, 5)]
        found[...] = 0
        assert model.full_state_dict()["w"].all()

    run_ranks(1, rank, library="host")
    run_ranks(2, rank, library="host")


def exported(folder: Path, n: int, **keywords: Any) -> list[Path]:
    def rank(comm: Any) -> list[Path]:
        model, _ = make(comm)
        return export_safetensors(model, folder, **keywords)

    paths = run_ranks(n, rank, library="host")
    assert paths == [paths[0]] * n
    return paths[0]


@pytest.mark.parametrize("n", [1, 3])
def test_an_export_is_one_safetensors_file_that_others_read(tmp_path: Path, n: int) -> None:
    (path,) = exported(tmp_path, n)
    assert path.name == "model.safetensors"
    found = numpy_files.load_file(path)
    expected = whole_parameters()
    del expected["head.w"]  # tied: once
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()
    assert TensorFile(path).metadata == {"format": "pt"}


def test_a_large_export_is_several_files_with_an_index(tmp_path: Path) -> None:
    *paths, index_path = exported(tmp_path, 2, max_shard_bytes=100)
    count = len(paths)
    assert count > 2
    assert [path.name for path in paths] == [
        f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)
    ]
    index = json.loads(index_path.read_text())
    expected = whole_parameters()
    del expected["head.w"]
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in expected.values())
    assert index["weight_map"].keys() == expected.keys()
    for path in paths:
        arrays = numpy_files.load_file(path)
        assert sum(array.nbytes for array in arrays.values()) <= 100 or len(arrays) == 1
        for name, array in arrays.items():
            assert index["weight_map"].pop(name) == path.name
            assert array.tobytes() == expected[name].tobytes()
    assert index["weight_map"] == {}
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(
        path.name for path in [*paths, index_path]
    )


def test_an_export_may_cast_its_floating_point_parameters(tmp_path: Path) -> None:
    def rank(comm: Any) -> None:
        params = {"w": np.array([1.0, 1 + 2.0**-12], np.float32), "count": np.arange(3)}
        model = fully_shard(params, comm, frozen=["count"])
        export_safetensors(model, tmp_path, dtype="bfloat16", metadata={"by": "us"})
        with pytest.raises(ValueError, match="dtype='int8'"):
            export_safetensors(model, tmp_path, dtype="int8", overwrite=True)

    run_ranks(2, rank, library="host")
    file = TensorFile(tmp_path / "model.safetensors")
    assert file.spec("w").dtype == "bfloat16" and file.spec("count").dtype == "int64"
    assert file.metadata == {"format": "pt", "by": "us"}
    read = np.empty(2, np.float32)
    file.read("w", 0, read)
    assert read.tolist() == [1, 1]


def test_an_export_replaces_an_earlier_one_only_if_asked_and_leaves_other_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    exported(tmp_path, 1, max_shard_bytes=100)
    with pytest.raises(RankError, match="overwrite=True"):
        exported(tmp_path, 2)
    exported(tmp_path, 1, overwrite=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_an_export_that_fails_on_rank_0_fails_on_all_and_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(tmp_path, 1)
    before = (tmp_path / "model.safetensors").read_bytes()

    def rank(comm: Any) -> None:
        model, _ = make(comm)
        monkeypatch.setattr(export_module._Writer, "write", full_disk)
        with pytest.raises(OSError, match="no space left"):
            export_safetensors(model, tmp_path, overwrite=True)
        assert model.full_state_dict()  # the communicators are still in step

    run_ranks(3, rank, library="host")
    assert [each.name for each in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    "names, keywords, error, message",
    [
        (["w", "__metadata__"], {}, ValueError, "named '__metadata__'.*rename the parameter"),
        (["w"], {"metadata": {"epoch": 3}}, TypeError, "'epoch', 3.* 3 is a int"),
        (["w"], {"metadata": {1: "x"}}, TypeError, "1 is a int"),
        (["w"], {"metadata": {"by": "\ud800"}}, ValueError, r"by.*\\ud800.*UTF-8"),
    ],
)
def test_what_the_format_cannot_say_is_an_error_on_all_ranks_before_anything_is_written(
    tmp_path: Path, names: list[str], keywords: Any, error: type[Exception], message: str
) -> None:
    def rank(comm: Any) -> None:
        model = fully_shard({name: np.ones(4) for name in names}, comm)
        with pytest.raises(error, match=message):
            export_safetensors(model, tmp_path, **keywords)
        save(tmp_path / "c", model, step=0)  # there the names are others
        load(tmp_path / "c", model)

    run_ranks(2, rank, library="host")
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def test_a_name_that_no_file_can_hold_is_refused_at_the_start() -> None:
    def rank(comm: Any) -> None:
        with pytest.raises(ValueError, match=r"parameter '\\ud800' has a name that no file can hold"):
            fully_shard({"w": np.ones(4), "\ud800": np.ones(4)}, comm)

    run_ranks(2, rank, library="host")


def test_no_rank_holds_more_than_a_flat_group_while_exporting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(comm: Any) -> int:
        params = {f"layer{i}": np.ones(64) for i in range(16)}
        model = fully_shard(params, comm, units=["layer*"])
        made: list[int] = []
        original = model.runtime.empty

        def counting(elements: int, dtype: Any) -> Any:
            made.append(elements * np.dtype(dtype).itemsize)
            return original(elements, dtype)

        monkeypatch.setattr(model.runtime, "empty", counting)
        export_safetensors(model, tmp_path)
        return sum(made)

    assert run_ranks(2, rank, library="host") == [64 * 8] * 2


# --- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", sorted(tensorfile_module.TAGS))
def test_a_tensor_of_each_dtype_is_written_and_ranges_of_it_read(tmp_path: Path, dtype: str) -> None:
    array = np.arange(10).astype(numpy_dtype(dtype))
    path = tmp_path / "x.safetensors"
    entry = write_tensors(path, [Source(TensorSpec("x", (2, 5), dtype), lambda: array.reshape(2, 5))])
    assert entry.bytes == path.stat().st_size
    file = TensorFile(path)
    assert file.spec("x") == TensorSpec("x", (2, 5), dtype)
    part = np.empty(4, numpy_dtype(dtype))
    file.read("x", 3, part)
    assert part.tobytes() == array[3:7].tobytes()
    with pytest.raises(CheckpointError, match="no tensor 'y'"):
        file.read("y", 0, part)


def test_tensors_are_aligned_to_their_elements_whatever_their_order(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"

    def source(name: str, dtype: str) -> Source:
        return Source(TensorSpec(name, (3,), dtype), lambda: np.ones(3, numpy_dtype(dtype)))

    dtypes = {"a": "uint8", "b": "float64", "c": "bfloat16", "d": "float32"}
    sources = [source(name, dtype) for name, dtype in dtypes.items()]
    write_tensors(path, sources)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    for name, itemsize in [("a", 1), ("b", 8), ("c", 2), ("d", 4)]:
        assert header[name]["data_offsets"][0] % itemsize == 0


def test_a_dtype_that_the_format_does_not_have_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    def rank(comm: Any) -> None:
        with pytest.raises(TypeError, match="parameter 'w' has dtype float128, which no checkpoint can hold"):
            fully_shard({"w": np.ones(3, np.longdouble)}, comm, frozen=["w"])

    run_ranks(2, rank, library="host")


def test_every_block_of_a_file_has_a_checksum_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorfile_module, "BLOCK", 64)
    path = tmp_path / "x.safetensors"
    array = np.arange(100.0)
    entry = write_tensors(path, [Source(TensorSpec("x", (100,), "float64"), lambda: array)])
    assert len(entry.sha256) == -(-entry.bytes // 64)
    verify_blocks(path, entry, range(len(entry.sha256)))
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    verify_blocks(path, entry, [0, 1, 2, 4])
    with pytest.raises(CheckpointError, match="bytes 192 to 256 do not match"):
        verify_blocks(path, entry, [3])
    read = np.empty(100, np.float32)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="x.safetensors"):
        TensorFile(path).read("x", 0, read)

"""What cannot be saved or loaded is the same error on every rank, and changes nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoint_ranks import (  # type: ignore[import-not-found]
    assert_same,
    assert_unchanged,
    backward,
    joined,
    make,
    parameters,
    reference,
    saved,
    state_of,
)
from sharding_ranks import FakeComm, alone, chain, run_threads  # type: ignore[import-not-found]

from pynccl.testing import run_ranks
from sharding import SGD, PhaseError, fully_shard
from sharding.checkpoint import (
    CheckpointError,
    DifferentModelError,
    NoCheckpointError,
    load,
    save,
    save_async,
    saved_steps,
)


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

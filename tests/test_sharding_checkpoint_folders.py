"""A folder of checkpoints holds complete ones only, whatever fails or is killed while saving."""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_ranks import (  # type: ignore[import-not-found]
    assert_same,
    full_disk,
    joined,
    make,
    reference,
    state_of,
    train,
)

from pynccl.testing import RankError, run_ranks
from sharding import fully_shard
from sharding import saving as saving_module
from sharding import store as store_module
from sharding.checkpoint import load, save, save_async, saved_steps

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

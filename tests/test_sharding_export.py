"""The whole model on one rank: full_state_dict and exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy as numpy_files
from checkpoint_ranks import full_disk, make, parameters  # type: ignore[import-not-found]

from pynccl.testing import RankError, run_ranks
from sharding import MixedPrecision, export_safetensors, fully_shard
from sharding import export as export_module
from sharding.checkpoint import load, save
from sharding.tensorfile import TensorFile


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

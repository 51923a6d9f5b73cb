"""The files of a checkpoint: tensors, their ranges and their checksums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pynccl.testing import run_ranks
from sharding import fully_shard
from sharding import tensorfile as tensorfile_module
from sharding.checkpoint import CheckpointError
from sharding.layout import numpy_dtype
from sharding.tensorfile import Source, TensorFile, TensorSpec, verify_blocks, write_tensors


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

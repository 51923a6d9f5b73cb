"""The whole model for others: a dict of full arrays, or a folder of safetensors files as Hugging Face's.

Parameters are gathered one flat group at a time, so that no rank holds the whole model: `full_state_dict` on
rank 0 alone, by the caller's wish; `export_safetensors` nowhere. These files are for other programs. They
have no optimizer state, no checksums and no step: to resume, use `checkpoint.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from .agreement import agree
from .layout import FlatGroup, numpy_dtype
from .policy import is_floating
from .precision import cast_into
from .tensorfile import TAGS, Header, TensorSpec, bytes_of, to_host
from .unit import views_of

if TYPE_CHECKING:
    from .engine import ShardedModel

__all__ = ["export_safetensors", "full_state_dict", "partition"]

INDEX = "model.safetensors.index.json"
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_PART = re.compile(r"\.model.*\.[0-9a-f]{8}\.part")


def full_state_dict(model: ShardedModel, rank0_only: bool = False) -> dict[str, np.ndarray]:
    """name -> full NumPy array (a copy, in the master dtype) of every parameter. Collective.

    Tied names are all there and give the same array. `rank0_only`: the other ranks get {}, and hold no more
    than one flat group of one unit at a time. PhaseError inside a microbatch.
    """
    model.require_usable("full_state_dict()")
    wanted = model.rank == 0 or not rank0_only
    found: dict[str, np.ndarray] = {}
    with model.ending_all_ranks():
        for group, flat in _gathered(model):
            if wanted:
                found.update({name: np.array(to_host(view)) for name, view in views_of(group, flat).items()})
    if wanted:
        found.update({alias: found[owner] for alias, owner in model.layout.aliases})
    return found


def _gathered(model: ShardedModel) -> Iterator[tuple[FlatGroup, Any]]:
    """Each flat group with its full master data; the array is overwritten by the next."""
    shards = [shard for shard in model.shards if shard.group.numel and model.shard_size > 1]
    most = max((shard.group.padded * shard.data.dtype.itemsize for shard in shards), default=0)
    memory = model.runtime.empty(most, np.dtype("uint8"))
    for shard in model.shards:
        flat = shard.data
        if shard in shards:
            flat = memory[: shard.group.padded * shard.data.dtype.itemsize].view(shard.data.dtype)
            model.mesh.gather.all_gather(model.runtime.xp.asarray(shard.data), out=flat)
        yield shard.group, flat


def export_safetensors(
    model: ShardedModel,
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5_000_000_000,
    dtype: str | None = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Write the parameters as `model.safetensors`, or as numbered files with an index if they are larger than
    `max_shard_bytes`. Collective; returns the paths (rank 0 writes, all ranks get them).

    folder
        May hold other files, such as a config.json; they are left alone.
    max_shard_bytes
        Of a file's data. A parameter that is larger has a file of its own.
    dtype
        To cast floating-point parameters to; by default each has the dtype that `fully_shard` was given.
    metadata
        Strings for the files' headers. {"format": "pt"} is added: Hugging Face's loaders ask for it.
    overwrite
        Replace an earlier export in the folder, else FileExistsError.

    Of tied names one is written, the first in the model's order: Hugging Face's models tie the others again.
    The files get their names when all are complete, the index last.
    """
    model.require_usable("export_safetensors()")
    error: Exception | None = None
    writer = None
    try:
        specs = _specs(model, dtype)
        files = partition(specs, max_shard_bytes)
        names = _names(len(files))
        if model.rank == 0:
            writer = _Writer(
                Path(folder).absolute(), names, files, {"format": "pt", **(metadata or {})}, overwrite
            )
    except Exception as caught:
        error = caught
    agree(model.comm, error)
    order = {spec.name: spec for spec in specs}
    with model.ending_all_ranks():
        for group, flat in _gathered(model):
            if writer is None or error is not None:
                continue  # after an error too: the other ranks are gathering
            try:
                for name, view in views_of(group, flat).items():
                    writer.write(name, _as_dtype(to_host(view), order[name].dtype))
            except Exception as caught:
                error = caught
    if writer is not None:
        try:
            writer.close(error)
        except Exception as caught:
            error = error or caught
    agree(model.comm, error)
    root = Path(folder).absolute()
    return [root / name for name in names + ([INDEX] if len(names) > 1 else [])]


def _specs(model: ShardedModel, dtype: str | None) -> list[TensorSpec]:
    """What is written, in the order in which it is gathered."""
    if dtype is not None and (dtype not in TAGS or not is_floating(numpy_dtype(dtype))):
        raise ValueError(
            f"export_safetensors: dtype={dtype!r}; use a floating-point type such as 'bfloat16' or "
            "'float32', or None to keep each parameter's own"
        )
    found = []
    for shard in model.shards:
        group = shard.group
        chosen = dtype if dtype is not None and is_floating(numpy_dtype(group.dtype)) else group.dtype
        found += [TensorSpec(entry.name, entry.shape, chosen) for entry in group.entries]
    return found


def partition(specs: list[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """`specs` in their order, as files of at most `max_bytes` bytes of data each; a larger one is alone."""
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
        raise ValueError(
            f"export_safetensors: max_shard_bytes={max_bytes!r}; expected a number of bytes above 0"
        )
    files: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if files[-1] and filled + spec.nbytes > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(spec)
        filled += spec.nbytes
    return files


def _names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _as_dtype(array: np.ndarray, dtype: str) -> np.ndarray:
    if array.dtype.name == dtype:
        return array
    made = np.empty(array.shape, numpy_dtype(dtype))
    cast_into(made.reshape(-1), array.reshape(-1))
    return made


class _Writer:
    """Rank 0's files: made under temporary names, one after another, filled tensor by tensor."""

    def __init__(
        self,
        folder: Path,
        names: list[str],
        files: list[list[TensorSpec]],
        metadata: Mapping[str, str],
        overwrite: bool,
    ) -> None:
        self._folder, self._names = folder, names
        self._headers = [Header(specs, metadata) for specs in files]
        self._file_of = {spec.name: at for at, specs in enumerate(files) for spec in specs}
        self._total = sum(spec.nbytes for specs in files for spec in specs)
        self._token = secrets.token_hex(4)
        self._at = -1
        self._file: BinaryIO | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._old = [each for each in folder.iterdir() if _OURS.fullmatch(each.name)]
        if self._old and not overwrite:
            raise FileExistsError(
                f"{self._old[0]} exists already; pass overwrite=True to replace that export, or use another "
                "folder"
            )
        for each in folder.iterdir():
            if _PART.fullmatch(each.name):  # of an export that was killed
                each.unlink()

    def _part(self, at: int) -> Path:
        return self._folder / f".{self._names[at]}.{self._token}.part"

    def write(self, name: str, array: np.ndarray) -> None:
        """Put one parameter in its place."""
        while self._at < self._file_of[name]:
            self._next()
        data, offset = bytes_of(array), self._headers[self._at].offset[name]
        assert self._file is not None
        self._file.seek(offset)
        while data:
            data = data[self._file.write(data) :]

    def _next(self) -> None:
        self._end_file()
        self._at += 1
        self._file = self._part(self._at).open("xb", buffering=0)
        self._file.write(self._headers[self._at].head)

    def _end_file(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def close(self, error: Exception | None) -> None:
        """Give the files their names; after an error, remove them."""
        try:
            if error is None:
                while self._at < len(self._names) - 1:
                    self._next()
                self._end_file()
                self._publish()
        finally:
            if self._file is not None:
                self._file.close()
            for at in range(len(self._names)):
                with contextlib.suppress(FileNotFoundError):  # it has its name
                    self._part(at).unlink()

    def _publish(self) -> None:
        for each in self._old:
            each.unlink()
        for at, name in enumerate(self._names):
            self._part(at).rename(self._folder / name)
        if len(self._names) > 1:
            weights = {tensor: self._names[at] for tensor, at in self._file_of.items()}
            text = json.dumps({"metadata": {"total_size": self._total}, "weight_map": weights}, indent=2)
            with (self._folder / INDEX).open("x", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

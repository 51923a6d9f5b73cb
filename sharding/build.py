"""Memory for shards, and what fills it. The whole model never exists on a rank.

Shards are filled a parameter, or a block of a flat group, at a time: from the rank's own arrays, from an
initialiser, or from rank `root` by broadcast. Where the whole weights or gradients of a unit stay in memory,
the shard is a part of them, so that collectives work in place.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .layout import FlatGroup, UnitLayout, between, numpy_dtype, pieces
from .policy import dtypes_of
from .precision import cast_into
from .unit import Shard, Weights

if TYPE_CHECKING:
    from .engine import ShardedModel

__all__ = ["Fill", "from_arrays", "from_broadcast", "from_init", "make_shards"]

BLOCK_BYTES = 16 << 20  # of a broadcast: large enough for full bandwidth, small beside a unit

Fill = Callable[[FlatGroup, int, Any], None]
"""fill(group, rank, data): write that rank's shard of the group into data (padding is left as it is)."""


def make_shards(
    model: ShardedModel, layout: UnitLayout, kept: bool, fill: Fill
) -> tuple[list[Shard], Weights | None, list[Any] | None]:
    """(shards, the whole weights if they stay, the whole gradients if they stay) of a unit, filled."""
    shards: list[Shard] = []
    wholes, gradients = [], []
    stays = kept or model.strategy.keeps_weights or model.shard_size == 1
    whole_gradients = not model.reduces_each and model.shard_size > 1
    for index, group in enumerate(layout.groups):
        dtypes = dtypes_of(group, model.precision)
        own = slice(model.shard_rank * group.shard, (model.shard_rank + 1) * group.shard)
        if stays:
            wholes.append(_zeros(model, group.padded, dtypes.gather))
            source = wholes[-1][own]
        else:
            source = _zeros(model, group.shard, dtypes.gather)
        data = source if dtypes.master == dtypes.gather else _zeros(model, group.shard, dtypes.master)
        grad = None
        if group.trainable and whole_gradients:
            gradients.append(_zeros(model, group.padded, dtypes.reduce))
            grad = gradients[-1][own]
        elif group.trainable:
            grad = _zeros(model, group.shard, dtypes.reduce)
        fill(group, model.shard_rank, data)
        shards.append(Shard(layout.name, index, group, dtypes, data, source, grad))
    if not stays:
        return shards, None, gradients or None
    computed = [
        whole
        if shard.dtypes.compute == shard.dtypes.gather
        else model.runtime.empty(whole.size, shard.dtypes.compute)
        for shard, whole in zip(shards, wholes, strict=True)
    ]
    return shards, Weights(wholes, computed), gradients or None


def _zeros(model: ShardedModel, elements: int, dtype: np.dtype) -> Any:
    made = model.runtime.empty(elements, dtype)
    made[...] = 0
    return made


# --- what fills a shard -------------------------------------------------------------------------------------


def from_arrays(arrays: Mapping[str, Any]) -> Fill:
    """From whole arrays by name (any shape, C order); names that are not there stay zero."""

    def fill(group: FlatGroup, rank: int, data: Any) -> None:
        for piece in pieces(group, rank):
            if piece.name in arrays:
                flat = arrays[piece.name].reshape(-1)
                cast_into(
                    data[piece.shard_start : piece.shard_stop], flat[piece.param_start : piece.param_stop]
                )

    return fill


def from_init(
    init: Callable[[str, tuple[int, ...], np.dtype], Any], xp: Any, checksums: dict[str, int]
) -> Fill:
    """From `init(name, shape, dtype)`, one whole parameter at a time; its checksum goes to `checksums`.

    Raises ValueError for an array of another shape.
    """

    def fill(group: FlatGroup, rank: int, data: Any) -> None:
        mine = {piece.name: piece for piece in pieces(group, rank)}
        for entry in group.entries:
            array = xp.asarray(init(entry.name, entry.shape, numpy_dtype(group.dtype)))
            if tuple(array.shape) != entry.shape:
                raise ValueError(
                    f"fully_shard: init({entry.name!r}, {entry.shape}, ...) returned an array of shape "
                    f"{tuple(array.shape)}; return one of shape {entry.shape}"
                )
            flat = xp.ascontiguousarray(array.astype(numpy_dtype(group.dtype), copy=False)).reshape(-1)
            host = flat if isinstance(flat, np.ndarray) else flat.get()
            checksums[entry.name] = zlib.crc32(host.view(np.uint8).data)
            piece = mine.get(entry.name)
            if piece is not None:
                cast_into(
                    data[piece.shard_start : piece.shard_stop], flat[piece.param_start : piece.param_stop]
                )

    return fill


def from_broadcast(comm: Any, root: int, arrays: Mapping[str, Any], empty: Callable[..., Any]) -> Fill:
    """From the arrays of rank `root` of `comm`, a block of the flat group at a time. Collective."""

    def fill(group: FlatGroup, rank: int, data: Any) -> None:
        if not group.numel:
            return
        first, last = rank * group.shard, (rank + 1) * group.shard
        length = min(group.numel, max(1, BLOCK_BYTES // group.itemsize))
        block = empty(length, numpy_dtype(group.dtype))
        for start in range(0, group.numel, length):
            stop = min(start + length, group.numel)
            part = block[: stop - start]
            if comm.rank == root:
                for piece in between(group, start, stop):
                    flat = arrays[piece.name].reshape(-1)
                    part[piece.shard_start : piece.shard_stop] = flat[piece.param_start : piece.param_stop]
            comm.broadcast(part, root=root)
            low, high = max(start, first), min(stop, last)
            if low < high:
                cast_into(data[low - first : high - first], part[low - start : high - start])

    return fill

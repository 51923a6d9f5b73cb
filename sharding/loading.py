"""Load a checkpoint at any number of ranks, whatever the strategy and the units are now.

Everything is looked at first: the index, the model, the optimizer, all checksums. Then all ranks agree, and
only then does each fill its shards, reading of each file just the ranges that lie in them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .agreement import CheckpointError, DifferentModelError, agree
from .engine import ShardedModel
from .index import MASTER, Index, Parameter, check_layout, tensor_name
from .layout import pieces
from .rng import Generators, planned_states, restore_states
from .saving import SavedOptimizer, settle
from .store import find, read_index, saved_steps, step_folder
from .tensorfile import TensorFile, verify_blocks

__all__ = ["Loaded", "load"]

_OPEN_FILES = 64  # at a time: a checkpoint of a thousand ranks has more than a process may open


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint held beside arrays."""

    step: int
    path: Path
    user: Any
    """What was passed to `save`."""
    strategy: str
    ranks: int
    """That saved it."""
    version: str
    """Of the library that saved it."""
    fresh: tuple[str, ...]
    """Parameters that are trained now and were not then: their optimizer state begins at zero."""


def load(
    folder: str | os.PathLike[str],
    model: ShardedModel,
    opt: SavedOptimizer | None = None,
    step: int | None = None,
    *,
    rng: Generators = None,
    hyper: bool = True,
) -> Loaded:
    """Load the newest complete checkpoint in `folder`, or that of `step`. Collective; returns what it holds
    beside arrays. It first waits for an asynchronous save that is in flight.

    The model must have the parameters of the one that was saved: the same names, shapes, dtypes and ties.
    Ranks, strategy, units and what is frozen may differ: parameters, optimizer state and step come back bit
    for bit. (If the master dtype differs, values are rounded to the model's.) Accumulated gradients are
    dropped.

    opt
        Gets its state, step and hyper-parameters back. None: parameters alone.
    hyper
        False: go on with this optimizer's own hyper-parameters instead of those that were saved.
    rng
        This rank's numpy.random.Generator, or a dict of them, set to what was saved; see `save`. On more
        ranks than saved, the further ones get streams of their own (or the common one, if all were equal).

    Before anything changes, all files are checked against their checksums (each rank checks its share) and
    everything is compared with the model. Raises, on every rank: NoCheckpointError, DifferentModelError
    (names the first parameter), CheckpointError (names the file that is missing, truncated or changed;
    earlier checkpoints can still be loaded, with `step`), PhaseError in the middle of a microbatch.
    """
    root = Path(folder).absolute()
    chosen = _chosen_step(root, model, step)
    path = step_folder(root, chosen)
    error: Exception | None = None
    restored = None
    try:
        index = read_index(path)
        check_layout(index, model.layout, str(path))
        generators = planned_states(rng, index.rng, model.rank, str(path))
        fresh = [] if opt is None else _check_optimizer(index, model, opt, path)
        _verify(path, index, model.rank, model.size)
        if opt is not None:
            before = opt.describe()
            opt.restore(index.optimizer, **({} if hyper else {"hyper": False}))
            restored = before
    except Exception as caught:
        error = _with_remedy(caught, root, chosen)
    try:
        agree(model.comm, error)
    except Exception:
        if opt is not None and restored is not None:
            opt.restore(restored)
        raise
    try:
        _read(path, index, model, opt)
        restore_states(generators)
        model.loaded()
    except Exception as caught:
        error = CheckpointError(
            f"{path} could not be read to the end ({caught}); the model is now in part what it was and in "
            "part what was saved: load again before you go on"
        )
        error.__cause__ = caught
    agree(model.comm, error)
    return Loaded(
        index.step,
        path,
        index.user,
        index.strategy,
        index.mesh[0] * index.mesh[1],
        index.version,
        tuple(fresh),
    )


def _chosen_step(root: Path, model: ShardedModel, step: int | None) -> int:
    """The step that rank 0 finds. All ranks must ask for the same."""
    error: Exception | None = None
    chosen = None
    try:
        model.require_resting("load()")
        model.check_resharded("load()")
        if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
            raise TypeError(f"load: step={step!r}; expected a number, or None for the newest")
        settle(root, model, "and nothing was loaded now: call load again for the newest that is complete")
        if model.rank == 0:
            chosen = find(root, step)
    except Exception as caught:
        error = caught
    told = agree(model.comm, error, [step, chosen])
    for rank, (theirs, _) in enumerate(told):
        if theirs != told[0][0]:
            raise ValueError(
                f"load: step differs between ranks: {told[0][0]} on rank 0, {theirs} on rank {rank}; pass "
                "the same on all"
            )
    return int(told[0][1])


def _with_remedy(error: Exception, root: Path, step: int) -> Exception:
    """A damaged checkpoint's error, with the step to go back to."""
    if type(error) is not CheckpointError:
        return error
    before = [each for each in saved_steps(root) if each < step]
    remedy = f"load(..., step={before[-1]}) loads the one before" if before else "there is none before it"
    found = CheckpointError(f"{error}; {remedy}")
    found.__cause__ = error
    return found


def _check_optimizer(index: Index, model: ShardedModel, opt: SavedOptimizer, path: Path) -> list[str]:
    """DifferentModelError unless the checkpoint has this optimizer's arrays. Gives the names without any."""
    if index.optimizer is None:
        raise DifferentModelError(f"{path} was saved without an optimizer; load it with opt=None")
    fresh = []
    for shard in model.shards:
        slots = opt.state.get(shard.key, {}) if shard.trainable else {}
        for entry in shard.group.entries:
            saved = index.parameters[index.owner(entry.name)]
            if slots and not saved.trainable:
                fresh.append(entry.name)
            elif shard.trainable and saved.trainable and set(saved.slots) != set(slots):
                raise DifferentModelError(
                    f"{path} is of another optimizer: for {entry.name!r} it has {_listed(saved.slots)}, and "
                    f"this one keeps {_listed(slots)}; make the optimizer that was saved"
                )
    return fresh


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _verify(path: Path, index: Index, rank: int, size: int) -> None:
    """Check this rank's share of all files' blocks against their checksums."""
    at = 0
    for entry in index.files:
        count = len(entry.sha256)
        verify_blocks(path / entry.name, entry, (b for b in range(count) if (at + b) % size == rank))
        at += count


def _read(path: Path, index: Index, model: ShardedModel, opt: SavedOptimizer | None) -> None:
    """Fill this rank's shards; of each file, the ranges that lie in them."""
    files = _Files(path, index)
    try:
        for shard in model.shards:
            slots = opt.state.get(shard.key, {}) if opt is not None and shard.trainable else {}
            for piece in pieces(shard.group, model.shard_rank):
                name = index.owner(piece.name)
                for array_name, array in {MASTER: shard.data, **slots}.items():
                    target = array[piece.shard_start : piece.shard_stop]
                    if array_name == MASTER or array_name in index.parameters[name].slots:
                        files.read(
                            tensor_name(array_name, name), index.parameters[name], piece.param_start, target
                        )
                    else:
                        target[...] = 0
    finally:
        files.close()


class _Files:
    """The files of a checkpoint, opened when needed, not too many at a time."""

    def __init__(self, path: Path, index: Index) -> None:
        self._path, self._index = path, index
        self._open: dict[int, TensorFile] = {}

    def read(self, tensor: str, saved: Parameter, start: int, target: Any) -> None:
        """Fill `target` with the parameter's elements from `start` on, of whatever files have them."""
        stop = start + target.size
        for piece in saved.pieces:
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                self._file(piece.file).read(tensor, first - piece.start, target[first - start : last - start])

    def _file(self, number: int) -> TensorFile:
        if number not in self._open:
            if len(self._open) >= _OPEN_FILES:
                self._open.pop(next(iter(self._open))).close()
            self._open[number] = TensorFile(self._path / self._index.files[number].name)
        return self._open[number]

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

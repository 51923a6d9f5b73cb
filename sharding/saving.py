"""Save a checkpoint: every rank writes what it owns, then one rank completes it.

The steps: all look and agree on what is saved; rank 0 makes a temporary folder; every rank that does not hold
a mere replica writes its file; rank 0 adds the index and gives the folder its name. They are the same in the
calling thread and in a thread of its own, but for how the ranks meet: that thread leaves the communicators to
the training, whose collectives must pair.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pynccl import __version__

from .agreement import CheckpointError, agree
from .engine import PhaseError, ShardedModel
from .index import MASTER, FileEntry, Index, Parameter, PieceEntry, check_user, tensor_name
from .layout import pieces
from .rng import Generators, generator_states
from .store import FileMeeting, Place
from .tensorfile import Source, TensorSpec, to_host, write_tensors
from .unit import Shard

__all__ = ["SaveHandle", "SavedOptimizer", "save", "save_async"]

WAIT_SECONDS = 600.0

Folder = str | os.PathLike[str]


class SavedOptimizer(Protocol):
    """What checkpoints ask of an optimizer. `sharding.Optimizer` is one; your own may be another."""

    state: dict[tuple[str, int], dict[str, Any]]
    """`Shard.key` -> slot name -> 1-d array like `Shard.data`, zero where nothing has happened yet."""
    steps: int

    def describe(self) -> Any:
        """All else that must come back, as JSON-like data: kind, steps, hyper-parameters by name."""

    def restore(self, description: Any) -> None:
        """Become what `describe` said. ValueError, with nothing changed, if it is not of this optimizer."""


def save(
    folder: Folder,
    model: ShardedModel,
    opt: SavedOptimizer | None = None,
    *,
    step: int | None = None,
    user: Any = None,
    rng: Generators = None,
    keep_last: int | None = None,
    overwrite: bool = False,
    timeout: float = WAIT_SECONDS,
) -> Path:
    """Save model, optimizer, random generators and your own state as `folder`/step-00000012. Collective.

    folder
        One that all ranks can see, and that no other run saves to: what looks like the rest of a killed save
        is removed.
    step
        The number of this checkpoint; by default `opt.steps`.
    user
        JSON-like data (None, bool, int, float, str, lists, dicts; tuples come back as lists), equal on all
        ranks: how far the data was read, the losses so far.
    rng
        This rank's numpy.random.Generator, or a dict of them. Every rank's states are saved.
    keep_last
        After this one is complete, remove older ones, so that `keep_last` remain.
    overwrite
        Replace a checkpoint of the same step; else FileExistsError. The old one is there until the new one is
        complete, but for the moment between two renames.

    Saved are the master weights, in their own dtype. It is all there once the folder has its name: written
    beside it, flushed to the disk and renamed at the end. Returns the folder.

    Raises, on every rank: PhaseError in the middle of a step or of an accumulation, TypeError and ValueError
    for arguments, CheckpointError or OSError if a file cannot be written. Earlier checkpoints are untouched.
    Warns, on rank 0, if the checkpoint is complete but what it replaces could not be removed.
    """
    request = _Request(
        Path(folder).absolute(), step, user, rng, keep_last, overwrite, timeout, background=False
    )
    job = _begin(request, model, opt)
    try:
        return job.run(_CommMeeting(model.comm))
    except Exception:
        if job.rank == 0:
            job.place.discard()
        raise


def save_async(
    folder: Folder,
    model: ShardedModel,
    opt: SavedOptimizer | None = None,
    *,
    step: int | None = None,
    user: Any = None,
    rng: Generators = None,
    keep_last: int | None = None,
    overwrite: bool = False,
    timeout: float = WAIT_SECONDS,
) -> SaveHandle:
    """As `save`, but only copy this rank's state into host memory now, and write it in a thread. Collective.

    What is saved is what was there at the call, whatever the training does next. One save is in flight at a
    time: the next one, and a load, first wait for it. An error shows in `handle.wait()`, or else there.
    `timeout`: seconds that ranks wait for each other's files, at most. A rank that died is waited for no
    longer than `store.SILENT_SECONDS`.
    """
    request = _Request(
        Path(folder).absolute(), step, user, rng, keep_last, overwrite, timeout, background=True
    )
    job = _begin(request, model, opt)
    handle = SaveHandle(job, timeout, model)
    with _in_flight_lock:
        _in_flight[model] = handle
    return handle


class SaveHandle:
    """An asynchronous save on its way: `step`, and `path`, where it will be."""

    def __init__(self, job: _Job, timeout: float, model: ShardedModel) -> None:
        self.step, self.path = job.place.step, job.place.final
        self._error: Exception | None = None
        self._seen = False
        known = weakref.ref(model)

        def abandoned() -> bool:
            model = known()
            return model is not None and model._broken is not None

        # Not a daemon: a program that ends meanwhile ends after the checkpoint is complete, or cannot be.
        self._thread = threading.Thread(
            target=self._write, args=(job, timeout, abandoned), name=f"save of step {self.step}"
        )
        self._thread.start()

    def _write(self, job: _Job, timeout: float, abandoned: Callable[[], bool]) -> None:
        try:
            with FileMeeting(job.place, job.rank, job.size, timeout, abandoned) as meeting:
                job.run(meeting)
        except Exception as error:  # kept for whoever waits
            self._error = error

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is complete; returns its folder. Raises what went wrong on any rank.

        TimeoutError after `timeout` seconds: it goes on, wait again.
        """
        self._thread.join(timeout)
        if not self.done():
            raise TimeoutError(f"the save of step {self.step} still runs after {timeout:g} s; wait again")
        self._seen = True
        if self._error is not None:
            raise self._error
        return self.path

    def settle(self, remedy: str) -> None:
        """Wait to the end, and raise an error that nobody has seen."""
        self._thread.join()
        if self._error is not None and not self._seen:
            self._seen = True
            raise CheckpointError(
                f"the asynchronous save of step {self.step} failed: {self._error}; {remedy}"
            ) from self._error


_in_flight: weakref.WeakKeyDictionary[ShardedModel, SaveHandle] = weakref.WeakKeyDictionary()
_in_flight_lock = threading.Lock()


def settle(folder: Path, model: ShardedModel, remedy: str) -> None:
    """Wait for this rank's asynchronous saves of the model or to the folder; raise what nobody has seen."""
    with _in_flight_lock:  # ranks may be threads of one process
        known = list(_in_flight.items())
    for saver, handle in known:
        if saver is model or (saver.rank == model.rank and handle.path.parent == folder):
            with _in_flight_lock:
                _in_flight.pop(saver, None)
            handle.settle(remedy)


@dataclass(frozen=True)
class _Request:
    """The arguments of a save."""

    folder: Path
    step: int | None
    user: Any
    rng: Generators
    keep_last: int | None
    overwrite: bool
    timeout: float
    background: bool

    def check(self, opt: SavedOptimizer | None) -> int:
        """The step."""
        step = self.step if self.step is not None or opt is None else opt.steps
        if step is None:
            raise TypeError("save: step is missing; pass step=, or an optimizer that counts them")
        if isinstance(step, bool) or not isinstance(step, (int, np.integer)) or step < 0:
            raise ValueError(f"save: step={step!r}; expected a number of at least 0")
        keep = self.keep_last
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ValueError(f"save: keep_last={self.keep_last!r}; expected 1 or more, or None to keep all")
        if not self.timeout > 0:
            raise ValueError(f"save: timeout={self.timeout!r}; expected seconds, more than 0")
        check_user(self.user)
        return int(step)


@dataclass(frozen=True)
class _Job:
    """A save that all have agreed on."""

    place: Place
    rank: int
    size: int
    writers: int
    sources: Sequence[Source] | None
    """None on ranks that hold a replica of what another rank writes."""
    index: Index
    """Without its files."""
    keep_last: int | None

    def run(self, meeting: FileMeeting | _CommMeeting) -> Path:
        """Write this rank's file; rank 0 completes the checkpoint when all have."""
        error: Exception | None = None
        entry = untidy = None
        try:
            if self.sources is not None:
                path = self.place.file(self.rank, self.writers)
                entry = dataclasses.asdict(write_tensors(path, self.sources, {"step": str(self.place.step)}))
        except Exception as caught:  # everybody is to hear of it
            error = caught
        try:
            entries = meeting.gather(error, entry)
            if self.rank == 0:
                files = tuple(
                    FileEntry(**{**each, "sha256": tuple(each["sha256"])}) for each in entries[: self.writers]
                )
                self.place.publish(dataclasses.replace(self.index, files=files))
                untidy = self._tidy()
        except Exception as caught:
            error = caught
        meeting.finish(error)
        if untidy is not None:
            warnings.warn(
                f"{self.place.final} is complete, but what it replaces could not be removed: {untidy} (the "
                "next save tries again)",
                stacklevel=3,
            )
        return self.place.final

    def _tidy(self) -> OSError | None:
        """An error is no error of the save: the checkpoint is there."""
        try:
            self.place.tidy(self.keep_last)
        except OSError as caught:
            return caught
        return None


class _CommMeeting:
    """As FileMeeting, over the communicator: for saves that the training waits for."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def gather(self, error: Exception | None, value: Any) -> list[Any]:
        return agree(self._comm, error, value)

    def finish(self, error: Exception | None) -> None:
        agree(self._comm, error)


def _begin(request: _Request, model: ShardedModel, opt: SavedOptimizer | None) -> _Job:
    """Look, agree, make the folder, take the snapshot."""
    error: Exception | None = None
    value = None
    try:
        settle(request.folder, model, "and nothing was saved now: call save again")
        _check_whole_step(model)
        step = request.check(opt)
        arrays = _arrays(model, opt)
        facts: dict[str, Any] = {
            "step": step,
            "user": json.dumps(request.user),
            "optimizer": json.dumps(None if opt is None else opt.describe()),
            "keep_last": request.keep_last,
            "overwrite": request.overwrite,
        }
        token = secrets.token_hex(4)
        value = {"facts": facts, "token": token, "rng": json.dumps(generator_states("save", request.rng))}
    except Exception as caught:
        error = caught
    told: list[Any] = agree(model.comm, error, value)
    _compare_facts(told)  # the same everywhere
    place = Place(request.folder, step, told[0]["token"])
    try:
        sources = None
        if model.replicate_rank == 0:
            sources = _sources(arrays, model.shard_rank, copy=request.background)
        if model.rank == 0:
            place.prepare(request.overwrite)
    except Exception as caught:
        error = caught
    try:
        agree(model.comm, error)
    except Exception:
        if model.rank == 0:
            place.discard()
        raise
    index = Index(
        step=step,
        strategy=model.strategy.name,
        mesh=(model.replicate_size, model.shard_size),
        parameters=_parameters(model, arrays),
        aliases=dict(model.layout.aliases),
        optimizer=json.loads(facts["optimizer"]),
        rng=_by_name([json.loads(each["rng"]) for each in told]),
        user=json.loads(facts["user"]),
        version=__version__,
        save=place.token,
    )
    return _Job(place, model.rank, model.size, model.shard_size, sources, index, request.keep_last)


def _check_whole_step(model: ShardedModel) -> None:
    model.require_resting("save()")
    if model.accumulating:
        raise PhaseError(
            "save(): there are gradients that no optimizer has used yet, and they are not saved; save after "
            "opt.step(), or drop them with zero_grad()"
        )


def _compare_facts(told: Sequence[Any]) -> None:
    for rank, theirs in enumerate(told):
        for name, value in theirs["facts"].items():
            first = told[0]["facts"][name]
            if value != first:
                where = name
                if name == "optimizer":  # much, of which little differs
                    where, first, value = _difference(json.loads(first), json.loads(value), name)
                raise ValueError(
                    f"save: {where} differs between ranks: {_short(first)} on rank 0, {_short(value)} on "
                    f"rank {rank}; pass the same on all"
                )
        if json.loads(theirs["rng"]).keys() != json.loads(told[0]["rng"]).keys():
            raise ValueError(f"save: rng has other names on rank {rank} than on rank 0; pass the same on all")


def _difference(a: Any, b: Any, path: str) -> tuple[str, Any, Any]:
    """The first field in which JSON-like data differ: its path, and both values."""
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        pairs = [(f"{path}[{key!r}]", a[key], b[key]) for key in a]
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = [(f"{path}[{at}]", *both) for at, both in enumerate(zip(a, b, strict=True))]
    return next((_difference(x, y, where) for where, x, y in pairs if x != y), (path, a, b))


def _short(value: Any, most: int = 100) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}..."


def _by_name(ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {name: [states[name] for states in ranks] for name in ranks[0]}


def _arrays(model: ShardedModel, opt: SavedOptimizer | None) -> list[tuple[Shard, dict[str, Any]]]:
    """Each shard with its arrays by name, the master weights first."""
    found = []
    for shard in model.shards:
        slots = opt.state.get(shard.key, {}) if opt is not None and shard.trainable else {}
        for slot, array in slots.items():
            if slot == MASTER or getattr(array, "shape", None) != shard.data.shape:
                raise ValueError(
                    f"save: the optimizer's {slot!r} of unit {shard.unit!r} has shape "
                    f"{getattr(array, 'shape', None)}; expected a name other than {MASTER!r} and one element "
                    f"for each of the shard's, {shard.data.shape}"
                )
        found.append((shard, {MASTER: shard.data, **slots}))
    return found


def _sources(arrays: Sequence[tuple[Shard, dict[str, Any]]], rank: int, copy: bool) -> list[Source]:
    """This rank's tensors: of each array, the piece of each parameter."""

    def source(name: str, array: Any, piece: slice) -> Source:
        spec = TensorSpec(name, (piece.stop - piece.start,), array.dtype.name)
        return Source(spec, lambda: to_host(array[piece]))

    made = []
    for shard, by_array in arrays:
        for name, array in by_array.items():
            kept = array
            if copy:
                kept = np.array(array) if isinstance(array, np.ndarray) else to_host(array)
            for piece in pieces(shard.group, rank):
                where = slice(piece.shard_start, piece.shard_stop)
                made.append(source(tensor_name(name, piece.name), kept, where))
    return made


def _parameters(model: ShardedModel, arrays: Sequence[tuple[Shard, dict[str, Any]]]) -> dict[str, Parameter]:
    found = {}
    for shard, by_array in arrays:
        group = shard.group
        where: dict[str, list[PieceEntry]] = {entry.name: [] for entry in group.entries}
        for writer in range(group.shards):
            for piece in pieces(group, writer):
                where[piece.name].append(PieceEntry(writer, piece.param_start, piece.param_stop))
        slots = {name: array.dtype.name for name, array in by_array.items() if name != MASTER}
        for entry in group.entries:
            found[entry.name] = Parameter(
                entry.shape,
                group.dtype,
                shard.data.dtype.name,
                group.trainable,
                shard.unit,
                slots,
                tuple(where[entry.name]),
            )
    return found

"""Checkpoints as folders: complete ones, ones being made, ones being removed. Atomic by renaming.

    folder/step-00000012/                    complete: it has an index.json
    folder/.step-00000012.1f0c55aa.tmp/      being made, or left by a save that was killed
    folder/.step-00000004.1f0c55aa.old/      being removed

A name that begins with a dot is never loaded, and removed by the next save. A folder with a checkpoint's name
was complete once: what it lacks was lost, and is not passed over in silence. One rank (rank 0) makes, renames
and removes folders; the others write their files into the one being made. Knows nothing of models and
communicators: `FileMeeting` lets ranks agree through files, for threads that must leave the training's
communicators alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .agreement import CheckpointError, NoCheckpointError
from .alive import Beat, Watch
from .index import Index

__all__ = ["INDEX", "FileMeeting", "Place", "saved_steps", "find", "read_index", "step_folder"]

INDEX = "index.json"
_COMPLETE = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.step-\d{8,}\.[0-9a-f]+\.(tmp|old)")
_GRACE_SECONDS = 15.0  # more than rank 0 waits: it knows who is missing, and its message should be the one
# How long a rank may give no sign of life (it gives one a second) until the others take it for dead; the
# second where the model was abandoned, so that there is a reason to believe it.
SILENT_SECONDS = 15.0
SILENT_SECONDS_ABANDONED = 5.0
_LOOK_SECONDS = 0.5  # between looks for signs of life
T = TypeVar("T")


def saved_steps(folder: str | os.PathLike[str]) -> list[int]:
    """The steps of the complete checkpoints in `folder`, ascending; none if there is no such folder."""
    path = Path(folder)
    return [step for step in _named_steps(path) if (step_folder(path, step) / INDEX).is_file()]


def _named_steps(folder: Path) -> list[int]:
    """The steps of all folders that have a checkpoint's name, ascending."""
    if not folder.is_dir():
        return []
    matches = (_COMPLETE.fullmatch(each.name) for each in folder.iterdir() if each.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def find(folder: Path, step: int | None) -> int:
    """The step of the newest checkpoint, or `step` if it is there. NoCheckpointError lists what there is.

    One that lost its index is found as well, so that `read_index` says so.
    """
    steps = _named_steps(folder)
    if not steps and _COMPLETE.fullmatch(folder.name) and (folder / INDEX).is_file():
        raise NoCheckpointError(
            f"{folder} is itself a checkpoint; pass the folder that it lies in, {folder.parent}, and its step"
        )
    if step is None and steps:
        step = steps[-1]
    if step is None or step not in steps:
        what = "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
        there = f"there are those of steps {', '.join(map(str, steps))}" if steps else "there is none at all"
        raise NoCheckpointError(f"{folder} has {what}; {there}")
    return step


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is once it is complete."""
    return folder / _name(step)


def read_index(path: Path) -> Index:
    """The index of a checkpoint's folder, checked. CheckpointError names the file that is wrong.

    Every file is looked at: it must be there, with its size.
    """
    try:
        text = (path / INDEX).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path / INDEX} is missing: it was removed after the save, or this rank does not see the folder "
            "that the others see"
        ) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path / INDEX}: it is not text ({error}); it was damaged") from error
    index = Index.from_json(text, str(path / INDEX))
    for entry in index.files:
        try:
            size = (path / entry.name).stat().st_size
        except FileNotFoundError as error:
            raise CheckpointError(f"{path / entry.name} is missing") from error
        if size != entry.bytes:
            what = "truncated" if size < entry.bytes else "changed"
            raise CheckpointError(
                f"{path / entry.name}: {size} bytes, and {entry.bytes} were written; it was {what}"
            )
    return index


def _name(step: int) -> str:
    return f"step-{step:08d}"


@dataclass(frozen=True)
class Place:
    """Where a checkpoint is made and where it goes. `token` names this one save."""

    folder: Path
    step: int
    token: str

    @property
    def temporary(self) -> Path:
        """The folder being made."""
        return self.folder / f".{_name(self.step)}.{self.token}.tmp"

    @property
    def final(self) -> Path:
        """The complete checkpoint."""
        return step_folder(self.folder, self.step)

    def file(self, writer: int, writers: int) -> Path:
        """The file of one writing rank."""
        return self.temporary / f"rank-{writer:05d}-of-{writers:05d}.safetensors"

    # --- rank 0's part ------------------------------------------------------------------------------------

    def prepare(self, overwrite: bool) -> None:
        """Remove what killed saves left, make the temporary folder. FileExistsError if the step is there."""
        if self.final.exists() and not overwrite:
            raise FileExistsError(
                f"{self.final} exists already; pass overwrite=True to replace it, or save under another step"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        for each in self.folder.iterdir():
            if _LEFTOVER.fullmatch(each.name):
                try:
                    shutil.rmtree(each)
                except OSError as error:  # it is in nobody's way but for its size
                    warnings.warn(
                        f"{each}, left by an earlier save, could not be removed: {error}", stacklevel=4
                    )
        self.temporary.mkdir()

    def publish(self, index: Index) -> None:
        """All files are written: add the index, and give the folder its final name.

        If this returns the checkpoint is complete; `tidy` comes after it.
        """
        for pattern in ("*.marker", "*.alive"):
            for each in self.temporary.glob(pattern):
                each.unlink()
        with (self.temporary / INDEX).open("x", encoding="utf-8") as file:
            file.write(index.to_json())
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(self.temporary)
        aside = self._set_aside(self.final) if self.final.exists() else None
        try:
            self.temporary.rename(self.final)
        except OSError:
            if aside is not None:
                aside.rename(self.final)
            raise

    def tidy(self, keep_last: int | None) -> None:
        """Flush the name to the disk, remove what the checkpoint replaces, and older ones.

        `keep_last`: this one and the newest before it are so many in all then. Those of later steps (of a run
        that went another way) are left alone.
        """
        _sync_folder(self.folder)
        if keep_last is not None:
            older = [step for step in saved_steps(self.folder) if step < self.step]
            for step in older[: max(0, len(older) - (keep_last - 1))]:
                self._set_aside(step_folder(self.folder, step))
        for each in self.folder.glob(f".step-*.{self.token}.old"):
            shutil.rmtree(each)

    def discard(self) -> None:
        """Remove the temporary folder of a save that failed."""
        shutil.rmtree(self.temporary, ignore_errors=True)  # else the next save removes it

    def _set_aside(self, complete: Path) -> Path:
        # Renamed first, so that no half of it is ever taken for a checkpoint.
        return complete.rename(self.folder / f".{complete.name}.{self.token}.old")

    # --- any rank's part ----------------------------------------------------------------------------------

    def clear(self, rank: int | None) -> None:
        """Remove the file of a rank, or of all, from a save that failed, and leave what says that it did."""
        for each in self.temporary.glob("rank-*.safetensors" if rank is None else f"rank-{rank:05d}-*"):
            with contextlib.suppress(OSError):  # else the next save removes it
                each.unlink()


def _sync_folder(path: Path) -> None:
    """Have the system put a folder's entries on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- agreement through files --------------------------------------------------------------------------------


class FileMeeting:
    """Ranks that write one checkpoint agree through small files beside it, until a deadline.

    A context manager: within it this rank gives signs of life, and others that give none are not waited for.
    Rank 0 waits for all and touches the folder; the others wait for rank 0 and touch a file each.
    """

    def __init__(
        self, place: Place, rank: int, size: int, timeout: float, abandoned: Callable[[], bool]
    ) -> None:
        """`abandoned`: whether what the ranks do together was ended by an error, so that one may be dead."""
        self._place, self._rank, self._size, self._timeout = place, rank, size, timeout
        self._abandoned = abandoned
        self._deadline = time.monotonic() + timeout
        self._beat: Beat | None = None
        watched = range(1, size) if rank == 0 else [0]
        self._watches = {each: Watch(self._sign(each)) for each in watched}
        self._next_look = 0.0

    def _sign(self, rank: int) -> Path:
        # Rank 0's is the folder itself: it is there, under this name, until the very end.
        return self._place.temporary / f"rank-{rank:05d}.alive" if rank else self._place.temporary

    def __enter__(self) -> FileMeeting:
        self._beat = Beat(self._sign(self._rank))
        return self

    def __exit__(self, *_: object) -> None:
        assert self._beat is not None
        self._beat.stop()

    def gather(self, error: Exception | None, value: Any) -> list[Any]:
        """On rank 0 everybody's value; elsewhere nothing. CheckpointError if any rank has an error."""
        told = {"error": None if error is None else str(error), "value": value}
        if error is not None:
            self._tell_failure(f"rank-{self._rank:05d}.marker", told, self._rank)
            raise error
        self._tell(f"rank-{self._rank:05d}.marker", told)
        if self._rank != 0:
            return []
        found: dict[int, Any] = {}

        def everybody() -> list[Any] | None:
            for rank in set(range(self._size)) - set(found):
                marker = self._place.temporary / f"rank-{rank:05d}.marker"
                with contextlib.suppress(FileNotFoundError):  # it still writes
                    found[rank] = json.loads(marker.read_text(encoding="utf-8"))
                    if found[rank]["error"] is not None:
                        raise CheckpointError(f"rank {rank}: {found[rank]['error']}")
            if len(found) == self._size:
                return [found[rank]["value"] for rank in range(self._size)]
            self._look(set(range(self._size)) - set(found))
            return None

        def late() -> str:
            missing = ", ".join(str(rank) for rank in range(self._size) if rank not in found)
            return f"rank {missing} had not written its part of {self._place.final}"

        return _poll(everybody, self._deadline, self._timeout, late)

    def finish(self, error: Exception | None) -> None:
        """Everybody learns how it ended. Rank 0 brings the outcome, the others wait for it."""
        if self._rank == 0:
            if error is not None:
                self._tell_failure("failed.marker", {"error": str(error)}, None)
        elif error is None:
            _poll(
                self._ended,
                self._deadline + _GRACE_SECONDS,
                self._timeout + _GRACE_SECONDS,
                lambda: f"rank 0 had not completed {self._place.final}",
            )
        if error is not None:
            raise error

    def _ended(self) -> bool | None:
        failed = self._place.temporary / "failed.marker"
        with contextlib.suppress(FileNotFoundError):  # nothing failed so far
            told = json.loads(failed.read_text(encoding="utf-8"))
            self._place.clear(self._rank)
            raise CheckpointError(told["error"])
        if self._place.temporary.exists():
            # Our file stays even if rank 0 is taken for dead: it might yet complete the checkpoint.
            self._look({0})
            return None
        # It is renamed, or gone.
        if read_index(self._place.final).save != self._place.token:
            raise CheckpointError(f"{self._place.temporary} was removed while it was being written")
        return True

    def _look(self, ranks: set[int]) -> None:
        """CheckpointError if one of these, that we wait for, gives no sign of life."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        most = SILENT_SECONDS_ABANDONED if self._abandoned() else SILENT_SECONDS
        silent = [rank for rank in sorted(ranks) if self._watches[rank].silence() > most]
        if silent:
            raise CheckpointError(
                f"rank {', '.join(map(str, silent))} has given no sign of life for {most:g} s while "
                f"{self._place.final} was written; the checkpoint is not made, earlier ones can be loaded"
            )

    def _tell_failure(self, name: str, told: dict[str, Any], rank: int | None) -> None:
        self._place.clear(rank)  # first: on a full disk there may be no room to say so
        with contextlib.suppress(OSError):  # then the others notice that this rank is silent
            self._tell(name, told)

    def _tell(self, name: str, told: dict[str, Any]) -> None:
        part = self._place.temporary / f"{name}.{self._rank}.part"
        part.write_text(json.dumps(told), encoding="utf-8")
        part.rename(self._place.temporary / name)


def _poll(look: Callable[[], T | None], deadline: float, timeout: float, late: Callable[[], str]) -> T:
    """What `look` gives, as soon as it is not None. CheckpointError with `late()` at the deadline."""
    pause = 0.001
    while True:
        found = look()
        if found is not None:
            return found
        if time.monotonic() >= deadline:
            raise CheckpointError(f"{late()} after {timeout:g} s; the checkpoint is not made")
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)

"""The files that a benchmark writes: refused before it runs if they cannot be, and whole at every moment.

The rule of all programs here: the folder of a file must be there, and is never made. What is said otherwise
is misuse, and ends with status 2 before any rank starts. This file knows no format.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import IO

from bench.options import UsageError

__all__ = ["Rewritten", "open_new", "refuse_unwritable", "write_whole", "written"]


def refuse_unwritable(option: str, path: str | None) -> None:
    """UsageError, naming the option, the path and the remedy, if no file can be written there."""
    if path is None:
        return
    file, folder = Path(path), Path(path).parent
    if not folder.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {folder}; make it first (mkdir -p {folder})")
    if file.is_dir():
        raise UsageError(f"{option} {path}: that is a folder; give the name of a file in it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {path}: nothing can be written in {folder}; give another folder")
    if file.exists() and not os.access(file, os.W_OK):
        raise UsageError(f"{option} {path}: that file cannot be written; give another name")
    if file.exists() and not file.is_file():
        return  # as /dev/null: written as it is
    probe = _beside(file)
    try:  # for what the permissions do not tell
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"{option} {path}: nothing can be written there ({error}); give another") from None


def open_new(path: str) -> IO[str]:
    """A file that was not there: `path`, else `path.0`, `path.1`, ...: a run never overwrites another's."""
    candidate, number = Path(path), 0
    while True:
        try:
            return candidate.open("x", encoding="utf-8")
        except FileExistsError:
            candidate, number = Path(f"{path}.{number}"), number + 1


def write_whole(path: Path, text: str) -> None:
    """Replace a file, or make it: who reads it, or is left with it, has all of one text or all of the other.

    The text goes into a file beside it first, which takes the place of the other in one step: a process that
    is killed on the way leaves what was there. What is no file, as /dev/stdout, is never replaced; nor is a
    link, but what it leads to.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    fresh = _beside(path)
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


def written(program: str, option: str, path: str, text: str) -> bool:
    """`write_whole`, when there is nothing more to lose: what it fails with is said, and False returned."""
    try:
        write_whole(Path(path), text)
    except OSError as error:
        print(f"{program}: {option} {path} could not be written: {error}", file=sys.stderr)
        return False
    return True


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


class Rewritten:
    """A new file (`open_new`), written whole each time."""

    def __init__(self, path: str) -> None:
        with open_new(path) as file:
            self.path = Path(file.name)

    def write(self, text: str) -> None:
        write_whole(self.path, text)

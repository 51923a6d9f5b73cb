"""A meeting in a folder that all ranks see: small files that appear whole, by rename.

Files of an earlier run, or of one that was killed, may lie there; none is believed. Each rank adds fresh
random text (a nonce) to what it writes, and takes notice only of a file that repeats it:

    BASE.CALL.0   of rank 0:   its nonce; the ranks still missing; at last the payload, with every rank's
    nonce BASE.CALL.r   of rank r:   rank 0's nonce repeated, and its own nonce; deleted by rank r when it has
    the payload

Rank 0 deletes its file when all others are gone: then all have the payload. The files are readable by their
owner alone, and carry an HMAC under the job's secret if it has one.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from .errors import VERDICT_SECONDS, RendezvousError, RendezvousTimeoutError, name_ranks, who_is_missing
from .places import Place
from .secret import derive_key, read_small_file

_MOST_BYTES = 16 << 20  # of one file: the payload and the nonces of all ranks
_PAUSE, _LONGEST_PAUSE = 0.002, 0.1  # between two looks
_FAREWELL_SECONDS = 1.0  # for the ranks that came to read why rank 0 gave up


def parse(url: str) -> Path:
    """The path in a file:// URL, beside which the meeting's files are; RendezvousError if it is none."""
    parts = urlsplit(url)
    path = Path(unquote(parts.path))
    if parts.netloc not in ("", "localhost") or not path.is_absolute() or parts.query or parts.fragment:
        raise RendezvousError(f"{url!r}: expected file:///path, an absolute path that every rank sees")
    if path.is_dir():
        return path / "pynccl-rendezvous"
    if not path.parent.is_dir():
        raise RendezvousError(f"{url!r}: there is no folder {path.parent}")
    return path


def serve(payload: bytes, place: Place, base: Path, call: int, secret: bytes | None, deadline: float) -> None:
    """Rank 0: wait for the files of all other ranks, then write the payload and wait until each has it."""
    folder = _Folder(base, call, 0, secret)
    limit = f"within {deadline - time.monotonic():.3g} s"
    came: dict[int, str] = {}  # the nonces of the ranks that answered
    ever: set[int] = set()  # they, and those that left again

    def say(**what: object) -> None:
        folder.write({"nonce": folder.nonce, "came": sorted(came.values()), **what})

    with folder:
        try:
            say(missing=list(range(1, place.size)))
            for _ in _looks():
                before = dict(came)
                _look_for_answers(folder, place, came)
                ever |= came.keys()
                missing = [rank for rank in range(1, place.size) if rank not in came]
                if not missing:
                    break
                if time.monotonic() >= deadline:
                    text = f"{folder}: {who_is_missing(missing, ever, place.size)} {limit}{folder.oddities()}"
                    raise RendezvousTimeoutError(text, missing)
                if came != before:
                    say(missing=missing)
                folder.check_own()
        except BaseException as error:
            kind = "timed_out" if isinstance(error, TimeoutError) else "failed"
            text = str(error) if isinstance(error, RendezvousError) else f"rank 0 gave up: {error!r}"
            with contextlib.suppress(
                RendezvousError
            ):  # the folder itself may be what failed; `error` says it
                say(missing=getattr(error, "missing", ()), **{kind: text})
                _wait_until_gone(folder, came, time.monotonic() + _FAREWELL_SECONDS)
            raise
        say(missing=[], payload=base64.b64encode(payload).decode())
        stuck = _wait_until_gone(folder, came, deadline)
    if stuck:
        text = f"{folder}: {name_ranks(stuck)} of {place.size} came, but did not take the payload {limit}"
        raise RendezvousTimeoutError(text, stuck)


def fetch(place: Place, base: Path, call: int, secret: bytes | None, deadline: float) -> bytes:
    """Another rank: answer rank 0's file, then wait for the payload in it."""
    folder = _Folder(base, call, place.rank, secret)
    limit = f"within {deadline - time.monotonic():.3g} s"
    missing: list[int] = []
    answered = None
    with folder:
        for _ in _looks():
            note = folder.read(0) or {}
            if note and note["nonce"] != answered:
                answered = note["nonce"]
                folder.write({"answers": answered, "nonce": folder.nonce, "size": place.size})
            elif folder.nonce in note.get("came", ()):  # written in this run, and for us
                missing = note["missing"]
                if "payload" in note:
                    return base64.b64decode(note["payload"])
                if "timed_out" in note:
                    raise RendezvousTimeoutError(note["timed_out"], missing)
                if "failed" in note:
                    raise RendezvousError(note["failed"])
            if answered is not None:
                folder.check_own()
            # One that has been heard gets rank 0's own word if their time ends together.
            if time.monotonic() >= deadline + (VERDICT_SECONDS if missing else 0):
                break
    if missing:
        text = f"{folder}: {name_ranks(missing)} of {place.size} did not come {limit}, says rank 0"
        raise RendezvousTimeoutError(text, missing)
    text = f"{folder}: rank 0 did not answer rank {place.rank} {limit}{folder.oddities()}"
    raise RendezvousTimeoutError(f"{text}; is rank 0 running, with the same path and PYNCCL_SECRET?", [0])


class _Folder:
    """One rank's view of the meeting: its own file, which it writes and in the end deletes, and theirs."""

    def __init__(self, base: Path, call: int, rank: int, secret: bytes | None):
        self.nonce = secrets.token_hex(16)
        self._base, self._call, self._rank = base, call, rank
        self._key = derive_key(secret, "file", call)
        self._written: tuple[int, int] | None = None  # device and inode of our own file
        self._odd: dict[Path, str] = {}

    def __str__(self) -> str:
        return f"file://{self._base}"

    def __enter__(self) -> _Folder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._written is not None and self._written == _identity(self._name(self._rank)):
            self._name(self._rank).unlink(missing_ok=True)

    def write(self, note: dict[str, object]) -> None:
        """Replace our file by one with this note, whole at every moment."""
        body = json.dumps(note).encode()
        name = self._name(self._rank)
        draft = name.with_name(f"{name.name}.{os.getpid()}-{self.nonce}")
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(self._seal(body) + b"\n" + body)
                about = os.fstat(file.fileno())
            os.replace(draft, name)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise RendezvousError(
                f"{self}: rank {self._rank} cannot write {name}: {error.strerror}"
            ) from error
        self._written = (about.st_dev, about.st_ino)

    def read(self, rank: int) -> dict[str, Any] | None:
        """What `rank` last wrote; None if there is no file, or none by this user and with our secret."""
        name = self._name(rank)
        try:
            about, content = read_small_file(name, _MOST_BYTES, os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._odd[name] = str(error.strerror)
            return None
        if about.st_uid != os.geteuid():
            self._odd[name] = "another user's file"
            return None
        seal, _, body = content.partition(b"\n")
        if not hmac.compare_digest(seal, self._seal(body)):
            self._odd[name] = "not written with this job's secret"
            return None
        self._odd.pop(name, None)
        note: dict[str, Any] = json.loads(body)
        return note

    def check_own(self) -> None:
        """Two processes that take themselves for the same rank would overwrite each other's file for ever."""
        name = self._name(self._rank)
        if self._written != _identity(name):
            raise RendezvousError(
                f"{self}: {name} was replaced or removed while rank {self._rank} waited; "
                "two processes have this rank, or two jobs share this path"
            )

    def oddities(self) -> str:
        return "".join(f"; {path}: {what}" for path, what in self._odd.items())

    def _name(self, rank: int) -> Path:
        return self._base.with_name(f"{self._base.name}.{self._call}.{rank}")

    def _seal(self, body: bytes) -> bytes:
        return hmac.new(self._key, body, hashlib.sha256).hexdigest().encode()


def _look_for_answers(folder: _Folder, place: Place, came: dict[int, str]) -> None:
    for rank in range(1, place.size):
        note = folder.read(rank)
        if note is None or note.get("answers") != folder.nonce:
            came.pop(rank, None)
        elif note["size"] != place.size:
            raise RendezvousError(
                f"{folder}: rank {rank} says that the job has {note['size']} ranks, rank 0 says {place.size}"
            )
        else:
            came[rank] = note["nonce"]


def _wait_until_gone(folder: _Folder, came: dict[int, str], deadline: float) -> list[int]:
    """Wait until the ranks that came have deleted their files; those that have not by the deadline."""
    here = dict(came)
    for _ in _looks():
        here = {
            rank: nonce for rank, nonce in here.items() if (folder.read(rank) or {}).get("nonce") == nonce
        }
        if not here or time.monotonic() >= deadline:
            break
    return list(here)


def _looks() -> Iterator[None]:
    """One look, then one more after each pause, which grows: over NFS there is no event to wait for."""
    pause = _PAUSE
    while True:
        yield
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        about = path.lstat()
    except FileNotFoundError:
        return None
    return about.st_dev, about.st_ino

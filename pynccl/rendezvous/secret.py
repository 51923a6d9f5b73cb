"""The secret that the ranks of one job share, and where it may come from.

Knows environment variables and one file; knows nothing of sockets. `pynccl.launch` makes a fresh secret for
each job; with other launchers the user gives one, the same to every rank.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping

from .errors import SecretError

_MOST_BYTES = 4096


def find_secret(environ: Mapping[str, str] = os.environ) -> bytes | None:
    """The job's secret: the text of `PYNCCL_SECRET`, else the content of `PYNCCL_SECRET_FILE`, else None.

    Raises SecretError if the value is empty, or if the file is missing, is not a plain file, belongs to
    another user, or can be read or written by others.
    """
    text = environ.get("PYNCCL_SECRET")
    if text is not None:
        if not text:
            raise SecretError("PYNCCL_SECRET is set but empty; give every rank the same text, or unset it")
        return text.encode("utf-8", "surrogateescape")
    path = environ.get("PYNCCL_SECRET_FILE")
    return None if path is None else _read_private_file(path)


def new_secret() -> str:
    """A fresh secret of 256 random bits, as text for `PYNCCL_SECRET`."""
    return secrets.token_hex(32)


def insecure_is_allowed(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether `PYNCCL_INSECURE=1` permits to meet over the network with no secret."""
    value = environ.get("PYNCCL_INSECURE", "0")
    if value not in ("", "0", "1"):
        raise SecretError(f"PYNCCL_INSECURE={value!r}: expected 1 (allow a network with no secret) or 0")
    return value == "1"


def derive_key(secret: bytes | None, *context: object) -> bytes:
    """The key for one meeting place: 32 bytes of HMAC-SHA256 over what names the place and the job.

    Bound to the place, so that an answer to a challenge on one port proves nothing on another: a stranger on
    a neighbouring port cannot relay it. Without a secret the key keeps jobs apart but keeps nobody out.
    """
    label = "\0".join(["pynccl rendezvous 1", *map(str, context)])
    return hmac.new(secret or b"", label.encode(), hashlib.sha256).digest()


def _read_private_file(path: str) -> bytes:
    named = f"PYNCCL_SECRET_FILE={path}"
    try:
        about, content = read_small_file(path, _MOST_BYTES + 1)
    except OSError as error:
        raise SecretError(f"{named}: cannot be read ({error.strerror})") from error
    mode = stat.S_IMODE(about.st_mode)
    if about.st_uid not in (os.geteuid(), 0):
        raise SecretError(f"{named}: belongs to user {about.st_uid}; make a copy of your own")
    if mode & 0o077:
        raise SecretError(f"{named}: mode {mode:04o} lets other users at it; run: chmod 600 {path}")
    if len(content) > _MOST_BYTES:
        raise SecretError(f"{named}: longer than {_MOST_BYTES} bytes; 32 random bytes are enough")
    if not content.strip():
        raise SecretError(f"{named}: empty; fill it, for example: head -c 32 /dev/urandom | base64 > {path}")
    return content.strip()


def read_small_file(path: str | os.PathLike[str], most: int, flags: int = 0) -> tuple[os.stat_result, bytes]:
    """What a plain file is and its first `most` bytes. OSError for anything else."""
    # O_NONBLOCK: opening a named pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "not a plain file")
        content = b""
        while len(content) < most and (chunk := os.read(descriptor, most - len(content))):
            content += chunk
        return about, content
    finally:
        os.close(descriptor)

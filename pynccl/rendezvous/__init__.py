"""How the ranks of a job meet: one small payload of rank 0's, such as a unique id, reaches them all.

Needs no package but the standard library. Where this process stands comes from its launcher's environment
(`places`), the proof of belonging from a shared secret (`secret`), the meeting itself is over TCP (`tcp`) or
in a shared folder (`files`). What the payload means is not known here.

    place = find_place()                                    # from torchrun, mpirun, srun, pynccl.launch
    data = share(make() if place.rank == 0 else None, place, timeout=60)
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

from . import files, tcp
from .errors import RendezvousError, RendezvousTimeoutError, SecretError, name_ranks
from .places import LAUNCHERS, Launcher, Place, find_launcher, find_place, place_from_environment
from .secret import find_secret, new_secret

__all__ = [
    "LAUNCHERS",
    "Launcher",
    "Place",
    "RendezvousError",
    "RendezvousTimeoutError",
    "SecretError",
    "find_launcher",
    "find_place",
    "find_secret",
    "name_ranks",
    "new_secret",
    "place_from_environment",
    "share",
]

MOST_BYTES = tcp.MOST_BYTES

# The calls at each place are numbered on every rank, so that a rank which comes late for one call is not
# taken for a member of the next.
_calls: dict[tuple[str, int, int], Iterator[int]] = {}


def share(payload: bytes | None, place: Place, *, timeout: float) -> bytes:
    """Give rank 0's `payload` to every rank of `place`; returns it on each.

    `payload`: bytes, at most 1 MiB, on rank 0; not looked at elsewhere (None). `timeout`: seconds, more than
    0. Every rank calls this, in the same order, once for each meeting. No rank returns before all have come.
    A job of 1 opens nothing.

    Over TCP the peers are authenticated with the job's secret (`PYNCCL_SECRET`, `PYNCCL_SECRET_FILE`), and
    without one only loopback addresses are used, unless `PYNCCL_INSECURE=1`. The payload itself is not
    encrypted.

    Raises RendezvousTimeoutError naming the missing ranks, SecretError, RendezvousError, or
    ValueError/TypeError on a wrong argument. Whatever happens, no file, port, thread or process of the
    meeting is left.
    """
    if place.rank == 0:
        if not isinstance(payload, (bytes, bytearray, memoryview)):
            raise TypeError(f"share: payload is {type(payload).__name__} on rank 0; expected bytes")
        payload = bytes(payload)
        if len(payload) > MOST_BYTES:
            raise ValueError(f"share: payload of {len(payload)} bytes; at most {MOST_BYTES} can be shared")
    if not 0 < timeout < float("inf"):
        raise ValueError(f"share: timeout={timeout!r}; expected seconds, more than 0 and finite")
    if place.size == 1:
        assert payload is not None
        return payload
    scheme = place.url.partition("://")[0]
    secret = find_secret()
    deadline = time.monotonic() + timeout
    if scheme == "tcp":
        address = tcp.parse(place.url)
        call = _next_call(place)
        if place.rank != 0:
            return tcp.fetch(place, address, call, secret, deadline)
        assert payload is not None
        tcp.serve(payload, place, address, call, secret, deadline)
        return payload
    if scheme == "file":
        base = files.parse(place.url)
        call = _next_call(place)
        if place.rank != 0:
            return files.fetch(place, base, call, secret, deadline)
        assert payload is not None
        files.serve(payload, place, base, call, secret, deadline)
        return payload
    raise RendezvousError(
        f"{place.url!r}: no such way to meet; expected tcp://host:port, file:///path, or env"
    )


def _next_call(place: Place) -> int:
    return next(_calls.setdefault((place.url, place.rank, place.size), itertools.count(1)))

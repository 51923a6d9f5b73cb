"""``pynccl.init``: from a launcher's environment (or a URL, or an id) to a communicator of all ranks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from . import gpu, rendezvous
from .abi.errors import InvalidArgumentError, InvalidUsageError
from .abi.library import Library, load
from .communicator import Communicator
from .config import UniqueId, get_unique_id
from .timeouts import check_timeout, timeout_from_environment

if TYPE_CHECKING:
    from .communicator import Config

_DEFAULT_TIMEOUT = 600.0


def init(
    url: str | None = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    unique_id: UniqueId | bytes | None = None,
    library: str | Library | None = None,
    config: Config = None,
    timeout: float | None = None,
    name: str | None = None,
    selection: Any = None,
) -> Communicator:
    """The communicator of all ranks of this job. Use it in a ``with`` block.

    With no argument, rank, size and meeting point come from the environment of the launcher:
    ``pynccl.launch``, torchrun, Open MPI, MPICH, Slurm; a process that was not launched is a job of one rank.
    ``url`` names the meeting point ("env://", "tcp://host:port", "file:///shared/folder/name"); ``rank`` and
    ``size`` go with it. With ``unique_id`` no meeting is needed.

    ``library`` ("nccl", "host", a path) must be the same on all ranks, and is compared. On NCCL the GPU is
    the one numbered by the local rank. ``timeout`` (seconds) covers the meeting and is the communicator's
    own. ``selection`` is a table of ``pynccl.collectives.tune``, as for the Communicator.

    Raises what ``Communicator`` and ``pynccl.rendezvous.share`` raise; a failed init leaves nothing behind.

    >>> with pynccl.init() as comm:                            # doctest: +SKIP
    ...     comm.all_reduce(x)
    """
    limit, default = check_timeout("init", timeout), timeout_from_environment("init")
    if unique_id is not None and rank is not None and size is not None:
        place = rendezvous.Place(rank, size, rank, size, "")
    else:
        place = rendezvous.find_place(url, rank=rank, size=size)
    lib = load(library)
    if lib.kind != "host":
        _choose_gpu(place.local_rank)
    if unique_id is None:
        unique_id = _share(lib, place, limit if limit is not None else default or _DEFAULT_TIMEOUT)
    return Communicator(
        place.size,
        unique_id,
        place.rank,
        config=config,
        library=lib,
        timeout=limit,
        name=name,
        selection=selection,
    )


def _share(lib: Library, place: Any, timeout: float) -> UniqueId:
    """Rank 0's unique id, on every rank, with the proof that all use one kind of library."""
    offer = None
    if place.rank == 0:
        uid = bytes(get_unique_id(lib)).hex()
        offer = json.dumps({"uid": uid, "kind": lib.kind, "version": lib.version}).encode()
    answer = rendezvous.share(offer, place, timeout=timeout)
    try:
        theirs = json.loads(answer)
        received = UniqueId.from_bytes(bytes.fromhex(theirs["uid"]))
        kind, version = str(theirs["kind"]), int(theirs["version"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidUsageError(
            f"init: rank 0 sent something that is no invitation ({error}); is another program using "
            f"{place.url}?"
        ) from error
    if (kind, version) != (lib.kind, lib.version):
        raise InvalidUsageError(
            f"init: rank {place.rank} has library {lib.kind} {lib.version} ({lib.path}; {lib.reason}) and "
            "rank 0 has "
            f"{kind} {version}; all ranks need the same: set PYNCCL_LIBRARY, or pass library=, on every rank"
        )
    return received


def _choose_gpu(local_rank: int) -> None:
    count = gpu.device_count()
    if count < 1:
        raise InvalidArgumentError(
            "init: NCCL was chosen and no GPU is visible; use library='host' or set PYNCCL_LIBRARY=host "
            "for host memory"
        )
    gpu.use_device(local_rank % count)

"""Unique ids and the two configuration structures, from plain Python values."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from .abi.errors import InvalidArgumentError, InvalidUsageError, MissingFunctionError, check
from .abi.library import Library, load
from .abi.types import ncclCollConfig_t, ncclConfig_t, ncclUniqueId

SIZE = ctypes.sizeof(ncclUniqueId)


class UniqueId:
    """The 128 bytes that name a communicator before it exists. One rank makes it, and all use it.

    ``bytes(uid)`` and ``UniqueId.from_bytes`` carry it anywhere, as does pickle. It is a secret of the job:
    on NCCL it holds the address that ranks connect to.
    """

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError(
                f"UniqueId: {type(data).__name__} is not bytes; pass bytes(uid) of another UniqueId"
            )
        if len(data) != SIZE:
            raise InvalidArgumentError(f"UniqueId: {len(data)} bytes; a unique id has {SIZE}")
        self._data = bytes(data)

    @classmethod
    def from_bytes(cls, data: bytes) -> UniqueId:
        """The id that ``bytes(uid)`` was taken from. InvalidArgumentError unless it is 128 bytes."""
        return cls(data)

    def _as_struct(self) -> ncclUniqueId:
        return ncclUniqueId.from_buffer_copy(self._data)

    def __bytes__(self) -> bytes:
        return self._data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UniqueId) and self._data == other._data

    def __hash__(self) -> int:
        return hash(self._data)

    def __reduce__(self) -> tuple[Any, ...]:
        return UniqueId, (self._data,)

    def __repr__(self) -> str:
        return f"<UniqueId {hash(self._data) & 0xFFFFFFFF:08x}>"


def get_unique_id(library: str | Library | None = None) -> UniqueId:
    """A new unique id, made by ``library`` (see ``pynccl.abi.load``), for ranks that use the same library."""
    lib = load(library)
    made = ncclUniqueId()
    check(lib, lib.ncclGetUniqueId(ctypes.byref(made)), "get_unique_id (ncclGetUniqueId)")
    return UniqueId(bytes(made))


def communicator_config(
    config: Mapping[str, Any] | ncclConfig_t | None, *, name: str | None, polled: bool
) -> ncclConfig_t | None:
    """``config`` as NCCL's structure; None when nothing is set. Field names are those of ``ncclConfig_t``.

    ``polled`` asks for a non-blocking communicator, unless the config says itself which one it wants.
    """
    if isinstance(config, ncclConfig_t):
        return config
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(
            f"Communicator: config={config!r} must be a dict of ncclConfig_t's fields, or the structure"
        )
    fields = dict(config or {})
    if name is not None:
        fields.setdefault("commName", name)
    if polled:
        fields.setdefault("blocking", 0)
    if not fields:
        return None
    return ncclConfig_t.initializer(
        **{key: int(value) if isinstance(value, bool) else value for key, value in fields.items()}
    )


def is_blocking(config: ncclConfig_t | None) -> bool:
    return config is None or config.blocking != 0


def algorithm_config(call: str, library: Library, function: str, algorithm: str) -> ncclCollConfig_t:
    """The per-call configuration that allows only ``algorithm`` ("ring", "tree,ring", "^nvls").

    These names are NCCL's, and mean something to NCCL alone. InvalidUsageError for the host library, which
    picks its own paths by size and has no names for them: what it runs by name are the schedules of
    `pynccl.collectives`, "pynccl:ring" and so on, and those never come here.
    """
    if not isinstance(algorithm, str):
        raise TypeError(f"{call}: algorithm must be a string such as 'ring', not {type(algorithm).__name__}")
    if not algorithm.strip():
        raise InvalidArgumentError(
            f"{call}: algorithm={algorithm!r} names none; leave algorithm=None, or give a name such as 'ring'"
        )
    if not library.has(function):
        raise MissingFunctionError(
            f"{call}: algorithm={algorithm!r} needs {function}, which NCCL has since 2.31; the loaded "
            "library is "
            f"{library.version_string} ({library.path}): use a newer one, or leave algorithm out",
            call=function,
        )
    if library.kind == "host":
        raise InvalidUsageError(
            f'{call}: algorithm "{algorithm}" means nothing to the host library, whose own paths have no '
            "names and are chosen by size (ring, tree, nvls and the like are NCCL's names); leave "
            f"algorithm=None{_schedules(call, algorithm)}"
        )
    return ncclCollConfig_t.initializer(algSelection=algorithm)


def _schedules(call: str, algorithm: str) -> str:
    """What may be passed instead on any library, the one of the same name first; nothing if there is none."""
    from .collectives.registry import ALGORITHMS  # only those who are refused pay for it

    names = [name for collective, name in ALGORITHMS if collective == call]
    if not names:
        return ""
    names.sort(key=lambda name: name != algorithm.lower())
    return f", or pass a schedule of pynccl.collectives: {', '.join(f'pynccl:{name}' for name in names)}"

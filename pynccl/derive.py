"""Communicators made from communicators: split, shrink and grow."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, TypeVar, overload

from .abi.errors import InvalidArgumentError
from .abi.library import Library, load
from .abi.types import ncclUniqueId
from .config import UniqueId
from .core import Config, Core
from .operations import check_rank, integer

_NO_COLOR = -1


Self = TypeVar("Self", bound="Derivation")


class Derivation(Core):
    """The calls of a Communicator that give another one. All ranks of the parent make them."""

    @overload
    def split(
        self: Self, color: int, key: int = 0, *, config: Config = None, name: str | None = None
    ) -> Self: ...

    @overload
    def split(self, color: None, key: int = 0, *, config: Config = None, name: str | None = None) -> None: ...

    def split(
        self: Self, color: int | None, key: int = 0, *, config: Config = None, name: str | None = None
    ) -> Self | None:
        """Ranks of one ``color`` (0 or more) form a communicator, ordered by ``key``, then by rank.

        ``color=None`` takes part and joins none: the result is None. Every rank calls it.
        """
        call = "split (ncclCommSplit)"
        self._check_open(call)
        number = _NO_COLOR if color is None else integer("split", "color", color)
        order = integer("split", "key", key)
        if color is not None and number < 0:
            raise InvalidArgumentError(
                f"split: color={color} must be 0 or more, or None to join no communicator"
            )
        child = _child(self, name, config)

        def make(box: Any) -> int:
            given = child._config
            pointer = ctypes.byref(given) if given is not None else None
            return self.library.ncclCommSplit(self._handle, number, order, box, pointer)

        child._create(call, make)
        if color is None:
            child._end("not made: this rank has no color")
            return None
        return child

    def shrink(
        self: Self,
        exclude: Iterable[int],
        *,
        abort: bool = False,
        config: Config = None,
        name: str | None = None,
    ) -> Self:
        """A communicator of all ranks but those in ``exclude``, in the same order; only the others call it.

        ``abort=True`` first ends calls that still run on this communicator, for example because a rank died
        in them.
        """
        call = "shrink (ncclCommShrink)"
        self._check_open(call)
        ranks = sorted({check_rank("shrink", "exclude", rank, self.size) for rank in exclude})
        if not ranks:
            raise InvalidArgumentError("shrink: exclude is empty; name at least one rank, or use split")
        if self.rank in ranks:
            raise InvalidArgumentError(
                f"shrink: rank {self.rank} excludes itself; only ranks that stay call shrink"
            )
        child = _child(self, name, config)
        excluded = (ctypes.c_int * len(ranks))(*ranks)

        def make(box: Any) -> int:
            given = child._config
            pointer = ctypes.byref(given) if given is not None else None
            return self.library.ncclCommShrink(self._handle, excluded, len(ranks), box, pointer, int(abort))

        child._create(call, make)
        return child

    def growth_id(self) -> UniqueId:
        """The id that new ranks ``join`` with; of the old ranks only this one passes it to ``grow``."""
        self._check_open("growth_id")
        made = ncclUniqueId()
        self._settle(
            self.library.ncclCommGetUniqueId(self._handle, ctypes.byref(made)),
            "growth_id (ncclCommGetUniqueId)",
        )
        return UniqueId(bytes(made))

    def grow(
        self: Self,
        nranks: int,
        unique_id: UniqueId | bytes | None = None,
        *,
        config: Config = None,
        name: str | None = None,
    ) -> Self:
        """A communicator of ``nranks``: all ranks of this one, with their ranks, and new ones that ``join``.

        The rank that made the id with ``growth_id`` passes it, the others pass None.
        """
        call = "grow (ncclCommGrow)"
        self._check_open(call)
        nranks = integer("grow", "nranks", nranks)
        if nranks <= self.size:
            raise InvalidArgumentError(
                f"grow: nranks={nranks} must be more than the {self.size} ranks there are"
            )
        uid = _struct_of(unique_id) if unique_id is not None else None
        child = _child(self, name, config)
        child._create(call, _grow(child, self._handle, nranks, uid, -1))
        return child

    @classmethod
    def join(
        cls: type[Self],
        nranks: int,
        unique_id: UniqueId | bytes,
        rank: int,
        *,
        config: Config = None,
        library: str | Library | None = None,
        timeout: float | None = None,
        name: str | None = None,
    ) -> Self:
        """Become rank ``rank`` of a communicator that grows to ``nranks`` (see ``growth_id``, ``grow``)."""
        nranks = integer("join", "nranks", nranks, 1)
        rank = check_rank("join", "rank", rank, nranks)
        uid = _struct_of(unique_id)
        comm = cls.__new__(cls)
        comm._begin(load(library), rank, nranks, timeout, name, config)
        comm._create("join (ncclCommGrow)", _grow(comm, None, nranks, uid, rank))
        return comm


def _child(parent: Self, name: str | None, config: Config) -> Self:
    """A communicator to be, with its parent's library, time limit and, unless one is given, configuration."""
    child = type(parent).__new__(type(parent))
    given = config if config is not None else parent._given
    child._begin(
        parent.library, -1, 0, parent._timeout, name, given
    )  # rank and size are known when it is made
    child._parent = parent
    return child


def _struct_of(unique_id: UniqueId | bytes) -> ncclUniqueId:
    return (unique_id if isinstance(unique_id, UniqueId) else UniqueId(unique_id))._as_struct()


def _grow(child: Core, parent: int | None, nranks: int, uid: Any, rank: int) -> Any:
    def make(box: Any) -> int:
        given = child._config
        config = ctypes.byref(given) if given is not None else None
        pointer = ctypes.byref(uid) if uid is not None else None
        return child.library.ncclCommGrow(parent, nranks, pointer, rank, box, config)

    return make

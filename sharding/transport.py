"""How the weights and gradients travel: by the library's own collectives, or as `collectives=` says.

A *way* of a collective is an algorithm (a name, or a schedule of `pynccl.collectives`) that goes with the
communicator's own call, or an object with a call of its own (`Way`), such as compression with error feedback.
Here ways are checked, called, and asked for the bytes that they send; the engine only says what it needs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from .layout import Layout
from .policy import MixedPrecision, Strategy, dtypes_of

__all__ = ["CALLS", "LIBRARY", "Transport", "Way", "ring_bytes"]

CALLS = ("all_gather", "reduce_scatter", "all_reduce")


class Way(Protocol):
    """A collective of the user's own; `pynccl.collectives.Compressed` is one. Its repr is equal on all ranks.

    Calling it with a communicator makes what does the calls: an object with a method named as the collective,
    with the arguments of `sharding.Comm` by their names and `key`, which says which array of the model it is:
    (unit, number of its group). If `stream` is given, the call is queued there; without it, it is done when
    it returns. What the object keeps is dropped, and a new one made, when it cannot hold any more: after an
    exception in a microbatch, after loading a checkpoint, and when parameters are frozen or unfrozen.
    """

    def __call__(self, comm: Any) -> Any:
        """What does the calls on this communicator. Nothing is communicated here."""

    def bytes_sent(self, call: str, elements: int, dtype: str, ranks: int) -> float:
        """Bytes that one rank sends for a whole buffer. TypeError or ValueError for what it cannot do."""

    def bytes_kept(self, call: str, elements: int, ranks: int) -> int:
        """Bytes of memory that one rank keeps from call to call for such a buffer."""


class Transport:
    """The ways of one model's collectives. Those without one go the library's own."""

    def __init__(self, ways: Mapping[str, Any] | None = None) -> None:
        self.ways = dict(ways or {})
        self._made: dict[tuple[str, int], tuple[Any, Any]] = {}
        """(collective, id of a communicator) -> (that communicator, what a way made for it)."""

    @classmethod
    def read(cls, ways: Any, strategy: Strategy, sizes: Mapping[str, Collection[int]]) -> Transport:
        """`ways` checked for groups of `sizes` ranks, by collective; ValueError or TypeError."""
        if ways is None:
            return cls()
        if not isinstance(ways, Mapping):
            raise TypeError(
                f"fully_shard: collectives={ways!r}; pass a dict such as {{'reduce_scatter': 'pynccl:ring'}}"
            )
        for what, way in ways.items():
            if what not in CALLS:
                raise ValueError(f"fully_shard: collectives[{what!r}]: the engine has {', '.join(CALLS)}")
            if what not in sizes:
                raise ValueError(
                    f"fully_shard: collectives[{what!r}]: {strategy.name} has no such collective; it has "
                    f"{', '.join(sizes)}"
                )
            for size in sizes[what]:
                _check(what, way, size)
        return cls(ways)

    def check_layout(
        self, call: str, layout: Layout, precision: MixedPrecision | None, shards: int, replicas: int
    ) -> None:
        """TypeError or ValueError, naming the unit, for a group that a way cannot take."""
        for unit in layout.units:
            for group in unit.groups:
                dtypes = dtypes_of(group, precision)
                needs = [("all_gather", group.padded, dtypes.gather, shards)]
                if group.trainable:
                    needs.append(("reduce_scatter", group.padded, dtypes.reduce, shards))
                    needs.append(("all_reduce", group.shard, dtypes.reduce, replicas))
                for what, elements, dtype, ranks in needs:
                    way = self.ways.get(what)
                    if way is None or _is_algorithm(way):
                        continue
                    try:
                        way.bytes_sent(what, elements, dtype.name, ranks)
                    except (TypeError, ValueError) as error:
                        kind = TypeError if isinstance(error, TypeError) else ValueError
                        raise kind(f"{call}: unit {unit.name!r}: {error}") from error

    def rehearse(self, mesh: Any, empty: Any) -> None:
        """One small call by each name of the library's, which only the library can judge. Collective."""
        groups = (
            ("all_gather", mesh.gather),
            ("all_gather", mesh.parts),
            ("reduce_scatter", mesh.reduce),
            ("all_reduce", mesh.replicas),
        )
        for what, comm in groups:
            way = self.ways.get(what)
            if comm is None or not isinstance(way, str) or way.startswith("pynccl:"):
                continue
            x, whole = (empty(elements, np.dtype("float32")) for elements in (1, comm.size))
            x[...] = whole[...] = 0
            if what == "all_gather":
                self.call(what, comm, None, x, out=whole)
            elif what == "reduce_scatter":
                self.call(what, comm, None, whole, out=x, op="sum")
            else:
                self.call(what, comm, None, x, op="sum")

    def lines(self) -> dict[str, str]:
        """What must be equal on all ranks, by collective."""
        return {what: _described(way) for what, way in sorted(self.ways.items())}

    # --- calls ----------------------------------------------------------------------------------------------

    def call(self, what: str, comm: Any, key: Any, x: Any, **arguments: Any) -> float:
        """Make one call, with the arguments of `Comm`'s methods. Returns the bytes that this rank sends."""
        way = self.ways.get(what)
        if way is None:
            getattr(comm, what)(x, **arguments)
        elif _is_algorithm(way):
            getattr(comm, what)(x, algorithm=way, **arguments)
        else:
            getattr(self._of(what, way, comm), what)(x, key=key, **arguments)
        whole = arguments["out"] if what == "all_gather" else x
        return self.bytes_sent(what, whole.size, whole.dtype, comm.size, comm.rank)

    def _of(self, what: str, way: Way, comm: Any) -> Any:
        if (what, id(comm)) not in self._made:
            self._made[what, id(comm)] = comm, way(comm)
        return self._made[what, id(comm)][1]

    def made(self) -> dict[str, list[Any]]:
        """What ways have made so far, by collective: more than one where it is called in several groups."""
        found: dict[str, list[Any]] = {}
        for (what, _), (_, one) in self._made.items():
            found.setdefault(what, []).append(one)
        return found

    def forget(self) -> None:
        """Drop what ways have made; the next call makes it anew. The streams are idle."""
        self._made.clear()

    # --- what it costs --------------------------------------------------------------------------------------

    def bytes_sent(self, what: str, elements: int, dtype: np.dtype[Any], ranks: int, rank: int) -> float:
        """Bytes that rank `rank` of so many sends for a whole buffer."""
        way = self.ways.get(what)
        if way is None or (isinstance(way, str) and not way.startswith("pynccl:")):
            return ring_bytes(what, elements * dtype.itemsize, ranks)
        if not _is_algorithm(way):
            return way.bytes_sent(what, elements, dtype.name, ranks)
        return dtype.itemsize * _elements_sent(_schedule(what, way, ranks), rank, elements)

    def bytes_kept(self, what: str, elements: int, ranks: int) -> int:
        """Bytes of memory that a way keeps for a whole buffer from call to call."""
        way = self.ways.get(what)
        return 0 if way is None or _is_algorithm(way) else way.bytes_kept(what, elements, ranks)


LIBRARY = Transport()
"""Everything by the library's own collectives."""


def ring_bytes(what: str, buffer: int, ranks: int) -> float:
    """Bytes that one rank sends for a whole buffer of so many, as the library is taken to: in a ring."""
    return (2 if what == "all_reduce" else 1) * buffer * (ranks - 1) / ranks


def _is_schedule(way: Any) -> bool:
    from pynccl.collectives import Schedule  # here: only those who use schedules pay for them

    return isinstance(way, Schedule)


def _is_algorithm(way: Any) -> bool:
    """Whether it goes with the communicator's own call."""
    return isinstance(way, str) or _is_schedule(way)


def _described(way: Any) -> str:
    return f"{way!r} {way.digest}" if _is_schedule(way) else repr(way)


def _check(what: str, way: Any, size: int) -> None:
    """ValueError or TypeError for a way that groups of `size` ranks cannot go."""
    place = f"fully_shard: collectives[{what!r}]"
    if not _is_algorithm(way):
        lacking = [name for name in ("bytes_sent", "bytes_kept") if not callable(getattr(way, name, None))]
        if lacking or not callable(way):
            raise TypeError(
                f"{place}={way!r}: pass the name of an algorithm ('pynccl:ring'), a schedule, or a "
                f"sharding.Way such as pynccl.collectives.Compressed(Integers(8)) (it lacks "
                f"{', '.join(lacking) or '__call__'})"
            )
        return
    if isinstance(way, str):
        if way.startswith("pynccl:"):
            try:
                _schedule(what, way, size)
            except ValueError as error:
                raise ValueError(f"{place}={way!r}: {error}") from error
        return
    if way.collective != what:
        raise ValueError(f"{place}: schedule {way.name!r} is one of {way.collective}; generate it with "
                         f"collective={what!r}")  # fmt: skip
    if way.n != size:
        raise ValueError(
            f"{place}: schedule {way.name!r} is for {way.n} ranks, and a group here has {size}; generate it "
            f"for n={size}, or give a name such as 'pynccl:ring', which fits every group"
        )
    if not way.in_place:
        raise ValueError(f"{place}: schedule {way.name!r} cannot work in place, as the engine does")
    from pynccl.collectives import verify

    verify(way)


@lru_cache(maxsize=64)
def _generated(what: str, name: str, ranks: int) -> Any:
    from pynccl.collectives import generate

    return generate(name, ranks, collective=what)


def _schedule(what: str, way: Any, ranks: int) -> Any:
    return _generated(what, way.removeprefix("pynccl:"), ranks) if isinstance(way, str) else way


@lru_cache(maxsize=1024)
def _elements_sent(schedule: Any, rank: int, elements: int) -> int:
    blocks = max(schedule.in_blocks, schedule.out_blocks)
    return schedule.elements_sent(rank, elements // blocks)

"""Where every parameter lies: units, flat groups, shards. Frozen data and pure functions; no arrays, no
communication.

A *unit* is what is gathered and released together (an embedding, a block, a head). Its parameters of one
dtype and
trainability form a *flat group*: one flat buffer of `numel` elements, in the order of the parameters, padded
so that it divides into `shards` equal parts whose bytes are a multiple of 16. Rank r of the shard group owns
elements `[r * shard, (r + 1) * shard)`. The padding is zero and stays zero.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

__all__ = [
    "Entry",
    "FlatGroup",
    "Layout",
    "Piece",
    "Spec",
    "UnitLayout",
    "assign",
    "between",
    "by_layer",
    "by_size",
    "matcher",
    "numpy_dtype",
    "pieces",
    "plan",
]

ALIGN_BYTES = 16  # of a shard: what NCCL and vector instructions like
ROOT = "root"  # the unit of what no pattern takes


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of that name, those of ml_dtypes included ("bfloat16", "float8_e4m3fn")."""
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(getattr(ml_dtypes, name))


@dataclass(frozen=True)
class Spec:
    """One parameter as the user has it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Entry:
    """A parameter's place in its group's flat buffer; `offset` and `size` in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class FlatGroup:
    """Parameters of one unit with one dtype and trainability: one flat buffer in `shards` equal parts."""

    dtype: str
    trainable: bool
    entries: tuple[Entry, ...]
    numel: int
    shards: int
    shard: int

    @property
    def padded(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.shard * self.shards

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return numpy_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class UnitLayout:
    """What is gathered together."""

    name: str
    groups: tuple[FlatGroup, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Its parameters, group by group."""
        return tuple(entry.name for group in self.groups for entry in group.entries)


@dataclass(frozen=True)
class Layout:
    """The whole model: units in declared order, and tied names (alias -> owner)."""

    units: tuple[UnitLayout, ...]
    aliases: tuple[tuple[str, str], ...] = ()

    def parameters(self) -> Iterator[tuple[UnitLayout, int, Entry]]:
        """(unit, index of the group in it, entry) of every parameter."""
        for unit in self.units:
            for index, group in enumerate(unit.groups):
                for entry in group.entries:
                    yield unit, index, entry

    @property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(group.numel for unit in self.units for group in unit.groups)

    def described(self) -> dict[str, str]:
        """name -> a line that says all there is about that parameter, tied names included."""
        found = {}
        for unit, index, entry in self.parameters():
            group = unit.groups[index]
            kind = "trainable" if group.trainable else "frozen"
            found[entry.name] = f"{entry.name} {list(entry.shape)} {group.dtype} {kind} in unit {unit.name}"
        return found | {alias: f"{alias} tied to {owner}" for alias, owner in self.aliases}

    def lines(self) -> list[str]:
        """One line a parameter, in order: equal on all ranks, or the first that differs is the culprit."""
        return list(self.described().values())

    def digest(self) -> str:
        """A hash of all of it, as 16 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.lines()).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Piece:
    """What of one parameter lies in one shard: its elements [param_start, param_stop), and where they lie."""

    name: str
    param_start: int
    param_stop: int
    shard_start: int
    shard_stop: int


def pieces(group: FlatGroup, rank: int) -> list[Piece]:
    """The parameters (or parts of them) in rank's shard, in order; empty ones are left out."""
    return between(group, rank * group.shard, (rank + 1) * group.shard)


def between(group: FlatGroup, start: int, stop: int) -> list[Piece]:
    """The same for elements [start, stop) of the flat buffer."""
    found = []
    for entry in group.entries:
        first, last = max(entry.offset, start), min(entry.offset + entry.size, stop)
        if first < last:
            found.append(
                Piece(entry.name, first - entry.offset, last - entry.offset, first - start, last - start)
            )
    return found


def shard_size(numel: int, shards: int, itemsize: int) -> int:
    """Elements of a shard: numel / shards rounded up, its bytes up to a multiple of ALIGN_BYTES."""
    step = ALIGN_BYTES // math.gcd(ALIGN_BYTES, itemsize)
    each = (numel + shards - 1) // shards
    return (each + step - 1) // step * step


def plan(
    specs: Sequence[Spec],
    unit_of: Mapping[str, str],
    order: Sequence[str],
    shards: int,
    aliases: Mapping[str, str] | None = None,
) -> Layout:
    """The layout of `specs`, each in unit `unit_of[name]`, units in `order`, over `shards` ranks."""
    units = []
    for unit in order:
        keys = dict.fromkeys((spec.dtype, spec.trainable) for spec in specs if unit_of[spec.name] == unit)
        groups = []
        for dtype, trainable in keys:
            offset, entries = 0, []
            for spec in specs:
                if unit_of[spec.name] == unit and (spec.dtype, spec.trainable) == (dtype, trainable):
                    entries.append(Entry(spec.name, spec.shape, offset, spec.size))
                    offset += spec.size
            shard = shard_size(offset, shards, numpy_dtype(dtype).itemsize)
            groups.append(FlatGroup(dtype, trainable, tuple(entries), offset, shards, shard))
        units.append(UnitLayout(unit, tuple(groups)))
    return Layout(tuple(units), tuple(sorted((aliases or {}).items())))


# --- which parameter belongs to which unit ------------------------------------------------------------------

Units = Sequence[object] | Mapping[str, Sequence[str]] | Callable[[str], str | None] | None


def assign(names: Sequence[str], units: Units) -> tuple[dict[str, str], list[str]]:
    """(name -> unit, units in order) by the user's `units`.

    * None: all in one unit, "root".
    * a list of glob patterns over dotted names: "blocks.*" makes a unit of each thing that its wildcard names
      (blocks.0, blocks.1, ...), a pattern with no wildcard one unit; a list inside the list is one unit of
      several patterns.
    * a function name -> unit name (None: the root unit).
    * a dict unit name -> list of parameter names or patterns.

    What nothing takes forms the root unit, last in the order. ValueError: a pattern that takes nothing, or a
    name that two take.
    """
    if units is None:
        return dict.fromkeys(names, ROOT), [ROOT]
    taken: dict[str, str] = {}
    order: list[str] = []

    def take(name: str, unit: str, by: str) -> None:
        if not isinstance(unit, str) or unit == ROOT:
            raise ValueError(
                f"units: {by} names the unit of {name} {unit!r}; use a string other than {ROOT!r}, which is "
                "the unit of the parameters that no pattern takes (by_layer takes it from the "
                "parameter's name: rename that, or pass a dict of units)"
            )
        if name in taken and taken[name] != unit:
            raise ValueError(
                f"units: {name} is taken by {by} (unit {unit!r}) and was already in unit {taken[name]!r}; "
                "make the patterns disjoint"
            )
        taken[name] = unit
        if unit not in order:
            order.append(unit)

    if callable(units):
        for name in names:
            unit = units(name)
            if unit is not None:
                take(name, unit, f"{getattr(units, '__name__', 'the function')}")
    else:
        rules = units.items() if isinstance(units, Mapping) else [(None, rule) for rule in units]
        for unit_name, rule in rules:
            patterns = [rule] if isinstance(rule, str) else list(rule)  # type: ignore[call-overload]
            label = unit_name or (None if isinstance(rule, str) else "+".join(patterns))
            for pattern in patterns:
                matched = [(name, unit) for name in names if (unit := _matches(name, pattern)) is not None]
                if not matched:
                    raise ValueError(
                        f"units: the pattern {pattern!r} takes no parameter; there are {_some(names)}"
                    )
                for name, unit in matched:
                    take(name, label or unit, f"the pattern {pattern!r}")
    rest = [name for name in names if name not in taken]
    for name in rest:
        taken[name] = ROOT
    return taken, order + ([ROOT] if rest and ROOT not in order else [])


def _matches(name: str, pattern: str) -> str | None:
    """The unit that `pattern` puts `name` in: the leading components of it that the pattern's match."""
    parts, wanted = name.split("."), pattern.split(".")
    if len(parts) < len(wanted):
        return None
    if all(fnmatch.fnmatchcase(part, want) for part, want in zip(parts, wanted, strict=False)):
        return ".".join(parts[: len(wanted)])
    return None


def matcher(names: Sequence[str], patterns: Sequence[str], what: str) -> Callable[[str], bool]:
    """Whether a pattern takes a name: a glob over all of it ("*.bias") or what it lies under ("blocks.0").

    ValueError for a pattern that takes none of `names`; `what` says whose patterns they are.
    """
    taken = set()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{what}: the pattern {pattern!r} is no string")
        matched = [n for n in names if fnmatch.fnmatchcase(n, pattern) or _matches(n, pattern) is not None]
        if not matched:
            raise ValueError(f"{what}: the pattern {pattern!r} takes no parameter; there are {_some(names)}")
        taken.update(matched)
    return taken.__contains__


def _some(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, ... ({len(names)} in all)"


def by_layer(name: str) -> str:
    """A unit for each element of a list ("blocks.3", "encoder.layers.0") and for each other top-level name.

    To be given to `fully_shard` as it is: `units=by_layer`.
    """
    parts = name.split(".")
    numbered = next((at for at, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: numbered + 1])


@dataclass(frozen=True)
class by_size:  # noqa: N801 (reads as a policy: units=by_size(32 << 20))
    """Units of about `bytes` bytes each: parameters in order, a new unit when the next would exceed it."""

    bytes: int

    def units(self, specs: Sequence[Spec]) -> dict[str, list[str]]:
        """Explicit units for `assign`."""
        if self.bytes <= 0:
            raise ValueError(f"by_size: {self.bytes} bytes; expected a positive size such as 32 << 20")
        made: dict[str, list[str]] = {}
        filled = self.bytes + 1
        for spec in specs:
            size = spec.size * numpy_dtype(spec.dtype).itemsize
            if filled + size > self.bytes and (filled > 0 or not made):
                made[f"part{len(made)}"] = []
                filled = 0
            made[f"part{len(made) - 1}"].append(spec.name)
            filled += size
        return made

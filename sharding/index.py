"""What a checkpoint's index says: parameters, where their pieces lie, files and their checksums. Frozen data.

The index is `index.json` in the checkpoint's folder. It is all that a loader needs to know before it opens
another file, and it is complete: a folder without it is not a checkpoint. Knows nothing of ranks, models and
how files are written.

A parameter is kept as *pieces*: elements [start, stop) of it, flat in C order, each in one file. The same
pieces hold the optimizer's arrays for it, under other names (`tensor_name`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .agreement import CheckpointError, DifferentModelError
from .layout import Entry, FlatGroup, Layout

__all__ = [
    "FORMAT",
    "FileEntry",
    "Index",
    "Parameter",
    "PieceEntry",
    "check_layout",
    "check_user",
    "tensor_name",
]

FORMAT = 1  # of the index; a reader refuses what is newer
_MOST_DEEP = 100  # containers in containers, of the user's state
_MOST_BITS = 2048  # of an integer of it: Python refuses to read long ones back from text
MASTER = "param"  # the array that every parameter has; others are the optimizer's slots


@dataclass(frozen=True)
class PieceEntry:
    """Elements [start, stop) of a parameter are in file number `file`."""

    file: int
    start: int
    stop: int


@dataclass(frozen=True)
class Parameter:
    """One parameter: what it is, and where it is kept."""

    shape: tuple[int, ...]
    dtype: str
    """As the model has it."""
    stored: str
    """Of the array that is kept: the master dtype."""
    trainable: bool
    unit: str
    slots: Mapping[str, str] = field(default_factory=dict)
    """The optimizer's arrays for it: slot name -> dtype."""
    pieces: tuple[PieceEntry, ...] = ()

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class FileEntry:
    """One safetensors file: its size and the SHA-256 of each block of it (the last one shorter)."""

    name: str
    bytes: int
    block: int
    """Bytes in a block."""
    sha256: tuple[str, ...]


@dataclass(frozen=True)
class Index:
    """Everything about a checkpoint but the arrays."""

    step: int
    strategy: str
    mesh: tuple[int, int]
    """(replicate, shard) sizes of the ranks that saved."""
    parameters: Mapping[str, Parameter]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied names: alias -> the name that it is kept under."""
    files: tuple[FileEntry, ...] = ()
    optimizer: Any = None
    """What the optimizer says of itself: kind, step, groups by name."""
    rng: Any = None
    """Name -> states of that generator, by rank."""
    user: Any = None
    version: str = ""
    """Of the library that saved."""
    save: str = ""
    """Names this save: two saves of the same step differ in it."""
    format: int = FORMAT

    def to_json(self) -> str:
        """The file's text. The last field is a SHA-256 of the others."""
        fields = dataclasses.asdict(self)
        return json.dumps({**fields, "sha256": _digest(fields)}, indent=1)

    @classmethod
    def from_json(cls, text: str, source: str) -> Index:
        """Read back what `to_json` wrote. CheckpointError, naming `source`, if it is anything else."""
        try:
            fields = json.loads(text)
            digest = fields.pop("sha256")
            if fields["format"] > FORMAT:
                raise CheckpointError(
                    f"{source}: format {fields['format']} of a newer version ({fields.get('version')}); "
                    f"this one reads formats up to {FORMAT}"
                )
            if digest != _digest(fields):
                raise CheckpointError(
                    f"{source}: its contents do not match their checksum; it was damaged or changed after "
                    "the save"
                )
            return cls(
                **{
                    **fields,
                    "mesh": tuple(fields["mesh"]),
                    "parameters": {
                        name: Parameter(
                            **{
                                **each,
                                "shape": tuple(each["shape"]),
                                "pieces": tuple(PieceEntry(**piece) for piece in each["pieces"]),
                            }
                        )
                        for name, each in fields["parameters"].items()
                    },
                    "files": tuple(
                        FileEntry(**{**each, "sha256": tuple(each["sha256"])}) for each in fields["files"]
                    ),
                }
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{source}: it is not a checkpoint's index ({error}); it was damaged"
            ) from error

    def owner(self, name: str) -> str:
        """The name that `name` is kept under."""
        return self.aliases.get(name, name)


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def tensor_name(array: str, parameter: str) -> str:
    """The tensor's name in a rank's file: `param/blocks.0.w`, `exp_avg/blocks.0.w`."""
    return f"{array}/{parameter}"


def check_user(value: Any, where: str = "user", depth: int = 0) -> None:
    """TypeError, with the place, for what JSON does not have. (A tuple comes back as a list.)

    ValueError for what contains itself, or as good as that.
    """
    if depth > _MOST_DEEP:
        raise ValueError(
            f"save: {where[:80]}... is nested more than {_MOST_DEEP} deep; flatten it (a list or dict that "
            "contains itself cannot be saved)"
        )
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"save: {where} has the key {key!r}; JSON has strings alone for keys")
            check_user(item, f"{where}[{key!r}]", depth + 1)
    elif isinstance(value, (list, tuple)):
        for at, item in enumerate(value):
            check_user(item, f"{where}[{at}]", depth + 1)
    elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError(f"save: {where} is an integer of {value.bit_length()} bits; pass it as hex(x)")
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise TypeError(
            f"save: {where} is a {type(value).__name__}; use None, bool, int, float, str, lists and dicts "
            "(x.item() or x.tolist() of NumPy's values)"
        )


# --- is it the same model? ----------------------------------------------------------------------------------


def check_layout(index: Index, layout: Layout, source: str) -> None:
    """DifferentModelError that names the first parameter in which the checkpoint and the model differ.

    Parameters are the same if their names, shapes, dtypes and ties are. Units, shards, order and what is
    frozen may all differ.
    """
    problem = _first_difference(index, layout)
    if problem is not None:
        raise DifferentModelError(
            f"{source} is of another model: {problem}; load it into the model that it was saved from"
        )


def _first_difference(index: Index, layout: Layout) -> str | None:
    ties = dict(layout.aliases)
    here = {entry.name: (unit.groups[at], entry) for unit, at, entry in layout.parameters()}
    saved_names = {**dict.fromkeys(index.parameters), **dict.fromkeys(index.aliases)}
    for name, (group, entry) in here.items():
        if name not in saved_names:
            return f"parameter {name!r} (shape {entry.shape}, {group.dtype}) is missing in the checkpoint"
        problem = _entry_difference(index.parameters[index.owner(name)], group, entry)
        if problem is not None:
            return problem
    for alias, owner in ties.items():
        if alias not in saved_names:
            return f"parameter {alias!r} (tied to {owner!r}) is missing in the checkpoint"
        if index.owner(alias) != index.owner(owner):
            return f"parameter {alias!r} is tied to {owner!r} in the model, and on its own in the checkpoint"
    for name in saved_names:
        if name not in here and name not in ties:
            kept = index.parameters[index.owner(name)]
            return (
                f"the checkpoint has parameter {name!r} (shape {kept.shape}, {kept.dtype}), the model has not"
            )
        owner = index.owner(name)
        if ties.get(name, name) != ties.get(owner, owner):
            return f"parameter {name!r} is tied to {owner!r} in the checkpoint, and on its own in the model"
    return None


def _entry_difference(saved: Parameter, group: FlatGroup, entry: Entry) -> str | None:
    if saved.shape != entry.shape:
        return (
            f"parameter {entry.name!r} has shape {saved.shape} in the checkpoint, {entry.shape} in the model"
        )
    if saved.dtype != group.dtype:
        return f"parameter {entry.name!r} is {saved.dtype} in the checkpoint, {group.dtype} in the model"
    return None

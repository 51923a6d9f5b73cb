"""What the fields of a schedule may be, in two tables: its head, and the columns of its steps.

`Schedule` and `Builder` ask here before they make anything of what they are given, and the JSON of a schedule
is read here. Every refusal is a ValueError that names the field, its value and what to give instead. Whether
a step makes sense is for `steps.py`.
"""

from __future__ import annotations

import difflib
import functools
import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pynccl.collectives.terms import COLLECTIVES, COLUMNS, Array, Buffer, Kind

__all__ = [
    "MOST_CHUNKS",
    "MOST_RANKS",
    "check_columns",
    "check_head",
    "is_whole",
    "make_columns",
    "read_json",
    "said",
    "whole",
]

MOST_RANKS = 1 << 16
MOST_CHUNKS = 1 << 26  # in the buffers of a rank
_LONGEST_NAME = 200


def said(value: Any) -> str:
    """A value in a message, cut short where it is long."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python does not print a number of thousands of digits
        return f"a {type(value).__name__} too long to print"


def is_whole(kind: type) -> bool:
    """Whether a type is one of whole numbers; truth values are not numbers here."""
    return issubclass(kind, (int, np.integer)) and kind is not bool


def whole(what: str, value: Any, low: int, high: int) -> int:
    """The value as an int, if it is a whole number from `low` to `high`."""
    if is_whole(type(value)) and low <= value <= high:
        return int(value)
    raise ValueError(f"{what} is {said(value)}; take a whole number from {low} to {high}")


# --- the head -----------------------------------------------------------------------------------------------


def _whole(low: int, high: int) -> Callable[[str, Any], int]:
    return lambda what, value: whole(what, value, low, high)


def _flag(what: str, value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise ValueError(f"{what} is {said(value)}; take True or False")


def _name(what: str, value: Any) -> str:
    if isinstance(value, str) and value.isprintable() and 0 < len(value) <= _LONGEST_NAME:
        return value
    raise ValueError(f"{what} is {said(value)}; take 1 to {_LONGEST_NAME} printable characters")


def _collective(what: str, value: Any) -> str:
    if isinstance(value, str) and value in COLLECTIVES:
        return value
    close = difflib.get_close_matches(value, COLLECTIVES, 1) if isinstance(value, str) else []
    meant = f"; did you mean {close[0]}?" if close else ""
    raise ValueError(f"{what}: no collective {said(value)}; there are {', '.join(COLLECTIVES)}{meant}")


def _params(what: str, value: Any) -> dict[str, Any]:
    remedy = "take a dictionary with names as keys, of what JSON can say"
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{what} is {said(value)}; {remedy}")
    try:
        json.dumps(dict(value), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} is {said(value)}: {error}; {remedy}") from error
    return dict(value)


HEAD: dict[str, Callable[[str, Any], Any]] = {
    "name": _name,
    "collective": _collective,
    "n": _whole(1, MOST_RANKS),
    "parts": _whole(1, MOST_CHUNKS),
    "root": _whole(0, MOST_RANKS - 1),
    "scratch_chunks": _whole(0, MOST_CHUNKS),
    "deterministic": _flag,
    "in_place": _flag,
    "params": _params,
}


def check_head(call: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a head as plain ints, bools and so on; those of `n`, `parts` and `collective` are there.

    Raises ValueError for one that is unknown or not as in `HEAD`, a root that is no rank, and sizes that make
    more than `MOST_CHUNKS` chunks in the buffers of a rank.
    """
    for name in fields:
        if name not in HEAD:
            raise ValueError(f"{call}: there is no field {said(name)}; there are {', '.join(HEAD)}")
    found = {name: HEAD[name](f"{call}: {name}", value) for name, value in fields.items()}
    n, parts, scratch = found["n"], found["parts"], found.get("scratch_chunks", 0)
    if found.get("root", 0) >= n:
        raise ValueError(f"{call}: root {found['root']} is not one of {n} ranks; take 0 to {n - 1}")
    row = COLLECTIVES[found["collective"]]
    chunks = (row.blocks(Buffer.IN, n) + row.blocks(Buffer.OUT, n)) * parts + scratch
    if chunks > MOST_CHUNKS:
        raise ValueError(
            f"{call}: n={n}, parts={parts} and scratch_chunks={scratch} make {chunks} chunks in the buffers "
            f"of a rank; take sizes that make {MOST_CHUNKS} or fewer"
        )
    return found


# --- the columns of the steps -------------------------------------------------------------------------------


def _range(name: str) -> tuple[int, int]:
    info = np.iinfo(COLUMNS[name])
    return int(info.min), int(info.max)


# What the terms do not say is held to what its column can hold; a buffer of -1 means that there is none.
_TERMS = {
    "kind": (0, int(max(Kind))),
    "src_buffer": (-1, int(max(Buffer))),
    "dst_buffer": (-1, int(max(Buffer))),
}
_NAMES: tuple[str, ...] = COLUMNS.names or ()
_RANGES = {name: _TERMS.get(name) or ((0, 1) if name == "left" else _range(name)) for name in _NAMES}

Place = Callable[[str, int], str]


def make_columns(columns: Mapping[str, Sequence[Any]], place: Place) -> Array:
    """The steps' rows, dtype `COLUMNS`, of columns that are all there and equally long.

    Raises ValueError for a number that is none or does not fit; `place(column, index)` is where, in words.
    """
    length = len(columns["kind"])
    rows = np.empty(length, dtype=COLUMNS)
    for name in _NAMES:
        _check_numbers(columns[name], *_RANGES[name], functools.partial(place, name), flags=name == "left")
        rows[name] = columns[name]
    return rows


def _check_numbers(
    values: Sequence[Any], low: int, high: int, place: Callable[[int], str], *, flags: bool = False
) -> None:
    def fits(kind: type) -> bool:
        return is_whole(kind) or (flags and issubclass(kind, (bool, np.bool_)))

    if all(map(fits, set(map(type, values)))) and (
        not values or (low <= min(values) and max(values) <= high)
    ):
        return
    index = next(i for i, value in enumerate(values) if not fits(type(value)) or not low <= value <= high)
    whole(place(index), values[index], low, high)


def check_columns(call: str, columns: Any, first: Any, n: int) -> Array:
    """`first` as int64, if it and the rows are of the form that `Schedule` says; else ValueError."""
    if not isinstance(columns, np.ndarray) or columns.dtype != COLUMNS or columns.ndim != 1:
        kind = getattr(columns, "dtype", type(columns).__name__)
        raise ValueError(
            f"{call}: columns is of {kind}; take one array of dtype COLUMNS, a row for each step"
        )
    first_ = np.asarray(first)
    good = first_.ndim == 1 and first_.dtype.kind in "iu" and len(first_) == n + 1
    first_ = first_.astype(np.int64) if good else first_
    if not good or first_[0] != 0 or first_[-1] != len(columns) or (first_[1:] < first_[:-1]).any():
        raise ValueError(
            f"{call}: first is {said(first)}; for {n} ranks take {n + 1} whole numbers that grow from 0 to "
            f"{len(columns)}: where each rank's steps begin, and the end"
        )
    for name, (low, high) in _TERMS.items():
        wrong = np.flatnonzero((columns[name] < low) | (columns[name] > high))
        if len(wrong):
            rank = int(np.searchsorted(first_, wrong[0], side="right")) - 1
            where = f"{call}: rank {rank}, step {wrong[0] - first_[rank]}: {name}"
            whole(where, columns[name][wrong[0]].item(), low, high)
    return first_


# --- JSON ---------------------------------------------------------------------------------------------------

_NOT_JSON = "schedule: this is not the JSON of a schedule"
_REQUIRED = ("name", "collective", "n", "parts", "first", "steps")


def read_json(text: str) -> dict[str, Any]:
    """The fields of a `Schedule` that JSON gives: the rows made, the head as it stands."""
    try:
        fields = json.loads(text, object_pairs_hook=_each_once)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{_NOT_JSON}: {said(text)}: {error}") from error
    _check_names("it", fields, _REQUIRED, (*HEAD, "first", "steps"))
    steps, first = fields.pop("steps"), fields.pop("first")
    _check_names("steps", steps, _NAMES, _NAMES)
    for name, column in {"first": first, **{f"steps.{name}": steps[name] for name in _NAMES}}.items():
        if not isinstance(column, list):
            raise ValueError(f"{_NOT_JSON}: {name} is {said(column)}; take a list of whole numbers")
        if name != "first" and len(column) != len(steps["kind"]):
            raise ValueError(
                f"{_NOT_JSON}: {name} has {len(column)} numbers where steps.kind has {len(steps['kind'])}; "
                "take one for each step in every column"
            )
    _check_numbers(first, 0, len(steps["kind"]), lambda index: f"{_NOT_JSON}: first[{index}]")
    columns = make_columns(steps, lambda name, index: f"{_NOT_JSON}: steps.{name}[{index}]")
    return {**fields, "columns": columns, "first": np.array(first, dtype=np.int64)}


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{said(twice)} is given twice; give it once")
    return found


def _check_names(what: str, given: Any, required: Sequence[str], known: Sequence[str]) -> None:
    if not isinstance(given, dict):
        raise ValueError(f"{_NOT_JSON}: {what} is {said(given)}; take an object with {', '.join(known)}")
    missing = [name for name in required if name not in given]
    unknown = [said(name) for name in given if name not in known]
    if missing or unknown:
        lacks = f" lacks {', '.join(missing)}" if missing else ""
        has = f" has the unknown {', '.join(unknown[:4])}" if unknown else ""
        raise ValueError(
            f"{_NOT_JSON}: {what}{lacks}{' and' if lacks and has else ''}{has}; it has {', '.join(known)}"
        )

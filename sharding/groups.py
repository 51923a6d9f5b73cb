"""Hyper-parameters by parameter name: glob patterns, resolved once into groups of names.

Pure: names and numbers in, groups out; the same on every rank. `segments` lays the groups over a shard.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .layout import FlatGroup, Layout, pieces
from .updates import Rule

__all__ = ["Group", "Segment", "by_name", "resolve", "segments"]

Schedule = Callable[[int], float]


@dataclass(eq=False)
class Group:
    """Parameters with equal hyper-parameters. `hyper` may be changed between steps."""

    hyper: dict[str, Any]
    """`lr` (a number, or a schedule: a function of the number of steps done) and what the rule has."""
    names: tuple[str, ...]

    def now(self, steps: int) -> dict[str, Any]:
        """The hyper-parameters of the next step, when `steps` are done: schedules evaluated and checked."""
        lr = self.hyper["lr"]
        if not callable(lr):
            return self.hyper
        value = lr(steps)
        _check_lr(f"{_title(lr)}({steps}) returned", value)
        return {**self.hyper, "lr": float(value)}

    def saved(self, steps: int) -> dict[str, Any]:
        """JSON-like; a schedule is saved as its name and its value at this step."""
        found = {key: list(v) if isinstance(v, tuple) else v for key, v in self.hyper.items()}
        if callable(self.hyper["lr"]):
            found["lr"] = {"schedule": _title(self.hyper["lr"]), "value": self.now(steps)["lr"]}
        return {"hyper": found, "names": list(self.names)}


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of a shard that are updated alike; elements of padding are in none."""

    start: int
    stop: int
    group: Group
    name: str
    """The parameter, or the first of several."""
    param_start: int
    """The index of the first element in that parameter."""


def by_name(
    layout: Layout,
    rule: Rule,
    base: Mapping[str, Any],
    overrides: Mapping[str, Mapping[str, Any]] | None,
    call: str,
) -> dict[str, dict[str, Any]]:
    """name -> hyper-parameters of every trainable parameter: `base`, then each pattern that takes the name.

    A pattern is a glob over the whole dotted name ("*.bias" takes blocks.0.attention.bias); where several
    take a name, later ones win. A tied parameter goes by all its names.

    Raises ValueError for a pattern that takes nothing and for values that the rule refuses, TypeError for
    hyper-parameters that it does not have.
    """
    known = ["lr", *rule.defaults]
    _check_known(base, known, f"{call}")
    aliases: dict[str, list[str]] = {}
    for alias, owner in layout.aliases:
        aliases.setdefault(owner, []).append(alias)
    hypers: dict[str, dict[str, Any]] = {}
    found = []
    for unit, index, entry in layout.parameters():
        names = [entry.name, *aliases.get(entry.name, ())]
        found.append((entry.name, names))
        if unit.groups[index].trainable:
            hypers[entry.name] = {**rule.defaults, **base}
    for pattern, given in (overrides or {}).items():
        _check_known(given, known, f"{call}: groups[{pattern!r}]")
        taken = [owner for owner, names in found if any(fnmatch.fnmatchcase(name, pattern) for name in names)]
        if not taken:
            raise ValueError(f"{call}: groups: the pattern {pattern!r} takes no parameter; {_some(layout)}")
        for owner in taken:
            if owner in hypers:
                hypers[owner].update(given)
        probe = {**rule.defaults, **base, **given}
        _check_values(rule, probe, f"{call}: groups[{pattern!r}]")
    _check_values(rule, {**rule.defaults, **base}, call)
    for name, hyper in hypers.items():
        _check_values(rule, hyper, f"{call}: parameter {name!r}")
    return hypers


def resolve(hypers: Mapping[str, Mapping[str, Any]]) -> list[Group]:
    """Names with equal hyper-parameters together, in the order of the first of each."""
    made: list[tuple[dict[str, Any], list[str]]] = []
    for name, hyper in hypers.items():
        for other, names in made:
            if other == hyper:
                names.append(name)
                break
        else:
            made.append((dict(hyper), [name]))
    return [Group(hyper, tuple(names)) for hyper, names in made]


def segments(
    group: FlatGroup, rank: int, of: Mapping[str, Group], begun: Mapping[str, int], split: bool
) -> list[Segment]:
    """What of each parameter lies in rank's shard, adjacent ones with equal hyper-parameters merged.

    `begun` (name -> step in which its state began) parts them too; `split` keeps every parameter apart.
    """
    found: list[Segment] = []
    for piece in pieces(group, rank):
        last = found[-1] if found else None
        same = (
            last is not None
            and not split
            and last.stop == piece.shard_start
            and last.group is of[piece.name]
            and begun.get(last.name, 0) == begun.get(piece.name, 0)
        )
        if same and last is not None:
            found[-1] = Segment(last.start, piece.shard_stop, last.group, last.name, last.param_start)
        else:
            found.append(
                Segment(piece.shard_start, piece.shard_stop, of[piece.name], piece.name, piece.param_start)
            )
    return found


# --- checks -------------------------------------------------------------------------------------------------


def _check_known(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in given:
        if key not in known:
            raise TypeError(f"{where}: {key!r} is not one of its hyper-parameters: {', '.join(known)}")


def _check_values(rule: Rule, hyper: Mapping[str, Any], where: str) -> None:
    if not callable(hyper["lr"]):
        _check_lr(f"{where}: lr is", hyper["lr"])
    wrong = rule.check(hyper) if rule.check is not None else None
    if wrong:
        raise ValueError(f"{where}: {wrong}")


def _check_lr(what: str, value: Any) -> None:
    try:
        good = not isinstance(value, (str, bool)) and 0 <= float(value) < float("inf")
    except (TypeError, ValueError):
        good = False
    if not good:
        raise ValueError(
            f"{what} {value!r}; expected a finite number of at least 0, or a schedule (a function step -> "
            "number)"
        )


def _title(function: Any) -> str:
    return getattr(function, "__name__", None) or repr(function)


def _some(layout: Layout, most: int = 8) -> str:
    names = [entry.name for _, _, entry in layout.parameters()]
    shown = ", ".join(names[:most])
    return f"there are {shown}" + (f", ... ({len(names)} in all)" if len(names) > most else "")

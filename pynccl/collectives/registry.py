"""The table of algorithms. Adding one is one generator (its file) and one row here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from pynccl.collectives import ring
from pynccl.collectives.schedule import COLLECTIVES, Schedule

__all__ = ["ALGORITHMS", "Row", "algorithms", "generate"]


@dataclasses.dataclass(frozen=True)
class Row:
    """An algorithm of a collective.

    `generator(n, **params)` gives the schedule (a broadcast or reduce takes `root=`, too) for any n >= 1.
    `formula`: its time with a = alpha, b = beta, g = gamma and S bytes. `source`: where it was described.
    `variants`: more parameters that `verify --all` goes through, besides none.
    """

    collective: str
    name: str
    generator: Callable[..., Schedule]
    formula: str
    source: str
    variants: tuple[dict[str, Any], ...] = ()


_PATARASUK = "Patarasuk and Yuan 2009"

_ROWS = (
    Row(
        "all_reduce",
        "ring",
        ring.all_reduce,
        "2(n-1) a + 2(n-1)/n S b + (n-1)/n S g",
        _PATARASUK,
        ({"channels": 2}, {"channels": 4}),
    ),
)

ALGORITHMS: dict[tuple[str, str], Row] = {(row.collective, row.name): row for row in _ROWS}


def algorithms(collective: str) -> tuple[str, ...]:
    """The names of a collective's algorithms; ValueError if there is no such collective."""
    if collective not in COLLECTIVES:
        raise ValueError(f"no collective {collective!r}; there are {', '.join(COLLECTIVES)}")
    return tuple(name for of, name in ALGORITHMS if of == collective)


def generate(name: str, n: int, *, collective: str = "all_reduce", **params: Any) -> Schedule:
    """The schedule of algorithm `name` for `n` ranks; ValueError for an unknown name or too few ranks."""
    known = algorithms(collective)
    if name not in known:
        raise ValueError(f"{collective} has no algorithm {name!r}; it has {', '.join(known)}")
    if n < 1:
        raise ValueError(f"{collective} {name}: {n} ranks; take 1 or more")
    return ALGORITHMS[collective, name].generator(n, **params)

"""The table of algorithms. Adding one is one generator (its file) and one row here.

A program can add a row of its own while it runs, ``ALGORITHMS[collective, name] = Row(...)``, on every rank.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from pynccl.collectives import (
    bruck,
    direct,
    hierarchical,
    pairwise,
    pat,
    recursive,
    ring,
    swing,
    tree,
)
from pynccl.collectives.form import MOST_RANKS, said
from pynccl.collectives.schedule import COLLECTIVES, Schedule, check_is_schedule

__all__ = ["ALGORITHMS", "Row", "algorithms", "generate"]


@dataclasses.dataclass(frozen=True)
class Row:
    """An algorithm of a collective.

    `generator(n, **params)` gives the schedule (a broadcast or reduce takes `root=`, too) for any n >= 1. Its
    parameters have defaults; those annotated with int, None or Sequence[int] are checked by `generate`.
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
_THAKUR = "Thakur, Rabenseifner and Gropp 2005"
_TWO_TREES = "Sanders, Speck and Träff 2009; ncclGetDtree"
_BRUCK = "Bruck et al. 1997"
_DIRECT = "MSCCL++, arXiv:2504.09014"
_LEVELS = "Jia et al. 2018, arXiv:1807.11205"
_PAT = "Jeaugey 2025, arXiv:2506.20252"
_CHANNELS = ({"channels": 2}, {"channels": 4})
_CHAINS = ({"channels": 2, "chunks": 1}, {"channels": 1, "chunks": 3})
_NODES = ({"ranks_per_node": 2}, {"ranks_per_node": 3})
_AGGREGATIONS = ({"aggregation": 1}, {"aggregation": 2})
_CHUNKS = ({"chunks": 1}, {"chunks": 3})

# k: chunks of a pipeline. log: the logarithm to base 2. A: see `pat.py`. N nodes of m ranks, with links 1
# inside them and 2 between them.
_ROWS = (
    Row(
        "all_reduce", "ring", ring.all_reduce, "2(n-1) a + 2(n-1)/n S b + (n-1)/n S g", _PATARASUK, _CHANNELS
    ),
    Row(
        "all_reduce",
        "tree",
        tree.all_reduce,
        "(2 log n + k) a + (log n + k) S/k (2 b + g)",
        _TWO_TREES,
        _CHUNKS,
    ),
    Row("all_reduce", "binomial", tree.binomial_all_reduce, "2 log n (a + S b) + log n S g", _THAKUR),
    Row(
        "all_reduce",
        "recursive_doubling",
        recursive.doubling_all_reduce,
        "log n (a + S (b + g))",
        _THAKUR,
    ),
    Row(
        "all_reduce",
        "halving_doubling",
        recursive.halving_all_reduce,
        "2 log n a + 2(n-1)/n S b + (n-1)/n S g",
        "Rabenseifner 2004",
    ),
    Row(
        "all_reduce",
        "swing",
        swing.all_reduce,
        "2 log n a + 2(n-1)/n S b + (n-1)/n S g",
        "De Sensi et al. 2024, arXiv:2401.09356",
    ),
    Row(
        "all_reduce",
        "direct",
        direct.all_reduce,
        "2 a + 2(n-1)/n S b + (n-1)/n S g",
        _DIRECT,
    ),
    Row("all_reduce", "one_shot", direct.one_shot_all_reduce, "a + (n-1) S (b + g)", _DIRECT),
    Row(
        "all_reduce",
        "hierarchical",
        hierarchical.all_reduce,
        "2 a1 + 2(m-1)/m S b1 + 2(N-1) a2 + 2(N-1)/N S/m b2 + ((m-1)/m + (N-1)/(N m)) S g",
        _LEVELS,
        _NODES,
    ),
    Row("reduce_scatter", "ring", ring.reduce_scatter, "(n-1) a + (n-1)/n S (b + g)", _PATARASUK, _CHANNELS),
    Row(
        "reduce_scatter",
        "halving",
        recursive.halving_reduce_scatter,
        "log n a + (n-1)/n S (b + g)",
        _THAKUR,
    ),
    Row("reduce_scatter", "direct", direct.reduce_scatter, "a + (n-1)/n S (b + g)", _DIRECT),
    Row(
        "reduce_scatter",
        "pat",
        pat.reduce_scatter,
        "(log A + n/A - 1) a + (n-1)/n S (b + g)",
        _PAT,
        _AGGREGATIONS,
    ),
    Row(
        "reduce_scatter",
        "hierarchical",
        hierarchical.reduce_scatter,
        "a1 + (m-1) S/n (b1 + g) + (N-1)(a2 + S/n (b2 + m g))",
        _LEVELS,
        _NODES,
    ),
    Row("all_gather", "ring", ring.all_gather, "(n-1) a + (n-1)/n S b", _PATARASUK, _CHANNELS),
    Row(
        "all_gather",
        "recursive_doubling",
        recursive.doubling_all_gather,
        "log n a + (n-1)/n S b",
        _THAKUR,
    ),
    Row("all_gather", "bruck", bruck.all_gather, "log n a + (n-1)/n S b", _BRUCK),
    Row("all_gather", "direct", direct.all_gather, "a + (n-1)/n S b", _DIRECT),
    Row("all_gather", "pat", pat.all_gather, "(log A + n/A - 1) a + (n-1)/n S b", _PAT, _AGGREGATIONS),
    Row(
        "all_gather",
        "hierarchical",
        hierarchical.all_gather,
        "(N-1)(a2 + S/n b2) + a1 + (m-1) S/n b1",
        _LEVELS,
        _NODES,
    ),
    Row("broadcast", "ring", ring.broadcast, "(n-2+k)(a + S/k b)", _PATARASUK, _CHAINS),
    Row("broadcast", "tree", tree.broadcast, "(log n + k)(a + S/k b)", _TWO_TREES, _CHUNKS),
    Row("broadcast", "binomial", tree.binomial_broadcast, "log n (a + S b)", _THAKUR),
    Row("broadcast", "direct", direct.broadcast, "a + (n-1) S b", _DIRECT),
    Row("reduce", "ring", ring.reduce, "(n-2+k)(a + S/k (b + g))", _PATARASUK, _CHAINS),
    Row("reduce", "tree", tree.reduce, "(log n + k)(a + S/k (b + g))", _TWO_TREES, _CHUNKS),
    Row("reduce", "binomial", tree.binomial_reduce, "log n (a + S (b + g))", _THAKUR),
    Row("reduce", "direct", direct.reduce, "a + (n-1) S (b + g)", _DIRECT),
    Row("all_to_all", "pairwise", pairwise.all_to_all, "(n-1) a + (n-1)/n S b", _THAKUR),
    Row("all_to_all", "direct", direct.all_to_all, "a + (n-1)/n S b", _DIRECT),
    Row("all_to_all", "bruck", bruck.all_to_all, "log n (a + S/2 b)", _BRUCK),
)

ALGORITHMS: dict[tuple[str, str], Row] = {(row.collective, row.name): row for row in _ROWS}


def algorithms(collective: str) -> tuple[str, ...]:
    """The names of a collective's algorithms; ValueError if there is no such collective."""
    if collective not in COLLECTIVES:
        raise ValueError(f"no collective {collective!r}; there are {', '.join(COLLECTIVES)}")
    return tuple(name for of, name in ALGORITHMS if of == collective)


def generate(name: str, n: int, *, collective: str = "all_reduce", **params: Any) -> Schedule:
    """The schedule of algorithm `name` for `n` ranks, with `params` of its generator.

    ValueError for an unknown name or parameter, a value that it does not take, and fewer ranks than one.
    """
    known = algorithms(collective)
    if name not in known:
        raise ValueError(f"{collective} has no algorithm {name!r}; it has {', '.join(known)}")
    if not _whole(n) or not 1 <= n <= MOST_RANKS:
        raise ValueError(f"{collective} {name}: {said(n)} ranks; take 1 or more, and {MOST_RANKS} at most")
    row = ALGORITHMS[collective, name]
    if not isinstance(row, Row):
        raise TypeError(f"ALGORITHMS[{collective!r}, {name!r}] is {said(row)}; give it a registry.Row")
    _check_params(row, params)
    root = params.get("root", 0)
    if not _whole(root) or not 0 <= root < n:
        raise ValueError(f"{collective} {name}: root {root} is not one of {n} ranks; take 0 to {n - 1}")
    schedule = row.generator(n, **params)
    check_is_schedule(f"{collective} {name}: what its generator returns", schedule)
    return schedule


def _check_params(row: Row, params: dict[str, Any]) -> None:
    """ValueError unless the row's generator takes these parameters, as far as their types say."""
    known = dict(list(inspect.signature(row.generator).parameters.items())[1:])
    takes = ", ".join(f"{p.name} ({_type(p)}, otherwise {p.default})" for p in known.values())
    for name, value in params.items():
        if name not in known:
            raise ValueError(
                f"{row.collective} {row.name} has no parameter {name!r}; it has {takes or 'no parameters'}"
            )
        types = _type(known[name]).split(" | ")
        if all(each in _TYPES and not _TYPES[each](value) for each in types):
            raise ValueError(f"{row.collective} {row.name}: {name}={value!r}; it has {takes}")


def _type(parameter: inspect.Parameter) -> str:
    """What a parameter is annotated with, as it is written; "any" if it is not, and then nothing is checked.

    Annotations are text only where a file says ``from __future__ import annotations``.
    """
    annotation = parameter.annotation
    if annotation is inspect.Parameter.empty:
        return "any"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _whole(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


# What the annotations of generators' parameters stand for; what is annotated otherwise may be anything.
_TYPES: dict[str, Callable[[Any], bool]] = {
    "int": _whole,
    "None": lambda value: value is None,
    "Sequence[int]": lambda value: (
        hasattr(value, "__len__") and not isinstance(value, str) and all(map(_whole, value))
    ),
}

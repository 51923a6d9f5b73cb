"""`fully_shard`: from the user's arrays to a ShardedModel. Checks all on all ranks before any changes.

Order matters here: what the user gave is read, every rank hears of any rank's error, the models and settings
are compared, and only then are communicators and memory made, and the memory filled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .agreement import agree
from .build import Fill, from_arrays, from_broadcast, from_init
from .engine import ShardedModel
from .inputs import compare_lines, compare_values, frozen_owners, read_leaves, tied_names
from .layout import ROOT, Layout, Spec, Units, assign, by_size, matcher, plan
from .mesh import Mesh, mesh_shape
from .policy import MixedPrecision, Strategy, is_floating, strategy_named
from .runtime import runtime_for
from .transport import Transport
from .tree import mapping_paths

__all__ = ["Setup", "fully_shard"]


def fully_shard(
    params: Any = None,
    comm: Any = None,
    *,
    units: Units | by_size = None,
    strategy: str | Strategy = "full_shard",
    mesh: tuple[int, int] | None = None,
    precision: MixedPrecision | None = None,
    reshard_after_forward: bool | int = True,
    prefetch: bool = True,
    frozen: Sequence[str] | Callable[[str], bool] = (),
    reduce_op: str = "avg",
    broadcast_from: int | None = 0,
    init: Callable[[str, tuple[int, ...], np.dtype], Any] | None = None,
    shapes: Any = None,
    collectives: Mapping[str, Any] | None = None,
    debug: bool = False,
) -> ShardedModel:
    """Divide a model over the ranks of `comm`. Collective; returns the engine for the training loop.

    params
        A nested dict/list/tuple of NumPy or CuPy arrays (or a flat dict of dotted names). The same array
        under two names is a tied parameter. The arrays are read, not kept: drop them to free the memory.
    units
        What is gathered together: see `layout.assign`; or `by_layer`, or `by_size(32 << 20)`. None: one unit.
        What no pattern takes, and parameters that several units share, form the root unit: it is whole from
        the first microbatch on.
    strategy, mesh, precision, reshard_after_forward
        See `policy`. `mesh=(replicate, shard)` is for hybrid_shard. `reshard_after_forward` True: release
        weights after forward and gather again for backward; False: keep them in between; k: keep 1/k, and
        gather for backward from k ranks.
    prefetch
        Gather the next unit while this one computes, on a stream of its own.
    frozen
        Glob patterns over whole names ("*.bias") or what they lie under ("blocks.0"), or a function of names:
        parameters that get no gradient. Integers and booleans get none anyway. See `ShardedModel.freeze`.
    reduce_op
        "avg" (the mean over ranks, for a loss that is a mean over the rank's batch) or "sum".
    broadcast_from
        The rank whose arrays everybody starts from. None: all ranks bring equal arrays, which is checked.
    init, shapes
        Instead of params: `init(name, shape, dtype)` makes one parameter at a time, the same on every rank
        (which is checked); `shapes` is a tree of `(shape, dtype)` pairs or of things with .shape and .dtype.
        The whole model never exists on a rank.
    collectives
        How weights and gradients travel, where not by the library's own choice: a dict with any of
        "all_gather" (weights), "reduce_scatter" (gradients) and "all_reduce" (gradients over equal shards),
        as far as the strategy has them. Each is the name of an algorithm ("pynccl:ring"; "ring" is the
        library's), a schedule of `pynccl.collectives` for as many ranks as the group has, or a `Way`, such as
        `pynccl.collectives.Compressed(Integers(8))` for gradients.
    debug
        Fill released buffers with NaN, so that an array kept beyond its context is found out.

    Raises ValueError or TypeError on every rank, naming the parameter and the remedy, with nothing changed.
    """
    missing = [name for name in _PROTOCOL if not hasattr(comm, name)]
    if missing:
        raise TypeError(
            f"fully_shard: comm={comm!r} lacks {', '.join(missing)}; pass pynccl.init(), or any communicator "
            "with the protocol of sharding.Comm"
        )
    setup, error = None, None
    try:
        setup = Setup.read(
            params,
            comm,
            units=units,
            strategy=strategy,
            mesh=mesh,
            precision=precision,
            reshard=reshard_after_forward,
            frozen=frozen,
            reduce_op=reduce_op,
            init=init,
            shapes=shapes,
            broadcast_from=broadcast_from,
            collectives=collectives,
        )
    except Exception as caught:  # whatever the user's functions raise: every rank must hear of it
        error = caught
    agree(comm, error)
    assert setup is not None
    compare_lines(comm, setup.lines(), "fully_shard")
    if init is None and broadcast_from is None:
        compare_values(comm, setup.arrays)
    setup.mesh.connect()
    runtime = runtime_for(comm, setup.sample, prefetch)
    checksums: dict[str, int] = {}
    fill: Fill
    if init is not None:
        fill = from_init(init, runtime.xp, checksums)
    elif broadcast_from is None or comm.size == 1:
        fill = from_arrays(setup.arrays)
    else:
        fill = from_broadcast(comm, broadcast_from, setup.arrays, runtime.empty)
    try:
        setup.transport.rehearse(setup.mesh, runtime.empty)
    except BaseException:
        runtime.close()
        setup.mesh.abort()
        raise
    try:
        model = ShardedModel(setup, runtime, fill, prefetch=prefetch, debug=debug)
    except Exception as caught:
        error = caught
    try:
        if init is not None:
            agree(comm, error)
            compare_lines(
                comm, [f"{name} with checksum {crc:08x}" for name, crc in checksums.items()], "init"
            )
        elif error is not None:
            raise error
    except BaseException:
        runtime.close()
        setup.mesh.abort()
        raise
    return model


_PROTOCOL = [
    *("rank", "size", "all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_gather_object"),
    *("split", "destroy", "abort"),
]


@dataclass
class Setup:
    """Everything that is decided before there is an engine. The engine keeps none of `arrays`."""

    comm: Any
    mesh: Mesh
    strategy: Strategy
    precision: MixedPrecision | None
    reshard: bool | int
    reduce_op: str
    broadcast_from: int | None
    arrays: dict[str, Any]
    sample: Any
    """One leaf: its type says where arrays live."""
    layout: Layout
    names: tuple[str, ...]
    """All names, tied ones included, in the user's order."""
    homes: dict[str, str]
    """name -> the unit that its memory lies in."""
    owners: dict[str, str]
    """Tied names: alias -> owner."""
    shown: dict[str, tuple[str, ...]]
    """unit -> the names that its user sees."""
    transport: Transport
    mappings: frozenset[str]
    """Paths of the user's dicts, which stay dicts even if their keys look like indices."""

    @classmethod
    def read(
        cls,
        params: Any,
        comm: Any,
        *,
        units: Any,
        strategy: Any,
        mesh: Any,
        precision: Any,
        reshard: Any,
        frozen: Any,
        reduce_op: str,
        init: Any,
        shapes: Any,
        broadcast_from: Any,
        collectives: Any,
    ) -> Setup:
        """Look at what the user gave; no communication. TypeError or ValueError."""
        strategy = strategy_named(strategy)
        if precision is not None and not isinstance(precision, MixedPrecision):
            raise TypeError(f"fully_shard: precision={precision!r}; pass a sharding.MixedPrecision or None")
        if reduce_op not in ("avg", "sum"):
            raise ValueError(f"fully_shard: reduce_op={reduce_op!r}; use 'avg' or 'sum'")
        if broadcast_from is not None and not (
            type(broadcast_from) is int and 0 <= broadcast_from < comm.size
        ):
            raise ValueError(
                f"fully_shard: broadcast_from={broadcast_from!r}; use a rank below {comm.size}, or None"
            )
        replicate, shard = mesh_shape(strategy, mesh, comm.size)
        if not isinstance(reshard, bool) and not (
            isinstance(reshard, int) and 1 < reshard <= shard and shard % reshard == 0
        ):
            raise ValueError(
                f"fully_shard: reshard_after_forward={reshard!r}; use True, False, or a number of ranks, 2 "
                f"or more, that divides the {shard} that the state is sharded over"
            )
        leaves = read_leaves(params, init, shapes)
        owners = tied_names(leaves)
        names = list(leaves)
        frozen_names = frozen_owners(frozen, names, owners, matcher)
        specs = [
            Spec(
                name,
                tuple(leaf.shape),
                leaf.dtype.name,
                is_floating(leaf.dtype) and name not in frozen_names,
            )
            for name, leaf in leaves.items()
            if name not in owners
        ]
        homes, order, shown = _place(names, specs, owners, units)
        layout = plan(specs, homes, order, shard, owners)
        transport = Transport.read(collectives, strategy, _group_sizes(strategy, replicate, shard, reshard))
        transport.check_layout("fully_shard", layout, precision, shard, replicate)
        return cls(
            comm=comm,
            mesh=Mesh(comm, replicate, shard, None if isinstance(reshard, bool) else reshard),
            strategy=strategy,
            precision=precision,
            reshard=reshard,
            reduce_op=reduce_op,
            broadcast_from=broadcast_from,
            arrays={} if init is not None else {s.name: leaves[s.name] for s in specs},
            sample=next(iter(leaves.values())),
            layout=layout,
            names=tuple(names),
            homes=homes,
            owners=owners,
            shown=shown,
            transport=transport,
            mappings=mapping_paths(params if init is None else shapes),
        )

    def lines(self) -> list[str]:
        """What must be equal on all ranks, for `compare_lines`: parameters in the user's order, settings."""
        settings = {
            "units": [unit.name for unit in self.layout.units],
            "strategy": self.strategy.name,
            "mesh": (self.mesh.replicate_size, self.mesh.shard_size),
            "precision": self.precision,
            "reshard_after_forward": self.reshard,
            "reduce_op": self.reduce_op,
            "broadcast_from": self.broadcast_from,
            "collectives": self.transport.lines(),
            "arrays of": type(self.sample).__module__.partition(".")[0],
        }
        described = self.layout.described()
        parameters = [described[name] for name in self.names]
        return parameters + [f"{key} {value}" for key, value in settings.items()]


def _group_sizes(
    strategy: Strategy, replicate: int, shard: int, reshard: bool | int
) -> dict[str, tuple[int, ...]]:
    """The collectives that a strategy has, and the numbers of ranks that each is called with."""
    sizes: dict[str, tuple[int, ...]] = {}
    if strategy.shards:
        near = () if isinstance(reshard, bool) else (reshard,)
        sizes.update(all_gather=(shard, *near), reduce_scatter=(shard,))
    if not strategy.shards or strategy.name == "hybrid_shard":
        sizes.update(all_reduce=(replicate,))
    return sizes


def _place(
    names: Sequence[str], specs: Sequence[Spec], owners: Mapping[str, str], units: Any
) -> tuple[dict[str, str], list[str], dict[str, tuple[str, ...]]]:
    """(name -> unit of its memory, units in order, unit -> names shown in it)."""
    if isinstance(units, by_size):
        unit_of, order = assign([spec.name for spec in specs], units.units(specs))
        unit_of.update({alias: unit_of[owner] for alias, owner in owners.items()})
    else:
        unit_of, order = assign(names, [units] if isinstance(units, str) else units)
    shown = {unit: tuple(name for name in names if unit_of[name] == unit) for unit in order}
    homes = dict(unit_of)
    shared = {owner for alias, owner in owners.items() if unit_of[alias] != unit_of[owner]}
    if shared:  # whole while any unit may use them: they live in the root unit
        homes.update(dict.fromkeys(shared, ROOT))
        shown[ROOT] = tuple(name for name in names if homes[name] == ROOT)
        order = [unit for unit in order if unit != ROOT] + [ROOT]
    if ROOT in order and len(order) > 1:
        order = [ROOT, *(unit for unit in order if unit != ROOT)]
    return homes, order, shown

"""`fully_shard`: from the user's arrays to a ShardedModel. Checks all on all ranks before any changes.

Order matters here: names and dtypes are looked at, every rank hears of any rank's error, the layouts are
compared, and only then is memory made and filled: from rank 0's arrays (broadcast), each rank's own (checked
to be equal), or an initialiser.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .engine import ShardedModel
from .layout import ROOT, FlatGroup, Layout, Spec, Units, assign, by_size, numpy_dtype, plan
from .policy import MixedPrecision, Strategy, dtypes_of, strategy_named
from .precision import cast_into
from .runtime import runtime_for
from .tree import flatten
from .unit import Shard, Unit, Weights, views_of

__all__ = ["fully_shard"]


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
    debug: bool = False,
) -> ShardedModel:
    """Divide a model over the ranks of `comm`. Collective; returns the engine for the training loop.

    params
        A nested dict/list/tuple of NumPy or CuPy arrays (or a flat dict of dotted names). The same array
        under two names is a tied parameter. The arrays are read, not kept: drop them to free the memory.
    units
        What is gathered together: see `layout.assign`, or `by_size(32 << 20)`. None: one unit.
    strategy, mesh, precision, reshard_after_forward
        See `policy`. `mesh=(replicate, shard)` is for hybrid_shard. `reshard_after_forward` True: release
        weights after forward and gather again for backward; False: keep them in between; k: keep 1/k, and
        gather for backward from k ranks.
    prefetch
        Gather the next unit while this one computes, on a stream of its own.
    frozen
        Glob patterns (as for units), or a function, of parameters that get no gradient.
    reduce_op
        "avg" (the mean over ranks, for a loss that is a mean over the rank's batch) or "sum".
    broadcast_from
        The rank whose arrays everybody starts from. None: all ranks bring equal arrays, which is checked.
    init, shapes
        Instead of params: `init(name, shape, dtype)` makes one parameter at a time, `shapes` is a tree of
        `(shape, dtype)` pairs or of things with .shape and .dtype. The whole model never exists on a rank.
    debug
        Fill released buffers with NaN, so that an array kept beyond its context is found out.

    Raises ValueError or TypeError on every rank, naming the parameter and the remedy, with nothing changed.
    """
    setup = Setup()
    error = None
    try:
        if comm is None:
            raise TypeError(
                "fully_shard: comm is missing; pass pynccl.init(), or any communicator with the protocol of "
                "sharding.Comm"
            )
        setup.read(
            params,
            comm,
            units,
            strategy,
            mesh,
            precision,
            reshard_after_forward,
            frozen,
            reduce_op,
            init,
            shapes,
        )
    except (TypeError, ValueError) as caught:
        if comm is None:
            raise
        error = caught
    _agree(comm, error)
    setup.prefetch, setup.debug, setup.broadcast_from = prefetch, debug, broadcast_from
    _compare_layouts(comm, setup.layout)
    setup.connect()
    if init is None and broadcast_from is None:
        _compare_values(comm, setup.arrays)
    model = ShardedModel(setup)
    model.updated()
    return model


@dataclass
class Setup:
    """Everything that is decided before the engine runs."""

    comm: Any = None
    arrays: dict[str, Any] = field(default_factory=dict)
    layout: Layout = field(default_factory=lambda: Layout(()))
    prefetch: bool = True
    debug: bool = False
    broadcast_from: int | None = 0

    def read(
        self,
        params: Any,
        comm: Any,
        units: Any,
        strategy: Any,
        mesh: Any,
        precision: Any,
        reshard: Any,
        frozen: Any,
        reduce_op: str,
        init: Any,
        shapes: Any,
    ) -> None:
        """Look at what the user gave; no communication."""
        self.comm, self.precision, self.init = comm, precision, init
        self.strategy = strategy_named(strategy)
        if reduce_op not in ("avg", "sum"):
            raise ValueError(f"fully_shard: reduce_op={reduce_op!r}; use 'avg' or 'sum'")
        self.reduce_op = reduce_op
        self.replicate_size, self.shard_size = _mesh(self.strategy, mesh, comm.size)
        self.reshard = reshard
        if not isinstance(reshard, bool) and not (
            isinstance(reshard, int) and 1 < reshard <= self.shard_size and self.shard_size % reshard == 0
        ):
            raise ValueError(
                f"fully_shard: reshard_after_forward={reshard!r}; use True, False, or a number of ranks that "
                f"divides {self.shard_size}"
            )
        leaves = _leaves(params, init, shapes)
        owners = _owners(leaves) if init is None else {}
        specs = {name: Spec(name, tuple(leaf.shape), leaf.dtype.name, True) for name, leaf in leaves.items()}
        shown = list(specs)
        chosen = (
            units.units([specs[n] for n in shown if n not in owners]) if isinstance(units, by_size) else units
        )
        unit_of, order = assign(
            [n for n in shown if n not in owners or not isinstance(units, by_size)], chosen
        )
        for alias, owner in owners.items():
            unit_of.setdefault(alias, unit_of[owner])
        self.shown = {unit: tuple(n for n in shown if unit_of[n] == unit) for unit in order}
        homes = dict(unit_of)
        shared = {owner for alias, owner in owners.items() if unit_of[alias] != unit_of[owner]}
        for owner in shared:
            homes[owner] = ROOT
        if shared and ROOT not in order:
            order = [*order, ROOT]
            self.shown[ROOT] = ()
        if shared:
            self.shown[ROOT] = tuple(n for n in shown if homes[n] == ROOT and n not in owners)
        is_frozen = frozen if callable(frozen) else _matcher(list(specs), list(frozen))
        final = [
            Spec(s.name, s.shape, s.dtype, not is_frozen(s.name))
            for s in specs.values()
            if s.name not in owners
        ]
        if ROOT in order and len(order) > 1:
            order = [ROOT] + [unit for unit in order if unit != ROOT]
        self.layout = plan(final, homes, order, self.shard_size, owners)
        self.kept = ROOT if ROOT in order and len(order) > 1 else None
        self.owners = owners
        self.homes = homes
        self.trainable = {s.name: s.trainable for s in final}
        self.arrays = (
            {} if init is not None else {name: leaf for name, leaf in leaves.items() if name not in owners}
        )
        self.sample = next(iter(leaves.values()))

    def connect(self) -> None:
        """The communicators of the mesh: gathers and reductions do not share."""
        comm, own = self.comm, []
        # Two each: a communicator runs its calls in order.
        shard = self.shard_size
        self.shard_rank, self.replicate_rank = comm.rank % shard, comm.rank // shard

        def group(color: int) -> Any:
            made = comm.split(color, comm.rank)
            own.append(made)
            return made

        self.gather_comm = group(self.replicate_rank) if shard > 1 else None
        self.reduce_comm = group(self.replicate_rank) if shard > 1 else None
        self.replicate_comm = group(self.shard_rank) if self.replicate_size > 1 else None
        partial = not isinstance(self.reshard, bool)
        self.part_comm = group(comm.rank // self.reshard) if partial and shard > 1 else None
        self.own_comms = own
        self.runtime = runtime_for(comm, self.sample, self.prefetch)

    def engine_fields(self) -> dict[str, Any]:
        """What ShardedModel starts with."""
        return {
            "comm": self.comm,
            "rank": self.comm.rank,
            "size": self.comm.size,
            "layout": self.layout,
            "strategy": self.strategy,
            "precision": self.precision,
            "shard_rank": self.shard_rank,
            "shard_size": self.shard_size,
            "replicate_rank": self.replicate_rank,
            "replicate_size": self.replicate_size,
            "gather_comm": self.gather_comm,
            "reduce_comm": self.reduce_comm,
            "replicate_comm": self.replicate_comm,
            "part_comm": self.part_comm,
            "_own_comms": self.own_comms,
            "runtime": self.runtime,
            "reduce_op": self.reduce_op,
            "reshard_after_forward": bool(self.reshard),
            "prefetch": self.prefetch,
            "debug": self.debug,
            "_trainable": self.trainable,
        }

    def build_units(self, model: ShardedModel) -> None:
        """Make every unit's memory and fill it, one unit after another: at most one is whole at a time."""
        home = {}
        for unit_layout in self.layout.units:
            kept = unit_layout.name == self.kept
            shards, whole, keep = [], [], []
            for index, group in enumerate(unit_layout.groups):
                shard, full, gradient = self._make_shard(model, unit_layout.name, index, group, kept)
                shards.append(shard)
                keep.append(full)
                if gradient is not None:
                    whole.append(gradient)
            unit = Unit(model, unit_layout, shards, self.shown[unit_layout.name], self.owners, kept)
            if whole:
                unit.whole = whole
            if model.stays(unit):
                computed = [
                    full
                    if s.dtypes.compute == s.dtypes.gather
                    else model.runtime.empty(s.group.padded, s.dtypes.compute)
                    for s, full in zip(shards, keep, strict=True)
                ]
                unit.kept_weights = Weights(keep, computed)
            for name in unit_layout.names:
                home[name] = unit
            if kept:
                model.root = unit
            else:
                model.units.append(unit)
            model._by_name[unit.name] = unit
        model._home = home

    def _make_shard(
        self, model: ShardedModel, unit: str, index: int, group: FlatGroup, kept: bool
    ) -> tuple[Shard, Any, Any]:
        """(the shard, the full weights if they stay, the whole gradients if they stay)."""
        dtypes = dtypes_of(group, self.precision)
        empty = model.runtime.empty
        own = slice(self.shard_rank * group.shard, (self.shard_rank + 1) * group.shard)
        full = None
        if kept or self.strategy.keeps_weights or self.shard_size == 1:
            full = empty(group.padded, dtypes.gather)
            full[...] = 0
            source = full[own]
        else:
            source = empty(group.shard, dtypes.gather)
        data = source if dtypes.master == dtypes.gather else empty(group.shard, dtypes.master)
        gradient = grad = None
        if group.trainable and not model.reduces_each and self.shard_size > 1:
            gradient = empty(group.padded, dtypes.reduce)
            grad = gradient[own]
        elif group.trainable:
            grad = empty(group.shard, dtypes.reduce)
        if grad is not None:
            grad[...] = 0
        self._fill(model, group, data, own)
        return Shard(unit, index, group, dtypes, data, source, grad), full, gradient

    def _fill(self, model: ShardedModel, group: FlatGroup, data: Any, own: slice) -> None:
        flat = model.runtime.empty(group.padded, numpy_dtype(group.dtype))
        flat[...] = 0
        views = views_of(group, flat)
        root = self.broadcast_from
        for name, view in views.items():
            if self.init is not None:
                view[...] = self.init(name, view.shape, numpy_dtype(group.dtype))
            elif root is None or root == self.comm.rank:
                view[...] = self.arrays[name]
        if self.init is None and root is not None and self.comm.size > 1 and flat.size:
            self.comm.broadcast(flat, root=root)
        cast_into(data, flat[own])


def _mesh(strategy: Strategy, mesh: tuple[int, int] | None, size: int) -> tuple[int, int]:
    """(replicate, shard) sizes."""
    if strategy.name != "hybrid_shard":
        if mesh is not None:
            raise ValueError(
                f"fully_shard: mesh={mesh!r} goes with strategy='hybrid_shard', not {strategy.name!r}"
            )
        return (1, size) if strategy.shards else (size, 1)
    if mesh is None or len(mesh) != 2 or mesh[0] * mesh[1] != size or min(mesh) < 1:
        raise ValueError(
            f"fully_shard: hybrid_shard needs mesh=(replicate, shard) with replicate * shard = {size} ranks, "
            f"not {mesh!r}"
        )
    return mesh[0], mesh[1]


@dataclass(frozen=True)
class _Shape:
    shape: tuple[int, ...]
    dtype: np.dtype


def _leaves(params: Any, init: Any, shapes: Any) -> dict[str, Any]:
    """name -> array (or shape), checked one by one."""
    if (init is None) != (shapes is None) or (params is None) == (init is None):
        raise TypeError("fully_shard: pass either params, or init= and shapes= together")
    if init is not None:
        found = {name: _shape(name, leaf) for name, leaf in _flatten_shapes(shapes)}
    else:
        found = dict(flatten(params))
        for name, leaf in found.items():
            _check_array(name, leaf)
    if not found:
        raise ValueError("fully_shard: there are no parameters")
    kinds = {
        type(leaf).__module__.partition(".")[0] for leaf in found.values() if not isinstance(leaf, _Shape)
    }
    if len(kinds) > 1:
        raise TypeError(
            f"fully_shard: parameters of several array libraries ({', '.join(sorted(kinds))}); pass arrays "
            "of one"
        )
    return found


def _flatten_shapes(shapes: Any) -> list[tuple[str, Any]]:
    def walk(tree: Any, prefix: str) -> list[tuple[str, Any]]:
        pair = (
            isinstance(tree, tuple)
            and len(tree) == 2
            and isinstance(tree[0], tuple)
            and not isinstance(tree[1], (tuple, list, Mapping))
        )
        if pair or hasattr(tree, "shape"):
            return [(prefix, tree)]
        items = (
            tree.items() if isinstance(tree, Mapping) else [(str(i), value) for i, value in enumerate(tree)]
        )
        return [leaf for key, value in items for leaf in walk(value, f"{prefix}.{key}" if prefix else key)]

    return walk(shapes, "")


def _shape(name: str, leaf: Any) -> _Shape:
    shape, dtype = (leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf
    try:
        return _Shape(
            tuple(int(n) for n in shape), numpy_dtype(dtype) if isinstance(dtype, str) else np.dtype(dtype)
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise TypeError(f"fully_shard: shapes: {name} is {leaf!r}; expected a (shape, dtype) pair") from error


def _check_array(name: str, leaf: Any) -> None:
    module = type(leaf).__module__.partition(".")[0]
    if module not in ("numpy", "cupy") or not hasattr(leaf, "flags"):
        raise TypeError(
            f"fully_shard: parameter {name!r} is a {type(leaf).__name__}; pass NumPy or CuPy arrays "
            "(np.asarray makes one)"
        )
    if leaf.dtype.hasobject or (
        leaf.dtype.kind in "OSUMmV" and not leaf.dtype.name.startswith(("bfloat", "float"))
    ):
        raise TypeError(f"fully_shard: parameter {name!r} has dtype {leaf.dtype}; pass an array of numbers")
    if not leaf.flags.c_contiguous:
        raise ValueError(
            f"fully_shard: parameter {name!r} (shape {leaf.shape}) is not C-contiguous; pass "
            "np.ascontiguousarray of it"
        )


def _owners(leaves: Mapping[str, Any]) -> dict[str, str]:
    """Tied names: alias -> the first name of the same memory."""
    first: dict[Any, str] = {}
    owners = {}
    for name, leaf in leaves.items():
        address = leaf.data.ptr if hasattr(leaf.data, "ptr") else leaf.__array_interface__["data"][0]
        key = (address, leaf.shape, leaf.dtype.str, leaf.dtype.name) if leaf.size else id(leaf)
        if key in first:
            owners[name] = first[key]
        else:
            first[key] = name
    return owners


def _matcher(names: Sequence[str], patterns: Sequence[str]) -> Callable[[str], bool]:
    taken = assign(names, [list(patterns)])[0] if patterns else {}
    return lambda name: taken.get(name, ROOT) != ROOT


def _agree(comm: Any, error: Exception | None) -> None:
    """Every rank raises if any rank found an error, each naming the first rank that did."""
    everybody = comm.all_gather_object(None if error is None else f"{type(error).__name__}: {error}")
    for rank, text in enumerate(everybody):
        if text is not None:
            if error is not None:
                raise error
            kind = TypeError if text.startswith("TypeError") else ValueError
            raise kind(f"fully_shard on rank {rank}: {text.partition(': ')[2]}")


def _compare_layouts(comm: Any, layout: Layout) -> None:
    digests = comm.all_gather_object(layout.digest())
    if len(set(digests)) == 1:
        return
    lines = comm.all_gather_object(layout.lines())
    for rank, theirs in enumerate(lines):
        if theirs == lines[0]:
            continue
        for at in range(max(len(theirs), len(lines[0]))):
            mine = lines[0][at] if at < len(lines[0]) else "nothing more"
            other = theirs[at] if at < len(theirs) else "nothing more"
            if mine != other:
                raise ValueError(
                    f"fully_shard: the ranks bring different models: parameter {at} is {mine} on rank 0, and "
                    f"{other} on rank {rank}"
                )


def _compare_values(comm: Any, arrays: Mapping[str, Any]) -> None:
    """Equal arrays on all ranks, or the first name that differs."""
    digests = {}
    for name, array in arrays.items():
        host = array if isinstance(array, np.ndarray) else array.get()
        digests[name] = hashlib.sha256(np.ascontiguousarray(host).tobytes()).hexdigest()[:16]
    everybody = comm.all_gather_object(digests)
    for name in digests:
        for rank, theirs in enumerate(everybody):
            if theirs[name] != everybody[0][name]:
                raise ValueError(
                    f"fully_shard: parameter {name!r} differs between ranks 0 and {rank}; start from equal "
                    "weights, or leave broadcast_from=0 to take rank 0's"
                )

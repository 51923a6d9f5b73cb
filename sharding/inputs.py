"""What the user brings: trees of arrays or of shapes, read and checked, nothing changed.

Gives leaves by name, the names that are tied, and the comparison of what the ranks bring.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .layout import numpy_dtype
from .policy import is_floating
from .tensorfile import TAGS
from .tree import flatten

__all__ = ["compare_lines", "compare_values", "frozen_owners", "read_leaves", "tied_names"]


@dataclass(frozen=True)
class Shape:
    """A parameter that is not there yet."""

    shape: tuple[int, ...]
    dtype: np.dtype


def read_leaves(params: Any, init: Any, shapes: Any) -> dict[str, Any]:
    """name -> array (or Shape), in the order of the containers. TypeError or ValueError names the culprit."""
    if (init is None) != (shapes is None) or (params is None) == (init is None):
        raise TypeError("fully_shard: pass either params, or init= and shapes= together")
    deferred = init is not None
    found: dict[str, Any] = {}
    for name, leaf in _walk_shapes(shapes) if deferred else flatten(params):
        if name in found:
            raise ValueError(f"fully_shard: two parameters have the name {name!r}; rename one")
        found[name] = _read_shape(name, leaf) if deferred else leaf
        _check_dtype(name, found[name]) if deferred else _check_array(name, leaf)
    if not found:
        raise ValueError("fully_shard: there are no parameters")
    for name in found:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"fully_shard: parameter {name!r} has a name that no file can hold ({error.reason}); rename "
                "it"
            ) from error
        parts = name.split(".")
        for stop in range(1, len(parts)):
            if ".".join(parts[:stop]) in found:
                raise ValueError(
                    f"fully_shard: {'.'.join(parts[:stop])!r} is a parameter and {name!r} lies below it; "
                    "rename one"
                )
    if not deferred:
        kinds = {type(leaf).__module__.partition(".")[0] for leaf in found.values()}
        if len(kinds) > 1:
            raise TypeError(
                f"fully_shard: parameters of several array libraries ({', '.join(sorted(kinds))}); pass "
                "arrays of one"
            )
    return found


def _check_array(name: str, leaf: Any) -> None:
    module = type(leaf).__module__.partition(".")[0]
    if module not in ("numpy", "cupy") or not hasattr(leaf, "flags"):
        raise TypeError(
            f"fully_shard: parameter {name!r} is a {type(leaf).__name__}; pass NumPy or CuPy arrays "
            "(np.asarray makes one)"
        )
    _check_dtype(name, leaf)
    if not leaf.flags.c_contiguous:
        raise ValueError(
            f"fully_shard: parameter {name!r} (shape {leaf.shape}, strides {leaf.strides}) is not "
            "C-contiguous; pass np.ascontiguousarray of it (if it is the transpose of another parameter, "
            "leave it out and transpose where it is used)"
        )


def _check_dtype(name: str, leaf: Any) -> None:
    dtype = leaf.dtype
    if not is_floating(dtype) and dtype.kind not in "biu":
        raise TypeError(
            f"fully_shard: parameter {name!r} has dtype {dtype}; pass real numbers, integers or booleans"
        )
    if dtype.name not in TAGS:
        raise TypeError(
            f"fully_shard: parameter {name!r} has dtype {dtype}, which no checkpoint can hold; pass one of "
            f"{', '.join(tag for tag in TAGS if tag != 'complex64')}"
        )
    if not dtype.isnative:
        raise TypeError(
            f"fully_shard: parameter {name!r} has dtype {dtype.str}, of the other byte order; pass "
            "array.astype(array.dtype.newbyteorder('='))"
        )


def _walk_shapes(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """As tree.flatten, with (shape, dtype) pairs and things with .shape as leaves."""
    pair = isinstance(tree, tuple) and len(tree) == 2 and isinstance(tree[0], (tuple, list))
    if (
        pair
        and not isinstance(tree[1], (tuple, list, Mapping))
        and all(isinstance(n, (int, np.integer)) for n in tree[0])
    ):
        yield prefix, tree
    elif hasattr(tree, "shape") or not isinstance(tree, (Mapping, tuple, list)):
        yield prefix, tree
    else:
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, value in items:
            yield from _walk_shapes(value, f"{prefix}.{key}" if prefix else str(key))


def _read_shape(name: str, leaf: Any) -> Shape:
    try:
        shape, dtype = (leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf
        sizes = tuple(int(n) for n in shape)
        if min(sizes, default=0) < 0:
            raise ValueError("negative")
        return Shape(sizes, numpy_dtype(dtype) if isinstance(dtype, str) else np.dtype(dtype))
    except (TypeError, ValueError, AttributeError) as error:
        raise TypeError(
            f"fully_shard: shapes: {name!r} is {leaf!r}; expected a (shape, dtype) pair such as "
            "((4, 3), 'float32')"
        ) from error


def tied_names(leaves: Mapping[str, Any]) -> dict[str, str]:
    """alias -> the first name of the same array. ValueError for arrays that share memory only in part."""
    first: dict[int, tuple[str, Any]] = {}
    owners = {}
    spans = []
    for name, leaf in leaves.items():
        if isinstance(leaf, (Shape, np.generic)) or not leaf.size:  # a NumPy scalar has no memory to share
            continue
        # Not `leaf.data` of a NumPy array: it raises for ml_dtypes' types.
        address = leaf.__array_interface__["data"][0] if isinstance(leaf, np.ndarray) else leaf.data.ptr
        if address in first:
            owner, other = first[address]
            if (other.shape, other.dtype) == (leaf.shape, leaf.dtype):
                owners[name] = owner
                continue
        first.setdefault(address, (name, leaf))
        spans.append((address, address + leaf.nbytes, name))
    spans.sort()
    for (_, stop, name), (start, _, other) in zip(spans, spans[1:], strict=False):
        if start < stop:
            raise ValueError(
                f"fully_shard: {name!r} and {other!r} share memory in part, or with another shape or dtype; "
                "tie whole arrays (the same array under both names), or pass a copy"
            )
    return owners


def frozen_owners(
    frozen: Sequence[str] | Callable[[str], bool],
    names: Sequence[str],
    owners: Mapping[str, str],
    matcher: Callable[[Sequence[str], Sequence[str], str], Callable[[str], bool]],
) -> set[str]:
    """The parameters that `frozen` freezes; a tied one goes by all its names."""
    if callable(frozen):
        takes = frozen
    else:
        patterns = [frozen] if isinstance(frozen, str) else list(frozen)
        takes = matcher(names, patterns, "frozen")
    return {owners.get(name, name) for name in names if takes(name)}


# --- what the ranks bring -----------------------------------------------------------------------------------


def compare_lines(comm: Any, lines: Sequence[str], what: str) -> None:
    """ValueError, on every rank, with the first line that differs between ranks. Collective."""
    digests = comm.all_gather_object(hashlib.sha256("\n".join(lines).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    everybody = comm.all_gather_object(list(lines))
    for at in range(max(len(theirs) for theirs in everybody)):
        here = [theirs[at] if at < len(theirs) else "nothing more" for theirs in everybody]
        for rank, line in enumerate(here):
            if line != here[0]:
                raise ValueError(
                    f"{what}: the ranks differ: rank 0 has {here[0]}, and rank {rank} has {line}; give all "
                    "ranks the same"
                )


def compare_values(comm: Any, arrays: Mapping[str, Any]) -> None:
    """ValueError, on every rank, with the first parameter whose values differ between ranks. Collective."""
    digests = {}
    for name, array in arrays.items():
        host = array if isinstance(array, np.ndarray) else array.get()
        digests[name] = hashlib.sha256(host.reshape(-1).view(np.uint8).data).hexdigest()[:16]
    everybody = comm.all_gather_object(digests)
    for name in digests:
        for rank, theirs in enumerate(everybody):
            if theirs[name] != everybody[0][name]:
                raise ValueError(
                    f"fully_shard: parameter {name!r} differs between ranks 0 and {rank}; start from equal "
                    "weights, or leave broadcast_from=0 to take rank 0's"
                )

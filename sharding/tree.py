"""Nested containers of arrays as dotted names, and back.

A tree is a dict, list or tuple of trees, or a leaf (an array). The name of a leaf is its path: `blocks.0.w`.
A flat dict whose keys already contain dots is a tree like any other: its keys are taken as they are. Knows
nothing of sharding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["common_prefix", "fill", "flatten", "mapping_paths", "nest", "rebuild", "replaced"]

Tree = Any


def flatten(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, leaf) of every leaf, in the order of the containers. A bare leaf has the name `prefix`."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if not isinstance(key, str):
                raise TypeError(
                    f"parameter names are strings; {prefix or 'the top level'} has the key {key!r}"
                )
            yield from flatten(value, f"{prefix}.{key}" if prefix else key)
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from flatten(value, f"{prefix}.{index}" if prefix else str(index))
    else:
        yield prefix, tree


def mapping_paths(tree: Tree, prefix: str = "") -> frozenset[str]:
    """The paths of all dicts in the tree: `nest` needs them to tell {"0": x} from [x]."""
    paths: set[str] = set()
    if isinstance(tree, Mapping):
        paths.add(prefix)
    if isinstance(tree, (Mapping, list, tuple)):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, value in items:
            paths |= mapping_paths(value, f"{prefix}.{key}" if prefix else str(key))
    return frozenset(paths)


def rebuild(tree: Tree, leaves: Mapping[str, Any], prefix: str = "") -> Tree:
    """A tree of the same containers with `leaves[name]` in place of each leaf."""
    if isinstance(tree, Mapping):
        return {
            key: rebuild(value, leaves, f"{prefix}.{key}" if prefix else key) for key, value in tree.items()
        }
    if isinstance(tree, (list, tuple)):
        items = [
            rebuild(value, leaves, f"{prefix}.{index}" if prefix else str(index))
            for index, value in enumerate(tree)
        ]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return leaves[prefix]


def common_prefix(names: list[str]) -> str:
    """The longest dotted path that all names lie under: `blocks.0` of `blocks.0.w` and `blocks.0.b`."""
    parts = [name.split(".") for name in names]
    shared: list[str] = []
    for column in zip(*parts, strict=False):
        if len(set(column)) != 1:
            break
        shared.append(column[0])
    return ".".join(shared)


def nest(names: list[str], prefix: str, mappings: frozenset[str] = frozenset()) -> Tree:
    """The tree under `prefix` that holds just these names; its leaves are the full names.

    A level whose keys are 0, 1, 2, ... becomes a list, unless its path is one of `mappings`.
    """
    root: dict[str, Any] = {}
    for name in names:
        path = name[len(prefix) :].lstrip(".").split(".") if name != prefix else []
        if not path:
            return name
        level = root
        for key in path[:-1]:
            level = level.setdefault(key, {})
        level[path[-1]] = name
    return _lists(root, prefix, mappings)


def _lists(level: Any, path: str, mappings: frozenset[str]) -> Any:
    if not isinstance(level, dict):
        return level
    done = {key: _lists(value, f"{path}.{key}" if path else key, mappings) for key, value in level.items()}
    if path not in mappings and list(done) == [str(i) for i in range(len(done))]:
        return list(done.values())
    return done


def replaced(skeleton: Tree, tree: Tree, leaves: Mapping[str, Any], path: str) -> str | None:
    """Where `tree` (from `fill`, and then in a user's hands) has another object than `leaves` say: `g['w']`.

    None: every leaf is what it was. A bare leaf has no place in which it could be replaced.
    """
    if isinstance(skeleton, (dict, list)):
        keys = skeleton if isinstance(skeleton, dict) else range(len(skeleton))
        for key in keys:
            here = f"{path}[{key!r}]"
            try:
                below = tree[key]
            except (KeyError, IndexError):
                return here
            if (found := replaced(skeleton[key], below, leaves, here)) is not None:
                return found
        return None
    return None if tree is leaves[skeleton] else path


def fill(skeleton: Tree, leaves: Mapping[str, Any]) -> Tree:
    """`skeleton` (from `nest`: its leaves are names) with each name replaced by `leaves[name]`."""
    if isinstance(skeleton, dict):
        return {key: fill(value, leaves) for key, value in skeleton.items()}
    if isinstance(skeleton, list):
        return [fill(value, leaves) for value in skeleton]
    return leaves[skeleton]

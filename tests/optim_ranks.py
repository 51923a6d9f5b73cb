"""What the tests of optimizers share: a small model, gradients given to it, and its weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from sharding_ranks import opened  # type: ignore[import-not-found]

from pynccl.testing import run_ranks
from sharding.tree import flatten

PARAMS: dict[str, Any] = {
    "embed": np.arange(12, dtype=np.float32).reshape(4, 3),
    "blocks": [{"w": np.ones((3, 3), np.float32), "bias": np.ones(3, np.float32)} for _ in range(2)],
    "head": {"bias": np.ones(5, np.float32)},
}
ONES: dict[str, Any] = {
    "embed": 1,
    "blocks.0.w": 1,
    "blocks.0.bias": 1,
    "blocks.1.w": 1,
    "blocks.1.bias": 1,
    "head.bias": 1,
}


def give(model: Any, grads: dict[str, Any]) -> None:
    """A microbatch whose summed gradients are exactly `grads`: rank 0 gives them, the others give zeros."""
    model.zero_grad()
    with model.microbatch():
        for unit in opened(model):
            if model.rank == 0:
                for name, view in unit.gradient_views().items():
                    view[...] = grads[name]


def give_all(model: Any) -> None:
    """Gradients of 1 for everything, the root unit's included."""
    model.zero_grad()
    with model.microbatch():
        for unit in opened(model):
            one_on_rank_0(model, unit)
        if model.root is not None:
            with model.root.backward():
                one_on_rank_0(model, model.root)


def one_on_rank_0(model: Any, unit: Any) -> None:
    """Write 1 on rank 0 and 0 on the others into the open unit's gradients."""
    for view in unit.gradient_views().values():
        view[...] = model.rank == 0


def weights(model: Any) -> dict[str, np.ndarray]:
    """All parameters, whole, in the dtype that is gathered."""
    found = {}
    with model.evaluate():
        for unit in model:
            with unit.forward():
                found.update({name: np.array(view) for name, view in unit.weight_views().items()})
    return found


def same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    """The same names, and the same bytes under each."""
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def flat(tree: Any) -> list[tuple[str, np.ndarray]]:
    """(name, array) of the arrays in a tree."""
    return list(flatten(tree))


def alone(fn: Any) -> Any:
    """`fn` on one rank of the host library; its result."""
    return run_ranks(1, fn, library="host", processes=False)[0]

"""What the tests of checkpoints share: an awkward model, its training, and its state for comparing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from sharding_ranks import opened  # type: ignore[import-not-found]

from pynccl.testing import run_ranks
from sharding import AdamW, fully_shard
from sharding.checkpoint import save
from sharding.layout import pieces

UNITS: list[Any] = ["embed", "blocks.*", "head"]
GROUPS = {"*.b": {"weight_decay": 0.0, "lr": 0.5}, "embed": {"lr": 0.125}}


def parameters() -> dict[str, Any]:
    """Small and awkward: a scalar, one element, three, none, two dtypes in a unit, a tied matrix."""
    rng = np.random.default_rng(7)
    embed = rng.standard_normal((5, 3))
    return {
        "embed": embed,
        "blocks": [
            {"w": rng.standard_normal((3, 4)), "b": rng.standard_normal(3).astype(np.float32)}
            for _ in range(2)
        ],
        "head": {
            "w": embed,
            "scale": np.array(1.5),
            "one": np.ones(1),
            "none": np.zeros((0, 4)),
            "frozen": np.arange(6, dtype=np.float32),
        },
    }


NAMES = ["embed", "blocks.0.w", "blocks.0.b", "blocks.1.w", "blocks.1.b", "head.scale", "head.one"]
NAMES += ["head.none", "head.frozen"]


def make(comm: Any, lr: float = 0.25, params: Any = None, **options: Any) -> tuple[Any, Any]:
    """The model and its optimizer; `options` of fully_shard."""
    settings = {"units": UNITS, "frozen": ["head.frozen"], "reduce_op": "sum", **options}
    model = fully_shard(parameters() if params is None else params, comm, **settings)
    return model, AdamW(model, lr=lr, groups=GROUPS)


def train(model: Any, opt: Any, steps: int) -> None:
    """Steps whose gradients depend on the name, the element and the step alone: rank 0 brings them."""
    for _ in range(steps):
        backward(model, opt.steps)
        opt.step()
        model.zero_grad()


def backward(model: Any, seed: int, last: bool = True) -> None:
    """A microbatch with the gradients of one step."""
    with model.microbatch(last=last):
        for unit in opened(model):
            if model.rank == 0:
                for name, grad in unit.gradient_views().items():
                    grad[...] = np.arange(grad.size).reshape(grad.shape) % 5 + len(name) + seed - 4


def state_of(model: Any, opt: Any) -> dict[str, Any]:
    """This rank's part of everything: array/name -> (start, values); and the optimizer's own words."""
    found: dict[str, Any] = {}
    for shard in model.shards:
        slots = opt.state.get(shard.key, {}) if opt is not None else {}
        for kind, array in {"param": shard.data, **slots}.items():
            for piece in pieces(shard.group, model.shard_rank):
                values = np.array(array[piece.shard_start : piece.shard_stop])
                found[f"{kind}/{piece.name}"] = (piece.param_start, values)
    if opt is not None:
        found["hyper"] = {name: opt.hyper(name) for name in NAMES if name != "head.frozen"}
        found["steps"] = opt.steps
    return found


def joined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Whole flat arrays from the ranks' parts (replicas must agree)."""
    whole: dict[str, Any] = {}
    for rank in ranks:
        for key, part in rank.items():
            if key in ("hyper", "steps"):
                assert whole.setdefault(key, part) == part
                continue
            start, values = part
            known = whole.setdefault(key, {})
            for at, value in enumerate(values):
                assert known.setdefault(start + at, value) == value
    return {
        key: np.array([part[i] for i in range(len(part))]) if key not in ("hyper", "steps") else part
        for key, part in whole.items()
    }


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bitwise."""
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, np.ndarray):
            assert got[key].dtype == value.dtype
            assert got[key].tobytes() == value.tobytes(), key
        else:
            assert got[key] == value, key


def assert_unchanged(part: dict[str, Any], before: dict[str, Any]) -> None:
    """Bitwise, of one rank's part."""
    assert part.keys() == before.keys()
    for key, value in before.items():
        if key in ("hyper", "steps"):
            assert part[key] == value
        else:
            assert part[key][0] == value[0] and part[key][1].tobytes() == value[1].tobytes(), key


def reference(steps: int) -> dict[str, Any]:
    """The state after so many steps on one rank that never stopped."""

    def rank(comm: Any) -> dict[str, Any]:
        model, opt = make(comm)
        train(model, opt, steps)
        return state_of(model, opt)

    return joined(run_ranks(1, rank, library="host"))


def save_rank(comm: Any, folder: Path, steps: int, options: dict[str, Any], keywords: dict[str, Any]) -> str:
    model, opt = make(comm, **options)
    train(model, opt, steps)
    return str(save(folder, model, opt, **keywords))


def saved(folder: Path, n: int = 3, steps: int = 3, keywords: Any = None, **options: Any) -> Path:
    """A checkpoint after `steps` steps on `n` ranks."""
    return Path(run_ranks(n, save_rank, folder, steps, options, keywords or {}, library="host")[0])


def full_disk(*_: Any) -> Any:
    """In place of a function that writes."""
    raise OSError(28, "no space left")

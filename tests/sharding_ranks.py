"""What the tests of the sharding engine share: a small exact model, and ranks that are threads.

The model is a chain of linear layers on small integers. Everything it computes is an integer (or a fraction
with a power of two below) far under 2**53, so float64 gives the same bits in any order of summation, and
sharded results are compared for equality.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from pynccl.testing import run_ranks
from sharding import fully_shard
from sharding.layout import pieces

RANKS = (1, 2, 3, 4)
ROWS = 12  # of a batch: divides over 1, 2, 3 and 4 ranks
LR = 2.0**-4
each_n = pytest.mark.parametrize("n", RANKS)

# Every way to hold a model, as arguments of fully_shard; those that not every number of ranks can have are
# left out by `ways`.
WAYS: dict[str, dict[str, Any]] = {
    "full_shard": {},
    "full_shard, kept after forward": {"reshard_after_forward": False},
    "full_shard, halves kept": {"reshard_after_forward": 2},
    "full_shard, no prefetch": {"prefetch": False},
    "shard_grad_op": {"strategy": "shard_grad_op"},
    "shard_optimizer": {"strategy": "shard_optimizer"},
    "no_shard": {"strategy": "no_shard"},
    "hybrid_shard": {"strategy": "hybrid_shard", "mesh": True},
}


def ways(n: int) -> dict[str, dict[str, Any]]:
    """Those of WAYS that n ranks can have."""
    found = {}
    for name, way in WAYS.items():
        if way.get("reshard_after_forward") == 2 and n % 2:
            continue
        found[name] = {**way, "mesh": (2, n // 2) if n % 2 == 0 else (1, n)} if "mesh" in way else way
    return found


# --- the chain ----------------------------------------------------------------------------------------------


def chain(layers: int = 3, width: int = 3) -> dict[str, Any]:
    """Layers of w (width, width) and b (width,), small integers."""
    rng = np.random.default_rng(layers)
    return {
        "layers": [
            {
                "w": rng.integers(-1, 2, (width, width)).astype(np.float64),
                "b": rng.integers(-2, 3, width).astype(np.float64),
            }
            for _ in range(layers)
        ]
    }


def batch(rank: int, n: int, step: int = 0, width: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """This rank's rows (inputs, targets) of batch number `step`."""
    rng = np.random.default_rng(1000 + step)
    rows = rng.integers(-3, 4, (2, ROWS, width)).astype(np.float64)
    return rows[0, rank::n], rows[1, rank::n]


def forward(model: Any, x: np.ndarray, units: Iterable[Any] | None = None) -> list[np.ndarray]:
    """The inputs of all layers."""
    saved = [x]
    for unit in units if units is not None else model:
        with unit.forward() as w:
            saved.append(saved[-1] @ w["w"] + w["b"])
    return saved


def backward(model: Any, saved: list[np.ndarray], t: np.ndarray) -> None:
    """The gradients of sum(output * t)."""
    grad = t
    for position in reversed(range(len(model))):
        with model[position].backward() as (w, g):
            g["w"][...] = saved[position].T @ grad
            g["b"][...] = grad.sum(0)
            grad = grad @ w["w"].T


def opened(model: Any) -> Iterator[Any]:
    """After a forward pass without a computation: the units in backward order, each open for gradients."""
    for unit in model:
        with unit.forward():
            pass
    for unit in reversed(model):
        with unit.backward():
            yield unit


def train(model: Any, x: np.ndarray, t: np.ndarray, **kinds: bool) -> None:
    """One microbatch."""
    with model.microbatch(**kinds):
        backward(model, forward(model, x), t)


def reference(params: dict[str, Any], step: int = 0) -> dict[str, np.ndarray]:
    """The gradients of the whole batch, by name, without any engine."""
    x, t = batch(0, 1, step, len(params["layers"][0]["b"]))
    saved = [x]
    for layer in params["layers"]:
        saved.append(saved[-1] @ layer["w"] + layer["b"])
    grads, grad = {}, t
    for i in reversed(range(len(params["layers"]))):
        grads[f"layers.{i}.w"], grads[f"layers.{i}.b"] = saved[i].T @ grad, grad.sum(0)
        grad = grad @ params["layers"][i]["w"].T
    return grads


def stepped(params: dict[str, Any], grads: dict[str, np.ndarray], lr: float) -> dict[str, Any]:
    """Plain gradient descent."""
    return {
        "layers": [
            {k: layer[k] - lr * grads[f"layers.{i}.{k}"] for k in ("w", "b")}
            for i, layer in enumerate(params["layers"])
        ]
    }


def flat(params: dict[str, Any]) -> dict[str, np.ndarray]:
    """A chain's arrays by name."""
    return {f"layers.{i}.{k}": v for i, layer in enumerate(params["layers"]) for k, v in layer.items()}


# --- what a rank holds --------------------------------------------------------------------------------------


def assert_shards(model: Any, what: str, expected: dict[str, Any]) -> None:
    """`Shard.data` or `Shard.grad` of this rank equal the parts of `expected` (name -> array) bit for bit.

    Padding is zero; names that are not expected are not looked at.
    """
    for shard in model.shards:
        array = getattr(shard, what)
        if array is None:
            continue
        padding = np.ones(array.size, bool)
        for piece in pieces(shard.group, model.shard_rank):
            mine = slice(piece.shard_start, piece.shard_stop)
            padding[mine] = False
            if piece.name in expected:
                whole = np.asarray(expected[piece.name]).reshape(-1)[piece.param_start : piece.param_stop]
                np.testing.assert_array_equal(array[mine], whole, err_msg=f"{what} of {piece.name}")
        assert not array[padding].any()


def give(model: Any, grads: Callable[[str], Any] | dict[str, Any], **kinds: bool) -> None:
    """A microbatch in which this rank's gradient of each parameter is that of its name (missing: zero)."""
    find = grads.get if isinstance(grads, dict) else grads
    elsewhere = {name for unit in model for name in unit.shown}
    with model.microbatch(**kinds):
        for unit in model:
            with unit.forward():
                pass
        for unit in reversed(model.all_units):
            with unit.backward():
                for name, view in unit.gradient_views().items():
                    value = find(name)
                    if value is not None and not (unit.kept and name in elsewhere):
                        view[...] = value


# --- ranks that are threads ---------------------------------------------------------------------------------


class LeftError(ConnectionError):
    """Another rank has aborted the communicator."""


class FakeComm:
    """A communicator between threads that does each call at once, and notes it in `log`.

    It has exactly the protocol of sharding.Comm: no streams and no memory of its own.
    """

    def __init__(self, world: _World, rank: int, log: list[Any], title: str = "world") -> None:
        self._world, self.rank, self.size = world, rank, world.size
        self.log, self.title = log, title
        self._splits = 0
        self.made: list[FakeComm] = []
        self.ended: str | None = None

    def _meet(self, mine: Any) -> list[Any]:
        assert self.ended is None, f"{self.title} was {self.ended}"
        return self._world.meet(self.rank, mine)

    def _note(self, call: str, array: Any, op: Any = None) -> None:
        self.log.append((call, self.title, array.size) if op is None else (call, self.title, array.size, op))

    def all_gather(self, x: Any, out: Any = None, *, stream: Any = None) -> Any:
        assert stream is None and out is not None and out.size == x.size * self.size
        self._note("all_gather", out)
        parts = self._meet(x.copy())
        assert {part.dtype for part in parts} == {out.dtype}
        out[...] = np.concatenate(parts)
        return out

    def _reduced(self, x: Any, op: str) -> Any:
        parts = self._meet(x.copy())
        assert {(part.dtype, part.size) for part in parts} == {(x.dtype, x.size)}
        total = parts[0]
        for part in parts[1:]:
            total = np.maximum(total, part) if op == "max" else total + part
        return total / self.size if op == "avg" else total

    def reduce_scatter(self, x: Any, out: Any = None, op: Any = "sum", *, stream: Any = None) -> Any:
        assert stream is None and out is not None and x.size == out.size * self.size
        self._note("reduce_scatter", x, op)
        out[...] = self._reduced(x, op)[self.rank * out.size : (self.rank + 1) * out.size]
        return out

    def all_reduce(self, x: Any, out: Any = None, op: Any = "sum", *, stream: Any = None) -> Any:
        assert stream is None and out is None
        self._note("all_reduce", x, op)
        x[...] = self._reduced(x, op)
        return x

    def broadcast(self, x: Any, root: int = 0) -> Any:
        self._note("broadcast", x)
        x[...] = self._meet(x.copy())[root]
        return x

    def all_gather_object(self, obj: Any) -> list[Any]:
        return self._meet(obj)

    def split(self, color: int, key: int = 0) -> FakeComm:
        self._splits += 1
        made = self._world.child(self._splits, color)
        members = [r for _, r, c in sorted((k, r, c) for r, (c, k) in enumerate(self._meet((color, key))))
                   if c == color]  # fmt: skip
        made.size = len(members)
        self._meet(None)
        self.made.append(FakeComm(made, members.index(self.rank), self.log, f"split {self._splits}"))
        return self.made[-1]

    def destroy(self) -> None:
        self.ended = self.ended or "destroyed"

    def abort(self) -> None:
        if self.ended is None:
            self.ended = "aborted"
            self._world.leave(self.rank)


class _World:
    """Where threads meet: everybody's value, once all are there."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._condition = threading.Condition()
        self._values: dict[int, Any] = {}
        self._done: tuple[int, list[Any]] = (0, [])
        self._left: int | None = None
        self._children: dict[tuple[int, int], _World] = {}

    def meet(self, rank: int, value: Any) -> list[Any]:
        with self._condition:
            turn = self._done[0]
            assert rank not in self._values
            self._values[rank] = value
            if len(self._values) == self.size:
                self._done = (turn + 1, [self._values[r] for r in range(self.size)])
                self._values = {}
                self._condition.notify_all()
            elif not self._condition.wait_for(lambda: self._done[0] > turn or self._left is not None, 20):
                raise TimeoutError(f"rank {rank} waited alone")
            if self._done[0] == turn:
                raise LeftError(f"rank {self._left} has left")
            return self._done[1]

    def leave(self, rank: int) -> None:
        with self._condition:
            self._left = rank if self._left is None else self._left
            self._condition.notify_all()

    def child(self, number: int, color: int) -> _World:
        with self._condition:
            return self._children.setdefault((number, color), _World(0))


def run_threads(n: int, fn: Callable[[FakeComm], Any]) -> list[Any]:
    """`fn(comm)` on n threads; their results by rank, or the first exception."""
    world = _World(n)
    results: list[Any] = [None] * n
    errors: list[BaseException] = []

    def be(rank: int) -> None:
        try:
            results[rank] = fn(FakeComm(world, rank, []))
        except BaseException as error:
            errors.append(error)
            world.leave(rank)

    threads = [threading.Thread(target=be, args=(rank,), daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return results


def alone(fn: Callable[[FakeComm], Any]) -> Any:
    """`fn` on one rank; its result."""
    return run_threads(1, fn)[0]


# --- ranks on the host library ------------------------------------------------------------------------------


def host(n: int, fn: Callable[..., Any]) -> list[Any]:
    """`fn(comm)` in n processes; their results by rank."""
    return run_ranks(n, fn, library="host", timeout=60)


def sharded(comm: Any, params: Any = None, **way: Any) -> Any:
    """A chain whose layers are units and whose gradients are summed, unless `way` says otherwise."""
    given = {"units": ["layers.*"], "reduce_op": "sum", **way}
    return fully_shard(chain() if params is None else params, comm, **given)


# --- three units whose calls can be told apart --------------------------------------------------------------

# Units of different sizes, so that a call in the log says whose it is.
SIZES = {"a": 48, "b": 144, "c": 240}


def abc(comm: Any, **way: Any) -> Any:
    """A model of the units in SIZES."""
    return fully_shard({name: np.zeros(size) for name, size in SIZES.items()}, comm, units=list(SIZES), **way)


def story(comm: FakeComm, start: int = 0) -> list[str]:
    """The log in words: `gather a`, `reduce a`, `over replicas a`, and what the test itself noted."""
    kinds = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "over replicas"}
    names = {size: name for name, size in SIZES.items()}
    names |= {size // 2: name for name, size in SIZES.items() if size // 2 not in names}
    found = []
    for entry in comm.log[start:]:
        if isinstance(entry, str):
            found.append(entry)
        elif entry[0] == "all_reduce" and entry[2] == 1:
            continue  # the meeting at the end
        elif entry[0] in kinds:
            found.append(f"{kinds[entry[0]]} {names[entry[2]]}")
    return found


def walk(model: Any, comm: FakeComm, skip: str = "", **kinds: bool) -> list[str]:
    """A microbatch that notes when each unit computes; its story."""
    start = len(comm.log)
    with model.microbatch(**kinds):
        for unit in model:
            if unit.name not in skip:
                with unit.forward():
                    comm.log.append(f"forward {unit.name}")
        for unit in reversed(model):
            if unit.name not in skip:
                with unit.backward():
                    comm.log.append(f"backward {unit.name}")
    return story(comm, start)

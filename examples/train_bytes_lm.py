"""Data-parallel training of a small GPT of bytes with pynccl alone: every rank holds the whole model.

    python -m examples.train_bytes_lm                                  # alone
    python -m pynccl.launch -n 2 -m examples.train_bytes_lm            # two ranks share each batch

Three calls make it data-parallel: rank 0's weights are broadcast, and at each step the gradients and the loss
are averaged over the ranks. Each rank computes its own part of the batch, so the result is that of one rank
on the whole batch, up to the rounding of sums. It trains in float64 to show exactly that: training magnifies
every difference, and in float32 the losses of one rank and two drift apart.

The model is `numpy_gpt.py`'s, which also shows the same training with the model sharded over the ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import pynccl
from examples.numpy_gpt import (
    Array,
    Shape,
    array_module,
    batch_problem,
    corpus,
    gpt,
    initial,
    loss_and_gradients,
    mean_over_ranks,
    part_of_batch,
)
from examples.progress import progress_bar

SMALL = Shape(blocks=1, width=64, heads=4, context=48)


@dataclass(frozen=True)
class Settings:
    steps: int = 100
    batch: int = 32  # texts per step, over all ranks together
    rate: float = 4e-3
    seed: int = 1


def train(comm: Any, settings: Settings, shape: Shape, progress: Callable[[int, float], None]) -> list[float]:
    """The mean loss (nats per byte) of each step's whole batch, the same list on every rank."""
    xp = array_module(comm)
    shapes = shape.parameters()
    parameters = Flat(shapes, xp.zeros(size_of(shapes), "f8"))
    gradients = Flat(shapes, comm.empty(size_of(shapes), "f8"))  # the library's own memory: its fastest way
    units, layers = whole_units(parameters.tree, gradients.tree), gpt(shape, xp)
    if comm.rank == 0:
        copy_into(parameters.tree, initial(shape, xp, "f8", settings.seed))
    comm.broadcast(parameters.buffer, root=0)
    optimizer = PlainAdamW(xp, parameters.buffer, rate=settings.rate)

    text, random = corpus(), np.random.default_rng(settings.seed)  # the same on every rank
    losses = []
    for step in range(settings.steps):
        inputs, targets = part_of_batch(comm, random, text, settings.batch, shape.context, xp)
        loss = loss_and_gradients(units, layers, inputs, targets)
        add_tied(gradients.tree, units)
        comm.all_reduce(gradients.buffer, op="avg")
        optimizer.step(gradients.buffer)
        losses.append(mean_over_ranks(comm, loss, xp))
        progress(step, losses[-1])
    return losses


class Flat:
    """A tree of arrays that are views of one flat buffer: one all_reduce moves all of them, with no copy."""

    def __init__(self, shapes: Any, buffer: Array) -> None:
        if buffer.size != size_of(shapes):
            raise ValueError(
                f"the buffer has {buffer.size} elements; make it {size_of(shapes)} for these shapes"
            )
        self.buffer, self._next = buffer, 0
        self.tree = self._views(shapes)

    def _views(self, shapes: Any) -> Any:
        if isinstance(shapes, dict):
            return {name: self._views(below) for name, below in shapes.items()}
        if isinstance(shapes, list):
            return [self._views(below) for below in shapes]
        start, self._next = self._next, self._next + math.prod(shapes)
        return self.buffer[start : self._next].reshape(shapes)


def size_of(shapes: Any) -> int:
    """Elements of all parameters."""
    if isinstance(shapes, tuple):
        return math.prod(shapes)
    return sum(size_of(below) for below in (shapes.values() if isinstance(shapes, dict) else shapes))


def copy_into(target: Any, source: Any) -> None:
    """Each array of a tree, into the array at the same place of another."""
    if isinstance(target, (dict, list)):
        for key in target if isinstance(target, dict) else range(len(target)):
            copy_into(target[key], source[key])
    else:
        target[...] = source


@dataclass
class Whole:
    """Part of a model that is always whole, with the contexts of a sharded unit: one loop does for both."""

    weights: Any
    gradients: Any

    @contextlib.contextmanager
    def forward(self) -> Iterator[Any]:
        yield self.weights

    @contextlib.contextmanager
    def backward(self) -> Iterator[tuple[Any, Any]]:
        yield self.weights, self.gradients


def whole_units(weights: Any, gradients: Any) -> list[Whole]:
    """The model's parts in order. The head's embedding is the first part's, with a gradient of its own."""
    pairs = [
        (weights["embed"], gradients["embed"]),
        *zip(weights["blocks"], gradients["blocks"], strict=True),
        (
            {**weights["head"], "bytes": weights["embed"]["bytes"]},
            {**gradients["head"], "bytes": gradients["embed"]["bytes"].copy()},
        ),
    ]
    return [Whole(*pair) for pair in pairs]


def add_tied(gradients: Any, units: list[Whole]) -> None:
    """The gradient of the tied embedding is the sum of both uses."""
    gradients["embed"]["bytes"] += units[-1].gradients["bytes"]


class PlainAdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019) on flat buffers."""

    def __init__(self, xp: Any, parameters: Array, *, rate: float = 3e-3, decay: float = 0.01) -> None:
        self.xp, self.parameters, self.rate, self.decay = xp, parameters, rate, decay
        self.mean, self.square, self.steps = xp.zeros_like(parameters), xp.zeros_like(parameters), 0

    def step(self, gradients: Array) -> None:
        self.steps += 1
        first, second = 0.9, 0.98
        self.mean += (1 - first) * (gradients - self.mean)
        self.square += (1 - second) * (gradients * gradients - self.square)
        mean = self.mean / (1 - first**self.steps)
        square = self.square / (1 - second**self.steps)
        self.parameters -= self.rate * (mean / (self.xp.sqrt(square) + 1e-8) + self.decay * self.parameters)


def entropy_of_bytes(text: np.ndarray) -> float:
    """Nats per byte of the best model that does not look at the context: what ours has to beat."""
    share = np.bincount(text, minlength=256) / text.size
    share = share[share > 0]
    return float(-(share * np.log(share)).sum())


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Train a language model of bytes on all ranks of a launcher."
    )
    for name, default in asdict(Settings()).items():
        parser.add_argument(
            f"--{name}", type=type(default), default=default, metavar="N", help=f"({default})"
        )
    parser.add_argument("--json", metavar="FILE", help="rank 0 writes the losses and times here")
    options = vars(parser.parse_args())
    file, settings, shape = options.pop("json"), Settings(**options), SMALL
    with pynccl.init() as comm, contextlib.ExitStack() as stack:
        if problem := batch_problem(settings.batch, comm.size):  # the same on every rank
            if comm.rank == 0:
                print(f"{parser.prog}: {problem}", file=sys.stderr)
            return 2
        title = f"training on {comm.size} {'rank' if comm.size == 1 else 'ranks'}"
        show: Callable[[int, float], None] = lambda step, loss: None  # noqa: E731
        if comm.rank == 0:
            show = stack.enter_context(progress_bar(title, settings.steps))
        begun = time.perf_counter()
        losses = train(comm, settings, shape, show)
        seconds = time.perf_counter() - begun
        if comm.rank == 0 and file:
            result = {
                "ranks": comm.size,
                "library": comm.library.kind,
                "library_version": comm.library.version_string,
                "settings": asdict(settings),
                "parameters": size_of(shape.parameters()),
                "text_bytes": int(corpus().size),
                "entropy_of_bytes": entropy_of_bytes(corpus()),
                "seconds": seconds,
                "losses": losses,
            }
            Path(file).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

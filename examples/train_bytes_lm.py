"""Data-parallel training of a language model of bytes, on one rank or many, with the same code.

    python -m examples.train_bytes_lm                                  # alone
    python -m pynccl.launch -n 2 -m examples.train_bytes_lm            # two ranks share each batch

Three calls make it data-parallel: rank 0's weights are broadcast, and at each step the gradients and the loss
are averaged over the ranks. Each rank computes its own part of the batch, so the result is that of one rank
on the whole batch, up to the rounding of sums. It trains in float64 to show exactly that: training magnifies
every difference, and in float32 the losses of one rank and two are 6e-3 apart after these 200 steps.

The text is `pydoc_data.topics`, the language reference that comes with every Python.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import pynccl
from examples.bytes_lm import AdamW, BytesLM, Flat, Shape


@dataclass(frozen=True)
class Settings:
    steps: int = 200
    batch: int = 32  # texts per step, over all ranks together
    rate: float = 4e-3
    seed: int = 1


def train(comm: Any, settings: Settings, shape: Shape, progress: Callable[[int, float], None]) -> list[float]:
    """The mean loss (nats per byte) of each step's whole batch, the same list on every rank."""
    if settings.batch % comm.size:
        raise ValueError(
            f"a batch of {settings.batch} does not divide over {comm.size} ranks; make it a multiple"
        )
    xp = array_module(comm)
    shapes = shape.parameters()
    size = Flat.size(shapes)
    parameters = Flat(shapes, xp.zeros(size, "f8"))
    gradients = Flat(shapes, comm.empty(size, "f8"))  # the library's own memory: its fastest way
    model = BytesLM(xp, shape, parameters, gradients)
    if comm.rank == 0:
        model.initialize(settings.seed)
    comm.broadcast(parameters.buffer, root=0)
    optimizer = AdamW(xp, parameters.buffer, rate=settings.rate)

    text = xp.asarray(corpus())
    part = settings.batch // comm.size
    random = np.random.default_rng(settings.seed)  # the same on every rank
    losses = []
    for step in range(settings.steps):
        starts = random.integers(0, text.size - shape.context, settings.batch)
        mine = xp.asarray(starts[comm.rank * part : (comm.rank + 1) * part])
        loss = model.loss_and_gradients(text[mine[:, None] + xp.arange(shape.context + 1)])
        comm.all_reduce(gradients.buffer, op="avg")
        whole = xp.full(1, loss)
        comm.all_reduce(whole, op="avg")
        optimizer.step(gradients.buffer)
        losses.append(float(whole[0]))
        progress(step, losses[-1])
    return losses


def array_module(comm: Any) -> Any:
    """NumPy in host memory, CuPy on GPUs: the model is written for both."""
    if comm.library.kind == "host":
        return np
    import cupy

    return cupy


def corpus() -> np.ndarray:
    """The text as uint8."""
    from pydoc_data.topics import topics

    return np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)


def entropy_of_bytes(text: np.ndarray) -> float:
    """Nats per byte of the best model that does not look at the context: what ours has to beat."""
    share = np.bincount(text, minlength=256) / text.size
    share = share[share > 0]
    return float(-(share * np.log(share)).sum())


@contextlib.contextmanager
def progress_bar(title: str, steps: int) -> Iterator[Callable[[int, float], None]]:
    """A bar on a terminal; elsewhere, as in a log, a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:

        def say(step: int, loss: float) -> None:
            if step % 50 == 0 or step == steps - 1:
                print(f"{title}  step {step + 1} of {steps}  loss {loss:.4f}", file=sys.stderr, flush=True)

        yield say
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.4f}"), console=console) as bar:
        task = bar.add_task(title, total=steps, loss=float("nan"))
        yield lambda step, loss: bar.update(task, completed=step + 1, loss=loss)


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
    file, settings, shape = options.pop("json"), Settings(**options), Shape()
    with pynccl.init() as comm, contextlib.ExitStack() as stack:
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
                "parameters": Flat.size(shape.parameters()),
                "text_bytes": int(corpus().size),
                "entropy_of_bytes": entropy_of_bytes(corpus()),
                "seconds": seconds,
                "losses": losses,
            }
            Path(file).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

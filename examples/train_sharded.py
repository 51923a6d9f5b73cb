"""Train the GPT of `numpy_gpt.py` fully sharded, with checkpoints and a resume: a whole run.

    python -m pynccl.launch -n 2 -m examples.train_sharded -- --checkpoints run --save-at 120
    python -m pynccl.launch -n 3 -m examples.train_sharded -- --checkpoints run --resume

The second line goes on at step 120 on another number of ranks. Weights, moments, learning rate, and the place
in the data come back bit for bit; from there on, only the order of sums differs. In float32 that changes the
loss by 1e-7, which training magnifies: to some 1e-6 in the 40 steps to the end, whose learning rate is small,
and without bound in longer runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import pynccl
from examples.numpy_gpt import (
    UNITS,
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
from examples.train_bytes_lm import entropy_of_bytes
from sharding import AdamW, MixedPrecision, ShardedModel, checkpoint, cosine, fully_shard
from sharding.report import summary
from sharding.trace import Tracer

PRECISIONS = {
    "float32": None,
    "bfloat16": MixedPrecision(param="float32", gather="bfloat16"),  # travels narrow, computes wide
}


@dataclass(frozen=True)
class Settings:
    steps: int = 160
    batch: int = 12  # texts per step, over all ranks together
    rate: float = 2e-3
    warmup: int = 10
    seed: int = 1


@dataclass(frozen=True)
class Run:
    """What this start of the program does of the training that `Settings` describe."""

    checkpoints: str | None = None
    save_at: int | None = None
    resume: bool = False
    stop: int | None = None
    strategy: str = "full_shard"
    precision: str = "float32"
    recompute: bool = False
    trace: str | None = None


def train(
    comm: Any,
    settings: Settings,
    run: Run,
    shape: Shape,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> dict[str, Any]:
    """Losses by step and what it took, on this rank."""
    xp = array_module(comm)
    parameters = initial(shape, xp, seed=settings.seed)
    with fully_shard(
        parameters, comm, units=UNITS, strategy=run.strategy, precision=PRECISIONS[run.precision]
    ) as model:
        del parameters  # from here on no rank holds the model
        schedule = cosine(settings.rate, settings.steps, warmup=settings.warmup)
        optimizer = AdamW(model, schedule, groups={"*scale": {"weight_decay": 0.0}})
        layers = gpt(shape, xp, recompute=run.recompute)
        text, random = corpus(), np.random.default_rng(settings.seed)  # the same on every rank
        first, losses = 0, []
        lines: list[dict[str, Any]] = []
        if run.resume:
            assert run.checkpoints is not None
            first = checkpoint.load(run.checkpoints, model, optimizer, rng=random).step
        with Tracer(model, chrome=run.trace, on_step=lines.append) as tracer:
            for step in range(first, settings.steps if run.stop is None else run.stop):
                if step == run.save_at and run.checkpoints is not None:
                    checkpoint.save(run.checkpoints, model, optimizer, rng=random)
                with tracer.step(tokens=settings.batch * shape.context):
                    inputs, targets = part_of_batch(comm, random, text, settings.batch, shape.context, xp)
                    with model.microbatch():
                        loss = loss_and_gradients(model, layers, inputs, targets)
                    model.clip_grad_norm(1.0)
                    optimizer.step()
                    model.zero_grad()
                    losses.append(mean_over_ranks(comm, loss, xp))
                progress(step, losses[-1])
        report = summary(model, optimizer)
        return {
            "ranks": comm.size,
            "first": first,
            "losses": losses,
            "model_state_bytes": state_bytes(model, optimizer),
            "report": str(report),
            "memory": {
                part: getattr(report.total, part) for part in ("weights", "gradients", "optimizer", "live")
            },
            "bytes_sent_per_step": report.total.bytes_sent,
            "parameters": model.layout.numel,
            "step_split": split(lines),
            "tokens_per_second": float(np.median([line["tokens_per_second"] for line in lines])),
            "peak_rss": max(line.get("peak_rss", 0) for line in lines),
            "collectives": model.counters.calls(),
            "text_bytes": int(text.size),
            "entropy_of_bytes": entropy_of_bytes(text),
        }


def state_bytes(model: ShardedModel, optimizer: AdamW) -> int:
    """Bytes that this rank keeps between steps, of weights, gradients and moments; shared memory once."""
    arrays = [array for shard in model.shards for array in (shard.data, shard.source, shard.grad)]
    for unit in model.all_units:
        kept = unit.kept_weights
        arrays += [*(unit.whole or []), *(kept.gathered + kept.computed if kept is not None else [])]
    arrays += [array for slots in optimizer.state.values() for array in slots.values()]
    total = end = 0
    for start, size in sorted((address_of(array), array.nbytes) for array in arrays if array is not None):
        total += max(0, start + size - max(start, end))
        end = max(end, start + size)
    return total


def address_of(array: Any) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def split(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Median milliseconds of the parts of a step."""
    parts = ("seconds", "gather", "compute", "reduce", "optimizer", "other", "communication", "hidden")
    return {
        "step" if part == "seconds" else part: 1e3 * float(np.median([line[part] for line in lines]))
        for part in parts
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a sharded GPT of bytes on all ranks of a launcher.")
    for name, default in asdict(Settings()).items():
        parser.add_argument(
            f"--{name}", type=type(default), default=default, metavar="N", help=f"({default})"
        )
    parser.add_argument("--checkpoints", metavar="FOLDER", help="where checkpoints are saved and found")
    parser.add_argument("--save-at", type=int, metavar="STEP", help="save before this step")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--stop", type=int, metavar="STEP", help="end before this step")
    parser.add_argument("--strategy", default="full_shard", help="(full_shard)")
    parser.add_argument("--precision", choices=list(PRECISIONS), default="float32", help="(float32)")
    parser.add_argument("--recompute", action="store_true", help="keep no activations inside of blocks")
    parser.add_argument(
        "--trace", metavar="FILE", help="a Chrome trace; {rank} in its name: one for each rank"
    )
    parser.add_argument("--json", metavar="FILE", help="rank 0 writes the losses and times here")
    options = vars(parser.parse_args())
    if options["checkpoints"] is None and (options["resume"] or options["save_at"] is not None):
        parser.error("--resume and --save-at need --checkpoints")
    file = options.pop("json")
    settings = Settings(**{name: options.pop(name) for name in asdict(Settings())})
    run, shape = Run(**options), Shape()
    with pynccl.init() as comm, contextlib.ExitStack() as stack:
        if problem := batch_problem(settings.batch, comm.size):  # the same on every rank
            if comm.rank == 0:
                print(f"{parser.prog}: {problem}", file=sys.stderr)
            return 2
        show: Callable[[int, float], None] = lambda step, loss: None  # noqa: E731
        if comm.rank == 0:
            title = f"sharded over {comm.size} {'rank' if comm.size == 1 else 'ranks'}"
            show = stack.enter_context(progress_bar(title, run.stop or settings.steps))
        begun = time.perf_counter()
        result = train(comm, settings, run, shape, show)
        state = comm.all_gather_object(result.pop("model_state_bytes"))
        if comm.rank == 0 and file:
            result |= {
                "model_state_bytes_per_rank": max(state),
                "seconds": time.perf_counter() - begun,
                "settings": asdict(settings),
                "run": asdict(run),
                "library": comm.library.kind,
            }
            Path(file).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Ours: plain NumPy, backward by hand, sharded by `sharding`: every `ours.STRATEGY`, and `ours.single`.

Rows of the batch are columns here: weights times activations, (width, width) @ (width, batch), is what
OpenBLAS does fastest of the ways to write these products (docs/sharding-performance.md). With `Delayed` the
same runs over a communicator that is slow by a given time, to show what prefetch hides.
"""

from __future__ import annotations

import os
import time
from importlib import import_module
from typing import Any

import numpy as np

import pynccl
from bench.train.problem import Problem
from bench.train.worker import serve
from sharding import fully_shard
from sharding.optim import AdamW

__all__ = ["Delayed", "Ours", "make"]

STRATEGY = "BENCH_TRAIN_STRATEGY"  # of sharding; the default is full_shard
DELAY = "BENCH_TRAIN_DELAY"  # seconds that every collective is slower by
PREFETCH = "BENCH_TRAIN_PREFETCH"  # 0: gather when needed

ROWS = 256  # of the weights in one product of forward: 2 MiB, 10 % faster than all at once


class Ours:
    """One rank: an MLP in NumPy on a ShardedModel."""

    def __init__(
        self, problem: Problem, comm: Any, rank: int, *, strategy: str = "full_shard", prefetch: bool = True
    ) -> None:
        self.problem, self.comm, width, batch = problem, comm, problem.width, problem.batch
        shapes = [
            {"w": ((width, width), "float32"), "b": ((width,), "float32")} for _ in range(problem.layers)
        ]
        self.model = fully_shard(
            comm=comm,
            init=lambda name, shape, dtype: _first(problem, name, shape),
            shapes=shapes,
            units=["*"],
            strategy=strategy,
            prefetch=prefetch,
        )
        self.optimizer = AdamW(
            self.model,
            lr=problem.lr,
            betas=problem.betas,
            eps=problem.eps,
            weight_decay=problem.weight_decay,
        )
        rows = np.arange(batch * width, dtype=np.int64) + rank * batch * width
        self.x, self.target = (
            np.ascontiguousarray(problem.data(what, rows).astype(np.float32).reshape(batch, width).T)
            for what in (0, 1)
        )
        # Memory for activations, made once: the loop allocates nothing but masks.
        self.hidden = [np.empty((width, batch), np.float32) for _ in range(problem.layers)]
        self.gradients = [np.empty((width, batch), np.float32) for _ in range(2)]
        self._loss = 0.0
        self.steps = 0

    def step(self) -> None:
        """Forward, backward (which reduces), update."""
        with self.model.microbatch():
            self.forward()
            self.backward()
        self.optimizer.step()
        self.model.zero_grad()
        self.steps += 1

    def forward(self) -> None:
        """Each layer's output in `hidden`; ReLU after all but the last."""
        x, last = self.x, len(self.hidden) - 1
        for number, unit in enumerate(self.model):
            out = self.hidden[number]
            with unit.forward() as w:
                for first in range(0, len(out), ROWS):
                    rows = slice(first, first + ROWS)
                    np.matmul(w["w"][rows], x, out=out[rows])
                out += w["b"][:, None]
            if number < last:
                np.maximum(out, 0, out=out)
            x = out

    def backward(self) -> None:
        """Mean squared error, then each layer's gradients, written where they are reduced from."""
        error, spare = self.gradients
        np.subtract(self.hidden[-1], self.target, out=error)
        self._loss = 0.5 * float(np.dot(error.reshape(-1), error.reshape(-1))) / error.size
        error /= error.size
        for number, unit in reversed(list(enumerate(self.model))):
            x = self.hidden[number - 1] if number else self.x
            with unit.backward(zero=False) as (w, g):
                np.matmul(error, x.T, out=g["w"])
                np.sum(error, axis=1, out=g["b"])
                if number:
                    np.matmul(w["w"].T, error, out=spare)
            if number:
                spare *= x > 0
                error, spare = spare, error

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.comm.barrier()

    def loss(self) -> float:
        """This rank's, before the last update."""
        return self._loss

    def about(self) -> dict[str, Any]:
        """State and buffers as they lie in memory, in bytes; counts; kernels."""
        model = self.model
        state = sum(
            sum({id(a): a.nbytes for a in (s.data, s.source, s.grad) if a is not None}.values())
            for s in model.shards
        )
        moments = sum(array.nbytes for slots in self.optimizer.state.values() for array in slots.values())
        return {
            "model_state_bytes": state + moments,
            "live_buffer_bytes": model.gatherer.bytes_made + model.reducer.bytes_made,
            "counters": dict(vars(model.counters)),
            "steps": self.steps,
            "version": f"numpy {np.__version__}",
            "blas": blas(),
        }

    def close(self) -> None:
        """End the engine and the communicator."""
        self.model.close()
        self.comm.destroy()


class Delayed:
    """A communicator over a slower wire: each collective on a stream starts `seconds` later than it could.

    Passes everything else on. The delay is on the stream's thread (or, without a stream, in the caller's), as
    that of a network would be, and takes no processor time.
    """

    def __init__(self, comm: Any, seconds: float) -> None:
        self._comm, self._seconds = comm, seconds
        self.rank, self.size = comm.rank, comm.size

    def all_gather(self, x: Any, out: Any = None, *, stream: Any = None) -> Any:
        """The communicator's, later."""
        self._wait(stream)
        return self._comm.all_gather(x, out=out, stream=stream)

    def reduce_scatter(self, x: Any, out: Any = None, op: Any = "sum", *, stream: Any = None) -> Any:
        """The communicator's, later."""
        self._wait(stream)
        return self._comm.reduce_scatter(x, out=out, op=op, stream=stream)

    def split(self, color: int, key: int = 0) -> Delayed:
        """A part, as slow."""
        return Delayed(self._comm.split(color, key), self._seconds)

    def _wait(self, stream: Any) -> None:
        if stream is None:
            time.sleep(self._seconds)
        else:
            stream.call(lambda: time.sleep(self._seconds))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def _first(problem: Problem, name: str, shape: tuple[int, ...]) -> Any:
    layer, what = name.split(".")
    if what == "b":
        return np.zeros(shape, np.float32)
    flat = np.arange(shape[0] * shape[1], dtype=np.int64)
    return problem.weight(int(layer), flat).astype(np.float32).reshape(shape)


def blas() -> str:
    """Which kernels NumPy's OpenBLAS runs, and on how many threads."""
    try:
        pools = import_module("threadpoolctl").threadpool_info()
    except ImportError:
        return "unknown: threadpoolctl is not installed"
    return "; ".join(
        f"{pool.get('internal_api')} {pool.get('version')} {pool.get('architecture')}, "
        f"{pool['num_threads']} thread(s)"
        for pool in pools
    )


def make(problem: Problem, rank: int, meeting: str) -> Ours:
    """One rank; `meeting` is a unique id in hexadecimal."""
    unique_id = pynccl.UniqueId.from_bytes(bytes.fromhex(meeting))
    comm: Any = pynccl.Communicator(problem.ranks, unique_id, rank, library="host")
    if delay := float(os.environ.get(DELAY, "0")):
        comm = Delayed(comm, delay)
    strategy = os.environ.get(STRATEGY, "full_shard")
    return Ours(problem, comm, rank, strategy=strategy, prefetch=os.environ.get(PREFETCH, "1") != "0")


if __name__ == "__main__":
    serve(make)

"""An MLP trained with HIPS autograd, sharded: weights are whole only while a layer computes.

    python examples/autograd_mlp.py                               # alone
    python -m pynccl.launch -n 3 examples/autograd_mlp.py         # the same losses, to 1e-12

`adapters.sharded` makes each unit a function that autograd differentiates. Its weights are gathered for the
forward computation, released, and gathered again for the backward one.
"""

from __future__ import annotations

import autograd.numpy as np
import numpy  # for random numbers, and for arrays that autograd need not see

import pynccl
from sharding import AdamW, adapters, fully_shard

WIDTHS = [2, 32, 32, 1]
BATCH = 96  # over all ranks together
STEPS = 60


def dense(w, x):
    return np.dot(x, w["weight"]) + w["bias"]


def hidden(w, x):
    return np.tanh(dense(w, x))


def main() -> list[float]:
    random = numpy.random.default_rng(0)  # the same on every rank
    weights = [
        {"weight": random.normal(0, inputs**-0.5, (inputs, outputs)), "bias": numpy.zeros(outputs)}
        for inputs, outputs in zip(WIDTHS, WIDTHS[1:], strict=False)
    ]
    with pynccl.init(library="host") as comm, fully_shard(weights, comm, units=["*"]) as model:
        *first, last = model
        layers = [*(adapters.sharded(unit, hidden) for unit in first), adapters.sharded(last, dense)]
        optimizer = AdamW(model, lr=1e-2)

        def loss(x, y):
            for layer in layers:
                x = layer(x)
            return np.mean((x - y) ** 2)

        losses = []
        for step in range(STEPS):
            x = random.uniform(-2, 2, (BATCH, 2))
            y = numpy.sin(x[:, :1]) * x[:, 1:]
            mine = slice(comm.rank * BATCH // comm.size, (comm.rank + 1) * BATCH // comm.size)
            with model.microbatch():
                value = adapters.loss_and_backward(model, loss, x[mine], y[mine])
            optimizer.step()
            model.zero_grad()
            losses.append(float(comm.all_reduce(numpy.array([value]), op="avg")[0]))
            if comm.rank == 0 and (step + 1) % 10 == 0:
                print(f"step {step + 1:3} loss {losses[-1]:.10f}")
    return losses


if __name__ == "__main__":
    main()

"""A function of a whole tree of parameters, differentiated by JAX or autograd; its training state is sharded.

    python examples/functional_regression.py                                       # alone, with autograd
    python -m pynccl.launch -n 3 examples/functional_regression.py                 # the same losses, to 1e-12
    python -m pynccl.launch -n 3 examples/functional_regression.py -- --library jax

The loss is written as JAX wants it, `loss(parameters, x, y)`, and knows nothing of ranks. While it is
differentiated the weights are whole; gradients, optimizer state and what is kept between steps are sharded.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

import pynccl
from sharding import AdamW, adapters, fully_shard

FEATURES = 8
WIDTH = 24
BATCH = 48  # over all ranks together
STEPS = 60


def differentiated(library: str) -> Callable[..., Any]:
    """(parameters, x, y) -> (loss, gradients), with the library's own transformation of one loss function."""
    try:
        xp = importlib.import_module(f"{library}.numpy")
    except ModuleNotFoundError as error:
        raise SystemExit(f"--library {library} needs {library}: python -m pip install {library}") from error

    def loss(parameters, x, y):
        hidden = xp.tanh(xp.dot(x, parameters["hidden"]["weight"]) + parameters["hidden"]["bias"])
        return xp.mean((xp.dot(hidden, parameters["out"]["weight"]) + parameters["out"]["bias"] - y) ** 2)

    if library == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
        return jax.jit(jax.value_and_grad(loss))
    import autograd

    return autograd.value_and_grad(loss)


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="Regression with a function of a tree of parameters.")
    parser.add_argument("--library", choices=["autograd", "jax"], default="autograd")
    library = parser.parse_args(arguments).library
    random = np.random.default_rng(0)  # the same on every rank
    parameters = {
        "hidden": {"weight": random.normal(0, 0.3, (FEATURES, WIDTH)), "bias": np.zeros(WIDTH)},
        "out": {"weight": random.normal(0, 0.2, WIDTH), "bias": np.zeros(())},
    }
    x = random.normal(0, 1, (BATCH, FEATURES))
    y = np.sin(x @ random.normal(0, 0.4, FEATURES))
    with (
        pynccl.init(library="host") as comm,
        fully_shard(parameters, comm, units=["hidden", "out"], reshard_after_forward=False) as model,
    ):
        step_of = adapters.value_and_grad(model, differentiated(library))
        optimizer = AdamW(model, lr=1e-2)
        losses = []
        for step in range(STEPS):
            mine = slice(comm.rank * BATCH // comm.size, (comm.rank + 1) * BATCH // comm.size)
            with model.microbatch():
                value = step_of(x[mine], y[mine])
            optimizer.step()
            model.zero_grad()
            losses.append(float(comm.all_reduce(np.array([float(value)]), op="avg")[0]))
            if comm.rank == 0 and (step + 1) % 10 == 0:
                print(f"step {step + 1:3} loss {losses[-1]:.10f}")
    return losses


if __name__ == "__main__":
    main()

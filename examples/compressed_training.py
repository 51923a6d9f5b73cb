"""Least squares trained on ranks, gradients as float32 and compressed: the bytes, the losses, the errors.

    python -m pynccl.launch -n 4 examples/compressed_training.py

Each rank has samples of its own, so no rank's gradient is the whole one. All runs begin alike and take the
same steps; what differs is how the gradients are averaged. Printed of each run: bytes sent by rank 0, how
many times fewer that is than float32 takes, the final loss, and the most that error feedback ever held. What
it holds arrives later: the fewer elements are kept, the smaller the rate must be (top 1/32 diverges at 0.5).
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

import pynccl
from pynccl.collectives import Compressor, Float8, Integers, TopK
from pynccl.collectives.codecs import Codec

FEATURES = 1024
SAMPLES = 512  # of each rank
RATE = 0.1
CODECS: dict[str, Codec | None] = {
    "float32": None,
    "8-bit integers": Integers(8),
    "float8_e4m3fn": Float8(),
    "4-bit integers": Integers(4),
    "top 1/8": TopK(1 / 8),
}


def train(comm: Any, codec: Codec | None, steps: int) -> dict[str, Any]:
    """One run: {"loss", "bytes", "ratio", "kept": norm of the feedback after each step, "same": all ranks
    have the same weights, to the bit}.
    """
    truth = np.random.default_rng(0).normal(size=FEATURES).astype("f4")  # the same on every rank
    random = np.random.default_rng(1 + comm.rank)
    x = (random.normal(size=(SAMPLES, FEATURES)) / FEATURES**0.5).astype("f4")
    y = x @ truth + random.normal(scale=0.1, size=SAMPLES).astype("f4")
    weights = np.zeros(FEATURES, "f4")
    compressor = None if codec is None else Compressor(comm, codec)
    kept: list[float] = []
    for _ in range(steps):
        gradient = x.T @ (x @ weights - y)
        if compressor is None:
            comm.all_reduce(gradient, op="avg")
        else:
            compressor.all_reduce(gradient, "avg", key="weights")
            kept.append(compressor.report().feedback)
        weights -= np.float32(RATE) * gradient
    loss = comm.all_reduce(np.array([((x @ weights - y) ** 2).mean()], "f8"), op="avg")[0]
    same = len(set(comm.all_gather_object(weights.tobytes()))) == 1
    plain = 2 * (comm.size - 1) * FEATURES * 4 * steps // comm.size
    report = None if compressor is None else compressor.report()
    sent = plain if report is None else report.bytes_sent
    ratio = 1.0 if report is None else report.ratio
    return {"loss": float(loss), "bytes": sent, "ratio": ratio, "kept": kept, "same": same}


def main(arguments: list[str] | None = None) -> dict[str, dict[str, Any]]:
    parser = argparse.ArgumentParser(description="Train with compressed gradients.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", help="rank 0 writes its results to this file")
    options = parser.parse_args(arguments)
    with pynccl.init(library="host") as comm:
        runs = {name: train(comm, codec, options.steps) for name, codec in CODECS.items()}
        if comm.rank == 0:
            print(f"{FEATURES} weights, {options.steps} steps, {comm.size} ranks")
            print(
                f"{'gradients as':16} {'bytes':>11} {'fewer':>7} {'loss':>9} {'of float32':>11} {'kept':>9}"
            )
            for name, run in runs.items():
                against = run["loss"] / runs["float32"]["loss"]
                print(
                    f"{name:16} {run['bytes']:11} {run['ratio']:6.2f}x {run['loss']:9.6f} {against:10.2%} "
                    f"{max(run['kept'], default=0.0):9.2e}"
                )
            if options.json:
                with open(options.json, "w") as file:
                    json.dump(runs, file)
    return runs


if __name__ == "__main__":
    main()

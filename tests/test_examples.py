"""The example programs: a model right to its last gradient, and equal losses on any number of ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.numpy_gpt import (
    UNITS,
    Shape,
    cross_entropy,
    gpt,
    initial,
    loss_and_gradients,
    part_of_batch,
)
from examples.train_bytes_lm import Whole, add_tied, whole_units
from examples.train_sharded import Run, Settings, train
from pynccl.testing import run_ranks
from sharding import fully_shard
from sharding.tree import flatten, rebuild

SMALL = Shape(blocks=2, width=8, heads=2, context=6)


def small_model(seed: int = 0) -> tuple[dict[str, np.ndarray], list[Whole], Any]:
    """(parameters by name, units, gradients as a tree). No zeros: every gradient is at work."""
    weights = initial(SMALL, dtype="float64", seed=seed)
    random = np.random.default_rng(seed)
    named = {name: leaf for name, leaf in flatten(weights) if name != "head.bytes"}
    for leaf in named.values():
        leaf += random.normal(0, 0.1, leaf.shape)
    gradients = rebuild(weights, {name: np.zeros_like(leaf) for name, leaf in flatten(weights)})
    return named, whole_units(weights, gradients), gradients


def some_text(texts: int = 3) -> tuple[np.ndarray, np.ndarray]:
    text = np.random.default_rng(1).integers(0, 256, (texts, SMALL.context + 1)).astype(np.uint8)
    return text[:, :-1], text[:, 1:]


@pytest.mark.parametrize("name", [name for name, _ in flatten(initial(SMALL)) if name != "head.bytes"])
def test_each_gradient_is_the_slope_of_the_loss(name: str):
    named, units, tree = small_model()
    layers, (inputs, targets) = gpt(SMALL), some_text()
    loss_and_gradients(units, layers, inputs, targets)
    add_tied(tree, units)
    exact, values = dict(flatten(tree))[name].copy(), named[name]
    used = np.argwhere(exact != 0)
    assert len(used)
    step = 1e-5
    for index in map(tuple, np.random.default_rng(0).permutation(used)[:20]):
        middle = values[index]
        losses = []
        for shift in (step, -step):
            values[index] = middle + shift
            losses.append(loss_and_gradients(units, layers, inputs, targets))
        values[index] = middle
        slope = (losses[0] - losses[1]) / (2 * step)
        assert slope == pytest.approx(exact[index], abs=1e-7, rel=1e-5), (name, index)


def logits(units: list[Whole], inputs: np.ndarray) -> np.ndarray:
    x = inputs
    for unit, layer in zip(units, gpt(SMALL), strict=True):
        with unit.forward() as w:
            x, _ = layer.forward(w, x)
    return x


def test_a_byte_cannot_see_the_ones_after_it():
    _, units, _ = small_model()
    inputs, _ = some_text(1)
    changed = inputs.copy()
    changed[0, -1] ^= 1  # only the last position may use it
    one, other = logits(units, inputs), logits(units, changed)
    assert np.array_equal(one[0, :-1], other[0, :-1])
    assert not np.array_equal(one[0, -1], other[0, -1])


def test_an_unknowing_model_loses_the_logarithm_of_the_choices():
    loss, gradient = cross_entropy(np.zeros((2, 3, 256)), np.zeros((2, 3), int))
    assert loss == pytest.approx(np.log(256))
    assert gradient.sum() == pytest.approx(0, abs=1e-12)


def test_the_head_is_tied_to_the_embedding_and_the_model_has_a_million_parameters():
    weights = initial(Shape())
    assert weights["head"]["bytes"] is weights["embed"]["bytes"]
    sizes = [leaf.size for name, leaf in flatten(weights) if name != "head.bytes"]
    assert sum(sizes) == 1_030_272


# ---- the same losses on any number of ranks

PROGRAMS = {
    "autograd_mlp.py": [],
    "functional_regression.py": [],
    "numpy_gpt.py": ["--steps", "4"],
}


def run_program(repo: Path, ranks: int, program: str, options: list[str]) -> list[float]:
    """The losses that rank 0 prints."""
    command = [sys.executable, "-m", "pynccl.launch", "-n", str(ranks), "--output", "raw"]
    done = subprocess.run(
        [*command, f"examples/{program}", *options],
        cwd=repo,
        env={**os.environ, "PYTHONPATH": str(repo), "PYNCCL_LIBRARY": "host", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_example_prints_the_same_losses_on_1_2_and_3_ranks(program: str, repo: Path):
    """All train in float64, whose rounding is far below the digits that are printed: 6 or 10."""
    alone, *others = (run_program(repo, ranks, program, PROGRAMS[program]) for ranks in (1, 2, 3))
    assert len(alone) >= 4 and alone[-1] < 0.95 * alone[0]
    for losses in others:
        assert losses == pytest.approx(alone, rel=0, abs=1.1e-6 if program == "numpy_gpt.py" else 1.1e-10)


@pytest.mark.peers
def test_jax_and_autograd_train_alike(repo: Path):
    program = "functional_regression.py"
    with_autograd = run_program(repo, 1, program, [])
    for ranks in (1, 3):
        with_jax = run_program(repo, ranks, program, ["--library", "jax"])
        assert with_jax == pytest.approx(with_autograd, rel=0, abs=1.1e-10)


# ---- the sharded training of the demo

BRIEF = Settings(steps=8, batch=12, rate=1e-3, warmup=2)


def trained(comm: Any, run: Run, settings: Settings = BRIEF) -> dict[str, Any]:
    return train(comm, settings, run, SMALL)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_training_saved_at_2_ranks_goes_on_at_another_number(ranks: int, tmp_path: Path):
    run = Run(checkpoints=str(tmp_path), save_at=4)
    whole = run_ranks(2, trained, run)[0]
    for resumed in run_ranks(ranks, trained, replace(run, save_at=None, resume=True)):
        assert resumed["first"] == 4
        assert resumed["losses"] == pytest.approx(whole["losses"][4:], rel=0, abs=1e-6)
    assert run_ranks(2, trained, replace(run, save_at=None, resume=True))[0]["losses"] == whole["losses"][4:]


def test_the_bytes_that_are_kept_are_those_that_the_report_predicts():
    for ranks in (1, 2, 3):
        for strategy in ("full_shard", "shard_optimizer", "no_shard"):
            for result in run_ranks(ranks, trained, Run(stop=1, strategy=strategy)):
                kept = sum(result["memory"][part] for part in ("weights", "gradients", "optimizer"))
                assert result["model_state_bytes"] == kept, (ranks, strategy)


def test_recomputing_activations_changes_no_bit_of_the_losses():
    plain, again = (run_ranks(2, trained, Run(recompute=recompute))[0] for recompute in (False, True))
    assert again["losses"] == plain["losses"]
    assert again["collectives"] == plain["collectives"]


def test_gathering_in_bfloat16_halves_what_is_gathered_and_learns_the_same():
    wide, narrow = (run_ranks(2, trained, Run(precision=name))[0] for name in ("float32", "bfloat16"))
    assert narrow["losses"] == pytest.approx(wide["losses"], abs=0.02)
    assert narrow["losses"] != wide["losses"]
    assert narrow["bytes_sent_per_step"] < 0.75 * wide["bytes_sent_per_step"]


def test_sharded_gradients_are_those_of_the_whole_model():
    named, units, tree = small_model()
    inputs, targets = some_text(12)
    loss = loss_and_gradients(units, gpt(SMALL), inputs, targets)
    add_tied(tree, units)
    expected = np.sqrt(sum(float((leaf**2).sum()) for name, leaf in flatten(tree) if name != "head.bytes"))

    def rank(comm):
        weights = rebuild(initial(SMALL), {**named, "head.bytes": named["embed.bytes"]})
        mine = slice(comm.rank, None, comm.size)
        with fully_shard(weights, comm, units=UNITS, debug=True) as model:
            with model.microbatch():
                value = loss_and_gradients(model, gpt(SMALL), inputs[mine], targets[mine])
            return value, model.grad_norm()

    for ranks in (1, 2, 3, 4):
        values = run_ranks(ranks, rank)
        assert np.mean([value for value, _ in values]) == pytest.approx(loss, rel=1e-13)
        assert [norm for _, norm in values] == pytest.approx([expected] * ranks, rel=1e-12)


def test_a_batch_that_does_not_divide_is_an_error_with_the_remedy():
    class TwoRanks:
        rank, size = 0, 2

    with pytest.raises(ValueError, match="a batch of 3 does not divide over 2 ranks; make it a multiple"):
        part_of_batch(TwoRanks(), np.random.default_rng(0), np.zeros(99, np.uint8), 3, 4, np)


# ---- the guide


def snippets(repo: Path) -> Iterator[str]:
    yield from re.findall(r"^```python\n(.*?)^```", (repo / "docs" / "sharding.md").read_text(), re.M | re.S)


def test_every_snippet_of_the_guide_runs(repo: Path, tmp_path: Path):
    """In order, as one program, on 1 rank and on 2."""
    program = "\n".join(snippets(repo))
    assert program.count("fully_shard(") >= 3
    (tmp_path / "guide.py").write_text(program)
    for ranks in (1, 2):
        (tmp_path / str(ranks)).mkdir()
        subprocess.run(
            [sys.executable, "-m", "pynccl.launch", "-n", str(ranks), str(tmp_path / "guide.py")],
            cwd=tmp_path / str(ranks),
            env={**os.environ, "PYTHONPATH": str(repo), "PYNCCL_LIBRARY": "host"},
            check=True,
            timeout=60,
        )


@pytest.mark.gpu
def test_training_on_gpus_is_training_in_host_memory(repo: Path, tmp_path: Path):
    for program, options in (("train_bytes_lm", []), ("train_sharded", ["--batch", "12"])):
        losses = {}
        for library in ("nccl", "host"):
            file = tmp_path / f"{program}_{library}.json"
            module = ["-m", f"examples.{program}", "--steps", "5", *options, "--json", str(file)]
            subprocess.run(
                [sys.executable, "-m", "pynccl.launch", "-n", "2", *module],
                cwd=repo,
                env={**os.environ, "PYTHONPATH": str(repo), "PYNCCL_LIBRARY": library},
                check=True,
                timeout=100,
            )
            losses[library] = json.loads(file.read_text())["losses"]
        # float64, and float32 with an optimizer's first steps, which take the sign of small gradients
        assert losses["nccl"] == pytest.approx(losses["host"], abs=1e-9 if "bytes" in program else 1e-3)

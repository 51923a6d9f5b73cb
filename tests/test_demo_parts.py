"""The demo's model is right to its last gradient, and its training is the same on any number of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import demo
from examples.bytes_lm import AdamW, BytesLM, Flat, Shape, cross_entropy, normalize
from examples.train_bytes_lm import Settings, corpus, entropy_of_bytes, train
from pynccl.testing import run_ranks

SMALL = Shape(context=6, width=8, heads=2, hidden=10)


def small_model(seed: int = 0) -> BytesLM:
    shapes = SMALL.parameters()
    size = Flat.size(shapes)
    model = BytesLM(np, SMALL, Flat(shapes, np.zeros(size)), Flat(shapes, np.zeros(size)))
    model.initialize(seed)
    model.p.buffer += np.random.default_rng(seed).normal(0, 0.1, size)  # no zeros: every gradient is at work
    return model


def some_text(texts: int = 3) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (texts, SMALL.context + 1)).astype(np.uint8)


@pytest.mark.parametrize("name", list(SMALL.parameters()))
def test_each_gradient_is_the_slope_of_the_loss(name: str):
    model, text = small_model(), some_text()
    model.loss_and_gradients(text)
    exact = model.g[name].copy()
    values = model.p[name]
    used = np.argwhere(exact != 0)
    step = 1e-5
    for index in map(tuple, np.random.default_rng(0).permutation(used)[:30]):
        middle = values[index]
        losses = []
        for shift in (step, -step):
            values[index] = middle + shift
            losses.append(model.loss_and_gradients(text))
        values[index] = middle
        slope = (losses[0] - losses[1]) / (2 * step)
        assert slope == pytest.approx(exact[index], abs=1e-7, rel=1e-5), (name, index)


def test_a_byte_cannot_see_the_ones_after_it():
    model, text = small_model(), some_text(1)
    model.loss_and_gradients(text)
    changed = text.copy()
    changed[0, -2] ^= 1  # the last input: only the last position may use it
    logits = [last_logits(model, one) for one in (text, changed)]
    assert np.array_equal(logits[0][0, :-1], logits[1][0, :-1])
    assert not np.array_equal(logits[0][0, -1], logits[1][0, -1])


def last_logits(model: BytesLM, text: np.ndarray) -> np.ndarray:
    """The logits of a forward pass, from the layers themselves."""
    p = model.p
    x = p["byte_embedding"][text[:, :-1]] + p["position_embedding"]
    x = x + model.attention(normalize(np, x, p["attention_scale"])[0])[0]
    x = x + model.mlp(normalize(np, x, p["mlp_scale"])[0])[0]
    return normalize(np, x, p["head_scale"])[0] @ p["head"] + p["head_bias"]


def test_an_unknowing_model_loses_the_logarithm_of_the_choices():
    loss, gradient = cross_entropy(np, np.zeros((2, 3, 256)), np.eye(256)[np.zeros((2, 3), int)])
    assert loss == pytest.approx(np.log(256))
    assert gradient.sum() == pytest.approx(0, abs=1e-12)


def test_parameters_are_views_of_one_buffer():
    shapes = SMALL.parameters()
    flat = Flat(shapes, np.zeros(Flat.size(shapes)))
    flat["head_bias"][...] = 7
    assert (flat.buffer[-256:] == 7).all() and flat.buffer[:-256].any() == 0
    with pytest.raises(ValueError, match="make it"):
        Flat(shapes, np.zeros(3))


def test_the_first_step_of_adam_is_the_rate_in_the_gradients_direction():
    parameters = np.array([1.0, 1.0])
    AdamW(np, parameters, rate=0.1, decay=0).step(np.array([3.0, -0.5]))
    assert parameters == pytest.approx([0.9, 1.1])


def losses_of(comm: Any, settings: Settings) -> list[float]:
    return train(comm, settings, SMALL, lambda step, loss: None)


def test_ranks_that_share_a_batch_train_as_one_rank_on_all_of_it():
    settings = Settings(steps=12, batch=12)
    alone = run_ranks(1, losses_of, settings)[0]
    for ranks in (2, 3):
        everyone = run_ranks(ranks, losses_of, settings)
        assert all(losses == everyone[0] for losses in everyone)
        assert np.abs(np.subtract(everyone[0], alone)).max() < 1e-12
    assert alone[-1] < alone[0] - 0.3


def test_a_batch_that_does_not_divide_is_an_error_with_the_remedy():
    class TwoRanks:
        size = 2

    with pytest.raises(ValueError, match="a batch of 3 does not divide over 2 ranks; make it a multiple"):
        train(TwoRanks(), Settings(batch=3), SMALL, lambda step, loss: None)


def test_the_text_is_long_and_varied():
    text = corpus()
    assert text.dtype == np.uint8 and text.size > 200_000
    assert 2.5 < entropy_of_bytes(text) < np.log(256)
    assert entropy_of_bytes(np.arange(256)) == pytest.approx(np.log(256))


# ---- the demo says what fails


def result(**changes: Any) -> dict[str, Any]:
    return {
        "losses": [5.0] + 20 * [2.0],
        "entropy_of_bytes": 3.2,
        "parameters": 10,
        "library": "host",
    } | changes


def sweep_document(wrong: int) -> dict[str, Any]:
    measured = {"time": 1.0, "alg_bw": 1.0, "bus_bw": 1.0}
    sizes = [8 << i for i in range(9)]
    places = {"out_of_place": measured | {"nwrong": 0}, "in_place": measured | {"nwrong": wrong}}
    return {"results": [{"size": size, **places} for size in sizes]}


def test_wrong_elements_fail_the_demo():
    assert [row["bytes"] for row in demo.read_sweep(sweep_document(0))][:2] == [8, 16]
    with pytest.raises(demo.DemoFailure, match="9 wrong elements"):
        demo.read_sweep(sweep_document(1))
    with pytest.raises(demo.DemoFailure, match="measured nothing"):
        demo.read_sweep({"results": []})


def test_losses_that_differ_fail_the_demo():
    assert demo.compare_losses([1.0, 2.0], [1.0, 2.0 + 1e-9]) == pytest.approx(1e-9)
    with pytest.raises(demo.DemoFailure, match="the loss at step 1 is 2.0 on 2 ranks, 2.1 on 1 rank"):
        demo.compare_losses([1.0, 2.0], [1.0, 2.1])
    with pytest.raises(demo.DemoFailure, match="at step 0 is nan"):
        demo.compare_losses([float("nan")], [1.0])
    with pytest.raises(demo.DemoFailure, match="2 ranks made 1 steps and 1 rank 2"):
        demo.compare_losses([1.0], [1.0, 2.0])


def test_a_model_that_learns_nothing_fails_the_demo():
    demo.check_that_it_learnt(result())
    with pytest.raises(demo.DemoFailure, match="fell to 3.300 only"):
        demo.check_that_it_learnt(result(losses=[5.0] + 20 * [3.3]))


def test_a_program_that_fails_is_named_in_the_last_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        demo, "sweep_command", lambda file: [demo.sys.executable, "-c", "raise SystemExit(3)"]
    )
    assert demo.main() == 1
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .startswith("demo FAILED: `python -c raise SystemExit(3)` ended")
    )


def test_pictures_are_drawn(tmp_path: Path):
    demo.draw_sweep(demo.read_sweep(sweep_document(0)), "host", tmp_path / "busbw.png")
    demo.draw_losses(result(), result(), tmp_path / "loss.png")
    for name in ("busbw.png", "loss.png"):
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 10_000


@pytest.mark.gpu
def test_training_on_gpus_is_training_in_host_memory(repo: Path, tmp_path: Path):
    losses = {}
    for library in ("nccl", "host"):
        file = tmp_path / f"{library}.json"
        program = ["-m", "examples.train_bytes_lm", "--steps", "5", "--json", str(file)]
        subprocess.run(
            [sys.executable, "-m", "pynccl.launch", "-n", "2", *program],
            cwd=repo,
            env={**os.environ, "PYTHONPATH": str(repo), "PYNCCL_LIBRARY": library},
            check=True,
            timeout=100,
        )
        losses[library] = json.loads(file.read_text())["losses"]
    assert losses["nccl"] == pytest.approx(losses["host"], abs=1e-9)

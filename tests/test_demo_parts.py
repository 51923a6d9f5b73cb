"""The demo's data-parallel training is the same on any number of ranks, and the demo says what fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import demo
from examples.numpy_gpt import Shape, corpus
from examples.train_bytes_lm import Flat, PlainAdamW, Settings, entropy_of_bytes, size_of, train
from pynccl.testing import run_ranks

SMALL = Shape(blocks=1, width=8, heads=2, context=6)


def test_parameters_are_views_of_one_buffer():
    shapes = SMALL.parameters()
    flat = Flat(shapes, np.zeros(size_of(shapes)))
    flat.tree["head"]["bias"][...] = 7
    assert (flat.buffer[-256:] == 7).all() and flat.buffer[:-256].any() == 0
    with pytest.raises(ValueError, match="make it"):
        Flat(shapes, np.zeros(3))


def test_the_first_step_of_adam_is_the_rate_in_the_gradients_direction():
    parameters = np.array([1.0, 1.0])
    PlainAdamW(np, parameters, rate=0.1, decay=0).step(np.array([3.0, -0.5]))
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


def sharded_result(ranks: int, first: int, losses: list[float]) -> dict[str, Any]:
    return {
        "ranks": ranks,
        "first": first,
        "losses": losses,
        "entropy_of_bytes": 3.2,
        "parameters": 10,
        "memory": {"weights": 4.0, "gradients": 4.0, "optimizer": 8.0, "live": 2.0},
        "model_state_bytes_per_rank": 1600 // ranks,
    }


WHOLE = [5.0] * demo.SAVE_AT + [3.0, 2.0]


def test_a_resumed_training_that_differs_fails_the_demo():
    whole = sharded_result(2, 0, WHOLE)
    assert demo.compare_resumed(whole, sharded_result(3, demo.SAVE_AT, [3.0, 2.0 + 1e-7])) < 2e-7
    for losses, message in (
        ([3.0, 2.1], f"at step {demo.SAVE_AT + 1} is 2.0 on 2 ranks, 2.1 on 3 ranks after the resume"),
        ([3.0], "2 ranks made 2 steps and 3 ranks after the resume 1"),
        ([3.0, float("nan")], f"at step {demo.SAVE_AT + 1} is 2.0"),
    ):
        with pytest.raises(demo.DemoFailure, match=message):
            demo.compare_resumed(whole, sharded_result(3, demo.SAVE_AT, losses))
    with pytest.raises(demo.DemoFailure, match=f"saved at step {demo.SAVE_AT} and resumed at 7"):
        demo.compare_resumed(whole, sharded_result(3, 7, [3.0, 2.0]))


def test_a_rank_that_keeps_too_much_fails_the_demo():
    unsharded = sharded_result(1, 0, WHOLE)
    demo.check_state(sharded_result(2, 0, WHOLE), unsharded)
    with pytest.raises(demo.DemoFailure, match="each of 2 ranks keeps 1600 of 1600 bytes"):
        demo.check_state(sharded_result(2, 0, WHOLE) | {"model_state_bytes_per_rank": 1600}, unsharded)


def test_ranks_are_all_gpus_or_two_and_batches_divide_over_both_runs():
    assert demo.Sizes.of(0) == demo.Sizes(2, 3, 12)
    assert demo.Sizes.of(2) == demo.Sizes(2, 1, 12)
    assert demo.Sizes.of(4) == demo.Sizes(4, 3, 12)
    assert demo.Sizes.of(8) == demo.Sizes(8, 7, 56)


def some_trace() -> list[dict[str, Any]]:
    kinds = [("compute", 0), ("gather", 0), ("all_gather", 1), ("reduce_scatter", 2), ("optimizer", 0)]
    return [
        {"ph": "X", "cat": kind, "tid": track, "ts": 1e3 * at, "dur": 900.0}
        for at, (kind, track) in enumerate(kinds)
    ]


def test_pictures_are_drawn(tmp_path: Path):
    demo.draw_sweep(demo.read_sweep(sweep_document(0)), "host", tmp_path / "busbw.png")
    whole, resumed = sharded_result(2, 0, WHOLE), sharded_result(3, demo.SAVE_AT, WHOLE[-2:])
    demo.draw_losses(result(), result(), whole, resumed, tmp_path / "loss.png")
    demo.draw_memory([sharded_result(1, 0, WHOLE), whole, resumed], tmp_path / "memory.png")
    demo.draw_timeline([some_trace()] * 2, tmp_path / "timeline.png")
    for name in ("busbw.png", "loss.png", "memory.png", "timeline.png"):
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 10_000

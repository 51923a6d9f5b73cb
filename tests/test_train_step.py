"""The training benchmark: equal numbers in every contestant, what is made of times, and ranks that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pynccl
from bench.train import outcome
from bench.train.ours import Delayed, Ours
from bench.train.outcome import Times
from bench.train.pool import Pool, PoolError, child_environment, turn
from bench.train.problem import Problem, uniform
from bench.train_step import main
from pynccl.testing import run_ranks

SMALL = Problem(layers=3, width=32, batch=4, ranks=2)


# --- the problem --------------------------------------------------------------------------------------------


def test_a_problem_survives_a_command_line() -> None:
    assert Problem.from_json(SMALL.to_json()) == SMALL


def test_its_size_is_what_it_says() -> None:
    assert SMALL.parameters == 3 * (32 * 32 + 32)
    assert SMALL.flops == 2 * 4 * 32 * 32 * 8


def test_numbers_are_exact_in_float32_spread_evenly_and_differ_by_stream() -> None:
    numbers = uniform(np.arange(1 << 16), 3)
    assert np.array_equal(numbers.astype(np.float32).astype(np.float64), numbers)
    assert -0.5 <= numbers.min() < -0.499 and 0.499 < numbers.max() < 0.5
    assert abs(numbers.mean()) < 0.005 and abs(numbers.std() - 12**-0.5) < 0.005
    assert abs(np.corrcoef(numbers, uniform(np.arange(1 << 16), 4))[0, 1]) < 0.02
    assert abs(np.corrcoef(numbers[:-32], numbers[32:])[0, 1]) < 0.02


def test_the_rows_of_the_ranks_are_those_of_the_whole_batch() -> None:
    def rank(comm):
        return Ours(SMALL, comm, comm.rank).x

    whole = run_ranks(1, lambda comm: Ours(replace(SMALL, ranks=1, batch=8), comm, 0).x, library="host")[0]
    assert np.array_equal(np.concatenate(run_ranks(2, rank, library="host"), axis=1), whole)


# --- our contestant -----------------------------------------------------------------------------------------


def reference(problem: Problem, steps: int) -> list[float]:
    """The losses of the whole batch on one rank, in float64 and by the book."""
    width, rows = problem.width, problem.batch * problem.ranks
    weights = [
        problem.weight(k, np.arange(width * width)).reshape(width, width) for k in range(problem.layers)
    ]
    parameters = weights + [np.zeros(width) for _ in weights]
    x, target = (problem.data(what, np.arange(rows * width)).reshape(rows, width) for what in (0, 1))
    first, second = [np.zeros_like(p) for p in parameters], [np.zeros_like(p) for p in parameters]
    losses, (b1, b2) = [], problem.betas
    for step in range(1, steps + 1):
        hidden = [x]
        for k in range(problem.layers):
            out = hidden[-1] @ parameters[k].T + parameters[problem.layers + k]
            hidden.append(np.maximum(out, 0) if k < problem.layers - 1 else out)
        error = hidden[-1] - target
        losses.append(0.5 * float((error**2).mean()))
        error /= error.size
        gradients: dict[int, Any] = {}
        for k in reversed(range(problem.layers)):
            gradients[k] = error.T @ hidden[k]
            gradients[problem.layers + k] = error.sum(axis=0)
            error = (error @ parameters[k]) * (hidden[k] > 0)
        for k, p in enumerate(parameters):
            first[k] += (1 - b1) * (gradients[k] - first[k])
            second[k] += (1 - b2) * (gradients[k] ** 2 - second[k])
            p *= 1 - problem.lr * problem.weight_decay
            moved = first[k] / (1 - b1**step) / (np.sqrt(second[k] / (1 - b2**step)) + problem.eps)
            p -= problem.lr * moved
    return losses


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_our_losses_are_those_of_the_plain_loop(strategy: str, n: int) -> None:
    problem = replace(SMALL, ranks=n)

    def rank(comm):
        ours, losses = Ours(problem, comm, comm.rank, strategy=strategy), []
        for _ in range(6):
            ours.step()
            losses.append(ours.loss())
        ours.model.close()
        return losses

    mean = np.mean(run_ranks(n, rank, library="host"), axis=0)
    np.testing.assert_allclose(mean, reference(problem, 6), rtol=1e-5)
    assert np.all(np.diff(mean) < 0)


def test_a_delayed_communicator_gives_the_same_numbers() -> None:
    def rank(comm, delay):
        ours = Ours(SMALL, Delayed(comm, delay) if delay else comm, comm.rank)
        for _ in range(3):
            ours.step()
        found = [shard.data.copy() for shard in ours.model.shards]
        ours.model.close()
        return found

    for plain, delayed in zip(
        run_ranks(2, rank, 0.0, library="host"), run_ranks(2, rank, 1e-3, library="host"), strict=True
    ):
        assert all(np.array_equal(a, b) for a, b in zip(plain, delayed, strict=True))


# --- what is made of times ----------------------------------------------------------------------------------


def answer(*seconds: float, loss: float = 0.5, rss: int = 1000) -> dict[str, Any]:
    about = {"model_state_bytes": 64, "version": "v", "blas": "b"}
    times = {"seconds": list(seconds), "cpu_seconds": list(seconds)}
    return {**times, "loss": loss, "peak_rss": rss, "pss": rss, "about": about}


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    times = Times()
    times.warm_up([answer(9, loss=1.0, rss=5000), answer(9, loss=3.0)])
    times.add([answer(1, 4), answer(2, 3, loss=1.5, rss=2000)])
    times.add([answer(6), answer(5)])
    assert times.rounds == [[2, 4], [6]]
    found = times.summary()
    assert (found["step_ms"], found["step_ms_min"], found["steps"]) == (4000, 2000, 3)
    assert (found["peak_rss"], found["peak_rss_of_start"], found["first_loss"]) == (2000, 5000, 2.0)


def test_ratios_are_of_medians_and_of_each_round() -> None:
    ours, theirs = Times(rounds=[[1, 1], [4, 4]]), Times(rounds=[[4, 4], [8, 8]])
    assert outcome.ratio(ours, theirs) == {
        "of_medians": 2.5 / 6,
        "of_rounds": 0.375,
        "best_round": 0.25,
        "worst_round": 0.5,
    }


@pytest.mark.parametrize("q, value", [(0, 1), (0.1, 1.4), (0.5, 3), (1, 5)])
def test_quantiles_lie_between_neighbours(q: float, value: float) -> None:
    assert outcome.quantile([5, 1, 3, 2, 4], q) == pytest.approx(value)


def test_the_ideal_is_the_sum_of_its_parts() -> None:
    alone = [
        {"compute_seconds": 0.1, "optimizer_seconds": 0.06, "bytes_per_second": 2e9},
        {"compute_seconds": 0.2, "optimizer_seconds": 0.04, "bytes_per_second": 1e9},
    ]
    found = outcome.ideal(SMALL, alone)
    moved = 3 * 1.5 * 4 * SMALL.parameters
    assert found["bytes_moved_per_rank"] == moved
    assert found["ideal_ms"] == pytest.approx(1e3 * (0.2 + 0.03 + moved / 1e9))
    assert outcome.ideal(replace(SMALL, ranks=1), alone)["bytes_moved_per_rank"] == 0


# --- ranks --------------------------------------------------------------------------------------------------


def test_ranks_get_one_thread_and_no_foreign_choice_of_kernels(repo: Path) -> None:
    given = {
        "OPENBLAS_CORETYPE": "Haswell",
        "OPENBLAS_L2_SIZE": "1",
        "OMP_NUM_THREADS": "8",
        "PYTHONPATH": "/x",
    }
    environment, removed = child_environment(given)
    assert removed == ["OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"]
    assert not set(removed) & set(environment)
    assert environment["OMP_NUM_THREADS"] == environment["OPENBLAS_NUM_THREADS"] == "1"
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(repo), "/x"]


def test_a_rank_that_ends_is_named_with_its_log(tmp_path: Path) -> None:
    environment, _ = child_environment(os.environ)
    with pytest.raises(PoolError, match=r"bad: rank \d has ended(.|\n)*bench.train.nobody"):
        Pool("bad", sys.executable, "bench.train.nobody", SMALL, "", tmp_path, 30, environment, False)


def test_a_rank_that_does_not_know_a_command_says_so_and_all_end(tmp_path: Path) -> None:
    environment, _ = child_environment(os.environ)
    meeting = bytes(pynccl.get_unique_id("host")).hex()
    pool = Pool("ours", sys.executable, "bench.train.ours", SMALL, meeting, tmp_path, 30, environment, False)
    assert [len(one["seconds"]) for one in pool.ask("run 2")] == [2, 2]
    with pytest.raises(PoolError, match="is no command"):
        pool.ask("dance")
    pool.close()


# --- the program --------------------------------------------------------------------------------------------


def test_it_measures_itself_and_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    options = "--layers 3 --width 32 --batch 4 --ranks 2 --rounds 2 --steps 1 --delay-ms 1"
    assert main([*options.split(), "--strategies", "no_shard,full_shard", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    full = found["ours"]["full_shard"]
    assert full["calls_per_step"] == {"all_gather": 6, "reduce_scatter": 3, "all_reduce": 0}
    assert full["bytes_sent_per_step"] == {
        "all_gather": 6 * (32 * 33 * 4) / 2,
        "reduce_scatter": 3 * (32 * 33 * 4) / 2,
        "all_reduce": 0,
    }
    assert found["ours"]["no_shard"]["calls_per_step"] == {
        "all_gather": 0,
        "reduce_scatter": 0,
        "all_reduce": 3,
    }
    assert found["model_state_bytes_per_rank"] == found["model_state_bytes_ideal"] == 8 * 3 * 32 * 33
    assert full["live_buffer_bytes_per_rank"] == 4 * 32 * 33 * 4
    for key in ("step_ms", "step_ms_p10", "step_ms_p90", "peak_rss", "loss"):
        assert full[key] > 0
    assert found["ideal_ms"] > 0 and found["peak_rss"] == full["peak_rss"]
    assert found["overlap"]["delay_ms_per_step"] == 9
    assert found["verdicts"]["collectives as predicted"]
    assert found["verdicts"]["equal losses after the warm-up, to 1e-4"]
    text = capsys.readouterr().out
    assert "ours.full_shard" in text and "6 all_gather, 3 reduce_scatter" in text


def test_a_contestant_that_cannot_start_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--layers 1 --width 8 --batch 1 --ranks 1 --rounds 1 --delay-ms 0 --peers ddp --peer-python"
    assert main([*options.split(), sys.executable]) == 1
    assert "ddp: rank 0 has ended" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--peers", "horovod"],
        ["--layers", "0"],
        ["--strategies", "zero9"],
        ["--delay-ms", "-1"],
        ["--quiet", "inf"],
        ["--timeout", "nan"],
        ["--timeout", "-1"],
    ],
)
def test_misuse_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert arguments[1] in capsys.readouterr().err


@pytest.mark.peers
def test_torch_trains_the_same(repo: Path, tmp_path: Path) -> None:
    options = "--layers 3 --width 32 --batch 4 --ranks 2 --rounds 1 --steps 1 --delay-ms 0 --peers fsdp2,ddp"
    command = [
        sys.executable,
        "-m",
        "bench.train_step",
        *options.split(),
        "--json",
        str(tmp_path / "out.json"),
    ]
    subprocess.run(command, cwd=repo, check=True, timeout=100, stdout=subprocess.DEVNULL)
    found = json.loads((tmp_path / "out.json").read_text())
    for name in ("fsdp2", "ddp"):
        assert found[name]["first_loss"] == pytest.approx(found["ours"]["full_shard"]["first_loss"], rel=1e-5)
    assert {"full_shard/fsdp2", "full_shard/ddp"} <= set(found["ratios"])


class Answering:
    """A contestant that tells how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def ask(self, command: str) -> list[dict[str, Any]]:
        self.asked += 1
        return [{"asked": self.asked}]

    def processor_time(self) -> int:
        return 0


def test_a_turn_is_taken_once_without_patience() -> None:
    pool: Any = Answering()
    answers, others = turn(pool, "run 1", 0.0)
    assert answers == [{"asked": 1}] and 0 <= others <= 1


def test_a_turn_that_others_disturb_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([(0, 0), (0, 100)] + [(0, 100), (50, 200)] + [(50, 200), (50, 300)] + [(50, 300), (52, 400)])
    monkeypatch.setattr("bench.train.pool.machine_time", lambda: next(ticks))
    pool: Any = Answering()
    assert turn(pool, "run 1", 60.0) == ([{"asked": 2}], 0.02)

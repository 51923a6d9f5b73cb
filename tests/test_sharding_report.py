"""Reports, estimates and traces of sharded models: predictions are what happens, and pictures show it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pynccl.testing import run_ranks
from sharding import AdamW, MixedPrecision, fully_shard, report
from sharding.estimate import estimate, main
from sharding.trace import Tracer

UNITS = ["embed", "blocks.*", "head"]

SETTINGS: dict[str, dict[str, Any]] = {
    "no_shard": {"strategy": "no_shard"},
    "shard_optimizer": {"strategy": "shard_optimizer"},
    "shard_grad_op": {"strategy": "shard_grad_op"},
    "full_shard": {"strategy": "full_shard"},
    "full_shard, weights kept": {"strategy": "full_shard", "reshard_after_forward": False},
    "full_shard, parts kept": {"strategy": "full_shard", "reshard_after_forward": 2},
    "full_shard, no prefetch": {"strategy": "full_shard", "prefetch": False},
    "full_shard, bfloat16": {
        "strategy": "full_shard",
        "precision": MixedPrecision(param="float32", gather="bfloat16", reduce="float32"),
    },
    "shard_grad_op, bfloat16": {
        "strategy": "shard_grad_op",
        "precision": MixedPrecision(param="bfloat16", reduce="bfloat16"),
    },
    "hybrid_shard": {"strategy": "hybrid_shard", "mesh": (2, 0)},
}


def parameters() -> dict[str, Any]:
    """Uneven, tied over two units, of two dtypes, one frozen, one scalar, one empty."""
    embed = np.full((5, 6), 0.5, np.float32)
    blocks = [
        {
            "w": np.full((6, 7 + k), 0.25, np.float32),
            "h": np.ones(3, np.float16),
            "b": np.zeros(0, np.float32),
        }
        for k in range(4)
    ]
    return {"embed": embed, "blocks": blocks, "head": {"w": embed, "s": np.array(2.0, np.float32)}}


def train(model: Any, optimizer: Any, steps: int, microbatches: int, sync: bool, norms: int) -> None:
    for _ in range(steps):
        for number in range(microbatches):
            last = number == microbatches - 1
            with model.microbatch(last=last, sync=sync or last):
                for unit in model:
                    with unit.forward():
                        pass
                for unit in reversed(model):
                    with unit.backward() as (_, gradients):
                        fill(gradients)
        for p in range(1, norms + 1):
            model.grad_norm(p)  # the same norm again would be remembered
        optimizer.step()
        model.zero_grad()


def fill(tree: Any) -> None:
    if isinstance(tree, np.ndarray):
        tree[...] = 1
    else:
        for part in tree.values() if isinstance(tree, dict) else tree:
            fill(part)


def of_ranks(name: str, n: int) -> dict[str, Any] | None:
    """The setting for n ranks, None where it has no meaning."""
    chosen = dict(SETTINGS[name])
    if chosen.get("reshard_after_forward") == 2 and n % 2:
        return None
    if "mesh" in chosen:
        chosen["mesh"] = (2, n // 2) if n % 2 == 0 else (1, n)
    return chosen


# Groups of 2 do not divide an odd number of ranks.
POSSIBLE = [(name, n) for name in SETTINGS for n in (1, 2, 3, 4) if of_ranks(name, n) is not None]


def memory_of(arrays: list[Any]) -> int:
    """Bytes of the memory that these arrays cover together."""
    spans = sorted(
        (a.__array_interface__["data"][0], a.__array_interface__["data"][0] + a.nbytes) for a in arrays
    )
    covered = end = 0
    for start, stop in spans:
        covered += max(0, stop - max(start, end))
        end = max(end, stop)
    return covered


@pytest.mark.parametrize(("name", "n"), POSSIBLE)
def test_every_collective_and_byte_is_as_predicted(name: str, n: int) -> None:
    setting = of_ranks(name, n)
    assert setting is not None

    def rank(comm):
        seen = []
        for microbatches, sync, norms in ((1, True, 0), (3, True, 1), (3, False, 2)):
            model = fully_shard(parameters(), comm, units=UNITS, frozen=["blocks.1"], **setting)
            with model:
                optimizer = AdamW(model, lr=0.5)
                train(model, optimizer, 2, microbatches, sync, norms)
                cost = report.check(model, 2, microbatches, sync=sync, norms=norms)
                seen.append((dict(cost.total.calls), cost.total.bytes_sent))
        return seen

    first, *others = run_ranks(n, rank, library="host")
    assert all(other == first for other in others)
    if n == 1:
        assert all(sent == 0 and not any(calls.values()) for calls, sent in first)
    else:
        assert all(sent > 0 for _, sent in first)


@pytest.mark.parametrize(("name", "n"), POSSIBLE)
def test_memory_is_as_predicted(name: str, n: int) -> None:
    setting = of_ranks(name, n)
    assert setting is not None

    def rank(comm):
        with fully_shard(parameters(), comm, units=UNITS, frozen=["blocks.1"], **setting) as model:
            optimizer = AdamW(model, lr=0.5)
            train(model, optimizer, 1, 1, True, 0)
            total = model.summary(optimizer).total
            weights = [a for s in model.shards for a in (s.data, s.source)]
            gradients = [s.grad for s in model.shards if s.grad is not None]
            for unit in model.all_units:
                if unit.kept_weights is not None:
                    weights += unit.kept_weights.gathered + unit.kept_weights.computed
                gradients += unit.whole or []
            parts = [part for unit in model.all_units for part in unit.part or []]
            wholes = memory_of([whole for unit in model.all_units for whole in unit.whole or []])
            live = model.gatherer.bytes_made + model.reducer.bytes_made - wholes + memory_of(parts)
            assert total.weights == memory_of(weights)
            assert total.gradients == memory_of(gradients)
            assert total.optimizer == optimizer.state_bytes
            if setting.get("prefetch") is False and n > 1:
                assert total.live > live  # without prefetch one slot of weights was enough
            else:
                assert total.live == live

    run_ranks(n, rank, library="host")


def test_a_check_that_fails_names_each_count() -> None:
    def rank(comm):
        with fully_shard(parameters(), comm, units=UNITS) as model:
            optimizer = AdamW(model, lr=0.5)
            train(model, optimizer, 2, 1, True, 0)
            model.counters.all_gather += 1
            model.counters.reduce_scatter_bytes += 4
            model.counters.peak_grad_buffers = 3
            with pytest.raises(report.MismatchError) as caught:
                report.check(model, 2)
            return str(caught.value)

    for text in run_ranks(2, rank, library="host"):
        assert "all_gather: predicted" in text and "calls" in text
        assert "reduce_scatter: predicted" in text and "bytes sent" in text
        assert "full grad buffers: at most 2 may live, counted 3" in text
        assert "all_reduce" not in text


def test_the_summary_has_a_row_for_each_unit_and_the_sum() -> None:
    def rank(comm):
        with fully_shard(parameters(), comm, units=UNITS) as model:
            return str(model.summary()), model.summary().to_dict(), [u.name for u in model.all_units]

    text, found, units = run_ranks(2, rank, library="host")[0]
    assert [unit["name"] for unit in found["units"]] == units
    for key in ("weights_bytes", "gradients_bytes", "optimizer_bytes", "sent_bytes", "parameters"):
        assert found[key] == sum(unit[key] for unit in found["units"])
    lines = text.splitlines()
    assert lines[0].startswith("full_shard (ZeRO-3) on 2 ranks")
    assert [line.split()[0] for line in lines[3:-3]] == units
    assert lines[-2].split()[0] == "total"


def test_an_unknown_optimizer_is_named_with_the_known_ones() -> None:
    def rank(comm):
        with fully_shard(parameters(), comm) as model:
            with pytest.raises(ValueError, match="'adamax'.*adamw"):
                model.summary("adamax")
            with pytest.raises(ValueError, match="steps=-1"):
                report.check(model, -1)

    run_ranks(1, rank, library="host")


# --- estimates ----------------------------------------------------------------------------------------------

FORMULAE = {
    "float32": {
        "no_shard": (16, 0),
        "shard_optimizer": (8, 8),
        "shard_grad_op": (4, 12),
        "full_shard": (0, 16),
    },
    "bfloat16": {
        "no_shard": (16, 0),
        "shard_optimizer": (4, 12),
        "shard_grad_op": (2, 14),
        "full_shard": (0, 16),
    },
}


@pytest.mark.parametrize("dtype", FORMULAE)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_state_follows_the_formulae_of_zero(dtype: str, ranks: int) -> None:
    params = 80 * 1024 * 1024
    reports = estimate(params, ranks, layers=80, param_dtype=dtype)
    for name, (whole, divided) in FORMULAE[dtype].items():
        if name != "no_shard" or ranks > 1:
            assert reports[name].total.state == whole * params + divided * params // ranks, name


@pytest.mark.parametrize("microbatches", [1, 4])
def test_bytes_sent_follow_the_formulae_of_zero(microbatches: int) -> None:
    params, n, m = 80 * 1024 * 1024, 8, microbatches
    reports = estimate(params, n, layers=80, microbatches=m)
    elements = {"no_shard": 2, "shard_optimizer": 2, "shard_grad_op": 1 + m, "full_shard": 3 * m}
    for name, times in elements.items():
        assert reports[name].total.bytes_sent == 4 * times * params * (n - 1) // n, name


def test_the_estimate_of_a_model_is_what_the_model_says() -> None:
    def rank(comm):
        params = {f"layers.{k}.w": np.zeros(48, np.float32) for k in range(5)}
        made = {}
        for name in ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard"):
            with fully_shard(params, comm, units=["layers.*"], strategy=name) as model:
                made[name] = model.summary(microbatches=2).to_dict()
        return made

    for n in (1, 2, 3):
        made = run_ranks(n, rank, library="host")[0]
        for name, found in made.items():
            assert estimate(240, n, layers=5, microbatches=2)[name].to_dict() == found


def test_seventy_billion_parameters_in_bfloat16_on_8_ranks(repo: Path) -> None:
    command = "-m sharding.estimate --params 70e9 --layers 80 --ranks 8 --param-dtype bfloat16 --json"
    done = subprocess.run(
        [sys.executable, *command.split()], capture_output=True, text=True, cwd=repo, timeout=60, check=True
    )
    found = json.loads(done.stdout)["strategies"]
    assert list(found) == ["no_shard", "shard_optimizer", "shard_grad_op", "full_shard", "hybrid_shard"]
    full, unit = found["full_shard"], 70e9 / 80
    assert full["state_bytes"] == 16 * 70e9 / 8
    assert full["live_bytes"] == 2 * unit * 2 + 2 * unit * 2  # two units of weights, two of gradients
    assert full["state_and_live_bytes"] == full["state_bytes"] + full["live_bytes"]
    assert found["hybrid_shard"]["state_bytes"] == 16 * 70e9 / 4


def test_the_text_has_every_strategy_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--params", "7e9", "--ranks", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("7e+09 parameters in 32 units on 8 ranks")
    assert [line.split()[0] for line in lines[3:8]] == [
        "no_shard",
        "shard_optimizer",
        "shard_grad_op",
        "full_shard",
        "hybrid_shard",
    ]
    assert "14 GB" in lines[6]


@pytest.mark.parametrize(
    "arguments, culprit",
    [
        (["--params", "10", "--ranks", "2"], "params=10"),
        (["--params", "1e6", "--ranks", "0"], "ranks=0"),
        (["--params", "1e6", "--ranks", "4", "--mesh", "3x2"], "mesh 3x2"),
        (["--params", "1e6", "--ranks", "4", "--mesh", "two"], "--mesh"),
    ],
)
def test_an_impossible_estimate_is_refused(
    arguments: list[str], culprit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert culprit in capsys.readouterr().err


# --- traces -------------------------------------------------------------------------------------------------


def test_each_step_is_a_line_whose_parts_add_up(tmp_path: Path) -> None:
    def rank(comm):
        with (
            fully_shard(parameters(), comm, units=UNITS) as model,
            Tracer(model, tmp_path / "log.{rank}.jsonl") as tracer,
        ):
            optimizer = AdamW(model, lr=0.5)
            for number in range(3):
                with tracer.step(tokens=1000, epoch=7) as line:
                    train(model, optimizer, 1, 2, True, 1)
                    line["loss"] = np.float32(number)

    run_ranks(2, rank, library="host")
    for number in range(2):
        lines = [json.loads(line) for line in (tmp_path / f"log.{number}.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3]
        assert [line["loss"] for line in lines] == [0, 1, 2]
        for line in lines:
            parts = ("gather", "compute", "reduce", "optimizer", "other")
            assert math.isclose(sum(line[part] for part in parts), line["seconds"])
            assert all(line[part] >= 0 for part in parts)
            assert line["optimizer"] > 0 and line["compute"] > 0
            assert 0 <= line["hidden"] <= line["communication"] <= line["seconds"]
            assert math.isclose(line["tokens_per_second"], 1000 / line["seconds"])
            assert line["rank"] == number and line["epoch"] == 7
            assert 0 < line["rss"] <= line["peak_rss"]
        assert {(line["all_gather"], line["reduce_scatter"], line["all_reduce"]) for line in lines} == {
            (lines[0]["all_gather"], lines[0]["reduce_scatter"], 1)
        }


def test_only_rank_0_writes_a_file_without_a_place_for_the_rank(tmp_path: Path) -> None:
    def rank(comm):
        seen: list[dict[str, Any]] = []
        with (
            fully_shard(parameters(), comm) as model,
            Tracer(model, tmp_path / "log.jsonl", on_step=seen.append) as tracer,
        ):
            optimizer = AdamW(model, lr=0.5)
            with tracer.step():
                train(model, optimizer, 1, 1, True, 0)
        return len(seen)

    assert run_ranks(3, rank, library="host") == [1, 1, 1]
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 1


def test_a_picture_shows_collectives_where_they_run_beside_the_computation(tmp_path: Path) -> None:
    def rank(comm):
        params = {name: np.ones(8, np.float32) for name in "abc"}
        gated = Gated(comm)
        with (
            fully_shard(params, gated, units=["*"]) as model,
            Tracer(model, chrome=tmp_path / "trace.{rank}.json", chrome_steps=1) as tracer,
        ):
            for _ in range(2):
                with tracer.step(), model.microbatch():
                    for unit in model:
                        with unit.forward():
                            # The gather of b waits for this, and is over before the computation of a is.
                            gated.gate.set()
                            model.runtime.settle()
                model.zero_grad()

    run_ranks(2, rank, library="host")
    for number in range(2):
        events = json.loads((tmp_path / f"trace.{number}.json").read_text())
        spans = [event for event in events if event["ph"] == "X"]
        assert {event["pid"] for event in events} == {number}
        names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        assert names == {3: "steps", 0: "compute", 1: "gather stream", 2: "reduce stream"}
        assert [span["name"] for span in spans if span["tid"] == 3] == ["step 1"]
        gathers = [span for span in spans if span["tid"] == 1]
        # forward, then backward, where the user opened none: in passing
        assert [span["name"][-1] for span in sorted(gathers, key=lambda span: span["ts"])] == list("abccba")
        compute = next(span for span in spans if span["name"] == "forward a")
        gather = next(span for span in gathers if span["name"] == "all_gather b")
        assert compute["ts"] < gather["ts"] + gather["dur"] < compute["ts"] + compute["dur"]


class Gated:
    """A communicator whose gathers, but the first, wait on their stream until the gate is open."""

    def __init__(self, comm: Any, gate: threading.Event | None = None) -> None:
        self._comm, self.gate = comm, gate or threading.Event()
        self.rank, self.size = comm.rank, comm.size
        self._first = True

    def all_gather(self, x: Any, out: Any = None, *, stream: Any = None) -> Any:
        if stream is not None and not self._first:
            stream.call(lambda: self.gate.wait(30))
        self._first = False
        return self._comm.all_gather(x, out=out, stream=stream)

    def split(self, color: int, key: int = 0) -> Gated:
        return Gated(self._comm.split(color, key), self.gate)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def test_a_tracer_that_is_closed_hears_nothing_more() -> None:
    def rank(comm):
        seen: list[dict[str, Any]] = []
        with fully_shard(parameters(), comm) as model:
            optimizer = AdamW(model, lr=0.5)
            tracer = Tracer(model, on_step=seen.append)
            with pytest.raises(ZeroDivisionError), tracer.step():
                1 / 0  # noqa: B018
            assert seen == [] and tracer.steps == 0
            with tracer.step(), pytest.raises(RuntimeError, match="another step"), tracer.step():
                pass
            tracer.close()
            tracer.close()
            train(model, optimizer, 1, 1, True, 0)
            assert model.events.now() is None
        return len(seen)

    assert run_ranks(1, rank, library="host") == [1]

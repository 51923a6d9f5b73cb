"""From times to statements: medians and spread, ratios, the ideal, the verdicts; as JSON and as a table.

Pure functions of what the ranks answered.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.train.problem import Problem

__all__ = ["Times", "ideal", "quantile", "ratio", "verdicts"]


@dataclass
class Times:
    """What one contestant did: a list of step times for each round (of a step, the slowest rank's)."""

    rounds: list[list[float]] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """Processor time of a step, mean of the ranks."""
    others: list[float] = field(default_factory=list)
    """Of each round: the share of the machine's processor time that other programs had."""
    peak_rss: int = 0
    """Bytes, of the largest rank, during the steps (not while it starts)."""
    start_peak_rss: int = 0
    pss: int = 0
    first_loss: float = float("nan")
    """Mean of the ranks after the warm-up: equal for all contestants, or they train different things."""
    loss: float = float("nan")
    """Mean of the ranks, before the last update."""
    about: list[dict[str, Any]] = field(default_factory=list)
    """The last answers, by rank."""

    def warm_up(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """What is not measured."""
        self.start_peak_rss = max(answer["peak_rss"] for answer in answers)
        self.first_loss = sum(answer["loss"] for answer in answers) / len(answers)

    def add(self, answers: Sequence[Mapping[str, Any]], others: float = 0.0) -> None:
        """One round, in which other programs had that share of the machine's processor time."""
        self.others.append(others)
        self.rounds.append([max(step) for step in zip(*(a["seconds"] for a in answers), strict=True)])
        self.cpu += [
            sum(step) / len(answers) for step in zip(*(a["cpu_seconds"] for a in answers), strict=True)
        ]
        self.peak_rss = max([self.peak_rss, *(a["peak_rss"] for a in answers)])
        self.pss = max([self.pss, *(a["pss"] for a in answers)])
        self.loss = sum(a["loss"] for a in answers) / len(answers)
        self.about = [a["about"] for a in answers]

    @property
    def steps(self) -> list[float]:
        """All steps, in seconds."""
        return [step for steps in self.rounds for step in steps]

    def summary(self) -> dict[str, Any]:
        """As the JSON has it; times in milliseconds."""
        ms = [1e3 * step for step in self.steps]
        return {
            "step_ms": statistics.median(ms),
            "step_ms_p10": quantile(ms, 0.1),
            "step_ms_p90": quantile(ms, 0.9),
            "step_ms_min": min(ms),
            "steps": len(ms),
            "cpu_ms": 1e3 * statistics.median(self.cpu),
            "others": statistics.median(self.others),
            "others_max": max(self.others),
            "peak_rss": self.peak_rss,
            "peak_rss_of_start": self.start_peak_rss,
            "pss": self.pss,
            "model_state_bytes_per_rank": max(a["model_state_bytes"] for a in self.about),
            "first_loss": self.first_loss,
            "loss": self.loss,
            "version": self.about[0]["version"],
            "blas": self.about[0]["blas"],
        }


def quantile(values: Sequence[float], q: float) -> float:
    """Linear between the nearest two."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def ratio(ours: Times, theirs: Times) -> dict[str, float]:
    """Ours over theirs: of the medians, and the median, best and worst of the rounds' own ratios.

    A round's contestants ran within seconds of each other, so what slows the machine for a while slows both.
    """
    rounds = [
        statistics.median(a) / statistics.median(b) for a, b in zip(ours.rounds, theirs.rounds, strict=True)
    ]
    return {
        "of_medians": statistics.median(ours.steps) / statistics.median(theirs.steps),
        "of_rounds": statistics.median(rounds),
        "best_round": min(rounds),
        "worst_round": max(rounds),
    }


def ideal(problem: Problem, alone: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """compute + optimizer / N + bytes over memory bandwidth, in milliseconds, from what `alone` measured.

    Bytes that N ranks must at least load and store together for s bytes: (N + 1) s for an all-gather and as
    many for a reduce-scatter (each rank reads its part or the whole once, and what is made is written once).
    A full_shard step has two gathers and one reduction of all parameters.
    """
    n = problem.ranks
    compute = max(a["compute_seconds"] for a in alone)
    optimizer = max(a["optimizer_seconds"] for a in alone) / n
    bandwidth = min(a["bytes_per_second"] for a in alone)
    moved = 3 * (n + 1) / n * 4 * problem.parameters if n > 1 else 0.0
    return {
        "compute_ms": 1e3 * compute,
        "optimizer_ms": 1e3 * optimizer,
        "communication_ms": 1e3 * moved / bandwidth,
        "ideal_ms": 1e3 * (compute + optimizer + moved / bandwidth),
        "bytes_moved_per_rank": moved,
        "memory_bytes_per_second_per_rank": bandwidth,
        "compute_gflops_per_second_per_rank": problem.flops / compute / 1e9,
    }


def verdicts(result: Mapping[str, Any]) -> dict[str, bool]:
    """The targets, as far as what they need was measured."""
    found = {}
    ours, ratios = result["ours"]["full_shard"], result["ratios"]
    if "fsdp2" in result:
        found["full_shard step <= 0.4 of FSDP2"] = ratios["full_shard/fsdp2"]["of_medians"] <= 0.4
        found["peak resident memory below FSDP2's"] = ours["peak_rss"] < result["fsdp2"]["peak_rss"]
    if "ddp" in result:
        found["full_shard faster than DDP"] = ratios["full_shard/ddp"]["of_medians"] < 1
    state, live = ours["model_state_bytes_per_rank"], ours["live_buffer_bytes_per_rank"]
    wanted = result["model_state_bytes_ideal"]
    found["model state within 2 % of 16P/N"] = abs(state / wanted - 1) <= 0.02
    found["with live buffers within 2 % of 16P/N + two units of weights and gradients"] = (
        abs((state + live) / (wanted + result["two_units_bytes"]) - 1) <= 0.02
    )
    contestants = [*result["ours"].values(), *(result[name] for name in ("fsdp2", "ddp") if name in result)]
    found["equal losses after the warm-up, to 1e-4"] = all(
        abs(row["first_loss"] / ours["first_loss"] - 1) <= 1e-4 for row in contestants
    )
    found["collectives as predicted"] = result["collectives_as_predicted"]
    if "overlap" in result:
        overlap = result["overlap"]
        found["step with delay and prefetch below the sum"] = overlap["step_ms"] < overlap["sum_ms"]
    return found

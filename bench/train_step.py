"""One training step of an MLP in float32 with AdamW: ours against torch FSDP2 and DDP over Gloo, in one run.

    python -m bench.train_step --layers 8 --width 2048 --batch 64 --ranks 2 --peers fsdp2,ddp --json out.json

All contestants start together, warm up, and then take turns, a few steps a round, so that what disturbs the
machine disturbs all of them. Each rank is a process with one thread for arithmetic. What a contestant is: see
`bench.train`; method and results: docs/sharding-performance.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pynccl
from bench.ending import Terminated, terminated_by_signals
from bench.files import refuse_unwritable, written
from bench.numbers import real
from bench.options import UsageError
from bench.train.environment import peer_python
from bench.train.outcome import Times, ideal, ratio, verdicts
from bench.train.pool import Pool, PoolError, child_environment, turn
from bench.train.problem import Problem
from sharding.layout import Spec, plan
from sharding.policy import STRATEGIES, strategy_named
from sharding.report import COLLECTIVES, Report, Setting, human, predict, render

__all__ = ["main"]

PEERS = ("fsdp2", "ddp")


@dataclass(frozen=True)
class Entry:
    """One contestant: how its ranks are started."""

    name: str
    module: str
    problem: Problem
    python: str
    environ: Mapping[str, str] = field(default_factory=dict)
    meets_by_file: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 if a contestant failed or (with --strict) a target was missed, 2 for misuse."""
    options = _parser().parse_args(arguments)
    problem = Problem(options.layers, options.width, options.batch, options.ranks)
    try:
        refuse_unwritable("--json", options.json)
        entries = _entries(options, problem)
        with terminated_by_signals():
            result = _measure(options, problem, entries)
    except UsageError as error:
        print(f"train_step: {error}", file=sys.stderr)
        return 2
    except (PoolError, OSError, pynccl.NcclError) as error:
        print(f"train_step: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except Terminated as end:
        return end.status
    print(_text(result), flush=True)
    if options.json and not written(
        "train_step", "--json", options.json, json.dumps(result, indent=1) + "\n"
    ):
        return 1
    return 1 if options.strict and not all(result["verdicts"].values()) else 0


def _entries(options: argparse.Namespace, problem: Problem) -> list[Entry]:
    entries = []
    for name in options.strategies:
        entries.append(
            Entry(
                f"ours.{name}",
                "bench.train.ours",
                problem,
                sys.executable,
                {"BENCH_TRAIN_STRATEGY": name},
            )
        )
    whole = replace(problem, ranks=1, batch=problem.batch * problem.ranks)
    entries.append(Entry("ours.single", "bench.train.ours", whole, sys.executable))
    entries.append(Entry("alone", "bench.train.alone", problem, sys.executable))
    if options.delay_ms and problem.ranks > 1:
        for name, prefetch in (("delay.prefetch", "1"), ("delay.no_prefetch", "0")):
            environ = {"BENCH_TRAIN_DELAY": str(options.delay_ms / 1e3), "BENCH_TRAIN_PREFETCH": prefetch}
            entries.append(Entry(name, "bench.train.ours", problem, sys.executable, environ))
    if options.peers:
        python = options.peer_python or peer_python()
        for name in options.peers:
            entries.append(Entry(name, f"bench.train.{name}", problem, python, meets_by_file=True))
    return entries


# --- measuring ----------------------------------------------------------------------------------------------


def _measure(options: argparse.Namespace, problem: Problem, entries: Sequence[Entry]) -> dict[str, Any]:
    times = {entry.name: Times() for entry in entries}
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="train_step.") as folder:
        environment, removed = child_environment(os.environ)
        with _pools(options, entries, environment, Path(folder)) as pools:
            for name, pool in pools.items():
                times[name].warm_up(pool.ask(f"run {options.warmup}"))
                pool.ask("reset")
            for number in range(options.rounds):
                for name, pool in pools.items():
                    times[name].add(*turn(pool, f"run {options.steps}", options.quiet))
                _progress(number, options.rounds, times)
    return _result(options, problem, times, removed, load_before)


@contextlib.contextmanager
def _pools(
    options: argparse.Namespace, entries: Sequence[Entry], environment: Mapping[str, str], folder: Path
) -> Iterator[dict[str, Pool]]:
    pools: dict[str, Pool] = {}
    try:
        for entry in entries:
            meeting = (
                str(folder / f"{entry.name}.meeting")
                if entry.meets_by_file
                else bytes(pynccl.get_unique_id("host")).hex()
            )
            pools[entry.name] = Pool(
                entry.name,
                entry.python,
                entry.module,
                entry.problem,
                meeting,
                folder,
                options.timeout,
                {**environment, **entry.environ},
                options.pin,
            )
        yield pools
    finally:
        for pool in pools.values():
            pool.close()


def _progress(number: int, rounds: int, times: Mapping[str, Times]) -> None:
    if sys.stderr.isatty():
        last = "  ".join(f"{name} {1e3 * min(t.rounds[-1]):.0f}" for name, t in times.items())
        print(f"round {number + 1} of {rounds}: {last} ms", file=sys.stderr)


# --- what is said of it -------------------------------------------------------------------------------------


def _predicted(problem: Problem, strategy: str) -> Report:
    kind = strategy_named(strategy)
    shards = problem.ranks if kind.shards else 1
    names = [(f"{layer}.{what}", layer) for layer in range(problem.layers) for what in "wb"]
    shape = {"w": (problem.width, problem.width), "b": (problem.width,)}
    specs = [Spec(name, shape[name[-1]], "float32") for name, _ in names]
    units = {name: str(layer) for name, layer in names}
    layout = plan(specs, units, list(dict.fromkeys(units.values())), shards)
    return predict(layout, Setting(kind, shards, 1 if kind.shards else problem.ranks))


def _counts(about: Mapping[str, Any], predicted: Report) -> tuple[dict[str, Any], bool]:
    """(calls and bytes sent by one rank in a step, whether they are exactly what was predicted)."""
    counted, steps = about["counters"], about["steps"]
    calls = {name: counted[name] / steps for name in COLLECTIVES}
    sent = {name: counted[f"{name}_bytes"] / steps for name in COLLECTIVES}
    as_predicted = calls == predicted.total.calls and sent == predicted.total.sent
    return {"calls_per_step": calls, "bytes_sent_per_step": sent}, as_predicted


def _result(
    options: argparse.Namespace,
    problem: Problem,
    times: Mapping[str, Times],
    removed: list[str],
    load_before: tuple[float, float, float],
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "problem": asdict(problem) | {"parameters": problem.parameters, "flops": problem.flops},
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "cpu": _cpu(),
            "load_before": load_before,
            "load_after": os.getloadavg(),
            "variables_taken_away": removed,
        },
        "ours": {},
        "collectives_as_predicted": True,
    }
    for name, taken in times.items():
        kind, _, rest = name.partition(".")
        place = result.setdefault(kind, {}) if rest else result
        place[rest or kind] = taken.summary()
        if kind == "ours" and rest in STRATEGIES:
            report = _predicted(problem, rest)
            counts, good = _counts(taken.about[0], report)
            place[rest] |= counts
            if rest == "full_shard":
                place[rest]["live_buffer_bytes_per_rank"] = taken.about[0]["live_buffer_bytes"]
            result["collectives_as_predicted"] &= good
    full = result["ours"]["full_shard"]
    result |= ideal(problem, times["alone"].about)
    result["model_state_bytes_ideal"] = 16 * problem.parameters / problem.ranks
    result["two_units_bytes"] = 2 * (4 + 4) * problem.parameters / problem.layers
    for key in ("model_state_bytes_per_rank", "peak_rss"):
        result[key] = full[key]
    result["ratios"] = _ratios(times) | {
        "full_shard/ideal": {"of_medians": full["step_ms"] / result["ideal_ms"]}
    }
    if "delay" in result:
        result["overlap"] = _overlap(options.delay_ms, result)
    result["verdicts"] = verdicts(result)
    return result


def _ratios(times: Mapping[str, Times]) -> dict[str, dict[str, float]]:
    against = [name for name in (*PEERS, "ours.single") if name in times]
    return {
        f"{ours.partition('.')[2]}/{theirs.rpartition('.')[2]}": ratio(times[ours], times[theirs])
        for ours in times
        if ours.partition(".")[2] in STRATEGIES
        for theirs in against
    }


def _overlap(delay_ms: float, result: Mapping[str, Any]) -> dict[str, float]:
    """With every collective late by a given time: the step with prefetch, and the sum of both."""
    full = result["ours"]["full_shard"]
    waited = delay_ms * sum(full["calls_per_step"].values())
    return {
        "delay_ms_per_collective": delay_ms,
        "delay_ms_per_step": waited,
        "step_ms_without_delay": full["step_ms"],
        "sum_ms": full["step_ms"] + waited,
        "step_ms": result["delay"]["prefetch"]["step_ms"],
        "step_ms_without_prefetch": result["delay"]["no_prefetch"]["step_ms"],
    }


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _text(result: Mapping[str, Any]) -> str:
    problem, machine = result["problem"], result["machine"]
    shown = {f"ours.{name}": value for name, value in result["ours"].items()}
    shown |= {name: result[name] for name in PEERS if name in result}
    columns = (
        "contestant",
        "step ms",
        "p10",
        "p90",
        "cpu ms",
        "others",
        "state/rank",
        "peak RSS",
        "first loss",
    )
    rows = [columns] + [
        (
            name,
            *(f"{row[key]:.1f}" for key in ("step_ms", "step_ms_p10", "step_ms_p90", "cpu_ms")),
            f"{row['others']:.1%}",
            human(row["model_state_bytes_per_rank"]),
            human(row["peak_rss"]),
            f"{row['first_loss']:.7f}",
        )
        for name, row in shown.items()
    ]
    full = result["ours"]["full_shard"]
    calls = ", ".join(f"{count:g} {name}" for name, count in full["calls_per_step"].items() if count)
    sent = sum(full["bytes_sent_per_step"].values())
    lines = [
        f"{problem['layers']} layers of {problem['width']}x{problem['width']} "
        f"({problem['parameters']:,} parameters), float32, AdamW, {problem['batch']} rows a rank, "
        f"{problem['ranks']} ranks with one thread each",
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_before'][0]:.1f} before and "
        f"{machine['load_after'][0]:.1f} after",
        *(f"taken away from all ranks: {name}" for name in machine["variables_taken_away"]),
        *sorted(
            {
                f"{name}: {row['version']}, {row['blas']}"
                for name, row in shown.items()
                if "single" not in name
            }
        ),
        "",
        *render(rows, rule_before=(1,)),
        "",
        f"ideal {result['ideal_ms']:.1f} ms = compute {result['compute_ms']:.1f} "
        f"({result['compute_gflops_per_second_per_rank']:.0f} GFLOP/s a rank) + optimizer/N "
        f"{result['optimizer_ms']:.1f} + communication {result['communication_ms']:.1f} "
        f"({human(result['bytes_moved_per_rank'])} at "
        f"{human(result['memory_bytes_per_second_per_rank'])}/s)",
        f"full_shard per step and rank: {calls or 'no collective'}; {human(sent)} sent; live buffers "
        f"{human(full['live_buffer_bytes_per_rank'])}; state is 16P/N = "
        f"{human(result['model_state_bytes_ideal'])} "
        f"{full['model_state_bytes_per_rank'] / result['model_state_bytes_ideal'] - 1:+.2%}",
    ]
    for name, value in result["ratios"].items():
        rounds = (
            f" (rounds {value['best_round']:.3f} to {value['worst_round']:.3f})"
            if "best_round" in value
            else ""
        )
        lines.append(f"{name}: {value['of_medians']:.3f}{rounds}")
    if "overlap" in result:
        overlap = result["overlap"]
        lines.append(
            f"each collective {overlap['delay_ms_per_collective']:g} ms late "
            f"({overlap['delay_ms_per_step']:.0f} ms a step): {overlap['step_ms']:.1f} ms with prefetch, "
            f"{overlap['step_ms_without_prefetch']:.1f} without; the sum is {overlap['sum_ms']:.1f}"
        )
    lines += [f"{'yes' if good else 'NO '}  {what}" for what, good in result["verdicts"].items()]
    return "\n".join(lines)


# --- the command line ---------------------------------------------------------------------------------------


def _names(known: Sequence[str], required: str | None = None) -> Any:
    def parse(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        if required and required not in found:
            found.insert(0, required)
        return found

    return parse


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.train_step", description="A training step, ours against torch's."
    )
    parser.add_argument("--layers", type=_positive, default=8)
    parser.add_argument("--width", type=_positive, default=2048)
    parser.add_argument("--batch", type=_positive, default=64, help="rows on each rank (default 64)")
    parser.add_argument("--ranks", type=_positive, default=2)
    parser.add_argument(
        "--strategies",
        type=_names(tuple(STRATEGIES), "full_shard"),
        default=["full_shard"],
        help="ours, comma-separated; full_shard always runs",
    )
    parser.add_argument(
        "--peers", type=_names(PEERS), default=[], help="fsdp2,ddp; torch is installed for them if need be"
    )
    parser.add_argument("--peer-python", help="an interpreter with torch (default: build/bench/venv-torch)")
    parser.add_argument("--rounds", type=_positive, default=10, help="turns of each contestant (default 10)")
    parser.add_argument("--steps", type=_positive, default=3, help="in a turn (default 3)")
    parser.add_argument("--warmup", type=_positive, default=3, help="steps before the first turn (default 3)")
    parser.add_argument(
        "--delay-ms", type=real(0), default=10.0, help="of the overlap test, for each collective; 0: no test"
    )
    parser.add_argument(
        "--quiet",
        type=real(0),
        default=0.0,
        help="seconds for each turn to wait for an idle machine, and to be taken again if others disturb it",
    )
    parser.add_argument("--pin", action="store_true", help="each rank, of every contestant, to a core")
    parser.add_argument(
        "--timeout", type=real(0, above=True), default=300.0, help="seconds for one answer (default 300)"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--json", help="write everything to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())

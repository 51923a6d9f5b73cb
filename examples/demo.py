"""What `make demo` runs: real collectives between processes, and trainings that use them.

It starts the same programs that a user would start, reads the files they write, checks what they claim, and
draws it. All of it is under build/demo: `summary.json`, pictures, and the programs' own files. The last line
is `demo OK`, or says what failed; the exit status says the same.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pynccl
from pynccl.abi import choose, gpus

RANKS = 2
FOLDER = Path("build/demo")
MOST_LOSS_DIFFERENCE = 1e-5
MOST_STATE = 1.1  # of what is kept between steps: a rank's bytes x ranks / unsharded; some of it is whole
PLAIN_STEPS = 60
STEPS, SAVE_AT, UNSHARDED_STEPS = 160, 120, 10
STEP_SECONDS = 120  # what takes longer than this has hung
TRACED_STEP = 12


class DemoFailure(Exception):
    """What failed, in words for the last line."""


@dataclass(frozen=True)
class Sizes:
    """How many ranks the sharded training has, how many it resumes on, and the texts in a step."""

    ranks: int
    resumed: int
    batch: int

    @classmethod
    def of(cls, gpus: int) -> Sizes:
        """All GPUs, then one fewer; in host memory (no GPUs) 2 ranks, then 3."""
        ranks, resumed = (gpus, gpus - 1) if gpus else (RANKS, RANKS + 1)
        each = math.lcm(ranks, resumed)
        return cls(ranks, resumed, each * max(1, 12 // each))


def main(arguments: Sequence[str] = ()) -> int:
    argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="Show pynccl at work between processes of this machine, check what it computes, and draw "
        "it. It takes a minute or two and writes into build/demo of the current folder.",
    ).parse_args(arguments)
    try:
        demo()
    except BrokenPipeError:  # `| head` has read enough
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # for the flush at exit
        return 128 + signal.SIGPIPE
    except (DemoFailure, pynccl.NcclError, OSError, KeyError, ValueError) as error:
        print(f"demo FAILED: {error}", flush=True)
        return 1
    except KeyboardInterrupt:
        print("demo FAILED: interrupted", flush=True)
        return 130
    print("demo OK", flush=True)
    return 0


def demo() -> None:
    marks = [("begin", time.monotonic())]
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    environment, sizes = choose_library()

    heading(f"1. all_reduce between {RANKS} processes, from 8 bytes to 64 MiB, every result checked")
    sweep_file = FOLDER / "sweep.json"
    run(sweep_command(sweep_file), environment)
    sweep = read_sweep(json.loads(sweep_file.read_text()))
    marks.append(("sweep", time.monotonic()))

    one_thread = {**environment, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    heading(f"2. data-parallel training on {RANKS} ranks, then on 1 rank, which must agree")
    several = train(RANKS, one_thread)
    alone = train(1, one_thread)
    difference = compare_losses(several["losses"], alone["losses"])
    check_that_it_learnt(several)
    marks.append(("data_parallel", time.monotonic()))

    heading(f"3. a GPT sharded over {sizes.ranks} ranks, saved, resumed on {sizes.resumed}, which must agree")
    whole = sharded("sharded", sizes.ranks, sizes, one_thread, ["--save-at", str(SAVE_AT), *tracing()])
    resumed = sharded("resumed", sizes.resumed, sizes, one_thread, ["--resume"])
    unsharded = sharded("unsharded", 1, sizes, one_thread, ["--stop", str(UNSHARDED_STEPS)])
    resume_difference = compare_resumed(whole, resumed)
    check_that_it_learnt(whole)
    check_state(whole, unsharded)
    marks.append(("sharded", time.monotonic()))

    heading("4. results")
    print(whole["report"] + "\n")
    draw_sweep(sweep, several["library"], FOLDER / "busbw.png")
    draw_losses(several, alone, whole, resumed, FOLDER / "loss.png")
    draw_memory([unsharded, whole, resumed], FOLDER / "memory.png")
    draw_timeline([read_trace(rank) for rank in range(sizes.ranks)], FOLDER / "timeline.png")
    marks.append(("pictures", time.monotonic()))
    summary = {
        "loss_first": whole["losses"][0],
        "loss_last": whole["losses"][-1],
        "max_abs_loss_diff_vs_1_rank": difference,
        "resume_max_abs_diff": resume_difference,
        "model_state_bytes_per_rank": whole["model_state_bytes_per_rank"],
        "model_state_bytes_unsharded": unsharded["model_state_bytes_per_rank"],
        "step_split": whole["step_split"],
        "sweep": sweep,
        "ranks": sizes.ranks,
        "steps": STEPS,
        "parameters": whole["parameters"],
        "text_bytes": whole["text_bytes"],
        "entropy_of_bytes": whole["entropy_of_bytes"],
        "sharded": {
            name: {key: value for key, value in result.items() if key not in ("losses", "report")}
            for name, result in (("whole", whole), ("resumed", resumed), ("unsharded", unsharded))
        },
        "data_parallel": {
            "ranks": RANKS,
            "steps": PLAIN_STEPS,
            "parameters": several["parameters"],
            "max_abs_loss_diff_vs_1_rank": difference,  # of this part; above as well, where it was asked for
            "loss_first": several["losses"][0],
            "loss_last": several["losses"][-1],
            "training_seconds": {"1_rank": alone["seconds"], f"{RANKS}_ranks": several["seconds"]},
        },
        "seconds": {
            **{name: end - begin for (_, begin), (name, end) in zip(marks, marks[1:], strict=False)},
            "total": marks[-1][1] - marks[0][1],
        },
        "library": {"kind": several["library"], "version": several["library_version"]},
        "versions": {
            "pynccl": pynccl.__version__,
            "python": platform.python_version(),
            "numpy": version("numpy"),
        },
        "machine": {"cores": len(os.sched_getaffinity(0)), "system": platform.platform()},
    }
    (FOLDER / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print_summary(summary)


def choose_library() -> tuple[dict[str, str], Sizes]:
    """The environment of the programs, and sizes. GPUs where each rank gets one; else this says so."""
    chosen = choose()
    print(f"library: {chosen.name} ({chosen.reason})")
    if chosen.name == "host":
        return dict(os.environ), Sizes.of(0)
    count = len(gpus().devices)
    if "PYNCCL_LIBRARY" not in os.environ and count < RANKS:
        print(f"one GPU is too few for {RANKS} ranks of NCCL: this demo runs on the host library")
        return {**os.environ, "PYNCCL_LIBRARY": "host"}, Sizes.of(0)
    return dict(os.environ), Sizes.of(max(count, RANKS))


def sweep_command(file: Path) -> list[str]:
    sizes = ["-b", "8", "-e", "64M", "-f", "2"]
    return [sys.executable, "-m", "bench.all_reduce_perf", *sizes, "-g", str(RANKS), "-J", str(file)]


def train(ranks: int, environment: Mapping[str, str]) -> dict[str, Any]:
    """The data-parallel program on so many ranks; what its rank 0 wrote."""
    program = ["examples.train_bytes_lm", "--steps", str(PLAIN_STEPS)]
    return launch(f"train_{ranks}", ranks, program, environment)


def sharded(
    name: str, ranks: int, sizes: Sizes, environment: Mapping[str, str], options: Sequence[str]
) -> dict[str, Any]:
    """The sharded program on so many ranks; what its rank 0 wrote."""
    program = ["examples.train_sharded", "--steps", str(STEPS), "--batch", str(sizes.batch)]
    checkpoints = ["--checkpoints", str(FOLDER / "checkpoints")]
    return launch(name, ranks, [*program, *checkpoints, *options], environment)


def tracing() -> list[str]:
    return ["--trace", str(FOLDER / "trace.rank{rank}.json")]


def launch(name: str, ranks: int, program: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    file = FOLDER / f"{name}.json"
    launcher = ["-m", "pynccl.launch", "-n", str(ranks), "--output", "raw"] if ranks > 1 else []
    run([sys.executable, *launcher, "-m", *program, "--json", str(file)], environment)
    return json.loads(file.read_text())


def run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run to the end, showing its output; DemoFailure if it does not end well, or does not end."""
    shown = " ".join(["python", *command[1:]])
    print(f"$ {shown}", flush=True)
    with subprocess.Popen(command, env=environment) as process:
        try:
            status = process.wait(STEP_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher ends its ranks
            raise DemoFailure(f"`{shown}` did not end within {STEP_SECONDS} s") from None
    if status:
        raise DemoFailure(f"`{shown}` ended with status {status}")


def read_sweep(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per size: bytes, times in us and bus bandwidths in GB/s of both placements, wrong elements."""
    rows = [
        {
            "bytes": row["size"],
            **{f"{place}_us": row[place]["time"] for place in ("out_of_place", "in_place")},
            **{f"{place}_busbw": row[place]["bus_bw"] for place in ("out_of_place", "in_place")},
            "wrong": row["out_of_place"]["nwrong"] + row["in_place"]["nwrong"],
        }
        for row in document["results"]
    ]
    if not rows:
        raise DemoFailure("the sweep measured nothing")
    if wrong := sum(row["wrong"] for row in rows):
        raise DemoFailure(f"the sweep found {wrong} wrong elements")
    return rows


def compare_losses(several: Sequence[float], alone: Sequence[float]) -> float:
    """The largest difference of any step's loss; DemoFailure if it is too large for rounding."""
    return largest_difference(
        (f"{RANKS} ranks", several), ("1 rank", alone), first=0, most=MOST_LOSS_DIFFERENCE
    )


def compare_resumed(whole: Mapping[str, Any], resumed: Mapping[str, Any]) -> float:
    """The same, of the steps after the resume and those of the run that went on."""
    if resumed["first"] != SAVE_AT:
        raise DemoFailure(f"the training was saved at step {SAVE_AT} and resumed at {resumed['first']}")
    return largest_difference(
        (f"{whole['ranks']} ranks", whole["losses"][SAVE_AT:]),
        (f"{resumed['ranks']} ranks after the resume", resumed["losses"]),
        first=SAVE_AT,
        most=MOST_LOSS_DIFFERENCE,
    )


def largest_difference(
    one: tuple[str, Sequence[float]], other: tuple[str, Sequence[float]], *, first: int, most: float
) -> float:
    (name, losses), (other_name, others) = one, other
    if len(losses) != len(others):
        raise DemoFailure(f"{name} made {len(losses)} steps and {other_name} {len(others)}")
    differences = [abs(a - b) for a, b in zip(losses, others, strict=True)]
    worst = max(differences)
    if not worst <= most or not all(map(math.isfinite, differences)):
        step = next(step for step, value in enumerate(differences) if not value <= most)
        raise DemoFailure(
            f"the loss at step {first + step} is {losses[step]} on {name}, {others[step]} on {other_name}"
        )
    return worst


def check_that_it_learnt(result: Mapping[str, Any]) -> None:
    """Its last ten losses beat every model that does not look at the context."""
    last = result["losses"][-10:]
    mean, bound = sum(last) / len(last), result["entropy_of_bytes"]
    if not mean < bound:
        raise DemoFailure(f"the loss fell to {mean:.3f} only; counting bytes alone gives {bound:.3f}")


def check_state(whole: Mapping[str, Any], unsharded: Mapping[str, Any]) -> None:
    """A rank keeps its part of the model's state, and little more."""
    mine, all_of_it = whole["model_state_bytes_per_rank"], unsharded["model_state_bytes_per_rank"]
    if not mine <= MOST_STATE * all_of_it / whole["ranks"]:
        raise DemoFailure(f"each of {whole['ranks']} ranks keeps {mine} of {all_of_it} bytes of model state")


def read_trace(rank: int) -> list[dict[str, Any]]:
    """A rank's events of one step."""
    events = json.loads((FOLDER / f"trace.rank{rank}.json").read_text())
    step = next(e for e in events if e["name"] == f"step {TRACED_STEP}")
    return [
        event
        for event in events
        if event["ph"] == "X" and step["ts"] <= event["ts"] < step["ts"] + step["dur"]
    ]


def draw_sweep(rows: Sequence[Mapping[str, Any]], library: str, file: Path) -> None:
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    sizes = [row["bytes"] for row in rows]
    for axes, column, label in ((left, "busbw", "bus bandwidth (GB/s)"), (right, "us", "time (us)")):
        for place, marker in (("out_of_place", "o"), ("in_place", "s")):
            name = place.replace("_", " ")
            axes.plot(sizes, [row[f"{place}_{column}"] for row in rows], marker=marker, ms=4, label=name)
        axes.set_xscale("log", base=2)
        ticks = sizes[::-4][::-1]  # the largest size has one
        axes.set_xticks(ticks, [size_text(size) for size in ticks])
        axes.set_xlabel("bytes per rank")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        axes.legend()
    left.set_ylim(bottom=0)
    right.set_yscale("log")
    figure.suptitle(f"all_reduce of float32 between {RANKS} ranks ({library} library)")
    figure.savefig(file, dpi=120)
    plt.close(figure)


def draw_losses(
    several: Mapping[str, Any],
    alone: Mapping[str, Any],
    whole: Mapping[str, Any],
    resumed: Mapping[str, Any],
    file: Path,
) -> None:
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained", sharey=True)
    left.plot(several["losses"], lw=4, alpha=0.4, label=f"{RANKS} ranks, half of each batch each")
    left.plot(alone["losses"], lw=1, color="black", label="1 rank, the whole batch")
    left.set_title(f"data parallel, {several['parameters']:,} parameters, float64")
    right.plot(whole["losses"], lw=4, alpha=0.4, label=f"{whole['ranks']} ranks, to the end")
    at = range(resumed["first"], resumed["first"] + len(resumed["losses"]))
    right.plot(at, resumed["losses"], lw=1, color="black", label=f"resumed on {resumed['ranks']} ranks")
    right.axvline(resumed["first"], color="gray", lw=1)
    right.set_title(f"fully sharded, {whole['parameters']:,} parameters, float32")
    for axes, result in ((left, several), (right, whole)):
        for value, label in (
            (math.log(256), "knowing nothing"),
            (result["entropy_of_bytes"], "counting bytes, without context"),
        ):
            axes.axhline(value, color="gray", ls=":", lw=1)
            axes.annotate(
                label, (len(result["losses"]), value), ha="right", va="bottom", color="gray", fontsize=8
            )
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(loc="center right")
    left.set_ylabel("loss (nats per byte)")
    figure.suptitle("Models of bytes, on Python's own documentation")
    figure.savefig(file, dpi=120)
    plt.close(figure)


def draw_memory(results: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Bytes on each rank, by what they are for."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    names = ["1 rank, whole"] + [f"each of {result['ranks']} ranks" for result in results[1:]]
    bottoms = [0.0] * len(results)
    for part, label in (
        ("weights", "weights"),
        ("gradients", "gradients"),
        ("optimizer", "optimizer (two moments)"),
        ("live", "whole units, during a step"),
    ):
        sizes = [result["memory"][part] / 1e6 for result in results]
        style = {"hatch": "//", "color": "lightgray"} if part == "live" else {}
        axes.bar(names, sizes, 0.6, bottoms, label=label, **style)
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    axes.set_ylabel("MB on each rank")
    axes.set_title(f"Memory of {results[0]['parameters']:,} parameters in float32 with AdamW")
    axes.legend()
    figure.savefig(file, dpi=120)
    plt.close(figure)


TRACKS = ("computation", "gather stream", "reduce stream")
COLORS = {
    "compute": "tab:blue",
    "optimizer": "tab:purple",
    "gather": "lightgray",
    "reduce": "gray",
    "all_gather": "tab:orange",
    "reduce_scatter": "tab:green",
    "all_reduce": "tab:red",
}
WORDS = {"gather": "wait for weights", "reduce": "wait for gradients"}


def draw_timeline(ranks: Sequence[Sequence[Mapping[str, Any]]], file: Path) -> None:
    """One step of each rank: what it computes, and what its streams carry meanwhile."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(12, 1.2 + 1.1 * len(ranks)), layout="constrained")
    begin = min(event["ts"] for events in ranks for event in events)
    labels, seen = [], set()
    for rank, events in enumerate(ranks):
        for track, name in enumerate(TRACKS):
            row = -(4 * rank + track)
            labels.append((row, f"rank {rank}: {name}"))
            for event in events:
                kind = event["cat"]
                if event["tid"] != track or kind not in COLORS:
                    continue
                label = None if kind in seen else WORDS.get(kind, kind)
                seen.add(kind)
                start, width = (event["ts"] - begin) / 1e3, event["dur"] / 1e3
                axes.barh(row, width, 0.8, start, color=COLORS[kind], label=label, ec="white", lw=0.3)
    axes.set_yticks([row for row, _ in labels], [label for _, label in labels])
    axes.set_xlabel("ms")
    axes.set_title("One step: forward left, backward right, each with the next unit's weights on their way")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def size_text(size: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size} {unit}"
        size //= 1024
    return f"{size} GiB"


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


def print_summary(summary: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    last, seconds, split = summary["sweep"][-1], summary["seconds"], summary["step_split"]
    plain, sharded = summary["data_parallel"], summary["sharded"]
    best = max(row[f"{place}_busbw"] for row in summary["sweep"] for place in ("out_of_place", "in_place"))
    state, whole = summary["model_state_bytes_per_rank"], summary["model_state_bytes_unsharded"]
    parts = ", ".join(
        f"{part} {split[part]:.0f}" for part in ("gather", "compute", "reduce", "optimizer", "other")
    )
    table = Table(show_header=False)
    for name, value in (
        ("all_reduce of 8 bytes", f"{summary['sweep'][0]['in_place_us']:.1f} us in place"),
        (f"all_reduce of {size_text(last['bytes'])}", f"{last['in_place_us'] / 1e3:.1f} ms in place"),
        ("best bus bandwidth", f"{best:.1f} GB/s"),
        (f"data parallel, {RANKS} ranks", f"loss {plain['loss_first']:.3f} -> {plain['loss_last']:.3f}"),
        ("  largest difference from 1 rank", f"{summary['max_abs_loss_diff_vs_1_rank']:.1e}"),
        (
            f"sharded over {summary['ranks']} ranks",
            f"loss {summary['loss_first']:.3f} -> {summary['loss_last']:.3f}",
        ),
        (
            f"  resumed on {sharded['resumed']['ranks']}: largest difference",
            f"{summary['resume_max_abs_diff']:.1e} in {STEPS - SAVE_AT} steps",
        ),
        ("  model state on each rank", f"{state / 1e6:.2f} MB of {whole / 1e6:.2f} MB ({state / whole:.1%})"),
        ("  sent in a step by each rank", f"{sharded['whole']['bytes_sent_per_step'] / 1e6:.2f} MB"),
        ("  a step", f"{split['step']:.0f} ms: {parts}"),
        (
            "  collectives in a step",
            f"{split['communication']:.0f} ms, {split['hidden']:.0f} ms of them behind computation",
        ),
        ("files in " + str(FOLDER), "summary.json, loss.png, memory.png, timeline.png, busbw.png"),
        ("  for ui.perfetto.dev", "trace.rank0.json"),
        ("in all", f"{seconds['total']:.0f} s"),
    ):
        table.add_row(name, value)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What `make demo` runs: real collectives between two processes, then a small training that uses them.

It starts the same programs that a user would start, reads the files they write, checks what they claim, and
draws it. All of it is under build/demo: `summary.json`, `busbw.png`, `loss.png`, and the programs' own files.
The last line is `demo OK`, or says what failed; the exit status says the same.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pynccl
from pynccl.abi import choose, gpus

RANKS = 2
FOLDER = Path("build/demo")
MOST_LOSS_DIFFERENCE = 1e-5
STEP_SECONDS = 120  # what takes longer than this has hung


class DemoFailure(Exception):
    """What failed, in words for the last line."""


def main() -> int:
    try:
        demo()
    except (DemoFailure, pynccl.NcclError, OSError, KeyError, ValueError) as error:
        print(f"demo FAILED: {error}", flush=True)
        return 1
    except KeyboardInterrupt:
        print("demo FAILED: interrupted", flush=True)
        return 130
    print("demo OK", flush=True)
    return 0


def demo() -> None:
    begun = time.monotonic()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    environment = choose_library()

    heading(f"1. all_reduce between {RANKS} processes, from 8 bytes to 64 MiB, every result checked")
    sweep_file = FOLDER / "sweep.json"
    run(sweep_command(sweep_file), environment)
    sweep = read_sweep(json.loads(sweep_file.read_text()))
    swept = time.monotonic()

    heading(f"2. training a language model of bytes on {RANKS} ranks, then on 1 rank, which must agree")
    one_thread = {**environment, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    several = train(RANKS, one_thread)
    alone = train(1, one_thread)
    difference = compare_losses(several["losses"], alone["losses"])
    check_that_it_learnt(several)
    trained = time.monotonic()

    heading("3. results")
    draw_sweep(sweep, several["library"], FOLDER / "busbw.png")
    draw_losses(several, alone, FOLDER / "loss.png")
    summary = {
        "loss_first": several["losses"][0],
        "loss_last": several["losses"][-1],
        "max_abs_loss_diff_vs_1_rank": difference,
        "sweep": sweep,
        "ranks": RANKS,
        "steps": len(several["losses"]),
        "parameters": several["parameters"],
        "text_bytes": several["text_bytes"],
        "entropy_of_bytes": several["entropy_of_bytes"],
        "training_seconds": {"1_rank": alone["seconds"], f"{RANKS}_ranks": several["seconds"]},
        "seconds": {
            "sweep": swept - begun,
            "training": trained - swept,
            "total": time.monotonic() - begun,
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


def choose_library() -> dict[str, str]:
    """The environment of the programs. They use GPUs where each rank gets one; if not, this says so."""
    chosen = choose()
    print(f"library: {chosen.name} ({chosen.reason})")
    if chosen.name != "host" and "PYNCCL_LIBRARY" not in os.environ and len(gpus().devices) < RANKS:
        print(f"one GPU is too few for {RANKS} ranks of NCCL: this demo runs on the host library")
        return {**os.environ, "PYNCCL_LIBRARY": "host"}
    return dict(os.environ)


def sweep_command(file: Path) -> list[str]:
    sizes = ["-b", "8", "-e", "64M", "-f", "2"]
    return [sys.executable, "-m", "bench.all_reduce_perf", *sizes, "-g", str(RANKS), "-J", str(file)]


def train(ranks: int, environment: Mapping[str, str]) -> dict[str, Any]:
    """The same program on so many ranks; what its rank 0 wrote."""
    file = FOLDER / f"train_{ranks}.json"
    program = ["-m", "examples.train_bytes_lm", "--json", str(file)]
    launcher = ["-m", "pynccl.launch", "-n", str(ranks), "--output", "raw"] if ranks > 1 else []
    run([sys.executable, *launcher, *program], environment)
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
    if len(several) != len(alone):
        raise DemoFailure(f"{RANKS} ranks made {len(several)} steps and 1 rank {len(alone)}")
    differences = [abs(a - b) for a, b in zip(several, alone, strict=True)]
    worst = max(differences)
    if not worst <= MOST_LOSS_DIFFERENCE:  # a NaN is not
        step = differences.index(worst)
        raise DemoFailure(
            f"the loss at step {step} is {several[step]} on {RANKS} ranks, {alone[step]} on 1 rank"
        )
    return worst


def check_that_it_learnt(result: Mapping[str, Any]) -> None:
    """Its last ten losses beat every model that does not look at the context."""
    last = result["losses"][-10:]
    mean, bound = sum(last) / len(last), result["entropy_of_bytes"]
    if not mean < bound:
        raise DemoFailure(f"the loss fell to {mean:.3f} only; counting bytes alone gives {bound:.3f}")


def draw_sweep(rows: Sequence[Mapping[str, Any]], library: str, file: Path) -> None:
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    sizes = [row["bytes"] for row in rows]
    for axes, column, label in ((left, "busbw", "bus bandwidth (GB/s)"), (right, "us", "time (us)")):
        for place, marker in (("out_of_place", "o"), ("in_place", "s")):
            name = place.replace("_", " ")
            axes.plot(sizes, [row[f"{place}_{column}"] for row in rows], marker=marker, ms=4, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes[::4], [size_text(size) for size in sizes[::4]])
        axes.set_xlabel("bytes per rank")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        axes.legend()
    left.set_ylim(bottom=0)
    right.set_yscale("log")
    figure.suptitle(f"all_reduce of float32 between {RANKS} ranks ({library} library)")
    figure.savefig(file, dpi=120)
    plt.close(figure)


def draw_losses(several: Mapping[str, Any], alone: Mapping[str, Any], file: Path) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot(several["losses"], lw=4, alpha=0.4, label=f"{RANKS} ranks, half of each batch each")
    axes.plot(alone["losses"], lw=1, color="black", label="1 rank, the whole batch")
    for value, label in (
        (math.log(256), "knowing nothing"),
        (several["entropy_of_bytes"], "counting bytes, without context"),
    ):
        axes.axhline(value, color="gray", ls=":", lw=1)
        axes.annotate(
            label, (len(several["losses"]), value), ha="right", va="bottom", color="gray", fontsize=8
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title(f"A model of bytes, {several['parameters']:,} parameters, on Python's own documentation")
    axes.grid(alpha=0.3)
    axes.legend(loc="center right")
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

    last, seconds, training = summary["sweep"][-1], summary["seconds"], summary["training_seconds"]
    best = max(row[f"{place}_busbw"] for row in summary["sweep"] for place in ("out_of_place", "in_place"))
    table = Table(show_header=False)
    for name, value in (
        ("all_reduce of 8 bytes", f"{summary['sweep'][0]['in_place_us']:.1f} us in place"),
        (f"all_reduce of {size_text(last['bytes'])}", f"{last['in_place_us'] / 1e3:.1f} ms in place"),
        ("best bus bandwidth", f"{best:.1f} GB/s"),
        ("loss", f"{summary['loss_first']:.3f} -> {summary['loss_last']:.3f} nats per byte"),
        ("largest difference from 1 rank", f"{summary['max_abs_loss_diff_vs_1_rank']:.1e}"),
        (
            "training, one core per rank",
            f"{training['1_rank']:.1f} s on 1 rank, {training[f'{RANKS}_ranks']:.1f} s on {RANKS} ranks",
        ),
        ("files", f"{FOLDER}/summary.json, busbw.png, loss.png"),
        ("in all", f"{seconds['total']:.0f} s"),
    ):
        table.add_row(name, value)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())

"""The plots of the report: numbers in, PNGs out. Knows nothing of files or HTML."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.parse import Run

__all__ = ["Plot", "plots"]

SIDES = ("openmpi", "mpich", "gloo", "roofline")


@dataclass(frozen=True)
class Plot:
    """A picture, and the series that it shows: label to (sizes, values), for readers and tests."""

    title: str
    file: str
    png: bytes
    series: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]


def plots(
    runs: Sequence[tuple[str, Run]], peers: Sequence[tuple[str, Mapping[str, Any]]], roofline: float | None
) -> list[Plot]:
    """One plot for each program and quantity of the runs, and for each op, ranks and load of the peers."""
    return [*_run_plots(runs, roofline), *_peer_plots(peers)]


def _run_plots(runs: Sequence[tuple[str, Run]], roofline: float | None) -> Iterable[Plot]:
    for program in dict.fromkeys(run.program for _, run in runs):
        chosen = [(name, run) for name, run in runs if run.program == program]
        for quantity, unit, field in (("bus bandwidth", "GB/s", "busbw"), ("latency", "us", "time_us")):
            drawing = _Drawing(f"{program}: {quantity}", f"{quantity} ({unit})")
            for number, (name, run) in enumerate(chosen):
                _draw_run(drawing, f"{number + 1}: {name}", run, field)
            if roofline and field == "busbw":
                drawing.axes.axhline(roofline, color="black", linestyle=":", label="roofline")
            yield drawing.finish()


def _draw_run(drawing: _Drawing, name: str, run: Run, field: str) -> None:
    kinds = dict.fromkeys((row.type, row.redop, row.root, row.in_place) for row in run.rows)
    for kind in kinds:
        rows = [row for row in run.rows if (row.type, row.redop, row.root, row.in_place) == kind]
        dtype, redop, root, in_place = kind
        words = [dtype, redop] if len({one[:3] for one in kinds}) > 1 else []
        words += [f"root {root}"] if len({one[2] for one in kinds}) > 1 else []
        label = " ".join([name, *words, "in place" if in_place else "out of place"])
        drawing.line(
            label,
            [row.size for row in rows],
            [getattr(row, field) for row in rows],
            "--" if in_place else "-",
        )
        band = [row for row in rows if row.iterations]
        if field == "time_us" and band:
            drawing.axes.fill_between(
                [row.size for row in band],
                [row.iterations.min_us for row in band if row.iterations],
                [row.iterations.p99_us for row in band if row.iterations],
                alpha=0.15,
                color=drawing.axes.lines[-1].get_color(),
            )


def _peer_plots(peers: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterable[Plot]:
    for name, document in peers:
        rows = document["rows"]
        for op, ranks, load in dict.fromkeys((row["op"], row["ranks"], row["load"]) for row in rows):
            chosen = [row for row in rows if (row["op"], row["ranks"], row["load"]) == (op, ranks, load)]
            drawing = _Drawing(f"{op}, {ranks} ranks, {load} ({name})", "time of a call (us)")
            for buffers in dict.fromkeys(row["buffers"] for row in chosen):
                mine = [row for row in chosen if row["buffers"] == buffers]
                drawing.line(f"ours, {buffers}", [r["bytes"] for r in mine], [r["ours_us"] for r in mine])
            for side in SIDES:
                values = {row["bytes"]: row.get(f"{side}_us") for row in chosen}
                drawing.line(side, list(values), list(values.values()), ":" if side == "roofline" else "--")
            missed = [r for r in chosen if r.get("met") is False or r.get("roofline_met") is False]
            drawing.marks("target missed", [r["bytes"] for r in missed], [r["ours_us"] for r in missed])
            yield drawing.finish()


class _Drawing:
    """One pair of logarithmic axes. What a logarithm cannot show (0, nothing) is left out."""

    def __init__(self, title: str, unit: str) -> None:
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("plots need matplotlib: pip install 'pynccl-anywhere[bench]'") from error
        self.title, self.series = title, {}  # type: str, dict[str, Any]
        self.figure = Figure(figsize=(9, 5), layout="constrained")
        FigureCanvasAgg(self.figure)
        self.axes = self.figure.add_subplot()
        self.axes.set(title=title, xlabel="size (bytes)", ylabel=unit)
        self.axes.set_xscale("log", base=2)
        self.axes.set_yscale("log")
        self.axes.grid(True, alpha=0.3)

    def line(self, label: str, x: Sequence[Any], y: Sequence[Any], style: str = "-") -> None:
        points = [(a, b) for a, b in zip(x, y, strict=True) if b is not None and a > 0 and b > 0]
        if points:
            self.series[label] = tuple(zip(*points, strict=True))
            self.axes.plot(*self.series[label], style, marker=".", label=label.replace("$", r"\$"))

    def marks(self, label: str, x: Sequence[Any], y: Sequence[Any]) -> None:
        if x:
            self.axes.plot(x, y, "rx", markersize=9, label=label)

    def finish(self) -> Plot:
        if self.series:
            sizes = sorted({int(x) for xs, _ in self.series.values() for x in xs})
            shown = sizes[:: -(-len(sizes) // 14)]
            self.axes.set_xticks(shown, [_size(one) for one in shown])
            self.axes.legend(fontsize="small")
        else:
            self.axes.text(0.5, 0.5, "no data", transform=self.axes.transAxes, ha="center")
        box = io.BytesIO()
        self.figure.savefig(box, format="png", dpi=110)
        file = re.sub(r"\W+", "-", self.title).strip("-").lower() + ".png"
        return Plot(self.title, file, box.getvalue(), self.series)


def _size(size: float) -> str:
    for unit in ("", "K", "M", "G"):
        if size < 1024 or unit == "G":
            break
        size /= 1024
    return f"{size:.4g}{unit}"

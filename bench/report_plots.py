"""The plots of the report: numbers in, pictures out, as SVG for the page and as PNG. Knows no files.

A run, or a side of a comparison, has one colour in all plots; only where a single run has many kinds of calls
the colours are those. In the SVG black is `currentColor` and nothing
is behind the plot, so that it is readable on a light and on a dark page; so are all the colours.
"""

from __future__ import annotations

import colorsys
import io
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from xml.etree import ElementTree

from bench.parse import Record, Run
from bench.peer.rows import counted
from bench.report_tables import PEER_NAMES

__all__ = ["Plot", "colour", "plots"]

# Each has a contrast of at least 3 to white and to near-black. From the ninth on: as far as can be, in
# CIELAB, from all before; no two are closer than the closest of the first eight.
COLOURS = (
    *("#1f77d0", "#d9660b", "#2a9134", "#8e5bc0", "#c2418f", "#12888f", "#97663f", "#7a7a7a"),
    *("#f320f3", "#f3204a", "#623df5", "#919108", "#b1434e", "#b280ad", "#708650", "#0c64e9"),
)
GREY = COLOURS[7]
MISSED_COLOUR, DISTURBED_COLOUR, BLACK = "#d62728", "#a87b00", "#000000"
SIDE_COLOURS = {
    "ours, plain": "#1f77d0",
    "ours, mapped": "#8e5bc0",
    "ours, prepared": "#12888f",
    "Open MPI": "#d9660b",
    "MPICH": "#2a9134",
    "Gloo": "#97663f",
    "roofline": BLACK,
}
MARKERS = "osv^Dp*<>Xh"
PLACEMENT: tuple[Any, Any] = (
    {"linestyle": "-", "fillstyle": "full"},
    {"linestyle": "--", "fillstyle": "none"},
)  # not in place, in place
QUANTITIES = (("bus bandwidth", "GB/s", "busbw"), ("latency", "µs", "time_us"))
# A program with more kinds of calls (type, redop, root) than these has plots for each type.
# There a single run has a colour for each kind; of several runs so many kinds are drawn, and all are in the
# table.
KINDS_TOGETHER = 4
LABELS = 12  # along the axis of sizes
LONGEST_NAME = 32
WIDTH = 5.8  # inches
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "pynccl",
    "text.parse_math": False,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.markersize": 4,
    "axes.formatter.use_mathtext": False,
}


@dataclass(frozen=True)
class Plot:
    """A picture, and the series that it shows: label to (sizes, values), for readers and tests.

    `section` is what it belongs to: a program, or the name of a file of `bench.peers`. `file` is the PNG's
    name; `note` says what could not be drawn as it is.
    """

    section: str
    title: str
    file: str
    svg: str
    png: bytes
    series: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]
    note: str = ""


def colour(number: int) -> str:
    """Of run `number`, from 0 on. Beyond the table: other hues, as far from each other as they can be."""
    if number < len(COLOURS):
        return COLOURS[number]
    red, green, blue = colorsys.hls_to_rgb(0.618 * number % 1, 0.42, 0.6)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def plots(
    runs: Sequence[tuple[str, Run]], peers: Sequence[tuple[str, Mapping[str, Any]]], roofline: float | None
) -> list[Plot]:
    """Bandwidth and latency for each program of the runs; time for each op, ranks and load of the peers."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'pynccl-anywhere[bench]'") from error
    made: list[Plot] = []
    with mpl.rc_context(STYLE):
        for drawing in (*_run_drawings(runs, roofline), *_peer_drawings(peers)):
            file = _file(f"{drawing.section} {drawing.title}", {plot.file for plot in made})
            made.append(drawing.finish(file, f"p{len(made) + 1}-"))
    return made


def _file(title: str, taken: set[str]) -> str:
    """A name for any file system that is not taken yet."""
    stem = re.sub(r"\W+", "-", title).strip("-").lower()
    names = (f"{stem}{end}.png" for end in ("", *(f"-{number}" for number in range(2, len(taken) + 3))))
    return next(name for name in names if name not in taken)


# --- runs ---------------------------------------------------------------------------------------------------


def _run_drawings(runs: Sequence[tuple[str, Run]], roofline: float | None) -> Iterable[_Drawing]:
    for program in dict.fromkeys(run.program for _, run in runs):
        rows = [row for _, run in runs if run.program == program for row in run.rows]
        together = len({_kind(row) for row in rows}) <= KINDS_TOGETHER
        for dtype in [None] if together else dict.fromkeys(row.type for row in rows):
            shown = [row for row in rows if dtype in (None, row.type)]
            kinds = list(dict.fromkeys(_kind(row) for row in shown))
            alone = sum(run.program == program for _, run in runs) == 1
            by_kind = alone and len(kinds) > KINDS_TOGETHER
            few = kinds if alone else kinds[:KINDS_TOGETHER]
            for quantity, unit, field in QUANTITIES:
                title = f"{quantity}, {dtype}" if dtype else quantity
                drawing = _Drawing(program, title, f"{quantity} ({unit})")
                for number, (name, run) in enumerate(runs):
                    mine = [row for row in run.rows if run.program == program and _kind(row) in few]
                    _draw_run(drawing, number, name, mine, few, field, by_kind)
                _explain(drawing, shown, few, by_kind)
                if len(few) < len(kinds):
                    left_out = "; ".join(", ".join(words) for words in _words(kinds)[len(few) :])
                    drawing.remark(f"Not drawn, but in the table: {left_out}.")
                if roofline and field == "busbw":
                    drawing.level(roofline, f"roofline, {roofline:g} GB/s")
                yield drawing


_Kind = tuple[str, str, int]


def _kind(row: Record) -> _Kind:
    return row.type, row.redop, row.root


def _draw_run(
    drawing: _Drawing,
    number: int,
    name: str,
    run: Sequence[Record],
    kinds: Sequence[_Kind],
    field: str,
    by_kind: bool,
) -> None:
    """Colour: the run; marker: the kind of call, if there are several; dashes: in place.

    `by_kind`: there is one run, and the kinds have colours. Of the same call again (-N) the median counts.
    """
    label = f"{number + 1}: {name}"
    for kind, words in zip(kinds, _words(kinds), strict=True):
        for in_place in (False, True):
            rows = [row for row in run if _kind(row) == kind and row.in_place is in_place]
            if not rows:
                continue
            at = kinds.index(kind)
            shade = colour(at if by_kind else number)
            key = ", ".join(words) if by_kind else f"{number + 1}: {_shorter(name)}"
            marker = {"marker": MARKERS[(at if len(kinds) > 1 else number) % len(MARKERS)]}
            drawing.key(key, color=shade, **(marker if by_kind or len(kinds) == 1 else {}))
            style = PLACEMENT[in_place] | marker
            series = ", ".join((label, *words, "in place" if in_place else "out of place"))
            by_size: dict[int, list[Record]] = {}
            for row in rows:
                by_size.setdefault(row.size, []).append(row)
            values = [_middle([getattr(row, field) for row in same]) for same in by_size.values()]
            drawing.line(series, list(by_size), values, color=shade, **style)
            if any(len(same) > 1 for same in by_size.values()):
                drawing.remark("Of repeated sweeps (-N): the median, and a band from the least to the most.")
            drawing.band(_spreads(by_size, field), shade)


def _middle(values: Sequence[float]) -> float:
    """The median of those that are numbers."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


def _spreads(by_size: Mapping[int, Sequence[Record]], field: str) -> list[tuple[float, float, float]]:
    """Size, least and most: of single iterations (-I) for the time, else of repeated sweeps (-N)."""
    found: list[tuple[float, float, float]] = []
    for size, rows in by_size.items():
        if field == "time_us" and any(row.iterations for row in rows):
            ends = [(row.iterations.min_us, row.iterations.p99_us) for row in rows if row.iterations]
        else:
            ends = [(value, value) for row in rows if 0 <= (value := getattr(row, field)) < math.inf]
        if ends:
            found.append((size, min(low for low, _ in ends), max(high for _, high in ends)))
    return found if any(low < high for _, low, high in found) else []


def _explain(
    drawing: _Drawing, rows: Sequence[Record], kinds: Sequence[_Kind], by_kind: bool = False
) -> None:
    """What dashes and markers mean, where there is a choice."""
    if len({row.in_place for row in rows}) > 1:
        drawing.key("out of place", color=BLACK, **PLACEMENT[False])
        drawing.key("in place", color=BLACK, **PLACEMENT[True])
    for number, words in enumerate(_words(kinds) if len(kinds) > 1 and not by_kind else ()):
        drawing.key(", ".join(words), color=BLACK, marker=MARKERS[number % len(MARKERS)], linestyle="none")


def _words(kinds: Sequence[_Kind]) -> list[list[str]]:
    """Of each kind what tells it from the others."""
    varying = [len({kind[part] for kind in kinds}) > 1 for part in range(3)]
    said = [(dtype, redop, f"root {root}") for dtype, redop, root in kinds]
    return [[word for word, varies in zip(words, varying, strict=True) if varies] for words in said]


def _shorter(name: str) -> str:
    """The end of a long name tells more than its beginning."""
    return name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME :]


# --- peers --------------------------------------------------------------------------------------------------


def _peer_drawings(peers: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterable[_Drawing]:
    for name, document in peers:
        rows = document["rows"]
        for op, ranks in dict.fromkeys((row["op"], row["ranks"]) for row in rows):
            case = [row for row in rows if (row["op"], row["ranks"]) == (op, ranks)]
            drawings = []
            for load in dict.fromkeys(row["load"] for row in case):
                drawing = _Drawing(name, f"{op}, {ranks} ranks, {load}", "time of a call (µs)")
                _draw_peers(drawing, [row for row in case if row["load"] == load])
                drawings.append(drawing)
            _same_heights(drawings)  # the same operation, quiet and loaded, lies side by side
            yield from drawings


def _draw_peers(drawing: _Drawing, rows: Sequence[Mapping[str, Any]]) -> None:
    for buffers in dict.fromkeys(row["buffers"] for row in rows):
        mine = [row for row in rows if row["buffers"] == buffers]
        _draw_side(drawing, f"ours, {buffers}", "ours", mine, linestyle="-", marker="o")
    for side, name in {**PEER_NAMES, "roofline": "roofline"}.items():
        once = list({row["bytes"]: row for row in rows}.values())  # all kinds of ours lie beside the same
        style = (
            {"linestyle": ":", "marker": "."} if side == "roofline" else {"linestyle": "--", "marker": "s"}
        )
        _draw_side(drawing, name, side, once, **style)
    missed = [row for row in rows if row.get("met") is False or row.get("roofline_met") is False]
    for label, shade, marked in (
        ("misses its target", MISSED_COLOUR, [row for row in missed if counted(row)]),
        ("disturbed, not counted", DISTURBED_COLOUR, [row for row in rows if not counted(row)]),
    ):
        drawing.marks(label, shade, [(row["bytes"], row["ours_us"]) for row in marked])


def _draw_side(
    drawing: _Drawing, label: str, side: str, rows: Sequence[Mapping[str, Any]], **style: Any
) -> None:
    shade = SIDE_COLOURS.get(label, GREY)
    values = [row.get(f"{side}_us") for row in rows]
    if any(value is not None for value in values):
        drawing.key(label, color=shade, **style)
        drawing.line(label, [row["bytes"] for row in rows], values, color=shade, **style)
        spreads = [(row["bytes"], row.get("spread", {}).get(side)) for row in rows]
        drawing.band([(size, *spread) for size, spread in spreads if spread], shade)


# --- one plot -----------------------------------------------------------------------------------------------


class _Drawing:
    """One pair of logarithmic axes, on which 0 has a place of its own, at the edge."""

    def __init__(self, section: str, title: str, unit: str) -> None:
        from matplotlib.figure import Figure

        self.section, self.title, self.unit = section, title, unit
        self.series: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {}
        self.without_value = 0
        self.remarks: list[str] = []
        self.keys: dict[str, dict[str, Any]] = {}
        self.figure = Figure(layout="constrained")
        self.axes = self.figure.add_subplot()
        self.later: list[Callable[[], Any]] = []  # what is drawn once the scales are known

    def key(self, label: str, **style: Any) -> None:
        """An entry of the legend, once."""
        self.keys.setdefault(label, style)

    def remark(self, sentence: str) -> None:
        """Below the title, once."""
        if sentence not in self.remarks:
            self.remarks.append(sentence)

    def line(self, label: str, x: Sequence[float], y: Sequence[float | None], **style: Any) -> None:
        """What is no number from 0 on is left out, and counted."""
        points = sorted((a, b) for a, b in zip(x, y, strict=True) if b is not None and 0 <= b < math.inf)
        self.without_value += len(x) - len(points)
        if points:
            sizes, values = zip(*points, strict=True)
            self.series[label] = (sizes, values)
            self.later.append(partial(self.axes.plot, sizes, values, **style))

    def band(self, spreads: Sequence[tuple[float, float, float]], shade: str) -> None:
        """From the second to the third, at the first."""
        if len(spreads) > 1:
            sizes, low, high = zip(*sorted(spreads), strict=True)
            fill = partial(self.axes.fill_between, color=shade, alpha=0.18, linewidth=0)
            self.later.append(partial(fill, sizes, low, high))

    def marks(self, label: str, shade: str, points: Sequence[tuple[float, float]]) -> None:
        """Rings around points, which stay to be seen."""
        if points:
            style: Any = {"color": shade, "marker": "o", "markersize": 9, "fillstyle": "none"}
            style |= {"markeredgewidth": 1.3, "linestyle": "none"}
            x, y = zip(*points, strict=True)
            self.key(label, **style)
            self.later.append(partial(self.axes.plot, x, y, zorder=5, **style))

    def level(self, y: float, label: str) -> None:
        self.key(label, color=BLACK, linestyle=":")
        self.later.append(partial(self.axes.axhline, y, color=BLACK, linestyle=":"))

    def finish(self, file: str, prefix: str) -> Plot:
        """`prefix` begins every id in the SVG: ids must differ between the plots of a page."""
        sizes = sorted({x for xs, _ in self.series.values() for x in xs})
        values = [y for _, ys in self.series.values() for y in ys]
        _scale(self.axes.set_xscale, sizes, 2)
        _scale(self.axes.set_yscale, values, 10)
        for draw in self.later:
            draw()
        self._ticks(sizes, values)
        self._legend()
        svg, png = io.StringIO(), io.BytesIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        self.figure.savefig(svg, format="svg", transparent=True, metadata=nothing)
        self.axes.set_title(f"{self.section}: {self.title}", fontsize=10)  # the page has it above the picture
        self.figure.savefig(png, format="png", dpi=150)
        drawn = _for_a_page(svg.getvalue(), prefix, f"{self.section}: {self.title}")
        return Plot(self.section, self.title, file, drawn, png.getvalue(), self.series, self._note())

    def _legend(self) -> None:
        """Below the axes, which are as high as without it."""
        from matplotlib.lines import Line2D

        if not self.series:
            self.axes.text(0.5, 0.5, "no data", transform=self.axes.transAxes, ha="center")
        lines = [Line2D([], [], label=label, **style) for label, style in self.keys.items()]
        for columns in (3, 2, 1) if lines else ():
            self.figure.set_size_inches(WIDTH, 3.3 + 0.19 * math.ceil(len(self.keys) / columns))
            legend = self.figure.legend(
                handles=lines, loc="outside lower center", ncols=columns, fontsize=9, frameon=False
            )
            # Other fonts, on the page, may be a little wider.
            if columns == 1 or legend.get_window_extent().width < 0.93 * self.figure.bbox.width:
                return
            legend.remove()

    def _ticks(self, sizes: Sequence[float], values: Sequence[float]) -> None:
        from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

        self.axes.set(xlabel="size (bytes; K = 1024)", ylabel=self.unit)
        self.axes.grid(True, color="#808080", alpha=0.3, linewidth=0.6)
        if 0 in sizes:
            self.axes.set_xlim(left=-0.2 * _least(sizes))
        if 0 in values:
            self.axes.set_ylim(bottom=-0.2 * _least(values))
            if self.axes.get_yscale() == "symlog":
                self.axes.yaxis.set_major_locator(FixedLocator([0, *_decades(values)]))
                self.axes.yaxis.set_minor_locator(NullLocator())
            else:
                self.axes.set(ylim=(-0.05, 1), yticks=[0])
        elif values and max(values) < 100 * min(values):
            self.axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        shown = _apart(sizes)
        self.axes.set_xticks(shown, [_size(one) for one in shown])
        self.axes.xaxis.set_minor_locator(NullLocator())
        self.axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
        self.axes.yaxis.set_minor_formatter(NullFormatter())

    def _note(self) -> str:
        zeros = sum(y == 0 for _, ys in self.series.values() for y in ys)
        said = list(self.remarks)
        if zeros:
            said.append(
                f"{zeros} of the values are 0: the size is 0, or the file has too few decimals, "
                "or one rank is alone and nothing has to travel."
            )
        if self.without_value:
            said.append(f"Not drawn: {self.without_value} values that the file does not have as a number.")
        return " ".join(said)


def _scale(setter: Callable[..., None], values: Sequence[float], base: int) -> None:
    """Logarithmic; with a 0, linear below the least positive value; linear if there is none."""
    if any(value > 0 for value in values):
        if 0 in values:
            setter("symlog", base=base, linthresh=_least(values), linscale=0.5)
        else:
            setter("log", base=base)


def _least(values: Iterable[float]) -> float:
    """The least positive value; 1 if there is none."""
    return min((value for value in values if value > 0), default=1.0)


def _decades(values: Sequence[float]) -> list[float]:
    """Round numbers among the positive values: powers of ten, if there are some, and not too many."""
    least, most = _least(values), max(values)
    powers = range(math.floor(math.log10(least)), math.floor(math.log10(most)) + 1)
    tens = [10.0**power for power in powers if least <= 10.0**power]
    between = [part * 10.0**power for power in powers for part in (1, 2, 5)]
    few = [value for value in between if least <= value <= most] or [most]
    return tens[:: 1 + len(tens) // LABELS] if len(tens) > 1 else few


def _same_heights(drawings: Sequence[_Drawing]) -> None:
    """One range of values for all of them."""
    values = [y for one in drawings for _, ys in one.series.values() for y in ys if y > 0]
    for drawing in drawings if values else ():
        drawing.later.append(partial(drawing.axes.set_ylim, min(values) / 1.6, max(values) * 1.6))


def _apart(sizes: Sequence[float]) -> list[float]:
    """Those of the sizes that have room for a label on a logarithmic axis."""
    steps = [math.log2(max(size, 0.5)) for size in sizes]
    shown: list[int] = []
    for number, step in enumerate(steps):
        if not shown or step - steps[shown[-1]] >= (steps[-1] - steps[0]) / LABELS:
            shown.append(number)
    return [sizes[number] for number in shown]


def _size(size: float) -> str:
    for unit in ("", "K", "M", "G"):
        if size < 1024 or unit == "G":
            break
        size /= 1024
    return f"{size:.3g}{unit}" if size < 1000 else f"{size:.0f}{unit}"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1 else f"{value:g}"


# --- SVG in a page ------------------------------------------------------------------------------------------

SVG, XLINK = "http://www.w3.org/2000/svg", "{http://www.w3.org/1999/xlink}href"
_REFERENCE = re.compile(r"#([\w.-]+)")


def _for_a_page(text: str, prefix: str, title: str) -> str:
    """matplotlib's SVG without what only a file needs: sizes, fonts, style sheets, ids that nothing uses."""
    ElementTree.register_namespace("", SVG)
    root = ElementTree.fromstring(text)
    width, height = root.get("viewBox", "0 0 1 1").split()[2:]
    root.attrib.clear()
    root.attrib.update(
        {"viewBox": f"0 0 {width} {height}", "role": "img", "aria-label": title, "class": "plot"}
    )
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                parent.remove(child)
    elements = list(root.iter())
    used = {
        found
        for one in elements
        for key in (XLINK, "clip-path")
        for found in _REFERENCE.findall(one.get(key, ""))
    }
    for one in elements:
        if (name := one.attrib.pop("id", None)) in used:
            one.set("id", f"{prefix}{name}")
        if link := one.attrib.pop(XLINK, None):
            one.set("href", link.replace("#", f"#{prefix}"))
        if clip := one.get("clip-path"):
            one.set("clip-path", clip.replace("#", f"#{prefix}"))
        if style := one.get("style"):
            one.set("style", re.sub(r"font-family: [^;]*;? ?", "", style).replace(BLACK, "currentColor"))
    return ElementTree.tostring(root, encoding="unicode")

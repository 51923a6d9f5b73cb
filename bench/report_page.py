"""The report as one HTML page without any other file. All text of the inputs is escaped."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from bench.parse import Run

if TYPE_CHECKING:
    from bench.report_plots import Plot

__all__ = ["page", "ratios"]

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
img { max-width: 100%; background: white; border-radius: 6px; }
table { border-collapse: collapse; font-size: 0.9rem; display: block; overflow-x: auto; }
th, td { padding: 0.2rem 0.6rem; border-bottom: 1px solid #8886; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.missed { color: #d33; font-weight: bold; }
"""


def page(
    title: str,
    runs: Sequence[tuple[str, Run]],
    peers: Sequence[tuple[str, Mapping[str, Any]]],
    overheads: Sequence[tuple[str, Mapping[str, Any]]],
    plots: Sequence[Plot],
) -> str:
    """The whole page."""
    parts = [f"<h1>{escape(title)}</h1>", "<h2>What was measured</h2><ul>"]
    for number, (name, run) in enumerate(runs, 1):
        where = ", ".join(dict.fromkeys(f"{one.host}: {one.name}" for one in run.devices))
        words = (f"{run.ranks} ranks", f"library {run.library}" if run.library else "", where, *run.notes)
        text = "; ".join(word for word in (run.program, *words) if word)
        parts.append(f"<li>{number}: {escape(name)}: {escape(text)}</li>")
    for name, document in (*peers, *overheads):
        about = {**document.get("machine", {}), **document.get("sides", {})}
        text = ", ".join(f"{key} {_plain(value)}" for key, value in about.items())
        parts.append(f"<li>{escape(name)}: {escape(text)}</li>")
    parts.append("</ul>")
    for plot in plots:
        picture = base64.b64encode(plot.png).decode()
        parts.append(f"<h2>{escape(plot.title)}</h2>")
        parts.append(f'<img alt="{escape(plot.title)}" src="data:image/png;base64,{picture}">')
    rows = ratios(runs)
    if rows:
        heads = [f"{number}: {name}" for number, (name, _) in enumerate(runs, 1)]
        parts.append("<h2>Ratios</h2><p>Time over that of the first run of the same call; below 1 is faster.")
        parts.append(_table(["call", "first (us)", *heads[1:]], rows))
    for name, document in overheads:
        parts.append(f"<h2>The cost of a call ({escape(name)})</h2>")
        parts.append(_table(["call", "us", "above the C call", "target", ""], _overhead(document)))
    head = f"<meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>"
    body = "\n".join(parts)
    return f"<!doctype html>\n<html lang=en><head>{head}</head>\n<body>\n{body}\n</body></html>\n"


def ratios(runs: Sequence[tuple[str, Run]]) -> list[list[str]]:
    """For each call that the first run shares with another: name, the first's us, the others' ratios."""
    if len(runs) < 2:
        return []
    times = [
        {
            (run.program, row.size, row.type, row.redop, row.root, row.in_place): row.time_us
            for row in run.rows
        }
        for _, run in runs
    ]
    rows = []
    for key, first in times[0].items():
        others = [one.get(key) for one in times[1:]]
        if first > 0 and any(other is not None for other in others):
            program, size, dtype, redop, root, in_place = key
            name = f"{program} {size} {dtype} {redop} {root} {'in place' if in_place else 'out of place'}"
            rows.append([name, f"{first:.2f}", *("" if o is None else f"{o / first:.3f}" for o in others)])
    return rows


def _overhead(document: Mapping[str, Any]) -> Iterable[list[str]]:
    verdicts = {True: "met", False: "missed", None: ""}
    for row in document["calls"]:
        target = "" if row["target_us"] is None else f"{row['target_us']:g}"
        yield [row["name"], f"{row['us']:.3f}", f"{row['above_c_us']:.3f}", target, verdicts[row["met"]]]
    for row in document["imports"]:
        beyond, target = f"{row['beyond_numpy_ms']:.1f} ms beyond NumPy", f"{row['target_ms']:g} ms"
        yield [f"import pynccl, {row['name']}", beyond, "", target, verdicts[row["met"]]]


def _table(heads: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["<table><tr>" + "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr>"]
    for row in rows:
        cells = (f"<td{' class=missed' if cell == 'missed' else ''}>{escape(cell)}</td>" for cell in row)
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join((*lines, "</table>"))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)

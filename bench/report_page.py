"""The report as one HTML page without any other file. All text of the inputs is escaped here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from bench.parse import Run
from bench.report_plots import Plot, colour
from bench.report_tables import (
    PEER_NAMES,
    Cell,
    Table,
    disturbed_rows,
    failures,
    measured,
    notes,
    overhead,
    peer_rows,
    peer_summary,
    run_rows,
)

__all__ = ["page", "pictures_of"]

STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1b1f24; --faint: #5b6470; --line: #d5dae0;
  --card: #f6f8fa; --good: #1a7f37; --bad: #cf222e; --alarm: #ffebe9; --doubt: #8a5a00; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171b; --text: #e4e8ed; --faint: #9aa4b0; --line: #363c44;
    --card: #1c2026; --good: #4ac26b; --bad: #ff7b72; --alarm: #3c1618; --doubt: #e3b341; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 84rem;
  margin: 0 auto; padding: 1rem; }
h1 { margin: 0.5rem 0; line-height: 1.2; }
h2 { margin: 2.5rem 0 0.5rem; padding-bottom: 0.2rem; border-bottom: 1px solid var(--line); }
p, li { max-width: 48rem; overflow-wrap: anywhere; }
.faint, figcaption small { color: var(--faint); }
.alarm { background: var(--alarm); border: 2px solid var(--bad); border-radius: 8px; padding: 0.2rem 1rem;
  margin: 1rem 0; }
.alarm h2 { color: var(--bad); border: 0; margin: 0.5rem 0; }
.inputs { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); gap: 1rem; }
.inputs h3 { margin: 0 0 0.4rem; font-size: 1rem; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: 8rem 1fr; gap: 0.1rem 0.6rem; margin: 0; font-size: 0.875rem; }
dt { color: var(--faint); }
dd { margin: 0; overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 32rem), 1fr)); gap: 1rem; }
figure, .inputs section { margin: 0; padding: 0.8rem; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; overflow-x: auto; }
figcaption { font-weight: 600; }
figcaption small { display: block; font-weight: 400; }
.plot { display: block; width: 100%; min-width: 27rem; max-width: 46rem; margin: auto; }
.plot * { stroke-linejoin: round; }
.plot text { fill: currentColor; }
.scroll { overflow-x: auto; margin: 0.5rem 0 1rem; border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: 0.2rem 0.45rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
th { background: var(--card); vertical-align: bottom; }
th[colspan] { text-align: center; border-left: 1px solid var(--line); white-space: normal;
  overflow-wrap: anywhere; }
td:first-child, th:first-child:not([colspan]) { position: sticky; left: 0; background: var(--page); }
th:first-child:not([colspan]) { background: var(--card); }
.word { text-align: left; }
summary { cursor: pointer; font-weight: 600; margin: 0.7rem 0; }
.met, .faster { color: var(--good); }
.missed, .slower { color: var(--bad); font-weight: 600; }
.disturbed { color: var(--doubt); font-weight: 600; }
.wrong { background: var(--bad); color: var(--page); font-weight: 700; }
.best { font-weight: 700; }
.key { display: inline-block; width: 0.8em; height: 0.8em; border-radius: 2px; margin-right: 0.4em; }
"""
BUSBW = """
<p>The <b>time</b> is that of one call. The <b>bus bandwidth</b> (busbw) makes calls on different numbers
of ranks comparable: the size over the time, times the part of it that a link has to carry. With n ranks
that part is 2(n-1)/n for all_reduce, (n-1)/n for all_gather, reduce_scatter, alltoall, gather and
scatter, and 1 for broadcast, reduce and sendrecv. On a ring that loses nothing it is the speed of a
link, whatever n is; of one rank alone it is 0. 1 GB is 10<sup>9</sup> bytes.</p>
<p class=faint>In the plots a run has one colour (or, if a single run has many kinds of calls, each kind);
dashes are in-place calls. A band goes from the fastest iteration to the 99th percentile (runs with -I), or
from the least to the most of repeated sweeps (-N).</p>
"""
PEERS = """
<p>Medians over rounds, in which the sides take turns, of the slowest rank's mean per call. The
<b>ratio</b> is our time over the peer's: below 1 ours is faster; the target is for the fastest peer, in
bold. The <b>roofline</b> is the least traffic of the operation, loaded and stored by as many C processes
that wait for nobody, with the widest vectors of this CPU; its part is its time over ours: 1 is the limit of
the memory. Bands and p25–p75 are the quartiles of the rounds.</p>
<p class=faint>Plain: ordinary arrays; mapped: from <code>comm.empty</code>; prepared: calls of
<code>comm.prepare</code> on plain arrays. Quiet: nothing else runs; one busy core: beside a process that
burns one. Disturbed: other processes had more of the machine's processor time ("others' CPU") than a
comparison can bear; the row counts neither as met nor as missed.</p>
"""
OVERHEAD = """
<p>Calls on a library whose functions do nothing: what is left is the way through Python. The target is
for what a call takes above the same call in C.</p>
"""
PICTURES = "pynccl-pictures"
_PICTURES = re.compile(f'<meta name="{PICTURES}" content="([^"]*)">')
ROWS_SHOWN = 100
"""A longer table is folded."""


def page(
    title: str,
    runs: Sequence[tuple[str, Run]],
    peers: Sequence[tuple[str, Mapping[str, Any]]],
    overheads: Sequence[tuple[str, Mapping[str, Any]]],
    plots: Sequence[Plot],
) -> str:
    """The whole page."""
    parts = [f"<h1>{escape(title)}</h1>", _alarm(failures(runs, peers))]
    parts += ["<h2>What was measured</h2>", _inputs(measured(runs, peers, overheads)), _notes(runs)]
    if runs:
        parts += ["<h2>Runs</h2>", BUSBW]
    for program in dict.fromkeys(run.program for _, run in runs):
        parts += [f"<h2>{escape(program or 'Unknown program')}</h2>", _plots(plots, program)]
        parts.append(_folded(run_rows(program, runs)))
    for name, document in peers:
        parts += [f"<h2>Beside other libraries ({escape(name)})</h2>", PEERS, _sides(document)]
        parts += [_table(peer_summary(document)), _plots(plots, name), *map(_folded, peer_rows(document))]
    for name, document in overheads:
        parts += [
            f"<h2>The cost of a call ({escape(name)})</h2>",
            OVERHEAD,
            *map(_folded, overhead(document)),
        ]
    head = (
        '<meta charset=utf-8><meta name=viewport content="width=device-width, initial-scale=1">'
        f'<meta name="{PICTURES}" content="{escape(" ".join(one.file for one in plots))}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join(part for part in parts if part)
    return f"<!doctype html>\n<html lang=en><head>{head}</head>\n<body>\n{body}\n</body></html>\n"


def pictures_of(text: str) -> list[str]:
    """The names of the PNGs that were written beside a page; none if the text is no page of ours."""
    match = _PICTURES.search(text)
    names = match[1].split() if match else []
    return [name for name in names if re.fullmatch(r"[\w-]+\.png", name)]


def _alarm(found: Sequence[tuple[str, str]]) -> str:
    if not found:
        return "<p class=met>Nothing failed, and nothing came out wrong, as far as the files tell.</p>"
    lines = "".join(f"<li><b>{escape(name)}</b>: {escape(what)}</li>" for name, what in found)
    return f"<section class=alarm><h2>Failures</h2><ul>{lines}</ul></section>"


def _inputs(found: Iterable[tuple[Cell, Sequence[tuple[str, str | Cell]]]]) -> str:
    cards = []
    for name, facts in found:
        lines = "".join(f"<dt>{escape(key)}</dt>{_cell(value, False, 'dd')}" for key, value in facts)
        cards.append(f"<section><h3>{_content(name)}</h3><dl>{lines}</dl></section>")
    return f"<div class=inputs>{''.join(cards)}</div>"


def _notes(runs: Sequence[tuple[str, Run]]) -> str:
    lines = "".join(f"<li>{escape(name)}: {escape(what)}</li>" for name, what in notes(runs))
    return f"<ul class=faint>{lines}</ul>" if lines else ""


def _plots(plots: Iterable[Plot], section: str) -> str:
    figures = [
        f"<figure><figcaption>{escape(one.title)}<small>{escape(one.note)}</small></figcaption>{one.svg}</figure>"
        for one in plots
        if one.section == section
    ]
    return f"<div class=plots>{''.join(figures)}</div>" if figures else ""


def _sides(document: Mapping[str, Any]) -> str:
    """What could not be measured is said, and not only missing."""
    sides = {**PEER_NAMES, "roofline": "the roofline"}
    absent = ", ".join(name for side, name in sides.items() if side not in document["sides"])
    disturbed = disturbed_rows(document)
    said = [f"<p class=faint>Not measured: {absent}.</p>"] if absent else []
    said += [f"<p><b class=disturbed>{escape(disturbed)}</b></p>"] if disturbed else []
    return "\n".join(said)


def _folded(table: Table) -> str:
    state = " open" if len(table.rows) <= ROWS_SHOWN else ""
    rows = f" ({len(table.rows)} rows)" if not state else ""
    return f"<details{state}><summary>{escape(table.caption)}{rows}</summary>{_table(table)}</details>"


def _table(table: Table) -> str:
    name = escape(table.caption)
    lines = [f'<div class=scroll tabindex=0 role=region aria-label="{name}"><table><thead>']
    if table.groups:
        cells = "".join(
            f"<th colspan={span} scope=colgroup>{_content(one)}</th>" for one, span in table.groups
        )
        lines.append(f"<tr>{cells}</tr>")
    heads = "".join(
        f"<th scope=col{_class(at in table.words)}>{escape(head)}</th>" for at, head in enumerate(table.heads)
    )
    lines.append(f"<tr>{heads}</tr></thead><tbody>")
    for row in table.rows:
        cells = "".join(_cell(one, at in table.words) for at, one in enumerate(row))
        lines.append(f"<tr>{cells}</tr>")
    return "\n".join((*lines, "</tbody></table></div>"))


def _cell(cell: str | Cell, word: bool, tag: str = "td") -> str:
    one = cell if isinstance(cell, Cell) else Cell(cell)
    return f"<{tag}{_class(word, one.mark)}>{_content(one)}</{tag}>"


def _content(cell: Cell) -> str:
    """A run has its colour before its name."""
    if not cell.mark.startswith("run "):
        return escape(cell.text)
    shade = colour(int(cell.mark.removeprefix("run ")) - 1)
    return f'<span class=key style="background:{shade}"></span>{escape(cell.text)}'


def _class(word: bool, mark: str = "") -> str:
    names = " ".join(name for name in ("word" if word else "", mark) if name)
    return f' class="{names}"' if names else ""

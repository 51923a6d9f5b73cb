"""The tables of the report: what was read becomes rows of text. Knows nothing of HTML, nor of pictures."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.parse import Record, Run
from bench.peer.cases import size_in_words
from bench.peer.rows import counted, missed, reason
from bench.train.pool import DISTURBED

__all__ = [
    "PEER_NAMES",
    "Cell",
    "Table",
    "disturbed_rows",
    "failures",
    "measured",
    "notes",
    "number",
    "overhead",
    "peer_rows",
    "peer_summary",
    "run_rows",
]

PEER_NAMES = {"openmpi": "Open MPI", "mpich": "MPICH", "gloo": "Gloo"}
NOTHING = "–"


@dataclass(frozen=True)
class Cell:
    """Text, and the class that it has on the page: met, missed, best, slower, ..; or `run N`, its colour."""

    text: str
    mark: str = ""


@dataclass(frozen=True)
class Table:
    """`groups` are headings over several of the `heads`; `words` are the columns that hold no numbers."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    words: Sequence[int] = (0,)
    groups: Sequence[tuple[Cell, int]] = field(default=())


def number(value: float | None) -> str:
    """Three digits or so: enough to compare, and short enough to read down a column."""
    if value is None or math.isnan(value):
        return NOTHING
    if value == 0:
        return "0"
    if abs(value) < 0.1:
        return f"{value:.3g}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1000 else f"{value:,.0f}"


def _ratio(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"


def _verdict(met: bool | None) -> str | Cell:
    return "" if met is None else Cell("met", "met") if met else Cell("missed", "missed")


def _disturbed(met: bool | None) -> str | Cell:
    return "" if met is None else Cell("disturbed", "disturbed")


# --- all inputs ---------------------------------------------------------------------------------------------


def failures(
    runs: Sequence[tuple[str, Run]], peers: Sequence[tuple[str, Mapping[str, Any]]]
) -> list[tuple[str, str]]:
    """What speaks against the numbers: the name of an input, and a sentence."""
    found = []
    for at, (name, run) in enumerate(runs, 1):
        bad = [row for row in run.rows if row.wrong]
        if bad:
            first = f"{size_in_words(bad[0].size)}, {_place(bad[0])}"
            found.append(
                (f"{at}: {name}", f"{sum(row.wrong or 0 for row in bad):,} wrong elements in {len(bad)} of "
                 f"{len(run.rows)} results, the first at {first}")
            )  # fmt: skip
        elif run.out_of_bounds:
            found.append((f"{at}: {name}", f"{run.out_of_bounds} checks found wrong elements"))
        if not run.rows and not _refused(run):
            found.append((f"{at}: {name}", "no results"))
        found += [(f"{at}: {name}", error) for error in run.errors]
    for name, document in peers:
        found += [(name, f"{side}: {what}") for side, what in document.get("failures", {}).items()]
        if not document["rows"]:
            found.append((name, "no results"))
    return found


def _refused(run: Run) -> bool:
    """It came to its end, and had nothing to run: hypercube_perf on 3 ranks says so, as a note."""
    return run.good and any("skipping" in note for note in run.notes)


Fact = tuple[str, "str | Cell"]


def measured(
    runs: Sequence[tuple[str, Run]],
    peers: Sequence[tuple[str, Mapping[str, Any]]],
    overheads: Sequence[tuple[str, Mapping[str, Any]]],
) -> list[tuple[Cell, list[Fact]]]:
    """Each input, and what it tells of itself: what was run, on what, with what, when."""
    found = [
        *((Cell(f"{at}: {name}", f"run {at}"), _about_run(run)) for at, (name, run) in enumerate(runs, 1)),
        *((Cell(name), _about("bench.peers", document)) for name, document in peers),
        *((Cell(name), _about("bench.call_overhead", document)) for name, document in overheads),
    ]
    return [(name, [fact for fact in facts if fact[1]]) for name, facts in found]


def notes(runs: Sequence[tuple[str, Run]]) -> list[tuple[str, str]]:
    """What else is known about an input, and is no failure."""
    return [
        (f"{at}: {name}", note)
        for at, (name, run) in enumerate(runs, 1)
        for note in run.notes
        if note not in run.errors
    ]


def _about_run(run: Run) -> list[Fact]:
    return [
        ("program", f"{run.program} ({run.program_by})" if run.program_by else run.program),
        ("ranks", _ranks(run)),
        ("wrong elements", _checked(run)),
        ("average busbw", _bandwidth(run.average_busbw)),
        ("library", run.library),
        ("machine", _devices(run)),
        ("settings", _settings(run)),
        ("when", run.when),
    ]


def _bandwidth(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{number(value)} GB/s"


def _ranks(run: Run) -> str:
    if not run.ranks:
        return "not told"
    return (
        f"{run.ranks} (in the first of {run.groups} groups side by side)"
        if run.groups > 1
        else str(run.ranks)
    )


def _about(program: str, document: Mapping[str, Any]) -> list[Fact]:
    about = document.get("machine", {})
    versions = {**document.get("sides", {}), **about.get("versions", {})}
    ranks = sorted({row["ranks"] for row in document.get("rows", ())})
    return [
        ("program", program),
        ("ranks", ", ".join(map(str, ranks))),
        ("load", _text(document.get("load", ""))),
        ("rounds", _text(document.get("rounds", ""))),
        *(_version(key, value) for key, value in versions.items() if value is not None),
        ("machine", _machine(about)),
        ("when", _text(document.get("when", ""))),
    ]


def _version(side: str, value: Any) -> Fact:
    if side == "roofline":
        return "roofline", f"a C program with {_text(value)}"
    return PEER_NAMES.get(side, side), _text(value)


def _checked(run: Run) -> str | Cell:
    checked = [row.wrong for row in run.rows if row.wrong is not None]
    wrong = sum(checked)
    part = "" if len(checked) == len(run.rows) else f" ({len(checked)} of {len(run.rows)} results checked)"
    words = f"{wrong:,}{part}" if checked else "not checked"
    return Cell(words, "wrong") if wrong or run.out_of_bounds else words


def _devices(run: Run) -> str:
    """`node-1: 8 × NVIDIA H100; node-2: ..`; of many hosts with the same devices the first and the last."""
    hosts: dict[str, Counter[str]] = {}
    for one in run.devices:
        hosts.setdefault(one.host, Counter())[one.name] += 1
    said = {
        host: ", ".join(f"{count} × {name}" for name, count in names.items()) for host, names in hosts.items()
    }
    if len(said) > 2 and len(set(said.values())) == 1:
        first, *_, last = said
        return f"{len(said)} hosts, {first} to {last}: each {said[first]}"
    return "; ".join(f"{host}: {devices}" for host, devices in said.items())


# What is told of a run: the words for it, the names that text, JSON and CSV have for it, and what is usual.
SETTINGS = (
    ("{} iterations", ("iters", "iterations"), ()),
    ("{} to warm up", ("warmup iters", "warmup_iters"), ()),
    ("{} calls in a group", ("agg iters", "aggregated_iterations", "aggregated"), ("1",)),
    ("{} launches of a graph", ("graph",), ("0",)),
    ("{} buffers", ("buffers",), ()),
    ("hot: {}", ("hot",), ("0", "false")),
    ("time of ranks: {}", ("average",), ("average",)),
)


def _settings(run: Run) -> str:
    said = []
    for words, names, usual in SETTINGS:
        value = next((run.settings[name] for name in names if name in run.settings), None)
        if value is not None and value not in usual:
            said.append(words.format(value))
    return "; ".join(said)


MACHINE = {"cpu": "", "l1_cache": "L1", "l2_cache": "L2", "l3_cache": "L3", "python": "Python",
           "load_average": "load"}  # fmt: skip


def _machine(about: Mapping[str, Any]) -> str:
    said = []
    for key, value in about.items():
        if key != "versions":
            name = MACHINE.get(key, key)
            shown = _text(value[0] if key == "load" and isinstance(value, list) and value else value)
            said.append(f"{shown} cores" if key == "cores" else f"{name} {shown}".strip())
    return ", ".join(said)


def _text(value: Any) -> str:
    return (
        value if isinstance(value, str) else f"{value:.3g}" if isinstance(value, float) else json.dumps(value)
    )


def _place(row: Record) -> str:
    return "in place" if row.in_place else "out of place"


# --- runs ---------------------------------------------------------------------------------------------------


def run_rows(program: str, runs: Sequence[tuple[str, Run]]) -> Table:
    """Every result of a program, a row for each call, the runs side by side; ratios to the first of them.

    What all calls have in common is in the caption, and has no column.
    """
    chosen = [(at, name, run) for at, (name, run) in enumerate(runs, 1) if run.program == program]
    calls = [_calls(run) for _, _, run in chosen]
    base, base_name, _ = chosen[0]
    keys = _ordered(calls)
    told = [(key[1], key[2], NOTHING if key[3] < 0 else str(key[3])) for key in keys]
    varying = [at for at in range(3) if len({one[at] for one in told}) > 1]
    heads = ["size (B)", *(("type", "redop", "root")[at] for at in varying), "placement"]
    words = range(1, len(heads))
    groups = [(Cell("call"), len(heads))]
    for at, name, run in chosen:
        mine = ["time (µs)", "busbw (GB/s)", "wrong"]
        mine += ["min–p99 (µs)"] if _timed(run) else []
        mine += [f"time / run {base}"] if at != base else []
        groups.append((Cell(f"{at}: {name}", f"run {at}"), len(mine)))
        heads += mine
    rows: list[list[str | Cell]] = []
    for key, kind in zip(keys, told, strict=True):
        row: list[str | Cell] = [f"{key[0]:,}", *(kind[at] for at in varying)]
        row.append("in place" if key[4] else "out of place")
        for results, (at, _, run) in zip(calls, chosen, strict=True):
            row += _results(results.get(key), _timed(run))
            row += [_of_base(results.get(key), calls[0].get(key))] if at != base else []
        rows.append(row)
    caption = f"{program or 'Results'}: all results"
    common = [] if not told else [_common(at, told[0][at]) for at in range(3) if at not in varying]
    caption += f" ({', '.join(filter(None, common))})" if any(common) else ""
    if len(chosen) > 1:
        caption += (
            f". Ratios: time over that of run {base} ({base_name}); below 1 is faster. "
            "Coloured: more than a tenth slower, or faster."
        )
        caption += _other_ranks([run for _, _, run in chosen])
    return Table(caption, heads, rows, words, groups)


def _common(at: int, value: str) -> str:
    """Of a type, operation or root that all calls have."""
    if value in (NOTHING, "none"):
        return ""
    return f"root {value}" if at == 2 else value


def _other_ranks(runs: Sequence[Run]) -> str:
    ranks = [run.ranks for run in runs]
    if len(set(ranks)) == 1 and ranks[0]:
        return ""
    known = ", ".join(str(one or "unknown") for one in dict.fromkeys(ranks))
    return (
        f" The runs are on different or unknown numbers of ranks ({known}), where the same size is different "
        "work: there compare the bus bandwidths."
    )


def _timed(run: Run) -> bool:
    return any(row.iterations for row in run.rows)


_Call = tuple[int, str, str, int, bool, int]


def _calls(run: Run) -> dict[_Call, Record]:
    """By what was called; the same call again (nccl-tests' -N) has the next number at the end of its key."""
    seen: Counter[tuple[Any, ...]] = Counter()
    calls: dict[_Call, Record] = {}
    for row in run.rows:
        key = (row.size, row.type, row.redop, row.root, row.in_place)
        calls[(*key, seen[key])] = row
        seen[key] += 1
    return calls


def _ordered(calls: Sequence[Mapping[_Call, Record]]) -> list[_Call]:
    """By kind as first met, then placement, then size."""
    keys = list(dict.fromkeys(key for one in calls for key in one))
    kinds = {kind: at for at, kind in reversed(list(enumerate(key[1:4] for key in keys)))}
    return sorted(keys, key=lambda key: (kinds[key[1:4]], key[4], key[0], key[5]))


def _results(record: Record | None, timed: bool) -> list[str | Cell]:
    if record is None:
        return [NOTHING] * (4 if timed else 3)
    wrong: str | Cell = "N/A" if record.wrong is None else f"{record.wrong:,}"
    cells = [
        number(record.time_us),
        number(record.busbw),
        Cell(f"{record.wrong:,}", "wrong") if record.wrong else wrong,
    ]
    its = record.iterations
    spread = [f"{number(its.min_us)}–{number(its.p99_us)}" if its else NOTHING]
    return [*cells, *(spread if timed else [])]


NOTABLE = 1.1


def _of_base(record: Record | None, base: Record | None) -> str | Cell:
    if record is None or base is None or not base.time_us > 0 or math.isnan(record.time_us):
        return NOTHING
    ratio = record.time_us / base.time_us
    mark = "slower" if ratio > NOTABLE else "faster" if ratio < 1 / NOTABLE else ""
    return Cell(_ratio(ratio), mark) if mark else _ratio(ratio)


# --- peers --------------------------------------------------------------------------------------------------


def _cases(document: Mapping[str, Any]) -> Iterable[tuple[int, str, list[Mapping[str, Any]]]]:
    rows = document["rows"]
    for ranks, load in dict.fromkeys((row["ranks"], row["load"]) for row in rows):
        yield ranks, load, [row for row in rows if (row["ranks"], row["load"]) == (ranks, load)]


def peer_summary(document: Mapping[str, Any]) -> Table:
    """How many targets are met, by ranks, load and kind of buffers; median and worst ratio.

    Disturbed rows are in one column, and in no other.
    """
    heads = ("ranks", "load", "buffers", "ratio met", "roofline met", "no slower than any peer",
             "median ratio", "worst ratio", "disturbed, not counted")  # fmt: skip
    rows: list[list[str | Cell]] = []
    for ranks, load, case in _cases(document):
        for buffers in dict.fromkeys(row["buffers"] for row in case):
            all_of_them = [row for row in case if row["buffers"] == buffers]
            mine = [row for row in all_of_them if counted(row)]
            disturbed = len(all_of_them) - len(mine)
            ratios = sorted(row["ratio"] for row in mine if row.get("ratio") is not None)
            none_faster = f"{sum(one <= 1 for one in ratios)} of {len(ratios)}" if ratios else NOTHING
            middle, worst = (ratios[len(ratios) // 2], ratios[-1]) if ratios else (None, None)
            parts = (_part(mine, "met"), _part(mine, "roofline_met"))
            left_out = Cell(f"{disturbed} of {len(all_of_them)}", "disturbed") if disturbed else "0"
            numbers = (none_faster, _ratio(middle), _ratio(worst), left_out)
            rows.append([str(ranks), load, buffers, *parts, *numbers])
    return Table("Targets met, and ratios to the fastest peer", heads, rows, (1, 2))


def _part(rows: Sequence[Mapping[str, Any]], key: str) -> str | Cell:
    asked = [row[key] for row in rows if row.get(key) is not None]
    mark = "met" if all(asked) else "missed"
    return Cell(f"{sum(asked)} of {len(asked)}", mark) if asked else NOTHING


def peer_rows(document: Mapping[str, Any]) -> list[Table]:
    """For each number of ranks and load: every case, with each peer, the targets, and the roofline."""
    tables = []
    for ranks, load, case in _cases(document):
        peers = [peer for peer in PEER_NAMES if any(row.get(f"{peer}_us") is not None for row in case)]
        reasons = any(map(_reason, case))
        groups = [(Cell("call"), 3), (Cell("ours"), 3), *((Cell(PEER_NAMES[peer]), 2) for peer in peers)]
        groups += [(Cell("target"), 2), (Cell("roofline"), 4), *([(Cell(""), 1)] if reasons else [])]
        heads = ["operation", "size", "buffers", "time (µs)", "p25–p75 (µs)", "others' CPU (%)"]
        heads += ["time (µs)", "ratio"] * len(peers) + ["ratio at most", "verdict"]
        heads += ["time (µs)", "part", "at least", "verdict"]
        heads += ["known reason for rows of this kind"] if reasons else []
        bad = sum(_missed(row) and counted(row) for row in case)
        caption = f"{ranks} ranks, {load}: {len(case)} cases, {bad} miss a target"
        disturbed = len(case) - sum(map(counted, case))
        caption += f"; disturbed, not counted: {disturbed}" if disturbed else ""
        rows = [[*_peer_row(row, peers), *([_reason(row)] if reasons else [])] for row in case]
        words = (0, 2, len(heads) - 1) if reasons else (0, 2)
        tables.append(Table(caption, heads, rows, words, groups))
    return tables


def disturbed_rows(document: Mapping[str, Any]) -> str:
    """A sentence about the rows that others disturbed; empty if there is none."""
    rows = [row for row in document["rows"] if not counted(row)]
    if not rows:
        return ""
    most = max(row["others"] for row in rows)
    return (
        f"Disturbed: {len(rows)} of {len(document['rows'])} rows, in which other processes had more than "
        f"{DISTURBED:.0%} of the machine's processor time, up to {most:.0%}. They count neither as met nor "
        "as missed: run again on a quiet machine."
    )


_NOTHING_ASKED = {"met": None, "roofline_met": None, "ratio": None}


def _missed(row: Mapping[str, Any]) -> bool:
    return missed({**_NOTHING_ASKED, **row})


def _reason(row: Mapping[str, Any]) -> str:
    return reason({**_NOTHING_ASKED, **row}) or ""


def _peer_row(row: Mapping[str, Any], peers: Sequence[str]) -> list[str | Cell]:
    ours, spread = row["ours_us"], row.get("spread", {}).get("ours")
    cells: list[str | Cell] = [row["op"], size_in_words(row["bytes"]), row["buffers"], number(ours)]
    others = row.get("others")
    verdict = _verdict if counted(row) else _disturbed
    cells.append("–".join(map(number, spread)) if spread else NOTHING)
    mark = "" if counted(row) else "disturbed"
    cells.append(NOTHING if others is None else Cell(f"{100 * others:.0f}", mark))
    for peer in peers:
        theirs = row.get(f"{peer}_us")
        mark = "best" if row.get("fastest") == peer else ""
        cells += [Cell(number(theirs), mark), Cell(_ratio(ours / theirs if theirs else None), mark)]
    target, floor = row.get("target"), row.get("roofline_target")
    cells += ["" if target is None else f"{target:g}", verdict(row.get("met"))]
    cells += [number(row.get("roofline_us")), _ratio(row.get("roofline_fraction"))]
    cells += ["" if floor is None else f"{floor:g}", verdict(row.get("roofline_met"))]
    return cells


# --- the cost of a call -------------------------------------------------------------------------------------


def overhead(document: Mapping[str, Any]) -> list[Table]:
    """Calls, and imports."""
    calls: list[list[str | Cell]] = []
    for row in document["calls"]:
        low, high, target = row.get("p25_us"), row.get("p75_us"), row["target_us"]
        spread = NOTHING if low is None or high is None else f"{low:.3f}–{high:.3f}"
        calls.append([row["name"], f"{row['us']:.3f}", spread, f"{row['above_c_us']:.3f}",
                      "" if target is None else f"{target:g}", _verdict(row["met"])])  # fmt: skip
    imports: list[list[str | Cell]] = []
    for row in document["imports"]:
        times = (number(row.get("numpy_ms")), f"{row['beyond_numpy_ms']:.1f}", f"{row['target_ms']:g}")
        imports.append([row["name"], *times, _verdict(row["met"])])
    heads = ["call", "time (µs)", "p25–p75 (µs)", "above the C call (µs)", "at most (µs)", "verdict"]
    tables = [Table(f"A call with the communication taken away{_met(document['calls'])}", heads, calls)]
    if imports:
        heads = ["import pynccl of a new process", "NumPy alone (ms)", "beyond NumPy (ms)"]
        heads += ["at most (ms)", "verdict"]
        tables.append(Table(f"The import{_met(document['imports'])}", heads, imports))
    return tables


def _met(rows: Iterable[Mapping[str, Any]]) -> str:
    asked = [row["met"] for row in rows if row["met"] is not None]
    return f": {sum(asked)} of {len(asked)} targets met" if asked else ""

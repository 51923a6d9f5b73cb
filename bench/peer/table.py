"""A run as text: a table a load, misses and disturbed rows marked, then misses by what is known of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.peer.cases import size_in_words
from bench.peer.rows import counted, missed, reason
from bench.peer.sides import PEERS
from bench.train.pool import DISTURBED

__all__ = ["aligned", "text"]

MARK, UNUSABLE = "MISS", "disturbed"
HEAD = (
    "op",
    "ranks",
    "size",
    "buffers",
    "ours us",
    "p25-p75",
    *PEERS,
    "ratio",
    "target",
    "limit",
    "part",
    "others",
    "",
)


def text(found: Mapping[str, Any]) -> str:
    """Of the document that `bench.peer.rows` makes."""
    machine, all_rows = found["machine"], found["rows"]
    parts = [
        f"{machine['cpu']}, {machine['cores']} cores, kernel {machine['kernel']}, Python {machine['python']}",
        *(f"{side}: {version}" for side, version in found["sides"].items() if side != "roofline"),
        "Times are medians over rounds of the slowest rank's mean per call;",
        "ratio: ours over the fastest peer (*);",
        "limit: the same traffic by as many processes that wait for nobody; part: its time over ours;",
        "others: what other processes had of the machine meanwhile; with more than "
        f"{DISTURBED:.0%} the row is disturbed, and counts neither as met nor as missed.",
    ]
    for load in found["loads"]:
        rows = [row for row in all_rows if row["load"] == load]
        parts += ["", f"--- {load} ---", *aligned([HEAD, *(_cells(row) for row in rows)])]
    misses = [row for row in all_rows if missed(row) and counted(row)]
    asked = [row for row in all_rows if row["met"] is not None and counted(row)]
    parts += ["", f"{len(misses)} of {len(asked)} rows miss a target"]
    if disturbed := len(all_rows) - sum(map(counted, all_rows)):
        parts += [f"disturbed: {disturbed} rows, not counted: run again on a quiet machine"]
    for known in dict.fromkeys(map(reason, misses)):
        rows = [row for row in misses if reason(row) == known]
        said = f"known reason for rows of this kind: {known}" if known else "no known reason explains them"
        parts += [f"{len(rows)} rows; {said}:"]
        parts += [f"  {_name(row)}: {_short(row)}" for row in rows]
    parts += [f"FAILED {side}: {what}" for side, what in found["failures"].items()]
    return "\n".join(parts)


def _name(row: Mapping[str, Any]) -> str:
    return (
        f"{row['op']}, {row['ranks']} ranks, {size_in_words(row['bytes'])}, {row['buffers']}, {row['load']}"
    )


def _short(row: Mapping[str, Any]) -> str:
    said = []
    if row["met"] is False:
        said.append(f"{row['ratio']:.2f} of {row['fastest']}'s time, at most {row['target']:g} wanted")
    if row["roofline_met"] is False:
        said.append(
            f"{row['roofline_fraction']:.2f} of the limit, at least {row['roofline_target']:g} wanted"
        )
    return "; ".join(said)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    low, high = row["spread"]["ours"]
    part = _number(row["roofline_fraction"], ".2f")
    if row["roofline_target"] is not None:
        part = f"{part}/{row['roofline_target']:g}"
    return (
        row["op"],
        str(row["ranks"]),
        size_in_words(row["bytes"]),
        row["buffers"],
        _us(row["ours_us"]),
        f"{_us(low)}-{_us(high)}",
        *(_us(row[f"{peer}_us"]) + ("*" if peer == row["fastest"] else " ") for peer in PEERS),
        _number(row["ratio"], ".2f"),
        f"{row['target']:g}",
        _us(row["roofline_us"]),
        part,
        f"{row['others']:.0%}",
        UNUSABLE if not counted(row) else MARK if missed(row) else "",
    )


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines: columns 0 and 3 to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = {0, 3}
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]

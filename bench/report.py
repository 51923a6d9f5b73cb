"""A page of one or several results: bandwidth and latency over size, ratios, peers, the cost of a call.

    python -m bench.report ours.json cluster.txt build/bench/peers.json --out build/bench/report

Files are nccl-tests' text or JSON (NVIDIA's or ours), the JSON of `bench.peers`, or of `bench.call_overhead`.
The page, `index.html`, needs no other file; each plot is also beside it as a PNG. The first run is what the
others are compared with.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.parse import ParseError, Run, read_all
from bench.report_page import page

__all__ = ["Inputs", "load", "main"]


@dataclass
class Inputs:
    """What was read, by kind, each with the name of its file."""

    runs: list[tuple[str, Run]]
    peers: list[tuple[str, dict[str, Any]]]
    overheads: list[tuple[str, dict[str, Any]]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 if a file cannot be used, 2 for misuse."""
    options = _parser().parse_args(arguments)
    try:
        inputs = load(options.files)
        from bench.report_plots import plots  # needs matplotlib, which says so if it is missing

        options.out.mkdir(parents=True, exist_ok=True)
        drawn = plots(inputs.runs, inputs.peers, options.roofline)
        for plot in drawn:
            (options.out / plot.file).write_bytes(plot.png)
        target = options.out / "index.html"
        target.write_text(page(options.title, inputs.runs, inputs.peers, inputs.overheads, drawn), "utf-8")
    except (ParseError, OSError, ImportError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    print(f"{target}: {len(drawn)} plots, also as PNGs beside it")
    return 0


def load(files: Sequence[Path]) -> Inputs:
    """Read every file, whatever its kind. ParseError names the file (and the line) that is not usable."""
    inputs = Inputs([], [], [])
    for file in files:
        text = file.read_text(errors="replace")
        document = _document(file, text)
        if "rows" in document and "sides" in document:
            _need(file, document["rows"], ("op", "ranks", "bytes", "buffers", "load", "ours_us"))
            inputs.peers.append((file.name, document))
        elif document.get("kind") == "call_overhead":
            _need(file, document.get("calls"), ("name", "us", "above_c_us", "target_us", "met"))
            _need(file, document.get("imports"), ("name", "beyond_numpy_ms", "target_ms", "met"))
            inputs.overheads.append((file.name, document))
        else:
            inputs.runs += [(file.name, run) for run in read_all(file)]
    return inputs


def _document(file: Path, text: str) -> dict[str, Any]:
    """The JSON object that a file is; empty for text."""
    if not text.lstrip().startswith("{"):
        return {}
    try:
        document: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise ParseError(f"{file}, line {error.lineno}: not JSON: {error.msg}") from error
    return document


def _need(file: Path, rows: Any, keys: Sequence[str]) -> None:
    if not isinstance(rows, list):
        raise ParseError(f"{file}: a list of rows was expected, not {type(rows).__name__}")
    for number, row in enumerate(rows, 1):
        missing = [key for key in keys if not isinstance(row, dict) or key not in row]
        if missing:
            raise ParseError(f"{file}: row {number} lacks {', '.join(missing)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.report", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, default=Path("build/bench/report"), metavar="DIR")
    parser.add_argument("--title", default="Collectives, measured")
    parser.add_argument("--roofline", type=float, metavar="GB/s", help="a line in the plots of bus bandwidth")
    return parser


if __name__ == "__main__":
    sys.exit(main())

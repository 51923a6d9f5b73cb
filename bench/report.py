"""A page of one or several results: bandwidth and latency over size, ratios, peers, the cost of a call.

    python -m bench.report ours.json cluster.txt build/bench/peers.json --out build/bench/report

Files are nccl-tests' text or JSON (NVIDIA's or ours), our CSV, the JSON of `bench.peers`, or of
`bench.call_overhead`. The page, `index.html`, needs no other file; each plot is also beside it as a PNG. The
first run of a program is what the others are compared with.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.parse import ParseError, Run, read_all
from bench.peer.sides import PEERS
from bench.recognise import PROGRAMS
from bench.report_page import page, pictures_of
from bench.report_plots import plots
from bench.report_tables import failures
from bench.shapes import Each, fault, number, or_nothing, pair, printable, word

__all__ = ["Inputs", "load", "main"]


_NUMBER, _OR_NOTHING = (int, float), (int, float, type(None))
PEER_ROW = {"op": str, "ranks": int, "bytes": int, "buffers": str, "load": str, "ours_us": _NUMBER}
CALL = {
    "name": str,
    "us": _NUMBER,
    "above_c_us": _NUMBER,
    "target_us": _OR_NOTHING,
    "met": (bool, type(None)),
}
_FIGURE = or_nothing(number)
_VERDICT = or_nothing(lambda value: isinstance(value, bool))
_ABOUT = {"?machine": {"?versions": Each(or_nothing(word))}}
PEERS_FILE = {
    **_ABOUT,
    "sides": Each(word),
    "?failures": Each(word),
    "rows": [
        {
            **dict.fromkeys(("ranks", "bytes", "ours_us"), number),
            **{f"?{side}_us": _FIGURE for side in (*PEERS, "roofline", "meeting", "passing")},
            **{f"?{name}": _FIGURE for name in ("ratio", "target", "others", "roofline_fraction")},
            **{f"?{name}": _FIGURE for name in ("roofline_target", "gb_per_second", "rounds")},
            **{f"?{name}": _VERDICT for name in ("met", "roofline_met")},
            **{f"?{name}": or_nothing(word) for name in ("fastest", "why")},
            "?spread": Each(pair),
        }
    ],
}
OVERHEAD_FILE = {
    **_ABOUT,
    "calls": [
        {
            **dict.fromkeys(("us", "above_c_us"), number),
            **{f"?{name}": _FIGURE for name in ("target_us", "p25_us", "p75_us")},
        }
    ],
    "imports": [
        {
            **dict.fromkeys(("beyond_numpy_ms", "target_ms"), number),
            **{f"?{name}": _FIGURE for name in ("numpy_ms", "least_ms", "most_ms")},
        }
    ],
}
IMPORT = {"name": str, "beyond_numpy_ms": _NUMBER, "target_ms": _NUMBER, "met": bool}


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
        inputs = load(options.files, options.program or "")
        drawn = plots(inputs.runs, inputs.peers, options.roofline)
        options.out.mkdir(parents=True, exist_ok=True)
        for plot in drawn:
            (options.out / plot.file).write_bytes(plot.png)
        target = options.out / "index.html"
        if target.exists():  # an earlier report's pictures would lie beside the new ones
            for old in set(pictures_of(target.read_text(errors="replace"))) - {plot.file for plot in drawn}:
                (options.out / old).unlink(missing_ok=True)
        target.write_text(
            page(printable(options.title), inputs.runs, inputs.peers, inputs.overheads, drawn), "utf-8"
        )
    except (ParseError, OSError, ImportError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    print(f"{target}: {len(drawn)} plots, also as PNGs beside it")
    for name, what in failures(inputs.runs, inputs.peers):
        print(f"report: FAILED {name}: {what}", file=sys.stderr)
    return 0


def load(files: Sequence[Path], program: str = "") -> Inputs:
    """Read every file, whatever its kind. ParseError names the file (and the line) that is not usable.

    `program` is that of outputs of nccl-tests which do not name theirs.
    """
    inputs = Inputs([], [], [])
    for file, name in zip(files, _names(files), strict=True):
        text = file.read_text(errors="replace")
        document = _document(file, text)
        if "rows" in document and "sides" in document:
            _need(file, document["rows"], PEER_ROW)
            _like(file, document, PEERS_FILE)
            inputs.peers.append((name, document))
        elif document.get("kind") == "call_overhead":
            _need(file, document.get("calls"), CALL)
            _need(file, document.get("imports"), IMPORT)
            _like(file, document, OVERHEAD_FILE)
            inputs.overheads.append((name, document))
        else:
            inputs.runs += [(name, run) for run in read_all(file, program)]
    return inputs


def _document(file: Path, text: str) -> dict[str, Any]:
    """The JSON object that a file is; empty for text."""
    if not text.lstrip().startswith("{"):
        return {}
    try:
        document: dict[str, Any] = printable(json.loads(text))
    except json.JSONDecodeError as error:
        raise ParseError(f"{file}, line {error.lineno}: not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or too deep
        raise ParseError(f"{file}: not JSON that can be read: {error}") from error
    return document


def _like(file: Path, document: Any, shape: Any) -> None:
    if what := fault(document, shape):
        raise ParseError(f"{file}: not as it is written here: {what}")


def _need(file: Path, rows: Any, keys: Mapping[str, Any]) -> None:
    """`rows` are objects with these keys, each of its type."""
    if not isinstance(rows, list):
        raise ParseError(f"{file}: a list of rows was expected, not {type(rows).__name__}")
    for at, row in enumerate(rows, 1):
        missing = [key for key in keys if not isinstance(row, dict) or key not in row]
        if missing:
            raise ParseError(f"{file}: row {at} lacks {', '.join(missing)}")
        for key, kind in keys.items():
            if not isinstance(row[key], kind):
                raise ParseError(f"{file}: row {at}: {key} cannot be {row[key]!r}")


def _names(files: Sequence[Path]) -> list[str]:
    """As short as they can be while they differ: the file's name, else its path, else with its turn."""
    counts, seen = Counter(file.name for file in files), Counter[str]()
    names = [file.name if counts[file.name] == 1 else str(file) for file in files]
    for at, name in enumerate(names):
        seen[name] += 1
        names[at] = printable(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.report", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, default=Path("build/bench/report"), metavar="DIR")
    parser.add_argument(
        "--program",
        type=_program,
        metavar="NAME",
        help="of files that do not name theirs, as all_reduce; else their numbers, or their names, decide",
    )
    parser.add_argument("--title", default="Collectives, measured")
    parser.add_argument(
        "--roofline", type=_bandwidth, metavar="GB/s", help="a line in the plots of bus bandwidth"
    )
    return parser


def _program(text: str) -> str:
    name = text if text.endswith("_perf") else f"{text}_perf"
    if name not in PROGRAMS:
        raise argparse.ArgumentTypeError(f"{text!r} is no program; one of {', '.join(PROGRAMS)}")
    return name


def _bandwidth(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no bandwidth: a number above 0, in GB/s")
    return value


if __name__ == "__main__":
    sys.exit(main())

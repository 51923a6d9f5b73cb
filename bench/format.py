"""What a sweep prints and writes: nccl-tests 2.19's text to the byte, its JSON (file version 3), and CSV.

This file owns spaces, columns and field names. It knows nothing of ranks, arrays or clocks: it is given
numbers. The text is for the parsers that exist, so a column never moves; what is new goes into JSON and CSV.
"""

# ruff: noqa: UP031 - the formats are printf's, because the other side of the comparison is C

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from bench.files import Rewritten, open_new
from bench.options import AVERAGES, Options

__all__ = ["Device", "IterationStats", "Measurement", "Report", "Row", "float_text"]

NCCL_TESTS_VERSION = "2.19.6"  # whose text this is
JSON_FILE_VERSION = 3
TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
PLACEMENTS = ("out_of_place", "in_place")

_COLUMNS = "# %10s  %12s  %8s  %6s  %6s"
_NUMBERS = "  %7s  %6s  %6s"
_BODY = _NUMBERS + "  %6s"
_PER_ITERATION = "  %7s  %7s  %7s  %7s"


def float_text(value: float, width: int) -> str:
    """The number in `width` columns with as many of two decimals as fit, else with an exponent."""
    for form in ("%*.2f", "%*.1f", "%*.0f"):
        text = form % (width, value)
        if len(text) <= width:
            return text
    return ("%*.1e" if width >= 7 else "%*.0e") % (width, value)


@dataclass(frozen=True)
class Device:
    """One rank's line under "Using devices"; `pci` is domain, bus and device, zeros where there is none."""

    rank: int
    group: int
    pid: int
    host: str
    device: int
    pci: tuple[int, int, int]
    name: str

    @property
    def pci_text(self) -> str:
        return "%04x:%02x:%02x" % self.pci

    @property
    def line(self) -> str:
        return "#  Rank %2d Group %2d Pid %6d on %10s device %2d [%s] %s" % (
            *(self.rank, self.group, self.pid, self.host, self.device),
            *(self.pci_text, self.name),
        )


@dataclass(frozen=True)
class IterationStats:
    """Single iterations of one measurement, in seconds, each the slowest process's."""

    times: tuple[float, ...]
    skipped: int
    per_process: tuple[tuple[float, ...], ...]

    @property
    def counted(self) -> list[float]:
        return sorted(self.times[self.skipped :])

    def percentile(self, percent: int) -> float:
        counted = self.counted
        return counted[min(len(counted), -(-len(counted) * percent // 100)) - 1]

    def columns(self) -> dict[str, float]:
        """min, max, avg, p50, p95, p99 and stdev in us, cv in percent; named as in the JSON."""
        counted, average = self.counted, statistics.fmean(self.counted)
        deviation = statistics.pstdev(counted)
        seconds = {
            "min_us": counted[0],
            "max_us": counted[-1],
            "avg_us": average,
            "p50_us": counted[len(counted) // 2],
            "p95_us": self.percentile(95),
            "p99_us": self.percentile(99),
            "stdev_us": deviation,
        }
        cv = 100 * deviation / average if average > 0 else 0.0
        return {**{name: 1e6 * value for name, value in seconds.items()}, "cv_pct": cv}


@dataclass(frozen=True)
class Measurement:
    """One placement of one row: seconds per operation, bandwidths in 1e9 bytes/s, wrong None if unchecked."""

    seconds: float
    algbw: float
    busbw: float
    wrong: int | None
    iterations: IterationStats | None = None


@dataclass(frozen=True)
class Row:
    """The independent variables of a row; `size` in bytes, `count` in elements as the call takes it."""

    size: int
    count: int
    dtype: str
    op: str
    root: int

    @property
    def text(self) -> str:
        return "%12d  %12d  %8s  %6s  %6s" % (self.size, self.count, self.dtype, self.op, "%6d" % self.root)


def measurement_text(measurement: Measurement) -> str:
    text = _NUMBERS % (
        float_text(1e6 * measurement.seconds, 7),
        float_text(measurement.algbw, 6),
        float_text(measurement.busbw, 6),
    )
    # One column less than a number takes: so does nccl-tests.
    text += "    N/A" if measurement.wrong is None else "  %6g" % measurement.wrong
    if measurement.iterations:
        columns = measurement.iterations.columns()
        text += _PER_ITERATION % tuple(
            float_text(columns[name], 7) for name in ("min_us", "max_us", "p99_us", "cv_pct")
        )
    return text


def opening_text(program: str, options: Options, headers: int, library: int) -> list[str]:
    """The lines above "Using devices"; `headers` and `library` are NCCL version codes."""
    factor = options.step_factor > 1
    lines = [
        f"# nccl-tests version {NCCL_TESTS_VERSION} nccl-headers={headers} nccl-library={library}",
        f"# Collective test starting: {program}",
        f"# nThread {options.threads} nGpus {options.gpus} "
        f"minBytes {options.min_bytes} maxBytes {options.max_bytes} "
        f"step: {options.step_factor if factor else options.step_bytes}({'factor' if factor else 'bytes'}) "
        f"warmup iters: {options.warmup} iters: {options.iterations} agg iters: {options.aggregated} "
        f"validation: {options.checks} graph: {options.graph_launches} unalign: {options.unalign}",
    ]
    blocking = {
        1: "wait and barrier after each inner iteration (-m)",
        2: "wait after each inner iteration (-m), no barrier",
        3: "wait and barrier after each outer iteration (-n); time excludes barrier",
    }
    if options.blocking:
        lines.append(f"# Blocking Enabled: {blocking[options.blocking]} ")
    if options.per_iteration:
        skip = options.per_iteration_skip
        skipping = f"; summary skips first {skip} iterations" if skip else ""
        lines.append(f"# Per-Iteration Report: wall clock; i_* uses max over process rows{skipping} ")
    if options.parallel_init:
        lines.append("# Parallel Init Enabled: threads call into NcclInitRank concurrently ")
    return [*lines, "#", "# Using devices"]


def table_header(options: Options) -> list[str]:
    when = "cputime" if options.cpu_time else "time"
    names, units = [when, "algbw", "busbw", "#wrong"], ["(us)", "(GB/s)", "(GB/s)", ""]
    body, placements = _BODY, " " * 11 + "out-of-place" + " " * 23 + "in-place" + " " * 10
    if options.per_iteration:
        names += ["i_min", "i_max", "i_p99", "i_cv%"]
        units += ["(us)", "(us)", "(us)", "(%)"]
        body += _PER_ITERATION
        placements = f"{' ' * 14}out-of-place (+ per-iteration){' ' * 32}in-place (+ per-iteration)"
    stamp, stamp_format = ("%19s" % "timestamp", TIME_FORMAT) if options.timestamps else ("", "")
    twice = _COLUMNS + body + body + " %s"
    return [
        "#",
        _COLUMNS % ("", "", "", "", "") + placements,
        twice % ("size", "count", "type", "redop", "root", *names, *names, stamp),
        twice % ("(B)", "(elements)", "", "", "", *units, *units, "%*s" % (len(stamp), stamp_format)),
    ]


class Report:
    """Prints the sweep as it goes, and writes what `-J` and `--csv` ask for with it.

    Only one rank has a report. Its files have every finished row at every moment: a run that is killed leaves
    them as they are.
    """

    def __init__(
        self, program: str, options: Options, out: IO[str], *, arguments: Sequence[str] = ()
    ) -> None:
        self._program, self._options, self._out = program, options, out
        self._ranks, self._library = 0, ""
        self._in_row = False
        self._busbw: list[float] = []
        self._row: dict[str, Any] = {}
        self._rows: list[str] = []  # as JSON: each is encoded once, and the file written for each
        self._table: list[dict[str, Any]] = []  # of the row that is measured
        self._json_file = Rewritten(options.output) if options.output else None
        self._csv_file = open_new(options.csv) if options.csv else None
        self._document: dict[str, Any] = {
            "version": JSON_FILE_VERSION,
            "start_time": time.strftime(TIME_FORMAT),
            "args": list(arguments),
        }
        self._errors: list[str] = []
        self._write_json()
        self._write_csv(",".join(_csv_columns(options)) + "\n")
        if self._json_file:
            self._say(f"# Writing JSON output to {self._json_file.path}")
        if self._csv_file:
            self._say(f"# Writing CSV output to {self._csv_file.name}")

    def start(
        self,
        devices: Sequence[Device],
        *,
        headers: int,
        library: int,
        environment: Mapping[str, str],
        about: Mapping[str, Any],
        notes: Sequence[str] = (),
    ) -> None:
        """The lines above the first row. `about` is what ours tells and nccl-tests does not: JSON only."""
        self._ranks = sum(one.group == devices[0].group for one in devices)  # whose operations are timed
        self._document["env"] = [f"{name}={value}" for name, value in sorted(environment.items())]
        self._document["nccl_version"] = library
        self._document["pynccl"] = {
            **about,
            "notes": [line.lstrip("# ") for line in notes if line.strip("# ")],
        }
        self._library = str(about.get("library", ""))
        self._document["config"] = {**_config(self._options), "devices": [_device(one) for one in devices]}
        self._document["results"] = []
        self._write_json()
        lines = opening_text(self._program, self._options, headers, library)
        for line in (*lines, *(one.line for one in devices), *notes, *table_header(self._options)):
            self._say(line)

    def begin_row(self, row: Row) -> None:
        self._out.write(row.text)
        self._in_row = True
        self._row = {"size": row.size, "count": row.count, "type": row.dtype, "redop": row.op}
        self._row["root"] = "%6d" % row.root

    def measured(self, placement: str, measurement: Measurement) -> None:
        self._out.write(measurement_text(measurement))
        self._busbw.append(measurement.busbw)
        self._row[placement] = {
            "cpu_time" if self._options.cpu_time else "time": _double(1e6 * measurement.seconds),
            "alg_bw": _double(measurement.algbw),
            "bus_bw": _double(measurement.busbw),
            "nwrong": measurement.wrong,
        }
        if measurement.iterations:
            self._row[f"{placement}_per_iter"] = _per_iteration(measurement.iterations)
        self._table.append(
            {
                "collective": self._program.removesuffix("_perf"),
                "library": self._library,
                "ranks": self._ranks,
                **{name: self._row[name] for name in ("size", "count", "type", "redop")},
                "root": int(self._row["root"]),
                "placement": placement,
                "buffers": self._options.buffers,
                "hot": int(self._options.hot),
                "aggregated": self._options.aggregated,
                "time_us": _double(1e6 * measurement.seconds),
                "alg_bw": _double(measurement.algbw),
                "bus_bw": _double(measurement.busbw),
                "wrong": measurement.wrong,
                **(
                    {k: _double(v) for k, v in measurement.iterations.columns().items()}
                    if measurement.iterations
                    else {}
                ),
            }
        )

    def end_row(self) -> None:
        stamp = "%21s" % time.strftime(TIME_FORMAT) if self._options.timestamps else ""
        self._row |= {"actual_iterations": self._options.iterations, "experiment_name": ""}
        if self._json_file:  # before the text, which may have lost its reader
            self._rows.append(_indented(self._row))
            self._write_json()
        self._write_csv(_csv_lines(_csv_columns(self._options), self._table))
        self._table = []
        self._say(stamp)
        self._in_row = False

    def comment(self, line: str) -> None:
        """A line between rows, which parsers pass over; it begins with #."""
        self._say(line)

    def note(self, line: str) -> None:
        """Something that was not run, and why: a line of text, and in the JSON one of our notes."""
        self._say(line)
        self._document["pynccl"]["notes"].append(line.lstrip("# "))

    def finish(self, out_of_bounds: int, least_busbw: float | None, memory: str | None = None) -> bool:
        """The lines below the last row; True if nothing was wrong and the bandwidth is what was asked for.

        `out_of_bounds` counts the checks, over all ranks, that found a wrong element. `least_busbw` is
        NCCL_TESTS_MIN_BW in GB/s, of which nine tenths are enough.
        """
        average = statistics.fmean(self._busbw) if self._busbw else math.nan
        enough = least_busbw is None or average >= 0.9 * least_busbw
        verdict = "" if least_busbw is None else ("OK" if enough else "FAILED")
        self._say(
            "# %-20s : %d %s" % ("Out of bounds values", out_of_bounds, "FAILED" if out_of_bounds else "OK")
        )
        self._say("# %-20s : %g %s" % ("Avg bus bandwidth", average, verdict))
        self._say("#")
        self._say(f"# Collective test concluded: {self._program}")
        if memory:
            self._say("# %-20s : %s" % ("GPU memory usage", memory))
        self._say("#")
        self._document["out_of_bounds"] = {"count": out_of_bounds, "okay": _bool(not out_of_bounds)}
        self._document["average_bus_bandwidth"] = {
            "bandwidth": _double(average),
            "okay": "unchecked" if least_busbw is None else _bool(enough),
        }
        return enough and not out_of_bounds

    def close(self, error: str = "") -> None:
        """The last line, and the end of the files. Call it on every way out."""
        self._errors = [error] if error else []
        self._write_json()
        if self._csv_file:
            self._csv_file.close()
            self._csv_file = None
        with contextlib.suppress(BrokenPipeError) if error else contextlib.nullcontext():
            if self._in_row:
                self._say("")
            self._say(f"# error: {error}" if error else "")

    def _say(self, line: str) -> None:
        self._out.write(line + "\n")
        self._out.flush()

    def _write_json(self) -> None:
        """The document as far as it is known; `json.dump` of it with `indent=1`, from rows encoded before."""
        if not self._json_file:
            return
        ending = {"errors": self._errors, "end_time": time.strftime(TIME_FORMAT)}
        text = json.dumps({**self._document, **ending}, indent=1) + "\n"
        if self._rows:  # no string of the document has this in it: its quotes would be escaped
            text = text.replace('"results": []', '"results": [\n' + ",\n".join(self._rows) + "\n ]", 1)
        self._json_file.write(text)

    def _write_csv(self, lines: str) -> None:
        if self._csv_file:
            self._csv_file.write(lines)
            self._csv_file.flush()


_CSV_COLUMNS = (
    *("collective", "library", "ranks", "size", "count", "type", "redop", "root", "placement"),
    *("buffers", "hot", "aggregated", "time_us", "alg_bw", "bus_bw", "wrong"),
)
_CSV_STATISTICS = ("min_us", "max_us", "avg_us", "p50_us", "p95_us", "p99_us", "stdev_us", "cv_pct")


def _csv_columns(options: Options) -> tuple[str, ...]:
    return (*_CSV_COLUMNS, *(_CSV_STATISTICS if options.per_iteration else ()))


def _csv_lines(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    lines = io.StringIO()
    csv.DictWriter(lines, columns, lineterminator="\n").writerows(rows)
    return lines.getvalue()


def _indented(row: Mapping[str, Any]) -> str:
    """As an element of the document's results."""
    return "\n".join(f"  {line}" for line in json.dumps(row, indent=1).splitlines())


def _config(options: Options) -> dict[str, Any]:
    step = (
        {"step_factor": options.step_factor}
        if options.step_factor > 1
        else {"step_bytes": options.step_bytes}
    )
    return {
        "nthreads": options.threads,
        "ngpus": options.gpus,
        "minimum_bytes": options.min_bytes,
        "maximum_bytes": options.max_bytes,
        **step,
        "warmup_iters": options.warmup,
        "iterations": options.iterations,
        "aggregated_iterations": options.aggregated,
        "validation": options.checks,
        "graph": options.graph_launches,
        "blocking_collectives": _bool(options.blocking),
        "per_iter_timing": _bool(options.per_iteration),
        "per_iter_skip": options.per_iteration_skip,
        "parallel_init": _bool(options.parallel_init),
        "average": AVERAGES[options.average],
        "buffers": options.buffers,
        "hot": _bool(options.hot),
    }


def _device(device: Device) -> dict[str, Any]:
    return {
        "rank": device.rank,
        "group": device.group,
        "pid": device.pid,
        "hostname": device.host,
        "device": device.device,
        "device_hex": device.pci_text,
        "device_info": device.name,
    }


def _per_iteration(stats: IterationStats) -> dict[str, Any]:
    in_us: Callable[[Sequence[float]], list[Any]] = lambda times: [_double(1e6 * one) for one in times]  # noqa: E731
    several = (
        {"per_process_max_times_us": [in_us(row) for row in stats.per_process]}
        if len(stats.per_process) > 1
        else {}
    )
    return {
        "skipped_iterations": stats.skipped,
        **{name: _double(value) for name, value in stats.columns().items()},
        "times_us": in_us(stats.times),
        **several,
    }


def _double(value: float) -> float | str:
    """nccl-tests prints doubles with six decimals, and a NaN as a word, so that the file stays JSON."""
    return "nan" if math.isnan(value) else round(value, 6)


def _bool(value: object) -> str:
    """In nccl-tests' file truth values are strings."""
    return "true" if value else "false"

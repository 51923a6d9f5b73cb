"""One reader of nccl-tests' output, NVIDIA's or ours: text, JSON and our CSV become the same frozen records.

`read` takes a path or the text itself. This file knows the formats and nothing of how they are made; it runs
nothing, and what it cannot use it says in `Run.notes` instead of dropping it.

    run = read("all_reduce.json")
    for row in run.rows:
        print(run.program, run.ranks, row.size, row.in_place, row.time_us, row.busbw)
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.recognise import named
from bench.shapes import printable

__all__ = ["Device", "Iterations", "ParseError", "Record", "Run", "read", "read_all"]

NEWEST_JSON = 4  # 2.20's, which adds keys to 2.19's


class ParseError(ValueError):
    """Not output of nccl-tests, or not all of it: names the file and what is missing."""


@dataclass(frozen=True)
class Device:
    """A line under "Using devices"."""

    rank: int
    group: int
    pid: int
    host: str
    device: int
    pci: str
    name: str


@dataclass(frozen=True)
class Iterations:
    """Single iterations (-I) in microseconds, each the slowest process's. Text has the first four fields."""

    min_us: float
    max_us: float
    p99_us: float
    cv_pct: float
    avg_us: float | None = None
    p50_us: float | None = None
    p95_us: float | None = None
    stdev_us: float | None = None
    skipped: int = 0
    times_us: tuple[float, ...] = ()


@dataclass(frozen=True)
class Record:
    """One placement of one row: `size` in bytes, `count` in elements as the call takes it, 1e9 bytes/s.

    `redop` is "none" and `root` -1 where there is none; `wrong` is None where nothing was checked.
    """

    size: int
    count: int
    type: str
    redop: str
    root: int
    in_place: bool
    time_us: float
    algbw: float
    busbw: float
    wrong: int | None
    iterations: Iterations | None = None


@dataclass(frozen=True)
class Run:
    """One program's output. `ranks` is 0 and `when` empty if it does not tell.

    With NCCL_TESTS_SPLIT `groups` of ranks swept side by side; `ranks` are those of the first, whose rows
    these are. `program_by` is how the program was found out where the output does not name it.

    `notes` are sentences for the reader; `errors` those of them that say that something failed.
    """

    program: str = ""
    ranks: int = 0
    library: str = ""
    devices: tuple[Device, ...] = ()
    rows: tuple[Record, ...] = ()
    notes: tuple[str, ...] = ()
    average_busbw: float | None = None
    out_of_bounds: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)  # of the "# nThread .." line, by its own words
    errors: tuple[str, ...] = ()
    when: str = ""  # it began, by the clock of its machine
    groups: int = 1
    program_by: str = ""

    @property
    def good(self) -> bool:
        """Checked to the end, and nothing was wrong or failed."""
        return self.out_of_bounds == 0 and not self.errors and not any(row.wrong for row in self.rows)


def read(source: str | Path, program: str = "") -> Run:
    """The one run of a file (a path), or of a text (a string with more than one line).

    `program` is that of an output which does not name it (else its numbers, or the file's name, decide).
    Raises ParseError if there is no run, or more than one (`read_all` gives them all); OSError from the file.
    """
    runs = read_all(source, program)
    if len(runs) != 1:
        raise ParseError(
            f"{_name(source)} has the output of {len(runs)} runs, one was expected; use read_all"
        )
    return runs[0]


def read_all(source: str | Path, program: str = "") -> tuple[Run, ...]:
    """All runs of a file or text, in order: several may follow each other. `program` as in `read`."""
    text = (
        source if isinstance(source, str) and _is_text(source) else Path(source).read_text(errors="replace")
    )
    name = _name(source)
    if not text.strip():
        raise ParseError(f"{name} is empty: the run that was to write it ended before its first line")
    return tuple(named(run, Path(name).name, program) for run in _runs(text, name))


def _runs(text: str, name: str) -> tuple[Run, ...]:
    if text.lstrip().startswith("{"):
        return (_from_json(text, name),)
    if text.startswith(_CSV_BEGINS):
        rows = tuple(_from_csv(text, name))
        if not rows:
            raise ParseError(f"{name}: the heading of our --csv, and no row: the run had no result")
        return rows
    runs = tuple(_TextReader().read(text))
    if not runs:
        raise ParseError(
            f"{name}: no line of it is nccl-tests' (a heading '# nThread ..', or a row of numbers)"
        )
    return runs


def _is_text(source: str) -> bool:
    return "\n" in source or not source.strip() or source.lstrip().startswith("{")


def _name(source: str | Path) -> str:
    return "the text" if isinstance(source, str) and _is_text(source) else str(source)


# ---- text

_COLUMNS = "size count type redop root".split()
_PLACEMENT = "time algbw busbw #wrong".split()
_DEFAULT_HEADER = _COLUMNS + 2 * _PLACEMENT
_SYNONYMS = {"error": "#wrong", "cputime": "time"}
# What mpirun --tag-output, srun --label and pynccl.launch put before each line.
_TAG = re.compile(r"^(\[\d+,\d+\](<std\w+>)?:\s?|\d+: |\[ *\d+\] )")
_ROW = re.compile(r"^\s*\d+\s+\d+\s+[a-z]\w*\s")
_DEVICE = re.compile(
    r"#\s+Rank\s+(\d+)(?:\s+Group\s+(\d+))?\s+Pid\s+(\d+) on\s+(\S+) device\s+(\d+) \[([^\]]*)\] (.*)"
)
_VERSION = re.compile(r"# nccl-tests version (\S+).* nccl-library=(\d+)")
_STARTING = re.compile(r"# Collective test starting: (\S+)")
_CONCLUDED = re.compile(r"# Collective test concluded: (\S+)")
_SETTINGS = re.compile(r"# nThread\s+(\d+)")
_HEADER = re.compile(r"#\s+size\s+count\s+")
_WORRYING = re.compile(r"# Reducing maxBytes.*|# Leaving out .*|nRanks .*skipping")
_FAILED = re.compile(r"# error: .+|.*Test (?:(?:NCCL|CUDA) )?failure.*")
_UNFINISHED = "the run did not end: its last lines are missing"
_TOO_SLOW = "the average bus bandwidth, {} GB/s, is below the NCCL_TESTS_MIN_BW of the run"


class _TextReader:
    """Line by line; a heading after rows or after a header begins the next run."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.run = Run()
        self.rows: list[Record] = []
        self.devices: list[Device] = []
        self.notes: list[str] = []
        self.errors: list[str] = []
        self.header = _DEFAULT_HEADER
        self.in_table = self.any = False
        self.missing = {"verdict", "average"}  # of the last lines

    def read(self, text: str) -> Iterator[Run]:
        for line in text.splitlines():
            line = _TAG.sub("", line.rstrip())
            heading = _VERSION.match(line) or _STARTING.match(line) or _SETTINGS.match(line)
            if heading and (self.in_table or self.rows):
                yield self._finish()
                self._begin()
            try:
                self._line(line)
            except ValueError:
                self._error(f"a line that is not as nccl-tests writes it: {line[:120]!r}")
        if self.any:
            yield self._finish()

    def _finish(self) -> Run:
        if self.missing:
            self._error(_UNFINISHED)
        ranks, groups = _ranks_and_groups(self.devices)
        library = self.run.library
        if self.devices and all(map(_is_host_memory, self.devices)):
            library = f"pynccl host library ({library})" if library else "pynccl host library"
        if not ranks and "nThread" in self.run.settings:
            self.notes.append("no device is listed, so the number of ranks is not known")
        return replace(
            self.run,
            ranks=ranks,
            groups=groups,
            library=library,
            devices=tuple(self.devices),
            rows=tuple(self.rows),
            notes=tuple(self.notes),
            errors=tuple(self.errors),
        )

    def _error(self, sentence: str) -> None:
        self.notes.append(sentence)
        self.errors.append(sentence)

    def _line(self, line: str) -> None:
        if not line.startswith("#"):
            if _ROW.match(line):
                self.any = True
                self._row(line)
            elif _FAILED.match(line):
                self._error(line.strip())
            elif _WORRYING.match(line):
                self.notes.append(line.strip())
        elif match := _VERSION.match(line):
            self._set(library=_library(int(match[2])))
        elif match := _STARTING.match(line):
            self._set(program=match[1])
            self.missing.add("concluded")  # which younger versions print
        elif match := _CONCLUDED.match(line):
            if not self.run.program or self.run.program == match[1]:  # else it is cut
                self._set(program=match[1])
                self.missing.discard("concluded")
        elif _SETTINGS.match(line):
            self._set(settings=_settings(line))
        elif match := _DEVICE.match(line):
            rank, group, pid, host, device, pci, name = match.groups()
            self.devices.append(Device(int(rank), int(group or 0), int(pid), host, int(device), pci, name))
        elif _HEADER.match(line):
            self.header = [_SYNONYMS.get(word, word) for word in line.split()[1:]]
            self.in_table = True
        elif match := re.match(r"# Out of bounds values\s*: (\d+)( OK| FAILED)?$", line):
            if match[2]:
                self.missing.discard("verdict")
            self._set(out_of_bounds=int(match[1]))
        elif match := re.match(r"# Avg bus bandwidth\s*: (\S+)( FAILED)?", line):
            self._set(average_busbw=_float(match[1]))
            self.missing.discard("average")
            if match[2]:
                self._error(_TOO_SLOW.format(match[1]))
        elif _FAILED.match(line):
            self._error(line.lstrip("# "))
        elif _WORRYING.match(line):
            self.notes.append(line.lstrip("# "))

    def _set(self, **fields: Any) -> None:
        self.any = True
        self.run = replace(self.run, **fields)

    def _row(self, line: str) -> None:
        words = line.split()
        if "redop" in self.header and len(words) > 3 and re.fullmatch(r"-?\d+", words[3]):
            words.insert(3, "none")  # hypercube_perf prints nothing there
        first = {name: word for name, word in zip(self.header, words, strict=False) if name in _COLUMNS}
        placements = _split_at(self.header, "time")
        rest = words[len(first) :]
        for in_place, names in enumerate(placements):
            cells = dict(zip(names, rest, strict=False))
            rest = rest[len(names) :]
            try:
                self.rows.append(_text_record(first, bool(in_place), cells))
            except (KeyError, ValueError):
                place = "in-place" if in_place else "out-of-place"
                self._error(f"size {words[0]}: no {place} result in the line {line.strip()!r}")


def _split_at(names: Sequence[str], first: str) -> list[list[str]]:
    """The columns of each placement: from one "time" to the next."""
    starts = [i for i, name in enumerate(names) if name == first]
    return [list(names[a:b]) for a, b in zip(starts, [*starts[1:], len(names)], strict=True)]


def _text_record(first: Mapping[str, str], in_place: bool, cells: Mapping[str, str]) -> Record:
    iterations = None
    if "i_min" in cells:
        least, most, p99, variation = (_float(cells[name]) for name in ("i_min", "i_max", "i_p99", "i_cv%"))
        iterations = Iterations(min_us=least, max_us=most, p99_us=p99, cv_pct=variation)
    return Record(
        size=int(first["size"]),
        count=int(first["count"]),
        type=first["type"],
        redop=first.get("redop", "none"),
        root=int(first.get("root", "-1")),
        in_place=in_place,
        time_us=_float(cells["time"]),
        algbw=_float(cells["algbw"]),
        busbw=_float(cells["busbw"]),
        wrong=None if cells["#wrong"] == "N/A" else int(_float(cells["#wrong"])),
        iterations=iterations,
    )


_CORES = re.compile(r" \(\d+ cores\)$")


def _is_host_memory(device: Device) -> bool:
    """As a rank of our host library lists it: no GPU, at no place on a bus, but the CPU and its cores."""
    return device.pci == "0000:00:00" and _CORES.search(device.name) is not None


def _ranks_and_groups(devices: Sequence[Device], per_line: int = 1) -> tuple[int, int]:
    """The ranks of the first rank's group, and how many groups there are; a line may stand for several."""
    groups = len({one.group for one in devices})
    if groups > 1:
        return per_line * sum(one.group == devices[0].group for one in devices), groups
    return max((one.rank + per_line for one in devices), default=0), 1


def _settings(line: str) -> dict[str, str]:
    """`# nThread 1 nGpus 8 .. step: 2(factor) warmup iters: 1`: names (with spaces, some) and values."""
    pairs = re.findall(r"([A-Za-z][A-Za-z ]*?):? (\d\S*)", line.lstrip("# "))
    return {name.strip(): value for name, value in pairs}


def _library(code: int) -> str:
    """22304 is 2.23.4; until 2.8 a code had four digits: 2708 is 2.7.8."""
    major, rest = divmod(code, 10000 if code >= 10000 else 1000)
    return f"NCCL {major}.{rest // 100}.{rest % 100}" if code else "NCCL"


# ---- JSON

_STATISTICS = ("min_us", "max_us", "p99_us", "cv_pct", "avg_us", "p50_us", "p95_us", "stdev_us")


def _from_json(text: str, name: str) -> Run:
    try:
        document = printable(json.loads(text))
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is the former
        raise ParseError(
            f"{name}: broken JSON ({error}); a run that was killed leaves its file unfinished"
        ) from None
    version = document.get("version")
    if not isinstance(version, int) or not {"nccl_version", "start_time"} & set(document):
        raise ParseError(f"{name}: no JSON of nccl-tests: its -J files have 'version' and 'nccl_version'")
    try:
        return _json_run(document)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ParseError(f"{name}: a part of it is not as nccl-tests writes it ({error!r})") from error


def _json_run(document: Mapping[str, Any]) -> Run:
    version = document["version"]
    notes = (
        [f"version {version} of the JSON format, newer than {NEWEST_JSON}"] if version > NEWEST_JSON else []
    )
    notes += [str(note) for note in document.get("pynccl", {}).get("notes", ())]
    errors = [str(error) for error in document.get("errors", ()) if error]
    config, outcome = document.get("config", {}), document.get("out_of_bounds", {})
    if "out_of_bounds" not in document:
        errors.append(_UNFINISHED)
    average = document.get("average_bus_bandwidth", {})
    if average.get("okay") == "false":
        errors.append(_TOO_SLOW.format(average["bandwidth"]))
    devices = tuple(
        Device(
            rank=_whole(one["rank"]),
            group=_whole(one["group"]),
            pid=_whole(one["pid"]),
            host=_word(one["hostname"]),
            device=_whole(one["device"]),
            pci=_word(one["device_hex"]),
            name=_word(one["device_info"]),
        )
        for one in config.get("devices", ())
    )
    busbw = average.get("bandwidth")
    ranks, groups = _ranks(devices, _whole(config.get("nthreads", 1)) * _whole(config.get("ngpus", 1)))
    return Run(
        program=Path(next(iter(document.get("args", ())), "")).name,
        ranks=ranks,
        groups=groups,
        library=_json_library(document),
        devices=devices,
        rows=tuple(_json_records(document.get("results") or ())),
        notes=(*notes, *errors),
        average_busbw=None if busbw is None else _float(busbw),
        out_of_bounds=_whole(outcome["count"]) if outcome.get("count") is not None else None,
        settings={key: str(value) for key, value in config.items() if key != "devices"},
        errors=tuple(errors),
        when=str(document.get("start_time", "")),
    )


def _ranks(devices: Sequence[Device], per_process: int) -> tuple[int, int]:
    """nccl-tests lists the first rank of each process only; we list all."""
    firsts = [one.rank for one in devices] == [i * per_process for i in range(len(devices))]
    return _ranks_and_groups(devices, per_process if firsts else 1)


def _json_library(document: Mapping[str, Any]) -> str:
    nccl = _library(_whole(document.get("nccl_version") or 0))
    ours = document.get("pynccl")
    return f"pynccl host library ({nccl})" if ours and ours.get("library") == "host" else nccl


def _json_records(results: Sequence[Mapping[str, Any]]) -> Iterator[Record]:
    for row in results:
        for key, in_place in (("out_of_place", False), ("in_place", True)):
            one = row.get(key)
            if one is None:
                continue
            wrong = one["nwrong"]
            stats = row.get(f"{key}_per_iter")
            yield Record(
                size=_whole(row["size"]),
                count=_whole(row["count"]),
                type=_word(row["type"]),
                redop=_word(row["redop"] or "none"),
                root=int(row["root"]),
                in_place=in_place,
                time_us=_float(one["cpu_time"] if "cpu_time" in one else one["time"]),
                algbw=_float(one["alg_bw"]),
                busbw=_float(one["bus_bw"]),
                wrong=None if wrong is None else int(wrong),
                iterations=_json_iterations(stats) if stats else None,
            )


def _json_iterations(stats: Mapping[str, Any]) -> Iterations:
    return Iterations(
        **{name: _float(stats[name]) for name in _STATISTICS},
        skipped=_whole(stats.get("skipped_iterations", 0)),
        times_us=tuple(_float(one) for one in stats["times_us"]),
    )


# ---- CSV

_CSV_BEGINS = "collective,library,ranks,"
_CSV_RUN = ("collective", "library", "ranks", "buffers", "hot", "aggregated")  # equal within a run


def _from_csv(text: str, name: str) -> Iterator[Run]:
    """Files laid one behind the other are read, too: a second heading is not a row."""
    runs: dict[tuple[str, ...], list[Record]] = {}
    rows = csv.DictReader(text.splitlines())
    try:
        for row in rows:
            if row["collective"] == "collective":
                continue
            int(row["ranks"])
            runs.setdefault(tuple(row[key] for key in _CSV_RUN), []).append(_csv_record(row))
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        raise ParseError(f"{name}, line {rows.line_num}: not a row of our --csv ({error!r})") from None
    for key, records in runs.items():
        about = dict(zip(_CSV_RUN, key, strict=True))
        yield Run(
            program=f"{about.pop('collective')}_perf",
            library={"host": "pynccl host library", "nccl": "NCCL"}.get(about["library"], about["library"]),
            ranks=int(about["ranks"]),
            rows=tuple(records),
            notes=("a CSV does not tell whether the run came to its end, nor on what machine it was",),
            settings={key: about[key] for key in ("buffers", "hot", "aggregated")},
        )


def _csv_record(row: Mapping[str, str]) -> Record:
    statistics: dict[str, Any] = (
        {name: _float(row[name]) for name in _STATISTICS} if row.get("min_us") else {}
    )
    return Record(
        size=int(row["size"]),
        count=int(row["count"]),
        type=row["type"],
        redop=row["redop"],
        root=int(row["root"]),
        in_place=row["placement"] == "in_place",
        time_us=_float(row["time_us"]),
        algbw=_float(row["alg_bw"]),
        busbw=_float(row["bus_bw"]),
        wrong=int(row["wrong"]) if row["wrong"] else None,
        iterations=Iterations(**statistics) if statistics else None,
    )


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**64:
        raise ValueError(f"{str(value)[:40]!r} where a whole number is")
    return value


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:40]!r} where a word is")
    return value


def _float(value: float | str) -> float:
    """A number, or one of the words that nccl-tests writes for what is none."""
    return math.nan if value in ("nan", "-nan") else float(value)

"""The command line of nccl-tests 2.19 as one table: letters, names, defaults, meanings, where each can apply.

This file owns what the words mean. It knows nothing of ranks, arrays or libraries: `refuse_what_cannot_apply`
takes the kind of the library as a word.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from pathlib import Path
from typing import Any

__all__ = [
    "OPTIONS",
    "DTYPES",
    "OPS",
    "Options",
    "UsageError",
    "parse",
    "parse_size",
    "refuse_missing_library",
    "refuse_root",
    "refuse_what_cannot_apply",
]

# In nccl-tests' order, which is the order that `-d all` and `-o all` run in.
DTYPES = (
    *("int8", "uint8", "int32", "uint32", "int64", "uint64"),
    *("half", "float", "double", "bfloat16", "f8e4m3", "f8e5m2"),
)
OPS = ("sum", "prod", "max", "min", "avg", "mulsum")
AVERAGES = ("rank 0", "average", "minimum", "maximum")


class UsageError(ValueError):
    """A word on the command line that cannot be meant: names the option, the value and the remedy."""


@dataclass(frozen=True)
class Options:
    """What the user asked for, checked. Sizes in bytes, times in seconds; one field per row of `OPTIONS`."""

    threads: int
    gpus: int
    min_bytes: int
    max_bytes: int
    step_bytes: int
    step_factor: int
    iterations: int
    aggregated: int
    warmup: int
    cycles: int
    parallel_init: bool
    checks: int
    op: str
    dtype: str
    root: str
    blocking: int
    null_stream: bool
    timeout: int
    graph_launches: int
    cpu_time: bool
    timestamps: bool
    output: str | None
    average: int
    register: int
    cta_policy: int | None
    device_kernel: int
    device_ctas: int
    memory_report: bool
    unalign: int
    per_iteration: bool
    per_iteration_skip: int
    csv: str | None
    buffers: str
    hot: bool
    library: str | None

    def sizes(self) -> Iterator[int]:
        """The bytes of each row of a sweep: times `step_factor` if that is above 1, or plus `step_bytes`."""
        size = self.min_bytes
        while size <= self.max_bytes:
            yield size
            size = size * self.step_factor if self.step_factor > 1 else size + self.step_bytes

    def warmup_sizes(self) -> Iterator[int]:
        """The bytes to warm up at: from the smallest to the largest, doubling, whatever the sweep's step."""
        size = self.min_bytes
        while size <= self.max_bytes:
            yield size
            size = max(2 * size, 1)

    @property
    def ops(self) -> tuple[str, ...]:
        return OPS if self.op == "all" else (self.op,)

    @property
    def dtypes(self) -> tuple[str, ...]:
        return DTYPES if self.dtype == "all" else (self.dtype,)


def parse_size(text: str) -> int:
    """Bytes from "8", "64M", "1.5k": K, M and G are 1024, 1024^2 and 1024^3; a part of a byte is dropped."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kKmMgG]?)[bB]?\s*", text)
    if not match:
        raise UsageError(
            f"{text!r} is not a size; write bytes, or a number with K, M or G, as in 8, 64M, 1.5G"
        )
    number, unit = match.groups()
    size = Decimal(number) * 1024 ** " kmg".index(unit.lower() or " ")
    if size >= MOST_BYTES:
        raise UsageError(f"{text!r} is more than any memory has; write less than 8G times 1G")
    return math.floor(size)


MOST_BYTES = 2**63
MOST = 2**31 - 1  # of a number without a bound of its own: nccl-tests keeps them in C's int
MOST_RANKS = 4096  # that one machine starts
MOST_CALLS = 10**7  # that are timed at once: they are chosen before the clock starts


def _integer(low: int, high: int = MOST) -> Callable[[str], int]:
    """A whole number (decimal, or 0x..) in [low, high]."""

    def convert(text: str) -> int:
        try:
            value = int(text, 0)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise UsageError(f"{text!r} is not a whole number from {low} to {high}")
        return value

    return convert


def _switch(text: str) -> bool:
    return bool(_integer(0, 1)(text))


def _one_of(*names: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text.lower() not in names:
            raise UsageError(f"{text!r} is unknown; one of {', '.join(names)}")
        return text.lower()

    return convert


def _root(text: str) -> str:
    return "all" if text in ("all", "-1") else str(_integer(0)(text))


def _ending_in(suffix: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if not text.lower().endswith(suffix):
            raise UsageError(
                f"{text!r} does not end in {suffix}, the only format there is; name it {text}{suffix}"
            )
        return text

    return convert


_DTYPE_ALIASES = {
    "char": "int8",
    "int": "int32",
    "float16": "half",
    "float32": "float",
    "float64": "double",
    "fp8_e4m3": "f8e4m3",  # in some builds
    "fp8_e5m2": "f8e5m2",
}


def _dtype(text: str) -> str:
    return _one_of(*DTYPES, "all")(_DTYPE_ALIASES.get(text.lower(), text))


@dataclass(frozen=True)
class Option:
    letter: str | None
    name: str
    field: str
    convert: Callable[[str], Any]
    default: Any
    meta: str
    help: str
    needs: str | None = None  # why only GPUs can do it: in host memory only the default is taken


_M = 1024**2
_ranks = _integer(1, MOST_RANKS)
OPTIONS = (
    Option("t", "nthreads", "threads", _ranks, 1, "N", "threads per process, each a rank (1)"),
    Option("g", "ngpus", "gpus", _ranks, 1, "N", "processes to start (1); in a launcher: more threads"),
    Option("b", "minbytes", "min_bytes", parse_size, None, "SIZE", "smallest size (32M, at most -e)"),
    Option("e", "maxbytes", "max_bytes", parse_size, None, "SIZE", "largest size (32M, at least -b)"),
    Option("i", "stepbytes", "step_bytes", parse_size, _M, "SIZE", "add this from size to size (1M)"),
    Option("f", "stepfactor", "step_factor", _integer(1), 1, "N", "or multiply by this (off)"),
    Option("n", "iters", "iterations", _integer(1), 20, "N", "timed iterations (20)"),
    Option("m", "agg_iters", "aggregated", _integer(1), 1, "N", "operations in one group per iteration (1)"),
    Option("w", "warmup_iters", "warmup", _integer(0), 1, "N", "warm-up iterations at each size (1)"),
    Option("N", "run_cycles", "cycles", _integer(0), 1, "N", "whole sweeps to run (1); 0: for ever"),
    Option("p", "parallel_init", "parallel_init", _switch, False, "0|1", "threads init at once (always so)"),
    Option("c", "check", "checks", _integer(0), 1, "N", "check runs after the timing (1); 0: none"),
    Option("o", "op", "op", _one_of(*OPS, "all"), "sum", "OP", f"{'/'.join(OPS)}/all"),
    Option("d", "datatype", "dtype", _dtype, "float", "TYPE", f"{'/'.join(DTYPES)}/all"),
    Option("r", "root", "root", _root, "0", "RANK|all", "root of the operations that have one (0)"),
    Option("z", "blocking", "blocking", _integer(0, 3), 0, "0..3",
           "wait after each operation: 1 with, 2 without a barrier; 3: after each -n, barrier untimed"),
    Option("y", "stream_null", "null_stream", _switch, False, "0|1", "use the default stream (host: always)"),
    Option("T", "timeout", "timeout", _integer(0), 0, "SECONDS", "end a run that hangs this long (off)"),
    Option("G", "cudagraph", "graph_launches", _integer(0), 0, "N", "capture a graph, launch it N times (0)",
           "a CUDA graph needs a GPU"),
    Option("C", "report_cputime", "cpu_time", _switch, False, "0|1", "report the time to launch only"),
    Option("S", "report_timestamps", "timestamps", _switch, False, "0|1", "end rows with the date and time"),
    Option("J", "output_file", "output", _ending_in(".json"), None, "FILE.json", "write JSON too"),
    Option("a", "average", "average", _integer(0, 3), 1, "0..3", "rank 0, average (1), minimum, maximum"),
    Option("R", "local_register", "register", _integer(0, 2), 0, "0|1|2", "register: 1 buffers, 2 windows"),
    Option("x", "cta_policy", "cta_policy", _integer(0, 2), None, "0..2", "the communicator's CTA policy",
           "a CTA policy schedules GPU blocks"),
    Option("D", "device_implementation", "device_kernel", _integer(0), 0, "N", "device-side kernel (0)"),
    Option("V", "device_cta_count", "device_ctas", _integer(1, 128), 16, "N", "CTAs of that kernel (16)",
           "CTAs are GPU blocks"),
    Option("M", "memory", "memory_report", _switch, False, "0|1", "report the GPU memory used",
           "there is no GPU memory to report"),
    Option("u", "unalign", "unalign", _integer(0), 0, "N", "first element of the buffers that is used (0)"),
    Option("I", "per_iter_timing", "per_iteration", _switch, False, "0|1", "add i_min i_max i_p99 i_cv%%"),
    Option("K", "per_iter_skip", "per_iteration_skip", _integer(0), 0, "N", "iterations those leave out (0)"),
    Option(None, "csv", "csv", _ending_in(".csv"), None, "FILE.csv", "write CSV too, a row per result"),
    Option(None, "buffers", "buffers", _one_of("mapped", "plain"), "mapped", "mapped|plain",
           "from ncclMemAlloc as nccl-tests does (mapped), or ordinary arrays (plain)"),
    Option(None, "hot", "hot", _switch, False, "0|1", "1: all calls on the same piece of the buffers"),
    Option(None, "library", "library", str, None, "WHICH", "nccl, host or a path (PYNCCL_LIBRARY)"),
)  # fmt: skip


def parse(program: str, arguments: Sequence[str]) -> Options:
    """Options from the words of the command line; when they are wrong, says so and exits with status 2."""
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{program}",
        usage=f"python -m bench.{program} [options], all of them with -h",
        description=f"nccl-tests' {program}, with its options, its text and its JSON.",
        epilog="Environment: NCCL_TESTS_DEVICE, _MIN_BW, _SPLIT, _SPLIT_MASK, and for alltoallv_perf "
        "NCCL_TESTS_ALLTOALLV_SPREAD, _MATRIX_FILE, _MATRIX_SCALE, _PRINT_SUMMARY; see docs/bench.md.",
    )
    for option in OPTIONS:
        names = [f"-{option.letter}"] if option.letter else []
        parser.add_argument(
            *names,
            f"--{option.name}",
            dest=option.field,
            metavar=option.meta,
            default=option.default,
            type=_for_argparse(option.convert),
            help=option.help,
        )
    values = vars(parser.parse_args(arguments))
    if values["max_bytes"] is None:
        values["max_bytes"] = max(32 * _M, values["min_bytes"] or 0)
    if values["min_bytes"] is None:
        values["min_bytes"] = min(32 * _M, values["max_bytes"])
    options = Options(**values)
    try:
        _check_together(options)
    except UsageError as error:
        parser.error(str(error))
    return options


def _for_argparse(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """argparse shows a ValueError's type and hides its text; an ArgumentTypeError's text it shows."""

    def converted(text: str) -> Any:
        try:
            return convert(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return converted


def _check_together(options: Options) -> None:
    if options.min_bytes > options.max_bytes:
        raise UsageError(
            f"-b {options.min_bytes} is above -e {options.max_bytes}; -b is the smallest size, -e the largest"
        )
    if options.step_factor == 1 and options.step_bytes == 0:
        raise UsageError("-i 0 never reaches the largest size; give a step above 0, or a factor with -f 2")
    if options.step_factor > 1 and options.min_bytes == 0:
        raise UsageError(
            f"-b 0 stays 0 when multiplied by -f {options.step_factor}; start at -b 8, or step with -i"
        )
    if options.iterations * options.aggregated > MOST_CALLS:
        raise UsageError(
            f"-n {options.iterations} times -m {options.aggregated} are more than {MOST_CALLS} calls in one "
            "measurement; lower them, and repeat the sweep with -N"
        )
    if options.per_iteration and options.graph_launches:
        raise UsageError("-I 1 and -G exclude each other: a captured graph has no single iterations to time")
    if options.graph_launches and options.null_stream:
        raise UsageError(
            f"-G {options.graph_launches} and -y 1 exclude each other: the default stream is never captured"
        )
    if options.graph_launches and options.blocking:
        raise UsageError(
            f"-G {options.graph_launches} and -z {options.blocking} exclude each other: a capture cannot wait"
        )
    if options.per_iteration_skip and not options.per_iteration:
        raise UsageError(
            f"-K {options.per_iteration_skip} skips per-iteration times, which only -I 1 takes; add -I 1"
        )
    if options.per_iteration_skip >= options.iterations:
        raise UsageError(
            f"-K {options.per_iteration_skip} leaves none of the {options.iterations} iterations; raise -n"
        )
    if options.register == 2 and options.buffers == "plain":
        raise UsageError(
            "-R 2 (symmetric registration) needs memory of ncclMemAlloc; leave out --buffers plain"
        )


def refuse_missing_library(library: str | None) -> None:
    """Raises UsageError for a path, given as --library, where there is no file."""
    if library and "/" in library and not Path(library).expanduser().is_file():
        raise UsageError(f"--library {library}: there is no such file; give nccl, host or another path")


def refuse_root(options: Options, ranks: int) -> None:
    """Raises UsageError for a root that is none of the ranks."""
    if options.root != "all" and int(options.root) >= ranks:
        raise UsageError(f"-r {options.root}: the ranks are 0 to {ranks - 1}")


def refuse_what_cannot_apply(options: Options, library_kind: str) -> None:
    """Raises UsageError for the first option that a library of this kind ("host", "nccl") cannot honour."""
    if options.device_kernel:  # first: no library has it, so none is worth recommending
        raise UsageError(
            f"-D {options.device_kernel} (--device_implementation): device-side kernels are CUDA code, which "
            "libnccl's host interface cannot start, on GPUs neither; leave it out"
        )
    for option in OPTIONS:
        value = getattr(options, option.field)
        if option.needs and library_kind == "host" and value != option.default:
            raise UsageError(
                f"-{option.letter} {int(value)} (--{option.name}): {option.needs}, and this run is on "
                "the host library; leave it out, or run on GPUs"
            )


assert [option.field for option in OPTIONS] == [field.name for field in fields(Options)]

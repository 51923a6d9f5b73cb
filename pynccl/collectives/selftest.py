"""Runs every algorithm against the library's own collective, to the last bit.

    python -m pynccl.launch -n 5 -m pynccl.collectives selftest

Every row of the registry with all its variants, for each number of elements, dtype and reduction, out of
place and in place, interpreted, compiled on ordinary arrays, and compiled on arrays of ``comm.empty``. The
inputs are such that no sum or product rounds, so that every order of reduction must give the same bits.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import pynccl
from pynccl.arrays import numpy_dtype
from pynccl.collectives.compiled import compile
from pynccl.collectives.execute import run
from pynccl.collectives.options import names_of, numbers, output
from pynccl.collectives.registry import ALGORITHMS, Row, algorithms
from pynccl.collectives.schedule import COLLECTIVES, Buffer, Schedule

__all__ = ["Tally", "main", "test_schedule"]

COUNTS = (0, 1, 7, 1000, 65537)
DTYPES = ("float32", "int64", "bfloat16")
OPS = ("sum", "max", "prod")


@dataclasses.dataclass
class Tally:
    """What one rank has run, and what of it was wrong."""

    runs: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)


def main(arguments: list[str]) -> int:
    """The command line; returns the exit status: 0, 1 if anything was wrong."""
    options = _parser().parse_args(arguments)
    rows = [
        row
        for row in ALGORITHMS.values()
        if (options.algorithms is None or row.name in options.algorithms)
        and (not options.collective or row.collective == options.collective)
    ]
    for name in options.algorithms or ():
        if name not in {row.name for row in rows}:
            raise ValueError(
                f"selftest: {options.collective} has no algorithm {name!r}; it has "
                f"{', '.join(algorithms(options.collective))}"
            )
    comm = pynccl.init()
    begun, total, told = time.monotonic(), Tally(), []
    for row in rows:
        tally, since = Tally(), time.monotonic()
        for schedule in schedules(row, comm.size):
            test_schedule(schedule, comm, tally, counts=options.counts, dtypes=options.dtypes)
        wrong = comm.all_gather_object(tally.wrong)
        every = [f"rank {rank}: {what}" for rank, of in enumerate(wrong) for what in of]
        total.runs += tally.runs
        total.wrong += every
        told.append({"collective": row.collective, "algorithm": row.name, "runs": tally.runs, "wrong": every})
        if comm.rank == 0:
            verdict = f"{len(every)} WRONG, first: {every[0]}" if every else "exact"
            took = time.monotonic() - since
            print(f"{row.collective:>15} {row.name:<20} {tally.runs:6} runs {took:7.1f} s  {verdict}")
    if comm.rank == 0:
        print(
            f"selftest: {comm.size} ranks, {comm.library.kind} library, {len(rows)} algorithms, {total.runs} "
            f"runs a rank in {time.monotonic() - begun:.1f} s, {len(total.wrong)} wrong"
        )
        if options.json:
            Path(options.json).write_text(json.dumps({"ranks": comm.size, "algorithms": told}, indent=1))
    comm.destroy()
    return 1 if total.wrong else 0


def schedules(row: Row, n: int) -> Iterator[Schedule]:
    """The schedules of a row for n ranks: each variant, and for a root its first and last place."""
    rooted = COLLECTIVES[row.collective].only_root is not None
    for root in sorted({0, n - 1}) if rooted else [None]:
        for params in ({}, *row.variants):
            yield row.generator(n, **params, **({} if root is None else {"root": root}))


def test_schedule(
    schedule: Schedule,
    comm: Any,
    tally: Tally,
    *,
    counts: tuple[int, ...] = COUNTS,
    dtypes: tuple[str, ...] | list[str] = DTYPES,
    ops: tuple[str, ...] = OPS,
) -> None:
    """Run a schedule in all ways and count into ``tally`` what differs from the library's own collective."""
    ways = dict(_ways(schedule, comm))
    for count in counts:
        for dtype in dtypes:
            for op in ops if COLLECTIVES[schedule.collective].reduces else ("sum",):
                for in_place in (False, True) if _form(schedule) else (False,):
                    _compare(schedule, comm, tally, ways, count, dtype, op, in_place)


Way = tuple[Callable[..., Any], Callable[..., Any]]


def _ways(schedule: Schedule, comm: Any) -> Iterator[tuple[str, Way]]:
    """Name -> (how arrays are made, how the schedule is run on them)."""
    allocate = pynccl.gpu.empty if comm.on_gpu else np.empty
    yield "interpreted", (allocate, lambda x, out, op: run(schedule, comm, x, out, op))
    if comm.library.kind == "host":
        compiled = compile(schedule, comm)
        yield "compiled", (allocate, compiled)
        yield "compiled on shared arrays", (comm.empty, compiled)


def _form(schedule: Schedule) -> tuple[str | int, str | int] | None:
    return COLLECTIVES[schedule.collective].in_place if schedule.in_place else None


def _compare(
    schedule: Schedule,
    comm: Any,
    tally: Tally,
    ways: dict[str, Way],
    count: int,
    dtype: str,
    op: str,
    in_place: bool,
) -> None:
    values = _values(schedule, comm.rank, count, numpy_dtype("selftest", dtype), op)
    wanted = _own(schedule, comm, values, count, op)
    for name, (allocate, go) in ways.items():
        x, out = _arrays(schedule, comm.rank, count, values, allocate, in_place)
        result = go(x, out, op)
        tally.runs += 1
        if wanted is None:
            continue
        got = pynccl.gpu.to_host(result) if comm.on_gpu else result
        if got.tobytes() != wanted.tobytes():
            where = int(np.flatnonzero((got != wanted).reshape(-1))[:1].sum())
            form = "in place" if in_place else "out of place"
            root = f" root {schedule.root}" if COLLECTIVES[schedule.collective].only_root is not None else ""
            is_, not_ = got.reshape(-1)[where], wanted.reshape(-1)[where]
            tally.wrong.append(
                f"{schedule.collective} {schedule.name} {dict(schedule.params)}{root}, {count} x {dtype} "
                f"{op}, {form}, {name}: element {where} is {is_}, not {not_}"
            )


def _values(schedule: Schedule, rank: int, count: int, dtype: Any, op: str) -> Any:
    """This rank's IN: sums of at most 256 and products of powers of two are exact in every dtype here."""
    index = np.arange(schedule.in_blocks * count)
    small = (index * 7 + rank * 3) % 11 - 5
    if op == "prod":
        small = np.where((index + rank) % 5 == 0, 2, np.where((index + rank) % 7 == 0, -1, 1))
    return small.astype(dtype)


def _own(schedule: Schedule, comm: Any, values: Any, count: int, op: str) -> Any:
    """The library's own result, on the host; None where the rank has none."""
    x = pynccl.gpu.to_gpu(values) if comm.on_gpu else values.copy()
    call = getattr(comm, schedule.collective)
    kwargs: dict[str, Any] = {"op": op} if COLLECTIVES[schedule.collective].reduces else {}
    if COLLECTIVES[schedule.collective].only_root is not None:
        kwargs["root"] = schedule.root
    result = call(x, **kwargs)
    return pynccl.gpu.to_host(result) if comm.on_gpu and result is not None else result


def _arrays(
    schedule: Schedule, rank: int, count: int, values: Any, allocate: Callable[..., Any], in_place: bool
) -> tuple[Any, Any]:
    """x and out, apart or overlapping as NCCL allows; out is poisoned where it is not x."""
    blocks_in, blocks_out = schedule.in_blocks, schedule.out_blocks
    form = _form(schedule)
    if not in_place or form is None:
        x, out = (allocate(blocks * count, values.dtype) for blocks in (blocks_in, blocks_out))
    else:
        whole = allocate(max(blocks_in, blocks_out) * count, values.dtype)
        block_in, block_out = (rank if block == "r" else int(block) for block in form)
        x = whole[block_out * count : (block_out + blocks_in) * count]
        out = whole[block_in * count : (block_in + blocks_out) * count]
        if blocks_in == blocks_out:
            x = out = whole
    out[...] = 99
    if schedule.has(Buffer.IN, rank):
        x[...] = pynccl.gpu.to_gpu(values) if type(x).__module__.startswith("cupy") else values
    return x, out


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pynccl.collectives selftest", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--algorithms",
        type=names_of((name for _, name in ALGORITHMS), "algorithm", prefix="pynccl:"),
        help="ring,tree,...; none: all",
    )
    parser.add_argument("--collective", choices=COLLECTIVES)
    parser.add_argument(
        "--counts", type=numbers, default=COUNTS, help="elements of a block, such as 0,1,1000"
    )
    parser.add_argument("--dtypes", type=_dtypes, default=list(DTYPES), help="such as float32,bfloat16")
    parser.add_argument("--json", type=output, help="write what was found to this file")
    return parser


def _dtypes(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        try:
            numpy_dtype("selftest", name)
        except (TypeError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return names

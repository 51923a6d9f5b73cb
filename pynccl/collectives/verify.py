"""Proves that a schedule does what its collective says, or names the first step that is wrong.

`verify` goes through: each step makes sense by itself; sends match receives per (source, target, channel),
and no connection holds a message at the end; nothing waits for ever, for connections of so many slots; run on
symbols, nothing is read before it is written or lands on what is still to be sent, and no contribution counts
twice; OUT holds in the end each contribution exactly once, reduced in the same order on all ranks if the
schedule says so; and the same again with IN and OUT overlapping, if it says that it works in place. For the
execution itself see `symbols.py`; `simulate.py` runs schedules in quite another way and must agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from pynccl.collectives import symbols
from pynccl.collectives.fault import Fault
from pynccl.collectives.flow import flow, is_live
from pynccl.collectives.form import MOST_CHUNKS
from pynccl.collectives.schedule import COLLECTIVES, Array, Buffer, Schedule, check_is_schedule

__all__ = ["SLOTS", "Fault", "Proof", "find_fault", "verify"]

SLOTS = (0, 1, 2, 8)


@dataclasses.dataclass(frozen=True)
class Proof:
    """What has been shown of a schedule.

    `slots`: the lengths of connections with which it cannot stop; 0 is rendezvous. `deterministic`: all ranks
    reduce each chunk in the same way up to swapping operands, so to the same bits. `rank_order`: it reduces
    ranks 0, 1, ... n-1 from left to right, so that reductions that do not commute are right, too. `in_place`:
    it is right also when IN and OUT overlap. `lockstep`: each message is sent and received in the same round.
    `rounds`: how many rounds with messages wait for each other, in the longest chain.
    """

    schedule: Schedule
    slots: tuple[int, ...]
    deterministic: bool
    rank_order: bool
    in_place: bool
    lockstep: bool
    rounds: int
    steps: int

    def __str__(self) -> str:
        s = self.schedule
        reduces = COLLECTIVES[s.collective].reduces
        said = [
            f"each contribution exactly once in each of {s.chunks(Buffer.OUT)} output chunks"
            if reduces
            else f"{s.chunks(Buffer.OUT)} output chunks in their place",
            *(["the same bits on every rank"] if reduces and self.deterministic else []),
            *(["contributions in rank order"] if reduces and self.rank_order else []),
            *(["in place and out of place"] if self.in_place else ["out of place only"]),
            "no deadlock with " + ", ".join(f"{k} slots" if k else "rendezvous" for k in self.slots),
        ]
        title = f"{s.name} {s.collective}, {s.n} ranks: proved, {self.steps} steps in {self.rounds} rounds"
        return "\n  ".join([title, *said])


def verify(schedule: Schedule, *, slots: Iterable[int] = SLOTS) -> Proof:
    """Prove a schedule right, or raise the first `Fault`.

    `slots`: the numbers of messages that a connection can hold with which it must not stop (0: rendezvous).
    Takes time and memory in proportion to the number of chunks moved; for reductions memory of n bits for
    each. ValueError for a schedule that is too large for it.
    """
    check_is_schedule("verify", schedule)
    slots = tuple(slots)
    graph = flow(schedule)
    _refuse_too_large(schedule)
    for k in sorted(set(slots), reverse=True):  # the laxest first: it has the shortest cause
        is_live(schedule, graph, k)
    program = symbols.Program(schedule, graph)
    deterministic, rank_order = _check_result(schedule, program, in_place=False)
    in_place = schedule.in_place and COLLECTIVES[schedule.collective].in_place is not None
    if in_place:
        _check_result(schedule, program, in_place=True)
    return Proof(
        schedule,
        slots,
        deterministic,
        rank_order,
        in_place,
        graph.lockstep,
        graph.rounds,
        len(schedule),
    )


def find_fault(schedule: Schedule, *, slots: Iterable[int] = SLOTS) -> Fault | None:
    """The first fault of a schedule; None if `verify` proves it."""
    try:
        verify(schedule, slots=slots)
    except Fault as fault:
        return fault
    return None


def _refuse_too_large(schedule: Schedule) -> None:
    """A few steps can move more chunks than memory can follow."""
    chunks = schedule.n * sum(schedule.chunks(buffer) for buffer in Buffer)
    moved = int(schedule.columns["chunks"].sum(dtype=np.int64))
    most = MOST_CHUNKS + len(schedule)
    if max(chunks, moved) > most:
        raise ValueError(
            f"verify: {schedule!r} has {chunks} chunks in its buffers and moves {moved}, and {most} of each "
            "are followed at most; verify it for fewer ranks or parts"
        )


def _check_result(schedule: Schedule, program: symbols.Program, *, in_place: bool) -> tuple[bool, bool]:
    """Whether the reductions are deterministic and in rank order; a `Fault` if OUT is not as it should be."""
    values = symbols.execute(program, in_place=in_place)
    n, chunks = schedule.n, schedule.chunks(Buffer.OUT)
    row = COLLECTIVES[schedule.collective]
    having = np.array([schedule.root]) if row.only_root == Buffer.OUT else np.arange(n)
    out = values.out[having]
    _refuse(schedule, having, out < 0, lambda *_: "is never written", in_place)
    if not row.reduces:
        wrong = out != _copied(schedule)[having]
        _refuse(schedule, having, wrong, lambda r, c: f"holds {_said(schedule, values, out[r, c])}", in_place)
        return True, True
    label = np.arange(chunks) + (having[:, None] * chunks if schedule.in_blocks > 1 else 0)
    wrong = values.labels[out] != label
    _refuse(schedule, having, wrong, lambda r, c: f"holds {_said(schedule, values, out[r, c])}", in_place)
    distinct, index = np.unique(out, return_inverse=True)
    sets = values.sets[values.set_rows(distinct, schedule.chunks(Buffer.IN), n)]
    full = np.zeros(sets.shape[1], dtype=np.uint64)
    for rank in range(n):
        full[rank // 64] |= np.uint64(1) << np.uint64(rank % 64)
    wrong = (sets != full).any(axis=1)[index].reshape(out.shape)
    _refuse(schedule, having, wrong, lambda r, c: f"holds {_said(schedule, values, out[r, c])}", in_place)
    in_order = bool((values.in_order[distinct] & (values.low[distinct] == 0)).all())
    deterministic = bool((out == out[0]).all()) or len(having) == 1 or schedule.in_blocks > 1
    if not deterministic:
        alike = _up_to_swaps(values)[out]
        unlike = alike != alike[0]
        deterministic = not unlike.any()
        if schedule.deterministic:
            _refuse(
                schedule,
                having,
                unlike,
                lambda *_: (
                    "is reduced in another order than on rank 0 (say deterministic=False if that is meant)"
                ),
                in_place,
            )
    return deterministic, in_order


def _copied(schedule: Schedule) -> Array:
    """The input that each output chunk of each rank should be, for collectives that only move."""
    n, parts = schedule.n, schedule.parts
    chunks, in_chunks = schedule.chunks(Buffer.OUT), schedule.chunks(Buffer.IN)
    block, part = np.divmod(np.arange(chunks), parts)
    ranks = np.arange(n)[:, None]
    if schedule.collective == "broadcast":
        return np.broadcast_to(schedule.root * in_chunks + part, (n, chunks))
    if schedule.collective == "all_gather":
        return np.broadcast_to(block * in_chunks + part, (n, chunks))
    return block * in_chunks + ranks * parts + part  # all_to_all


def _refuse(schedule: Schedule, having: Array, wrong: Array, say, in_place: bool) -> None:  # type: ignore[no-untyped-def]
    if not wrong.any():
        return
    row, chunk = (int(i) for i in np.argwhere(wrong)[0])
    rank = int(having[row])
    rows = schedule.rows(rank)
    writes = (rows["dst_buffer"] == Buffer.OUT) & (rows["dst_chunk"] <= chunk)
    writers = np.flatnonzero(writes & (chunk < rows["dst_chunk"] + rows["chunks"]))
    step = int(writers[-1]) if len(writers) else -1
    last = f", last written by: {schedule.step(rank, step)}" if step >= 0 else ""
    where = " (in place)" if in_place else ""
    what = f"in the end out[{chunk}] of rank {rank} {say(row, chunk)}{where}{last}"
    raise Fault.of(schedule, rank, step, chunk, what)


def _said(schedule: Schedule, values: symbols.Values, value: int) -> str:
    """A value in words: whose contributions it has, and which it lacks."""
    n, in_chunks = schedule.n, schedule.chunks(Buffer.IN)
    label = int(values.labels[value])
    words = values.sets[values.set_rows(np.array([value]), in_chunks, n)[0]]
    has = np.flatnonzero(symbols.bits(words, n))
    text = f"in[{label}] of " + ("rank " if len(has) == 1 else "ranks ") + _some(has)
    if COLLECTIVES[schedule.collective].reduces and len(has) < n:
        text += " and lacks " + _some(np.setdiff1d(np.arange(n), has))
    return text


def _some(ranks: Array) -> str:
    return ", ".join(map(str, ranks[:6].tolist())) + (", ..." if len(ranks) > 6 else "")


def _up_to_swaps(values: symbols.Values) -> Array:
    """For each value another number, equal for those that differ only in the order of operands of reductions.

    Equal expressions are equally deep, so that one depth after the other can be gone through at once.
    """
    alike = np.arange(values.inputs + len(values.left))
    depth = np.zeros(len(alike), dtype=np.int64)
    for begin, end in values.batches:
        made = slice(values.inputs + begin, values.inputs + end)
        depth[made] = 1 + np.maximum(depth[values.left[begin:end]], depth[values.right[begin:end]])
    by_depth = np.argsort(depth[values.inputs :], kind="stable")
    cuts = np.searchsorted(depth[values.inputs :][by_depth], np.arange(1, depth.max(initial=0) + 2))
    for begin, end in zip(cuts[:-1], cuts[1:], strict=True):
        some = by_depth[begin:end]
        x, y = alike[values.left[some]], alike[values.right[some]]
        pair = np.minimum(x, y) * len(alike) + np.maximum(x, y)
        _, first, index = np.unique(pair, return_index=True, return_inverse=True)
        alike[values.inputs + some] = values.inputs + some[first[index]]
    return alike

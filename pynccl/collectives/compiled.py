"""Schedules at the speed of C: one call of the host library, and no Python for each step.

    ring = compile(generate("ring", comm.size), comm)
    ring(x)  # as comm.all_reduce(x), by this schedule

Owns the translation of one rank's steps into what `pynccl/host/src/schedule.c` runs: which receives may
reduce as they read the sender's memory, and which messages must have been taken before a step may write.
"""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import numpy as np

from pynccl.abi.errors import InvalidArgumentError, MissingFunctionError
from pynccl.abi.types import RedOp, pyncclSchedule_t
from pynccl.collectives.execute import Call, check_call, check_proof
from pynccl.collectives.flow import flow
from pynccl.collectives.rounds import messages
from pynccl.collectives.schedule import COLLECTIVES, Array, Buffer, Kind, Schedule, check_is_schedule
from pynccl.operations import OPERATIONS, Plan
from pynccl.prepared import Prepared

__all__ = ["Compiled", "compile"]


FUNCTION = "pyncclRunSchedule"


class Compiled:
    """A schedule on a communicator in host memory; call it as its collective. See `compile`."""

    def __init__(self, schedule: Schedule, comm: Any, *, unchecked: bool = False) -> None:
        check_is_schedule("compile(schedule, comm)", schedule)
        name = f"compile({schedule.name!r})"
        if not comm.library.has(FUNCTION):
            raise MissingFunctionError(
                f"{name}: {comm.library.path} runs no schedules, only pynccl's host library does; use "
                "pynccl.collectives.run, which works with any library",
                call=FUNCTION,
            )
        if schedule.n != comm.size:
            raise InvalidArgumentError(
                f"{name}: the schedule is for {schedule.n} ranks and the communicator has {comm.size}; "
                "generate it with n=comm.size"
            )
        check_proof(schedule, unchecked=unchecked)
        self.schedule = schedule
        self._comm, self._unchecked = comm, unchecked

    def __call__(
        self, x: Any, out: Any = None, op: Any = "sum", *, stream: Any = None, root: int | None = None
    ) -> Any:
        """Run it. ``op`` is a name; for any other reduction there is ``pynccl.collectives.run``."""
        call, arguments, held = self._marshal(x, out, op, root)
        self._comm._issue(f"{call.name} ({FUNCTION})", FUNCTION, arguments, stream, held)
        return call.planned.result

    def prepare(
        self, x: Any, out: Any = None, op: Any = "sum", *, stream: Any = None, root: int | None = None
    ) -> Prepared:
        """The call checked and marshalled once, as ``comm.prepare`` does."""
        call, arguments, held = self._marshal(x, out, op, root)
        queue, handle, hold = self._comm._where(call.name, stream, call.planned)
        what = dataclasses.replace(OPERATIONS[self.schedule.collective], name=call.name)
        prepared = Prepared(self._comm, what, FUNCTION, (*arguments, handle), held, queue, hold)
        self._comm._prepared.add(prepared)
        return prepared

    def _marshal(self, x: Any, out: Any, op: Any, root: int | None) -> tuple[Call, tuple[Any, ...], Plan]:
        """The checked call, the library's arguments without the stream, and what must live until it ends."""
        call = check_call(self.schedule, self._comm, x, out, op, root=root, unchecked=self._unchecked)
        if call.op is not None and not isinstance(op, str):
            raise InvalidArgumentError(
                f"{call.name}: op={op!r} cannot be compiled; pass 'sum', 'prod', 'max', 'min' or 'avg', or "
                "use pynccl.collectives.run"
            )
        planned = call.planned
        part = _part(self.schedule, self._comm.rank, in_place=call.in_place)
        code = planned.op if planned.op is not None else RedOp.SUM
        # The library reads the schedule until the call is done, so it is kept alive as the arrays are.
        held = planned._replace(buffers=(*planned.buffers, part))  # type: ignore[arg-type]
        arguments = (part.structure, call.send, call.recv, planned.elements, planned.dtype, code)
        return call, (*arguments, self._comm._handle), held

    def __repr__(self) -> str:
        return f"<Compiled {self.schedule!r} on {self._comm!r}>"


def compile(schedule: Schedule, comm: Any, *, unchecked: bool = False) -> Compiled:
    """The schedule as a callable ``(x, out=None, op="sum", *, stream=None)`` that the host library runs.

    Works on any arrays in host memory, on streams and inside ``pynccl.group()``, in place and not. Arrays of
    ``comm.empty`` are read by the peers where they lie, others through shared memory. Long buffers are cut
    into slabs, so which chunk an element belongs to is not what it is in `run`: the order of the reduction
    may differ between the two, and never between ranks. Raises `Fault` for a wrong schedule unless
    ``unchecked``, MissingFunctionError for a library other than the host library, InvalidArgumentError for
    another number of ranks.
    """
    return Compiled(schedule, comm, unchecked=unchecked)


# --- translation --------------------------------------------------------------------------------------------

STEP = (  # the members of pyncclScheduleStep_t, in the order in which the tuples below have them
    *("reduces", "left", "peer", "peer_round", "number"),
    *("from_buffer", "from_chunk", "src_buffer", "src_chunk", "dst_buffer", "dst_chunk", "chunks"),
    "fence",
)
APART = 3  # the buffer of messages that are reduced after all of their round have come


@dataclasses.dataclass(eq=False)
class Part:
    """One rank's part as the C structure; the arrays that it points to live here."""

    structure: pyncclSchedule_t
    arrays: tuple[Any, ...]


def _part(schedule: Schedule, rank: int, *, in_place: bool) -> Part:
    kept = vars(schedule).setdefault("_parts", {})
    key = (rank, in_place)
    if key not in kept:
        kept[key] = _Translation(schedule, rank, in_place).part()
    return kept[key]


Interval = tuple[int, int]


def _meet(a: Interval, b: Interval) -> bool:
    return a[0] < b[1] and b[0] < a[1]


class _Translation:
    """From the steps of a rank to rows of the C structure.

    Memory is one line of chunks here, so that IN and OUT can overlap as they do in place: an interval of it
    is what a step reads or writes.
    """

    def __init__(self, schedule: Schedule, rank: int, in_place: bool) -> None:
        self.schedule, self.rank = schedule, rank
        lengths = [schedule.chunks(buffer) for buffer in Buffer]
        self.base = [lengths[1] + lengths[2], 0, lengths[1]]  # of IN, OUT, SCRATCH
        self.last = np.zeros(
            sum(lengths) + lengths[0], dtype=np.int64
        )  # sends that read a chunk: the last, + 1
        form = COLLECTIVES[schedule.collective].in_place
        if in_place and form is not None:
            block_in, block_out = (rank if block == "r" else int(block) for block in form)
            # IN may begin before OUT: all of it moves up behind where OUT and SCRATCH would be.
            self.base = [(block_out - block_in) * schedule.parts, 0, lengths[0] + lengths[1] + lengths[2]]
            shift = max(0, -self.base[0])
            self.base = [base + shift for base in self.base]
            self.last = np.zeros(self.base[2] + lengths[2], dtype=np.int64)
        self.rows: list[tuple[int, ...]] = []
        self.rounds: list[Interval | tuple[int, int, int]] = []
        self.sends: list[Interval] = []
        self.apart = 0

    def part(self) -> Part:
        schedule, rank = self.schedule, self.rank
        sent, received = messages(schedule, rank)
        first = int(schedule.first[rank])
        node = flow(schedule).node
        firsts = node[np.minimum(schedule.first[:-1], max(len(node) - 1, 0))] if len(node) else schedule.first
        columns = schedule.columns
        number_sent, to = _numbers(sent.order, columns["peer"][sent.own], schedule.n)
        number_received, from_ = _numbers(received.order, columns["peer"][received.own], schedule.n)
        self.number = dict(zip((sent.own - first).tolist(), number_sent, strict=True))
        self.arrival: dict[int, tuple[int, int, int, int, int]] = {}
        for own, other, number in zip(
            received.own.tolist(), received.other.tolist(), number_received, strict=True
        ):
            row, peer = columns[other], int(columns["peer"][own])
            begun = int(node[other] - firsts[peer])
            self.arrival[own - first] = (
                peer,
                begun,
                number,
                int(row["src_buffer"]),
                int(row["src_chunk"]),
            )
        self._translate(schedule.rows(rank))
        everything = columns["src_buffer"][columns["kind"] == Kind.SEND]
        only_root = COLLECTIVES[schedule.collective].only_root
        exposed = self._exposed()
        arrays = (
            np.array(self.rows, dtype=np.intc).reshape(-1, len(STEP)),
            np.array(self.rounds, dtype=np.intc).reshape(-1, 3),
            np.array(self.sends, dtype=np.intc).reshape(-1, 2),
            np.array(exposed, dtype=np.intc).reshape(-1, 2),
            to,
            from_,
        )
        structure = pyncclSchedule_t(
            size=ctypes.sizeof(pyncclSchedule_t),
            name=schedule.name.encode(),
            fingerprint=int(schedule.digest[:8], 16),
            nranks=schedule.n,
            rank=rank,
            parts=schedule.parts,
            in_blocks=schedule.in_blocks,
            out_blocks=schedule.out_blocks,
            in_root=schedule.root if only_root == Buffer.IN else -1,
            out_root=schedule.root if only_root == Buffer.OUT else -1,
            scratch_chunks=schedule.scratch_chunks,
            sends_in=int((everything == Buffer.IN).any()),
            sends_out=int((everything == Buffer.OUT).any()),
            most_rounds=schedule.most_rounds,
            most_apart=_most_reduced(schedule),
            nrounds=len(self.rounds),
            nsends=len(self.sends),
            nexposed=len(exposed),
            apart_chunks=self.apart,
            most_receives=max((r[1] - r[0] for r in self.rounds), default=0),
            steps=arrays[0].ctypes.data,
            rounds=arrays[1].ctypes.data,
            sends=arrays[2].ctypes.data,
            exposed=arrays[3].ctypes.data,
            to=arrays[4].ctypes.data,
            from_=arrays[5].ctypes.data,
        )
        return Part(structure, arrays)

    def _translate(self, rows: Array) -> None:
        numbers = rows["round"]
        begins = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist()] if len(rows) else []
        for begin, end in zip(begins, [*begins[1:], len(rows)], strict=False):
            self._round(rows, range(begin, end))

    def _round(self, rows: Array, indices: range) -> None:
        sending: list[Interval] = []
        landing: list[Interval] = []
        for i in indices:
            kind = rows[i]["kind"]
            if kind == Kind.SEND:
                span = self._interval(rows[i], "src")
                sending.append(span)
                self.sends.append((int(rows[i]["peer"]), self.number[i]))
                self.last[span[0] : span[1]] = len(self.sends)
            elif kind == Kind.RECV:
                landing.append(self._interval(rows[i], "dst"))
        receives: list[tuple[int, int, list[tuple[int, ...]]]] = []
        computes: list[tuple[int, ...]] = []
        fused: list[tuple[Interval, Interval]] = []  # (src, dst) of reductions made as messages are read
        later: list[tuple[Interval, Interval]] = []  # and of the steps after that
        apart = 0
        for i in indices:
            row, kind = rows[i], Kind(int(rows[i]["kind"]))
            if kind == Kind.SEND:
                continue
            dst = self._interval(row, "dst")
            if kind == Kind.RECV:
                self._receive(receives, i, row, False, None)
                continue
            src = self._interval(row, "src")
            if kind == Kind.RECV_REDUCE:
                clear = not any(_meet(dst, span) for span in sending)
                clear = clear and not any(_meet(dst, span) or _meet(src, span) for span in landing)
                clear = clear and not any(
                    _meet(dst, read) or _meet(dst, wrote) or _meet(src, wrote)
                    for read, wrote in (*fused, *later)
                )
                if clear:
                    fused.append((src, dst))
                    self._receive(receives, i, row, True, None)
                    continue
                self._receive(receives, i, row, False, apart)
                computes += self._compute(row, True, (APART, apart))
                apart += int(row["chunks"])
            elif kind == Kind.REDUCE:
                # dst = dst op src
                place = (int(row["src_buffer"]), int(row["src_chunk"]))
                computes += self._compute(row, True, place, src_is_dst=True)
            else:
                place = (int(row["src_buffer"]), int(row["src_chunk"]))
                computes += self._compute(row, False, place)
            later.append((src, dst))
        self.apart = max(self.apart, apart)
        begin = len(self.rows)
        for _, _, pieces in sorted(receives, key=lambda receive: receive[:2]):  # by peer, in order
            self.rows += pieces
        middle = len(self.rows)
        self.rows += computes
        self.rounds.append((begin, middle, len(self.rows)))

    def _receive(
        self,
        receives: list[tuple[int, int, list[tuple[int, ...]]]],
        index: int,
        row: Any,
        reduces: bool,
        apart: int | None,
    ) -> None:
        peer, begun, number, buffer, chunk = self.arrival[index]
        dst = (int(row["dst_buffer"]), int(row["dst_chunk"])) if apart is None else (APART, apart)
        src = (int(row["src_buffer"]), int(row["src_chunk"])) if reduces else (0, 0)
        fence = 0 if apart is not None else self._fence(row)
        pieces: list[tuple[int, ...]] = [
            (
                *(int(reduces), int(row["left"]) if reduces else 0, peer, begun),
                number if last else 0,
                *(buffer, chunk + at, src[0], src[1] + at, dst[0], dst[1] + at, length, fence),
            )
            for at, length, last in self._pieces(row)
        ]
        receives.append((peer, number, pieces))

    def _compute(
        self, row: Any, reduces: bool, other: tuple[int, int], *, src_is_dst: bool = False
    ) -> list[tuple[int, ...]]:
        end = "dst" if src_is_dst else "src"
        src = (int(row[f"{end}_buffer"]), int(row[f"{end}_chunk"])) if reduces else (0, 0)
        dst = (int(row["dst_buffer"]), int(row["dst_chunk"]))
        fence = self._fence(row)
        return [
            (
                *(int(reduces), int(row["left"]), -1, 0, 0),
                *(other[0], other[1] + at, src[0], src[1] + at, dst[0], dst[1] + at, length, fence),
            )
            for at, length, _ in self._pieces(row)
        ]

    def _pieces(self, row: Any) -> list[tuple[int, int, bool]]:
        """(offset, chunks, is it the last) of a row's chunks block by block.

        `flow` has made sure that blocks begin at the same chunks in all spans of a step and of its message.
        """
        parts, chunks, start = self.schedule.parts, int(row["chunks"]), int(row["dst_chunk"])
        pieces, at = [], 0
        while at < chunks:
            length = min(chunks - at, parts - (start + at) % parts)
            pieces.append((at, length, at + length == chunks))
            at += length
        return pieces

    def _interval(self, row: Any, end: str) -> Interval:
        first = self.base[int(row[f"{end}_buffer"])] + int(row[f"{end}_chunk"])
        return first, first + int(row["chunks"])

    def _fence(self, row: Any) -> int:
        first, end = self._interval(row, "dst")
        return int(self.last[first:end].max(initial=0))

    def _exposed(self) -> list[Interval]:
        """Spans of IN that are sent: each chunk once, block by block."""
        schedule = self.schedule
        sent = np.zeros(schedule.chunks(Buffer.IN) + 1, dtype=bool)
        for row in schedule.rows(self.rank):
            if row["kind"] == Kind.SEND and row["src_buffer"] == Buffer.IN:
                sent[row["src_chunk"] : row["src_chunk"] + row["chunks"]] = True
        spans: list[Interval] = []
        for chunk in np.flatnonzero(sent).tolist():
            if spans and sum(spans[-1]) == chunk and chunk % schedule.parts:
                spans[-1] = (spans[-1][0], spans[-1][1] + 1)
            else:
                spans.append((chunk, 1))
        return spans


def _most_reduced(schedule: Schedule) -> int:
    """Chunks that a rank receives to reduce in one round, at most."""
    columns = schedule.columns
    reduced = np.where(columns["kind"] == Kind.RECV_REDUCE, columns["chunks"], 0)
    return int(np.bincount(flow(schedule).node, weights=reduced).max(initial=0))


def _numbers(order: Array, peers: Array, n: int) -> tuple[list[int], Array]:
    """The number, from 1, of each message among those with its peer; how many there are with each rank."""
    numbers = np.zeros(len(order), dtype=np.int64)
    counts = np.zeros(n, dtype=np.intc)
    for index in np.argsort(order).tolist():
        counts[peers[index]] += 1
        numbers[index] = counts[peers[index]]
    return numbers.tolist(), counts

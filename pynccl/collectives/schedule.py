"""A collective as data: for each rank an ordered list of steps, for any number of elements.

Owns the representation: steps, chunk bounds, equality, JSON, the printed table. `builder.py` writes
schedules; `verify.py`, `cost.py`, `trace.py` and the executors read them. Knows nothing of communicators or
arrays of data.

**What a schedule means.** The data of a rank are three buffers, IN, OUT and SCRATCH, cut into *blocks* of
`count` elements (what NCCL calls the count of the call), each cut into `parts` *chunks*: chunk `block * parts
+ i` is the elements from `block * count + i * count // parts` to `block * count + (i + 1) * count // parts`.
So one schedule serves every count, 0 and odd ones too, and what moves from chunk a to chunk b keeps its size
exactly if `a % parts == b % parts`.

The steps of a rank are grouped in *rounds*, numbers that grow along its list. A round is one NCCL group:

1. its SENDs read the state at the start of the round; its RECVs land straight in their place, so none of them
   may land on what the round sends or where another RECV of the round lands;
2. when all its messages have come and gone, RECV_REDUCE, COPY and REDUCE happen, in the order of the list.

The m-th send of a rank to a peer on a channel is received by the peer's m-th receive from that rank on that
channel. Round numbers of different ranks need not agree, though the fast paths of the analyses like it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pynccl.collectives.builder import Spans

__all__ = ["COLLECTIVES", "Buffer", "Collective", "Kind", "Schedule", "Span", "Step", "chunk_bounds"]

Array = NDArray[Any]


class Kind(IntEnum):
    """What a step does. `op` is the reduction; `left` swaps its operands, for those that do not commute."""

    SEND = 0  # src -> peer
    RECV = 1  # peer -> dst
    RECV_REDUCE = 2  # dst = src op message (left: message op src); src is dst itself unless given
    COPY = 3  # dst = src
    REDUCE = 4  # dst = dst op src (left: src op dst)


class Buffer(IntEnum):
    """A buffer of a rank. `OUT[3]` is its chunk 3, `OUT[2:4]` its chunks 2 and 3; see `builder.Spans`."""

    IN = 0  # the send buffer: never written out of place
    OUT = 1  # the receive buffer
    SCRATCH = 2  # the executor's, undefined at the start

    def __getitem__(self, chunks: Any) -> Spans:
        from pynccl.collectives.builder import spans

        return spans(self, chunks)


@dataclasses.dataclass(frozen=True)
class Span:
    """`chunks` consecutive chunks of a buffer, from `chunk` on."""

    buffer: Buffer
    chunk: int
    chunks: int = 1

    def __str__(self) -> str:
        last = f":{self.chunk + self.chunks}" if self.chunks != 1 else ""
        return f"{self.buffer.name.lower()}[{self.chunk}{last}]"


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of one rank. `peer` and `channel` are those of its message, -1 and 0 if it has none."""

    kind: Kind
    round: int
    peer: int = -1
    src: Span | None = None
    dst: Span | None = None
    channel: int = 0
    left: bool = False

    def __str__(self) -> str:
        return _WORDS[self.kind].format(
            src=self.src if self.src is not None else self.dst,
            dst=self.dst,
            peer=self.peer,
            channel=f" on channel {self.channel}" if self.channel else "",
            left=" (message first)" if self.left else "",
        )


_WORDS = {
    Kind.SEND: "send {src} to {peer}{channel}",
    Kind.RECV: "receive {dst} from {peer}{channel}",
    Kind.RECV_REDUCE: "receive from {peer}{channel}, reduce with {src} into {dst}{left}",
    Kind.COPY: "copy {src} to {dst}",
    Kind.REDUCE: "reduce {src} into {dst}{left}",
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """What a collective is about: how many blocks go in and out, who has them, and how in place is said.

    `in_blocks` and `out_blocks` are of one rank ("n": one block for each rank). `reduces`: an output chunk is
    the reduction of all ranks' chunks, not a copy of one. `only_root`: the buffer that exists on the root
    alone. `in_place`: which block of IN is which block of OUT in NCCL's in-place form, with r the rank; None:
    no such form.
    """

    in_blocks: int | str
    out_blocks: int | str
    reduces: bool
    only_root: Buffer | None = None
    in_place: tuple[str | int, str | int] | None = (0, 0)

    def blocks(self, buffer: Buffer, n: int) -> int:
        """Blocks of IN or OUT of one rank, with `n` ranks."""
        blocks = self.in_blocks if buffer == Buffer.IN else self.out_blocks
        return n if blocks == "n" else int(blocks)


COLLECTIVES: dict[str, Collective] = {
    "all_reduce": Collective(1, 1, reduces=True),
    "reduce_scatter": Collective("n", 1, reduces=True, in_place=("r", 0)),
    "all_gather": Collective(1, "n", reduces=False, in_place=(0, "r")),
    "broadcast": Collective(1, 1, reduces=False, only_root=Buffer.IN),
    "reduce": Collective(1, 1, reduces=True, only_root=Buffer.OUT),
    "all_to_all": Collective("n", "n", reduces=False, in_place=None),
}

# One row a step, all ranks' steps one after the other. A buffer of -1 means that there is no such span; src
# and dst have the same number of chunks.
COLUMNS = np.dtype(
    [
        ("kind", np.int8),
        ("left", np.bool_),
        ("src_buffer", np.int8),
        ("dst_buffer", np.int8),
        ("channel", np.int32),
        ("round", np.int32),
        ("peer", np.int32),
        ("src_chunk", np.int32),
        ("dst_chunk", np.int32),
        ("chunks", np.int32),
    ]
)


def chunk_bounds(chunk: Any, count: int, parts: int) -> tuple[Any, Any]:
    """First element and the one after the last of a chunk (an int or an array of them) of a buffer."""
    block, part = chunk // parts, chunk % parts
    base = block * count
    return base + part * count // parts, base + (part + 1) * count // parts


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """A collective of `n` ranks as data. Made by a generator with `Builder`, or by `Schedule.from_steps`.

    `columns` has a row for each step (dtype `COLUMNS`), `first[r]:first[r + 1]` are rank r's.
    `scratch_chunks` is the length of SCRATCH in chunks. `deterministic` claims that all ranks reduce each
    chunk in the same way, up to swapping the operands of the reduction, so that they end with the same bits;
    `in_place` claims that the schedule is right also when IN and OUT overlap as NCCL allows. `verify` holds
    the schedule to both claims. `params` are the generator's own.
    """

    name: str
    collective: str
    n: int
    parts: int
    columns: Array
    first: Array
    root: int = 0
    scratch_chunks: int = 0
    deterministic: bool = True
    in_place: bool = True
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            raise ValueError(
                f"schedule: no collective {self.collective!r}; there are {', '.join(COLLECTIVES)}"
            )
        if self.n < 1 or self.parts < 1:
            raise ValueError(f"schedule: {self.n} ranks and {self.parts} parts; both must be 1 or more")
        if not 0 <= self.root < self.n:
            raise ValueError(
                f"schedule: root {self.root} is not one of {self.n} ranks; take 0 to {self.n - 1}"
            )
        if len(self.first) != self.n + 1 or self.first[0] != 0 or self.first[-1] != len(self.columns):
            raise ValueError(f"schedule: {len(self.first) - 1} ranks' steps were given for {self.n} ranks")
        if self.scratch_chunks < 0:
            raise ValueError(f"schedule: {self.scratch_chunks} scratch chunks; take 0 or more")
        for array in (self.columns, self.first):
            array.flags.writeable = False

    # What a schedule has

    @property
    def in_blocks(self) -> int:
        """Blocks of `count` elements in IN of one rank."""
        return COLLECTIVES[self.collective].blocks(Buffer.IN, self.n)

    @property
    def out_blocks(self) -> int:
        """Blocks of `count` elements in OUT of one rank."""
        return COLLECTIVES[self.collective].blocks(Buffer.OUT, self.n)

    def chunks(self, buffer: Buffer) -> int:
        """Length of a buffer of one rank in chunks."""
        return (self.in_blocks * self.parts, self.out_blocks * self.parts, self.scratch_chunks)[buffer]

    def has(self, buffer: Buffer, rank: int) -> bool:
        """Whether a rank has a buffer at all: a broadcast has IN, and a reduce OUT, on the root alone."""
        return COLLECTIVES[self.collective].only_root != buffer or rank == self.root

    def bounds(self, chunk: int, count: int) -> tuple[int, int]:
        """First element, and the one after the last, of a chunk when a block has `count` elements."""
        return chunk_bounds(chunk, count, self.parts)

    def span_bounds(self, span: Span, count: int) -> tuple[int, int]:
        """First element, and the one after the last, of a span when a block has `count` elements."""
        first, _ = chunk_bounds(span.chunk, count, self.parts)
        _, end = chunk_bounds(span.chunk + max(span.chunks, 1) - 1, count, self.parts)
        return first, end

    @property
    def most_rounds(self) -> int:
        """Rounds of the rank that has most; fewer than those that wait for each other if ranks take turns."""
        if not len(self.columns):
            return 0
        rounds = self.columns["round"]
        begins = np.ones(len(rounds), dtype=bool)
        begins[1:] = (rounds[1:] != rounds[:-1]) | (self.ranks[1:] != self.ranks[:-1])
        return int(np.bincount(self.ranks[begins]).max())

    def rows(self, rank: int) -> Array:
        """The rows of a rank's steps, dtype `COLUMNS`."""
        return self.columns[self.first[rank] : self.first[rank + 1]]

    def elements_sent(self, rank: int, count: int) -> int:
        """Elements that a rank sends when a block has `count` elements."""
        rows = self.rows(rank)
        sends = rows[(rows["kind"] == Kind.SEND) & (rows["chunks"] > 0)]
        first, _ = chunk_bounds(sends["src_chunk"].astype(np.int64), count, self.parts)
        _, end = chunk_bounds(sends["src_chunk"].astype(np.int64) + sends["chunks"] - 1, count, self.parts)
        return int((end - first).sum())

    @cached_property
    def ranks(self) -> Array:
        """The rank of each row, int32."""
        return np.repeat(np.arange(self.n, dtype=np.int32), np.diff(self.first))

    # Steps

    def __len__(self) -> int:
        """Number of steps of all ranks."""
        return len(self.columns)

    def steps(self, rank: int) -> list[Step]:
        """The steps of a rank, made anew from the columns."""
        return [_step(row) for row in self.rows(rank).tolist()]

    def step(self, rank: int, index: int) -> Step:
        """Step `index` of a rank."""
        return _step(self.rows(rank)[index].tolist())

    def __iter__(self) -> Iterator[list[Step]]:
        """The ranks' lists of steps."""
        return (self.steps(rank) for rank in range(self.n))

    @classmethod
    def from_steps(
        cls, name: str, collective: str, steps: Sequence[Sequence[Step]], **fields: Any
    ) -> Schedule:
        """A schedule from each rank's list of steps. `fields`: parts, root, scratch_chunks and so on."""
        columns = np.array([_row(step) for of_rank in steps for step in of_rank], dtype=COLUMNS)
        first = np.concatenate([[0], np.cumsum([len(of_rank) for of_rank in steps], dtype=np.int64)])
        return cls(name, collective, len(steps), fields.pop("parts", 1), columns, first, **fields)

    def replace(self, **fields: Any) -> Schedule:
        """The same schedule with other fields."""
        return dataclasses.replace(self, **fields)

    # Use

    def run(self, comm: Any, x: Any, out: Any = None, op: Any = "sum", **options: Any) -> Any:
        """Run it on a communicator: `pynccl.collectives.run`."""
        from pynccl.collectives.execute import run

        return run(self, comm, x, out, op, **options)

    # Equality, JSON, text

    @cached_property
    def digest(self) -> str:
        """A fingerprint of everything the schedule says, name and parameters included: 32 hex digits."""
        hashed = hashlib.blake2b(json.dumps(self._head(), sort_keys=True).encode(), digest_size=16)
        hashed.update(np.ascontiguousarray(self.first, dtype=np.int64).tobytes())
        hashed.update(np.ascontiguousarray(self.columns).tobytes())
        return hashed.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __getstate__(self) -> dict[str, Any]:
        # What is kept with a schedule once it has been analysed or run stays behind when it is pickled.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _head(self) -> dict[str, Any]:
        names = ("name", "collective", "n", "parts", "root", "scratch_chunks", "deterministic", "in_place")
        return {**{name: getattr(self, name) for name in names}, "params": dict(self.params)}

    def to_json(self) -> str:
        """JSON that `from_json` reads back to an equal schedule."""
        assert COLUMNS.names is not None
        steps = {name: self.columns[name].astype(int).tolist() for name in COLUMNS.names}
        return json.dumps({**self._head(), "first": self.first.tolist(), "steps": steps})

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """The schedule that `to_json` wrote; ValueError if the text is something else."""
        assert COLUMNS.names is not None
        try:
            fields = json.loads(text)
            steps = fields.pop("steps")
            columns = np.empty(len(steps["kind"]), dtype=COLUMNS)
            for name in COLUMNS.names:
                columns[name] = steps[name]
            return cls(columns=columns, first=np.asarray(fields.pop("first"), dtype=np.int64), **fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"schedule: this is not the JSON of a schedule: {error!r}") from error

    def __repr__(self) -> str:
        return (
            f"<Schedule {self.name} {self.collective}: {self.n} ranks, {self.parts} parts, {len(self)} steps>"
        )

    def table(self, ranks: Sequence[int] | None = None) -> str:
        """The steps of `ranks` (None: all) as text, a line a step."""
        lines = [f"{'rank':>4} {'step':>4} {'round':>5}  what"]
        for rank in range(self.n) if ranks is None else ranks:
            for index, step in enumerate(self.steps(rank)):
                lines.append(f"{rank:>4} {index:>4} {step.round:>5}  {step}")
        return "\n".join(lines)


def _step(row: tuple[Any, ...]) -> Step:
    kind, left, src_buffer, dst_buffer, channel, round_, peer, src_chunk, dst_chunk, chunks = row
    src = None if src_buffer < 0 else Span(Buffer(src_buffer), src_chunk, chunks)
    dst = None if dst_buffer < 0 else Span(Buffer(dst_buffer), dst_chunk, chunks)
    return Step(Kind(kind), round_, peer, src, dst, channel, left)


def _row(step: Step) -> tuple[Any, ...]:
    spans = [span for span in (step.src, step.dst) if span is not None]
    if len({span.chunks for span in spans}) > 1:
        raise ValueError(f"schedule: {step}: {step.src} and {step.dst} have different numbers of chunks")
    src = step.src
    if src is None and step.kind == Kind.RECV_REDUCE:
        src = step.dst
    src_buffer, src_chunk = (-1, 0) if src is None else (int(src.buffer), src.chunk)
    dst_buffer, dst_chunk = (-1, 0) if step.dst is None else (int(step.dst.buffer), step.dst.chunk)
    chunks = spans[0].chunks if spans else 0
    return (
        int(step.kind),
        step.left,
        src_buffer,
        dst_buffer,
        step.channel,
        step.round,
        step.peer,
        src_chunk,
        dst_chunk,
        chunks,
    )

"""A collective as data: for each rank an ordered list of steps, for any number of elements.

Owns the representation: rows of steps, equality, JSON, the printed table. Its words are in `terms.py`, what
its fields may be in `form.py`. `builder.py` writes schedules; `verify.py`, `cost.py`, `trace.py` and the
executors read them. Knows nothing of communicators or arrays of data.

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
from functools import cached_property
from typing import Any

import numpy as np

from pynccl.collectives.form import HEAD, check_columns, check_head, make_columns, read_json, said
from pynccl.collectives.terms import (
    COLLECTIVES,
    COLUMNS,
    Array,
    Buffer,
    Collective,
    Kind,
    Span,
    Step,
    chunk_bounds,
)

__all__ = [
    "COLLECTIVES",
    "COLUMNS",
    "Array",
    "Buffer",
    "Collective",
    "Kind",
    "Schedule",
    "Span",
    "Step",
    "check_is_schedule",
    "chunk_bounds",
]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """A collective of `n` ranks as data. Made by a generator with `Builder`, or by `Schedule.from_steps`.

    `columns` has a row for each step (dtype `COLUMNS`), `first[r]:first[r + 1]` are rank r's.
    `scratch_chunks` is the length of SCRATCH in chunks. `deterministic` claims that all ranks reduce each
    chunk in the same way, up to swapping the operands of the reduction, so that they end with the same bits;
    `in_place` claims that the schedule is right also when IN and OUT overlap as NCCL allows. `verify` holds
    the schedule to both claims. `params` are the generator's own, and such as JSON can say.

    ValueError for a field of another type or out of range. There are 65536 ranks at most, and the buffers of
    a rank have 2**26 chunks (`form.MOST_CHUNKS`).
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
        fields: dict[str, Any] = check_head("schedule", {name: getattr(self, name) for name in HEAD})
        fields["first"] = check_columns("schedule", self.columns, self.first, fields["n"])
        for name, value in fields.items():
            object.__setattr__(self, name, value)
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
        rows = [_row(rank, i, step) for rank, own in enumerate(steps) for i, step in enumerate(own)]
        first = np.concatenate([[0], np.cumsum([len(own) for own in steps], dtype=np.int64)]).astype(np.int64)
        columns = make_columns(_columns(rows), lambda name, row: f"schedule: {_place(first, row)}: {name}")
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
        return {name: getattr(self, name) for name in HEAD}

    def to_json(self) -> str:
        """JSON that `from_json` reads back to an equal schedule."""
        assert COLUMNS.names is not None
        steps = {name: self.columns[name].astype(int).tolist() for name in COLUMNS.names}
        return json.dumps({**self._head(), "first": self.first.tolist(), "steps": steps})

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """The schedule that `to_json` wrote; ValueError if the text is something else, see `form.py`."""
        return cls(**read_json(text))

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


def check_is_schedule(call: str, given: Any) -> None:
    """A TypeError, with what to do, for what is given instead of a schedule: its name, or its builder."""
    if isinstance(given, Schedule):
        return
    if isinstance(given, str):
        remedy = f"take generate({said(given)}, n), or Schedule.from_json of a file's text"
    elif hasattr(given, "build"):
        remedy = "take what its build() returns"
    elif callable(given):
        remedy = f"call it: {getattr(given, '__name__', 'f')}(n)"
    else:
        remedy = "take a Schedule"
    raise TypeError(f"{call}: {said(given)} of type {type(given).__name__} is no schedule; {remedy}")


def _step(row: tuple[Any, ...]) -> Step:
    kind, left, src_buffer, dst_buffer, channel, round_, peer, src_chunk, dst_chunk, chunks = row
    src = None if src_buffer < 0 else Span(Buffer(src_buffer), src_chunk, chunks)
    dst = None if dst_buffer < 0 else Span(Buffer(dst_buffer), dst_chunk, chunks)
    return Step(Kind(kind), round_, peer, src, dst, channel, left)


def _row(rank: int, index: int, step: Step) -> tuple[Any, ...]:
    if not isinstance(step, Step):
        raise ValueError(f"schedule: rank {rank}, step {index} is {step!r}; take a Step")
    src, dst = step.src, step.dst
    if src is not None and dst is not None and src.chunks != dst.chunks:
        raise ValueError(
            f"schedule: rank {rank}, step {index}: src={src!r} and dst={dst!r} have different numbers of "
            "chunks; take spans of equal lengths"
        )
    chunks = next((span.chunks for span in (src, dst) if span is not None), 0)
    if src is None and step.kind == Kind.RECV_REDUCE:
        src = dst
    src_buffer, src_chunk = (-1, 0) if src is None else (src.buffer, src.chunk)
    dst_buffer, dst_chunk = (-1, 0) if dst is None else (dst.buffer, dst.chunk)
    return (
        step.kind,
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


def _columns(rows: list[tuple[Any, ...]]) -> dict[str, Sequence[Any]]:
    assert COLUMNS.names is not None
    columns = list(zip(*rows, strict=True)) or [()] * len(COLUMNS.names)
    return dict(zip(COLUMNS.names, columns, strict=True))


def _place(first: Array, row: int) -> str:
    rank = int(np.searchsorted(first, row, side="right")) - 1
    return f"rank {rank}, step {row - first[rank]}"

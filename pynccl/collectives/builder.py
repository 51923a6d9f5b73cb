"""What makes writing a generator pleasant: emit steps for all ranks at once, in any order, and build.

    b = Builder("ring", "all_gather", n)
    r = b.ranks  # 0..n-1: every line speaks of all ranks at once, with NumPy arithmetic on rank numbers
    b.copy(r, IN[0], OUT[r])
    for s in b.rounds(n - 1):
        b.move(r, (r + 1) % n, OUT[(r - s) % n], OUT[(r - s) % n])
    return b.build()

Ranks, peers, chunks and rounds are integers or arrays of them, which broadcast; a 33-rank schedule written
with integers in plain loops is as good. Owns nothing of a schedule's meaning: see `schedule.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from pynccl.collectives.schedule import COLUMNS, Array, Buffer, Kind, Schedule
from pynccl.collectives.sorting import stable_order

__all__ = ["Builder", "Spans", "choose", "spans"]

IN, OUT, SCRATCH = Buffer.IN, Buffer.OUT, Buffer.SCRATCH


@dataclasses.dataclass(frozen=True)
class Spans:
    """A place in each of many ranks: buffer, first chunk, number of chunks; integers or arrays that
    broadcast.
    """

    buffer: Any
    chunk: Any
    chunks: Any = 1


def spans(buffer: Buffer, index: Any) -> Spans:
    """What `buffer[index]` means: a chunk, or from:to (step 1) for consecutive chunks."""
    if not isinstance(index, slice):
        return Spans(buffer, index)
    if index.step is not None or index.start is None or index.stop is None:
        raise ValueError(f"{buffer.name}[...]: a span is from:to, with both ends and no step")
    return Spans(buffer, index.start, np.subtract(index.stop, index.start))


def choose(condition: Any, yes: Spans, no: Spans) -> Spans:
    """`yes` where the condition (a boolean, or an array over ranks) holds, `no` elsewhere."""
    return Spans(
        *(np.where(condition, getattr(yes, f), getattr(no, f)) for f in ("buffer", "chunk", "chunks"))
    )


class Builder:
    """Gathers the steps of a schedule. Steps go to the current round unless `round=` says another.

    `rounds(k)` and `next_round()` move the current round on. Within a rank's round, steps keep the order in
    which they were added. SCRATCH grows to what is used.
    """

    def __init__(
        self, name: str, collective: str, n: int, *, parts: int = 1, root: int = 0, **fields: Any
    ) -> None:
        """`fields`: deterministic, in_place, params of the `Schedule`."""
        self.n = n
        self.ranks: Array = np.arange(n)
        self.round = 0
        self._head = {"name": name, "collective": collective, "n": n, "parts": parts, "root": root, **fields}
        self._last = -1  # the last round that has steps
        self._rank_of: list[Array] = []
        self._rows: list[Array] = []

    def next_round(self) -> int:
        """Begin a round behind all so far (if the current one has steps) and return its number."""
        if self._last >= self.round:
            self.round = self._last + 1
        return self.round

    def rounds(self, count: int) -> Iterator[int]:
        """Count 0, 1, ... `count` - 1, each in a round of its own, and leave the current round behind the
        last.
        """
        for index in range(count):
            self.next_round()
            yield index
        if count > 0:
            self.next_round()

    def move(
        self,
        source: Any,
        target: Any,
        src: Spans,
        dst: Spans,
        *,
        reduce: bool | Spans = False,
        left: Any = False,
        channel: Any = 0,
        round: Any = None,
    ) -> None:
        """Rank `source` sends its `src` to rank `target`, which puts it in its `dst`, both in the same round.

        `reduce=True`: dst = dst op message; `reduce=span`: dst = span op message, with the span the target's
        own.
        """
        self.send(source, target, src, channel=channel, round=round)
        self.recv(target, source, dst, reduce=reduce, left=left, channel=channel, round=round)

    def send(self, rank: Any, peer: Any, src: Spans, *, channel: Any = 0, round: Any = None) -> None:
        """Send `src` to `peer`."""
        self._add(Kind.SEND, rank, peer, src, None, channel=channel, round=round)

    def recv(
        self,
        rank: Any,
        peer: Any,
        dst: Spans,
        *,
        reduce: bool | Spans = False,
        left: Any = False,
        channel: Any = 0,
        round: Any = None,
    ) -> None:
        """Receive from `peer` into `dst`; `reduce` as in `move`; `left`: the message is the left operand."""
        if reduce is False:
            self._add(Kind.RECV, rank, peer, None, dst, channel=channel, round=round)
        else:
            src = dst if reduce is True else reduce
            self._add(Kind.RECV_REDUCE, rank, peer, src, dst, left=left, channel=channel, round=round)

    def copy(self, rank: Any, src: Spans, dst: Spans, *, round: Any = None) -> None:
        """dst = src, after the round's messages."""
        self._add(Kind.COPY, rank, -1, src, dst, round=round)

    def reduce(self, rank: Any, src: Spans, dst: Spans, *, left: Any = False, round: Any = None) -> None:
        """dst = dst op src (`left`: src op dst), after the round's messages."""
        self._add(Kind.REDUCE, rank, -1, src, dst, left=left, round=round)

    def _add(
        self,
        kind: Kind,
        rank: Any,
        peer: Any,
        src: Spans | None,
        dst: Spans | None,
        *,
        left: Any = False,
        channel: Any = 0,
        round: Any = None,
    ) -> None:
        some = dst if src is None else src
        assert some is not None
        values: dict[str, Any] = {
            "kind": int(kind),
            "left": left,
            "channel": channel,
            "round": self.round if round is None else round,
            "peer": peer,
            "chunks": some.chunks,
            "src_buffer": -1 if src is None else src.buffer,
            "src_chunk": 0 if src is None else src.chunk,
            "dst_buffer": -1 if dst is None else dst.buffer,
            "dst_chunk": 0 if dst is None else dst.chunk,
        }
        shape = np.broadcast_shapes(np.shape(rank), *(np.shape(value) for value in values.values()))
        rows = np.empty(shape, dtype=COLUMNS)
        for name, value in values.items():
            rows[name] = value
        self._last = max(self._last, int(np.max(values["round"])) if rows.size else -1)
        self._rows.append(rows.reshape(-1))
        self._rank_of.append(np.broadcast_to(np.asarray(rank, dtype=np.int64), shape).reshape(-1))

    def build(self) -> Schedule:
        """The schedule: each rank's steps, by round and then in the order in which they were added."""
        rows = np.concatenate(self._rows) if self._rows else np.empty(0, dtype=COLUMNS)
        rank_of = np.concatenate(self._rank_of) if self._rank_of else np.empty(0, dtype=np.int64)
        if len(rank_of) and not (0 <= rank_of.min() and rank_of.max() < self.n):
            raise ValueError(f"{self._head['name']}: a step of a rank that is not one of {self.n}")
        order = stable_order(rank_of, rows["round"])
        first = np.concatenate([[0], np.cumsum(np.bincount(rank_of, minlength=self.n))]).astype(np.int64)
        whole = np.dtype((np.void, COLUMNS.itemsize))  # 15 times faster to gather than fields
        columns = rows.view(whole)[order].view(COLUMNS)
        return Schedule(columns=columns, first=first, scratch_chunks=_scratch(rows), **self._head)


def _scratch(rows: Array) -> int:
    ends = [
        int((rows[f"{end}_chunk"] + rows["chunks"])[rows[f"{end}_buffer"] == SCRATCH].max(initial=0))
        for end in ("src", "dst")
    ]
    return max(ends)

"""What makes writing a generator pleasant: emit steps for all ranks at once, in any order, and build.

    b = Builder("ring", "all_gather", n)
    r = b.ranks  # 0..n-1: every line speaks of all ranks at once, with NumPy arithmetic on rank numbers
    b.copy(r, IN[0], OUT[r])
    for s in b.rounds(n - 1):
        b.move(r, (r + 1) % n, OUT[(r - s) % n], OUT[(r - s) % n])
    return b.build()

Ranks, peers, chunks and rounds are integers or arrays of them, which broadcast; a 33-rank schedule written
with integers in plain loops is as good. What is neither is a ValueError where it is given. Owns nothing of a
schedule's meaning: see `schedule.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from pynccl.collectives.form import check_head, is_whole, said
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
    try:
        if not isinstance(index, slice):
            return Spans(buffer, _whole(index))
        if index.step is not None or index.start is None or index.stop is None:
            raise ValueError("is no span; a span is from:to, with both ends and no step")
        start, stop = _whole(index.start), _whole(index.stop)
        return Spans(buffer, start, stop - start)
    except ValueError as error:
        raise ValueError(f"{buffer.name}[...] {error}") from None


def choose(condition: Any, yes: Spans, no: Spans) -> Spans:
    """`yes` where the condition (a boolean, or an array over ranks) holds, `no` elsewhere."""
    _check_span("choose: yes", yes)
    _check_span("choose: no", no)
    return Spans(*(np.where(condition, getattr(yes, field), getattr(no, field)) for field in _SPAN))


_LIMITS = np.iinfo(np.int32)  # of the columns


def _whole(value: Any) -> Any:
    """The value, if it is a whole number that fits a column; an array, if it is an array or list of them."""
    if isinstance(value, int) and is_whole(type(value)):
        low = high = int(value)
    else:
        given, value = value, np.asarray(value)
        if not value.size and value.dtype.kind == "f":  # an empty list
            return value.astype(np.int64)
        # Of a tuple not: OUT[0, 1] looks like two chunks, and would be one of each of two ranks.
        if value.dtype.kind not in "iu" or isinstance(given, tuple):
            raise ValueError(f"is {said(given)}; take a whole number, or an array of them")
        if not value.size:
            return value
        low, high = np.minimum.reduce(value, None), np.maximum.reduce(value, None)
    if low < _LIMITS.min or high > _LIMITS.max:
        raise ValueError(f"is {said(value)}; take numbers from {_LIMITS.min} to {_LIMITS.max}")
    return value


def _flags(value: Any) -> Any:
    """The value, if it is a truth value; an array, if it is an array or list of them."""
    if isinstance(value, bool):
        return value
    given, value = value, np.asarray(value)
    if value.size and value.dtype.kind != "b":
        raise ValueError(f"is {said(given)}; take True or False, or an array of them")
    return value.astype(bool)


def _check_span(what: str, given: Any) -> None:
    if isinstance(given, Buffer):
        name = given.name
        raise ValueError(f"{what} is {name}; write {name}[0] for its first chunk, {name}[0:2] for two")
    if not isinstance(given, Spans):
        raise ValueError(f"{what} is {said(given)}; take a span such as OUT[0] or SCRATCH[0:2]")


def _check_lengths(what: str, src: Any, dst: Any) -> None:
    """ValueError unless two spans, or arrays of spans, are as long as each other."""
    if isinstance(src, int) and isinstance(dst, int):
        differ = src != dst
    else:
        differ = bool((np.asarray(src) != np.asarray(dst)).any())
    if differ:
        raise ValueError(
            f"{what}: src has {said(src)} chunks and dst {said(dst)}; take spans of equal lengths"
        )


class Builder:
    """Gathers the steps of a schedule. Steps go to the current round unless `round=` says another.

    `rounds(k)` and `next_round()` move the current round on. Within a rank's round, steps keep the order in
    which they were added. SCRATCH grows to what is used.
    """

    def __init__(
        self, name: str, collective: str, n: int, *, parts: int = 1, root: int = 0, **fields: Any
    ) -> None:
        """`parts`: chunks in a block. `root`: of a broadcast or reduce. `fields`: deterministic, in_place and
        params of the `Schedule`. ValueError for what that refuses.
        """
        if "scratch_chunks" in fields:
            raise ValueError("Builder: leave out scratch_chunks; SCRATCH grows to what is used")
        head = {"name": name, "collective": collective, "n": n, "parts": parts, "root": root, **fields}
        self._head = check_head(f"Builder({said(name)})", head)
        self.n: int = self._head["n"]
        self.ranks: Array = np.arange(self.n)
        self.round = 0
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
        own; `left`: message op that. `channel`: the m-th send to a peer on a channel meets its m-th receive
        on it. `round`: another round than the current one. The ends of a message in different rounds are
        written as `send` and `recv`.
        """
        for what, given in (("src", src), ("dst", dst)):
            _check_span(f"{self._head['name']}: move: {what}", given)
        _check_lengths(f"{self._head['name']}: move", src.chunks, dst.chunks)
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
        """Receive from `peer` into `dst`; `reduce`, `left` and `channel` as in `move`."""
        if reduce is False:
            self._add(Kind.RECV, rank, peer, None, dst, channel=channel, round=round)
        else:
            src = dst if reduce is True else reduce
            _check_span(f"{self._head['name']}: recv: reduce", src)
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
        values: dict[str, Any] = {
            "rank": rank,
            "left": left,
            "channel": channel,
            "round": self.round if round is None else round,
            "peer": peer,
            "src_buffer": -1,
            "src_chunk": 0,
            "dst_buffer": -1,
            "dst_chunk": 0,
        }
        call = f"{self._head['name']}: {_CALLS[kind]}"
        for end, span in (("src", src), ("dst", dst)):
            if kind != {"src": Kind.RECV, "dst": Kind.SEND}[end]:
                _check_span(f"{call}: {end}", span)
                values.update({f"{end}_{field}": getattr(span, field) for field in _SPAN})
        for name, value in values.items():
            try:
                values[name] = (_flags if name == "left" else _whole)(value)
            except ValueError as error:
                raise ValueError(f"{call}: {name} {error}") from None
        for name in ("rank", "peer") if kind in _MESSAGES else ("rank",):
            _check_ranks(f"{call}: {name}", values[name], self.n)
        shape = _shape(call, values)
        lengths = [values.pop(f"{end}_chunks") for end in ("src", "dst") if f"{end}_chunks" in values]
        _check_lengths(call, lengths[0], lengths[-1])
        rows = np.empty(shape, dtype=COLUMNS)
        rows["kind"], rows["chunks"] = kind, lengths[0]
        rank = values.pop("rank")
        for name, value in values.items():
            rows[name] = value
        self._last = max(self._last, int(np.max(values["round"])) if rows.size else -1)
        self._rows.append(rows.reshape(-1))
        self._rank_of.append(np.broadcast_to(np.asarray(rank, dtype=np.int64), shape).reshape(-1))

    def build(self) -> Schedule:
        """The schedule: each rank's steps, by round and then in the order in which they were added."""
        rows = np.concatenate(self._rows) if self._rows else np.empty(0, dtype=COLUMNS)
        rank_of = np.concatenate(self._rank_of) if self._rank_of else np.empty(0, dtype=np.int64)
        order = stable_order(rank_of, rows["round"])
        first = np.concatenate([[0], np.cumsum(np.bincount(rank_of, minlength=self.n))]).astype(np.int64)
        whole = np.dtype((np.void, COLUMNS.itemsize))  # 15 times faster to gather than fields
        columns = rows.view(whole)[order].view(COLUMNS)
        return Schedule(columns=columns, first=first, scratch_chunks=_scratch(rows), **self._head)


_SPAN = ("buffer", "chunk", "chunks")
_CALLS = {
    Kind.SEND: "send",
    Kind.RECV: "recv",
    Kind.RECV_REDUCE: "recv",
    Kind.COPY: "copy",
    Kind.REDUCE: "reduce",
}


_MESSAGES = (Kind.SEND, Kind.RECV, Kind.RECV_REDUCE)


def _check_ranks(call: str, value: Any, n: int) -> None:
    """ValueError unless all are ranks."""
    lowest, highest = (
        (value, value) if isinstance(value, int) else (value.min(initial=0), value.max(initial=0))
    )
    if not 0 <= lowest <= highest < n:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"{call} is {wrong}; ranks are 0 to {n - 1} (a neighbour is (rank + 1) % n)")


def _shape(call: str, values: dict[str, Any]) -> tuple[int, ...]:
    """The shape of all values together; ValueError if they do not broadcast."""
    shapes = {name: value.shape for name, value in values.items() if isinstance(value, np.ndarray)}
    distinct = set(shapes.values())
    if len(distinct) <= 1:
        return distinct.pop() if distinct else ()
    try:
        return np.broadcast_shapes(*distinct)
    except ValueError:
        said_ = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(
            f"{call}: arrays of different lengths: {said_}; take one value for each rank"
        ) from None


def _scratch(rows: Array) -> int:
    ends = [
        int(
            (rows[f"{end}_chunk"].astype(np.int64) + rows["chunks"])[rows[f"{end}_buffer"] == SCRATCH].max(
                initial=0
            )
        )
        for end in ("src", "dst")
    ]
    return max(ends)

"""One rank's part of a schedule, round by round, as the executors need it: pure functions of the schedule.

Which messages a rank sends and receives, and the order in which a connection without channels must see them;
then the rounds, as plain lists, each made once and kept with the schedule. Knows no communicators and no
arrays of data.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pynccl.collectives.flow import flow
from pynccl.collectives.schedule import Array, Kind, Schedule

__all__ = ["Messages", "Round", "messages", "rounds"]


@dataclasses.dataclass(frozen=True, eq=False)
class Messages:
    """The messages of one rank, an element each: rows of its own end, and of the other one.

    ``order`` sorts the messages between two ranks alike at both ends: by the sender's round, the receiver's,
    and the channel. A connection that knows no channels must see them in this order, and it is one in which
    they can pass whenever the schedule cannot stop at rendezvous.
    """

    own: Array
    other: Array
    order: Array


def messages(schedule: Schedule, rank: int) -> tuple[Messages, Messages]:
    """What a rank sends, and what it receives."""
    graph, columns, ranks = flow(schedule), schedule.columns, schedule.ranks
    both = []
    for own, other in ((graph.sends, graph.recvs), (graph.recvs, graph.sends)):
        of_rank = np.flatnonzero(ranks[own] == rank)
        mine, theirs = own[of_rank], other[of_rank]
        sends, recvs = graph.sends[of_rank], graph.recvs[of_rank]
        keys = (recvs, columns["channel"][sends], columns["round"][recvs], columns["round"][sends])
        order = np.empty(len(mine), dtype=np.int64)
        order[np.lexsort(keys)] = np.arange(len(mine))
        both.append(Messages(mine, theirs, order))
    return both[0], both[1]


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of a rank: spans as (buffer, chunk, chunks); ``message``: which of the received ones."""

    sends: list[tuple[int, int, int, int]]  # peer, buffer, chunk, chunks
    recvs: list[tuple[int, int, int, int]]  # the same; a buffer of -1: lands apart, to be reduced
    local: list[tuple[int, bool, tuple[int, int], tuple[int, int], int, int]]
    # kind, left, (src buffer, chunk), (dst buffer, chunk), chunks, index of the message in recvs or -1


def rounds(schedule: Schedule, rank: int) -> list[Round]:
    """The rounds of a rank, in order."""
    kept = vars(schedule).setdefault("_rounds", {})
    if rank not in kept:
        kept[rank] = _make_rounds(schedule, rank)
    return kept[rank]


def _make_rounds(schedule: Schedule, rank: int) -> list[Round]:
    first = int(schedule.first[rank])
    order: dict[int, int] = {}
    for ends in messages(schedule, rank):
        order.update(zip((ends.own - first).tolist(), ends.order.tolist(), strict=True))
    made: list[Round] = []
    last: int | None = None
    by_round: list[list[tuple[int, Any]]] = []
    for index, row in enumerate(schedule.rows(rank)):
        if last is None or row["round"] != last:
            by_round.append([])
            last = row["round"]
        by_round[-1].append((index, row))
    for rows in by_round:
        one = Round([], [], [])
        in_order = sorted((pair for pair in rows if pair[0] in order), key=lambda pair: order[pair[0]])
        where: dict[int, int] = {}
        for index, row in in_order:
            peer, chunks = int(row["peer"]), int(row["chunks"])
            if row["kind"] == Kind.SEND:
                one.sends.append((peer, int(row["src_buffer"]), int(row["src_chunk"]), chunks))
            else:
                where[index] = len(one.recvs)
                lands = int(row["dst_buffer"]) if row["kind"] == Kind.RECV else -1
                one.recvs.append((peer, lands, int(row["dst_chunk"]), chunks))
        for index, row in rows:
            kind = int(row["kind"])
            if kind in (Kind.SEND, Kind.RECV):
                continue
            src, dst = (row["src_buffer"], row["src_chunk"]), (row["dst_buffer"], row["dst_chunk"])
            one.local.append(
                (
                    kind,
                    bool(row["left"]),
                    (int(src[0]), int(src[1])),
                    (int(dst[0]), int(dst[1])),
                    int(row["chunks"]),
                    where.get(index, -1),
                )
            )
        made.append(one)
    return made

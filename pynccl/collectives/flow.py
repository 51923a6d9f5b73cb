"""Who waits for whom in a schedule: messages matched, rounds as nodes of a graph, an order to go through
them.

A *node* is one round of one rank. It starts when the rank's node before it has finished, and finishes when
its messages have come and gone. Owns the matching of sends and receives, and deadlock; knows nothing of
values. All is NumPy over all ranks at once: a ring of 1024 ranks has 4 million steps.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from pynccl.collectives.fault import Fault
from pynccl.collectives.schedule import Array, Kind, Schedule
from pynccl.collectives.sorting import stable_order
from pynccl.collectives.steps import check_steps

__all__ = ["Flow", "flow", "is_live", "match", "play"]


@dataclasses.dataclass(frozen=True, eq=False)
class Flow:
    """The graph of a schedule whose messages match.

    `node[row]`: the node of a row; `node_rank[node]` its rank. `sends[m]`, `recvs[m]`: the rows of message m,
    in order of `recvs`. `start[node]`, `finish[node]`: levels, numbers such that going through the levels one
    after the other, in each first all sends of nodes that start there and then the rest of those that finish
    there, is an order in which nothing has to wait. `lockstep`: each message is sent and received in the same
    round.
    """

    node: Array
    node_rank: Array
    sends: Array
    recvs: Array
    start: Array
    finish: Array
    lockstep: bool

    @functools.cached_property
    def rounds(self) -> int:
        """The most rounds with messages that wait for each other in a chain, through whichever ranks."""
        _, end = play(self, np.ones(len(self.sends)), np.zeros(len(self.node_rank)))
        return int(end.max(initial=0))


def flow(schedule: Schedule) -> Flow:
    """The graph of a schedule; a `Fault` if a step makes no sense by itself, messages do not match, or they
    wait for each other in a circle.

    Connections are taken to hold any number of messages here; `is_live` is about those that hold few. The
    graph is made once and kept with the schedule, because verification, cost and trace all begin with it.
    """
    kept = vars(schedule)
    if "_flow" not in kept:
        check_steps(schedule)
        kept["_flow"] = _flow(schedule)
    return kept["_flow"]


def _flow(schedule: Schedule) -> Flow:
    sends, recvs = match(schedule)
    node, node_row = _nodes(schedule)
    node_rank = schedule.ranks[node_row]
    rounds = schedule.columns["round"].astype(np.int64)
    sent, received = rounds[sends], rounds[recvs]
    if bool((sent <= received).all()):  # then the round numbers are levels already
        level = rounds[node_row]
        return Flow(node, node_rank, sends, recvs, level, level, bool((sent == received).all()))
    start = _levels(node_rank, [(node[sends], node[recvs])])
    _refuse_deadlock(schedule, node, node_rank, start, "even with connections of any length")
    finish = start.copy()
    np.maximum.at(finish, node[recvs], start[node[sends]])
    return Flow(node, node_rank, sends, recvs, start, finish, False)


def is_live(schedule: Schedule, graph: Flow, slots: int) -> None:
    """A `Fault` if the schedule stops for good when a connection holds `slots` messages; 0: rendezvous.

    A connection is (source, target, channel). With 0 slots a send ends no earlier than its receive begins, as
    NCCL does with messages longer than its buffers. More slots only remove waits: live with k is live with k
    + 1.
    """
    if graph.lockstep:
        return  # a node waits only for starts of the same round number, those only for lower ones: no circle
    held, holder = graph.sends, graph.recvs
    if slots > 0:  # the send of message m waits for the receive of message m - slots of its connection
        key = _connections(schedule)[graph.sends]
        by_connection = np.argsort(key, kind="stable")
        same = key[by_connection[slots:]] == key[by_connection[:-slots]]
        held = graph.sends[by_connection[slots:][same]]
        holder = graph.recvs[by_connection[:-slots][same]]
    node = graph.node
    edges = [(node[graph.sends], node[graph.recvs]), (node[holder], node[held])]
    kind = f"with {slots} slots a connection" if slots else "at rendezvous (no slots a connection)"
    _refuse_deadlock(schedule, node, graph.node_rank, _levels(graph.node_rank, edges), kind)


def play(graph: Flow, takes: Array, local: Array) -> tuple[Array, Array]:
    """When each node begins and ends if message m takes `takes[m]`, and a node `local[node]` after them."""
    count = len(graph.node_rank)
    begin, end = np.zeros(count), np.zeros(count)
    sender, receiver = graph.node[graph.sends], graph.node[graph.recvs]
    sending = np.zeros(count)
    np.maximum.at(sending, sender, takes)
    follows = np.zeros(count, dtype=bool)
    follows[1:] = graph.node_rank[1:] == graph.node_rank[:-1]
    starting, finishing = _by_level(graph.start), _by_level(graph.finish)
    arriving = _by_level(graph.finish[receiver])
    for level in sorted(set(starting) | set(finishing)):
        if level in starting:
            now = starting[level]
            begin[now] = np.where(follows[now], end[now - 1], 0.0)
        if level in finishing:
            now = finishing[level]
            end[now] = begin[now] + sending[now]
            if level in arriving:
                some = arriving[level]
                np.maximum.at(end, receiver[some], begin[sender[some]] + takes[some])
            end[now] += local[now]
    return begin, end


def _by_level(level: Array) -> dict[int, Array]:
    """The indices at which each level stands."""
    if not len(level):
        return {}
    order = stable_order(level)
    groups = np.split(order, np.flatnonzero(np.diff(level[order])) + 1)
    return {int(level[group[0]]): group for group in groups}


def match(schedule: Schedule) -> tuple[Array, Array]:
    """The rows of each message's send and receive, ordered by the latter; a `Fault` if one has no partner."""
    kind = schedule.columns["kind"]
    sends = np.flatnonzero(kind == Kind.SEND)
    recvs = np.flatnonzero((kind == Kind.RECV) | (kind == Kind.RECV_REDUCE))
    key = _connections(schedule)
    sends = sends[stable_order(key[sends])]
    recvs = recvs[stable_order(key[recvs])]
    if len(sends) != len(recvs) or not np.array_equal(key[sends], key[recvs]):
        raise _unmatched(schedule, key, sends, recvs)
    chunks = schedule.columns["chunks"]
    wrong = np.flatnonzero(chunks[sends] != chunks[recvs])
    if len(wrong):
        send, recv = sends[wrong[0]], recvs[wrong[0]]
        raise Fault.at(
            schedule, recv, f"expects {chunks[recv]} chunks where its message brings {chunks[send]}"
        )
    order = stable_order(recvs)
    sends, recvs = sends[order], recvs[order]
    sent, landed = schedule.columns["src_chunk"][sends], schedule.columns["dst_chunk"][recvs]
    wrong = np.flatnonzero((sent - landed) % schedule.parts != 0)
    if len(wrong):
        raise Fault.at(
            schedule,
            recvs[wrong[0]],
            f"gets chunk {sent[wrong[0]]}, whose size differs when {schedule.parts} parts do not divide the "
            "count",
        )
    return sends, recvs


def _connections(schedule: Schedule) -> Array:
    """A number for the connection (source, target, channel) of each row with a message."""
    columns, ranks = schedule.columns, schedule.ranks.astype(np.int64)
    peers = columns["peer"].astype(np.int64)
    sending = columns["kind"] == Kind.SEND
    pair = np.where(sending, ranks * schedule.n + peers, peers * schedule.n + ranks)
    return pair * (int(columns["channel"].max(initial=0)) + 1) + columns["channel"]


def _unmatched(schedule: Schedule, key: Array, sends: Array, recvs: Array) -> Fault:
    keys = np.union1d(key[sends], key[recvs])
    ends = {}
    for name, rows in (("sends", sends), ("receives", recvs)):
        ends[name] = np.bincount(np.searchsorted(keys, key[rows]), minlength=len(keys))
    connection = np.flatnonzero(ends["sends"] != ends["receives"])[0]
    sent, received = int(ends["sends"][connection]), int(ends["receives"][connection])
    rows = sends if sent > received else recvs
    row = rows[key[rows] == keys[connection]][min(sent, received)]
    if sent > received:
        return Fault.at(
            schedule, row, f"has no receive ({sent} sent, {received} received): the connection is not empty"
        )
    return Fault.at(schedule, row, f"waits for ever: {sent} messages are sent where {received} are received")


def _nodes(schedule: Schedule) -> tuple[Array, Array]:
    """The node of each row, and the first row of each node."""
    rounds, ranks = schedule.columns["round"], schedule.ranks
    if not len(rounds):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    begins = np.ones(len(rounds), dtype=bool)
    begins[1:] = (rounds[1:] != rounds[:-1]) | (ranks[1:] != ranks[:-1])
    return np.cumsum(begins) - 1, np.flatnonzero(begins)


def _levels(node_rank: Array, edges: list[tuple[Array, Array]]) -> Array:
    """The level at which each node starts; -1 if it never does.

    An edge (u, v): v cannot finish, so that the node after v cannot start, before u has started.
    """
    count = len(node_rank)
    has_next = np.zeros(count, dtype=bool)
    has_next[:-1] = node_rank[1:] == node_rank[:-1]
    itself = np.flatnonzero(has_next)
    before = np.concatenate([itself, *(u[has_next[v]] for u, v in edges)])
    after = np.concatenate([itself, *(v[has_next[v]] for u, v in edges)]) + 1
    order = np.argsort(before, kind="stable")
    after = after[order]
    first = np.searchsorted(before[order], np.arange(count + 1))
    waits = np.bincount(after, minlength=count)
    level = np.full(count, -1, dtype=np.int64)
    ready, now = np.flatnonzero(waits == 0), 0
    while len(ready):
        level[ready] = now
        begin, length = first[ready], first[ready + 1] - first[ready]
        reached = after[np.repeat(begin - np.cumsum(length) + length, length) + np.arange(length.sum())]
        np.subtract.at(waits, reached, 1)
        ready = np.unique(reached)
        ready = ready[waits[ready] == 0]
        now += 1
    return level


def _refuse_deadlock(schedule: Schedule, node: Array, node_rank: Array, level: Array, how: str) -> None:
    stuck = np.flatnonzero(level < 0)
    if not len(stuck):
        return
    # The node before a rank's first that never starts is where the rank stands; name one of its messages.
    first_stuck = stuck[np.unique(node_rank[stuck], return_index=True)[1]]
    ranks = node_rank[first_stuck].tolist()
    rows = np.flatnonzero(node == first_stuck[0] - 1)
    waiting = rows[schedule.columns["peer"][rows] >= 0]
    row = (waiting if len(waiting) else rows)[0]
    some = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    raise Fault.at(schedule, row, f"never ends, {how}: ranks {some} wait for each other")

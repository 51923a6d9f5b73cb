"""What a schedule costs: rounds, bytes, memory traffic, and time on a topology in the alpha-beta-gamma model.

The model: a round of a rank starts when its round before has finished. A message takes alpha of its link,
plus the time its ports take for all bytes that they carry of messages which start in the same round; its
receive ends then, but not before it has begun. A reduction takes gamma for each byte, a copy delta.
Connections are taken to hold what is under way, and messages of different rounds not to meet. With one link
class that gives the textbook formulas exactly. Needs only a schedule whose messages match; see `verify.py`
for whether it is right.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pynccl.collectives.flow import Flow, flow, play
from pynccl.collectives.schedule import Array, Kind, Schedule, check_is_schedule, chunk_bounds
from pynccl.collectives.sorting import stable_order
from pynccl.collectives.topology import Topology, flat

__all__ = ["BUS_FACTORS", "Cost", "Hop", "Timeline", "cost", "timeline"]

# Bytes of memory read and written for each byte of a step.
_TRAFFIC = {Kind.SEND: 1, Kind.RECV: 1, Kind.RECV_REDUCE: 3, Kind.COPY: 2, Kind.REDUCE: 3}

# busbw / algbw, as nccl-tests has it.
BUS_FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
}


@dataclasses.dataclass(frozen=True)
class Hop:
    """A stretch of the critical path: a rank's round from `begin` to `end` seconds, and what took it."""

    rank: int
    round: int
    begin: float
    end: float
    what: str


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline:
    """When everything happens, in seconds: rounds (nodes of `graph`) and messages (in its order)."""

    schedule: Schedule
    graph: Flow
    topology: Topology
    row_bytes: Array  # of each row
    begin: Array  # of each node
    end: Array
    local: Array  # seconds that a node reduces and copies, at its end
    sent: Array  # of each message: when it starts
    takes: Array  # of each message
    link: Array  # of each message: its class


@dataclasses.dataclass(frozen=True, eq=False)
class Cost:
    """What a schedule of `bytes` costs on a topology. Bytes of ranks and links are of one call.

    `bytes` is of the larger of IN and OUT, as in nccl-tests: a multiple of `unit`, an element in each of its
    blocks, to which the `asked` bytes are rounded down. `rounds`: the rounds with messages that wait for
    each other, in the longest chain: how often alpha must be paid. `sent`, `received`, `reduced`, `traffic`
    (of memory, read and written): for each rank. `links`: for each class its name, messages, bytes, and the
    most bytes that any of its ports sends or receives. `path`: the critical path, from its beginning.
    """

    name: str
    collective: str
    n: int
    bytes: int
    asked: int
    unit: int
    topology: str
    rounds: int
    messages: int
    time: float
    sent: Array
    received: Array
    reduced: Array
    traffic: Array
    links: tuple[dict[str, Any], ...]
    path: tuple[Hop, ...]

    @property
    def algbw(self) -> float:
        """Bytes a second."""
        return self.bytes / self.time if self.time else 0.0

    @property
    def busbw(self) -> float:
        """Bytes a second that the busiest port must carry at least, as nccl-tests counts."""
        return self.algbw * BUS_FACTORS[self.collective](self.n)

    def as_json(self) -> dict[str, Any]:
        """The cost as a dictionary; of the ranks the most."""
        fields = (
            *("name", "collective", "n", "bytes", "asked", "unit"),
            *("topology", "rounds", "messages", "time"),
        )
        most = {f"most_{f}": int(getattr(self, f).max()) for f in ("sent", "received", "reduced", "traffic")}
        path = [dataclasses.asdict(hop) for hop in self.path]
        return {
            **{field: getattr(self, field) for field in fields},
            "algbw": self.algbw,
            "busbw": self.busbw,
            **most,
            "links": list(self.links),
            "path": path,
        }

    @property
    def _rounded(self) -> str:
        if self.bytes == self.asked:
            return ""
        return f" ({self.asked} rounded down to a multiple of {self.unit}: an element in each block)"

    def __str__(self) -> str:
        lines = [
            f"{self.name} {self.collective}, {self.n} ranks, {self.bytes} bytes{self._rounded}, "
            f"{self.topology}",
            f"  time       {self.time * 1e6:.2f} us  (algbw {self.algbw / 1e9:.2f} GB/s, busbw "
            f"{self.busbw / 1e9:.2f} GB/s)",
            f"  rounds     {self.rounds}",
            f"  messages   {self.messages}",
        ]
        for name in ("sent", "received", "reduced", "traffic"):
            values = getattr(self, name)
            lines.append(
                f"  {name:10} {int(values.max())} bytes the most of a rank, {int(values.sum())} in all"
            )
        for link in self.links:
            lines.append(
                f"  {link['name']:10} {link['messages']} messages, {link['bytes']} bytes, "
                f"{link['busiest']} through the busiest port"
            )
        return "\n".join(lines)


def cost(schedule: Schedule, nbytes: int, topology: Topology | None = None, *, itemsize: int = 4) -> Cost:
    """What a schedule costs with `nbytes` in the larger of IN and OUT; `topology`: None is `flat(n)`.

    `nbytes` is rounded down to whole elements of `itemsize` bytes in whole blocks, and `Cost.asked` keeps it.
    ValueError if the topology is of other ranks; `Fault` if messages do not match.
    """
    t = timeline(schedule, nbytes, topology, itemsize=itemsize)
    columns, ranks, n = schedule.columns, schedule.ranks, schedule.n
    kind = columns["kind"]

    def by_rank(factor: Array) -> Array:
        return np.bincount(ranks, weights=t.row_bytes * factor, minlength=n)

    unit = itemsize * max(schedule.in_blocks, schedule.out_blocks)
    reduces = (kind == Kind.RECV_REDUCE) | (kind == Kind.REDUCE)
    traffic = np.array([_TRAFFIC[k] for k in Kind])[kind]
    return Cost(
        name=schedule.name,
        collective=schedule.collective,
        n=n,
        bytes=nbytes // unit * unit,
        asked=nbytes,
        unit=unit,
        topology=str(t.topology),
        rounds=t.graph.rounds,
        messages=len(t.graph.sends),
        time=float(t.end.max(initial=0.0)),
        sent=by_rank(kind == Kind.SEND),
        received=by_rank((kind == Kind.RECV) | (kind == Kind.RECV_REDUCE)),
        reduced=by_rank(reduces),
        traffic=by_rank(traffic),
        links=_links(t),
        path=_path(t),
    )


def timeline(
    schedule: Schedule, nbytes: int, topology: Topology | None = None, *, itemsize: int = 4
) -> Timeline:
    """When each round and each message of a schedule begins and ends; arguments as of `cost`."""
    check_is_schedule("cost", schedule)
    topology = flat(schedule.n) if topology is None else topology
    if not isinstance(topology, Topology):
        raise TypeError(
            f"cost: topology={topology!r}; take flat(n), nodes(n, 8), rails(n, 8), or parse(text, n) of "
            "pynccl.collectives.topology"
        )
    if topology.n != schedule.n:
        raise ValueError(f"cost: a topology of {topology.n} ranks for a schedule of {schedule.n}")
    if nbytes < 0:
        raise ValueError(f"cost: {nbytes} bytes; take 0 or more")
    if itemsize < 1:
        raise ValueError(f"cost: elements of {itemsize} bytes (itemsize); take 1 or more")
    graph = flow(schedule)
    row_bytes = _row_bytes(schedule, nbytes, itemsize)
    link, takes = _messages(schedule, graph, topology, row_bytes)
    kind = schedule.columns["kind"]
    reduces = (kind == Kind.RECV_REDUCE) | (kind == Kind.REDUCE)
    local_rows = row_bytes * (reduces * topology.gamma + (kind == Kind.COPY) * topology.delta)
    local = np.bincount(graph.node, weights=local_rows, minlength=len(graph.node_rank))
    begin, end = play(graph, takes, local)
    sent = begin[graph.node[graph.sends]]
    return Timeline(schedule, graph, topology, row_bytes, begin, end, local, sent, takes, link)


def _row_bytes(schedule: Schedule, nbytes: int, itemsize: int) -> Array:
    """Bytes that each row moves."""
    c = schedule.columns
    count = nbytes // (itemsize * max(schedule.in_blocks, schedule.out_blocks))
    chunk = np.where(c["src_buffer"] >= 0, c["src_chunk"], c["dst_chunk"]).astype(np.int64)
    first, _ = chunk_bounds(chunk, count, schedule.parts)
    _, end = chunk_bounds(chunk + c["chunks"] - 1, count, schedule.parts)
    return (end - first) * itemsize


def _messages(schedule: Schedule, graph: Flow, topology: Topology, row_bytes: Array) -> tuple[Array, Array]:
    """The link class of each message and the seconds that it takes, given what shares its ports."""
    source, target = schedule.ranks[graph.sends], schedule.ranks[graph.recvs]
    link = topology.link(source, target)
    beta = np.array([k.beta for k in topology.links])[link]
    seconds = row_bytes[graph.sends] * beta
    level = graph.start[graph.node[graph.sends]]
    level = level - level.min(initial=0)
    ports = np.stack(topology.port)
    busy = np.zeros(len(link))
    for end in (source, target):
        # Ports of two classes are the same ones only if all their numbers are equal.
        port = ports[link, end] * len(topology.links) + _port_class(ports)[link]
        key = level * (int(port.max(initial=0)) + 1) + port
        if key.max(initial=0) > 4 * len(key) + 1000:
            key = np.unique(key, return_inverse=True)[1]
        busy = np.maximum(busy, np.bincount(key, weights=seconds)[key] if len(key) else busy)
    return link, np.array([k.alpha for k in topology.links])[link] + busy


def _port_class(ports: Array) -> Array:
    """For each class the first whose ports it shares."""
    return np.array([next(j for j in range(len(ports)) if np.array_equal(ports[j], own)) for own in ports])


def _links(t: Timeline) -> tuple[dict[str, Any], ...]:
    source, target = t.schedule.ranks[t.graph.sends], t.schedule.ranks[t.graph.recvs]
    nbytes = t.row_bytes[t.graph.sends]
    rows = []
    for index, link in enumerate(t.topology.links):
        some = t.link == index
        port = t.topology.port[index]
        busiest = max(
            np.bincount(port[end[some]], weights=nbytes[some]).max(initial=0.0) for end in (source, target)
        )
        rows.append(
            {
                "name": link.name,
                "messages": int(some.sum()),
                "bytes": int(nbytes[some].sum()),
                "busiest": int(busiest),
            }
        )
    return tuple(rows)


def _path(t: Timeline) -> tuple[Hop, ...]:
    """From the round that ends last back along what each had to wait for."""
    if not len(t.end):
        return ()
    graph, hops = t.graph, []
    sender, receiver = graph.node[graph.sends], graph.node[graph.recvs]
    by_sender = stable_order(sender)
    first_row = np.searchsorted(graph.node, np.arange(len(t.end)))
    ends_last = np.flatnonzero(t.end == t.end.max())
    receives = ends_last[np.isin(ends_last, receiver)]  # rather than what sends to it, and ends as late
    node = int((receives if len(receives) else ends_last)[0])
    while node >= 0:
        before, begin, what = node, float(t.begin[node]), ""
        received = np.arange(*np.searchsorted(receiver, [node, node + 1]))
        sent = by_sender[slice(*np.searchsorted(sender, [node, node + 1], sorter=by_sender))]
        last = max(
            [*received, *sent], key=lambda m: t.sent[m] + t.takes[m], default=None
        )  # received if equal
        if last is not None:
            link = t.topology.links[int(t.link[last])].name
            if receiver[last] == node:
                before, begin = int(sender[last]), float(t.sent[last])
                what = f"message from rank {int(graph.node_rank[before])} ({link})"
            else:
                what = f"message to rank {int(graph.node_rank[receiver[last]])} ({link})"
        parts = [part for part in (what, "local steps" if t.local[node] else "") if part]
        round_ = int(t.schedule.columns["round"][first_row[node]])
        end = float(t.end[node])
        hops.append(Hop(int(graph.node_rank[node]), round_, begin, end, ", ".join(parts) or "nothing"))
        node = before - 1 if before and graph.node_rank[before - 1] == graph.node_rank[before] else -1
    return tuple(reversed(hops))

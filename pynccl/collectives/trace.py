"""The timeline of a schedule for chrome://tracing and https://ui.perfetto.dev: a row for each rank.

Owns the file format; when things happen comes from `cost.timeline`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from pynccl.collectives.cost import timeline
from pynccl.collectives.schedule import Kind, Schedule
from pynccl.collectives.topology import Topology

__all__ = ["trace_events", "write_trace"]

_ROUNDS, _SENDS = 0, 1  # the two tracks of a rank


def trace_events(
    schedule: Schedule, nbytes: int, topology: Topology | None = None, *, itemsize: int = 4
) -> list[dict[str, Any]]:
    """The events of Chrome's trace format, times in microseconds: each rank's rounds and sends, and arrows.

    Arguments as of `cost`. A node of the topology is a process, a rank two threads of it: its rounds, each
    with its steps as arguments, and what it sends.
    """
    t = timeline(schedule, nbytes, topology, itemsize=itemsize)
    graph, columns = t.graph, schedule.columns
    place = t.topology.node.tolist()
    events: list[dict[str, Any]] = []
    for node in sorted(set(place)):
        events.append(_meta("process_name", node, 0, f"{t.topology.name}: node {node}"))
    for rank in range(schedule.n):
        for track, name in ((_ROUNDS, "rounds"), (_SENDS, "sends")):
            events.append(_meta("thread_name", place[rank], 2 * rank + track, f"rank {rank} {name}"))
    rows = np.searchsorted(graph.node, np.arange(len(graph.node_rank) + 1)).tolist()
    for node, rank in enumerate(graph.node_rank.tolist()):
        first = int(schedule.first[rank])
        steps = [schedule.step(rank, row - first) for row in range(rows[node], rows[node + 1])]
        events.append(
            _span(f"round {steps[0].round}", place[rank], 2 * rank + _ROUNDS, t.begin[node], t.end[node])
            | {"args": {f"step {rows[node] - first + i}": str(step) for i, step in enumerate(steps)}}
        )
    for message, (send, recv) in enumerate(zip(graph.sends.tolist(), graph.recvs.tolist(), strict=True)):
        source, target = int(schedule.ranks[send]), int(schedule.ranks[recv])
        begin = float(t.sent[message])
        end = begin + float(t.takes[message])
        link = t.topology.links[int(t.link[message])].name
        reduces = columns["kind"][recv] == Kind.RECV_REDUCE
        name = f"to {target}" + (" (reduced there)" if reduces else "")
        track = 2 * source + _SENDS
        events.append(
            _span(name, place[source], track, begin, end)
            | {
                "args": {
                    "bytes": int(t.row_bytes[send]),
                    "link": link,
                    "channel": int(columns["channel"][send]),
                }
            }
        )
        arrow = {"name": "message", "cat": "message", "id": message}
        events.append({**arrow, "ph": "s", "pid": place[source], "tid": track, "ts": begin * 1e6})
        arrives = {"ph": "f", "bp": "e", "pid": place[target], "tid": 2 * target + _ROUNDS}
        events.append({**arrow, **arrives, "ts": end * 1e6})
    return events


def write_trace(
    path: str | Path,
    schedule: Schedule,
    nbytes: int,
    topology: Topology | None = None,
    *,
    itemsize: int = 4,
) -> Path:
    """Write the timeline to a JSON file, and return its path. Arguments as of `cost`."""
    path = Path(path)
    events = trace_events(schedule, nbytes, topology, itemsize=itemsize)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))
    return path


def _meta(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _span(name: str, pid: int, tid: int, begin: float, end: float) -> dict[str, Any]:
    ts, duration = float(begin) * 1e6, float(end - begin) * 1e6
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": duration}

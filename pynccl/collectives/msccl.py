"""Schedules as MSCCL's XML; for the other way see `msccl_import.py`.

MSCCL runs *thread blocks*, each with at most one peer to send to and one to receive from, whose steps follow
one another; a step can wait for a step of another block. Exported are a block for each connection of a rank
and one for its copies, with a wait for each conflict over a chunk. What MSCCL does not know (rounds, root,
claims, params) goes into attributes of their own, so that importing gives the same schedule back, and nothing
is lost. See the msccl-tools and msccl-executor-nccl projects for the format.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

from pynccl.collectives.msccl_import import BUFFERS, COLLECTIVES, from_msccl
from pynccl.collectives.schedule import Buffer, Kind, Schedule, Span, Step, check_is_schedule
from pynccl.collectives.steps import check_steps

__all__ = ["from_msccl", "to_msccl"]

_NAMES = {collective: name for name, collective in reversed(COLLECTIVES.items())}
_TYPES = {Kind.SEND: "s", Kind.RECV: "r", Kind.RECV_REDUCE: "rrc", Kind.COPY: "cpy", Kind.REDUCE: "re"}
_LETTERS = {buffer: letter for letter, buffer in BUFFERS.items()}

Block = tuple[int, int, int]  # send peer, receive peer, channel; -1: none


def to_msccl(schedule: Schedule) -> str:
    """The schedule as an MSCCL program; a `Fault` if a step makes no sense by itself."""
    check_is_schedule("to_msccl", schedule)
    check_steps(schedule)
    columns = schedule.columns
    algo = ElementTree.Element(
        "algo",
        name=schedule.name,
        proto="Simple",
        nchannels=str(int(columns["channel"].max(initial=0)) + 1),
        nchunksperloop=str(max(schedule.in_blocks, schedule.out_blocks) * schedule.parts),
        ngpus=str(schedule.n),
        coll=_NAMES[schedule.collective],
        inplace="0",
        root=str(schedule.root),
        deterministic=str(int(schedule.deterministic)),
        overlaps=str(int(schedule.in_place)),
        params=json.dumps(schedule.params),
    )
    for rank, steps in enumerate(schedule):
        sizes = {f"{_LETTERS[b]}_chunks": str(schedule.chunks(b)) for b in Buffer}
        gpu = ElementTree.SubElement(algo, "gpu", {"id": str(rank), **sizes})
        _export_rank(gpu, steps)
    ElementTree.indent(algo)
    return ElementTree.tostring(algo, encoding="unicode")


def _export_rank(gpu: ElementTree.Element, steps: list[Step]) -> None:
    blocks: dict[Block, int] = {}
    own = []
    for step in steps:
        block = (-1, -1, 0)
        if step.kind == Kind.SEND:
            block = (step.peer, -1, step.channel)
        elif step.peer >= 0:
            block = (-1, step.peer, step.channel)
        own.append(blocks.setdefault(block, len(blocks)))
    lines: list[list[dict[str, str]]] = [[] for _ in blocks]
    at: dict[int, int] = {}  # where the exported form of each step stands in its block
    waits = _waits(steps)
    for index, step in sorted(enumerate(steps), key=lambda item: _order(item[0], item[1])):
        latest: dict[int, int] = {}
        for other in waits[index]:
            if own[other] != own[index]:
                latest[own[other]] = max(latest.get(own[other], -1), at[other])
        deps = sorted(latest.items())
        for block_, place in latest.items():
            lines[block_][place]["hasdep"] = "1"
        for block_, place in deps[:-1]:  # a step waits for one other; more take steps that do nothing
            lines[own[index]].append(_line("nop", None, None, 0, (block_, place)))
        at[index] = len(lines[own[index]])
        some = step.src or step.dst
        assert some is not None
        line = _line(_TYPES[step.kind], step.src, step.dst, some.chunks, deps[-1] if deps else (-1, -1))
        lines[own[index]].append(line | {"round": str(step.round), "index": str(index)})
        if step.left:
            lines[own[index]][-1]["left"] = "1"
    for (send, recv, channel), number in blocks.items():
        places = {"id": str(number), "send": str(send), "recv": str(recv), "chan": str(channel)}
        tb = ElementTree.SubElement(gpu, "tb", places)
        for i, line in enumerate(lines[number]):
            ElementTree.SubElement(tb, "step", {"s": str(i), **line})


def _line(kind: str, src: Span | None, dst: Span | None, cnt: int, dep: tuple[int, int]) -> dict[str, str]:
    src, dst = src or dst, dst or src
    return {
        "type": kind,
        "srcbuf": _LETTERS[src.buffer] if src else "i",
        "srcoff": str(src.chunk if src else -1),
        "dstbuf": _LETTERS[dst.buffer] if dst else "o",
        "dstoff": str(dst.chunk if dst else -1),
        "cnt": str(cnt),
        "depid": str(dep[0]),
        "deps": str(dep[1]),
        "hasdep": "0",
    }


def _order(index: int, step: Step) -> tuple[int, int, int]:
    """In a round first the sends, then the receives, then the rest in order."""
    return step.round, min(int(step.kind), 2), index


def _waits(steps: list[Step]) -> list[set[int]]:
    """For each step the steps before it that touch the same chunks, one of the two writing."""
    waits: list[set[int]] = [set() for _ in steps]
    wrote: dict[tuple[Buffer, int], int] = {}
    read: dict[tuple[Buffer, int], list[int]] = {}
    for index, step in sorted(enumerate(steps), key=lambda item: _order(item[0], item[1])):
        for cell in _cells(step.src):
            waits[index] |= {wrote[cell]} if cell in wrote else set()
            read.setdefault(cell, []).append(index)
        for cell in _cells(step.dst):
            waits[index] |= {wrote[cell]} if cell in wrote else set()
            waits[index] |= set(read.pop(cell, []))
            wrote[cell] = index
        waits[index].discard(index)
    return waits


def _cells(span: Span | None) -> Iterator[tuple[Buffer, int]]:
    if span is not None:
        yield from ((span.buffer, span.chunk + i) for i in range(span.chunks))

"""Schedules as MSCCL's XML, and MSCCL's programs as schedules.

MSCCL runs *thread blocks*, each with at most one peer to send to and one to receive from, whose steps follow
one another; a step can wait for a step of another block. Exported are a block for each connection of a rank
and one for its copies, with a wait for each conflict over a chunk, and the rounds in an attribute of their
own, so that importing gives the same schedule back. In programs from elsewhere each step gets the earliest
round in which everything it waits for is over. See the msccl-tools and msccl-executor-nccl projects for the
format.
"""

from __future__ import annotations

import collections
import dataclasses
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

from pynccl.collectives.schedule import Buffer, Kind, Schedule, Span, Step

__all__ = ["from_msccl", "to_msccl"]

_COLLECTIVES = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "alltoall",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
_NAMES = {name: collective for collective, name in _COLLECTIVES.items()} | {"reducescatter": "reduce_scatter"}
_TYPES = {Kind.SEND: "s", Kind.RECV: "r", Kind.RECV_REDUCE: "rrc", Kind.COPY: "cpy", Kind.REDUCE: "re"}
_LETTERS = {Buffer.IN: "i", Buffer.OUT: "o", Buffer.SCRATCH: "s"}
_BUFFERS = {letter: buffer for buffer, letter in _LETTERS.items()}

# What MSCCL's fused steps do, one after the other. "t" in place of a buffer: a chunk nobody else uses.
_FUSED = {
    "s": (Kind.SEND,),
    "r": (Kind.RECV,),
    "cpy": (Kind.COPY,),
    "re": (Kind.REDUCE,),
    "rrc": (Kind.RECV_REDUCE,),
    "rcs": (Kind.RECV, Kind.SEND),
    "rrs": (Kind.RECV_REDUCE, Kind.SEND),
    "rrcs": (Kind.RECV_REDUCE, Kind.SEND),
    "nop": (),
}

Block = tuple[int, int, int]  # send peer, receive peer, channel; -1: none


def to_msccl(schedule: Schedule) -> str:
    """The schedule as an MSCCL program."""
    columns = schedule.columns
    algo = ElementTree.Element(
        "algo",
        name=schedule.name,
        proto="Simple",
        nchannels=str(int(columns["channel"].max(initial=0)) + 1),
        nchunksperloop=str(max(schedule.in_blocks, schedule.out_blocks) * schedule.parts),
        ngpus=str(schedule.n),
        coll=_COLLECTIVES[schedule.collective],
        inplace="0",
        root=str(schedule.root),
        deterministic=str(int(schedule.deterministic)),
        overlaps=str(int(schedule.in_place)),
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


@dataclasses.dataclass
class _Part:
    """One of our steps in an MSCCL program: what it waits for, and the round it gets."""

    step: Step
    index: int
    round: int = -1


@dataclasses.dataclass
class _Line:
    """A step of a thread block, as parts that follow each other, and the (block, step)s that it waits for."""

    parts: list[_Part]
    waits: tuple[tuple[int, int], ...]


def from_msccl(text: str) -> Schedule:
    """The schedule of an MSCCL program; ValueError if it is none, or one that a schedule cannot say."""
    try:
        algo = ElementTree.fromstring(text)
        return _import(algo)
    except ElementTree.ParseError as error:
        raise ValueError(f"msccl: this is not XML: {error}") from error
    except (KeyError, AttributeError) as error:
        raise ValueError(f"msccl: a part of the program is missing or unknown: {error}") from error


def _import(algo: ElementTree.Element) -> Schedule:
    n = int(algo.attrib["ngpus"])
    collective = _NAMES[algo.attrib["coll"]]
    in_place = algo.attrib.get("inplace") == "1"
    if in_place and collective not in ("all_reduce", "all_gather"):
        raise ValueError(f"msccl: an in-place {collective} writes its input, which a schedule must not")
    blocks = n if collective in ("all_gather", "reduce_scatter", "all_to_all") else 1
    parts, rest = divmod(int(algo.attrib["nchunksperloop"]), blocks)
    if rest:
        raise ValueError(f"msccl: {blocks * parts + rest} chunks do not divide over {blocks} blocks")
    gpus = sorted(algo.findall("gpu"), key=lambda gpu: int(gpu.attrib["id"]))
    if len(gpus) != n:
        raise ValueError(f"msccl: {len(gpus)} gpus are given where ngpus says {n}")
    scratch = max((int(gpu.attrib.get("s_chunks", 0)) for gpu in gpus), default=0)
    ranks = [_import_rank(rank, gpu, parts, scratch, in_place) for rank, gpu in enumerate(gpus)]
    written = [part for blocks_ in ranks for lines in blocks_ for line in lines for part in line.parts]
    if any(part.round < 0 for part in written):
        for part in written:
            part.round = -1
        _give_rounds(ranks)
    steps = []
    for rank, blocks_ in enumerate(ranks):
        parts_ = sorted(
            (part for lines in blocks_ for line in lines for part in line.parts),
            key=lambda part: (part.round, part.index),
        )
        shift = int(in_place)
        own = [dataclasses.replace(part.step, round=part.round + shift) for part in parts_]
        if in_place:
            to = rank * parts if collective == "all_gather" else 0
            own.insert(0, Step(Kind.COPY, 0, -1, Span(Buffer.IN, 0, parts), Span(Buffer.OUT, to, parts)))
        steps.append(own)
    used = [span for own in steps for step in own for span in (step.src, step.dst) if span is not None]
    return Schedule.from_steps(
        algo.attrib["name"],
        collective,
        steps,
        parts=parts,
        root=int(algo.attrib.get("root", 0)),
        scratch_chunks=max([scratch, *(s.chunk + s.chunks for s in used if s.buffer == Buffer.SCRATCH)]),
        deterministic=algo.attrib.get("deterministic", "1") == "1",
        in_place=algo.attrib.get("overlaps", "1") == "1",
    )


def _import_rank(
    rank: int, gpu: ElementTree.Element, parts: int, scratch: int, in_place: bool
) -> list[list[_Line]]:
    def span(step: ElementTree.Element, end: str, count: int) -> Span:
        buffer, offset = _BUFFERS[step.attrib[f"{end}buf"]], int(step.attrib[f"{end}off"])
        if in_place and buffer == Buffer.IN:
            gather = int(gpu.attrib.get("i_chunks", 0)) < int(gpu.attrib.get("o_chunks", 0))
            return Span(Buffer.OUT, offset + (rank * parts if gather else 0), count)
        return Span(buffer, offset, count)

    ranks_lines: list[list[_Line]] = []
    spare = -(-scratch // parts) * parts
    index = 0
    for tb in gpu.findall("tb"):
        send, recv, channel = (int(tb.attrib[name]) for name in ("send", "recv", "chan"))
        lines: list[_Line] = []
        for step in tb.findall("step"):
            kind, count = step.attrib["type"], int(step.attrib["cnt"])
            made = []
            for each in _FUSED[kind]:
                src = dst = None
                if each != Kind.RECV:
                    src = span(step, "src", count)
                if each != Kind.SEND:
                    dst = span(step, "dst", count)
                if kind == "rrs":  # the sum goes on without being kept
                    spot = Span(Buffer.SCRATCH, spare + span(step, "src", count).chunk % parts, count)
                    src, dst = (spot, None) if each == Kind.SEND else (src, spot)
                elif len(_FUSED[kind]) == 2 and each == Kind.SEND:  # what has just been put in its place
                    src = span(step, "dst", count)
                peer = send if each == Kind.SEND else recv if each <= Kind.RECV_REDUCE else -1
                left = step.attrib.get("left") == "1"
                round_ = int(step.attrib.get("round", -1))
                new = Step(each, 0, peer, src, dst, channel if peer >= 0 else 0, left)
                made.append(_Part(new, int(step.attrib.get("index", index)), round_))
                index += 1
            if kind == "rrs":
                spare += -(-(parts + count) // parts) * parts
            wait = (int(step.attrib["depid"]), int(step.attrib["deps"]))
            lines.append(_Line(made, (wait,) if wait[0] >= 0 else ()))
        ranks_lines.append(lines)
    return ranks_lines


def _give_rounds(ranks: list[list[list[_Line]]]) -> None:
    """Give each part the first round in which all that it waits for is over and its message sent."""
    state = [_Block(rank, lines) for rank, blocks in enumerate(ranks) for lines in blocks]
    blocks_of = [[block for block in state if block.rank == rank] for rank in range(len(ranks))]
    on_the_way: collections.Counter[tuple[int, int, int]] = collections.Counter()
    round_ = 0
    while not all(block.ended for block in state):
        moved = False
        for sending in (True, False):  # what is sent in a round can be received in it
            for block in state:
                moved |= block.advance(round_, sending, blocks_of[block.rank], on_the_way)
        if not moved:
            stuck = sorted({block.rank for block in state if not block.ended})
            raise ValueError(f"msccl: the program stops for good; ranks {stuck[:8]} wait for each other")
        round_ += 1


class _Block:
    """Where a thread block stands while rounds are given."""

    def __init__(self, rank: int, lines: list[_Line]) -> None:
        self.rank, self.lines = rank, lines
        self.at, self.within = 0, 0  # the next line, and part of it
        self.over: list[int] = []  # the round in which each line ended
        self.latest: tuple[int, list[Step]] = (-1, [])  # the last round in which it did something, and what

    @property
    def ended(self) -> bool:
        """Whether it has nothing more to do."""
        return self.at == len(self.lines)

    def advance(
        self,
        round_: int,
        sending: bool,
        others: list[_Block],
        on_the_way: collections.Counter[tuple[int, int, int]],
    ) -> bool:
        """Do the next part in this round if it can be done, and say whether anything was."""
        if self.ended:
            return False
        line = self.lines[self.at]
        if self.within == 0 and not all(others[b].is_over(i, round_) for b, i in line.waits):
            return False
        if not line.parts:  # a nop is over with what it waits for
            self._end_line(max((others[b].over[i] for b, i in line.waits), default=-1))
            return True
        part = line.parts[self.within]
        step = part.step
        if (step.kind == Kind.SEND) != sending or not self._follows(step, round_):
            return False
        if step.kind == Kind.SEND:
            on_the_way[self.rank, step.peer, step.channel] += 1
        elif step.kind <= Kind.RECV_REDUCE:
            connection = (step.peer, self.rank, step.channel)
            if not on_the_way[connection]:
                return False
            on_the_way[connection] -= 1
        part.round = round_
        self.latest = (round_, [*self._done(round_), step])
        self.within += 1
        if self.within == len(line.parts):
            self._end_line(round_)
        return True

    def is_over(self, line: int, round_: int) -> bool:
        """Whether a line ended before a round."""
        return line < len(self.over) and self.over[line] < round_

    def _end_line(self, round_: int) -> None:
        self.over.append(round_)
        self.at, self.within = self.at + 1, 0

    def _done(self, round_: int) -> list[Step]:
        return self.latest[1] if self.latest[0] == round_ else []

    def _follows(self, step: Step, round_: int) -> bool:
        """Whether a step can be in this round, given what the block has done in it: nothing, or a send.

        Behind a send, because sends read before anything is written; but nothing may land on what is sent.
        """
        done = self._done(round_)
        if step.kind == Kind.SEND or any(other.kind != Kind.SEND for other in done):
            return not done
        sent = {cell for other in done for cell in _cells(other.src)}
        return step.kind != Kind.RECV or sent.isdisjoint(_cells(step.dst))

"""MSCCL's programs as schedules. For the format see `msccl.py`.

Every attribute that means something here goes through one of a few readers, which say where it stands and
what it may be if it is missing, no number, out of range or unknown: always a ValueError. Attributes that mean
nothing to a schedule (`proto`, `hasdep`, ...) are not read. Steps of our own programs have their rounds with
them; in programs from elsewhere each gets the earliest round in which everything it waits for is over.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pynccl.collectives.form import MOST_CHUNKS, MOST_RANKS, check_head, said
from pynccl.collectives.schedule import COLLECTIVES as TABLE
from pynccl.collectives.schedule import Buffer, Kind, Schedule, Span, Step

__all__ = ["BUFFERS", "COLLECTIVES", "from_msccl"]

T = TypeVar("T")

# A collective's first name is the one that is exported.
COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "reducescatter": "reduce_scatter",
}
BUFFERS = {"i": Buffer.IN, "o": Buffer.OUT, "s": Buffer.SCRATCH}

# What MSCCL's steps do, one after the other: kind, where from, where to. "spare": a place nobody else uses.
_KINDS: dict[str, tuple[tuple[Kind, str | None, str | None], ...]] = {
    "s": ((Kind.SEND, "src", None),),
    "r": ((Kind.RECV, None, "dst"),),
    "cpy": ((Kind.COPY, "src", "dst"),),
    "re": ((Kind.REDUCE, "src", "dst"),),
    "rrc": ((Kind.RECV_REDUCE, "src", "dst"),),
    "rcs": ((Kind.RECV, None, "dst"), (Kind.SEND, "dst", None)),
    "rrs": ((Kind.RECV_REDUCE, "src", "spare"), (Kind.SEND, "spare", None)),
    "rrcs": ((Kind.RECV_REDUCE, "src", "dst"), (Kind.SEND, "dst", None)),
    "nop": (),
}
_END = {Kind.SEND: "send", Kind.RECV: "recv", Kind.RECV_REDUCE: "recv"}  # of a thread block's two peers
_FLAGS = {"0": False, "1": True}
_LIMIT = (1 << 31) - 1  # of a column


@dataclasses.dataclass(frozen=True)
class _Element:
    """An element of the program, and where it is, in words."""

    xml: ElementTree.Element
    where: str

    def refused(self, why: str) -> ValueError:
        """The error that says where and why."""
        return ValueError(f"msccl: {self.where}: {why}")

    def text(self, name: str, default: str | None = None) -> str:
        """An attribute as it stands; without a default it must be there."""
        value = self.xml.attrib.get(name, default)
        if value is None:
            raise self.refused(f"it has no {name}; give it one")
        return value

    def whole(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """An attribute that is a whole number from `low` to `high`; the default need not be one."""
        if default is not None and name not in self.xml.attrib:
            return default
        text = self.text(name)
        if re.fullmatch("-?[0-9]{1,18}", text) and low <= int(text) <= high:
            return int(text)
        raise self.refused(f"{name} is {said(text)}; take a whole number from {low} to {high}")

    def word(self, name: str, known: Mapping[str, T], default: str | None = None) -> T:
        """What an attribute that is one of a few words stands for."""
        text = self.text(name, default)
        if text not in known:
            raise self.refused(f"{name} is {said(text)}; take one of {', '.join(known)}")
        return known[text]

    def parts(self, tag: str) -> list[_Element]:
        """The elements inside, all of which have this tag."""
        other = [part.tag for part in self.xml if part.tag != tag]
        if other:
            raise self.refused(f"there is a {said(other[0])} in it; it has {tag} only")
        inside = "" if self.where == "algo" else f"{self.where}, "
        names = [
            part.attrib.get("s" if tag == "step" else "id", f"number {i}") for i, part in enumerate(self.xml)
        ]
        return [_Element(part, f"{inside}{tag} {name}") for part, name in zip(self.xml, names, strict=True)]

    def numbered(self, tag: str, count: int | None = None) -> dict[int, _Element]:
        """The elements inside by their ids, in order; `count`: the ids are 0 to count - 1."""
        most = _LIMIT if count is None else count - 1
        parts = [(part.whole("id", 0, most), part) for part in self.parts(tag)]
        found = dict(sorted(parts, key=lambda pair: pair[0]))
        if len(found) != (len(parts) if count is None else count) or len(parts) != len(found):
            wanted = "each id once" if count is None else f"{count}, with each id from 0 to {count - 1} once"
            raise self.refused(f"it has {len(parts)} {tag}, of {len(found)} ids; give it {wanted}")
        return found


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
        xml = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"msccl: this is not XML: {said(text)}: {error}") from error
    if xml.tag != "algo":
        raise ValueError(f"msccl: this is a {said(xml.tag)}, not an MSCCL program; that is an algo")
    return _import(_Element(xml, "algo"))


@dataclasses.dataclass(frozen=True)
class _Program:
    """The head of a program."""

    head: dict[str, Any]  # as `form.check_head` gives it
    in_place: bool
    chunks: tuple[int, int, int]  # of IN, OUT and SCRATCH


def _import(algo: _Element) -> Schedule:
    n = algo.whole("ngpus", 1, MOST_RANKS)
    gpus = algo.numbered("gpu", n)
    program = _head(algo, list(gpus.values()))
    head, parts = program.head, program.head["parts"]
    ranks = [_Gpu(rank, gpu, program).read() for rank, gpu in gpus.items()]
    written = [part for blocks in ranks for lines in blocks for line in lines for part in line.parts]
    if any(part.round < 0 for part in written):
        for part in written:
            part.round = -1
        _give_rounds(ranks)
    steps = []
    for rank, blocks in enumerate(ranks):
        own_parts = sorted(
            (part for lines in blocks for line in lines for part in line.parts),
            key=lambda part: (part.round, part.index),
        )
        shift = int(program.in_place)
        own = [dataclasses.replace(part.step, round=part.round + shift) for part in own_parts]
        if program.in_place:
            to = rank * parts if head["collective"] == "all_gather" else 0
            own.insert(0, Step(Kind.COPY, 0, -1, Span(Buffer.IN, 0, parts), Span(Buffer.OUT, to, parts)))
        steps.append(own)
    used = [span for own in steps for step in own for span in (step.src, step.dst) if span is not None]
    ends = [span.chunk + span.chunks for span in used if span.buffer == Buffer.SCRATCH]
    fields = {name: value for name, value in head.items() if name not in ("name", "collective", "n")}
    fields["scratch_chunks"] = max([program.chunks[Buffer.SCRATCH], *ends])
    return Schedule.from_steps(head["name"], head["collective"], steps, **fields)


def _head(algo: _Element, gpus: Sequence[_Element]) -> _Program:
    n, collective = len(gpus), algo.word("coll", COLLECTIVES)
    in_place = algo.word("inplace", _FLAGS, "0")
    if in_place and collective not in ("all_reduce", "all_gather"):
        raise algo.refused(f"an in-place {collective} writes its input, which a schedule must not")
    row = TABLE[collective]
    blocks = [row.blocks(buffer, n) for buffer in (Buffer.IN, Buffer.OUT)]
    parts, rest = divmod(algo.whole("nchunksperloop", 1, MOST_CHUNKS), max(blocks))
    if rest or not parts:
        raise algo.refused(
            f"nchunksperloop is {parts * max(blocks) + rest}; take a multiple of {max(blocks)}"
        )
    scratch = max(gpu.whole("s_chunks", 0, MOST_CHUNKS, 0) for gpu in gpus)
    fields = {
        "name": algo.text("name"),
        "collective": collective,
        "n": n,
        "parts": parts,
        "root": algo.whole("root", 0, n - 1, 0),
        "scratch_chunks": scratch,
        "deterministic": algo.word("deterministic", _FLAGS, "1"),
        "in_place": algo.word("overlaps", _FLAGS, "1"),
        "params": _params(algo),
    }
    return _Program(
        check_head("msccl: algo", fields), in_place, (blocks[0] * parts, blocks[1] * parts, scratch)
    )


def _params(algo: _Element) -> Any:
    text = algo.text("params", "{}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise algo.refused(f"params is {said(text)}: {error}; take a JSON object") from error


class _Gpu:
    """Reads the thread blocks of one rank."""

    def __init__(self, rank: int, gpu: _Element, program: _Program) -> None:
        self.rank, self.program = rank, program
        self.n, self.parts = program.head["n"], program.head["parts"]
        chunks = [gpu.whole(f"{letter}_chunks", 0, MOST_CHUNKS, 0) for letter in "io"]
        self.gathers = chunks[0] < chunks[1]
        self.blocks = gpu.numbered("tb")
        self.steps = {id_: block.parts("step") for id_, block in self.blocks.items()}
        self.spare = (
            -(-program.chunks[Buffer.SCRATCH] // self.parts) * self.parts
        )  # nobody's yet from here on
        self.index = 0

    def read(self) -> list[list[_Line]]:
        """The lines of each block."""
        return [self._block(block, self.steps[id_]) for id_, block in self.blocks.items()]

    def _block(self, block: _Element, steps: Sequence[_Element]) -> list[_Line]:
        peers = {end: block.whole(end, -1, self.n - 1) for end in ("send", "recv")}
        for end, peer in peers.items():
            if peer == self.rank:
                raise block.refused(f"{end} is {peer}, the gpu itself; take another, or -1 for none")
        channel = block.whole("chan", 0, _LIMIT)
        lines = []
        for number, step in enumerate(steps):
            if step.whole("s", 0, _LIMIT, number) != number:
                raise step.refused(f"it stands where step {number} should; give the steps in order")
            lines.append(_Line(self._line(step, peers, channel), self._wait(step)))
        return lines

    def _line(self, step: _Element, peers: Mapping[str, int], channel: int) -> list[_Part]:
        kinds = step.word("type", _KINDS)
        left, round_ = step.word("left", _FLAGS, "0"), step.whole("round", 0, _LIMIT, -1)
        spans: dict[str | None, Span] = {}
        for end in dict.fromkeys(end for _, *ends in kinds for end in ends if end is not None):
            spans[end] = self._keep(spans["src"]) if end == "spare" else self._span(step, end)
        made = []
        for kind, src, dst in kinds:
            peer, on = (peers[_END[kind]], channel) if kind in _END else (-1, 0)
            if kind in _END and peer < 0:
                raise step.refused(f"type is {step.text('type')}, but its tb has {_END[kind]} -1, for nobody")
            swaps = left and kind in (Kind.RECV_REDUCE, Kind.REDUCE)
            new = Step(kind, 0, peer, spans.get(src), spans.get(dst), on, swaps)
            made.append(_Part(new, step.whole("index", 0, _LIMIT, self.index), round_))
            self.index += 1
        return made

    def _span(self, step: _Element, end: str) -> Span:
        buffer, offset = step.word(f"{end}buf", BUFFERS), step.whole(f"{end}off", 0, MOST_CHUNKS)
        count = step.whole("cnt", 1, MOST_CHUNKS)
        if self.program.in_place and buffer == Buffer.IN:
            buffer, offset = Buffer.OUT, offset + (self.rank * self.parts if self.gathers else 0)
        has = self.program.chunks[buffer]
        if offset + count > has:
            reach = f"{end}off and cnt reach to chunk {offset + count}"
            raise step.refused(f"{reach}, but {buffer.name} has {has} chunks")
        return Span(buffer, offset, count)

    def _keep(self, like: Span) -> Span:
        """A new place in SCRATCH, of chunks as large as those of a span."""
        kept = Span(Buffer.SCRATCH, self.spare + like.chunk % self.parts, like.chunks)
        self.spare += -(-(self.parts + like.chunks) // self.parts) * self.parts
        return kept

    def _wait(self, step: _Element) -> tuple[tuple[int, int], ...]:
        """What a step waits for, as the places of a block and of a step in it."""
        block, place = step.whole("depid", -1, _LIMIT), step.whole("deps", -1, _LIMIT)
        if block < 0:
            return ()
        if block not in self.steps or not 0 <= place < len(self.steps[block]):
            raise step.refused(f"it waits for step {place} (deps) of tb {block} (depid), which is not there")
        return ((list(self.steps).index(block), place),)


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
        return step.kind != Kind.RECV or not any(_meet(other.src, step.dst) for other in done)


def _meet(a: Span | None, b: Span | None) -> bool:
    """Whether two spans share a chunk."""
    if a is None or b is None or a.buffer != b.buffer:
        return False
    return a.chunk < b.chunk + b.chunks and b.chunk < a.chunk + a.chunks

"""Plays a schedule message by message, with real waiting and chance deciding what happens next.

The other opinion: it shares nothing with `flow.py` and `symbols.py` but the schedule, is plain Python, and
adds up integers. `verify` must say what this says; mutation tests hold it to that. For small schedules.

A rank in a round has all the round's messages under way together, each in several acts (a send reads its
chunks; the message enters the connection; a receive takes it and writes), of which any that can happen may be
next.
"""

from __future__ import annotations

import collections
import dataclasses
import random

from pynccl.collectives.schedule import COLLECTIVES, Buffer, Kind, Schedule, Span, Step

__all__ = ["Outcome", "simulate"]

_FIELD_BITS = 16  # room to count each contribution up to 65535 times

# A value: the sum of the contributions' digits, and a number for the way in which it was reduced.
Value = tuple[int, int]
Connection = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a schedule ended: "" is well, otherwise what went wrong. `out`: the values in OUT, if it ended."""

    wrong: str
    out: dict[tuple[int, int], Value]


class _Wrong(Exception):
    pass


def simulate(schedule: Schedule, *, slots: int = 1, seed: int = 0, in_place: bool = False) -> Outcome:
    """Play a schedule with connections of `slots` messages (0: rendezvous); `seed` gives the order."""
    try:
        player = _Player(schedule, slots, random.Random(seed), in_place)
        player.play()
        return Outcome("", player.result())
    except (_Wrong, IndexError, KeyError) as error:
        return Outcome(str(error) or repr(error), {})


class _Rank:
    """One rank's progress: the round it is in, and what of its messages is still to be done."""

    def __init__(self, steps: list[Step]) -> None:
        self.rounds: list[list[Step]] = []
        number = None
        for step in steps:
            if number is not None and step.round < number:
                raise _Wrong("rounds go back")
            if step.round != number:
                self.rounds.append([])
            number = step.round
            self.rounds[-1].append(step)
        self.at = -1
        self.local: list[tuple[Step, list[Value] | None]] = []
        # For each connection the round's messages in order: [step, the chunks once read or arrived].
        self.sending: dict[Connection, collections.deque[tuple[Step, list[Value]]]] = {}
        self.unread: list[tuple[Step, list[Value]]] = []
        self.receiving: dict[Connection, collections.deque[int]] = {}


class _Player:
    def __init__(self, schedule: Schedule, slots: int, chance: random.Random, in_place: bool) -> None:
        self.schedule, self.slots, self.chance = schedule, slots, chance
        self.collective = COLLECTIVES[schedule.collective]
        self.in_place = in_place and self.collective.in_place is not None
        self.memory: dict[tuple[int, int, int], Value] = {}
        self.ways: dict[tuple[int, int], int] = {}
        in_chunks = schedule.chunks(Buffer.IN)
        for rank in range(schedule.n):
            for chunk in range(in_chunks if schedule.has(Buffer.IN, rank) else 0):
                index = rank * in_chunks + chunk
                self.memory[self.place(rank, Buffer.IN, chunk)] = (1 << (_FIELD_BITS * index), -1 - index)
        self.ranks = [_Rank(steps) for steps in schedule]
        self.queues: dict[Connection, collections.deque[list[Value]]] = collections.defaultdict(
            collections.deque
        )

    def place(self, rank: int, buffer: Buffer, chunk: int) -> tuple[int, int, int]:
        """The memory of a chunk; a chunk outside its buffer is an error."""
        s = self.schedule
        if not 0 <= chunk < s.chunks(buffer) or not s.has(buffer, rank):
            raise _Wrong(f"rank {rank} has no {buffer.name}[{chunk}]")
        overlap = self.in_place and buffer != Buffer.SCRATCH
        if overlap and (self.collective.only_root is None or rank == s.root):
            assert self.collective.in_place is not None
            mine, other = (rank if b == "r" else int(b) for b in self.collective.in_place)
            block, part = divmod(chunk, s.parts)
            if buffer == Buffer.IN and block == mine:
                return rank, Buffer.OUT, other * s.parts + part
        return rank, buffer, chunk

    def read(self, rank: int, span: Span | None) -> list[Value]:
        """The values of a span."""
        span = self.given(rank, span)
        return [self.memory[self.place(rank, span.buffer, span.chunk + i)] for i in range(span.chunks)]

    def given(self, rank: int, span: Span | None) -> Span:
        """The span, which a step may lack."""
        if span is None:
            raise _Wrong(f"a step of rank {rank} lacks a span")
        return span

    def write(self, rank: int, span: Span | None, values: list[Value]) -> None:
        """Put values in a span of as many chunks."""
        span = self.given(rank, span)
        if span.buffer == Buffer.IN:
            raise _Wrong(f"rank {rank} writes IN")
        for i, value in enumerate(values):
            self.memory[self.place(rank, span.buffer, span.chunk + i)] = value

    def play(self) -> None:
        """Let what can happen happen until nothing can; an error if somebody still waits."""
        for rank in range(self.schedule.n):
            self.advance(rank)
        while acts := self.possible():
            self.act(*self.chance.choice(acts))
        waiting = [r for r, state in enumerate(self.ranks) if state.at < len(state.rounds)]
        if waiting:
            raise _Wrong(f"ranks {waiting} wait for ever with {self.slots} slots")
        if any(self.queues.values()):
            raise _Wrong("a connection is not empty at the end")

    def possible(self) -> list[tuple[str, int, Connection | int]]:
        """All acts that could be next."""
        acts: list[tuple[str, int, Connection | int]] = []
        for rank, state in enumerate(self.ranks):
            acts += [("read", rank, i) for i in range(len(state.unread))]
            for connection, messages in state.sending.items():
                if messages and messages[0][1]:  # read, and next in its connection
                    room = len(self.queues[connection]) < self.slots
                    target = self.ranks[connection[1]]
                    if room or (self.slots == 0 and target.receiving.get(connection)):
                        acts.append(("send", rank, connection))
            for connection, waiting in state.receiving.items():
                if waiting and self.queues[connection]:
                    acts.append(("receive", rank, connection))
        return acts

    def act(self, what: str, rank: int, which: Connection | int) -> None:
        """Do one act, and let the rank go on if that ended its round."""
        state = self.ranks[rank]
        if what == "read":
            step, chunks = state.unread.pop(int(which))  # type: ignore[arg-type]
            chunks += self.read(rank, step.src)
        elif what == "send":
            assert isinstance(which, tuple)
            values = state.sending[which].popleft()[1]
            if self.slots == 0:  # hand it over at once
                self.arrive(which, values)
                self.end_round(which[1])
            else:
                self.queues[which].append(values)
        else:
            assert isinstance(which, tuple)
            self.arrive(which, self.queues[which].popleft())
        self.end_round(rank)

    def arrive(self, connection: Connection, values: list[Value]) -> None:
        """A message reaches the first receive that waits for it."""
        state = self.ranks[connection[1]]
        index = state.receiving[connection].popleft()
        step = state.local[index][0]
        expected = self.given(connection[1], step.dst).chunks
        if len(values) != expected:
            raise _Wrong(f"rank {connection[1]} receives {len(values)} chunks where it expects {expected}")
        if step.kind == Kind.RECV:
            self.write(connection[1], step.dst, values)
        state.local[index] = (step, values)

    def end_round(self, rank: int) -> None:
        """If the rank's messages have come and gone: reduce and copy, and begin its next round."""
        state = self.ranks[rank]
        if any(state.sending.values()) or any(state.receiving.values()) or state.at >= len(state.rounds):
            return
        for step, message in state.local:
            self.local(rank, step, message)
        self.advance(rank)

    def advance(self, rank: int) -> None:
        """Begin the rank's next round."""
        state = self.ranks[rank]
        state.at += 1
        state.local, state.sending, state.receiving = [], {}, {}
        if state.at == len(state.rounds):
            return
        for step in state.rounds[state.at]:
            if step.kind <= Kind.RECV_REDUCE and (step.peer == rank or not 0 <= step.peer < self.schedule.n):
                raise _Wrong(f"rank {rank} has no peer {step.peer}")
            if step.kind == Kind.SEND:
                entry: tuple[Step, list[Value]] = (step, [])
                state.sending.setdefault((rank, step.peer, step.channel), collections.deque()).append(entry)
                state.unread.append(entry)
                continue
            if step.kind <= Kind.RECV_REDUCE:
                waiting = state.receiving.setdefault((step.peer, rank, step.channel), collections.deque())
                waiting.append(len(state.local))
            state.local.append((step, None))
        self.end_round(rank)

    def local(self, rank: int, step: Step, message: list[Value] | None) -> None:
        """The part of a step after the round's messages."""
        if step.kind == Kind.RECV:
            return
        values = self.read(rank, step.src)
        if step.kind == Kind.REDUCE:
            values, message = self.read(rank, step.dst), values
        if step.kind != Kind.COPY:
            assert message is not None
            values = [self.reduce(x, y) for x, y in zip(values, message, strict=True)]
        self.write(rank, step.dst, values)

    def reduce(self, x: Value, y: Value) -> Value:
        """x op y; the way is the same for y op x."""
        if not self.collective.reduces:
            raise _Wrong("reduces where nothing is to be reduced")
        way = self.ways.setdefault((min(x[1], y[1]), max(x[1], y[1])), len(self.ways))
        return x[0] + y[0], way

    def result(self) -> dict[tuple[int, int], Value]:
        """The values in OUT of (rank, chunk); an error if they are not what the collective says."""
        s, out = self.schedule, {}
        for rank in range(s.n):
            for chunk in range(s.chunks(Buffer.OUT) if s.has(Buffer.OUT, rank) else 0):
                value = out[rank, chunk] = self.memory[self.place(rank, Buffer.OUT, chunk)]
                if value[0] != sum(1 << (_FIELD_BITS * index) for index in self.expected(rank, chunk)):
                    raise _Wrong(f"out[{chunk}] of rank {rank} is not the result")
                if s.deterministic and s.collective == "all_reduce" and value[1] != out[0, chunk][1]:
                    raise _Wrong(f"out[{chunk}] of rank {rank} is reduced otherwise than on rank 0")
        return out

    def expected(self, rank: int, chunk: int) -> list[int]:
        """The inputs, rank * in_chunks + chunk, that an output chunk is made of."""
        s = self.schedule
        in_chunks = s.chunks(Buffer.IN)
        block, part = divmod(chunk, s.parts)
        mine = rank * s.parts + part
        return {
            "all_reduce": lambda: [r * in_chunks + chunk for r in range(s.n)],
            "reduce": lambda: [r * in_chunks + chunk for r in range(s.n)],
            "reduce_scatter": lambda: [r * in_chunks + mine for r in range(s.n)],
            "all_gather": lambda: [block * in_chunks + part],
            "broadcast": lambda: [s.root * in_chunks + part],
            "all_to_all": lambda: [block * in_chunks + mine],
        }[s.collective]()

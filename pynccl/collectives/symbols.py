"""Runs a schedule on symbols instead of numbers: what each chunk holds in the end, and in which order
reduced.

A *value* is a number: first the inputs, `rank * in_chunks + chunk`, then one for each reduction made, with
the values of its two operands. For each value there is the set of ranks that have contributed (a bit each)
and the input chunk whose contributions they are. All ranks of a level go at once, in NumPy. Owns values; the
order comes from `flow.py`, what they should be from `verify.py`.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pynccl.collectives.fault import Fault
from pynccl.collectives.flow import Flow
from pynccl.collectives.schedule import COLLECTIVES, Array, Buffer, Kind, Schedule
from pynccl.collectives.sorting import stable_order

__all__ = ["Cells", "Values", "bits", "execute"]

_MOST_BYTES = 4 << 30  # of the sets of contributions: ring all_reduce takes n^3/8 bytes
_UNDEFINED = -1


class Cells:
    """Where the chunks are: one number for each chunk of each rank's buffers.

    In place, IN and OUT share cells as NCCL's in-place form says: the smaller of the two lies inside the
    larger.
    """

    def __init__(self, schedule: Schedule, in_place: bool) -> None:
        n, parts = schedule.n, schedule.parts
        lengths = np.array([schedule.chunks(buffer) for buffer in Buffer], dtype=np.int64)
        self.width = int(lengths.sum())
        self.count = self.width * n
        ranks = np.arange(n, dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        self.base = ranks[:, None] * self.width + starts  # [rank, buffer]
        row = COLLECTIVES[schedule.collective]
        if in_place and row.in_place is not None:
            blocks = [ranks if block == "r" else np.full(n, block) for block in row.in_place]
            inner = Buffer.IN if schedule.in_blocks < schedule.out_blocks else Buffer.OUT
            outer = Buffer.OUT if inner == Buffer.IN else Buffer.IN
            shared = self.base[:, outer] + blocks[outer] * parts
            both = ranks == schedule.root if row.only_root is not None else np.ones(n, dtype=bool)
            self.base[both, inner] = shared[both]

    def of(self, rank: Array, buffer: Array, chunk: Array) -> Array:
        """The cells of chunks, and something harmless where `buffer` is -1."""
        return self.base[rank, buffer] + chunk


@dataclasses.dataclass(frozen=True, eq=False)
class Values:
    """What a schedule leaves behind. `out[rank, chunk]`: the value in OUT, -1 if nothing was ever put there.

    `left`, `right`: the operands of values from `inputs` on, and `batches` (from, to) those that were made at
    once. `labels`: the input chunk that a value is about. `sets`: who contributed to it, see `set_rows`.
    `in_order`: whether it reduces consecutive ranks, from rank `low` on, from left to right.
    """

    out: Array
    inputs: int
    left: Array
    right: Array
    batches: list[tuple[int, int]]
    sets: Array
    labels: Array
    low: Array
    in_order: Array

    def set_rows(self, values: Array, in_chunks: int, n: int) -> Array:
        """The rows in `sets` of values: a row for each rank first, for the inputs, then one a reduction."""
        return np.where(values < self.inputs, values // in_chunks, values - self.inputs + n)


class Program:
    """What to do in which order: the chunks of all steps, each a *unit*, sorted so that many go at once.

    `order`: the units in order of execution; `batches`: the (from, to, phase) in it that go at once. Phase 0
    are the sends of a level, 1 the receives, 2 and on the other steps of a round, one at a time.
    """

    def __init__(self, schedule: Schedule, graph: Flow) -> None:
        self.schedule, self.graph = schedule, graph
        kinds, chunks = schedule.columns["kind"], schedule.columns["chunks"].astype(np.int64)
        rows = np.repeat(np.arange(len(chunks)), chunks)
        phase, level = self._phases(kinds)
        phases = int(phase.max(initial=0)) + 1
        key = (level * phases + phase)[rows]
        self.order = stable_order(key)
        key = key[self.order]
        cuts = [0, *(np.flatnonzero(key[1:] != key[:-1]) + 1).tolist(), len(key)] if len(key) else [0]
        where = (key[cuts[:-1]] % phases).tolist()
        self.batches: list[tuple[int, int, int]] = list(zip(cuts[:-1], cuts[1:], where, strict=True))
        begins = np.cumsum(chunks) - chunks
        # From here on all is in order of execution.
        self.row = rows[self.order]
        self.within = self.order - begins[self.row]
        self.kind = kinds[self.row]
        self.left = schedule.columns["left"][self.row]
        self.node = graph.node[self.row]
        self.reduces = (self.kind == Kind.RECV_REDUCE) | (self.kind == Kind.REDUCE)
        lengths = chunks[graph.recvs]
        self.messages = int(lengths.sum())
        message = np.zeros(len(chunks), dtype=np.int64)
        message[graph.recvs] = np.cumsum(lengths) - lengths
        message[graph.sends] = message[graph.recvs]
        self.message = message[self.row] + self.within

    def _phases(self, kinds: Array) -> tuple[Array, Array]:
        """The phase and the level of each row."""
        graph = self.graph
        sends = kinds == Kind.SEND
        local = kinds >= Kind.RECV_REDUCE
        before: Array = np.cumsum(local) - local
        node_first = np.searchsorted(graph.node, np.arange(len(graph.node_rank)))
        place: Array = before - before[node_first][graph.node]
        phase = np.where(sends, 0, np.where(kinds == Kind.RECV, 1, 2 + place))
        return phase, np.where(sends, graph.start[graph.node], graph.finish[graph.node])


def execute(program: Program, *, in_place: bool) -> Values:
    """Run on symbols; a `Fault` at the first read of nothing, second contribution, or clash in a round."""
    return _Machine(program, in_place).run()


class _Machine:
    """Each unit as `state[target] = state[first]` or `state[first] op state[second]`.

    Messages have cells of their own behind those of the buffers, so that a send and a receive are copies.
    """

    def __init__(self, program: Program, in_place: bool) -> None:
        self.program, self.in_place = program, in_place
        self.schedule = program.schedule
        self.cells = Cells(self.schedule, in_place)
        self.in_chunks = self.schedule.chunks(Buffer.IN)
        self._places()
        self._tables()

    def _places(self) -> None:
        p, columns = self.program, self.schedule.columns
        ranks = self.schedule.ranks
        source, target = (
            self.cells.of(ranks, columns[f"{end}_buffer"], columns[f"{end}_chunk"])[p.row] + p.within
            for end in ("src", "dst")
        )
        message = p.message + self.cells.count
        self.first = np.where(p.kind == Kind.RECV, message, np.where(p.kind == Kind.REDUCE, target, source))
        self.second = np.where(p.kind == Kind.RECV_REDUCE, message, source)
        self.target = np.where(p.kind == Kind.SEND, message, target)

    def _tables(self) -> None:
        schedule, n = self.schedule, self.schedule.n
        ranks = np.arange(n)
        self.inputs = n * self.in_chunks
        reductions = int(self.program.reduces.sum())
        words = (n + 63) // 64
        if reductions * words * 8 > _MOST_BYTES:
            raise ValueError(
                f"verify: {schedule!r} makes {reductions} reductions of {n} contributions, more than fit; "
                "verify it for fewer ranks"
            )
        self.sets = np.zeros((n + reductions, words), dtype=np.uint64)
        self.sets[ranks, ranks // 64] = np.uint64(1) << (ranks % 64).astype(np.uint64)
        self.operands = np.zeros((2, reductions), dtype=np.int64)
        self.labels = np.concatenate(
            [np.tile(np.arange(self.in_chunks), n), np.zeros(reductions, dtype=np.int64)]
        )
        origin = np.repeat(ranks, self.in_chunks)
        empty = np.zeros(reductions, dtype=np.int64)
        self.low, self.high = np.concatenate([origin, empty]), np.concatenate([origin, empty])
        self.in_order = np.concatenate([np.ones(self.inputs, bool), np.zeros(reductions, bool)])
        self.made = 0
        self.made_by: list[tuple[int, int]] = []
        self.state = np.full(self.cells.count + self.program.messages, _UNDEFINED, dtype=np.int64)
        having = ranks if schedule.has(Buffer.IN, -1) else np.array([schedule.root])
        inputs = having[:, None] * self.in_chunks + np.arange(self.in_chunks)
        self.state[self.cells.base[having, Buffer.IN][:, None] + np.arange(self.in_chunks)] = inputs
        self.sending = np.full(self.cells.count, -1, dtype=np.int64)  # the last node that sent from a cell
        self.landing = np.full(self.cells.count, -1, dtype=np.int64)

    def run(self) -> Values:
        first, second, target = self.first, self.second, self.target
        node, left, reduces = self.program.node, self.program.left, self.program.reduces
        for begin, end, phase in self.program.batches:
            some = slice(begin, end)
            value = self._read(begin, first[some])
            if phase == 0:
                self.sending[first[some]] = node[some]
            elif phase == 1:
                self._refuse_clash(begin, target[some], node[some])
            else:
                which = np.flatnonzero(reduces[some])
                if len(which):
                    other = self._read(begin, second[some][which], which)
                    value[which] = self._reduce(begin, which, value[which], other, left[some][which])
            self.state[target[some]] = value
        out = self.cells.base[:, Buffer.OUT][:, None] + np.arange(self.schedule.chunks(Buffer.OUT))
        return Values(
            out=self.state[out],
            inputs=self.inputs,
            left=self.operands[0, : self.made],
            right=self.operands[1, : self.made],
            batches=self.made_by,
            sets=self.sets,
            labels=self.labels,
            low=self.low,
            in_order=self.in_order,
        )

    def _read(self, begin: int, places: Array, which: Array | None = None) -> Array:
        value = self.state[places]
        if value.size and value.min() < 0:
            bad = int(np.flatnonzero(value < 0)[0])
            raise self._fault(
                begin + (bad if which is None else int(which[bad])), "reads what has not been written"
            )
        return value

    def _refuse_clash(self, begin: int, target: Array, node: Array) -> None:
        clash = np.flatnonzero(self.sending[target] == node)
        if len(clash):
            raise self._fault(begin + int(clash[0]), "lands on what the same round sends")
        index = np.arange(len(target))
        self.landing[target] = index
        clash = np.flatnonzero(self.landing[target] != index)
        if len(clash):
            later = begin + int(self.landing[target[clash[0]]])
            raise self._fault(later, "lands where another receive of the round lands")

    def _reduce(self, begin: int, which: Array, x: Array, y: Array, left: Array) -> Array:
        """The values of x op y (y op x where `left`)."""
        n, inputs = self.schedule.n, self.inputs
        unlike = np.flatnonzero(self.labels[x] != self.labels[y])
        if len(unlike):
            i = int(unlike[0])
            raise self._fault(
                begin + int(which[i]),
                f"reduces input chunk {self.labels[x[i]]} with input chunk {self.labels[y[i]]}",
            )
        rows = [np.where(v < inputs, v // self.in_chunks, v - inputs + n) for v in (x, y)]
        mine, theirs = (self.sets.take(some, axis=0) for some in rows)
        both = mine & theirs
        if both.any():
            i = int(np.flatnonzero(both.any(axis=1))[0])
            rank = int(np.flatnonzero(bits(both[i], n))[0])
            raise self._fault(begin + int(which[i]), f"counts the contribution of rank {rank} twice")
        low, high = np.where(left, y, x), np.where(left, x, y)
        begin, end = self.made, self.made + len(x)
        np.bitwise_or(mine, theirs, out=self.sets[n + begin : n + end])
        self.operands[0, begin:end], self.operands[1, begin:end] = low, high
        made = slice(inputs + begin, inputs + end)
        self.labels[made] = self.labels[x]
        self.low[made], self.high[made] = self.low[low], self.high[high]
        self.in_order[made] = (
            self.in_order[low] & self.in_order[high] & (self.high[low] + 1 == self.low[high])
        )
        self.made_by.append((begin, end))
        self.made = end
        return np.arange(inputs + begin, inputs + end)

    def _fault(self, unit: int, what: str) -> Fault:
        row = int(self.program.row[unit])
        columns = self.schedule.columns[row]
        end = "src" if columns["kind"] == Kind.SEND else "dst"
        within = int(self.program.within[unit])
        where = " (in place)" if self.in_place else ""
        return Fault.at(self.schedule, row, f"{what}{where}", int(columns[f"{end}_chunk"]) + within)


def bits(words: Array, n: int) -> Array:
    """The set as an array of `n` booleans."""
    ranks = np.arange(n)
    return ((words[ranks // 64] >> (ranks % 64).astype(np.uint64)) & np.uint64(1)).astype(bool)

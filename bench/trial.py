"""One placement of one row on one rank: the calls over rotating buffers, their time, and the check.

This file owns what a time means and how a result is judged. What the operation is comes from
`collectives.py`, memory and clocks from `devices.py`, the other ranks' numbers from the rank it belongs to.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import pynccl
from bench import check
from bench.collectives import Case
from bench.devices import POISON
from bench.format import IterationStats, Measurement

if TYPE_CHECKING:
    from bench.ranks import Rank

__all__ = ["Trial", "rotation_bytes"]

LEAST_ROTATION = 32 << 20  # bytes: nccl-tests' default -e, and the size of a large last-level cache
APART = 128  # bytes: pieces share no cache line, nor a pair of lines that a CPU fetches together
GUARD = 64  # bytes behind a result that a check looks at


def rotation_bytes(max_bytes: int, calls: int, hot: bool) -> int:
    """Bytes of buffer in which the calls of a measurement take turns, each on a piece of its own if it fits.

    nccl-tests rotates through the largest size of the sweep. Where that is small, all calls would find one
    cached piece, so there the buffers are longer than the largest size.
    """
    return max_bytes if hot else max(max_bytes, min(LEAST_ROTATION, calls * _whole_lines(max_bytes)))


class Trial:
    """The calls, begun again at the first piece when each has had its turn (`--hot 1`: one piece, always)."""

    def __init__(self, rank: Rank, case: Case, handle: Any, size: int, in_place: bool) -> None:
        self.rank, self.case, self.options, self.size = rank, case, rank.options, size
        self.device, self.comm = rank.device, rank.comm
        self.dtype = check.DTYPE[case.dtype]
        self.layout = rank.collective.layout(case, size // case.itemsize)
        self._in_place, self._handle = in_place, handle
        stride = _whole_lines(max(self.layout.send, self.layout.recv) * case.itemsize)
        pieces = 1
        if stride and not self.options.hot:
            pieces = min(max(1, rank.rotation // stride), self.options.iterations * self.options.aggregated)
        self._calls = [self._call(piece * stride) for piece in range(pieces)]
        self._next = 0

    @property
    def pieces(self) -> int:
        """Calls until the first piece has its turn again."""
        return len(self._calls)

    def next_call(self) -> Callable[[], Any]:
        call = self._calls[self._next]
        self._next = (self._next + 1) % len(self._calls)
        return call

    def measure(self) -> Measurement:
        """Time on all ranks, then check on all ranks."""
        with self.rank.limited(f"a measurement at {self.size} bytes"):
            self.next_call()()
            self._finish()
            self._next = 0
            self.rank.barrier()
            timed = self._graph if self.options.graph_launches else self._time
            seconds, launch_seconds, marks = timed()
        per_rank = self.rank.gather_numbers(seconds)
        average = (lambda times: times[0], statistics.fmean, min, max)[self.options.average]
        mean = average(per_rank)
        algbw = self.rank.collective.bandwidth.moved(self.case, self.layout) / mean / 1e9
        iterations = self._iterations(marks) if self.options.per_iteration else None
        self.rank.barrier()
        checked = self.options.checks and (self.rank.collective.checked_in_place or not self._in_place)
        return Measurement(
            seconds=launch_seconds if self.options.cpu_time else mean,
            algbw=algbw,
            busbw=algbw * self.rank.collective.bandwidth.factor(self.case.ranks),
            wrong=self._check() if checked else None,
            iterations=iterations,
        )

    # ---- calls and their arrays

    def _call(self, start: int) -> Callable[[], Any]:
        """The operation on the piece that begins at byte `start`."""
        x, out = self._arrays(start)
        return self.rank.collective.call(
            self.comm,
            self.case,
            self.layout,
            x,
            None if out is x else out,
            self._handle,
            self.device.stream,
        )

    def _arrays(self, start: int) -> tuple[Any, Any]:
        """What is sent and what is received: the same array where both are the same memory."""
        layout, rank = self.layout, self.comm.rank
        if not self._in_place:
            sent = self._view(self.rank.send, start, 0, layout.send)
            return sent, self._view(self.rank.recv, start, 0, layout.recv)
        sent = self._view(self.rank.recv, start, layout.send_at * rank, layout.send)
        if layout.send == layout.recv and layout.send_at == layout.recv_at:
            return sent, sent
        return sent, self._view(self.rank.recv, start, layout.recv_at * rank, layout.recv)

    def _view(self, buffer: Any, start: int, first: int, count: int) -> Any:
        begin = start + (first + self.options.unalign) * self.dtype.itemsize
        return buffer[begin : begin + count * self.dtype.itemsize].view(self.dtype)

    # ---- time

    def _time(self) -> tuple[float, float, list[Any]]:
        """Seconds per operation until all are done, until all are launched; marks between iterations."""
        options, device = self.options, self.device
        marks, untimed = [], 0.0
        # Chosen before the clock starts: an iteration is the calls alone.
        rounds = [[self.next_call() for _ in range(options.aggregated)] for _ in range(options.iterations)]
        simple = not options.per_iteration and options.aggregated == 1 and not options.blocking
        singles = [calls[0] for calls in rounds] if simple else []
        begun = time.perf_counter()
        for call in singles:
            call()
        for calls in () if simple else rounds:
            if options.per_iteration:
                marks.append(device.mark())
            if options.aggregated > 1:
                with pynccl.group():
                    for call in calls:
                        call()
            else:
                calls[0]()
            if options.blocking:
                self._finish()
            if options.blocking in (1, 3):
                waiting = time.perf_counter()
                self.rank.barrier()
                untimed += time.perf_counter() - waiting if options.blocking == 3 else 0.0
        launched = time.perf_counter()
        if options.per_iteration:
            marks.append(device.mark())
        self._finish()
        done = time.perf_counter()
        operations = options.iterations * options.aggregated
        return (done - begun - untimed) / operations, (launched - begun - untimed) / operations, marks

    def _graph(self) -> tuple[float, float, list[Any]]:
        """The same operations captured as a CUDA graph, which is then launched `-G` times."""
        options, stream = self.options, self.device.stream

        def iterate() -> None:
            for _ in range(options.iterations):
                with pynccl.group() if options.aggregated > 1 else contextlib.nullcontext():
                    for _ in range(options.aggregated):
                        self.next_call()()

        graph = self._captured(iterate)
        self.rank.barrier()
        begun = time.perf_counter()
        for _ in range(options.graph_launches):
            graph.launch(stream)
        launched = time.perf_counter()
        self._finish()
        operations = options.iterations * options.aggregated * options.graph_launches
        return (time.perf_counter() - begun) / operations, (launched - begun) / operations, []

    def _captured(self, work: Callable[[], Any]) -> Any:
        self.device.stream.begin_capture()
        try:
            work()
        finally:  # an error in between is of more use than that of a stream which captures for ever
            graph = self.device.stream.end_capture()
        return graph

    def _iterations(self, marks: list[Any]) -> IterationStats:
        """Per iteration the slowest rank of each process, and of those the slowest."""
        mine = [self.device.seconds_between(a, b) for a, b in zip(marks, marks[1:], strict=False)]
        rows = self.rank.gather_rows(mine)
        threads = self.rank.sweep.threads
        processes = [
            tuple(max(column) for column in zip(*rows[first : first + threads], strict=True))
            for first in range(0, len(rows), threads)
        ]
        slowest = tuple(max(column) for column in zip(*processes, strict=True))
        return IterationStats(slowest, self.options.per_iteration_skip, tuple(processes))

    # ---- check

    def _check(self) -> int:
        """Wrong elements on all ranks, in runs of their own: fresh inputs, poisoned receive buffers.

        Out of place, what is written over the input or just behind the result is wrong, too.
        """
        collective, case, rank = self.rank.collective, self.case, self.comm.rank
        sent, received = self._arrays(0)
        behind = self._behind()
        wrong = 0
        for _ in range(self.options.checks):
            seed = self.rank.next_seed()
            self.device.put(received.view("uint8"), np.uint8(POISON))
            self.device.put(behind.view("uint8"), np.uint8(POISON))
            given = collective.inputs(case, rank, seed, self.layout)
            self.device.put(sent, given)
            want = collective.expected(case, rank, seed, self.layout)
            untouched = self.device.get(received[want.size :]).copy()
            poisoned = self.device.get(behind).copy()
            with self.rank.limited(f"a check at {self.size} bytes"):
                if self.options.graph_launches:
                    self._captured(self._calls[0]).launch(self.device.stream)
                else:
                    self._calls[0]()
                self._finish()
            got = self.device.get(received)
            mine = check.count_wrong(got[: want.size], want, check.tolerance(case.op, case.dtype))
            mine += check.count_wrong(got[want.size :], untouched)
            mine += check.count_wrong(self.device.get(behind), poisoned)
            if not self._in_place:
                mine += check.count_wrong(self.device.get(sent), given)
            self.rank.bad_checks += mine > 0
            wrong += int(sum(self.rank.gather_numbers(mine)))
            if wrong:
                break
        return wrong

    def _behind(self) -> Any:
        """What follows the result, as far as the buffer goes on; nothing in place, where other blocks may."""
        size = self.dtype.itemsize
        begin = (self.options.unalign + self.layout.recv) * size
        room = 0 if self._in_place else min(GUARD, self.rank.recv.size - begin) // size * size
        return self.rank.recv[begin : begin + room].view(self.dtype)

    def _finish(self) -> None:
        self.rank.finish()


def _whole_lines(nbytes: int) -> int:
    return -(-nbytes // APART) * APART

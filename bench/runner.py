"""One sweep: ranks that meet, warm up, time, check and report, in nccl-tests' order.

`main` decides where it runs: as a rank of a launcher (or alone), or as the launcher of `-g` ranks. Each rank
is a thread with a communicator of its own (the main thread where there is one), and rank 0 has the report.
What is swept comes from `collectives.py`, where it runs from `devices.py`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import pynccl
from bench import check
from bench.collectives import COLLECTIVES, Case, Collective
from bench.devices import POISON, device_of, require_a_device
from bench.format import Device, IterationStats, Measurement, Report, Row
from bench.options import Options, UsageError, parse, refuse_what_cannot_apply
from bench.variables import first_device, group_of, least_bandwidth
from pynccl import environment
from pynccl.abi import Library, load
from pynccl.abi.types import NCCL_VERSION_CODE
from pynccl.launch import launch
from pynccl.rendezvous import find_launcher, place_from_environment, share

__all__ = ["main"]

STARTED = "PYNCCL_BENCH_STARTED"  # set for the ranks that we start ourselves: -g is spent on them
MEETING_SECONDS = 60.0


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    """Run the program of this name; its exit status: 0 good, 1 wrong data, too slow or an error, 2 misuse."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(program, arguments)
    try:
        library = load(options.library)
        refuse_what_cannot_apply(options, library.kind)
        require_a_device(library.kind)
        for variable in (first_device, least_bandwidth, lambda environment: group_of(0, environment)):
            variable(os.environ)  # an error now, and not on every rank
        if options.gpus > 1 and find_launcher() is None:
            return _start_ranks(program, options, arguments)
        return Sweep(COLLECTIVES[program], options, library, arguments).run()
    except UsageError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except (pynccl.NcclError, OSError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _start_ranks(program: str, options: Options, arguments: Sequence[str]) -> int:
    """This same command as `-g` processes of this machine, which find their places in the environment."""
    command = [sys.executable, "-m", f"bench.{program}", *arguments]
    return launch(
        command, options.gpus, output="raw", environ={"OMP_NUM_THREADS": "1", **os.environ, STARTED: "1"}
    )


class Sweep:
    """What the ranks of this process share: who they are, and how many there are in all."""

    def __init__(
        self, collective: Collective, options: Options, library: Library, arguments: Sequence[str]
    ) -> None:
        self.collective, self.options, self.library, self.arguments = collective, options, library, arguments
        self.place = place_from_environment()
        self.threads = options.threads * (1 if os.environ.get(STARTED) else options.gpus)
        self.size = self.place.size * self.threads
        self.local_size = self.place.local_size * self.threads
        self.ranks: list[Rank] = []
        self.report: Report | None = None
        self.first_error: BaseException | None = None
        self._lock = threading.Lock()

    def run(self) -> int:
        """The exit status. An error of any rank is raised here; the report is closed whatever happens."""
        if (
            self.place.rank == 0
        ):  # opened first: a file that cannot be written must not keep the others waiting
            command = [self.collective.program, *self.arguments]
            self.report = Report(self.collective.program, self.options, sys.stdout, arguments=command)
        try:
            own = bytes(pynccl.get_unique_id(self.library)) if self.place.rank == 0 else None
            uid = pynccl.UniqueId.from_bytes(share(own, self.place, timeout=MEETING_SECONDS))
            self.ranks = [Rank(self, thread, uid) for thread in range(self.threads)]
            self._run_ranks()
        except BaseException as error:
            if self.report:
                self.report.close(f"{type(error).__name__}: {error}")
            raise
        if self.report:
            self.report.close()
        return 0 if all(rank.good for rank in self.ranks) else 1

    def _run_ranks(self) -> None:
        if self.threads == 1:
            return self.ranks[0].run()
        threads = [threading.Thread(target=rank.run_as_thread) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.first_error:
            raise self.first_error

    def end_all(self, failed: Rank, error: BaseException) -> None:
        """One rank cannot go on: the other threads of this process must not wait for it."""
        with self._lock:
            if self.first_error:
                return  # what follows from it is not worth telling
            self.first_error = error
        for rank in self.ranks:
            if rank is not failed and rank.world is not None:
                rank.world.abort()


class Rank:
    """One rank: its device, communicators and buffers, and the sweep as it goes through it."""

    def __init__(self, sweep: Sweep, thread: int, uid: pynccl.UniqueId) -> None:
        self.sweep, self.options, self.collective = sweep, sweep.options, sweep.collective
        self.number = sweep.place.rank * sweep.threads + thread
        self.group = group_of(sweep.place.rank, os.environ)
        self.world: Any = None  # all ranks: barriers, times, counts
        self.comm: Any = None  # the ranks of this group, whose operations are timed; usually the same
        self.good = False
        self._uid = uid
        self._local = sweep.place.local_rank * sweep.threads + thread
        self._checks = self._bad_checks = 0

    def run_as_thread(self) -> None:
        try:
            self.run()
        except BaseException as error:  # not swallowed: the main thread raises it
            self.sweep.end_all(self, error)

    def run(self) -> None:
        """Everything, from the communicator to the last line. Sets `good`."""
        with contextlib.ExitStack() as stack:
            self._open(stack)
            self._run(self.sweep.report if self.number == 0 else None)

    # ---- setting up

    def _open(self, stack: contextlib.ExitStack) -> None:
        options, library = self.options, self.sweep.library
        index = first_device(os.environ) + self._local
        self.device = device_of(library.kind, index, options.null_stream)
        memory_before = self.device.used_memory()
        self.world = stack.enter_context(
            pynccl.Communicator(
                self.sweep.size,
                self._uid,
                self.number,
                library=library,
                timeout=options.timeout or None,
                config=None if options.cta_policy is None else {"CTAPolicy": options.cta_policy},
            )
        )
        self.comm = self.world
        if any(group != 0 for group in self._gather_numbers(self.group)):
            split = self.world.split(self.group, key=self.number)
            assert split is not None
            self.comm = stack.enter_context(split)
        self._memory = [self.device.used_memory() - memory_before]
        self._reduce_sizes_to_memory()
        nbytes = self.options.max_bytes + 16 * self.options.unalign
        self.send, self.recv = (
            self.device.allocate(self.comm, nbytes, options.buffers == "mapped") for _ in range(2)
        )
        for buffer in (self.send, self.recv):
            if options.register == 1:
                stack.enter_context(self.comm.register(buffer))
            elif options.register == 2:
                stack.enter_context(self.comm.register_window(buffer))
        self._memory.append(self.device.used_memory() - memory_before - self._memory[0])

    def _reduce_sizes_to_memory(self) -> None:
        """Both buffers, and the expected values where there is a check, must fit for all ranks."""
        here = self.device.memory() // (self.sweep.local_size if self.sweep.library.kind == "host" else 1)
        most = int(min(self._gather_numbers(here // (3 if self.options.checks else 2))))
        self._notes = []
        if self.options.max_bytes > most:
            self._notes = ["#", f"# Reducing maxBytes to {most} due to memory limitation"]
            fields = {**vars(self.options), "max_bytes": most, "min_bytes": min(self.options.min_bytes, most)}
            self.options = Options(**fields)

    # ---- the sweep

    def _run(self, report: Report | None) -> None:
        self._introduce(report)
        for dtype in self._dtypes():
            for buffer in (self.send, self.recv):
                self.device.fill_with_ones(buffer, dtype)
            for op in self.options.ops if self.collective.reduces else ("none",):
                for root in self._roots():
                    with self._operation(op, dtype) as handle:
                        self._sweep_sizes(report, Case(op, dtype, root, self.comm.size), handle)
        self._conclude(report)

    def _introduce(self, report: Report | None) -> None:
        here = {
            "group": self.group,
            "pid": os.getpid(),
            "host": socket.gethostname().split(".")[0],
            "device": self.device.index,
            "pci": list(self.device.pci),
            "name": self.device.name,
        }
        everyone = self.world.all_gather_object(here)
        if not report:
            return
        devices = [Device(rank, **{**one, "pci": tuple(one["pci"])}) for rank, one in enumerate(everyone)]
        library = self.sweep.library
        report.start(
            devices,
            headers=NCCL_VERSION_CODE,
            library=library.version,
            environment=_environment(),
            about={
                "version": pynccl.__version__,
                "library": library.kind,
                "path": library.path,
                "reason": library.reason,
                "ranks": self.sweep.size,
            },
            notes=self._notes,
        )

    def _dtypes(self) -> Sequence[str]:
        """What was asked for; of "all", those that every device has, with a word about the others."""
        usable = []
        for dtype in self.options.dtypes:
            reason = self.device.cannot(dtype)
            if not any(self._gather_numbers(bool(reason))):
                usable.append(dtype)
            elif self.options.dtype != "all":
                raise UsageError(f"-d {dtype}: {reason or 'another rank has no such type'}")
            elif self.number == 0:
                print(f"# Leaving out {dtype}: {reason or 'another rank has no such type'}", flush=True)
        return usable

    def _roots(self) -> Sequence[int]:
        if not self.collective.rooted:
            return (-1,)
        if self.options.root == "all":
            return range(self.comm.size)
        root = int(self.options.root)
        if root >= self.comm.size:
            raise UsageError(f"-r {root}: the ranks are 0 to {self.comm.size - 1}")
        return (root,)

    @contextlib.contextmanager
    def _operation(self, op: str, dtype: str) -> Any:
        """What the call takes as its `op`."""
        if op != "mulsum":
            yield op
            return
        scaled = self.comm.premul_sum(check.premul_scalar(self.comm.rank), check.DTYPE[dtype])
        try:
            yield scaled
        finally:
            if not self.comm.closed:
                scaled.destroy()

    def _sweep_sizes(self, report: Report | None, case: Case, handle: Any) -> None:
        self._barrier()
        for size in self.options.warmup_sizes():
            trial = Trial(self, case, handle, size, in_place=False)
            for _ in range(self.options.warmup):
                trial.next_call()()
            self._finish()
        cycles = 0
        while cycles == 0 or cycles != self.options.cycles:
            for size in self.options.sizes():
                self._row(report, case, handle, size)
            cycles += 1

    def _row(self, report: Report | None, case: Case, handle: Any, size: int) -> None:
        trials = {
            "out_of_place": Trial(self, case, handle, size, in_place=False),
            "in_place": Trial(self, case, handle, size, in_place=True),
        }
        layout = trials["in_place"].layout
        itemsize = check.DTYPE[case.dtype].itemsize
        if report:
            total = max(layout.send, layout.recv) * itemsize
            report.begin_row(Row(total, layout.count, case.dtype, case.op, case.root))
        for placement, trial in trials.items():
            measurement = trial.measure()
            if report:
                report.measured(placement, measurement)
        if report:
            report.end_row()

    def _conclude(self, report: Report | None) -> None:
        out_of_bounds = int(sum(self._gather_numbers(self._bad_checks)))
        good = not out_of_bounds
        if report:
            memory = _memory_text([*self._memory, 0]) if self.options.memory_report else None
            good = report.finish(out_of_bounds, least_bandwidth(os.environ), memory)
        self.good = bool(self._gather_numbers(good)[0])  # rank 0's word on the bandwidth is everyone's

    # ---- what ranks tell each other: through the communicator itself, as it is there

    def _gather_numbers(self, value: float) -> list[float]:
        """The number of every rank, in rank order, on every rank."""
        return [row[0] for row in self._gather_rows([value])]

    def _gather_rows(self, values: Sequence[float]) -> list[list[float]]:
        mine = np.array(values, np.float64)
        if self.sweep.library.kind != "host":
            mine = self.device.cupy.asarray(mine)  # type: ignore[union-attr]
        everyone = self.world.all_gather(mine)
        everyone = everyone if isinstance(everyone, np.ndarray) else everyone.get()
        return everyone.reshape(-1, len(values)).tolist()

    def _barrier(self) -> None:
        self.world.barrier()

    def _finish(self) -> None:
        self.device.finish(self.comm, self.options.timeout)


class Trial:
    """One placement of one row on one rank: the calls over rotating buffers, their time, and the check.

    The buffers rotate, as nccl-tests' do, so that a small size is not timed on one cached buffer for ever:
    call k uses the k-th piece of the whole buffer, and begins again at its end.
    """

    def __init__(self, rank: Rank, case: Case, handle: Any, size: int, in_place: bool) -> None:
        self.rank, self.case, self.options = rank, case, rank.options
        self.device, self.comm = rank.device, rank.comm
        self.dtype = check.DTYPE[case.dtype]
        self.layout = rank.collective.layout(size // self.dtype.itemsize, self.dtype.itemsize, case.ranks)
        self._in_place, self._handle = in_place, handle
        total = max(self.layout.send, self.layout.recv) * self.dtype.itemsize
        pieces = max(1, self.options.max_bytes // total) if total else 1
        wanted = self.options.iterations * self.options.aggregated
        self._calls = [self._call(piece * total) for piece in range(min(pieces, wanted))]
        self._next = 0

    def next_call(self) -> Callable[[], Any]:
        call = self._calls[self._next]
        self._next = (self._next + 1) % len(self._calls)
        return call

    def _call(self, start: int) -> Callable[[], Any]:
        x, out = self._arrays(start)
        case = self.case
        return self.rank.collective.call(
            self.comm, x, None if self._in_place else out, self._handle, case.root, self.device.stream
        )

    def _arrays(self, start: int) -> tuple[Any, Any]:
        """What is sent and what is received, of the piece that begins at byte `start`."""
        layout, rank = self.layout, self.comm.rank
        if not self._in_place:
            sent = self._view(self.rank.send, start, 0, layout.send)
            return sent, self._view(self.rank.recv, start, 0, layout.recv)
        sent = self._view(self.rank.recv, start, layout.send_at * rank, layout.send)
        return sent, self._view(self.rank.recv, start, layout.recv_at * rank, layout.recv)

    def _view(self, buffer: Any, start: int, first: int, count: int) -> Any:
        begin = start + (first + self.options.unalign) * self.dtype.itemsize
        return buffer[begin : begin + count * self.dtype.itemsize].view(self.dtype)

    def measure(self) -> Measurement:
        """Time on all ranks, then check on all ranks."""
        self.next_call()()
        self._finish()
        self._next = 0
        self.rank._barrier()
        seconds, launch_seconds, marks = self._graph() if self.options.graph_launches else self._time()
        per_rank = self.rank._gather_numbers(seconds)
        average = (lambda times: times[0], statistics.fmean, min, max)[self.options.average]
        mean = average(per_rank)
        moved = self.rank.collective.bytes_moved(self.layout.count, self.dtype.itemsize, self.case.ranks)
        algbw = moved / mean / 1e9
        iterations = self._iterations(marks) if self.options.per_iteration else None
        self.rank._barrier()
        return Measurement(
            seconds=launch_seconds if self.options.cpu_time else mean,
            algbw=algbw,
            busbw=algbw * self.rank.collective.bus_factor(self.case.ranks),
            wrong=self._check() if self.options.checks else None,
            iterations=iterations,
        )

    def _time(self) -> tuple[float, float, list[Any]]:
        """Seconds per operation until all are done, until all are launched; marks between iterations."""
        options, device = self.options, self.device
        marks, untimed = [], 0.0
        # Chosen before the clock starts: an iteration is the calls alone.
        rounds = [[self.next_call() for _ in range(options.aggregated)] for _ in range(options.iterations)]
        begun = time.perf_counter()
        for calls in rounds:
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
                self.rank._barrier()
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
        stream.begin_capture()
        for _ in range(options.iterations):
            with pynccl.group() if options.aggregated > 1 else contextlib.nullcontext():
                for _ in range(options.aggregated):
                    self.next_call()()
        graph = stream.end_capture()
        self.rank._barrier()
        begun = time.perf_counter()
        for _ in range(options.graph_launches):
            graph.launch(stream)
        launched = time.perf_counter()
        self._finish()
        operations = options.iterations * options.aggregated * options.graph_launches
        return (time.perf_counter() - begun) / operations, (launched - begun) / operations, []

    def _iterations(self, marks: list[Any]) -> IterationStats:
        """Per iteration the slowest rank of each process, and of those the slowest."""
        mine = [self.device.seconds_between(a, b) for a, b in zip(marks, marks[1:], strict=False)]
        rows = self.rank._gather_rows(mine)
        threads = self.rank.sweep.threads
        processes = [
            tuple(max(column) for column in zip(*rows[first : first + threads], strict=True))
            for first in range(0, len(rows), threads)
        ]
        slowest = tuple(max(column) for column in zip(*processes, strict=True))
        return IterationStats(slowest, self.options.per_iteration_skip, tuple(processes))

    def _check(self) -> int:
        """Wrong elements on all ranks, in runs of their own: fresh inputs, poisoned receive buffers."""
        collective, case, rank = self.rank.collective, self.case, self.comm.rank
        sent, received = self._arrays(0)
        wrong = 0
        for _ in range(self.options.checks):
            self.rank._checks += 1
            seed = self.rank._checks
            self.device.put(received.view("uint8"), np.uint8(POISON))
            self.device.put(sent, collective.inputs(case, rank, seed, self.layout))
            self._call(0)()
            self._finish()
            got = self.device.get(received)
            want = collective.expected(case, rank, seed, self.layout)
            mine = check.count_wrong(got, want, check.tolerance(case.op, case.dtype))
            self.rank._bad_checks += mine > 0
            wrong += int(sum(self.rank._gather_numbers(mine)))
            if wrong:
                break
        return wrong

    def _finish(self) -> None:
        self.rank._finish()


def _environment() -> dict[str, str]:
    """The variables that this project, NCCL and nccl-tests read; a secret's value never."""
    ours = {one["name"]: one["value"] for one in environment.report() if one["value"] is not None}
    nccl = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    return {**nccl, **{str(name): str(value) for name, value in ours.items()}}


def _memory_text(amounts: Sequence[int]) -> str:
    def shown(amount: float) -> str:
        unit = next(
            (unit for unit in ("B", "KB", "MB") if abs(amount) < 1024 or (amount := amount / 1024) < 0), "GB"
        )
        digits = 2 if abs(amount) < 10 else 1 if abs(amount) < 100 else 0
        return f"{amount:.{digits}f} {unit}"

    names = ("Initialization", "User-Allocated", "Collective")
    parts = [f"{name} {shown(amount)} " for name, amount in zip(names, amounts, strict=True)]
    return "| ".join([*parts, f"Total  {shown(sum(amounts))}"])

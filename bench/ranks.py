"""One rank of a sweep: its device, communicators and buffers, and its way through the rows.

Times and checks of a row are a `Trial`'s; what is printed is the report's, which only rank 0 has. What ranks
tell each other goes through the communicator under test itself, as it is there.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import pynccl
from bench import check
from bench.collectives import Case
from bench.devices import device_of
from bench.ending import limited
from bench.format import Device, Report, Row
from bench.options import Options, UsageError, refuse_root
from bench.traffic import GENERATED, traffic_from
from bench.trial import Trial, rotation_bytes
from bench.variables import first_device, group_of, least_bandwidth
from pynccl import environment
from pynccl.abi.types import NCCL_VERSION_CODE

if TYPE_CHECKING:
    from bench.runner import Sweep

__all__ = ["Rank"]


class Rank:
    """Made on every rank of a process; `run` (or `run_as_thread`) does everything."""

    def __init__(self, sweep: Sweep, thread: int, uid: pynccl.UniqueId) -> None:
        self.sweep, self.options, self.collective = sweep, sweep.options, sweep.collective
        self.number = sweep.place.rank * sweep.threads + thread
        self.group = group_of(sweep.place.rank, os.environ)
        self.world: Any = None  # all ranks: barriers, times, counts
        self.comm: Any = None  # the ranks of this group, whose operations are timed; usually the same
        self.good = False
        self._uid = uid
        self._local = sweep.place.local_rank * sweep.threads + thread
        self._seeds = self.bad_checks = 0
        self._touched: set[int] = set()  # roots whose calls have been over all of the buffers

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
        if any(group != 0 for group in self.gather_numbers(self.group)):
            split = self.world.split(self.group, key=self.number)
            assert split is not None
            self.comm = stack.enter_context(split)
        self._memory = [self.device.used_memory() - memory_before]
        self.traffic = GENERATED
        if self.collective.varies:
            self.traffic = traffic_from(os.environ, options, self.comm.size)
        self._reduce_sizes_to_memory()
        nbytes = self.rotation + 16 * self.options.unalign
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
        """Both buffers, and the expected values where there is a check, must fit for all ranks.

        Sets `options` to what fits, and `rotation`, the bytes of each buffer that calls rotate through.
        """
        here = self.device.memory() // (self.sweep.local_size if self.sweep.library.kind == "host" else 1)
        most = int(min(self.gather_numbers(here // (3 if self.options.checks else 2))))
        self._notes = []
        if self.options.max_bytes > most:
            self._notes = ["#", f"# Reducing maxBytes to {most} due to memory limitation"]
            fields = {**vars(self.options), "max_bytes": most, "min_bytes": min(self.options.min_bytes, most)}
            self.options = Options(**fields)
        calls = self.options.iterations * self.options.aggregated
        self.rotation = min(most, rotation_bytes(self.options.max_bytes, calls, self.options.hot))

    # ---- the sweep

    def _run(self, report: Report | None) -> None:
        self._introduce(report)
        if not self._refused(report):
            self._sweep(report)
        self._conclude(report)

    def _refused(self, report: Report | None) -> bool:
        """Whether a group of ranks is of a size that this program cannot use; rank 0 says so."""
        reason = self.collective.refuses(self.comm.size)
        refused = any(self.gather_numbers(bool(reason)))
        if refused and report:
            report.note(reason or "another group has a number of ranks that this program cannot use")
        return refused

    def _sweep(self, report: Report | None) -> None:
        for dtype in self._dtypes(report):
            for buffer in (self.send, self.recv):
                self.device.fill_with_ones(buffer, dtype)
            for op in self.options.ops if self.collective.reduces else ("none",):
                for root in self._roots():
                    with self._operation(op, dtype) as handle:
                        case = Case(op, dtype, root, self.comm.size, self.traffic)
                        self._sweep_sizes(report, case, handle)

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
                "ranks": self.comm.size,
            },
            notes=self._notes,
        )

    def _dtypes(self, report: Report | None) -> Sequence[str]:
        """What was asked for; of "all", those that every device has, with a word about the others."""
        usable = []
        for dtype in self.options.dtypes:
            reason = self.device.cannot(dtype)
            if not any(self.gather_numbers(bool(reason))):
                usable.append(dtype)
            elif self.options.dtype != "all":
                raise UsageError(f"-d {dtype}: {reason or 'another rank has no such type'}")
            elif report:
                report.note(f"# Leaving out {dtype}: {reason or 'another rank has no such type'}")
        return usable

    def _roots(self) -> Sequence[int]:
        if not self.collective.rooted:
            return (-1,)
        if self.options.root == "all":
            return range(self.comm.size)
        refuse_root(self.options, self.comm.size)
        return (int(self.options.root),)

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
        self.barrier()
        if case.root not in self._touched:
            self._touched.add(case.root)
            self._touch(case, handle)
        for size in self.options.warmup_sizes():
            trial = Trial(self, case, handle, size, in_place=False)
            with self.limited(f"the warm-up at {size} bytes"):
                for _ in range(self.options.warmup):
                    trial.next_call()()
                self.finish()
        cycles = 0
        while cycles == 0 or cycles != self.options.cycles:
            for size in self.options.sizes():
                self._row(report, case, handle, size)
            cycles += 1

    def _touch(self, case: Case, handle: Any) -> None:
        """Use every piece of the largest size once: a page that a rank first reads is mapped untimed."""
        for in_place in (False, True):
            trial = Trial(self, case, handle, self.options.max_bytes, in_place)
            with self.limited("the first use of the buffers"):
                for _ in range(trial.pieces):
                    trial.next_call()()
                self.finish()

    def _row(self, report: Report | None, case: Case, handle: Any, size: int) -> None:
        trials = {
            "out_of_place": Trial(self, case, handle, size, in_place=False),
            "in_place": Trial(self, case, handle, size, in_place=True),
        }
        layout = trials["in_place"].layout
        if report:
            total = max(layout.send, layout.recv) * case.itemsize
            report.begin_row(Row(total, layout.count, case.dtype, case.op, case.root))
        summary = []
        for placement, trial in trials.items():
            measurement = trial.measure()
            if report:
                report.measured(placement, measurement)
            if case.traffic.summary:
                whole = layout.count * case.ranks * case.itemsize
                summary += case.traffic.summary_lines(case.ranks, whole, measurement.seconds)
        if report:
            report.end_row()
            for line in summary:
                report.comment(line)

    def _conclude(self, report: Report | None) -> None:
        out_of_bounds = int(sum(self.gather_numbers(self.bad_checks)))
        good = not out_of_bounds
        if report:
            memory = _memory_text([*self._memory, 0]) if self.options.memory_report else None
            good = report.finish(out_of_bounds, least_bandwidth(os.environ), memory)
        self.good = bool(self.gather_numbers(good)[0])  # rank 0's word on the bandwidth is everyone's

    # ---- what trials use, too

    def next_seed(self) -> int:
        """The same on every rank, as all make the same checks."""
        self._seeds += 1
        return self._seeds

    def gather_numbers(self, value: float) -> list[float]:
        """The number of every rank, in rank order, on every rank."""
        return [row[0] for row in self.gather_rows([value])]

    def gather_rows(self, values: Sequence[float]) -> list[list[float]]:
        mine = np.array(values, np.float64)
        if self.sweep.library.kind != "host":
            mine = self.device.cupy.asarray(mine)  # type: ignore[union-attr]
        everyone = self.world.all_gather(mine)
        everyone = everyone if isinstance(everyone, np.ndarray) else everyone.get()
        return everyone.reshape(-1, len(values)).tolist()

    def barrier(self) -> None:
        self.world.barrier()

    def limited(self, what: str) -> contextlib.AbstractContextManager[None]:
        """-T: what is inside, named by `what`, may take so long, on every rank."""
        return limited(self.options.timeout, self.abort, what)

    def abort(self) -> None:
        """From any thread: what this rank waits for ends with an error."""
        for comm in {id(one): one for one in (self.comm, self.world) if one is not None}.values():
            comm.abort()

    def finish(self) -> None:
        self.device.finish(self.comm, self.options.timeout)


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

"""The program around a sweep: where it runs, the ranks of this process, and how it ends.

`main` decides whether this process is a rank of a launcher (or alone), or the launcher of `-g` ranks. Each
rank is a thread with a communicator of its own (the main thread where there is one); what it does is in
`ranks.py`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence

import pynccl
from bench.collectives import COLLECTIVES, Collective
from bench.devices import require_a_device
from bench.format import Report
from bench.options import Options, UsageError, parse, refuse_what_cannot_apply
from bench.ranks import Rank
from bench.traffic import traffic_from
from bench.variables import first_device, group_of, least_bandwidth
from pynccl.abi import Library, load
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
        starts_ranks = options.gpus > 1 and find_launcher() is None
        for variable in (first_device, least_bandwidth, lambda environment: group_of(0, environment)):
            variable(os.environ)  # an error now, and not on every rank
        if COLLECTIVES[program].varies:
            traffic_from(os.environ, options, options.gpus * options.threads if starts_ranks else 1)
        if starts_ranks:
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

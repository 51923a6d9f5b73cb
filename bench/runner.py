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
from bench.ending import (
    BROKEN_PIPE,
    INTERRUPTED,
    SAID,
    Terminated,
    discard_output,
    in_words,
    terminated_by_signals,
)
from bench.files import refuse_unwritable
from bench.format import Report
from bench.options import (
    Options,
    UsageError,
    parse,
    refuse_missing_library,
    refuse_root,
    refuse_what_cannot_apply,
)
from bench.ranks import Rank
from bench.traffic import traffic_from
from bench.variables import first_device, least_bandwidth, smallest_group
from pynccl.abi import Library, load
from pynccl.launch import launch
from pynccl.rendezvous import find_launcher, place_from_environment, share

__all__ = ["main"]

STARTED = "PYNCCL_BENCH_STARTED"  # set for the ranks that we start ourselves: -g is spent on them
MEETING_SECONDS = 60.0
ENDING_SECONDS = 5.0  # for the threads of a process that ends early


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    """Run the program of this name; its exit status.

    0 good, 1 wrong data, too slow or an error, 2 misuse, 128+s ended by signal s (SIGPIPE: its reader had
    gone).
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(program, arguments)
    try:
        with terminated_by_signals():
            return _run(program, options, arguments)
    except (UsageError, pynccl.LibraryNotFoundError) as error:
        # Ranks that we start have the same command line, and find the same.
        if STARTED not in os.environ or _is_first():
            print(f"{program}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        discard_output()
        return BROKEN_PIPE
    except pynccl.RemoteError as error:
        if _is_first():  # it writes the files; whose error it is has said it
            print(f"{program}: {error}", file=sys.stderr)
        _let_the_other_end_first()
        return 1
    except (pynccl.NcclError, OSError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except Terminated as end:
        return end.status


def _is_first() -> bool:
    """Is this alone, or the first process of a job?"""
    return find_launcher() is None or place_from_environment().rank == 0


def _let_the_other_end_first() -> None:
    """The status of a job that we start is that of the rank which ends first: of the one that failed.

    It is on its way out, and our launcher then ends this one with SIGTERM, whose handler is the default here.
    """
    if STARTED in os.environ:
        threading.Event().wait(ENDING_SECONDS)


def _run(program: str, options: Options, arguments: Sequence[str]) -> int:
    """Everything that can be seen to be wrong is said here, before any rank starts."""
    refuse_missing_library(options.library)
    library = load(options.library)
    refuse_what_cannot_apply(options, library.kind)
    require_a_device(library.kind)
    starts_ranks = options.gpus > 1 and find_launcher() is None
    processes = options.gpus if starts_ranks else place_from_environment().size
    threads = options.threads * (1 if starts_ranks or STARTED in os.environ else options.gpus)
    for variable in (first_device, least_bandwidth):
        variable(os.environ)
    group = smallest_group(processes, threads, os.environ)
    collective = COLLECTIVES[program]
    if collective.rooted:
        refuse_root(options, group)
    if collective.varies:
        traffic_from(os.environ, options, group)
    if STARTED not in os.environ:
        refuse_unwritable("-J", options.output)
        refuse_unwritable("--csv", options.csv)
    if starts_ranks:
        return _start_ranks(program, options, arguments)
    return Sweep(collective, options, library, arguments).run()


def _start_ranks(program: str, options: Options, arguments: Sequence[str]) -> int:
    """This same command as `-g` processes of this machine, which find their places in the environment."""
    command = [sys.executable, "-m", f"bench.{program}", *arguments]
    environ = {"OMP_NUM_THREADS": "1", **os.environ, STARTED: "1"}
    return launch(command, options.gpus, output="raw", environ=environ, silent=SAID)


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
        if self.place.rank == 0:
            # Opened first: a file that cannot be written must not keep the others waiting.
            command = [self.collective.program, *self.arguments]
            self.report = Report(self.collective.program, self.options, sys.stdout, arguments=command)
        try:
            own = bytes(pynccl.get_unique_id(self.library)) if self.place.rank == 0 else None
            uid = pynccl.UniqueId.from_bytes(share(own, self.place, timeout=MEETING_SECONDS))
            self.ranks = [Rank(self, thread, uid) for thread in range(self.threads)]
            self._run_ranks()
        except BaseException as error:
            if self.report:
                self.report.close(in_words(error))
            raise
        if self.report:
            self.report.close()
        return 0 if all(rank.good for rank in self.ranks) else 1

    def _run_ranks(self) -> None:
        if self.threads == 1:
            return self.ranks[0].run()
        threads = [threading.Thread(target=rank.run_as_thread, daemon=True) for rank in self.ranks]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # a signal: the ranks end with it
            self.end_all(None, error)
            for thread in threads:
                thread.join(ENDING_SECONDS)
            raise
        if self.first_error:
            raise self.first_error

    def end_all(self, failed: Rank | None, error: BaseException) -> None:
        """One rank, or the main thread, cannot go on: the other threads of this process must not wait."""
        with self._lock:
            if self.first_error:
                return  # what follows from it is not worth telling
            self.first_error = error
        for rank in self.ranks:
            if rank is not failed:
                rank.abort()

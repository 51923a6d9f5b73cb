"""What a rank does when its part of a run fails midway: the communicator ends, so that nobody goes on wrong.

A run is many messages, and none says to which call it belongs. A rank that leaves one early and makes the
next would pair those messages with what the others still wait for in this one. So an exception inside ends
the communicator; and before the first message the ranks agree that their calls are the same. Knows no
schedules and no arrays.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from pynccl.abi.enums import Result
from pynccl.abi.errors import InvalidArgumentError, NcclError, RemoteError

__all__ = ["Queued", "agree", "ends_on_failure"]

_LEFT = "its communicator"  # what a peer has revoked, aborted or destroyed, in the library's words
_SOUND = (Result.SUCCESS, Result.IN_PROGRESS)
_SECONDS = 1e-3  # of the wait for this rank's own work; a stream's thread would wait for itself


@contextlib.contextmanager
def ends_on_failure(comm: Any, call: str) -> Iterator[None]:
    """Whatever is raised inside, Ctrl-C too, ends ``comm`` for all ranks, and is raised.

    In host memory the communicator is revoked, which the others see at once: RemoteError, with this rank's
    number. With another library it is aborted, which frees this rank alone.
    """
    try:
        yield
    except BaseException as error:
        _end_after(error, comm, call)
        raise


def agree(comm: Any, call: str, stream: Any, *what: Any) -> None:
    """InvalidUsageError on every rank unless all make the same call; nothing has been sent then.

    ``what`` has the same ``repr`` where calls are the same; the error has its number alone. ``stream`` is a
    host stream or None. On a stream a disagreement ends the communicator, and ``synchronize`` tells. Only the
    host library compares; on others this does nothing.
    """
    if comm.library.kind == "host":
        number = zlib.crc32(repr((call, *what)).encode())
        code = comm.library.pyncclAgree(number, comm._handle, None if stream is None else stream.handle)
        comm._settle(code, f"{call}: the ranks' calls")


class Queued:
    """Functions of a run on a host stream. After one that fails, the others are not called any more.

    ``with queued:`` is around what makes the run's calls. Once a function has failed, of this run or of one
    before it, the communicator refuses them, which is no news: ``synchronize`` raises what the function did.
    """

    def __init__(self, comm: Any, call: str, stream: Any) -> None:
        self._comm, self._call, self._stream = comm, call, stream
        self._failed = False

    def __call__(self, fn: Callable[[], None]) -> None:
        """Queue ``fn()``."""

        def work() -> None:
            if self._failed:
                return
            try:
                self._check_health()
                fn()
            except BaseException as error:
                self._failed = True
                self._stream._flight.raised.append(error)  # before the communicator begins to refuse
                _end_after(error, self._comm, self._call)

        self._stream.call(work)

    def _check_health(self) -> None:
        """What has come by a communicator that failed is void, and no function of a user's should see it."""
        state = self._comm._poll(self._call)
        if state not in _SOUND:
            self._comm._fail(state, self._call)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        return isinstance(error, NcclError) and (self._failed or self._stream.failed)


def _end_after(error: BaseException, comm: Any, call: str) -> None:
    """End ``comm``, and let ``error`` say so."""
    _end(comm)
    if isinstance(error, RemoteError) and _LEFT in error.args[0]:
        error.args = (
            f"{error.args[0]}; {call} ends with its communicator on every rank: an operation or codec "
            "that raised on one of them is a usual reason, and that rank's own error says so",
            *error.args[1:],
        )
    elif isinstance(error, InvalidArgumentError):
        error.args = (
            f"{error.args[0]}. This has ended the communicator for all ranks; make a new one",
            *error.args[1:],
        )
    elif hasattr(error, "add_note"):  # Python 3.11
        error.add_note(
            f"{call}: rank {comm.rank} could not go on, so the communicator is ended for all ranks; "
            "make a new one"
        )


def _end(comm: Any) -> None:
    library, handle = comm.library, comm._handle
    if handle is None:  # ended meanwhile, by another thread
        return
    if library.kind != "host":
        comm.abort()
        return
    with contextlib.suppress(NcclError):
        if comm._poll("") not in _SOUND:  # that ends it on every rank already, and says why
            return
    # The state is set before the wait, whose outcome changes nothing; what is being raised says more than it.
    library.pyncclSetTimeout(handle, _SECONDS)
    library.ncclCommRevoke(handle, 0)
    library.pyncclSetTimeout(handle, comm._timeout or 0.0)
    comm._flushed = True

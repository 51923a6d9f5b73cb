"""Errors of NCCL calls: one class a result code, one message format.

Owned here: the table from result codes to exceptions, and the words. ``check`` is called after every NCCL
call, so success costs one comparison; everything else happens only when a call failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pynccl.abi.enums import ENUMS, Result

if TYPE_CHECKING:
    from pynccl.abi.library import Library


class NcclError(RuntimeError):
    """A call of the communication library failed, or could not be made.

    Attributes: ``code`` (the result code, None when no library call was made), ``call`` (the function's
    name), ``detail`` (the library's last-error text), ``rank`` and ``comm_name`` of the communicator, where
    known.
    """

    def __init__(
        self,
        message: str,
        *,
        code: int | None = None,
        call: str | None = None,
        detail: str = "",
        rank: int | None = None,
        comm_name: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.call, self.detail = code, call, detail
        self.rank, self.comm_name = rank, comm_name

    def __reduce__(self) -> tuple[Any, ...]:
        # Ranks hand their errors to the parent process; the default would lose the keyword arguments (and
        # OSError's own would reorder them).
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[NcclError], args: tuple[Any, ...], state: dict[str, Any]) -> NcclError:
    error = kind(*args)
    error.__dict__.update(state)
    return error


class UnhandledCudaError(NcclError):
    """A CUDA call failed, or there is no usable GPU."""


class NcclSystemError(NcclError):
    """A call of the operating system failed: memory, shared memory, sockets, processes."""


class InternalError(NcclError):
    """The library found itself in a state it should never be in."""


class InvalidArgumentError(NcclError, ValueError):
    """An argument is wrong: a size, a dtype, a root, a pointer; found by the library or in Python."""


class InvalidUsageError(NcclError):
    """The call is not allowed here, does not match the other ranks' calls, or this library cannot do it."""


class RemoteError(NcclError):
    """Another rank died, aborted, or became unreachable."""


class InProgressError(NcclError):
    """A non-blocking call has not finished, where its result was needed."""


class NcclTimeoutError(NcclError, TimeoutError):
    """The other ranks did not arrive before the deadline."""


class LibraryNotFoundError(NcclError, OSError):
    """No usable library. The message and ``searched``, (place, outcome) pairs, list every place."""

    searched: tuple[tuple[str, str], ...] = ()


class MissingFunctionError(NcclError, AttributeError):
    """The loaded library has no such function; the message says which release does."""


class Kind(NamedTuple):
    """What a result code means: the exception to raise and the remedy to suggest."""

    error: type[NcclError]
    remedy: str


_RERUN = "run again with NCCL_DEBUG=INFO for the library's own report"

#: Result code -> exception and remedy. A code that is not here (from a newer library) raises ``NcclError``
#: itself.
KINDS: dict[int, Kind] = {
    Result.UNHANDLED_CUDA_ERROR: Kind(
        UnhandledCudaError, f"check that a GPU is usable (nvidia-smi); {_RERUN}"
    ),
    Result.SYSTEM_ERROR: Kind(NcclSystemError, f"check memory, /dev/shm and the network; {_RERUN}"),
    Result.INTERNAL_ERROR: Kind(InternalError, f"{_RERUN}, and report it"),
    Result.INVALID_ARGUMENT: Kind(InvalidArgumentError, "check the arguments of the call"),
    Result.INVALID_USAGE: Kind(
        InvalidUsageError, "check that every rank makes the same calls in the same order"
    ),
    Result.REMOTE_ERROR: Kind(RemoteError, "look at the other ranks' output; abort this communicator"),
    Result.IN_PROGRESS: Kind(InProgressError, "wait for the communicator before using the result"),
    Result.TIMEOUT: Kind(
        NcclTimeoutError, "look for ranks that stopped or make other calls; raise the timeout if all are well"
    ),
}

_NAMES = {int(value): name for name, value in ENUMS["ncclResult_t"].items() if name != "ncclNumResults"}


def check(
    lib: Library,
    code: int,
    call: str,
    *,
    comm: int | None = None,
    rank: int | None = None,
    comm_name: str | None = None,
) -> Result:
    """Raise the error that belongs to ``code``, unless it is success or in progress; return it otherwise.

    ``comm`` is the communicator's handle, for the library's last-error text.
    """
    if code:
        return _failed(lib, code, call, comm, rank, comm_name)
    return _SUCCESS


_SUCCESS = Result.SUCCESS


def _failed(
    lib: Library, code: int, call: str, comm: int | None, rank: int | None, comm_name: str | None
) -> Result:
    if code == Result.IN_PROGRESS:
        return Result.IN_PROGRESS
    raise error_for(code, call, detail=last_error(lib, comm), rank=rank, comm_name=comm_name)


def error_for(
    code: int, call: str, *, detail: str = "", rank: int | None = None, comm_name: str | None = None
) -> NcclError:
    """The exception for a result code, in the format that all of them share."""
    kind = KINDS.get(
        code, Kind(NcclError, "the library is newer than this pynccl, or not an NCCL; update pynccl")
    )
    name = _NAMES.get(code, "unknown result")
    where = ", ".join(
        part
        for part in (
            f"rank {rank}" if rank is not None else "",
            f"communicator {comm_name!r}" if comm_name else "",
        )
        if part
    )
    message = f"{call}: {name} ({code}): {detail or kind.remedy}" + (f" [{where}]" if where else "")
    return kind.error(message, code=code, call=call, detail=detail, rank=rank, comm_name=comm_name)


def last_error(lib: Library, comm: int | None = None) -> str:
    """The library's text for the last error of this thread, "" where it has none (or is older than 2.13)."""
    if not lib.has("ncclGetLastError"):
        return ""
    text = lib.ncclGetLastError(comm)
    return text.decode(errors="replace").strip() if text else ""

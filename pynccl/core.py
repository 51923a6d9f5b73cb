"""The life of a communicator: its handle, how it comes to be, how results are judged, and how it ends.

A communicator ends by ``destroy``, ``abort`` or a ``with`` block, and never by the garbage collector: freeing
one may wait for other ranks, which no destructor may do. A forgotten one is reported by a ResourceWarning and
left to the end of the process. What a communicator can do with data is not known here.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import time
import warnings
import weakref
from collections.abc import Callable, Container, Iterator, Mapping
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from . import gpu, interrupts
from .abi.enums import Result
from .abi.errors import InProgressError, InvalidUsageError, NcclTimeoutError, check
from .abi.library import Library
from .abi.types import ncclConfig_t
from .config import communicator_config, is_blocking
from .flight import keep_for_ever
from .group import Deferred
from .operations import Place
from .threadstate import current
from .timeouts import check_patience, check_timeout, timeout_from_environment

Config = Mapping[str, Any] | ncclConfig_t | None
Self = TypeVar("Self", bound="Core")

# ncclCommDestroy of the host library: its wait for this rank's work was too long, or interrupted.
_STAYS = (Result.TIMEOUT, Result.SYSTEM_ERROR)


class Core:
    """What every part of a Communicator stands on."""

    rank: int
    """This process's (or thread's) number in the communicator; -1 while it is being made by a split."""
    size: int
    """How many ranks there are."""
    name: str | None
    """As given; it appears in messages and in NCCL's logs."""
    library: Library
    device: int | None
    """The CUDA device (NCCL); None for the host library."""
    on_gpu: bool
    """Whether calls take arrays in GPU memory."""
    _place: Place
    """Rank, size and device together: what the checks of a call look at."""
    _handle: int | None
    _ended: str | None
    _flushed: bool
    """Finalized or revoked: no call can be made, and none of them may follow."""

    @property
    def handle(self) -> int:
        """The ``ncclComm_t``, for other code that speaks NCCL. InvalidUsageError after the end."""
        self._check_open("handle")
        assert self._handle is not None
        return self._handle

    @property
    def closed(self) -> bool:
        """Whether it was destroyed or aborted, could not be made, or belongs to the parent process."""
        return self._ended is not None

    def __repr__(self) -> str:
        state = self._ended or ("open" if self._handle is not None else "being made")
        return f"<Communicator{self._label} rank {self.rank} of {self.size}, {self.library.kind}, {state}>"

    # --- progress -------------------------------------------------------------------------------------------

    def async_error(self) -> Result | int:
        """The state (``ncclCommGetAsyncError``): SUCCESS, IN_PROGRESS, or the error that broke it."""
        self._check_not_ended("async_error")
        state = self._poll("async_error")
        if state == Result.SUCCESS and self._handle is not None:
            self._in_progress.clear()
        return state

    def wait(self, timeout: float | None = None) -> None:
        """Wait until a non-blocking communicator has done what it is doing; raise the error if that failed.

        ``timeout`` is in seconds (0: look once; None: the communicator's own, else no limit);
        NcclTimeoutError after that.
        """
        self._check_not_ended("wait")
        limit = check_patience("wait", timeout) if timeout is not None else self._timeout
        deadline = None if limit is None else time.monotonic() + limit
        pause = 1e-5
        while (code := self._poll("wait")) == Result.IN_PROGRESS:
            if deadline is not None and time.monotonic() > deadline:
                raise NcclTimeoutError(
                    f"wait: communicator{self._label} of rank {self.rank} is still in progress after "
                    f"{limit:g} s; "
                    "look for ranks that did not make the same call, then abort()",
                    code=int(Result.TIMEOUT),
                    call="wait",
                    rank=self.rank,
                    comm_name=self.name,
                )
            time.sleep(pause)  # NCCL has nothing to wait on, only this question
            pause = min(2 * pause, 1e-2)
        if code:
            self._fail(code, "wait (ncclCommGetAsyncError)")
        self._in_progress.clear()
        if self._handle is None:
            self._complete()

    def _poll(self, call: str) -> Result | int:
        """The state of this communicator, or of the one it comes from while it has no handle itself."""
        source = self._box.value or (self._parent._handle if self._parent is not None else None)
        if source is None:
            return Result.IN_PROGRESS
        state = ctypes.c_int()
        code = self.library.ncclCommGetAsyncError(source, ctypes.byref(state))
        if code:
            self._fail(code, f"{call} (ncclCommGetAsyncError)")
        if state.value == 0 and not self._box.value:
            return Result.IN_PROGRESS
        try:
            return Result(state.value)
        except ValueError:  # a newer library's code
            return state.value

    # --- the end --------------------------------------------------------------------------------------------

    def finalize(self) -> None:
        """Flush all work; no new call may be made. Every rank calls it. ``destroy`` still has to follow."""
        self._check_open("finalize")
        self._flush("finalize (ncclCommFinalize)")

    def destroy(self) -> None:
        """Free the communicator, after its work. Every rank should call it. Doing it twice is fine.

        When the wait for its work fails (NcclTimeoutError, Ctrl-C) the communicator stays: call destroy()
        again, or abort().
        """
        if self._ended is not None:
            return
        if self._handle is None:
            self.wait()
        for owned in list(self._owned):
            owned.destroy()
        if not self._blocking:
            # Only a communicator without work can be destroyed without waiting inside the library.
            if not self._flushed:
                self._flush("destroy (ncclCommFinalize)")
            self.wait()
        self._free(self.library.ncclCommDestroy, "destroyed", "destroy (ncclCommDestroy)", _STAYS)

    def abort(self) -> None:
        """Stop what is running and free the communicator, waiting for no other rank. Doing it twice is fine.

        May be called from another thread while a call waits: that call ends with an error.
        """
        if self._ended is None:
            self._free(self.library.ncclCommAbort, "aborted", "abort (ncclCommAbort)")

    def revoke(self) -> None:
        """Stop all running calls; only destroy, abort, split and shrink may follow (``ncclCommRevoke``)."""
        self._check_open("revoke")
        code = self.library.ncclCommRevoke(self._handle, 0)
        self._flushed = self._flushed or code in (0, Result.IN_PROGRESS, Result.TIMEOUT)
        self._settle(code, "revoke (ncclCommRevoke)")

    def __enter__(self: Self) -> Self:
        self._check_not_ended("with")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        # After an error the other ranks may never come to the end that destroy waits for.
        if kind is not None:
            self.abort()
            return
        try:
            self.destroy()
        except BaseException:
            self.abort()
            raise

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Communicator cannot be copied or pickled; make one on each rank from a UniqueId")

    def __del__(self) -> None:
        if getattr(self, "_ended", "") is None and self._box.value is not None:
            _live.discard(self)
            if self._in_progress or self._owned:
                # The native communicator lives on: arrays of calls under way, and windows that peers write
                # to, must too.
                _left.append((self._in_progress, self._owned))
            warnings.warn(_forgotten(self), ResourceWarning, source=self, stacklevel=2)

    def _flush(self, call: str) -> None:
        code = self.library.ncclCommFinalize(self._handle)
        self._flushed = self._flushed or code in (0, Result.IN_PROGRESS)
        self._settle(code, call)

    def _free(
        self, function: Callable[[int | None], int], ended: str, call: str, stays: Container[int] = ()
    ) -> None:
        """``stays`` are the codes with which the host library says that it has ended nothing."""
        if self._ended is not None:
            return  # by another thread, a moment ago
        handle = self._box.value
        # Others may use the communicator while this waits, abort() above all. What the host library does not
        # know any more it refuses; NVIDIA's must never see such a handle.
        ends_first = not stays or self.library.kind != "host" or handle is None
        if ends_first:
            self._end(ended)
        if handle is None:
            return
        code = function(handle)
        if not ends_first and code not in stays and self._ended is None:
            self._end(ended)
        if code not in (0, Result.IN_PROGRESS):
            if self._ended is not None:
                _left.append(self._in_progress)  # the library kept it, so its work may go on
            interrupts.reraise()
            check(self.library, code, call, rank=self.rank, comm_name=self.name)

    def _end(self, ended: str) -> None:
        """From now on every use is an error that says ``ended``."""
        self._ended, self._handle = ended, None
        self._close_quick_path()
        for owned in self._owned:
            owned._invalidate()  # it went with the communicator
        for prepared in list(self._prepared):
            prepared._invalidate()
        self._owned.clear()
        _live.discard(self)
        _boxes.pop(id(self._box), None)

    # --- for the other parts --------------------------------------------------------------------------------

    def _check_open(self, call: str) -> None:
        """Raise unless calls can be made now."""
        if self._handle is not None:
            return
        self._check_not_ended(call)
        if not self._in_progress:
            raise InvalidUsageError(
                f"{call}: the communicator is made when the group ends; use it after the group"
            )
        raise InProgressError(
            f"{call}: the communicator is still being made; call comm.wait(timeout) first",
            code=int(Result.IN_PROGRESS),
            call=call,
            rank=self.rank,
            comm_name=self.name,
        )

    def _settle(self, code: int, call: str, keep: Any = None) -> None:
        """Judge a result code: success; in progress (``keep`` lives until that is over); or an error."""
        if not code:
            return
        if code != Result.IN_PROGRESS:
            self._fail(code, call)
        self._in_progress.append(keep)
        if self._waits_by_itself:
            self.wait()

    def _fail(self, code: int, call: str) -> NoReturn:
        """Raise the error of a failed call, or what a signal handler raised if that ended the wait."""
        interrupts.reraise()
        if code == Result.INVALID_ARGUMENT:
            self._check_not_ended(call)  # the library was given no communicator: say why
        # A child that is being made does not know its rank yet; the rank that called is the parent's.
        rank = self.rank if self.rank >= 0 or self._parent is None else self._parent.rank
        handle = self._box.value if self._ended is None else None
        check(self.library, code, call, comm=handle, rank=rank, comm_name=self.name)
        raise AssertionError(f"{call}: code {code} is no failure")

    def _own(self, thing: Any) -> None:
        """``thing`` is destroyed before the communicator is, or goes with it (``_invalidate``)."""
        self._owned[thing] = None

    def _disown(self, thing: Any) -> None:
        self._owned.pop(thing, None)

    @property
    def _label(self) -> str:
        return f" {self._called!r}" if self._called else ""

    def _check_not_ended(self, call: str) -> None:
        if self._ended is not None:
            raise InvalidUsageError(
                f"{call}: communicator{self._label} of rank {self.rank} was {self._ended}; make a new one",
                call=call,
                rank=self.rank,
                comm_name=self.name,
            )

    # --- the beginning --------------------------------------------------------------------------------------

    def _begin(
        self, lib: Library, rank: int, size: int, timeout: float | None, name: str | None, config: Config
    ) -> None:
        """Everything but the handle."""
        timeout = check_timeout("Communicator", timeout)
        default = timeout_from_environment("Communicator")  # the host library looks itself: this is the check
        self._ended = "never made"
        self.library, self.rank, self.size, self.name = lib, rank, size, name
        self._called = name  # what messages call it; the host library has a name for all
        self.device, self.on_gpu = None, lib.kind != "host"
        self._place = Place(rank, size, self.on_gpu, None)
        self._handle = None
        self._box = ctypes.c_void_p()
        self._parent: Core | None = None
        self._flushed = False
        self._in_progress: list[Any] = []
        self._owned: dict[Any, None] = {}
        self._prepared: weakref.WeakSet[Any] = weakref.WeakSet()
        self._close_quick_path()
        self._algorithms: dict[str, Any] = {}
        self._selection: Any = None  # a pynccl.collectives.tune.Selection; never inherited
        self._token: Any = None
        if self.on_gpu:
            gpu.require()
        self._timeout = timeout if timeout is not None or not self.on_gpu else default
        # NCCL's blocking calls have no deadline and cannot be interrupted. With a time limit its
        # communicators are made non-blocking, and the waiting is done here.
        polled = self.on_gpu and self._timeout is not None
        self._given, self._config = config, communicator_config(config, name=name, polled=polled)
        self._blocking = is_blocking(self._config)
        self._waits_by_itself = polled and not (isinstance(config, Mapping) and "blocking" in config)
        interrupts.install(lib)
        self._ended = None

    def _create(self, call: str, make: Callable[[Any], int]) -> None:
        """Run ``make(pointer to the handle)`` now, or with the group, and go on to live."""
        box, pointer = self._box, ctypes.byref(self._box)
        # The library may write the handle later (non-blocking, groups): it must find the variable, come what
        # may.
        _boxes[id(box)] = box

        # NCCL puts a communicator on the GPU that is current in this call, not on the one when a group ends.
        device = gpu.current_device() if self.on_gpu and current.group is not None else None

        def create() -> int:
            with self._deadline(), gpu.on_device(device):
                return make(pointer)

        if current.group is not None:
            current.group._add(Deferred(self.library, None, call, create, self._made, self._not_made, self))
            return
        try:
            code = create()
            if code not in (0, Result.IN_PROGRESS):
                self._fail(code, call)
            self._made(code)
        except BaseException:
            self._not_made()
            raise

    def _made(self, code: int) -> None:
        if code == Result.IN_PROGRESS:
            self._in_progress.append(self._config)
            _live.add(self)
            if self._waits_by_itself:
                self.wait()
        else:
            self._complete()

    def _not_made(self) -> None:
        """Making it failed. A non-blocking one exists all the same and is freed; the first error is told."""
        handle = self._box.value if self._in_progress else None
        if self._ended is None:
            self._end("never made: its creation failed")
        if handle is not None:
            self.library.ncclCommAbort(handle)

    def _complete(self) -> None:
        """The handle is there: learn what the library made, and open the calls."""
        lib, handle = self.library, self._box.value
        _boxes.pop(id(self._box), None)
        if handle is None:
            self._end("not made: this rank is in no part of the split")
            return
        self._handle = handle
        _live.add(self)
        self.rank = self._ask(lib.ncclCommUserRank)
        self.size = self._ask(lib.ncclCommCount)
        if self.on_gpu:
            self.device = self._ask(lib.ncclCommCuDevice)
        self._place = Place(self.rank, self.size, self.on_gpu, self.device)
        if lib.kind == "host":
            called = ctypes.c_char_p()
            self._settle(lib.pyncclCommName(handle, ctypes.byref(called)), "Communicator (pyncclCommName)")
            self._called = (called.value or b"").decode(errors="replace")
        self._open_quick_path()

    def _open_quick_path(self) -> None:
        """The communicator can be used from now on."""

    def _close_quick_path(self) -> None:
        """It cannot."""

    def _ask(self, function: Any) -> int:
        value = ctypes.c_int()
        self._settle(function(self._handle, ctypes.byref(value)), f"Communicator ({function.__name__})")
        return value.value

    @contextlib.contextmanager
    def _deadline(self) -> Iterator[None]:
        """Communicators made in this block, in this thread, wait no longer than this one's timeout."""
        if self._timeout is None or self.library.kind != "host":
            yield
            return
        self.library.pyncclSetTimeout(None, self._timeout)
        try:
            yield
        finally:
            self.library.pyncclSetTimeout(None, 0.0)


_live: weakref.WeakSet[Core] = weakref.WeakSet()
_boxes: dict[int, ctypes.c_void_p] = {}
_left: list[Any] = []  # what the communicators use that nobody ended


def _forgotten(comm: Core) -> str:
    return f"{comm!r} was not destroyed; use a `with` block, or call destroy() or abort()"


def _at_exit() -> None:
    # Nothing is freed here: that could wait for ranks that have gone. The end of the process frees
    # everything.
    for comm in list(_live):
        warnings.warn(_forgotten(comm), ResourceWarning, source=comm, stacklevel=2)
        keep_for_ever((comm._in_progress, comm._owned.copy()))
        comm._end("left to the end of the process")
    keep_for_ever(_left)


def _in_child() -> None:
    for comm in list(_live):
        comm._end("made by the process that forked this one, and works only there")
    _boxes.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_child)

"""The communicator: how one is made, what it is, and how it ends. What it can do is in its base classes.

Owned here: the handle and its life. A communicator ends by ``destroy``, ``abort`` or a ``with`` block, and never by
the garbage collector: freeing one may wait for other ranks, which no destructor may do. A forgotten one is reported by
a ResourceWarning, and left to the end of the process.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

from . import gpu, interrupts
from .abi.enums import Result
from .abi.errors import InProgressError, InvalidArgumentError, InvalidUsageError, NcclTimeoutError, check
from .abi.library import Library, load
from .abi.types import ncclConfig_t
from .calls import Collectives
from .config import UniqueId, communicator_config, is_blocking
from .derive import Derivation
from .group import Deferred
from .memory import OneSided
from .objects import Objects
from .operations import Place, check_rank
from .threadstate import current

Config = Mapping[str, Any] | ncclConfig_t | None


class Communicator(Collectives, OneSided, Objects, Derivation):
    """A rank's end of a group of ranks that communicate. Every call must be made by every rank, in the same order.

    Parameters
    ----------
    nranks, unique_id, rank
        The number of ranks, the UniqueId that one of them made, and which one this is.
    config
        Fields of NCCL's ``ncclConfig_t`` by name, for example ``{"blocking": False, "maxCTAs": 8}``.
    library
        "nccl", "host", a path, or a loaded Library; None: ``PYNCCL_LIBRARY``, else automatic. The same on every rank.
    timeout
        Seconds after which a wait for other ranks is an NcclTimeoutError. None: ``PYNCCL_TIMEOUT``, else 600 on the
        host library, and no limit on NCCL. On NCCL a timeout covers making the communicator and starting calls
        (which it makes non-blocking underneath), not the work on the GPU.
    name
        Appears in messages, and in NCCL's logs.

    A communicator may be used by one thread at a time. It cannot be used in a forked child.
    """

    def __init__(
        self,
        nranks: int,
        unique_id: UniqueId | bytes,
        rank: int,
        *,
        config: Config = None,
        library: str | Library | None = None,
        timeout: float | None = None,
        name: str | None = None,
    ) -> None:
        call = "Communicator"
        if not isinstance(nranks, int) or nranks < 1:
            raise InvalidArgumentError(f"{call}: nranks={nranks!r} must be an integer of at least 1")
        rank = check_rank(call, "rank", rank, nranks)
        uid = unique_id if isinstance(unique_id, UniqueId) else UniqueId.from_bytes(unique_id)
        self._prepare_to_live(load(library), timeout, name, config)
        lib, packed = self.library, uid.as_struct()
        given = self._config

        def make(box: Any) -> int:
            if given is None:
                return lib.ncclCommInitRank(box, nranks, packed, rank)
            return lib.ncclCommInitRankConfig(box, nranks, packed, rank, ctypes.byref(given))

        self.rank, self.size = rank, nranks
        self._create(f"{call} ({'ncclCommInitRank' if given is None else 'ncclCommInitRankConfig'})", make)

    @classmethod
    def init_all(
        cls,
        n: int,
        *,
        devices: Sequence[int] | None = None,
        library: str | Library | None = None,
        timeout: float | None = None,
        name: str | None = None,
    ) -> list[Communicator]:
        """``n`` communicators of one clique, all in this process (``ncclCommInitAll``); element r is rank r.

        ``devices`` are the GPUs (default 0 to n-1). One thread drives them all inside ``pynccl.group()``, or n threads
        take one each.
        """
        call = "Communicator.init_all (ncclCommInitAll)"
        if not isinstance(n, int) or n < 1:
            raise InvalidArgumentError(f"{call}: n={n!r} must be an integer of at least 1")
        if devices is not None and len(devices) != n:
            raise InvalidArgumentError(f"{call}: {len(devices)} devices for {n} ranks; give one for each")
        if current.group is not None:
            raise InvalidUsageError(f"{call}: it is a group of its own; call it outside pynccl.group()")
        lib = load(library)
        comms = []
        for rank in range(n):
            comm = cls.__new__(cls)
            comm._prepare_to_live(lib, timeout, name, None)
            comm.rank, comm.size = rank, n
            comms.append(comm)
        handles = (ctypes.c_void_p * n)()
        list_ = (ctypes.c_int * n)(*devices) if devices is not None else None
        code = comms[0]._under_timeout(lambda: lib.ncclCommInitAll(handles, n, list_))
        if code:
            interrupts.reraise()
            check(lib, code, call, comm_name=name)
        for comm, handle in zip(comms, handles, strict=True):
            comm._box.value = handle
            comm._made(0)
        return comms

    # --- what it is ----------------------------------------------------------------------------------------------

    rank: int
    """This process's (or thread's) number in the communicator."""
    size: int
    """How many ranks there are."""
    name: str | None
    library: Library
    device: int | None
    """The CUDA device (NCCL), None for the host library."""

    @property
    def handle(self) -> int:
        """The ``ncclComm_t``, for other code that speaks NCCL. InvalidUsageError once the communicator has ended."""
        self.check_open("handle")
        assert self._handle is not None
        return self._handle

    @property
    def closed(self) -> bool:
        """Whether it was destroyed or aborted (or belongs to the process that forked this one)."""
        return self._ended is not None

    @property
    def on_gpu(self) -> bool:
        """Whether calls take arrays in GPU memory."""
        return self.library.kind != "host"

    @property
    def place(self) -> Place:
        return Place(self.rank, self.size, self.on_gpu, self.device)

    def __repr__(self) -> str:
        state = self._ended or ("open" if self._handle is not None else "being made")
        label = f" {self.name!r}" if self.name else ""
        return f"<Communicator{label} rank {self.rank} of {self.size}, {self.library.kind}, {state}>"

    # --- progress ------------------------------------------------------------------------------------------------

    def async_error(self) -> Result | int:
        """The communicator's state (``ncclCommGetAsyncError``): SUCCESS, IN_PROGRESS, or the error that broke it."""
        self._check_not_ended("async_error")
        return self._poll("async_error")

    def wait(self, timeout: float | None = None) -> None:
        """Wait until a non-blocking communicator has finished what it is doing, and raise the error if it failed.

        ``timeout`` is in seconds (None: the communicator's own, else no limit); NcclTimeoutError after that.
        """
        self._check_not_ended("wait")
        limit = timeout if timeout is not None else self._timeout
        deadline = None if limit is None else time.monotonic() + limit
        pause = 1e-5
        while (code := self._poll("wait")) == Result.IN_PROGRESS:
            if deadline is not None and time.monotonic() > deadline:
                raise NcclTimeoutError(
                    f"wait: communicator {self.name!r} of rank {self.rank} is still in progress after {limit} s; "
                    "look for ranks that did not make the same call, then abort()",
                    code=int(Result.TIMEOUT),
                    call="wait",
                    rank=self.rank,
                    comm_name=self.name,
                )
            time.sleep(pause)  # polling: NCCL has nothing to wait on
            pause = min(2 * pause, 1e-2)
        if code:
            self.fail(code, "wait (ncclCommGetAsyncError)")
        self._in_progress.clear()
        if self._handle is None:
            self._complete()

    def _poll(self, call: str) -> int:
        """The state of this communicator, or of the one it comes from while it has no handle itself."""
        source = self._box.value or (self._parent._handle if self._parent is not None else None)
        if source is None:
            return Result.IN_PROGRESS
        state = ctypes.c_int()
        code = self.library.ncclCommGetAsyncError(source, ctypes.byref(state))
        if code:
            self.fail(code, f"{call} (ncclCommGetAsyncError)")
        if state.value == 0 and not self._box.value:
            return Result.IN_PROGRESS
        return Result(state.value) if state.value in Result._value2member_map_ else state.value

    # --- the end -------------------------------------------------------------------------------------------------

    def finalize(self) -> None:
        """Flush all work; no new call may be made. Every rank calls it. ``destroy`` still has to follow."""
        self.check_open("finalize")
        self.settle(self.library.ncclCommFinalize(self._handle), "finalize (ncclCommFinalize)")

    def destroy(self) -> None:
        """Free the communicator, after its work. Every rank should call it. Doing it twice is fine."""
        if self._ended is not None:
            return
        if self._handle is None:
            self.wait()
        for owned in list(self._owned):
            owned.destroy()
        if not self._blocking:
            # Only a finalized communicator can be destroyed without waiting inside the library.
            self.settle(self.library.ncclCommFinalize(self._handle), "destroy (ncclCommFinalize)")
            self.wait()
        self._free(self.library.ncclCommDestroy, "destroyed", "destroy (ncclCommDestroy)")

    def abort(self) -> None:
        """Stop what is running and free the communicator without waiting for anyone. Doing it twice is fine.

        May be called from another thread while a call waits: that call ends with an error.
        """
        if self._ended is None:
            self._free(self.library.ncclCommAbort, "aborted", "abort (ncclCommAbort)")

    def revoke(self) -> None:
        """Stop all running calls; then only destroy, abort, split and shrink may follow (``ncclCommRevoke``)."""
        self.check_open("revoke")
        self.settle(self.library.ncclCommRevoke(self._handle, 0), "revoke (ncclCommRevoke)")

    def _free(self, function: Callable[[int | None], int], ended: str, call: str) -> None:
        handle = self._handle if self._handle is not None else self._box.value
        self._end(ended)
        if handle is None:
            return
        code = function(handle)
        if code not in (0, Result.IN_PROGRESS):
            interrupts.reraise()
            check(self.library, code, call, rank=self.rank, comm_name=self.name)

    def _end(self, ended: str) -> None:
        """From now on every use is an error that says ``ended``."""
        self._ended, self._handle = ended, None
        for owned in list(self._owned):
            owned._handle = None  # went with the communicator
        self._owned.clear()
        for prepared in list(self._prepared):
            prepared.invalidate()
        _live.discard(self)
        _being_made.pop(id(self._box), None)

    def __enter__(self) -> Communicator:
        self._check_not_ended("with")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        # After an error the other ranks may never come to the end that destroy waits for.
        if kind is None:
            self.destroy()
        else:
            self.abort()

    def __del__(self) -> None:
        if getattr(self, "_ended", "") is None and self._box.value is not None:
            warnings.warn(_forgotten(self), ResourceWarning, source=self, stacklevel=2)

    # --- for the other files of this package ---------------------------------------------------------------------

    def check_open(self, call: str) -> None:
        """Raise unless calls can be made now."""
        if self._handle is None:
            self._check_not_ended(call)
            if current.group is not None or not self._in_progress:
                raise InvalidUsageError(
                    f"{call}: the communicator is made at the end of the group; use it after the group"
                )
            raise InProgressError(
                f"{call}: the communicator is still being made; call comm.wait(timeout) first",
                code=int(Result.IN_PROGRESS),
                call=call,
                rank=self.rank,
            )

    def _check_not_ended(self, call: str) -> None:
        if self._ended is not None:
            label = f" {self.name!r}" if self.name else ""
            raise InvalidUsageError(
                f"{call}: communicator{label} of rank {self.rank} was {self._ended}; make a new one",
                call=call,
                rank=self.rank,
                comm_name=self.name,
            )

    def settle(self, code: int, call: str, keep: Any = None) -> None:
        """Deal with a result code: success, in progress (``keep`` lives until it is over), or an error."""
        if not code:
            return
        if code != Result.IN_PROGRESS:
            self.fail(code, call)
        self._in_progress.append(keep)
        if self._waits_by_itself:
            self.wait()

    def fail(self, code: int, call: str) -> NoReturn:
        """Raise the error for a failed call; the signal handler's own exception if that ended the wait."""
        interrupts.reraise()
        self._check_not_ended(call)
        check(self.library, code, call, comm=self._handle, rank=self.rank, comm_name=self.name)
        raise AssertionError(f"{call}: code {code} is no failure")

    def own(self, thing: Any) -> None:
        """``thing`` ends (``destroy()``) before the communicator does."""
        self._owned[thing] = None

    def disown(self, thing: Any) -> None:
        self._owned.pop(thing, None)

    def _prepare_to_live(self, lib: Library, timeout: float | None, name: str | None, config: Config) -> None:
        if timeout is not None and not timeout > 0:
            raise InvalidArgumentError(
                f"Communicator: timeout={timeout!r} must be a positive number of seconds"
            )
        self.library, self.name = lib, name
        self.device = None
        self._timeout = timeout
        self._ended: str | None = None
        self._handle: int | None = None
        self._box = ctypes.c_void_p()
        self._parent: Communicator | None = None
        self._in_progress: list[Any] = []
        self._owned: dict[Any, None] = {}
        self._prepared: weakref.WeakSet[Any] = weakref.WeakSet()
        if lib.kind != "host":
            gpu.require()
        limit = timeout if timeout is not None else _timeout_from_environment()
        polled = lib.kind != "host" and limit is not None
        if polled:
            self._timeout = limit
        self._config = communicator_config(config, name=name, polled=polled)
        self._blocking = is_blocking(self._config)
        # The user asked for a time limit, not for a non-blocking communicator: the waiting is done here.
        self._waits_by_itself = polled and not (isinstance(config, Mapping) and "blocking" in config)
        interrupts.install(lib)
        self._reset_calls()

    def _create(self, call: str, make: Callable[[Any], int]) -> None:
        """Run ``make(pointer to the handle)`` now, or with the group, and go on to live."""
        box = self._box
        # The library may write the handle later (non-blocking, groups): it must find the variable, come what may.
        _being_made[id(box)] = box
        if current.group is not None:
            current.group.add(
                Deferred(
                    self.library,
                    None,
                    call,
                    lambda: self._under_timeout(lambda: make(ctypes.byref(box))),
                    self._made,
                    self,
                )
            )
            return
        try:
            code = self._under_timeout(lambda: make(ctypes.byref(box)))
            if code not in (0, Result.IN_PROGRESS):
                interrupts.reraise()
                check(self.library, code, call, rank=self.rank, comm_name=self.name)
            self._made(code)
        except BaseException:
            if self._ended is None and self._box.value is not None and self._in_progress:
                self.abort()
            self._ended = self._ended or "never made: its creation failed"
            _being_made.pop(id(box), None)
            raise

    def _made(self, code: int) -> None:
        if code == Result.IN_PROGRESS:
            self._in_progress.append(self)
            _live.add(self)
            if self._waits_by_itself:
                self.wait()
        else:
            self._complete()

    def _complete(self) -> None:
        """The handle is there: learn what the library made."""
        lib, handle = self.library, self._box.value
        if handle is None:
            self._end("not made: this rank is in no part of the split")
            return
        self._handle = handle
        _live.add(self)
        _being_made.pop(id(self._box), None)
        for attribute, function in (("rank", lib.ncclCommUserRank), ("size", lib.ncclCommCount)):
            value = ctypes.c_int()
            self.settle(function(handle, ctypes.byref(value)), f"Communicator.{attribute}")
            setattr(self, attribute, value.value)
        if self.on_gpu:
            value = ctypes.c_int()
            self.settle(
                lib.ncclCommCuDevice(handle, ctypes.byref(value)), "Communicator.device (ncclCommCuDevice)"
            )
            self.device = value.value
        self._open_calls()

    def _under_timeout(self, make: Callable[[], int]) -> int:
        if self._timeout is None or self.library.kind != "host":
            return make()
        self.library.pyncclSetTimeout(None, float(self._timeout))
        try:
            return make()
        finally:
            self.library.pyncclSetTimeout(None, 0.0)


_live: weakref.WeakSet[Communicator] = weakref.WeakSet()
_being_made: dict[int, ctypes.c_void_p] = {}


def _timeout_from_environment() -> float | None:
    text = os.environ.get("PYNCCL_TIMEOUT")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        raise InvalidArgumentError(f"PYNCCL_TIMEOUT={text!r} is not a number of seconds") from None
    return seconds if seconds > 0 else None


def _forgotten(comm: Communicator) -> str:
    return f"{comm!r} was not destroyed; use a `with` block, or call destroy() or abort()"


def _at_exit() -> None:
    # Nothing is freed here: that could wait for ranks that have gone. The end of the process frees everything.
    for comm in list(_live):
        warnings.warn(_forgotten(comm), ResourceWarning, source=comm, stacklevel=2)
        comm._end("left to the end of the process")


def _in_child() -> None:
    for comm in list(_live):
        comm._end("made by the process that forked this one, and works only there")
    _being_made.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_child)

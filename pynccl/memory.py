"""Memory that the library knows: allocation, registration, windows, and the one-sided calls on windows."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from . import arrays, gpu
from .abi.enums import DataType
from .abi.errors import InvalidArgumentError, InvalidUsageError, check
from .abi.library import Library
from .abi.types import ncclWaitSignalDesc_t
from .arrays import Buffer
from .calls import Collectives
from .flight import hand_over
from .operations import Plan, check_rank, integer, moved_as, view_in_place

if TYPE_CHECKING:
    from .core import Core

SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC
_ALIGNMENT = 4096  # NCCL_WIN_REQUIRED_ALIGNMENT
_MOST_BYTES = 2**63 - 1


class Registered:
    """Memory registered with a communicator, until ``destroy`` or the communicator's end."""

    _what, _undo = "register", "ncclCommDeregister"

    def __init__(self, comm: Core, buffer: Buffer, handle: int | None) -> None:
        self.comm, self._buffer, self._handle = comm, buffer, handle
        comm._own(self)

    @property
    def array(self) -> Any:
        return self._buffer.array

    @property
    def handle(self) -> int:
        """The library's handle. InvalidUsageError once it has ended."""
        if self._handle is None:
            raise InvalidUsageError(f"{self._what}: this registration has ended; register the array again")
        return self._handle

    def destroy(self) -> None:
        """End the registration (a window: on every rank). Doing it twice is fine. The array itself stays."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        self.comm._disown(self)
        code = getattr(self.comm.library, self._undo)(self.comm.handle, handle)
        self.comm._settle(code, f"{self._what} ({self._undo})", self._buffer)

    def _invalidate(self) -> None:
        """Its communicator has ended, and the registration with it."""
        self._handle = None

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.destroy()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._buffer}{' ended' if self._handle is None else ''}>"


class Window(Registered):
    """An array that every rank has opened to the others: the target of ``put``."""

    _what, _undo = "register_window", "ncclCommWindowDeregister"


class OneSided(Collectives):
    """A Communicator's memory, and its calls that need no partner."""

    def empty(self, shape: int | tuple[int, ...], dtype: Any = "float32") -> Any:
        """An array in the library's own memory (``ncclMemAlloc``), on which its calls move the fewest bytes.

        A NumPy array on the host library (zeroed pages that other ranks can map), a CuPy array on NCCL. The
        memory is freed when the array, and everything made of it, is gone.
        """
        self._check_open("empty")
        axes = shape if isinstance(shape, (tuple, list)) else (shape,)
        shape = tuple(integer("empty", "each axis of shape", axis, 0, _MOST_BYTES) for axis in axes)
        kind = _plain_dtype("empty", dtype)
        nbytes = max(1, prod(shape) * kind.itemsize)
        if nbytes > _MOST_BYTES:
            raise InvalidArgumentError(
                f"empty: shape={shape} of {kind} is {nbytes} bytes; there can be at most {_MOST_BYTES}"
            )
        box = ctypes.c_void_p()
        with gpu.on_device(self.device):
            code = self.library.ncclMemAlloc(ctypes.byref(box), nbytes)
        self._settle(code, f"empty: {nbytes} bytes (ncclMemAlloc)")
        address = box.value
        assert address is not None
        owner: Any = _Owner() if self.on_gpu else (ctypes.c_ubyte * nbytes).from_address(address)
        # Freeing is local and never waits for other ranks, so the garbage collector may do it. At exit nobody
        # does.
        weakref.finalize(owner, _free, self.library, address, self.device, os.getpid()).atexit = False
        if self.on_gpu:
            return gpu.array_at(address, nbytes, owner, self.device or 0, shape, kind)
        as_bytes = np.frombuffer(owner, dtype=np.uint8)[: prod(shape) * kind.itemsize]
        return as_bytes.view(kind).reshape(shape)

    def register(self, x: Any) -> Registered:
        """Register ``x`` for zero-copy calls (``ncclCommRegister``). Other ranks need not do the same."""
        return self._registered("register", Registered, x, None)

    def register_window(self, x: Any, *, flags: int = SYMMETRIC) -> Window:
        """Open ``x`` to the other ranks (``ncclCommWindowRegister``). Every rank calls it, with one size.

        ``x`` comes from ``comm.empty``. It is kept alive until ``destroy`` or the communicator's end, whether
        or not somebody holds the Window. Before ``destroy`` every put to it must have arrived: place a
        barrier there. ``flags`` are NCCL's (1: symmetric, for the fastest collectives; 0: plain).
        """
        return self._registered("register_window", Window, x, integer("register_window", "flags", flags))

    def put(
        self,
        x: Any,
        peer: int,
        window: Window,
        offset: int = 0,
        *,
        signal: int = 0,
        context: int = 0,
        stream: Any = None,
    ) -> None:
        """Write ``x`` into ``peer``'s array of ``window``, at ``offset`` bytes, and then signal ``peer``.

        ``x`` has the dtype of the window's array; where one of the two is uint8, plain bytes are written.
        ``peer`` sees the data after its ``wait_signal``. ``signal`` and ``context`` choose the signal that is
        raised.
        """
        call, function = "put", "ncclPutSignal"
        self._check_open(call)
        peer = check_rank(call, "peer", peer, self.size)
        buffer = view_in_place(call, "x", x, self._place)
        dtype, lanes = moved_as(buffer, self.on_gpu)
        if not isinstance(window, Window) or window.comm is not self:
            raise TypeError(
                f"{call}: window must be a Window of this communicator (comm.register_window), not {window!r}"
            )
        names = buffer.element.name, window._buffer.element.name
        if names[0] != names[1] and "uint8" not in names:
            raise InvalidArgumentError(
                f"{call}: x is {names[0]} and the window's array is {names[1]}; nothing is cast on the way, "
                f"pass an x of {names[1]}, or x.view('uint8') to write its bytes"
            )
        start = integer(call, "offset", offset, None, None)
        if start < 0 or start + buffer.nbytes > window._buffer.nbytes:
            raise InvalidArgumentError(
                f"{call}: {buffer.nbytes} bytes at offset {start} do not fit a window of "
                f"{window._buffer.nbytes} bytes"
            )
        arguments = (
            *(buffer.address, buffer.count * lanes, dtype, peer, window.handle, start),
            *(*_which(call, signal, context), 0, self._handle),
        )
        planned = Plan(None, None, 0, dtype, None, None, (buffer, window._buffer))
        self._issue(f"{call} ({function})", function, arguments, stream, planned)

    def signal(self, peer: int, *, signal: int = 0, context: int = 0, stream: Any = None) -> None:
        """Raise a signal at ``peer``, after the earlier puts to it."""
        call, function = "signal", "ncclSignal"
        self._check_open(call)
        arguments = (
            check_rank(call, "peer", peer, self.size),
            *_which(call, signal, context),
            0,
            self._handle,
        )
        self._issue_without_data(call, function, arguments, stream)

    def wait_signal(
        self,
        peers: int | Iterable[int] | Mapping[int, int],
        count: int = 1,
        *,
        signal: int = 0,
        context: int = 0,
        stream: Any = None,
    ) -> None:
        """Wait for ``count`` signals from each of ``peers``: a rank, several, or a mapping rank: count."""
        call, function = "wait_signal", "ncclWaitSignal"
        self._check_open(call)
        if isinstance(peers, Mapping):
            wanted = dict(peers)
        else:
            ranks = peers if isinstance(peers, Iterable) else (peers,)
            wanted = dict.fromkeys(ranks, count)
        if not wanted:
            raise InvalidArgumentError(f"{call}: no peer to wait for; name at least one rank")
        signal, context = _which(call, signal, context)
        rows = [
            ncclWaitSignalDesc_t(
                integer(call, "count", number, 1), check_rank(call, "peer", peer, self.size), signal, context
            )
            for peer, number in wanted.items()
        ]
        descriptions = (ncclWaitSignalDesc_t * len(rows))(*rows)
        arguments = (len(rows), descriptions, self._handle)
        self._issue_without_data(call, function, arguments, stream)

    def _issue_without_data(self, call: str, function: str, arguments: tuple[Any, ...], stream: Any) -> None:
        # The stream is found from an array's library, so a call without one is given the communicator's
        # token.
        token = arrays.view(call, "token", self._get_token())
        planned = Plan(None, None, 0, DataType.UINT8, None, None, (token,))
        self._issue(f"{call} ({function})", function, arguments, stream, planned)

    def _registered(self, call: str, kind: type[Any], x: Any, flags: int | None) -> Any:
        self._check_open(call)
        buffer = view_in_place(call, "x", x, self._place)
        if buffer.read_only:
            raise InvalidArgumentError(f"{call}: x ({buffer}) cannot be written: {buffer.read_only}")
        if flags is not None and buffer.address % _ALIGNMENT:
            raise InvalidArgumentError(
                f"{call}: x ({buffer}) starts at {buffer.address:#x}, and a window starts at a multiple of "
                f"{_ALIGNMENT}; allocate it with comm.empty(shape, dtype)"
            )
        box = ctypes.c_void_p()
        arguments = (self._handle, buffer.address, buffer.nbytes, ctypes.byref(box))

        def register() -> int:
            if flags is None:
                return self.library.ncclCommRegister(*arguments)
            return self.library.ncclCommWindowRegister(*arguments, flags)

        def registered(code: int) -> Any:
            function = "ncclCommRegister" if flags is None else "ncclCommWindowRegister"
            self._settle(code, f"{call} ({function})", (box, buffer))
            if box.value is None:
                raise InvalidUsageError(
                    f"{call}: the library did not register x ({buffer}); NCCL_DEBUG=INFO says why"
                    if flags is None
                    else f"{call}: the library made no window for x ({buffer}): not supported between these "
                    "ranks (NCCL_DEBUG=INFO says why); use the array without a window"
                )
            return kind(self, buffer, box.value)

        return hand_over((box, buffer), register, registered)


def _which(call: str, signal: Any, context: Any) -> tuple[int, int]:
    return integer(call, "signal", signal, 0), integer(call, "context", context, 0)


def _plain_dtype(call: str, dtype: Any) -> np.dtype:
    """The dtype of memory that the library fills: of some bytes, and without Python objects."""
    kind = arrays.numpy_dtype(call, dtype)
    if kind.hasobject:
        raise TypeError(f"{call}: dtype={dtype!r} is of Python objects, which are no memory of the library's")
    if not kind.itemsize:
        raise InvalidArgumentError(f"{call}: dtype={dtype!r} has no size; give it one, such as {kind.kind}8")
    return kind


class _Owner:
    """Stands for an allocation: when it goes, so does the memory."""


def _free(library: Library, address: int, device: int | None, process: int) -> None:
    if process != os.getpid():
        return  # a forked child has no part in its parent's memory

    def free() -> None:
        check(library, library.ncclMemFree(address), "freeing memory of comm.empty (ncclMemFree)")

    if device is None:
        free()
    else:
        gpu.free_after_work(device, free)

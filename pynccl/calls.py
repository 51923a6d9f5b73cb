"""The collectives and point-to-point calls of a Communicator. All of them go through ``_run`` and ``_issue``.

The signatures are written out for readers and editors; what each call does to shapes, ranks and memory is a
row of ``operations.OPERATIONS``, and the checks are ``operations.plan``.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from . import gpu
from .abi.enums import Result
from .abi.errors import InvalidUsageError
from .arrays import STREAM_ORDERED
from .config import algorithm_config
from .core import Core
from .elements import operation_name
from .flight import gpu_flight, hand_over
from .group import Deferred, ignore, nothing
from .operations import OPERATIONS, Operation, Plan, check_rank, plan, plan_message
from .premul import PreMulSum
from .prepared import Prepared
from .quick import CLOSED, NOT_TAKEN, Records, Take, new_result, not_taken
from .streams import Stream, gpu_stream, host_stream
from .threadstate import busy, current

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, ALL_TO_ALL, GATHER, SCATTER = OPERATIONS.values()


class Collectives(Core):
    """What a Communicator does with data."""

    _records: Records | None = None
    _quick_all_reduce: Any  # see quick.Records
    _quick_all_gather: Any
    _quick_reduce_scatter: Any
    _quick_broadcast: Any
    _quick_reduce: Any
    _quick_all_to_all: Any
    _quick_gather: Any
    _quick_scatter: Any
    _quick_send: Any
    _quick_recv: Any

    # --- collectives ----------------------------------------------------------------------------------------
    # What is common to all (arrays, `stream`, `algorithm`) is in the docstring of Communicator.

    def all_reduce(
        self, x: Any, out: Any = None, op: Any = "sum", *, stream: Any = None, algorithm: Any = None
    ) -> Any:
        """Combine ``x`` of all ranks by ``op``; every rank gets the result.

        ``out`` (default ``x`` itself) has the shape and dtype of ``x``, and is returned. ``op`` is "sum",
        "prod", "max", "min", "avg" or a ``premul_sum``; booleans take "max" (or) and "min" (and), complex
        numbers "sum" and "avg". "avg" of integers drops the fraction: -3 over 2 ranks is -1. TypeError or
        InvalidArgumentError for what cannot be done; NcclError when the call fails.

        >>> comm.all_reduce(np.full(4, comm.rank, "f4"))       # doctest: +SKIP
        """
        # The quick path, for the calls that hot loops make: see quick.py.
        if stream is None and algorithm is None and not (busy and current.busy):
            try:
                take = self._quick_all_reduce[op]
            except (KeyError, TypeError):  # no such operation or root; the general path says so
                take = not_taken
            code = take(x, out)
            if code >= 0:
                if code:
                    self._settle(code, "all_reduce (ncclAllReduce)", (x, out))
                return x if out is None else out
        return self._run(ALL_REDUCE, x, out, op, None, stream, algorithm)

    def all_gather(self, x: Any, out: Any = None, *, stream: Any = None, algorithm: Any = None) -> Any:
        """Every rank gets ``x`` of all ranks in rank order: (k, ...) gives (size * k, ...), () gives (size,).

        ``out``, if given, has size times the elements of ``x``; ``x`` may be this rank's block of it (in
        place).
        """
        if stream is None and algorithm is None and not (busy and current.busy):
            made = new_result(ALL_GATHER, x, self.size) if out is None else out
            code = self._quick_all_gather(x, made)
            if code >= 0:
                if code:
                    self._settle(code, "all_gather (ncclAllGather)", (x, made))
                return made
        return self._run(ALL_GATHER, x, out, None, None, stream, algorithm)

    def reduce_scatter(
        self, x: Any, out: Any = None, op: Any = "sum", *, stream: Any = None, algorithm: Any = None
    ) -> Any:
        """Combine ``x`` of all ranks by ``op``; rank r gets block r: (size * k, ...) gives (k, ...).

        ``out``, if given, has 1/size of the elements; it may be this rank's block of ``x`` (in place).
        """
        if stream is None and algorithm is None and not (busy and current.busy):
            made = new_result(REDUCE_SCATTER, x, self.size) if out is None else out
            try:
                take = self._quick_reduce_scatter[op]
            except (KeyError, TypeError):  # no such operation or root; the general path says so
                take = not_taken
            code = take(x, made)
            if code >= 0:
                if code:
                    self._settle(code, "reduce_scatter (ncclReduceScatter)", (x, made))
                return made
        return self._run(REDUCE_SCATTER, x, out, op, None, stream, algorithm)

    def broadcast(
        self, x: Any, root: int = 0, out: Any = None, *, stream: Any = None, algorithm: Any = None
    ) -> Any:
        """Every rank gets the root's ``x``: in ``x``, or in ``out`` (``x`` may be None elsewhere)."""
        if type(root) is int and stream is None and algorithm is None and not (busy and current.busy):
            try:
                take = self._quick_broadcast[root]
            except (KeyError, TypeError):  # no such operation or root; the general path says so
                take = not_taken
            code = take(x, out)
            if code >= 0:
                if code:
                    self._settle(code, "broadcast (ncclBroadcast)", (x, out))
                return x if out is None else out
        return self._run(BROADCAST, x, out, None, root, stream, algorithm)

    def reduce(
        self,
        x: Any,
        root: int = 0,
        out: Any = None,
        op: Any = "sum",
        *,
        stream: Any = None,
        algorithm: Any = None,
    ) -> Any:
        """Combine ``x`` of all ranks by ``op``; the root gets the result, in ``x`` itself or in ``out``.

        Returns it on the root and None elsewhere, where ``x`` stays as it is and ``out`` is not used.
        """
        if type(root) is int and stream is None and algorithm is None and not (busy and current.busy):
            try:
                take = self._quick_reduce[root][op]
            except (KeyError, TypeError):  # no such operation or root; the general path says so
                take = not_taken
            code = take(x, out)
            if code >= 0:
                if code:
                    self._settle(code, "reduce (ncclReduce)", (x, out))
                return None if root != self.rank else x if out is None else out
        return self._run(REDUCE, x, out, op, root, stream, algorithm)

    def all_to_all(self, x: Any, out: Any = None, *, stream: Any = None, algorithm: Any = None) -> Any:
        """Block j of ``x`` goes to rank j, which finds it as block r of its result, r being this rank.

        ``x`` and ``out`` are (size * k, ...) and must not overlap.
        """
        if stream is None and algorithm is None and not (busy and current.busy):
            made = new_result(ALL_TO_ALL, x, self.size) if out is None else out
            code = self._quick_all_to_all(x, made)
            if code >= 0:
                if code:
                    self._settle(code, "all_to_all (ncclAlltoAll)", (x, made))
                return made
        return self._run(ALL_TO_ALL, x, out, None, None, stream, algorithm)

    def gather(
        self, x: Any, root: int = 0, out: Any = None, *, stream: Any = None, algorithm: Any = None
    ) -> Any:
        """The root gets ``x`` of all ranks as in ``all_gather``; elsewhere None, and ``out`` is not used."""
        if type(root) is int and stream is None and algorithm is None and not (busy and current.busy):
            made = new_result(GATHER, x, self.size) if out is None and root == self.rank else out
            try:
                take = self._quick_gather[root]
            except (KeyError, TypeError):  # no such operation or root; the general path says so
                take = not_taken
            code = take(x, made)
            if code >= 0:
                if code:
                    self._settle(code, "gather (ncclGather)", (x, made))
                return made if root == self.rank else None
        return self._run(GATHER, x, out, None, root, stream, algorithm)

    def scatter(
        self, x: Any, root: int = 0, out: Any = None, *, stream: Any = None, algorithm: Any = None
    ) -> Any:
        """Rank r gets block r of the root's ``x``: (size * k, ...) gives (k, ...).

        Off the root ``x`` is not read: pass None and ``out``, or an array of the root's shape to size the
        result.
        """
        if type(root) is int and stream is None and algorithm is None and not (busy and current.busy):
            made = new_result(SCATTER, x, self.size) if out is None and root == self.rank else out
            try:
                take = self._quick_scatter[root]
            except (KeyError, TypeError):  # no such operation or root; the general path says so
                take = not_taken
            code = take(x, made)
            if code >= 0:
                if code:
                    self._settle(code, "scatter (ncclScatter)", (x, made))
                return made
        return self._run(SCATTER, x, out, None, root, stream, algorithm)

    # --- point to point -------------------------------------------------------------------------------------

    def send(self, x: Any, peer: int, *, stream: Any = None) -> None:
        """Send ``x`` to rank ``peer``, which receives as many elements of the same dtype.

        Sends and receives that depend on each other belong in one ``pynccl.group()``; so does a message to
        oneself.
        """
        if type(peer) is int and stream is None and not (busy and current.busy):
            try:
                take = self._quick_send[peer]
            except KeyError:  # no such rank; the general path says so
                take = not_taken
            code = take(x, None)
            if code >= 0:
                if code:
                    self._settle(code, "send (ncclSend)", x)
                return
        self._message("send", "ncclSend", x, peer, stream, writes=False)

    def recv(self, x: Any, peer: int, *, stream: Any = None) -> Any:
        """Receive into ``x`` from rank ``peer``; returns ``x``."""
        if type(peer) is int and stream is None and not (busy and current.busy):
            try:
                take = self._quick_recv[peer]
            except KeyError:
                take = not_taken
            code = take(x, None)
            if code >= 0:
                if code:
                    self._settle(code, "recv (ncclRecv)", x)
                return x
        return self._message("recv", "ncclRecv", x, peer, stream, writes=True)

    def barrier(self, *, stream: Any = None) -> None:
        """Return when every rank has called it (on a GPU: after waiting for the stream)."""
        if stream is None and not (busy and current.busy) and self._token is not None:
            code = self._quick_all_reduce.get("max", not_taken)(self._token, None)
            if code >= 0:
                if code:
                    self._settle(code, "barrier (ncclAllReduce)", self._token)
                return
        self._check_open("barrier")
        planned = plan(ALL_REDUCE, self._get_token(), None, "max", None, self._place)
        function, arguments = self._call(ALL_REDUCE, planned, None, None)
        queue, handle = self._issue(f"barrier ({function})", function, arguments, stream, planned)
        if current.group is not None:
            return  # it is made when the group ends, and takes effect on the stream
        if queue is not None:
            queue.synchronize()
        elif self.on_gpu:
            with gpu.on_device(self.device):
                gpu.synchronize(handle or 0)

    # --- for hot loops, and operations of the user ----------------------------------------------------------

    def prepare(
        self,
        call: str,
        x: Any,
        *,
        out: Any = None,
        op: Any = "sum",
        root: int = 0,
        stream: Any = None,
        algorithm: Any = None,
    ) -> Prepared:
        """A collective (by name) checked and marshalled once, to be called many times with the same arrays.

        The arrays are kept alive; what they hold may change between calls, their memory may not.
        ``stream=None`` is the stream that is current now. ``algorithm`` may be a schedule, too. Returns a
        callable that returns the collective's result.

        >>> step = comm.prepare("all_reduce", gradients)       # doctest: +SKIP
        >>> for batch in batches: compute(batch, gradients); step()      # doctest: +SKIP
        """
        what = OPERATIONS.get(call)
        if what is None:
            raise ValueError(f"prepare: {call!r} is not a collective; use one of {', '.join(OPERATIONS)}")
        self._check_open(f"prepare({call!r})")
        if self._selection is not None and algorithm is None and not self.on_gpu:
            algorithm = self._selected(call, x, out, op)  # on a GPU it could not be called in a group
        if _is_schedule(algorithm):
            from .collectives.dispatch import prepare_algorithm

            at = root if what.rooted else None
            return prepare_algorithm(self, call, x, out, op, at, stream, algorithm)
        planned = self._plan(what, x, out, op, root)
        function, arguments = self._call(what, planned, root if what.rooted else None, algorithm)
        queue, handle, hold = self._where(what.name, stream, planned)
        prepared = Prepared(self, what, function, (*arguments, handle), planned, queue, hold)
        self._prepared.add(prepared)
        return prepared

    def premul_sum(self, scalar: Any, dtype: Any = "float32") -> PreMulSum:
        """An ``op`` that multiplies this rank's data by ``scalar`` and then sums, for arrays of ``dtype``.

        Each rank may have its own factor. Free it with ``destroy()`` or a ``with`` block, or leave it to the
        end of the communicator.
        """
        self._check_open("premul_sum")
        return PreMulSum(self, scalar, dtype)

    # --- the one path ---------------------------------------------------------------------------------------

    def _run(
        self, what: Operation, x: Any, out: Any, op: Any, root: int | None, stream: Any, algorithm: Any
    ) -> Any:
        self._check_open(what.name)
        if self._selection is not None and algorithm is None:
            algorithm = self._selected(what.name, x, out, op)
        if _is_schedule(algorithm):
            from .collectives.dispatch import run_algorithm  # only those who use schedules pay for them

            return run_algorithm(self, what.name, x, out, op, root, stream, algorithm)
        if stream is None and algorithm is None and busy and self._in_group_only():
            keys = (root,) * what.rooted + (op,) * what.reduces
            made, result = self._quick_arrays(what, x, out, root)
            if self._defer(what.name, what.function, keys, x, made):
                return result
        planned = self._plan(what, x, out, op, root)
        function, arguments = self._call(what, planned, root, algorithm)
        self._issue(f"{what.name} ({function})", function, arguments, stream, planned)
        return planned.result

    def _selected(self, call: str, x: Any, out: Any, op: Any) -> str | None:
        """The schedule that the communicator's table has for a call on these; None: the library's own."""
        if isinstance(op, PreMulSum) or (self.on_gpu and current.group is not None):
            return None  # which a schedule cannot be in: it is a sequence of groups
        return self._selection.choose_for(call, x, out, self.size)

    def _message(self, call: str, function: str, x: Any, peer: int, stream: Any, *, writes: bool) -> Any:
        self._check_open(call)
        if (
            stream is None
            and busy
            and self._in_group_only()
            and self._defer(call, function, (peer,), x, None)
        ):
            return x if writes else None
        peer = check_rank(call, "peer", peer, self.size)
        planned = plan_message(call, x, self._place, writes=writes)
        arguments = (planned.send, planned.elements, planned.dtype, peer, self._handle)
        self._issue(f"{call} ({function})", function, arguments, stream, planned)
        return planned.result if writes else None

    def _in_group_only(self) -> bool:
        return current.stream is None and current.group is not None

    def _quick_arrays(self, what: Operation, x: Any, out: Any, root: int | None) -> tuple[Any, Any]:
        """``out`` for the quick path, and what the call returns there."""
        gets = not what.rooted or root == self.rank
        if out is None and not what.in_place_by_default and gets:
            out = new_result(what, x, self.size)
        result = x if out is None else out
        return out, result if gets or not what.out_on_root else None

    def _defer(self, name: str, function: str, keys: tuple[Any, ...], x: Any, out: Any) -> bool:
        """Whether this is a call for the quick path; then the open group has it, and makes it at its end."""
        take = getattr(self, f"_quick_{name}")
        try:
            for key in keys:
                take = take[key]
        except (KeyError, TypeError):  # no such operation or rank; the general path says so
            return False
        if any(type(key) not in (int, str) for key in keys) or take(x, out, None):
            return False
        called = f"{name} ({function})"

        def make() -> int:
            code = take(x, out)
            if code == NOT_TAKEN:
                raise InvalidUsageError(f"{called}: its array was changed before the end of the group")
            return code

        assert current.group is not None
        current.group._add(Deferred(self.library, self, called, make, ignore, nothing, None))
        return True

    def _issue(
        self, call: str, function: str, arguments: tuple[Any, ...], stream: Any, planned: Plan
    ) -> tuple[Stream | None, int | None]:
        """Make the library's call, now or with the group; keep its arrays alive. Returns where it runs.

        ``arguments`` are those before the stream and, for a ``Config`` function, the configuration as the
        last.
        """
        queue, handle, hold = self._where(call, stream, planned)
        made = getattr(self.library, function)
        if function.endswith("Config"):
            arguments = (*arguments[:-1], handle, ctypes.byref(arguments[-1]))
        else:
            arguments = (*arguments, handle)
        if current.group is None:
            if queue is None and not hold and self._blocking:
                code = made(*arguments)
                if code:
                    self._settle(code, call, planned.buffers)
            else:
                hand_over(
                    planned,
                    lambda: made(*arguments),
                    lambda code: self._after(code, call, planned, queue, handle, hold),
                )
        else:
            current.group._add(
                Deferred(
                    library=self.library,
                    comm=self,
                    name=call,
                    function=lambda: made(*arguments),
                    done=lambda code: self._after(code, call, planned, queue, handle, hold),
                    dropped=nothing,
                    keep=(planned, arguments),
                )
            )
        return queue, handle

    def _after(
        self, code: int, call: str, planned: Plan, queue: Stream | None, handle: int | None, hold: bool
    ) -> None:
        if code not in (0, Result.IN_PROGRESS):
            self._fail(code, call)
        if queue is not None:
            queue._flight.hold(planned.buffers)
        if code:
            self._settle(code, call, planned.buffers)
        if hold:
            gpu_flight.hold(handle or 0, planned.buffers)

    def _plan(self, what: Operation, x: Any, out: Any, op: Any, root: int | None) -> Plan:
        if what.rooted:
            root = check_rank(what.name, "root", root, self.size)
        if what.reduces:
            if isinstance(op, PreMulSum):
                op._check_comm(what.name, self)
            else:
                op = operation_name(what.name, op)
        return plan(what, x, out, op, root, self._place)

    def _call(
        self, what: Operation, planned: Plan, root: int | None, algorithm: str | None
    ) -> tuple[str, tuple[Any, ...]]:
        """The library's function, and its arguments without the stream (a configuration comes last)."""
        arguments: list[Any] = [planned.send, planned.recv, planned.elements, planned.dtype]
        if what.reduces:
            arguments.append(planned.op)
        if what.rooted:
            arguments.append(root)
        arguments.append(self._handle)
        if algorithm is None:
            return what.function, tuple(arguments)
        config = self._algorithms.get(algorithm)
        if config is None:
            config = algorithm_config(what.name, self.library, what.config_function, algorithm)
            self._algorithms[algorithm] = config
        return what.config_function, (*arguments, config)

    def _where(self, call: str, stream: Any, planned: Plan) -> tuple[Stream | None, int | None, bool]:
        """The host stream, the handle to pass, and whether an event on a CUDA stream must hold the arrays."""
        if not self.on_gpu:
            queue = host_stream(call, self.library, stream)
            return queue, queue.handle if queue is not None else None, False
        home, device = planned.buffers[0].home, planned.buffers[0].device
        assert device is not None
        ordinary = home.current_stream(device)
        handle = ordinary if stream is None else gpu_stream(call, stream)
        owned_elsewhere = any(buffer.home not in STREAM_ORDERED for buffer in planned.buffers)
        return None, handle, handle != ordinary or owned_elsewhere

    def _get_token(self) -> Any:
        """One element where calls of this communicator take data."""
        if self._token is None:
            with gpu.on_device(self.device):
                self._token = gpu.empty(1, "uint8") if self.on_gpu else np.zeros(1, "uint8")
        return self._token

    def _open_quick_path(self) -> None:
        """For calls that wait; without those that a table of algorithms (`_selection`) has a schedule for."""
        self._close_quick_path()
        if self.library.kind != "host" or not self._blocking:
            return
        table, size = self._selection, self.size  # no reference to this object: it would be a cycle

        def choosing(name: str, take: Take) -> Take:
            return take if table is None else table.quick(name, take, size)

        self._records = Records(self.library, self._handle or 0, self.rank, size, choosing)
        self._take_by(self._records.by_name)

    def _close_quick_path(self) -> None:
        if self._records is not None:
            self._records.close()
        self._take_by(CLOSED)

    def _take_by(self, tables: dict[str, Any]) -> None:
        for name, table in tables.items():
            setattr(self, f"_quick_{name}", table)


def _is_schedule(algorithm: Any) -> bool:
    """Whether it is for `pynccl.collectives`, and not one of the library's own."""
    return algorithm is not None and (not isinstance(algorithm, str) or algorithm.startswith("pynccl:"))

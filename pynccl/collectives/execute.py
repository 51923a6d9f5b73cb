"""Runs a schedule over any communicator's sends and receives, in groups: on NumPy arrays and on GPUs.

    run(generate("ring", comm.size), comm, x, op=np.logaddexp)

A round of the schedule is a group of messages and then reductions, by NumPy or CuPy, on the stream of the
call: nothing waits for a GPU, and a host stream does all of it in its own thread. So the reduction can be
whatever computes on arrays: a name of NCCL's, a ufunc, a function of two arrays, a CuPy kernel. What is
checked first: the arrays as for the collective of the same name, the operation on the dtype, and that the
schedule is proved.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from pynccl import gpu
from pynccl.abi.errors import InvalidArgumentError, InvalidUsageError
from pynccl.arrays import Buffer as Memory
from pynccl.arrays import numpy_dtype
from pynccl.collectives.failing import Queued, agree, ends_on_failure
from pynccl.collectives.flow import flow
from pynccl.collectives.rounds import Round, rounds
from pynccl.collectives.schedule import COLLECTIVES, Buffer, Kind, Schedule, check_is_schedule
from pynccl.collectives.verify import verify
from pynccl.elements import ELEMENTS, operation_name
from pynccl.flight import gpu_flight
from pynccl.group import group
from pynccl.operations import OPERATIONS, Plan, plan
from pynccl.premul import PreMulSum
from pynccl.threadstate import current

if TYPE_CHECKING:
    from pynccl.core import Core

__all__ = ["Call", "Reduction", "check_call", "execute", "run", "selftest"]


def run(
    schedule: Schedule,
    comm: Any,
    x: Any,
    out: Any = None,
    op: Any = "sum",
    *,
    stream: Any = None,
    unchecked: bool = False,
) -> Any:
    """Run a schedule on ``comm``; arrays and result are as for the comm's method of its collective.

    ``op``: "sum", "prod", "max", "min", "avg"; a ufunc (``np.logaddexp``, ``np.bitwise_xor``); a CuPy
    elementwise kernel of (a, b, result); a function of two arrays that returns their reduction, with the same
    shape and dtype; or ``comm.premul_sum(...)``. It must be associative, and commutative too unless the
    schedule's ``Proof`` says ``rank_order``. The schedule is proved when it is first used (`Fault` if it is
    wrong); ``unchecked=True`` runs one without proof. Raises InvalidArgumentError or TypeError, before
    anything is sent, for a schedule of another number of ranks and for what the arrays or the operation do
    not fit.

    A function ``op`` is first tried on zeros of the length that it will get. Whatever is raised there or
    later in the run, Ctrl-C too, ends the communicator: in host memory it is revoked, so the other ranks get
    RemoteError, which names this one, in this call or the next; elsewhere it is aborted on this rank. On a
    host stream the reductions happen in the stream's thread, and what a function raises there is raised by
    ``synchronize``, as with ``Stream.call``; what is queued on ``comm`` behind it does not begin any more.
    """
    check_is_schedule("run(schedule, comm, x)", schedule)
    return execute(check_call(schedule, comm, x, out, op, unchecked=unchecked), comm, stream)


def execute(call: Call, comm: Any, stream: Any, *, tried: bool = False) -> Any:
    """Run what was checked; returns the collective's result. ``tried``: a function ``op`` has been."""
    comm._check_open(call.name)
    if current.group is not None:
        raise InvalidUsageError(
            f"{call.name}: a schedule is a sequence of groups and cannot be inside one; call it outside of "
            "pynccl.group()"
        )
    queue, handle, hold = comm._where(call.name, stream, call.planned)
    if call.planned.elements == 0:
        _agree(call, comm, queue)
        return call.planned.result
    with contextlib.ExitStack() as stack:
        if comm.on_gpu:
            stack.enter_context(gpu.on_device(comm.device))
            stack.enter_context(_module("cupy").cuda.ExternalStream(handle or 0))
        reduction = reduction_of(call, comm)
        with ends_on_failure(comm, call.name):
            run_rounds = _Run(call, comm, reduction, queue, queue if queue is not None else handle)
            if reduction is not None and reduction.is_function and not tried:
                reduction.try_on(reduced_elements(call, comm))
        with run_rounds.queued or contextlib.nullcontext():
            _agree(call, comm, queue)
        with ends_on_failure(comm, call.name):
            run_rounds()
    if hold:
        gpu_flight.hold(handle or 0, call.planned.buffers)
    if queue is not None:
        queue._flight.hold((call.planned.buffers, run_rounds))
    return call.planned.result


def _agree(call: Call, comm: Any, queue: Any) -> None:
    op = call.op
    if op is not None and not isinstance(op, str):
        op = f"ufunc {op.__name__}" if isinstance(op, np.ufunc) else "a function"  # of which nothing is known
    agree(comm, call.name, queue, call.schedule.digest, call.count, call.memory.element.name, op)


# --- the checks of a call, for both executors ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked call: what runs, on which memory, with which reduction (None: the collective has none)."""

    name: str
    schedule: Schedule
    planned: Plan
    memory: Memory
    send: int | None
    recv: int | None
    count: int
    """Elements a block."""
    op: Any
    in_place: bool
    factor: Any = None
    """What IN is multiplied by first (premul_sum): one element."""


def check_call(
    schedule: Schedule, comm: Core, x: Any, out: Any, op: Any, *, root: int | None = None, unchecked: bool
) -> Call:
    """Check one rank's part of running a schedule; see ``run`` for what is raised."""
    name = f"{schedule.collective} by {schedule.name!r}"
    comm._check_open(name)
    if schedule.n != comm.size:
        raise InvalidArgumentError(
            f"{name}: the schedule is for {schedule.n} ranks and the communicator has {comm.size}; "
            "generate it with n=comm.size"
        )
    if root is not None and root != schedule.root:
        raise InvalidArgumentError(
            f"{name}: the schedule's root is {schedule.root} and the call's {root}; generate it with "
            f"root={root}"
        )
    check_proof(schedule, unchecked=unchecked)
    if hasattr(op, "check_schedule"):  # a `reductions.Operation`, which asks something of it
        op.check_schedule(schedule, unchecked=unchecked)
    what = OPERATIONS[schedule.collective]
    premul = what.reduces and isinstance(op, PreMulSum)
    custom = what.reduces and not premul and op is not None and not isinstance(op, str)
    if premul:
        op._check_comm(name, comm)
    elif what.reduces and not custom:
        op = operation_name(name, op)
    described = dataclasses.replace(what, reduces=False) if custom else what
    planned = plan(described, x, out, op, schedule.root if what.rooted else None, comm._place)
    memory = planned.buffers[-1]
    if hasattr(op, "check_array"):
        op.check_array(name, memory.element.name, memory.count)
        op = op.function  # which may be a ufunc
    has_in, has_out = schedule.has(Buffer.IN, comm.rank), schedule.has(Buffer.OUT, comm.rank)
    send = planned.send if has_in else None
    recv = planned.recv if has_out else None
    blocks = schedule.out_blocks if planned.recv is not None else schedule.in_blocks
    count = memory.count // blocks
    in_place = send is not None and recv is not None and count > 0 and _overlap(planned)
    if in_place and not schedule.in_place:
        raise InvalidArgumentError(
            f"{name}: this schedule cannot work in place; pass an out= that lies apart from x"
        )
    reduction, factor = ("sum", op.factor) if premul else (op, None)
    if not COLLECTIVES[what.name].reduces:
        reduction = None
    return Call(name, schedule, planned, memory, send, recv, count, reduction, in_place, factor)


def _overlap(planned: Plan) -> bool:
    if len(planned.buffers) == 1:
        return planned.send == planned.recv
    x, out = planned.buffers
    return x.address < out.address + out.nbytes and out.address < x.address + x.nbytes


def reduction_of(call: Call, comm: Any) -> Reduction | None:
    """The reduction of a call, as `Reduction` checks it. None: it has none."""
    if call.op is None:
        return None
    return Reduction(call.name, call.op, _dtype_of(call.memory), _module("cupy") if comm.on_gpu else np)


def reduced_elements(call: Call, comm: Any) -> int:
    """The most elements that one reduction of this rank has; a block, if it reduces nothing."""
    schedule = call.schedule
    lengths = [
        schedule.bounds(dst[1] + chunks - 1, call.count)[1] - schedule.bounds(dst[1], call.count)[0]
        for one in rounds(schedule, comm.rank)
        for kind, _, _, dst, chunks, _ in one.local
        if kind != Kind.COPY
    ]
    return max(lengths, default=0) or call.count


def check_proof(schedule: Schedule, *, unchecked: bool = False) -> None:
    """A `Fault` unless the schedule is proved right; it is proved once. ``unchecked``: its form alone."""
    kept = vars(schedule)
    if kept.get("_proved") or (unchecked and kept.get("_formed")):
        return
    if unchecked:
        flow(schedule)
        kept["_formed"] = True
    else:
        verify(schedule)
        kept["_proved"] = True


# --- reductions ---------------------------------------------------------------------------------------------

# NCCL's "max" and "min" pass over NaN as long as there is a number; so do fmax and fmin.
_UFUNCS = {"sum": "add", "prod": "multiply", "max": "fmax", "min": "fmin", "avg": "add"}


class Reduction:
    """``op`` on arrays of a dtype and module: ``reduction(a, b, out)``, and ``finish(x, n)`` at the end.

    InvalidArgumentError or TypeError, from the constructor, for an operation that cannot work on the dtype.
    A function of Python's (``is_function``) may fail on one rank alone, so `try_on` is left to the caller.
    """

    def __init__(self, call: str, op: Any, dtype: Any, arrays: Any) -> None:
        self.averages = isinstance(op, str) and op == "avg"
        function = getattr(arrays, _UFUNCS[op]) if isinstance(op, str) else op
        if arrays is not np and isinstance(function, np.ufunc):
            function = getattr(arrays, function.__name__, None)
        if not callable(function):
            raise TypeError(
                f"{call}: op={op!r} is no reduction of {arrays.__name__} arrays; pass a name such as 'sum', "
                "a ufunc, an elementwise kernel, or a function of two arrays"
            )
        self._arrays, self._dtype, self._function, self._call = arrays, dtype, function, call
        self._into = self._how(function)
        self.is_function = self._into == self._copying
        self._op = op
        if isinstance(function, np.ufunc) and (function.nin, function.nout) != (2, 1):
            raise TypeError(f"{call}: op={op!r} must have two inputs and one output")
        if not self.is_function:
            self.try_on(1)

    def __call__(self, a: Any, b: Any, out: Any) -> None:
        """out = a op b; ``out`` may be a or b."""
        self._into(a, b, out)

    def finish(self, x: Any, n: int) -> None:
        """What is left to do to a full result: an average is divided, towards zero as NCCL does."""
        if not self.averages or n == 1:
            return
        if x.dtype.kind not in "iu":
            self._arrays.divide(x, self._arrays.asarray(n, dtype=x.dtype), out=x)
            return
        negative = x < 0
        quotient = x // n
        quotient += negative & (quotient * n != x)
        x[...] = quotient

    def _how(self, function: Any) -> Callable[[Any, Any, Any], Any]:
        cupy = sys.modules.get("cupy")
        if isinstance(function, np.ufunc):
            return lambda a, b, out: function(a, b, out=out)
        if cupy is not None and isinstance(function, cupy.ufunc):
            return lambda a, b, out: function(a, b, out=out)
        if cupy is not None and isinstance(function, cupy.ElementwiseKernel):
            return function  # its last parameter is the result
        return self._copying

    def _copying(self, a: Any, b: Any, out: Any) -> None:
        result = self._function(_read_only(a), _read_only(b))
        if getattr(result, "shape", None) != a.shape or result.dtype != a.dtype:
            got = f"{getattr(result, 'dtype', type(result).__name__)}, shape {getattr(result, 'shape', '-')}"
            raise InvalidArgumentError(
                f"{self._call}: op gave {got} of two arrays of {a.dtype}, shape {a.shape}; it must keep both"
            )
        out[...] = result

    def try_on(self, elements: int) -> None:
        """Zeros through it: a type or shape that does not fit is an error now, and not on the way."""
        zeros = self._arrays.zeros(elements, self._dtype)
        try:
            with np.errstate(all="ignore"):
                self._into(zeros, zeros.copy(), self._arrays.empty_like(zeros))
        except InvalidArgumentError:
            raise
        except Exception as error:
            raise InvalidArgumentError(
                f"{self._call}: op={self._op!r} does not work on {self._dtype} ({error}); pass another op, "
                "or cast x"
            ) from error


def _read_only(x: Any) -> Any:
    """What a function of the user's gets: to reduce into an argument would change what others still need."""
    if not isinstance(x, np.ndarray):
        return x  # CuPy's arrays are always writable
    view = x.view()
    view.flags.writeable = False
    return view


# --- the interpreter ----------------------------------------------------------------------------------------


class _Run:
    """One execution: the three buffers as flat arrays, and the rounds one after the other."""

    def __init__(self, call: Call, comm: Any, reduction: Reduction | None, queue: Any, stream: Any) -> None:
        schedule, memory = call.schedule, call.memory
        self._call, self._comm, self._queue, self._stream = call, comm, queue, stream
        self._arrays = _module("cupy") if comm.on_gpu else np
        self._dtype = _dtype_of(memory)
        self._reduction = reduction
        self.queued = None if queue is None else Queued(comm, call.name, queue)
        self._taken: list[Any] = []
        count, blocks = call.count, (schedule.in_blocks, schedule.out_blocks)
        scratch = -(-schedule.scratch_chunks // schedule.parts) * count
        self._buffers = (
            self._flat(call.send, count * blocks[0]),
            self._flat(call.recv, count * blocks[1]),
            self._take(scratch),
        )

    def __call__(self) -> None:
        if self._call.factor is not None:
            self._multiply()
        with self.queued or contextlib.nullcontext():
            for one in rounds(self._call.schedule, self._comm.rank):
                landed = self._exchange(one)
                if one.local:
                    self._then(one, landed)
        self._last()

    def _do(self, work: Callable[[], None]) -> None:
        """Now, or behind what is on the host stream."""
        if self.queued is None:
            work()
        else:
            self.queued(work)

    def _multiply(self) -> None:
        """IN becomes memory of the run's own, with what the factor makes of the caller's."""
        given, *others = self._buffers
        scaled = self._take(given.size)
        self._buffers = (scaled, *others)

        def work() -> None:
            self._arrays.multiply(given, self._arrays.asarray(self._call.factor).reshape(1), out=scaled)

        self._do(work)

    def _exchange(self, one: Round) -> list[Any]:
        """Send and receive; where each received message lies. A message of no elements is not sent."""
        comm, stream = self._comm, self._stream
        landed = [
            self._take(self._size(chunk, chunks)) if buffer < 0 else self._span(buffer, chunk, chunks)
            for _, buffer, chunk, chunks in one.recvs
        ]
        outgoing = [(peer, self._span(*span)) for peer, *span in one.sends]
        if not any(x.size for x in landed) and not any(x.size for _, x in outgoing):
            return landed
        with group():
            for peer, x in outgoing:
                if x.size:
                    comm.send(x, peer, stream=stream)
            for (peer, *_), x in zip(one.recvs, landed, strict=True):
                if x.size:
                    comm.recv(x, peer, stream=stream)
        if not comm._blocking and self._queue is None:
            comm.wait()  # the messages may not even be on the stream yet, and a reduction is to follow them
        return landed

    def _then(self, one: Round, landed: list[Any]) -> None:
        def work() -> None:
            for kind, left, src, dst, chunks, message in one.local:
                to = self._span(*dst, chunks)
                if not to.size:
                    continue
                source = self._span(*src, chunks)
                if kind == Kind.COPY:
                    if _address(source) != _address(to):
                        to[...] = source
                    continue
                assert self._reduction is not None
                a, b = (source, landed[message]) if kind == Kind.RECV_REDUCE else (to, source)
                self._reduction(*((b, a) if left else (a, b)), to)
            for (_, buffer, *_), x in zip(one.recvs, landed, strict=True):
                if buffer < 0:
                    self._give(x)

        self._do(work)

    def _last(self) -> None:
        def end() -> None:
            out = self._buffers[Buffer.OUT]
            if self._reduction is not None and out is not None:
                self._reduction.finish(out, self._call.schedule.n)
            self._give(self._buffers[Buffer.SCRATCH])
            if self._call.factor is not None:
                self._give(self._buffers[Buffer.IN])

        self._do(end)

    def _size(self, chunk: int, chunks: int) -> int:
        first, end = self._bounds(chunk, chunks)
        return end - first

    def _bounds(self, chunk: int, chunks: int) -> tuple[int, int]:
        schedule, count = self._call.schedule, self._call.count
        return schedule.bounds(chunk, count)[0], schedule.bounds(chunk + chunks - 1, count)[1]

    def _span(self, buffer: int, chunk: int, chunks: int) -> Any:
        first, end = self._bounds(chunk, chunks)
        return self._buffers[buffer][first:end]

    # CuPy's own pool hands memory out again in the order of the stream, which is current here.

    def _take(self, elements: int) -> Any:
        if self._arrays is not np:
            return self._arrays.empty(elements, self._dtype)
        return _pool.take(elements, self._dtype)

    def _give(self, x: Any) -> None:
        if self._arrays is np:
            _pool.give(x)

    def _flat(self, address: int | None, elements: int) -> Any:
        if address is None:
            return None
        memory, nbytes = self._call.memory, elements * self._dtype.itemsize
        if self._arrays is np:
            raw = (ctypes.c_char * nbytes).from_address(address)
            return np.frombuffer(raw, dtype=np.uint8).view(self._dtype)
        assert memory.device is not None
        return gpu.array_at(
            address, nbytes, self._call.planned.buffers, memory.device, (elements,), self._dtype
        )


class _Pool:
    """Host memory used again and again: pages that are mapped already cost nothing."""

    MOST = 64  # arrays kept

    def __init__(self) -> None:
        self._free: dict[int, list[Any]] = {}
        self._kept = 0
        self._lock = threading.Lock()

    def take(self, elements: int, dtype: Any) -> Any:
        nbytes = elements * dtype.itemsize
        size = 1 << max(nbytes - 1, 63).bit_length()
        with self._lock:
            free = self._free.get(size)
            raw = free.pop() if free else None
            self._kept -= raw is not None
        if raw is None:
            raw = np.empty(size, np.uint8)
        return raw[:nbytes].view(dtype)

    def give(self, x: Any) -> None:
        raw = x
        while isinstance(raw.base, np.ndarray):
            raw = raw.base
        with self._lock:
            if self._kept < self.MOST:
                self._free.setdefault(raw.nbytes, []).append(raw)
                self._kept += 1


_pool = _Pool()


def _dtype_of(memory: Memory) -> Any:
    """The dtype of an array for NumPy and CuPy; that of a type that NumPy lacks comes by its name."""
    dtype = getattr(memory.keep, "dtype", None)
    if isinstance(dtype, np.dtype):
        return dtype
    if memory.element.name in ELEMENTS:
        return numpy_dtype("run", memory.element.name)
    return np.dtype((np.void, memory.element.itemsize))


def _address(x: Any) -> int:
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr


def _module(name: str) -> Any:
    return sys.modules[name]


def selftest(arguments: list[str]) -> int:
    """`python -m pynccl.collectives selftest`; see `selftest.py`."""
    from pynccl.collectives.selftest import main

    return main(arguments)

"""What ``algorithm=`` of a call means when it is not the library's own: which executor runs it.

A schedule, a `Compiled`, or a name such as "pynccl:ring" runs compiled where that can be (the host library,
and one of NCCL's reductions), else round by round.
"""

from __future__ import annotations

from typing import Any

from pynccl.abi.enums import RedOp
from pynccl.abi.errors import InvalidArgumentError
from pynccl.collectives.compiled import FUNCTION, Compiled, compile
from pynccl.collectives.execute import Call, check_call, execute, reduced_elements, reduction_of
from pynccl.collectives.failing import ends_on_failure
from pynccl.collectives.reductions import operation_of
from pynccl.collectives.registry import ALGORITHMS, generate
from pynccl.collectives.schedule import COLLECTIVES, Schedule
from pynccl.elements import operation_name
from pynccl.operations import check_rank

__all__ = ["PreparedRun", "prepare_algorithm", "run_algorithm"]

PREFIX = "pynccl:"


def run_algorithm(
    comm: Any, call: str, x: Any, out: Any, op: Any, root: int | None, stream: Any, algorithm: Any
) -> Any:
    """``comm``'s method ``call`` by a schedule. Raises what `run` and `compile` do."""
    op = operation_name(call, op) if isinstance(op, RedOp) else operation_of(op)
    found = _executor(comm, call, op, root, algorithm)
    if isinstance(found, Compiled):
        return found(x, out, op, stream=stream, root=root)
    return execute(check_call(found, comm, x, out, op, root=root, unchecked=False), comm, stream)


def prepare_algorithm(
    comm: Any, call: str, x: Any, out: Any, op: Any, root: int | None, stream: Any, algorithm: Any
) -> Any:
    """The same, checked now and run when the result is called: a `pynccl.prepared.Prepared` or the like."""
    op = operation_name(call, op) if isinstance(op, RedOp) else operation_of(op)
    found = _executor(comm, call, op, root, algorithm)
    if isinstance(found, Compiled):
        return found.prepare(x, out, op, stream=stream, root=root)
    return PreparedRun(check_call(found, comm, x, out, op, root=root, unchecked=False), comm, stream)


class PreparedRun:
    """A checked call of a schedule that is interpreted: call it to run it. Keeps its arrays alive."""

    def __init__(self, call: Call, comm: Any, stream: Any) -> None:
        reduction = reduction_of(call, comm)  # what does not fit is an error now
        if reduction is not None and reduction.is_function and call.planned.elements:
            with ends_on_failure(comm, call.name):  # as in a call
                reduction.try_on(reduced_elements(call, comm))
        # The stream is fixed here, as `prepare` says: later the current one may be another.
        queue, handle, _ = comm._where(call.name, stream, call.planned)
        self._call, self._comm = call, comm
        self._stream = queue if queue is not None else handle or 0
        self.result = call.planned.result

    def __call__(self) -> Any:
        """Run the collective; returns its result (the same array each time)."""
        return execute(self._call, self._comm, self._stream, tried=True)

    def __repr__(self) -> str:
        return f"<Prepared {self._call.name} on {self._comm!r}>"


def _executor(comm: Any, call: str, op: Any, root: int | None, algorithm: Any) -> Compiled | Schedule:
    """What runs it: compiled, or a schedule to be interpreted."""
    if root is not None:
        root = check_rank(call, "root", root, comm.size)
    if isinstance(algorithm, Compiled):
        _check_collective(call, algorithm.schedule)
        if algorithm._comm is not comm:
            raise InvalidArgumentError(
                f"{call}: {algorithm!r} is compiled for another communicator than {comm!r}; compile it for "
                "this one, or pass the schedule"
            )
        return algorithm
    schedule = _named(call, algorithm, comm.size, root) if isinstance(algorithm, str) else algorithm
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"{call}: algorithm must be a name such as 'ring' (the library's) or 'pynccl:ring', or a "
            f"schedule, not {type(schedule).__name__}{_slip(schedule)}"
        )
    _check_collective(call, schedule)
    named = isinstance(op, str) or not COLLECTIVES[call].reduces
    return compile(schedule, comm) if named and comm.library.has(FUNCTION) else schedule


def _check_collective(call: str, schedule: Schedule) -> None:
    if schedule.collective != call:
        raise InvalidArgumentError(
            f"{call}: schedule {schedule.name!r} is one of {schedule.collective}; generate it with "
            f"collective={call!r}"
        )


def _slip(given: Any) -> str:
    if hasattr(given, "build"):
        return "; pass what its build() returns"
    return f"; call it: {getattr(given, '__name__', 'f')}(comm.size)" if callable(given) else ""


_generated: dict[Any, Schedule] = {}


def _named(call: str, algorithm: str, n: int, root: int | None) -> Schedule:
    name = algorithm.removeprefix(PREFIX)
    row = ALGORITHMS.get((call, name))
    key = (call, name, n, root, row and row.generator)  # which a notebook may define again
    if key not in _generated:
        if call not in COLLECTIVES:
            raise InvalidArgumentError(
                f"{call}: algorithm={algorithm!r}: there are no schedules of {call}, only of "
                f"{', '.join(COLLECTIVES)}; leave algorithm=None"
            )
        try:
            _generated[key] = generate(name, n, collective=call, **({} if root is None else {"root": root}))
        except ValueError as error:
            raise InvalidArgumentError(f"{call}: algorithm={algorithm!r}: {error}") from error
    return _generated[key]

"""The ten data-moving calls as a table, and the one checked path that turns arrays into a library call.

A row of ``OPERATIONS`` says what a collective does to shapes and which ranks give and get data; ``plan``
derives every check, default output and message from it. It knows sizes and ranks, but no communicator: tests
need none.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import arrays
from .abi.enums import INT_MAX, INT_MIN, DataType
from .abi.errors import InvalidArgumentError
from .arrays import UNKNOWN_DEVICE, Buffer
from .elements import FP8, reduction


@dataclass(frozen=True)
class Operation:
    """One collective. A *block* is the ``count`` elements that the library's call takes."""

    name: str
    function: str
    x_blocks: bool = False
    """``x`` holds one block for each rank (else one block)."""
    out_blocks: bool = False
    """``out`` holds one block for each rank (else one block)."""
    reduces: bool = False
    rooted: bool = False
    x_on_root: bool = False
    """Only the root's ``x`` is read."""
    out_on_root: bool = False
    """Only the root's ``out`` is written."""
    may_be_in_place: bool = True

    @property
    def config_function(self) -> str:
        return self.function + "Config"

    @property
    def in_place_by_default(self) -> bool:
        """Without ``out`` the result replaces ``x``: the calls whose output has the shape of their input."""
        return self.x_blocks == self.out_blocks and self.may_be_in_place

    @property
    def reshapes(self) -> bool:
        return self.x_blocks or self.out_blocks


OPERATIONS: dict[str, Operation] = {
    row.name: row
    for row in (
        Operation("all_reduce", "ncclAllReduce", reduces=True),
        Operation("all_gather", "ncclAllGather", out_blocks=True),
        Operation("reduce_scatter", "ncclReduceScatter", x_blocks=True, reduces=True),
        Operation("broadcast", "ncclBroadcast", rooted=True, x_on_root=True),
        Operation("reduce", "ncclReduce", reduces=True, rooted=True, out_on_root=True),
        Operation("all_to_all", "ncclAlltoAll", x_blocks=True, out_blocks=True, may_be_in_place=False),
        Operation("gather", "ncclGather", out_blocks=True, rooted=True, out_on_root=True),
        Operation("scatter", "ncclScatter", x_blocks=True, rooted=True, x_on_root=True),
    )
}


class Plan(NamedTuple):
    """A checked call: what the library is given, what the caller gets back."""

    send: int | None
    recv: int | None
    elements: int
    dtype: DataType
    op: int | None
    result: Any
    buffers: tuple[Buffer, ...]
    """In flight until the call is done; their ``keep`` owns the memory."""


class Place(NamedTuple):
    """Where a call runs: what ``plan`` needs to know of a communicator."""

    rank: int
    size: int
    on_gpu: bool
    device: int | None


def plan(what: Operation, x: Any, out: Any, op: Any, root: int | None, place: Place) -> Plan:
    """Check one rank's part of a collective. ``op``, for reductions, is a name or a PreMulSum.

    Raises TypeError and InvalidArgumentError. Nothing has been given to the library when it raises.
    """
    call, size = what.name, place.size
    at_root = not what.rooted or root == place.rank
    gives, gets = at_root or not what.x_on_root, at_root or not what.out_on_root

    source = target = None
    if x is not None:
        source = _memory(call, "x", x, what, place)
        if what.x_blocks:
            _check_divides(call, source, size)
    elif gives or out is None:
        why = "its data is read there" if gives else "the shape of the output is not known; pass out="
        raise TypeError(f"{call}: x is None on rank {place.rank}, but {why}")
    if gets:
        target = _output(what, source, out, place)
        if source is not None and source is not target:
            _check_pair(what, source, target, size)
            if gives:
                _check_overlap(what, source, target, place.rank)

    shown, blocked = (target, what.out_blocks) if target is not None else (source, what.x_blocks)
    assert shown is not None
    dtype, lanes, code = _types(what, shown, op, place.on_gpu)
    return Plan(
        send=(source if source is not None and gives else shown).address,
        recv=target.address if target is not None else None,
        elements=(shown.count // size if blocked else shown.count) * lanes,
        dtype=dtype,
        op=code,
        result=target.array if target is not None else None,
        buffers=(shown,) if source is None or source is shown else (source, shown),
    )


def plan_message(call: str, x: Any, place: Place, *, writes: bool) -> Plan:
    """Check the array of a point-to-point call; ``writes`` when it receives."""
    buffer = view_in_place(call, "x", x, place)
    if writes and buffer.read_only:
        raise InvalidArgumentError(f"{call}: x ({buffer}) cannot be written: {buffer.read_only}")
    dtype, lanes = moved_as(buffer, place.on_gpu)
    return Plan(
        send=buffer.address,
        recv=buffer.address,
        elements=buffer.count * lanes,
        dtype=dtype,
        op=None,
        result=buffer.array,
        buffers=(buffer,),
    )


def integer(call: str, role: str, value: Any, least: int | None = INT_MIN, most: int | None = INT_MAX) -> int:
    """``value`` as an int between ``least`` and ``most``, or an error that names the argument.

    The limits are those of a C int unless given: ctypes cuts a larger number without a word.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{call}: {role} must be an integer, not {type(value).__name__} ({value!r})"
        ) from None
    if least is not None and number < least:
        raise InvalidArgumentError(f"{call}: {role}={number} must be at least {least}")
    if most is not None and number > most:
        raise InvalidArgumentError(f"{call}: {role}={number} must be at most {most}")
    return number


def check_rank(call: str, role: str, value: Any, size: int) -> int:
    """``value`` as a rank of a communicator of ``size``, or an error with the range."""
    rank = integer(call, role, value, None, None)
    if not 0 <= rank < size:
        raise InvalidArgumentError(
            f"{call}: {role}={rank} is not a rank of this communicator; use 0 to {size - 1}"
        )
    return rank


def view_in_place(call: str, role: str, x: Any, place: Place) -> Buffer:
    """The array as contiguous memory that the communicator's library can reach."""
    buffer = arrays.view(call, role, x)
    if place.on_gpu and buffer.device is None:
        raise InvalidArgumentError(
            f"{call}: {role} ({buffer}) is in host memory and this communicator is NCCL's, for GPU memory; "
            f"pass cupy.asarray({role}), or make a host communicator with pynccl.init(library='host') or "
            "PYNCCL_LIBRARY=host"
        )
    if buffer.device is not None and buffer.device != place.device:
        where = (
            f"GPU {buffer.device}" if buffer.device != UNKNOWN_DEVICE else "a GPU that CUDA cannot find here"
        )
        if not place.on_gpu:
            raise InvalidArgumentError(
                f"{call}: {role} ({buffer}) is on {where} and this communicator is the host library's, for "
                "host "
                f"memory; pass cupy.asnumpy({role}), or make a communicator with pynccl.init(library='nccl')"
            )
        raise InvalidArgumentError(
            f"{call}: {role} ({buffer}) is on {where} and this communicator is on GPU {place.device}; copy "
            "it there, "
            f"or choose the array's GPU with cupy.cuda.Device(...).use() before pynccl.init"
        )
    if not (buffer.c_order or buffer.f_order):
        raise InvalidArgumentError(
            f"{call}: {role} ({buffer}) is not contiguous; pass a contiguous copy, "
            f"np.ascontiguousarray({role}), "
            "and copy the result back if it is an output"
        )
    return buffer


def moved_as(buffer: Buffer, on_gpu: bool) -> tuple[DataType, int]:
    """The data type an array travels as when nothing is computed, and library elements per array element."""
    element = buffer.element
    # NCCL wants an sm_90 GPU for fp8 even where it only copies; as bytes any GPU does it.
    code = DataType.UINT8 if on_gpu and element.moves_as in FP8 else element.moves_as
    return code, element.move_lanes


def _memory(call: str, role: str, x: Any, what: Operation, place: Place) -> Buffer:
    buffer = view_in_place(call, role, x, place)
    if what.reshapes and not buffer.c_order:
        raise InvalidArgumentError(
            f"{call}: {role} ({buffer}) is in Fortran order, so its blocks are not along the first axis; "
            f"pass np.ascontiguousarray({role}), or {role}.T if the last axis is meant"
        )
    return buffer


def _types(what: Operation, buffer: Buffer, op: Any, on_gpu: bool) -> tuple[DataType, int, int | None]:
    """(data type, library elements per array element, operation code)."""
    if not what.reduces:
        return *moved_as(buffer, on_gpu), None
    element = buffer.element
    if not isinstance(op, str):  # a PreMulSum, whose communicator the caller has checked
        op._check_element(what.name, element)
        return op._dtype, element.reduce_lanes, op.handle
    code = reduction(what.name, element, op)
    assert element.reduces_as is not None
    return element.reduces_as, element.reduce_lanes, code


def _output(what: Operation, source: Buffer | None, out: Any, place: Place) -> Buffer:
    """Where the result goes: ``out``, or ``x`` itself, or a new array of x's library."""
    call = what.name
    if out is not None:
        target = _memory(call, "out", out, what, place)
    else:
        assert source is not None
        if what.in_place_by_default:
            target = source
        else:
            return _memory(
                call, "out", source.home.empty(source, _output_shape(what, source, place.size)), what, place
            )
    if target.read_only:
        role, remedy = (
            ("x", "it is also the output; pass out=") if out is None else ("out", "pass a writable array")
        )
        raise InvalidArgumentError(
            f"{call}: {role} ({target}) cannot be written ({target.read_only}); {remedy}"
        )
    return target


def _output_shape(what: Operation, source: Buffer, size: int) -> tuple[int, ...]:
    shape = source.shape or (1,)
    if what.x_blocks == what.out_blocks:
        return source.shape
    if what.out_blocks:
        return (size * shape[0], *shape[1:])
    if shape[0] % size:
        raise InvalidArgumentError(
            f"{what.name}: the first axis ({shape[0]}) does not divide over {size} ranks ({source}); "
            f"pass x.reshape({size}, -1), or out= with {source.count // size} elements"
        )
    return (shape[0] // size, *shape[1:])


def _check_divides(call: str, buffer: Buffer, size: int) -> None:
    if buffer.count % size:
        padded = -(-buffer.count // size) * size
        raise InvalidArgumentError(
            f"{call}: {buffer.count} elements do not divide over {size} ranks ({buffer}); "
            f"pad to {padded} or pass a ({size}, k) array"
        )


def _check_pair(what: Operation, source: Buffer, target: Buffer, size: int) -> None:
    call = what.name
    if source.element.name != target.element.name:
        raise InvalidArgumentError(
            f"{call}: out is {target.element.name} and x is {source.element.name}; nothing is cast on the "
            "way, "
            f"pass an out of {source.element.name}"
        )
    block = source.count // size if what.x_blocks else source.count
    wanted = block * size if what.out_blocks else block
    if target.count != wanted:
        raise InvalidArgumentError(
            f"{call}: out has {target.count} elements (shape {target.shape}) and must have {wanted}, for x "
            "of "
            f"{source.count} elements (shape {source.shape}) on {size} ranks"
        )
    both_fortran = source.f_order and target.f_order and source.shape == target.shape
    if not (source.c_order and target.c_order) and not both_fortran:
        raise InvalidArgumentError(
            f"{call}: x ({source}) and out ({target}) do not list their elements in the same order (one is "
            "in Fortran "
            "order, or both with different shapes); pass np.ascontiguousarray of the one that is in Fortran "
            "order"
        )


def _check_overlap(what: Operation, source: Buffer, target: Buffer, rank: int) -> None:
    """Input and output lie apart, or in NCCL's in-place form: the smaller is this rank's block."""
    if not source.nbytes or not target.nbytes:
        return
    if source.address + source.nbytes <= target.address or target.address + target.nbytes <= source.address:
        return
    if what.x_blocks:
        at_same_block = target.address == source.address + rank * target.nbytes
    else:
        at_same_block = source.address == target.address + (rank * source.nbytes if what.out_blocks else 0)
    if what.may_be_in_place and at_same_block:
        return
    allowed = (
        "it has no in-place form"
        if not what.may_be_in_place
        else f"in place means {'x is block' if what.out_blocks else 'out is block'} {rank} of the other"
        if what.reshapes
        else "in place means that both are the same memory"
    )
    raise InvalidArgumentError(
        f"{what.name}: x ({source}) and out ({target}) overlap; {allowed}, anything else must lie apart"
    )

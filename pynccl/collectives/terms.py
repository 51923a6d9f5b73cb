"""The words that schedules are written in: kinds of steps, buffers, spans, and the collectives as a table.

What they mean together is said in `schedule.py`. Pure data; knows no ranks and no arrays of data.
"""

from __future__ import annotations

import dataclasses
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pynccl.collectives.builder import Spans

__all__ = ["COLLECTIVES", "COLUMNS", "Array", "Buffer", "Collective", "Kind", "Span", "Step", "chunk_bounds"]

Array = NDArray[Any]


class Kind(IntEnum):
    """What a step does. `op` is the reduction; `left` swaps its operands, for those that do not commute."""

    SEND = 0  # src -> peer
    RECV = 1  # peer -> dst
    RECV_REDUCE = 2  # dst = src op message (left: message op src); src is dst itself unless given
    COPY = 3  # dst = src
    REDUCE = 4  # dst = dst op src (left: src op dst)


class Buffer(IntEnum):
    """A buffer of a rank. `OUT[3]` is its chunk 3, `OUT[2:4]` its chunks 2 and 3; see `builder.Spans`."""

    IN = 0  # the send buffer: never written out of place
    OUT = 1  # the receive buffer
    SCRATCH = 2  # the executor's, undefined at the start

    def __getitem__(self, chunks: Any) -> Spans:
        from pynccl.collectives.builder import spans

        return spans(self, chunks)


@dataclasses.dataclass(frozen=True)
class Span:
    """`chunks` consecutive chunks of a buffer, from `chunk` on."""

    buffer: Buffer
    chunk: int
    chunks: int = 1

    def __str__(self) -> str:
        last = f":{self.chunk + self.chunks}" if self.chunks != 1 else ""
        return f"{self.buffer.name.lower()}[{self.chunk}{last}]"


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of one rank. `peer` and `channel` are those of its message, -1 and 0 if it has none."""

    kind: Kind
    round: int
    peer: int = -1
    src: Span | None = None
    dst: Span | None = None
    channel: int = 0
    left: bool = False

    def __str__(self) -> str:
        return _WORDS[self.kind].format(
            src=self.src if self.src is not None else self.dst,
            dst=self.dst,
            peer=self.peer,
            channel=f" on channel {self.channel}" if self.channel else "",
            left=" (message first)" if self.left else "",
        )


_WORDS = {
    Kind.SEND: "send {src} to {peer}{channel}",
    Kind.RECV: "receive {dst} from {peer}{channel}",
    Kind.RECV_REDUCE: "receive from {peer}{channel}, reduce with {src} into {dst}{left}",
    Kind.COPY: "copy {src} to {dst}",
    Kind.REDUCE: "reduce {src} into {dst}{left}",
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """What a collective is about: how many blocks go in and out, who has them, and how in place is said.

    `in_blocks` and `out_blocks` are of one rank ("n": one block for each rank). `reduces`: an output chunk is
    the reduction of all ranks' chunks, not a copy of one. `only_root`: the buffer that exists on the root
    alone. `in_place`: which block of IN is which block of OUT in NCCL's in-place form, with r the rank; None:
    no such form.
    """

    in_blocks: int | str
    out_blocks: int | str
    reduces: bool
    only_root: Buffer | None = None
    in_place: tuple[str | int, str | int] | None = (0, 0)

    def blocks(self, buffer: Buffer, n: int) -> int:
        """Blocks of IN or OUT of one rank, with `n` ranks."""
        blocks = self.in_blocks if buffer == Buffer.IN else self.out_blocks
        return n if blocks == "n" else int(blocks)


COLLECTIVES: dict[str, Collective] = {
    "all_reduce": Collective(1, 1, reduces=True),
    "reduce_scatter": Collective("n", 1, reduces=True, in_place=("r", 0)),
    "all_gather": Collective(1, "n", reduces=False, in_place=(0, "r")),
    "broadcast": Collective(1, 1, reduces=False, only_root=Buffer.IN),
    "reduce": Collective(1, 1, reduces=True, only_root=Buffer.OUT),
    "all_to_all": Collective("n", "n", reduces=False, in_place=None),
}

# One row a step, all ranks' steps one after the other. A buffer of -1 means that there is no such span; src
# and dst have the same number of chunks. What a kind does not use is -1 (buffers, peer) or 0 (all else).
COLUMNS = np.dtype(
    [
        ("kind", np.int8),
        ("left", np.bool_),
        ("src_buffer", np.int8),
        ("dst_buffer", np.int8),
        ("channel", np.int32),
        ("round", np.int32),
        ("peer", np.int32),
        ("src_chunk", np.int32),
        ("dst_chunk", np.int32),
        ("chunks", np.int32),
    ]
)


def chunk_bounds(chunk: Any, count: int, parts: int) -> tuple[Any, Any]:
    """First element and the one after the last of a chunk (an int or an array of them) of a buffer."""
    block, part = chunk // parts, chunk % parts
    base = block * count
    return base + part * count // parts, base + (part + 1) * count // parts

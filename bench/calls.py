"""How each program makes its operation: the public call of pynccl, or sends and receives in one group.

Each function takes the communicator, the case and the layout, the arrays, what the call takes as `op` (a name
or a PreMulSum) and the stream. It returns the operation, ready to be made many times: what can be decided
before is decided here, so that a timing holds what a user's loop would. `out` None: in place in all of `x`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

import pynccl

if TYPE_CHECKING:
    from bench.collectives import Case, Layout

__all__ = [
    *("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "all_to_all_v"),
    *("gather", "scatter", "send_and_receive", "hypercube"),
]

Call = Callable[[], Any]


def _on(stream: Any) -> dict[str, Any]:
    """As a user writes it: no stream is not passed."""
    return {} if stream is None else {"stream": stream}


def all_reduce(comm: Any, case: Case, layout: Layout, x: Any, out: Any, op: Any, stream: Any) -> Call:
    if out is None:
        return partial(comm.all_reduce, x, op=op, **_on(stream))
    return partial(comm.all_reduce, x, out, op, **_on(stream))


def all_gather(comm: Any, case: Case, layout: Layout, x: Any, out: Any, op: Any, stream: Any) -> Call:
    return partial(comm.all_gather, x, x if out is None else out, **_on(stream))


def reduce_scatter(comm: Any, case: Case, layout: Layout, x: Any, out: Any, op: Any, stream: Any) -> Call:
    return partial(comm.reduce_scatter, x, x if out is None else out, op, **_on(stream))


def broadcast(comm: Any, case: Case, layout: Layout, x: Any, out: Any, op: Any, stream: Any) -> Call:
    return partial(comm.broadcast, x, case.root, out, **_on(stream))


def reduce(comm: Any, case: Case, layout: Layout, x: Any, out: Any, op: Any, stream: Any) -> Call:
    return partial(comm.reduce, x, case.root, out, op, **_on(stream))


def gather(comm: Any, case: Case, layout: Layout, x: Any, out: Any, op: Any, stream: Any) -> Call:
    return partial(comm.gather, x, case.root, x if out is None else out, **_on(stream))


def scatter(comm: Any, case: Case, layout: Layout, x: Any, out: Any, op: Any, stream: Any) -> Call:
    return partial(comm.scatter, x, case.root, x if out is None else out, **_on(stream))


def all_to_all(comm: Any, case: Case, layout: Layout, x: Any, out: Any, op: Any, stream: Any) -> Call:
    """The call has no in-place form: there it is made of sends and receives, which it stands for."""
    if out is not None:
        return partial(comm.all_to_all, x, out, **_on(stream))
    blocks = _cut(x, [layout.count] * case.ranks)
    return _messages(comm, enumerate(blocks), enumerate(blocks), stream)


def all_to_all_v(comm: Any, case: Case, layout: Layout, x: Any, out: Any, op: Any, stream: Any) -> Call:
    """`x` and `out` have room for the rank with the most to move; this one's data may be shorter."""
    total = layout.count * case.ranks * case.itemsize
    sent = [n // case.itemsize for n in case.traffic.sent(comm.rank, case.ranks, total)]
    received = [n // case.itemsize for n in case.traffic.received(comm.rank, case.ranks, total)]
    into = x if out is None else out
    return _messages(comm, enumerate(_cut(x, sent)), enumerate(_cut(into, received)), stream)


def send_and_receive(comm: Any, case: Case, layout: Layout, x: Any, out: Any, op: Any, stream: Any) -> Call:
    """A ring: to the next rank, from the previous one."""
    after, before = (comm.rank + 1) % case.ranks, (comm.rank - 1) % case.ranks
    return _messages(comm, [(after, x)], [(before, x if out is None else out)], stream)


def hypercube(comm: Any, case: Case, layout: Layout, x: Any, out: Any, op: Any, stream: Any) -> Call:
    """An all-gather in log2(ranks) exchanges, each with one peer, of all that both have so far."""
    into, rank, steps = x if out is None else out, comm.rank, []
    blocks = into.reshape(case.ranks, layout.count)
    for bit in range(case.ranks.bit_length() - 1):
        width = 1 << bit
        mine = rank & ~(width - 1)
        theirs, peer = mine ^ width, rank ^ width
        give, take = (blocks[first : first + width].reshape(-1) for first in (mine, theirs))
        steps.append(_messages(comm, [(peer, give)], [(peer, take)], stream))
    own, given = blocks[rank].view("uint8"), x.view("uint8")
    copies = own.size > 0 and not _same_memory(own, given)
    on_stream = contextlib.nullcontext() if stream is None else stream

    def exchange() -> None:
        if copies:
            with on_stream:
                own[...] = given
        for step in steps:
            step()

    return exchange


def _messages(
    comm: Any, sends: Iterable[tuple[int, Any]], receives: Iterable[tuple[int, Any]], stream: Any
) -> Call:
    """All of (peer, array) in one group; none of nothing, which nccl-tests leaves out too."""
    on = _on(stream)
    messages = [partial(comm.send, x, peer, **on) for peer, x in sends if x.size]
    messages += [partial(comm.recv, x, peer, **on) for peer, x in receives if x.size]

    def exchange() -> None:
        with pynccl.group():
            for message in messages:
                message()

    return exchange


def _cut(x: Any, counts: list[int]) -> list[Any]:
    """Arrays of so many elements, one behind the other."""
    ends = list(accumulate(counts))
    return [x[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _same_memory(a: Any, b: Any) -> bool:
    return bool(_address(a) == _address(b))


def _address(x: Any) -> int:
    return int(x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr)

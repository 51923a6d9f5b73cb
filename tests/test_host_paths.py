"""Every collective on every mix of plain and mapped memory, and with results that go past the caches.

Which path the host library takes is its own business; what arrives is not.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import pynccl
from pynccl.testing import run_ranks

# name: (blocks sent, blocks received, the root alone sends, the root alone receives)
SHAPES = {
    "all_reduce": (1, 1, False, False),
    "reduce": (1, 1, False, True),
    "broadcast": (1, 1, True, False),
    "all_gather": (1, None, False, False),
    "gather": (1, None, False, True),
    "reduce_scatter": (None, 1, False, False),
    "scatter": (None, 1, True, False),
    "all_to_all": (None, None, False, False),
}
ROOTED = ("reduce", "broadcast", "gather", "scatter")
COUNTS = (1, 4099, 70001)  # in the line, one chunk, several


def block(rank: int, index: int, count: int) -> np.ndarray:
    """What rank `rank` sends as its block `index`."""
    return ((np.arange(count) * (rank + 3) + 17 * index) % 251).astype(np.int32)


def expected(name: str, rank: int, size: int, root: int, count: int) -> np.ndarray:
    """What rank `rank` receives."""
    if name in ("all_reduce", "reduce"):
        return np.stack([block(r, 0, count) for r in range(size)]).sum(axis=0, dtype=np.int32)
    if name == "broadcast":
        return block(root, 0, count)
    if name in ("all_gather", "gather"):
        return np.concatenate([block(r, 0, count) for r in range(size)])
    if name == "reduce_scatter":
        return np.stack([block(r, rank, count) for r in range(size)]).sum(axis=0, dtype=np.int32)
    if name == "scatter":
        return block(root, rank, count)
    return np.concatenate([block(r, rank, count) for r in range(size)])


def check_all(comm: pynccl.Communicator) -> int:
    """Run every collective on every mix; the number of calls. The mix may differ between ranks."""
    calls = 0
    mixes = list(itertools.product((False, True), repeat=2))
    for name, count in itertools.product(SHAPES, COUNTS):
        sent, received, from_root, to_root = SHAPES[name]
        for number, (mapped_in, mapped_out) in enumerate([*mixes, (None, None)]):
            if mapped_in is None:  # every rank another
                mapped_in, mapped_out = mixes[(number + comm.rank) % 4]
            root = number % comm.size
            make = [comm.empty if mapped else np.empty for mapped in (mapped_in, mapped_out)]
            x = make[0]((sent or comm.size) * count, np.int32)
            out = make[1]((received or comm.size) * count, np.int32)
            x[:] = np.concatenate([block(comm.rank, index, count) for index in range(sent or comm.size)])
            out[:] = -1
            keywords = {"root": root} if name in ROOTED else {}
            if from_root and comm.rank != root:
                x[:] = -7  # must not matter
            before = x.copy()
            getattr(comm, name)(x, out=out, **keywords)
            what = f"{name} of {count}, in {mapped_in}, out {mapped_out}, root {root}, rank {comm.rank}"
            if not to_root or comm.rank == root:
                wanted = expected(name, comm.rank, comm.size, root, count)
                np.testing.assert_array_equal(out, wanted, err_msg=what)
            else:
                assert (out == -1).all(), what
            np.testing.assert_array_equal(x, before, err_msg=what)
            calls += 1
    return calls


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("streaming", [None, "0", "1"], ids=["cached", "always", "streamed results"])
def test_every_mix_of_memory(size: int, streaming: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if streaming is not None:
        monkeypatch.setenv("PYNCCL_STREAMING_BYTES", streaming)
    assert run_ranks(size, check_all, timeout=120, library="host") == [8 * 3 * 5] * size


def test_a_streaming_threshold_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYNCCL_STREAMING_BYTES", "32M")
    with pytest.raises(
        Exception, match='PYNCCL_STREAMING_BYTES is "32M"; it must be a whole number of bytes'
    ):
        run_ranks(1, check_all, timeout=60, library="host")

"""Every collective on every mix of plain and mapped memory, and with results that go past the caches.

Which path the host library takes is its own business; what arrives is not.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import threading
from pathlib import Path

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


def expected(name: str, rank: int, size: int, root: int, count: int, first: int = 0) -> np.ndarray:
    """What rank `rank` receives when blocks are numbered from `first`."""
    if name in ("all_reduce", "reduce"):
        return np.stack([block(r, first, count) for r in range(size)]).sum(axis=0, dtype=np.int32)
    if name == "broadcast":
        return block(root, first, count)
    if name in ("all_gather", "gather"):
        return np.concatenate([block(r, first, count) for r in range(size)])
    if name == "reduce_scatter":
        return np.stack([block(r, first + rank, count) for r in range(size)]).sum(axis=0, dtype=np.int32)
    if name == "scatter":
        return block(root, first + rank, count)
    return np.concatenate([block(r, first + rank, count) for r in range(size)])


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


SETTINGS = {
    "as measured": {},
    "whatever is handed over goes past the caches": {"PYNCCL_STREAMING_BYTES": "0"},
    "results go past the caches": {"PYNCCL_STREAMING_BYTES": "1"},
    "what is only moved is read from the other process": {"PYNCCL_DIRECT_BYTES": "0"},
    "both": {"PYNCCL_DIRECT_BYTES": "0", "PYNCCL_STREAMING_BYTES": "0"},
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("processes", [True, False], ids=["processes", "threads"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_every_mix_of_memory(
    size: int, processes: bool, settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SETTINGS[settings].items():
        monkeypatch.setenv(name, value)
    made = run_ranks(size, check_all, timeout=120, library="host", processes=processes)
    assert made == [8 * 3 * 5] * size


def without_a_pause(comm: pynccl.Communicator) -> int:
    """Calls of all sizes at once: a rank that is ahead must not write what another still reads."""
    counts = [int(count) for count in np.random.default_rng(5).integers(1 << 12, 1 << 17, 120)]
    counts[60:] = [count >> 3 for count in counts[60:]]
    names = [list(SHAPES)[number % len(SHAPES)] for number in range(len(counts))]
    made = []
    for number, (name, count) in enumerate(zip(names, counts, strict=True)):
        sent, received, _, _ = SHAPES[name]
        blocks = [block(comm.rank, index + number, count) for index in range(sent or comm.size)]
        out = np.full((received or comm.size) * count, -1, np.int32)
        made.append((np.concatenate(blocks), out, {"root": number % comm.size} if name in ROOTED else {}))
    for name, (x, out, keywords) in zip(names, made, strict=True):
        getattr(comm, name)(x, out=out, **keywords)
    for number, (name, count, (_, out, keywords)) in enumerate(zip(names, counts, made, strict=True)):
        if not SHAPES[name][3] or keywords["root"] == comm.rank:
            wanted = expected(name, comm.rank, comm.size, keywords.get("root", 0), count, number)
            np.testing.assert_array_equal(out, wanted, err_msg=f"{name} of {count}, call {number}")
    return len(made)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_calls_of_all_sizes_without_a_pause(size: int) -> None:
    assert run_ranks(size, without_a_pause, timeout=60, library="host") == [120] * size


def begins_at(start: int, elements: int, dtype: np.dtype, comm: pynccl.Communicator) -> np.ndarray:
    """A mapped array, `start` elements into its memory."""
    whole = comm.empty(elements + start, dtype)
    whole[:] = 99
    return whole[start:]


def anywhere(comm: pynccl.Communicator, dtype: np.dtype) -> None:
    """Mapped arrays begin anywhere in a line, elsewhere on each rank; sometimes rank 1 works in place."""
    for count, apart, in_place in itertools.product((20000, 33331), (0, 1, 5), (False, True)):
        blocks = [(block(rank, 0, count * comm.size) % 25).astype(dtype) for rank in range(comm.size)]
        total = np.stack(blocks).sum(axis=0).astype(dtype)
        x = begins_at(2 + apart * comm.rank, total.size, dtype, comm)
        x[:] = blocks[comm.rank]
        part = begins_at(3 + apart * comm.rank, count, dtype, comm)
        comm.reduce_scatter(x, out=part)
        np.testing.assert_array_equal(part, total[comm.rank * count :][:count])
        gathered = begins_at(7 + apart * comm.rank, total.size, dtype, comm)
        comm.all_gather(part, out=gathered)
        np.testing.assert_array_equal(gathered, total)
        reduced = begins_at(1 + apart * comm.rank, total.size, dtype, comm)
        if in_place and comm.rank == 1:
            reduced = x
        comm.all_reduce(x, out=reduced)
        np.testing.assert_array_equal(reduced, total)
        gathered[:] = blocks[comm.rank]
        comm.broadcast(gathered, root=1)
        np.testing.assert_array_equal(gathered, blocks[1])


@pytest.mark.parametrize("dtype", ["u1", "f4", "i8"])
@pytest.mark.parametrize("size", [2, 4, 5])
@pytest.mark.parametrize("streaming", [None, "1"], ids=["as measured", "results go past the caches"])
def test_mapped_memory_that_begins_anywhere(
    size: int, dtype: str, streaming: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if streaming is not None:
        monkeypatch.setenv("PYNCCL_STREAMING_BYTES", streaming)
    run_ranks(size, anywhere, np.dtype(dtype), timeout=120, library="host")


LISTED_CACHES = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))


def threshold(comm: pynccl.Communicator) -> int:
    """What the library streams beyond, as it says itself."""
    handle, value = ctypes.c_void_p(), ctypes.c_int64()
    assert comm.library.ncclParamBind(ctypes.byref(handle), b"PYNCCL_STREAMING_BYTES") == 0
    assert comm.library.ncclParamGetI64(handle, ctypes.byref(value)) == 0
    return value.value


@pytest.mark.skipif(not LISTED_CACHES, reason="this kernel lists no caches")
def test_results_are_streamed_beyond_the_last_cache_of_a_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYNCCL_STREAMING_BYTES", raising=False)
    size = LISTED_CACHES[-1].read_text().strip()
    listed = int(size.rstrip("KM")) << {"K": 10, "M": 20}.get(size[-1], 0)
    assert run_ranks(1, threshold, timeout=60, library="host") == [listed]


def large(comm: pynccl.Communicator) -> None:
    """Past every threshold as it is, with bytes that no page or piece divides."""
    count = (9 << 20) + 3
    x = np.arange(count, dtype=np.uint8) if comm.rank == 1 else np.zeros(count, np.uint8)
    comm.broadcast(x, root=1)
    np.testing.assert_array_equal(x, np.arange(count, dtype=np.uint8))
    gathered = np.zeros((comm.size, count), np.uint8)
    gathered[comm.rank] = x + np.uint8(comm.rank)
    comm.all_gather(gathered[comm.rank], out=gathered)
    for rank in range(comm.size):
        np.testing.assert_array_equal(gathered[rank], x + np.uint8(rank))
    back = comm.all_to_all(gathered)
    for rank in range(comm.size):
        np.testing.assert_array_equal(back[rank], x + np.uint8(comm.rank))


@pytest.mark.parametrize("direct", [None, str(1 << 40)], ids=["direct", "staged"])
def test_large_ordinary_arrays(direct: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if direct is not None:
        monkeypatch.setenv("PYNCCL_DIRECT_BYTES", direct)
    run_ranks(3, large, timeout=60, library="host")


def stop_a_root_that_writes(rank: int, size: int, first: pynccl.UniqueId, second: pynccl.UniqueId) -> bool:
    """Rank 1 stops the root while that writes into its array, gives up, and wakes it. True: so it went."""
    count, share = 128 << 20, 64 << 20  # the root writes the second half
    comm = pynccl.Communicator(size, first, rank, library="host", timeout=1)
    beside = pynccl.Communicator(size, second, rank, library="host")
    root = int(comm.all_gather(np.array([os.getpid()]))[0])
    x = np.full(count, 0 if rank else 5, np.uint8)
    over = threading.Event()

    def stop() -> None:
        while x[share] == 0 and not over.is_set():
            pass
        os.kill(root, signal.SIGSTOP)

    watch = threading.Thread(target=stop)
    if rank == 1:
        watch.start()
    try:
        comm.broadcast(x, root=0)
        failed = False
    except pynccl.NcclError:
        failed = True
    over.set()
    if rank == 1:
        watch.join()
        x[:] = 7
        os.kill(root, signal.SIGCONT)
    beside.barrier()  # the root has come back from its call, however that went
    if rank == 1:
        assert (x == 7).all()
    beside.destroy()
    comm.abort()
    return failed


def test_nobody_writes_to_an_array_whose_rank_gave_up() -> None:
    went: list[int] = []
    while not any(went) and len(went) < 5:  # the root may be done before it is stopped
        another = pynccl.get_unique_id("host")
        went.append(run_ranks(2, stop_a_root_that_writes, another, library="host", comm=False)[1])
    assert any(went)


def differently(comm: pynccl.Communicator) -> int:
    x = np.full(1 << 20, comm.rank, np.uint8)
    return int(comm.all_gather(x)[:: 1 << 20].sum())


def test_ranks_that_were_told_different_thresholds_agree() -> None:
    assert run_ranks(2, split_with_other_settings, timeout=60, library="host") == [1, 1]


def split_with_other_settings(comm: pynccl.Communicator) -> int:
    os.environ["PYNCCL_DIRECT_BYTES"] = "0" if comm.rank else str(1 << 40)
    with comm.split(0) as child:
        return differently(child)


@pytest.mark.parametrize("name", ["PYNCCL_STREAMING_BYTES", "PYNCCL_DIRECT_BYTES"])
def test_a_threshold_that_is_no_number_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "32M")
    with pytest.raises(Exception, match=f'{name} is "32M"; it must be a whole number of bytes'):
        run_ranks(1, check_all, timeout=60, library="host")

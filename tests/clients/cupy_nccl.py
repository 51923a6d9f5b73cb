"""A third party's compiled NCCL client, unchanged: `cupy.cuda.nccl` on NumPy pointers, ranks as processes.

Run with the host library preloaded as libnccl.so.2: `python -m pynccl.host --exec python
tests/clients/cupy_nccl.py 3`.
It knows nothing of pynccl. Each rank prints one line, `rank R of N: K checks`, and exits 0, or shows what
was wrong.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
from cupy.cuda import nccl

DTYPES = {
    nccl.NCCL_INT8: np.int8,
    nccl.NCCL_UINT8: np.uint8,
    nccl.NCCL_INT32: np.int32,
    nccl.NCCL_UINT32: np.uint32,
    nccl.NCCL_INT64: np.int64,
    nccl.NCCL_UINT64: np.uint64,
    nccl.NCCL_FLOAT16: np.float16,
    nccl.NCCL_FLOAT32: np.float32,
    nccl.NCCL_FLOAT64: np.float64,
}
OPERATIONS = {
    nccl.NCCL_SUM: lambda all_: sum(all_[1:], all_[0].copy()),
    nccl.NCCL_PROD: lambda all_: np.prod(all_, axis=0).astype(all_[0].dtype),
    nccl.NCCL_MAX: lambda all_: np.max(all_, axis=0),
    nccl.NCCL_MIN: lambda all_: np.min(all_, axis=0),
}
COUNTS = (0, 1, 7, 1000, 70_001)  # the last passes through the staging chunks
NULL = 0  # the default stream


class Rank:
    """One rank's checks. Contributions are small integers, so every dtype and order of reduction gives the
    same bits.
    """

    def __init__(self, n: int, uid: tuple[int, ...], rank: int) -> None:
        self.comm = nccl.NcclCommunicator(n, uid, rank)
        self.n, self.rank, self.checks = n, rank, 0

    @staticmethod
    def contribution(rank: int, count: int, dtype: Any) -> np.ndarray:
        return ((np.arange(count) + rank) % 3).astype(dtype)

    def everybody(self, count: int, dtype: Any) -> list[np.ndarray]:
        return [self.contribution(rank, count, dtype) for rank in range(self.n)]

    def expect(self, got: np.ndarray, want: np.ndarray, what: str) -> None:
        self.checks += 1
        if not np.array_equal(got, want):
            bad = np.flatnonzero(got != want)[:4]
            raise AssertionError(f"rank {self.rank}: {what}: at {bad} got {got[bad]}, want {want[bad]}")

    def reductions(self, code: int, dtype: Any, op: int, count: int) -> None:
        n, rank, comm = self.n, self.rank, self.comm
        mine, want = self.contribution(rank, count, dtype), OPERATIONS[op](self.everybody(count, dtype))
        out = np.full(count, 77, dtype)
        comm.allReduce(mine.ctypes.data, out.ctypes.data, count, code, op, NULL)
        self.expect(out, want, "allReduce")
        same = mine.copy()
        comm.allReduce(same.ctypes.data, same.ctypes.data, count, code, op, NULL)
        self.expect(same, want, "allReduce in place")
        root = n - 1
        out = np.full(count, 77, dtype)
        comm.reduce(mine.ctypes.data, out.ctypes.data, count, code, op, root, NULL)
        self.expect(out, want if rank == root else np.full(count, 77, dtype), "reduce")
        whole = self.contribution(rank, n * count, dtype)
        want = OPERATIONS[op](self.everybody(n * count, dtype))[rank * count : (rank + 1) * count]
        out = np.full(count, 77, dtype)
        comm.reduceScatter(whole.ctypes.data, out.ctypes.data, count, code, op, NULL)
        self.expect(out, want, "reduceScatter")
        block = whole[rank * count : (rank + 1) * count]
        comm.reduceScatter(whole.ctypes.data, block.ctypes.data, count, code, op, NULL)
        self.expect(block, want, "reduceScatter in place")

    def moves(self, code: int, dtype: Any, count: int) -> None:
        n, rank, comm = self.n, self.rank, self.comm
        mine, want = self.contribution(rank, count, dtype), np.concatenate(self.everybody(count, dtype))
        out = np.full(n * count, 77, dtype)
        comm.allGather(mine.ctypes.data, out.ctypes.data, count, code, NULL)
        self.expect(out, want, "allGather")
        out = np.full(n * count, 77, dtype)
        block = out[rank * count : (rank + 1) * count]
        block[:] = mine
        comm.allGather(block.ctypes.data, out.ctypes.data, count, code, NULL)
        self.expect(out, want, "allGather in place")
        for root in range(n):
            want = self.contribution(root, count, dtype)
            out = np.full(count, 77, dtype)
            comm.broadcast(mine.ctypes.data, out.ctypes.data, count, code, root, NULL)
            self.expect(out, want, "broadcast")
            same = mine.copy()
            comm.bcast(same.ctypes.data, count, code, root, NULL)
            self.expect(same, want, "bcast")

    def messages(self, code: int, dtype: Any, count: int) -> None:
        n, rank, comm = self.n, self.rank, self.comm
        mine, out = self.contribution(rank, count, dtype), np.full(count, 77, dtype)
        nccl.groupStart()  # a ring: everybody sends first, which only a group makes safe
        comm.send(mine.ctypes.data, count, code, (rank + 1) % n, NULL)
        comm.recv(out.ctypes.data, count, code, (rank - 1) % n, NULL)
        nccl.groupEnd()
        self.expect(out, self.contribution((rank - 1) % n, count, dtype), "send and recv around a ring")
        blocks = np.full((n, count), 77, dtype)
        nccl.groupStart()  # all to all, itself included
        for peer in range(n):
            comm.send(mine.ctypes.data, count, code, peer, NULL)
            comm.recv(blocks[peer].ctypes.data, count, code, peer, NULL)
        nccl.groupEnd()
        self.expect(blocks.ravel(), np.concatenate(self.everybody(count, dtype)), "all to all by messages")

    def split(self) -> None:
        child = self.comm.commSplit(self.rank % 2, -self.rank)
        members = sorted((r for r in range(self.n) if r % 2 == self.rank % 2), reverse=True)
        self.expect(
            np.array([child.size(), child.rank_id()]),
            np.array([len(members), members.index(self.rank)]),
            "split",
        )
        x = np.array([2.0**self.rank])
        child.allReduce(x.ctypes.data, x.ctypes.data, 1, nccl.NCCL_FLOAT64, nccl.NCCL_SUM, NULL)
        self.expect(x, np.array([sum(2.0**r for r in members)]), "allReduce of a split")
        child.destroy()

    def run(self) -> None:
        self.expect(
            np.array([self.comm.size(), self.comm.rank_id()]), np.array([self.n, self.rank]), "size and rank"
        )
        for code, dtype in DTYPES.items():
            for count in COUNTS:
                self.moves(code, dtype, count)
                self.messages(code, dtype, count)
                for op in OPERATIONS:
                    self.reductions(code, dtype, op, count)
        self.split()
        self.comm.destroy()
        os.write(
            1, f"rank {self.rank} of {self.n}: {self.checks} checks\n".encode()
        )  # one write: lines stay whole


def main() -> int:
    n = int(sys.argv[1])
    uid = nccl.get_unique_id()
    children = []
    for rank in range(n):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                Rank(n, uid, rank).run()
                status = 0
            except BaseException as error:
                print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(status)
        children.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)


if __name__ == "__main__":
    sys.exit(main())

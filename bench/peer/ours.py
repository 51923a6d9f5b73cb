"""Ours, through the public Python API: `python -m bench.peer.ours SOCKET RANK RANKS UNIQUE_ID`.

"plain": NumPy's own arrays; "mapped": arrays of `comm.empty`, which all ranks can reach; "prepared": plain
arrays, and the call is what `comm.prepare` made.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

import pynccl
from bench.peer.worker import Calls, serve

__all__ = ["Ours", "main"]

METHODS = {"alltoall": "all_to_all"}  # where it is not called as the operation is


class Ours:
    """One rank."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.rank, self.ranks = comm, comm.rank, comm.size
        self.version = f"pynccl {pynccl.__version__}, {comm.library.path}"

    def set_up(self, kind: str, op: str, elements: int) -> Calls:
        """See `bench.peer.worker.Library`."""
        block = elements // self.ranks
        method = METHODS.get(op, op)
        x = self._array(kind, block if op == "all_gather" else elements)
        if op == "broadcast":
            out, second = x, {"root": 0}
        else:
            out = self._array(kind, block if op == "reduce_scatter" else elements)
            second = {"out": out}
        if kind == "prepared":
            return Calls(self.comm.prepare(method, x, **second), (), x, out)
        return Calls(getattr(self.comm, method), (x, *second.values()), x, out)

    def _array(self, kind: str, elements: int) -> Any:
        array = self.comm.empty(elements, np.float32) if kind == "mapped" else np.empty(elements, np.float32)
        array[:] = 0
        return array

    def floats(self, values: Sequence[int]) -> Any:
        """See `bench.peer.worker.Library`."""
        return np.array(values, np.float32)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.comm.barrier()

    def forget(self) -> None:
        """Arrays go when nobody refers to them."""


def main() -> None:
    """Join the others, then obey."""
    rank, ranks, unique_id = int(sys.argv[2]), int(sys.argv[3]), bytes.fromhex(sys.argv[4])
    comm = pynccl.Communicator(
        ranks, pynccl.UniqueId.from_bytes(unique_id), rank, library="host", timeout=120
    )
    with comm:
        serve(Ours(comm))


if __name__ == "__main__":
    main()

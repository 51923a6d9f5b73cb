"""An MPI through mpi4py: `mpiexec -n RANKS python -m bench.peer.mpi SOCKET`.

Its upper-case calls on arrays that stay, with buffer specifications made before the clock starts: the fastest
way that mpi4py has for blocking collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mpi4py
import numpy as np
from mpi4py import MPI

from bench.peer.worker import Calls, serve

__all__ = ["Mpi"]

METHODS = {
    "all_reduce": "Allreduce",
    "all_gather": "Allgather",
    "reduce_scatter": "Reduce_scatter_block",
    "broadcast": "Bcast",
    "alltoall": "Alltoall",
}


class Mpi:
    """One rank."""

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD
        self.rank, self.ranks = self.comm.rank, self.comm.size
        what = MPI.Get_library_version().split("\n")[0].split(", package")[0].rstrip("\0")
        self.version = f"{' '.join(what.split())}, mpi4py {mpi4py.__version__}"

    def set_up(self, kind: str, op: str, elements: int) -> Calls:
        """See `bench.peer.worker.Library`."""
        block = elements // self.ranks
        x = np.zeros(block if op == "all_gather" else elements, np.float32)
        call = getattr(self.comm, METHODS[op])
        if op == "broadcast":
            return Calls(call, ((x, MPI.FLOAT), 0), x, x)
        out = np.zeros(block if op == "reduce_scatter" else elements, np.float32)
        return Calls(call, ((x, MPI.FLOAT), (out, MPI.FLOAT)), x, out)

    def floats(self, values: Sequence[int]) -> Any:
        """See `bench.peer.worker.Library`."""
        return np.array(values, np.float32)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.comm.Barrier()

    def forget(self) -> None:
        """Arrays go when nobody refers to them."""


if __name__ == "__main__":
    serve(Mpi())

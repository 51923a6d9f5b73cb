"""Gloo through torch.distributed: `python -m bench.peer.gloo SOCKET RANK RANKS MEETING_FILE`.

Tensors that stay; its all_reduce exists only in place.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from bench.peer.worker import Calls, serve

__all__ = ["Gloo", "main"]

OUT_OF_PLACE = {
    "all_gather": dist.all_gather_into_tensor,
    "reduce_scatter": dist.reduce_scatter_tensor,
    "alltoall": dist.all_to_all_single,
}


class Gloo:
    """One rank."""

    def __init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.version = f"torch {torch.__version__}"

    def set_up(self, kind: str, op: str, elements: int) -> Calls:
        """See `bench.peer.worker.Library`."""
        block = elements // self.ranks
        x = torch.zeros(block if op == "all_gather" else elements)
        if op == "all_reduce":
            return Calls(dist.all_reduce, (x,), x, x)
        if op == "broadcast":
            return Calls(dist.broadcast, (x, 0), x, x)
        out = torch.zeros(block if op == "reduce_scatter" else elements)
        return Calls(OUT_OF_PLACE[op], (out, x), x, out)

    def floats(self, values: Sequence[int]) -> Any:
        """See `bench.peer.worker.Library`."""
        return torch.tensor(values, dtype=torch.float32)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def forget(self) -> None:
        """Tensors go when nobody refers to them."""


def main() -> None:
    """Join the others, then obey."""
    rank, ranks, meeting = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    serve(Gloo())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

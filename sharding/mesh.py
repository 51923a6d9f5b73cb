"""The ranks as a mesh (replicate, shard), and the communicators over it.

Rank r is row r // shard, column r % shard. A row divides the state over its ranks; a column holds equal
shards. Gathers and reductions have communicators of their own, because one communicator does its calls in
order and neither may wait for the other. The communicator that the user gave is used only to make these and
to agree on things: what happens in a step can be aborted without harming it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Mesh", "mesh_shape"]


class Mesh:
    """Made on every rank with equal arguments; `connect` is collective."""

    def __init__(self, comm: Any, replicate_size: int, shard_size: int, part_size: int | None) -> None:
        """`part_size`: of the groups that backward gathers from (reshard_after_forward=k)."""
        self.comm = comm
        self.replicate_size, self.shard_size, self.part_size = replicate_size, shard_size, part_size
        self.replicate_rank, self.shard_rank = divmod(comm.rank, shard_size)
        self.gather: Any = None
        self.reduce: Any = None
        self.replicas: Any = None
        self.parts: Any = None
        self._made: list[Any] = []

    def connect(self) -> None:
        """Make the communicators; where a group has one rank there is none, and nothing to communicate."""
        if self.shard_size > 1:
            self.gather = self._split(self.replicate_rank)
            self.reduce = self._split(self.replicate_rank)
        if self.replicate_size > 1:
            self.replicas = self._split(self.shard_rank)
        if self.part_size is not None and self.shard_size > 1:
            self.parts = self._split(self.comm.rank // self.part_size)

    def meet(self, token: Any) -> None:
        """Wait until every rank has come: along the row, then along the column. `token`: one element of no
        meaning. This is a barrier, and not counted among the collectives that move data."""
        for comm in (self.reduce, self.replicas):
            if comm is not None:
                comm.all_reduce(token)

    def _split(self, color: int) -> Any:
        made = self.comm.split(color, self.comm.rank)
        self._made.append(made)
        return made

    def destroy(self) -> None:
        """End the communicators, after their last call. Twice is fine."""
        while self._made:
            self._made.pop().destroy()

    def abort(self) -> None:
        """End them at once: the other ranks' calls fail, and say whose fault it was. `connect` may follow."""
        while self._made:
            self._made[-1].abort()  # twice, if an interrupt comes here: that is fine
            self._made.pop()


def mesh_shape(strategy: Any, mesh: tuple[int, int] | None, size: int) -> tuple[int, int]:
    """(replicate, shard) sizes of a strategy on `size` ranks; ValueError for a mesh that does not fit."""
    if strategy.name != "hybrid_shard":
        if mesh is not None:
            raise ValueError(
                f"fully_shard: mesh={mesh!r} goes with strategy='hybrid_shard', not {strategy.name!r}"
            )
        return (1, size) if strategy.shards else (size, 1)
    if mesh is None or len(mesh) != 2 or min(mesh) < 1 or mesh[0] * mesh[1] != size:
        raise ValueError(
            f"fully_shard: hybrid_shard needs mesh=(replicate, shard) with replicate * shard = {size} ranks, "
            f"not {mesh!r}"
        )
    return mesh[0], mesh[1]

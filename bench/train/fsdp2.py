"""torch FSDP2: fully_shard on each layer and on the whole, CPU tensors, Gloo."""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.train.problem import Problem
from bench.train.torch_side import TorchContestant, mlp, start
from bench.train.worker import serve


def make(problem: Problem, rank: int, meeting: str) -> TorchContestant:
    """One rank."""
    start(problem, rank, meeting)
    model, mesh = mlp(problem), init_device_mesh("cpu", (problem.ranks,))
    for layer in list(model)[::2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return TorchContestant(problem, rank, model)


if __name__ == "__main__":
    serve(make)

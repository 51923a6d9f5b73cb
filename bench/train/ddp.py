"""torch DistributedDataParallel on CPU tensors, Gloo, with gradients as views of its buckets."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from bench.train.problem import Problem
from bench.train.torch_side import TorchContestant, mlp, start
from bench.train.worker import serve


def make(problem: Problem, rank: int, meeting: str) -> TorchContestant:
    """One rank."""
    start(problem, rank, meeting)
    return TorchContestant(problem, rank, DistributedDataParallel(mlp(problem), gradient_as_bucket_view=True))


if __name__ == "__main__":
    serve(make)

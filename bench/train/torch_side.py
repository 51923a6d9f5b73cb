"""What the torch contestants share: model, data, step, and how their ranks meet (Gloo over loopback)."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from bench.train.problem import Problem

__all__ = ["TorchContestant", "mlp", "start"]


def start(problem: Problem, rank: int, meeting: str) -> None:
    """Join the group of all ranks; `meeting` is a file that none has made yet."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=problem.ranks)


def mlp(problem: Problem) -> torch.nn.Sequential:
    """The model with the problem's first weights."""
    parts: list[torch.nn.Module] = []
    width = problem.width
    for layer in range(problem.layers):
        linear = torch.nn.Linear(width, width)
        with torch.no_grad():
            linear.weight.copy_(problem.weight(layer, torch.arange(width * width)).view(width, width))
            linear.bias.zero_()
        parts += [linear, torch.nn.ReLU()]
    return torch.nn.Sequential(*parts[:-1])


class TorchContestant:
    """A wrapped model and torch's AdamW."""

    def __init__(self, problem: Problem, rank: int, model: Any) -> None:
        self.model, self.problem = model, problem
        shape = (problem.batch, problem.width)
        rows = torch.arange(problem.batch * problem.width) + rank * problem.batch * problem.width
        self.x, self.target = (problem.data(what, rows).float().view(shape) for what in (0, 1))
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=problem.lr,
            betas=problem.betas,
            eps=problem.eps,
            weight_decay=problem.weight_decay,
            fused=True,
        )
        self._loss = torch.zeros(())

    def step(self) -> None:
        """Forward, backward (which reduces), update."""
        loss = 0.5 * (self.model(self.x) - self.target).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._loss = loss.detach()

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def loss(self) -> float:
        """This rank's, before the last update."""
        return float(self._loss)

    def about(self) -> dict[str, Any]:
        """State in bytes: parameters, as much for gradients (they live until zero_grad), moments."""
        parameters = sum(_bytes(p) for p in self.model.parameters())
        moments = sum(
            _bytes(value)
            for state in self.optimizer.state.values()
            for value in state.values()
            if value.dim()
        )
        return {
            "model_state_bytes": 2 * parameters + moments,
            "version": f"torch {torch.__version__}",
            "blas": "MKL" if torch.backends.mkl.is_available() else "not MKL",
            "threads": torch.get_num_threads(),
        }

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


def _bytes(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()

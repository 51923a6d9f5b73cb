"""What is trained: an MLP of square Linear layers with ReLU between them, mean squared error, AdamW.

Owns the numbers and nothing that computes with them: every contestant starts from equal weights and sees
equal data, whatever library it uses. Standard library only, since peers run in environments of their own.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Problem", "uniform"]

_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Problem:
    """`layers` Linear layers, `width` x `width` with bias; `batch` rows on each of `ranks` ranks."""

    layers: int
    width: int
    batch: int
    ranks: int
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def to_json(self) -> str:
        """For a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Problem:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        return cls(**{**fields, "betas": tuple(fields["betas"])})

    @property
    def parameters(self) -> int:
        """Elements of all weights and biases."""
        return self.layers * self.width * (self.width + 1)

    @property
    def flops(self) -> int:
        """Of one rank's forward and backward: three products a layer, but no gradient of the input."""
        return 2 * self.batch * self.width * self.width * (3 * self.layers - 1)

    def weight(self, layer: int, indices: Any) -> Any:
        """The first weights of a layer, (output, input) in C order, at these flat indices (He's bound)."""
        return uniform(indices, layer) * (2 * (6 / self.width) ** 0.5)

    def data(self, what: int, indices: Any) -> Any:
        """Inputs (what=0) or targets (what=1) of the whole batch, (rows, width) in C order, at these indices.

        Rank r has rows [r * batch, (r + 1) * batch).
        """
        return uniform(indices, 1000 + what)


def uniform(indices: Any, stream: int) -> Any:
    """Numbers in [-0.5, 0.5) by a hash of int64 indices: the same from NumPy arrays and torch tensors.

    24 bits each, so that float32 holds them exactly.
    """
    bits = (indices + (stream * 0x9E3779B9 & _MASK)) & _MASK
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        bits = ((bits ^ (bits >> shift)) * factor) & _MASK
    bits = bits ^ (bits >> 15)
    return (bits >> 8) / (1 << 24) - 0.5

"""A language model of bytes in plain NumPy, with its backward pass written out by hand.

One transformer block, read from top to bottom in `BytesLM.loss_and_gradients`: embed the bytes and their
positions, look back with causal attention, think with a two-layer perceptron, and say how likely each next
byte is. Every layer returns its output and a second function that turns the gradient of the output into the
gradients of the inputs, so the backward pass is the forward pass read backwards.

This file knows nothing of ranks: what data-parallel training adds is in `train_bytes_lm.py`. Arrays are those
of `xp`, the NumPy or the CuPy module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Array = Any  # numpy.ndarray or cupy.ndarray

BYTES = 256


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. `context` bytes are read to say the next one, at every position at once."""

    context: int = 48
    width: int = 64
    heads: int = 4
    hidden: int = 192

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every parameter, in the order in which they lie in the flat buffer."""
        d = self.width
        return {
            "byte_embedding": (BYTES, d),
            "position_embedding": (self.context, d),
            "attention_scale": (d,),
            "attention_in": (d, 3 * d),  # queries, keys and values side by side
            "attention_out": (d, d),
            "mlp_scale": (d,),
            "mlp_in": (d, self.hidden),
            "mlp_bias": (self.hidden,),
            "mlp_out": (self.hidden, d),
            "head_scale": (d,),
            "head": (d, BYTES),
            "head_bias": (BYTES,),
        }


class Flat:
    """Named arrays that are views of one flat buffer: a single all_reduce moves all of them, with no copy."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], buffer: Array) -> None:
        if buffer.size != self.size(shapes):
            raise ValueError(
                f"the buffer has {buffer.size} elements; make it {self.size(shapes)} for these shapes"
            )
        self.buffer, self.views, at = buffer, {}, 0
        for name, shape in shapes.items():
            size = _product(shape)
            self.views[name] = buffer[at : at + size].reshape(shape)
            at += size

    def __getitem__(self, name: str) -> Array:
        return self.views[name]

    @staticmethod
    def size(shapes: dict[str, tuple[int, ...]]) -> int:
        return sum(_product(shape) for shape in shapes.values())


class BytesLM:
    """The model: its shape, its parameters `p`, and their gradients `g`, both `Flat`."""

    def __init__(self, xp: Any, shape: Shape, parameters: Flat, gradients: Flat) -> None:
        self.xp, self.shape, self.p, self.g = xp, shape, parameters, gradients
        seen = xp.tri(shape.context, dtype=bool)
        self._future = xp.where(seen, 0.0, -xp.inf).astype(parameters.buffer.dtype)

    def initialize(self, seed: int) -> None:
        """Random matrices, ones for scales, zeros for biases. Drawn on the CPU, whatever `xp` is."""
        import numpy as np

        random = np.random.default_rng(seed)
        for name, array in self.p.views.items():
            if name.endswith("_scale"):
                array[...] = 1
            elif name.endswith("_bias"):
                array[...] = 0
            else:
                spread = 0.02 if name == "head" or "embedding" in name else array.shape[0] ** -0.5
                array[...] = self.xp.asarray(random.normal(0, spread, array.shape))

    def loss_and_gradients(self, text: Array) -> float:
        """Mean of -log p(next byte), in nats, over `text` (batch, context + 1) of uint8. Fills `g`."""
        xp, p, g = self.xp, self.p, self.g
        one_hot = xp.eye(BYTES, dtype=p.buffer.dtype)
        inputs, targets = one_hot[text[:, :-1]], one_hot[text[:, 1:]]

        x = inputs @ p["byte_embedding"] + p["position_embedding"]
        normed, d_attention_norm = normalize(xp, x, p["attention_scale"])
        looked, d_attention = self.attention(normed)
        x = x + looked
        normed, d_mlp_norm = normalize(xp, x, p["mlp_scale"])
        thought, d_mlp = self.mlp(normed)
        x = x + thought
        normed, d_head_norm = normalize(xp, x, p["head_scale"])
        logits, d_head = linear(normed, p["head"], p["head_bias"])
        loss, d_logits = cross_entropy(xp, logits, targets)

        d_normed, g["head"][...], g["head_bias"][...] = d_head(d_logits)
        d_x, g["head_scale"][...] = d_head_norm(d_normed)
        d_normed, g["mlp_scale"][...] = d_mlp_norm(d_mlp(d_x))
        d_x = d_x + d_normed
        d_normed, g["attention_scale"][...] = d_attention_norm(d_attention(d_x))
        d_x = d_x + d_normed
        g["position_embedding"][...] = d_x.sum(0)
        g["byte_embedding"][...] = _rows(inputs).T @ _rows(d_x)
        return float(loss)

    def attention(self, x: Array) -> tuple[Array, Callable[[Array], Array]]:
        """Each position mixes the values up to its own, by how well its query fits their keys."""
        xp, p, g = self.xp, self.p, self.g
        batch, length, width = x.shape
        heads, per_head = self.shape.heads, width // self.shape.heads

        qkv, d_in = linear(x, p["attention_in"])
        q, k, v = qkv.reshape(batch, length, 3, heads, per_head).transpose(2, 0, 3, 1, 4)
        scores = q @ k.swapaxes(-1, -2) * per_head**-0.5 + self._future
        weights = xp.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = (weights @ v).swapaxes(1, 2).reshape(batch, length, width)
        out, d_out = linear(mixed, p["attention_out"])

        def backward(d_y: Array) -> Array:
            d_mixed, g["attention_out"][...] = d_out(d_y)
            d_mixed = d_mixed.reshape(batch, length, heads, per_head).swapaxes(1, 2)
            d_v = weights.swapaxes(-1, -2) @ d_mixed
            d_weights = d_mixed @ v.swapaxes(-1, -2)
            d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdims=True)) * per_head**-0.5
            d_q, d_k = d_scores @ k, d_scores.swapaxes(-1, -2) @ q
            d_qkv = xp.stack([d_q, d_k, d_v]).transpose(1, 3, 0, 2, 4).reshape(batch, length, 3 * width)
            d_x, g["attention_in"][...] = d_in(d_qkv)
            return d_x

        return out, backward

    def mlp(self, x: Array) -> tuple[Array, Callable[[Array], Array]]:
        """Two linear layers with a ReLU between them, the same at every position."""
        p, g = self.p, self.g
        before, d_first = linear(x, p["mlp_in"], p["mlp_bias"])
        active = before > 0
        out, d_second = linear(before * active, p["mlp_out"])

        def backward(d_y: Array) -> Array:
            d_hidden, g["mlp_out"][...] = d_second(d_y)
            d_x, g["mlp_in"][...], g["mlp_bias"][...] = d_first(d_hidden * active)
            return d_x

        return out, backward


def linear(
    x: Array, weight: Array, bias: Array | None = None
) -> tuple[Array, Callable[[Array], tuple[Array, ...]]]:
    """x @ weight (+ bias). Backward: the gradients of x, weight and, where there is one, bias."""
    y = x @ weight if bias is None else x @ weight + bias

    def backward(d_y: Array) -> tuple[Array, ...]:
        gradients = (d_y @ weight.T, _rows(x).T @ _rows(d_y))
        return gradients if bias is None else (*gradients, _rows(d_y).sum(0))

    return y, backward


def normalize(xp: Any, x: Array, scale: Array) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
    """RMS norm (Zhang and Sennrich, 2019): each vector over its root mean square. Backward: d_x, d_scale."""
    inverse = 1 / xp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    unit = x * inverse

    def backward(d_y: Array) -> tuple[Array, Array]:
        d_unit = d_y * scale
        d_x = inverse * (d_unit - unit * (d_unit * unit).mean(-1, keepdims=True))
        return d_x, _rows(d_y * unit).sum(0)

    return unit * scale, backward


def cross_entropy(xp: Any, logits: Array, targets: Array) -> tuple[Array, Array]:
    """Mean over positions of -log softmax(logits)[target], targets one-hot; and the logits' gradient."""
    shifted = logits - logits.max(-1, keepdims=True)
    exponentials = xp.exp(shifted)
    total = exponentials.sum(-1, keepdims=True)
    positions = logits.size // logits.shape[-1]
    loss = ((xp.log(total) - (shifted * targets).sum(-1, keepdims=True)).sum()) / positions
    return loss, (exponentials / total - targets) / positions


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019) on flat buffers."""

    def __init__(self, xp: Any, parameters: Array, *, rate: float = 3e-3, decay: float = 0.01) -> None:
        self.xp, self.parameters, self.rate, self.decay = xp, parameters, rate, decay
        self.mean, self.square, self.steps = xp.zeros_like(parameters), xp.zeros_like(parameters), 0

    def step(self, gradients: Array) -> None:
        self.steps += 1
        first, second = 0.9, 0.98
        self.mean += (1 - first) * (gradients - self.mean)
        self.square += (1 - second) * (gradients * gradients - self.square)
        mean = self.mean / (1 - first**self.steps)
        square = self.square / (1 - second**self.steps)
        self.parameters -= self.rate * (mean / (self.xp.sqrt(square) + 1e-8) + self.decay * self.parameters)


def _rows(x: Array) -> Array:
    """All positions of all texts as the rows of one matrix."""
    return x.reshape(-1, x.shape[-1])


def _product(shape: tuple[int, ...]) -> int:
    size = 1
    for one in shape:
        size *= one
    return size

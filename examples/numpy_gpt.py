"""A GPT of bytes in plain NumPy (or CuPy), backward by hand, its weights and all that goes with them sharded.

    python examples/numpy_gpt.py                                  # alone
    python -m pynccl.launch -n 3 examples/numpy_gpt.py            # no rank holds the model; equal losses

What sharding adds to a training loop is in `train` (make the model, step) and in `loss_and_gradients` (two
`with` lines). The rest is a transformer as one would write it for one rank. Every layer is a pair of
functions: `forward(w, x) -> (y, saved)` and `backward(w, g, saved, dy) -> dx`. The weights `w` come anew in
backward, because they were released in between; the weights' gradients are written into `g`.

The text is `pydoc_data.topics`, the language reference that comes with every Python.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import pynccl
from sharding import AdamW, MixedPrecision, fully_shard
from sharding.recompute import Layer, checkpointed

Array = Any  # numpy.ndarray or cupy.ndarray

BYTES = 256
UNITS = ["embed", "blocks.*", "head"]


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. `context` bytes are read to say the next one, at every position at once."""

    blocks: int = 5
    width: int = 128
    heads: int = 4
    context: int = 64

    def parameters(self) -> dict[str, Any]:
        """The shape of every parameter, in a tree like the model. `head.bytes` is not there: it is tied."""
        d = self.width
        norm = {"scale": (d,), "shift": (d,)}
        block = {
            "attention_norm": norm,
            "attention": {"in": (d, 3 * d), "out": (d, d)},  # in: queries, keys and values side by side
            "mlp_norm": norm,
            "mlp": {"in": (d, 4 * d), "in_bias": (4 * d,), "out": (4 * d, d), "out_bias": (d,)},
        }
        return {
            "embed": {"bytes": (BYTES, d), "positions": (self.context, d)},
            "blocks": [block] * self.blocks,
            "head": {"norm": norm, "bias": (BYTES,)},
        }


# --- training -----------------------------------------------------------------------------------------------


def train(comm: Any, shape: Shape, *, steps: int, batch: int, rate: float, precision: str) -> list[float]:
    """The mean loss (nats per byte) of each step's whole batch, the same list on every rank."""
    xp, text = array_module(comm), corpus()
    model = fully_shard(
        initial(shape, xp, dtype="float64" if precision == "float64" else "float32"),
        comm,
        units=UNITS,
        precision=MixedPrecision(param="float32", gather="bfloat16") if precision == "bfloat16" else None,
    )
    layers = gpt(shape, xp)
    optimizer = AdamW(model, lr=rate)
    random, losses = np.random.default_rng(1), []  # the same on every rank
    for _ in range(steps):
        inputs, targets = part_of_batch(comm, random, text, batch, shape.context, xp)
        with model.microbatch():
            loss = loss_and_gradients(model, layers, inputs, targets)
        model.clip_grad_norm(1.0)
        optimizer.step()
        model.zero_grad()
        losses.append(mean_over_ranks(comm, loss, xp))
    model.close()
    return losses


def loss_and_gradients(units: Any, layers: Sequence[Layer], inputs: Array, targets: Array) -> float:
    """Forward and backward of the layers, each with its unit: of a ShardedModel, or what acts like one."""
    x, saved = inputs, []
    for unit, layer in zip(units, layers, strict=True):
        with unit.forward() as w:  # whole from here
            x, kept = layer.forward(w, x)
        saved.append(kept)  # and released
    loss, dx = cross_entropy(x, targets)
    for unit, layer in zip(reversed(units), reversed(layers), strict=True):
        with unit.backward() as (w, g):
            dx = layer.backward(w, g, saved.pop(), dx)
    return loss


def corpus() -> np.ndarray:
    """The text as uint8."""
    from pydoc_data.topics import topics

    return np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)


def part_of_batch(
    comm: Any, random: np.random.Generator, text: np.ndarray, batch: int, context: int, xp: Any
) -> tuple[Array, Array]:
    """This rank's part of the next batch, (batch / ranks, context) each: bytes, and the bytes after them."""
    if problem := batch_problem(batch, comm.size):
        raise ValueError(problem)
    starts = random.integers(0, text.size - context, batch)
    mine = starts[comm.rank * batch // comm.size : (comm.rank + 1) * batch // comm.size]
    windows = xp.asarray(text[mine[:, None] + np.arange(context + 1)])
    return windows[:, :-1], windows[:, 1:]


def batch_problem(batch: int, ranks: int) -> str:
    """Why so many texts cannot be shared by the ranks, and how many can; "" when they can."""
    if batch > 0 and batch % ranks == 0:
        return ""
    more = max(1, -(-batch // ranks)) * ranks
    fewer = f" or {more - ranks}" if more > ranks else ""
    return f"a batch of {batch} does not divide over {ranks} ranks; make it a multiple: --batch {more}{fewer}"


def mean_over_ranks(comm: Any, loss: float, xp: Any) -> float:
    """Of one number. Summed in float64."""
    whole = xp.full(1, loss, "f8")
    comm.all_reduce(whole, op="avg")
    return float(whole[0])


def array_module(comm: Any) -> Any:
    """NumPy in host memory, CuPy on GPUs: the model is written for both."""
    if comm.library.kind == "host":
        return np
    import cupy

    return cupy


# --- the model ----------------------------------------------------------------------------------------------


def initial(shape: Shape, xp: Any = np, dtype: str = "float32", seed: int = 1) -> dict[str, Any]:
    """First weights: random matrices, ones for scales, zeros for biases and shifts. The head is tied."""

    def make(name: str, size: tuple[int, ...]) -> Array:
        if len(size) == 1:
            return xp.full(size, 1.0 if name.endswith("scale") else 0.0, dtype)
        random = np.random.default_rng([seed, zlib.crc32(name.encode())])
        spread = 0.05 if name.startswith("embed") else size[0] ** -0.5
        if name.endswith("out"):  # what is added to the residual stream, once for each of 2 * blocks layers
            spread /= (2 * shape.blocks) ** 0.5
        return xp.asarray(random.normal(0, spread, size).astype(dtype))

    def tree(shapes: Any, name: str = "") -> Any:
        if isinstance(shapes, tuple):
            return make(name, shapes)
        items: Any = enumerate(shapes) if isinstance(shapes, list) else shapes.items()
        made = {key: tree(below, f"{name}.{key}" if name else key) for key, below in items}
        return list(made.values()) if isinstance(shapes, list) else made

    weights = tree(shape.parameters())
    weights["head"]["bytes"] = weights["embed"]["bytes"]  # the same array under two names is one parameter
    return weights


def gpt(shape: Shape, xp: Any = np, *, recompute: bool = False) -> list[Layer]:
    """The layers, one for each unit. `recompute`: keep each block's input alone, not what it computes."""
    block = Layer(partial(block_forward, xp, shape.heads), partial(block_backward, xp, shape.heads))
    blocks = [checkpointed(*block) if recompute else block] * shape.blocks
    return [Layer(partial(embed_forward, xp), embed_backward), *blocks, Layer(head_forward, head_backward)]


def embed_forward(xp: Any, w: Any, text: Array) -> tuple[Array, Any]:
    """(texts, context) of uint8 -> (texts, context, width)."""
    one_hot = xp.eye(BYTES, dtype=w["bytes"].dtype)[text]
    return w["bytes"][text] + w["positions"][: text.shape[1]], one_hot


def embed_backward(w: Any, g: Any, one_hot: Array, dx: Array) -> None:
    g["bytes"][...] = rows(one_hot).T @ rows(dx)
    g["positions"][: dx.shape[1]] = dx.sum(0)


def block_forward(xp: Any, heads: int, w: Any, x: Array) -> tuple[Array, Any]:
    """Look back with causal attention, think with a two-layer perceptron; each is added to its input."""
    normed, saved_norm = norm_forward(w["attention_norm"], x)
    looked, saved_attention = attention_forward(xp, heads, w["attention"], normed)
    x = x + looked
    normed, saved_norm2 = norm_forward(w["mlp_norm"], x)
    thought, saved_mlp = mlp_forward(w["mlp"], normed)
    return x + thought, (saved_norm, saved_attention, saved_norm2, saved_mlp)


def block_backward(xp: Any, heads: int, w: Any, g: Any, saved: Any, dx: Array) -> Array:
    saved_norm, saved_attention, saved_norm2, saved_mlp = saved
    d_normed = mlp_backward(w["mlp"], g["mlp"], saved_mlp, dx)
    dx = dx + norm_backward(w["mlp_norm"], g["mlp_norm"], saved_norm2, d_normed)
    d_normed = attention_backward(xp, heads, w["attention"], g["attention"], saved_attention, dx)
    return dx + norm_backward(w["attention_norm"], g["attention_norm"], saved_norm, d_normed)


def head_forward(w: Any, x: Array) -> tuple[Array, Any]:
    """How likely each next byte is: scores against the embeddings of all bytes."""
    normed, saved_norm = norm_forward(w["norm"], x)
    return product(normed, w["bytes"].T) + w["bias"], (normed, saved_norm)


def head_backward(w: Any, g: Any, saved: Any, d_logits: Array) -> Array:
    normed, saved_norm = saved
    g["bytes"][...] = rows(d_logits).T @ rows(normed)
    g["bias"][...] = rows(d_logits).sum(0)
    return norm_backward(w["norm"], g["norm"], saved_norm, product(d_logits, w["bytes"]))


def attention_forward(xp: Any, heads: int, w: Any, x: Array) -> tuple[Array, Any]:
    """Each position mixes the values up to its own, by how well its query fits their keys."""
    texts, length, width = x.shape
    q, k, v = product(x, w["in"]).reshape(texts, length, 3, heads, width // heads).transpose(2, 0, 3, 1, 4)
    q = q * (width // heads) ** -0.5
    scores = q @ k.swapaxes(-1, -2)
    scores += xp.where(xp.tri(length, dtype=bool), 0.0, -xp.inf).astype(x.dtype)
    scores -= scores.max(-1, keepdims=True)
    share = xp.exp(scores, out=scores)
    share /= share.sum(-1, keepdims=True)
    mixed = (share @ v).swapaxes(1, 2).reshape(x.shape)
    return product(mixed, w["out"]), (x, q, k, v, share, mixed)


def attention_backward(xp: Any, heads: int, w: Any, g: Any, saved: Any, dy: Array) -> Array:
    x, q, k, v, share, mixed = saved
    texts, length, width = x.shape
    g["out"][...] = rows(mixed).T @ rows(dy)
    d_mixed = product(dy, w["out"].T).reshape(texts, length, heads, width // heads).swapaxes(1, 2)
    d_share = d_mixed @ v.swapaxes(-1, -2)
    d_scores = share * (d_share - (d_share * share).sum(-1, keepdims=True))
    d_qkv = xp.empty((texts, length, 3, heads, width // heads), x.dtype)
    for number, part in enumerate(
        (
            d_scores @ k * (width // heads) ** -0.5,
            d_scores.swapaxes(-1, -2) @ q,
            share.swapaxes(-1, -2) @ d_mixed,
        )
    ):
        d_qkv[:, :, number] = part.swapaxes(1, 2)
    d_qkv = d_qkv.reshape(texts, length, 3 * width)
    g["in"][...] = rows(x).T @ rows(d_qkv)
    return product(d_qkv, w["in"].T)


def mlp_forward(w: Any, x: Array) -> tuple[Array, Any]:
    """Two linear layers with a ReLU between them, the same at every position."""
    hidden = product(x, w["in"])
    hidden += w["in_bias"]
    hidden *= hidden > 0
    return product(hidden, w["out"]) + w["out_bias"], (x, hidden)


def mlp_backward(w: Any, g: Any, saved: Any, dy: Array) -> Array:
    x, hidden = saved
    g["out"][...] = rows(hidden).T @ rows(dy)
    g["out_bias"][...] = rows(dy).sum(0)
    d_hidden = product(dy, w["out"].T)
    d_hidden *= hidden > 0
    g["in"][...] = rows(x).T @ rows(d_hidden)
    g["in_bias"][...] = rows(d_hidden).sum(0)
    return product(d_hidden, w["in"].T)


def norm_forward(w: Any, x: Array) -> tuple[Array, Any]:
    """Layer norm (Ba et al., 2016): mean 0 and variance 1 for each position, then scaled and shifted."""
    unit = x - x.mean(-1, keepdims=True)
    inverse = ((unit * unit).mean(-1, keepdims=True) + 1e-5) ** -0.5
    unit *= inverse
    return unit * w["scale"] + w["shift"], (unit, inverse)


def norm_backward(w: Any, g: Any, saved: Any, dy: Array) -> Array:
    unit, inverse = saved
    g["scale"][...] = rows(dy * unit).sum(0)
    g["shift"][...] = rows(dy).sum(0)
    d_unit = dy * w["scale"]
    along = (d_unit * unit).mean(-1, keepdims=True)
    d_unit -= d_unit.mean(-1, keepdims=True)
    d_unit -= unit * along
    d_unit *= inverse
    return d_unit


def cross_entropy(logits: Array, targets: Array) -> tuple[float, Array]:
    """Mean over positions of -log softmax(logits)[target], and its gradient."""
    xp = np if isinstance(logits, np.ndarray) else sys.modules["cupy"]
    flat, wanted = rows(logits), targets.reshape(-1)
    positions = xp.arange(len(wanted)), wanted
    shifted = flat - flat.max(-1, keepdims=True)
    chosen = shifted[positions]
    d_logits = xp.exp(shifted, out=shifted)
    total = d_logits.sum(-1, keepdims=True)
    loss = float((xp.log(total[:, 0]) - chosen).mean())
    d_logits /= total
    d_logits[positions] -= 1
    d_logits /= len(wanted)
    return loss, d_logits.reshape(logits.shape)


def product(x: Array, w: Array) -> Array:
    """x @ w as one product of matrices: NumPy would make one for each text, and w.T a slow one."""
    return (rows(x) @ w).reshape(*x.shape[:-1], w.shape[1])


def rows(x: Array) -> Array:
    """All positions of all texts as the rows of one matrix."""
    return x.reshape(-1, x.shape[-1])


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Train a GPT of bytes, sharded over the ranks of a launcher."
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=12, help="texts in a step, over all ranks (12)")
    parser.add_argument("--rate", type=float, default=1e-3, help="of AdamW (1e-3)")
    parser.add_argument(
        "--precision",
        choices=["float64", "float32", "bfloat16"],
        default="float64",
        help="bfloat16: of what is gathered; compute and master weights are float32",
    )
    options = vars(parser.parse_args())
    with pynccl.init() as comm:
        losses = train(comm, Shape(), **options)
        if comm.rank == 0:
            for step, loss in enumerate(losses):
                print(f"step {step + 1:3} loss {loss:.6f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

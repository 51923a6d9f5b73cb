"""Scales: of the loss, so that 16-bit gradients neither vanish nor overflow; of unequal batches, so that
their mean is right."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex

if TYPE_CHECKING:
    from .engine import ShardedModel
    from .optimizer import Optimizer

__all__ = ["DynamicLossScale", "StaticLossScale", "token_scale", "total_tokens"]


class StaticLossScale:
    """A fixed loss scale. Multiply the loss (or its gradient) by `scale`, and step through this object:

    >>> scale = DynamicLossScale()                                     # doctest: +SKIP
    >>> dloss *= scale.scale                                           # doctest: +SKIP
    >>> ...                                                            # doctest: +SKIP
    >>> scale.unscale(model)      # only needed to clip                # doctest: +SKIP
    >>> model.clip_grad_norm(1.0)                                      # doctest: +SKIP
    >>> scale.step(optimizer)     # False: skipped, on all ranks       # doctest: +SKIP
    >>> model.zero_grad()                                              # doctest: +SKIP
    """

    def __init__(self, scale: float) -> None:
        if not (isinstance(scale, (int, float)) and 0 < scale < math.inf):
            raise ValueError(f"{type(self).__name__}: scale={scale!r}; expected a finite number above 0")
        self.scale = float(scale)
        """What to multiply the loss by."""
        self.skipped = 0
        """Steps skipped so far."""

    def unscale(self, model: ShardedModel) -> bool:
        """Divide the model's gradients by the scale, in place; False if any gradient on any rank is not
        finite.

        Then they are left as they are, and `step` will skip. All ranks decide together, by the gradients'
        2-norm (one all-reduce). Once a step, and one scale for each model.

        TypeError for gradients that are reduced in float16: divided there, small ones would vanish after all.
        """
        model.check_step("unscale()")
        if model.unscaled is not None:
            raise RuntimeError("unscale: the gradients of this step are unscaled already; call step() next")
        for shard in model.shards:
            if shard.trainable and shard.grad.dtype == "float16" and self.scale != 1:
                raise TypeError(
                    f"unscale: the gradients of unit {shard.unit} are float16, in which what the scale "
                    "saved would vanish "
                    "again; reduce in float32: MixedPrecision(reduce=None) or reduce='float32'"
                )
        norm = model.grad_norm(2.0)
        finite = math.isfinite(norm)
        if finite and self.scale != 1:
            for shard in model.shards:
                if shard.trainable and not shard.fresh:
                    shard.grad *= shard.grad.dtype.type(1 / self.scale)
        model.unscaled = finite
        return finite

    def step(self, optimizer: Optimizer) -> bool:
        """Unscale (if that was not done), then the optimizer's step, or none on any rank if a gradient is not
        finite.

        True if the step was made. A skipped step leaves weights and optimizer state as they were;
        `zero_grad` and go on.
        """
        model = optimizer.model
        finite = self.unscale(model) if model.unscaled is None else model.unscaled
        if finite:
            optimizer.step()
        else:
            model.skipped()
            self.skipped += 1
        self._adapt(finite)
        return finite

    def _adapt(self, finite: bool) -> None:
        """The scale of the next step."""

    def describe(self) -> dict[str, Any]:
        """What a checkpoint keeps, JSON-like; the same on all ranks."""
        return {"kind": type(self).__name__, "scale": self.scale, "skipped": self.skipped}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from `describe()`."""
        if saved["kind"] != type(self).__name__:
            raise ValueError(
                f"restore: the saved loss scale is a {saved['kind']}, not a {type(self).__name__}"
            )
        self.scale, self.skipped = float(saved["scale"]), int(saved["skipped"])


class DynamicLossScale(StaticLossScale):
    """A loss scale that falls at once when gradients overflow and grows slowly while they don't.

    After a skipped step the scale is multiplied by `backoff`; after `interval` steps in a row without one, by
    `growth`. The defaults are those of torch.amp.GradScaler.
    """

    def __init__(
        self, scale: float = 65536.0, *, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000
    ) -> None:
        super().__init__(scale)
        if not growth > 1 or not 0 < backoff < 1 or not (isinstance(interval, int) and interval > 0):
            raise ValueError(
                f"DynamicLossScale: growth={growth!r}, backoff={backoff!r}, interval={interval!r}; "
                "expected growth above 1, "
                "backoff between 0 and 1, and a positive number of steps"
            )
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self.good_steps = 0
        """Steps without overflow since the scale changed."""

    def _adapt(self, finite: bool) -> None:
        if not finite:
            self.scale, self.good_steps = self.scale * self.backoff, 0
            return
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.good_steps = 0
            if math.isfinite(self.scale * self.growth):
                self.scale *= self.growth

    def describe(self) -> dict[str, Any]:
        """What a checkpoint keeps, JSON-like."""
        return {**super().describe(), "good_steps": self.good_steps}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from `describe()`."""
        super().restore(saved)
        self.good_steps = int(saved["good_steps"])


# --- unequal batches ----------------------------------------------------------------------------------------


def token_scale(model: Any, local_tokens: SupportsIndex, total: int | None = None) -> float:
    """What to multiply this rank's mean loss by, so that the step is that of the mean over all ranks' tokens.

    A mean over ranks of means over tokens weighs a token of a short batch more than one of a long batch. With
    reduce_op="avg" (the default) the cure is the factor local_tokens * ranks / total, with "sum"
    local_tokens / total. Counting over all ranks is collective: every rank calls it, also one with 0 tokens.

    With several microbatches, weigh each by the tokens of the whole step: `total = total_tokens(model, mine)`
    once, with all of this rank's tokens, then `token_scale(model, tokens, total)` for each microbatch,
    without communication.

    model
        The ShardedModel, or a communicator (then for reduce_op="avg").

    Raises ValueError, on every rank, for counts that are not integers of at least 0, or if all are 0.
    """
    if total is None:
        total = total_tokens(model, local_tokens)
    (count,) = _checked([_plain(local_tokens)])
    ranks = model.size if getattr(model, "reduce_op", "avg") == "avg" else 1
    return count * ranks / total


def total_tokens(model: Any, local_tokens: SupportsIndex) -> int:
    """The tokens of all ranks together. Collective. `model` is a ShardedModel or a communicator."""
    comm = getattr(model, "comm", model)
    total = sum(_checked(comm.all_gather_object(_plain(local_tokens))))
    if not total:
        raise ValueError("token_scale: no rank has any token, so there is no mean; leave this step out")
    return total


def _plain(count: Any) -> Any:
    """What can travel: a Python integer, or what the count is instead, for every rank to complain of."""
    return (
        operator.index(count) if hasattr(count, "__index__") and not isinstance(count, bool) else repr(count)
    )


def _checked(counts: list[Any]) -> list[int]:
    for rank, count in enumerate(counts):
        if not isinstance(count, int) or count < 0:
            where = f" on rank {rank}" if len(counts) > 1 else ""
            raise ValueError(f"token_scale: {count} tokens{where}; expected a count, 0 or more (an int)")
    return counts

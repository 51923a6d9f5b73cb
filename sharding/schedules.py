"""Learning-rate schedules: functions of the number of steps done, for any optimizer's `lr=`.

>>> AdamW(model, lr=cosine(3e-4, steps=10_000, warmup=500))        # doctest: +SKIP

A schedule is called with 0 before the first step. Any function `step -> float` is one; these are the usual
ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["constant", "cosine", "linear_warmup", "step_decay"]

Schedule = Callable[[int], float]


def constant(lr: float) -> Schedule:
    """`lr` always."""
    return _named(f"constant({lr!r})", lambda step: lr)


def linear_warmup(lr: float | Schedule, steps: int) -> Schedule:
    """From lr / steps in the first step to `lr` in step number `steps`; then `lr`, or what that schedule
    gives.

    A schedule given as `lr` is called with the same step numbers, and scaled by (step + 1) / steps during the
    warm-up.
    """
    _check("linear_warmup", steps=steps)
    after = _as_schedule(lr)
    title = f"linear_warmup({lr.__name__ if callable(lr) else repr(lr)}, steps={steps})"
    return _named(title, lambda step: after(step) * min(1.0, (step + 1) / steps))


def cosine(lr: float, steps: int, *, warmup: int = 0, final: float = 0.0) -> Schedule:
    """Half a cosine from `lr` down to `final` at step `steps`, after a linear warm-up of `warmup` steps; then
    `final`.

    final + (lr - final) * (1 + cos(pi * progress)) / 2, as in SGDR (Loshchilov and Hutter, 2017) without
    restarts.
    """
    _check("cosine", steps=steps)
    if not 0 <= warmup < steps:
        raise ValueError(f"cosine: warmup={warmup!r}; expected at least 0 and fewer than steps={steps} steps")

    def at(step: int) -> float:
        if step < warmup:
            return lr * (step + 1) / warmup
        progress = min(1.0, (step - warmup) / (steps - warmup))
        return final + (lr - final) * (1 + math.cos(math.pi * progress)) / 2

    return _named(f"cosine({lr!r}, steps={steps}, warmup={warmup}, final={final!r})", at)


def step_decay(lr: float, every: int, factor: float = 0.1) -> Schedule:
    """`lr`, multiplied by `factor` after each `every` steps."""
    _check("step_decay", every=every)
    return _named(
        f"step_decay({lr!r}, every={every}, factor={factor!r})", lambda s: lr * factor ** (s // every)
    )


def _as_schedule(lr: float | Schedule) -> Schedule:
    return lr if callable(lr) else constant(lr)


def _named(title: str, schedule: Schedule) -> Schedule:
    """The title is what checkpoints and error messages call it."""
    schedule.__name__ = schedule.__qualname__ = title
    return schedule


def _check(call: str, **counts: int) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{call}: {name}={value!r}; expected a number of steps, 1 or more")

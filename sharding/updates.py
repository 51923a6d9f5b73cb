"""Update rules: what one optimizer does to one block of a parameter. A table of them, and how to write one.

A rule sees flat 1-d blocks and numbers. It knows nothing of shards, ranks, names or schedules: that is the
driver's business (`optim.py`). Because every rule is elementwise, it does not matter how a parameter is cut.

Your own rule is a function and a few declarations:

>>> def signed(data, grad, state, hyper, step):
...     momentum, change = state["momentum"], state["change"]
...     momentum *= hyper["beta"]
...     momentum += grad
...     np.sign(momentum, out=change)
...     change *= hyper["lr"]
...     data -= change
>>> SIGN = Rule("Sign", signed, defaults={"beta": 0.9}, slots=("momentum",), temporaries=("change",))

and then `Optimizer(model, SIGN, lr=1e-3)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

__all__ = ["ADAM", "ADAMW", "LION", "RULES", "SGD_RULE", "Rule", "Update"]

Hyper = Mapping[str, Any]


class Update(Protocol):
    """`update(data, grad, state, hyper, step)`: change `data` and the slots of `state` in place.

    data, grad
        1-d blocks of equal length, in the dtype that the update computes in: that of the master weights, or
        float32 for 16-bit ones. `grad` is read-only in host memory.
    state
        name -> block, for every declared slot (kept; zero before the first step) and every declared temporary
        (undefined at the start, forgotten at the end). Use `out=` and in-place operators with them: then
        nothing is allocated, and the same function works on CuPy arrays.
    hyper
        name -> number: `lr` (of this step, if it is a schedule) and the rule's other hyper-parameters; or
        what the rule's `prepare` made of them.
    step
        1 in the first step in which these elements had a gradient.
    """

    def __call__(self, data: Any, grad: Any, state: Mapping[str, Any], hyper: Hyper, step: int) -> None:
        """Change the block."""


@dataclass(frozen=True)
class Rule:
    """An elementwise optimizer: its update and what the update needs."""

    kind: str
    """Its name, as checkpoints have it."""
    update: Update
    defaults: Hyper = field(default_factory=dict)
    """Hyper-parameters beside `lr`, with their values if the user gives none."""
    slots: tuple[str, ...] = ()
    """State arrays: like the data, in the dtype of the computation, zero at the start, saved in
    checkpoints."""
    temporaries: tuple[str, ...] = ()
    """Blocks that the update works in."""
    prepare: Callable[[Hyper, int], Hyper] | None = None
    """`prepare(hyper, step) -> numbers`, once a step and parameter group: what need not be computed in every
    block."""
    check: Callable[[Hyper], str | None] | None = None
    """What is wrong with these hyper-parameters (a sentence), or None."""
    cuda: str | None = None
    """The same update of one element as CUDA statements, for one fused kernel: `data`, `grad` and the slots
    are variables of type `real`, and so are the numbers that the update gets. Without it the update itself
    runs on CuPy arrays, one kernel an operation."""


# --- the rules ----------------------------------------------------------------------------------------------


def _sgd(data: Any, grad: Any, state: Mapping[str, Any], hyper: Hyper, step: int) -> None:
    change = grad
    if hyper["weight_decay"]:
        change = state["change"]
        np.multiply(data, hyper["weight_decay"], out=change)
        change += grad
    if "momentum_buffer" in state:
        buffer = state["momentum_buffer"]
        buffer *= hyper["momentum"]
        buffer += change
        if hyper["nesterov"]:
            np.multiply(buffer, hyper["momentum"] * hyper["lr"], out=state["ahead"])
            data -= state["ahead"]
        else:
            change = buffer
    np.multiply(change, hyper["lr"], out=state["change"])
    data -= state["change"]


_SGD_CUDA = """
    real change = grad + weight_decay * data;
    data -= lr * change;"""

_SGD_MOMENTUM_CUDA = """
    real change = grad + weight_decay * data;
    momentum_buffer = momentum * momentum_buffer + change;
    data -= lr * (nesterov != 0 ? change + momentum * momentum_buffer : momentum_buffer);"""


def _adam(data: Any, grad: Any, state: Mapping[str, Any], hyper: Hyper, step: int) -> None:
    first, second, work = state["exp_avg"], state["exp_avg_sq"], state["work"]
    if hyper["l2"]:
        decayed = state["decayed"]
        np.multiply(data, hyper["l2"], out=decayed)
        decayed += grad
        grad = decayed
    if hyper["keep_data"] != 1:
        data *= hyper["keep_data"]
    np.subtract(grad, first, out=work)
    work *= hyper["gain1"]
    first += work
    np.multiply(grad, grad, out=work)
    work *= hyper["gain2"]
    second *= hyper["keep2"]
    second += work
    np.sqrt(second, out=work)
    work += hyper["epsilon"]
    np.divide(first, work, out=work)
    work *= hyper["rate"]
    data -= work


_ADAM_CUDA = """
    real g = grad + l2 * data;
    exp_avg += gain1 * (g - exp_avg);
    exp_avg_sq = keep2 * exp_avg_sq + gain2 * g * g;
    data = keep_data * data - rate * exp_avg / (sqrt(exp_avg_sq) + epsilon);"""


def _prepare_adam(hyper: Hyper, step: int, decoupled: bool) -> Hyper:
    """The paper's bias corrections, moved out of the blocks: with k = sqrt(1 - beta2**step),

    lr / (1 - beta1**step) * m / (sqrt(v) / k + eps)  =  rate * m / (sqrt(v) + epsilon).
    """
    beta1, beta2 = hyper["betas"]
    k = math.sqrt(1 - beta2**step)
    return {
        "keep_data": 1 - hyper["lr"] * hyper["weight_decay"] if decoupled else 1.0,
        "l2": 0.0 if decoupled else hyper["weight_decay"],
        "gain1": 1 - beta1,
        "keep2": beta2,
        "gain2": 1 - beta2,
        "epsilon": hyper["eps"] * k,
        "rate": hyper["lr"] * k / (1 - beta1**step),
    }


def _lion(data: Any, grad: Any, state: Mapping[str, Any], hyper: Hyper, step: int) -> None:
    average, work = state["exp_avg"], state["work"]
    if hyper["keep_data"] != 1:
        data *= hyper["keep_data"]
    np.subtract(grad, average, out=work)
    work *= hyper["gain1"]
    work += average
    np.sign(work, out=work)
    work *= hyper["lr"]
    data -= work
    np.subtract(grad, average, out=work)
    work *= hyper["gain2"]
    average += work


_LION_CUDA = """
    real mixed = exp_avg + gain1 * (grad - exp_avg);
    data = keep_data * data - lr * (mixed > 0 ? 1 : mixed < 0 ? -1 : mixed);
    exp_avg += gain2 * (grad - exp_avg);"""


def _prepare_lion(hyper: Hyper, step: int) -> Hyper:
    beta1, beta2 = hyper["betas"]
    return {
        "keep_data": 1 - hyper["lr"] * hyper["weight_decay"],
        "lr": hyper["lr"],
        "gain1": 1 - beta1,
        "gain2": 1 - beta2,
    }


# --- what hyper-parameters may be ---------------------------------------------------------------------------


def _check_betas(hyper: Hyper) -> str | None:
    betas = hyper["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(0 <= b < 1 for b in betas):
        return f"betas={betas!r}; expected two numbers in [0, 1)"
    return _check_not_negative(hyper, "weight_decay") or (
        _check_not_negative(hyper, "eps") if "eps" in hyper else None
    )


def _check_sgd(hyper: Hyper) -> str | None:
    if hyper["nesterov"] and not hyper["momentum"]:
        return f"nesterov=True with momentum={hyper['momentum']!r}; Nesterov's step needs a momentum above 0"
    return _check_not_negative(hyper, "momentum") or _check_not_negative(hyper, "weight_decay")


def _check_not_negative(hyper: Hyper, name: str) -> str | None:
    value = hyper[name]
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not value >= 0:
        return f"{name}={value!r}; expected a number of at least 0"
    return None


# --- the table ----------------------------------------------------------------------------------------------

_BETAS = {"betas": (0.9, 0.999), "eps": 1e-8}

SGD_RULE = Rule(
    "SGD",
    _sgd,
    {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
    temporaries=("change",),
    check=_check_sgd,
    cuda=_SGD_CUDA,
)
SGD_MOMENTUM_RULE = Rule(
    "SGD",
    _sgd,
    SGD_RULE.defaults,
    slots=("momentum_buffer",),
    temporaries=("change", "ahead"),
    check=_check_sgd,
    cuda=_SGD_MOMENTUM_CUDA,
)
ADAM = Rule(
    "Adam",
    _adam,
    {**_BETAS, "weight_decay": 0.0},
    slots=("exp_avg", "exp_avg_sq"),
    temporaries=("work", "decayed"),
    prepare=lambda hyper, step: _prepare_adam(hyper, step, decoupled=False),
    check=_check_betas,
    cuda=_ADAM_CUDA,
)
ADAMW = Rule(
    "AdamW",
    _adam,
    {**_BETAS, "weight_decay": 0.01},
    slots=("exp_avg", "exp_avg_sq"),
    temporaries=("work",),
    prepare=lambda hyper, step: _prepare_adam(hyper, step, decoupled=True),
    check=_check_betas,
    cuda=_ADAM_CUDA,
)
LION = Rule(
    "Lion",
    _lion,
    {"betas": (0.9, 0.99), "weight_decay": 0.0},
    slots=("exp_avg",),
    temporaries=("work",),
    prepare=_prepare_lion,
    check=_check_betas,
    cuda=_LION_CUDA,
)

RULES = {rule.kind: rule for rule in (SGD_RULE, ADAM, ADAMW, LION)}

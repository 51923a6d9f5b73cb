"""The usual optimizers: a rule of the table in `updates.py` each, with its hyper-parameters by name.

All take `groups`, `stochastic_rounding` and `offload` as `Optimizer` does; `lr` is a number or a schedule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .optimizer import Groups, LearningRate, Optimizer
from .updates import ADAM, ADAMW, LION, SGD_MOMENTUM_RULE, SGD_RULE

if TYPE_CHECKING:
    from .engine import ShardedModel

__all__ = ["SGD", "Adam", "AdamW", "Lion", "Optimizer"]


class SGD(Optimizer):
    """Stochastic gradient descent, with momentum, Nesterov's momentum and L2 weight decay as torch.optim.SGD
    has them.

    g = grad + weight_decay * w;  b = momentum * b + g;  w -= lr * (g + momentum * b if nesterov else b).
    Without momentum in any group there is no state.
    """

    def __init__(
        self,
        model: ShardedModel,
        lr: LearningRate,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        groups: Groups = None,
        stochastic_rounding: int | None = None,
        offload: bool = False,
    ) -> None:
        kept = momentum or any(hyper.get("momentum") for hyper in (groups or {}).values())
        super().__init__(
            model,
            SGD_MOMENTUM_RULE if kept else SGD_RULE,
            lr=lr,
            groups=groups,
            stochastic_rounding=stochastic_rounding,
            offload=offload,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
        )


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015), with L2 weight decay added to the gradient, as torch.optim.Adam.

    m = b1 * m + (1 - b1) * g;  v = b2 * v + (1 - b2) * g * g;
    w -= lr * (m / (1 - b1**step)) / (sqrt(v / (1 - b2**step)) + eps).
    """

    rule_of_kind = ADAM

    def __init__(
        self,
        model: ShardedModel,
        lr: LearningRate = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        groups: Groups = None,
        stochastic_rounding: int | None = None,
        offload: bool = False,
    ) -> None:
        rule = self.rule_of_kind
        super().__init__(
            model,
            rule,
            lr=lr,
            groups=groups,
            stochastic_rounding=stochastic_rounding,
            offload=offload,
            betas=betas,
            eps=eps,
            weight_decay=rule.defaults["weight_decay"] if weight_decay is None else weight_decay,
        )


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), as torch.optim.AdamW; `weight_decay`
    is 0.01 if not given.

    w *= 1 - lr * weight_decay, then Adam's step from the bare gradient.
    """

    rule_of_kind = ADAMW


class Lion(Optimizer):
    """Lion (Chen and others, 2023): the sign of an interpolated momentum, half of Adam's state.

    w *= 1 - lr * weight_decay;  w -= lr * sign(b1 * m + (1 - b1) * g);  m = b2 * m + (1 - b2) * g.
    """

    def __init__(
        self,
        model: ShardedModel,
        lr: LearningRate = 1e-4,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        groups: Groups = None,
        stochastic_rounding: int | None = None,
        offload: bool = False,
    ) -> None:
        super().__init__(
            model,
            LION,
            lr=lr,
            groups=groups,
            stochastic_rounding=stochastic_rounding,
            offload=offload,
            betas=betas,
            weight_decay=weight_decay,
        )

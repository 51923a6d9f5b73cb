"""An update rule over host memory: block by block, so that nothing full-size is ever allocated.

All the memory that a step works in is made once, for one block. The GPU's counterpart is `fused.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .precision import Key, cast_into, cast_stochastically
from .updates import Hyper, Rule

__all__ = ["BLOCK_BYTES", "HostUpdater", "working_dtype"]

BLOCK_BYTES = 128 << 10
"""Of each array of a block. AdamW works on five at once, 640 KiB, which a second-level cache of 1 MiB holds;
its 13 NumPy calls cost about 0.5 us each, a tenth of the time that such a block takes. Measured on one core
with 1 MiB (16 Mi float32 elements, ns each): 4 KiB 10.4, 16 KiB 3.8, 32 KiB 2.7, 64 KiB 2.2, 128 KiB 1.9,
256 KiB 1.8, 512 KiB 1.7, no blocks 2.8. Larger ones gain little, and lose where the cache is smaller."""


def working_dtype(data: np.dtype) -> np.dtype:
    """What a rule computes in, and keeps its state in: float64 for float64 weights, else float32."""
    return np.dtype(np.float64 if data == np.float64 else np.float32)


class HostUpdater:
    """Applies one rule to segments of NumPy arrays."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._scratch: dict[np.dtype, dict[str, np.ndarray]] = {}

    def zeros(self, size: int, dtype: np.dtype) -> np.ndarray:
        """Memory for a slot."""
        return np.zeros(size, dtype)

    def update(
        self,
        data: np.ndarray,
        grad: np.ndarray,
        slots: Mapping[str, np.ndarray],
        numbers: Hyper,
        step: int,
        key: Key | None = None,
        index: int = 0,
    ) -> None:
        """One step of one segment; all arrays are 1-d and of one length.

        Data and gradients of other dtypes than the working one are cast block by block, and data back to its
        own: to nearest, or (`key`) stochastically, `index` being the first element's place in its parameter.
        """
        work = working_dtype(data.dtype)
        scratch, block = self._scratch_of(work), BLOCK_BYTES // work.itemsize
        temporaries = [(name, scratch[name]) for name in self.rule.temporaries]
        grad = grad.view()
        grad.flags.writeable = False
        rule_update, items = self.rule.update, tuple(slots.items())
        for start in range(0, data.size, block):
            stop = min(start + block, data.size)
            own, gradient = data[start:stop], grad[start:stop]
            weights = own
            if own.dtype != work:
                weights = scratch[":data"][: stop - start]
                cast_into(weights, own)
            if gradient.dtype != work:
                wide = scratch[":grad"][: stop - start]
                cast_into(wide, gradient)
                gradient = wide
            state = {name: slot[start:stop] for name, slot in items}
            for name, temporary in temporaries:
                state[name] = temporary[: stop - start]
            rule_update(weights, gradient, state, numbers, step)
            if weights is own:
                continue
            if key is not None:
                cast_stochastically(own, weights, key, index + start)
            else:
                cast_into(own, weights)

    def finish(self) -> None:
        """The step is done."""

    def _scratch_of(self, work: np.dtype) -> dict[str, np.ndarray]:
        if work not in self._scratch:
            names = (*self.rule.temporaries, ":data", ":grad")
            self._scratch[work] = {name: np.empty(BLOCK_BYTES // work.itemsize, work) for name in names}
        return self._scratch[work]

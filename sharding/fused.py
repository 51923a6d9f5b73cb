"""An update rule on a GPU: one fused kernel a segment, compiled when first used. And the same with state in
host memory.

The kernel's text is made here from the rule's `cuda` statements, by functions that need no GPU and no CuPy.
A rule without such statements runs its Python update on CuPy arrays: right, but a kernel an operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .blocks import working_dtype
from .precision import Key
from .updates import Hyper, Rule

if TYPE_CHECKING:
    from .engine import ShardedModel

__all__ = ["CudaUpdater", "KernelText", "OffloadedUpdater", "kernel_text"]

CHUNK = 1 << 22
"""Elements of offloaded state on the GPU at a time: 16 MiB of float32 an array, which a PCIe link moves in
about a millisecond, long against the microseconds that a transfer takes to start."""

PREAMBLE = """
__device__ inline float from_bfloat16(unsigned short bits) {
    union { unsigned int u; float f; } value;
    value.u = (unsigned int)bits << 16;
    return value.f;
}
__device__ inline unsigned short to_bfloat16(float x, unsigned int add) {
    union { unsigned int u; float f; } value;
    value.f = x;
    if (x != x) return (unsigned short)(value.u >> 16 | 0x40);
    return (unsigned short)((value.u + add) >> 16);
}
__device__ inline unsigned short nearest_bfloat16(float x) {
    union { unsigned int u; float f; } value;
    value.f = x;
    return to_bfloat16(x, 0x7FFF + (value.u >> 16 & 1));
}
/* precision.random_bits, to the bit. */
__device__ inline unsigned int random_bits(unsigned long long index, unsigned int before, unsigned int
middle) {
    unsigned int high = (unsigned int)(index >> 32) * 0x9E3779B1u;
    unsigned int x = (unsigned int)index + before;
    x ^= x >> 16; x *= 0x21F0AAADu; x ^= x >> 15;
    x += middle ^ high;
    x ^= x >> 16; x *= 0x735A2D97u; x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ x >> 16;
}
"""

_STORE = {
    "nearest": "data_ = nearest_bfloat16(data);",
    "stochastic": (
        "data_ = to_bfloat16(data, random_bits((unsigned long long)(first + i), before, middle) & 0xFFFFu);"
    ),
    "plain": "data_ = data;",
}


@dataclass(frozen=True)
class KernelText:
    """What cupy.ElementwiseKernel is made of. Outputs are read as well as written."""

    name: str
    inputs: str
    outputs: str
    operation: str
    preamble: str = PREAMBLE


def kernel_text(
    rule: Rule, numbers: tuple[str, ...], data: np.dtype, grad: np.dtype, stochastic: bool
) -> KernelText:
    """The fused kernel of `rule` for weights and gradients of these dtypes; `numbers` names what the update
    gets.

    bfloat16 travels as 16 bits and is converted inside, which no version of CuPy needs to know about.
    """
    real = working_dtype(data)
    types = {"float": "float32", "double": "float64"}
    c_real = next(c for c, name in types.items() if name == real.name)
    inputs = [f"{_travels(grad)} grad_", *(f"{real.name} {name}" for name in numbers)]
    if stochastic:
        inputs += ["uint64 first", "uint32 before", "uint32 middle"]
    outputs = [f"{_travels(data)} data_", *(f"{real.name} {slot}" for slot in rule.slots)]
    store = "plain" if data.name != "bfloat16" else "stochastic" if stochastic else "nearest"
    operation = "\n".join(
        (
            f"typedef {c_real} real;",
            f"real data = {_loaded('data_', data)};",
            f"const real grad = {_loaded('grad_', grad)};",
            f"{{{rule.cuda}}}",
            _STORE[store],
        )
    )
    name = f"{rule.kind}_{data.name}_{grad.name}_{store}".lower()
    return KernelText(name, ", ".join(inputs), ", ".join(outputs), operation)


def _travels(dtype: np.dtype) -> str:
    return "uint16" if dtype.name == "bfloat16" else dtype.name


def _loaded(name: str, dtype: np.dtype) -> str:
    return f"(real)from_bfloat16({name})" if dtype.name == "bfloat16" else f"(real){name}"


class CudaUpdater:
    """Applies one rule to segments of CuPy arrays, on the current stream."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._kernels: dict[Any, Any] = {}

    def zeros(self, size: int, dtype: np.dtype) -> Any:
        """Memory for a slot."""
        import cupy

        return cupy.zeros(size, dtype)

    def update(
        self,
        data: Any,
        grad: Any,
        slots: Mapping[str, Any],
        numbers: Hyper,
        step: int,
        key: Key | None = None,
        index: int = 0,
    ) -> None:
        """As HostUpdater.update, in one kernel."""
        if self.rule.cuda is None:
            self._unfused(data, grad, slots, numbers, step, key)
            return
        names = tuple(name for name, value in numbers.items() if np.isscalar(value))
        kernel = self._kernel(names, np.dtype(data.dtype), np.dtype(grad.dtype), key is not None)
        random = () if key is None else (index, *key)
        values = [float(numbers[name]) for name in names]
        kernel(_as_bits(grad), *values, *random, _as_bits(data), *slots.values())

    def _kernel(self, names: tuple[str, ...], data: np.dtype, grad: np.dtype, stochastic: bool) -> Any:
        which = (names, data, grad, stochastic)
        if which not in self._kernels:
            import cupy

            text = kernel_text(self.rule, names, data, grad, stochastic)
            self._kernels[which] = cupy.ElementwiseKernel(
                text.inputs, text.outputs, text.operation, text.name, preamble=text.preamble
            )
        return self._kernels[which]

    def _unfused(
        self, data: Any, grad: Any, slots: Mapping[str, Any], numbers: Hyper, step: int, key: Key | None
    ) -> None:
        import cupy

        if key is not None:
            raise ValueError(
                f"{self.rule.kind}: stochastic rounding on a GPU needs the rule's `cuda` statements; give "
                "Rule(cuda=...)"
            )
        work = working_dtype(np.dtype(data.dtype))
        weights = data if data.dtype == work else data.astype(work)
        temporaries = {name: cupy.empty(data.size, work) for name in self.rule.temporaries}
        self.rule.update(weights, grad.astype(work, copy=False), {**slots, **temporaries}, numbers, step)
        if weights is not data:
            data[...] = weights

    def finish(self) -> None:
        """The step is queued; nothing to wait for."""


def _as_bits(array: Any) -> Any:
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


@dataclass
class _Lane:
    """A stream with room for one chunk of everything: one lane computes while the other copies."""

    stream: Any
    buffers: dict[tuple[str, np.dtype], Any]


class OffloadedUpdater:
    """Applies one rule to master weights and state in pinned host memory, chunk by chunk through the GPU.

    Gradients stay on the GPU. Each element of master weights and state crosses the link twice in a step.
    """

    def __init__(self, model: ShardedModel, rule: Rule) -> None:
        import cupy

        self.rule = rule
        self._cuda = CudaUpdater(rule)
        self._lanes = [_Lane(cupy.cuda.Stream(non_blocking=True), {}) for _ in range(2)]
        self._turn = 0
        for shard in model.shards:
            if shard.trainable and not isinstance(shard.data, np.ndarray):
                host = self._pinned(shard.data.size, np.dtype(shard.data.dtype))
                host[...] = shard.data.get()
                shard.data = (
                    host  # what is gathered, `shard.source`, stays on the GPU; updated() refreshes it
                )

    @staticmethod
    def _pinned(size: int, dtype: np.dtype) -> np.ndarray:
        import cupyx

        return cupyx.empty_pinned(size * dtype.itemsize, np.uint8).view(dtype)

    def zeros(self, size: int, dtype: np.dtype) -> np.ndarray:
        """Pinned memory for a slot."""
        array = self._pinned(size, dtype)
        array[...] = 0
        return array

    def update(
        self,
        data: np.ndarray,
        grad: Any,
        slots: Mapping[str, np.ndarray],
        numbers: Hyper,
        step: int,
        key: Key | None = None,
        index: int = 0,
    ) -> None:
        """As HostUpdater.update; queued on the lanes' streams, complete after `finish`."""
        import cupy

        ready = cupy.cuda.get_current_stream().record(cupy.cuda.Event(disable_timing=True))
        for start in range(0, data.size, CHUNK):
            part = slice(start, min(start + CHUNK, data.size))
            lane = self._lanes[self._turn]
            self._turn = 1 - self._turn
            lane.stream.wait_event(ready)
            with lane.stream:
                host = {"data": data[part]} | {name: slot[part] for name, slot in slots.items()}
                device = {name: self._room(lane, name, array) for name, array in host.items()}
                for name, array in host.items():
                    device[name].set(array, stream=lane.stream)
                own = device.pop("data")
                self._cuda.update(own, grad[part], device, numbers, step, key, index + start)
                device["data"] = own
                for name, array in host.items():
                    device[name].get(stream=lane.stream, out=array, blocking=False)

    @staticmethod
    def _room(lane: _Lane, name: str, like: np.ndarray) -> Any:
        import cupy

        where = (name, like.dtype)
        if where not in lane.buffers:
            lane.buffers[where] = cupy.empty(CHUNK, like.dtype)
        return lane.buffers[where][: like.size]

    def finish(self) -> None:
        """Wait: the weights are in host memory, and read from there next."""
        for lane in self._lanes:
            lane.stream.synchronize()

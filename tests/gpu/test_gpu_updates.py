"""Fused updates on a real GPU: the numbers of the NumPy updates, with state on the GPU or in host memory."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sharding.blocks import HostUpdater
from sharding.precision import rounding_key
from sharding.updates import RULES, SGD_MOMENTUM_RULE, Rule

pytestmark = pytest.mark.gpu

SIZE = 10_001
EVERY_RULE = {**RULES, "SGD with momentum": SGD_MOMENTUM_RULE}


def numbers(rule: Rule) -> dict[str, Any]:
    hyper = {"lr": 0.01, **rule.defaults, "weight_decay": 0.1}
    return dict(rule.prepare(hyper, 2) if rule.prepare else hyper)


def arrays(rule: Rule) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    make = [rng.random(SIZE, np.float32) for _ in range(2 + len(rule.slots))]
    return make[0], make[1], dict(zip(rule.slots, make[2:], strict=True))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("rule", EVERY_RULE.values(), ids=EVERY_RULE.keys())
def test_the_kernel_equals_the_numpy_update(rule: Rule, fused: bool) -> None:
    import cupy

    from sharding.fused import CudaUpdater

    data, grad, slots = arrays(rule)
    device, state = cupy.asarray(data), {slot: cupy.asarray(array) for slot, array in slots.items()}
    updater = CudaUpdater(rule if fused else dataclasses.replace(rule, cuda=None))
    updater.update(device, cupy.asarray(grad), state, numbers(rule), 2)
    HostUpdater(rule).update(data, grad, slots, numbers(rule), 2)
    np.testing.assert_allclose(device.get(), data, rtol=1e-6, atol=1e-6)
    for slot, array in slots.items():
        np.testing.assert_allclose(state[slot].get(), array, rtol=1e-6, atol=1e-6)


def test_stochastic_rounding_takes_the_bits_that_host_memory_takes() -> None:
    import cupy

    from sharding.fused import CudaUpdater

    copy = Rule("Copy", lambda data, grad, state, hyper, step: np.copyto(data, grad), cuda=" data = grad; ")
    grad = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
    data = np.zeros(SIZE, ml_dtypes.bfloat16)
    bits = cupy.zeros(SIZE, np.uint16)
    key, first = rounding_key(1, 2, "w"), 2**32 - 5000
    # An array that CuPy has no dtype for is passed as what the kernel sees: its bits.
    device = SimpleNamespace(dtype=data.dtype, view=lambda dtype: bits)
    CudaUpdater(copy).update(device, cupy.asarray(grad), {}, {}, 1, key, first)
    HostUpdater(copy).update(data, grad, {}, {}, 1, key, first)
    assert np.array_equal(bits.get(), data.view(np.uint16))


def test_offloaded_state_passes_through_the_gpu_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    from sharding import fused

    monkeypatch.setattr(fused, "CHUNK", 1000)
    rule = RULES["AdamW"]
    data, grad, slots = arrays(rule)
    shard = SimpleNamespace(trainable=True, data=cupy.asarray(data))
    updater = fused.OffloadedUpdater(SimpleNamespace(shards=[shard]), rule)  # type: ignore[arg-type]
    state = {slot: updater.zeros(SIZE, np.dtype(np.float32)) for slot in slots}
    for slot, array in slots.items():
        state[slot][...] = array
    assert isinstance(shard.data, np.ndarray)
    updater.update(shard.data, cupy.asarray(grad), state, numbers(rule), 2)
    updater.finish()
    HostUpdater(rule).update(data, grad, slots, numbers(rule), 2)
    np.testing.assert_allclose(shard.data, data, rtol=1e-6, atol=1e-6)
    for slot, array in slots.items():
        np.testing.assert_allclose(state[slot], array, rtol=1e-6, atol=1e-6)

"""Traces on a real GPU: times are the GPU's, and nothing is told before the GPU has come to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pynccl
from sharding import AdamW, fully_shard
from sharding.runtime import CudaRuntime
from sharding.trace import Tracer

pytestmark = pytest.mark.gpu


def test_a_stamp_has_no_time_before_the_stream_comes_to_it() -> None:
    import cupy

    runtime = CudaRuntime(None, overlap=True)
    stream = runtime.stream()
    with stream:
        big = cupy.ones((4096, 4096), np.float32)
        big = big @ big * np.float32(1e-4)
        stream.synchronize()  # libraries are loaded
        first = runtime.stamp(stream)
        for _ in range(20):
            big = big @ big * np.float32(1e-4)
    last = runtime.stamp(stream)
    assert runtime.seconds(last) is None  # 2.7 TFLOP are not done in the time of this call
    runtime.catch_up()
    begun, ended = runtime.seconds(first), runtime.seconds(last)
    assert begun is not None and ended is not None and ended > begun
    runtime.close()


def test_a_traced_step_on_a_gpu_has_its_parts() -> None:
    import cupy

    seen: list[dict[str, Any]] = []
    params = {name: cupy.ones((512, 512), np.float32) for name in "abc"}
    with (
        pynccl.Communicator(1, pynccl.get_unique_id("host"), 0, library="host") as alone,
        fully_shard(params, alone, units=["*"]) as model,
        Tracer(model, on_step=seen.append) as tracer,
    ):
        optimizer = AdamW(model, lr=1e-3)
        for _ in range(3):
            with tracer.step(tokens=64):
                x = cupy.ones((64, 512), np.float32)
                with model.microbatch():
                    for unit in model:
                        with unit.forward() as w:
                            x = x @ w * np.float32(1 / 512)
                    for unit in reversed(model):
                        with unit.backward() as (_, g):
                            g[...] = 1
                optimizer.step()
                model.zero_grad()
    for line in seen:
        assert line["compute"] > 0 and line["optimizer"] > 0
        assert line["gpu_used"] > 0
        assert sum(line[part] for part in ("compute", "optimizer")) <= line["seconds"]

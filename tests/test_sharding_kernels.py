"""The text of fused GPU kernels, compiled as C and run here, against the NumPy updates."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pynccl.host.build import compiler
from sharding.blocks import HostUpdater, working_dtype
from sharding.fused import KernelText, kernel_text
from sharding.precision import rounding_key
from sharding.updates import RULES, SGD_MOMENTUM_RULE, Rule

C_TYPES = {"float32": "float", "float64": "double", "uint16": "unsigned short"} | {
    "uint32": "unsigned int",
    "uint64": "unsigned long long",
}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
EVERY_RULE = {**RULES, "SGD with momentum": SGD_MOMENTUM_RULE}
SIZE = 1000


def as_c(text: KernelText) -> str:
    """The kernel as a C function over all elements: gradient, outputs, numbers."""
    inputs = [part.split() for part in text.inputs.split(", ")]
    outputs = [part.split() for part in text.outputs.split(", ")]
    arrays, numbers = [inputs[0], *outputs], inputs[1:]
    parameters = [f"{C_TYPES[kind]} *{name}_array" for kind, name in arrays]
    parameters += [f"{C_TYPES[kind]} {name}" for kind, name in numbers]
    elements = "\n".join(f"#define {name} {name}_array[i]" for _, name in arrays)
    return (
        "#include <tgmath.h>\n#define __device__ static\n"
        f"{text.preamble}\n{elements}\n"
        f"void run({', '.join(parameters)}, long n) {{\n"
        f"for (long i = 0; i < n; i++) {{\n{text.operation}\n}} }}\n"
    )


def run_as_c(text: KernelText, folder: Path, arrays: list[np.ndarray], numbers: list[Any]) -> None:
    source, library = folder / "kernel.c", folder / "kernel.so"
    source.write_text(as_c(text))
    # Contraction to fused multiply-adds is off, so that the operations are those that are written.
    flags = ["-O2", "-shared", "-fPIC", "-ffp-contract=off", "-Wall", "-Werror", "-Wno-unused-function"]
    made = subprocess.run(
        [*compiler(), *flags, str(source), "-o", str(library), "-lm"], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
    ctypes.CDLL(str(library)).run(*pointers, *numbers, ctypes.c_long(arrays[0].size))


def prepared(rule: Rule, step: int) -> dict[str, Any]:
    hyper = {"lr": 0.01, **rule.defaults, "weight_decay": 0.1}
    if "momentum" in hyper and rule.slots:
        hyper |= {"momentum": 0.9, "nesterov": True}
    return dict(rule.prepare(hyper, step) if rule.prepare else hyper)


@pytest.mark.parametrize("rule", EVERY_RULE.values(), ids=EVERY_RULE.keys())
@pytest.mark.parametrize(
    ("data_dtype", "grad_dtype", "stochastic"),
    [
        ("float32", "float32", False),
        ("float64", "float64", False),
        ("float32", "bfloat16", False),
        ("bfloat16", "float32", False),
        ("bfloat16", "bfloat16", True),
    ],
)
def test_the_fused_kernel_computes_what_the_numpy_update_computes(
    rule: Rule, data_dtype: str, grad_dtype: str, stochastic: bool, tmp_path: Path
) -> None:
    rng = np.random.default_rng(3)
    dtypes = [BFLOAT16 if name == "bfloat16" else np.dtype(name) for name in (data_dtype, grad_dtype)]
    data = rng.standard_normal(SIZE).astype(dtypes[0])
    grad = rng.standard_normal(SIZE).astype(dtypes[1])
    work = working_dtype(data.dtype)
    slots = {slot: rng.random(SIZE).astype(work) for slot in rule.slots}
    numbers = prepared(rule, step=3)
    key = rounding_key(1, 2, "w") if stochastic else None
    first = 2**32 - 500  # the index passes 32 bits within the segment

    kernel_data, kernel_slots = data.copy(), {slot: array.copy() for slot, array in slots.items()}
    text = kernel_text(rule, tuple(numbers), data.dtype, grad.dtype, stochastic)
    real = ctypes.c_double if work == np.float64 else ctypes.c_float
    values: list[Any] = [real(float(value)) for value in numbers.values()]
    if key is not None:
        values += [ctypes.c_ulonglong(first), ctypes.c_uint(key[0]), ctypes.c_uint(key[1])]
    run_as_c(text, tmp_path, [grad, kernel_data, *kernel_slots.values()], values)

    HostUpdater(rule).update(data, grad, slots, numbers, 3, key, first)
    bits = {"float64": 52, "float32": 23}[work.name]
    for slot, array in slots.items():
        np.testing.assert_allclose(kernel_slots[slot], array, rtol=2.0 ** (2 - bits), atol=2.0 ** (2 - bits))
    if data.dtype == BFLOAT16:
        # The order of operations differs in the last bit of float32, which rarely decides a rounding.
        assert np.mean(kernel_data.view(np.uint16) != data.view(np.uint16)) < 0.01
        data, kernel_data = data.astype(np.float32), kernel_data.astype(np.float32)
        np.testing.assert_allclose(kernel_data, data, rtol=2.0**-7)
    else:
        np.testing.assert_allclose(kernel_data, data, rtol=2.0 ** (3 - bits), atol=2.0 ** (3 - bits))


def test_a_kernel_of_bfloat16_rounds_and_keeps_what_is_not_finite(tmp_path: Path) -> None:
    """A rule that changes nothing: what is left is loading and storing."""
    rule = Rule("Nothing", lambda data, grad, state, hyper, step: None, cuda=" data = grad; ")
    rng = np.random.default_rng(0)
    grad = rng.integers(0, 2**32, 5000, np.uint32).view(np.float32)
    special = np.array([np.nan, -np.nan, np.inf, -np.inf], np.float32)
    grad = np.concatenate([grad, special])
    data = np.zeros(grad.size, BFLOAT16)
    run_as_c(kernel_text(rule, (), data.dtype, grad.dtype, False), tmp_path, [grad, data], [])
    with np.errstate(over="ignore", invalid="ignore"):
        expected = grad.astype(BFLOAT16)
    nan = np.isnan(grad)
    assert np.isnan(data[nan].astype(np.float32)).all()
    assert np.array_equal(data[~nan].view(np.uint16), expected[~nan].view(np.uint16))

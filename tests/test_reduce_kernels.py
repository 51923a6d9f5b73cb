"""The host library's arithmetic alone: each dtype and operation, bit by bit, against NumPy and ml_dtypes."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pynccl.host import build

# In the order of ncclDataType_t and of enum reduce_op.
DTYPES: dict[str, np.dtype[Any]] = {
    "int8": np.dtype("i1"),
    "uint8": np.dtype("u1"),
    "int32": np.dtype("i4"),
    "uint32": np.dtype("u4"),
    "int64": np.dtype("i8"),
    "uint64": np.dtype("u8"),
    "float16": np.dtype("f2"),
    "float32": np.dtype("f4"),
    "float64": np.dtype("f8"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
OPS = ("sum", "prod", "max", "min", "avg", "premulsum")
INTEGERS = tuple(name for name, dtype in DTYPES.items() if dtype.kind in "iu" and not name.startswith("f"))
NARROW = ("float16", "bfloat16", "float8e4m3", "float8e5m2")
LARGEST_OF_SATURATING = {"float8e4m3": 448.0, "float8e5m2": 57344.0}

Arrays = Sequence["np.ndarray[Any, Any]"]


class Kernels:
    """reduce.c, called on arrays."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.dtype_size.restype = ctypes.c_size_t
        self.library.dtype_name.restype = self.library.redop_name.restype = ctypes.c_char_p

    def reduce(self, name: str, op: str, sources: Arrays, scalars: Arrays = (), out: Any = None) -> Any:
        out = np.empty_like(sources[0]) if out is None else out
        self.library.reduce_block(
            ctypes.c_void_p(out.ctypes.data),
            pointers(sources),
            pointers(scalars) if scalars else None,
            len(sources),
            ctypes.c_size_t(out.size),
            list(DTYPES).index(name),
            OPS.index(op),
        )
        return out

    def convert(self, name: str, direction: str, source: Any) -> Any:
        """`source` through a narrow_float's widen or narrow."""
        widen, narrow = (ctypes.c_void_p * 2).in_dll(self.library, f"narrow_{name}")
        address, dtype = (widen, np.dtype("f4")) if direction == "widen" else (narrow, DTYPES[name])
        out = np.empty(source.shape, dtype)
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(address or 0)
        function(out.ctypes.data, source.ctypes.data, source.size)
        return out


def pointers(arrays: Arrays) -> Any:
    return (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])


@pytest.fixture(scope="module", params=["for this CPU", "for any CPU"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The kernels as they are built here, and as a CPU gets them that has nothing beyond its baseline."""
    path = tmp_path_factory.mktemp("kernels") / "reduce.so"
    flags = [flag for flag in (*build.COMPILE_FLAGS, *build.OPTIMIZE_FLAGS) if "visibility" not in flag]
    plain = ["-DPLAIN_KERNELS"] if request.param == "for any CPU" else []
    files = [str(build.SOURCE_DIR / name) for name in ("reduce.c", "narrow_float.c")]
    command = [*build.compiler(), *flags, "-Werror", *plain, "-shared", *files, "-o", str(path), "-lm"]
    subprocess.run(command, check=True, timeout=100)
    return Kernels(path)


# What is expected


def expected(name: str, op: str, sources: Arrays, scalars: Arrays = ()) -> Any:
    with np.errstate(all="ignore"):
        return (expected_integers if name in INTEGERS else expected_floats)(name, op, sources, scalars)


def expected_integers(name: str, op: str, sources: Arrays, scalars: Arrays) -> Any:
    if op == "premulsum":
        sources = [source * scalar for source, scalar in zip(sources, scalars, strict=True)]
    total = fold(op, sources)
    if op == "avg":
        n = len(sources)
        if n > np.iinfo(total.dtype).max:
            return (total.astype("i8") / n).astype(total.dtype)  # |int8| / n: towards zero
        floor = total // total.dtype.type(n)
        cut_up = (total % total.dtype.type(n) != 0) & (total < 0)
        return floor + cut_up.astype(total.dtype)
    return total


def expected_floats(name: str, op: str, sources: Arrays, scalars: Arrays) -> Any:
    dtype = DTYPES[name]
    wide = np.dtype("f8") if name == "float64" else np.dtype("f4")
    operands = [source.astype(wide) for source in sources]
    if op == "premulsum":
        operands = [x * scalar.astype(wide) for x, scalar in zip(operands, scalars, strict=True)]
    total = fold(op, operands)
    if op == "avg":
        total = total / wide.type(len(sources))
    if name in LARGEST_OF_SATURATING:
        total = np.clip(total, -LARGEST_OF_SATURATING[name], LARGEST_OF_SATURATING[name])
    return total.astype(dtype)


FOLDS: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "avg": np.add,
    "premulsum": np.add,
    "prod": np.multiply,
    "max": np.fmax,
    "min": np.fmin,
}


def fold(op: str, operands: Arrays) -> Any:
    total = operands[0]
    for operand in operands[1:]:
        total = FOLDS[op](total, operand)
    return total


def assert_same_bits(actual: Any, wanted: Any, op: str = "") -> None:
    """Equal to the last bit, but any NaN is as good as another, and either zero may be the larger one."""
    assert actual.dtype == wanted.dtype
    as_bits = np.dtype(f"u{actual.itemsize}")
    same = actual.view(as_bits) == wanted.view(as_bits)
    if actual.dtype not in [DTYPES[name] for name in INTEGERS]:
        with np.errstate(all="ignore"):
            a, w = actual.astype("f8"), wanted.astype("f8")
        same |= np.isnan(a) & np.isnan(w)
        if op in ("max", "min"):
            same |= (a == 0) & (w == 0)
    wrong = np.flatnonzero(~same)
    assert wrong.size == 0, (
        f"{wrong.size} wrong, first at {wrong[:4]}: {actual[wrong[:4]]}, not {wanted[wrong[:4]]}"
    )


# Inputs


def every_value(name: str) -> Any:
    """All bit patterns of an 8- or 16-bit dtype."""
    bits = 8 * DTYPES[name].itemsize
    return np.arange(1 << bits, dtype=f"u{bits // 8}").view(DTYPES[name])


def random_bits(name: str, count: int, seed: int) -> Any:
    size = count * DTYPES[name].itemsize
    return np.random.default_rng(seed).integers(0, 256, size, dtype="u1").view(DTYPES[name])


def small_integers(name: str, count: int, seed: int) -> Any:
    """Values of which few enough sources add up exactly in every dtype."""
    low = 0 if name.startswith("u") else -2
    return np.random.default_rng(seed).integers(low, 3, count).astype(DTYPES[name])


def edges(name: str) -> Any:
    """The values of a float dtype between which things happen."""
    info = ml_dtypes.finfo(DTYPES[name])
    top, tiny, step = float(info.max), float(info.smallest_normal), float(info.smallest_subnormal)
    values = [0.0, 1.0, 3.0, 1 / 3, 1 + float(info.eps), top, top / 2, tiny, tiny - step, step, 3 * step]
    values += [np.inf, np.nan]
    with np.errstate(all="ignore"):
        return np.array(values + [-value for value in values], "f8").astype(DTYPES[name])


# The formats


@pytest.mark.parametrize("name", NARROW)
def test_widening_is_exact_for_every_value(kernels: Kernels, name: str) -> None:
    values = every_value(name)
    assert_same_bits(kernels.convert(name, "widen", values), values.astype("f4"))


@pytest.mark.parametrize("name", NARROW)
def test_narrowing_rounds_to_nearest_even(kernels: Kernels, name: str) -> None:
    """Every upper half of a float32 with lower halves about each place where a format may cut it."""
    about_ties = {0, 0xFFFF}
    for place in range(16):
        about_ties |= {(1 << place) - 1, 1 << place, (1 << place) + 1, 0x10000 - (1 << place)}
    upper = np.arange(1 << 16, dtype="u4") << 16
    for lower in sorted(about_ties):
        values = (upper | np.uint32(lower)).view("f4")
        with np.errstate(all="ignore"):
            largest = LARGEST_OF_SATURATING.get(name, np.inf)
            wanted = np.clip(values, -largest, largest).astype(DTYPES[name])
        assert_same_bits(kernels.convert(name, "narrow", values), wanted)


# Every pair of values, or as many as are feasible


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["int8", "uint8", "float8e4m3", "float8e5m2"])
def test_every_pair_of_8_bit_values(kernels: Kernels, name: str, op: str) -> None:
    values = every_value(name)
    pair = [np.repeat(values, 256), np.tile(values, 256)]
    for factors in (1, 3), (2, 0.5), (0.25, 7):
        scalars = [np.array([factor]).astype(DTYPES[name]) for factor in factors] if op == "premulsum" else []
        assert_same_bits(kernels.reduce(name, op, pair, scalars), expected(name, op, pair, scalars), op)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_16_bit_float_with_each_edge_of_its_format(kernels: Kernels, name: str, op: str) -> None:
    values = every_value(name)
    scalars = [np.array([factor]).astype(DTYPES[name]) for factor in (0.5, 3)] if op == "premulsum" else []
    for edge in edges(name):
        pair = [values, np.full_like(values, edge)]
        assert_same_bits(kernels.reduce(name, op, pair, scalars), expected(name, op, pair, scalars), op)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", DTYPES)
def test_random_bits_of_3_sources(kernels: Kernels, name: str, op: str) -> None:
    sources = [random_bits(name, 100_003, seed) for seed in range(3)]
    scalars = [random_bits(name, 1, seed) for seed in (7, 8, 9)] if op == "premulsum" else []
    assert_same_bits(kernels.reduce(name, op, sources, scalars), expected(name, op, sources, scalars), op)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_every_pair_of_edges_of_the_wide_floats(kernels: Kernels, name: str, op: str) -> None:
    values = edges(name)
    pair = [np.repeat(values, values.size), np.tile(values, values.size)]
    scalars = [np.array([factor], DTYPES[name]) for factor in (0.5, -3)] if op == "premulsum" else []
    assert_same_bits(kernels.reduce(name, op, pair, scalars), expected(name, op, pair, scalars), op)


# How a block is cut, and where it lies


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", DTYPES)
def test_any_number_of_sources_and_elements(kernels: Kernels, name: str, op: str) -> None:
    for nsrc in (1, 2, 3, 4, 5, 6, 8, 9):
        for count in (1, 7, 63, 2049, 10_000):
            sources = [small_integers(name, count, seed) for seed in range(nsrc)]
            scalars = (
                [small_integers(name, 1, seed + 50) for seed in range(nsrc)] if op == "premulsum" else []
            )
            actual = kernels.reduce(name, op, sources, scalars)
            assert_same_bits(actual, expected(name, op, sources, scalars), op)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", DTYPES)
def test_in_place_in_any_source_equals_out_of_place(kernels: Kernels, name: str, op: str) -> None:
    for nsrc in (1, 2, 3, 5):
        sources = [random_bits(name, 9_001, seed) for seed in range(nsrc)]
        scalars = [random_bits(name, 1, seed + 50) for seed in range(nsrc)] if op == "premulsum" else []
        wanted = kernels.reduce(name, op, sources, scalars)
        for k in range(nsrc):
            again = [source.copy() for source in sources]
            kernels.reduce(name, op, again, scalars, out=again[k])
            assert again[k].tobytes() == wanted.tobytes()
            for other in set(range(nsrc)) - {k}:
                assert again[other].tobytes() == sources[other].tobytes()


@pytest.mark.parametrize("name", DTYPES)
def test_pointers_aligned_to_the_element_only_and_nothing_beyond_the_block(
    kernels: Kernels, name: str
) -> None:
    count = 1_003
    for nsrc in (2, 3):
        for shift in (1, 3, 5):
            room = [small_integers(name, count + 16, seed) for seed in range(nsrc)]
            sources = [array[shift + k : shift + k + count] for k, array in enumerate(room)]
            around = random_bits(name, count + 16, 99)
            out = around.copy()
            kernels.reduce(name, "sum", sources, out=out[shift : shift + count])
            assert_same_bits(out[shift : shift + count].copy(), expected(name, "sum", sources))
            assert out[:shift].tobytes() == around[:shift].tobytes()
            assert out[shift + count :].tobytes() == around[shift + count :].tobytes()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", DTYPES)
def test_the_bits_do_not_depend_on_how_a_buffer_is_cut(kernels: Kernels, name: str, op: str) -> None:
    sources = [random_bits(name, 7_001, seed) for seed in range(4)]
    scalars = [random_bits(name, 1, seed + 50) for seed in range(4)] if op == "premulsum" else []
    whole, pieces = kernels.reduce(name, op, sources, scalars), np.empty_like(sources[0])
    for start, stop in ((0, 3), (3, 2_000), (2_000, 2_001), (2_001, 7_001)):
        parts = [source[start:stop] for source in sources]
        kernels.reduce(name, op, parts, scalars, out=pieces[start:stop])
    assert_same_bits(pieces, whole)


@pytest.mark.parametrize("op", ["sum", "prod", "avg"])
@pytest.mark.parametrize("name", [name for name in DTYPES if name not in INTEGERS])
def test_a_lone_nan_gives_the_same_bits_wherever_it_lies(kernels: Kernels, name: str, op: str) -> None:
    """The ends of a block are computed one element at a time, the rest in vectors."""
    bits = np.dtype(f"u{DTYPES[name].itemsize}")
    payload = np.array([np.nan]).astype(DTYPES[name]).view(bits) | bits.type(2 if bits.itemsize > 1 else 0)
    nans, ones = np.repeat(payload, 37).view(DTYPES[name]), np.ones(37).astype(DTYPES[name])
    for nsrc in (2, 3):
        result = kernels.reduce(name, op, [ones, nans, ones][:nsrc]).view(bits)
        assert set(result.tolist()) == {int(result[0])}


def test_no_elements_touch_nothing(kernels: Kernels) -> None:
    out = np.array([1.5], "f4")
    kernels.library.reduce_block(
        ctypes.c_void_p(out.ctypes.data), pointers([out, out]), None, 2, ctypes.c_size_t(0), 7, 0
    )
    assert out[0] == 1.5


def test_a_single_source_is_copied_bit_for_bit(kernels: Kernels) -> None:
    for name in DTYPES:
        source = random_bits(name, 5_000, 3)
        for op in OPS[:-1]:
            assert kernels.reduce(name, op, [source]).tobytes() == source.tobytes()


# What the numbers must be, said without a reference


def test_integer_sums_and_products_wrap(kernels: Kernels) -> None:
    top = np.array([127], "i1")
    assert kernels.reduce("int8", "sum", [top, top])[0] == -2
    assert kernels.reduce("int8", "prod", [top, top])[0] == 1
    big = np.array([2**63], "u8")
    assert kernels.reduce("uint64", "sum", [big, big, np.array([5], "u8")])[0] == 5


def test_integer_averages_cut_towards_zero_after_the_sum_has_wrapped(kernels: Kernels) -> None:
    minus_seven = [np.array([x], "i4") for x in (-3, -4)]
    assert kernels.reduce("int32", "avg", minus_seven)[0] == -3
    assert kernels.reduce("int8", "avg", [np.array([100], "i1")] * 2)[0] == -28  # 200 - 256 = -56


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_averages_are_exact_at_the_ends_for_every_number_of_sources(
    kernels: Kernels, name: str
) -> None:
    info = np.iinfo(DTYPES[name])
    ends = [info.min, info.min + 1, info.max - 1, info.max, info.max // 2, info.max // 3 * 2]
    first = np.array(ends + [info.max - k for k in range(300) if k < info.max], DTYPES[name])
    for nsrc in (2, 3, 5, 7, 64, 100, 255, 256):
        sources = [first] + [np.zeros_like(first)] * (nsrc - 1)
        quotients = [abs(int(x)) // nsrc * (-1 if x < 0 else 1) for x in first]
        assert kernels.reduce(name, "avg", sources).tolist() == quotients


def test_floats_accumulate_in_the_order_of_the_sources(kernels: Kernels) -> None:
    parts = [np.array([x], "f4") for x in (1e8, 1.0, -1e8)]
    assert kernels.reduce("float32", "sum", parts)[0] == 0.0
    assert kernels.reduce("float32", "sum", [parts[0], parts[2], parts[1]])[0] == 1.0


@pytest.mark.parametrize(("name", "big"), [("float16", 2048), ("bfloat16", 256), ("float8e4m3", 16)])
def test_narrow_floats_are_rounded_once_after_all_sources(kernels: Kernels, name: str, big: int) -> None:
    """big + 1 alone would round back to big."""
    parts = [np.array([x]).astype(DTYPES[name]) for x in (big, 1, 1)]
    assert float(kernels.reduce(name, "sum", parts)[0]) == big + 2
    assert float(kernels.reduce(name, "sum", parts[:2])[0]) == big


@pytest.mark.parametrize("name", LARGEST_OF_SATURATING)
def test_fp8_saturates_and_16_bits_overflow_to_infinity(kernels: Kernels, name: str) -> None:
    largest = np.array([LARGEST_OF_SATURATING[name]]).astype(DTYPES[name])
    assert kernels.reduce(name, "sum", [largest, largest])[0] == largest[0]
    assert kernels.reduce(name, "prod", [largest, -largest])[0] == -largest[0]
    assert np.isinf(kernels.reduce("float16", "sum", [np.array([65504], "f2")] * 2)[0])


@pytest.mark.parametrize("name", [name for name in DTYPES if name not in INTEGERS])
def test_max_and_min_ignore_a_nan_unless_all_are(kernels: Kernels, name: str) -> None:
    nan, two, one = (np.array([x]).astype(DTYPES[name]) for x in (np.nan, 2, 1))
    for order in ([nan, two, one], [two, nan, one], [two, one, nan]):
        assert float(kernels.reduce(name, "max", order)[0]) == 2
        assert float(kernels.reduce(name, "min", order)[0]) == 1
    assert np.isnan(kernels.reduce(name, "max", [nan, nan, nan]).astype("f4")[0])
    assert np.isnan(kernels.reduce(name, "sum", [two, nan]).astype("f4")[0])


def test_names_and_sizes_are_those_of_the_dtypes(kernels: Kernels) -> None:
    library = kernels.library
    assert [library.dtype_name(k).decode() for k in range(12)] == list(DTYPES)
    assert [library.dtype_size(k) for k in range(12)] == [dtype.itemsize for dtype in DTYPES.values()]
    assert [library.redop_name(k).decode() for k in range(6)] == list(OPS)
    for outside in (-1, 12):
        assert library.dtype_size(outside) == 0
        assert library.dtype_name(outside) == library.redop_name(outside) == b"?"


def test_an_unknown_dtype_aborts_instead_of_computing(kernels: Kernels) -> None:
    program = (
        f"import ctypes; ctypes.CDLL({kernels.library._name!r}).reduce_block(None, None, None, 1, 0, 12, 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == -6
    assert "dtype 12" in done.stderr

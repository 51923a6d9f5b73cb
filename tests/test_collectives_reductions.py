"""Reductions that NCCL lacks, on ranks: right, the same on all of them, and refused by name."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pynccl.abi.errors import InvalidArgumentError
from pynccl.collectives import generate
from pynccl.collectives.reductions import (
    ADASUM,
    MOMENTS,
    TAKES,
    Operation,
    adasum,
    all_reduce,
    arg_max,
    arg_min,
    merge_moments,
    moments,
    reduce_scatter,
)
from pynccl.testing import run_ranks


def ranks(n: int, fn: Any, *args: Any) -> list[Any]:
    return run_ranks(n, fn, *args, processes=False, library="host", timeout=60)


def data(rank: int, size: int, dtype: str) -> np.ndarray:
    random = np.random.default_rng(rank)
    if dtype.startswith("complex"):
        return (random.integers(-2, 3, size) + 1j * random.integers(-2, 3, size)).astype(dtype)
    return random.integers(1, 100, size).astype(dtype)


@pytest.mark.parametrize("n", [1, 3, 4])
@pytest.mark.parametrize("size", [0, 1, 7, 20001])
@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (np.bitwise_and, "int32"),
        (np.bitwise_or, "uint8"),
        (np.bitwise_xor, "int64"),
        (np.add, "complex64"),
        (np.multiply, "complex128"),
        (np.gcd, "int64"),
    ],
)
def test_any_ufunc_reduces(n: int, size: int, op: np.ufunc, dtype: str):
    expected = functools.reduce(op, [data(rank, size, dtype) for rank in range(n)])
    for found in ranks(n, lambda comm: all_reduce(comm, data(comm.rank, size, dtype), op)):
        np.testing.assert_array_equal(found, expected)


def test_logaddexp_by_the_communicators_own_method():
    expected = np.log(sum(np.exp(data(rank, 9, "float64")) for rank in range(3)))
    found = ranks(
        3, lambda c: c.all_reduce(data(c.rank, 9, "float64"), op=np.logaddexp, algorithm="pynccl:ring")
    )
    for each in found:
        np.testing.assert_allclose(each, expected, rtol=1e-14)
        np.testing.assert_array_equal(each, found[0])


def test_reduce_scatter_of_a_ufunc():
    expected = functools.reduce(np.bitwise_xor, [data(rank, 12, "int32") for rank in range(3)])
    found = ranks(3, lambda c: reduce_scatter(c, data(c.rank, 12, "int32"), np.bitwise_xor))
    np.testing.assert_array_equal(np.concatenate(found), expected)


def after(f: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Maps x -> s x + t, as s + ti: f after g, which is not g after f."""
    return f.real * g.real + 1j * (f.real * g.imag + f.imag)


AFTER = Operation(after, commutative=False)


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("algorithm", [None, "direct", "one_shot", "recursive_doubling", "binomial"])
@pytest.mark.parametrize("size", [5, 6000])
def test_an_operation_that_does_not_commute_gets_rank_order(n: int, algorithm: Any, size: int):
    expected = functools.reduce(after, [data(rank, size, "complex128") for rank in range(n)])
    for found in ranks(
        n, lambda c: all_reduce(c, data(c.rank, size, "complex128"), AFTER, algorithm=algorithm)
    ):
        np.testing.assert_array_equal(found, expected)


def test_reduce_scatter_in_rank_order():
    expected = functools.reduce(after, [data(rank, 8, "complex128") for rank in range(4)])
    found = ranks(4, lambda c: reduce_scatter(c, data(c.rank, 8, "complex128"), AFTER))
    np.testing.assert_array_equal(np.concatenate(found), expected)


@pytest.mark.parametrize(
    ("op", "algorithm", "words"),
    [
        (AFTER, "ring", "does not commute.*use one that does: .*direct"),
        (AFTER, "pynccl:ring", "does not commute"),
        (ADASUM, "ring", "adasum looks at whole arrays and 'ring' cuts them into 3 chunks"),
        (np.add, "rong", "no algorithm 'rong'"),
    ],
)
def test_an_algorithm_that_does_not_fit_is_refused_before_anything_is_sent(
    op: Any, algorithm: str, words: str
):
    def one(comm: Any) -> None:
        with pytest.raises(InvalidArgumentError, match=words):
            all_reduce(comm, np.ones(6, "complex128"), op, algorithm=algorithm)
        named = f"pynccl:{algorithm.removeprefix('pynccl:')}"
        with pytest.raises(InvalidArgumentError, match=words):
            comm.all_reduce(np.ones(6, "complex128"), op=op, algorithm=named)
        assert comm.all_reduce(np.ones(1, "complex128"), op=AFTER, algorithm="pynccl:direct") == 1
        x = comm.all_reduce(np.full(4, 2.0), op=ADASUM, algorithm="pynccl:recursive_doubling")
        assert x.tolist() == [2.0] * 4
        np.testing.assert_array_equal(comm.all_reduce(np.ones(2)), [3, 3])

    ranks(3, one)


def test_what_is_no_operation_is_refused():
    def one(comm: Any) -> None:
        with pytest.raises(TypeError, match="'sum' is no function.*comm.all_reduce"):
            all_reduce(comm, np.ones(2), "sum")
        with pytest.raises(TypeError, match="3 is no function"):
            all_reduce(comm, np.ones(2), 3)
        with pytest.raises(InvalidArgumentError, match="adasum looks at whole arrays.*blocks"):
            reduce_scatter(comm, np.ones(2), ADASUM)
        with pytest.raises(InvalidArgumentError, match="is one of all_gather"):
            all_reduce(comm, np.ones(2), np.add, algorithm=generate("ring", 2, collective="all_gather"))
        with pytest.raises(InvalidArgumentError, match="does not work on float64"):
            all_reduce(comm, np.ones(2), np.bitwise_and)

    ranks(2, one)


def test_adasum_adds_what_is_orthogonal_and_averages_what_is_equal():
    a, b = np.array([2.0, 0, 0, 0], "f4"), np.array([0, 0, 4.0, 0], "f4")
    np.testing.assert_array_equal(adasum(a, b), a + b)
    np.testing.assert_array_equal(adasum(a, a), a)
    np.testing.assert_array_equal(adasum(a, np.zeros_like(a)), a)
    np.testing.assert_array_equal(adasum(np.zeros_like(a), np.zeros_like(a)), np.zeros_like(a))
    np.testing.assert_array_equal(adasum(a, -a), np.zeros_like(a))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_adasum_of_orthogonal_gradients_is_their_sum_on_any_number_of_ranks(n: int):
    found = ranks(n, lambda c: all_reduce(c, np.eye(n, 40, dtype="f4")[c.rank] * 8, ADASUM))
    for each in found:
        np.testing.assert_array_equal(each, np.eye(n, 40, dtype="f4").sum(axis=0) * 8)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_adasum_gives_every_rank_the_same_bits_in_the_order_of_a_tree(n: int):
    found = ranks(n, lambda c: all_reduce(c, np.random.default_rng(c.rank).normal(size=999), ADASUM))
    for each in found[1:]:
        np.testing.assert_array_equal(each, found[0])
    if n == 4:
        a, b, c, d = (np.random.default_rng(rank).normal(size=999) for rank in range(4))
        np.testing.assert_array_equal(found[0], adasum(adasum(a, b), adasum(c, d)))


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_moments_are_those_of_all_samples(n: int):
    samples = [np.random.default_rng(rank).normal(1e8, 1, (10 * rank, 2, 3)) for rank in range(n)]
    everything = np.concatenate(samples)
    for count, mean, variance in ranks(n, lambda c: moments(c, samples[c.rank])):
        assert count == len(everything)
        if count == 0:
            assert mean.shape == (2, 3) and np.isnan(mean).all() and np.isnan(variance).all()
            continue
        np.testing.assert_allclose(mean, everything.mean(axis=0), rtol=1e-15)
        np.testing.assert_allclose(variance, everything.var(axis=0), rtol=1e-6)


def test_moments_of_no_features_still_count():
    assert [found.samples for found in ranks(2, lambda c: moments(c, np.zeros((3, 0))))] == [6, 6]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8", "float16"])
def test_arg_max_and_arg_min_find_value_and_rank_and_ties_go_to_the_lowest(n: int, dtype: str):
    rows = np.array([np.random.default_rng(rank).integers(0, 4, 50) for rank in range(n)]).astype(dtype)
    for largest, where, smallest, there in ranks(
        n, lambda c: (*arg_max(c, rows[c.rank]), *arg_min(c, rows[c.rank]))
    ):
        np.testing.assert_array_equal(largest, rows.max(axis=0))
        np.testing.assert_array_equal(where, rows.argmax(axis=0))
        np.testing.assert_array_equal(smallest, rows.min(axis=0))
        np.testing.assert_array_equal(there, rows.argmin(axis=0))
        assert largest.dtype == dtype and where.dtype == np.int64


def test_arg_max_passes_over_nan_and_takes_indices():
    rows = np.array([[np.nan, np.nan, 1], [2, np.nan, -np.inf], [np.nan, np.nan, 1]])
    index = np.array([[7, 8, 9], [4, 5, 6], [1, 2, 3]])
    for value, where in ranks(3, lambda c: arg_max(c, rows[c.rank], index[c.rank])):
        np.testing.assert_array_equal(value, [2, np.nan, 1])
        np.testing.assert_array_equal(where, [4, 2, 3])


def test_arg_max_refuses_what_has_no_order():
    def one(comm: Any) -> None:
        with pytest.raises(InvalidArgumentError, match="x is complex64; it takes .*numbers have no order"):
            arg_max(comm, np.ones(2, "complex64"))
        with pytest.raises(InvalidArgumentError, match="x is uint64; it takes .*cast x to float64 or int64"):
            arg_min(comm, np.ones(2, "uint64"))
        for index in (np.ones(3, int), np.ones(2), np.ones(2, "uint64"), np.ones(2, bool)):
            with pytest.raises(
                InvalidArgumentError, match="not uint64. of x's shape .2,., in an array of nu"
            ):
                arg_max(comm, np.ones(2), index)
        with pytest.raises(InvalidArgumentError, match="index is bytearray .uint8, shape .2,.."):
            arg_max(comm, np.ones(2), bytearray(2))
        value, where = arg_max(comm, np.ones(2), np.array([5, 6]).view(type("Mine", (np.ndarray,), {})))
        assert value.tolist() == [1, 1] and where.tolist() == [5, 6]
        with pytest.raises(TypeError, match="arg_max: index must be an array .*not list"):
            arg_max(comm, np.ones(2), [1, 2])

    ranks(1, one)


# --- every operation with every dtype -----------------------------------------------------------------------

DTYPES: tuple[np.dtype, ...] = tuple(
    np.dtype(each)
    for each in (
        *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
        *("float16", "float32", "float64", "longdouble", "complex64", "complex128", "clongdouble"),
        *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
        *(ml_dtypes.float8_e4m3b11fnuz, ml_dtypes.int4, ">f8", "<M8[s]", "<m8[s]", "U3", "S3", "V4"),
        *([("a", "f4"), ("b", "i4")], "O"),
    )
)


def orthogonal(rank: int, dtype: np.dtype) -> np.ndarray:
    """Vectors of 6 elements of which at most one is not 0."""
    x = np.zeros(6, dtype)
    if dtype.kind in "biufcV" and dtype.names is None and dtype != "V4":
        x[rank] = 1
    return x


def both(dtype: np.dtype) -> np.ndarray:
    return np.stack([orthogonal(rank, dtype) for rank in range(2)])


def assert_moments(found: Any, dtype: np.dtype) -> None:
    wide = both(dtype).astype("f8")
    assert found.samples == 2
    np.testing.assert_array_equal(found.mean, wide.mean(axis=0))
    np.testing.assert_array_equal(found.variance, wide.var(axis=0))


def assert_extreme(found: Any, dtype: np.dtype, extreme: Any, where: Any) -> None:
    value, rank = found
    wide = both(dtype).astype("f8")
    assert value.dtype == dtype and rank.dtype == np.int64
    np.testing.assert_array_equal(value.astype("f8"), extreme(wide, axis=0))
    np.testing.assert_array_equal(rank, where(wide, axis=0))


def assert_sum(found: Any, dtype: np.dtype) -> None:
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, both(dtype).astype("f8").sum(axis=0).astype(dtype))


def by_method(op: Any) -> Any:
    return lambda comm, x: comm.all_reduce(x, op=op, algorithm="pynccl:recursive_doubling")


def states(comm: Any, x: np.ndarray) -> np.ndarray:
    """A sample of 1 and one of 3 merged: two, their mean, the square sum."""
    if x.dtype == np.float64:
        x[:] = [1, 1, comm.rank * 2 + 1, comm.rank * 2 + 1, 0, 0]
    return all_reduce(comm, x, MOMENTS)


NAMED: tuple[tuple[str, Any, Any], ...] = (
    ("adasum", lambda comm, x: all_reduce(comm, x, ADASUM), assert_sum),
    ("adasum", lambda comm, x: all_reduce(comm, x, adasum), assert_sum),
    ("adasum", by_method(ADASUM), assert_sum),
    ("adasum", by_method(adasum), assert_sum),
    (
        "adasum",
        lambda comm, x: comm.prepare("all_reduce", x, op=ADASUM, algorithm="pynccl:one_shot")(),
        assert_sum,
    ),
    ("moments", lambda comm, x: moments(comm, x[None]), assert_moments),
    (
        "merge_moments",
        states,
        lambda found, dtype: np.testing.assert_array_equal(found, [2, 2, 2, 2, 2, 2]),
    ),
    ("arg_max", arg_max, lambda found, dtype: assert_extreme(found, dtype, np.max, np.argmax)),
    ("arg_min", arg_min, lambda found, dtype: assert_extreme(found, dtype, np.min, np.argmin)),
)


@pytest.mark.parametrize(
    ("name", "reduce", "check"), NAMED, ids=[f"{i}-{row[0]}" for i, row in enumerate(NAMED)]
)
def test_a_named_operation_is_right_or_refuses_the_dtype_before_a_message(name: str, reduce: Any, check: Any):
    def one(comm: Any) -> list[str]:
        taken = []
        for dtype in DTYPES:
            x = orthogonal(comm.rank, dtype)
            if dtype.isnative and dtype.name in TAKES[name][0]:
                check(reduce(comm, x), dtype)
                taken.append(dtype.name)
            elif comm.rank == 0:  # alone: had it sent anything, it would wait
                with pytest.raises((InvalidArgumentError, TypeError)) as caught:
                    reduce(comm, x)
                if dtype.kind != "O":
                    assert TAKES[name][1] in str(caught.value)
            comm.barrier()
        return taken

    for taken in ranks(2, one):
        assert set(taken) == TAKES[name][0]


def test_every_row_of_the_table_is_of_an_operation_that_is_tested():
    assert {row[0] for row in NAMED} == set(TAKES) - {"better_pairs"}  # which arg_max and arg_min are made of


UFUNCS = (np.add, np.multiply, np.maximum, np.bitwise_xor, np.logical_or, np.logaddexp, np.hypot, np.gcd)


@pytest.mark.parametrize("ufunc", UFUNCS, ids=lambda ufunc: ufunc.__name__)
def test_a_ufunc_gives_what_numpy_gives_or_is_refused_before_a_message(ufunc: np.ufunc):
    def in_numpy(a: np.ndarray, b: np.ndarray) -> np.ndarray | None:
        if a.dtype.hasobject:
            return None  # which is no memory to be sent
        try:
            return ufunc(a, b, out=np.empty_like(a))
        except (TypeError, ValueError, NotImplementedError):
            return None

    def one(comm: Any) -> int:
        taken = 0
        for dtype in DTYPES:
            wanted = in_numpy(orthogonal(0, dtype), orthogonal(1, dtype))
            x = orthogonal(comm.rank, dtype)
            if wanted is not None:
                found = all_reduce(comm, x, ufunc)
                assert found.dtype == dtype
                np.testing.assert_array_equal(found, wanted)
                taken += 1
            elif comm.rank == 0:
                with pytest.raises((InvalidArgumentError, TypeError), match="all_reduce"):
                    all_reduce(comm, x, ufunc)
            comm.barrier()
        return taken

    assert min(ranks(2, one)) >= 5


def test_what_is_no_array_of_numpy_is_refused_in_words():
    masked = np.ma.masked_array([1.0, 2.0], mask=[True, False])

    def one(comm: Any) -> None:
        for call in (moments, arg_max, arg_min, lambda comm, x: adasum(x, x)):
            for x, words in (
                ([1.0], "must be an array .*not list"),
                (masked, "is a masked array and its mask would be ignored"),
                (b"12345678", "is bytes, and what computes with it are NumPy and CuPy"),
                (np.float64(1), "is a NumPy scalar"),
            ):
                with pytest.raises(TypeError, match=f"(moments|arg_max|arg_min|adasum): (x|a) {words}"):
                    call(comm, x)

    ranks(1, one)


def test_two_different_gradients_or_states_are_refused():
    with pytest.raises(
        InvalidArgumentError, match=r"a is float32, shape \(2,\), and b float64, shape \(2,\)"
    ):
        adasum(np.ones(2, "f4"), np.ones(2))
    with pytest.raises(InvalidArgumentError, match="a is int64; it takes .*cast integers to float32"):
        adasum(np.ones(2, int), np.ones(2, int))

    def one(comm: Any) -> None:
        for op in (MOMENTS, merge_moments):
            with pytest.raises(InvalidArgumentError, match="4 elements are not 3 rows of equal length"):
                all_reduce(comm, np.ones(4), op)
        comm.barrier()

    ranks(2, one)


def test_an_operation_of_ones_own_names_the_dtypes_that_it_takes():
    distance = Operation(np.hypot, dtypes=frozenset({"float64"}))

    def one(comm: Any) -> None:
        with pytest.raises(InvalidArgumentError, match="x is float32 and hypot takes float64; cast x"):
            all_reduce(comm, np.ones(2, "f4"), distance)
        assert all_reduce(comm, np.array([3.0, 4.0][comm.rank :][:1]), distance) == 5

    ranks(2, one)
    assert repr(distance) == "<Operation hypot>"

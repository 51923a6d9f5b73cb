"""Reductions that NCCL lacks, on ranks: right, the same on all of them, and refused by name."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from pynccl.abi.errors import InvalidArgumentError
from pynccl.collectives import generate
from pynccl.collectives.reductions import (
    ADASUM,
    Operation,
    adasum,
    all_reduce,
    arg_max,
    arg_min,
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
        with pytest.raises(InvalidArgumentError, match="no order is known of complex64"):
            arg_max(comm, np.ones(2, "complex64"))
        with pytest.raises(InvalidArgumentError, match="no order is known of uint64"):
            arg_min(comm, np.ones(2, "uint64"))
        with pytest.raises(InvalidArgumentError, match="integers of x's shape"):
            arg_max(comm, np.ones(2), np.ones(3, int))

    ranks(1, one)

"""The inputs of the checks are exact in every order, so one wrong bit is a wrong element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from bench.check import DTYPE, count_wrong, expected, inputs, premul_scalar, tolerance
from bench.options import DTYPES, OPS

COUNT = 3001
COMBINE: dict[str, Callable[..., Any]] = {"prod": np.multiply, "max": np.maximum, "min": np.minimum}


def reduce_in(order: Sequence[int], op: str, dtype: str, ranks: int, seed: int = 7) -> Any:
    """What a library gets that combines in this order and rounds to the type after each step."""
    kind = DTYPE[dtype]
    wide = kind if kind.kind in "iu" else np.dtype("f8" if kind.itemsize == 8 else "f4")
    total = None
    for rank in order:
        x = inputs(op, dtype, rank, ranks, seed, COUNT).astype(wide)
        if op == "mulsum":
            x = (x * wide.type(premul_scalar(rank))).astype(kind).astype(wide)
        elif op == "avg" and kind.kind not in "iu":
            x = (x * wide.type(1 / ranks)).astype(kind).astype(wide)
        total = x if total is None else COMBINE.get(op, np.add)(total, x).astype(kind).astype(wide)
    assert total is not None
    if op == "avg" and kind.kind in "iu":
        total = (
            np.fix(total.astype(object) / ranks)
            if kind.itemsize < 8
            else np.array([_towards_zero(v, ranks) for v in total.tolist()], kind)
        )
    return total.astype(kind)


def _towards_zero(value: int, by: int) -> int:
    return abs(value) // by * (1 if value >= 0 else -1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 17])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_every_order_gives_the_expected_bits(op: str, dtype: str, ranks: int):
    want = expected(op, dtype, ranks, 7, COUNT)
    assert want.dtype == DTYPE[dtype] and want.size == COUNT
    forwards = list(range(ranks))
    shuffled = np.random.default_rng(ranks).permutation(ranks).tolist()
    for order in (forwards, forwards[::-1], shuffled):
        assert count_wrong(reduce_in(order, op, dtype, ranks), want, tolerance(op, dtype)) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_inputs_are_finite_and_of_many_kinds(op: str, dtype: str):
    x = inputs(op, dtype, 0, 4, 1, COUNT)
    y = expected(op, dtype, 4, 1, COUNT)
    assert np.isfinite(x.astype("f8")).all() and np.isfinite(y.astype("f8")).all()
    assert len(np.unique(x.view(f"u{x.itemsize}"))) >= (3 if x.itemsize == 1 else 20)


@pytest.mark.parametrize("op", ["sum", "prod", "max", "mulsum"])
def test_a_missing_rank_is_seen(op: str):
    want = expected(op, "float", 3, 7, COUNT)
    assert count_wrong(reduce_in([0, 1], op, "float", 3), want) > COUNT // 10


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_misplaced_block_is_seen(ranks: int):
    want = expected("sum", "float", ranks, 7, 1 << 17)
    for shift in (1, 1024, 1 << 15, 1 << 16):
        assert count_wrong(np.roll(want, shift), want) > 0.9 * want.size


def test_seeds_and_ranks_give_other_inputs():
    one = inputs("sum", "float", 0, 2, 1, COUNT)
    assert count_wrong(inputs("sum", "float", 0, 2, 2, COUNT), one) > COUNT // 2
    assert count_wrong(inputs("sum", "float", 1, 2, 1, COUNT), one) > COUNT // 2
    assert (
        count_wrong(inputs("copy", "int8", 1, 2, 1, COUNT), inputs("copy", "int8", 0, 2, 1, COUNT))
        > COUNT // 2
    )


def test_a_longer_array_begins_with_the_shorter_one():
    long = inputs("sum", "float", 1, 3, 5, 100_000)
    assert count_wrong(inputs("sum", "float", 1, 3, 5, 40_000), long[:40_000]) == 0


def test_wrong_elements_are_counted_by_bits():
    want = np.array([1.0, -0.0, np.nan, 3.0], "f4")
    got = np.array([np.nextafter(np.float32(1), np.float32(2)), 0.0, np.nan, 3.0], "f4")
    assert count_wrong(got, want) == 2
    assert count_wrong(got, want, allowed=1) == 1


def test_only_averages_of_floats_have_a_tolerance():
    allowed = {(op, dtype): tolerance(op, dtype) for op in OPS for dtype in DTYPES}
    floats = DTYPES[6:]
    assert {pair for pair, units in allowed.items() if units} == {("avg", dtype) for dtype in floats}
    assert {allowed["avg", dtype] for dtype in floats} == {2}

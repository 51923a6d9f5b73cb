"""What communicators refuse: the error names the argument, and the communicator goes on."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import pynccl


@pytest.mark.parametrize("op", [["sum"], None, 0, {}])
def test_what_is_no_reduction_is_refused(alone: pynccl.Communicator, op: Any) -> None:
    with pytest.raises(TypeError, match="all_reduce: op must be a name such as 'sum'"):
        alone.all_reduce(np.ones(2), op=op)


@pytest.mark.parametrize(
    ("scalar", "dtype", "match"),
    [
        (0.5, "int32", "not a whole number"),
        (2**40, "int32", "not a whole number that fits"),
        ([1, 2], "float32", "one real number"),
        ("2", "float32", "premul_sum: scalar='2' must be one real number"),
        (None, "float32", "premul_sum: scalar=None must be one real number"),
        (np.datetime64(1, "s"), "float32", "one real number"),
        (10**400, "float64", "one real number that fits float64"),
        (10**400, "int64", "one real number that fits int64"),
        (float("nan"), "int32", "not a whole number"),
        (1e30, "float16", r"scalar=1e\+30 is too large for float16"),
        (1e39, "float32", "too large"),
        (1e39, "bfloat16", "too large"),
        (1e4, "float8_e4m3fn", "too large"),
        (1j, "complex64", "one real number"),
        (1, "bool", "cannot be summed"),
        (1, "int16", "cannot be summed"),
    ],
)
def test_a_factor_that_the_dtype_cannot_hold_is_refused(
    alone: pynccl.Communicator, scalar: Any, dtype: str, match: str
) -> None:
    with pytest.raises(pynccl.InvalidArgumentError, match=match):
        alone.premul_sum(scalar, dtype)


@pytest.mark.parametrize(
    ("op", "remedy"),
    [("mean", "use 'avg'"), ("Product", "use 'prod'"), ("SUM", "use 'sum'"), ("xor", "use one of sum, prod")],
)
def test_a_reduction_by_another_name_is_an_error_with_the_right_one(
    alone: pynccl.Communicator, op: str, remedy: str
) -> None:
    with pytest.raises(pynccl.InvalidArgumentError, match=f"all_reduce: op='{op}' is not .*; {remedy}"):
        alone.all_reduce(np.ones(2), op=op)


def test_wrong_windows_offsets_and_counts_are_refused(alone: pynccl.Communicator) -> None:
    x = alone.empty(8, "f4")
    with alone.register_window(x) as window:
        for offset in (-1, 8 * 4 - 3, 8 * 4):
            with pytest.raises(pynccl.InvalidArgumentError, match="do not fit a window of 32 bytes"):
                alone.put(np.ones(1, "f4"), 0, window, offset)
        with pytest.raises(pynccl.InvalidArgumentError, match=r"put: x is float64 .* float32.*x\.view"):
            alone.put(np.ones(1), 0, window)
        alone.put(np.full(1, 7.0, "f4").view("u1"), 0, window)
        assert x[0] == 7
        with pytest.raises(TypeError, match="must be a Window"):
            alone.put(x, 0, x)
        with pytest.raises(pynccl.InvalidArgumentError, match="count=0"):
            alone.wait_signal(0, 0)
        with pytest.raises(pynccl.InvalidArgumentError, match="at least one rank"):
            alone.wait_signal([])
    with pytest.raises(pynccl.InvalidUsageError, match="has ended"):
        alone.put(np.ones(1, "f4"), 0, window)
    with pytest.raises(pynccl.InvalidArgumentError, match="comm.empty"):
        alone.register_window(alone.empty(9, "u1")[1:])


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda comm: comm.send(np.ones(1), "x"), "send: peer must be an integer, not str"),
        (lambda comm: comm.recv(np.ones(1), 1.5), "recv: peer must be an integer, not float"),
        (lambda comm: comm.broadcast(np.ones(1), None), "broadcast: root must be an integer, not NoneType"),
        (lambda comm: comm.split("red"), "split: color must be an integer, not str"),
        (lambda comm: comm.split(0, "first"), "split: key must be an integer, not str"),
        (lambda comm: comm.grow("more"), "grow: nranks must be an integer, not str"),
        (lambda comm: comm.signal(0, signal=None), "signal: signal must be an integer, not NoneType"),
        (lambda comm: comm.wait_signal({0: "all"}), "wait_signal: count must be an integer, not str"),
        (lambda comm: comm.empty("wide"), "empty: each axis of shape must be an integer, not str"),
        (lambda comm: comm.empty(3, "float31"), "empty: dtype='float31' is no dtype"),
        (lambda comm: comm.empty(3, "O"), "empty: dtype='O' is of Python objects"),
        (lambda comm: comm.empty(3, [("a", "i4"), ("b", "O")]), "empty: dtype=.* is of Python objects"),
        (lambda comm: comm.register_window(comm.empty(1), flags="fast"), "flags must be an integer, not str"),
        (lambda comm: comm.premul_sum(1, "float31"), "premul_sum: dtype='float31' is no dtype"),
        (lambda comm: comm.register([1]), "register: x must be an array"),
        (lambda comm: comm.register_window(3), "register_window: x must be an array"),
        (lambda comm: comm.put("x", 0, None), "put: x must be an array"),
        (lambda comm: pickle.dumps(comm), "a Communicator cannot be copied or pickled"),
    ],
)
def test_arguments_of_a_wrong_type_are_named_and_the_communicator_goes_on(
    alone: pynccl.Communicator, call: Any, match: str
) -> None:
    with pytest.raises(TypeError, match=match):
        call(alone)
    alone.barrier()


BEYOND_INT = [2**31, 2**32, 2**32 + 1, 2**40, 10**30]


@pytest.mark.parametrize("n", BEYOND_INT)
@pytest.mark.parametrize(
    "call",
    [
        lambda comm, n: pynccl.Communicator(n, pynccl.get_unique_id("host"), 0, library="host"),
        lambda comm, n: pynccl.Communicator.join(n, pynccl.get_unique_id("host"), 0, library="host"),
        lambda comm, n: pynccl.Communicator.init_all(n, library="host"),
        lambda comm, n: pynccl.Communicator.init_all(1, devices=[n], library="host"),
        lambda comm, n: comm.split(n),
        lambda comm, n: comm.split(0, n),
        lambda comm, n: comm.split(0, -n - 1),
        lambda comm, n: comm.grow(n),
        lambda comm, n: comm.signal(0, signal=n),
        lambda comm, n: comm.signal(0, context=n),
        lambda comm, n: comm.put(np.ones(1, "f4"), 0, comm.register_window(comm.empty(1)), signal=n),
        lambda comm, n: comm.wait_signal(0, n),
        lambda comm, n: comm.wait_signal({0: n}),
        lambda comm, n: comm.wait_signal(0, signal=n),
        lambda comm, n: comm.register_window(comm.empty(1), flags=n),
    ],
)
def test_a_number_that_c_would_cut_is_refused(alone: pynccl.Communicator, call: Any, n: int) -> None:
    with pytest.raises(
        pynccl.InvalidArgumentError, match=rf"={n} must be at most 2147483647|={-n - 1} must be"
    ):
        call(alone, n)
    alone.barrier()


@pytest.mark.parametrize(
    ("shape", "dtype", "match"),
    [
        ((1 << 40, 1 << 40), "f4", r"empty: shape=\(.*\) of float32 is \d+ bytes; there can be at most"),
        (2**61, "f8", "is 18446744073709551616 bytes"),  # 0 in 64 bits
        (2**63, "u1", "each axis of shape=9223372036854775808 must be at most"),
        (1 << 60, "u1", "empty: 1152921504606846976 bytes"),
        (3, "V0", "empty: dtype='V0' has no size"),
        (3, "S", "empty: dtype='S' has no size; give it one, such as S8"),
    ],
)
def test_memory_of_an_impossible_size_is_refused(
    alone: pynccl.Communicator, shape: Any, dtype: str, match: str
) -> None:
    with pytest.raises(pynccl.InvalidArgumentError, match=match):
        alone.empty(shape, dtype)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda comm: comm.split(-2), "color=-2 must be 0 or more, or None"),
        (lambda comm: comm.shrink([]), "exclude is empty"),
        (lambda comm: comm.shrink([0]), "rank 0 excludes itself"),
        (lambda comm: comm.shrink([7]), "exclude=7 is not a rank"),
        (lambda comm: comm.grow(1), "nranks=1 must be more than the 1 ranks"),
        (lambda comm: comm.grow(2, b"short"), "5 bytes; a unique id has 128"),
        (lambda comm: comm.grow(2, "id"), "str is not bytes; pass bytes"),
        (lambda comm: type(comm).join(2, "id", 1, library="host"), "str is not bytes; pass bytes"),
    ],
)
def test_wrong_derivations_are_refused_and_the_parent_goes_on(
    alone: pynccl.Communicator, call: Any, match: str
) -> None:
    with pytest.raises((pynccl.InvalidArgumentError, TypeError), match=match):
        call(alone)
    alone.barrier()


def test_algorithms_are_for_libraries_that_have_them(alone: pynccl.Communicator) -> None:
    with pytest.raises(pynccl.InvalidUsageError, match='algorithm "ring" means nothing to the host library'):
        alone.all_reduce(np.ones(2), algorithm="ring")
    with pytest.raises(pynccl.InvalidUsageError, match="leave algorithm=None"):
        alone.prepare("all_gather", np.ones(2), algorithm="tree")()
    with pytest.raises(TypeError, match="algorithm must be a name such as 'ring' .*not int"):
        alone.all_gather(np.ones(2), algorithm=3)
    alone.barrier()


def test_an_algorithm_names_the_release_that_an_older_library_lacks(
    alone: pynccl.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(alone.library), "has", lambda self, name: not name.endswith("Config"))
    with pytest.raises(
        pynccl.MissingFunctionError, match="needs ncclAllReduceConfig, which NCCL has since 2.31"
    ):
        alone.all_reduce(np.ones(2), algorithm="tree")

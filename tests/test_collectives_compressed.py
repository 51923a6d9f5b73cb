"""Compressed collectives: formats to the element, bytes counted, feedback bounded, the same bits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pynccl
from examples import compressed_training
from examples.compressed_training import CODECS, FEATURES
from pynccl.abi.errors import InvalidArgumentError, InvalidUsageError, NcclError
from pynccl.collectives import Compressed, Compressor, Float8, Integers, TopK
from pynccl.testing import run_ranks

FORMATS = [
    Integers(8),
    Integers(8, block=5),
    Integers(4),
    Integers(4, block=3),
    Float8(),
    Float8(block=7),
    TopK(1 / 4),
    TopK(1),
]


def ranks(n: int, fn: Any, *args: Any, timeout: float = 100) -> list[Any]:
    return run_ranks(n, fn, *args, processes=False, library="host", timeout=timeout)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("f4")


@pytest.mark.parametrize("codec", FORMATS, ids=str)
@pytest.mark.parametrize("m", [0, 1, 2, 7, 255, 256, 257, 1000])
@pytest.mark.parametrize("r", [1, 3])
def test_rows_become_rows_of_the_width_that_is_told(codec: Any, m: int, r: int):
    packed = codec.encode(normal(0, r, m))
    assert packed.dtype == np.uint8 and packed.shape == (r, codec.width(m))
    decoded = codec.decode(packed, m)
    assert decoded.dtype == np.float32 and decoded.shape == (r, m)


@pytest.mark.parametrize("codec", FORMATS, ids=str)
def test_a_row_does_not_depend_on_the_others(codec: Any):
    rows = normal(1, 4, 300)
    alone = np.concatenate([codec.encode(rows[i : i + 1]) for i in range(4)])
    np.testing.assert_array_equal(codec.encode(rows), alone)


@pytest.mark.parametrize(("bits", "most"), [(8, 127), (4, 7)])
def test_integers_that_fit_arrive_exactly(bits: int, most: int):
    rows = np.arange(-most, most + 1, dtype="f4")[None] * 0.25
    codec = Integers(bits, block=1000)
    np.testing.assert_array_equal(codec.decode(codec.encode(rows), rows.shape[1]), rows)


@pytest.mark.parametrize(("bits", "most"), [(8, 127), (4, 7)])
def test_the_error_of_integers_is_half_a_step_at_most(bits: int, most: int):
    rows, codec = normal(2, 3, 640), Integers(bits, block=64)
    error = np.abs(codec.decode(codec.encode(rows), 640) - rows).reshape(3, 10, 64)
    step = np.abs(rows).reshape(3, 10, 64).max(axis=2, keepdims=True) / most
    assert (error <= step * 0.5001).all()


def test_the_error_of_float8_is_a_sixteenth_at_most():
    rows = normal(3, 3, 640)
    error = np.abs(Float8().decode(Float8().encode(rows), 640) - rows)
    assert (error <= np.maximum(np.abs(rows) / 16 * 1.0001, np.abs(rows).max() * 2.0**-10 / 448)).all()
    powers = 2.0 ** np.arange(-5, 4, dtype="f4")[None] * 448 / 256  # the largest is a scale of 448 / 128...
    np.testing.assert_allclose(Float8().decode(Float8().encode(powers), 9), powers, rtol=1e-6)


def test_top_k_keeps_the_largest_exactly_and_nothing_else():
    rows, codec = normal(4, 3, 100), TopK(1 / 10)
    decoded = codec.decode(codec.encode(rows), 100)
    for row, got in zip(rows, decoded, strict=True):
        largest = np.sort(np.argsort(np.abs(row))[-10:])
        np.testing.assert_array_equal(np.flatnonzero(got), largest)
        np.testing.assert_array_equal(got[largest], row[largest])


@pytest.mark.parametrize("codec", FORMATS, ids=str)
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, -3e38])
def test_blocks_of_extreme_values_are_finite_and_near(codec: Any, value: float):
    rows = np.full((2, 300), value, "f4")
    decoded = codec.decode(codec.encode(rows), 300)
    assert np.isfinite(decoded).all()
    assert (np.abs(decoded) <= np.abs(rows) * 1.0001 + 1e-42).all()


@pytest.mark.parametrize("codec", [Integers(8), Integers(4), Float8(), TopK(1 / 4)], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen_by_all_and_kept_by_nobody(codec: Any, bad: float):
    def one(comm: Any) -> tuple[np.ndarray, np.ndarray]:
        compressor = Compressor(comm, codec)
        x = np.ones(1200, "f4")
        if comm.rank == 1:
            x[700] = bad
        first = compressor.all_reduce(x, key="x").copy()
        assert np.isfinite(compressor.report().feedback)
        return first, compressor.all_reduce(np.ones(1200, "f4"), key="x")

    found = ranks(3, one)
    for first, second in found:
        assert not np.isfinite(first[700]) and np.isfinite(first[:256]).all()
        assert np.isfinite(second).all()
        np.testing.assert_array_equal(first, found[0][0])


@pytest.mark.parametrize("codec", FORMATS, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_rank_ends_with_the_same_bits(codec: Any, n: int):
    sizes = (0, 1, 2, 7, 1000)

    def one(comm: Any) -> list[np.ndarray]:
        compressor = Compressor(comm, codec)
        return [
            compressor.all_reduce(normal(10 * step + comm.rank, size, 1), "avg", key=size)
            for size in sizes
            for step in range(3)
        ]

    found = ranks(n, one)
    for others in found[1:]:
        for mine, first in zip(others, found[0], strict=True):
            np.testing.assert_array_equal(mine, first)
    assert [x.shape for x in found[0][::3]] == [(size, 1) for size in sizes]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_sums_that_the_format_holds_are_exact(n: int):
    def one(comm: Any) -> tuple[Any, ...]:
        x = np.repeat([[127.0, 1, 2], [-127, 4, 0]], n, axis=0).astype("f4")  # a row of 3 in each block
        return (
            Compressor(comm, Integers(8, block=3)).all_reduce(x[:2].copy(), "avg", key="x"),
            Compressor(comm, Integers(8, block=3)).reduce_scatter(x, key="x"),
            Compressor(comm, Integers(8, block=3)).all_gather(x[:1] * (comm.rank + 1), key="x"),
        )

    for rank, (reduced, scattered, gathered) in enumerate(ranks(n, one)):
        np.testing.assert_allclose(
            reduced, np.repeat([[127.0, 1, 2], [-127, 4, 0]], n, axis=0)[:2], atol=1 if n > 1 else 0
        )
        whole = np.repeat([[127.0, 1, 2], [-127, 4, 0]], n, axis=0).reshape(n, 2, 3) * n
        np.testing.assert_array_equal(scattered, whole[rank])
        np.testing.assert_array_equal(gathered, [[127 * (r + 1), r + 1, 2 * (r + 1)] for r in range(n)])


@pytest.mark.parametrize("codec", FORMATS, ids=str)
def test_the_bytes_told_are_those_given_to_the_library(codec: Any):
    class Counting:
        """A communicator that counts what goes to other ranks."""

        def __init__(self, comm: Any) -> None:
            self.comm, self.sent = comm, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.comm, name)

        def all_to_all(self, x: np.ndarray, out: np.ndarray, stream: Any) -> Any:
            self.sent += x.nbytes // self.size * (self.size - 1)
            return self.comm.all_to_all(x, out, stream=stream)

        def all_gather(self, x: np.ndarray, out: np.ndarray, stream: Any) -> Any:
            self.sent += x.nbytes * (self.size - 1)
            return self.comm.all_gather(x, out, stream=stream)

    def one(comm: Any) -> None:
        counting = Counting(comm)
        compressor = Compressor(counting, codec)
        compressor.all_reduce(normal(comm.rank, 3000), key="x")
        compressor.reduce_scatter(normal(comm.rank, 3000), key="x")
        compressor.all_gather(normal(comm.rank, 1000), key="x")
        report = compressor.report()
        assert report.calls == 3
        assert report.bytes_sent == counting.sent > 0
        assert report.bytes_uncompressed == 4 * 2 * 1000 * (2 + 1 + 1)
        assert report.ratio == report.bytes_uncompressed / report.bytes_sent
        told = Compressed(codec)
        sizes = {"all_reduce": 3000, "reduce_scatter": 3000}
        predicted = sum(told.bytes_sent(call, size, "float32", 3) for call, size in sizes.items())
        assert predicted + 2 * codec.width(1000) == counting.sent
        kept = sum(told.bytes_kept(call, size, 3) for call, size in sizes.items()) + 4 * 1000
        assert kept == sum(each.nbytes for each in compressor._kept.values())
        assert Compressed(codec, feedback=False).bytes_kept("all_reduce", 3000, 3) == 0

    ranks(3, one)


def test_the_ratios_of_the_formats():
    m = 1 << 20
    ratios = {name: 4 * m / codec.width(m) for name, codec in CODECS.items() if codec is not None}
    assert ratios == {
        "8-bit integers": pytest.approx(3.938, abs=0.001),
        "float8_e4m3fn": pytest.approx(3.938, abs=0.001),
        "4-bit integers": pytest.approx(7.758, abs=0.001),
        "top 1/8": 4,
    }


@pytest.mark.parametrize("codec", [Integers(4), TopK(1 / 16)], ids=str)
def test_with_feedback_the_error_of_a_sum_of_calls_is_that_of_one(codec: Any):
    """The sum of 100 results misses the sum of what was given by what is kept, and by nothing else."""

    def one(comm: Any, feedback: bool) -> tuple[float, float]:
        compressor = Compressor(comm, codec, feedback=feedback)
        results = sum(compressor.all_reduce(normal(comm.rank, 600), key="x").astype("f8") for _ in range(100))
        kept = np.concatenate([each.reshape(-1) for each in compressor._kept.values()] or [np.zeros(1)])
        given = 100 * sum(normal(rank, 600).astype("f8") for rank in range(2))
        return float(np.abs(given - results).max()), float(np.abs(kept).max())

    for error, kept in ranks(2, one, True):
        assert error <= 3 * kept * 1.01  # two contributions and a result
    forgotten = ranks(2, one, False)
    assert min(error for error, _ in forgotten) > 5 * max(error for error, _ in ranks(2, one, True))


@pytest.mark.parametrize("codec", [Integers(8), Integers(4), TopK(1 / 4)], ids=str)
def test_on_a_stream_the_results_are_those_without(codec: Any):
    def one(comm: Any) -> None:
        plain, queued = Compressor(comm, codec), Compressor(comm, codec)
        stream = pynccl.Stream(comm.library)
        for step in range(5):
            x = normal(10 * step + comm.rank, 3000)
            wanted = (
                plain.all_reduce(x.copy(), "avg", key="w"),
                plain.reduce_scatter(x, "avg", key="w"),
                plain.all_gather(x, key="w"),
            )
            reduced, out, whole = x.copy(), np.empty(1000, "f4"), np.empty(9000, "f4")
            queued.all_reduce(reduced, "avg", key="w", stream=stream)
            assert queued.reduce_scatter(x, "avg", out=out, key="w", stream=stream) is out
            with stream:  # the current one
                assert queued.all_gather(x, out=whole, key="w") is whole
            stream.synchronize()
            for got, want in zip((reduced, out, whole), wanted, strict=True):
                np.testing.assert_array_equal(got, want)
        assert queued.report() == plain.report()
        in_place = normal(comm.rank, 3000)
        part = in_place[comm.rank * 1000 :][:1000]
        wanted = plain.reduce_scatter(in_place.copy(), key="p")
        queued.reduce_scatter(in_place, out=part, key="p", stream=stream)
        stream.close()
        np.testing.assert_array_equal(part, wanted)

    ranks(3, one)


def test_how_to_make_one_is_equal_on_all_ranks_and_says_what_it_is_not_for():
    assert Compressed(Integers(8)) == Compressed(Integers(8)) != Compressed(Integers(4))
    assert repr(Compressed(TopK(0.5))) == "Compressed(codec=TopK(fraction=0.5), feedback=True)"
    with pytest.raises(InvalidArgumentError, match="send them in a narrower dtype"):
        Compressed(Integers(8)).bytes_sent("all_gather", 8, "float32", 2)
    with pytest.raises(TypeError, match="compression is of float32, and these are bfloat16"):
        Compressed(Integers(8)).bytes_sent("reduce_scatter", 8, "bfloat16", 2)


def test_the_error_of_the_last_call_is_told():
    def one(comm: Any) -> None:
        compressor = Compressor(comm, TopK(1 / 2))
        assert compressor.report().error == 0 and np.isnan(compressor.report().ratio)
        x = np.array([3, 4, 0, 0], "f4") if comm.rank else np.array([4, 3, 4, 3], "f4")
        compressor.all_gather(x, key="x")
        assert compressor.report().error == pytest.approx(0 if comm.rank else 0.6)
        assert compressor.report().feedback == pytest.approx(0 if comm.rank else 18**0.5)
        assert "calls sent" in str(compressor.report())
        compressor.reset()
        assert compressor.report().feedback == 0

    ranks(2, one)


def test_the_error_of_an_all_reduce_counts_both_of_its_encodings():
    def one(comm: Any) -> None:
        compressor = Compressor(comm, TopK(1 / 2))
        # Each rank's part of the sum is two elements. TopK keeps one of them, here and of the contributions.
        compressor.all_reduce(np.array([4, 3, 4, 3], "f4"), key="x")
        contributions, result = 5 * 2**0.5, 8.0  # norms: of (4, 3) twice, and of the sum of what came, (8, 0)
        left = 3 * 2**0.5
        wanted = left / (contributions**2 + result**2) ** 0.5
        assert compressor.report().error == pytest.approx(wanted)

    ranks(2, one)


def frozen(*shape: int) -> np.ndarray:
    x = np.zeros(shape, "f4")
    x.flags.writeable = False
    return x


SHAPES = {  # of calls on two ranks: a method, and arrays of one padded size and different shapes
    "all_reduce": [(8,), (7,), (2, 4), (8, 1), (10,)],
    "reduce_scatter": [(8,), (2, 4), (4, 2), (10,)],
    "all_gather": [(8,), (2, 4), (8, 1), (10,)],
}


@pytest.mark.parametrize("queued", [False, True], ids=["now", "on a stream"])
@pytest.mark.parametrize("call", SHAPES)
def test_a_key_is_of_one_shape_and_of_one_method(call: str, queued: bool):
    def one(comm: Any) -> None:
        compressor = Compressor(comm, Integers())
        stream = pynccl.Stream(comm.library) if queued else None
        first, *others = SHAPES[call]
        getattr(compressor, call)(np.zeros(first, "f4"), key="w", stream=stream)
        if comm.rank == 0:  # alone: had it sent anything, it would wait
            for shape in others:
                words = f"key 'w' was used for an array of shape {first} and now for {shape}"
                with pytest.raises(InvalidArgumentError, match=f"{call} .*{re.escape(words)}"):
                    getattr(compressor, call)(np.zeros(shape, "f4"), key="w", stream=stream)
        getattr(compressor, call)(np.zeros(first, "f4"), key="w", stream=stream)
        for other in SHAPES:
            if other != call:
                getattr(compressor, other)(np.zeros((2, 2), "f4"), key="w", stream=stream)
        if stream is not None:
            stream.close()
        assert compressor.report().calls == 4

    ranks(2, one)


def test_each_key_has_a_feedback_of_its_own_and_there_is_none_without():
    """Two arrays of one shape: what one lost comes back with it, and never with the other."""

    def one(comm: Any) -> None:
        compressor = Compressor(comm, TopK(1 / 4))
        a, b = np.array([4, 1, 1, 1], "f4"), np.array([0, 0, 0, 8], "f4")
        assert compressor.all_gather(a, key="a").tolist() == [4, 0, 0, 0]
        assert compressor.all_gather(b, key="b").tolist() == [0, 0, 0, 8]
        assert compressor.all_gather(0 * a, key="a").tolist() in ([0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1])
        for call in SHAPES:
            with pytest.raises(TypeError, match=rf"{call} .*key= is missing.*feedback=False"):
                getattr(compressor, call)(a)
        forgetful = Compressor(comm, TopK(1 / 4), feedback=False)
        assert forgetful.all_gather(a).tolist() == forgetful.all_gather(a).tolist() == [4, 0, 0, 0]
        assert forgetful.all_reduce(np.zeros(3, "f4")).tolist() == [0, 0, 0]

    ranks(1, one)


WRONG: tuple[tuple[str, tuple[Any, ...], dict[str, Any], type[Exception], str], ...] = (
    ("all_reduce", (np.zeros(8),), {}, TypeError, "x is float64; pass a float32 array"),
    ("all_reduce", (np.zeros(8, ">f4"),), {}, TypeError, "x is >f4; pass a float32 array"),
    ("all_reduce", ([1.0],), {}, TypeError, "x must be an array .*not list"),
    ("all_gather", (b"1234",), {}, TypeError, "x is bytes, and what compresses it are NumPy and CuPy"),
    ("all_reduce", (np.ma.zeros(8, "f4"),), {}, TypeError, "x is a masked array"),
    (
        "all_reduce",
        (np.zeros(8, "f4"), "max"),
        {},
        InvalidArgumentError,
        "op='max'; there are 'sum' and 'avg'",
    ),
    (
        "all_reduce",
        (frozen(8),),
        {},
        InvalidArgumentError,
        "x .* is written to and cannot be .it is read-only",
    ),
    (
        "all_reduce",
        (np.zeros(8, "f4"),),
        {"key": [1]},
        TypeError,
        r"key=\[1\] cannot be looked up .*a string",
    ),
    (
        "reduce_scatter",
        (np.zeros(3, "f4"),),
        {},
        InvalidArgumentError,
        r"\(3,\) does not divide over 2 ranks",
    ),
    ("reduce_scatter", (np.zeros((4, 6), "f4")[:, ::2],), {}, InvalidArgumentError, "x is not contiguous"),
    ("all_gather", (np.zeros((4, 6), "f4").T,), {}, InvalidArgumentError, "x is not contiguous"),
    ("reduce_scatter", (np.zeros(8, "f4"),), {"out": [0.0] * 4}, TypeError, "out must be an array"),
    ("all_gather", (np.zeros(8, "f4"),), {"out": [0.0] * 16}, TypeError, "out must be an array"),
    ("reduce_scatter", (np.zeros(8, "f4"),), {"out": np.zeros(4)}, TypeError, "out is float64"),
    ("reduce_scatter", (np.zeros(8, "f4"),), {"out": frozen(4)}, InvalidArgumentError, "out .* read-only"),
    ("all_gather", (np.zeros(8, "f4"),), {"out": frozen(16)}, InvalidArgumentError, "out .* read-only"),
    (
        "reduce_scatter",
        (np.zeros(8, "f4"),),
        {"out": np.zeros(5, "f4")},
        InvalidArgumentError,
        "of 4 elements",
    ),
    (
        "all_gather",
        (np.zeros(8, "f4"),),
        {"out": np.zeros(32, "f4")[::2]},
        InvalidArgumentError,
        "of 16 elem",
    ),
)


@pytest.mark.parametrize("queued", [False, True], ids=["now", "on a stream"])
@pytest.mark.parametrize(("call", "given", "named", "error", "words"), WRONG)
def test_wrong_arguments_are_refused_in_words_before_a_message(
    call: str, given: tuple[Any, ...], named: dict[str, Any], error: type[Exception], words: str, queued: bool
):
    def one(comm: Any) -> None:
        compressor = Compressor(comm, Integers())
        stream = pynccl.Stream(comm.library) if queued else None
        if comm.rank == 0:  # alone
            with pytest.raises(error, match=rf"{call}( \(compressed\))?: .*{words}"):
                getattr(compressor, call)(*given, **{"key": "w", **named}, stream=stream)
            assert compressor.report().calls == 0
        assert compressor.all_reduce(np.ones(6, "f4"), key="w").tolist() == [2] * 6
        if stream is not None:
            stream.close()

    ranks(2, one)


def test_a_group_is_refused():
    def one(comm: Any) -> None:
        with pytest.raises(InvalidUsageError, match="outside of pynccl.group"), pynccl.group():
            Compressor(comm, Integers()).all_reduce(np.zeros(8, "f4"), key="w")

    ranks(1, one)


NO_FORMATS: tuple[tuple[Any, tuple[Any, ...], type[Exception], str], ...] = (
    (Integers, (5,), InvalidArgumentError, "bits=5; there are 4 and 8"),
    (Integers, (8.0,), TypeError, "Integers: bits must be an integer, not float"),
    (Integers, (8, "x"), TypeError, "Integers: block must be an integer, not str"),
    (Float8, (0,), InvalidArgumentError, "Float8: block=0 must be at least 1"),
    (TopK, (0,), InvalidArgumentError, "fraction=0; give a number, more than 0 and at most 1"),
    (TopK, ("all",), InvalidArgumentError, "fraction='all'; give a number"),
    (TopK, (float("nan"),), InvalidArgumentError, "fraction=nan"),
    (Compressor, (None, "int8"), TypeError, "Compressor: codec='int8' is no codec; pass Integers"),
    (Compressor, (None, Integers), TypeError, "is no codec; pass Integers.bits=8."),
    (Compressed, (None,), TypeError, "Compressed: codec=None is no codec.*width, encode, decode"),
)


@pytest.mark.parametrize(("make", "given", "error", "words"), NO_FORMATS)
def test_what_is_no_format_is_refused_when_it_is_made(
    make: Any, given: tuple[Any, ...], error: type[Exception], words: str
):
    with pytest.raises(error, match=words):
        make(*given)


@pytest.mark.timeout(300)
def test_training_with_compressed_gradients_ends_as_without_and_its_error_stays_bounded(
    tmp_path: Path, repo: Path
):
    """1000 steps: a quarter of the bytes or fewer, the loss within 1 %, and feedback that does not grow."""
    command = [sys.executable, "-m", "pynccl.launch", "-n", "2", "examples/compressed_training.py"]
    results = tmp_path / "out.json"
    done = subprocess.run(
        [*command, "--", "--json", str(results)], cwd=repo, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(results.read_text())
    assert list(found) == list(CODECS)
    loss, sent = found["float32"]["loss"], found["float32"]["bytes"]
    assert loss < 0.02 and sent == 2 * FEATURES * 4 * 1000 // 2
    for name in list(CODECS)[1:]:
        run, kept = found[name], np.array(found[name]["kept"])
        assert run["loss"] == pytest.approx(loss, rel=0.01)
        assert run["same"]
        assert kept.shape == (1000,)
        assert kept[500:].max() <= kept[:500].max()  # it falls as the gradients do
    for name in ("4-bit integers", "top 1/8"):
        assert found[name]["ratio"] >= 4
        assert sent >= 4 * found[name]["bytes"]


def test_the_example_prints_and_writes_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PYNCCL_LIBRARY", "host")
    compressed_training.main(["--steps", "3", "--json", str(tmp_path / "out.json")])
    printed = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in printed[2:]] == list(CODECS)
    assert list(json.loads((tmp_path / "out.json").read_text())) == list(CODECS)


@pytest.mark.parametrize("queued", [False, True], ids=["now", "on a stream"])
@pytest.mark.parametrize("when", ["encode", "decode"])
def test_a_codec_that_raises_on_one_rank_ends_the_communicator(when: str, queued: bool) -> None:
    def rank(comm: Any) -> None:
        class Picky(Integers):
            def encode(self, rows: Any) -> Any:
                if when == "encode" and comm.rank == 1:
                    raise FloatingPointError("not these numbers")
                return super().encode(rows)

            def decode(self, packed: Any, m: int) -> Any:
                if when == "decode" and comm.rank == 1:
                    raise FloatingPointError("not these numbers")
                return super().decode(packed, m)

        compressor = Compressor(comm, Picky(8))
        stream = pynccl.Stream(comm.library) if queued else None
        error = FloatingPointError if comm.rank == 1 else pynccl.RemoteError
        words = "not these numbers" if comm.rank == 1 else "rank 1 has"
        with pytest.raises(error, match=words):
            compressor.all_reduce(np.ones(12, "f4"), key="x", stream=stream)
            if stream is not None:
                stream.synchronize()
        with pytest.raises(pynccl.NcclError, match="revoked" if comm.rank == 1 else "rank 1 has"):
            comm.all_reduce(np.ones(2))
        if stream is not None:
            stream.close()

    run_ranks(3, rank, library="host", timeout=30)


def without_feedback(comm: Any, codec: Any = None) -> Compressor:
    return Compressor(comm, codec or Integers(8), feedback=False)


@pytest.mark.parametrize(
    "call",
    [
        lambda comm, x: without_feedback(comm).all_reduce(x[: 511 + comm.rank]),
        lambda comm, x: without_feedback(comm).all_reduce(x[: 512 * comm.rank]),
        lambda comm, x: without_feedback(comm).all_reduce(x, ("sum", "avg")[comm.rank]),
        lambda comm, x: without_feedback(comm, (Integers(8), Float8())[comm.rank]).all_reduce(x),
    ],
    ids=["length", "none", "operation", "format"],
)
def test_ranks_that_differ_in_a_call_learn_it_before_a_message_and_go_on(call: Any):
    def one(comm: Any) -> None:
        x = np.full(512, comm.rank + 1.0, "f4")
        with pytest.raises(InvalidUsageError, match="differs between ranks"):
            call(comm, x)
        assert (comm.all_reduce(np.ones(3)) == 2).all()

    ranks(2, one)


def test_a_non_blocking_communicator_is_waited_for():
    def one(comm: Any) -> None:
        with comm.split(0, config={"blocking": 0}) as child:
            child.wait(30)
            compressor = without_feedback(child)
            assert (compressor.all_reduce(np.full(300, comm.rank + 1.0, "f4")) == 3).all()
            assert (compressor.reduce_scatter(np.full(300, comm.rank + 1.0, "f4")) == 3).all()
            gathered = compressor.all_gather(np.full(300, comm.rank + 1.0, "f4"))
            assert gathered.reshape(2, 300)[:, 7].tolist() == [1, 2]

    ranks(2, one)


def test_on_a_non_blocking_communicator_a_disagreement_ends_it():
    def one(comm: Any) -> None:
        with comm.split(0, config={"blocking": 0}) as child:
            child.wait(30)
            with pytest.raises(NcclError, match="differs between ranks"):
                without_feedback(child).all_reduce(np.ones(300 + comm.rank, "f4"))
                child.wait(30)
            child.abort()

    ranks(2, one)

"""What is refused, on every rank, with the culprit and the remedy, and with nothing changed.

Each error is raised on one rank's input alone where that is possible, and must come on all ranks.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from sharding_ranks import RANKS, FakeComm, assert_shards, run_threads, ways  # type: ignore[import-not-found]

from pynccl.testing import run_ranks
from sharding import MixedPrecision, by_size, fully_shard

each_n = pytest.mark.parametrize("n", RANKS)
GOOD = {"a": np.arange(4.0), "b": {"w": np.ones((2, 3), np.float32), "s": np.array(2.0)}}


def refused(n: int, error: type[Exception], message: str, wrong: Any, **common: Any) -> None:
    """`wrong` (arguments of fully_shard, or a function of the rank that gives them) is refused on all ranks.

    After that the same communicators make a model of good arguments: nothing was changed or left waiting.
    """

    def rank(comm: FakeComm) -> None:
        given = {"params": GOOD, **common, **(wrong(comm.rank) if callable(wrong) else wrong)}
        before = list(comm.log)
        with pytest.raises(error, match=message):
            fully_shard(comm=comm, **given)
        assert comm.log == before
        with fully_shard(GOOD, comm) as model:
            assert_shards(model, "data", {"a": GOOD["a"], "b.w": np.ones(6), "b.s": 2.0})

    run_threads(n, rank)


def last(n: int, **wrong: Any) -> Any:
    """The last of n ranks alone brings these arguments."""
    return lambda rank: wrong if rank == n - 1 else {}


# --- units and settings -------------------------------------------------------------------------------------


@each_n
@pytest.mark.parametrize(
    ("error", "message", "wrong"),
    [
        (
            ValueError,
            "units: the pattern 'c' takes no parameter; there are a, b.w, b.s",
            {"units": ["a", "c"]},
        ),
        (ValueError, "units: b.w is taken by .*disjoint", {"units": ["b", "b.w"]}),
        (ValueError, "use a string other than 'root'", {"units": {"root": ["a"]}}),
        (ValueError, "by_size: 0 bytes", {"units": by_size(0)}),
        (ValueError, "frozen: the pattern 'c' takes no parameter", {"frozen": ["c"]}),
        (ValueError, "strategy='zero9' is unknown; use one of no_shard, ", {"strategy": "zero9"}),
        (ValueError, r"mesh=\(1, 1\) goes with strategy='hybrid_shard', not 'full_shard'", {"mesh": (1, 1)}),
        (ValueError, "hybrid_shard needs mesh=", {"strategy": "hybrid_shard"}),
        (ValueError, "hybrid_shard needs mesh=", {"strategy": "hybrid_shard", "mesh": (5, 7)}),
        (ValueError, "reshard_after_forward=7; use True, False, or", {"reshard_after_forward": 7}),
        (ValueError, "reshard_after_forward=1; use True, False, or", {"reshard_after_forward": 1}),
        (ValueError, "reduce_op='mean'; use 'avg' or 'sum'", {"reduce_op": "mean"}),
        (ValueError, "broadcast_from=9; use a rank below", {"broadcast_from": 9}),
        (TypeError, "precision='bfloat16'; pass a sharding.MixedPrecision", {"precision": "bfloat16"}),
        (TypeError, "pass either params, or init= and shapes=", {"init": lambda *_: 0}),
        (TypeError, "pass either params, or init= and shapes=", {"params": None}),
        (ValueError, "there are no parameters", {"params": {"a": {}}}),
    ],
)
def test_settings_that_do_not_fit(n: int, error: Any, message: str, wrong: dict[str, Any]) -> None:
    refused(n, error, message, last(n, **wrong))


@each_n
def test_what_the_users_functions_raise_reaches_every_rank(n: int) -> None:
    def units(name: str) -> str:
        raise KeyError(name)

    kind = KeyError if n == 1 else (KeyError, RuntimeError)
    refused(n, kind, "a", last(n, units=units))  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ("param", "reduce", "output", "gather", "master"))
def test_a_dtype_that_precision_does_not_have(field: str) -> None:
    with pytest.raises(ValueError, match=f"MixedPrecision: {field}='int8'; use one of bfloat16"):
        MixedPrecision(**{field: "int8"})


# --- arrays -------------------------------------------------------------------------------------------------

shared = np.arange(12.0)


@each_n
@pytest.mark.parametrize(
    ("error", "message", "params"),
    [
        (TypeError, "parameter 'a' is a list|'a.0' is a float; pass NumPy or CuPy arrays", {"a": [1.0]}),
        (TypeError, "parameter 'a' is a float; pass NumPy", {"a": 1.0}),
        (TypeError, "parameter 'b.w' is a NoneType; pass NumPy", {"b": {"w": None}}),
        (TypeError, "parameter 'a' is a str", {"a": "weights"}),
        (TypeError, "parameter 'a' has dtype object; pass real numbers", {"a": np.array([None])}),
        (TypeError, "parameter 'a' has dtype <U1; pass real", {"a": np.array(["x"])}),
        (TypeError, "parameter 'a' has dtype complex128; pass real", {"a": np.ones(2, complex)}),
        (TypeError, "parameter 'a' has dtype datetime64", {"a": np.array(["2020"], "M8[D]")}),
        (TypeError, "parameter 'a' has dtype >f8, of the other byte order", {"a": np.ones(2, ">f8")}),
        (
            ValueError,
            r"'a' \(shape \(3, 2\), strides .*not C-contiguous; pass np.asc",
            {"a": np.ones((2, 3)).T},
        ),
        (ValueError, "'a' .* is not C-contiguous", {"a": np.arange(6.0)[::2]}),
        (TypeError, "names are strings; b has the key 0", {"b": {0: np.ones(1)}}),
        (ValueError, "two parameters have the name 'b.w'", {"b": {"w": np.ones(1)}, "b.w": np.ones(1)}),
        (ValueError, "'b' is a parameter and 'b.w' lies below it", {"b": np.ones(1), "b.w": np.ones(1)}),
        (ValueError, "'x' and 'y' share memory in part", {"x": shared[:8], "y": shared[4:]}),
        (ValueError, "'x' and 'y' share memory in part", {"x": shared, "y": shared.reshape(3, 4)}),
        (ValueError, "'x' and 'y' share memory in part", {"x": shared, "y": shared.view(np.int64)}),
    ],
)
def test_arrays_that_no_model_can_hold(n: int, error: Any, message: str, params: Any) -> None:
    refused(n, error, message, last(n, params=params))


def test_parts_of_one_buffer_that_do_not_overlap_are_parameters_of_their_own() -> None:
    def rank(comm: FakeComm) -> None:
        params = {"x": shared[:4], "y": shared[4:], "z": shared[:4]}
        with fully_shard(params, comm) as model:
            assert model.layout.aliases == (("z", "x"),) and model.layout.numel == 12
            assert_shards(model, "data", {"x": np.arange(4.0), "y": np.arange(4.0, 12)})

    run_threads(2, rank)


def test_arrays_are_read_and_not_kept() -> None:
    def rank(comm: FakeComm) -> None:
        params = {"a": np.arange(5.0), "b": np.ones(3, ml_dtypes.bfloat16)}
        held = [weakref.ref(array) for array in params.values()]
        for way in ways(comm.size).values():
            with fully_shard(params, comm, **way) as model:
                for shard in model.shards:
                    shard.data += 1
                model.updated()
                np.testing.assert_array_equal(params["a"], np.arange(5.0))
        model = fully_shard(params, comm)
        del params
        gc.collect()
        assert [ref() for ref in held] == [None, None]
        model.close()

    run_threads(2, rank)


# --- ranks that bring different things ----------------------------------------------------------------------


@pytest.mark.parametrize("n", RANKS[1:])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"params": {"a": GOOD["a"], "c": GOOD["b"]}}, r"rank 0 has b\.w .*, and rank {last} has c\.w"),
        (
            {"params": {"a": np.arange(5.0), "b": GOOD["b"]}},
            r"rank 0 has a \[4\] float64 .*, and rank {last} has a \[5\] float64",
        ),
        (
            {"params": {"a": np.arange(4.0, dtype=np.float32), "b": GOOD["b"]}},
            r"rank 0 has a \[4\] float64.* rank {last} has a \[4\] float32",
        ),
        ({"params": {"b": GOOD["b"], "a": GOOD["a"]}}, r"rank 0 has a \[4\].* rank {last} has "),
        ({"params": {**GOOD, "z": np.ones(1)}}, "rank {last} has z"),
        ({"frozen": ["a"]}, "rank 0 has a .* trainable in unit .* rank {last} has a .* frozen"),
        ({"units": ["a"]}, "rank 0 has a .* in unit root, and rank {last} has .*"),
        ({"strategy": "no_shard"}, "rank 0 has strategy full_shard, and rank {last} has strategy no_shard"),
        ({"reduce_op": "sum"}, "rank 0 has reduce_op avg, and rank {last} has reduce_op sum; give all ranks"),
        ({"reshard_after_forward": False}, "reshard_after_forward True, and .* reshard_after_forward False"),
        ({"precision": MixedPrecision("bfloat16")}, "rank 0 has precision None, and rank {last} has"),
        ({"broadcast_from": None}, "rank 0 has broadcast_from 0, and rank {last} has broadcast_from None"),
    ],
)
def test_ranks_that_bring_different_models_or_settings(n: int, wrong: Any, message: str) -> None:
    refused(n, ValueError, "fully_shard: the ranks differ: .*" + message.replace("{last}", str(n - 1)),
            last(n, **wrong))  # fmt: skip


@pytest.mark.parametrize("n", RANKS[1:])
def test_a_tie_on_one_rank_alone(n: int) -> None:
    def wrong(rank: int) -> dict[str, Any]:
        first = np.ones(3)
        return {"params": {"x": first, "y": first if rank == n - 1 else np.ones(3)}}

    refused(n, ValueError, rf"rank 0 has y \[3\] .*rank {n - 1} has .*tied to x|rank 0 has y", wrong)


def test_a_communicator_that_is_none() -> None:
    for comm in (None, object(), [1, 2]):
        with pytest.raises(TypeError, match="fully_shard: comm=.* lacks rank, size, all_gather.*pynccl.init"):
            fully_shard(GOOD, comm)


# --- deferred initialisation --------------------------------------------------------------------------------

SHAPES = {
    "embed": ((6, 4), "float32"),
    "layers": [{"w": ((5, 5), "float32"), "b": np.empty((5,), np.float16)} for _ in range(4)],
    "scale": ((), np.dtype("bfloat16")),
    "none": ([0, 3], np.float64),
}


def numbered(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape))
    return (np.arange(size) + len(name)).astype(dtype).reshape(shape)


@each_n
def test_deferred_initialisation_gives_what_the_arrays_would(n: int) -> None:
    def rank(comm: FakeComm) -> None:
        for way in ways(n).values():
            deferred = fully_shard(
                comm=comm, init=numbered, shapes=SHAPES, units=["embed", "layers.*"], **way
            )
            params = {
                "embed": numbered("embed", (6, 4), np.dtype("float32")),
                "layers": [
                    {
                        "w": numbered(f"layers.{i}.w", (5, 5), np.dtype("float32")),
                        "b": numbered(f"layers.{i}.b", (5,), np.dtype("float16")),
                    }
                    for i in range(4)
                ],
                "scale": numbered("scale", (), np.dtype(ml_dtypes.bfloat16)),
                "none": np.zeros((0, 3)),
            }
            plain = fully_shard(params, comm, units=["embed", "layers.*"], **way)
            assert deferred.layout == plain.layout
            for mine, theirs in zip(deferred.shards, plain.shards, strict=True):
                assert mine.data.dtype == theirs.data.dtype
                np.testing.assert_array_equal(mine.data, theirs.data)
            with deferred.evaluate():
                for unit, twin in zip(deferred, plain, strict=True):
                    with unit.forward() as w:
                        assert type(w) is type(twin._skeleton) or isinstance(w, np.ndarray)
            deferred.close()
            plain.close()

    run_threads(n, rank)


@pytest.mark.parametrize("n", RANKS[1:])
def test_deferred_initialisation_never_has_more_than_one_whole_parameter(n: int) -> None:
    def rank(comm: FakeComm) -> None:
        live: list[weakref.ref[np.ndarray]] = []
        most = 0

        def init(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            nonlocal most
            array = np.ones(shape, dtype)
            live.append(weakref.ref(array))
            most = max(most, sum(ref() is not None for ref in live))
            return array

        shapes = {f"p{i}": ((64, 64), "float32") for i in range(8)}
        with fully_shard(comm=comm, init=init, shapes=shapes) as model:  # one unit: all of it
            assert len(live) == 8
            assert most <= 2  # the one before goes when this one comes
            assert not any(ref() is not None for ref in live)
            # Beside shards of weights and gradients nothing was made.
            assert (
                sum(s.data.nbytes + s.grad.nbytes for s in model.shards) == 2 * 8 * 64 * 64 * 4 // n or n == 3
            )
            assert model.gatherer.bytes_made == model.reducer.bytes_made == 0

    run_threads(n, rank)


@pytest.mark.parametrize("n", RANKS[1:])
def test_an_initialiser_that_differs_between_ranks_is_named(n: int) -> None:
    def rank(comm: FakeComm) -> None:
        def init(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            return np.full(shape, comm.rank if name == "layers.1.w" else 0, dtype)

        for way in ways(n).values():
            with pytest.raises(
                ValueError, match=r"init: the ranks differ: rank 0 has layers\.1\.w with checksum"
            ):
                fully_shard(comm=comm, init=init, shapes=SHAPES, **way)

    run_threads(n, rank)


@each_n
def test_an_initialiser_that_fails_on_one_rank_fails_on_all(n: int) -> None:
    def rank(comm: FakeComm) -> None:
        def init(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            return np.zeros((*shape, 2) if comm.rank == n - 1 and name == "embed" else shape, dtype)

        with pytest.raises(
            ValueError, match=r"init\('embed', \(6, 4\), \.\.\.\) returned an array of shape \(6, 4, 2\)"
        ):
            fully_shard(comm=comm, init=init, shapes=SHAPES)
        assert [made.ended for made in comm.made] == (["aborted"] * 2 if n > 1 else [])
        with fully_shard(comm=comm, init=numbered, shapes=SHAPES) as model:
            assert model.layout.numel == 24 + 4 * 30 + 1

    run_threads(n, rank)


@each_n
@pytest.mark.parametrize(
    "shapes", ({"a": 3}, {"a": ((2, -1), "float32")}, {"a": ((2,), "float33")}, {"a": None})
)
def test_shapes_that_are_none(n: int, shapes: Any) -> None:
    wrong = {"init": numbered, "shapes": shapes, "params": None}
    refused(n, TypeError, r"shapes: 'a' is .*expected a \(shape, dtype\) pair", wrong)


@pytest.mark.parametrize("n", RANKS[1:])
def test_shapes_that_differ_between_ranks_are_named_by_the_first_parameter(n: int) -> None:
    def wrong(rank: int) -> dict[str, Any]:
        shapes = {
            "a": ((2,), "float32"),
            "b": ((3 + (rank == n - 1),), "float32"),
            "c": ((4 + rank,), "float32"),
        }
        return {"init": numbered, "shapes": shapes, "params": None}

    refused(n, ValueError, rf"rank 0 has b \[3\] float32 .*, and rank {n - 1} has b \[4\]", wrong)


# --- the same on host streams -------------------------------------------------------------------------------


@pytest.mark.parametrize("n", (1, 3))
def test_a_refused_model_leaves_a_host_communicator_as_it_was(n: int) -> None:
    def rank(comm: Any) -> None:
        bad = {**GOOD, "c": np.ones((2, 3)).T if comm.rank == n - 1 else np.ones((3, 2))}
        with pytest.raises(ValueError, match="parameter 'c' .*is not C-contiguous"):
            fully_shard(bad, comm)
        with fully_shard(GOOD, comm) as model, model.evaluate(), model[0].forward() as w:
            np.testing.assert_array_equal(w["b"]["w"], np.ones((2, 3)))
        x = np.full(3, comm.rank + 1.0)
        comm.all_reduce(x)
        assert (x == n * (n + 1) / 2).all()

    run_ranks(n, rank, library="host", timeout=30)

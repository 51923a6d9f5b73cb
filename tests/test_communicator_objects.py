"""Python objects between ranks: what arrives, what is refused, and that no message can do anything."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from communicator_ranks import N, ranks  # type: ignore[import-not-found]

import pynccl


def nested(depth: int) -> Any:
    """Dicts, tuples and lists in each other: ``depth`` containers."""
    value: Any = 0
    for i in range(depth):
        value = ({"a": value}, (value,), [value])[i % 3]
    return value


def test_objects_arrive_as_they_were_sent() -> None:
    value = {
        "none": None,
        "numbers": [True, -(2**80), 2.5, float("inf"), "text 😀 \udcff"],
        ("a", 1): b"\0\xff",
        3: (np.arange(6, dtype="i2").reshape(2, 3), np.float32(1.5), np.array("x")),
        "bf16": np.ones(2, ml_dtypes.bfloat16),
        "nothing": [[], (), {}, b"", np.zeros((0, 2))],
        "plain bytes": [np.array([b"ab", b"c"], "V3"), np.void(b"xyz"), np.array(["a", ""]), np.array([b""])],
        "dates": [np.datetime64(3, "ns"), np.arange(2, dtype="m8[s]"), np.arange(2, dtype=">i4")],
        2**64: [2**63, -(2**63), 2**64 - 1],
        "deep": nested(98),
    }

    def rank(comm):
        got = comm.broadcast_object(value if comm.rank == 1 else object(), root=1)
        assert repr(got) == repr(value)
        return comm.all_gather_object([comm.rank] * comm.rank)

    assert ranks(rank) == [[[], [1], [2, 2]]] * N


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({1, 2}, "obj is a set"),
        ([1, {"a": object()}], r"obj\[1\]\['a'\] is a object"),
        ({None: len}, r"obj\[None\]"),
    ],
)
def test_only_data_is_sent_as_an_object(alone: pynccl.Communicator, value: Any, where: str) -> None:
    with pytest.raises(TypeError, match=f"broadcast_object: {where}.*never pickled"):
        alone.broadcast_object(value)


def test_numbers_of_any_size_are_sent(alone: pynccl.Communicator) -> None:
    value = {10**5000: [-(10**5000), 0]}
    assert alone.broadcast_object(value) == value
    with pytest.raises(TypeError, match=r"obj\[<int>\]\[1\] is a set"):
        alone.broadcast_object({10**5000: [0, {1}]})


def released() -> memoryview:
    view = memoryview(b"abc")
    view.release()
    return view


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({1, 2}, "obj is a set"),
        (nested(101), r"101 containers deep; at most 100"),
        (nested(5000), r"101 containers deep; at most 100"),
        (released(), "obj cannot be sent (ValueError: "),
        (np.zeros(2, "V0"), "obj has elements of no size"),
    ],
)
def test_an_object_that_cannot_be_sent_is_an_error_on_every_rank_and_nobody_waits(
    bad: Any, words: str
) -> None:
    def rank(comm):
        obj = bad if comm.rank == 1 else 0
        errors = []
        for call in (lambda: comm.broadcast_object(obj, 1), lambda: comm.all_gather_object(obj)):
            with pytest.raises((TypeError, pynccl.InvalidArgumentError, pynccl.InvalidUsageError)) as caught:
                call()
            errors.append(str(caught.value))
        assert comm.all_gather_object(comm.rank) == [0, 1, 2]
        return errors

    others, one, _ = ranks(rank)
    assert all("object of rank 1 cannot be sent" in text for text in others)
    assert all(words in text for text in one)


def test_an_object_that_contains_itself_is_refused(alone: pynccl.Communicator) -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TypeError, match=r"obj\[0\] contains itself"):
        alone.broadcast_object(value)


def test_no_message_makes_the_reader_do_anything_but_build_values_or_refuse() -> None:
    from pynccl import objects

    good = objects.encode("call", {"a": [b"xyz", np.arange(3)]})
    assert repr(objects.decode("call", good)) == "{'a': [b'xyz', array([0, 1, 2])]}"
    for cut in range(len(good)):
        with pytest.raises(pynccl.InvalidArgumentError, match="damaged"):
            objects.decode("call", good[:cut])
    for text in (b'{"$":"array","t":"O","s":[1],"n":8}', b'{"$":"eval","v":"1"}', b'{"a":1}', b"[" * 100000):
        message = len(text).to_bytes(8, "little") + text + bytes(8)
        with pytest.raises(pynccl.InvalidArgumentError, match="damaged"):
            objects.decode("call", message)

"""A result code becomes one exception, with everything a person needs in its message."""

from __future__ import annotations

import pickle
from typing import cast

import pytest

from pynccl.abi import (
    InProgressError,
    InternalError,
    InvalidArgumentError,
    InvalidUsageError,
    Library,
    LibraryNotFoundError,
    MissingFunctionError,
    NcclError,
    NcclSystemError,
    NcclTimeoutError,
    RemoteError,
    Result,
    UnhandledCudaError,
    check,
)
from pynccl.abi.errors import KINDS, error_for

CLASSES = {
    1: UnhandledCudaError,
    2: NcclSystemError,
    3: InternalError,
    4: InvalidArgumentError,
    5: InvalidUsageError,
    6: RemoteError,
    8: NcclTimeoutError,
}


class Fake:
    """As much of a library as errors ask for."""

    def __init__(self, text: bytes | None = b"", functions: tuple[str, ...] = ("ncclGetLastError",)) -> None:
        self.text, self.functions = text, functions
        self.asked: list[int | None] = []

    def has(self, name: str) -> bool:
        return name in self.functions

    def ncclGetLastError(self, comm: int | None) -> bytes | None:
        self.asked.append(comm)
        return self.text


def library(text: bytes | None = b"", functions: tuple[str, ...] = ("ncclGetLastError",)) -> Library:
    return cast(Library, Fake(text, functions))


def test_success_asks_the_library_nothing() -> None:
    assert check(cast(Library, None), 0, "ncclSend") is Result.SUCCESS


def test_in_progress_is_returned_and_not_raised() -> None:
    assert check(library(), 7, "ncclCommFinalize") is Result.IN_PROGRESS


@pytest.mark.parametrize("code", CLASSES)
def test_each_code_has_its_class(code: int) -> None:
    with pytest.raises(NcclError) as caught:
        check(library(), code, "ncclSend")
    assert type(caught.value) is CLASSES[code]
    assert caught.value.code == code


def test_every_result_but_success_has_a_row() -> None:
    assert set(KINDS) == set(Result) - {Result.SUCCESS}
    assert KINDS[7].error is InProgressError


@pytest.mark.parametrize("code", [9, 42, -1])
def test_an_unknown_code_is_an_error_with_the_number(code: int) -> None:
    with pytest.raises(NcclError, match=rf"ncclSend: unknown result \({code}\)") as caught:
        check(library(), code, "ncclSend")
    assert type(caught.value) is NcclError
    assert caught.value.code == code


def test_the_message_has_call_code_text_rank_and_communicator() -> None:
    fake = Fake(b"count 3 differs from 4 on rank 0\n")
    with pytest.raises(InvalidArgumentError) as caught:
        check(cast(Library, fake), 4, "ncclAllReduce", comm=0x1234, rank=2, comm_name="dp")
    assert str(caught.value) == (
        "ncclAllReduce: ncclInvalidArgument (4): count 3 differs from 4 on rank 0 [rank 2, communicator 'dp']"
    )
    assert fake.asked == [0x1234]
    error = caught.value
    assert (error.call, error.rank, error.comm_name) == ("ncclAllReduce", 2, "dp")
    assert error.detail == "count 3 differs from 4 on rank 0"


@pytest.mark.parametrize("text", [None, b"", b" \n"])
def test_with_no_text_from_the_library_the_message_says_what_to_do(text: bytes | None) -> None:
    with pytest.raises(RemoteError, match="look at the other ranks' output"):
        check(library(text), 6, "ncclAllReduce")


def test_a_library_older_than_last_error_texts_is_not_asked() -> None:
    with pytest.raises(NcclSystemError, match="check memory"):
        check(library(b"never", functions=()), 2, "ncclAllReduce")


def test_text_in_a_broken_encoding_does_not_hide_the_error() -> None:
    with pytest.raises(InternalError, match="bad \ufffd byte"):
        check(library(b"bad \xff byte"), 3, "ncclAllReduce")


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (InvalidArgumentError, ValueError),
        (NcclTimeoutError, TimeoutError),
        (LibraryNotFoundError, OSError),
        (MissingFunctionError, AttributeError),
        (NcclError, RuntimeError),
    ],
)
def test_errors_are_also_the_builtin_that_people_expect(
    error: type[NcclError], builtin: type[Exception]
) -> None:
    assert issubclass(error, builtin)
    with pytest.raises(builtin, match="words"):
        raise error("words")


@pytest.mark.parametrize("kind", [kind.error for kind in KINDS.values()])
def test_errors_survive_the_way_to_another_process(kind: type[NcclError]) -> None:
    sent = kind("words", code=4, call="ncclSend", detail="text", rank=1, comm_name="dp")
    got = pickle.loads(pickle.dumps(sent))
    assert type(got) is kind
    assert str(got) == "words"
    assert vars(got) == vars(sent)


def test_errors_made_from_a_code_survive_too() -> None:
    got = pickle.loads(pickle.dumps(error_for(8, "ncclSend", rank=0)))
    assert isinstance(got, NcclTimeoutError)
    assert (got.code, got.rank) == (8, 0)

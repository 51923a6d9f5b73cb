"""Structures start as NCCL wants them, and take only what fits."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import pytest

from pynccl.abi import (
    DataType,
    EncryptionMode,
    RedOp,
    ncclCollConfig_t,
    ncclConfig_t,
    ncclConfigExt_t,
    ncclEncryptionConfig_t,
    ncclSimInfo_t,
    ncclUniqueId,
    ncclWaitSignalDesc_t,
)
from pynccl.abi.types import Versioned

INT_MIN = -(2**31)


def test_what_is_not_set_is_unset_and_not_zero() -> None:
    config = ncclConfig_t.initializer()
    assert (config.size, config.magic, config.version) == (120, 0xCAFEBEEF, 23203)
    assert (config.blocking, config.maxCTAs, config.nvlsHostMode) == (INT_MIN, INT_MIN, INT_MIN)
    assert (config.netName, config.commName) == (None, None)


def test_fields_are_set_by_name_and_none_leaves_them_unset() -> None:
    config = ncclConfig_t.initializer(blocking=False, minCTAs=4, maxCTAs=None, commName="dp")
    assert (config.blocking, config.minCTAs, config.maxCTAs, config.commName) == (0, 4, INT_MIN, b"dp")


def test_the_other_structures_have_initialisers_of_their_own() -> None:
    assert ncclCollConfig_t.initializer(algSelection="tree,ring").forceAlgSelection == 1
    assert ncclSimInfo_t.initializer().magic == 0x74685283
    assert ncclSimInfo_t.initializer().estimatedTime == -1.0
    assert ncclEncryptionConfig_t.initializer().mode == EncryptionMode.NONE
    waits = ncclWaitSignalDesc_t(opCnt=2, peer=1)
    assert (waits.opCnt, waits.peer, waits.sigIdx, waits.ctx) == (2, 1, 0, 0)


def test_two_structures_share_nothing() -> None:
    ncclConfig_t.initializer(blocking=0)
    assert ncclConfig_t.initializer().blocking == INT_MIN


@pytest.mark.parametrize("name", ["nvls", "size", "magic", "version", "FIELDS"])
def test_an_unknown_field_names_the_known_ones(name: str) -> None:
    with pytest.raises(
        TypeError, match=rf"ncclConfig_t has no field '{name}' to set; .*blocking, .*nvlsHostMode"
    ):
        ncclConfig_t.initializer(**{name: 1})


@pytest.mark.parametrize(
    ("field", "value", "error", "text"),
    [
        (
            "minCTAs",
            2**31,
            ValueError,
            "2147483648 does not fit; pass a value from -2147483648 to 2147483647",
        ),
        ("minCTAs", 1.0, TypeError, "1.0 is not an integer"),
        ("minCTAs", "4", TypeError, "'4' is not an integer"),
        ("commName", 7, TypeError, "7 is not text"),
        ("commName", "a\0b", ValueError, "contains a NUL"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(
    field: str, value: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=rf"ncclConfig_t.{field} \(.*\): .*{text}"):
        ncclConfig_t.initializer(**{field: value})


def test_a_profiler_tag_has_64_bits() -> None:
    assert ncclCollConfig_t.initializer(userProfilerTag=2**64 - 1).userProfilerTag == 2**64 - 1
    with pytest.raises(ValueError, match="does not fit"):
        ncclCollConfig_t.initializer(userProfilerTag=-1)


def test_text_lives_as_long_as_its_structure() -> None:
    config = ncclConfig_t.initializer(commName="".join(["a long name ", "that nobody else holds"]))
    address = ctypes.cast(ctypes.byref(config, ncclConfig_t.commName.offset), ctypes.POINTER(ctypes.c_char_p))
    gc.collect()
    bytearray(1 << 20)
    assert address[0] == b"a long name that nobody else holds"


def test_vendor_options_are_linked_and_kept() -> None:
    config = ncclCollConfig_t.initializer(ext=ncclConfigExt_t(key=(7, 1)))
    gc.collect()
    assert (config.ext.contents.key.vendorId, config.ext.contents.key.optionId) == (7, 1)
    assert not config.ext.contents.next


def test_an_id_reads_back_all_128_bytes() -> None:
    pattern = bytes([0, 255, 0, 1] * 32)
    assert bytes(ncclUniqueId.from_buffer_copy(pattern)) == pattern
    assert bytes(ncclUniqueId.from_buffer_copy(pattern).internal) == pattern


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (ncclConfig_t.initializer(), "ncclConfig_t.initializer()"),
        (
            ncclConfig_t.initializer(blocking=0, commName="dp"),
            "ncclConfig_t.initializer(blocking=0, commName=b'dp')",
        ),
        (
            ncclEncryptionConfig_t.initializer(mode=1, psk="s3cret"),
            "ncclEncryptionConfig_t.initializer(mode=1, psk=...)",
        ),
    ],
)
def test_repr_shows_what_is_set_and_no_key(made: Versioned, text: str) -> None:
    assert repr(made) == text


def test_the_sizes_of_elements() -> None:
    assert {dtype.name: dtype.itemsize for dtype in DataType} == {
        "INT8": 1, "UINT8": 1, "INT32": 4, "UINT32": 4, "INT64": 8, "UINT64": 8, "FLOAT16": 2, "FLOAT32": 4,
        "FLOAT64": 8, "BFLOAT16": 2, "FLOAT8E4M3": 1, "FLOAT8E5M2": 1,
    }  # fmt: skip
    assert len(RedOp) == 5

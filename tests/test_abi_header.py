"""The tables agree with NVIDIA's own header, and a header that differs in anything is noticed."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from pynccl.abi import PROTOTYPES, header


@pytest.fixture(scope="module")
def text() -> str:
    """The header in the nvidia-nccl-cu12 wheel that this project pins."""
    files = importlib.metadata.files("nvidia-nccl-cu12") or []
    path = next(file for file in files if file.name == "nccl.h")
    return Path(str(path.locate())).read_text()


def test_the_tables_are_the_header(text: str) -> None:
    assert header.differences(text) == []


def test_there_are_73_functions_and_73_aliases(text: str) -> None:
    functions = [fact.split()[1] for fact in header.header_facts(text) if fact.startswith("function ")]
    assert len(PROTOTYPES) == 73
    assert sorted(functions) == sorted([*PROTOTYPES, *(f"p{name}" for name in PROTOTYPES)])


# One change a row: what to replace in the real header, by what, and the fact that must be reported.
CHANGES = {
    "a function appears": (
        "ncclResult_t  ncclGroupStart();",
        "ncclResult_t  ncclGroupStart(); ncclResult_t ncclNew(int x);",
        "function ncclNew",
    ),
    "a function disappears": ("ncclResult_t  ncclGroupEnd();", "", "function ncclGroupEnd"),
    "an alias disappears": ("ncclResult_t pncclGroupEnd();", "", "function pncclGroupEnd"),
    "a result changes": (
        "void ncclParamDumpAll(void);",
        "ncclResult_t ncclParamDumpAll(void);",
        "ncclParamDumpAll",
    ),
    "an argument's type changes": (
        "ncclMemAlloc(void** ptr, size_t size);",
        "ncclMemAlloc(void** ptr, int size);",
        "function ncclMemAlloc",
    ),
    "an argument's name changes": (
        "ncclMemAlloc(void** ptr, size_t size);",
        "ncclMemAlloc(void** ptr, size_t bytes);",
        "function ncclMemAlloc",
    ),
    "an argument becomes const": ("ncclMemFree(void *ptr);", "ncclMemFree(const void *ptr);", "ncclMemFree"),
    "arguments change places": (
        "ncclCommSplit(ncclComm_t comm, int color, int key,",
        "ncclCommSplit(ncclComm_t comm, int key, int color,",
        "function ncclCommSplit",
    ),
    "an argument appears": (
        "ncclCommAbort(ncclComm_t comm)",
        "ncclCommAbort(ncclComm_t comm, int how)",
        "ncclCommAbort",
    ),
    "an argument disappears": (
        "ncclCommRevoke(ncclComm_t comm, int revokeFlags)",
        "ncclCommRevoke(ncclComm_t comm)",
        "function ncclCommRevoke",
    ),
    "an enumerator's value changes": ("ncclMin        = 3", "ncclMin        = 7", "ncclRedOp_t.ncclMin"),
    "an enumerator appears": (
        "ncclNumTypes   = 12",
        "ncclNumTypes   = 12, ncclInt4 = 13",
        "ncclDataType_t.ncclInt4",
    ),
    "an enumerator disappears": (
        "ncclInt32      = 2, ncclInt        = 2,",
        "ncclInt32 = 2,",
        "ncclDataType_t.ncclInt:",
    ),
    "a computed enumerator changes": ("= 1 << 1,", "= 1 << 2,", "ncclNvlsHostModeDisableSymmetricMultimem"),
    "an enum appears": ("/* Data types */", "typedef enum { ncclA } ncclNew_t;", "ncclNew_t.ncclA"),
    "a member appears": ("  int hostCftMode;\n", "  int hostCftMode; int more;\n", "ncclConfig_t member 25"),
    "a member disappears": ("  int numRmaSig;\n", "", "ncclConfig_t member"),
    "a member's type changes": (
        "    float estimatedTime;",
        "    double estimatedTime;",
        "ncclSimInfo_t member 3",
    ),
    "a member's name changes": ("  int sigIdx; ", "  int signal; ", "ncclWaitSignalDesc_t member 2"),
    "a nested member changes": ("    int vendorId; ", "    long vendorId; ", "ncclConfigExt_t member 1"),
    "an array changes": (
        "#define NCCL_UNIQUE_ID_BYTES 128",
        "#define NCCL_UNIQUE_ID_BYTES 64",
        "ncclUniqueId member 0",
    ),
    "a structure appears": ("/* Data types */", "typedef struct { int a; } ncclNew_t;", "ncclNew_t member 0"),
    "a handle appears": ("/* Data types */", "typedef struct ncclX* ncclX_t;", "handle ncclX_t"),
    "an initial value changes": (
        "  1,                                        /* forceAlgSelection */",
        "  0,                                        /* forceAlgSelection */",
        "NCCL_COLLCONFIG_INITIALIZER value 9",
    ),
    "an initial value disappears": (
        "  NCCL_CONFIG_UNDEF_PTR,                    /* tls psk */",
        "  ",
        "NCCL_ENCRYPTION_CONFIG_INITIALIZER value 4",
    ),
    "another structure is measured": (
        "sizeof(ncclSimInfo_t),",
        "sizeof(ncclConfig_t),",
        "NCCL_SIM_INFO_INITIALIZER value 0",
    ),
    "a magic number changes": ("0x74685283,", "0x74685284,", "NCCL_SIM_INFO_INITIALIZER value 1"),
    "a flag changes": (
        "#define NCCL_SHRINK_ABORT 0x01",
        "#define NCCL_SHRINK_ABORT 0x02",
        "NCCL_SHRINK_ABORT",
    ),
    "a flag appears": (
        "#define NCCL_WIN_GIN_ONLY 0x04",
        "#define NCCL_WIN_X 16\n#define NCCL_WIN_GIN_ONLY 0x04",
        "NCCL_WIN_X",
    ),
    "the version changes": (
        "#define NCCL_VERSION_CODE 23203",
        "#define NCCL_VERSION_CODE 23204",
        "NCCL_VERSION_CODE",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_header_is_noticed(text: str, change: str) -> None:
    old, new, fact = CHANGES[change]
    assert text.count(old) >= 1, "the header no longer has what this row changes"
    found = header.differences(text.replace(old, new, 1))
    assert any(fact in line for line in found), found


def test_a_value_that_cannot_be_read_is_an_error_and_not_a_pass(text: str) -> None:
    with pytest.raises(ValueError, match="SOMETHING"):
        header.differences(
            text.replace("#define NCCL_SUSPEND_MEM 0x01", "#define NCCL_SUSPEND_MEM SOMETHING", 1)
        )


def test_the_command_prints_the_differences_and_fails(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nccl.h"
    path.write_text(text)
    assert header.main([str(path)]) == 0
    assert "no difference in" in capsys.readouterr().out
    path.write_text(text.replace("ncclMin        = 3", "ncclMin        = 7"))
    assert header.main([str(path)]) == 1
    assert capsys.readouterr().out == "ncclRedOp_t.ncclMin: the header has 7, the tables have 3\n"


def test_the_command_finds_the_installed_header() -> None:
    assert header.installed_header().is_file()

"""The C compiler agrees with the tables: sizes, offsets, initial bytes, enumerators, constants, declarations.

NCCL's header wants CUDA's; three stubs with the few types it uses stand in for those.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pynccl.abi import PROTOTYPES
from pynccl.abi.types import C_TYPES, CONSTANTS, ENUMS, STRUCTS, Versioned

STUBS = {
    "cuda_runtime.h": """
#include <stddef.h>
typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
""",
    "cuda_fp16.h": "",
    "cuda_bf16.h": "",
}
WHEEL = importlib.metadata.files("nvidia-nccl-cu12") or []
HEADER = next(Path(str(file.locate())) for file in WHEEL if file.name == "nccl.h")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stubs, in which to compile."""
    made = tmp_path_factory.mktemp("c")
    for name, text in STUBS.items():
        (made / name).write_text(text)
    return made


def compile_c(folder: Path, source: str) -> str:
    """Compile a program that includes nccl.h into ``a.out``; gives the compiler's complaints, "" for none."""
    (folder / "main.c").write_text(source)
    flags = ["-std=c11", "-Wall", "-Werror", "-DNCCL_OS_LINUX", "-Wno-deprecated-declarations"]
    command = ["cc", *flags, f"-I{folder}", f"-I{HEADER.parent}", "main.c", "-o", "a.out"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60).stderr


@pytest.fixture(scope="module")
def measured(folder: Path) -> dict[str, str]:
    """What a C program that includes the header prints about it: one fact a line, as ``fact=text``."""
    lines = [f'printf("{fact}={form}\\n", {expression});' for fact, form, expression in questions()]
    for name, struct in STRUCTS.items():
        if issubclass(struct, Versioned):
            lines.append(f'{{ {name} made = {struct.INITIALIZER}; dump("{name}", &made, sizeof made); }}')
    assert compile_c(folder, PROGRAM.replace("BODY", "\n".join(lines))) == ""
    ran = subprocess.run([folder / "a.out"], capture_output=True, text=True, timeout=60, check=True)
    return dict(line.split("=", 1) for line in ran.stdout.splitlines())


PROGRAM = """
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <nccl.h>
static void dump(const char *name, const void *bytes, size_t size) {
  printf("initial %s=", name);
  for (size_t i = 0; i < size; i++) printf("%02x", ((const unsigned char *)bytes)[i]);
  printf("\\n");
}
int main(void) {
BODY
  return 0;
}
"""


def questions() -> Iterator[tuple[str, str, str]]:
    """(fact, printf format, C expression) for everything with a number."""
    for name, struct in STRUCTS.items():
        yield f"sizeof {name}", "%zu", f"sizeof({name})"
        yield f"alignof {name}", "%zu", f"_Alignof({name})"
        for field, _ in members(struct):
            yield f"offsetof {name}.{field}", "%zu", f"offsetof({name}, {field})"
            yield f"sizeof {name}.{field}", "%zu", f"sizeof((({name} *)0)->{field})"
    for enum, enumerators in ENUMS.items():
        yield f"sizeof {enum}", "%zu", f"sizeof({enum})"
        for name in enumerators:
            yield f"enumerator {name}", "%d", f"(int){name}"
    for name, value in CONSTANTS.items():
        if isinstance(value, str):
            yield f"constant {name}", "%s", name
        elif value is not None:
            yield f"constant {name}", "%.1f", f"(double){name}"


Layout = Iterator[tuple[str, tuple[int, int]]]


def members(struct: type[ctypes.Structure | ctypes.Union], prefix: str = "", base: int = 0) -> Layout:
    """(name, (offset, size)) of each member as ctypes lays them out, nested ones as ``key.vendorId``."""
    for name, ctype in ((row[0], row[1]) for row in struct._fields_):
        place = getattr(struct, name)
        yield f"{prefix}{name}", (base + place.offset, place.size)
        if issubclass(ctype, (ctypes.Structure, ctypes.Union)):
            yield from members(ctype, f"{prefix}{name}.", base + place.offset)


@pytest.mark.parametrize("name", STRUCTS)
def test_sizes_and_offsets_are_the_compilers(measured: dict[str, str], name: str) -> None:
    struct = STRUCTS[name]
    assert int(measured[f"sizeof {name}"]) == ctypes.sizeof(struct)
    assert int(measured[f"alignof {name}"]) == ctypes.alignment(struct)
    for field, (offset, size) in members(struct):
        in_c = int(measured[f"offsetof {name}.{field}"]), int(measured[f"sizeof {name}.{field}"])
        assert in_c == (offset, size), field


@pytest.mark.parametrize("name", [name for name, struct in STRUCTS.items() if issubclass(struct, Versioned)])
def test_an_initializer_gives_the_bytes_of_the_c_macro(measured: dict[str, str], name: str) -> None:
    struct = STRUCTS[name]
    assert issubclass(struct, Versioned)
    mine, in_c = bytes(struct.initializer()), bytes.fromhex(measured[f"initial {name}"])
    assert len(mine) == len(in_c)
    for field, (offset, size) in members(struct):  # padding may hold anything
        assert mine[offset : offset + size] == in_c[offset : offset + size], field


@pytest.mark.parametrize("enum", ENUMS)
def test_enumerators_are_the_compilers(measured: dict[str, str], enum: str) -> None:
    assert {name: int(measured[f"enumerator {name}"]) for name in ENUMS[enum]} == dict(ENUMS[enum])


def test_enums_are_passed_as_int(measured: dict[str, str]) -> None:
    for enum in ENUMS:
        if enum in C_TYPES:
            assert int(measured[f"sizeof {enum}"]) == ctypes.sizeof(C_TYPES[enum])


def test_constants_are_the_compilers(measured: dict[str, str]) -> None:
    for name, value in CONSTANTS.items():
        if isinstance(value, str):
            assert measured[f"constant {name}"] == value
        elif value is not None:
            assert float(measured[f"constant {name}"]) == value, name


def declarations(change: tuple[str, str] = ("", "")) -> str:
    listed = "".join(f"{prototype.declaration};\n" for prototype in PROTOTYPES.values())
    return f"#include <nccl.h>\n{listed.replace(*change)}int main(void) {{ return 0; }}\n"


def test_the_compiler_accepts_every_declaration_of_the_table_beside_the_headers(folder: Path) -> None:
    assert compile_c(folder, declarations()) == ""


@pytest.mark.parametrize(
    "change",
    [
        ("ncclMemFree(void*", "ncclMemFree(const void*"),
        ("size_t sendcount", "int sendcount"),
        ("void nccl", "int nccl"),
    ],
)
def test_the_compiler_refuses_a_declaration_that_differs(folder: Path, change: tuple[str, str]) -> None:
    assert declarations(change) != declarations()
    assert "conflicting types" in compile_c(folder, declarations(change))

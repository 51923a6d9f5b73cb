"""Builds the null library, twice as the host library is: for pynccl, and as CuPy's `libnccl.so.2`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pynccl.host import build

__all__ = ["DEFAULT_OUT", "Null", "build_null"]

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "null_library.c"
DEFAULT_OUT = HERE.parent.parent / "build" / "bench" / "null"

# Functions that do nothing look at no argument.
FLAGS = (*build.COMPILE_FLAGS, *build.OPTIMIZE_FLAGS, "-Wno-unused-parameter", f"-I{build.SOURCE_DIR}")


@dataclass(frozen=True)
class Null:
    """The two files: the same code under two names, of which a process may have both."""

    library: Path
    preload: Path


def build_null(out: Path = DEFAULT_OUT) -> Null:
    """Compile into ``out`` and return where the files are. BuildError says what failed, or what is missing.

    Needs a clone: the source is compiled against the host library's header.
    """
    if not (build.SOURCE_DIR / "nccl_abi.h").is_file():
        raise build.BuildError(f"the null library needs {build.SOURCE_DIR / 'nccl_abi.h'}; run from a clone")
    made = Null(out / "libpynccl_null.so", out / "preload" / "libnccl.so.2")
    for path in (made.library, made.preload):
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.{os.getpid()}")  # others may have the old file mapped
        command = [*build.compiler(), *FLAGS, *build.LINK_FLAGS, f"-Wl,-soname,{path.name}"]
        try:
            build.run([*command, str(SOURCE), "-o", str(fresh)], f"build {path.name}")
            os.replace(fresh, path)
        finally:
            fresh.unlink(missing_ok=True)
    return made

"""Single files of the host library, under sanitizers: finding each other, shared memory, the heap, streams.

The tests are written in C (tests/c/test_*.c), as scenes that run in a process each; this file builds them and
plays them one by one. A scene passes when its process ends with 0 and says nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from pynccl.host import build

FOLDER = Path(__file__).resolve().parent / "c"

# The part under test is included by its test; these are what it needs besides.
OTHER_SOURCES = {"segment": [], "bootstrap": [], "heap": ["segment.c"], "stream": []}
SANITIZERS = ("address,undefined", "thread")
# Scenes that end with threads running, on purpose: ThreadSanitizer would call that a leak.
LEAVE_THREADS = ("a_process_ends_whatever_its_streams_are_doing",)


def scenes(part: str) -> list[str]:
    return re.findall(r"^SCENE\((\w+)\)", (FOLDER / f"test_{part}.c").read_text(), re.MULTILINE)


@cache
def program(part: str, sanitizer: str, folder: Path) -> Path:
    target = folder / f"{part}-{sanitizer.replace(',', '-')}"
    toolchain = build.find_toolchain(sanitize=sanitizer, werror=True)
    files = [
        FOLDER / f"test_{part}.c",
        *(build.SOURCE_DIR / name for name in ["error.c", *OTHER_SOURCES[part]]),
    ]
    build.run(
        [
            *toolchain.cc,
            *toolchain.compile_flags,
            f"-I{build.SOURCE_DIR}",
            *map(str, files),
            "-o",
            str(target),
        ],
        f"build the scenes of {part}.c",
    )
    return target


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parts")


@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize(
    ("part", "scene"), [(part, scene) for part in OTHER_SOURCES for scene in scenes(part)]
)
def test_part(part: str, scene: str, sanitizer: str, programs: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    if scene in LEAVE_THREADS:
        environment["TSAN_OPTIONS"] = "report_thread_leaks=0"
    done = subprocess.run(
        [str(program(part, sanitizer, programs)), scene],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        env=environment,
    )
    assert (done.returncode, done.stdout) == (0, "")

"""The host library's C interface under the sanitizers: threads as ranks, random calls, every result checked.

The program is tests/c/stress.c and its neighbours; it sees only what the library exports. To run one scenario
alone, as a failure names it:

    build/stress/thread/stress --first 3 --only puts_and_signals
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from pynccl.host import build

PROGRAM = (
    "stress",
    "world",
    "calls",
    "collectives",
    "ahead",
    "messages",
    "schedules",
    "streams",
    "lifecycle",
    "errors",
)

# Enough seeds for half a minute on two busy cores.
SEEDS = {"address,undefined": 20, "thread": 5}

# A report ends the run; what the sanitizers find must not pass because something else went well.
OPTIONS = {
    "ASAN_OPTIONS": "halt_on_error=1:exitcode=66:detect_leaks=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=66:second_deadlock_stack=1",
}


@pytest.mark.timeout(300)  # it also compiles the library
@pytest.mark.parametrize("sanitizer", SEEDS)
def test_ranks_as_threads_keep_every_promise_under(sanitizer: str, repo: Path) -> None:
    command = [str(build_stress(repo, sanitizer)), "--seeds", str(SEEDS[sanitizer])]
    done = run(command)
    if "unexpected memory mapping" in done.stdout:
        # ThreadSanitizer before GCC 14 cannot start where addresses are randomised over more than 28 bits.
        done = run(["setarch", "-R", *command])
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-8000:]}"
    assert "stress OK" in done.stdout


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, **OPTIONS, "PYNCCL_TIMEOUT": "60"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=200,
    )


def build_stress(repo: Path, sanitizer: str) -> Path:
    """The program and the library, both with the sanitizer, in build/stress; objects are kept."""
    folder = repo / "build" / "stress" / sanitizer.replace(",", "-")
    library = build.build(folder, sanitize=sanitizer).library
    toolchain = build.find_toolchain(sanitize=sanitizer)
    program = folder / "stress"
    command = [
        *toolchain.cc,
        *toolchain.compile_flags,
        "-Werror",
        f"-I{build.SOURCE_DIR}",
        *[str(repo / "tests" / "c" / f"{name}.c") for name in PROGRAM],
        *["-o", str(program), str(library), f"-Wl,-rpath,{library.parent}"],
    ]
    build.run(command, "compile the stress")
    return program

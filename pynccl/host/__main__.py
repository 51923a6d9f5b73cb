"""Run another NCCL client on the host library.

`python -m pynccl.host` prints the path of the host library's `libnccl.so.2`, for `LD_PRELOAD`.
`python -m pynccl.host --exec CMD ...` runs a command with it preloaded.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pynccl.host import preload_path

__all__ = ["main", "preload_environment"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pynccl.host",
        description="Print the path of the host library's libnccl.so.2, or run a command with it preloaded.",
    )
    parser.add_argument(
        "--exec",
        dest="command",
        nargs=argparse.REMAINDER,
        metavar="CMD ...",
        help="run this command, all the words that follow, with the host library before any other libnccl",
    )
    command = parser.parse_args(argv).command
    if command == []:
        parser.error("--exec: no command was given; say it as `--exec python train.py`")
    try:
        preload = preload_path()
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if command is None:
        print(preload)
        return 0
    try:
        os.execvpe(command[0], command, preload_environment(os.environ, preload))
    except OSError as error:
        print(f"error: --exec: cannot run {command[0]!r}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126  # as a shell says it


def preload_environment(environment: Mapping[str, str], preload: Path) -> dict[str, str]:
    """The environment with the library preloaded, in front of whatever was preloaded already.

    Its folder goes in front of LD_LIBRARY_PATH too, for clients that open "libnccl.so.2" by name themselves.
    """
    first = {"LD_PRELOAD": str(preload), "LD_LIBRARY_PATH": str(preload.parent)}
    return {**environment, **{name: _before(path, environment.get(name)) for name, path in first.items()}}


def _before(first: str, rest: str | None) -> str:
    return f"{first}:{rest}" if rest else first


if __name__ == "__main__":
    sys.exit(main())

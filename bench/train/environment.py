"""Where the peers run: a virtual environment of their own, made when first needed.

Torch brings OpenMP, MKL and 400 MB of libraries: in our own ranks they would change what is measured.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["PEER_PACKAGES", "VENV", "peer_python"]

PEER_PACKAGES = ("torch==2.13.0",)
VENV = Path(__file__).resolve().parent.parent.parent / "build" / "bench" / "venv-torch"


def peer_python(folder: Path = VENV, packages: Sequence[str] = PEER_PACKAGES) -> str:
    """The interpreter of the environment `folder`; made, and `packages` installed, if it is not there.

    OSError, with what pip said, if that fails: no peer, no comparison.
    """
    python, complete = folder / "bin" / "python", folder / ".complete"
    wanted = "\n".join(packages)
    if complete.is_file() and complete.read_text() == wanted and python.exists():
        return str(python)
    print(f"making {folder} with {', '.join(packages)} (once; minutes)", file=sys.stderr)
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages],
    ):
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            raise OSError(
                f"{' '.join(command)} failed:\n{done.stdout[-3000:]}\n"
                f"Give pip an index that has {', '.join(packages)}, or make the comparison without this peer"
            )
    complete.write_text(wanted)
    return str(python)

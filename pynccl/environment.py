"""The one table of environment variables that pynccl honours, with what each means.

Read by ``python -m pynccl`` and the documentation. The values themselves are read where they are used; what
the launchers set is taken from the rendezvous' own table of launchers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pynccl.rendezvous import LAUNCHERS


class Variable(NamedTuple):
    """One environment variable. The value of a secret one is never shown."""

    name: str
    meaning: str
    secret: bool = False

    def shown(self, environ: Mapping[str, str]) -> str | None:
        """Its current value, "set" for a secret, None when it is not set."""
        value = environ.get(self.name)
        return "set" if value is not None and self.secret else value


# What each column of the launchers' table says about this process.
_PLACES = {
    "rank": "this rank, from 0",
    "size": "number of ranks",
    "local_rank": "this rank among those of its machine",
    "local_size": "number of ranks on this machine",
    "nodes": "number of machines",
    "node_list": "the machines; rank 0 runs on the first",
    "job": "tells one job from another",
}


def _from_launchers() -> Iterator[Variable]:
    meanings: dict[str, str] = {}
    users: dict[str, list[str]] = {}
    for launcher in LAUNCHERS:
        for column, meaning in _PLACES.items():
            for name in getattr(launcher, column):
                meanings.setdefault(name, meaning)
                users.setdefault(name, []).append(launcher.name)
    for name, meaning in meanings.items():
        yield Variable(name, f"{meaning} ({', '.join(users[name])})")


VARIABLES = (
    Variable("PYNCCL_LIBRARY", "nccl, host, or a library's path; unset: nccl if a GPU is usable, else host"),
    Variable("PYNCCL_TIMEOUT", "seconds a rank waits for the others in host memory; unset: 600"),
    Variable(
        "PYNCCL_STREAMING_BYTES",
        "bytes in use beyond which results in host memory go past the caches; unset: their size",
    ),
    Variable(
        "PYNCCL_DIRECT_BYTES",
        "bytes from which ordinary arrays are read from the other process itself; unset: 4 MiB",
    ),
    Variable("PYNCCL_SECRET", "shared secret by which the ranks recognise each other at init", secret=True),
    Variable("PYNCCL_SECRET_FILE", "file (mode 0600) that holds the shared secret"),
    Variable("PYNCCL_INSECURE", "1: serve other machines even with no secret"),
    Variable("PYNCCL_PORT", "port on which rank 0 listens at init, whatever MASTER_PORT says"),
    Variable("MASTER_ADDR", "host name or address of rank 0"),
    Variable("MASTER_PORT", "port of rank 0, the first of a few that are tried"),
    Variable("TORCHELASTIC_USE_AGENT_STORE", "True: torchrun itself listens on MASTER_PORT"),
    *_from_launchers(),
    Variable("CUDA_VISIBLE_DEVICES", "GPUs this process may use; empty: none (CUDA)"),
    Variable("NCCL_HOME", "root folder of an NCCL installation, searched after the installed wheels"),
    Variable("CUDA_HOME", "root folder of a CUDA toolkit, searched for libnccl after NCCL_HOME"),
    Variable("CUDA_PATH", "the same as CUDA_HOME, searched after it"),
    Variable("LD_LIBRARY_PATH", "folders where the system's loader looks for libnccl"),
    Variable("LD_PRELOAD", "libraries put in front of all others, such as that of python -m pynccl.host"),
    Variable("NCCL_DEBUG", "WARN or INFO: reports of NVIDIA's libnccl on standard output"),
    Variable("NCCL_MULTI_RANK_GPU_ENABLE", "1: NVIDIA's libnccl allows several ranks on one GPU"),
)


def report(environ: Mapping[str, str] = os.environ) -> Iterator[dict[str, str | None]]:
    """Every variable as name, current value (see ``Variable.shown``) and meaning."""
    for variable in VARIABLES:
        yield {"name": variable.name, "value": variable.shown(environ), "meaning": variable.meaning}

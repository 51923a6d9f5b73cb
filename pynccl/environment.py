"""The one table of environment variables that pynccl honours, with what each means.

Read by ``python -m pynccl`` and the documentation. The values themselves are read where they are used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Variable(NamedTuple):
    """One environment variable. The value of a secret one is never shown."""

    name: str
    meaning: str
    secret: bool = False

    def shown(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """Its current value, "set" for a secret, None when it is not set."""
        value = environ.get(self.name)
        return "set" if value is not None and self.secret else value


VARIABLES = (
    Variable(
        "PYNCCL_LIBRARY",
        "library to load: nccl, host, or a path; unset: nccl where a GPU is usable, else host",
    ),
    Variable("PYNCCL_TIMEOUT", "seconds a rank waits for the others in host memory; unset: 600"),
    Variable("PYNCCL_SECRET", "shared secret by which the ranks recognise each other at init", secret=True),
    Variable("PYNCCL_SECRET_FILE", "file (mode 0600) that holds the shared secret"),
    Variable("PYNCCL_INSECURE", "1: serve other machines even with no secret"),
    Variable("RANK", "this rank, 0 to WORLD_SIZE - 1 (pynccl.launch, torchrun)"),
    Variable("WORLD_SIZE", "number of ranks"),
    Variable("LOCAL_RANK", "this rank among those of its machine"),
    Variable("LOCAL_WORLD_SIZE", "number of ranks on this machine"),
    Variable("MASTER_ADDR", "host name or address of rank 0"),
    Variable("MASTER_PORT", "port of rank 0"),
    Variable("OMPI_COMM_WORLD_RANK", "this rank (Open MPI's mpirun)"),
    Variable("OMPI_COMM_WORLD_SIZE", "number of ranks (Open MPI's mpirun)"),
    Variable("OMPI_COMM_WORLD_LOCAL_RANK", "this rank among those of its machine (Open MPI's mpirun)"),
    Variable("OMPI_COMM_WORLD_LOCAL_SIZE", "number of ranks on this machine (Open MPI's mpirun)"),
    Variable("PMI_RANK", "this rank (MPICH's mpiexec)"),
    Variable("PMI_SIZE", "number of ranks (MPICH's mpiexec)"),
    Variable("MPI_LOCALRANKID", "this rank among those of its machine (MPICH's mpiexec)"),
    Variable("MPI_LOCALNRANKS", "number of ranks on this machine (MPICH's mpiexec)"),
    Variable("SLURM_PROCID", "this rank (Slurm's srun)"),
    Variable("SLURM_NTASKS", "number of ranks (Slurm's srun)"),
    Variable("SLURM_LOCALID", "this rank among those of its machine (Slurm's srun)"),
    Variable("CUDA_VISIBLE_DEVICES", "GPUs this process may use; empty: none (CUDA)"),
    Variable(
        "NCCL_HOME", "root folder of an NCCL installation, searched for libnccl after the installed wheels"
    ),
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

"""What every test stands on: an environment that says nothing about pynccl, NCCL or a launcher."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import pynccl

REPO = Path(__file__).resolve().parent.parent

# What a launcher or a user's shell may have set, and what would change the outcome of a test.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PREFIXES = ("PYNCCL_", "NCCL_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_", "MPI_LOCAL")
# `make gpu-check` sets it, and the GPU tests need it: two ranks on one GPU.
KEPT = ("NCCL_MULTI_RANK_GPU_ENABLE",)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test, and each process that it starts, sees only what the test itself sets."""
    for name in list(os.environ):
        if name not in KEPT and (name in LAUNCHER_VARIABLES or name.startswith(PREFIXES)):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the source tree."""
    return REPO


@pytest.fixture
def alone() -> Iterator[pynccl.Communicator]:
    """A communicator of one rank on the host library."""
    with pynccl.Communicator(1, pynccl.get_unique_id("host"), 0, library="host", name="alone") as comm:
        yield comm


@pytest.fixture(scope="session")
def at_three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of step 3, saved at 3 ranks with full_shard; no test changes it."""
    from checkpoint_ranks import saved  # type: ignore[import-not-found]  # no other test needs the engine

    folder = tmp_path_factory.mktemp("checkpoints")
    saved(folder, keywords={"user": {"tokens": 12, "losses": [1.5, 1.25]}})
    return folder

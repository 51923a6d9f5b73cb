"""The host library under a client that was compiled against NVIDIA's: same names, same bits, no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CLIENT = Path(__file__).parent / "clients" / "cupy_nccl.py"


@pytest.mark.parametrize("n", [2, 3, 4])
def test_cupys_nccl_module_runs_unchanged_on_the_preloaded_host_library(n: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pynccl.host", "--exec", sys.executable, str(CLIENT), str(n)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line.split(":")[0] for line in lines] == [f"rank {rank} of {n}" for rank in range(n)]
    checks = {int(line.split(": ")[1].split()[0]) for line in lines}
    assert len(checks) == 1 and checks.pop() > 1000  # every rank made all the checks

"""What the tests of the communicator share: three ranks on the host library."""

from __future__ import annotations

from typing import Any

from pynccl.testing import run_ranks

N = 3


def ranks(fn: Any, n: int = N, **options: Any) -> list[Any]:
    """`fn(comm)` on n ranks; their results by rank."""
    return run_ranks(n, fn, library="host", **options)

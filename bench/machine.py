"""The machine that a measurement was made on, as the files of all benchmarks describe it."""

from __future__ import annotations

import contextlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["cpu_name", "describe", "version_of"]


def describe(*packages: str) -> dict[str, Any]:
    """CPU, usable cores, kernel, Python, the load now, and the versions of ``packages`` (None: not there)."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": [round(one, 2) for one in os.getloadavg()],
        "versions": {package: version_of(package) for package in packages},
    }


def cpu_name() -> str:
    """The CPU's name for people; the architecture where the kernel does not tell it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def version_of(package: str) -> str | None:
    """The installed version of a distribution."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

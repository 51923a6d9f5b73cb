"""What `import pynccl` costs beyond `import numpy`, in fresh processes: with CuPy there, and hidden."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

__all__ = ["has_cupy", "import_times"]

# What belongs to CuPy's wheel, as import names.
CUPY = ("cupy", "cupy_backends", "cupyx")

# NumPy comes first, so what is left is pynccl's own. Where CuPy is hidden, it is shown afterwards that no way
# to import it was left; and in both that pynccl did not import it.
CHILD = """
import json, sys, time
hidden, packages = json.loads(sys.argv[1])
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in packages:
            raise ModuleNotFoundError(f"{name} is hidden", name=name)
if hidden:
    sys.meta_path.insert(0, Hide())
begun = time.perf_counter()
import numpy
between = time.perf_counter()
import pynccl
ended = time.perf_counter()
assert not [name for name in packages if name in sys.modules], "pynccl imported CuPy"
if hidden:
    try:
        import cupy
    except ModuleNotFoundError:
        pass
    else:
        raise AssertionError("CuPy was not hidden")
print(json.dumps([1e3 * (between - begun), 1e3 * (ended - between)]))
"""


def has_cupy() -> bool:
    """Whether CuPy is installed for this Python (it is not imported)."""
    return importlib.util.find_spec("cupy") is not None


def import_times(rounds: int) -> list[dict[str, Any]]:
    """A row each for "with CuPy" (where it is installed) and "without CuPy": medians in milliseconds.

    RuntimeError, with the child's own words, when one fails.
    """
    kinds = {"without CuPy": True} if not has_cupy() else {"with CuPy": False, "without CuPy": True}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory(prefix="call_overhead.") as compiled:
        for number in range(rounds + 1):
            for name, hidden in kinds.items():
                once = _fresh(hidden, compiled)
                if number:  # the first only compiles
                    times[name].append(once)
    rows = []
    for name, taken in times.items():
        numpy, ours = (sorted(column) for column in zip(*taken, strict=True))
        rows.append(
            {
                "name": name,
                "numpy_ms": round(statistics.median(numpy), 2),
                "beyond_numpy_ms": round(statistics.median(ours), 2),
                "least_ms": round(ours[0], 2),
                "most_ms": round(ours[-1], 2),
            }
        )
    return rows


def _fresh(hidden: bool, compiled: str) -> tuple[float, float]:
    """Milliseconds of importing NumPy, and of pynccl after it; ``compiled`` is where bytecode is kept."""
    command = [sys.executable, "-c", CHILD, json.dumps([hidden, CUPY])]
    # A user's second import finds bytecode. So does this one, whatever the variables say and whoever owns
    # the folders of the packages.
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": compiled}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"import pynccl failed in a fresh process:\n{done.stderr.strip()}")
    numpy, ours = json.loads(done.stdout)
    return float(numpy), float(ours)

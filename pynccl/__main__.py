"""``python -m pynccl [--all | --json]``: what would be loaded here, and why; and what this machine offers.

The exit status is 0 when a library was loaded, 1 when none could be: the report then says why, with every
place that was searched. CuPy is looked up in the package metadata, not imported.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterator
from typing import Any

from pynccl import environment
from pynccl._version import __version__
from pynccl.abi import PROTOTYPES, NcclError, choose, gpus, load

_WIDEST_VALUE = 40  # a longer one, such as a search path, pushes its own line only

CUPY_DISTRIBUTIONS = (
    "cupy",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "cupy-cuda11x",
    "cupy-rocm-7-0",
    "cupy-rocm-5-0",
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pynccl", description="Show which library pynccl loads, and why."
    )
    parser.add_argument("--json", action="store_true", help="the whole report as JSON")
    parser.add_argument("--all", action="store_true", help="list environment variables that are not set, too")
    options = parser.parse_args(arguments)
    report = gather()
    text = json.dumps(report, indent=2) if options.json else "\n".join(as_text(report, options.all))
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `| head` has read enough
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # for the flush at exit
    return 1 if report["library"]["error"] else 0


def gather() -> dict[str, Any]:
    """The whole report, as plain data."""
    return {
        "pynccl": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "library": library(),
        "gpus": gpu(),
        "cupy": cupy(),
        "machine": machine(),
        "environment": list(environment.report()),
    }


def library() -> dict[str, Any]:
    """The library that ``load()`` gives here, or the error it raises."""
    found: dict[str, Any] = dict.fromkeys(("kind", "path", "version", "version_string", "reason", "error"))
    found |= {
        "searched": [],
        "functions": {"declared": len(PROTOTYPES), "present": 0, "missing": list(PROTOTYPES)},
    }
    try:
        found["reason"] = choose().reason
        lib = load()
    except NcclError as error:
        return found | {"error": str(error), "searched": _trail(getattr(error, "searched", ()))}
    missing = lib.missing()
    return found | {
        "kind": lib.kind,
        "path": lib.path,
        "version": lib.version,
        "version_string": lib.version_string,
        "searched": _trail(lib.searched),
        "functions": {
            "declared": len(PROTOTYPES),
            "present": len(PROTOTYPES) - len(missing),
            "missing": missing,
        },
    }


def _trail(searched: tuple[tuple[str, str], ...]) -> list[dict[str, str]]:
    return [{"place": place, "outcome": outcome} for place, outcome in searched]


def gpu() -> dict[str, Any]:
    """The GPUs that the CUDA driver shows to this process."""
    seen = gpus()
    return {
        "count": len(seen.devices),
        "devices": [device._asdict() for device in seen.devices],
        "cuda_version": seen.cuda_version,
        "reason": seen.reason or None,
    }


def cupy() -> dict[str, str | None]:
    """The installed CuPy, by the package metadata."""
    for name in CUPY_DISTRIBUTIONS:
        try:
            return {"version": importlib.metadata.version(name), "distribution": name}
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"version": None, "distribution": None}


def machine() -> dict[str, int | None]:
    """Memory and shared memory in bytes; cores of the machine and those this process may use."""
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "shm_bytes": shm.f_frsize * shm.f_blocks if shm else None,
        "shm_free_bytes": shm.f_frsize * shm.f_bavail if shm else None,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
    }


def as_text(report: dict[str, Any], every_variable: bool = False) -> Iterator[str]:
    """The report for people. Of the environment variables those that are set, or all."""
    lib, seen, installed, has = (report[part] for part in ("library", "gpus", "cupy", "machine"))
    yield f"pynccl {report['pynccl']}, Python {report['python']}, {report['platform']}"
    yield ""
    yield from _table(
        ("library", lib["kind"] or "none"),
        ("chosen", lib["reason"] or "-"),
        ("path", lib["path"] or "-"),
        ("version", f"{lib['version_string']} ({lib['version']})" if lib["version"] else "-"),
        ("functions", f"{lib['functions']['present']} of {lib['functions']['declared']} present"),
        *(
            [("missing", ", ".join(lib["functions"]["missing"]))]
            if lib["functions"]["missing"] and lib["path"]
            else []
        ),
        *([("error", lib["error"])] if lib["error"] else []),  # it lists the places itself
        *(("searched", f"{row['place']}: {row['outcome']}") for row in lib["searched"] if not lib["error"]),
    )
    yield ""
    yield from _table(
        ("GPUs", f"{seen['count']}" + (f" ({seen['reason']})" if seen["reason"] else "")),
        *((f"GPU {d['ordinal']}", f"{d['name']}, {_size(d['memory_bytes'])}") for d in seen["devices"]),
        *([("driver", f"for CUDA {seen['cuda_version']}")] if seen["cuda_version"] else []),
        (
            "CuPy",
            f"{installed['version']} ({installed['distribution']})"
            if installed["version"]
            else "not installed",
        ),
        ("/dev/shm", f"{_size(has['shm_bytes'])}, {_size(has['shm_free_bytes'])} free"),
        ("memory", _size(has["memory_bytes"])),
        ("cores", f"{has['cores']}, {has['cores_usable']} usable by this process"),
    )
    yield ""
    rows = [row for row in report["environment"] if every_variable or row["value"] is not None]
    values = ["(unset)" if row["value"] is None else row["value"] for row in rows]
    wide = max((len(row["name"]) for row in rows), default=0)
    wide_value = min(_WIDEST_VALUE, max(map(len, values), default=0))
    hidden = len(report["environment"]) - len(rows)
    yield "environment variables" + (f" ({hidden} more are not set: --all)" if hidden else "")
    for row, value in zip(rows, values, strict=True):
        yield f"  {row['name']:{wide}}  {value:{wide_value}}  {row['meaning']}"


def _table(*rows: tuple[str, str]) -> Iterator[str]:
    yield from (f"{name:12}{text}" for name, text in rows)


def _size(count: int | None) -> str:
    return "none" if count is None else f"{count / 2**30:.1f} GiB"


if __name__ == "__main__":
    sys.exit(main())

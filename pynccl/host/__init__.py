"""Where the host library's two files are. `build.py` makes them; `pynccl.abi` loads the first."""

from __future__ import annotations

from pathlib import Path

__all__ = ["library_path", "preload_path"]

_LIB = Path(__file__).resolve().parent / "lib"


def library_path() -> Path:
    """Absolute path of `libpynccl_host.so`, the file that pynccl itself loads.

    Raises FileNotFoundError, with the command that builds it, when it has not been built.
    """
    return _built(_LIB / "libpynccl_host.so")


def preload_path() -> Path:
    """Absolute path of the same library as `libnccl.so.2`, for `LD_PRELOAD` under another NCCL client.

    It is in a folder of its own, so that the folder can also go in front of `LD_LIBRARY_PATH`.
    Raises FileNotFoundError, with the command that builds it, when it has not been built.
    """
    return _built(_LIB / "preload" / "libnccl.so.2")


def _built(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(
            f"the host library is not built: {path} does not exist; build it with "
            "`python -m pynccl.host.build` (needs a C compiler) or `make setup`"
        )
    return path

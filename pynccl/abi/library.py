"""Finding, opening and asking a library that speaks NCCL's ABI.

Owned here: which library is chosen and why, where it is searched, and how its functions are reached. Several
libraries can be open at once: each is opened by absolute path with ``RTLD_LOCAL``, so none can answer for
another, and the host library that pynccl itself opens is not named ``libnccl.so.2``. ``ctypes.CDLL`` releases
the GIL in every call.

    lib = load("host")
    lib.ncclGetVersion(ctypes.byref(version))      # resolved at first use, argument types set from the table
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from pynccl.abi import driver
from pynccl.abi.errors import InvalidArgumentError, LibraryNotFoundError, MissingFunctionError, check
from pynccl.abi.prototypes import HOST_PROTOTYPES, PROTOTYPES, Prototype

Trail = tuple[tuple[str, str], ...]  # (place searched, what was found there), in order

SONAMES = ("libnccl.so.2", "libnccl.so")


class Library:
    """An open library. Its functions are attributes, looked up when first used.

    Attributes: ``kind`` ("nccl", "host" or "other"), ``path``, ``version`` (NCCL's version code, such as
    23203), ``reason`` (why it was chosen, at the first load of this path) and ``searched``, a (place,
    outcome) for each place.
    """

    def __init__(self, path: str, reason: str = "", searched: Trail = ()) -> None:
        self.path, self.reason, self.searched = path, reason, searched
        self._cdll = _open(path, searched)
        if not self.has("ncclGetVersion"):
            raise not_found(
                f"{path} can be opened but is not an NCCL library: it has no ncclGetVersion", searched
            )
        self.kind = self._kind()
        version = ctypes.c_int()
        check(self, self.ncclGetVersion(ctypes.byref(version)), "ncclGetVersion")
        self.version = version.value

    @property
    def version_string(self) -> str:
        """The version for people, such as "2.32.3"."""
        return version_string(self.version)

    def has(self, name: str) -> bool:
        """Whether the library exports this function."""
        return hasattr(self._cdll, name)

    def missing(self) -> list[str]:
        """The functions of NCCL's header that this library lacks."""
        return [name for name in PROTOTYPES if not self.has(name)]

    def __getattr__(self, name: str) -> Any:
        # Only called when the instance has no such attribute yet, so each function is looked up once.
        prototype = PROTOTYPES.get(name) or HOST_PROTOTYPES.get(name)
        if prototype is None:
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}, nor is it a function of NCCL's header"
            )
        try:
            function = self._cdll[
                name
            ]  # a new object each time: types set here are not seen through other handles
        except AttributeError:
            raise MissingFunctionError(_why_missing(self, prototype), call=name) from None
        function.argtypes, function.restype = prototype.argtypes, prototype.restype
        setattr(self, name, function)
        return function

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.kind} {self.version_string} {self.path}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return load, (self.path,)  # another process opens the same file

    def _kind(self) -> str:
        if self.has("pyncclVersion"):
            return "host"
        return "nccl" if os.path.basename(self.path).startswith("libnccl") else "other"


def load(which: str | os.PathLike[str] | Library | None = None) -> Library:
    """Open the communication library; the same object again for the same file.

    ``which`` is "nccl", "host", a path (anything with a "/"), or a file name for the system's loader such
    as "librccl.so.1". None means ``PYNCCL_LIBRARY``, and if that is not set: "nccl" when a CUDA device is
    usable, else "host". There is no falling back: when the chosen library cannot be opened,
    LibraryNotFoundError lists every place that was searched. InvalidArgumentError for any other name.
    """
    if isinstance(which, Library):
        return which
    choice = choose(which)
    path, searched = _locate(choice)
    if path not in _LOADED:
        # setdefault: when two threads get here together, both leave with the same object.
        _LOADED.setdefault(path, Library(path, choice.reason, searched))
    return _LOADED[path]


_LOADED: dict[str, Library] = {}


class Choice(NamedTuple):
    """Which library, before it is searched: "nccl", "host", a path or a file name; and why."""

    name: str
    reason: str


def choose(which: str | os.PathLike[str] | None = None) -> Choice:
    """What ``load(which)`` would look for, and the reason as a sentence."""
    if which is not None:
        return Choice(os.fspath(which), f"asked for by the caller: {os.fspath(which)!r}")
    if named := os.environ.get("PYNCCL_LIBRARY"):
        return Choice(named, f"asked for by the environment: PYNCCL_LIBRARY={named}")
    gpus = driver.gpus()
    if gpus.devices:
        return Choice(
            "nccl", f"automatic: {len(gpus.devices)} CUDA device(s) usable, first {gpus.devices[0].name}"
        )
    return Choice("host", f"automatic: no CUDA device is usable ({gpus.reason})")


def _locate(choice: Choice) -> tuple[str, Trail]:
    """The absolute path of the chosen library and the search that led there."""
    name = choice.name
    if name == "nccl":
        return find_nccl()
    if name == "host":
        return _find_host()
    if "/" in name:
        return os.path.realpath(os.path.expanduser(name)), ((name, "the path given"),)
    if ".so" in name:
        path, outcome = _ask_system([name])
        searched = ((f"the system's loader: {name}", outcome),)
        if path is None:
            raise not_found(f"cannot open {name}; a file in the current directory needs ./{name}", searched)
        return path, searched
    raise InvalidArgumentError(
        f"load: {name!r} is not a library ({choice.reason}); pass 'nccl', 'host', a path with a '/', or a "
        "file name such as 'librccl.so.1'",
        call="load",
    )


def _find_host() -> tuple[str, Trail]:
    from pynccl import host  # here, not above: the package must import before its host library is built

    try:
        path = os.path.realpath(host.library_path())
    except FileNotFoundError as error:
        raise not_found(str(error), (("pynccl's host library", "not built"),)) from error
    return path, (("pynccl's host library", f"found {path}"),)


# --- libnccl ------------------------------------------------------------------------------------------------


@functools.cache
def find_nccl() -> tuple[str, Trail]:
    """Where NVIDIA's (or a preloaded) libnccl is: the first of ``PLACES`` that has it. Found once."""
    trail = []
    for place, look in PLACES:
        path, outcome = look()
        trail.append((place, outcome))
        if path is not None:
            return path, tuple(trail)
    raise not_found(
        "no libnccl found; install one (pip install nvidia-nccl-cu12, or -cu13 for CUDA 13), give its path "
        "in PYNCCL_LIBRARY, or use host memory with PYNCCL_LIBRARY=host",
        tuple(trail),
    )


Found = tuple[str | None, str]  # an absolute path, or None; and the outcome in words


def _already_loaded() -> Found:
    # A second copy beside the one that CuPy or PyTorch opened would double its memory and its threads.
    for name in SONAMES:
        try:
            handle = ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
        except OSError:
            continue
        path = _path_of(handle)
        return path, f"found {path}"
    return None, "no"


def _ask_pathfinder() -> Found:
    # cuda-pathfinder's own loader opens with RTLD_GLOBAL, which would let libnccl's symbols answer for every
    # other library. Its header search knows the same wheels and environments and opens nothing; the library
    # lies beside.
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        include = find_nvidia_header_directory("nccl")
    except Exception as error:  # whatever it is, it is told in the outcome, and the next place is tried
        return None, f"not usable: {error}"
    if include is None:
        return None, "knows no NCCL here"
    return _look_in(_library_folders(Path(include).parent))


def _ask_environment() -> Found:
    roots = [
        (name, os.environ[name]) for name in ("NCCL_HOME", "CUDA_HOME", "CUDA_PATH") if os.environ.get(name)
    ]
    if not roots:
        return None, "none is set"
    return _look_in(folder for _, root in roots for folder in _library_folders(Path(root)))


def _ask_system(names: Iterable[str] = SONAMES) -> Found:
    refusals = []
    for name in names:
        try:
            path = _path_of(ctypes.CDLL(name))
        except OSError as error:
            refusals.append(str(error))
        else:
            return path, f"found {path}"
    return None, "; ".join(refusals)


#: Where libnccl is searched, in this order.
PLACES: tuple[tuple[str, Callable[[], Found]], ...] = (
    ("already loaded in this process", _already_loaded),
    ("cuda-pathfinder (wheels, conda, CUDA toolkit)", _ask_pathfinder),
    ("NCCL_HOME, CUDA_HOME, CUDA_PATH", _ask_environment),
    ("the system's loader (LD_LIBRARY_PATH, ld.so.cache)", _ask_system),
)


def _library_folders(root: Path) -> list[Path]:
    return [root / "lib", root / "lib64", root / "lib" / f"{platform.machine()}-linux-gnu"]


def _look_in(folders: Iterable[Path]) -> Found:
    looked = []
    for folder in folders:
        for name in SONAMES:
            if (folder / name).is_file():
                path = os.path.realpath(folder / name)
                return path, f"found {path}"
        looked.append(str(folder))
    return None, f"not in {', '.join(looked)}"


# --- opening ------------------------------------------------------------------------------------------------


def _open(path: str, searched: Trail) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(path, mode=os.RTLD_LOCAL)
    except OSError as error:
        raise not_found(f"cannot open {path}", (*searched, (path, str(error)))) from error


class _LinkMap(ctypes.Structure):
    """The start of the C library's ``struct link_map``, <link.h>."""

    _fields_ = [("l_addr", ctypes.c_void_p), ("l_name", ctypes.c_char_p)]


def _path_of(handle: ctypes.CDLL) -> str:
    """The absolute path of an open library, which the loader may have found by name alone."""
    dlinfo = ctypes.CDLL(None).dlinfo
    dlinfo.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    entry = ctypes.POINTER(_LinkMap)()
    if dlinfo(handle._handle, 2, ctypes.byref(entry)):  # 2 is RTLD_DI_LINKMAP
        raise OSError(f"dlinfo failed for {handle._name}")
    return os.path.realpath(os.fsdecode(entry.contents.l_name))


def not_found(message: str, searched: Trail) -> LibraryNotFoundError:
    """The error that lists every place searched."""
    lines = "".join(f"\n  {place}: {outcome}" for place, outcome in searched)
    error = LibraryNotFoundError(f"load: {message}. Searched:{lines}", call="load")
    error.searched = searched
    return error


# --- versions -----------------------------------------------------------------------------------------------


def version_string(code: int) -> str:
    """A version code as "major.minor.patch": X*1000+Y*100+Z up to 2.8, X*10000+Y*100+Z from 2.9 on."""
    unit = 1000 if code < 10000 else 10000
    return f"{code // unit}.{code % unit // 100}.{code % 100}"


def version_code(text: str) -> int:
    """The code of "2.29" or "2.30.4"; the inverse of ``version_string``."""
    major, minor, patch = (int(part) for part in f"{text}.0".split(".")[:3])
    return major * (1000 if (major, minor) <= (2, 8) else 10000) + minor * 100 + patch


def _why_missing(lib: Library, prototype: Prototype) -> str:
    loaded = f"the loaded library is {lib.version_string} ({lib.path})"
    if prototype.name in HOST_PROTOTYPES:
        if lib.kind == "host":
            return f"{prototype.name} is missing: {loaded}, an older build; run `python -m pynccl.host.build`"
        return f"{prototype.name} exists only in pynccl's host library, {loaded}; pass library='host'"
    if lib.version >= version_code(prototype.since):
        return f"{prototype.name} is in NCCL since {prototype.since}, but {loaded} and does not export it"
    return (
        f"{prototype.name} needs NCCL {prototype.since}, {loaded}; install a newer one or set PYNCCL_LIBRARY"
    )

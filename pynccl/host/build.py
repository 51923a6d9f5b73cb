"""Build the host library: `python -m pynccl.host.build`, or `python3 pynccl/host/build.py` with no install.

The one place that knows the C sources, the compiler flags and the output files; `setup.py`, the Makefile, the
tests and people all come here. Standard library only, and nothing of pynccl: it runs before there is a pynccl
to import.

The sources are compiled once and linked twice: as `libpynccl_host.so`, which pynccl loads, and as
`preload/libnccl.so.2`, for other NCCL clients. The first must not be called libnccl.so.2 inside: a later
`import cupy` or `import torch` would bind to it instead of NVIDIA's.

An object is made again only when its source, a header, the compiler or a flag has changed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BuildError", "Outputs", "build", "sources"]

HERE = Path(__file__).resolve().parent
SOURCE_DIR = HERE / "src"
DEFAULT_OUT = HERE / "lib"

# No -march: a wheel must run on every CPU of its platform; hot kernels carry their own multiversioned clones.
# No contraction of a*b+c into one rounding: those clones must give the same bits on every CPU.
COMPILE_FLAGS = (
    "-std=c11",
    "-D_GNU_SOURCE",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-pthread",
    "-Wall",
    "-Wextra",
)
OPTIMIZE_FLAGS = ("-O3",)
SANITIZE_FLAGS = ("-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all")

# -Bsymbolic: the library's calls to its own exported functions must not land in another libnccl that the
# process has loaded globally. nodelete: worker threads may outlive a dlclose.
LINK_FLAGS = ("-shared", "-pthread", "-Wl,-Bsymbolic", "-Wl,-z,defs", "-Wl,-z,now", "-Wl,-z,nodelete")
LINK_LIBRARIES = ("-lm",)

# (path under the output folder, SONAME)
OUTPUTS = (
    ("libpynccl_host.so", "libpynccl_host.so"),
    ("preload/libnccl.so.2", "libnccl.so.2"),
)


class BuildError(RuntimeError):
    """The host library could not be built; the message is meant for the person who ran the build."""


@dataclass(frozen=True)
class Outputs:
    """The two files of a finished build."""

    library: Path
    preload: Path


@dataclass(frozen=True)
class Toolchain:
    """A compiler and all that it is given besides files. Its key tells when a build has to be done again."""

    cc: tuple[str, ...]
    version: str
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]

    def key(self) -> bytes:
        return repr((self.cc, self.version, self.compile_flags, self.link_flags, OUTPUTS)).encode()


def build(
    out: Path | None = None,
    *,
    werror: bool = False,
    sanitize: str | None = None,
    objects: Path | None = None,
    jobs: int | None = None,
    force: bool = False,
) -> Outputs:
    """Bring both library files under `out` up to date and return their paths.

    out: folder that receives `libpynccl_host.so` and `preload/libnccl.so.2`; default `pynccl/host/lib`.
    werror: warnings are errors. sanitize: a value for `-fsanitize=`, as "address,undefined" or "thread".
    objects: folder for intermediate files; default `build/host` beside the package.
    jobs: compilers to run at once; default one a core. force: compile and link everything again.

    Honours CC, CFLAGS and LDFLAGS. Several builds at once take turns, and a process that has the old files
    loaded keeps them. Raises BuildError when no compiler is found, or with its own words when it fails.
    """
    out = Path(out or DEFAULT_OUT).resolve()
    objects = Path(objects or HERE.parent.parent / "build" / "host").resolve()
    toolchain = find_toolchain(werror=werror, sanitize=sanitize)
    files = sources()
    profile = objects / ((sanitize or "release").replace(",", "-") + ("-werror" if werror else ""))
    profile.mkdir(parents=True, exist_ok=True)
    with locked(objects / "lock"):
        key = digest(toolchain.key(), *(path.read_bytes() for path in (*files, *headers())))
        stamp = objects / f"linked-{digest(str(out).encode())[:16]}"
        outputs = [(out / name, soname) for name, soname in OUTPUTS]
        if force or not (read(stamp) == key and all(path.is_file() for path, _ in outputs)):
            stamp.unlink(missing_ok=True)
            compiled = compile_all(files, profile, toolchain, jobs=jobs, force=force)
            for path, soname in outputs:
                link(compiled, path, soname, toolchain)
            stamp.write_text(key)
    return Outputs(*(path for path, _ in outputs))


def sources() -> list[Path]:
    """All C sources, sorted. Raises BuildError where there are none, as in an installed wheel."""
    found = sorted(SOURCE_DIR.glob("*.c"))
    if not found:
        raise BuildError(
            f"there are no C sources in {SOURCE_DIR}: an installed package carries the built library only; "
            "build from a clone or a source distribution"
        )
    return found


def headers() -> list[Path]:
    return sorted(SOURCE_DIR.glob("*.h"))


def find_toolchain(*, werror: bool = False, sanitize: str | None = None) -> Toolchain:
    cc = compiler()
    optimize = (*SANITIZE_FLAGS, f"-fsanitize={sanitize}") if sanitize else OPTIMIZE_FLAGS
    return Toolchain(
        cc=cc,
        version=run([*cc, "--version"], "ask the compiler for its version"),
        compile_flags=(
            *COMPILE_FLAGS,
            *optimize,
            *(["-Werror"] if werror else []),
            *words("CFLAGS"),
        ),
        link_flags=(
            *LINK_FLAGS,
            *([f"-fsanitize={sanitize}"] if sanitize else []),
            *words("LDFLAGS"),
        ),
    )


def compiler() -> tuple[str, ...]:
    """The C compiler's command: CC where it is set, else the first of cc, gcc, clang that is on PATH."""
    named = words("CC")
    for command in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return tuple(command)
    looked_for = f"CC={os.environ['CC']!r}" if named else "cc, gcc and clang on PATH"
    raise BuildError(
        f"no C compiler was found (looked for {looked_for}), and the host library is written in C; "
        "install one (Debian, Ubuntu: apt-get install gcc libc6-dev; Fedora: dnf install gcc), or set CC"
    )


def words(variable: str) -> list[str]:
    """Of a variable of the environment, as a shell divides them. BuildError if it cannot."""
    value = os.environ.get(variable, "")
    try:
        return shlex.split(value)
    except ValueError as error:  # a quote that is not closed
        raise BuildError(f"{variable}={value!r} cannot be divided into words: {error}; mend it") from None


def compile_all(
    files: Sequence[Path], folder: Path, toolchain: Toolchain, *, jobs: int | None, force: bool
) -> list[Path]:
    """Compile what has changed, several files at once; return the objects of all files."""
    shared = digest(toolchain.key(), *(path.read_bytes() for path in headers()))

    def compile_one(source: Path) -> Path:
        target, stamp = folder / f"{source.stem}.o", folder / f"{source.stem}.key"
        key = digest(shared.encode(), source.read_bytes())
        if force or not (read(stamp) == key and target.is_file()):
            stamp.unlink(missing_ok=True)
            print(f"compile {source.name}", flush=True)
            command = [*toolchain.cc, *toolchain.compile_flags, "-c", str(source), "-o", str(target)]
            warnings = run(command, f"compile {source.name}")
            if warnings:
                print(warnings, file=sys.stderr, flush=True)
            stamp.write_text(key)
        return target

    with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(compile_one, files))


def link(compiled: Sequence[Path], target: Path, soname: str, toolchain: Toolchain) -> None:
    """Link beside the target and rename over it: a process that has the old file mapped keeps its bytes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    print(f"link    {target}", flush=True)
    objects = [str(path) for path in compiled]
    flags = [*toolchain.link_flags, f"-Wl,-soname,{soname}"]
    try:
        run([*toolchain.cc, *flags, "-o", str(fresh), *objects, *LINK_LIBRARIES], f"link {target.name}")
        os.replace(fresh, target)
    finally:
        fresh.unlink(missing_ok=True)


def run(command: Sequence[str], purpose: str) -> str:
    """The command's output, both streams together. Raises BuildError with all of it when it fails."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if done.returncode:
        raise BuildError(f"could not {purpose}; this failed:\n{shlex.join(command)}\n{done.stdout}")
    return done.stdout


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, so that builds of the same tree take turns."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def digest(*parts: bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()


def read(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pynccl.host.build", description="Build the host library."
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"where the libraries go (default {DEFAULT_OUT})"
    )
    parser.add_argument(
        "--objects", type=Path, metavar="DIR", help="where intermediate files go (default build/host)"
    )
    parser.add_argument("--werror", action="store_true", help="treat warnings as errors")
    parser.add_argument("--sanitize", metavar="KINDS", help="address,undefined or thread")
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers to run at once (default one a core)")
    parser.add_argument("--force", action="store_true", help="compile and link everything again")
    try:
        outputs = build(**vars(parser.parse_args(argv)))
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"up to date: {outputs.library}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The build of the host library, and a wheel that carries it to a machine with no compiler."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import cuda.pathfinder
import ml_dtypes
import numpy
import pytest

from pynccl._version import __version__
from pynccl.host import build as host_build

# Seconds: all C sources are compiled from nothing, on cores that may be busy with other tests.
BUILD_TIMEOUT = 240
pytestmark = pytest.mark.timeout(BUILD_TIMEOUT + 30)

OUTPUT_NAMES = {name for name, _ in host_build.OUTPUTS}

# Two sources and a header, so that a test can change one of them and see what is compiled again.
PROJECT = {
    "exported.c": '#include "answer.h"\n'
    '__attribute__((visibility("default"))) int exported(void) { return answer(); }\n',
    "answer.c": '#include "answer.h"\nint answer(void) { return 42; }\n',
    "answer.h": "int answer(void);\n",
}

# Run in the fresh environment: two ranks, as processes, on the installed host library.
CLIENT = """
import shutil, sys
import numpy as np
import pynccl, pynccl.testing

def rank_main(comm):
    x = np.full(1000, comm.rank + 1, "f4")
    comm.all_reduce(x)
    return comm.library.path, x.min().item(), x.max().item()

if __name__ == "__main__":
    assert not any(map(shutil.which, ("cc", "gcc", "clang")))
    print(pynccl.__file__)
    for path, low, high in pynccl.testing.run_ranks(2, rank_main, library="host"):
        print(path, low, high)
"""


Steps = Callable[..., set[str]]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small set of C sources that stands in for the host library's; returns their folder."""
    for name in ("CC", "CFLAGS", "LDFLAGS"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "src"
    folder.mkdir()
    for name, text in PROJECT.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(host_build, "SOURCE_DIR", folder)
    return folder


@pytest.fixture
def steps(project: Path, capsys: pytest.CaptureFixture[str]) -> Steps:
    """Build the project and tell what was done: the names of the files compiled and linked."""

    def run(**options: Any) -> set[str]:
        capsys.readouterr()
        host_build.build(project.parent / "lib", objects=project.parent / "objects", **options)
        return {Path(line.split()[1]).name for line in capsys.readouterr().out.splitlines()}

    return run


BOTH_LIBRARIES = {"libpynccl_host.so", "libnccl.so.2"}
EVERYTHING = {"exported.c", "answer.c"} | BOTH_LIBRARIES


def test_a_second_build_does_nothing(steps: Steps) -> None:
    assert steps() == EVERYTHING
    assert steps() == set()


def test_a_changed_source_alone_is_compiled_again(steps: Steps, project: Path) -> None:
    steps()
    (project / "answer.c").write_text(PROJECT["answer.c"].replace("42", "43"))
    assert steps() == {"answer.c"} | BOTH_LIBRARIES


def test_a_source_restored_with_its_old_time_is_compiled_again(steps: Steps, project: Path) -> None:
    """What counts is the content: version control gives files any time it likes."""
    steps()
    before = (project / "answer.c").stat()
    (project / "answer.c").write_text(PROJECT["answer.c"].replace("42", "43"))
    os.utime(project / "answer.c", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert steps() == {"answer.c"} | BOTH_LIBRARIES


def test_a_changed_header_or_flag_compiles_everything_again(
    steps: Steps, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps()
    (project / "answer.h").write_text("int answer(void); /* changed */\n")
    assert steps() == EVERYTHING
    monkeypatch.setenv("CFLAGS", "-DCHANGED")
    assert steps() == EVERYTHING


def test_a_missing_or_foreign_output_is_linked_again(steps: Steps, project: Path) -> None:
    steps()
    (project.parent / "lib" / "preload" / "libnccl.so.2").unlink()
    assert steps() == BOTH_LIBRARIES
    steps(sanitize="undefined")
    assert steps() == BOTH_LIBRARIES, "the folder held the sanitized library"


def test_a_failed_build_is_not_taken_for_a_finished_one(steps: Steps, project: Path) -> None:
    steps()
    (project / "answer.c").write_text("int answer(void) { return undeclared; }\n")
    for _ in range(2):
        with pytest.raises(host_build.BuildError, match=r"(?s)could not compile answer\.c.*undeclared"):
            steps()
    (project / "answer.c").write_text("int somethingelse;\n")
    for _ in range(2):
        with pytest.raises(host_build.BuildError, match=r"(?s)could not link libpynccl_host\.so.*answer"):
            steps()
    assert {path.name for path in (project.parent / "lib").iterdir()} == {"libpynccl_host.so", "preload"}


def test_warnings_stop_a_build_only_when_asked_to(steps: Steps, project: Path) -> None:
    (project / "answer.c").write_text(PROJECT["answer.c"] + "static int unused;\n")
    steps()
    with pytest.raises(host_build.BuildError, match="unused"):
        steps(werror=True)


def test_no_compiler_is_an_error_with_the_remedy(
    steps, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(host_build.BuildError, match=r"CC='no-such-compiler -m64'.*install"):
        steps()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(host_build.BuildError, match=r"cc, gcc and clang on PATH.*install gcc"):
        steps()


@pytest.mark.parametrize("variable", ["CC", "CFLAGS", "LDFLAGS"])
def test_a_quote_that_is_not_closed_is_an_error_that_names_the_variable(
    steps: Steps, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "cc '-O")
    with pytest.raises(host_build.BuildError, match=f"{variable}=.*No closing quotation"):
        steps()


def test_no_sources_is_an_error_that_says_where_to_build(steps: Steps, project: Path) -> None:
    for path in project.glob("*.c"):
        path.unlink()
    with pytest.raises(host_build.BuildError, match="installed package"):
        steps()


def test_builds_run_from_the_command_line_with_nothing_installed(repo: Path, tmp_path: Path) -> None:
    """As a plain script, isolated from every installed package, with the options that lint and stress use."""
    command = [sys.executable, "-I", "-S", str(repo / "pynccl" / "host" / "build.py")]
    folders = ["--out", str(tmp_path / "lib"), "--objects", str(tmp_path / "objects")]
    options = ["--werror", "--sanitize", "undefined", *folders]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=BUILD_TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(tmp_path / "lib" / "libpynccl_host.so") in done.stdout


def test_the_two_files_differ_in_their_soname_alone(tmp_path: Path, steps: Steps) -> None:
    steps()
    for name, soname in host_build.OUTPUTS:
        assert read_soname(tmp_path / "lib" / name) == soname
    exported = {name: exported_symbols(tmp_path / "lib" / name) for name in OUTPUT_NAMES}
    assert set(map(frozenset, exported.values())) == {frozenset({"exported"})}


@pytest.fixture(scope="module")
def distributions(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel made from it, as `python -m build` makes them.

    From a copy of the tree with nothing built, and without the network: the build's needs are installed here.
    """
    folder = tmp_path_factory.mktemp("distributions")
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "lib", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(repo, folder / "tree", ignore=ignored)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(folder / "tree")]
    run(command, cwd=folder)
    return folder


def test_the_wheel_is_for_any_python_on_this_platform_and_carries_both_files(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    name = rf"pynccl_anywhere-{re.escape(__version__)}-py3-none-linux_{platform.machine()}\.whl"
    assert re.fullmatch(name, wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if name.startswith("pynccl/host/lib/")} == {
        f"pynccl/host/lib/{name}" for name in OUTPUT_NAMES
    }
    assert {name.split("/")[0] for name in names} == {
        "pynccl",
        "sharding",
        f"pynccl_anywhere-{__version__}.dist-info",
    }


def test_the_source_distribution_carries_the_c_sources_and_nothing_built(distributions: Path) -> None:
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {f"pynccl/host/src/{path.name}" for path in host_build.SOURCE_DIR.iterdir()}
    assert sources <= names
    assert {"LICENSE", "README.md", "setup.py"} <= names
    assert not {name for name in names if name.endswith((".so", ".so.2", ".o", ".pyc"))}


def test_the_wheel_works_in_a_fresh_environment_with_no_compiler(distributions: Path, tmp_path: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    run([*pip, "install", "--no-deps", "--no-index", str(wheel)])
    lend(python, numpy, ml_dtypes, cuda)
    client = tmp_path / "client.py"
    client.write_text(CLIENT)

    output = run([str(python), str(client)], cwd=tmp_path, env={"PATH": str(environment / "bin")})

    where, *ranks = output.splitlines()
    installed = Path(where).parent
    assert environment in installed.parents
    assert ranks == [f"{installed / 'host' / 'lib' / 'libpynccl_host.so'} 3.0 3.0"] * 2
    printed = run([str(python), "-m", "pynccl.host"], cwd=tmp_path, env={"PATH": str(environment / "bin")})
    assert printed == f"{installed / 'host' / 'lib' / 'preload' / 'libnccl.so.2'}\n"


def lend(python: Path, *packages: ModuleType) -> None:
    """Let an environment see the packages of this one that pynccl needs, which saves a download.

    A folder named in a .pth file is searched after the environment's own, and its own .pth files (among them
    this project's editable install) are not read.
    """
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site_packages = Path(run(ask).strip())
    folders = {str(Path(next(iter(package.__path__))).parent) for package in packages}
    (site_packages / "lent.pth").write_text("".join(f"{folder}\n" for folder in sorted(folders)))


def run(command: Iterable[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        list(command), cwd=cwd, env=env, capture_output=True, text=True, timeout=BUILD_TIMEOUT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def read_soname(path: Path) -> str:
    found = re.search(r"soname: \[(.*)\]", run(["readelf", "--dynamic", str(path)]))
    assert found, f"{path} has no SONAME"
    return found[1]


def exported_symbols(path: Path) -> set[str]:
    return {line.split()[-1] for line in run(["nm", "--dynamic", "--defined-only", str(path)]).splitlines()}

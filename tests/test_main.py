"""``python -m pynccl`` tells what would be loaded, why, and what the machine has."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pynccl import __main__ as main
from pynccl import environment
from pynccl.abi import PROTOTYPES, coverage

# A machine with GPUs looks like one without to a process that may use none of them.
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
NOTHING: Mapping[str, str] = {}


def run(*arguments: str, status: int = 0, environ: Mapping[str, str] = NOTHING) -> str:
    command = [sys.executable, "-m", "pynccl", *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environ}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (status, "")
    return ran.stdout


def report(environ: Mapping[str, str] = NOTHING, *, status: int = 0) -> dict[str, Any]:
    loaded = json.loads(run("--json", status=status, environ=environ))
    assert isinstance(loaded, dict)
    return loaded


def test_with_no_gpu_the_host_library_is_loaded_and_the_reason_told() -> None:
    found = report(NO_GPU)
    library = found["library"]
    assert library["kind"] == "host"
    assert library["reason"].startswith("automatic: no CUDA device is usable (")
    assert library["functions"] == {"declared": 73, "present": 73, "missing": []}
    assert library["error"] is None
    assert found["gpus"]["count"] == 0
    assert found["gpus"]["reason"] in library["reason"]


def test_nccl_by_name_has_version_and_all_functions() -> None:
    library = report({"PYNCCL_LIBRARY": "nccl"})["library"]
    assert (library["kind"], library["version"], library["version_string"]) == ("nccl", 23203, "2.32.3")
    assert library["functions"] == {"declared": 73, "present": 73, "missing": []}
    assert library["reason"] == "asked for by the environment: PYNCCL_LIBRARY=nccl"
    assert library["searched"][-1]["outcome"] == f"found {library['path']}"


def test_a_library_that_is_not_there_is_reported_and_fails() -> None:
    library = report({"PYNCCL_LIBRARY": "/no/such/libnccl.so"}, status=1)["library"]
    assert library["kind"] is None
    assert "/no/such/libnccl.so" in library["error"]
    assert library["reason"] == "asked for by the environment: PYNCCL_LIBRARY=/no/such/libnccl.so"
    assert [row["place"] for row in library["searched"]] == ["/no/such/libnccl.so"] * 2
    assert "/no/such/libnccl.so" in run(status=1, environ={"PYNCCL_LIBRARY": "/no/such/libnccl.so"})


def test_a_name_that_is_no_library_is_reported_and_fails() -> None:
    assert "'gloo' is not a library" in report({"PYNCCL_LIBRARY": "gloo"}, status=1)["library"]["error"]


def test_the_machine_is_described() -> None:
    found = main.machine()
    assert found["cores"] == os.cpu_count()
    assert found["cores_usable"] == len(os.sched_getaffinity(0))
    assert found["memory_bytes"] and found["memory_bytes"] > 2**27
    shm = os.statvfs("/dev/shm")
    assert found["shm_bytes"] == shm.f_frsize * shm.f_blocks


def test_cupy_is_looked_up_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it would fail
    found = main.cupy()
    assert found["distribution"] in main.CUPY_DISTRIBUTIONS
    assert re.fullmatch(r"\d+\.\d+.*", found["version"] or "")


def test_an_environment_without_cupy_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "CUPY_DISTRIBUTIONS", ("no-such-distribution",))
    assert main.cupy() == {"version": None, "distribution": None}


def test_a_secret_is_said_to_be_set_and_not_shown() -> None:
    secret = {"PYNCCL_SECRET": "tell-nobody", "PYNCCL_LIBRARY": "nccl"}
    shown = {row["name"]: row["value"] for row in report(secret)["environment"]}
    assert (shown["PYNCCL_SECRET"], shown["PYNCCL_LIBRARY"]) == ("set", "nccl")
    assert shown["PYNCCL_TIMEOUT"] is None
    assert "tell-nobody" not in run("--json", environ=secret) + run(environ=secret)


def test_every_variable_that_the_sources_read_is_in_the_table(repo: Path) -> None:
    read = set()
    for source in repo.glob("pynccl/**/*.py"):
        read |= set(re.findall(r'"((?:PYNCCL|MASTER|TORCHELASTIC)_[A-Z_]+)"', source.read_text()))
    for source in repo.glob("pynccl/host/src/*.c"):
        read |= set(re.findall(r'getenv\("(\w+)"\)', source.read_text()))
    assert {"PYNCCL_LIBRARY", "PYNCCL_TIMEOUT", "PYNCCL_SECRET"} <= read
    assert read <= {variable.name for variable in environment.VARIABLES}


def test_the_text_for_people_has_the_same_content() -> None:
    text = run("--all", environ={"PYNCCL_LIBRARY": "nccl"})
    for part in (
        "2.32.3 (23203)",
        "73 of 73 present",
        "asked for by the environment",
        "/dev/shm",
        "PYNCCL_TIMEOUT",
    ):
        assert part in text


def test_of_the_variables_those_that_are_set_are_listed_and_all_on_demand() -> None:
    environ = {"PYNCCL_LIBRARY": "host", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shown, every = (run(*options, environ=environ) for options in ((), ("--all",)))
    assert "(unset)" not in shown and "PYNCCL_PORT" not in shown
    assert re.search(r"environment variables \(\d+ more are not set: --all\)\n", shown)
    for text in (shown, every):
        rows = text.partition("\nenvironment variables")[2].splitlines()[1:]
        meanings = {row.name: row.meaning for row in environment.VARIABLES}
        columns = {row.index(meanings[row.split()[0]]) for row in rows if len(row.split()[1]) <= 40}
        assert len(columns) == 1, "the meanings are not in one column"
    assert len(rows) == len(environment.VARIABLES)


@pytest.mark.parametrize("option", ["--all", "--json"])
def test_a_reader_that_has_read_enough_ends_it_quietly(option: str) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **NO_GPU}
    command = [sys.executable, "-m", "pynccl", option]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        ran = subprocess.run(command, env=env, stdout=pipe, stderr=subprocess.PIPE, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, b"")


def test_the_text_names_missing_functions_and_gpus() -> None:
    found = main.gather()
    found["library"] |= {"path": "/lib/libnccl.so.2", "error": None}
    found["library"]["functions"] = {"declared": 73, "present": 72, "missing": ["ncclPutSignal"]}
    found["gpus"] = {
        "count": 1,
        "devices": [{"ordinal": 0, "name": "H200", "memory_bytes": 140 * 2**30}],
        "cuda_version": "12.8",
        "reason": None,
    }
    text = "\n".join(main.as_text(found))
    assert re.search(r"missing +ncclPutSignal\n", text)
    assert re.search(r"GPU 0 +H200, 140.0 GiB\n", text)


def test_an_unknown_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(["--jsonn"])
    assert caught.value.code == 2
    assert "--jsonn" in capsys.readouterr().err


# --- the coverage page --------------------------------------------------------------------------------------


def test_the_coverage_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert coverage.main(["--check"]) == 0, capsys.readouterr().err


def test_a_stale_or_missing_coverage_page_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "docs" / "api-coverage.md"
    assert coverage.main(["--check", "--page", str(page)]) == 1
    assert coverage.main(["--page", str(page)]) == 0
    assert coverage.main(["--check", "--page", str(page)]) == 0
    page.write_text(page.read_text().replace("ncclPutSignal", "ncclPut"))
    assert coverage.main(["--check", "--page", str(page)]) == 1
    assert "python -m pynccl.abi.coverage" in capsys.readouterr().err


def test_the_coverage_page_has_every_function_with_its_version() -> None:
    text = "\n".join(coverage.page())
    for name, prototype in PROTOTYPES.items():
        assert f"| `{name}` | {prototype.since} | `{prototype.declaration}` |" in text

"""`python -m pynccl.host`: the preload path, and running a command on the host library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pynccl import host
from pynccl.host.__main__ import main, preload_environment

# What the child reports: its environment, and which file a client that asks for "libnccl.so.2" by name gets.
CHILD = """
import ctypes, json, os, sys
library = ctypes.CDLL("libnccl.so.2")
with open("/proc/self/maps") as maps:
    mapped = sorted({line.split()[-1] for line in maps if "nccl" in line})
names = "LD_PRELOAD", "LD_LIBRARY_PATH"
print(json.dumps({"argv": sys.argv[1:], "mapped": mapped, "pid": os.getpid(),
                  "host": hasattr(library, "pyncclVersion"), **{n: os.environ[n] for n in names}}))
"""


def run_module(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pynccl.host", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_it_prints_the_preload_path_and_nothing_else() -> None:
    done = run_module()
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{host.preload_path()}\n", "")
    assert host.preload_path().name == "libnccl.so.2"


def test_the_preload_folder_holds_nothing_but_libnccl() -> None:
    """It goes in front of LD_LIBRARY_PATH, where any other file would shadow somebody's library."""
    assert [path.name for path in host.preload_path().parent.iterdir()] == ["libnccl.so.2"]


def test_exec_runs_a_client_on_the_host_library() -> None:
    done = run_module("--exec", sys.executable, "-c", CHILD, "--exec", "-n", "3", LD_PRELOAD="")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["argv"] == ["--exec", "-n", "3"]
    assert seen["mapped"] == [str(host.preload_path())]
    assert seen["host"]
    assert seen["LD_PRELOAD"] == str(host.preload_path())
    assert seen["LD_LIBRARY_PATH"].split(":")[0] == str(host.preload_path().parent)


def test_exec_keeps_the_process_and_passes_its_status_on() -> None:
    script = "import os, sys; print(os.getpid(), flush=True); sys.exit(7)"
    command = [sys.executable, "-m", "pynccl.host", "--exec", sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        output, _ = process.communicate(timeout=60)
    assert (process.returncode, int(output)) == (7, process.pid)


def test_what_was_preloaded_before_stays_behind_the_host_library() -> None:
    environment = {"LD_PRELOAD": "/a.so", "LD_LIBRARY_PATH": "/b:/c", "HOME": "/h"}
    assert preload_environment(environment, Path("/p/libnccl.so.2")) == {
        "LD_PRELOAD": "/p/libnccl.so.2:/a.so",
        "LD_LIBRARY_PATH": "/p:/b:/c",
        "HOME": "/h",
    }


def test_exec_of_an_unknown_command_names_it() -> None:
    done = run_module("--exec", "no-such-command")
    assert (done.returncode, done.stdout) == (127, "")
    assert "'no-such-command'" in done.stderr


def test_exec_without_a_command_is_a_usage_error() -> None:
    done = run_module("--exec")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no command was given" in done.stderr


def test_a_library_that_is_not_built_is_an_error_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "_LIB", tmp_path)
    for path in (host.library_path, host.preload_path):
        with pytest.raises(FileNotFoundError, match=r"python -m pynccl\.host\.build"):
            path()
    assert main([]) == 1
    out, err = capsys.readouterr()
    assert out == "" and str(tmp_path) in err

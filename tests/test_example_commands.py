"""The example programs as commands: help, wrong settings in a line, a reader that goes away."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples import demo
from examples.numpy_gpt import batch_problem


@pytest.mark.parametrize(
    ("batch", "ranks", "remedy"), [(32, 3, "33 or 30"), (1, 2, "2"), (0, 2, "2"), (-3, 2, "2")]
)
def test_a_batch_that_does_not_divide_is_told_with_ones_that_do(batch: int, ranks: int, remedy: str):
    assert batch_problem(batch, ranks).endswith(f" over {ranks} ranks; make it a multiple: --batch {remedy}")


@pytest.mark.parametrize("program", ["train_bytes_lm", "train_sharded"])
def test_a_batch_that_does_not_divide_ends_a_training_in_one_line(program: str, repo: Path):
    command = [
        sys.executable,
        "-m",
        "pynccl.launch",
        "-n",
        "2",
        "--output",
        "raw",
        "-m",
        f"examples.{program}",
    ]
    ran = subprocess.run(
        [*command, "--batch", "5"],
        cwd=repo,
        env={**os.environ, "PYTHONPATH": str(repo), "PYNCCL_LIBRARY": "host"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 2
    told = [line for line in ran.stderr.splitlines() if not line.startswith("pynccl.launch: ")]
    assert told == [
        f"{program}.py: a batch of 5 does not divide over 2 ranks; make it a multiple: --batch 6 or 4"
    ]


def test_asking_the_demo_for_help_does_not_run_it(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        demo.main(["--help"])
    assert caught.value.code == 0
    assert "build/demo" in capsys.readouterr().out


def test_a_reader_that_has_read_enough_ends_the_demo_quietly(repo: Path, tmp_path: Path):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        ran = subprocess.run(
            [sys.executable, "-m", "examples.demo"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(repo), "PYNCCL_LIBRARY": "host", "PYTHONUNBUFFERED": "1"},
            stdout=pipe,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    assert (ran.returncode, ran.stderr) == (141, b"")

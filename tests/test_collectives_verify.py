"""The verifier: what it proves, what it refuses and how it says so, and that a simulator agrees."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pynccl.collectives import (
    ALGORITHMS,
    IN,
    OUT,
    SCRATCH,
    Buffer,
    Builder,
    Fault,
    Kind,
    Schedule,
    Span,
    Step,
    choose,
    find_fault,
    generate,
    verify,
)
from pynccl.collectives.compiled import _part
from pynccl.collectives.flow import flow
from pynccl.collectives.mutate import MUTATIONS, judge, mutants, mutation_test
from pynccl.collectives.report import schedules_of
from pynccl.collectives.rounds import rounds
from pynccl.collectives.simulate import simulate


@pytest.mark.parametrize("row", ALGORITHMS.values(), ids=lambda row: f"{row.collective}-{row.name}")
def test_every_algorithm_is_proved_for_1_to_33_ranks(row: Any) -> None:
    ranks = [*range(1, 18), 23, 24, 31, 32, 33]
    for schedule in schedules_of(row, ranks):
        verify(schedule)


@pytest.mark.parametrize("row", ALGORITHMS.values(), ids=lambda row: f"{row.collective}-{row.name}")
def test_every_algorithm_goes_well_when_played(row: Any) -> None:
    for schedule in schedules_of(row, [1, 2, 3, 5, 6]):
        for in_place, slots in itertools.product({False, schedule.in_place}, (0, 1, 3)):
            played = simulate(schedule, slots=slots, seed=slots, in_place=in_place)
            assert played.wrong == "", (schedule, slots, in_place)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_a_ring_with_many_channels_is_proved(channels: int) -> None:
    proof = verify(generate("ring", 7, channels=channels), slots=(0, 1, 2, 3, 4))
    assert proof.slots == (0, 1, 2, 3, 4) and proof.deterministic and proof.in_place and proof.lockstep
    assert proof.rounds == 12 and proof.steps == 7 * 12 * 2 * channels
    assert not proof.rank_order  # a ring begins each chunk at another rank
    assert "each contribution exactly once" in str(proof) and "rendezvous" in str(proof)


# Hand-made schedules, and what is wrong with them


def _gather(n: int = 3) -> list[list[Step]]:
    """A right all_gather in one round: everybody sends to everybody."""
    b = Builder("direct", "all_gather", n)
    b.copy(b.ranks, IN[0], OUT[b.ranks])
    for s in range(1, n):
        b.move(b.ranks, (b.ranks + s) % n, IN[0], OUT[b.ranks])
    return list(b.build())


def _schedule(steps: list[list[Step]], collective: str = "all_gather", **fields: Any) -> Schedule:
    return Schedule.from_steps("mine", collective, steps, **fields)


def test_the_hand_made_schedule_is_right() -> None:
    proof = verify(_schedule(_gather()))
    assert proof.rounds == 1 and proof.steps == 15


def _change(rank: int, index: int, **fields: Any) -> Callable[[list[list[Step]]], None]:
    def change(steps: list[list[Step]]) -> None:
        steps[rank][index] = dataclasses.replace(steps[rank][index], **fields)

    return change


_IN0, _OUT0, _OUT9 = Span(Buffer.IN, 0), Span(Buffer.OUT, 0), Span(Buffer.OUT, 9)

# Steps of a rank of _gather: 0 copy, 1 send to the next, 2 receive from the one before, 3 and 4 two apart.
WRONG_STEPS = {
    "a chunk out of range": (_change(1, 0, dst=_OUT9), 1, 0, r"outside its buffers, in\[0:1\], out\[0:3\]"),
    "a negative chunk": (_change(1, 0, src=Span(Buffer.IN, -1)), 1, 0, "outside its buffers"),
    "a span too long": (
        _change(1, 0, src=Span(Buffer.OUT, 0, 4), dst=Span(Buffer.OUT, 0, 4)),
        1,
        0,
        "outside its",
    ),
    "a write to IN": (_change(2, 0, dst=_IN0), 2, 0, "writes IN, which is the caller's"),
    "a peer out of range": (_change(0, 1, peer=3), 0, 1, "peer that is not one of 3 ranks"),
    "a message to itself": (_change(0, 1, peer=0), 0, 1, "message to itself"),
    "a step without source": (_change(2, 1, src=None, dst=_OUT0), 2, 1, "lacks the span that it reads"),
    "a step without target": (_change(2, 2, src=_OUT0, dst=None), 2, 2, "lacks the span that it writes"),
    "no chunks at all": (_change(0, 1, src=Span(Buffer.IN, 0, 0)), 0, 1, "moves no chunks"),
    "a negative channel": (_change(0, 1, channel=-1), 0, 1, "negative channel"),
    "a negative round": (_change(0, 0, round=-1), 0, 0, "negative round"),
    "a round too early": (_change(0, 0, round=1), 0, 1, "goes back to an earlier round"),
    "a send too much": (
        lambda steps: steps[0].append(steps[0][1]),
        0,
        5,
        r"no receive \(2 sent, 1 received\)",
    ),
    "a receive too much": (lambda steps: steps[1].append(steps[1][2]), 1, 5, "waits for ever: 1 messages"),
    "a send too few": (lambda steps: steps[0].pop(1), 1, 2, "waits for ever: 0 messages"),
    "another channel": (_change(0, 1, channel=1), 1, 2, "waits for ever"),
    "a reduction in a gather": (
        _change(1, 2, kind=Kind.RECV_REDUCE, src=_IN0),
        1,
        2,
        "reduces, which a",
    ),
    "a wrong place": (_change(1, 0, dst=_OUT0), 1, 2, r"in the end|receive"),
    "a chunk never written": (lambda steps: steps[2].pop(0), 2, -1, r"out\[2\] of rank 2 is never written"),
    "read before written": (_change(1, 1, src=Span(Buffer.OUT, 2)), 1, 1, "reads what has not been written"),
}


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_the_first_wrong_step_is_named(name: str) -> None:
    change, rank, step, words = WRONG_STEPS[name]
    steps = _gather()
    change(steps)
    fault = find_fault(_schedule(steps))
    assert fault is not None
    assert fault.rank == rank, fault
    if name != "a wrong place":  # two steps are at odds there
        assert fault.step == step, fault
    with pytest.raises(Fault, match=words):
        verify(_schedule(steps))
    assert str(pickle.loads(pickle.dumps(fault))) == str(fault)


def test_a_message_of_another_length_is_refused() -> None:
    steps = [
        [Step(Kind.SEND, 0, 1, src=Span(Buffer.IN, 0, 2))],
        [Step(Kind.RECV, 0, 0, dst=Span(Buffer.OUT, 0, 1))],
    ]
    with pytest.raises(Fault, match="rank 1, step 0: .*expects 1 chunks where its message brings 2"):
        verify(_schedule(steps, "broadcast", parts=2))


def test_chunks_of_different_sizes_are_not_mixed() -> None:
    """Chunks 0 and 1 of two parts differ in size when the count is odd."""
    b = Builder("sizes", "broadcast", 2, parts=2)
    b.copy(0, IN[0:2], OUT[0:2])
    b.move(0, 1, IN[0:2], SCRATCH[1:3])
    b.copy(1, SCRATCH[2:4], OUT[0:2], round=1)
    with pytest.raises(Fault, match="whose size differs when 2 parts do not divide the count"):
        verify(b.build())
    b = Builder("sizes", "broadcast", 1, parts=2)
    b.copy(0, IN[0], OUT[1])
    with pytest.raises(Fault, match="pairs chunks of different sizes"):
        verify(b.build())


def test_what_is_to_be_sent_is_not_overwritten_in_the_same_round() -> None:
    def swap(dst: Any) -> Schedule:
        b = Builder("swap", "all_to_all", 2)
        b.copy(b.ranks, IN[0:2], OUT[0:2])
        b.next_round()
        b.move(b.ranks, 1 - b.ranks, OUT[1 - b.ranks], dst(1 - b.ranks, b.ranks))
        if dst(0, 0).buffer == Buffer.SCRATCH:
            b.next_round()
            b.copy(b.ranks, SCRATCH[0], OUT[1 - b.ranks])
        return b.build()

    verify(swap(lambda me, peer: SCRATCH[0]))
    with pytest.raises(Fault, match="rank 0, step 2: .*lands on what the same round sends"):
        verify(swap(lambda me, peer: OUT[peer]))


def test_two_messages_do_not_land_in_one_place_in_a_round() -> None:
    b = Builder("twice", "broadcast", 2)
    b.copy(0, IN[0], OUT[0])
    b.move(0, 1, IN[0], OUT[0])
    b.move(0, 1, IN[0], OUT[0])
    with pytest.raises(Fault, match="rank 1, step 1: .*lands where another receive of the round lands"):
        verify(b.build())


def test_overlapping_copies_are_refused() -> None:
    b = Builder("shift", "broadcast", 1, parts=1)
    b.copy(0, SCRATCH[0:2], SCRATCH[1:3])
    with pytest.raises(Fault, match="overlaps itself"):
        verify(b.build())


def test_a_contribution_that_counts_twice_is_refused() -> None:
    b = Builder("double", "all_reduce", 2)
    b.move(b.ranks, 1 - b.ranks, IN[0], OUT[0], reduce=IN[0])
    verify(b.build())
    b.next_round()
    b.reduce(1, IN[0], OUT[0])
    fault = find_fault(b.build())
    assert fault is not None and (fault.rank, fault.step) == (1, 2)
    assert "counts the contribution of rank 1 twice" in str(fault)


def test_a_contribution_that_is_missing_is_named() -> None:
    b = Builder("lost", "reduce", 3, root=1)
    b.move(0, 1, IN[0], OUT[0], reduce=IN[0])
    fault = find_fault(b.build())
    assert fault is not None and (fault.rank, fault.step, fault.chunk) == (1, 0, 0)
    assert "holds in[0] of ranks 0, 1 and lacks 2" in str(fault)


def test_different_chunks_are_not_reduced_together() -> None:
    b = Builder("mixed", "reduce_scatter", 2)
    b.move(0, 1, IN[0], OUT[0], reduce=IN[1])
    b.move(1, 0, IN[0], OUT[0], reduce=IN[0])
    with pytest.raises(Fault, match=r"rank 1, step 0: .*reduces input chunk 1 with input chunk 0"):
        verify(b.build())


def test_buffers_that_only_the_root_has_are_not_used_elsewhere() -> None:
    b = Builder("reduce", "reduce", 2, root=0)
    b.move(1, 0, IN[0], OUT[0], reduce=IN[0])
    verify(b.build())
    b.copy(1, IN[0], OUT[0])
    with pytest.raises(Fault, match="rank 1, step 1: .*uses OUT, which only root 0 has"):
        verify(b.build())


# In place


def test_a_schedule_that_works_only_out_of_place_is_found_out() -> None:
    """OUT takes what arrives before IN has been sent on to the second peer."""
    b = Builder("careless", "all_reduce", 3)
    r = b.ranks
    b.move(r, (r + 1) % 3, IN[0], OUT[0], reduce=IN[0])
    b.next_round()
    b.move(r, (r + 2) % 3, IN[0], OUT[0], reduce=True)
    schedule = b.build()
    schedule = schedule.replace(deterministic=False)
    with pytest.raises(Fault, match=r"\(in place\)"):
        verify(schedule)
    assert simulate(schedule, in_place=True).wrong
    proof = verify(schedule.replace(in_place=False))
    assert not proof.in_place and "out of place only" in str(proof)


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "broadcast", "reduce"])
def test_in_place_means_what_nccl_means(collective: str) -> None:
    """What is already in its place in NCCL's in-place form need not be moved there; out of place it must."""
    n, root = 3, 1
    r, others = np.arange(n), np.array([0, 2])

    def write(lazy: bool) -> Schedule:
        b = Builder("lazy", collective, n, root=root)
        if not lazy:
            rank, src, dst = {
                "all_gather": (r, IN[0], OUT[r]),
                "reduce_scatter": (r, IN[r], OUT[0]),
                "broadcast": (root, IN[0], OUT[0]),
                "reduce": (root, IN[0], OUT[0]),
            }[collective]
            b.copy(rank, src, dst)
            b.next_round()
        if collective == "broadcast":
            b.move(root, others, IN[0], OUT[0])
        elif collective == "reduce":
            b.move(others, root, IN[0], OUT[0], reduce=True)
        for s in (1, 2) if collective == "all_gather" else ():
            b.move(r, (r + s) % n, IN[0], OUT[r])
        for s in (1, 2) if collective == "reduce_scatter" else ():
            b.move(r, (r + s) % n, IN[(r + s) % n], OUT[0], reduce=True)
        return b.build()

    assert simulate(write(lazy=True), in_place=True).wrong == ""
    assert simulate(write(lazy=True)).wrong and find_fault(write(lazy=True)) is not None
    assert verify(write(lazy=False)).in_place


# Order of reduction


def _pairwise(left: Any) -> Schedule:
    b = Builder("pair", "all_reduce", 2)
    b.move(b.ranks, 1 - b.ranks, IN[0], OUT[0], reduce=IN[0], left=left)
    return b.build()


def test_rank_order_is_seen() -> None:
    in_order, swapped = verify(_pairwise(np.array([True, False]))), verify(_pairwise(False))
    assert in_order.deterministic and in_order.rank_order
    assert swapped.deterministic and not swapped.rank_order  # a + b on one, b + a on the other: the same bits


def test_another_order_on_another_rank_is_refused_unless_said() -> None:
    """(a + b) + c on ranks 0 and 1, (a + c) + b on rank 2."""
    b = Builder("orders", "all_reduce", 3)
    everybody = [(r, s) for r in range(3) for s in range(3) if r != s]
    for target, source in everybody:
        b.move(source, target, IN[0], SCRATCH[source])
    b.next_round()
    for rank in range(3):
        b.copy(rank, IN[0], SCRATCH[rank])
        b.copy(rank, SCRATCH[0], OUT[0])
        for other in (2, 1) if rank == 2 else (1, 2):
            b.reduce(rank, SCRATCH[other], OUT[0])
    schedule = b.build().replace(in_place=False)
    fault = find_fault(schedule)
    assert fault is not None and fault.rank == 2 and "another order" in str(fault)
    assert "otherwise than on rank 0" in simulate(schedule).wrong
    free = schedule.replace(deterministic=False)
    assert not verify(free).deterministic and simulate(free).wrong == ""


# Waiting


def _sends_first(n: int, messages: int) -> Schedule:
    """Everybody sends all its messages in rounds of their own before receiving any."""
    b = Builder("eager", "all_gather", n, parts=messages)
    r = b.ranks
    for m in range(messages):
        b.send(r, (r + 1) % n, IN[m], round=m)
        b.recv(r, (r - 1) % n, OUT[(r - 1) % n * messages + m], round=messages + m)
    b.copy(r, IN[0:messages], OUT[r * messages : (r + 1) * messages], round=2 * messages)
    return b.build()


@pytest.mark.parametrize("messages", [1, 2, 3])
def test_deadlock_depends_on_the_slots_of_a_connection(messages: int) -> None:
    schedule = _sends_first(2, messages)
    for slots in range(5):
        fault = find_fault(schedule, slots=[slots])
        played = {simulate(schedule, slots=slots, seed=seed).wrong for seed in range(3)}
        if slots >= messages:
            assert fault is None and played == {""}
        else:
            assert fault is not None and "wait for each other" in str(fault)
            assert all("wait for ever" in words for words in played)


def test_a_circle_of_waits_is_refused_for_any_number_of_slots() -> None:
    b = Builder("circle", "broadcast", 3)
    b.copy(0, IN[0], OUT[0], round=2)
    for rank in range(3):
        b.recv(rank, (rank - 1) % 3, OUT[0], round=0)
        b.send(rank, (rank + 1) % 3, OUT[0], round=1)
    with pytest.raises(Fault, match="rank 0, step 0: .*never ends, even with connections of any length"):
        verify(b.build())


def _skewed(n: int, seed: int) -> Schedule:
    """A chain of sends through all ranks with round numbers that mean something to their own rank only."""
    chance = random.Random(seed)
    b = Builder("skewed", "broadcast", n)
    begin = [chance.randrange(50) for _ in range(n)]
    b.copy(0, IN[0], OUT[0], round=begin[0])
    for rank in range(n - 1):
        b.send(rank, rank + 1, OUT[0], round=begin[rank] + 2)
        b.recv(rank + 1, rank, OUT[0], round=begin[rank + 1] + 1)
    return b.build()


@pytest.mark.parametrize("seed", range(8))
def test_round_numbers_of_different_ranks_need_not_agree(seed: int) -> None:
    schedule = _skewed(6, seed)
    proof = verify(schedule)
    assert not proof.lockstep or flow(schedule).lockstep
    assert simulate(schedule, slots=0, seed=seed).wrong == ""


# Against the simulator, and mutants


def test_levels_never_let_a_message_be_received_before_it_was_sent() -> None:
    for schedule in (_skewed(9, 3), _sends_first(4, 3), generate("ring", 9)):
        graph = flow(schedule)
        sent, received = graph.start[graph.node[graph.sends]], graph.finish[graph.node[graph.recvs]]
        assert (sent <= received).all()
        assert (graph.start <= graph.finish).all()
        after = np.flatnonzero(graph.node_rank[1:] == graph.node_rank[:-1])
        assert (graph.finish[after] < graph.start[after + 1]).all()


def test_verifier_and_simulator_agree_on_mutants() -> None:
    schedules = [_sends_first(3, 2), _skewed(4, 1), _schedule(_gather(4)), _pairwise(False)]
    schedules += [generate("ring", n, channels=k) for n in (2, 3, 4) for k in (1, 2)]
    sample = list(itertools.islice(mutants(schedules, seed=7), 300))
    assert {mutant.kind for mutant in sample} == set(MUTATIONS)
    for mutant in sample:
        played, fault = judge(mutant.schedule)
        assert fault or not played, f"{mutant.what}: proved, but {played}"


def test_every_rank_decides_alike_about_a_schedule_that_is_not_proved() -> None:
    """What `flow` takes, each rank can translate; one that refused alone would leave the others waiting."""
    schedules = [s for row in ALGORITHMS.values() for s in schedules_of(row, [2, 3, 4])]
    taken = 0
    for mutant in itertools.islice(mutants(schedules, seed=11), 600):
        try:
            flow(mutant.schedule)
        except Fault:
            continue  # on all ranks, for it reads nothing but the schedule
        taken += 1
        for rank in range(mutant.schedule.n):
            assert len(rounds(mutant.schedule, rank)) <= mutant.schedule.most_rounds, mutant.what
            for in_place in {False, mutant.schedule.in_place}:
                assert _part(mutant.schedule, rank, in_place=in_place).structure.rank == rank, mutant.what
    assert taken > 100


def test_mutants_of_all_algorithms_are_caught() -> None:
    schedules = [s for row in ALGORITHMS.values() for s in schedules_of(row, [2, 3, 4, 5])]
    report = mutation_test(schedules, 100, seed=1)
    assert (report.caught, report.wrong, report.missed) == (100, 100, [])
    assert "100 of 100 mutants caught" in str(report)


def test_a_verifier_that_lets_everything_pass_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pynccl.collectives.mutate.find_fault", lambda schedule: None)
    report = mutation_test([generate("ring", 3)], 20, seed=0)
    assert report.caught == 0 and len(report.missed) == 20


def test_a_mutant_that_changes_nothing_is_counted_apart() -> None:
    """Of one rank, whose only step is a copy: doing it twice, or in another round, is as good."""
    report = mutation_test([generate("ring", 1), generate("ring", 3)], 60, seed=3)
    assert report.caught == report.wrong == 60
    assert any("duplicate: rank 0 step 0: copy" in what for what in report.equivalent)


def test_sets_of_more_than_64_ranks_are_kept_exactly() -> None:
    """130 ranks take three words; dropping one contribution is found, whichever word it is in."""
    n = 130
    for lost in (3, 64, 129):
        b = Builder("star", "reduce", n, root=0)
        others = np.setdiff1d(np.arange(1, n), [lost])
        b.copy(0, IN[0], OUT[0])
        b.move(others, 0, IN[0], OUT[0], reduce=True, round=1)
        fault = find_fault(b.build())
        assert fault is not None and str(fault).split(" and lacks ")[1].startswith(str(lost))


def test_choose_and_scratch_work_on_all_ranks_but_the_root() -> None:
    n, root = 4, 2
    b = Builder("chain", "reduce", n, root=root)
    order = [(root + i) % n for i in range(n)][::-1]
    for source, target in zip(order, order[1:], strict=False):
        src = IN[0] if source == order[0] else SCRATCH[0]
        b.move(source, target, src, choose(target == root, OUT[0], SCRATCH[0]), reduce=IN[0])
        b.next_round()
    proof = verify(b.build())
    assert proof.rounds == 3 and proof.in_place

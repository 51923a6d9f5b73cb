"""Costs against the textbook, topologies, critical paths, traces, and scale."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest

from pynccl.collectives import ALGORITHMS, IN, OUT, Builder, Schedule, generate, verify
from pynccl.collectives.cost import BUS_FACTORS, cost, timeline
from pynccl.collectives.schedule import COLLECTIVES
from pynccl.collectives.topology import Link, Topology, flat, nodes, parse, rails
from pynccl.collectives.trace import trace_events, write_trace

# Powers of two, so that all sums are exact.
_LINK = Link("wire", alpha=1.0, beta=2.0**-10)
_SLOW = Link("slow", alpha=16.0, beta=2.0**-6)
_SLOWER = Link("slower", alpha=64.0, beta=2.0**-6)
_GAMMA = 2.0**-12
_SIZE = 1 << 16


def _flat(n: int) -> Topology:
    return flat(n, _LINK, gamma=_GAMMA)


def _doubling(n: int) -> Schedule:
    """Recursive doubling of a power of two of ranks, with everything in each message."""
    b = Builder("doubling", "all_reduce", n)
    r = b.ranks
    if n == 1:
        b.copy(0, IN[0], OUT[0])
    for s in b.rounds(n.bit_length() - 1):
        mine = IN[0] if s == 0 else OUT[0]
        b.move(r, r ^ (1 << s), mine, OUT[0], reduce=mine)
    return b.build()


@pytest.mark.parametrize("n", [1, 2, 4, 16])
def test_a_ring_takes_the_time_of_the_textbook(n: int) -> None:
    found = cost(generate("ring", n), _SIZE, _flat(n))
    steps, share = 2 * (n - 1), _SIZE / n
    assert found.time == steps * (_LINK.alpha + share * _LINK.beta) + (n - 1) * share * _GAMMA
    assert found.rounds == steps and found.messages == steps * n
    assert found.sent.tolist() == found.received.tolist() == [steps * share] * n
    assert found.reduced.tolist() == [(n - 1) * share] * n


@pytest.mark.parametrize("n", [2, 4, 64])
def test_recursive_doubling_takes_the_time_of_the_textbook(n: int) -> None:
    found = cost(_doubling(n), _SIZE, _flat(n))
    assert found.time == math.log2(n) * (_LINK.alpha + _SIZE * _LINK.beta + _SIZE * _GAMMA)


def test_memory_traffic_counts_reads_and_writes() -> None:
    b = Builder("b", "all_reduce", 2)
    b.move(b.ranks, 1 - b.ranks, IN[0], OUT[0], reduce=IN[0])  # reads 1; reads 2 and writes 1
    found = cost(b.build(), 1024, _flat(2))
    assert found.traffic.tolist() == [4 * 1024, 4 * 1024]
    b = Builder("b", "broadcast", 2)
    b.copy(0, IN[0], OUT[0])
    b.move(0, 1, IN[0], OUT[0])
    assert cost(b.build(), 1024, _flat(2)).traffic.tolist() == [3 * 1024, 1024]


def test_copies_take_time_if_the_topology_says_so() -> None:
    b = Builder("b", "broadcast", 1)
    b.copy(0, IN[0], OUT[0])
    assert cost(b.build(), 1024, flat(1, _LINK, delta=0.5)).time == 512
    assert cost(b.build(), 1024, flat(1, _LINK)).time == 0


def test_sizes_are_of_the_larger_buffer_and_whole_elements() -> None:
    b = Builder("b", "all_gather", 2)
    b.move(b.ranks, 1 - b.ranks, IN[0], OUT[b.ranks])
    found = cost(b.build(), 1030, _flat(2), itemsize=4)
    assert found.bytes == 1024 and found.sent.tolist() == [512, 512]
    assert found.algbw == 1024 / found.time and found.busbw == found.algbw / 2


def test_chunks_of_an_odd_count_are_counted_exactly() -> None:
    for count in (0, 1, 5, 6, 7, 1001):
        found = cost(generate("ring", 6), 4 * count, _flat(6))
        assert found.sent.sum() == 2 * 5 * 4 * count  # each chunk makes 5 hops in each half


def test_messages_of_a_round_share_their_port() -> None:
    def star(sources: list[int]) -> float:
        b = Builder("star", "reduce", 4)
        b.move(np.array(sources), 0, IN[0], OUT[0])
        return cost(b.build(), _SIZE, _flat(4)).time

    assert star([1]) == _LINK.alpha + _SIZE * _LINK.beta
    assert star([1, 2, 3]) == _LINK.alpha + 3 * _SIZE * _LINK.beta


def test_ranks_of_a_node_share_its_port_and_rails_do_not() -> None:
    b = Builder("across", "all_gather", 4)
    b.move(b.ranks, (b.ranks + 2) % 4, IN[0], OUT[b.ranks])
    schedule, block = b.build(), _SIZE / 4
    shared = cost(schedule, _SIZE, nodes(4, 2, inside=_LINK, between=_SLOW, gamma=_GAMMA))
    own = cost(schedule, _SIZE, rails(4, 2, inside=_LINK, between=_SLOW, across=_SLOWER, gamma=_GAMMA))
    assert shared.time == _SLOW.alpha + 2 * block * _SLOW.beta
    assert own.time == _SLOW.alpha + block * _SLOW.beta
    assert [link["messages"] for link in shared.links] == [0, 4]
    assert shared.links[1]["busiest"] == 2 * block and own.links[1]["busiest"] == block


def test_changing_the_rail_takes_the_link_across() -> None:
    b = Builder("across", "all_gather", 4)
    b.move(b.ranks, (b.ranks + 3) % 4, IN[0], OUT[b.ranks])  # 0 to 3 and 2 to 1: other node, other rail
    found = cost(b.build(), _SIZE, rails(4, 2, inside=_LINK, between=_SLOW, across=_SLOWER))
    assert [link["messages"] for link in found.links] == [2, 0, 2]
    assert found.time == _SLOWER.alpha + _SIZE / 4 * _SLOWER.beta


def test_a_port_is_shared_by_all_classes_that_go_through_it() -> None:
    b = Builder("two", "all_gather", 4)
    b.move(0, np.array([2, 3]), IN[0], OUT[0])  # on the rail and across, through rank 0's one network port
    found = cost(b.build(), _SIZE, rails(4, 2, inside=_LINK, between=_SLOW, across=_SLOWER))
    assert found.time == _SLOWER.alpha + 2 * _SIZE / 4 * _SLOW.beta


def test_nodes_may_be_uneven() -> None:
    assert nodes(5, [2, 3]).node.tolist() == [0, 0, 1, 1, 1]
    assert nodes(5, 2).node.tolist() == [0, 0, 1, 1, 2]
    assert parse("nodes:2,3", 5).node.tolist() == [0, 0, 1, 1, 1]
    assert parse("flat", 5).name == "flat" and "rails" in parse("rails:2", 4).name
    for text in ("nodes", "flat:2", "ring:2", "nodes:a", "nodes:2,2", "nodes:0"):
        with pytest.raises(ValueError, match="topology"):
            parse(text, 5)


def test_the_critical_path_is_unbroken_and_as_long_as_the_time() -> None:
    for n, topology in ((5, _flat(5)), (6, nodes(6, [4, 2])), (8, rails(8, 4))):
        found = cost(generate("ring", n, channels=2), 1 << 20, topology)
        assert found.path[0].begin == 0 and found.path[-1].end == found.time
        assert len(found.path) == 2 * (n - 1)
        for before, after in zip(found.path[:-1], found.path[1:], strict=True):
            assert before.end == after.begin and before.round < after.round


def test_the_critical_path_goes_through_the_slow_link() -> None:
    """A chain 0 -> 1 -> 2 of which rank 2 is alone in its node, while rank 3 gets everything quickly."""
    b = Builder("chain", "broadcast", 4)
    b.copy(0, IN[0], OUT[0])
    b.move(0, np.array([1, 3]), IN[0], OUT[0])
    b.move(1, 2, OUT[0], OUT[0], round=1)
    topology = nodes(4, [2, 1, 1], inside=_LINK, between=_SLOW)
    found = cost(b.build(), _SIZE, topology)
    assert [hop.rank for hop in found.path] == [1, 2]
    assert found.path[1].what == "message from rank 1 (slow)"


def test_rounds_of_other_numbers_cost_the_same() -> None:
    """Sends and receives of a chain in rounds of their own ranks' counting."""
    together, apart = Builder("c", "broadcast", 4), Builder("c", "broadcast", 4)
    for rank in range(3):
        together.move(rank, rank + 1, IN[0] if rank == 0 else OUT[0], OUT[0], round=rank)
        apart.send(rank, rank + 1, IN[0] if rank == 0 else OUT[0], round=1)
        apart.recv(rank + 1, rank, OUT[0], round=0)
    one, other = (cost(b.build(), _SIZE, _flat(4)) for b in (together, apart))
    assert one.time == other.time == 3 * (_LINK.alpha + _SIZE * _LINK.beta)


def test_a_topology_of_other_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="a topology of 4 ranks for a schedule of 3"):
        cost(generate("ring", 3), 1024, flat(4))
    with pytest.raises(ValueError, match="-1 bytes"):
        cost(generate("ring", 3), -1)


def test_costs_are_printed_and_become_json() -> None:
    found = cost(generate("ring", 4), 1 << 20)
    assert "49152" not in str(found) and "1572864 bytes the most of a rank" in str(found)
    read = json.loads(json.dumps(found.as_json()))
    assert read["most_sent"] == 1572864 and read["rounds"] == 6 and read["path"][0]["begin"] == 0


def test_bus_factors_are_there_for_all_collectives() -> None:
    assert set(BUS_FACTORS) == set(COLLECTIVES)


def test_the_timeline_is_what_the_cost_says(tmp_path: Path) -> None:
    schedule = generate("ring", 4)
    t = timeline(schedule, _SIZE, nodes(4, 2))
    assert t.end.max() == cost(schedule, _SIZE, nodes(4, 2)).time
    file = write_trace(tmp_path / "ring.json", schedule, _SIZE, nodes(4, 2))
    events = json.loads(file.read_text())["traceEvents"]
    assert events == trace_events(schedule, _SIZE, nodes(4, 2))
    spans = [event for event in events if event["ph"] == "X"]
    rounds = [event for event in spans if event["name"].startswith("round ")]
    assert len(rounds) == 4 * 6 and len(spans) - len(rounds) == 24
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(t.end.max() * 1e6)
    assert {event["pid"] for event in rounds} == {0, 1} and len({event["tid"] for event in rounds}) == 4
    arrows = [[event["id"] for event in events if event["ph"] == phase] for phase in "sf"]
    assert sorted(arrows[0]) == sorted(arrows[1]) == list(range(24))
    said = [text for event in rounds for text in event["args"].values()]
    assert sorted(said) == sorted(str(step) for own in schedule for step in own)


@pytest.mark.parametrize("row", ALGORITHMS.values(), ids=lambda row: f"{row.collective}-{row.name}")
def test_every_algorithm_has_a_cost(row) -> None:
    for n in (1, 2, 6, 8):
        found = cost(row.generator(n), _SIZE * n, nodes(n, 3))
        assert found.sent.sum() == found.received.sum() == sum(link["bytes"] for link in found.links)
        assert (found.time > 0) == (n > 1) and (not found.path or found.path[-1].end == found.time)


# Scale: by processor time, because the machine may be busy with something else.


def test_a_ring_of_1024_ranks_is_generated_proved_and_costed_in_seconds() -> None:
    began = time.process_time()
    schedule = generate("ring", 1024)
    proof = verify(schedule)
    found = cost(schedule, 1 << 30)
    assert len(schedule) == 4 * 1023 * 1024 and proof.rounds == found.rounds == 2046
    assert time.process_time() - began < 10


def test_a_logarithmic_algorithm_is_costed_for_65536_ranks() -> None:
    began = time.process_time()
    found = cost(_doubling(1 << 16), _SIZE, _flat(1 << 16))
    assert found.time == 16 * (_LINK.alpha + _SIZE * (_LINK.beta + _GAMMA))
    assert time.process_time() - began < 10


def relay(n: int) -> Schedule:
    """Ranks take turns: up to the last and back, two or three rounds for each of them."""
    b = Builder("relay", "all_reduce", n)
    b.copy(0, IN[0], OUT[0])
    for r in range(1, n):
        b.next_round()
        b.move(r - 1, r, OUT[0], OUT[0], reduce=IN[0], left=True)
    for r in reversed(range(1, n)):
        b.next_round()
        b.move(r, r - 1, OUT[0], OUT[0])
    return b.build()


@pytest.mark.parametrize(
    ("schedule", "rounds"),
    [
        (relay(33), 64),
        (relay(2), 2),
        (relay(1), 0),
        (generate("ring", 5), 8),
        (generate("recursive_doubling", 16), 4),
        (generate("direct", 7), 2),
        (generate("ring", 6, collective="broadcast", chunks=4), 8),
    ],
    ids=str,
)
def test_rounds_are_those_that_wait_for_each_other(schedule: Schedule, rounds: int) -> None:
    proof = verify(schedule)
    assert proof.rounds == cost(schedule, 1 << 20).rounds == rounds
    assert f" steps in {rounds} rounds" in str(proof)
    only_latency = flat(schedule.n, Link("link", 1.0, 1e-30), gamma=0.0)
    assert cost(schedule, 1 << 20, only_latency).time == rounds

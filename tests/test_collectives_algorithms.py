"""The algorithms: proved for any number of ranks, rounds and bytes as their formulas say, right on data."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pynccl.collectives import ALGORITHMS, COLLECTIVES, Buffer, Kind, Schedule, generate, verify
from pynccl.collectives.cost import cost
from pynccl.collectives.registry import Row
from pynccl.collectives.report import schedules_of
from pynccl.collectives.topology import Link, flat, rails
from pynccl.collectives.tree import btree, dtree

RANKS = range(1, 34)
ROWS = pytest.mark.parametrize("row", ALGORITHMS.values(), ids=lambda row: f"{row.collective}-{row.name}")

# Those that reduce contributions in rank order, so that operations that do not commute are right.
RANK_ORDER = {
    ("all_reduce", "binomial"),
    ("all_reduce", "recursive_doubling"),
    ("all_reduce", "halving_doubling"),
    ("all_reduce", "direct"),
    ("all_reduce", "one_shot"),
    ("reduce_scatter", "direct"),
    ("reduce", "direct"),
}


# Proofs


@ROWS
def test_every_algorithm_is_proved_for_1_to_33_ranks_with_0_to_4_slots(row: Row) -> None:
    for n in RANKS:
        schedule = row.generator(n)
        proof = verify(schedule, slots=(0, 1, 2, 3, 4))
        assert schedule.deterministic and proof.deterministic
        assert proof.in_place or row.collective == "all_to_all"
        if (row.collective, row.name) in RANK_ORDER:
            assert proof.rank_order, schedule


# Every algorithm that takes channels, chunks, ranks a node or an aggregation; 1 to 4 of them.
PARAMS = {
    "ring": ("channels", "chunks"),
    "tree": ("chunks",),
    "hierarchical": ("ranks_per_node",),
    "pat": ("aggregation",),
}


@pytest.mark.parametrize("value", [1, 2, 3, 4])
@ROWS
def test_every_parameter_from_1_to_4_is_proved(row: Row, value: int) -> None:
    for name in PARAMS.get(row.name, ()):
        if name == "chunks" and row.name == "ring" and row.collective not in ("broadcast", "reduce"):
            continue
        if name == "aggregation" and value == 3:
            continue
        for n in (1, 2, 5, 8, 11, 33):
            schedule = row.generator(n, **{name: value})
            assert schedule.params[name] in (value, min(value, max(_power(n) // 2, 1)))
            verify(schedule, slots=(0, 1, 2, 3, 4))


@pytest.mark.parametrize("nodes", [[3, 5, 2], [1, 1, 1], [1, 7], [4, 4, 4], [2, 1, 3, 1], [6]])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_nodes_may_have_any_numbers_of_ranks(collective: str, nodes: list[int]) -> None:
    n = sum(nodes)
    schedule = generate("hierarchical", n, collective=collective, ranks_per_node=nodes)
    assert verify(schedule, slots=(0, 1, 2, 3, 4)).in_place
    check_on_data(schedule, count=2 * n + 1)


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
@pytest.mark.parametrize("name", ["ring", "tree", "binomial", "direct"])
def test_first_middle_and_last_roots_are_proved(collective: str, name: str) -> None:
    for n in (2, 3, 7, 8, 33):
        for root in sorted({0, 1, n // 2, n - 1}):
            schedule = generate(name, n, collective=collective, root=root)
            assert schedule.root == root
            verify(schedule, slots=(0, 1, 4))


# Rounds and bytes


def _log(n: int) -> int:
    return (n - 1).bit_length()


def _power(n: int) -> int:
    return 1 << _log(n)


def _fold(n: int) -> int:
    """2 if n is not a power of two: the rounds before and after."""
    return 2 * (n != _power(n))


def _floor(n: int) -> int:
    return n.bit_length() - 1


# Rounds of n ranks, and the most that a rank sends, in blocks (an all_reduce, broadcast or reduce has one).
Formula = tuple[Callable[[int], int], Callable[[int], float]]
FORMULAS: dict[tuple[str, str], Formula] = {
    ("all_reduce", "ring"): (lambda n: 2 * (n - 1), lambda n: 2 * (n - 1) / n),
    ("all_reduce", "binomial"): (lambda n: 2 * _log(n), lambda n: max(_log(n), n > 1)),
    ("all_reduce", "recursive_doubling"): (
        lambda n: _floor(n) + _fold(n),
        lambda n: _floor(n) + (n != _power(n)),
    ),
    ("all_reduce", "halving_doubling"): (
        lambda n: 2 * _floor(n) + _fold(n),
        lambda n: 2 - 2 / 2 ** _floor(n) + (n != _power(n)),
    ),
    ("all_reduce", "swing"): (
        lambda n: 2 * _floor(n) + _fold(n),
        lambda n: 2 - 2 / 2 ** _floor(n) + (n != _power(n)),
    ),
    ("all_reduce", "direct"): (lambda n: 2 * (n > 1), lambda n: 2 * (n - 1) / n),
    ("all_reduce", "one_shot"): (lambda n: n > 1, lambda n: n - 1),
    ("reduce_scatter", "ring"): (lambda n: n - 1, lambda n: n - 1),
    ("reduce_scatter", "pat"): (_log, lambda n: n - 1),
    ("reduce_scatter", "direct"): (lambda n: n > 1, lambda n: n - 1),
    ("all_gather", "ring"): (lambda n: n - 1, lambda n: n - 1),
    ("all_gather", "bruck"): (_log, lambda n: n - 1),
    ("all_gather", "pat"): (_log, lambda n: n - 1),
    ("all_gather", "direct"): (lambda n: n > 1, lambda n: n - 1),
    ("broadcast", "ring"): (lambda n: (n - 2 + 8) * (n > 1), lambda n: int(n > 1)),
    ("broadcast", "binomial"): (_log, _log),
    ("broadcast", "direct"): (lambda n: n > 1, lambda n: n - 1),
    ("reduce", "ring"): (lambda n: (n - 2 + 8) * (n > 1), lambda n: int(n > 1)),
    ("reduce", "binomial"): (_log, lambda n: int(n > 1)),
    ("reduce", "direct"): (lambda n: n > 1, lambda n: int(n > 1)),
    ("all_to_all", "pairwise"): (lambda n: n - 1, lambda n: n - 1),
    ("all_to_all", "direct"): (lambda n: n > 1, lambda n: n - 1),
}


def sent_blocks(schedule: Schedule) -> np.ndarray:
    """What each rank sends, in blocks."""
    c = schedule.columns
    sends = c["kind"] == Kind.SEND
    chunks = np.bincount(schedule.ranks[sends], weights=c["chunks"][sends], minlength=schedule.n)
    return chunks / schedule.parts


def message_rounds(schedule: Schedule) -> int:
    """Different rounds with messages in them, of all ranks together."""
    c = schedule.columns
    return len(np.unique(c["round"][c["kind"] <= Kind.RECV_REDUCE]))


@pytest.mark.parametrize("key", FORMULAS, ids="-".join)
def test_rounds_and_bytes_are_those_of_the_formula(key: tuple[str, str]) -> None:
    rounds, sends = FORMULAS[key]
    for n in RANKS:
        schedule = generate(key[1], n, collective=key[0])
        assert message_rounds(schedule) == rounds(n), n
        assert sent_blocks(schedule).max() == pytest.approx(sends(n), rel=1e-12), n


@pytest.mark.parametrize(
    ("collective", "name", "before", "after"),
    [("reduce_scatter", "halving", "n", 1), ("all_gather", "recursive_doubling", 1, "n")],
)
def test_folding_takes_two_rounds_more(collective: str, name: str, before: Any, after: Any) -> None:
    for n in RANKS:
        schedule = generate(name, n, collective=collective)
        assert message_rounds(schedule) == _floor(n) + _fold(n)
        total = 0
        p = 1 << _floor(n)
        for size in (1 << s for s in range(_floor(n))):  # each of p sends what stands for `size` of p
            first = [j + min(j, n - p) for j in range(p + 1)]
            total += sum(first[j + size] - first[j] for j in range(0, p, size)) * size
        extra = (n - p) * sum(n if part == "n" else part for part in (before, after))
        assert sent_blocks(schedule).sum() == total + extra
        if n == p:
            assert (sent_blocks(schedule) == n - 1).all()


def test_bruck_all_to_all_takes_log_n_messages_of_half_the_blocks() -> None:
    for n in RANKS:
        schedule = generate("bruck", n, collective="all_to_all")
        assert message_rounds(schedule) == _log(n)
        assert (schedule.columns["kind"] == Kind.SEND).sum() == n * _log(n)
        expected = sum(bin(distance).count("1") for distance in range(n))
        assert (sent_blocks(schedule) == expected).all()


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("a", [1, 2, 4, 8, 16])
def test_pat_is_logarithmic_then_linear_with_a_blocks_a_round(collective: str, a: int) -> None:
    for n in (8, 13, 16, 29, 32, 33):
        schedule = generate("pat", n, collective=collective, aggregation=a)
        used, power = schedule.params["aggregation"], _power(n)
        assert used == min(a, power // 2)
        linear = min(power // used, n) - 1
        assert message_rounds(schedule) == _log(used) + linear
        c = schedule.columns[schedule.columns["kind"] == Kind.SEND]
        ranks = schedule.ranks[schedule.columns["kind"] == Kind.SEND]
        assert (
            max(collections.Counter(zip(ranks.tolist(), c["round"].tolist(), strict=True)).values()) <= used
        )
        assert (sent_blocks(schedule) == n - 1).all()
        bounded = used * _log(power // used) if collective == "reduce_scatter" else 0
        assert schedule.scratch_chunks <= bounded


@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
def test_two_trees_use_the_full_bandwidth(chunks: int) -> None:
    for n in (2, 3, 4, 5, 8, 13, 16, 17, 31, 32, 33):
        both = generate("tree", n, chunks=chunks)
        assert sent_blocks(both).max() <= 2
        depth = max(_depth(parent) for parent in dtree(n))
        assert message_rounds(both) == 2 * depth - 1 + chunks
        assert _floor(n) <= depth <= _floor(n) + 1
        below = max(_depth(parent) for parent in dtree(n - 1)) + 1
        for collective in ("broadcast", "reduce"):
            one = generate("tree", n, collective=collective, chunks=chunks)
            assert sent_blocks(one).max() <= 1
            assert message_rounds(one) == below - 1 + chunks
    assert sent_blocks(generate("tree", 16, collective="broadcast"))[0] == 1


def _depth(parent: np.ndarray) -> int:
    def levels(r: int) -> int:
        return 0 if parent[r] < 0 else 1 + levels(int(parent[r]))

    return max(levels(r) for r in range(len(parent)))


@pytest.mark.parametrize("ranks", [(1, 8), (2, 4), (4, 3), (8, 2), (5, 5)])
def test_two_levels_send_a_share_between_nodes(ranks: tuple[int, int]) -> None:
    m, nodes = ranks
    n = m * nodes
    inside = {"all_reduce": 2 * (m - 1) / m, "all_gather": nodes * (m - 1), "reduce_scatter": nodes * (m - 1)}
    between = {"all_reduce": 2 * (nodes - 1) / n, "all_gather": nodes - 1, "reduce_scatter": nodes - 1}
    rounds = {"all_reduce": 2 * (m > 1) + 2 * (nodes - 1), "all_gather": nodes - (m == 1)}
    for collective in inside:
        schedule = generate("hierarchical", n, collective=collective, ranks_per_node=m)
        c = schedule.columns
        away = (c["kind"] == Kind.SEND) & (c["peer"] // m != schedule.ranks // m)
        sent = np.bincount(schedule.ranks[away], weights=c["chunks"][away], minlength=n) / schedule.parts
        assert sent == pytest.approx(np.full(n, between[collective]), rel=1e-12)
        assert sent_blocks(schedule) - sent == pytest.approx(np.full(n, inside[collective]), rel=1e-12)
        assert message_rounds(schedule) == rounds.get(collective, rounds["all_gather"])


def test_every_algorithm_has_its_rounds_tested() -> None:
    elsewhere = {
        *((collective, "tree") for collective in ("all_reduce", "broadcast", "reduce")),
        *((collective, "hierarchical") for collective in ("all_reduce", "all_gather", "reduce_scatter")),
        ("reduce_scatter", "halving"),
        ("all_gather", "recursive_doubling"),
        ("all_to_all", "bruck"),
    }
    assert set(FORMULAS) | elsewhere == set(ALGORITHMS)
    assert not set(FORMULAS) & elsewhere


# Those whose formula is only about right, because trees are not quite of the depth log n.
ABOUT = {(collective, "tree") for collective in ("all_reduce", "broadcast", "reduce")}


def _value(formula: str, **names: float) -> float:
    """The value of a formula of the table, in which products are written without a sign."""
    for name in ("n", "A"):
        formula = formula.replace(f"log {name}", f"log{name}")
        names[f"log{name}"] = math.log2(names[name])
    words = re.findall(r"[A-Za-z]+[0-9]?|[0-9]+|[-+/()]", formula)
    product = [
        "*" if before[-1] not in "-+/(" and after[0] not in "-+/)" else ""
        for before, after in zip(words, words[1:], strict=False)
    ]
    text = "".join(word + times for word, times in zip(words, [*product, ""], strict=True))
    return float(eval(text, {"__builtins__": {}}, names))  # noqa: S307 - our own table


@ROWS
def test_the_time_of_every_algorithm_is_its_formula(row: Row) -> None:
    n, m, size = 16, 4, 3 << 20  # what all their chunks divide
    a1, b1, a2, b2, g = 2.0**-20, 2.0**-38, 2.0**-17, 2.0**-33, 2.0**-35
    inside, between = Link("inside", a1, b1), Link("between", a2, b2)
    for variant in ({}, *row.variants):
        if row.name == "hierarchical":
            variant = {"ranks_per_node": m}
            topology = rails(n, m, inside=inside, between=between, gamma=g)
        else:
            topology = flat(n, inside, gamma=g)
        names = {"n": n, "m": m, "N": n // m, "S": size, "a": a1, "b": b1, "g": g}
        names |= {
            "a1": a1,
            "b1": b1,
            "a2": a2,
            "b2": b2,
            "k": variant.get("chunks", 8),
            "A": variant.get("aggregation", n // 2),
        }
        formula = _value(row.formula, **names)
        time = cost(row.generator(n, **variant), size, topology).time
        if (row.collective, row.name) in ABOUT:
            assert 0.65 * formula < time < 1.05 * formula, variant
        else:
            assert time == pytest.approx(formula, rel=1e-9), variant


# Shapes


def test_the_trees_are_ncclGetBtree_and_ncclGetDtree() -> None:
    # The drawing in NCCL's trees.cc, of 14 ranks: 0 - 8 - (4, 12), 4 - (2, 6), 12 - (10, 13), and odd leaves.
    assert btree(14).tolist() == [-1, 2, 4, 2, 8, 6, 4, 6, 0, 10, 12, 10, 8, 12]
    # And of the second trees of 12 and of 13 ranks.
    assert dtree(12)[1].tolist() == [1, 3, 1, 11, 5, 7, 5, 3, 9, 7, 9, -1]
    assert dtree(13)[1].tolist() == [9, -1, 3, 5, 3, 9, 7, 5, 7, 1, 11, 0, 11]
    for n in range(1, 70):
        one, two = dtree(n)
        assert (one < 0).sum() == (two < 0).sum() == 1
        inner = [set(parent[parent >= 0].tolist()) for parent in (one, two)]
        assert len(inner[0] & inner[1]) <= 1  # the root of one, which has one child, at most
        for parent in (one, two):
            children = np.bincount(parent[parent >= 0], minlength=n)
            assert children.max(initial=0) <= 2 and children[parent < 0] <= 1


def test_swing_pairs_and_distances() -> None:
    schedule = generate("swing", 16)
    peers = [[step.peer for step in schedule.steps(0) if step.kind == Kind.SEND][s] for s in range(8)]
    assert peers == [1, 15, 3, 11, 11, 3, 15, 1]  # r + 1, r - 1, r + 3, r - 5 and back
    sent = [step.src.chunks for step in schedule.steps(0) if step.kind == Kind.SEND and step.src]
    assert sent == [8, 4, 2, 1, 1, 2, 4, 8]


# Bad parameters


@pytest.mark.parametrize(
    ("name", "collective", "params", "said"),
    [
        ("pat", "all_gather", {"aggregation": 3}, "aggregation 3 is not a power of two"),
        ("pat", "reduce_scatter", {"aggregation": 0}, "aggregation 0 is not a power of two"),
        ("hierarchical", "all_reduce", {"ranks_per_node": 0}, "0 ranks a node; take 1 or more"),
        (
            "hierarchical",
            "all_gather",
            {"ranks_per_node": [2, 3]},
            r"nodes of \[2, 3\] ranks are not 6 ranks",
        ),
        ("hierarchical", "all_gather", {"ranks_per_node": [6, 0]}, "each has 1 or more"),
        ("ring", "all_reduce", {"channels": 0}, "parts is 0; take a whole number from 1"),
        ("ring", "broadcast", {"chunks": 0}, "parts is 0; take a whole number from 1"),
        ("ring", "broadcast", {"root": 6}, "root 6 is not one of 6 ranks"),
        ("tree", "reduce", {"root": -1}, "root -1 is not one of 6 ranks"),
    ],
)
def test_bad_parameters_are_refused(name: str, collective: str, params: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        generate(name, 6, collective=collective, **params)


# On data


def check_on_data(schedule: Schedule, count: int, in_place: bool = False) -> None:
    """Play a schedule on integers, round by round, and compare with the collective."""
    n, collective = schedule.n, COLLECTIVES[schedule.collective]
    random = np.random.default_rng(count)
    inputs = random.integers(0, 1 << 40, (n, schedule.in_blocks * count))
    buffers: list[tuple[np.ndarray, ...]] = []
    for rank in range(n):
        out = np.full(schedule.out_blocks * count, -1)
        mine = inputs[rank].copy()
        if (
            in_place
            and collective.in_place is not None
            and (collective.only_root is None or rank == schedule.root)
        ):
            i, o = (rank if block == "r" else int(block) for block in collective.in_place)
            if schedule.in_blocks <= schedule.out_blocks:
                out[o * count : (o + 1) * count] = mine
                mine = out[o * count : (o + 1) * count]
            else:
                out = mine[i * count : (i + 1) * count]
        scratch = np.full(-(-schedule.scratch_chunks // schedule.parts) * count, -1)
        buffers.append((mine, out, scratch))
    _play(schedule, buffers, count)
    for rank in range(n):
        if schedule.has(Buffer.OUT, rank):
            expected = _expected(schedule, inputs.reshape(n, schedule.in_blocks, count), rank)
            np.testing.assert_array_equal(
                buffers[rank][1], expected.reshape(-1), err_msg=f"{schedule} {rank}"
            )
        if not in_place:
            np.testing.assert_array_equal(buffers[rank][0], inputs[rank])


def _expected(schedule: Schedule, inputs: np.ndarray, rank: int) -> np.ndarray:
    return {
        "all_reduce": lambda: inputs.sum(0),
        "reduce": lambda: inputs.sum(0),
        "reduce_scatter": lambda: inputs[:, rank].sum(0),
        "all_gather": lambda: inputs[:, 0],
        "broadcast": lambda: inputs[schedule.root],
        "all_to_all": lambda: inputs[:, rank],
    }[schedule.collective]()


def _play(schedule: Schedule, buffers: list[tuple[np.ndarray, ...]], count: int) -> None:
    steps = list(schedule)
    at = [0] * schedule.n
    queues: dict[tuple[int, int, int], collections.deque[np.ndarray]] = collections.defaultdict(
        collections.deque
    )

    def view(rank: int, span: Any) -> np.ndarray:
        begin, end = schedule.span_bounds(span, count)
        return buffers[rank][span.buffer][begin:end]

    def sends(rank: int, of_round: list[Any]) -> None:
        for step in of_round:
            if step.kind == Kind.SEND:
                queues[rank, step.peer, step.channel].append(view(rank, step.src).copy())

    def group(rank: int) -> list[Any]:
        rest = steps[rank][at[rank] :]
        return [step for step in rest if step.round == rest[0].round] if rest else []

    groups = [group(rank) for rank in range(schedule.n)]
    for rank, of_round in enumerate(groups):
        sends(rank, of_round)
    waiting = set(range(schedule.n))
    while waiting:
        went = False
        for rank in sorted(waiting):
            wanted = collections.Counter(
                (s.peer, rank, s.channel) for s in groups[rank] if s.kind in (Kind.RECV, Kind.RECV_REDUCE)
            )
            if any(len(queues[connection]) < times for connection, times in wanted.items()):
                continue
            went = True
            messages = [
                queues[s.peer, rank, s.channel].popleft() if s.kind in (Kind.RECV, Kind.RECV_REDUCE) else None
                for s in groups[rank]
            ]
            for step, message in zip(groups[rank], messages, strict=True):
                if step.kind == Kind.RECV:
                    view(rank, step.dst)[:] = message
            for step, message in zip(groups[rank], messages, strict=True):
                if step.kind in (Kind.SEND, Kind.RECV):
                    continue
                source, target = view(rank, step.src), view(rank, step.dst)
                if step.kind == Kind.COPY:
                    target[:] = source
                    continue
                x, y = (source, message) if step.kind == Kind.RECV_REDUCE else (target, source)
                target[:] = y + x if step.left else x + y
            at[rank] += len(groups[rank])
            groups[rank] = group(rank)
            sends(rank, groups[rank])
            if not groups[rank]:
                waiting.discard(rank)
        assert went, f"{schedule}: {sorted(waiting)} wait for ever"
    assert not any(queues.values())


@pytest.mark.parametrize("in_place", [False, True], ids=["out-of-place", "in-place"])
@ROWS
def test_every_algorithm_is_right_on_integers_of_any_count(row: Row, in_place: bool) -> None:
    if in_place and row.collective == "all_to_all":
        assert COLLECTIVES["all_to_all"].in_place is None
        return
    for schedule in [*map(row.generator, (1, 2, 5, 8)), *schedules_of(row, [3])]:
        n = schedule.n
        for count in sorted({0, 1, n - 1, n, n + 1, 1000}):
            check_on_data(schedule, count, in_place)


@pytest.mark.parametrize("key", sorted(RANK_ORDER), ids="-".join)
def test_reductions_that_do_not_commute_are_right_in_rank_order(key: tuple[str, str]) -> None:
    for n in (1, 2, 3, 6, 8, 11):
        schedule = generate(key[1], n, collective=key[0])
        count = 2 * n + 1
        buffers: list[tuple[np.ndarray, ...]] = []
        for rank in range(n):
            mine = [f"{chr(ord('a') + rank)}{i} " for i in range(schedule.in_blocks * count)]
            lengths = (schedule.out_blocks * count, -(-schedule.scratch_chunks // schedule.parts) * count)
            rest = [np.full(length, "?", dtype=object) for length in lengths]
            buffers.append((np.array(mine, dtype=object), *rest))
        joined = sum((mine for mine, *_ in buffers[1:]), buffers[0][0].copy())  # strings, end to end
        _play(schedule, buffers, count)
        for rank in range(n):
            if schedule.has(Buffer.OUT, rank):
                block = rank if schedule.in_blocks > 1 else 0
                assert buffers[rank][1].tolist() == joined[block * count : (block + 1) * count].tolist()


# Scale


@pytest.mark.parametrize(
    ("name", "n"),
    [("halving_doubling", 65535), ("recursive_doubling", 65536), ("swing", 65535), ("binomial", 65536)],
)
def test_logarithmic_algorithms_are_generated_for_65536_ranks(name: str, n: int) -> None:
    schedule = generate(name, n)
    assert message_rounds(schedule) == FORMULAS["all_reduce", name][0](n)
    assert math.isclose(sent_blocks(schedule).max(), FORMULAS["all_reduce", name][1](n))

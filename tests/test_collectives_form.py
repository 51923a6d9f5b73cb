"""What a schedule may be made of: its fields, its JSON, and what a builder takes."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pynccl.collectives import (
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
    cost,
    find_fault,
    generate,
    to_msccl,
    verify,
)
from pynccl.collectives.form import MOST_CHUNKS, MOST_RANKS
from pynccl.collectives.simulate import simulate


def _every_kind() -> Schedule:
    """A right all_reduce of two ranks that has each kind of step."""
    b = Builder("kinds", "all_reduce", 2, in_place=False)
    b.move(b.ranks, 1 - b.ranks, IN[0], SCRATCH[0])
    b.copy(b.ranks, IN[0], OUT[0])
    b.next_round()
    b.reduce(b.ranks, SCRATCH[0], OUT[0])
    b.next_round()
    b.move(0, 1, OUT[0], SCRATCH[1])
    b.move(1, 0, IN[0], SCRATCH[1], reduce=IN[0], left=True)
    return b.build()


def test_the_schedule_of_every_kind_is_right() -> None:
    schedule = _every_kind()
    assert verify(schedule).deterministic
    assert set(schedule.columns["kind"].tolist()) == set(map(int, Kind))


# The head


HEADS: dict[str, tuple[list[Any], str]] = {
    "name": ([5, None, [1], "", "a\0b", "\ud800", "two\nlines", "x" * 201], "take 1 to 200 printable char"),
    "collective": ([5, None, ["all_reduce"], {}, "allreduce", ""], "there are all_reduce, reduce_scatter, "),
    "n": (
        [0, -1, 2.0, "2", True, None, MOST_RANKS + 1, 10**9, 2**70],
        f"a whole number from 1 to {MOST_RANKS}",
    ),
    "parts": ([0, 1.5, 1.0, True, None, 10**8, 10**30], f"take a whole number from 1 to {MOST_CHUNKS}"),
    "root": ([-1, 0.0, 0.5, False, "0", 2**31], f"take a whole number from 0 to {MOST_RANKS - 1}"),
    "scratch_chunks": ([-1, 1.5, "1", True, 10**8, 10**30], f"take a whole number from 0 to {MOST_CHUNKS}"),
    "deterministic": (["no", 5, None, 0, 1], "take True or False"),
    "in_place": (["no", 1.5, None, []], "take True or False"),
    "params": ([5, None, [1], "x", {"a": float("nan")}], "take a dictionary with names as keys"),
}
EACH_HEAD = [(name, value) for name, (values, _) in HEADS.items() for value in values]


@pytest.mark.parametrize(("name", "value"), EACH_HEAD, ids=lambda value: repr(value)[:20])
def test_a_wrong_field_is_refused_by_name_wherever_it_comes_from(name: str, value: Any) -> None:
    schedule, remedy = _every_kind(), HEADS[name][1]
    text = json.dumps({**json.loads(schedule.to_json()), name: value})
    for make in (lambda: schedule.replace(**{name: value}), lambda: Schedule.from_json(text)):
        with pytest.raises(ValueError, match=f"^schedule: {name}[: ].*{remedy}"):
            make()
    if name != "scratch_chunks":
        with pytest.raises(ValueError, match=rf"^Builder\(.*\): {name}[: ].*{remedy}"):
            Builder(**{"name": "b", "collective": "all_reduce", "n": 2, name: value})


def test_the_collective_that_was_meant_is_named() -> None:
    with pytest.raises(ValueError, match="no collective 'allreduce'; .*; did you mean all_reduce?"):
        Builder("b", "allreduce", 2)


def test_numbers_of_numpy_become_plain_ones() -> None:
    schedule = _every_kind().replace(root=np.int32(1), deterministic=np.bool_(True))
    assert type(schedule.root) is int and type(schedule.deterministic) is bool
    assert Schedule.from_json(schedule.to_json()) == schedule


def test_sizes_that_no_memory_holds_are_refused_before_anything_is_made() -> None:
    schedule = _every_kind()
    for fields in ({"parts": MOST_CHUNKS // 2}, {"scratch_chunks": MOST_CHUNKS - 1}):
        with pytest.raises(ValueError, match=f"the buffers of a rank; take sizes that make {MOST_CHUNKS} or"):
            schedule.replace(**fields)
    b = Builder("large", "all_reduce", 2, parts=MOST_CHUNKS // 2)
    b.copy(b.ranks, IN[0 : MOST_CHUNKS // 2], OUT[0 : MOST_CHUNKS // 2])
    with pytest.raises(
        ValueError, match="has 134217728 chunks in its buffers and moves 67108864, and 67108866"
    ):
        verify(b.build())
    with pytest.raises(ValueError, match="root 2 is not one of 2 ranks; take 0 to 1"):
        schedule.replace(root=2)


# Rows


@pytest.mark.parametrize(
    "first",
    [
        [0, 12],
        [1, 6, 12],
        [0, 6, 11],
        [0, 13, 12],
        [0, -1, 12],
        [0, 7, 6, 12],
        [0.0, 6.0, 12.0],
        [[0, 6, 12]],
        5,
        None,
    ],
    ids=str,
)
def test_rows_are_dealt_out_to_the_ranks_exactly(first: Any) -> None:
    with pytest.raises(ValueError, match="first is .*take 3 whole numbers that grow from 0 to 12"):
        _every_kind().replace(first=np.array(first))


@pytest.mark.parametrize("columns", [5, None, np.zeros(12, np.int32)], ids=["5", "None", "int32"])
def test_rows_have_their_columns(columns: Any) -> None:
    with pytest.raises(ValueError, match="take one array of dtype COLUMNS"):
        _every_kind().replace(columns=columns)


@pytest.mark.parametrize("value", [-128, -5, 3, 7, 127])
@pytest.mark.parametrize("column", ["kind", "src_buffer", "dst_buffer"])
def test_a_kind_or_buffer_that_is_none_is_refused_in_every_row(column: str, value: int) -> None:
    schedule = _every_kind()
    if column == "kind" and value == 3:
        value = -1
    for row in range(len(schedule)):
        columns = schedule.columns.copy()
        columns[column][row] = value
        with pytest.raises(
            ValueError, match=f"rank {row // 6}, step {row % 6}: {column} is {value}; take a wh"
        ):
            schedule.replace(columns=columns)


UNUSED: dict[str, tuple[list[Kind], list[int], str]] = {
    "src_buffer": ([Kind.RECV], [0, 1, 2], "has a span to read"),
    "src_chunk": ([Kind.RECV], [-9, 1, 2**31 - 1], "has a span to read"),
    "dst_buffer": ([Kind.SEND], [0, 1, 2], "has a span to write"),
    "dst_chunk": ([Kind.SEND], [-9, 1, 2**31 - 1], "has a span to write"),
    "peer": ([Kind.COPY, Kind.REDUCE], [0, 1, 9, -2], "has a peer or a channel, but no message"),
    "channel": ([Kind.COPY, Kind.REDUCE], [1, -1, 2**31 - 1], "has a peer or a channel, but no message"),
    "left": ([Kind.SEND, Kind.RECV, Kind.COPY], [True], "says left, but has no operands"),
}


@pytest.mark.parametrize("column", UNUSED)
def test_what_a_step_does_not_use_is_refused_before_anybody_reads_it(column: str) -> None:
    schedule = _every_kind()
    kinds, values, words = UNUSED[column]
    for kind in kinds:
        for value in values:
            columns = schedule.columns.copy()
            row = int(np.flatnonzero(columns["kind"] == kind)[0])
            columns[column][row] = value
            wrong = Schedule.from_json(schedule.replace(columns=columns).to_json())
            for use in (verify, to_msccl, lambda s: cost(s, 8)):
                with pytest.raises(Fault, match=f"rank 0, step {row}: .*{words}"):
                    use(wrong)


make: Any = Step  # what types would forbid
span: Any = Span
STEPS: dict[str, tuple[Any, str]] = {
    "a round": (make(Kind.COPY, 1.5, -1, span(Buffer.IN, 0), span(Buffer.OUT, 0)), "round is 1.5; take a wh"),
    "a truth": (make(Kind.SEND, True, 1, span(Buffer.IN, 0)), "round is True; take a whole"),
    "a peer": (make(Kind.SEND, 0, "1", span(Buffer.IN, 0)), "peer is '1'; take a whole"),
    "a far peer": (make(Kind.SEND, 0, 2**31, span(Buffer.IN, 0)), "peer is 2147483648; take a whole"),
    "a chunk": (make(Kind.SEND, 0, 1, span(Buffer.IN, None)), "src_chunk is None; take a whole"),
    "a buffer": (make(Kind.SEND, 0, 1, span(3, 0)), "src_buffer is 3; take a whole number from -1 to 2"),
    "a kind": (make(5, 0, 1, span(Buffer.IN, 0)), "kind is 5; take a whole number from 0 to 4"),
    "a flag": (
        make(Kind.SEND, 0, 1, span(Buffer.IN, 0), left=2),
        "left is 2; take a whole number from 0 to 1",
    ),
    "lengths": (
        make(Kind.COPY, 0, -1, span(Buffer.IN, 0), span(Buffer.OUT, 0, 2)),
        "different numbers of chunks",
    ),
    "no step": ("copy", "is 'copy'; take a Step"),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_the_wrong_types_is_named(name: str) -> None:
    wrong, words = STEPS[name]
    right = Step(Kind.COPY, 0, -1, Span(Buffer.IN, 0), Span(Buffer.OUT, 0))
    with pytest.raises(ValueError, match=f"^schedule: rank 1, step 2:? ?.*{words}"):
        Schedule.from_steps("mine", "all_reduce", [[right], [right, right, wrong]])


# JSON


def _with(change: Callable[[dict[str, Any]], Any]) -> str:
    fields = json.loads(_every_kind().to_json())
    change(fields)
    return json.dumps(fields)


def _column(name: str, value: Any) -> str:
    return _with(lambda fields: fields["steps"].update({name: value}))


TEXTS = {
    **{
        text or "nothing": (text, "schedule: this is not the JSON of a schedule: ")
        for text in ("", "nan", "{", "]")
    },
    **{
        text: (text, "take an object with name, collective, n, ")
        for text in ("null", "1", '"x"', "true", "[]", "[1]")
    },
    "deep": ("[" * 100_000, "not the JSON of a schedule"),
    "a name twice": ('{"n": 2, "n": 3}', "'n' is given twice"),
    "an empty object": ("{}", "it lacks name, collective, n, parts, first, steps; it has"),
    "an unknown field": (_with(lambda fields: fields.update(more=1)), "it has the unknown 'more'"),
    "a field less": (_with(lambda fields: fields.pop("parts")), "it lacks parts"),
    "steps that are a list": (
        _with(lambda fields: fields.update(steps=[])),
        "steps is .*; take an object with kind",
    ),
    "an unknown column": (_column("more", [0] * 12), "steps has the unknown 'more'"),
    "a column less": (_with(lambda fields: fields["steps"].pop("peer")), "steps lacks peer"),
    "no first": (_with(lambda fields: fields.update(first=5)), "first is 5; take a list"),
    "a far first": (
        _with(lambda fields: fields.update(first=[0, 2**70, 12])),
        r"first\[1\] is 11805.*from 0 to 12",
    ),
    "a falling first": (
        _with(lambda fields: fields.update(first=[0, 13, 12])),
        r"first\[1\] is 13; take .* 0 to 12",
    ),
    "a wrong first": (_with(lambda fields: fields.update(first=[0, 12])), "for 2 ranks take 3 whole numbers"),
    "a short column": (_column("peer", [0] * 7), "steps.peer has 7 numbers where steps.kind has 12"),
    "a kind of 260": (_column("kind", [0, 260, *[0] * 10]), r"steps.kind\[1\] is 260; take .* from 0 to 4"),
    "a left of 2": (
        _column("left", [0] * 7 + [2] * 5),
        r"steps.left\[7\] is 2; take a whole number from 0 to 1",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_is_no_schedule_is_refused_in_words(name: str) -> None:
    text, words = TEXTS[name]
    with pytest.raises(ValueError, match=words):
        Schedule.from_json(text)


@pytest.mark.parametrize("value", [5, None, "x", {"a": 1}], ids=str)
@pytest.mark.parametrize("column", ["kind", "left", "round", "chunks"])
def test_a_column_is_a_list(column: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"steps\.{column} is .*; take a list of whole numbers"):
        Schedule.from_json(_column(column, value))


@pytest.mark.parametrize(
    "value", [0.5, "0", None, [0], 1e300, float("nan"), 2**31, 2**63, 2**70, -(2**40)], ids=str
)
@pytest.mark.parametrize("column", ["kind", "left", "src_buffer", "peer", "dst_chunk", "chunks"])
def test_a_number_of_a_column_is_whole_and_fits(column: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"steps\.{column}\[5\] is .*; take a whole number from "):
        Schedule.from_json(_column(column, [0] * 5 + [value] * 7))


def test_truths_are_left_or_right_but_no_numbers() -> None:
    schedule = _every_kind()
    left = schedule.columns["left"].tolist()
    assert Schedule.from_json(_column("left", left)) == schedule and True in left
    with pytest.raises(ValueError, match=r"steps.round\[0\] is True"):
        Schedule.from_json(_column("round", [True] + [0] * 11))


NASTY: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    7,
    260,
    2**31,
    2**70,
    10**30,
    1.5,
    float("nan"),
    "",
    "x",
    [],
    [1],
    {},
)


def _spoil(fields: dict[str, Any], chance: random.Random) -> str:
    """The text of a schedule with one or two things wrong, in what it says or in how it is written."""
    fields = copy.deepcopy(fields)
    if chance.random() < 0.7:
        for _ in range(chance.choice((1, 1, 2))):
            inside: Any = chance.choice((fields, fields.get("steps")))
            if not isinstance(inside, dict) or not inside:
                continue
            name = chance.choice(list(inside))
            column = inside[name]
            if isinstance(column, list) and column and chance.random() < 0.7:
                place = chance.randrange(len(column))
                column[place] = chance.choice((*NASTY, *column[:3], *range(-2, 6)))
            elif chance.random() < 0.2:
                del inside[name]
            else:
                inside[chance.choice((name, name, name, "more"))] = chance.choice(NASTY)
        return json.dumps(fields)
    text = json.dumps(fields)
    place = chance.randrange(len(text))
    return (
        text[:place] + chance.choice(("", '"', "0", "-", "]", "{", ",", ".", "e", "\0")) + text[place + 1 :]
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_spoiled_text_is_refused_or_is_a_schedule_with_a_verdict(seed: int) -> None:
    chance = random.Random(seed)
    originals = [
        _every_kind(),
        generate("ring", 3, channels=2),
        generate("bruck", 5, collective="all_gather"),
        generate("tree", 4, collective="broadcast", root=1, chunks=2),
        generate("recursive_doubling", 3),
    ]
    texts = [_spoil(json.loads(chance.choice(originals).to_json()), chance) for _ in range(400)]
    verdicts = {"refused": 0, "wrong": 0, "right": 0}
    for text in texts:
        try:
            schedule = Schedule.from_json(text)
        except ValueError as error:
            assert str(error).startswith("schedule: "), text
            verdicts["refused"] += 1
            continue
        assert Schedule.from_json(schedule.to_json()) == schedule
        assert len(schedule.table().splitlines()) == 1 + len(schedule)
        fault = find_fault(schedule)
        verdicts["wrong" if fault else "right"] += 1
        played = simulate(schedule, slots=0, seed=seed).wrong
        assert fault or not played, text
    assert min(verdicts.values()) > 10, verdicts


# Builder


def _builder() -> Builder:
    return Builder("mine", "all_reduce", 2)


WITHOUT_INDEX: Any = (IN, OUT[0])
BUILT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a round": (
        lambda b: b.copy(0, IN[0], OUT[0], round=1.5),
        "mine: copy: round is 1.5; take a whole number",
    ),
    "a true round": (
        lambda b: b.copy(0, IN[0], OUT[0], round=True),
        "mine: copy: round is True; take a whole",
    ),
    "a true rank": (lambda b: b.copy(True, IN[0], OUT[0]), "mine: copy: rank is True; take a whole"),
    "ranks": (lambda b: b.copy(b.ranks / 1, IN[0], OUT[0]), "mine: copy: rank is array.*; take a whole"),
    "no peer": (lambda b: b.send(0, None, IN[0]), "mine: send: peer is None; take a whole"),
    "a channel": (
        lambda b: b.send(0, 1, IN[0], channel=2**31),
        "channel is 2147483648; take numbers from -214",
    ),
    "channels": (
        lambda b: b.send(0, 1, IN[0], channel=b.ranks + 2**31),
        "channel is array.*; take numbers from",
    ),
    "a number as left": (
        lambda b: b.reduce(0, IN[0], OUT[0], left=1),
        "mine: reduce: left is 1; take True or",
    ),
    "a longer source": (lambda b: b.copy(0, IN[0:2], OUT[0]), "mine: copy: src has 2 chunks and dst 1; take"),
    "longer sources": (
        lambda b: b.copy(0, IN[0 : b.ranks + 1], OUT[0]),
        r"mine: copy: src has array\(\[1, 2\]\) ch",
    ),
    "a longer message": (
        lambda b: b.move(0, 1, IN[0:2], OUT[0]),
        "mine: move: src has 2 chunks and dst 1; take",
    ),
    "a longer sum": (
        lambda b: b.recv(0, 1, OUT[0:2], reduce=IN[0]),
        "mine: recv: src has 1 chunks and dst 2",
    ),
    "no chunk": (
        lambda b: b.copy(0, IN, OUT[0]),
        r"mine: copy: src is IN; write IN\[0\] for its first chunk",
    ),
    "no chunk sent": (lambda b: b.move(0, 1, IN[0], OUT), r"mine: move: dst is OUT; write OUT\[0\]"),
    "no chunk reduced": (
        lambda b: b.move(0, 1, IN[0], OUT[0], reduce=IN),
        "mine: recv: reduce is IN; write IN",
    ),
    "a number reduced": (
        lambda b: b.recv(0, 1, OUT[0], reduce=1),
        "mine: recv: reduce is 1; take a span such",
    ),
    "nothing": (lambda b: b.send(0, 1, None), r"mine: send: src is None; take a span such as OUT\[0\]"),
    "no chunk chosen": (lambda b: choose(True, *WITHOUT_INDEX), r"choose: yes is IN; write IN\[0\]"),
    "lengths": (
        lambda b: b.copy(b.ranks, IN[np.arange(3)], OUT[0]),
        r"arrays of different lengths: rank \(2,\), ",
    ),
    "two indices": (lambda b: OUT[0, 1], r"OUT\[...\] is \(0, 1\); take a whole number"),
    "a true index": (lambda b: OUT[True], r"OUT\[...\] is True; take a whole number"),
    "a part": (lambda b: OUT[0.5], r"OUT\[...\] is 0.5; take a whole number"),
    "a word": (lambda b: OUT["a":"b"], r"OUT\[...\] is 'a'; take a whole number"),
    "a step": (lambda b: OUT[0:4:2], r"OUT\[...\] is no span; a span is from:to"),
    "a huge end": (lambda b: SCRATCH[0 : 2**40], r"SCRATCH\[...\] is 1099511627776; take numbers from"),
    "a field": (
        lambda b: Builder("x", "reduce", 2, extra=1),
        "there is no field 'extra'; there are name, coll",
    ),
    "scratch": (lambda b: Builder("x", "reduce", 2, scratch_chunks=1), "SCRATCH grows to what is used"),
}


@pytest.mark.parametrize("name", BUILT)
def test_what_a_builder_cannot_use_is_refused_where_it_is_given(name: str) -> None:
    give, words = BUILT[name]
    b = _builder()
    with pytest.raises(ValueError, match=words):
        give(b)
    if name not in ("a longer message", "no chunk reduced", "a number reduced"):
        assert len(b.build()) == 0


def test_a_builder_takes_lists_and_numbers_of_numpy() -> None:
    plain, other = _builder(), _builder()
    plain.copy(plain.ranks, IN[0], OUT[0])
    other.copy([0, 1], IN[[0, 0]], OUT[np.int64(0)], round=np.int8(0))
    other.copy([], IN[[]], OUT[0])
    assert plain.build() == other.build()

"""MSCCL's XML: there and back, programs from elsewhere, and what is refused."""

from __future__ import annotations

import random
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import pytest

from pynccl.collectives import ALGORITHMS, Kind, Schedule, find_fault, from_msccl, generate, to_msccl, verify
from pynccl.collectives.form import MOST_CHUNKS, MOST_RANKS


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_xml_without_our_rounds_still_gives_a_right_schedule(n: int) -> None:
    for collective, name in ALGORITHMS:
        foreign = re.sub(r' (round|index)="\d+"', "", to_msccl(generate(name, n, collective=collective)))
        verify(from_msccl(foreign), slots=(8,))


def test_fused_steps_of_an_in_place_program_are_understood() -> None:
    """A ring all-reduce of two ranks as MSCCL writes it: in place, with receive-reduce-copy-send."""
    step = '<step s="{}" type="{}" srcbuf="i" srcoff="{}" dstbuf="i" dstoff="{}" cnt="1" {}/>'
    gpus = ""
    for me, peer in ((0, 1), (1, 0)):
        lines = [("s", peer), ("rrcs", me), ("r", peer)]
        steps = [
            step.format(s, kind, chunk, chunk, 'depid="-1" deps="-1" hasdep="0"')
            for s, (kind, chunk) in enumerate(lines)
        ]
        block = f'<tb id="0" send="{peer}" recv="{peer}" chan="0">{"".join(steps)}</tb>'
        gpus += f'<gpu id="{me}" i_chunks="2" o_chunks="0" s_chunks="0">{block}</gpu>'
    head = 'name="pair" proto="LL" nchannels="1" nchunksperloop="2" ngpus="2" coll="allreduce" inplace="1"'
    schedule = from_msccl(f"<algo {head}>{gpus}</algo>")
    verify(schedule)
    assert [step.kind for step in schedule.steps(0)] == [
        Kind.COPY,
        Kind.SEND,
        Kind.RECV_REDUCE,
        Kind.SEND,
        Kind.RECV,
    ]


def test_params_names_and_claims_survive_the_way_there_and_back() -> None:
    params = {"chunks": [1, 2], "why": 'of "us" & <them>', "deep": {"é": None, "x": 1.5}}
    schedule = generate("ring", 3).replace(params=params, name="mine & yours", deterministic=False)
    assert from_msccl(to_msccl(schedule)) == schedule


# Attributes

_PATHS = {"algo": ".", "gpu": "./gpu[2]", "tb": "./gpu[2]/tb[2]", "step": "./gpu[2]/tb[2]/step[1]"}
_WHERE = {"algo": "algo", "gpu": "gpu 1", "tb": "gpu 1, tb 1", "step": "gpu 1, tb 1, step 0"}


def _changed(tag: str, **attributes: str | None) -> str:
    """A ring of 3 with other attributes (None: without them) of an element; its tb 1 receives from rank 0."""
    algo = ElementTree.fromstring(to_msccl(generate("ring", 3)))
    element = algo if tag == "algo" else algo.find(_PATHS[tag])
    assert element is not None
    for name, value in attributes.items():
        element.attrib.pop(name, None)
        if value is not None:
            element.attrib[name] = value
    return ElementTree.tostring(algo, encoding="unicode")


# tag, attribute: the range of a number, or the words that there are
NUMBERS = {
    ("algo", "ngpus"): (1, MOST_RANKS),
    ("algo", "nchunksperloop"): (1, MOST_CHUNKS),
    ("algo", "root"): (0, 2),
    ("gpu", "id"): (0, 2),
    ("gpu", "i_chunks"): (0, MOST_CHUNKS),
    ("gpu", "o_chunks"): (0, MOST_CHUNKS),
    ("gpu", "s_chunks"): (0, MOST_CHUNKS),
    ("tb", "id"): (0, 2**31 - 1),
    ("tb", "send"): (-1, 2),
    ("tb", "recv"): (-1, 2),
    ("tb", "chan"): (0, 2**31 - 1),
    ("step", "s"): (0, 2**31 - 1),
    ("step", "srcoff"): (0, MOST_CHUNKS),
    ("step", "dstoff"): (0, MOST_CHUNKS),
    ("step", "cnt"): (1, MOST_CHUNKS),
    ("step", "depid"): (-1, 2**31 - 1),
    ("step", "deps"): (-1, 2**31 - 1),
    ("step", "round"): (0, 2**31 - 1),
    ("step", "index"): (0, 2**31 - 1),
}
WORDS = {
    ("algo", "coll"): "allreduce, allgather, reduce_scatter, alltoall, broadcast, reduce",
    ("algo", "inplace"): "0, 1",
    ("algo", "deterministic"): "0, 1",
    ("algo", "overlaps"): "0, 1",
    ("step", "type"): "s, r, cpy, re, rrc, rcs, rrs, rrcs, nop",
    ("step", "srcbuf"): "i, o, s",
    ("step", "dstbuf"): "i, o, s",
    ("step", "left"): "0, 1",
}
OPTIONAL = {"root", "i_chunks", "o_chunks", "s_chunks", "s", "round", "index"} | {
    *("inplace", "deterministic", "overlaps", "left")
}


def test_the_element_that_is_spoiled_below_receives_and_reduces() -> None:
    text = _changed("step")
    assert from_msccl(text) == generate("ring", 3)
    step = ElementTree.fromstring(text).find(_PATHS["step"])
    assert step is not None and step.attrib["type"] == "rrc"
    read = {name for tag, name in (*NUMBERS, *WORDS) if tag == "step"}
    assert set(step.attrib) - read == {"hasdep"}


@pytest.mark.parametrize(("tag", "name"), NUMBERS, ids="-".join)
def test_a_wrong_number_is_refused_where_it_stands(tag: str, name: str) -> None:
    low, high = NUMBERS[tag, name]
    for value in ("x", "", "1.5", "1_0", " 1", "0x1", str(low - 1), str(high + 1), "9" * 5000, "\u0661"):
        where = _WHERE[tag]
        if name in ("id", "s"):  # it is what the element is named by
            where = where[: where.rindex(" ")]
        with pytest.raises(ValueError, match=f"^msccl: {where}.*: {name} is .*; take a .* {low} to {high}$"):
            from_msccl(_changed(tag, **{name: value}))


@pytest.mark.parametrize(("tag", "name"), WORDS, ids="-".join)
def test_a_wrong_word_is_refused_where_it_stands(tag: str, name: str) -> None:
    for value in ("x", "", "-1", "2"):
        with pytest.raises(
            ValueError, match=f"^msccl: {_WHERE[tag]}: {name} is '.*'; take one of {WORDS[tag, name]}"
        ):
            from_msccl(_changed(tag, **{name: value}))


@pytest.mark.parametrize(("tag", "name"), [*NUMBERS, *WORDS, ("algo", "name")], ids="-".join)
def test_a_missing_attribute_is_named_unless_msccl_does_not_know_it(tag: str, name: str) -> None:
    text = _changed(tag, **{name: None})
    if name in OPTIONAL:
        assert from_msccl(text).n == 3
    else:
        with pytest.raises(ValueError, match=f"^msccl: .*{tag}[^,]*: it has no {name}; give it one$"):
            from_msccl(text)


def _ring(change: Callable[[str], str]) -> str:
    return change(to_msccl(generate("ring", 3)))


REFUSED = {
    "no XML": ("algo", "^msccl: this is not XML: 'algo': syntax error"),
    "a lone surrogate": ("\ud800", "^msccl: this is not XML"),
    "no algo": ("<foo/>", "^msccl: this is a 'foo', not an MSCCL program"),
    "nothing in it": ("<algo/>", "^msccl: algo: it has no ngpus; give it one"),
    "an unknown tag": (
        _ring(lambda text: text.replace("<step ", "<stop ", 1)),
        "gpu 0, tb 0: there is a 'stop' in it",
    ),
    "a gpu too few": (
        _changed("algo", ngpus="4"),
        "algo: it has 3 gpu, of 3 ids; give it 4, with each id from 0",
    ),
    "a gpu twice": (
        _changed("gpu", id="0"),
        "algo: it has 3 gpu, of 2 ids; give it 3, with each id from 0 to 2 once",
    ),
    "a tb twice": (_changed("tb", id="0"), "gpu 1: it has 2 tb, of 1 ids; give it each id once"),
    "a step elsewhere": (_changed("step", s="1"), "gpu 1, tb 1, step 1: it stands where step 0 should"),
    "a peer itself": (_changed("tb", recv="1"), "gpu 1, tb 1: recv is 1, the gpu itself"),
    "a peer that is nobody": (
        _changed("tb", recv="-1"),
        "gpu 1, tb 1, step 0: type is rrc, but its tb has recv -1",
    ),
    "a block that is not there": (
        _changed("step", depid="7", deps="0"),
        r"step 0 \(deps\) of tb 7 \(depid\), which is",
    ),
    "a step that is not there": (_changed("step", depid="0", deps="99"), r"step 99 \(deps\) of tb 0"),
    "a wait for none": (_changed("step", depid="0", deps="-1"), r"step -1 \(deps\) of tb 0"),
    "a span too long": (
        _changed("step", cnt="9"),
        "step 0: .*off and cnt reach to chunk .*, but .* has 3 chunks",
    ),
    "no parts": (
        _changed("algo", coll="alltoall", nchunksperloop="2"),
        "algo: nchunksperloop is 2; take a multiple of 3",
    ),
    "a bomb": (
        _changed("algo", nchunksperloop=str(MOST_CHUNKS)),
        "^msccl: algo: n=3, parts=.* chunks in the buffers of a rank",
    ),
    "params": (_changed("algo", params="{"), "^msccl: algo: params is '{': .*; take a JSON object"),
    "a list as params": (_changed("algo", params="[1]"), r"^msccl: algo: params is \[1\]; take a dictionary"),
    "a name": (_changed("algo", name=""), "^msccl: algo: name is ''; take 1 to 200 printable characters"),
    "a written input": (
        _changed("algo", coll="reduce", inplace="1"),
        "algo: an in-place reduce writes its input",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_program_is_refused_in_words(name: str) -> None:
    text, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        from_msccl(text)


def test_thread_blocks_are_known_by_their_ids() -> None:
    """In the file they may stand in any order; who waits for whom does not change."""
    right = re.sub(r' (round|index)="\d+"', "", to_msccl(generate("halving_doubling", 4)))
    algo = ElementTree.fromstring(right)
    for gpu in algo:
        gpu[:] = list(reversed(list(gpu)))
    algo[:] = list(reversed(list(algo)))
    assert from_msccl(ElementTree.tostring(algo, encoding="unicode")) == from_msccl(right)


def _spoil(text: str, chance: random.Random) -> str:
    if chance.random() < 0.3:
        place = chance.randrange(len(text))
        return text[:place] + chance.choice(("", '"', "<", "/", "-", "9", "&", "\0")) + text[place + 1 :]
    algo = ElementTree.fromstring(text)
    for _ in range(chance.choice((1, 1, 2))):
        element = chance.choice(list(algo.iter()))
        if len(element) and chance.random() < 0.2:
            element.remove(chance.choice(list(element)))
        elif element.attrib:
            name = chance.choice(list(element.attrib))
            element.attrib[name] = chance.choice(
                (
                    "-1",
                    "0",
                    "1",
                    "2",
                    "7",
                    "99",
                    str(2**31),
                    "9" * 30,
                    "x",
                    "",
                    "s",
                    "r",
                    "rrs",
                    "rcs",
                    "rrcs",
                    "nop",
                    "i",
                )
            )
    return ElementTree.tostring(algo, encoding="unicode")


@pytest.mark.parametrize("seed", range(2))
def test_a_spoiled_program_is_refused_or_is_a_schedule_with_a_verdict(seed: int) -> None:
    chance = random.Random(seed)
    originals = [
        to_msccl(generate("ring", 3)),
        re.sub(r' (round|index)="\d+"', "", to_msccl(generate("recursive_doubling", 3))),
        to_msccl(generate("tree", 3, collective="broadcast", chunks=2)),
    ]
    verdicts = {"refused": 0, "wrong": 0, "right": 0}
    for _ in range(300):
        text = _spoil(chance.choice(originals), chance)
        try:
            schedule = from_msccl(text)
        except ValueError as error:
            assert str(error).startswith("msccl: "), (str(error), text)
            verdicts["refused"] += 1
            continue
        verdicts["wrong" if find_fault(schedule) else "right"] += 1
        assert Schedule.from_json(schedule.to_json()) == schedule
    assert min(verdicts.values()) > 10, verdicts

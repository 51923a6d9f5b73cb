"""Layouts, trees and units: pure functions, no arrays on ranks and no communication."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.build import from_arrays, from_broadcast, from_init
from sharding.layout import (
    FlatGroup,
    Layout,
    Spec,
    assign,
    between,
    by_layer,
    by_size,
    matcher,
    numpy_dtype,
    pieces,
    plan,
    shard_size,
)
from sharding.tree import common_prefix, fill, flatten, mapping_paths, nest, rebuild

DTYPES = ("float64", "float32", "float16", "bfloat16", "int8", "int64", "bool", "float8_e4m3fn")
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def specs(draw: Any) -> list[Spec]:
    many = draw(st.lists(st.tuples(shapes, st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=8))
    return [Spec(f"p{i}", shape, dtype, trainable) for i, (shape, dtype, trainable) in enumerate(many)]


@st.composite
def layouts(draw: Any) -> tuple[list[Spec], Layout]:
    made = draw(specs())
    units = {spec.name: draw(st.sampled_from(("a", "b", "root"))) for spec in made}
    order = [unit for unit in ("a", "b", "root") if unit in units.values()]
    return made, plan(made, units, order, draw(st.integers(1, 9)))


def groups(layout: Layout) -> list[FlatGroup]:
    return [group for unit in layout.units for group in unit.groups]


# --- layouts ------------------------------------------------------------------------------------------------


@given(layouts())
def test_every_element_of_every_parameter_lies_in_exactly_one_piece(made: Any) -> None:
    given_specs, layout = made
    seen = {spec.name: np.zeros(spec.size, int) for spec in given_specs}
    for group in groups(layout):
        for rank in range(group.shards):
            stop = 0
            for piece in pieces(group, rank):
                assert 0 <= piece.param_start < piece.param_stop
                assert stop <= piece.shard_start  # in order, apart
                stop = piece.shard_stop
                assert stop <= group.shard
                assert stop - piece.shard_start == piece.param_stop - piece.param_start
                seen[piece.name][piece.param_start : piece.param_stop] += 1
    assert all((count == 1).all() for count in seen.values())


@given(layouts())
def test_shards_are_multiples_of_16_bytes_with_less_padding_than_that_a_rank(made: Any) -> None:
    for group in groups(made[1]):
        assert group.shard * group.itemsize % 16 == 0
        assert group.numel <= group.padded
        assert (group.padded - group.numel) * group.itemsize < group.shards * (16 + group.itemsize)
        assert (group.padded == 0) == (group.numel == 0)
        assert group.numel == sum(entry.size for entry in group.entries)


@given(layouts())
def test_a_group_has_one_dtype_and_trainability_and_keeps_the_order(made: Any) -> None:
    given_specs, layout = made
    found = {entry.name: (unit.groups[index], entry) for unit, index, entry in layout.parameters()}
    assert set(found) == {spec.name for spec in given_specs}
    for spec in given_specs:
        group, entry = found[spec.name]
        assert (group.dtype, group.trainable) == (spec.dtype, spec.trainable)
        assert (entry.shape, entry.size) == (spec.shape, spec.size)
    for unit in layout.units:
        assert len({(group.dtype, group.trainable) for group in unit.groups}) == len(unit.groups)
        for group in unit.groups:
            numbers = [int(entry.name[1:]) for entry in group.entries]
            assert numbers == sorted(numbers)
            assert [e.offset for e in group.entries] == list(
                np.cumsum([0, *(e.size for e in group.entries)])[:-1]
            )


@given(layouts(), st.data())
def test_any_range_of_the_flat_buffer_is_found_in_its_parameters(made: Any, data: Any) -> None:
    for group in groups(made[1]):
        start = data.draw(st.integers(0, group.padded))
        stop = data.draw(st.integers(start, group.padded))
        covered = [
            (entry.offset + p.param_start, entry.offset + p.param_stop)
            for p in between(group, start, stop)
            for entry in group.entries
            if entry.name == p.name
        ]
        inside = [at for low, high in covered for at in range(low, high)]
        assert inside == list(range(start, min(stop, max(start, group.numel))))


@given(layouts())
def test_the_digest_changes_with_every_property_of_a_parameter(made: Any) -> None:
    given_specs, layout = made
    order = [unit.name for unit in layout.units]
    homes = {entry.name: unit.name for unit, _, entry in layout.parameters()}
    first = given_specs[0]
    changed = (
        dataclasses.replace(first, shape=(*first.shape, 1)),
        dataclasses.replace(first, dtype="uint16"),
        dataclasses.replace(first, trainable=not first.trainable),
        dataclasses.replace(first, name="other"),
    )
    for other in changed:
        new = plan(
            [other, *given_specs[1:]], homes | {"other": homes[first.name]}, order, groups(layout)[0].shards
        )
        assert new.digest() != layout.digest()
        assert any(a != b for a, b in zip(new.lines(), layout.lines(), strict=True))
    assert plan(given_specs, homes, order, 5).digest() == layout.digest()  # the ranks are no part of it


def test_more_ranks_than_elements_leaves_ranks_without_any() -> None:
    layout = plan([Spec("w", (3,), "float64")], {"w": "root"}, ["root"], 8)
    (group,) = groups(layout)
    assert group.shard == 2
    assert [len(pieces(group, rank)) for rank in range(8)] == [1, 1, 0, 0, 0, 0, 0, 0]


def test_scalars_and_empty_parameters_have_their_place() -> None:
    made = [Spec("s", (), "float32"), Spec("none", (0, 3), "float32"), Spec("v", (2,), "float32")]
    layout = plan(made, dict.fromkeys(("s", "none", "v"), "root"), ["root"], 2)
    (group,) = groups(layout)
    assert [(e.name, e.offset, e.size) for e in group.entries] == [("s", 0, 1), ("none", 1, 0), ("v", 1, 2)]
    assert [piece.name for piece in pieces(group, 0)] == ["s", "v"]


@given(st.integers(0, 1000), st.integers(1, 9), st.sampled_from((1, 2, 4, 8, 16)))
def test_a_shard_is_the_least_multiple_of_16_bytes_that_holds_its_part(
    numel: int, shards: int, itemsize: int
) -> None:
    shard = shard_size(numel, shards, itemsize)
    assert shard * itemsize % 16 == 0 and shard * shards >= numel
    assert shard == 0 or (shard - max(1, 16 // itemsize)) * shards < numel


# --- filling ------------------------------------------------------------------------------------------------


def values(spec: Spec) -> np.ndarray:
    return (np.arange(spec.size) % 2).astype(numpy_dtype(spec.dtype)).reshape(spec.shape)


class Alone:
    """A broadcast among one."""

    rank = 0

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def broadcast(self, x: Any, root: int) -> None:
        self.sizes.append(x.size)


@settings(deadline=None)
@given(layouts())
def test_all_ways_to_fill_a_shard_give_the_same(made: Any) -> None:
    given_specs, layout = made
    arrays = {spec.name: values(spec) for spec in given_specs}
    checksums: dict[str, int] = {}
    ways = (
        from_arrays(arrays),
        from_init(lambda name, shape, dtype: arrays[name].astype(dtype), np, checksums),
        from_broadcast(Alone(), 0, arrays, np.empty),
    )
    for group in groups(layout):
        for rank in range(group.shards):
            whole = np.concatenate([arrays[e.name].reshape(-1) for e in group.entries])
            whole = np.concatenate([whole, np.zeros(group.padded - group.numel)])
            expected = whole[rank * group.shard : (rank + 1) * group.shard].astype(float)
            for fill_shard in ways:
                data = np.zeros(group.shard, numpy_dtype(group.dtype))
                fill_shard(group, rank, data)
                np.testing.assert_array_equal(data.astype(float), expected)
    assert set(checksums) == {spec.name for spec in given_specs}


def test_a_broadcast_goes_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharding.build.BLOCK_BYTES", 32)
    made = [Spec("a", (7,), "float64"), Spec("b", (3,), "float64")]
    (group,) = groups(plan(made, {"a": "root", "b": "root"}, ["root"], 2))
    comm = Alone()
    data = np.zeros(group.shard)
    from_broadcast(comm, 0, {"a": np.arange(7.0), "b": np.arange(3.0) + 7}, np.empty)(group, 1, data)
    assert data.tolist() == [6, 7, 8, 9, 0, 0] and comm.sizes == [4, 4, 2]


# --- units --------------------------------------------------------------------------------------------------

NAMES = ("embed", "blocks.0.w", "blocks.0.b", "blocks.1.w", "blocks.1.b", "norm.scale", "head.w")


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        (None, {"root": NAMES}),
        ([], {"root": NAMES}),
        (
            ["embed", "blocks.*", "norm", "head"],
            {
                "embed": NAMES[:1],
                "blocks.0": NAMES[1:3],
                "blocks.1": NAMES[3:5],
                "norm": NAMES[5:6],
                "head": NAMES[6:],
            },
        ),
        (
            ["blocks.*", ["norm", "head"]],
            {"blocks.0": NAMES[1:3], "blocks.1": NAMES[3:5], "norm+head": NAMES[5:], "root": NAMES[:1]},
        ),
        (["blocks"], {"blocks": NAMES[1:5], "root": (NAMES[0], *NAMES[5:])}),
        (
            {"first": ["embed", "blocks.0"], "second": "blocks.1"},
            {"first": NAMES[:3], "second": NAMES[3:5], "root": NAMES[5:]},
        ),
        (
            lambda name: name.split(".")[0] if "." in name else None,
            {"blocks": NAMES[1:5], "norm": NAMES[5:6], "head": NAMES[6:], "root": NAMES[:1]},
        ),
        (["head", "embed"], {"head": NAMES[6:], "embed": NAMES[:1], "root": NAMES[1:6]}),
    ],
)
def test_units_of_patterns_functions_and_lists(units: Any, expected: dict[str, Any]) -> None:
    unit_of, order = assign(NAMES, units)
    assert order == list(expected)
    assert {unit: tuple(name for name in NAMES if unit_of[name] == unit) for unit in order} == expected


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (["blocks.*", "heads"], r"the pattern 'heads' takes no parameter; there are embed, blocks\.0\.w"),
        (["blocks.*.w.*"], r"'blocks\.\*\.w\.\*' takes no parameter"),
        (
            ["blocks.*", "blocks.1.w"],
            r"blocks\.1\.w is taken by the pattern 'blocks\.1\.w'.*unit 'blocks\.1'",
        ),
        ({"a": ["embed"], "b": ["embed", "head"]}, "embed is taken by .*unit 'b'.*already in unit 'a'"),
        ({"root": ["embed"]}, "names the unit of embed 'root'; use a string other than 'root'"),
        (lambda name: 3, "names the unit of embed 3; use a string"),
    ],
)
def test_units_that_do_not_fit_name_the_culprit(units: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assign(NAMES, units)


def test_a_long_list_of_names_is_cut_in_the_message() -> None:
    with pytest.raises(ValueError, match=r"p7, \.\.\. \(20 in all\)"):
        assign([f"p{i}" for i in range(20)], ["q"])


def test_units_by_layer_are_elements_of_lists_and_other_top_level_names() -> None:
    names = (*NAMES, "encoder.layers.1.attention.2.w")
    units = ["embed", "blocks.0", "blocks.1", "norm", "head", "encoder.layers.1"]
    assert assign(names, by_layer)[1] == units
    assert assign(["0.w", "1.w"], by_layer)[1] == ["0", "1"]


@given(specs(), st.integers(1, 400))
def test_units_by_size_are_in_order_and_as_full_as_they_can_be(made: list[Spec], limit: int) -> None:
    units = by_size(limit).units(made)
    assert [name for names in units.values() for name in names] == [spec.name for spec in made]
    size = {spec.name: spec.size * numpy_dtype(spec.dtype).itemsize for spec in made}
    totals = [sum(size[name] for name in names) for names in units.values()]
    for total, names in zip(totals, units.values(), strict=True):
        assert total <= limit or sum(size[name] > 0 for name in names) == 1
    for total, names in zip(totals, list(units.values())[1:], strict=False):
        assert total + size[names[0]] > limit


def test_by_size_wants_a_positive_size() -> None:
    with pytest.raises(ValueError, match="by_size: 0 bytes"):
        by_size(0).units([])


@pytest.mark.parametrize(
    ("patterns", "taken"),
    [
        ((), ()),
        (("*.b",), ("blocks.0.b", "blocks.1.b")),
        (("blocks.1", "embed"), ("embed", "blocks.1.w", "blocks.1.b")),
        (("*",), NAMES),
        (("blocks.*.w", "n*"), ("blocks.0.w", "blocks.1.w", "norm.scale")),
    ],
)
def test_patterns_take_whole_names_and_what_lies_under_them(patterns: Any, taken: Any) -> None:
    takes = matcher(NAMES, patterns, "frozen")
    assert tuple(name for name in NAMES if takes(name)) == taken


def test_a_pattern_that_takes_nothing_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"frozen: the pattern '\*\.bias' takes no parameter; there are embed"
    ):
        matcher(NAMES, ["*.b", "*.bias"], "frozen")
    with pytest.raises(TypeError, match="frozen: the pattern 3 is no string"):
        matcher(NAMES, [3], "frozen")  # type: ignore[list-item]


def test_dtypes_of_numpy_and_ml_dtypes_go_by_name() -> None:
    for name in DTYPES:
        assert numpy_dtype(name).name == name
    assert numpy_dtype("bfloat16") == ml_dtypes.bfloat16


# --- trees --------------------------------------------------------------------------------------------------

keys = st.text("abc01", min_size=1, max_size=2)
trees = st.recursive(
    st.integers(0, 99),
    lambda inner: (
        st.dictionaries(keys, inner, min_size=1, max_size=3)
        | st.lists(inner, min_size=1, max_size=3)
        | st.lists(inner, min_size=1, max_size=3).map(tuple)
    ),
    max_leaves=10,
)


def lists(tree: Any) -> Any:
    """The tree with tuples as lists."""
    if isinstance(tree, dict):
        return {key: lists(value) for key, value in tree.items()}
    return [lists(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


@given(trees)
def test_a_tree_comes_back_from_its_leaves(tree: Any) -> None:
    leaves = dict(flatten(tree))
    assert rebuild(tree, leaves) == tree
    assert rebuild(tree, {name: value + 1 for name, value in leaves.items()}) != tree


@given(trees)
def test_names_alone_and_the_paths_of_dicts_give_the_tree_with_tuples_as_lists(tree: Any) -> None:
    leaves = dict(flatten(tree))
    assert fill(nest(list(leaves), "", mapping_paths(tree)), leaves) == lists(tree)


def test_a_subtree_has_the_names_below_its_prefix() -> None:
    assert common_prefix(["blocks.0.w", "blocks.0.b"]) == "blocks.0"
    assert common_prefix(["blocks.0.w", "blocks.1.b"]) == "blocks"
    assert common_prefix(["a.x", "b.x"]) == ""
    assert nest(["blocks.0.w", "blocks.0.b"], "blocks.0") == {"w": "blocks.0.w", "b": "blocks.0.b"}
    assert nest(["embed"], "embed") == "embed"
    assert nest(["m.0.w", "m.1.w"], "m") == [{"w": "m.0.w"}, {"w": "m.1.w"}]
    assert nest(["m.1.w", "m.2.w"], "m") == {"1": {"w": "m.1.w"}, "2": {"w": "m.2.w"}}
    assert nest(["m.0", "m.1"], "m", frozenset({"m"})) == {"0": "m.0", "1": "m.1"}


def test_named_tuples_are_rebuilt_and_flat_dicts_are_trees() -> None:
    point = namedtuple("point", "x y")
    assert rebuild({"p": point(1, 2)}, {"p.0": 3, "p.1": 4}) == {"p": point(3, 4)}
    assert list(flatten({"a.b": 1, "a.c": 2})) == [("a.b", 1), ("a.c", 2)]
    with pytest.raises(TypeError, match="names are strings; m has the key 3"):
        list(flatten({"m": {3: 1}}))

"""Runs in the report: many, repeated, of many kinds, with zeros and gaps; their plots, tables and ratios."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from bench.parse import Record, Run
from bench.report_plots import COLOURS, colour, plots
from bench.report_tables import Cell, failures, notes, run_rows


def cells(row: Any) -> list[str]:
    return [one.text if isinstance(one, Cell) else one for one in row]


def run_of(*records: tuple[int, float, float], name: str = "p", **about: Any) -> Run:
    rows = [
        Record(size, 2, "float", "sum", -1, False, time, busbw, busbw, 0) for size, time, busbw in records
    ]
    return Run(program=name, rows=tuple(rows), out_of_bounds=0, **about)


def test_what_is_0_is_drawn_and_said():
    """Text has 0.00 for small sizes, with one rank all is 0, and `-b 8` on 3 ranks begins with size 0."""
    runs = [("some", run_of((0, 1.0, 0.0), (8, 1.0, 0.0), (64, 1.0, 0.5))), ("one", run_of((8, 1.0, 0.0)))]
    bandwidth, latency = plots(runs, [], None)
    assert bandwidth.series == {
        "1: some, out of place": ((0, 8, 64), (0.0, 0.0, 0.5)),
        "2: one, out of place": ((8,), (0.0,)),
    }
    assert bandwidth.note.startswith("3 of the values are 0: ") and not latency.note
    assert latency.series["1: some, out of place"][0] == (0, 8, 64)
    only_zeros, _ = plots(runs[1:], [], None)
    assert only_zeros.series == {"1: one, out of place": ((8,), (0.0,))} and "no data" not in only_zeros.svg
    for plot in (bandwidth, only_zeros):
        assert ">0</text>" in plot.svg


def test_what_is_no_number_is_counted_and_said():
    drawn, _ = plots([("a", run_of((8, 1.0, float("nan")), (64, 1.0, 0.5)))], [], None)
    assert drawn.series == {"1: a, out of place": ((64,), (0.5,))}
    assert drawn.note == "Not drawn: 1 values that the file does not have as a number."
    empty, _ = plots([("a", Run(program="p"))], [], None)
    assert ">no data</text>" in empty.svg


def test_names_are_shown_as_they_are():
    """Neither as markup, nor as a formula; and `_` does not hide them from the legend."""
    drawn, _ = plots([("_$a$ <b> & \"c\" id='x'", run_of((8, 1.0, 1.0)))], [], None)
    assert ">1: _$a$ &lt;b&gt; &amp; \"c\" id='x'</text>" in drawn.svg


def test_many_types_have_a_plot_each():
    rows = [
        Record(8, 1, dtype, redop, -1, False, 1.0, 1.0, 1.0, 0)
        for dtype in ("int8", "float")
        for redop in ("sum", "prod", "max")
    ]
    drawn = plots([("a", Run(program="p", rows=tuple(rows)))], [], None)
    assert [plot.title for plot in drawn] == [
        "bus bandwidth, int8", "latency, int8", "bus bandwidth, float", "latency, float",
    ]  # fmt: skip
    assert list(drawn[0].series) == [f"1: a, {redop}, out of place" for redop in ("sum", "prod", "max")]
    assert len({plot.file for plot in drawn}) == 4


def test_ratios_are_of_the_same_call_to_the_first_run_of_the_program():
    other = ("other", run_of((8, 1.0, 1.0), name="q"))
    first = ("first", run_of((8, 4.0, 0.5), (16, 8.0, 0.5), (32, 1.0, 0.0)))
    table = run_rows("p", [other, first, ("second", run_of((8, 1.0, 2.0), (16, 16.0, 0.25), (64, 2.0, 1.0)))])
    assert [cell.text for cell, _ in table.groups] == ["call", "2: first", "3: second"]
    assert "time over that of run 2 (first)" in table.caption and table.heads[-1] == "time / run 2"
    assert [[row[0], *cells(row)[2:]] for row in table.rows] == [
        ["8", "4.00", "0.50", "0", "1.00", "2.00", "0", "0.250"],
        ["16", "8.00", "0.50", "0", "16.0", "0.25", "0", "2.000"],
        ["32", "1.00", "0", "0", "–", "–", "–", "–"],
        ["64", "–", "–", "–", "2.00", "1.00", "0", "–"],
    ]


def test_a_call_that_was_measured_twice_has_two_rows():
    table = run_rows("p", [("a", run_of((8, 1.0, 1.0), (8, 2.0, 0.5)))])
    assert [row[2] for row in table.rows] == ["1.00", "2.00"]


def test_what_all_calls_have_in_common_is_in_the_caption():
    table = run_rows("p", [("a", run_of((8, 1.0, 1.0)))])
    assert table.caption == "p: all results (float, sum)"
    assert table.heads[:2] == ["size (B)", "placement"] and list(table.words) == [1]
    rows = [Record(8, 2, "float", "none", root, False, 1.0, 1.0, 1.0, 0) for root in (0, 1)]
    rooted = run_rows("p", [("a", Run(program="p", rows=tuple(rows)))])
    assert rooted.caption == "p: all results (float)" and rooted.heads[:3] == [
        "size (B)",
        "root",
        "placement",
    ]
    assert [row[1] for row in rooted.rows] == ["0", "1"]


def test_a_ratio_beyond_a_tenth_has_a_colour():
    first = ("a", run_of((8, 10.0, 1.0), (16, 10.0, 1.0), (32, 10.0, 1.0), ranks=2))
    table = run_rows("p", [first, ("b", run_of((8, 14.2, 1.0), (16, 10.9, 1.0), (32, 7.0, 1.0), ranks=2))])
    assert [row[-1] for row in table.rows] == [Cell("1.420", "slower"), "1.090", Cell("0.700", "faster")]
    assert "more than a tenth slower" in table.caption and "numbers of ranks" not in table.caption


@pytest.mark.parametrize(("ranks", "said"), [((2, 4), "(2, 4)"), ((8, 0), "(8, unknown)")])
def test_ratios_between_different_numbers_of_ranks_have_a_remark(ranks: tuple[int, int], said: str):
    runs = [(str(one), run_of((8, 1.0, 1.0), ranks=one)) for one in ranks]
    assert f"different or unknown numbers of ranks {said}" in run_rows("p", runs).caption


def test_repeated_sweeps_are_their_median_and_a_band():
    rows = [(8, 1.0, 4.0), (64, 2.0, 8.0), (8, 5.0, 1.0), (64, 2.5, 6.0), (8, 2.0, 2.0), (64, 9.0, 7.0)]
    bandwidth, latency = plots([("a", run_of(*rows))], [], None)
    assert latency.series == {"1: a, out of place": ((8, 64), (2.0, 2.5))}
    assert bandwidth.series == {"1: a, out of place": ((8, 64), (2.0, 7.0))}
    for plot in (bandwidth, latency):
        assert plot.svg.count("fill-opacity: 0.18") == 1
        assert plot.note == "Of repeated sweeps (-N): the median, and a band from the least to the most."
    once, _ = plots([("a", run_of((8, 1.0, 4.0), (64, 2.0, 8.0)))], [], None)
    assert "fill-opacity: 0.18" not in once.svg and not once.note


def many_kinds() -> Run:
    ops = ("sum", "prod", "max", "min", "avg", "mulsum")
    rows = [
        Record(size, 1, "float", op, -1, in_place, 1.0 + at, 1.0 + at, 1.0 + at, 0)
        for at, op in enumerate(ops)
        for size in (8, 64)
        for in_place in (False, True)
    ]
    return Run(program="p", rows=tuple(rows))


def test_many_kinds_of_calls_of_one_run_have_a_colour_each():
    drawn, _ = plots([("a", many_kinds())], [], None)
    assert [one for one in COLOURS if f"stroke: {one}" in drawn.svg] == list(COLOURS[:6])
    assert ">mulsum</text>" in drawn.svg and len(drawn.series) == 12 and not drawn.note


def test_of_many_kinds_of_several_runs_a_few_are_drawn_and_the_others_named():
    drawn, _ = plots([("a", many_kinds()), ("b", many_kinds())], [], None)
    assert [one for one in COLOURS if f"stroke: {one}" in drawn.svg] == list(COLOURS[:2])
    assert len(drawn.series) == 2 * 4 * 2
    assert drawn.note == "Not drawn, but in the table: avg; mulsum."


def test_legends_are_as_wide_as_their_plot():
    """Twelve runs with long names: whatever the columns, each entry has an x within the picture."""
    runs = [(f"a-rather-long-name-of-a-file-{at}.json", run_of((8, 1.0, 1.0))) for at in range(12)]
    drawn, _ = plots(runs, [], None)
    width = float(re.search(r'viewBox="0 0 ([\d.]+)', drawn.svg)[1])  # type: ignore[index]
    starts = [float(x) for x in re.findall(r'x="([\d.]+)"[^>]*>\d+: ', drawn.svg)]
    assert len(starts) == 12 and max(starts) < 0.6 * width
    assert len({colour(at) for at in range(12)}) == 12


def test_a_run_that_had_nothing_to_run_has_not_failed():
    skipped = "nRanks 3 is not a power of 2, skipping"
    run = Run(program="hypercube_perf", notes=(skipped,), out_of_bounds=0)
    assert failures([("a", run)], []) == [] and notes([("a", run)]) == [("1: a", skipped)]
    assert failures([("a", replace(run, out_of_bounds=None))], []) == [("1: a", "no results")]

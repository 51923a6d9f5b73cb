"""One reader for nccl-tests' output and ours, as text and as JSON: what was printed comes back as numbers."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.format import Device, IterationStats, Measurement, Report, Row, measurement_text, opening_text
from bench.options import parse
from bench.parse import Iterations, ParseError, Record, read, read_all
from bench.runner import main

REAL = Path(__file__).parent / "fixtures" / "nccl_tests" / "alltoall_perf.txt"
"""A run of nccl-tests 2.18.3 on 16 GPUs, as it was printed; only the host names are other ones."""

# Two of nccl-tests 2.18.3 on 2x8 H200, pasted without their heading.
PASTED = """
        1024           256     float     sum      -1    45.06    0.02    0.04       0    43.74    0.02    0.04       0
 17179869184    4294967296     float     sum      -1  66326.9  259.02  485.66       0  66345.5  258.95  485.52       0
"""  # noqa: E501
# Until 2023 hypercube_perf, among others, printed nothing for redop; some still do.
WITHOUT_REDOP = "        1024           256     float               2    45.06    0.02    0.04      0    43.74    0.02    0.04    N/A\n"  # noqa: E501


def sweep(program: str, line: str, *measurements: Measurement) -> str:
    """Text of ours with one row."""
    out = io.StringIO()
    report = Report(program, parse(program, line.split()), out, arguments=(program, *line.split()))
    devices = [Device(rank, 0, 100 + rank, "box", rank, (0, 0, 0), "Some CPU") for rank in range(3)]
    report.start(devices, headers=23203, library=23203, environment={}, about={"library": "host"})
    report.begin_row(Row(1020, 255, "float", "sum", -1))
    for placement, measurement in zip(("out_of_place", "in_place"), measurements, strict=True):
        report.measured(placement, measurement)
    report.end_row()
    report.finish(0, None)
    report.close()
    return out.getvalue()


def test_real_output_of_nccl_tests():
    run = read(REAL)
    assert (run.program, run.ranks, run.library) == ("alltoall_perf", 16, "NCCL 2.30.3")
    assert run.devices[15].host == "node-2" and run.devices[15].pci == "0000:f9:00"
    assert run.settings["maxBytes"] == "8589934592" and run.settings["warmup iters"] == "1"
    assert len(run.rows) == 48
    assert run.rows[0] == Record(1024, 16, "float", "none", -1, False, 38.67, 0.03, 0.02, 0)
    assert run.rows[-1] == Record(
        8589934592, 134217728, "float", "none", -1, True, 193528, 44.39, 41.61, None
    )
    assert run.average_busbw == 20.9533 and run.out_of_bounds == 0 and run.good and run.notes == ()
    mean = sum(row.busbw for row in run.rows) / len(run.rows)
    assert mean == pytest.approx(run.average_busbw, abs=0.005)


def test_we_print_real_rows_as_nccl_tests_did():
    """Each row and the heading of the real run, through our formats: the same bytes."""
    lines = REAL.read_text().splitlines()
    run = read(REAL)
    printed = [line for line in lines if line.strip()[:1].isdigit()]
    for number, line in enumerate(printed):
        out, in_place = run.rows[2 * number : 2 * number + 2]
        text = Row(out.size, out.count, out.type, out.redop, out.root).text
        for row in (out, in_place):
            text += measurement_text(Measurement(row.time_us / 1e6, row.algbw, row.busbw, row.wrong))
        assert text == line
    heading = opening_text("alltoall_perf", parse("alltoall_perf", "-b 1K -e 8G -f 2".split()), 23003, 23003)
    assert heading[1:] == lines[1:5]
    assert heading[0].split()[-2:] == lines[0].split()[-2:]
    ours = Device(15, 0, run.devices[15].pid, "node-2", 7, (0, 0xF9, 0), "NVIDIA Graphics Device")
    assert ours.line == lines[20]


def test_our_output_through_the_same_reader(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file = tmp_path / "out.json"
    line = f"-b 1K -e 16K -f 4 -t 3 -n 2 --library host -J {file}"
    assert main("alltoall_perf", line.split()) == 0
    text, document = read(capsys.readouterr().out), read(file)
    real = read(REAL)
    assert (text.program, text.ranks, text.out_of_bounds) == (real.program, 3, real.out_of_bounds)
    assert [row.size for row in text.rows if row.in_place] == [1008, 4080, 16368]
    assert [row.wrong for row in text.rows] == 3 * [0, None]
    assert text.notes == document.notes == ()
    assert document.library == text.library and text.library.startswith("pynccl host library (NCCL 2.")
    assert document.devices == text.devices and document.ranks == text.ranks
    for printed, written in zip(text.rows, document.rows, strict=True):
        assert written.time_us == pytest.approx(printed.time_us, rel=1e-3, abs=0.006)
        assert written.busbw == pytest.approx(printed.busbw, rel=1e-3, abs=0.006)
        same = ("size", "count", "type", "redop", "root", "in_place", "wrong")
        assert [getattr(written, name) for name in same] == [getattr(printed, name) for name in same]


def test_pasted_rows_need_no_heading():
    run = read(PASTED)
    assert [(row.size, row.in_place, row.busbw) for row in run.rows] == [
        (1024, False, 0.04),
        (1024, True, 0.04),
        (17179869184, False, 485.66),
        (17179869184, True, 485.52),
    ]
    assert run.ranks == 0 and not run.good
    assert run.errors == ("the run did not end: its last lines are missing",)
    assert run.program == "all_reduce_perf" and run.program_by == "by its numbers"
    assert run.notes[1:] == (
        "the output does not name its program: all_reduce_perf by its numbers (reduces, no root, "
        "size = count, busbw = 1.87 x algbw)",
    )


def test_a_blank_redop_is_none():
    out, in_place = read(WITHOUT_REDOP).rows
    assert (out.redop, out.root, out.wrong, in_place.wrong) == ("none", 2, 0, None)


def test_columns_are_found_by_their_names():
    """Those of -I, a time stamp, the CPU's time, unknown ones, and the older word for #wrong."""
    stats = IterationStats((1e-6, 3e-6), 0, ((1e-6, 3e-6),))
    timed = Measurement(2e-6, 1, 1, 0, stats)
    run = read(sweep("all_reduce_perf", "-I 1 -S 1 -C 1", timed, timed))
    assert [row.iterations for row in run.rows] == 2 * [Iterations(1.0, 3.0, 3.0, 50.0)]
    assert run.ranks == 3 and run.good
    bitwise = (
        "#  size  count  type  redop  root  time  algbw  busbw  #wrong  #bitdiff  time  algbw  busbw  error\n"
        "     8      2  float    sum    -1  10.5   1.5    2.5       0         7  11.5   1.0    2.0      3\n"
    )
    assert [(row.time_us, row.busbw, row.wrong) for row in read(bitwise).rows] == [
        (10.5, 2.5, 0),
        (11.5, 2.0, 3),
    ]


@pytest.mark.parametrize("tag", ["[1,0]<stdout>:", "[1,0]<stdout>: ", "0: ", "[0] ", "[ 0] "])
def test_what_launchers_put_before_lines_is_taken_off(tag: str):
    text = "".join(f"{tag}{line}\n" for line in REAL.read_text().splitlines())
    assert read(text) == read(REAL)


def test_several_runs_in_one_text():
    text = REAL.read_text() + "hello\n" + sweep("all_reduce_perf", "", *2 * [Measurement(1e-6, 1, 1, 0)])
    assert [(run.program, run.ranks) for run in read_all(text)] == [
        ("alltoall_perf", 16),
        ("all_reduce_perf", 3),
    ]
    with pytest.raises(ParseError, match="2 runs, one was expected; use read_all"):
        read(text)


def test_a_line_cut_in_two_is_a_note_and_not_a_number():
    cut = REAL.read_text().replace("    32.09    0.03    0.03    N/A", "node-1:1:1 [0] NCCL WARN", 1)
    run = read(cut)
    assert len(run.rows) == 46 and run.rows[0].size == 2048
    for place, note in zip(("out-of-place", "in-place"), run.notes, strict=True):
        assert f"size 1024: no {place} result in the line '1024" in note
    first_half = REAL.read_text().replace("    32.09    0.03    0.03    N/A", "", 1)
    assert len(read(first_half).rows) == 47 and len(read(first_half).notes) == 1


def test_no_beginning_of_an_output_passes_for_all_of_it():
    text = REAL.read_text()
    assert read(text).good
    whole = text.index("# Collective test concluded: alltoall_perf") + len(
        "# Collective test concluded: alltoall_perf"
    )
    for end in range(text.index("# Out of bounds"), whole):
        assert not read(text[:end] + "\n").good, text[:end][-60:]


def test_an_older_output_needs_its_verdict_and_its_average():
    text = "".join(line for line in REAL.read_text().splitlines(True) if "Collective test" not in line)
    assert read(text).good
    for end in range(text.index("# Out of bounds"), text.index("# Avg bus bandwidth") + 20):
        assert not read(text[:end] + "\n").good, text[:end][-60:]


@pytest.mark.parametrize("number", ["20N95", "20.95ncluded:"])
def test_a_damaged_line_is_an_error_that_quotes_it(number: str):
    run = read(
        REAL.read_text().replace("# Avg bus bandwidth    : 20.9533", f"# Avg bus bandwidth    : {number}")
    )
    assert not run.good and any(number in error for error in run.errors)


RIGHT: dict[str, Any] = {
    "version": 3,
    "nccl_version": 23203,
    "start_time": "x",
    "args": ["all_reduce_perf"],
    "config": {"nthreads": 1, "ngpus": 2, "devices": []},
    "results": [
        {
            "size": 8,
            "count": 2,
            "type": "float",
            "redop": "sum",
            "root": "-1",
            "in_place": {"time": 1.0, "alg_bw": 1.0, "bus_bw": 1.0, "nwrong": 0},
        }
    ],
    "out_of_bounds": {"count": 0, "okay": "true"},
}


def test_the_document_that_is_broken_below_is_right():
    assert read(json.dumps(RIGHT)).good


@pytest.mark.parametrize("value", ["abc", None, 1.5, -1, [], {}, True, 10**400])
@pytest.mark.parametrize("place", ["size", "count", "nthreads", "nccl_version"])
def test_what_is_no_whole_number_where_one_must_be_is_refused(place: str, value: Any):
    if (place, value) == ("nccl_version", None):
        return  # of a run that did not get so far
    if place == "nccl_version" and value in ([], {}):
        return
    document = json.loads(json.dumps(RIGHT))
    {"nthreads": document["config"], "nccl_version": document}.get(place, document["results"][0])[place] = (
        value
    )
    with pytest.raises(ParseError):
        read(json.dumps(document))


@pytest.mark.parametrize("value", [5, None, [], {"a": 1}])
@pytest.mark.parametrize("place", ["type", "root", "in_place", "results", "config", "out_of_bounds", "args"])
def test_what_is_of_another_kind_is_refused_or_nothing(place: str, value: Any):
    document = json.loads(json.dumps(RIGHT))
    (document if place in document else document["results"][0])[place] = value
    try:
        run = read(json.dumps(document))
    except ParseError:
        return
    assert all(isinstance(row.type, str) and isinstance(row.size, int) for row in run.rows)


@pytest.mark.parametrize("text", ["{" * 3, '{"a":' * 100_000, '{"version": 1' + "0" * 5000 + "}"])
def test_json_that_cannot_be_read_is_refused(text: str):
    with pytest.raises(ParseError, match="broken JSON"):
        read(text)


@pytest.mark.parametrize("ranks, type_", [("x", "float"), ("2", "a" * 200_000)])
def test_a_csv_with_a_broken_row_is_refused_with_its_line(ranks: str, type_: str):
    heading = "collective,library,ranks,size,count,type,redop,root,placement,buffers,hot,aggregated,time_us"
    row = f"all_reduce,host,{ranks},8,2,{type_},sum,-1,in_place,plain,0,1,1"
    with pytest.raises(ParseError, match="line [12]: not a row"):
        read(f"{heading},alg_bw,bus_bw,wrong\n{row},1,1,0\n")


def test_what_no_page_can_have_is_replaced():
    run = read(json.dumps(RIGHT | {"args": ["a\x1b_perf"], "errors": ["\ud800 has gone"]}))
    assert run.program == "a\ufffd_perf" and run.errors == ("\ufffd has gone",)


def test_what_went_wrong_is_in_the_notes():
    text = REAL.read_text().partition("# Out of bounds")[0]
    text += (
        "node-1: Test NCCL failure common.cu:401 'remote process exited'\n# error: the other end has gone\n"
    )
    run = read(text)
    assert (
        run.errors
        == run.notes
        == (
            "node-1: Test NCCL failure common.cu:401 'remote process exited'",
            "error: the other end has gone",
            "the run did not end: its last lines are missing",
        )
    )


# ---- JSON as nccl-tests writes it: doubles for counts, padded roots, the first rank of each process only

DOCUMENT: dict[str, Any] = {
    "version": 3,
    "start_time": "2026-01-02 03:04:05",
    "args": ["/opt/nccl-tests/build/reduce_perf", "-g", "4"],
    "env": [],
    "nccl_version": 23007,
    "config": {
        "nthreads": 1,
        "ngpus": 4,
        "devices": [
            {"rank": rank, "group": 0, "pid": 7, "hostname": f"node-{rank // 4}", "device": 0}
            | {"device_hex": "0000:19:00", "device_info": "NVIDIA H100 80GB HBM3"}
            for rank in (0, 4)
        ],
    },
    "results": [
        {
            "size": 1024,
            "count": 256,
            "type": "float",
            "redop": "sum",
            "root": "     0",
            "out_of_place": {"time": 45.061, "alg_bw": 0.022724, "bus_bw": 0.022724, "nwrong": 0.0},
            "in_place": {"cpu_time": 43.74, "alg_bw": "nan", "bus_bw": 0.0234, "nwrong": None},
            "out_of_place_per_iter": {
                "skipped_iterations": 1,
                "times_us": [99.0, 40.0, 50.0],
                **dict(min_us=40.0, max_us=50.0, avg_us=45.0, p50_us=50.0, p95_us=50.0, p99_us=50.0),  # noqa: C408
                **dict(stdev_us=5.0, cv_pct=11.1),  # noqa: C408
            },
            "actual_iterations": 3,
            "experiment_name": "",
        }
    ],
    "out_of_bounds": {"count": 0, "okay": "true"},
    "average_bus_bandwidth": {"bandwidth": 0.023, "okay": "unchecked"},
    "errors": [],
    "end_time": "2026-01-02 03:04:06",
}


def test_json_of_nccl_tests():
    run = read(json.dumps(DOCUMENT))
    assert (run.program, run.ranks, run.library) == ("reduce_perf", 8, "NCCL 2.30.7")
    assert run.when == "2026-01-02 03:04:05"
    out, in_place = run.rows
    assert (out.root, out.wrong, out.time_us, out.in_place) == (0, 0, 45.061, False)
    assert out.iterations is not None
    assert (out.iterations.skipped, out.iterations.times_us) == (1, (99.0, 40.0, 50.0))
    assert in_place.time_us == 43.74 and in_place.wrong is None and math.isnan(in_place.algbw)
    assert in_place.iterations is None and run.good


def test_a_placement_that_was_not_run_is_no_record():
    row = {**DOCUMENT["results"][0], "out_of_place": None}
    assert [one.in_place for one in read(json.dumps({**DOCUMENT, "results": [row]})).rows] == [True]


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"errors": ["no memory"]}, "no memory"),
        ({"version": 9}, "version 9 of the JSON format, newer than 4"),
    ],
)
def test_what_a_document_says_besides_is_in_the_notes(change: dict[str, Any], note: str):
    run = read(json.dumps({**DOCUMENT, **change}))
    assert run.notes == (note,)
    assert run.errors == (() if "version" in change else run.notes) and run.good is not bool(run.errors)


def test_a_bandwidth_below_what_was_asked_for_is_an_error():
    slow = {"average_bus_bandwidth": {"bandwidth": 0.5, "okay": "false"}}
    said = "the average bus bandwidth, 0.5 GB/s, is below the NCCL_TESTS_MIN_BW of the run"
    assert read(json.dumps({**DOCUMENT, **slow})).errors == (said,)
    assert read(REAL.read_text().replace("20.9533 ", "0.5 FAILED")).errors == (said,)


def test_json_of_nccl_tests_with_a_part_missing_names_the_file_and_the_part(tmp_path: Path):
    file = tmp_path / "cut.json"
    file.write_text(json.dumps({**DOCUMENT, "results": [{"size": 8, "in_place": {}}]}))
    with pytest.raises(ParseError, match="cut.json: a part of it is not as nccl-tests writes it .*'nwrong'"):
        read(file)


# ---- CSV


@pytest.mark.parametrize("timed", ["", "-I 1"])
def test_our_csv_gives_the_same_records_as_our_json(timed: str, tmp_path: Path):
    table, file = tmp_path / "out.csv", tmp_path / "out.json"
    stats = IterationStats((1e-6, 3e-6), 0, ((1e-6, 3e-6),)) if timed else None
    sweep("all_reduce_perf", f"{timed} --csv {table} -J {file}", Measurement(2e-6, 1, 0.25, 0, stats),
          Measurement(4e-6, 1, 0.125, None, stats))  # fmt: skip
    run, same = read(table), read(file)
    assert (run.program, run.ranks, run.library) == ("all_reduce_perf", 3, "pynccl host library")
    assert run.settings == {"buffers": "mapped", "hot": "0", "aggregated": "1"}
    without_times = [
        replace(row, iterations=row.iterations and replace(row.iterations, times_us=())) for row in same.rows
    ]
    assert list(run.rows) == without_times and len(run.rows) == 2
    assert run.errors == () and not run.good  # it does not tell


def test_runs_of_several_csv_files_are_told_apart():
    head = (
        "collective,library,ranks,size,count,type,redop,root,placement,"
        "buffers,hot,aggregated,time_us,alg_bw,bus_bw,wrong\n"
    )
    row = "all_gather,nccl,{},64,4,float,none,-1,in_place,mapped,0,1,2.5,0.5,0.25,\n"
    runs = read_all(head + row.format(4) + head + row.format(8))
    assert [(run.program, run.library, run.ranks) for run in runs] == [
        ("all_gather_perf", "NCCL", 4),
        ("all_gather_perf", "NCCL", 8),
    ]
    assert runs[0].rows == (Record(64, 4, "float", "none", -1, True, 2.5, 0.5, 0.25, None),)
    with pytest.raises(ParseError, match="the text, line 2: not a row of our --csv"):
        read_all(head + row.replace("2.5", "fast").format(4))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nothing\nof the kind\n", "no line of it is nccl-tests'"),
        ("{", "broken JSON .* a run that was killed"),
        ('{"version": 1, "rows": []}', "no JSON of nccl-tests"),
        ("[1]\n", "no line of it is nccl-tests'"),
    ],
)
def test_what_is_no_output_of_nccl_tests_is_refused(text: str, said: str):
    with pytest.raises(ParseError, match=said):
        read(text)


def test_a_file_is_named_in_what_is_refused(tmp_path: Path):
    file = tmp_path / "notes.txt"
    file.write_text("nothing")
    with pytest.raises(ParseError, match=str(file)):
        read(str(file))

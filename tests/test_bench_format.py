"""The text is nccl-tests' to the byte: parsers written for it read ours, and its JSON fields are ours."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.format import Device, IterationStats, Measurement, Report, Row, float_text, measurement_text
from bench.options import parse

# Rows of nccl-tests 2.18.3 on 2x8 H200 (float sum; NCCL 2.30.4), as it printed them.
REAL_ROWS = """\
        1024           256     float     sum      -1    45.06    0.02    0.04       0    43.74    0.02    0.04       0
 17179869184    4294967296     float     sum      -1  66326.9  259.02  485.66       0  66345.5  258.95  485.52       0
"""  # noqa: E501
DEVICES = [Device(rank, 0, 100 + rank, "box", rank, (0, 0x19, 0), "Some GPU") for rank in range(2)]


def read_table(text: str) -> list[dict[str, Any]]:
    """A parser as people write them against nccl-tests: lines that are no comment, split at spaces."""
    names = "size count type redop root".split()
    names += [f"{place}_{name}" for place in ("out", "in") for name in ("time", "algbw", "busbw", "wrong")]
    rows = []
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            words = line.split()
            assert len(words) == len(names), line
            rows.append(dict(zip(names, words, strict=True)))
    return rows


def sweep(line: str, *measurements: Measurement, arguments: tuple[str, ...] = ()) -> tuple[str, Report]:
    """The whole text of a sweep of one row of 1 KiB, with these two measurements."""
    out = io.StringIO()
    report = Report("all_reduce_perf", parse("all_reduce_perf", line.split()), out, arguments=arguments)
    report.start(
        DEVICES, headers=23203, library=22105, environment={"NCCL_DEBUG": "INFO"}, about={"library": "nccl"}
    )
    report.begin_row(Row(1024, 256, "float", "sum", -1))
    for placement, measurement in zip(("out_of_place", "in_place"), measurements, strict=True):
        report.measured(placement, measurement)
    report.end_row()
    return out.getvalue(), report


OUT, IN = Measurement(45.06e-6, 0.02, 0.04, 0), Measurement(43.74e-6, 0.02, 0.04, 0)


def test_a_sweep_is_printed_as_nccl_tests_prints_it():
    text, report = sweep("-b 8 -e 1K -f 2 -g 2", OUT, IN)
    assert text.splitlines() == [
        "# nccl-tests version 2.19.6 nccl-headers=23203 nccl-library=22105",
        "# Collective test starting: all_reduce_perf",
        "# nThread 1 nGpus 2 minBytes 8 maxBytes 1024 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1 "
        "validation: 1 graph: 0 unalign: 0",
        "#",
        "# Using devices",
        "#  Rank  0 Group  0 Pid    100 on        box device  0 [0000:19:00] Some GPU",
        "#  Rank  1 Group  0 Pid    101 on        box device  1 [0000:19:00] Some GPU",
        "#",
        "#                                                              out-of-place                       "
        "in-place          ",
        "#       size         count      type   redop    root"
        "     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong ",
        "#        (B)    (elements)                         "
        "      (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)         ",
        REAL_ROWS.splitlines()[0],
    ]


def test_one_parser_reads_real_output_and_ours():
    ours, _ = sweep("", OUT, IN)
    real = read_table(REAL_ROWS)
    assert read_table(ours) == real[:1]
    assert real[1]["size"] == "17179869184" and real[1]["in_busbw"] == "485.52"


def test_large_numbers_keep_the_columns_of_real_output():
    row = Row(17179869184, 4294967296, "float", "sum", -1)
    text = row.text
    for seconds, algbw, busbw in ((66326.9e-6, 259.02, 485.66), (66345.5e-6, 258.95, 485.52)):
        text += measurement_text(Measurement(seconds, algbw, busbw, 0))
    assert text == REAL_ROWS.splitlines()[1]


@pytest.mark.parametrize(
    ("value", "width", "text"),
    [
        (0, 7, "   0.00"),
        (9999.99, 7, "9999.99"),
        (9999.999, 7, "10000.0"),
        (99999.94, 7, "99999.9"),
        (123456.7, 7, " 123457"),
        (12345678, 7, "1.2e+07"),
        (999.99, 6, "999.99"),
        (1234.56, 6, "1234.6"),
        (123456.7, 6, "123457"),
        (1234567, 6, " 1e+06"),
    ],
)
def test_a_number_keeps_as_many_decimals_as_its_column_has_room_for(value: float, width: int, text: str):
    assert float_text(value, width) == text


def test_unchecked_rows_say_so_and_large_counts_are_shortened():
    assert measurement_text(Measurement(1e-6, 1, 1, None)).endswith("    1.00    N/A")
    assert measurement_text(Measurement(1e-6, 1, 1, 12345678)).endswith("  1.23457e+07")


def test_the_footer_gives_the_verdict_and_the_average_over_both_placements():
    _, report = sweep("", OUT, Measurement(1e-6, 1, 0.06, 0))
    out = report._out
    assert report.finish(0, None)
    report.close()
    assert isinstance(out, io.StringIO)
    assert out.getvalue().splitlines()[-6:] == [
        "# Out of bounds values : 0 OK",
        "# Avg bus bandwidth    : 0.05 ",
        "#",
        "# Collective test concluded: all_reduce_perf",
        "#",
        "",
    ]


@pytest.mark.parametrize(
    ("out_of_bounds", "least", "good", "said"),
    [
        (2, None, False, "# Out of bounds values : 2 FAILED"),
        (0, 0.044, True, "# Avg bus bandwidth    : 0.04 OK"),
        (0, 0.045, False, "# Avg bus bandwidth    : 0.04 FAILED"),
    ],
)
def test_wrong_data_and_too_little_bandwidth_fail(
    out_of_bounds: int, least: float | None, good: bool, said: str
):
    _, report = sweep("", OUT, IN)
    assert report.finish(out_of_bounds, least) is good
    assert isinstance(report._out, io.StringIO)
    assert said in report._out.getvalue().splitlines()


def test_options_add_their_header_lines():
    stats = IterationStats((1e-6, 3e-6), 1, ((1e-6, 3e-6),))
    timed = Measurement(2e-6, 1, 1, 0, stats)
    text, _ = sweep("-z 1 -p 1 -I 1 -K 1 -S 1", timed, timed)
    lines = text.splitlines()
    assert "# Blocking Enabled: wait and barrier after each inner iteration (-m) " in lines
    assert "# Parallel Init Enabled: threads call into NcclInitRank concurrently " in lines
    assert any(
        line.startswith("# Per-Iteration Report: ") and "skips first 1 iterations" in line for line in lines
    )
    header = next(line for line in lines if " i_cv% " in line)
    assert header.split()[1:] == [
        *"size count type redop root".split(),
        *("time algbw busbw #wrong i_min i_max i_p99 i_cv%".split() * 2),
        "timestamp",
    ]
    row = lines[-1]
    assert re.search(r" \d{4}-\d\d-\d\d \d\d:\d\d:\d\d$", row)
    assert row.split()[9:13] == ["3.00", "3.00", "3.00", "0.00"]
    assert (
        header.index("i_cv%") + 5 == row.index("0.00", row.index("3.00")) + 4
    )  # right edges of the same column


def test_percentiles_are_of_sorted_counted_iterations():
    times = tuple(float(n) for n in (100, 5, 1, 4, 2, 3))
    columns = IterationStats(times, 1, (times,)).columns()
    assert columns["min_us"] == 1e6 and columns["max_us"] == 5e6
    assert columns["p50_us"] == 3e6 and columns["p95_us"] == columns["p99_us"] == 5e6
    assert columns["avg_us"] == 3e6 and columns["stdev_us"] == pytest.approx(2**0.5 * 1e6)


def test_the_json_file_has_the_fields_of_version_3(tmp_path: Path):
    stats = IterationStats((1e-6, 3e-6), 0, ((1e-6, 3e-6), (1e-6, 2e-6)))
    file = tmp_path / "out.json"
    timed = Measurement(2e-6, 1.5, 2.5, 0, stats)
    text, report = sweep(f"-b 8 -e 1K -f 2 -I 1 -J {file}", timed, timed, arguments=("all_reduce_perf", "-I"))
    report.finish(0, None)
    report.close()
    assert text.startswith(f"# Writing JSON output to {file}\n")
    document = json.loads(file.read_text())
    assert document["version"] == 3 and document["nccl_version"] == 22105
    assert document["args"] == ["all_reduce_perf", "-I"] and document["env"] == ["NCCL_DEBUG=INFO"]
    config = document["config"]
    assert config["step_factor"] == 2 and "step_bytes" not in config
    assert config["blocking_collectives"] == "false" and config["per_iter_timing"] == "true"
    assert config["devices"][1] == {
        "rank": 1,
        "group": 0,
        "pid": 101,
        "hostname": "box",
        "device": 1,
        "device_hex": "0000:19:00",
        "device_info": "Some GPU",
    }
    (row,) = document["results"]
    assert (row["size"], row["count"], row["type"], row["redop"], row["root"]) == (
        1024,
        256,
        "float",
        "sum",
        "    -1",
    )
    assert row["out_of_place"] == {"time": 2.0, "alg_bw": 1.5, "bus_bw": 2.5, "nwrong": 0}
    assert row["in_place_per_iter"]["times_us"] == [1.0, 3.0]
    assert row["in_place_per_iter"]["per_process_max_times_us"] == [[1.0, 3.0], [1.0, 2.0]]
    assert document["out_of_bounds"] == {"count": 0, "okay": "true"}
    assert document["average_bus_bandwidth"] == {"bandwidth": 2.5, "okay": "unchecked"}
    assert document["errors"] == [] and document["end_time"] >= document["start_time"]


def test_a_json_file_is_never_overwritten(tmp_path: Path):
    file = tmp_path / "out.json"
    for _ in range(3):
        _, report = sweep(f"-J {file}", OUT, IN)
        report.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.json.0", "out.json.1"]


def test_a_run_that_breaks_leaves_what_it_measured_and_why_it_broke(tmp_path: Path):
    file = tmp_path / "out.json"
    _, report = sweep(f"-J {file}", OUT, IN)
    report.close("RemoteError: rank 1 has gone")
    document = json.loads(file.read_text())
    assert len(document["results"]) == 1 and document["errors"] == ["RemoteError: rank 1 has gone"]
    assert isinstance(report._out, io.StringIO)
    assert report._out.getvalue().endswith("# error: RemoteError: rank 1 has gone\n")


def test_csv_has_one_row_for_each_tuple_of_independent_variables(tmp_path: Path):
    file = tmp_path / "out.csv"
    _, report = sweep(f"--csv {file}", OUT, IN)
    report.close()
    with file.open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert [row["placement"] for row in rows] == ["out_of_place", "in_place"]
    assert rows[0] | {"time_us": "45.06"} == rows[0]
    assert {k: rows[1][k] for k in ("collective", "ranks", "size", "type", "redop", "root", "wrong")} == {
        "collective": "all_reduce",
        "ranks": "2",
        "size": "1024",
        "type": "float",
        "redop": "sum",
        "root": "-1",
        "wrong": "0",
    }


@pytest.mark.parametrize("timed", ["", "-I 1"])
def test_a_row_is_in_the_files_before_the_run_ends(timed: str, tmp_path: Path):
    """And the JSON that is there at the end is what `json.dump` makes of it, whatever way it grew."""
    table, file = tmp_path / "out.csv", tmp_path / "out.json"
    stats = IterationStats((1e-6, 3e-6), 0, ((1e-6, 3e-6),)) if timed else None
    measurement = Measurement(2e-6, 1, 1, 0, stats)
    _, report = sweep(f"{timed} --csv {table} -J {file}", measurement, measurement)
    for rows in (1, 2):
        document = json.loads(file.read_text())
        assert len(document["results"]) == rows and "out_of_bounds" not in document
        assert document["errors"] == [] and document["end_time"]
        assert len(table.read_text().splitlines()) == 1 + 2 * rows
        if rows == 1:
            report.begin_row(Row(2048, 512, "float", "sum", -1))
            for placement in ("out_of_place", "in_place"):
                report.measured(placement, measurement)
            report.end_row()
    report.finish(0, None)
    report.close()
    text = file.read_text()
    assert text == json.dumps(json.loads(text), indent=1) + "\n"
    assert list(json.loads(text))[-4:] == ["out_of_bounds", "average_bus_bandwidth", "errors", "end_time"]


def test_the_text_of_a_document_cannot_take_the_place_of_its_results(tmp_path: Path):
    file = tmp_path / "out.json"
    _, report = sweep(f"-J {file}", OUT, IN, arguments=('"results": []',))
    report.close()
    document = json.loads(file.read_text())
    assert document["args"] == ['"results": []'] and len(document["results"]) == 1

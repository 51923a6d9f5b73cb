"""Outputs that do not name their program, as older nccl-tests' and pasted rows: what their numbers tell."""

# ruff: noqa: E501 - a row of nccl-tests is longer than a line

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from bench.collectives import COLLECTIVES, Case
from bench.format import Device, Measurement, Report, Row
from bench.options import parse
from bench.parse import Run, read
from bench.recognise import PROGRAMS, candidates, named, program_named
from bench.report import main as report

TWINS = {"gather_perf": "scatter_perf", "scatter_perf": "gather_perf"}
# As nccl-tests of 2020 printed them: no line of the program's name, other columns, the group not told.
OLD_ALL_REDUCE = """\
# nThread 1 nGpus 8 minBytes 8388608 maxBytes 16777216 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#
# Using devices
{devices}#
#                                                     out-of-place                       in-place
#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     8388608       2097152   float     sum    104.4   80.35  140.62  4e-07    104.5   80.28  140.48  4e-07
    16777216       4194304   float     sum    165.9  101.14  177.00  4e-07    166.1  100.99  176.73  4e-07
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 158.707
#
"""
OLD_BROADCAST = """\
#       size         count    type    root     time   algbw   busbw  error     time   algbw   busbw  error
     8388608       2097152   float       0    100.0   83.89   83.89  0e+00    100.0   83.89   83.89  0e+00
"""


def old(text: str) -> str:
    lines = [
        f"#   Rank {rank:2} Pid  4242 on dgx device {rank:2} [0x{rank:02x}] A100-SXM4-40GB\n"
        for rank in range(8)
    ]
    return text.format(devices="".join(lines))


def output(program: str, ranks: int, folder: Path, checks: int = 1) -> tuple[str, Path]:
    """The text, without the lines that name the program, and the JSON, without arguments, of a sweep."""
    row = COLLECTIVES[program]
    file = folder / f"{ranks}.json"
    out = io.StringIO()
    words = f"-b 1M -e 4M -f 4 -c {checks} -J {file}".split()
    written = Report(program, parse(program, words), out)
    devices = [Device(rank, 0, rank, "node", rank, (0, rank + 1, 0), "GPU") for rank in range(ranks)]
    written.start(devices, headers=21000, library=21000, environment={}, about={})
    for dtype, size in (("float", 1 << 20), ("half", 4 << 20)):
        case = Case("sum", dtype, 0 if row.rooted else -1, ranks)
        layout = row.layout(case, size // case.itemsize)
        total = max(layout.send, layout.recv) * case.itemsize
        op = "sum" if row.reduces else "none"
        written.begin_row(Row(total, layout.count, dtype, op, case.root))
        for placement in ("out_of_place", "in_place"):
            seconds = 1e-5 + size / 50e9
            algbw = row.bandwidth.moved(case, layout) / seconds / 1e9
            checked = checks and (row.checked_in_place or placement == "out_of_place")
            busbw = algbw * row.bandwidth.factor(ranks)
            written.measured(placement, Measurement(seconds, algbw, busbw, 0 if checked else None))
        written.end_row()
    written.finish(0, None)
    written.close()
    text = re.sub(r"# Collective test .*\n", "", out.getvalue())
    return text, file


def test_the_table_is_that_of_the_programs():
    assert list(PROGRAMS) == list(COLLECTIVES)
    for program, row in COLLECTIVES.items():
        signature = PROGRAMS[program]
        assert signature.reduces in (None, row.reduces) and signature.rooted is row.rooted
        assert signature.checked_in_place is row.checked_in_place
        for ranks in (2, 3, 8):
            assert signature.factor(ranks) == row.bandwidth.factor(ranks)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("program", sorted(set(COLLECTIVES) - {"alltoallv_perf"}))
def test_every_program_is_known_by_its_numbers_but_gather_and_scatter(
    program: str, ranks: int, tmp_path: Path
):
    text, file = output(program, ranks, tmp_path)
    document = json.loads(file.read_text())
    file.write_text(json.dumps({**document, "args": []}))
    for run in (read(text), read(file)):
        if program in TWINS:
            assert run.program == "" and candidates(run) == ["gather_perf", "scatter_perf"]
            assert "it may be gather_perf or scatter_perf; say which with --program" in run.notes[0]
        else:
            assert (run.program, run.program_by) == (program, "by its numbers")
            assert f"does not name its program: {program} by its numbers (" in run.notes[0]
        assert run.ranks == ranks and run.good


@pytest.mark.parametrize(
    "program", ["all_reduce_perf", "reduce_scatter_perf", "broadcast_perf", "reduce_perf"]
)
def test_without_devices_the_numbers_tell_as_well(program: str, tmp_path: Path):
    text, _ = output(program, 8, tmp_path)
    rows = "".join(line + "\n" for line in text.splitlines() if not line.startswith("#"))
    assert read(rows).program == program


def test_output_of_old_nccl_tests():
    run = read(old(OLD_ALL_REDUCE))
    assert (run.program, run.ranks, len(run.rows)) == ("all_reduce_perf", 8, 4) and run.good
    assert read(OLD_BROADCAST).program == "broadcast_perf"


def test_the_name_of_the_file_decides_between_twins_and_no_more(tmp_path: Path):
    text, _ = output("gather_perf", 4, tmp_path)
    for name, program in (("gather_h100.txt", "gather_perf"), ("H100-Scatter.log", "scatter_perf"),
                          ("all_reduce.txt", ""), ("run7.txt", "")):  # fmt: skip
        file = tmp_path / name
        file.write_text(text)
        run = read(file)
        assert run.program == program
        if program:
            assert run.program_by == "by the name of the file"
    assert read(file, "scatter_perf").program_by == "as the command line says"
    unclear = tmp_path / "all_reduce.txt"
    assert "and the name of the file says all_reduce_perf" in read(unclear).notes[0]


def test_unchecked_results_leave_more_programs(tmp_path: Path):
    text, _ = output("alltoall_perf", 4, tmp_path, checks=0)
    assert candidates(read(text)) == ["all_gather_perf", "alltoall_perf", "alltoallv_perf"]
    assert "it may be all_gather_perf or alltoall_perf; say" in read(text).notes[0]


def test_alltoallv_is_known_by_its_uneven_sizes_or_by_the_name_of_the_file(tmp_path: Path):
    assert read(output("alltoallv_perf", 8, tmp_path)[0]).program == "alltoallv_perf"
    text, _ = output("alltoallv_perf", 2, tmp_path)
    assert read(text).program == "alltoall_perf"  # all to the other rank: just as alltoall, which is older
    file = tmp_path / "alltoallv.txt"
    file.write_text(text)
    assert read(file).program == "alltoallv_perf"


def test_a_run_that_names_its_program_keeps_it(tmp_path: Path):
    _, file = output("gather_perf", 4, tmp_path)
    document = json.loads(file.read_text())
    file.write_text(json.dumps({**document, "args": ["/opt/build/scatter_perf"]}))
    assert read(file, "reduce_perf").program == "scatter_perf"
    assert named(Run(), "all_reduce.txt").program == ""  # without rows nothing is known


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("all_reduce_h100.txt", "all_reduce_perf"),
        ("allreduce-8.log", "all_reduce_perf"),
        ("h100-reduce-scatter.txt", "reduce_scatter_perf"),
        ("AllGather.txt", "all_gather_perf"),
        ("all_to_allv.txt", "alltoallv_perf"),
        ("alltoall.json", "alltoall_perf"),
        ("reduce.txt", "reduce_perf"),
        ("bcast.txt", "broadcast_perf"),
        ("result.txt", ""),
    ],
)
def test_names_of_files(name: str, program: str):
    assert program_named(name) == program


def test_the_report_lays_an_old_log_beside_a_new_one_and_says_how_it_was_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    before, twin = tmp_path / "before.txt", tmp_path / "twin.txt"
    before.write_text(old(OLD_ALL_REDUCE))
    twin.write_text(output("scatter_perf", 8, tmp_path)[0])
    assert report([str(before), str(twin), "--program", "scatter", "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "index.html").read_text()
    assert "all_reduce_perf (by its numbers)" in page and "Unknown program" not in page
    assert "scatter_perf as the command line says" in page
    with pytest.raises(SystemExit, match="2"):
        report([str(before), "--program", "scan"])
    assert "'scan' is no program; one of all_reduce_perf" in capsys.readouterr().err


# ---- our own text, and groups


def host_text(name: str = "AMD EPYC (2 cores)", split: bool = False) -> str:
    out = io.StringIO()
    report = Report("all_reduce_perf", parse("all_reduce_perf", []), out)
    devices = [Device(rank, rank % 2 if split else 0, rank, "vm", rank, (0, 0, 0), name) for rank in range(4)]
    report.start(devices, headers=23203, library=23203, environment={}, about={"library": "host"})
    report.begin_row(Row(1024, 256, "float", "sum", -1))
    for placement in ("out_of_place", "in_place"):
        report.measured(placement, Measurement(1e-6, 1.0, 1.0, 0))
    report.end_row()
    report.finish(0, None)
    report.close()
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "library"),
    [("AMD EPYC (2 cores)", "pynccl host library (NCCL 2.32.3)"), ("NVIDIA H200", "NCCL 2.32.3")],
)
def test_text_of_the_host_library_is_told_by_its_devices(name: str, library: str):
    assert read(host_text(name)).library == library


def test_ranks_are_those_of_one_of_the_groups_that_sweep_side_by_side(tmp_path: Path):
    run = read(host_text(split=True))
    assert (run.ranks, run.groups, len(run.devices)) == (2, 2, 4)
    assert (read(host_text()).ranks, read(host_text()).groups) == (4, 1)
    document = {
        "version": 3,
        "nccl_version": 23007,
        "args": ["all_reduce_perf"],
        "config": {
            "nthreads": 1,
            "ngpus": 4,
            "devices": [
                {"rank": 4 * process, "group": process % 2, "pid": process, "hostname": "n", "device": 0,
                 "device_hex": "0000:01:00", "device_info": "GPU"}
                for process in range(4)
            ],
        },
    }  # fmt: skip
    run = read(json.dumps(document))
    assert (run.ranks, run.groups) == (8, 2)  # the first rank of each process is listed
    file = tmp_path / "split.txt"
    file.write_text(host_text(split=True))
    assert report([str(file), "--out", str(tmp_path / "out")]) == 0
    assert "2 (in the first of 2 groups side by side)" in (tmp_path / "out" / "index.html").read_text()

"""alltoallv's amounts are nccl-tests': made from a size, or from a matrix in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.options import Options, UsageError, parse
from bench.parse import read
from bench.runner import main
from bench.traffic import Traffic, traffic_from

PREFIX = "NCCL_TESTS_ALLTOALLV_"
MATRIX = "100 200 150\n\n50 100 75\n 300\t150 200 \n"
ROUNDED = ((96, 192, 144), (48, 96, 64), (288, 144, 192))


def options(line: str = "") -> Options:
    return parse("alltoallv_perf", line.split())


def matrix_file(tmp_path: Path, text: str = MATRIX) -> str:
    file = tmp_path / "matrix.txt"
    file.write_text(text)
    return str(file)


def test_far_ranks_get_more_and_oneself_nothing():
    traffic = Traffic()
    assert traffic.sent(0, 4, 6 * 16) == [0, 16, 32, 48]
    assert traffic.sent(2, 4, 6 * 16) == [32, 48, 0, 16]
    assert traffic.received(0, 4, 6 * 16) == [0, 48, 32, 16]


def test_a_spread_of_0_is_alltoall_and_between_it_is_a_blend():
    assert Traffic(spread=0.0).sent(1, 4, 256) == 4 * [64]
    assert Traffic(spread=0.5).sent(0, 4, 4 * 96) == [48, 80, 112, 144]


def test_every_rank_sends_and_receives_as_much_as_another():
    for ranks in (1, 2, 3, 5, 8):
        for total in (0, 16, 1000, 4096):
            sums = {sum(Traffic().sent(rank, ranks, total)) for rank in range(ranks)}
            sums |= {sum(Traffic().received(rank, ranks, total)) for rank in range(ranks)}
            assert len(sums) == 1 and Traffic().largest(ranks, total) == 2 * tuple(sums)
            assert all(amount % 16 == 0 for amount in Traffic().sent(0, ranks, total))


def test_a_single_rank_sends_itself_everything():
    assert Traffic().sent(0, 1, 100) == [96]


def test_the_variables_choose_the_pattern(tmp_path: Path):
    assert traffic_from({}, options(), 4) == Traffic()
    assert traffic_from({f"{PREFIX}SPREAD": "0.25"}, options("-b 8 -f 2"), 4) == Traffic(spread=0.25)
    file = matrix_file(tmp_path)
    traffic = traffic_from({f"{PREFIX}MATRIX_FILE": file}, options(), 3)
    assert traffic.matrix == ROUNDED
    assert traffic.largest(3, 0) == (288 + 144 + 192, 96 + 48 + 288)
    assert traffic.largest(2, 0) == (96 + 192, 192 + 96)  # of a larger matrix the first rows and columns
    scaled = traffic_from({f"{PREFIX}MATRIX_FILE": file, f"{PREFIX}MATRIX_SCALE": "0.5"}, options(), 3)
    assert scaled.matrix is not None and scaled.matrix[0] == (48, 96, 64)


@pytest.mark.parametrize("separator", [" ", "\t", ",", ", ", " , "])
def test_numbers_of_a_matrix_are_separated_by_white_space_or_commas(separator: str, tmp_path: Path):
    lines = [separator.join(line.split()) for line in MATRIX.splitlines()]
    for end in ("", separator.rstrip(" ")):
        file = matrix_file(tmp_path, "".join(f"{line}{end}\n" if line else "\n" for line in lines))
        assert traffic_from({f"{PREFIX}MATRIX_FILE": file}, options(), 3).matrix == ROUNDED


@pytest.mark.parametrize(
    ("variables", "line", "said"),
    [
        ({"SPREAD": "1.5"}, "", "SPREAD='1.5' is not a number from 0 to 1"),
        ({"SPREAD": "wide"}, "", "SPREAD='wide' is not a number"),
        ({"MATRIX_SCALE": "-1"}, "", "MATRIX_SCALE='-1' is not a number of at least 0"),
        ({"PRINT_SUMMARY": "yes"}, "", "PRINT_SUMMARY='yes' is not a number"),
        ({"MATRIX_FILE": "nowhere.txt"}, "", "MATRIX_FILE=nowhere.txt cannot be read: "),
        ({"MATRIX_FILE": MATRIX}, "-b 8 -e 1K", "no sweep from -b 8 to -e 1024"),
        ({"MATRIX_FILE": MATRIX}, "-b 64 -e 64", "-e 64 is too small: .* 624 bytes .* give -b 624 -e 624"),
        ({"MATRIX_FILE": "1 2\n3 4\n"}, "", "is 2 x 2, for 3 ranks"),
        ({"MATRIX_FILE": "1 2\n3\n"}, "", r"it has 2 rows of 2 \+ 1 values"),
        ({"MATRIX_FILE": "\n"}, "", "it has 0 rows of no values"),
        ({"MATRIX_FILE": "1 x\n3 4\n"}, "", "row 0, column 1: 'x' is not a number of bytes"),
        ({"MATRIX_FILE": "1 2\n3 -4\n"}, "", "row 1, column 1: '-4' is not a number of bytes"),
        ({"MATRIX_FILE": "1 2\n3 nan\n"}, "", "row 1, column 1: 'nan'"),
        ({"MATRIX_FILE": "1,2\n3,,4\n"}, "", "row 1, column 1: '' .* separate the numbers by white space or"),
        ({"MATRIX_FILE": "1;2\n3;4\n"}, "", "row 0, column 0: '1;2' .* by white space or commas"),
    ],
)
def test_what_the_variables_cannot_mean_is_an_error(
    variables: dict[str, str], line: str, said: str, tmp_path: Path
):
    variables = {PREFIX + name: value for name, value in variables.items()}
    if "\n" in variables.get(f"{PREFIX}MATRIX_FILE", ""):
        variables[f"{PREFIX}MATRIX_FILE"] = matrix_file(tmp_path, variables[f"{PREFIX}MATRIX_FILE"])
    with pytest.raises(UsageError, match=said):
        traffic_from(variables, options(line), 3)


def test_a_matrix_is_run_and_its_sizes_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv(f"{PREFIX}MATRIX_FILE", matrix_file(tmp_path))
    monkeypatch.setenv(f"{PREFIX}PRINT_SUMMARY", "1")
    assert main("alltoallv_perf", "-b 1K -e 1K -t 3 -n 2 -c 2 --library host".split()) == 0
    text = capsys.readouterr().out
    run = read(text)
    assert [(row.size, row.count, row.wrong) for row in run.rows] == [(624, 0, 0), (624, 0, None)]
    lines = text.splitlines()
    begin = next(n for n, line in enumerate(lines) if line.lstrip().startswith("624"))
    summary = lines[begin + 1 : begin + 5]
    assert summary[0].startswith(
        f"# {PREFIX}PRINT_SUMMARY: mode=matrix nranks=3 matrix_dim=3 scale=1.000 time_usec="
    )
    assert summary[2].startswith("#   rank=1 send_bytes=208 recv_bytes=432 alg_bw=")
    assert len([line for line in lines if line.startswith("#   rank=")]) == 6  # both placements


def test_the_summary_gives_each_rank_its_bandwidth():
    lines = Traffic().summary_lines(2, 4000, 1e-6)
    assert lines == [
        f"# {PREFIX}PRINT_SUMMARY: mode=generated nranks=2 total_bytes=4000 spread=1.000 time_usec=1.00",
        "#   rank=0 send_bytes=4000 recv_bytes=4000 alg_bw=4.00 bus_bw=2.00",
        "#   rank=1 send_bytes=4000 recv_bytes=4000 alg_bw=4.00 bus_bw=2.00",
    ]


@pytest.mark.parametrize("variables", [{"SPREAD": "0"}, {"SPREAD": "0.3"}])
def test_other_patterns_keep_the_data_right(
    variables: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name, value in variables.items():
        monkeypatch.setenv(PREFIX + name, value)
    assert main("alltoallv_perf", "-b 8 -e 8K -f 32 -t 3 -n 2 -d all --library host".split()) == 0
    assert read(capsys.readouterr().out).good


def test_a_wrong_variable_is_misuse_before_any_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv(f"{PREFIX}SPREAD", "2")
    assert main("alltoallv_perf", "-g 3 --library host".split()) == 2
    assert capsys.readouterr().err.count("SPREAD='2' is not a number from 0 to 1") == 1
    monkeypatch.setenv(f"{PREFIX}MATRIX_FILE", matrix_file(tmp_path))
    monkeypatch.delenv(f"{PREFIX}SPREAD")
    assert main("alltoallv_perf", "-b 1K -e 1K -t 2 -g 2 --library host".split()) == 2
    assert capsys.readouterr().err.count("is 3 x 3, for 4 ranks") == 1
    assert main("alltoall_perf", "-b 8 -e 8 -t 2 -n 1 --library host".split()) == 0  # it is another's

"""The command line of the benchmark programs is nccl-tests', and what cannot be meant is refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench import algorithms_perf
from bench.files import refuse_unwritable, write_whole
from bench.options import (
    DTYPES,
    OPS,
    OPTIONS,
    Options,
    UsageError,
    parse,
    parse_size,
    refuse_what_cannot_apply,
)
from bench.variables import first_device, group_of, least_bandwidth

K, M, G = 1024, 1024**2, 1024**3

# nccl-tests 2.19: letter, long name, default as it is printed or meant
NCCL_TESTS = {
    "t": ("nthreads", 1),
    "g": ("ngpus", 1),
    "b": ("minbytes", 32 * M),
    "e": ("maxbytes", 32 * M),
    "i": ("stepbytes", M),
    "f": ("stepfactor", 1),
    "n": ("iters", 20),
    "m": ("agg_iters", 1),
    "w": ("warmup_iters", 1),
    "N": ("run_cycles", 1),
    "p": ("parallel_init", False),
    "c": ("check", 1),
    "o": ("op", "sum"),
    "d": ("datatype", "float"),
    "r": ("root", "0"),
    "z": ("blocking", 0),
    "y": ("stream_null", False),
    "T": ("timeout", 0),
    "G": ("cudagraph", 0),
    "C": ("report_cputime", False),
    "S": ("report_timestamps", False),
    "J": ("output_file", None),
    "a": ("average", 1),
    "R": ("local_register", 0),
    "x": ("cta_policy", None),
    "D": ("device_implementation", 0),
    "V": ("device_cta_count", 16),
    "M": ("memory", False),
    "u": ("unalign", 0),
    "I": ("per_iter_timing", False),
    "K": ("per_iter_skip", 0),
}


def options(line: str) -> Options:
    return parse("all_reduce_perf", line.split())


def refusal(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What is said when this command line is refused; that it ends with status 2 is checked here."""
    with pytest.raises(SystemExit) as end:
        options(line)
    assert end.value.code == 2
    return capsys.readouterr().err


def test_letters_names_and_defaults_are_those_of_nccl_tests():
    ours = {option.letter: option for option in OPTIONS if option.letter}
    assert {letter: option.name for letter, option in ours.items()} == {
        k: v[0] for k, v in NCCL_TESTS.items()
    }
    defaults = options("")
    assert {k: getattr(defaults, ours[k].field) for k in NCCL_TESTS} == {
        k: v[1] for k, v in NCCL_TESTS.items()
    }


def test_all_types_and_operations_run_in_the_order_of_nccl_tests():
    every = options("-d all -o all")
    assert (
        every.dtypes
        == DTYPES
        == tuple("int8 uint8 int32 uint32 int64 uint64 half float double bfloat16 f8e4m3 f8e5m2".split())
    )
    assert every.ops == OPS == ("sum", "prod", "max", "min", "avg", "mulsum")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8", 8),
        ("1K", K),
        ("1k", K),
        ("64M", 64 * M),
        ("1.5g", 3 * G // 2),
        ("0.5", 0),
        (".5K", 512),
        ("0", 0),
    ],
)
def test_sizes_have_1024_based_suffixes_and_fractions(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "8Q", "-8", "1e6", "K", "8 8", "0x10"])
def test_what_is_no_size_is_an_error_that_quotes_it(text: str):
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


def test_a_factor_multiplies_and_a_step_adds():
    assert list(options("-b 8 -e 1K -f 4").sizes()) == [8, 32, 128, 512]
    assert list(options("-b8 -e1K -i 400").sizes()) == [8, 408, 808]
    assert list(options("-b 0 -e 64 -i 32").sizes()) == [0, 32, 64]


def test_warm_up_doubles_whatever_the_step_is():
    assert list(options("-b 8 -e 40 -i 8").warmup_sizes()) == [8, 16, 32]
    assert list(options("-b 0 -e 4 -i 4").warmup_sizes()) == [0, 1, 2, 4]


def test_other_words_for_the_same():
    assert options("-r -1").root == options("-r all").root == "all"
    assert options("-d fp8_e4m3").dtype == "f8e4m3" and options("-d float32").dtype == "float"


def test_one_end_of_the_sizes_alone_moves_the_other():
    assert (options("-e 64K").min_bytes, options("-e 64K").max_bytes) == (64 * K, 64 * K)
    assert (options("-b 64M").min_bytes, options("-b 64M").max_bytes) == (64 * M, 64 * M)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-b 64M -e 8", "-b 67108864 is above -e 8"),
        ("-b 0 -e 64 -f 2", "-b 0 stays 0"),
        ("-b 8 -e 64 -i 0", "-i 0 never reaches"),
        ("-t 0", "'0' is not a whole number from 1 to 4096"),
        ("-n 99999999999999", "is not a whole number from 1 to 2147483647"),
        ("-n 100000 -m 1000", "-n 100000 times -m 1000 are more than 10000000 calls"),
        ("-e " + "9" * 400, "is more than any memory has"),
        ("-a 4", "'4' is not a whole number from 0 to 3"),
        ("-o xor", "'xor' is unknown; one of sum, prod"),
        ("-d int16", "'int16' is unknown; one of int8"),
        ("-J out.txt", "name it out.txt.json"),
        ("-I 1 -G 2", "-I 1 and -G exclude each other"),
        ("-G 2 -y 1", "-G 2 and -y 1 exclude each other"),
        ("-G 2 -z 3", "-G 2 and -z 3 exclude each other"),
        ("-K 2", "add -I 1"),
        ("-I 1 -K 20", "leaves none of the 20 iterations"),
        ("-R 2 --buffers plain", "leave out --buffers plain"),
        ("-Q 1", "unrecognized arguments: -Q"),
    ],
)
def test_a_wrong_word_is_refused_with_the_option_the_value_and_the_remedy(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
):
    assert said in refusal(line, capsys)


@pytest.mark.parametrize("line", ["-G 1", "-x 1", "-V 8", "-M 1"])
def test_what_needs_a_gpu_is_refused_by_name_on_the_host_library(line: str):
    with pytest.raises(UsageError, match=f"^{line}.*host library"):
        refuse_what_cannot_apply(options(line), "host")


def test_only_device_side_kernels_are_refused_on_gpus():
    refuse_what_cannot_apply(options("-G 1 -x 1 -V 8 -M 1"), "nccl")


@pytest.mark.parametrize("kind", ["host", "nccl"])
def test_device_side_kernels_are_refused_everywhere_alike(kind: str):
    with pytest.raises(UsageError, match=r"^-D 1 .*on GPUs neither; leave it out$"):
        refuse_what_cannot_apply(options("-D 1"), kind)


@pytest.mark.parametrize(
    ("variables", "groups"),
    [
        ({}, [0, 0, 0, 0]),
        ({"NCCL_TESTS_SPLIT_MASK": "1"}, [0, 1, 0, 1]),
        ({"NCCL_TESTS_SPLIT_MASK": "2", "NCCL_TESTS_SPLIT": "MOD 2"}, [0, 0, 2, 2]),
        ({"NCCL_TESTS_SPLIT": "MOD 2"}, [0, 1, 0, 1]),
        ({"NCCL_TESTS_SPLIT": "/2"}, [0, 0, 1, 1]),
        ({"NCCL_TESTS_SPLIT": "and 0b10"}, [0, 0, 2, 2]),
        ({"NCCL_TESTS_SPLIT": "|0x1"}, [1, 1, 3, 3]),
    ],
)
def test_split_variables_give_groups_of_processes(variables: dict[str, str], groups: list[int]):
    assert [group_of(process, variables) for process in range(4)] == groups


@pytest.mark.parametrize("text", ["XOR 2", "MOD", "MOD 0", "/0", "AND zwei"])
def test_a_split_that_cannot_be_read_is_an_error(text: str):
    with pytest.raises(UsageError, match="NCCL_TESTS_SPLIT"):
        group_of(1, {"NCCL_TESTS_SPLIT": text})


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "fast"])
def test_a_least_bandwidth_that_is_none_is_an_error(text: str):
    with pytest.raises(UsageError, match="NCCL_TESTS_MIN_BW"):
        least_bandwidth({"NCCL_TESTS_MIN_BW": text})


@pytest.mark.parametrize("words", ["-g 0", "-g -1", "-f 1", "-f 0", "-w 0", "-n 0", "-c 0", "-n 1e3", "-b 0"])
def test_the_comparison_of_algorithms_refuses_what_has_no_end_or_no_time(
    words: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as stop:
        algorithms_perf.main(words.split())
    assert stop.value.code == 2 and words.split()[1] in capsys.readouterr().err


def test_what_is_no_file_and_what_a_link_leads_to_are_written_in_place(tmp_path: Path):
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    refuse_unwritable("--json", str(pipe))
    write_whole(pipe, "text")
    assert pipe.is_fifo() and os.read(reader, 9) == b"text"
    os.close(reader)


def test_the_other_variables_are_read_and_checked():
    assert first_device({}) == 0 and first_device({"NCCL_TESTS_DEVICE": "3"}) == 3
    assert least_bandwidth({}) is None and least_bandwidth({"NCCL_TESTS_MIN_BW": "1.5"}) == 1.5
    with pytest.raises(UsageError, match="NCCL_TESTS_DEVICE: 'first'"):
        first_device({"NCCL_TESTS_DEVICE": "first"})
    with pytest.raises(UsageError, match="NCCL_TESTS_MIN_BW: 'fast'"):
        least_bandwidth({"NCCL_TESTS_MIN_BW": "fast"})

"""`python -m pynccl.launch`: environment, output, failures, signals, and that no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pynccl import launch as launcher
from pynccl._signals import signal_in_words
from pynccl.abi.driver import Gpu, Gpus

REPO = Path(__file__).resolve().parent.parent


def start(
    tmp_path: Path, script: str, *options: str, arguments: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    file = tmp_path / "script.py"
    file.write_text(f"import os, signal, subprocess, sys, time\nrank = int(os.environ['RANK'])\n{script}\n")
    return subprocess.Popen(
        [sys.executable, "-m", "pynccl.launch", *options, str(file), *arguments],
        env=os.environ | {"PYTHONPATH": str(REPO), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    """Exit status, lines of standard output (in no order between ranks: sorted), standard error."""
    try:
        out, err = process.communicate(timeout=60)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    return process.returncode, sorted(out.splitlines()), err


def run(
    tmp_path: Path, script: str, *options: str, arguments: tuple[str, ...] = ()
) -> tuple[int, list[str], str]:
    return finish(start(tmp_path, script, *options, arguments=arguments))


def wait_until_gone(pids: list[int]) -> list[int]:
    """Those of `pids` that still run 10 s later. A zombie, which nobody may have waited for, does not run."""
    until = time.monotonic() + 10
    while pids and time.monotonic() < until:
        pids = [pid for pid in pids if runs(pid)]
        time.sleep(0.01)  # a poll, bounded by the loop
    return pids


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def first_lines(process: subprocess.Popen[str], n: int) -> list[str]:
    """The first `n` lines: the ranks have come so far."""
    assert process.stdout is not None
    return sorted(process.stdout.readline().strip() for _ in range(n))


HANG = r"os.write(1, b'pid %d\n' % os.getpid()); time.sleep(100)"  # whole, or not at all


def test_each_rank_has_its_place_and_a_common_secret(tmp_path: Path) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    script = (
        f"print(*[os.environ[n] for n in {names}], os.environ['MASTER_PORT'], os.environ['PYNCCL_SECRET'])"
    )
    status, out, _ = run(tmp_path, script, "-n", "3")
    assert status == 0
    common = {line.split()[6:][1] for line in out}, {line.split()[6:][0] for line in out}
    assert [line.split()[:6] for line in out] == [
        [f"[{r}]", str(r), str(r), "3", "3", "127.0.0.1"] for r in range(3)
    ]
    assert len(common[0]) == len(common[1]) == 1
    assert len(common[0].pop()) == 64


def test_ranks_meet(tmp_path: Path) -> None:
    script = """
from pynccl.rendezvous import place_from_environment, share
place = place_from_environment()
print(share(b"payload" if rank == 0 else None, place, timeout=30))
"""
    status, out, err = run(tmp_path, script, "-n", "2", "--output", "raw")
    assert (status, out) == (0, ["b'payload'"] * 2), err


def test_everything_after_the_script_is_the_scripts(tmp_path: Path) -> None:
    arguments = ("-n", "9", "--output", "x", "--", "-m", "a b")
    status, out, _ = run(tmp_path, "print(sys.argv[1:])", "-n", "1", "--", arguments=arguments)
    assert (status, out) == (0, [f"[0] {list(arguments)}"])


def test_a_module_is_found_as_python_finds_it(tmp_path: Path) -> None:
    (tmp_path / "mod.py").write_text("import sys; print(__name__, sys.argv[1:])")
    process = subprocess.run(
        [sys.executable, "-m", "pynccl.launch", "-n", "1", "-m", "mod", "-m", "x"],
        env=os.environ | {"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert process.stdout == "[0] __main__ ['-m', 'x']\n"


def test_ranks_have_no_standard_input_and_a_session_of_their_own(tmp_path: Path) -> None:
    script = "print(repr(sys.stdin.read()), os.getsid(0) == os.getpid())"
    assert run(tmp_path, script, "-n", "1")[1] == ["[0] '' True"]


def test_lines_of_different_ranks_do_not_mix(tmp_path: Path) -> None:
    script = """
for i in range(200):
    os.write(1, b"%d-" % rank); os.write(1, b"%d\\n" % i)
os.write(1, b"no newline")
"""
    status, out, _ = run(tmp_path, script, "-n", "2")
    assert status == 0
    assert out == sorted(
        [f"[{r}] {r}-{i}" for r in (0, 1) for i in range(200)] + [f"[{r}] no newline" for r in (0, 1)]
    )


def test_a_line_without_end_is_broken_and_not_kept(tmp_path: Path) -> None:
    status, out, _ = run(tmp_path, "os.write(1, b'x' * 300_000)", "-n", "1")
    assert status == 0
    assert "".join(line.removeprefix("[0] ") for line in out) == "x" * 300_000
    assert 2 <= len(out) <= 6


def test_output_into_a_folder_has_a_file_a_rank(tmp_path: Path) -> None:
    script = """
while rank == 1 and 'err 0' not in open('a/b/rank-0.log').read():  # its failure ends rank 0
    time.sleep(0.01)
print('out', rank, flush=True)
print('err', rank, file=sys.stderr)
sys.exit(rank)
"""
    status, out, err = run(tmp_path, script, "-n", "2", "--output", str(tmp_path / "a" / "b"))
    assert (status, out) == (1, [])
    files = {file.name: file.read_text() for file in (tmp_path / "a" / "b").iterdir()}
    assert files == {f"rank-{r}.log": f"out {r}\nerr {r}\n" for r in (0, 1)}
    assert "rank-1.log" in err and "  [1] err 1" in err


@pytest.mark.parametrize(
    ("death", "status", "how"),
    [
        ("sys.exit(3)", 3, "exit status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "signal 9 (SIGKILL)"),
        ("os.kill(os.getpid(), 37)", 165, "signal 37 (SIGRTMIN+3)"),
        ("raise ValueError('boom')", 1, "exit status 1"),
    ],
)
def test_a_failing_rank_ends_the_others_and_gives_its_status(
    tmp_path: Path, death: str, status: int, how: str
) -> None:
    script = f"""
if rank == 1:
    print('last words', flush=True)
    {death}
{HANG}
"""
    code, out, err = run(tmp_path, script, "-n", "3")
    assert code == status
    assert f"rank 1 ended with {how}; the other ranks were ended. Its last lines:" in err
    assert "  [1] last words\n" in err
    pids = [int(line.split()[-1]) for line in out if "pid" in line]
    assert wait_until_gone(pids) == []


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, "signal 9 (SIGKILL)"),
        (signal.SIGRTMIN, f"signal {signal.SIGRTMIN:d} (SIGRTMIN)"),
        (
            signal.SIGRTMAX - 1,
            f"signal {signal.SIGRTMAX - 1} (SIGRTMIN+{signal.SIGRTMAX - 1 - signal.SIGRTMIN})",
        ),
        (99, "signal 99"),
    ],
)
def test_every_signal_has_words(number: int, words: str) -> None:
    assert signal_in_words(number) == words


def test_ranks_that_do_not_listen_are_killed_after_the_grace_period(tmp_path: Path) -> None:
    script = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rank == 0:
    time.sleep(0.3); sys.exit(5)
{HANG}
"""
    began = time.monotonic()
    code, out, _ = run(tmp_path, script, "-n", "2", "--grace", "0.5")
    assert code == 5 and time.monotonic() - began < 20
    assert wait_until_gone([int(line.split()[-1]) for line in out]) == []


def test_what_a_rank_started_ends_with_it(tmp_path: Path) -> None:
    script = "print(subprocess.Popen(['sleep', '100']).pid)"
    code, out, _ = run(tmp_path, script, "-n", "2")
    assert code == 0
    assert wait_until_gone([int(line.split()[-1]) for line in out]) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_all_ranks(tmp_path: Path, number: signal.Signals) -> None:
    script = f"""
def stop(number, frame):
    print('got', number, flush=True)
    sys.exit(0)
signal.signal({int(number)}, stop)
{HANG}
"""
    process = start(tmp_path, script, "-n", "2")
    pids = [int(line.split()[-1]) for line in first_lines(process, 2)]
    process.send_signal(number)
    code, out, err = finish(process)
    assert (code, out) == (128 + number, [f"[{r}] got {int(number)}" for r in (0, 1)]), err
    assert wait_until_gone(pids) == []


def test_pressing_ctrl_c_twice_does_not_wait(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        f"signal.signal(signal.SIGINT, lambda *_: print('got', flush=True))\n{HANG}",
        "-n",
        "1",
        "--grace",
        "100",
    )
    first_lines(process, 1)
    process.send_signal(signal.SIGINT)
    assert first_lines(process, 1) == ["[0] got"]
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130


def test_ranks_die_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, HANG, "-n", "3")
    pids = [int(line.split()[-1]) for line in first_lines(process, 3)]
    process.kill()
    finish(process)
    assert wait_until_gone(pids) == []


def test_the_time_limit_ends_the_job(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, HANG, "-n", "2", "--timeout", "2")
    assert code == 124
    assert "time-out after 2 s; still running: ranks 0-1" in err
    assert wait_until_gone([int(line.split()[-1]) for line in out]) == []


def test_the_job_ends_when_nobody_reads_its_output(tmp_path: Path) -> None:
    process = start(tmp_path, "while True: print('line', os.getpid())", "-n", "2", "--grace", "1")
    lines = first_lines(process, 20)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 128 + signal.SIGPIPE
    process.stderr.close()
    assert "Traceback" not in err.replace("BrokenPipe", "")
    assert wait_until_gone([int(line.split()[-1]) for line in lines if line.startswith("[")]) == []


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "pynccl.launch", "-n", "1", "--no-python", "no-such-program"],
        env=os.environ | {"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 127
    assert "cannot run no-such-program: No such file or directory" in process.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x.py"], "-n"),
        (["-n", "0", "x.py"], "'0' is not a number of ranks"),
        (["-n", "2"], "arguments are required: script.py\n"),
        (["-n", "2", "--timeout", "-1", "x.py"], "'-1' is not a time"),
        (["-n", "2", "-m", "--no-python", "x"], "exclude each other"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        launcher.main(arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


# The environment, with no process


def environments(n: int, environ: dict[str, str]) -> tuple[list[dict[str, str]], list[str]]:
    said: list[str] = []
    return launcher.rank_environments(n, environ, said.append), said


def gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        launcher, "gpus", lambda: Gpus(tuple(Gpu(i, "a GPU", 1 << 30) for i in range(count)), "", "12.4")
    )


@pytest.mark.parametrize(
    ("count", "visible", "n", "expected"),
    [
        (0, None, 2, [None, None]),
        (0, "", 2, ["", ""]),
        (4, None, 2, ["0", "1"]),
        (2, "5, 7", 2, ["5", "7"]),
        (2, None, 3, ["0", "1", "0"]),
    ],
)
def test_each_rank_has_a_gpu_where_there_are_any(
    count: int, visible: str | None, n: int, expected: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(count, monkeypatch)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    ranks, said = environments(n, environ)
    assert [rank.get("CUDA_VISIBLE_DEVICES") for rank in ranks] == expected
    assert any("NCCL_MULTI_RANK_GPU_ENABLE=1" in text for text in said) == (0 < count < n)


def test_threads_are_shared_among_the_ranks_unless_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(0, monkeypatch)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    ranks, said = environments(3, {})
    assert {(rank["OMP_NUM_THREADS"], rank["OPENBLAS_NUM_THREADS"]) for rank in ranks} == {("2", "2")}
    assert len(said) == 1 and "OMP_NUM_THREADS=2" in said[0]
    assert environments(3, {"OMP_NUM_THREADS": "5"})[0][0]["OMP_NUM_THREADS"] == "5"
    assert environments(3, {"OPENBLAS_NUM_THREADS": "5"})[0][0]["OPENBLAS_NUM_THREADS"] == "5"
    assert "OMP_NUM_THREADS" not in environments(1, {})[0][0]


def test_an_outer_jobs_meeting_place_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(0, monkeypatch)
    outer = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PYNCCL_PORT": "1",
        "PYNCCL_SECRET": "old",
        "OTHER": "kept",
    }
    (inner,), _ = environments(1, outer)
    assert "TORCHELASTIC_USE_AGENT_STORE" not in inner and "PYNCCL_PORT" not in inner
    assert inner["PYNCCL_SECRET"] != "old" and inner["OTHER"] == "kept"

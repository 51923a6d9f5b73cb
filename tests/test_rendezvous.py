"""How ranks find their place and each other: launchers, TCP, a shared folder, strangers, late ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pynccl import environment
from pynccl.rendezvous import (
    LAUNCHERS,
    Place,
    RendezvousError,
    RendezvousTimeoutError,
    SecretError,
    find_place,
    find_secret,
    name_ranks,
    place_from_environment,
    share,
    tcp,
)
from pynccl.rendezvous.places import first_host
from pynccl.testing import run_ranks

PAYLOAD = bytes(range(256)) * 2  # every byte value, so that neither framing nor text conversion can hide
SECRET = "a secret of this test"


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on, with the next few free as far as one look can tell."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.bind((host, 0))
        port: int = sock.getsockname()[1]
        return port if port < 65000 else free_port(host)


def place(rank: int, size: int, url: str) -> Place:
    return Place(rank, size, rank, size, url)


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns or raises, as a value."""
    try:
        return call()
    except Exception as error:
        return error


def meet(
    url: str,
    size: int,
    environ: dict[str, str] | None = None,
    *,
    timeout: float = 20,
    absent: tuple[int, ...] = (),
) -> list[Any]:
    """`share` in `size` processes; each rank's payload, error, or None for one that is absent."""

    def rank_main(rank: int, n: int, _: object) -> Any:
        if rank in absent:
            return None
        os.environ.update(environ or {})
        payload = PAYLOAD if rank == 0 else None
        return outcome(lambda: share(payload, place(rank, n, url), timeout=timeout))

    return run_ranks(size, rank_main, comm=False, timeout=60)


def in_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """Start a call in a thread; the result is a function that waits for its outcome."""
    box: list[Any] = []
    thread = threading.Thread(target=lambda: box.append(outcome(call)), daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(30)
        assert box, "still running after 30 s"
        return box[0]

    return result


def connect(port: int) -> socket.socket:
    """A connection to a server of this machine that is about to listen."""
    for _ in range(3000):
        sock = socket.socket()
        sock.settimeout(20)
        try:
            sock.connect(("127.0.0.1", port))
        except ConnectionRefusedError:
            sock.close()
            time.sleep(0.005)  # a poll, bounded by the loop
        else:
            return sock
    raise AssertionError(f"nobody listens on port {port}")


def is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return outcome(lambda: sock.bind(("127.0.0.1", port))) is None


@contextlib.contextmanager
def listening(port: int = 0) -> Iterator[int]:
    """Somebody else's server, which accepts and says nothing."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port))
        sock.listen()
        yield sock.getsockname()[1]


# The place, from the environment

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
MASTER = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-9078@1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, Place(0, 1, 0, 1, ""), id="no launcher"),
        pytest.param(
            TORCHRUN | MASTER, Place(5, 8, 1, 4, "tcp://node7:29500?ports=8"), id="torchrun, two machines"
        ),
        pytest.param(
            TORCHRUN | MASTER | {"LOCAL_WORLD_SIZE": "8"},
            Place(5, 8, 1, 8, "tcp://127.0.0.1:29500?ports=8"),
            id="one machine needs no address",
        ),
        pytest.param(
            TORCHRUN
            | MASTER
            | {
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RUN_ID": "r",
                "TORCHELASTIC_RESTART_COUNT": "2",
            },
            Place(5, 8, 1, 4, "tcp://node7:29501?ports=8&job=r%2F2"),
            id="torchrun's agent has MASTER_PORT",
        ),
        pytest.param(
            TORCHRUN | MASTER | {"PYNCCL_PORT": "4000"},
            Place(5, 8, 1, 4, "tcp://node7:4000"),
            id="PYNCCL_PORT is exact",
        ),
        pytest.param(
            TORCHRUN | MASTER | {"MASTER_ADDR": "fe80::1"},
            Place(5, 8, 1, 4, "tcp://[fe80::1]:29500?ports=8"),
            id="IPv6",
        ),
        pytest.param(
            TORCHRUN | MASTER | {"MASTER_PORT": "65533"},
            Place(5, 8, 1, 4, "tcp://node7:65533?ports=3"),
            id="no port above 65535",
        ),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2"} | MASTER,
            Place(1, 2, 1, 2, "tcp://node7:29500?ports=8"),
            id="by hand",
        ),
        pytest.param(
            SLURM | MASTER | {"SLURM_STEP_NUM_TASKS": "8"},
            Place(3, 8, 1, 8, "tcp://node7:29500?ports=8&job=77%2F0"),
            id="srun: the step's size, not the job's",
        ),
        pytest.param(
            TORCHRUN | MASTER | SLURM | OPEN_MPI,
            Place(5, 8, 1, 4, "tcp://node7:29500?ports=8"),
            id="the innermost launcher counts",
        ),
    ],
)
def test_place_from_environment(environ: dict[str, str], expected: Place) -> None:
    assert place_from_environment(environ) == expected


@pytest.mark.parametrize(
    ("environ", "host"),
    [
        pytest.param(OPEN_MPI, "127.0.0.1", id="Open MPI"),
        pytest.param(MPICH, "127.0.0.1", id="MPICH"),
        pytest.param(SLURM | {"SLURM_NNODES": "1"}, "127.0.0.1", id="Slurm, one machine"),
        pytest.param(SLURM | {"SLURM_JOB_NODELIST": "n[08-11]"}, "n08", id="Slurm, four machines"),
    ],
)
def test_launchers_that_give_no_port_get_one_that_belongs_to_the_job(
    environ: dict[str, str], host: str
) -> None:
    found = place_from_environment(environ)
    address = tcp.parse(found.url)
    assert address.host == host
    assert len(address.ports) == 8 and 20000 <= address.ports[0] < 30000
    assert place_from_environment(environ) == found
    others = {
        name: value + "9" for name, value in environ.items() if name in ("PMIX_NAMESPACE", "SLURM_JOB_ID")
    }
    if others:
        assert place_from_environment(environ | others).url != found.url


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "1"}, ["RANK", "WORLD_SIZE"]),
        (TORCHRUN, ["MASTER_ADDR", "not set"]),
        (TORCHRUN | {"MASTER_ADDR": "a"}, ["MASTER_PORT", "not set"]),
        (TORCHRUN | MASTER | {"RANK": "one"}, ["RANK='one'", "whole number"]),
        (TORCHRUN | MASTER | {"RANK": "8"}, ["rank=8", "0 to 7"]),
        (TORCHRUN | MASTER | {"WORLD_SIZE": "0", "RANK": "0"}, ["size=0"]),
        (TORCHRUN | MASTER | {"LOCAL_RANK": "4"}, ["local_rank=4", "0 to 3"]),
        (TORCHRUN | MASTER | {"MASTER_PORT": "65536"}, ["MASTER_PORT=65536", "65535"]),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, ["MASTER_ADDR"]),
        (SLURM | {"SLURM_JOB_NODELIST": "[["}, ["[[", "MASTER_ADDR"]),
    ],
)
def test_a_wrong_environment_names_the_variable(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(RendezvousError) as caught:
        place_from_environment(environ)
    assert [word for word in words if word not in str(caught.value)] == []


def test_find_place_takes_what_is_given_and_the_rest_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert find_place("tcp://h:1", rank=1, size=2) == Place(1, 2, 1, 2, "tcp://h:1")
    assert find_place() == Place(0, 1, 0, 1, "")
    with pytest.raises(RendezvousError, match="give all three"):
        find_place("tcp://h:1")
    for name, value in (TORCHRUN | MASTER).items():
        monkeypatch.setenv(name, value)
    assert find_place("env") == find_place("env://") == place_from_environment()
    assert find_place("file:///x") == Place(5, 8, 1, 4, "file:///x")
    assert find_place(rank=5, size=8) == place_from_environment()
    with pytest.raises(RendezvousError, match="rank 5 of 8"):
        find_place(rank=4)


def test_every_launchers_variables_are_in_the_table_of_environment_variables() -> None:
    listed = {variable.name for variable in environment.VARIABLES}
    read = {
        name
        for launcher in LAUNCHERS
        for field in dataclasses.fields(launcher)
        if isinstance(names := getattr(launcher, field.name), tuple)
        for name in names
    }
    assert sorted(read - listed) == []


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("n[08-11,20],g1", "n08"), ("r[1-2]n[3,4]-ib", "r1n3-ib"), ("n[7]", "n7")],
)
def test_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_ranks_are_named_shortly() -> None:
    assert name_ranks([7]) == "rank 7"
    assert name_ranks([3, 1, 2, 7]) == "ranks 1-3, 7"
    assert name_ranks(range(0, 80, 2)).endswith("30, and 24 more")


# The secret


def test_the_secret_comes_from_the_variable_or_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("in the file\n")
    file.chmod(0o600)
    assert find_secret({}) is None
    assert find_secret({"PYNCCL_SECRET_FILE": str(file)}) == b"in the file"
    assert find_secret({"PYNCCL_SECRET": "text", "PYNCCL_SECRET_FILE": str(file)}) == b"text"


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        ("x", 0o640, ["0640", "chmod 600"]),
        ("x", 0o602, ["0602", "chmod 600"]),
        ("\n", 0o600, ["empty"]),
        ("x" * 5000, 0o600, ["4096"]),
    ],
)
def test_a_secret_file_that_keeps_no_secret_is_refused(
    tmp_path: Path, content: str, mode: int, words: list[str]
) -> None:
    file = tmp_path / "secret"
    file.write_text(content)
    file.chmod(mode)
    with pytest.raises(SecretError) as caught:
        find_secret({"PYNCCL_SECRET_FILE": str(file)})
    assert [word for word in [str(file), *words] if word not in str(caught.value)] == []


def test_a_secret_file_that_is_no_file_is_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    for path in (fifo, tmp_path, tmp_path / "absent"):
        with pytest.raises(SecretError, match="PYNCCL_SECRET_FILE"):
            find_secret({"PYNCCL_SECRET_FILE": str(path)})
    with pytest.raises(SecretError, match="empty"):
        find_secret({"PYNCCL_SECRET": ""})


@pytest.mark.parametrize("rank", [0, 1])
def test_without_a_secret_only_loopback_is_used(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SecretError) as caught:
        share(PAYLOAD, place(rank, 2, f"tcp://0.0.0.0:{free_port()}"), timeout=5)
    assert "PYNCCL_SECRET" in str(caught.value) and "PYNCCL_INSECURE=1" in str(caught.value)
    monkeypatch.setenv("PYNCCL_INSECURE", "yes")
    with pytest.raises(SecretError, match="PYNCCL_INSECURE='yes'"):
        share(PAYLOAD, place(rank, 2, f"tcp://0.0.0.0:{free_port()}"), timeout=5)


@pytest.mark.parametrize("permission", [{"PYNCCL_SECRET": SECRET}, {"PYNCCL_INSECURE": "1"}])
def test_other_addresses_are_used_with_a_secret_or_by_permission(permission: dict[str, str]) -> None:
    assert meet(f"tcp://0.0.0.0:{free_port()}", 2, permission) == [PAYLOAD] * 2


# TCP


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
@pytest.mark.parametrize("secrets", [{}, {"PYNCCL_SECRET": SECRET}])
def test_the_payload_reaches_all_ranks(host: str, secrets: dict[str, str]) -> None:
    assert meet(f"tcp://{host}:{free_port()}", 3, secrets) == [PAYLOAD] * 3


def test_a_job_of_one_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a socket")

    monkeypatch.setattr(socket, "socket", forbidden)
    assert share(b"", Place(0, 1, 0, 1, ""), timeout=1) == b""


def test_wrong_arguments_are_named() -> None:
    two = place(0, 2, "tcp://127.0.0.1:1")
    with pytest.raises(TypeError, match="NoneType"):
        share(None, two, timeout=1)
    with pytest.raises(ValueError, match="timeout=0"):
        share(b"", two, timeout=0)
    with pytest.raises(ValueError, match="at most 1048576"):
        share(bytes((1 << 20) + 1), two, timeout=1)
    with pytest.raises(ValueError, match="rank=2"):
        place(2, 2, "")
    for url in (
        "http://h:1",
        "tcp://h",
        "tcp://:1",
        "tcp://h:0",
        "tcp://h:70000",
        "tcp://h:1?port=2",
        "file:x",
        "",
    ):
        with pytest.raises(RendezvousError, match="expected tcp://host:port|absolute path"):
            share(b"", place(0, 2, url), timeout=1)
    for url in (
        "tcp://h:1?ports=x",
        "tcp://h:65535?ports=2",
        "tcp://h:1?ports=0",
        "tcp://u@h:1",
        "file:///no/such/x",
    ):
        with pytest.raises(RendezvousError, match=r"tcp://|no folder"):
            share(b"", place(0, 2, url), timeout=1)


def test_the_longest_payload_passes_whole() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    payload = os.urandom(1 << 20)
    rank_1 = in_thread(lambda: share(None, place(1, 2, url), timeout=20))
    assert share(payload, place(0, 2, url), timeout=20) == payload
    assert rank_1() == payload


def test_missing_ranks_are_named_on_every_rank_and_nothing_is_left() -> None:
    port = free_port()
    results = meet(f"tcp://127.0.0.1:{port}", 4, timeout=1.5, absent=(1, 3))
    for rank in (0, 2):
        assert isinstance(results[rank], RendezvousTimeoutError), results[rank]
        assert isinstance(results[rank], TimeoutError)
        assert "ranks 1, 3 of 4" in str(results[rank])
        assert results[rank].missing == (1, 3)
    assert is_free(port)


def test_a_rank_without_rank_0_says_where_it_looked() -> None:
    port = free_port()
    results = meet(f"tcp://127.0.0.1:{port}", 2, timeout=0.3, absent=(0,))
    assert isinstance(results[1], RendezvousTimeoutError)
    assert f"127.0.0.1:{port}" in str(results[1]) and "rank 0 did not answer" in str(results[1])
    assert results[1].missing == (0,)


def test_a_failed_meeting_leaves_no_thread_descriptor_or_port() -> None:
    port = free_port()
    url = f"tcp://127.0.0.1:{port}"
    descriptors, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    serving = in_thread(lambda: share(PAYLOAD, place(0, 2, url), timeout=0.7))
    stranger = connect(port)
    assert isinstance(serving(), RendezvousTimeoutError)
    assert is_free(port)
    stranger.close()
    assert isinstance(outcome(lambda: share(None, place(1, 2, url), timeout=0.2)), RendezvousTimeoutError)
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)
    assert threading.active_count() == threads


def test_strangers_neither_stall_nor_stop_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYNCCL_SECRET", SECRET)
    port = free_port()
    url = f"tcp://127.0.0.1:{port}"
    serving = in_thread(lambda: share(PAYLOAD, place(0, 2, url), timeout=30))
    with contextlib.ExitStack() as strangers:
        says = [
            b"",
            b"\0",
            b"GET / HTTP/1.0\r\n\r\n",
            struct.pack("!i", -1) + b"\xff" * 8,
            b"\x7f\xff\xff\xff",
            b"\0" * 99,
        ]
        for word in says * 3:
            stranger = strangers.enter_context(connect(port))
            stranger.sendall(word)
        began = time.monotonic()
        assert share(None, place(1, 2, url), timeout=30) == PAYLOAD
        assert serving() == PAYLOAD
        assert time.monotonic() - began < 4  # less than the time that a silent stranger is given


def test_more_silent_strangers_than_are_kept_do_not_stall_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "_STRANGERS", 4)
    port = free_port()
    url = f"tcp://127.0.0.1:{port}"
    serving = in_thread(lambda: share(PAYLOAD, place(0, 2, url), timeout=30))
    with contextlib.ExitStack() as strangers:
        for _ in range(12):
            strangers.enter_context(connect(port))
        assert share(None, place(1, 2, url), timeout=30) == PAYLOAD
        assert serving() == PAYLOAD


def test_a_hostile_length_is_refused_at_once() -> None:
    port = free_port()
    serving = in_thread(lambda: share(PAYLOAD, place(0, 2, f"tcp://127.0.0.1:{port}"), timeout=1.5))
    with connect(port) as stranger:
        stranger.sendall(struct.pack("!i", 0x7FFFFFFF))
        while chunk := stranger.recv(4096):  # its challenge, then the end: not a wait for 2 GiB
            assert len(chunk) < 4096
    assert "no handshake" in str(serving())


def test_a_peer_with_another_secret_is_refused_and_reported() -> None:
    port = free_port()

    def rank_main(rank: int, n: int, _: object) -> Any:
        os.environ["PYNCCL_SECRET"] = f"secret {rank}"
        url = f"tcp://127.0.0.1:{port}"
        return outcome(lambda: share(PAYLOAD if rank == 0 else None, place(rank, n, url), timeout=1))

    rank_0, rank_1 = run_ranks(2, rank_main, comm=False)
    assert isinstance(rank_0, RendezvousTimeoutError) and isinstance(rank_1, RendezvousTimeoutError)
    assert "127.0.0.1: does not know this job's secret" in str(rank_0)
    assert "does not know this job's secret" in str(rank_1)


def test_a_client_is_not_held_by_a_server_that_drips(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    done = threading.Event()

    def drip() -> None:
        with socket.create_server(("127.0.0.1", port)) as server:
            server.settimeout(20)
            peer, _ = server.accept()
            with peer, contextlib.suppress(OSError):
                while not done.wait(0.05):
                    peer.sendall(b"\0")

    dripping = in_thread(drip)
    began = time.monotonic()
    result = outcome(lambda: share(None, place(1, 2, f"tcp://127.0.0.1:{port}"), timeout=1))
    done.set()
    assert isinstance(result, RendezvousTimeoutError)
    assert time.monotonic() - began < 5
    assert dripping() is None


def test_the_next_port_is_taken_when_the_first_is_somebody_elses() -> None:
    with listening() as port:
        assert meet(f"tcp://127.0.0.1:{port}?ports=8", 2) == [PAYLOAD] * 2


def test_a_rank_that_waited_long_still_gives_a_silent_port_little_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried, connect_to = threading.Semaphore(0), tcp._connect

    def counted(*arguments: Any) -> Any:
        try:
            return connect_to(*arguments)
        finally:
            tried.release()

    monkeypatch.setattr(tcp, "_connect", counted)
    port = free_port()
    url = f"tcp://127.0.0.1:{port}?ports=2"
    rank_1 = in_thread(lambda: share(None, place(1, 2, url), timeout=60))
    for _ in range(24):
        assert tried.acquire(timeout=30)
    with listening(port):
        began = time.monotonic()
        assert share(PAYLOAD, place(0, 2, url), timeout=60) == PAYLOAD
        assert rank_1() == PAYLOAD
    assert time.monotonic() - began < 25  # of the 60 s that it would wait at most


def test_one_exact_port_that_is_taken_is_an_error() -> None:
    with (
        listening() as port,
        pytest.raises(RendezvousError, match=rf"{port}: Address already in use.*PYNCCL_PORT"),
    ):
        share(PAYLOAD, place(0, 2, f"tcp://127.0.0.1:{port}"), timeout=5)


@pytest.mark.parametrize("apart_by", ["job", "secret"])
def test_two_jobs_at_one_address_do_not_mix(apart_by: str) -> None:
    port = free_port()

    def rank_main(rank: int, _: int, __: object) -> Any:
        job, rank = divmod(rank, 2)
        url = f"tcp://127.0.0.1:{port}?ports=8"
        if apart_by == "job":
            url += f"&job=j{job}"
        else:
            os.environ["PYNCCL_SECRET"] = f"secret {job}"
        return share(b"%d" % job if rank == 0 else None, place(rank, 2, url), timeout=30)

    assert run_ranks(4, rank_main, comm=False) == [b"0", b"0", b"1", b"1"]


def test_meetings_of_one_job_follow_each_other() -> None:
    port = free_port()

    def rank_main(rank: int, n: int, _: object) -> list[bytes]:
        here = place(rank, n, f"tcp://127.0.0.1:{port}?ports=2")
        return [share(b"%d" % i if rank == 0 else None, here, timeout=30) for i in range(5)]

    assert run_ranks(3, rank_main, comm=False) == [[b"0", b"1", b"2", b"3", b"4"]] * 3


def test_a_rank_that_comes_late_for_one_meeting_is_not_taken_into_the_next() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    first = outcome(lambda: share(PAYLOAD, place(0, 2, url), timeout=0.1))
    assert isinstance(first, RendezvousTimeoutError)
    second = in_thread(lambda: share(PAYLOAD, place(0, 2, url), timeout=30))
    with pytest.raises(RendezvousError, match="rank 1 comes late, in call 1 of init; rank 0 is in call 2"):
        share(None, place(1, 2, url), timeout=30)
    assert share(None, place(1, 2, url), timeout=30) == PAYLOAD
    assert second() == PAYLOAD


def test_a_rank_that_is_ahead_waits_for_rank_0() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    assert isinstance(outcome(lambda: share(None, place(1, 2, url), timeout=0.1)), RendezvousTimeoutError)
    ahead = in_thread(lambda: share(None, place(1, 2, url), timeout=30))
    assert isinstance(outcome(lambda: share(PAYLOAD, place(0, 2, url), timeout=0.5)), RendezvousTimeoutError)
    assert share(PAYLOAD, place(0, 2, url), timeout=30) == PAYLOAD
    assert ahead() == PAYLOAD


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_two_processes_with_one_rank_are_told(scheme: str, tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}"

    def rank_main(rank: int, n: int, _: object) -> Any:
        return outcome(lambda: share(PAYLOAD, place(min(rank, 1), n, url), timeout=1 if rank == 0 else 30))

    results = run_ranks(3, rank_main, comm=False)
    assert "rank 2 of 3 did not come" in str(results[0])
    assert any("two processes have this rank" in str(result) for result in results[1:])


def test_ranks_that_disagree_on_the_size_are_told() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    rank_0 = in_thread(lambda: share(PAYLOAD, place(0, 2, url), timeout=1))
    with pytest.raises(RendezvousError, match="rank 1 says that the job has 4 ranks, rank 0 says 2"):
        share(None, place(1, 4, url), timeout=10)
    assert "rank 0 says 2" in str(rank_0())


def test_a_rank_killed_while_it_waits_is_not_counted() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"

    def killed() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0.5)  # ends this process while it is in share
        share(None, place(1, 3, url), timeout=30)

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    with pytest.raises(
        RendezvousTimeoutError, match="rank 2 of 3 did not come and rank 1 of 3 came and went"
    ) as caught:
        share(PAYLOAD, place(0, 3, url), timeout=1)
    process.join()
    assert process.exitcode == -signal.SIGALRM
    assert caught.value.missing == (1, 2)


def test_a_host_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYNCCL_SECRET", SECRET)
    for rank in (0, 1):
        with pytest.raises(RendezvousError, match=r"no address for host 'no-such-host\.invalid'"):
            share(PAYLOAD, place(rank, 2, "tcp://no-such-host.invalid:29500"), timeout=0.2)


# A shared folder


@pytest.mark.parametrize("secrets", [{}, {"PYNCCL_SECRET": SECRET}])
@pytest.mark.parametrize("name", ["", "meeting"])
def test_a_folder_brings_ranks_together_and_is_clean_afterwards(
    tmp_path: Path, name: str, secrets: dict[str, str]
) -> None:
    assert meet(f"file://{tmp_path / name}", 3, secrets) == [PAYLOAD] * 3
    assert list(tmp_path.iterdir()) == []


def test_missing_ranks_are_named_over_a_folder_and_no_file_is_left(tmp_path: Path) -> None:
    results = meet(f"file://{tmp_path}", 4, timeout=1, absent=(1, 3))
    for rank in (0, 2):
        assert isinstance(results[rank], RendezvousTimeoutError)
        assert "ranks 1, 3 of 4" in str(results[rank])
    results = meet(f"file://{tmp_path}/other", 2, timeout=0.3, absent=(0,))
    assert "rank 0 did not answer" in str(results[1])
    assert list(tmp_path.iterdir()) == []


def test_files_of_an_earlier_run_mislead_nobody(tmp_path: Path) -> None:
    """Every file that a killed run of another size, with another payload, can leave is there beforehand."""
    url = f"file://{tmp_path}/m"

    def killed(rank: int, n: int, _: object) -> None:
        real = Path.unlink
        Path.unlink = lambda *a, **k: None  # type: ignore[method-assign]  # as if there were no time to tidy up
        share(b"old" if rank == 0 else None, place(rank, n, url), timeout=0.7)
        Path.unlink = real  # type: ignore[method-assign]

    with pytest.raises(Exception, match="did not take the payload"):
        run_ranks(3, killed, comm=False)
    assert len(list(tmp_path.glob("m.1.*"))) == 3
    assert meet(url, 2) == [PAYLOAD] * 2


def test_files_are_private_and_those_of_another_secret_are_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/m"

    def rank_main(rank: int, n: int, _: object) -> Any:
        os.environ["PYNCCL_SECRET"] = f"secret {rank}"
        result = outcome(lambda: share(PAYLOAD if rank == 0 else None, place(rank, n, url), timeout=0.7))
        return result, [oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()]

    (rank_0, _), (rank_1, modes) = run_ranks(2, rank_main, comm=False)
    assert "rank 1 of 2 did not come" in str(rank_0)
    assert "not written with this job's secret" in str(rank_1)
    assert set(modes) <= {"0o600"}


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.1.0").mkdir()
    with pytest.raises(RendezvousError, match=r"cannot write .*m\.1\.0"):
        share(PAYLOAD, place(0, 2, f"file://{tmp_path}/m"), timeout=1)

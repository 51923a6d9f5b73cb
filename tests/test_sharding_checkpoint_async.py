"""A save that goes on beside the training: what it saves, how it fails, and ranks that die meanwhile."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_ranks import (  # type: ignore[import-not-found]
    assert_same,
    full_disk,
    joined,
    make,
    reference,
    state_of,
    train,
)
from sharding_ranks import opened  # type: ignore[import-not-found]

from pynccl import NcclError
from pynccl.testing import run_ranks
from sharding import alive as alive_module
from sharding import saving as saving_module
from sharding import store as store_module
from sharding.checkpoint import CheckpointError, load, save, save_async, saved_steps


def held(function: Callable[..., Any], gate: threading.Event) -> Callable[..., Any]:
    """`function`, once the gate is open."""

    def waiting(*args: Any, **keywords: Any) -> Any:
        assert gate.wait(60)
        return function(*args, **keywords)

    return waiting


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_what_an_asynchronous_save_saves_is_what_was_there_at_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    def rank(comm: Any) -> Any:
        model, opt = make(comm, strategy=strategy)
        train(model, opt, 3)
        gate = threading.Event()
        monkeypatch.setattr(saving_module, "write_tensors", held(saving_module.write_tensors, gate))
        user = {"list": [1]}
        handle = save_async(tmp_path, model, opt, user=user)
        user["list"].append(2)
        assert not handle.done() and saved_steps(tmp_path) == []
        with pytest.raises(TimeoutError, match="still runs"):
            handle.wait(0.001)
        train(model, opt, 2)  # while it is not even written
        gate.set()
        assert handle.wait() == tmp_path / "step-00000003" and handle.done() and handle.step == 3
        loaded = load(tmp_path, model, opt)
        assert loaded.user == {"list": [1]}
        return state_of(model, opt)

    assert_same(joined(run_ranks(2, rank, library="host")), reference(3))


def test_one_asynchronous_save_is_in_flight_and_the_next_waits_for_it(tmp_path: Path) -> None:
    def rank(comm: Any) -> list[bool]:
        model, _ = make(comm)
        handles = [save_async(tmp_path, model, step=step, keep_last=2) for step in range(4)]
        done = [handle.done() for handle in handles[:3]]
        save(tmp_path, model, step=9)
        return [*done, handles[3].done()]

    assert run_ranks(3, rank, library="host") == [[True] * 4] * 3
    assert saved_steps(tmp_path) == [2, 3, 9]


def test_an_error_of_an_asynchronous_save_shows_in_wait_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(comm: Any) -> None:
        model, opt = make(comm)
        if comm.rank == 1:
            monkeypatch.setattr(saving_module, "write_tensors", full_disk)
        handle = save_async(tmp_path, model, opt)
        for _ in range(2):
            with pytest.raises((OSError, CheckpointError), match="no space left"):
                handle.wait()
        monkeypatch.undo()
        comm.all_gather_object(None)
        save(tmp_path, model, opt)  # it has been seen

    run_ranks(3, rank, library="host")
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000000"]


def test_an_error_of_an_asynchronous_save_that_nobody_saw_shows_in_the_next_save_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(comm: Any) -> None:
        model, opt = make(comm)
        if comm.rank == 0:
            monkeypatch.setattr(store_module.Place, "publish", full_disk)
        save_async(tmp_path, model, opt)
        with pytest.raises(CheckpointError, match="save of step 0 failed.*no space left"):
            save(tmp_path, model, opt)
        monkeypatch.undo()
        save_async(tmp_path, model, opt).wait()

    run_ranks(2, rank, library="host")
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000000"]


def test_a_rank_whose_file_never_comes_is_named_when_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(comm: Any) -> None:
        model, opt = make(comm)
        gate = threading.Event()
        if comm.rank == 2:
            monkeypatch.setattr(saving_module, "write_tensors", held(saving_module.write_tensors, gate))
        handle = save_async(tmp_path, model, opt, timeout=0.2)
        if comm.rank != 2:
            with pytest.raises(CheckpointError, match="rank 2 had not written .* after 0.2 s"):
                handle.wait()
        comm.all_gather_object(None)
        gate.set()
        with pytest.raises(CheckpointError, match="rank 2 had not written"):
            handle.wait()

    run_ranks(3, rank, library="host")
    assert saved_steps(tmp_path) == []


@pytest.mark.parametrize("dead", [0, 1])
@pytest.mark.parametrize("abandoned", [False, True])
def test_a_rank_that_died_is_named_long_before_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: int, abandoned: bool
) -> None:
    monkeypatch.setattr(alive_module, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(store_module, "SILENT_SECONDS", 1000.0 if abandoned else 1.5)
    monkeypatch.setattr(store_module, "SILENT_SECONDS_ABANDONED", 1.5 if abandoned else 1000.0)

    def rank(comm: Any) -> str:
        model, opt = make(comm)
        if comm.rank == dead:  # its thread does nothing, as that of a process which was killed
            monkeypatch.setattr(saving_module.SaveHandle, "_write", lambda *_: None)
        handle = save_async(tmp_path, model, opt, timeout=1000)
        if abandoned:
            with pytest.raises((ZeroDivisionError, NcclError)), model.microbatch():
                if comm.rank == dead:
                    raise ZeroDivisionError
                for _ in opened(model):
                    pass
        if comm.rank == dead:
            comm.all_gather_object(None)
            return f"rank {dead} has given no sign of life for 1.5 s"
        with pytest.raises(CheckpointError) as caught:
            handle.wait()
        comm.all_gather_object(None)
        return str(caught.value)

    for told in run_ranks(3, rank, library="host"):
        assert told.startswith(f"rank {dead} has given no sign of life for 1.5 s")
    assert saved_steps(tmp_path) == []


def test_a_rank_that_is_slow_but_alive_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alive_module, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(store_module, "SILENT_SECONDS", 1.5)

    def rank(comm: Any) -> None:
        model, opt = make(comm)
        gate, looks = threading.Event(), [0]
        if comm.rank == 1:
            monkeypatch.setattr(saving_module, "write_tensors", held(saving_module.write_tensors, gate))
        else:
            original = store_module.FileMeeting._look

            def counting(meeting: Any, ranks: set[int]) -> None:
                original(meeting, ranks)
                looks[0] += 1
                if looks[0] > 1 and time.monotonic() - began > 2.5:
                    gate.set()

            monkeypatch.setattr(store_module.FileMeeting, "_look", counting)
        began = time.monotonic()
        handle = save_async(tmp_path, model, opt)
        if comm.rank == 0:
            assert gate.wait(60)  # it has looked for longer than a silent rank would have had
        comm.all_gather_object(None)
        gate.set()
        handle.wait()

    run_ranks(2, rank, library="host")
    assert saved_steps(tmp_path) == [0]


def test_a_watch_that_was_stopped_itself_takes_nobody_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(alive_module.time, "monotonic", lambda: now[0])
    path = tmp_path / "sign"
    watch = alive_module.Watch(path)

    def after(seconds: float) -> float:
        now[0] += seconds
        return watch.silence()

    assert [after(0.5), after(0.5)] == [0.5, 1.0]  # it is not there yet
    path.touch()
    assert [after(0.5), after(0.5), after(0.5)] == [0.0, 0.5, 1.0]
    assert after(3600) == 3.0
    os.utime(path, ns=(1, 1))  # another clock
    assert after(3600) == 0.0


def test_a_process_whose_peer_was_killed_while_saving_ends_in_bounded_time(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING_UNTIL_A_RANK_DIES)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(port), "PYNCCL_LIBRARY": "host"}
    jobs = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "c")],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert jobs[1].wait(60) == -signal.SIGKILL
        _, said = jobs[0].communicate(timeout=30)  # the interpreter waits for the save's thread
        assert jobs[0].returncode == 1 and "RemoteError" in said
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert saved_steps(tmp_path / "c") == []


TRAINING_UNTIL_A_RANK_DIES = """
import os, sys, threading
import numpy as np
import pynccl
from sharding import AdamW, fully_shard, save_async, saving

comm = pynccl.init()
model = fully_shard({"w": np.ones(8)}, comm)
opt = AdamW(model)
if comm.rank == 1:
    saving.write_tensors = lambda *_: os.kill(os.getpid(), 9)
save_async(sys.argv[1], model, opt)
while True:
    with model.microbatch():
        for unit in model:
            with unit.forward():
                pass
        for unit in reversed(model):
            with unit.backward():
                pass
    opt.step()
    model.zero_grad()
"""


@pytest.mark.parametrize("victim, function", [(0, "write_tensors"), (1, "write_tensors"), (0, "publish")])
def test_an_asynchronous_save_that_failed_leaves_no_large_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int, function: str
) -> None:
    def rank(comm: Any) -> None:
        model, opt = make(comm)
        if comm.rank == victim:
            if function == "write_tensors":
                write = saving_module.write_tensors
                monkeypatch.setattr(saving_module, function, lambda *a: (write(*a), full_disk())[1])
            else:
                monkeypatch.setattr(store_module.Place, function, full_disk)
        handle = save_async(tmp_path, model, opt, timeout=60)
        with pytest.raises((OSError, CheckpointError), match="no space left"):
            handle.wait()

    run_ranks(3, rank, library="host")
    assert not list(tmp_path.glob("**/*.safetensors"))


def test_a_load_waits_for_the_asynchronous_save_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(comm: Any) -> tuple[int, int]:
        model, opt = make(comm)
        save(tmp_path, model, opt, step=1)
        gate = threading.Event()
        monkeypatch.setattr(saving_module, "write_tensors", held(saving_module.write_tensors, gate))
        save_async(tmp_path, model, opt, step=2)
        join = threading.Thread.join

        def opening(thread: threading.Thread, timeout: float | None = None) -> None:
            gate.set()
            join(thread, timeout)

        monkeypatch.setattr(threading.Thread, "join", opening)
        other, _ = make(comm)
        return load(tmp_path, other).step, load(tmp_path, model).step

    assert run_ranks(2, rank, library="host") == [(2, 2)] * 2


def test_a_load_tells_of_an_asynchronous_save_that_failed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(comm: Any) -> int:
        model, opt = make(comm)
        save(tmp_path, model, opt, step=1)
        if comm.rank == 0:
            monkeypatch.setattr(store_module.Place, "publish", full_disk)
        save_async(tmp_path, model, opt, step=2)
        with pytest.raises(CheckpointError, match="step 2 failed: .*no space left.*nothing was loaded"):
            load(tmp_path, model, opt)
        return load(tmp_path, model, opt).step

    assert run_ranks(2, rank, library="host") == [1, 1]

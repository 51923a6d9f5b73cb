"""The quick path of the collectives: the same results and the same errors as the general one."""

from __future__ import annotations

import ctypes
import gc
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401  (bfloat16 by name)
import numpy as np
import pytest

import pynccl
from pynccl import quick
from pynccl.abi.enums import Result
from pynccl.abi.types import pyncclArrayCall_t, pyncclCall_t
from pynccl.operations import OPERATIONS
from pynccl.quick import NOT_TAKEN
from pynccl.testing import run_ranks
from pynccl.threadstate import current

Comm = Any
Make = Callable[[Comm], tuple[tuple[Any, ...], dict[str, Any]]]


def numbers(comm: Comm, n: int, dtype: str = "f4") -> np.ndarray:
    return (np.arange(n) % 50 + comm.rank).astype(dtype)


def read_only(n: int) -> np.ndarray:
    x = np.zeros(n, "f4")
    x.flags.writeable = False
    return x


def call(x: Any, **named: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (x,), named


def halves(comm: Comm, *, x_blocks: bool, block: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    whole = numbers(comm, 8)
    part = whole[4 * block : 4 * block + 4]
    return call(whole, out=part) if x_blocks else call(part, out=whole)


def halves_apart(comm: Comm) -> tuple[tuple[Any, ...], dict[str, Any]]:
    whole = numbers(comm, 16)
    return call(whole[:8], out=whole[8:])


def overlapping(comm: Comm, by: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    whole = numbers(comm, 16)
    return call(whole[:8], out=whole[by : by + 8])


GROW, SHRINK = ("all_gather", "gather"), ("reduce_scatter", "scatter")
SAME = ("all_reduce", "broadcast", "reduce", "all_to_all")
ROOTED = ("broadcast", "reduce", "gather", "scatter")


def sizes(name: str) -> tuple[int, int]:
    return (4, 8) if name in GROW else (8, 4) if name in SHRINK else (8, 8)


def pair(name: str, dtype: str = "f4", **named: Any) -> Make:
    n, m = sizes(name)

    def make(comm: Comm) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x = None if name == "scatter" and comm.rank else numbers(comm, n, dtype)
        return call(x, out=np.zeros(m, dtype), **named)

    return make


QUICK: list[tuple[str, Make]] = [
    *((name, pair(name, dtype)) for name in (*GROW, *SHRINK, *SAME) for dtype in ("f4", "i8")),
    *((name, pair(name, dtype)) for name in ("all_gather", "all_to_all") for dtype in ("i2", "c16", "?")),
    *((name, pair(name, dtype)) for name in ("all_reduce", "reduce") for dtype in ("c8", "c16", "bfloat16")),
    *((name, pair(name, op=pynccl.ReduceOp.MIN)) for name in ("all_reduce", "reduce_scatter", "reduce")),
    *((name, lambda c: call(numbers(c, 0), out=np.zeros(0, "f4"))) for name in (*GROW[:1], *SAME)),
    *((name, lambda c: call(numbers(c, 24).reshape(2, 3, 4))) for name in ("all_reduce", "broadcast")),
    ("all_reduce", lambda c: call(np.array(float(c.rank)), out=np.array(0.0))),
    ("all_reduce", lambda c: call(numbers(c, 16)[8:], out=numbers(c, 16)[:8])),
    ("all_reduce", lambda c: halves_apart(c)),
    *((name, lambda c: call(numbers(c, 8))) for name in ("all_reduce", "broadcast", "reduce")),
    ("all_gather", lambda c: halves(c, x_blocks=False, block=c.rank)),
    ("reduce_scatter", lambda c: halves(c, x_blocks=True, block=c.rank)),
    *((name, pair(name, op="max")) for name in ("all_reduce", "reduce_scatter", "reduce")),
]


def filled(*shape: int) -> Make:
    return lambda comm: call(np.full(shape, comm.rank))


# Without out these make their result.
QUICK += [(name, filled(*shape)) for name in GROW for shape in ((8,), (2, 3), (2, 0), ())]
QUICK += [
    (name, filled(*shape)) for name in ("reduce_scatter", "all_to_all") for shape in ((8,), (2, 3), (2, 0))
]

GENERAL: list[tuple[str, Make]] = [
    *((name, pair(name, root=root)) for name in ROOTED for root in (2, -1, "0", 1.0)),
    *((name, pair(name, root=True)) for name in ROOTED[:3]),
    *((name, lambda c: overlapping(c, by=1)) for name in ("all_reduce", "all_to_all")),
    ("all_reduce", lambda c: call(numbers(c, 8).astype(">f4"))),
    ("all_reduce", lambda c: call(np.asfortranarray(numbers(c, 8).reshape(2, 4)))),
    ("all_reduce", lambda c: call(numbers(c, 8).view(np.recarray))),
    ("all_reduce", lambda c: call(numbers(c, 8), op=["sum"])),
    ("all_reduce", lambda c: call(numbers(c, 8), out="out")),
    ("all_reduce", lambda c: call(None)),
    ("all_reduce", lambda c: call(3.0)),
    *((name, lambda c: call(numbers(c, 7), out=np.zeros(5, "f4"))) for name in (*GROW[:1], *SHRINK[:1])),
    *((name, lambda c: call(numbers(c, 8), out=np.zeros(8, "f8"))) for name in ("all_gather", *SAME[::3])),
    *((name, lambda c: call(numbers(c, 8), out=read_only(8))) for name in SAME[::3]),
    *((name, lambda c: call(numbers(c, 16)[::2], out=np.zeros(8, "f4"))) for name in SAME[::3]),
    ("all_to_all", lambda c: call(read_only(8), out=np.zeros(8, "f4"))),
    ("all_gather", lambda c: halves(c, x_blocks=False, block=1 - c.rank)),
    ("reduce_scatter", lambda c: halves(c, x_blocks=True, block=1 - c.rank)),
    ("all_to_all", lambda c: call(x := numbers(c, 8), out=x)),
    ("reduce_scatter", pair("reduce_scatter", op="median")),
    ("reduce_scatter", pair("reduce_scatter", "i2")),
    ("all_gather", lambda c: call([1, 2], out=np.zeros(4))),
    ("all_gather", lambda c: call([1, 2])),
    ("all_gather", lambda c: call(np.asfortranarray(np.zeros((2, 3))))),
    ("reduce_scatter", lambda c: call(np.zeros(()))),
    ("reduce_scatter", lambda c: call(np.zeros((3, 2)))),
    ("all_to_all", lambda c: call(np.zeros(3))),
    ("all_gather", lambda c: call(numbers(c, 4), out=[0] * 8)),
]


def outcome(comm: Comm, name: str, make: Make) -> tuple[Any, ...]:
    arguments, named = make(comm)
    arrays = (*arguments, named.get("out"))
    try:
        result = getattr(comm, name)(*arguments, **named)
    except (TypeError, ValueError, pynccl.NcclError) as error:
        return type(error), str(error)
    which = [result is each for each in arrays if each is not None]
    made = None if result is None else (result.dtype, result.shape, result.tolist())
    return which, made, [np.asarray(each).tolist() for each in arrays if each is not None]


def both_ways(comm: Comm, cases: list[tuple[str, Make]]) -> list[tuple[Any, Any, int]]:
    general = comm._run
    taken = [0]

    def counted(*arguments: Any) -> Any:
        taken[0] += 1
        return general(*arguments)

    comm._run = counted
    told = []
    for name, make in cases:
        taken[0] = 0
        quick = outcome(comm, name, make)
        of_quick = taken[0]
        comm._close_quick_path()
        slow = outcome(comm, name, make)
        comm._open_quick_path()
        told.append((quick, slow, of_quick))
    del comm._run
    return told


@pytest.mark.parametrize(("cases", "general"), [(QUICK, 0), (GENERAL, 1)], ids=["quick", "general"])
def test_both_paths_tell_the_same(cases: list[tuple[str, Make]], general: int) -> None:
    for told in run_ranks(2, both_ways, cases, processes=False, library="host"):
        for (name, _), (told_quickly, slow, taken) in zip(cases, told, strict=True):
            assert told_quickly == slow, name
            assert taken == general, f"{name} took the other path: {told_quickly}"


def wrong_layouts() -> list[dict[str, Any]]:
    return [
        {"_fields_": list(reversed(quick._ArrayObject._fields_))},
        {"_fields_": [("more", ctypes.c_void_p), *quick._ArrayObject._fields_]},
        {"_fields_": [*quick._ArrayObject._fields_, ("rest", ctypes.c_char * 1000)]},
    ]


@pytest.mark.parametrize("fields", wrong_layouts(), ids=["reversed", "shifted", "too long"])
def test_an_array_object_that_is_otherwise_closes_the_quick_path(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # With no layout nothing may be taken, and nothing else changes.
    monkeypatch.setattr(quick, "_ArrayObject", type("_ArrayObject", (ctypes.Structure,), fields))
    assert quick.array_layout.__wrapped__() is None
    monkeypatch.setattr(quick, "array_layout", lambda: None)
    with pynccl.init(library="host") as comm:
        x = np.arange(4.0)
        assert comm._quick_all_gather(x, None) == NOT_TAKEN
        assert comm.all_reduce(x) is x
        assert comm.all_gather(x).tolist() == x.tolist()


def test_the_layout_is_confirmed_on_this_python_and_numpy() -> None:
    assert quick.array_layout() is not None


def test_an_ended_communicator_takes_nothing() -> None:
    comm = pynccl.init(library="host")
    prepared = comm.prepare("all_reduce", np.ones(3, "f4"))
    comm.destroy()
    for made in (lambda: comm.all_reduce(np.ones(3, "f4")), prepared):
        with pytest.raises(pynccl.NcclError, match="destroyed"):
            made()


def function_of_arrays(comm: Comm, record: pyncclArrayCall_t) -> Any:
    return quick._function(comm.library.pyncclFunctionOfArrays, record)


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_a_record_of_another_version_is_refused(size: int) -> None:
    with pynccl.init(library="host") as comm:
        record, of_arrays = pyncclCall_t(size=size, comm=comm.handle), pyncclArrayCall_t(size=size)
        assert comm.library.pyncclCall(ctypes.byref(record)) == Result.INVALID_ARGUMENT
        assert quick.function_of_record(comm.library, record)() == Result.INVALID_ARGUMENT
        assert function_of_arrays(comm, of_arrays)(np.ones(3), None) == NOT_TAKEN


@pytest.mark.parametrize("kind", [-1, 10, 2**31 - 1])
def test_a_record_of_no_collective_is_refused(kind: int) -> None:
    with pynccl.init(library="host") as comm:
        record = pyncclCall_t(size=ctypes.sizeof(pyncclCall_t), kind=kind, comm=comm.handle)
        of_arrays = pyncclArrayCall_t(size=ctypes.sizeof(pyncclArrayCall_t), kind=kind, comm=comm.handle)
        assert comm.library.pyncclCall(ctypes.byref(record)) == Result.INVALID_ARGUMENT
        assert function_of_arrays(comm, of_arrays)(np.ones(3), None) == NOT_TAKEN


def test_a_function_of_arrays_takes_two_of_them_and_looks_with_three() -> None:
    with pynccl.init(library="host") as comm:
        x, out = np.ones(3), np.zeros(3)
        for arguments in ((), (x,), (x, None), (x, None, None), (x, out, None, None)):
            assert comm._quick_all_gather(*arguments) == NOT_TAKEN
        assert comm._quick_all_gather(x, out, None) == 0 and out.tolist() == [0, 0, 0]
        assert comm._quick_all_gather(x, out) == 0 and out.tolist() == [1, 1, 1]
        with pytest.raises(TypeError, match="keyword"):
            comm._quick_all_gather(x, out=x)


@pytest.mark.parametrize("size", [0, 1000])
def test_another_version_of_the_interface_to_python_makes_no_function(size: int) -> None:
    from pynccl.abi.types import pyncclPython_t

    with pynccl.init(library="host") as comm:
        for function in (comm.library.pyncclFunctionOfArrays, comm.library.pyncclFunctionOfCall):
            assert function(ctypes.byref(pyncclPython_t(size=size)), None) is None
            assert function(None, None) is None


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("elements", [1, 3000])
def test_a_rank_that_waits_leaves_python_to_others(prepared: bool, elements: int) -> None:
    # Both ranks are threads of this process: the first to call waits for one that still has to run Python.
    def one(comm: Comm) -> float:
        x = np.ones(elements)
        call = comm.prepare("all_reduce", x) if prepared else lambda: comm.all_reduce(x)
        for turn in range(200):
            x[:] = 1
            if turn % 2 == comm.rank:
                sum(range(1000))
            call()
        return float(x[-1])

    assert run_ranks(2, one, processes=False, library="host", timeout=30) == [2.0, 2.0]


def test_a_group_in_one_thread_closes_the_quick_path_to_that_thread_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened, done = threading.Event(), threading.Event()

    def elsewhere() -> None:
        with pynccl.group():
            opened.set()
            done.wait(30)

    with pynccl.init(library="host") as comm:
        other = threading.Thread(target=elsewhere)
        other.start()
        try:
            assert opened.wait(30)
            monkeypatch.setattr(comm, "_run", None)  # the general path is not needed
            x = np.arange(3.0)
            assert comm.all_reduce(x) is x
        finally:
            done.set()
            other.join()


def messages(comm: Comm) -> tuple[int, list[Any]]:
    """How many went the general way, and what rank 1 has got."""
    general: list[str] = []
    slow = comm._message

    def counted(call: str, *rest: Any, **named: Any) -> Any:
        general.append(call)
        return slow(call, *rest, **named)

    comm._message = counted
    got = []
    for dtype in ("f4", "i2", "c16", "?", "bfloat16"):
        for shape in ((0,), (3,), (2, 3), (), (5000,)):
            x = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
            if comm.rank == 0:
                assert comm.send(x, 1) is None
            else:
                y = np.zeros_like(x)
                assert comm.recv(y, 0) is y
                got.append(bool((x == y).all()))
    del comm._message
    return len(general), got


@pytest.mark.parametrize("processes", [False, True])
def test_messages_of_plain_arrays_go_the_quick_way(processes: bool) -> None:
    for general, got in run_ranks(2, messages, processes=processes, library="host"):
        assert general == 0 and all(got)


def odd_messages(comm: Comm) -> list[Any]:
    told: list[Any] = []
    plain, wrong = np.ones(2), [2, -1, comm.rank, "1"]
    for x, peer in (
        (read_only(4), 1),
        (np.asfortranarray(np.ones((2, 3))), 1),
        (np.ones(4), np.int64(1)),
        (np.ones(4), True),
    ):
        if comm.rank == 0:
            comm.send(x, peer)
        else:
            comm.recv(y := np.zeros(x.shape, x.dtype, order="F"), 0)
            told.append(bool((x == y).all()))
    for method in (comm.send, comm.recv):
        for given, other in (*((plain, peer) for peer in wrong), (3.0, 1)):
            with pytest.raises((TypeError, ValueError, pynccl.NcclError)) as caught:
                method(given, other)
            told.append((caught.type, str(caught.value)))
    return told


def test_messages_that_are_not_plain_tell_the_same_on_both_ways() -> None:
    def slow(comm: Comm) -> list[Any]:
        comm._close_quick_path()
        return odd_messages(comm)

    quick_told = run_ranks(2, odd_messages, processes=False, library="host")
    assert quick_told == run_ranks(2, slow, processes=False, library="host")
    assert quick_told[1][:4] == [True] * 4


def test_a_barrier_meets_on_the_quick_way_too() -> None:
    def one(comm: Comm) -> list[str]:
        comm.barrier()  # makes what it reduces
        general: list[str] = []
        issue = comm._issue

        def counted(call: str, *rest: Any) -> Any:
            general.append(call)
            return issue(call, *rest)

        comm._issue = counted
        for _ in range(3):
            comm.barrier()
        with pynccl.Stream(library=comm.library) as stream:
            comm.barrier(stream=stream)
        comm.barrier()
        del comm._issue
        comm.destroy()
        with pytest.raises(pynccl.NcclError, match="barrier.*destroyed"):
            comm.barrier()
        return general

    assert run_ranks(2, one, processes=False, library="host") == [["barrier (ncclAllReduce)"]] * 2


def grouped(comm: Comm) -> tuple[tuple[int, int], Any]:
    general: list[str] = []
    issue = comm._issue

    def counted(call: str, *rest: Any) -> Any:
        general.append(call)
        return issue(call, *rest)

    comm._issue = counted
    x, got, summed = numbers(comm, 3), np.zeros(3, "f4"), numbers(comm, 2)
    with pynccl.group():
        comm.send(x, 1 - comm.rank)
        assert comm.recv(got, 1 - comm.rank) is got
        assert comm.all_reduce(summed, op="max") is summed
        gathered = comm.all_gather(x)
        collected = comm.gather(x, 1)
        assert comm.reduce(numbers(comm, 2), 0, op="min") is None or comm.rank == 0
        assert (summed == numbers(comm, 2)).all()  # nothing has happened yet
    made = [got, summed, gathered, np.zeros(0) if collected is None else collected]
    quick_ones = len(general)
    with pynccl.group():
        comm.send(x, 1 - comm.rank)
        comm.recv(got, np.int64(1 - comm.rank))  # not of the plainest kind
    return (quick_ones, len(general)), [one.tolist() for one in made]


def test_plain_calls_of_a_group_go_the_quick_way() -> None:
    first, second = run_ranks(2, grouped, processes=False, library="host")
    assert first[0] == second[0] == (0, 1)
    assert first[1] == [[1, 2, 3], [1, 2], [0, 1, 2, 1, 2, 3], []]
    assert second[1] == [[0, 1, 2], [1, 2], [0, 1, 2, 1, 2, 3], [0, 1, 2, 1, 2, 3]]


def test_an_array_that_is_changed_inside_a_group_is_an_error_at_its_end() -> None:
    with pynccl.init(library="host") as comm:
        x, y = np.ones(4), np.ones(4)
        with pytest.raises(pynccl.InvalidUsageError, match="all_reduce.*changed before the end of the group"):
            with pynccl.group():
                comm.all_reduce(x)
                comm.all_reduce(y)
                y.flags.writeable = False
        assert comm.all_reduce(x) is x  # the group is gone, the communicator is not
        with pynccl.group(), pytest.raises((TypeError, ValueError)):
            comm.all_reduce(x, op="median")


@pytest.mark.parametrize("error", [TypeError, KeyError])
@pytest.mark.parametrize("name", [*OPERATIONS, "send", "recv"])
def test_what_a_signal_handler_raises_behind_a_call_is_not_taken_for_an_answer(
    name: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Python runs handlers right behind the library's function: the call has been made already.
    def made_and_interrupted(x: Any, out: Any) -> int:
        raise error("the handler's")

    what = OPERATIONS.get(name)
    table: Any = made_and_interrupted
    if what is not None and what.reduces:
        table = {"sum": table}
    if what is None or what.rooted:
        table = {0: table}
    with pynccl.init(library="host") as comm:
        for general in ("_run", "_message"):
            monkeypatch.setattr(comm, general, None)
        monkeypatch.setattr(comm, f"_quick_{name}", table)
        with pytest.raises(error, match="the handler's"):
            getattr(comm, name)(np.ones(2), **({} if what is not None else {"peer": 0}))
        monkeypatch.undo()


@pytest.mark.parametrize("at", ["ncclGroupStart", "ncclGroupEnd"])
def test_a_call_of_a_signal_handler_is_never_queued_in_a_group_that_starts(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pynccl.init(library="host") as comm:
        original = getattr(comm.library, at)
        prepared = comm.prepare("all_reduce", np.ones(2))
        refused: list[str] = []

        def open_a_group() -> None:
            with pynccl.group():
                pass

        calls: dict[str, Callable[[], Any]] = {
            "quick": lambda: comm.all_reduce(np.ones(2)),
            "general": lambda: comm.all_reduce(np.ones((2, 2)).T),
            "message": lambda: comm.send(np.ones(2), 0),
            "barrier": comm.barrier,
            "prepared": prepared,
            "group": open_a_group,
        }

        def interrupted(*arguments: Any) -> int:
            code = original(*arguments) if at == "ncclGroupStart" else 0
            for call, make in calls.items():
                with pytest.raises(pynccl.InvalidUsageError, match="signal handler or a finalizer"):
                    make()
                refused.append(call)
            return code if at == "ncclGroupStart" else original(*arguments)

        x = np.ones(4)
        monkeypatch.setattr(comm.library, at, interrupted)
        with pynccl.group():
            comm.all_reduce(x)
        monkeypatch.undo()
        assert refused == list(calls)
        assert current.group is None
        assert comm.all_gather(x).tolist() == x.tolist()


def waits_in_a_handler(comm: Comm) -> list[float]:
    other = comm.split(0)
    x, y = np.ones(4), np.ones(4)
    if comm.rank == 0:
        signal.signal(signal.SIGALRM, lambda number, frame: other.all_reduce(y))
        signal.setitimer(signal.ITIMER_REAL, 0.02)  # well before the other rank comes
    else:
        other.all_reduce(y)  # returns when the handler has called
    comm.all_reduce(x)
    return [x[0], y[0]]


def test_a_signal_handler_may_wait_while_its_thread_waits() -> None:
    assert run_ranks(2, waits_in_a_handler, processes=True, library="host", timeout=60) == [[2, 2]] * 2


def test_a_communicator_is_in_no_cycle_of_references() -> None:
    comm = pynccl.init(library="host")
    comm.broadcast(np.ones(3), 0)
    comm.reduce(np.ones(3), 0)
    gone = weakref.ref(comm)
    gc.disable()
    try:
        with pytest.warns(ResourceWarning):
            del comm
        assert gone() is None
    finally:
        gc.enable()


def test_what_is_wrong_with_an_array_is_said_though_its_result_would_not_fit() -> None:
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, "f4"), (2**46,), (0,))
    with pynccl.init(library="host") as comm:
        for call in (comm.all_gather, comm.reduce_scatter, comm.all_to_all, comm.gather, comm.scatter):
            with pytest.raises(pynccl.InvalidArgumentError, match="not contiguous"):
                call(huge)

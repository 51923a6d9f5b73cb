"""What ``algorithm=`` and ``op=`` may be on the host library, and the words for what they may not."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import pynccl
from pynccl.abi.types import RedOp
from pynccl.collectives import (
    ADASUM,
    ALGORITHMS,
    Builder,
    compile,
    cost,
    diagram,
    find_fault,
    generate,
    run,
    to_msccl,
    verify,
    write_trace,
)
from pynccl.collectives.registry import Row
from pynccl.operations import OPERATIONS
from pynccl.testing import run_ranks

# Of NCCL's, whole lists and exclusions of them.
NCCL_NAMES = ["ring", "tree", "nvls", "collnet_direct", "pat", "tree,ring", "^nvls", "RING"]


@pytest.fixture
def alone() -> Iterator[pynccl.Communicator]:
    """A communicator of one rank."""
    with pynccl.Communicator(1, pynccl.get_unique_id("host"), 0, library="host") as comm:
        yield comm


def call(comm: Any, name: str, **arguments: Any) -> Any:
    return getattr(comm, name)(np.ones(2, "f4"), **arguments)


@pytest.mark.parametrize("algorithm", NCCL_NAMES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_names_of_nccl_are_refused_and_the_schedules_of_the_collective_named(
    alone: pynccl.Communicator, name: str, algorithm: str
) -> None:
    for attempt in (call, lambda comm, name, **how: comm.prepare(name, np.ones(2, "f4"), **how)):
        with pytest.raises(pynccl.InvalidUsageError) as caught:
            attempt(alone, name, algorithm=algorithm)
        words = str(caught.value)
        assert words.startswith(f'{name}: algorithm "{algorithm}" means nothing to the host library')
        assert "leave algorithm=None" in words
        assert ("pynccl:direct" in words) == (name not in ("gather", "scatter"))


@pytest.mark.parametrize("algorithm", ["ring", "tree", "RING"])
def test_the_schedule_of_the_refused_name_comes_first(alone: pynccl.Communicator, algorithm: str) -> None:
    with pytest.raises(pynccl.InvalidUsageError, match=f"collectives: pynccl:{algorithm.lower()}, pynccl:"):
        alone.all_reduce(np.ones(2), algorithm=algorithm)
    assert alone.all_reduce(np.ones(2), algorithm=f"pynccl:{algorithm.lower()}").tolist() == [1, 1]


@pytest.mark.parametrize("algorithm", ["", " "])
def test_an_empty_algorithm_is_refused(alone: pynccl.Communicator, algorithm: str) -> None:
    with pytest.raises(pynccl.InvalidArgumentError, match="all_reduce: algorithm=' ?' names none"):
        alone.all_reduce(np.ones(2), algorithm=algorithm)


@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_collectives_without_schedules_say_which_have_some(alone: pynccl.Communicator, name: str) -> None:
    with pytest.raises(pynccl.InvalidArgumentError, match=f"no schedules of {name}, only of all_reduce, "):
        call(alone, name, algorithm="pynccl:ring")


@pytest.mark.parametrize("root", [[0], "0", 1.0, 3, -1])
def test_a_root_is_checked_as_without_a_schedule(alone: pynccl.Communicator, root: Any) -> None:
    messages = []
    for algorithm in (None, "pynccl:ring"):
        with pytest.raises((TypeError, pynccl.InvalidArgumentError), match="broadcast: root") as caught:
            alone.broadcast(np.ones(2), root=root, algorithm=algorithm)
        messages.append((caught.type, str(caught.value)))
    assert messages[0] == messages[1]


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (np.logaddexp, "op=logaddexp is a function.*give algorithm= too, a schedule or 'pynccl:ring'"),
        (np.add, "op=add is a function.*; or use op='sum'"),
        (np.maximum, "op=maximum is a function.*; or use op='max'"),
        (
            ADASUM,
            "op=adasum is a function.*pynccl.collectives.all_reduce and reduce_scatter take one that fits",
        ),
        (lambda a, b: a, "op=<lambda> is a function"),
    ],
)
@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "reduce"])
def test_a_function_without_a_schedule_is_refused_with_the_remedy(
    alone: pynccl.Communicator, name: str, op: Any, words: str
) -> None:
    with pytest.raises(TypeError, match=f"{name}: {words}"):
        call(alone, name, op=op)
    with pytest.raises(TypeError, match=f"{name}: {words}"):
        alone.prepare(name, np.ones(2, "f4"), op=op)
    np.testing.assert_array_equal(alone.all_reduce(np.ones(2), op=np.logaddexp, algorithm="pynccl:ring"), 1)


def test_the_abis_operations_are_taken_with_a_schedule_as_without() -> None:
    def rank(comm: Any) -> None:
        for algorithm in (None, "pynccl:ring"):
            x = comm.all_reduce(np.full(3, comm.rank + 2.0), op=RedOp.PROD, algorithm=algorithm)
            assert x.tolist() == [6] * 3
        step = comm.prepare("all_reduce", np.full(3, comm.rank), op=RedOp.MAX, algorithm="pynccl:ring")
        assert step().tolist() == [1] * 3

    run_ranks(2, rank, processes=False, library="host", timeout=60)


def test_what_is_compiled_for_another_communicator_is_refused(alone: pynccl.Communicator) -> None:
    child = alone.split(0)
    theirs = compile(generate("ring", 1), child)
    for way in (alone.all_reduce, lambda x, algorithm: alone.prepare("all_reduce", x, algorithm=algorithm)):
        with pytest.raises(
            pynccl.InvalidArgumentError, match="all_reduce: <Compiled.* is compiled for another"
        ):
            way(np.ones(2), algorithm=theirs)
    assert child.all_reduce(np.ones(2), algorithm=theirs).tolist() == [1, 1]
    child.destroy()


@pytest.mark.parametrize(
    ("dtype", "op", "ufunc"), [("complex64", "prod", np.multiply), ("int16", "sum", np.add)]
)
def test_a_reduction_that_nccl_lacks_names_one_that_works(
    alone: pynccl.Communicator, dtype: str, op: str, ufunc: np.ufunc
) -> None:
    words = f"op='{op}' is not possible for {dtype}; .*op=np.{ufunc.__name__}.*algorithm='pynccl:ring'"
    with pytest.raises(pynccl.InvalidArgumentError, match=words):
        alone.all_reduce(np.ones(2, dtype), op=op)
    assert alone.all_reduce(np.ones(2, dtype), op=ufunc, algorithm="pynccl:ring").tolist() == [1, 1]


def chain(n, *, chunks=2, root=0):
    """A generator as a user may write it, with no types."""
    return generate("ring", n, collective="broadcast", chunks=chunks, root=root)


@pytest.mark.parametrize("annotation", [int, "int", int | None, "int | None"], ids=repr)
def test_a_row_of_ones_own_takes_its_parameters_however_they_are_annotated(
    monkeypatch: pytest.MonkeyPatch, annotation: Any
) -> None:
    monkeypatch.setitem(ALGORITHMS, ("broadcast", "mine"), Row("broadcast", "mine", chain, "", ""))
    mine = functools.partial(generate, "mine", 3, collective="broadcast")
    assert mine(root=2, chunks=4).root == 2
    for root in (3, "x"):
        with pytest.raises(ValueError, match=f"root {root} is not one of 3 ranks; take 0 to 2"):
            mine(root=root)
    monkeypatch.setitem(chain.__annotations__, "chunks", annotation)
    assert mine(chunks=4).parts == 4
    with pytest.raises(ValueError, match=r"chunks='x'; it has chunks \(int.*, otherwise 2\), root \(any"):
        mine(chunks="x")


def test_a_row_of_ones_own_runs_by_name() -> None:
    def rank(comm: pynccl.Communicator) -> list[float]:
        ALGORITHMS["broadcast", "mine"] = Row("broadcast", "mine", chain, "", "")
        return comm.broadcast(np.full(2, comm.rank + 1.0), 1, algorithm="pynccl:mine").tolist()

    assert run_ranks(2, rank, library="host") == [[2, 2], [2, 2]]


# --- what is given instead of a schedule --------------------------------------------------------------------

INSTEAD: dict[str, Any] = {
    "'ring' of type str is no schedule; take generate('ring', n)": "ring",
    "of type Builder is no schedule; take what its build() returns": Builder("mine", "all_reduce", 1),
    "None of type NoneType is no schedule; take a Schedule": None,
}
READERS: dict[str, Callable[[Any], Any]] = {
    "verify": verify,
    "find_fault": find_fault,
    "cost": lambda given: cost(given, 1024),
    "write_trace": lambda given: write_trace("never written", given, 1024),
    "diagram": diagram,
    "to_msccl": to_msccl,
    "run": lambda given: run(given, None, np.ones(2)),
    "compile": lambda given: compile(given, None),
}


@pytest.mark.parametrize("words", INSTEAD)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_schedule_is_refused_with_what_to_give(reader: str, words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(words)):
        READERS[reader](INSTEAD[words])


@pytest.mark.parametrize("words", INSTEAD)
def test_a_generator_that_returns_no_schedule_is_named(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    row = Row("all_reduce", "mine", lambda n: INSTEAD[words], "", "")
    monkeypatch.setitem(ALGORITHMS, ("all_reduce", "mine"), row)
    with pytest.raises(TypeError, match="all_reduce mine: what its generator returns: .*" + re.escape(words)):
        generate("mine", 1)


def test_a_generator_in_place_of_a_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, ("broadcast", "mine"), chain)
    with pytest.raises(
        TypeError, match=r"ALGORITHMS\['broadcast', 'mine'\] is <function .*give it a registry.Row"
    ):
        generate("mine", 1, collective="broadcast")


@pytest.mark.parametrize("topology", ["nodes:8", 8])
def test_what_is_no_topology_is_refused_with_what_to_give(topology: Any) -> None:
    with pytest.raises(TypeError, match=f"cost: topology={topology!r}; take flat"):
        cost(generate("ring", 2), 1024, topology)


def test_a_generator_that_is_defined_again_is_used(
    monkeypatch: pytest.MonkeyPatch, alone: pynccl.Communicator
) -> None:
    """As in a notebook."""
    made: list[str] = []

    def generator_of(word: str) -> Any:
        def mine(n: int) -> Any:
            made.append(word)
            return generate("ring", n)

        return mine

    for word in ("first", "second"):
        row = Row("all_reduce", "mine", generator_of(word), "a", "a notebook")
        monkeypatch.setitem(ALGORITHMS, ("all_reduce", "mine"), row)
        for op in ("sum", np.add):
            for _ in range(2):
                alone.all_reduce(np.ones(3), op=op, algorithm="pynccl:mine")
    assert list(dict.fromkeys(made)) == ["first", "second"] and len(made) <= 4  # not one a call


def test_an_operation_of_none_is_refused_as_without_a_schedule(alone: pynccl.Communicator) -> None:
    for call in (
        lambda: alone.all_reduce(np.ones(3), op=None, algorithm="pynccl:ring"),
        lambda: run(generate("ring", 1), alone, np.ones(3), op=None),
        lambda: alone.all_reduce(np.ones(3), op=None),
    ):
        with pytest.raises(TypeError, match="op"):
            call()
    assert (alone.all_reduce(np.ones(3)) == 1).all()


def test_a_function_cannot_reduce_into_what_it_is_given() -> None:
    def into(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a += b
        return a

    def rank(comm: pynccl.Communicator) -> None:
        with pytest.raises(pynccl.InvalidArgumentError, match="read-only.*ended the communicator"):
            comm.all_reduce(np.ones(4), op=into, algorithm="pynccl:ring")

    run_ranks(2, rank, library="host", timeout=30)


def test_what_is_no_schedule_yet_is_told_so(alone: pynccl.Communicator) -> None:
    def mine(n: int) -> Any:
        return generate("ring", n)

    with pytest.raises(TypeError, match=r"not function; call it: mine\(comm.size\)"):
        alone.all_reduce(np.ones(3), algorithm=mine)
    with pytest.raises(TypeError, match="not Builder; pass what its build"):
        alone.all_reduce(np.ones(3), algorithm=Builder("b", "all_reduce", 1))
    with pytest.raises(TypeError, match=r"call it: mine\(n\)"):
        verify(mine)  # type: ignore[arg-type]

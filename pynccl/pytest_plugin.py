"""A pytest marker and fixture for tests that run on several ranks. Installed packages' plugins load by
themselves.

    @pytest.mark.ranks(2, 3)                 # once on 2 ranks, once on 3
    def test_sum(comm):                      # runs on every rank; `comm` is that rank's communicator
        x = np.ones(4)
        comm.all_reduce(x)
        assert (x == comm.size).all()

    def test_results(ranks):                 # runs once; `ranks` is pynccl.testing.run_ranks
        assert ranks(2, lambda comm: comm.rank) == [0, 1]

The marker's keywords are those of `pynccl.testing.run_ranks`: processes, timeout, library, start_method. The
other fixtures of a marked test are set up once, before the ranks are made from this process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from pynccl.testing import RankError, run_ranks

_MARKER = "ranks(*sizes, processes=True, timeout=60, library=None): run the test on each number of ranks"


class _Later:
    """Stands for the communicator, which exists in the ranks only."""

    def __init__(self, size: int):
        self.size = size


class _Skipped(Exception):
    """pytest's own exception, which cannot be pickled, on its way from a rank."""


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """`pynccl.testing.run_ranks`: run a function on several ranks, get the results by rank."""
    return run_ranks


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Any:
    """The communicator of this rank, in a test marked `@pytest.mark.ranks(n)`."""
    if not hasattr(request, "param"):
        pytest.fail(
            "the comm fixture needs @pytest.mark.ranks(n) on the test, with the number of ranks",
            pytrace=False,
        )
    return _Later(request.param)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    where = metafunc.definition.nodeid
    if "comm" not in metafunc.fixturenames:
        pytest.fail(f"{where}: marked with ranks, but it does not take the comm fixture", pytrace=False)
    if not marker.args:
        pytest.fail(f"{where}: @pytest.mark.ranks needs a number of ranks, such as ranks(2)", pytrace=False)
    metafunc.parametrize("comm", marker.args, indirect=True, ids=[f"{size} ranks" for size in marker.args])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    test = pyfuncitem.obj
    named = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    later = named["comm"]
    assert isinstance(later, _Later), "a fixture of this project's own is called comm, too"

    def rank_main(comm: Any) -> None:
        try:
            test(**(named | {"comm": comm}))
        except pytest.skip.Exception as skip:
            raise _Skipped(str(skip)) from None

    __tracebackhide__ = True
    try:
        run_ranks(later.size, rank_main, **marker.kwargs)
    except RankError as error:
        skipped = [failure.exception for failure in error.failures.values()]
        if all(isinstance(exception, _Skipped) for exception in skipped):
            pytest.skip(str(skipped[0]))
        pytest.fail(str(error), pytrace=False)
    return True

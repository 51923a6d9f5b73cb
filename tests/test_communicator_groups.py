"""Calls that start together: groups, their exceptions, and the inits of several ranks in one thread."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest
from communicator_ranks import N, ranks  # type: ignore[import-not-found]

import pynccl
from pynccl.group import Group
from pynccl.threadstate import current


def test_sends_and_receives_in_a_group_pass_each_other() -> None:
    def rank(comm):
        here, n = comm.rank, comm.size
        x, y = np.full(1 << 16, here), np.empty(1 << 16, int)
        with pynccl.group():
            comm.send(x, (here + 1) % n)
            assert comm.recv(y, (here - 1) % n) is y
        return int(y.min()), int(y.max())

    assert ranks(rank) == [(2, 2), (0, 0), (1, 1)]


def test_an_exception_in_a_group_starts_nothing_and_the_communicator_goes_on() -> None:
    def rank(comm):
        x = np.ones(2)
        with pytest.raises(ZeroDivisionError):
            with pynccl.group():
                comm.all_reduce(x)
                comm.send(x, 0)
                raise ZeroDivisionError
        with pytest.raises(pynccl.InvalidArgumentError, match="do not divide"):
            with pynccl.group():
                comm.all_reduce(x)
                comm.reduce_scatter(np.ones(N + 1))
        assert x.tolist() == [1, 1]
        return comm.all_reduce(x).tolist()

    assert ranks(rank) == [[3, 3]] * N


def test_groups_nest_and_an_inner_one_that_fails_takes_only_its_own_calls() -> None:
    def rank(comm):
        x, y, z = np.ones(1), np.ones(1), np.ones(1)
        with pynccl.group() as outer:
            comm.all_reduce(x)
            with pynccl.group():
                comm.all_reduce(y)
            assert y.tolist() == [1]
            with pytest.raises(KeyError):
                with pynccl.group():
                    comm.all_reduce(z)
                    raise KeyError
            assert len(outer) == 2
        return x.tolist() + y.tolist() + z.tolist()

    assert ranks(rank) == [[3, 3, 1]] * N


def test_a_group_is_of_one_thread(alone: pynccl.Communicator) -> None:
    x = np.full(2, 5.0)
    with alone.premul_sum(2, "float64") as op, pynccl.group():
        other = threading.Thread(target=alone.all_reduce, args=(x,), kwargs={"op": op})
        other.start()
        other.join()
        assert x.tolist() == [10, 10]


def test_one_thread_drives_several_communicators_in_groups() -> None:
    comms = pynccl.Communicator.init_all(N, library="host", name="clique")
    assert [(c.rank, c.size) for c in comms] == [(0, 3), (1, 3), (2, 3)]
    with pynccl.group():
        summed = [c.all_reduce(np.full(3, c.rank + 1.0)) for c in comms]
    with pynccl.group():
        halves = [c.split(c.rank % 2, name="half") for c in comms]
        assert repr(halves[0]) == "<Communicator 'half' rank -1 of 0, host, being made>"
        with pytest.raises(pynccl.InvalidUsageError, match="made when the group ends"):
            halves[0].barrier()
    with pynccl.group():
        gathered = [c.all_gather(np.array(c.rank)) for c in halves]
    assert [x.tolist() for x in summed] == [[6, 6, 6]] * N
    assert [x.tolist() for x in gathered] == [[0, 1], [0], [0, 1]]
    for comm in (*halves, *comms):
        comm.destroy()


def test_a_group_of_inits_makes_a_clique_in_one_thread() -> None:
    uid = pynccl.get_unique_id("host")
    with pynccl.group():
        comms = [pynccl.Communicator(2, uid, rank, library="host") for rank in range(2)]
    with pynccl.group():
        xs = [comm.all_reduce(np.ones(1)) for comm in comms]
    assert [x.tolist() for x in xs] == [[2], [2]]
    for comm in comms:
        comm.destroy()


def test_a_communicator_of_a_group_that_is_given_up_was_never_made() -> None:
    with pytest.raises(ZeroDivisionError):
        with pynccl.group():
            comm = pynccl.Communicator(2, pynccl.get_unique_id("host"), 0, library="host")
            raise ZeroDivisionError
    assert comm.closed
    with pytest.raises(pynccl.InvalidUsageError, match="never made"):
        comm.barrier()


def test_a_simulated_group_changes_nothing(alone: pynccl.Communicator) -> None:
    x = np.ones(4)
    with alone.premul_sum(2, "float64") as op, pynccl.group(simulate=True) as simulated:
        alone.all_reduce(x, op=op)
    assert x.tolist() == [1, 1, 1, 1]
    assert simulated.estimated_time is not None
    with pytest.raises(pynccl.InvalidUsageError, match="simulate"):
        with pynccl.group(), pynccl.group(simulate=True):
            pass
    alone.barrier()


def test_what_is_under_way_says_what_it_is(alone: pynccl.Communicator) -> None:
    x = np.ones(2)
    with pynccl.group() as together:
        assert repr(together) == "<Group of 0 calls>"
        alone.send(x, 0)
        alone.recv(x.copy(), 0)
        alone.send(x, 0)
        alone.recv(x.copy(), 0)
        assert repr(together) == "<Group of 4 calls: send, recv>"
    event = pynccl.Event()
    assert re.fullmatch(r"<Event 0x[0-9a-f]+ done>", repr(event))


def test_a_group_whose_block_was_left_unsaid_is_not_open_any_more(alone: pynccl.Communicator) -> None:
    """As Ctrl-C can leave one, between the end of the block and the word of it: later calls are made."""
    current.set_group(Group(None, simulate=False))
    assert current.busy and current.group is None and not current.busy
    with pynccl.group():
        x = alone.all_reduce(np.ones(3))
        assert current.busy and current.group is not None
        with pynccl.group():
            pass
        assert len(current.group) == 1
    assert not current.busy and (x == 1).all()

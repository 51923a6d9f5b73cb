"""What communicators are called, and what they tell of themselves."""

from __future__ import annotations

import pydoc
import re

import numpy as np
import pytest

import pynccl
from pynccl.testing import run_ranks


def test_a_communicator_without_a_name_is_called_by_its_id_in_errors_and_in_its_repr() -> None:
    def rank(comm):
        with comm.split(0) as child, comm.split(0, name="chosen") as named:
            texts = []
            for each in (comm, child, named):
                with pytest.raises(pynccl.InvalidUsageError) as caught:
                    each.all_reduce(np.ones(1 + comm.rank))
                called = re.search(r'of communicator "(\w+)" differs', str(caught.value))
                texts.append((called and called[1], repr(each)))
            comm.barrier()
        return texts

    mine, other = run_ranks(2, rank, library="host")
    assert len({name for name, _ in mine}) == 3 and mine[2][0] == "chosen"
    for number, texts in enumerate((mine, other)):
        for name, text in texts:
            assert text == f"<Communicator {name!r} rank {number} of 2, host, open>"


def test_help_tells_attributes_and_calls_and_nothing_internal() -> None:
    text = pydoc.plain(pydoc.render_doc(pynccl.Communicator))
    attributes = text.partition("Attributes\n")[2].partition("Common to all calls")[0]
    for name in ("rank", "size", "name", "library", "on_gpu", "device", "handle", "closed"):
        assert re.search(rf"^ \|  .*\b{name}\b", attributes, re.MULTILINE), name
    for internal in ("check_open", "settle", "issue", "disown", "place", "fail"):
        assert not re.search(rf"^ \|  {internal}\b", text, re.MULTILINE), internal


def test_handles_are_for_other_code_that_speaks_nccl(alone: pynccl.Communicator) -> None:
    import ctypes

    count = ctypes.c_int()
    assert alone.library.ncclCommCount(alone.handle, ctypes.byref(count)) == 0
    assert count.value == 1

"""An all-reduce of your own: written, proved, costed, drawn and run.

python -m pynccl.launch -n 3 examples/write_your_own_all_reduce.py
"""

import tempfile

import numpy as np

import pynccl
from pynccl.collectives import IN, OUT, Builder, Schedule, cost, diagram, generate, verify, write_trace
from pynccl.collectives.report import comparison


def relay(n: int) -> Schedule:
    """Sums walk from rank 0 to the last rank, and the result walks back: 2(n-1) rounds, rank order."""
    b = Builder("relay", "all_reduce", n)
    b.copy(0, IN[0], OUT[0])
    for r in range(1, n):
        b.next_round()
        b.move(r - 1, r, OUT[0], OUT[0], reduce=IN[0], left=True)  # what came, then r's own
    for r in reversed(range(1, n)):
        b.next_round()
        b.move(r, r - 1, OUT[0], OUT[0])
    return b.build()


with pynccl.init() as comm:
    mine = relay(comm.size)
    if comm.rank == 0:
        if comm.size == 1:
            print("alone; for more ranks: python -m pynccl.launch -n 3", __file__)
        print(verify(mine), diagram(mine), sep="\n")  # o0>1 sends OUT[0] to rank 1, 0+o0 receives and reduces
        print(comparison({s.name: [cost(s, 1 << 20)] for s in (mine, generate("ring", comm.size))}))
        print("for ui.perfetto.dev:", write_trace(f"{tempfile.mkdtemp()}/relay.json", mine, 1 << 20))
    x = np.full(4, comm.rank + 1.0)
    comm.all_reduce(x, algorithm=mine)
    y = comm.all_reduce(np.full(4, float(comm.rank)), op=np.logaddexp, algorithm=mine)
    print(f"rank {comm.rank} of {comm.size}: sum {x}, logaddexp {y}\n", end="")

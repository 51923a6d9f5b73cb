"""Collectives as data: write an algorithm in twenty lines, have it proved, costed, drawn and run.

    from pynccl.collectives import cost, generate, nodes, verify, write_trace
    schedule = generate("ring", 16)
    print(verify(schedule), cost(schedule, 1 << 20, nodes(16, 8)), sep="\\n")
    write_trace("ring.json", schedule, 1 << 20, nodes(16, 8))

On ranks: `run`, `compile`, `all_reduce` by any function, `Compressor`, `tune`; see docs/collectives.md.
To write one, see `Builder`; to add one to the table, `registry.py`. `import pynccl` does not import this
package.
"""

from __future__ import annotations

from pynccl.collectives.builder import IN, OUT, SCRATCH, Builder, Spans, choose
from pynccl.collectives.codecs import Float8, Integers, TopK
from pynccl.collectives.compiled import Compiled, compile
from pynccl.collectives.compressed import Compressed, Compressor
from pynccl.collectives.cost import Cost, cost
from pynccl.collectives.diagram import diagram
from pynccl.collectives.execute import run
from pynccl.collectives.msccl import from_msccl, to_msccl
from pynccl.collectives.reductions import (
    ADASUM,
    Operation,
    all_reduce,
    arg_max,
    arg_min,
    moments,
    reduce_scatter,
)
from pynccl.collectives.registry import ALGORITHMS, algorithms, generate
from pynccl.collectives.schedule import COLLECTIVES, Buffer, Kind, Schedule, Span, Step
from pynccl.collectives.topology import Link, Topology, flat, nodes, rails
from pynccl.collectives.trace import write_trace
from pynccl.collectives.tune import Selection, tune
from pynccl.collectives.verify import Fault, Proof, find_fault, verify

__all__ = [
    "ADASUM",
    "ALGORITHMS",
    "COLLECTIVES",
    "IN",
    "OUT",
    "SCRATCH",
    "Buffer",
    "Builder",
    "Compiled",
    "Compressed",
    "Compressor",
    "Cost",
    "Fault",
    "Float8",
    "Integers",
    "Kind",
    "Link",
    "Operation",
    "Proof",
    "Schedule",
    "Selection",
    "Span",
    "Spans",
    "Step",
    "TopK",
    "Topology",
    "algorithms",
    "all_reduce",
    "arg_max",
    "arg_min",
    "choose",
    "compile",
    "cost",
    "diagram",
    "find_fault",
    "flat",
    "from_msccl",
    "generate",
    "moments",
    "nodes",
    "rails",
    "reduce_scatter",
    "run",
    "to_msccl",
    "tune",
    "verify",
    "write_trace",
]

"""Collectives as data: write an algorithm in twenty lines, have it proved, costed, drawn and run.

    from pynccl.collectives import generate, verify
    print(verify(generate("ring", 5)))

`import pynccl` does not import this package.
"""

from __future__ import annotations

from pynccl.collectives.builder import IN, OUT, SCRATCH, Builder, Spans, choose
from pynccl.collectives.registry import ALGORITHMS, algorithms, generate
from pynccl.collectives.schedule import COLLECTIVES, Buffer, Kind, Schedule, Span, Step
from pynccl.collectives.verify import Fault, Proof, find_fault, verify

__all__ = [
    "ALGORITHMS",
    "COLLECTIVES",
    "IN",
    "OUT",
    "SCRATCH",
    "Buffer",
    "Builder",
    "Fault",
    "Kind",
    "Proof",
    "Schedule",
    "Span",
    "Spans",
    "Step",
    "algorithms",
    "choose",
    "find_fault",
    "generate",
    "verify",
]

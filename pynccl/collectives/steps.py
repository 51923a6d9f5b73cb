"""Whether each step of a schedule makes sense by itself. What the steps do together is for `verify.py`.

`flow` asks first, so whatever reads a graph of a schedule, the executors too, has steps that passed.
"""

from __future__ import annotations

import numpy as np

from pynccl.collectives.fault import Fault
from pynccl.collectives.schedule import COLLECTIVES, Array, Buffer, Kind, Schedule

__all__ = ["check_steps"]


def check_steps(schedule: Schedule) -> None:
    """A `Fault` if a step makes no sense by itself: a chunk out of range, a write to IN, a missing buffer.

    What its kind does not use is as it is when it is not given, so nobody reads what means nothing.
    """
    c, n = schedule.columns, schedule.n
    ranks, kind, peer = schedule.ranks, c["kind"], c["peer"]
    message = kind <= Kind.RECV_REDUCE
    rounds = c["round"]
    back = np.zeros(len(c), dtype=bool)
    back[1:] = (ranks[1:] == ranks[:-1]) & (rounds[1:] < rounds[:-1])
    reduces = (kind == Kind.RECV_REDUCE) | (kind == Kind.REDUCE)
    wants_src, wants_dst = kind != Kind.RECV, kind != Kind.SEND
    checks: list[tuple[Array, str]] = [
        (back, "goes back to an earlier round; rounds grow along a rank's list"),
        (message & ((peer < 0) | (peer >= n)), f"has a peer that is not one of {n} ranks"),
        (message & (peer == ranks), "is a message to itself; use a copy"),
        (rounds < 0, "has a negative round"),
        (message & (c["channel"] < 0), "has a negative channel"),
        (c["chunks"] < 1, "moves no chunks"),
        (reduces & (not COLLECTIVES[schedule.collective].reduces), f"reduces, which {_a(schedule)} does not"),
        (wants_src & (c["src_buffer"] < 0), "lacks the span that it reads"),
        (wants_dst & (c["dst_buffer"] < 0), "lacks the span that it writes"),
        (wants_dst & (c["dst_buffer"] == Buffer.IN), "writes IN, which is the caller's"),
    ]
    lengths = np.array([schedule.chunks(buffer) for buffer in Buffer], dtype=np.int64)
    for end, wanted in (("src", wants_src), ("dst", wants_dst)):
        buffer, chunk = c[f"{end}_buffer"], c[f"{end}_chunk"].astype(np.int64)
        known = np.clip(buffer, 0, max(Buffer))
        outside = (chunk < 0) | (chunk + c["chunks"] > lengths[known])
        checks.append((wanted & outside, f"is outside its buffers, {_lengths(lengths)}"))
        for of in (Buffer.IN, Buffer.OUT):
            if COLLECTIVES[schedule.collective].only_root == of:
                missing = wanted & (buffer == of) & (ranks != schedule.root)
                checks.append((missing, f"uses {of.name}, which only root {schedule.root} has"))
    both = wants_src & wants_dst
    apart = np.abs(c["src_chunk"].astype(np.int64) - c["dst_chunk"])
    unlike = apart % schedule.parts != 0
    checks.append((both & unlike, "pairs chunks of different sizes when the parts do not divide the count"))
    same = c["src_buffer"] == c["dst_buffer"]
    checks.append((both & same & (apart > 0) & (apart < c["chunks"]), "overlaps itself"))
    for end, unused, words in (
        ("src", ~wants_src, "has a span to read (src), but a receive reads its message alone"),
        ("dst", ~wants_dst, "has a span to write (dst), but a send writes nothing"),
    ):
        checks.append(
            (unused & ((c[f"{end}_buffer"] != -1) | (c[f"{end}_chunk"] != 0)), f"{words}; leave it out")
        )
    addressed = (peer != -1) | (c["channel"] != 0)
    checks.append((~message & addressed, "has a peer or a channel, but no message; leave them out"))
    checks.append((~reduces & c["left"], "says left, but has no operands to swap; leave it out"))
    wrong = [np.flatnonzero(bad)[:1] for bad, _ in checks]
    first = min((int(rows[0]) for rows in wrong if len(rows)), default=-1)
    for rows, (_, what) in zip(wrong, checks, strict=True):
        if len(rows) and rows[0] == first:
            raise Fault.at(schedule, first, what)


def _a(schedule: Schedule) -> str:
    return ("an " if schedule.collective.startswith("a") else "a ") + schedule.collective


def _lengths(lengths: Array) -> str:
    return ", ".join(
        f"{buffer.name.lower()}[0:{length}]" for buffer, length in zip(Buffer, lengths, strict=True)
    )

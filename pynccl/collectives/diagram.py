"""A schedule as a drawing in text: a column for each rank, a row for each round. For few ranks.

o1>2   sends out[1] to rank 2          2>o1   receives out[1] from rank 2
o1=i1  copies in[1] to out[1]          2+o1   receives from rank 2 and reduces into out[1]
o1+s0  reduces scratch[0] into out[1]
"""

from __future__ import annotations

from pynccl.collectives.schedule import Kind, Schedule, Span, Step, check_is_schedule

__all__ = ["LEGEND", "diagram"]

LEGEND = (
    "i, o, s: chunks of in, out, scratch (i2:4 is 2 and 3); i0>1 sends to rank 1, 2>o0 receives from 2, "
    "2+o0 receives and reduces, o0=i0 copies, o0+s0 reduces"
)
"""The notation in a line."""

_MARKS = {
    Kind.SEND: "{src}>{peer}",
    Kind.RECV: "{peer}>{dst}",
    Kind.RECV_REDUCE: "{peer}+{dst}",
    Kind.COPY: "{dst}={src}",
    Kind.REDUCE: "{dst}+{src}",
}


def diagram(schedule: Schedule) -> str:
    """The drawing: rounds downwards, ranks to the right."""
    check_is_schedule("diagram", schedule)
    cells: dict[tuple[int, int], list[str]] = {}
    for rank, steps in enumerate(schedule):
        for step in steps:
            cells.setdefault((step.round, rank), []).append(_mark(step))
    width = [
        max(
            [
                len(f"rank {rank}"),
                *(len(mark) for (_, r), marks in cells.items() if r == rank for mark in marks),
            ]
        )
        for rank in range(schedule.n)
    ]
    lines = ["round  " + "  ".join(f"rank {rank}".ljust(width[rank]) for rank in range(schedule.n)).rstrip()]
    for round_ in sorted({round_ for round_, _ in cells}):
        columns = [cells.get((round_, rank), []) for rank in range(schedule.n)]
        for i in range(max(len(marks) for marks in columns)):
            marks = [(own[i] if i < len(own) else "").ljust(width[r]) for r, own in enumerate(columns)]
            lines.append(f"{round_ if i == 0 else '':>5}  {'  '.join(marks)}".rstrip())
    return "\n".join(lines)


def _mark(step: Step) -> str:
    return _MARKS[step.kind].format(src=_short(step.src), dst=_short(step.dst), peer=step.peer)


def _short(span: Span | None) -> str:
    if span is None:
        return ""
    last = f":{span.chunk + span.chunks}" if span.chunks != 1 else ""
    return f"{span.buffer.name[0].lower()}{span.chunk}{last}"

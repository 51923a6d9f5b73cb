"""What a long run does, step by step: a line of JSON for each step, and pictures of the first ones.

    with Tracer(model, "run.jsonl", chrome="run.trace.json") as tracer:
        for batch in data:
            with tracer.step(tokens=batch.size) as line:
                ...                         # microbatches, optimizer.step(), model.zero_grad()
                line["loss"] = loss

It listens to the engine's events and changes nothing. On a GPU each traced step ends with the CPU waiting for
the GPU: times are the GPU's own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from .report import COLLECTIVES

if TYPE_CHECKING:
    from .engine import ShardedModel

__all__ = ["Tracer", "memory"]

PARTS = ("gather", "compute", "reduce", "optimizer")
"""Of a step, in the calling thread: waits for weights, the user's forward and backward, waits for reductions,
the update."""

TRACKS = {"": 0, "gather stream": 1, "reduce stream": 2}
"""In a picture: what the computation does, and what runs beside it."""


class Tracer:
    """Logs the steps of one model, on each rank. Use it in a `with` block, or call `close`.

    log
        A file that gets a line of JSON for each step (appended). With "{rank}" in its name every rank has
        one; otherwise rank 0 alone writes. None: no file.
    chrome
        A file that gets the first `chrome_steps` steps in Chrome's trace format, for ui.perfetto.dev or
        chrome://tracing: computation on one track, the collectives as they really run on their streams on
        two others, so that overlap is what lies above one another. Named like `log`. Clocks of ranks on one
        machine agree: concatenate their events to see all.
    on_step
        Called with each step's dict, on every rank: for progress bars and other loggers.

    A line has

    * `step` (1 is the first), `rank`, `seconds`;
    * in seconds, the parts of the step: `gather` (waiting for weights, and casting them), `compute`, `reduce`
      (waiting for reductions), `optimizer`, and `other` (the rest: data, losses, Python);
    * `communication`: seconds in which collectives ran, and `hidden`: how much of them no part waited for;
    * `tokens` (as given, of all ranks) and `tokens_per_second`;
    * `rss`, `peak_rss`: bytes resident in host memory, now and at most so far; on a GPU `gpu_used` and
      `gpu_reserved`, of CuPy's pool;
    * `all_gather`, `reduce_scatter`, `all_reduce`: calls in this step, and `bytes_sent`;
    * whatever the loop has put into the dict that `step` gives.
    """

    def __init__(
        self,
        model: ShardedModel,
        log: str | Path | None = None,
        *,
        chrome: str | Path | None = None,
        chrome_steps: int = 20,
        on_step: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.model, self.on_step, self.chrome_steps = model, on_step, chrome_steps
        self.steps = 0
        """Steps done."""
        self._log = _open(log, model, "a")
        self._chrome = _open(chrome, model, "w")
        if self._chrome is not None:
            self._chrome.write("[\n" + ",\n".join(json.dumps(event) for event in _names(model)))
        self._intervals: list[tuple[str, str, float, float, str]] = []
        self._inside = False
        model.on_event(self._event, collectives=True)

    @contextmanager
    def step(self, tokens: int = 0, **fields: Any) -> Iterator[dict[str, Any]]:
        """One step, to be written down when the block ends; not if it raises.

        Gives a dict for more fields of the line; `fields` are there already.
        """
        if self._inside:
            raise RuntimeError("Tracer.step inside another step; close that one first")
        self.model.events.settle()
        self._intervals.clear()
        before = _counts(self.model)
        line: dict[str, Any] = dict(fields)
        self._inside, start = True, time.perf_counter()
        try:
            yield line
            self.model.events.settle()
            stop = time.perf_counter()
        finally:
            self._inside = False
        self.steps += 1
        self._write(start, stop, tokens, before, line)

    def close(self) -> None:
        """Stop listening and end the files. Twice is fine."""
        self.model.events.forget(self._event)
        if self._chrome is not None and not self._chrome.closed:
            self._chrome.write("\n]\n")
        for file in (self._chrome, self._log):
            if file is not None:
                file.close()

    def __enter__(self) -> Tracer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- what is written ------------------------------------------------------------------------------------

    def _event(self, name: str, unit: str, start: float, stop: float, detail: str) -> None:
        if self._inside:
            self._intervals.append((name, unit, start, stop, detail))

    def _write(
        self, start: float, stop: float, tokens: int, before: Mapping[str, float], line: dict[str, Any]
    ) -> None:
        seconds = stop - start
        parts = self._parts(seconds)
        counts = {name: value - before[name] for name, value in _counts(self.model).items()}
        record = {
            "step": self.steps,
            "rank": self.model.rank,
            "seconds": seconds,
            **parts,
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            **memory(self.model),
            **counts,
            **line,
        }
        if self._log is not None:
            self._log.write(json.dumps(record, default=float) + "\n")
            self._log.flush()
        if self._chrome is not None and self.steps <= self.chrome_steps:
            self._draw(start, stop)
        if self.on_step is not None:
            self.on_step(record)

    def _parts(self, seconds: float) -> dict[str, float]:
        """Of what overlaps (a unit opened inside another's context) nothing counts twice."""
        spans: dict[str, list[tuple[float, float]]] = {name: [] for name in (*PARTS, *COLLECTIVES)}
        for name, _, start, stop, _ in self._intervals:
            spans.setdefault(name, []).append((start, stop))
        parts = {name: _length(spans[name]) for name in PARTS}
        parts["compute"] -= _overlap(spans["compute"], spans["gather"])
        communication = [span for name in COLLECTIVES for span in spans[name]]
        waits = spans["gather"] + spans["reduce"]
        return {
            **parts,
            "other": seconds - sum(parts.values()),
            "communication": _length(communication),
            "hidden": _length(communication) - _overlap(communication, waits),
        }

    def _draw(self, start: float, stop: float) -> None:
        assert self._chrome is not None
        rank = self.model.rank
        drawn = [_span(f"step {self.steps}", "step", rank, 3, start, stop, {})]
        for name, unit, begun, ended, detail in self._intervals:
            track = TRACKS.get(detail, 0)
            shown = f"{name} {unit}" if track or not detail else f"{detail} {unit}"
            wait = " (wait)" if name in ("gather", "reduce") else ""
            drawn.append(_span(shown + wait, name, rank, track, begun, ended, {"step": self.steps}))
        self._chrome.write("".join(",\n" + json.dumps(event) for event in drawn))
        self._chrome.flush()


def memory(model: ShardedModel) -> dict[str, int]:
    """Bytes: `rss` and `peak_rss` of this process, and of CuPy's pool where the model is on a GPU."""
    found: dict[str, int] = {}
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("VmRSS", "VmHWM"):
                found["rss" if name == "VmRSS" else "peak_rss"] = int(value.split()[0]) * 1024
    except FileNotFoundError:  # not Linux
        pass
    if model.runtime.xp.__name__ == "cupy":
        pool = model.runtime.xp.get_default_memory_pool()
        found["gpu_used"], found["gpu_reserved"] = pool.used_bytes(), pool.total_bytes()
    return found


def _open(path: str | Path | None, model: ShardedModel, mode: str) -> IO[str] | None:
    if path is None or ("{rank}" not in str(path) and model.rank != 0):
        return None
    return open(str(path).replace("{rank}", str(model.rank)), mode, encoding="utf-8")


def _counts(model: ShardedModel) -> dict[str, float]:
    counters = model.counters
    sent = sum(getattr(counters, f"{name}_bytes") for name in COLLECTIVES)
    return {**counters.calls(), "bytes_sent": sent}


def _names(model: ShardedModel) -> list[dict[str, Any]]:
    def name(what: str, track: int, value: str) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": model.rank, "tid": track, "args": {"name": value}}

    tracks = {"steps": 3, "compute": 0, "gather stream": 1, "reduce stream": 2}
    return [name("process_name", 0, f"rank {model.rank}")] + [
        name("thread_name", track, text) for text, track in tracks.items()
    ]


def _span(
    name: str, category: str, rank: int, track: int, start: float, stop: float, more: dict[str, Any]
) -> dict[str, Any]:
    """A complete event; Chrome's times are in microseconds."""
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": rank,
        "tid": track,
        "ts": 1e6 * start,
        "dur": 1e6 * (stop - start),
        "args": more,
    }


# --- intervals ----------------------------------------------------------------------------------------------


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    return joined


def _length(spans: list[tuple[float, float]]) -> float:
    """Seconds that at least one covers."""
    return sum(stop - start for start, stop in _union(spans))


def _overlap(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    """Seconds that both cover."""
    return _length(one) + _length(other) - _length(one + other)

"""A progress bar for training programs, which run in a terminal, in a notebook or into a log."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

__all__ = ["progress_bar"]


@contextlib.contextmanager
def progress_bar(title: str, steps: int) -> Iterator[Callable[[int, float], None]]:
    """Gives `show(step, loss)`: a bar on a terminal; elsewhere, as in a log, a line now and then.

    Of steps 0 to `steps` - 1, or of the last of them.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        said: list[int] = []
        every = max(1, steps // 4)

        def say(step: int, loss: float) -> None:
            if not said or step == steps - 1 or (step + 1) % every == 0:
                said.append(step)
                print(f"{title}  step {step + 1} of {steps}  loss {loss:.4f}", file=sys.stderr, flush=True)

        yield say
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.4f}"), console=console) as bar:
        task = bar.add_task(title, total=steps, loss=float("nan"))
        yield lambda step, loss: bar.update(task, completed=step + 1, loss=loss)

"""All ranks together, or none: an error of one rank becomes an error of every rank.

Whoever changes state on several ranks first looks, then calls `agree`, then changes. Knows nothing of what is
agreed on.
"""

from __future__ import annotations

from typing import Any

from .walk import PhaseError

__all__ = ["CheckpointError", "DifferentModelError", "NoCheckpointError", "agree"]


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read. The message names the file and what to do."""


class DifferentModelError(CheckpointError, ValueError):
    """A checkpoint of another model or optimizer. The message names the first parameter that differs."""


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """There is no complete checkpoint where one was looked for."""


# What other ranks raise for an error of this rank, by the first row that it is an instance of.
_KINDS: dict[str, type[Exception]] = {
    "different model": DifferentModelError,
    "no checkpoint": NoCheckpointError,
    "checkpoint": CheckpointError,
    "phase": PhaseError,
    "exists": FileExistsError,
    "system": OSError,
    "type": TypeError,
    "value": ValueError,
    "other": RuntimeError,
}


def agree(comm: Any, error: Exception | None = None, value: Any = None) -> list[Any]:
    """Everybody's `value`, by rank; or, if any rank has an error, that error on every rank.

    Collective. A rank raises its own error; a rank that has none raises the first other rank's, of the same
    kind, with the rank in front. `value` is data, as for `comm.all_gather_object`.
    """
    failure = None if error is None else _described(error)
    everybody = comm.all_gather_object([failure, value if error is None else None])
    if error is not None:
        raise error
    for rank, (theirs, _) in enumerate(everybody):
        if theirs is not None:
            kind, text = theirs
            raise _KINDS[kind](f"rank {rank}: {text}")
    return [theirs for _, theirs in everybody]


def _described(error: Exception) -> list[str]:
    kind = next((name for name, cls in _KINDS.items() if isinstance(error, cls)), "other")
    return [kind, f"{type(error).__name__}: {error}" if kind == "other" else str(error)]

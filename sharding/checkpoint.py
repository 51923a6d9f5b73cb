"""Checkpoints: save at any number of ranks, resume at any other; whole or not at all.

>>> save("checkpoints", model, opt, user={"tokens": tokens}, keep_last=3)          # doctest: +SKIP
>>> tokens = load("checkpoints", model, opt).user["tokens"]                        # doctest: +SKIP

A checkpoint is a folder, step-00000012, of one safetensors file per rank and an index (`index.py`). It is
made under another name and renamed when all of it is on the disk (`store.py`). Two rules hold throughout:
first everybody looks, then all agree, then everybody changes, so that an error of one rank is an error of
every rank with nothing changed; and nothing is ever pickled.
"""

from .agreement import CheckpointError, DifferentModelError, NoCheckpointError
from .loading import Loaded, load
from .saving import SavedOptimizer, SaveHandle, save, save_async
from .store import saved_steps

__all__ = [
    "CheckpointError",
    "DifferentModelError",
    "Loaded",
    "NoCheckpointError",
    "SaveHandle",
    "SavedOptimizer",
    "saved_steps",
    "load",
    "save",
    "save_async",
]

"""NCCL's collectives in Python: over NVIDIA's libnccl on GPUs, over pynccl's host library elsewhere.

>>> import numpy as np, pynccl                                 # doctest: +SKIP
>>> with pynccl.init() as comm:                                # doctest: +SKIP
...     x = np.full(4, comm.rank, "f4")
...     comm.all_reduce(x)
"""

from ._version import __version__
from .abi.errors import (
    InProgressError,
    InternalError,
    InvalidArgumentError,
    InvalidUsageError,
    LibraryNotFoundError,
    MissingFunctionError,
    NcclError,
    NcclSystemError,
    NcclTimeoutError,
    RemoteError,
    UnhandledCudaError,
)
from .communicator import Communicator
from .config import UniqueId, get_unique_id
from .elements import ReduceOp
from .group import Group, group
from .memory import Registered, Window
from .premul import PreMulSum
from .prepared import Prepared
from .startup import init
from .streams import Event, Stream

__all__ = [
    "Communicator",
    "Event",
    "Group",
    "InProgressError",
    "InternalError",
    "InvalidArgumentError",
    "InvalidUsageError",
    "LibraryNotFoundError",
    "MissingFunctionError",
    "NcclError",
    "NcclSystemError",
    "NcclTimeoutError",
    "PreMulSum",
    "Prepared",
    "ReduceOp",
    "Registered",
    "RemoteError",
    "Stream",
    "UnhandledCudaError",
    "UniqueId",
    "Window",
    "__version__",
    "get_unique_id",
    "group",
    "init",
]

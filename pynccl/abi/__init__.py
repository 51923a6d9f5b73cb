"""The thin ctypes wrapper: NCCL's C interface, one to one, over any library that has it.

``prototypes`` is the table of functions, ``enums`` and ``types`` the numbers and structures, ``library``
finds and opens, ``errors`` turns result codes into exceptions. Imports neither NumPy nor CuPy.
"""

from pynccl.abi.driver import Gpu, Gpus, gpus
from pynccl.abi.enums import (
    CommMemStat,
    DataType,
    EncryptionMode,
    HostCftMode,
    NvlsHostMode,
    RedOp,
    Result,
    ScalarResidence,
)
from pynccl.abi.errors import (
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
    check,
)
from pynccl.abi.library import Choice, Library, choose, load, version_code, version_string
from pynccl.abi.prototypes import HOST_PROTOTYPES, PROTOTYPES, Argument, Prototype
from pynccl.abi.types import (
    ncclCollConfig_t,
    ncclConfig_t,
    ncclConfigExt_t,
    ncclEncryptionConfig_t,
    ncclSimInfo_t,
    ncclUniqueId,
    ncclWaitSignalDesc_t,
)

__all__ = [
    "HOST_PROTOTYPES",
    "PROTOTYPES",
    "Argument",
    "Choice",
    "CommMemStat",
    "DataType",
    "EncryptionMode",
    "Gpu",
    "Gpus",
    "HostCftMode",
    "InProgressError",
    "InternalError",
    "InvalidArgumentError",
    "InvalidUsageError",
    "Library",
    "LibraryNotFoundError",
    "MissingFunctionError",
    "NcclError",
    "NcclSystemError",
    "NcclTimeoutError",
    "NvlsHostMode",
    "Prototype",
    "RedOp",
    "RemoteError",
    "Result",
    "ScalarResidence",
    "UnhandledCudaError",
    "check",
    "choose",
    "gpus",
    "load",
    "ncclCollConfig_t",
    "ncclConfigExt_t",
    "ncclConfig_t",
    "ncclEncryptionConfig_t",
    "ncclSimInfo_t",
    "ncclUniqueId",
    "ncclWaitSignalDesc_t",
    "version_code",
    "version_string",
]

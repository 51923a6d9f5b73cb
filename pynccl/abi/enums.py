"""Every enum and numeric constant of NCCL's header, under Python names.

Owned here: the numbers. ``CONSTANTS`` and ``ENUMS`` say which C name each of them has in ``nccl.h``; the
header check, the C compiler check and the coverage page all read those two tables. Nothing here knows how to
call anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType

INT_MIN, INT_MAX = -(2**31), 2**31 - 1

# The header release that every table of this package describes.
NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH = 2, 32, 3
NCCL_SUFFIX = ""
NCCL_VERSION_CODE = 23203

NCCL_COMM_NULL = None
NCCL_UNIQUE_ID_BYTES = 128

# "Not set": the library then uses its own default. Zero is a value, not "unset".
NCCL_CONFIG_UNDEF_INT = INT_MIN
NCCL_CONFIG_UNDEF_PTR = None
NCCL_UNDEF_FLOAT = -1.0

NCCL_API_MAGIC = 0xCAFEBEEF
NCCL_SPLIT_NOCOLOR = -1

NCCL_WIN_DEFAULT = 0x00
NCCL_WIN_COLL_SYMMETRIC = 0x01
NCCL_WIN_STRICT_ORDERING = 0x02
NCCL_WIN_GIN_ONLY = 0x04
NCCL_WIN_CFT_COUNTED = 0x08
NCCL_WIN_REQUIRED_ALIGNMENT = 4096

NCCL_CTA_POLICY_DEFAULT = 0x00
NCCL_CTA_POLICY_EFFICIENCY = 0x01
NCCL_CTA_POLICY_ZERO = 0x02

NCCL_SHRINK_DEFAULT = 0x00
NCCL_SHRINK_ABORT = 0x01
NCCL_REVOKE_DEFAULT = 0x00
NCCL_SUSPEND_MEM = 0x01

#: C macro name -> value (None is the C NULL), for every constant above that the header defines.
CONSTANTS: Mapping[str, int | float | str | None] = MappingProxyType(
    {name: value for name, value in list(globals().items()) if name.startswith("NCCL_")}
)

# Markers that close an enum in C. They are not results, operations or types, so no enum below has them as
# members.
NUM_RESULTS = 9
NUM_OPS = 5  # also the smallest handle of a user-defined reduction
MAX_RED_OP = 0x7FFFFFFF
NUM_TYPES = 12


class Result(IntEnum):
    """What every call returns. ``IN_PROGRESS`` is not an error."""

    SUCCESS = 0
    UNHANDLED_CUDA_ERROR = 1
    SYSTEM_ERROR = 2
    INTERNAL_ERROR = 3
    INVALID_ARGUMENT = 4
    INVALID_USAGE = 5
    REMOTE_ERROR = 6
    IN_PROGRESS = 7
    TIMEOUT = 8


class RedOp(IntEnum):
    """The built-in reductions. Handles of user-defined ones start at ``NUM_OPS``."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


class DataType(IntEnum):
    """The twelve element types. There is no 16-bit integer, no bool and no complex type in NCCL."""

    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT8E4M3 = 10
    FLOAT8E5M2 = 11

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEM_SIZES[self]


_ITEM_SIZES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)  # indexed by the DataType value


class ScalarResidence(IntEnum):
    """Where the scalar of a user-defined reduction lies, and so when it is read."""

    DEVICE = 0
    HOST_IMMEDIATE = 1


class CommMemStat(IntEnum):
    """What ``ncclCommMemStats`` can report: bytes, except ``GPU_MEM_SUSPENDED`` (0 or 1)."""

    GPU_MEM_SUSPEND = 0
    GPU_MEM_SUSPENDED = 1
    GPU_MEM_PERSIST = 2
    GPU_MEM_TOTAL = 3


class EncryptionMode(IntEnum):
    """Encryption of NCCL's TCP sockets: plain text, or a pre-shared key."""

    NONE = 0
    PSK = 1


class HostCftMode(IntEnum):
    """Values of ``ncclConfig_t.hostCftMode``."""

    DEFAULT = INT_MIN
    ENABLE = 1
    DISABLE = 2
    FALLBACK = 3


class NvlsHostMode(IntEnum):
    """Values of ``ncclConfig_t.nvlsHostMode``; the two ``DISABLE_...`` bits may be combined."""

    DEFAULT = INT_MIN
    ENABLE = 0
    DISABLE_TRANSPORT = 1
    DISABLE_SYMMETRIC_MULTIMEM = 2
    DISABLE = INT_MAX


#: C enum type -> {C enumerator: value}, complete and in the header's order.
ENUMS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "ncclResult_t": {
            "ncclSuccess": Result.SUCCESS,
            "ncclUnhandledCudaError": Result.UNHANDLED_CUDA_ERROR,
            "ncclSystemError": Result.SYSTEM_ERROR,
            "ncclInternalError": Result.INTERNAL_ERROR,
            "ncclInvalidArgument": Result.INVALID_ARGUMENT,
            "ncclInvalidUsage": Result.INVALID_USAGE,
            "ncclRemoteError": Result.REMOTE_ERROR,
            "ncclInProgress": Result.IN_PROGRESS,
            "ncclTimeout": Result.TIMEOUT,
            "ncclNumResults": NUM_RESULTS,
        },
        "ncclHostCftMode_t": {
            "ncclHostCftDefault": HostCftMode.DEFAULT,
            "ncclHostCftEnable": HostCftMode.ENABLE,
            "ncclHostCftDisable": HostCftMode.DISABLE,
            "ncclHostCftFallback": HostCftMode.FALLBACK,
        },
        "ncclNvlsHostMode_t": {
            "ncclNvlsHostModeDefault": NvlsHostMode.DEFAULT,
            "ncclNvlsHostModeEnable": NvlsHostMode.ENABLE,
            "ncclNvlsHostModeDisableTransport": NvlsHostMode.DISABLE_TRANSPORT,
            "ncclNvlsHostModeDisableSymmetricMultimem": NvlsHostMode.DISABLE_SYMMETRIC_MULTIMEM,
            "ncclNvlsHostModeDisable": NvlsHostMode.DISABLE,
        },
        "ncclCommMemStat_t": {
            "ncclStatGpuMemSuspend": CommMemStat.GPU_MEM_SUSPEND,
            "ncclStatGpuMemSuspended": CommMemStat.GPU_MEM_SUSPENDED,
            "ncclStatGpuMemPersist": CommMemStat.GPU_MEM_PERSIST,
            "ncclStatGpuMemTotal": CommMemStat.GPU_MEM_TOTAL,
        },
        "ncclRedOp_dummy_t": {"ncclNumOps_dummy": NUM_OPS},
        "ncclRedOp_t": {
            "ncclSum": RedOp.SUM,
            "ncclProd": RedOp.PROD,
            "ncclMax": RedOp.MAX,
            "ncclMin": RedOp.MIN,
            "ncclAvg": RedOp.AVG,
            "ncclNumOps": NUM_OPS,
            "ncclMaxRedOp": MAX_RED_OP,
        },
        "ncclDataType_t": {
            "ncclInt8": DataType.INT8,
            "ncclChar": DataType.INT8,
            "ncclUint8": DataType.UINT8,
            "ncclInt32": DataType.INT32,
            "ncclInt": DataType.INT32,
            "ncclUint32": DataType.UINT32,
            "ncclInt64": DataType.INT64,
            "ncclUint64": DataType.UINT64,
            "ncclFloat16": DataType.FLOAT16,
            "ncclHalf": DataType.FLOAT16,
            "ncclFloat32": DataType.FLOAT32,
            "ncclFloat": DataType.FLOAT32,
            "ncclFloat64": DataType.FLOAT64,
            "ncclDouble": DataType.FLOAT64,
            "ncclBfloat16": DataType.BFLOAT16,
            "ncclFloat8e4m3": DataType.FLOAT8E4M3,
            "ncclFloat8e5m2": DataType.FLOAT8E5M2,
            "ncclNumTypes": NUM_TYPES,
        },
        "ncclScalarResidence_t": {
            "ncclScalarDevice": ScalarResidence.DEVICE,
            "ncclScalarHostImmediate": ScalarResidence.HOST_IMMEDIATE,
        },
        "ncclEncryptionMode_t": {
            "NCCL_ENCRYPTION_MODE_NONE": EncryptionMode.NONE,
            "NCCL_ENCRYPTION_MODE_PSK": EncryptionMode.PSK,
        },
    }
)

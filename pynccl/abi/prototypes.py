"""The one table of functions: name, result, arguments, and the release each appeared in.

Read it line by line against ``nccl.h``: the declarations are written as C, and the ctypes signatures are
looked up from that text in ``types.C_TYPES``. The loader, the header check, ``docs/api-coverage.md`` and
``python -m pynccl`` derive from it. Why ctypes: nothing to compile, no CUDA headers, and one table serves
every library that speaks this ABI.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from pynccl.abi.types import C_TYPES


class Argument(NamedTuple):
    """One argument: its name in C, the ctypes type, and the C type as the header writes it."""

    name: str
    ctype: Any
    text: str


@dataclass(frozen=True)
class Prototype:
    """One C function. ``since`` is the first release with it: of NCCL, or of pynccl for ``pynccl...``."""

    name: str
    result: str
    args: tuple[Argument, ...]
    since: str
    topic: str

    @property
    def restype(self) -> Any:
        return C_TYPES[_bare(self.result)]

    @property
    def argtypes(self) -> list[Any]:
        return [arg.ctype for arg in self.args]

    @property
    def declaration(self) -> str:
        """The function as a C declaration, without the semicolon."""
        return (
            f"{self.result} {self.name}({', '.join(f'{arg.text} {arg.name}' for arg in self.args) or 'void'})"
        )


def _bare(text: str) -> str:
    """A C type without the qualifier that ctypes has no word for."""
    return text.removeprefix("const ")


def _prototypes(text: str) -> Mapping[str, Prototype]:
    """Parse ``since declaration;`` rows under ``# topic`` lines; a row or type not understood is an error."""
    table = {}
    for section in re.split(r"^# ", text, flags=re.MULTILINE)[1:]:
        topic, _, rows = section.partition("\n")
        for row in rows.split(";")[:-1]:
            match = re.fullmatch(r"(\S+) (.+) (\w+)\((.*)\)", " ".join(row.split()))
            if match is None:
                raise ValueError(f"not a row of the table: {row.strip()}")
            since, result, name, arguments = match.groups()
            pairs = [part.rsplit(" ", 1) for part in arguments.split(", ") if part]
            args = tuple(Argument(arg, C_TYPES[_bare(c_type)], c_type) for c_type, arg in pairs)
            table[name] = Prototype(name, result, args, since, topic)
    return MappingProxyType(table)


#: The 73 host functions of NCCL 2.32.3. "2.3.5" is the oldest public header, so it stands for "always".
PROTOTYPES = _prototypes("""
# version and errors
2.3.5   ncclResult_t ncclGetVersion(int* version);
2.3.5   const char* ncclGetErrorString(ncclResult_t result);
2.13    const char* ncclGetLastError(ncclComm_t comm);
2.4     ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* asyncError);
2.24    void ncclResetDebugInit();

# making communicators
2.3.5   ncclResult_t ncclGetUniqueId(ncclUniqueId* uniqueId);
2.3.5   ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank);
2.14    ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank,
            ncclConfig_t* config);
2.23    ncclResult_t ncclCommInitRankScalable(ncclComm_t* newcomm, int nranks, int myrank, int nId,
            ncclUniqueId* commIds, ncclConfig_t* config);
2.3.5   ncclResult_t ncclCommInitAll(ncclComm_t* comm, int ndev, const int* devlist);
2.18    ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm,
            ncclConfig_t* config);
2.27    ncclResult_t ncclCommShrink(ncclComm_t comm, int* excludeRanksList, int excludeRanksCount,
            ncclComm_t* newcomm, ncclConfig_t* config, int shrinkFlags);
2.29    ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId* uniqueId);
2.29    ncclResult_t ncclCommGrow(ncclComm_t comm, int nRanks, const ncclUniqueId* uniqueId, int rank,
            ncclComm_t* newcomm, ncclConfig_t* config);

# asking communicators
2.3.5   ncclResult_t ncclCommCount(const ncclComm_t comm, int* count);
2.3.5   ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device);
2.3.5   ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank);
2.29.7  ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value);

# ending communicators
2.14    ncclResult_t ncclCommFinalize(ncclComm_t comm);
2.3.5   ncclResult_t ncclCommDestroy(ncclComm_t comm);
2.4     ncclResult_t ncclCommAbort(ncclComm_t comm);
2.28.7  ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags);
2.29.7  ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags);
2.29.7  ncclResult_t ncclCommResume(ncclComm_t comm);

# collectives
2.3.5   ncclResult_t ncclReduce(const void* sendbuff, void* recvbuff, size_t count,
            ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream);
2.3.5   ncclResult_t ncclBroadcast(const void* sendbuff, void* recvbuff, size_t count,
            ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream);
2.3.5   ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count,
            ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
2.3.5   ncclResult_t ncclReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount,
            ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
2.3.5   ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount,
            ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream);
2.28    ncclResult_t ncclAlltoAll(const void* sendbuff, void* recvbuff, size_t count,
            ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream);
2.28    ncclResult_t ncclGather(const void* sendbuff, void* recvbuff, size_t count,
            ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream);
2.28    ncclResult_t ncclScatter(const void* sendbuff, void* recvbuff, size_t count,
            ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream);
2.3.5   ncclResult_t ncclBcast(void* buff, size_t count, ncclDataType_t datatype, int root,
            ncclComm_t comm, cudaStream_t stream);

# collectives with a configuration
2.31    ncclResult_t ncclReduceConfig(const void* sendbuff, void* recvbuff, size_t count,
            ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream,
            const ncclCollConfig_t* config);
2.31    ncclResult_t ncclBroadcastConfig(const void* sendbuff, void* recvbuff, size_t count,
            ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream,
            const ncclCollConfig_t* config);
2.31    ncclResult_t ncclAllReduceConfig(const void* sendbuff, void* recvbuff, size_t count,
            ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream,
            const ncclCollConfig_t* config);
2.31    ncclResult_t ncclReduceScatterConfig(const void* sendbuff, void* recvbuff, size_t recvcount,
            ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream,
            const ncclCollConfig_t* config);
2.31    ncclResult_t ncclAllGatherConfig(const void* sendbuff, void* recvbuff, size_t sendcount,
            ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream,
            const ncclCollConfig_t* config);
2.31    ncclResult_t ncclAlltoAllConfig(const void* sendbuff, void* recvbuff, size_t count,
            ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream,
            const ncclCollConfig_t* config);
2.31    ncclResult_t ncclGatherConfig(const void* sendbuff, void* recvbuff, size_t count,
            ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream,
            const ncclCollConfig_t* config);
2.31    ncclResult_t ncclScatterConfig(const void* sendbuff, void* recvbuff, size_t count,
            ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream,
            const ncclCollConfig_t* config);

# point to point
2.7     ncclResult_t ncclSend(const void* sendbuff, size_t count, ncclDataType_t datatype, int peer,
            ncclComm_t comm, cudaStream_t stream);
2.7     ncclResult_t ncclRecv(void* recvbuff, size_t count, ncclDataType_t datatype, int peer,
            ncclComm_t comm, cudaStream_t stream);

# one-sided
2.29    ncclResult_t ncclPutSignal(const void* localbuff, size_t count, ncclDataType_t datatype,
            int peer, ncclWindow_t peerWin, size_t peerWinOffset, int sigIdx, int ctx,
            unsigned int flags, ncclComm_t comm, cudaStream_t stream);
2.29    ncclResult_t ncclSignal(int peer, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm,
            cudaStream_t stream);
2.29    ncclResult_t ncclWaitSignal(int nDesc, ncclWaitSignalDesc_t* signalDescs, ncclComm_t comm,
            cudaStream_t stream);

# groups
2.3.5   ncclResult_t ncclGroupStart();
2.3.5   ncclResult_t ncclGroupEnd();
2.22    ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* simInfo);

# memory
2.19    ncclResult_t ncclMemAlloc(void** ptr, size_t size);
2.19    ncclResult_t ncclMemFree(void* ptr);
2.19    ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buff, size_t size, void** handle);
2.19    ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle);
2.27    ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win,
            int winFlags);
2.27    ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win);
2.29    ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t win, void** outUserPtr);

# user-defined reductions
2.11    ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t datatype,
            ncclScalarResidence_t residence, ncclComm_t comm);
2.11    ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm);

# encryption
2.32    ncclResult_t ncclSetEncryption(const ncclEncryptionConfig_t* config);

# parameters
2.30.4  ncclResult_t ncclParamBind(ncclParamHandle_t* out, const char* key);
2.30.4  ncclResult_t ncclParamGetI8(ncclParamHandle_t h, int8_t* out);
2.30.4  ncclResult_t ncclParamGetI16(ncclParamHandle_t h, int16_t* out);
2.30.4  ncclResult_t ncclParamGetI32(ncclParamHandle_t h, int32_t* out);
2.30.4  ncclResult_t ncclParamGetI64(ncclParamHandle_t h, int64_t* out);
2.30.4  ncclResult_t ncclParamGetU8(ncclParamHandle_t h, uint8_t* out);
2.30.4  ncclResult_t ncclParamGetU16(ncclParamHandle_t h, uint16_t* out);
2.30.4  ncclResult_t ncclParamGetU32(ncclParamHandle_t h, uint32_t* out);
2.30.4  ncclResult_t ncclParamGetU64(ncclParamHandle_t h, uint64_t* out);
2.30.4  ncclResult_t ncclParamGetStr(ncclParamHandle_t h, const char** out);
2.30.4  ncclResult_t ncclParamGet(ncclParamHandle_t h, void* out, int maxLen, int* len);
2.30.4  ncclResult_t ncclParamGetParameter(const char* key, const char** value, int* valueLen);
2.30.4  ncclResult_t ncclParamGetAllParameterKeys(const char*** table, int* tableLen);
2.30.4  void ncclParamDumpAll();
""")

#: What only pynccl's host library has: streams and events in host memory, and its deadline.
HOST_PROTOTYPES = _prototypes("""
# host library
0.1.0   const char* pyncclVersion();
0.1.0   ncclResult_t pyncclSetTimeout(ncclComm_t comm, double seconds);
0.1.0   ncclResult_t pyncclCommName(ncclComm_t comm, const char** name);
0.1.0   ncclResult_t pyncclSetInterruptCheck(pyncclInterruptCheck_t check);

# host streams
0.1.0   ncclResult_t pyncclStreamCreate(void** stream);
0.1.0   ncclResult_t pyncclStreamDestroy(void* stream);
0.1.0   ncclResult_t pyncclStreamSynchronize(void* stream, double timeout_seconds);
0.1.0   ncclResult_t pyncclStreamQuery(void* stream);
0.1.0   ncclResult_t pyncclStreamProgress(void* stream, uint64_t* enqueued, uint64_t* completed);
0.1.0   ncclResult_t pyncclStreamWaitEvent(void* stream, void* event);
0.1.0   ncclResult_t pyncclStreamLaunchHostFunc(void* stream, pyncclHostFn_t fn, void* arg);
0.1.0   ncclResult_t pyncclStreamStopHostFuncs();

# host events
0.1.0   ncclResult_t pyncclEventCreate(void** event);
0.1.0   ncclResult_t pyncclEventDestroy(void* event);
0.1.0   ncclResult_t pyncclEventRecord(void* event, void* stream);
0.1.0   ncclResult_t pyncclEventSynchronize(void* event, double timeout_seconds);
0.1.0   ncclResult_t pyncclEventQuery(void* event);

# collectives from a record
0.1.0   ncclResult_t pyncclAgree(unsigned int number, ncclComm_t comm, cudaStream_t stream);
0.1.0   ncclResult_t pyncclCall(const pyncclCall_t* call);
0.1.0   void* pyncclFunctionOfArrays(const pyncclPython_t* python, void* address);
0.1.0   void* pyncclFunctionOfCall(const pyncclPython_t* python, void* address);

# schedules
0.1.0   ncclResult_t pyncclRunSchedule(const pyncclSchedule_t* schedule, const void* sendbuff,
            void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
            cudaStream_t stream);
""")

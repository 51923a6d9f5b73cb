/* The ABI of NCCL 2.32.3 as this library offers it: the same names, values, struct layouts and signatures as NVIDIA's nccl.h,
 * declared here without any CUDA header (a cudaStream_t is an opaque pointer). tests/test_abi_header.py holds both against each other.
 * Below the 73 functions stand the host library's own pyncclXxx functions: streams, events, time-outs. */
#ifndef PYNCCL_NCCL_ABI_H
#define PYNCCL_NCCL_ABI_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#define NCCL_API __attribute__((visibility("default")))

/* NCCL exports each function under a second name, pnccl...; this stands in the file that defines the first. */
#define PNCCL(name) extern __typeof__(name) p##name __attribute__((alias(#name), visibility("default")))

#define NCCL_VERSION_CODE 23203

typedef struct ncclComm *ncclComm_t;
typedef struct ncclWindow_vidmem *ncclWindow_t;
typedef struct ncclParamHandle *ncclParamHandle_t;
typedef void *cudaStream_t;
typedef void *cudaEvent_t;

#define NCCL_UNIQUE_ID_BYTES 128
typedef struct {
  char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
  ncclTimeout = 8,
  ncclNumResults = 9
} ncclResult_t;

#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_UNDEF_PTR NULL
#define NCCL_SPLIT_NOCOLOR -1
#define NCCL_UNDEF_FLOAT -1.0f
#define NCCL_API_MAGIC 0xcafebeef
#define NCCL_SIM_INFO_MAGIC 0x74685283
#define NCCL_WIN_REQUIRED_ALIGNMENT 4096
#define NCCL_SHRINK_DEFAULT 0x00
#define NCCL_SHRINK_ABORT 0x01
#define NCCL_REVOKE_DEFAULT 0x00

typedef struct {
  size_t size;
  unsigned int magic, version;
  int blocking, cgaClusterSize, minCTAs, maxCTAs;
  const char *netName;
  int splitShare, trafficClass;
  const char *commName;
  int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs, nChannelsPerNetPeer, nvlinkCentricSched, graphUsageMode, numRmaCtx;
  int maxP2pPeers, graphStreamOrdering, launchOrderImplicit, numRmaSig, rmaEagerInit, hostCftMode, nvlsHostMode;
} ncclConfig_t;

typedef struct ncclConfigExt {
  struct ncclConfigExt *next;
  struct {
    int vendorId, optionId;
  } key;
  union {
    int i;
    const char *s;
    void *raw;
  } val;
} ncclConfigExt_t;

typedef struct {
  size_t size;
  unsigned int magic, version;
  ncclConfigExt_t *ext;
  int minCTAs, maxCTAs, nvlsCTAs, cgaClusterSize;
  const char *algSelection;
  int forceAlgSelection, CTAPolicy;
  uint64_t userProfilerTag;
  cudaEvent_t launchCompletionEvent;
} ncclCollConfig_t;

typedef struct {
  size_t size;
  unsigned int magic, version;
  float estimatedTime;
} ncclSimInfo_t;

typedef struct {
  size_t size;
  unsigned int magic, version;
  int mode;
  const char *psk;
} ncclEncryptionConfig_t;

typedef struct {
  int opCnt, peer, sigIdx, ctx;
} ncclWaitSignalDesc_t;

typedef enum {
  ncclStatGpuMemSuspend = 0,
  ncclStatGpuMemSuspended = 1,
  ncclStatGpuMemPersist = 2,
  ncclStatGpuMemTotal = 3
} ncclCommMemStat_t;

typedef enum {
  ncclSum = 0,
  ncclProd = 1,
  ncclMax = 2,
  ncclMin = 3,
  ncclAvg = 4,
  ncclNumOps = 5,
  ncclMaxRedOp = 0x7fffffff
} ncclRedOp_t;

typedef enum {
  ncclInt8 = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclFloat32 = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9,
  ncclFloat8e4m3 = 10,
  ncclFloat8e5m2 = 11,
  ncclNumTypes = 12
} ncclDataType_t;

typedef enum {
  ncclScalarDevice = 0,
  ncclScalarHostImmediate = 1
} ncclScalarResidence_t;

NCCL_API ncclResult_t ncclMemAlloc(void **ptr, size_t size);
NCCL_API ncclResult_t ncclMemFree(void *ptr);
NCCL_API ncclResult_t ncclGetVersion(int *version);
NCCL_API ncclResult_t ncclGetUniqueId(ncclUniqueId *uniqueId);
NCCL_API ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t
    *config);
NCCL_API ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank);
NCCL_API ncclResult_t ncclCommInitAll(ncclComm_t *comm, int ndev, const int *devlist);
NCCL_API ncclResult_t ncclCommFinalize(ncclComm_t comm);
NCCL_API ncclResult_t ncclCommDestroy(ncclComm_t comm);
NCCL_API ncclResult_t ncclCommAbort(ncclComm_t comm);
NCCL_API ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags);
NCCL_API ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config);
NCCL_API ncclResult_t ncclCommShrink(ncclComm_t comm, int *excludeRanksList, int excludeRanksCount, ncclComm_t
    *newcomm, ncclConfig_t *config, int shrinkFlags);
NCCL_API ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId *uniqueId);
NCCL_API ncclResult_t ncclCommGrow(ncclComm_t comm, int nRanks, const ncclUniqueId *uniqueId, int rank, ncclComm_t
    *newcomm, ncclConfig_t *config);
NCCL_API ncclResult_t ncclCommInitRankScalable(ncclComm_t *newcomm, int nranks, int myrank, int nId, ncclUniqueId
    *commIds, ncclConfig_t *config);
NCCL_API const char *ncclGetErrorString(ncclResult_t result);
NCCL_API const char *ncclGetLastError(ncclComm_t comm);
NCCL_API void ncclResetDebugInit(void);
NCCL_API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError);
NCCL_API ncclResult_t ncclCommCount(const ncclComm_t comm, int *count);
NCCL_API ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device);
NCCL_API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank);
NCCL_API ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buff, size_t size, void **handle);
NCCL_API ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle);
NCCL_API ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags);
NCCL_API ncclResult_t ncclCommResume(ncclComm_t comm);
NCCL_API ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t *value);
NCCL_API ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win, int
    winFlags);
NCCL_API ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win);
NCCL_API ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t win, void **outUserPtr);
NCCL_API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype,
    ncclScalarResidence_t residence, ncclComm_t comm);
NCCL_API ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm);
NCCL_API ncclResult_t ncclReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream);
NCCL_API ncclResult_t ncclBcast(void *buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
    cudaStream_t stream);
NCCL_API ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int
    root, ncclComm_t comm, cudaStream_t stream);
NCCL_API ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
NCCL_API ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount, ncclDataType_t
    datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
NCCL_API ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype,
    ncclComm_t comm, cudaStream_t stream);
NCCL_API ncclResult_t ncclAlltoAll(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    ncclComm_t comm, cudaStream_t stream);
NCCL_API ncclResult_t ncclGather(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int
    root, ncclComm_t comm, cudaStream_t stream);
NCCL_API ncclResult_t ncclScatter(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int
    root, ncclComm_t comm, cudaStream_t stream);
NCCL_API ncclResult_t ncclAllReduceConfig(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config);
NCCL_API ncclResult_t ncclBroadcastConfig(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config);
NCCL_API ncclResult_t ncclReduceConfig(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config);
NCCL_API ncclResult_t ncclAllGatherConfig(const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t
    datatype, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config);
NCCL_API ncclResult_t ncclReduceScatterConfig(const void *sendbuff, void *recvbuff, size_t recvcount, ncclDataType_t
    datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config);
NCCL_API ncclResult_t ncclAlltoAllConfig(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config);
NCCL_API ncclResult_t ncclGatherConfig(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config);
NCCL_API ncclResult_t ncclScatterConfig(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config);
NCCL_API ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
    cudaStream_t stream);
NCCL_API ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
    cudaStream_t stream);
NCCL_API ncclResult_t ncclPutSignal(const void *localbuff, size_t count, ncclDataType_t datatype, int peer,
    ncclWindow_t peerWin, size_t peerWinOffset, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t
    stream);
NCCL_API ncclResult_t ncclSignal(int peer, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t
    stream);
NCCL_API ncclResult_t ncclWaitSignal(int nDesc, ncclWaitSignalDesc_t *signalDescs, ncclComm_t comm, cudaStream_t
    stream);
NCCL_API ncclResult_t ncclGroupStart(void);
NCCL_API ncclResult_t ncclGroupEnd(void);
NCCL_API ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t *simInfo);
NCCL_API ncclResult_t ncclSetEncryption(const ncclEncryptionConfig_t *config);
NCCL_API ncclResult_t ncclParamBind(ncclParamHandle_t *out, const char *key);
NCCL_API ncclResult_t ncclParamGetI8(ncclParamHandle_t h, int8_t *out);
NCCL_API ncclResult_t ncclParamGetI16(ncclParamHandle_t h, int16_t *out);
NCCL_API ncclResult_t ncclParamGetI32(ncclParamHandle_t h, int32_t *out);
NCCL_API ncclResult_t ncclParamGetI64(ncclParamHandle_t h, int64_t *out);
NCCL_API ncclResult_t ncclParamGetU8(ncclParamHandle_t h, uint8_t *out);
NCCL_API ncclResult_t ncclParamGetU16(ncclParamHandle_t h, uint16_t *out);
NCCL_API ncclResult_t ncclParamGetU32(ncclParamHandle_t h, uint32_t *out);
NCCL_API ncclResult_t ncclParamGetU64(ncclParamHandle_t h, uint64_t *out);
NCCL_API ncclResult_t ncclParamGetStr(ncclParamHandle_t h, const char* *out);
NCCL_API ncclResult_t ncclParamGet(ncclParamHandle_t h, void *out, int maxLen, int *len);
NCCL_API ncclResult_t ncclParamGetParameter(const char *key, const char* *value, int *valueLen);
NCCL_API ncclResult_t ncclParamGetAllParameterKeys(const char ***table, int *tableLen);
NCCL_API void ncclParamDumpAll(void);

/* The host library's own functions. Times are in seconds; a timeout <= 0 means PYNCCL_TIMEOUT (600 when unset). */
NCCL_API const char *pyncclVersion(void);
NCCL_API ncclResult_t pyncclSetTimeout(ncclComm_t comm, double seconds);
NCCL_API ncclResult_t pyncclCommName(ncclComm_t comm, const char **name); /* lives as long as the communicator */
NCCL_API ncclResult_t pyncclSetInterruptCheck(int (*check)(void));
NCCL_API ncclResult_t pyncclStreamCreate(void **stream);
NCCL_API ncclResult_t pyncclStreamDestroy(void *stream);
NCCL_API ncclResult_t pyncclStreamSynchronize(void *stream, double timeout);
NCCL_API ncclResult_t pyncclStreamQuery(void *stream);
NCCL_API ncclResult_t pyncclStreamProgress(void *stream, uint64_t *enqueued, uint64_t *completed);
NCCL_API ncclResult_t pyncclStreamWaitEvent(void *stream, void *event);
NCCL_API ncclResult_t pyncclStreamLaunchHostFunc(void *stream, void (*fn)(void *), void *arg);
NCCL_API ncclResult_t pyncclStreamStopHostFuncs(void); /* functions still queued on any stream are skipped from now on */
NCCL_API ncclResult_t pyncclEventCreate(void **event);
NCCL_API ncclResult_t pyncclEventDestroy(void *event);
NCCL_API ncclResult_t pyncclEventRecord(void *event, void *stream);
NCCL_API ncclResult_t pyncclEventSynchronize(void *event, double timeout);
NCCL_API ncclResult_t pyncclEventQuery(void *event);

/* An operation that moves nothing: all ranks have called it with the same number, or all get the same error. What comes behind it on a stream,
 * or on a non-blocking communicator, cannot be called back, so there a disagreement also breaks the communicator. For calls that are made of many, before the first of them. */
NCCL_API ncclResult_t pyncclAgree(unsigned number, ncclComm_t comm, cudaStream_t stream);

/* Calls from a record: one pointer to pass, for callers to whom every argument costs something. */
enum {
  pyncclAllReduce, pyncclReduce, pyncclReduceScatter, pyncclBroadcast, pyncclAllGather, pyncclGather, pyncclScatter, pyncclAlltoAll,
  pyncclSend, pyncclRecv
};
typedef struct {
  size_t size; /* of this structure */
  int kind;    /* pyncclAllReduce ... */
  ncclDataType_t dtype;
  ncclRedOp_t op; /* where it reduces */
  int root;       /* where it has one; or the peer */
  const void *send;
  void *recv;
  size_t count; /* as the call of that name has it */
  ncclComm_t comm;
  cudaStream_t stream;
} pyncclCall_t;
NCCL_API ncclResult_t pyncclCall(const pyncclCall_t *call);

/* The same, of the caller's array objects: where their memory is and how much is looked up here. */
typedef struct { /* how an array lies in memory: bytes from its start on, and what must be there */
  int type_at;    /* a pointer, which must be `type` */
  int data_at;    /* a pointer to the elements */
  int axes_at;    /* int: how many axes it has */
  int shape_at;   /* a pointer to their lengths, ptrdiff_t each */
  int element_at; /* a pointer, which tells the kind of its elements: pyncclElement_t.tag */
  int flags_at;   /* int, of which all of `flags` must be set: C order, and writable */
  int flags;
  const void *type;
  const void *none; /* what is passed for no array */
} pyncclLayout_t;
typedef struct {
  const void *tag;
  size_t bytes;         /* of one of the array's elements */
  ncclDataType_t dtype; /* it is `lanes` of these */
  int lanes;
  ncclRedOp_t op;
} pyncclElement_t;
typedef struct {
  size_t size; /* of this structure */
  const pyncclLayout_t *layout;
  const pyncclElement_t *elements; /* that are taken */
  int nelements, kind, root, rank, nranks;
  ncclComm_t comm;
} pyncclArrayCall_t;
#define PYNCCL_NOT_TAKEN (-1)
/* Of Python's C interface, what it takes to make functions: members are named for what they are. */
typedef struct {
  size_t size; /* of this structure */
  void *(*PyEval_SaveThread)(void);
  void (*PyEval_RestoreThread)(void *thread);
  void *(*PyLong_FromLong)(long number);
  void *(*PyLong_AsVoidPtr)(void *number);
  void *(*PyCFunction_NewEx)(void *method, void *self, void *module);
} pyncclPython_t;
/* New Python objects, functions that make the call of the record at an address (an int object) and return its result code as an int. To be
 * called with the interpreter's lock, which the functions let go while they wait. NULL: another version of Python's interface.
 * The first: f(x, out), a call that waits, from x to out, with NULL for a stream. PYNCCL_NOT_TAKEN, and nothing done: these arrays, or
 * an x without an out, are not of the plainest kind; the caller can tell what is wrong, or copy. With any third argument it only looks whether
 * it would take them. The second: f(), pyncclCall. */
NCCL_API void *pyncclFunctionOfArrays(const pyncclPython_t *python, void *address);
NCCL_API void *pyncclFunctionOfCall(const pyncclPython_t *python, void *address);

/* One rank's part of a schedule, as pynccl/collectives/compiled.py makes it. Buffers: 0 the send buffer, 1 the receive buffer, 2 scratch,
 * 3 messages kept apart until they are reduced. Chunks as in pynccl/collectives/schedule.py; a span lies within one block. Nothing is
 * checked here: a wrong schedule gives wrong data, or accesses memory that it should not. */
typedef struct { /* dst = from, or (reduces) dst = src op from, with from a peer's memory for a receive */
  int reduces, left; /* left: from op src */
  int peer, peer_round, number; /* a receive: which of the peer's rounds sends it; its number, from 1, if it completes its message, else 0 */
  int from_buffer, from_chunk, src_buffer, src_chunk, dst_buffer, dst_chunk, chunks;
  int fence; /* so many of this rank's sends must have been taken before it writes */
} pyncclScheduleStep_t;
typedef struct {
  int receives, computes, end; /* the first of its steps of each sort, those that receive by peer; and the one after the last */
} pyncclScheduleRound_t;
typedef struct {
  int peer, number; /* number: among the messages to this peer, from 1 */
} pyncclScheduleSend_t;
typedef struct {
  int chunk, chunks;
} pyncclScheduleSpan_t;
typedef struct {
  size_t size; /* of this structure */
  const char *name;
  unsigned fingerprint; /* equal on all ranks, and different for different schedules */
  int nranks, rank, parts, in_blocks, out_blocks, in_root, out_root; /* in_root: the only rank with a send buffer, -1: all */
  int scratch_chunks, sends_in, sends_out, most_rounds, most_apart;  /* of the whole schedule; most_apart: at least any rank's apart_chunks */
  int nrounds, nsends, nexposed, apart_chunks, most_receives;        /* of this rank */
  const pyncclScheduleStep_t *steps;
  const pyncclScheduleRound_t *rounds;
  const pyncclScheduleSend_t *sends;
  const pyncclScheduleSpan_t *exposed; /* of the send buffer, what is sent */
  const int *to, *from;                /* messages to and from each rank */
} pyncclSchedule_t;
/* The schedule and the buffers stay the caller's, and must live until the operation is done. */
NCCL_API ncclResult_t pyncclRunSchedule(const pyncclSchedule_t *schedule, const void *send, void *recv, size_t count, ncclDataType_t dtype,
    ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);

#endif

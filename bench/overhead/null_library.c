/* NCCL's ABI with nothing behind it: every call succeeds at once. What a call through Python costs here is the cost of the call alone.
 *
 * It names itself as pynccl's host library does (pyncclVersion), so that pynccl takes the paths that it takes there. A communicator
 * knows its rank and size, for those are asked for; data is never looked at, only where it is. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "arrays.c" /* the host library's: what it finds out about arrays is a part of the call, and so is the way through Python */
#include "python.c"

struct ncclComm {
  int rank, size;
};

/* --- what a collective costs: nothing --------------------------------------------------------------------------------------- */

#define DATA const void *send, void *recv, size_t count, ncclDataType_t type
#define WHERE ncclComm_t comm, cudaStream_t stream

NCCL_API ncclResult_t ncclAllReduce(DATA, ncclRedOp_t op, WHERE) { return ncclSuccess; }
NCCL_API ncclResult_t ncclReduceScatter(DATA, ncclRedOp_t op, WHERE) { return ncclSuccess; }
NCCL_API ncclResult_t ncclReduce(DATA, ncclRedOp_t op, int root, WHERE) { return ncclSuccess; }
NCCL_API ncclResult_t ncclAllGather(DATA, WHERE) { return ncclSuccess; }
NCCL_API ncclResult_t ncclAlltoAll(DATA, WHERE) { return ncclSuccess; }
NCCL_API ncclResult_t ncclBroadcast(DATA, int root, WHERE) { return ncclSuccess; }
NCCL_API ncclResult_t ncclGather(DATA, int root, WHERE) { return ncclSuccess; }
NCCL_API ncclResult_t ncclScatter(DATA, int root, WHERE) { return ncclSuccess; }

NCCL_API ncclResult_t pyncclCall(const pyncclCall_t *call) { return ncclSuccess; }

/* Seconds of one call from C, through a pointer that the compiler cannot see through: the floor that every caller stands on. */
NCCL_API double nullSecondsPerCall(size_t calls, const void *send, void *recv, size_t count, ncclComm_t comm) {
  ncclResult_t (*volatile call)(DATA, ncclRedOp_t, WHERE) = ncclAllReduce;
  struct timespec begun, ended;
  clock_gettime(CLOCK_MONOTONIC, &begun);
  for (size_t i = 0; i < calls; i++)
    if (call(send, recv, count, ncclFloat32, ncclSum, comm, NULL) != ncclSuccess) abort();
  clock_gettime(CLOCK_MONOTONIC, &ended);
  return ((double)(ended.tv_sec - begun.tv_sec) + 1e-9 * (double)(ended.tv_nsec - begun.tv_nsec)) / (double)calls;
}

/* --- the life of a communicator --------------------------------------------------------------------------------------------- */

NCCL_API ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank) {
  *comm = malloc(sizeof **comm);
  if (!*comm) return ncclSystemError;
  **comm = (struct ncclComm){.rank = rank, .size = nranks};
  return ncclSuccess;
}

NCCL_API ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
  return ncclCommInitRank(comm, nranks, id, rank);
}

NCCL_API ncclResult_t ncclCommFinalize(ncclComm_t comm) { return ncclSuccess; }

NCCL_API ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  free(comm);
  return ncclSuccess;
}

NCCL_API ncclResult_t ncclCommAbort(ncclComm_t comm) { return ncclCommDestroy(comm); }

NCCL_API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
  *rank = comm->rank;
  return ncclSuccess;
}

NCCL_API ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) { return ncclCommUserRank(comm, device); }

NCCL_API ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
  *count = comm->size;
  return ncclSuccess;
}

NCCL_API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state) {
  *state = ncclSuccess;
  return ncclSuccess;
}

/* --- asked of a library, not of a communicator ------------------------------------------------------------------------------ */

NCCL_API ncclResult_t ncclGetVersion(int *version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

NCCL_API ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  memset(id, 0, sizeof *id);
  return ncclSuccess;
}

NCCL_API const char *ncclGetErrorString(ncclResult_t code) { return code == ncclSuccess ? "no error" : "an error"; }
NCCL_API const char *ncclGetLastError(ncclComm_t comm) { return ""; }

/* --- what CuPy's module must find in order to load; nothing here calls these -------------------------------------------------- */

NCCL_API ncclResult_t ncclGroupStart(void) { return ncclInvalidUsage; }
NCCL_API ncclResult_t ncclGroupEnd(void) { return ncclInvalidUsage; }
NCCL_API ncclResult_t ncclBcast(void *data, size_t count, ncclDataType_t type, int root, WHERE) { return ncclInvalidUsage; }
NCCL_API ncclResult_t ncclSend(const void *data, size_t count, ncclDataType_t type, int peer, WHERE) { return ncclInvalidUsage; }
NCCL_API ncclResult_t ncclRecv(void *data, size_t count, ncclDataType_t type, int peer, WHERE) { return ncclInvalidUsage; }
NCCL_API ncclResult_t ncclCommInitAll(ncclComm_t *comms, int count, const int *devices) { return ncclInvalidUsage; }
NCCL_API ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *made, ncclConfig_t *config) {
  return ncclInvalidUsage;
}

/* --- what pynccl asks of its host library ----------------------------------------------------------------------------------- */

NCCL_API const char *pyncclVersion(void) { return "the null library of bench.call_overhead"; }
NCCL_API ncclResult_t pyncclSetTimeout(ncclComm_t comm, double seconds) { return ncclSuccess; }
NCCL_API ncclResult_t pyncclSetInterruptCheck(int (*check)(void)) { return ncclSuccess; }
NCCL_API ncclResult_t pyncclCommName(ncclComm_t comm, const char **name) {
  *name = "null";
  return ncclSuccess;
}

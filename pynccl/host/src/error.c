/* Words for what went wrong: the last error of each thread and of each communicator, and the names of the result codes. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "host.h"

static _Thread_local char last[1024];
static _Thread_local struct ncclComm *last_comm; /* whose failure it was; NULL: of no communicator */
static _Thread_local uint64_t last_when;
static _Atomic uint64_t failures; /* numbers them, to tell which of two is the newer */

static const char *const result_words[ncclNumResults] = {
    [ncclSuccess] = "no error",
    [ncclUnhandledCudaError] = "unhandled CUDA error",
    [ncclSystemError] = "system error: a call into the operating system failed",
    [ncclInternalError] = "internal error: this is a fault of the host library, please report it",
    [ncclInvalidArgument] = "invalid argument",
    [ncclInvalidUsage] = "invalid usage",
    [ncclRemoteError] = "remote error: another rank failed or is gone",
    [ncclInProgress] = "operation in progress",
    [ncclTimeout] = "timed out",
};

ncclResult_t fail(struct ncclComm *comm, ncclResult_t code, const char *format, ...) {
  char text[sizeof last];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  memcpy(last, text, sizeof last);
  last_comm = comm;
  last_when = atomic_fetch_add(&failures, 1) + 1;
  if (comm != NULL) {
    pthread_mutex_lock(&comm->lock);
    comm->last_when = last_when;
    memcpy(comm->last_error, text, sizeof comm->last_error);
    pthread_mutex_unlock(&comm->lock);
  }
  return code;
}

const char *thread_error(void) { return last; }

const char *ncclGetErrorString(ncclResult_t result) {
  return result >= 0 && result < ncclNumResults ? result_words[result] : "unknown result code";
}

/* The newest failure that this caller can mean: of the communicator (perhaps on a worker's thread), or of this thread where it concerned
 * this communicator or none (ncclMemAlloc, a handle that was refused). NULL asks for this thread's. */
const char *ncclGetLastError(ncclComm_t comm) {
  static _Thread_local char copy[sizeof last];
  if (comm == NULL || atomic_load(&comm->magic) != COMM_MAGIC) return last;
  pthread_mutex_lock(&comm->lock);
  const bool own = last_when > comm->last_when && (last_comm == comm || last_comm == NULL);
  memcpy(copy, own ? last : comm->last_error, sizeof copy);
  pthread_mutex_unlock(&comm->lock);
  return copy;
}

const char *pyncclVersion(void) { return "pynccl host library " HOST_VERSION; }

void ncclResetDebugInit(void) {} /* nothing is cached here: logging follows the environment at each communicator's start */

PNCCL(ncclGetErrorString);
PNCCL(ncclGetLastError);
PNCCL(ncclResetDebugInit);

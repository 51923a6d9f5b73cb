/* The calls that need only a look at their arguments: collectives, messages, queries, reductions, registration, memory. Each of NCCL's
 * functions is here or in the file of its subject (comm.c, group.c, onesided.c, stream.c, param.c). */
#include <stdlib.h>
#include <string.h>

#include "host.h"

/* ---- collectives --------------------------------------------------------------------------------------------------------------------- */

struct call { /* one collective as it was called */
  const char *name;
  const void *send;
  void *recv;
  size_t count;
  ncclDataType_t dtype;
  int redop, root;
  cudaStream_t stream;
  const ncclCollConfig_t *config;
};

static ncclResult_t check_config(struct ncclComm *comm, const struct call *call) {
  ncclCollConfig_t config = {.forceAlgSelection = 1};
  if (call->config == NULL) return ncclSuccess;
  if (call->config->magic != NCCL_API_MAGIC || call->config->size < 16)
    return fail(comm, ncclInvalidArgument, "%s: config has magic 0x%x, size %zu; start from NCCL_COLLCONFIG_INITIALIZER", call->name,
                call->config->magic, call->config->size);
  memcpy(&config, call->config, call->config->size < sizeof config ? call->config->size : sizeof config);
  if (config.launchCompletionEvent != NULL)
    return fail(comm, ncclInvalidUsage, "%s: config.launchCompletionEvent means nothing in host memory: there is no kernel launch; record an event on the stream instead", call->name);
  if (config.algSelection != NULL && config.algSelection[0] != 0 && config.forceAlgSelection != 0)
    return fail(comm, ncclInvalidUsage,
                "%s: algorithm \"%s\" means nothing to the host library, which chooses by size; leave algorithm=None (in C: algSelection unset, or forceAlgSelection 0)",
                call->name, config.algSelection);
  return ncclSuccess;
}

/* A built-in operation, or one of this communicator's own. */
static ncclResult_t find_reduction(struct ncclComm *comm, const struct call *call, struct op *op) {
  if (call->redop >= 0 && call->redop < ncclNumOps) {
    op->redop = (enum reduce_op)call->redop;
    return ncclSuccess;
  }
  const int code = call->redop - ncclNumOps, index = code & 0x3ff;
  if (call->redop < 0) return fail(comm, ncclInvalidArgument, "%s: unknown reduction %d", call->name, call->redop);
  ncclResult_t result = ncclSuccess;
  struct premul premul = {0};
  pthread_mutex_lock(&comm->lock);
  const bool known = (unsigned)code >> 10 == comm->salt && index < comm->npremuls && comm->premuls[index].live;
  if (known) premul = comm->premuls[index];
  pthread_mutex_unlock(&comm->lock);
  if (!known)
    result = fail(comm, ncclInvalidArgument, "%s: reduction %d was not made by this communicator, or was destroyed", call->name, call->redop);
  else if (premul.dtype != call->dtype)
    result = fail(comm, ncclInvalidArgument, "%s: reduction %d was made for %s, the data is %s", call->name, call->redop,
                  dtype_name((int)premul.dtype), dtype_name((int)call->dtype));
  op->redop = REDUCE_PREMULSUM;
  op->scalar_device = premul.device;
  memcpy(op->scalar, premul.scalar, sizeof op->scalar);
  return result;
}

static ncclResult_t collective(enum kind which, ncclComm_t handle, struct call call) {
  const struct kind_info *kind = &kinds[which];
  ncclResult_t code;
  struct ncclComm *comm = comm_enter(handle, call.name, true, &code);
  if (comm == NULL) return group_error(code);
  struct op op = {.kind = which, .dtype = call.dtype, .root = call.root, .comm = comm, .stream = call.stream, .send = call.send,
                  .recv = call.recv, .count = call.count, .element = dtype_size((int)call.dtype)};
  if (op.element == 0) {
    code = fail(comm, ncclInvalidArgument, "%s: unknown datatype %d", call.name, (int)call.dtype);
    goto out;
  }
  if (call.count > SIZE_MAX / 4 / op.element / (size_t)comm->nranks) {
    code = fail(comm, ncclInvalidArgument, "%s: count %zu overflows the address space", call.name, call.count);
    goto out;
  }
  op.bytes = call.count * op.element;
  if ((kind->from_root || kind->to_root) && (call.root < 0 || call.root >= comm->nranks)) {
    code = fail(comm, ncclInvalidArgument, "%s: root %d is out of range; this communicator has ranks 0 to %d", call.name, call.root, comm->nranks - 1);
    goto out;
  }
  if (kind->reduces && (code = find_reduction(comm, &call, &op)) != ncclSuccess) goto out;
  if ((code = check_config(comm, &call)) != ncclSuccess) goto out;
  if (call.count > 0 && call.send == NULL && (!kind->from_root || comm->rank == call.root)) {
    code = fail(comm, ncclInvalidArgument, "%s: sendbuff is NULL", call.name);
    goto out;
  }
  if (call.count > 0 && call.recv == NULL && (!kind->to_root || comm->rank == call.root)) {
    code = fail(comm, ncclInvalidArgument, "%s: recvbuff is NULL", call.name);
    goto out;
  }
  code = submit(&op);
out:
  comm_leave(comm);
  return group_error(code);
}

ncclResult_t ncclAllReduceConfig(const void *send, void *recv, size_t count, ncclDataType_t dtype, ncclRedOp_t redop, ncclComm_t comm,
                                 cudaStream_t stream, const ncclCollConfig_t *config) {
  return collective(ALL_REDUCE, comm, (struct call){"ncclAllReduce", send, recv, count, dtype, (int)redop, 0, stream, config});
}

ncclResult_t ncclReduceConfig(const void *send, void *recv, size_t count, ncclDataType_t dtype, ncclRedOp_t redop, int root, ncclComm_t comm,
                              cudaStream_t stream, const ncclCollConfig_t *config) {
  return collective(REDUCE, comm, (struct call){"ncclReduce", send, recv, count, dtype, (int)redop, root, stream, config});
}

ncclResult_t ncclReduceScatterConfig(const void *send, void *recv, size_t count, ncclDataType_t dtype, ncclRedOp_t redop, ncclComm_t comm,
                                     cudaStream_t stream, const ncclCollConfig_t *config) {
  return collective(REDUCE_SCATTER, comm, (struct call){"ncclReduceScatter", send, recv, count, dtype, (int)redop, 0, stream, config});
}

ncclResult_t ncclBroadcastConfig(const void *send, void *recv, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm,
                                 cudaStream_t stream, const ncclCollConfig_t *config) {
  return collective(BROADCAST, comm, (struct call){"ncclBroadcast", send, recv, count, dtype, 0, root, stream, config});
}

ncclResult_t ncclAllGatherConfig(const void *send, void *recv, size_t count, ncclDataType_t dtype, ncclComm_t comm, cudaStream_t stream,
                                 const ncclCollConfig_t *config) {
  return collective(ALL_GATHER, comm, (struct call){"ncclAllGather", send, recv, count, dtype, 0, 0, stream, config});
}

ncclResult_t ncclGatherConfig(const void *send, void *recv, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm, cudaStream_t stream,
                              const ncclCollConfig_t *config) {
  return collective(GATHER, comm, (struct call){"ncclGather", send, recv, count, dtype, 0, root, stream, config});
}

ncclResult_t ncclScatterConfig(const void *send, void *recv, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm, cudaStream_t stream,
                               const ncclCollConfig_t *config) {
  return collective(SCATTER, comm, (struct call){"ncclScatter", send, recv, count, dtype, 0, root, stream, config});
}

ncclResult_t ncclAlltoAllConfig(const void *send, void *recv, size_t count, ncclDataType_t dtype, ncclComm_t comm, cudaStream_t stream,
                                const ncclCollConfig_t *config) {
  return collective(ALL_TO_ALL, comm, (struct call){"ncclAlltoAll", send, recv, count, dtype, 0, 0, stream, config});
}

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return ncclAllReduceConfig(send, recv, count, dtype, op, comm, stream, NULL);
}

ncclResult_t ncclReduce(const void *send, void *recv, size_t count, ncclDataType_t dtype, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclReduceConfig(send, recv, count, dtype, op, root, comm, stream, NULL);
}

ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return ncclReduceScatterConfig(send, recv, count, dtype, op, comm, stream, NULL);
}

ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcastConfig(send, recv, count, dtype, root, comm, stream, NULL);
}

ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcastConfig(buffer, buffer, count, dtype, root, comm, stream, NULL);
}

ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t dtype, ncclComm_t comm, cudaStream_t stream) {
  return ncclAllGatherConfig(send, recv, count, dtype, comm, stream, NULL);
}

ncclResult_t ncclGather(const void *send, void *recv, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclGatherConfig(send, recv, count, dtype, root, comm, stream, NULL);
}

ncclResult_t ncclScatter(const void *send, void *recv, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclScatterConfig(send, recv, count, dtype, root, comm, stream, NULL);
}

ncclResult_t ncclAlltoAll(const void *send, void *recv, size_t count, ncclDataType_t dtype, ncclComm_t comm, cudaStream_t stream) {
  return ncclAlltoAllConfig(send, recv, count, dtype, comm, stream, NULL);
}

ncclResult_t pyncclAgree(unsigned number, ncclComm_t handle, cudaStream_t stream) {
  ncclResult_t code;
  struct ncclComm *comm = comm_enter(handle, "pyncclAgree", true, &code);
  if (comm == NULL) return group_error(code);
  struct op op = {.kind = SCHEDULE, .dtype = ncclUint8, .root = (int)number, .comm = comm, .stream = stream, .element = 1};
  code = submit(&op);
  comm_leave(comm);
  return group_error(code);
}

/* ---- messages ------------------------------------------------------------------------------------------------------------------------ */

static ncclResult_t message(enum kind kind, const char *name, const void *send, void *recv, size_t count, ncclDataType_t dtype, int peer,
                            ncclComm_t handle, cudaStream_t stream) {
  ncclResult_t code;
  struct ncclComm *comm = comm_enter(handle, name, true, &code);
  if (comm == NULL) return group_error(code);
  struct op op = {.kind = kind, .dtype = dtype, .root = peer, .comm = comm, .stream = stream, .send = send, .recv = recv, .count = count,
                  .element = dtype_size((int)dtype)};
  if (op.element == 0)
    code = fail(comm, ncclInvalidArgument, "%s: unknown datatype %d", name, (int)dtype);
  else if (peer < 0 || peer >= comm->nranks)
    code = fail(comm, ncclInvalidArgument, "%s: peer %d is out of range; this communicator has ranks 0 to %d", name, peer, comm->nranks - 1);
  else if (count > SIZE_MAX / 4 / op.element)
    code = fail(comm, ncclInvalidArgument, "%s: count %zu overflows the address space", name, count);
  else if (count > 0 && send == NULL && recv == NULL)
    code = fail(comm, ncclInvalidArgument, "%s: the buffer is NULL", name);
  op.bytes = count * op.element;
  if (code == ncclSuccess) code = submit(&op);
  comm_leave(comm);
  return group_error(code);
}

ncclResult_t ncclSend(const void *buffer, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm, cudaStream_t stream) {
  return message(SEND, "ncclSend", buffer, NULL, count, dtype, peer, comm, stream);
}

ncclResult_t ncclRecv(void *buffer, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm, cudaStream_t stream) {
  return message(RECV, "ncclRecv", NULL, buffer, count, dtype, peer, comm, stream);
}

/* ---- from a record --------------------------------------------------------------------------------------------------------------------- */

static const struct {
  enum kind kind;
  const char *name;
} RECORDED[] = {
    [pyncclAllReduce] = {ALL_REDUCE, "ncclAllReduce"}, [pyncclReduce] = {REDUCE, "ncclReduce"},
    [pyncclReduceScatter] = {REDUCE_SCATTER, "ncclReduceScatter"}, [pyncclBroadcast] = {BROADCAST, "ncclBroadcast"},
    [pyncclAllGather] = {ALL_GATHER, "ncclAllGather"}, [pyncclGather] = {GATHER, "ncclGather"},
    [pyncclScatter] = {SCATTER, "ncclScatter"}, [pyncclAlltoAll] = {ALL_TO_ALL, "ncclAlltoAll"},
    [pyncclSend] = {SEND, "ncclSend"}, [pyncclRecv] = {RECV, "ncclRecv"},
};

ncclResult_t pyncclCall(const pyncclCall_t *call) {
  if (call == NULL || call->size != sizeof *call || call->kind < 0 || (size_t)call->kind >= sizeof RECORDED / sizeof RECORDED[0])
    return group_error(fail(NULL, ncclInvalidArgument, "pyncclCall: call is NULL, of another version of this library, or of no kind of call"));
  const enum kind kind = RECORDED[call->kind].kind;
  const char *name = RECORDED[call->kind].name;
  if (kind == SEND || kind == RECV)
    return message(kind, name, kind == SEND ? call->send : NULL, kind == RECV ? call->recv : NULL, call->count, call->dtype, call->root, call->comm,
                   call->stream);
  return collective(kind, call->comm,
                    (struct call){name, call->send, call->recv, call->count, call->dtype, (int)call->op, call->root, call->stream, NULL});
}

/* ---- reductions of the user's ---------------------------------------------------------------------------------------------------------- */

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *out, void *scalar, ncclDataType_t dtype, ncclScalarResidence_t residence, ncclComm_t handle) {
  ncclResult_t code;
  struct ncclComm *comm = comm_enter(handle, "ncclRedOpCreatePreMulSum", true, &code);
  if (comm == NULL) return code;
  struct premul premul = {.live = true, .dtype = dtype};
  const size_t element = dtype_size((int)dtype);
  if (out == NULL || scalar == NULL) {
    code = fail(comm, ncclInvalidArgument, "ncclRedOpCreatePreMulSum: op is %p, scalar is %p; neither may be NULL", (void *)out, scalar);
    goto out;
  }
  if (element == 0) {
    code = fail(comm, ncclInvalidArgument, "ncclRedOpCreatePreMulSum: unknown datatype %d", (int)dtype);
    goto out;
  }
  if (residence != ncclScalarDevice && residence != ncclScalarHostImmediate) {
    code = fail(comm, ncclInvalidArgument, "ncclRedOpCreatePreMulSum: unknown residence %d", (int)residence);
    goto out;
  }
  if (residence == ncclScalarHostImmediate)
    memcpy(premul.scalar, scalar, element);
  else
    premul.device = scalar;
  pthread_mutex_lock(&comm->lock);
  int index = 0;
  while (index < comm->npremuls && comm->premuls[index].live) index++;
  if (index == comm->npremuls) {
    struct premul *more = index < 1024 ? realloc(comm->premuls, (size_t)(index + 1) * sizeof *more) : NULL;
    if (more != NULL) {
      comm->premuls = more;
      comm->npremuls++;
    } else {
      index = -1;
    }
  }
  if (index >= 0) comm->premuls[index] = premul;
  pthread_mutex_unlock(&comm->lock);
  if (index < 0)
    code = fail(comm, ncclInvalidUsage, "ncclRedOpCreatePreMulSum: this communicator holds 1024 operators; destroy some");
  else
    *out = (ncclRedOp_t)(ncclNumOps + (int)(comm->salt << 10 | (unsigned)index));
out:
  comm_leave(comm);
  return code;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t handle) {
  ncclResult_t code;
  struct ncclComm *comm = comm_enter(handle, "ncclRedOpDestroy", false, &code);
  if (comm == NULL) return code;
  const int value = (int)op - ncclNumOps, index = value & 0x3ff;
  pthread_mutex_lock(&comm->lock);
  const bool known = value >= 0 && (unsigned)value >> 10 == comm->salt && index < comm->npremuls && comm->premuls[index].live;
  if (known) comm->premuls[index].live = false;
  pthread_mutex_unlock(&comm->lock);
  if (!known) code = fail(comm, ncclInvalidArgument, "ncclRedOpDestroy: %d is no user reduction of this communicator", (int)op);
  comm_leave(comm);
  return code;
}

/* ---- queries --------------------------------------------------------------------------------------------------------------------------- */

ncclResult_t ncclGetVersion(int *version) {
  if (version == NULL) return fail(NULL, ncclInvalidArgument, "ncclGetVersion: version is NULL");
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

enum query { COUNT, DEVICE, RANK };

static ncclResult_t query(const char *name, ncclComm_t handle, enum query what, int *out) {
  ncclResult_t code;
  struct ncclComm *comm = comm_enter(handle, name, false, &code);
  if (comm == NULL) return code;
  if (out == NULL)
    code = fail(comm, ncclInvalidArgument, "%s: the pointer for the answer is NULL", name);
  else if (atomic_load(&comm->state) == ncclInProgress)
    code = fail(comm, ncclInvalidUsage, "%s: the communicator is still being made", name);
  else
    *out = what == COUNT ? comm->nranks : what == DEVICE ? comm->device : comm->rank;
  comm_leave(comm);
  return code;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) { return query("ncclCommCount", comm, COUNT, count); }
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) { return query("ncclCommCuDevice", comm, DEVICE, device); }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) { return query("ncclCommUserRank", comm, RANK, rank); }

/* What messages call the communicator: its configured name, or one made from its id. */
ncclResult_t pyncclCommName(ncclComm_t handle, const char **name) {
  ncclResult_t code;
  struct ncclComm *comm = comm_enter(handle, "pyncclCommName", false, &code);
  if (comm == NULL) return code;
  if (name == NULL) code = fail(comm, ncclInvalidArgument, "pyncclCommName: name is NULL");
  else *name = comm->name;
  comm_leave(comm);
  return code;
}

ncclResult_t ncclCommMemStats(ncclComm_t handle, ncclCommMemStat_t stat, uint64_t *value) {
  ncclResult_t code;
  struct ncclComm *comm = comm_enter(handle, "ncclCommMemStats", true, &code);
  if (comm == NULL) return code;
  if (value == NULL)
    code = fail(comm, ncclInvalidArgument, "ncclCommMemStats: value is NULL");
  else if (stat == ncclStatGpuMemSuspend || stat == ncclStatGpuMemSuspended)
    *value = 0; /* a shared segment is never suspended */
  else if (stat == ncclStatGpuMemPersist || stat == ncclStatGpuMemTotal)
    *value = comm->layout.p2p; /* the part of the segment that is backed from the start, shared by all ranks */
  else
    code = fail(comm, ncclInvalidArgument, "ncclCommMemStats: unknown statistic %d", (int)stat);
  comm_leave(comm);
  return code;
}

/* ---- memory ---------------------------------------------------------------------------------------------------------------------------- */

ncclResult_t ncclMemAlloc(void **pointer, size_t size) {
  if (pointer == NULL) return fail(NULL, ncclInvalidArgument, "ncclMemAlloc: ptr is NULL");
  return heap_alloc(pointer, size);
}

ncclResult_t ncclMemFree(void *pointer) { return pointer == NULL ? ncclSuccess : heap_free(pointer); }

struct registration {
  struct registration *next;
};

/* Registration is a promise about performance, not about meaning: memory from ncclMemAlloc is mapped by the peers anyway, other memory
 * cannot be. The handle exists so that programs written for GPUs run unchanged. */
ncclResult_t ncclCommRegister(const ncclComm_t handle, void *buffer, size_t size, void **out) {
  ncclResult_t code;
  struct ncclComm *comm = comm_enter(handle, "ncclCommRegister", true, &code);
  if (comm == NULL) return code;
  struct registration *registration = NULL;
  if (buffer == NULL || size == 0 || out == NULL)
    code = fail(comm, ncclInvalidArgument, "ncclCommRegister: buffer %p of %zu bytes, handle at %p", buffer, size, (void *)out);
  else if ((registration = malloc(sizeof *registration)) == NULL)
    code = fail(comm, ncclSystemError, "ncclCommRegister: out of memory");
  if (registration != NULL) {
    pthread_mutex_lock(&comm->lock);
    registration->next = comm->registrations;
    comm->registrations = registration;
    pthread_mutex_unlock(&comm->lock);
    *out = registration;
  }
  comm_leave(comm);
  return code;
}

ncclResult_t ncclCommDeregister(const ncclComm_t handle, void *registered) {
  ncclResult_t code;
  struct ncclComm *comm = comm_enter(handle, "ncclCommDeregister", false, &code);
  if (comm == NULL) return code;
  pthread_mutex_lock(&comm->lock);
  struct registration **link = &comm->registrations;
  while (*link != NULL && *link != registered) link = &(*link)->next;
  struct registration *found = *link;
  if (found != NULL) *link = found->next;
  pthread_mutex_unlock(&comm->lock);
  if (found == NULL) code = fail(comm, ncclInvalidArgument, "ncclCommDeregister: %p is no registration of this communicator", registered);
  free(found);
  comm_leave(comm);
  return code;
}

void registrations_free(struct ncclComm *comm) {
  struct registration *next;
  for (struct registration *registration = comm->registrations; registration != NULL; registration = next) {
    next = registration->next;
    free(registration);
  }
}

/* ---- what has no meaning in host memory -------------------------------------------------------------------------------------------------- */

static ncclResult_t meaningless(ncclComm_t handle, const char *call, const char *why) {
  ncclResult_t code;
  struct ncclComm *comm = comm_enter(handle, call, false, &code);
  if (comm == NULL) return code;
  code = fail(comm, ncclInvalidUsage, "%s has no meaning in host memory: %s", call, why);
  comm_leave(comm);
  return code;
}

ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags) {
  (void)flags;
  return meaningless(comm, "ncclCommSuspend", "there is no device memory to release");
}

ncclResult_t ncclCommResume(ncclComm_t comm) { return meaningless(comm, "ncclCommResume", "nothing can be suspended"); }

ncclResult_t ncclSetEncryption(const ncclEncryptionConfig_t *config) {
  if (config == NULL || config->magic != NCCL_API_MAGIC || config->size < sizeof *config)
    return fail(NULL, ncclInvalidArgument, "ncclSetEncryption: start from NCCL_ENCRYPTION_CONFIG_INITIALIZER");
  if (config->mode == 0) return ncclSuccess;
  return fail(NULL, ncclInvalidUsage, "ncclSetEncryption has no meaning in host memory: ranks share memory, no byte crosses a network");
}

PNCCL(ncclMemAlloc);
PNCCL(ncclMemFree);
PNCCL(ncclGetVersion);
PNCCL(ncclCommCount);
PNCCL(ncclCommCuDevice);
PNCCL(ncclCommUserRank);
PNCCL(ncclCommRegister);
PNCCL(ncclCommDeregister);
PNCCL(ncclCommSuspend);
PNCCL(ncclCommResume);
PNCCL(ncclCommMemStats);
PNCCL(ncclRedOpCreatePreMulSum);
PNCCL(ncclRedOpDestroy);
PNCCL(ncclReduce);
PNCCL(ncclBcast);
PNCCL(ncclBroadcast);
PNCCL(ncclAllReduce);
PNCCL(ncclReduceScatter);
PNCCL(ncclAllGather);
PNCCL(ncclAlltoAll);
PNCCL(ncclGather);
PNCCL(ncclScatter);
PNCCL(ncclAllReduceConfig);
PNCCL(ncclBroadcastConfig);
PNCCL(ncclReduceConfig);
PNCCL(ncclAllGatherConfig);
PNCCL(ncclReduceScatterConfig);
PNCCL(ncclAlltoAllConfig);
PNCCL(ncclGatherConfig);
PNCCL(ncclScatterConfig);
PNCCL(ncclSend);
PNCCL(ncclRecv);
PNCCL(ncclSetEncryption);

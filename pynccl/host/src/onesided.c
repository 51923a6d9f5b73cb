/* One-sided communication: windows (memory that every rank may write into), put with a signal, signal, and waiting for signals.
 * A window lies in ncclMemAlloc memory; registering it is collective, since the ranks exchange where their parts lie. Signals are
 * counters per (origin, target, context, index); waiting consumes them. */
#include <stdlib.h>
#include <string.h>

#include "host.h"

struct part { /* one rank's part of a window */
  uint64_t at, bytes;
  int heap_fd, code;
};

struct ncclWindow_vidmem {
  struct ncclWindow_vidmem *next; /* of its communicator */
  void *pointer;
  struct part parts[]; /* a rank each */
};

static ncclResult_t check_part(struct ncclComm *comm, void *buffer, size_t bytes, int flags) {
  if (buffer == NULL || bytes == 0)
    return fail(comm, ncclInvalidArgument, "ncclCommWindowRegister: buffer %p of %zu bytes; a window needs at least one byte", buffer, bytes);
  if ((uintptr_t)buffer % NCCL_WIN_REQUIRED_ALIGNMENT != 0)
    return fail(comm, ncclInvalidArgument, "ncclCommWindowRegister: buffer %p is not aligned to %d bytes; take it from ncclMemAlloc", buffer,
                NCCL_WIN_REQUIRED_ALIGNMENT);
  if (flags < 0 || flags > 0x0f)
    return fail(comm, ncclInvalidArgument, "ncclCommWindowRegister: unknown flags 0x%x", (unsigned)flags);
  if (heap_offset(buffer, bytes) == NOT_MAPPED)
    return fail(comm, ncclInvalidArgument,
                "ncclCommWindowRegister: %zu bytes at %p do not lie in memory from ncclMemAlloc; other ranks cannot reach ordinary memory",
                bytes, buffer);
  if (!comm->mappable)
    return fail(comm, ncclInvalidUsage, "ncclCommWindowRegister: the ranks of this communicator cannot map each other's memory (/proc/PID/fd is closed to them)");
  return ncclSuccess;
}

/* A rank whose arguments are wrong still takes part in the exchange, so that the others learn of it instead of waiting. */
ncclResult_t ncclCommWindowRegister(ncclComm_t handle, void *buffer, size_t bytes, ncclWindow_t *out, int flags) {
  ncclResult_t code;
  struct ncclComm *comm = comm_enter(handle, "ncclCommWindowRegister", true, &code);
  if (comm == NULL) return code;
  struct ncclWindow_vidmem *window = NULL;
  if (in_group()) {
    code = fail(comm, ncclInvalidUsage, "ncclCommWindowRegister inside a group: the host library registers windows outside of groups only");
    goto out;
  }
  if (out == NULL) {
    code = fail(comm, ncclInvalidArgument, "ncclCommWindowRegister: win is NULL");
    goto out;
  }
  *out = NULL;
  window = calloc(1, sizeof *window + (size_t)comm->nranks * sizeof(struct part));
  if (window == NULL) {
    code = fail(comm, ncclSystemError, "ncclCommWindowRegister: out of memory");
    goto out;
  }
  const ncclResult_t mine = check_part(comm, buffer, bytes, flags);
  char words[512];
  strncpy(words, thread_error(), sizeof words - 1);
  words[sizeof words - 1] = 0;
  const struct part part = {.at = heap_offset(buffer, bytes), .bytes = bytes, .heap_fd = heap_descriptor(), .code = (int)mine};
  if (mine == ncclSuccess) atomic_store(&lines_of(comm, comm->rank)->heap_fd, part.heap_fd);
  const struct token token = derive(&comm->token, "window", comm->windows++, NULL, 0);
  code = exchange(comm, &token, &part, sizeof part, window->parts, true, "ncclCommWindowRegister");
  if (code != ncclSuccess) {
    fail(comm, code, "%s", thread_error());
    goto out;
  }
  if (mine != ncclSuccess) {
    code = fail(comm, mine, "%s", words);
    goto out;
  }
  for (int rank = 0; rank < comm->nranks; rank++) {
    if (window->parts[rank].code == ncclSuccess) continue;
    code = fail(comm, ncclRemoteError, "ncclCommWindowRegister: rank %d refused its part: %s", rank,
                ncclGetErrorString((ncclResult_t)window->parts[rank].code));
    goto out;
  }
  window->pointer = buffer;
  pthread_mutex_lock(&comm->lock);
  window->next = comm->window_list;
  comm->window_list = window;
  pthread_mutex_unlock(&comm->lock);
  *out = window;
  window = NULL;
out:
  free(window);
  comm_leave(comm);
  return code;
}

/* Looked up by address, never followed first: a stale handle is an error, not a crash. */
static ncclResult_t window_check(struct ncclComm *comm, ncclWindow_t window, const char *call) {
  pthread_mutex_lock(&comm->lock);
  struct ncclWindow_vidmem *known = comm->window_list;
  while (known != NULL && known != window) known = known->next;
  pthread_mutex_unlock(&comm->lock);
  if (known != NULL) return ncclSuccess;
  return fail(comm, ncclInvalidArgument, "%s: %p is no window of this communicator", call, (void *)window);
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t handle, ncclWindow_t window) {
  ncclResult_t code;
  struct ncclComm *comm = comm_enter(handle, "ncclCommWindowDeregister", false, &code);
  if (comm == NULL) return code;
  if (window != NULL && (code = window_check(comm, window, "ncclCommWindowDeregister")) == ncclSuccess) {
    pthread_mutex_lock(&comm->lock);
    struct ncclWindow_vidmem **link = &comm->window_list;
    while (*link != window) link = &(*link)->next;
    *link = window->next;
    pthread_mutex_unlock(&comm->lock);
    free(window);
  }
  comm_leave(comm);
  return code;
}

void windows_free(struct ncclComm *comm) {
  struct ncclWindow_vidmem *next;
  for (struct ncclWindow_vidmem *window = comm->window_list; window != NULL; window = next) {
    next = window->next;
    if (atomic_load(&comm->state) != ncclSuccess || atomic_load(&comm->abort)) heap_retire(window->pointer); /* a put may be on its way */
    free(window);
  }
}

ncclResult_t ncclWinGetUserPtr(ncclComm_t handle, ncclWindow_t window, void **out) {
  ncclResult_t code;
  struct ncclComm *comm = comm_enter(handle, "ncclWinGetUserPtr", false, &code);
  if (comm == NULL) return code;
  code = window_check(comm, window, "ncclWinGetUserPtr");
  if (code == ncclSuccess && out == NULL) code = fail(comm, ncclInvalidArgument, "ncclWinGetUserPtr: outUserPtr is NULL");
  if (code == ncclSuccess) *out = window->pointer;
  comm_leave(comm);
  return code;
}

/* ---- put, signal, wait --------------------------------------------------------------------------------------------------------- */

static ncclResult_t check_target(struct ncclComm *comm, const char *call, int peer, int signal, int context) {
  if (peer < 0 || peer >= comm->nranks)
    return fail(comm, ncclInvalidArgument, "%s: peer %d is out of range; this communicator has ranks 0 to %d", call, peer, comm->nranks - 1);
  if (signal < 0 || signal >= SIGNALS)
    return fail(comm, ncclInvalidArgument, "%s: sigIdx %d is out of range 0 to %d", call, signal, SIGNALS - 1);
  if (context < 0 || context >= CONTEXTS)
    return fail(comm, ncclInvalidArgument, "%s: ctx %d is out of range 0 to %d", call, context, CONTEXTS - 1);
  return ncclSuccess;
}

static ncclResult_t one_sided(ncclComm_t handle, const char *call, struct op *op, unsigned flags) {
  ncclResult_t code;
  struct ncclComm *comm = comm_enter(handle, call, true, &code);
  if (comm == NULL) return group_error(code);
  op->comm = comm;
  if (flags != 0) {
    code = fail(comm, ncclInvalidArgument, "%s: flags 0x%x; they are reserved and must be 0", call, flags);
    goto out;
  }
  if ((code = check_target(comm, call, op->root, op->signal, op->context)) != ncclSuccess) goto out;
  if (op->kind == PUT) {
    if ((code = window_check(comm, op->window, call)) != ncclSuccess) goto out;
    const uint64_t room = op->window->parts[op->root].bytes;
    if (op->window_offset > room || op->bytes > room - op->window_offset) {
      code = fail(comm, ncclInvalidArgument, "%s: %zu bytes at offset %zu do not fit rank %d's window of %llu bytes", call, op->bytes,
                  op->window_offset, op->root, (unsigned long long)room);
      goto out;
    }
    if (op->send == NULL && op->bytes > 0) {
      code = fail(comm, ncclInvalidArgument, "%s: localbuff is NULL", call);
      goto out;
    }
    op->target = op->window->parts[op->root].at + op->window_offset; /* the window itself may be gone when the put runs */
  }
  code = submit(op);
out:
  comm_leave(comm);
  return group_error(code);
}

ncclResult_t ncclPutSignal(const void *local, size_t count, ncclDataType_t dtype, int peer, ncclWindow_t window, size_t offset, int signal,
                           int context, unsigned int flags, ncclComm_t comm, cudaStream_t stream) {
  const size_t element = dtype_size((int)dtype);
  if (element == 0) return group_error(fail(NULL, ncclInvalidArgument, "ncclPutSignal: unknown datatype %d", (int)dtype));
  if (count > SIZE_MAX / 2 / element) return group_error(fail(NULL, ncclInvalidArgument, "ncclPutSignal: count %zu is too large", count));
  struct op op = {.kind = PUT, .dtype = dtype, .root = peer, .stream = stream, .send = local, .count = count, .element = element,
                  .bytes = count * element, .window = window, .window_offset = offset, .signal = signal, .context = context};
  return one_sided(comm, "ncclPutSignal", &op, flags);
}

ncclResult_t ncclSignal(int peer, int signal, int context, unsigned int flags, ncclComm_t comm, cudaStream_t stream) {
  struct op op = {.kind = SIGNAL, .root = peer, .stream = stream, .signal = signal, .context = context};
  return one_sided(comm, "ncclSignal", &op, flags);
}

ncclResult_t ncclWaitSignal(int n, ncclWaitSignalDesc_t *descriptors, ncclComm_t handle, cudaStream_t stream) {
  ncclResult_t code;
  struct ncclComm *comm = comm_enter(handle, "ncclWaitSignal", true, &code);
  if (comm == NULL) return group_error(code);
  struct op op = {.kind = WAIT_SIGNAL, .comm = comm, .stream = stream, .nsignals = n};
  if (n < 0 || (n > 0 && descriptors == NULL)) {
    code = fail(comm, ncclInvalidArgument, "ncclWaitSignal: %d descriptors at %p", n, (void *)descriptors);
    goto out;
  }
  for (int i = 0; i < n; i++) {
    if (descriptors[i].opCnt < 0) {
      code = fail(comm, ncclInvalidArgument, "ncclWaitSignal: descriptor %d waits for %d signals", i, descriptors[i].opCnt);
      goto out;
    }
    code = check_target(comm, "ncclWaitSignal", descriptors[i].peer, descriptors[i].sigIdx, descriptors[i].ctx);
    if (code != ncclSuccess) goto out;
  }
  op.signals = calloc(n > 0 ? (size_t)n : 1, sizeof *op.signals);
  if (op.signals == NULL) {
    code = fail(comm, ncclSystemError, "ncclWaitSignal: out of memory");
    goto out;
  }
  if (n > 0) memcpy(op.signals, descriptors, (size_t)n * sizeof *op.signals);
  code = submit(&op);
out:
  comm_leave(comm);
  return group_error(code);
}

static void raise_signal(const struct op *op) {
  struct signals *signals = signals_of(op->comm, op->comm->rank, op->root);
  atomic_fetch_add_explicit(&signals->count[op->context][op->signal], 1, memory_order_release);
}

enum progress signal_progress(struct op *op) {
  raise_signal(op);
  return op_finish(op, ncclSuccess);
}

enum progress put_progress(struct op *op) {
  struct ncclComm *comm = op->comm;
  char *heap = comm_peer_heap(comm, op->root);
  if (heap == NULL) {
    comm_break(comm, ncclSystemError, "put: %s", thread_error());
    return op_finish(op, ncclSystemError);
  }
  const ncclResult_t code = copy_to_peer(comm, op->root, heap + op->target, op->send, op->bytes);
  if (code != ncclSuccess) return op_finish(op, code);
  raise_signal(op);
  return op_finish(op, ncclSuccess);
}

enum progress wait_signal_progress(struct op *op) {
  struct ncclComm *comm = op->comm;
  bool moved = false;
  op->phase = RUNNING;
  for (; op->scan < op->nsignals; op->scan++, moved = true) {
    const ncclWaitSignalDesc_t *want = &op->signals[op->scan];
    const uint64_t have = atomic_load_explicit(&signals_of(comm, want->peer, comm->rank)->count[want->ctx][want->sigIdx], memory_order_acquire);
    uint64_t *used = &comm->signals_used[want->peer][want->ctx][want->sigIdx];
    if (have < *used + (uint64_t)want->opCnt) {
      op->awaited = op->root = want->peer;
      return moved ? MOVED : WAITING;
    }
    *used += (uint64_t)want->opCnt;
  }
  return op_finish(op, ncclSuccess);
}

PNCCL(ncclCommWindowRegister);
PNCCL(ncclCommWindowDeregister);
PNCCL(ncclWinGetUserPtr);
PNCCL(ncclPutSignal);
PNCCL(ncclSignal);
PNCCL(ncclWaitSignal);

/* Communicators: the pool they come from, entering and leaving them, breaking them, ending them. make.c makes them. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "host.h"

/* ---- the pool: handles stay recognisable for ever -------------------------------------------------------------------------------- */

static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
#define KEPT_FREE 64 /* handles that rest before one is used again: a stale handle stays recognisable for a while */
static struct ncclComm *pool, *pool_end; /* a queue */
static int pool_size;
static _Atomic unsigned salts;

/* The lock is held across fork(), so that the child finds the pool whole. */
static void before_fork(void) { pthread_mutex_lock(&pool_lock); }
static void after_fork(void) { pthread_mutex_unlock(&pool_lock); }
__attribute__((constructor)) static void survive_fork(void) { pthread_atfork(before_fork, after_fork, after_fork); }

struct ncclComm *comm_new(void) {
  pthread_mutex_lock(&pool_lock);
  struct ncclComm *comm = pool_size > KEPT_FREE ? pool : NULL;
  if (comm != NULL) {
    pool = comm->next_free;
    pool_size--;
  }
  pthread_mutex_unlock(&pool_lock);
  if (comm == NULL && (comm = calloc(1, sizeof *comm)) == NULL) return NULL;
  memset((char *)comm + offsetof(struct ncclComm, next_free), 0, sizeof *comm - offsetof(struct ncclComm, next_free));
  pthread_mutex_init(&comm->lock, NULL);
  comm->generation = atomic_load(&fork_generation);
  comm->blocking = true;
  comm->timeout = default_timeout();
  comm->state = ncclInProgress;
  comm->salt = atomic_fetch_add(&salts, 1) & 0xfffff;
  atomic_store(&comm->magic, COMM_MAGIC);
  return comm;
}

/* Free what a communicator holds. Nobody may be inside any more. */
void comm_free(struct ncclComm *comm) {
  atomic_store(&comm->magic, 0);
  if (comm->worker != NULL) pyncclStreamDestroy(comm->worker);
  for (int rank = 0; rank < comm->nranks; rank++) {
    struct peer *peer = &comm->peers[rank];
    if (peer->pidfd >= 0 && peer->pid != 0) close(peer->pidfd);
    if (peer->heap != NULL) heap_unmap_peer(peer->heap, heap_span());
  }
  if (comm->segment != NULL) segment_detach(comm->segment);
  registrations_free(comm);
  windows_free(comm);
  free(comm->premuls);
  pthread_mutex_destroy(&comm->lock);
  pthread_mutex_lock(&pool_lock);
  comm->next_free = NULL;
  if (pool_size++ == 0)
    pool = comm;
  else
    pool_end->next_free = comm;
  pool_end = comm;
  pthread_mutex_unlock(&pool_lock);
}

/* ---- entering, leaving, breaking ------------------------------------------------------------------------------------------------- */

ncclResult_t comm_check(struct ncclComm *comm, const char *call) {
  const int state = atomic_load_explicit(&comm->state, memory_order_acquire);
  if (state == ncclInProgress)
    return fail(comm, ncclInvalidUsage, "%s: the communicator is still being made; poll ncclCommGetAsyncError until it is not ncclInProgress", call);
  if (state != ncclSuccess) {
    char words[sizeof comm->cause];
    pthread_mutex_lock(&comm->lock);
    memcpy(words, comm->cause, sizeof words);
    pthread_mutex_unlock(&comm->lock);
    return fail(NULL, (ncclResult_t)state, "%s: the communicator is broken since an earlier failure (%s); abort it", call, words);
  }
  const bool aborted = atomic_load_explicit(&comm->abort, memory_order_acquire);
  if (aborted || atomic_load_explicit(&comm->revoked, memory_order_acquire))
    return fail(comm, ncclInvalidUsage, "%s: the communicator was %s", call, aborted ? "aborted" : "revoked");
  if (atomic_load_explicit(&comm->head->failed, memory_order_acquire) == ncclSuccess) return ncclSuccess;
  comm_broken(comm, ncclRemoteError, comm->head->text);
  return fail(comm, ncclRemoteError, "%s: %s", call, comm->head->text);
}

struct ncclComm *comm_enter(ncclComm_t comm, const char *call, bool need_healthy, ncclResult_t *code) {
  if (comm == NULL) {
    *code = fail(NULL, ncclInvalidArgument, "%s: the communicator is NULL", call);
    return NULL;
  }
  atomic_fetch_add(&comm->users, 1); /* before the magic is read: who frees clears the magic, then waits for users */
  if (atomic_load(&comm->magic) != COMM_MAGIC) {
    atomic_fetch_sub(&comm->users, 1);
    *code = fail(NULL, ncclInvalidArgument, "%s: %p is no communicator (any more): was it destroyed or aborted?", call, (void *)comm);
    return NULL;
  }
  if (comm->generation != atomic_load_explicit(&fork_generation, memory_order_relaxed)) {
    atomic_fetch_sub(&comm->users, 1);
    *code = fail(NULL, ncclInvalidUsage,
                 "%s: this communicator was made before fork() and belongs to the parent process; make a new one in the child", call);
    return NULL;
  }
  *code = need_healthy ? comm_check(comm, call) : ncclSuccess;
  if (need_healthy && *code == ncclSuccess && atomic_load(&comm->finalized))
    *code = fail(comm, ncclInvalidUsage, "%s: the communicator was finalized", call);
  if (*code == ncclSuccess) return comm;
  atomic_fetch_sub(&comm->users, 1);
  return NULL;
}

void comm_leave(struct ncclComm *comm) { atomic_fetch_sub(&comm->users, 1); }

void comm_broken(struct ncclComm *comm, ncclResult_t code, const char *words) {
  pthread_mutex_lock(&comm->lock);
  const bool first = comm->cause[0] == 0;
  if (first) snprintf(comm->cause, sizeof comm->cause, "%s", words);
  pthread_mutex_unlock(&comm->lock);
  if (first) atomic_store_explicit(&comm->state, code, memory_order_release); /* last: who waits for a state may free what is not made */
}

ncclResult_t comm_break(struct ncclComm *comm, ncclResult_t code, const char *format, ...) {
  char text[900];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  comm_broken(comm, code, text);
  if (comm->head != NULL && atomic_exchange(&comm->head->claimed, 1) == 0) {
    snprintf(comm->head->text, sizeof comm->head->text, "rank %d reported: %s", comm->rank, text);
    atomic_store_explicit(&comm->head->failed, code, memory_order_release);
  }
  return fail(comm, code, "%s", text);
}

char *comm_peer_heap(struct ncclComm *comm, int rank) {
  struct peer *peer = &comm->peers[rank];
  char *heap = atomic_load_explicit(&peer->heap, memory_order_acquire);
  if (heap != NULL) return heap;
  pthread_mutex_lock(&comm->lock);
  heap = peer->heap;
  if (heap == NULL) {
    heap = heap_map_peer(peer->pid, atomic_load(&peer->lines->heap_fd), heap_span());
    atomic_store_explicit(&peer->heap, heap, memory_order_release);
  }
  pthread_mutex_unlock(&comm->lock);
  if (heap == NULL)
    fail(NULL, ncclSystemError, "cannot map the heap of rank %d (process %d): %s", rank, (int)peer->pid, strerror(errno));
  return heap;
}

bool given_up_by(const struct ncclComm *comm, int rank) {
  return atomic_load_explicit(&comm->head->failed, memory_order_relaxed) != ncclSuccess ||
         atomic_load_explicit(&lines_of(comm, rank)->life, memory_order_relaxed) >= LIFE_FINALIZED;
}

#define PIECE ((size_t)1 << 18) /* bytes copied to a peer between two looks: tens of microseconds */

ncclResult_t copy_to_peer(struct ncclComm *comm, int rank, void *to, const void *from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += PIECE) {
    if (given_up_by(comm, rank)) return fail(comm, ncclRemoteError, "rank %d has given up while this rank wrote to its memory", rank);
    memcpy((char *)to + at, (const char *)from + at, bytes - at < PIECE ? bytes - at : PIECE);
  }
  return ncclSuccess;
}

/* ---- the ends ------------------------------------------------------------------------------------------------------------------------ */

/* Wait until this rank's own work on the communicator is over (or `seconds` have passed): bounded, whatever the work does. With `stopped`
 * the interrupt check may end it as well, which sets that. */
static bool quiet(struct ncclComm *comm, int callers, double seconds, bool *stopped) {
  const double deadline = now() + seconds;
  double asked = now();
  while (atomic_load(&comm->pending) > 0 || atomic_load(&comm->users) > callers || atomic_load(&comm->state) == ncclInProgress) {
    const double time = now();
    if (time > deadline) return false;
    if (stopped != NULL && time - asked > 50e-3) {
      asked = time;
      if ((*stopped = interrupted())) return false;
    }
    nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
  }
  return true;
}

/* For an end that its caller may ask for again: after an error the communicator is as it was. */
static ncclResult_t become_quiet(struct ncclComm *comm, const char *call) {
  bool stopped = false;
  if (quiet(comm, 1, comm->timeout, &stopped)) return ncclSuccess;
  if (stopped) return fail(comm, ncclSystemError, "%s: interrupted", call);
  return fail(comm, ncclTimeout, "%s: work of this rank has not ended within %.1f s (%d operations under way); use ncclCommAbort", call, comm->timeout,
              atomic_load(&comm->pending));
}

static void set_life(struct ncclComm *comm, enum life life) {
  if (comm->head != NULL) atomic_store_explicit(&lines_of(comm, comm->rank)->life, life, memory_order_release);
}

/* A rank that has run ahead may end without having heard from the others. */
static ncclResult_t check_calls(struct ncclComm *comm, const char *call) {
  const bool well = atomic_load(&comm->state) == ncclSuccess && !atomic_load(&comm->abort) && !atomic_load(&comm->revoked);
  return well && comm->head != NULL ? calls_end(comm, call) : ncclSuccess;
}

/* Bounded so that a finalize or destroy on one rank never outlasts the deadline of the operations it waits for. */
ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  ncclResult_t code;
  struct ncclComm *comm = comm_enter(handle, "ncclCommFinalize", false, &code);
  if (comm == NULL) return code;
  if (atomic_load(&comm->finalized) || atomic_load(&comm->revoked)) {
    code = fail(comm, ncclInvalidUsage, "ncclCommFinalize: the communicator was already %s", comm->revoked ? "revoked" : "finalized");
  } else if (!comm->blocking) {
    atomic_store(&comm->finalized, 1);
    code = atomic_load(&comm->pending) > 0 ? ncclInProgress : ncclSuccess;
  } else if ((code = become_quiet(comm, "ncclCommFinalize")) == ncclSuccess) {
    atomic_store(&comm->finalized, 1);
    const ncclResult_t agreed = check_calls(comm, "ncclCommFinalize");
    set_life(comm, LIFE_FINALIZED);
    code = (ncclResult_t)atomic_load(&comm->state);
    if (code == ncclSuccess) code = agreed;
  }
  comm_leave(comm);
  return code;
}

/* Only one caller ends a communicator. */
static bool retire(struct ncclComm *comm) {
  uint64_t magic = COMM_MAGIC;
  return atomic_compare_exchange_strong(&comm->magic, &magic, 0);
}

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  ncclResult_t code;
  struct ncclComm *comm = comm_enter(handle, "ncclCommDestroy", false, &code);
  if (comm == NULL) return code;
  if (atomic_load(&comm->state) == ncclInProgress) atomic_store(&comm->abort, 1);
  if ((code = become_quiet(comm, "ncclCommDestroy")) != ncclSuccess) {
    comm_leave(comm);
    return code;
  }
  if (!retire(comm)) {
    comm_leave(comm);
    return fail(NULL, ncclInvalidUsage, "ncclCommDestroy: another thread ended this communicator at the same time");
  }
  char words[600];
  code = check_calls(comm, "ncclCommDestroy");
  snprintf(words, sizeof words, "%s", code != ncclSuccess ? thread_error() : "");
  set_life(comm, LIFE_DESTROYED);
  comm_leave(comm);
  quiet(comm, 0, 1.0, NULL); /* a caller that was just refused may still be on its way out */
  comm_free(comm);
  return code == ncclSuccess ? ncclSuccess : fail(NULL, code, "%s", words); /* it is destroyed all the same */
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
  ncclResult_t code;
  struct ncclComm *comm = comm_enter(handle, "ncclCommAbort", false, &code);
  if (comm == NULL) return code;
  atomic_store(&comm->abort, 1);
  if (!retire(comm)) {
    comm_leave(comm);
    return fail(NULL, ncclInvalidUsage, "ncclCommAbort: another thread ended this communicator at the same time");
  }
  set_life(comm, LIFE_ABORTED);
  comm_leave(comm);
  if (!quiet(comm, 0, 10.0, NULL)) /* a worker stuck in the user's own function: its memory must outlive it */
    return fail(NULL, ncclTimeout, "ncclCommAbort: work of this rank has not stopped within 10 s; its memory is kept");
  comm_free(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommRevoke(ncclComm_t handle, int flags) {
  ncclResult_t code;
  struct ncclComm *comm = comm_enter(handle, "ncclCommRevoke", false, &code);
  if (comm == NULL) return code;
  if (flags != NCCL_REVOKE_DEFAULT)
    code = fail(comm, ncclInvalidArgument, "ncclCommRevoke: flags 0x%x; they must be NCCL_REVOKE_DEFAULT (0)", (unsigned)flags);
  else if (atomic_load(&comm->finalized))
    code = fail(comm, ncclInvalidUsage, "ncclCommRevoke: the communicator was finalized");
  else {
    atomic_store(&comm->revoked, 1);
    set_life(comm, LIFE_REVOKED);
    if (comm->blocking && !quiet(comm, 1, comm->timeout, NULL))
      code = fail(comm, ncclTimeout, "ncclCommRevoke: work of this rank has not stopped within %.1f s", comm->timeout);
  }
  comm_leave(comm);
  return code;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t *error) {
  ncclResult_t code;
  struct ncclComm *comm = comm_enter(handle, "ncclCommGetAsyncError", false, &code);
  if (comm == NULL) return code;
  if (error == NULL) {
    code = fail(comm, ncclInvalidArgument, "ncclCommGetAsyncError: asyncError is NULL");
  } else {
    *error = (ncclResult_t)atomic_load(&comm->state);
    const bool failed_elsewhere = *error == ncclSuccess && comm->head != NULL && atomic_load(&comm->head->failed) != ncclSuccess;
    if (failed_elsewhere && !atomic_load(&comm->revoked)) *error = fail(comm, ncclRemoteError, "%s", comm->head->text);
    if (*error == ncclSuccess && !comm->blocking && atomic_load(&comm->pending) > 0) *error = ncclInProgress;
  }
  comm_leave(comm);
  return code;
}

PNCCL(ncclCommFinalize);
PNCCL(ncclCommDestroy);
PNCCL(ncclCommAbort);
PNCCL(ncclCommRevoke);
PNCCL(ncclCommGetAsyncError);

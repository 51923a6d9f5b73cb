/* Collectives that move data and compute nothing, on large ordinary memory: every rank has the kernel copy what it needs straight from the
 * processes that have it (process_vm_readv). Each byte is copied once, where the staged path copies it twice, for the price of system calls;
 * so it is for large arrays. Step 0 reads everything, step 1 waits until all have done so.
 *
 * The kernel allows it between processes of one user, unless ptrace is restricted (Yama, some containers): tried when a communicator is made. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <sys/uio.h>
#include <unistd.h>

#include "collective.h"

#define READ_PIECE ((size_t)1 << 20)   /* between two looks at whether the peer still wants it */

static _Atomic size_t threshold = DIRECT_BYTES;

size_t direct_threshold(void) { return atomic_load_explicit(&threshold, memory_order_relaxed); }

void set_direct_threshold(size_t bytes) { atomic_store_explicit(&threshold, bytes, memory_order_relaxed); }

static ssize_t read_process(pid_t pid, void *to, uint64_t from, size_t bytes) {
  struct iovec here = {to, bytes}, there = {(void *)(uintptr_t)from, bytes};
  ssize_t got;
  errno = 0;
  do got = process_vm_readv(pid, &here, 1, &there, 1, 0);
  while (got < 0 && errno == EINTR);
  return got;
}

bool can_read(const struct ncclComm *comm, int rank) {
  const struct peer *peer = &comm->peers[rank];
  pid_t pid = 0;
  if (peer->pid == getpid()) return true;
  return read_process(peer->pid, &pid, peer->lines->own_pid_at, sizeof pid) == (ssize_t)sizeof pid && pid == peer->pid;
}

bool may_go_direct(const struct op *op) {
  const struct kind_info *kind = &kinds[op->kind];
  /* A broadcast has one block, and gains from twice as much on: staged, its root does nothing twice. */
  const size_t bytes = op->kind == BROADCAST ? op->bytes / 2 : op->bytes * (size_t)op->comm->nranks;
  return !kind->reduces && bytes >= op->comm->direct_bytes;
}

bool goes_direct(const struct op *op) {
  if (!may_go_direct(op)) return false;
  for (int rank = 0; rank < op->comm->nranks; rank++) /* where blocks land on blocks that are still to be sent, chunks do better */
    if (op->kind == ALL_TO_ALL && post_of(op->comm, rank, op->ticket)->in_place) return false;
  return true;
}

static ncclResult_t read_from(const struct op *op, int rank, char *to, size_t offset) {
  struct ncclComm *comm = op->comm;
  const uint64_t from = post_of(comm, rank, op->ticket)->address[0] + offset;
  for (size_t at = 0; at < op->bytes;) {
    const size_t length = op->bytes - at < READ_PIECE ? op->bytes - at : READ_PIECE;
    if (given_up_by(comm, rank)) return fail(comm, ncclRemoteError, "rank %d has given up while this rank read its memory", rank);
    const ssize_t got = read_process(comm->peers[rank].pid, to + at, from + at, length);
    if (got <= 0) /* a rank that gives up may free its memory at once */
      return fail(comm, given_up_by(comm, rank) || errno == ESRCH ? ncclRemoteError : ncclSystemError,
                  "rank %d (process %d): its memory cannot be read: %s", rank, (int)comm->peers[rank].pid, strerror(errno));
    at += (size_t)got;
  }
  return ncclSuccess;
}

ncclResult_t direct_step(const struct op *op) {
  const struct kind_info *kind = &kinds[op->kind];
  const struct ncclComm *comm = op->comm;
  const bool to_many = !kind->from_root; /* all_gather, gather, all_to_all: a block of every rank */
  const size_t offset = kind->blocks ? (size_t)comm->rank * op->bytes : 0;
  if (op->step == 1 || !receives(op)) return ncclSuccess;
  for (int i = 0, rank = comm->rank; i < comm->nranks; i++, rank = next_rank(comm, rank)) {
    if (kind->from_root && rank != op->root) continue;
    char *to = (char *)op->recv + (to_many ? (size_t)rank * op->bytes : 0);
    const char *mine = (const char *)(uintptr_t)post_of(comm, rank, op->ticket)->address[0] + offset;
    if (comm->peers[rank].pid != getpid()) {
      const ncclResult_t code = read_from(op, rank, to, offset);
      if (code != ncclSuccess) return code;
    } else if (to != mine) {
      copy_to((struct target){to, fills_caches(op)}, mine, op->bytes);
    }
  }
  return ncclSuccess;
}

/* Collectives that move data and compute nothing, on large ordinary memory: every rank has the kernel copy what it needs straight from the
 * processes that have it (process_vm_readv). Each byte is copied once, where the staged path copies it twice, for the price of system calls;
 * so it is for large arrays. Step 0 moves everything, step 1 waits until all have done so.
 *
 * Of a broadcast the root writes its share into the others' memory (process_vm_writev), for else its core would have nothing to do. Memory
 * that its owner may have freed must not be written to. So a writer says to whom it writes, and where; then it looks whether that one has
 * withdrawn; then it has the kernel write, which reads where and how much from shared memory. Who withdraws says so, makes that no bytes, and
 * waits while the writer is in the kernel: when it is stopped it is not, and will write nothing when it goes on.
 *
 * The kernel allows it between processes of one user, unless ptrace is restricted (Yama, some containers): tried when a communicator is made. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "collective.h"

#define DIRECT_PIECE ((size_t)1 << 20)   /* between two looks at whether the peer still wants it */

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

bool can_reach(const struct ncclComm *comm, int rank) {
  const struct peer *peer = &comm->peers[rank];
  pid_t pid = 0;
  if (peer->pid == getpid()) return true;
  if (read_process(peer->pid, &pid, peer->lines->own_pid_at, sizeof pid) != (ssize_t)sizeof pid || pid != peer->pid) return false;
  struct iovec here = {&pid, sizeof pid}, there = {(void *)(uintptr_t)peer->lines->own_pid_at, sizeof pid};
  return process_vm_writev(peer->pid, &here, 1, &there, 1, 0) == (ssize_t)sizeof pid;
}

/* Where every rank reads and writes, and the caches do not hold it all: the kernel's copy stores through them, and chunks past them, which is
 * quicker though it copies twice (16 MiB all_gather 1.1 ms against 1.5 on 2 ranks, 2.3 against 5.3 on 4). The same on all ranks. */
static bool overflows(const struct op *op) {
  const size_t n = (size_t)op->comm->nranks, received = n * n * op->bytes;
  if (op->kind != ALL_GATHER && op->kind != ALL_TO_ALL) return false;
  return (op->kind == ALL_GATHER ? n * op->bytes : received) + received > op->comm->cache_bytes;
}

bool may_go_direct(const struct op *op) {
  const struct kind_info *kind = &kinds[op->kind];
  /* A broadcast has one block, and gains from twice as much on: staged, its root does nothing twice. */
  const size_t bytes = op->kind == BROADCAST ? op->bytes / 2 : op->bytes * (size_t)op->comm->nranks;
  return !kind->reduces && bytes >= op->comm->direct_bytes && !overflows(op);
}

bool goes_direct(const struct op *op) {
  if (!may_go_direct(op)) return false;
  for (int rank = 0; rank < op->comm->nranks; rank++) /* where blocks land on blocks that are still to be sent, chunks do better */
    if (op->kind == ALL_TO_ALL && post_of(op->comm, rank, op->ticket)->in_place) return false;
  return true;
}

static ncclResult_t read_from(const struct op *op, int rank, char *to, size_t offset, size_t bytes) {
  struct ncclComm *comm = op->comm;
  const uint64_t from = post_of(comm, rank, op->ticket)->address[0] + offset;
  for (size_t at = 0; at < bytes;) {
    const size_t length = bytes - at < DIRECT_PIECE ? bytes - at : DIRECT_PIECE;
    if (given_up_by(comm, rank)) return fail(comm, ncclRemoteError, "rank %d has given up while this rank read its memory", rank);
    const ssize_t got = read_process(comm->peers[rank].pid, to + at, from + at, length);
    if (got <= 0) /* a rank that gives up may free its memory at once */
      return fail(comm, given_up_by(comm, rank) || errno == ESRCH ? ncclRemoteError : ncclSystemError,
                  "rank %d (process %d): its memory cannot be read: %s", rank, (int)comm->peers[rank].pid, strerror(errno));
    at += (size_t)got;
  }
  return ncclSuccess;
}

/* ---- writing ------------------------------------------------------------------------------------------------------------------------- */

/* Bytes written, 0 when the rank has withdrawn. */
static ssize_t write_process(const struct op *op, int rank, uint64_t to, const char *from, size_t bytes) {
  const struct ncclComm *comm = op->comm;
  struct rank_lines *mine = lines_of(comm, comm->rank);
  struct iovec here = {(char *)from, bytes};
  ssize_t got = 0;
  mine->thread = (pid_t)syscall(SYS_gettid);
  mine->there = (struct iovec){(void *)(uintptr_t)to, bytes};
  atomic_store(&mine->reaches, rank + 1);
  errno = 0;
  if (atomic_load(&lines_of(comm, rank)->closed) < op->ticket) got = process_vm_writev(comm->peers[rank].pid, &here, 1, &mine->there, 1, 0);
  atomic_store(&mine->reaches, 0);
  return got;
}

/* Bytes [start, op->bytes) of a broadcast, from its root to a rank. */
static ncclResult_t write_to(const struct op *op, int rank, size_t start) {
  struct ncclComm *comm = op->comm;
  const uint64_t to = post_of(comm, rank, op->ticket)->address[1];
  for (size_t at = start; at < op->bytes;) {
    const size_t length = op->bytes - at < DIRECT_PIECE ? op->bytes - at : DIRECT_PIECE;
    char why[160];
    if (given_up_by(comm, rank) || peer_hopeless(comm, rank, false, why, sizeof why)) /* its number may be another process's now */
      return fail(comm, ncclRemoteError, "rank %d has given up while this rank wrote to its memory", rank);
    const ssize_t got = write_process(op, rank, to + at, (const char *)op->send + at, length);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0)
      return fail(comm, got == 0 || errno == ESRCH ? ncclRemoteError : ncclSystemError, "rank %d (process %d): its memory cannot be written: %s",
                  rank, (int)comm->peers[rank].pid, got == 0 ? "it has given up" : strerror(errno));
    at += (size_t)got;
  }
  return ncclSuccess;
}

/* Is a thread of another process running, or about to, rather than stopped or gone? */
static bool runs(pid_t pid, pid_t thread) {
  char path[64], text[256];
  snprintf(path, sizeof path, "/proc/%d/task/%d/stat", (int)pid, (int)thread);
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return kill(pid, 0) == 0 || errno != ESRCH;
  const ssize_t got = read(fd, text, sizeof text - 1);
  close(fd);
  if (got <= 0) return false;
  text[got] = 0;
  const char *name_ends = strrchr(text, ')');
  return name_ends == NULL || name_ends[1] == 0 || strchr("TtZX", name_ends[2]) == NULL;
}

#define LONGEST_WRITE 5.0 /* seconds: a piece takes a tenth of a millisecond where its thread gets a core */

void direct_withdraw(const struct op *op) {
  const struct ncclComm *comm = op->comm;
  if (op->kind != BROADCAST || comm->rank == op->root) return;
  struct rank_lines *root = lines_of(comm, op->root);
  const double end = now() + LONGEST_WRITE;
  atomic_store(&lines_of(comm, comm->rank)->closed, op->ticket);
  if (atomic_load(&root->reaches) != comm->rank + 1) return;
  __atomic_store_n(&root->there.iov_len, 0, __ATOMIC_SEQ_CST);
  while (atomic_load(&root->reaches) == comm->rank + 1 && runs(comm->peers[op->root].pid, root->thread) && now() < end) sched_yield();
}

/* Everybody copies as much: a receiver reads all but one share of n, which the root writes. */
static size_t read_share(const struct op *op) {
  const size_t n = (size_t)op->comm->nranks, page = 4096, share = (op->bytes / n * (n - 1) + page - 1) / page * page;
  return op->kind == BROADCAST && share < op->bytes ? share : op->bytes;
}

static ncclResult_t write_shares(const struct op *op) {
  const struct ncclComm *comm = op->comm;
  for (int rank = next_rank(comm, comm->rank); rank != comm->rank; rank = next_rank(comm, rank)) {
    const ncclResult_t code = comm->peers[rank].pid == getpid() ? ncclSuccess : write_to(op, rank, read_share(op));
    if (code != ncclSuccess) return code;
  }
  return ncclSuccess;
}

ncclResult_t direct_step(const struct op *op) {
  const struct kind_info *kind = &kinds[op->kind];
  const struct ncclComm *comm = op->comm;
  const bool to_many = !kind->from_root; /* all_gather, gather, all_to_all: a block of every rank */
  const size_t offset = kind->blocks ? (size_t)comm->rank * op->bytes : 0;
  if (op->step == 1 || !receives(op)) return ncclSuccess;
  if (op->kind == BROADCAST && comm->rank == op->root) {
    const ncclResult_t code = write_shares(op);
    if (code != ncclSuccess) return code;
  }
  for (int i = 0, rank = comm->rank; i < comm->nranks; i++, rank = next_rank(comm, rank)) {
    if (kind->from_root && rank != op->root) continue;
    char *to = (char *)op->recv + (to_many ? (size_t)rank * op->bytes : 0);
    const char *mine = (const char *)(uintptr_t)post_of(comm, rank, op->ticket)->address[0] + offset;
    if (comm->peers[rank].pid != getpid()) {
      const ncclResult_t code = read_from(op, rank, to, offset, read_share(op));
      if (code != ncclSuccess) return code;
    } else if (to != mine) {
      copy_to((struct target){to, fills_caches(op)}, mine, op->bytes);
    }
  }
  return ncclSuccess;
}

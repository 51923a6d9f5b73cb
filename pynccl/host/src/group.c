/* When and where operations run: at once in the calling thread, on a stream's worker, or with the others of a group.
 *
 * A batch is what starts together: one operation, or all of a group. On the default stream a batch runs in the calling thread (or on the
 * communicator's own worker when it is non-blocking); otherwise it becomes one task of a stream, and the group's other streams wait for it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "host.h"
#include "python.h"

struct batch {
  int n;
  struct op **ops; /* owned */
  _Atomic int references, state;
};
enum { BATCH_QUEUED, BATCH_RUNNING, BATCH_CANCELLED };

static _Thread_local struct group {
  int depth, n, room;
  struct op **ops;
  struct job *jobs, **last_job;
  ncclResult_t code; /* the first failure of a call inside */
  char error[1024];
} group;

bool in_group(void) { return group.depth > 0; }

ncclResult_t group_error(ncclResult_t code) {
  if (group.depth > 0 && code != ncclSuccess && code != ncclInProgress && group.code == ncclSuccess) {
    group.code = code;
    snprintf(group.error, sizeof group.error, "%s", thread_error());
  }
  return code;
}

/* ---- tickets ----------------------------------------------------------------------------------------------------------------------- */

static struct flow *flow_of(const struct op *op) { return op->kind == SEND ? &op->comm->to[op->root] : &op->comm->from[op->root]; }

static void take_ticket(struct op *op) {
  atomic_fetch_add(&op->comm->pending, 1);
  if (op->kind <= SCHEDULE)
    op->ticket = atomic_fetch_add(&op->comm->issued, 1) + 1;
  else if (op->kind == SEND || op->kind == RECV)
    op->ticket = atomic_fetch_add(&flow_of(op)->issued, 1) + 1;
}

enum progress op_finish(struct op *op, ncclResult_t result) {
  op->result = result;
  op->phase = COMPLETE;
  free(op->run);
  op->run = NULL;
  if (op->kind <= SCHEDULE)
    atomic_fetch_add_explicit(&op->comm->done, 1, memory_order_release);
  else if (op->kind == SEND || op->kind == RECV)
    atomic_fetch_add_explicit(&flow_of(op)->done, 1, memory_order_release);
  return DONE;
}

/* ---- batches ----------------------------------------------------------------------------------------------------------------------- */

static void free_ops(struct op **ops, int n) {
  for (int i = 0; i < n; i++) {
    free(ops[i]->signals);
    free(ops[i]);
  }
  free(ops);
}

static void drop_batch(struct batch *batch) {
  if (atomic_fetch_sub(&batch->references, 1) != 1) return;
  free_ops(batch->ops, batch->n);
  free(batch);
}

/* From here on the communicators may go. */
static void end_batch(struct batch *batch) {
  for (int i = 0; i < batch->n; i++) atomic_fetch_sub(&batch->ops[i]->comm->pending, 1);
  drop_batch(batch);
}

static void discard_batch(struct batch *batch) {
  for (int i = 0; i < batch->n; i++) op_finish(batch->ops[i], ncclSystemError);
  end_batch(batch);
}

static ncclResult_t run_batch(struct batch *batch, bool interruptible) {
  const ncclResult_t result = run(batch->ops, batch->n, interruptible);
  end_batch(batch);
  return result;
}

static ncclResult_t batch_task(void *argument) {
  struct batch *batch = argument;
  int queued = BATCH_QUEUED;
  if (atomic_compare_exchange_strong(&batch->state, &queued, BATCH_RUNNING)) return run_batch(batch, false);
  discard_batch(batch); /* whoever launched it has given up, and its buffers may be gone */
  return ncclSuccess;
}

/* The caller of a launched batch gives up: when this returns nothing touches the batch's buffers any more. Its communicators are broken,
 * since the other ranks wait for what will not come; that also ends operations that run, within a millisecond or two. */
static void cancel_batch(struct batch *batch, void *end, ncclResult_t code) {
  char words[900];
  int queued = BATCH_QUEUED;
  snprintf(words, sizeof words, "%s", thread_error());
  for (int i = 0; i < batch->n; i++) comm_break(batch->ops[i]->comm, code, "ncclGroupEnd: given up: %s", words);
  if (!atomic_compare_exchange_strong(&batch->state, &queued, BATCH_CANCELLED))
    while (end != NULL && pyncclEventQuery(end) == ncclInProgress) nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
  fail(NULL, code, "%s", words);
}

static ncclResult_t own_worker(struct ncclComm *comm, void **worker) {
  ncclResult_t code = ncclSuccess;
  pthread_mutex_lock(&comm->lock);
  if (comm->worker == NULL) code = pyncclStreamCreate(&comm->worker);
  *worker = comm->worker;
  pthread_mutex_unlock(&comm->lock);
  return code;
}

/* A batch that touches several streams runs on the first and is fenced off from the others on both sides. */
static ncclResult_t launch_on(void *primary, struct batch *batch, bool wait) {
  void *others[64], *end = NULL;
  int n = 0;
  double patience = 0;
  ncclResult_t code = pyncclEventCreate(&end);
  if (code != ncclSuccess) goto refused;
  for (int i = 0; i < batch->n; i++) {
    void *stream = batch->ops[i]->stream;
    bool known = stream_is_default(stream) || stream == primary;
    for (int j = 0; j < n; j++) known = known || others[j] == stream;
    if (batch->ops[i]->comm->timeout > patience) patience = batch->ops[i]->comm->timeout;
    if (known) continue;
    if (n == 64) {
      code = fail(NULL, ncclInvalidUsage, "ncclGroupEnd: a group may touch at most 65 streams");
      goto refused;
    }
    others[n++] = stream;
  }
  for (int i = 0; i < n; i++)
    if ((code = stream_join(primary, others[i])) != ncclSuccess) goto refused;
  atomic_fetch_add(&batch->references, 1);
  for (int i = 0; i < batch->n; i++) atomic_fetch_add(&batch->ops[i]->comm->users, 1); /* they must outlast our own look at them */
  code = stream_enqueue(primary, batch_task, batch);
  const bool enqueued = code == ncclSuccess;
  if (enqueued) code = pyncclEventRecord(end, primary);
  for (int i = 0; i < n && code == ncclSuccess; i++) code = stream_join(others[i], primary);
  /* The operations have deadlines of their own; ours is for what stands before them on the stream. */
  if (wait && code == ncclSuccess) code = pyncclEventSynchronize(end, 3 * patience);
  if (enqueued && code != ncclSuccess) cancel_batch(batch, end, code);
  for (int i = 0; i < batch->n; i++) comm_leave(batch->ops[i]->comm);
  if (!enqueued) discard_batch(batch);
  drop_batch(batch);
  pyncclEventDestroy(end);
  return code;
refused:
  discard_batch(batch);
  if (end != NULL) pyncclEventDestroy(end);
  return code;
}

/* Takes ownership of the operations, which hold their tickets. */
static ncclResult_t launch(struct op **ops, int n) {
  struct batch *batch = malloc(sizeof *batch);
  void *primary = NULL;
  struct ncclComm *eager = NULL; /* a non-blocking communicator of the batch */
  bool on_default = false;
  if (batch == NULL) abort(); /* 16 bytes: nothing could be said or undone any more */
  *batch = (struct batch){.n = n, .ops = ops, .references = 1};
  for (int i = 0; i < n; i++) {
    if (stream_is_default(ops[i]->stream))
      on_default = true;
    else if (primary == NULL)
      primary = ops[i]->stream;
    if (!ops[i]->comm->blocking) eager = ops[i]->comm;
  }
  if (primary != NULL) return launch_on(primary, batch, on_default);
  if (eager == NULL) return run_batch(batch, true);
  ncclResult_t code = own_worker(eager, &primary);
  if (code == ncclSuccess) code = stream_enqueue(primary, batch_task, batch);
  if (code == ncclSuccess) return ncclInProgress;
  discard_batch(batch);
  return code;
}

static struct op *copy_of(const struct op *op) {
  struct op *copy = malloc(sizeof *copy);
  if (copy != NULL) *copy = *op;
  return copy;
}

static bool group_add(const struct op *op) {
  if (group.n == group.room) {
    const int room = group.room == 0 ? 16 : 2 * group.room;
    struct op **ops = realloc(group.ops, (size_t)room * sizeof *ops);
    if (ops == NULL) return false;
    group.ops = ops;
    group.room = room;
  }
  struct op *copy = copy_of(op);
  if (copy == NULL) return false;
  group.ops[group.n++] = copy;
  return true;
}

static ncclResult_t out_of_memory(struct op *op) {
  free(op->signals);
  return fail(op->comm, ncclSystemError, "%s: out of memory", kinds[op->kind].name);
}

ncclResult_t submit(struct op *op) {
  ncclResult_t code = stream_check(op->stream);
  if (code != ncclSuccess) {
    free(op->signals);
    return fail(op->comm, code, "%s: %s", kinds[op->kind].name, thread_error());
  }
  if (group.depth > 0) return group_add(op) ? ncclSuccess : out_of_memory(op);
  if ((op->kind == SEND || op->kind == RECV) && op->root == op->comm->rank)
    return fail(op->comm, ncclInvalidUsage, "%s: rank %d to itself outside of a group can never complete; put the send and its recv into one group",
                kinds[op->kind].name, op->comm->rank);
  if (stream_is_default(op->stream) && op->comm->blocking) { /* the fast path: no allocation */
    take_ticket(op);
    code = run(&op, 1, true);
    atomic_fetch_sub(&op->comm->pending, 1);
    free(op->signals);
    return code;
  }
  if (before_waiting != NULL) before_waiting();
  struct op **ops = malloc(sizeof *ops);
  struct op *copy = copy_of(op);
  if (ops == NULL || copy == NULL) {
    free(ops);
    free(copy);
    return out_of_memory(op);
  }
  ops[0] = copy;
  take_ticket(copy);
  return launch(ops, 1);
}

/* ---- jobs -------------------------------------------------------------------------------------------------------------------------- */

static void *job_thread(void *argument) {
  struct job *job = argument;
  job->result = job->run(job);
  snprintf(job->error, sizeof job->error, "%s", thread_error());
  return NULL;
}

static void *detached_job(void *argument) {
  struct job *job = argument;
  job->run(job);
  free(job);
  return NULL;
}

/* Start a non-blocking job; its outcome is the communicator's state. */
static ncclResult_t detach(struct job *job) {
  pthread_t thread;
  *job->out = job->comm;
  if (pthread_create(&thread, NULL, detached_job, job) != 0) {
    job_discard(job);
    return fail(NULL, ncclSystemError, "cannot start a thread to make a communicator");
  }
  pthread_detach(thread);
  return ncclInProgress;
}

ncclResult_t submit_job(struct job *job) {
  if (group.depth > 0) {
    if (group.jobs == NULL) group.last_job = &group.jobs;
    *group.last_job = job;
    group.last_job = &job->next;
    if (!job->comm->blocking) *job->out = job->comm;
    return ncclSuccess;
  }
  if (!job->comm->blocking) return detach(job);
  const ncclResult_t code = job->run(job);
  free(job);
  return code;
}

/* All the jobs of a group at once, a thread each: they may be the ranks of one communicator. */
static ncclResult_t run_jobs(struct job *jobs) {
  ncclResult_t result = ncclSuccess;
  char error[1024] = "";
  struct job *joined = NULL, *next;
  for (struct job *job = jobs; job != NULL; job = next) {
    next = job->next;
    if (!job->comm->blocking) {
      const ncclResult_t code = detach(job);
      if (result == ncclSuccess) result = code;
      continue;
    }
    if (pthread_create(&job->thread, NULL, job_thread, job) != 0) {
      job_discard(job);
      result = fail(NULL, ncclSystemError, "ncclGroupEnd: cannot start a thread to make a communicator");
      continue;
    }
    job->next = joined;
    joined = job;
  }
  for (struct job *job = joined; job != NULL; job = next) {
    next = job->next;
    bool stopped = false;
    for (;;) {
      struct timespec slice;
      clock_gettime(CLOCK_REALTIME, &slice);
      slice.tv_nsec += 50000000;
      if (slice.tv_nsec >= 1000000000) slice.tv_sec++, slice.tv_nsec -= 1000000000;
      if (pthread_timedjoin_np(job->thread, NULL, &slice) == 0) break;
      if (!stopped && interrupted()) {
        stopped = true;
        for (struct job *other = job; other != NULL; other = other->next) atomic_store(&other->comm->abort, 1);
      }
    }
    if (job->result != ncclSuccess && (result == ncclSuccess || result == ncclInProgress)) {
      result = job->result;
      snprintf(error, sizeof error, "%s", job->error);
    }
    free(job);
  }
  if (error[0] != 0) fail(NULL, result, "%s", error);
  return result;
}

/* ---- groups ------------------------------------------------------------------------------------------------------------------------ */

ncclResult_t ncclGroupStart(void) {
  group.depth++;
  return ncclSuccess;
}

/* Take everything out of the thread's group, which is over. */
static struct group close_group(void) {
  const struct group closed = group;
  memset(&group, 0, sizeof group);
  return closed;
}

static void discard(struct group *closed) {
  struct job *next;
  for (struct job *job = closed->jobs; job != NULL; job = next) {
    next = job->next;
    job_discard(job);
  }
  free_ops(closed->ops, closed->n);
}

/* A message to oneself needs both ends in the group: nobody else can bring the other. */
static ncclResult_t check_self_messages(const struct group *closed) {
  for (int i = 0; i < closed->n; i++) {
    const struct op *op = closed->ops[i];
    if ((op->kind != SEND && op->kind != RECV) || op->root != op->comm->rank) continue;
    int sends = 0, recvs = 0;
    for (int j = 0; j < closed->n; j++) {
      const struct op *other = closed->ops[j];
      if (other->comm != op->comm || other->root != op->comm->rank) continue;
      sends += other->kind == SEND;
      recvs += other->kind == RECV;
    }
    if (sends != recvs)
      return fail(op->comm, ncclInvalidUsage, "ncclGroupEnd: rank %d sends itself %d messages in this group but receives %d; they must pair",
                  op->comm->rank, sends, recvs);
  }
  return ncclSuccess;
}

/* Every communicator of the group must still be there and well; then it is held by `pending`, not to be freed under us. */
static ncclResult_t take_tickets(struct group *closed) {
  ncclResult_t code;
  for (int i = 0; i < closed->n; i++) {
    struct ncclComm *comm = comm_enter(closed->ops[i]->comm, "ncclGroupEnd", true, &code);
    if (comm == NULL) {
      while (--i >= 0) comm_leave(closed->ops[i]->comm);
      return code;
    }
  }
  for (int i = 0; i < closed->n; i++) {
    take_ticket(closed->ops[i]);
    comm_leave(closed->ops[i]->comm);
  }
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
  if (group.depth == 0) return fail(NULL, ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--group.depth > 0) return ncclSuccess;
  struct group closed = close_group();
  ncclResult_t code = closed.code, jobs = ncclSuccess;
  if (code != ncclSuccess)
    fail(NULL, code, "%s", closed.error);
  else
    code = check_self_messages(&closed);
  if (code == ncclSuccess) {
    jobs = run_jobs(closed.jobs);
    closed.jobs = NULL;
    code = jobs == ncclInProgress ? ncclSuccess : jobs;
  }
  if (code == ncclSuccess && closed.n > 0) code = take_tickets(&closed);
  if (code != ncclSuccess || closed.n == 0) {
    discard(&closed);
    return code != ncclSuccess ? code : jobs;
  }
  code = launch(closed.ops, closed.n);
  return code == ncclSuccess ? jobs : code;
}

/* Seconds that this machine takes to copy a byte, measured once on 8 MiB. */
static double seconds_per_byte(void) {
  static _Atomic double measured;
  double best = atomic_load(&measured);
  if (best > 0) return best;
  const size_t bytes = 8u << 20;
  char *from = malloc(bytes), *to = malloc(bytes);
  best = 1;
  for (int i = 0; from != NULL && to != NULL && i < 4; i++) {
    const double start = now();
    memset(from, i, bytes);
    memcpy(to, from, bytes);
    const double seconds = (now() - start) / 2;
    if (seconds < best) best = seconds;
  }
  if (from == NULL || to == NULL) best = 0;
  free(from);
  free(to);
  atomic_store(&measured, best / (double)bytes);
  return best / (double)bytes;
}

/* The time to move what the group moves in and out of shared memory at the measured speed of a copy, in microseconds. */
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t *info) {
  if (group.depth == 0) return fail(NULL, ncclInvalidUsage, "ncclGroupSimulateEnd without ncclGroupStart");
  if (info != NULL && (info->magic != NCCL_SIM_INFO_MAGIC || info->size < sizeof *info)) /* the group ends all the same */
    group_error(fail(NULL, ncclInvalidArgument, "ncclGroupSimulateEnd: simInfo has magic 0x%x, size %zu; start from NCCL_SIM_INFO_INITIALIZER",
                     info->magic, info->size));
  if (--group.depth > 0) return ncclSuccess;
  struct group closed = close_group();
  double bytes = 0;
  for (int i = 0; i < closed.n; i++) {
    const struct op *op = closed.ops[i];
    const double block = (double)op->bytes, all = block * op->comm->nranks;
    bytes += (kinds[op->kind].blocks ? all : block) + (op->kind == ALL_GATHER || op->kind == GATHER || op->kind == ALL_TO_ALL ? all : block);
    if (kinds[op->kind].reduces) bytes += block;
  }
  const ncclResult_t code = closed.code;
  if (code != ncclSuccess) fail(NULL, code, "%s", closed.error);
  else if (info != NULL) info->estimatedTime = (float)(bytes * seconds_per_byte() * 1e6);
  discard(&closed);
  return code;
}

PNCCL(ncclGroupStart);
PNCCL(ncclGroupEnd);
PNCCL(ncclGroupSimulateEnd);

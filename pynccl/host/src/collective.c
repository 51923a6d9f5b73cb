/* The eight collectives: one table and four paths.
 *
 * Every collective begins the same way: each rank publishes a post (what it calls, and how), then waits for the posts of all. So every
 * rank sees a disagreement before any data moves, all fail with the same words, and the communicator stays usable. Small rooted ones do not
 * wait for all: posts.c says who waits for whom, how far a rank may run ahead of the others, and how it then hears of a disagreement.
 *
 *   one-shot  contributions of at most ONE_SHOT_BYTES are written (inside the post's own line when tiny) before the post is published;
 *             then everybody takes what it needs. One synchronisation. Two buffers a rank are enough for those that wait for all, for
 *             who begins the next but one knows that all have begun the next; those who run ahead have a ring of smaller ones.
 *   mapped    the buffers lie in heaps that all ranks map (ncclMemAlloc): data moves once, straight from user memory to user memory.
 *   direct    large plain memory that is only moved: the kernel copies it once, from process to process (direct.c).
 *   staged    plain memory: chunks travel through slots, as a pipeline of stages (in, [reduce,] out). The first chunk goes before the post
 *             where its path is sure, so that what takes one chunk takes one synchronisation, too.
 *
 * Staged and mapped operations are a fixed sequence of steps, the same on all ranks (some do nothing on some ranks). A rank's counter of
 * completed steps (ticks) is all that the others look at. Stage t of chunk c is step T * (c + t) + t of T stages: software pipelining with
 * a closed form. Reductions run over the ranks in rank order in every path, so the bits are the same on all ranks and in every run. */
#include <string.h>

#include "posts.h"

const struct kind_info kinds[KINDS] = {
    /*                 name            blocks reduces from_root to_root */
    [ALL_REDUCE]     = {"all_reduce",     false, true,  false, false, collective_progress},
    [REDUCE]         = {"reduce",         false, true,  false, true,  collective_progress},
    [REDUCE_SCATTER] = {"reduce_scatter", true,  true,  false, false, collective_progress},
    [BROADCAST]      = {"broadcast",      false, false, true,  false, collective_progress},
    [ALL_GATHER]     = {"all_gather",     false, false, false, false, collective_progress},
    [GATHER]         = {"gather",         false, false, false, true,  collective_progress},
    [SCATTER]        = {"scatter",        true,  false, true,  false, collective_progress},
    [ALL_TO_ALL]     = {"all_to_all",     true,  false, false, false, collective_progress},
    [SCHEDULE]       = {"schedule",       false, true,  false, false, collective_progress},
    [SEND]           = {"send",           false, false, false, false, message_progress},
    [RECV]           = {"recv",           false, false, false, false, message_progress},
    [PUT]            = {"put",            false, false, false, false, put_progress},
    [SIGNAL]         = {"signal",         false, false, false, false, signal_progress},
    [WAIT_SIGNAL]    = {"wait_signal",    false, false, false, false, wait_signal_progress},
};

static size_t contribution(const struct op *op) { return kinds[op->kind].blocks ? op->bytes * op->comm->nranks : op->bytes; }
static size_t received(const struct op *op) {
  return op->kind == ALL_GATHER || op->kind == GATHER || op->kind == ALL_TO_ALL ? op->bytes * op->comm->nranks : op->bytes;
}

/* ---- exposing ---------------------------------------------------------------------------------------------------------------- */

/* Where a contribution is exposed in a one-shot. */
static char *exposure_of(const struct op *op, int rank) {
  const struct ncclComm *comm = op->comm;
  const struct layout *at = &comm->layout;
  if (contribution(op) <= TINY_BYTES) return (char *)post_of(comm, rank, op->ticket)->payload;
  if (op->ahead) return comm->segment->base + at->ahead + ((size_t)rank * AHEAD + op->ticket % AHEAD) * at->ahead_bytes;
  return comm->segment->base + at->small + ((size_t)rank * 2 + op->turn) * ONE_SHOT_BYTES;
}

/* My contribution to bytes [offset, offset + length) of each block, packed at `to`. My own block stays where it is: only I read it. */
static void expose(const struct op *op, char *to, size_t offset, size_t length) {
  if (!contributes(op)) return;
  const char *from = (const char *)op->send + offset;
  if (!kinds[op->kind].blocks) {
    move(to, from, length);
    return;
  }
  for (int rank = 0; rank < op->comm->nranks; rank++)
    if (rank != op->comm->rank) move(to + rank * length, from + rank * op->bytes, length);
}

static void scalars_of(const struct op *op, const void **scalars) {
  for (int rank = 0; rank < op->comm->nranks; rank++) scalars[rank] = post_of(op->comm, rank, op->ticket)->scalar;
}

static void reduce_from(const struct op *op, char *to, const char *const *sources, size_t length) {
  const void *scalars[MAX_RANKS];
  const bool scaled = op->redop == REDUCE_PREMULSUM;
  if (scaled) scalars_of(op, scalars);
  reduce_block(to, (const void *const *)sources, scaled ? scalars : NULL, op->comm->nranks, length / op->element, (int)op->dtype, op->redop);
}

/* Do the buffers of all ranks fill the caches, if theirs are like mine? Then results that were not there before go past them. */
bool fills_caches(const struct op *op) {
  const struct kind_info *kind = &kinds[op->kind];
  const size_t n = (size_t)op->comm->nranks, sent = (kind->from_root ? 1 : n) * contribution(op), landing = (kind->to_root ? 1 : n) * received(op);
  if (op->send == op->recv) return (sent > landing ? sent : landing) > streaming_threshold();
  return sent + landing > streaming_threshold();
}

void take(const struct op *op, const char *const *sources, size_t stride, size_t offset, size_t length) {
  const struct kind_info *kind = &kinds[op->kind];
  const int me = op->comm->rank, n = op->comm->nranks;
  const size_t mine = kind->blocks ? (size_t)me * stride : 0;
  if (!receives(op)) return;
  const char *own = contributes(op) ? (const char *)op->send + offset + (kind->blocks ? (size_t)me * op->bytes : 0) : NULL;
  const struct target to = {(char *)op->recv + offset, fills_caches(op) && (op->send != op->recv || kind->from_root)};
  if (kind->reduces) {
    const char *inputs[MAX_RANKS];
    for (int rank = 0; rank < n; rank++) inputs[rank] = rank == me ? own : sources[rank] + mine;
    deliver(op, &to, 1, inputs, length);
  } else if (kind->from_root) {
    copy_to(to, op->root == me ? own : sources[op->root] + mine, length);
  } else {
    for (int i = 0, rank = me; i < n; i++, rank = rank + 1 == n ? 0 : rank + 1)
      copy_to((struct target){to.to + (size_t)rank * op->bytes, to.far}, rank == me ? own : sources[rank] + mine, length);
  }
  if (to.far) copy_fence();
}

static void announce(struct op *op) {
  struct ncclComm *comm = op->comm;
  struct rank_lines *lines = lines_of(comm, comm->rank);
  struct post *post = post_begin(op);
  const size_t bytes = contribution(op);
  if (!op->ahead) op->turn = comm->calls.synchronising++ & 1;
  if (op->redop == REDUCE_PREMULSUM) memcpy(post->scalar, op->scalar_device != NULL ? op->scalar_device : op->scalar, op->element);
  if (op->kind == SCHEDULE) {
    schedule_announce(op, post);
  } else if (bytes <= ONE_SHOT_BYTES) {
    expose(op, exposure_of(op, comm->rank), 0, op->bytes);
  } else {
    post->send_at = post->recv_at = NOT_MAPPED;
    post->address[0] = (uintptr_t)op->send;
    post->address[1] = (uintptr_t)op->recv;
  }
  if (op->kind != SCHEDULE && bytes > ONE_SHOT_BYTES && comm->mappable && heap_descriptor() >= 0) {
    atomic_store_explicit(&lines->heap_fd, heap_descriptor(), memory_order_relaxed);
    if (contributes(op)) post->send_at = heap_offset(op->send, bytes);
    if (receives(op)) post->recv_at = heap_offset(op->recv, received(op));
  }
  post->in_place = op->send == op->recv;
  if (op->kind != SCHEDULE && bytes > ONE_SHOT_BYTES) post->early = stage_early(op, post);
  post_publish(op, post);
}

/* ---- one-shot ---------------------------------------------------------------------------------------------------------------- */

static void one_shot(const struct op *op) {
  const char *sources[MAX_RANKS];
  const bool one = kinds[op->kind].from_root;
  if (!receives(op)) return;
  for (int rank = one ? op->root : 0; rank < (one ? op->root + 1 : op->comm->nranks); rank++) sources[rank] = exposure_of(op, rank);
  take(op, sources, op->bytes, 0, op->bytes);
}

/* ---- reducing into several places ------------------------------------------------------------------------------------------------ */

void copy_to(struct target target, const char *from, size_t bytes) {
  if (target.far)
    copy_streaming(target.to, from, bytes);
  else
    move(target.to, from, bytes);
}

void deliver(const struct op *op, const struct target *targets, int n, const char *const *sources, size_t bytes) {
  _Alignas(64) char scratch[FAR_PIECE];
  const int nsources = op->comm->nranks;
  char *far[MAX_RANKS];
  int nfar = 0;
  for (int i = 0; i < n; i++) nfar += targets[i].far;
  const size_t most = nfar > 0 ? FAR_PIECE : PIECE;
  /* The first piece ends where a line does, so that the others need not begin within one. */
  const size_t to_line = nfar > 0 ? -(uintptr_t)targets[n - 1].to & (ALIGN_SLICE - 1) : 0;
  size_t length = to_line > 0 && to_line % op->element == 0 ? to_line : most;
  for (size_t at = 0; at < bytes; at += length, length = most) {
    if (length > bytes - at) length = bytes - at;
    const char *inputs[MAX_RANKS];
    for (int rank = 0; rank < nsources; rank++) inputs[rank] = sources[rank] + at;
    char *result = targets[0].far ? scratch : targets[0].to + at;
    reduce_from(op, result, inputs, length);
    nfar = 0;
    for (int i = 0; i < n; i++) {
      if (targets[i].far)
        far[nfar++] = targets[i].to + at;
      else
        move(targets[i].to + at, result, length);
    }
    if (nfar == 0) continue;
    for (int rank = 0; rank < nsources; rank++) inputs[rank] += length;
    copy_streaming_to_all(far, nfar, result, length, inputs, nsources);
  }
}

size_t slice_start(const struct op *op, size_t count, int rank) {
  const size_t grain = op->element < ALIGN_SLICE ? ALIGN_SLICE / op->element : 1;
  const size_t grains = (count + grain - 1) / grain;
  const size_t start = grains * (size_t)rank / (size_t)op->comm->nranks * grain;
  return start < count ? start : count;
}

/* ---- the machine --------------------------------------------------------------------------------------------------------------- */

static bool peers_reached(struct op *op, const struct need *need) {
  struct ncclComm *comm = op->comm;
  const uint64_t ticks = comm->ticks + need->steps;
  const int first = need->who == NOBODY ? 0 : need->who, end = need->who == NOBODY ? comm->nranks : need->who + 1;
  for (int rank = first; rank < end; rank++) {
    if (comm->peers[rank].seen >= ticks || rank == comm->rank) continue;
    if (need->unless_early && post_of(comm, rank, op->ticket)->early) continue;
    comm->peers[rank].seen = atomic_load_explicit(&lines_of(comm, rank)->ticks, memory_order_acquire);
    if (comm->peers[rank].seen >= ticks) continue;
    op->awaited = rank;
    return false;
  }
  return true;
}

static enum progress run_steps(struct op *op) {
  struct ncclComm *comm = op->comm;
  bool moved = false;
  while (op->step < op->steps) {
    const struct need need = op->path == PATH_STAGED ? staged_needs(op) : (struct need){op->step, NOBODY, false};
    if (need.steps > 0 && !peers_reached(op, &need)) return moved ? MOVED : WAITING;
    bool awaited = true; /* by somebody */
    if (op->path == PATH_STAGED) {
      awaited = staged_do(op);
    } else {
      const ncclResult_t code = op->path == PATH_DIRECT ? direct_step(op) : mapped_step(op);
      if (code != ncclSuccess) {
        comm_break(comm, code, "%s: %s", kinds[op->kind].name, thread_error());
        direct_withdraw(op);
        return op_finish(op, code);
      }
    }
    op->step++;
    if (awaited) {
      copy_fence();
      atomic_store_explicit(&lines_of(comm, comm->rank)->ticks, comm->ticks + op->step, memory_order_release);
    }
    moved = true;
  }
  if (op->path == PATH_STAGED) staged_end(op);
  comm->ticks += op->steps;
  return op_finish(op, ncclSuccess);
}

static void alone(struct op *op) { /* a world of one */
  const char *own = op->send;
  if (op->redop == REDUCE_PREMULSUM && op->scalar_device != NULL) memcpy(op->scalar, op->scalar_device, op->element);
  const void *scalar = op->scalar;
  if (kinds[op->kind].reduces)
    reduce_block(op->recv, (const void *const *)&own, op->redop == REDUCE_PREMULSUM ? &scalar : NULL, 1, op->count, (int)op->dtype, op->redop);
  else
    move(op->recv, op->send, op->bytes);
}

enum progress collective_progress(struct op *op) {
  struct ncclComm *comm = op->comm;
  bool moved = false;
  if (op->phase == QUEUED) {
    const uint64_t done = atomic_load_explicit(&comm->done, memory_order_acquire);
    op->awaited = -1;
    op->steps = done + atomic_load_explicit(&lines_of(comm, comm->rank)->ticks, memory_order_relaxed); /* moves while the queue does */
    if (done + 1 != op->ticket) return WAITING;
    op->step = op->steps = 0;
    if (comm->nranks == 1 && op->kind != SCHEDULE) {
      alone(op);
      return op_finish(op, ncclSuccess);
    }
    if (!post_has_room(op)) return WAITING;
    announce(op);
    op->phase = ANNOUNCED;
    moved = true;
  }
  if (op->phase == ANNOUNCED) {
    if (!posts_have_come(op)) return moved ? MOVED : WAITING;
    if (!posts_agree(op)) {
      const bool waits = stream_is_default(op->stream) && comm->blocking;
      if (!is_heard(op) || (op->kind == SCHEDULE && op->schedule == NULL && !waits)) comm_break(comm, ncclInvalidUsage, "%s", thread_error());
      return op_finish(op, ncclInvalidUsage);
    }
    if (op->count == 0) return op_finish(op, ncclSuccess);
    if (op->kind == SCHEDULE) {
      const ncclResult_t code = schedule_begin(op);
      if (code != ncclSuccess) return op_finish(op, code);
      op->phase = RUNNING;
      return schedule_progress(op);
    }
    if (contribution(op) <= ONE_SHOT_BYTES) {
      one_shot(op);
      return op_finish(op, ncclSuccess);
    }
    op->path = mapped_path(op);
    if (op->path == PATH_STAGED && goes_direct(op)) op->path = PATH_DIRECT;
    if (op->path != PATH_STAGED)
      op->steps = 2;
    else
      plan_staged(op);
    op->phase = RUNNING;
  }
  return op->kind == SCHEDULE ? schedule_progress(op) : run_steps(op);
}

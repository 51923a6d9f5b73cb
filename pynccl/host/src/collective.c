/* The eight collectives: one table and three paths.
 *
 * Every collective begins the same way: each rank publishes a post (what it calls, and how), then waits for the posts of all. So every
 * rank sees a disagreement before any data moves, all fail with the same words, and the communicator stays usable. The post of
 * operation k may overwrite that of k - 2: who publishes k has completed k - 1, so all have published k - 1 and are done with k - 2.
 *
 *   one-shot  contributions of at most ONE_SHOT_BYTES are written (inside the post's own line when tiny) before the post is published;
 *             then everybody takes what it needs. One synchronisation. The same argument makes two buffers a rank enough.
 *   mapped    the buffers lie in heaps that all ranks map (ncclMemAlloc): data moves once, straight from user memory to user memory.
 *   staged    plain memory: chunks travel through STAGE_SLOTS slots a rank, as a pipeline of stages (in, [reduce,] out).
 *
 * Staged and mapped operations are a fixed sequence of steps, the same on all ranks (some do nothing on some ranks). A rank's counter of
 * completed steps (ticks) is all that the others look at. Stage t of chunk c is step T * (c + t) + t of T stages: software pipelining with
 * a closed form. Reductions run over the ranks in rank order in every path, so the bits are the same on all ranks and in every run. */
#include <stdio.h>
#include <string.h>

#include "host.h"

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

#define PUSH_BLOCK 32768 /* bytes reduced before they are pushed to the peers: stays in L1/L2 between the two */
#define ALIGN_SLICE 64   /* slices of an all-reduce begin on cache lines, so that no two ranks write one */
#define NOBODY (-1)

static bool contributes(const struct op *op) { return !kinds[op->kind].from_root || op->comm->rank == op->root; }
static bool receives(const struct op *op) { return !kinds[op->kind].to_root || op->comm->rank == op->root; }
static size_t contribution(const struct op *op) { return kinds[op->kind].blocks ? op->bytes * op->comm->nranks : op->bytes; }
static bool rooted(enum kind kind) { return kinds[kind].from_root || kinds[kind].to_root; }

/* ---- posts ------------------------------------------------------------------------------------------------------------------- */

static uint64_t signature_of(const struct op *op) {
  const uint64_t redop = kinds[op->kind].reduces ? (uint64_t)op->redop : 0xff;
  const uint64_t root = rooted(op->kind) || op->kind == SCHEDULE ? (uint64_t)(uint32_t)op->root : 0xffff;
  return (uint64_t)op->kind | (uint64_t)op->dtype << 8 | redop << 16 | root << 32;
}

static const char *call_words(uint64_t signature, uint64_t count, char *buffer, size_t size) {
  const enum kind kind = signature & 0xff;
  const int used = snprintf(buffer, size, "%s(count=%llu, %s", kinds[kind].name, (unsigned long long)count, dtype_name(signature >> 8 & 0xff));
  size_t at = (size_t)used < size ? (size_t)used : size - 1;
  if (kinds[kind].reduces) at += snprintf(buffer + at, size - at, ", %s", redop_name(signature >> 16 & 0xff));
  if (at < size && rooted(kind)) at += snprintf(buffer + at, size - at, ", root=%d", (int)(signature >> 32));
  if (at < size && kind == SCHEDULE) at += snprintf(buffer + at, size - at, ", #%08x", (unsigned)(signature >> 32));
  const bool barrier = kind == ALL_REDUCE && count == 1 && (signature >> 8 & 0xff) == ncclUint8 && (signature >> 16 & 0xff) == REDUCE_MAX;
  if (at < size) snprintf(buffer + at, size - at, barrier ? ") as a barrier does" : ")");
  return buffer;
}

const char *op_words(const struct op *op, char *buffer, size_t size) {
  if (op->kind <= SCHEDULE) return call_words(signature_of(op), op->count, buffer, size);
  if (op->kind == SEND || op->kind == RECV)
    snprintf(buffer, size, "%s(count=%zu, %s, peer=%d)", kinds[op->kind].name, op->count, dtype_name(op->dtype), op->root);
  else
    snprintf(buffer, size, "%s(peer=%d)", kinds[op->kind].name, op->root);
  return buffer;
}

static struct post *post_of(const struct ncclComm *comm, int rank, uint64_t sequence) { return &lines_of(comm, rank)->posts[sequence & 1]; }

static char *small_of(const struct ncclComm *comm, int rank, uint64_t sequence) {
  return comm->segment->base + comm->layout.small + ((size_t)rank * 2 + (sequence & 1)) * ONE_SHOT_BYTES;
}

static char *slot_of(const struct ncclComm *comm, int rank, uint64_t chunk) {
  return comm->segment->base + comm->layout.stage + ((size_t)rank * STAGE_SLOTS + chunk % STAGE_SLOTS) * comm->layout.chunk;
}

/* Where a contribution of `bytes` bytes is exposed in a one-shot. */
static char *exposure_of(const struct ncclComm *comm, int rank, uint64_t sequence, size_t bytes) {
  if (bytes <= sizeof((struct post *)0)->payload) return (char *)post_of(comm, rank, sequence)->payload;
  return small_of(comm, rank, sequence);
}

static void move(void *to, const void *from, size_t bytes) {
  if (to != from && bytes > 0) memcpy(to, from, bytes);
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

/* What I need of bytes [offset, offset + length) of each block, out of the exposures sources[] whose blocks lie `stride` bytes apart. */
static void take(const struct op *op, const char *const *sources, size_t stride, size_t offset, size_t length) {
  const struct kind_info *kind = &kinds[op->kind];
  const int me = op->comm->rank, n = op->comm->nranks;
  const size_t mine = kind->blocks ? (size_t)me * stride : 0;
  if (!receives(op)) return;
  const char *own = contributes(op) ? (const char *)op->send + offset + (kind->blocks ? (size_t)me * op->bytes : 0) : NULL;
  char *to = (char *)op->recv + offset;
  if (kind->reduces) {
    const char *inputs[MAX_RANKS];
    for (int rank = 0; rank < n; rank++) inputs[rank] = rank == me ? own : sources[rank] + mine;
    reduce_from(op, to, inputs, length);
  } else if (kind->from_root) {
    move(to, op->root == me ? own : sources[op->root] + mine, length);
  } else {
    for (int i = 0, rank = me; i < n; i++, rank = rank + 1 == n ? 0 : rank + 1)
      move(to + (size_t)rank * op->bytes, rank == me ? own : sources[rank] + mine, length);
  }
}

static void announce(struct op *op) {
  struct ncclComm *comm = op->comm;
  struct rank_lines *lines = lines_of(comm, comm->rank);
  struct post *post = &lines->posts[op->ticket & 1];
  const size_t bytes = contribution(op);
  post->signature = signature_of(op);
  post->count = op->count;
  post->send_at = post->recv_at = NOT_MAPPED;
  if (op->redop == REDUCE_PREMULSUM) memcpy(post->scalar, op->scalar_device != NULL ? op->scalar_device : op->scalar, op->element);
  if (op->kind == SCHEDULE) {
    schedule_announce(op, post);
  } else if (bytes <= ONE_SHOT_BYTES) {
    expose(op, exposure_of(comm, comm->rank, op->ticket, bytes), 0, op->bytes);
  } else if (comm->mappable && heap_descriptor() >= 0) {
    const size_t received = op->kind == ALL_GATHER || op->kind == GATHER || op->kind == ALL_TO_ALL ? op->bytes * comm->nranks : op->bytes;
    atomic_store_explicit(&lines->heap_fd, heap_descriptor(), memory_order_relaxed);
    if (contributes(op)) post->send_at = heap_offset(op->send, bytes);
    if (receives(op)) post->recv_at = heap_offset(op->recv, received);
  }
  post->in_place = op->send == op->recv;
  atomic_store_explicit(&lines->entered, op->ticket, memory_order_relaxed);
  atomic_store_explicit(&post->sequence, op->ticket, memory_order_release);
}

/* All posts are here: does everybody call the same? Every rank compares the same posts in the same order, so all say the same. */
static bool agree(struct op *op) {
  const struct ncclComm *comm = op->comm;
  const struct post *first = post_of(comm, 0, op->ticket);
  for (int rank = 1; rank < comm->nranks; rank++) {
    const struct post *post = post_of(comm, rank, op->ticket);
    if (post->signature == first->signature && post->count == first->count) continue;
    char here[160], there[160];
    fail(op->comm, ncclInvalidUsage, "operation %llu of communicator \"%s\" differs between ranks: rank 0 calls %s, rank %d calls %s",
         (unsigned long long)op->ticket, comm->name, call_words(first->signature, first->count, here, sizeof here), rank,
         call_words(post->signature, post->count, there, sizeof there));
    return false;
  }
  return true;
}

/* ---- one-shot ---------------------------------------------------------------------------------------------------------------- */

static void one_shot(const struct op *op) {
  const char *sources[MAX_RANKS];
  for (int rank = 0; rank < op->comm->nranks; rank++) sources[rank] = exposure_of(op->comm, rank, op->ticket, contribution(op));
  take(op, sources, op->bytes, 0, op->bytes);
}

/* ---- mapped: step 0 moves everything, step 1 waits until all have done so ---------------------------------------------------------- */

/* Can this operation go from user memory to user memory? Decided from the posts alone, so alike on all ranks. */
static bool all_mapped(const struct op *op) {
  const struct kind_info *kind = &kinds[op->kind];
  const bool pushes = op->kind == ALL_REDUCE || op->kind == REDUCE;
  if (!op->comm->mappable) return false;
  for (int rank = 0; rank < op->comm->nranks; rank++) {
    const struct post *post = post_of(op->comm, rank, op->ticket);
    const bool sends = !kind->from_root || rank == op->root, lands = !kind->to_root || rank == op->root;
    if (sends && post->send_at == NOT_MAPPED) return false;
    if (pushes && lands && post->recv_at == NOT_MAPPED) return false;
    if (op->kind == ALL_TO_ALL && post->in_place) return false; /* pulled blocks would land on blocks not yet pulled */
  }
  return true;
}

static size_t slice_start(const struct op *op, size_t count, int rank) {
  const size_t grain = op->element < ALIGN_SLICE ? ALIGN_SLICE / op->element : 1;
  const size_t grains = (count + grain - 1) / grain;
  const size_t start = grains * (size_t)rank / (size_t)op->comm->nranks * grain;
  return start < count ? start : count;
}

/* Reduce my slice over everybody's input and push it to everybody's output (or the root's): the fewest bytes there can be. Nobody else
 * reads or writes my slice of any buffer, so this is safe in place. */
static ncclResult_t push_slice(const struct op *op) {
  const struct ncclComm *comm = op->comm;
  const char *sources[MAX_RANKS];
  char *targets[MAX_RANKS];
  int ntargets = 0;
  for (int rank = 0; rank < comm->nranks; rank++) {
    const struct post *post = post_of(comm, rank, op->ticket);
    char *heap = comm_peer_heap(op->comm, rank);
    if (heap == NULL) return ncclSystemError;
    sources[rank] = heap + post->send_at;
    if (op->kind == ALL_REDUCE || rank == op->root) targets[ntargets++] = heap + post->recv_at;
  }
  const size_t end = slice_start(op, op->count, comm->rank + 1) * op->element;
  for (size_t at = slice_start(op, op->count, comm->rank) * op->element; at < end; at += PUSH_BLOCK) {
    const size_t length = end - at < PUSH_BLOCK ? end - at : PUSH_BLOCK;
    const char *inputs[MAX_RANKS];
    for (int rank = 0; rank < comm->nranks; rank++)
      if (given_up_by(comm, rank)) return fail(op->comm, ncclRemoteError, "rank %d has given up while this rank wrote to its memory", rank);
    for (int rank = 0; rank < comm->nranks; rank++) inputs[rank] = sources[rank] + at;
    reduce_from(op, targets[0] + at, inputs, length);
    for (int i = 1; i < ntargets; i++) move(targets[i] + at, targets[0] + at, length);
  }
  return ncclSuccess;
}

static ncclResult_t mapped_step(const struct op *op) {
  if (op->step == 1) return ncclSuccess;
  if (op->kind == ALL_REDUCE || op->kind == REDUCE) return push_slice(op);
  const char *sources[MAX_RANKS] = {NULL};
  for (int rank = 0; rank < op->comm->nranks; rank++) {
    const struct post *post = post_of(op->comm, rank, op->ticket);
    if (post->send_at == NOT_MAPPED) continue; /* not a contributor */
    char *heap = comm_peer_heap(op->comm, rank);
    if (heap == NULL) return ncclSystemError;
    sources[rank] = heap + post->send_at;
  }
  take(op, sources, op->bytes, 0, op->bytes);
  return ncclSuccess;
}

/* ---- staged ------------------------------------------------------------------------------------------------------------------ */

enum stage { STAGE_IN, STAGE_MIDDLE, STAGE_OUT };

static unsigned stages(const struct op *op) { return op->kind == ALL_REDUCE || op->kind == REDUCE ? 3 : 2; }

static uint64_t chunks(const struct op *op) { return (op->count + op->chunk - 1) / op->chunk; }

static void plan_staged(struct op *op) {
  const size_t slot = op->comm->layout.chunk / (kinds[op->kind].blocks ? op->comm->nranks : 1);
  op->chunk = slot / op->element;
  op->steps = stages(op) * (chunks(op) + stages(op) - 1);
}

/* Which chunk and stage is step `step`? False when it falls before the first or behind the last chunk: nothing to do. */
static bool staged_step(const struct op *op, uint64_t *chunk, enum stage *stage) {
  const unsigned n = stages(op), t = op->step % n;
  const uint64_t round = op->step / n;
  *stage = t == 0 ? STAGE_IN : t == n - 1 ? STAGE_OUT : STAGE_MIDDLE;
  *chunk = round - t;
  return round >= t && *chunk < chunks(op);
}

static uint64_t step_of(const struct op *op, unsigned t, uint64_t chunk) { return stages(op) * (chunk + t) + t; }

/* How many steps must the peers have completed before this rank may do its current step, and which peers (a rank, or -1 for all)? */
static uint64_t staged_needs(const struct op *op, int *who) {
  uint64_t chunk;
  enum stage stage;
  *who = NOBODY;
  if (!staged_step(op, &chunk, &stage)) return 0;
  if (stage == STAGE_IN) /* the slot must have been emptied by everybody */
    return contributes(op) && chunk >= STAGE_SLOTS ? step_of(op, stages(op) - 1, chunk - STAGE_SLOTS) + 1 : 0;
  if (stage == STAGE_OUT && !receives(op)) return 0;
  if (kinds[op->kind].from_root) *who = op->root;
  return step_of(op, (stage == STAGE_OUT ? stages(op) - 1 : 1) - 1, chunk) + 1;
}

static void staged_do(const struct op *op) {
  const struct ncclComm *comm = op->comm;
  uint64_t chunk;
  enum stage stage;
  if (!staged_step(op, &chunk, &stage)) return;
  const size_t first = chunk * op->chunk, count = op->count - first < op->chunk ? op->count - first : op->chunk;
  const size_t offset = first * op->element, length = count * op->element;
  if (stage == STAGE_IN) {
    expose(op, slot_of(comm, comm->rank, chunk), offset, length);
    return;
  }
  const char *slots[MAX_RANKS];
  for (int rank = 0; rank < comm->nranks; rank++) slots[rank] = slot_of(comm, rank, chunk);
  if (stages(op) == 2) {
    take(op, slots, length, offset, length);
    return;
  }
  if (stage == STAGE_MIDDLE) { /* my slice of the chunk, over all, into my own slot: only I read that slice of any slot */
    const size_t start = slice_start(op, count, comm->rank) * op->element, end = slice_start(op, count, comm->rank + 1) * op->element;
    for (int rank = 0; rank < comm->nranks; rank++) slots[rank] += start;
    reduce_from(op, (char *)slots[comm->rank], slots, end - start);
    return;
  }
  if (!receives(op)) return;
  for (int i = 0, rank = comm->rank; i < comm->nranks; i++, rank = rank + 1 == comm->nranks ? 0 : rank + 1) {
    const size_t start = slice_start(op, count, rank) * op->element, end = slice_start(op, count, rank + 1) * op->element;
    move((char *)op->recv + offset + start, slots[rank] + start, end - start);
  }
}

/* ---- the machine --------------------------------------------------------------------------------------------------------------- */

static bool peers_reached(struct op *op, uint64_t ticks, int who) {
  struct ncclComm *comm = op->comm;
  const int first = who == NOBODY ? 0 : who, end = who == NOBODY ? comm->nranks : who + 1;
  for (int rank = first; rank < end; rank++) {
    if (comm->peers[rank].seen >= ticks || rank == comm->rank) continue;
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
    int who = NOBODY;
    const uint64_t needs = op->path == PATH_MAPPED ? op->step : staged_needs(op, &who);
    if (needs > 0 && !peers_reached(op, comm->ticks + needs, who)) return moved ? MOVED : WAITING;
    if (op->path == PATH_MAPPED) {
      const ncclResult_t code = mapped_step(op);
      if (code != ncclSuccess) {
        comm_break(comm, code, "%s: %s", kinds[op->kind].name, thread_error());
        return op_finish(op, code);
      }
    } else {
      staged_do(op);
    }
    op->step++;
    atomic_store_explicit(&lines_of(comm, comm->rank)->ticks, comm->ticks + op->step, memory_order_release);
    moved = true;
  }
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
    announce(op);
    op->phase = ANNOUNCED;
    op->scan = 0;
    moved = true;
  }
  if (op->phase == ANNOUNCED) {
    for (; op->scan < comm->nranks; op->scan++) {
      if (atomic_load_explicit(&post_of(comm, op->scan, op->ticket)->sequence, memory_order_acquire) == op->ticket) continue;
      op->awaited = op->scan;
      return moved ? MOVED : WAITING;
    }
    if (!agree(op)) return op_finish(op, ncclInvalidUsage);
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
    op->path = all_mapped(op) ? PATH_MAPPED : PATH_STAGED;
    if (op->path == PATH_MAPPED)
      op->steps = 2;
    else
      plan_staged(op);
    op->phase = RUNNING;
  }
  return op->kind == SCHEDULE ? schedule_progress(op) : run_steps(op);
}

/* Collectives on plain memory: chunks travel through a ring of slots a rank, as a pipeline of stages (in, [reduce,] out). Stage t of chunk
 * c is step T * (c + t) + t of T stages: software pipelining with a closed form. An operation's slots are as small as its chunks allow, and
 * the next one's follow them in the ring, so that it is long before a line is written again (see RING). */
#include <time.h>

#include "collective.h"

#define PROBE_EVERY 64   /* chunks */
#define SLOW 4e9         /* bytes a second: between cores that share a cache it is 8e9 and more, else 2e9 */
#define PROBE_BYTES 8192 /* fewer are not timed */

enum stage { STAGE_IN, STAGE_MIDDLE, STAGE_OUT };

static uint64_t start_of(const struct op *op) { return (op->comm->staged + op->slot - 1) / op->slot * op->slot; }

static char *slot_of(const struct op *op, int rank, uint64_t chunk) {
  const struct layout *layout = &op->comm->layout;
  return op->comm->segment->base + layout->stage + (size_t)rank * layout->ring + (start_of(op) + chunk * op->slot) % layout->ring;
}

static uint64_t slots_of(const struct op *op) { return op->comm->layout.ring / op->slot; }

static unsigned stages(const struct op *op) { return op->kind == ALL_REDUCE || op->kind == REDUCE ? 3 : 2; }

static uint64_t staged_chunks(const struct op *op) { return (op->count + op->chunk - 1) / op->chunk; }

void plan_staged(struct op *op) {
  const size_t most = op->comm->layout.chunk, blocks = kinds[op->kind].blocks ? op->comm->nranks : 1;
  op->chunk = most / blocks / op->element;
  const size_t used = (op->count < op->chunk ? op->count : op->chunk) * op->element * blocks;
  for (op->slot = most; op->slot / 2 >= used && op->slot / 2 % LINE == 0;) op->slot /= 2;
  op->steps = stages(op) * (staged_chunks(op) + stages(op) - 1);
}

/* Which chunk and stage is step `step`? False when it falls before the first or behind the last chunk: nothing to do. */
static bool staged_step(const struct op *op, uint64_t *chunk, enum stage *stage) {
  const unsigned n = stages(op), t = op->step % n;
  const uint64_t round = op->step / n;
  *stage = t == 0 ? STAGE_IN : t == n - 1 ? STAGE_OUT : STAGE_MIDDLE;
  *chunk = round - t;
  return round >= t && *chunk < staged_chunks(op);
}

/* Steps completed once stage t of a chunk is. */
static uint64_t steps_through(unsigned stages, unsigned t, uint64_t chunk) { return stages * (chunk + t) + t + 1; }

struct need staged_needs(const struct op *op) {
  struct need need = {0, NOBODY, false};
  uint64_t chunk;
  enum stage stage;
  if (!staged_step(op, &chunk, &stage)) return need;
  if (stage == STAGE_IN) { /* the slot must have been emptied by everybody */
    if (contributes(op) && chunk >= slots_of(op)) need.steps = steps_through(stages(op), stages(op) - 1, chunk - slots_of(op));
    return need;
  }
  if (stage == STAGE_OUT && !receives(op)) return need;
  const unsigned before = (stage == STAGE_OUT ? stages(op) - 1 : 1) - 1;
  need.steps = steps_through(stages(op), before, chunk);
  if (kinds[op->kind].from_root) need.who = op->root;
  need.unless_early = before == 0 && chunk == 0;
  return need;
}

void staged_end(const struct op *op) {
  struct ncclComm *comm = op->comm;
  comm->last = (struct last_staged){comm->ticks, start_of(op), staged_chunks(op), op->slot, stages(op)};
  comm->chunks += staged_chunks(op);
  comm->staged = comm->last.start + staged_chunks(op) * op->slot;
}

/* Has everybody read what lay where the first chunk of an operation that has not begun goes? This rank has completed the last that was staged,
 * so all have begun that one, and have completed those before it. */
static bool is_free(const struct op *op) {
  struct ncclComm *comm = op->comm;
  const struct last_staged *last = &comm->last;
  const uint64_t end = start_of(op) + op->slot;
  if (end <= last->start + comm->layout.ring) return true;
  uint64_t chunk = (end - comm->layout.ring - last->start - 1) / last->slot;
  if (chunk >= last->chunks) chunk = last->chunks - 1;
  const uint64_t ticks = last->ticks + steps_through(last->stages, last->stages - 1, chunk);
  for (int rank = 0; rank < comm->nranks; rank++) {
    struct peer *peer = &comm->peers[rank];
    if (peer->seen >= ticks || rank == comm->rank) continue;
    peer->seen = atomic_load_explicit(&peer->lines->ticks, memory_order_acquire);
    if (peer->seen < ticks) return false;
  }
  return true;
}

/* A slot's lines lie in the caches of whoever wrote or read them last. Between cores that share a last-level cache they are got, or taken
 * away, quickly; else at a tenth of the speed of memory, and virtual machines change from one to the other while they run. So every rank times
 * how it writes and reads one chunk in PROBE_EVERY, the same on all ranks and always written plainly. When its own stores are slow, or the
 * others read slowly, it streams. It asks for the time that its thread ran, lest it times the scheduler. */
static bool is_probe(const struct op *op, uint64_t chunk) {
  return (op->comm->chunks + chunk) % PROBE_EVERY == PROBE_EVERY - 1 && streaming_threshold() > 0;
}

static bool streams(const struct op *op, uint64_t chunk) {
  const struct ncclComm *comm = op->comm;
  if (streaming_threshold() == 0) return true; /* as asked */
  if (is_probe(op, chunk)) return false;
  if (comm->writes_slowly) return true;
  for (int rank = 0; rank < comm->nranks; rank++)
    if (rank != comm->rank && atomic_load_explicit(&lines_of(comm, rank)->reads_slowly, memory_order_relaxed)) return true;
  return false;
}

static double time_run(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static size_t count_of(const struct op *op, uint64_t chunk) {
  const size_t left = op->count - chunk * op->chunk;
  return left < op->chunk ? left : op->chunk;
}

/* My contribution to a chunk, packed at `slot` for the others; what only I shall read stays where it is. Returns the bytes copied. */
static size_t expose_chunk(const struct op *op, uint64_t chunk, char *slot, bool far) {
  const struct ncclComm *comm = op->comm;
  const size_t count = count_of(op, chunk), length = count * op->element;
  const char *from = (const char *)op->send + chunk * op->chunk * op->element;
  if (kinds[op->kind].blocks) {
    for (int rank = next_rank(comm, comm->rank); rank != comm->rank; rank = next_rank(comm, rank))
      copy_to((struct target){slot + (size_t)rank * length, far}, from + (size_t)rank * op->bytes, length);
    return length * ((size_t)comm->nranks - 1);
  }
  const bool sliced = stages(op) == 3;
  const size_t start = sliced ? slice_start(op, count, comm->rank) * op->element : length;
  const size_t end = sliced ? slice_start(op, count, comm->rank + 1) * op->element : length;
  copy_to((struct target){slot, far}, from, start);
  copy_to((struct target){slot + end, far}, from + end, length - end);
  return start + length - end;
}

static void stage_in(const struct op *op, uint64_t chunk) {
  struct ncclComm *comm = op->comm;
  if (!contributes(op)) return;
  const bool probe = is_probe(op, chunk);
  const double start = probe ? time_run() : 0;
  const size_t bytes = expose_chunk(op, chunk, slot_of(op, comm->rank, chunk), streams(op, chunk));
  if (probe && bytes >= PROBE_BYTES) comm->writes_slowly = (double)bytes < SLOW * (time_run() - start);
}

/* The last stage: what I need of a chunk, out of everybody's slots. Returns the bytes that others had written. */
static size_t take_chunk(const struct op *op, const char *const *slots, size_t offset, size_t count) {
  const struct ncclComm *comm = op->comm;
  const size_t length = count * op->element, others = (size_t)comm->nranks - 1;
  if (!receives(op)) return 0;
  if (stages(op) == 2) {
    take(op, slots, length, offset, length);
    return kinds[op->kind].from_root ? (op->root == comm->rank ? 0 : length) : others * length;
  }
  const bool far = fills_caches(op) && op->send != op->recv;
  size_t taken = 0;
  for (int rank = next_rank(comm, comm->rank); rank != comm->rank; rank = next_rank(comm, rank)) {
    const size_t start = slice_start(op, count, rank) * op->element, end = slice_start(op, count, rank + 1) * op->element;
    copy_to((struct target){(char *)op->recv + offset + start, far}, slots[rank] + start, end - start);
    taken += end - start;
  }
  return taken;
}

/* Will this be staged, whatever the others' posts say? See mapped_path. */
static bool is_sure(const struct op *op, const struct post *post) {
  const bool reads_sent = op->kind != ALL_GATHER && op->kind != GATHER && op->kind != ALL_TO_ALL; /* mapped_path: wherever the result goes */
  if (may_go_direct(op)) return false;
  return !op->comm->mappable || (post->send_at == NOT_MAPPED && (reads_sent || (receives(op) && post->recv_at == NOT_MAPPED)));
}

bool stage_early(struct op *op, const struct post *post) {
  if (op->count == 0 || !contributes(op) || !is_sure(op, post)) return false;
  plan_staged(op);
  if (!is_free(op)) return false;
  stage_in(op, 0);
  copy_fence();
  return true;
}

bool staged_do(const struct op *op) {
  const struct ncclComm *comm = op->comm;
  uint64_t chunk;
  enum stage stage;
  if (!staged_step(op, &chunk, &stage)) return false;
  if (stage == STAGE_IN) {
    if (chunk == 0 && post_of(comm, comm->rank, op->ticket)->early) return false;
    stage_in(op, chunk);
    return true;
  }
  const size_t first = chunk * op->chunk, count = count_of(op, chunk), offset = first * op->element;
  const bool probe = is_probe(op, chunk);
  const char *slots[MAX_RANKS];
  for (int rank = 0; rank < comm->nranks; rank++) slots[rank] = slot_of(op, rank, chunk);
  if (stage == STAGE_OUT) {
    const double start = probe ? time_run() : 0;
    const size_t bytes = take_chunk(op, slots, offset, count);
    if (probe && bytes >= PROBE_BYTES)
      atomic_store_explicit(&lines_of(comm, comm->rank)->reads_slowly, (double)bytes < SLOW * (time_run() - start), memory_order_relaxed);
    return true;
  }
  /* My slice of the chunk, over all: to my own result, and to my slot for those who want it too. */
  const size_t start = slice_start(op, count, comm->rank) * op->element, end = slice_start(op, count, comm->rank + 1) * op->element;
  const struct target mine = {(char *)op->recv + offset + start, fills_caches(op) && op->send != op->recv};
  const struct target theirs = {(char *)slots[comm->rank] + start, streams(op, chunk)};
  const bool both = receives(op) && op->kind == ALL_REDUCE;
  const struct target targets[] = {both && mine.far ? theirs : receives(op) ? mine : theirs, both && mine.far ? mine : theirs};
  for (int rank = 0; rank < comm->nranks; rank++) slots[rank] = rank == comm->rank ? (const char *)op->send + offset + start : slots[rank] + start;
  deliver(op, targets, both ? 2 : 1, slots, end - start);
  return true;
}

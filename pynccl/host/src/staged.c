/* Collectives on plain memory: chunks travel through STAGE_SLOTS slots a rank, as a pipeline of stages (in, [reduce,] out). Stage t of chunk
 * c is step T * (c + t) + t of T stages: software pipelining with a closed form. */
#include "collective.h"

#define PROBE_EVERY 64   /* chunks */
#define SLOW_READ 4e9    /* bytes a second: between cores that share a cache it is 8e9 and more, else 2e9 */
#define PROBE_BYTES 8192 /* fewer are not timed */

enum stage { STAGE_IN, STAGE_MIDDLE, STAGE_OUT };

static char *slot_of(const struct ncclComm *comm, int rank, uint64_t chunk) {
  return comm->segment->base + comm->layout.stage + ((size_t)rank * STAGE_SLOTS + chunk % STAGE_SLOTS) * comm->layout.chunk;
}

static unsigned stages(const struct op *op) { return op->kind == ALL_REDUCE || op->kind == REDUCE ? 3 : 2; }

uint64_t staged_chunks(const struct op *op) { return (op->count + op->chunk - 1) / op->chunk; }

void plan_staged(struct op *op) {
  const size_t slot = op->comm->layout.chunk / (kinds[op->kind].blocks ? op->comm->nranks : 1);
  op->chunk = slot / op->element;
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

static uint64_t step_of(const struct op *op, unsigned t, uint64_t chunk) { return stages(op) * (chunk + t) + t; }

uint64_t staged_needs(const struct op *op, int *who) {
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

/* Slots that lie modified in one core's cache reach another core quickly or, when the two share no cache, at a tenth of the speed of
 * memory; and virtual machines change from one to the other while they run. So every rank times how it reads one chunk in PROBE_EVERY, the
 * same on all ranks and always written plainly, and tells the others, which then stream theirs. */
static bool is_probe(const struct op *op, uint64_t chunk) { return (op->comm->chunks + chunk) % PROBE_EVERY == PROBE_EVERY - 1; }

static bool somebody_reads_slowly(const struct ncclComm *comm) {
  if (streaming_threshold() == 0) return true; /* as asked */
  for (int rank = 0; rank < comm->nranks; rank++)
    if (rank != comm->rank && atomic_load_explicit(&lines_of(comm, rank)->reads_slowly, memory_order_relaxed)) return true;
  return false;
}

static void tell_speed(const struct ncclComm *comm, size_t bytes, double seconds) {
  if (bytes < PROBE_BYTES || comm->oversubscribed) return; /* there it would time the scheduler */
  atomic_store_explicit(&lines_of(comm, comm->rank)->reads_slowly, (double)bytes < SLOW_READ * seconds, memory_order_relaxed);
}

/* My contribution to a chunk that begins at byte `offset`, packed at `slot` for the others; what only I shall read stays where it is. */
static void expose_chunk(const struct op *op, char *slot, bool far, size_t offset, size_t count) {
  const struct ncclComm *comm = op->comm;
  const size_t length = count * op->element;
  const char *from = (const char *)op->send + offset;
  if (!contributes(op)) return;
  if (kinds[op->kind].blocks) {
    for (int rank = next_rank(comm, comm->rank); rank != comm->rank; rank = next_rank(comm, rank))
      copy_to((struct target){slot + (size_t)rank * length, far}, from + (size_t)rank * op->bytes, length);
    return;
  }
  const bool sliced = stages(op) == 3;
  const size_t start = sliced ? slice_start(op, count, comm->rank) * op->element : length;
  const size_t end = sliced ? slice_start(op, count, comm->rank + 1) * op->element : length;
  copy_to((struct target){slot, far}, from, start);
  copy_to((struct target){slot + end, far}, from + end, length - end);
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

void staged_do(const struct op *op) {
  const struct ncclComm *comm = op->comm;
  uint64_t chunk;
  enum stage stage;
  if (!staged_step(op, &chunk, &stage)) return;
  const size_t first = chunk * op->chunk, count = op->count - first < op->chunk ? op->count - first : op->chunk;
  const size_t offset = first * op->element;
  const bool probe = is_probe(op, chunk) && streaming_threshold() > 0;
  if (stage == STAGE_IN) {
    expose_chunk(op, slot_of(comm, comm->rank, chunk), !probe && somebody_reads_slowly(comm), offset, count);
    return;
  }
  const char *slots[MAX_RANKS];
  for (int rank = 0; rank < comm->nranks; rank++) slots[rank] = slot_of(comm, rank, chunk);
  if (stage == STAGE_OUT) {
    const double start = probe ? now() : 0;
    const size_t bytes = take_chunk(op, slots, offset, count);
    if (probe) tell_speed(comm, bytes, now() - start);
    return;
  }
  /* My slice of the chunk, over all: to my own result, and to my slot for those who want it too. */
  const size_t start = slice_start(op, count, comm->rank) * op->element, end = slice_start(op, count, comm->rank + 1) * op->element;
  const struct target mine = {(char *)op->recv + offset + start, fills_caches(op) && op->send != op->recv};
  const struct target theirs = {(char *)slots[comm->rank] + start, !probe && somebody_reads_slowly(comm)};
  const bool both = receives(op) && op->kind == ALL_REDUCE;
  const struct target targets[] = {both && mine.far ? theirs : receives(op) ? mine : theirs, both && mine.far ? mine : theirs};
  for (int rank = 0; rank < comm->nranks; rank++) slots[rank] = rank == comm->rank ? (const char *)op->send + offset + start : slots[rank] + start;
  deliver(op, targets, both ? 2 : 1, slots, end - start);
}

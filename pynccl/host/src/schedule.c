/* A user's collective: one rank's part of a schedule (pynccl/collectives), run on the shared segment without Python.
 *
 * It begins as every collective does (posts, agreement), with the schedule's fingerprint for a root. Then messages are *pulled*: the
 * receiver reads them in the sender's memory, and reduces as it reads where that is safe. Two kinds of counters say what may be done:
 *
 *   ticks    of a rank: rounds begun. What a round sends is ready when its rank has begun it.
 *   pulled   of a pair of ranks: messages taken. Memory that was sent may be written again when its messages are taken (the step's fence).
 *
 * So a rank waits less than at rendezvous, for which schedules are proved free of deadlock. Peers read IN and OUT where they lie in a
 * heap that is mapped; else in this rank's share of the staging memory, which also holds SCRATCH. Long buffers go in slabs of some elements
 * of each block, the whole schedule for one slab after the other: what a slab moves stays in the caches, and any memory will do. Two
 * slabs take turns in the staging memory, so that a rank need not wait for its peers at the end of each. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "copy.h"
#include "host.h"

#define SLAB_BYTES ((size_t)1 << 20) /* of a rank's IN and OUT together: four ranks' slabs fit into the smallest last-level caches */
/* With more ranks than cores each wait may cost a turn of the scheduler, which is more than caches give. A ring of 16 MiB, 4 ranks on 2 busy
 * cores, by slabs of 1, 4, 8, 16 and 32 MiB: 200, 50, 33, 21 and 17 ms, where the library's own all-reduce took 13. */
#define LONG_SLAB_BYTES ((size_t)32 << 20)
#define APART_BYTES ((size_t)32 << 20)
#define ZEROS 4096

enum buffer { IN, OUT, SCRATCH, APART, BUFFERS }; /* APART: messages that are reduced after their round's have come; of this rank alone */
enum stage { SLAB_BEGINS, ROUND_BEGINS, PULLING, COMPUTING, SLAB_ENDS, ALL_SENT };

struct place { /* a buffer of some rank in this process's memory */
  char *base;
  size_t block, slab, turn; /* bytes from one block to the next, one slab to the next, and between the two turns of staging memory */
};

struct schedule_run {
  const pyncclSchedule_t *of;
  struct place mine[BUFFERS]; /* where this rank computes */
  bool staged[2];             /* IN, OUT: peers read a copy */
  bool far;                   /* copies go past the caches, which a slab of all ranks fills */
  size_t slab, slabs, elements; /* elements of a block in a slab; in this one */
  size_t in_at, out_at, scratch_at, turn; /* in each rank's staging memory, bytes */
  uint64_t at, taken;         /* slabs done; messages known to be taken, ever in this operation */
  int round, row, left;
  enum stage stage;
  unsigned char done[]; /* the round's receives; then, aligned, APART */
};

static void copy_plainly(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }

static size_t most_blocks(const pyncclSchedule_t *schedule) {
  return (size_t)(schedule->in_blocks > schedule->out_blocks ? schedule->in_blocks : schedule->out_blocks);
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

static char *staging_of(const struct ncclComm *comm, int rank) {
  return comm->segment->base + comm->layout.stage + (size_t)rank * comm->layout.ring;
}

static struct post *post_at(const struct op *op, int rank) { return post_of(op->comm, rank, op->ticket); }

static uint64_t mapped_at(const struct op *op, const void *pointer, int blocks) {
  if (pointer == NULL || blocks == 0 || !op->comm->mappable || heap_descriptor() < 0) return NOT_MAPPED;
  return heap_offset(pointer, op->bytes * (size_t)blocks);
}

void schedule_announce(const struct op *op, struct post *post) {
  if (op->count == 0) return;
  post->crowded = op->comm->oversubscribed; /* cores may differ, slabs must not */
  post->send_at = mapped_at(op, op->send, op->schedule->in_blocks);
  post->recv_at = mapped_at(op, op->recv, op->schedule->out_blocks);
  if (heap_descriptor() >= 0) atomic_store_explicit(&lines_of(op->comm, op->comm->rank)->heap_fd, heap_descriptor(), memory_order_relaxed);
}

/* ---- where things are ---------------------------------------------------------------------------------------------------------------- */

/* Does this rank have the buffer? A broadcast has IN, and a reduce OUT, on the root alone. */
static bool has(const pyncclSchedule_t *schedule, int rank, enum buffer buffer) {
  return (buffer == IN ? schedule->in_root : schedule->out_root) < 0 || (buffer == IN ? schedule->in_root : schedule->out_root) == rank;
}

static uint64_t at_in_heap(const struct post *post, enum buffer buffer) { return buffer == IN ? post->send_at : post->recv_at; }

static bool needs_staging(const struct op *op, int rank, enum buffer buffer) {
  const pyncclSchedule_t *schedule = op->schedule;
  return (buffer == IN ? schedule->sends_in : schedule->sends_out) && has(schedule, rank, buffer) &&
         at_in_heap(post_at(op, rank), buffer) == NOT_MAPPED;
}

static struct place plain(const struct op *op, const void *base, size_t slab) {
  return (struct place){(char *)base, op->bytes, slab * op->element, 0};
}

static struct place in_staging(const struct op *op, const struct schedule_run *run, int rank, size_t at) {
  return (struct place){staging_of(op->comm, rank) + at, run->slab * op->element, 0, run->turn};
}

/* Where a peer's buffer can be read; a NULL base, and the error, if it cannot. */
static struct place place_of(struct op *op, int rank, enum buffer buffer) {
  const struct schedule_run *run = op->run;
  if (buffer == SCRATCH) return in_staging(op, run, rank, run->scratch_at);
  const uint64_t at = at_in_heap(post_at(op, rank), buffer);
  if (at == NOT_MAPPED) return in_staging(op, run, rank, buffer == IN ? run->in_at : run->out_at);
  char *heap = comm_peer_heap(op->comm, rank);
  return plain(op, heap == NULL ? NULL : heap + at, run->slab);
}

/* Bytes [*first, *first + *length) of the block of `chunk`, for `chunks` chunks of the current slab. */
static void bounds(const struct op *op, int chunk, int chunks, size_t *first, size_t *length) {
  const size_t parts = (size_t)op->schedule->parts, part = (size_t)chunk % parts, elements = op->run->elements;
  *first = part * elements / parts * op->element;
  *length = (part + (size_t)chunks) * elements / parts * op->element - *first;
}

static char *address(const struct op *op, const struct place *place, int chunk, size_t first) {
  return place->base + op->run->at * place->slab + (op->run->at & 1) * place->turn + (size_t)(chunk / op->schedule->parts) * place->block + first;
}

/* A span of one of this rank's own buffers. */
static char *own(const struct op *op, int buffer, int chunk, size_t first) {
  const struct schedule_run *run = op->run;
  if (buffer != APART) return address(op, &run->mine[buffer], chunk, first);
  const size_t parts = (size_t)op->schedule->parts;
  return run->mine[APART].base + (size_t)chunk * ((run->slab + parts - 1) / parts) * op->element;
}

/* ---- beginning ----------------------------------------------------------------------------------------------------------------------- */

/* How long a slab is, and what lies where in staging memory: from the schedule and everybody's posts alone, so alike on all ranks. */
static bool plan_slabs(struct op *op, struct schedule_run *run) {
  const pyncclSchedule_t *schedule = op->schedule;
  const struct ncclComm *comm = op->comm;
  const size_t line = 64, parts = (size_t)schedule->parts, scratch = ((size_t)schedule->scratch_chunks + parts - 1) / parts;
  bool in = false, out = false, crowded = false;
  for (int rank = 0; rank < comm->nranks; rank++) {
    in = in || needs_staging(op, rank, IN);
    out = out || needs_staging(op, rank, OUT);
    crowded = crowded || post_at(op, rank)->crowded != 0;
  }
  const size_t most = most_blocks(schedule);
  const size_t blocks = (in ? (size_t)schedule->in_blocks : 0) + (out ? (size_t)schedule->out_blocks : 0) + scratch;
  run->turn = 2 * comm->layout.chunk;
  size_t slab = (crowded ? LONG_SLAB_BYTES : SLAB_BYTES) / 2 / most / op->element;
  if (schedule->most_apart > 0) slab = least(slab, APART_BYTES / (size_t)schedule->most_apart * parts / op->element);
  if (slab == 0) slab = 1;
  if (blocks > 0) slab = least(slab, (run->turn - 3 * line) / blocks / op->element);
  if (slab == 0) return false;
  const size_t even = parts * (op->element < line ? line / op->element : 1); /* chunks that begin on cache lines */
  run->slab = least(slab < even ? slab : slab / even * even, op->count);
  run->slabs = (op->count + run->slab - 1) / run->slab;
  const size_t block = run->slab * op->element;
  run->in_at = 0;
  run->out_at = (run->in_at + (in ? (size_t)schedule->in_blocks * block : 0) + line - 1) / line * line;
  run->scratch_at = (run->out_at + (out ? (size_t)schedule->out_blocks * block : 0) + line - 1) / line * line;
  return true;
}

ncclResult_t schedule_begin(struct op *op) {
  const pyncclSchedule_t *schedule = op->schedule;
  struct schedule_run plan = {.of = schedule};
  if (!plan_slabs(op, &plan))
    return fail(op->comm, ncclInvalidUsage, "schedule \"%s\": %d ranks leave too little staging memory for its scratch; use one with less",
                schedule->name, op->comm->nranks);
  const size_t parts = (size_t)schedule->parts, receives = ((size_t)schedule->most_receives + 63) / 64 * 64;
  const size_t apart = (size_t)schedule->apart_chunks * ((plan.slab + parts - 1) / parts) * op->element;
  struct schedule_run *run = op->run = malloc(sizeof *run + 64 + receives + apart);
  if (run == NULL) return fail(op->comm, ncclSystemError, "schedule \"%s\": out of memory", schedule->name);
  *run = plan;
  for (int buffer = IN; buffer <= OUT; buffer++) run->staged[buffer] = needs_staging(op, op->comm->rank, buffer);
  run->far = 2 * (size_t)op->comm->nranks * most_blocks(schedule) * run->slab * op->element > streaming_threshold();
  run->mine[IN] = plain(op, op->send, run->slab); /* never written: its copy is for peers */
  run->mine[OUT] = run->staged[OUT] ? in_staging(op, run, op->comm->rank, run->out_at) : plain(op, op->recv, run->slab);
  run->mine[SCRATCH] = in_staging(op, run, op->comm->rank, run->scratch_at);
  run->mine[APART].base = (char *)(((uintptr_t)run->done + receives + 63) & ~(uintptr_t)63);
  op->steps = run->slabs * ((uint64_t)schedule->most_rounds + 1);
  return ncclSuccess;
}

/* ---- counters ------------------------------------------------------------------------------------------------------------------------ */

static uint64_t ticks_at(const struct op *op, int rounds) {
  return op->comm->ticks + op->run->at * ((uint64_t)op->schedule->most_rounds + 1) + 1 + (uint64_t)rounds;
}

static void tick(const struct op *op, uint64_t ticks) {
  copy_fence();
  atomic_store_explicit(&lines_of(op->comm, op->comm->rank)->ticks, ticks, memory_order_release);
}

static bool has_begun(struct op *op, int rank, int rounds) {
  struct peer *peer = &op->comm->peers[rank];
  const uint64_t ticks = ticks_at(op, rounds);
  if (peer->seen >= ticks) return true;
  peer->seen = atomic_load_explicit(&lines_of(op->comm, rank)->ticks, memory_order_acquire);
  if (peer->seen >= ticks) return true;
  op->awaited = rank;
  return false;
}

/* Have the first `messages` messages that this rank sends been taken? */
static bool are_taken(struct op *op, uint64_t messages) {
  const struct ncclComm *comm = op->comm;
  const pyncclSchedule_t *schedule = op->schedule;
  struct schedule_run *run = op->run;
  for (; run->taken < messages; run->taken++) {
    const pyncclScheduleSend_t *send = &schedule->sends[run->taken % (uint64_t)schedule->nsends];
    const uint64_t slab = run->taken / (uint64_t)schedule->nsends;
    const uint64_t needs = comm->to[send->peer].pulled + slab * (uint64_t)schedule->to[send->peer] + (uint64_t)send->number;
    if (atomic_load_explicit(&channel_of(comm, comm->rank, send->peer)->pulled, memory_order_acquire) >= needs) continue;
    op->awaited = send->peer;
    return false;
  }
  return true;
}

static bool is_fenced(struct op *op, const pyncclScheduleStep_t *step) {
  return !are_taken(op, op->run->at * (uint64_t)op->schedule->nsends + (uint64_t)step->fence);
}

/* ---- steps --------------------------------------------------------------------------------------------------------------------------- */

static void combine(const struct op *op, char *to, const char *own_part, const char *other, bool other_first, size_t length) {
  const void *sources[2] = {other_first ? other : own_part, other_first ? own_part : other};
  reduce_block(to, sources, NULL, 2, length / op->element, (int)op->dtype, op->redop == REDUCE_AVG ? REDUCE_SUM : op->redop);
}

/* to = from, or to = src op from. */
static void step_on(const struct op *op, const pyncclScheduleStep_t *step, const char *from, size_t first, size_t length) {
  char *to = own(op, step->dst_buffer, step->dst_chunk, step->dst_buffer == APART ? 0 : first);
  if (length == 0) return;
  if (step->reduces)
    combine(op, to, own(op, step->src_buffer, step->src_chunk, first), from, step->left, length);
  else if (to != from)
    (op->run->far ? copy_streaming : copy_plainly)(to, from, length);
}

/* Take a message, or a piece of it. */
static ncclResult_t pull(struct op *op, const pyncclScheduleStep_t *step) {
  struct ncclComm *comm = op->comm;
  size_t first, length;
  const struct place place = place_of(op, step->peer, step->from_buffer);
  if (place.base == NULL) return ncclSystemError;
  bounds(op, step->from_chunk, step->chunks, &first, &length);
  step_on(op, step, address(op, &place, step->from_chunk, first), first, length);
  if (given_up_by(comm, step->peer)) return fail(comm, ncclRemoteError, "rank %d has given up while this rank read its memory", step->peer);
  if (step->number > 0)
    atomic_store_explicit(&channel_of(comm, step->peer, comm->rank)->pulled,
                          comm->from[step->peer].pulled + op->run->at * (uint64_t)op->schedule->from[step->peer] + (uint64_t)step->number,
                          memory_order_release);
  return ncclSuccess;
}

/* Take what has come of the round's messages; those of one peer in their order. */
static bool pull_round(struct op *op, ncclResult_t *code) {
  const pyncclSchedule_t *schedule = op->schedule;
  struct schedule_run *run = op->run;
  const pyncclScheduleRound_t *round = &schedule->rounds[run->round];
  bool moved = false;
  int blocked = -1;
  for (int row = round->receives; row < round->computes; row++) {
    const pyncclScheduleStep_t *step = &schedule->steps[row];
    if (run->done[row - round->receives] || step->peer == blocked) continue;
    if (!has_begun(op, step->peer, step->peer_round) || is_fenced(op, step)) {
      blocked = step->peer;
      continue;
    }
    if ((*code = pull(op, step)) != ncclSuccess) return moved;
    run->done[row - round->receives] = 1;
    run->left--;
    moved = true;
  }
  return moved;
}

/* What peers read of a plain IN: a copy. */
static void expose(const struct op *op) {
  const struct schedule_run *run = op->run;
  if (!run->staged[IN]) return;
  const struct place copy = in_staging(op, run, op->comm->rank, run->in_at);
  for (int i = 0; i < op->schedule->nexposed; i++) {
    const pyncclScheduleSpan_t *span = &op->schedule->exposed[i];
    size_t first, length;
    bounds(op, span->chunk, span->chunks, &first, &length);
    if (length > 0) memcpy(address(op, &copy, span->chunk, first), own(op, IN, span->chunk, first), length);
  }
}

/* Divide by the number of ranks: the average of x and zeros. */
static void divide(const struct op *op, char *block, size_t length) {
  static const char zeros[ZEROS];
  const void *sources[MAX_RANKS];
  for (int rank = 0; rank < op->comm->nranks; rank++) sources[rank] = zeros;
  for (size_t at = 0; at < length; at += ZEROS) {
    sources[0] = block + at;
    reduce_block(block + at, sources, NULL, op->comm->nranks, least(ZEROS, length - at) / op->element, (int)op->dtype, REDUCE_AVG);
  }
}

static void deliver(const struct op *op) {
  const struct schedule_run *run = op->run;
  const struct place target = plain(op, op->recv, run->slab);
  const size_t length = run->elements * op->element;
  if (op->recv == NULL || !has(op->schedule, op->comm->rank, OUT)) return;
  for (int block = 0; block < op->schedule->out_blocks; block++) {
    char *from = address(op, &run->mine[OUT], block * op->schedule->parts, 0), *to = address(op, &target, block * op->schedule->parts, 0);
    if (run->staged[OUT]) memcpy(to, from, length);
    if (op->redop == REDUCE_AVG) divide(op, to, length);
  }
}

static void end(struct op *op) {
  struct ncclComm *comm = op->comm;
  for (int rank = 0; rank < comm->nranks; rank++) {
    comm->to[rank].pulled += op->run->slabs * (uint64_t)op->schedule->to[rank];
    comm->from[rank].pulled += op->run->slabs * (uint64_t)op->schedule->from[rank];
  }
  comm->ticks += op->steps;
  tick(op, comm->ticks);
}

static enum progress broken(struct op *op, ncclResult_t code) {
  comm_break(op->comm, code, "schedule \"%s\": %s", op->schedule->name, thread_error());
  return op_finish(op, code);
}

enum progress schedule_progress(struct op *op) {
  const pyncclSchedule_t *schedule = op->schedule;
  struct schedule_run *run = op->run;
  ncclResult_t code = ncclSuccess;
  bool moved = false;
  for (;;) {
    switch (run->stage) {
    case SLAB_BEGINS: /* what lies in this turn's staging memory must have been taken */
      if (run->at > 1 && !are_taken(op, (run->at - 1) * (uint64_t)schedule->nsends)) return moved ? MOVED : WAITING;
      run->elements = least(run->slab, op->count - run->at * run->slab);
      expose(op);
      run->round = 0;
      run->stage = ROUND_BEGINS;
      break;
    case ROUND_BEGINS:
      tick(op, ticks_at(op, run->round));
      if (run->round == schedule->nrounds) {
        run->stage = SLAB_ENDS;
        break;
      }
      run->left = schedule->rounds[run->round].computes - schedule->rounds[run->round].receives;
      memset(run->done, 0, (size_t)run->left);
      run->row = schedule->rounds[run->round].computes;
      run->stage = PULLING;
      break;
    case PULLING:
      moved = pull_round(op, &code) || moved;
      if (code != ncclSuccess) return broken(op, code);
      if (run->left > 0) return moved ? MOVED : WAITING;
      run->stage = COMPUTING;
      break;
    case COMPUTING:
      for (; run->row < schedule->rounds[run->round].end; run->row++) {
        const pyncclScheduleStep_t *step = &schedule->steps[run->row];
        size_t first, length;
        if (is_fenced(op, step)) return moved ? MOVED : WAITING;
        bounds(op, step->dst_chunk, step->chunks, &first, &length);
        step_on(op, step, own(op, step->from_buffer, step->from_chunk, step->from_buffer == APART ? 0 : first), first, length);
      }
      run->round++;
      run->stage = ROUND_BEGINS;
      break;
    case SLAB_ENDS:
      /* An average is divided in OUT itself, which peers may still read. */
      if (op->redop == REDUCE_AVG && !run->staged[OUT] && !are_taken(op, (run->at + 1) * (uint64_t)schedule->nsends))
        return moved ? MOVED : WAITING;
      deliver(op);
      run->at++;
      run->stage = run->at < run->slabs ? SLAB_BEGINS : ALL_SENT;
      break;
    case ALL_SENT:
      if (!are_taken(op, run->slabs * (uint64_t)schedule->nsends)) return moved ? MOVED : WAITING;
      end(op);
      return op_finish(op, ncclSuccess);
    }
    moved = true;
  }
}

/* ---- the call ------------------------------------------------------------------------------------------------------------------------ */

ncclResult_t pyncclRunSchedule(const pyncclSchedule_t *schedule, const void *send, void *recv, size_t count, ncclDataType_t dtype,
                               ncclRedOp_t redop, ncclComm_t handle, cudaStream_t stream) {
  ncclResult_t code;
  struct ncclComm *comm = comm_enter(handle, "pyncclRunSchedule", true, &code);
  if (comm == NULL) return group_error(code);
  if (schedule == NULL || schedule->size != sizeof *schedule) {
    code = fail(comm, ncclInvalidArgument, "pyncclRunSchedule: schedule is NULL, or of another version of this library");
    goto out;
  }
  struct op op = {.kind = SCHEDULE, .dtype = dtype, .redop = (enum reduce_op)redop, .root = (int)(unsigned)schedule->fingerprint, .comm = comm,
                  .stream = stream, .send = send, .recv = recv, .count = count, .element = dtype_size((int)dtype), .schedule = schedule};
  const size_t most = most_blocks(schedule);
  if (op.element == 0)
    code = fail(comm, ncclInvalidArgument, "pyncclRunSchedule: unknown datatype %d", (int)dtype);
  else if ((int)redop < 0 || redop >= ncclNumOps)
    code = fail(comm, ncclInvalidArgument, "pyncclRunSchedule: reduction %d is none of ncclSum to ncclAvg", (int)redop);
  else if (schedule->nranks != comm->nranks || schedule->rank != comm->rank)
    code = fail(comm, ncclInvalidArgument, "pyncclRunSchedule: schedule \"%s\" is for rank %d of %d, and this is rank %d of %d", schedule->name,
                schedule->rank, schedule->nranks, comm->rank, comm->nranks);
  else if (schedule->parts < 1 || most < 1)
    code = fail(comm, ncclInvalidArgument, "pyncclRunSchedule: schedule \"%s\" has %d parts of %zu blocks; both are at least 1", schedule->name,
                schedule->parts, most);
  else if (count > SIZE_MAX / 4 / op.element / most)
    code = fail(comm, ncclInvalidArgument, "pyncclRunSchedule: count %zu overflows the address space", count);
  else if (count > 0 && ((send == NULL && has(schedule, comm->rank, IN)) || (recv == NULL && has(schedule, comm->rank, OUT))))
    code = fail(comm, ncclInvalidArgument, "pyncclRunSchedule: %s is NULL", send == NULL && has(schedule, comm->rank, IN) ? "sendbuff" : "recvbuff");
  if (code == ncclSuccess) {
    op.bytes = count * op.element;
    code = submit(&op);
  }
out:
  comm_leave(comm);
  return group_error(code);
}

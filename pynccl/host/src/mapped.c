/* Collectives on buffers that lie in heaps which all ranks map (ncclMemAlloc): data moves once, straight from user memory to user memory.
 * Step 0 moves everything, step 1 waits until all have done so. */
#include "collective.h"

#define PUSH_BLOCK 32768 /* bytes pushed between two looks at whether everybody still wants them */

/* Can this operation go from user memory to user memory, and how? Decided from the posts alone, so alike on all ranks.
 *
 *   push  every rank writes its part of the result (a slice of it, or its own block) to all who receive it: read once, written where it
 *         belongs. Needs the memory of all who receive; and of all who send, where the part is a slice.
 *   pull  every rank that receives reads what it needs from the others. Needs the memory of all who send. */
enum path mapped_path(const struct op *op) {
  const struct kind_info *kind = &kinds[op->kind];
  const bool adds = op->kind == ALL_REDUCE || op->kind == REDUCE, slices = adds || op->kind == BROADCAST;
  const bool pulls = op->kind == REDUCE_SCATTER || op->kind == SCATTER; /* nothing is read or written twice then */
  bool sent = true, landing = true;
  if (!op->comm->mappable) return PATH_STAGED;
  for (int rank = 0; rank < op->comm->nranks; rank++) {
    const struct post *post = post_of(op->comm, rank, op->ticket);
    if ((!kind->from_root || rank == op->root) && post->send_at == NOT_MAPPED) sent = false;
    if ((!kind->to_root || rank == op->root) && post->recv_at == NOT_MAPPED) landing = false;
    if (op->kind == ALL_TO_ALL && post->in_place) return PATH_STAGED; /* blocks would land on blocks that are still to be sent */
  }
  if (landing && !pulls && (sent || !slices)) return PATH_PUSH;
  return sent && !adds ? PATH_PULL : PATH_STAGED;
}

/* What this rank pushes, from where and to whom. */
struct push {
  size_t start, end;                /* bytes of the sources, and of the targets */
  const char *sources[MAX_RANKS];   /* in reductions of all ranks, else [0] */
  struct target targets[MAX_RANKS]; /* near ones first */
  int ntargets;
};

static void add_target(struct push *push, char *to, bool far) {
  int at = push->ntargets++;
  if (!far) { /* to the front */
    push->targets[at] = push->targets[0];
    at = 0;
  }
  push->targets[at] = (struct target){to, far};
}

/* Every rank its slice of the whole: nobody else reads or writes that slice of any buffer, so this is safe in place. */
static ncclResult_t plan_slice(const struct op *op, struct push *push) {
  const struct ncclComm *comm = op->comm;
  const bool fills = fills_caches(op);
  push->start = slice_start(op, op->count, comm->rank) * op->element;
  push->end = slice_start(op, op->count, comm->rank + 1) * op->element;
  for (int rank = 0; rank < comm->nranks; rank++) {
    const struct post *post = post_of(comm, rank, op->ticket);
    const bool lands = !kinds[op->kind].to_root || rank == op->root;
    char *heap = comm_peer_heap(op->comm, rank);
    if (heap == NULL) return ncclSystemError;
    if (op->kind == BROADCAST) {
      if (rank == op->root) push->sources[0] = heap + post->send_at;
      if (rank == op->root && post->in_place) continue;
      add_target(push, heap + post->recv_at, fills);
    } else {
      push->sources[rank] = heap + post->send_at;
      if (lands) add_target(push, heap + post->recv_at, fills && !post->in_place); /* in place its lines have just been read */
    }
  }
  return ncclSuccess;
}

/* Every rank its own block to all who receive it. */
static ncclResult_t plan_block(const struct op *op, struct push *push) {
  const struct ncclComm *comm = op->comm;
  const bool fills = fills_caches(op);
  push->end = op->bytes;
  push->sources[0] = op->send;
  for (int rank = 0; rank < comm->nranks; rank++) {
    if (kinds[op->kind].to_root && rank != op->root) continue;
    char *heap = comm_peer_heap(op->comm, rank);
    if (heap == NULL) return ncclSystemError;
    char *to = heap + post_of(comm, rank, op->ticket)->recv_at + (size_t)comm->rank * op->bytes;
    if (rank == comm->rank) to = (char *)op->recv + (size_t)rank * op->bytes;
    if (to != op->send) add_target(push, to, fills);
  }
  return ncclSuccess;
}

static ncclResult_t check_targets(const struct op *op) {
  for (int rank = 0; rank < op->comm->nranks; rank++)
    if (given_up_by(op->comm, rank)) return fail(op->comm, ncclRemoteError, "rank %d has given up while this rank wrote to its memory", rank);
  return ncclSuccess;
}

static void copy_to_all(const struct target *targets, int n, const char *from, size_t bytes) {
  char *far[MAX_RANKS];
  int nfar = 0;
  for (int i = 0; i < n; i++) {
    if (targets[i].far)
      far[nfar++] = targets[i].to;
    else
      move(targets[i].to, from, bytes);
  }
  if (nfar > 0) copy_streaming_to_all(far, nfar, from, bytes, NULL, 0);
}

static ncclResult_t push(const struct op *op) {
  struct push push;
  push.start = 0;
  push.ntargets = 0;
  ncclResult_t code = (op->kind == ALL_GATHER || op->kind == GATHER ? plan_block : plan_slice)(op, &push);
  if (code != ncclSuccess || push.ntargets == 0) return code;
  const bool adds = kinds[op->kind].reduces;
  const size_t most = adds ? PUSH_BLOCK : PIECE;
  for (size_t at = push.start; at < push.end; at += most) {
    const size_t length = push.end - at < most ? push.end - at : most;
    const char *sources[MAX_RANKS];
    struct target targets[MAX_RANKS];
    if ((code = check_targets(op)) != ncclSuccess) return code;
    for (int i = 0; i < push.ntargets; i++) targets[i] = (struct target){push.targets[i].to + at, push.targets[i].far};
    if (adds) {
      for (int rank = 0; rank < op->comm->nranks; rank++) sources[rank] = push.sources[rank] + at;
      deliver(op, targets, push.ntargets, sources, length);
    } else {
      copy_to_all(targets, push.ntargets, push.sources[0] + at, length);
    }
  }
  return ncclSuccess;
}

/* Block r of mine to rank r, which has it as block `me`; everybody begins with another rank. */
static ncclResult_t push_all_to_all(const struct op *op) {
  const struct ncclComm *comm = op->comm;
  const bool fills = fills_caches(op);
  for (int i = 0, rank = comm->rank; i < comm->nranks; i++, rank = next_rank(comm, rank)) {
    char *heap = comm_peer_heap(op->comm, rank);
    if (heap == NULL) return ncclSystemError;
    const struct target target = {heap + post_of(comm, rank, op->ticket)->recv_at + (size_t)comm->rank * op->bytes, fills};
    const char *from = (const char *)op->send + (size_t)rank * op->bytes;
    for (size_t at = 0; at < op->bytes; at += PUSH_BLOCK) {
      const ncclResult_t code = check_targets(op);
      if (code != ncclSuccess) return code;
      copy_to((struct target){target.to + at, fills}, from + at, op->bytes - at < PUSH_BLOCK ? op->bytes - at : PUSH_BLOCK);
    }
  }
  return ncclSuccess;
}

static ncclResult_t pull(const struct op *op) {
  const int me = op->comm->rank;
  const char *sources[MAX_RANKS] = {NULL};
  if (!receives(op)) return ncclSuccess;
  for (int rank = 0; rank < op->comm->nranks; rank++) {
    const struct post *post = post_of(op->comm, rank, op->ticket);
    if (post->send_at == NOT_MAPPED) continue; /* not a contributor */
    char *heap = comm_peer_heap(op->comm, rank);
    if (heap == NULL) return ncclSystemError;
    sources[rank] = heap + post->send_at;
  }
  if (op->kind == REDUCE_SCATTER) {
    const bool inside = (const char *)op->recv == (const char *)op->send + (size_t)me * op->bytes;
    for (int rank = 0; rank < op->comm->nranks; rank++) sources[rank] += (size_t)me * op->bytes;
    deliver(op, &(struct target){op->recv, !inside && fills_caches(op)}, 1, sources, op->bytes);
    return ncclSuccess;
  }
  take(op, sources, op->bytes, 0, op->bytes);
  return ncclSuccess;
}

ncclResult_t mapped_step(const struct op *op) {
  if (op->step == 1) return ncclSuccess;
  if (op->path == PATH_PULL) return pull(op);
  return op->kind == ALL_TO_ALL ? push_all_to_all(op) : push(op);
}

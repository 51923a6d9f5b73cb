/* The way through posts.c that every collective takes, small enough to be compiled into it. posts.c says what it is about. */
#ifndef PYNCCL_POSTS_H
#define PYNCCL_POSTS_H

#include "collective.h"

static inline uint64_t signature_of(const struct op *op) {
  const bool rooted = kinds[op->kind].from_root || kinds[op->kind].to_root;
  const uint64_t redop = kinds[op->kind].reduces ? (uint64_t)op->redop : 0xff;
  const uint64_t root = rooted || op->kind == SCHEDULE ? (uint64_t)(uint32_t)op->root : 0xffff;
  return (uint64_t)op->kind | (uint64_t)op->dtype << 8 | redop << 16 | root << 32;
}

/* Does such an operation go without waiting for all? The same for all who post it. `block`: its bytes. */
static inline bool runs_ahead(const struct ncclComm *comm, enum kind which, size_t block) {
  const struct kind_info *kind = &kinds[which];
  return (kind->from_root || kind->to_root) && (kind->blocks ? block * (size_t)comm->nranks : block) <= comm->ahead_bytes;
}

static inline uint64_t history_with(uint64_t history, uint64_t signature, uint64_t count) {
  if (history == 0) return 0;
  history = (history ^ signature) * 0x9e3779b97f4a7c15u;
  history = (history ^ history >> 32 ^ count) * 0xd6e8feb86659fd93u;
  return (history ^ history >> 32) | 1;
}

static inline bool has_come(const struct ncclComm *comm, int rank, uint64_t sequence) {
  return atomic_load_explicit(&post_of(comm, rank, sequence)->sequence, memory_order_acquire) == sequence;
}

static inline bool same_call(const struct post *a, const struct post *b) { return a->signature == b->signature && a->count == b->count; }

static inline bool same_history(const struct post *a, const struct post *b) {
  return same_call(a, b) && a->history == b->history && a->history != 0;
}

bool find_room(struct op *op); /* does every peer leave room for it? else it awaits one */

/* May its post, and what it exposes, overwrite what was there? Else it awaits a rank. */
static inline bool post_has_room(struct op *op) {
  op->ahead = runs_ahead(op->comm, op->kind, op->bytes);
  /* Who runs ahead keeps one operation more than it needs: those who hear from it how far all are can then go on too. */
  return op->ticket <= op->comm->calls.safe + AHEAD - op->ahead || find_room(op);
}

static inline struct post *post_begin(const struct op *op) {
  struct calls *calls = &op->comm->calls;
  struct post *post = post_of(op->comm, op->comm->rank, op->ticket);
  post->signature = signature_of(op);
  post->count = op->count;
  post->history = calls->history;
  post->safe = calls->safe;
  calls->history = history_with(calls->history, post->signature, post->count);
  return post;
}

static inline void post_publish(struct op *op, struct post *post) {
  const struct ncclComm *comm = op->comm;
  const struct kind_info *kind = &kinds[op->kind];
  op->scan = 0;
  op->until = comm->nranks;
  if (op->ahead && kind->from_root) {
    op->scan = op->root;
    op->until = comm->rank == op->root ? op->root : op->root + 1;
  } else if (op->ahead && comm->rank != op->root) {
    op->until = 0;
  }
  atomic_store_explicit(&lines_of(comm, comm->rank)->entered, op->ticket, memory_order_relaxed);
  atomic_store_explicit(&post->sequence, op->ticket, memory_order_release);
  prefetch_to_write(post_of(comm, comm->rank, op->ticket + 1)); /* its owner is who read it last */
}

/* Have those who are waited for posted? Else it awaits a rank. */
static inline bool posts_have_come(struct op *op) {
  for (; op->scan < op->until; op->scan++) {
    if (has_come(op->comm, op->scan, op->ticket)) continue;
    op->awaited = op->scan;
    return false;
  }
  return true;
}

static inline bool waits_for_all(const struct op *op) { return !op->ahead || (kinds[op->kind].to_root && op->comm->rank == op->root); }

bool posts_differ(struct op *op, bool all); /* records the error; returns false */

/* Do those who are waited for call the same? Else the error is recorded. */
static inline bool posts_agree(struct op *op) {
  struct ncclComm *comm = op->comm;
  struct calls *calls = &comm->calls;
  const struct post *own = post_of(comm, comm->rank, op->ticket);
  const bool all = waits_for_all(op);
  bool agree = own->history != 0;
  if (all) {
    calls->safe = op->ticket - 1;
    for (int rank = 0; rank < comm->nranks; rank++) agree = agree && same_history(post_of(comm, rank, op->ticket), own);
  } else if (op->until > op->root) { /* it has waited for the root */
    const struct post *post = post_of(comm, op->root, op->ticket);
    if (post->safe > calls->safe) calls->safe = post->safe;
    agree = agree && same_history(post, own);
  }
  return agree || posts_differ(op, all);
}

#endif

/* What the files of the eight collectives share: collective.c (posts, one-shot, the machine), mapped.c, direct.c, staged.c. */
#ifndef PYNCCL_COLLECTIVE_H
#define PYNCCL_COLLECTIVE_H

#include <string.h>

#include "copy.h"
#include "host.h"

#define NOBODY (-1)
#define ALIGN_SLICE 64       /* slices of an all-reduce begin on cache lines, so that no two ranks write one */
#define PIECE ((size_t)8192) /* bytes reduced before they are copied on: sources, result and copies stay in the first-level cache */
/* The same where the copies go past the caches. Then memory is what everything waits for, so it should never be idle: while a piece is stored,
 * the next one is fetched, and both are short enough to be in the first-level cache together. */
#define FAR_PIECE ((size_t)1024)

struct target { /* where a result goes */
  char *to;
  bool far; /* nobody reads it soon, or another core does: past the caches */
};

static inline bool contributes(const struct op *op) { return !kinds[op->kind].from_root || op->comm->rank == op->root; }
static inline bool receives(const struct op *op) { return !kinds[op->kind].to_root || op->comm->rank == op->root; }
static inline int next_rank(const struct ncclComm *comm, int rank) { return rank + 1 == comm->nranks ? 0 : rank + 1; }
static inline void move(void *to, const void *from, size_t bytes) {
  if (to != from && bytes > 0) memcpy(to, from, bytes);
}

/* What I need of bytes [offset, offset + length) of each block, out of the exposures sources[] whose blocks lie `stride` bytes apart. */
void take(const struct op *op, const char *const *sources, size_t stride, size_t offset, size_t length);
bool fills_caches(const struct op *op);
void copy_to(struct target target, const char *from, size_t bytes);
/* The sources, reduced in rank order, to all targets; a target that is near comes first, and may be a source. */
void deliver(const struct op *op, const struct target *targets, int n, const char *const *sources, size_t bytes);
size_t slice_start(const struct op *op, size_t count, int rank); /* the first of rank's elements, when ranks share `count` of them */

struct need { /* what peers must have done before a step */
  uint64_t steps;
  int who;           /* one, or NOBODY for all */
  bool unless_early; /* whoever put its first chunk into its slot before its post has */
};

enum path mapped_path(const struct op *op); /* staged, where it cannot be mapped */
ncclResult_t mapped_step(const struct op *op);

bool goes_direct(const struct op *op); /* when it is not mapped */
bool may_go_direct(const struct op *op); /* as far as this rank knows before it sees the posts */
ncclResult_t direct_step(const struct op *op);

/* Before the posts are exchanged: put the first chunk into its slot, if it will be staged for sure and the slot is empty. */
bool stage_early(struct op *op, const struct post *post);
void plan_staged(struct op *op);
struct need staged_needs(const struct op *op); /* before the current step */
bool staged_do(const struct op *op);           /* the current step; false: nobody will wait for it */
void staged_end(const struct op *op);

#endif

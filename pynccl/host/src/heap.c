/* Memory that peers can map: what ncclMemAlloc gives.
 *
 * Each process has one arena: a memfd with the same, large span of address space in every process, of which only the live blocks have memory
 * behind them. A pointer is an offset in it, so a peer that maps the arena once reaches every block, of now and of later. The arena is made at
 * the first allocation and lives as long as the process: peers may look at it at any time. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "host.h"

#define SPAN ((size_t)64 << 30) /* more than the memory of one rank, and little of a 128 TiB address space when 256 peers are mapped */
#define PAGE ((size_t)4096)
#define MiB ((double)(1 << 20))

struct block {
  size_t offset, bytes;
  bool retired; /* never to be given out again */
};

struct arena {
  char *base;
  int fd;
  struct block *blocks; /* the live ones, by offset: what lies between them is free, so neighbours need no merging */
  size_t nblocks, room;
  struct arena *older;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct arena *arena;     /* this process's; NULL until the first allocation */
static struct arena *inherited; /* those of the processes we were forked from: readable, but not ours to change */
static _Atomic(char *) own_base; /* the arena's, for those who ask without the lock */
static _Atomic int own_fd = -1;

static ncclResult_t make_arena(void);
static ncclResult_t insert_block(size_t bytes, size_t *offset);
static struct block *find_block(size_t offset);
static void punch(size_t offset, size_t bytes);

ncclResult_t heap_alloc(void **pointer, size_t bytes) {
  ncclResult_t result = ncclSuccess;
  size_t offset = 0;
  *pointer = NULL;
  if (bytes == 0) return ncclSuccess;
  if (bytes > SPAN)
    return fail(NULL, ncclInvalidArgument, "ncclMemAlloc: %zu bytes (%.1f MiB); a process has room for %.1f MiB", bytes, bytes / MiB, SPAN / MiB);
  bytes = (bytes + PAGE - 1) & ~(PAGE - 1);

  pthread_mutex_lock(&lock);
  if (!arena) result = make_arena();
  if (result == ncclSuccess) result = insert_block(bytes, &offset);
  pthread_mutex_unlock(&lock);
  if (result != ncclSuccess) return result;

  /* Not under the lock: it takes a second for a few GiB. The block is ours already. */
  char *base = atomic_load(&own_base);
  result = reserve(atomic_load(&own_fd), base, offset, bytes, "ncclMemAlloc");
  if (result == ncclSuccess) {
    *pointer = base + offset;
  } else {
    char words[512];
    snprintf(words, sizeof words, "%s", thread_error());
    ncclResult_t undone = heap_free(base + offset); /* gives back the part that was there */
    result = fail(NULL, result, "%s%s", words, undone == ncclSuccess ? "" : " (and giving back what there was failed)");
  }
  return result;
}

ncclResult_t heap_free(void *pointer) {
  ncclResult_t result = ncclSuccess;
  if (!pointer) return ncclSuccess;
  pthread_mutex_lock(&lock);
  uint64_t offset = heap_offset(pointer, 0);
  struct block *block = offset == NOT_MAPPED ? NULL : find_block(offset);
  if (block) {
    punch(block->offset, block->bytes);
    if (block->retired) goto out; /* its memory goes back, its range stays taken */
    size_t after = arena->nblocks - (size_t)(block + 1 - arena->blocks);
    memmove(block, block + 1, after * sizeof *block);
    arena->nblocks--;
  } else {
    const char *why = offset == NOT_MAPPED ? "is not from ncclMemAlloc" : "is not the start of a live block; was it freed before?";
    for (struct arena *old = inherited; old; old = old->older)
      if ((uintptr_t)pointer - (uintptr_t)old->base < SPAN) why = "was allocated by the process that this one was forked from, which alone can free it";
    result = fail(NULL, ncclInvalidArgument, "ncclMemFree: %p %s", pointer, why);
  }
out:
  pthread_mutex_unlock(&lock);
  return result;
}

void heap_retire(const void *pointer) {
  const uint64_t offset = heap_offset(pointer, 0);
  if (offset == NOT_MAPPED) return;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; arena != NULL && i < arena->nblocks; i++)
    if (offset - arena->blocks[i].offset < arena->blocks[i].bytes) arena->blocks[i].retired = true;
  pthread_mutex_unlock(&lock);
}

uint64_t heap_offset(const void *pointer, size_t bytes) {
  uintptr_t base = (uintptr_t)atomic_load_explicit(&own_base, memory_order_acquire);
  uintptr_t offset = (uintptr_t)pointer - base; /* below the base it wraps to more than the span */
  return base && offset < SPAN && bytes <= SPAN - offset ? offset : NOT_MAPPED;
}

int heap_descriptor(void) { return atomic_load(&own_fd); }

size_t heap_span(void) { return SPAN; }

char *heap_base(void) { return atomic_load(&own_base); }

/* ---- peers ---------------------------------------------------------------------------------------------------------------------------- */

char *heap_map_peer(pid_t pid, int fd, size_t span) {
  if (pid == getpid()) return heap_base();
  char path[64], *base = NULL;
  struct stat stat;
  snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)pid, fd);
  int own = open(path, O_RDWR | O_CLOEXEC);
  if (own < 0) return NULL;
  if (fstat(own, &stat) == 0 && S_ISREG(stat.st_mode) && (uint64_t)stat.st_size == span) base = map_shared(own, span);
  close(own);
  return base;
}

void heap_unmap_peer(char *base, size_t span) {
  if (base && base != heap_base()) munmap(base, span);
}

/* ---- the arena (under the lock) --------------------------------------------------------------------------------------------------------- */

static ncclResult_t make_arena(void) {
  ncclResult_t result;
  int fd = -1;
  struct arena *made = calloc(1, sizeof *made);
  if (!made) {
    result = fail(NULL, ncclSystemError, "ncclMemAlloc: out of memory");
    goto out;
  }
  result = segment_create(SPAN, 0, &fd);
  if (result != ncclSuccess) goto out;
  made->fd = fd;
  made->base = map_shared(fd, SPAN);
  if (made->base == NULL) {
    result = fail(NULL, ncclSystemError, "ncclMemAlloc: cannot set %.1f MiB of address space aside for shared memory: %s; raise the limit of "
                  "address space (ulimit -v)", SPAN / MiB, strerror(errno));
    goto out;
  }
  arena = made;
  atomic_store(&own_fd, fd);
  atomic_store_explicit(&own_base, made->base, memory_order_release);
  made = NULL;
  fd = -1;

out:
  free(made);
  if (fd >= 0) close(fd);
  return result;
}

/* First fit: the lowest hole that is large enough. What holds huge pages begins with one. */
static ncclResult_t insert_block(size_t bytes, size_t *offset) {
  const size_t grain = bytes < HUGE_PAGE ? PAGE : HUGE_PAGE;
  size_t at = 0, end = 0; /* end of the block before, rounded up to a grain */
  while (at < arena->nblocks && (arena->blocks[at].offset < end || arena->blocks[at].offset - end < bytes)) {
    end = (arena->blocks[at].offset + arena->blocks[at].bytes + grain - 1) & ~(grain - 1);
    at++;
  }
  if (SPAN - end < bytes)
    return fail(NULL, ncclSystemError, "ncclMemAlloc: no room for %.1f MiB: %zu blocks are live in %.1f MiB of address space; free some first",
                bytes / MiB, arena->nblocks, SPAN / MiB);
  if (arena->nblocks == arena->room) {
    size_t room = arena->room ? arena->room * 2 : 64;
    struct block *blocks = realloc(arena->blocks, room * sizeof *blocks);
    if (!blocks) return fail(NULL, ncclSystemError, "ncclMemAlloc: out of memory");
    arena->blocks = blocks;
    arena->room = room;
  }
  memmove(arena->blocks + at + 1, arena->blocks + at, (arena->nblocks - at) * sizeof *arena->blocks);
  arena->blocks[at] = (struct block){.offset = end, .bytes = bytes};
  arena->nblocks++;
  *offset = end;
  return ncclSuccess;
}

static struct block *find_block(size_t offset) {
  size_t low = 0, high = arena->nblocks;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (arena->blocks[middle].offset < offset) low = middle + 1;
    else high = middle;
  }
  return low < arena->nblocks && arena->blocks[low].offset == offset ? &arena->blocks[low] : NULL;
}

/* Gives the memory back; what is allocated here next comes zeroed. */
static void punch(size_t offset, size_t bytes) {
  while (fallocate(arena->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)bytes) != 0)
    if (errno != EINTR) {
      memset(arena->base + offset, 0, bytes); /* the promise of zeros holds even where holes cannot be made */
      break;
    }
}

/* ---- fork -------------------------------------------------------------------------------------------------------------------------------- */

/* The lock is held across fork(), so that the child finds the list of blocks whole. Its copy of the parent's arena stays mapped (arrays in it
 * remain readable) but is set aside: the child's next allocation makes an arena of its own. */
static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&lock); }
static void after_fork_in_child(void) {
  if (arena) {
    arena->older = inherited;
    inherited = arena;
    arena = NULL;
    atomic_store(&own_base, NULL);
    atomic_store(&own_fd, -1);
  }
  pthread_mutex_unlock(&lock);
}
__attribute__((constructor)) static void survive_fork(void) { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); }

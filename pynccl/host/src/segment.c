/* Shared memory: where things lie in a segment, memory that is really there, and one mapping per segment and process.
 *
 * A segment is a memfd: it has no name, so nothing is left behind after kill -9, and it does not count against the size of /dev/shm. It
 * knows offsets and sizes only; what is written there is the business of the other files. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "host.h"

#define PAGE ((size_t)4096)
#define KiB ((size_t)1 << 10)
#define MiB ((size_t)1 << 20)

#define CHUNK (256 * KiB)   /* of a stage slot: two of them, read and written, stay in a 1 MiB second-level cache */
/* Of a rank's stage, and of all ranks' where that leaves STAGE_SLOTS. What goes through it next should lie in no core's own cache any more, for
 * a store would have to take it away there: twice a second-level cache. With 2 ranks a broadcast of 64 KiB takes 9.5, 7.6, 6.2 and 4.7 us with
 * 0.25, 0.5, 1 and 2 MiB, and 4.7 with 3; with 4 ranks on 2 cores an all_to_all of 1 MiB takes 100 us with 1 MiB, 130 with 2. */
#define RING (2 * MiB)
#define RINGS (4 * MiB)
#define STAGE_MOST (16 * MiB) /* of all stages together: they should stay in the last-level cache */

#define AHEAD_BYTES (4 * KiB) /* of a slot of those that run ahead */
#define AHEAD_MOST (8 * MiB)  /* of all of them together */

#define P2P_CHUNK (64 * KiB)
#define P2P_MOST (64 * MiB) /* address space of all channels together; memory comes pair by pair */
#define RESERVE_STEP (64 * MiB)

static size_t round_up(size_t bytes) { return (bytes + PAGE - 1) & ~(PAGE - 1); }

/* The largest multiple of a page, at most `wanted` and at least a page, of which `pieces` fit into `most`. */
static size_t share_of(size_t wanted, size_t pieces, size_t most) {
  size_t share = most / pieces & ~(PAGE - 1);
  return share > wanted ? wanted : share < PAGE ? PAGE : share;
}

struct layout layout_of(int nranks) {
  size_t n = (size_t)nranks, pairs = n * n;
  const size_t ahead = AHEAD_MOST / (n * AHEAD);
  struct layout at = {
      .ahead_bytes = ahead < AHEAD_BYTES ? ahead & ~(size_t)(LINE - 1) : AHEAD_BYTES,
      .chunk = share_of(CHUNK, n * STAGE_SLOTS, STAGE_MOST),
      .p2p_chunk = share_of(P2P_CHUNK, pairs * P2P_SLOTS, P2P_MOST),
  };
  at.ring = share_of(RING, n, RINGS) / at.chunk * at.chunk;
  if (at.ring < STAGE_SLOTS * at.chunk) at.ring = STAGE_SLOTS * at.chunk;
  at.lines = round_up(sizeof(struct segment_head));
  at.channels = at.lines + round_up(n * sizeof(struct rank_lines));
  at.signals = at.channels + round_up(pairs * sizeof(struct channel));
  at.small = at.signals + round_up(pairs * sizeof(struct signals));
  at.ahead = at.small + round_up(n * 2 * ONE_SHOT_BYTES);
  at.stage = at.ahead + round_up(n * AHEAD * at.ahead_bytes);
  at.p2p = at.stage + n * at.ring;
  at.total = at.p2p + pairs * P2P_SLOTS * at.p2p_chunk;
  return at;
}

/* ---- how much memory may be taken ---------------------------------------------------------------------------------------------- */

/* The whole of a small text file, NUL-terminated; false when it cannot be read (then it limits nothing). */
static bool slurp(const char *path, char *text, size_t size) {
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  size_t got = 0;
  while (got < size - 1) {
    ssize_t n = read(fd, text + got, size - 1 - got);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    got += (size_t)n;
  }
  close(fd);
  text[got] = 0;
  return got > 0;
}

/* The number after `key` at the start of a line; `otherwise` when there is none. */
static uint64_t field(const char *text, const char *key, uint64_t otherwise) {
  size_t length = strlen(key);
  for (const char *line = text; line; line = strchr(line, '\n')) {
    if (*line == '\n') line++;
    if (!strncmp(line, key, length)) return strtoull(line + length, NULL, 10);
  }
  return otherwise;
}

struct control_group { /* names of the two versions of Linux control groups */
  const char *mount, *limit, *usage, *inactive, *active;
};
static const struct control_group groups_v2 = {"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file ", "active_file "};
static const struct control_group groups_v1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                               "total_inactive_file ", "total_active_file "};

/* What the control group at `folder` still allows. Cached files count as used there, but the kernel drops them when asked for memory, so
 * they count as free here: a long-lived container is "full" of them. */
static uint64_t group_allows(const struct control_group *names, const char *folder) {
  char path[1200], text[8192], *end;
  snprintf(path, sizeof path, "%s%s/%s", names->mount, folder, names->limit);
  if (!slurp(path, text, sizeof text)) return UINT64_MAX;
  uint64_t limit = strtoull(text, &end, 10);
  if (end == text || limit >= UINT64_MAX / 4) return UINT64_MAX; /* "max", or version 1's idea of no limit */
  snprintf(path, sizeof path, "%s%s/%s", names->mount, folder, names->usage);
  if (!slurp(path, text, sizeof text)) return UINT64_MAX;
  uint64_t used = strtoull(text, NULL, 10), cached = 0;
  snprintf(path, sizeof path, "%s%s/memory.stat", names->mount, folder);
  if (slurp(path, text, sizeof text)) cached = field(text, names->inactive, 0) + field(text, names->active, 0);
  used -= cached < used ? cached : used;
  return used < limit ? limit - used : 0;
}

/* Bytes that can be taken without waking the out-of-memory killer: of the machine, and of every control group we are in. Inside a
 * container /proc/self/cgroup may name folders that only the host sees; the walk up to the root meets the container's own limit. */
static uint64_t available_memory(void) {
  char text[8192];
  uint64_t least = UINT64_MAX;
  if (slurp("/proc/meminfo", text, sizeof text)) {
    uint64_t kib = field(text, "MemAvailable:", UINT64_MAX);
    if (kib != UINT64_MAX) least = kib * KiB;
  }
  if (!slurp("/proc/self/cgroup", text, sizeof text)) return least;
  char *rest = NULL;
  for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
    char *controllers = strchr(line, ':'), *folder = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!folder) continue;
    *folder++ = 0;
    bool v2 = controllers[1] == 0;
    if (!v2 && !strstr(controllers + 1, "memory")) continue;
    if (strlen(folder) > 1000) continue;
    for (;;) {
      uint64_t allowed = group_allows(v2 ? &groups_v2 : &groups_v1, strcmp(folder, "/") ? folder : "");
      if (allowed < least) least = allowed;
      char *slash = strrchr(folder, '/');
      if (!slash || !*folder) break;
      *slash = 0;
    }
  }
  return least;
}

/* A memfd has no size limit of its own: asking for more than there is kills processes instead of failing. So ask first, and leave a
 * little for everybody else. */
static ncclResult_t check_available(size_t bytes, size_t needed, const char *what) {
  uint64_t available = available_memory();
  if (available == UINT64_MAX) return ncclSuccess;
  available -= available / 32;
  if (bytes <= available) return ncclSuccess;
  return fail(NULL, ncclSystemError, "%s needs %.1f MiB of shared memory, %.1f MiB available; use fewer ranks or smaller buffers, or raise "
              "the memory limit", what, (double)needed / MiB, (double)available / MiB);
}

/* Pages of 2 MiB, with which a core need not look up 4 KiB after 4 KiB where memory lies; that takes a third of the time of a large
 * reduction. Only where `base` is aligned to them, and where the kernel can (Linux 6.1): without them all works as well. */
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
void take_huge_pages(char *start, size_t bytes) {
  char *first = (char *)(((uintptr_t)start + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1));
  char *last = (char *)((uintptr_t)(start + bytes) & ~(HUGE_PAGE - 1));
  if (first < last) (void)madvise(first, (size_t)(last - first), MADV_COLLAPSE);
}

char *map_shared(int fd, size_t bytes) {
  /* Address space first, a huge page more than is needed, so that the file can begin at a multiple of one. */
  char *space = mmap(NULL, bytes + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) return NULL;
  char *base = (char *)(((uintptr_t)space + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1));
  const int why = mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, 0) == MAP_FAILED ? errno : 0;
  if (base > space) munmap(space, (size_t)(base - space));
  munmap(base + round_up(bytes), (size_t)(space + HUGE_PAGE - base));
  if (why == 0) return base;
  munmap(base, bytes);
  errno = why;
  return NULL;
}

ncclResult_t reserve(int fd, char *base, size_t offset, size_t bytes, const char *what) {
  ncclResult_t result = check_available(bytes, bytes, what);
  for (size_t done = 0; result == ncclSuccess && done < bytes;) {
    size_t step = bytes - done < RESERVE_STEP ? bytes - done : RESERVE_STEP;
    /* Others take memory at the same time: look again before every further step. */
    if (done) result = check_available(step, bytes, what);
    if (result != ncclSuccess) break;
    if (fallocate(fd, 0, (off_t)(offset + done), (off_t)step) == 0) {
      if (base != NULL) take_huge_pages(base + offset + done, step);
      done += step;
    } else if (errno != EINTR) {
      const char *remedy = errno == ENOSPC || errno == ENOMEM
                               ? "; use fewer ranks or smaller buffers, or raise the memory limit"
                               : errno == EFBIG ? "; raise the file size limit (ulimit -f)" : "";
      result = fail(NULL, ncclSystemError, "%s needs %.1f MiB of shared memory, of which the system gave %.1f MiB: %s%s", what,
                    (double)bytes / MiB, (double)done / MiB, strerror(errno), remedy);
    }
  }
  return result;
}

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8u /* Linux 6.3: some systems refuse memfds without it, older ones do not know it */
#endif

ncclResult_t segment_create(size_t total, size_t reserved, int *out) {
  ncclResult_t result = ncclSuccess;
  struct rlimit limit;
  int fd = memfd_create("pynccl", MFD_CLOEXEC | MFD_NOEXEC_SEAL);
  if (fd < 0 && errno == EINVAL) fd = memfd_create("pynccl", MFD_CLOEXEC);
  if (fd < 0) {
    result = fail(NULL, ncclSystemError, "cannot make shared memory: memfd_create: %s%s", strerror(errno),
                  errno == EMFILE || errno == ENFILE ? "; raise the limit of open files (ulimit -n)" : "");
    goto out;
  }
  /* Beyond this limit ftruncate does not fail but kills (SIGXFSZ). */
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < total) {
    result = fail(NULL, ncclSystemError, "cannot make shared memory of %.1f MiB: files are limited to %.1f MiB; raise the file size limit "
                  "(ulimit -f)", (double)total / MiB, (double)limit.rlim_cur / MiB);
    goto out;
  }
  while (ftruncate(fd, (off_t)total) != 0) {
    if (errno == EINTR) continue;
    result = fail(NULL, ncclSystemError, "cannot make shared memory of %.1f MiB: ftruncate: %s", (double)total / MiB, strerror(errno));
    goto out;
  }
  result = reserve(fd, NULL, 0, reserved, "a communicator");

out:
  if (result != ncclSuccess && fd >= 0) close(fd);
  if (result == ncclSuccess) *out = fd;
  return result;
}

/* ---- one mapping per segment and process ---------------------------------------------------------------------------------------- */

struct mapping { /* a segment as the rest sees it, and who it is */
  struct segment segment; /* first: a struct segment * is its mapping */
  unsigned generation;
  dev_t device;
  ino_t inode;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct segment *mappings;

/* fork() copies the lock as it is: held by nobody else while we copy it. */
static void lock_mappings(void) { pthread_mutex_lock(&lock); }
static void unlock_mappings(void) { pthread_mutex_unlock(&lock); }
__attribute__((constructor)) static void survive_fork(void) { pthread_atfork(lock_mappings, unlock_mappings, unlock_mappings); }

ncclResult_t segment_attach(const struct token *token, int fd, size_t total, struct segment **out) {
  ncclResult_t result = ncclSuccess;
  struct mapping *made = NULL;
  struct stat stat;
  *out = NULL;
  lock_mappings();
  if (fstat(fd, &stat) != 0) {
    result = fail(NULL, ncclSystemError, "cannot look at a segment of shared memory: %s", strerror(errno));
    goto out;
  }
  /* The token alone does not tell: it may be in use again while a rank of this process still holds the segment before. */
  for (struct segment *known = mappings; known; known = known->next) {
    struct mapping *mapping = (struct mapping *)known;
    if (mapping->generation == atomic_load(&fork_generation) && mapping->inode == stat.st_ino && mapping->device == stat.st_dev &&
        !memcmp(known->token.bytes, token->bytes, sizeof token->bytes)) {
      if (known->bytes != total) {
        result = fail(NULL, ncclInternalError, "a segment of %zu bytes is attached as one of %zu bytes", known->bytes, total);
        goto out;
      }
      known->references++;
      *out = known;
      goto out;
    }
  }
  if ((uint64_t)stat.st_size < total) {
    result = fail(NULL, ncclInternalError, "a segment of %zu bytes is needed, the one received has %lld", total, (long long)stat.st_size);
    goto out;
  }
  made = calloc(1, sizeof *made);
  if (!made) {
    result = fail(NULL, ncclSystemError, "out of memory");
    goto out;
  }
  made->segment = (struct segment){.bytes = total, .fd = fd, .references = 1, .token = *token, .next = mappings};
  made->generation = atomic_load(&fork_generation);
  made->device = stat.st_dev;
  made->inode = stat.st_ino;
  made->segment.base = map_shared(fd, total);
  if (made->segment.base == NULL) {
    result = fail(NULL, ncclSystemError, "cannot map %.1f MiB of shared memory: %s; raise the limit of address space (ulimit -v)",
                  (double)total / MiB, strerror(errno));
    goto out;
  }
  mappings = *out = &made->segment;
  made = NULL;
  fd = -1;

out:
  unlock_mappings();
  free(made);
  if (fd >= 0) close(fd); /* attached already, or not at all */
  return result;
}

void segment_detach(struct segment *segment) {
  /* A segment of the parent's: this child never attached it, so there is nothing of its own to let go. */
  if (!segment || ((struct mapping *)segment)->generation != atomic_load(&fork_generation)) return;
  bool last;
  lock_mappings();
  last = --segment->references == 0;
  for (struct segment **at = &mappings; last && *at; at = &(*at)->next)
    if (*at == segment) {
      *at = segment->next;
      break;
    }
  unlock_mappings();
  if (!last) return;
  munmap(segment->base, segment->bytes);
  close(segment->fd);
  free(segment);
}

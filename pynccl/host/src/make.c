/* Making communicators: unique ids, configurations, init, split, shrink, grow.
 *
 * Making one is three rounds of the socket all-gather: everybody meets and gets the segment; everybody has attached; everybody knows
 * whether all can map each other's heaps. A rank that fails a round still takes part in the next with its error code, so that all fail
 * together and none waits for the deadline; whoever knows the others from a parent also notices those that died or gave up. */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "copy.h"
#include "host.h"

/* ---- unique ids and configurations ------------------------------------------------------------------------------------------------ */

static const char id_magic[8] = "pynccl01";

static void id_from_token(ncclUniqueId *id, const struct token *token) {
  memset(id, 0, sizeof *id);
  memcpy(id->internal, id_magic, sizeof id_magic);
  memcpy(id->internal + sizeof id_magic, token->bytes, sizeof token->bytes);
}

static ncclResult_t token_from_id(const ncclUniqueId *id, struct token *token, const char *call) {
  if (memcmp(id->internal, id_magic, sizeof id_magic) != 0)
    return fail(NULL, ncclInvalidArgument, "%s: this unique id does not come from the host library's ncclGetUniqueId", call);
  memcpy(token->bytes, id->internal + sizeof id_magic, sizeof token->bytes);
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  if (id == NULL) return fail(NULL, ncclInvalidArgument, "ncclGetUniqueId: uniqueId is NULL");
  const struct token token = random_token();
  id_from_token(id, &token);
  return ncclSuccess;
}

#define UNSET NCCL_CONFIG_UNDEF_INT
static const ncclConfig_t config_defaults = {
    sizeof(ncclConfig_t), NCCL_API_MAGIC, NCCL_VERSION_CODE, UNSET, UNSET, UNSET, UNSET, NULL,  UNSET, UNSET, NULL,  UNSET, UNSET, UNSET,
    UNSET,                UNSET,          UNSET,             UNSET, UNSET, UNSET, UNSET, UNSET, UNSET, UNSET, UNSET, UNSET};

/* The caller's configuration in today's layout: a shorter struct leaves the rest unset, and so do fields newer than its version, since
 * some were put where an older layout had padding. */
static ncclResult_t read_config(const ncclConfig_t *given, ncclConfig_t *config, const char *call) {
  *config = config_defaults;
  if (given == NULL) return ncclSuccess;
  if (given->magic != NCCL_API_MAGIC)
    return fail(NULL, ncclInvalidArgument, "%s: config has magic 0x%x; start from NCCL_CONFIG_INITIALIZER", call, given->magic);
  if (given->size < 24) return fail(NULL, ncclInvalidArgument, "%s: config has size %zu, less than any version's; start from NCCL_CONFIG_INITIALIZER", call, given->size);
  memcpy(config, given, given->size < sizeof *config ? given->size : sizeof *config);
  if (given->version < 22602) config->trafficClass = UNSET;
  if (given->version < 22703) config->commName = NULL;
  if (given->version < 23007) config->graphStreamOrdering = UNSET;
  if (config->blocking != UNSET && config->blocking != 0 && config->blocking != 1)
    return fail(NULL, ncclInvalidArgument, "%s: config.blocking is %d; it must be 0 or 1", call, config->blocking);
  if ((config->minCTAs != UNSET && config->minCTAs <= 0) || (config->maxCTAs != UNSET && config->maxCTAs <= 0) ||
      (config->minCTAs != UNSET && config->maxCTAs != UNSET && config->minCTAs > config->maxCTAs))
    return fail(NULL, ncclInvalidArgument, "%s: config.minCTAs %d and maxCTAs %d; they must be positive and in order", call, config->minCTAs,
                config->maxCTAs);
  return ncclSuccess;
}

static void take_config(struct ncclComm *comm, const ncclConfig_t *config) {
  comm->config = *config;
  comm->blocking = config->blocking != 0;
  if (config->commName != NULL) snprintf(comm->name, sizeof comm->name, "%s", config->commName);
  comm->config.commName = comm->config.netName = NULL; /* the caller's memory: not ours after this call */
}

/* ---- building --------------------------------------------------------------------------------------------------------------------- */

struct hello { /* what ranks tell each other in each round */
  int code, pid, mappable, crowded;
  size_t direct_bytes, cache_bytes;
};

static ncclResult_t round_of_hellos(struct ncclComm *comm, const char *round, struct hello mine, struct hello *all, int send_fd, int *recv_fd,
                                    const struct waiting *waiting, const char *what) {
  const struct token token = derive(&comm->token, round, 0, NULL, 0);
  ncclResult_t code = bootstrap(&token, comm->nranks, comm->rank, &mine, sizeof mine, all, send_fd, recv_fd, waiting, what);
  if (code != ncclSuccess || mine.code != ncclSuccess) return code != ncclSuccess ? code : (ncclResult_t)mine.code;
  for (int rank = 0; rank < comm->nranks; rank++)
    if (all[rank].code != ncclSuccess)
      return fail(NULL, ncclRemoteError, "%s: rank %d could not take part: %s (its own message says more)", what, rank,
                  ncclGetErrorString((ncclResult_t)all[rank].code));
  return ncclSuccess;
}

static int open_pidfd(pid_t pid) {
  const int fd = (int)syscall(SYS_pidfd_open, pid, 0);
  if (fd >= 0) return fd; /* close-on-exec by definition */
  return kill(pid, 0) != 0 && errno == ESRCH ? -2 : -1;
}

static bool can_map(const struct ncclComm *comm, int rank) {
  const struct peer *peer = &comm->peers[rank];
  struct stat ours, theirs;
  char path[64];
  if (peer->pid == getpid()) return true;
  snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)peer->pid, peer->lines->segment_fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return false;
  const bool same = fstat(fd, &theirs) == 0 && fstat(comm->segment->fd, &ours) == 0 && ours.st_ino == theirs.st_ino && ours.st_dev == theirs.st_dev;
  close(fd);
  return same;
}

static ncclResult_t attach(struct ncclComm *comm, int fd, const struct hello *hellos) {
  const ncclResult_t code = segment_attach(&comm->token, fd, comm->layout.total, &comm->segment);
  if (code == ncclSuccess) take_huge_pages(comm->segment->base, comm->layout.p2p);
  if (code != ncclSuccess) return code;
  for (int rank = 0; rank < comm->nranks; rank++) {
    struct peer *peer = &comm->peers[rank];
    peer->lines = (struct rank_lines *)(comm->segment->base + comm->layout.lines) + rank;
    peer->pid = hellos[rank].pid;
    peer->pidfd = peer->pid == getpid() ? -1 : open_pidfd(peer->pid);
  }
  struct rank_lines *mine = lines_of(comm, comm->rank);
  mine->pid = getpid();
  atomic_store(&mine->core, -1);
  mine->own_pid_at = (uintptr_t)&mine->pid;
  mine->segment_fd = comm->segment->fd;
  atomic_store(&mine->heap_fd, -1);
  atomic_store(&mine->life, LIFE_JOINED);
  comm->head = (struct segment_head *)comm->segment->base;
  return ncclSuccess;
}

/* token, rank, nranks are set. Blocks until all ranks are in, or says why not. `kin`: where they know each other from, or NULL. */
static ncclResult_t build(struct ncclComm *comm, const char *what, const struct kin *kin) {
  struct hello all[MAX_RANKS], mine = {.pid = getpid()};
  struct waiting waiting = {.deadline = now() + comm->timeout, .abort = &comm->abort, .interruptible = comm->blocking,
                            .hopeless = kin != NULL ? kin_hopeless : NULL, .kin = kin};
  const struct kin ourselves = {.comm = comm, .next = kin};
  int fd = -1;
  cpu_set_t cores;
  comm->oversubscribed = sched_getaffinity(0, sizeof cores, &cores) == 0 && CPU_COUNT(&cores) < comm->nranks;
  comm->layout = layout_of(comm->nranks);
  calls_begin(comm, 1);
  if (comm->name[0] == 0)
    snprintf(comm->name, sizeof comm->name, "%02x%02x%02x%02x", comm->token.bytes[0], comm->token.bytes[1], comm->token.bytes[2], comm->token.bytes[3]);
  if (comm->rank == 0) mine.code = segment_create(comm->layout.total, comm->layout.p2p, &fd);
  char words[900];
  snprintf(words, sizeof words, "%s", mine.code != ncclSuccess ? thread_error() : "");
  ncclResult_t code = round_of_hellos(comm, "meet", mine, all, fd, comm->rank == 0 ? NULL : &fd, &waiting, what);
  if (code != ncclSuccess) {
    if (fd >= 0) close(fd);
    return mine.code != ncclSuccess ? fail(NULL, (ncclResult_t)mine.code, "%s", words) : code;
  }
  mine.code = attach(comm, fd, all);
  if (mine.code == ncclSuccess) waiting.hopeless = kin_hopeless, waiting.kin = &ourselves;
  code = round_of_hellos(comm, "attached", mine, all, -1, NULL, &waiting, what);
  if (code != ncclSuccess) return code;
  mine.mappable = 1;
  mine.crowded = comm->oversubscribed;
  mine.direct_bytes = direct_threshold();
  mine.cache_bytes = last_level_bytes();
  for (int rank = 0; rank < comm->nranks; rank++) {
    mine.mappable = mine.mappable && can_map(comm, rank);
    if (!can_reach(comm, rank)) mine.direct_bytes = SIZE_MAX;
  }
  code = round_of_hellos(comm, "mappable", mine, all, -1, NULL, &waiting, what);
  if (code != ncclSuccess) return code;
  comm->mappable = true;
  comm->direct_bytes = 0;
  comm->cache_bytes = SIZE_MAX;
  comm->ahead_bytes = comm->layout.ahead_bytes < AHEAD_BYTES_UNCROWDED ? comm->layout.ahead_bytes : AHEAD_BYTES_UNCROWDED;
  for (int rank = 0; rank < comm->nranks; rank++) {
    comm->mappable = comm->mappable && all[rank].mappable;
    if (all[rank].crowded) comm->ahead_bytes = comm->layout.ahead_bytes; /* each wait costs a turn of the scheduler */
    if (all[rank].direct_bytes > comm->direct_bytes) comm->direct_bytes = all[rank].direct_bytes;
    if (all[rank].cache_bytes < comm->cache_bytes) comm->cache_bytes = all[rank].cache_bytes;
  }
  return ncclSuccess;
}

/* ---- the ways to make one ------------------------------------------------------------------------------------------------------------ */

void job_discard(struct job *job) {
  *job->out = NULL;
  atomic_store(&job->comm->state, ncclSuccess);
  comm_free(job->comm);
  if (job->parent != NULL) comm_leave(job->parent);
  free(job->excluded);
  free(job);
}

uint64_t tag_of(const struct token *token) {
  uint64_t tag;
  memcpy(&tag, token->bytes, sizeof tag);
  return tag | 1; /* zero means none */
}

static ncclResult_t finish_job(struct job *job, ncclResult_t code) {
  struct ncclComm *comm = job->comm;
  if (code != ncclSuccess && job->parent != NULL) atomic_store(&lines_of(job->parent, job->parent->rank)->refused, tag_of(&job->token));
  if (code == ncclSuccess) {
    if (comm->blocking) *job->out = comm; /* a non-blocking caller has had it from the start */
    atomic_store_explicit(&comm->state, ncclSuccess, memory_order_release);
  } else if (comm != NULL) {
    fail(comm, code, "%s", thread_error());
    if (comm->blocking || job->out == &job->nowhere)
      comm_free(comm);
    else
      comm_broken(comm, code, thread_error()); /* the caller holds the handle and must abort it */
  }
  if (job->parent != NULL) comm_leave(job->parent);
  free(job->excluded);
  return code;
}

static struct job *new_job(const char *call, ncclResult_t (*run_it)(struct job *), ncclComm_t *out, const ncclConfig_t *given,
                           struct ncclComm *parent, ncclResult_t *code) {
  ncclConfig_t config;
  struct job *job = NULL;
  if (out == NULL) {
    *code = fail(parent, ncclInvalidArgument, "%s: the pointer for the new communicator is NULL", call);
    return NULL;
  }
  *out = NULL;
  if ((*code = check_settings(call)) != ncclSuccess || (*code = read_config(given, &config, call)) != ncclSuccess) return NULL;
  job = calloc(1, sizeof *job);
  struct ncclComm *comm = job == NULL ? NULL : comm_new();
  if (comm == NULL) {
    free(job);
    *code = fail(parent, ncclSystemError, "%s: out of memory", call);
    return NULL;
  }
  *job = (struct job){.run = run_it, .comm = comm, .parent = parent, .out = out};
  if (given == NULL && parent != NULL) {
    comm->config = parent->config;
    comm->blocking = parent->blocking;
  } else {
    take_config(comm, &config);
  }
  if (parent != NULL) comm->timeout = parent->timeout;
  return job;
}

static ncclResult_t check_ranks(const char *call, int nranks, int rank) {
  if (nranks < 1 || nranks > MAX_RANKS)
    return fail(NULL, ncclInvalidArgument, "%s: nranks is %d; the host library serves 1 to %d ranks", call, nranks, MAX_RANKS);
  if (rank < 0 || rank >= nranks) return fail(NULL, ncclInvalidArgument, "%s: rank %d is out of range for %d ranks", call, rank, nranks);
  return ncclSuccess;
}

static ncclResult_t init_run(struct job *job) {
  job->comm->token = job->token;
  job->comm->nranks = job->nranks;
  job->comm->rank = job->comm->device = job->rank;
  return finish_job(job, build(job->comm, job->flags ? "ncclCommGrow" : "ncclCommInitRank", NULL));
}

static ncclResult_t init_rank(const char *call, ncclComm_t *out, int nranks, const ncclUniqueId *id, int rank, const ncclConfig_t *config) {
  ncclResult_t code = check_ranks(call, nranks, rank);
  struct token token = {{0}};
  if (out != NULL) *out = NULL;
  if (code == ncclSuccess) code = token_from_id(id, &token, call);
  struct job *job = code == ncclSuccess ? new_job(call, init_run, out, config, NULL, &code) : NULL;
  if (job == NULL) return group_error(code);
  job->token = token;
  job->nranks = nranks;
  job->rank = rank;
  return submit_job(job);
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank) {
  return init_rank("ncclCommInitRank", comm, nranks, &id, rank, NULL);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
  return init_rank("ncclCommInitRankConfig", comm, nranks, &id, rank, config);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int nranks, int rank, int nids, ncclUniqueId *ids, ncclConfig_t *config) {
  if (nids < 1 || nids > nranks || ids == NULL)
    return group_error(fail(NULL, ncclInvalidArgument, "ncclCommInitRankScalable: %d unique ids at %p for %d ranks; give 1 to %d", nids, (void *)ids, nranks, nranks));
  return init_rank("ncclCommInitRankScalable", comm, nranks, &ids[0], rank, config); /* more ids only speed up thousands of ranks */
}

ncclResult_t ncclCommInitAll(ncclComm_t *comms, int n, const int *devices) {
  if (comms == NULL) return fail(NULL, ncclInvalidArgument, "ncclCommInitAll: comm is NULL");
  if (in_group()) return group_error(fail(NULL, ncclInvalidUsage, "ncclCommInitAll inside a group: call it outside"));
  ncclResult_t code = check_ranks("ncclCommInitAll", n, 0), first;
  if (code != ncclSuccess) return code;
  for (int i = 0; devices != NULL && i < n; i++)
    for (int j = 0; j < i; j++)
      if (devices[i] == devices[j]) return fail(NULL, ncclInvalidUsage, "ncclCommInitAll: device %d stands twice in devlist", devices[i]);
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  if ((code = ncclGroupStart()) != ncclSuccess) return code;
  for (int i = 0; i < n && code == ncclSuccess; i++) code = ncclCommInitRank(&comms[i], n, id, i);
  first = code;
  code = ncclGroupEnd();
  if (first == ncclSuccess) first = code;
  for (int i = 0; i < n && devices != NULL && first == ncclSuccess; i++) comms[i]->device = devices[i];
  if (first != ncclSuccess)
    for (int i = 0; i < n; i++) {
      if (comms[i] != NULL) ncclCommAbort(comms[i]);
      comms[i] = NULL;
    }
  return first;
}

/* An exchange among the ranks of `comm` before it makes another. When Ctrl-C ends it here, the others must not wait for us. */
ncclResult_t exchange(struct ncclComm *comm, const struct token *token, const void *mine, size_t bytes, void *all, bool interruptible,
                      const char *what) {
  bool stopped = false;
  const struct kin kin = {.comm = comm, .strict = !atomic_load(&comm->revoked), .tag = tag_of(token)};
  const struct waiting waiting = {.deadline = now() + comm->timeout, .abort = &comm->abort, .interruptible = interruptible,
                                  .interrupted = &stopped, .hopeless = kin_hopeless, .kin = &kin};
  const ncclResult_t code = bootstrap(token, comm->nranks, comm->rank, mine, bytes, all, -1, NULL, &waiting, what);
  if (code != ncclSuccess) atomic_store(&lines_of(comm, comm->rank)->refused, tag_of(token));
  if (stopped) comm_break(comm, code, "%s", thread_error());
  return code;
}

struct colour {
  int color, key;
};

static ncclResult_t split_run(struct job *job) {
  struct ncclComm *parent = job->parent, *comm = job->comm;
  struct colour all[MAX_RANKS], mine = {job->color, job->key};
  int members[MAX_RANKS];
  const struct kin kin = {.comm = parent, .ranks = members, .tag = tag_of(&job->token)};
  ncclResult_t code = exchange(parent, &job->token, &mine, sizeof mine, all, comm->blocking, "ncclCommSplit");
  if (code != ncclSuccess) return finish_job(job, code);
  for (int rank = 0; rank < parent->nranks; rank++) { /* a rank: how many of its colour stand before it in (key, rank) order */
    if (all[rank].color != mine.color) continue;
    int before = 0;
    for (int other = 0; other < parent->nranks; other++)
      before += all[other].color == mine.color && (all[other].key < all[rank].key || (all[other].key == all[rank].key && other < rank));
    members[before] = rank;
    if (rank == parent->rank) comm->rank = before;
    comm->nranks++;
  }
  if (mine.color == NCCL_SPLIT_NOCOLOR) {
    comm->nranks = 0;
    atomic_store(&comm->state, ncclSuccess);
    comm_free(comm);
    job->comm = NULL;
    comm_leave(parent);
    return ncclSuccess;
  }
  comm->device = parent->device;
  comm->token = derive(&job->token, "color", (uint64_t)(unsigned)mine.color, NULL, 0);
  return finish_job(job, build(comm, "ncclCommSplit", &kin));
}

/* A parent that may be revoked, but not broken, aborted or still being made. */
static struct ncclComm *enter_parent(ncclComm_t handle, const char *call, ncclResult_t *code) {
  struct ncclComm *comm = comm_enter(handle, call, false, code);
  if (comm == NULL) return NULL;
  const int state = atomic_load(&comm->state);
  if (state == ncclInProgress)
    *code = fail(comm, ncclInvalidUsage, "%s: the communicator is still being made", call);
  else if (state != ncclSuccess && !atomic_load(&comm->revoked))
    *code = fail(NULL, (ncclResult_t)state, "%s: the communicator is broken since an earlier failure (%s); abort it, or shrink it with NCCL_SHRINK_ABORT",
                 call, ncclGetLastError(comm));
  else if (atomic_load(&comm->abort) || atomic_load(&comm->finalized))
    *code = fail(comm, ncclInvalidUsage, "%s: the communicator was %s", call, comm->abort ? "aborted" : "finalized");
  if (*code == ncclSuccess) return comm;
  comm_leave(comm);
  return NULL;
}

ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t *out, ncclConfig_t *config) {
  ncclResult_t code;
  if (out != NULL) *out = NULL;
  struct ncclComm *parent = enter_parent(handle, "ncclCommSplit", &code);
  if (parent == NULL) return group_error(code);
  struct job *job = NULL;
  if (color < 0 && color != NCCL_SPLIT_NOCOLOR)
    code = fail(parent, ncclInvalidArgument, "ncclCommSplit: color %d; it must be 0 or more, or NCCL_SPLIT_NOCOLOR (-1)", color);
  else
    job = new_job("ncclCommSplit", split_run, out, config, parent, &code);
  if (job == NULL) {
    comm_leave(parent);
    return group_error(code);
  }
  if (color == NCCL_SPLIT_NOCOLOR) job->out = &job->nowhere; /* *out stays NULL */
  job->color = color;
  job->key = key;
  job->token = derive(&parent->token, "split", parent->children++, NULL, 0);
  return submit_job(job);
}

static int compare_ints(const void *a, const void *b) { return (*(const int *)a > *(const int *)b) - (*(const int *)a < *(const int *)b); }

static ncclResult_t shrink_run(struct job *job) {
  struct ncclComm *parent = job->parent, *comm = job->comm;
  comm->nranks = parent->nranks - job->nexcluded;
  comm->rank = parent->rank;
  for (int i = 0; i < job->nexcluded; i++) comm->rank -= job->excluded[i] < parent->rank;
  int members[MAX_RANKS], n = 0;
  const struct kin kin = {.comm = parent, .ranks = members, .tag = tag_of(&job->token)};
  for (int rank = 0, next = 0; rank < parent->nranks; rank++) {
    if (next < job->nexcluded && job->excluded[next] == rank)
      next++;
    else
      members[n++] = rank;
  }
  comm->device = parent->device;
  comm->token = job->token;
  return finish_job(job, build(comm, "ncclCommShrink", &kin));
}

ncclResult_t ncclCommShrink(ncclComm_t handle, int *excluded, int n, ncclComm_t *out, ncclConfig_t *config, int flags) {
  ncclResult_t code;
  if (out != NULL) *out = NULL;
  struct ncclComm *parent =
      flags == NCCL_SHRINK_ABORT ? comm_enter(handle, "ncclCommShrink", false, &code) : enter_parent(handle, "ncclCommShrink", &code);
  if (parent == NULL) return group_error(code);
  struct job *job = NULL;
  int *sorted = NULL;
  if (flags != NCCL_SHRINK_DEFAULT && flags != NCCL_SHRINK_ABORT) {
    code = fail(parent, ncclInvalidArgument, "ncclCommShrink: unknown flags 0x%x", (unsigned)flags);
    goto refused;
  }
  if (excluded == NULL || n < 1 || n >= parent->nranks) {
    code = fail(parent, ncclInvalidArgument, "ncclCommShrink: %d ranks to exclude at %p; exclude 1 to %d of %d", n, (void *)excluded,
                parent->nranks - 1, parent->nranks);
    goto refused;
  }
  sorted = malloc((size_t)n * sizeof *sorted);
  if (sorted == NULL) {
    code = fail(parent, ncclSystemError, "ncclCommShrink: out of memory");
    goto refused;
  }
  memcpy(sorted, excluded, (size_t)n * sizeof *sorted);
  qsort(sorted, (size_t)n, sizeof *sorted, compare_ints);
  for (int i = 0; i < n; i++)
    if (sorted[i] < 0 || sorted[i] >= parent->nranks || (i > 0 && sorted[i] == sorted[i - 1]) || sorted[i] == parent->rank) {
      code = fail(parent, ncclInvalidArgument, "ncclCommShrink: excluded rank %d is %s", sorted[i],
                  sorted[i] == parent->rank ? "this rank: excluded ranks must not call" : "out of range or stands twice");
      goto refused;
    }
  job = new_job("ncclCommShrink", shrink_run, out, config, parent, &code);
  if (job == NULL) goto refused;
  if (flags == NCCL_SHRINK_ABORT) {
    atomic_store(&parent->revoked, 1); /* what waits on the parent gives up */
    atomic_store(&lines_of(parent, parent->rank)->life, LIFE_REVOKED);
  }
  job->excluded = sorted;
  job->nexcluded = n;
  job->token = derive(&parent->token, "shrink", parent->shrinks++, sorted, (size_t)n * sizeof *sorted);
  return submit_job(job);
refused:
  free(sorted);
  comm_leave(parent);
  return group_error(code);
}

struct offer { /* what an existing rank brings to a grow */
  int nranks, has_id;
  ncclUniqueId id;
};

static ncclResult_t grow_run(struct job *job) {
  struct ncclComm *parent = job->parent, *comm = job->comm;
  struct offer *all = calloc((size_t)parent->nranks, sizeof *all);
  struct offer mine = {.nranks = job->nranks, .has_id = job->grow_root};
  int root = -1;
  if (all == NULL) return finish_job(job, fail(NULL, ncclSystemError, "ncclCommGrow: out of memory"));
  if (job->grow_root) mine.id = parent->grow_id;
  ncclResult_t code = exchange(parent, &job->token, &mine, sizeof mine, all, comm->blocking, "ncclCommGrow");
  for (int rank = 0; rank < parent->nranks && code == ncclSuccess; rank++) {
    if (all[rank].nranks != job->nranks)
      code = fail(NULL, ncclInvalidUsage, "ncclCommGrow: rank %d grows to %d ranks, rank %d to %d", rank, all[rank].nranks, parent->rank, job->nranks);
    else if (all[rank].has_id && root >= 0)
      code = fail(NULL, ncclInvalidUsage, "ncclCommGrow: ranks %d and %d both brought a unique id; exactly one, the root, must", root, rank);
    else if (all[rank].has_id)
      root = rank;
  }
  if (code == ncclSuccess && root < 0)
    code = fail(NULL, ncclInvalidUsage, "ncclCommGrow: no rank brought the unique id of ncclCommGetUniqueId; exactly one, the root, must");
  if (code == ncclSuccess) code = token_from_id(&all[root].id, &comm->token, "ncclCommGrow");
  free(all);
  if (code == ncclSuccess) {
    comm->nranks = job->nranks;
    comm->rank = parent->rank;
    comm->device = parent->device;
    int members[MAX_RANKS];
    const struct kin kin = {.comm = parent, .ranks = members, .tag = tag_of(&job->token)};
    for (int rank = 0; rank < job->nranks; rank++) members[rank] = rank < parent->nranks ? rank : -1; /* nobody knows the new ones */
    code = build(comm, "ncclCommGrow", &kin);
  }
  if (code == ncclSuccess && job->grow_root) parent->grow_id_out = false;
  return finish_job(job, code);
}

ncclResult_t ncclCommGetUniqueId(ncclComm_t handle, ncclUniqueId *id) {
  ncclResult_t code;
  struct ncclComm *comm = comm_enter(handle, "ncclCommGetUniqueId", true, &code);
  if (comm == NULL) return code;
  if (id == NULL)
    code = fail(comm, ncclInvalidArgument, "ncclCommGetUniqueId: uniqueId is NULL");
  else if (comm->grow_id_out)
    code = fail(comm, ncclInvalidUsage, "ncclCommGetUniqueId: the id given before has not been used by ncclCommGrow yet");
  else if ((code = ncclGetUniqueId(id)) == ncclSuccess) {
    comm->grow_id = *id;
    comm->grow_id_out = true;
  }
  comm_leave(comm);
  return code;
}

ncclResult_t ncclCommGrow(ncclComm_t handle, int nranks, const ncclUniqueId *id, int rank, ncclComm_t *out, ncclConfig_t *config) {
  ncclResult_t code;
  struct job *job = NULL;
  if (out != NULL) *out = NULL;
  if (handle == NULL) { /* a new rank */
    if (id == NULL) return group_error(fail(NULL, ncclInvalidArgument, "ncclCommGrow: a new rank (comm NULL) must bring the unique id"));
    struct token token = {{0}};
    if ((code = check_ranks("ncclCommGrow", nranks, rank)) != ncclSuccess || (code = token_from_id(id, &token, "ncclCommGrow")) != ncclSuccess)
      return group_error(code);
    if ((job = new_job("ncclCommGrow", init_run, out, config, NULL, &code)) == NULL) return group_error(code);
    job->token = token;
    job->nranks = nranks;
    job->rank = rank;
    job->flags = 1;
    return submit_job(job);
  }
  struct ncclComm *parent = enter_parent(handle, "ncclCommGrow", &code);
  if (parent == NULL) return group_error(code);
  if (nranks <= parent->nranks || nranks > MAX_RANKS)
    code = fail(parent, ncclInvalidArgument, "ncclCommGrow: to %d ranks from %d; the host library serves up to %d", nranks, parent->nranks, MAX_RANKS);
  else if (rank != -1)
    code = fail(parent, ncclInvalidArgument, "ncclCommGrow: rank %d; an existing rank keeps its number and passes -1", rank);
  else if (id != NULL && (!parent->grow_id_out || memcmp(id, &parent->grow_id, sizeof *id) != 0))
    code = fail(parent, ncclInvalidArgument, "ncclCommGrow: this unique id does not come from ncclCommGetUniqueId of this communicator, or was used");
  else
    job = new_job("ncclCommGrow", grow_run, out, config, parent, &code);
  if (job == NULL) {
    comm_leave(parent);
    return group_error(code);
  }
  job->nranks = nranks;
  job->grow_root = id != NULL;
  job->token = derive(&parent->token, "grow", parent->children++, NULL, 0);
  return submit_job(job);
}

PNCCL(ncclGetUniqueId);
PNCCL(ncclCommInitRankConfig);
PNCCL(ncclCommInitRank);
PNCCL(ncclCommInitAll);
PNCCL(ncclCommSplit);
PNCCL(ncclCommShrink);
PNCCL(ncclCommGetUniqueId);
PNCCL(ncclCommGrow);
PNCCL(ncclCommInitRankScalable);

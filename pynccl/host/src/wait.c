/* The waiting loop. run() drives operations until all are complete; between rounds without progress it spins where that can help
 * (a rank a core) and else yields, then sleeps, and it looks after what must end a wait: the deadline, an abort, a failure that a peer
 * reported, a peer that died, Ctrl-C. */
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "copy.h"
#include "host.h"
#include "python.h"

/* Why not a futex: a publisher would have to fence and look at a "sleeping" word of each peer after every store (20 ns and more on the
 * fast path). A sleeper that has already waited SLEEP_AFTER loses at most SLEEP more: a few per cent of what it waited. */
#define SPINS 3000           /* pauses before the first look at the clock: about 40 us here */
#define SPINS_ON_ONE_CORE 32 /* before a look at who shares this core */
#define SLEEP_AFTER 2e-3     /* seconds of yielding before the first sleep */
/* A core that sleeps is given what waits on another: the very rank that is waited for, when that one shares its core with another process.
 * Then both share this one. So a rank with a core to itself outlasts some slices of the scheduler, 3 ms each, before it sleeps. */
#define SLEEP_AFTER_SPINNING 20e-3
#define SLEEP_NANOSECONDS 50000
#define LOOK_EVERY 1e-3      /* seconds between looks at deadline, abort and failure words */
#define LIVENESS_EVERY 20e-3 /* seconds between system calls that ask whether a peer lives */
#define INTERRUPT_EVERY 50e-3

_Atomic unsigned fork_generation = 1;
static int (*_Atomic interrupt_check)(void);
static _Thread_local double thread_timeout;

static void forked(void) { atomic_fetch_add(&fork_generation, 1); }
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, forked); }

double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#define DEFAULT_TIMEOUT 600.0
#define LONGEST_TIMEOUT 1e9 /* seconds: what "for ever" comes to, so that sums of deadlines stay finite */

/* PYNCCL_TIMEOUT in seconds; 0 when it is unset, -1 when it is no positive number. */
static double timeout_setting(void) {
  const char *text = getenv("PYNCCL_TIMEOUT");
  char *end;
  if (text == NULL || text[0] == 0) return 0;
  const double seconds = strtod(text, &end);
  if (end == text || *end != 0 || !(seconds > 0)) return -1;
  return seconds < LONGEST_TIMEOUT ? seconds : LONGEST_TIMEOUT;
}

double default_timeout(void) {
  if (thread_timeout > 0) return thread_timeout;
  const double seconds = timeout_setting();
  return seconds > 0 ? seconds : DEFAULT_TIMEOUT;
}

static bool size_setting(const char *name, size_t *bytes) {
  const char *text = getenv(name);
  char *end;
  if (text == NULL || text[0] == 0) return true;
  *bytes = (size_t)strtoull(text, &end, 10);
  return text[0] >= '0' && text[0] <= '9' && *end == 0;
}

ncclResult_t check_settings(const char *call) {
  const struct {
    const char *name;
    size_t otherwise;
    void (*set)(size_t bytes);
  } sizes[] = {
      {"PYNCCL_STREAMING_BYTES", last_level_bytes(), set_streaming_threshold},
      {"PYNCCL_DIRECT_BYTES", DIRECT_BYTES, set_direct_threshold},
  };
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    size_t bytes = sizes[i].otherwise;
    if (!size_setting(sizes[i].name, &bytes))
      return fail(NULL, ncclInvalidArgument, "%s: %s is \"%s\"; it must be a whole number of bytes, or unset", call, sizes[i].name,
                  getenv(sizes[i].name));
    sizes[i].set(bytes);
  }
  if (timeout_setting() >= 0) return ncclSuccess;
  return fail(NULL, ncclInvalidArgument, "%s: PYNCCL_TIMEOUT is \"%s\"; it must be a positive number of seconds, or unset", call,
              getenv("PYNCCL_TIMEOUT"));
}

bool interrupted(void) {
  static _Thread_local bool asking; /* a wait of what the callback itself calls goes on to its own deadline */
  int (*check)(void) = atomic_load(&interrupt_check);
  if (check == NULL || asking) return false;
  asking = true;
  const bool stop = check() != 0;
  asking = false;
  return stop;
}

ncclResult_t pyncclSetInterruptCheck(int (*check)(void)) {
  atomic_store(&interrupt_check, check);
  return ncclSuccess;
}

ncclResult_t pyncclSetTimeout(ncclComm_t handle, double seconds) {
  if (handle == NULL) {
    thread_timeout = seconds > 0 ? (seconds < LONGEST_TIMEOUT ? seconds : LONGEST_TIMEOUT) : 0;
    return ncclSuccess;
  }
  ncclResult_t code;
  struct ncclComm *comm = comm_enter(handle, "pyncclSetTimeout", false, &code);
  if (comm == NULL) return code;
  comm->timeout = seconds > 0 ? (seconds < LONGEST_TIMEOUT ? seconds : LONGEST_TIMEOUT) : default_timeout();
  comm_leave(comm);
  return ncclSuccess;
}

static inline void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

static bool process_gone(const struct peer *peer) {
  if (peer->pid == getpid() || peer->pidfd == -2) return false;
  if (peer->pidfd >= 0) {
    struct pollfd ended = {.fd = peer->pidfd, .events = POLLIN};
    return poll(&ended, 1, 0) == 1;
  }
  return kill(peer->pid, 0) != 0 && errno == ESRCH;
}

bool peer_hopeless(const struct ncclComm *comm, int rank, bool may_be_revoked, char *why, size_t size) {
  static const char *const ends[] = {[LIFE_FINALIZED] = "finalized", [LIFE_DESTROYED] = "destroyed", [LIFE_ABORTED] = "aborted",
                                     [LIFE_REVOKED] = "revoked"};
  const int life = atomic_load_explicit(&lines_of(comm, rank)->life, memory_order_acquire);
  if (life >= LIFE_FINALIZED && !(may_be_revoked && life == LIFE_REVOKED)) {
    snprintf(why, size, "rank %d has %s its communicator", rank, ends[life]);
    return true;
  }
  if (!process_gone(&comm->peers[rank])) return false;
  snprintf(why, size, "rank %d (process %d) is gone: it ended or was killed", rank, (int)comm->peers[rank].pid);
  return true;
}

bool kin_hopeless(const void *argument, int rank, char *why, size_t size) {
  const struct kin *kin = argument;
  const int known = kin->ranks == NULL ? rank : kin->ranks[rank];
  if (kin->strict && atomic_load_explicit(&kin->comm->head->failed, memory_order_acquire) != ncclSuccess) {
    snprintf(why, size, "%s", kin->comm->head->text);
    return true;
  }
  if (known >= 0 && known != kin->comm->rank) {
    if (kin->tag != 0 && atomic_load_explicit(&lines_of(kin->comm, known)->refused, memory_order_acquire) == kin->tag) {
      snprintf(why, size, "rank %d could not take part (its own message says why)", known);
      return true;
    }
    if (peer_hopeless(kin->comm, known, true, why, size)) return true;
  }
  return kin->next != NULL && kin_hopeless(kin->next, rank, why, size);
}

static bool is_message(enum kind kind) { return kind == SEND || kind == RECV; }

/* What the rank that holds op up is doing itself. */
static void doing_words(const struct op *op, char *words, size_t size) {
  const int rank = op->awaited;
  const struct rank_lines *lines = lines_of(op->comm, rank);
  const uint64_t doing = atomic_load(&lines->doing);
  const enum kind kind = doing == 0 ? KINDS : (doing & 0xffffffffu) - 1;
  if (doing == 0)
    snprintf(words, size, "rank %d waits for nobody: it has entered %llu collectives and is outside, or computes", rank,
             (unsigned long long)atomic_load(&lines->entered));
  else
    snprintf(words, size, "rank %d itself waits in %s for rank %d%s", rank, kinds[kind].name, (int)(doing >> 32) - 1,
             is_message(op->kind) && is_message(kind)
                 ? "; put sends and receives that depend on each other into one group (`with pynccl.group():`, ncclGroupStart)"
                 : "");
}

/* The ranks may wait in vain because they call different things. */
static void add_difference(const struct op *op, char *words, size_t size) {
  char difference[512];
  const size_t used = strlen(words);
  if (op_difference(op, difference, sizeof difference)) snprintf(words + used, size - used, "; %s", difference);
}

static void say_doing(const struct op *op, bool waiting) {
  const uint64_t doing = waiting ? ((uint64_t)(op->awaited + 1) << 32) | (uint64_t)(op->kind + 1) : 0;
  atomic_store_explicit(&lines_of(op->comm, op->comm->rank)->doing, doing, memory_order_relaxed);
}

/* One operation that made no progress: is there a reason to give it up? Returns ncclSuccess to go on waiting. */
static ncclResult_t look(struct op *op, double time, bool ask_kernel) {
  struct ncclComm *comm = op->comm;
  char words[160], why[800];
  if (atomic_load_explicit(&comm->abort, memory_order_acquire) || atomic_load_explicit(&comm->revoked, memory_order_acquire))
    return fail(comm, ncclInternalError, "%s: given up, this rank's communicator was %s while it waited",
                op_words(op, words, sizeof words), atomic_load(&comm->revoked) ? "revoked" : "aborted");
  const int failed = atomic_load_explicit(&comm->head->failed, memory_order_acquire);
  if (failed != ncclSuccess) {
    fail(comm, ncclRemoteError, "%s: %s", op_words(op, words, sizeof words), comm->head->text);
    comm_broken(comm, ncclRemoteError, thread_error());
    return ncclRemoteError;
  }
  if (op->since == 0) op->since = time;
  if (op->awaited < 0) { /* waits for an earlier operation of this rank, which has a deadline of its own: ours starts anew whenever that moves */
    if (op->step != op->steps) {
      op->step = op->steps;
      op->since = time;
    }
    if (time - op->since <= 2 * comm->timeout) return ncclSuccess;
    return comm_break(comm, ncclTimeout, "%s: rank %d waited %.1f s for an earlier operation of its own communicator, which does not end",
                      op_words(op, words, sizeof words), comm->rank, time - op->since);
  }
  say_doing(op, true);
  if (ask_kernel && peer_hopeless(comm, op->awaited, false, why, sizeof why)) {
    /* It may have done its part and left before we looked: only a second look at the counters decides. */
    const enum progress progress = op->phase == COMPLETE ? DONE : kinds[op->kind].progress(op);
    if (progress != WAITING) return ncclSuccess;
    add_difference(op, why, sizeof why);
    return comm_break(comm, ncclRemoteError, "%s: %s", op_words(op, words, sizeof words), why);
  }
  if (time - op->since > comm->timeout) {
    doing_words(op, why, sizeof why);
    add_difference(op, why, sizeof why);
    return comm_break(comm, ncclTimeout, "%s: rank %d waited %.1f s for rank %d; %s", op_words(op, words, sizeof words), comm->rank,
                      time - op->since, op->awaited, why);
  }
  return ncclSuccess;
}

/* An operation begins here, perhaps long after it was called: its communicator may have ended meanwhile. */
static enum progress advance(struct op *op) {
  if (op->phase == QUEUED) {
    const ncclResult_t code = comm_check(op->comm, kinds[op->kind].name);
    if (code != ncclSuccess) return op_finish(op, code);
  }
  return kinds[op->kind].progress(op);
}

struct patience { /* how long this wait has gone without progress */
  unsigned rounds;
  bool on_one_core; /* with a rank that is waited for: only when this one yields can that one go on */
  double start, looked, asked, interrupt;
};

/* Does a rank that is waited for run on this core, as far as is known? Beside other processes two ranks may share one for long though
 * there are as many cores as ranks; those that spin then take turns by the system's slice, milliseconds each. */
static bool awaited_are_here(struct op *const *ops, int n) {
  const int here = sched_getcpu();
  bool shared = false;
  for (int i = 0; i < n; i++) {
    const struct op *op = ops[i];
    if (op->phase == COMPLETE || op->awaited < 0) continue;
    atomic_store_explicit(&lines_of(op->comm, op->comm->rank)->core, here, memory_order_relaxed);
    shared = shared || atomic_load_explicit(&lines_of(op->comm, op->awaited)->core, memory_order_relaxed) == here;
  }
  return shared && here >= 0;
}

/* A round without progress. False: time to look() at the operations. */
static bool be_patient(struct patience *patience, struct op *const *ops, int n, bool spin) {
  spin = spin && !patience->on_one_core;
  if (before_waiting != NULL && (!spin || patience->rounds == SPINS_ON_ONE_CORE)) before_waiting();
  if (patience->rounds++ < (spin ? SPINS : 0)) {
    relax();
    if (patience->rounds == SPINS_ON_ONE_CORE) patience->on_one_core = awaited_are_here(ops, n);
    return true;
  }
  const double time = now();
  if (patience->start == 0) patience->start = patience->looked = patience->asked = patience->interrupt = time;
  if (time - patience->start >= (spin ? SLEEP_AFTER_SPINNING : SLEEP_AFTER))
    nanosleep(&(struct timespec){.tv_nsec = SLEEP_NANOSECONDS}, NULL);
  else if (spin)
    relax();
  else
    sched_yield();
  return time - patience->looked < LOOK_EVERY;
}

struct outcome { /* of several operations: the first failure, in its own words though others follow */
  ncclResult_t result;
  struct ncclComm *comm;
  char words[1024];
};

static void take_outcome(struct outcome *outcome, const struct op *op, bool alone) {
  if (outcome->result != ncclSuccess || op->result == ncclSuccess) return;
  outcome->result = op->result;
  outcome->comm = op->comm;
  if (!alone) snprintf(outcome->words, sizeof outcome->words, "%s", thread_error());
}

ncclResult_t run(struct op **ops, int n, bool interruptible) {
  struct outcome outcome;
  outcome.result = ncclSuccess;
  struct patience patience = {0};
  bool spin = interruptible; /* a stream's worker leaves the cores to those who compute meanwhile */
  for (int i = 0; i < n; i++) spin = spin && !ops[i]->comm->oversubscribed;
  for (;;) {
    int left = 0;
    bool moved = false;
    for (int i = 0; i < n; i++) {
      struct op *op = ops[i];
      if (op->phase == COMPLETE) continue;
      const enum progress progress = advance(op);
      moved = moved || progress != WAITING;
      if (progress == MOVED) op->since = 0;
      if (op->phase == COMPLETE) {
        take_outcome(&outcome, op, n == 1);
      } else {
        left++;
      }
    }
    if (left == 0) break;
    if (moved) {
      patience = (struct patience){0};
      continue;
    }
    if (be_patient(&patience, ops, n, spin)) continue;
    const double time = now();
    const bool ask_kernel = time - patience.asked >= LIVENESS_EVERY;
    const bool stop = interruptible && time - patience.interrupt >= INTERRUPT_EVERY && interrupted();
    patience.looked = time;
    if (ask_kernel) patience.asked = time;
    if (time - patience.interrupt >= INTERRUPT_EVERY) patience.interrupt = time;
    for (int i = 0; i < n; i++) {
      struct op *op = ops[i];
      if (op->phase == COMPLETE) continue;
      char words[160];
      ncclResult_t code = stop ? comm_break(op->comm, ncclSystemError, "%s: interrupted on rank %d while waiting for rank %d",
                                            op_words(op, words, sizeof words), op->comm->rank, op->awaited)
                               : look(op, time, ask_kernel);
      if (code != ncclSuccess) {
        if (op->phase != QUEUED && op->recv != NULL) { /* peers may have been told where it lies */
          heap_retire(op->recv);
          direct_withdraw(op);
        }
        op_finish(op, code);
      }
      if (op->phase == COMPLETE) {
        say_doing(op, false);
        take_outcome(&outcome, op, n == 1);
      }
    }
  }
  if (patience.start != 0 || outcome.result != ncclSuccess) say_doing(ops[0], false);
  return outcome.result == ncclSuccess || n == 1 ? outcome.result : fail(outcome.comm, outcome.result, "%s", outcome.words);
}

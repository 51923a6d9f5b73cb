/* What the files of the host library share. Read this first.
 *
 * One communicator = one shared segment (a memfd that every rank maps) + per-process state (struct ncclComm). A segment holds, for every
 * rank, the lines that this rank alone writes (struct rank_lines) and its staging memory; and for every ordered pair of ranks a channel
 * for sends and receives. All synchronisation is by monotonic 64-bit counters with one writer each, a line each, acquire/release, never
 * reset. An operation (struct op) is a resumable state machine: progress() moves it as far as the counters allow and never blocks, so one
 * thread can drive any number of operations (a group), and a single blocking call is the same machine with a waiting loop around it.
 *
 *   api.c        the 73 functions: check arguments, fill a struct op, submit
 *   arrays.c     the arguments of a call on array objects, for callers in Python
 *   python.c     calls as functions of Python's own
 *   group.c      submit, groups, streams: when and where operations run
 *   wait.c       the waiting loop: spin, yield, sleep; deadline, abort, dead peers
 *   collective.c the eight collectives: one table, four paths (one-shot, and in mapped.c, direct.c, staged.c)
 *   posts.c      how ranks tell each other what they call, and notice that they disagree (posts.h: what is compiled into collective.c)
 *   schedule.c   users' collectives
 *   p2p.c        send and receive      onesided.c  windows, put, signal, wait
 *   make.c       communicators: init, split, shrink, grow      comm.c  entering and leaving them, finalize, destroy, abort
 *   bootstrap.c  how ranks find each other (a socket all-gather)      segment.c  shared memory
 *   heap.c       ncclMemAlloc      stream.c  streams and events      reduce.c  arithmetic      copy.c  copies past the caches      error.c  words
 */
#ifndef PYNCCL_HOST_H
#define PYNCCL_HOST_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "nccl_abi.h"
#include "reduce.h"

#define HOST_VERSION "0.1.0"
#define MAX_RANKS 256
#define LINE 128 /* two cache lines: the adjacent-line prefetcher works in pairs */

/* ---- error.c ---------------------------------------------------------------------------------------------------------------- */

/* Record `text` as the last error (of this thread, and of `comm` unless NULL) and return `code`. */
ncclResult_t fail(struct ncclComm *comm, ncclResult_t code, const char *format, ...) __attribute__((format(printf, 3, 4)));
const char *thread_error(void); /* this thread's last error text, "" when none */

/* ---- time and waiting without a communicator (wait.c) ------------------------------------------------------------------------ */

double now(void);                       /* monotonic seconds */
double default_timeout(void);           /* this thread's pyncclSetTimeout(NULL, ...), else PYNCCL_TIMEOUT, else 600 */
ncclResult_t check_settings(const char *call); /* ncclInvalidArgument when an environment variable says what it cannot mean */
extern _Atomic unsigned fork_generation; /* counts forks: state made in another generation belongs to the parent */
bool interrupted(void);                 /* asks the callback of pyncclSetInterruptCheck (call at most every 50 ms, never from workers) */

struct waiting { /* how long, and until what, a blocking step may wait */
  double deadline;           /* on the now() clock */
  const _Atomic int *abort;  /* non-zero: give up (NULL: never) */
  bool interruptible;        /* the caller's own thread: Ctrl-C counts */
  bool *interrupted;         /* set when that ended it (NULL: nobody asks) */
  /* Will rank `rank` never come? Then true, and words; asked now and then of those who are waited for (NULL: nothing is known). */
  bool (*hopeless)(const void *kin, int rank, char *why, size_t size);
  const void *kin;
};

/* ---- bootstrap.c: an all-gather before any memory is shared --------------------------------------------------------------------- */

struct token {
  unsigned char bytes[16];
};

/* Token for a purpose that all ranks can name alike: a hash of the parent's token, a word, a counter and extra bytes. */
struct token derive(const struct token *parent, const char *purpose, uint64_t counter, const void *extra, size_t bytes);
struct token random_token(void);

/* Every rank brings `bytes` bytes and gets everyone's, in rank order, in `all` (nranks * bytes). Rank 0 may hand a file descriptor to
 * everybody (send_fd, else -1; received in *recv_fd, a new descriptor that the caller owns; not written on rank 0). `what` names the call
 * in messages ("ncclCommInitRank"). Fails on every rank, within the deadline, with words that name the missing or disagreeing ranks. */
ncclResult_t bootstrap(const struct token *token, int nranks, int rank, const void *mine, size_t bytes, void *all, int send_fd,
                       int *recv_fd, const struct waiting *waiting, const char *what);

/* ---- segment.c: shared memory ------------------------------------------------------------------------------------------------- */

struct segment { /* one mapping per process, shared by the ranks that live in it */
  char *base;
  size_t bytes;
  int fd;
  int references;
  struct token token;
  struct segment *next;
};

/* Memory behind [offset, offset + bytes) of fd, really there: an error with the size needed instead of a later SIGBUS. */
ncclResult_t reserve(int fd, char *base, size_t offset, size_t bytes, const char *what); /* base: where fd is mapped, or NULL */
#define HUGE_PAGE ((size_t)2 << 20)
char *map_shared(int fd, size_t bytes); /* from a multiple of HUGE_PAGE on; NULL, and errno, if it cannot be */
void take_huge_pages(char *start, size_t bytes); /* for what of the range is whole ones, where the system has them */
ncclResult_t segment_create(size_t total, size_t reserved, int *fd); /* memfd of `total` bytes, the first `reserved` of them backed */
ncclResult_t segment_attach(const struct token *token, int fd, size_t total, struct segment **out); /* takes fd over (closes it if already attached here) */
void segment_detach(struct segment *segment);

/* ---- heap.c: memory that peers can map (ncclMemAlloc) --------------------------------------------------------------------------- */

#define NOT_MAPPED UINT64_MAX

ncclResult_t heap_alloc(void **pointer, size_t bytes); /* page-granular, page-aligned, zeroed */
ncclResult_t heap_free(void *pointer);
/* A peer may still write to the block at `pointer` (any address in it), though its operation failed here: when freed, its range is never given
 * out again. Nothing to do for memory that is not from the heap. */
void heap_retire(const void *pointer);
uint64_t heap_offset(const void *pointer, size_t bytes); /* offset in this process's heap, or NOT_MAPPED; a few ns */
int heap_descriptor(void);                               /* the heap's memfd in this process, -1 while there is none */
size_t heap_span(void);                                  /* bytes of address space of every heap that this process makes (same in all processes) */
char *heap_base(void);
/* A peer's heap in our address space, opened through /proc/<pid>/fd/<fd>; NULL when this is not possible. */
char *heap_map_peer(pid_t pid, int fd, size_t span);
void heap_unmap_peer(char *base, size_t span);

/* ---- stream.c: queues with a worker thread, and events ------------------------------------------------------------------------- */

/* A task of a stream: run(argument) on the worker; its result is kept as the stream's first error (with the thread's error text). */
ncclResult_t stream_enqueue(void *stream, ncclResult_t (*run)(void *), void *argument);
bool stream_is_default(const void *stream); /* NULL, 1, 2: run in the calling thread */
ncclResult_t stream_check(const void *stream); /* ncclInvalidArgument unless default or a live stream of this process */
ncclResult_t stream_join(void *waiter, void *waited); /* work enqueued on waiter later runs after what is on waited now */

/* ---- the shared segment -------------------------------------------------------------------------------------------------------- */

#define TINY_BYTES 72 /* largest contribution that travels in the post itself */
struct post { /* one line: what a rank is about to do, and a tiny payload with it. See posts.c */
  _Alignas(LINE) _Atomic uint64_t sequence;
  uint64_t signature;      /* kind, dtype, reduction, root: must be equal on all ranks */
  uint64_t count;          /* must be equal on all ranks */
  uint64_t history;        /* what this rank called before: must be equal on all ranks */
  uint64_t safe;           /* all ranks have completed the operations up to this one, as far as this rank knows */
  unsigned char scalar[8]; /* this rank's pre-multiplier */
  uint32_t in_place;
  union {
    unsigned char payload[TINY_BYTES];
    struct { /* of larger operations, and of schedules */
      uint32_t crowded;          /* more ranks than cores, as this rank sees it */
      uint32_t early;            /* the first chunk of a staged collective lay in its slot before this was published */
      uint64_t send_at, recv_at; /* where the buffers lie in this rank's heap, or NOT_MAPPED */
      uint64_t address[2];       /* of the send and the receive buffer, in the process of the rank */
    };
  };
};
_Static_assert(sizeof(struct post) == LINE, "a post is one line");

enum life { LIFE_NONE, LIFE_JOINED, LIFE_FINALIZED, LIFE_DESTROYED, LIFE_ABORTED, LIFE_REVOKED };

/* Operations that a rank may be ahead of the slowest. A broadcast of 8 bytes, 4 ranks on 2 cores: 2.1 us with 4, 1.1 with 8, 0.45 with 16, 0.3
 * with 32, and 2.6 where the root waits for all. */
#define AHEAD 32
#define POSTS (2 * AHEAD) /* a post is kept for AHEAD operations more, for the words of an error: see posts.c */

struct rank_lines { /* what one rank alone writes */
  struct post posts[POSTS];
  _Alignas(LINE) _Atomic uint64_t ticks; /* steps of collectives completed, ever */
  _Atomic bool reads_slowly;             /* what others have in their caches: see collective.c */
  _Alignas(LINE) _Atomic int life;
  _Atomic int heap_fd;
  int segment_fd; /* this process's descriptor of the segment: peers try to open it to learn whether they may map our heap */
  _Atomic uint64_t entered; /* collectives entered, ever (for messages) */
  _Atomic uint64_t doing;   /* kind + 1 in the low 32 bits, awaited rank + 1 in the high 32: what a slow wait waits for (for messages) */
  _Atomic uint64_t refused; /* tag of the last derived communicator or window that this rank failed to make */
  _Atomic int core;         /* where it last began to wait */
  pid_t pid;
  uint64_t own_pid_at; /* where that process has `pid`: peers try to read and write it to learn whether they may */
  _Alignas(LINE) _Atomic int reaches; /* the rank + 1 into whose memory this one is having the kernel write, at `there`; see direct.c */
  pid_t thread;                       /* that does so */
  struct iovec there;
  _Alignas(LINE) _Atomic uint64_t closed; /* tickets up to here: nobody may write into this rank's memory any more */
};

struct channel { /* one direction of one pair of ranks */
  struct post sends[2], recvs[2];
  _Alignas(LINE) _Atomic uint64_t sent; /* chunks put in, ever: written by the sender */
  _Alignas(LINE) _Atomic uint64_t got;  /* chunks taken out, ever: written by the receiver */
  _Alignas(LINE) _Atomic uint64_t pulled; /* messages of schedules taken, ever: written by the receiver */
};

#define SIGNALS 16
#define CONTEXTS 4
struct signals { /* from one rank to another; only the origin adds */
  _Atomic uint64_t count[CONTEXTS][SIGNALS];
};

struct segment_head { /* the first failure of a communicator, for everybody to see */
  _Atomic int claimed, failed; /* claimed: somebody writes it; failed: an ncclResult_t, readable */
  char text[1000];
};

#define ONE_SHOT_BYTES 16384 /* largest contribution that is written whole before the first synchronisation */
/* Beyond this the slots of those who run ahead, which do not fit the first-level cache, cost more than waiting for all, with a core for each
 * rank: 4 KiB between 2 ranks 0.55 us and 0.35; 2 KiB 0.27 and 0.25. With 4 ranks on 2 cores 4 KiB take 0.8 us and 3.0. */
#define AHEAD_BYTES_UNCROWDED 2048
#define STAGE_SLOTS 4 /* of the largest size, at least */
#define P2P_SLOTS 4

struct layout { /* where things lie in a segment of nranks ranks: a pure function of nranks */
  size_t ahead_bytes, chunk, p2p_chunk;                              /* bytes of one slot; of a stage: at most */
  size_t ring;                                                      /* bytes of a rank's stage: some of the largest slots */
  size_t lines, channels, signals, small, ahead, stage, p2p, total; /* offsets; [0, p2p) is reserved at creation, p2p pair by pair */
};
struct layout layout_of(int nranks);

/* ---- communicators ------------------------------------------------------------------------------------------------------------- */

struct peer { /* what this rank knows of another */
  struct rank_lines *lines;
  char *_Atomic heap; /* mapped when first needed */
  int pidfd;          /* -1: none (this process, or an old kernel: kill() asks); -2: its pid means nothing here, never ask */
  pid_t pid;
  uint64_t seen; /* its ticks when last read */
};

struct premul { /* a user's reduction: bound to its communicator and dtype */
  bool live;
  ncclDataType_t dtype;
  unsigned char scalar[8];
  const void *device; /* ncclScalarDevice: read when the operation runs */
};

#define COMM_MAGIC 0x70796e63636c2121u

struct ncclComm { /* comes from a pool that is never freed: a stale handle is recognised, not followed into nothing */
  _Atomic uint64_t magic;
  _Atomic int users; /* threads inside a call; never reset, since a stale handle may be on its way out */
  struct ncclComm *next_free;
  unsigned generation; /* fork_generation at birth */
  int rank, nranks, device;
  char name[64];
  ncclConfig_t config;
  bool blocking, mappable, oversubscribed; /* oversubscribed: more ranks than cores, never spin */
  size_t direct_bytes; /* plain arrays of so many are read from process to process */
  size_t cache_bytes;  /* of the last level, as all ranks see it */
  size_t ahead_bytes;  /* largest contribution of an operation that runs ahead: the same on all ranks */
  double timeout;
  struct token token;
  struct segment *segment;
  struct layout layout;
  struct segment_head *head;
  struct peer peers[MAX_RANKS];

  _Atomic int state;   /* ncclSuccess, ncclInProgress (being made), or the error that broke it */
  char cause[1024];    /* that error's words: readable, under the lock, when the state is one */
  _Atomic int abort;   /* non-zero: all that waits gives up */
  _Atomic int revoked, finalized;
  _Atomic int pending; /* operations submitted whose batch has not ended */

  _Atomic uint64_t issued, done; /* collectives: tickets given and served */
  struct calls {                 /* what is known of the operations so far: see posts.c */
    uint64_t history;            /* of this rank's own; 0: the ranks disagree */
    uint64_t first;              /* the first operation of that history */
    uint64_t synchronising;      /* of them, those for which all ranks wait */
    uint64_t safe;               /* all ranks have completed the operations up to this one */
    char difference[512];        /* in words, while the history is 0 */
  } calls;
  uint64_t ticks;                /* steps of collectives completed, ever */
  uint64_t chunks;               /* chunks of staged collectives, ever */
  uint64_t staged;               /* bytes of the ring of slots that they took, ever */
  bool writes_slowly;            /* its slots: see staged.c */
  struct last_staged {           /* the last one of them */
    uint64_t ticks;              /* steps completed before it */
    uint64_t start, chunks;      /* start: where in the ring it began, as `staged` counts */
    size_t slot;
    unsigned stages;
  } last;
  struct flow {
    _Atomic uint64_t issued, done; /* messages: tickets given and served */
    uint64_t chunks;               /* chunks through the channel, ever */
    uint64_t pulled;               /* messages of schedules through it, ever */
    bool reserved;
  } to[MAX_RANKS], from[MAX_RANKS];
  uint64_t signals_used[MAX_RANKS][CONTEXTS][SIGNALS];
  uint64_t children, windows; /* counters that name derived tokens: advanced by every rank alike */
  uint64_t shrinks;           /* of its own: excluded ranks do not call it */
  bool grow_id_out;
  ncclUniqueId grow_id;
  struct premul *premuls;
  int npremuls;
  unsigned salt; /* part of the handles of its reductions, so that another communicator's are recognised */
  struct registration *registrations;
  struct ncclWindow_vidmem *window_list;
  void *worker; /* stream that runs a non-blocking communicator's work */
  pthread_mutex_t lock; /* premuls, registrations, windows, last_error */
  char last_error[1024];
  uint64_t last_when; /* number of that failure, see error.c */
};

static inline struct rank_lines *lines_of(const struct ncclComm *comm, int rank) { return comm->peers[rank].lines; }
static inline struct post *post_of(const struct ncclComm *comm, int rank, uint64_t sequence) {
  return &lines_of(comm, rank)->posts[sequence % POSTS];
}
static inline struct channel *channel_of(const struct ncclComm *comm, int from, int to) {
  return (struct channel *)(comm->segment->base + comm->layout.channels) + (size_t)from * comm->nranks + to;
}
static inline struct signals *signals_of(const struct ncclComm *comm, int from, int to) {
  return (struct signals *)(comm->segment->base + comm->layout.signals) + (size_t)from * comm->nranks + to;
}

struct ncclComm *comm_new(void); /* state ncclInProgress; NULL: out of memory */
void comm_free(struct ncclComm *comm); /* what it holds; nobody may be inside any more */
/* May an operation begin? An error, with its words, on a communicator that is being made, broken (on any rank), aborted or revoked: what is
 * queued there must not run, for its input may be what an operation that failed left behind. Finalizing lets it run. */
ncclResult_t comm_check(struct ncclComm *comm, const char *call);
/* Checked entry: the communicator behind a handle, made by this process, not being made, not broken. NULL pointer: error recorded, *code set. */
/* need_healthy: neither broken, revoked, finalized nor still being made. */
struct ncclComm *comm_enter(ncclComm_t handle, const char *call, bool need_healthy, ncclResult_t *code);
void comm_leave(struct ncclComm *comm);
/* direct.c: reading the memory of another process. */
#define DIRECT_BYTES ((size_t)4 << 20) /* of all blocks: from here on it is faster, by 1.2 to 2.5 times; at 2 MiB as fast, at 1 MiB slower */
bool can_reach(const struct ncclComm *comm, int rank);
struct op;
void direct_withdraw(const struct op *op); /* an operation has failed here: from now on nobody writes to its memory */
size_t direct_threshold(void);
void set_direct_threshold(size_t bytes);
void registrations_free(struct ncclComm *comm);
void windows_free(struct ncclComm *comm);
/* Why rank `rank` will never do what is waited for, in words; false while it may still. A revoked communicator still makes others. */
bool peer_hopeless(const struct ncclComm *comm, int rank, bool may_be_revoked, char *why, size_t size);
/* The two as a `struct waiting` has them: ranks of a communicator that know each other from another one (or from itself). */
struct kin {
  const struct ncclComm *comm;
  const int *ranks; /* for each rank that is waited for: its rank in comm, -1 for a stranger; NULL: the same */
  bool strict;      /* a failure that anybody reported on comm counts too */
  uint64_t tag;     /* of what is being made: a rank that failed to is not waited for */
  const struct kin *next;
};
uint64_t tag_of(const struct token *token);
bool kin_hopeless(const void *kin, int rank, char *why, size_t size);
/* An all-gather by sockets among the ranks of comm, for calls that make something (communicators, windows). */
ncclResult_t exchange(struct ncclComm *comm, const struct token *token, const void *mine, size_t bytes, void *all, bool interruptible,
                      const char *what);
/* This rank can do no more with the communicator: the first failure stays its state. */
void comm_broken(struct ncclComm *comm, ncclResult_t code, const char *words);
/* Break the communicator: remember the error, tell the peers through the segment. */
ncclResult_t comm_break(struct ncclComm *comm, ncclResult_t code, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Copy into a peer's memory, piece by piece: a rank that was stopped meanwhile must not go on after the others have given up. */
ncclResult_t copy_to_peer(struct ncclComm *comm, int rank, void *to, const void *from, size_t bytes);
bool given_up_by(const struct ncclComm *comm, int rank); /* does nobody want that rank's memory to be written any more? */
char *comm_peer_heap(struct ncclComm *comm, int rank); /* maps it when first needed; NULL on failure */

/* ---- operations ---------------------------------------------------------------------------------------------------------------- */

enum kind { ALL_REDUCE, REDUCE, REDUCE_SCATTER, BROADCAST, ALL_GATHER, GATHER, SCATTER, ALL_TO_ALL, SCHEDULE, SEND, RECV, PUT, SIGNAL, WAIT_SIGNAL, KINDS };
enum progress { WAITING, MOVED, DONE };
enum phase { QUEUED, ANNOUNCED, RUNNING, COMPLETE };
enum path { PATH_NONE, PATH_STAGED, PATH_PUSH, PATH_PULL, PATH_DIRECT };

struct op {
  enum kind kind;
  ncclDataType_t dtype;
  enum reduce_op redop;
  int root; /* or the peer of a message, or the fingerprint of a schedule */
  struct ncclComm *comm;
  void *stream;
  const void *send;
  void *recv;
  size_t count, element, bytes; /* bytes = count * element: one rank's block */
  unsigned char scalar[8];
  const void *scalar_device;
  struct ncclWindow_vidmem *window; /* put: looked at when it is submitted, not when it runs */
  size_t window_offset;
  uint64_t target; /* put: where in the peer's heap */
  int signal, context;
  ncclWaitSignalDesc_t *signals; /* wait: owned copy, freed at completion */
  int nsignals;
  const pyncclSchedule_t *schedule; /* the caller's */
  struct schedule_run *run;         /* owned: freed at completion */

  /* the machine */
  enum phase phase;
  enum path path;
  ncclResult_t result;
  uint64_t ticket;
  int awaited;              /* the rank that holds us up */
  int scan, until;          /* in a wait for posts: ranks found ready so far, and the end of those that are waited for */
  bool ahead;               /* its rank does not wait for all: see posts.c */
  unsigned turn;            /* which of two exposures a synchronising one-shot uses */
  size_t chunk;             /* elements a chunk */
  size_t slot;              /* bytes from one chunk to the next in a stage */
  uint64_t step, steps;
  double since;             /* when it first had to wait slowly */
};

struct kind_info {
  const char *name; /* as in messages: "all_reduce" */
  bool blocks;      /* the send buffer holds a block for each rank */
  bool reduces;
  bool from_root, to_root; /* only the root contributes / receives */
  enum progress (*progress)(struct op *);
};
extern const struct kind_info kinds[KINDS];

enum progress collective_progress(struct op *op);
void schedule_announce(const struct op *op, struct post *post); /* the parts of collective_progress that are a schedule's own */
ncclResult_t schedule_begin(struct op *op);
enum progress schedule_progress(struct op *op);
enum progress message_progress(struct op *op);
enum progress put_progress(struct op *op);
enum progress signal_progress(struct op *op);
enum progress wait_signal_progress(struct op *op);
enum progress op_finish(struct op *op, ncclResult_t result); /* serves the ticket; returns DONE */
const char *op_words(const struct op *op, char *buffer, size_t size); /* "all_reduce(count=5, float32, sum)" */
void calls_begin(struct ncclComm *comm, uint64_t first); /* forget what was called before operation `first`; all ranks do so alike */
/* At the end of a communicator on which nothing is under way: ncclInvalidUsage if other ranks are seen to have called what this rank did not. */
ncclResult_t calls_end(struct ncclComm *comm, const char *call);
/* Do the ranks, as far as can be seen while `op` waits for one, disagree about it or a collective before it? In words. */
bool op_difference(const struct op *op, char *words, size_t size);

/* Does somebody get the result of an operation, its caller or a stream? Of one on a non-blocking communicator's own worker only the
 * communicator's state can tell. */
static inline bool is_heard(const struct op *op) { return op->comm->blocking || !stream_is_default(op->stream); }

/* Drive operations to their end; returns the first error. */
ncclResult_t run(struct op **ops, int n, bool interruptible);

/* Run now, queue on the stream, or add to this thread's group. */
ncclResult_t submit(struct op *op);
bool in_group(void);
ncclResult_t group_error(ncclResult_t code); /* remembers that a call inside the group failed; returns code */

/* A job that blocks (making communicators): run in place, or with the others of the group, a thread each, at ncclGroupEnd. */
struct job {
  ncclResult_t (*run)(struct job *);
  struct ncclComm *comm, *parent;
  ncclComm_t *out, nowhere; /* nowhere: for a rank that gets no communicator */
  ncclResult_t result;
  char error[1024];
  pthread_t thread;
  struct token token;
  int nranks, rank, color, key, *excluded, nexcluded, flags, grow_root;
  struct job *next;
};
ncclResult_t submit_job(struct job *job); /* takes ownership of a malloc'ed job */
void job_discard(struct job *job);        /* free a job that never ran */

#endif

/* Streams: queues of tasks with a worker thread each, and the events that order them, as CUDA has them for a GPU.
 *
 * A stream runs its tasks one after another and knows nothing of what they do. The first error of a task is kept, with its words, for the
 * next synchronisation. The default streams (NULL, 1, 2) have no queue: their work is done in the calling thread, at once. Handles come from
 * pools that are never freed, so a stale or foreign handle is recognised without being followed. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "host.h"

#define STREAM_MAGIC 0x70796e6363737472u
#define EVENT_MAGIC 0x70796e6363657674u
#define SLICE 0.05 /* seconds between two looks at the interrupt check */

struct item { /* what a handle points to begins with this */
  _Atomic uint64_t magic; /* zero: not in use */
  _Atomic unsigned generation; /* fork_generation at birth */
  struct item *next_free;
};

#define SLABS 64
#define KEPT_FREE 64 /* handles that rest before one is used again: a stale handle stays recognisable for a while */
struct pool {
  const char *noun, *maker;
  uint64_t magic;
  size_t size, per_slab;
  _Atomic(char *) slabs[SLABS]; /* filled one after another, never freed */
  size_t made, nfree;
  struct item *first_free, *last_free;
  unsigned generation; /* whose free list it is */
};

struct task {
  struct task *next;
  ncclResult_t (*run)(void *); /* or */
  void (*function)(void *);    /* a user's function: cannot fail */
  void *argument;
};

struct stream {
  struct item item;
  bool ready; /* lock and conditions are made: at first use, and kept */
  pthread_mutex_t lock;
  pthread_cond_t work, progress; /* for the worker; for those who wait for it */
  pthread_t worker;
  struct task *first, *last;
  uint64_t enqueued, completed;
  bool closing;
  ncclResult_t error; /* the first since the last synchronisation */
  char words[1024];
};

struct record { /* one call of pyncclEventRecord: shared by the event, the task that completes it, and those who wait for it */
  _Atomic int references;
  pthread_mutex_t lock;
  pthread_cond_t progress;
  uint64_t done; /* 1 when the stream has got there */
};

struct event {
  struct item item;
  struct record *latest; /* NULL: never recorded, or recorded where nothing can be pending */
};

static struct pool streams = {"stream", "pyncclStreamCreate", STREAM_MAGIC, sizeof(struct stream), 64, .generation = 0};
static struct pool events = {"event", "pyncclEventCreate", EVENT_MAGIC, sizeof(struct event), 1024, .generation = 0};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* the pools, and events' latest records */
static _Thread_local struct stream *working;             /* the stream whose worker this thread is */
static _Atomic bool functions_stopped;

static struct item *take(struct pool *pool);
static void give(struct pool *pool, struct item *item);
static ncclResult_t check(const struct pool *pool, const void *handle);
static ncclResult_t push(struct stream *stream, struct task task);
static void *work(void *stream);

enum outcome { REACHED, LATE, STOPPED };
static enum outcome await(pthread_mutex_t *mutex, pthread_cond_t *progress, const uint64_t *counter, uint64_t target, double timeout);
static void make_condition(pthread_cond_t *condition);

static double or_default(double timeout) { return timeout > 0 ? timeout : default_timeout(); }

/* ---- streams ---------------------------------------------------------------------------------------------------------------------------- */

bool stream_is_default(const void *stream) { return (uintptr_t)stream <= 2; }

ncclResult_t stream_check(const void *stream) { return stream_is_default(stream) ? ncclSuccess : check(&streams, stream); }

ncclResult_t stream_enqueue(void *handle, ncclResult_t (*run)(void *), void *argument) {
  if (stream_is_default(handle)) return run(argument);
  ncclResult_t result = stream_check(handle);
  return result == ncclSuccess ? push(handle, (struct task){.run = run, .argument = argument}) : result;
}

ncclResult_t pyncclStreamCreate(void **out) {
  if (!out) return fail(NULL, ncclInvalidArgument, "pyncclStreamCreate: stream is NULL; pass where to store the handle");
  *out = NULL;
  struct stream *stream = (struct stream *)take(&streams);
  if (!stream) return fail(NULL, ncclSystemError, "pyncclStreamCreate: out of memory, or more than %zu streams at once", SLABS * streams.per_slab);
  if (!stream->ready) {
    pthread_mutex_init(&stream->lock, NULL);
    make_condition(&stream->work);
    make_condition(&stream->progress);
    stream->ready = true;
  }
  pthread_mutex_lock(&stream->lock);
  stream->first = stream->last = NULL;
  stream->enqueued = stream->completed = 0;
  stream->closing = false;
  stream->error = ncclSuccess;
  /* Signals are for the program's own threads: a Ctrl-C delivered here would wake nobody. */
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int failed = pthread_create(&stream->worker, NULL, work, stream);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (!failed) atomic_store(&stream->item.magic, STREAM_MAGIC);
  pthread_mutex_unlock(&stream->lock);
  if (failed) {
    give(&streams, &stream->item);
    return fail(NULL, ncclSystemError, "pyncclStreamCreate: cannot start a thread: %s; raise the limit of processes (ulimit -u)", strerror(failed));
  }
  *out = stream;
  return ncclSuccess;
}

/* The stream's first error, told once. Under its lock. */
static ncclResult_t tell_error(struct stream *stream) {
  ncclResult_t code = stream->error;
  stream->error = ncclSuccess;
  return code == ncclSuccess ? code : fail(NULL, code, "%s", stream->words);
}

/* Waits for what is on the stream now. Under its lock. */
static ncclResult_t drain(struct stream *stream, double timeout, const char *call) {
  uint64_t target = stream->enqueued;
  switch (await(&stream->lock, &stream->progress, &stream->completed, target, timeout)) {
    case REACHED: return ncclSuccess;
    case STOPPED: return fail(NULL, ncclSystemError, "%s: interrupted", call);
    case LATE: break;
  }
  return fail(NULL, ncclTimeout, "%s: waited %.1f s; %llu of the stream's %llu tasks have completed", call, timeout,
              (unsigned long long)stream->completed, (unsigned long long)target);
}

/* Also tells an error that nobody has asked for: the stream is gone then all the same. */
ncclResult_t pyncclStreamDestroy(void *handle) {
  if (stream_is_default(handle))
    return fail(NULL, ncclInvalidArgument, "pyncclStreamDestroy: %p is a default stream, which cannot be destroyed", handle);
  ncclResult_t result = stream_check(handle);
  if (result != ncclSuccess) return result;
  struct stream *stream = handle;
  if (stream == working)
    return fail(NULL, ncclInvalidUsage, "pyncclStreamDestroy: called by work on the stream itself; destroy it from another thread");

  pthread_mutex_lock(&stream->lock);
  if (stream->closing || atomic_load(&stream->item.magic) != STREAM_MAGIC) {
    pthread_mutex_unlock(&stream->lock);
    return fail(NULL, ncclInvalidUsage, "pyncclStreamDestroy: another thread is destroying this stream");
  }
  stream->closing = true;
  result = drain(stream, default_timeout(), "pyncclStreamDestroy");
  if (result != ncclSuccess) {
    stream->closing = false; /* still a stream: its work may be waited for again */
    pthread_mutex_unlock(&stream->lock);
    return result;
  }
  atomic_store(&stream->item.magic, 0);
  pthread_cond_signal(&stream->work);
  pthread_mutex_unlock(&stream->lock);
  pthread_join(stream->worker, NULL);
  pthread_mutex_lock(&stream->lock);
  result = tell_error(stream);
  pthread_mutex_unlock(&stream->lock);
  give(&streams, &stream->item);
  return result;
}

ncclResult_t pyncclStreamSynchronize(void *handle, double timeout) {
  ncclResult_t result = stream_check(handle);
  if (result != ncclSuccess || stream_is_default(handle)) return result;
  struct stream *stream = handle;
  if (stream == working)
    return fail(NULL, ncclInvalidUsage, "pyncclStreamSynchronize: called by work on the stream itself, which would wait for its own end");
  pthread_mutex_lock(&stream->lock);
  result = drain(stream, or_default(timeout), "pyncclStreamSynchronize");
  if (result == ncclSuccess) result = tell_error(stream);
  pthread_mutex_unlock(&stream->lock);
  return result;
}

ncclResult_t pyncclStreamProgress(void *handle, uint64_t *enqueued, uint64_t *completed) {
  ncclResult_t result = stream_check(handle);
  if (result != ncclSuccess) return result;
  uint64_t in = 0, out = 0;
  if (!stream_is_default(handle)) {
    struct stream *stream = handle;
    pthread_mutex_lock(&stream->lock);
    in = stream->enqueued;
    out = stream->completed;
    pthread_mutex_unlock(&stream->lock);
  }
  if (enqueued) *enqueued = in;
  if (completed) *completed = out;
  return ncclSuccess;
}

ncclResult_t pyncclStreamQuery(void *handle) {
  uint64_t enqueued, completed;
  ncclResult_t result = pyncclStreamProgress(handle, &enqueued, &completed);
  return result != ncclSuccess ? result : enqueued == completed ? ncclSuccess : ncclInProgress;
}

ncclResult_t pyncclStreamLaunchHostFunc(void *handle, void (*function)(void *), void *argument) {
  if (!function) return fail(NULL, ncclInvalidArgument, "pyncclStreamLaunchHostFunc: fn is NULL");
  ncclResult_t result = stream_check(handle);
  if (result != ncclSuccess) return result;
  if (!stream_is_default(handle)) return push(handle, (struct task){.function = function, .argument = argument});
  function(argument);
  return ncclSuccess;
}

/* For the end of the program: an interpreter that has been taken down must not be called. Work of the library itself goes on. */
ncclResult_t pyncclStreamStopHostFuncs(void) {
  atomic_store(&functions_stopped, true);
  return ncclSuccess;
}

/* ---- the queue -------------------------------------------------------------------------------------------------------------------------- */

static ncclResult_t push(struct stream *stream, struct task content) {
  ncclResult_t result = ncclSuccess;
  struct task *task = malloc(sizeof *task);
  if (!task) return fail(NULL, ncclSystemError, "out of memory for a task of a stream");
  *task = content;
  task->next = NULL;
  pthread_mutex_lock(&stream->lock);
  if (stream->closing || atomic_load(&stream->item.magic) != STREAM_MAGIC) {
    result = fail(NULL, ncclInvalidUsage, "stream %p is being destroyed; it takes no more work", (void *)stream);
    free(task);
  } else {
    if (stream->last) stream->last->next = task;
    else stream->first = task;
    stream->last = task;
    stream->enqueued++;
    pthread_cond_signal(&stream->work);
  }
  pthread_mutex_unlock(&stream->lock);
  return result;
}

static void *work(void *handle) {
  struct stream *stream = working = handle;
  pthread_mutex_lock(&stream->lock);
  for (;;) {
    struct task *task = stream->first;
    if (!task) {
      /* Destroying clears the magic only when all is done, so nothing can be left. */
      if (stream->closing && atomic_load(&stream->item.magic) == 0) break;
      pthread_cond_wait(&stream->work, &stream->lock);
      continue;
    }
    stream->first = task->next;
    if (!stream->first) stream->last = NULL;
    pthread_mutex_unlock(&stream->lock);

    ncclResult_t result = ncclSuccess;
    if (task->run) result = task->run(task->argument);
    else if (!atomic_load(&functions_stopped)) task->function(task->argument);
    free(task);

    pthread_mutex_lock(&stream->lock);
    if (result != ncclSuccess && stream->error == ncclSuccess) {
      stream->error = result;
      snprintf(stream->words, sizeof stream->words, "%s", thread_error());
    }
    stream->completed++;
    pthread_cond_broadcast(&stream->progress);
  }
  pthread_mutex_unlock(&stream->lock);
  return NULL;
}

/* ---- events ------------------------------------------------------------------------------------------------------------------------------ */

static struct record *make_record(void) {
  struct record *record = calloc(1, sizeof *record);
  if (!record) return NULL;
  pthread_mutex_init(&record->lock, NULL);
  make_condition(&record->progress);
  atomic_store(&record->references, 1);
  return record;
}

static void drop(struct record *record) {
  if (!record || atomic_fetch_sub(&record->references, 1) != 1) return;
  pthread_cond_destroy(&record->progress);
  pthread_mutex_destroy(&record->lock);
  free(record);
}

static ncclResult_t complete_record(void *argument) {
  struct record *record = argument;
  pthread_mutex_lock(&record->lock);
  record->done = 1;
  pthread_cond_broadcast(&record->progress);
  pthread_mutex_unlock(&record->lock);
  drop(record);
  return ncclSuccess;
}

static bool is_done(struct record *record) {
  pthread_mutex_lock(&record->lock);
  bool done = record->done;
  pthread_mutex_unlock(&record->lock);
  return done;
}

/* A record of what is on the stream now, in *out (the caller's reference); NULL when nothing can be pending there. */
static ncclResult_t record_on(void *stream, struct record **out) {
  *out = NULL;
  if (stream_is_default(stream)) return ncclSuccess;
  struct record *record = make_record();
  if (!record) return fail(NULL, ncclSystemError, "out of memory for an event");
  atomic_fetch_add(&record->references, 1); /* the task's */
  ncclResult_t result = push(stream, (struct task){.run = complete_record, .argument = record});
  if (result == ncclSuccess) {
    *out = record;
  } else {
    drop(record);
    drop(record);
  }
  return result;
}

/* Blocks the calling thread until the record is complete. */
static ncclResult_t wait_for(struct record *record, double timeout, const char *call) {
  pthread_mutex_lock(&record->lock);
  enum outcome outcome = await(&record->lock, &record->progress, &record->done, 1, timeout);
  pthread_mutex_unlock(&record->lock);
  switch (outcome) {
    case REACHED: return ncclSuccess;
    case STOPPED: return fail(NULL, ncclSystemError, "%s: interrupted", call);
    case LATE: break;
  }
  return fail(NULL, ncclTimeout, "%s: waited %.1f s for an event; the stream on which it was recorded has not got there", call, timeout);
}

/* A worker that gave up waiting would let later work run too early, on data that is not there yet. What it waits for has deadlines of its
 * own, and so has whoever synchronises with this stream. */
#define FOR_EVER 1e9

struct pending_wait { /* a task */
  struct record *record;
  double timeout;
};

static ncclResult_t wait_on_worker(void *argument) {
  struct pending_wait wait = *(struct pending_wait *)argument;
  free(argument);
  ncclResult_t result = wait_for(wait.record, wait.timeout, "pyncclStreamWaitEvent");
  drop(wait.record);
  return result;
}

/* The stream's later work comes after the record. Takes the reference over. */
static ncclResult_t wait_on(void *stream, struct record *record) {
  ncclResult_t result = ncclSuccess;
  struct pending_wait *wait = NULL;
  if (!record || is_done(record)) goto out;
  if (stream_is_default(stream)) {
    result = wait_for(record, default_timeout(), "pyncclStreamWaitEvent");
    goto out;
  }
  wait = malloc(sizeof *wait);
  if (!wait) {
    result = fail(NULL, ncclSystemError, "out of memory for a task of a stream");
    goto out;
  }
  *wait = (struct pending_wait){record, FOR_EVER};
  result = push(stream, (struct task){.run = wait_on_worker, .argument = wait});
  if (result == ncclSuccess) return ncclSuccess;

out:
  free(wait);
  drop(record);
  return result;
}

ncclResult_t stream_join(void *waiter, void *waited) {
  struct record *record = NULL;
  ncclResult_t result = stream_check(waiter);
  if (result == ncclSuccess) result = stream_check(waited);
  if (result != ncclSuccess || waiter == waited) return result;
  result = record_on(waited, &record);
  return result == ncclSuccess ? wait_on(waiter, record) : result;
}

static ncclResult_t latest_of(const void *handle, struct record **out) {
  ncclResult_t result = check(&events, handle);
  *out = NULL;
  if (result != ncclSuccess) return result;
  pthread_mutex_lock(&lock);
  *out = ((const struct event *)handle)->latest;
  if (*out) atomic_fetch_add(&(*out)->references, 1);
  pthread_mutex_unlock(&lock);
  return ncclSuccess;
}

ncclResult_t pyncclEventCreate(void **out) {
  if (!out) return fail(NULL, ncclInvalidArgument, "pyncclEventCreate: event is NULL; pass where to store the handle");
  struct event *event = (struct event *)take(&events);
  *out = event;
  if (!event) return fail(NULL, ncclSystemError, "pyncclEventCreate: out of memory, or more than %zu events at once", SLABS * events.per_slab);
  event->latest = NULL;
  atomic_store(&event->item.magic, EVENT_MAGIC);
  return ncclSuccess;
}

/* Those who wait for it go on waiting for its record. */
ncclResult_t pyncclEventDestroy(void *handle) {
  ncclResult_t result = check(&events, handle);
  if (result != ncclSuccess) return result;
  struct event *event = handle;
  uint64_t live = EVENT_MAGIC;
  if (!atomic_compare_exchange_strong(&event->item.magic, &live, 0))
    return fail(NULL, ncclInvalidUsage, "pyncclEventDestroy: another thread is destroying this event");
  pthread_mutex_lock(&lock);
  struct record *record = event->latest;
  event->latest = NULL;
  pthread_mutex_unlock(&lock);
  drop(record);
  give(&events, &event->item);
  return ncclSuccess;
}

ncclResult_t pyncclEventRecord(void *handle, void *stream) {
  struct record *record = NULL;
  struct event *event = handle;
  ncclResult_t result = check(&events, handle);
  if (result == ncclSuccess) result = stream_check(stream);
  if (result == ncclSuccess) result = record_on(stream, &record);
  if (result != ncclSuccess) return result;
  pthread_mutex_lock(&lock);
  struct record *before = event->latest;
  event->latest = record;
  pthread_mutex_unlock(&lock);
  drop(before);
  return ncclSuccess;
}

ncclResult_t pyncclStreamWaitEvent(void *stream, void *event) {
  struct record *record;
  ncclResult_t result = stream_check(stream);
  if (result == ncclSuccess) result = latest_of(event, &record);
  return result == ncclSuccess ? wait_on(stream, record) : result;
}

ncclResult_t pyncclEventSynchronize(void *event, double timeout) {
  struct record *record;
  ncclResult_t result = latest_of(event, &record);
  if (record) result = wait_for(record, or_default(timeout), "pyncclEventSynchronize");
  drop(record);
  return result;
}

ncclResult_t pyncclEventQuery(void *event) {
  struct record *record;
  ncclResult_t result = latest_of(event, &record);
  if (record && !is_done(record)) result = ncclInProgress;
  drop(record);
  return result;
}

/* ---- waiting ----------------------------------------------------------------------------------------------------------------------------- */

static void make_condition(pthread_cond_t *condition) {
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC); /* setting the clock must not end a wait */
  pthread_cond_init(condition, &attributes);
  pthread_condattr_destroy(&attributes);
}

/* Waits, with `mutex` held, until *counter has reached `target`. Workers do not ask the interrupt check: it belongs to the program's threads. */
static enum outcome await(pthread_mutex_t *mutex, pthread_cond_t *progress, const uint64_t *counter, uint64_t target, double timeout) {
  double time = now(), deadline = time + timeout, asked = time;
  for (; *counter < target; time = now()) {
    double left = deadline - time;
    if (left <= 0) return LATE;
    long nanoseconds = (long)((left < SLICE ? left : SLICE) * 1e9);
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += nanoseconds;
    if (until.tv_nsec >= 1000000000) {
      until.tv_sec++;
      until.tv_nsec -= 1000000000;
    }
    pthread_cond_timedwait(progress, mutex, &until);
    if (working || now() - asked < SLICE) continue;
    /* Not under the lock: the check may wait for an interpreter whose lock is held by somebody who wants ours. */
    pthread_mutex_unlock(mutex);
    bool stopped = interrupted();
    asked = now();
    pthread_mutex_lock(mutex);
    if (stopped && *counter < target) return STOPPED;
  }
  return REACHED;
}

/* ---- handles ------------------------------------------------------------------------------------------------------------------------------ */

/* An unused item, not yet live; NULL when there are too many. */
static struct item *take(struct pool *pool) {
  struct item *item = NULL;
  unsigned generation = atomic_load(&fork_generation);
  pthread_mutex_lock(&lock);
  if (pool->generation != generation) { /* in a child: locks of the parent's items may have been held when we were forked */
    pool->generation = generation;
    pool->first_free = pool->last_free = NULL;
    pool->nfree = 0;
  }
  if (pool->nfree > KEPT_FREE || pool->made == SLABS * pool->per_slab) {
    item = pool->first_free;
    if (item) {
      pool->first_free = item->next_free;
      if (!pool->first_free) pool->last_free = NULL;
      pool->nfree--;
    }
  } else {
    size_t slab = pool->made / pool->per_slab;
    char *base = atomic_load(&pool->slabs[slab]);
    if (!base) {
      base = calloc(pool->per_slab, pool->size);
      atomic_store(&pool->slabs[slab], base);
    }
    if (base) item = (struct item *)(base + pool->made++ % pool->per_slab * pool->size);
  }
  if (item) item->generation = generation;
  pthread_mutex_unlock(&lock);
  return item;
}

static void give(struct pool *pool, struct item *item) {
  pthread_mutex_lock(&lock);
  item->next_free = NULL;
  if (pool->last_free) pool->last_free->next_free = item;
  else pool->first_free = item;
  pool->last_free = item;
  pool->nfree++;
  pthread_mutex_unlock(&lock);
}

static ncclResult_t check(const struct pool *pool, const void *handle) {
  uintptr_t at = (uintptr_t)handle;
  for (int i = 0; i < SLABS; i++) {
    uintptr_t base = (uintptr_t)atomic_load_explicit(&pool->slabs[i], memory_order_acquire);
    if (!base) break;
    if (at - base >= pool->per_slab * pool->size || (at - base) % pool->size) continue;
    const struct item *item = handle;
    if (atomic_load_explicit(&item->magic, memory_order_acquire) != pool->magic)
      return fail(NULL, ncclInvalidArgument, "%s %p has been destroyed", pool->noun, handle);
    if (item->generation != atomic_load(&fork_generation))
      return fail(NULL, ncclInvalidUsage, "%s %p was made before this process was forked; make one in the child by %s", pool->noun, handle,
                  pool->maker);
    return ncclSuccess;
  }
  return fail(NULL, ncclInvalidArgument, "%p is not %s %s of the host library; make one by %s", handle, pool == &events ? "an" : "a", pool->noun,
              pool->maker);
}

/* The lock is held across fork(), so that the child finds the pools whole. */
static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }
__attribute__((constructor)) static void survive_fork(void) { pthread_atfork(before_fork, after_fork, after_fork); }

/* stream.c: order, errors, events, waiting, handles. It is included whole, so that a scene can see private counters. */
#include "../../pynccl/host/src/stream.c"

#include "parts.h"

struct gate { /* a task that lasts until the scene lets it end */
  pthread_mutex_t lock;
  pthread_cond_t moved;
  bool entered, open;
};
#define GATE {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false, false}

static ncclResult_t pass(void *argument) {
  struct gate *gate = argument;
  pthread_mutex_lock(&gate->lock);
  gate->entered = true;
  pthread_cond_broadcast(&gate->moved);
  while (!gate->open) pthread_cond_wait(&gate->moved, &gate->lock);
  pthread_mutex_unlock(&gate->lock);
  return ncclSuccess;
}
static void until_entered(struct gate *gate) {
  pthread_mutex_lock(&gate->lock);
  while (!gate->entered) pthread_cond_wait(&gate->moved, &gate->lock);
  pthread_mutex_unlock(&gate->lock);
}
static void open_gate(struct gate *gate) {
  pthread_mutex_lock(&gate->lock);
  gate->open = true;
  pthread_cond_broadcast(&gate->moved);
  pthread_mutex_unlock(&gate->lock);
}

static void *new_stream(void) {
  void *stream;
  CHECK(pyncclStreamCreate(&stream) == ncclSuccess && stream);
  return stream;
}
static void *new_event(void) {
  void *event;
  CHECK(pyncclEventCreate(&event) == ncclSuccess && event);
  return event;
}
static void wait_and_destroy(void *stream) {
  CHECK(pyncclStreamSynchronize(stream, 0) == ncclSuccess && pyncclStreamDestroy(stream) == ncclSuccess);
}

static _Atomic int steps; /* tasks leave their mark here */
struct note {
  int seen;
  pthread_t by;
};
static void note(void *argument) {
  struct note *note = argument;
  note->seen = atomic_fetch_add(&steps, 1);
  note->by = pthread_self();
}

#define DEFAULT ((void *)(uintptr_t)2) /* cudaStreamPerThread */

SCENE(tasks_run_in_order_on_one_thread_that_is_not_the_callers) {
  void *stream = new_stream();
  struct note notes[100];
  for (int i = 0; i < 100; i++) CHECK(pyncclStreamLaunchHostFunc(stream, note, &notes[i]) == ncclSuccess);
  CHECK(pyncclStreamSynchronize(stream, 0) == ncclSuccess);
  for (int i = 0; i < 100; i++) CHECK(notes[i].seen == i && !pthread_equal(notes[i].by, pthread_self()) && pthread_equal(notes[i].by, notes[0].by));
  CHECK(pyncclStreamDestroy(stream) == ncclSuccess);
}

static ncclResult_t run_note(void *argument) {
  note(argument);
  return fail(NULL, ncclRemoteError, "a task's words");
}

SCENE(default_streams_run_in_the_callers_thread) {
  for (uintptr_t which = 0; which <= 2; which++) {
    void *stream = (void *)which;
    struct note by_task, by_function;
    CHECK(stream_is_default(stream) && stream_check(stream) == ncclSuccess);
    CHECK(stream_enqueue(stream, run_note, &by_task) == ncclRemoteError && pthread_equal(by_task.by, pthread_self()));
    CHECK(pyncclStreamLaunchHostFunc(stream, note, &by_function) == ncclSuccess && by_function.seen == by_task.seen + 1);
    CHECK(pyncclStreamSynchronize(stream, 0) == ncclSuccess && pyncclStreamQuery(stream) == ncclSuccess);
    FAILS(pyncclStreamDestroy(stream), ncclInvalidArgument, "is a default stream");
  }
  CHECK(!stream_is_default((void *)3));
}

static ncclResult_t fail_with(void *words) { return fail(NULL, ncclTimeout, "%s", (const char *)words); }

SCENE(the_first_error_is_told_once_with_its_words_and_later_tasks_run) {
  void *stream = new_stream();
  struct note after;
  CHECK(stream_enqueue(stream, fail_with, (void *)(uintptr_t)"the first error") == ncclSuccess);
  CHECK(stream_enqueue(stream, fail_with, (void *)(uintptr_t)"the second error") == ncclSuccess);
  CHECK(pyncclStreamLaunchHostFunc(stream, note, &after) == ncclSuccess);
  FAILS(pyncclStreamSynchronize(stream, 0), ncclTimeout, "the first error");
  CHECK(after.seen == 0);
  CHECK(pyncclStreamSynchronize(stream, 0) == ncclSuccess);
  CHECK(stream_enqueue(stream, fail_with, (void *)(uintptr_t)"nobody asked") == ncclSuccess);
  FAILS(pyncclStreamDestroy(stream), ncclTimeout, "nobody asked");
  FAILS(stream_check(stream), ncclInvalidArgument, "has been destroyed");
}

SCENE(progress_counts_tasks_and_query_tells_busy_from_idle) {
  void *stream = new_stream();
  struct gate gate = GATE;
  struct note after;
  uint64_t enqueued, completed;
  CHECK(pyncclStreamQuery(stream) == ncclSuccess);
  CHECK(stream_enqueue(stream, pass, &gate) == ncclSuccess && pyncclStreamLaunchHostFunc(stream, note, &after) == ncclSuccess);
  CHECK(pyncclStreamQuery(stream) == ncclInProgress);
  CHECK(pyncclStreamProgress(stream, &enqueued, &completed) == ncclSuccess && enqueued == 2 && completed == 0);
  open_gate(&gate);
  CHECK(pyncclStreamSynchronize(stream, 0) == ncclSuccess && pyncclStreamQuery(stream) == ncclSuccess);
  CHECK(pyncclStreamProgress(stream, &enqueued, &completed) == ncclSuccess && enqueued == 2 && completed == 2);
  CHECK(pyncclStreamProgress(DEFAULT, &enqueued, &completed) == ncclSuccess && enqueued == 0 && completed == 0);
  CHECK(pyncclStreamProgress(stream, NULL, NULL) == ncclSuccess);
  CHECK(pyncclStreamDestroy(stream) == ncclSuccess);
}

/* ---- events -------------------------------------------------------------------------------------------------------------------------- */

SCENE(an_event_holds_the_later_work_of_another_stream_back) {
  void *first = new_stream(), *second = new_stream(), *event = new_event();
  struct gate gate = GATE;
  struct note before, after;
  CHECK(stream_enqueue(first, pass, &gate) == ncclSuccess && pyncclStreamLaunchHostFunc(first, note, &before) == ncclSuccess);
  CHECK(pyncclEventRecord(event, first) == ncclSuccess && pyncclEventQuery(event) == ncclInProgress);
  CHECK(pyncclStreamWaitEvent(second, event) == ncclSuccess && pyncclStreamLaunchHostFunc(second, note, &after) == ncclSuccess);
  CHECK(pyncclStreamQuery(second) == ncclInProgress);
  open_gate(&gate);
  CHECK(pyncclStreamSynchronize(second, 0) == ncclSuccess && before.seen == 0 && after.seen == 1);
  CHECK(pyncclEventQuery(event) == ncclSuccess && pyncclEventSynchronize(event, 0) == ncclSuccess);
  CHECK(pyncclEventDestroy(event) == ncclSuccess);
  wait_and_destroy(first);
  wait_and_destroy(second);
}

SCENE(joining_streams_orders_them_like_an_event) {
  void *waited = new_stream(), *waiter = new_stream();
  struct gate gate = GATE;
  struct note before, after;
  CHECK(stream_enqueue(waited, pass, &gate) == ncclSuccess && pyncclStreamLaunchHostFunc(waited, note, &before) == ncclSuccess);
  CHECK(stream_join(waiter, waited) == ncclSuccess && pyncclStreamLaunchHostFunc(waiter, note, &after) == ncclSuccess);
  CHECK(stream_join(waiter, waiter) == ncclSuccess && stream_join(waiter, DEFAULT) == ncclSuccess);
  CHECK(pyncclStreamQuery(waiter) == ncclInProgress);
  open_gate(&gate);
  CHECK(stream_join(NULL, waiter) == ncclSuccess); /* blocks the caller */
  CHECK(before.seen == 0 && after.seen == 1);
  wait_and_destroy(waited);
  wait_and_destroy(waiter);
}

SCENE(a_wait_is_for_the_latest_record_when_it_was_called) {
  void *fast = new_stream(), *slow = new_stream(), *waiter = new_stream(), *event = new_event();
  struct gate first = GATE, second = GATE;
  CHECK(stream_enqueue(fast, pass, &first) == ncclSuccess && stream_enqueue(slow, pass, &second) == ncclSuccess);
  CHECK(pyncclEventRecord(event, fast) == ncclSuccess && pyncclStreamWaitEvent(waiter, event) == ncclSuccess);
  CHECK(pyncclEventRecord(event, slow) == ncclSuccess);
  open_gate(&first);
  CHECK(pyncclStreamSynchronize(waiter, 0) == ncclSuccess); /* not held by the second record */
  CHECK(pyncclEventQuery(event) == ncclInProgress);
  FAILS(pyncclEventSynchronize(event, 0.02), ncclTimeout, "pyncclEventSynchronize: waited 0.0 s for an event");
  open_gate(&second);
  CHECK(pyncclEventSynchronize(event, 0) == ncclSuccess);
  CHECK(pyncclEventDestroy(event) == ncclSuccess);
  wait_and_destroy(fast);
  wait_and_destroy(slow);
  wait_and_destroy(waiter);
}

SCENE(an_event_may_be_destroyed_while_others_wait_for_it) {
  void *first = new_stream(), *second = new_stream(), *event = new_event();
  struct gate gate = GATE;
  struct note before, after;
  CHECK(stream_enqueue(first, pass, &gate) == ncclSuccess && pyncclStreamLaunchHostFunc(first, note, &before) == ncclSuccess);
  CHECK(pyncclEventRecord(event, first) == ncclSuccess && pyncclStreamWaitEvent(second, event) == ncclSuccess);
  CHECK(pyncclStreamLaunchHostFunc(second, note, &after) == ncclSuccess);
  CHECK(pyncclEventDestroy(event) == ncclSuccess);
  FAILS(pyncclEventQuery(event), ncclInvalidArgument, "has been destroyed");
  open_gate(&gate);
  CHECK(pyncclStreamSynchronize(second, 0) == ncclSuccess && before.seen == 0 && after.seen == 1);
  wait_and_destroy(first);
  wait_and_destroy(second);
}

SCENE(events_never_recorded_or_recorded_on_a_default_stream_are_complete) {
  void *stream = new_stream(), *event = new_event();
  for (int round = 0; round < 2; round++) {
    CHECK(pyncclEventQuery(event) == ncclSuccess && pyncclEventSynchronize(event, 0) == ncclSuccess);
    CHECK(pyncclStreamWaitEvent(stream, event) == ncclSuccess && pyncclStreamWaitEvent(DEFAULT, event) == ncclSuccess);
    CHECK(pyncclEventRecord(event, DEFAULT) == ncclSuccess);
  }
  struct gate gate = GATE;
  CHECK(stream_enqueue(stream, pass, &gate) == ncclSuccess && pyncclEventRecord(event, stream) == ncclSuccess);
  CHECK(pyncclEventQuery(event) == ncclInProgress);
  CHECK(pyncclEventRecord(event, DEFAULT) == ncclSuccess && pyncclEventQuery(event) == ncclSuccess); /* the latest counts */
  open_gate(&gate);
  wait_and_destroy(stream);
  CHECK(pyncclEventDestroy(event) == ncclSuccess);
}

SCENE(waiting_on_a_default_stream_blocks_the_caller_with_a_time_limit) {
  void *stream = new_stream(), *event = new_event();
  struct gate gate = GATE;
  struct note before;
  CHECK(stream_enqueue(stream, pass, &gate) == ncclSuccess && pyncclStreamLaunchHostFunc(stream, note, &before) == ncclSuccess);
  CHECK(pyncclEventRecord(event, stream) == ncclSuccess);
  test_timeout = 0.03;
  FAILS(pyncclStreamWaitEvent(NULL, event), ncclTimeout, "waited 0.0 s for an event; the stream on which it was recorded has not got there");
  test_timeout = 30;
  open_gate(&gate);
  CHECK(pyncclStreamWaitEvent(NULL, event) == ncclSuccess && before.seen == 0 && atomic_load(&steps) == 1);
  wait_and_destroy(stream);
  CHECK(pyncclEventDestroy(event) == ncclSuccess);
}

SCENE(work_behind_an_event_never_runs_before_it) {
  void *stuck = new_stream(), *waiter = new_stream(), *event = new_event();
  struct gate gate = GATE;
  struct note behind;
  CHECK(stream_enqueue(stuck, pass, &gate) == ncclSuccess && pyncclEventRecord(event, stuck) == ncclSuccess);
  test_timeout = 0.03; /* of the thread that calls: no deadline of the stream's own order */
  CHECK(pyncclStreamWaitEvent(waiter, event) == ncclSuccess && pyncclStreamLaunchHostFunc(waiter, note, &behind) == ncclSuccess);
  FAILS(pyncclStreamSynchronize(waiter, 0.1), ncclTimeout, "pyncclStreamSynchronize: waited 0.1 s; 0 of the stream's 2 tasks have completed");
  CHECK(atomic_load(&steps) == 0);
  test_timeout = 30;
  open_gate(&gate);
  CHECK(pyncclStreamSynchronize(waiter, 0) == ncclSuccess && atomic_load(&steps) == 1);
  wait_and_destroy(stuck);
  wait_and_destroy(waiter);
  CHECK(pyncclEventDestroy(event) == ncclSuccess);
}

/* ---- waiting ---------------------------------------------------------------------------------------------------------------------------- */

SCENE(synchronizing_ends_in_time_and_says_how_far_the_stream_got) {
  void *stream = new_stream();
  struct gate gate = GATE;
  struct note notes[2];
  CHECK(pyncclStreamLaunchHostFunc(stream, note, &notes[0]) == ncclSuccess && stream_enqueue(stream, pass, &gate) == ncclSuccess);
  CHECK(pyncclStreamLaunchHostFunc(stream, note, &notes[1]) == ncclSuccess);
  until_entered(&gate);
  FAILS(pyncclStreamSynchronize(stream, 0.06), ncclTimeout, "pyncclStreamSynchronize: waited 0.1 s; 1 of the stream's 3 tasks have completed");
  test_timeout = 0.06;
  FAILS(pyncclStreamSynchronize(stream, 0), ncclTimeout, "waited 0.1 s");
  FAILS(pyncclStreamDestroy(stream), ncclTimeout, "pyncclStreamDestroy: waited 0.1 s; 1 of the stream's 3 tasks have completed");
  test_timeout = 30;
  CHECK(pyncclStreamLaunchHostFunc(stream, note, &notes[0]) == ncclSuccess); /* still a stream */
  open_gate(&gate);
  CHECK(pyncclStreamDestroy(stream) == ncclSuccess && atomic_load(&steps) == 3); /* waits for its work */
}

SCENE(ctrl_c_ends_a_wait_of_the_callers_thread) {
  void *stream = new_stream(), *waiter = new_stream(), *event = new_event();
  struct gate gate = GATE;
  CHECK(stream_enqueue(stream, pass, &gate) == ncclSuccess && pyncclEventRecord(event, stream) == ncclSuccess);
  CHECK(pyncclStreamWaitEvent(waiter, event) == ncclSuccess);
  atomic_store(&interrupt_now, 1);
  FAILS(pyncclStreamSynchronize(stream, 0), ncclSystemError, "pyncclStreamSynchronize: interrupted");
  FAILS(pyncclEventSynchronize(event, 0), ncclSystemError, "pyncclEventSynchronize: interrupted");
  FAILS(pyncclStreamWaitEvent(NULL, event), ncclSystemError, "pyncclStreamWaitEvent: interrupted");
  FAILS(pyncclStreamDestroy(stream), ncclSystemError, "pyncclStreamDestroy: interrupted");
  open_gate(&gate);
  atomic_store(&interrupt_now, 0);
  wait_and_destroy(stream);
  wait_and_destroy(waiter); /* its worker was waiting too, and was not interrupted */
  CHECK(pyncclEventDestroy(event) == ncclSuccess);
}

static ncclResult_t destroy_own(void *stream) { return pyncclStreamDestroy(stream); }
static ncclResult_t synchronize_own(void *stream) { return pyncclStreamSynchronize(stream, 0); }

SCENE(a_stream_cannot_wait_for_itself) {
  void *stream = new_stream();
  CHECK(stream_enqueue(stream, destroy_own, stream) == ncclSuccess);
  FAILS(pyncclStreamSynchronize(stream, 0), ncclInvalidUsage, "pyncclStreamDestroy: called by work on the stream itself");
  CHECK(stream_enqueue(stream, synchronize_own, stream) == ncclSuccess);
  FAILS(pyncclStreamSynchronize(stream, 0), ncclInvalidUsage, "pyncclStreamSynchronize: called by work on the stream itself");
  CHECK(pyncclStreamDestroy(stream) == ncclSuccess);
}

/* ---- handles ------------------------------------------------------------------------------------------------------------------------------ */

SCENE(stale_and_foreign_handles_are_recognised) {
  void *stream = new_stream(), *event = new_event(), *other;
  char local[4096];
  FAILS(stream_check(local), ncclInvalidArgument, "is not a stream of the host library; make one by pyncclStreamCreate");
  FAILS(stream_check((void *)(uintptr_t)0xdeadbeef), ncclInvalidArgument, "is not a stream");
  FAILS(stream_check((char *)stream + 8), ncclInvalidArgument, "is not a stream");
  FAILS(stream_check(event), ncclInvalidArgument, "is not a stream");
  FAILS(pyncclEventQuery(stream), ncclInvalidArgument, "is not an event of the host library; make one by pyncclEventCreate");
  FAILS(pyncclEventRecord(NULL, stream), ncclInvalidArgument, "is not an event");
  FAILS(pyncclStreamWaitEvent(local, event), ncclInvalidArgument, "is not a stream");
  FAILS(pyncclStreamLaunchHostFunc(stream, NULL, NULL), ncclInvalidArgument, "fn is NULL");
  FAILS(pyncclStreamCreate(NULL), ncclInvalidArgument, "stream is NULL");
  FAILS(pyncclEventCreate(NULL), ncclInvalidArgument, "event is NULL");
  CHECK(pyncclStreamDestroy(stream) == ncclSuccess && pyncclEventDestroy(event) == ncclSuccess);
  other = new_stream();
  CHECK(other != stream);
  FAILS(stream_check(stream), ncclInvalidArgument, "has been destroyed");
  FAILS(pyncclStreamDestroy(stream), ncclInvalidArgument, "has been destroyed");
  FAILS(stream_enqueue(stream, pass, NULL), ncclInvalidArgument, "has been destroyed");
  FAILS(pyncclEventDestroy(event), ncclInvalidArgument, "has been destroyed");
  FAILS(pyncclStreamWaitEvent(other, event), ncclInvalidArgument, "has been destroyed");
  CHECK(pyncclStreamDestroy(other) == ncclSuccess);
}

SCENE(handles_are_used_again_so_that_making_many_takes_no_more_memory) {
  for (int i = 0; i < 300; i++) CHECK(pyncclStreamDestroy(new_stream()) == ncclSuccess);
  CHECK(streams.made <= KEPT_FREE + 2);
  void *many[2000];
  for (int i = 0; i < 2000; i++) many[i] = new_event();
  for (int i = 0; i < 2000; i++) CHECK(pyncclEventQuery(many[i]) == ncclSuccess && pyncclEventDestroy(many[i]) == ncclSuccess);
  for (int i = 0; i < 2000; i++) CHECK(pyncclEventDestroy(new_event()) == ncclSuccess);
  CHECK(events.made <= 2000 + KEPT_FREE + 2);
}

static void *in_parent_stream, *in_parent_event;
static void use_parents_handles(void) {
  FAILS(stream_check(in_parent_stream), ncclInvalidUsage, "was made before this process was forked; make one in the child by pyncclStreamCreate");
  FAILS(pyncclStreamSynchronize(in_parent_stream, 1), ncclInvalidUsage, "before this process was forked");
  FAILS(pyncclStreamDestroy(in_parent_stream), ncclInvalidUsage, "before this process was forked");
  FAILS(pyncclEventSynchronize(in_parent_event, 1), ncclInvalidUsage, "before this process was forked");
#ifndef __SANITIZE_THREAD__ /* which does not bear threads in a child of threads */
  void *own = new_stream(), *event = new_event();
  struct note here;
  CHECK(streams.nfree == 0); /* the parent's rest with the parent: their locks may be held */
  CHECK(pyncclStreamLaunchHostFunc(own, note, &here) == ncclSuccess && pyncclEventRecord(event, own) == ncclSuccess);
  CHECK(pyncclEventSynchronize(event, 0) == ncclSuccess && here.seen == 0);
  wait_and_destroy(own);
#endif
}

SCENE(a_forked_child_is_told_that_streams_stay_with_the_parent) {
  struct gate gate = GATE;
  wait_and_destroy(new_stream());
  in_parent_stream = new_stream();
  in_parent_event = new_event();
  CHECK(stream_enqueue(in_parent_stream, pass, &gate) == ncclSuccess && pyncclEventRecord(in_parent_event, in_parent_stream) == ncclSuccess);
  until_entered(&gate);
  in_child(use_parents_handles);
  open_gate(&gate);
  wait_and_destroy(in_parent_stream);
  CHECK(pyncclEventDestroy(in_parent_event) == ncclSuccess);
}

SCENE(a_process_ends_whatever_its_streams_are_doing) {
  static struct gate gate = GATE;
  CHECK(stream_enqueue(new_stream(), pass, &gate) == ncclSuccess);
  until_entered(&gate);
  new_stream();
}

/* ---- many threads ------------------------------------------------------------------------------------------------------------------------- */

static void *shared[2], *shared_event;
static void count(void *counter) { ++*(uint64_t *)counter; }

static void *use_shared(void *counters) {
  for (int i = 0; i < 200; i++) {
    int which = i & 1;
    CHECK(pyncclStreamLaunchHostFunc(shared[which], count, (uint64_t *)counters + which) == ncclSuccess);
    if (i % 5 == 0) CHECK(pyncclEventRecord(shared_event, shared[which]) == ncclSuccess);
    if (i % 7 == 0) CHECK(pyncclStreamWaitEvent(shared[!which], shared_event) == ncclSuccess);
    if (i % 50 == 0) CHECK(stream_join(shared[which], shared[!which]) == ncclSuccess);
    if (i % 90 == 0) CHECK(pyncclEventSynchronize(shared_event, 0) == ncclSuccess && pyncclStreamSynchronize(shared[which], 0) == ncclSuccess);
  }
  return NULL;
}

SCENE(threads_share_streams_and_events) {
  uint64_t counters[4][2] = {{0}}, enqueued, completed;
  pthread_t threads[4];
  shared[0] = new_stream();
  shared[1] = new_stream();
  shared_event = new_event();
  for (int i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, use_shared, counters[i]) == 0);
  for (int i = 0; i < 4; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  for (int i = 0; i < 2; i++) {
    CHECK(pyncclStreamSynchronize(shared[i], 0) == ncclSuccess);
    CHECK(pyncclStreamProgress(shared[i], &enqueued, &completed) == ncclSuccess && enqueued == completed);
    CHECK(pyncclStreamDestroy(shared[i]) == ncclSuccess);
  }
  CHECK(pyncclEventDestroy(shared_event) == ncclSuccess);
  for (int i = 0; i < 4; i++) CHECK(counters[i][0] == 100 && counters[i][1] == 100);
}

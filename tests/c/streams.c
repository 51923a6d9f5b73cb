/* Streams with worker threads, events between them, and groups that touch several. */
#include "stress.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#define WAIT 60.0 /* seconds: a scenario hangs no longer */

static int ranks_of(uint64_t seed)
{
    return 2 + (int)(mix(seed, 3) % 2);
}

/* More calls are queued than run; the host runs ahead, then looks at the results. */
static void on_a_stream(struct member *member)
{
    struct chance chance = {member->seed};
    void *stream;
    MUST(pyncclStreamCreate(&stream));
    for (int round = 0; round < 3; round++) {
        struct part *parts[8];
        uint64_t enqueued = 0, completed = 0;
        for (int k = 0; k < 8; k++)
            parts[k] = prepare(random_call(&chance, member->nranks), member);
        for (int k = 0; k < 8; k++)
            MUST(issue(parts[k], stream));
        MUST(pyncclStreamSynchronize(stream, WAIT));
        MUST(pyncclStreamQuery(stream));
        MUST(pyncclStreamProgress(stream, &enqueued, &completed));
        CHECK(enqueued == completed && enqueued >= 8, "%llu of %llu", (unsigned long long)completed, (unsigned long long)enqueued);
        for (int k = 0; k < 8; k++)
            verify(parts[k]);
    }
    struct part *last = prepare(random_call(&chance, member->nranks), member);
    MUST(issue(last, stream));
    MUST(pyncclStreamDestroy(stream)); /* waits for it */
    verify(last);
}

void calls_on_streams(uint64_t seed)
{
    run_world(ranks_of(seed), seed, on_a_stream, NULL);
}

struct counted {
    _Atomic int calls;
    const float *buffer;
    int wrong;
    float expected;
};

/* Runs on a stream's worker, after what was queued before it. */
static void look_at_buffer(void *argument)
{
    struct counted *counted = argument;
    counted->wrong += counted->buffer[0] != counted->expected || counted->buffer[99] != counted->expected;
    counted->expected *= 6;
    counted->calls++;
}

/*
 * x is multiplied by 3 and by 2 in turn, each factor on its own communicator and stream; events alone keep the two in
 * order. A function on the host looks after each pair.
 */
static void ordered_by_events(struct member *member)
{
    enum { ROUNDS = 6 };
    ncclComm_t other;
    void *first, *second, *before, *after;
    float x[100], three = 3.0f / (float)member->nranks;
    struct counted counted = {.buffer = x, .expected = 6};
    ncclRedOp_t triple, twice;
    float two = 2.0f / (float)member->nranks;
    if (member->nranks == 3) { /* thirds are not exact: rank 0 alone counts */
        three = member->rank == 0 ? 3 : 0;
        two = member->rank == 0 ? 2 : 0;
    }
    for (int i = 0; i < 100; i++)
        x[i] = 1;
    MUST(ncclCommSplit(member->comm, 0, member->rank, &other, NULL));
    MUST(ncclRedOpCreatePreMulSum(&triple, &three, ncclFloat32, ncclScalarHostImmediate, member->comm));
    MUST(ncclRedOpCreatePreMulSum(&twice, &two, ncclFloat32, ncclScalarHostImmediate, other));
    MUST(pyncclStreamCreate(&first));
    MUST(pyncclStreamCreate(&second));
    MUST(pyncclEventCreate(&before));
    MUST(pyncclEventCreate(&after));
    for (int k = 0; k < ROUNDS; k++) {
        MUST(ncclAllReduce(x, x, 100, ncclFloat32, triple, member->comm, first));
        MUST(pyncclEventRecord(before, first));
        MUST(pyncclStreamWaitEvent(second, before));
        MUST(ncclAllReduce(x, x, 100, ncclFloat32, twice, other, second));
        MUST(pyncclStreamLaunchHostFunc(second, look_at_buffer, &counted));
        MUST(pyncclEventRecord(after, second));
        MUST(pyncclStreamWaitEvent(first, after));
    }
    MUST(pyncclEventSynchronize(after, WAIT));
    MUST(pyncclEventQuery(after));
    MUST(pyncclStreamSynchronize(first, WAIT));
    CHECK(counted.calls == ROUNDS && counted.wrong == 0, "%d calls, %d wrong", (int)counted.calls, counted.wrong);
    MUST(pyncclEventDestroy(before));
    MUST(pyncclEventDestroy(after));
    MUST(pyncclStreamDestroy(first));
    MUST(pyncclStreamDestroy(second));
    MUST(ncclCommDestroy(other));
}

void two_communicators_ordered_by_events(uint64_t seed)
{
    run_world(ranks_of(seed), seed, ordered_by_events, NULL);
}

/* A group whose calls name different streams, then work on each stream that must come after all of the group. */
static void over_streams(struct member *member)
{
    struct chance chance = {member->seed};
    void *streams[3];
    for (int s = 0; s < 3; s++)
        MUST(pyncclStreamCreate(&streams[s]));
    for (int round = 0; round < 4; round++) {
        struct part *parts[5], *then;
        int n = 1 + below(&chance, 5);
        for (int k = 0; k < n; k++)
            parts[k] = prepare(random_call(&chance, member->nranks), member);
        then = prepare(random_call(&chance, member->nranks), member);
        bool waits = below(&chance, 2); /* with a call on the default stream, the whole group is waited for */
        MUST(ncclGroupStart());
        for (int k = 0; k < n; k++)
            MUST(issue(parts[k], waits && k == n - 1 ? NULL : streams[k % 3]));
        MUST(ncclGroupEnd());
        MUST(issue(then, streams[below(&chance, n < 3 ? n : 3)]));
        for (int s = 0; s < 3; s++)
            MUST(pyncclStreamSynchronize(streams[s], WAIT));
        for (int k = 0; k < n; k++)
            verify(parts[k]);
        verify(then);
    }
    for (int s = 0; s < 3; s++)
        MUST(pyncclStreamDestroy(streams[s]));
}

void groups_over_streams(uint64_t seed)
{
    run_world(ranks_of(seed), seed, over_streams, NULL);
}

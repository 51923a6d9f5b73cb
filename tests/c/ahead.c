/*
 * Small broadcasts and scatters, whose root waits for nobody, and small reduces and gathers, where only the root waits:
 * how far ranks run ahead of each other, that every value arrives, and how those that ran ahead hear of a disagreement.
 */
#include "stress.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 4
#define FAR 32     /* operations that a rank may be ahead of the slowest */
#define SMALL 500  /* floats: goes ahead on every machine */
#define LARGE 1500 /* floats: waits for all on every machine */

static int ranks_of(uint64_t seed)
{
    return 2 + (int)(mix(seed, 7) % (MOST - 1));
}

/* What rank `from` gives in operation `k`: exact in a float. */
static float value_of(int from, int k)
{
    return (float)(from * 10000 + k);
}

static void fill(float *x, size_t count, float value)
{
    for (size_t i = 0; i < count; i++)
        x[i] = value + (float)(i % 7);
}

static void expect_all(const float *x, size_t count, float value, const char *what, int k)
{
    for (size_t i = 0; i < count; i++)
        CHECK(x[i] == value + (float)(i % 7), "%s %d: element %zu is %g, not %g", what, k, i, x[i], value + (float)(i % 7));
}

/* ---- values ---- */

/* Rooted and other collectives of all sizes in one order, often enough for every ring to go round, with ranks that dawdle. */
static void mix_all(struct member *member)
{
    struct chance chance = {member->seed}, own = {mix(member->seed, (uint64_t)member->rank)};
    static const enum call_kind rooted[] = {BROADCAST, BCAST, SCATTER, REDUCE, GATHER};
    for (int i = 0; i < 120; i++) {
        struct call call = random_call(&chance, member->nranks);
        if (below(&chance, 8) > 0) {
            call.kind = rooted[below(&chance, 5)];
            call.count = (size_t)below(&chance, below(&chance, 2) ? 20 : 700);
        }
        for (int turns = below(&own, 6) == 0 ? below(&own, 200) : 0; turns > 0; turns--)
            sched_yield();
        make_call(call, member);
    }
}

void small_rooted_calls_among_others(uint64_t seed)
{
    run_world(ranks_of(seed), seed, mix_all, NULL);
}

/* ---- how far ---- */

struct progress {
    _Atomic int done[MOST]; /* operations that each rank has completed */
};

/* The root never gets further than FAR from the slowest, though that one comes only when the root is as far as it can be. */
static void follow(struct member *member)
{
    struct progress *progress = member->shared;
    size_t count = mix(member->seed, 3) % 2 ? 2 : SMALL;
    float x[SMALL];
    int slowest = member->nranks - 1;
    if (member->rank == slowest)
        while (progress->done[0] < FAR - 1)
            sched_yield();
    for (int k = 0; k < 200; k++) {
        if (member->rank == 0)
            fill(x, count, value_of(0, k));
        MUST(ncclBroadcast(x, x, count, ncclFloat32, 0, member->comm, NULL));
        expect_all(x, count, value_of(0, k), "broadcast", k);
        progress->done[member->rank] = k + 1;
        CHECK(k <= progress->done[slowest] + FAR, "rank %d has done %d, the slowest %d", member->rank, k + 1,
              (int)progress->done[slowest]);
    }
}

/* The same the other way round: those who give wait for nobody, until they are too far ahead of the root. */
static void lead(struct member *member)
{
    struct progress *progress = member->shared;
    float x[2], all[2 * MOST];
    int last = member->nranks - 1;
    if (member->rank == 0)
        for (int rank = 1; rank < member->nranks; rank++)
            while (progress->done[rank] < FAR - 1)
                sched_yield();
    for (int k = 0; k < 200; k++) {
        fill(x, 2, value_of(member->rank, k));
        if (k % 2)
            MUST(ncclGather(x, all, 2, ncclFloat32, 0, member->comm, NULL));
        else
            MUST(ncclReduce(x, all, 2, ncclFloat32, ncclMax, 0, member->comm, NULL));
        if (member->rank == 0) {
            expect_all(all, 2, value_of(k % 2 ? 0 : last, k), "first block", k);
            expect_all(all + (k % 2 ? 2 * last : 0), 2, value_of(last, k), "last block", k);
        }
        progress->done[member->rank] = k + 1;
        CHECK(k <= progress->done[0] + FAR, "rank %d has done %d, the root %d", member->rank, k + 1, (int)progress->done[0]);
    }
}

void how_far_ranks_run_ahead(uint64_t seed)
{
    struct progress roots = {0}, others = {0};
    run_world(ranks_of(seed), seed, follow, &roots);
    run_world(ranks_of(seed), seed, lead, &others);
}

/* Who waits for nobody gives, and has destroyed its communicator before the others begin; they get all of it. */
static void leave_early(struct member *member)
{
    const int calls = FAR - 2;
    bool to_root = mix(member->seed, 4) % 2, ahead = (member->rank == 0) != to_root;
    float x[SMALL] = {0}, all[SMALL * MOST];
    size_t count = mix(member->seed, 5) % 2 ? 3 : SMALL / MOST;
    if (!ahead)
        meet(member);
    for (int k = 0; k < calls; k++) {
        fill(x, count, value_of(member->rank, k));
        for (int rank = 0; rank < member->nranks; rank++)
            fill(all + (size_t)rank * count, count, value_of(rank, k));
        if (to_root) {
            MUST(ncclGather(x, all, count, ncclFloat32, 0, member->comm, NULL));
            for (int rank = 0; member->rank == 0 && rank < member->nranks; rank++)
                expect_all(all + (size_t)rank * count, count, value_of(rank, k), "gather", k);
        } else if (k % 2) {
            MUST(ncclScatter(all, x, count, ncclFloat32, 0, member->comm, NULL));
            expect_all(x, count, value_of(member->rank, k), "scatter", k);
        } else {
            MUST(ncclBroadcast(x, x, count, ncclFloat32, 0, member->comm, NULL));
            expect_all(x, count, value_of(0, k), "broadcast", k);
        }
    }
    if (ahead) {
        MUST(ncclCommDestroy(member->comm));
        member->comm = NULL;
        meet(member);
    } else if (to_root) {
        MUST_FAIL(ncclAllReduce(x, x, 1, ncclFloat32, ncclSum, member->comm, NULL));
        MUST(ncclCommAbort(member->comm));
        member->comm = NULL;
    }
}

void leaving_after_running_ahead(uint64_t seed)
{
    run_world(ranks_of(seed), seed, leave_early, NULL);
}

/* On a stream of each rank, in groups, and all ranks of one thread: more calls at once than a rank may run ahead. */
static void run_ahead_on_streams(struct member *member)
{
    enum { CALLS = 3 * FAR };
    float x[CALLS][3];
    void *stream;
    bool grouped = mix(member->seed, 6) % 2;
    MUST(pyncclStreamCreate(&stream));
    if (grouped)
        MUST(ncclGroupStart());
    for (int k = 0; k < CALLS; k++) {
        int root = k / 40 % member->nranks;
        fill(x[k], 3, value_of(member->rank, k));
        MUST(ncclBroadcast(x[k], x[k], 3, ncclFloat32, root, member->comm, stream));
    }
    if (grouped)
        MUST(ncclGroupEnd());
    MUST(pyncclStreamSynchronize(stream, 60));
    for (int k = 0; k < CALLS; k++)
        expect_all(x[k], 3, value_of(k / 40 % member->nranks, k), "broadcast", k);
    MUST(pyncclStreamDestroy(stream));
}

void running_ahead_on_streams(uint64_t seed)
{
    run_world(ranks_of(seed), seed, run_ahead_on_streams, NULL);

    enum { CALLS = 3 * FAR };
    int n = ranks_of(seed);
    float(*x)[CALLS][3] = malloc((size_t)n * sizeof *x);
    ncclComm_t comms[MOST];
    MUST(ncclCommInitAll(comms, n, NULL));
    MUST(ncclGroupStart());
    for (int rank = 0; rank < n; rank++)
        for (int k = 0; k < CALLS; k++) {
            fill(x[rank][k], 3, value_of(rank, k));
            MUST(ncclBroadcast(x[rank][k], x[rank][k], 3, ncclFloat32, k / 50 % n, comms[rank], NULL));
        }
    MUST(ncclGroupEnd());
    for (int rank = 0; rank < n; rank++) {
        for (int k = 0; k < CALLS; k++)
            expect_all(x[rank][k], 3, value_of(k / 50 % n, k), "broadcast", k);
        MUST(ncclCommDestroy(comms[rank]));
    }
    free(x);
}

/* ---- disagreements ---- */

struct words {
    char of[MOST][1200];
};

/* A call that all wait for fails on all ranks, with the same words unless it is long ago; the one after it is fine. */
static void be_told(struct member *member, const char *expected, bool far)
{
    struct words *words = member->shared;
    float x[1] = {0};
    CHECK(MUST_FAIL(ncclAllReduce(x, x, 1, ncclFloat32, ncclSum, member->comm, NULL)) == ncclInvalidUsage, "another code");
    snprintf(words->of[member->rank], sizeof words->of[0], "%s", ncclGetLastError(NULL));
    CHECK(strstr(words->of[member->rank], expected) != NULL, "the error does not say \"%s\"", expected);
    meet(member);
    for (int rank = 0; !far && rank < member->nranks; rank++)
        CHECK(strcmp(words->of[rank], words->of[0]) == 0, "rank 0 is told: %s", words->of[0]);
    meet(member);
    make_sane_call(member);
}

static ncclResult_t broadcast(struct member *member, size_t count, ncclDataType_t dtype, int root)
{
    static _Thread_local float x[LARGE];
    return ncclBroadcast(x, x, count, dtype, root, member->comm, NULL);
}

/* One rank differs, in the count, dtype or root, or calls something else, or all that is not a root. */
static void differ(struct member *member)
{
    struct chance chance = {member->seed};
    float x[LARGE] = {0}, all[LARGE * MOST];
    int n = member->nranks, me = member->rank;
    for (int round = 0; round < 12; round++) {
        int root = below(&chance, n), odd = below(&chance, n), field = below(&chance, 6), warm = below(&chance, 50);
        size_t count = 1 + (size_t)below(&chance, 100);
        bool differs = me == odd, far = below(&chance, 2) == 0;
        char words[64] = "differs between ranks: rank 0 calls";
        for (int k = 0; k < warm; k++)
            MUST(broadcast(member, 2, ncclFloat32, root));
        if (field == 0) { /* count: who reads the root's post is told at once, the root later */
            if (me == root)
                MUST(broadcast(member, count + differs, ncclFloat32, root));
            else if (differs || odd == root)
                MUST_FAIL(broadcast(member, count + differs, ncclFloat32, root));
            else
                MUST(broadcast(member, count, ncclFloat32, root));
        } else if (field == 1) { /* dtype, in a scatter */
            ncclResult_t code = ncclScatter(all, x, count, differs ? ncclInt32 : ncclFloat32, root, member->comm, NULL);
            CHECK((code == ncclSuccess) == (me == root || (!differs && odd != root)), "code %d", (int)code);
        } else if (field == 2) { /* to the root: it alone is told at once */
            ncclResult_t code = ncclGather(x, all, count + differs, ncclFloat32, root, member->comm, NULL);
            CHECK((code == ncclSuccess) == (me != root), "code %d", (int)code);
        } else if (field == 3) { /* two roots: both run ahead */
            const int mine = differs ? (root + 1) % n : root, theirs = differs ? root : (root + 1) % n;
            ncclResult_t code = broadcast(member, count, ncclFloat32, mine);
            CHECK(code == ncclSuccess || me != mine, "code %d", (int)code);
            CHECK(code != ncclSuccess || !differs || me == mine, "rank %d believes rank %d, whose root is %d", me, mine, theirs);
        } else if (field == 4) { /* something for which all wait, and nothing at all */
            if (differs)
                MUST_FAIL(ncclAllGather(x, all, 1, ncclFloat32, member->comm, NULL));
            else if (me == root)
                MUST(broadcast(member, 0, ncclFloat32, root));
            else if (odd == root)
                MUST_FAIL(broadcast(member, 0, ncclFloat32, root));
            else
                MUST(broadcast(member, 0, ncclFloat32, root));
        } else { /* a large one: all wait for all, but for a root with a small one */
            if (differs && me == root)
                MUST(broadcast(member, 1, ncclFloat32, root));
            else
                MUST_FAIL(broadcast(member, differs ? 1 : LARGE, ncclFloat32, root));
        }
        /* What is called after it in agreement fails on those who know, and never with a wrong value on the others. */
        for (int k = far ? 2 * FAR : 0; k > 0; k--)
            (void)broadcast(member, 2, ncclFloat32, root);
        if (far) /* that was enough for the root to hear of it */
            MUST_FAIL(broadcast(member, 2, ncclFloat32, root));
        be_told(member, far ? "differ" : words, far);
    }
}

/* Every rank is a root of its own: within FAR calls each must hear of it. */
static void be_root_alone(struct member *member)
{
    int k = 0;
    while (broadcast(member, 2, ncclFloat32, member->rank) == ncclSuccess)
        CHECK(++k <= FAR, "rank %d has called %d times", member->rank, k);
    CHECK(strstr(ncclGetLastError(NULL), "operation 1 of communicator") != NULL, "another operation");
    for (; k < FAR; k++)
        MUST_FAIL(broadcast(member, 2, ncclFloat32, member->rank)); /* on and on */
    be_told(member, "differs between ranks: rank 0 calls broadcast(", true);
    for (k = 0; k < 3 * FAR; k++)
        MUST(broadcast(member, 2, ncclFloat32, k % member->nranks));
}

/* Ranks that only ever run ahead, and end: one at least is told, and none is kept. */
static void end_in_disagreement(struct member *member)
{
    _Atomic int *told = member->shared;
    MUST(broadcast(member, 2, ncclFloat32, member->rank));
    bool finalizes = mix(member->seed, 8) % 2;
    ncclResult_t code = finalizes ? ncclCommFinalize(member->comm) : ncclSuccess;
    if (code == ncclSuccess)
        code = ncclCommDestroy(member->comm);
    else
        MUST(ncclCommDestroy(member->comm));
    CHECK(code == ncclSuccess || code == ncclInvalidUsage, "code %d", (int)code);
    if (code != ncclSuccess) {
        CHECK(strstr(ncclGetLastError(NULL), "operation 1 of communicator") != NULL, "another operation");
        atomic_fetch_add(told, 1);
    }
    MUST_FAIL(ncclCommDestroy(member->comm));
    member->comm = NULL;
}

void ranks_that_ran_ahead_and_disagree(uint64_t seed)
{
    struct words words;
    _Atomic int told = 0;
    run_world(ranks_of(seed), seed, differ, &words);
    run_world(ranks_of(seed), seed, be_root_alone, &words);
    run_world(ranks_of(seed), seed, end_in_disagreement, &told);
    CHECK(told > 0, "nobody was told");
}

/* ---- peers that do not come ---- */

/* A root gets as far as it may without the others, and then no further: they have gone, or do not come in time. */
static void wait_for_nobody(struct member *member)
{
    bool gone = mix(member->seed, 9) % 2;
    make_sane_call(member);
    if (member->rank > 0) {
        if (gone) {
            MUST(ncclCommAbort(member->comm));
            member->comm = NULL;
        }
        meet(member);
    } else {
        int k = 0;
        ncclResult_t code;
        if (gone)
            meet(member);
        MUST(pyncclSetTimeout(member->comm, gone ? 60 : 0.2));
        while ((code = broadcast(member, 2, ncclFloat32, 0)) == ncclSuccess)
            CHECK(++k <= FAR, "the root has called %d times", k);
        CHECK(k >= FAR - 2, "the root has called %d times only", k);
        CHECK(code == (gone ? ncclRemoteError : ncclTimeout), "code %d", (int)code);
        CHECK(strstr(ncclGetLastError(NULL), "for rank 1") != NULL || strstr(ncclGetLastError(NULL), "rank 1 has aborted") != NULL,
              "it does not name rank 1");
        if (!gone)
            meet(member);
    }
    if (member->comm != NULL)
        MUST(ncclCommAbort(member->comm));
    member->comm = NULL;
}

/* Another thread aborts the root while it waits for room. */
struct waiter {
    ncclComm_t comm;
    _Atomic int calls;
    pthread_t thread;
};

static void *abort_the_root(void *argument)
{
    struct waiter *waiter = argument;
    while (waiter->calls < FAR - 2)
        sched_yield();
    MUST(ncclCommAbort(waiter->comm));
    return NULL;
}

static void abort_for_room(struct member *member)
{
    make_sane_call(member);
    if (member->rank == 0) {
        struct waiter waiter = {.comm = member->comm};
        pthread_create(&waiter.thread, NULL, abort_the_root, &waiter);
        while (broadcast(member, 2, ncclFloat32, 0) == ncclSuccess)
            waiter.calls++;
        pthread_join(waiter.thread, NULL);
        meet(member);
    } else {
        meet(member);
        MUST(ncclCommAbort(member->comm));
    }
    member->comm = NULL;
}

void waiting_for_room_in_vain(uint64_t seed)
{
    run_world(ranks_of(seed), seed, wait_for_nobody, NULL);
    run_world(ranks_of(seed), seed, abort_for_room, NULL);
}

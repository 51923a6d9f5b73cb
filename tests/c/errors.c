/* What goes wrong: every wrong call is an error in bounded time, and does not spoil what may go on. */
#include "stress.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define MOST 4

static int ranks_of(uint64_t seed)
{
    return 2 + (int)(mix(seed, 5) % (MOST - 1));
}

/* One rank, drawn by chance, differs in one thing, in a call for which all wait; all ranks get the error, and the next call is fine. */
static void disagree(struct member *member)
{
    struct chance chance = {member->seed};
    float send[4000] = {0}, recv[4000];
    for (int round = 0; round < 8; round++) {
        int odd = below(&chance, member->nranks), field = round % 5, root = below(&chance, member->nranks);
        bool differs = member->rank == odd;
        size_t count = (field == 3 ? 1500 : 1) + (size_t)below(&chance, 900); /* of small broadcasts: see ahead.c */
        ncclDataType_t dtype = field == 1 && differs ? ncclInt32 : ncclFloat32;
        ncclRedOp_t op = field == 2 && differs ? ncclMax : ncclSum;
        if (field == 0 && differs)
            count += 1;
        if (field == 3) {
            MUST_FAIL(ncclBroadcast(send, recv, count, dtype, differs ? (root + 1) % member->nranks : root, member->comm, NULL));
        } else if (field == 4 && differs) {
            MUST_FAIL(ncclReduceScatter(send, recv, count, dtype, op, member->comm, NULL));
        } else {
            ncclResult_t code = MUST_FAIL(ncclAllReduce(send, recv, count, dtype, op, member->comm, NULL));
            CHECK(code == ncclInvalidUsage || code == ncclInvalidArgument, "code %d", (int)code);
        }
        make_sane_call(member);
    }
    int next = (member->rank + 1) % member->nranks, previous = (member->rank + member->nranks - 1) % member->nranks;
    for (int round = 0; round < 2; round++) { /* counts, then dtypes, of every message of a ring */
        MUST(ncclGroupStart());
        MUST(ncclSend(send, 100, ncclFloat32, next, member->comm, NULL));
        MUST(ncclRecv(recv, round == 0 ? 99 : 100, round == 0 ? ncclFloat32 : ncclInt32, previous, member->comm, NULL));
        MUST_FAIL(ncclGroupEnd());
        MUST(ncclGroupStart());
        MUST(ncclSend(send, 100, ncclFloat32, next, member->comm, NULL));
        MUST(ncclRecv(recv, 100, ncclFloat32, previous, member->comm, NULL));
        MUST(ncclGroupEnd());
        make_sane_call(member);
    }
}

void ranks_that_disagree(uint64_t seed)
{
    run_world(ranks_of(seed), seed, disagree, NULL);
}

/* Found before any peer is asked, so each rank may do it alone. */
static void argue(struct member *member)
{
    float x[8] = {0}, y[8];
    ncclComm_t comm = member->comm;
    int n = member->nranks;
    MUST_FAIL(ncclAllReduce(x, y, 8, ncclFloat32, ncclSum, NULL, NULL));
    MUST_FAIL(ncclAllReduce(NULL, y, 8, ncclFloat32, ncclSum, comm, NULL));
    MUST_FAIL(ncclAllReduce(x, NULL, 8, ncclFloat32, ncclSum, comm, NULL));
    MUST_FAIL(ncclAllReduce(x, y, 8, (ncclDataType_t)12, ncclSum, comm, NULL));
    MUST_FAIL(ncclAllReduce(x, y, 8, ncclFloat32, (ncclRedOp_t)99, comm, NULL));
    MUST_FAIL(ncclBroadcast(x, y, 8, ncclFloat32, n, comm, NULL));
    MUST_FAIL(ncclReduce(x, y, 8, ncclFloat32, ncclSum, -1, comm, NULL));
    MUST_FAIL(ncclSend(x, 8, ncclFloat32, n, comm, NULL));
    MUST_FAIL(ncclRecv(x, 8, ncclFloat32, -1, comm, NULL));
    MUST_FAIL(ncclSend(x, 8, ncclFloat32, member->rank, comm, NULL)); /* to itself, with no recv in a group */
    MUST_FAIL(ncclAllReduce(x, y, 8, ncclFloat32, ncclSum, comm, y)); /* y is no stream */
    MUST_FAIL(ncclGroupEnd());
    MUST(ncclGroupStart());
    MUST(ncclSend(x, 8, ncclFloat32, member->rank, comm, NULL));
    MUST(ncclSend(x, 8, ncclFloat32, member->rank, comm, NULL));
    MUST(ncclRecv(y, 8, ncclFloat32, member->rank, comm, NULL));
    MUST_FAIL(ncclGroupEnd()); /* two messages to itself, one received */
    make_sane_call(member);
    MUST(ncclGroupStart()); /* a wrong call spoils its group, on every rank alike, and nothing after it */
    MUST(ncclAllReduce(x, y, 8, ncclFloat32, ncclSum, comm, NULL));
    MUST_FAIL(ncclBroadcast(x, y, 8, ncclFloat32, n, comm, NULL));
    MUST_FAIL(ncclGroupEnd());
    make_sane_call(member);
}

void wrong_arguments(uint64_t seed)
{
    run_world(ranks_of(seed), seed, argue, NULL);
}

/* ---- abort ---- */

struct abortion {
    ncclComm_t comm;
    _Atomic bool inside;
    pthread_t thread;
};

static void *abort_soon(void *argument)
{
    struct abortion *abortion = argument;
    while (!abortion->inside)
        sched_yield();
    MUST(ncclCommAbort(abortion->comm)); /* before the waiter waits, or while it does: both must end it */
    return NULL;
}

/* Rank 0 waits in a collective that nobody else enters, and another of its threads aborts. The others then try. */
static void abort_the_waiting(struct member *member)
{
    float x[5000] = {0};
    size_t count = mix(member->seed, 9) % 2 ? 5 : 5000;
    make_sane_call(member);
    if (member->rank == 0) {
        struct abortion abortion = {.comm = member->comm};
        pthread_create(&abortion.thread, NULL, abort_soon, &abortion);
        abortion.inside = true;
        MUST_FAIL(ncclAllReduce(x, x, count, ncclFloat32, ncclSum, member->comm, NULL));
        pthread_join(abortion.thread, NULL);
        meet(member);
    } else {
        meet(member);
        /* What rank 0 had already given when it left may be enough for one small call; never for another. */
        ncclResult_t code = ncclAllReduce(x, x, count, ncclFloat32, ncclSum, member->comm, NULL);
        CHECK(code != ncclSuccess || count == 5, "code %d", (int)code);
        MUST_FAIL(ncclAllReduce(x, x, count, ncclFloat32, ncclSum, member->comm, NULL));
        MUST_FAIL(ncclAllReduce(x, x, count, ncclFloat32, ncclSum, member->comm, NULL)); /* it stays broken */
        MUST(ncclCommAbort(member->comm));
    }
    member->comm = NULL;
}

void aborts_while_waiting(uint64_t seed)
{
    run_world(ranks_of(seed), seed, abort_the_waiting, NULL);
}

/* A queue of calls that cannot complete, on a stream; abort ends them all, and the stream lives on. */
static void abort_the_queued(struct member *member)
{
    float x[100] = {0};
    ncclComm_t other;
    void *stream;
    MUST(pyncclStreamCreate(&stream));
    MUST(ncclCommSplit(member->comm, 0, 0, &other, NULL));
    if (member->rank == 0) {
        for (int k = 0; k < 4; k++)
            MUST(ncclAllReduce(x, x, 100, ncclFloat32, ncclSum, member->comm, stream));
        MUST(ncclCommAbort(member->comm));
        MUST_FAIL(pyncclStreamSynchronize(stream, 60));
        MUST(pyncclStreamSynchronize(stream, 60)); /* the error was told once */
        meet(member);
    } else {
        meet(member);
        MUST(ncclCommAbort(member->comm));
    }
    member->comm = NULL;
    struct member second = {member->rank, member->nranks, other, member->seed, NULL, NULL};
    struct call call = {.kind = ALL_GATHER, .dtype = ncclInt32, .op = ncclMax, .count = 77, .seed = member->seed};
    struct part *part = prepare(call, &second);
    MUST(issue(part, stream));
    MUST(pyncclStreamSynchronize(stream, 60));
    verify(part);
    MUST(pyncclStreamDestroy(stream));
    MUST(ncclCommDestroy(other));
}

void aborts_of_queued_work(uint64_t seed)
{
    run_world(ranks_of(seed), seed, abort_the_queued, NULL);
}

/* The others wait for rank 0, or are about to; it leaves without entering, by abort or by destroy. */
static void leave_the_others(struct member *member)
{
    float x[10] = {0};
    bool destroys = mix(member->seed, 10) % 2;
    make_sane_call(member);
    if (member->rank == 0) {
        MUST(destroys ? ncclCommDestroy(member->comm) : ncclCommAbort(member->comm));
    } else {
        ncclResult_t code = MUST_FAIL(ncclAllReduce(x, x, 10, ncclFloat32, ncclSum, member->comm, NULL));
        CHECK(code == ncclRemoteError, "code %d", (int)code);
        CHECK(strstr(ncclGetLastError(NULL), "rank 0") != NULL, "the error does not name rank 0");
        MUST(ncclCommAbort(member->comm));
    }
    MUST_FAIL(ncclAllReduce(x, x, 10, ncclFloat32, ncclSum, member->comm, NULL)); /* a handle of nothing */
    MUST_FAIL(ncclCommDestroy(member->comm));
    member->comm = NULL;
}

void leaving_while_others_wait(uint64_t seed)
{
    run_world(ranks_of(seed), seed, leave_the_others, NULL);
}

/* ---- deadlines ---- */

/* A collective that one rank never enters ends with the deadline, on all that have entered. */
static void miss_the_deadline(struct member *member)
{
    float x[10] = {0};
    make_sane_call(member);
    if (member->rank > 0) {
        MUST(pyncclSetTimeout(member->comm, 0.2));
        ncclResult_t code = MUST_FAIL(ncclAllReduce(x, x, 10, ncclFloat32, ncclSum, member->comm, NULL));
        CHECK(code == ncclTimeout || code == ncclRemoteError, "code %d", (int)code);
    }
    meet(member);
    MUST(ncclCommAbort(member->comm));
    member->comm = NULL;
}

/* Each sends to the other before it receives, with no group: nobody can go on. */
static void face_each_other(struct member *member)
{
    float x[10] = {0};
    MUST(pyncclSetTimeout(member->comm, 0.2));
    ncclResult_t code = MUST_FAIL(ncclSend(x, 10, ncclFloat32, 1 - member->rank, member->comm, NULL));
    CHECK(code == ncclTimeout || code == ncclRemoteError, "code %d", (int)code);
    CHECK(strstr(ncclGetLastError(NULL), "send") != NULL, "the error does not say what waits");
    meet(member);
    MUST(ncclCommAbort(member->comm));
    member->comm = NULL;
}

void deadlines(uint64_t seed)
{
    run_world(ranks_of(seed), seed, miss_the_deadline, NULL);
    run_world(2, seed, face_each_other, NULL);

    ncclUniqueId id; /* of a world in which one rank never arrives */
    ncclComm_t comm;
    MUST(ncclGetUniqueId(&id));
    MUST(pyncclSetTimeout(NULL, 0.2));
    MUST_FAIL(ncclCommInitRank(&comm, 3, id, 0));
    CHECK(strstr(ncclGetLastError(NULL), "1") != NULL, "the error does not name the missing ranks");
    MUST_FAIL(ncclCommInitRank(&comm, 3, id, 2));
    MUST(pyncclSetTimeout(NULL, 0));
}

/* ---- revoke ---- */

/* After a revoke nothing more starts, and the survivors make a new communicator out of the old. */
static void revoke(struct member *member)
{
    float x[10] = {0};
    int excluded = member->nranks - 1;
    ncclComm_t smaller;
    make_sane_call(member);
    MUST(ncclCommRevoke(member->comm, NCCL_REVOKE_DEFAULT));
    MUST_FAIL(ncclAllReduce(x, x, 10, ncclFloat32, ncclSum, member->comm, NULL));
    if (member->rank != excluded) {
        MUST(ncclCommShrink(member->comm, &excluded, 1, &smaller, NULL, NCCL_SHRINK_DEFAULT));
        struct member survivor = {.comm = smaller, .seed = member->seed, .nranks = member->nranks - 1, .rank = member->rank};
        make_sane_call(&survivor);
        MUST(ncclCommDestroy(smaller));
    }
}

void revokes(uint64_t seed)
{
    run_world(ranks_of(seed), seed, revoke, NULL);
}

/* One rank's window is refused: the registration fails on all, and the next one succeeds. */
static void refuse_a_window(struct member *member)
{
    char ordinary[64];
    void *memory;
    ncclWindow_t window;
    int odd = (int)(mix(member->seed, 11) % (uint64_t)member->nranks);
    MUST(ncclMemAlloc(&memory, 8192));
    MUST_FAIL(ncclCommWindowRegister(member->comm, member->rank == odd ? ordinary : memory, 64, &window, 0));
    MUST(ncclCommWindowRegister(member->comm, memory, 8192, &window, 0));
    MUST_FAIL(ncclPutSignal(memory, 1, ncclInt8, member->nranks, window, 0, 0, 0, 0, member->comm, NULL));
    MUST_FAIL(ncclPutSignal(memory, 1, ncclInt8, 0, window, SIZE_MAX, 0, 0, 0, member->comm, NULL));
    MUST_FAIL(ncclPutSignal(memory, 1, ncclInt8, 0, window, 0, -1, 0, 0, member->comm, NULL));
    MUST_FAIL(ncclPutSignal(memory, 1, ncclInt8, 0, window, 0, 0, 0, 1, member->comm, NULL));
    MUST_FAIL(ncclSignal(-1, 0, 0, 0, member->comm, NULL));
    MUST_FAIL(ncclMemFree((char *)memory + 4096));
    make_sane_call(member);
    MUST(ncclCommWindowDeregister(member->comm, window));
    MUST(ncclMemFree(memory));
    MUST_FAIL(ncclMemFree(memory));
}

void windows_refused(uint64_t seed)
{
    run_world(ranks_of(seed), seed, refuse_a_window, NULL);
}

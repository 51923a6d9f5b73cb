/* Random collectives, alone, in groups, on communicators side by side, and with all ranks in one thread. */
#include "stress.h"

#include <stdlib.h>
#include <string.h>

#define MOST 4

static int ranks_of(uint64_t seed)
{
    return 2 + (int)(mix(seed, 1) % (MOST - 1));
}

static void one_after_another(struct member *member)
{
    struct chance chance = {member->seed};
    for (int i = 0; i < 25; i++)
        make_call(random_call(&chance, member->nranks), member);
}

void collectives_one_after_another(uint64_t seed)
{
    run_world(ranks_of(seed), seed, one_after_another, NULL);
}

/* Calls that follow each other at once, most of them of sizes that go through slots, small and large by turns: a rank
   that is ahead must not write what another still reads. */
static void tightly(struct member *member)
{
    static const int counts[] = {17000, 33000, 70000, 140000, 300000, 600000};
    enum { CALLS = 16 };
    struct chance chance = {member->seed};
    struct part *parts[CALLS];
    for (int k = 0; k < CALLS; k++) {
        struct call call = random_call(&chance, member->nranks);
        if (below(&chance, 4) > 0) {
            call.count = (size_t)(counts[below(&chance, 6)] >> below(&chance, 4)) + (size_t)below(&chance, 3);
            call.memory = below(&chance, 4) > 0 ? PLAIN : MIXED;
        }
        parts[k] = prepare(call, member);
    }
    for (int k = 0; k < CALLS; k++)
        MUST(issue(parts[k], NULL));
    for (int k = 0; k < CALLS; k++)
        verify(parts[k]);
}

void collectives_without_a_pause(uint64_t seed)
{
    run_world(ranks_of(seed), seed, tightly, NULL);
}

static void in_groups(struct member *member)
{
    struct chance chance = {member->seed};
    for (int i = 0; i < 6; i++) {
        struct part *parts[6];
        int n = 1 + below(&chance, 6);
        bool nested = below(&chance, 2);
        for (int k = 0; k < n; k++)
            parts[k] = prepare(random_call(&chance, member->nranks), member);
        MUST(ncclGroupStart());
        for (int k = 0; k < n; k++) {
            if (nested)
                MUST(ncclGroupStart());
            MUST(issue(parts[k], NULL));
            if (nested)
                MUST(ncclGroupEnd());
        }
        MUST(ncclGroupEnd());
        for (int k = 0; k < n; k++)
            verify(parts[k]);
    }
    MUST(ncclGroupStart());
    MUST(ncclGroupEnd()); /* of nothing */
}

void collectives_in_groups(uint64_t seed)
{
    run_world(ranks_of(seed), seed, in_groups, NULL);
}

static void a_few(struct member *member)
{
    struct chance chance = {member->seed};
    for (int i = 0; i < 8; i++)
        make_call(random_call(&chance, member->nranks), member);
}

void communicators_side_by_side(uint64_t seed)
{
    struct world *worlds[8];
    for (int k = 0; k < 8; k++)
        worlds[k] = start_world(2, mix(seed, (uint64_t)k), a_few, NULL);
    for (int k = 0; k < 8; k++)
        join_world(worlds[k]);
}

/* Eight ranks, in the dtypes that hold the sums of eight. */
static void crowded(struct member *member)
{
    static const ncclDataType_t wide[] = {ncclInt32, ncclInt64, ncclUint64, ncclFloat32, ncclFloat64, ncclBfloat16};
    struct chance chance = {member->seed};
    for (int i = 0; i < 6; i++) {
        struct call call = random_call(&chance, member->nranks);
        call.dtype = wide[below(&chance, 6)];
        call.count = (size_t)below(&chance, 9000);
        make_call(call, member);
    }
}

void more_ranks_than_cores(uint64_t seed)
{
    run_world(8, seed, crowded, NULL);
}

/* ncclCommInitAll, and a group for each collective: one thread is all the ranks. */
void one_thread_drives_all_ranks(uint64_t seed)
{
    int n = ranks_of(seed);
    ncclComm_t comms[MOST];
    struct member members[MOST];
    struct chance chance = {seed};
    MUST(ncclCommInitAll(comms, n, NULL));
    for (int rank = 0; rank < n; rank++) {
        int count, mine;
        MUST(ncclCommCount(comms[rank], &count));
        MUST(ncclCommUserRank(comms[rank], &mine));
        CHECK(count == n && mine == rank, "communicator %d is rank %d of %d", rank, mine, count);
        members[rank] = (struct member){rank, n, comms[rank], seed, NULL, NULL};
    }
    for (int i = 0; i < 10; i++) {
        struct part *parts[3][MOST];
        int calls = 1 + below(&chance, 3);
        for (int k = 0; k < calls; k++) {
            struct call call = random_call(&chance, n);
            for (int rank = 0; rank < n; rank++)
                parts[k][rank] = prepare(call, &members[rank]);
        }
        MUST(ncclGroupStart());
        for (int rank = 0; rank < n; rank++)
            for (int k = 0; k < calls; k++)
                MUST(issue(parts[k][rank], NULL));
        MUST(ncclGroupEnd());
        for (int k = 0; k < calls; k++)
            for (int rank = 0; rank < n; rank++)
                verify(parts[k][rank]);
    }
    for (int rank = 0; rank < n; rank++)
        MUST(ncclCommDestroy(comms[rank]));
}

/* A scalar that is read when the collective runs, and one that is read at once: each from memory that changes later. */
static void residences(struct member *member)
{
    float scalar = (float)(member->rank + 1), input[5] = {1, 2, 3, 4, 5}, output[5];
    float whole = (float)(member->nranks * (member->nranks + 1) / 2);
    ncclRedOp_t immediate, device, other;
    MUST(ncclRedOpCreatePreMulSum(&immediate, &scalar, ncclFloat32, ncclScalarHostImmediate, member->comm));
    MUST(ncclRedOpCreatePreMulSum(&device, &scalar, ncclFloat32, ncclScalarDevice, member->comm));
    MUST(ncclRedOpCreatePreMulSum(&other, &scalar, ncclFloat32, ncclScalarDevice, member->comm));
    CHECK(immediate >= ncclNumOps && device >= ncclNumOps && immediate != device && other != device, "%d %d %d",
          (int)immediate, (int)device, (int)other);
    scalar *= 2;
    MUST(ncclAllReduce(input, output, 5, ncclFloat32, immediate, member->comm, NULL));
    for (int i = 0; i < 5; i++)
        CHECK(output[i] == input[i] * whole, "element %d is %g", i, output[i]);
    MUST(ncclAllReduce(input, output, 5, ncclFloat32, device, member->comm, NULL));
    for (int i = 0; i < 5; i++)
        CHECK(output[i] == input[i] * 2 * whole, "element %d is %g", i, output[i]);
    MUST_FAIL(ncclAllReduce(input, output, 5, ncclInt32, device, member->comm, NULL)); /* bound to its dtype */
    MUST(ncclRedOpDestroy(device, member->comm));
    MUST_FAIL(ncclAllReduce(input, output, 5, ncclFloat32, device, member->comm, NULL));
    MUST_FAIL(ncclRedOpDestroy(device, member->comm));
    MUST_FAIL(ncclRedOpDestroy(ncclSum, member->comm));
    MUST(ncclRedOpDestroy(immediate, member->comm));
    MUST(ncclAllReduce(input, output, 5, ncclFloat32, other, member->comm, NULL));
    make_sane_call(member);
    /* `other` goes with its communicator */
}

void premultiplied_sums_of_both_residences(uint64_t seed)
{
    run_world(ranks_of(seed), seed, residences, NULL);
}

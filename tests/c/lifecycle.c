/* Communicators made from others, made without blocking, made many at a time. */
#include "stress.h"

#include <sched.h>
#include <stdlib.h>

#define MOST 4

static int ranks_of(uint64_t seed)
{
    return 2 + (int)(mix(seed, 4) % (MOST - 1));
}

static ncclConfig_t plain_config(void)
{
    enum { U = NCCL_CONFIG_UNDEF_INT };
    return (ncclConfig_t){sizeof(ncclConfig_t), NCCL_API_MAGIC, NCCL_VERSION_CODE, U, U, U, U, NULL, U, U, NULL, U, U, U, U, U, U, U, U,
                          U, U, U, U, U, U, U};
}

static void work_on(ncclComm_t comm, uint64_t seed, int calls)
{
    struct member member = {.comm = comm, .seed = seed};
    struct chance chance = {seed};
    MUST(ncclCommUserRank(comm, &member.rank));
    MUST(ncclCommCount(comm, &member.nranks));
    for (int i = 0; i < calls; i++)
        make_call(random_call(&chance, member.nranks), &member);
}

/* Ranks in reverse order, or apart, or some of them without a communicator; children of children. */
static void split(struct member *member)
{
    struct chance chance = {member->seed};
    int me = member->rank, rank, count;
    ncclComm_t all, part, grandchild;
    MUST(ncclCommSplit(member->comm, 7, -me, &all, NULL));
    MUST(ncclCommUserRank(all, &rank));
    CHECK(rank == member->nranks - 1 - me, "rank %d by key", rank);
    int color = me % 2 == 0 ? 3 : NCCL_SPLIT_NOCOLOR;
    MUST(ncclCommSplit(all, color, 0, &part, NULL));
    CHECK((part == NULL) == (me % 2 != 0), "no colour, no communicator");
    if (part != NULL) {
        MUST(ncclCommCount(part, &count));
        CHECK(count == (member->nranks + 1) / 2, "%d ranks of one colour", count);
        work_on(part, draw(&chance), 3);
        MUST(ncclCommSplit(part, 0, me, &grandchild, NULL));
        MUST(ncclCommDestroy(part));
        work_on(grandchild, draw(&chance), 3);
        MUST(ncclCommDestroy(grandchild));
    }
    work_on(member->comm, member->seed + 1, 2);
    MUST(ncclCommDestroy(member->comm));
    member->comm = NULL;
    work_on(all, member->seed + 2, 2);
    MUST(ncclCommFinalize(all));
    MUST(ncclCommDestroy(all));
}

void splits(uint64_t seed)
{
    run_world(ranks_of(seed), seed, split, NULL);
}

struct growth {
    ncclUniqueId id;
    pthread_t newcomer;
    int nranks;
    uint64_t seed;
};

static void *join_as_newcomer(void *argument)
{
    struct growth *growth = argument;
    ncclComm_t comm;
    MUST(ncclCommGrow(NULL, growth->nranks, &growth->id, growth->nranks - 1, &comm, NULL));
    work_on(comm, growth->seed, 4);
    MUST(ncclCommDestroy(comm));
    return NULL;
}

/* The last rank is left out; then a thread that was in no communicator joins those that remain. */
static void shrink_and_grow(struct member *member)
{
    struct growth *growth = member->shared;
    ncclComm_t smaller, larger;
    int excluded = member->nranks - 1;
    make_sane_call(member);
    if (member->rank == excluded)
        return;
    MUST(ncclCommShrink(member->comm, &excluded, 1, &smaller, NULL, NCCL_SHRINK_DEFAULT));
    work_on(smaller, member->seed + 1, 3);
    if (member->rank == 0) {
        growth->nranks = member->nranks;
        growth->seed = member->seed + 2;
        MUST(ncclCommGetUniqueId(smaller, &growth->id));
        pthread_create(&growth->newcomer, NULL, join_as_newcomer, growth);
        MUST(ncclCommGrow(smaller, growth->nranks, &growth->id, -1, &larger, NULL));
    } else {
        MUST(ncclCommGrow(smaller, member->nranks, NULL, -1, &larger, NULL));
    }
    MUST(ncclCommDestroy(smaller));
    work_on(larger, member->seed + 2, 4);
    MUST(ncclCommDestroy(larger));
}

void shrinks_and_grows(uint64_t seed)
{
    struct growth growth;
    run_world(ranks_of(seed), seed, shrink_and_grow, &growth);
    pthread_join(growth.newcomer, NULL);
}

static ncclResult_t await(ncclResult_t code, ncclComm_t comm)
{
    return code == ncclInProgress ? settle(comm) : code;
}

struct lone {
    ncclUniqueId id;
    int rank, nranks;
    uint64_t seed;
};

static void *without_blocking(void *argument)
{
    struct lone *lone = argument;
    struct chance chance = {lone->seed};
    ncclConfig_t config = plain_config();
    ncclComm_t comm = NULL;
    config.blocking = 0;
    ncclResult_t code = ncclCommInitRankConfig(&comm, lone->nranks, lone->id, lone->rank, &config);
    MUST(await(code, comm));
    struct member member = {lone->rank, lone->nranks, comm, lone->seed, NULL, NULL};
    for (int i = 0; i < 6; i++) {
        struct part *part = prepare(random_call(&chance, lone->nranks), &member);
        MUST(await(issue(part, NULL), comm));
        verify(part);
    }
    struct part *parts[3];
    for (int k = 0; k < 3; k++)
        parts[k] = prepare(random_call(&chance, lone->nranks), &member);
    MUST(ncclGroupStart());
    for (int k = 0; k < 3; k++) {
        code = issue(parts[k], NULL);
        CHECK(code == ncclSuccess || code == ncclInProgress, "code %d", (int)code);
    }
    MUST(await(ncclGroupEnd(), comm));
    for (int k = 0; k < 3; k++)
        verify(parts[k]);
    MUST(await(ncclCommFinalize(comm), comm));
    MUST(ncclCommDestroy(comm));
    return NULL;
}

static void run_lone(int nranks, uint64_t seed, void *(*function)(void *))
{
    struct lone lone[MOST];
    pthread_t threads[MOST];
    ncclUniqueId id;
    MUST(ncclGetUniqueId(&id));
    for (int rank = 0; rank < nranks; rank++) {
        lone[rank] = (struct lone){id, rank, nranks, seed};
        pthread_create(&threads[rank], NULL, function, &lone[rank]);
    }
    for (int rank = 0; rank < nranks; rank++)
        pthread_join(threads[rank], NULL);
}

void non_blocking_communicators(uint64_t seed)
{
    run_lone(ranks_of(seed), seed, without_blocking);
}

/* A non-blocking communicator whose peers never come is aborted while it is being made. */
static void *abort_the_unmade(void *argument)
{
    struct lone *lone = argument;
    ncclConfig_t config = plain_config();
    ncclComm_t comm = NULL;
    ncclResult_t state;
    config.blocking = 0;
    ncclResult_t code = ncclCommInitRankConfig(&comm, lone->nranks + 1, lone->id, lone->rank, &config);
    CHECK(code == ncclInProgress && comm != NULL, "code %d", (int)code);
    MUST(ncclCommGetAsyncError(comm, &state));
    CHECK(state == ncclInProgress, "state %d", (int)state);
    char x[1] = {0};
    MUST_FAIL(ncclAllReduce(x, x, 1, ncclInt8, ncclSum, comm, NULL));
    MUST(ncclCommAbort(comm));
    return NULL;
}

void non_blocking_inits_aborted(uint64_t seed)
{
    run_lone(1, seed, abort_the_unmade);
}

/* One thread makes all ranks of a communicator, and all of a split, each in one group; a failure inside makes none. */
void inits_in_a_group(uint64_t seed)
{
    int n = ranks_of(seed);
    ncclComm_t comms[MOST] = {NULL}, children[MOST] = {NULL};
    struct member members[MOST];
    ncclUniqueId id;
    MUST(ncclGetUniqueId(&id));
    MUST(ncclGroupStart());
    for (int rank = 0; rank < n; rank++)
        MUST(ncclCommInitRankScalable(&comms[rank], n, rank, 1, &id, NULL));
    MUST(ncclGroupEnd());
    MUST(ncclGroupStart());
    for (int rank = 0; rank < n; rank++)
        MUST(ncclCommSplit(comms[rank], 0, -rank, &children[rank], NULL));
    MUST(ncclGroupEnd());
    struct chance chance = {seed};
    struct call call = random_call(&chance, n);
    struct part *parts[MOST];
    for (int rank = 0; rank < n; rank++) {
        members[rank] = (struct member){n - 1 - rank, n, children[rank], seed, NULL, NULL};
        parts[rank] = prepare(call, &members[rank]);
    }
    MUST(ncclGroupStart());
    for (int rank = 0; rank < n; rank++)
        MUST(issue(parts[rank], NULL));
    MUST(ncclGroupEnd());
    for (int rank = 0; rank < n; rank++)
        verify(parts[rank]);

    ncclComm_t unmade[2] = {NULL, NULL};
    MUST(ncclGroupStart());
    MUST(ncclCommSplit(comms[0], 0, 0, &unmade[0], NULL));
    MUST_FAIL(ncclCommSplit(comms[1], -5, 0, &unmade[1], NULL));
    MUST_FAIL(ncclGroupEnd());
    CHECK(unmade[0] == NULL && unmade[1] == NULL, "%p %p", (void *)unmade[0], (void *)unmade[1]);
    for (int rank = 0; rank < n; rank++) {
        MUST(ncclCommDestroy(children[rank]));
        MUST(ncclCommDestroy(comms[rank]));
    }
}

static void nothing(struct member *member)
{
    (void)member;
}

static void one_call(struct member *member)
{
    make_sane_call(member);
}

/* Two-rank worlds come and go beside each other, some without a single call. */
void many_inits_at_once(uint64_t seed)
{
    struct world *worlds[4];
    for (int k = 0; k < 4; k++)
        worlds[k] = start_world(2, mix(seed, (uint64_t)k), k % 2 ? one_call : nothing, NULL);
    for (int k = 0; k < 4; k++)
        join_world(worlds[k]);
}

static void alone(struct member *member)
{
    struct chance chance = {member->seed};
    for (int i = 0; i < 30; i++)
        make_call(random_call(&chance, 1), member);
}

void worlds_of_one(uint64_t seed)
{
    run_world(1, seed, alone, NULL);
}

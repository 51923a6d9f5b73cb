/* Schedules, as pynccl/collectives/compiled.py hands them over: written here by hand, against the library's own call. */
#include "stress.h"

#include <stdlib.h>
#include <string.h>

#define MOST 4

enum buffer { IN, OUT, SCRATCH, APART };

struct written { /* room for one rank's part of any schedule here */
    pyncclScheduleStep_t steps[2 * MOST + 4];
    pyncclScheduleRound_t rounds[2 * MOST];
    pyncclScheduleSend_t sends[2 * MOST];
    pyncclScheduleSpan_t exposed[1];
    int to[MOST], from[MOST];
    pyncclSchedule_t schedule;
};

static void begin(struct written *w, const char *name, unsigned fingerprint, const struct member *member, int parts)
{
    memset(w, 0, sizeof *w);
    w->schedule = (pyncclSchedule_t){
        .size = sizeof w->schedule, .name = name, .fingerprint = fingerprint, .nranks = member->nranks, .rank = member->rank,
        .parts = parts, .in_blocks = 1, .out_blocks = 1, .in_root = -1, .out_root = -1, .sends_in = 1, .sends_out = 1,
        .most_receives = 1, .steps = w->steps, .rounds = w->rounds, .sends = w->sends, .exposed = w->exposed,
        .nexposed = 1, .to = w->to, .from = w->from};
}

/* The all-reduce around a ring: each chunk gathers one contribution a hop, and then goes around once more. */
static void write_ring(struct written *w, const struct member *member)
{
    const int n = member->nranks, r = member->rank, right = (r + 1) % n, left = (r + n - 1) % n;
    begin(w, "ring", 1, member, n);
    w->exposed[0] = (pyncclScheduleSpan_t){r, 1};
    for (int k = 0; k < 2 * (n - 1); k++) {
        const bool gathers = k >= n - 1;
        const int s = gathers ? k - (n - 1) : k, chunk = gathers ? (r - s + n) % n : (r - 1 - s + n) % n;
        w->sends[k] = (pyncclScheduleSend_t){right, ++w->to[right]};
        w->steps[k] = (pyncclScheduleStep_t){
            .reduces = !gathers, .peer = left, .peer_round = k, .number = ++w->from[left], .from_buffer = k == 0 ? IN : OUT,
            .from_chunk = chunk, .src_buffer = IN, .src_chunk = chunk, .dst_buffer = OUT, .dst_chunk = chunk, .chunks = 1,
            .fence = gathers ? s + 1 : 0};
        w->rounds[k] = (pyncclScheduleRound_t){k, k + 1, k + 1};
    }
    w->schedule.nsends = w->schedule.nrounds = w->schedule.most_rounds = 2 * (n - 1);
}

/* Two ranks swap what they have and reduce into it, in one round: the message is kept apart until its own has been taken. */
static void write_swap(struct written *w, const struct member *member)
{
    const int peer = 1 - member->rank;
    begin(w, "swap", 2, member, 1);
    w->exposed[0] = (pyncclScheduleSpan_t){0, 1};
    w->sends[0] = (pyncclScheduleSend_t){peer, 1};
    w->to[peer] = w->from[peer] = 1;
    w->steps[0] = (pyncclScheduleStep_t){.from_buffer = IN, .dst_buffer = SCRATCH, .chunks = 1}; /* scratch = in */
    w->steps[1] = (pyncclScheduleStep_t){.peer = peer, .peer_round = 1, .number = 1, .from_buffer = SCRATCH, .dst_buffer = APART, .chunks = 1};
    w->steps[2] = (pyncclScheduleStep_t){.reduces = 1, .left = member->rank, .from_buffer = APART, .src_buffer = SCRATCH,
                                         .dst_buffer = SCRATCH, .chunks = 1, .fence = 1};
    w->steps[3] = (pyncclScheduleStep_t){.from_buffer = SCRATCH, .dst_buffer = OUT, .chunks = 1};
    w->rounds[0] = (pyncclScheduleRound_t){0, 0, 1};
    w->rounds[1] = (pyncclScheduleRound_t){1, 2, 4};
    w->schedule.sends_in = w->schedule.sends_out = w->schedule.nexposed = 0;
    w->schedule.scratch_chunks = w->schedule.apart_chunks = w->schedule.most_apart = w->schedule.nsends = 1;
    w->schedule.nrounds = w->schedule.most_rounds = 2;
}

/* Integers, whose every order of reduction gives the same. */
static void compare(struct member *member, const pyncclSchedule_t *schedule, struct chance *chance)
{
    static const ncclDataType_t integers[] = {ncclInt8, ncclInt32, ncclUint64};
    static const size_t sizes[] = {1, 4, 8};
    const int which = below(chance, 3);
    const ncclDataType_t dtype = integers[which];
    const ncclRedOp_t op = (ncclRedOp_t)below(chance, 4);
    const size_t count = random_count(chance, dtype), bytes = count * sizes[which];
    const uint64_t seed = draw(chance);
    const bool in_place = below(chance, 2);
    const int memory = below(chance, 3);
    const bool mapped = memory == MAPPED || (memory == MIXED && member->rank % 2);
    struct block in = make_block(count, dtype, mapped), out = make_block(count, dtype, mapped), wanted = make_block(count, dtype, false);
    fill_block(in, mix(seed, (uint64_t)member->rank));
    MUST(ncclAllReduce(in.at, wanted.at, count, dtype, op, member->comm, NULL));
    MUST(pyncclRunSchedule(schedule, in.at, in_place ? in.at : out.at, count, dtype, op, member->comm, NULL));
    CHECK(memcmp(in_place ? in.at : out.at, wanted.at, bytes) == 0, "%s: %zu of dtype %d, op %d%s, memory %d: rank %d of %d", schedule->name,
          count, (int)dtype, (int)op, in_place ? ", in place" : "", memory, member->rank, member->nranks);
    if (!in_place) check_block(in, mix(seed, (uint64_t)member->rank), "what a schedule read");
    release(in);
    release(out);
    release(wanted);
}

static void run_schedules(struct member *member)
{
    struct chance chance = {member->seed};
    struct written ring, swap;
    write_ring(&ring, member);
    if (member->nranks == 2) write_swap(&swap, member);
    for (int i = 0; i < 20; i++) {
        const bool swaps = member->nranks == 2 && below(&chance, 2);
        compare(member, swaps ? &swap.schedule : &ring.schedule, &chance);
    }
    if (member->nranks == 2) { /* a disagreement is an error of both, and the communicator goes on */
        int x[3] = {1, 2, 3};
        MUST_FAIL(pyncclRunSchedule(member->rank ? &swap.schedule : &ring.schedule, x, x, 3, ncclInt32, ncclSum, member->comm, NULL));
    }
    make_sane_call(member);
}

void schedules_against_collectives(uint64_t seed)
{
    run_world(2 + (int)(mix(seed, 5) % (MOST - 1)), seed, run_schedules, NULL);
}

/* A rank that never comes: the others say so in time, and nothing of theirs is touched afterwards. */
static void wait_in_vain(struct member *member)
{
    struct written ring;
    int x[100] = {0};
    write_ring(&ring, member);
    MUST(pyncclSetTimeout(member->comm, 0.3));
    if (member->rank != 0) {
        const ncclResult_t code = MUST_FAIL(pyncclRunSchedule(&ring.schedule, x, x, 100, ncclInt32, ncclSum, member->comm, NULL));
        CHECK(code == ncclTimeout || code == ncclRemoteError, "%d", (int)code);
    }
    meet(member);
    MUST(ncclCommAbort(member->comm));
    member->comm = NULL;
}

void schedules_without_a_rank(uint64_t seed)
{
    run_world(2 + (int)(mix(seed, 6) % (MOST - 1)), seed, wait_in_vain, NULL);
}

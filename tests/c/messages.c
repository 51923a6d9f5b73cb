/* Sends and receives, and the one-sided calls. */
#include "stress.h"

#include <stdlib.h>
#include <string.h>

#define MOST 4
#define MESSAGES 5

static int ranks_of(uint64_t seed)
{
    return 2 + (int)(mix(seed, 2) % (MOST - 1));
}

struct message {
    ncclDataType_t dtype;
    size_t count;
    bool send_mapped, recv_mapped;
    uint64_t seed;
};

/* The k-th message from one rank to another: both ends know it. */
static struct message message_between(uint64_t seed, int from, int to, int k)
{
    struct chance chance = {mix(seed, (uint64_t)((from * MOST + to) * 100 + k))};
    struct message message = {.dtype = (ncclDataType_t)below(&chance, ncclNumTypes)};
    message.count = random_count(&chance, message.dtype);
    message.send_mapped = below(&chance, 2);
    message.recv_mapped = below(&chance, 2);
    message.seed = draw(&chance);
    return message;
}

static struct block outgoing(struct message m)
{
    struct block block = make_block(m.count, m.dtype, m.send_mapped);
    fill_block(block, m.seed);
    return block;
}

static struct block incoming(struct message m)
{
    return make_block(m.count, m.dtype, m.recv_mapped);
}

static void ring(struct member *member)
{
    int next = (member->rank + 1) % member->nranks, previous = (member->rank + member->nranks - 1) % member->nranks;
    for (int k = 0; k < 12; k++) {
        struct message out = message_between(member->seed, member->rank, next, k);
        struct message in = message_between(member->seed, previous, member->rank, k);
        struct block send = outgoing(out), recv = incoming(in);
        MUST(ncclGroupStart());
        MUST(ncclSend(send.at, send.count, send.dtype, next, member->comm, NULL));
        MUST(ncclRecv(recv.at, recv.count, recv.dtype, previous, member->comm, NULL));
        MUST(ncclGroupEnd());
        check_block(recv, in.seed, "what the ring brought");
        check_block(send, out.seed, "what was sent");
        release(send);
        release(recv);
    }
}

void rings_in_groups(uint64_t seed)
{
    run_world(ranks_of(seed), seed, ring, NULL);
}

/* Several messages from everybody to everybody, to itself too, issued in any order of peers, with an all_reduce between. */
static void all_pairs(struct member *member)
{
    struct chance own = {mix(member->seed, (uint64_t)member->rank)}, shared = {member->seed};
    for (int round = 0; round < 3; round++) {
        struct block sends[MOST][MESSAGES], recvs[MOST][MESSAGES];
        int messages = 1 + below(&shared, MESSAGES), sent[MOST] = {0}, received[MOST] = {0};
        uint64_t seed = draw(&shared);
        bool reduces = below(&shared, 2);
        struct call call = random_call(&shared, member->nranks);
        struct part *part = reduces ? prepare(call, member) : NULL;
        for (int peer = 0; peer < member->nranks; peer++)
            for (int k = 0; k < messages; k++) {
                sends[peer][k] = outgoing(message_between(seed, member->rank, peer, k));
                recvs[peer][k] = incoming(message_between(seed, peer, member->rank, k));
            }
        MUST(ncclGroupStart());
        for (int left = 2 * messages * member->nranks; left > 0;) { /* order matters within a pair and direction only */
            int peer = below(&own, member->nranks);
            if (below(&own, 2) && sent[peer] < messages) {
                struct block block = sends[peer][sent[peer]++];
                MUST(ncclSend(block.at, block.count, block.dtype, peer, member->comm, NULL));
                left--;
            } else if (received[peer] < messages) {
                struct block block = recvs[peer][received[peer]++];
                MUST(ncclRecv(block.at, block.count, block.dtype, peer, member->comm, NULL));
                left--;
            }
        }
        if (reduces)
            MUST(issue(part, NULL));
        MUST(ncclGroupEnd());
        if (reduces)
            verify(part);
        for (int peer = 0; peer < member->nranks; peer++)
            for (int k = 0; k < messages; k++) {
                check_block(recvs[peer][k], message_between(seed, peer, member->rank, k).seed, "a message");
                release(sends[peer][k]);
                release(recvs[peer][k]);
            }
    }
}

void messages_of_all_pairs(uint64_t seed)
{
    run_world(ranks_of(seed), seed, all_pairs, NULL);
}

/* Down the line of ranks and back, no group anywhere. */
static void line(struct member *member)
{
    int last = member->nranks - 1, me = member->rank;
    for (int k = 0; k < 10; k++) {
        struct message m = message_between(member->seed, 0, 0, k);
        struct block block = make_block(m.count, m.dtype, m.recv_mapped);
        if (me == 0)
            fill_block(block, m.seed);
        if (me > 0)
            MUST(ncclRecv(block.at, block.count, block.dtype, me - 1, member->comm, NULL));
        if (me < last)
            MUST(ncclSend(block.at, block.count, block.dtype, me + 1, member->comm, NULL));
        check_block(block, m.seed, "on its way out");
        memset(block.at, 0, me < last ? block.count : 0); /* some of it is overwritten */
        if (me < last)
            MUST(ncclRecv(block.at, block.count, block.dtype, me + 1, member->comm, NULL));
        if (me > 0)
            MUST(ncclSend(block.at, block.count, block.dtype, me - 1, member->comm, NULL));
        check_block(block, m.seed, "on its way back");
        release(block);
    }
}

void messages_outside_of_groups(uint64_t seed)
{
    run_world(ranks_of(seed), seed, line, NULL);
}

/*
 * A window holds a slot of SLOT bytes for each origin. In each round every rank puts into its slot of every peer's window
 * with a signal, waits for the signals of all, checks, and lets the origins go on with a bare signal of another index.
 */
#define SLOT 20000

static void signal_everybody(struct member *member, int index)
{
    for (int peer = 0; peer < member->nranks; peer++)
        if (peer != member->rank)
            MUST(ncclSignal(peer, index, 0, 0, member->comm, NULL));
}

static void wait_for_everybody(struct member *member, int index)
{
    ncclWaitSignalDesc_t waits[MOST];
    int n = 0;
    for (int peer = 0; peer < member->nranks; peer++)
        if (peer != member->rank)
            waits[n++] = (ncclWaitSignalDesc_t){.opCnt = 1, .peer = peer, .sigIdx = index, .ctx = 0};
    MUST(ncclWaitSignal(n, waits, member->comm, NULL));
}

static void put_in_rounds(struct member *member)
{
    struct chance chance = {member->seed};
    size_t bytes = (size_t)member->nranks * SLOT;
    void *memory, *same;
    ncclWindow_t window;
    MUST(ncclMemAlloc(&memory, bytes));
    MUST(ncclCommWindowRegister(member->comm, memory, bytes, &window, 0));
    MUST(ncclWinGetUserPtr(member->comm, window, &same));
    CHECK(same == memory, "%p is not %p", same, memory);
    for (int round = 0; round < 12; round++) {
        size_t offset = (size_t)below(&chance, 64), count = (size_t)below(&chance, SLOT - 64);
        uint64_t seed = draw(&chance);
        bool mapped = below(&chance, 2);
        struct block mine = make_block(count, ncclUint8, mapped);
        fill_block(mine, mix(seed, (uint64_t)member->rank));
        for (int peer = 0; peer < member->nranks; peer++)
            if (peer != member->rank)
                MUST(ncclPutSignal(mine.at, count, ncclUint8, peer, window, (size_t)member->rank * SLOT + offset, 0, 0, 0,
                                   member->comm, NULL));
        wait_for_everybody(member, 0);
        for (int peer = 0; peer < member->nranks; peer++)
            if (peer != member->rank) {
                struct block theirs = {.at = (char *)memory + (size_t)peer * SLOT + offset, .count = count, .dtype = ncclUint8};
                check_block(theirs, mix(seed, (uint64_t)peer), "what was put");
            }
        release(mine);
        signal_everybody(member, 1);
        wait_for_everybody(member, 1);
    }
    MUST_FAIL(ncclPutSignal(memory, 2, ncclUint8, 1 - !!member->rank, window, bytes - 1, 0, 0, 0, member->comm, NULL));
    make_sane_call(member);
    MUST(ncclCommWindowDeregister(member->comm, window));
    MUST(ncclMemFree(memory));
}

void puts_and_signals(uint64_t seed)
{
    run_world(ranks_of(seed), seed, put_in_rounds, NULL);
}

/*
 * Collectives whose result is known: values are small integers, exact in every dtype and under every operation, that
 * repeat with a prime period. So a result is an expected period of bytes, and a piece that lands anywhere else shows.
 */
#include "stress.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PERIOD 251
#define UNTOUCHED 0xa5

static const size_t SIZES[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

/* ---- values ---- */

static bool is_unsigned(ncclDataType_t dtype)
{
    return dtype == ncclUint8 || dtype == ncclUint32 || dtype == ncclUint64;
}

/* The bits of a small integer as an IEEE-like float. */
static uint64_t float_bits(int value, int exponent_bits, int mantissa_bits)
{
    uint64_t sign = value < 0, magnitude = (uint64_t)(value < 0 ? -value : value);
    int exponent = 0;
    if (value == 0)
        return 0;
    while (magnitude >> (exponent + 1))
        exponent++;
    uint64_t mantissa = magnitude ^ ((uint64_t)1 << exponent);
    mantissa = exponent <= mantissa_bits ? mantissa << (mantissa_bits - exponent) : mantissa >> (exponent - mantissa_bits);
    uint64_t bias = ((uint64_t)1 << (exponent_bits - 1)) - 1;
    return sign << (exponent_bits + mantissa_bits) | ((uint64_t)exponent + bias) << mantissa_bits | mantissa;
}

static void encode(ncclDataType_t dtype, int value, void *to)
{
    static const struct {
        int exponent, mantissa; /* bits; 0 for an integer */
    } formats[ncclNumTypes] = {
        [ncclFloat16] = {5, 10}, [ncclFloat32] = {8, 23},   [ncclFloat64] = {11, 52},
        [ncclBfloat16] = {8, 7}, [ncclFloat8e4m3] = {4, 3}, [ncclFloat8e5m2] = {5, 2},
    };
    int exponent = formats[dtype].exponent;
    uint64_t bits = exponent ? float_bits(value, exponent, formats[dtype].mantissa) : (uint64_t)(int64_t)value;
    memcpy(to, &bits, SIZES[dtype]); /* the low bytes: little-endian, as all the library's machines are */
}

/* What a rank contributes at a position of the period. Sums stay within 8, products are powers of two, averages are
   whole: float8e5m2 holds them all. */
static int value_at(struct call call, int nranks, int rank, int position)
{
    static const int factors[] = {1, 2, -1, -2};
    int h = (int)(mix(call.seed, (uint64_t)rank * 1000 + (uint64_t)position) % 1000003);
    bool positive = is_unsigned(call.dtype);
    switch (call.op) {
    case ncclSum: return positive ? h % 3 : h % 5 - 2;
    case ncclProd: return factors[h % (positive ? 2 : 4)];
    case ncclAvg: return nranks * (positive ? h % 2 : h % 3 - 1);
    case PREMULSUM: return positive ? h % 2 : h % 3 - 1;
    default: return positive ? h % 9 : h % 17 - 8;
    }
}

static int multiplier_of(int rank)
{
    return 1 + rank % 2;
}

static int reduced_at(struct call call, int nranks, int position)
{
    int total = 0;
    for (int rank = 0; rank < nranks; rank++) {
        int value = value_at(call, nranks, rank, position);
        switch (rank == 0 ? ncclSum : call.op) {
        case ncclProd: total *= value; break;
        case ncclMax: total = value > total ? value : total; break;
        case ncclMin: total = value < total ? value : total; break;
        default: total += call.op == PREMULSUM ? value * multiplier_of(rank) : value;
        }
    }
    return call.op == ncclAvg ? total / nranks : total;
}

struct period {
    unsigned char bytes[PERIOD * 8];
};

static struct period contribution(struct call call, int nranks, int rank)
{
    struct period period;
    for (int i = 0; i < PERIOD; i++)
        encode(call.dtype, value_at(call, nranks, rank, i), period.bytes + (size_t)i * SIZES[call.dtype]);
    return period;
}

static struct period reduction(struct call call, int nranks)
{
    struct period period;
    for (int i = 0; i < PERIOD; i++)
        encode(call.dtype, reduced_at(call, nranks, i), period.bytes + (size_t)i * SIZES[call.dtype]);
    return period;
}

/* count elements of the period, beginning at element `first` of the endless repetition. */
static void lay(char *to, const struct period *period, size_t first, size_t count, size_t size)
{
    for (size_t done = 0; done < count;) {
        size_t phase = (first + done) % PERIOD, n = PERIOD - phase < count - done ? PERIOD - phase : count - done;
        memcpy(to + done * size, period->bytes + phase * size, n * size);
        done += n;
    }
}

static void expect(const char *at, const struct period *period, size_t first, size_t count, size_t size, const char *what)
{
    for (size_t done = 0; done < count;) {
        size_t phase = (first + done) % PERIOD, n = PERIOD - phase < count - done ? PERIOD - phase : count - done;
        CHECK(memcmp(at + done * size, period->bytes + phase * size, n * size) == 0,
              "%s is wrong within elements %zu to %zu of %zu", what, done, done + n, count);
        done += n;
    }
}

/* ---- blocks of memory ---- */

struct block make_block(size_t count, ncclDataType_t dtype, bool mapped)
{
    static _Atomic unsigned made;
    size_t size = SIZES[dtype], shift = made++ % 4 * size; /* aligned to the element only */
    struct block block = {NULL, count, dtype, mapped, NULL};
    if (mapped)
        MUST(ncclMemAlloc(&block.allocation, count * size + shift + 1));
    else
        block.allocation = malloc(count * size + shift + (count == 0));
    CHECK(block.allocation != NULL, "no memory for %zu elements", count);
    block.at = (char *)block.allocation + shift; /* ends where the allocation does, so that a byte too many is seen */
    return block;
}

void release(struct block block)
{
    if (block.mapped)
        MUST(ncclMemFree(block.allocation));
    else
        free(block.allocation);
}

void fill_block(struct block block, uint64_t seed)
{
    struct call call = {.dtype = block.dtype, .op = ncclMax, .seed = seed};
    struct period period = contribution(call, 1, 0);
    lay(block.at, &period, 0, block.count, SIZES[block.dtype]);
}

void check_block(struct block block, uint64_t seed, const char *what)
{
    struct call call = {.dtype = block.dtype, .op = ncclMax, .seed = seed};
    struct period period = contribution(call, 1, 0);
    expect(block.at, &period, 0, block.count, SIZES[block.dtype], what);
}

/* ---- calls ---- */

static const struct {
    bool reduces, sends_blocks, receives_blocks, from_root, to_root;
} KINDS[CALL_KINDS] = {
    [ALL_REDUCE] = {.reduces = true},
    [REDUCE] = {.reduces = true, .to_root = true},
    [BROADCAST] = {.from_root = true},
    [BCAST] = {.from_root = true},
    [ALL_GATHER] = {.receives_blocks = true},
    [REDUCE_SCATTER] = {.reduces = true, .sends_blocks = true},
    [ALL_TO_ALL] = {.sends_blocks = true, .receives_blocks = true},
    [GATHER] = {.receives_blocks = true, .to_root = true},
    [SCATTER] = {.sends_blocks = true, .from_root = true},
};

/* Around everything that decides a path: nothing, one, odd, what travels at once, what fills a chunk, several chunks. */
size_t random_count(struct chance *chance, ncclDataType_t dtype)
{
    static const struct {
        int weight;
        size_t bytes;
        int spread;
    } sizes[] = {{10, 0, 1}, {10, 1, 3}, {25, 16, 80}, {25, 1000, 5000}, {12, 16380, 9}, {8, 70000, 99}, {7, 1 << 20, 33}, {3, 3 << 20, 70001}};
    int chosen = 0, at = below(chance, 100);
    while (at >= sizes[chosen].weight)
        at -= sizes[chosen++].weight;
    return (sizes[chosen].bytes + (size_t)below(chance, sizes[chosen].spread) * SIZES[dtype]) / SIZES[dtype];
}

struct call random_call(struct chance *chance, int nranks)
{
    struct call call = {.kind = (enum call_kind)below(chance, CALL_KINDS), .dtype = (ncclDataType_t)below(chance, ncclNumTypes)};
    call.op = below(chance, PREMULSUM + 1);
    call.root = below(chance, nranks);
    call.count = random_count(chance, call.dtype);
    if (KINDS[call.kind].sends_blocks || KINDS[call.kind].receives_blocks)
        call.count = call.count > 1 ? (call.count + 1) / (size_t)nranks : call.count;
    call.in_place = below(chance, 2) && call.kind != ALL_TO_ALL;
    call.memory = (enum memory)below(chance, 3);
    call.config = below(chance, 4) == 0 && call.kind != BCAST;
    call.seed = draw(chance);
    if (!KINDS[call.kind].reduces)
        call.op = ncclMax; /* the widest values */
    return call;
}

struct part {
    struct call call;
    int rank, nranks;
    ncclComm_t comm;
    size_t sent, received; /* elements */
    struct block send_block, recv_block;
    char *send, *recv; /* NULL where the rank has no such buffer */
    ncclRedOp_t op;
};

static ncclRedOp_t make_op(struct call call, ncclComm_t comm, int rank)
{
    ncclRedOp_t op = (ncclRedOp_t)call.op;
    uint64_t scalar = 0;
    encode(call.dtype, multiplier_of(rank), &scalar);
    if (call.op == PREMULSUM)
        MUST(ncclRedOpCreatePreMulSum(&op, &scalar, call.dtype, ncclScalarHostImmediate, comm));
    return op;
}

struct part *prepare(struct call call, struct member *member)
{
    struct part *part = calloc(1, sizeof *part);
    size_t n = (size_t)member->nranks, me = (size_t)member->rank, size = SIZES[call.dtype];
    bool is_root = member->rank == call.root;
    bool sends = is_root || !KINDS[call.kind].from_root, receives = is_root || !KINDS[call.kind].to_root;
    bool mapped = call.memory == MAPPED || (call.memory == MIXED && mix(call.seed, me) % 2);
    *part = (struct part){.call = call, .rank = member->rank, .nranks = member->nranks, .comm = member->comm};
    part->sent = !sends ? 0 : KINDS[call.kind].sends_blocks ? n * call.count : call.count;
    part->received = !receives ? 0 : KINDS[call.kind].receives_blocks ? n * call.count : call.count;

    /* In place is one buffer for both on every rank, or, where one side has blocks, its rank's block of the other. */
    bool one_buffer = call.kind == BCAST || (call.in_place && (call.kind == REDUCE || call.kind == BROADCAST));
    if (one_buffer || (call.in_place && sends && receives)) {
        size_t whole = part->sent > part->received ? part->sent : part->received;
        part->send_block = make_block(one_buffer ? call.count : whole, call.dtype, mapped);
        part->send = part->recv = part->send_block.at;
        if (KINDS[call.kind].receives_blocks)
            part->send += me * call.count * size;
        if (KINDS[call.kind].sends_blocks)
            part->recv += me * call.count * size;
    } else {
        if (sends) {
            part->send_block = make_block(part->sent, call.dtype, mapped);
            part->send = part->send_block.at;
        }
        if (receives) {
            part->recv_block = make_block(part->received, call.dtype, mapped);
            part->recv = part->recv_block.at;
        }
    }
    if (part->recv != NULL)
        memset(part->recv, UNTOUCHED, (one_buffer ? call.count : part->received) * size);
    if (sends) {
        struct period mine = contribution(call, member->nranks, member->rank);
        lay(part->send, &mine, 0, part->sent, size);
    }
    if (KINDS[call.kind].reduces)
        part->op = make_op(call, part->comm, part->rank);
    return part;
}

ncclResult_t issue(struct part *part, void *stream)
{
    struct call c = part->call;
    const void *send = part->send;
    void *recv = part->recv;
    ncclComm_t comm = part->comm;
    ncclCollConfig_t config = {.size = sizeof config, .magic = NCCL_API_MAGIC, .version = NCCL_VERSION_CODE,
                               .minCTAs = NCCL_CONFIG_UNDEF_INT, .maxCTAs = NCCL_CONFIG_UNDEF_INT,
                               .nvlsCTAs = NCCL_CONFIG_UNDEF_INT, .cgaClusterSize = NCCL_CONFIG_UNDEF_INT,
                               .forceAlgSelection = NCCL_CONFIG_UNDEF_INT, .CTAPolicy = NCCL_CONFIG_UNDEF_INT};
    if (c.config) {
        switch (c.kind) {
        case ALL_REDUCE: return ncclAllReduceConfig(send, recv, c.count, c.dtype, part->op, comm, stream, &config);
        case REDUCE: return ncclReduceConfig(send, recv, c.count, c.dtype, part->op, c.root, comm, stream, &config);
        case BROADCAST: return ncclBroadcastConfig(send, recv, c.count, c.dtype, c.root, comm, stream, &config);
        case ALL_GATHER: return ncclAllGatherConfig(send, recv, c.count, c.dtype, comm, stream, &config);
        case REDUCE_SCATTER: return ncclReduceScatterConfig(send, recv, c.count, c.dtype, part->op, comm, stream, &config);
        case ALL_TO_ALL: return ncclAlltoAllConfig(send, recv, c.count, c.dtype, comm, stream, &config);
        case GATHER: return ncclGatherConfig(send, recv, c.count, c.dtype, c.root, comm, stream, &config);
        case SCATTER: return ncclScatterConfig(send, recv, c.count, c.dtype, c.root, comm, stream, &config);
        default: break;
        }
    }
    switch (c.kind) {
    case ALL_REDUCE: return ncclAllReduce(send, recv, c.count, c.dtype, part->op, comm, stream);
    case REDUCE: return ncclReduce(send, recv, c.count, c.dtype, part->op, c.root, comm, stream);
    case BROADCAST: return ncclBroadcast(send, recv, c.count, c.dtype, c.root, comm, stream);
    case BCAST: return ncclBcast(recv, c.count, c.dtype, c.root, comm, stream);
    case ALL_GATHER: return ncclAllGather(send, recv, c.count, c.dtype, comm, stream);
    case REDUCE_SCATTER: return ncclReduceScatter(send, recv, c.count, c.dtype, part->op, comm, stream);
    case ALL_TO_ALL: return ncclAlltoAll(send, recv, c.count, c.dtype, comm, stream);
    case GATHER: return ncclGather(send, recv, c.count, c.dtype, c.root, comm, stream);
    case SCATTER: return ncclScatter(send, recv, c.count, c.dtype, c.root, comm, stream);
    default: break;
    }
    fail_at(__FILE__, __LINE__, "issue", "kind %d", (int)c.kind);
}

void verify(struct part *part)
{
    static const char *const names[CALL_KINDS] = {"all_reduce",     "reduce",     "broadcast", "bcast",  "all_gather",
                                                  "reduce_scatter", "all_to_all", "gather",    "scatter"};
    struct call call = part->call;
    size_t size = SIZES[call.dtype], mine = (size_t)part->rank * call.count;
    bool apart = part->recv_block.at != NULL || part->recv == NULL;
    char what[160];
    snprintf(what, sizeof what, "%s (count %zu, dtype %d, op %d, root %d, %s, memory %d%s)", names[call.kind], call.count,
             (int)call.dtype, call.op, call.root, call.in_place ? "in place" : "out of place", (int)call.memory,
             call.config ? ", config" : "");
    if (part->received > 0 && KINDS[call.kind].reduces) {
        struct period total = reduction(call, part->nranks);
        expect(part->recv, &total, call.kind == REDUCE_SCATTER ? mine : 0, call.count, size, what);
    } else if (part->received > 0) {
        int blocks = KINDS[call.kind].receives_blocks ? part->nranks : 1;
        for (int k = 0; k < blocks; k++) {
            int from = KINDS[call.kind].from_root ? call.root : k;
            struct period theirs = contribution(call, part->nranks, from);
            size_t first = KINDS[call.kind].sends_blocks ? mine : 0;
            expect(part->recv + (size_t)k * call.count * size, &theirs, first, call.count, size, what);
        }
    }
    if (part->sent > 0 && (apart || part->received == 0)) { /* what was only sent is as it was */
        struct period own = contribution(call, part->nranks, part->rank);
        expect(part->send, &own, 0, part->sent, size, what);
    }
    if (call.op == PREMULSUM && KINDS[call.kind].reduces)
        MUST(ncclRedOpDestroy(part->op, part->comm));
    if (part->send_block.allocation != NULL)
        release(part->send_block);
    if (part->recv_block.allocation != NULL)
        release(part->recv_block);
    free(part);
}

void make_call(struct call call, struct member *member)
{
    struct part *part = prepare(call, member);
    MUST(issue(part, NULL));
    verify(part);
}

void make_sane_call(struct member *member)
{
    struct call call = {.kind = ALL_REDUCE, .dtype = ncclFloat32, .op = ncclSum, .count = 1000, .seed = member->seed};
    make_call(call, member);
}

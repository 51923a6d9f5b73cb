/* Ranks that are threads; and how a stress ends when something is wrong. */
#include "stress.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

struct world {
    int nranks;
    uint64_t seed;
    member_function *function;
    void *shared;
    ncclUniqueId id;
    pthread_barrier_t meeting;
    pthread_t *threads;
    struct member *members;
};

static _Thread_local const struct member *self;

_Noreturn void fail_at(const char *file, int line, const char *what, const char *format, ...)
{
    char text[600];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (self != NULL)
        fprintf(stderr, "%s:%d: rank %d of %d, seed %llu: ", file, line, self->rank, self->nranks,
                (unsigned long long)self->seed);
    else
        fprintf(stderr, "%s:%d: ", file, line);
    fprintf(stderr, "%s: %s\n  last error: %s\n", what, text, ncclGetLastError(NULL));
    fflush(NULL);
    _exit(1); /* other threads are in the middle of things */
}

void must_at(const char *file, int line, const char *call, ncclResult_t code)
{
    if (code != ncclSuccess)
        fail_at(file, line, call, "code %d, %s", (int)code, ncclGetErrorString(code));
}

ncclResult_t must_fail_at(const char *file, int line, const char *call, ncclResult_t code)
{
    if (code == ncclSuccess || code == ncclInProgress)
        fail_at(file, line, call, "code %d, but it must fail", (int)code);
    if (ncclGetLastError(NULL)[0] == 0)
        fail_at(file, line, call, "code %d without a word", (int)code);
    return code;
}

/* splitmix64 */
uint64_t draw(struct chance *chance)
{
    uint64_t z = chance->state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

uint64_t mix(uint64_t a, uint64_t b)
{
    struct chance chance = {a};
    chance.state ^= draw(&chance) + b;
    return draw(&chance);
}

int below(struct chance *chance, int limit)
{
    return (int)(draw(chance) % (uint64_t)limit);
}

static void *live(void *argument)
{
    struct member *member = argument;
    self = member;
    MUST(ncclCommInitRank(&member->comm, member->nranks, member->world->id, member->rank));
    member->world->function(member);
    if (member->comm != NULL)
        MUST(ncclCommDestroy(member->comm));
    return NULL;
}

struct world *start_world(int nranks, uint64_t seed, member_function *function, void *shared)
{
    struct world *world = calloc(1, sizeof *world);
    world->nranks = nranks;
    world->seed = seed;
    world->function = function;
    world->shared = shared;
    world->threads = calloc((size_t)nranks, sizeof *world->threads);
    world->members = calloc((size_t)nranks, sizeof *world->members);
    pthread_barrier_init(&world->meeting, NULL, (unsigned)nranks);
    MUST(ncclGetUniqueId(&world->id));
    for (int rank = 0; rank < nranks; rank++) {
        world->members[rank] = (struct member){rank, nranks, NULL, seed, shared, world};
        int code = pthread_create(&world->threads[rank], NULL, live, &world->members[rank]);
        CHECK(code == 0, "pthread_create: %d", code);
    }
    return world;
}

void join_world(struct world *world)
{
    for (int rank = 0; rank < world->nranks; rank++)
        pthread_join(world->threads[rank], NULL);
    pthread_barrier_destroy(&world->meeting);
    free(world->threads);
    free(world->members);
    free(world);
}

void run_world(int nranks, uint64_t seed, member_function *function, void *shared)
{
    join_world(start_world(nranks, seed, function, shared));
}

void meet(struct member *member)
{
    pthread_barrier_wait(&member->world->meeting);
}

ncclResult_t settle(ncclComm_t comm)
{
    ncclResult_t state = ncclInProgress;
    for (;;) {
        MUST(ncclCommGetAsyncError(comm, &state));
        if (state != ncclInProgress)
            return state;
        sched_yield();
    }
}

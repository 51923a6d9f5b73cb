/*
 * A stress of the host library through its public ABI alone: threads are the ranks, inputs are exact, every result is
 * checked to the last bit. stress.c has the list of scenarios; a scenario is a function of a seed.
 */
#ifndef STRESS_H
#define STRESS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nccl_abi.h"

/* ---- saying what went wrong (world.c). These end the process: nothing in here returns from the caller. ---- */

#define CHECK(condition, ...) ((condition) ? (void)0 : fail_at(__FILE__, __LINE__, #condition, __VA_ARGS__))
#define MUST(call) must_at(__FILE__, __LINE__, #call, (call))          /* ncclSuccess */
#define MUST_FAIL(call) must_fail_at(__FILE__, __LINE__, #call, (call)) /* an error with words; gives its code */

_Noreturn void fail_at(const char *file, int line, const char *what, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
void must_at(const char *file, int line, const char *call, ncclResult_t code);
ncclResult_t must_fail_at(const char *file, int line, const char *call, ncclResult_t code);

/* ---- chance (world.c): equal seeds give equal choices ---- */

struct chance {
    uint64_t state;
};

uint64_t mix(uint64_t a, uint64_t b);
uint64_t draw(struct chance *chance);
int below(struct chance *chance, int limit);

/* ---- ranks that are threads (world.c) ---- */

struct member {
    int rank, nranks;
    ncclComm_t comm; /* destroyed after the scenario's function, unless that has set it to NULL */
    uint64_t seed;   /* the same for all ranks */
    void *shared;
    struct world *world;
};

typedef void member_function(struct member *member);

/* Runs function on nranks threads, each with its rank of one new communicator. */
void run_world(int nranks, uint64_t seed, member_function *function, void *shared);

/* The same with a world that goes on beside others, until it is joined. */
struct world *start_world(int nranks, uint64_t seed, member_function *function, void *shared);
void join_world(struct world *world);

/* All members meet here, by no means of the library: what a test orders, not what it tests. */
void meet(struct member *member);

/* Polls a non-blocking communicator until it is no longer ncclInProgress; gives the state. */
ncclResult_t settle(ncclComm_t comm);

/* ---- collectives whose result is known (calls.c) ---- */

enum call_kind { ALL_REDUCE, REDUCE, BROADCAST, BCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, CALL_KINDS };
enum memory { PLAIN, MAPPED, MIXED };

struct call {
    enum call_kind kind;
    ncclDataType_t dtype;
    int op; /* ncclRedOp_t, or PREMULSUM */
    int root;
    size_t count;
    bool in_place;
    enum memory memory; /* MIXED: ordinary on some ranks, from ncclMemAlloc on others */
    bool config;        /* through the ...Config form */
    uint64_t seed;      /* of the values */
};

#define PREMULSUM 5

struct call random_call(struct chance *chance, int nranks);

/* One rank's part of a call: prepare it, issue it, and when it is complete settle the account. */
struct part;
struct part *prepare(struct call call, struct member *member);
ncclResult_t issue(struct part *part, void *stream);
void verify(struct part *part); /* checks every byte, and frees */

void make_call(struct call call, struct member *member); /* all three at once, blocking */
void make_sane_call(struct member *member);              /* a small all_reduce: the communicator still works */

/* ---- memory for messages (calls.c) ---- */

/* count elements of dtype of pattern `seed`, at an address aligned to the element only; free with release(). */
struct block {
    void *at;
    size_t count;
    ncclDataType_t dtype;
    bool mapped;
    void *allocation;
};

struct block make_block(size_t count, ncclDataType_t dtype, bool mapped);
void fill_block(struct block block, uint64_t seed);
void check_block(struct block block, uint64_t seed, const char *what);
void release(struct block block);

size_t random_count(struct chance *chance, ncclDataType_t dtype);

/* ---- scenarios ---- */

typedef void scenario(uint64_t seed);

/* collectives.c */
scenario collectives_one_after_another, collectives_in_groups, communicators_side_by_side, one_thread_drives_all_ranks;
scenario collectives_without_a_pause, premultiplied_sums_of_both_residences, more_ranks_than_cores;
/* ahead.c */
scenario small_rooted_calls_among_others, how_far_ranks_run_ahead, leaving_after_running_ahead, running_ahead_on_streams;
scenario ranks_that_ran_ahead_and_disagree, waiting_for_room_in_vain;
/* messages.c */
scenario rings_in_groups, messages_of_all_pairs, messages_outside_of_groups, puts_and_signals;
/* schedules.c */
scenario schedules_against_collectives, schedules_without_a_rank;
/* streams.c */
scenario calls_on_streams, two_communicators_ordered_by_events, groups_over_streams;
/* lifecycle.c */
scenario splits, shrinks_and_grows, non_blocking_communicators, non_blocking_inits_aborted, inits_in_a_group;
scenario many_inits_at_once, worlds_of_one;
/* errors.c */
scenario ranks_that_disagree, wrong_arguments, aborts_while_waiting, aborts_of_queued_work, leaving_while_others_wait;
scenario deadlines, revokes, windows_refused;

#endif

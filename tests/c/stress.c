/*
 * stress [--first SEED] [--seeds N] [--only NAME]: runs every scenario, or one, with each of N seeds. Prints a line for
 * each; exits 0 when all that was promised was kept, and else at the first breach, naming the scenario and the seed.
 */
#include "stress.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LIMIT 100 /* seconds that one scenario may take, under a sanitizer on a busy machine */

#define SCENARIO(name) {#name, name}
static const struct {
    const char *name;
    scenario *run;
} SCENARIOS[] = {
    SCENARIO(worlds_of_one),
    SCENARIO(collectives_one_after_another),
    SCENARIO(collectives_without_a_pause),
    SCENARIO(collectives_in_groups),
    SCENARIO(communicators_side_by_side),
    SCENARIO(one_thread_drives_all_ranks),
    SCENARIO(premultiplied_sums_of_both_residences),
    SCENARIO(more_ranks_than_cores),
    SCENARIO(rings_in_groups),
    SCENARIO(messages_of_all_pairs),
    SCENARIO(messages_outside_of_groups),
    SCENARIO(puts_and_signals),
    SCENARIO(schedules_against_collectives),
    SCENARIO(schedules_without_a_rank),
    SCENARIO(calls_on_streams),
    SCENARIO(two_communicators_ordered_by_events),
    SCENARIO(groups_over_streams),
    SCENARIO(splits),
    SCENARIO(shrinks_and_grows),
    SCENARIO(non_blocking_communicators),
    SCENARIO(non_blocking_inits_aborted),
    SCENARIO(inits_in_a_group),
    SCENARIO(many_inits_at_once),
    SCENARIO(ranks_that_disagree),
    SCENARIO(wrong_arguments),
    SCENARIO(aborts_while_waiting),
    SCENARIO(aborts_of_queued_work),
    SCENARIO(leaving_while_others_wait),
    SCENARIO(deadlines),
    SCENARIO(revokes),
    SCENARIO(windows_refused),
    SCENARIO(small_rooted_calls_among_others),
    SCENARIO(how_far_ranks_run_ahead),
    SCENARIO(leaving_after_running_ahead),
    SCENARIO(running_ahead_on_streams),
    SCENARIO(ranks_that_ran_ahead_and_disagree),
    SCENARIO(waiting_for_room_in_vain),
};

static char running[200];

static void too_long(int signal)
{
    (void)signal;
    static const char words[] = "\nstill running after the limit: ";
    ssize_t written = write(2, words, sizeof words - 1);
    written += write(2, running, strlen(running));
    _exit(written > 0 ? 3 : 4);
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(int argc, char **argv)
{
    unsigned long first = 1, seeds = 1;
    const char *only = NULL;
    int ran = 0;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--first") == 0)
            first = strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--seeds") == 0)
            seeds = strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--only") == 0)
            only = argv[i + 1];
        else
            argc = 0;
    }
    if (argc % 2 == 0) {
        fprintf(stderr, "usage: stress [--first SEED] [--seeds N] [--only NAME]\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGALRM, too_long);
    for (unsigned long seed = first; seed < first + seeds; seed++) {
        for (size_t k = 0; k < sizeof SCENARIOS / sizeof SCENARIOS[0]; k++) {
            if (only != NULL && strcmp(only, SCENARIOS[k].name) != 0)
                continue;
            snprintf(running, sizeof running, "%s, seed %lu\n", SCENARIOS[k].name, seed);
            printf("%s, seed %lu", SCENARIOS[k].name, seed);
            fflush(stdout);
            double start = seconds();
            alarm(LIMIT);
            SCENARIOS[k].run(mix(seed, k));
            alarm(0);
            printf(": %.2f s\n", seconds() - start);
            ran++;
        }
    }
    printf("stress OK: %d runs\n", ran);
    return ran > 0 ? 0 : 2;
}

/* How ranks tell each other what they call, and notice that they disagree.
 *
 * Every rank publishes a post of every collective: what it calls (signature, count), a hash of all that it called before (history), and
 * how far all ranks are known to be (safe). It compares every post that it reads with its own. Whom it waits for is the collective's affair:
 *
 *   all        most collectives, all large ones, and the root of a small reduce or gather. These see a disagreement before any data moves.
 *   the root   the others in a small broadcast or scatter.
 *   nobody     the root of a small broadcast or scatter, the others in a small reduce or gather: they run ahead.
 *
 * How far ahead. The posts of a rank lie in a ring, that of operation k in line k % POSTS. Who publishes k has completed k - 1; nobody publishes
 * k before all have completed k - AHEAD. So as long as I am in operation k nobody is beyond k + AHEAD - 1, and since POSTS = 2 * AHEAD the
 * posts k - AHEAD to k of all ranks that have come so far lie still: they can be read at any time. Of contributions that do not fit a post
 * there are AHEAD slots a rank, that of operation k in slot k % AHEAD: all who read what was there have completed k - AHEAD.
 * A rank that must wait for room waits until all have begun operation k - AHEAD / 2. One look at a line of each peer, which that peer writes
 * once, then serves AHEAD / 2 operations, and a slower peer has as many to do before it is waited for again. Who has waited for all
 * knows better than that and never looks, and who waits for a root learns what the root knows.
 *   Nobody waits in a circle: of the ranks with the least k none lacks room, since all have published k - 1, and whoever waits for one
 * of them waits for what it is about to publish.
 *
 * Disagreements. A rank that notices one fails, its history becomes 0, which equals none, and it goes on publishing: so nobody waits for
 * ever, and all who wait for it hear of it. Who ran ahead hears of it when it next reads a post, that is in an operation for which it waits,
 * or when it looks for room. An operation for which all ranks wait fails on all of them, with the same words, since all compare the same posts;
 * with it the histories begin anew, alike on all, and the communicator goes on. */
#include <stdio.h>
#include <string.h>

#include "posts.h"

#define FRESH_HISTORY 1

/* ---- words --------------------------------------------------------------------------------------------------------------------- */

static const char *call_words(uint64_t signature, uint64_t count, char *buffer, size_t size) {
  const enum kind kind = signature & 0xff;
  if (kind == SCHEDULE && count == 0) { /* one of no elements, or what pyncclAgree is called for */
    snprintf(buffer, size, "run #%08x", (unsigned)(signature >> 32));
    return buffer;
  }
  const int used = snprintf(buffer, size, "%s(count=%llu, %s", kinds[kind].name, (unsigned long long)count, dtype_name(signature >> 8 & 0xff));
  size_t at = (size_t)used < size ? (size_t)used : size - 1;
  if (kinds[kind].reduces) at += snprintf(buffer + at, size - at, ", %s", redop_name(signature >> 16 & 0xff));
  if (at < size && (kinds[kind].from_root || kinds[kind].to_root)) at += snprintf(buffer + at, size - at, ", root=%d", (int)(signature >> 32));
  if (at < size && kind == SCHEDULE) at += snprintf(buffer + at, size - at, ", #%08x", (unsigned)(signature >> 32));
  const bool barrier = kind == ALL_REDUCE && count == 1 && (signature >> 8 & 0xff) == ncclUint8 && (signature >> 16 & 0xff) == REDUCE_MAX;
  if (at < size) snprintf(buffer + at, size - at, barrier ? ") as a barrier does" : ")");
  return buffer;
}

const char *op_words(const struct op *op, char *buffer, size_t size) {
  if (op->kind <= SCHEDULE) return call_words(signature_of(op), op->count, buffer, size);
  if (op->kind == SEND || op->kind == RECV)
    snprintf(buffer, size, "%s(count=%zu, %s, peer=%d)", kinds[op->kind].name, op->count, dtype_name(op->dtype), op->root);
  else
    snprintf(buffer, size, "%s(peer=%d)", kinds[op->kind].name, op->root);
  return buffer;
}

/* The first operation of this history whose posts lie still while this rank is in operation `last`. */
static uint64_t first_kept(const struct ncclComm *comm, uint64_t last) {
  return last > comm->calls.first + AHEAD ? last - AHEAD : comm->calls.first;
}

/* The first operation up to `last` that is seen to differ, in words. */
static bool find_difference(const struct ncclComm *comm, uint64_t last, char *words, size_t size) {
  words[0] = 0;
  for (uint64_t at = first_kept(comm, last); at <= last; at++) {
    const struct post *first = NULL;
    int who = 0;
    for (int rank = 0; rank < comm->nranks; rank++) {
      const struct post *post = post_of(comm, rank, at);
      char here[160], there[160], when[64] = "";
      if (!has_come(comm, rank, at)) continue;
      if (first == NULL) first = post, who = rank;
      if (same_call(post, first)) continue;
      if (at < last) snprintf(when, sizeof when, " (noticed in operation %llu)", (unsigned long long)last);
      snprintf(words, size, "operation %llu of communicator \"%s\" differs between ranks: rank %d calls %s, rank %d calls %s%s",
               (unsigned long long)at, comm->name, who, call_words(first->signature, first->count, here, sizeof here), rank,
               call_words(post->signature, post->count, there, sizeof there), when);
      return true;
    }
  }
  return false;
}

bool op_difference(const struct op *op, char *words, size_t size) {
  return op->kind <= SCHEDULE && find_difference(op->comm, op->ticket, words, size);
}

/* ---- posting ------------------------------------------------------------------------------------------------------------------- */

/* From here on this rank fails, until all ranks do in an operation for which all wait: the words of that one should be what all can see. */
static void notice(struct ncclComm *comm, uint64_t during, bool by_all) {
  struct calls *calls = &comm->calls;
  char words[sizeof calls->difference];
  calls->history = 0;
  /* What was noticed before is an earlier difference than what is left to be seen. */
  if (calls->difference[0] != 0 && first_kept(comm, during) > calls->first && !by_all) return;
  if (find_difference(comm, during, words, sizeof words)) memcpy(calls->difference, words, sizeof words);
  if (calls->difference[0] == 0)
    snprintf(calls->difference, sizeof calls->difference, "operations of communicator \"%s\" before operation %llu differed between ranks",
             comm->name, (unsigned long long)during);
}

bool find_room(struct op *op) {
  struct ncclComm *comm = op->comm;
  const uint64_t begun = op->ticket - AHEAD / 2;
  for (; op->scan < comm->nranks; op->scan++) {
    if (op->scan == comm->rank) continue;
    if (!has_come(comm, op->scan, begun)) {
      op->awaited = op->scan;
      return false;
    }
    const bool same = same_history(post_of(comm, op->scan, begun), post_of(comm, comm->rank, begun));
    if (comm->calls.history != 0 && !same) notice(comm, op->ticket, false);
  }
  comm->calls.safe = begun - 1;
  return true;
}

static bool all_wait(const struct op *op) { /* known to those who wait for all */
  for (int rank = 0; rank < op->comm->nranks; rank++) {
    const struct post *post = post_of(op->comm, rank, op->ticket);
    if (runs_ahead(op->comm, post->signature & 0xff, post->count * dtype_size(post->signature >> 8 & 0xff))) return false;
  }
  return true;
}

bool posts_differ(struct op *op, bool all) {
  struct ncclComm *comm = op->comm;
  const bool by_all = all && all_wait(op);
  notice(comm, op->ticket, by_all);
  fail(comm, ncclInvalidUsage, "%s", comm->calls.difference);
  if (by_all) calls_begin(comm, op->ticket + 1);
  return false;
}

/* Of two ranks that end at the same time without having waited for each other, one at least sees the other's posts. */
ncclResult_t calls_end(struct ncclComm *comm, const char *call) {
  const uint64_t last = atomic_load_explicit(&comm->done, memory_order_acquire);
  bool agree = true;
  if (comm->calls.history == 0) return ncclSuccess; /* an operation has said so */
  /* An exchange, for a fence: ThreadSanitizer knows none. */
  atomic_exchange(&lines_of(comm, comm->rank)->entered, last);
  for (int rank = 0; rank < comm->nranks; rank++) {
    uint64_t at = last;
    while (at >= first_kept(comm, last) && !(has_come(comm, rank, at) && has_come(comm, comm->rank, at))) at--;
    if (at >= first_kept(comm, last)) agree = agree && same_history(post_of(comm, rank, at), post_of(comm, comm->rank, at));
  }
  if (agree) return ncclSuccess;
  notice(comm, last, false);
  return fail(comm, ncclInvalidUsage, "%s: %s", call, comm->calls.difference);
}

void calls_begin(struct ncclComm *comm, uint64_t first) {
  struct calls *calls = &comm->calls;
  calls->history = FRESH_HISTORY;
  calls->first = first;
  calls->synchronising = 0;
  calls->difference[0] = 0;
}

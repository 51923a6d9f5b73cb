/* bootstrap.c: the all-gather and all that can go wrong with it. It is included whole, so that a scene can play a single, bad rank. */
#include "../../pynccl/host/src/bootstrap.c"

#include "parts.h"

#define WORDS 1024

struct part { /* one rank's call, and what came of it */
  const struct token *token;
  int nranks, rank;
  size_t bytes;
  double timeout;
  const _Atomic int *abort;
  bool interruptible;
  int send_fd, fd;
  ncclResult_t result;
  double took;
  char words[WORDS], mine[MOST_BYTES], *all;
  pthread_t thread;
};

static void play(struct part *part) {
  struct waiting waiting = {.deadline = now() + part->timeout, .abort = part->abort, .interruptible = part->interruptible};
  double start = now();
  memset(part->mine, 'a' + part->rank % 26, part->bytes);
  part->fd = -7;
  part->result = bootstrap(part->token, part->nranks, part->rank, part->mine, part->bytes, part->all, part->send_fd, &part->fd, &waiting, "a call");
  part->took = now() - start;
  snprintf(part->words, WORDS, "%s", part->result == ncclSuccess ? "" : thread_error());
}
static void *play_in_thread(void *part) {
  play(part);
  return NULL;
}

/* Ranks `ranks` (of `nranks`) call at once, a thread each. */
static struct part *start(const struct token *token, int nranks, int n, const int *ranks, double timeout) {
  struct part *parts = calloc((size_t)n, sizeof *parts);
  for (int i = 0; i < n; i++)
    parts[i] = (struct part){.token = token, .nranks = nranks, .rank = ranks[i], .bytes = 8, .timeout = timeout, .send_fd = -1,
                             .all = calloc((size_t)nranks, MOST_BYTES)};
  return parts;
}
static void go(struct part *part) { CHECK(pthread_create(&part->thread, NULL, play_in_thread, part) == 0); }
static void end(struct part *part) { CHECK(pthread_join(part->thread, NULL) == 0); }
static void go_all(struct part *parts, int n) {
  for (int i = 0; i < n; i++) go(&parts[i]);
  for (int i = 0; i < n; i++) end(&parts[i]);
}
static void done(struct part *parts, int n) {
  for (int i = 0; i < n; i++) free(parts[i].all);
  free(parts);
}

static void check_gathered(const struct part *part) {
  CHECK(part->result == ncclSuccess);
  for (int rank = 0; rank < part->nranks; rank++)
    for (size_t i = 0; i < part->bytes; i++) CHECK(part->all[rank * part->bytes + i] == 'a' + rank % 26);
}

static void check_failed(const struct part *part, ncclResult_t result, const char *words) {
  if (part->result != result || !strstr(part->words, words) || strncmp(part->words, "a call: ", 8)) {
    fprintf(stderr, "rank %d: %d, \"%s\"; expected %d, \"%s\"\n", part->rank, part->result, part->words, result, words);
    _exit(1);
  }
}

static const int in_order[] = {0, 1, 2, 3, 4, 5, 6, 7};

SCENE(everybody_gets_all_payloads_in_rank_order) {
  int before = open_descriptors();
  for (int n = 1; n <= 5; n++) {
    struct token token = random_token();
    struct part *parts = start(&token, n, n, in_order, 20);
    go_all(parts, n);
    for (int i = 0; i < n; i++) {
      check_gathered(&parts[i]);
      CHECK(parts[i].fd == (i == 0 || n == 1 ? -7 : -1)); /* none was sent */
    }
    done(parts, n);
  }
  CHECK(open_descriptors() == before);
}

SCENE(payloads_of_no_bytes_make_a_barrier) {
  struct token token = random_token();
  struct part *parts = start(&token, 3, 3, in_order, 20);
  for (int i = 0; i < 3; i++) parts[i].bytes = 0;
  go_all(parts, 3);
  for (int i = 0; i < 3; i++) check_gathered(&parts[i]);
  done(parts, 3);
}

SCENE(answers_larger_than_a_socket_buffer_arrive_whole) {
  int before = open_descriptors(), n = 80, ranks[80], fds[2];
  CHECK(pipe(fds) == 0);
  struct token token = random_token();
  for (int i = 0; i < n; i++) ranks[i] = n - 1 - i;
  struct part *parts = start(&token, n, n, ranks, 30);
  for (int i = 0; i < n; i++) parts[i].bytes = MOST_BYTES;
  parts[n - 1].send_fd = fds[1]; /* rank 0 */
  go_all(parts, n);
  for (int i = 0; i < n; i++) check_gathered(&parts[i]);
  for (int i = 0; i < n - 1; i++) {
    char byte = (char)i, back;
    CHECK(parts[i].fd != fds[1] && write(parts[i].fd, &byte, 1) == 1 && read(fds[0], &back, 1) == 1 && back == byte);
    CHECK(fcntl(parts[i].fd, F_GETFD) == FD_CLOEXEC && close(parts[i].fd) == 0);
  }
  close(fds[0]);
  close(fds[1]);
  done(parts, n);
  CHECK(open_descriptors() == before);
}

static struct part *families;
static void play_rank_1(void) {
  play(&families[1]);
  check_gathered(&families[1]);
}
SCENE(ranks_may_be_processes) {
  struct token token = random_token();
  families = start(&token, 2, 2, in_order, 20);
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    play(&families[0]);
    check_gathered(&families[0]);
    _exit(0);
  }
  play_rank_1();
  int status;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  done(families, 2);
}

static void *many_rounds(void *argument) {
  struct part *part = argument;
  for (int round = 0; round < 50; round++) {
    play(part);
    check_gathered(part);
  }
  return NULL;
}
SCENE(a_token_may_be_used_again_at_once) {
  struct token token = random_token();
  struct part *parts = start(&token, 3, 3, in_order, 20);
  for (int i = 0; i < 3; i++) CHECK(pthread_create(&parts[i].thread, NULL, many_rounds, &parts[i]) == 0);
  for (int i = 0; i < 3; i++) end(&parts[i]);
  done(parts, 3);
}

SCENE(nothing_is_left_of_the_name) {
  struct token token = random_token();
  struct part *parts = start(&token, 2, 2, in_order, 20);
  go_all(parts, 2);
  struct sockaddr_un address;
  address_of(&token, &address);
  char line[512];
  FILE *sockets = fopen("/proc/net/unix", "r");
  CHECK(sockets);
  while (fgets(line, sizeof line, sockets)) CHECK(!strstr(line, address.sun_path + 1));
  fclose(sockets);
  done(parts, 2);
}

/* ---- ranks that are missing, or disagree ---------------------------------------------------------------------------------------- */

SCENE(missing_ranks_are_named_on_all_others) {
  int before = open_descriptors(), here[] = {0, 1};
  struct token token = random_token();
  struct part *parts = start(&token, 4, 2, here, 0.5);
  go_all(parts, 2);
  for (int i = 0; i < 2; i++) {
    check_failed(&parts[i], ncclTimeout, "a call: waited 0.");
    check_failed(&parts[i], ncclTimeout, " s; ranks 2, 3 of 4 have not called it");
  }
  done(parts, 2);
  CHECK(open_descriptors() == before);
}

SCENE(a_long_list_of_missing_ranks_is_cut) {
  int here[] = {0};
  struct token token = random_token();
  struct part *parts = start(&token, 200, 1, here, 0.1);
  go_all(parts, 1);
  check_failed(&parts[0], ncclTimeout, "ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 and 183 more of 200 have not called it");
  done(parts, 1);
}

SCENE(a_missing_rank_0_is_named) {
  int here[] = {1, 3};
  struct token token = random_token();
  struct part *parts = start(&token, 4, 2, here, 0.2);
  go_all(parts, 2);
  for (int i = 0; i < 2; i++)
    check_failed(&parts[i], ncclTimeout, " s; rank 0 of 4 has not called it (nobody listens for this unique id on this machine)");
  done(parts, 2);
}

SCENE(the_least_patient_rank_ends_the_wait_for_all) {
  int here[] = {0, 1, 2};
  struct token token = random_token();
  struct part *parts = start(&token, 4, 3, here, 100);
  parts[2].timeout = 0.5;
  go_all(parts, 3);
  for (int i = 0; i < 3; i++) {
    check_failed(&parts[i], ncclTimeout, "rank 3 of 4 has not called it");
    CHECK(parts[i].took < 50);
  }
  done(parts, 3);
}

SCENE(a_rank_given_twice_is_an_error_for_all) {
  int here[] = {0, 2, 2};
  struct token token = random_token();
  struct part *parts = start(&token, 4, 3, here, 20);
  go_all(parts, 3);
  for (int i = 0; i < 3; i++) check_failed(&parts[i], ncclInvalidArgument, "rank 2 has called it twice; every rank must be given once");
  done(parts, 3);
}

SCENE(rank_0_given_twice_is_an_error_for_both) {
  int here[] = {0, 0};
  struct token token = random_token();
  struct part *parts = start(&token, 4, 2, here, 20);
  go_all(parts, 2);
  for (int i = 0; i < 2; i++) check_failed(&parts[i], ncclInvalidArgument, "rank 0 has called it twice; every rank must be given once");
  done(parts, 2);
}

SCENE(a_name_that_somebody_holds_without_listening_is_an_error_on_rank_0) {
  struct token token = random_token();
  struct sockaddr_un address;
  socklen_t size = address_of(&token, &address);
  int holder = socket(AF_UNIX, SOCK_STREAM, 0);
  CHECK(holder >= 0 && bind(holder, (struct sockaddr *)&address, size) == 0);
  struct part *parts = start(&token, 2, 1, in_order, 0.2);
  play(&parts[0]);
  check_failed(&parts[0], ncclTimeout, " s; another process holds the socket of this unique id on this machine and does not answer");
  close(holder);
  done(parts, 1);
}

SCENE(different_numbers_of_ranks_are_an_error_with_both) {
  struct token token = random_token();
  struct part *parts = start(&token, 3, 2, in_order, 20);
  parts[1].nranks = 5;
  go_all(parts, 2);
  for (int i = 0; i < 2; i++) check_failed(&parts[i], ncclInvalidArgument, "rank 1 was given 5 ranks, rank 0 was given 3; all must give the same");
  done(parts, 2);
}

SCENE(different_sizes_of_payload_are_an_error_with_both) {
  struct token token = random_token();
  struct part *parts = start(&token, 2, 2, in_order, 20);
  parts[1].bytes = 24;
  go_all(parts, 2);
  for (int i = 0; i < 2; i++) check_failed(&parts[i], ncclInvalidUsage, "rank 1 brings 24 bytes, rank 0 brings 8");
  done(parts, 2);
}

/* ---- a rank played by hand ------------------------------------------------------------------------------------------------------ */

static struct session acted(const struct token *token, int nranks, int rank, const struct waiting *waiting) {
  return (struct session){.token = token, .nranks = nranks, .rank = rank, .mine = "payload", .bytes = 8, .send_fd = -1, .waiting = waiting,
                          .start = now()};
}

/* Connects as soon as rank 0 listens, says `hello` and the payload. */
static int act(const struct token *token, const struct hello *hello) {
  struct waiting waiting = {.deadline = now() + 20, .abort = NULL, .interruptible = false};
  struct session s = acted(token, (int)hello->nranks, (int)hello->rank, &waiting);
  int fd = reach(&s);
  CHECK(fd >= 0 && send_all(&s, fd, hello, sizeof *hello, "payload", 8, -1, now() + 20));
  return fd;
}

/* What rank 0 tells a rank that is played by hand. */
static void check_told(int fd, ncclResult_t result, const char *words) {
  struct answer answer;
  char told[WORDS] = "";
  CHECK(recv(fd, &answer, sizeof answer, MSG_WAITALL) == sizeof answer && answer.code == result && answer.bytes < WORDS);
  CHECK(recv(fd, told, answer.bytes, MSG_WAITALL) == (ssize_t)answer.bytes && strstr(told, words));
  close(fd);
}

SCENE(another_version_of_the_library_is_an_error_with_both) {
  const char *words = "rank 1 uses version 0.0.9 of the host library, rank 0 uses " HOST_VERSION;
  struct token token = random_token();
  struct part *parts = start(&token, 2, 1, in_order, 20);
  go(&parts[0]);
  struct hello hello = {MAGIC, "0.0.9", 2, 1, 8, 20};
  int fd = act(&token, &hello);
  end(&parts[0]);
  check_failed(&parts[0], ncclInvalidUsage, words);
  check_told(fd, ncclInvalidUsage, words);
  done(parts, 1);
}

SCENE(a_rank_that_ends_while_others_wait_is_named_on_all) {
  const char *words = "rank 1 (of 4) has ended or given up while ranks were waiting for each other";
  struct token token = random_token();
  struct part *parts = start(&token, 4, 1, in_order, 20);
  go(&parts[0]);
  struct hello hello = {MAGIC, HOST_VERSION, 4, 2, 8, 20};
  int waits = act(&token, &hello);
  hello.rank = 1;
  int ends = act(&token, &hello);
  close(ends);
  end(&parts[0]);
  check_failed(&parts[0], ncclRemoteError, words);
  check_told(waits, ncclRemoteError, words);
  done(parts, 1);
}

static int listen_by_hand(const struct token *token) {
  struct waiting waiting = {.deadline = now() + 20, .abort = NULL, .interruptible = false};
  struct session s = acted(token, 4, 0, &waiting);
  int listener = start_listening(&s);
  CHECK(listener >= 0);
  return listener;
}
static int accept_by_hand(int listener) {
  struct pollfd watch = {.fd = listener, .events = POLLIN};
  CHECK(poll(&watch, 1, 20000) == 1);
  int fd = accept(listener, NULL, NULL);
  CHECK(fd >= 0);
  return fd;
}

SCENE(a_rank_0_that_ends_is_named) {
  int here[] = {3};
  struct token token = random_token();
  int listener = listen_by_hand(&token);
  struct part *parts = start(&token, 4, 1, here, 20);
  go(&parts[0]);
  int fd = accept_by_hand(listener);
  struct greeting greeting = {MAGIC};
  struct hello hello;
  CHECK(write(fd, &greeting, sizeof greeting) == sizeof greeting && recv(fd, &hello, sizeof hello, MSG_WAITALL) == sizeof hello);
  CHECK(hello.rank == 3 && hello.nranks == 4 && hello.bytes == 8 && hello.patience > 0 && hello.patience <= 20);
  close(fd);
  end(&parts[0]);
  check_failed(&parts[0], ncclRemoteError, "rank 0 (of 4) has ended while ranks were waiting for each other");
  close(listener);
  done(parts, 1);
}

SCENE(a_connection_dropped_before_the_greeting_is_made_again) {
  int here[] = {0, 1};
  struct token token = random_token();
  int listener = listen_by_hand(&token);
  struct part *parts = start(&token, 2, 2, here, 20);
  go(&parts[1]);
  int fd = accept_by_hand(listener);
  close(listener);
  close(fd);
  go(&parts[0]);
  for (int i = 0; i < 2; i++) {
    end(&parts[i]);
    check_gathered(&parts[i]);
  }
  done(parts, 2);
}

SCENE(strangers_who_are_silent_or_babble_are_no_hindrance) {
  int before = open_descriptors(), strangers[100], fds[2];
  struct token token = random_token();
  struct waiting waiting = {.deadline = now() + 20, .abort = NULL, .interruptible = false};
  struct part *parts = start(&token, 3, 3, in_order, 20);
  go(&parts[0]);
  CHECK(pipe(fds) == 0);
  for (int i = 0; i < 100; i++) { /* more than rank 0 keeps */
    struct session s = acted(&token, 3, 1, &waiting);
    strangers[i] = reach(&s);
    CHECK(strangers[i] >= 0);
    char babble[100] = "GET / HTTP/1.0\r\n\r\n";
    if (i % 4 == 1) send(strangers[i], babble, sizeof babble, MSG_NOSIGNAL);
    if (i % 4 == 2) send_all(&s, strangers[i], babble, 3, "", 0, fds[0], now() + 20); /* and a descriptor that nobody wants */
    if (i % 4 == 3) shutdown(strangers[i], SHUT_RDWR);
  }
  go(&parts[1]);
  go(&parts[2]);
  for (int i = 0; i < 3; i++) {
    end(&parts[i]);
    check_gathered(&parts[i]);
  }
  for (int i = 0; i < 100; i++) close(strangers[i]);
  close(fds[0]);
  close(fds[1]);
  done(parts, 3);
  CHECK(open_descriptors() == before);
}

/* ---- giving up ------------------------------------------------------------------------------------------------------------------------ */

SCENE(abort_ends_the_wait_and_the_others_hear_of_it) {
  _Atomic int abort = 0;
  int here[] = {0, 1, 2};
  struct token token = random_token();
  struct part *parts = start(&token, 4, 3, here, 100);
  parts[0].abort = &abort;
  go(&parts[0]);
  struct hello hello = {MAGIC, HOST_VERSION, 4, 3, 8, 100};
  int fd = act(&token, &hello); /* now rank 0 listens */
  atomic_store(&abort, 1);
  end(&parts[0]);
  check_failed(&parts[0], ncclInternalError, "aborted after ");
  check_told(fd, ncclRemoteError, "rank 0 gave up: aborted after ");

  parts[1].abort = &abort; /* nobody listens */
  play(&parts[1]);
  check_failed(&parts[1], ncclInternalError, "aborted after ");
  done(parts, 3);
}

SCENE(an_interrupt_ends_the_wait_of_the_callers_thread_only) {
  struct token token = random_token();
  struct part *parts = start(&token, 2, 2, in_order, 0.3);
  atomic_store(&interrupt_now, 1);
  parts[0].interruptible = parts[1].interruptible = true;
  for (int i = 0; i < 2; i++) {
    parts[i].timeout = 100;
    play(&parts[i]);
    check_failed(&parts[i], ncclSystemError, "interrupted after ");
    parts[i].timeout = 0.2;
    parts[i].interruptible = false;
    play(&parts[i]);
    check_failed(&parts[i], ncclTimeout, "has not called it");
  }
  done(parts, 2);
}

/* ---- tokens ------------------------------------------------------------------------------------------------------------------------------ */

static void check_far(const struct token *token, struct token other) {
  for (int lane = 0; lane < 2; lane++) {
    uint64_t a, b;
    memcpy(&a, token->bytes + 8 * lane, 8);
    memcpy(&b, other.bytes + 8 * lane, 8);
    int flips = __builtin_popcountll(a ^ b);
    CHECK(flips >= 10 && flips <= 54);
  }
}

SCENE(tokens_differ_when_anything_about_them_does) {
  struct token zero = {{0}}, one = {{1}}, tokens[12];
  int n = 0;
  tokens[n++] = zero;
  tokens[n++] = one;
  tokens[n++] = derive(&zero, "split", 0, NULL, 0);
  tokens[n++] = derive(&one, "split", 0, NULL, 0);
  tokens[n++] = derive(&zero, "split", 1, NULL, 0);
  tokens[n++] = derive(&zero, "grow", 0, NULL, 0);
  tokens[n++] = derive(&zero, "split", 0, "\0", 1);
  tokens[n++] = derive(&zero, "split", 0, "\0", 2);
  tokens[n++] = derive(&zero, "ab", 0, "c", 1);
  tokens[n++] = derive(&zero, "a", 0, "bc", 2);
  tokens[n++] = random_token();
  tokens[n++] = random_token();
  for (int i = 0; i < n; i++)
    for (int j = 0; j < i; j++) CHECK(memcmp(&tokens[i], &tokens[j], sizeof zero));
  struct token same = derive(&zero, "split", 1, NULL, 0);
  CHECK(!memcmp(&same, &tokens[4], sizeof same));

  /* A bit of the counter, or of the very last word, flips about half of the 128 bits, in both lanes. */
  uint64_t last = 0;
  struct token plain = derive(&zero, "split", 0, &last, sizeof last);
  for (int bit = 0; bit < 64; bit++) {
    uint64_t flip = (uint64_t)1 << bit;
    check_far(&tokens[2], derive(&zero, "split", flip, NULL, 0));
    check_far(&plain, derive(&zero, "split", 0, &flip, sizeof flip));
  }
}

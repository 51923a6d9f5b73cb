/* How ranks find each other before they share memory: an all-gather over a Unix socket with an abstract name, made from a token that all
 * ranks have. The name lives in the kernel and dies with its socket: nothing is left behind after kill -9.
 *
 * Rank 0 listens. Each other rank connects, is greeted, sends a hello with its payload, and gets an answer: everybody's payloads (and perhaps
 * a file descriptor), or a result code with words. Only rank 0 knows who is missing, so whoever is connected leaves the verdict to it:
 * a hello carries the patience of its rank, and rank 0 gives up when the least patient one would. This file knows nothing of what the
 * payloads mean. */
#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "host.h"

#define MAGIC 0x6c6c6563206f6c48u
#define MOST_BYTES 4096 /* of one rank's payload */
#define SLICE 0.05      /* seconds between looks at the abort word and the interrupt check */
#define GRACE 1.0       /* seconds past its deadline that a connected rank leaves to rank 0 for its verdict */
#define LINGER 0.25     /* seconds that rank 0, after an error, waits for the others to tell them too */

struct greeting { /* rank 0, to whoever connects */
  uint64_t magic;
};

struct hello { /* a rank, to rank 0; `bytes` bytes of payload follow. The first two fields are the same in every version */
  uint64_t magic;
  char version[16];
  uint32_t nranks, rank;
  uint64_t bytes;
  double patience; /* seconds that this rank is willing to wait */
};

struct answer { /* rank 0, to a rank; `bytes` bytes of payloads or of words follow */
  uint64_t magic, bytes;
  uint32_t code, descriptor; /* an ncclResult_t; 1: a file descriptor comes with this message */
};

struct session { /* one call of bootstrap() */
  const struct token *token;
  int nranks, rank;
  const void *mine;
  size_t bytes;
  void *all;
  int send_fd, *recv_fd;
  const struct waiting *waiting;
  double start, asked; /* asked: when the interrupt check was last asked */
  double looked;       /* when it was last asked whether those we wait for will ever come */
  const bool *here;    /* rank 0: who has come */
  ncclResult_t code;   /* the first error */
  bool personal;       /* the error is about this rank alone; others only hear that it gave up */
  char words[800];
};

static void gather(struct session *s);
static void join(struct session *s);

ncclResult_t bootstrap(const struct token *token, int nranks, int rank, const void *mine, size_t bytes, void *all, int send_fd, int *recv_fd,
                       const struct waiting *waiting, const char *what) {
  if (bytes > MOST_BYTES)
    return fail(NULL, ncclInternalError, "%s: a payload of %zu bytes, at most %d fit", what, bytes, MOST_BYTES);
  if (rank == 0 && bytes) memmove(all, mine, bytes);
  if (nranks > 1) {
    struct session s = {
        .token = token, .nranks = nranks, .rank = rank, .mine = mine, .bytes = bytes, .all = all, .send_fd = send_fd, .recv_fd = recv_fd,
        .waiting = waiting, .start = now(),
    };
    if (rank == 0) gather(&s);
    else join(&s);
    if (s.code != ncclSuccess) return fail(NULL, s.code, "%s: %s", what, s.words);
  }
  return ncclSuccess;
}

/* ---- tokens ------------------------------------------------------------------------------------------------------------------------ */

struct lanes {
  uint64_t a, b;
};

/* Takes a word in: every step can be undone, so no two states fall together before their words do. */
static void absorb(struct lanes *h, uint64_t word) {
  h->a = (h->a ^ word) * 0xd6e8feb86659fd93u;
  h->a ^= h->a >> 32;
  h->b = (h->b + h->a) * 0xa3b195354a39b70du;
  h->b ^= h->b >> 29;
  h->a += h->b << 23 | h->b >> 41;
}

/* The length goes first: ("ab", "c") and ("a", "bc") must differ. */
static void absorb_bytes(struct lanes *h, const void *data, size_t bytes) {
  absorb(h, bytes);
  for (size_t at = 0; at < bytes; at += 8) {
    uint64_t word = 0;
    memcpy(&word, (const char *)data + at, bytes - at < 8 ? bytes - at : 8);
    absorb(h, word);
  }
}

struct token derive(const struct token *parent, const char *purpose, uint64_t counter, const void *extra, size_t bytes) {
  struct lanes h = {0x706172656e742069u, 0x6420746f6b656e73u};
  struct token token;
  absorb_bytes(&h, parent->bytes, sizeof parent->bytes);
  absorb_bytes(&h, purpose, strlen(purpose));
  absorb(&h, counter);
  absorb_bytes(&h, extra, bytes);
  for (int i = 0; i < 4; i++) absorb(&h, (uint64_t)i); /* let the last word reach every bit of both lanes */
  memcpy(token.bytes, &h.a, 8);
  memcpy(token.bytes + 8, &h.b, 8);
  return token;
}

struct token random_token(void) {
  struct token token = {{0}};
  size_t got = 0;
  while (got < sizeof token.bytes) {
    ssize_t n = getrandom(token.bytes + got, sizeof token.bytes - got, 0);
    if (n > 0) got += (size_t)n;
    else if (errno != EINTR) break;
  }
  if (got < sizeof token.bytes) {
    /* Only a sandbox refuses getrandom. A token is a name, not a secret: unique on this machine is enough. */
    static _Atomic uint64_t counter;
    struct {
      double time;
      uint64_t pid;
    } who = {now(), (uint64_t)getpid()};
    token = derive(&token, "random", atomic_fetch_add(&counter, 1), &who, sizeof who);
  }
  return token;
}

/* ---- errors and waiting ------------------------------------------------------------------------------------------------------------- */

/* Remembers the first error; later ones are its consequences. */
static void __attribute__((format(printf, 4, 5))) stop(struct session *s, bool personal, ncclResult_t code, const char *format, ...) {
  if (s->code != ncclSuccess) return;
  s->code = code;
  s->personal = personal;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(s->words, sizeof s->words, format, arguments);
  va_end(arguments);
}

/* Abort and Ctrl-C. True: leave at once. */
static bool given_up(struct session *s) {
  const struct waiting *waiting = s->waiting;
  if (waiting->abort && atomic_load(waiting->abort)) {
    stop(s, true, ncclInternalError, "aborted after %.1f s of waiting for the other ranks", now() - s->start);
    return true;
  }
  if (waiting->interruptible && now() - s->asked >= SLICE) {
    bool stopped = interrupted();
    s->asked = now();
    if (stopped && waiting->interrupted) *waiting->interrupted = true;
    if (stopped) stop(s, true, ncclSystemError, "interrupted after %.1f s of waiting for the other ranks", now() - s->start);
    return stopped;
  }
  return false;
}

/* Somebody we wait for is known to be gone: no need to wait for the deadline. */
static bool in_vain(struct session *s) {
  const struct waiting *waiting = s->waiting;
  char why[512];
  if (!waiting->hopeless || now() - s->looked < SLICE) return false;
  s->looked = now();
  for (int rank = 0; rank < s->nranks; rank++) {
    const bool awaited = s->rank == 0 ? rank > 0 && !s->here[rank] : rank == 0;
    if (awaited && waiting->hopeless(waiting->kin, rank, why, sizeof why)) {
      stop(s, false, ncclRemoteError, "%s", why);
      return true;
    }
  }
  return false;
}

/* Milliseconds for poll: until `until`, at most a slice. Rounded up: rounding down would spin through the last millisecond. */
static int slice(double until) {
  double left = until - now();
  return left <= 0 ? 0 : (int)((left < SLICE ? left : SLICE) * 1000) + 1;
}

/* Waits until `fd` is ready for `events`. False: given up (error recorded), or `until` has passed (no error recorded). */
static bool ready(struct session *s, int fd, short events, double until) {
  for (;;) {
    if (given_up(s)) return false;
    struct pollfd watch = {.fd = fd, .events = events};
    int wait = slice(until), n = poll(&watch, 1, wait);
    if (n > 0) return true;
    if (n < 0 && errno != EINTR) {
      stop(s, true, ncclSystemError, "poll: %s", strerror(errno));
      return false;
    }
    if (wait == 0) return false;
    /* Rank 0 answers and may then leave: what it left in the socket counts first. */
    if (events == POLLIN && s->rank != 0 && in_vain(s)) {
      if (poll(&watch, 1, 0) <= 0) return false;
      s->code = ncclSuccess;
      return true;
    }
  }
}

/* "ranks 2, 3 of 4 have", "rank 2 of 4 has". */
static void name_missing(char *text, size_t size, const bool *here, int nranks) {
  int missing = 0, named = 0;
  for (int i = 1; i < nranks; i++) missing += !here[i];
  size_t at = (size_t)snprintf(text, size, missing == 1 ? "rank" : "ranks");
  for (int i = 1; i < nranks && named < 16; i++)
    if (!here[i]) at += (size_t)snprintf(text + at, size - at, "%s %d", named++ ? "," : "", i);
  if (named < missing) at += (size_t)snprintf(text + at, size - at, " and %d more", missing - named);
  snprintf(text + at, size - at, " of %d %s", nranks, missing == 1 ? "has" : "have");
}

/* ---- sockets ------------------------------------------------------------------------------------------------------------------------- */

static socklen_t address_of(const struct token *token, struct sockaddr_un *address) {
  *address = (struct sockaddr_un){.sun_family = AF_UNIX};
  char *name = address->sun_path + 1; /* a NUL in front: abstract, not a file */
  int length = sprintf(name, "pynccl-");
  for (size_t i = 0; i < sizeof token->bytes; i++) length += sprintf(name + length, "%02x", token->bytes[i]);
  return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

static int new_socket(struct session *s) {
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0)
    stop(s, true, ncclSystemError, "cannot make a Unix socket: %s%s", strerror(errno),
         errno == EMFILE || errno == ENFILE ? "; raise the limit of open files (ulimit -n)" : "");
  return fd;
}

/* Shut down first: a child that was forked meanwhile holds a copy of the descriptor, and must not keep the connection open. */
static void hang_up(int *fd) {
  if (*fd < 0) return;
  shutdown(*fd, SHUT_RDWR);
  close(*fd);
  *fd = -1;
}

/* Anybody on the machine can connect to an abstract name, or squat on one. */
static bool same_user(int fd) {
  struct ucred who;
  socklen_t size = sizeof who;
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &size) == 0 && who.uid == geteuid();
}

static bool again(void) { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

/* Sends both parts, the descriptor (unless -1) with the first byte. False: the other end is gone (no error recorded), or waiting has ended. */
static bool send_all(struct session *s, int fd, const void *head, size_t head_bytes, const void *body, size_t body_bytes, int descriptor,
                     double until) {
  for (size_t done = 0; done < head_bytes + body_bytes;) {
    union {
      struct cmsghdr align;
      char space[CMSG_SPACE(sizeof(int))];
    } control = {.space = {0}};
    size_t in_head = done < head_bytes ? done : head_bytes, in_body = done - in_head;
    struct iovec parts[2] = {
        {(char *)((uintptr_t)head + in_head), head_bytes - in_head},
        {(char *)((uintptr_t)body + in_body), body_bytes - in_body},
    };
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    if (done == 0 && descriptor >= 0) {
      message.msg_control = control.space;
      message.msg_controllen = sizeof control.space;
      struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(sizeof(int));
      memcpy(CMSG_DATA(rights), &descriptor, sizeof(int));
    }
    ssize_t n = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) done += (size_t)n;
    else if (!again()) return false;
    else if (!ready(s, fd, POLLOUT, until)) return false;
  }
  return true;
}

enum received { NOTHING_YET, SOME, GONE };

/* Reads what there is, without waiting. A descriptor that comes along goes to *descriptor; any others are closed. */
static enum received receive(int fd, void *data, size_t bytes, size_t *got, int *descriptor) {
  union {
    struct cmsghdr align;
    char space[CMSG_SPACE(4 * sizeof(int))];
  } control;
  struct iovec part = {(char *)data + *got, bytes - *got};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.space, .msg_controllen = sizeof control.space};
  ssize_t n = recvmsg(fd, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (n < 0) return again() ? NOTHING_YET : GONE;
  for (struct cmsghdr *rights = CMSG_FIRSTHDR(&message); rights; rights = CMSG_NXTHDR(&message, rights)) {
    if (rights->cmsg_level != SOL_SOCKET || rights->cmsg_type != SCM_RIGHTS) continue;
    size_t count = (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; i++) {
      int passed;
      memcpy(&passed, CMSG_DATA(rights) + i * sizeof(int), sizeof(int));
      if (descriptor && *descriptor < 0) *descriptor = passed;
      else close(passed);
    }
  }
  *got += (size_t)n;
  return n == 0 ? GONE : SOME;
}

/* Reads all of `bytes`, waiting. GONE: the other end is. NOTHING_YET: waiting has ended. */
static enum received receive_all(struct session *s, int fd, void *data, size_t bytes, int *descriptor, double until) {
  for (size_t got = 0; got < bytes;) {
    enum received received = receive(fd, data, bytes, &got, descriptor);
    if (received == GONE) return GONE;
    if (received == NOTHING_YET && !ready(s, fd, POLLIN, until)) return NOTHING_YET;
  }
  return SOME;
}

/* ---- rank 0 --------------------------------------------------------------------------------------------------------------------------- */

struct guest { /* somebody who connected */
  int fd;
  bool heard; /* said a whole hello; else perhaps a stranger */
  size_t got;
  struct hello hello;
};

struct room { /* rank 0's view */
  struct guest *guests;
  int nguests, most, heard;
  double closing; /* when to stop waiting */
  bool here[MAX_RANKS];
};

static void show_out(struct room *room, int i) {
  hang_up(&room->guests[i].fd);
  room->guests[i] = room->guests[--room->nguests];
}

static void let_in(struct session *s, struct room *room, int listener) {
  for (;;) {
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0 && (errno == EINTR || errno == ECONNABORTED)) continue;
    if (fd < 0) {
      if (!again())
        stop(s, true, ncclSystemError, "cannot accept the connection of another rank: %s%s", strerror(errno),
             errno == EMFILE || errno == ENFILE ? "; raise the limit of open files (ulimit -n)" : "");
      return;
    }
    struct greeting greeting = {MAGIC};
    if (!same_user(fd) || send(fd, &greeting, sizeof greeting, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)sizeof greeting) {
      close(fd);
      continue;
    }
    /* Full: somebody who connected and says nothing makes room, or else the newcomer (nobody lacks for a rank then). */
    for (int i = 0; room->nguests == room->most && i < room->nguests; i++)
      if (!room->guests[i].heard) show_out(room, i);
    if (room->nguests == room->most) {
      close(fd);
      continue;
    }
    room->guests[room->nguests++] = (struct guest){.fd = fd};
  }
}

/* A hello is complete: does this rank agree with us? */
static void admit(struct session *s, struct room *room, struct guest *guest) {
  const struct hello *hello = &guest->hello;
  uint32_t rank = hello->rank;
  guest->heard = true;
  room->heard++;
  if (strncmp(hello->version, HOST_VERSION, sizeof hello->version)) {
    stop(s, false, ncclInvalidUsage, "rank %u uses version %.16s of the host library, rank 0 uses %s; install the same for all ranks", rank,
         hello->version, HOST_VERSION);
  } else if (hello->nranks != (uint32_t)s->nranks) {
    stop(s, false, ncclInvalidArgument, "rank %u was given %u ranks, rank 0 was given %d; all must give the same number", rank, hello->nranks,
         s->nranks);
  } else if (rank >= (uint32_t)s->nranks) {
    stop(s, false, ncclInvalidArgument, "a rank %u of %d ranks", rank, s->nranks);
  } else if (rank == 0 || room->here[rank]) {
    stop(s, false, ncclInvalidArgument, "rank %u has called it twice; every rank must be given once", rank);
  } else if (hello->bytes != s->bytes) {
    stop(s, false, ncclInvalidUsage, "rank %u brings %llu bytes, rank 0 brings %zu; install the same host library for all ranks", rank,
         (unsigned long long)hello->bytes, s->bytes);
  } else {
    room->here[rank] = true;
    double gives_up = now() + (hello->patience > 0 ? hello->patience : 0);
    if (gives_up < room->closing) room->closing = gives_up;
  }
}

/* Takes what a guest has sent. False: show it out. */
static bool listen_to(struct session *s, struct room *room, struct guest *guest) {
  struct hello *hello = &guest->hello;
  if (guest->heard) { /* nothing more is due from it: it has left, or it babbles */
    stop(s, false, ncclRemoteError, "rank %u (of %d) has ended or given up while ranks were waiting for each other", hello->rank, s->nranks);
    room->heard--;
    return false;
  }
  while (!guest->heard) {
    enum received received = SOME;
    if (guest->got < sizeof *hello) {
      received = receive(guest->fd, hello, sizeof *hello, &guest->got, NULL);
      if (received == SOME && guest->got < sizeof *hello) continue;
      if (received == SOME && hello->magic != MAGIC) return false;
    } else {
      size_t at = guest->got - sizeof *hello;
      /* A rank that disagrees is not asked for its payload; what it has sent of it dies with the connection. */
      bool agrees = !strncmp(hello->version, HOST_VERSION, sizeof hello->version) && hello->nranks == (uint32_t)s->nranks &&
                    hello->rank > 0 && hello->rank < hello->nranks && hello->bytes == s->bytes && !room->here[hello->rank];
      if (agrees && at < s->bytes) {
        /* Straight to its place: a second guest of the same rank cannot do harm, it is refused anyhow. */
        received = receive(guest->fd, (char *)s->all + hello->rank * s->bytes, s->bytes, &at, NULL);
        guest->got = sizeof *hello + at;
      }
      if (received == SOME && (!agrees || at == s->bytes)) admit(s, room, guest);
    }
    if (received == NOTHING_YET) return true;
    if (received == GONE) return false;
  }
  return true;
}

/* Everybody's payloads to a guest, or what went wrong. */
static bool answer(struct session *s, const struct guest *guest, double until) {
  struct answer head = {.magic = MAGIC, .code = (uint32_t)s->code};
  if (s->code == ncclSuccess) {
    head.bytes = (size_t)s->nranks * s->bytes;
    head.descriptor = s->send_fd >= 0;
    return send_all(s, guest->fd, &head, sizeof head, s->all, head.bytes, s->send_fd, until);
  }
  char words[sizeof s->words + 32];
  snprintf(words, sizeof words, "%s%s", s->personal ? "rank 0 gave up: " : "", s->words);
  if (s->personal) head.code = ncclRemoteError;
  head.bytes = strlen(words);
  /* Best effort, without waiting: it fits into the socket's buffer. */
  return send_all(s, guest->fd, &head, sizeof head, words, head.bytes, -1, 0);
}

static int start_listening(struct session *s) {
  struct sockaddr_un address;
  socklen_t size = address_of(s->token, &address);
  while (!given_up(s)) {
    int fd = new_socket(s);
    if (fd < 0) return -1;
    if (bind(fd, (struct sockaddr *)&address, size) == 0) {
      if (listen(fd, s->nranks) == 0) return fd;
      stop(s, true, ncclSystemError, "listen: %s", strerror(errno));
    } else if (errno != EADDRINUSE) {
      stop(s, true, ncclSystemError, "cannot listen on a Unix socket: %s", strerror(errno));
    }
    close(fd);
    if (s->code != ncclSuccess) return -1;
    /* Somebody is rank 0 of this token already. Join it: it will tell all its ranks that rank 0 was given twice. When it does not answer,
     * its name is held by a child forked at the wrong moment, or it is just leaving: try again. */
    join(s);
    if (s->code != ncclSuccess) return -1;
  }
  return -1;
}

static void gather(struct session *s) {
  int listener = -1;
  struct pollfd *watch = NULL;
  struct room room = {.most = 2 * s->nranks + 16, .closing = s->waiting->deadline};
  room.here[0] = true;
  s->here = room.here;
  room.guests = calloc((size_t)room.most, sizeof *room.guests);
  watch = calloc((size_t)room.most + 1, sizeof *watch);
  if (!room.guests || !watch) {
    stop(s, true, ncclSystemError, "out of memory");
    goto out;
  }
  listener = start_listening(s);
  if (listener < 0) goto out;

  while (room.heard < s->nranks - 1) {
    if (given_up(s)) break;
    if (s->code == ncclSuccess) in_vain(s);
    int wait = slice(room.closing), nwatched = room.nguests + 1;
    if (wait == 0) {
      char missing[300];
      name_missing(missing, sizeof missing, room.here, s->nranks);
      stop(s, false, ncclTimeout, "waited %.1f s; %s not called it", now() - s->start, missing);
      break;
    }
    watch[0] = (struct pollfd){.fd = listener, .events = POLLIN};
    for (int i = 0; i < room.nguests; i++) /* of a guest that has said all, only its end is news */
      watch[i + 1] = (struct pollfd){.fd = room.guests[i].fd, .events = room.guests[i].heard ? POLLRDHUP : POLLIN};
    if (poll(watch, (nfds_t)nwatched, wait) < 0) {
      if (errno == EINTR) continue;
      stop(s, true, ncclSystemError, "poll: %s", strerror(errno));
      break;
    }
    for (int i = nwatched - 1; i > 0; i--) /* backwards: showing out moves the last guest here */
      if (watch[i].revents && !listen_to(s, &room, &room.guests[i - 1])) show_out(&room, i - 1);
    if (watch[0].revents) let_in(s, &room, listener);
    if (s->code != ncclSuccess && now() + LINGER < room.closing) room.closing = now() + LINGER;
    if (s->code != ncclSuccess && (s->personal || room.closing <= now())) break;
  }

out:
  /* Before any answer: a rank that is done may use the token again at once, and must then meet the next listener. */
  hang_up(&listener);
  double until = (room.closing > now() ? room.closing : now()) + GRACE;
  for (int i = 0; room.guests && i < room.nguests; i++) {
    struct guest *guest = &room.guests[i];
    if (!guest->heard && s->code != ncclSuccess) listen_to(s, &room, guest); /* it may have said its hello just now */
    if (guest->heard && !answer(s, guest, until))
      stop(s, false, ncclRemoteError, "rank %u (of %d) has ended or given up while ranks were waiting for each other", guest->hello.rank,
           s->nranks);
    hang_up(&guest->fd);
  }
  free(room.guests);
  free(watch);
}

/* ---- the other ranks -------------------------------------------------------------------------------------------------------------------- */

/* A connection that rank 0 has greeted, or -1: at the deadline, or on an error. A connection that ends before the greeting was never looked
 * at: the listener closed because its round was complete; ours is the next. */
static int reach(struct session *s) {
  struct sockaddr_un address;
  socklen_t size = address_of(s->token, &address);
  double deadline = s->waiting->deadline, nap = 0.001;
  bool foreign = false;
  while (!given_up(s)) {
    int fd = new_socket(s);
    if (fd < 0) return -1;
    if (connect(fd, (struct sockaddr *)&address, size) == 0) {
      struct greeting greeting;
      foreign = !same_user(fd);
      if (!foreign && receive_all(s, fd, &greeting, sizeof greeting, NULL, deadline) == SOME && greeting.magic == MAGIC) return fd;
    } else if (errno != ECONNREFUSED && !again()) {
      stop(s, true, ncclSystemError, "cannot connect to rank 0: %s", strerror(errno));
    }
    close(fd);
    if (s->code != ncclSuccess || s->rank == 0) return -1; /* a second rank 0 tries once, then tries to listen */
    if (now() >= deadline) {
      stop(s, false, ncclTimeout, "waited %.1f s; rank 0 of %d has not called it (%s)", now() - s->start, s->nranks,
           foreign ? "another user listens for this unique id on this machine" : "nobody listens for this unique id on this machine");
      return -1;
    }
    if (in_vain(s)) return -1;
    double left = deadline - now();
    poll(NULL, 0, (int)((left < nap ? left : nap) * 1000) + 1);
    nap = nap * 1.5 < 0.02 ? nap * 1.5 : 0.02;
  }
  return -1;
}

/* As rank 0 (a second one): no error recorded means that nobody answered. */
static void join(struct session *s) {
  double deadline = s->waiting->deadline;
  struct answer head;
  int descriptor = -1, fd = reach(s);
  if (fd < 0) {
    if (s->rank == 0 && s->code == ncclSuccess) {
      if (now() >= deadline)
        stop(s, true, ncclTimeout, "waited %.1f s; another process holds the socket of this unique id on this machine and does not answer",
             now() - s->start);
      poll(NULL, 0, 5);
    }
    return;
  }

  struct hello hello = {.magic = MAGIC, .nranks = (uint32_t)s->nranks, .rank = (uint32_t)s->rank, .bytes = s->bytes,
                        .patience = deadline - now()};
  memcpy(hello.version, HOST_VERSION, sizeof HOST_VERSION);
  _Static_assert(sizeof HOST_VERSION <= sizeof hello.version, "the version fits into a hello");
  /* When sending fails, rank 0 has hung up on us: it may have said why. */
  send_all(s, fd, &hello, sizeof hello, s->mine, s->bytes, -1, deadline + GRACE);
  if (s->code != ncclSuccess) goto out;
  enum received received = receive_all(s, fd, &head, sizeof head, &descriptor, deadline + GRACE);
  if (received == SOME && head.magic == MAGIC && head.code == ncclSuccess && head.bytes == (size_t)s->nranks * s->bytes) {
    received = receive_all(s, fd, s->all, head.bytes, NULL, deadline + GRACE);
    if (received == SOME && head.descriptor && descriptor < 0)
      stop(s, true, ncclSystemError, "rank 0 sent shared memory that this process has no room for; raise the limit of open files (ulimit -n)");
  } else if (received == SOME && head.magic == MAGIC && head.code != ncclSuccess && head.code < ncclNumResults) {
    char words[sizeof s->words + 32] = "";
    size_t bytes = head.bytes < sizeof words - 1 ? head.bytes : sizeof words - 1;
    received = receive_all(s, fd, words, bytes, NULL, deadline + GRACE);
    if (received == SOME) stop(s, false, (ncclResult_t)head.code, "%s", words);
  } else if (received == SOME) {
    stop(s, false, ncclInternalError, "rank 0 gave an answer of another format; install the same host library for all ranks");
  }
  if (received == GONE) stop(s, false, ncclRemoteError, "rank 0 (of %d) has ended while ranks were waiting for each other", s->nranks);
  if (received == NOTHING_YET)
    stop(s, false, ncclTimeout, "waited %.1f s; rank 0 of %d has called it but does not answer", now() - s->start, s->nranks);

out:
  hang_up(&fd);
  if (s->code == ncclSuccess && s->recv_fd) *s->recv_fd = descriptor;
  else if (descriptor >= 0) close(descriptor);
}

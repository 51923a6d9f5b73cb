/* What the tests of single C files share: scenes (named test functions, run one a process), checks, and stand-ins for wait.c. */
#ifndef PARTS_H
#define PARTS_H

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "host.h"

struct scene {
  const char *name;
  void (*play)(void);
  struct scene *next;
};
static struct scene *scenes;

#define SCENE(title)                                                        \
  static void title(void);                                                  \
  __attribute__((constructor)) static void add_##title(void) {              \
    static struct scene scene = {#title, title, NULL};                      \
    scene.next = scenes;                                                    \
    scenes = &scene;                                                        \
  }                                                                         \
  static void title(void)

#define CHECK(condition)                                                                                              \
  do {                                                                                                                \
    if (!(condition)) {                                                                                               \
      fprintf(stderr, "%s:%d: not so: %s (last error: %s)\n", __FILE__, __LINE__, #condition, thread_error());        \
      _exit(1);                                                                                                       \
    }                                                                                                                 \
  } while (0)

/* The call fails with this code, and its words contain these. */
#define FAILS(call, expected, words)                                                                                            \
  do {                                                                                                                          \
    ncclResult_t got_ = (call);                                                                                                 \
    if (got_ != (expected) || !strstr(thread_error(), words)) {                                                                 \
      fprintf(stderr, "%s:%d: %s: %d, \"%s\"; expected %d, \"%s\"\n", __FILE__, __LINE__, #call, got_, thread_error(), expected, \
              words);                                                                                                           \
      _exit(1);                                                                                                                 \
    }                                                                                                                           \
  } while (0)

/* ---- in place of wait.c --------------------------------------------------------------------------------------------------------- */

static _Atomic int interrupt_now;
static double test_timeout = 30;
_Atomic unsigned fork_generation = 1;

static void forked(void) { atomic_fetch_add(&fork_generation, 1); }
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, forked); }

double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
double default_timeout(void) { return test_timeout; }
bool interrupted(void) { return atomic_load(&interrupt_now); }

/* ---- helpers ---------------------------------------------------------------------------------------------------------------------- */

static inline int open_descriptors(void) {
  int count = 0;
  DIR *folder = opendir("/proc/self/fd");
  CHECK(folder);
  while (readdir(folder)) count++;
  closedir(folder);
  return count;
}

/* Plays in a child and waits for its end. */
static inline void in_child(void (*play)(void)) {
  fflush(NULL);
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    play();
    _exit(0);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

int main(int argc, char **argv) {
  for (struct scene *scene = scenes; argc == 2 && scene; scene = scene->next)
    if (!strcmp(scene->name, argv[1])) {
      scene->play();
      return 0;
    }
  fprintf(stderr, "no such scene\n");
  return 2;
}

#endif

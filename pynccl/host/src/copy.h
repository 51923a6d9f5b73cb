/*
 * Copies for memory that this core will not read again soon.
 *
 * A plain store first fetches its line, and leaves it in this core's cache; a core that reads the line next has to get it from there, which
 * is the slowest place it can come from (on the machine that this was measured on three times slower than memory, and twenty times when the
 * two cores share no cache). A streaming store does neither.
 */
#ifndef PYNCCL_COPY_H
#define PYNCCL_COPY_H

#include <stdbool.h>
#include <stddef.h>

/* memcpy with streaming stores; where there are none, memcpy. A release store does not wait for them: copy_fence() first. */
void copy_streaming(void *to, const void *from, size_t bytes);
/* The same to n places, side by side: the memory is busier then, and `from` is loaded once. Meanwhile it fetches the `bytes` bytes at each
 * of ahead[], which are needed next. */
void copy_streaming_to_all(char *const *to, int n, const char *from, size_t bytes, const char *const *ahead, int nahead);
void copy_fence(void);

/* Have the line of `to` in this core's cache, as its own, before it is written: other cores had it last. */
static inline void prefetch_to_write(const void *to) {
#if defined(__x86_64__)
  __asm__ volatile("prefetchw %0" : : "m"(*(const char *)to)); /* the builtin would fetch it to read, for processors of 2003 */
#else
  __builtin_prefetch(to, 1);
#endif
}

/* Bytes that the ranks of one machine may touch in a call before results go past the caches: PYNCCL_STREAMING_BYTES (0: always, and whatever
 * is handed to other cores, too), else the size of the last-level cache. */
size_t streaming_threshold(void);
void set_streaming_threshold(size_t bytes);
size_t last_level_bytes(void);

#endif

/* Streaming copies, and when results are streamed. */
#include "copy.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LAST_LEVEL_OTHERWISE ((size_t)32 << 20) /* where the system does not tell */

/* Sanitizers follow plain stores only. */
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#include <immintrin.h>

#define LINE_BYTES ((size_t)64)

/* Whole lines, so that no store waits for the rest of one. `to` is the start of a line. */
static void stream_lines(char *to, const char *from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += LINE_BYTES)
    for (size_t part = at; part < at + LINE_BYTES; part += 16)
      _mm_stream_si128((__m128i *)(to + part), _mm_loadu_si128((const __m128i *)(from + part)));
}

__attribute__((target("avx2"))) static void stream_lines_avx2(char *to, const char *from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += LINE_BYTES) {
    const __m256i low = _mm256_loadu_si256((const __m256i *)(from + at)), high = _mm256_loadu_si256((const __m256i *)(from + at + 32));
    _mm256_stream_si256((__m256i *)(to + at), low);
    _mm256_stream_si256((__m256i *)(to + at + 32), high);
  }
}

/* The same to several places, a line to each in turn: then the stores to one overlap with the loads for the next. */
static void spread_lines(char *const *to, int n, size_t offset, const char *from, size_t bytes, const char *const *ahead, int nahead) {
  for (size_t at = 0; at < bytes; at += LINE_BYTES) {
    for (int i = 0; i < n; i++) stream_lines(to[i] + offset + at, from + at, LINE_BYTES);
    for (int i = 0; i < nahead; i++) _mm_prefetch(ahead[i] + at, _MM_HINT_T0);
  }
}

__attribute__((target("avx2"))) static void spread_lines_avx2(char *const *to, int n, size_t offset, const char *from, size_t bytes,
                                                              const char *const *ahead, int nahead) {
  for (size_t at = 0; at < bytes; at += LINE_BYTES) {
    const __m256i low = _mm256_loadu_si256((const __m256i *)(from + at)), high = _mm256_loadu_si256((const __m256i *)(from + at + 32));
    for (int i = 0; i < n; i++) {
      _mm256_stream_si256((__m256i *)(to[i] + offset + at), low);
      _mm256_stream_si256((__m256i *)(to[i] + offset + at + 32), high);
    }
    for (int i = 0; i < nahead; i++) _mm_prefetch(ahead[i] + at, _MM_HINT_T0);
  }
}

static void (*stream)(char *, const char *, size_t) = stream_lines;
static void (*spread)(char *const *, int, size_t, const char *, size_t, const char *const *, int) = spread_lines;

__attribute__((constructor)) static void choose_stream(void) {
  if (!__builtin_cpu_supports("avx2")) return;
  stream = stream_lines_avx2;
  spread = spread_lines_avx2;
}

void copy_streaming(void *to, const void *from, size_t bytes) {
  const size_t head = -(uintptr_t)to & (LINE_BYTES - 1);
  if (bytes < head + LINE_BYTES) {
    memcpy(to, from, bytes);
    return;
  }
  const size_t lines = (bytes - head) & ~(LINE_BYTES - 1), tail = head + lines;
  memcpy(to, from, head);
  stream((char *)to + head, (const char *)from + head, lines);
  memcpy((char *)to + tail, (const char *)from + tail, bytes - tail);
}

void copy_streaming_to_all(char *const *to, int n, const char *from, size_t bytes, const char *const *ahead, int nahead) {
  const size_t head = -(uintptr_t)to[0] & (LINE_BYTES - 1);
  bool alike = bytes >= head + LINE_BYTES;
  for (int i = 1; i < n; i++) alike = alike && (((uintptr_t)to[i] ^ (uintptr_t)to[0]) & (LINE_BYTES - 1)) == 0;
  const size_t lines = alike ? (bytes - head) & ~(LINE_BYTES - 1) : 0, tail = head + lines;
  for (int i = 0; i < n; i++) {
    if (alike) {
      memcpy(to[i], from, head);
      memcpy(to[i] + tail, from + tail, bytes - tail);
    } else {
      copy_streaming(to[i], from, bytes);
    }
  }
  spread(to, n, head, from + head, lines, ahead, nahead);
}

void copy_fence(void) { _mm_sfence(); }
#else
void copy_streaming(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }
void copy_streaming_to_all(char *const *to, int n, const char *from, size_t bytes, const char *const *ahead, int nahead) {
  (void)ahead, (void)nahead;
  for (int i = 0; i < n; i++) memcpy(to[i], from, bytes);
}
void copy_fence(void) {}
#endif

static _Atomic size_t threshold = LAST_LEVEL_OTHERWISE;

void set_streaming_threshold(size_t bytes) { atomic_store_explicit(&threshold, bytes, memory_order_relaxed); }

/* The bytes of the last cache that core 0 reaches, as the kernel lists them; 0 when it does not. */
static size_t listed_cache(void) {
  size_t last = 0;
  for (int index = 0; index < 8; index++) { /* in the order of their levels */
    char path[80];
    unsigned long size = 0;
    char unit = 0;
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/size", index);
    FILE *file = fopen(path, "re");
    if (file == NULL) break;
    if (fscanf(file, "%lu%c", &size, &unit) >= 1) last = (size_t)size << (unit == 'K' ? 10 : unit == 'M' ? 20 : 0);
    fclose(file);
  }
  return last;
}

/* The kernel is asked first: on processors with several last-level caches sysconf() may give the sum of them all, also of those that a
 * virtual machine has no part in (320 MiB instead of 32, where this was measured). */
size_t last_level_bytes(void) {
  const size_t listed = listed_cache();
  if (listed > 0) return listed;
  const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
  return cache > 0 ? (size_t)cache : LAST_LEVEL_OTHERWISE;
}

size_t streaming_threshold(void) { return atomic_load_explicit(&threshold, memory_order_relaxed); }

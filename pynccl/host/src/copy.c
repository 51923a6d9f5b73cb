/* Streaming copies, and when results are streamed. */
#include "copy.h"

#include <stdatomic.h>
#include <stdint.h>
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

static void (*stream)(char *, const char *, size_t) = stream_lines;

__attribute__((constructor)) static void choose_stream(void) {
  if (__builtin_cpu_supports("avx2")) stream = stream_lines_avx2;
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

void copy_fence(void) { _mm_sfence(); }
#else
void copy_streaming(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }
void copy_fence(void) {}
#endif

static _Atomic size_t threshold = LAST_LEVEL_OTHERWISE;

void set_streaming_threshold(size_t bytes) { atomic_store_explicit(&threshold, bytes, memory_order_relaxed); }

size_t last_level_bytes(void) {
  const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
  return cache > 0 ? (size_t)cache : LAST_LEVEL_OTHERWISE;
}

size_t streaming_threshold(void) { return atomic_load_explicit(&threshold, memory_order_relaxed); }

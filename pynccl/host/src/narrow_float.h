/*
 * float16, bfloat16, float8e4m3 and float8e5m2 to float32 and back, many elements at a time.
 *
 * To float32 is exact. Back is rounded to nearest, ties to even; a result too large becomes infinity in the 16-bit
 * formats and the largest finite value in the 8-bit ones, infinity itself included; a NaN stays a NaN. Neither depends on
 * whether the calling thread flushes float32 subnormals to zero, except that bfloat16's subnormals are float32's.
 */
#ifndef PYNCCL_NARROW_FLOAT_H
#define PYNCCL_NARROW_FLOAT_H

#include <stddef.h>

/* src and dst do not overlap; the narrow side may lie at any address. */
struct narrow_float {
    void (*widen)(float *dst, const void *src, size_t count);
    void (*narrow)(void *dst, const float *src, size_t count);
};

extern const struct narrow_float narrow_float16, narrow_bfloat16, narrow_float8e4m3, narrow_float8e5m2;

#endif

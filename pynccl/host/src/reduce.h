/*
 * The p-way reduction of one block of elements, in fixed source order, for every NCCL dtype and operation.
 *
 * This knows nothing of ranks, segments or communicators: it is given pointers and returns bits. The order of the
 * sources is the order of the arithmetic, so equal sources give equal bits whoever computes them, however the caller
 * cuts a buffer into blocks. (One freedom is left to the CPU: where two NaNs meet, the result has either one's payload.)
 */
#ifndef PYNCCL_REDUCE_H
#define PYNCCL_REDUCE_H

#include <stddef.h>

enum reduce_op {
    REDUCE_SUM, /* 0-4 are the values of ncclRedOp_t */
    REDUCE_PROD,
    REDUCE_MAX,
    REDUCE_MIN,
    REDUCE_AVG,
    REDUCE_PREMULSUM
};

/*
 * dst[i] = op over k = 0 .. nsrc-1 of src[k][i], for i < count; dtype is a ncclDataType_t value (0 .. 11).
 *
 * dst may be exactly one of src[] (in place), not otherwise overlap one. Pointers need the alignment of the element
 * only. nsrc >= 1; a single source is copied, whatever the operation, except that REDUCE_PREMULSUM still multiplies.
 *
 *   integers              wrap modulo 2^bits; AVG is the wrapped sum divided as in C (towards zero)
 *   float32, float64      accumulate in their own type; AVG divides the sum by nsrc
 *   float16, bfloat16,    accumulate in float32 over all sources, and are rounded once, to nearest even;
 *   fp8 (e4m3fn, e5m2)    16-bit results overflow to infinity, fp8 results saturate at the largest finite value
 *   MAX, MIN              ignore a NaN unless every source is NaN
 *   PREMULSUM             sum of src[k][i] * scalar[k]; scalar[k] points at one element of dtype
 *
 * scalar is read for REDUCE_PREMULSUM only. A dtype or op out of range is a programming error: it aborts.
 */
void reduce_block(void *dst, const void *const *src, const void *const *scalar, int nsrc, size_t count, int dtype,
                  enum reduce_op op);

size_t dtype_size(int dtype);      /* bytes of one element; 0 if out of range */
const char *dtype_name(int dtype); /* "int8" .. "float8e5m2"; "?" out of range */
const char *redop_name(int op);    /* "sum" .. "avg", "premulsum"; "?" out of range */

#endif

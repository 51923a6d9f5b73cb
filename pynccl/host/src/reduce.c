/*
 * The reduction kernels: one loop, made for every dtype and operation, and the table that finds them.
 *
 * Up to four sources are one pass: a core then waits for the memory of all of them at once, which takes a reduction of
 * four large ones half the time of three passes. More go through an accumulator that stays in the first-level cache, a
 * block at a time, so that each source is read once, dst is written once, and a narrow float is rounded once. dst may
 * be a source, so it is written only in the pass that reads the last source.
 */
#include "reduce.h"

#include "clones.h"
#include "narrow_float.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The shorter the block, the more of the sources are under way at once; far shorter ones cost as much for the passes. */
#define ACCUMULATOR_BYTES 2048
#define AT_ONCE 4 /* sources */

typedef void reduce_kernel(void *dst, const void *const *src, const void *const *scalar, int nsrc, size_t count,
                           enum reduce_op op);

/*
 * What a dtype is, as small functions of NAME: its element as it lies in memory, at any address; NAME_sum, which
 * accumulates; how to go from one to the other; and the quotient for AVG, once the sum is complete. Signed integers
 * accumulate as unsigned ones, where wrapping is defined.
 */
#define DEFINE_DTYPE(NAME, ELEMENT, SUM, QUOTIENT)                                                                    \
    typedef ELEMENT NAME##_value;                                                                                     \
    typedef ELEMENT NAME##_element __attribute__((aligned(1), may_alias));                                            \
    typedef SUM NAME##_sum;                                                                                           \
    INLINE SUM NAME##_divide(SUM x, int n)                                                                            \
    {                                                                                                                 \
        return (SUM)(ELEMENT)((QUOTIENT)(ELEMENT)x / (QUOTIENT)n);                                                    \
    }

/* Doubles divide in vectors, integers do not; up to 32 bits the quotient of doubles, cut off, is the exact one: its
   error, 2^-53 of a quotient below 2^32 / n, is less than 1 / n, the least distance to an integer not yet reached. */
DEFINE_DTYPE(int8, int8_t, uint8_t, double)
DEFINE_DTYPE(uint8, uint8_t, uint8_t, double)
DEFINE_DTYPE(int32, int32_t, uint32_t, double)
DEFINE_DTYPE(uint32, uint32_t, uint32_t, double)
DEFINE_DTYPE(int64, int64_t, uint64_t, int64_t)
DEFINE_DTYPE(uint64, uint64_t, uint64_t, uint64_t)
DEFINE_DTYPE(float32, float, float, float)
DEFINE_DTYPE(float64, double, double, double)

/* What a pass does otherwise than begin with its first source and leave the result in memory. */
enum { PASS_FROM_SUM = 1, PASS_TO_SUM = 2 };

#define DTYPE int8
#include "reduce_kernel.h"
#define DTYPE uint8
#include "reduce_kernel.h"
#define DTYPE int32
#include "reduce_kernel.h"
#define DTYPE uint32
#include "reduce_kernel.h"
#define DTYPE int64
#include "reduce_kernel.h"
#define DTYPE uint64
#include "reduce_kernel.h"
#define DTYPE float32
#include "reduce_kernel.h"
#define DTYPE float64
#include "reduce_kernel.h"

CLONED static void divide_floats(float *x, int n, size_t count)
{
    for (size_t i = 0; i < count; i++)
        x[i] /= (float)n;
}

/* The narrow floats: widened a block at a time, reduced by the kernels of float32, and rounded once. */
static void narrow_kernel(const struct narrow_float *format, size_t size, char *dst, const void *const *src,
                          const void *const *scalar, int nsrc, size_t count, enum reduce_op op)
{
    float sum[ACCUMULATOR_BYTES / sizeof(float)], wide[ACCUMULATOR_BYTES / sizeof(float)], factor;
    const size_t most = sizeof sum / sizeof sum[0];
    const void *product[] = {wide}, *factors[] = {&factor}, *terms[] = {sum, wide};
    enum reduce_op combine = op == REDUCE_AVG || op == REDUCE_PREMULSUM ? REDUCE_SUM : op;

    for (size_t start = 0; start < count; start += most) {
        size_t n = count - start < most ? count - start : most;
        for (int k = 0; k < nsrc; k++) {
            float *operand = k == 0 ? sum : wide;
            format->widen(operand, (const char *)src[k] + start * size, n);
            if (op == REDUCE_PREMULSUM) {
                product[0] = operand;
                format->widen(&factor, scalar[k], 1);
                float32_kernel(operand, product, factors, 1, n, REDUCE_PREMULSUM);
            }
            if (k > 0)
                float32_kernel(sum, terms, NULL, 2, n, combine);
        }
        if (op == REDUCE_AVG)
            divide_floats(sum, nsrc, n);
        format->narrow(dst + start * size, sum, n);
    }
}

/* Indexed by ncclDataType_t. A dtype has its own kernel or is a narrow float. */
static const struct {
    const char *name;
    size_t size;
    reduce_kernel *kernel;
    const struct narrow_float *narrow;
} DTYPES[] = {
    {"int8", 1, int8_kernel, NULL},
    {"uint8", 1, uint8_kernel, NULL},
    {"int32", 4, int32_kernel, NULL},
    {"uint32", 4, uint32_kernel, NULL},
    {"int64", 8, int64_kernel, NULL},
    {"uint64", 8, uint64_kernel, NULL},
    {"float16", 2, NULL, &narrow_float16},
    {"float32", 4, float32_kernel, NULL},
    {"float64", 8, float64_kernel, NULL},
    {"bfloat16", 2, NULL, &narrow_bfloat16},
    {"float8e4m3", 1, NULL, &narrow_float8e4m3},
    {"float8e5m2", 1, NULL, &narrow_float8e5m2},
};

static const char *const REDOPS[] = {"sum", "prod", "max", "min", "avg", "premulsum"};

static bool is_dtype(int dtype)
{
    return dtype >= 0 && (size_t)dtype < sizeof DTYPES / sizeof DTYPES[0];
}

static bool is_redop(int op)
{
    return op >= 0 && (size_t)op < sizeof REDOPS / sizeof REDOPS[0];
}

size_t dtype_size(int dtype)
{
    return is_dtype(dtype) ? DTYPES[dtype].size : 0;
}

const char *dtype_name(int dtype)
{
    return is_dtype(dtype) ? DTYPES[dtype].name : "?";
}

const char *redop_name(int op)
{
    return is_redop(op) ? REDOPS[op] : "?";
}

void reduce_block(void *dst, const void *const *src, const void *const *scalar, int nsrc, size_t count, int dtype,
                  enum reduce_op op)
{
    if (!is_dtype(dtype) || !is_redop((int)op) || nsrc < 1) {
        fprintf(stderr, "reduce_block: dtype %d, op %d, %d sources\n", dtype, (int)op, nsrc);
        abort();
    }
    if (count == 0)
        return;
    if (nsrc == 1 && op != REDUCE_PREMULSUM) { /* bit for bit, a NaN's payload included */
        if (dst != src[0])
            memcpy(dst, src[0], count * DTYPES[dtype].size);
        return;
    }
    if (DTYPES[dtype].kernel != NULL)
        DTYPES[dtype].kernel(dst, src, scalar, nsrc, count, op);
    else
        narrow_kernel(DTYPES[dtype].narrow, DTYPES[dtype].size, dst, src, scalar, nsrc, count, op);
}

/*
 * The formats narrower than float32. Everything is integer arithmetic and selects, so that the loops vectorise on any
 * CPU. One description of a format serves all but bfloat16, which is the upper half of a float32.
 */
#include "narrow_float.h"

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__) && !defined(PLAIN_KERNELS)
#include <immintrin.h>
#endif

#include "clones.h"

/* Sign, exponent and mantissa as IEEE lays them out; the last three are magnitudes, that is without the sign bit. */
struct format {
    int exponent_bits, mantissa_bits;
    int32_t special;  /* from here on, infinity or NaN */
    int32_t overflow; /* what a value too large becomes */
    int32_t nan;      /* without a payload */
};

static const struct format HALF = {5, 10, 0x7c00, 0x7c00, 0x7e00};
static const struct format E4M3 = {4, 3, 0x7f, 0x7e, 0x7f}; /* the "fn" form: no infinity */
static const struct format E5M2 = {5, 2, 0x7c, 0x7b, 0x7e};

INLINE float float_of_bits(int32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE int32_t bits_of_float(float value)
{
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* yes where condition holds, else no. With ?: GCC moves the arithmetic of one side into a branch, since it might raise
   a floating-point exception, and the loop no longer vectorises. */
INLINE int32_t select_bits(int condition, int32_t yes, int32_t no)
{
    int32_t mask = -(int32_t)(condition != 0);
    return (yes & mask) | (no & ~mask);
}

INLINE int32_t bias_of(struct format f)
{
    return (1 << (f.exponent_bits - 1)) - 1;
}

/* The float32 bits of 2^exponent. */
INLINE int32_t bits_of_power(int32_t exponent)
{
    return (127 + exponent) << 23;
}

INLINE float widen_one(int32_t bits, struct format f)
{
    const int32_t sign_bit = 1 << (f.exponent_bits + f.mantissa_bits), bias = bias_of(f);
    int32_t magnitude = bits & (sign_bit - 1);
    int32_t sign = (int32_t)((uint32_t)(bits & sign_bit) << (31 - f.exponent_bits - f.mantissa_bits));

    int32_t normal = (magnitude << (23 - f.mantissa_bits)) + ((127 - bias) << 23);
    int32_t subnormal = bits_of_float((float)magnitude * float_of_bits(bits_of_power(1 - bias - f.mantissa_bits)));
    int32_t wide = select_bits(magnitude < (1 << f.mantissa_bits), subnormal, normal);
    /* The kept mantissa under an exponent of all ones: infinity if it is zero, else the same NaN. */
    wide |= select_bits(magnitude >= f.special, 0x7f800000, 0);
    return float_of_bits(wide | sign);
}

INLINE int32_t narrow_one(float value, struct format f)
{
    const int32_t bias = bias_of(f), shift = 23 - f.mantissa_bits;
    int32_t bits = bits_of_float(value), magnitude = bits & 0x7fffffff;
    int32_t sign = (int32_t)((uint32_t)bits >> 31) << (f.exponent_bits + f.mantissa_bits);

    /* Half a unit less one, plus the last kept bit, rounds to even; a carry goes into the exponent, as it should. */
    int32_t rebased = magnitude - ((127 - bias) << 23);
    int32_t normal = (rebased + (1 << (shift - 1)) - 1 + ((magnitude >> shift) & 1)) >> shift;
    /* Beside 2^23 units of the smallest subnormal, a float32 holds a whole number of them: the sum is so rounded. */
    int32_t units = bits_of_power(24 - bias - f.mantissa_bits);
    int32_t subnormal = bits_of_float(float_of_bits(magnitude) + float_of_bits(units)) - units;

    int32_t narrow = select_bits(magnitude < bits_of_power(1 - bias), subnormal, normal);
    narrow = select_bits(narrow > f.overflow, f.overflow, narrow);
    int32_t payload = (magnitude >> shift) & ((1 << f.mantissa_bits) - 1); /* kept, as CPUs do that convert */
    narrow = select_bits(magnitude > 0x7f800000, f.nan | payload, narrow);
    return narrow | sign;
}

typedef uint16_t unaligned16 __attribute__((aligned(1), may_alias));

CLONED static void e4m3_widen(float *restrict dst, const void *restrict src, size_t count)
{
    const uint8_t *bits = src;
    for (size_t i = 0; i < count; i++)
        dst[i] = widen_one(bits[i], E4M3);
}

CLONED static void e4m3_narrow(void *restrict dst, const float *restrict src, size_t count)
{
    uint8_t *bits = dst;
    for (size_t i = 0; i < count; i++)
        bits[i] = (uint8_t)narrow_one(src[i], E4M3);
}

CLONED static void e5m2_widen(float *restrict dst, const void *restrict src, size_t count)
{
    const uint8_t *bits = src;
    for (size_t i = 0; i < count; i++)
        dst[i] = widen_one(bits[i], E5M2);
}

CLONED static void e5m2_narrow(void *restrict dst, const float *restrict src, size_t count)
{
    uint8_t *bits = dst;
    for (size_t i = 0; i < count; i++)
        bits[i] = (uint8_t)narrow_one(src[i], E5M2);
}

CLONED static void bfloat16_widen(float *restrict dst, const void *restrict src, size_t count)
{
    const unaligned16 *bits = src;
    for (size_t i = 0; i < count; i++)
        dst[i] = float_of_bits((int32_t)((uint32_t)bits[i] << 16));
}

CLONED static void bfloat16_narrow(void *restrict dst, const float *restrict src, size_t count)
{
    unaligned16 *bits = dst;
    for (size_t i = 0; i < count; i++) {
        uint32_t wide = (uint32_t)bits_of_float(src[i]);
        uint32_t rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
        uint32_t nan = (wide >> 16) | 0x0040;
        bits[i] = (uint16_t)select_bits((int32_t)(wide & 0x7fffffff) > 0x7f800000, (int32_t)nan, (int32_t)rounded);
    }
}

CLONED static void half_widen_by_integers(float *restrict dst, const void *restrict src, size_t count)
{
    const unaligned16 *bits = src;
    for (size_t i = 0; i < count; i++)
        dst[i] = widen_one(bits[i], HALF);
}

CLONED static void half_narrow_by_integers(void *restrict dst, const float *restrict src, size_t count)
{
    unaligned16 *bits = dst;
    for (size_t i = 0; i < count; i++)
        bits[i] = (uint16_t)narrow_one(src[i], HALF);
}

#if defined(__x86_64__) && !defined(PLAIN_KERNELS)

/* The CPU's own conversions, five times as fast. They leave the rest, less than a vector, to the integers. */
__attribute__((target("avx,f16c"))) static size_t half_widen_by_f16c(float *dst, const char *src, size_t count)
{
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i_u *)(src + 2 * i))));
    return i;
}

__attribute__((target("avx,f16c"))) static size_t half_narrow_by_f16c(char *dst, const float *src, size_t count)
{
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((__m128i_u *)(dst + 2 * i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
    return i;
}

static int has_f16c(void)
{
    return __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
}

#else

static int has_f16c(void)
{
    return 0;
}

static size_t half_widen_by_f16c(float *dst, const char *src, size_t count)
{
    (void)dst, (void)src, (void)count;
    return 0;
}

static size_t half_narrow_by_f16c(char *dst, const float *src, size_t count)
{
    (void)dst, (void)src, (void)count;
    return 0;
}

#endif

static void half_widen(float *dst, const void *src, size_t count)
{
    size_t done = has_f16c() ? half_widen_by_f16c(dst, src, count) : 0;
    half_widen_by_integers(dst + done, (const char *)src + 2 * done, count - done);
}

static void half_narrow(void *dst, const float *src, size_t count)
{
    size_t done = has_f16c() ? half_narrow_by_f16c(dst, src, count) : 0;
    half_narrow_by_integers((char *)dst + 2 * done, src + done, count - done);
}

const struct narrow_float narrow_float16 = {half_widen, half_narrow};
const struct narrow_float narrow_bfloat16 = {bfloat16_widen, bfloat16_narrow};
const struct narrow_float narrow_float8e4m3 = {e4m3_widen, e4m3_narrow};
const struct narrow_float narrow_float8e5m2 = {e5m2_widen, e5m2_narrow};

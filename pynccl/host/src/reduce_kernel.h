/*
 * The reduction of one dtype, a template: reduce.c includes this once for each, with DTYPE defined as its name and with
 * DTYPE's _value, _element, _sum and _divide in sight. So there is no include guard.
 */

#define JOIN_TOKENS(a, b) a##b
#define JOIN(a, b) JOIN_TOKENS(a, b)
#define OWN(suffix) JOIN(DTYPE, suffix)

INLINE OWN(_sum) OWN(_combine)(OWN(_sum) x, OWN(_sum) y, enum reduce_op op)
{
    switch (op) { /* MAX and MIN give up an x that is a NaN for any y, as fmax and fmin do */
    case REDUCE_PROD: return (OWN(_sum))(x * y);
    case REDUCE_MAX: return (OWN(_value))(y) > (OWN(_value))(x) || (OWN(_value))(x) != (OWN(_value))(x) ? y : x;
    case REDUCE_MIN: return (OWN(_value))(y) < (OWN(_value))(x) || (OWN(_value))(x) != (OWN(_value))(x) ? y : x;
    default: return (OWN(_sum))(x + y);
    }
}

/* An element as it enters the reduction. */
INLINE OWN(_sum) OWN(_operand)(OWN(_element) x, OWN(_sum) factor, enum reduce_op op)
{
    return (OWN(_sum))(op == REDUCE_PREMULSUM ? (OWN(_sum))(x) * factor : (OWN(_sum))(x));
}

INLINE OWN(_sum) OWN(_factor)(const void *const *scalar, int k, enum reduce_op op)
{
    return op == REDUCE_PREMULSUM ? (OWN(_sum))(*(const OWN(_element) *)scalar[k]) : 0;
}

/*
 * The loop: the sum so far if there is one, and nsrc sources from `start` on, in their order, to dst or to the sum.
 * nsrc, op and pass are constants wherever this is inlined, so that each copy is straight code which vectorises.
 * Independent: dst may be a source exactly, and then each iteration still sees only its own.
 */
INLINE void OWN(_pass)(OWN(_element) *dst, OWN(_sum) *sum, const void *const *src, const void *const *scalar, int nsrc,
                       size_t start, size_t count, int divisor, enum reduce_op op, int pass)
{
    const OWN(_element) *const a = src[0], *const b = nsrc > 1 ? src[1] : a, *const c = nsrc > 2 ? src[2] : a,
                        *const d = nsrc > 3 ? src[3] : a;
    const OWN(_sum) a_factor = OWN(_factor)(scalar, 0, op), b_factor = OWN(_factor)(scalar, nsrc > 1 ? 1 : 0, op),
                    c_factor = OWN(_factor)(scalar, nsrc > 2 ? 2 : 0, op),
                    d_factor = OWN(_factor)(scalar, nsrc > 3 ? 3 : 0, op);
    INDEPENDENT_ITERATIONS
    for (size_t i = 0; i < count; i++) {
        OWN(_sum) x = OWN(_operand)(a[start + i], a_factor, op);
        if (pass & PASS_FROM_SUM)
            x = OWN(_combine)(sum[i], x, op);
        if (nsrc > 1)
            x = OWN(_combine)(x, OWN(_operand)(b[start + i], b_factor, op), op);
        if (nsrc > 2)
            x = OWN(_combine)(x, OWN(_operand)(c[start + i], c_factor, op), op);
        if (nsrc > 3)
            x = OWN(_combine)(x, OWN(_operand)(d[start + i], d_factor, op), op);
        if (pass & PASS_TO_SUM)
            sum[i] = x;
        else
            dst[start + i] = (OWN(_value))(op == REDUCE_AVG ? OWN(_divide)(x, divisor) : x);
    }
}

INLINE void OWN(_reduce)(OWN(_element) *dst, const void *const *src, const void *const *scalar, int nsrc, size_t count,
                         enum reduce_op op)
{
    switch (nsrc) { /* AT_ONCE and fewer */
    case 1: OWN(_pass)(dst, NULL, src, scalar, 1, 0, count, 1, op, 0); return;
    case 2: OWN(_pass)(dst, NULL, src, scalar, 2, 0, count, 2, op, 0); return;
    case 3: OWN(_pass)(dst, NULL, src, scalar, 3, 0, count, 3, op, 0); return;
    case 4: OWN(_pass)(dst, NULL, src, scalar, 4, 0, count, 4, op, 0); return;
    }

    OWN(_sum) sum[ACCUMULATOR_BYTES / sizeof(OWN(_sum))];
    const size_t most = sizeof sum / sizeof sum[0];
    for (size_t start = 0; start < count; start += most) {
        size_t n = count - start < most ? count - start : most;
        OWN(_pass)(NULL, sum, src, scalar, AT_ONCE, start, n, nsrc, op, PASS_TO_SUM);
        int k = AT_ONCE;
        for (; nsrc - k > 2; k += 2)
            OWN(_pass)(NULL, sum, src + k, scalar + k, 2, start, n, nsrc, op, PASS_FROM_SUM | PASS_TO_SUM);
        if (nsrc - k == 2)
            OWN(_pass)(dst, sum, src + k, scalar + k, 2, start, n, nsrc, op, PASS_FROM_SUM);
        else
            OWN(_pass)(dst, sum, src + k, scalar + k, 1, start, n, nsrc, op, PASS_FROM_SUM);
    }
}

/* One function for each dtype: its operations are inlined here, each with its loops, once for each instruction set. */
CLONED static void OWN(_kernel)(void *dst, const void *const *src, const void *const *scalar, int nsrc, size_t count,
                                enum reduce_op op)
{
    switch (op) {
    case REDUCE_SUM: OWN(_reduce)(dst, src, NULL, nsrc, count, REDUCE_SUM); return;
    case REDUCE_PROD: OWN(_reduce)(dst, src, NULL, nsrc, count, REDUCE_PROD); return;
    case REDUCE_MAX: OWN(_reduce)(dst, src, NULL, nsrc, count, REDUCE_MAX); return;
    case REDUCE_MIN: OWN(_reduce)(dst, src, NULL, nsrc, count, REDUCE_MIN); return;
    case REDUCE_AVG: OWN(_reduce)(dst, src, NULL, nsrc, count, REDUCE_AVG); return;
    case REDUCE_PREMULSUM: OWN(_reduce)(dst, src, scalar, nsrc, count, REDUCE_PREMULSUM); return;
    }
}

#undef OWN
#undef JOIN
#undef JOIN_TOKENS
#undef DTYPE

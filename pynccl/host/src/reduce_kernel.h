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

/*
 * The loop: (a or sum) op b, to (dst or sum). op and pass are constants wherever this is inlined, so that each copy is
 * straight code which vectorises. Independent: dst may be a or b exactly, and then each iteration still sees only its own.
 */
INLINE void OWN(_pass)(OWN(_element) *dst, OWN(_sum) *sum, const OWN(_element) *a, OWN(_sum) a_factor,
                       const OWN(_element) *b, OWN(_sum) b_factor, int nsrc, size_t count, enum reduce_op op,
                       int pass)
{
    INDEPENDENT_ITERATIONS
    for (size_t i = 0; i < count; i++) {
        OWN(_sum) x = pass & PASS_FROM_SUM ? sum[i] : OWN(_operand)(a[i], a_factor, op);
        if (!(pass & PASS_ALONE))
            x = OWN(_combine)(x, OWN(_operand)(b[i], b_factor, op), op);
        if (pass & PASS_TO_SUM)
            sum[i] = x;
        else
            dst[i] = (OWN(_value))(op == REDUCE_AVG ? OWN(_divide)(x, nsrc) : x);
    }
}

INLINE OWN(_sum) OWN(_factor)(const void *const *scalar, int k, enum reduce_op op)
{
    return op == REDUCE_PREMULSUM ? (OWN(_sum))(*(const OWN(_element) *)scalar[k]) : 0;
}

INLINE void OWN(_reduce)(OWN(_element) *dst, const void *const *src, const void *const *scalar, int nsrc, size_t count,
                         enum reduce_op op)
{
    OWN(_sum) first = OWN(_factor)(scalar, 0, op);
    if (nsrc == 1) {
        OWN(_pass)(dst, NULL, src[0], first, NULL, 0, nsrc, count, op, PASS_ALONE);
        return;
    }
    OWN(_sum) second = OWN(_factor)(scalar, 1, op);
    if (nsrc == 2) {
        OWN(_pass)(dst, NULL, src[0], first, src[1], second, nsrc, count, op, 0);
        return;
    }

    OWN(_sum) sum[ACCUMULATOR_BYTES / sizeof(OWN(_sum))];
    const size_t most = sizeof sum / sizeof sum[0];
    for (size_t start = 0; start < count; start += most) {
        size_t n = count - start < most ? count - start : most;
        const OWN(_element) *a = src[0], *b = src[1];
        OWN(_pass)(NULL, sum, a + start, first, b + start, second, nsrc, n, op, PASS_TO_SUM);
        for (int k = 2; k < nsrc - 1; k++) {
            b = src[k];
            OWN(_pass)(NULL, sum, NULL, 0, b + start, OWN(_factor)(scalar, k, op), nsrc, n, op,
                       PASS_FROM_SUM | PASS_TO_SUM);
        }
        b = src[nsrc - 1];
        OWN(_pass)(dst + start, sum, NULL, 0, b + start, OWN(_factor)(scalar, nsrc - 1, op), nsrc, n, op,
                   PASS_FROM_SUM);
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

/*
 * What makes loops fast on every machine.
 *
 * CLONED compiles a function for several x86-64 instruction sets; the CPU's is chosen when the library is loaded.
 *
 * The choice is made by an ifunc, which glibc has and which runs too early for a sanitizer's run time. Elsewhere, and on
 * aarch64, whose vectors every CPU has, the one plain version is built. -DPLAIN_KERNELS asks for just that version, on
 * any machine: tests hold it to the same bits.
 */
#ifndef PYNCCL_CLONES_H
#define PYNCCL_CLONES_H

#include <stdlib.h> /* with glibc, defines __GLIBC__ */

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) &&                          \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && !defined(PLAIN_KERNELS)
#define CLONED __attribute__((target_clones("default", "avx2")))
#else
#define CLONED
#endif

/* Before a loop: no iteration reads what another writes, so no check at run time need prove it. */
#if defined(__clang__)
#define INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif

#define INLINE static inline __attribute__((always_inline))

#endif

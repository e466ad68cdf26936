/* The arithmetic of sampling with the same bits everywhere: at every CPU level, with every libm, and
 * on a GPU. A token that the GPU samples is therefore the token that the host would sample from the
 * same logits row.
 *
 * Every step is one IEEE operation in double, rounded as written. C files are compiled with
 * -ffp-contract=off; nvcc would contract a · b + c, so on the GPU so_exact_mul and so_exact_add are
 * intrinsics that it never contracts. fma is used only where it is written.
 *
 * Functions marked SO_BOTH are compiled for the CPU and, in CUDA files, for the GPU. Pure; any
 * thread. */
#ifndef SO_BASE_EXACT_H
#define SO_BASE_EXACT_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define SO_BOTH static __device__ __forceinline__
#define SO_BOTH_TABLE const /* a table of constants; the loop over it is unrolled */
#else
#define SO_BOTH static inline
#define SO_BOTH_TABLE static const
#endif

SO_BOTH double so_exact_mul(double a, double b) {
#ifdef __CUDA_ARCH__
    return __dmul_rn(a, b);
#else
    return a * b;
#endif
}

SO_BOTH double so_exact_add(double a, double b) {
#ifdef __CUDA_ARCH__
    return __dadd_rn(a, b);
#else
    return a + b;
#endif
}

SO_BOTH uint64_t so_exact_bits(double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

SO_BOTH double so_exact_of_bits(uint64_t u) {
    double x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* exp(y) for y ≤ 0, with a relative error of at most 3e-10; 0 below −700. Computed as 2^i · P(r),
 * y = i · ln 2 + r, |r| ≤ ln 2 / 2. The constants are macros, for vector code of the same steps. */
#define SO_EXACT_LOG2E 0x1.71547652b82fep+0
#define SO_EXACT_LN2_HIGH 0x1.62e42fefa39efp-1
#define SO_EXACT_LN2_LOW 0x1.abc9e3b39803fp-56
#define SO_EXACT_EXP_MIN (-700.0)
/* 1/8! … 1/1!, 1 */
#define SO_EXACT_EXP_TERMS                                                                         \
    {                                                                                              \
        0x1.a01a01a01a01ap-16, 0x1.a01a01a01a01ap-13, 0x1.6c16c16c16c17p-10, 0x1.1111111111111p-7, \
            0x1.5555555555555p-5, 0x1.5555555555555p-3, 0x1p-1, 0x1p+0, 0x1p+0                     \
    }
enum { SO_EXACT_EXP_N = 9 };

SO_BOTH double so_exact_exp(double y) {
    SO_BOTH_TABLE double c[SO_EXACT_EXP_N] = SO_EXACT_EXP_TERMS;
    if (!(y > SO_EXACT_EXP_MIN))
        return 0;
    double i = rint(so_exact_mul(y, SO_EXACT_LOG2E));
    double r = fma(-i, SO_EXACT_LN2_LOW, fma(-i, SO_EXACT_LN2_HIGH, y)), p = c[0];
    for (int k = 1; k < SO_EXACT_EXP_N; k++)
        p = fma(p, r, c[k]);
    return so_exact_of_bits(so_exact_bits(p) + ((uint64_t)(int64_t)i << 52));
}

/* log(x) for normal x > 0, within a few units in the last place, also near 1. x = 2^e · m with
 * √½ < m ≤ √2, and log m = 2 · artanh(s), s = (m − 1)/(m + 1). */
SO_BOTH double so_exact_log(double x) {
    /* 2/21 … 2/3, the coefficients of s²⁰ … s² in 2 · artanh(s)/s; the next term is below 2^-55 */
    SO_BOTH_TABLE double c[] = {2.0 / 21, 2.0 / 19, 2.0 / 17, 2.0 / 15, 2.0 / 13,
                                2.0 / 11, 2.0 / 9,  2.0 / 7,  2.0 / 5,  2.0 / 3};
    uint64_t bits = so_exact_bits(x), one = 0x3FF0000000000000u;
    int e = (int)(bits >> 52) - 1023;
    double m = so_exact_of_bits((bits & 0xFFFFFFFFFFFFFu) | one);
    if (m > 0x1.6a09e667f3bcdp+0) {
        m = so_exact_mul(m, 0.5);
        e++;
    }
    double f = so_exact_add(m, -1.0), s = f / so_exact_add(m, 1.0), z = so_exact_mul(s, s);
    double p = c[0];
    for (int k = 1; k < (int)(sizeof c / sizeof c[0]); k++)
        p = so_exact_add(so_exact_mul(p, z), c[k]);
    double t = so_exact_add(so_exact_mul(so_exact_mul(p, z), s), so_exact_mul(2.0, s));
    return so_exact_add(so_exact_mul((double)e, SO_EXACT_LN2_HIGH), t);
}

/* Gumbel noise from a 32-bit random number: −log(−log u), u = (word + ½)/2³². From −3.13 to 22.88. */
SO_BOTH double so_exact_gumbel(uint32_t word) {
    double u = so_exact_mul(so_exact_add((double)word, 0.5), 0x1p-32);
    return -so_exact_log(-so_exact_log(u));
}

/* The logit x relative to the largest one, `top`, divided by the temperature (inverse = 1/T). ≤ 0;
 * −∞ if it is too small for a float. */
SO_BOTH float so_exact_y(float x, double top, double inverse) {
    return (float)so_exact_mul(so_exact_add((double)x, -top), inverse);
}

#endif

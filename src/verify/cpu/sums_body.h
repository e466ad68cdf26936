/* The functions of sums.h, with eight lanes as compiler vectors. The compiler maps them to one
 * register of 512 bits, two of 256 or four of 128, by the including file's instruction set. The
 * order of additions is that of the source at every level.
 *
 * Included only by sums_scalar.c, sums_avx2.c and sums_avx512.c. */
#include <string.h>

#include "verify/sums.h"

enum { LANES = 8 };

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef double d4 __attribute__((vector_size(32)));
typedef double d8 __attribute__((vector_size(64)));
typedef int64_t l8 __attribute__((vector_size(64)));

static double joined(const double s[LANES]) {
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

static double mass(const float *row, int n, float other) {
    f8 x, fill = {other, other, other, other, other, other, other, other};
    d8 s = {0};
    double lane[LANES];
    int i = 0;
    for (; i + SO_SUMS_PART <= n; i += SO_SUMS_PART)
        for (int k = 0; k < SO_SUMS_PART; k += LANES) {
            memcpy(&x, row + i + k, sizeof x);
            i8 in = x >= 0;
            x = (f8)(((i8)x & in) | ((i8)fill & ~in));
            s += __builtin_convertvector(x, d8);
        }
    memcpy(lane, &s, sizeof lane);
    for (; i < n; i++)
        lane[0] += (double)(row[i] >= 0 ? row[i] : other);
    return joined(lane);
}

static double residual(const so_residual *r, int n, double *parts) {
    f8 p, q;
    d8 s = {0};
    double lane[LANES], scale = r->scale;
    int i = 0;
    for (; i + SO_SUMS_PART <= n; i += SO_SUMS_PART) {
        d4 part = {0};
        for (int k = 0; k < SO_SUMS_PART; k += LANES) {
            memcpy(&p, r->p + i + k, sizeof p);
            memcpy(&q, r->q + i + k, sizeof q);
            p = (f8)((i8)p & (p >= 0));
            d8 v = __builtin_convertvector(p, d8) - scale * __builtin_convertvector(q, d8);
            v = (d8)((l8)v & (v > 0));
            s += v;
            part += __builtin_shufflevector(v, v, 0, 1, 2, 3);
            part += __builtin_shufflevector(v, v, 4, 5, 6, 7);
        }
        parts[i / SO_SUMS_PART] = (part[0] + part[1]) + (part[2] + part[3]);
    }
    memcpy(lane, &s, sizeof lane);
    for (; i < n; i++)
        lane[0] += so_residual_at(r, i);
    return joined(lane);
}

/* noise.h in plain C: for CPUs without AVX2, and the reference for the other levels. Also selects
 * the level. */
#include <float.h>
#include <math.h>

#include "base/cpu.h"
#include "base/half.h"
#include "base/mem.h"
#include "sample/noise.h"

static bool all_finite(const float *x, int n, float *top) {
    bool all = true;
    float best = -INFINITY;
    for (int i = 0; i < n; i++) {
        all &= fabsf(x[i]) <= FLT_MAX;
        best = x[i] > best ? x[i] : best;
    }
    *top = best;
    return all;
}

static int32_t find(const float *x, int n, float value) {
    int32_t i = 0;
    while (i < n - 1 && x[i] != value)
        i++;
    return i;
}

static float largest(const float *x, int n) {
    float top = -INFINITY;
    for (int i = 0; i < n; i++)
        top = x[i] > top ? x[i] : top;
    return top;
}

static int above(const so_noise_row *r, int32_t first, int n, float floor, int32_t *ids,
                 double *low) {
    int n_ids = 0;
    for (int32_t id = first; id < first + n; id++) {
        float y = (r->x[id] - r->top) * r->inverse;
        if (y >= floor)
            ids[n_ids++] = id;
        else
            *low += (double)expf(y);
    }
    return n_ids;
}

static int candidates(const so_noise_row *r, int32_t first, int n, float least, int32_t *ids) {
    uint32_t w[4], block = UINT32_MAX;
    int n_ids = 0;
    least -= SO_NOISE_MARGIN;
    for (int32_t id = first; id < first + n; id++) {
        float y = (r->x[id] - r->top) * r->inverse;
        if (y + SO_NOISE_MAX < least)
            continue;
        if ((uint32_t)id / 4 != block) {
            block = (uint32_t)id / 4;
            so_rng_block(&r->key, r->block + block, w);
        }
        float g = (float)(~w[id % 4] >> 8);
        float bound = (float)so_f32_bits(g) * SO_NOISE_SLOPE + SO_NOISE_START;
        if (y + bound >= least)
            ids[n_ids++] = id;
    }
    return n_ids;
}

static double weigh(const float *x, int n, double top, double inverse, float *out) {
    double lane[SO_NOISE_LANES] = {0};
    for (int i = 0; i < n; i++) {
        float y = so_exact_y(x[i], top, inverse);
        out[i] = (float)so_exact_exp((double)y);
        lane[i % SO_NOISE_LANES] += (double)out[i];
    }
    return ((lane[0] + lane[4]) + (lane[1] + lane[5])) +
           ((lane[2] + lane[6]) + (lane[3] + lane[7]));
}

static int expand(const float *x, const uint64_t *subset_bits, int n, float *out) {
    int taken = 0;
    for (int i = 0; i < 64 * n; i++)
        out[i] = -INFINITY;
    for (int k = 0; k < n; k++)
        for (uint64_t bits = subset_bits[k]; bits; bits &= bits - 1)
            out[64 * k + __builtin_ctzll(bits)] = x[taken++];
    return taken;
}

const so_noise_fns so_noise_scalar = {all_finite, largest, find, candidates, above, weigh, expand};

const so_noise_fns *so_noise(void) {
    static const so_noise_fns *const tables[SO_CPU_LEVELS] = {
        [SO_CPU_SCALAR] = &so_noise_scalar,
#if defined(__x86_64__)
        [SO_CPU_AVX2] = &so_noise_avx2,
        [SO_CPU_AVXVNNI] = &so_noise_avx2,
        [SO_CPU_AVX512] = &so_noise_avx512,
        [SO_CPU_AMX] = &so_noise_avx512,
#endif
    };
    return tables[so_cpu_level_in_use()];
}

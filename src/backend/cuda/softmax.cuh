/* What attention.cu and the persistent kernel (persist_columns.cuh) share. */
#ifndef SO_BACKEND_CUDA_SOFTMAX_CUH
#define SO_BACKEND_CUDA_SOFTMAX_CUH

#include "backend/cuda/device.cuh"

enum { CHUNK = 64, SPLITS = 32 };

SO_DEVICE void merge(float m_c, float l_c, float *m, float *l, float *a, float *b) {
    float m2 = isnan(m_c) || isnan(*m) ? NAN : fmaxf(*m, m_c); /* fmaxf drops NaN */
    *a = *m == -INFINITY ? 0 : expf(__fsub_rn(*m, m2));
    *b = expf(__fsub_rn(m_c, m2));
    *l = __fadd_rn(__fmul_rn(*l, *a), __fmul_rn(l_c, *b));
    *m = m2;
}

/* The weight of a running sum with maximum m_i, where m is the largest of all; 0 if it saw no position. */
SO_DEVICE float weight_of(float m_i, float m) {
    return m_i == -INFINITY ? 0.0f : expf(__fsub_rn(m_i, m));
}

/* Softmax of a chunk's scores[64] for one column, which sees positions from … to-1, by one warp. Sets
 * *m_c to the largest score and *l_c to the sum of the weights. Returns the weights of positions
 * `lane` and `lane` + 32, 0 where not seen. */
SO_DEVICE float2 soften(const float *scores, int from, int to, int lane, float *m_c, float *l_c) {
    bool a = lane >= from && lane < to, b = lane + 32 >= from && lane + 32 < to;
    float x = a ? scores[lane] : -INFINITY, y = b ? scores[lane + 32] : -INFINITY;
    float top = so_warp_max(fmaxf(x, y));
    if (__any_sync(0xffffffffu, (a && isnan(x)) || (b && isnan(y))))
        top = NAN;
    x = a ? expf(__fsub_rn(x, top)) : 0;
    y = b ? expf(__fsub_rn(y, top)) : 0;
    *m_c = top;
    *l_c = so_warp_sum(__fadd_rn(x, y));
    return make_float2(x, y);
}

/* soften for N columns whose scores are `stride` apart, side by side: one column after the other, a warp
 * would wait for every exchange. Same bits. */
template <int N>
SO_DEVICE void soften_columns(const float *scores, int stride, const int *from, const int *to,
                              int lane, float2 *w, float *m_c, float *l_c) {
#pragma unroll
    for (int j = 0; j < N; j++) {
        bool a = lane >= from[j] && lane < to[j], b = lane + 32 >= from[j] && lane + 32 < to[j];
        w[j].x = a ? scores[j * stride + lane] : -INFINITY;
        w[j].y = b ? scores[j * stride + lane + 32] : -INFINITY;
        m_c[j] = fmaxf(w[j].x, w[j].y);
    }
#pragma unroll
    for (int x = 16; x; x >>= 1)
#pragma unroll
        for (int j = 0; j < N; j++)
            m_c[j] = fmaxf(m_c[j], __shfl_xor_sync(0xffffffffu, m_c[j], x));
#pragma unroll
    for (int j = 0; j < N; j++) {
        bool a = lane >= from[j] && lane < to[j], b = lane + 32 >= from[j] && lane + 32 < to[j];
        if (__any_sync(0xffffffffu, isnan(w[j].x) || isnan(w[j].y)))
            m_c[j] = NAN;
        w[j].x = a ? expf(__fsub_rn(w[j].x, m_c[j])) : 0;
        w[j].y = b ? expf(__fsub_rn(w[j].y, m_c[j])) : 0;
        l_c[j] = __fadd_rn(w[j].x, w[j].y);
    }
#pragma unroll
    for (int x = 16; x; x >>= 1)
#pragma unroll
        for (int j = 0; j < N; j++)
            l_c[j] = __fadd_rn(l_c[j], __shfl_xor_sync(0xffffffffu, l_c[j], x));
}

SO_DEVICE void load_transposed(uint32_t *a, const char *at) {
    uint32_t s = (uint32_t)__cvta_generic_to_shared(at);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(s)
                 : "memory");
}

#endif

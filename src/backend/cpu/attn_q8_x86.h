/* Attention over one page of a Q8_0 cache, in the SIMD operations of the including level.
 *
 * Scores are integer dot products: a lane is a position, and each step takes four adjacent elements
 * of the head. Integer sums are exact, so a block of 32 may be summed in any order; kernels.h
 * defines how blocks are added. Values are converted to float (d · q is exact) and summed by the
 * tiles of attn_x86.h. Quantising the softmax weights too, in order to sum values as integers,
 * would cost more than it saves.
 *
 * Included at the end of attn_x86.h. Keeps no state; any thread. */

enum { KEY_VECTORS = SO_KV_PAGE / LANES };

/* Dot products need one unsigned operand. With VNNI keys get an offset, which SO_ATTN_START
 * cancels. Without VNNI |key| is multiplied with the query's byte, which takes the key's sign. */
#if HAS_VNNI
#define vi_key(p) vi_xor(vi_load(p), vi_set8((char)0x80))
#define vi_key_mac vi_pmac
#define vi_key_start(p) vi_bcast(p)
#else
#define vi_key(p) vi_load(p)
#define vi_key_mac vi_mac_q8
#define vi_key_start(p) ((void)(p), vi_set32(0))
#endif

/* ---- rounding ---- */

static uint16_t entry_q8(const float *x, int8_t *q) {
    float amax = so_bits_f32(max_abs_bits(x, SO_QK));
    uint16_t half = so_f32_to_f16(amax / 127.0f);
    if (half == 0 || half >= SO_HALF_INF) {
        zero32(q);
        return half == 0 ? 0 : SO_HALF_NAN;
    }
    round32(x, _mm256_set1_ps(1.0f / so_f16_to_f32(half)), q);
    return half;
}

static void query_q8(const float *q, int d, float scale, int n, float *block) {
    float x[SO_QK] = {0};
    int8_t rounded[SO_QK];
    if (d == SO_QK) {
        v_store(x, v_mul(v_load(q), v_set1(scale)));
        v_store(x + 16, v_mul(v_load(q + 16), v_set1(scale)));
    }
    for (int c = 0; c < d && d < SO_QK; c++)
        x[c] = q[c] * scale;
    float inverse, *words = block + SO_ATTN_BYTES * n;
    block[SO_ATTN_SCALE * n] = block_scale(x, SO_QK, &inverse);
    __m128i s = inverse != 0.0f ? round32(x, _mm256_set1_ps(inverse), rounded) : zero32(rounded);
    s = _mm_hadd_epi32(s, s);
    int32_t start = -128 * _mm_cvtsi128_si32(_mm_hadd_epi32(s, s));
    memcpy(block + SO_ATTN_START * n, &start, sizeof start);
    for (int c = 0; c < SO_QK / 4; c++)
        memcpy(words + c * n, rounded + 4 * c, 4);
}

static void queries_q8(const float *const *q, int n, int d, float scale, void *out) {
    float *block = out;
    for (int e = 0; e < d; e += SO_QK, block += SO_ATTN_FIELDS * n)
        for (int i = 0; i < n; i++)
            query_q8(q[i] + e, SO_MIN(SO_QK, d - e), scale, n, block + i);
}

/* ---- scores ---- */

/* Four elements of the head: multiplies their keys with the bytes at x of `n` queries. */
INLINE void key_step(const int8_t (*k)[4], const float *x, const int n, vi (*sum)[KEY_VECTORS]) {
    vi key[KEY_VECTORS];
    UNROLL for (int w = 0; w < KEY_VECTORS; w++) key[w] = vi_key(k[LANES * w]);
    UNROLL for (int i = 0; i < n; i++) {
        vi bytes = vi_bcast(x + i);
        UNROLL for (int w = 0; w < KEY_VECTORS; w++) sum[i][w] =
            vi_key_mac(sum[i][w], key[w], bytes);
    }
}

/* One block for `n` of `all` queries; sums start at 0 or continue from s. With few queries even and
 * odd steps have separate sums, so that a product does not wait for the previous one. */
INLINE void block_tile(const so_q8_keys *k, row_prefetch next, const float *q, int all, bool start,
                       const int n, float *s, size_t stride) {
    const bool two_sums = n * KEY_VECTORS <= 8;
    const float *bytes = q + SO_ATTN_BYTES * all;
    vi sum[12][KEY_VECTORS], odd[12][KEY_VECTORS];
    UNROLL for (int i = 0; i < n; i++) UNROLL for (int w = 0; w < KEY_VECTORS; w++) {
        sum[i][w] = vi_key_start(q + SO_ATTN_START * all + i);
        if (two_sums)
            odd[i][w] = vi_set32(0);
    }
    NO_UNROLL for (int c = 0; c < SO_QK / 4; c += 2, bytes += 2 * all) {
        key_step(k->q[c], bytes, n, sum);
        key_step(k->q[c + 1], bytes + all, n, two_sums ? odd : sum);
        prefetch_row(next, c);
        prefetch_row(next, c + 1);
    }
    UNROLL for (int w = 0; w < KEY_VECTORS; w++) {
        vf scale = vf_halves(k->d + LANES * w);
        UNROLL for (int i = 0; i < n; i++) {
            float *to = s + (size_t)i * stride + LANES * w;
            vf both = vf_mul(vf_set1(q[SO_ATTN_SCALE * all + i]), scale);
            vi whole = two_sums ? vi_add32(sum[i][w], odd[i][w]) : sum[i][w];
            vf_store(to, vf_fma(both, vf_from_int(whole), start ? vf_set1(0) : vf_load(to)));
        }
    }
}

static void scores_q8(so_attn_page page, const void *q, int n, int d, float *s, size_t stride) {
    const so_q8_keys *k = page.at;
    const float *block = q;
    row_prefetch next = {page.next, sizeof k->q[0], 2, page.next_l1};
    for (int e = 0; e < d; e += SO_QK, k++, block += SO_ATTN_FIELDS * n, next.at += sizeof *k) {
        prefetch_row((row_prefetch){next.at + sizeof k->q, 0, 1, next.l1}, 0);
        for (int i = 0, size; i < n; i += size) {
            size = tile_size(n - i, ATTN_BQ);
            float *to = s + (size_t)i * stride;
#define TILE_TO(l1, c) block_tile(k, prefetch_to(next, l1), block + i, n, e == 0, c, to, stride)
#define TILE(c) next.l1 ? TILE_TO(true, c) : TILE_TO(false, c)
            TILE_CASES(size, ATTN_BQ)
#undef TILE
#undef TILE_TO
        }
    }
}

/* ---- values ---- */

typedef struct q8_values {
    const int8_t *q;
    const uint16_t *halves;
    int width; /* bytes per position */
} q8_values;

INLINE q8_values q8_page(so_attn_page v, int d) {
    int width = (d + SO_QK - 1) / SO_QK * SO_QK;
    const int8_t *at = v.at;
    return (q8_values){at + v.first * width, (const void *)(at + SO_KV_PAGE * width), width};
}

/* Converts to float the scales of at most WIDEN_STEP elements, from element e on. */
INLINE void scales_q8(q8_values a, int e, float *scale) {
    const uint16_t *half = a.halves + e / SO_QK * SO_KV_PAGE;
    for (int i = 0; i < SO_MIN(WIDEN_STEP, a.width - e) / SO_QK * SO_KV_PAGE; i += 16)
        v_store(scale + i, v_load_f16(half + i));
}

/* Converts the page's elements from e on to float. */
INLINE void widen_q8(q8_values a, int n_pos, int e, const float *scale, float *wide) {
    for (int b = 0; b < SO_MIN(WIDEN_STEP, a.width - e); b += 16)
        for (int j = 0; j < n_pos; j++)
            v_store(wide + j * WIDEN_STEP + b, v_mul(v_load_i8(a.q + j * a.width + e + b),
                                                     v_set1(scale[b / SO_QK * SO_KV_PAGE + j])));
}

static void values_q8(so_attn_page v, const float *p, int n, int d, float *o) {
    float scale[WIDEN_STEP / SO_QK * SO_KV_PAGE];
    q8_values page = q8_page(v, d);
    const char *next = v.next, *next_halves = next + SO_KV_PAGE * page.width;
    for (int e = 0; e < d; e += WIDEN_STEP, next += WIDEN_STEP) {
        int here = SO_MIN(WIDEN_STEP, d - e), whole = here / 16 * 16;
        value_source a = {.v = page.q + e,
                          .stride = (size_t)page.width,
                          .n_pos = v.n,
                          .t = KV_Q8,
                          .scale = scale + v.first,
                          .next = next,
                          .next_stride = (size_t)page.width,
                          .next_bytes = 1,
                          .next_l1 = v.next_l1};
        scales_q8(page, e, scale);
        prefetch_row((row_prefetch){next_halves + 2 * e, 0, 2, v.next_l1}, 0);
        if (whole == here) {
            value_tiles_widened(a, p, n, d, whole, o + e);
            continue;
        }
        float wide[SO_KV_PAGE * WIDEN_STEP] __attribute__((aligned(64)));
        widen_q8(page, v.n, e, scale + v.first, wide);
        a.v = wide;
        a.stride = WIDEN_STEP;
        a.t = KV_F32;
        value_tiles(a, p, n, d, whole, o + e);
        value_tail(wide + whole, WIDEN_STEP, v.n, p, n, d, here - whole, KV_F32, o + e + whole);
    }
}

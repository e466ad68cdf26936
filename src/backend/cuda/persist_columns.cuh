/* What both kinds of attention in the persistent kernel have in common (persist_chains.cuh, persist_trees.cuh): the
 * sums of attention.cu in the same order, for the columns of an item, by the eight consumer warps together. */
#ifndef SO_BACKEND_CUDA_PERSIST_COLUMNS_CUH
#define SO_BACKEND_CUDA_PERSIST_COLUMNS_CUH

#include "backend/cuda/persist_items.cuh"

enum { P_STRIDE = CHUNK + 8 };

/* The columns of an item. */
template <int U> struct columns {
    char q[COLS * U * 128];
    float scores[COLS * CHUNK];
    __half p[COLS * P_STRIDE];
    float m[COLS], l[COLS], a[COLS], y[COLS]; /* y: -1 if the chunk adds nothing */
    float down[COLS];
};

/* ---- rows of this pass ---- */

SO_DEVICE size_t entry_offset(const so_persist_work &w, int page, int place, int kv) {
    return ((((size_t)page * w.attention.n_cache_layers + w.attention.layer) *
                 w.attention.n_heads_kv +
             kv) *
                SO_KV_PAGE +
            place) *
           w.attention.entry;
}

SO_DEVICE const char *head_at(const char *rows, int n_heads, int row, int head, int d) {
    return rows + ((size_t)row * n_heads + head) * d * 4;
}

/* M consecutive floats, when they have been handed over. */
template <int M> SO_DEVICE void read_floats(const char *p, uint32_t *v) {
    if constexpr (M == 4)
        *(uint4 *)v = read4(p);
    else if constexpr (M == 2)
        *(uint2 *)v = read2(p);
    else
        *v = read1(p);
}
template <int M> SO_DEVICE bool any_empty(const uint32_t *v) {
    bool e = false;
    for (int i = 0; i < M; i++)
        e |= v[i] == 0xffffffffu;
    return e;
}

/* Key and value of a head of a row of this pass while they are read: words M lane … of each. */
template <int U> struct entry_words {
    uint32_t k[U * 2], v[U * 2];
    float2 t[U * 2]; /* rope */
};

template <int U>
SO_DEVICE void read_entry(const block &b, const so_persist_work &w, int kv, int row,
                          entry_words<U> *e) {
    constexpr int d = U * 64, M = d / 32;
    read_floats<M>(head_at(w.attention.k, w.attention.n_heads_kv, row, kv, d) + b.lane * M * 4,
                   e->k);
    read_floats<M>(head_at(w.attention.v, w.attention.n_heads_kv, row, kv, d) + b.lane * M * 4,
                   e->v);
}

/* Starts reading. */
template <int U>
SO_DEVICE void begin_entry(const block &b, const so_persist_work &w, int kv, int row,
                           entry_words<U> *e) {
    constexpr int d = U * 64, M = d / 32;
    const float2 *table = (const float2 *)w.attention.table + (size_t)row * (d / 2);
    for (int i = 0; i < M; i++)
        e->t[i] = table[w.attention.halves ? (b.lane * M + i) % (d / 2) : (b.lane * M + i) / 2];
    read_entry<U>(b, w, kv, row, e);
}

/* The key, rotated, and the value, when they have been handed over; one warp. */
template <int U>
SO_DEVICE void finish_entry(const block &b, const so_persist_work &w, int kv, int row,
                            entry_words<U> *e, __half *key, __half *value) {
    constexpr int M = U * 2;
    spin s = {};
    while (any_empty<M>(e->k) || any_empty<M>(e->v)) {
        spin_once(&s);
        read_entry<U>(b, w, kv, row, e);
    }
    __syncwarp();
    for (int i = 0; i < M; i++) {
        uint32_t far = __shfl_xor_sync(0xffffffffu, e->k[i], 16);
        bool second = w.attention.halves ? b.lane >= 16 : i % 2;
        float own = __uint_as_float(e->k[i]),
              other = __uint_as_float(w.attention.halves ? far : e->k[i ^ 1]);
        float c = second ? other : own, f = second ? own : other;
        key[i] =
            __float2half_rn(second ? __fadd_rn(__fmul_rn(c, e->t[i].y), __fmul_rn(f, e->t[i].x))
                                   : __fsub_rn(__fmul_rn(c, e->t[i].x), __fmul_rn(f, e->t[i].y)));
        value[i] = __float2half_rn(__uint_as_float(e->v[i]));
    }
}

/* Writes the lane's elements of a key and a value. */
template <int U>
SO_DEVICE void put_entry(const __half *key, const __half *value, char *to_k, char *to_v) {
    for (int i = 0; i < U * 2; i += 2) {
        *(__half2 *)(to_k + i * 2) = *(const __half2 *)&key[i];
        *(__half2 *)(to_v + i * 2) = *(const __half2 *)&value[i];
    }
}

/* ---- queries ---- */

/* Starts reading a query: the lane's words of it. */
template <int U>
SO_DEVICE void read_query(const block &b, const so_persist_work &w, int row, int head,
                          uint32_t *x) {
    const char *q = head_at(w.attention.q, w.attention.n_heads, row, head, U * 64) + b.lane * 4;
#pragma unroll
    for (int i = 0; i < U * 2; i++)
        x[i] = read1(q + i * 128);
}

/* A query, rotated and scaled as in attention.cu, as column `col` of 8 at `to`; one warp. Scores have to be
 * multiplied by *down. words: what read_query has loaded; some may not have been handed over yet. */
template <int U>
SO_DEVICE void put_query(const block &b, const so_persist_work &w, int row, int head,
                         uint32_t *words, char *to, int col, float *down) {
    constexpr int d = U * 64;
    int e2 = 0;
    const float2 *table = (const float2 *)w.attention.table + (size_t)row * (d / 2);
    bool halves = w.attention.halves;
    float x[U * 2], y[U * 2], top = 0;
    float2 t[U * 2];
#pragma unroll
    for (int i = 0; i < U * 2; i++)
        t[i] = table[halves ? (i * 32 + b.lane) % (d / 2) : (i * 32 + b.lane) / 2];
    spin sp = {};
    while (__any_sync(0xffffffffu, any_empty<U * 2>(words))) {
        read_query<U>(b, w, row, head, words);
        spin_once(&sp);
    }
#pragma unroll
    for (int i = 0; i < U * 2; i++)
        x[i] = __uint_as_float(words[i]);
#pragma unroll
    for (int i = 0; i < U * 2; i++) {
        bool second = halves ? i >= U : b.lane % 2;
        float other = __shfl_xor_sync(0xffffffffu, x[i], 1);
        if (halves)
            other = x[i ^ U];
        float u = second ? other : x[i], v = second ? x[i] : other;
        y[i] = second ? __fadd_rn(__fmul_rn(u, t[i].y), __fmul_rn(v, t[i].x))
                      : __fsub_rn(__fmul_rn(u, t[i].x), __fmul_rn(v, t[i].y));
        y[i] = __fmul_rn(y[i], w.attention.scale);
        top = fmaxf(top, fabsf(y[i]));
    }
    top = so_warp_max(top);
    /* frexpf and ldexpf by hand; the limits make numbers without leading one irrelevant */
    if (top > 0 && isfinite(top))
        e2 = (int)(__float_as_uint(top) >> 23) - 126;
    e2 = max(-100, min(100, 14 - e2));
    float up = __uint_as_float((uint32_t)(127 + e2) << 23);
    to += (col * 4 + b.lane / 8) * 16 + b.lane % 8 * 2;
#pragma unroll
    for (int i = 0; i < U * 2; i++)
        *(__half *)(to + i * 512) = __float2half_rn(__fmul_rn(y[i], up));
    if (b.lane == 0)
        *down = __uint_as_float((uint32_t)(127 - e2) << 23);
}

/* ---- a chunk ---- */

/* Scores of a chunk: warp w has positions 16 (w % 4) … of column group w / 4. */
template <int U>
SO_DEVICE void score_chunk(const block &b, const item &it, const char *keys, columns<U> *s) {
    int g = b.lane / 4, t = b.lane % 4, pw = b.warp % 4, cg = b.warp / 4;
    if (cg * 8 >= it.n_cols)
        return;
    float acc[4] = {};
#pragma unroll
    for (int u = 0; u < U; u++) {
        uint32_t lo[8], hi[8], x[8];
        const uint4 *q = (const uint4 *)(s->q + (cg * U + u) * 1024) + b.lane;
        for (int h = 0; h < 2; h++) {
            const char *k = keys + piece_at<U>(pw * 16 + g, u * 8 + h * 4 + t);
            *(uint4 *)&lo[4 * h] = *(const uint4 *)k;
            *(uint4 *)&hi[4 * h] = *(const uint4 *)(k + 8 * 128); /* 8 positions further */
            *(uint4 *)&x[4 * h] = q[h * 32];
        }
        for (int i = 0; i < 4; i++) {
            const uint32_t f[4] = {lo[2 * i], hi[2 * i], lo[2 * i + 1], hi[2 * i + 1]};
            so_mma(acc, f, x[2 * i], x[2 * i + 1]);
        }
    }
    for (int i = 0; i < 4; i++) {
        int col = cg * 8 + 2 * t + i % 2;
        s->scores[col * CHUNK + pw * 16 + g + i / 2 * 8] = __fmul_rn(acc[i], s->down[col]);
    }
}

/* The weights of a chunk's positions for N of the warp's columns, for all rows or for row `only`. */
template <int U, int N>
SO_DEVICE void weigh_columns(const block &b, const item &it, int window, int base, int only,
                             columns<U> *s) {
    int from[N], to[N];
    float m_c[N], l_c[N];
    float2 w[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        int row = it.row[min(b.warp + i * CONSUMERS, it.n_cols - 1)];
        so_attn_row r = b.rows[row];
        from[i] = max(first_seen(window, r) - base, 0);
        to[i] = min(r.pos + 1 - base, (int)CHUNK);
        if (only >= 0 && row != only)
            from[i] = to[i] = 0;
    }
    soften_columns<N>(s->scores + b.warp * CHUNK, CONSUMERS * CHUNK, from, to, b.lane, w, m_c, l_c);
#pragma unroll
    for (int i = 0; i < N; i++) {
        int col = b.warp + i * CONSUMERS;
        if (col >= it.n_cols)
            continue;
        bool on = from[i] < to[i];
        float a = 1, y = 0, m = s->m[col], l = s->l[col];
        s->p[col * P_STRIDE + b.lane] = __float2half_rn(w[i].x);
        s->p[col * P_STRIDE + b.lane + 32] = __float2half_rn(w[i].y);
        if (on)
            merge(m_c[i], l_c[i], &m, &l, &a, &y);
        __syncwarp();
        if (b.lane == 0) {
            s->m[col] = m;
            s->l[col] = l;
            s->a[col] = a;
            s->y[col] = on ? y : -1;
        }
    }
}

/* Both halves of a pair of positions, or those of them that are in a range. */
SO_DEVICE uint32_t seen_halves(range r, int pos) {
    return (pos >= r.from && pos < r.to ? 0xffffu : 0) |
           (pos + 1 >= r.from && pos + 1 < r.to ? 0xffff0000u : 0);
}

/* o += weighted values of a chunk, for all columns or for those of row `only`. Warp w has dimensions 16 (w % 4U) …
 * of column group w / 4U; if U is 2, of the second group as well. Values outside of `seen` count as zero,
 * whatever they are. */
template <int U>
SO_DEVICE void weigh_values(const block &b, const item &it, const char *values, range seen,
                            int only, const columns<U> *s, float (*o)[4]) {
    int t = b.lane % 4, g = b.lane / 4, dg = b.warp % (4 * U), first = b.warp / (4 * U);
    int n = min(U, (it.n_cols + 7) / 8 - first);
    float part[U][4] = {};
    if (n <= 0)
        return;
#pragma unroll
    for (int k = 0; k < CHUNK / 16; k++) {
        uint32_t a[4];
        int pos = k * 16 + b.lane % 8 + b.lane / 16 * 8, piece = dg * 2 + b.lane / 8 % 2;
        load_transposed(a, values + piece_at<U>(pos, piece));
        if (seen.from > 0 || seen.to < CHUNK)
            for (int e = 0; e < 4; e++)
                a[e] &= seen_halves(seen, k * 16 + e / 2 * 8 + 2 * t);
        for (int i = 0; i < U; i++) {
            const __half *w = s->p + ((first + i) * 8 + g) * P_STRIDE + k * 16 + 2 * t;
            if (i < n)
                so_mma(part[i], a, *(const uint32_t *)w, *(const uint32_t *)(w + 8));
        }
    }
#pragma unroll
    for (int i = 0; i < U; i++)
        for (int e = 0; e < 4 && i < n; e++) {
            int col = (first + i) * 8 + 2 * t + e % 2;
            float x = s->a[col], y = s->y[col];
            if (y != -1 && (only < 0 || it.row[col] == only))
                o[i][e] = __fmaf_rn(part[i][e], y, __fmul_rn(o[i][e], x));
        }
}

/* Whether the thread's part of a chunk's values, of the positions seen, holds NaN or infinity. */
template <int U> SO_DEVICE bool values_nonfinite(range seen, const char *values) {
    bool bad = false;
    for (int i = thread_again(); i < CHUNK * U * 8; i += CONSUMERS * 32) {
        int j = i / (U * 8);
        uint4 v = *(const uint4 *)(values + piece_at<U>(j, i % (U * 8)));
        const uint32_t w[4] = {v.x, v.y, v.z, v.w};
        for (int k = 0; k < 4 && j >= seen.from && j < seen.to; k++)
            bad |= (w[k] & 0x7c00u) == 0x7c00u || (w[k] & 0x7c000000u) == 0x7c000000u;
    }
    return bad;
}

/* ---- running sums ---- */

/* Hands over one running sum of the item's columns. */
template <int U>
SO_DEVICE void give_sums(const block &b, const so_persist_work &w, const item &it,
                         const columns<U> *s, const float (*o)[4]) {
    constexpr int d = U * 64;
    char *now = w.attention.parts.now, *next = w.attention.parts.next;
    int dg = b.warp % (4 * U);
#pragma unroll
    for (int i = 0; i < U; i++)
        for (int c = 0; c < 2; c++) {
            int col = (b.warp / (4 * U) + i) * 8 + b.lane % 4 * 2 + c;
            if (col >= it.n_cols)
                continue;
            size_t at = ((size_t)it.sum[col] * d + dg * 16 + b.lane / 4) * 4;
            if (next) {
                write1(next + at, 0xffffffffu);
                write1(next + at + 32, 0xffffffffu);
            }
            write1(now + at, word_of(o[i][c]));
            write1(now + at + 32, word_of(o[i][c + 2]));
        }
    if ((int)thread_again() < it.n_cols)
        give_floats(w.attention.stats, (size_t)it.sum[thread_again()] * 8, s->m[thread_again()],
                    s->l[thread_again()]);
}

/* Adds the running sums of a column, M numbers for each lane from number `first` on; one warp. */
template <int M, int TURN>
SO_DEVICE void merge_column(const block &b, const so_persist_work &w, int row, int head, int d,
                            int first) {
    size_t at = ((size_t)row * w.attention.n_heads + head) * SPLITS;
    int n = min((int)SPLITS, (b.rows[row].pos + CHUNK) / CHUNK), e = first + b.lane * M;
    const char *stat = w.attention.stats.now + (at + min(b.lane, n - 1)) * 8,
               *part = w.attention.parts.now + (at * d + e) * 4;
    float weight = 0, l_i = 0, l = 0, o[M] = {};
    for (int s0 = 0; s0 < n; s0 += TURN, part += TURN * d * 4) {
        uint32_t v[TURN][M];
        uint2 st;
        spin sp = {};
        bool again = true;
        while (again) {
            const char *from = address_again(part);
            st = read2(stat);
#pragma unroll
            for (int i = 0; i < TURN; i++, from += s0 + i < n ? d * 4 : 0)
                read_floats<M>(from, v[i]);
            again = st.x == 0xffffffffu || st.y == 0xffffffffu;
#pragma unroll
            for (int i = 0; i < TURN; i++)
                again |= any_empty<M>(v[i]);
            if (again)
                spin_once(&sp);
        }
        __syncwarp();
        if (s0 == 0) {
            float m_i = b.lane < n ? __uint_as_float(st.x) : -INFINITY, m = so_warp_max(m_i);
            if (__any_sync(0xffffffffu, isnan(m_i)))
                m = NAN;
            weight = weight_of(m_i, m);
            l_i = __uint_as_float(st.y);
        }
#pragma unroll
        for (int i = 0; i < TURN; i++) {
            float x = __shfl_sync(0xffffffffu, weight, (s0 + i) % 32),
                  y = __shfl_sync(0xffffffffu, l_i, (s0 + i) % 32);
            if (s0 + i < n) {
                l = __fmaf_rn(y, x, l);
                for (int j = 0; j < M; j++)
                    o[j] = __fmaf_rn(__uint_as_float(v[i][j]), x, o[j]);
            }
        }
    }
    float over = __fdiv_rn(1.0f, l);
    size_t to = (size_t)row * w.attention.out_stride + (head * d + e) * 2;
    if (M == 1) { /* two numbers are one word */
        float mine = __fmul_rn(o[0], over), other = __shfl_down_sync(0xffffffffu, mine, 1);
        if (b.lane % 2 == 0)
            give_halves(w.attention.out, to, mine, other);
    }
    for (int j = 0; j + 1 < M; j += 2)
        give_halves(w.attention.out, to + j * 2, __fmul_rn(o[j], over), __fmul_rn(o[j + 1], over));
}

/* The running sums of all columns. Few are read at once by one warp for each column; many by several, so
 * that one trip to L2 is enough for each. The last blocks come first: they have no item if there are few. */
template <int U>
SO_DEVICE void merge_columns(const block &b, const so_persist_work &w, int splits) {
    constexpr int d = U * 64;
    int heads = w.attention.n_heads, each = splits > 8 ? d / 32 : 1;
#pragma unroll 1
    for (int i = gridDim.x - 1 - blockIdx.x + b.warp * gridDim.x; i < b.n * heads * each;
         i += CONSUMERS * gridDim.x) {
        int col = i / each;
        if (each == 1)
            merge_column<d / 32, 8>(b, w, col / heads, col % heads, d, 0);
        else
            merge_column<1, SPLITS>(b, w, col / heads, col % heads, d, i % each * 32);
    }
}

#endif

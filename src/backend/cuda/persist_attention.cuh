/* Attention in the persistent kernel (persist.cu): the sums of attention.cu in the same order, for up to
 * 16 columns at a time, by the eight consumer warps.
 *
 * The new rows' keys and values are not in the cache yet when the kernel needs them. They are taken from
 * where the product has handed them over, rotated and rounded here, and stored in the cache by the block
 * that has the row's own position. */
#ifndef SO_BACKEND_CUDA_PERSIST_ATTENTION_CUH
#define SO_BACKEND_CUDA_PERSIST_ATTENTION_CUH

#include "backend/cuda/persist_block.cuh"
#include "backend/cuda/softmax.cuh"

enum { COLS = SO_PERSIST_COLS, P_STRIDE = CHUNK + 8 };

/* b.x during attention. */
template <int U> struct attn_shared {
    char keys[CHUNK * U * 128], values[CHUNK * U * 128], q[COLS * U * 128];
    float scores[COLS * CHUNK];
    __half p[COLS * P_STRIDE];
    float m[COLS], l[COLS], a[COLS], y[COLS]; /* y: -1 if the chunk adds nothing */
    float down[COLS];
};

typedef struct item {
    int row0, n_rows, kv, head0, n_heads, n_cols, split;
} item;

/* What the rows of an item see together. */
typedef struct item_sight {
    int n_chunks, longest, same_to, first, last, lowest;
} item_sight;

SO_DEVICE int first_seen(int window, const so_attn_row &r) {
    return window > 0 ? max(0, r.pos - window + 1) : 0;
}

SO_DEVICE item_sight sight_of_item(const block &b, const item &it, int window) {
    item_sight v = {0, 0, INT32_MAX, 0, INT32_MAX, INT32_MAX};
    int most = -1;
    for (int i = 0; i < it.n_rows; i++) {
        so_attn_row r = b.rows[it.row0 + i];
        if (r.pos > most) {
            most = r.pos;
            v.longest = i;
        }
        if (r.page_off != b.rows[it.row0].page_off)
            v.same_to = 0;
        else if (r.n_prefix <= r.pos)
            v.same_to = min(v.same_to, r.n_prefix);
        v.first = max(v.first, first_seen(window, r));
        v.lowest = min(v.lowest, first_seen(window, r));
        v.last = min(v.last, r.pos + 1);
    }
    v.n_chunks = (most + CHUNK) / CHUNK;
    if (it.n_rows == 1)
        v.same_to = INT32_MAX;
    return v;
}

SO_DEVICE size_t entry_offset(const so_persist_work &w, int page, int place, int kv) {
    return ((((size_t)page * w.attention.n_cache_layers + w.attention.layer) *
                 w.attention.n_heads_kv +
             kv) *
                SO_KV_PAGE +
            place) *
           w.attention.entry;
}

/* Starts copying keys and values of a chunk as row r sees them, as copy_chunk in attention.cu; four
 * threads for a position. Rows of this pass are not in the cache yet: b.fresh has the row of such a
 * position, -1 for the others. */
template <int U>
SO_DEVICE void fetch_chunk(const block &b, const so_persist_work &w, const so_attn_row &r, int kv,
                           int base, int from, int to, attn_shared<U> *s) {
    int j = threadIdx.x / 4, fresh = -1;
    bool on = j >= from && j < to;
    size_t at = 0;
    if (on) {
        int pos = base + j,
            slot = pos < r.n_prefix ? pos : w.attention.tails[r.tail_off + pos - r.n_prefix],
            page = w.attention.pages[r.page_off + slot / SO_KV_PAGE], place = slot % SO_KV_PAGE;
        at = entry_offset(w, page, place, kv);
        if (pos > r.pos - b.n) /* a path has at most b.n new rows */
            for (int i = 0; i < b.n; i++)
                if (b.new_slots[i] == page * SO_KV_PAGE + place)
                    fresh = i;
    }
    if (threadIdx.x % 4 == 0)
        b.fresh[j] = (int8_t)fresh;
    if (fresh < 0)
        for (int c = threadIdx.x % 4; c < U * 8; c += 4) {
            int n = on ? 16 : 0, u = c / 8, h = c % 8 / 4, t = c % 4;
            size_t src = n ? at + (size_t)c * 16 : 0;
            so_copy16(s->keys +
                          ((((j / 16 * U + u) * 2 + j % 16 / 8) * 2 + h) * 32 + j % 8 * 4 + t) * 16,
                      w.attention.k_cache + src, n);
            so_copy16(s->values + j * U * 128 + (c ^ (j & 7)) * 16, w.attention.v_cache + src, n);
        }
    so_copy_commit();
}

SO_DEVICE const char *head_at(const char *rows, int n_heads, int row, int head, int d) {
    return rows + ((size_t)row * n_heads + head) * d * 4;
}

/* M consecutive floats, when they have been handed over. */
template <int M> SO_DEVICE void read_floats(const char *p, uint32_t *v) {
    if (M == 4)
        *(uint4 *)v = read4(p);
    else
        *(uint2 *)v = read2(p);
}
template <int M> SO_DEVICE bool any_empty(const uint32_t *v) {
    bool e = false;
    for (int i = 0; i < M; i++)
        e |= v[i] == 0xffffffffu;
    return e;
}

/* Key and value of a head of a row of this pass, elements M lane … of each, the key rotated; one warp. */
template <int U>
SO_DEVICE void new_entry(const block &b, const so_persist_work &w, int kv, int row, __half *key,
                         __half *value) {
    constexpr int d = U * 64, M = d / 32;
    const char *k = head_at(w.attention.k, w.attention.n_heads_kv, row, kv, d) + b.lane * M * 4,
               *v = head_at(w.attention.v, w.attention.n_heads_kv, row, kv, d) + b.lane * M * 4;
    const float2 *table = (const float2 *)w.attention.table + (size_t)row * (d / 2);
    float2 t[M];
    for (int i = 0; i < M; i++)
        t[i] = table[w.attention.halves ? (b.lane * M + i) % (d / 2) : (b.lane * M + i) / 2];
    uint32_t x[M], y[M];
    spin s = {};
    while (true) {
        read_floats<M>(k, x);
        read_floats<M>(v, y);
        if (!any_empty<M>(x) && !any_empty<M>(y))
            break;
        spin_once(&s);
    }
    __syncwarp();
    for (int i = 0; i < M; i++) {
        uint32_t far = __shfl_xor_sync(0xffffffffu, x[i], 16);
        bool second = w.attention.halves ? b.lane >= 16 : i % 2;
        float own = __uint_as_float(x[i]),
              other = __uint_as_float(w.attention.halves ? far : x[i ^ 1]);
        float c = second ? other : own, e = second ? own : other;
        key[i] = __float2half_rn(second ? __fadd_rn(__fmul_rn(c, t[i].y), __fmul_rn(e, t[i].x))
                                        : __fsub_rn(__fmul_rn(c, t[i].x), __fmul_rn(e, t[i].y)));
        value[i] = __float2half_rn(__uint_as_float(y[i]));
    }
}

/* Fills in keys and values of this pass's rows, one warp for a position, and stores those whose own
 * position it is. */
template <int U>
SO_DEVICE void fill_fresh(const block &b, const so_persist_work &w, const item &it, int base,
                          attn_shared<U> *s) {
    constexpr int d = U * 64, M = d / 32;
    for (int j = b.warp; j < CHUNK; j += CONSUMERS) {
        int row = b.fresh[j], e = b.lane * M;
        if (row < 0)
            continue;
        alignas(8) __half key[M], value[M];
        new_entry<U>(b, w, it.kv, row, key, value);
        char *unit = s->keys + ((j / 16 * U + e / 64) * 2 + j % 16 / 8) * 1024 + e % 64 / 32 * 512 +
                     (j % 8 * 4 + e % 32 / 8) * 16 + e % 8 * 2;
        char *to_v = s->values + j * d * 2 + (e / 8 ^ (j & 7)) * 16 + e % 8 * 2;
        bool own = row >= it.row0 && row < it.row0 + it.n_rows && b.rows[row].pos == base + j;
        size_t at =
            entry_offset(w, b.new_slots[row] / SO_KV_PAGE, b.new_slots[row] % SO_KV_PAGE, it.kv) +
            e * 2;
        for (int i = 0; i < M; i += 2) {
            *(__half2 *)(unit + i * 2) = *(__half2 *)&key[i];
            *(__half2 *)(to_v + i * 2) = *(__half2 *)&value[i];
            if (own) {
                *(__half2 *)(w.attention.k_cache + at + i * 2) = *(__half2 *)&key[i];
                *(__half2 *)(w.attention.v_cache + at + i * 2) = *(__half2 *)&value[i];
            }
        }
    }
}

enum { MINE = COLS / CONSUMERS }; /* columns of a warp */

/* Reads the queries of the warp's columns; true if some are empty. */
template <int U>
SO_DEVICE bool read_queries(const block &b, const so_persist_work &w, const item &it,
                            float (*x)[U * 2]) {
    bool again = false;
#pragma unroll
    for (int j = 0; j < MINE; j++)
#pragma unroll
        for (int i = 0; i < U * 2; i++) {
            int col = b.warp + j * CONSUMERS, row = it.row0 + col / it.n_heads,
                head = it.head0 + col % it.n_heads;
            uint32_t u = 0;
            if (col < it.n_cols)
                u = read1(head_at(w.attention.q, w.attention.n_heads, row, head, U * 64) +
                          (i * 32 + b.lane) * 4);
            again |= u == 0xffffffffu;
            x[j][i] = __uint_as_float(u);
        }
    return again;
}

/* Queries of the item's columns, rotated and scaled as in attention.cu. x: what read_queries has read. */
template <int U>
SO_DEVICE void load_queries(const block &b, const so_persist_work &w, const item &it,
                            float (*x)[U * 2], bool again, attn_shared<U> *s) {
    constexpr int d = U * 64, mine = MINE;
    float y[mine][U * 2];
    float2 t[mine][U * 2];
#pragma unroll
    for (int j = 0; j < mine; j++)
#pragma unroll
        for (int i = 0; i < U * 2; i++) {
            int col = b.warp + j * CONSUMERS, e = i * 32 + b.lane,
                row = it.row0 + min(col / it.n_heads, it.n_rows - 1);
            t[j][i] =
                ((const float2 *)w.attention
                     .table)[(size_t)row * (d / 2) + (w.attention.halves ? e % (d / 2) : e / 2)];
        }
    spin sp = {};
    while (again) {
        again = read_queries<U>(b, w, it, x);
        if (again)
            spin_once(&sp);
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < mine; j++)
#pragma unroll
        for (int i = 0; i < U * 2; i++) {
            bool second = w.attention.halves ? i >= U : b.lane % 2;
            float other = __shfl_xor_sync(0xffffffffu, x[j][i], 1);
            if (w.attention.halves)
                other = x[j][i ^ U];
            float u = second ? other : x[j][i], v = second ? x[j][i] : other;
            y[j][i] = second ? __fadd_rn(__fmul_rn(u, t[j][i].y), __fmul_rn(v, t[j][i].x))
                             : __fsub_rn(__fmul_rn(u, t[j][i].x), __fmul_rn(v, t[j][i].y));
        }
#pragma unroll
    for (int j = 0; j < mine; j++) {
        int col = b.warp + j * CONSUMERS, e2 = 0;
        if (col >= it.n_cols)
            continue;
        float top = 0;
        for (int i = 0; i < U * 2; i++) {
            y[j][i] = __fmul_rn(y[j][i], w.attention.scale);
            top = fmaxf(top, fabsf(y[j][i]));
        }
        top = so_warp_max(top);
        /* frexpf and ldexpf by hand; the limits make numbers without leading one irrelevant */
        if (top > 0 && isfinite(top))
            e2 = (int)(__float_as_uint(top) >> 23) - 126;
        e2 = max(-100, min(100, 14 - e2));
        float up = __uint_as_float((uint32_t)(127 + e2) << 23);
        for (int i = 0; i < U * 2; i++) {
            int e = i * 32 + b.lane, u = e / 64, k = e % 64;
            char *unit = s->q + (col / 8 * U + u) * 1024 + k / 32 * 512;
            ((__half *)(unit + (col % 8 * 4 + k % 32 / 8) * 16))[k % 8] =
                __float2half_rn(__fmul_rn(y[j][i], up));
        }
        if (b.lane == 0) {
            s->m[col] = -INFINITY;
            s->l[col] = 0;
            s->down[col] = __uint_as_float((uint32_t)(127 - e2) << 23);
        }
    }
}

/* Scores, softmax and weighted values of a chunk in shared memory, for all rows or for row `only`. o: warp
 * w has dimensions 16 (w % 4U) … of column group w / 4U, and of w + 8 likewise. */
template <int U>
SO_DEVICE void compute_chunk(const block &b, const item &it, int window, int chunk, int only,
                             attn_shared<U> *s, float (*o)[4]) {
    int g = b.lane / 4, t = b.lane % 4;
    {
        int pw = b.warp % 4, cg = b.warp / 4;
        float acc[4] = {};
        for (int u = 0; u < U; u++) {
            uint32_t lo[8], hi[8], x[8];
            const uint4 *k = (const uint4 *)(s->keys + (pw * U + u) * 2048) + b.lane,
                        *q = (const uint4 *)(s->q + (cg * U + u) * 1024) + b.lane;
            for (int h = 0; h < 2; h++) {
                *(uint4 *)&lo[4 * h] = k[h * 32];
                *(uint4 *)&hi[4 * h] = k[(2 + h) * 32];
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
    sync_consumers();
#pragma unroll
    for (int j = 0; j < COLS / CONSUMERS; j++) {
        int col = b.warp + j * CONSUMERS, i = col / it.n_heads;
        if (col >= it.n_cols)
            continue;
        so_attn_row r = b.rows[it.row0 + i];
        int from = max(first_seen(window, r) - chunk * CHUNK, 0),
            to = min(r.pos + 1 - chunk * CHUNK, (int)CHUNK);
        bool on = from < to && (only < 0 || i == only);
        float m_c = 0, l_c = 0, a = 1, y = 0, m = s->m[col], l = s->l[col];
        float2 w = soften(s->scores + col * CHUNK, on ? from : 0, on ? to : 0, b.lane, &m_c, &l_c);
        s->p[col * P_STRIDE + b.lane] = __float2half_rn(w.x);
        s->p[col * P_STRIDE + b.lane + 32] = __float2half_rn(w.y);
        if (on)
            merge(m_c, l_c, &m, &l, &a, &y);
        __syncwarp();
        if (b.lane == 0) {
            s->m[col] = m;
            s->l[col] = l;
            s->a[col] = a;
            s->y[col] = on ? y : -1;
        }
    }
    sync_consumers();
#pragma unroll
    for (int i = 0; i < U; i++) {
        int id = b.warp + CONSUMERS * i, dg = id % (4 * U), cg = id / (4 * U);
        float part[4] = {};
        int piece = dg * 2 + b.lane / 8 % 2;
        for (int k = 0; k < CHUNK / 16; k++) {
            uint32_t a[4];
            int pos = k * 16 + b.lane % 8 + b.lane / 16 * 8;
            load_transposed(a, s->values + pos * U * 128 + (piece ^ (pos & 7)) * 16);
            const __half *w = s->p + (cg * 8 + g) * P_STRIDE + k * 16 + 2 * t;
            so_mma(part, a, *(const uint32_t *)w, *(const uint32_t *)(w + 8));
        }
        for (int e = 0; e < 4; e++) {
            int col = cg * 8 + 2 * t + e % 2;
            float x = s->a[col], y = s->y[col];
            if (y != -1)
                o[i][e] = __fmaf_rn(part[e], y, __fmul_rn(o[i][e], x));
        }
    }
    sync_consumers();
}

/* Whether a chunk's values hold NaN or infinity; the same in all consumers. */
template <int U> SO_DEVICE bool values_nonfinite(const attn_shared<U> *s) {
    bool bad = false;
    for (int i = threadIdx.x; i < CHUNK * U * 8; i += CONSUMERS * 32) {
        uint4 v = ((const uint4 *)s->values)[i];
        const uint32_t w[4] = {v.x, v.y, v.z, v.w};
        for (int j = 0; j < 4; j++)
            bad |= (w[j] & 0x7c00u) == 0x7c00u || (w[j] & 0x7c000000u) == 0x7c000000u;
    }
    int any;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.s32 p, %1, 0;\nbar.red.or.pred q, 3, 256, p;\n"
                 "selp.s32 %0, 1, 0, q;\n}"
                 : "=r"(any)
                 : "r"((int)bad)
                 : "memory");
    return any;
}

/* One running sum of the item's columns. */
template <int U>
SO_DEVICE void attend(const block &b, const so_persist_work &w, const item &it, attn_shared<U> *s) {
    constexpr int d = U * 64;
    int window = w.attention.window;
    item_sight v = sight_of_item(b, it, window);
    int c = it.split;
    if (c >= v.n_chunks)
        return;
    auto same_slots = [&](int c) { return v.same_to == INT32_MAX || (c + 1) * CHUNK <= v.same_to; };
    auto fetch = [&](int c, int i, bool exact) {
        so_attn_row r = b.rows[it.row0 + i];
        fetch_chunk<U>(b, w, r, it.kv, c * CHUNK,
                       (exact ? first_seen(window, r) : v.lowest) - c * CHUNK,
                       min(r.pos + 1 - c * CHUNK, (int)CHUNK), s);
    };
    while (c < v.n_chunks && (c + 1) * CHUNK <= v.lowest)
        c += SPLITS;
    bool ready = c < v.n_chunks && same_slots(c);
    float x[MINE][U * 2];
    if (ready) {
        fetch(c, v.longest, false);
        sync_consumers(); /* b.fresh */
    }
    bool again = read_queries<U>(b, w, it, x); /* under way while the new keys are read */
    if (ready)
        fill_fresh<U>(b, w, it, c * CHUNK, s);
    load_queries<U>(b, w, it, x, again, s);
    float o[U][4] = {};
    for (; c < v.n_chunks; c += SPLITS, ready = false) {
        bool together = same_slots(c);
        if (together) {
            if (!ready) {
                fetch(c, v.longest, false);
                sync_consumers();
                fill_fresh<U>(b, w, it, c * CHUNK, s);
            }
            so_copy_wait<0>();
            sync_consumers();
            /* a value that some rows do not see must not reach them, not even times zero */
            bool all_see = it.n_rows == 1 || (c * CHUNK >= v.first && (c + 1) * CHUNK <= v.last);
            together = all_see || !values_nonfinite<U>(s);
            if (together)
                compute_chunk<U>(b, it, window, c, -1, s, o);
        }
        for (int i = 0; i < it.n_rows && !together; i++) {
            sync_consumers(); /* the chunk before has been read */
            fetch(c, i, true);
            sync_consumers();
            fill_fresh<U>(b, w, it, c * CHUNK, s);
            so_copy_wait<0>();
            sync_consumers();
            compute_chunk<U>(b, it, window, c, i, s, o);
        }
    }
    sync_consumers(); /* m and l, if there was no chunk */
    auto sum_at = [&](int col) {
        return ((it.row0 + col / it.n_heads) * w.attention.n_heads + it.head0 + col % it.n_heads) *
                   SPLITS +
               it.split;
    };
    char *now = w.attention.parts.now, *next = w.attention.parts.next;
#pragma unroll
    for (int i = 0; i < U; i++) {
        int id = b.warp + CONSUMERS * i, dg = id % (4 * U), cg = id / (4 * U);
        for (int c2 = 0; c2 < 2; c2++) {
            int col = cg * 8 + b.lane % 4 * 2 + c2;
            if (col >= it.n_cols)
                continue;
            size_t at = ((size_t)sum_at(col) * d + dg * 16 + b.lane / 4) * 4;
            if (next) {
                write1(next + at, 0xffffffffu);
                write1(next + at + 32, 0xffffffffu);
            }
            write1(now + at, word_of(o[i][c2]));
            write1(now + at + 32, word_of(o[i][c2 + 2]));
        }
    }
    if ((int)threadIdx.x < it.n_cols)
        give_floats(w.attention.stats, (size_t)sum_at(threadIdx.x) * 8, s->m[threadIdx.x],
                    s->l[threadIdx.x]);
    sync_consumers(); /* shared memory is free */
}

/* Adds the running sums of one column; one warp. */
template <int U>
SO_DEVICE void merge_column(const block &b, const so_persist_work &w, int row, int head) {
    constexpr int d = U * 64, M = d / 32, TURN = 8;
    size_t at = ((size_t)row * w.attention.n_heads + head) * SPLITS;
    int n = min((int)SPLITS, (b.rows[row].pos + CHUNK) / CHUNK);
    const char *stat = w.attention.stats.now + (at + min(b.lane, n - 1)) * 8,
               *part = w.attention.parts.now + (at * d + b.lane * M) * 4;
    float weight = 0, l_i = 0, l = 0, o[M] = {};
    for (int s0 = 0; s0 < n; s0 += TURN) {
        uint32_t v[TURN][M];
        uint2 st;
        spin sp = {};
        bool again = true;
        while (again) {
            st = read2(stat);
#pragma unroll
            for (int i = 0; i < TURN; i++)
                read_floats<M>(part + (size_t)min(s0 + i, n - 1) * d * 4, v[i]);
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
    for (int j = 0; j < M; j += 2)
        give_halves(w.attention.out,
                    (size_t)row * w.attention.out_stride + (head * d + b.lane * M + j) * 2,
                    __fmul_rn(o[j], over), __fmul_rn(o[j + 1], over));
}

template <int U> SO_DEVICE void run_attention(const block &b, const so_persist_work &w) {
    attn_shared<U> *s = (attn_shared<U> *)b.x;
    int per = w.attention.n_heads / w.attention.n_heads_kv, rows_per = COLS / per,
        groups = (b.n + rows_per - 1) / rows_per, most = 0;
    for (int i = 0; i < b.n; i++)
        most = max(most, b.rows[i].pos);
    int splits = min((int)SPLITS, (most + CHUNK) / CHUNK);
    for (int i = blockIdx.x; i < groups * w.attention.n_heads_kv * splits; i += gridDim.x) {
        item it;
        it.split = i % splits;
        it.kv = i / splits % w.attention.n_heads_kv;
        it.row0 = i / splits / w.attention.n_heads_kv * rows_per;
        it.n_rows = min(rows_per, b.n - it.row0);
        it.head0 = it.kv * per;
        it.n_heads = per;
        it.n_cols = it.n_rows * per;
        attend<U>(b, w, it, s);
    }
    /* the last blocks first: they have no item if there are few */
    for (int col = gridDim.x - 1 - blockIdx.x + b.warp * gridDim.x; col < b.n * w.attention.n_heads;
         col += CONSUMERS * gridDim.x)
        merge_column<U>(b, w, col / w.attention.n_heads, col % w.attention.n_heads);
}

#endif

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

/* ---- items ----
 *
 * An item is one running sum of up to COLS columns of a KV head. A column is a query head of a row; columns
 * are numbered row by row, and an item may begin and end within a row. A block has the same items in all
 * layers whose window is the same, so they are described once (own_items). */

typedef struct item {
    int kv, split, n_cols, row0, n_rows;
    int n_chunks, longest; /* chunks up to the end of the longest row, and that row */
    int same_to;           /* up to here all rows see the same slots */
    int first, last;       /* the positions that all rows see */
    int lowest;            /* the first that one of them sees */
    int row[COLS], head[COLS], sum[COLS]; /* of a column; sum: number of its running sum */
} item;

enum { ITEMS = CONSUMERS };
typedef struct own_items {
    int window, from, n; /* item[k] is number from + k of the block's n items */
    int splits;          /* running sums of the longest row */
    item item[ITEMS];
} own_items;

SO_DEVICE int first_seen(int window, const so_attn_row &r) {
    return window > 0 ? max(0, r.pos - window + 1) : 0;
}

SO_DEVICE void find_sight(const block &b, int window, item *it) {
    int most = -1;
    it->same_to = it->last = it->lowest = INT32_MAX;
    it->first = 0;
    for (int i = it->row0; i < it->row0 + it->n_rows; i++) {
        so_attn_row r = b.rows[i];
        if (r.pos > most) {
            most = r.pos;
            it->longest = i;
        }
        if (r.page_off != b.rows[it->row0].page_off)
            it->same_to = 0;
        else if (r.n_prefix <= r.pos)
            it->same_to = min(it->same_to, r.n_prefix);
        it->first = max(it->first, first_seen(window, r));
        it->lowest = min(it->lowest, first_seen(window, r));
        it->last = min(it->last, r.pos + 1);
    }
    it->n_chunks = (most + CHUNK) / CHUNK;
    if (it->n_rows == 1)
        it->same_to = INT32_MAX;
}

/* Describes up to ITEMS of the block's items, from number `from` on; one warp for each. */
SO_DEVICE void find_items(const block &b, const so_persist_work &w, int from) {
    int n_heads = w.attention.n_heads, n_kv = w.attention.n_heads_kv, per = n_heads / n_kv,
        cols = b.n * per, most = 0;
    for (int i = 0; i < b.n; i++)
        most = max(most, b.rows[i].pos);
    int splits = min((int)SPLITS, (most + CHUNK) / CHUNK),
        all = (cols + COLS - 1) / COLS * n_kv * splits,
        own = (all - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
    sync_consumers(); /* the old ones have been read */
    if (threadIdx.x == 0) {
        b.items->window = w.attention.window;
        b.items->from = from;
        b.items->n = own;
        b.items->splits = splits;
    }
    if (from + b.warp < own) {
        item *it = &b.items->item[b.warp];
        int number = blockIdx.x + (from + b.warp) * gridDim.x, split = number % splits,
            kv = number / splits % n_kv, col0 = number / splits / n_kv * COLS,
            n_cols = min((int)COLS, cols - col0);
        if (b.lane < n_cols) {
            int row = (col0 + b.lane) / per, head = kv * per + (col0 + b.lane) % per;
            it->row[b.lane] = row;
            it->head[b.lane] = head;
            it->sum[b.lane] = (row * n_heads + head) * SPLITS + split;
        }
        if (b.lane == 0) {
            it->kv = kv;
            it->split = split;
            it->n_cols = n_cols;
            it->row0 = col0 / per;
            it->n_rows = (col0 + n_cols - 1) / per - it->row0 + 1;
            find_sight(b, w.attention.window, it);
        }
    }
    sync_consumers();
}

/* ---- keys and values ---- */

SO_DEVICE size_t entry_offset(const so_persist_work &w, int page, int place, int kv) {
    return ((((size_t)page * w.attention.n_cache_layers + w.attention.layer) *
                 w.attention.n_heads_kv +
             kv) *
                SO_KV_PAGE +
            place) *
           w.attention.entry;
}

/* A chunk to be computed: for all rows of an item together, or for one of them. */
typedef struct visit {
    int item, chunk; /* item: its number; -1: there is none */
    int i;           /* row it.row0 + i alone; -1: all rows */
} visit;

SO_DEVICE visit visit_of(const item &it, int number, int chunk) {
    return {number, chunk, (chunk + 1) * CHUNK <= it.same_to ? -1 : 0};
}

/* An item's first chunk; one without item if its rows see nothing of the running sum. */
SO_DEVICE visit first_visit(const item &it, int number) {
    int c = it.split;
    while (c < it.n_chunks && (c + 1) * CHUNK <= it.lowest)
        c += SPLITS;
    return c < it.n_chunks ? visit_of(it, number, c) : visit{-1, 0, 0};
}

/* What follows; one without item if it is not known yet. */
SO_DEVICE visit next_visit(const block &b, const item &it, const visit &v) {
    int next = v.item + 1;
    if (v.i >= 0 && v.i + 1 < it.n_rows)
        return {v.item, v.chunk, v.i + 1};
    if (v.chunk + SPLITS < it.n_chunks)
        return visit_of(it, v.item, v.chunk + SPLITS);
    if (next >= min(b.items->n, b.items->from + ITEMS))
        return {-1, 0, 0};
    return first_visit(b.items->item[next - b.items->from], next);
}

/* Slots are the same in all layers, so the first MEMOS visits of a block in a layer remember theirs, each
 * warp those of 8 positions. An entry is valid for the row, chunk and range that it was found for. */
enum { MEMOS = 10 };
typedef struct memo {
    int key[CONSUMERS], base[CONSUMERS];
    int slot
        [CHUNK]; /* page * SO_KV_PAGE + place; NOWHERE: not seen; FRESH - i: row i of this pass */
    int kv;
} memo;
enum { NOWHERE = -1, FRESH = -2 };

/* The slot of position `pos` as row r sees it. */
SO_DEVICE int find_slot(const block &b, const so_persist_work &w, const so_attn_row &r, int pos) {
    int at = pos < r.n_prefix ? pos : w.attention.tails[r.tail_off + pos - r.n_prefix],
        slot = w.attention.pages[r.page_off + at / SO_KV_PAGE] * SO_KV_PAGE + at % SO_KV_PAGE;
    if (pos > r.pos - b.n) /* a path has at most b.n new rows */
        for (int i = 0; i < b.n; i++)
            if (b.new_slots[i] == slot)
                return FRESH - i;
    return slot;
}

/* The slot of the thread's position in a visit's chunk; four threads have the same. turn: number of the visit in
 * this layer. */
SO_DEVICE int find_place(const block &b, const so_persist_work &w, const visit &v, int turn) {
    const item &it = b.items->item[v.item - b.items->from];
    int row = v.i < 0 ? it.longest : it.row0 + v.i, base = v.chunk * CHUNK;
    so_attn_row r = b.rows[row];
    int from = v.i < 0 ? it.lowest : first_seen(w.attention.window, r);
    from = min(max(from - base, 0), (int)CHUNK);
    int to = max(min(r.pos + 1 - base, (int)CHUNK), 0);
    int j = threadIdx.x / 4, key = row << 16 | from << 8 | to, slot = NOWHERE;
    memo *m = &b.memo[min(turn, (int)MEMOS - 1)];
    if (turn < MEMOS && m->key[b.warp] == key && m->base[b.warp] == base)
        return m->slot[j];
    if (j >= from && j < to)
        slot = find_slot(b, w, r, base + j);
    __syncwarp();
    if (turn < MEMOS) {
        m->slot[j] = slot;
        if (b.lane == 0) {
            m->key[b.warp] = key;
            m->base[b.warp] = base;
            m->kv = it.kv;
        }
    }
    return slot;
}

/* Notes which positions of a chunk are rows of this pass, which are not in the cache yet: b.fresh has the row
 * of such a position, -1 for the others. */
SO_DEVICE void note_fresh(const block &b, int slot) {
    if (threadIdx.x % 4 == 0)
        b.fresh[threadIdx.x / 4] = (int8_t)(slot <= FRESH ? FRESH - slot : -1);
}

/* Starts copying the keys of a chunk, as copy_chunk in attention.cu; four threads for a position. Rows of this
 * pass are left out, and what is not seen becomes zero. */
template <int U>
SO_DEVICE void fetch_keys(const block &b, const so_persist_work &w, int kv, int slot,
                          attn_shared<U> *s) {
    int j = threadIdx.x / 4, t = threadIdx.x % 4, n = slot == NOWHERE ? 0 : 16;
    if (slot >= NOWHERE) {
        const char *k =
            w.attention.k_cache +
            (n ? entry_offset(w, slot / SO_KV_PAGE, slot % SO_KV_PAGE, kv) + t * 16 : 0);
        char *to = s->keys + (j / 16 * U * 4 + j % 16 / 8 * 2) * 512 + (j % 8 * 4 + t) * 16;
#pragma unroll
        for (int c = 0; c < U * 2; c++)
            so_copy16(to + (c / 2 * 4 + c % 2) * 512, k + c * 64, n);
    }
    so_copy_commit();
}

/* The same for values. */
template <int U>
SO_DEVICE void fetch_values(const block &b, const so_persist_work &w, int kv, int slot,
                            attn_shared<U> *s) {
    int j = threadIdx.x / 4, t = threadIdx.x % 4, n = slot == NOWHERE ? 0 : 16;
    if (slot >= NOWHERE) {
        const char *v =
            w.attention.v_cache +
            (n ? entry_offset(w, slot / SO_KV_PAGE, slot % SO_KV_PAGE, kv) + t * 16 : 0);
        char *to = s->values + j * U * 128;
#pragma unroll
        for (int c = 0; c < U * 2; c++)
            so_copy16(to + ((c * 4 + t) ^ (j & 7)) * 16, v + c * 64, n);
    }
    so_copy_commit();
}

/* Prefetches the keys and values that this block will read into L2. Their slots are those of the layer before.
 * Called by the helper while the consumers still compute q, k and v. */
SO_DEVICE void prefetch_entries(const block &b, const so_persist_work &w) {
    for (int i = b.lane; i < MEMOS * CHUNK; i += 32) {
        const memo &m = b.memo[i / CHUNK];
        int slot = m.slot[i % CHUNK];
        if (m.key[i % CHUNK / 8] < 0 || slot < 0)
            continue;
        size_t at = entry_offset(w, slot / SO_KV_PAGE, slot % SO_KV_PAGE, m.kv);
        for (size_t e = 0; e < w.attention.entry; e += 128) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(w.attention.k_cache + at + e));
            asm volatile("prefetch.global.L2 [%0];" ::"l"(w.attention.v_cache + at + e));
        }
    }
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
 * position it is. The last warps come first, since the first ones have queries to load. */
template <int U>
SO_DEVICE void fill_fresh(const block &b, const so_persist_work &w, const item &it, int base,
                          attn_shared<U> *s) {
    constexpr int d = U * 64, M = d / 32;
    unsigned long long todo =
        __ballot_sync(0xffffffffu, b.fresh[b.lane] >= 0) |
        (unsigned long long)__ballot_sync(0xffffffffu, b.fresh[b.lane + 32] >= 0) << 32;
#pragma unroll 1
    for (int k = 0; todo; k++, todo &= todo - 1) {
        if (CONSUMERS - 1 - k % CONSUMERS != b.warp)
            continue;
        int j = __ffsll(todo) - 1, row = b.fresh[j], e = b.lane * M;
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

/* ---- queries ---- */

/* Starts reading a column's query: the lane's words of it. */
template <int U>
SO_DEVICE void read_query(const block &b, const so_persist_work &w, const item &it, int col,
                          uint32_t *x) {
    const char *q =
        head_at(w.attention.q, w.attention.n_heads, it.row[col], it.head[col], U * 64) + b.lane * 4;
#pragma unroll
    for (int i = 0; i < U * 2; i++)
        x[i] = read1(q + i * 128);
}

/* The query of a column, rotated and scaled as in attention.cu; one warp. x: the words that
 * read_query loaded; some may not have been handed over yet. */
template <int U>
SO_DEVICE void put_query(const block &b, const so_persist_work &w, const item &it, int col,
                         uint32_t *words, attn_shared<U> *s) {
    constexpr int d = U * 64;
    int e2 = 0;
    const float2 *table = (const float2 *)w.attention.table + (size_t)it.row[col] * (d / 2);
    bool halves = w.attention.halves;
    float x[U * 2], y[U * 2], top = 0;
    float2 t[U * 2];
#pragma unroll
    for (int i = 0; i < U * 2; i++)
        t[i] = table[halves ? (i * 32 + b.lane) % (d / 2) : (i * 32 + b.lane) / 2];
    spin sp = {};
    while (__any_sync(0xffffffffu, any_empty<U * 2>(words))) {
        read_query<U>(b, w, it, col, words);
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
    char *to = s->q + col / 8 * U * 1024 + (col % 8 * 4 + b.lane / 8) * 16 + b.lane % 8 * 2;
#pragma unroll
    for (int i = 0; i < U * 2; i++)
        *(__half *)(to + i * 512) = __float2half_rn(__fmul_rn(y[i], up));
    if (b.lane == 0) {
        s->m[col] = -INFINITY;
        s->l[col] = 0;
        s->down[col] = __uint_as_float((uint32_t)(127 - e2) << 23);
    }
}

/* Fills in what this pass has computed: the keys and values of a chunk's fresh positions and, with `queries`, the
 * item's queries. The queries are read first, so that both take one trip to L2. */
template <int U>
SO_DEVICE void fill_new(const block &b, const so_persist_work &w, const item &it, const visit &v,
                        bool queries, attn_shared<U> *s) {
    static_assert((int)COLS == 2 * (int)CONSUMERS, "a warp has two columns");
    uint32_t x[2][U * 2];
    bool has[2] = {queries && b.warp < it.n_cols, queries && b.warp + CONSUMERS < it.n_cols};
    for (int c = 0; c < 2; c++)
        if (has[c])
            read_query<U>(b, w, it, b.warp + c * CONSUMERS, x[c]);
    if (v.item >= 0)
        fill_fresh<U>(b, w, it, v.chunk * CHUNK, s);
    for (int c = 0; c < 2; c++)
        if (has[c])
            put_query<U>(b, w, it, b.warp + c * CONSUMERS, x[c], s);
}

/* ---- a chunk ---- */

/* Scores of a chunk: warp w has positions 16 (w % 4) … of column group w / 4. */
template <int U> SO_DEVICE void score_chunk(const block &b, const item &it, attn_shared<U> *s) {
    int g = b.lane / 4, t = b.lane % 4, pw = b.warp % 4, cg = b.warp / 4;
    if (cg * 8 >= it.n_cols)
        return;
    float acc[4] = {};
#pragma unroll
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

/* The weights of a chunk's positions for N of the warp's columns, for all rows or for row `only`. */
template <int U, int N>
SO_DEVICE void weigh_columns(const block &b, const item &it, int window, int base, int only,
                             attn_shared<U> *s) {
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

/* o += weighted values of a chunk. Warp w has dimensions 16 (w % 4U) … of column group w / 4U; if U is 2, of
 * the second group as well. */
template <int U>
SO_DEVICE void weigh_values(const block &b, const item &it, const attn_shared<U> *s,
                            float (*o)[4]) {
    int g = b.lane / 4, t = b.lane % 4, dg = b.warp % (4 * U), first = b.warp / (4 * U);
    int n = min(U, (it.n_cols + 7) / 8 - first);
    float part[U][4] = {};
    if (n <= 0)
        return;
#pragma unroll
    for (int k = 0; k < CHUNK / 16; k++) {
        uint32_t a[4];
        int pos = k * 16 + b.lane % 8 + b.lane / 16 * 8, piece = dg * 2 + b.lane / 8 % 2;
        load_transposed(a, s->values + pos * U * 128 + (piece ^ (pos & 7)) * 16);
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
            if (y != -1)
                o[i][e] = __fmaf_rn(part[i][e], y, __fmul_rn(o[i][e], x));
        }
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

/* What a block knows between two visits. */
typedef struct progress {
    int turn;   /* number of the next visit to be looked up in this layer */
    bool ahead; /* whether keys and values of the next visit are being copied */
} progress;

/* Looks up a visit's positions and starts copying its keys and values. */
template <int U>
SO_DEVICE void fetch_chunk(const block &b, const so_persist_work &w, const item &it, const visit &v,
                           progress *at, attn_shared<U> *s) {
    int slot = find_place(b, w, v, at->turn++);
    note_fresh(b, slot);
    fetch_keys<U>(b, w, it.kv, slot, s);
    fetch_values<U>(b, w, it.kv, slot, s);
    sync_consumers(); /* b.fresh */
}

/* Computes a chunk whose keys have arrived, while its values and then the chunk of the next visit are copied: each
 * buffer is filled again as soon as it has been read. */
template <int U>
SO_DEVICE void compute_chunk(const block &b, const so_persist_work &w, const item &it,
                             const visit &v, progress *at, attn_shared<U> *s, float (*o)[4]) {
    visit next = next_visit(b, it, v);
    int window = w.attention.window, base = v.chunk * CHUNK, only = v.i < 0 ? -1 : it.row0 + v.i,
        slot = FRESH, kv = 0;
    if (next.item >= 0) {
        slot = find_place(b, w, next, at->turn++);
        kv = b.items->item[next.item - b.items->from].kv;
    }
    score_chunk<U>(b, it, s);
    sync_consumers(); /* scores; the keys have been read */
    if (next.item >= 0) {
        note_fresh(b, slot);
        fetch_keys<U>(b, w, kv, slot, s);
    } else {
        so_copy_commit();
    }
    if (b.warp + CONSUMERS < it.n_cols)
        weigh_columns<U, 2>(b, it, window, base, only, s);
    else if (b.warp < it.n_cols)
        weigh_columns<U, 1>(b, it, window, base, only, s);
    so_copy_wait<1>(); /* values */
    sync_consumers();
    weigh_values<U>(b, it, s, o);
    sync_consumers(); /* the values have been read */
    if (next.item >= 0)
        fetch_values<U>(b, w, kv, slot, s);
    at->ahead = next.item >= 0;
}

/* Hands over one running sum of the item's columns. */
template <int U>
SO_DEVICE void give_sums(const block &b, const so_persist_work &w, const item &it,
                         const attn_shared<U> *s, const float (*o)[4]) {
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
    if ((int)threadIdx.x < it.n_cols)
        give_floats(w.attention.stats, (size_t)it.sum[threadIdx.x] * 8, s->m[threadIdx.x],
                    s->l[threadIdx.x]);
}

/* One running sum of the columns of item `number`. */
template <int U>
SO_DEVICE void attend(const block &b, const so_persist_work &w, int number, progress *at,
                      attn_shared<U> *s) {
    const item &it = b.items->item[number - b.items->from];
    if (it.split >= it.n_chunks)
        return;
    visit v = first_visit(it, number);
    bool loaded = false;
    float o[U][4] = {};
    do {
        if (v.item >= 0 && !at->ahead)
            fetch_chunk<U>(b, w, it, v, at, s);
        at->ahead = false;
        fill_new<U>(b, w, it, v, !loaded, s);
        loaded = true;
        so_copy_wait<1>(); /* keys */
        sync_consumers();
        if (v.item < 0) /* the rows' windows begin later */
            break;
        /* a value that some rows do not see must not reach them, not even times zero */
        int base = v.chunk * CHUNK;
        if (v.i < 0 && it.n_rows > 1 && (base < it.first || base + CHUNK > it.last)) {
            so_copy_wait<0>();
            sync_consumers();
            if (values_nonfinite<U>(s)) {
                v.i = 0;
                continue;
            }
        }
        compute_chunk<U>(b, w, it, v, at, s, o);
        v = next_visit(b, it, v);
    } while (v.item == number);
    give_sums<U>(b, w, it, s, o);
    sync_consumers(); /* shared memory is free */
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
template <int U> SO_DEVICE void merge_columns(const block &b, const so_persist_work &w) {
    constexpr int d = U * 64;
    int heads = w.attention.n_heads, each = b.items->splits > 8 ? d / 32 : 1;
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

template <int U> SO_DEVICE void run_attention(const block &b, const so_persist_work &w) {
    attn_shared<U> *s = (attn_shared<U> *)b.x;
    progress at = {};
    if (b.items->window != w.attention.window || b.items->from != 0)
        find_items(b, w, 0);
#pragma unroll 1
    for (int i = 0; i < b.items->n; i++) {
        if (i == b.items->from + ITEMS)
            find_items(b, w, i);
        attend<U>(b, w, i, &at, s);
    }
    merge_columns<U>(b, w);
}

#endif

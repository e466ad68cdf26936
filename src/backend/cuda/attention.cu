/* Attention over the paged cache.
 *
 * Logical positions are divided into chunks of 64; chunk c is part of running sum c mod 32. A thread
 * block computes running sums blockIdx.z, blockIdx.z + gridDim.z, … one after the other, for one KV head
 * and up to `rows_per` rows: up to 8 · NT columns, where a column is one query head of one row. Of the
 * blocks of the same columns, the last to finish merges the running sums, in order.
 *
 * Per chunk:
 *   1. keys and values of its positions are copied to shared memory. Rows that find them in the same
 *      slots (no branch of a token tree begins before the chunk's end) share the copy; otherwise the
 *      chunk is computed for one row after the other. The next chunk's keys are copied as soon as the
 *      scores are known, its values at the end, so that there is one place for each;
 *   2. scores q·k for all columns;
 *   3. one warp for each column: the largest score, exp, the sum of exp over the positions seen;
 *   4. p·v, merged into the running sum by m' = max(m, m_c), a = exp(m − m'), b = exp(m_c − m').
 * Step 3 leaves out the positions that a column does not see. Positions that no row sees are zero in
 * shared memory, so stale pages that hold NaN have no effect. If a chunk that not all rows see has
 * values that are not finite, it is computed for one row after the other.
 *
 * Two ways to compute 2 and 4:
 *   tensor   F16 caches with heads of a multiple of 8: mma.m16n8k16 with keys, then transposed values,
 *            as A. q · scale is multiplied by a power of two for each column, so that its largest
 *            magnitude is below 2^14, and rounded to fp16; p is rounded to fp16. Scores: one chain
 *            over the head's units of 64 (in the order of k of so_fmt); values: one chain over the
 *            64 positions.
 *   scalar   all others: float32, one chain over the head's elements, one over the positions. */
#include "backend/cuda/softmax.cuh"

enum { THREADS = 128 };

typedef struct attn_args {
    so_kv_store s;
    int layer, n, n_heads, window;
    int per, groups;         /* query heads for each KV head, and how many blocks share them */
    int rows_per, heads_per; /* rows and query heads of a block */
    const float *q;
    const so_attn_row *rows;
    const int32_t *pages, *tails;
    float scale;
    float *parts;      /* [row][head][SPLITS][head_dim] o, not yet divided by l */
    float2 *stats;     /* [row][head][SPLITS] m, l */
    unsigned *arrived; /* [blockIdx.x][blockIdx.y] */
    float *out;        /* or NULL */
    so_half_rows half;
} attn_args;

/* A query head of a row. Computed once per column: it takes divisions, which cost more than the attention
 * itself if they are repeated for each number. */
typedef struct column {
    int row;    /* in the block */
    int number; /* of all columns: row · n_heads + head */
} column;

/* The rows and columns of a thread block. */
typedef struct span {
    int row0, n_rows, kv, head0, n_heads, n_cols;
    const column *column; /* [n_cols], shared; see find_columns */
} span;

SO_DEVICE span span_of(const attn_args &p, const column *columns) {
    span b;
    b.kv = blockIdx.y / p.groups;
    int first = blockIdx.y % p.groups * p.heads_per;
    b.head0 = b.kv * p.per + first;
    b.n_heads = min(p.heads_per, p.per - first);
    b.row0 = blockIdx.x * p.rows_per;
    b.n_rows = min(p.rows_per, p.n - b.row0);
    b.n_cols = b.n_rows * b.n_heads;
    b.column = columns;
    return b;
}

/* Needs a barrier afterwards. */
SO_DEVICE void find_columns(const attn_args &p, const span &b, column *columns) {
    int col = threadIdx.x, row = col / b.n_heads;
    if (col < b.n_cols)
        columns[col] = {row, (b.row0 + row) * p.n_heads + b.head0 + col % b.n_heads};
}

SO_DEVICE so_attn_row row_of(const attn_args &p, int i) {
    int4 v = so_load((const int4 *)p.rows + i);
    return {v.x, v.y, v.z, v.w};
}

SO_DEVICE int first_seen(const attn_args &p, const so_attn_row &r) {
    return p.window > 0 ? max(0, r.pos - p.window + 1) : 0;
}

/* Byte offset of the entry of logical position `pos` of a row. */
SO_DEVICE size_t entry_of(const attn_args &p, const so_attn_row &r, int pos, int kv) {
    int slot = pos < r.n_prefix ? pos : so_load(p.tails + r.tail_off + pos - r.n_prefix);
    int page = so_load(p.pages + r.page_off + slot / SO_KV_PAGE);
    return ((((size_t)page * p.s.shape.n_layers + p.layer) * p.s.shape.n_heads_kv + kv) *
                SO_KV_PAGE +
            slot % SO_KV_PAGE) *
           p.s.entry;
}

/* Index of running sum `split` of a column, in parts and stats. */
SO_DEVICE size_t sum_of(const span &b, int col, int split) {
    return (size_t)b.column[col].number * SPLITS + split;
}

/* Merges the running sums of MERGED pairs of numbers: number i, i + THREADS, … of the block's columns (d is
 * even). Side by side, because each pair alone would wait for L2. factors, over: as merge_splits has them. */
enum { MERGED = 4 };
SO_DEVICE void merge_pairs(const attn_args &p, const span &b, const so_attn_row *rows, int i,
                           const float2 *factors, const float *over) {
    int d = p.s.shape.head_dim, n_all = 0, col[MERGED], e[MERGED], n[MERGED];
    const float2 *part[MERGED];
    float2 o[MERGED];
#pragma unroll
    for (int k = 0; k < MERGED; k++) {
        int at = min(i + k * THREADS, b.n_cols * (d / 2) - 1);
        col[k] = at / (d / 2);
        e[k] = at % (d / 2) * 2;
        n[k] = min(SPLITS, (rows[b.column[col[k]].row].pos + CHUNK) / CHUNK);
        n_all = max(n_all, n[k]);
        part[k] = (const float2 *)(p.parts + sum_of(b, col[k], 0) * d + e[k]);
        o[k] = {0, 0};
    }
    for (int s0 = 0; s0 < n_all; s0 += 8) {
        float2 v[MERGED][8];
#pragma unroll
        for (int s = 0; s < 8; s++)
#pragma unroll
            for (int k = 0; k < MERGED; k++)
                if (s0 + s < n[k])
                    v[k][s] = so_load(part[k] + (size_t)(s0 + s) * (d / 2));
#pragma unroll
        for (int s = 0; s < 8; s++)
#pragma unroll
            for (int k = 0; k < MERGED; k++)
                if (s0 + s < n[k]) {
                    float w = factors[col[k] * SPLITS + s0 + s].x;
                    o[k].x = __fmaf_rn(v[k][s].x, w, o[k].x);
                    o[k].y = __fmaf_rn(v[k][s].y, w, o[k].y);
                }
    }
#pragma unroll
    for (int k = 0; k < MERGED; k++) {
        if (i + k * THREADS >= b.n_cols * (d / 2))
            continue;
        column c = b.column[col[k]];
        int row = b.row0 + c.row;
        o[k] = make_float2(__fmul_rn(o[k].x, over[col[k]]), __fmul_rn(o[k].y, over[col[k]]));
        if (p.out)
            *(float2 *)(p.out + (size_t)c.number * d + e[k]) = o[k];
        so_put_half2(p.half, row, (c.number - row * p.n_heads) * d + e[k], o[k].x, o[k].y);
    }
}

/* Called by each block after it has written its running sums. The last of the min(gridDim.z, n_chunks)
 * blocks of the same columns merges them and writes the results. n_chunks: of the row with the largest
 * position. `shared`: memory that the block no longer needs. */
SO_DEVICE void merge_splits(const attn_args &p, const span &b, const so_attn_row *rows,
                            int n_chunks, char *shared) {
    __shared__ unsigned before;
    __threadfence();
    __syncthreads();
    unsigned *arrived = p.arrived + blockIdx.x * gridDim.y + blockIdx.y;
    if (threadIdx.x == 0)
        before = atomicAdd(arrived, 1);
    __syncthreads();
    if (before != min((int)gridDim.z, n_chunks) - 1)
        return;
    __threadfence();
    if (threadIdx.x == 0)
        *arrived = 0;
    int d = p.s.shape.head_dim, n_sums = min((int)SPLITS, n_chunks);
    float2 *factors = (float2 *)shared; /* [col][SPLITS]: (m, l); m is replaced by the weight */
    float *over = (float *)(factors + b.n_cols * SPLITS); /* 1 / l */
    for (int i = threadIdx.x; i < b.n_cols * n_sums; i += THREADS) {
        int col = i / n_sums, s = i % n_sums;
        factors[col * SPLITS + s] = so_load(p.stats + sum_of(b, col, s));
    }
    __syncthreads();
    for (int col = threadIdx.x; col < b.n_cols; col += THREADS) {
        int n = min(SPLITS, (rows[b.column[col].row].pos + CHUNK) / CHUNK);
        float2 *f = factors + col * SPLITS;
        float m = -INFINITY, l = 0;
        for (int s = 0; s < n; s++)
            m = isnan(f[s].x) || isnan(m) ? NAN : fmaxf(m, f[s].x);
        for (int s = 0; s < n; s++) {
            f[s].x = weight_of(f[s].x, m);
            l = __fmaf_rn(f[s].y, f[s].x, l);
        }
        over[col] = __fdiv_rn(1.0f, l);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < b.n_cols * (d / 2); i += MERGED * THREADS)
        merge_pairs(p, b, rows, i, factors, over);
}

/* ---- tensor cores, F16 caches ---- */

template <int NT> struct tensor_shape { static constexpr int cols = 8 * NT, p_stride = CHUNK + 8; };

/* Shared memory: [keys, values][64 positions][U · 128 bytes], q [cols][U · 128 bytes],
 * scores [cols][64] floats, p [cols][72] halves, stat [4][cols] floats. */
template <int NT> static size_t tensor_shared(int u) {
    typedef tensor_shape<NT> Z;
    return (size_t)2 * CHUNK * u * 128 + (size_t)Z::cols * u * 128 + Z::cols * CHUNK * 4 +
           Z::cols * Z::p_stride * 2 + 4 * Z::cols * 4;
}

/* The entry that a thread copies a part of: two threads have the same position of a chunk. */
typedef struct entry_ref {
    bool on;
    size_t at;
} entry_ref;

/* Of the chunk's positions from … to-1 as row r sees them; the others become zero. */
SO_DEVICE entry_ref find_entry(const attn_args &p, const so_attn_row &r, int kv, int base, int from,
                               int to) {
    int j = threadIdx.x / 2;
    bool on = j >= from && j < to;
    return {on, on ? entry_of(p, r, base + j, kv) : 0};
}

/* Keys are stored in the order in which lanes read them: lane (g, t) reads positions g and g + 8 of each
 * 16, 8 dimensions (16 bytes) of each half of a unit. */
template <int U> SO_DEVICE void copy_keys(const attn_args &p, const entry_ref &e, char *keys) {
    int j = threadIdx.x / 2, pieces = p.s.shape.head_dim / 8;
    for (int c = threadIdx.x % 2; c < U * 8; c += 2) {
        int n = e.on && c < pieces ? 16 : 0, u = c / 8, h = c % 8 / 4, t = c % 4;
        so_copy16(keys + ((((j / 16 * U + u) * 2 + j % 16 / 8) * 2 + h) * 32 + j % 8 * 4 + t) * 16,
                  p.s.k + (n ? e.at + (size_t)c * 16 : 0), n);
    }
    so_copy_commit();
}

/* Values are stored position by position, their 16-byte pieces permuted to avoid bank conflicts. */
template <int U> SO_DEVICE void copy_values(const attn_args &p, const entry_ref &e, char *values) {
    int j = threadIdx.x / 2, pieces = p.s.shape.head_dim / 8;
    for (int c = threadIdx.x % 2; c < U * 8; c += 2) {
        int n = e.on && c < pieces ? 16 : 0;
        so_copy16(values + j * U * 128 + (c ^ (j & 7)) * 16,
                  p.s.v + (n ? e.at + (size_t)c * 16 : 0), n);
    }
    so_copy_commit();
}

/* Whether a chunk's values hold NaN or infinity; the same in all threads. */
template <int U> SO_DEVICE bool has_nonfinite(const char *values) {
    bool bad = false;
    for (int i = threadIdx.x; i < CHUNK * U * 8; i += THREADS) {
        uint4 v = ((const uint4 *)values)[i];
        const uint32_t w[4] = {v.x, v.y, v.z, v.w};
        for (int j = 0; j < 4; j++)
            bad |= (w[j] & 0x7c00u) == 0x7c00u || (w[j] & 0x7c000000u) == 0x7c000000u;
    }
    return __syncthreads_or(bad);
}

/* What the rows of a block see together. */
typedef struct sight {
    int n_chunks;    /* of the row with the largest position */
    int longest;     /* that row */
    int same_to;     /* positions below are in the same slots for all rows */
    int first, last; /* positions first … last-1 are seen by all rows */
    int lowest;      /* no row sees a position below */
} sight;

/* One lane for each row; lanes without one repeat the last row. The same in all warps. */
SO_DEVICE sight sight_of(const attn_args &p, const span &b, const so_attn_row *rows) {
    const unsigned all = 0xffffffffu;
    so_attn_row r = rows[min((int)threadIdx.x % 32, b.n_rows - 1)];
    int most = __reduce_max_sync(all, r.pos), from = first_seen(p, r),
        same = r.page_off != rows[0].page_off ? 0
               : r.n_prefix <= r.pos          ? r.n_prefix
                                              : INT32_MAX;
    sight v;
    v.n_chunks = (most + CHUNK) / CHUNK;
    v.longest = __ffs(__ballot_sync(all, r.pos == most)) - 1;
    v.same_to = __reduce_min_sync(all, same);
    v.first = __reduce_max_sync(all, from);
    v.last = __reduce_min_sync(all, r.pos + 1);
    v.lowest = __reduce_min_sync(all, from);
    if (b.n_rows == 1)
        v.same_to = INT32_MAX;
    return v;
}

template <int NT, int U>
static __global__ void __launch_bounds__(THREADS, U > 2     ? 1
                                                  : NT == 1 ? 6
                                                  : NT == 2 ? 4
                                                            : 3)
    tensor(const __grid_constant__ attn_args p) {
    typedef tensor_shape<NT> Z;
    extern __shared__ __align__(128) char shared[];
    char *keys = shared, *values = keys + CHUNK * U * 128, *qs = values + CHUNK * U * 128;
    float *scores = (float *)(qs + Z::cols * U * 128);
    __half *ps = (__half *)(scores + Z::cols * CHUNK);
    float *stat = (float *)(ps + Z::cols * Z::p_stride); /* m, l, a, b of each column */
    float *q_down = stat + 3 * Z::cols;                  /* 2^-e2; overwritten by b */
    so_start_next();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int d = p.s.shape.head_dim;
    __shared__ so_attn_row rows[Z::cols];
    __shared__ column columns[Z::cols];
    span b = span_of(p, columns);
    static_assert(Z::cols <= 32, "sight_of has one lane for each row");
    if (threadIdx.x < b.n_rows)
        rows[threadIdx.x] = row_of(p, b.row0 + threadIdx.x);
    find_columns(p, b, columns);
    __syncthreads();
    sight v = sight_of(p, b, rows);
    if (blockIdx.z >= v.n_chunks)
        return;
    /* the entry of chunk c; exact: only what row i sees */
    auto entry = [&](int c, int i, bool exact) {
        so_attn_row r = rows[i];
        return find_entry(p, r, b.kv, c * CHUNK, (exact ? first_seen(p, r) : v.lowest) - c * CHUNK,
                          min(r.pos + 1 - c * CHUNK, CHUNK));
    };
    auto fetch = [&](const entry_ref &e) {
        copy_keys<U>(p, e, keys);
        copy_values<U>(p, e, values);
    };
    auto same_slots = [&](int c) { return v.same_to == INT32_MAX || (c + 1) * CHUNK <= v.same_to; };
    auto first_of = [&](int split) { /* the first chunk of a running sum that some row sees */
                                     int c = split;
                                     while (c < v.n_chunks && (c + 1) * CHUNK <= v.lowest)
                                         c += SPLITS;
                                     return c;
    };
    int c = first_of(blockIdx.z), n_splits = min(SPLITS, v.n_chunks);
    entry_ref start = {};
    if (c < v.n_chunks && same_slots(c))
        start = entry(c, v.longest, false);
    so_wait_prior();
    if (c < v.n_chunks && same_slots(c))
        fetch(start);

    /* queries, one warp for each column, in the order in which lanes read them */
    constexpr int MINE = Z::cols / (THREADS / 32);
    float x[MINE][U * 2];
#pragma unroll
    for (int j = 0; j < MINE; j++)
#pragma unroll
        for (int i = 0; i < U * 2; i++) {
            int col = warp + j * (THREADS / 32), e = i * 32 + lane;
            x[j][i] =
                col < b.n_cols && e < d ? so_load(p.q + (size_t)columns[col].number * d + e) : 0;
        }
#pragma unroll
    for (int j = 0; j < MINE; j++) {
        int col = warp + j * (THREADS / 32), e2 = 0;
        float top = 0;
        for (int i = 0; i < U * 2; i++) {
            x[j][i] = __fmul_rn(x[j][i], p.scale);
            top = fmaxf(top, fabsf(x[j][i]));
        }
        top = so_warp_max(top);
        if (top > 0 && isfinite(top))
            frexpf(top, &e2);
        e2 = max(-100, min(100, 14 - e2));
        for (int i = 0; i < U * 2; i++) {
            int e = i * 32 + lane, u = e / 64, k = e % 64;
            char *unit = qs + (col / 8 * U + u) * 1024 + k / 32 * 512;
            ((__half *)(unit + (col % 8 * 4 + k % 32 / 8) * 16))[k % 8] =
                __float2half_rn(__fmul_rn(x[j][i], ldexpf(1, e2)));
        }
        if (lane == 0) {
            stat[col] = -INFINITY;
            stat[Z::cols + col] = 0;
            q_down[col] = ldexpf(1, -e2);
        }
    }
    __syncthreads();
    float down[NT][2];
    for (int j = 0; j < NT; j++)
        for (int i = 0; i < 2; i++)
            down[j][i] = q_down[j * 8 + 2 * t + i];
    __syncthreads();

    float o[U][NT][4] = {}; /* dimensions 16 (warp + 4 i) …, columns */
    auto score = [&]() {
        float s[NT][4] = {}; /* warp w has positions 16 w … */
        for (int u = 0; u < U; u++) {
            uint32_t lo[8], hi[8]; /* positions g and g + 8 */
            for (int h = 0; h < 2; h++) {
                const uint4 *at = (const uint4 *)(keys + (warp * U + u) * 2048) + lane;
                *(uint4 *)&lo[4 * h] = at[h * 32];
                *(uint4 *)&hi[4 * h] = at[(2 + h) * 32];
            }
            for (int j = 0; j < NT; j++) {
                uint32_t x[8];
                for (int h = 0; h < 2; h++)
                    *(uint4 *)&x[4 * h] = ((const uint4 *)(qs + (j * U + u) * 1024))[h * 32 + lane];
                for (int k = 0; k < 4; k++) {
                    const uint32_t f[4] = {lo[2 * k], hi[2 * k], lo[2 * k + 1], hi[2 * k + 1]};
                    so_mma(s[j], f, x[2 * k], x[2 * k + 1]);
                }
            }
        }
        for (int j = 0; j < NT; j++)
            for (int i = 0; i < 4; i++)
                scores[(j * 8 + 2 * t + i % 2) * CHUNK + warp * 16 + g + i / 2 * 8] =
                    __fmul_rn(s[j][i], down[j][i % 2]);
    };
    auto weigh = [&](int chunk,
                     int only) { /* for all rows or for row `only` */
                                 bool on[MINE];
                                 int from[MINE], to[MINE];
                                 float2 w[MINE];
                                 float m_c[MINE], l_c[MINE];
#pragma unroll
                                 for (int j = 0; j < MINE; j++) {
                                     int col = warp + j * (THREADS / 32),
                                         i = columns[min(col, b.n_cols - 1)].row;
                                     so_attn_row r = rows[i];
                                     from[j] = max(first_seen(p, r) - chunk * CHUNK, 0);
                                     to[j] = min(r.pos + 1 - chunk * CHUNK, CHUNK);
                                     on[j] = col < b.n_cols && from[j] < to[j] &&
                                             (only < 0 || i == only);
                                     from[j] = on[j] ? from[j] : 0;
                                     to[j] = on[j] ? to[j] : 0;
                                 }
                                 soften_columns<MINE>(scores + warp * CHUNK, THREADS / 32 * CHUNK,
                                                      from, to, lane, w, m_c, l_c);
#pragma unroll
                                 for (int j = 0; j < MINE; j++) {
                                     int col = warp + j * (THREADS / 32);
                                     float a = 1, y = 0, m = stat[col], l = stat[Z::cols + col];
                                     ps[col * Z::p_stride + lane] = __float2half_rn(w[j].x);
                                     ps[col * Z::p_stride + lane + 32] = __float2half_rn(w[j].y);
                                     if (on[j])
                                         merge(m_c[j], l_c[j], &m, &l, &a, &y);
                                     __syncwarp();
                                     if (lane == 0) {
                                         stat[col] = m;
                                         stat[Z::cols + col] = l;
                                         stat[2 * Z::cols + col] = a;
                                         stat[3 * Z::cols + col] =
                                             on[j] ? y : -1; /* −1: this chunk adds nothing */
                                     }
                                 }
    };
    auto add = [&]() {
#pragma unroll
        for (int i = 0; i < U; i++) { /* warp w has dimensions 16 (w + 4 i) … */
            float part[NT][4] = {};
            int piece = (warp + 4 * i) * 2 + lane / 8 % 2;
            for (int k = 0; k < CHUNK / 16; k++) {
                uint32_t a[4];
                int pos = k * 16 + lane % 8 + lane / 16 * 8;
                load_transposed(a, values + pos * U * 128 + (piece ^ (pos & 7)) * 16);
                for (int j = 0; j < NT; j++) {
                    const __half *w = ps + (j * 8 + g) * Z::p_stride + k * 16 + 2 * t;
                    so_mma(part[j], a, *(const uint32_t *)w, *(const uint32_t *)(w + 8));
                }
            }
            for (int j = 0; j < NT; j++)
                for (int e = 0; e < 4; e++) {
                    int col = j * 8 + 2 * t + e % 2;
                    float x = stat[2 * Z::cols + col], y = stat[3 * Z::cols + col];
                    if (y != -1)
                        o[i][j][e] = __fmaf_rn(part[j][e], y, __fmul_rn(o[i][j][e], x));
                }
        }
    };
    for (int split = blockIdx.z; split < n_splits; split += gridDim.z) {
        int then = split + (int)gridDim.z < n_splits ? first_of(split + gridDim.z) : v.n_chunks;
        if (c >= v.n_chunks && then < v.n_chunks && same_slots(then))
            fetch(entry(then, v.longest, false)); /* nothing is seen of this sum */
        while (c < v.n_chunks) {
            int next = c + SPLITS < v.n_chunks ? c + SPLITS : then;
            bool together = same_slots(c), more = next < v.n_chunks && same_slots(next);
            if (together) { /* its keys and values are being copied */
                so_copy_wait<1>();
                __syncthreads();
                score();
                /* a value that some rows do not see must not reach them, not even times zero */
                bool all_see = b.n_rows == 1 || (c * CHUNK >= v.first && (c + 1) * CHUNK <= v.last);
                if (!all_see)
                    so_copy_wait<0>();
                __syncthreads();
                together = all_see || !has_nonfinite<U>(values);
            }
            if (together) {
                entry_ref e = {};
                if (more) {
                    e = entry(next, v.longest, false);
                    copy_keys<U>(p, e, keys);
                } else {
                    so_copy_commit(); /* so that the values are the last copy but one */
                }
                weigh(c, -1);
                so_copy_wait<1>();
                __syncthreads();
                add();
                __syncthreads();
                if (more)
                    copy_values<U>(p, e, values);
            } else {
                for (int i = 0; i < b.n_rows; i++) {
                    fetch(entry(c, i, true));
                    so_copy_wait<0>();
                    __syncthreads();
                    score();
                    __syncthreads();
                    weigh(c, i);
                    __syncthreads();
                    add();
                    __syncthreads();
                }
                if (more)
                    fetch(entry(next, v.longest, false));
            }
            c += SPLITS;
        }
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
                int col = j * 8 + 2 * t + k;
                float *part = p.parts + sum_of(b, min(col, b.n_cols - 1), split) * d;
#pragma unroll
                for (int i = 0; i < U; i++)
#pragma unroll
                    for (int e = k; e < 4; e += 2) {
                        int dim = (warp + 4 * i) * 16 + g + e / 2 * 8;
                        if (col < b.n_cols && dim < d)
                            part[dim] = o[i][j][e];
                        o[i][j][e] = 0;
                    }
            }
        for (int col = threadIdx.x; col < b.n_cols; col += THREADS) {
            p.stats[sum_of(b, col, split)] = make_float2(stat[col], stat[Z::cols + col]);
            stat[col] = -INFINITY;
            stat[Z::cols + col] = 0;
        }
        c = then;
    }
    merge_splits(p, b, rows, v.n_chunks, shared);
}

/* ---- float32, any cache ---- */

enum { GROUP = 8 }; /* query heads of a block; one row */

template <int T> SO_DEVICE float element(const char *entry, int i, int padded) {
    if (T == SO_DTYPE_F32)
        return ((const float *)entry)[i];
    if (T == SO_DTYPE_F16)
        return __half2float(((const __half *)entry)[i]);
    if (T == SO_DTYPE_BF16)
        return __uint_as_float((uint32_t)((const uint16_t *)entry)[i] << 16);
    return __fmul_rn(__half2float(((const __half *)(entry + padded))[i / 32]),
                     (float)((const int8_t *)entry)[i]);
}

static size_t scalar_shared(int d) {
    return ((size_t)CHUNK * (2 * d + 1) + GROUP * d + GROUP * CHUNK + 2 * GROUP) * sizeof(float) +
           CHUNK * sizeof(int64_t) + 8;
}

template <int T>
static __global__ void __launch_bounds__(THREADS) scalar(const __grid_constant__ attn_args p) {
    extern __shared__ __align__(128) char shared[];
    so_start_next();
    __shared__ column columns[GROUP];
    span b = span_of(p, columns);
    find_columns(p, b, columns);
    __syncthreads();
    int row = b.row0, d = p.s.shape.head_dim, padded = (d + 31) / 32 * 32, stride = d + 1;
    int64_t *where = (int64_t *)shared; /* byte offset of each position's entry */
    float *keys = (float *)(where + CHUNK), *values = keys + CHUNK * stride,
          *qs = values + CHUNK * d, *ps = qs + GROUP * d, *stat = ps + GROUP * CHUNK;
    so_wait_prior();
    so_attn_row r = row_of(p, row);
    int lo = first_seen(p, r), n_seen = r.pos + 1, n_chunks = (n_seen + CHUNK - 1) / CHUNK;
    if (blockIdx.z >= n_chunks)
        return;
    for (int i = threadIdx.x; i < b.n_heads * d; i += THREADS)
        qs[i] = __fmul_rn(so_load(p.q + ((size_t)row * p.n_heads + b.head0 + i / d) * d + i % d),
                          p.scale);
    float o[GROUP * 2], m[GROUP], l[GROUP]; /* this thread's elements e = threadIdx.x + 128 i */
    for (int h = 0; h < GROUP; h++) {
        o[h] = o[h + GROUP] = 0;
        m[h] = -INFINITY;
        l[h] = 0;
    }
    for (int c = blockIdx.z; c < n_chunks; c += SPLITS) {
        int base = c * CHUNK, from = max(lo - base, 0), to = min(n_seen - base, CHUNK);
        if (from >= to)
            continue;
        __syncthreads();
        for (int j = threadIdx.x; j < to; j += THREADS)
            where[j] = (int64_t)entry_of(p, r, base + j, b.kv);
        __syncthreads();
        for (int i = threadIdx.x; i < (to - from) * d; i += THREADS) {
            int j = from + i / d, e = i % d;
            keys[j * stride + e] = element<T>(p.s.k + where[j], e, padded);
            values[j * d + e] = element<T>(p.s.v + where[j], e, padded);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < b.n_heads * CHUNK; i += THREADS) {
            int j = i % CHUNK, h = i / CHUNK;
            if (j < from || j >= to)
                continue;
            float s = 0;
            for (int e = 0; e < d; e++)
                s = __fmaf_rn(qs[h * d + e], keys[j * stride + e], s);
            ps[h * CHUNK + j] = s;
        }
        __syncthreads();
        for (int h = threadIdx.x / 32; h < b.n_heads; h += THREADS / 32) {
            int lane = threadIdx.x % 32;
            float m_c, l_c;
            float2 w = soften(ps + h * CHUNK, from, to, lane, &m_c, &l_c);
            __syncwarp();
            ps[h * CHUNK + lane] = w.x;
            ps[h * CHUNK + lane + 32] = w.y;
            if (lane == 0) {
                stat[h] = m_c;
                stat[GROUP + h] = l_c;
            }
        }
        __syncthreads();
        float part[GROUP * 2];
        for (int h = 0; h < GROUP * 2; h++)
            part[h] = 0;
        for (int i = 0, e = threadIdx.x; e < d; e += THREADS, i++)
            for (int j = from; j < to; j++) {
                float v = values[j * d + e];
                for (int h = 0; h < b.n_heads; h++)
                    part[i * GROUP + h] = __fmaf_rn(ps[h * CHUNK + j], v, part[i * GROUP + h]);
            }
        for (int h = 0; h < b.n_heads; h++) {
            float x, y;
            merge(stat[h], stat[GROUP + h], &m[h], &l[h], &x, &y);
            for (int i = 0; i < 2; i++)
                o[i * GROUP + h] =
                    __fmaf_rn(part[i * GROUP + h], y, __fmul_rn(o[i * GROUP + h], x));
        }
    }
    for (int h = 0; h < b.n_heads; h++) {
        size_t at = sum_of(b, h, blockIdx.z);
        for (int i = 0, e = threadIdx.x; e < d; e += THREADS, i++)
            p.parts[at * d + e] = o[i * GROUP + h];
        if (threadIdx.x == 0)
            p.stats[at] = make_float2(m[h], l[h]);
    }
    merge_splits(p, b, &r, n_chunks, shared);
}

/* ---- launching ---- */

void so_cuda_scratch_need(const so_op *op, so_scratch *need) {
    need->counter_bytes = need->parts_bytes = 0;
    size_t n = (size_t)op->n;
    if (op->kind == SO_OP_ARGMAX)
        need->counter_bytes = n * (sizeof(unsigned long long) + sizeof(unsigned));
    if (op->kind != SO_OP_ATTENTION)
        return;
    size_t columns = n * (size_t)op->attention.n_heads;
    need->counter_bytes = columns * sizeof(unsigned);
    need->parts_bytes =
        columns * SPLITS * (size_t)(op->attention.store->shape.head_dim + 2) * sizeof(float);
}

/* False if it needs more shared memory than a block can have. */
template <int NT> static bool launch_tensor(const so_queue &q, attn_args p) {
    int per = p.per, u = (p.s.shape.head_dim + 63) / 64;
    if (tensor_shared<NT>(u) > (size_t)q.shared_block)
        return false;
    p.heads_per = per < 8 * NT ? per : 8 * NT;
    p.groups = (per + p.heads_per - 1) / p.heads_per;
    p.rows_per = 8 * NT / p.heads_per;
    dim3 grid((unsigned)((p.n + p.rows_per - 1) / p.rows_per),
              (unsigned)(p.s.shape.n_heads_kv * p.groups), SPLITS);
    /* Most of the 32 running sums of a short context are empty. With many rows a block computes several of
     * them, as long as there are enough blocks. */
    while (p.n > 16 && grid.z > 1 && grid.x * grid.y * grid.z / 2 >= 4u * (unsigned)q.n_sms)
        grid.z /= 2;
    so_launch(q,
              u == 1   ? tensor<NT, 1>
              : u == 2 ? tensor<NT, 2>
              : u == 3 ? tensor<NT, 3>
                       : tensor<NT, 4>,
              grid, THREADS, tensor_shared<NT>(u), p);
    return true;
}

static bool uses_tensor(const so_kv_shape *s) {
    return s->dtype == SO_DTYPE_F16 && s->head_dim % 8 == 0;
}

bool so_cuda_heads_fit(const so_kv_shape *s, int shared_block) {
    int d = s->head_dim;
    size_t need = uses_tensor(s) ? tensor_shared<1>((d + 63) / 64) : scalar_shared(d);
    return need <= (size_t)shared_block;
}

void so_cuda_attention(const so_queue &q, const so_op *op, so_half_rows half, bool keep,
                       const so_scratch *s) {
    const so_kv_store *st = op->attention.store;
    auto at = [](so_view v) { return v.buf->data + v.off; };
    attn_args p = {};
    p.s = *st;
    p.layer = op->attention.layer;
    p.n = op->n;
    p.n_heads = op->attention.n_heads;
    p.per = p.n_heads / st->shape.n_heads_kv;
    p.window = op->attention.window;
    p.q = (const float *)at(op->attention.q);
    p.rows = (const so_attn_row *)at(op->attention.rows);
    p.pages = (const int32_t *)at(op->attention.pages);
    p.tails = (const int32_t *)at(op->attention.tails);
    p.scale = op->attention.scale;
    p.arrived = (unsigned *)s->counters;
    p.stats = (float2 *)s->parts;
    p.parts = (float *)(p.stats + (size_t)op->n * (size_t)op->attention.n_heads * SPLITS);
    p.out = keep ? (float *)at(op->attention.out) : NULL;
    p.half = half;
    if (uses_tensor(&st->shape)) {
        /* few rows: many small blocks rather than few that share what they read */
        bool done = op->n > 64 && launch_tensor<4>(q, p);
        if (!done)
            done = op->n > 16 && launch_tensor<2>(q, p);
        if (!done)
            launch_tensor<1>(q, p);
        return;
    }
    p.rows_per = 1;
    p.heads_per = GROUP;
    p.groups = (p.per + GROUP - 1) / GROUP;
    dim3 grid((unsigned)op->n, (unsigned)(st->shape.n_heads_kv * p.groups), SPLITS);
    so_launch(q,
              st->shape.dtype == SO_DTYPE_F32    ? scalar<SO_DTYPE_F32>
              : st->shape.dtype == SO_DTYPE_F16  ? scalar<SO_DTYPE_F16>
              : st->shape.dtype == SO_DTYPE_BF16 ? scalar<SO_DTYPE_BF16>
                                                 : scalar<SO_DTYPE_Q8_0>,
              grid, THREADS, scalar_shared(st->shape.head_dim), p);
}

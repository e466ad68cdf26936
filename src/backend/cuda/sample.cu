/* SO_OP_SAMPLE: a token for each logits row, the one that the host would sample, or the weight of a guess.
 * The arithmetic is in backend/sample_row.h and base/exact.h, shared with the CPU.
 *
 *   cut    one block per row that has top-k or top-p: the border (the last token that the cuts keep).
 *          1. Count the tokens of each bin and add their masses. 2. Find the bin of the border by
 *          a prefix sum over the bins. 3. List the tokens of that bin. 4. Each token of the list
 *          counts, or adds, what comes before it; the one at the target is the border. Top-k first;
 *          its border then limits top-p.
 *   draw   SPLITS blocks per row: the largest y + noise of the tokens that are left, or the sum of
 *          weights; the block that ends last combines the parts.
 *
 * Results do not depend on the order in which threads run: counts and masses are integers, a list's
 * order is not used, and scores are compared with (score, token). What a kernel does with a row
 * depends on data in device memory, so one graph serves all sampler settings. */
#include "backend/cuda/device.cuh"
#include "backend/sample_row.h"

typedef unsigned long long u64;

enum { CUT_THREADS = 1024, PER_THREAD = SO_SAMPLE_BINS / CUT_THREADS };
enum { SPLITS = 32, DRAW_THREADS = 256 };
static_assert((int)SO_SAMPLE_LIST <= (int)SO_SAMPLE_BINS, "a list's masses use the bins' memory");
static_assert(sizeof(so_sample_row) % sizeof(u64) == 0, "view_of copies whole numbers");

typedef struct sample_args {
    so_sample_result *out;
    const float *x;
    const int32_t *best;
    const so_sample_row *rows;
    int d;
    so_sample_entry *borders;  /* [n] */
    so_sample_leader *leaders; /* [n][SPLITS] */
    u64 *masses;               /* [n] zero before and after */
    unsigned *arrived;         /* [n] the same */
} sample_args;

typedef struct cut_memory {
    u64 mass[SO_SAMPLE_BINS]; /* of a bin; at the end, of a token of the list */
    u64 sums[CUT_THREADS];
    unsigned count[SO_SAMPLE_BINS];
    so_sample_entry list[SO_SAMPLE_LIST];
    int n_list;
    int bin;    /* of the border */
    u64 before; /* count or mass of the bins before it */
    so_sample_entry border;
} cut_memory;

/* One row, as the threads of a block see it. */
typedef struct row_view {
    so_sample_row r;
    const float *x;
    int d;
    int32_t best;
    double top;
} row_view;

SO_DEVICE row_view view_of(const sample_args &a) {
    row_view v;
    u64 words[sizeof v.r / sizeof(u64)];
    for (size_t i = 0; i < sizeof v.r / sizeof(u64); i++)
        words[i] = so_load((const u64 *)(a.rows + blockIdx.x) + i);
    memcpy(&v.r, words, sizeof v.r);
    v.x = a.x + (size_t)blockIdx.x * a.d;
    v.d = a.d;
    v.best = so_load(a.best + blockIdx.x);
    v.top = v.best < 0 ? 0 : (double)so_load(v.x + v.best);
    return v;
}

SO_DEVICE so_sample_entry entry_of(const row_view &v, float x, int token) {
    so_sample_entry e = {so_exact_y(x, v.top, v.r.inverse), token};
    return e;
}

SO_DEVICE u64 units_of(so_sample_entry e) { return so_sample_units(so_exact_exp((double)e.y)); }

/* ---- cut ---- */

SO_DEVICE void fill_bins(const row_view &v, cut_memory *m) {
    for (int i = threadIdx.x; i < SO_SAMPLE_BINS; i += CUT_THREADS) {
        m->count[i] = 0;
        m->mass[i] = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < v.d; i += CUT_THREADS) {
        so_sample_entry e = entry_of(v, so_load(v.x + i), i);
        if (!(e.y > -INFINITY))
            continue;
        int bin = so_sample_bin(e.y);
        atomicAdd(&m->count[bin], 1u);
        u64 units = v.r.top_p < 1 ? units_of(e) : 0;
        if (units)
            atomicAdd(&m->mass[bin], units);
    }
    __syncthreads();
}

/* The sum of all bins; sums[t] becomes the sum of the bins of threads 0 … t. */
template <class T> SO_DEVICE u64 sum_bins(cut_memory *m, const T *bins) {
    u64 mine = 0;
    for (int i = 0; i < PER_THREAD; i++)
        mine += bins[threadIdx.x * PER_THREAD + i];
    m->sums[threadIdx.x] = mine;
    __syncthreads();
    for (int step = 1; step < CUT_THREADS; step *= 2) {
        u64 other = threadIdx.x >= step ? m->sums[threadIdx.x - step] : 0;
        __syncthreads();
        m->sums[threadIdx.x] += other;
        __syncthreads();
    }
    return m->sums[CUT_THREADS - 1];
}

/* After sum_bins: sets bin and before to the first bin at which the sum reaches the target; bin is −1 if
 * none does. */
template <class T> SO_DEVICE void find_bin(cut_memory *m, const T *bins, double target) {
    if (threadIdx.x == 0)
        m->bin = -1;
    __syncthreads();
    u64 before = threadIdx.x > 0 ? m->sums[threadIdx.x - 1] : 0;
    bool after_start = threadIdx.x == 0 || (double)before < target;
    if (after_start && (double)m->sums[threadIdx.x] >= target) {
        int i = threadIdx.x * PER_THREAD;
        while ((double)(before + bins[i]) < target) /* ends within the thread's bins */
            before += bins[i++];
        m->bin = i;
        m->before = before;
    }
    __syncthreads();
}

/* Lists the tokens of the bin up to the border so far, in any order. False: there are too many. */
SO_DEVICE bool list_bin(const row_view &v, cut_memory *m) {
    if (threadIdx.x == 0)
        m->n_list = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < v.d; i += CUT_THREADS) {
        so_sample_entry e = entry_of(v, so_load(v.x + i), i);
        if (!(e.y > -INFINITY) || so_sample_bin(e.y) != m->bin || so_sample_before(m->border, e))
            continue;
        int at = atomicAdd(&m->n_list, 1);
        if (at < SO_SAMPLE_LIST)
            m->list[at] = e;
    }
    __syncthreads();
    return m->n_list <= SO_SAMPLE_LIST;
}

/* top-k. The masses become those of the tokens that are left. False: unknown. */
SO_DEVICE bool cut_k(const row_view &v, cut_memory *m) {
    sum_bins(m, m->count);
    find_bin(m, m->count, (double)v.r.top_k);
    if (m->bin < 0)
        return true; /* fewer than k tokens have a finite y */
    if (!list_bin(v, m))
        return false;
    int n = m->n_list, need = v.r.top_k - (int)m->before;
    for (int i = m->bin + threadIdx.x; i < SO_SAMPLE_BINS; i += CUT_THREADS)
        m->mass[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += CUT_THREADS) {
        so_sample_entry e = m->list[i];
        int rank = 0;
        for (int j = 0; j < n; j++)
            rank += so_sample_before(m->list[j], e);
        if (rank == need - 1)
            m->border = e;
        if (rank < need && v.r.top_p < 1)
            atomicAdd(&m->mass[m->bin], units_of(e));
    }
    __syncthreads();
    return true;
}

/* top-p of the tokens up to the border so far. False: unknown. */
SO_DEVICE bool cut_p(const row_view &v, cut_memory *m) {
    __shared__ bool known;
    double total = (double)sum_bins(m, m->mass), target = so_exact_mul(v.r.top_p, total);
    find_bin(m, m->mass, target);
    if (m->bin < 0 || !list_bin(v, m))
        return false;
    int n = m->n_list;
    for (int i = threadIdx.x; i < n; i += CUT_THREADS)
        m->mass[i] = units_of(m->list[i]);
    if (threadIdx.x == 0)
        known = false;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += CUT_THREADS) {
        so_sample_entry e = m->list[i];
        u64 before = m->before;
        for (int j = 0; j < n; j++)
            before += so_sample_before(m->list[j], e) ? m->mass[j] : 0;
        double b = (double)before, after = (double)(before + m->mass[i]);
        if ((b < target || before == 0) && after >= target) { /* one token, or none */
            m->border = e;
            known = so_sample_is_certain(b, after, target, so_sample_margin(v.d, total));
        }
    }
    __syncthreads();
    return known;
}

static __global__ void __launch_bounds__(CUT_THREADS) cut(sample_args a) {
    extern __shared__ __align__(16) char memory[];
    cut_memory *m = (cut_memory *)memory;
    so_start_next();
    so_wait_prior();
    row_view v = view_of(a);
    if (v.best < 0 || !so_sample_has_border(&v.r, v.d)) {
        if (threadIdx.x == 0)
            a.borders[blockIdx.x] = so_sample_no_border();
        return;
    }
    if (threadIdx.x == 0)
        m->border = so_sample_no_border();
    fill_bins(v, m);
    bool known = !so_sample_cuts_k(&v.r, v.d) || cut_k(v, m);
    if (known && v.r.top_p < 1)
        known = cut_p(v, m);
    if (threadIdx.x != 0)
        return;
    so_sample_entry border = m->border;
    if (!known)
        border.token = SO_SAMPLE_UNKNOWN;
    a.borders[blockIdx.x] = border;
}

/* ---- draw ---- */

/* Calls f with tokens 4g … 4g+3 of the row and their logits, for the thread's groups g. */
template <class F> SO_DEVICE void for_groups(const row_view &v, F f) {
    bool aligned = ((uintptr_t)v.x & 15) == 0;
    for (int i = 4 * (blockIdx.y * DRAW_THREADS + threadIdx.x); i < v.d;
         i += 4 * SPLITS * DRAW_THREADS) {
        float x[4];
        int n = v.d - i < 4 ? v.d - i : 4;
        if (n == 4 && aligned) {
            float4 q = so_load((const float4 *)(v.x + i));
            x[0] = q.x, x[1] = q.y, x[2] = q.z, x[3] = q.w;
        } else {
            for (int k = 0; k < n; k++)
                x[k] = so_load(v.x + i + k);
        }
        f(i, n, x);
    }
}

/* True in thread 0 of the block of this row that ends last; the others' parts are visible to it. */
SO_DEVICE bool ends_last(const sample_args &a) {
    __threadfence();
    if (atomicAdd(a.arrived + blockIdx.x, 1u) != SPLITS - 1)
        return false;
    __threadfence();
    a.arrived[blockIdx.x] = 0;
    return true;
}

SO_DEVICE void draw_mass(const sample_args &a, const row_view &v) {
    __shared__ u64 warps[DRAW_THREADS / 32];
    u64 sum = 0;
    for_groups(v, [&](int i, int n, const float *x) {
        for (int k = 0; k < n; k++) {
            float w = (float)so_exact_exp((double)entry_of(v, x[k], i + k).y);
            sum += so_sample_units((double)w);
        }
    });
    for (int w = 16; w; w >>= 1)
        sum += __shfl_xor_sync(0xffffffffu, sum, w);
    if (threadIdx.x % 32 == 0)
        warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    for (int i = 1; i < DRAW_THREADS / 32; i++)
        sum += warps[i];
    atomicAdd(a.masses + blockIdx.x, sum);
    if (!ends_last(a))
        return;
    sum = atomicExch(a.masses + blockIdx.x, 0ull);
    so_sample_result r = {v.r.guess >= 0 ? SO_SAMPLE_UNKNOWN : v.best, (float)v.top,
                          so_load(v.x + so_sample_weighed(&v.r, v.best)), so_sample_mass(sum, v.d)};
    a.out[blockIdx.x] = r;
}

SO_DEVICE void draw_token(const sample_args &a, const row_view &v, so_sample_entry border) {
    __shared__ so_sample_leader warps[DRAW_THREADS / 32];
    so_sample_leader l = so_sample_first(&v.r, v.best);
    for_groups(v, [&](int i, int n, const float *x) {
        so_sample_entry e[4];
        bool any = false;
        for (int k = 0; k < n; k++) {
            e[k] = entry_of(v, x[k], i + k);
            any |= so_sample_may_win(e[k].y, l);
        }
        if (!any)
            return;
        uint32_t words[4];
        so_rng_block(&v.r.key, (uint32_t)i / 4, words);
        for (int k = 0; k < n; k++)
            if (so_sample_keeps(&v.r, border, e[k]))
                so_sample_challenge(&l, e[k], words[k]);
    });
    for (int w = 16; w; w >>= 1) {
        so_sample_leader o = {__shfl_xor_sync(0xffffffffu, l.score, w),
                              __shfl_xor_sync(0xffffffffu, l.token, w)};
        l = so_sample_beats(o, l) ? o : l;
    }
    if (threadIdx.x % 32 == 0)
        warps[threadIdx.x / 32] = l;
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    for (int i = 1; i < DRAW_THREADS / 32; i++)
        l = so_sample_beats(warps[i], l) ? warps[i] : l;
    so_sample_leader *parts = a.leaders + (size_t)blockIdx.x * SPLITS;
    parts[blockIdx.y] = l;
    if (!ends_last(a))
        return;
    for (int i = 0; i < SPLITS; i++) {
        so_sample_leader o = {so_load(&parts[i].score), so_load(&parts[i].token)};
        l = so_sample_beats(o, l) ? o : l;
    }
    so_sample_result r = {l.token, 0, 0, 0};
    a.out[blockIdx.x] = r;
}

static __global__ void __launch_bounds__(DRAW_THREADS) draw(sample_args a) {
    so_start_next();
    so_wait_prior();
    row_view v = view_of(a);
    so_sample_entry border = {so_load(&a.borders[blockIdx.x].y),
                              so_load(&a.borders[blockIdx.x].token)};
    bool is_greedy = v.best < 0 || v.r.inverse == 0;
    if (!is_greedy && so_sample_weighs(&v.r)) {
        draw_mass(a, v);
    } else if (!is_greedy && border.token != SO_SAMPLE_UNKNOWN) {
        draw_token(a, v, border);
    } else if (blockIdx.y == 0 && threadIdx.x == 0) {
        so_sample_result r = {is_greedy ? v.best : SO_SAMPLE_UNKNOWN, 0, 0, 0};
        a.out[blockIdx.x] = r;
    }
}

/* ---- launching ---- */

void so_cuda_sample_need(const so_op *op, so_scratch *need) {
    size_t n = op->kind == SO_OP_SAMPLE ? (size_t)op->n : 0;
    need->counter_bytes = n * (sizeof(u64) + sizeof(unsigned));
    need->parts_bytes = n * (SPLITS * sizeof(so_sample_leader) + sizeof(so_sample_entry));
}

void so_cuda_sample(const so_queue &q, const so_op *op, const so_scratch *s) {
    unsigned n = (unsigned)op->n;
    sample_args a = {(so_sample_result *)(op->sample.out.buf->data + op->sample.out.off),
                     (const float *)(op->sample.x.buf->data + op->sample.x.off),
                     (const int32_t *)(op->sample.best.buf->data + op->sample.best.off),
                     (const so_sample_row *)(op->sample.rows.buf->data + op->sample.rows.off),
                     op->sample.d,
                     NULL,
                     (so_sample_leader *)s->parts,
                     (u64 *)s->counters,
                     (unsigned *)((u64 *)s->counters + n)};
    a.borders = (so_sample_entry *)(a.leaders + (size_t)n * SPLITS);
    so_launch(q, cut, dim3(n), CUT_THREADS, sizeof(cut_memory), a);
    so_launch(q, draw, dim3(n, SPLITS), DRAW_THREADS, 0, a);
}

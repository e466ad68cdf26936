/* The persistent kernel, which persist.cu explains, as a template over the formats of weights: each file that
 * includes this compiles one set of them. */
#ifndef SO_BACKEND_CUDA_PERSIST_KERNEL_CUH
#define SO_BACKEND_CUDA_PERSIST_KERNEL_CUH

#include "backend/cuda/persist_chains.cuh"
#include "backend/cuda/persist_producer.cuh"
#include "backend/cuda/persist_product.cuh"
#include "backend/cuda/persist_trees.cuh"

static_assert(sizeof(attn_shared<2>) <= CONSUMERS * x_bytes(1), "attention uses the memory of b.x");

static_assert((int)SPLITS == (int)SO_PERSIST_SPLITS, "the plan allots memory for the running sums");

/* ---- the helper ---- */

/* The scale of a row, when its sums of squares have been handed over. */
SO_DEVICE float find_scale(const block &b, const so_persist_work &w, int row) {
    int d = w.product.m[0].k, n = d / SO_TILE;
    const char *squares = w.product.squares + ((size_t)row * n + b.lane) * 4;
    uint32_t v[SO_PERSIST_SQUARES];
    bool again;
    spin sp = {};
    do {
        again = false;
#pragma unroll
        for (int j = 0; j < SO_PERSIST_SQUARES; j++)
            v[j] = j * 32 + b.lane < n ? read1(squares + j * 128) : 0;
#pragma unroll
        for (int j = 0; j < SO_PERSIST_SQUARES; j++)
            again |= v[j] == 0xffffffffu;
        spin_once(&sp);
    } while (__any_sync(0xffffffffu, again));
    float s = 0;
#pragma unroll
    for (int j = 0; j < SO_PERSIST_SQUARES; j++)
        if (j * 32 + b.lane < n)
            s = __fadd_rn(s, __uint_as_float(v[j]));
    return __frsqrt_rn(__fadd_rn(__fdiv_rn(so_warp_sum(s), (float)d), w.product.eps));
}

/* Row scales of a product. One block finds the scale of a row for all others. */
SO_DEVICE void scale_rows(const block &b, const so_persist_work &w, float *scale) {
    int own = gridDim.x - 1 - blockIdx.x;
    if (own < b.n) {
        float s = find_scale(b, w, own);
        if (b.lane == 0)
            give_float(w.product.scales, own * 4, s);
    }
    if (tiles_of_all(w) == 0)
        return;
    spin sp = {};
    uint32_t v = 0;
    while (b.lane < b.n && (v = read1(w.product.scales.now + b.lane * 4)) == 0xffffffffu)
        spin_once(&sp);
    if (b.lane < b.n)
        scale[b.lane] = __uint_as_float(v);
}

SO_DEVICE void copy_work(const so_persist_work *from, so_persist_work *to, int lane) {
    for (int i = lane; i < (int)(sizeof *to / 4); i += 32)
        ((uint32_t *)to)[i] = ((const uint32_t *)from)[i];
}

/* Fetches what the results of a product need besides the sums. */
SO_DEVICE void fetch_ahead(const block &b, const so_persist_work &w, ahead *h) {
    int tile0 = 0;
    for (int i = 0; i < w.n_matrices; i++) {
        const so_persist_matrix &m = w.product.m[i];
        int tiles = tiles_of(m), first = first_of(m);
        for (int j = b.lane; j < tiles * SO_TILE; j += 32) {
            h->factor[tile0 * SO_TILE + j] = m.factor[first * SO_TILE + j];
            if (m.bias)
                h->bias[tile0 * SO_TILE + j] = m.bias[first * SO_TILE + j];
        }
        tile0 += tiles;
    }
    if (w.kind != SO_PERSIST_ADD)
        return;
    int first = first_of(w.product.m[0]), width = w.product.m[0].layout.n_tiles * SO_TILE;
    for (int j = b.lane; j < tile0 * SO_TILE; j += 32) {
        if (w.product.norm)
            h->norm[j] = w.product.norm[first * SO_TILE + j];
        if (w.product.first)
#pragma unroll 4
            for (int row = 0; row < b.n; row++)
                b.residual->of[row][j] =
                    so_load(w.product.residual + (size_t)row * width + first * SO_TILE + j);
    }
}

/* What the helper has fetched so far. */
typedef struct fetched {
    int n_works;          /* whose arguments are there */
    int n_products, work; /* products whose numbers are there; the work after them */
} fetched;

SO_DEVICE void fetch_works(const persist_args &p, const block &b, fetched *f, int n) {
    so_persist_work *args = (so_persist_work *)b.args;
    for (; f->n_works < min(n, p.n_works); f->n_works++)
        copy_work(p.works + f->n_works, &args[f->n_works % ARGS], b.lane);
    __syncwarp();
}

/* Fetches the numbers that the products before number n need (fetch_ahead). */
SO_DEVICE void fetch_products(const persist_args &p, const block &b, fetched *f, int n) {
    for (; f->n_products < n && f->work < p.n_works; f->work++) {
        fetch_works(p, b, f, f->work + 1);
        const so_persist_work &w = b.args[f->work % ARGS];
        if (w.kind == SO_PERSIST_ATTENTION)
            continue;
        if (tiles_of_all(w) > 0)
            fetch_ahead(b, w, &b.ahead_of[f->n_products % AHEAD]);
        f->n_products++;
    }
}

/* The consumers meet the helper before they finish a product, so what can wait comes afterwards: it fetches
 * further ahead while they finish. They have then left the product before, whose memory it uses. */
SO_DEVICE void help(const persist_args &p, block &b) {
    fetched f = {};
    if (b.lane == 0)
        b.items->window = b.items->from = -1;
    __syncwarp();
    if (*b.n_listed == 0) { /* the pass has no trees */
        int n = list_chunks(p, b);
        if (b.lane == 0)
            *b.n_listed = n;
    }
    give_list();
    static_assert((int)ARGS >= 2 * (int)AHEAD, "an attention may follow each product");
    fetch_products(p, b, &f, 1);
    fetch_works(p, b, &f, 3);
    for (int i = 0; i < p.n_works; i++) {
        const so_persist_work &w = b.args[i % ARGS];
        if (w.kind == SO_PERSIST_ATTENTION)
            continue;
        int number = w.number;
        if (w.kind == SO_PERSIST_QKV)
            prefetch_entries(b, b.args[(i + 1) % ARGS]);
        if (w.product.squares)
            scale_rows(b, w, b.ahead_of[number % AHEAD].scale);
        sync_helper();
        fetch_products(p, b, &f, number + AHEAD);
    }
}

/* ---- the kernel ---- */

typedef struct __align__(1024) control {
    so_persist_work args[ARGS];
    unsigned long long full[MAX_SLOTS], empty[MAX_SLOTS];
    so_attn_row rows[SO_PERSIST_ROWS];
    ahead ahead_of[AHEAD];
    struct residual residual;
    int new_slots[SO_PERSIST_ROWS];
    int8_t new_row[CHUNK];
    memo memos[MEMOS];
    own_items items;
    listed list[LISTED];
    int n_listed;
    int multiplying;
    int work_at[CONSUMERS]; /* the work that a consumer warp is at */
}
control;

/* A block's memory, at constant addresses, which need no registers; only the ring may begin later. b.x comes first:
 * feed_place. */
template <int NT> SO_DEVICE control *find_memory(block *b) {
    extern __shared__ __align__(1024) char shared[];
    control *c = (control *)(shared + CONSUMERS * x_bytes(NT));
    b->x = shared;
    b->side = (char *)(c + 1);
    b->ahead_of = c->ahead_of;
    b->residual = &c->residual;
    b->args = c->args;
    b->rows = c->rows;
    b->new_slots = c->new_slots;
    b->new_row = c->new_row;
    b->memo = c->memos;
    b->items = &c->items;
    b->list = c->list;
    b->n_listed = &c->n_listed;
    return c;
}

SO_DEVICE void find_warp(block *b) {
    int thread = thread_again();
    b->warp = __shfl_sync(0xffffffffu, thread / 32, 0);
    b->lane = thread % 32;
}

/* Attention over the listed chunks. Inlined, because it moves the block on in the ring. It works on a copy of the
 * block whose warp and lane are read again: kept through the products, what depends on them would push their sums
 * out of the registers. */
template <int U> SO_DEVICE void attend_here(block &b, const so_persist_work &w) {
    block a = b;
    find_warp(&a);
    a.r.warp = a.warp;
    a.r.lane = a.lane;
    attend_listed<U>(a, w);
    b.r.slot = a.r.slot;
    b.r.phase = a.r.phase;
}

/* Attention in passes with token trees. A function that is called, for the sake of the same registers. */
template <int NT, int U>
static __device__ __noinline__ void attend_trees(const so_persist_work *w, int n) {
    block b;
    find_memory<NT>(&b);
    find_warp(&b);
    b.n = n;
    run_attention<U>(b, *w);
}

SO_DEVICE void next_work(volatile int *at, int lane) {
    __syncwarp();
    if (lane == 0)
        *at = *at + 1;
    __syncwarp();
}

template <int NT, int U, int SET>
static __global__ void __launch_bounds__(N_THREADS, 1)
    persist(const __grid_constant__ persist_args p, const so_attn_row *rows,
            const so_kv_slot *slots) {
#if __CUDA_ARCH__ >= 900 /* not used on older ones: so_queue.persist */
    block b;
    control *c = find_memory<NT>(&b);
    char *ring = one_format(SET) ? b.side : b.side + p.side_bytes;
    b.n = p.n;
    b.warp = __shfl_sync(0xffffffffu, threadIdx.x / 32,
                         0); /* the compiler then knows that all lanes have the same */
    b.lane = threadIdx.x % 32;
    b.r = {ring,
           address_of(&c->multiplying),
           address_of(c->full),
           address_of(c->empty),
           p.n_slots,
           0,
           b.warp,
           b.lane,
           0};
    if (threadIdx.x == 0) {
        c->multiplying = false;
        for (int i = 0; i < p.n_slots; i++) {
            bar_init(b.r.full + 8 * i, 1);
            bar_init(b.r.empty + 8 * i, CONSUMERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (rows && (int)threadIdx.x < p.n) {
        c->rows[threadIdx.x] = rows[threadIdx.x];
        c->new_slots[threadIdx.x] = slots[threadIdx.x].page * SO_KV_PAGE + slots[threadIdx.x].place;
    }
    for (int i = threadIdx.x; i < MEMOS * CONSUMERS; i += N_THREADS)
        c->memos[i / CONSUMERS].key[i % CONSUMERS] = -1;
    if (b.warp == HELPER)
        copy_work(p.works, c->args, b.lane);
    bool chain = !rows || (int)threadIdx.x >= p.n ||
                 c->rows[threadIdx.x].n_prefix > c->rows[threadIdx.x].pos;
    chain = __syncthreads_and(chain) && rows && p.cache.boxes;
    if (threadIdx.x == HELPER * 32)
        c->n_listed = chain ? 0 : -1;
    if (b.warp == PRODUCER) {
        produce<SET == SET_F16  ? (int)SO_FMT_F16
                : SET == SET_Q4 ? (int)SO_FMT_Q4_32_OFF
                                : -1>(p, b);
    } else if (b.warp == HELPER) {
        help(p, b);
    } else {
        /* counted in shared memory: a register for it would be spilled */
        volatile int *at = &c->work_at[b.warp];
#pragma unroll 1
        for (*at = 0; *at < p.n_works; next_work(at, b.lane)) {
            const so_persist_work &w = b.args[*at % ARGS];
            if (w.kind != SO_PERSIST_ATTENTION)
                run_product<NT, SET>(p, b, w);
            else if (*b.n_listed >= 0)
                attend_here<U>(b, w);
            else
                attend_trees<NT, U>(&w, p.n);
        }
    }
#endif
}

template <int SET> static so_persist_kernel kernel_of(int n, int head_dim) {
    if (n <= 8)
        return head_dim == 64 ? persist<1, 1, SET> : persist<1, 2, SET>;
    return head_dim == 64 ? persist<2, 1, SET> : persist<2, 2, SET>;
}

#endif

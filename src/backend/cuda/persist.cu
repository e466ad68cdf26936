/* The layers of a pass over up to 16 rows in one persistent kernel, and the logits of 5 to 16 rows in
 * another launch of it.
 *
 * One thread block per multiprocessor stays for all layers. A block owns a fixed set of tiles of each matrix
 * (so_layout), so its weights are a fixed sequence that does not depend on any result: one warp (the
 * producer) copies it into a ring in shared memory and never stops at the end of an operation, while
 * eight warps (the consumers) compute. A tenth warp (the helper) finds row scales, fetches the next works'
 * arguments, and brings keys and values into L2.
 *
 *   product     Consumer warp s computes segment s of all tiles of the block: one tile as the B operand of
 *               mma, the rows as A. The eight sums of each output are added through shared memory.
 *   attention   An item is a KV head, up to 16 columns (query heads of rows) and a running sum; items are
 *               dealt to the blocks. Rope of q and of the new keys is computed where they are read. A block
 *               that has a row's own position stores its key and value. Then one warp per column merges the
 *               running sums.
 *
 * Speed: the consumers must compute faster than weights arrive, so that they catch up after each exchange, and
 * the work between two products must be short. Both are limited by the number of instructions, since only two
 * warps share a scheduler (docs/log/4-gpu.md, 46).
 *
 * The results are bit-identical to those of the kernels in matmul.cu, attention.cu and ops.cu: the same
 * sums in the same order (device.cuh).
 *
 * HANDING OVER. Blocks exchange data through global memory without barriers. A word is empty (all ones, a
 * NaN that no conversion or arithmetic produces) until its value is written, and readers poll the word
 * itself. Each buffer exists twice, for even and odd layers. The thread that writes a word in layer l first
 * makes its twin empty, for layer l + 1. That is safe for two reasons:
 *
 *   - nobody still reads the twin, which holds layer l - 1. A block reads words only if it computes something
 *     from them that others need (results of its tiles, items, columns, or the scale of a row), and the
 *     results of layer l that a writer has read depend, through attention and both additions, on all results
 *     of layer l - 1;
 *   - nobody reads the twin of layer l + 1 before it has been made empty: a reader of layer l + 1 has read
 *     words of layer l, or results that depend on them, which were written after it. No fence orders the
 *     two writes, so this relies on the first one being visible about a microsecond later, which holds on the
 *     GPUs tried and is not promised by the memory model. Usually an exchange lies between; for a block
 *     without tiles only the helper's loop does.
 *
 * Before the kernel the twins that the first layer uses are made empty.
 *
 * All blocks must run at the same time, so the kernel is launched cooperatively. A poll that lasts
 * SPIN_NS ends the kernel with a trap, which the host sees as a failed device. */
#include "backend/cuda/persist_attention.cuh"
#include "backend/cuda/persist_product.cuh"

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

/* Row scales of a product. One block computes the scale of a row for all others. */
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
    __syncwarp();
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
#pragma unroll 4
        for (int row = 0; row < b.n; row++)
            h->residual[row][j] =
                so_load(w.product.residual + (size_t)row * width + first * SO_TILE + j);
    }
}

SO_DEVICE void help(const persist_args &p, block &b) {
    so_persist_work *args = (so_persist_work *)b.args;
    for (int i = 0, number = 0; i < p.n_works; i++) {
        const so_persist_work &w = args[i % ARGS];
        if (w.kind == SO_PERSIST_ATTENTION)
            continue;
        for (int j = i + 1; j < p.n_works && j <= i + 2; j++)
            copy_work(p.works + j, &args[j % ARGS], b.lane);
        __syncwarp();
        if (w.kind == SO_PERSIST_QKV)
            prefetch_entries(b, args[(i + 1) % ARGS]);
        ahead *h = &b.ahead_of[number++ % 2];
        if (tiles_of_all(w) > 0)
            fetch_ahead(b, w, h);
        if (w.product.squares)
            scale_rows(b, w, h->scale);
        sync_helper();
    }
}

/* ---- the kernel ---- */

typedef struct control {
    so_persist_work args[ARGS];
    unsigned long long full[MAX_SLOTS], empty[MAX_SLOTS];
    so_attn_row rows[SO_PERSIST_ROWS];
    ahead ahead_of[2];
    int new_slots[SO_PERSIST_ROWS];
    int8_t fresh[CHUNK];
    memo memos[MEMOS];
    own_items items;
    int multiplying;
} control;

template <int NT, int U>
static __global__ void __launch_bounds__(N_THREADS, 1)
    persist(const __grid_constant__ persist_args p, const so_attn_row *rows,
            const so_kv_slot *slots) {
#if __CUDA_ARCH__ >= 900 /* not used on older ones: so_queue.persist */
    extern __shared__ __align__(1024) char shared[];
    block b;
    b.ring = shared;
    b.x = shared + p.n_slots * SLOT;
    control *c = (control *)(b.x + CONSUMERS * x_bytes(NT));
    b.ahead_of = c->ahead_of;
    b.args = c->args;
    b.rows = c->rows;
    b.new_slots = c->new_slots;
    b.fresh = c->fresh;
    b.memo = c->memos;
    b.items = &c->items;
    b.multiplying = &c->multiplying;
    b.full = address_of(c->full);
    b.empty = address_of(c->empty);
    b.n = p.n;
    b.n_slots = p.n_slots;
    b.slot = 0;
    b.phase = 0;
    b.warp = __shfl_sync(0xffffffffu, threadIdx.x / 32,
                         0); /* the compiler then knows that all lanes have the same */
    b.lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        c->items.window = c->items.from = -1;
        c->multiplying = false;
        for (int i = 0; i < p.n_slots; i++) {
            bar_init(b.full + 8 * i, 1);
            bar_init(b.empty + 8 * i, CONSUMERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (rows && (int)threadIdx.x < p.n) {
        c->rows[threadIdx.x] = rows[threadIdx.x];
        c->new_slots[threadIdx.x] = slots[threadIdx.x].page * SO_KV_PAGE + slots[threadIdx.x].place;
    }
    for (int i = threadIdx.x; i < MEMOS * CHUNK; i += N_THREADS)
        c->memos[i / CHUNK].of[i % CHUNK].key = -1;
    if (b.warp == HELPER)
        copy_work(p.works, c->args, b.lane);
    __syncthreads();
    if (b.warp == PRODUCER) {
        produce(p, b);
    } else if (b.warp == HELPER) {
        help(p, b);
    } else {
#pragma unroll 1
        for (int i = 0, number = 0; i < p.n_works; i++) {
            const so_persist_work &w = b.args[i % ARGS];
            if (w.kind == SO_PERSIST_ATTENTION)
                run_attention<U>(b, w);
            else
                run_product<NT>(p, b, w, number++);
        }
    }
#endif
}

/* ---- launching ---- */

typedef void (*persist_kernel)(persist_args, const so_attn_row *, const so_kv_slot *);

static persist_kernel kernel_of(int n, int head_dim) {
    if (n <= 8)
        return head_dim == 64 ? persist<1, 1> : persist<1, 2>;
    return head_dim == 64 ? persist<2, 1> : persist<2, 2>;
}

/* Shared memory without the ring. */
static size_t fixed_shared(int n) {
    return (size_t)CONSUMERS * x_bytes(n <= 8 ? 1 : 2) + sizeof(control);
}

static int slots_for(const so_queue &q, int n) {
    size_t fixed = fixed_shared(n);
    int slots = fixed < (size_t)q.shared_block ? (int)((q.shared_block - fixed) / SLOT) : 0;
    return slots > MAX_SLOTS ? MAX_SLOTS : slots;
}

bool so_persist_usable(const so_queue *q) { return slots_for(*q, SO_PERSIST_ROWS) >= 4; }

void so_persist_launch(const so_queue &q, const so_persist_run *r, so_half_rows x) {
    persist_kernel kernel = kernel_of(r->n, r->head_dim);
    persist_args p = {};
    p.works = r->works;
    p.stream = r->stream;
    p.n_works = r->n_works;
    p.n_products = r->n_products;
    p.n = r->n;
    p.n_slots = slots_for(q, r->n);
    p.x = (const char *)x.data;
    p.x_stride = x.stride * 2;
    size_t shared = (size_t)p.n_slots * SLOT + fixed_shared(r->n);
    if (r->clear_bytes > 0)
        cudaMemsetAsync(r->exchange, 0xff, r->clear_bytes, q.stream);
    cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         (int)shared);
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute a = {};
    a.id = cudaLaunchAttributeCooperative;
    a.val.cooperative = 1;
    c.gridDim = dim3((unsigned)q.n_sms);
    c.blockDim = dim3(N_THREADS);
    c.dynamicSmemBytes = shared;
    c.stream = q.stream;
    c.attrs = &a;
    c.numAttrs = 1;
    cudaLaunchKernelEx(&c, kernel, p, r->rows, r->slots);
}

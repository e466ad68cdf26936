/* A thread block of the persistent kernel: its ring, how it waits, and how blocks hand results to each other.
 * persist.cu has the whole picture. */
#ifndef SO_BACKEND_CUDA_PERSIST_BLOCK_CUH
#define SO_BACKEND_CUDA_PERSIST_BLOCK_CUH

#include "backend/cuda/decode.cuh"
#include "backend/cuda/persist.cuh"

enum {
    CONSUMERS = 8, /* warps 0 … 7 */
    PRODUCER = 8,
    HELPER = 9,
    N_THREADS = 320,
    SLOT = 16 << 10, /* bytes of a slot of the ring */
    MAX_SLOTS = 12,
    /* slots being copied at a time; more would delay all other memory traffic of the block */
    NARROW = 2, /* while blocks hand over results */
    WIDE = 4,   /* while they multiply */
    ARGS = 8,   /* works whose arguments are in shared memory */
    AHEAD = 4,  /* products for whose results there is memory; see fetch_ahead */
};
/* Units of activations that a warp fetches ahead, if they have nt groups of 8 rows. */
__host__ __device__ constexpr int depth_of(int nt) { return nt == 1 ? 6 : 4; }
/* Bytes of b.x of a warp. */
__host__ __device__ constexpr int x_bytes(int nt) { return depth_of(nt) * nt * 1024; }

/* What is in a slot of the ring: weights, as below, or the keys or the values of a listed chunk, or both if heads
 * have 64 numbers (persist_items.cuh). The tile of a product in one round, 8 units, is an entry; a slot has up to
 * slot_entries of them. The consumers compute rounds_at_once rounds in one iteration of their loop, and no
 * slot has entries of two iterations. What is left of the whole rounds comes one round at a time, and the last
 * round, if 8 does not divide the number of units, has shorter entries. The loop is compiled for some
 * numbers of tiles (padded_tiles); slots have room for the tiles that a product lacks, and nothing is copied
 * there. */
__host__ __device__ constexpr int slot_entries(int fmt) {
    return SLOT / (SO_SEGMENTS * so_fmt_unit(fmt));
}
__host__ __device__ constexpr int padded_tiles(int n) {
    return n <= 6 ? n : n <= 8 ? 8 : n <= 12 ? 12 : SO_MAX_TILES;
}
__host__ __device__ constexpr int rounds_at_once(int fmt, int tiles) {
    int fit = slot_entries(fmt) / (tiles > 0 ? tiles : 1);
    return fit > 3 ? 3 : fit > 1 ? fit : fmt == SO_FMT_F16 && tiles % 2 ? 2 : 1;
}

static const unsigned long long SPIN_NS = 20ull * 1000 * 1000 * 1000;

typedef struct persist_args {
    const so_persist_work *works;
    const so_persist_piece *stream;
    int n_works, n_products, n;
    int n_slots; /* of the ring */
    const char *x;
    int x_stride;
    so_persist_cache cache;
    CUtensorMap keys, values; /* of the cache: [page, layer, head, position][head_dim] */
    int side_bytes;           /* of b.side, all warps */
    int lost;                 /* so_cuda_lost_product */
    uint32_t zero;            /* 0, which the compiler does not know; see read_unit */
} persist_args;

typedef void (*so_persist_kernel)(persist_args, const so_attn_row *, const so_kv_slot *);
/* The kernel for n rows and heads of head_dim, by the formats of the weights. */
so_persist_kernel so_persist_f16(int n, int head_dim);
so_persist_kernel so_persist_q4(int n, int head_dim);
so_persist_kernel so_persist_quant(int n, int head_dim);

/* ---- barriers in shared memory ---- */

SO_DEVICE uint32_t address_of(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

SO_DEVICE void bar_init(uint32_t bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
SO_DEVICE void bar_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
SO_DEVICE void bar_expect(uint32_t bar, int n_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(n_bytes)
                 : "memory");
}
SO_DEVICE bool bar_done(uint32_t bar, uint32_t phase) {
    uint32_t ok;
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(ok)
                 : "r"(bar), "r"(phase)
                 : "memory");
    return ok;
}
SO_DEVICE void bar_wait(uint32_t bar, uint32_t phase) {
    while (!bar_done(bar, phase)) {
    }
}
SO_DEVICE void copy_bulk(uint32_t dst, const void *src, int n_bytes, uint32_t bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(dst),
        "l"(src), "r"(n_bytes), "r"(bar)
        : "memory");
}

/* A box of 64 numbers of SO_KV_PAGE rows from row y of a map on. */
SO_DEVICE void copy_box(uint32_t dst, const CUtensorMap *map, int x, int y, uint32_t bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%2, %3}], [%4];" ::"r"(dst),
        "l"(map), "r"(x), "r"(y), "r"(bar)
        : "memory");
}
/* After writing to a slot of the ring and before releasing it: the next copy into the slot comes after the writes. */
SO_DEVICE void fence_copies(void) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* threadIdx.x, read anew at each call. The compiler computes what depends on threadIdx.x before a loop and keeps it
 * in registers; here that would spill others to local memory, whose reads wait behind the stream of weights. */
SO_DEVICE int thread_again(void) {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

/* The same pointer, but addresses derived from it cannot be computed before a loop and kept in registers. */
SO_DEVICE const char *address_again(const char *p) {
    asm volatile("" : "+l"(p));
    return p;
}

/* The consumers. */
SO_DEVICE void sync_consumers(void) { asm volatile("bar.sync 2, 256;" ::: "memory"); }
/* A barrier of the consumers; true in all of them if `says` is true in any. */
SO_DEVICE bool any_consumer(bool says) {
    int any;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.s32 p, %1, 0;\nbar.red.or.pred q, 3, 256, p;\n"
                 "selp.s32 %0, 1, 0, q;\n}"
                 : "=r"(any)
                 : "r"((int)says)
                 : "memory");
    return any;
}
/* The helper has listed the block's chunks; the producer waits for it, once. */
SO_DEVICE void give_list(void) { asm volatile("bar.arrive 4, 64;" ::: "memory"); }
SO_DEVICE void wait_for_list(void) { asm volatile("bar.sync 4, 64;" ::: "memory"); }
/* The consumers and the helper. */
SO_DEVICE void sync_helper(void) { asm volatile("bar.sync 1, 288;" ::: "memory"); }

/* ---- handing over ---- */

typedef struct spin {
    unsigned n;
    unsigned long long since;
} spin;

static __device__ __noinline__ unsigned long long check_time(unsigned n, unsigned long long since) {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (n > 1024 && now - since > SPIN_NS)
        __trap();
    return n == 1024 ? now : since;
}

SO_DEVICE void spin_once(spin *s) {
    if (++s->n % 1024 == 0)
        s->since = check_time(s->n, s->since);
}

SO_DEVICE uint32_t read1(const void *p) {
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
SO_DEVICE uint2 read2(const void *p) {
    uint2 v;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(p)
                 : "memory");
    return v;
}
SO_DEVICE uint4 read4(const void *p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
SO_DEVICE void write1(void *p, uint32_t v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
SO_DEVICE void write2(void *p, uint32_t a, uint32_t b) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(a), "r"(b)
                 : "memory");
}

/* A float as a word that is not empty. */
SO_DEVICE uint32_t word_of(float x) {
    uint32_t u = __float_as_uint(x);
    return u == 0xffffffffu ? 0x7fffffffu : u;
}

SO_DEVICE void give_float(const so_exchange &e, size_t at, float x) {
    if (e.next)
        write1(e.next + at, 0xffffffffu);
    write1(e.now + at, word_of(x));
}
SO_DEVICE void give_floats(const so_exchange &e, size_t at, float x, float y) {
    if (e.next)
        write2(e.next + at, 0xffffffffu, 0xffffffffu);
    write2(e.now + at, word_of(x), word_of(y));
}
/* Two activations. */
SO_DEVICE void give_halves(const so_exchange &e, size_t at, float x, float y) {
    if (e.next)
        write1(e.next + at, 0xffffffffu);
    write1(e.now + at, so_bits_of(__halves2half2(so_activation(x), so_activation(y))));
}

/* ---- a block ---- */

/* The ring as a consumer warp sees it. */
typedef struct reader {
    const char *ring;
    uint32_t multiplying; /* address of a flag: whether the consumers compute a product */
    uint32_t full, empty; /* addresses of the ring's barriers */
    int n_slots, slot, warp, lane;
    uint32_t phase;
} reader;

typedef struct block {
    reader r;
    char *x;    /* activations, sums of segments and attention's data take turns */
    char *side; /* sums of v, if its weights have another format than those of q and k */
    struct ahead *ahead_of; /* [AHEAD] of a product */
    struct residual *residual;
    const so_persist_work *args; /* [ARGS] */
    so_attn_row *rows;           /* [rows] */
    int *new_slots;              /* [rows] page * SO_KV_PAGE + place */
    int8_t *new_row;             /* [64] for attention: a new row for each position, or -1 */
    struct memo *memo;           /* [MEMOS] see persist_trees.cuh */
    struct own_items *items;
    struct listed *list; /* [LISTED] the chunks of passes without token trees */
    int *n_listed; /* chunks in the list; -1: there is none. Until the helper has made it: 0 */
    int n, warp, lane;
} block;

SO_DEVICE void wait_slot(const reader &r) { bar_wait(r.full + 8 * r.slot, r.phase); }

/* A hint for the producer. Through a 32-bit address: two registers for a pointer would be one too many. */
SO_DEVICE void set_multiplying(const reader &r, int on) {
    if (threadIdx.x == 0)
        asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(r.multiplying), "r"(on) : "memory");
}
SO_DEVICE bool is_multiplying(const reader &r) {
    int on;
    asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(on) : "r"(r.multiplying) : "memory");
    return on;
}

/* The warp has read its units of this slot. */
SO_DEVICE void next_slot(reader &r) {
    __syncwarp();
    if (r.lane == 0)
        bar_arrive(r.empty + 8 * r.slot);
    if (++r.slot == r.n_slots) {
        r.slot = 0;
        r.phase ^= 1;
    }
}

/* The block's tiles of a matrix. */
SO_DEVICE int tiles_in_group(int all, int group) {
    return group < 0 ? all : min(max(all - group * SO_MAX_TILES, 0), (int)SO_MAX_TILES);
}
SO_DEVICE int tiles_of(const so_persist_matrix &m) {
    return tiles_in_group(m.layout.each + ((int)blockIdx.x < m.layout.more), m.group);
}
SO_DEVICE int first_of(const so_persist_matrix &m) {
    return so_first_tile(m.layout, blockIdx.x) + max(m.group, 0) * SO_MAX_TILES;
}

/* The block's tiles of a product. Without any it must not wait for the product's rows: nothing
 * would keep the others from overwriting them before it has seen them. */
SO_DEVICE int tiles_of_all(const so_persist_work &w) {
    int n = 0;
    for (int i = 0; i < w.n_matrices; i++)
        n += tiles_of(w.product.m[i]);
    return n;
}

#endif

/* A thread block of the persistent kernel: its ring of weights, how it waits, and how blocks hand results
 * to each other. persist.cu has the whole picture. */
#ifndef SO_BACKEND_CUDA_PERSIST_BLOCK_CUH
#define SO_BACKEND_CUDA_PERSIST_BLOCK_CUH

#include "backend/cuda/decode.cuh"
#include "backend/cuda/persist.cuh"

enum {
    CONSUMERS = 8, /* warps 0 … 7 */
    PRODUCER = 8,
    HELPER = 9,
    N_THREADS = 320,
    UNIT_BYTES = 1024, /* of a unit of weights: the kernel reads fp16 numbers only */
    SLOT = 16 << 10,   /* bytes of a slot of the ring */
    DEPTH = 6,         /* units of activations that a warp fetches ahead */
    MAX_SLOTS = 12,
    WINDOW = 3, /* slots that are being copied: with more, everything else waits behind them */
    ARGS = 8,   /* works whose arguments are in shared memory */
};
static const unsigned long long SPIN_NS = 20ull * 1000 * 1000 * 1000;

typedef struct persist_args {
    const so_persist_work *works;
    const so_persist_matrix *stream;
    int n_works, n_matrices, n;
    int n_slots, window; /* of the ring; slots whose copies may be under way at once */
    const char *x;
    int x_stride;
} persist_args;

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

/* The consumers. */
SO_DEVICE void sync_consumers(void) { asm volatile("bar.sync 2, 256;" ::: "memory"); }
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

typedef struct block {
    char *ring, *x;         /* x: activations, sums of segments and attention's data take turns */
    struct ahead *ahead_of; /* [2] of a product */
    const so_persist_work *args; /* [ARGS] */
    so_attn_row *rows;           /* [rows] */
    int *new_slots;              /* [rows] page * SO_KV_PAGE + place */
    int8_t *fresh;               /* [64] for attention: a new row for each position, or -1 */
    uint32_t full, empty;        /* addresses of the ring's barriers */
    int n, n_slots, slot, warp, lane;
    uint32_t phase;
} block;

SO_DEVICE void wait_slot(const block &b) { bar_wait(b.full + 8 * b.slot, b.phase); }

/* The warp has read its units of this slot. */
SO_DEVICE void next_slot(block &b) {
    __syncwarp();
    if (b.lane == 0)
        bar_arrive(b.empty + 8 * b.slot);
    if (++b.slot == b.n_slots) {
        b.slot = 0;
        b.phase ^= 1;
    }
}

/* The block's tiles of a matrix. */
SO_DEVICE int tiles_of(const so_persist_matrix &m) {
    return m.layout.each + ((int)blockIdx.x < m.layout.more);
}
SO_DEVICE int first_of(const so_persist_matrix &m) { return so_first_tile(m.layout, blockIdx.x); }

/* Whether the block has a part of a product. If not, it must not wait for the product's rows: nothing
 * would keep the others from overwriting them before it has seen them. */
SO_DEVICE bool has_tiles(const so_persist_work &w) {
    int n = 0;
    for (int i = 0; i < w.n_matrices; i++)
        n += tiles_of(w.product.m[i]);
    return n > 0;
}

/* ---- the producer ---- */

SO_DEVICE void produce(const persist_args &p, block &b) {
    int tail = 0, under_way = 0;
    uint32_t phase = 0, tail_phase = 0;
    int slot = 0;
    for (int i0 = 0; i0 < p.n_matrices; i0 += 32) {
        const char *at = NULL;
        size_t left = 0;
        if (i0 + b.lane < p.n_matrices) {
            so_persist_matrix m = p.stream[i0 + b.lane];
            at = m.w + (size_t)first_of(m) * m.layout.n_units * UNIT_BYTES;
            left = (size_t)tiles_of(m) * m.layout.n_units * UNIT_BYTES;
        }
        int count = min(32, p.n_matrices - i0);
        for (int i = 0; i < count; i++) {
            const char *src = (const char *)__shfl_sync(0xffffffffu, (unsigned long long)at, i);
            size_t n = __shfl_sync(0xffffffffu, (unsigned long long)left, i);
            if (b.lane == 0)
                while (n > 0) {
                    int bytes = n < SLOT ? (int)n : SLOT;
                    bar_wait(b.empty + 8 * slot, phase ^ 1);
                    while (under_way >= p.window) {
                        bar_wait(b.full + 8 * tail, tail_phase);
                        if (++tail == p.n_slots) {
                            tail = 0;
                            tail_phase ^= 1;
                        }
                        under_way--;
                    }
                    bar_expect(b.full + 8 * slot, bytes);
                    copy_bulk(address_of(b.ring + slot * SLOT), src, bytes, b.full + 8 * slot);
                    under_way++;
                    src += bytes;
                    n -= bytes;
                    if (++slot == p.n_slots) {
                        slot = 0;
                        phase ^= 1;
                    }
                }
            __syncwarp();
        }
    }
}

#endif

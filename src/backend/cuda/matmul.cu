/* Matrix products on the tensor cores, up to 16 rows; matmul_wide.cu has more rows and gives the same
 * bits. The contract is in device.cuh, weights are packed in pack.cu.
 *
 * The items (matmul.cuh) are divided evenly between the thread blocks, to within one. A block goes through
 * its items in steps of up to P pairs of tiles. Each of its 8 warps computes one of the 8 segments of K. A
 * warp streams its weights and activations through its own ring in shared memory, so warps wait for memory
 * but not for each other. Weights do not depend on earlier kernels, so the ring is filled with weights
 * before so_wait_prior. */
#include "backend/cuda/matmul.cuh"

/* acc += a pair of tiles times the rows of NT groups of 8, one unit. */
template <int FMT, int NT>
SO_DEVICE void multiply(float (*acc)[4], const char *first, const char *second,
                        const uint32_t (*x)[8], int lane) {
    fragments f;
    decode<FMT, 0>(f, first, second, lane);
    for (int s = 0; s < 4; s++)
        for (int j = 0; j < NT; j++)
            so_mma(acc[j], f.a[s], x[j][2 * s], x[j][2 * s + 1]);
    if (FMT != SO_FMT_F32)
        return;
    decode<FMT, 1>(f, first, second, lane);
    for (int s = 0; s < 4; s++)
        for (int j = 0; j < NT; j++)
            so_mma(acc[j], f.a[s], x[j][2 * s], x[j][2 * s + 1]);
}

/* The value of a product at a row and column. */
SO_DEVICE float value_at(const mm_args &p, int which, int row, int col, float acc) {
    maybe scale = {p.row_scale != NULL, p.row_scale ? so_load(p.row_scale + row) : 1},
          bias = {p.bias[which] != NULL, p.bias[which] ? p.bias[which][col] : 0};
    return value_of(acc, p.factor[which][col], scale, bias);
}

/* Output `o` of a tile. `second`: the sum of the second product at the same place, if they are combined.
 * Consecutive lanes have the 8 outputs of a tile. */
SO_DEVICE void finish(const mm_args &p, tile_ref t, int o, int row, float acc, float second) {
    int which = t.which, col = t.tile * SO_TILE + o;
    if (which < 0 || row >= p.n || col >= p.m[which])
        return;
    size_t at = (size_t)row * p.m[which] + col;
    float v = value_at(p, which, row, col, acc);
    if (p.act != SO_OP_COUNT) {
        float u = 0;
        if (p.act != SO_OP_GELU) {
            u = value_at(p, 1, row, col, second);
            if (p.out[1])
                p.out[1][at] = u;
        }
        if (p.out[which])
            p.out[which][at] = v;
        v = so_combine(p.act, v, u);
        if (p.act_out)
            p.act_out[at] = v;
        so_put_half(p.half_out, row, col, v);
        return;
    }
    if (p.add && which == p.n_products - 1)
        v = __fadd_rn(so_load(p.add + at), v);
    if (p.out[which])
        p.out[which][at] = v;
    if (p.norm) { /* all 8 outputs of the tile are here: a norm's width is a multiple of 8 */
        so_put_half(p.half_out, row, col, __fmul_rn(v, p.norm[col]));
        unsigned mask = 0xffu << (threadIdx.x & 24);
        float q = __fmul_rn(v, v);
        for (int i = 1; i < 8; i *= 2)
            q = __fadd_rn(q, __shfl_xor_sync(mask, q, i));
        if (o == 0)
            p.squares[(size_t)row * (p.m[which] / SO_TILE) + t.tile] = q;
    }
}

/* RESIDENT: the activation rows stay in shared memory for all steps; otherwise each step copies them
 * again, together with the weights. */
template <int FMT, int NT, int P, bool RESIDENT> struct narrow_shape {
    static constexpr int unit = so_fmt_unit(FMT), stage = 2 * P * unit + (RESIDENT ? 0 : NT * 1024);
    static constexpr int parts = SO_WARPS * P * NT * 512;
    static int rows(int n_units) {
        return RESIDENT ? (n_units + SO_SEGMENTS - 1) / SO_SEGMENTS * SO_WARPS * NT * 1024 : 0;
    }
    static int shared(int n_units, int stages) {
        return SO_WARPS * stages * stage + rows(n_units) + parts;
    }
};

/* The part of the work that a thread block and a warp have. */
typedef struct share {
    int item, n_items, n_steps, step; /* of the block; step: items per step */
    int from, count;                  /* units of the warp */
} share;

template <int P> SO_DEVICE share share_of(const mm_args &p, int warp) {
    share a;
    a.item = blockIdx.x * p.each + min((int)blockIdx.x, p.more);
    a.n_items = p.each + (blockIdx.x < p.more);
    a.n_steps = combines(p) ? (a.n_items + P - 1) / P : (a.n_items + 2 * P - 1) / (2 * P);
    a.step = a.n_steps > 1 ? (a.n_items + a.n_steps - 1) / a.n_steps : a.n_items;
    a.from = so_first_unit(p.n_units, warp);
    a.count = so_first_unit(p.n_units, warp + 1) - a.from;
    return a;
}

/* First item of a step. */
SO_DEVICE int step_item(const share &a, int i) { return a.item + min(i * a.step, a.n_items); }

/* Goes through the weights of one warp: step by step, unit by unit. */
template <int FMT, int P> struct weight_cursor {
    const char *at[2 * P]; /* NULL: no tile */
    int round[2 * P];      /* from one unit of the segment to the next, in bytes */
    int last[2 * P];       /* the same, if the next one is in a round that lacks segments */
    int step, left;        /* units left of this step */
};

template <int FMT, int P>
SO_DEVICE void cursor_set(weight_cursor<FMT, P> &c, const mm_args &p, const share &a) {
    constexpr int unit = so_fmt_unit(FMT);
    int first = step_item(a, c.step), end = step_item(a, c.step + 1), rem = p.n_units % SO_SEGMENTS;
    c.left = a.count;
    for (int s = 0; s < 2 * P; s++) {
        tile_ref t = tile_of(p, first, end, s);
        so_tile_place at = place_of(p, t);
        c.at[s] = t.which < 0
                      ? NULL
                      : p.w[t.which] +
                            (size_t)so_unit_of(p.layout[t.which], at, 0, threadIdx.x / 32) * unit;
        c.round[s] = at.n_tiles * SO_SEGMENTS * unit;
        c.last[s] = c.round[s] - at.r * (SO_SEGMENTS - rem) * unit;
    }
}

/* Copies the warp's next units, if there are any. */
template <int FMT, int P>
SO_DEVICE void copy_weights(weight_cursor<FMT, P> &c, const mm_args &p, const share &a, char *to,
                            int lane) {
    constexpr int unit = so_fmt_unit(FMT);
    if (a.count == 0 || c.step >= a.n_steps)
        return;
    for (int s = 0; s < 2 * P; s++) {
        if (!c.at[s])
            continue;
        for (int b = lane * 16; b < unit; b += 512)
            so_copy16(to + s * unit + b, c.at[s] + b);
        /* the last unit of a longer segment is in a round that lacks the shorter ones */
        c.at[s] += c.left == 2 && a.count > p.n_units / SO_SEGMENTS ? c.last[s] : c.round[s];
    }
    if (--c.left == 0 && ++c.step < a.n_steps)
        cursor_set(c, p, a);
}

/* Copies unit u of the block's rows. */
template <int NT> SO_DEVICE void copy_rows(const mm_args &p, int u, char *to, int lane) {
    for (int j = 0; j < NT; j++) {
        int row = blockIdx.y * NT * 8 + j * 8 + lane / 4;
        const __half *src = p.x.data + (size_t)min(row, p.n - 1) * p.x.stride;
        for (int h = 0; h < 2; h++) {
            int k0 = u * SO_UNIT + h * 32 + lane % 4 * 8;
            so_copy16(to + j * 1024 + h * 512 + lane * 16, src + k0,
                      row < p.n ? max(0, min(16, (p.k - k0) * 2)) : 0);
        }
    }
}

/* Waits until all groups of copies but the last n have arrived. */
SO_DEVICE void copy_wait(int n) {
    switch (n) {
    case 1:
        return so_copy_wait<1>();
    case 2:
        return so_copy_wait<2>();
    case 3:
        return so_copy_wait<3>();
    case 4:
        return so_copy_wait<4>();
    case 5:
        return so_copy_wait<5>();
    case 6:
        return so_copy_wait<6>();
    case 7:
        return so_copy_wait<7>();
    default:
        return so_copy_wait<0>();
    }
}
enum { MAX_STAGES = 8 };

/* Adds the segments of a step and finishes its outputs. part: [warp][P][NT][lane][4]. */
template <int NT, int P>
SO_DEVICE void finish_step(const mm_args &p, int first, int end, const float *part) {
    bool both = combines(p);
    auto sum = [&](int pair, int at) {
        float v = part[pair * NT * 128 + at];
        for (int s = 1; s < SO_SEGMENTS; s++)
            v = __fadd_rn(v, part[(s * P + pair) * NT * 128 + at]);
        return v;
    };
    for (int i = threadIdx.x; i < (end - first) * NT * 64; i += 256) {
        /* consecutive threads store consecutive outputs of a row */
        int place = i / (NT * 64), e = i % (NT * 64), o = e % 8, r = e / 8;
        int at = r / 8 * 128 + (o * 4 + r % 8 / 2) * 4 + r % 2, row = blockIdx.y * NT * 8 + r;
        tile_ref t = tile_of(p, first, end, both ? 2 * place : place);
        if (both)
            finish(p, t, o, row, sum(place, at), sum(place, at + 2));
        else
            finish(p, t, o, row, sum(place / 2, at + place % 2 * 2), 0);
    }
}

template <int FMT, int NT, int P, bool RESIDENT>
static __global__ void __launch_bounds__(256) narrow(const __grid_constant__ mm_args p) {
    typedef narrow_shape<FMT, NT, P, RESIDENT> Z;
    extern __shared__ __align__(128) char shared[];
    so_start_next();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, ring_bytes = p.stages * Z::stage;
    share a = share_of<P>(p, warp);
    int per = (p.n_units + SO_SEGMENTS - 1) / SO_SEGMENTS, fills = a.count * a.n_steps, filled = 0,
        unit = 0;
    char *ring = shared + warp * ring_bytes,
         *rows = shared + SO_WARPS * ring_bytes + warp * per * NT * 1024;
    float *part =
        (float *)(shared + SO_WARPS * ring_bytes + (RESIDENT ? SO_WARPS * per * NT * 1024 : 0));
    weight_cursor<FMT, P> ahead;
    ahead.step = 0;
    if (a.count > 0)
        cursor_set(ahead, p, a);
    for (int i = 0; i < p.stages; i++) {
        copy_weights(ahead, p, a, ring + i * Z::stage, lane);
        so_copy_commit();
    }
    auto fill_rows = [&](char *stage) { /* of the next stage */
                                        if (filled < (RESIDENT ? a.count : fills))
                                            copy_rows<NT>(p, a.from + unit,
                                                          RESIDENT ? rows + unit * NT * 1024
                                                                   : stage + 2 * P * Z::unit,
                                                          lane);
                                        filled++;
                                        unit = unit + 1 == a.count ? 0 : unit + 1;
    };
    so_wait_prior();
    for (int i = 0; i < p.stages; i++) {
        fill_rows(ring + i * Z::stage);
        so_copy_commit();
    }
    int slot = 0;
#pragma unroll 1
    for (int step = 0; step < a.n_steps; step++) {
        int first = step_item(a, step), end = step_item(a, step + 1);
        int n_pairs = combines(p) ? end - first : (end - first + 1) / 2;
        float acc[P][NT][4] = {};
#pragma unroll 1
        for (int i = 0; i < a.count; i++) {
            copy_wait(p.stages - 1);
            __syncwarp();
            char *stage = ring + slot * Z::stage;
            const char *at = RESIDENT ? rows + i * NT * 1024 : stage + 2 * P * Z::unit;
            uint32_t x[NT][8];
            for (int j = 0; j < NT; j++)
                for (int h = 0; h < 2; h++)
                    *(uint4 *)&x[j][h * 4] = *(const uint4 *)(at + j * 1024 + h * 512 + lane * 16);
#pragma unroll
            for (int q = 0; q < P; q++)
                if (q < n_pairs)
                    multiply<FMT, NT>(acc[q], stage + 2 * q * Z::unit,
                                      stage + (2 * q + 1) * Z::unit, x, lane);
            __syncwarp();
            copy_weights(ahead, p, a, stage, lane);
            fill_rows(stage);
            so_copy_commit();
            slot = slot + 1 == p.stages ? 0 : slot + 1;
        }
        __syncthreads(); /* the sums of the step before have been read */
        for (int q = 0; q < P; q++)
            for (int j = 0; j < NT; j++)
                *(float4 *)&part[((warp * P + q) * NT + j) * 128 + lane * 4] =
                    make_float4(acc[q][j][0], acc[q][j][1], acc[q][j][2], acc[q][j][3]);
        __syncthreads();
        finish_step<NT, P>(p, first, end, part);
    }
    so_copy_wait<0>();
}

/* ---- launching ---- */

enum {
    QUANT_RING = 48 << 10,
    FEW_RING = 64 << 10,
    RESIDENT_RING = 96 << 10,
    STREAM_RING = 96 << 10,
};

/* The number of stages for a ring of `budget` bytes; 0 if not even two fit into
 * a block's shared memory. */
static int stages_for(const so_queue &q, int stage_bytes, int others, int budget) {
    int most = (q.shared_block - others) / (SO_WARPS * stage_bytes),
        n = budget / (SO_WARPS * stage_bytes);
    n = n < 2 ? 2 : n;
    n = n > most ? most : n;
    return n < 2 ? 0 : n > MAX_STAGES ? MAX_STAGES : n;
}

/* False if it does not fit into shared memory. */
template <int FMT, int NT, int P, bool RESIDENT>
static bool launch_narrow(const so_queue &q, mm_args a, int budget) {
    typedef narrow_shape<FMT, NT, P, RESIDENT> Z;
    a.stages = stages_for(q, Z::stage, Z::rows(a.n_units) + Z::parts, budget);
    if (a.stages == 0)
        return false;
    bool both = a.act == SO_OP_SILU_MUL || a.act == SO_OP_GELU_MUL;
    int shared = Z::shared(a.n_units, a.stages), per_sm = q.shared_sm / (shared + 1024),
        most = both ? P : 2 * P, blocks = (a.n_items + most - 1) / most;
    /* Formats that take arithmetic to decode have several blocks on an SM. Others have one, and leave
     * room for a block of the next kernel, which starts to read its weights meanwhile. */
    per_sm = FMT <= SO_FMT_F32 || per_sm < 1 ? 1 : per_sm > 4 ? 4 : per_sm;
    if (blocks > q.n_sms * per_sm)
        blocks = q.n_sms * per_sm;
    else if (FMT <= SO_FMT_F32) /* a block for each SM, if there are items */
        blocks = a.n_items < q.n_sms ? a.n_items : q.n_sms;
    a.each = a.n_items / blocks;
    a.more = a.n_items % blocks;
    so_launch(q, narrow<FMT, NT, P, RESIDENT>,
              dim3((unsigned)blocks, (unsigned)((a.n + NT * 8 - 1) / (NT * 8))), 256,
              (size_t)shared, a);
    return true;
}

/* Up to 16 rows. The budgets of rings are measured on an H200: with more, the first reads of activations
 * wait behind weights; with less, the weights of the next kernel are not read early enough. */
template <int FMT, int NT> static void launch_few(const so_queue &q, const mm_args &a) {
    bool both = a.act == SO_OP_SILU_MUL || a.act == SO_OP_GELU_MUL;
    int places = (both ? 2 : 1) * ((a.n_items + q.n_sms - 1) / q.n_sms);
    bool done = false;
    if (FMT > SO_FMT_F32) {
        done = both || places > 8 ? launch_narrow<FMT, NT, 2, true>(q, a, QUANT_RING)
                                  : launch_narrow<FMT, NT, 1, true>(q, a, QUANT_RING);
    } else {
        done = places <= 2 ? launch_narrow<FMT, NT, 1, true>(q, a, FEW_RING)
                           : launch_narrow<FMT, NT, 2, true>(q, a, RESIDENT_RING);
    }
    if (!done && !launch_narrow<FMT, NT, 2, false>(q, a, STREAM_RING))
        launch_narrow<FMT, 1, 1, false>(q, a, 0); /* fits every GPU */
}

template <int FMT> static void launch(const so_queue &q, const mm_args &a) {
    if (a.n > SO_NARROW)
        so_cuda_matmul_wide<FMT>(q, a);
    else if (a.n > 8)
        launch_few<FMT, 2>(q, a);
    else
        launch_few<FMT, 1>(q, a);
}

/* Whether any four outputs of a row that begin at a multiple of four can be read and stored at once. */
static bool stores_aligned(const mm_args &a) {
    uintptr_t bits = (uintptr_t)a.add | (uintptr_t)a.act_out | (uintptr_t)a.half_out.data * 2;
    for (int i = 0; i < a.n_products; i++)
        bits |= (uintptr_t)a.out[i] | (uintptr_t)a.m[i] * sizeof(float);
    return bits % 16 == 0;
}

void so_cuda_matmul(const so_queue &q, const so_products *p) {
    mm_args a = {};
    for (int i = 0; i < SO_MM_GROUP; i++)
        a.first_tile[i] = INT32_MAX;
    for (int i = 0; i < p->n_products; i++) {
        const so_weight *w = p->list[i].w;
        a.w[i] = w->data;
        a.factor[i] = w->factor;
        a.bias[i] = p->list[i].bias;
        a.out[i] = p->list[i].out;
        a.m[i] = w->m;
        a.first_tile[i] = a.n_items;
        a.layout[i] = w->layout;
        a.n_items += (w->m + SO_TILE - 1) / SO_TILE;
    }
    if (p->act == SO_OP_SILU_MUL || p->act == SO_OP_GELU_MUL)
        a.n_items /= 2;
    a.n = p->n;
    a.k = p->list[0].w->k;
    a.n_units = p->list[0].w->n_units;
    a.n_products = p->n_products;
    a.x = p->x;
    a.act = p->act;
    a.add = p->add;
    a.act_out = p->act_out;
    a.half_out = p->half_out;
    a.row_scale = p->row_scale;
    a.norm = p->norm;
    a.squares = p->squares;
    a.aligned = stores_aligned(a);
    switch (p->list[0].w->fmt) {
    case SO_FMT_F16:
        return launch<SO_FMT_F16>(q, a);
    case SO_FMT_F32:
        return launch<SO_FMT_F32>(q, a);
    case SO_FMT_Q8_32:
        return launch<SO_FMT_Q8_32>(q, a);
    case SO_FMT_Q8_16:
        return launch<SO_FMT_Q8_16>(q, a);
    case SO_FMT_Q8_32_OFF:
        return launch<SO_FMT_Q8_32_OFF>(q, a);
    case SO_FMT_Q4_32_OFF:
        return launch<SO_FMT_Q4_32_OFF>(q, a);
    case SO_FMT_COUNT:
        return;
    }
}

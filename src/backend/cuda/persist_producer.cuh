/* The producer of the persistent kernel: one warp that copies what its block needs from memory into the ring, in
 * the order of use, and never waits for a result. These are the weights and, in passes without token trees, the
 * keys and values of the cache. */
#ifndef SO_BACKEND_CUDA_PERSIST_PRODUCER_CUH
#define SO_BACKEND_CUDA_PERSIST_PRODUCER_CUH

#include "backend/cuda/persist_items.cuh"

/* ---- weights ----
 *
 * The weights of a product come in the order in which the consumers use them: the first round of all its
 * matrices, then the second round, and so on (so_layout). Each matrix has its rounds in a row, so a product
 * of three matrices is merged from three streams; lane m of the warp copies from matrix m. */

enum {
    PIECES = SO_PERSIST_PIECES,
    LOAD = 32 / PIECES
}; /* products whose pieces a warp reads at once */

/* What a lane knows of its piece of the product that it has read. */
typedef struct piece {
    const char *src;
    int tiles, n_units, fmt;
    int skip; /* bytes from the end of the group's tiles in a round to their start in the next one */
} piece;

SO_DEVICE piece read_piece(const persist_args &p, int product, int lane) {
    piece r = {};
    product += lane / PIECES;
    if (product < p.n_products) {
        so_persist_piece s = p.stream[product * PIECES + lane % PIECES];
        so_layout l = {0, s.n_units, s.each, s.more};
        int all = s.each + ((int)blockIdx.x < s.more), before = max(s.group, 0) * SO_MAX_TILES,
            unit = so_fmt_unit(s.fmt);
        r.tiles = tiles_in_group(all, s.group);
        r.n_units = s.n_units;
        r.fmt = s.fmt;
        r.skip = (all - r.tiles) * SO_SEGMENTS * unit;
        r.src = s.w + ((size_t)so_first_tile(l, blockIdx.x) * s.n_units + before * SO_SEGMENTS) *
                          (size_t)unit;
    }
    return r;
}

/* The ring as the producer sees it. */
typedef struct filling {
    int slot, tail,
        under_way; /* the next slot; the oldest one that is being copied; their number */
    uint32_t phase, tail_phase;
} filling;

/* Waits until the next slot is free and few enough copies are under way. */
SO_DEVICE void wait_to_fill(const persist_args &p, const block &b, filling &r) {
    bar_wait(b.r.empty + 8 * r.slot, r.phase ^ 1);
    int most = is_multiplying(b.r) ? WIDE : NARROW;
    for (; r.under_way >= most; r.under_way--) {
        bar_wait(b.r.full + 8 * r.tail, r.tail_phase);
        if (++r.tail == p.n_slots) {
            r.tail = 0;
            r.tail_phase ^= 1;
        }
    }
}

SO_DEVICE void next_to_fill(const persist_args &p, filling &r) {
    r.under_way++;
    if (++r.slot == p.n_slots) {
        r.slot = 0;
        r.phase ^= 1;
    }
}

/* What is copied: the same in all lanes, except src and skip, which are of the lane's matrix. */
typedef struct copying {
    const char *src;
    int skip;
    int tiles[3], n_tiles, padded; /* of the matrices; their sum; with those that are missing */
    int entries;                   /* of a slot */
    bool alone; /* there is one matrix, and its rounds follow each other without gaps */
} copying;

/* Copies n_rounds rounds, whose entries have n_bytes each. */
SO_DEVICE void fill_rounds(const persist_args &p, const block &b, filling &r, copying &c,
                           int n_rounds, int n_bytes) {
    int n = n_rounds * c.padded, m = 0, left = c.alone ? n : c.tiles[0]; /* of matrix m */
    for (int e = 0; e < n; e += c.entries) {
        int here = min(c.entries, n - e), at = 0;
        if (c.n_tiles < c.padded) /* one round */
            here = min(here, max(c.n_tiles - e, 0));
        wait_to_fill(p, b, r);
        if (b.lane == 0)
            bar_expect(b.r.full + 8 * r.slot, here * n_bytes);
        __syncwarp();
        while (here > 0) {
            while (left == 0) {
                m = m == 2 ? 0 : m + 1;
                left = m == 0 ? c.tiles[0] : m == 1 ? c.tiles[1] : c.tiles[2];
            }
            int k = min(left, here);
            if (b.lane == m) {
                copy_bulk(address_of(b.r.ring + r.slot * SLOT + at), c.src, k * n_bytes,
                          b.r.full + 8 * r.slot);
                c.src += k * n_bytes + (k == left ? c.skip : 0);
            }
            at += k * n_bytes;
            left -= k;
            here -= k;
        }
        next_to_fill(p, r);
    }
}

/* Copies a product's weights. */
SO_DEVICE void fill(const persist_args &p, const block &b, filling &r, copying &c, int n_units,
                    int fmt) {
    int unit = so_fmt_unit(fmt), most, n_rounds;
    c.n_tiles = c.tiles[0] + c.tiles[1] + c.tiles[2];
    c.padded = padded_tiles(c.n_tiles);
    c.entries = slot_entries(fmt);
    c.alone = __shfl_sync(0xffffffffu, c.skip, 0) == 0 && c.tiles[0] == c.padded;
    most = rounds_at_once(fmt, c.padded);
    for (int j = 0; c.n_tiles > 0 && j * SO_SEGMENTS < n_units; j += n_rounds) {
        int whole = n_units / SO_SEGMENTS - j;
        n_rounds = whole >= most ? most : 1;
        fill_rounds(p, b, r, c, n_rounds, (whole > 0 ? SO_SEGMENTS : n_units % SO_SEGMENTS) * unit);
    }
}

/* ---- keys and values ---- */

/* Copies the listed chunks of a layer. Lane i < 4 copies box i of each slot. */
SO_DEVICE void fill_chunks(const persist_args &p, const block &b, filling &r, int layer, int n) {
    const so_persist_cache &c = p.cache;
    int u = c.head_dim / 64, copies = share_slot(u) ? 2 : 1, half = b.lane % (2 * u) / u;
#pragma unroll 1
    for (int i = 0; i < n; i++) {
        const listed &e = b.list[i];
        if (e.flags & NOTHING)
            continue;
        bool low = e.from<SO_KV_PAGE, high = e.to> SO_KV_PAGE,
             on = b.lane < 4 && (half == 0 ? low : high);
        int kv = b.items->item[e.item].kv,
            y = ((e.page[half] * c.n_layers + layer) * c.n_heads_kv + kv) * SO_KV_PAGE;
        for (int values = 0; values < 2; values += copies) {
            wait_to_fill(p, b, r);
            if (b.lane == 0)
                bar_expect(b.r.full + 8 * r.slot, copies * (low + high) * u * BOX);
            __syncwarp();
            if (on)
                copy_box(address_of(b.r.ring + r.slot * SLOT + b.lane * BOX),
                         values || b.lane >= 2 * u ? &p.values : &p.keys, b.lane % u * 64, y,
                         b.r.full + 8 * r.slot);
            next_to_fill(p, r);
        }
    }
}

/* ---- both ---- */

/* FMT: the format of all weights, which makes the lengths constants; -1: they have several. */
template <int FMT> SO_DEVICE void produce(const persist_args &p, const block &b) {
    filling r = {};
    int n_listed = 0;
    bool waited = false;
    piece ahead = read_piece(p, 0, b.lane);
    for (int i0 = 0; i0 < p.n_products; i0 += LOAD) {
        piece now = ahead;
        ahead = read_piece(p, i0 + LOAD, b.lane); /* under way while these are copied */
        for (int i = 0; i < min((int)LOAD, p.n_products - i0); i++) {
            copying c = {};
            for (int m = 0; m < 3; m++)
                c.tiles[m] = __shfl_sync(0xffffffffu, now.tiles, i * PIECES + m);
            int from = i * PIECES + min(b.lane, PIECES - 1);
            c.src = (const char *)__shfl_sync(0xffffffffu, (unsigned long long)now.src, from);
            c.skip = __shfl_sync(0xffffffffu, now.skip, from);
            int n_units = __shfl_sync(0xffffffffu, now.n_units, i * PIECES),
                fmt = __shfl_sync(0xffffffffu, now.fmt, i * PIECES);
            fill(p, b, r, c, n_units, FMT >= 0 ? FMT : fmt);
            int last = i * PIECES + PIECES - 1, layer = __shfl_sync(0xffffffffu, now.n_units, last);
            if (__shfl_sync(0xffffffffu, now.fmt, last) != SO_PERSIST_CHUNKS)
                continue;
            if (!waited) { /* the first weights come before */
                wait_for_list();
                n_listed = *b.n_listed;
                waited = true;
            }
            fill_chunks(p, b, r, layer, n_listed);
        }
    }
}

#endif

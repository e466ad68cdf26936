/* What a thread block of the persistent kernel attends to. In a pass without token trees this is known before the
 * first layer: the helper lists the chunks that the block visits, the producer copies their keys and values into
 * the ring (persist_producer.cuh), and the consumers compute them in the same order (persist_chains.cuh). */
#ifndef SO_BACKEND_CUDA_PERSIST_ITEMS_CUH
#define SO_BACKEND_CUDA_PERSIST_ITEMS_CUH

#include "backend/cuda/persist_block.cuh"
#include "backend/cuda/softmax.cuh"

enum { COLS = SO_PERSIST_COLS };

/* ---- items ----
 *
 * An item is one running sum of up to COLS columns of a KV head. A column is a query head of a row; columns
 * are numbered row by row, and an item may begin and end within a row. A block has the same items in all
 * layers of a run, so they are described once (own_items). */

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

/* How the attention of a pass is divided into items. */
typedef struct attended {
    int window, n_heads, n_heads_kv;
    int splits, cols; /* running sums of the longest row; columns of a KV head */
    int own;          /* items of this block */
} attended;

SO_DEVICE attended attended_by(const block &b, int window, int n_heads, int n_heads_kv) {
    int most = 0, cols = b.n * (n_heads / n_heads_kv);
    for (int i = 0; i < b.n; i++)
        most = max(most, b.rows[i].pos);
    int splits = min((int)SPLITS, most / CHUNK + 1),
        all = (cols + COLS - 1) / COLS * n_heads_kv * splits;
    return {window, n_heads, n_heads_kv,
            splits, cols,    (all - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x};
}

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

/* Describes the block's item number k, except its columns. Returns the first of these. */
SO_DEVICE int describe_item(const block &b, const attended &a, int k, item *it) {
    int number = blockIdx.x + k * gridDim.x, per = a.n_heads / a.n_heads_kv,
        col0 = number / a.splits / a.n_heads_kv * COLS;
    it->split = number % a.splits;
    it->kv = number / a.splits % a.n_heads_kv;
    it->n_cols = min((int)COLS, a.cols - col0);
    it->row0 = col0 / per;
    it->n_rows = (col0 + it->n_cols - 1) / per - it->row0 + 1;
    find_sight(b, a.window, it);
    return col0;
}

/* The columns of an item from number col0 on; one warp. */
SO_DEVICE void describe_columns(const block &b, const attended &a, int col0, item *it) {
    int per = a.n_heads / a.n_heads_kv, col = col0 + b.lane;
    if (b.lane < it->n_cols) {
        int row = col / per, head = it->kv * per + col % per;
        it->row[b.lane] = row;
        it->head[b.lane] = head;
        it->sum[b.lane] = (row * a.n_heads + head) * SPLITS + it->split;
    }
}

/* Describes up to ITEMS of the block's items, from number `from` on; one consumer warp for each. */
SO_DEVICE void find_items(const block &b, const so_persist_work &w, int from) {
    attended a = attended_by(b, w.attention.window, w.attention.n_heads, w.attention.n_heads_kv);
    sync_consumers(); /* the old ones have been read */
    if (b.warp == 0 && b.lane == 0) {
        b.items->window = a.window;
        b.items->from = from;
        b.items->n = a.own;
        b.items->splits = a.splits;
    }
    if (from + b.warp < a.own) {
        item *it = &b.items->item[b.warp];
        int col0 = b.lane == 0 ? describe_item(b, a, from + b.warp, it) : 0;
        __syncwarp();
        describe_columns(b, a, __shfl_sync(0xffffffffu, col0, 0), it);
    }
    sync_consumers();
}

/* ---- the list of chunks ---- */

/* The positions of a chunk that rows see, counted from its first one. */
typedef struct range {
    int from, to;
} range;
SO_DEVICE range range_in(int base, int lowest, int end) {
    return {max(lowest - base, 0), min(end - base, (int)CHUNK)};
}

#ifndef SO_PERSIST_LISTED
#define SO_PERSIST_LISTED 96 /* docs/gpu.md says how to test with fewer */
#endif
enum {
    LISTED = SO_PERSIST_LISTED,
    /* flags */
    BEGINS = 1,   /* the first chunk of its item */
    ENDS = 2,     /* the last one */
    NOTHING = 4,  /* the rows see nothing of it; it is not in the ring */
    NEW = 8,      /* it may have positions of rows of this pass */
    UNEQUAL = 16, /* the item's rows see different parts of it */
};

/* A chunk to be computed, for all rows of an item or, if they belong to several sequences, for one of them. */
typedef struct listed {
    int chunk, page[2];            /* its pages, as far as they are seen */
    uint8_t item, flags, from, to; /* from, to: a range */
    int8_t row;                    /* -1: all of the item */
} listed;

/* The row whose slots are read. */
SO_DEVICE int row_of(const item &it, const listed &e) { return e.row < 0 ? it.longest : e.row; }

SO_DEVICE listed list_chunk(const block &b, const so_persist_cache &c, const item &it, int k,
                            int chunk, int row) {
    const so_attn_row &r = b.rows[row < 0 ? it.longest : row];
    int base = chunk * CHUNK;
    range seen = range_in(base, row < 0 ? it.lowest : first_seen(c.window, r), r.pos + 1);
    bool has_new = base + seen.to > r.pos + 1 - b.n, /* a path ends with up to b.n new rows */
        unequal = row < 0 && it.n_rows > 1 && (base < it.first || base + CHUNK > it.last);
    if (seen.from >= seen.to)
        return {chunk, {0, 0}, (uint8_t)k, NOTHING, 0, 0, (int8_t)row};
    const int32_t *page = c.pages + r.page_off + chunk * 2;
    return {
        chunk,
        {seen.from < SO_KV_PAGE ? so_load(page) : 0, seen.to > SO_KV_PAGE ? so_load(page + 1) : 0},
        (uint8_t)k,
        (uint8_t)((has_new ? NEW : 0) | (unequal ? UNEQUAL : 0)),
        (uint8_t)seen.from,
        (uint8_t)seen.to,
        (int8_t)row};
}

/* Lists the chunks of item number k, after the first n. A lane tests one chunk, or one row of it, at a time. Returns
 * their number with these; more than LISTED: they are too many. */
SO_DEVICE int list_item(const block &b, const so_persist_cache &c, const item &it, int k, int n) {
    bool shared = it.same_to == INT32_MAX;
    int rows = shared ? 1 : it.n_rows, before = n,
        n_tests = max(it.n_chunks - it.split + SPLITS - 1, 0) / SPLITS * rows;
    if (n_tests == 0)
        return n;
    for (int t0 = 0; t0 < n_tests; t0 += 32) {
        int t = t0 + b.lane;
        listed e = {};
        if (t < n_tests)
            e = list_chunk(b, c, it, k, it.split + t / rows * SPLITS,
                           shared ? -1 : it.row0 + t % rows);
        bool on = t < n_tests && !(e.flags & NOTHING);
        unsigned all = __ballot_sync(0xffffffffu, on);
        int place = n + __popc(all & ((1u << b.lane) - 1));
        if (on && place < LISTED)
            b.list[place] = e;
        n += __popc(all);
    }
    if (n == before && n < LISTED && b.lane == 0)
        b.list[n] = {0, {0, 0}, (uint8_t)k, NOTHING, 0, 0, -1};
    n += n == before;
    __syncwarp();
    if (n <= LISTED && b.lane == 0) {
        b.list[before].flags |= BEGINS;
        b.list[n - 1].flags |= ENDS;
    }
    return n;
}

/* Describes the block's items and lists their chunks; one warp. Returns the number of chunks. -1: there are more than
 * LISTED, and run_attention looks them up one by one. */
SO_DEVICE int list_chunks(const persist_args &p, const block &b) {
    const so_persist_cache &c = p.cache;
    attended a = attended_by(b, c.window, c.n_heads, c.n_heads_kv);
    int col0 = 0, n = 0;
    if (b.lane < min(a.own, (int)ITEMS))
        col0 = describe_item(b, a, b.lane, &b.items->item[b.lane]);
    if (b.lane == 0) {
        b.items->window = a.window;
        b.items->from = 0;
        b.items->n = a.own;
        b.items->splits = a.splits;
    }
    __syncwarp();
    for (int k = 0; k < min(a.own, (int)ITEMS); k++)
        describe_columns(b, a, __shfl_sync(0xffffffffu, col0, k), &b.items->item[k]);
    for (int k = 0; k < a.own && k < ITEMS && n <= LISTED; k++)
        n = list_item(b, c, b.items->item[k], k, n);
    return a.own <= ITEMS && n <= LISTED ? n : -1;
}

/* ---- chunks in shared memory ----
 *
 * The keys of a chunk, and its values, are two pages each. They are copied in boxes of 64 numbers of 32 positions,
 * whose 16-byte pieces are permuted so that the tensor cores can be fed without bank conflicts. */

enum { BOX = 64 * SO_KV_PAGE * 2 };
static_assert((int)CHUNK == 2 * (int)SO_KV_PAGE && 4 * BOX == SLOT,
              "a slot of the ring holds four boxes");

/* Where piece c (16 bytes) of position j is among a chunk's keys, and its values. */
template <int U> SO_DEVICE int piece_at(int j, int c) {
    return (j / SO_KV_PAGE * U + c / 8) * BOX + j % SO_KV_PAGE * 128 + ((c ^ j) & 7) * 16;
}
/* With heads of 64 numbers, keys and values share a slot of the ring. */
__host__ __device__ constexpr bool share_slot(int u) { return u == 1; }

#endif

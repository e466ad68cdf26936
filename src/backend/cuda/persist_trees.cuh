/* Attention of the persistent kernel in passes with token trees, and where a list of chunks would be too long. A row's
 * ancestors are at slots of its own, so each chunk's slots are looked up, and keys and values are copied from there.
 *
 * The new rows' keys and values are not in the cache yet when the kernel needs them. They are taken from
 * where the product has handed them over, rotated and rounded here, and stored in the cache by the block
 * that has the row's own position. */
#ifndef SO_BACKEND_CUDA_PERSIST_TREES_CUH
#define SO_BACKEND_CUDA_PERSIST_TREES_CUH

#include "backend/cuda/persist_columns.cuh"

/* b.x during attention. */
template <int U> struct attn_shared {
    char keys[CHUNK * U * 128], values[CHUNK * U * 128];
    columns<U> c;
};

/* ---- keys and values ---- */

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
enum { MEMOS = 4 };
typedef struct memo {
    int key[CONSUMERS], base[CONSUMERS];
    int slot
        [CHUNK]; /* page * SO_KV_PAGE + place; NOWHERE: not seen; NEW_ROW - i: row i of this pass */
    int kv;
} memo;
enum { NOWHERE = -1, NEW_ROW = -2 };

/* The slot of position `pos` as row r sees it. */
SO_DEVICE int find_slot(const block &b, const so_persist_work &w, const so_attn_row &r, int pos) {
    int at = pos < r.n_prefix ? pos : w.attention.tails[r.tail_off + pos - r.n_prefix],
        slot = w.attention.pages[r.page_off + at / SO_KV_PAGE] * SO_KV_PAGE + at % SO_KV_PAGE;
    if (pos > r.pos - b.n) /* a path has at most b.n new rows */
        for (int i = 0; i < b.n; i++)
            if (b.new_slots[i] == slot)
                return NEW_ROW - i;
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
    int j = thread_again() / 4, key = row << 16 | from << 8 | to, slot = NOWHERE;
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

/* Notes which positions of a chunk are rows of this pass, which are not in the cache yet: b.new_row has the row
 * of such a position, -1 for the others. */
SO_DEVICE void note_new(const block &b, int slot) {
    if (thread_again() % 4 == 0)
        b.new_row[thread_again() / 4] = (int8_t)(slot <= NEW_ROW ? NEW_ROW - slot : -1);
}

/* Starts copying the keys or the values of a chunk to `to`; four threads for a position. Rows of this pass are left
 * out, and what is not seen becomes zero. */
template <int U>
SO_DEVICE void fetch_entries(const block &b, const so_persist_work &w, const char *cache, int kv,
                             int slot, char *to) {
    int thread = thread_again(), j = thread / 4, t = thread % 4, n = slot == NOWHERE ? 0 : 16;
    if (slot >= NOWHERE) {
        const char *from =
            cache + (n ? entry_offset(w, slot / SO_KV_PAGE, slot % SO_KV_PAGE, kv) + t * 16 : 0);
#pragma unroll
        for (int c = 0; c < U * 2; c++)
            so_copy16(to + piece_at<U>(j, c * 4 + t), from + c * 64, n);
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

/* Fills in keys and values of this pass's rows, one warp for a position, and stores those whose own
 * position it is. The last warps come first, since the first ones have queries to load. */
template <int U>
SO_DEVICE void fill_new_rows(const block &b, const so_persist_work &w, const item &it, int base,
                             attn_shared<U> *s) {
    constexpr int M = U * 2;
    unsigned long long todo =
        __ballot_sync(0xffffffffu, b.new_row[b.lane] >= 0) |
        (unsigned long long)__ballot_sync(0xffffffffu, b.new_row[b.lane + 32] >= 0) << 32;
#pragma unroll 1
    for (int k = 0; todo; k++, todo &= todo - 1) {
        if (CONSUMERS - 1 - k % CONSUMERS != b.warp)
            continue;
        int j = __ffsll(todo) - 1, row = b.new_row[j], e = b.lane * M;
        alignas(8) __half key[M], value[M];
        entry_words<U> words;
        begin_entry<U>(b, w, it.kv, row, &words);
        finish_entry<U>(b, w, it.kv, row, &words, key, value);
        int place = piece_at<U>(j, e / 8) + e % 8 * 2;
        bool own = row >= it.row0 && row < it.row0 + it.n_rows && b.rows[row].pos == base + j;
        size_t at =
            entry_offset(w, b.new_slots[row] / SO_KV_PAGE, b.new_slots[row] % SO_KV_PAGE, it.kv) +
            e * 2;
        put_entry<U>(key, value, s->keys + place, s->values + place);
        if (own)
            put_entry<U>(key, value, w.attention.k_cache + at, w.attention.v_cache + at);
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
            read_query<U>(b, w, it.row[b.warp + c * CONSUMERS], it.head[b.warp + c * CONSUMERS],
                          x[c]);
    if (v.item >= 0)
        fill_new_rows<U>(b, w, it, v.chunk * CHUNK, s);
    for (int c = 0; c < 2; c++)
        if (has[c]) {
            int col = b.warp + c * CONSUMERS;
            put_query<U>(b, w, it.row[col], it.head[col], x[c], s->c.q + c * U * 1024, b.warp,
                         &s->c.down[col]);
            if (b.lane == 0) {
                s->c.m[col] = -INFINITY;
                s->c.l[col] = 0;
            }
        }
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
    note_new(b, slot);
    fetch_entries<U>(b, w, w.attention.k_cache, it.kv, slot, s->keys);
    fetch_entries<U>(b, w, w.attention.v_cache, it.kv, slot, s->values);
    sync_consumers(); /* b.new_row */
}

/* Computes a chunk whose keys have arrived, while its values and then the chunk of the next visit are copied: each
 * buffer is filled again as soon as it has been read. */
template <int U>
SO_DEVICE void compute_chunk(const block &b, const so_persist_work &w, const item &it,
                             const visit &v, progress *at, attn_shared<U> *s, float (*o)[4]) {
    visit next = next_visit(b, it, v);
    int window = w.attention.window, base = v.chunk * CHUNK, only = v.i < 0 ? -1 : it.row0 + v.i,
        slot = NEW_ROW, kv = 0;
    if (next.item >= 0) {
        slot = find_place(b, w, next, at->turn++);
        kv = b.items->item[next.item - b.items->from].kv;
    }
    score_chunk<U>(b, it, s->keys, &s->c);
    sync_consumers(); /* scores; the keys have been read */
    if (next.item >= 0) {
        note_new(b, slot);
        fetch_entries<U>(b, w, w.attention.k_cache, kv, slot, s->keys);
    } else {
        so_copy_commit();
    }
    if (b.warp + CONSUMERS < it.n_cols)
        weigh_columns<U, 2>(b, it, window, base, only, &s->c);
    else if (b.warp < it.n_cols)
        weigh_columns<U, 1>(b, it, window, base, only, &s->c);
    so_copy_wait<1>(); /* values */
    sync_consumers();
    weigh_values<U>(b, it, s->values, {0, CHUNK}, -1, &s->c, o);
    sync_consumers(); /* the values have been read */
    if (next.item >= 0)
        fetch_entries<U>(b, w, w.attention.v_cache, kv, slot, s->values);
    at->ahead = next.item >= 0;
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
            if (any_consumer(values_nonfinite<U>({0, CHUNK}, s->values))) {
                v.i = 0;
                continue;
            }
        }
        compute_chunk<U>(b, w, it, v, at, s, o);
        v = next_visit(b, it, v);
    } while (v.item == number);
    give_sums<U>(b, w, it, &s->c, o);
    sync_consumers(); /* shared memory is free */
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
    merge_columns<U>(b, w, b.items->splits);
}

#endif

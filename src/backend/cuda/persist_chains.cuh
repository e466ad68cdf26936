/* Attention of the persistent kernel in passes without token trees, over the chunks that the helper has listed
 * (persist_items.cuh). Their keys and values are in the ring, where the producer puts them while q, k and v are still
 * computed; nothing is looked up or copied here. The new rows' keys and values are not in the cache yet: they are
 * taken from where the product has handed them over, rotated and rounded, and written over what the ring has in
 * their place. */
#ifndef SO_BACKEND_CUDA_PERSIST_CHAINS_CUH
#define SO_BACKEND_CUDA_PERSIST_CHAINS_CUH

#include "backend/cuda/persist_columns.cuh"

/* The place in the ring after a slot, to look at it without leaving the slot. */
SO_DEVICE reader after(reader r) {
    if (++r.slot == r.n_slots) {
        r.slot = 0;
        r.phase ^= 1;
    }
    return r;
}

/* A slot's data, when it has arrived. */
SO_DEVICE char *data_of(const reader &r) {
    wait_slot(r);
    return (char *)r.ring + r.slot * SLOT;
}

/* The values of the chunk whose keys are in this slot. */
template <int U> SO_DEVICE char *values_after(const reader &r) {
    if (share_slot(U))
        return data_of(r) + CHUNK * U * 128;
    return data_of(after(r));
}

/* Whether row i of this pass is at a position of the chunk that is seen. */
SO_DEVICE bool is_new(const block &b, const item &it, const listed &e, int i) {
    if (i >= b.n)
        return false;
    int j = b.rows[i].pos - e.chunk * CHUNK;
    return (e.flags & NEW) && j >= e.from && j < e.to &&
           b.rows[i].page_off == b.rows[row_of(it, e)].page_off;
}

/* Writes row i of this pass into a chunk, and into the cache if the item has the row. Returns whether its value is
 * not finite. One warp. */
template <int U>
SO_DEVICE bool put_new(const block &b, const so_persist_work &w, const item &it, const listed &e,
                       int i, entry_words<U> *words, char *keys, char *values) {
    constexpr int M = U * 2;
    alignas(8) __half key[M], value[M];
    finish_entry<U>(b, w, it.kv, i, words, key, value);
    int at = b.lane * M, j = b.rows[i].pos - e.chunk * CHUNK,
        place = piece_at<U>(j, at / 8) + at % 8 * 2;
    put_entry<U>(key, value, keys + place, values + place);
    if (e.row < 0 ? i >= it.row0 && i < it.row0 + it.n_rows : i == e.row) {
        size_t to =
            entry_offset(w, b.new_slots[i] / SO_KV_PAGE, b.new_slots[i] % SO_KV_PAGE, it.kv) +
            at * 2;
        put_entry<U>(key, value, w.attention.k_cache + to, w.attention.v_cache + to);
    }
    bool bad = false;
    for (int k = 0; k < M; k++)
        bad |= !isfinite(__half2float(value[k]));
    return bad;
}

/* Before a chunk: loads the queries if its item begins, and writes the rows of this pass over what the ring has in
 * their place. All loads start before the first wait, so they take one trip to L2; the last warps take the first
 * rows, because the first warps load queries. Returns whether values that only some of the rows see are NaN or
 * infinite: then each row's values are weighed alone. */
template <int U>
SO_DEVICE bool prepare(const block &b, const so_persist_work &w, const item &it, const listed &e,
                       columns<U> *s) {
    static_assert((int)COLS == 2 * (int)CONSUMERS, "a warp has two columns");
    uint32_t x[2][U * 2];
    entry_words<U> words;
    bool has[2] = {(e.flags & BEGINS) && b.warp < it.n_cols,
                   (e.flags & BEGINS) && b.warp + CONSUMERS < it.n_cols},
         bad = false;
    int i = CONSUMERS - 1 - b.warp;
    for (int c = 0; c < 2; c++)
        if (has[c])
            read_query<U>(b, w, it.row[b.warp + c * CONSUMERS], it.head[b.warp + c * CONSUMERS],
                          x[c]);
    if (is_new(b, it, e, i))
        begin_entry<U>(b, w, it.kv, i, &words);
    for (int c = 0; c < 2; c++)
        if (has[c]) {
            int col = b.warp + c * CONSUMERS;
            put_query<U>(b, w, it.row[col], it.head[col], x[c], s->q + c * U * 1024, b.warp,
                         &s->down[col]);
            if (b.lane == 0) {
                s->m[col] = -INFINITY;
                s->l[col] = 0;
            }
        }
    if (e.flags & UNEQUAL)
        bad = values_nonfinite<U>({e.from, e.to}, values_after<U>(b.r));
    if ((e.flags & (UNEQUAL | NEW)) == (UNEQUAL | NEW))
        sync_consumers(); /* the old values have been looked at */
    if (e.flags & NEW) {
        char *keys = data_of(b.r), *values = values_after<U>(b.r);
        if (is_new(b, it, e, i))
            bad |= put_new<U>(b, w, it, e, i, &words, keys, values);
        if (is_new(b, it, e, i + CONSUMERS)) {
            begin_entry<U>(b, w, it.kv, i + CONSUMERS, &words);
            bad |= put_new<U>(b, w, it, e, i + CONSUMERS, &words, keys, values);
        }
        fence_copies();
    }
    return any_consumer(bad) && (e.flags & UNEQUAL);
}

/* The next chunk of the ring. apart: whether each row's values are weighed alone. */
template <int U>
SO_DEVICE void attend_chunk(block &b, int window, const item &it, const listed &e, bool apart,
                            columns<U> *s, float (*o)[4]) {
    int base = e.chunk * CHUNK;
    const char *values;
    score_chunk<U>(b, it, data_of(b.r), s);
    if (!share_slot(U))
        next_slot(b.r);
    sync_consumers(); /* scores */
    if (b.warp + CONSUMERS < it.n_cols)
        weigh_columns<U, 2>(b, it, window, base, e.row, s);
    else if (b.warp < it.n_cols)
        weigh_columns<U, 1>(b, it, window, base, e.row, s);
    values = data_of(b.r) + (share_slot(U) ? CHUNK * U * 128 : 0);
    sync_consumers(); /* weights */
    if (!apart)
        weigh_values<U>(b, it, values, {e.from, e.to}, -1, s, o);
#pragma unroll 1
    for (int i = it.row0; apart && i < it.row0 + it.n_rows; i++)
        weigh_values<U>(b, it, values,
                        range_in(base, first_seen(window, b.rows[i]), b.rows[i].pos + 1), i, s, o);
    next_slot(b.r);
}

/* All listed chunks, item by item. */
template <int U> SO_DEVICE void attend_listed(block &b, const so_persist_work &w) {
    columns<U> *s = (columns<U> *)b.x;
    int window = w.attention.window, n = *b.n_listed;
    float o[U][4] = {}; /* as weigh_values has them */
#pragma unroll 1
    for (int k = 0; k < n; k++) {
        listed e = b.list[k];
        const item &it = b.items->item[e.item];
        bool apart = false;
        if (e.flags & (BEGINS | NEW | UNEQUAL))
            apart = prepare<U>(b, w, it, e, s);
        if (!(e.flags & NOTHING))
            attend_chunk<U>(b, window, it, e, apart, s, o);
        if (!(e.flags & ENDS))
            continue;
        give_sums<U>(b, w, it, s, o);
        for (int i = 0; i < U * 4; i++)
            o[i / 4][i % 4] = 0;
        sync_consumers(); /* shared memory is free */
    }
    merge_columns<U>(b, w, b.items->splits);
}

#endif

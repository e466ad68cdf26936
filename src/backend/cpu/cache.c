/* KV operations of the CPU backend: writing entries to their pages, and copying them between slots.
 *
 * Keys are transposed within a page (kernels.h), so that an entry is one column. Threads split the
 * head dimension and not the rows: the rows of one pass are adjacent columns, and threads that
 * write adjacent columns would contend for the same cache lines. A Q8_0 block is quantised by the
 * thread that writes it, and copies are exact, so bits do not depend on the slot. Slots come
 * from device memory and are checked here, when they are read; a slot that is out of range aborts.
 * Runs on all threads at once. */
#include <string.h>

#include "backend/cpu/cpu.h"
#include "base/mem.h"

enum { LINE = SO_COLUMN_GRAIN }; /* number of F16 values in a cache line */

static inline void *at(so_view v) { return v.buf->data + v.off; }

static void check_slot(const so_kv_store *s, so_kv_slot slot) {
    SO_ASSERT(slot.page >= 0 && slot.page < s->shape.n_pages);
    SO_ASSERT(slot.place >= 0 && slot.place < SO_KV_PAGE);
}

/* Elements e … e+n-1 of an entry; `page` is the offset of its page. */
static void store_f16(const so_cpu *b, const so_kv_store *s, size_t page, int place, int e, int n,
                      const float *k, const float *v) {
    uint16_t half[SO_HEAD_DIM_MAX];
    uint16_t *keys = (uint16_t *)(s->k.data + page) + e * SO_KV_PAGE + place;
    b->kernels->to_f16(half, k, n);
    for (int i = 0; i < n; i++)
        keys[i * SO_KV_PAGE] = half[i];
    b->kernels->to_f16((uint16_t *)(s->v.data + page) + place * s->shape.head_dim + e, v, n);
}

static void store_f32(const so_kv_store *s, size_t page, int place, int e, int n, const float *k,
                      const float *v) {
    float *keys = (float *)(s->k.data + page) + e * SO_KV_PAGE + place;
    for (int i = 0; i < n; i++)
        keys[i * SO_KV_PAGE] = k[i];
    memcpy((float *)(s->v.data + page) + place * s->shape.head_dim + e, v, (size_t)n * sizeof *v);
}

/* Head dimension rounded up to whole blocks. */
static int padded(const so_kv_store *s) { return (s->shape.head_dim + SO_QK - 1) / SO_QK * SO_QK; }

static so_q8_keys *key_block(const so_kv_store *s, size_t page, int i) {
    return (so_q8_keys *)(s->k.data + page) + i;
}

static int8_t *value_block(const so_kv_store *s, size_t page, int place, int i) {
    return (int8_t *)s->v.data + page + place * padded(s) + i * SO_QK;
}

static uint16_t *value_scale(const so_kv_store *s, size_t page, int place, int i) {
    uint16_t *scales = (uint16_t *)(s->v.data + page + SO_KV_PAGE * padded(s));
    return scales + i * SO_KV_PAGE + place;
}

/* The i-th block of an entry, n elements of k and v. */
static void store_q8(const so_cpu *b, const so_kv_store *s, size_t page, int place, int i, int n,
                     const float *k, const float *v) {
    float x[SO_QK] = {0};
    int8_t q[SO_QK];
    so_q8_keys *keys = key_block(s, page, i);
    memcpy(x, k, (size_t)n * sizeof *x);
    keys->d[place] = b->kernels->entry_q8(x, q);
    for (int c = 0; c < SO_QK / 4; c++)
        memcpy(keys->q[c][place], q + 4 * c, 4);
    memcpy(x, v, (size_t)n * sizeof *x);
    *value_scale(s, page, place, i) = b->kernels->entry_q8(x, value_block(s, page, place, i));
}

/* Stores Q8_0 entries. Threads split the blocks of all heads, where so_cpu_kv_store splits cache
 * lines for the other types. */
static void store_blocks(const so_cpu *b, const so_op *op, int index) {
    const so_kv_store *s = op->kv_store.store;
    const so_kv_slot *slots = at(op->kv_store.slots);
    const float *k = at(op->kv_store.k), *v = at(op->kv_store.v);
    int d = s->shape.head_dim, blocks = padded(s) / SO_QK;
    long begin, end;
    so_cpu_split_weighted(b, (long)s->shape.n_heads_kv * blocks, 1, index, &begin, &end);
    for (int r = 0; r < op->n; r++) {
        check_slot(s, slots[r]);
        for (long j = begin; j < end; j++) {
            int head = (int)(j / blocks), i = (int)(j % blocks);
            size_t page = so_kv_page(s, op->kv_store.layer, slots[r].page, head);
            long from = ((long)r * s->shape.n_heads_kv + head) * d + i * SO_QK;
            store_q8(b, s, page, slots[r].place, i, SO_MIN(SO_QK, d - i * SO_QK), k + from,
                     v + from);
        }
    }
}

void so_cpu_kv_store(const so_cpu *b, const so_op *op, int index, int count) {
    (void)count;
    const so_kv_store *s = op->kv_store.store;
    if (s->shape.dtype == SO_DTYPE_Q8_0) {
        store_blocks(b, op, index);
        return;
    }
    const so_kv_slot *slots = at(op->kv_store.slots);
    const float *k = at(op->kv_store.k), *v = at(op->kv_store.v);
    int d = s->shape.head_dim;
    long width = (long)s->shape.n_heads_kv * d, begin, end;
    so_cpu_split_weighted(b, width, LINE, index, &begin, &end);
    for (int r = 0; r < op->n; r++) {
        so_kv_slot slot = slots[r];
        check_slot(s, slot);
        for (long i = begin, next; i < end; i = next) {
            int head = (int)(i / d), e = (int)(i % d);
            next = SO_MIN(end, (long)(head + 1) * d);
            size_t page = so_kv_page(s, op->kv_store.layer, slot.page, head);
            long from = r * width + i;
            if (s->shape.dtype == SO_DTYPE_F16)
                store_f16(b, s, page, slot.place, e, (int)(next - i), k + from, v + from);
            else
                store_f32(s, page, slot.place, e, (int)(next - i), k + from, v + from);
        }
    }
}

static void copy_q8(const so_kv_store *s, size_t src, int from, size_t dst, int to) {
    for (int i = 0; i < padded(s) / SO_QK; i++) {
        const so_q8_keys *keys = key_block(s, src, i);
        so_q8_keys *out = key_block(s, dst, i);
        out->d[to] = keys->d[from];
        for (int c = 0; c < SO_QK / 4; c++)
            memmove(out->q[c][to], keys->q[c][from], 4);
        *value_scale(s, dst, to, i) = *value_scale(s, src, from, i);
        memmove(value_block(s, dst, to, i), value_block(s, src, from, i), SO_QK);
    }
}

/* Copies the entry of one head; src and dst are offsets of pages. */
static void copy_entry(const so_kv_store *s, size_t src, int from, size_t dst, int to) {
    int d = s->shape.head_dim;
    if (s->shape.dtype == SO_DTYPE_Q8_0) {
        copy_q8(s, src, from, dst, to);
        return;
    }
    if (s->shape.dtype == SO_DTYPE_F16) {
        const uint16_t *k = (const uint16_t *)(s->k.data + src) + from;
        uint16_t *out = (uint16_t *)(s->k.data + dst) + to;
        for (int e = 0; e < d; e++)
            out[e * SO_KV_PAGE] = k[e * SO_KV_PAGE];
    } else {
        const float *k = (const float *)(s->k.data + src) + from;
        float *out = (float *)(s->k.data + dst) + to;
        for (int e = 0; e < d; e++)
            out[e * SO_KV_PAGE] = k[e * SO_KV_PAGE];
    }
    memmove(s->v.data + dst + (size_t)to * s->entry_bytes,
            s->v.data + src + (size_t)from * s->entry_bytes, s->entry_bytes);
}

/* A copy may read what an earlier one wrote, but only within a layer and head. So threads
 * split layers and heads. */
void so_cpu_kv_copy(const so_cpu *b, const so_op *op, int index, int count) {
    (void)b;
    const so_kv_store *s = op->kv_copy.store;
    const so_kv_slot *from = at(op->kv_copy.from), *to = at(op->kv_copy.to);
    int n_heads = s->shape.n_heads_kv;
    long begin, end;
    so_split((long)s->shape.n_layers * n_heads, 1, index, count, &begin, &end);
    for (long i = begin; i < end; i++)
        for (int j = 0; j < op->n; j++) {
            check_slot(s, from[j]);
            check_slot(s, to[j]);
            int layer = (int)(i / n_heads), head = (int)(i % n_heads);
            copy_entry(s, so_kv_page(s, layer, from[j].page, head), from[j].place,
                       so_kv_page(s, layer, to[j].page, head), to[j].place);
        }
}

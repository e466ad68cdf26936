/* A fake backend whose store holds one number per entry, so that cache tests see what attention
 * would read. */
#ifndef SO_TEST_KV_FAKE_H
#define SO_TEST_KV_FAKE_H

#include "so_test.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/rng.h"
#include "kv/kv.h"

struct so_buffer {
    unsigned char *data;
};
struct so_kv_store {
    int64_t *entries; /* [n_pages][SO_KV_PAGE] */
};
typedef struct fake {
    so_backend base;
    int n_copies, n_copy_ops;
} fake;

static int fake_buffer_create(so_backend *b, size_t n, so_buffer **out, so_err *err) {
    (void)b;
    (void)err;
    *out = SO_NEW(so_buffer);
    (*out)->data = so_calloc(n, 1);
    return 0;
}
static void fake_buffer_free(so_backend *b, so_buffer *buf) {
    (void)b;
    free(buf->data);
    free(buf);
}
static int fake_kv_create(so_backend *b, const so_kv_shape *s, so_kv_store **out, so_err *err) {
    (void)b;
    if (s->n_layers == 666)
        return so_err_set(err, SO_ENOMEM, "no memory for the store");
    *out = SO_NEW(so_kv_store);
    (*out)->entries = SO_NEW_N(int64_t, s->n_pages * SO_KV_PAGE);
    memset((*out)->entries, 0xAA, (size_t)s->n_pages * SO_KV_PAGE * sizeof(int64_t));
    return 0;
}
static void fake_kv_free(so_backend *b, so_kv_store *s) {
    (void)b;
    free(s->entries);
    free(s);
}
static int64_t *entry(so_kv_store *s, so_kv_slot at) {
    return &s->entries[at.page * SO_KV_PAGE + at.place];
}
static void fake_submit(so_backend *b, const so_op *op) {
    fake *f = (fake *)b;
    if (op->kind == SO_OP_UPLOAD) {
        memcpy(op->upload.dst.buf->data + op->upload.dst.off, op->upload.src, op->upload.n_bytes);
        return;
    }
    assert_int_equal(op->kind, SO_OP_KV_COPY);
    const so_kv_slot *from = (void *)(op->kv_copy.from.buf->data + op->kv_copy.from.off);
    const so_kv_slot *to = (void *)(op->kv_copy.to.buf->data + op->kv_copy.to.off);
    for (int i = 0; i < op->n; i++)
        *entry(op->kv_copy.store, to[i]) = *entry(op->kv_copy.store, from[i]);
    f->n_copies += op->n;
    f->n_copy_ops++;
}
static const so_backend_vt FAKE_VT = {
    .name = "fake",
    .buffer_create = fake_buffer_create,
    .buffer_free = fake_buffer_free,
    .kv_create = fake_kv_create,
    .kv_free = fake_kv_free,
    .submit = fake_submit,
};

/* The entry of position `slot` of s. */
static inline int64_t *fake_entry(so_kv *kv, so_seq *s, int slot) {
    int n_pages;
    const int32_t *pages = so_seq_pages(s, &n_pages);
    assert_true(slot / SO_KV_PAGE < n_pages);
    return entry(so_kv_backing(kv), (so_kv_slot){pages[slot / SO_KV_PAGE], slot % SO_KV_PAGE});
}

#endif

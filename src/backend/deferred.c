/* A backend for tests that runs operations as late as possible. It finds code that reads a result
 * before sync, which works by chance on the CPU and fails on a GPU.
 *
 * It wraps a CPU backend and returns that backend's own objects. Submitted operations
 * (uploads with a copy of their bytes) are queued until sync passes them all to the CPU backend,
 * in order. Freeing an object that queued operations may use runs the queue earlier. Until then
 *
 *   buffers and KV stores   have no access rights: reading or writing one through any pointer
 *                           faults at the instruction that did it
 *   download targets        are filled with 0xA5 at submit, so that a result read too early is
 *                           wrong in every run and not only occasionally
 *
 * The queue grows without limit; speed is not a goal. One thread at a time. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "backend/cpu/cpu.h"
#include "base/mem.h"

enum { POISON = 0xA5 };

typedef struct deferred {
    so_backend base;
    so_backend *inner;
    so_op *ops;
    size_t n_ops, ops_cap;
    so_buffer **areas; /* memory to protect: buffers, and K and V of KV stores */
    size_t n_areas, areas_cap;
} deferred;

static deferred *of(so_backend *b) { return (deferred *)b; }

static void protect(const so_buffer *area, int rights) {
    if (mprotect(area->data, area->map_bytes, rights) != 0)
        so_panic(__FILE__, __LINE__, "mprotect of %zu bytes: %s", area->map_bytes, strerror(errno));
}

static void protect_all(const deferred *d, int rights) {
    for (size_t i = 0; i < d->n_areas; i++)
        protect(d->areas[i], rights);
}

static void lock_area(deferred *d, so_buffer *area) {
    if (d->n_areas == d->areas_cap) {
        d->areas_cap = SO_MAX(16, 2 * d->areas_cap);
        d->areas = so_realloc(d->areas, d->areas_cap * sizeof *d->areas);
    }
    d->areas[d->n_areas++] = area;
    protect(area, PROT_NONE);
}

static void forget_area(deferred *d, const so_buffer *area) {
    for (size_t i = 0; i < d->n_areas; i++)
        if (d->areas[i] == area) {
            d->areas[i] = d->areas[--d->n_areas];
            return;
        }
    so_panic(__FILE__, __LINE__, "buffer does not belong to this backend");
}

static int deferred_sync(so_backend *b, so_err *err) {
    deferred *d = of(b);
    protect_all(d, PROT_READ | PROT_WRITE);
    for (size_t i = 0; i < d->n_ops; i++) {
        so_submit(d->inner, &d->ops[i]);
        if (d->ops[i].kind == SO_OP_UPLOAD)
            free((void *)(uintptr_t)d->ops[i].upload.src);
    }
    d->n_ops = 0;
    int rc = d->inner->vt->sync(d->inner, err);
    protect_all(d, PROT_NONE);
    return rc;
}

static void submit(so_backend *b, const so_op *given) {
    deferred *d = of(b);
    so_range ranges[SO_OP_RANGES];
    /* an invalid view aborts here, so that the backtrace shows who submitted it */
    so_cpu_ranges(given, ranges);
    if (d->n_ops == d->ops_cap) {
        d->ops_cap = SO_MAX(256, 2 * d->ops_cap);
        d->ops = so_realloc(d->ops, d->ops_cap * sizeof *d->ops);
    }
    so_op *op = &d->ops[d->n_ops++];
    *op = *given;
    if (op->kind == SO_OP_UPLOAD) {
        void *copy = so_alloc(op->upload.n_bytes);
        if (op->upload.n_bytes)
            memcpy(copy, op->upload.src, op->upload.n_bytes);
        op->upload.src = copy;
    } else if (op->kind == SO_OP_DOWNLOAD && op->download.n_bytes) {
        memset(op->download.dst, POISON, op->download.n_bytes);
    }
}

static int buffer_create(so_backend *b, size_t n_bytes, so_buffer **out, so_err *err) {
    deferred *d = of(b);
    int rc = d->inner->vt->buffer_create(d->inner, n_bytes, out, err);
    if (rc == 0)
        lock_area(d, *out);
    return rc;
}

/* Runs queued operations before an object that they may use is freed. */
static void run_pending(deferred *d) {
    so_err err = {0};
    if (d->n_ops > 0 && deferred_sync(&d->base, &err) != 0)
        so_panic(__FILE__, __LINE__, "%s", err.msg);
}

static void buffer_free(so_backend *b, so_buffer *buf) {
    deferred *d = of(b);
    if (!buf)
        return;
    run_pending(d);
    forget_area(d, buf);
    d->inner->vt->buffer_free(d->inner, buf);
}

static int weight_create(so_backend *b, const so_tensor *t, so_weight **out, so_err *err) {
    return of(b)->inner->vt->weight_create(of(b)->inner, t, out, err);
}

static bool weight_pack(so_backend *b, so_weight *w) {
    return of(b)->inner->vt->weight_pack(of(b)->inner, w);
}

static void weight_free(so_backend *b, so_weight *w) {
    run_pending(of(b));
    of(b)->inner->vt->weight_free(of(b)->inner, w);
}

static int kv_create(so_backend *b, const so_kv_shape *s, so_kv_store **out, so_err *err) {
    deferred *d = of(b);
    int rc = d->inner->vt->kv_create(d->inner, s, out, err);
    if (rc == 0) {
        lock_area(d, &(*out)->k);
        lock_area(d, &(*out)->v);
    }
    return rc;
}

static void kv_free(so_backend *b, so_kv_store *s) {
    deferred *d = of(b);
    if (!s)
        return;
    run_pending(d);
    forget_area(d, &s->k);
    forget_area(d, &s->v);
    d->inner->vt->kv_free(d->inner, s);
}

static void deferred_free(so_backend *b) {
    deferred *d = of(b);
    for (size_t i = 0; i < d->n_ops; i++)
        if (d->ops[i].kind == SO_OP_UPLOAD)
            free((void *)(uintptr_t)d->ops[i].upload.src);
    so_backend_free(d->inner);
    free(d->ops);
    free(d->areas);
    free(d);
}

static void deferred_describe(const so_backend *b, so_buf *out) {
    const deferred *d = (const deferred *)b;
    so_buf_append_c(out, "deferred ");
    d->inner->vt->describe(d->inner, out);
}

static const so_backend_vt deferred_vt = {
    .name = "deferred",
    .remote = true, /* so that tests take the same path as with a GPU */
    .free = deferred_free,
    .buffer_create = buffer_create,
    .buffer_free = buffer_free,
    .weight_create = weight_create,
    .weight_pack = weight_pack,
    .weight_free = weight_free,
    .kv_create = kv_create,
    .kv_free = kv_free,
    .submit = submit,
    .sync = deferred_sync,
    .describe = deferred_describe,
    .encoder_ops = true,
};

int so_backend_deferred_create(const so_backend_opts *o, so_backend **out, so_err *err) {
    so_backend *inner = NULL;
    int rc = so_backend_cpu_create(o, &inner, err);
    if (rc != 0)
        return rc;
    deferred *d = SO_NEW(deferred);
    d->base.vt = &deferred_vt;
    d->inner = inner;
    *out = &d->base;
    return 0;
}

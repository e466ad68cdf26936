/* Sources and the encoder's pass; source.h has the contract.
 *
 * Source i has the pages i·P … (i+1)·P − 1 of the store, P the pages of max_len positions, so the
 * table of pages is 0, 1, 2, … and a row that sees source i begins at entry i·P. The encoder's own
 * keys and values are float32 and used by one layer after the other. */
#include "model/source.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "model/t5.h"

typedef struct source {
    so_source base; /* first: a so_source of this module is a `source` */
    so_sources *owner;
    int32_t *tokens; /* [max_len] */
    int n;           /* 0: holds no text */
    uint64_t used;   /* number of its latest use */
} source;

struct so_sources {
    so_t5_pass pass; /* with room for max_len rows */
    int max_len, n, pages_each;
    source *all;
    int64_t serial;
    uint64_t n_uses;
    int32_t *h_ids;
    so_kv_slot *h_slots;
    so_attn_row *h_rows;
};

static so_kv_shape cross_shape(const so_hparams *hp, int n_pages, so_dtype dtype) {
    return (so_kv_shape){.n_layers = hp->n_layers,
                         .n_heads_kv = hp->n_heads,
                         .head_dim = hp->head_dim,
                         .n_pages = n_pages,
                         .dtype = dtype};
}

int64_t so_sources_bytes(const so_hparams *hp, int64_t max_len, int n, so_dtype dtype) {
    so_kv_shape shape = cross_shape(hp, 0, dtype);
    int64_t page = (int64_t)so_kv_bytes_per_token(&shape) * SO_KV_PAGE, bytes;
    int64_t pages = max_len / SO_KV_PAGE + (max_len % SO_KV_PAGE > 0);
    if (hp->n_enc_layers == 0)
        return 0;
    if (__builtin_mul_overflow(page, pages, &bytes) || __builtin_mul_overflow(bytes, n, &bytes))
        return INT64_MAX;
    return bytes;
}

static int make_view(so_sources *s, size_t n, size_t width, so_view *out, so_err *err) {
    so_backend *b = s->pass.model->backend;
    size_t n_bytes;
    if (!so_mul_size(n, width, &n_bytes) || !so_mul_size(n_bytes, 4, &n_bytes))
        return so_err_set(err, SO_ENOMEM, "a buffer of %zu rows of %zu is too large", n, width);
    return b->vt->buffer_create(b, SO_MAX(n_bytes, 64), &out->buf, err);
}

static int make_buffers(so_sources *s, so_err *err) {
    const so_hparams *hp = &s->pass.model->hp;
    so_t5_pass *p = &s->pass;
    size_t n = (size_t)s->max_len, d = (size_t)hp->d_model, ff = (size_t)hp->d_ff;
    size_t q = (size_t)hp->n_heads * (size_t)hp->head_dim;
    struct {
        so_view *view;
        size_t n, width;
    } all[] = {
        {&p->x, n, d},
        {&p->h, n, d},
        {&p->q, n, q},
        {&p->k, n, q},
        {&p->v, n, q},
        {&p->att, n, q},
        {&p->gate, n, hp->gated ? ff : 1},
        {&p->up, n, ff},
        {&p->ids, n, 1},
        {&p->positions, n, 1},
        {&p->rows, n, sizeof(so_attn_row) / 4},
        {&p->slots, n, sizeof(so_kv_slot) / 4},
        {&p->cross_slots, n, sizeof(so_kv_slot) / 4},
        {&p->pages, (size_t)s->n * (size_t)s->pages_each, 1},
    };
    int rc = 0;
    for (size_t i = 0; i < SO_LEN(all) && rc == 0; i++)
        rc = make_view(s, all[i].n, all[i].width, all[i].view, err);
    return rc;
}

/* What never changes: positions, the table of pages, and the slots of the encoder's own cache. */
static int upload_constants(so_sources *s, so_err *err) {
    so_backend *b = s->pass.model->backend;
    int n_pages = s->n * s->pages_each, count = SO_MAX(n_pages, s->max_len);
    int32_t *numbers = SO_NEW_N(int32_t, count);
    for (int i = 0; i < count; i++)
        numbers[i] = i;
    for (int i = 0; i < s->max_len; i++)
        s->h_slots[i] = (so_kv_slot){i / SO_KV_PAGE, i % SO_KV_PAGE};
    const struct {
        so_view dst;
        const void *src;
        size_t n_bytes;
    } all[] = {{s->pass.positions, numbers, (size_t)s->max_len * sizeof *numbers},
               {s->pass.pages, numbers, (size_t)n_pages * sizeof *numbers},
               {s->pass.slots, s->h_slots, (size_t)s->max_len * sizeof *s->h_slots}};
    for (size_t i = 0; i < SO_LEN(all); i++)
        so_submit(
            b, &(so_op){.kind = SO_OP_UPLOAD, .upload = {all[i].dst, all[i].src, all[i].n_bytes}});
    int rc = b->vt->sync(b, err);
    free(numbers);
    return rc;
}

static int make_stores(so_sources *s, so_dtype dtype, so_err *err) {
    const so_model *m = s->pass.model;
    so_backend *b = m->backend;
    so_kv_shape own = cross_shape(&m->hp, s->pages_each, SO_DTYPE_F32);
    so_kv_shape cross = cross_shape(&m->hp, s->n * s->pages_each, dtype);
    own.n_layers = 1;
    int rc = b->vt->kv_create(b, &own, &s->pass.own, err);
    return rc == 0 ? b->vt->kv_create(b, &cross, &s->pass.cross, err) : rc;
}

int so_sources_create(const so_model *m, int max_len, int n, so_dtype dtype, so_sources **out,
                      so_err *err) {
    SO_ASSERT(m->t5 != NULL && max_len > 0 && n > 0);
    if ((int64_t)n * so_kv_pages_for(max_len) > INT32_MAX / SO_KV_PAGE)
        return so_err_set(err, SO_ELIMIT,
                          "%d source texts of up to %d tokens are too many: lower --parallel or "
                          "--ctx-size",
                          n, max_len);
    so_sources *s = SO_NEW(so_sources);
    s->pass.model = m;
    s->max_len = max_len;
    s->n = n;
    s->pages_each = so_kv_pages_for(max_len);
    s->all = SO_NEW_N(source, n);
    s->h_ids = SO_NEW_N(int32_t, max_len);
    s->h_slots = SO_NEW_N(so_kv_slot, max_len);
    s->h_rows = SO_NEW_N(so_attn_row, max_len);
    for (int i = 0; i < n; i++) {
        s->all[i].owner = s;
        s->all[i].tokens = SO_NEW_N(int32_t, max_len);
    }
    int rc = make_buffers(s, err);
    if (rc == 0)
        rc = make_stores(s, dtype, err);
    if (rc == 0)
        rc = upload_constants(s, err);
    if (rc != 0)
        so_sources_free(s);
    else
        *out = s;
    return rc;
}

void so_sources_free(so_sources *s) {
    if (!s)
        return;
    so_t5_pass *p = &s->pass;
    so_backend *b = p->model->backend;
    so_view views[] = {p->x,  p->h,         p->q,    p->k,     p->v,           p->att, p->gate,
                       p->up, p->positions, p->rows, p->slots, p->cross_slots, p->ids, p->pages};
    for (size_t i = 0; i < SO_LEN(views); i++)
        if (views[i].buf)
            b->vt->buffer_free(b, views[i].buf);
    if (p->own)
        b->vt->kv_free(b, p->own);
    if (p->cross)
        b->vt->kv_free(b, p->cross);
    for (int i = 0; i < s->n; i++) {
        SO_ASSERT_OP(s->all[i].base.n_users, ==, 0);
        free(s->all[i].tokens);
    }
    free(s->all);
    free(s->h_ids);
    free(s->h_slots);
    free(s->h_rows);
    free(s);
}

int so_sources_max_len(const so_sources *s) { return s->max_len; }

void so_sources_forget(so_sources *s) {
    for (int i = 0; i < s->n; i++)
        s->all[i].n = 0;
}

/* ---- one source ---- */

static void upload(const so_sources *s, so_view dst, const void *src, size_t n_bytes) {
    so_submit(s->pass.model->backend,
              &(so_op){.kind = SO_OP_UPLOAD, .upload = {dst, src, n_bytes}});
}

static int encode(so_sources *s, source *to, so_err *err) {
    so_backend *b = s->pass.model->backend;
    int first = (int)(to - s->all) * s->pages_each, n = to->n;
    SO_ASSERT(!b->in_flight);
    for (int i = 0; i < n; i++) {
        s->h_ids[i] = to->tokens[i];
        s->h_rows[i] = (so_attn_row){.pos = n - 1, .n_prefix = n};
        s->h_slots[i] = (so_kv_slot){first + i / SO_KV_PAGE, i % SO_KV_PAGE};
    }
    upload(s, s->pass.ids, s->h_ids, (size_t)n * sizeof *s->h_ids);
    upload(s, s->pass.rows, s->h_rows, (size_t)n * sizeof *s->h_rows);
    upload(s, s->pass.cross_slots, s->h_slots, (size_t)n * sizeof *s->h_slots);
    s->pass.n = n;
    int64_t t = so_clock_ns();
    so_t5_encode(&s->pass);
    int rc = b->vt->sync(b, err);
    b->encode_ms += so_clock_ms_since(t);
    if (rc != 0)
        b->n_failed++;
    return rc;
}

static source *find(so_sources *s, const int32_t *tokens, int n) {
    for (int i = 0; i < s->n; i++)
        if (s->all[i].n == n && memcmp(s->all[i].tokens, tokens, (size_t)n * sizeof *tokens) == 0)
            return &s->all[i];
    return NULL;
}

static source *find_room(so_sources *s) {
    source *best = NULL;
    for (int i = 0; i < s->n; i++)
        if (s->all[i].base.n_users == 0 && (!best || s->all[i].used < best->used))
            best = &s->all[i];
    return best;
}

int so_sources_set(so_sources *s, so_seq *seq, const int32_t *tokens, int n, so_err *err) {
    SO_ASSERT(n > 0 && n <= s->max_len);
    source *at = find(s, tokens, n);
    if (!at) {
        at = find_room(s);
        if (!at)
            return so_err_set(err, SO_ELIMIT, "all %d source texts are in use", s->n);
        memcpy(at->tokens, tokens, (size_t)n * sizeof *tokens);
        at->n = n;
        at->base.serial = ++s->serial;
        int rc = encode(s, at, err);
        if (rc != 0) {
            at->n = 0;
            return rc;
        }
    }
    at->used = ++s->n_uses;
    so_seq_set_source(seq, &at->base);
    return SO_OK;
}

so_kv_store *so_sources_store(const so_sources *s) { return s->pass.cross; }
so_view so_sources_pages(const so_sources *s) { return s->pass.pages; }

const so_sources *so_sources_of(const so_seq *seq, so_attn_row *row) {
    const source *at = (const source *)so_seq_get_source(seq);
    if (!at)
        return NULL;
    const so_sources *s = at->owner;
    *row = (so_attn_row){
        .pos = at->n - 1, .n_prefix = at->n, .page_off = (int32_t)(at - s->all) * s->pages_each};
    return s;
}

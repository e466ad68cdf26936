/* Loads and computes decoding heads (heads.h).
 *
 * One run is a list of operations like a pass: upload the states, the blocks of every head, one
 * product with the output matrix for all heads and states (or one per head, if heads have their own),
 * download. silu(z) is silu(z) · 1: the backend's product with a row of ones, which is exact.
 *
 *   states [n][d] ─┬─ head 1: blocks ─┐
 *                  ├─ head 2: blocks ─┤ [heads][n][d] ─ output matrix ─ logits [heads][n][len]
 *                  └─ …               ┘
 *
 * Refuses: tensors that are missing, that have another shape, or that the kind does not have; NaN or
 * infinity in a vector. The drafter checks logits rows. Thread: one at a time per backend. */
#include "model/heads.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "format/quant.h"
#include "model/impl.h"
#include "model/vocab_subset.h"
#include "model/weights.h"

enum { MAX_HIDDEN = 1 << 16, MAX_VECTORS = SO_HEADS_MAX * SO_HEADS_MAX_LAYERS + 1 };

struct so_heads {
    so_heads_info info;
    const so_model *target;
    so_backend *b;
    so_checkpoint *ck;
    int d, len, max_rows, n; /* n: states of the last run */
    int32_t *subset;
    so_linear blocks[SO_HEADS_MAX][SO_HEADS_MAX_LAYERS]; /* medusa; blockwise: [0] up, [1] down */
    so_weight *output[SO_HEADS_MAX];                     /* [0] of all heads, unless own_output */
    bool own_output;
    so_weight *weights[SO_HEADS_MAX * (SO_HEADS_MAX_LAYERS + 1) + 1]; /* to be freed */
    void *memory[2]; /* bytes of a picked output matrix that was not packed */
    int n_weights, n_memory;
    so_buffer *consts; /* biases, and ones */
    so_view ones;      /* [max_rows][widest] */
    so_view x, wide, state,
        logits;        /* [max_rows][d], [max_rows][widest], [heads][max_rows][d or len] */
    float *embeddings; /* lookahead */
    float *h_logits;   /* [heads · max_rows][len] */
    size_t weight_bytes;
};

/* --- metadata --- */

static const char *const KINDS[] = {"medusa", "blockwise", "lookahead"};

const char *so_heads_kind_name(so_heads_kind k) { return KINDS[k]; }

bool so_heads_is_gguf(const so_gguf *g) {
    so_str arch;
    return so_gguf_get_str(g, "general.architecture", &arch, NULL) == SO_OK &&
           so_str_eq_c(arch, SO_HEADS_ARCH);
}

static const json_t *config_count(const so_checkpoint *ck, const char *key) {
    return json_object_get(so_checkpoint_config(ck), key);
}

bool so_heads_is(const so_checkpoint *ck) {
    const so_gguf *g = so_checkpoint_gguf(ck);
    return g ? so_heads_is_gguf(g) : config_count(ck, "medusa_num_heads") != NULL;
}

/* A whole number from `least` to `most`. */
static int check_count(const char *path, const char *key, int64_t v, int least, int most, int *out,
                       so_err *err) {
    if (v < least || v > most)
        return so_err_set(err, SO_EFORMAT, "%s: %s is %lld: must be from %d to %d", path, key,
                          (long long)v, least, most);
    *out = (int)v;
    return SO_OK;
}

static int read_count(const so_gguf *g, const char *key, int least, int most, int *out,
                      so_err *err) {
    int64_t v = 0;
    int rc = so_gguf_get_i64(g, key, &v, err);
    if (rc == SO_ENOTFOUND)
        return so_err_set(err, SO_EFORMAT, "%s: %s is missing", so_gguf_path(g), key);
    return rc == SO_OK ? check_count(so_gguf_path(g), key, v, least, most, out, err) : rc;
}

static int read_kind(const so_gguf *g, so_heads_kind *out, so_err *err) {
    so_str s = {"", 0};
    int rc = so_gguf_get_str(g, "sooth.heads.kind", &s, err);
    if (rc != SO_OK && rc != SO_ENOTFOUND)
        return rc;
    for (int i = 0; i < SO_HEADS_N_KINDS; i++)
        if (so_str_eq_c(s, KINDS[i])) {
            *out = (so_heads_kind)i;
            return SO_OK;
        }
    return so_err_set(err, SO_EFORMAT,
                      "%s: sooth.heads.kind is \"%.*s\": must be medusa, blockwise or lookahead",
                      so_gguf_path(g), (int)SO_MIN(s.len, (size_t)40), s.ptr);
}

static int read_accuracy(const so_gguf *g, so_heads_info *o, so_err *err) {
    static const char *const key = "sooth.heads.accuracy";
    const so_gguf_kv *kv = so_gguf_find(g, key);
    if (!kv)
        return SO_OK;
    int rc = read_count(g, "sooth.heads.ranks", 1, SO_HEADS_MAX_RANKS, &o->n_ranks, err);
    if (rc != SO_OK)
        return rc;
    if (kv->type != SO_GGUF_ARRAY || kv->n != (uint64_t)o->n_heads * (uint64_t)o->n_ranks)
        return so_err_set(err, SO_EFORMAT, "%s: %s must be an array of %d numbers, %d per head",
                          so_gguf_path(g), key, o->n_heads * o->n_ranks, o->n_ranks);
    for (int i = 0; i < o->n_heads * o->n_ranks; i++) {
        double *a = &o->accuracy[i / o->n_ranks][i % o->n_ranks];
        if (!so_gguf_elem_f64(kv, (uint64_t)i, a) || !(*a >= 0 && *a <= 1))
            return so_err_set(err, SO_EFORMAT, "%s: %s: element %d is %g: must be from 0 to 1",
                              so_gguf_path(g), key, i, *a);
    }
    return SO_OK;
}

int so_heads_read_gguf(const so_gguf *g, so_heads_info *out, so_err *err) {
    so_heads_info o = {0};
    int rc = read_kind(g, &o.kind, err);
    if (rc == SO_OK)
        rc = read_count(g, "sooth.heads.count", 1, SO_HEADS_MAX, &o.n_heads, err);
    if (rc == SO_OK && o.kind == SO_HEADS_MEDUSA)
        rc = read_count(g, "sooth.heads.layers", 0, SO_HEADS_MAX_LAYERS, &o.n_layers, err);
    if (rc == SO_OK && o.kind == SO_HEADS_BLOCKWISE)
        rc = read_count(g, "sooth.heads.hidden", 1, MAX_HIDDEN, &o.d_hidden, err);
    if (rc == SO_OK)
        rc = read_accuracy(g, &o, err);
    if (rc == SO_OK)
        *out = o;
    return rc;
}

/* config.json of published Medusa heads. */
static int read_config(const so_checkpoint *ck, so_heads_info *o, so_err *err) {
    const json_t *heads = config_count(ck, "medusa_num_heads");
    const json_t *layers = config_count(ck, "medusa_num_layers");
    if (!json_is_integer(heads) || !json_is_integer(layers))
        return so_err_set(err, SO_EFORMAT,
                          "%s: config.json: medusa_num_heads and medusa_num_layers must be whole "
                          "numbers",
                          so_checkpoint_path(ck));
    const char *path = so_checkpoint_path(ck);
    int rc = check_count(path, "medusa_num_heads", json_integer_value(heads), 1, SO_HEADS_MAX,
                         &o->n_heads, err);
    if (rc == SO_OK)
        rc = check_count(path, "medusa_num_layers", json_integer_value(layers), 0,
                         SO_HEADS_MAX_LAYERS, &o->n_layers, err);
    return rc;
}

int so_heads_read_info(const so_checkpoint *ck, so_heads_info *out, so_err *err) {
    so_heads_info o = {0};
    if (!so_heads_is(ck))
        return so_err_set(err, SO_ENOTFOUND,
                          "%s: holds no heads (architecture " SO_HEADS_ARCH
                          ", or a folder whose config.json has medusa_num_heads); a draft model "
                          "is named by --spec 'model(FILE)'",
                          so_checkpoint_path(ck));
    if (so_checkpoint_gguf(ck))
        return so_heads_read_gguf(so_checkpoint_gguf(ck), out, err);
    int rc = read_config(ck, &o, err);
    if (rc == SO_OK)
        *out = o;
    return rc;
}

/* --- loading --- */

typedef struct loader {
    so_heads *h;
    so_err *err;
    int rc;
    int n_used; /* tensors */
    float *host;
    size_t n_host, host_cap; /* floats of the vectors */
    so_view *views[MAX_VECTORS];
    int n_views;
} loader;

static bool is_folder(const so_heads *h) { return so_checkpoint_gguf(h->ck) == NULL; }

/* The tensor with this name; k columns, m rows (0: a vector of k). NULL after an error. */
static const so_tensor *find(loader *ld, const char *name, int64_t k, int64_t m) {
    const so_tensor *t = NULL;
    so_checkpoint *ck = ld->h->ck;
    if (ld->rc == SO_OK)
        ld->rc = so_checkpoint_require(ck, name, &t, ld->err);
    if (ld->rc != SO_OK)
        return NULL;
    if (t->dims[0] != k || so_tensor_rows(t) != SO_MAX(m, (int64_t)1)) {
        ld->rc = so_err_set(ld->err, SO_EMISMATCH,
                            "%s: tensor %s has %lld rows of %lld numbers; this target needs %lld "
                            "of %lld: give heads that were trained for it",
                            so_checkpoint_path(ck), name, (long long)so_tensor_rows(t),
                            (long long)t->dims[0], (long long)SO_MAX(m, (int64_t)1), (long long)k);
        return NULL;
    }
    ld->n_used++;
    return t;
}

/* Reserves n floats among the constants. */
static float *reserve(loader *ld, size_t n, so_view *view) {
    size_t start = (ld->n_host + 15) / 16 * 16;
    if (start + n > ld->host_cap) {
        ld->host_cap = SO_MAX(start + n, ld->host_cap * 2);
        ld->host = so_realloc(ld->host, ld->host_cap * sizeof *ld->host);
    }
    memset(ld->host + ld->n_host, 0, (start - ld->n_host) * sizeof *ld->host);
    ld->n_host = start + n;
    view->off = start * sizeof(float);
    SO_ASSERT(ld->n_views < MAX_VECTORS);
    ld->views[ld->n_views++] = view;
    return ld->host + start;
}

static void check_finite(loader *ld, const so_tensor *t, const float *x) {
    int64_t bad = so_weights_nonfinite(x, so_tensor_count(t));
    if (bad >= 0)
        ld->rc =
            so_err_set(ld->err, SO_EFORMAT, "%s: tensor %.*s holds NaN or infinity at element %lld",
                       so_checkpoint_path(ld->h->ck), SO_STR_ARG(t->name), (long long)bad);
}

static void vector(loader *ld, const char *name, int64_t n, so_view *out) {
    const so_tensor *t = find(ld, name, n, 0);
    if (!t)
        return;
    float *x = reserve(ld, (size_t)n, out);
    so_dequantize_row(t->dtype, t->data, x, n);
    check_finite(ld, t, x);
}

/* memory: owns t's bytes, or NULL. */
static so_weight *make_weight(loader *ld, const so_tensor *t, void *memory) {
    so_heads *h = ld->h;
    so_weight *w = NULL;
    if (ld->rc == SO_OK)
        ld->rc = h->b->vt->weight_create(h->b, t, &w, ld->err);
    if (ld->rc != SO_OK) {
        free(memory);
        return NULL;
    }
    h->weights[h->n_weights++] = w;
    h->weight_bytes += t->n_bytes;
    if (h->b->vt->weight_pack(h->b, w)) {
        so_checkpoint_drop(h->ck, t->data, t->n_bytes);
        free(memory);
    } else if (memory) {
        h->memory[h->n_memory++] = memory;
    }
    return w;
}

static so_weight *matrix(loader *ld, const char *name, int64_t k, int64_t m) {
    const so_tensor *t = find(ld, name, k, m);
    return t ? make_weight(ld, t, NULL) : NULL;
}

/* "head.0.blk.1.weight", or in a folder "0.1.linear.weight". */
static void block_name(const so_heads *h, int head, int layer, const char *part, char out[96]) {
    if (is_folder(h))
        snprintf(out, 96, "%d.%d.linear.%s", head, layer, part);
    else
        snprintf(out, 96, "head.%d.blk.%d.%s", head, layer, part);
}

static void load_medusa(loader *ld) {
    so_heads *h = ld->h;
    char name[96];
    for (int i = 0; i < h->info.n_heads; i++)
        for (int j = 0; j < h->info.n_layers; j++) {
            block_name(h, i, j, "weight", name);
            h->blocks[i][j].w = matrix(ld, name, h->d, h->d);
            block_name(h, i, j, "bias", name);
            vector(ld, name, h->d, &h->blocks[i][j].bias);
        }
}

static void load_blockwise(loader *ld) {
    so_heads *h = ld->h;
    char name[96];
    for (int i = 0; i < h->info.n_heads; i++) {
        snprintf(name, sizeof name, "head.%d.up.weight", i);
        h->blocks[i][0].w = matrix(ld, name, h->d, h->info.d_hidden);
        snprintf(name, sizeof name, "head.%d.up.bias", i);
        vector(ld, name, h->info.d_hidden, &h->blocks[i][0].bias);
        snprintf(name, sizeof name, "head.%d.down.weight", i);
        h->blocks[i][1].w = matrix(ld, name, h->info.d_hidden, h->d);
    }
}

static void load_embeddings(loader *ld) {
    so_heads *h = ld->h;
    const so_tensor *t = find(ld, "look_ahead", h->d, h->info.n_heads);
    if (!t)
        return;
    size_t row_bytes = so_dtype_row_bytes(t->dtype, h->d);
    h->embeddings = SO_NEW_N(float, (size_t)h->info.n_heads *(size_t)h->d);
    for (int i = 0; i < h->info.n_heads; i++)
        so_dequantize_row(t->dtype, (const char *)t->data + (size_t)i * row_bytes,
                          h->embeddings + (size_t)i * (size_t)h->d, h->d);
    check_finite(ld, t, h->embeddings);
}

/* The heads' own output matrices: each has a row for every id that they have logits for. */
static void load_own_output(loader *ld) {
    so_heads *h = ld->h;
    char name[96];
    for (int i = 0; i < h->info.n_heads; i++) {
        if (is_folder(h))
            snprintf(name, sizeof name, "%d.%d.weight", i, h->info.n_layers);
        else
            snprintf(name, sizeof name, "head.%d.output.weight", i);
        h->output[i] = matrix(ld, name, h->d, h->len);
    }
}

/* The target's output matrix: as it was loaded, or its rows for the subset. */
static void load_shared_output(loader *ld) {
    so_heads *h = ld->h;
    so_tensor part;
    void *memory = NULL;
    if (!h->subset) {
        h->output[0] = h->target->output.w;
        h->weight_bytes += h->target->output_bytes;
        return;
    }
    if (ld->rc == SO_OK)
        ld->rc =
            so_weights_pick(&h->target->output_tensor, h->subset, h->len, &part, &memory, ld->err);
    if (ld->rc == SO_OK)
        h->output[0] = make_weight(ld, &part, memory);
}

static void load_output(loader *ld) {
    so_heads *h = ld->h;
    h->own_output = is_folder(h) || so_checkpoint_tensor(h->ck, "head.0.output.weight") != NULL;
    if (h->own_output)
        load_own_output(ld);
    else
        load_shared_output(ld);
}

static void check_leftovers(loader *ld) {
    size_t n = so_checkpoint_n_tensors(ld->h->ck);
    if (ld->rc == SO_OK && n != (size_t)ld->n_used)
        ld->rc = so_err_set(ld->err, SO_EFORMAT,
                            "%s: has %zu tensors; %s heads with these counts have %d",
                            so_checkpoint_path(ld->h->ck), n, KINDS[ld->h->info.kind], ld->n_used);
}

/* --- buffers --- */

static so_view device(loader *ld, size_t rows, size_t width) {
    so_view v = {0};
    so_heads *h = ld->h;
    if (ld->rc == SO_OK)
        ld->rc = h->b->vt->buffer_create(h->b, SO_MAX(rows * width * sizeof(float), 64), &v.buf,
                                         ld->err);
    return v;
}

/* States of one run and head; lookahead has one row per state. */
static int outputs_per_state(const so_heads *h) {
    return h->info.kind == SO_HEADS_LOOKAHEAD ? 1 : h->info.n_heads;
}

static void make_buffers(loader *ld) {
    so_heads *h = ld->h;
    size_t n = (size_t)h->max_rows, out = n * (size_t)outputs_per_state(h);
    size_t widest = (size_t)SO_MAX(h->d, h->info.d_hidden);
    float *ones = reserve(ld, n * widest, &h->ones);
    for (size_t i = 0; i < n * widest; i++)
        ones[i] = 1;
    h->x = device(ld, n, (size_t)h->d);
    h->wide = device(ld, n, widest);
    h->state = device(ld, out, (size_t)h->d);
    h->logits = device(ld, out, (size_t)h->len);
    if (ld->rc != SO_OK)
        return;
    h->h_logits = so_try_alloc(out * (size_t)h->len, sizeof(float));
    if (!h->h_logits)
        ld->rc = so_err_set(ld->err, SO_ENOMEM, "no memory for %zu logits rows of heads", out);
}

static void upload_consts(loader *ld) {
    so_heads *h = ld->h;
    size_t n_bytes = ld->n_host * sizeof(float);
    if (ld->rc == SO_OK)
        ld->rc = h->b->vt->buffer_create(h->b, n_bytes, &h->consts, ld->err);
    if (ld->rc != SO_OK)
        return;
    for (int i = 0; i < ld->n_views; i++)
        ld->views[i]->buf = h->consts;
    so_submit(h->b, &(so_op){.kind = SO_OP_UPLOAD, .upload = {{h->consts, 0}, ld->host, n_bytes}});
    ld->rc = h->b->vt->sync(h->b, ld->err);
}

/* Rows per run so that the logits take about MAX_LOGITS floats, but enough for one request. */
static int fit_rows(const so_heads *h, int max_rows) {
    enum { MAX_LOGITS = 16 << 20 };
    int64_t each = (int64_t)h->len * outputs_per_state(h);
    return (int)SO_MAX(SO_MIN((int64_t)max_rows, MAX_LOGITS / each), (int64_t)SO_HEADS_MAX + 1);
}

int so_heads_load(so_checkpoint *ck, const so_model *target, int max_rows, so_heads **out,
                  so_err *err) {
    so_heads *h = SO_NEW(so_heads);
    *h = (so_heads){.ck = ck, .target = target, .b = target->backend, .d = target->hp.d_model};
    loader ld = {.h = h, .err = err};
    SO_ASSERT(max_rows >= 1);
    ld.rc = so_heads_read_info(ck, &h->info, err);
    if (ld.rc == SO_OK)
        ld.rc = so_vocab_subset_read(so_checkpoint_gguf(ck), target->hp.n_vocab, &h->subset,
                                     &h->len, err);
    if (ld.rc == SO_OK) {
        h->max_rows = fit_rows(h, max_rows);
        if (h->info.kind == SO_HEADS_MEDUSA)
            load_medusa(&ld);
        else if (h->info.kind == SO_HEADS_BLOCKWISE)
            load_blockwise(&ld);
        else
            load_embeddings(&ld);
    }
    if (ld.rc == SO_OK)
        load_output(&ld);
    check_leftovers(&ld);
    if (ld.rc == SO_OK)
        make_buffers(&ld);
    upload_consts(&ld);
    free(ld.host);
    if (ld.rc != SO_OK)
        so_heads_free(h);
    else
        *out = h;
    return ld.rc;
}

void so_heads_free(so_heads *h) {
    if (!h)
        return;
    so_buffer *buffers[] = {h->consts, h->x.buf, h->wide.buf, h->state.buf, h->logits.buf};
    for (int i = 0; i < h->n_weights; i++)
        h->b->vt->weight_free(h->b, h->weights[i]);
    for (size_t i = 0; i < SO_LEN(buffers); i++)
        if (buffers[i])
            h->b->vt->buffer_free(h->b, buffers[i]);
    for (int i = 0; i < h->n_memory; i++)
        free(h->memory[i]);
    free(h->embeddings);
    free(h->h_logits);
    free(h->subset);
    free(h);
}

const so_heads_info *so_heads_get_info(const so_heads *h) { return &h->info; }
size_t so_heads_weight_bytes(const so_heads *h) { return h->weight_bytes; }
const int32_t *so_heads_subset(const so_heads *h) { return h->subset; }
int so_heads_logits_len(const so_heads *h) { return h->len; }
int so_heads_max_rows(const so_heads *h) { return h->max_rows; }
const float *so_heads_embeddings(const so_heads *h) { return h->embeddings; }

/* --- the run --- */

static void linear(so_heads *h, so_view out, so_view x, const so_linear *w) {
    so_submit(h->b, &(so_op){.kind = SO_OP_MATMUL, .n = h->n, .matmul = {out, x, w->bias, w->w}});
}

static void silu(so_heads *h, so_view x, int d) {
    so_submit(h->b, &(so_op){.kind = SO_OP_SILU_MUL, .n = h->n, .eltwise = {x, x, h->ones, d}});
}

static void add(so_heads *h, so_view out, so_view a, so_view b) {
    so_submit(h->b, &(so_op){.kind = SO_OP_ADD, .n = h->n, .eltwise = {out, a, b, h->d}});
}

/* Rows first … of a buffer with rows of `width` floats. */
static so_view rows_from(so_view v, size_t first, int width) {
    v.off += first * (size_t)width * sizeof(float);
    return v;
}

/* The state that the output matrix reads for head i. */
static so_view run_head(so_heads *h, int i) {
    so_view x = h->x, out = rows_from(h->state, (size_t)i * (size_t)h->n, h->d);
    const so_linear *w = h->blocks[i];
    if (h->info.kind == SO_HEADS_BLOCKWISE) {
        linear(h, h->wide, x, &w[0]);
        silu(h, h->wide, h->info.d_hidden);
        linear(h, out, h->wide, &w[1]);
        add(h, out, x, out);
        return out;
    }
    for (int j = 0; j < h->info.n_layers; j++) {
        linear(h, h->wide, x, &w[j]);
        silu(h, h->wide, h->d);
        add(h, out, x, h->wide);
        x = out;
    }
    return x;
}

static void project(so_heads *h, so_view x, so_view out, const so_weight *w, int n) {
    so_submit(h->b, &(so_op){.kind = SO_OP_MATMUL, .n = n, .matmul = {.out = out, .x = x, .w = w}});
}

static void run_all(so_heads *h) {
    int n_out = outputs_per_state(h);
    bool has_blocks = h->info.kind == SO_HEADS_BLOCKWISE || h->info.n_layers > 0;
    bool together = has_blocks && !h->own_output; /* the heads' states are in one buffer */
    for (int i = 0; i < n_out; i++) {
        so_view state = run_head(h, i);
        if (!together)
            project(h, state, rows_from(h->logits, (size_t)i * (size_t)h->n, h->len),
                    h->output[h->own_output ? i : 0], h->n);
    }
    if (together)
        project(h, h->state, h->logits, h->output[0], n_out * h->n);
}

int so_heads_run(so_heads *h, const float *x, int n, so_err *err) {
    SO_ASSERT(n >= 1 && n <= h->max_rows && !h->b->in_flight);
    size_t n_out = (size_t)n * (size_t)outputs_per_state(h);
    h->n = n;
    so_submit(h->b, &(so_op){.kind = SO_OP_UPLOAD,
                             .upload = {h->x, x, (size_t)n * (size_t)h->d * sizeof(float)}});
    run_all(h);
    so_submit(h->b, &(so_op){.kind = SO_OP_DOWNLOAD,
                             .download = {h->logits, h->h_logits,
                                          n_out * (size_t)h->len * sizeof(float)}});
    int rc = h->b->vt->sync(h->b, err);
    if (rc != SO_OK) {
        h->b->n_failed++;
        h->n = 0;
    }
    return rc;
}

const float *so_heads_logits(const so_heads *h, int state, int head) {
    SO_ASSERT(state >= 0 && state < h->n && head >= 0 && head < outputs_per_state(h));
    return h->h_logits + ((size_t)head * (size_t)h->n + (size_t)state) * (size_t)h->len;
}

bool so_heads_row_is_finite(const so_heads *h, int state, int head) {
    return so_weights_nonfinite(so_heads_logits(h, state, head), h->len) < 0;
}

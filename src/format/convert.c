/* Converts a model to other dtypes:
 *   1. choose a dtype for each tensor (recipe.c);
 *   2. write all headers;
 *   3. stream the tensors in pieces of a few megabytes: rows to floats, check, quantise, write.
 *
 * Memory use is one piece, independent of the model's size. Every element is checked for NaN and
 * infinity, also in tensors whose bytes are copied unchanged, because readers of the output trust
 * its weights. Rows are quantised independently, so the output does not depend on the number of
 * threads. One thread calls so_convert; it runs its own pool. */
#include "format/convert.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/pool.h"
#include "format/quant.h"

/* Elements of one piece: 4 MiB of floats are enough work for two cores between two writes. */
enum { PIECE = 1 << 20 };

typedef struct job {
    const so_convert_source *src;
    const so_convert_opts *opts;
    so_recipe recipe;
    so_gguf_writer *w;
    so_pool *pool;
    so_convert_report report;
    uint64_t n_done, n_total; /* elements */
} job;

static int64_t rows_of(const so_convert_tensor *t) {
    int64_t n = 1;
    for (int i = 1; i < t->n_dims; i++)
        n *= t->dims[i];
    return n;
}

static so_recipe_choice choose(const job *j, const so_convert_tensor *t) {
    return so_recipe_choose(&j->recipe, so_str_c(t->name), t->n_dims, t->dims);
}

static void note_fallback(so_convert_report *r, const so_convert_tensor *t, so_recipe_choice c) {
    r->fallbacks = so_realloc(r->fallbacks, (r->n_fallbacks + 1) * sizeof *r->fallbacks);
    r->fallbacks[r->n_fallbacks++] =
        (so_convert_fallback){so_strdup(t->name), t->dims[0], c.wanted, c.dtype};
}

/* The recipe's file type, unless most elements of the quantised tensors fell back to another dtype:
 * then the file type of the most frequent dtype. n: elements by dtype. */
static int file_type(const job *j, const uint64_t *n, uint64_t n_fallback) {
    uint64_t total = 0;
    int most = 0;
    for (int t = 0; t < SO_DTYPE_COUNT; t++) {
        total += n[t];
        most = n[t] > n[most] ? t : most;
    }
    return n_fallback > total / 2 ? so_recipe_file_type((so_dtype)most) : j->recipe.file_type;
}

/* Chooses all dtypes and registers the tensors with the writer. Returns general.file_type. */
static int plan(job *j) {
    const so_convert_source *s = j->src;
    so_convert_report *r = &j->report;
    uint64_t n_elements[SO_DTYPE_COUNT] = {0}, n_fallback = 0;
    for (size_t i = 0; i < s->n_tensors; i++)
        so_recipe_observe(&j->recipe, so_str_c(s->tensors[i].name));
    for (size_t i = 0; i < s->n_tensors; i++) {
        const so_convert_tensor *t = &s->tensors[i];
        so_recipe_choice c = choose(j, t);
        uint64_t rows = (uint64_t)rows_of(t);
        so_gguf_writer_tensor(j->w, t->name, c.dtype, t->n_dims, t->dims);
        j->n_total += rows * (uint64_t)t->dims[0];
        r->bytes_in += rows * so_dtype_row_bytes(t->dtype, t->dims[0]);
        r->bytes_out += rows * so_dtype_row_bytes(c.dtype, t->dims[0]);
        r->n_tensors[c.dtype]++;
        r->n_requantised += !so_dtype_is_float(t->dtype) && c.dtype != t->dtype;
        if (c.wanted != SO_DTYPE_F32)
            n_elements[c.dtype] += rows * (uint64_t)t->dims[0];
        if (c.dtype != c.wanted) {
            n_fallback += rows * (uint64_t)t->dims[0];
            note_fallback(r, t, c);
        }
    }
    return file_type(j, n_elements, n_fallback);
}

/* `first` is the index of x[0] within the tensor. */
static int check_values(const job *j, const so_convert_tensor *t, so_dtype to, const float *x,
                        int64_t n, int64_t first, so_err *err) {
    float limit = to == SO_DTYPE_F16 ? 65504.0f : INFINITY;
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(x[i]))
            return so_err_set(err, SO_EFORMAT, "%s: tensor %s: element %" PRId64 " is %f",
                              j->src->path, t->name, first + i, (double)x[i]);
        if (fabsf(x[i]) > limit)
            return so_err_set(err, SO_ERANGE,
                              "%s: tensor %s: element %" PRId64 " is %g, beyond the range of F16; "
                              "choose BF16 or F32",
                              j->src->path, t->name, first + i, (double)x[i]);
    }
    return SO_OK;
}

typedef struct piece {
    float *x;         /* [max_rows][row_len] */
    unsigned char *q; /* [max_rows][row_bytes] */
    int64_t row_len, max_rows;
    size_t row_bytes;
} piece;

static int piece_alloc(piece *p, const job *j, const so_convert_tensor *t, so_dtype to,
                       so_err *err) {
    p->row_len = t->dims[0];
    p->row_bytes = so_dtype_row_bytes(to, p->row_len);
    p->max_rows = SO_MIN(SO_MAX(PIECE / p->row_len, (int64_t)1), rows_of(t));
    size_t n;
    if (so_mul_size((size_t)p->max_rows, (size_t)p->row_len, &n)) {
        p->x = so_try_alloc(n, sizeof *p->x);
        p->q = so_try_alloc((size_t)p->max_rows, p->row_bytes);
    }
    if (!p->x || !p->q)
        return so_err_set(err, SO_ENOMEM,
                          "%s: tensor %s: no memory for a row of %" PRId64 " elements",
                          j->src->path, t->name, p->row_len);
    return SO_OK;
}

typedef struct quantize_job {
    const piece *p;
    so_dtype to;
    int64_t n_rows;
} quantize_job;

static void quantize_split(void *arg, int index, int count) {
    const quantize_job *k = arg;
    long begin, end;
    so_split((long)k->n_rows, 1, index, count, &begin, &end);
    so_quantize_row(k->to, k->p->x + begin * k->p->row_len,
                    k->p->q + (size_t)begin * k->p->row_bytes, (end - begin) * k->p->row_len);
}

static int convert_piece(job *j, size_t index, so_dtype to, piece *p, int64_t first, int64_t n,
                         so_err *err) {
    const so_convert_source *s = j->src;
    const so_convert_tensor *t = &s->tensors[index];
    int rc = s->rows(s->user, index, first, n, p->x, err);
    if (rc == SO_OK)
        rc = check_values(j, t, to, p->x, n * p->row_len, first * p->row_len, err);
    if (rc != SO_OK)
        return rc;
    const void *bytes = p->q;
    if (t->data && t->dtype == to)
        bytes = (const unsigned char *)t->data + (size_t)first * p->row_bytes;
    else
        so_pool_run(j->pool, quantize_split, &(quantize_job){p, to, n});
    rc = so_gguf_writer_data(j->w, bytes, (size_t)n * p->row_bytes, err);
    j->n_done += (uint64_t)(n * p->row_len);
    if (j->opts->progress)
        j->opts->progress(j->opts->user, (double)j->n_done / (double)j->n_total);
    return rc;
}

static int convert_tensor(job *j, size_t index, so_err *err) {
    const so_convert_tensor *t = &j->src->tensors[index];
    so_dtype to = choose(j, t).dtype;
    piece p = {0};
    int rc = piece_alloc(&p, j, t, to, err);
    int64_t rows = rows_of(t);
    for (int64_t first = 0; first < rows && rc == SO_OK; first += p.max_rows)
        rc = convert_piece(j, index, to, &p, first, SO_MIN(p.max_rows, rows - first), err);
    free(p.x);
    free(p.q);
    return rc;
}

static bool same_file(const char *a, const char *b) {
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

static int write_all(job *j, const char *out_path, so_err *err) {
    int rc = j->src->metadata(j->src->user, j->w, err);
    if (rc != SO_OK)
        return rc;
    so_gguf_writer_u32(j->w, "general.file_type", (uint32_t)plan(j));
    so_gguf_writer_u32(j->w, "general.quantization_version", 2);
    rc = so_gguf_writer_begin(j->w, out_path, err);
    for (size_t i = 0; i < j->src->n_tensors && rc == SO_OK; i++)
        rc = convert_tensor(j, i, err);
    return rc == SO_OK ? so_gguf_writer_commit(j->w, err) : rc;
}

int so_convert(const so_convert_source *src, const so_recipe *recipe, const char *out_path,
               const so_convert_opts *opts, so_convert_report *report, so_err *err) {
    static const so_convert_opts none;
    if (same_file(src->path, out_path))
        return so_err_set(err, SO_EINVAL, "%s: input and output are the same file", out_path);
    job j = {.src = src, .opts = opts ? opts : &none, .recipe = *recipe};
    int rc = so_pool_create(SO_MAX(j.opts->n_threads, 1), &j.pool, err);
    if (rc != SO_OK)
        return rc;
    j.w = so_gguf_writer_create();
    rc = write_all(&j, out_path, err);
    so_gguf_writer_free(j.w);
    so_pool_free(j.pool);
    if (rc == SO_OK && report)
        *report = j.report;
    else
        so_convert_report_free(&j.report);
    return rc;
}

void so_convert_report_free(so_convert_report *r) {
    for (size_t i = 0; i < r->n_fallbacks; i++)
        free(r->fallbacks[i].tensor);
    free(r->fallbacks);
    *r = (so_convert_report){0};
}

/* --- a GGUF file as source --- */

static int gguf_metadata(void *user, so_gguf_writer *w, so_err *err) {
    const so_gguf *g = user;
    (void)err;
    for (size_t i = 0; i < so_gguf_n_kv(g); i++) {
        const so_gguf_kv *kv = so_gguf_kv_at(g, i);
        if (!so_str_starts(kv->key, SO_STR("split."))) /* the output is one file */
            so_gguf_writer_copy_kv(w, kv);
    }
    return SO_OK;
}

static int gguf_rows(void *user, size_t i, int64_t first, int64_t n, float *dst, so_err *err) {
    const so_tensor *t = so_gguf_tensor_at(user, i);
    (void)err;
    size_t row_bytes = so_dtype_row_bytes(t->dtype, t->dims[0]);
    so_dequantize_row(t->dtype, (const unsigned char *)t->data + (size_t)first * row_bytes, dst,
                      n * t->dims[0]);
    return SO_OK;
}

void so_convert_from_gguf(const so_gguf *g, so_convert_source *out) {
    size_t n = so_gguf_n_tensors(g);
    so_convert_tensor *list = SO_NEW_N(so_convert_tensor, n);
    for (size_t i = 0; i < n; i++) {
        const so_tensor *t = so_gguf_tensor_at(g, i);
        list[i] = (so_convert_tensor){.name = so_strndup(t->name.ptr, t->name.len),
                                      .dtype = t->dtype,
                                      .n_dims = t->n_dims,
                                      .data = t->data};
        memcpy(list[i].dims, t->dims, sizeof t->dims);
    }
    *out = (so_convert_source){.path = so_gguf_path(g),
                               .tensors = list,
                               .n_tensors = n,
                               .metadata = gguf_metadata,
                               .rows = gguf_rows,
                               .user = (void *)(uintptr_t)g};
}

void so_convert_source_free(so_convert_source *s) {
    for (size_t i = 0; i < s->n_tensors; i++)
        free((void *)(uintptr_t)s->tensors[i].name);
    free((void *)(uintptr_t)s->tensors);
    *s = (so_convert_source){0};
}

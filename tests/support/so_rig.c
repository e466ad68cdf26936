/* Opens a model and runs chains through it; see so_rig.h. */
#include "so_rig.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "so_test.h"

const char *so_test_device(void) {
    const char *s = getenv("SOOTH_DEVICE");
    return s && *s ? s : "cpu";
}

bool so_test_on_gpu(void) { return strcmp(so_test_device(), "cpu") != 0; }

void so_test_skip_encoders(void) {
    if (!so_test_on_gpu())
        return;
    puts("skip: encoder-decoder models do not run on a GPU yet");
    skip();
}

/* A GPU defers everything by itself. */
static const char *backend_name(const so_rig_opts *o) {
    const char *device = so_test_device();
    return strcmp(device, "cpu") == 0 && o->deferred ? "deferred" : device;
}

void so_rig_open(so_rig *r, const char *path, const so_rig_opts *o) {
    so_err err = {0};
    memset(r, 0, sizeof *r);
    int threads = o->n_threads ? o->n_threads : 1;
    SO_OK_OR_FAIL(so_checkpoint_open(path, SO_CHECKPOINT_ALL, &r->ck, &err), err);
    so_backend_opts bo = {.n_threads = threads, .level = o->level};
    SO_OK_OR_FAIL(so_backend_open(backend_name(o), &bo, &r->b, &err), err);
    SO_OK_OR_FAIL(so_model_load(r->ck, r->b, &o->model, &r->m, &err), err);
    const so_hparams *hp = so_model_hparams(r->m);
    so_kv_shape shape = {hp->n_layers, hp->n_heads_kv, hp->head_dim, o->n_pages ? o->n_pages : 64,
                         o->kv_dtype};
    int rows = o->max_rows ? o->max_rows : 128;
    int rc = o->run_len ? so_kv_create_slotted(r->b, &shape, o->run_len, &r->kv, &err)
                        : so_kv_create(r->b, &shape, &r->kv, &err);
    SO_OK_OR_FAIL(rc, err);
    SO_OK_OR_FAIL(so_pass_create(r->m, r->kv, rows, rows, &r->p, &err), err);
    r->n_vocab = hp->n_vocab;
    r->width = so_model_logits_len(r->m);
}

void so_rig_close(so_rig *r) {
    so_pass_free(r->p);
    so_kv_free(r->kv);
    so_model_free(r->m);
    so_backend_free(r->b);
    so_checkpoint_close(r->ck);
}

void so_rig_chain(so_rig *r, so_seq *s, const int32_t *tokens, int n, float *logits) {
    so_err err = {0};
    so_row *rows = SO_NEW_N(so_row, n);
    int len = so_seq_len(s);
    for (int i = 0; i < n; i++)
        rows[i] = (so_row){tokens[i], len + i, 0, i - 1, .want_logits = logits != NULL};
    SO_OK_OR_FAIL(so_seq_begin(s, n, &err), err);
    so_batch batch = {rows, n, &s, 1};
    SO_OK_OR_FAIL(so_pass_submit(r->p, &batch, SO_PASS_LOGITS, &err), err);
    SO_OK_OR_FAIL(so_pass_wait(r->p, &err), err);
    for (int i = 0; logits && i < n; i++)
        memcpy(logits + (size_t)i * (size_t)r->width, so_pass_logits(r->p, i),
               (size_t)r->width * sizeof(float));
    so_seq_commit_chain(s, n);
    free(rows);
}

void so_rig_chunks(so_rig *r, so_seq *s, const int32_t *tokens, int n, int chunk, float *logits) {
    if (chunk == 0)
        chunk = n;
    for (int i = 0; i < n; i += chunk)
        so_rig_chain(r, s, tokens + i, SO_MIN(chunk, n - i),
                     logits ? logits + (size_t)i * (size_t)r->width : NULL);
}

int so_rig_levels(so_cpu_level *out) {
    int n = 0;
    for (int l = SO_CPU_SCALAR; l < SO_CPU_LEVELS; l++)
        if (so_cpu_level_usable((so_cpu_level)l))
            out[n++] = (so_cpu_level)l;
    return n;
}

bool so_test_full(void) {
    const char *s = getenv("SOOTH_TEST_FULL");
    return s && strcmp(s, "1") == 0;
}

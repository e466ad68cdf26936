/* See teacher.h. */
#include "cli/teacher.h"

#include <stdlib.h>

#include "base/mem.h"

int so_teacher_check(const so_model *m, so_err *err) {
    if (so_model_hparams(m)->n_enc_layers == 0)
        return SO_OK;
    return so_err_set(err, SO_EUNSUPPORTED,
                      "the model has an encoder, whose source text this command does not give: use "
                      "a decoder-only model, or `sooth bench spec` for the speed of this one");
}

int so_teacher_open(so_teacher *t, const so_model *m, const so_teacher_opts *o, so_err *err) {
    const so_hparams *hp = so_model_hparams(m);
    so_kv_shape shape = {.n_layers = hp->n_layers,
                         .n_heads_kv = hp->n_heads_kv,
                         .head_dim = hp->head_dim,
                         .n_pages = o->n_pages,
                         .dtype = o->kv_dtype};
    *t = (so_teacher){.max_rows = o->max_rows, .feed_want = SO_PASS_LOGITS};
    int rc = o->max_source > 0 ? SO_OK : so_teacher_check(m, err);
    if (rc == SO_OK)
        rc = so_kv_create(so_model_backend(m), &shape, &t->kv, err);
    if (rc == SO_OK)
        rc = so_pass_create(m, t->kv, o->max_rows, o->max_logits, &t->pass, err);
    if (rc == SO_OK && hp->n_enc_layers > 0)
        rc = so_sources_create(m, o->max_source, SO_MAX(o->n_sources, 1), o->kv_dtype, &t->sources,
                               err);
    if (rc != SO_OK)
        return rc;
    t->seq = so_seq_create(t->kv);
    t->rows = SO_NEW_N(so_row, o->max_rows);
    return SO_OK;
}

void so_teacher_close(so_teacher *t) {
    so_seq_free(t->seq);
    so_sources_free(t->sources);
    so_pass_free(t->pass);
    so_kv_free(t->kv);
    free(t->rows);
}

int so_teacher_read(so_teacher *t, so_seq *seq, const int32_t *ids, int n, so_err *err) {
    if (!t->sources)
        return SO_OK;
    so_seq_set_source(seq, NULL); /* there may be no room for one more */
    return so_sources_set(t->sources, seq, ids, n, err);
}

int so_teacher_rows(so_teacher *t, so_seq *seq, const int32_t *ids, int n, int first_logit,
                    unsigned want, so_err *err) {
    int len = so_seq_len(seq);
    for (int i = 0; i < n; i++)
        t->rows[i] = (so_row){
            .token = ids[i], .pos = len + i, .parent = i - 1, .want_logits = i >= first_logit};
    so_batch batch = {.rows = t->rows, .n_rows = n, .seqs = &seq, .n_seqs = 1};
    int rc = so_seq_begin(seq, n, err);
    if (rc == SO_OK)
        rc = so_pass_run(t->pass, &batch, want, err);
    return rc == SO_OK ? so_pass_check_all(t->pass, err) : rc;
}

int so_teacher_feed(so_teacher *t, so_seq *seq, const int32_t *ids, int n, int n_logits,
                    so_err *err) {
    int rc = SO_OK;
    for (int at = 0; at < n && rc == SO_OK;) {
        int k = SO_MIN(n - at, t->max_rows), first_logit = SO_MAX(0, n - n_logits - at);
        rc =
            so_teacher_rows(t, seq, ids + at, k, first_logit, n_logits > 0 ? t->feed_want : 0, err);
        if (rc == SO_OK)
            so_seq_commit_chain(seq, k);
        at += k;
    }
    return rc;
}

int so_teacher_each(so_teacher *t, const so_teacher_text *text, so_teacher_fn *fn, void *user,
                    so_err *err) {
    int rc = so_teacher_feed(t, t->seq, text->ids, text->first, 0, err);
    for (int at = text->first; at < text->n && rc == SO_OK;) {
        int k = SO_MIN(text->n - at, t->max_rows);
        rc = so_teacher_rows(t, t->seq, text->ids + at, k, 0, text->want, err);
        for (int i = 0; i < k && rc == SO_OK; i++)
            rc = fn(user, t, at + i, i);
        if (rc == SO_OK)
            so_seq_commit_chain(t->seq, k);
        at += k;
    }
    if (so_seq_open_nodes(t->seq) > 0)
        so_seq_abort(t->seq);
    so_seq_truncate_to(t->seq, 0);
    return SO_MIN(rc, SO_OK);
}

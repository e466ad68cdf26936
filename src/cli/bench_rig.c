/* One model, one cache, one sequence: the ground on which `bench` measures. Whatever is left of it
 * after a failure is closed by so_bench_close, which every kind reaches. One thread. */
#include "cli/bench_rig.h"

#include <stdlib.h>

#include "base/mem.h"

int so_bench_open(so_bench_rig *g, const so_args *a, int default_ctx, int max_rows, int extra) {
    so_engine_opts o;
    int status = so_cli_open(a, &g->b);
    if (status == 0)
        status = so_cli_engine_opts(a, &g->b, &o);
    if (status != 0)
        return status;
    const so_hparams *hp = so_model_hparams(g->b.model);
    g->a = a;
    g->json = so_args_has(a, SO_OPT_JSON);
    g->n_repeats = (int)so_args_int(a, SO_OPT_REPEATS, 9);
    g->n_ctx = so_args_has(a, SO_OPT_CTX) ? o.n_ctx : SO_MIN(default_ctx, hp->n_ctx_train);
    g->max_rows = max_rows;
    if (g->n_ctx + extra > hp->n_ctx_train)
        return so_args_bad(a, "--ctx-size %d: with %d tokens behind it this passes the model's %d",
                           g->n_ctx, extra, hp->n_ctx_train);
    int n_pages = so_kv_pages_for(g->n_ctx + extra) + 1;
    so_kv_shape shape = {.n_layers = hp->n_layers,
                         .n_heads_kv = hp->n_heads_kv,
                         .head_dim = hp->head_dim,
                         .n_pages = n_pages * (g->two ? 2 : 1),
                         .dtype = o.kv_dtype};
    int rc = so_kv_create(g->b.backend, &shape, &g->kv, &g->err);
    if (rc == SO_OK)
        rc = so_pass_create(g->b.model, g->kv, max_rows, SO_MIN(max_rows, (int)SO_BENCH_WIDEST),
                            &g->pass, &g->err);
    if (rc != SO_OK)
        return so_args_fail(a, &g->err);
    g->seq = so_seq_create(g->kv);
    g->rows = SO_NEW_N(so_row, max_rows);
    return 0;
}

void so_bench_close(so_bench_rig *g) {
    so_seq_free(g->seq);
    so_pass_free(g->pass);
    so_kv_free(g->kv);
    free(g->rows);
    so_bundle_close(&g->b);
}

static int32_t some_token(const so_bench_rig *g, int position) {
    so_rng_key key = {.seed = 20, .position = (uint32_t)position, .purpose = SO_RNG_TEST};
    return (int32_t)(so_rng_uniform(&key, 0) * so_model_hparams(g->b.model)->n_vocab);
}

int so_bench_rows(so_bench_rig *g, const int32_t *ids, int n, int first_logit, unsigned want) {
    int len = so_seq_len(g->seq);
    for (int i = 0; i < n; i++)
        g->rows[i] = (so_row){.token = ids ? ids[i] : some_token(g, len + i),
                              .pos = len + i,
                              .parent = i - 1,
                              .want_logits = i >= first_logit};
    so_batch batch = {.rows = g->rows, .n_rows = n, .seqs = &g->seq, .n_seqs = 1};
    int rc = so_seq_begin(g->seq, n, &g->err);
    if (rc == SO_OK)
        rc = so_pass_run(g->pass, &batch, want, &g->err);
    return rc == SO_OK ? so_pass_check_all(g->pass, &g->err) : rc;
}

int so_bench_feed(so_bench_rig *g, const int32_t *ids, int n, int n_logits) {
    int rc = SO_OK;
    for (int at = 0; at < n && rc == SO_OK;) {
        int k = SO_MIN(n - at, g->max_rows), first_logit = SO_MAX(0, n - n_logits - at);
        rc = so_bench_rows(g, ids ? ids + at : NULL, k, first_logit,
                           n_logits > 0 ? SO_PASS_LOGITS : 0);
        if (rc == SO_OK)
            so_seq_commit_chain(g->seq, k);
        at += k;
    }
    return rc;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double so_bench_median(double *v, int n) {
    qsort(v, (size_t)n, sizeof *v, by_value);
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

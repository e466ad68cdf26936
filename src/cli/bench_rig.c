/* One model, one cache and one sequence for the measurements of `bench`. so_bench_close frees them,
 * also after a failure in so_bench_open. Main thread only. */
#include "cli/bench_rig.h"

#include <stdlib.h>

#include "base/mem.h"
#include "cli/prompts.h"

/* The time of a pass depends on the length of a source, not on its words. */
static const char SOURCE[] =
    "I would like to thank the rapporteur for her excellent report, and I hope that the Commission "
    "will take our proposals into account when it presents its programme for the coming year.";

bool so_bench_has_encoder(const so_bench_rig *g) {
    return so_model_hparams(g->b.model)->n_enc_layers > 0;
}

static int read_source(so_bench_rig *g) {
    so_prompts p = {0};
    const char *path = so_args_str(g->a, SO_OPT_PROMPTS, NULL);
    if (!so_bench_has_encoder(g) || g->own_source)
        return SO_OK;
    int rc = path ? so_prompts_read(path, &p, &g->err) : SO_OK;
    if (rc == SO_OK)
        rc = so_cli_encode(&g->b, so_args_has(g->a, SO_OPT_RAW),
                           path ? p.items[0].turns[0] : so_str_c(SOURCE), &g->source, &g->err);
    so_prompts_free(&p);
    return rc;
}

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
    if (g->n_ctx + extra > hp->n_ctx_train)
        return so_args_bad(
            a, "--ctx-size %d: with %d more tokens this exceeds the model's context of %d",
            g->n_ctx, extra, hp->n_ctx_train);
    int n_seqs = (g->two ? 2 : 1) + g->n_streams, rc = read_source(g);
    so_teacher_opts to = {.n_pages = (so_kv_pages_for(g->n_ctx + extra) + 1) * n_seqs,
                          .max_rows = max_rows,
                          .max_logits = SO_MIN(max_rows, (int)SO_BENCH_WIDEST),
                          .kv_dtype = o.kv_dtype,
                          .max_source = g->own_source ? g->n_ctx + extra : (int)g->source.len};
    if (rc == SO_OK)
        rc = so_teacher_open(&g->t, g->b.model, &to, &g->err);
    if (rc == SO_OK && !g->own_source)
        rc = so_bench_read(g, g->t.seq);
    if (rc != SO_OK)
        return so_args_fail(a, &g->err);
    g->want = g->t.feed_want = g->b.backend->vt->remote ? SO_PASS_ARGMAX : SO_PASS_LOGITS;
    g->ids = SO_NEW_N(int32_t, g->n_ctx + extra);
    for (int i = 0; i < g->n_ctx + extra; i++) {
        so_rng_key key = {.seed = 20, .position = (uint32_t)i, .purpose = SO_RNG_TEST};
        g->ids[i] = (int32_t)(so_rng_uniform(&key, 0) * hp->n_vocab);
    }
    return 0;
}

void so_bench_close(so_bench_rig *g) {
    so_teacher_close(&g->t);
    so_tokens_free(&g->source);
    free(g->ids);
    so_bundle_close(&g->b);
}

int so_bench_read(so_bench_rig *g, so_seq *seq) {
    return so_teacher_read(&g->t, seq, g->source.ids, (int)g->source.len, &g->err);
}

int so_bench_rows(so_bench_rig *g, int n, unsigned want) {
    so_seq *seq = g->t.seq;
    return so_teacher_rows(&g->t, seq, g->ids + so_seq_len(seq), n, 0, want, &g->err);
}

int so_bench_feed(so_bench_rig *g, int n, int n_logits) {
    so_seq *seq = g->t.seq;
    return so_teacher_feed(&g->t, seq, g->ids + so_seq_len(seq), n, n_logits, &g->err);
}

/* `sooth bench`: measures and never judges.
 *
 *   curve    time of one pass by the number of its rows, all with logits, behind --ctx-size tokens:
 *            what checking n guesses costs against making one token
 *   decode   tokens per second, one at a time, behind --ctx-size tokens
 *   prompt   tokens per second of reading a prompt of --predict tokens
 *   spec     what speculation gains on a file of prompts (bench_spec.c)
 *   kernels  the matrix products alone, by dtype and number of rows (bench_kernels.c)
 *   ppl      perplexity of a text: windows of --ctx-size tokens, the second half of each scored, as
 *            llama.cpp's tool does it, so that figures can be compared
 *   logits   the logits after every token of {"tokens":[…]} in a file, windows of --ctx-size, as
 * raw float32 rows: for comparing with other engines (bench/kl_llamacpp.py)
 *
 * Timed kinds run --repeats times after two rounds of warm-up; widths take turns within a round, so
 * that a slow second of the machine hits all of them alike. Medians and minima are printed. Tokens
 * are drawn from a fixed seed: the time of a pass does not depend on what they say. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "cli/bench_kernels.h"
#include "cli/bench_spec.h"
#include "cli/load.h"
#include "cli/progress.h"
#include "cli/report.h"
#include "kv/kv.h"

enum { WARM_UP = 2, MAX_TEXT = 256 << 20, PPL_ROWS = 64 };

/* One sequence and a pass over it. */
typedef struct rig {
    const so_args *a;
    so_bundle b;
    so_kv *kv;
    so_pass *pass;
    so_seq *seq;
    so_row *rows;
    int max_rows, n_ctx, n_repeats;
    bool json;
    so_err err;
} rig;

static int rig_open(rig *g, const so_args *a, int default_ctx, int max_rows, int extra) {
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
    so_kv_shape shape = {.n_layers = hp->n_layers,
                         .n_heads_kv = hp->n_heads_kv,
                         .head_dim = hp->head_dim,
                         .n_pages = so_kv_pages_for(g->n_ctx + extra) + 1,
                         .dtype = o.kv_dtype};
    int rc = so_kv_create(g->b.backend, &shape, &g->kv, &g->err);
    if (rc == SO_OK)
        rc = so_pass_create(g->b.model, g->kv, max_rows, max_rows, &g->pass, &g->err);
    if (rc != SO_OK)
        return so_args_fail(a, &g->err);
    g->seq = so_seq_create(g->kv);
    g->rows = SO_NEW_N(so_row, max_rows);
    return 0;
}

static void rig_close(rig *g) {
    so_seq_free(g->seq);
    so_pass_free(g->pass);
    so_kv_free(g->kv);
    free(g->rows);
    so_bundle_close(&g->b);
}

static int32_t some_token(const rig *g, int position) {
    so_rng_key key = {.seed = 20, .position = (uint32_t)position, .purpose = SO_RNG_TEST};
    return (int32_t)(so_rng_uniform(&key, 0) * so_model_hparams(g->b.model)->n_vocab);
}

/* A chain of n rows behind the sequence, left open. Row i takes ids[i], or some token. */
static int run_rows(rig *g, const int32_t *ids, int n, int first_logit, unsigned want) {
    int len = so_seq_len(g->seq);
    for (int i = 0; i < n; i++)
        g->rows[i] = (so_row){.token = ids ? ids[i] : some_token(g, len + i),
                              .pos = len + i,
                              .parent = i - 1,
                              .want_logits = i >= first_logit};
    so_batch batch = {.rows = g->rows, .n_rows = n, .seqs = &g->seq, .n_seqs = 1};
    int rc = so_seq_begin(g->seq, n, &g->err);
    return rc == SO_OK ? so_pass_run(g->pass, &batch, want, &g->err) : rc;
}

/* Reads `ids` (or some tokens) into the cache without logits. */
static int feed(rig *g, const int32_t *ids, int n) {
    int rc = SO_OK;
    for (int at = 0; at < n && rc == SO_OK;) {
        int k = SO_MIN(n - at, g->max_rows);
        rc = run_rows(g, ids ? ids + at : NULL, k, k, 0);
        if (rc == SO_OK)
            so_seq_commit_chain(g->seq, k);
        at += k;
    }
    return rc;
}

/* --- statistics --- */

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts v; [0] is then the minimum. */
static double median(double *v, int n) {
    qsort(v, (size_t)n, sizeof *v, by_value);
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

/* --- curve --- */

static const int WIDTHS[] = {1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64};
enum { N_WIDTHS = SO_LEN(WIDTHS), WIDEST = 64 };

/* One width at a time, until the caches have settled to it, as in decoding; then the pass that
 * counts. */
static int time_settled(rig *g, int n, double *ms) {
    int n_passes = n <= 16 ? 5 : 2, rc = SO_OK;
    for (int i = 0; i < n_passes && rc == SO_OK; i++) {
        int64_t t = so_clock_ns();
        rc = run_rows(g, NULL, n, 0, SO_PASS_LOGITS);
        *ms = so_clock_ms_since(t);
        so_seq_abort(g->seq);
    }
    return rc;
}

static int time_widths(rig *g, double *ms /* [N_WIDTHS][n_repeats] */) {
    so_progress bar;
    int rc = feed(g, NULL, g->n_ctx);
    so_progress_begin(&bar, "curve");
    for (int rep = -WARM_UP; rep < g->n_repeats && rc == SO_OK; rep++) {
        for (int w = 0; w < N_WIDTHS && rc == SO_OK; w++) {
            double t;
            rc = time_settled(g, WIDTHS[w], &t);
            if (rep >= 0)
                ms[w * g->n_repeats + rep] = t;
        }
        so_progress_set(&bar, (double)(rep + WARM_UP + 1) / (g->n_repeats + WARM_UP));
    }
    so_progress_end(&bar);
    return rc;
}

static int bench_curve(const so_args *a, rig *g) {
    int status = rig_open(g, a, 256, WIDEST, WIDEST);
    if (status != 0)
        return status;
    double *ms = SO_NEW_N(double, N_WIDTHS * g->n_repeats), base = 0;
    if (time_widths(g, ms) != SO_OK) {
        free(ms);
        return so_args_fail(a, &g->err);
    }
    if (!g->json)
        printf("rows behind %d tokens, %d repeats\n   n       ms   min ms   ratio\n", g->n_ctx,
               g->n_repeats);
    for (int w = 0; w < N_WIDTHS; w++) {
        double *v = ms + w * g->n_repeats, mid = median(v, g->n_repeats);
        base = w == 0 ? mid : base;
        if (g->json)
            so_report_print_json(json_pack("{s:i, s:f, s:f, s:f}", "n", WIDTHS[w], "ms", mid,
                                           "min_ms", v[0], "ratio", mid / base));
        else
            printf("%4d %8.2f %8.2f %7.2f\n", WIDTHS[w], mid, v[0], mid / base);
    }
    free(ms);
    return 0;
}

/* --- decode and prompt --- */

/* One timed run: n tokens one by one, or n tokens as a prompt; then forgets them. */
static int time_once(rig *g, int n, bool one_by_one, double *ms) {
    int len = so_seq_len(g->seq), rc = SO_OK;
    int64_t t = so_clock_ns();
    if (one_by_one) {
        for (int i = 0; i < n && rc == SO_OK; i++) {
            rc = run_rows(g, NULL, 1, 0, SO_PASS_ARGMAX);
            if (rc == SO_OK)
                so_seq_commit_chain(g->seq, 1);
        }
    } else {
        rc = feed(g, NULL, n);
    }
    *ms = so_clock_ms_since(t);
    if (rc == SO_OK)
        so_seq_truncate_to(g->seq, len);
    return rc;
}

static int time_runs(rig *g, const char *label, int n, bool one_by_one, double *ms) {
    so_progress bar;
    int rc = one_by_one ? feed(g, NULL, g->n_ctx) : SO_OK;
    so_progress_begin(&bar, label);
    for (int rep = -WARM_UP; rep < g->n_repeats && rc == SO_OK; rep++) {
        double t;
        rc = time_once(g, n, one_by_one, &t);
        if (rep >= 0)
            ms[rep] = t;
        so_progress_set(&bar, (double)(rep + WARM_UP + 1) / (g->n_repeats + WARM_UP));
    }
    so_progress_end(&bar);
    return rc;
}

static int bench_rate(const so_args *a, rig *g, bool decode) {
    int n = (int)so_args_int(a, SO_OPT_PREDICT, decode ? 32 : 512);
    if (n < 1)
        return so_args_bad(a, "--predict %d: must be 1 or more here", n);
    int rows = decode ? WIDEST : (int)so_args_int(a, SO_OPT_BATCH, 256);
    int status = rig_open(g, a, decode ? 256 : 2, rows, n);
    if (status != 0)
        return status;
    double *ms = SO_NEW_N(double, g->n_repeats);
    const char *label = decode ? "decode" : "prompt";
    if (time_runs(g, label, n, decode, ms) != SO_OK) {
        free(ms);
        return so_args_fail(a, &g->err);
    }
    double mid = median(ms, g->n_repeats), bytes = (double)so_model_weight_bytes(g->b.model);
    double gbps = bytes * (decode ? n : 1) / (mid * 1e6);
    int ctx = decode ? g->n_ctx : 0;
    if (g->json)
        so_report_print_json(json_pack("{s:s, s:i, s:i, s:f, s:f, s:f, s:f}", "kind", label, "n", n,
                                       "ctx", ctx, "ms", mid, "min_ms", ms[0], "tokens_per_second",
                                       1000 * n / mid, "weight_gb_per_second", gbps));
    else
        printf("%s: %d tokens behind %d, %.1f ms (best %.1f), %.1f tokens/s, weights read at %.1f "
               "GB/s\n",
               label, n, ctx, mid, ms[0], 1000 * n / mid, gbps);
    free(ms);
    return 0;
}

/* --- perplexity --- */

/* Feeds one window and adds −log p of the tokens of its second half. */
static int score_window(rig *g, const int32_t *ids, int n, double *nll, int *n_scored) {
    int half = n / 2, n_vocab = so_model_hparams(g->b.model)->n_vocab;
    int rc = feed(g, ids, half);
    for (int at = half; at < n - 1 && rc == SO_OK;) {
        int k = SO_MIN(n - 1 - at, g->max_rows);
        rc = run_rows(g, ids + at, k, 0, SO_PASS_LOGITS);
        for (int i = 0; i < k && rc == SO_OK; i++) {
            *nll -= so_sample_logprob(so_pass_logits(g->pass, i), n_vocab, ids[at + i + 1]);
            ++*n_scored;
        }
        if (rc == SO_OK)
            so_seq_commit_chain(g->seq, k);
        at += k;
    }
    if (rc == SO_OK)
        so_seq_truncate_to(g->seq, 0);
    return rc;
}

static int score_text(rig *g, const so_tokens *t, double *nll, int *n_scored) {
    int n_windows = (int)(t->len / (size_t)g->n_ctx), rc = SO_OK;
    int32_t bos = so_tokenizer_adds_bos(g->b.tok) ? so_tokenizer_bos(g->b.tok) : SO_TOKEN_NONE;
    so_progress bar;
    so_progress_begin(&bar, "ppl");
    for (int w = 0; w < n_windows && rc == SO_OK; w++) {
        int32_t *ids = t->ids + (size_t)w * (size_t)g->n_ctx;
        if (bos != SO_TOKEN_NONE)
            ids[0] = bos;
        rc = score_window(g, ids, g->n_ctx, nll, n_scored);
        so_progress_set(&bar, (w + 1.0) / n_windows);
    }
    so_progress_end(&bar);
    return rc;
}

static int read_text(rig *g, so_tokens *out) {
    so_buf text = {.max = MAX_TEXT};
    int rc = so_file_read(so_args_str(g->a, SO_OPT_FILE, "-"), MAX_TEXT, &text, &g->err);
    if (rc == SO_OK)
        rc = so_tokenizer_encode(g->b.tok, so_buf_str(&text), SO_ENCODE_ADD_SPECIAL, out, &g->err);
    so_buf_free(&text);
    if (rc == SO_OK && out->len < (size_t)g->n_ctx)
        rc = so_err_set(&g->err, SO_EINVAL,
                        "%s: has %zu tokens, one window of --ctx-size takes %d: give more text or "
                        "a smaller --ctx-size",
                        so_args_str(g->a, SO_OPT_FILE, "-"), out->len, g->n_ctx);
    return rc;
}

static int bench_ppl(const so_args *a, rig *g) {
    if (!so_args_has(a, SO_OPT_FILE))
        return so_args_bad(a, "ppl needs a text: -f FILE");
    int status = rig_open(g, a, 512, PPL_ROWS, 0);
    if (status != 0)
        return status;
    so_tokens t = {0};
    double nll = 0;
    int n_scored = 0, rc = read_text(g, &t);
    if (rc == SO_OK)
        rc = score_text(g, &t, &nll, &n_scored);
    so_tokens_free(&t);
    if (rc != SO_OK)
        return so_args_fail(a, &g->err);
    double ppl = exp(nll / n_scored);
    if (g->json)
        so_report_print_json(
            json_pack("{s:f, s:i, s:i}", "ppl", ppl, "tokens", n_scored, "ctx", g->n_ctx));
    else
        printf("perplexity %.4f over %d tokens (windows of %d, second halves)\n", ppl, n_scored,
               g->n_ctx);
    return 0;
}

/* --- logits --- */

static int read_ids(rig *g, so_tokens *out) {
    const char *path = so_args_str(g->a, SO_OPT_FILE, "-");
    int n_vocab = so_model_hparams(g->b.model)->n_vocab;
    so_buf text = {.max = MAX_TEXT};
    int rc = so_file_read(path, MAX_TEXT, &text, &g->err);
    json_t *root = rc == SO_OK ? json_loadb(text.data, text.len, 0, NULL) : NULL, *ids, *id;
    so_buf_free(&text);
    if (rc != SO_OK)
        return rc;
    size_t i;
    ids = json_object_get(root, "tokens");
    if (json_array_size(ids) == 0)
        rc = so_err_set(&g->err, SO_EFORMAT, "%s: is not {\"tokens\":[…]}", path);
    json_array_foreach(ids, i, id) {
        json_int_t v = json_is_integer(id) ? json_integer_value(id) : -1;
        if (v < 0 || v >= n_vocab)
            rc = so_err_set(&g->err, SO_ERANGE, "%s: token %zu is not an id below %d", path, i,
                            n_vocab);
        so_tokens_push(out, (int32_t)v);
    }
    json_decref(root);
    return rc;
}

static int write_window(rig *g, const int32_t *ids, int n, so_out_file *out) {
    size_t row_bytes = (size_t)so_model_hparams(g->b.model)->n_vocab * sizeof(float);
    int rc = SO_OK;
    for (int at = 0; at < n && rc == SO_OK;) {
        int k = SO_MIN(n - at, g->max_rows);
        rc = run_rows(g, ids + at, k, 0, SO_PASS_LOGITS);
        for (int i = 0; i < k && rc == SO_OK; i++)
            rc = so_out_write(out, so_pass_logits(g->pass, i), row_bytes, &g->err);
        if (rc == SO_OK)
            so_seq_commit_chain(g->seq, k);
        at += k;
    }
    if (rc == SO_OK)
        so_seq_truncate_to(g->seq, 0);
    return rc;
}

static int write_logits(rig *g, const so_tokens *t) {
    so_out_file *out = NULL;
    int rc = so_out_begin(so_args_str(g->a, SO_OPT_OUT, NULL), &out, &g->err), n = (int)t->len;
    so_progress bar;
    so_progress_begin(&bar, "logits");
    for (int at = 0; at < n && rc == SO_OK; at += g->n_ctx) {
        rc = write_window(g, t->ids + at, SO_MIN(n - at, g->n_ctx), out);
        so_progress_set(&bar, (double)at / n);
    }
    so_progress_end(&bar);
    if (rc != SO_OK)
        so_out_abort(out);
    return rc == SO_OK ? so_out_commit(out, &g->err) : rc;
}

static int bench_logits(const so_args *a, rig *g) {
    if (!so_args_has(a, SO_OPT_FILE) || !so_args_has(a, SO_OPT_OUT))
        return so_args_bad(a, "logits needs tokens and a place for the rows: -f IDS.json -o FILE");
    int status = rig_open(g, a, 512, PPL_ROWS, 0);
    if (status != 0)
        return status;
    so_tokens t = {0};
    int rc = read_ids(g, &t);
    if (rc == SO_OK)
        rc = write_logits(g, &t);
    int n_vocab = so_model_hparams(g->b.model)->n_vocab, n = (int)t.len;
    so_tokens_free(&t);
    if (rc != SO_OK)
        return so_args_fail(a, &g->err);
    if (g->json)
        so_report_print_json(json_pack("{s:i, s:i}", "rows", n, "columns", n_vocab));
    else
        printf("%d rows of %d float32\n", n, n_vocab);
    return 0;
}

int so_cmd_bench(int argc, char **argv) {
    so_args a;
    rig g = {0};
    if (!so_args_parse(&a, SO_CMD_BENCH, argc, argv))
        return a.status;
    const char *kind = a.pos[0];
    int status;
    if (strcmp(kind, "curve") == 0)
        status = bench_curve(&a, &g);
    else if (strcmp(kind, "ppl") == 0)
        status = bench_ppl(&a, &g);
    else if (strcmp(kind, "decode") == 0)
        status = bench_rate(&a, &g, true);
    else if (strcmp(kind, "prompt") == 0)
        status = bench_rate(&a, &g, false);
    else if (strcmp(kind, "spec") == 0)
        status = so_bench_spec(&a);
    else if (strcmp(kind, "kernels") == 0)
        status = so_bench_kernels(&a);
    else if (strcmp(kind, "logits") == 0)
        status = bench_logits(&a, &g);
    else
        status = so_args_bad(
            &a, "'%.40s': must be spec, curve, ppl, decode, prompt, kernels or logits", kind);
    rig_close(&g);
    so_args_free(&a);
    return status;
}

/* `sooth bench`: measurements. It prints figures and never a verdict.
 *
 *   curve    time of one pass over n rows, all with logits, after --ctx-size cached tokens: the
 *            cost of verifying n − 1 guesses relative to producing one token
 *   decode   tokens per second, one token per pass, after --ctx-size cached tokens
 *   prompt   tokens per second of prefill for a prompt of --predict tokens
 *   spec     plain and speculative decoding of a file of prompts, compared (bench_spec.c)
 *   pair     speed-up with a draft model at given acceptance rates, simulated (bench_pair.c)
 *   passes   times of passes that another program requests on standard input, in alternation with
 *            its own measurements (bench_passes.c)
 *   kernels  matrix products alone, by dtype and number of rows (bench_kernels.c)
 *   ppl      perplexity of a text in windows of --ctx-size tokens; the second half of each window
 *            is scored, as in llama.cpp's tool, so that figures can be compared
 *   logits   logits after every token of {"tokens":[…]} in a file, in windows of --ctx-size, as raw
 *            float32 rows, for comparison with other engines (bench/kl_llamacpp.py)
 *
 * This file has ppl, logits and the choice of the measurement; bench_time.c has curve, decode and
 * prompt. Main thread only. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"
#include "cli/bench_kernels.h"
#include "cli/bench_pair.h"
#include "cli/bench_rig.h"
#include "cli/bench_spec.h"
#include "cli/progress.h"
#include "cli/report.h"

enum { MAX_TEXT = 256 << 20, PPL_ROWS = 64 };

/* --- perplexity --- */

typedef struct score {
    double nll; /* Σ −log p of the token that follows */
    int n, n_vocab;
    const int32_t *ids; /* tokens of the window */
} score;

static int score_row(void *user, const so_teacher *t, int i, int row) {
    score *s = user;
    s->nll -= so_sample_logprob(so_pass_logits(t->pass, row), s->n_vocab, s->ids[i + 1]);
    s->n++;
    return SO_OK;
}

/* Scores the tokens in the second half of every window. */
static int score_text(so_bench_rig *g, const so_tokens *t, score *s) {
    int n_windows = (int)(t->len / (size_t)g->n_ctx), rc = SO_OK;
    int32_t bos = so_tokenizer_adds_bos(g->b.tok) ? so_tokenizer_bos(g->b.tok) : SO_TOKEN_NONE;
    so_progress bar;
    so_progress_begin(&bar, "ppl");
    for (int w = 0; w < n_windows && rc == SO_OK; w++) {
        int32_t *ids = t->ids + (size_t)w * (size_t)g->n_ctx;
        if (bos != SO_TOKEN_NONE)
            ids[0] = bos;
        s->ids = ids;
        so_teacher_text window = {ids, g->n_ctx - 1, g->n_ctx / 2, SO_PASS_LOGITS};
        rc = so_teacher_each(&g->t, &window, score_row, s, &g->err);
        so_progress_set(&bar, (w + 1.0) / n_windows);
    }
    so_progress_end(&bar);
    return rc;
}

static int read_text(so_bench_rig *g, so_tokens *out) {
    so_buf text = {.max = MAX_TEXT};
    int rc = so_file_read(so_args_str(g->a, SO_OPT_FILE, "-"), MAX_TEXT, &text, &g->err);
    if (rc == SO_OK)
        rc = so_tokenizer_encode(g->b.tok, so_buf_str(&text), SO_ENCODE_ADD_SPECIAL, out, &g->err);
    so_buf_free(&text);
    if (rc == SO_OK && out->len < (size_t)g->n_ctx)
        rc = so_err_set(
            &g->err, SO_EINVAL,
            "%s has %zu tokens, less than one window of --ctx-size (%d): give more text or "
            "a smaller --ctx-size",
            so_args_str(g->a, SO_OPT_FILE, "-"), out->len, g->n_ctx);
    return rc;
}

static int bench_ppl(const so_args *a, so_bench_rig *g) {
    if (!so_args_has(a, SO_OPT_FILE))
        return so_args_bad(a, "ppl needs a text: -f FILE");
    g->no_source = true;
    int status = so_bench_open(g, a, 512, PPL_ROWS, 0);
    if (status != 0)
        return status;
    so_tokens t = {0};
    score s = {.n_vocab = so_model_hparams(g->b.model)->n_vocab};
    int rc = read_text(g, &t);
    if (rc == SO_OK)
        rc = score_text(g, &t, &s);
    so_tokens_free(&t);
    if (rc != SO_OK)
        return so_args_fail(a, &g->err);
    double ppl = exp(s.nll / s.n);
    if (g->json)
        so_report_print_json(
            json_pack("{s:f, s:i, s:i}", "ppl", ppl, "tokens", s.n, "ctx", g->n_ctx));
    else
        printf("perplexity %.4f over %d tokens (windows of %d, second halves)\n", ppl, s.n,
               g->n_ctx);
    return 0;
}

/* --- logits --- */

static int read_ids(so_bench_rig *g, so_tokens *out) {
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
        rc = so_err_set(&g->err, SO_EFORMAT, "%s: must be {\"tokens\": [ID, ...]}", path);
    json_array_foreach(ids, i, id) {
        json_int_t v = json_is_integer(id) ? json_integer_value(id) : -1;
        if (v < 0 || v >= n_vocab)
            rc = so_err_set(&g->err, SO_ERANGE, "%s: token %zu is not an id from 0 to %d", path, i,
                            n_vocab - 1);
        so_tokens_push(out, (int32_t)v);
    }
    json_decref(root);
    return rc;
}

typedef struct writer {
    so_bench_rig *g;
    so_out_file *out;
} writer;

static int write_row(void *user, const so_teacher *t, int i, int row) {
    (void)i;
    writer *w = user;
    size_t n_vocab = (size_t)so_model_hparams(w->g->b.model)->n_vocab;
    return so_out_write(w->out, so_pass_logits(t->pass, row), n_vocab * sizeof(float), &w->g->err);
}

static int write_logits(so_bench_rig *g, const so_tokens *t) {
    writer w = {.g = g};
    int rc = so_out_begin(so_args_str(g->a, SO_OPT_OUT, NULL), &w.out, &g->err), n = (int)t->len;
    so_progress bar;
    so_progress_begin(&bar, "logits");
    for (int at = 0; at < n && rc == SO_OK; at += g->n_ctx) {
        so_teacher_text window = {t->ids + at, SO_MIN(n - at, g->n_ctx), 0, SO_PASS_LOGITS};
        rc = so_teacher_each(&g->t, &window, write_row, &w, &g->err);
        so_progress_set(&bar, (double)at / n);
    }
    so_progress_end(&bar);
    if (rc != SO_OK)
        so_out_abort(w.out);
    return rc == SO_OK ? so_out_commit(w.out, &g->err) : rc;
}

static int bench_logits(const so_args *a, so_bench_rig *g) {
    if (!so_args_has(a, SO_OPT_FILE) || !so_args_has(a, SO_OPT_OUT))
        return so_args_bad(a, "logits needs -f IDS.json (the tokens) and -o FILE (the output)");
    g->no_source = true;
    int status = so_bench_open(g, a, 512, PPL_ROWS, 0);
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
    so_bench_rig g = {0};
    if (!so_args_parse(&a, SO_CMD_BENCH, argc, argv))
        return a.status;
    const char *kind = a.pos[0];
    int status;
    if (strcmp(kind, "curve") == 0)
        status = so_bench_curve(&a, &g);
    else if (strcmp(kind, "ppl") == 0)
        status = bench_ppl(&a, &g);
    else if (strcmp(kind, "decode") == 0)
        status = so_bench_decode(&a, &g);
    else if (strcmp(kind, "prompt") == 0)
        status = so_bench_prompt(&a, &g);
    else if (strcmp(kind, "passes") == 0)
        status = so_bench_passes(&a, &g);
    else if (strcmp(kind, "spec") == 0)
        status = so_bench_spec(&a);
    else if (strcmp(kind, "pair") == 0)
        status = so_bench_pair(&a);
    else if (strcmp(kind, "kernels") == 0)
        status = so_bench_kernels(&a);
    else if (strcmp(kind, "logits") == 0)
        status = bench_logits(&a, &g);
    else
        status = so_args_bad(
            &a,
            "'%.40s': must be spec, pair, curve, ppl, decode, prompt, kernels, passes or logits",
            kind);
    so_bench_close(&g);
    so_args_free(&a);
    return status;
}

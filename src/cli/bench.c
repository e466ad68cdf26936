/* `sooth bench`: measurements. It prints figures and never a verdict.
 *
 *   curve    time of one pass over n rows, all with logits, after --ctx-size cached tokens: the
 *            cost of verifying n − 1 guesses relative to producing one token
 *   decode   tokens per second, one token per pass, after --ctx-size cached tokens
 *   prompt   tokens per second of prefill for a prompt of --predict tokens; an encoder reads it
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
 * An encoder-decoder model gives probabilities to an answer, given a source. So ppl reads lines of
 * SOURCE<tab>TEXT and scores all tokens of each text, the end token included; logits takes
 * {"source":[…],"tokens":[…]}, where the tokens begin with the model's start token.
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
static int score_windows(so_bench_rig *g, const so_tokens *t, score *s) {
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

static const char *file_of(const so_bench_rig *g) { return so_args_str(g->a, SO_OPT_FILE, "-"); }

static int score_text(so_bench_rig *g, so_str text, score *s) {
    so_tokens t = {0};
    int rc = so_tokenizer_encode(g->b.tok, text, SO_ENCODE_ADD_SPECIAL, &t, &g->err);
    if (rc == SO_OK && t.len < (size_t)g->n_ctx)
        rc = so_err_set(
            &g->err, SO_EINVAL,
            "%s has %zu tokens, less than one window of --ctx-size (%d): give more text or "
            "a smaller --ctx-size",
            file_of(g), t.len, g->n_ctx);
    if (rc == SO_OK)
        rc = score_windows(g, &t, s);
    so_tokens_free(&t);
    return rc;
}

/* One half of a line. The tokenizer adds an end token to an empty text, too. */
static int encode_half(so_bench_rig *g, const char *what, so_str text, so_tokens *out) {
    out->len = 0;
    int rc = so_tokenizer_encode(g->b.tok, text, SO_ENCODE_ADD_SPECIAL, out, &g->err);
    if (rc != SO_OK)
        return rc;
    if (out->len == 0 || (out->len == 1 && out->ids[0] == so_tokenizer_eos(g->b.tok)))
        return so_err_set(&g->err, SO_EINVAL, "the %s is empty", what);
    if (out->len > (size_t)g->n_ctx)
        return so_err_set(&g->err, SO_ELIMIT,
                          "the %s has %zu tokens, more than --ctx-size (%d): raise it or shorten "
                          "the line",
                          what, out->len, g->n_ctx);
    return SO_OK;
}

/* A line of source and text, for encoder-decoder models. source, ids: scratch. */
static int score_line(so_bench_rig *g, so_str line, so_tokens *source, so_tokens *ids, score *s) {
    const char *tab = memchr(line.ptr, '\t', line.len);
    size_t len = tab ? (size_t)(tab - line.ptr) : line.len;
    so_str text = {line.ptr + len + (tab != NULL), line.len - len - (tab != NULL)};
    if (!tab || memchr(text.ptr, '\t', text.len))
        return so_err_set(&g->err, SO_EFORMAT,
                          "must be SOURCE<tab>TEXT: the model's encoder reads the source, and the "
                          "text is scored");
    int rc = encode_half(g, "source", (so_str){line.ptr, len}, source);
    if (rc == SO_OK)
        rc = encode_half(g, "text", text, ids);
    if (rc == SO_OK)
        rc = so_teacher_read(&g->t, g->t.seq, source->ids, (int)source->len, &g->err);
    if (rc != SO_OK)
        return rc;
    so_tokens_push(ids, 0);
    memmove(ids->ids + 1, ids->ids, (ids->len - 1) * sizeof *ids->ids);
    ids->ids[0] = so_model_hparams(g->b.model)->decoder_start;
    s->ids = ids->ids;
    so_teacher_text window = {ids->ids, (int)ids->len - 1, 0, SO_PASS_LOGITS};
    return so_teacher_each(&g->t, &window, score_row, s, &g->err);
}

static int score_lines(so_bench_rig *g, so_str all, score *s) {
    so_tokens source = {0}, ids = {0};
    int rc = SO_OK, n_line = 0;
    so_progress bar;
    so_progress_begin(&bar, "ppl");
    for (size_t at = 0, len; at < all.len && rc == SO_OK; at += len + 1) {
        const char *end = memchr(all.ptr + at, '\n', all.len - at);
        so_str line = {all.ptr + at, len = end ? (size_t)(end - all.ptr) - at : all.len - at};
        line.len -= line.len > 0 && line.ptr[line.len - 1] == '\r';
        n_line++;
        if (line.len > 0)
            rc = score_line(g, line, &source, &ids, s);
        if (rc != SO_OK)
            so_err_prefix(&g->err, "%s, line %d", file_of(g), n_line);
        so_progress_set(&bar, (double)at / (double)all.len);
    }
    so_progress_end(&bar);
    so_tokens_free(&source);
    so_tokens_free(&ids);
    if (rc == SO_OK && s->n == 0)
        rc = so_err_set(&g->err, SO_EINVAL, "%s has no lines", file_of(g));
    return rc;
}

static void print_ppl(const so_bench_rig *g, const score *s) {
    double ppl = exp(s->nll / s->n);
    if (g->json)
        so_report_print_json(
            json_pack("{s:f, s:i, s:i}", "ppl", ppl, "tokens", s->n, "ctx", g->n_ctx));
    else if (so_bench_has_encoder(g))
        printf("perplexity %.4f over %d tokens (texts given their sources)\n", ppl, s->n);
    else
        printf("perplexity %.4f over %d tokens (windows of %d, second halves)\n", ppl, s->n,
               g->n_ctx);
}

static int bench_ppl(const so_args *a, so_bench_rig *g) {
    if (!so_args_has(a, SO_OPT_FILE))
        return so_args_bad(a, "ppl needs a text: -f FILE");
    g->own_source = true;
    int status = so_bench_open(g, a, 512, PPL_ROWS, 0);
    if (status != 0)
        return status;
    so_buf text = {.max = MAX_TEXT};
    score s = {.n_vocab = so_model_hparams(g->b.model)->n_vocab};
    int rc = so_file_read(file_of(g), MAX_TEXT, &text, &g->err);
    if (rc == SO_OK)
        rc = so_bench_has_encoder(g) ? score_lines(g, so_buf_str(&text), &s)
                                     : score_text(g, so_buf_str(&text), &s);
    so_buf_free(&text);
    if (rc != SO_OK)
        return so_args_fail(a, &g->err);
    print_ppl(g, &s);
    return 0;
}

/* --- logits --- */

static int take_ids(so_bench_rig *g, const json_t *root, const char *name, so_tokens *out) {
    int n_vocab = so_model_hparams(g->b.model)->n_vocab, rc = SO_OK;
    json_t *ids = json_object_get(root, name), *id;
    size_t i;
    if (json_array_size(ids) == 0)
        return so_err_set(&g->err, SO_EFORMAT, "%s: must be {%s\"tokens\": [ID, ...]}", file_of(g),
                          so_bench_has_encoder(g) ? "\"source\": [ID, ...], " : "");
    json_array_foreach(ids, i, id) {
        json_int_t v = json_is_integer(id) ? json_integer_value(id) : -1;
        if (v < 0 || v >= n_vocab)
            rc = so_err_set(&g->err, SO_ERANGE, "%s: %s: token %zu is not an id from 0 to %d",
                            file_of(g), name, i, n_vocab - 1);
        so_tokens_push(out, (int32_t)v);
    }
    return rc;
}

/* Texts of an encoder-decoder model are not divided into windows: all of a text belongs to its
 * source. */
static int take_source(so_bench_rig *g, const json_t *root, const so_tokens *text) {
    so_tokens ids = {0};
    bool given = json_object_get(root, "source") != NULL;
    if (!so_bench_has_encoder(g) && given)
        return so_err_set(&g->err, SO_EINVAL,
                          "%s: \"source\" is for models with an encoder, which this one does not "
                          "have: remove it",
                          file_of(g));
    if (!so_bench_has_encoder(g))
        return SO_OK;
    int rc = take_ids(g, root, "source", &ids);
    if (rc == SO_OK && SO_MAX(ids.len, text->len) > (size_t)g->n_ctx)
        rc = so_err_set(&g->err, SO_ELIMIT,
                        "%s: %zu tokens of source and %zu of text, each at most --ctx-size (%d): "
                        "raise it",
                        file_of(g), ids.len, text->len, g->n_ctx);
    if (rc == SO_OK)
        rc = so_teacher_read(&g->t, g->t.seq, ids.ids, (int)ids.len, &g->err);
    so_tokens_free(&ids);
    return rc;
}

static int read_ids(so_bench_rig *g, so_tokens *out) {
    so_buf text = {.max = MAX_TEXT};
    int rc = so_file_read(file_of(g), MAX_TEXT, &text, &g->err);
    json_t *root = rc == SO_OK ? json_loadb(text.data, text.len, 0, NULL) : NULL;
    so_buf_free(&text);
    if (rc == SO_OK)
        rc = take_ids(g, root, "tokens", out);
    if (rc == SO_OK)
        rc = take_source(g, root, out);
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
    g->own_source = true;
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

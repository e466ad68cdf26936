/* `sooth calibrate`: measures how often the i-th most likely token of a draft model, or of heads, is
 * the target's, and grows the tree of the most likely paths (draft/shape.h).
 *
 *   1. Texts: the target's own greedy answers to the prompts. They are held-out text for a draft that
 *      was not trained on these prompts.
 *   2. Ranks: the draft computes every answer row by row (teacher forcing); the rank of the answer's
 *      token in the draft's row is 0 if it is the most likely one.
 *   3. Accuracies: for a draft that starts at any token of an answer, how often the rank at depth d is
 *      r, of those starts whose tokens before had a rank below N_RANKS, so that a tree can hold them.
 *   4. Growth to the node budget, and the file.
 *
 * Refuses to write a tree without enough positions. The accuracies are those of temperature 0; above
 * it the shape says how many guesses are sampled where. Main thread only. */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "cli/calibrate.h"
#include "cli/load.h"
#include "cli/progress.h"
#include "cli/prompts.h"
#include "cli/report.h"
#include "cli/spec.h"
#include "cli/teacher.h"
#include "draft/model.h"

enum {
    N_RANKS = SO_SHAPE_RANKS,
    DEFAULT_DEPTH = 8,
    DEFAULT_NODES = 64,
    DEFAULT_ANSWER = 64,
    MIN_POSITIONS = 64,
    PARALLEL = 8,
    ROWS = 32,
};

typedef struct calibration {
    const so_args *a;
    so_bundle b, draft;
    so_calibrate_heads heads; /* in place of a draft */
    so_engine_opts eo;
    so_tokens
        *texts; /* [n_texts] prompt and answer; encoder-decoder models: start token and answer */
    so_tokens *sources;  /* [n_texts] their prompts; empty for other models */
    int *n_prompt;       /* [n_texts] */
    int n_texts, n_made; /* n_made: of texts and sources, some of which are empty */
    int depth, nodes, n_answer;
    so_teacher t;
    const so_tokens *text; /* being ranked */
    uint8_t *ranks;        /* [of its answer]; N_RANKS: lower */
    int first;             /* position of the answer's first token */
    so_shape_table table;
    int64_t right[SO_SHAPE_DEPTHS][N_RANKS], tested[SO_SHAPE_DEPTHS];
    so_progress bar;
    so_err err;
} calibration;

/* --- texts --- */

/* Encoder-decoder models: the prompt is the source, and the text begins with the start token. */
static void move_source(const calibration *c, so_tokens *text, so_tokens *source) {
    const so_hparams *hp = so_model_hparams(c->b.model);
    if (hp->n_enc_layers == 0)
        return;
    so_tokens_append(source, text->ids, text->len);
    text->len = 0;
    so_tokens_push(text, hp->decoder_start);
}

static int read_prompts(calibration *c) {
    so_prompts p = {0};
    int rc = so_prompts_read(so_args_str(c->a, SO_OPT_PROMPTS, ""), &p, &c->err);
    c->texts = SO_NEW_N(so_tokens, SO_MAX(p.n, 1));
    c->sources = SO_NEW_N(so_tokens, SO_MAX(p.n, 1));
    c->n_prompt = SO_NEW_N(int, SO_MAX(p.n, 1));
    c->n_made = p.n;
    for (int i = 0; i < p.n && rc == SO_OK; i++) {
        so_tokens *t = &c->texts[c->n_texts];
        t->len = c->sources[c->n_texts].len = 0;
        rc = so_cli_encode(&c->b, so_args_has(c->a, SO_OPT_RAW), p.items[i].turns[0], t, &c->err);
        bool fits = t->len > 0 && (int64_t)t->len + 2 <= c->eo.n_ctx; /* with room for an answer */
        if (rc == SO_OK && fits)
            move_source(c, t, &c->sources[c->n_texts]);
        c->n_prompt[c->n_texts] = (int)t->len;
        c->n_texts += rc == SO_OK && fits;
    }
    so_prompts_free(&p);
    if (rc == SO_OK && c->n_texts == 0)
        rc = so_err_set(&c->err, SO_EINVAL, "none of the prompts fits a context of %d tokens",
                        c->eo.n_ctx);
    return rc;
}

static int submit(calibration *c, so_engine *e, int i, so_request **out) {
    const so_tokens *prompt = c->sources[i].len > 0 ? &c->sources[i] : &c->texts[i];
    so_request_opts o = {.prompt = prompt->ids,
                         .n_prompt = (int)prompt->len,
                         .max_tokens = SO_MIN(c->n_answer, c->eo.n_ctx - c->n_prompt[i] - 1)};
    so_sample_defaults(&o.sample);
    o.sample.temp = 0;
    return so_engine_submit(e, &o, out, &c->err);
}

static int answer(calibration *c) {
    so_engine_opts o = c->eo;
    so_engine *e = NULL;
    so_request **r = SO_NEW_N(so_request *, c->n_texts);
    o.max_draft = 0;
    int rc = so_engine_create(c->b.model, c->b.tok, &o, &e, &c->err);
    for (int i = 0; i < c->n_texts && rc == SO_OK; i++)
        rc = submit(c, e, i, &r[i]);
    for (int more = 1; more != 0 && rc == SO_OK;) {
        more = so_engine_step(e, &c->err);
        rc = more < 0 ? more : SO_OK;
    }
    for (int i = 0; i < c->n_texts; i++) {
        int n = 0;
        const int32_t *ids = rc == SO_OK ? so_request_output(r[i], &n) : NULL;
        if (rc == SO_OK)
            rc = so_request_check(r[i], &c->err);
        so_tokens_append(&c->texts[i], ids, (size_t)n);
        so_request_free(r[i]);
    }
    so_engine_free(e);
    free(r);
    return rc;
}

/* --- ranks --- */

/* The column of a token; −1: it has none. */
static int column_of(const int32_t *subset, int n, int32_t token) {
    if (!subset)
        return token < n ? token : -1;
    int at = so_sample_subset_index(subset, n, token);
    return at >= 0 && at < n && subset[at] == token ? at : -1;
}

int so_calibrate_rank(const int32_t *subset, int n, const float *logits, int32_t token,
                      int n_ranks) {
    int at = column_of(subset, n, token), rank = 0;
    if (at < 0)
        return n_ranks;
    for (int i = 0; i < n && rank < n_ranks; i++)
        rank += logits[i] > logits[at] || (logits[i] == logits[at] && i < at);
    return rank;
}

static int visit(void *user, const so_teacher *t, int i, int row) {
    calibration *c = user;
    const so_model *m = c->draft.model;
    if (i + 1 < (int)c->text->len)
        c->ranks[i + 1 - c->first] =
            (uint8_t)so_calibrate_rank(so_model_vocab_subset(m), so_model_logits_len(m),
                                       so_pass_logits(t->pass, row), c->text->ids[i + 1], N_RANKS);
    return 0;
}

/* Heads guess from the state at i, which decides token i + 1. */
static int visit_heads(void *user, const so_teacher *t, int i, int row) {
    calibration *c = user;
    uint8_t ranks[SO_HEADS_MAX];
    int n = SO_MIN((int)c->text->len - i - 2, c->depth);
    if (n < 1)
        return 0;
    int rc = so_calibrate_heads_rank(&c->heads, so_pass_hidden(t->pass, row), c->text->ids + i + 2,
                                     n, N_RANKS, ranks, &c->err);
    for (int k = 0; k < n && rc == SO_OK; k++) {
        c->tested[k]++;
        if (ranks[k] < N_RANKS)
            c->right[k][ranks[k]]++;
    }
    return rc;
}

static void count_starts(calibration *c, int n) {
    for (int start = 0; start < n; start++)
        for (int d = 0; d < c->depth && start + d < n; d++) {
            int rank = c->ranks[start + d];
            c->tested[d]++;
            if (rank >= N_RANKS)
                break;
            c->right[d][rank]++;
        }
}

static int rank_texts(calibration *c) {
    int rc = SO_OK;
    c->ranks = SO_NEW_N(uint8_t, c->eo.n_ctx + 1);
    for (int i = 0; i < c->n_texts && rc == SO_OK; i++) {
        const so_model *m = c->heads.h ? c->b.model : c->draft.model;
        int n_ctx = so_model_hparams(m)->n_ctx_train;
        int n = SO_MIN((int)c->texts[i].len, n_ctx);
        c->text = &c->texts[i];
        c->first = c->n_prompt[i];
        so_progress_set(&c->bar, 0.8 + 0.2 * i / c->n_texts);
        if (n <= c->first)
            continue;
        so_teacher_text t = {c->text->ids, n - 1, c->first - 1,
                             c->heads.h ? SO_PASS_HIDDEN : SO_PASS_LOGITS};
        rc = so_teacher_read(&c->t, c->t.seq, c->sources[i].ids, (int)c->sources[i].len, &c->err);
        if (rc == SO_OK)
            rc = so_teacher_each(&c->t, &t, c->heads.h ? visit_heads : visit, c, &c->err);
        if (rc == SO_OK && !c->heads.h)
            count_starts(c, n - c->first);
    }
    return rc;
}

static int make_table(calibration *c) {
    so_shape_table *t = &c->table;
    *t = (so_shape_table){.n_ranks = N_RANKS, .n_positions = c->tested[0]};
    if (c->tested[0] < MIN_POSITIONS)
        return so_err_set(&c->err, SO_EINVAL,
                          "the answers have %lld tokens, too few to calibrate: give more prompts",
                          (long long)c->tested[0]);
    for (int d = 0; d < c->depth && c->tested[d] > 0; d++, t->n_depths++)
        for (int r = 0; r < N_RANKS; r++)
            t->accuracy[d][r] = (double)c->right[d][r] / (double)c->tested[d];
    return SO_OK;
}

/* --- the command --- */

static int open_teacher(calibration *c) {
    so_teacher_opts o = {.n_pages = so_kv_pages_for(c->eo.n_ctx + ROWS) + 1,
                         .max_rows = ROWS,
                         .max_logits = ROWS,
                         .kv_dtype = c->eo.kv_dtype};
    for (int i = 0; i < c->n_texts; i++)
        o.max_source = SO_MAX(o.max_source, (int)c->sources[i].len);
    if (c->heads.h)
        return so_teacher_open(&c->t, c->b.model, &o, &c->err);
    int rc = so_draft_check_tokenizers(c->b.tok, c->draft.tok, &c->err);
    if (rc != SO_OK)
        return so_err_prefix(&c->err, "the draft does not fit the target");
    return so_teacher_open(&c->t, c->draft.model, &o, &c->err);
}

static int open_heads(calibration *c) {
    const char *path = so_args_str(c->a, SO_OPT_HEADS, "");
    if (so_calibrate_heads_open(path, &c->b, &c->heads, &c->err) != SO_OK)
        return so_args_fail(c->a, &c->err);
    c->depth = SO_MIN(c->depth, so_heads_get_info(c->heads.h)->n_heads);
    return 0;
}

static int open_models(calibration *c) {
    int status = so_cli_open(c->a, &c->b);
    if (status == 0)
        status = so_cli_engine_opts(c->a, &c->b, &c->eo);
    if (status == 0 && !so_args_has(c->a, SO_OPT_PARALLEL))
        c->eo.n_parallel = PARALLEL;
    if (status == 0 && so_args_has(c->a, SO_OPT_HEADS))
        return open_heads(c);
    if (status == 0 && so_args_has(c->a, SO_OPT_DRAFT_MODEL))
        return so_cli_open_draft(c->a, &c->b, &c->draft);
    if (status == 0 && !so_bundle_find_draft(&c->b, c->eo.kv_dtype, &c->draft))
        return so_cli_no_draft(c->a, "calibrate");
    return status;
}

static int write_tree(const calibration *c, const so_shape *s, const char *path, so_err *err) {
    so_buf b = {0};
    so_shape_print(s, &c->table, c->heads.h ? so_calibrate_heads_kind(&c->heads) : "model", &b);
    int rc = so_out_put(path, b.data, b.len, err);
    so_buf_free(&b);
    return rc;
}

/* Measures, grows the tree and writes it. */
static int calibrate(calibration *c, so_shape *s) {
    const char *out = so_args_str(c->a, SO_OPT_OUT, NULL);
    so_progress_begin(&c->bar, "calibrating");
    int rc = read_prompts(c);
    if (rc == SO_OK)
        rc = open_teacher(c);
    if (rc == SO_OK)
        rc = answer(c);
    if (rc == SO_OK)
        rc = rank_texts(c);
    so_progress_end(&c->bar);
    if (rc == SO_OK)
        rc = make_table(c);
    if (rc == SO_OK)
        rc = so_shape_grow(&c->table, c->nodes, s, &c->err);
    if (rc == SO_OK && out)
        rc = write_tree(c, s, out, &c->err);
    return rc;
}

static void free_all(calibration *c) {
    so_teacher_close(&c->t);
    for (int i = 0; i < c->n_made; i++) {
        so_tokens_free(&c->texts[i]);
        so_tokens_free(&c->sources[i]);
    }
    free(c->texts);
    free(c->sources);
    free(c->n_prompt);
    free(c->ranks);
    so_calibrate_heads_close(&c->heads);
    so_bundle_close(&c->draft);
    so_bundle_close(&c->b);
}

static int check_usage(calibration *c) {
    const so_args *a = c->a;
    int64_t depth = so_args_int(a, SO_OPT_DRAFT_MAX, DEFAULT_DEPTH);
    int64_t nodes = so_args_int(a, SO_OPT_DRAFT_NODES, DEFAULT_NODES);
    int64_t n = so_args_int(a, SO_OPT_PREDICT, DEFAULT_ANSWER);
    if (!so_args_has(a, SO_OPT_PROMPTS))
        return so_args_bad(a, "calibrate needs prompts whose answers are measured: --prompts FILE");
    if (so_args_has(a, SO_OPT_HEADS) && so_args_has(a, SO_OPT_DRAFT_MODEL))
        return so_args_bad(a, "--heads and -md: calibrate measures one of them");
    if (depth > SO_SHAPE_DEPTHS)
        return so_args_bad(a, "--draft-max %lld: a tree has at most %d levels", (long long)depth,
                           SO_SHAPE_DEPTHS);
    if (n < 1)
        return so_args_bad(a, "--predict %lld: must be at least 1", (long long)n);
    c->depth = (int)depth;
    c->nodes = (int)nodes;
    c->n_answer = (int)SO_MIN(n, 1 << 20);
    return 0;
}

static int calibrate_model(const so_args *a) {
    calibration *c = SO_NEW(calibration);
    so_shape s;
    c->a = a;
    int status = check_usage(c);
    if (status == 0)
        status = open_models(c);
    if (status == 0 && calibrate(c, &s) != SO_OK)
        status = so_args_fail(a, &c->err);
    if (status == 0)
        status = so_calibrate_show(a, &s, &c->table);
    free_all(c);
    free(c);
    return status;
}

/* Without -m: shows a tree file. */
static int show_file(const so_args *a) {
    so_shape s;
    so_shape_table t = {0};
    so_err err = {0};
    if (a->n_pos == 0)
        return so_args_bad(a, "give a model and prompts (-m MODEL --prompts FILE -o TREE), or the "
                              "tree file to show");
    if (so_shape_read(a->pos[0], &s, &t, &err) != SO_OK)
        return so_args_fail(a, &err);
    return so_calibrate_show(a, &s, &t);
}

int so_cmd_calibrate(int argc, char **argv) {
    so_args a;
    if (!so_args_parse(&a, SO_CMD_CALIBRATE, argc, argv))
        return a.status;
    int status = so_args_has(&a, SO_OPT_MODEL) ? calibrate_model(&a) : show_file(&a);
    so_args_free(&a);
    return status;
}

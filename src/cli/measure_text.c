/* Generates texts with the target, and measures how often each drafter's guess for the next token
 * would be accepted.
 *
 * Texts. The prompts are used one after the other, then again from the first. At temperature 0 a
 * prompt has only one answer, so the answer of a later text with the same prompt begins with a few
 * tokens sampled at temperature 1, which count as prompt. Texts are short (n_answer), because the
 * standard error decreases with the number of texts. The answers of an encoder-decoder model have no
 * prompt of their own to begin with such tokens: at temperature 0 it answers each prompt once.
 *
 * Acceptance. p is the target's distribution at a position after all sampling options. A guess is
 *   a point x          accepted with probability p(x), by `reject` and by `match`
 *   a sample from q    accepted with Σ min(p,q) by `reject`, and one of k samples with
 *                      so_theory_accept_several. By `match`: with the shared-noise
 *                      formula if the drafter is a model; any other drafter proposes a point for
 *                      `match`, which is accepted with probability p(x)
 * Lenient acceptance follows A.5 of the paper, which has a form for points and one for samples. All
 * these are expectations over the target's sample, so no token of the target is sampled, except to
 * measure the time of sampling; drafters do sample. For a drafter that gets the text (`oracle`,
 * `predict`) the outcome is known: its guesses are counted as right or wrong. Main thread only. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/statistics.h"
#include "cli/measure.h"
#include "verify/theory.h"
#include "verify/verify.h"

enum { N_PREFIX = 8, MAX_TIMES = 2048, MAX_SAMPLE_TIMES = 256, TREE_ROWS = 4 };

/* --- texts --- */

void so_measure_free_texts(so_measure *m) {
    for (int i = 0; i < m->n_texts; i++)
        so_tokens_free(&m->texts[i].ids);
    free(m->texts);
    m->texts = NULL;
    m->n_texts = 0;
}

typedef struct group {
    so_measure *m;
    so_measure_text *texts;
    int n;
    int64_t n_emitted;
} group;

static bool on_event(void *user, const so_event *ev) {
    group *g = user;
    g->n_emitted += ev->token != SO_TOKEN_NONE;
    return !so_measure_stopped();
}

/* Continues every text of the group by at most n_more tokens. */
static int continue_texts(group *g, so_engine *e, float temp, int n_more) {
    so_measure *m = g->m;
    so_request **r = SO_NEW_N(so_request *, g->n);
    int rc = SO_OK;
    for (int i = 0; i < g->n && rc == SO_OK; i++) {
        const so_tokens *prompt = g->texts[i].source ? g->texts[i].source : &g->texts[i].ids;
        so_request_opts o = {.prompt = prompt->ids,
                             .n_prompt = (int)prompt->len,
                             .sample = so_measure_sampling(m, g->texts[i].seed),
                             .max_tokens = n_more,
                             .on_event = on_event,
                             .user = g};
        o.sample.temp = temp;
        rc = so_engine_submit(e, &o, &r[i], &m->err);
    }
    for (int more = 1; more != 0 && rc == SO_OK;) {
        more = so_engine_step(e, &m->err);
        rc = more < 0 ? more : SO_OK;
        so_measure_progress(m, 0.2 * (double)(m->got_tokens[m->temp] + g->n_emitted) /
                                   (double)m->n_tokens);
    }
    for (int i = 0; i < g->n; i++) {
        int n_out = 0;
        const int32_t *out = rc == SO_OK ? so_request_output(r[i], &n_out) : NULL;
        if (rc == SO_OK)
            rc = so_request_check(r[i], &m->err);
        so_tokens_append(&g->texts[i].ids, out, (size_t)n_out);
        so_request_free(r[i]);
    }
    free(r);
    return rc;
}

static void begin_text(const so_measure *m, int number, so_measure_text *t) {
    const so_tokens *prompt = &m->prompts[number % m->n_prompts];
    *t = (so_measure_text){.seed = m->seed + (uint64_t)number,
                           .source = m->has_source ? prompt : NULL};
    if (m->has_source)
        so_tokens_push(&t->ids, so_model_hparams(m->b.model)->decoder_start);
    else
        so_tokens_append(&t->ids, prompt->ids, prompt->len);
}

/* Adds the text to m->texts, cut to the number of tokens still needed; false if the answer is
 * empty. */
static bool keep_text(so_measure *m, so_measure_text *t) {
    int64_t room = m->n_tokens - m->got_tokens[m->temp];
    int64_t n = SO_MIN((int64_t)t->ids.len - t->n_prompt, room);
    if (n <= 0) {
        so_tokens_free(&t->ids);
        return false;
    }
    t->ids.len = (size_t)(t->n_prompt + n);
    if ((m->n_texts & (m->n_texts - 1)) == 0)
        m->texts = so_realloc(m->texts, (size_t)SO_MAX(1, 2 * m->n_texts) * sizeof *m->texts);
    m->texts[m->n_texts++] = *t;
    m->got_tokens[m->temp] += n;
    m->got_texts[m->temp]++;
    return true;
}

static int write_group(so_measure *m, so_engine *e, int from, int n, int *n_empty) {
    group g = {.m = m, .texts = SO_NEW_N(so_measure_text, n), .n = n};
    float temp = m->temps[m->temp];
    int rc = SO_OK;
    for (int i = 0; i < n; i++)
        begin_text(m, from + i, &g.texts[i]);
    if (temp == 0 && from >= m->n_prompts)
        rc = continue_texts(&g, e, 1, N_PREFIX);
    for (int i = 0; i < n; i++)
        g.texts[i].n_prompt = (int)g.texts[i].ids.len;
    g.n_emitted = 0;
    if (rc == SO_OK)
        rc = continue_texts(&g, e, temp, m->n_answer);
    for (int i = 0; i < n; i++)
        *n_empty = keep_text(m, &g.texts[i]) ? 0 : *n_empty + 1;
    free(g.texts);
    return rc;
}

int so_measure_generate(so_measure *m) {
    so_engine_opts o = m->eo;
    so_engine *e = NULL;
    int n_empty = 0, number = 0;
    o.max_draft = 0;
    int rc = so_engine_create(m->b.model, m->b.tok, &o, &e, &m->err);
    bool once = m->has_source && m->temps[m->temp] == 0;
    /* stop when every prompt gave an empty answer */
    while (rc == SO_OK && m->got_tokens[m->temp] < m->n_tokens && !so_measure_stopped() &&
           n_empty <= m->n_prompts + o.n_parallel && !(once && number >= m->n_prompts)) {
        int64_t missing = m->n_tokens - m->got_tokens[m->temp];
        int64_t n = SO_MIN(o.n_parallel, (missing + m->n_answer - 1) / m->n_answer);
        if (number < m->n_prompts) /* a group does not mix first and repeated uses of prompts */
            n = SO_MIN(n, m->n_prompts - number);
        rc = write_group(m, e, number, (int)n, &n_empty);
        number += (int)n;
    }
    so_engine_free(e);
    if (rc == SO_OK && m->n_texts == 0 && !so_measure_stopped())
        rc = so_err_set(&m->err, SO_EINVAL,
                        "the model's answer to every prompt is empty: there is no text to measure");
    return rc;
}

/* --- acceptance --- */

/* Sums over one text, for one drafter. */
typedef struct sums {
    double alpha, match, lenient[SO_MEASURE_LENIENCES], several[SO_MEASURE_PROPOSALS];
    int n_guesses, n_drawn, n_any;
} sums;

/* One text while it is measured. */
typedef struct reader {
    so_measure *m;
    const so_measure_text *t;
    int half;
    float temp;
    so_sample_params sample;
    so_sampler *sampler;
    so_tree tree, bare; /* bare: without distributions, as for `match` */
    float *p;           /* [n_vocab] */
    double *pd, *qd;    /* [n_vocab] normalised to sum 1 */
    double *scratch;    /* [2][n_vocab] of the verifier */
    const float *logits, *hidden;
    int32_t best; /* the most likely token */
    void *states[SO_MEASURE_DRAFTERS];
    sums sums[SO_MEASURE_DRAFTERS];
    int n_positions;
    double sample_times[MAX_SAMPLE_TIMES];
    int n_sample_times;
} reader;

static so_draft_set *set_of(so_measure_drafter *d, int half) {
    return &d->sets[d->counted ? half : 0];
}

static void to_doubles(const float *row, int n, double *out) {
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += out[i] = (double)row[i];
    for (int i = 0; i < n; i++)
        out[i] /= sum;
}

/* The probability that a point is accepted by A.5. At temperature 0 it is 1 if the softmax of x is
 * at least L times that of the most likely token, else 0; above, it is min(1, p(x)/L). */
static double accept_point(const reader *w, int32_t x, double lenience) {
    if (w->temp == 0 && lenience < 1)
        return (double)w->logits[x] >= (double)w->logits[w->best] + log(lenience);
    return fmin(1, (w->temp > 0 ? w->pd[x] : (double)w->p[x]) / lenience);
}

static int propose(reader *w, int k, int pos, so_tree *tree) {
    so_measure_drafter *d = &w->m->drafters[k];
    so_drafter *root = set_of(d, w->half)->root;
    so_draft_job job = {.state = w->states[k],
                        .tokens = w->t->ids.ids,
                        .n_tokens = pos,
                        .n_prompt = w->t->n_prompt,
                        .tree = tree,
                        .max_nodes = root->tree_nodes ? root->tree_nodes : 1,
                        .max_depth = 1,
                        .seed = w->sample.seed,
                        .round = (uint32_t)pos,
                        .temp = w->temp,
                        .sample = &w->sample};
    so_tree_reset(tree, w->t->ids.ids[pos - 1], pos - 1);
    return root->vt->propose(root, &job, 1, &w->m->err);
}

static const float *target_row(void *user, int node) {
    (void)node;
    return ((reader *)user)->p;
}

/* Whether `reject` accepts one of the guesses, with random numbers of this position. */
static bool one_is_accepted(reader *w) {
    so_verify_rng_keyed rng;
    so_verdict v;
    so_verify_rng_keyed_init(&rng, w->sample.seed, w->sample.choice);
    so_verify_reject(&w->tree, target_row, w, &rng.base, 1, w->scratch, &v);
    return v.n_accepted > 0;
}

/* A guess that was sampled from q. */
static int score_row(reader *w, int k, int pos, sums *s) {
    const so_proposal *p = &w->tree.proposals[0];
    so_measure_drafter *d = &w->m->drafters[k];
    int n = w->tree.n_vocab;
    to_doubles(so_tree_row(&w->tree, p->row), n, w->qd);
    for (int i = 0; i < SO_MEASURE_LENIENCES; i++)
        s->lenient[i] += so_theory_accept_lenient(w->pd, w->qd, n, so_measure_leniences[i]);
    s->alpha += so_theory_accept_reject(w->pd, w->qd, n);
    for (int i = 0; i < SO_MEASURE_PROPOSALS; i++)
        s->several[i] += so_theory_accept_several(w->pd, w->qd, n, i + 1);
    s->n_drawn++;
    s->n_any += one_is_accepted(w);
    d->results[w->m->temp].n_drawn++;
    if (strcmp(set_of(d, w->half)->leaves[p->drafter]->vt->name, "model") == 0) {
        s->match += so_theory_accept_match(w->pd, w->qd, n);
        return SO_OK;
    }
    int rc = propose(w, k, pos, &w->bare); /* cheap: not a model */
    if (rc == SO_OK && w->bare.n_nodes > 1)
        s->match += w->pd[w->bare.nodes[1].token];
    return rc;
}

static void score_point(reader *w, const so_measure_drafter *d, int pos, sums *s) {
    int32_t x = w->tree.nodes[1].token;
    double one = d->knows_text ? x == w->t->ids.ids[pos] : accept_point(w, x, 1);
    s->alpha += one;
    s->match += one;
    for (int i = 0; i < SO_MEASURE_LENIENCES; i++)
        s->lenient[i] += accept_point(w, x, so_measure_leniences[i]);
}

static int score_guess(reader *w, int k, int pos) {
    so_measure_drafter *d = &w->m->drafters[k];
    sums *s = &w->sums[k];
    int64_t t = so_clock_ns();
    int rc = propose(w, k, pos, &w->tree);
    double ms = so_clock_ms_since(t);
    if (rc != SO_OK)
        return rc;
    if (w->tree.n_proposals > 0) {
        s->n_guesses++;
        if (pos > w->t->n_prompt &&
            d->n_times < MAX_TIMES) /* the first guess includes the drafter's prefill */
            d->times[d->n_times++] = ms;
        if (w->tree.proposals[0].kind == SO_Q_POINT)
            score_point(w, d, pos, s);
        else
            rc = score_row(w, k, pos, s);
    }
    so_drafter_add_hidden(set_of(d, w->half)->root, w->states[k], pos, w->hidden);
    so_drafter_observe(set_of(d, w->half)->root, w->states[k], &w->t->ids.ids[pos], 1);
    return rc;
}

static int32_t argmax(const float *z, int n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++)
        if (z[i] > z[best])
            best = i;
    return best;
}

static void time_sampling(reader *w, const so_sample_context *ctx) {
    int32_t token;
    if (w->temp == 0 || w->n_sample_times == MAX_SAMPLE_TIMES)
        return;
    int64_t t = so_clock_ns();
    so_sample_token(w->sampler, &w->sample, w->logits, ctx, &token, NULL);
    w->sample_times[w->n_sample_times++] = so_clock_ms_since(t);
}

/* Scores position i + 1, whose logits row (computed from ids[i]) is row `row` of the pass. */
static int read_position(void *user, const so_teacher *t, int i, int row) {
    reader *w = user;
    so_measure *m = w->m;
    int pos = i + 1;
    so_sample_context ctx = {w->t->ids.ids, pos, w->t->n_prompt};
    const float *logits = w->logits = so_pass_logits(t->pass, row);
    if (so_measure_stopped())
        return 1;
    w->hidden = so_pass_hidden(t->pass, row);
    w->best = argmax(logits, w->tree.n_vocab);
    int rc = so_sample_distribution(w->sampler, &w->sample, logits, &ctx, w->p, &m->err);
    if (rc == SO_OK && w->temp > 0)
        to_doubles(w->p, w->tree.n_vocab, w->pd);
    for (int k = 0; k < m->n_drafters && rc == SO_OK; k++) {
        rc = score_guess(w, k, pos);
        if (rc != SO_OK)
            so_err_prefix(&m->err, "drafter %s", m->drafters[k].name);
    }
    if (rc == SO_OK)
        time_sampling(w, &ctx);
    w->n_positions++;
    return rc;
}

/* Computes the rows of the text and scores each one that predicts a token of the answer. */
static int read_rows(reader *w) {
    so_teacher_text text = {w->t->ids.ids, (int)w->t->ids.len - 1, w->t->n_prompt - 1,
                            SO_MEASURE_WANT};
    so_measure *m = w->m;
    const so_tokens *s = w->t->source;
    int rc = s ? so_teacher_read(&m->t, m->t.seq, s->ids, (int)s->len, &m->err) : SO_OK;
    return rc != SO_OK ? rc : so_teacher_each(&w->m->t, &text, read_position, w, &w->m->err);
}

static int open_states(reader *w, int *n_open) {
    so_measure *m = w->m;
    const so_measure_text *t = w->t;
    int rc = SO_OK;
    for (int k = 0; k < m->n_drafters && rc == SO_OK; k++) {
        so_measure_drafter *d = &m->drafters[k];
        so_drafter *root = set_of(d, w->half)->root;
        so_draft_text text = {.prompt = t->ids.ids,
                              .n_prompt = t->n_prompt,
                              .source = t->source ? t->source->ids : NULL,
                              .n_source = t->source ? (int)t->source->len : 0,
                              .expected = d->knows_text ? t->ids.ids + t->n_prompt : NULL,
                              .n_expected = d->knows_text ? (int)t->ids.len - t->n_prompt : 0,
                              .max_tokens = (int)t->ids.len};
        rc = root->vt->open(root, &text, &w->states[k], &m->err);
        *n_open += rc == SO_OK;
    }
    return rc;
}

/* Ends the text; its sums are one observation of every ratio. */
static void close_states(reader *w, int n_open) {
    for (int k = 0; k < n_open; k++) {
        so_measure_drafter *d = &w->m->drafters[k];
        so_measure_result *r = &d->results[w->m->temp];
        const sums *s = &w->sums[k];
        so_drafter *root = set_of(d, w->half)->root;
        root->vt->close(root, w->states[k]);
        if (w->n_positions == 0)
            continue;
        so_ratio_add(&r->covered, s->n_guesses, w->n_positions);
        if (s->n_guesses == 0)
            continue;
        so_ratio_add(&r->alpha, s->alpha, s->n_guesses);
        so_ratio_add(&r->match, s->match, s->n_guesses);
        for (int i = 0; i < SO_MEASURE_LENIENCES && !d->knows_text; i++)
            so_ratio_add(&r->lenient[i], s->lenient[i], s->n_guesses);
        if (s->n_drawn > 0)
            so_ratio_add(&r->any, s->n_any, s->n_drawn);
        for (int i = 0; i < SO_MEASURE_PROPOSALS && s->n_drawn > 0; i++)
            so_ratio_add(&r->several[i], s->several[i], s->n_drawn);
    }
}

static int read_text(reader *w, int index) {
    int n_open = 0;
    w->t = &w->m->texts[index];
    w->half = index % 2;
    w->sample = so_measure_sampling(w->m, w->t->seed);
    w->n_positions = 0;
    memset(w->sums, 0, sizeof w->sums);
    int rc = open_states(w, &n_open);
    if (rc == SO_OK)
        rc = read_rows(w);
    close_states(w, n_open);
    return rc;
}

int so_measure_accept(so_measure *m) {
    int n_vocab = so_model_hparams(m->b.model)->n_vocab, rc = SO_OK;
    reader *w = SO_NEW(reader);
    w->m = m;
    w->temp = m->temps[m->temp];
    w->sampler = so_sampler_create(n_vocab);
    so_tree_init(&w->tree, n_vocab, w->temp > 0 ? TREE_ROWS : 0);
    so_tree_init(&w->bare, n_vocab, 0);
    w->p = SO_NEW_N(float, n_vocab);
    w->pd = SO_NEW_N(double, n_vocab);
    w->qd = SO_NEW_N(double, n_vocab);
    w->scratch = SO_NEW_N(double, 2 * n_vocab);
    for (int k = 0; k < m->n_drafters; k++) {
        m->drafters[k].times = SO_NEW_N(double, MAX_TIMES);
        m->drafters[k].n_times = 0;
    }
    for (int i = 0; i < m->n_texts && rc == SO_OK && !so_measure_stopped(); i++) {
        rc = read_text(w, i);
        so_measure_progress(m, 0.2 + 0.5 * (i + 1) / m->n_texts);
    }
    for (int k = 0; k < m->n_drafters; k++) {
        so_measure_drafter *d = &m->drafters[k];
        d->results[m->temp].draft_ms = so_median(d->times, d->n_times);
        free(d->times);
        d->times = NULL;
    }
    m->sample_ms[m->temp] = so_median(w->sample_times, w->n_sample_times);
    so_tree_deinit(&w->tree);
    so_tree_deinit(&w->bare);
    so_sampler_free(w->sampler);
    free(w->p);
    free(w->pd);
    free(w->qd);
    free(w->scratch);
    free(w);
    return rc;
}

/* Measures the time of passes by width (number of rows), then predicts and measures the speed-up of
 * speculation.
 *
 * Prediction. A round of γ guesses takes γ draft steps, a pass over γ+1 rows, and the sampling of
 * its E(α,γ) tokens. A round without a guess is a plain pass. The speed-up is
 *
 *            (ρ·E + 1−ρ) · (t(1) + s)              ρ  fraction of positions with a guess
 *   ─────────────────────────────────────────      d  milliseconds of a draft step
 *   ρ·(γ·d + t(γ+1) + E·s) + (1−ρ)·(t(1) + s)      s  milliseconds of sampling a token
 *
 * With t(γ+1) = t(1), s = 0 and ρ = 1 this is theorem 3.8 with c = d/t(1). As in the paper, guesses
 * are assumed to be accepted independently of each other.
 *
 * Measurement. Parts of the texts of measure_text.c are generated again, with their seeds and
 * `match`, in three modes: plain, γ fixed, and planned. All three must give the same tokens. The
 * mode with the fewest tokens makes the next step, so that a slow moment of the machine affects all
 * three. The part is at the beginning of the first timed text, later in each following one, and at
 * the end of the last, because drafters that learn from the text improve along it. The text before
 * a part is its prompt and is not timed. A part ends before its request does, so that no round is
 * shortened by max_tokens. An untimed text before the others is a warm-up. Main thread only. */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/statistics.h"
#include "cli/measure.h"
#include "verify/theory.h"

/* How often passes of every width are timed before each drafter, so that t(n) and speed are
 * measured at the same time. */
enum { REPEATS = 2 };
/* A part has MIN_PART to MAX_PART tokens. A drafter is timed over about one in TIMED_EVERY
 * tokens. */
enum { MIN_PART = 40, MAX_PART = 100, MIN_TEXTS = 4, MAX_TEXTS = 20, TIMED_EVERY = 25 };

/* --- t(n) --- */

/* The time of a pass does not depend on its tokens. */
static int32_t some_token(const so_measure *m, int i) {
    return m->prompts[0].ids[i % (int)m->prompts[0].len];
}

static int time_pass(so_measure *m, int first, int n, double *ms) {
    int32_t ids[SO_MEASURE_WIDEST];
    for (int i = 0; i < n; i++)
        ids[i] = some_token(m, first + i);
    int64_t t = so_clock_ns();
    int rc = so_teacher_rows(&m->t, m->timed, ids, n, 0, SO_MEASURE_WANT, &m->err);
    *ms = so_clock_ms_since(t);
    return rc;
}

static int fill_cache(so_measure *m) {
    int widest = m->max_gamma + 1, rc = SO_OK;
    double ms;
    m->n_cached = SO_MAX(
        0, SO_MIN((int)SO_MEASURE_CACHED, so_model_hparams(m->b.model)->n_ctx_train - widest));
    for (int at = 0; at < m->n_cached && rc == SO_OK;) {
        int k = SO_MIN(m->n_cached - at, SO_MIN(m->t.max_rows, (int)SO_MEASURE_WIDEST));
        rc = time_pass(m, at, k, &ms);
        if (rc == SO_OK)
            so_seq_commit_chain(m->timed, k);
        at += k;
    }
    return rc;
}

/* A repeat times each width once, so that a slow second of the machine affects all widths. */
int so_measure_passes(so_measure *m, int n_repeats) {
    int widest = m->max_gamma + 1, rc = SO_OK;
    double copy[SO_MEASURE_REPEATS];
    if (so_seq_len(m->timed) == 0)
        rc = fill_cache(m);
    for (int k = 0; k <= n_repeats && rc == SO_OK; k++) { /* the first repeat is a warm-up */
        int slot = m->n_repeats % SO_MEASURE_REPEATS;
        for (int n = 1; n <= widest && rc == SO_OK; n++) {
            rc = time_pass(m, m->n_cached, n, &m->pass_ms[n * SO_MEASURE_REPEATS + slot]);
            if (so_seq_open_nodes(m->timed) > 0)
                so_seq_abort(m->timed);
            if (so_measure_stopped())
                return rc;
        }
        m->n_repeats += k > 0;
    }
    int n_kept = SO_MIN(m->n_repeats, (int)SO_MEASURE_REPEATS);
    for (int n = 1; n <= widest && rc == SO_OK; n++) {
        memcpy(copy, m->pass_ms + n * SO_MEASURE_REPEATS, (size_t)n_kept * sizeof *copy);
        m->t_ms[n] = so_median(copy, n_kept);
    }
    return rc;
}

/* --- prediction --- */

/* Predicted speed-up over plain decoding; s: milliseconds of sampling a token. */
static double predict(const so_measure *m, const so_measure_result *r, double s, double alpha,
                      int gamma) {
    double rho = so_ratio_value(&r->covered), tokens = so_theory_expected_tokens(alpha, gamma);
    double plain = m->t_ms[1] + s, round = gamma * r->draft_ms + m->t_ms[gamma + 1] + tokens * s;
    return (rho * tokens + 1 - rho) * plain / (rho * round + (1 - rho) * plain);
}

/* The same if sampling and the additional rows of a pass took no time: theorem 3.8, with rounds
 * without a guess. */
static double predict_ideal(const so_measure *m, const so_measure_result *r, double alpha,
                            int gamma) {
    double rho = so_ratio_value(&r->covered), tokens = so_theory_expected_tokens(alpha, gamma);
    double c = r->draft_ms / m->t_ms[1];
    return (rho * tokens + 1 - rho) / (rho * (gamma * c + 1) + 1 - rho);
}

static int best_gamma(const so_measure *m, const so_measure_result *r, double s, double alpha) {
    int best = 1;
    if (m->fixed_gamma > 0)
        return m->fixed_gamma;
    for (int g = 2; g <= m->max_gamma; g++)
        if (predict(m, r, s, alpha, g) > predict(m, r, s, alpha, best))
            best = g;
    return best;
}

static void predict_all(const so_measure *m, so_measure_result *r, double s) {
    double alpha = so_ratio_value(&r->match);
    r->ideal = predict_ideal(m, r, alpha, r->gamma);
    r->predicted = predict(m, r, s, alpha, r->gamma);
    for (int i = 0; i < SO_MEASURE_LENIENCES && r->lenient[i].n > 0; i++) {
        double lenient = so_ratio_value(&r->lenient[i]);
        r->lenient_gamma[i] = best_gamma(m, r, s, lenient);
        r->lenient_speed[i] = predict(m, r, s, lenient, r->lenient_gamma[i]);
    }
}

void so_measure_predict(so_measure *m) {
    for (int t = 0; t < m->n_temps; t++)
        for (int k = 0; k < m->n_drafters; k++)
            if (m->drafters[k].results[t].gamma > 0)
                predict_all(m, &m->drafters[k].results[t], m->sample_ms[t]);
}

/* --- measurement --- */

typedef enum mode { PLAIN, FIXED, PLANNED, N_MODES } mode;

typedef struct comparison comparison;

/* One mode with its own engine, so that drafters that remember earlier texts do so per mode. */
typedef struct mode_run {
    comparison *x;
    so_engine *e;
    so_request *r;
    int max_tokens;
    bool decoding; /* its first token was emitted: steps are timed */
    int64_t n_emitted, n_timed;
    double ms;
    /* State of counted tables, which a spec cannot name: they draft as the engine's `user`
     * drafter. */
    void *state;
    so_tree tree;
} mode_run;

struct comparison {
    so_measure *m;
    so_measure_drafter *d;
    so_draft_set *set; /* counted tables for the current text */
    mode_run runs[N_MODES];
};

static int guess(void *user, const int32_t *tokens, int n_tokens, int n_prompt, int32_t *out,
                 int max) {
    mode_run *u = user;
    so_drafter *root = u->x->set->root;
    so_draft_job job = {.state = u->state,
                        .tokens = tokens,
                        .n_tokens = n_tokens,
                        .n_prompt = n_prompt,
                        .tree = &u->tree,
                        .max_nodes = max,
                        .max_depth = max};
    int n = 0;
    so_tree_reset(&u->tree, tokens[n_tokens - 1], n_tokens - 1);
    if (root->vt->propose(root, &job, 1, NULL) != SO_OK)
        return 0;
    for (int node = 0; n < max && u->tree.nodes[node].first >= 0;) {
        node = u->tree.proposals[u->tree.nodes[node].first].child;
        out[n++] = u->tree.nodes[node].token;
    }
    return n;
}

static bool on_event(void *user, const so_event *ev) {
    mode_run *u = user;
    u->n_emitted += ev->token != SO_TOKEN_NONE;
    u->decoding = true;
    return true;
}

/* A part of a text: where it begins, and how many tokens are timed. */
typedef struct part {
    const so_measure_text *t;
    int at, len;
} part;

static int part_len(const so_measure *m) {
    return SO_MIN(SO_MAX(m->n_tokens / TIMED_EVERY / MIN_TEXTS, (int)MIN_PART), (int)MAX_PART);
}

/* where: 0 is the beginning of the answer, 1 its end. */
static part part_of(const so_measure *m, const so_measure_text *t, double where) {
    int n = (int)t->ids.len - t->n_prompt, room = SO_MAX(0, n - part_len(m) - m->max_gamma);
    int skipped = t->source ? 0 : (int)(where * room); /* an encoder-decoder has no other prompt */
    part p = {t, t->n_prompt + skipped, part_len(m)};
    p.len = SO_MIN(p.len, (int)t->ids.len - p.at);
    return p;
}

static int start(mode_run *u, const part *p, mode how) {
    so_measure *m = u->x->m;
    const so_measure_drafter *d = u->x->d;
    const int32_t *rest = p->t->ids.ids + p->at;
    int n_rest = (int)p->t->ids.len - p->at, rc = SO_OK;
    const so_tokens *source = p->t->source;
    so_draft_text text = {.prompt = p->t->ids.ids,
                          .n_prompt = p->at,
                          .source = source ? source->ids : NULL,
                          .n_source = source ? (int)source->len : 0,
                          .max_tokens = (int)p->t->ids.len};
    so_request_opts o = {.prompt = source ? source->ids : p->t->ids.ids,
                         .n_prompt = source ? (int)source->len : p->at,
                         .sample = so_measure_sampling(m, p->t->seed),
                         .max_tokens = SO_MIN(n_rest, p->len + m->max_gamma),
                         .on_event = on_event,
                         .user = u};
    if (how != PLAIN)
        o.spec = (so_spec_opts){.drafter = d->counted ? "user" : d->name,
                                .length = how == FIXED ? d->results[m->temp].gamma : 0,
                                .expected = d->knows_text ? rest : NULL,
                                .n_expected = d->knows_text ? n_rest : 0};
    u->max_tokens = o.max_tokens;
    u->decoding = false;
    u->n_emitted = u->n_timed = 0;
    u->ms = 0;
    if (d->counted)
        rc = u->x->set->root->vt->open(u->x->set->root, &text, &u->state, &m->err);
    return rc == SO_OK ? so_engine_submit(u->e, &o, &u->r, &m->err) : rc;
}

static int step(mode_run *u) {
    bool timed = u->decoding;
    int64_t before = u->n_emitted, t = so_clock_ns();
    int more = so_engine_step(u->e, &u->x->m->err);
    if (timed) {
        u->ms += so_clock_ms_since(t);
        u->n_timed += u->n_emitted - before;
    }
    if (more == 0)
        u->n_emitted = INT64_MAX; /* the request has ended: run_all does not step it again */
    return more < 0 ? more : so_request_check(u->r, &u->x->m->err);
}

/* Steps until every mode has emitted the part. */
static int run_all(comparison *x, const part *p) {
    int rc = SO_OK;
    while (rc == SO_OK && !so_measure_stopped()) {
        mode_run *last = &x->runs[0];
        for (int k = 1; k < N_MODES; k++)
            if (x->runs[k].n_emitted < last->n_emitted)
                last = &x->runs[k];
        if (last->n_emitted >= p->len)
            break;
        rc = step(last);
    }
    return rc;
}

/* Frees the request; returns false if its output differs from the text. */
static bool finish(mode_run *u, const part *p) {
    int n = 0;
    const int32_t *out = u->r ? so_request_output(u->r, &n) : NULL;
    bool same = n >= p->len && n <= u->max_tokens &&
                memcmp(out, p->t->ids.ids + p->at, (size_t)n * sizeof *out) == 0;
    so_request_free(u->r);
    u->r = NULL;
    if (u->state)
        u->x->set->root->vt->close(u->x->set->root, u->state);
    u->state = NULL;
    return same;
}

static double ms_per_token(const mode_run *u) {
    return u->n_timed > 0 ? u->ms / (double)u->n_timed : 0;
}

static void add_times(comparison *x, const part *p) {
    so_measure_result *r = &x->d->results[x->m->temp];
    const so_request_stats *s = so_request_get_stats(x->runs[FIXED].r);
    double plain = ms_per_token(&x->runs[PLAIN]), fixed = ms_per_token(&x->runs[FIXED]);
    double planned = ms_per_token(&x->runs[PLANNED]);
    if (!(plain > 0) || !(fixed > 0) || !(planned > 0))
        return;
    so_ratio_add(&r->fixed, p->len * plain, p->len * fixed);
    so_ratio_add(&r->planned, p->len * plain, p->len * planned);
    r->n_tested += s->tested_n;
    r->n_accepted += s->draft_n_accepted;
    r->n_tokens += p->len;
    r->n_texts++;
}

/* Generates one part in all three modes; turn 0 is a warm-up. */
static int compare_modes(comparison *x, const part *p, int turn) {
    int rc = SO_OK, n_different = 0;
    for (int k = 0; k < N_MODES && rc == SO_OK; k++)
        rc = start(&x->runs[k], p, (mode)k);
    if (rc == SO_OK)
        rc = run_all(x, p);
    bool whole = rc == SO_OK && !so_measure_stopped();
    if (whole && turn > 0)
        add_times(x, p);
    for (int k = 0; k < N_MODES; k++)
        n_different += !finish(&x->runs[k], p);
    if (whole)
        x->d->results[x->m->temp].n_different += n_different;
    return rc;
}

static int open_runs(comparison *x) {
    so_measure *m = x->m;
    so_engine_opts o = m->eo;
    int rc = SO_OK;
    o.n_parallel = 1;
    o.max_draft = m->max_gamma;
    o.draft = m->draft.model;
    o.draft_tok = m->draft.tok;
    o.user_drafter = guess;
    for (int k = 0; k < N_MODES && rc == SO_OK; k++) {
        mode_run *u = &x->runs[k];
        u->x = x;
        o.drafter_user = u;
        so_tree_init(&u->tree, so_model_hparams(m->b.model)->n_vocab, 0);
        rc = so_engine_create(m->b.model, m->b.tok, &o, &u->e, &m->err);
    }
    return rc;
}

/* Times one part of every stride-th text, skipping texts that are too short. */
static int compare_texts(comparison *x) {
    so_measure *m = x->m;
    int want = m->n_tokens / TIMED_EVERY / MAX_PART, turn = 0, rc = SO_OK;
    int n_timed = SO_MIN(SO_MAX(want, (int)MIN_TEXTS), (int)MAX_TEXTS);
    int stride = SO_MAX(1, m->n_texts / (n_timed + 1)); /* + 1: the warm-up */
    for (int i = 0; i < m->n_texts && turn <= n_timed && rc == SO_OK && !so_measure_stopped();
         i += stride) {
        if ((int)m->texts[i].ids.len - m->texts[i].n_prompt < 4)
            continue;
        double where = turn > 0 ? (double)(turn - 1) / (n_timed - 1) : 0;
        part p = part_of(m, &m->texts[i], where);
        x->set = &x->d->sets[i % 2]; /* tables counted from the other half of the texts */
        rc = compare_modes(x, &p, turn++);
    }
    return rc;
}

int so_measure_speed(so_measure *m, int drafter) {
    comparison *x = SO_NEW(comparison);
    x->m = m;
    x->d = &m->drafters[drafter];
    so_measure_result *r = &x->d->results[m->temp];
    int rc = SO_OK;
    if (r->match.n > 0) { /* else the drafter made no guess */
        rc = so_measure_passes(m, REPEATS);
        if (rc == SO_OK && !so_measure_stopped())
            r->gamma = best_gamma(m, r, m->sample_ms[m->temp], so_ratio_value(&r->match));
        if (rc == SO_OK)
            rc = open_runs(x);
        if (rc == SO_OK)
            rc = compare_texts(x);
        for (int k = 0; k < N_MODES; k++) {
            so_engine_free(x->runs[k].e);
            so_tree_deinit(&x->runs[k].tree);
        }
    }
    free(x);
    return rc == SO_OK ? rc : so_err_prefix(&m->err, "drafter %s", m->drafters[drafter].name);
}

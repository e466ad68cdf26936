/* Time: of passes by their width, of speculation as the formulas foretell it, and as it is.
 *
 * The prediction. A round of gamma guesses takes gamma draft steps, a pass of gamma+1 rows, and a
 * draw for each of its E(α,γ) tokens; where a drafter has no guess the round is a plain one:
 *
 *            (ρ·E + 1−ρ) · (t(1) + s)              ρ  share of positions with a guess
 *   ─────────────────────────────────────────      d  milliseconds of a draft step
 *   ρ·(γ·d + t(γ+1) + E·s) + (1−ρ)·(t(1) + s)      s  milliseconds of drawing a token
 *
 * With t(γ+1) = t(1), s = 0 and ρ = 1 this is theorem 3.8 with c = d/t(1). It takes guesses as
 * independent of each other, as the paper does.
 *
 * The measurement runs texts of measure_text.c again, with their own seeds and `match`, so that
 * plain decoding and both ways of speculation (gamma fixed, and the planner's) must say the same
 * words; the three take turns at going first. Prompts are not timed. The first text warms up. */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "cli/measure.h"
#include "verify/theory.h"

enum { N_REPEATS = 5, WARM_UP = 1, N_BEHIND = 256 };
enum { SPEED_ANSWER = 100, SPEED_SHARE = 25, MAX_SPEED_TOKENS = 2000 };

/* --- t(n) --- */

static int read_behind(so_measure *m, const int32_t *ids, int n) {
    int rc = SO_OK;
    for (int at = 0; at < n && rc == SO_OK;) {
        int k = SO_MIN(n - at, m->max_rows);
        rc = so_measure_rows(m, ids + at, k, k);
        if (rc == SO_OK)
            so_seq_commit_chain(m->seq, k);
        at += k;
    }
    return rc;
}

/* Widths take turns, so that a slow second of the machine hits all alike. */
static int time_widths(so_measure *m, const int32_t *ids, int widest, double *ms) {
    int rc = SO_OK;
    for (int rep = -WARM_UP; rep < N_REPEATS && rc == SO_OK; rep++)
        for (int n = 1; n <= widest && rc == SO_OK && !so_measure_stopped(); n++) {
            int64_t t = so_clock_ns();
            rc = so_measure_rows(m, ids, n, 0);
            if (rep >= 0)
                ms[n * N_REPEATS + rep] = so_clock_ms_since(t);
            if (so_seq_open_nodes(m->seq) > 0)
                so_seq_abort(m->seq);
        }
    return rc;
}

int so_measure_passes(so_measure *m) {
    int widest = m->max_gamma + 1, n_ctx = so_model_hparams(m->b.model)->n_ctx_train;
    double *ms = SO_NEW_N(double, (widest + 1) * N_REPEATS);
    m->n_behind = SO_MAX(0, SO_MIN((int)N_BEHIND, n_ctx - widest));
    int32_t *ids = SO_NEW_N(int32_t, m->n_behind + widest);
    for (int i = 0; i < m->n_behind + widest; i++) /* what they say does not change the time */
        ids[i] = m->prompts[0].ids[i % (int)m->prompts[0].len];
    int rc = read_behind(m, ids, m->n_behind);
    if (rc == SO_OK)
        rc = time_widths(m, ids, widest, ms);
    for (int n = 1; n <= widest && rc == SO_OK && !so_measure_stopped(); n++)
        m->t_ms[n] = so_measure_median(ms + n * N_REPEATS, N_REPEATS);
    so_seq_truncate_to(m->seq, 0);
    free(ids);
    free(ms);
    return rc;
}

/* --- prediction --- */

/* Tokens per time against plain decoding; ideal: passes of any width cost the same. */
static double predict(const so_measure *m, const so_measure_result *r, double alpha, int gamma,
                      bool ideal) {
    double rho = so_ratio_value(&r->covered), tokens = so_theory_expected_tokens(alpha, gamma);
    double one = m->t_ms[1], s = ideal ? 0 : m->sample_ms[m->temp];
    double wide = ideal ? one : m->t_ms[gamma + 1], plain = one + s;
    double round = gamma * r->draft_ms + wide + tokens * s;
    return (rho * tokens + 1 - rho) * plain / (rho * round + (1 - rho) * plain);
}

static int best_gamma(const so_measure *m, const so_measure_result *r, double alpha) {
    int best = 1;
    if (m->fixed_gamma > 0)
        return m->fixed_gamma;
    for (int g = 2; g <= m->max_gamma; g++)
        if (predict(m, r, alpha, g, false) > predict(m, r, alpha, best, false))
            best = g;
    return best;
}

/* --- measurement --- */

typedef enum way { PLAIN, FIXED, PLANNED, N_WAYS } way;

typedef struct racetrack {
    so_measure *m;
    so_measure_drafter *d;
    so_engine *engines[2]; /* one each for FIXED and PLANNED: what a drafter remembers of earlier
                              texts is its own; plain decoding borrows the first */
    /* counted tables, which no engine can name, guess through the engine's `user` */
    so_draft_set *set;
    void *state;
    so_tree tree;
    bool decoding;
    int64_t n_emitted;
} racetrack;

static int guess(void *user, const int32_t *tokens, int n_tokens, int n_prompt, int32_t *out,
                 int max) {
    racetrack *x = user;
    so_draft_job job = {.state = x->state,
                        .tokens = tokens,
                        .n_tokens = n_tokens,
                        .n_prompt = n_prompt,
                        .tree = &x->tree,
                        .max_nodes = max,
                        .max_depth = max};
    int n = 0;
    so_tree_reset(&x->tree, tokens[n_tokens - 1], n_tokens - 1);
    if (x->set->root->vt->propose(x->set->root, &job, 1, NULL) != SO_OK)
        return 0;
    for (int node = 0; n < max && x->tree.nodes[node].first >= 0;) {
        node = x->tree.proposals[x->tree.nodes[node].first].child;
        out[n++] = x->tree.nodes[node].token;
    }
    return n;
}

static bool on_event(void *user, const so_event *ev) {
    racetrack *x = user;
    x->n_emitted += ev->token != SO_TOKEN_NONE;
    x->decoding = true;
    return !so_measure_stopped();
}

static so_request_opts request_of(racetrack *x, const so_measure_text *t, way how) {
    so_request_opts o = {.prompt = t->ids.ids,
                         .n_prompt = t->n_prompt,
                         .sample = so_measure_sampling(x->m, t->seed),
                         .max_tokens = SO_MIN((int)t->ids.len - t->n_prompt, (int)SPEED_ANSWER),
                         .on_event = on_event,
                         .user = x};
    if (how != PLAIN)
        o.spec = (so_spec_opts){.drafter = x->d->counted ? "user" : x->d->name,
                                .length = how == FIXED ? x->d->results[x->m->temp].gamma : 0,
                                .expected = x->d->told ? t->ids.ids + t->n_prompt : NULL,
                                .n_expected = x->d->told ? (int)t->ids.len - t->n_prompt : 0};
    return o;
}

/* Milliseconds per token of one text, 0 where nothing was timed. */
static int run_way(racetrack *x, const so_measure_text *t, way how, double *ms_per_token,
                   bool *same) {
    so_measure *m = x->m;
    so_engine *e = x->engines[how == PLANNED];
    so_request_opts o = request_of(x, t, how);
    so_request *r = NULL;
    double ms = 0;
    int64_t n_timed = 0;
    x->decoding = false;
    x->n_emitted = 0;
    int rc = so_engine_submit(e, &o, &r, &m->err);
    for (int more = 1; more > 0 && rc == SO_OK;) {
        bool timed = x->decoding;
        int64_t before = x->n_emitted, start = so_clock_ns();
        more = so_engine_step(e, &m->err);
        if (timed) {
            ms += so_clock_ms_since(start);
            n_timed += x->n_emitted - before;
        }
        rc = more < 0 ? more : SO_OK;
    }
    int n = 0;
    const int32_t *out = rc == SO_OK ? so_request_output(r, &n) : NULL;
    *same =
        n == o.max_tokens && memcmp(out, t->ids.ids + t->n_prompt, (size_t)n * sizeof *out) == 0;
    *ms_per_token = n_timed > 0 ? ms / (double)n_timed : 0;
    so_request_free(r);
    return rc;
}

/* One text in all three ways; books it unless it only warms up. */
static int race(racetrack *x, int index, int turn) {
    so_measure *m = x->m;
    const so_measure_text *t = &m->texts[index];
    so_measure_result *r = &x->d->results[m->temp];
    double ms[N_WAYS] = {0};
    int rc = SO_OK, n_different = 0;
    so_draft_text text = {
        .prompt = t->ids.ids, .n_prompt = t->n_prompt, .max_tokens = (int)t->ids.len};
    for (int k = 0; k < N_WAYS && rc == SO_OK && !so_measure_stopped(); k++) {
        way how = (way)((turn + k) % N_WAYS);
        bool same = true;
        x->set = &x->d->sets[index % 2];
        if (x->d->counted)
            rc = x->set->root->vt->open(x->set->root, &text, &x->state, &m->err);
        if (rc != SO_OK)
            return rc;
        rc = run_way(x, t, how, &ms[how], &same);
        if (x->d->counted)
            x->set->root->vt->close(x->set->root, x->state);
        n_different += !same;
    }
    if (rc != SO_OK || turn == 0 || so_measure_stopped() || !(ms[PLAIN] > 0) || !(ms[FIXED] > 0) ||
        !(ms[PLANNED] > 0))
        return rc;
    double n = SO_MIN((double)t->ids.len - t->n_prompt, SPEED_ANSWER);
    so_ratio_add(&r->fixed, n * ms[PLAIN], n * ms[FIXED]);
    so_ratio_add(&r->planned, n * ms[PLAIN], n * ms[PLANNED]);
    r->n_tokens += (int64_t)n;
    r->n_texts++;
    r->n_different += n_different;
    return rc;
}

static int open_track(racetrack *x) {
    so_measure *m = x->m;
    so_engine_opts o = m->eo;
    int rc = SO_OK;
    o.n_parallel = 1;
    o.max_draft = m->max_gamma;
    o.draft = m->draft.model;
    o.draft_tok = m->draft.tok;
    o.user_drafter = guess;
    o.drafter_user = x;
    for (int i = 0; i < 2 && rc == SO_OK; i++)
        rc = so_engine_create(m->b.model, m->b.tok, &o, &x->engines[i], &m->err);
    so_tree_init(&x->tree, so_model_hparams(m->b.model)->n_vocab, 0);
    return rc;
}

/* Texts spread over all of them, long enough to time. */
static int race_texts(racetrack *x) {
    so_measure *m = x->m;
    int want = SO_MIN(SO_MAX(m->n_tokens / SPEED_SHARE, 2), (int)MAX_SPEED_TOKENS), turn = 0;
    int n_texts = SO_MAX(2, (want + SPEED_ANSWER - 1) / SPEED_ANSWER) + 1; /* and the warm-up */
    int step = SO_MAX(1, m->n_texts / n_texts), rc = SO_OK;
    for (int i = 0; i < m->n_texts && turn < n_texts && rc == SO_OK && !so_measure_stopped();
         i += step) {
        if ((int)m->texts[i].ids.len - m->texts[i].n_prompt < 4)
            continue;
        rc = race(x, i, turn++);
    }
    return rc;
}

int so_measure_speed(so_measure *m, int drafter) {
    racetrack x = {.m = m, .d = &m->drafters[drafter]};
    so_measure_result *r = &x.d->results[m->temp];
    double alpha = so_ratio_value(&r->match);
    if (r->match.n == 0) /* no guess at all: there is nothing to time */
        return SO_OK;
    r->gamma = best_gamma(m, r, alpha);
    r->ideal = predict(m, r, alpha, r->gamma, true);
    r->predicted = predict(m, r, alpha, r->gamma, false);
    for (int i = 0; i < SO_MEASURE_LENIENCES && r->lenient[i].n > 0; i++) {
        double lenient = so_ratio_value(&r->lenient[i]);
        r->lenient_gamma[i] = best_gamma(m, r, lenient);
        r->lenient_speed[i] = predict(m, r, lenient, r->lenient_gamma[i], false);
    }
    int rc = open_track(&x);
    if (rc == SO_OK)
        rc = race_texts(&x);
    for (int i = 0; i < 2; i++)
        so_engine_free(x.engines[i]);
    so_tree_deinit(&x.tree);
    return rc == SO_OK ? rc : so_err_prefix(&m->err, "drafter %s", x.d->name);
}

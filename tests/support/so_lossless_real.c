/* Real drafters in the lossless suite: their draws enumerated, or keyed as in production.
 *
 * A drafter that draws asks for a uniform u and turns it into a token. Given the answers before it,
 * that is a step function of u. The sweep stands at the left end of a step (lo), runs the drafter,
 * and learns how far the step reaches:
 *
 *   1. the row that the drafter declares says: as far as q of the token
 *   2. two probes ask the drafter itself, just inside and just outside of that end
 *   3. where they disagree (a draft that declares another row than it draws from, or drops what it
 *      drew) bisection finds the real end, and the real width is the weight
 *
 * So sound drafters are enumerated with the exact weights of their rows, and unsound ones with what
 * they really do. The k-th answer belongs to the k-th drawn proposal of the tree; answers without
 * one decided to propose nothing. */
#include "so_lossless.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "so_test.h"

/* Rows are floats: the ends of steps are known to about 1e-7. */
static const double INSIDE = 1e-6, LAST = 1e-5;

void so_lossless_real_end(so_lossless_real *r) {
    if (r->state && r->drafter->vt->close)
        r->drafter->vt->close(r->drafter, r->state);
    r->state = NULL;
    if (r->probe) {
        so_tree_deinit(r->probe);
        free(r->probe);
    }
    r->probe = NULL;
}

static void real_begin(void *user, const int32_t *text, int n, uint64_t seed) {
    so_lossless_real *r = user;
    so_err err = {0};
    so_lossless_real_end(r);
    so_draft_text request = {.prompt = text,
                             .n_prompt = r->n_prompt,
                             .expected = r->expected,
                             .n_expected = r->n_expected,
                             .max_tokens = SO_TOY_MAX_TEXT};
    SO_OK_OR_FAIL(r->drafter->vt->open(r->drafter, &request, &r->state, &err), err);
    so_drafter_observe(r->drafter, r->state, text + r->n_prompt, n - r->n_prompt);
    r->seed = seed;
    r->sample.seed = seed;
    r->round = 0;
    r->sweep.n = r->sweep.n_known = 0;
}

static void real_observe(void *user, const int32_t *tokens, int n) {
    so_lossless_real *r = user;
    so_drafter_observe(r->drafter, r->state, tokens, n);
}

static void ask(so_lossless_real *r, const int32_t *text, int n, so_tree *t,
                so_draft_draws *draws) {
    so_err err = {0};
    so_draft_job job = {.state = r->state,
                        .tokens = text,
                        .n_tokens = n,
                        .n_prompt = r->n_prompt,
                        .tree = t,
                        .max_nodes = r->max_nodes,
                        .max_depth = r->max_depth,
                        .seed = r->seed,
                        .round = r->round,
                        .temp = r->has_sample ? r->sample.temp : r->temp,
                        .sample = r->has_sample ? &r->sample : NULL,
                        .draws = draws,
                        .terms = r->terms};
    SO_OK_OR_FAIL(r->drafter->vt->propose(r->drafter, &job, 1, &err), err);
    r->n_refused += job.refused_depth > 0;
    r->n_followed += job.n_levels > 1;
    so_tree_check(t);
}

/* --- the sweep --- */

static double answer(so_draft_draws *draws, const so_drafter *d, int depth, int draw) {
    so_sweep *s = (so_sweep *)draws;
    (void)d;
    (void)depth;
    (void)draw;
    SO_ASSERT_OP(s->at, <, SO_SWEEP_MAX);
    if (s->at == s->n) {
        s->choice[s->n].lo = 0;
        s->choice[s->n++].u = INSIDE;
    }
    return s->choice[s->at++].u;
}

/* The i-th drawn proposal, or NULL. */
static const so_proposal *drawn(const so_tree *t, int i) {
    for (int k = 0; k < t->n_proposals; k++)
        if (t->proposals[k].kind != SO_Q_POINT && i-- == 0)
            return &t->proposals[k];
    return NULL;
}

static int32_t outcome(const so_tree *t, int i) {
    const so_proposal *p = drawn(t, i);
    return p ? t->nodes[p->child].token : -1;
}

/* What answer i decides at u, the answers before it as they are. */
static int32_t decide(so_lossless_real *r, const int32_t *text, int n, int i, double u) {
    so_sweep s = r->sweep;
    s.at = 0;
    s.n = i + 1;
    s.choice[i].u = u;
    so_tree_reset(r->probe, text[n - 1], n - 1);
    ask(r, text, n, r->probe, &s.base);
    return outcome(r->probe, i);
}

static double declared_width(const so_tree *t, int i, double lo) {
    const so_proposal *p = drawn(t, i);
    double mass = 0;
    for (int k = 0; p && k < t->n_vocab; k++)
        mass += (double)so_tree_row(t, p->row)[k];
    return p ? (double)so_tree_row(t, p->row)[t->nodes[p->child].token] / mass : 1 - lo;
}

static double measured_width(so_lossless_real *r, const int32_t *text, int n, int i, int32_t x) {
    double lo = r->sweep.choice[i].lo, in = lo, out = 1;
    if (decide(r, text, n, i, 1 - INSIDE) == x)
        return 1 - lo;
    while (out - in > 1e-13) {
        double mid = (in + out) / 2;
        *(decide(r, text, n, i, mid) == x ? &in : &out) = mid;
    }
    return in - lo;
}

static void resolve(so_lossless_real *r, const int32_t *text, int n, const so_tree *t, int i) {
    double lo = r->sweep.choice[i].lo, width = declared_width(t, i, lo), hi = lo + width;
    int32_t x = outcome(t, i);
    bool so = decide(r, text, n, i, SO_MAX(hi - INSIDE, lo + INSIDE)) == x &&
              (hi > 1 - 2 * INSIDE || decide(r, text, n, i, hi + INSIDE) != x);
    r->sweep.choice[i].outcome = x;
    r->sweep.choice[i].width = so ? width : measured_width(r, text, n, i, x);
}

static double real_weight(void *user) {
    const so_lossless_real *r = user;
    double w = 1;
    for (int i = 0; i < r->sweep.n; i++)
        w *= r->sweep.choice[i].width;
    return w;
}

/* Moves the last answer that can still decide something else. */
static bool real_next(void *user) {
    so_sweep *s = &((so_lossless_real *)user)->sweep;
    while (s->n > 0) {
        double lo = s->choice[s->n - 1].lo + s->choice[s->n - 1].width;
        if (lo < 1 - LAST) {
            s->choice[s->n - 1].lo = lo;
            s->choice[s->n - 1].u = lo + INSIDE;
            s->n_known = s->n - 1;
            return true;
        }
        s->n--;
    }
    s->n_known = 0;
    return false;
}

static void real_propose(void *user, const int32_t *text, int n, so_tree *t, so_verify_rng *draws) {
    so_lossless_real *r = user;
    if (draws) {
        ask(r, text, n, t, NULL);
        r->round++;
        return;
    }
    if (!r->probe) {
        r->probe = SO_NEW(so_tree);
        so_tree_init(r->probe, t->n_vocab, t->max_rows);
    }
    r->sweep.base.uniform = answer;
    r->sweep.at = 0;
    ask(r, text, n, t, &r->sweep.base);
    for (int i = r->sweep.n_known; i < r->sweep.n; i++)
        resolve(r, text, n, t, i);
    r->sweep.n_known = r->sweep.n;
}

void so_lossless_use(so_lossless_case *c, so_lossless_real *r) {
    c->user = r;
    c->begin = real_begin;
    c->propose = real_propose;
    c->observe = real_observe;
    c->draft_weight = real_weight;
    c->next_draft = real_next;
    r->n_prompt = c->prompt ? c->n_prompt : 1;
    r->has_sample = c->sample != NULL;
    if (c->sample)
        r->sample = *c->sample;
}

/* --- match --- */

typedef struct seeded {
    so_lossless_rows *rows;
    so_sample_params sample;
    const so_tree *t;
    const int32_t *text;
    int n;
} seeded;

static int32_t choose(void *user, int node) {
    const seeded *s = user;
    int32_t path[SO_TOY_MAX_TEXT];
    int n = so_toy_path(s->t, node, s->text, s->n, path);
    return so_lossless_rows_token(s->rows, &s->sample, path, n, s->n);
}

/* A request of at least n tokens with the drafter. */
static void speculate(const so_lossless_case *c, seeded *s, so_tree *t, int32_t *text, int n) {
    so_verify_rng keyed = {0};
    int len = s->n = so_lossless_prompt(c, text);
    s->t = t;
    s->text = text;
    c->begin(c->user, text, len, s->sample.seed);
    for (n += len; len < n; s->n = len) {
        so_verdict v;
        so_tree_reset(t, text[len - 1], len - 1);
        c->propose(c->user, text, len, t, &keyed);
        so_verify_match(t, choose, s, &v);
        if (c->watch)
            c->watch(c->watcher, t, &v, text, len);
        for (int i = 0; i < v.n_accepted; i++)
            text[len + i] = t->nodes[v.path[i]].token;
        text[len + v.n_accepted] = v.token;
        c->observe(c->user, text + len, v.n_accepted + 1);
        len += v.n_accepted + 1;
    }
}

int so_lossless_count_different(const so_lossless_case *c, int n, int n_seeds, uint64_t seed) {
    so_tree *t = SO_NEW(so_tree);
    seeded s = {.rows = so_lossless_rows_create(c), .sample = *c->sample};
    int different = 0;
    so_tree_init(t, c->target->n_vocab, 0);
    for (int i = 0; i < n_seeds; i++) {
        int32_t spec[SO_TOY_MAX_TEXT], plain[SO_TOY_MAX_TEXT];
        int len = so_lossless_prompt(c, plain), end = len + n;
        s.sample.seed = seed + (uint64_t)i;
        for (; len < end; len++)
            plain[len] = so_lossless_rows_token(s.rows, &s.sample, plain, len, 0);
        speculate(c, &s, t, spec, n);
        different += memcmp(plain, spec, (size_t)end * sizeof *plain) != 0;
    }
    so_lossless_rows_free(s.rows);
    so_tree_deinit(t);
    free(t);
    return different;
}

/* Enumeration by replay: a run asks for choices; the script answers those it knows and takes the
 * first possible outcome for the rest; after the run the last choice that has another outcome moves
 * on to it. Every run's weight is the product of its choices' probabilities, so the weights of all
 * runs sum to 1 and nothing is sampled. */
#include "so_lossless.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "so_test.h"

/* --- toys --- */

static double noise(uint64_t seed, int i) {
    so_rng_key key = {.seed = seed, .purpose = SO_RNG_TEST};
    return so_rng_uniform(&key, (uint32_t)i);
}

static void fill_row(float *row, int n, uint64_t seed, int at, double zeros, double sharp) {
    double w[SO_TOY_MAX_VOCAB], total = 0;
    int keep = (int)(noise(seed, at) * n);
    for (int i = 0; i < n; i++) {
        bool zero = i != keep && noise(seed, at + 1 + 2 * i) < zeros;
        w[i] = zero ? 0 : pow(noise(seed, at + 2 + 2 * i), sharp);
        total += w[i];
    }
    for (int i = 0; i < n; i++)
        row[i] = (float)(w[i] / total);
}

void so_toy_init(so_toy *m, int n_vocab, uint64_t seed, double zeros, double sharp) {
    *m = (so_toy){.n_vocab = n_vocab};
    for (int a = 0; a < n_vocab; a++)
        for (int b = 0; b < n_vocab; b++)
            fill_row(m->rows[a][b], n_vocab, seed, 1024 * (a * n_vocab + b), zeros, sharp);
}

void so_toy_init_near(so_toy *m, const so_toy *target, double closeness, uint64_t seed,
                      double zeros) {
    so_toy_init(m, target->n_vocab, seed, zeros, 1);
    for (int a = 0; a < m->n_vocab; a++)
        for (int b = 0; b < m->n_vocab; b++)
            for (int i = 0; i < m->n_vocab; i++)
                m->rows[a][b][i] = (float)(closeness * (double)target->rows[a][b][i] +
                                           (1 - closeness) * (double)m->rows[a][b][i]);
}

void so_toy_init_iid(so_toy *m, const float *row, int n_vocab) {
    *m = (so_toy){.n_vocab = n_vocab};
    for (int a = 0; a < n_vocab; a++)
        for (int b = 0; b < n_vocab; b++)
            memcpy(m->rows[a][b], row, (size_t)n_vocab * sizeof *row);
}

const float *so_toy_row(const so_toy *m, const int32_t *text, int n) {
    return m->rows[n > 1 ? text[n - 2] : 0][text[n - 1]];
}

int so_toy_path(const so_tree *t, int node, const int32_t *text, int n, int32_t *out) {
    int len = n + t->nodes[node].depth;
    SO_ASSERT_OP(len, <, SO_TOY_MAX_TEXT);
    memcpy(out, text, (size_t)n * sizeof *text);
    for (int i = len; node > 0; node = t->nodes[node].parent)
        out[--i] = t->nodes[node].token;
    return len;
}

/* --- the target's rows --- */

/* Rows after the pipeline, remembered: enumeration asks for the same few contexts again and again.
 * A text of k tokens behind the prompt is a number of k digits; numbers of all lengths up to
 * max_len stand one behind the other. */
struct so_lossless_rows {
    const so_lossless_case *c;
    so_sampler *sampler;
    float *memo; /* [n_memo][n_vocab] */
    bool *known; /* [n_memo] */
    int n_memo;
    float row[SO_TOY_MAX_VOCAB]; /* of a longer text */
};

enum { MAX_MEMO = 1 << 18 };

so_lossless_rows *so_lossless_rows_create(const so_lossless_case *c) {
    so_lossless_rows *r = SO_NEW(so_lossless_rows);
    r->c = c;
    if (!c->sample)
        return r;
    r->sampler = so_sampler_create(c->target->n_vocab);
    for (int n = 1; r->n_memo + n <= MAX_MEMO; n *= c->target->n_vocab)
        r->n_memo += n;
    r->memo = SO_NEW_N(float, r->n_memo * c->target->n_vocab);
    r->known = SO_NEW_N(bool, r->n_memo);
    return r;
}

void so_lossless_rows_free(so_lossless_rows *r) {
    so_sampler_free(r->sampler);
    free(r->memo);
    free(r->known);
    free(r);
}

static int n_prompt_of(const so_lossless_case *c) { return c->prompt ? c->n_prompt : 1; }

static void toy_logits(const so_lossless_case *c, const int32_t *text, int n, float *logits) {
    const float *row = so_toy_row(c->target, text, n);
    for (int i = 0; i < c->target->n_vocab; i++)
        logits[i] = logf(row[i]);
}

static void standardise(so_lossless_rows *r, const int32_t *text, int n,
                        const so_sample_context *ctx, float *row) {
    float logits[SO_TOY_MAX_VOCAB];
    so_err err = {0};
    toy_logits(r->c, text, n, logits);
    SO_OK_OR_FAIL(so_sample_distribution(r->sampler, r->c->sample, logits, ctx, row, &err), err);
}

/* −1: not remembered. */
static int memo_index(const so_lossless_rows *r, const int32_t *text, int n) {
    int64_t start = 0, count = 1, number = 0;
    for (int i = n_prompt_of(r->c); i < n && start < r->n_memo; i++) {
        start += count;
        count *= r->c->target->n_vocab;
        number = number * r->c->target->n_vocab + text[i];
    }
    return start + number < r->n_memo ? (int)(start + number) : -1;
}

const float *so_lossless_rows_get(so_lossless_rows *r, const int32_t *text, int n) {
    if (!r->c->sample)
        return so_toy_row(r->c->target, text, n);
    int i = memo_index(r, text, n);
    float *row = i < 0 ? r->row : r->memo + (size_t)i * (size_t)r->c->target->n_vocab;
    if (i < 0 || !r->known[i])
        standardise(r, text, n, &(so_sample_context){text, n, n_prompt_of(r->c)}, row);
    if (i >= 0)
        r->known[i] = true;
    return row;
}

int32_t so_lossless_rows_token(so_lossless_rows *r, const so_sample_params *p, const int32_t *text,
                               int n, int n_round) {
    float logits[SO_TOY_MAX_VOCAB];
    int32_t token = -1;
    so_err err = {0};
    so_sample_context ctx = {text, n, n_prompt_of(r->c)};
    toy_logits(r->c, text, n, logits);
    if (r->c->slip == SO_SLIP_ROUND && n_round > 0)
        ctx.n_tokens = n_round;
    if (r->c->slip == SO_SLIP_OUTPUT && n_round > 0)
        ctx.n_prompt = 0;
    SO_OK_OR_FAIL(so_sample_token(r->sampler, p, logits, &ctx, &token, &err), err);
    return token;
}

/* --- one round --- */

typedef struct target_view {
    so_lossless_rows *rows;
    const so_tree *t;
    const int32_t *text;
    int n;
} target_view;

static const float *target_row(void *user, int node) {
    const target_view *v = user;
    const so_lossless_case *c = v->rows->c;
    int32_t path[SO_TOY_MAX_TEXT];
    int n = so_toy_path(v->t, node, v->text, v->n, path);
    if (c->slip == SO_SLIP_NONE)
        return so_lossless_rows_get(v->rows, path, n);
    so_sample_context wrong = {path, c->slip == SO_SLIP_ROUND ? v->n : n,
                               c->slip == SO_SLIP_OUTPUT ? 0 : n_prompt_of(c)};
    standardise(v->rows, path, n, &wrong, v->rows->row);
    return v->rows->row;
}

static void make_draft(const so_lossless_case *c, so_tree *t, const int32_t *text, int n,
                       so_verify_rng *draws) {
    so_tree_reset(t, text[n - 1], n - 1);
    c->propose(c->user, text, n, t, draws);
}

/* The emitted tokens and their number. */
static int check_draft(so_lossless_rows *rows, so_tree *t, const int32_t *text, int n,
                       so_verify_rng *tests, int32_t *emitted) {
    const so_lossless_case *c = rows->c;
    double scratch[2 * SO_TOY_MAX_VOCAB];
    so_verdict v;
    target_view view = {rows, t, text, n};
    if (c->verify)
        c->verify(t, target_row, &view, tests, scratch, &v);
    else
        so_verify_reject(t, target_row, &view, tests, 1, scratch, &v);
    if (c->watch)
        c->watch(c->watcher, t, &v, text, n);
    for (int i = 0; i < v.n_accepted; i++)
        emitted[i] = t->nodes[v.path[i]].token;
    emitted[v.n_accepted] = v.token;
    return v.n_accepted + 1;
}

static so_tree *new_tree(const so_lossless_case *c) {
    so_tree *t = SO_NEW(so_tree);
    so_tree_init(t, c->target->n_vocab, 128);
    return t;
}

static void free_tree(so_tree *t) {
    so_tree_deinit(t);
    free(t);
}

/* --- texts as numbers: digits of base n_vocab behind the prompt --- */

static int power(int base, int e) {
    int r = 1;
    while (e-- > 0)
        r *= base;
    return r;
}

int so_lossless_n_texts(const so_lossless_case *c) { return power(c->target->n_vocab, c->n_out); }

int so_lossless_prompt(const so_lossless_case *c, int32_t *text) {
    int n = n_prompt_of(c);
    text[0] = 0;
    if (c->prompt)
        memcpy(text, c->prompt, (size_t)n * sizeof *text);
    return n;
}

static int text_of(const so_lossless_case *c, int len, int number, int32_t *text) {
    int n = so_lossless_prompt(c, text) + len;
    for (int i = n - 1; i >= n - len; i--, number /= c->target->n_vocab)
        text[i] = number % c->target->n_vocab;
    return n;
}

/* --- enumeration --- */

enum { MAX_CHOICES = 256 };

typedef struct enumerator {
    so_verify_rng base;
    int n, at;
    struct {
        int outcome, next; /* next: −1 where this outcome is the last possible one */
    } choice[MAX_CHOICES];
    double weight;
} enumerator;

static int possible(const double *w, int n, int from) {
    while (from < n && !(w[from] > 0))
        from++;
    return from < n ? from : -1;
}

static int choose(enumerator *e, const double *w, int n, double total) {
    SO_ASSERT_OP(e->at, <, MAX_CHOICES);
    if (e->at == e->n)
        e->choice[e->n++].outcome = possible(w, n, 0);
    int outcome = e->choice[e->at].outcome;
    SO_ASSERT(outcome >= 0);
    e->choice[e->at++].next = possible(w, n, outcome + 1);
    e->weight *= w[outcome] / total;
    return outcome;
}

static bool enum_accept(so_verify_rng *c, uint32_t position, uint32_t index, double p, double q) {
    (void)position;
    (void)index;
    double yes = p >= q ? 1 : p / q;
    return choose((enumerator *)c, (double[]){1 - yes, yes}, 2, 1) == 1;
}

static int32_t enum_draw(so_verify_rng *c, uint32_t position, const double *w, int n,
                         double total) {
    (void)position;
    return choose((enumerator *)c, w, n, total);
}

static void begin_run(enumerator *e) {
    e->at = 0;
    e->weight = 1;
}

static bool next_run(enumerator *e) {
    while (e->n > 0 && e->choice[e->n - 1].next < 0)
        e->n--;
    if (e->n > 0)
        e->choice[e->n - 1].outcome = e->choice[e->n - 1].next;
    return e->n > 0;
}

/* All runs of one round from one text, each with its weight and what it emitted. */
typedef void visit_fn(void *user, double weight, const int32_t *emitted, int n);

/* The drafter enumerates its draws: for each draft all outcomes of the tests. */
static void visit_drafts(so_lossless_rows *rows, so_tree *t, const int32_t *text, int n,
                         visit_fn *visit, void *user) {
    const so_lossless_case *c = rows->c;
    int32_t emitted[SO_TREE_MAX];
    c->begin(c->user, text, n, 0);
    do {
        enumerator e = {.base = {enum_accept, enum_draw}};
        make_draft(c, t, text, n, NULL);
        do {
            begin_run(&e);
            int n_new = check_draft(rows, t, text, n, &e.base, emitted);
            visit(user, c->draft_weight(c->user) * e.weight, emitted, n_new);
        } while (next_run(&e));
    } while (c->next_draft(c->user));
}

static void visit_round(so_lossless_rows *rows, so_tree *t, const int32_t *text, int n,
                        visit_fn *visit, void *user) {
    const so_lossless_case *c = rows->c;
    enumerator e = {.base = {enum_accept, enum_draw}};
    int32_t emitted[SO_TREE_MAX];
    if (c->next_draft) {
        visit_drafts(rows, t, text, n, visit, user);
        return;
    }
    do {
        begin_run(&e);
        if (c->begin)
            c->begin(c->user, text, n, 0);
        make_draft(c, t, text, n, &e.base);
        int n_new = check_draft(rows, t, text, n, &e.base, emitted);
        visit(user, e.weight, emitted, n_new);
    } while (next_run(&e));
}

/* Where rounds lead: reach[len][number] is the weight of each text. Tokens beyond n_out are
 * enumerated like all others and then forgotten. */
typedef struct spread {
    const so_lossless_case *c;
    int len, number;
    double **reach;
} spread;

static void spread_run(void *user, double weight, const int32_t *emitted, int n) {
    spread *s = user;
    int to = s->number;
    n = SO_MIN(n, s->c->n_out - s->len);
    for (int i = 0; i < n; i++)
        to = to * s->c->target->n_vocab + emitted[i];
    s->reach[s->len + n][to] += weight * s->reach[s->len][s->number];
}

static void count_run(void *user, double weight, const int32_t *emitted, int n) {
    (void)emitted;
    *(double *)user += weight * n;
}

double so_lossless_tokens_per_round(const so_lossless_case *c) {
    so_tree *t = new_tree(c);
    so_lossless_rows *rows = so_lossless_rows_create(c);
    double tokens = 0;
    int32_t text[SO_TOY_MAX_TEXT];
    int n = so_lossless_prompt(c, text);
    visit_round(rows, t, text, n, count_run, &tokens);
    so_lossless_rows_free(rows);
    free_tree(t);
    return tokens;
}

void so_lossless_enumerate(const so_lossless_case *c, double *dist) {
    SO_ASSERT(c->n_out >= 1 && c->n_out <= SO_LOSSLESS_MAX_OUT);
    double *reach[SO_LOSSLESS_MAX_OUT + 1] = {0};
    so_tree *t = new_tree(c);
    so_lossless_rows *rows = so_lossless_rows_create(c);
    for (int len = 0; len <= c->n_out; len++)
        reach[len] = SO_NEW_N(double, power(c->target->n_vocab, len));
    reach[0][0] = 1;
    for (int len = 0; len < c->n_out; len++)
        for (int i = 0; i < power(c->target->n_vocab, len); i++) {
            int32_t text[SO_TOY_MAX_TEXT];
            int n = text_of(c, len, i, text);
            if (reach[len][i] > 0)
                visit_round(rows, t, text, n, spread_run, &(spread){c, len, i, reach});
        }
    memcpy(dist, reach[c->n_out], (size_t)so_lossless_n_texts(c) * sizeof *dist);
    for (int len = 0; len <= c->n_out; len++)
        free(reach[len]);
    so_lossless_rows_free(rows);
    free_tree(t);
}

void so_lossless_plain(const so_lossless_case *c, double *dist) {
    so_lossless_rows *rows = so_lossless_rows_create(c);
    for (int i = 0; i < so_lossless_n_texts(c); i++) {
        int32_t text[SO_TOY_MAX_TEXT];
        int n = text_of(c, c->n_out, i, text);
        dist[i] = 1;
        for (int k = n - c->n_out; k < n; k++) {
            const float *row = so_lossless_rows_get(rows, text, k);
            double total = 0;
            for (int j = 0; j < c->target->n_vocab; j++)
                total += (double)row[j];
            dist[i] *= (double)row[text[k]] / total;
        }
    }
    so_lossless_rows_free(rows);
}

double so_lossless_gap(const so_lossless_case *c) {
    int n = so_lossless_n_texts(c);
    double *plain = SO_NEW_N(double, n), *spec = SO_NEW_N(double, n), gap = 0;
    so_lossless_plain(c, plain);
    so_lossless_enumerate(c, spec);
    for (int i = 0; i < n; i++) {
        double d = fabs(plain[i] - spec[i]);
        gap = d > gap || isnan(d) ? d : gap;
    }
    free(plain);
    free(spec);
    return gap;
}

void so_lossless_check(const so_lossless_case *c) {
    double gap = so_lossless_gap(c);
    if (!(gap <= SO_LOSSLESS_TOLERANCE))
        fail_msg("%s: the text is not distributed as the target's: a probability is off by %g",
                 c->name, gap);
}

/* --- sampling --- */

/* Chance for drafters: a purpose of its own, and a running index, so that no draw repeats. */
typedef struct drafter_chance {
    so_verify_rng base;
    so_rng_key key;
    uint32_t index;
} drafter_chance;

static int32_t drafter_draw(so_verify_rng *c, uint32_t position, const double *w, int n,
                            double total) {
    drafter_chance *d = (drafter_chance *)c;
    (void)position;
    double at = so_rng_uniform(&d->key, d->index++) * total;
    int32_t last = 0;
    for (int32_t i = 0; i < n; i++)
        if (w[i] > 0) {
            last = i;
            if ((at -= w[i]) < 0)
                break;
        }
    return last;
}

/* One request of n_out tokens; the number of its text. */
static int sample_text(so_lossless_rows *rows, so_tree *t, uint64_t seed) {
    const so_lossless_case *c = rows->c;
    so_verify_rng_keyed tests;
    drafter_chance draws = {{.draw = drafter_draw}, {.seed = seed, .purpose = SO_RNG_DRAFT}, 0};
    int32_t text[SO_TOY_MAX_TEXT];
    int n_prompt = so_lossless_prompt(c, text), n = n_prompt, number = 0;
    so_verify_rng_keyed_init(&tests, seed, 0);
    if (c->begin)
        c->begin(c->user, text, n, seed);
    while (n < n_prompt + c->n_out) {
        make_draft(c, t, text, n, &draws.base);
        int n_new = check_draft(rows, t, text, n, &tests.base, text + n);
        if (c->observe)
            c->observe(c->user, text + n, n_new);
        n += n_new;
    }
    for (int i = n_prompt; i < n_prompt + c->n_out; i++)
        number = number * c->target->n_vocab + text[i];
    return number;
}

double so_lossless_chi2(const so_lossless_case *c, int n_draws, uint64_t seed) {
    int n = so_lossless_n_texts(c), df = -1;
    double *plain = SO_NEW_N(double, n), x = 0, rare = 0;
    int *seen = SO_NEW_N(int, n), rare_seen = 0;
    bool impossible = false;
    so_tree *t = new_tree(c);
    so_lossless_rows *rows = so_lossless_rows_create(c);
    so_lossless_plain(c, plain);
    for (int i = 0; i < n_draws; i++)
        seen[sample_text(rows, t, seed + (uint64_t)i)]++;
    for (int i = 0; i < n; i++) {
        double want = plain[i] * n_draws;
        impossible |= want == 0 && seen[i] > 0;
        if (want < 5) { /* too few for the approximation: counted together */
            rare += want;
            rare_seen += seen[i];
            continue;
        }
        x += (seen[i] - want) * (seen[i] - want) / want;
        df++;
    }
    if (rare >= 5) {
        x += (rare_seen - rare) * (rare_seen - rare) / rare;
        df++;
    }
    so_lossless_rows_free(rows);
    free_tree(t);
    free(plain);
    free(seen);
    return impossible ? 0 : so_chi2_tail(x, SO_MAX(df, 1));
}

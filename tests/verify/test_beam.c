/* Beam search on toy models that give every text a distribution drawn from a hash:
 *
 *   - against a literal rendering of Hugging Face's loop, with its arrays of w sequences and scores
 *     of −10⁹, over random widths, penalties, ways to stop early, end tokens and lengths;
 *   - against enumeration: a width that holds every hypothesis finds the best of all;
 *   - orders and ties, one by one. */
#include "so_test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/rng.h"
#include "verify/beam.h"

enum { MAX_V = 40, MAX_T = 12, MAX_W = 8, MAX_K = 8 * 4 };

typedef struct toy {
    int n_vocab, n_ends; /* the first n_ends ids are end tokens */
    double peak;         /* how uneven the distributions are */
    double end_bias;     /* added to the logits of end tokens */
    uint64_t seed;
} toy;

static double unit(uint64_t seed, uint32_t i) {
    so_rng_key key = {.seed = seed, .purpose = SO_RNG_TEST};
    return so_rng_uniform(&key, i);
}

/* The log-softmax after a text. */
static void toy_row(const toy *m, const int32_t *text, int n, double *out) {
    uint64_t h = m->seed;
    double sum = 0;
    for (int i = 0; i < n; i++)
        h = h * 0x9E3779B97F4A7C15u + (uint64_t)text[i] + 1;
    for (int i = 0; i < m->n_vocab; i++) {
        out[i] = m->peak * unit(h, (uint32_t)i) + (i < m->n_ends ? m->end_bias : 0);
        sum += exp(out[i]);
    }
    for (int i = 0; i < m->n_vocab; i++)
        out[i] -= log(sum);
}

/* --- the literal rendering --- */

typedef struct beam {
    int32_t text[MAX_T];
    int n;
    double score;
    bool finished;
} beam;

/* Stable: equal scores keep their order. */
static void sort_beams(beam *b, int n) {
    for (int i = 1; i < n; i++) {
        beam x = b[i];
        int at = i;
        for (; at > 0 && x.score > b[at - 1].score; at--)
            b[at] = b[at - 1];
        b[at] = x;
    }
}

static int top_candidates(const toy *m, const beam *running, int w, int k, beam *top) {
    static beam all[MAX_W * MAX_V];
    int n = 0;
    for (int i = 0; i < w; i++) {
        double row[MAX_V];
        toy_row(m, running[i].text, running[i].n, row);
        for (int t = 0; t < m->n_vocab; t++) {
            all[n] = running[i];
            all[n].text[all[n].n++] = t;
            all[n++].score += row[t];
        }
    }
    sort_beams(all, n);
    memcpy(top, all, (size_t)SO_MIN(k, n) * sizeof *top);
    return SO_MIN(k, n);
}

static bool improvable(const so_beam_rule *r, const beam *running, const beam *done, int len) {
    int hypothetical =
        r->early_stop == SO_EARLY_STOP_NEVER && r->length_penalty > 0 ? r->max_depth : len;
    double best = running[0].score / pow(hypothetical, r->length_penalty), worst = INFINITY;
    bool any = false;
    for (int i = 0; i < r->width; i++)
        worst = fmin(worst, done[i].score);
    for (int i = 0; i < r->width; i++)
        any |= best > (done[i].finished ? worst : -1e9);
    return any;
}

/* Fills done[w], best first. */
static void literal(const toy *m, const so_beam_rule *r, beam *done) {
    int w = r->width, k = SO_MAX(2, 1 + m->n_ends) * w;
    beam running[MAX_W] = {0}, top[MAX_K], merged[MAX_W + MAX_K];
    bool go_on = true;
    for (int i = 0; i < w; i++) {
        running[i].score = i ? -1e9 : 0;
        done[i] = (beam){.score = -1e9};
    }
    for (int len = 1; go_on; len++) {
        int n = top_candidates(m, running, w, k, top);
        bool all_hit = true, full = true;
        memcpy(merged, done, (size_t)w * sizeof *done);
        for (int i = 0; i < n; i++) {
            top[i].finished = top[i].text[len - 1] < m->n_ends || len == r->max_depth;
            all_hit &= top[i].finished;
            merged[w + i] = top[i];
            merged[w + i].score /= pow(len, r->length_penalty);
            merged[w + i].finished &= i < w;
            merged[w + i].score -= merged[w + i].finished ? 0 : 1e9;
            top[i].score -= top[i].finished ? 1e9 : 0;
        }
        sort_beams(merged, w + n);
        memcpy(done, merged, (size_t)w * sizeof *done);
        sort_beams(top, n);
        memcpy(running, top, (size_t)w * sizeof *running);
        for (int i = 0; i < w; i++) {
            running[i].finished = false;
            full &= done[i].finished;
        }
        go_on = improvable(r, running, done, len) && !all_hit &&
                !(full && r->early_stop == SO_EARLY_STOP_YES);
    }
}

/* --- the search --- */

static so_beam_end toy_ends(void *user, int32_t parent, int32_t token) {
    (void)parent;
    return token < ((const toy *)user)->n_ends ? SO_BEAM_END_TOKEN : SO_BEAM_GOES_ON;
}

static int by_score(const void *a, const void *b) {
    const so_scored *x = a, *y = b;
    return x->score != y->score ? (x->score > y->score ? -1 : 1) : x->id - y->id;
}

static void search(const toy *m, const so_beam_rule *r, so_beam_search *s) {
    so_scored items[SO_BEAM_MAX][MAX_V];
    so_beam_init(s, r, 0);
    while (!s->ended) {
        so_beam_row rows[SO_BEAM_MAX];
        for (int i = 0; i < s->n_live; i++) {
            int32_t text[MAX_T];
            double row[MAX_V];
            toy_row(m, text, so_beam_tokens(s, s->live[i], text), row);
            for (int t = 0; t < m->n_vocab; t++)
                items[i][t] = (so_scored){row[t], t};
            qsort(items[i], (size_t)m->n_vocab, sizeof items[i][0], by_score);
            rows[i] =
                (so_beam_row){items[i], SO_MIN(m->n_vocab, so_beam_row_len(r->width, m->n_ends))};
        }
        so_beam_step(s, rows, toy_ends, (void *)(uintptr_t)m);
    }
}

static void test_literal(void **state) {
    (void)state;
    int n_ended_early = 0, n_by_end = 0;
    for (uint32_t i = 0; i < 3000; i++) {
        uint64_t seed = 1000 + i;
        int w = 2 + (int)(unit(seed, 0) * (MAX_W - 1)), n_ends = (int)(unit(seed, 1) * 4);
        toy m = {.n_vocab = w + n_ends + (int)(unit(seed, 2) * (MAX_V - 3 - MAX_W)),
                 .n_ends = n_ends,
                 .peak = 1 + 6 * unit(seed, 3),
                 .end_bias = 6 * unit(seed, 4) - 2,
                 .seed = seed};
        so_beam_rule r = {.width = w,
                          .length_penalty = 4 * unit(seed, 5) - 2,
                          .early_stop = (so_early_stop)(unit(seed, 6) * 3),
                          .max_depth = 1 + (int)(unit(seed, 7) * MAX_T)};
        if (i % 5 == 0)
            r.length_penalty = i % 10 ? 1 : 0;
        beam want[MAX_W];
        so_beam_search s;
        literal(&m, &r, want);
        search(&m, &r, &s);
        n_ended_early += s.depth < r.max_depth;
        for (int k = 0; k < w && want[k].finished && want[k].score > -1e8; k++) {
            int32_t text[MAX_T];
            assert_true(k < s.n_done);
            assert_int_equal(so_beam_tokens(&s, s.done[k].node, text), want[k].n);
            assert_memory_equal(text, want[k].text, (size_t)want[k].n * sizeof *text);
            assert_true(s.done[k].score == want[k].score);
            n_by_end += s.done[k].why == SO_BEAM_END_TOKEN;
        }
        so_beam_deinit(&s);
    }
    assert_true(n_ended_early > 300 && n_by_end > 3000);
}

/* --- enumeration --- */

typedef struct best {
    double score;
    int32_t text[MAX_T];
    int n;
} best;

static void enumerate(const toy *m, const so_beam_rule *r, int32_t *text, int n, double sum,
                      best *b) {
    double row[MAX_V];
    bool ended = n > 0 && (text[n - 1] < m->n_ends || n == r->max_depth);
    double score = ended ? sum / pow(n, r->length_penalty) : -INFINITY;
    if (score > b->score) {
        b->score = score;
        b->n = n;
        memcpy(b->text, text, (size_t)n * sizeof *text);
    }
    if (ended)
        return;
    toy_row(m, text, n, row);
    for (int t = 0; t < m->n_vocab; t++) {
        text[n] = t;
        enumerate(m, r, text, n + 1, sum + row[t], b);
    }
}

/* 4 tokens, of which one ends, and at most 4 steps: never more than 3³ · 4 candidates, and at most 27
 * live hypotheses. The results must hold all finished ones, or a good short one could be dropped. */
static void test_enumeration(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 200; i++) {
        toy m = {.n_vocab = 4, .n_ends = 1, .peak = 3, .end_bias = 3 * unit(i, 9) - 1, .seed = i};
        so_beam_rule r = {.width = SO_BEAM_MAX,
                          .length_penalty = 3 * unit(i, 1) - 1,
                          .early_stop = SO_EARLY_STOP_NEVER,
                          .max_depth = 4};
        int32_t text[MAX_T];
        best b = {.score = -INFINITY};
        so_beam_search s;
        enumerate(&m, &r, text, 0, 0, &b);
        search(&m, &r, &s);
        assert_int_equal(so_beam_tokens(&s, s.done[0].node, text), b.n);
        assert_memory_equal(text, b.text, (size_t)b.n * sizeof *text);
        assert_true(fabs(s.done[0].score - b.score) < 1e-12);
        so_beam_deinit(&s);
    }
}

/* --- single cases --- */

static so_beam_end zero_ends(void *user, int32_t parent, int32_t token) {
    (void)user;
    (void)parent;
    return token == 0 ? SO_BEAM_END_TOKEN : SO_BEAM_GOES_ON;
}

static void step(so_beam_search *s, const so_scored *items, int n) {
    so_beam_row rows[SO_BEAM_MAX];
    for (int i = 0; i < s->n_live; i++)
        rows[i] = (so_beam_row){items, n};
    so_beam_step(s, rows, zero_ends, NULL);
}

static void assert_text(const so_beam_search *s, int32_t node, int n, const int32_t *want) {
    int32_t text[16];
    assert_int_equal(so_beam_tokens(s, node, text), n);
    assert_memory_equal(text, want, (size_t)n * sizeof *text);
}

/* Width 1 is greedy decoding: it ends at the first end token and not before. */
static void test_width_1(void **state) {
    (void)state;
    so_beam_search s;
    so_beam_init(&s, &(so_beam_rule){.width = 1, .length_penalty = 2, .max_depth = 9}, 7);
    step(&s, (so_scored[]){{-1, 3}, {-2, 0}}, 2);
    assert_false(s.ended);
    step(&s, (so_scored[]){{-1, 0}, {-1.5, 3}}, 2);
    assert_true(s.ended && s.done[0].why == SO_BEAM_END_TOKEN);
    assert_text(&s, s.done[0].node, 2, (int32_t[]){3, 0});
    assert_true(s.done[0].score == -2.0 / 4);
    so_beam_deinit(&s);
}

/* Equal sums: the hypothesis that was better before comes first; an end beyond the first `width`
 * candidates is no result; an equal result does not displace an earlier one. */
static void test_ties(void **state) {
    (void)state;
    so_beam_search s;
    so_beam_init(&s, &(so_beam_rule){.width = 2, .max_depth = 9}, 7);
    step(&s, (so_scored[]){{-1, 1}, {-1, 2}, {-1, 3}}, 3);
    assert_text(&s, s.live[0], 1, (int32_t[]){1});
    assert_text(&s, s.live[1], 1, (int32_t[]){2});
    step(&s, (so_scored[]){{-1, 4}, {-1, 5}, {-1, 0}}, 3);
    assert_text(&s, s.live[0], 2, (int32_t[]){1, 4});
    assert_text(&s, s.live[1], 2, (int32_t[]){1, 5});
    assert_int_equal(s.n_done, 0);
    step(&s, (so_scored[]){{-1, 0}, {-1, 4}}, 2);
    assert_int_equal(s.n_done, 1);
    assert_text(&s, s.done[0].node, 3, (int32_t[]){1, 4, 0});
    assert_text(&s, s.live[0], 3, (int32_t[]){1, 4, 4});
    assert_text(&s, s.live[1], 3, (int32_t[]){1, 5, 4});
    so_beam_deinit(&s);
}

/* Without candidates the search ends with what there is; a cut takes the live ones. */
static void test_ends(void **state) {
    (void)state;
    so_beam_search s;
    so_beam_rule r = {.width = 2, .length_penalty = 1, .max_depth = 9};
    so_beam_init(&s, &r, 7);
    step(&s, (so_scored[]){{-1, 0}}, 1);
    assert_true(s.ended && s.n_done == 1 && s.n_live == 0);
    so_beam_deinit(&s);
    so_beam_init(&s, &r, 7);
    so_beam_cut(&s); /* before the first step: no result */
    assert_true(s.ended && s.n_done == 0);
    so_beam_deinit(&s);
    so_beam_init(&s, &r, 7);
    step(&s, (so_scored[]){{-1, 1}, {-2, 2}, {-3, 0}}, 3);
    so_beam_cut(&s);
    assert_true(s.ended && s.n_done == 2 && s.done[1].why == SO_BEAM_FULL);
    assert_true(s.done[0].score == -1 && s.done[1].score == -2);
    so_beam_deinit(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_literal), cmocka_unit_test(test_enumeration),
        cmocka_unit_test(test_width_1), cmocka_unit_test(test_ties),
        cmocka_unit_test(test_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* N-gram drafting: the worked examples of the description, and counts against naive counting. */
#include "rig.h"

#include <math.h>

#include "draft/counts.h"
#include "verify/verify.h"

enum { THE = 1, CAT, SAT, ON, MAT, DOT, RUG, DOWN, AND, QUICK, BROWN, FOX, JUMPS, JUMPED, OVER };

static void repeat(rig *r, const int32_t *tokens, int n, int times) {
    for (int i = 0; i < times; i++)
        rig_emit(r, tokens, n, true);
}
#define REPEAT(r, times, ...) \
    repeat(r, (int32_t[]){__VA_ARGS__}, (int)SO_LEN(((int32_t[]){__VA_ARGS__})), times)

/* ["the","cat","sat"] → "on" (47 of 51) → "the" (31) → "mat" (23) → "." (5). A running text cannot
 * contain "sat on the mat" without something after "on the mat", so the last step, where the
 * description falls back to ("the","mat"), is in the next test. */
static void trace(void **state) {
    (void)state;
    rig r;
    int filler = 100;
    rig_open(&r, so_ngram_create(NULL), (int32_t[]){99}, 1);
    for (int i = 0; i < 51; i++) {
        int32_t line[] = {THE, CAT, SAT, ON, THE, MAT, DOT, filler};
        if (i >= 5)
            line[6] = ++filler;
        if (i >= 23)
            line[5] = ++filler;
        if (i >= 31)
            line[4] = ++filler;
        if (i >= 47)
            line[3] = i < 50 ? DOWN : AND;
        line[7] = ++filler;
        rig_emit(&r, line, 8, true);
    }
    REPEAT(&r, 1, THE, CAT, SAT);
    int32_t out[8];
    int n = rig_chain(&r, 4, out);
    assert_tokens(out, n, (int32_t[]){ON, THE, MAT, DOT}, 4);
    /* 47 of 51, 31 of 47, 23 of 31, 5 of 23, and one more for unseen followers */
    const float want[] = {47.f / 52, 31.f / 48, 23.f / 32, 5.f / 24};
    for (int i = 0; i < 4; i++)
        assert_float_equal(r.tree.proposals[i].confidence, want[i], 1e-6);
    rig_close(&r);
}

/* 4-gram (on, the, mat): not found. 3-gram (the, mat): ".". After "." only a bigram is known. */
static void backs_off(void **state) {
    (void)state;
    rig r;
    int32_t out[8];
    rig_open(&r, so_ngram_create(NULL), (int32_t[]){99}, 1);
    for (int i = 0; i < 5; i++)
        REPEAT(&r, 1, 200 + i, THE, MAT, DOT, 300 + i);
    REPEAT(&r, 1, 400, DOT, AND, ON, THE, MAT);
    assert_tokens(out, rig_chain(&r, 1, out), (int32_t[]){DOT}, 1);
    assert_float_equal(r.tree.proposals[0].confidence, 5.f / 6 * 0.85f,
                       1e-6); /* a 3-gram's confidence */
    /* (the, mat, .) had five followers: the latest of equals */
    assert_tokens(out, rig_chain(&r, 2, out), (int32_t[]){DOT, 304}, 2);
    REPEAT(&r, 1, 500, DOT); /* (mat,500,.) and (500,.) are new, the latest follower of (.) is
                              * "and" */
    assert_tokens(out, rig_chain(&r, 1, out), (int32_t[]){AND}, 1);
    rig_close(&r);
}

/* What the model produces after each node of a chain. */
typedef struct verified {
    const so_tree *t;
    const int32_t *tokens;
} verified;

static int32_t model_token(void *user, int node) {
    const verified *v = user;
    return v->tokens[v->t->nodes[node].depth];
}

/* Drafts four tokens, compares them with the model's, and emits the accepted ones and one more. */
static void draft_and_verify(rig *r, const int32_t *draft, const int32_t *model_tokens,
                             int accepted) {
    int32_t out[8];
    so_verdict v;
    assert_tokens(out, rig_chain(r, 4, out), draft, 4);
    so_verify_match(&r->tree, model_token, &(verified){&r->tree, model_tokens}, &v);
    assert_int_equal(v.n_accepted, accepted);
    assert_int_equal(v.token, model_tokens[accepted]);
    rig_emit(r, model_tokens, accepted + 1, true);
}

/* The second worked example: 3 of 4 drafts accepted, 4 tokens from one pass. */
static void three_of_four_accepted(void **state) {
    (void)state;
    rig r;
    rig_open(&r, so_ngram_create(NULL),
             (int32_t[]){THE, QUICK, BROWN, FOX, JUMPS, OVER, 50, 51, 52, THE}, 10);
    draft_and_verify(&r, (int32_t[]){QUICK, BROWN, FOX, JUMPS},
                     (int32_t[]){QUICK, BROWN, FOX, JUMPED, OVER}, 3);
    assert_int_equal(r.n, 14);
    assert_int_equal(r.text[13], JUMPED);
    rig_close(&r);
}

/* The flow diagram: "on the mat" is drafted, the model produces "on the rug"; 3 tokens from one
 * pass, and the rejected guess is not counted. */
static void rejected_drafts_are_dropped(void **state) {
    (void)state;
    rig r;
    int32_t out[8];
    rig_open(&r, so_ngram_create(NULL), (int32_t[]){99, CAT, SAT, ON, THE, MAT, DOT, 98, CAT, SAT},
             10);
    draft_and_verify(&r, (int32_t[]){ON, THE, MAT, DOT}, (int32_t[]){ON, THE, RUG, DOT, AND}, 2);
    assert_int_equal(r.n, 13);
    REPEAT(&r, 1, DOT, CAT, SAT, ON, THE);
    assert_tokens(out, rig_chain(&r, 1, out), (int32_t[]){RUG}, 1); /* the latest of equals */
    rig_close(&r);
}

/* Σ_{k=1..D} α^k = α(1−α^D)/(1−α): 0.94, 1.77, 3.10 for D = 4, here by chains of real drafts. The
 * standard error with 20,000 rounds is below 0.011. */
static void expected_accepted(void **state) {
    (void)state;
    const double alpha[] = {0.5, 0.7, 0.9}, want[] = {0.94, 1.77, 3.10};
    for (int a = 0; a < 3; a++) {
        enum { ROUNDS = 20000 };
        dice d = {.seed = (uint64_t)(40 + a)};
        int accepted = 0;
        rig r;
        int32_t prompt[60], out[8];
        for (int i = 0; i < 60; i++)
            prompt[i] = 100 + i % 20; /* a loop: the drafter always has a guess */
        rig_open(&r, so_ngram_create(NULL), prompt, 60);
        for (int i = 0; i < ROUNDS; i++) {
            int n = rig_chain(&r, 4, out);
            assert_int_equal(n, 4);
            for (int k = 0; k < n && dice_uniform(&d) < alpha[a]; k++)
                accepted++;
        }
        assert_true(fabs((double)accepted / ROUNDS - want[a]) < 0.04);
        rig_close(&r);
    }
}

static void fnv_1a(void **state) {
    (void)state;
    /* one token: (basis ^ t) * prime, as in the description */
    assert_true(so_counts_hash((int32_t[]){7}, 1) ==
                (14695981039346656037u ^ 7) * (uint64_t)1099511628211u);
    assert_true(so_counts_hash((int32_t[]){7, 8}, 2) != so_counts_hash((int32_t[]){8, 7}, 2));
}

/* The most frequent follower, the latest of equals, over the n-grams of the window. */
static so_follow naive_find(const int32_t *text, int n, int window, int max_order,
                            const int32_t *ctx, int n_ctx) {
    for (int order = max_order; order >= 2; order--) {
        so_follow f = {.order = order};
        int latest = -1;
        if (n_ctx < order - 1)
            continue;
        for (int i = SO_MAX(order - 1, n - window); i < n; i++) {
            int count = 0, last = -1;
            if (memcmp(text + i - (order - 1), ctx + n_ctx - (order - 1),
                       (size_t)(order - 1) * sizeof *text) != 0)
                continue;
            f.total++;
            for (int k = SO_MAX(order - 1, n - window); k < n; k++)
                if (text[k] == text[i] && memcmp(text + k - (order - 1), text + i - (order - 1),
                                                 (size_t)(order - 1) * sizeof *text) == 0)
                    count++, last = k;
            if (count > f.best_count || (count == f.best_count && last > latest))
                f.best = text[i], f.best_count = count, latest = last;
        }
        if (f.total > 0)
            return f;
    }
    return (so_follow){0};
}

static bool sum_visit(void *user, int32_t token, int32_t count) {
    (void)token;
    *(int *)user += count;
    return true;
}

static void equals_naive_counting(void **state) {
    (void)state;
    enum { N = 250 };
    dice d = {.seed = 21};
    for (int round = 0; round < 60; round++) {
        int32_t text[N];
        int alphabet = 1 + dice_below(&d, 6), window = 1 + dice_below(&d, 120);
        int max_order = 2 + dice_below(&d, 3);
        so_counts *c = NULL;
        so_err err = {0};
        SO_OK_OR_FAIL(so_counts_create(max_order, window, &c, &err), err);
        for (int i = 0; i < N; i++) {
            text[i] = dice_below(&d, alphabet);
            so_counts_add(c, text[i]);
            if (dice_below(&d, 4))
                continue;
            int32_t ctx[3] = {dice_below(&d, alphabet + 1), dice_below(&d, alphabet),
                              dice_below(&d, alphabet)};
            int n_ctx = 1 + dice_below(&d, 3);
            so_follow got = so_counts_find(c, ctx, n_ctx);
            so_follow want = naive_find(text, i + 1, window, max_order, ctx, n_ctx);
            assert_int_equal(got.order, want.order);
            if (!want.order)
                continue;
            assert_int_equal(got.best, want.best);
            assert_int_equal(got.best_count, want.best_count);
            assert_int_equal(got.total, want.total);
            int sum = 0;
            so_counts_each(c, got.id, sum_visit, &sum);
            assert_int_equal(sum, want.total);
        }
        so_counts_free(c);
    }
}

/* A million tokens through a window of a thousand: the pools neither grow nor run out. */
static void window_bounds_memory(void **state) {
    (void)state;
    so_counts *c = NULL;
    so_err err = {0};
    SO_OK_OR_FAIL(so_counts_create(4, 1000, &c, &err), err);
    dice d = {.seed = 22};
    for (int i = 0; i < 1000000; i++)
        so_counts_add(c, dice_below(&d, 50000));
    so_counts_free(c);
}

static void only_accepted_tokens_count(void **state) {
    (void)state;
    rig r;
    int32_t out[8];
    rig_open(&r, so_ngram_create(NULL), (int32_t[]){1, 2, 3, 1, 2}, 5);
    for (int i = 0; i < 10; i++) /* repeated drafting changes nothing */
        assert_tokens(out, rig_chain(&r, 3, out), (int32_t[]){3, 1, 2}, 3);
    rig_emit(&r, (int32_t[]){4, 1, 2, 4, 1, 2}, 6, false); /* the next draft catches up */
    assert_tokens(out, rig_chain(&r, 3, out), (int32_t[]){4, 1, 2}, 3);
    rig_close(&r);
}

static void nothing_known_nothing_proposed(void **state) {
    (void)state;
    rig r;
    int32_t out[8];
    rig_open(&r, so_ngram_create(NULL), (int32_t[]){1, 2, 3}, 3);
    assert_int_equal(rig_chain(&r, 4, out), 0);
    rig_close(&r);
}

/* Sampled from the counts: the row is the distribution, and the samples follow it. Chi-square with
 * 2 degrees of freedom stays below 13.8 in 999 of 1000 runs; the seed is fixed. */
static void draws_follow_the_row(void **state) {
    (void)state;
    enum { DRAWS = 30000 };
    rig r;
    int hits[3] = {0};
    rig_open(&r, so_ngram_create(&(so_ngram_params){.draw = true}), (int32_t[]){900}, 1);
    REPEAT(&r, 6, 1, 2, 3, 10);
    REPEAT(&r, 3, 1, 2, 3, 11);
    REPEAT(&r, 1, 1, 2, 3, 12);
    REPEAT(&r, 1, 1, 2, 3);
    r.temp = 1;
    for (int i = 0; i < DRAWS; i++) {
        int32_t out[8];
        assert_int_equal(rig_chain(&r, 1, out), 1);
        assert_in_range(out[0], 10, 12);
        hits[out[0] - 10]++;
        const so_proposal *q = &r.tree.proposals[0];
        assert_int_equal(q->kind, SO_Q_ROW);
        const float *row = so_tree_row(&r.tree, q->row);
        double sum = 0;
        for (int t = 0; t < RIG_VOCAB; t++)
            sum += (double)row[t];
        assert_true(fabs(sum - 1) < 1e-6);
        assert_true(row[10] == 0.6f && row[11] == 0.3f && row[12] == 0.1f);
    }
    const double p[3] = {0.6, 0.3, 0.1};
    double chi2 = 0;
    for (int i = 0; i < 3; i++)
        chi2 += pow(hits[i] - p[i] * DRAWS, 2) / (p[i] * DRAWS);
    assert_true(chi2 < 13.8);
    /* greedy requests get the argmax, as a point */
    r.temp = 0;
    int32_t out[8];
    rig_chain(&r, 1, out);
    assert_int_equal(out[0], 10);
    assert_int_equal(r.tree.proposals[0].kind, SO_Q_POINT);
    rig_close(&r);
}

static void draws_are_keyed(void **state) {
    (void)state;
    rig r;
    int32_t a[8], b[8], c[8];
    dice d = {.seed = 31};
    int32_t prompt[400];
    for (int i = 0; i < 400; i++)
        prompt[i] = dice_below(&d, 4);
    rig_open(&r, so_ngram_create(&(so_ngram_params){.draw = true}), prompt, 400);
    r.temp = 1;
    r.round = 5;
    int n = rig_chain(&r, 8, a);
    r.round = 5;
    assert_tokens(b, rig_chain(&r, 8, b), a, n); /* same round, same samples */
    int differ = 0;
    for (int i = 0; i < 20; i++) {
        int m = rig_chain(&r, 8, c);
        differ += m != n || memcmp(a, c, (size_t)n * sizeof *a) != 0;
    }
    assert_true(differ > 10);
    rig_close(&r);
}

static void bad_parameters(void **state) {
    (void)state;
    so_counts *c = NULL;
    so_err err = {0};
    assert_int_equal(so_counts_create(5, 10, &c, &err), SO_ERANGE);
    assert_int_equal(so_counts_create(1, 10, &c, &err), SO_ERANGE);
    assert_int_equal(so_counts_create(4, 0, &c, &err), SO_ERANGE);
    assert_int_equal(so_counts_create(4, INT32_MAX, &c, &err), SO_ERANGE);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(trace),
        cmocka_unit_test(backs_off),
        cmocka_unit_test(three_of_four_accepted),
        cmocka_unit_test(rejected_drafts_are_dropped),
        cmocka_unit_test(expected_accepted),
        cmocka_unit_test(fnv_1a),
        cmocka_unit_test(equals_naive_counting),
        cmocka_unit_test(window_bounds_memory),
        cmocka_unit_test(only_accepted_tokens_count),
        cmocka_unit_test(nothing_known_nothing_proposed),
        cmocka_unit_test(draws_follow_the_row),
        cmocka_unit_test(draws_are_keyed),
        cmocka_unit_test(bad_parameters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

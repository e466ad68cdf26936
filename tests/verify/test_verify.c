/* Verification function by function: the contents of a verdict, the calls to the random source, and
 * edge cases of rounding and bad input. Distributions are tested by the lossless suite. */
#include "so_test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/cpu.h"
#include "base/mem.h"
#include "verify/sums.h"
#include "verify/verify.h"

enum { V = 4 };

static so_tree tree;

static int setup(void **state) {
    (void)state;
    so_tree_init(&tree, V, 8);
    return 0;
}
static int teardown(void **state) {
    (void)state;
    so_tree_deinit(&tree);
    return 0;
}

static int add(int parent, int32_t token) {
    return so_tree_add(&tree, parent, token, SO_Q_POINT, -1, 0, 0.5f);
}

static int add_row(int parent, int32_t token, so_q_kind kind, const float *q) {
    int row = so_tree_new_row(&tree);
    memcpy(so_tree_row(&tree, row), q, V * sizeof *q);
    return so_tree_add(&tree, parent, token, kind, row, 0, 0.5f);
}

static void assert_path(const so_verdict *v, int n, const int *nodes) {
    assert_int_equal(v->n_accepted, n);
    for (int i = 0; i < n; i++)
        assert_int_equal(v->path[i], nodes[i]);
}

/* --- match --- */

typedef struct script {
    int32_t token[SO_TREE_MAX]; /* by node */
    int asked[16], n_asked;
} script;

static int32_t scripted(void *user, int node) {
    script *s = user;
    s->asked[s->n_asked++] = node;
    return s->token[node];
}

static void test_match_chain(void **state) {
    (void)state;
    so_verdict v;
    so_tree_reset(&tree, 0, 10);
    add(add(add(0, 1), 2), 3);
    script all = {.token = {1, 2, 3, 0}};
    so_verify_match(&tree, scripted, &all, &v);
    assert_path(&v, 3, (int[]){1, 2, 3});
    assert_int_equal(v.token, 0);
    assert_true(v.bonus);
    assert_int_equal(v.n_tested, 3);
    assert_int_equal(all.n_asked, 4);

    script second = {.token = {1, 0, 3, 0}};
    so_verify_match(&tree, scripted, &second, &v);
    assert_path(&v, 1, (int[]){1});
    assert_int_equal(v.token, 0);
    assert_false(v.bonus);
    assert_int_equal(v.n_tested, 2);
    assert_int_equal(second.n_asked, 2); /* nothing after the first difference is examined */

    so_tree_reset(&tree, 0, 10);
    script none = {.token = {3}};
    so_verify_match(&tree, scripted, &none, &v);
    assert_path(&v, 0, NULL);
    assert_int_equal(v.token, 3);
    assert_true(v.bonus);
    assert_int_equal(v.n_tested, 0);
}

/* The example of Stratos, section 2.1: contexts c, d under b; e, f under c; g, h under d. */
static void test_match_tree(void **state) {
    (void)state;
    so_verdict v;
    so_tree_reset(&tree, 0, 0);
    int c = add(0, 1), e = add(c, 2), f = add(c, 3), d = add(0, 2), g = add(d, 0), h = add(d, 1);
    script s = {.token = {0}};
    s.token[0] = 2; /* d */
    s.token[d] = 1; /* h */
    s.token[h] = 3;
    s.token[c] = 2;
    so_verify_match(&tree, scripted, &s, &v);
    assert_path(&v, 2, (int[]){d, h});
    assert_int_equal(v.token, 3);
    assert_true(v.bonus);
    assert_int_equal(v.n_tested, 4); /* c, d, g, h */
    assert_int_equal(tree.proposals[v.tested[3]].child, h);
    (void)e;
    (void)f;
    (void)g;
}

static void test_match_merged(void **state) {
    (void)state;
    so_verdict v;
    so_tree_reset(&tree, 0, 0);
    int a = add(0, 1);
    assert_int_equal(add(0, 1), a);
    int b = add(a, 2);
    script s = {.token = {1, 2, 0}};
    so_verify_match(&tree, scripted, &s, &v);
    assert_path(&v, 2, (int[]){a, b});
    assert_int_equal(v.n_tested, 2); /* the second proposal of a is not tested */
}

/* --- lenient at temperature 0 --- */

static const float *same_row(void *user, int node) {
    (void)node;
    return user;
}

static void test_lenient_greedy(void **state) {
    (void)state;
    so_verdict v;
    float z[V] = {1, 3, 2, -INFINITY}; /* against the best: e^-2 = 0.135, 1, e^-1 = 0.368, 0 */
    so_tree_reset(&tree, 0, 0);
    int a = add(0, 0);
    add(a, 2);
    so_verify_lenient_greedy(&tree, same_row, z, 0.1, &v);
    assert_int_equal(v.n_accepted, 2);
    assert_int_equal(v.token, 1);
    assert_true(v.bonus);
    so_verify_lenient_greedy(&tree, same_row, z, 0.13, &v);
    assert_int_equal(v.n_accepted, 2);
    so_verify_lenient_greedy(&tree, same_row, z, 0.14, &v);
    assert_int_equal(v.n_accepted, 0);
    assert_int_equal(v.token, 1);
    assert_false(v.bonus);

    so_tree_reset(&tree, 0, 0);
    add(0, 3); /* p = 0 is never accepted */
    so_verify_lenient_greedy(&tree, same_row, z, 1e-300, &v);
    assert_int_equal(v.n_accepted, 0);
}

/* --- typical --- */

static int32_t choose_three(void *user, int node) {
    (void)user;
    (void)node;
    return 3;
}

/* p is (0.5, 0.3, 0.2, 0): H = 1.03 nats, e^-H = 0.357. With E = 0.25 a guess needs min(0.25, 0.179). */
static void test_typical(void **state) {
    (void)state;
    so_verdict v;
    float p[V] = {5, 3, 2, 0}; /* any sum */
    so_tree_reset(&tree, 0, 0);
    int a = add(0, 2), b = add(0, 1), c = add(b, 0), d = add(b, 1);
    add(d, 3); /* p = 0 */
    so_verify_typical(&tree, same_row, choose_three, p, 0.25, &v);
    assert_path(&v, 2, (int[]){b, c}); /* the longest path, and of two the likelier */
    assert_true(v.bonus && v.token == 3);
    assert_int_equal(v.n_tested, 3); /* both guesses at the root, one below b */
    so_verify_typical(&tree, same_row, choose_three, p, 0.36, &v); /* needs 0.214: 2 is refused */
    assert_path(&v, 2, (int[]){b, c});
    so_verify_typical(&tree, same_row, choose_three, p, 1, &v); /* needs 0.357: only 0 passes */
    assert_int_equal(v.n_accepted, 0);
    assert_false(v.bonus);
    assert_int_equal(v.n_tested, 2);
    so_tree_reset(&tree, 0, 0);
    a = add(0, 2);
    so_verify_typical(&tree, same_row, choose_three, p, 0.25, &v);
    assert_path(&v, 1, (int[]){a});
    so_verify_typical(&tree, same_row, choose_three, p, 0.36, &v);
    assert_int_equal(v.n_accepted, 0);
    float certain[V] = {1e6f, 1, 0, 0}; /* H near 0: the threshold itself */
    so_tree_reset(&tree, 0, 0);
    add(0, 1);
    so_verify_typical(&tree, same_row, choose_three, certain, 1e-3, &v);
    assert_int_equal(v.n_accepted, 0);
    so_tree_reset(&tree, 0, 0);
    add(0, 3);
    so_verify_typical(&tree, same_row, choose_three, p, 1e-300, &v);
    assert_int_equal(v.n_accepted, 0); /* p = 0 is never accepted */
}

static void test_lenient_greedy_takes_the_likeliest(void **state) {
    (void)state;
    so_verdict v;
    float z[V] = {2, 3, 2, 0};
    so_tree_reset(&tree, 0, 0);
    add(0, 3);
    int c = add(0, 2), a = add(0, 0);
    so_verify_lenient_greedy(&tree, same_row, z, 0.01, &v);
    assert_path(&v, 1, (int[]){a}); /* 0 and 2 tie: the lower id */
    int b = add(0, 1);
    so_verify_lenient_greedy(&tree, same_row, z, 0.01, &v);
    assert_path(&v, 1, (int[]){b}); /* the argmax, if it was proposed */
    (void)c;
}

/* Lenience 1 is greedy: another token with the same logit is not the argmax. */
static void test_lenient_greedy_one(void **state) {
    (void)state;
    so_verdict v;
    float z[V] = {0, 3, 3, 0};
    so_tree_reset(&tree, 0, 0);
    add(0, 2);
    so_verify_lenient_greedy(&tree, same_row, z, 1, &v);
    assert_int_equal(v.n_accepted, 0);
    assert_int_equal(v.token, 1);
    so_verify_lenient_greedy(&tree, same_row, z, 0.999, &v);
    assert_int_equal(v.n_accepted, 1);
}

/* --- reject: calls to the random source --- */

typedef struct recorder {
    so_verify_rng base;
    bool answer[8]; /* answers to the tests, in order */
    int n_tests, n_draws;
    uint32_t position[8], index[8], draw_position;
    double p[8], q[8], weight[V], total;
} recorder;

static bool record_accept(so_verify_rng *c, uint32_t position, uint32_t index, double p, double q) {
    recorder *r = (recorder *)c;
    r->position[r->n_tests] = position;
    r->index[r->n_tests] = index;
    r->p[r->n_tests] = p;
    r->q[r->n_tests] = q;
    return r->answer[r->n_tests++];
}

static int32_t record_draw(so_verify_rng *c, uint32_t position, const double *w, int n,
                           double total) {
    recorder *r = (recorder *)c;
    r->n_draws++;
    r->draw_position = position;
    memcpy(r->weight, w, (size_t)n * sizeof *w);
    r->total = total;
    int32_t best = 0;
    for (int i = 1; i < n; i++)
        best = w[i] > w[best] ? i : best;
    return best;
}

static const so_verify_rng RECORD = {.accept = record_accept, .draw = record_draw};

static void near(double a, double b) {
    if (!(fabs(a - b) < 1e-12))
        fail_msg("%.17g is not %.17g", a, b);
}

static void test_reject_calls(void **state) {
    (void)state;
    so_verdict v;
    double scratch[2 * V];
    float p[V] = {0.5f, 0.25f, 0.125f, 0.125f}, q[V] = {0.25f, 0.5f, 0.25f, 0};
    so_tree_reset(&tree, 0, 20);
    int a = add_row(0, 0, SO_Q_ROW, q);
    int b = add_row(a, 1, SO_Q_ROW, q); /* rejected */
    int c = add(a, 3);                  /* then a point mass, rejected */
    recorder r = {.base = RECORD, .answer = {true, false, false}};
    so_verify_reject(&tree, same_row, p, &r.base, 1, scratch, &v);
    assert_path(&v, 1, (int[]){a});
    assert_int_equal(v.n_tested, 3);
    assert_false(v.bonus);
    assert_int_equal(r.position[0], 21);
    assert_int_equal(r.index[0], 0);
    near(r.p[0], 0.5);
    near(r.q[0], 0.25);
    assert_int_equal(r.position[1], 22);
    assert_int_equal(r.index[1], 0);
    assert_int_equal(r.position[2], 22);
    assert_int_equal(r.index[2], 1);
    /* p − q = 1/4, 0, 0, 1/8: mass 3/8, so the point mass has 1/3; without it only token 0
     * remains. */
    near(r.p[2], 1.0 / 3);
    near(r.q[2], 1);
    assert_int_equal(r.draw_position, 22);
    near(r.weight[0] / r.total, 1);
    near(r.weight[3], 0);
    assert_int_equal(v.token, 0);
    (void)b;
    (void)c;
}

/* The second draw without replacement comes from q without the first token. */
static void test_reject_without_replacement(void **state) {
    (void)state;
    so_verdict v;
    double scratch[2 * V];
    float p[V] = {0.25f, 0.25f, 0.25f, 0.25f}, q[V] = {0.5f, 0.25f, 0.125f, 0.125f};
    so_tree_reset(&tree, 0, 0);
    int row = so_tree_new_row(&tree);
    memcpy(so_tree_row(&tree, row), q, sizeof q);
    so_tree_add(&tree, 0, 0, SO_Q_ROW_SET, row, 0, 0.5f);
    so_tree_add(&tree, 0, 1, SO_Q_ROW, row, 0, 0.5f); /* independent of the set */
    add_row(0, 1, SO_Q_ROW_SET, q);                   /* another row: a separate set */
    so_tree_add(&tree, 0, 2, SO_Q_ROW_SET, row, 0, 0.5f);
    recorder r = {.base = RECORD};
    so_verify_reject(&tree, same_row, p, &r.base, 1, scratch, &v);
    near(r.q[0], 0.5);
    near(r.q[1], 0.25);
    near(r.q[2], 0.25);
    near(r.q[3], 0.25); /* 1/8 of the remaining half */
    assert_int_equal(v.n_tested, 4);
}

static void test_reject_lenience(void **state) {
    (void)state;
    so_verdict v;
    double scratch[2 * V];
    float p[V] = {0.5f, 0.25f, 0.125f, 0.125f}, q[V] = {0.25f, 0.5f, 0.25f, 0};
    so_tree_reset(&tree, 0, 0);
    add_row(0, 1, SO_Q_ROW, q);
    recorder r = {.base = RECORD};
    so_verify_reject(&tree, same_row, p, &r.base, 0.25, scratch, &v);
    near(r.q[0], 0.125);
    near(r.weight[0] / r.total, 2.0 / 3); /* same residual as in the exact form */
    near(r.weight[3] / r.total, 1.0 / 3);
}

/* --- reject: rounding --- */

/* An impossible rejection, forced: r keeps its value, and a token of p is emitted. */
static void test_no_mass_left(void **state) {
    (void)state;
    so_verdict v;
    double scratch[2 * V];
    float p[V] = {0.1f, 0.2f, 0.3f, 0.4f}, one[V] = {0, 0, 1, 0};
    so_tree_reset(&tree, 0, 0);
    add_row(0, 1, SO_Q_ROW, p);
    recorder r = {.base = RECORD};
    so_verify_reject(&tree, same_row, p, &r.base, 1, scratch, &v);
    for (int i = 0; i < V; i++)
        near(r.weight[i], (double)p[i]);

    so_tree_reset(&tree, 0, 0);
    add(0, 2);
    r = (recorder){.base = RECORD};
    so_verify_reject(&tree, same_row, one, &r.base, 1, scratch, &v);
    assert_int_equal(v.token, 2);
    near(r.total, 1);

    /* Point masses that remove p token by token leave the last one. */
    so_tree_reset(&tree, 0, 0);
    for (int i = 0; i < V; i++)
        add(0, i);
    r = (recorder){.base = RECORD};
    so_verify_reject(&tree, same_row, p, &r.base, 1, scratch, &v);
    assert_int_equal(v.token, 3);
    near(r.p[3], 1);
}

/* p need not sum to 1, and an entry that is not a weight is never emitted. */
static void test_odd_p(void **state) {
    (void)state;
    so_verdict v;
    double scratch[2 * V];
    float p[V] = {(float)NAN, 3, -1, 1};
    so_tree_reset(&tree, 0, 0);
    add(0, 0);
    add(0, 2);
    for (uint64_t seed = 0; seed < 1000; seed++) {
        so_verify_rng_keyed c;
        so_verify_rng_keyed_init(&c, seed, 0);
        so_verify_reject(&tree, same_row, p, &c.base, 1, scratch, &v);
        assert_int_equal(v.n_accepted, 0);
        assert_true(v.token == 1 || v.token == 3);
    }
}

/* A guess with p = 0 is never emitted, whatever its confidence, and the residual is then all of p,
 * since q covers none of it. */
static void test_q_where_p_is_zero(void **state) {
    (void)state;
    so_verdict v;
    double scratch[2 * V];
    const float p[V] = {0.5f, 0, 0.5f, 0}, point[V] = {0, 1, 0, 0}, both[V] = {0, 0.5f, 0, 0.5f};
    static const double leniences[] = {1, 0.1, 1e-300};
    for (size_t l = 0; l < SO_LEN(leniences); l++)
        for (uint64_t seed = 0; seed < 300; seed++) {
            so_verify_rng_keyed c;
            so_verify_rng_keyed_init(&c, seed, 0);
            so_tree_reset(&tree, 0, 0);
            add_row(0, 1, SO_Q_ROW, point);
            add_row(0, 3, SO_Q_ROW_SET, both);
            add(0, 1);
            so_verify_reject(&tree, same_row, (void *)(uintptr_t)p, &c.base, leniences[l], scratch,
                             &v);
            assert_int_equal(v.n_accepted, 0);
            assert_int_equal(v.n_tested, 3);
            assert_true(v.token == 0 || v.token == 2);
        }
    so_tree_reset(&tree, 0, 0);
    add_row(0, 1, SO_Q_ROW, point);
    recorder r = {.base = RECORD};
    so_verify_reject(&tree, same_row, (void *)(uintptr_t)p, &r.base, 1, scratch, &v);
    for (int i = 0; i < V; i++)
        near(r.weight[i] / r.total, (double)p[i]);
}

/* Rows with any sum are weights: the same test and the same residual. */
static void test_q_of_any_sum(void **state) {
    (void)state;
    const float p[V] = {0.1f, 0.2f, 0.3f, 0.4f}, q[V] = {0.4f, 0.3f, 0.2f, 0.1f};
    static const float sums[] = {1, 0.5f, 7, 1e-20f, 1e20f};
    double scratch[2 * V], want[V], accept = 0;
    so_verdict v;
    for (size_t k = 0; k < SO_LEN(sums); k++) {
        float row[V];
        for (int i = 0; i < V; i++)
            row[i] = q[i] * sums[k];
        so_tree_reset(&tree, 0, 0);
        add_row(0, 0, SO_Q_ROW, row);
        recorder r = {.base = RECORD};
        so_verify_reject(&tree, same_row, (void *)(uintptr_t)p, &r.base, 1, scratch, &v);
        for (int i = 0; i < V; i++) {
            if (k == 0)
                want[i] = r.weight[i] / r.total;
            assert_true(fabs(r.weight[i] / r.total - want[i]) < 1e-6);
        }
        double ratio = r.p[0] / r.q[0];
        accept = k == 0 ? ratio : accept;
        assert_true(fabs(ratio - accept) < 1e-6 && fabs(ratio - 0.25) < 1e-6);
    }
}

/* With the target as its own draft model every guess is accepted, at every depth and seed. */
static void test_own_draft(void **state) {
    (void)state;
    so_verdict v;
    double scratch[2 * V];
    float p[V] = {0.3f, 0.1f, 0.2f, 0.4f};
    for (uint64_t seed = 0; seed < 1000; seed++) {
        so_verify_rng_keyed c;
        so_verify_rng_keyed_init(&c, seed, 0);
        so_tree_reset(&tree, 0, 0);
        for (int k = 0, node = 0; k < 8; k++)
            node = add_row(node, (int32_t)((seed >> k) % V), SO_Q_ROW, p);
        so_verify_reject(&tree, same_row, p, &c.base, 1, scratch, &v);
        assert_int_equal(v.n_accepted, 8);
        assert_true(v.bonus);
    }
}

/* --- rows of many tokens --- */

enum { LONG = 1500, N_LEVELS = 3 };

static const int lengths[] = {1, 7, 63, 64, 65, 128, 129, 1024, LONG};

static float level_of(uint64_t seed, int i) {
    so_rng_key key = {.seed = seed, .purpose = SO_RNG_TEST};
    double u = so_rng_uniform(&key, (uint32_t)i);
    return (float)(i % 5 == 3 ? 0 : exp(-12 * u));
}

static int list_levels(const so_sums_fns *out[N_LEVELS]) {
    int n = 0;
    out[n++] = &so_sums_scalar;
#if defined(__x86_64__)
    if (so_cpu_level_usable(SO_CPU_AVX2))
        out[n++] = &so_sums_avx2;
    if (so_cpu_level_usable(SO_CPU_AVX512))
        out[n++] = &so_sums_avx512;
#endif
    return n;
}

static void test_a_forced_level_is_used(void **state) {
    (void)state;
    const so_sums_fns *levels[N_LEVELS];
    int n_levels = list_levels(levels);
    assert_ptr_equal(so_sums(), levels[n_levels - 1]); /* the best */
    so_cpu_level_set(SO_CPU_SCALAR);
    assert_ptr_equal(so_sums(), &so_sums_scalar);
#if defined(__x86_64__)
    if (so_cpu_level_usable(SO_CPU_AVX2)) {
        so_cpu_level_set(SO_CPU_AVX2);
        assert_ptr_equal(so_sums(), &so_sums_avx2);
    }
#endif
    so_cpu_level_set(SO_CPU_AUTO);
    assert_ptr_equal(so_sums(), levels[n_levels - 1]);
}

static double join(const double s[8]) {
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

/* Lane by lane, as sums.h states it. */
static double sum_of_parts(const double *w, int n, double *parts) {
    double s[8] = {0};
    int i = 0;
    for (; i + SO_SUMS_PART <= n; i += SO_SUMS_PART) {
        double part[8] = {0};
        for (int k = 0; k < SO_SUMS_PART; k++)
            part[k % 8] += w[i + k];
        for (int k = 0; k < 8; k++)
            s[k] += part[k];
        parts[i / SO_SUMS_PART] = join(part);
    }
    for (; i < n; i++)
        s[0] += w[i];
    return join(s);
}

static double sum_of_32_lanes(const double *w, int n) {
    double s[32] = {0}, t[8];
    int whole = n / 32 * 32;
    for (int i = 0; i < n; i++)
        s[i < whole ? i % 32 : 0] += w[i];
    for (int i = 0; i < 8; i++)
        t[i] = (s[i] + s[8 + i]) + (s[16 + i] + s[24 + i]);
    return join(t);
}

static void test_sums_of_all_levels(void **state) {
    (void)state;
    const so_sums_fns *levels[N_LEVELS];
    int n_levels = list_levels(levels);
    float p[LONG], q[LONG];
    double w[LONG], r[LONG], parts[LONG], expected[LONG];
    for (size_t k = 0; k < SO_LEN(lengths) * 4; k++) {
        int n = lengths[k / 4];
        so_residual residual = {p, q, 0.3 + (double)k};
        for (int i = 0; i < n; i++) {
            p[i] = i % 97 == 13 ? (k % 2 ? (float)NAN : -1) : level_of(k, i);
            q[i] = level_of(k + 100, i);
            w[i] = p[i] >= 0 ? (double)p[i] : 0.25;
            r[i] = fmax(0, (p[i] >= 0 ? (double)p[i] : 0) - residual.scale * (double)q[i]);
            assert_true(so_residual_at(&residual, i) == r[i]);
        }
        for (int l = 0; l < n_levels; l++) {
            assert_true(levels[l]->mass(p, n, 0.25f) == sum_of_32_lanes(w, n));
            assert_true(levels[l]->residual(&residual, n, parts) == sum_of_parts(r, n, expected));
            for (int i = 0; i < n / SO_SUMS_PART; i++)
                assert_true(parts[i] == expected[i]);
        }
    }
}

/* Sampling by parts, without writing r, gives the same token as sampling from the written r. */
static void test_residual_by_parts_or_written(void **state) {
    (void)state;
    static double scratch[2 * LONG];
    float p[LONG];
    int n_rejected = 0;
    for (size_t k = 0; k < SO_LEN(lengths) * 200; k++) {
        int n = lengths[k / 200];
        so_tree t;
        so_tree_init(&t, n, 1);
        so_tree_reset(&t, 0, (int)k);
        float *q = so_tree_row(&t, so_tree_new_row(&t));
        for (int i = 0; i < n; i++) {
            /* also rows with the whole residual after the last whole part, or before it */
            bool p_above_q = k % 3 == 0 || (k % 3 == 1 ? i >= n / 64 * 64 : i < 40);
            q[i] = level_of(k, i + 1);
            p[i] = p_above_q ? level_of(k + 7, i) + 1e-6f : q[i] * 0.01f;
        }
        int n_siblings = 1 + (int)(k / 7) % 4; /* of one row, with and without replacement */
        for (int j = 0; j < n_siblings && j < n; j++) {
            int32_t x = (int32_t)(k * 31 + 3 * (size_t)j) % n;
            q[x] += 0.1f;
            p[x] = k % 4 ? 0 : p[x];
            p[(x + 1) % n] += 1e-3f;
            if (so_tree_child(&t, 0, x) < 0 || k % 5)
                so_tree_add(&t, 0, x, k % 5 ? SO_Q_ROW : SO_Q_ROW_SET, 0, 0, 0.5f);
        }
        so_verdict v[2];
        for (int written = 0; written < 2; written++) {
            so_verify_rng_keyed c;
            so_verify_rng_keyed_init(&c, k, 0);
            c.base.uniform = written ? NULL : c.base.uniform;
            so_verify_reject(&t, same_row, p, &c.base, 1, scratch, &v[written]);
        }
        assert_int_equal(v[0].n_accepted, v[1].n_accepted);
        assert_int_equal(v[0].token, v[1].token);
        n_rejected += v[0].n_accepted == 0;
        so_tree_deinit(&t);
    }
    assert_true(n_rejected > 1000);
}

/* --- acceptance by a lower bound --- */

typedef struct bounded {
    so_verify_rng_keyed keyed; /* must be first */
    const so_tree *t;
    const float *p;
    double factor; /* of the probability */
    int n_rows;    /* rows that were asked for */
} bounded;

static const float *counted_row(void *user, int node) {
    (void)node;
    ((bounded *)user)->n_rows++;
    return ((bounded *)user)->p;
}

static double bound_of(so_verify_rng *c, int node) {
    const bounded *b = (const bounded *)c;
    int32_t x = b->t->nodes[b->t->proposals[b->t->nodes[node].first].child].token;
    return (double)b->p[x] / so_sums()->mass(b->p, b->t->n_vocab, 0) * b->factor;
}

/* A bound changes no verdict, however low it is; a tight one saves the row of every acceptance. */
static void test_first_at_least(void **state) {
    (void)state;
    static const double factors[] = {0, 0.3, 1 - 1e-7};
    static double scratch[2 * LONG];
    float p[LONG];
    int n_rows[3] = {0}, n_accepted = 0;
    for (int k = 0; k < 600; k++) {
        int n = lengths[2 + k % 6];
        so_tree t;
        so_tree_init(&t, n, 8);
        so_tree_reset(&t, 0, k);
        for (int i = 0; i < n; i++)
            p[i] = level_of((uint64_t)k, i) + 1e-6f;
        for (int depth = 0, node = 0; depth < 4; depth++) {
            so_q_kind kind = (k + depth) % 3 ? SO_Q_ROW : SO_Q_POINT;
            int row = kind == SO_Q_ROW ? so_tree_new_row(&t) : -1;
            for (int i = 0; i < n && row >= 0; i++)
                so_tree_row(&t, row)[i] = p[i] * (1 + 0.5f * level_of((uint64_t)k + 9, i));
            int child = so_tree_add(&t, node, (k * 7 + depth) % n, kind, row, 0, 0.5f);
            if (k % 2)
                so_tree_add(&t, node, (k * 5 + depth + 1) % n, SO_Q_POINT, -1, 0, 0.5f);
            node = child;
        }
        so_verdict v[3];
        for (int f = 0; f < 3; f++) {
            bounded b = {.t = &t, .p = p, .factor = factors[f]};
            memset(&v[f], 0, sizeof v[f]);
            so_verify_rng_keyed_init(&b.keyed, (uint64_t)k, 0);
            b.keyed.base.first_at_least = bound_of;
            so_verify_reject(&t, counted_row, &b, &b.keyed.base, k % 5 ? 1 : 0.5, scratch, &v[f]);
            assert_memory_equal(&v[f], &v[0], sizeof v[f]);
            n_rows[f] += b.n_rows;
        }
        n_accepted += v[0].n_accepted;
        so_tree_deinit(&t);
    }
    assert_true(n_accepted > 300);
    assert_true(n_rows[1] < n_rows[0] && n_rows[2] < n_rows[1]);
}

/* --- the keyed source --- */

static void test_keyed(void **state) {
    (void)state;
    so_verify_rng_keyed a, b, other;
    so_verify_rng_keyed_init(&a, 7, 0);
    so_verify_rng_keyed_init(&b, 7, 0);
    so_verify_rng_keyed_init(&other, 7, 1);
    double w[V] = {0, 2, 0, 6};
    int threes = 0, accepted = 0, differ = 0;
    const int n = 100000;
    for (uint32_t i = 0; i < (uint32_t)n; i++) {
        int32_t x = a.base.draw(&a.base, i, w, V, 8);
        assert_true(x == 1 || x == 3);
        assert_int_equal(b.base.draw(&b.base, i, w, V, 8), x); /* does not depend on call order */
        differ += other.base.draw(&other.base, i, w, V, 8) != x;
        threes += x == 3;
        accepted += a.base.accept(&a.base, i, 3, 0.1, 0.4);
        assert_false(a.base.accept(&a.base, i, 0, 0, 1e-300));
        assert_true(a.base.accept(&a.base, i, 0, 0.3, 0.3));
    }
    assert_true(abs(threes - 75000) < 700); /* five standard deviations are 685 */
    assert_true(abs(accepted - 25000) < 700);
    assert_true(differ > 30000);
}

/* With more weights than one part: each index is drawn in proportion to its weight. */
static void test_keyed_long(void **state) {
    (void)state;
    enum { N = 333, DRAWS = 200000 };
    static double w[N], total;
    static int counts[N];
    so_verify_rng_keyed c;
    so_verify_rng_keyed_init(&c, 11, 0);
    for (int i = 0; i < N; i++)
        total += w[i] = i % 5 == 2 || (i >= 64 && i < 192) ? 0 : 1 + i % 7;
    for (uint32_t i = 0; i < DRAWS; i++)
        counts[c.base.draw(&c.base, i, w, N, total)]++;
    for (int i = 0; i < N; i++) {
        double want = w[i] / total * DRAWS;
        assert_true(want > 0 ? fabs(counts[i] - want) < 6 * sqrt(want) : counts[i] == 0);
    }
}

/* With a total above the sum, as rounding may leave it, a token of positive weight is still
 * drawn. */
static void test_keyed_short_sum(void **state) {
    (void)state;
    so_verify_rng_keyed c;
    so_verify_rng_keyed_init(&c, 1, 0);
    double w[V] = {1, 1, 0, 0};
    for (uint32_t i = 0; i < 1000; i++)
        assert_true(c.base.draw(&c.base, i, w, V, 3) <= 1);
    double weight[200] = {[3] = 1, [70] = 1};
    for (uint32_t i = 0; i < 1000; i++) {
        int32_t x = c.base.draw(&c.base, i, weight, 200, 3);
        assert_true(x == 3 || x == 70);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_match_chain),
        cmocka_unit_test(test_match_tree),
        cmocka_unit_test(test_match_merged),
        cmocka_unit_test(test_lenient_greedy),
        cmocka_unit_test(test_typical),
        cmocka_unit_test(test_lenient_greedy_takes_the_likeliest),
        cmocka_unit_test(test_lenient_greedy_one),
        cmocka_unit_test(test_reject_calls),
        cmocka_unit_test(test_reject_without_replacement),
        cmocka_unit_test(test_reject_lenience),
        cmocka_unit_test(test_no_mass_left),
        cmocka_unit_test(test_odd_p),
        cmocka_unit_test(test_q_where_p_is_zero),
        cmocka_unit_test(test_q_of_any_sum),
        cmocka_unit_test(test_own_draft),
        cmocka_unit_test(test_a_forced_level_is_used),
        cmocka_unit_test(test_sums_of_all_levels),
        cmocka_unit_test(test_residual_by_parts_or_written),
        cmocka_unit_test(test_first_at_least),
        cmocka_unit_test(test_keyed),
        cmocka_unit_test(test_keyed_long),
        cmocka_unit_test(test_keyed_short_sum),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}

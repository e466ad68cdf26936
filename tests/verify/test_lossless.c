/* The lossless suite on toy drafters: with every kind of proposal and tree the output has the
 * target's distribution, and every known way to break the rule of sight (reject.c) is detected.
 *
 * All by exact enumeration (so_lossless.h); the last test repeats some cases by sampling with the
 * production random source, a million texts each. */
#include "so_lossless.h"
#include "so_test.h"

#include <math.h>
#include <string.h>

#include "base/mem.h"

/* --- drafters --- */

typedef enum mutation {
    SOUND,
    DROP_LOW_Q,      /* a drawn token is dropped because its q is low */
    SORT_SIBLINGS,   /* drawn siblings are proposed best first */
    MERGE_ONCE,      /* a token that was drawn twice is proposed once */
    SET_AS_ROW,      /* drawn without replacement, declared as independent */
    SET_SORTED,      /* drawn without replacement, proposed best first */
    ARGMAX_AS_ROW,   /* the argmax, declared as drawn from the row */
    BETTER_OF_TWO,   /* two drafts are drawn, and the better-looking one is proposed */
    BETTER_OF_CACHE, /* the same for whole chains, by their probability under q */
} mutation;

typedef struct toy_drafter {
    const so_toy *q[2]; /* NULL: one model only */
    so_q_kind kind;     /* SO_Q_POINT: the argmax, or any drawn token if `wild` */
    bool wild;
    int width, depth; /* draws at each node; 1 is a chain */
    mutation mutation;
} toy_drafter;

static int new_row(so_tree *t, const float *q) {
    int row = so_tree_new_row(t);
    assert_true(row >= 0);
    memcpy(so_tree_row(t, row), q, (size_t)t->n_vocab * sizeof *q);
    return row;
}

static int32_t draw_without(so_verify_rng *draws, const float *q, int n, unsigned without) {
    double w[SO_TOY_MAX_VOCAB], total = 0;
    for (int i = 0; i < n; i++)
        total += w[i] = without >> i & 1 ? 0 : (double)q[i];
    return total > 0 ? draws->draw(draws, 0, w, n, total) : -1;
}

static int32_t argmax_without(const float *q, int n, unsigned without) {
    int32_t best = -1;
    for (int i = 0; i < n; i++)
        if (!(without >> i & 1) && (best < 0 || q[i] > q[best]))
            best = i;
    return best;
}

static void sort_by_q(int32_t *x, int n, const float *q) {
    for (int i = 1; i < n; i++)
        for (int k = i; k > 0 && q[x[k]] > q[x[k - 1]]; k--) {
            int32_t swap = x[k];
            x[k] = x[k - 1];
            x[k - 1] = swap;
        }
}

/* Draws the tokens to propose at one node; returns their number. */
static int draw_tokens(const toy_drafter *d, const float *q, int n_vocab, so_verify_rng *draws,
                       int32_t *x) {
    int n = 0;
    unsigned drawn = 0;
    for (int k = 0; k < d->width; k++) {
        bool point = d->kind == SO_Q_POINT && !d->wild;
        unsigned without = d->kind == SO_Q_ROW ? 0 : drawn;
        int32_t y = point || d->mutation == ARGMAX_AS_ROW
                        ? argmax_without(q, n_vocab, drawn)
                        : draw_without(draws, q, n_vocab, without);
        if (y < 0)
            break;
        if (d->mutation == BETTER_OF_TWO) {
            int32_t z = draw_without(draws, q, n_vocab, without);
            y = q[z] > q[y] ? z : y;
        }
        if (d->mutation == DROP_LOW_Q && q[y] < 0.4f)
            break;
        if (d->mutation == MERGE_ONCE && drawn >> y & 1)
            continue;
        drawn |= 1u << y;
        x[n++] = y;
    }
    if (d->mutation == SORT_SIBLINGS || d->mutation == SET_SORTED)
        sort_by_q(x, n, q);
    return n;
}

/* Every node above `depth` gets its draws from the first model. */
static void grow(const toy_drafter *d, const int32_t *text, int n, so_tree *t,
                 so_verify_rng *draws) {
    for (int node = 0; node < t->n_nodes; node++) {
        if (t->nodes[node].depth >= d->depth)
            continue;
        int32_t path[SO_TOY_MAX_TEXT], x[16];
        const float *q = so_toy_row(d->q[0], path, so_toy_path(t, node, text, n, path));
        int n_x = draw_tokens(d, q, t->n_vocab, draws, x);
        int row = d->kind != SO_Q_POINT && n_x > 0 ? new_row(t, q) : -1;
        so_q_kind kind = d->mutation == SET_AS_ROW ? SO_Q_ROW : d->kind;
        for (int k = 0; k < n_x; k++)
            assert_true(so_tree_add(t, node, x[k], kind, row, 0, 0.5f) > 0);
    }
}

/* Two models draw a chain each; where they agree the chains share nodes. */
static void two_chains(const toy_drafter *d, const int32_t *text, int n, so_tree *t,
                       so_verify_rng *draws) {
    for (int m = 0; m < 2; m++)
        for (int node = 0, k = 0; k < d->depth; k++) {
            int32_t path[SO_TOY_MAX_TEXT];
            const float *q = so_toy_row(d->q[m], path, so_toy_path(t, node, text, n, path));
            int32_t x = draw_without(draws, q, t->n_vocab, 0);
            int child = so_tree_child(t, node, x);
            if (d->mutation != MERGE_ONCE || child < 0)
                child = so_tree_add(t, node, x, SO_Q_ROW, new_row(t, q), m, 0.5f);
            node = child;
        }
}

/* Two chains are drawn, and the one to which q gives the higher probability is proposed. */
static void better_chain(const toy_drafter *d, const int32_t *text, int n, so_tree *t,
                         so_verify_rng *draws) {
    int32_t x[2][SO_TOY_MAX_TEXT];
    double score[2] = {1, 1};
    for (int m = 0; m < 2; m++) {
        memcpy(x[m], text, (size_t)n * sizeof *text);
        for (int k = n; k < n + d->depth; k++) {
            const float *q = so_toy_row(d->q[0], x[m], k);
            x[m][k] = draw_without(draws, q, t->n_vocab, 0);
            score[m] *= (double)q[x[m][k]];
        }
    }
    const int32_t *best = x[score[1] > score[0]];
    for (int k = n, node = 0; k < n + d->depth; k++)
        node = so_tree_add(t, node, best[k], SO_Q_ROW, new_row(t, so_toy_row(d->q[0], best, k)), 0,
                           0.5f);
}

static void toy_propose(void *user, const int32_t *text, int n, so_tree *t, so_verify_rng *draws) {
    const toy_drafter *d = user;
    if (d->mutation == BETTER_OF_CACHE)
        better_chain(d, text, n, t, draws);
    else if (d->q[1])
        two_chains(d, text, n, t, draws);
    else
        grow(d, text, n, t, draws);
    so_tree_check(t);
}

/* A node of every kind: the argmax of one model as a point mass, two draws without replacement from
 * one row, and between them one from another row, once as a set of its own and once independent. */
static void mixed_propose(void *user, const int32_t *text, int n, so_tree *t,
                          so_verify_rng *draws) {
    const toy_drafter *d = user;
    for (int node = 0; node < t->n_nodes; node++) {
        if (t->nodes[node].depth >= d->depth)
            continue;
        int32_t path[SO_TOY_MAX_TEXT];
        int len = so_toy_path(t, node, text, n, path);
        const float *q0 = so_toy_row(d->q[0], path, len), *q1 = so_toy_row(d->q[1], path, len);
        so_tree_add(t, node, argmax_without(q1, t->n_vocab, 0), SO_Q_POINT, -1, 0, 0.5f);
        int r0 = new_row(t, q0), r1 = new_row(t, q1), r2 = new_row(t, q1);
        int32_t a = draw_without(draws, q0, t->n_vocab, 0);
        int32_t b = draw_without(draws, q0, t->n_vocab, 1u << a);
        so_tree_add(t, node, a, SO_Q_ROW_SET, r0, 1, 0.5f);
        so_tree_add(t, node, draw_without(draws, q1, t->n_vocab, 0), SO_Q_ROW_SET, r2, 2, 0.5f);
        so_tree_add(t, node, draw_without(draws, q1, t->n_vocab, 0), SO_Q_ROW, r1, 2, 0.5f);
        if (b >= 0)
            so_tree_add(t, node, b, SO_Q_ROW_SET, r0, 1, 0.5f);
    }
    so_tree_check(t);
}

/* Invalid rows: scaled (drawn from the scaled row), or with entries that are not probabilities. */
typedef struct bad_rows {
    const so_toy *q;
    float scale;
    float poison; /* entry at the token after the drawn one; 0: none */
    bool disown;  /* the row has 0 at the drawn token */
    int depth;
} bad_rows;

static void bad_propose(void *user, const int32_t *text, int n, so_tree *t, so_verify_rng *draws) {
    const bad_rows *d = user;
    for (int node = 0, k = 0; k < d->depth; k++) {
        int32_t path[SO_TOY_MAX_TEXT];
        const float *q = so_toy_row(d->q, path, so_toy_path(t, node, text, n, path));
        int row = new_row(t, q);
        for (int i = 0; i < t->n_vocab; i++)
            so_tree_row(t, row)[i] *= d->scale;
        int32_t x = draw_without(draws, d->scale > 0 ? so_tree_row(t, row) : q, t->n_vocab, 0);
        if (d->poison != 0)
            so_tree_row(t, row)[(x + 1) % t->n_vocab] = d->poison;
        if (d->disown)
            so_tree_row(t, row)[x] = 0;
        node = so_tree_add(t, node, x, SO_Q_ROW, row, 0, 0.5f);
    }
}

/* --- verifiers with a fault --- */

typedef enum fault {
    NO_FAULT,
    ACCEPT_ALL,
    KEEP_P,         /* after a rejection, samples from the unchanged p */
    NO_RENORM,      /* the residual is used without dividing by its mass */
    FORGET_RESIDUAL /* a second sibling is tested against p instead of the residual */
} fault;

static fault active_fault;

/* The walk of reject.c in its simplest form, normalised at every step, with an optional fault. */
static void faulty_verify(const so_tree *t, so_verify_row *row, void *user, so_verify_rng *rng,
                          double *scratch, so_verdict *out) {
    double *r = scratch, *q = scratch + t->n_vocab, mass;
    int node = 0, child = 0;
    out->n_accepted = 0;
    while (child >= 0) {
        const float *p = row(user, node);
        child = -1;
        mass = 0;
        for (int i = 0; i < t->n_vocab; i++)
            mass += r[i] = (double)p[i];
        for (int k = t->nodes[node].first; k >= 0 && child < 0; k = t->proposals[k].next) {
            const so_proposal *s = &t->proposals[k];
            int32_t x = t->nodes[s->child].token;
            double q_mass = 0;
            for (int i = 0; i < t->n_vocab; i++)
                q_mass += q[i] = s->row < 0 ? i == x : (double)so_tree_row(t, s->row)[i];
            double px = active_fault == FORGET_RESIDUAL ? (double)p[x] : r[x];
            px /= active_fault == NO_RENORM ? 1 : mass;
            if (active_fault == ACCEPT_ALL || rng->accept(rng, 0, 0, px, q[x] / q_mass)) {
                child = s->child;
                continue;
            }
            if (active_fault == KEEP_P)
                continue;
            double scale = (active_fault == NO_RENORM ? 1 : mass) / q_mass;
            mass = 0;
            for (int i = 0; i < t->n_vocab; i++)
                mass += r[i] = r[i] > scale * q[i] ? r[i] - scale * q[i] : 0;
            for (int i = 0; !(mass > 0) && i < t->n_vocab; i++)
                r[i] = 1; /* only reached with a fault */
            mass = mass > 0 ? mass : t->n_vocab;
        }
        if (child >= 0)
            out->path[out->n_accepted++] = (int16_t)(node = child);
    }
    out->token = rng->draw(rng, 0, r, t->n_vocab, mass);
}

/* --- toys --- */

static so_toy target, near_q, far_q;

static void make_toys(int n_vocab, uint64_t seed, double zeros) {
    so_toy_init(&target, n_vocab, seed, zeros, 1.5);
    so_toy_init_near(&near_q, &target, 0.6, seed + 100, zeros);
    so_toy_init(&far_q, n_vocab, seed + 200, zeros, 1);
}

static so_lossless_case toy_case(const char *name, toy_drafter *d, int n_out) {
    return (so_lossless_case){
        .name = name, .target = &target, .n_out = n_out, .propose = toy_propose, .user = d};
}

static void check_toy(const char *name, toy_drafter d, int n_out) {
    so_lossless_case c = toy_case(name, &d, n_out);
    so_lossless_check(&c);
}

/* --- exactness --- */

/* Chains of every length, near and far drafts, with and without zeros in the rows. */
static void test_chains(void **state) {
    (void)state;
    for (int gamma = 1; gamma <= 8; gamma++)
        for (int zeros = 0; zeros < 2; zeros++) {
            int n_vocab = gamma <= 2 ? 5 : gamma <= 4 ? 4 : gamma <= 6 ? 3 : 2;
            make_toys(n_vocab, (uint64_t)(gamma * 10 + zeros), zeros * 0.3);
            check_toy("near chain", (toy_drafter){{&near_q}, SO_Q_ROW, 0, 1, gamma, SOUND}, 3);
            check_toy("far chain", (toy_drafter){{&far_q}, SO_Q_ROW, 0, 1, gamma, SOUND}, 2);
            check_toy("own chain", (toy_drafter){{&target}, SO_Q_ROW, 0, 1, gamma, SOUND}, 2);
            check_toy("points", (toy_drafter){{&far_q}, SO_Q_POINT, 0, 1, gamma, SOUND}, 4);
            check_toy("wild points", (toy_drafter){{&far_q}, SO_Q_POINT, 1, 1, gamma, SOUND}, 2);
        }
}

/* A draft longer than the request is enumerated in full, and four tokens are emitted. */
static void test_long_text(void **state) {
    (void)state;
    make_toys(2, 77, 0);
    check_toy("gamma 8, 4 tokens", (toy_drafter){{&near_q}, SO_Q_ROW, 0, 1, 8, SOUND}, 4);
    make_toys(3, 78, 0.2);
    check_toy("gamma 4, 4 tokens", (toy_drafter){{&near_q}, SO_Q_ROW, 0, 1, 4, SOUND}, 4);
}

static void test_trees(void **state) {
    (void)state;
    for (uint64_t seed = 0; seed < 4; seed++) {
        double zeros = seed & 1 ? 0.3 : 0;
        make_toys(3, 300 + seed, zeros);
        check_toy("with", (toy_drafter){{&near_q}, SO_Q_ROW, 0, 2, 2, SOUND}, 3);
        check_toy("without", (toy_drafter){{&near_q}, SO_Q_ROW_SET, 0, 2, 2, SOUND}, 3);
        check_toy("without, far", (toy_drafter){{&far_q}, SO_Q_ROW_SET, 0, 2, 2, SOUND}, 3);
        check_toy("all of it", (toy_drafter){{&far_q}, SO_Q_ROW_SET, 0, 3, 1, SOUND}, 3);
        check_toy("top-2 points", (toy_drafter){{&far_q}, SO_Q_POINT, 0, 2, 3, SOUND}, 4);
        check_toy("wild points", (toy_drafter){{&far_q}, SO_Q_POINT, 1, 2, 2, SOUND}, 3);
        make_toys(5, 310 + seed, zeros);
        check_toy("four with", (toy_drafter){{&far_q}, SO_Q_ROW, 0, 4, 1, SOUND}, 2);
        check_toy("four without", (toy_drafter){{&near_q}, SO_Q_ROW_SET, 0, 4, 1, SOUND}, 2);
    }
}

/* Random trees to depth 4 and width 4, with siblings of every kind, several rows at a node and equal
 * tokens. The number of draws at a node, their kinds and rows are chosen by the seed, the node's
 * number and its depth, before anything is drawn. */
typedef struct random_tree {
    const so_toy *q[2];
    uint64_t seed;
    int max_draws;
    int deepest, widest, n_equal; /* what the trees had */
} random_tree;

static int choose(const random_tree *d, int node, int what, int n) {
    so_rng_key key = {.seed = d->seed, .position = (uint32_t)node, .purpose = SO_RNG_TEST};
    return (int)(so_rng_uniform(&key, (uint32_t)what) * n);
}

static void draw_random(random_tree *d, so_tree *t, int node, const float *q[2], int k,
                        so_verify_rng *draws, int rows[2], unsigned used[2]) {
    int kind = choose(d, node, 2 * k + 1, 6), m = choose(d, node, 2 * k + 2, 2);
    int n_nodes = t->n_nodes;
    if (kind == 0) { /* a point: the argmax, also if it was drawn before */
        so_tree_add(t, node, argmax_without(q[m], t->n_vocab, 0), SO_Q_POINT, -1, m, 0.5f);
    } else {
        bool set = kind > 3; /* without replacement */
        int32_t x = draw_without(draws, q[m], t->n_vocab, set ? used[m] : 0);
        if (x < 0)
            return;
        if (rows[m] < 0)
            rows[m] = new_row(t, q[m]);
        used[m] |= set ? 1u << x : 0;
        so_tree_add(t, node, x, set ? SO_Q_ROW_SET : SO_Q_ROW, rows[m], m, 0.5f);
    }
    d->n_equal += t->n_nodes == n_nodes;
}

static void random_propose(void *user, const int32_t *text, int n, so_tree *t,
                           so_verify_rng *draws) {
    random_tree *d = user;
    int left = d->max_draws;
    for (int node = 0; node < t->n_nodes && left > 0; node++) {
        int32_t path[SO_TOY_MAX_TEXT];
        int len = so_toy_path(t, node, text, n, path), depth = t->nodes[node].depth;
        int width = depth < 4 ? (node == 0) + choose(d, node, 0, 5 - (node == 0)) : 0;
        const float *q[2] = {so_toy_row(d->q[0], path, len), so_toy_row(d->q[1], path, len)};
        int rows[2] = {-1, -1};
        unsigned used[2] = {0};
        for (int k = 0; k < width && left > 0; k++, left--)
            draw_random(d, t, node, q, k, draws, rows, used);
        d->deepest = SO_MAX(d->deepest, width > 0 ? depth + 1 : depth);
        d->widest = SO_MAX(d->widest, width);
    }
    so_tree_check(t);
}

/* Each kind of sampling transform in turn; NULL: the toy's rows as they are. */
static const so_sample_params *transform(int kind, so_sample_params *p) {
    static const so_bias bias[] = {{1, 0.7f}};
    so_sample_defaults(p);
    p->temp = kind == 1 ? 0.6f : 1;
    p->top_k = kind == 2 ? 2 : p->top_k;
    p->top_p = kind == 3 ? 0.8f : p->top_p;
    p->min_p = kind == 4 ? 0.2f : p->min_p;
    if (kind == 5) {
        p->repeat_penalty = 1.3f;
        p->presence_penalty = 0.4f;
        p->frequency_penalty = 0.2f;
        p->bias = bias;
        p->n_bias = SO_LEN(bias);
    }
    return kind == 0 ? NULL : p;
}

static void test_random_trees(void **state) {
    (void)state;
    so_sample_params p;
    int deepest = 0, widest = 0, n_equal = 0, n = SO_TEST_SANITIZED ? 12 : 60;
    for (int seed = 0; seed < n; seed++) {
        int n_vocab = 2 + seed % 3;
        make_toys(n_vocab, 1000 + (uint64_t)seed, seed % 2 ? 0.3 : 0);
        random_tree d = {.q = {&near_q, &far_q},
                         .seed = (uint64_t)seed,
                         .max_draws = n_vocab == 2   ? 8
                                      : n_vocab == 3 ? 6
                                                     : 5};
        so_lossless_case c = {.name = "random tree",
                              .target = &target,
                              .n_out = 2,
                              .propose = random_propose,
                              .user = &d,
                              .sample = transform(seed / 6 % 6, &p)};
        so_lossless_check(&c);
        deepest = SO_MAX(deepest, d.deepest);
        widest = SO_MAX(widest, d.widest);
        n_equal += d.n_equal;
    }
    print_message("random trees: depth %d, width %d, %d equal siblings\n", deepest, widest,
                  n_equal);
    assert_int_equal(deepest, 4);
    assert_int_equal(widest, 4);
    assert_true(n_equal > 100);
}

static void test_several_drafters(void **state) {
    (void)state;
    for (uint64_t seed = 0; seed < 4; seed++) {
        make_toys(3, 400 + seed, seed & 1 ? 0.3 : 0);
        toy_drafter d = {{&near_q, &far_q}, SO_Q_ROW, 0, 1, 3, SOUND};
        so_lossless_case c = toy_case("two drafters, merged", &d, 3);
        so_lossless_check(&c);
        c.name = "points and rows at one node";
        c.propose = mixed_propose;
        d.depth = 1;
        so_lossless_check(&c);
        make_toys(5, 410 + seed, 0);
        c.n_out = 2;
        so_lossless_check(&c);
    }
    make_toys(2, 450, 0);
    toy_drafter d = {{&near_q, &far_q}, SO_Q_ROW, 0, 1, 2, SOUND};
    so_lossless_case c = toy_case("points and rows, two deep", &d, 2);
    c.propose = mixed_propose;
    so_lossless_check(&c);
}

/* Rows that are not distributions count as weights or, if impossible, as a point mass. */
static void test_bad_rows(void **state) {
    (void)state;
    const float scales[] = {0.5f, 3, 1e30f, 1e-30f, 0};
    const float poisons[] = {-0.25f, (float)NAN, INFINITY, -INFINITY};
    make_toys(4, 500, 0.2);
    bad_rows d = {.q = &near_q, .depth = 2};
    so_lossless_case c = {
        .name = "bad rows", .target = &target, .n_out = 2, .propose = bad_propose, .user = &d};
    for (size_t i = 0; i < SO_LEN(scales); i++) {
        d.scale = scales[i];
        so_lossless_check(&c);
    }
    d.scale = 1;
    for (size_t i = 0; i < SO_LEN(poisons); i++) {
        d.poison = poisons[i];
        so_lossless_check(&c);
    }
    d.poison = 0;
    d.disown = true;
    so_lossless_check(&c);
}

/* The fault-free reference walk is itself exact. */
static void test_reference(void **state) {
    (void)state;
    active_fault = NO_FAULT;
    make_toys(3, 600, 0.2);
    toy_drafter d = {{&near_q}, SO_Q_ROW, 0, 2, 2, SOUND};
    so_lossless_case c = toy_case("reference walk", &d, 3);
    c.verify = faulty_verify;
    so_lossless_check(&c);
}

/* --- mutants --- */

/* Well above rounding errors, so that the tolerance does not decide. */
static const double NOTICED = 1e-4;

static void must_notice(const char *name, const so_lossless_case *c) {
    double gap = so_lossless_gap(c);
    print_message("mutant %-34s off by %.4f\n", name, gap);
    if (!(gap > NOTICED))
        fail_msg("mutant %s passes: off by %g only", name, gap);
}

static void test_mutant_drafters(void **state) {
    (void)state;
    const struct {
        const char *name;
        toy_drafter d;
    } mutants[] = {
        {"drops a draw of low q", {{&near_q}, SO_Q_ROW, 0, 1, 2, DROP_LOW_Q}},
        {"tests drawn siblings best-first", {{&far_q}, SO_Q_ROW, 0, 2, 1, SORT_SIBLINGS}},
        {"tests a token drawn twice once", {{&near_q}, SO_Q_ROW, 0, 2, 1, MERGE_ONCE}},
        {"tests a merged child once", {{&near_q, &far_q}, SO_Q_ROW, 0, 1, 2, MERGE_ONCE}},
        {"without replacement, q as it was", {{&far_q}, SO_Q_ROW_SET, 0, 2, 1, SET_AS_ROW}},
        {"without replacement, best-first", {{&far_q}, SO_Q_ROW_SET, 0, 2, 1, SET_SORTED}},
        {"argmax with the counts as q", {{&far_q}, SO_Q_ROW, 0, 1, 2, ARGMAX_AS_ROW}},
        {"better of two draws", {{&near_q}, SO_Q_ROW, 0, 1, 1, BETTER_OF_TWO}},
        {"better of two cached drafts", {{&near_q}, SO_Q_ROW, 0, 1, 2, BETTER_OF_CACHE}},
    };
    make_toys(4, 700, 0);
    for (size_t i = 0; i < SO_LEN(mutants); i++) {
        toy_drafter d = mutants[i].d;
        so_lossless_case c = toy_case(mutants[i].name, &d, 2);
        must_notice(mutants[i].name, &c);
        /* The same drafter without its fault passes, so the fault is what was detected. */
        d.mutation = SOUND;
        so_lossless_check(&c);
    }
}

static void test_mutant_verifiers(void **state) {
    (void)state;
    const char *names[] = {"", "accepts everything", "keeps p after a rejection",
                           "residual without its mass", "second sibling against p"};
    make_toys(4, 800, 0);
    toy_drafter d = {{&far_q}, SO_Q_ROW, 0, 2, 1, SOUND};
    for (int f = ACCEPT_ALL; f <= FORGET_RESIDUAL; f++) {
        active_fault = (fault)f;
        so_lossless_case c = toy_case(names[f], &d, 2);
        c.verify = faulty_verify;
        must_notice(names[f], &c);
    }
}

/* --- the vtable of real drafters --- */

/* A drafter with the engine's interface: a chain of draws from a row, keyed by seed, position and
 * round; or, if `row` is NULL, the first token of the text repeated, as a point mass. Its state is
 * the number of observed tokens, which shows that the harness calls observe. */
typedef struct vt_drafter {
    so_drafter base;
    const float *row;
    so_rng_purpose purpose;
    int n_open, n_observed;
} vt_drafter;

static int vt_open(so_drafter *d, const so_draft_text *text, void **state, so_err *err) {
    (void)err;
    assert_true(text->n_prompt > 0);
    ((vt_drafter *)d)->n_open++;
    *state = d;
    return 0;
}

static void vt_close(so_drafter *d, void *state) {
    assert_ptr_equal(d, state);
    ((vt_drafter *)d)->n_open--;
}

static void vt_observe(so_drafter *d, void *state, const int32_t *tokens, int n) {
    (void)tokens;
    assert_ptr_equal(d, state);
    ((vt_drafter *)d)->n_observed += n;
}

static int vt_propose(so_drafter *base, so_draft_job *jobs, int n_jobs, so_err *err) {
    vt_drafter *d = (vt_drafter *)base;
    (void)err;
    assert_int_equal(n_jobs, 1);
    so_tree *t = jobs->tree;
    for (int k = 0, node = 0; k < jobs->max_depth && k < jobs->max_nodes; k++) {
        if (!d->row) {
            node = so_tree_add(t, node, jobs->tokens[0], SO_Q_POINT, -1, 0, 0.5f);
            continue;
        }
        so_rng_key key = {jobs->seed, jobs->choice, (uint32_t)(jobs->n_tokens + k),
                          (uint32_t)d->purpose, d->purpose == SO_RNG_DRAFT ? jobs->round : 0};
        double u = so_rng_uniform(&key, 0);
        int32_t x = 0;
        while (x < t->n_vocab - 1 && (u -= (double)d->row[x]) >= 0)
            x++;
        node = so_tree_add(t, node, x, SO_Q_ROW, new_row(t, d->row), 0, 0.5f);
    }
    return 0;
}

static const so_drafter_vt VT = {
    .name = "toy",
    .open = vt_open,
    .close = vt_close,
    .propose = vt_propose,
    .observe = vt_observe,
};

/* The entry point of all real drafters. The last drafter draws with the random numbers that decide
 * its tests, which the rule of sight forbids. */
static void test_real_drafters(void **state) {
    (void)state;
    const int n = 300000;
    make_toys(4, 950, 0);
    const float row[4] = {0.5f, 0.25f, 0.125f, 0.125f};
    vt_drafter d = {.base = {&VT, 0}};
    so_lossless_real r = {.drafter = &d.base, .max_nodes = 8, .max_depth = 3};
    so_lossless_case c = {.name = "vtable, points", .target = &target, .n_out = 3};
    so_lossless_use(&c, &r);
    so_lossless_check(&c);
    c.n_out = 2;
    assert_true(so_lossless_chi2(&c, n, 1) >= SO_LOSSLESS_FALSE_ALARM);
    assert_true(d.n_observed >= 2 * n);
    d.row = row;
    d.purpose = SO_RNG_DRAFT;
    assert_true(so_lossless_chi2(&c, n, 1) >= SO_LOSSLESS_FALSE_ALARM);
    d.purpose = SO_RNG_ACCEPT;
    assert_true(so_lossless_chi2(&c, n, 1) < SO_LOSSLESS_FALSE_ALARM);
    so_lossless_real_end(&r);
    assert_int_equal(d.n_open, 0);
}

/* --- the production random source --- */

static void test_sampled(void **state) {
    (void)state;
    const int n = 1000000;
    make_toys(4, 900, 0.2);
    const struct {
        const char *name;
        toy_drafter d;
        bool sound;
    } cases[] = {
        {"chain", {{&near_q}, SO_Q_ROW, 0, 1, 3, SOUND}, true},
        {"points", {{&far_q}, SO_Q_POINT, 0, 2, 2, SOUND}, true},
        {"tree without replacement", {{&near_q}, SO_Q_ROW_SET, 0, 2, 2, SOUND}, true},
        {"two drafters", {{&near_q, &far_q}, SO_Q_ROW, 0, 1, 2, SOUND}, true},
        {"mutant: argmax as row", {{&far_q}, SO_Q_ROW, 0, 1, 2, ARGMAX_AS_ROW}, false},
    };
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        toy_drafter d = cases[i].d;
        so_lossless_case c = toy_case(cases[i].name, &d, 2);
        double tail = so_lossless_chi2(&c, n, 1);
        print_message("chi-square, %d texts: %-28s p = %.3g\n", n, c.name, tail);
        if ((tail >= SO_LOSSLESS_FALSE_ALARM) != cases[i].sound)
            fail_msg("%s: p = %g", c.name, tail);
    }
}

static void test_chi2_tail(void **state) {
    (void)state;
    /* Standard quantiles. */
    assert_true(so_chi2_tail(3.841458820694124, 1) > 0.0499999 &&
                so_chi2_tail(3.841458820694124, 1) < 0.0500001);
    assert_true(so_chi2_tail(18.307038053275146, 10) > 0.0499999 &&
                so_chi2_tail(18.307038053275146, 10) < 0.0500001);
    assert_true(so_chi2_tail(124.34211340400407, 100) > 0.0499999 &&
                so_chi2_tail(124.34211340400407, 100) < 0.0500001);
    assert_true(so_chi2_tail(0, 5) == 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chains),
        cmocka_unit_test(test_long_text),
        cmocka_unit_test(test_trees),
        cmocka_unit_test(test_random_trees),
        cmocka_unit_test(test_several_drafters),
        cmocka_unit_test(test_bad_rows),
        cmocka_unit_test(test_reference),
        cmocka_unit_test(test_mutant_drafters),
        cmocka_unit_test(test_mutant_verifiers),
        cmocka_unit_test(test_real_drafters),
        cmocka_unit_test(test_chi2_tail),
        cmocka_unit_test(test_sampled),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

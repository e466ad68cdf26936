/* Trees of a draft model (draft/model_tree.c) against its rows, computed path by path:
 *
 *   shapes     a Cartesian product has the K best tokens of every row, and the node counts of the
 *              product; best-first has the most likely paths of all
 *   chains     k=1 is the chain, guess for guess, in every mode
 *   rounds     what the cache keeps from round to round changes no guess, alone and beside other
 *              requests, on both layouts, with few pages
 *   limits     budgets, contexts, options out of range */
#include "so_test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/rng.h"
#include "draft/model.h"
#include "so_rig.h"
#include "so_shape.h"

enum { N_JOBS = 3, N_CTX = 160, N_VOCAB = 24, MAX_DRAFT = 16, N_ROUNDS = 20 };

static so_rig rigs[2]; /* 1: has logits for a subset only */

static int open_models(void **state) {
    (void)state;
    static const unsigned char mask[] = {0x6D, 0xDB, 0xB6};
    so_shape shape = {SO_SHAPE_SMALL, .n_layers = 2, .n_vocab = N_VOCAB, .n_ctx = N_CTX, .seed = 3};
    so_rig_opts o = {
        .level = SO_CPU_AUTO, .deferred = true, .n_pages = 16, .model = {.draft = true}};
    so_shape_open(&rigs[0], &shape, &o);
    shape.vocab_mask = mask;
    shape.n_vocab_mask = sizeof mask;
    so_shape_open(&rigs[1], &shape, &o);
    return 0;
}

static int close_models(void **state) {
    (void)state;
    so_rig_close(&rigs[0]);
    so_rig_close(&rigs[1]);
    return 0;
}

static uint32_t n_drawn;
static double uniform(void) {
    return so_rng_uniform(&(so_rng_key){.seed = 5, .purpose = SO_RNG_TEST}, n_drawn++);
}
static int below(int n) { return (int)(uniform() * n); }

static so_model_drafter_opts options(const char *spec, int n_parallel) {
    so_model_drafter_opts o = {.n_vocab = N_VOCAB,
                               .n_ctx = N_CTX,
                               .n_parallel = n_parallel,
                               .n_batch = 64,
                               .max_draft = MAX_DRAFT,
                               .prefix_cache = true,
                               .nodes = 32,
                               .temp = -1};
    so_spec s;
    so_err err = {0};
    SO_OK_OR_FAIL(so_spec_parse(so_str_c(spec), &s, &err), err);
    SO_OK_OR_FAIL(so_model_opts_from_spec(&s, &s.nodes[s.root], &o, &err), err);
    return o;
}

/* One request: its text, tree and state. */
typedef struct request {
    so_drafter *d;
    so_tree tree;
    void *state;
    int32_t text[N_CTX + 2 * SO_TREE_MAX];
    int n;
    float temp;
} request;

static void open_request(request *r, so_drafter *d, int n_rows) {
    so_err err = {0};
    *r = (request){.d = d, .n = 7};
    for (int i = 0; i < r->n; i++)
        r->text[i] = (int32_t)((i * 5 + 1) % N_VOCAB);
    so_tree_init(&r->tree, N_VOCAB, n_rows);
    so_draft_text text = {.prompt = r->text, .n_prompt = r->n, .max_tokens = N_CTX};
    SO_OK_OR_FAIL(d->vt->open(d, &text, &r->state, &err), err);
}

static void close_request(request *r) {
    r->d->vt->close(r->d, r->state);
    so_tree_deinit(&r->tree);
}

static so_draft_job job_of(request *r, int max_nodes, int max_depth, uint32_t round) {
    so_tree_reset(&r->tree, r->text[r->n - 1], r->n - 1);
    return (so_draft_job){.state = r->state,
                          .tokens = r->text,
                          .n_tokens = r->n,
                          .n_prompt = 7,
                          .tree = &r->tree,
                          .max_nodes = max_nodes,
                          .max_depth = max_depth,
                          .seed = 11,
                          .round = round,
                          .temp = r->temp};
}

static void propose(so_drafter *d, so_draft_job *jobs, int n) {
    so_err err = {0};
    SO_OK_OR_FAIL(d->vt->propose(d, jobs, n, &err), err);
    for (int i = 0; i < n; i++)
        so_tree_check(jobs[i].tree);
}

static so_drafter *make(const so_rig *r, const so_model_drafter_opts *o) {
    so_drafter *d = NULL;
    so_err err = {0};
    SO_OK_OR_FAIL(so_model_drafter_create(r->m, o, NULL, &d, &err), err);
    return d;
}

/* --- shapes --- */

typedef struct path {
    int n;
    int32_t tokens[8];
    double chance;
} path;

static int descending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

/* The chances that the drafter gives to the k best tokens of a row: q^1.4, normalised, the rest with
 * the weight of the last; the others have chance 0. */
static void to_chances(double *probs, int k) {
    double sorted[N_VOCAB], sum = 0, left = 1;
    memcpy(sorted, probs, sizeof sorted);
    qsort(sorted, N_VOCAB, sizeof *sorted, descending);
    while (k > 1 && sorted[k - 1] <= 0)
        k--;
    for (int i = 0; i < k; i++) {
        sum += pow(sorted[i], 1.4);
        left -= sorted[i];
    }
    sum += fmax(left, 0) * pow(sorted[k - 1], 0.4);
    for (int i = 0; i < N_VOCAB; i++)
        probs[i] = probs[i] >= sorted[k - 1] ? pow(probs[i], 1.4) / sum : 0;
}

/* Chances of the token after a text, k of them, by the draft alone, row by row. */
static void row_after(so_rig *r, const int32_t *text, int n, const path *p, int k, double *probs) {
    float *logits = SO_NEW_N(float, (size_t)(n + p->n) * (size_t)r->width);
    so_seq *seq = so_seq_create(r->kv);
    double sum = 0, top = -INFINITY;
    so_rig_chain(r, seq, text, n, logits);
    if (p->n > 0)
        so_rig_chain(r, seq, p->tokens, p->n, logits + n * r->width);
    so_seq_free(seq);
    const float *row = logits + (n + p->n - 1) * r->width;
    const int32_t *subset = so_model_vocab_subset(r->m);
    for (int i = 0; i < r->width; i++)
        top = fmax(top, (double)row[i]);
    for (int i = 0; i < N_VOCAB; i++)
        probs[i] = 0;
    for (int i = 0; i < r->width; i++)
        sum += probs[subset ? subset[i] : i] = exp((double)row[i] - top);
    for (int i = 0; i < N_VOCAB; i++)
        probs[i] /= sum;
    to_chances(probs, SO_MIN(k, r->width));
    free(logits);
}

static int by_chance(const void *a, const void *b) {
    double x = ((const path *)a)->chance, y = ((const path *)b)->chance;
    return (x < y) - (x > y);
}

static path path_of(const so_tree *t, int node) {
    path p = {.n = t->nodes[node].depth};
    for (int i = p.n; i > 0; i--, node = t->nodes[node].parent)
        p.tokens[i - 1] = t->nodes[node].token;
    return p;
}

static bool has_path(const so_tree *t, const path *p) {
    int node = 0;
    for (int i = 0; i < p->n && node >= 0; i++)
        node = so_tree_child(t, node, p->tokens[i]);
    return node >= 0;
}

/* The most likely `n` paths of up to `depth` tokens: all of them are computed. */
static void best_paths(so_rig *r, const request *q, int depth, int n, path *out) {
    enum { MAX = N_VOCAB + N_VOCAB * N_VOCAB + N_VOCAB * N_VOCAB * N_VOCAB };
    path *all = SO_NEW_N(path, MAX);
    int n_all = 0;
    for (int i = -1; i < n_all; i++) {
        path from = i < 0 ? (path){.chance = 1} : all[i];
        double probs[N_VOCAB];
        /* a path that n others beat cannot have a descendant among the best n */
        if (from.n == depth || from.chance < 1e-3)
            continue;
        row_after(r, q->text, q->n, &from, 16, probs);
        for (int k = 0; k < N_VOCAB; k++) {
            if (probs[k] <= 0)
                continue;
            path p = from;
            p.tokens[p.n++] = k;
            p.chance *= probs[k];
            all[n_all++] = p;
        }
    }
    qsort(all, (size_t)n_all, sizeof *all, by_chance);
    assert_true(n_all > n && all[n - 1].chance > 1e-3); /* so nothing was left out */
    memcpy(out, all, (size_t)n * sizeof *out);
    free(all);
}

static void best_first_has_the_most_likely_paths(void **state) {
    (void)state;
    static const int budgets[] = {1, 2, 5, 12, 30};
    for (int narrow = 0; narrow < 2; narrow++)
        for (size_t i = 0; i < SO_LEN(budgets); i++) {
            path want[32];
            request q;
            so_model_drafter_opts o = options("model(best,nodes=30)", 1);
            so_drafter *d = make(&rigs[narrow], &o);
            open_request(&q, d, 0);
            so_draft_job job = job_of(&q, budgets[i], 3, 0);
            propose(d, &job, 1);
            assert_int_equal(q.tree.n_nodes - 1, budgets[i]);
            best_paths(&rigs[narrow], &q, 3, budgets[i], want);
            for (int k = 0; k < budgets[i]; k++)
                if (!has_path(&q.tree, &want[k]))
                    fail_msg("budget %d: path %d of %d tokens, chance %.4f, is missing", budgets[i],
                             k, want[k].n, want[k].chance);
            close_request(&q);
            so_drafter_free(d);
        }
}

/* Every inner node has the k best tokens of its row, best first. */
static void check_product(so_rig *r, const request *q, int k, int depth) {
    const so_tree *t = &q->tree;
    for (int node = 0; node < t->n_nodes; node++) {
        path p = path_of(t, node);
        double probs[N_VOCAB], last = 1;
        int n = 0;
        if (p.n == depth)
            continue;
        row_after(r, q->text, q->n, &p, k, probs);
        for (int i = t->nodes[node].first; i >= 0; i = t->proposals[i].next, n++) {
            double chance = probs[t->nodes[t->proposals[i].child].token];
            assert_true(chance <= last);
            double confidence = n == 0 ? chance : sqrt(chance); /* later siblings are spread */
            assert_true(fabs(confidence - (double)t->proposals[i].confidence) < 2e-3);
            probs[t->nodes[t->proposals[i].child].token] = -1;
            last = chance;
        }
        assert_int_equal(n, k);
        for (int i = 0; i < N_VOCAB; i++)
            assert_true(probs[i] <= last);
    }
}

/* 2 + 4 + 8 = 14 nodes and 3 + 9 + 27 + 81 + 243 = 363, cut to the largest budget, 256. */
static void products_have_their_counts(void **state) {
    (void)state;
    static const struct {
        const char *spec;
        int k, depth, nodes;
    } cases[] = {{"model(k=2,nodes=14)", 2, 3, 14},    {"model(k=2,nodes=32)", 2, 3, 14},
                 {"model(k=3,nodes=256)", 3, 3, 39},   {"model(k=1,nodes=9)", 1, 5, 5},
                 {"model(k=3,nodes=256)", 3, 5, 256},  {"model(k=2,nodes=13)", 2, 3, 13},
                 {"model(k=16,nodes=256)", 16, 1, 16}, {"model(k=4,nodes=3)", 4, 2, 3}};
    for (int narrow = 0; narrow < 2; narrow++)
        for (size_t i = 0; i < SO_LEN(cases); i++) {
            request q;
            int product = 0;
            so_model_drafter_opts o = options(cases[i].spec, 1);
            so_drafter *d = make(&rigs[narrow], &o);
            open_request(&q, d, 0);
            so_draft_job job = job_of(&q, 256, cases[i].depth, 0);
            propose(d, &job, 1);
            assert_int_equal(q.tree.n_nodes - 1, cases[i].nodes);
            for (int k = 0, level = 1; k < cases[i].depth; k++)
                product += level *= cases[i].k;
            if (product == cases[i].nodes)
                check_product(&rigs[narrow], &q, cases[i].k, cases[i].depth);
            close_request(&q);
            so_drafter_free(d);
        }
}

/* --- fixed shapes --- */

/* Writes a tree file of parents and ranks and returns the spec that names it. */
static void spec_of(const int (*nodes)[2], int n, int depth, const char *dir, char *out,
                    size_t len) {
    char *file = so_path_join(dir, "tree.json");
    FILE *f = fopen(file, "w");
    assert_non_null(f);
    fprintf(f, "{\"sooth_tree\": 1, \"depth\": %d, \"nodes\": [", depth);
    for (int i = 0; i < n; i++)
        fprintf(f, "%s{\"parent\": %d, \"rank\": %d}", i ? "," : "", nodes[i][0], nodes[i][1]);
    fprintf(f, "]}\n");
    fclose(f);
    snprintf(out, len, "model(tree=\"%s\")", file);
    free(file);
}

static void propose_once(const char *spec, int n_rows, request *q, so_drafter **d) {
    so_model_drafter_opts o = options(spec, 1);
    *d = make(&rigs[0], &o);
    open_request(q, *d, n_rows);
    q->temp = n_rows ? 0.9f : 0;
    so_draft_job job = job_of(q, 64, 8, 0);
    propose(*d, &job, 1);
}

/* A product as a file is the tree of k=K; in a lopsided shape every node has the token of its rank; a
 * sampled tree has the shape's draws, without replacement. */
static void files_give_the_shape(void **state) {
    (void)state;
    char spec[512], *dir = so_test_tmp();
    request q[2];
    so_drafter *d[2];
    int product[14][2];
    for (int i = 0; i < 14; i++) {
        product[i][0] = i / 2 - 1;
        product[i][1] = i % 2;
    }
    spec_of(product, 14, 3, dir, spec, sizeof spec);
    propose_once(spec, 0, &q[0], &d[0]);
    propose_once("model(k=2,nodes=14)", 0, &q[1], &d[1]);
    assert_int_equal(q[0].tree.n_nodes, 15);
    for (int i = 1; i < 15; i++) {
        path p = path_of(&q[1].tree, i);
        assert_true(has_path(&q[0].tree, &p));
    }
    assert_true(d[0]->id == d[1]->id); /* 0: no model id here */
    close_request(&q[1]);
    so_drafter_free(d[1]);
    propose_once("model(k=4,nodes=64)", 0, &q[1], &d[1]); /* all ranks to 3, to depth 2 at least */
    close_request(&q[0]);
    so_drafter_free(d[0]);
    spec_of((const int[][2]){{-1, 3}, {0, 0}, {-1, 1}}, 3, 2, dir, spec, sizeof spec);
    propose_once(spec, 0, &q[0], &d[0]);
    assert_int_equal(q[0].tree.n_nodes, 4);
    int at[N_VOCAB] = {0}, rank = 0;
    for (int i = q[1].tree.nodes[0].first; i >= 0; i = q[1].tree.proposals[i].next)
        at[rank++] = q[1].tree.proposals[i].child;
    path third = path_of(&q[1].tree, at[3]), first = path_of(&q[1].tree, at[1]);
    path deep = path_of(&q[1].tree, q[1].tree.proposals[q[1].tree.nodes[at[3]].first].child);
    assert_true(has_path(&q[0].tree, &third) && has_path(&q[0].tree, &first) &&
                has_path(&q[0].tree, &deep));
    close_request(&q[0]);
    so_drafter_free(d[0]);
    propose_once(spec, 64, &q[0], &d[0]);
    assert_int_equal(q[0].tree.n_proposals, 3);
    assert_int_equal(q[0].tree.n_nodes, 4);
    for (int i = 0; i < 3; i++)
        assert_int_equal(q[0].tree.proposals[i].kind, SO_Q_ROW_SET);
    close_request(&q[0]);
    so_drafter_free(d[0]);
    close_request(&q[1]);
    so_drafter_free(d[1]);
    so_test_tmp_free(dir);
}

static void bad_files_are_refused(void **state) {
    (void)state;
    so_model_drafter_opts o = {.nodes = 32};
    so_spec s;
    so_err err = {0};
    SO_OK_OR_FAIL(so_spec_parse(so_str_c("model(tree=\"/nonexistent/t.json\")"), &s, &err), err);
    assert_int_equal(so_model_opts_from_spec(&s, &s.nodes[s.root], &o, &err), SO_ENOTFOUND);
    assert_non_null(strstr(err.msg, "/nonexistent/t.json"));
    SO_OK_OR_FAIL(so_spec_parse(so_str_c("model(tree=Makefile)"), &s, &err), err);
    assert_int_equal(so_model_opts_from_spec(&s, &s.nodes[s.root], &o, &err), SO_EFORMAT);
    assert_true(so_spec_parse(so_str_c("model(tree=a,k=2)"), &s, &err) < 0);
    assert_true(so_spec_parse(so_str_c("model(tree=a,tree=b)"), &s, &err) < 0);
    assert_true(so_spec_parse(so_str_c("model(tree=)"), &s, &err) < 0);
    assert_true(so_spec_parse(so_str_c("lookup(tree=a)"), &s, &err) < 0);
}

static void same_trees(const char *what, int round, const so_tree *a, const so_tree *b);

/* --- an inner drafter's tree --- */

/* Proposes a wrong chain first, and beside it a branch with the tokens of `right`; with `chain` only the
 * wrong chain. Also an id that the draft model does not have. */
typedef struct brancher {
    so_drafter base;
    int32_t right[8];
    int n_right;
    bool chain;
} brancher;

static int branch_open(so_drafter *d, const so_draft_text *text, void **state, so_err *err) {
    (void)d, (void)text, (void)err;
    *state = NULL;
    return 0;
}
static void branch_close(so_drafter *d, void *state) { (void)d, (void)state; }
static void branch_free(so_drafter *d) { free(d); }
static int branch_propose(so_drafter *d, so_draft_job *jobs, int n, so_err *err) {
    const brancher *b = (const brancher *)d;
    (void)err;
    for (int i = 0; i < n; i++) {
        int node = so_draft_add(&jobs[i], 0, (b->right[0] + 1) % N_VOCAB, SO_Q_POINT, -1, 0, 0.5f);
        if (node > 0)
            so_draft_add(&jobs[i], node, 3, SO_Q_POINT, -1, 0, 0.5f);
        node = 0;
        for (int k = 0; k < b->n_right && node >= 0 && !b->chain; k++)
            node = so_draft_add(&jobs[i], node, b->right[k], SO_Q_POINT, -1, 0, 0.5f);
    }
    return 0;
}

/* The draft's guesses are its own whatever the inner drafter proposes. A path of the inner tree that is
 * not its first chain saves passes: the draft's cache then has the path already. */
static void inner_trees_save_passes(void **state) {
    (void)state;
    static const so_drafter_vt vt = {.name = "brancher",
                                     .free = branch_free,
                                     .open = branch_open,
                                     .close = branch_close,
                                     .propose = branch_propose};
    so_model_drafter_opts o = options("model", 1);
    so_drafter *plain = make(&rigs[0], &o);
    for (int chain = 0; chain < 2; chain++) {
        request q[2];
        so_err err = {0};
        so_drafter *d = NULL;
        brancher *b = SO_NEW(brancher);
        b->base.vt = &vt;
        b->chain = chain;
        open_request(&q[0], plain, 0);
        so_draft_job job = job_of(&q[0], 7, 7, 0);
        propose(plain, &job, 1);
        b->n_right = 4;
        for (int k = 0; k < 4; k++)
            b->right[k] = q[0].tree.nodes[k + 1].token;
        SO_OK_OR_FAIL(so_model_drafter_create(rigs[0].m, &o, &b->base, &d, &err), err);
        open_request(&q[1], d, 0);
        job = job_of(&q[1], 7, 7, 0);
        propose(d, &job, 1);
        same_trees("inner", chain, &q[1].tree, &q[0].tree);
        /* one pass for the root and four guesses of the branch, then one per guess */
        assert_int_equal(job.n_passes, chain ? 7 : 3);
        for (int i = 0; i < 2; i++)
            close_request(&q[i]);
        so_drafter_free(d);
    }
    so_drafter_free(plain);
}

/* --- terms --- */

/* Rows of one price; a first guess of confidence x is accepted with chance x, later ones with half of
 * it. */
static so_draft_terms terms_of(float row, float level, float branch) {
    so_draft_terms t = {.level_price = level, .start_value = 1, .branch_price = branch};
    for (int d = 0; d < SO_TERMS_DEPTHS; d++) {
        t.row_price[d] = row;
        for (int l = 0; l <= SO_TERMS_CLASSES; l++) {
            t.chance[d][l] = l == SO_TERMS_CLASSES ? 0.7f : ((float)l + 0.5f) / SO_TERMS_CLASSES;
            t.sibling[0][d][l] = t.sibling[1][d][l] = t.chance[d][l] / 2;
        }
    }
    return t;
}

/* The values of all nodes, as the terms give them. */
static void node_values(const so_tree *t, const so_draft_terms *terms, double *value) {
    value[0] = 1;
    for (int i = 0; i < t->n_nodes; i++) {
        double left = value[i];
        int rank = 0;
        for (int p = t->nodes[i].first; p >= 0; p = t->proposals[p].next, rank++) {
            const so_proposal *q = &t->proposals[p];
            double confidence =
                (double)(q->kind == SO_Q_POINT ? q->confidence : t->row_confidence[q->row]);
            double x = so_terms_sibling(terms, rank, t->nodes[q->child].depth, confidence);
            value[q->child] = left * x;
            left *= 1 - x;
        }
    }
}

/* With terms a tree has the guesses that pay: all of them are worth their row, cheaper rows give more
 * of them, and where siblings do not pay the tree is the chain. Then it is no longer than the chain
 * with the same terms. */
static void terms_decide_the_width(void **state) {
    (void)state;
    static const float prices[] = {0.01f, 0.03f, 0.08f, 0.2f, 0.35f, 0.95f};
    for (int drawn = 0; drawn < 2; drawn++) {
        int before = SO_TREE_MAX, widest = 0;
        for (size_t i = 0; i < SO_LEN(prices); i++) {
            so_draft_terms terms = terms_of(prices[i], 0.02f, 0.01f);
            so_model_drafter_opts o = options("model(best,nodes=64)", 1);
            so_drafter *d = make(&rigs[0], &o);
            request q;
            double value[SO_TREE_MAX];
            open_request(&q, d, drawn ? 64 : 0);
            q.temp = drawn ? 0.4f : 0;
            so_draft_job job = job_of(&q, 64, 6, 0);
            job.terms = &terms;
            propose(d, &job, 1);
            int n = q.tree.n_nodes, deepest = 0;
            node_values(&q.tree, &terms, value);
            for (int k = 1; k < n; k++) {
                assert_true(value[k] > (double)prices[i]);
                deepest = SO_MAX(deepest, q.tree.nodes[k].depth);
            }
            assert_true(drawn || n <= before); /* draws differ with the number of rows */
            assert_true(job.n_level_rows >= job.n_levels);
            assert_int_equal(job.refused_depth > 0 && n == 1, prices[i] > 0.9f);
            widest = SO_MAX(widest, n - 1 - deepest);
            if (prices[i] >= 0.35f)
                assert_int_equal(n - 1, deepest);
            before = n;
            close_request(&q);
            so_drafter_free(d);
        }
        assert_true(widest >= 4); /* guesses beside the deepest path */
    }
}

/* Expensive levels end a tree after its first; expensive branches keep it from fanning out. */
static void terms_decide_the_levels(void **state) {
    (void)state;
    int rows[2];
    for (int k = 0; k < 3; k++) {
        so_draft_terms terms = terms_of(0.02f, k == 0 ? 9.0f : 0.01f, k == 2 ? 9.0f : 0.001f);
        so_model_drafter_opts o = options("model(best,nodes=64)", 1);
        so_drafter *d = make(&rigs[0], &o);
        request q;
        open_request(&q, d, 0);
        so_draft_job job = job_of(&q, 64, 6, 0);
        job.terms = &terms;
        propose(d, &job, 1);
        if (k == 0)
            assert_true(job.n_levels == 1 && q.tree.n_nodes > 2);
        else
            rows[k - 1] = job.n_level_rows;
        if (k == 2)
            assert_int_equal(job.n_level_rows, job.n_levels); /* one branch per level */
        close_request(&q);
        so_drafter_free(d);
    }
    assert_true(rows[0] > rows[1]);
}

/* --- chains and rounds --- */

/* What one round of a request proposed, in a form that can be compared. */
static void same_trees(const char *what, int round, const so_tree *a, const so_tree *b) {
    bool same = a->n_nodes == b->n_nodes && a->n_proposals == b->n_proposals;
    for (int i = 1; same && i < a->n_nodes; i++)
        same = a->nodes[i].token == b->nodes[i].token && a->nodes[i].parent == b->nodes[i].parent;
    for (int i = 0; same && i < a->n_proposals; i++)
        same = a->proposals[i].child == b->proposals[i].child &&
               a->proposals[i].kind == b->proposals[i].kind &&
               /* on a GPU a chain's is computed there, which rounds differently */
               fabsf(a->proposals[i].confidence - b->proposals[i].confidence) < 1e-5F;
    if (!same)
        fail_msg("%s, round %d: %d nodes and not %d, or other ones", what, round, a->n_nodes,
                 b->n_nodes);
}

/* Accepts a random path of the tree, then one more token. */
static void accept_some(request *q) {
    int node = 0;
    while (q->tree.nodes[node].first >= 0 && below(5) > 0 && q->n < N_CTX - 2) {
        int i = q->tree.nodes[node].first;
        while (q->tree.proposals[i].next >= 0 && below(2))
            i = q->tree.proposals[i].next;
        node = q->tree.proposals[i].child;
        q->text[q->n++] = q->tree.nodes[node].token;
    }
    if (q->n < N_CTX - 1)
        q->text[q->n++] = below(N_VOCAB);
}

static void one_child_is_the_chain(void **state) {
    (void)state;
    static const struct {
        float temp;
        int n_rows;
    } modes[] = {{0, 0}, {0.9f, 0}, {0.9f, 32}}; /* greedy, match, reject */
    for (size_t m = 0; m < SO_LEN(modes); m++)
        for (int narrow = 0; narrow < 2; narrow++) {
            so_drafter *d[2];
            request q[2];
            n_drawn = 0;
            for (int k = 0; k < 2; k++) {
                so_model_drafter_opts o = options(k ? "model(k=1)" : "model", 1);
                d[k] = make(&rigs[narrow], &o);
                open_request(&q[k], d[k], modes[m].n_rows);
                q[k].temp = modes[m].temp;
            }
            for (int round = 0; round < N_ROUNDS; round++) {
                for (int k = 0; k < 2; k++) {
                    so_draft_job job = job_of(&q[k], 6, 6, (uint32_t)round);
                    propose(d[k], &job, 1);
                }
                /* a rank's confidence with noise is that of the chain only without later siblings */
                for (int i = 0; modes[m].temp > 0 && modes[m].n_rows == 0 &&
                                i < q[1].tree.n_proposals && i < q[0].tree.n_proposals;
                     i++)
                    q[1].tree.proposals[i].confidence = q[0].tree.proposals[i].confidence;
                same_trees("k=1", round, &q[1].tree, &q[0].tree);
                accept_some(&q[0]);
                memcpy(q[1].text, q[0].text, sizeof q[0].text);
                q[1].n = q[0].n;
            }
            for (int k = 0; k < 2; k++) {
                close_request(&q[k]);
                so_drafter_free(d[k]);
            }
        }
}

typedef struct setting {
    const char *spec;
    float temp;
    int n_rows;
    bool slotted, narrow;
    int n_pages; /* 0: enough */
} setting;

/* A drafter that serves three requests for many rounds, and one that sees each text for the first
 * time: the same guesses. With few pages a draft may end early, and its levels are the same. */
static void check_rounds(const setting *s) {
    so_model_drafter_opts o = options(s->spec, N_JOBS);
    o.kv_layout = s->slotted ? SO_KV_SLOTTED : SO_KV_PAGED;
    o.prefix_cache = !s->slotted;
    o.n_pages = s->n_pages;
    so_drafter *d = make(&rigs[s->narrow], &o);
    request q[N_JOBS];
    int n_catch_up = 0, n_short = 0;
    n_drawn = 0;
    for (int i = 0; i < N_JOBS; i++) {
        open_request(&q[i], d, s->n_rows);
        q[i].temp = s->temp;
        for (int k = 0; k < 20 * i; k++)
            q[i].text[q[i].n++] = below(N_VOCAB);
    }
    for (int round = 0; round < N_ROUNDS; round++) {
        so_draft_job jobs[N_JOBS];
        int n = 1 + below(N_JOBS);
        for (int i = 0; i < n; i++)
            jobs[i] = job_of(&q[i], 20, 6, (uint32_t)round);
        propose(d, jobs, n);
        for (int i = 0; i < n; i++) {
            so_model_drafter_opts alone = options(s->spec, 1);
            so_drafter *fresh = make(&rigs[s->narrow], &alone);
            request f;
            open_request(&f, fresh, s->n_rows);
            f.temp = s->temp;
            memcpy(f.text, q[i].text, sizeof f.text);
            f.n = q[i].n;
            so_draft_job job = job_of(&f, 20, 6, (uint32_t)round);
            propose(fresh, &job, 1);
            if (s->n_pages == 0)
                same_trees(s->spec, round, &q[i].tree, &f.tree);
            n_short += q[i].tree.n_nodes < f.tree.n_nodes;
            n_catch_up += round > 0 && jobs[i].n_catch_up <= 2;
            close_request(&f);
            so_drafter_free(fresh);
        }
        if (below(6) == 0)
            so_drafter_preempt(d, q[below(N_JOBS)].state);
        for (int i = 0; i < n; i++)
            accept_some(&q[i]);
    }
    assert_true(n_catch_up > N_ROUNDS / 3); /* accepted paths were kept */
    assert_int_equal(n_short > 0, s->n_pages > 0);
    for (int i = 0; i < N_JOBS; i++)
        close_request(&q[i]);
    so_drafter_free(d);
}

static void rounds_change_no_guess(void **state) {
    (void)state;
    static const char *const specs[] = {"model(k=2,nodes=20)", "model(best,nodes=20)",
                                        "model(k=3,distinct,nodes=20)"};
    static const struct {
        float temp;
        int n_rows;
    } modes[] = {{0, 0}, {0.9f, 0}, {0.9f, 64}};
    for (size_t i = 0; i < SO_LEN(specs); i++)
        for (size_t m = 0; m < SO_LEN(modes); m++)
            for (int slotted = 0; slotted < 2; slotted++) {
                setting s = {specs[i], modes[m].temp, modes[m].n_rows, slotted, (i + m) % 2, 0};
                check_rounds(&s);
            }
    check_rounds(&(setting){.spec = "model(best,nodes=20)", .n_pages = 6});
    check_rounds(&(setting){.spec = "model(k=2,nodes=20)", .temp = 1, .n_rows = 64, .n_pages = 6});
}

/* --- limits --- */

static void limits_hold(void **state) {
    (void)state;
    so_model_drafter_opts o = options("model(best,nodes=20)", 1);
    so_drafter *d = make(&rigs[0], &o);
    request q;
    open_request(&q, d, 0);
    for (int limit = 1; limit <= 24; limit++)
        for (int depth = 1; depth <= 8; depth += 3) {
            so_draft_job job = job_of(&q, limit, depth, 0);
            propose(d, &job, 1);
            /* a row gives 16 children at most */
            assert_int_equal(q.tree.n_nodes - 1, SO_MIN(limit, depth == 1 ? 16 : 20));
            for (int i = 0; i < q.tree.n_nodes; i++)
                assert_in_range(q.tree.nodes[i].depth, 0, depth);
        }
    while (q.n < N_CTX - 1) /* the context ends: shallower trees, then none */
        q.text[q.n++] = below(N_VOCAB);
    for (; q.n <= N_CTX; q.n++) {
        so_draft_job job = job_of(&q, 20, 6, 0);
        propose(d, &job, 1);
        for (int i = 0; i < q.tree.n_nodes; i++)
            assert_in_range(q.tree.nodes[i].depth, 0, N_CTX - q.n + 1);
        assert_true(q.tree.n_nodes > 1);
    }
    close_request(&q);
    so_drafter_free(d);
    so_err err = {0};
    o = options("model(k=25,nodes=30)", 1); /* the vocabulary has 24 tokens */
    assert_int_equal(so_model_drafter_create(rigs[0].m, &o, NULL, &d, &err), SO_ERANGE);
    assert_non_null(strstr(err.msg, "k=25: the draft model has logits for 24 tokens only"));
}

static void draft_job(so_drafter *d, request *r) {
    so_draft_job job = job_of(r, 8, 8, 0);
    propose(d, &job, 1);
}

/* A text that is shorter than that of the round before has the guesses of one that is new. */
static void a_text_may_become_shorter(void **state) {
    (void)state;
    so_model_drafter_opts o = options("model", 2);
    so_drafter *d = make(&rigs[0], &o);
    static const int LATER[] = {59, 30, 7};
    for (size_t i = 0; i < SO_LEN(LATER); i++) {
        request old, fresh;
        open_request(&old, d, 0);
        open_request(&fresh, d, 0);
        for (old.n = 7; old.n < 60; old.n++)
            old.text[old.n] = (int32_t)(old.n * 11 % N_VOCAB);
        draft_job(d, &old);
        old.n = fresh.n = LATER[i];
        memcpy(fresh.text, old.text, sizeof fresh.text);
        draft_job(d, &old);
        draft_job(d, &fresh);
        assert_true(old.tree.n_nodes > 1);
        assert_int_equal(old.tree.n_nodes, fresh.tree.n_nodes);
        for (int k = 0; k < old.tree.n_nodes; k++)
            assert_int_equal(old.tree.nodes[k].token, fresh.tree.nodes[k].token);
        close_request(&old);
        close_request(&fresh);
    }
    so_drafter_free(d);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(best_first_has_the_most_likely_paths),
        cmocka_unit_test(products_have_their_counts),
        cmocka_unit_test(files_give_the_shape),
        cmocka_unit_test(bad_files_are_refused),
        cmocka_unit_test(inner_trees_save_passes),
        cmocka_unit_test(terms_decide_the_width),
        cmocka_unit_test(terms_decide_the_levels),
        cmocka_unit_test(one_child_is_the_chain),
        cmocka_unit_test(rounds_change_no_guess),
        cmocka_unit_test(limits_hold),
        cmocka_unit_test(a_text_may_become_shorter),
    };
    return cmocka_run_group_tests(tests, open_models, close_models);
}

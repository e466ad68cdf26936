/* Every drafter of the product through the lossless suite, on targets small enough for enumeration.
 *
 *   reject    drafters × lengths 1 to 8 × transforms: the distribution of two to four tokens equals
 *             plain sampling, by exact enumeration of the drafter's random numbers and all tests
 *   lenient   no text of n tokens is more likely than p/Lⁿ
 *   match     the text equals plain sampling, token for token, for every seed
 *   rates     guesses are accepted as often as the formulas predict
 *   chance    the same by sampling a million texts with the random numbers of production
 *   mutants   known errors, each with the check that detects it
 *
 * The target is a table of rows; each goes through the sampling pipeline in the context of its own
 * path, so penalties include earlier guesses. The draft model is a real one over the toy
 * vocabulary. The full product is run; where that is slow, a part of it in which every pair of
 * (drafter, length, transform) occurs. */
#include "rig.h"
#include "so_lossless.h"

#include <math.h>
#include <stdio.h>

#include "base/file.h"
#include "draft/model.h"
#include "draft/spec.h"
#include "so_rig.h"
#include "so_shape.h"
#include "verify/theory.h"

static bool slow; /* a sanitizer, or no kernels for this processor (perhaps an emulator) */

/* --- a toy setting: target, draft model, tables --- */

enum { MIN_V = 2, MAX_V = 4, N_PROMPT = 4 };

typedef struct world {
    int n_vocab;
    so_toy target;
    so_rig draft, narrow; /* narrow: has logits for every other token only */
    char *tables[2];      /* unigram, bigram */
    int32_t prompt[N_PROMPT];
} world;

static world worlds[MAX_V + 1];
static char *dir, *tree_file;

static char *count_table(int order, int n_vocab) {
    static const int32_t text[] = {0, 1, 0, 2, 1, 1, 0, 1, 2, 0, 3, 1, 0, 0, 3, 2, 2, 1};
    so_table_counter *counter = NULL;
    so_table *t = NULL;
    so_err err = {0};
    char name[32];
    int32_t ids[SO_LEN(text)];
    for (size_t i = 0; i < SO_LEN(text); i++)
        ids[i] = text[i] % n_vocab;
    snprintf(name, sizeof name, "%d-%d.tbl", order, n_vocab);
    char *path = so_path_join(dir, name);
    SO_OK_OR_FAIL(so_table_counter_create(order, n_vocab, &counter, &err), err);
    SO_OK_OR_FAIL(so_table_counter_add(counter, ids, SO_LEN(ids), &err), err);
    SO_OK_OR_FAIL(so_table_counter_finish(counter, 0, &t, &err), err);
    SO_OK_OR_FAIL(so_table_save(t, path, &err), err);
    so_table_free(t);
    return path;
}

/* Two guesses below the root; below the first of them a chain of two. */
static char *write_tree(void) {
    static const char json[] =
        "{\"sooth_tree\": 1, \"drafter\": \"model\", \"depth\": 3, \"nodes\": ["
        "{\"parent\": -1, \"rank\": 0}, {\"parent\": 0, \"rank\": 0},"
        "{\"parent\": -1, \"rank\": 1}, {\"parent\": 1, \"rank\": 0}]}";
    so_out_file *f = NULL;
    so_err err = {0};
    char *path = so_path_join(dir, "tree.json");
    SO_OK_OR_FAIL(so_out_begin(path, &f, &err), err);
    SO_OK_OR_FAIL(so_out_write(f, json, sizeof json - 1, &err), err);
    SO_OK_OR_FAIL(so_out_commit(f, &err), err);
    return path;
}

static void open_world(world *w, int n_vocab) {
    so_shape shape = {.d_model = 16,
                      .n_layers = 1,
                      .n_heads = 2,
                      .n_heads_kv = 1,
                      .head_dim = 8,
                      .d_ff = 16,
                      .n_vocab = n_vocab,
                      .n_ctx = SO_TOY_MAX_TEXT,
                      .seed = 40 + (uint64_t)n_vocab};
    w->n_vocab = n_vocab;
    so_toy_init(&w->target, n_vocab, 70 + (uint64_t)n_vocab, n_vocab > 2 ? 0.15 : 0, 1.3);
    char *path = so_shape_write(dir, &shape);
    so_rig_opts o = {.level = so_cpu_best_level(), .n_pages = 2, .max_rows = 32};
    so_rig_open(&w->draft, path, &o);
    free(path);
    static const unsigned char mask[] = {
        [2] = 1 << 1, [3] = 1 << 0 | 1 << 2, [4] = 1 << 1 | 1 << 3};
    shape.vocab_mask = &mask[n_vocab];
    shape.n_vocab_mask = 1;
    path = so_shape_write(dir, &shape);
    o.model.draft = true;
    so_rig_open(&w->narrow, path, &o);
    free(path);
    for (int order = 1; order <= 2; order++)
        w->tables[order - 1] = count_table(order, n_vocab);
    for (int i = 0; i < N_PROMPT; i++)
        w->prompt[i] = (int32_t[]){0, 1, 0, 1}[i] % n_vocab;
}

static int open_worlds(void **state) {
    (void)state;
    slow = SO_TEST_SANITIZED || so_cpu_best_level() == SO_CPU_SCALAR;
    dir = so_test_tmp();
    tree_file = write_tree();
    for (int v = MIN_V; v <= MAX_V; v++)
        open_world(&worlds[v], v);
    return 0;
}

static int close_worlds(void **state) {
    (void)state;
    for (int v = MIN_V; v <= MAX_V; v++) {
        so_rig_close(&worlds[v].draft);
        so_rig_close(&worlds[v].narrow);
        free(worlds[v].tables[0]);
        free(worlds[v].tables[1]);
    }
    free(tree_file);
    so_test_tmp_free(dir);
    return 0;
}

/* --- drafters --- */

typedef struct drafter_kind {
    const char *spec; /* U, B and T are replaced by the files of tables and of a tree; NULL: a user
                         function, and TREE: one that returns a tree */
    float draft_temp; /* of `model`; negative: that of the request */
    bool model;       /* has a cost in passes */
    bool draws;       /* samples its guesses in reject */
    bool wide;        /* samples more than one token per depth */
    bool narrow;      /* `model` has logits for a vocabulary subset */
    float p_min;
} drafter_kind;

static const char TREE[] = "user (tree)";

static const drafter_kind DRAFTERS[] = {
    {"none", -1, false, false, false, false, 0},
    {"ngram", -1, false, false, false, false, 0},
    {"ngram(draw)", -1, false, true, false, false, 0},
    {"lookup(min=1)", -1, false, false, false, false, 0},
    {"corpus(min=1,mb=1)", -1, false, false, false, false, 0},
    {"unigram(U)", -1, false, false, false, false, 0},
    {"unigram(U,draw)", -1, false, true, false, false, 0},
    {"bigram(B)", -1, false, false, false, false, 0},
    {"bigram(B,draw)", -1, false, true, false, false, 0},
    {"predict", -1, false, false, false, false, 0},
    {"random", -1, false, true, false, false, 0},
    {"oracle(0.5)", -1, false, false, false, false, 0},
    {"auto", -1, false, false, false, false, 0},
    {NULL, -1, false, false, false, false, 0},
    {TREE, -1, false, false, false, false, 0},
    {"lookup(min=3),ngram", -1, false, false, false, false, 0},
    {"lookup(min=3),bigram(B,draw)", -1, false, true, false, false, 0},
    {"ngram+lookup(min=1)", -1, false, false, false, false, 0},
    {"ngram(draw)+random", -1, false, true, true, false, 0},
    {"random+predict", -1, false, true, false, false, 0},
    {"model", -1, true, true, false, false, 0},        /* match: with the target's noise */
    {"model", 0, true, false, false, false, 0},        /* greedy */
    {"model", 0.6f, true, true, false, false, 0},      /* a temperature of its own */
    {"model(ngram)", -1, true, true, false, false, 0}, /* with an inner drafter */
    {"model(model)", -1, true, true, false, false, 0},
    {"lookup(min=3),model", -1, true, true, false, false, 0},
    {"model+lookup(min=1)", -1, true, true, false, false, 0},
    {"model", -1, true, true, false, true, 0},
    {"model", 0, true, false, false, true, 0},
    {"model", -1, true, true, false, true, 0.6f},
    {"model(ngram)", -1, true, true, false, true, 0},
    {"model+lookup(min=1)", -1, true, true, false, true, 0},
    /* Trees: Cartesian products and best-first; sampled with and without replacement. */
    {"model(k=2,nodes=4)", -1, true, true, true, false, 0},
    {"model(k=2,nodes=4)", 0, true, false, false, false, 0},
    {"model(k=2,distinct,nodes=4)", -1, true, true, true, false, 0},
    {"model(k=3,nodes=4)", -1, true, true, true, true, 0.6f},
    {"model(best,nodes=4)", -1, true, true, true, false, 0},
    {"model(best,nodes=6)", 0, true, false, false, true, 0},
    {"model(best,nodes=4)", -1, true, true, true, true, 0},
    {"model(tree=T)", -1, true, true, true, false, 0},
    {"model(tree=T)", 0, true, false, false, true, 0},
    {"model(k=2,nodes=3)+lookup(min=1)", -1, true, true, true, false, 0},
    /* The whole tree of an inner drafter is checked by the draft model. */
    {"model(model(best,nodes=3))", -1, true, true, false, false, 0},
    {"ngram+model(best,nodes=3)", 0.6f, true, true, true, false, 0},
    /* Two draft models merged, the second with a vocabulary subset. */
    {"model(k=1,nodes=2)+model(narrow,k=2,nodes=2)", -1, true, true, true, false, 0},
    {"model+model(narrow)", 0, true, false, false, false, 0},
};
enum { N_DRAFTERS = SO_LEN(DRAFTERS) };

static const char *name_of(const drafter_kind *k) { return k->spec ? k->spec : "user"; }

static const drafter_kind *kind(const char *spec, bool narrow) {
    for (int d = 0; d < N_DRAFTERS; d++)
        if (strcmp(name_of(&DRAFTERS[d]), spec) == 0 && DRAFTERS[d].narrow == narrow)
            return &DRAFTERS[d];
    fail_msg("no drafter %s", spec);
    return NULL;
}

typedef struct maker {
    const world *w;
    const drafter_kind *kind;
} maker;

static int make_model(void *user, const so_spec *s, const so_spec_node *n, so_drafter *inner,
                      so_drafter **out, so_err *err) {
    const maker *m = user;
    (void)s;
    if (n->name == SO_SPEC_AUTO)
        return SO_ENOTFOUND;
    assert_int_equal(n->name, SO_SPEC_MODEL);
    so_model_drafter_opts o = {.n_vocab = m->w->n_vocab,
                               .n_ctx = SO_TOY_MAX_TEXT,
                               .n_parallel = 1,
                               .n_batch = 16,
                               .max_draft = 8,
                               .kv_dtype = SO_DTYPE_F32,
                               .temp = m->kind->draft_temp,
                               .p_min = m->kind->p_min};
    if (so_model_opts_from_spec(s, n, &o, err) != SO_OK)
        return err->code;
    bool narrow = m->kind->narrow || n->file_len > 0;
    const so_rig *draft = narrow ? &m->w->narrow : &m->w->draft;
    o.k = SO_MIN(o.k, draft->width);
    return so_model_drafter_create(draft->m, &o, inner, out, err);
}

/* Guesses that no other drafter makes: the text backwards. */
static int backwards(void *user, const int32_t *tokens, int n, int n_prompt, int32_t *out,
                     int max) {
    (void)user;
    (void)n_prompt;
    for (int i = 0; i < max; i++)
        out[i] = tokens[n - 1 - i % n];
    return max;
}

/* The same as two chains; equal guesses share nodes. */
static int two_chains(void *user, const so_draft_query *q, int32_t *ids, int32_t *parents) {
    int n = SO_MIN(q->max, 2 * q->max_depth);
    (void)user;
    for (int i = 0; i < n; i++) {
        ids[i] = q->tokens[(q->n_tokens - 1 - i * i % 3) % q->n_tokens];
        parents[i] = i < 2 ? -1 : i - 2;
    }
    return n;
}

typedef struct subject {
    so_draft_set set;
    so_corpus *corpus;
    so_lossless_real real;
    so_lossless_case c;
} subject;

static void open_drafter(subject *s, const world *w, const drafter_kind *k) {
    char text[4096] = "";
    so_err err = {0};
    so_spec spec;
    if (!k->spec || k->spec == TREE) {
        s->set.root = s->set.leaves[0] = k->spec ? so_callback_create_tree("user", two_chains, NULL)
                                                 : so_callback_create("user", backwards, NULL);
        s->set.n_leaves = 1;
        return;
    }
    for (const char *at = k->spec; *at; at++) {
        size_t len = strlen(text);
        if (*at == 'U' || *at == 'B')
            snprintf(text + len, sizeof text - len, "%s", w->tables[*at == 'B']);
        else if (*at == 'T')
            snprintf(text + len, sizeof text - len, "%s", tree_file);
        else
            snprintf(text + len, sizeof text - len, "%c", *at);
    }
    so_draft_config cfg = {
        .n_vocab = w->n_vocab, .corpus = &s->corpus, .make = make_model, .user = &(maker){w, k}};
    SO_OK_OR_FAIL(so_spec_parse(so_str_c(text), &spec, &err), err);
    SO_OK_OR_FAIL(so_spec_build(&spec, &cfg, &s->set, &err), err);
    if (s->corpus)
        so_corpus_add(s->corpus, (int32_t[]){0, 1, 0, 0, 1, 1, 0, 1}, 8);
}

/* The expected text of `predict` and `oracle`: partly right. */
static const int32_t EXPECTED[] = {1, 0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 1};

static void open_subject(subject *s, const world *w, const drafter_kind *k, int gamma,
                         const so_sample_params *sample) {
    int max_nodes = 0;
    *s = (subject){0};
    open_drafter(s, w, k);
    for (int i = 0; i < s->set.n_leaves; i++)
        max_nodes += s->set.leaves[i]->tree_nodes ? s->set.leaves[i]->tree_nodes : gamma;
    s->real = (so_lossless_real){.drafter = s->set.root,
                                 .max_nodes = max_nodes,
                                 .max_depth = gamma,
                                 .expected = EXPECTED,
                                 .n_expected = SO_LEN(EXPECTED)};
    s->c = (so_lossless_case){.name = name_of(k),
                              .target = &w->target,
                              .n_out = 3,
                              .sample = sample,
                              .prompt = w->prompt,
                              .n_prompt = N_PROMPT};
    so_lossless_use(&s->c, &s->real);
}

static void close_subject(subject *s) {
    so_lossless_real_end(&s->real);
    so_draft_set_deinit(&s->set);
    so_corpus_free(s->corpus);
}

/* --- transforms --- */

static const char *const TRANSFORMS[] = {
    "temperature 1", "temperature 0.6", "top-k",      "top-p",     "min-p",        "repetition",
    "presence",      "frequency",       "logit bias", "all of it", "temperature 0"};
enum { N_TRANSFORMS = SO_LEN(TRANSFORMS), ALL_OF_IT = 9 };

static so_sample_params transform(int i, int n_vocab) {
    static so_bias bias[2];
    bias[0] = (so_bias){1, 1.2f};
    bias[1] = (so_bias){n_vocab - 1, n_vocab > 2 ? -INFINITY : -0.8f};
    so_sample_params p;
    so_sample_defaults(&p);
    bool all = i == ALL_OF_IT;
    p.temp = i == 1 ? 0.6f : all ? 0.8f : i == 10 ? 0 : 1;
    p.top_k = i == 2 ? (n_vocab > 2 ? 2 : 1) : all ? n_vocab - 1 : 0;
    p.top_p = i == 3 ? 0.7f : all ? 0.95f : 1;
    p.min_p = i == 4 ? 0.4f : all ? 0.05f : 0;
    p.repeat_penalty = i == 5 ? 1.5f : all ? 1.3f : 1;
    p.presence_penalty = i == 6 ? 0.9f : all ? 0.4f : 0;
    p.frequency_penalty = i == 7 ? 0.7f : all ? 0.3f : 0;
    p.repeat_last_n = all ? 3 : -1; /* the window moves along the path */
    p.bias = bias;
    p.n_bias = i == 8 || all ? 2 : 0;
    return p;
}

/* Whether the reduced grid contains the cell: every pair of two of the three occurs. */
static bool covered(int drafter, int gamma, int t) {
    return !slow || (drafter + gamma + t) % 8 == 0;
}

/* The number of outcomes multiplies with each sample: more samples, smaller vocabulary. */
static int vocabulary(const drafter_kind *k, int gamma) {
    if (!k->draws)
        return 3;
    return k->wide ? (gamma < 3 ? 3 : 2) : gamma < 4 ? 4 : gamma < 6 ? 3 : 2;
}

static int tokens_out(const drafter_kind *k, int gamma) {
    return !k->draws && gamma < 5 ? 4 : gamma == 5 ? 2 : 3;
}

/* A cell of the grid of checks. */
typedef struct place {
    const drafter_kind *k;
    int gamma, t;
    char text[160]; /* for messages */
} place;
typedef void check_place(subject *s, const place *at, void *user);

/* Calls check for every drafter, length and transform: with enumerated outcomes in the smallest
 * setting that shows them, else in the largest. Returns the number of calls. */
static int each_place(bool enumerated, check_place *check, void *user) {
    int n = 0;
    for (int d = 0; d < N_DRAFTERS; d++)
        for (int gamma = 1; gamma <= 8; gamma++)
            for (int t = 0; t < N_TRANSFORMS; t++) {
                place at = {.k = &DRAFTERS[d], .gamma = gamma, .t = t};
                if (enumerated && (!covered(d, gamma, t) || (at.k->wide && gamma > 4)))
                    continue;
                int v = enumerated ? vocabulary(at.k, gamma) : MAX_V;
                so_sample_params p = transform(t, v);
                subject s;
                snprintf(at.text, sizeof at.text, "%s, length %d, %s", name_of(at.k), gamma,
                         TRANSFORMS[t]);
                open_subject(&s, &worlds[v], at.k, gamma, &p);
                check(&s, &at, user);
                close_subject(&s);
                n++;
            }
    return n;
}

/* --- reject --- */

static void check_reject(subject *s, const place *at, void *user) {
    double *worst = user;
    s->c.n_out = tokens_out(at->k, at->gamma);
    double gap = so_lossless_gap(&s->c);
    if (!(gap <= SO_LOSSLESS_TOLERANCE))
        fail_msg("%s: off by %g", at->text, gap);
    *worst = SO_MAX(*worst, gap);
}

static void reject_is_exact(void **state) {
    (void)state;
    double worst = 0;
    int n = each_place(true, check_reject, &worst);
    print_message("reject: %d cases enumerated, none off by more than %.1e\n", n, worst);
}

/* Lengths that depend on the peaks of rows, as with the planner's terms: no token is sampled from a
 * flat row, and only a peaked one is followed by another guess. */
static void peaked_terms(so_draft_terms *t) {
    for (int d = 0; d < SO_TERMS_DEPTHS; d++) {
        for (int l = 0; l <= SO_TERMS_CLASSES; l++)
            t->chance[d][l] = l == SO_TERMS_CLASSES ? 1.0f : ((float)l + 0.5f) / SO_TERMS_CLASSES;
        t->row_price[d] = d == 0 ? 0.6f : 0.45f;
    }
    t->level_price = 0.05f;
    t->start_value = 1;
}

static void rows_may_end_drafts(void **state) {
    (void)state;
    double worst = 0;
    int n_refused = 0, n_followed = 0;
    so_draft_terms terms;
    peaked_terms(&terms);
    const drafter_kind *kinds[] = {kind("model", false), kind("model", true),
                                   kind("model(model)", false)};
    for (size_t k = 0; k < SO_LEN(kinds); k++)
        for (int t = 0; t < N_TRANSFORMS - 1; t++) {
            subject s;
            so_sample_params p = transform(t, 4);
            open_subject(&s, &worlds[4], kinds[k], 4, &p);
            s.real.terms = &terms;
            double gap = so_lossless_gap(&s.c);
            if (!(gap <= SO_LOSSLESS_TOLERANCE))
                fail_msg("%s: off by %g", TRANSFORMS[t], gap);
            worst = SO_MAX(worst, gap);
            n_refused += s.real.n_refused;
            n_followed += s.real.n_followed;
            close_subject(&s);
        }
    print_message("lengths by rows: off by %.1e at most; %d rows refused, %d followed\n", worst,
                  n_refused, n_followed);
    assert_true(n_refused > 0 && n_followed > 0);
}

/* The width of a sampled tree by the peaks of its rows: a flat row gets no draw or one, a peaked one
 * two. */
static void tree_terms(so_draft_terms *t) {
    for (int d = 0; d < SO_TERMS_DEPTHS; d++) {
        for (int l = 0; l <= SO_TERMS_CLASSES; l++) {
            t->chance[d][l] = l == SO_TERMS_CLASSES ? 1.0f : ((float)l + 0.5f) / SO_TERMS_CLASSES;
            for (int r = 0; r < SO_TERMS_RANKS - 1; r++)
                t->sibling[r][d][l] = t->chance[d][l];
        }
        t->row_price[d] = d == 0 ? 0.55f : 0.13f;
    }
    t->level_price = 0.01f;
    t->branch_price = 0.005f;
    t->start_value = 1;
}

static void rows_may_decide_widths(void **state) {
    (void)state;
    double worst = 0;
    int n_refused = 0, n_followed = 0;
    so_draft_terms terms = {0};
    tree_terms(&terms);
    const drafter_kind *kinds[] = {
        kind("model(k=2,nodes=4)", false), kind("model(k=2,distinct,nodes=4)", false),
        kind("model(best,nodes=4)", false), kind("model(best,nodes=4)", true)};
    for (size_t k = 0; k < SO_LEN(kinds); k++)
        for (int t = 0; t < N_TRANSFORMS - 1; t++) {
            subject s;
            so_sample_params p = transform(t, 3);
            open_subject(&s, &worlds[3], kinds[k], 3, &p);
            s.real.terms = &terms;
            s.c.n_out = 2;
            double gap = so_lossless_gap(&s.c);
            if (!(gap <= SO_LOSSLESS_TOLERANCE))
                fail_msg("%s, %s: off by %g", name_of(kinds[k]), TRANSFORMS[t], gap);
            worst = SO_MAX(worst, gap);
            n_refused += s.real.n_refused;
            n_followed += s.real.n_followed;
            close_subject(&s);
        }
    print_message("widths by rows: off by %.1e at most; %d rows refused, %d followed\n", worst,
                  n_refused, n_followed);
    assert_true(n_refused > 0 && n_followed > 0);
}

/* An inner drafter that records its sampling parameters. */
static float inner_temp, inner_sample_temp;
static int inner_n_bias;
static int inner_open(so_drafter *d, const so_draft_text *text, void **state, so_err *err) {
    (void)d;
    (void)text;
    (void)err;
    *state = NULL;
    return 0;
}
static void inner_close(so_drafter *d, void *state) {
    (void)d;
    (void)state;
}
static void inner_free(so_drafter *d) { (void)d; }
static int inner_propose(so_drafter *d, so_draft_job *jobs, int n, so_err *err) {
    (void)d;
    (void)n;
    (void)err;
    inner_temp = jobs->temp;
    inner_sample_temp = jobs->sample->temp;
    inner_n_bias = jobs->sample->n_bias;
    return 0;
}

/* In `reject` the inner drafter is greedy, with bias and penalties: the target's noise decides
 * tokens that are still to be sampled. In `match` it uses that noise. */
static void inner_drafter_uses_no_noise(void **state) {
    (void)state;
    static const so_drafter_vt vt = {.name = "inner",
                                     .free = inner_free,
                                     .open = inner_open,
                                     .close = inner_close,
                                     .propose = inner_propose};
    so_drafter inner = {.vt = &vt};
    const drafter_kind *k = kind("model", false);
    so_sample_params p = transform(ALL_OF_IT, 4);
    for (int rows = 0; rows < 2; rows++) {
        subject s = {0};
        so_err err = {0};
        so_tree *t = SO_NEW(so_tree);
        so_spec spec;
        so_spec_node node = {.name = SO_SPEC_MODEL};
        SO_OK_OR_FAIL(make_model(&(maker){&worlds[4], k}, &spec, &node, &inner, &s.set.root, &err),
                      err);
        s.real = (so_lossless_real){.drafter = s.set.root, .max_nodes = 4, .max_depth = 4};
        s.c = (so_lossless_case){.target = &worlds[4].target,
                                 .sample = &p,
                                 .prompt = worlds[4].prompt,
                                 .n_prompt = N_PROMPT};
        so_lossless_use(&s.c, &s.real);
        so_tree_init(t, 4, rows ? 4 : 0);
        so_tree_reset(t, worlds[4].prompt[N_PROMPT - 1], N_PROMPT - 1);
        s.c.begin(s.c.user, worlds[4].prompt, N_PROMPT, 1);
        s.c.propose(s.c.user, worlds[4].prompt, N_PROMPT, t, &(so_verify_rng){0});
        assert_true(t->n_nodes > 1);
        assert_true(inner_temp == (rows ? 0 : p.temp) && inner_sample_temp == inner_temp);
        assert_int_equal(inner_n_bias, p.n_bias);
        so_lossless_real_end(&s.real);
        so_drafter_free(s.set.root);
        so_tree_deinit(t);
        free(t);
    }
}

/* --- lenient --- */

static double lenience;
static void lenient_verify(const so_tree *t, so_verify_row *row, void *user, so_verify_rng *chance,
                           double *scratch, so_verdict *out) {
    so_verify_reject(t, row, user, chance, lenience, scratch, out);
}

/* The largest ratio of a text's probability to p/Lⁿ; *gap: how lossy the mode is. */
static double excess(const so_lossless_case *c, double *gap) {
    int n = so_lossless_n_texts(c);
    double *plain = SO_NEW_N(double, n), *spec = SO_NEW_N(double, n), most = 0;
    so_lossless_plain(c, plain);
    so_lossless_enumerate(c, spec);
    for (int i = 0; i < n; i++) {
        double bound = plain[i] / pow(lenience, c->n_out);
        if (spec[i] > 0)
            most = SO_MAX(most, bound > 0 ? spec[i] / bound : INFINITY);
        *gap = SO_MAX(*gap, fabs(spec[i] - plain[i]));
    }
    free(plain);
    free(spec);
    return most;
}

static void check_lenient(subject *s, const place *at, void *user) {
    s->c.n_out = 2;
    s->c.verify = lenient_verify;
    lenience = at->gamma % 2 ? 0.3 : 0.7;
    double most = excess(&s->c, user);
    if (most > 1 + 1e-12)
        fail_msg("%s: %g times as likely as p/L allows", at->text, most);
}

static void lenient_keeps_its_bound(void **state) {
    (void)state;
    double gap = 0;
    each_place(true, check_lenient, &gap);
    assert_true(gap > 0.05); /* it is indeed lossy */
}

/* --- match --- */

enum { MATCH_TOKENS = 14 };

static void check_match(subject *s, const place *at, void *user) {
    int *n = user, seeds = (at->k->model ? 4 : 40) / (slow ? 4 : 1);
    int different = so_lossless_count_different(&s->c, MATCH_TOKENS, seeds, 1000 * (uint64_t)at->t);
    if (different)
        fail_msg("%s: %d of %d texts differ", at->text, different, seeds);
    *n += seeds;
}

static void match_is_exact(void **state) {
    (void)state;
    int n = 0;
    each_place(false, check_match, &n);
    print_message("match: %d texts of %d tokens, all equal\n", n, MATCH_TOKENS);
}

/* --- rates --- */

/* Guesses tested and accepted, and the acceptance that the formula predicts from their contexts.
 * The outcomes are a martingale, so the sum of a(1−a) is the variance. */
typedef struct rate {
    const world *w;
    const so_lossless_case *c;
    so_lossless_rows *rows;
    const so_sample_params *sample;
    bool match;
    so_sampler *sampler;
    double tested, accepted, expected, variance;
} rate;

/* The draft model's own distribution after a text. */
static void draft_row(const rate *r, const int32_t *text, int n, float *row) {
    float logits[SO_TOY_MAX_TEXT * MAX_V];
    so_err err = {0};
    so_rig *m = (so_rig *)(uintptr_t)&r->w->draft;
    so_seq *seq = so_seq_create(m->kv);
    so_rig_chain(m, seq, text, n, logits);
    so_seq_free(seq);
    so_sample_context ctx = {text, n, N_PROMPT};
    SO_OK_OR_FAIL(so_sample_distribution(r->sampler, r->sample,
                                         logits + (size_t)(n - 1) * (size_t)r->w->n_vocab, &ctx,
                                         row, &err),
                  err);
}

static void normalise(const float *row, int n, double *out) {
    double mass = 0;
    for (int i = 0; i < n; i++)
        mass += out[i] = (double)row[i];
    for (int i = 0; i < n; i++)
        out[i] /= mass;
}

/* The distribution that a proposal of `parent` was drawn from, given the draws before it. */
static void proposal_row(const so_tree *t, int parent, int proposal, double *q) {
    const so_proposal *s = &t->proposals[proposal];
    float row[MAX_V] = {0};
    if (s->kind == SO_Q_POINT)
        row[t->nodes[s->child].token] = 1;
    else
        memcpy(row, so_tree_row(t, s->row), (size_t)t->n_vocab * sizeof *row);
    for (int k = t->nodes[parent].first; s->kind == SO_Q_ROW_SET && k != proposal;
         k = t->proposals[k].next)
        if (t->proposals[k].kind == SO_Q_ROW_SET && t->proposals[k].row == s->row)
            row[t->nodes[t->proposals[k].child].token] = 0;
    normalise(row, t->n_vocab, q);
}

/* `reject`: a proposal is tested against what those before it left of p. */
static double formula(const rate *r, const so_tree *t, int proposal, const int32_t *path, int n) {
    int V = t->n_vocab, parent = t->nodes[t->proposals[proposal].child].parent;
    float row[MAX_V];
    double p[MAX_V], q[MAX_V];
    normalise(so_lossless_rows_get(r->rows, path, n), V, p);
    if (r->match) {
        draft_row(r, path, n, row);
        normalise(row, V, q);
        return so_theory_accept_match(p, q, V);
    }
    for (int k = t->nodes[parent].first; k != proposal; k = t->proposals[k].next) {
        proposal_row(t, parent, k, q);
        for (int i = 0; i < V; i++)
            row[i] = (float)SO_MAX(0, p[i] - q[i]);
        normalise(row, V, p);
    }
    proposal_row(t, parent, proposal, q);
    return so_theory_accept_reject(p, q, V);
}

static void watch_rate(void *watcher, const so_tree *t, const so_verdict *v, const int32_t *text,
                       int n) {
    rate *r = watcher;
    for (int i = 0; i < v->n_tested; i++) {
        int32_t path[SO_TOY_MAX_TEXT];
        int parent = t->nodes[t->proposals[v->tested[i]].child].parent;
        double a = formula(r, t, v->tested[i], path, so_toy_path(t, parent, text, n, path));
        r->expected += a;
        r->variance += a * (1 - a);
    }
    r->tested += v->n_tested;
    r->accepted += v->n_accepted;
}

/* Four standard errors: one false alarm in 16,000 if the seed were not fixed. */
static void check_rate(const drafter_kind *k, int t, bool match, int n_texts) {
    subject s;
    const world *w = &worlds[MAX_V];
    so_sample_params p = transform(t, MAX_V);
    open_subject(&s, w, k, 3, &p);
    rate r = {.w = w, .c = &s.c, .sample = &p, .match = match};
    r.rows = so_lossless_rows_create(&s.c);
    r.sampler = so_sampler_create(MAX_V);
    s.c.watch = watch_rate;
    s.c.watcher = &r;
    if (match)
        assert_int_equal(so_lossless_count_different(&s.c, MATCH_TOKENS, n_texts, 77), 0);
    else
        assert_true(so_lossless_chi2(&s.c, n_texts, 77) >= SO_LOSSLESS_FALSE_ALARM);
    print_message("%s %-16s %-14s accepted %.4f, formula %.4f, %.0f tests\n",
                  match ? "match " : "reject", name_of(k), TRANSFORMS[t], r.accepted / r.tested,
                  r.expected / r.tested, r.tested);
    if (fabs(r.accepted - r.expected) > 4 * sqrt(r.variance))
        fail_msg("accepted %.0f of %.0f, the formula predicts %.1f", r.accepted, r.tested,
                 r.expected);
    so_lossless_rows_free(r.rows);
    so_sampler_free(r.sampler);
    close_subject(&s);
}

static void acceptance_is_the_formulas(void **state) {
    (void)state;
    int n = slow ? 200 : 4000;
    for (int d = 0; d < N_DRAFTERS; d++)
        for (int t = 0; DRAFTERS[d].draws && t < N_TRANSFORMS - 1; t += ALL_OF_IT)
            check_rate(&DRAFTERS[d], t, false, DRAFTERS[d].model ? n : 20 * n);
    for (int t = 0; t < N_TRANSFORMS - 1; t += slow ? 9 : 1)
        check_rate(kind("model", false), t, true, n / 5);
}

/* --- chance --- */

/* A correct drafter fails once in a million runs. */
static void sampled_texts_are_exact(void **state) {
    (void)state;
    for (int d = 0; d < N_DRAFTERS; d++) {
        const drafter_kind *k = &DRAFTERS[d];
        if (!k->draws)
            continue;
        subject s;
        so_sample_params p = transform(ALL_OF_IT, 3);
        open_subject(&s, &worlds[3], k, 3, &p);
        int n = (k->model ? 20000 : 1000000) / (slow ? 20 : 1);
        double tail = so_lossless_chi2(&s.c, n, 900 + (uint64_t)d);
        print_message("chi-square, %7d texts: %-28s p = %.3g\n", n, name_of(k), tail);
        if (tail < SO_LOSSLESS_FALSE_ALARM)
            fail_msg("%s: p = %g", name_of(k), tail);
        close_subject(&s);
    }
}

/* --- mutants --- */

typedef enum mutation {
    SOUND,
    DROP_LOW_Q,   /* the draft ends at a sampled token of low q: p_min applied to the sample */
    WRONG_ROW,    /* sampled from one row, declared with another */
    POINT_AS_ROW, /* the most frequent token, declared as sampled from the counts */
    CONFIDENCE_FROM_SAMPLE, /* the confidence of a row depends on the token sampled from it */
} mutation;

/* A real drafter whose proposals are falsified. */
typedef struct falsifier {
    so_drafter base;
    so_drafter *inner;
    mutation mutation;
} falsifier;

static int false_open(so_drafter *d, const so_draft_text *text, void **state, so_err *err) {
    so_drafter *inner = ((falsifier *)d)->inner;
    return inner->vt->open(inner, text, state, err);
}
static void false_close(so_drafter *d, void *state) {
    so_drafter *inner = ((falsifier *)d)->inner;
    inner->vt->close(inner, state);
}
static void false_observe(so_drafter *d, void *state, const int32_t *tokens, int n) {
    so_drafter_observe(((falsifier *)d)->inner, state, tokens, n);
}

/* Copies the chain with the error. */
static void falsify(mutation m, const so_tree *from, so_tree *t) {
    for (int i = 0, node = 0; i < from->n_proposals; i++) {
        const so_proposal *p = &from->proposals[i];
        int32_t x = from->nodes[p->child].token;
        int row = so_tree_new_row(t);
        float *q = so_tree_row(t, row);
        for (int k = 0; k < t->n_vocab; k++)
            q[k] = p->row >= 0 ? so_tree_row(from, p->row)[k] : (k == x ? 0.5f : 0.25f);
        if (m == DROP_LOW_Q && q[x] < 0.4f)
            return;
        if (m == CONFIDENCE_FROM_SAMPLE && sqrt((double)q[x]) < (i == 0 ? 0.66 : 0.72))
            return;
        for (int k = 0; m == WRONG_ROW && k < t->n_vocab; k++)
            q[k] = 0.5f * q[k] + 0.5f / (float)t->n_vocab;
        node = so_tree_add(t, node, x, SO_Q_ROW, row, 0, 0.5f);
    }
}

static int false_propose(so_drafter *d, so_draft_job *jobs, int n, so_err *err) {
    const falsifier *f = (falsifier *)d;
    so_tree *t = jobs->tree, *mine = SO_NEW(so_tree);
    so_draft_job job = *jobs;
    assert_int_equal(n, 1);
    so_tree_init(mine, t->n_vocab, t->max_rows);
    so_tree_reset(mine, t->nodes[0].token, t->root_pos);
    job.tree = mine;
    int rc = f->inner->vt->propose(f->inner, &job, 1, err);
    falsify(f->mutation, mine, t);
    so_tree_deinit(mine);
    free(mine);
    return rc;
}

static const so_drafter_vt FALSE_VT = {.name = "false",
                                       .open = false_open,
                                       .close = false_close,
                                       .propose = false_propose,
                                       .observe = false_observe};

/* Well above rounding errors. */
static const double NOTICED = 1e-4;

/* Each error and the check that detects it. Other mutants are in test_lossless.c (trees, siblings,
 * verifiers) and test_spec.c (the engine's own, which `sooth prove` detects, too). */
static void mutants_are_noticed(void **state) {
    (void)state;
    static const struct {
        const char *what, *drafter, *check;
        mutation mutation;
        so_lossless_slip slip;
        int transform;
        bool narrow;
    } mutants[] = {
        {"a drawn token of low q ends the draft", "bigram(B,draw)", "enumeration", DROP_LOW_Q, 0, 0,
         false},
        {"the same in a draft model", "model", "enumeration", DROP_LOW_Q, 0, 0, false},
        {"a row's peak is what was drawn from it", "model", "enumeration", CONFIDENCE_FROM_SAMPLE,
         0, 0, false},
        {"q is not what was drawn from", "bigram(B,draw)", "enumeration", WRONG_ROW, 0, 0, false},
        {"the same in a draft model", "model", "enumeration", WRONG_ROW, 0, 0, false},
        {"q of tokens outside the vocabulary subset", "model", "enumeration", WRONG_ROW, 0, 0,
         true},
        {"an argmax with counts as its q", "ngram", "enumeration", POINT_AS_ROW, 0, 0, false},
        {"penalties of the round, not the path", "ngram", "enumeration", SOUND, SO_SLIP_ROUND, 7,
         false},
        {"presence counts the prompt", "ngram", "enumeration", SOUND, SO_SLIP_OUTPUT, 6, false},
        {"a window that does not move", "lookup(min=1)", "enumeration", SOUND, SO_SLIP_ROUND, 9,
         false},
        {"noise of the round, not the position", "ngram", "match", SOUND, SO_SLIP_ROUND, 0, false},
        {"presence counts the prompt", "ngram", "match", SOUND, SO_SLIP_OUTPUT, 6, false},
    };
    for (size_t i = 0; i < SO_LEN(mutants); i++) {
        subject s;
        so_sample_params p = transform(mutants[i].transform, 3);
        bool match = strcmp(mutants[i].check, "match") == 0;
        open_subject(&s, &worlds[3], kind(mutants[i].drafter, mutants[i].narrow), 3, &p);
        falsifier f = {{.vt = &FALSE_VT}, s.real.drafter, mutants[i].mutation};
        if (f.mutation != SOUND)
            s.real.drafter = &f.base;
        s.c.slip = mutants[i].slip;
        double off =
            match ? so_lossless_count_different(&s.c, MATCH_TOKENS, 50, 5) : so_lossless_gap(&s.c);
        print_message("mutant: %-38s %-15s %-12s off by %.4f\n", mutants[i].what,
                      mutants[i].drafter, mutants[i].check, off);
        if (!(off > NOTICED))
            fail_msg("%s: not detected", mutants[i].what);
        so_lossless_real_end(&s.real);
        s.real.drafter = f.inner;
        s.c.slip = SO_SLIP_NONE;
        off =
            match ? so_lossless_count_different(&s.c, MATCH_TOKENS, 50, 5) : so_lossless_gap(&s.c);
        assert_true(off <= SO_LOSSLESS_TOLERANCE); /* without the error the check passes */
        close_subject(&s);
    }
}

int main(int argc, char **argv) {
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reject_is_exact),
        cmocka_unit_test(lenient_keeps_its_bound),
        cmocka_unit_test(match_is_exact),
        cmocka_unit_test(acceptance_is_the_formulas),
        cmocka_unit_test(sampled_texts_are_exact),
        cmocka_unit_test(mutants_are_noticed),
        cmocka_unit_test(rows_may_end_drafts),
        cmocka_unit_test(rows_may_decide_widths),
        cmocka_unit_test(inner_drafter_uses_no_noise),
    };
    return cmocka_run_group_tests(tests, open_worlds, close_worlds);
}

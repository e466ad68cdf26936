/* The drafters over heads (draft/heads.c):
 *
 *   positions   a head reads the state that the root was sampled from
 *   trees       tokens by rank in the shapes of a product, of the file's accuracies, of the best paths
 *   look-ahead  its rows are those of the target after the text; the cache is as before
 *   exactness   every form leaves the text as it was: with points `==`, with draws by enumeration
 *   requests    paged and slotted, alone and together, with other drafters, with few pages */
#include "so_test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "draft/heads.h"
#include "so_cases.h"
#include "so_heads_file.h"
#include "so_lossless.h"
#include "so_shape.h"

enum { D = 32, N_VOCAB = 67, CTX = 192, N_PROMPT = 13, N_PREDICT = 70, N_HEADS = 3, N_RANKS = 4 };

static const unsigned char MASK[] = {0xFE, 0xFF, 0x7F, 0xFF, 0xF7, 0xFF, 0xFF, 0xFF, 6};
static const float ACCURACY[N_HEADS * N_RANKS] = {0.5f,  0.2f,  0.1f, 0.05f, 0.3f,  0.2f,
                                                  0.15f, 0.05f, 0.2f, 0.15f, 0.02f, 0.01f};

static so_rig target;
static char *dir, *medusa, *echo, *blockwise, *ahead;

static so_heads_file file_of(const char *kind) {
    return (so_heads_file){.kind = kind,
                           .n_heads = N_HEADS,
                           .n_layers = 1,
                           .d = D,
                           .d_hidden = 40,
                           .seed = 4,
                           .accuracy = ACCURACY,
                           .n_ranks = N_RANKS,
                           .mask = MASK,
                           .n_mask = sizeof MASK};
}

static char *write(const char *name, const so_heads_file *f) {
    char *path = so_path_join(dir, name);
    so_heads_write(path, f);
    return path;
}

/* The rig lasts for all tests; its file is needed no longer. */
static int open_all(void **state) {
    (void)state;
    so_shape shape = {SO_SHAPE_SMALL, .n_layers = 2, .n_vocab = N_VOCAB, .n_ctx = CTX, .seed = 5};
    so_shape_open(&target, &shape,
                  &(so_rig_opts){.level = SO_CPU_AUTO, .deferred = true, .max_rows = 64});
    dir = so_test_tmp();
    so_heads_file f = file_of("medusa");
    medusa = write("medusa.gguf", &f);
    f.zero = true;
    f.mask = NULL;
    echo = write("echo.gguf", &f);
    f = file_of("blockwise");
    blockwise = write("blockwise.gguf", &f);
    f = file_of("lookahead");
    ahead = write("ahead.gguf", &f);
    return 0;
}

static int close_all(void **state) {
    (void)state;
    so_rig_close(&target);
    free(medusa);
    free(echo);
    free(blockwise);
    free(ahead);
    so_test_tmp_free(dir);
    return 0;
}

/* --- a drafter alone --- */

typedef struct subject {
    so_checkpoint *ck;
    so_heads *h;
    so_drafter *d;
    so_tree tree;
    void *state;
    int32_t text[CTX];
    int n;
} subject;

static void open_subject(subject *s, const char *path, const char *spec, int rows) {
    so_spec parsed;
    so_err err = {0};
    *s = (subject){.n = N_PROMPT};
    SO_OK_OR_FAIL(so_spec_parse(so_str_c(spec), &parsed, &err), err);
    SO_OK_OR_FAIL(so_checkpoint_open(path, SO_CHECKPOINT_ALL, &s->ck, &err), err);
    SO_OK_OR_FAIL(so_heads_load(s->ck, target.m, 8, &s->h, &err), err);
    so_heads_drafter_opts o = {.n_parallel = 2, .max_draft = 16};
    SO_OK_OR_FAIL(so_heads_opts_from_spec(&parsed, &parsed.nodes[parsed.root], 32, &o, &err), err);
    SO_OK_OR_FAIL(so_heads_drafter_create(s->h, target.m, target.kv, &o, &s->d, &err), err);
    so_shape_tokens(&(so_shape){.n_vocab = N_VOCAB}, 8, s->text, s->n);
    so_tree_init(&s->tree, N_VOCAB, rows);
    so_draft_text text = {.prompt = s->text, .n_prompt = s->n, .max_tokens = CTX};
    SO_OK_OR_FAIL(s->d->vt->open(s->d, &text, &s->state, &err), err);
}

static void close_subject(subject *s) {
    s->d->vt->close(s->d, s->state);
    so_drafter_free(s->d);
    so_heads_free(s->h);
    so_checkpoint_close(s->ck);
    so_tree_deinit(&s->tree);
}

static so_draft_job job_of(subject *s, int max_nodes, int max_depth, float temp) {
    so_tree_reset(&s->tree, s->text[s->n - 1], s->n - 1);
    return (so_draft_job){.state = s->state,
                          .tokens = s->text,
                          .n_tokens = s->n,
                          .n_prompt = N_PROMPT,
                          .tree = &s->tree,
                          .max_nodes = max_nodes,
                          .max_depth = max_depth,
                          .seed = 11,
                          .temp = temp};
}

static void propose(subject *s, so_draft_job *job) {
    so_err err = {0};
    SO_OK_OR_FAIL(s->d->vt->propose(s->d, job, 1, &err), err);
    so_tree_check(&s->tree);
}

static void make_state(float x[D], int seed) {
    for (int i = 0; i < D; i++)
        x[i] = (float)sin(1 + seed * 3 + i * 0.7);
}

/* The columns of a head's row, most likely first, as tokens, and their probabilities. */
static void ranked(const subject *s, int head, int32_t *tokens, double *chance) {
    const float *row = so_heads_logits(s->h, 0, head);
    const int32_t *ids = so_heads_subset(s->h);
    int n = so_heads_logits_len(s->h);
    double sum = 0;
    bool used[N_VOCAB] = {false};
    for (int i = 0; i < n; i++)
        sum += exp((double)row[i]);
    for (int r = 0; r < n; r++) {
        int best = -1;
        for (int i = 0; i < n; i++)
            if (!used[i] && (best < 0 || row[i] > row[best]))
                best = i;
        used[best] = true;
        tokens[r] = ids ? ids[best] : best;
        chance[r] = exp((double)row[best]) / sum;
    }
}

/* A state that does not belong to the root is not used. */
static void stale_states_make_no_guesses(void **state) {
    (void)state;
    subject s;
    float x[D];
    open_subject(&s, medusa, "medusa", 0);
    make_state(x, 0);
    so_draft_job job = job_of(&s, 8, 8, 0);
    propose(&s, &job);
    assert_int_equal(s.tree.n_nodes, 1);
    assert_int_equal(job.n_levels, 0);
    so_drafter_add_hidden(s.d, s.state, s.n - 2, x);
    propose(&s, &job);
    assert_int_equal(s.tree.n_nodes, 1);
    so_drafter_add_hidden(s.d, s.state, s.n - 1, x);
    propose(&s, &job);
    assert_int_equal(s.tree.n_nodes, 1 + N_HEADS);
    assert_int_equal(job.n_levels, 1);
    close_subject(&s);
}

/* Every parent of a product's level has the best tokens of the level's head; 2 + 4 + 8 nodes. */
static void products_have_the_best_tokens(void **state) {
    (void)state;
    subject s;
    float x[D];
    open_subject(&s, medusa, "medusa(k=2)", 0);
    make_state(x, 1);
    so_drafter_add_hidden(s.d, s.state, s.n - 1, x);
    so_draft_job job = job_of(&s, 32, 8, 0);
    propose(&s, &job);
    assert_int_equal(s.tree.n_nodes, 1 + 14);
    for (int i = 0; i < s.tree.n_nodes; i++) {
        int depth = s.tree.nodes[i].depth, rank = 0;
        int32_t tokens[N_VOCAB];
        double chance[N_VOCAB];
        if (depth == N_HEADS)
            continue;
        ranked(&s, depth, tokens, chance);
        for (int p = s.tree.nodes[i].first; p >= 0; p = s.tree.proposals[p].next, rank++) {
            assert_int_equal(s.tree.nodes[s.tree.proposals[p].child].token, tokens[rank]);
            double want = rank == 0 ? chance[0] : sqrt(chance[rank]);
            assert_true(fabs((double)s.tree.proposals[p].confidence - want) < 0.01);
        }
        assert_int_equal(rank, 2);
    }
    close_subject(&s);
}

static double path_chance(const so_tree *t, int node, double (*of)(const subject *, int, int32_t),
                          const subject *s) {
    double p = 1;
    for (; node > 0; node = t->nodes[node].parent)
        p *= of(s, t->nodes[node].depth - 1, t->nodes[node].token);
    return p;
}

static double own_chance(const subject *s, int head, int32_t token) {
    int32_t tokens[N_VOCAB];
    double chance[N_VOCAB];
    ranked(s, head, tokens, chance);
    for (int r = 0; r < so_heads_logits_len(s->h); r++)
        if (tokens[r] == token)
            return chance[r];
    return 0;
}

static double file_chance(const subject *s, int head, int32_t token) {
    int32_t tokens[N_VOCAB];
    double chance[N_VOCAB];
    ranked(s, head, tokens, chance);
    for (int r = 0; r < N_RANKS; r++)
        if (tokens[r] == token)
            return (double)ACCURACY[head * N_RANKS + r];
    return 0;
}

/* A tree of N nodes has the N most likely paths: by the heads' probabilities with `best`, by the
 * accuracies of the file without. So no path outside may beat one inside. */
static void trees_have_the_most_likely_paths(void **state) {
    (void)state;
    static const int budgets[] = {6, 12, 64}; /* 64: `best` uses more than 16 ranks of a head */
    for (int variant = 0; variant < 2 * (int)SO_LEN(budgets); variant++) {
        subject s;
        float x[D];
        int n = budgets[variant / 2];
        char spec[64];
        snprintf(spec, sizeof spec, "medusa(%snodes=%d)", variant % 2 ? "best," : "", n);
        open_subject(&s, medusa, spec, 0);
        make_state(x, variant);
        so_drafter_add_hidden(s.d, s.state, s.n - 1, x);
        so_draft_job job = job_of(&s, 64, 8, 0);
        propose(&s, &job);
        assert_int_equal(s.tree.n_nodes, 1 + n);
        double (*of)(const subject *, int, int32_t) = variant % 2 ? own_chance : file_chance;
        double least = 1;
        for (int i = 1; i < s.tree.n_nodes; i++)
            least = fmin(least, path_chance(&s.tree, i, of, &s));
        for (int i = 0; i < s.tree.n_nodes; i++)
            for (int32_t token = 0; token < N_VOCAB && s.tree.nodes[i].depth < N_HEADS; token++)
                if (so_tree_child(&s.tree, i, token) < 0)
                    assert_true(path_chance(&s.tree, i, of, &s) *
                                    of(&s, s.tree.nodes[i].depth, token) <=
                                least * 1.001);
        close_subject(&s);
    }
}

/* tree=FILE: the tokens of the file's ranks; what is deeper than the heads is left out. */
static void tree_files_give_ranks(void **state) {
    (void)state;
    static const char json[] = "{\"sooth_tree\": 1, \"depth\": 4, \"nodes\": [{\"parent\": -1, "
                               "\"rank\": 0}, {\"parent\": -1, \"rank\": 3}, "
                               "{\"parent\": 1, \"rank\": 1}, {\"parent\": 2, \"rank\": 0}, "
                               "{\"parent\": 3, \"rank\": 0}]}";
    static const int parents[] = {0, 0, 2, 3}, ranks[] = {0, 3, 1, 0};
    subject s;
    float x[D];
    so_buf spec = {0};
    char *path = so_path_join(dir, "tree.json");
    FILE *f = fopen(path, "w");
    fputs(json, f);
    fclose(f);
    so_buf_printf(&spec, "medusa(tree=\"%s\")", path);
    open_subject(&s, medusa, spec.data, 0);
    make_state(x, 6);
    so_drafter_add_hidden(s.d, s.state, s.n - 1, x);
    so_draft_job job = job_of(&s, 32, 8, 0);
    propose(&s, &job);
    assert_int_equal(s.tree.n_nodes, 1 + 4); /* the fifth is at depth 4 */
    for (int i = 0; i < 4; i++) {
        const so_node *node = &s.tree.nodes[i + 1];
        int32_t tokens[N_VOCAB];
        double chance[N_VOCAB];
        ranked(&s, node->depth - 1, tokens, chance);
        assert_int_equal(node->parent, parents[i]);
        assert_int_equal(node->token, tokens[ranks[i]]);
    }
    close_subject(&s);
    so_buf_free(&spec);
    free(path);
}

static void limits_hold(void **state) {
    (void)state;
    static const char *const specs[] = {"medusa", "medusa(k=3)", "medusa(best)", "medusa(nodes=9)"};
    for (size_t i = 0; i < SO_LEN(specs); i++)
        for (int limit = 0; limit < 12; limit++) {
            subject s;
            float x[D];
            open_subject(&s, medusa, specs[i], limit % 2 ? 16 : 0);
            make_state(x, limit);
            so_drafter_add_hidden(s.d, s.state, s.n - 1, x);
            so_draft_job job = job_of(&s, limit, 1 + limit % 3, limit % 2 ? 0.8f : 0);
            propose(&s, &job);
            assert_in_range(s.tree.n_nodes, limit > 0 ? 2 : 1, 1 + limit);
            for (int k = 0; k < s.tree.n_nodes; k++)
                assert_in_range(s.tree.nodes[k].depth, 0, 1 + limit % 3);
            close_subject(&s);
        }
}

/* Children are drawn without replacement from one row per level, which all parents share. */
static void draws_share_the_rows_of_levels(void **state) {
    (void)state;
    subject s;
    float x[D];
    open_subject(&s, medusa, "medusa(k=2)", 16);
    make_state(x, 2);
    so_drafter_add_hidden(s.d, s.state, s.n - 1, x);
    so_draft_job job = job_of(&s, 32, 8, 1);
    propose(&s, &job);
    assert_int_equal(s.tree.n_nodes, 1 + 14);
    assert_int_equal(s.tree.n_rows, N_HEADS);
    for (int i = 0; i < s.tree.n_proposals; i++) {
        const so_proposal *p = &s.tree.proposals[i];
        assert_int_equal(p->kind, SO_Q_ROW_SET);
        assert_int_equal(p->row, s.tree.nodes[p->child].depth - 1);
    }
    double sum = 0;
    for (int i = 0; i < N_VOCAB; i++) {
        bool in_subset = MASK[i / 8] >> (i % 8) & 1;
        assert_true(in_subset || so_tree_row(&s.tree, 0)[i] == 0);
        sum += (double)so_tree_row(&s.tree, 0)[i];
    }
    assert_true(fabs(sum - 1) < 1e-4);
    close_subject(&s);
}

/* --- look-ahead --- */

/* With the embeddings of tokens a and b as its look-ahead rows, the guesses are what the target says
 * after the text, after a, and after a b. */
static void look_ahead_rows_are_the_targets(void **state) {
    (void)state;
    const so_tensor *t = so_checkpoint_tensor(target.ck, "token_embd.weight");
    const int32_t after[] = {17, 40};
    float embd[2 * D], *logits = SO_NEW_N(float, CTX *N_VOCAB);
    subject s;
    for (int i = 0; i < 2; i++)
        memcpy(embd + i * D, (const float *)t->data + after[i] * D, D * sizeof *embd);
    so_heads_file f = {.kind = "lookahead", .n_heads = 2, .d = D, .embeddings = embd};
    char *path = write("tokens.gguf", &f);
    open_subject(&s, path, "lookahead", 0);
    so_seq *seq = so_seq_create(target.kv), *plain = so_seq_create(target.kv);
    so_rig_chain(&target, seq, s.text, s.n - 1, NULL);
    so_draft_job job = job_of(&s, 8, 8, 0);
    propose(&s, &job);
    assert_int_equal(s.tree.n_nodes, 1); /* without the target's cache */
    job.seq = seq;
    propose(&s, &job);
    assert_int_equal(so_seq_len(seq), s.n - 1);
    assert_int_equal(so_seq_open_nodes(seq), 0);
    so_rig_chain(&target, plain, s.text, s.n, logits);
    so_rig_chain(&target, plain, after, 2, logits + N_VOCAB * s.n);
    assert_int_equal(s.tree.n_nodes, 4);
    for (int i = 0; i < 3; i++) {
        const float *row = logits + (s.n - 1 + i) * N_VOCAB;
        int best = 0;
        for (int k = 1; k < N_VOCAB; k++)
            best = row[k] > row[best] ? k : best;
        assert_int_equal(s.tree.nodes[i + 1].token, best);
        assert_memory_equal(so_heads_logits(s.h, i, 0), row, N_VOCAB * sizeof *row);
    }
    so_kv_check(target.kv);
    so_seq_free(seq);
    so_seq_free(plain);
    close_subject(&s);
    free(logits);
    free(path);
}

/* --- exactness of draws --- */

typedef struct lossless {
    so_lossless_real real; /* first: the suite's callbacks get a pointer to it */
    float x[D];
} lossless;

static void (*real_propose)(void *, const int32_t *, int, so_tree *, so_verify_rng *);

static void propose_with_state(void *user, const int32_t *text, int n, so_tree *t,
                               so_verify_rng *draws) {
    lossless *l = user;
    so_drafter *d = l->real.drafter;
    so_drafter_add_hidden(d, l->real.state, n - 1, l->x);
    for (int i = 0; i < d->end_rows.n; i++) { /* every row has a state of its own */
        float x[D];
        for (int k = 0; k < D; k++)
            x[k] = l->x[(k + 5 * i) % D];
        so_drafter_add_end_hidden(d, l->real.state, n - 1, i, x);
    }
    real_propose(user, text, n, t, draws);
}

/* Terms under which the row decides how many guesses are drawn. */
static so_draft_terms terms_by_confidence(void) {
    so_draft_terms t = {.start_value = 1};
    for (int d = 0; d < SO_TERMS_DEPTHS; d++) {
        t.row_price[d] = 0.45f + 0.2f * (float)d;
        for (int c = 0; c <= SO_TERMS_CLASSES; c++) {
            t.chance[d][c] = (float)c / SO_TERMS_CLASSES;
            for (int r = 0; r < SO_TERMS_RANKS - 1; r++)
                t.sibling[r][d][c] = 0.6f * (float)c / SO_TERMS_CLASSES;
        }
    }
    return t;
}

/* A model of four tokens: the toy's rows are the target's, the heads read states of this model. Also
 * where terms let the rows decide about length and width. */
static void reject_is_exact(void **state) {
    (void)state;
    const so_draft_terms terms = terms_by_confidence();
    int n_refused = 0, n_with_terms = 0;
    static const char *const specs[] = {"medusa",
                                        "medusa(k=2)",
                                        "medusa(nodes=5)",
                                        "medusa(best,nodes=4)",
                                        "blockwise",
                                        "lookahead(ends=1)",
                                        "lookahead(best,nodes=4,ends=2)"};
    so_shape shape = {SO_SHAPE_SMALL, .n_layers = 1, .n_vocab = 4, .n_ctx = CTX, .seed = 2};
    so_rig tiny;
    so_toy toy;
    so_shape_open(&tiny, &shape, &(so_rig_opts){.level = SO_CPU_AUTO});
    so_toy_init(&toy, 4, 3, 0.2, 1.5);
    for (size_t k = 0; k < 2 * SO_LEN(specs); k++) {
        size_t i = k / 2;
        so_heads_file f = file_of(i > 4 ? "lookahead" : i == 4 ? "blockwise" : "medusa");
        so_spec parsed;
        so_checkpoint *ck = NULL;
        so_heads *h = NULL;
        so_drafter *d = NULL;
        so_err err = {0};
        lossless l = {0};
        f.n_heads = 2;
        f.mask = i % 2 ? (const unsigned char[]){0xB} : NULL;
        f.n_mask = 1;
        char *path = write("tiny.gguf", &f);
        SO_OK_OR_FAIL(so_spec_parse(so_str_c(specs[i]), &parsed, &err), err);
        SO_OK_OR_FAIL(so_checkpoint_open(path, SO_CHECKPOINT_ALL, &ck, &err), err);
        SO_OK_OR_FAIL(so_heads_load(ck, tiny.m, f.n_heads, &h, &err), err);
        so_heads_drafter_opts o = {.n_parallel = 1, .max_draft = 4};
        SO_OK_OR_FAIL(so_heads_opts_from_spec(&parsed, &parsed.nodes[parsed.root], 6, &o, &err),
                      err);
        SO_OK_OR_FAIL(so_heads_drafter_create(h, tiny.m, NULL, &o, &d, &err), err);
        make_state(l.x, (int)i);
        for (int x = 0; x < D; x++) /* sharper rows, so that some are worth a draw */
            l.x[x] *= 2;
        l.real = (so_lossless_real){
            .drafter = d, .max_nodes = SO_MAX(d->tree_nodes, 2), .max_depth = 2, .temp = 1};
        l.real.terms = k % 2 ? &terms : NULL;
        so_lossless_case c = {.name = specs[i], .target = &toy, .n_out = 3};
        so_lossless_use(&c, &l.real);
        real_propose = c.propose;
        c.propose = propose_with_state;
        so_lossless_check(&c);
        double tokens = so_lossless_tokens_per_round(&c);
        assert_true(tokens > 1.05 || k % 2); /* guesses were tested */
        n_with_terms += k % 2 && tokens > 1.05;
        n_refused += l.real.n_refused;
        so_lossless_real_end(&l.real);
        so_drafter_free(d);
        so_heads_free(h);
        so_checkpoint_close(ck);
        free(path);
    }
    assert_true(n_refused > 0 && n_with_terms > 0);
    so_rig_close(&tiny);
}

/* --- in the engine --- */

static so_engine *open_engine(int n_parallel, bool slotted, int n_pages) {
    so_engine_opts o;
    so_engine *e = NULL;
    so_err err = {0};
    so_engine_defaults(target.m, &o);
    o.n_ctx = CTX;
    o.n_parallel = n_parallel;
    o.n_batch = 5;
    o.n_pages = n_pages;
    o.kv_layout = slotted ? SO_KV_SLOTTED : SO_KV_PAGED;
    o.prefix_cache = !slotted;
    o.max_draft = 8;
    o.max_nodes = 16;
    SO_OK_OR_FAIL(so_engine_create(target.m, NULL, &o, &e, &err), err);
    return e;
}

static so_request_opts opts_of(const int32_t *prompt, float temp, const char *drafter, int length) {
    so_request_opts o = {.prompt = prompt,
                         .n_prompt = N_PROMPT,
                         .max_tokens = N_PREDICT,
                         .spec = {.drafter = drafter, .length = length}};
    so_sample_defaults(&o.sample);
    o.sample.temp = temp;
    o.sample.seed = 3;
    return o;
}

static char *spec_of(const char *format, const char *path) {
    so_buf b = {0};
    so_buf_printf(&b, format, path);
    return b.data;
}

/* Untrained heads say what the target says: at temperature 0 the root itself, whose state they read.
 */
static void on_round(void *user, const so_round *round) {
    const so_tree *t = round->tree;
    int *n = user;
    if (round->index == 0) /* the prompt's states are not known */
        assert_int_equal(t->n_nodes, 1);
    for (int i = 1; i < t->n_nodes; i++) {
        assert_int_equal(t->nodes[i].token, t->nodes[0].token);
        (*n)++;
    }
}

static void heads_read_the_roots_state(void **state) {
    (void)state;
    int32_t prompt[N_PROMPT];
    so_shape_tokens(&(so_shape){.n_vocab = N_VOCAB}, 8, prompt, N_PROMPT);
    char *spec = spec_of("medusa(%s)", echo);
    for (int length = 1; length <= N_HEADS; length++) {
        so_engine *e = open_engine(1, false, 0);
        so_request_opts o = opts_of(prompt, 0, spec, length);
        int n = 0;
        o.on_round = on_round;
        o.user = &n;
        so_request_free(so_case_finish(e, &o));
        assert_true(n > 30);
        so_engine_free(e);
    }
    free(spec);
}

/* Greedy and with the same noise; paged and slotted; with few pages, so that requests are preempted. */
static void text_equals_plain_decoding(void **state) {
    (void)state;
    char *specs[] = {spec_of("medusa(%s)", medusa),
                     spec_of("medusa(%s,k=2)", medusa),
                     spec_of("medusa(%s,nodes=12)", echo),
                     spec_of("medusa(%s,best)", medusa),
                     spec_of("blockwise(%s)", blockwise),
                     spec_of("lookahead(%s)", ahead),
                     spec_of("lookahead(%s,nodes=9)", ahead),
                     spec_of("lookup,medusa(%s)", medusa),
                     spec_of("medusa(%s)+ngram", medusa),
                     spec_of("lookahead(%s,ends=1)", ahead),
                     spec_of("lookahead(%s,nodes=6,ends=3)", ahead),
                     spec_of("lookup,lookahead(%s,ends=2)+ngram", ahead)};
    int32_t prompt[N_PROMPT];
    so_shape_tokens(&(so_shape){.n_vocab = N_VOCAB}, 8, prompt, N_PROMPT);
    for (int variant = 0; variant < 6; variant++) {
        so_engine *e = open_engine(4, variant % 3 == 1, variant % 3 == 2 ? 9 : 0);
        so_request *r[2 * SO_LEN(specs)], *plain;
        so_request_opts o = opts_of(prompt, variant < 3 ? 0 : 0.9f, NULL, 0);
        so_err err = {0};
        int n, n_want, drafted = 0;
        plain = so_case_finish(e, &o);
        const int32_t *want = so_request_output(plain, &n_want);
        assert_int_equal(n_want, N_PREDICT);
        for (size_t i = 0; i < SO_LEN(r); i++) {
            o.spec = (so_spec_opts){.drafter = specs[i / 2], .length = i % 2 ? 3 : 0};
            SO_OK_OR_FAIL(so_engine_submit(e, &o, &r[i], &err), err);
        }
        so_case_run(e);
        for (size_t i = 0; i < SO_LEN(r); i++) {
            const int32_t *out = so_request_output(r[i], &n);
            assert_int_equal(n, n_want);
            assert_memory_equal(out, want, (size_t)n * sizeof *out);
            drafted += so_request_get_stats(r[i])->draft_n;
            so_request_free(r[i]);
        }
        assert_true(drafted > 500);
        so_request_free(plain);
        so_engine_free(e);
    }
    for (size_t i = 0; i < SO_LEN(specs); i++)
        free(specs[i]);
}

/* --- rows on the ends of trees --- */

typedef struct rounds {
    int n, pos[N_PREDICT], n_guesses[N_PREDICT];
    int32_t guesses[N_PREDICT][2];
} rounds;

static void keep_round(void *user, const so_round *round) {
    rounds *s = user;
    const so_tree *t = round->tree;
    s->pos[s->n] = t->root_pos;
    s->n_guesses[s->n] = t->n_nodes - 1;
    for (int i = 1; i < t->n_nodes; i++)
        s->guesses[s->n][i - 1] = t->nodes[i].token;
    s->n++;
}

/* On a GPU a token's embedding comes from packed weights, which keep 22 bits of an F32 number. So it differs from
 * the same embedding as an input in its last bits, and a tie may be decided otherwise. */
static bool is_best(const float *row, int32_t token, int32_t best) {
    return token == best || (so_test_on_gpu() && row[best] - row[token] < 1e-3f * fabsf(row[best]));
}

static int32_t best_of(const float *row) {
    int best = 0;
    for (int k = 1; k < N_VOCAB; k++)
        best = row[k] > row[best] ? k : best;
    return best;
}

/* With the embeddings of tokens a and b as its rows, the guesses of a round are what the target says after
 * the text without the root and a, and after a b: computed in the pass of the round before, at the node
 * where that one ended. With three ends a chain of two guesses has rows wherever a round ends, so every
 * round but the first has guesses; with one end most have. */
static void end_rows_are_the_targets(void **state) {
    (void)state;
    const so_tensor *t = so_checkpoint_tensor(target.ck, "token_embd.weight");
    const int32_t after[] = {17, 40};
    float embd[2 * D], *logits = SO_NEW_N(float, CTX *N_VOCAB);
    int32_t text[CTX];
    for (int i = 0; i < 2; i++)
        memcpy(embd + i * D, (const float *)t->data + after[i] * D, D * sizeof *embd);
    so_heads_file f = {.kind = "lookahead", .n_heads = 2, .d = D, .embeddings = embd};
    char *path = write("ends.gguf", &f);
    so_shape_tokens(&(so_shape){.n_vocab = N_VOCAB}, 8, text, N_PROMPT);
    for (int ends = 1; ends <= 3; ends += 2) {
        char spec[4000];
        rounds seen = {0};
        int n = 0, n_with = 0;
        so_engine *e = open_engine(1, ends == 3, 0);
        snprintf(spec, sizeof spec, "lookahead(\"%s\",ends=%d)", path, ends);
        so_request_opts o = opts_of(text, 0, spec, 2);
        o.on_round = keep_round;
        o.user = &seen;
        so_request *r = so_case_finish(e, &o);
        const int32_t *out = so_request_output(r, &n);
        memcpy(text + N_PROMPT, out, (size_t)n * sizeof *out);
        for (int i = 0; i < seen.n; i++) {
            so_seq *seq = so_seq_create(target.kv);
            for (int at = 0; at < seen.pos[i]; at += 64)
                so_rig_chain(&target, seq, text + at, SO_MIN(seen.pos[i] - at, 64), NULL);
            so_rig_chain(&target, seq, after, 2, logits);
            for (int k = 0; k < seen.n_guesses[i]; k++)
                assert_true(is_best(logits + k * N_VOCAB, seen.guesses[i][k],
                                    best_of(logits + k * N_VOCAB)));
            so_seq_free(seq);
            n_with += seen.n_guesses[i] > 0;
            if (i > 0 && ends == 3 && seen.pos[i] + 2 < N_PROMPT + n)
                assert_true(seen.n_guesses[i] > 0);
        }
        assert_int_equal(seen.n_guesses[0], 0);
        assert_true(n_with > seen.n / 2 && so_request_get_stats(r)->draft_n_accepted >= 0);
        so_request_free(r);
        so_engine_free(e);
    }
    free(logits);
    free(path);
}

/* The guesses of a request, in total: alone, or while another one comes to the end of its context. */
static int drafted_beside(const char *spec, const int32_t *text, bool other) {
    so_engine *e = open_engine(2, true, 0);
    so_request_opts o = opts_of(text, 0, spec, 3), full = o;
    so_request *r, *neighbour = NULL;
    so_err err = {0};
    o.max_tokens = 2 * N_PREDICT;
    full.n_prompt = CTX - 24;
    full.max_tokens = CTX - full.n_prompt;
    SO_OK_OR_FAIL(so_engine_submit(e, &o, &r, &err), err);
    if (other)
        SO_OK_OR_FAIL(so_engine_submit(e, &full, &neighbour, &err), err);
    so_case_run(e);
    int n = so_request_get_stats(r)->draft_n;
    assert_true(n > 0);
    so_request_free(r);
    so_request_free(neighbour);
    so_engine_free(e);
    return n;
}

/* Look-ahead rows that have no room at the end of a context cost no other request its guesses. */
static void a_full_context_is_its_own_affair(void **state) {
    (void)state;
    so_heads_file f = {.kind = "lookahead", .n_heads = 8, .d = D, .seed = 4};
    char *path = write("long.gguf", &f), *spec = spec_of("lookahead(%s)", path);
    int32_t text[CTX];
    so_shape_tokens(&(so_shape){.n_vocab = N_VOCAB}, 8, text, CTX);
    assert_int_equal(drafted_beside(spec, text, true), drafted_beside(spec, text, false));
    free(spec);
    free(path);
}

/* --- what is refused --- */

static void refused(const char *format, const char *path, const char *part) {
    so_engine *e = open_engine(1, false, 0);
    int32_t prompt[N_PROMPT] = {0};
    char *spec = spec_of(format, path);
    so_request_opts o = opts_of(prompt, 0, spec, 0);
    so_request *r = NULL;
    so_err err = {0};
    assert_true(so_engine_submit(e, &o, &r, &err) < 0);
    if (!strstr(err.msg, part))
        fail_msg("\"%s\" lacks \"%s\"", err.msg, part);
    free(spec);
    so_engine_free(e);
}

static void wrong_specs(void **state) {
    (void)state;
    so_heads_file f = file_of("medusa");
    f.accuracy = NULL;
    f.n_ranks = 0;
    char *bare = write("bare.gguf", &f);
    refused("medusa", "", "needs heads, and none are registered");
    refused("medusa(%s)", blockwise, "these are blockwise heads");
    refused("lookahead(%s)", medusa, "these are medusa heads");
    refused("medusa(%s)", "/nowhere.gguf", "/nowhere.gguf");
    refused("model(%s)", medusa, "use them with --spec 'medusa(FILE)'");
    refused("model(%s)", blockwise, "use them with --spec 'blockwise(FILE)'");
    refused("medusa(%s,nodes=5)", bare, "states no accuracies");
    refused("medusa(%s,k=4,nodes=17)", medusa, "nodes=17 is more than the 16 guesses");
    refused("blockwise(%s,k=2)", blockwise, "blockwise does not take k");
    static const unsigned char three[] = {7, 0, 0, 0, 0, 0, 0, 0, 0};
    f.mask = three;
    f.n_mask = sizeof three;
    char *small = write("small.gguf", &f);
    refused("medusa(%s,k=4)", small, "logits for 3 tokens only");
    f.d = 48;
    char *other = write("other.gguf", &f);
    refused("medusa(%s)", other, "trained for it");
    so_draft_target k = {.name = "another", .d_model = 99, .n_layers = 1};
    memset(k.vocab, 'a', 64);
    f = file_of("medusa");
    f.registered = &k;
    char *registered = write("registered.gguf", &f);
    refused("medusa(%s)", registered, "is registered for 'another'");
    free(bare);
    free(small);
    free(other);
    free(registered);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stale_states_make_no_guesses),
        cmocka_unit_test(products_have_the_best_tokens),
        cmocka_unit_test(trees_have_the_most_likely_paths),
        cmocka_unit_test(tree_files_give_ranks),
        cmocka_unit_test(limits_hold),
        cmocka_unit_test(draws_share_the_rows_of_levels),
        cmocka_unit_test(look_ahead_rows_are_the_targets),
        cmocka_unit_test(reject_is_exact),
        cmocka_unit_test(heads_read_the_roots_state),
        cmocka_unit_test(text_equals_plain_decoding),
        cmocka_unit_test(a_full_context_is_its_own_affair),
        cmocka_unit_test(end_rows_are_the_targets),
        cmocka_unit_test(wrong_specs),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}

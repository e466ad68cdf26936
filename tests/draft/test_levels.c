/* A draft model on a remote backend drafts several levels in one pass (draft/model_levels.c, "Levels
 * together"): the guesses and their confidences (but for rounding) are those of one pass per level,
 * for one request and several, when pages are short and in every mode; and passes are saved. With
 * terms the lengths differ, because a level costs less in a pass that is made anyway: no guess that
 * was computed is thrown away. */
#include "so_test.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/rng.h"
#include "draft/model.h"
#include "so_rig.h"
#include "so_shape.h"

enum { N_JOBS = 3, N_CTX = 160, DEPTH = 8, N_ROUNDS = 24, N_LAYERS = 2 };

/* The two drafters: 0 with a pass for each level, 1 with levels together. */
typedef struct side {
    so_rig r;
    const so_backend_vt *vt;
    so_backend_vt watched;
    so_drafter *d;
    so_tree trees[N_JOBS];
    void *states[N_JOBS];
    so_draft_job jobs[N_JOBS];
} side;

typedef struct setting {
    const char *name;
    int n_jobs, n_pages;
    bool terms, subset;
    float temp, p_min;
    int extra;  /* ids that the target has beyond the draft's, or lacks if negative */
    int others; /* guesses of another drafter that are already in the tree */
    int n_batch;
    bool penalties;
    bool full;  /* the device has no memory left once the drafter exists */
    bool mixed; /* the second request has temperature 1 */
} setting;

static int n_syncs[2], n_attentions[2];
static size_t largest_download[2]; /* bytes */
static side sides[2];

static int count_sync(so_backend *b, so_err *err) {
    const side *s = b == sides[1].r.b ? &sides[1] : &sides[0];
    n_syncs[s == &sides[1]]++;
    return s->vt->sync(b, err);
}

static void count_submit(so_backend *b, const so_op *op) {
    const side *s = b == sides[1].r.b ? &sides[1] : &sides[0];
    n_attentions[s == &sides[1]] += op->kind == SO_OP_ATTENTION;
    if (op->kind == SO_OP_DOWNLOAD)
        largest_download[s == &sides[1]] =
            SO_MAX(largest_download[s == &sides[1]], op->download.n_bytes);
    s->vt->submit(b, op);
}

static int refuse_buffer(so_backend *b, size_t n_bytes, so_buffer **out, so_err *err) {
    (void)b;
    (void)out;
    return so_err_set(err, SO_ENOMEM, "no memory for %zu bytes", n_bytes);
}

static void open_side(side *s, const setting *t, bool remote) {
    so_shape shape = {SO_SHAPE_SMALL, .n_layers = N_LAYERS, .n_vocab = 96, .n_ctx = N_CTX,
                      .seed = 77};
    unsigned char mask[12];
    so_err err = {0};
    memset(mask, 0xB6, sizeof mask);
    if (t->subset) {
        shape.vocab_mask = mask;
        shape.n_vocab_mask = sizeof mask;
    }
    so_shape_open(&s->r, &shape,
                  &(so_rig_opts){
                      .level = SO_CPU_AUTO, .max_rows = 1, .n_pages = 1, .model = {.draft = true}});
    s->vt = s->r.b->vt;
    s->watched = *s->vt;
    s->watched.sync = count_sync;
    s->watched.submit = count_submit;
    s->watched.remote = remote;
    s->r.b->vt = &s->watched;
    so_model_drafter_opts o = {.n_vocab = 96 + t->extra,
                               .n_ctx = N_CTX,
                               .n_parallel = N_JOBS,
                               .n_batch = t->n_batch ? t->n_batch : 64,
                               .max_draft = DEPTH,
                               .n_pages = t->n_pages,
                               .prefix_cache = true,
                               .p_min = t->p_min,
                               .temp = -1};
    SO_OK_OR_FAIL(so_model_drafter_create(s->r.m, &o, NULL, &s->d, &err), err);
    if (t->full)
        s->watched.buffer_create = refuse_buffer;
}

static void close_side(side *s) {
    so_drafter_free(s->d);
    s->r.b->vt = s->vt;
    so_rig_close(&s->r);
}

static uint32_t n_drawn;

static double uniform(void) {
    return so_rng_uniform(&(so_rng_key){.seed = 5, .purpose = SO_RNG_TEST}, n_drawn++);
}

/* Terms under which some guesses pay and some do not. */
static so_draft_terms make_terms(void) {
    so_draft_terms t = {.start_value = 1, .level_price = 0.3F * (float)uniform()};
    t.trip_price = t.hoped_trip_price = 0.3F * (float)uniform();
    for (int depth = 0; depth < SO_TERMS_DEPTHS; depth++) {
        t.row_price[depth] = 0.1F * (float)uniform();
        for (int k = 0; k <= SO_TERMS_CLASSES; k++)
            t.chance[depth][k] = 0.5F + 0.5F * (float)uniform();
    }
    return t;
}

static void check_same(const setting *t, int round, const so_draft_job *a, const so_draft_job *b) {
    const so_tree *x = a->tree, *y = b->tree;
    int n = SO_MIN(x->n_nodes, y->n_nodes);
    bool same = t->terms || x->n_nodes == y->n_nodes;
    for (int i = 1; same && i < n; i++)
        same = x->nodes[i].token == y->nodes[i].token && x->nodes[i].parent == y->nodes[i].parent &&
               fabsf(x->proposals[i - 1].confidence - y->proposals[i - 1].confidence) < 1e-5F;
    if (!same)
        fail_msg("%s, round %d: %d guesses, step by step %d, or other ones", t->name, round,
                 y->n_nodes - 1, x->n_nodes - 1);
    /* Levels are computed in vain only if a row ends a chain: other ends are known before. */
    if (!t->terms) {
        assert_int_equal(a->n_catch_up, b->n_catch_up);
        assert_true(t->p_min > 0 ? b->n_levels >= a->n_levels : b->n_levels == a->n_levels);
    }
    if (!(t->p_min > 0)) {
        assert_int_equal(a->n_levels, x->n_proposals - t->others);
        assert_int_equal(b->n_levels, y->n_proposals - t->others);
    }
}

/* Rounds in which a part of the guesses is accepted. Returns how many guesses were made. */
static int run(const setting *t) {
    so_err err = {0};
    n_drawn = 0;
    int32_t texts[N_JOBS][N_CTX + DEPTH];
    int n_tokens[N_JOBS], n_guesses = 0;
    so_sample_params penalties;
    so_sample_defaults(&penalties);
    penalties.temp = 0;
    penalties.repeat_penalty = 1.3F;
    memset(n_syncs, 0, sizeof n_syncs);
    memset(largest_download, 0, sizeof largest_download);
    for (int k = 0; k < 2; k++)
        open_side(&sides[k], t, k == 1);
    for (int i = 0; i < t->n_jobs; i++) {
        n_tokens[i] = 20 + 25 * i;
        for (int j = 0; j < n_tokens[i]; j++)
            texts[i][j] = (int32_t)(uniform() * 90);
        for (int k = 0; k < 2; k++) {
            so_draft_text text = {.prompt = texts[i], .n_prompt = n_tokens[i], .max_tokens = N_CTX};
            so_tree_init(&sides[k].trees[i], 96 + t->extra, 0);
            SO_OK_OR_FAIL(sides[k].d->vt->open(sides[k].d, &text, &sides[k].states[i], &err), err);
        }
    }
    for (int round = 0; round < N_ROUNDS; round++) {
        so_draft_terms terms = make_terms();
        for (int k = 0; k < 2; k++) {
            side *s = &sides[k];
            for (int i = 0; i < t->n_jobs; i++) {
                so_tree_reset(&s->trees[i], texts[i][n_tokens[i] - 1], n_tokens[i] - 1);
                for (int j = 0; j < t->others; j++)
                    so_tree_add(&s->trees[i], j, 91 + j, SO_Q_POINT, -1, 1, 0.5F);
                s->jobs[i] = (so_draft_job){.state = s->states[i],
                                            .tokens = texts[i],
                                            .n_tokens = n_tokens[i],
                                            .n_prompt = 20,
                                            .tree = &s->trees[i],
                                            .max_nodes = DEPTH - (i + round) % 3,
                                            .max_depth = DEPTH,
                                            .terms = t->terms ? &terms : NULL,
                                            .seed = 9,
                                            .round = (uint32_t)round,
                                            .temp = t->mixed && i == 1 ? 1 : t->temp,
                                            .sample = t->penalties ? &penalties : NULL};
            }
            n_attentions[k] = 0;
            SO_OK_OR_FAIL(s->d->vt->propose(s->d, s->jobs, t->n_jobs, &err), err);
            if (t->n_jobs == 1 && t->n_batch == 0) /* every level is reported, used or not */
                assert_int_equal(n_attentions[k], N_LAYERS * s->jobs[0].n_levels);
        }
        for (int i = 0; i < t->n_jobs; i++) {
            const so_tree *tree = &sides[0].trees[i];
            check_same(t, round, &sides[0].jobs[i], &sides[1].jobs[i]);
            int n = tree->n_nodes - 1 - t->others, accepted = (int)(uniform() * (n + 1));
            n_guesses += n;
            for (int j = 1; j <= accepted && n_tokens[i] < N_CTX - 1; j++)
                texts[i][n_tokens[i]++] = tree->nodes[t->others + j].token;
            if (n_tokens[i] < N_CTX - 1)
                texts[i][n_tokens[i]++] = (int32_t)(uniform() * 90);
        }
    }
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < t->n_jobs; i++) {
            sides[k].d->vt->close(sides[k].d, sides[k].states[i]);
            so_tree_deinit(&sides[k].trees[i]);
        }
        close_side(&sides[k]);
    }
    return n_guesses;
}

static void guesses_are_those_of_steps(void **state) {
    (void)state;
    static const setting all[] = {
        {.name = "one request", .n_jobs = 1},
        {.name = "three requests", .n_jobs = 3},
        {.name = "terms", .n_jobs = 1, .terms = true},
        {.name = "terms, three requests", .n_jobs = 3, .terms = true},
        {.name = "few pages", .n_jobs = 3, .n_pages = 8},
        {.name = "p_min", .n_jobs = 2, .p_min = 0.02F},
        {.name = "vocabulary subset", .n_jobs = 2, .subset = true},
        {.name = "target with more ids", .n_jobs = 2, .extra = 4},
        {.name = "other guesses", .n_jobs = 2, .others = 4},
        {.name = "catch-up in two passes", .n_jobs = 1, .n_batch = 18}, /* 19 rows and the root's */
        {.name = "catch-up in one pass", .n_jobs = 1, .n_batch = 19},
    };
    for (size_t i = 0; i < SO_LEN(all); i++) {
        int n = run(&all[i]);
        if (n < N_ROUNDS || 10 * n_syncs[1] > 8 * n_syncs[0])
            fail_msg("%s: %d guesses; %d passes, step by step %d", all[i].name, n, n_syncs[1],
                     n_syncs[0]);
        /* no logits and no hidden states, unless p_min looks at the rows */
        if (!(all[i].p_min > 0) && largest_download[1] > N_JOBS * sizeof(so_sample_result))
            fail_msg("%s: a pass downloads %zu bytes", all[i].name, largest_download[1]);
    }
}

/* Where the device's argmax is not the guess, or the device is full, every level is a pass. */
static void other_modes_go_step_by_step(void **state) {
    (void)state;
    static const setting all[] = {
        {.name = "temperature 1", .n_jobs = 2, .temp = 1},
        {.name = "temperature 1, terms", .n_jobs = 2, .temp = 1, .terms = true},
        {.name = "target with fewer ids", .n_jobs = 2, .extra = -8},
        {.name = "penalties", .n_jobs = 2, .penalties = true},
        {.name = "no memory for levels", .n_jobs = 2, .full = true},
    };
    for (size_t i = 0; i < SO_LEN(all); i++) {
        assert_true(run(&all[i]) >= N_ROUNDS);
        assert_int_equal(n_syncs[0], n_syncs[1]);
    }
}

/* One request that needs the host for each guess makes every level of the call a pass. The other requests
 * still report how many levels they could share a pass without it. */
static void each_job_reports_its_own_levels(void **state) {
    (void)state;
    static const setting mixed = {.name = "greedy and sampled", .n_jobs = 2, .mixed = true};
    assert_true(run(&mixed) >= N_ROUNDS);
    assert_int_equal(sides[1].jobs[0].levels_per_pass, DEPTH * N_JOBS / 2);
    assert_int_equal(sides[1].jobs[1].levels_per_pass, 1);
}

/* The results of a request's first draft; max_nodes: its guesses. */
static so_draft_job first_draft(const so_draft_terms *terms) {
    static const setting ONE = {.name = "terms", .n_jobs = 1, .terms = true};
    const int32_t text[] = {5, 11, 7, 60};
    side *s = &sides[1];
    so_err err = {0};
    open_side(s, &ONE, true);
    so_draft_text of = {.prompt = text, .n_prompt = 4, .max_tokens = N_CTX};
    so_tree_init(&s->trees[0], 96, 0);
    so_tree_reset(&s->trees[0], text[3], 3);
    SO_OK_OR_FAIL(s->d->vt->open(s->d, &of, &s->states[0], &err), err);
    so_draft_job job = {.state = s->states[0],
                        .tokens = text,
                        .n_tokens = 4,
                        .n_prompt = 4,
                        .tree = &s->trees[0],
                        .max_nodes = DEPTH,
                        .max_depth = DEPTH,
                        .terms = terms};
    SO_OK_OR_FAIL(s->d->vt->propose(s->d, &job, 1, &err), err);
    assert_int_equal(s->d->levels_per_pass, DEPTH * N_JOBS);
    assert_int_equal(job.levels_per_pass, DEPTH * N_JOBS);
    job.max_nodes = s->trees[0].n_nodes - 1;
    s->d->vt->close(s->d, s->states[0]);
    so_tree_deinit(&s->trees[0]);
    close_side(s);
    return job;
}

/* A level in a pass that is made anyway costs the level price alone; another pass also costs the trip
 * price, and has to gain it with all of its levels together. A level joins those before it only if the
 * trip saved is worth what is computed in vain. */
static void prices_of_trips_and_levels(void **state) {
    (void)state;
    static const struct {
        float seen, unseen, trip, level; /* chance of a guess when its row is known, and before */
        int levels, passes;
    } cases[] = {
        {0.8F, 0.8F, 0.5F, 0.1F, DEPTH, 1}, /* the eighth level gains 0.17 */
        {0.8F, 0.8F, 0.5F, 0.45F, 3, 1},    /* 0.8, 0.64, 0.51; the fourth gains 0.41 */
        {0.95F, 0.6F, 0.0F, 0.5F, 4, 4},    /* 0.6; by rows: 0.57, 0.54, 0.51 */
        {0.95F, 0.6F, 0.3F, 0.5F, 1, 1},    /* 0.57 is not 0.8 */
        {0.95F, 0.8F, 0.3F, 0.45F, 5, 2},   /* a second pass: 0.69 + 0.55 > 0.3 + 2 · 0.45 */
        {0.95F, 0.8F, 0.35F, 0.45F, 3, 1},  /* and less than 0.35 + 2 · 0.45 */
        {0.1F, 0.8F, 0.6F, 0.3F, 5, 1},     /* rows turn out bad: what is computed is taken */
        {0.9F, 0.7F, 0.05F, 0.3F, 7, 7}, /* trips are cheap: each level waits for the row before */
    };
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        so_draft_terms t = {.start_value = 1};
        t.trip_price = t.hoped_trip_price = cases[i].trip;
        t.level_price = cases[i].level;
        for (int depth = 0; depth < SO_TERMS_DEPTHS; depth++)
            for (int k = 0; k <= SO_TERMS_CLASSES; k++)
                t.chance[depth][k] = k == SO_TERMS_CLASSES ? cases[i].unseen : cases[i].seen;
        so_draft_job job = first_draft(&t);
        printf("case %zu: %d levels in %d passes\n", i, job.n_levels, job.n_passes);
        assert_int_equal(job.max_nodes, job.n_levels);
        assert_int_equal(job.n_levels, cases[i].levels);
        assert_int_equal(job.n_passes, cases[i].passes);
    }
}

/* More chains and levels than a pass can have logits for: the chains of all jobs are that of one. */
static void many_logits(void **state) {
    (void)state;
    enum { N = 32, LEVELS = 32, N_VOCAB = 20000 };
    so_shape shape = {SO_SHAPE_SMALL, .n_layers = 1, .n_vocab = N_VOCAB, .n_ctx = 96, .seed = 6};
    so_rig r;
    so_drafter *d = NULL;
    so_err err = {0};
    static so_tree trees[N];
    static so_draft_job jobs[N];
    void *states[N];
    const int32_t text[] = {5, 11, 7, 19000};
    so_shape_open(
        &r, &shape,
        &(so_rig_opts){.level = SO_CPU_AUTO, .deferred = true, .max_rows = 1, .n_pages = 1});
    so_model_drafter_opts o = {.n_vocab = N_VOCAB,
                               .n_ctx = 96,
                               .n_parallel = N,
                               .n_batch = 4,
                               .max_draft = LEVELS,
                               .temp = -1};
    SO_OK_OR_FAIL(so_model_drafter_create(r.m, &o, NULL, &d, &err), err);
    for (int i = 0; i < N; i++) {
        so_draft_text of = {.prompt = text, .n_prompt = 4, .max_tokens = 96};
        so_tree_init(&trees[i], N_VOCAB, 0);
        so_tree_reset(&trees[i], text[3], 3);
        SO_OK_OR_FAIL(d->vt->open(d, &of, &states[i], &err), err);
        jobs[i] = (so_draft_job){.state = states[i],
                                 .tokens = text,
                                 .n_tokens = 4,
                                 .n_prompt = 4,
                                 .tree = &trees[i],
                                 .max_nodes = LEVELS,
                                 .max_depth = LEVELS};
    }
    SO_OK_OR_FAIL(d->vt->propose(d, jobs, 1, &err), err); /* the first alone */
    SO_OK_OR_FAIL(d->vt->propose(d, jobs + 1, N - 1, &err), err);
    for (int i = 0; i < N; i++) {
        assert_int_equal(trees[i].n_nodes, LEVELS + 1);
        for (int j = 1; j <= LEVELS; j++)
            assert_int_equal(trees[i].nodes[j].token, trees[0].nodes[j].token);
        d->vt->close(d, states[i]);
    }
    for (int i = 0; i < N; i++)
        so_tree_deinit(&trees[i]);
    so_drafter_free(d);
    so_rig_close(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(guesses_are_those_of_steps), cmocka_unit_test(other_modes_go_step_by_step),
        cmocka_unit_test(each_job_reports_its_own_levels),
        cmocka_unit_test(prices_of_trips_and_levels), cmocka_unit_test(many_logits)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Seeds that are used twice with `reject`: the second text has the target's distribution, whatever
 * its drafter has seen of the first.
 *
 * With a vocabulary of 4 and three tokens there are 64 texts, whose probabilities are computed by
 * plain decoding. A case makes two requests with one seed, for many seeds, and compares by
 * chi-square
 *
 *   alone   the frequency of each second text with its probability
 *   pair    the frequency of each pair of texts with the product of their probabilities: unless the
 *           second request equals the first, its text is independent
 *
 * Cases run a second time with nonce 0, which keys all random numbers by the seed alone. Those
 * marked `detected` must then fail the first comparison, or the test would prove nothing. (The
 * second comparison always fails there: with `match`, too, a reused seed repeats the text, and
 * `match` is exact.)
 *
 * Some nonces are random, so runs differ. A correct engine fails one comparison in 10^7
 * (FALSE_ALARM), the whole test one run in about 300,000. SOOTH_TEST_FULL=1 uses 100,000 seeds
 * everywhere (half an hour), SOOTH_TEST_SEEDS=N uses N, SOOTH_TEST_CASE=TEXT runs only the cases
 * whose names contain the text.
 *
 * --draft-min is tested here too: only a distribution shows that sampled drafts must not be dropped
 * for being short. */
#include "so_test.h"

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "engine/engine.h"
#include "so_lossless.h"
#include "so_rig.h"
#include "so_shape.h"

enum { N_VOCAB = 4, N_OUT = 3, N_TEXTS = 64, N_PROMPT = 4, N_CTX = 32 };
static const double FALSE_ALARM = 1e-7;
static const int32_t PROMPT[N_PROMPT] = {0, 1, 0, 2};

typedef struct fixture {
    so_rig target, draft;
    double p[N_TEXTS];
    char *dir;
} fixture;

static so_sample_params sampling(uint64_t seed) {
    so_sample_params p;
    so_sample_defaults(&p);
    p.temp = 1;
    p.seed = seed;
    return p;
}

static int number_of(const int32_t text[N_OUT]) {
    int n = 0;
    for (int i = 0; i < N_OUT; i++)
        n = n * N_VOCAB + text[i];
    return n;
}

/* The probability of each text under plain decoding. */
static void enumerate(fixture *f) {
    so_sampler *s = so_sampler_create(N_VOCAB);
    for (int t = 0; t < N_TEXTS; t++) {
        int32_t text[N_PROMPT + N_OUT];
        float logits[(N_PROMPT + N_OUT) * N_VOCAB], row[N_VOCAB];
        so_sample_params p = sampling(0);
        so_err err = {0};
        memcpy(text, PROMPT, sizeof PROMPT);
        for (int i = 0, rest = t; i < N_OUT; i++, rest /= N_VOCAB)
            text[N_PROMPT + N_OUT - 1 - i] = rest % N_VOCAB;
        so_seq *seq = so_seq_create(f->target.kv);
        so_rig_chain(&f->target, seq, text, N_PROMPT + N_OUT, logits);
        so_seq_free(seq);
        f->p[t] = 1;
        for (int n = N_PROMPT; n < N_PROMPT + N_OUT; n++) {
            so_sample_context ctx = {text, n, N_PROMPT};
            const float *at = logits + (size_t)(n - 1) * N_VOCAB;
            SO_OK_OR_FAIL(so_sample_distribution(s, &p, at, &ctx, row, &err), err);
            f->p[t] *= (double)row[text[n]];
        }
    }
    so_sampler_free(s);
}

static int open_fixture(void **state) {
    fixture *f = SO_NEW(fixture);
    so_shape shape = {.d_model = 16,
                      .n_layers = 1,
                      .n_heads = 2,
                      .n_heads_kv = 1,
                      .head_dim = 8,
                      .d_ff = 16,
                      .n_vocab = N_VOCAB,
                      .n_ctx = N_CTX,
                      .seed = 5};
    so_rig_opts o = {.level = so_cpu_best_level(), .max_rows = 16, .n_pages = 2};
    so_shape_open(&f->target, &shape, &o);
    shape.seed = 6;
    so_shape_open(&f->draft, &shape, &o);
    enumerate(f);
    f->dir = so_test_tmp();
    setenv("XDG_CACHE_HOME", f->dir, 1);
    *state = f;
    return 0;
}

static int close_fixture(void **state) {
    fixture *f = *state;
    so_rig_close(&f->target);
    so_rig_close(&f->draft);
    so_test_tmp_free(f->dir);
    free(f);
    return 0;
}

/* --- two requests --- */

/* One seed of a case. */
typedef struct pair {
    const fixture *f;
    so_engine *e; /* for cases that use one engine for all seeds */
    uint64_t seed;
    bool seed_only;
    int32_t first[N_OUT], second[N_OUT];
} pair;

static so_engine *open_with_p_min(const fixture *f, int n_parallel, so_keep keep, float p_min) {
    so_engine_opts o = {.n_ctx = N_CTX,
                        .n_parallel = n_parallel,
                        .n_batch = 16,
                        .kv_dtype = SO_DTYPE_F32,
                        .prefix_cache = true,
                        .max_draft = 4,
                        .draft = f->draft.m,
                        .draft_temp = -1,
                        .draft_p_min = p_min,
                        .keep_costs = keep};
    so_err err = {0};
    so_engine *e = NULL;
    SO_OK_OR_FAIL(so_engine_create(f->target.m, NULL, &o, &e, &err), err);
    return e;
}

static so_engine *open_engine(const fixture *f, int n_parallel, so_keep keep) {
    return open_with_p_min(f, n_parallel, keep, 0);
}

static so_request *submit(const pair *p, so_engine *e, const so_spec_opts *spec) {
    so_request_opts o = {.prompt = PROMPT,
                         .n_prompt = N_PROMPT,
                         .sample = sampling(p->seed),
                         .has_nonce = p->seed_only,
                         .max_tokens = N_OUT,
                         .spec = *spec};
    so_err err = {0};
    so_request *r = NULL;
    if (o.spec.verify == SO_VERIFY_LENIENT)
        o.spec.lenience = 1;
    SO_OK_OR_FAIL(so_engine_submit(e, &o, &r, &err), err);
    return r;
}

static void step(so_engine *e) {
    so_err err = {0};
    if (so_engine_step(e, &err) < 0)
        fail_msg("step: %s", err.msg);
}

static void take(so_engine *e, so_request *r, int32_t out[N_OUT]) {
    int n;
    while (so_request_finish(r) == SO_FINISH_NONE)
        step(e);
    const int32_t *text = so_request_output(r, &n);
    assert_int_equal(n, N_OUT);
    memcpy(out, text, N_OUT * sizeof *out);
    so_request_free(r);
}

static void run(pair *p, so_engine *e, const so_spec_opts *spec, int32_t out[N_OUT]) {
    take(e, submit(p, e, spec), out);
}

static const so_spec_opts REJECT = {.verify = SO_VERIFY_REJECT};

static so_spec_opts spec_of(const char *drafter, int length) {
    so_spec_opts s = REJECT;
    s.drafter = drafter;
    s.length = length;
    return s;
}

/* The second request gets the first text as its prediction. */
static void predict(pair *p, const so_spec_opts *first, so_spec_opts second) {
    run(p, p->e, first, p->first);
    second.expected = p->first;
    second.n_expected = N_OUT;
    run(p, p->e, &second, p->second);
}

static void predict_drawn(pair *p) {
    so_spec_opts first = spec_of("model", 3);
    predict(p, &first, spec_of("predict", 3));
}

static void predict_short(pair *p) {
    so_spec_opts first = spec_of("model", 3);
    predict(p, &first, spec_of("predict,model", 1));
}

static void predict_lenient(pair *p) {
    so_spec_opts first = spec_of("model", 3), second = spec_of("predict", 3);
    first.verify = second.verify = SO_VERIFY_LENIENT;
    predict(p, &first, second);
}

static void predict_plain(pair *p) { predict(p, &(so_spec_opts){0}, spec_of("predict", 3)); }

static void predict_adaptive(pair *p) {
    so_spec_opts first = spec_of("model", 3);
    predict(p, &first, spec_of("predict", 0));
}

/* The same drafters again, on an engine that has seen the first text or learned from its
 * verdicts. */
static void repeat(pair *p, const char *drafter, int length, int n_before) {
    so_spec_opts spec = spec_of(drafter, length);
    so_engine *e = open_engine(p->f, 1, SO_KEEP_NOTHING);
    for (int i = 0; i < n_before; i++)
        run(p, e, &spec, p->first);
    run(p, e, &spec, p->second);
    so_engine_free(e);
}

static void corpus_fixed(pair *p) { repeat(p, "corpus(min=1,mb=1)", 3, 1); }
static void corpus_adaptive(pair *p) { repeat(p, "corpus(min=1,mb=1)", 0, 1); }
static void corpus_model(pair *p) { repeat(p, "corpus(min=1,mb=1),model", 3, 1); }
static void lengths_model(pair *p) { repeat(p, "model", 0, 8); }
static void lengths_random(pair *p) { repeat(p, "random", 0, 8); }

static int remove_files(const char *dir) {
    int n = 0;
    DIR *d = opendir(dir);
    for (struct dirent *at; d && (at = readdir(d));) {
        char *path = so_path_join(dir, at->d_name);
        n += at->d_name[0] != '.' && unlink(path) == 0;
        free(path);
    }
    if (d)
        closedir(d);
    return n;
}

/* Records reach the second engine through files. */
static void saved(pair *p, const char *drafter) {
    so_spec_opts spec = spec_of(drafter, 0);
    char *dir = so_path_join(p->f->dir, "sooth/costs");
    so_engine *e = open_engine(p->f, 1, SO_KEEP_ALL);
    for (int i = 0; i < 8; i++)
        run(p, e, &spec, p->first);
    so_engine_free(e);
    e = open_engine(p->f, 1, SO_KEEP_ALL);
    run(p, e, &spec, p->second);
    so_engine_free(e);
    assert_int_equal(remove_files(dir), 1);
    free(dir);
}

static void saved_model(pair *p) { saved(p, "model"); }
static void saved_random(pair *p) { saved(p, "random"); }

/* Both at once, the second one step later. */
static void concurrent(pair *p, const char *drafter, int length) {
    so_spec_opts spec = spec_of(drafter, length);
    so_engine *e = open_engine(p->f, 2, SO_KEEP_NOTHING);
    so_request *a = submit(p, e, &spec);
    step(e);
    so_request *b = submit(p, e, &spec);
    take(e, a, p->first);
    take(e, b, p->second);
    so_engine_free(e);
}

static void concurrent_corpus(pair *p) { concurrent(p, "corpus(min=1,mb=1),model", 3); }
static void concurrent_model(pair *p) { concurrent(p, "model", 0); }

/* Guesses depend on the request alone: the same text at once and one after the other. */
static void concurrent_same(pair *p) {
    int32_t third[N_OUT];
    so_spec_opts spec = spec_of("model", 3);
    concurrent(p, "model", 3);
    run(p, p->e, &spec, third);
    if (number_of(p->first) != number_of(p->second) || number_of(p->first) != number_of(third))
        fail_msg("seed %llu: equal requests, different texts", (unsigned long long)p->seed);
}

/* --- chi-square --- */

typedef struct fit {
    double x;
    int df;
    double tail;
} fit;

/* Cells with an expected count below 5 are merged. */
static fit compare(const int *count, const double *p, int n_cells, int n) {
    double rare = 0, x = 0;
    int n_rare = 0, df = -1;
    for (int i = 0; i < n_cells; i++) {
        double want = p[i] * n;
        if (want < 5) {
            rare += want;
            n_rare += count[i];
            continue;
        }
        x += (count[i] - want) * (count[i] - want) / want;
        df++;
    }
    if (rare >= 5) {
        x += (n_rare - rare) * (n_rare - rare) / rare;
        df++;
    }
    return (fit){x, df, so_chi2_tail(x, df)};
}

typedef struct test_case {
    const char *name;
    void (*run)(pair *p);
    int n;         /* number of seeds in CI */
    bool same;     /* equal requests: the pair is not independent */
    bool detected; /* with the seed alone as key the bias is detected, also in CI */
} test_case;

static const test_case CASES[] = {
    {"predict of a drawn text", predict_drawn, 4000, false, true},
    {"predict,model, length 1", predict_short, 4000, false, true},
    {"the same, lenient=1", predict_lenient, 4000, false, true},
    {"predict of the plain text", predict_plain, 4000, false, false},
    {"predict, lengths learned", predict_adaptive, 4000, false,
     false}, /* learned lengths depend on the clock */
    {"corpus twice, length 3", corpus_fixed, 600, false, false},
    {"corpus twice, lengths learned", corpus_adaptive, 600, false, false},
    {"corpus,model twice", corpus_model, 1000, false, true},
    {"model, lengths learned", lengths_model, 1000, false, false},
    {"random, lengths learned", lengths_random, 1000, false, false},
    {"model, records kept on disk", saved_model, 400, false, false},
    {"random, records kept on disk", saved_random, 400, false, false},
    {"corpus,model at once", concurrent_corpus, 2000, false, true},
    {"model at once, lengths learned", concurrent_model, 1000, false, false},
    {"model at once, length 3", concurrent_same, 1000, true, false},
};

static bool is_wanted(const test_case *c) {
    const char *text = getenv("SOOTH_TEST_CASE");
    return !text || strstr(c->name, text);
}

static int n_seeds(int n) {
    const char *text = getenv("SOOTH_TEST_SEEDS");
    if (text)
        return (int)strtol(text, NULL, 10);
    return so_test_full() ? 100000 : SO_TEST_SANITIZED ? n / 16 : n;
}

/* Runs one case and prints both fits. Returns the smaller tail probability; with seed_only, or for
 * equal requests, that of the first comparison. */
static double check(const fixture *f, const test_case *c, bool seed_only) {
    static int alone[N_TEXTS], both[N_TEXTS * N_TEXTS];
    static double product[N_TEXTS * N_TEXTS];
    int n = n_seeds(c->n);
    pair p = {.f = f, .seed_only = seed_only, .e = open_engine(f, 1, SO_KEEP_NOTHING)};
    memset(alone, 0, sizeof alone);
    memset(both, 0, sizeof both);
    int64_t t = so_clock_ns();
    for (int i = 0; i < n; i++) {
        p.seed = 1 + (uint64_t)i;
        c->run(&p);
        alone[number_of(p.second)]++;
        both[number_of(p.first) * N_TEXTS + number_of(p.second)]++;
    }
    so_engine_free(p.e);
    for (int i = 0; i < N_TEXTS * N_TEXTS; i++)
        product[i] = f->p[i / N_TEXTS] * f->p[i % N_TEXTS];
    fit a = compare(alone, f->p, N_TEXTS, n);
    fit b = compare(both, product, N_TEXTS * N_TEXTS, n);
    print_message("%-8s %-32s %6d seeds: %8.1f on %d, p %-8.3g", seed_only ? "by seed" : "",
                  c->name, n, a.x, a.df, a.tail);
    if (c->same)
        print_message(" (%.0f us)\n", so_clock_ms_since(t) * 1e3 / n);
    else
        print_message(" pairs: %8.1f on %d, p %-8.3g (%.0f us)\n", b.x, b.df, b.tail,
                      so_clock_ms_since(t) * 1e3 / n);
    return c->same || seed_only ? a.tail : SO_MIN(a.tail, b.tail);
}

static void test_second_text(void **state) {
    for (size_t i = 0; i < SO_LEN(CASES); i++)
        if (is_wanted(&CASES[i]) && check(*state, &CASES[i], false) < FALSE_ALARM)
            fail_msg("%s: not the target's distribution", CASES[i].name);
}

static void test_seed_alone_is_caught(void **state) {
    for (size_t i = 0; i < SO_LEN(CASES); i++) {
        if (!is_wanted(&CASES[i]) || (!CASES[i].detected && !so_test_full()))
            continue;
        double tail = check(*state, &CASES[i], true);
        if (CASES[i].detected && !SO_TEST_SANITIZED && tail > FALSE_ALARM)
            fail_msg("%s: keys of the seed alone go unnoticed", CASES[i].name);
    }
}

/* A draft ends at a flat row (--draft-p-min), so whether it is shorter than --draft-min depends on
 * the tokens sampled before. Dropping it would select among them. */
static void test_sampled_drafts_are_kept(void **state) {
    const fixture *f = *state;
    static int count[N_TEXTS];
    so_spec_opts spec = spec_of("model", 3);
    pair p = {.f = f, .e = open_with_p_min(f, 1, SO_KEEP_NOTHING, 0.5f)};
    int n = n_seeds(20000), n_short = 0;
    memset(count, 0, sizeof count);
    spec.draft_min = 2;
    for (int i = 0; i < n; i++) {
        p.seed = 1 + (uint64_t)i;
        so_request *r = submit(&p, p.e, &spec);
        step(p.e); /* the first round */
        n_short += so_request_get_stats(r)->draft_n == 1;
        take(p.e, r, p.first);
        count[number_of(p.first)]++;
    }
    so_engine_free(p.e);
    fit a = compare(count, f->p, N_TEXTS, n);
    print_message("draft-min 2: %d of %d first drafts are shorter; %.1f on %d, p %.3g\n", n_short,
                  n, a.x, a.df, a.tail);
    assert_true(n_short > n / 10 && n_short < n);
    assert_true(a.tail > FALSE_ALARM);
}

int main(int argc, char **argv) {
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_second_text),
        cmocka_unit_test(test_seed_alone_is_caught),
        cmocka_unit_test(test_sampled_drafts_are_kept),
    };
    return cmocka_run_group_tests(tests, open_fixture, close_fixture);
}

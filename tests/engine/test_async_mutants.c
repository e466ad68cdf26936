/* async(X) with `reject`: texts have the target's distribution, and faults in the protocol are seen.
 *
 * With a vocabulary of 4 and four tokens there are 256 texts, whose probabilities are computed by
 * plain decoding. Requests with different seeds draft ahead; the frequencies of whole texts are
 * compared with the probabilities by chi-square. The same is done with each fault of base/mutant.h
 * that breaks the rule of sight in drafting ahead, and must then fail; a fault that serves drafts of
 * another text is exact, and is seen by guesses of a perfect draft that are rejected.
 *
 * Each case is a process of its own, because a fault is chosen once per process. A correct program
 * fails one run in 10^6 (FALSE_ALARM). The engine waits for the worker (wait=3), so that drafts are
 * served on any machine; two cases are delayed at random, and one does not wait. */
#include "so_test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/statistics.h"
#include "base/zmq.h"
#include "engine/engine.h"
#include "so_rig.h"
#include "so_shape.h"
#include "so_worker.h"

enum { N_VOCAB = 4, N_OUT = 4, N_TEXTS = 256, N_PROMPT = 4, N_CTX = 64, N_PARALLEL = 4 };
enum { N_SAMPLES = SO_TEST_SANITIZED ? 2000 : 12000 };
static const double FALSE_ALARM = 1e-6;
static const int32_t PROMPT[N_PROMPT] = {0, 1, 0, 2};

static so_sample_params sampling(float temp, uint64_t seed) {
    so_sample_params p;
    so_sample_defaults(&p);
    p.temp = temp;
    p.seed = seed;
    return p;
}

static void open_model(so_rig *r, uint64_t seed) {
    so_shape shape = {.d_model = 16,
                      .n_layers = 1,
                      .n_heads = 2,
                      .n_heads_kv = 1,
                      .head_dim = 8,
                      .d_ff = 16,
                      .n_vocab = N_VOCAB,
                      .n_ctx = N_CTX,
                      .seed = seed};
    so_shape_open(r, &shape,
                  &(so_rig_opts){.level = so_cpu_best_level(), .max_rows = 16, .n_pages = 2});
}

/* The probability of each text under plain decoding. */
static void enumerate(so_rig *target, double p[N_TEXTS]) {
    so_sampler *s = so_sampler_create(N_VOCAB);
    for (int t = 0; t < N_TEXTS; t++) {
        int32_t text[N_PROMPT + N_OUT];
        float logits[(N_PROMPT + N_OUT) * N_VOCAB], row[N_VOCAB];
        so_sample_params sp = sampling(1, 0);
        so_err err = {0};
        memcpy(text, PROMPT, sizeof PROMPT);
        for (int i = 0, rest = t; i < N_OUT; i++, rest /= N_VOCAB)
            text[N_PROMPT + N_OUT - 1 - i] = rest % N_VOCAB;
        so_seq *seq = so_seq_create(target->kv);
        so_rig_chain(target, seq, text, N_PROMPT + N_OUT, logits);
        so_seq_free(seq);
        p[t] = 1;
        for (int n = N_PROMPT; n < N_PROMPT + N_OUT; n++) {
            so_sample_context ctx = {text, n, N_PROMPT};
            const float *at = logits + (size_t)(n - 1) * N_VOCAB;
            SO_OK_OR_FAIL(so_sample_distribution(s, &sp, at, &ctx, row, &err), err);
            p[t] *= (double)row[text[n]];
        }
    }
    so_sampler_free(s);
}

typedef struct run {
    int count[N_TEXTS];
    so_request_stats sum;
    int64_t n_faults;
} run;

static so_engine *open_engine(const so_rig *target, const so_rig *draft,
                              const so_async_faults *faults) {
    so_engine_opts o = {.n_ctx = N_CTX,
                        .n_parallel = N_PARALLEL,
                        .n_batch = 16,
                        .kv_dtype = SO_DTYPE_F32,
                        .max_draft = 4,
                        .draft = draft->m,
                        .draft_temp = -1,
                        .async_faults = faults};
    so_err err = {0};
    so_engine *e = NULL;
    SO_OK_OR_FAIL(so_engine_create(target->m, NULL, &o, &e, &err), err);
    return e;
}

static void take(so_request *r, run *out) {
    int n, t = 0;
    const int32_t *text = so_request_output(r, &n);
    assert_int_equal(n, N_OUT);
    for (int i = 0; i < n; i++)
        t = t * N_VOCAB + text[i];
    out->count[t]++;
    so_stats_add(&out->sum, so_request_get_stats(r));
    so_request_free(r);
}

static void sample(so_engine *e, const char *spec, int length, float temp, int n_samples,
                   run *out) {
    *out = (run){0};
    for (int i = 0; i < n_samples; i += N_PARALLEL) {
        so_request *r[N_PARALLEL];
        so_err err = {0};
        for (int k = 0; k < N_PARALLEL; k++) {
            so_request_opts o = {
                .prompt = PROMPT,
                .n_prompt = N_PROMPT,
                .sample = sampling(temp, (uint64_t)(i + k)),
                .max_tokens = N_OUT,
                .spec = {.drafter = spec, .length = length, .verify = SO_VERIFY_REJECT}};
            SO_OK_OR_FAIL(so_engine_submit(e, &o, &r[k], &err), err);
        }
        while (so_engine_step(e, &err) > 0)
            ;
        for (int k = 0; k < N_PARALLEL; k++)
            take(r[k], out);
    }
}

static double p_value(const double p[N_TEXTS], const run *r, int n_samples) {
    double x = 0, rest_p = 0, rest_n = 0;
    int df = -1;
    for (int t = 0; t < N_TEXTS; t++) {
        double expected = p[t] * n_samples, d = r->count[t] - expected;
        if (expected < 10) {
            rest_p += expected;
            rest_n += r->count[t];
            continue;
        }
        x += d * d / expected;
        df++;
    }
    if (rest_p > 0) {
        x += (rest_n - rest_p) * (rest_n - rest_p) / rest_p;
        df++;
    }
    return so_chi2_tail(x, df);
}

/* --- cases, each in a process of its own --- */

typedef struct test_case {
    const char *mutant, *spec;
    const so_async_faults *faults;
    bool biased;  /* the distribution must differ */
    bool perfect; /* the draft is the target: every guess must be accepted, or with a mutant not */
    bool worker; /* the draft is in a worker process; spec: the options of async(model,worker=…) */
    bool planned; /* the planner chooses methods and lengths */
} test_case;

static const so_async_faults DELAYS = {
    .seed = 7, .delay_rate = 0.3, .delay_ms = 0.3, .abandon_rate = 0.1};

static const test_case CASES[] = {
    {"none", "async(model,wait=3,fallback=none)", NULL, false, false, false, false},
    {"none", "async(model,wait=3)", NULL, false, false, false, false},
    {"none", "async(model,wait=1,fallback=ngram)", &DELAYS, false, false, false, false},
    {"none", "async(model,fallback=sync)", &DELAYS, false, false, false, false},
    {"none", "async(model,wait=3)", NULL, false, false, false, true},
    {"none", "ngram,lookup,async(model,wait=2)", &DELAYS, false, false, false, true},
    {"async_better", "async(model,wait=3,fallback=none)", NULL, true, false, false, false},
    {"async_late", "async(model,wait=3,fallback=none)", NULL, true, false, false, false},
    {"none", "async(model,wait=3,fallback=none)", NULL, false, true, false, false},
    {"async_other_round", "async(model,wait=3,fallback=none)", NULL, false, true, false, false},
    {"none", "wait=3,fallback=none", NULL, false, false, true, false},
    {"none", "wait=1,fallback=ngram", NULL, false, false, true, false},
    {"none", "wait=3,fallback=none", NULL, false, true, true, false},
    {"async_other_round", "wait=3,fallback=none", NULL, false, true, true, false},
};

/* 0: as it must be. */
static int run_case(const test_case *c) {
    so_rig target, draft;
    char spec[200];
    so_err err = {0};
    double p[N_TEXTS];
    run r;
    setenv("SOOTH_DEBUG", "", 1);
    char name[64];
    snprintf(name, sizeof name, "mutant=%s", c->mutant);
    setenv("SOOTH_DEBUG", name, 1);
    open_model(&target, 5);
    open_model(&draft, c->perfect ? 5 : 6);
    enumerate(&target, p);
    so_worker *w = c->worker ? so_worker_start(&draft, NULL, NULL, &err) : NULL;
    if (c->worker && !w)
        return 3;
    if (w)
        snprintf(spec, sizeof spec, "async(model,worker=%s,%s)", so_worker_address(w), c->spec);
    else
        snprintf(spec, sizeof spec, "%s", c->spec);
    so_engine *e = open_engine(&target, &draft, c->faults);
    int n = c->perfect ? 200 : N_SAMPLES;
    sample(e, spec, c->planned ? 0 : 3, c->perfect ? 0 : 1, n, &r);
    const so_async_counts *a = &r.sum.async;
    double least = c->perfect ? 1 : p_value(p, &r, n);
    printf(
        "%s %s%s%s%s: p %.3g, %d of %d guesses accepted; rounds %d, hits %d, late %d, absent %d\n",
        c->mutant, c->spec, c->worker ? " worker" : "", c->perfect ? " perfect" : "",
        c->planned ? " planned" : "", least, r.sum.draft_n_accepted, r.sum.tested_n, a->rounds,
        a->hits, a->late, a->absent);
    fflush(stdout);
    so_engine_free(e);
    if (w)
        so_worker_stop(w);
    so_rig_close(&target);
    so_rig_close(&draft);
    bool mutant = strcmp(c->mutant, "none") != 0;
    /* Without wait= the machine decides how many drafts are ready in time, and the planner how many are
     * made. */
    bool waits = strstr(c->spec, "wait=") && !c->planned;
    if ((waits && a->hits < n / 100) || r.sum.tested_n == 0)
        return 2; /* nothing was tested */
    if (c->perfect)
        return (r.sum.draft_n_accepted == r.sum.tested_n) == mutant;
    return (least < FALSE_ALARM) != c->biased;
}

static void cases(void **state) {
    (void)state;
    bool has_zmq = so_zmq_load(&(so_zmq){0}, NULL) == SO_OK;
    for (size_t i = 0; i < SO_LEN(CASES); i++) {
        if (CASES[i].worker && !has_zmq)
            continue;
        int status = 0;
        char number[16];
        snprintf(number, sizeof number, "%zu", i);
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0) {
            execl("/proc/self/exe", "test_async_mutants", number, (char *)NULL);
            _exit(127);
        }
        assert_true(pid > 0 && waitpid(pid, &status, 0) == pid);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
            fail_msg("mutant %s, %s: status %d", CASES[i].mutant, CASES[i].spec,
                     WIFEXITED(status) ? WEXITSTATUS(status) : status);
    }
}

int main(int argc, char **argv) {
    size_t i = argc > 1 ? strtoul(argv[1], NULL, 10) : 0;
    if (argc > 1)
        return i < SO_LEN(CASES) ? run_case(&CASES[i]) : 2;
    const struct CMUnitTest tests[] = {cmocka_unit_test(cases)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

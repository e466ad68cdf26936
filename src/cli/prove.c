/* `sooth prove`: checks losslessness on the user's machine with the user's model.
 *
 *   1. same text    prompts × drafters × lengths × batch sizes, greedy and sampled, with and
 *                   without penalties and top-p: every token must equal that of plain decoding
 *   2. reject       short texts sampled with `--verify reject` over many seeds and several
 *                   drafters: a chi-square test of their joint distribution for each drafter, and
 *                   one of all together (prove_reject.c)
 *
 * A test of part 2 fails if p < 1e-6. A cell of a test may have as few as ten expected texts, so
 * the chi-square distribution is only an approximation: in simulations a correct program fails one
 * test in 250,000. In part 1 `oracle` gets the output of plain decoding, so that both long chains
 * of right guesses and chains that break off occur; in part 2 it gets the likeliest text.
 *
 * Prints what was checked and the verdict. The exit status is 1 on any difference, and also if no
 * guess was made, because then nothing was tested. Main thread only. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/statistics.h"
#include "cli/progress.h"
#include "cli/prompts.h"
#include "cli/prove_reject.h"
#include "cli/report.h"
#include "cli/spec.h"
#include "format/describe.h"

enum { DEFAULT_PREDICT = 24, MAX_PROMPTS = 40, MAX_DRAFTERS = 8, MAX_DIFFERENCES = 5 };
enum { N_REJECT = 3, REJECT_LENGTH = 2 };
static const double MIN_P = 1e-6; /* smallest p of a passing chi-square test */

static const char *const PROMPTS[] = {
    "Write a short story about a lighthouse keeper who finds a map.",
    "Repeat three times: the quick brown fox jumps over the lazy dog.",
    "Write a C function that reverses a string in place, then explain it.",
    "List the planets of the solar system with their diameters as JSON.",
    "Translate to French: good morning, how are you, see you tomorrow.",
    "Count from one to thirty in words, separated by commas.",
};

typedef struct text {
    so_tokens prompt, bare, plain; /* bare: the prompt without the chat template */
    so_sample_params sample;
} text;

typedef struct prover {
    const so_args *a;
    so_bundle b;
    so_cli_spec spec;
    so_engine_opts eo;
    text *texts;
    int n_texts, n_predict;
    const char *drafters[MAX_DRAFTERS];
    int n_drafters;
    const char *reject[N_REJECT]; /* drafters for part 2 */
    int n_reject;
    int64_t n_runs, n_tokens, n_different;
    int64_t n_accepted, n_drafted;
    int n_chi2, n_chi2_failed;
    double worst_p;
    so_progress bar;
    so_err err;
} prover;

/* --- 1. the same text --- */

static const int LENGTHS[] = {1, 4, 0}, BATCHES[] = {1, 4};

static so_sample_params sampling(int i, const prover *v) {
    so_sample_params s;
    so_sample_defaults(&s);
    s.seed = (uint64_t)so_args_int(v->a, SO_OPT_SEED, 1) + (uint64_t)i;
    s.temp = i % 3 == 0 ? 0 : i % 3 == 1 ? 1 : 0.7f;
    if (i % 3 == 2) {
        s.top_p = 0.95f;
        s.repeat_penalty = 1.1f;
        s.presence_penalty = 0.2f;
    }
    return s;
}

static so_request *submit(prover *v, so_engine *e, const text *t, const so_spec_opts *spec) {
    so_request_opts o = {.prompt = t->prompt.ids,
                         .n_prompt = (int)t->prompt.len,
                         .sample = t->sample,
                         .max_tokens = v->n_predict};
    so_request *r = NULL;
    if (spec)
        o.spec = *spec;
    return so_engine_submit(e, &o, &r, &v->err) == SO_OK ? r : NULL;
}

static int run_engine(prover *v, so_engine *e) {
    int more = 1;
    while (more > 0)
        more = so_engine_step(e, &v->err);
    return more;
}

static void report_difference(prover *v, int i, const char *drafter, int length, int batch,
                              const int32_t *out, int n) {
    const text *t = &v->texts[i];
    int at = 0;
    while (at < n && at < (int)t->plain.len && out[at] == t->plain.ids[at])
        at++;
    so_progress_end(&v->bar);
    fprintf(stderr,
            "DIFFERENT: prompt %d, %s, length %d, %d at once, temperature %g: token %d is %d, "
            "with plain decoding %d\n",
            i + 1, drafter, length, batch, (double)t->sample.temp, at, at < n ? out[at] : -1,
            at < (int)t->plain.len ? t->plain.ids[at] : -1);
}

/* Compares one finished request with plain decoding and frees it. */
static void check_request(prover *v, so_request *r, int i, const char *drafter, int length,
                          int batch) {
    int n;
    const int32_t *out = so_request_output(r, &n);
    const so_tokens *plain = &v->texts[i].plain;
    const so_request_stats *s = so_request_get_stats(r);
    bool same = so_request_finish(r) != SO_FINISH_ERROR && n == (int)plain->len &&
                (n == 0 || memcmp(out, plain->ids, (size_t)n * sizeof *out) == 0);
    v->n_runs++;
    v->n_tokens += n;
    v->n_accepted += s->draft_n_accepted;
    v->n_drafted += s->draft_n;
    if (!same && v->n_different++ < MAX_DIFFERENCES)
        report_difference(v, i, drafter, length, batch, out, n);
    so_request_free(r);
}

static int check_case(prover *v, so_engine *e, const char *drafter, int length, int batch) {
    for (int at = 0; at < v->n_texts; at += batch) {
        so_request *r[4] = {NULL};
        int n = SO_MIN(batch, v->n_texts - at), rc = SO_OK;
        for (int i = 0; i < n && rc == SO_OK; i++) {
            const text *t = &v->texts[at + i];
            so_spec_opts o = {.drafter = drafter,
                              .length = length,
                              .expected = t->plain.ids,
                              .n_expected = (int)t->plain.len};
            r[i] = submit(v, e, t, &o);
            rc = r[i] ? SO_OK : v->err.code;
        }
        if (rc == SO_OK)
            rc = run_engine(v, e);
        for (int i = 0; i < n; i++)
            if (r[i] && rc == SO_OK)
                check_request(v, r[i], at + i, drafter, length, batch);
            else
                so_request_free(r[i]);
        if (rc != SO_OK)
            return rc;
    }
    return SO_OK;
}

static int plain_texts(prover *v) {
    so_engine_opts o = v->eo;
    so_engine *e = NULL;
    o.max_draft = 0; /* speculation is disabled */
    int rc = so_engine_create(v->b.model, v->b.tok, &o, &e, &v->err);
    for (int i = 0; i < v->n_texts && rc == SO_OK; i++) {
        so_request *r = submit(v, e, &v->texts[i], NULL);
        rc = r ? run_engine(v, e) : v->err.code;
        if (rc == SO_OK)
            rc = so_request_check(r, &v->err);
        if (rc == SO_OK) {
            int n;
            const int32_t *out = so_request_output(r, &n);
            so_tokens_append(&v->texts[i].plain, out, (size_t)n);
        }
        so_request_free(r);
        so_progress_set(&v->bar, 0.05 * (i + 1) / v->n_texts);
    }
    so_engine_free(e);
    return rc;
}

static int check_texts(prover *v) {
    int fixed = (int)so_args_int(v->a, SO_OPT_SPEC_LENGTH, 0), done = 0;
    int n_lengths = fixed ? 1 : (int)SO_LEN(LENGTHS);
    int n_cases = v->n_drafters * n_lengths * (int)SO_LEN(BATCHES);
    int rc = plain_texts(v);
    for (size_t b = 0; b < SO_LEN(BATCHES) && rc == SO_OK; b++) {
        so_engine *e = NULL;
        so_engine_opts o = v->eo;
        o.n_parallel = BATCHES[b];
        rc = so_engine_create(v->b.model, v->b.tok, &o, &e, &v->err);
        for (int d = 0; d < v->n_drafters && rc == SO_OK; d++)
            for (int k = 0; k < n_lengths && rc == SO_OK; k++) {
                rc = check_case(v, e, v->drafters[d], fixed ? fixed : LENGTHS[k], BATCHES[b]);
                so_progress_set(&v->bar, 0.05 + 0.7 * ++done / n_cases);
            }
        so_engine_free(e);
    }
    return rc;
}

/* --- 2. reject --- */

static void count_test(prover *v, const so_prove_result *t) {
    double p = t->df > 0 ? so_chi2_tail(t->chi2, t->df) : 1;
    v->n_chi2++;
    v->n_chi2_failed += p < MIN_P;
    v->worst_p = SO_MIN(v->worst_p, p);
}

static int check_reject(prover *v) {
    int fixed = (int)so_args_int(v->a, SO_OPT_SPEC_LENGTH, 0);
    uint64_t seed = (uint64_t)so_args_int(v->a, SO_OPT_SEED, 1);
    so_prove_reject *r = NULL;
    so_prove_result all = {0};
    int rc = so_prove_reject_open(&v->b, &v->eo, fixed ? fixed : REJECT_LENGTH, &r, &v->err);
    for (int i = 0; i < v->n_reject && rc == SO_OK; i++) {
        const text *t = &v->texts[i % v->n_texts];
        so_prove_result one;
        so_prove_case c = {.drafter = v->reject[i],
                           .text = t->bare.len > 0 ? &t->bare : &t->prompt,
                           .favour = i > 0,
                           .seed = seed + ((uint64_t)i << 8)};
        rc = so_prove_reject_test(r, &c, &one, &v->err);
        if (rc != SO_OK)
            break;
        count_test(v, &one);
        all.chi2 += one.chi2;
        all.df += one.df;
        all.n_drafted += one.n_drafted;
        all.n_accepted += one.n_accepted;
        so_progress_set(&v->bar, 0.75 + 0.25 * (i + 1) / v->n_reject);
    }
    so_prove_reject_close(r);
    if (rc == SO_OK && all.n_drafted == 0)
        return so_err_set(&v->err, SO_EINVAL,
                          "`reject` was not tested: %s made no guess after short prompts",
                          v->reject[0]);
    count_test(v, &all); /* finds small errors common to all drafters */
    return rc;
}

/* --- setup and verdict --- */

static int read_texts(prover *v) {
    so_prompts p = {0};
    int n = (int)SO_LEN(PROMPTS), rc = SO_OK;
    if (so_args_has(v->a, SO_OPT_PROMPTS)) {
        rc = so_prompts_read(so_args_str(v->a, SO_OPT_PROMPTS, ""), &p, &v->err);
        n = SO_MIN(p.n, MAX_PROMPTS);
    }
    v->texts = SO_NEW_N(text, SO_MAX(n, 1));
    v->n_texts = n;
    for (int i = 0; i < n && rc == SO_OK; i++) {
        so_str bare = p.n ? p.items[i].turns[0] : so_str_c(PROMPTS[i]);
        rc =
            so_cli_encode(&v->b, so_args_has(v->a, SO_OPT_RAW), bare, &v->texts[i].prompt, &v->err);
        if (rc == SO_OK)
            rc = so_cli_encode(&v->b, true, bare, &v->texts[i].bare, &v->err);
        v->texts[i].sample = sampling(i, v);
    }
    so_prompts_free(&p);
    return rc;
}

static void list_drafters(prover *v) {
    static const char *const always[] = {"lookup,ngram", "oracle(0.7)", "random"};
    static const char *const with_model[] = {"model", "model(ngram)"};
    if (so_args_has(v->a, SO_OPT_SPEC)) {
        v->drafters[v->n_drafters++] = v->spec.opts.drafter;
        while (v->n_reject < N_REJECT)
            v->reject[v->n_reject++] = v->spec.opts.drafter;
        return;
    }
    v->reject[v->n_reject++] = "oracle(0.7)";             /* points */
    v->reject[v->n_reject++] = "ngram(draw)+oracle(0.7)"; /* sibling guesses */
    v->reject[v->n_reject++] = v->eo.draft ? "model" : "ngram(draw)";
    for (size_t i = 0; i < SO_LEN(always); i++)
        v->drafters[v->n_drafters++] = always[i];
    for (size_t i = 0; v->eo.draft && i < SO_LEN(with_model); i++)
        v->drafters[v->n_drafters++] = with_model[i];
}

static int print_verdict(const prover *v) {
    bool exact = v->n_different == 0 && v->n_chi2_failed == 0;
    if (so_args_has(v->a, SO_OPT_JSON)) {
        json_t *names = json_array();
        for (int i = 0; i < v->n_drafters; i++)
            json_array_append_new(names, so_describe_json_text(so_str_c(v->drafters[i])));
        so_report_print_json(json_pack(
            "{s:b, s:o, s:i, s:I, s:I, s:I, s:I, s:I, s:i, s:i, s:f}", "exact", exact, "drafters",
            names, "prompts", v->n_texts, "runs", (json_int_t)v->n_runs, "tokens",
            (json_int_t)v->n_tokens, "different", (json_int_t)v->n_different, "drafted",
            (json_int_t)v->n_drafted, "accepted", (json_int_t)v->n_accepted, "chi_square_tests",
            v->n_chi2, "chi_square_failed", v->n_chi2_failed, "chi_square_least_p", v->worst_p));
        return exact ? 0 : 1;
    }
    printf("same text   %lld runs (%d prompts; ", (long long)v->n_runs, v->n_texts);
    for (int i = 0; i < v->n_drafters; i++)
        printf("%s%s", i ? " | " : "", v->drafters[i]);
    if (so_args_has(v->a, SO_OPT_SPEC_LENGTH))
        printf("; length %d", (int)so_args_int(v->a, SO_OPT_SPEC_LENGTH, 0));
    else
        printf("; lengths 1, 4 and planned");
    printf("; 1 and 4 at once), %lld tokens, %lld guesses, %lld accepted: %lld different\n",
           (long long)v->n_tokens, (long long)v->n_drafted, (long long)v->n_accepted,
           (long long)v->n_different);
    printf("reject      %d chi-square tests of %d texts, least p %.3g: %d below %g\n", v->n_chi2,
           so_prove_reject_texts(&v->b), v->worst_p, v->n_chi2_failed, MIN_P);
    printf("verdict     %s\n", exact ? "exact: speculation changed nothing" : "NOT EXACT");
    return exact ? 0 : 1;
}

static int check_all(prover *v) {
    int rc = read_texts(v);
    if (rc == SO_OK)
        rc = check_texts(v);
    if (rc == SO_OK && v->n_drafted == 0)
        rc = so_err_set(&v->err, SO_EINVAL,
                        "no guess was made in %lld runs, so nothing is proven: raise --predict "
                        "(now %d) or name other drafters",
                        (long long)v->n_runs, v->n_predict);
    return rc == SO_OK ? check_reject(v) : rc;
}

static int read_options(prover *v) {
    const so_spec_opts *o = &v->spec.opts;
    int status = so_cli_spec_read(v->a, &v->spec);
    if (status == 0 && !o->drafter)
        status = so_args_bad(v->a, "there is nothing to prove for plain decoding");
    if (status == 0 && so_verify_mode_is_lossy(o->verify, o->lenience))
        status = so_args_bad(v->a, "--verify %s=%g is lossy: there is nothing to prove",
                             so_verify_mode_name(o->verify), o->lenience);
    return status;
}

static int prove(prover *v) {
    int status = read_options(v);
    if (status == 0)
        status = so_cli_open(v->a, &v->b);
    if (status == 0)
        status = so_cli_engine_opts(v->a, &v->b, &v->eo);
    if (status == 0)
        status = so_cli_spec_open(v->a, &v->b, &v->spec, &v->eo);
    if (status != 0)
        return status;
    v->n_predict = (int)so_args_int(v->a, SO_OPT_PREDICT, DEFAULT_PREDICT);
    v->eo.n_parallel = 1;
    list_drafters(v);
    so_progress_begin(&v->bar, "prove");
    int rc = check_all(v);
    so_progress_end(&v->bar);
    return rc == SO_OK ? print_verdict(v) : so_args_fail(v->a, &v->err);
}

int so_cmd_prove(int argc, char **argv) {
    so_args a;
    if (!so_args_parse(&a, SO_CMD_PROVE, argc, argv))
        return a.status;
    prover v = {.a = &a, .worst_p = 1};
    int status = prove(&v);
    for (int i = 0; i < v.n_texts; i++) {
        so_tokens_free(&v.texts[i].prompt);
        so_tokens_free(&v.texts[i].bare);
        so_tokens_free(&v.texts[i].plain);
    }
    free(v.texts);
    so_cli_spec_close(&v.spec);
    so_bundle_close(&v.b);
    so_args_free(&a);
    return status;
}

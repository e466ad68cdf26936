/* `sooth prove`: the promise, checked on the user's own machine with the user's own model.
 *
 *   1. same text    prompts × drafters × lengths × batch sizes, greedy and with a seed, with and
 *                   without penalties and cuts: every token equal to plain decoding's, with ==
 *   2. reject       draws through the verifier against the model's own next-token distributions,
 *                   for guesses from several q: a chi-square test each
 *
 * The distributions of 2 are the model's rows after each prompt, with all but the likeliest tokens
 * taken together as one, so that every cell has enough draws. A correct program fails a single test
 * with a chance of one in a million. Drafters that are told the text (`oracle`) are told plain
 * decoding's, so that long and broken chains of right guesses both occur.
 *
 * Prints what was checked, how much, and the verdict; exit 1 on any difference, and where nothing
 * was guessed: a verdict must have been put at risk. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "cli/progress.h"
#include "cli/prompts.h"
#include "cli/report.h"
#include "cli/spec.h"
#include "format/describe.h"
#include "kv/kv.h"

enum { DEFAULT_PREDICT = 24, MAX_PROMPTS = 40, MAX_DRAFTERS = 8, MAX_DIFFERENCES = 5 };
enum { CELLS = 33, N_DRAWS = 50000, MAX_ROWS = 256 };
static const double FALSE_ALARM = 1e-6;

static const char *const PROMPTS[] = {
    "Write a short story about a lighthouse keeper who finds a map.",
    "Repeat three times: the quick brown fox jumps over the lazy dog.",
    "Write a C function that reverses a string in place, then explain it.",
    "List the planets of the solar system with their diameters as JSON.",
    "Translate to French: good morning, how are you, see you tomorrow.",
    "Count from one to thirty in words, separated by commas.",
};

typedef struct text {
    so_tokens prompt, plain;
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
    fprintf(
        stderr,
        "DIFFERENT: prompt %d, %s, length %d, %d at once, temperature %g: token %d is %d, plain "
        "decoding says %d\n",
        i + 1, drafter, length, batch, (double)t->sample.temp, at, at < n ? out[at] : -1,
        at < (int)t->plain.len ? t->plain.ids[at] : -1);
}

/* Compares and frees one finished request. */
static void settle(prover *v, so_request *r, int i, const char *drafter, int length, int batch) {
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

static int check_way(prover *v, so_engine *e, const char *drafter, int length, int batch) {
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
                settle(v, r[i], at + i, drafter, length, batch);
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
    o.max_draft = 0; /* no part of speculation is even there */
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
    int n_ways = v->n_drafters * n_lengths * (int)SO_LEN(BATCHES);
    int rc = plain_texts(v);
    for (size_t b = 0; b < SO_LEN(BATCHES) && rc == SO_OK; b++) {
        so_engine *e = NULL;
        so_engine_opts o = v->eo;
        o.n_parallel = BATCHES[b];
        rc = so_engine_create(v->b.model, v->b.tok, &o, &e, &v->err);
        for (int d = 0; d < v->n_drafters && rc == SO_OK; d++)
            for (int k = 0; k < n_lengths && rc == SO_OK; k++) {
                rc = check_way(v, e, v->drafters[d], fixed ? fixed : LENGTHS[k], BATCHES[b]);
                so_progress_set(&v->bar, 0.05 + 0.85 * ++done / n_ways);
            }
        so_engine_free(e);
    }
    return rc;
}

/* --- 2. reject --- */

/* The row after a prompt. */
static int read_row(prover *v, const so_tokens *prompt, float *logits) {
    const so_hparams *hp = so_model_hparams(v->b.model);
    int n = (int)prompt->len, n_ctx = SO_MIN(v->eo.n_ctx, n), rc;
    so_kv_shape shape = {.n_layers = hp->n_layers,
                         .n_heads_kv = hp->n_heads_kv,
                         .head_dim = hp->head_dim,
                         .n_pages = so_kv_pages_for(n_ctx) + 1,
                         .dtype = v->eo.kv_dtype};
    so_kv *kv = NULL;
    so_pass *pass = NULL;
    so_seq *seq = NULL;
    so_row *rows = SO_NEW_N(so_row, MAX_ROWS);
    rc = so_kv_create(v->b.backend, &shape, &kv, &v->err);
    if (rc == SO_OK)
        rc = so_pass_create(v->b.model, kv, MAX_ROWS, 1, &pass, &v->err);
    if (rc == SO_OK)
        seq = so_seq_create(kv);
    for (int at = 0; at < n && rc == SO_OK;) {
        int k = SO_MIN(n - at, (int)MAX_ROWS);
        for (int i = 0; i < k; i++)
            rows[i] = (so_row){prompt->ids[at + i], at + i, 0, i - 1, at + i == n - 1, NULL};
        so_batch batch = {rows, k, &seq, 1};
        rc = so_seq_begin(seq, k, &v->err);
        if (rc == SO_OK)
            rc = so_pass_run(pass, &batch, SO_PASS_LOGITS, &v->err);
        if (rc == SO_OK)
            rc = so_pass_check_all(pass, &v->err);
        if (rc == SO_OK)
            so_seq_commit_chain(seq, k);
        at += k;
    }
    if (rc == SO_OK)
        memcpy(logits, so_pass_logits(pass, 0), (size_t)hp->n_vocab * sizeof *logits);
    so_seq_free(seq);
    so_pass_free(pass);
    so_kv_free(kv);
    free(rows);
    return rc;
}

/* The likeliest tokens of p as cells, the rest as the last one; −1 where p has no more tokens. */
static void choose_cells(const float *p, int n, int32_t cells[CELLS - 1]) {
    for (int k = 0; k < CELLS - 1; k++) {
        int32_t best = -1;
        for (int32_t i = 0; i < n; i++) {
            bool used = false;
            for (int j = 0; j < k && !used; j++)
                used = cells[j] == i;
            if (!used && (best < 0 || p[i] > p[best]))
                best = i;
        }
        cells[k] = best;
    }
}

static void condense(const float *row, const int32_t cells[CELLS - 1], float out[CELLS]) {
    double rest = 1;
    for (int k = 0; k < CELLS - 1; k++) {
        out[k] = cells[k] < 0 ? 0 : row[cells[k]];
        rest -= (double)out[k];
    }
    out[CELLS - 1] = (float)SO_MAX(rest, 0);
}

/* P(a chi-square of df degrees of freedom is at least x): the upper incomplete gamma function, by
 * its series below the mean and its continued fraction above. */
static double chi2_tail(double x, int df) {
    double a = df / 2.0, z = x / 2, front = exp(a * log(z) - z - lgamma(a));
    if (z <= 0)
        return 1;
    if (z < a + 1) {
        double term = 1 / a, sum = term;
        for (int k = 1; k < 1000 && term > sum * 1e-15; k++)
            sum += term *= z / (a + k);
        return 1 - front * sum;
    }
    double b = z + 1 - a, c = 1e300, d = 1 / b, h = d;
    for (int k = 1; k < 1000; k++) {
        double an = -k * (k - a), delta;
        b += 2;
        d = 1 / (an * d + b);
        c = b + an / c;
        h *= delta = d * c;
        if (fabs(delta - 1) < 1e-15)
            break;
    }
    return front * h;
}

/* Cells with few expected draws are taken together. */
static double p_value(const float *p, const int64_t *count) {
    double chi2 = 0, small_expected = 0, small_count = 0;
    int df = -1;
    for (int i = 0; i < CELLS; i++) {
        double expected = (double)p[i] * N_DRAWS;
        if (expected < 10) {
            small_expected += expected;
            small_count += (double)count[i];
            continue;
        }
        chi2 += ((double)count[i] - expected) * ((double)count[i] - expected) / expected;
        df++;
    }
    if (small_expected >= 5) {
        chi2 += (small_count - small_expected) * (small_count - small_expected) / small_expected;
        df++;
    } else if (small_count > small_expected + 40) {
        return 0;
    }
    return df < 1 ? 1 : chi2_tail(chi2, df);
}

static const float *row_of(void *user, int node) {
    (void)node;
    return user;
}

/* N draws of the first token through the verifier; q NULL: the argmax of p as a point. */
static void test_reject(prover *v, float *p, const float *q, uint64_t seed) {
    static const int n_guesses = 2; /* draws of one position: the second meets a residual */
    so_tree *t = SO_NEW(so_tree);
    double scratch[2 * CELLS];
    int64_t count[CELLS] = {0};
    so_verdict verdict;
    so_tree_init(t, CELLS, 1);
    for (int i = 0; i < N_DRAWS; i++) {
        so_chance_keyed chance;
        so_chance_keyed_init(&chance, seed + (uint64_t)i, 0);
        so_tree_reset(t, 0, 0);
        int row = q ? so_tree_new_row(t) : -1;
        if (q)
            memcpy(so_tree_row(t, row), q, CELLS * sizeof *q);
        for (uint32_t k = 0; k < (uint32_t)n_guesses; k++) {
            so_rng_key key = {.seed = seed + (uint64_t)i, .position = 1, .purpose = SO_RNG_DRAFT};
            int32_t x = q ? so_sample_pick(q, CELLS, so_rng_uniform(&key, k)) : (int32_t)k;
            so_tree_add(t, 0, x, q ? SO_Q_ROW : SO_Q_POINT, row, 0, 0.5f);
        }
        so_verify_reject(t, row_of, p, &chance.base, 1, scratch, &verdict);
        int32_t first = verdict.n_accepted ? t->nodes[verdict.path[0]].token : verdict.token;
        count[first]++;
    }
    so_tree_deinit(t);
    free(t);
    double pv = p_value(p, count);
    v->n_chi2++;
    v->n_chi2_failed += pv < FALSE_ALARM;
    v->worst_p = SO_MIN(v->worst_p, pv);
}

static int check_reject(prover *v) {
    int n_vocab = so_model_hparams(v->b.model)->n_vocab, rc = SO_OK;
    float *logits = SO_NEW_N(float, n_vocab), *dense = SO_NEW_N(float, n_vocab);
    so_sampler *s = so_sampler_create(n_vocab);
    for (int i = 0; i < v->n_texts && rc == SO_OK; i++) {
        int32_t cells[CELLS - 1];
        float p[CELLS], q[CELLS], even[CELLS];
        so_sample_params sp;
        so_sample_context ctx = {v->texts[i].prompt.ids, (int)v->texts[i].prompt.len,
                                 (int)v->texts[i].prompt.len};
        so_sample_defaults(&sp);
        sp.temp = 1;
        rc = read_row(v, &v->texts[i].prompt, logits);
        if (rc == SO_OK)
            rc = so_sample_distribution(s, &sp, logits, &ctx, dense, &v->err);
        if (rc != SO_OK)
            break;
        choose_cells(dense, n_vocab, cells);
        condense(dense, cells, p);
        sp.temp = 2; /* what a draft that is unsure of itself would say */
        rc = so_sample_distribution(s, &sp, logits, &ctx, dense, &v->err);
        condense(dense, cells, q);
        for (int k = 0; k < CELLS; k++)
            even[k] = 1.0f / CELLS;
        test_reject(v, p, q, 1000003 * (uint64_t)(i + 1));
        test_reject(v, p, even, 2000003 * (uint64_t)(i + 1));
        test_reject(v, p, NULL, 3000017 * (uint64_t)(i + 1));
        so_progress_set(&v->bar, 0.9 + 0.1 * (i + 1) / v->n_texts);
    }
    so_sampler_free(s);
    free(logits);
    free(dense);
    return rc;
}

/* --- setting up, and the verdict --- */

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
        so_str words = p.n ? p.items[i].turns[0] : so_str_c(PROMPTS[i]);
        rc = so_cli_encode(&v->b, so_args_has(v->a, SO_OPT_RAW), words, &v->texts[i].prompt,
                           &v->err);
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
        return;
    }
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
    printf("reject      %d chi-square tests of %d draws, least p %.3g: %d below %g\n", v->n_chi2,
           N_DRAWS, v->worst_p, v->n_chi2_failed, FALSE_ALARM);
    printf("verdict     %s\n", exact ? "exact: speculation changed nothing" : "NOT EXACT");
    return exact ? 0 : 1;
}

static int check_all(prover *v) {
    int rc = read_texts(v);
    if (rc == SO_OK)
        rc = check_texts(v);
    if (rc == SO_OK && v->n_drafted == 0)
        rc = so_err_set(&v->err, SO_EINVAL,
                        "nothing was guessed in %lld runs, so nothing is proven: raise --predict "
                        "(now %d) or name other drafters",
                        (long long)v->n_runs, v->n_predict);
    return rc == SO_OK ? check_reject(v) : rc;
}

static int read_options(prover *v) {
    const so_spec_opts *o = &v->spec.opts;
    int status = so_cli_spec_read(v->a, &v->spec);
    if (status == 0 && !o->drafter)
        status = so_args_bad(v->a, "there is nothing to prove about plain decoding");
    if (status == 0 && o->verify == SO_VERIFY_LENIENT && o->lenience < 1)
        status = so_args_bad(v->a, "--verify lenient=%g is lossy: there is nothing to prove",
                             o->lenience);
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
        so_tokens_free(&v.texts[i].plain);
    }
    free(v.texts);
    so_cli_spec_close(&v.spec);
    so_bundle_close(&v.b);
    so_args_free(&a);
    return status;
}

/* `sooth theory --measure`: options, drafters and the order of the measurements.
 *
 *   1. Check the options, open the models and create every drafter once, so that errors are
 *      reported before the long measurements begin.
 *   2. Time passes of the target over n rows, for each n. This gives t(n), which step 3 refines
 *      with further passes before each drafter is timed.
 *   3. For each temperature: generate texts with the target, measure the acceptance of every
 *      drafter on these texts, and measure its speed-up.
 *   4. Predict the speed-ups from t(n) and the acceptance. Print tables or one JSON object.
 *
 * Ctrl-C or SIGTERM ends steps 2 and 3: step 4 then prints the results so far, and the exit status
 * is 130. Main thread only; the signal handler sets a flag. */
#include "cli/measure.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "cli/prompts.h"
#include "cli/spec.h"
#include "draft/model.h"

enum {
    DEFAULT_TOKENS = 10000,
    MAX_TOKENS = 10000000,
    MAX_PROMPTS = 4096,
    MAX_ANSWER = 256,
    MIN_TEXTS = 8, /* the standard error is computed over texts */
    PARALLEL = 8,
    ROWS = 32,
    SLACK = 16, /* spare tokens of context */
    FIRST_REPEATS = 5,
};
const double so_measure_leniences[SO_MEASURE_LENIENCES] = {1, 0.5, 0.3, 0.1};

/* Two or three prompts of each category of bench/prompts/content.jsonl, because the acceptance of
 * drafters without a model depends on how repetitive the text is. */
static const char *const PROMPTS[] = {
    "Write a Java class Point with fields x and y, getters, setters, equals and hashCode.",
    "Write a C function month_name(int m) with a switch over the twelve months.",
    "Write ten Python unit tests that check add(a, b) for ten different pairs.",
    "Produce a JSON array of eight employees with id, name, department and salary.",
    "Produce an XML catalogue of six books with title, author, year and price.",
    "Write a polite letter of complaint about a late delivery, then a short reply to it.",
    "Make a weekly meal plan as a table with breakfast, lunch and dinner for each day.",
    "Write a short story about a lighthouse keeper who finds an old map.",
    "Describe a walk through a city in the rain, in three paragraphs.",
    "Explain to a child why the sky is blue and why sunsets are red.",
    "Prove by induction that the sum of the first n odd numbers is n squared.",
    "Prove that the square root of two is irrational, step by step.",
};

/* --- small parts --- */

static volatile sig_atomic_t stopped;

static void on_interrupt(int sig) {
    stopped = 1;
    signal(sig, SIG_DFL); /* a second Ctrl-C ends the program */
}

bool so_measure_stopped(void) { return stopped != 0; }

void so_measure_progress(so_measure *m, double part) {
    so_progress_set(&m->bar, (m->temp + part) / m->n_temps);
}

void so_ratio_add(so_ratio *r, double a, double n) {
    r->a += a;
    r->n += n;
    r->aa += a * a;
    r->an += a * n;
    r->nn += n * n;
    r->k++;
}

double so_ratio_value(const so_ratio *r) { return r->n > 0 ? r->a / r->n : NAN; }

/* Standard error of a ratio estimator over k texts: the spread of a − R·n divided by the total. */
double so_ratio_error(const so_ratio *r) {
    if (r->k < 2 || !(r->n > 0))
        return NAN;
    double ratio = r->a / r->n, sq = r->aa - 2 * ratio * r->an + ratio * ratio * r->nn;
    return sqrt(SO_MAX(sq, 0) * r->k / (r->k - 1)) / r->n;
}

so_sample_params so_measure_sampling(const so_measure *m, uint64_t seed) {
    so_sample_params p;
    so_sample_defaults(&p);
    p.temp = m->temps[m->temp];
    p.seed = seed;
    return p;
}

/* --- drafters --- */

typedef struct maker {
    so_measure *m;
    int half; /* 0 or 1: the drafter is measured on the texts half, half + 2, … */
} maker;

/* Counts a table from the other half of the texts, on which the drafter is not measured. */
static int count_table(const maker *k, int order, so_table **out, so_err *err) {
    const so_measure *m = k->m;
    so_table_counter *c = NULL;
    int rc = so_table_counter_create(order, so_model_hparams(m->b.model)->n_vocab, &c, err);
    for (int i = 1 - k->half; i < m->n_texts && rc == SO_OK; i += 2)
        rc = so_table_counter_add(c, m->texts[i].ids.ids + m->texts[i].n_prompt,
                                  m->texts[i].ids.len - (size_t)m->texts[i].n_prompt, err);
    if (rc != SO_OK) {
        so_table_counter_free(c);
        return rc;
    }
    return so_table_counter_finish(c, so_tokenizer_hash(m->b.tok), out, err);
}

/* Opens the draft model that a spec names. A file that several specs name is opened once. */
static int open_file(so_measure *m, so_str file, const so_bundle **out, so_err *err) {
    char *path = so_strndup(file.ptr, file.len);
    so_bundle_opts o;
    int i = 0;
    while (i < m->n_files && strcmp(m->file_names[i], path) != 0)
        i++;
    int rc = i < SO_MEASURE_FILES
                 ? SO_OK
                 : so_err_set(err, SO_ELIMIT, "more than %d draft models", SO_MEASURE_FILES);
    if (rc == SO_OK && i == m->n_files) {
        so_bundle_defaults(&o);
        o.backend = m->b.backend;
        o.draft = true;
        rc = so_bundle_open(path, &o, &m->files[i], err);
        if (rc == SO_OK)
            m->file_names[m->n_files++] = so_strdup(path);
    }
    free(path);
    if (rc == SO_OK)
        *out = &m->files[i];
    return rc;
}

static int make_model(so_measure *m, const so_spec *s, const so_spec_node *n, so_drafter *inner,
                      so_drafter **out, so_err *err) {
    const so_bundle *b = &m->draft;
    so_str file = n->name == SO_SPEC_MODEL ? so_spec_file(s, n) : (so_str){0};
    int rc = file.len > 0 ? open_file(m, file, &b, err) : SO_OK;
    if (rc == SO_OK && !b->model)
        rc = so_err_set(err, SO_EINVAL, "needs a draft model: give -md FILE or model(FILE)");
    if (rc != SO_OK)
        return rc;
    rc = so_draft_check_tokenizers(m->b.tok, b->tok, err);
    if (rc != SO_OK)
        return so_err_prefix(err, "the draft does not fit the target");
    so_model_drafter_opts o = {.n_vocab = so_model_hparams(m->b.model)->n_vocab,
                               .d_model = so_model_hparams(m->b.model)->d_model,
                               .n_ctx = m->eo.n_ctx,
                               .n_parallel = 1,
                               .n_batch = m->eo.n_batch,
                               .max_draft = m->max_gamma,
                               .kv_dtype = m->eo.kv_dtype,
                               .nodes = 2 * m->max_gamma,
                               .encoder = m->has_source,
                               .temp = -1};
    rc = so_model_opts_from_spec(s, n, &o, err);
    return rc == SO_OK ? so_model_drafter_create(b->model, &o, inner, out, err) : rc;
}

static int make_drafter(void *user, const so_spec *s, const so_spec_node *n, so_drafter *inner,
                        so_drafter **out, so_err *err) {
    const maker *k = user;
    so_table *t = NULL;
    int rc = SO_OK;
    switch (n->name) {
    case SO_SPEC_MODEL:
        return make_model(k->m, s, n, inner, out, err);
    case SO_SPEC_AUTO: /* without a draft model: lookup,ngram */
        return k->m->draft.model ? make_model(k->m, s, n, NULL, out, err) : SO_ENOTFOUND;
    case SO_SPEC_UNIGRAM:
    case SO_SPEC_BIGRAM:
        rc = count_table(k, n->name == SO_SPEC_UNIGRAM ? 1 : 2, &t, err);
        if (rc == SO_OK)
            *out = so_table_drafter_create(t, so_spec_flag(n, SO_SPEC_OPT_DRAW));
        return rc;
    default: /* every other drafter is built by so_spec_build itself */
        return so_err_set(err, SO_EUNSUPPORTED,
                          "cannot be measured on a given text; `sooth bench spec` runs it");
    }
}

int so_measure_build(so_measure *m, so_measure_drafter *d, int half, so_draft_set *out) {
    maker k = {m, half};
    so_draft_config cfg = {.n_vocab = so_model_hparams(m->b.model)->n_vocab,
                           .tokenizer_hash = so_tokenizer_hash(m->b.tok),
                           .corpus = &d->corpus[half],
                           .make = make_drafter,
                           .user = &k};
    so_err err = {0};
    int rc = so_spec_build(&d->spec, &cfg, out, &err);
    return rc == SO_OK ? rc : so_err_set(&m->err, rc, "--spec %s: %s", d->name, err.msg);
}

static void drop_drafters(so_measure *m) {
    for (int k = 0; k < m->n_drafters; k++)
        for (int half = 0; half < 2; half++) {
            so_draft_set_deinit(&m->drafters[k].sets[half]);
            so_corpus_free(m->drafters[k].corpus[half]);
            m->drafters[k].corpus[half] = NULL;
        }
}

static int make_drafters(so_measure *m) {
    int rc = SO_OK;
    for (int k = 0; k < m->n_drafters && rc == SO_OK; k++)
        for (int half = 0; half < (m->drafters[k].counted ? 2 : 1) && rc == SO_OK; half++)
            rc = so_measure_build(m, &m->drafters[k], half, &m->drafters[k].sets[half]);
    return rc;
}

/* --- options --- */

static int add_spec(so_measure *m, so_str text) {
    so_err err = {0};
    so_buf name = {0};
    if (m->n_drafters == SO_MEASURE_DRAFTERS)
        return so_args_bad(m->a, "more than %d drafters", SO_MEASURE_DRAFTERS);
    so_measure_drafter *d = &m->drafters[m->n_drafters];
    if (so_spec_parse(text, &d->spec, &err) != SO_OK)
        return so_args_bad(m->a, "%s", err.msg);
    for (int i = 0; i < d->spec.n_nodes; i++) {
        const so_spec_node *n = &d->spec.nodes[i];
        d->knows_text |= n->name == SO_SPEC_ORACLE || n->name == SO_SPEC_PREDICT;
        d->counted |= (n->name == SO_SPEC_UNIGRAM || n->name == SO_SPEC_BIGRAM) && n->file_len == 0;
        if (n->name == SO_SPEC_NONE)
            return so_args_bad(m->a, "--spec none makes no guesses: there is nothing to measure");
        if (n->name == SO_SPEC_MERGE)
            return so_args_bad(m->a,
                               "--spec %.*s: the formulas assume one guess per position; measure "
                               "the drafters of a+b one by one",
                               SO_STR_ARG(text));
        d->needs_draft |= n->name == SO_SPEC_MODEL && n->file_len == 0;
        d->wants_draft |= d->needs_draft || n->name == SO_SPEC_AUTO;
    }
    so_spec_print(&d->spec, &name);
    d->name = so_strndup(so_buf_str(&name).ptr, name.len);
    so_buf_free(&name);
    m->n_drafters++;
    return 0;
}

/* `--spec 'a;b'` and `--spec a --spec b` mean the same. */
static int add_specs(so_measure *m, const char *list) {
    int status = 0;
    for (const char *at = list; status == 0;) {
        size_t len = strcspn(at, ";");
        status = add_spec(m, (so_str){at, len});
        if (!at[len])
            break;
        at += len + 1;
    }
    return status;
}

static int read_drafters(so_measure *m) {
    int status = 0;
    m->drafters = SO_NEW_N(so_measure_drafter, SO_MEASURE_DRAFTERS);
    for (int i = 0; i < m->a->val[SO_OPT_SPEC].n_given && status == 0; i++)
        status = add_specs(m, m->a->val[SO_OPT_SPEC].items[i]);
    return status;
}

/* Without --spec: all drafters that need no file, and the draft model, if there is one. */
static int add_default_drafters(so_measure *m) {
    static const char *const always[] = {"lookup",        "ngram",        "lookup,ngram", "corpus",
                                         "unigram(draw)", "bigram(draw)", "random"};
    int status = m->draft.model ? add_specs(m, "model") : 0;
    for (size_t i = 0; i < SO_LEN(always) && status == 0; i++)
        status = add_specs(m, always[i]);
    return status;
}

static int read_numbers(so_measure *m) {
    const so_args *a = m->a;
    int64_t n = so_args_int(a, SO_OPT_PREDICT, DEFAULT_TOKENS);
    int64_t gamma = so_args_int(a, SO_OPT_GAMMA, 0);
    if (n < 1 || n > MAX_TOKENS)
        return so_args_bad(a, "--predict %lld: must be from 1 to %d with --measure", (long long)n,
                           MAX_TOKENS);
    if (so_args_has(a, SO_OPT_GAMMA) && (gamma < 1 || gamma > SO_MAX_DRAFT))
        return so_args_bad(a, "--gamma %lld: must be from 1 to %d with --measure", (long long)gamma,
                           SO_MAX_DRAFT);
    m->n_tokens = (int)n;
    m->fixed_gamma = (int)gamma;
    m->max_gamma = SO_MAX((int)gamma, (int)SO_MEASURE_GAMMA);
    m->seed = (uint64_t)so_args_int(a, SO_OPT_SEED, 1);
    m->n_temps = so_args_has(a, SO_OPT_TEMP) ? 1 : 2;
    m->temps[0] = (float)so_args_float(a, SO_OPT_TEMP, 0);
    m->temps[1] = 1;
    return 0;
}

/* --- setting up --- */

static int read_prompts(so_measure *m) {
    const char *path = so_args_str(m->a, SO_OPT_PROMPTS, so_args_str(m->a, SO_OPT_FILE, NULL));
    so_prompts p = {0};
    int rc = path ? so_prompts_read(path, &p, &m->err) : SO_OK;
    m->n_prompts = path ? SO_MIN(p.n, (int)MAX_PROMPTS) : (int)SO_LEN(PROMPTS);
    m->prompts = SO_NEW_N(so_tokens, SO_MAX(m->n_prompts, 1));
    for (int i = 0; i < m->n_prompts && rc == SO_OK; i++) {
        rc = so_cli_encode(&m->b, so_args_has(m->a, SO_OPT_RAW),
                           path ? p.items[i].turns[0] : so_str_c(PROMPTS[i]), &m->prompts[i],
                           &m->err);
        if (rc != SO_OK)
            so_err_prefix(&m->err, "prompt %d", i + 1);
        else if (m->prompts[i].len == 0)
            rc = so_err_set(&m->err, SO_EINVAL, "prompt %d is empty", i + 1);
    }
    so_prompts_free(&p);
    return rc;
}

/* Sets the shortest context that suffices, so that caches stay small. Limits the length of answers
 * if --ctx-size leaves little room. */
static int fit_context(so_measure *m) {
    int longest = 0, which = 0;
    for (int i = 0; i < m->n_prompts; i++)
        if ((int)m->prompts[i].len > longest) {
            longest = (int)m->prompts[i].len;
            which = i;
        }
    int before = m->has_source ? 1 : longest; /* in the cache; 1: the start token */
    int room = m->eo.n_ctx - before - SLACK;
    if (room < 1 || longest > m->eo.n_ctx)
        return so_err_set(
            &m->err, SO_ELIMIT,
            "prompt %d has %d tokens, which leaves no room for an answer in a context "
            "of %d: shorten the prompt or raise --ctx-size",
            which + 1, longest, m->eo.n_ctx);
    int want = SO_MIN(SO_MAX((m->n_tokens + MIN_TEXTS - 1) / MIN_TEXTS, 16), (int)MAX_ANSWER);
    m->n_answer = SO_MIN(want, room);
    m->eo.n_ctx = SO_MAX(before + SLACK + m->n_answer, longest);
    return SO_OK;
}

static int open_teacher(so_measure *m) {
    int max_rows = SO_MAX((int)ROWS, m->max_gamma + 1);
    so_teacher_opts o = {.n_pages = so_kv_pages_for(m->eo.n_ctx + max_rows) +
                                    so_kv_pages_for(SO_MEASURE_CACHED + SO_MEASURE_WIDEST) + 2,
                         .max_rows = max_rows,
                         .max_logits = max_rows,
                         .kv_dtype = m->eo.kv_dtype,
                         .max_source = m->has_source ? m->eo.n_ctx : 0,
                         .n_sources = 2};
    int rc = so_teacher_open(&m->t, m->b.model, &o, &m->err);
    if (rc == SO_OK) {
        m->timed = so_seq_create(m->t.kv);
        rc = so_teacher_read(&m->t, m->timed, m->prompts[0].ids, (int)m->prompts[0].len, &m->err);
    }
    m->pass_ms = SO_NEW_N(double, (SO_MEASURE_WIDEST + 1) * SO_MEASURE_REPEATS);
    return rc;
}

/* Opens the draft model of -md. Without -md, opens the one that is registered for the target, if
 * some drafter uses a draft model. */
static int open_draft(so_measure *m) {
    bool wanted = m->n_drafters == 0;
    const char *needed_by = NULL;
    if (so_args_has(m->a, SO_OPT_DRAFT_MODEL))
        return so_cli_open_draft(m->a, &m->b, &m->draft);
    for (int k = 0; k < m->n_drafters; k++) {
        wanted |= m->drafters[k].wants_draft;
        needed_by = m->drafters[k].needs_draft ? m->drafters[k].name : needed_by;
    }
    if ((wanted && so_bundle_find_draft(&m->b, m->eo.kv_dtype, &m->draft)) || !needed_by)
        return 0;
    char option[100];
    snprintf(option, sizeof option, "--spec %.80s", needed_by);
    return so_cli_no_draft(m->a, option);
}

static int open_all(so_measure *m) {
    int status = read_numbers(m);
    if (status == 0)
        status = read_drafters(m);
    if (status == 0)
        status = so_cli_open(m->a, &m->b);
    if (status == 0)
        status = so_cli_engine_opts(m->a, &m->b, &m->eo);
    if (status == 0)
        status = open_draft(m);
    if (status == 0 && m->n_drafters == 0)
        status = add_default_drafters(m);
    if (status != 0)
        return status;
    if (!so_args_has(m->a, SO_OPT_PARALLEL))
        m->eo.n_parallel = PARALLEL;
    m->has_source = so_model_hparams(m->b.model)->n_enc_layers > 0;
    int rc = read_prompts(m);
    if (rc == SO_OK)
        rc = fit_context(m);
    if (rc == SO_OK)
        rc = open_teacher(m);
    /* Only to report errors now; measure_temp creates the drafters again from its texts. */
    if (rc == SO_OK)
        rc = make_drafters(m);
    drop_drafters(m);
    return rc == SO_OK ? 0 : so_args_fail(m->a, &m->err);
}

/* --- order of the measurements --- */

static int measure_temp(so_measure *m) {
    int rc = so_measure_generate(m);
    if (rc == SO_OK && !stopped)
        rc = make_drafters(m);
    if (rc == SO_OK && !stopped)
        rc = so_measure_accept(m);
    for (int k = 0; k < m->n_drafters && rc == SO_OK && !stopped; k++) {
        rc = so_measure_speed(m, k);
        so_measure_progress(m, 0.7 + 0.3 * (k + 1) / m->n_drafters);
    }
    drop_drafters(m);
    so_measure_free_texts(m);
    return rc;
}

static int measure(so_measure *m) {
    so_progress_begin(&m->bar, "measuring");
    int rc = so_measure_passes(m, FIRST_REPEATS);
    for (m->temp = 0; m->temp < m->n_temps && rc == SO_OK && !stopped; m->temp++)
        rc = measure_temp(m);
    so_progress_end(&m->bar);
    if (rc != SO_OK)
        return so_args_fail(m->a, &m->err);
    so_measure_predict(m);
    so_measure_print(m, !stopped);
    return stopped ? 130 : 0;
}

static void close_all(so_measure *m) {
    for (int i = 0; i < m->n_prompts; i++)
        so_tokens_free(&m->prompts[i]);
    free(m->prompts);
    for (int k = 0; k < m->n_drafters; k++)
        free(m->drafters[k].name);
    free(m->drafters);
    so_seq_free(m->timed);
    so_teacher_close(&m->t);
    free(m->pass_ms);
    for (int i = 0; i < m->n_files; i++) {
        so_bundle_close(&m->files[i]);
        free(m->file_names[i]);
    }
    so_bundle_close(&m->draft);
    so_bundle_close(&m->b);
}

int so_theory_measure(const so_args *a) {
    so_measure *m = SO_NEW(so_measure);
    signal(SIGINT, on_interrupt);
    signal(SIGTERM, on_interrupt);
    m->a = a;
    int status = open_all(m);
    if (status == 0)
        status = measure(m);
    close_all(m);
    free(m);
    return status;
}

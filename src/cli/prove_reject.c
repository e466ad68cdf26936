/* Samples short texts through the engine with `--verify reject` and compares their joint
 * distribution with the exact one.
 *
 *   1. exact     compute the model's distributions after the prompt and every continuation (teacher
 *                forcing); their products are the probabilities of all texts of three tokens
 *   2. sample    run the same prompt many times, each request with its own key, several requests at
 *                a time, with drafts of a fixed depth (two by default)
 *   3. compare   chi-square over the texts; rare texts are merged
 *
 * The joint distribution is compared because each token alone can be distributed correctly while
 * the tokens wrongly depend on each other, as when one random number is used at two positions.
 * Texts have three tokens because a round in which both guesses are accepted emits three. top-k
 * limits the number of texts to TOP_K^N_TOKENS. The temperature is high enough that no text is
 * likely: guesses are then accepted about half of the time, and errors in acceptance become
 * visible.
 *
 * A key is (seed, choice). The low bits of the seed, its high bits and the choice take a few values
 * each. A build that ignores one of them uses the same random numbers for several texts; equal
 * texts in groups of c multiply the chi-square by c.
 *
 * The prompt is one cache page and one token long: all requests share the page, and each computes
 * the last token itself. The prompt repeats the first tokens of a text, or (so_prove_case.favour)
 * consists of TOP_K tokens in random order, with a bias so that only these can follow: then n-gram
 * tables, too, guess tokens that can follow.
 *
 * An encoder reads the prompt; the text that continues then begins with the decoder's start token.
 * Main thread only. */
#include "cli/prove_reject.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "cli/teacher.h"

enum { N_TOKENS = 3, TOP_K = 3, N_CELLS = 27 };
enum { N_PROMPT = SO_KV_PAGE + 1, PERIOD = 11, PARALLEL = 8, MAX_ROWS = 64 };
enum { KEY_VALUES = 8 }; /* number of values of the low and of the high bits of a seed */
enum { MIN_TEXTS = 256, MAX_TEXTS = 1536 };
/* Number of texts of one test × bytes of weights, unless MIN_TEXTS or MAX_TEXTS limits it. */
static const double TEXT_BYTES = 16e9;
enum { FAVOUR = 100 }; /* bias of the favoured tokens: more than any difference of logits */
enum { MAX_TEMP = 64 };
static const double MIN_EXPECTED = 10; /* expected texts; rarer ones are merged */
static const double MAX_CHANCE = 0.15; /* largest probability of one text */

typedef struct cell {
    int32_t tokens[N_TOKENS];
    double p;
    int count;
} cell;

struct so_prove_reject {
    const so_bundle *b;
    so_engine_opts eo;
    int length, n_texts;
    so_engine *e;
    so_teacher teacher;
    so_sampler *sampler;
    float *dist; /* [n_vocab] */

    /* the current test: */
    so_sample_params sample;
    int32_t text[N_PROMPT + N_TOKENS]; /* the prompt and a continuation */
    int n_prompt;
    int32_t source[N_PROMPT]; /* the prompt, if the model has an encoder */
    int n_source;             /* 0: it has none */
    so_bias favoured[TOP_K];
    cell cells[N_CELLS];
    int n_cells;
    bool impossible; /* a text of probability 0 was sampled */
};

int so_prove_reject_texts(const so_bundle *b) {
    double n = TEXT_BYTES / (double)SO_MAX(so_model_weight_bytes(b->model), (size_t)1);
    return (int)SO_MIN(SO_MAX(n, MIN_TEXTS), MAX_TEXTS);
}

int so_prove_reject_open(const so_bundle *b, const so_engine_opts *eo, int length,
                         so_prove_reject **out, so_err *err) {
    so_prove_reject *v = SO_NEW(so_prove_reject);
    int n_vocab = so_model_hparams(b->model)->n_vocab;
    v->b = b;
    v->eo = *eo;
    v->length = length;
    v->n_texts = so_prove_reject_texts(b);
    v->eo.n_parallel = PARALLEL;
    v->eo.n_ctx = SO_MIN(eo->n_ctx, N_PROMPT + N_TOKENS);
    v->eo.n_pages = 0;
    v->eo.prefix_cache = true;
    v->eo.max_draft = length;
    v->eo.keep_costs = SO_KEEP_NOTHING; /* these runs are not typical of the user's */
    v->n_prompt = v->eo.n_ctx - N_TOKENS;
    so_teacher_opts to = {.n_pages = so_kv_pages_for(v->eo.n_ctx) + 1,
                          .max_rows = MAX_ROWS,
                          .max_logits = 1,
                          .kv_dtype = eo->kv_dtype,
                          .max_source = N_PROMPT};
    int rc = v->n_prompt > 0
                 ? SO_OK
                 : so_err_set(err, SO_ERANGE, "--ctx-size %d is too small for a text", eo->n_ctx);
    if (rc == SO_OK)
        rc = so_teacher_open(&v->teacher, b->model, &to, err);
    if (rc == SO_OK)
        rc = so_engine_create(b->model, b->tok, &v->eo, &v->e, err);
    v->sampler = so_sampler_create(n_vocab);
    v->dist = SO_NEW_N(float, n_vocab);
    if (rc == SO_OK)
        *out = v;
    else
        so_prove_reject_close(v);
    return rc;
}

void so_prove_reject_close(so_prove_reject *v) {
    if (!v)
        return;
    so_engine_free(v->e);
    so_teacher_close(&v->teacher);
    so_sampler_free(v->sampler);
    free(v->dist);
    free(v);
}

/* --- 1. exact --- */

/* Enumerates the continuations of the prompt and `depth` tokens after it, which have probability p
 * and whose logits row the teacher has just computed. */
static int enumerate(so_prove_reject *v, int depth, double p, so_err *err) {
    so_teacher *t = &v->teacher;
    int n = v->n_prompt + depth, n_vocab = so_model_hparams(v->b->model)->n_vocab, n_next = 0;
    so_sample_context ctx = {v->text, n, v->n_prompt};
    struct {
        int32_t token;
        double p;
    } next[TOP_K];
    if (depth == N_TOKENS) {
        cell *c = &v->cells[v->n_cells++];
        *c = (cell){.p = p};
        memcpy(c->tokens, v->text + v->n_prompt, sizeof c->tokens);
        return SO_OK;
    }
    int rc = so_sample_distribution(v->sampler, &v->sample, so_pass_logits(t->pass, 0), &ctx,
                                    v->dist, err);
    for (int32_t i = 0; rc == SO_OK && i < n_vocab; i++)
        if (v->dist[i] > 0) {
            SO_ASSERT_OP(n_next, <, TOP_K);
            next[n_next].token = i;
            next[n_next++].p = p * (double)v->dist[i];
        }
    for (int i = 0; i < n_next && rc == SO_OK; i++) {
        v->text[n] = next[i].token;
        if (depth + 1 < N_TOKENS)
            rc = so_teacher_feed(t, t->seq, v->text + n, 1, 1, err);
        if (rc == SO_OK)
            rc = enumerate(v, depth + 1, next[i].p, err);
        if (rc == SO_OK)
            so_seq_truncate_to(t->seq, n);
    }
    return rc;
}

static const cell *likeliest(const so_prove_reject *v) {
    const cell *best = v->cells;
    for (int i = 1; i < v->n_cells; i++)
        if (v->cells[i].p > best->p)
            best = &v->cells[i];
    return best;
}

/* Computes the probabilities at the first temperature of 1, 2, 4, … at which no text is more likely
 * than MAX_CHANCE: a test of a nearly certain text would detect little. */
static int find_chances(so_prove_reject *v, so_err *err) {
    so_teacher *t = &v->teacher;
    int rc = SO_OK;
    for (v->sample.temp = 1; rc == SO_OK; v->sample.temp *= 2) {
        v->n_cells = 0;
        rc = so_teacher_feed(t, t->seq, v->text, v->n_prompt, 1, err);
        if (rc == SO_OK)
            rc = enumerate(v, 0, 1, err);
        if (rc == SO_OK)
            so_seq_truncate_to(t->seq, 0);
        if (likeliest(v)->p < MAX_CHANCE || v->sample.temp >= MAX_TEMP)
            break;
    }
    return rc;
}

/* --- 2. sample --- */

static void set_key(so_sample_params *s, uint64_t seed, int i) {
    s->seed = seed + (uint64_t)(i % KEY_VALUES) + ((uint64_t)(i / KEY_VALUES % KEY_VALUES) << 32);
    s->choice = (uint32_t)(i / KEY_VALUES / KEY_VALUES);
}

static int submit(so_prove_reject *v, const char *drafter, so_request **out, so_err *err) {
    const cell *expected = likeliest(v); /* for drafters that get the text */
    so_request_opts o = {.prompt = v->n_source > 0 ? v->source : v->text,
                         .n_prompt = v->n_source > 0 ? v->n_source : v->n_prompt,
                         .sample = v->sample,
                         .max_tokens = N_TOKENS,
                         .ignore_end = true,
                         .spec = {.drafter = drafter,
                                  .length = v->length,
                                  .verify = SO_VERIFY_REJECT,
                                  .expected = expected->tokens,
                                  .n_expected = N_TOKENS}};
    return so_engine_submit(v->e, &o, out, err);
}

/* Counts the text and the guesses of a finished request. */
static int take(so_prove_reject *v, const so_request *r, so_prove_result *out, so_err *err) {
    int n, i = 0, rc = so_request_check(r, err);
    const int32_t *ids = so_request_output(r, &n);
    if (rc != SO_OK)
        return rc;
    while (i < v->n_cells &&
           (n != N_TOKENS || memcmp(ids, v->cells[i].tokens, sizeof *ids * N_TOKENS) != 0))
        i++;
    if (i < v->n_cells)
        v->cells[i].count++;
    else
        v->impossible = true;
    out->n_drafted += so_request_get_stats(r)->draft_n;
    out->n_accepted += so_request_get_stats(r)->draft_n_accepted;
    return SO_OK;
}

/* PARALLEL requests run at any time; when one ends, the next is submitted, so that rounds of
 * different depths are in the same pass. */
static int sample_texts(so_prove_reject *v, const so_prove_case *c, so_prove_result *out,
                        so_err *err) {
    so_request *slots[PARALLEL] = {NULL};
    int n_submitted = 0, n_done = 0, rc = SO_OK;
    while (n_done < v->n_texts && rc >= 0) {
        for (int i = 0; i < PARALLEL && n_submitted < v->n_texts && rc >= 0; i++)
            if (!slots[i]) {
                set_key(&v->sample, c->seed, n_submitted++);
                rc = submit(v, c->drafter, &slots[i], err);
            }
        if (rc >= 0)
            rc = so_engine_step(v->e, err);
        for (int i = 0; i < PARALLEL && rc >= 0; i++)
            if (slots[i] && so_request_finish(slots[i]) != SO_FINISH_NONE) {
                rc = take(v, slots[i], out, err);
                so_request_free(slots[i]);
                slots[i] = NULL;
                n_done++;
            }
    }
    for (int i = 0; i < PARALLEL; i++)
        so_request_free(slots[i]);
    return SO_MIN(rc, SO_OK);
}

/* --- 3. compare --- */

static int by_chance(const void *a, const void *b) {
    double x = ((const cell *)a)->p, y = ((const cell *)b)->p;
    return (x > y) - (x < y);
}

/* Merges texts, the rarest first, until each group is expected MIN_EXPECTED times. */
static void compare(so_prove_reject *v, so_prove_result *out) {
    double expected = 0, count = 0;
    out->df = -1;
    out->chi2 = 0;
    qsort(v->cells, (size_t)v->n_cells, sizeof *v->cells, by_chance);
    for (int i = 0; i < v->n_cells; i++) {
        expected += v->cells[i].p * v->n_texts;
        count += v->cells[i].count;
        if (expected < MIN_EXPECTED && i + 1 < v->n_cells)
            continue;
        out->chi2 += (count - expected) * (count - expected) / expected;
        out->df++;
        expected = count = 0;
    }
    if (v->impossible)
        out->chi2 = INFINITY;
}

/* --- the prompt --- */

/* The first TOP_K different tokens of a text; if it has fewer, arbitrary ones are added. */
static void choose_favoured(so_prove_reject *v, const so_tokens *text) {
    int n = 0;
    for (size_t i = 0; n < TOP_K; i++) {
        int32_t token = i < text->len ? text->ids[i] : (int32_t)(i - text->len);
        bool used = false;
        for (int k = 0; k < n; k++)
            used |= v->favoured[k].token == token;
        if (!used)
            v->favoured[n++] = (so_bias){token, FAVOUR};
    }
}

static void make_prompt(so_prove_reject *v, const so_prove_case *c) {
    int period = SO_MIN((int)c->text->len, (int)PERIOD);
    so_sample_defaults(&v->sample);
    v->sample.top_k = TOP_K;
    for (int i = 0; i < v->n_prompt; i++)
        v->text[i] = c->text->ids[i % period];
    if (!c->favour)
        return;
    choose_favoured(v, c->text);
    v->sample.bias = v->favoured;
    v->sample.n_bias = TOP_K;
    for (int i = 0; i < v->n_prompt; i++) {
        so_rng_key key = {.position = (uint32_t)i, .purpose = SO_RNG_TEST};
        v->text[i] = v->favoured[(int)(so_rng_uniform(&key, 0) * TOP_K)].token;
    }
}

static int set_up(so_prove_reject *v, const so_prove_case *c, so_err *err) {
    const so_hparams *hp = so_model_hparams(v->b->model);
    v->impossible = false;
    v->n_prompt = v->eo.n_ctx - N_TOKENS;
    make_prompt(v, c);
    if (hp->n_enc_layers == 0)
        return SO_OK;
    v->n_source = v->n_prompt;
    memcpy(v->source, v->text, (size_t)v->n_source * sizeof *v->source);
    v->text[0] = hp->decoder_start;
    v->n_prompt = 1;
    return so_teacher_read(&v->teacher, v->teacher.seq, v->source, v->n_source, err);
}

int so_prove_reject_test(so_prove_reject *v, const so_prove_case *c, so_prove_result *out,
                         so_err *err) {
    *out = (so_prove_result){0};
    int rc = set_up(v, c, err);
    if (rc == SO_OK)
        rc = find_chances(v, err);
    if (rc == SO_OK)
        rc = sample_texts(v, c, out, err);
    if (rc == SO_OK)
        compare(v, out);
    return rc;
}

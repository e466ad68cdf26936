/* Submission of a request, and access to its results. Submission checks everything that can be
 * checked before the request runs and allocates all memory that it will need, so that a step
 * allocates nothing. Scheduling is in schedule.c, the step in engine.c, guesses in speculate.c.
 * Engine thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "engine/impl.h"

/* --- submission --- */

static int check_prompt(const so_engine *e, const so_request_opts *o, so_err *err) {
    int n_vocab = so_model_hparams(e->m)->n_vocab, max_ctx = so_model_hparams(e->m)->n_ctx_train;
    if (o->n_prompt < 1)
        return so_err_set(err, SO_EINVAL,
                          "the prompt is empty: the model needs at least one token");
    if (o->n_prompt >= e->o.n_ctx)
        return so_err_set(err, SO_ELIMIT,
                          "the prompt has %d tokens, the context %d, which also holds the "
                          "answer: shorten the prompt or raise --ctx-size (this model allows %d)",
                          o->n_prompt, e->o.n_ctx, max_ctx);
    for (int i = 0; i < o->n_prompt; i++)
        if (o->prompt[i] < 0 || o->prompt[i] >= n_vocab)
            return so_err_set(err, SO_ERANGE,
                              "token %d of the prompt is %d: the vocabulary has ids 0 to %d", i,
                              o->prompt[i], n_vocab - 1);
    return SO_OK;
}

/* Encoder-decoder models: the prompt is what the encoder reads. */
static int check_source(const so_engine *e, const so_request_opts *o, so_err *err) {
    int n_vocab = so_model_hparams(e->m)->n_vocab, max_len = so_sources_max_len(e->sources);
    bool only_end = o->n_prompt == 1 && e->tok && o->prompt[0] == so_tokenizer_eos(e->tok);
    if (o->n_prompt < 1 || only_end) /* the tokenizer adds an end token to no text, too */
        return so_err_set(err, SO_EINVAL, "the source text is empty: the encoder needs a text");
    if (o->n_prompt > max_len)
        return so_err_set(err, SO_ELIMIT,
                          "the source text has %d tokens, the encoder reads at most %d: shorten "
                          "it or raise --ctx-size (this model allows %d)",
                          o->n_prompt, max_len, so_model_hparams(e->m)->n_ctx_train);
    for (int i = 0; i < o->n_prompt; i++)
        if (o->prompt[i] < 0 || o->prompt[i] >= n_vocab)
            return so_err_set(err, SO_ERANGE,
                              "token %d of the source text is %d: the vocabulary has ids 0 to %d",
                              i, o->prompt[i], n_vocab - 1);
    if (o->score_prompt && o->n_logprobs > 0)
        return so_err_set(err, SO_EUNSUPPORTED,
                          "--logprobs for the prompt: an encoder-decoder model gives none to its "
                          "source text; ask for those of the answer alone");
    return SO_OK;
}

const char *so_request_begin_text(const so_engine *e, int n_prompt, so_begin_text buf) {
    if (e->sources)
        return "the start token";
    snprintf(buf, sizeof(so_begin_text), "a prompt of %d token%s", n_prompt,
             n_prompt == 1 ? "" : "s");
    return buf;
}

static int check_length(const so_engine *e, const so_request_opts *o, so_err *err) {
    so_begin_text begin;
    if (o->max_tokens < -1)
        return so_err_set(err, SO_ERANGE, "--predict %d: must be -1 (no limit) or more",
                          o->max_tokens);
    if (o->max_tokens > e->o.n_ctx - o->n_prompt)
        return so_err_set(err, SO_ELIMIT,
                          "--predict %d after %s does not fit the context of %d: lower it (-1: as "
                          "many as fit) or raise --ctx-size (this model allows %d)",
                          o->max_tokens, so_request_begin_text(e, o->n_prompt, begin), e->o.n_ctx,
                          so_model_hparams(e->m)->n_ctx_train);
    return SO_OK;
}

/* If all drafters are draft models, refuses a text that is longer than the longest of their
 * contexts. Without a limit on the answer only the prompt has to fit: the draft models guess up to
 * the end of their contexts, and the tokens after it are decoded without guesses. */
static int check_draft_length(const so_request *r, so_err *err) {
    const so_drafter *d = so_speculate_drafter(r);
    int max_ctx = d ? so_drafter_n_ctx(d) : 0;
    int n = r->n_prompt + SO_MAX(r->max_tokens, 0);
    so_begin_text begin;
    if (max_ctx == 0 || n <= max_ctx)
        return SO_OK;
    if (r->n_prompt > max_ctx)
        return so_err_set(err, SO_ELIMIT,
                          "the prompt has %d tokens, the draft model's context %d: shorten it, or "
                          "speculate without the model (--spec lookup)",
                          r->n_prompt, max_ctx);
    return so_err_set(
        err, SO_ELIMIT,
        "--predict %d after %s does not fit the draft model's context of %d: lower it, or add a "
        "drafter for the text after it (--spec %s,lookup)",
        r->max_tokens, so_request_begin_text(r->e, r->n_prompt, begin), max_ctx,
        so_request_drafter(r));
}

static int check_request(const so_engine *e, const so_request_opts *o, so_err *err) {
    int rc = check_prompt(e, o, err);
    if (rc == SO_OK)
        rc = so_sample_check(&o->sample, so_model_hparams(e->m)->n_vocab, err);
    if (rc == SO_OK)
        rc = check_length(e, o, err);
    if (rc != SO_OK)
        return rc;
    if (o->n_stops < 0 || o->n_stops > SO_REQUEST_MAX_STOPS)
        return so_err_set(err, SO_ELIMIT, "%d stop strings: at most %d", o->n_stops,
                          SO_REQUEST_MAX_STOPS);
    for (int i = 0; i < o->n_stops; i++)
        if (o->stops[i].len == 0)
            return so_err_set(err, SO_EINVAL, "stop string %d is empty", i + 1);
    rc = so_restrict_check(o, so_model_hparams(e->m)->n_vocab, err);
    if (rc == SO_OK)
        rc = so_beams_check(o, err);
    if (rc != SO_OK)
        return rc;
    if (o->n_logprobs < 0 || o->n_logprobs > SO_LOGPROBS_MAX)
        return so_err_set(err, SO_ERANGE, "--logprobs %d: must be from 0 to %d", o->n_logprobs,
                          SO_LOGPROBS_MAX);
    return SO_OK;
}

static void copy_lists(so_request *r, const so_request_opts *o) {
    so_str *stops = so_arena_alloc(&r->arena, (size_t)o->n_stops, sizeof *stops);
    for (int i = 0; i < o->n_stops; i++) {
        size_t len = o->stops[i].len;
        stops[i] = (so_str){so_arena_strndup(&r->arena, o->stops[i].ptr, len), len};
    }
    r->stops = (so_stops){.strings = stops, .n_strings = o->n_stops};
}

static void alloc_text(so_request *r, const so_request_opts *o, int max_len) {
    int n_vocab = so_model_hparams(r->e->m)->n_vocab;
    r->tokens = SO_NEW_N(int32_t, max_len + SO_TREE_MAX);
    memcpy(r->tokens, o->prompt, (size_t)o->n_prompt * sizeof *o->prompt);
    r->n_tokens = r->n_prompt = o->n_prompt;
    r->max_len = max_len;
    if (o->n_logprobs == 0)
        return;
    r->n_logprobs = 1 + SO_MIN(o->n_logprobs, n_vocab);
    r->logprobs = SO_NEW_N(so_logprob, (size_t)(max_len - o->n_prompt) * r->n_logprobs);
    if (o->score_prompt)
        r->prompt_logprobs = SO_NEW_N(so_logprob, (size_t)(o->n_prompt - 1) * r->n_logprobs);
}

/* The longest text of the request, and the positions that it may need in the cache. */
static int choose_room(const so_engine *e, const so_request_opts *o, int *max_len, int *max_slots,
                       so_err *err) {
    if (o->beams.width > 0)
        return so_beams_room(e, o, max_len, max_slots, err);
    int n = o->n_prompt + o->max_tokens;
    if (o->max_tokens < 0) /* up to the end of the context or of the cache, whichever is shorter */
        n = SO_MAX(o->n_prompt + 1, (int)SO_MIN(e->o.n_ctx, (int64_t)e->n_pages * SO_KV_PAGE));
    if (so_kv_pages_for(n) > e->n_pages)
        return so_err_set(err, SO_ELIMIT,
                          "prompt and answer of up to %d tokens need %d cache pages, there are %d: "
                          "lower --predict or raise --kv-pages",
                          n, so_kv_pages_for(n), e->n_pages);
    *max_len = *max_slots = n;
    return SO_OK;
}

static int submit(so_engine *e, const so_request_opts *o, const so_request_opts *source,
                  so_request **out, so_err *err) {
    int max_len = 0, max_slots = 0, rc = check_request(e, o, err);
    if (rc == SO_OK)
        rc = choose_room(e, o, &max_len, &max_slots, err);
    if (rc != SO_OK)
        return rc;
    so_request *r = SO_NEW(so_request);
    r->e = e;
    r->sample = o->sample;
    r->greedy = so_sample_is_argmax(&o->sample);
    r->max_tokens = o->max_tokens;
    r->priority = o->priority;
    r->serial = e->n_submitted++;
    r->t_submitted_ns = so_clock_ns();
    r->ignore_end = o->ignore_end;
    r->on_event = o->on_event;
    r->on_round = o->on_round;
    r->user = o->user;
    copy_lists(r, o);
    so_restrict_open(r, o);
    r->greedy &= !so_restrict_any(r);
    alloc_text(r, o, max_len);
    r->max_slots = max_slots;
    r->detok = (so_detok){.t = e->tok, .started = o->continues};
    r->stats.prompt_n = o->n_prompt;
    if (source) {
        r->n_source = r->stats.prompt_n = source->n_prompt;
        r->source = SO_NEW_N(int32_t, source->n_prompt);
        memcpy(r->source, source->prompt, (size_t)source->n_prompt * sizeof *r->source);
    }
    e->n_requests++;
    so_beams_open(r, o);
    rc = so_speculate_open(r, &o->spec, err);
    if (rc == SO_OK)
        rc = check_draft_length(r, err);
    if (rc == SO_OK) {
        so_nonce_choose(r, o);
        so_verifier_open(r);
    }
    if (rc != SO_OK) {
        r->phase = SO_PHASE_DONE;
        so_request_free(r);
        return rc;
    }
    so_schedule_enqueue(r);
    *out = r;
    return SO_OK;
}

/* With an encoder the prompt is its text, and the decoder begins with its start token. */
int so_engine_submit(so_engine *e, const so_request_opts *o, so_request **out, so_err *err) {
    if (!e->sources)
        return submit(e, o, NULL, out, err);
    int32_t start = so_model_hparams(e->m)->decoder_start;
    so_request_opts decoder = *o;
    decoder.prompt = &start;
    decoder.n_prompt = 1;
    decoder.continues = false;
    int rc = check_source(e, o, err);
    return rc == SO_OK ? submit(e, &decoder, o, out, err) : rc;
}

void so_request_cancel(so_request *r) { r->cancelled = true; }

void so_request_free(so_request *r) {
    if (!r)
        return;
    so_schedule_retire(r);
    so_speculate_release(r);
    so_beams_free(r);
    r->e->n_requests--;
    so_stops_free(&r->stops);
    so_arena_free(&r->arena);
    free(r->source);
    free(r->tokens);
    free(r->logprobs);
    free(r->prompt_logprobs);
    free(r);
}

/* --- results --- */

const char *so_finish_name(so_finish f) {
    static const char *const names[] = {"", "stop", "length", "cancelled", "error"};
    return names[f];
}

so_finish so_request_finish(const so_request *r) { return r->finish; }
const so_err *so_request_error(const so_request *r) { return &r->err; }

int so_request_check(const so_request *r, so_err *err) {
    return r->finish == SO_FINISH_ERROR ? so_err_set(err, r->err.code, "%s", r->err.msg) : SO_OK;
}

const so_request_stats *so_request_get_stats(const so_request *r) { return &r->stats; }
uint64_t so_request_seed(const so_request *r) { return r->seed; }
void *so_request_user(const so_request *r) { return r->user; }

const char *so_verify_mode_name(so_verify_mode m) {
    static const char *const names[] = {"match", "reject", "lenient", "typical"};
    return names[m];
}

bool so_verify_mode_parse(const char *text, so_verify_mode *mode, double *lenience) {
    static const struct {
        const char *prefix;
        so_verify_mode mode;
    } lossy[] = {{"lenient=", SO_VERIFY_LENIENT}, {"typical=", SO_VERIFY_TYPICAL}};
    double value = 1;
    so_verify_mode found = SO_VERIFY_MATCH;
    for (size_t i = 0; i < SO_LEN(lossy); i++)
        if (strncmp(text, lossy[i].prefix, strlen(lossy[i].prefix)) == 0)
            found = lossy[i].mode;
    if (found != SO_VERIFY_MATCH) {
        char *end;
        text += strlen(lossy[0].prefix); /* both are as long */
        value = strtod(text, &end);
        if (end == text || *end)
            return false;
    } else if (strcmp(text, "reject") == 0) {
        found = SO_VERIFY_REJECT;
    } else if (strcmp(text, "match") != 0) {
        return false;
    }
    *mode = found;
    *lenience = value;
    return true;
}

bool so_verify_mode_is_lossy(so_verify_mode mode, double lenience) {
    return mode == SO_VERIFY_TYPICAL || (mode == SO_VERIFY_LENIENT && lenience < 1);
}

void so_verify_mode_print(so_verify_mode mode, double lenience, char out[SO_VERIFY_TEXT]) {
    if (mode == SO_VERIFY_LENIENT || mode == SO_VERIFY_TYPICAL)
        snprintf(out, SO_VERIFY_TEXT, "%s=%g%s", so_verify_mode_name(mode), lenience,
                 so_verify_mode_is_lossy(mode, lenience) ? ", lossy" : "");
    else
        snprintf(out, SO_VERIFY_TEXT, "%s", so_verify_mode_name(mode));
}

const char *so_request_drafter(const so_request *r) { return so_speculate_name(r); }

so_verify_mode so_request_verify(const so_request *r, double *lenience) {
    *lenience = r->spec.lenience;
    return r->spec.verify;
}

const int32_t *so_request_output(const so_request *r, int *n) {
    *n = r->n_tokens - r->n_prompt;
    return r->tokens + r->n_prompt;
}

const so_logprob *so_request_logprobs(const so_request *r, int *n_each) {
    *n_each = r->n_logprobs;
    return r->logprobs;
}

const so_logprob *so_request_prompt_logprobs(const so_request *r, int *n_each) {
    *n_each = r->n_logprobs;
    return r->prompt_logprobs;
}

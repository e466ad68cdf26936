/* Converts options to the part of a request that does not depend on its prompt. The option table
 * has checked ranges; options that depend on the vocabulary are checked here, once, so that a wrong
 * one is reported as wrong usage and not as a failure of every prompt. Main thread only. */
#include "cli/request.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "base/mem.h"
#include "base/rng.h"

/* ID=BIAS, ID+BIAS or ID-BIAS. */
static bool parse_bias(const char *text, so_bias *out) {
    char *end;
    errno = 0;
    long id = strtol(text, &end, 10);
    if (end == text || errno || id < 0 || id > INT32_MAX || !strchr("=+-", *end) || !*end)
        return false;
    const char *number = *end == '=' ? end + 1 : end;
    double bias = strtod(number, &end);
    if (end == number || *end || isnan(bias) || bias > 1e30)
        return false;
    *out = (so_bias){(int32_t)id, (float)bias};
    return true;
}

static int read_biases(const so_args *a, so_sample_params *s) {
    int n = a->val[SO_OPT_LOGIT_BIAS].n_given;
    so_bias *list = SO_NEW_N(so_bias, n);
    s->bias = list;
    s->n_bias = n;
    for (int i = 0; i < n; i++) {
        const char *text = a->val[SO_OPT_LOGIT_BIAS].items[i];
        if (!parse_bias(text, &list[i]))
            return so_args_bad(a,
                               "--logit-bias '%.80s': must be ID=BIAS, ID+BIAS or ID-BIAS, as in "
                               "15043=-2.5 or 15043=-inf",
                               text);
    }
    return 0;
}

static int read_stops(const so_args *a, so_request_opts *o) {
    int n = a->val[SO_OPT_STOP].n_given;
    so_str *list = SO_NEW_N(so_str, n);
    o->stops = list;
    o->n_stops = n;
    for (int i = 0; i < n; i++) {
        list[i] = so_str_c(a->val[SO_OPT_STOP].items[i]);
        if (list[i].len == 0)
            return so_args_bad(a, "--stop '': must not be empty");
    }
    return 0;
}

void so_cli_nonce_read(const so_args *a, so_request_opts *o) {
    o->has_nonce = so_args_has(a, SO_OPT_NONCE);
    o->nonce = (uint64_t)so_args_int(a, SO_OPT_NONCE, 0);
}

int so_cli_prompt_argument(so_args *a) {
    if (a->n_pos == 0)
        return 0;
    if (so_args_has(a, SO_OPT_PROMPT))
        return so_args_bad(a, "two prompts: '%.80s' and --prompt '%.80s'; give one", a->pos[0],
                           so_args_str(a, SO_OPT_PROMPT, ""));
    a->val[SO_OPT_PROMPT].text = a->pos[0];
    a->val[SO_OPT_PROMPT].n_given = 1;
    return 0;
}

uint64_t so_cli_new_seed(void) { return so_rng_system_seed() >> 11; }

void so_cli_sampling_read(const so_args *a, so_sample_params *s) {
    s->temp = (float)so_args_float(a, SO_OPT_TEMP, (double)s->temp);
    s->top_k = (int)so_args_int(a, SO_OPT_TOP_K, s->top_k);
    s->top_p = (float)so_args_float(a, SO_OPT_TOP_P, (double)s->top_p);
    s->min_p = (float)so_args_float(a, SO_OPT_MIN_P, (double)s->min_p);
    s->repeat_penalty = (float)so_args_float(a, SO_OPT_REPEAT_PENALTY, (double)s->repeat_penalty);
    s->presence_penalty = (float)so_args_float(a, SO_OPT_PRESENCE_PENALTY, 0);
    s->frequency_penalty = (float)so_args_float(a, SO_OPT_FREQUENCY_PENALTY, 0);
    s->repeat_last_n = (int)so_args_int(a, SO_OPT_REPEAT_LAST_N, s->repeat_last_n);
}

static int read_sampling(const so_args *a, const so_bundle *b, so_sample_params *s) {
    so_err err = {0};
    *s = b->sample;
    s->seed =
        so_args_has(a, SO_OPT_SEED) ? (uint64_t)so_args_int(a, SO_OPT_SEED, 0) : so_cli_new_seed();
    so_cli_sampling_read(a, s);
    int status = read_biases(a, s);
    if (status == 0 && so_sample_check(s, so_model_hparams(b->model)->n_vocab, &err) != SO_OK)
        status = so_args_bad(a, "%s", err.msg);
    return status;
}

/* Options of beam search, which samples nothing: what the model recommends for sampling is left out,
 * and what the user asks for is refused by the engine's check (so_beams_check), here as wrong
 * usage. */
static int read_beams(const so_args *a, so_request_opts *o) {
    static const so_opt needs_beams[] = {SO_OPT_LENGTH_PENALTY, SO_OPT_EARLY_STOPPING,
                                         SO_OPT_N_BEST, SO_OPT_BEAM_CANDIDATES};
    so_beam_opts *b = &o->beams;
    so_err err = {0};
    so_beam_opts_defaults(b);
    b->width = (int)so_args_int(a, SO_OPT_BEAMS, 0);
    for (size_t i = 0; i < SO_LEN(needs_beams) && b->width == 0; i++)
        if (so_args_has(a, needs_beams[i]))
            return so_args_bad(a, "--%s needs --beams", so_option_at(needs_beams[i])->name);
    if (b->width == 0)
        return 0;
    const char *when = so_args_str(a, SO_OPT_EARLY_STOPPING, "false");
    b->n_best = (int)so_args_int(a, SO_OPT_N_BEST, 1);
    b->length_penalty = so_args_float(a, SO_OPT_LENGTH_PENALTY, 1);
    b->candidates = (int)so_args_int(a, SO_OPT_BEAM_CANDIDATES, 0);
    b->early_stop = *when == 't'   ? SO_EARLY_STOP_YES
                    : *when == 'n' ? SO_EARLY_STOP_NEVER
                                   : SO_EARLY_STOP_NO;
    o->sample.temp = (float)so_args_float(a, SO_OPT_TEMP, 0);
    o->sample.repeat_penalty = (float)so_args_float(a, SO_OPT_REPEAT_PENALTY, 1);
    return so_beams_check(o, &err) == SO_OK ? 0 : so_args_bad(a, "%s", err.msg);
}

int so_cli_request_read(const so_args *a, const so_bundle *b, so_request_opts *out) {
    out->max_tokens = (int)so_args_int(a, SO_OPT_PREDICT, -1);
    out->ignore_end = so_args_has(a, SO_OPT_IGNORE_EOS);
    out->n_logprobs = (int)so_args_int(a, SO_OPT_LOGPROBS, 0);
    so_cli_nonce_read(a, out);
    int status = read_sampling(a, b, &out->sample);
    if (status == 0)
        status = read_beams(a, out);
    return status == 0 ? read_stops(a, out) : status;
}

void so_cli_request_free(so_request_opts *o) {
    free((void *)(uintptr_t)o->sample.bias);
    free((void *)(uintptr_t)o->stops);
    o->sample.bias = NULL;
    o->stops = NULL;
}

/* What a request forbids, and what ends it: min_tokens, stop tokens, bad words.
 *
 * min_tokens and bad words are rules about one row of the target's logits, given the text before
 * it: a forbidden token gets a bias of −∞ before it is sampled. The verifier asks for the row of
 * each node that its walk reaches, with the path to that node as the text (verifier.c), so under
 * speculation a row is restricted exactly as plain decoding would restrict it. `match` compares
 * guesses with the token sampled from this row, and `reject` tests them against its distribution,
 * so both stay exact. Drafters do not know the rules: a guess of a forbidden token has probability
 * 0 and is rejected.
 *
 * A bad word is a sequence of tokens. Its last token is forbidden where the answer (not the prompt)
 * ends with all the tokens before it, as vLLM defines it. No state outside the request; engine
 * thread. */
#include <math.h>
#include <string.h>

#include "engine/impl.h"

int so_restrict_check(const so_request_opts *o, int n_vocab, so_err *err) {
    if (o->min_tokens < 0)
        return so_err_set(err, SO_ERANGE, "min_tokens %d: must not be negative", o->min_tokens);
    if (o->n_stop_tokens < 0 || o->n_stop_tokens > SO_REQUEST_MAX_STOPS)
        return so_err_set(err, SO_ELIMIT, "%d stop tokens: at most %d", o->n_stop_tokens,
                          SO_REQUEST_MAX_STOPS);
    if (o->n_bad_words < 0 || o->n_bad_words > SO_REQUEST_MAX_BAD_WORDS)
        return so_err_set(err, SO_ELIMIT, "%d bad words: at most %d", o->n_bad_words,
                          SO_REQUEST_MAX_BAD_WORDS);
    for (int i = 0; i < o->n_stop_tokens; i++)
        if (o->stop_tokens[i] < 0 || o->stop_tokens[i] >= n_vocab)
            return so_err_set(err, SO_ERANGE, "stop token %d: the vocabulary has ids 0 to %d",
                              o->stop_tokens[i], n_vocab - 1);
    for (int i = 0; i < o->n_bad_words; i++) {
        const so_tokens *w = &o->bad_words[i];
        if (w->len == 0)
            return so_err_set(err, SO_EINVAL, "bad word %d is empty", i + 1);
        for (size_t k = 0; k < w->len; k++)
            if (w->ids[k] < 0 || w->ids[k] >= n_vocab)
                return so_err_set(err, SO_ERANGE,
                                  "bad word %d has token %d: the vocabulary has ids 0 to %d", i + 1,
                                  w->ids[k], n_vocab - 1);
    }
    return SO_OK;
}

static int32_t *copy_ids(so_arena *a, const int32_t *ids, size_t n) {
    int32_t *copy = so_arena_alloc(a, n, sizeof *copy);
    if (n > 0)
        memcpy(copy, ids, n * sizeof *copy);
    return copy;
}

static bool is_stop(const so_restriction *s, int32_t token) {
    for (int i = 0; i < s->n_stops; i++)
        if (s->stops[i] == token)
            return true;
    return false;
}

bool so_restrict_ends(const so_request *r, int32_t token) {
    return (r->e->tok && !r->ignore_end && so_tokenizer_is_end(r->e->tok, token)) ||
           is_stop(&r->restricted, token);
}

/* Lists all tokens that would end the answer: they are forbidden until it has min_tokens tokens.
 * Without min_tokens no list is needed. */
static void list_ends(so_request *r, int n_vocab) {
    so_restriction *s = &r->restricted;
    if (s->min_tokens == 0)
        return;
    for (int32_t id = 0; id < n_vocab; id++)
        s->n_ends += so_restrict_ends(r, id);
    s->ends = so_arena_alloc(&r->arena, (size_t)s->n_ends, sizeof *s->ends);
    for (int32_t id = 0, n = 0; id < n_vocab && n < s->n_ends; id++)
        if (so_restrict_ends(r, id))
            s->ends[n++] = id;
}

void so_restrict_open(so_request *r, const so_request_opts *o) {
    so_restriction *s = &r->restricted;
    int n_bias = o->sample.n_bias;
    s->min_tokens = o->min_tokens;
    s->stops = copy_ids(&r->arena, o->stop_tokens, (size_t)o->n_stop_tokens);
    s->n_stops = o->n_stop_tokens;
    list_ends(r, so_model_hparams(r->e->m)->n_vocab);
    s->words = so_arena_alloc(&r->arena, (size_t)o->n_bad_words, sizeof *s->words);
    s->n_words = o->n_bad_words;
    for (int i = 0; i < s->n_words; i++) {
        size_t n = o->bad_words[i].len;
        s->words[i] = (so_tokens){copy_ids(&r->arena, o->bad_words[i].ids, n), n, n};
    }
    s->bias = so_arena_alloc(&r->arena, (size_t)(n_bias + s->n_ends + s->n_words), sizeof *s->bias);
    for (int i = 0; i < n_bias; i++)
        s->bias[i] = o->sample.bias[i];
    r->sample.bias = s->bias;
}

bool so_restrict_any(const so_request *r) {
    return r->restricted.n_ends > 0 || r->restricted.n_words > 0;
}

/* Whether the answer in ctx ends with all tokens of the word but its last. */
static bool is_begun(const so_tokens *word, const so_sample_context *ctx) {
    size_t n = word->len - 1;
    return n <= (size_t)(ctx->n_tokens - ctx->n_prompt) &&
           memcmp(ctx->tokens + ctx->n_tokens - n, word->ids, n * sizeof *word->ids) == 0;
}

so_sample_params so_restrict_at(const so_request *r, const so_sample_context *ctx) {
    const so_restriction *s = &r->restricted;
    so_sample_params p = r->sample;
    if (ctx->n_tokens - ctx->n_prompt < s->min_tokens)
        for (int i = 0; i < s->n_ends; i++)
            s->bias[p.n_bias++] = (so_bias){s->ends[i], -INFINITY};
    for (int i = 0; i < s->n_words; i++)
        if (is_begun(&s->words[i], ctx))
            s->bias[p.n_bias++] = (so_bias){s->words[i].ids[s->words[i].len - 1], -INFINITY};
    return p;
}

/* Stop strings are looked for in the text of the tokens after the first min_tokens. */
bool so_restrict_may_stop(const so_request *r) {
    return r->stats.predicted_n > r->restricted.min_tokens || r->restricted.min_tokens == 0;
}

/* From the rows of a pass to a verdict: which verifier, over which rows.
 *
 * The verifier walks one path from the root and asks for the target's token (match) or its
 * distribution (reject) at each node it reaches. Penalties look at the text up to that node, so the
 * tokens of the path are written behind the request's text as the walk goes on; nothing is sampled
 * for nodes that are not reached.
 *
 * A round without guesses is plain decoding in every mode: its token is drawn as `match` draws it,
 * which is a draw from p like any other, for half the price of writing p down.
 *
 * A row that cannot be sampled (logits that are not finite, everything banned) ends the walk at its
 * node: what stood before it is still emitted, as plain decoding would have, and the request ends
 * with an error of its own. Such a row that the walk does not reach is of no account: plain
 * decoding would never have computed it. Engine thread. */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/mutant.h"
#include "engine/impl.h"

struct so_verifier {
    float *row;      /* [n_vocab] a standardised row */
    double *scratch; /* [2][n_vocab] */
};

so_verifier *so_verdict_create(int n_vocab) {
    so_verifier *v = SO_NEW(so_verifier);
    v->row = SO_NEW_N(float, n_vocab);
    v->scratch = SO_NEW_N(double, 2 * n_vocab);
    return v;
}

void so_verdict_free(so_verifier *v) {
    if (!v)
        return;
    free(v->row);
    free(v->scratch);
    free(v);
}

static so_sample_context context_at(so_request *r, int node) {
    int depth = r->tree->nodes[node].depth;
    if (depth > 0)
        r->tokens[r->n_tokens + depth - 1] = r->tree->nodes[node].token;
    return (so_sample_context){r->tokens, r->n_tokens + depth, r->n_prompt};
}

static int logit_of(const so_request *r, int node) {
    if (SO_MUTANT(MOVE_TAIL) && node > 0)
        node--;
    return r->first_logit + node;
}

/* --- match --- */

static int32_t choose(void *user, int node) {
    so_request *r = user;
    const so_pass *pass = r->e->pass;
    int at = logit_of(r, node), rc = so_pass_check(pass, at, &r->err);
    so_sample_context ctx = context_at(r, node);
    int32_t token = SO_TOKEN_NONE; /* which no node holds */
    if (rc != SO_OK)
        return token;
    if (r->greedy)
        return so_pass_argmax(pass, at);
    rc =
        so_sample_token(r->e->sampler, &r->sample, so_pass_logits(pass, at), &ctx, &token, &r->err);
    return rc == SO_OK ? token : SO_TOKEN_NONE;
}

/* --- rows --- */

/* A token that no guess under `node` holds. */
static int32_t unguessed(const so_request *r, int node) {
    int32_t token = 0;
    while (so_tree_child(r->tree, node, token) >= 0)
        token++;
    return SO_MIN(token, r->tree->n_vocab - 1);
}

/* After an error: a row by which every guess fails, so that the walk ends here. */
static const float *dead_row(so_request *r, int node, float nothing, float all) {
    float *row = r->e->verifier->row;
    for (int i = 0; i < r->tree->n_vocab; i++)
        row[i] = nothing;
    row[unguessed(r, node)] = all;
    return row;
}

typedef int transform(so_sampler *s, const so_sample_params *p, const float *logits,
                      const so_sample_context *ctx, float *out, so_err *err);

/* The row of `node` in the verifier, after `fn`. */
static int load_row(so_request *r, int node, transform *fn) {
    so_engine *e = r->e;
    int at = logit_of(r, node), rc = so_pass_check(e->pass, at, &r->err);
    so_sample_context ctx = context_at(r, node);
    return rc == SO_OK ? fn(e->sampler, &r->sample, so_pass_logits(e->pass, at), &ctx,
                            e->verifier->row, &r->err)
                       : rc;
}

static const float *standard_row(void *user, int node) {
    so_request *r = user;
    int rc = load_row(r, node, so_sample_weights);
    return rc == SO_OK ? r->e->verifier->row : dead_row(r, node, 0, 1);
}

static const float *adjusted_row(void *user, int node) {
    so_request *r = user;
    int rc = load_row(r, node, so_sample_adjusted);
    return rc == SO_OK ? r->e->verifier->row : dead_row(r, node, -FLT_MAX, 0);
}

/* Chance with the target's own draw where nothing was guessed. */
typedef struct engine_chance {
    so_verify_rng_keyed keyed; /* first: so_verify_rng is its base */
    so_request *r;
} engine_chance;

static int32_t choose_bonus(so_verify_rng *c, int node) {
    return choose(((engine_chance *)c)->r, node);
}

/* --- the verdict --- */

/* A fault (base/mutant.h). */
static void accept_all(so_request *r) {
    so_verdict *v = &r->verdict;
    int node = 0;
    *v = (so_verdict){0};
    while (r->tree->nodes[node].first >= 0) {
        choose(r, node);
        v->tested[v->n_tested++] = r->tree->nodes[node].first;
        node = r->tree->proposals[r->tree->nodes[node].first].child;
        v->path[v->n_accepted++] = (int16_t)node;
    }
    v->token = choose(r, node);
    v->bonus = true;
}

static void reach(so_request *r, so_verify_mode mode) {
    const so_speculation *s = &r->spec;
    engine_chance chance = {.r = r};
    if (SO_MUTANT(ACCEPT_ALL)) {
        accept_all(r);
    } else if (mode == SO_VERIFY_LENIENT && r->sample.temp == 0 && s->lenience < 1) {
        so_verify_lenient_greedy(r->tree, adjusted_row, r, s->lenience, &r->verdict);
    } else if (mode == SO_VERIFY_MATCH || r->sample.temp == 0 || r->tree->n_nodes == 1) {
        so_verify_match(r->tree, choose, r, &r->verdict);
    } else {
        so_verify_rng_keyed_init(&chance.keyed, r->sample.seed, r->sample.choice);
        chance.keyed.base.choose = choose_bonus;
        so_verify_reject(r->tree, standard_row, r, &chance.keyed.base,
                         mode == SO_VERIFY_LENIENT ? s->lenience : 1, r->e->verifier->scratch,
                         &r->verdict);
    }
    if (r->err.code != SO_OK)
        r->verdict.token = SO_TOKEN_NONE;
}

void so_verdict_reach(so_request *r) {
    so_verify_mode mode = r->spec.set ? r->spec.verify : SO_VERIFY_MATCH;
    int64_t t = so_clock_ns();
    reach(r, mode);
    so_speculate_verdict(r, mode, so_clock_ms_since(t));
}

/* By the row itself, whichever verifier decided: plain decoding would have seen the same one. */
void so_verdict_logprobs(so_request *r, int node, int32_t token) {
    if (r->n_logprobs > 0)
        so_sample_logprobs(r->e->sampler, so_pass_logits(r->e->pass, r->first_logit + node), token,
                           r->n_logprobs - 1,
                           r->logprobs + (size_t)(r->n_tokens - r->n_prompt) * r->n_logprobs);
}

void so_verdict_score(so_request *r) {
    const so_engine *e = r->e;
    for (int i = 0; i < r->n_score; i++, r->n_scored++) {
        if (so_pass_check(e->pass, r->first_score + i, &r->err) != SO_OK)
            return;
        so_sample_logprobs(e->sampler, so_pass_logits(e->pass, r->first_score + i),
                           r->tokens[r->n_scored + 1], r->n_logprobs - 1,
                           r->prompt_logprobs + (size_t)r->n_scored * r->n_logprobs);
    }
}

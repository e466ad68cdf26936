/* Verification of the guesses of a request: chooses the verifier (verify/) and gives it the logits
 * rows of the pass.
 *
 * The verifier walks one path from the root. At each node it reaches it asks for the target's token
 * (match) or distribution (reject). Penalties depend on the text up to that node, so the walk
 * writes the tokens of its path after the request's text. Nothing is sampled for nodes that are not
 * reached.
 *
 * On a backend whose results are copied over a bus, logits stay there where that is possible. The
 * argmax, or the token sampled with the request's noise, is computed with the pass (SO_OP_SAMPLE),
 * for the rows that the walk will not reach too. For `reject` without cuts the pass weighs the first
 * guess after a row, which decides most acceptances. A row is downloaded with the pass if the
 * request needs logits in any case (logprobs, bias, penalties, forbidden tokens), and otherwise
 * when the walk needs it: for a rejection, and where the backend could not decide.
 *
 * A round without guesses is plain decoding in every mode. Its token is sampled as in `match`: that
 * is a sample from p like any other, at half the cost of computing p.
 *
 * NaN or Inf logits, or a row in which every token is banned, fail only the request that samples
 * from that row. The walk ends at its node; the tokens accepted before it are emitted, as in plain
 * decoding, and the request ends with the error. A bad row that the walk does not reach is ignored:
 * plain decoding would never have computed it. Engine thread. */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/mutant.h"
#include "engine/impl.h"

struct so_verifier {
    float *row;      /* [n_vocab] the current logits row, transformed */
    double *scratch; /* [2][n_vocab] */
};

so_verifier *so_verifier_create(int n_vocab) {
    so_verifier *v = SO_NEW(so_verifier);
    v->row = SO_NEW_N(float, n_vocab);
    v->scratch = SO_NEW_N(double, 2 * n_vocab);
    return v;
}

void so_verifier_free(so_verifier *v) {
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

/* --- what a pass computes for the verifier --- */

/* Whether guesses of this step are tested against whole distributions. */
static bool tests_rows(const so_request *r) {
    return r->spec.set && r->spec.verify != SO_VERIFY_MATCH &&
           r->spec.verify != SO_VERIFY_TYPICAL && r->sample.temp > 0 && r->tree->n_nodes > 1;
}

void so_verifier_open(so_request *r) {
    so_sample_row row;
    int n_vocab = so_model_hparams(r->e->m)->n_vocab;
    r->on_device = so_model_backend(r->e->m)->vt->remote && n_vocab <= SO_SAMPLE_MAX &&
                   so_sample_on_device(&r->sample, 0, &row) && r->sample.temp > 0 &&
                   r->n_logprobs == 0 && !so_restrict_any(r);
}

unsigned so_verifier_want(const so_request *r, int node, so_sample_row *sample, so_row *row) {
    const so_node *n = &r->tree->nodes[node];
    row->logits_to_host = r->n_logprobs > 0 || !(r->greedy || r->on_device);
    if (!r->on_device)
        return r->greedy ? SO_PASS_ARGMAX : 0;
    so_sample_on_device(&r->sample, r->n_tokens + n->depth, sample);
    if (n->first >= 0 && tests_rows(r) && !so_sample_has_cuts(&r->sample, r->tree->n_vocab))
        sample->guess = r->tree->nodes[r->tree->proposals[n->first].child].token;
    row->sample = sample;
    return SO_PASS_SAMPLE;
}

/* --- match --- */

static int32_t sample_target(void *user, int node) {
    so_request *r = user;
    so_pass *pass = r->e->pass;
    int at = logit_of(r, node), rc = so_pass_check(pass, at, &r->err);
    so_sample_context ctx = context_at(r, node);
    int32_t token = SO_TOKEN_NONE; /* after an error: equal to no guess */
    if (rc != SO_OK)
        return token;
    if (r->greedy)
        return so_pass_argmax(pass, at);
    if (r->on_device && so_pass_sampled(pass, at)->token >= 0)
        return so_pass_sampled(pass, at)->token;
    const float *logits = so_pass_fetch_logits(pass, at, &r->err);
    if (!logits)
        return token;
    so_sample_params p = so_restrict_at(r, &ctx);
    rc = so_sample_token(r->e->sampler, &p, logits, &ctx, &token, &r->err);
    return rc == SO_OK ? token : SO_TOKEN_NONE;
}

/* --- rows --- */

/* A token that is not among the guesses after `node`. */
static int32_t token_without_guess(const so_request *r, int node) {
    int32_t token = 0;
    while (so_tree_child(r->tree, node, token) >= 0)
        token++;
    return SO_MIN(token, r->tree->n_vocab - 1);
}

/* After an error: a row that rejects every guess, so that the walk ends at this node. */
static const float *rejecting_row(so_request *r, int node, float others, float peak) {
    float *row = r->e->verifier->row;
    for (int i = 0; i < r->tree->n_vocab; i++)
        row[i] = others;
    row[token_without_guess(r, node)] = peak;
    return row;
}

typedef int transform(so_sampler *s, const so_sample_params *p, const float *logits,
                      const so_sample_context *ctx, float *out, so_err *err);

/* Loads the logits row of `node`, transformed by `fn`, into the verifier's buffer. */
static int load_row(so_request *r, int node, transform *fn) {
    so_engine *e = r->e;
    int at = logit_of(r, node), rc = so_pass_check(e->pass, at, &r->err);
    so_sample_context ctx = context_at(r, node);
    so_sample_params p = so_restrict_at(r, &ctx);
    const float *logits = rc == SO_OK ? so_pass_fetch_logits(e->pass, at, &r->err) : NULL;
    return logits ? fn(e->sampler, &p, logits, &ctx, e->verifier->row, &r->err) : r->err.code;
}

static const float *weights_row(void *user, int node) {
    so_request *r = user;
    int rc = load_row(r, node, so_sample_weights);
    return rc == SO_OK ? r->e->verifier->row : rejecting_row(r, node, 0, 1);
}

static const float *adjusted_row(void *user, int node) {
    so_request *r = user;
    int rc = load_row(r, node, so_sample_adjusted);
    return rc == SO_OK ? r->e->verifier->row : rejecting_row(r, node, -FLT_MAX, 0);
}

/* Random numbers of the verifier. Where nothing was guessed, the target's token is sampled
 * directly. */
typedef struct engine_chance {
    so_verify_rng_keyed keyed; /* must be first: so_verify_rng is its base */
    so_request *r;
} engine_chance;

static int32_t choose_bonus(so_verify_rng *c, int node) {
    return sample_target(((engine_chance *)c)->r, node);
}

/* A lower bound of the target's probability of the first guess after `node`, from the pass. */
static double first_at_least(so_verify_rng *c, int node) {
    so_request *r = ((engine_chance *)c)->r;
    so_err ignored;
    int at = logit_of(r, node);
    if (so_pass_check(r->e->pass, at, &ignored) != SO_OK)
        return 0;
    return so_sample_prob_at_least(&r->sample, so_pass_sampled(r->e->pass, at));
}

/* --- verification --- */

/* Deliberate fault for tests (base/mutant.h). */
static void accept_all(so_request *r) {
    so_verdict *v = &r->verdict;
    int node = 0;
    *v = (so_verdict){0};
    while (r->tree->nodes[node].first >= 0) {
        sample_target(r, node);
        v->tested[v->n_tested++] = r->tree->nodes[node].first;
        node = r->tree->proposals[r->tree->nodes[node].first].child;
        v->path[v->n_accepted++] = (int16_t)node;
    }
    v->token = sample_target(r, node);
    v->bonus = true;
}

static void verify(so_request *r, so_verify_mode mode) {
    const so_speculation *s = &r->spec;
    engine_chance chance = {.r = r};
    if (SO_MUTANT(ACCEPT_ALL)) {
        accept_all(r);
    } else if (mode == SO_VERIFY_LENIENT && r->sample.temp == 0 && s->lenience < 1) {
        so_verify_lenient_greedy(r->tree, adjusted_row, r, s->lenience, &r->verdict);
    } else if (mode == SO_VERIFY_MATCH || r->sample.temp == 0 || r->tree->n_nodes == 1) {
        so_verify_match(r->tree, sample_target, r, &r->verdict);
    } else if (mode == SO_VERIFY_TYPICAL) {
        so_verify_typical(r->tree, weights_row, sample_target, r, s->lenience, &r->verdict);
    } else {
        so_verify_rng_keyed_init(&chance.keyed, r->sample.seed, r->sample.choice);
        chance.keyed.base.choose = choose_bonus;
        if (r->on_device && !so_sample_has_cuts(&r->sample, r->tree->n_vocab))
            chance.keyed.base.first_at_least = first_at_least;
        so_verify_reject(r->tree, weights_row, r, &chance.keyed.base,
                         mode == SO_VERIFY_LENIENT ? s->lenience : 1, r->e->verifier->scratch,
                         &r->verdict);
    }
    if (r->err.code != SO_OK)
        r->verdict.token = SO_TOKEN_NONE;
}

void so_verifier_run(so_request *r) {
    so_verify_mode mode = r->spec.set ? r->spec.verify : SO_VERIFY_MATCH;
    int64_t t = so_clock_ns();
    verify(r, mode);
    so_speculate_observe_round(r, mode, so_clock_ms_since(t));
}

/* From the logits row itself, whichever verifier decided: plain decoding has the same row. */
void so_verifier_token_logprobs(so_request *r, int node, int32_t token) {
    if (r->n_logprobs > 0)
        so_sample_logprobs(r->e->sampler, so_pass_logits(r->e->pass, r->first_logit + node), token,
                           r->n_logprobs - 1,
                           r->logprobs + (size_t)(r->n_tokens - r->n_prompt) * r->n_logprobs);
}

void so_verifier_prompt_logprobs(so_request *r) {
    const so_engine *e = r->e;
    for (int i = 0; i < r->n_score; i++, r->n_scored++) {
        if (so_pass_check(e->pass, r->first_score + i, &r->err) != SO_OK)
            return;
        so_sample_logprobs(e->sampler, so_pass_logits(e->pass, r->first_score + i),
                           r->tokens[r->n_scored + 1], r->n_logprobs - 1,
                           r->prompt_logprobs + (size_t)r->n_scored * r->n_logprobs);
    }
}

/* The nonce: which random numbers a request uses where guesses are tested by rejection.
 *
 * `match` draws position n with numbers keyed by (seed, choice, n): the guesses decide nothing, so
 * any guesses will do. `reject` and `lenient` test guesses against random numbers, and are exact
 * only where the guesses are independent of those numbers (verify/reject.c, step 8). A seed that is
 * used twice breaks that: the second request may be given the text of the first as a prediction,
 * may find it in a corpus, or may have its draft lengths set by estimates learned from the first
 * one's verdicts. Keying the verifier's numbers alone does not help: draft draws that are repeated,
 * with lengths learned from verdicts on those same draws, are biased too.
 *
 * So there, and above temperature 0, all four purposes (DRAFT, ACCEPT, RESIDUAL, TOKEN) are keyed
 * by a function of (seed, nonce), where the nonce is
 *
 *   given     by the caller, to replay a run: for debugging, since a replay may be biased
 *   hashed    from the request, where its guesses depend on the request alone
 *   fresh     from the system otherwise
 *
 * Fresh: the numbers are independent of everything before them, so reject.c's proof applies as it
 * stands.
 *
 * Hashed: let X be what is hashed and C the constants of the engine (weights, context, cache type).
 * Guesses, and so the text, are a function F(X, C, key(seed, X)). Different X have independent
 * keys, so given all answers to other requests under the same seed, also where X was chosen after
 * seeing them, the text is distributed as the target's. The same X gives the same text. This needs
 * that nothing but X, C and the key reaches the guesses. What could:
 *
 *   estimates, costs, timings   unused with a fixed length: nothing is weighed, and the
 *                               planner keeps such trees whole (plan/plan.c)
 *   other requests' texts       of the drafters only `corpus` reads them. A draft that reads the
 *                               target's states reads cached pages which others made with or
 *                               without states. so_drafter.by_request is false for both
 *   the caller's function       the same
 *   a draft model's file,       in X by their identity (so_drafter.id): they may have been made
 *   a table's file              from an earlier answer
 *   neighbours                  guesses per pass are shared between requests, and guesses are shed
 *                               where pages are short; that would be fatal even where it is rare:
 *                               two equal requests at once, and the first one's text decides
 *                               whether pages are left for the second one's guesses. Changing the
 *                               key once guesses are shed would not help: to be drawn again because
 *                               of what came out the first time is a bias by itself. So X decides
 *                               only where an engine can never be short (is_never_short)
 *   a drafter that fails        its requests go without guesses for a step. A draft model's pass
 *                               fails only where the machine does, which no text decides
 *   preemption                  changes neither the text nor what a drafter reads of it, and the
 *                               count of rounds goes on
 *
 * C is not in X: somebody who picks another target after seeing a text is outside of what a seed
 * can promise, with `match` too. Nor is the choice, which is part of every key, or what changes
 * no token: priority, logprobs, callbacks.
 *
 * A nonce has 53 bits, so that JSON readers that keep numbers as doubles preserve it, and is never
 * 0 unless given: nonce 0 keys by the seed alone, which is the mutant that tests/engine/
 * test_seed_reuse.c must notice. Engine thread. */
#include <stdlib.h>
#include <string.h>

#include "base/sha256.h"
#include "engine/drafters.h"

enum { NONCE_SHIFT = 64 - 53 };

uint64_t so_nonce_key(uint64_t seed, uint64_t nonce) {
    if (nonce == 0)
        return seed;
    so_rng_key key = {
        .seed = seed, .position = (uint32_t)(nonce >> 32), .purpose = (uint32_t)SO_RNG_NONCE};
    uint32_t w[4];
    so_rng_block(&key, (uint32_t)nonce, w);
    return (uint64_t)w[0] << 32 | w[1];
}

static uint64_t fresh(void) {
    uint64_t nonce = so_rng_system_seed() >> NONCE_SHIFT;
    return nonce ? nonce : 1;
}

/* --- where the request decides --- */

/* The most nodes that the drafters can add at a fixed length: one chain, or one each where they are
 * merged. */
static int max_nodes(const so_request *r) {
    return SO_MIN(r->spec.length * r->spec.set->width, r->e->o.max_nodes);
}

static int least_share(const so_engine *e) { return e->max_guesses / e->o.n_parallel; }

/* Whether neighbours can cost a request a guess. so_schedule_room gives nobody more pages than a
 * context takes; with that many for everyone the last one finds what the first one found. The
 * draft's cache has at least as many pages, and a chain of guesses ends within its context. */
static bool is_never_short(const so_request *r) {
    const so_engine *e = r->e;
    if (e->o.n_parallel == 1)
        return true;
    bool pages = e->o.kv_layout == SO_KV_SLOTTED ||
                 e->n_pages >= (int64_t)e->o.n_parallel * so_kv_pages_for(e->o.n_ctx);
    return pages && least_share(e) >= max_nodes(r);
}

static bool decides_alone(const so_request *r) {
    const so_speculation *s = &r->spec;
    if (s->length == 0)
        return false;
    for (int i = 0; i < s->set->drafters.n_leaves; i++)
        if (!s->set->drafters.leaves[i]->by_request)
            return false;
    return is_never_short(r);
}

/* --- the hash --- */

static void add_int(so_sha256 *h, int64_t x) { so_sha256_add(h, &x, sizeof x); }
static void add_float(so_sha256 *h, double x) { so_sha256_add(h, &x, sizeof x); }

/* With its length, so that two lists are never read as another two. */
static void add_bytes(so_sha256 *h, const void *p, size_t len) {
    add_int(h, (int64_t)len);
    if (len > 0)
        so_sha256_add(h, p, len);
}

static void add_sampling(so_sha256 *h, const so_sample_params *p) {
    add_float(h, (double)p->temp);
    add_int(h, p->top_k);
    add_float(h, (double)p->top_p);
    add_float(h, (double)p->min_p);
    add_float(h, (double)p->repeat_penalty);
    add_float(h, (double)p->presence_penalty);
    add_float(h, (double)p->frequency_penalty);
    add_int(h, p->repeat_last_n);
    add_int(h, p->n_bias);
    for (int i = 0; i < p->n_bias; i++) {
        add_int(h, p->bias[i].token);
        add_float(h, (double)p->bias[i].bias);
    }
}

static void add_ending(so_sha256 *h, const so_request *r, const so_request_opts *o) {
    add_int(h, r->max_len);
    add_int(h, r->max_tokens);
    add_int(h, r->ignore_end);
    add_int(h, o->n_stops);
    for (int i = 0; i < o->n_stops; i++)
        add_bytes(h, o->stops[i].ptr, o->stops[i].len);
}

static void add_speculation(so_sha256 *h, const so_request *r, const so_spec_opts *o) {
    const so_speculation *s = &r->spec;
    const so_engine_opts *eo = &r->e->o;
    add_bytes(h, s->set->text, strlen(s->set->text));
    for (int i = 0; i < s->set->drafters.n_leaves; i++)
        add_int(h, (int64_t)s->set->drafters.leaves[i]->id);
    add_int(h, s->length);
    add_int(h, SO_MIN(max_nodes(r), least_share(r->e)));
    add_int(h, s->draft_max);
    add_int(h, s->draft_min);
    add_int(h, s->verify);
    add_float(h, s->lenience);
    add_int(h, eo->max_draft);
    add_float(h, (double)eo->draft_temp);
    add_float(h, (double)eo->draft_p_min);
    add_bytes(h, o->expected, o->expected ? (size_t)o->n_expected * sizeof *o->expected : 0);
}

static uint64_t hashed(const so_request *r, const so_request_opts *o) {
    so_sha256 h;
    char hex[65];
    so_sha256_init(&h);
    add_bytes(&h, r->tokens, (size_t)r->n_prompt * sizeof *r->tokens);
    add_sampling(&h, &r->sample);
    add_ending(&h, r, o);
    add_speculation(&h, r, &o->spec);
    so_sha256_hex(&h, hex);
    hex[16] = '\0';
    uint64_t nonce = strtoull(hex, NULL, 16) >> NONCE_SHIFT;
    return nonce ? nonce : 1;
}

/* --- the request --- */

/* Without a drafter, and at temperature 0, every mode is plain decoding: by the seed alone. */
static bool needs_nonce(const so_request *r) {
    const so_spec_set *set = r->spec.set;
    return set && r->spec.verify != SO_VERIFY_MATCH && r->sample.temp > 0 &&
           !set->drafters.root->silent;
}

void so_nonce_choose(so_request *r, const so_request_opts *o) {
    r->seed = r->sample.seed;
    r->has_nonce = needs_nonce(r);
    if (!r->has_nonce)
        return;
    r->nonce = o->has_nonce ? o->nonce : decides_alone(r) ? hashed(r, o) : fresh();
    r->sample.seed = so_nonce_key(r->seed, r->nonce);
}

bool so_request_nonce(const so_request *r, uint64_t *out) {
    *out = r->nonce;
    return r->has_nonce;
}

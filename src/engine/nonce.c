/* The nonce: a number that is combined with the seed to key a request's random numbers when its
 * guesses are tested against random numbers (`reject` and `lenient` above temperature 0). `typical`
 * has one too: its text depends on the guesses, so the seed alone does not determine it.
 *
 * Why the seed is not enough:
 *
 *   1. `match` samples position n with random numbers keyed by (seed, choice, n). Guesses do not
 *      influence the result, so it is exact for any guesses and a seed may be used again.
 *   2. `reject` and `lenient` test guesses against random numbers. Their guarantees hold only if
 *      the guesses are independent of these numbers (verify/reject.c, step 8).
 *   3. A seed that is used twice breaks this independence. The second request may get the text of
 *      the first as a prediction, may find it in a corpus, or may have its draft lengths set by
 *      estimates that were learned from the verdicts on the first.
 *   4. It does not help to key only the verifier's numbers differently: if the draft's samples
 *      repeat and the draft lengths were learned from verdicts on the same samples, the result is
 *      biased too.
 *
 * So for `reject` and `lenient` above temperature 0 all four purposes (DRAFT, ACCEPT, RESIDUAL,
 * TOKEN; base/rng.h) are keyed by key(seed, nonce). The nonce is
 *
 *   given     by the caller to replay a run; for debugging only, because a replay may be biased
 *   hashed    from the request, if its guesses depend on the request alone: drafts of a fixed
 *             length, only drafters with so_drafter.request_only, and a cache with room for the
 *             guesses of all requests (guesses_depend_on_request_only)
 *   random    from the system otherwise
 *
 * Random nonce: the random numbers are independent of everything before them, so the proof in
 * reject.c applies unchanged.
 *
 * Hashed nonce: the argument.
 *
 *   1. Let X be the hashed input and C the constants of the engine (weights, context, cache type).
 *      If nothing but X, C and the key influences the guesses, then the guesses, and so the text,
 *      are a function F(X, C, key(seed, X)).
 *   2. Different X have independent keys. So given the answers to all other requests with the same
 *      seed, the text has the target's distribution, even if X was chosen after seeing them.
 *   3. Equal X give equal texts.
 *   4. It remains to show the premise of step 1. Each possible influence on the guesses:
 *
 *     estimates, costs, times   not used with a fixed length: nothing is weighed, and the planner
 *                               does not prune trees of fixed length (plan/plan.c)
 *     other requests' texts     only the drafter `corpus` reads them. A draft model that reads the
 *                               target's hidden states uses cached pages that other requests
 *                               computed with or without hidden states. so_drafter.request_only is
 *                               false for both, and then the nonce is random
 *     the caller's drafter      may depend on anything: request_only is false
 *     files of draft models     may have been made from an earlier answer: their identity
 *     and tables                (so_drafter.id) is part of X
 *     other requests in the     the guesses of a pass are divided among the requests, and guesses
 *     same step                 are dropped if pages are short. Even rare drops would bias: of two
 *                               equal requests that run at once, the text of the first would decide
 *                               whether pages are left for guesses of the second. A new key after
 *                               guesses were dropped would not help, because sampling again
 *                               depending on the first outcome is a bias itself. So the nonce is
 *                               hashed only if guesses can never be dropped (never_loses_guesses)
 *     beams                     may take the pages of guesses. They do not run beside a request whose
 *                               nonce was hashed (engine/schedule.c, may_run_together)
 *     a drafter that fails      its requests have no guesses in that step. A draft model's pass
 *                               fails only if the machine does, which no text influences
 *     preemption                changes neither the text nor what drafters read of it, and the
 *                               count of rounds continues
 *
 * X does not contain C: choosing another target after seeing a text is outside of what a seed can
 * guarantee, with `match` as well. It does not contain the choice, which is part of every key, nor
 * priority, logprobs and callbacks, which change no token.
 *
 * A nonce has 53 bits, because some JSON readers store numbers as doubles. It is 0 only if the
 * caller gave 0. Nonce 0 means a key of the seed alone; tests/engine/test_seed_reuse.c uses it as a
 * faulty engine that the test must detect. Engine thread. */
#include <stdlib.h>
#include <string.h>

#include "base/sha256.h"
#include "engine/drafters.h"
#include "engine/ends.h"

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

static uint64_t new_nonce(void) {
    uint64_t nonce = so_rng_system_seed() >> NONCE_SHIFT;
    return nonce ? nonce : 1;
}

/* --- can the nonce be hashed? --- */

/* Maximum number of nodes that the drafters can add with a fixed length, and of rows on their ends. */
static int max_nodes(const so_request *r) {
    int n = so_drafters_max_nodes(r->spec.set, r->spec.length) + so_ends_max_rows(r);
    return SO_MIN(n, r->e->o.max_nodes);
}

static int min_guesses_per_pass(const so_engine *e) { return e->max_guesses / e->o.n_parallel; }

static bool any_exceeds_context(const so_request *list) {
    for (; list; list = list->next)
        if (so_schedule_exceeds_context(list))
            return true;
    return false;
}

/* True if other requests can never cost this one a guess. so_schedule_reserve gives no request more
 * pages than a context needs; with that many pages for each request, the last one gets as many as
 * the first. The draft's cache has at least as many pages, and its guesses end within the pages of
 * its context. Beams may take more pages: there are none now, and later ones do not run beside a
 * request whose nonce was hashed (schedule.c). */
static bool never_loses_guesses(const so_request *r) {
    const so_engine *e = r->e;
    if (e->o.n_parallel == 1)
        return true;
    if (any_exceeds_context(e->running) || any_exceeds_context(e->waiting))
        return false;
    return so_schedule_has_all_pages(e) && min_guesses_per_pass(e) >= max_nodes(r);
}

static bool guesses_depend_on_request_only(const so_request *r) {
    const so_speculation *s = &r->spec;
    if (s->length == 0)
        return false;
    for (int i = 0; i < s->set->drafters.n_leaves; i++)
        if (!s->set->drafters.leaves[i]->request_only)
            return false;
    return never_loses_guesses(r);
}

/* --- the hash --- */

static void add_int(so_sha256 *h, int64_t x) { so_sha256_add(h, &x, sizeof x); }
static void add_float(so_sha256 *h, double x) { so_sha256_add(h, &x, sizeof x); }

/* The length is hashed too, so that different lists never give the same bytes. */
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
    add_int(h, o->min_tokens);
    add_bytes(h, o->stop_tokens, (size_t)o->n_stop_tokens * sizeof *o->stop_tokens);
    add_int(h, o->n_bad_words);
    for (int i = 0; i < o->n_bad_words; i++)
        add_bytes(h, o->bad_words[i].ids, o->bad_words[i].len * sizeof *o->bad_words[i].ids);
}

static void add_speculation(so_sha256 *h, const so_request *r, const so_spec_opts *o) {
    const so_speculation *s = &r->spec;
    const so_engine_opts *eo = &r->e->o;
    add_bytes(h, s->set->text, strlen(s->set->text));
    for (int i = 0; i < s->set->drafters.n_leaves; i++)
        add_int(h, (int64_t)s->set->drafters.leaves[i]->id);
    add_int(h, s->length);
    add_int(h, SO_MIN(max_nodes(r), min_guesses_per_pass(r->e)));
    add_int(h, s->draft_max);
    add_int(h, s->draft_min);
    add_int(h, s->verify);
    add_float(h, s->lenience);
    add_int(h, eo->max_draft);
    add_float(h, (double)eo->draft_temp);
    add_float(h, (double)eo->draft_p_min);
    add_bytes(h, o->expected, o->expected ? (size_t)o->n_expected * sizeof *o->expected : 0);
}

static uint64_t hash_request(const so_request *r, const so_request_opts *o) {
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

/* Without a drafter, and at temperature 0, no guess is tested against random numbers: the seed is
 * the key. */
static bool needs_nonce(const so_request *r) {
    const so_spec_set *set = r->spec.set;
    return set && r->spec.verify != SO_VERIFY_MATCH && r->sample.temp > 0 &&
           !set->drafters.root->never_guesses;
}

void so_nonce_choose(so_request *r, const so_request_opts *o) {
    r->seed = r->sample.seed;
    r->has_nonce = needs_nonce(r);
    if (!r->has_nonce)
        return;
    r->hashed_nonce = !o->has_nonce && guesses_depend_on_request_only(r);
    r->nonce = o->has_nonce ? o->nonce : r->hashed_nonce ? hash_request(r, o) : new_nonce();
    r->sample.seed = so_nonce_key(r->seed, r->nonce);
}

bool so_request_nonce(const so_request *r, uint64_t *out) {
    *out = r->nonce;
    return r->has_nonce;
}

/* The draft of a step: drafters propose guesses, the planner decides how many. Nothing here depends
 * on which drafters a request has.
 *
 *   1. room      how deep a draft may be: the request's limits, the end of its context (the last
 *                position is decoded without guesses), the remaining pages, its part of the pass
 *   2. propose   for each alternative of the spec, stage by stage (so_draft_set): the planner sets
 *                the depth and the terms, the drafter adds guesses, the planner keeps them or
 *                passes the request on to the next alternative
 *   3. choose    the planner keeps the guesses that gain more than they cost; with a fixed length
 *                it keeps all
 *
 * A drafter's data for a request is opened at submission and closed at the end of the request. If a
 * drafter fails, the error is logged and its requests continue without its guesses: an answer never
 * needs guesses. If the target's device failed meanwhile, the requests are computed again from their
 * tokens (engine.c). Engine thread. */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/env.h"
#include "base/log.h"
#include "engine/drafters.h"
#include "engine/ends.h"
#include "plan/store.h"

enum { MIN_PASSES_TO_SAVE = 8 };                        /* passes before costs are saved */
static const size_t MIN_WEIGHT_BYTES_TO_SAVE = 8 << 20; /* smaller models are not saved */
static const int64_t MAX_LOGITS = (int64_t)64 << 20;    /* of all guesses of a pass, in floats */

struct so_speculator {
    so_planner *planner;
    so_drafters *drafters;
    bool planned; /* this step has a plan */
    int64_t t_ns; /* start of this step */
    bool unusual; /* in this step a device prepared something for drafts: its time is not learned */
};

/* --- the engine --- */

int so_speculate_max_guesses(const so_engine *e) {
    int64_t all = (int64_t)e->o.n_parallel * e->o.max_nodes;
    int64_t by_memory = MAX_LOGITS / so_model_hparams(e->m)->n_vocab;
    return (int)SO_MIN(all, SO_MAX(by_memory, SO_MAX(e->o.n_parallel, e->o.max_nodes)));
}

/* Path of the file with costs and records; NULL if nothing is to be kept. The caller frees the path
 * and *key. */
static char *store_path(const so_engine *e, so_buf *key) {
    char *dir = so_env_cache_dir(), *path = NULL;
    if (dir && e->o.keep_costs) {
        so_store_key(e->m, e->o.kv_dtype, key);
        path = so_store_path(dir, so_buf_str(key));
    }
    free(dir);
    return path;
}

so_speculator *so_speculate_create(so_engine *e) {
    so_speculator *s = SO_NEW(so_speculator);
    so_buf key = {0};
    char *path = store_path(e, &key);
    s->planner = so_planner_create(e->o.n_parallel);
    s->drafters = so_drafters_create(e, s->planner);
    if (path)
        so_planner_load(s->planner, path, so_buf_str(&key));
    free(path);
    so_buf_free(&key);
    return s;
}

void so_speculate_free(so_engine *e) {
    so_speculator *s = e->spec;
    if (!s)
        return;
    so_buf key = {0};
    char *path = store_path(e, &key);
    bool worth_saving =
        e->o.keep_costs == SO_KEEP_ALL || so_model_weight_bytes(e->m) >= MIN_WEIGHT_BYTES_TO_SAVE;
    so_drafters_free(s->drafters); /* first: freeing a set hands its records to the planner */
    if (path && worth_saving && so_planner_n_passes(s->planner) >= MIN_PASSES_TO_SAVE)
        so_planner_save(s->planner, path, so_buf_str(&key));
    so_planner_free(s->planner);
    free(path);
    so_buf_free(&key);
    free(s);
}

/* --- a request --- */

static int check_opts(const so_engine *e, const so_spec_opts *o, so_err *err) {
    int limit = e->o.max_draft;
    if (limit == 0)
        return so_err_set(err, SO_EUNSUPPORTED,
                          "this engine was created without speculation (max_draft is 0)");
    if (o->length < 0 || o->length > limit)
        return so_err_set(err, SO_ERANGE, "--spec-length %d: must be from 1 to %d", o->length,
                          limit);
    if (o->draft_max < 0 || o->draft_max > limit)
        return so_err_set(err, SO_ERANGE, "--draft-max %d: must be from 1 to %d", o->draft_max,
                          limit);
    if (o->draft_min < 0 || o->draft_min > limit)
        return so_err_set(err, SO_ERANGE, "--draft-min %d: must be from 0 to %d", o->draft_min,
                          limit);
    if (o->verify == SO_VERIFY_TYPICAL && !(o->lenience > 0 && o->lenience <= 1))
        return so_err_set(err, SO_ERANGE, "--verify typical=%g: must be above 0 and at most 1",
                          o->lenience);
    if (o->verify == SO_VERIFY_LENIENT && !(o->lenience > 0 && o->lenience <= 1))
        return so_err_set(err, SO_ERANGE,
                          "--verify lenient=%g: must be above 0 and at most 1 (1 is exact)",
                          o->lenience);
    return SO_OK;
}

static so_plan_mode mode_of(const so_request *r, so_verify_mode verify) {
    if (r->sample.temp == 0)
        return SO_PLAN_GREEDY;
    return verify == SO_VERIFY_MATCH ? SO_PLAN_MATCH : SO_PLAN_DRAWN;
}

int so_speculate_open(so_request *r, const so_spec_opts *o, so_err *err) {
    so_speculation *s = &r->spec;
    so_spec_set *set = NULL;
    int rc = o->drafter ? check_opts(r->e, o, err) : SO_OK;
    if (rc == SO_OK && o->drafter)
        rc = so_drafters_find(r->e->spec->drafters, o->drafter, &set, err);
    if (rc != SO_OK || !set)
        return rc;
    so_draft_text text = {.prompt = r->tokens,
                          .n_prompt = r->n_prompt,
                          .source = r->source,
                          .n_source = r->n_source,
                          .expected = o->expected,
                          .n_expected = o->n_expected,
                          .max_tokens = r->max_len};
    if (r->beams)
        return so_beams_open_draft(r, set, &text, o, err);
    rc = set->drafters.root->vt->open(set->drafters.root, &text, &s->state, err);
    if (rc != SO_OK)
        return rc;
    set->n_users++;
    s->set = set;
    s->length = o->length;
    s->draft_max = o->draft_max ? o->draft_max : r->e->o.max_draft;
    s->draft_min = o->draft_min;
    s->verify = o->verify;
    bool has_number = o->verify == SO_VERIFY_LENIENT || o->verify == SO_VERIFY_TYPICAL;
    s->lenience = has_number ? o->lenience : 1;
    s->n_observed = r->n_prompt;
    s->plan =
        so_plan_request_create(set->plan, &(so_plan_request_opts){.mode = mode_of(r, o->verify),
                                                                  .verify = o->verify,
                                                                  .length = o->length,
                                                                  .n_source = r->n_source});
    if (s->verify == SO_VERIFY_LENIENT && s->lenience < 1)
        r->greedy = false; /* lenient verification reads the logits */
    return SO_OK;
}

static void count_async(so_request *r) {
    const so_draft_set *d = &r->spec.set->drafters;
    for (int i = 0; i < d->n_stages; i++)
        if (so_async_is(d->stages[i].drafter)) {
            so_async_counts n;
            so_async_get_counts(d->stages[i].drafter, so_draft_set_state(d, r->spec.state, i), &n);
            so_async_counts_add(&r->stats.async, &n);
        }
}

void so_speculate_close(so_request *r) {
    so_speculation *s = &r->spec;
    so_beams_close_draft(r);
    if (!s->plan)
        return;
    count_async(r);
    s->set->drafters.root->vt->close(s->set->drafters.root, s->state);
    so_plan_request_free(s->plan);
    s->plan = NULL;
}

/* The request is being freed; after this its set may be freed too. Until now so_speculate_name
 * needed the set. */
void so_speculate_release(so_request *r) {
    so_speculate_close(r);
    if (r->spec.set)
        r->spec.set->n_users--;
}

const char *so_speculate_name(const so_request *r) {
    return r->spec.set ? r->spec.set->text : "none";
}

const so_drafter *so_speculate_drafter(const so_request *r) {
    return r->spec.set ? r->spec.set->drafters.root : NULL;
}

void so_speculate_admit(so_request *r) {
    so_tree *t = r->tree;
    bool rows = r->spec.verify == SO_VERIFY_REJECT || r->spec.verify == SO_VERIFY_LENIENT;
    int n = rows && r->sample.temp > 0 ? r->e->o.max_nodes : 0;
    if (n > 0 && !t->q)
        t->q = SO_NEW_N(float, (size_t)n *(size_t)t->n_vocab);
    t->max_rows = n;
}

void so_speculate_preempt(so_request *r) {
    so_beams_preempt(r);
    if (!r->spec.plan)
        return;
    so_plan_request_preempted(r->spec.plan);
    so_drafter_preempt(r->spec.set->drafters.root, r->spec.state);
}

bool so_speculate_reads_hidden(const so_request *r) {
    return r->spec.plan && r->spec.set->drafters.root->wants_target_hidden;
}

void so_speculate_observe_hidden(so_request *r, int node) {
    if (!so_speculate_reads_hidden(r))
        return;
    so_drafter_add_hidden(r->spec.set->drafters.root, r->spec.state, r->n_tokens,
                          so_pass_hidden(r->e->pass, r->first_logit + node));
    so_ends_observe(r, node);
}

void so_speculate_observe_tokens(so_request *r) {
    so_speculation *s = &r->spec;
    int n = r->n_tokens - s->n_observed;
    if (!s->plan || n <= 0)
        return;
    so_drafter_observe(s->set->drafters.root, s->state, r->tokens + s->n_observed, n);
    so_plan_request_observe(s->plan, r->tokens + s->n_observed, n);
    s->n_observed = r->n_tokens;
}

/* --- 1. room --- */

static bool speculates(const so_request *r) { return r->has_tree && r->spec.plan; }

/* max_guesses: how many of the guesses in the pass may be this request's. */
static void set_room(so_request *r, int max_guesses) {
    so_speculation *s = &r->spec;
    int depth = SO_MIN(s->length ? s->length : s->draft_max, r->max_len - r->n_tokens - 1);
    int nodes = so_drafters_max_nodes(s->set, depth);
    int want = SO_MIN(nodes + so_ends_max_rows(r), SO_MIN(max_guesses, r->e->o.max_nodes));
    s->n_reserved = depth > 0 ? so_schedule_reserve(r, want) : 0;
    s->max_nodes = SO_MIN(nodes, s->n_reserved);
    s->depth = SO_MAX(0, SO_MIN(depth, s->max_nodes));
}

/* --- 2. propose --- */

static so_plan_query ask_of(const so_request *r) {
    return (so_plan_query){.r = r->spec.plan,
                           .n_tokens = r->n_tokens,
                           .tokens_left = r->max_len - r->n_tokens,
                           .max_depth = r->spec.depth};
}

/* The remaining nodes are divided equally among the n_left drafters that still add to this tree. */
static int node_budget(const so_request *r, int n_left) {
    int used = r->tree->n_nodes - 1, left = SO_MAX(r->spec.max_nodes - used, 0);
    return used + (left + n_left - 1) / n_left;
}

static so_draft_job job_of(const so_request *r, int stage, const so_plan_query *ask, int n_left) {
    const so_speculation *s = &r->spec;
    int max_nodes = node_budget(r, n_left), used = r->tree->n_nodes - 1;
    if (ask->max_nodes > 0)
        max_nodes = SO_MIN(max_nodes, used + ask->max_nodes);
    return (so_draft_job){.state = so_draft_set_state(&s->set->drafters, s->state, stage),
                          .tokens = r->tokens,
                          .n_tokens = r->n_tokens,
                          .n_prompt = r->n_prompt,
                          .tree = r->tree,
                          .max_nodes = max_nodes,
                          .max_depth = ask->max_depth,
                          .terms = ask->terms,
                          .seed = r->sample.seed,
                          .choice = r->sample.choice,
                          .round = s->round,
                          .temp = r->sample.temp,
                          .sample = &r->sample,
                          .seq = r->n_chunk == 0 ? r->seq : NULL};
}

static void drop_guesses(so_tree *t) { so_tree_reset(t, t->nodes[0].token, t->root_pos); }

static void report_failure(so_spec_set *set, const so_err *err) {
    so_log(set->failed ? SO_LOG_DEBUG : SO_LOG_WARN, /* warn once: a failing drafter fails in every
                                                        step */
           "drafter %s: %s; continuing without its guesses", set->text, err->msg);
    set->failed = true;
}

void so_speculate_lock(so_engine *e) { so_drafters_lock(e->spec->drafters); }
void so_speculate_unlock(so_engine *e) { so_drafters_unlock(e->spec->drafters); }

/* The time of work on a backend that had prepared something for n_unusual passes when it began; -1 if
 * it did so again, since the next time will be different. b NULL: on the host. */
static double usual_ms(const so_backend *b, unsigned n_unusual, double ms) {
    return b && b->n_unusual != n_unusual ? -1 : ms;
}

/* Removes the guesses after an end token. The answer ends there, so they are never tested: whether a
 * test takes place does not depend on them, and sampled guesses may be removed, too. */
static void drop_after_ends(so_request *r) {
    so_tree *t = r->tree;
    bool keep[SO_TREE_MAX] = {true};
    int n_kept = 1;
    for (int i = 1; i < t->n_nodes; i++) {
        int parent = t->nodes[i].parent;
        keep[i] = keep[parent] && (parent == 0 || !so_restrict_ends(r, t->nodes[parent].token));
        n_kept += keep[i];
    }
    if (n_kept < t->n_nodes)
        so_tree_prune(t, keep);
}

/* Offers the first n requests of the set to one drafter. n_left drafters, this one included, add to
 * the same trees. */
static void run_stage(so_engine *e, so_spec_set *set, int stage, int n, int n_left) {
    so_drafter *d = set->drafters.stages[stage].drafter;
    so_planner *planner = e->spec->planner;
    so_err err = {0};
    int n_jobs = 0;
    for (int i = 0; i < n; i++) {
        set->asks[i] = ask_of(set->requests[i]);
        if (set->requests[i]->tree->n_nodes > set->requests[i]->spec.max_nodes)
            set->asks[i].max_depth = 0; /* its tree is full */
    }
    so_plan_set_depths(planner, stage, set->asks, n);
    for (int i = 0; i < n; i++) {
        set->requests[i]->stats.async.off += d->vt->dispatch && set->asks[i].max_depth == 0;
        if (set->asks[i].max_depth == 0)
            continue;
        set->jobs[n_jobs] = job_of(set->requests[i], stage, &set->asks[i], n_left);
        set->requests[i]->spec.asked_ends |= d->end_rows.n > 0;
        set->asks[n_jobs++] = set->asks[i];
    }
    if (n_jobs == 0)
        return;
    const so_backend *b = so_model_backend(e->m);
    unsigned n_failed = b->n_failed, n_unusual = d->backend ? d->backend->n_unusual : 0;
    int64_t t = so_clock_ns();
    if (!d->asynchronous && d->is_model)
        so_speculate_lock(e);
    int rc = d->vt->propose(d, set->jobs, n_jobs, &err);
    if (!d->asynchronous && d->is_model)
        so_speculate_unlock(e);
    double ms = so_clock_ms_since(t) +
                so_plan_rows_ms(planner, n_jobs * d->end_rows.n * d->end_rows.n_ends);
    ms = usual_ms(d->backend, n_unusual, ms);
    e->spec->unusual |= ms < 0;
    so_plan_observe_draft(planner, stage, set->asks, set->jobs, n_jobs, ms);
    for (int i = 0; i < n && rc == SO_OK; i++)
        drop_after_ends(set->requests[i]);
    if (rc == SO_OK)
        return;
    report_failure(set, &err);
    /* a set whose draft made the target's device fail is not used again: each failure restarts the
     * requests */
    set->off |= b->n_failed != n_failed;
    for (int i = 0; i < n_jobs; i++)
        drop_guesses(set->jobs[i].tree);
}

/* Removes from set->requests those whose guesses are kept. Returns how many remain. */
static int keep_undecided(so_engine *e, so_spec_set *set, int alternative, int n) {
    int left = 0;
    for (int i = 0; i < n; i++) {
        so_plan_query ask = ask_of(set->requests[i]);
        if (!so_plan_keep_guesses(e->spec->planner, &ask, alternative))
            set->requests[left++] = set->requests[i];
    }
    return left;
}

static void propose_set(so_engine *e, so_spec_set *set, int n) {
    const so_draft_set *d = &set->drafters;
    for (int i = 0, end; i < d->n_stages && n > 0; i = end) {
        for (end = i; end < d->n_stages && d->stages[end].alternative == d->stages[i].alternative;)
            end++;
        for (int k = i; k < end; k++)
            run_stage(e, set, k, n, end - k);
        n = keep_undecided(e, set, d->stages[i].alternative, n);
    }
}

/* Drops drafts shorter than --draft-min, but only if all their guesses are deterministic (points).
 * Dropping a sampled guess because of what follows it would bias the output. */
static void drop_short_draft(so_request *r) {
    if (so_tree_all_points(r->tree) && r->tree->n_nodes - 1 < r->spec.draft_min)
        drop_guesses(r->tree);
}

static double propose(so_engine *e) {
    int64_t start = so_clock_ns();
    for (so_spec_set *s = so_drafters_sets(e->spec->drafters); s; s = s->next) {
        int n = 0;
        int64_t t = so_clock_ns();
        for (so_request *r = e->running; r && !s->off; r = r->next)
            if (speculates(r) && r->spec.set == s && r->spec.depth > 0)
                s->requests[n++] = r;
        if (n == 0)
            continue;
        propose_set(e, s, n);
        double ms = so_clock_ms_since(t);
        for (so_request *r = e->running; r; r = r->next)
            if (speculates(r) && r->spec.set == s && r->spec.depth > 0) {
                r->stats.draft_ms += ms;
                drop_short_draft(r);
            }
    }
    return so_clock_ms_since(start);
}

/* --- drafting ahead --- */

/* Whether a further round may follow this one. The limits are those of the next round. */
static bool may_continue(const so_request *r) {
    return speculates(r) && r->max_len - r->n_tokens > 2;
}

/* Limit of the depth of what is drafted ahead. Sampled guesses must find room for all of them in the next
 * step, even if every place is taken by then (schedule.c, promises). Points may be dropped. */
static int room_ahead(const so_request *r) {
    const so_engine *e = r->e;
    int depth = r->spec.length ? r->spec.length : r->spec.draft_max;
    depth = SO_MIN(depth, r->max_len - r->n_tokens - 2);
    if (r->tree->max_rows == 0)
        return depth;
    return so_schedule_can_promise(r) ? SO_MIN(depth, e->max_guesses / e->o.n_parallel) : 0;
}

static void dispatch_stage(so_engine *e, so_spec_set *s, int stage) {
    so_drafter *d = s->drafters.stages[stage].drafter;
    int n = 0;
    for (so_request *r = e->running; r; r = r->next) {
        if (!may_continue(r) || r->spec.set != s)
            continue;
        so_plan_query ask = ask_of(r);
        ask.max_depth = room_ahead(r);
        ask.max_depth = so_plan_ahead_depth(e->spec->planner, stage, &ask);
        if (ask.max_depth <= 0)
            continue;
        r->spec.promised = r->tree->max_rows > 0;
        s->jobs[n] = job_of(r, stage, &ask, 1);
        s->jobs[n++].round = r->spec.round + 1;
    }
    if (n > 0)
        d->vt->dispatch(d, s->jobs, n);
}

/* The trees are final: drafters that draft ahead begin, while the target verifies. */
static void dispatch(so_engine *e) {
    for (so_spec_set *s = so_drafters_sets(e->spec->drafters); s; s = s->next)
        for (int i = 0; i < s->drafters.n_stages && !s->off; i++)
            if (s->drafters.stages[i].drafter->vt->dispatch)
                dispatch_stage(e, s, i);
}

/* What this step's lookups found. */
static void count_ahead(so_engine *e, const so_async_counts *before) {
    so_async_counts now = so_drafters_async(e->spec->drafters);
    so_step_info *s = &e->step.info;
    s->looked_up = now.rounds + now.skipped - before->rounds - before->skipped;
    s->hits = now.hits - before->hits;
    s->drafted_ahead = now.drafted - before->drafted;
    s->served = now.served - before->served;
    s->ahead_ms = now.worker_ms - before->worker_ms;
}

/* --- the step --- */

/* Chooses the ends of all trees that get rows; returns the number of these rows. A fixed length asks all
 * drafters in every step, also those that an earlier alternative makes unnecessary. */
static int choose_ends(so_engine *e) {
    int n = 0;
    for (so_request *r = e->running; r; r = r->next)
        if (speculates(r)) {
            r->spec.asked_ends |= r->spec.length > 0;
            n += so_ends_choose(r, r->spec.n_reserved - (r->tree->n_nodes - 1));
        }
    return n;
}

/* Time of encoders on the backend of drafts; 0 with async(), whose thread may be using it. */
static double draft_encode_ms(const so_engine *e) {
    const so_model *m = e->o.draft ? e->o.draft : e->m;
    return so_drafters_has_async_thread(e->spec->drafters) ? 0 : so_model_backend(m)->encode_ms;
}

void so_speculate_step(so_engine *e) {
    so_planner *planner = e->spec->planner;
    so_plan_step room = {.max_rows = e->max_rows};
    int n_spec = 0;
    for (so_request *r = e->running; r; r = r->next) {
        r->spec.n_ends = 0;
        r->spec.asked_ends = r->spec.promised = false;
        n_spec += speculates(r);
        room.n_requests += r->has_tree;
        room.n_prefilling += !r->has_tree && !r->beams;
        room.prompt_rows += r->n_chunk + r->n_beam_rows;
    }
    e->spec->planned = n_spec > 0;
    e->spec->t_ns = so_clock_ns();
    e->spec->unusual = false;
    if (n_spec == 0)
        return;
    so_plan_begin(planner, &room);
    for (so_request *r = e->running; r; r = r->next)
        if (r->has_tree)
            so_plan_enter(planner, r->spec.plan, r->tree);
    for (so_request *r = e->running; r; r = r->next)
        if (speculates(r))
            set_room(r, e->max_guesses / n_spec);
    so_async_counts before = so_drafters_async(e->spec->drafters);
    double encoded = draft_encode_ms(e);
    e->step.info.draft_ms = propose(e);
    e->step.info.draft_encode_ms = draft_encode_ms(e) - encoded;
    count_ahead(e, &before);
    so_plan_choose(planner);
    e->step.info.plan = *so_plan_add_rows(planner, choose_ends(e));
    dispatch(e);
}

void so_speculate_observe_round(so_request *r, so_verify_mode mode, double ms) {
    if (r->e->spec)
        so_plan_observe_verdict(r->e->spec->planner, r->spec.plan, r->tree, &r->verdict, mode, ms);
}

void so_speculate_observe_pass(so_engine *e, double pass_ms, unsigned n_unusual) {
    int n_tokens = 0;
    if (!e->spec->planned)
        return;
    for (so_request *r = e->running; r; r = r->next)
        if (r->has_tree) {
            n_tokens += r->verdict.n_accepted + 1;
            r->spec.round++;
        }
    const so_backend *b = so_model_backend(e->m);
    double step_ms = e->spec->unusual ? -1 : so_clock_ms_since(e->spec->t_ns);
    so_plan_end(e->spec->planner, usual_ms(b, n_unusual, pass_ms), usual_ms(b, n_unusual, step_ms),
                n_tokens);
}

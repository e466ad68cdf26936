/* Creates and frees the planner, its sets and its requests, and transfers records: a set starts
 * from the records of its drafters, a request from its set. When a set is freed, its observations
 * go into the records. plan.h describes the planner as a whole. */
#include <stdlib.h>

#include "base/log.h"
#include "plan/impl.h"
#include "plan/store.h"
#include "plan/tuning.h"

so_planner *so_planner_create(int max_requests) {
    so_planner *p = SO_NEW(so_planner);
    p->max_requests = max_requests;
    p->account = SO_TUNE_ACCOUNT_START;
    for (int i = 0; i < SO_PLAN_SIZES; i++)
        p->shortfall[i].n = SO_TUNE_SHORTFALL_PRIOR;
    p->candidates = SO_NEW_N(so_candidate, max_requests);
    p->entries = SO_NEW_N(so_plan_entry, max_requests);
    return p;
}

void so_planner_free(so_planner *p) {
    if (!p)
        return;
    so_costs_deinit(&p->costs);
    so_records_free(&p->records);
    so_selection_deinit(&p->selection);
    free(p->candidates);
    free(p->entries);
    free(p);
}

void so_planner_load(so_planner *p, const char *path, so_str key) {
    const char *why;
    if (so_store_read(path, key, &p->costs, &p->records, &why))
        so_log(SO_LOG_DEBUG, "planner: loaded costs and records from %s", path);
    else
        so_log(SO_LOG_DEBUG, "planner: starts without costs and records: %s: %s", path, why);
}

void so_planner_save(so_planner *p, const char *path, so_str key) {
    so_err err = {0};
    if (so_store_write(path, key, &p->costs, &p->records, &err) != SO_OK)
        so_log(SO_LOG_DEBUG, "planner: costs and records are not saved: %s", err.msg);
}

int so_planner_n_passes(const so_planner *p) { return p->n_passes; }
so_costs *so_planner_costs(so_planner *p) { return &p->costs; }
double so_planner_account(const so_planner *p) { return p->account; }

/* --- sets --- */

/* Prior of a drafter: its record, or for an untried draft the claimed agreement of its file. */
static void load_prior(so_plan_set *s, so_plan_mode mode, int leaf) {
    const so_drafter *d = s->drafters->leaves[leaf];
    char name[SO_RECORD_NAME];
    const so_record *rec = NULL;
    if (so_record_name(d, mode, name))
        rec = so_records_find(&s->p->records, name);
    if (rec)
        so_record_set_prior(rec, &s->shared[mode], leaf);
    else if (d->claimed_agreement > 0)
        so_record_set_claim(d->claimed_agreement * SO_TUNE_CLAIM_FACTOR[mode], &s->shared[mode],
                            leaf);
    so_draft_cost *cost = s->costs[leaf];
    if (rec && cost && rec->n_level_points > 0 && so_curve_ms(&cost->one_level, 1) == 0) {
        so_curve_import(&cost->one_level, rec->level_points, rec->n_level_points, NULL);
        if (rec->trip_error > 0 && d->levels_per_pass > 1)
            so_trip_import(&cost->trip, rec->trip_fixed_part, rec->trip_error);
        cost->catch_up_ms = rec->catch_up_ms;
        cost->catch_up_ms.n = SO_MIN(cost->catch_up_ms.n, 1);
        so_smooth(&cost->pace, so_costs_pass(&s->p->costs, 1), 1);
    }
}

static void save_record(so_plan_set *s, so_plan_mode mode, int leaf) {
    char name[SO_RECORD_NAME];
    float tested = 0;
    for (int rank = 0; rank < SO_ACCEPT_RANKS; rank++)
        tested += s->shared[mode].seen[leaf][0][rank][SO_ACCEPT_CLASSES].tested;
    if (tested <= 0 || !so_record_name(s->drafters->leaves[leaf], mode, name))
        return;
    so_record *rec = so_records_touch(&s->p->records, name);
    so_record_learn(rec, &s->shared[mode], leaf);
    if (s->costs[leaf]) {
        rec->n_level_points =
            so_curve_export(&s->costs[leaf]->one_level, rec->level_points, SO_CURVE_KNOTS);
        rec->catch_up_ms = s->costs[leaf]->catch_up_ms;
        rec->trip_fixed_part = s->costs[leaf]->trip.fixed_part;
        rec->trip_error = so_trip_error(&s->costs[leaf]->trip);
    }
}

/* Comparisons are kept for single requests only: the sizes of batches differ from run to run. */
static const int KEPT_SIZE = 1;

static uint64_t compare_key(const so_plan_set *s, so_plan_mode mode) {
    so_buf text = {0};
    so_buf_printf(&text, "%d", (int)mode);
    for (int i = 0; i < s->drafters->n_leaves; i++) {
        const so_drafter *d = s->drafters->leaves[i];
        so_buf_printf(&text, " %s %016llx", d->vt->name, (unsigned long long)d->id);
    }
    uint64_t key = so_hash_bytes(text.data, text.len);
    so_buf_free(&text);
    return key;
}

static void load_comparison(so_plan_set *s, so_plan_mode mode) {
    const so_compare_kept *k =
        s->may_be_ahead ? so_records_compared(&s->p->records, compare_key(s, mode)) : NULL;
    if (k && (k->base != SO_METHOD_SYNC || s->may_be_sync))
        so_compare_resume(&s->compare[mode][KEPT_SIZE], k);
}

static void save_comparison(so_plan_set *s, so_plan_mode mode) {
    so_compare_kept k = {.key = compare_key(s, mode)};
    if (s->may_be_ahead && so_compare_keep(&s->compare[mode][KEPT_SIZE], &k))
        so_records_keep(&s->p->records, &k);
}

so_plan_set *so_plan_set_create(so_planner *p, const so_draft_set *drafters) {
    so_plan_set *s = SO_NEW(so_plan_set);
    int n = drafters->n_leaves;
    char name[SO_RECORD_NAME];
    s->p = p;
    s->drafters = drafters;
    s->costs = SO_NEW_N(so_draft_cost *, n);
    s->novelty = SO_NEW_N(so_mean, n);
    s->probed_at = SO_NEW_N(double, n);
    s->ahead_alternative = -1;
    for (int i = 0; i < drafters->n_stages; i++) {
        bool ahead = drafters->stages[i].drafter->vt->dispatch != NULL;
        s->ahead_alternative = ahead ? drafters->stages[i].alternative : s->ahead_alternative;
        s->may_be_ahead |= ahead;
        s->may_be_sync |= !ahead;
    }
    for (int i = 0; i < n; i++) {
        const so_drafter *d = drafters->leaves[i];
        bool known = d->is_model && so_record_model_name(d->id, SO_PLAN_GREEDY, name);
        if (d->has_cost)
            s->costs[i] = so_costs_drafter(&p->costs, known ? name : d->vt->name, d->size);
        if (d->has_cost && d->levels_per_pass > 1)
            so_trip_start(&s->costs[i]->trip);
    }
    for (int mode = 0; mode < SO_PLAN_MODES; mode++) {
        so_accept_shared_init(&s->shared[mode], n);
        s->yields[mode] = SO_NEW_N(so_yield, n);
        for (int i = 0; i < n; i++)
            load_prior(s, (so_plan_mode)mode, i);
        for (int k = 0; k < SO_PLAN_SIZES; k++)
            s->compare[mode][k].random = (uint32_t)so_rng_system_seed();
        load_comparison(s, (so_plan_mode)mode);
    }
    return s;
}

void so_plan_set_free(so_plan_set *s) {
    if (!s)
        return;
    for (int mode = 0; mode < SO_PLAN_MODES; mode++) {
        for (int i = 0; i < s->drafters->n_leaves; i++)
            save_record(s, (so_plan_mode)mode, i);
        save_comparison(s, (so_plan_mode)mode);
        so_accept_shared_deinit(&s->shared[mode]);
        free(s->yields[mode]);
    }
    free(s->costs);
    free(s->novelty);
    free(s->probed_at);
    free(s);
}

/* --- requests --- */

so_plan_request *so_plan_request_create(so_plan_set *s, const so_plan_request_opts *o) {
    so_plan_request *r = SO_NEW(so_plan_request);
    r->set = s;
    r->ahead_depth = SO_TERMS_DEPTHS;
    r->o = *o;
    so_accept_init(&r->accept, &s->shared[o->mode]);
    r->yields = SO_NEW_N(so_yield, s->drafters->n_leaves);
    r->n_prefilled = SO_NEW_N(int, s->drafters->n_leaves);
    r->use_rate = SO_NEW_N(so_mean, s->drafters->n_leaves);
    for (int i = 0; i < s->drafters->n_leaves; i++)
        r->use_rate[i] = (so_mean){1, SO_TUNE_USE_PRIOR};
    r->gave_no_rows = SO_NEW_N(bool, s->drafters->n_leaves);
    r->per_trip = SO_NEW_N(int, s->drafters->n_leaves);
    for (int i = 0; i < s->drafters->n_leaves; i++) { /* sampled guesses need the host each time */
        bool one = o->mode != SO_PLAN_GREEDY;
        r->per_trip[i] = one ? 1 : SO_MAX(s->drafters->leaves[i]->levels_per_pass, 1);
    }
    return r;
}

void so_plan_request_free(so_plan_request *r) {
    if (!r)
        return;
    so_planner *p = r->set->p;
    for (int i = 0; i < p->n_entries; i++) /* it may end within a step */
        if (p->entries[i].r == r)
            p->entries[i].r = NULL;
    so_accept_deinit(&r->accept);
    free(r->yields);
    free(r->n_prefilled);
    free(r->use_rate);
    free(r->gave_no_rows);
    free(r->per_trip);
    free(r);
}

void so_plan_request_observe(so_plan_request *r, const int32_t *tokens, int n) {
    so_shadow_advance(&r->shadow, &r->accept, tokens, n);
}

void so_plan_request_preempted(so_plan_request *r) {
    for (int i = 0; i < r->set->drafters->n_leaves; i++)
        r->n_prefilled[i] = 0;
}

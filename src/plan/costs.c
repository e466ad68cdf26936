/* Learns the costs of costs.h. The cost of a call with one drafting level is a curve over the number
 * of chains, like that of the target's pass over rows. A curve separates the machine's speed from
 * the cost of one more chain. A call with several levels is converted to one with one level by
 * trip.h: without round trips it takes one level's time for each. A call in which a chain had more
 * than SO_TUNE_MAX_LAG tokens of catch-up updates the cost of catch-up (its time minus the known
 * cost of its levels) and not that of levels. */
#include "plan/costs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plan/tuning.h"

void so_costs_deinit(so_costs *c) {
    for (so_draft_cost *d = c->drafters, *next; d; d = next) {
        next = d->next;
        free(d);
    }
    *c = (so_costs){0};
}

so_draft_cost *so_costs_drafter(so_costs *c, const char *name, double size) {
    for (so_draft_cost *d = c->drafters; d; d = d->next)
        if (strcmp(d->name, name) == 0)
            return d;
    so_draft_cost *d = SO_NEW(so_draft_cost);
    snprintf(d->name, sizeof d->name, "%s", name);
    d->size = size;
    d->next = c->drafters;
    return c->drafters = d;
}

double so_costs_pass(const so_costs *c, int rows) { return so_curve_ms(&c->pass, rows); }

/* Scales a cost that was measured at another speed of the machine to the current speed. */
static double at_pace(const so_costs *c, const so_draft_cost *d, double ms) {
    double now = so_costs_pass(c, 1);
    return d->pace.value > 0 && now > 0 ? ms * now / d->pace.value : ms;
}

/* A call that makes one level. */
static double one_level(const so_costs *c, const so_draft_cost *d, int chains) {
    double ms = so_curve_ms(&d->one_level, chains);
    if (ms > 0)
        return at_pace(c, d, ms);
    return so_costs_pass(c, chains) * (SO_TUNE_LEVEL_FIXED + d->size);
}

/* How much longer a call takes with this number of chains than with one. */
static double chains_ratio(const so_costs *c, const so_draft_cost *d, int chains) {
    double one = one_level(c, d, 1);
    return one > 0 ? one_level(c, d, chains) / one : 1;
}

double so_costs_trip(const so_costs *c, const so_draft_cost *d) {
    return d->trip.fixed_part * one_level(c, d, 1);
}

double so_costs_trip_hoped(const so_costs *c, const so_draft_cost *d) {
    return so_trip_hoped_part(&d->trip) * one_level(c, d, 1);
}

double so_costs_level(const so_costs *c, const so_draft_cost *d, int chains) {
    return one_level(c, d, chains) - so_costs_trip(c, d);
}

static int trips_of(const so_draft_usage *u) {
    return u->passes < 1 ? u->levels : SO_MIN(u->passes, u->levels);
}

double so_costs_usage(const so_costs *c, const so_draft_cost *d, const so_draft_usage *u) {
    return trips_of(u) * so_costs_trip(c, d) +
           u->levels * so_costs_level(c, d, SO_MAX(u->chains, 1));
}

/* At most a pass for each token. A reading that another program, or a wait for the draft model's other
 * user, made look dearer would otherwise keep the drafter from being used, and so from being measured
 * again. */
double so_costs_catch_up(const so_costs *c, const so_draft_cost *d) {
    if (d->catch_up_ms.n > 0)
        return SO_MIN(at_pace(c, d, d->catch_up_ms.value), one_level(c, d, 1));
    return so_costs_pass(c, SO_TUNE_PROMPT_ROWS) / SO_TUNE_PROMPT_ROWS * d->size;
}

double so_costs_check(const so_costs *c, so_verify_mode mode) { return c->check_ms[mode].value; }

/* Both ratios are measured against the same curve, so its errors cancel. */
double so_costs_after_draft(const so_costs *c, int rows) {
    if (c->drafted_ratio.n < SO_TUNE_AFTER_PASSES || c->plain_ratio.n < SO_TUNE_AFTER_PASSES)
        return 0;
    double more = exp(c->drafted_ratio.value - c->plain_ratio.value) - 1;
    return so_costs_pass(c, rows) * SO_MAX(0, SO_MIN(more, SO_TUNE_AFTER_MAX));
}

void so_costs_observe_pass(so_costs *c, int rows, double ms, bool drafted) {
    double expected = so_costs_pass(c, rows);
    if (expected > 0 && ms > 0) {
        double x = log(ms / expected), most = SO_TUNE_NOISE_MAX;
        so_smooth(drafted ? &c->drafted_ratio : &c->plain_ratio, SO_MAX(-most, SO_MIN(x, most)),
                  SO_TUNE_AFTER_PART);
    }
    so_curve_observe(&c->pass, rows, ms);
}

void so_costs_observe_draft(so_costs *c, so_draft_cost *d, const so_draft_usage *u) {
    double now = so_costs_pass(c, 1);
    if (u->levels < 1 || u->chains < 1 || !(u->ms > 0))
        return;
    if (u->max_catch_up <= SO_TUNE_MAX_LAG) {
        double ratio = chains_ratio(c, d, u->chains), noise = d->one_level.noise;
        int trips = trips_of(u);
        so_trip_observe(&d->trip, trips, u->levels, ratio, u->ms,
                        noise > 0 ? noise : SO_TUNE_NOISE * SO_TUNE_NOISE);
        so_curve_observe(&d->one_level, u->chains,
                         u->ms / so_trip_factor(&d->trip, trips, u->levels, ratio));
    } else {
        double catch_up = u->ms - so_costs_usage(c, d, u);
        so_smooth_time(&d->catch_up_ms, SO_MAX(catch_up, 1e-3) / u->n_catch_up,
                       SO_TUNE_CATCH_UP_PART);
    }
    if (now > 0)
        so_smooth(&d->pace, now, SO_TUNE_PACE_PART);
}

/* The extra time per tested guess: about zero for `match`, where the target's token is sampled in
 * any case; a whole distribution for `reject`. */
void so_costs_observe_verdict(so_costs *c, so_verify_mode mode, const so_verdict *v, double ms) {
    if (v->n_tested == 0) {
        so_smooth_time(&c->draw_ms, ms, SO_TUNE_HOST_PART);
        return;
    }
    double extra = SO_MAX(0, ms - (v->n_accepted + 1) * c->draw_ms.value);
    so_smooth_time(&c->check_ms[mode], extra / v->n_tested, SO_TUNE_HOST_PART);
}

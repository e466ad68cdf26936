/* See costs.h. A draft step is a curve over the number of chains, like the target's pass over rows:
 * what slows all of them down is told from what one more chain costs. A call that had text to read
 * says what reading costs, given what its levels are known to take, and nothing about levels. */
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

/* What was measured at another pace, as it would be now. */
static double at_pace(const so_costs *c, const so_draft_cost *d, double ms) {
    double now = so_costs_pass(c, 1);
    return d->pace.value > 0 && now > 0 ? ms * now / d->pace.value : ms;
}

double so_costs_step(const so_costs *c, const so_draft_cost *d, int chains) {
    double ms = so_curve_ms(&d->step, chains);
    if (ms > 0)
        return at_pace(c, d, ms);
    return so_costs_pass(c, chains) * (SO_TUNE_STEP_FIXED + d->size);
}

double so_costs_read(const so_costs *c, const so_draft_cost *d) {
    if (d->read_ms.n > 0)
        return at_pace(c, d, d->read_ms.value);
    return so_costs_pass(c, SO_TUNE_PROMPT_ROWS) / SO_TUNE_PROMPT_ROWS * d->size;
}

double so_costs_check(const so_costs *c, so_verify_mode mode) { return c->check_ms[mode].value; }

/* Both are measured against the same curve, so that its errors cancel. */
double so_costs_after_draft(const so_costs *c, int rows) {
    if (c->drafted.n < SO_TUNE_AFTER_PASSES || c->plain.n < SO_TUNE_AFTER_PASSES)
        return 0;
    double more = exp(c->drafted.value - c->plain.value) - 1;
    return so_costs_pass(c, rows) * SO_MAX(0, SO_MIN(more, SO_TUNE_AFTER_MOST));
}

void so_costs_observe_pass(so_costs *c, int rows, double ms, bool drafted) {
    double expected = so_costs_pass(c, rows);
    if (expected > 0 && ms > 0) {
        double x = log(ms / expected), most = SO_TUNE_NOISE_MAX;
        so_smooth(drafted ? &c->drafted : &c->plain, SO_MAX(-most, SO_MIN(x, most)),
                  SO_TUNE_AFTER_PART);
    }
    so_curve_observe(&c->pass, rows, ms);
}

void so_costs_observe_draft(so_costs *c, so_draft_cost *d, const so_draft_usage *u) {
    double now = so_costs_pass(c, 1);
    if (u->levels < 1 || u->chains < 1 || !(u->ms > 0))
        return;
    if (u->lag <= SO_TUNE_MAX_LAG) {
        so_curve_observe(&d->step, u->chains, u->ms / u->levels);
    } else {
        double rest = u->ms - u->levels * so_costs_step(c, d, u->chains);
        so_smooth_time(&d->read_ms, SO_MAX(rest, 1e-3) / u->read, SO_TUNE_READ_PART);
    }
    if (now > 0)
        so_smooth(&d->pace, now, SO_TUNE_PACE_PART);
}

/* Nothing where the target's token is drawn in either case, a whole distribution where `reject`
 * tests a guess. */
void so_costs_observe_verdict(so_costs *c, so_verify_mode mode, const so_verdict *v, double ms) {
    if (v->n_tested == 0) {
        so_smooth_time(&c->draw_ms, ms, SO_TUNE_HOST_PART);
        return;
    }
    double extra = SO_MAX(0, ms - (v->n_accepted + 1) * c->draw_ms.value);
    so_smooth_time(&c->check_ms[mode], extra / v->n_tested, SO_TUNE_HOST_PART);
}

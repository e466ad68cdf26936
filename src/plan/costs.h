/* Costs in milliseconds, learned from the work that is done anyway. Nothing is measured at load.
 *
 *   pass      t(n), the target's pass over n rows (curve.h)
 *   level     one level of a drafter with a cost, by the number of chains that share it
 *   trip      the fixed cost of a round trip, in which a drafter on a device makes several levels
 *             (trip.h); 0 for other drafters, whose every level is a pass of its own
 *   catch-up  one token of text, or of a source, that such a drafter has not seen
 *   after     how much slower the target's pass is after a draft, whose weights displace the
 *             target's in the CPU caches
 *   draw      the host's time to sample one token from a row
 *   check     the host's time for one tested guess, without draws
 *
 * The costs of a drafter were measured when it last drafted. The machine's speed may have changed
 * since, and a drafter that is not used is not measured again. t(1) is measured all the time, so
 * the costs of a drafter are scaled by the change of t(1). Otherwise one busy minute would end
 * speculation for good.
 *
 * store.h keeps the costs between runs. Pure arithmetic, no clock. Thread: the engine thread. */
#ifndef SO_PLAN_COSTS_H
#define SO_PLAN_COSTS_H

#include "draft/drafter.h"
#include "plan/curve.h"
#include "plan/smooth.h"
#include "plan/trip.h"
#include "verify/verify.h"

enum { SO_COSTS_NAME = 40 };

/* A drafter with a cost. Owned by its so_costs. */
typedef struct so_draft_cost so_draft_cost;
struct so_draft_cost {
    so_draft_cost *next;
    char name[SO_COSTS_NAME];
    double size;         /* of its weights relative to the target's: the prior */
    so_curve one_level;  /* ms of a call that makes one level, by number of chains */
    so_trip trip;        /* the part of it that further levels of a round trip save */
    so_mean catch_up_ms; /* per token */
    so_mean pace;        /* t(1) at the time of these measurements */
};

/* What the levels of a coming call take: those of one number of chains. */
typedef struct so_level_costs {
    double trip_ms, level_ms; /* a round trip; each level */
    double hoped_trip_ms;     /* so_trip_hoped_part */
    int per_trip;             /* most levels of a trip */
} so_level_costs;
/* The time that level d (from 1) adds to a call, and that of the first d levels. */
static inline double so_level_costs_next(const so_level_costs *l, int d) {
    return l->level_ms + ((d - 1) % l->per_trip == 0 ? l->trip_ms : 0);
}
static inline double so_level_costs_sum(const so_level_costs *l, int d) {
    return d * l->level_ms + (d + l->per_trip - 1) / l->per_trip * l->trip_ms;
}

/* Zero-initialise. */
typedef struct so_costs {
    so_curve pass;
    so_mean drafted_ratio, plain_ratio; /* log(pass time / t(n)): after a draft; without one */
    so_mean draw_ms, check_ms[SO_VERIFY_MODES];
    so_draft_cost *drafters;
} so_costs;
void so_costs_deinit(so_costs *c);

/* Finds or creates. Drafters of one name share the entry. */
so_draft_cost *so_costs_drafter(so_costs *c, const char *name, double size);

/* All return 0 while nothing was measured. */
double so_costs_pass(const so_costs *c, int rows);
double so_costs_trip(const so_costs *c, const so_draft_cost *d);
double so_costs_trip_hoped(const so_costs *c, const so_draft_cost *d); /* so_trip_hoped_part */
double so_costs_level(const so_costs *c, const so_draft_cost *d, int chains); /* without the trip */
double so_costs_catch_up(const so_costs *c, const so_draft_cost *d);
double so_costs_check(const so_costs *c, so_verify_mode mode);

/* The time that a draft adds to the following pass over `rows`. */
double so_costs_after_draft(const so_costs *c, int rows);

/* drafted: a drafter with a cost ran before the pass. */
void so_costs_observe_pass(so_costs *c, int rows, double ms, bool drafted);
/* One call of a drafter: chains drafted, levels, the passes in which they were made (0: one for
 * each), tokens of catch-up of all chains together, and the maximum of one chain. */
typedef struct so_draft_usage {
    int chains, levels, passes, n_catch_up, max_catch_up;
    double ms;
} so_draft_usage;
/* The time of the levels of a call, without catch-up. */
double so_costs_usage(const so_costs *c, const so_draft_cost *d, const so_draft_usage *u);
void so_costs_observe_draft(so_costs *c, so_draft_cost *d, const so_draft_usage *u);
/* Adds the host's time for a verdict. */
void so_costs_observe_verdict(so_costs *c, so_verify_mode mode, const so_verdict *v, double ms);

#endif

/* What a pass, a draft step and the host's part of a step cost, in milliseconds: learned from the
 * work that is done anyway, nothing is measured at load.
 *
 *   pass    t(n), the target's pass over n rows (curve.h)
 *   step    one level of a drafter that costs, by the number of chains that share it
 *   read    one token of text that such a drafter has not seen
 *   after   how much slower the target's pass is after a draft, whose weights displace its own in
 *           the caches
 *   draw    the host's draw of a token from a row
 *   check   what the host spends on a tested guess beyond that
 *
 * The costs of a drafter were measured when it last drafted; the machine may be faster or slower by
 * now, and a draft that is not made is not measured again. t(1) is, so a drafter's costs are scaled
 * by how t(1) has changed since: a busy minute would otherwise end speculation for good.
 *
 * Kept between runs by store.h. Pure arithmetic, no clock. One thread. */
#ifndef SO_PLAN_COSTS_H
#define SO_PLAN_COSTS_H

#include "draft/drafter.h"
#include "plan/curve.h"
#include "plan/smooth.h"
#include "verify/verify.h"

enum { SO_COSTS_NAME = 40 };

/* A drafter that costs. Belongs to its so_costs. */
typedef struct so_draft_cost so_draft_cost;
struct so_draft_cost {
    so_draft_cost *next;
    char name[SO_COSTS_NAME];
    double size;     /* of the target's weights that the drafter's are: the prior */
    so_curve step;   /* by chains */
    so_mean read_ms; /* of a token */
    so_mean pace;    /* t(1) when they were measured */
};

/* Zero-initialise. */
typedef struct so_costs {
    so_curve pass;
    so_mean drafted, plain; /* log of pass over t(n): behind a draft, and without one */
    so_mean draw_ms, check_ms[SO_VERIFY_MODES];
    so_draft_cost *drafters;
} so_costs;
void so_costs_deinit(so_costs *c);

/* Found or made. Drafters of one name share it. */
so_draft_cost *so_costs_drafter(so_costs *c, const char *name, double size);

/* 0 while nothing was measured. */
double so_costs_pass(const so_costs *c, int rows);
double so_costs_step(const so_costs *c, const so_draft_cost *d, int chains);
double so_costs_read(const so_costs *c, const so_draft_cost *d);
double so_costs_check(const so_costs *c, so_verify_mode mode);

/* What a draft adds to the pass over `rows` behind it. */
double so_costs_after_draft(const so_costs *c, int rows);

/* drafted: a drafter that costs ran before it. */
void so_costs_observe_pass(so_costs *c, int rows, double ms, bool drafted);
/* One call of a drafter: how many chains it drafted, in how many levels, after reading `read`
 * tokens of text in all, at most `lag` of one chain. */
typedef struct so_draft_usage {
    int chains, levels, read, lag;
    double ms;
} so_draft_usage;
void so_costs_observe_draft(so_costs *c, so_draft_cost *d, const so_draft_usage *u);
/* A verdict and the time it took. */
void so_costs_observe_verdict(so_costs *c, so_verify_mode mode, const so_verdict *v, double ms);

#endif

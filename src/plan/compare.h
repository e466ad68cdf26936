/* Which method of decoding gives the most tokens per millisecond: drafting ahead, synchronous drafting
 * or plain decoding. Costs and acceptance rates do not answer this: what drafting ahead hides, and how
 * much it slows down the target's passes, depends on both models' use of one memory. So the methods are
 * run in turn, for a period of about eight steps each, and their clocks are compared. The length of a period
 * is random: with equal lengths, runs over the same texts would use the same method at the same places each
 * time, and if one of them got the easier places, that would be taken for a faster method, with growing
 * certainty.
 *
 * The first milliseconds after a change are not counted: a draft worker that was told to stop some
 * milliseconds ago still computes, perhaps on the core on which the next method drafts, so that each method
 * would be measured with what the other one left.
 *
 * Only neighbours are compared. Where the method changes, the periods before and after the change are a
 * pair: they have seen similar text and the same load of the machine. For each two methods the sums of
 * their pairs give a ratio of their rates, and the scatter of the pairs its standard error. Old pairs fade.
 *
 *   base         the method that is in use: no other was measured to be faster, by half a standard error
 *   challenger   another one that may be faster, within two standard errors; or of which there are fewer
 *                than three pairs
 *
 * After each period of the base the best challenger gets a period, and then the base again. If there
 * is no challenger the base goes on; its pairs fade, so that the error grows, until another method is
 * measured again, at the latest after 256 periods. On simulated machines the rate is 0.99 of the best
 * method's, in the mean over machines on which methods differ by 5 to 50 % (tests/plan/test_compare.c).
 *
 * What was measured is kept between runs (record.h): the next run begins with the better method instead of
 * with a comparison. A method that was given up is measured again after 256 periods all the same, which may
 * belong to many short runs. If it is much better than expected then, half of what was known is forgotten,
 * so that it is measured again soon: on simulated machines a recovery from 0.7 to 1.3 times the base's rate
 * is noticed after 2,500 steps in the mean, as quickly as when less was kept.
 *
 * Reads no clock. Engine thread. */
#ifndef SO_PLAN_COMPARE_H
#define SO_PLAN_COMPARE_H

#include <stdbool.h>
#include <stdint.h>

typedef enum so_method {
    SO_METHOD_AHEAD, /* drafts that were made during the last pass; on a miss as SYNC */
    SO_METHOD_SYNC,  /* the other drafters of the spec, as far as the planner expects them to pay */
    SO_METHOD_PLAIN,
    SO_METHODS,
} so_method;

/* One method's part of the pairs. */
typedef struct so_compare_side {
    double tokens, ms;
} so_compare_side;

/* Two methods, the lower one first. */
typedef struct so_compare_pair {
    so_compare_side side[2];
    double n;                    /* pairs */
    double log_sum, log_squares; /* of the ratio of each pair */
    int n_ever;                  /* pairs without fading, the first few */
} so_compare_pair;

/* Zero-initialise, and set `random` to any number: the base is drafting ahead. */
typedef struct so_compare {
    so_compare_pair pairs[SO_METHODS][SO_METHODS]; /* [low][high] */
    so_method base, current;
    so_method before_method;     /* of the period before this one */
    so_compare_side before, now; /* its sums; those of this period */
    int n_before, n_now;         /* steps in them */
    double settled_ms;           /* since the method changed; these steps are not counted */
    uint32_t random;             /* state of a generator, for the lengths of periods */
    int unused[SO_METHODS];      /* periods since it was used */
} so_compare;

static inline so_method so_compare_method(const so_compare *c) { return c->current; }
/* A step of the current method gave `tokens` in `ms`. may: methods that can be used. */
void so_compare_observe(so_compare *c, double tokens, double ms, const bool may[SO_METHODS]);
/* The rate of a, relative to b's, and the relative standard error; 0: no pair yet. */
double so_compare_ratio(const so_compare *c, so_method a, so_method b, double *error);

/* What is kept of two methods, the lower one first. n 0: they were not compared. */
typedef struct so_compare_kept_pair {
    double n;
    so_compare_side side[2];
    double ratio, scatter; /* of the rates of a pair: geometric mean, variance of the logarithm */
} so_compare_kept_pair;

typedef struct so_compare_kept {
    uint64_t key; /* of the drafters and the mode */
    so_method base;
    so_compare_kept_pair pairs[SO_METHODS][SO_METHODS]; /* [low][high] */
} so_compare_kept;

/* False: nothing was compared. Leaves the key alone. */
bool so_compare_keep(const so_compare *c, so_compare_kept *out);
/* Begins where a run before ended; c is initialised. */
void so_compare_resume(so_compare *c, const so_compare_kept *k);

#endif

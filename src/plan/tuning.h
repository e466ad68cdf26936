/* Every number of the planner that was fitted or chosen, with its origin. Numbers that depend on
 * the model or the machine are priors only: measurements replace them. Confidence scores that
 * drafters compute are in draft/confidence.h; the tables of acceptance.h calibrate them per model,
 * so only their order matters in the long run.
 *
 * "Simulation" means tests/plan/test_plan.c: decoding with known costs and known drafters, whose
 * assertions state what each number must achieve. "PART" is the weight of a new value in a running
 * mean (smooth.h). */
#ifndef SO_PLAN_TUNING_H
#define SO_PLAN_TUNING_H

/* --- curve.c: t(n), the time of a pass over n rows (its width) --- */

/* Prior: each row adds a tenth of a one-row pass. Between memory-bound (0.02) and compute-bound
 * (0.4) models on the machines measured. */
static const double SO_TUNE_ROW_SLOPE = 0.1, SO_TUNE_SLOPE_SPREAD = 0.06;
static const double SO_TUNE_ROW_STEP = 0.05; /* prior deviation of log t from knot to knot */
/* Deviation of the machine's speed from pass to pass; drift per pass of the ratios between widths,
 * as a fraction of their prior variance. From traces of shared virtual machines. */
static const double SO_TUNE_SPEED_DRIFT = 0.03, SO_TUNE_RATIO_DRIFT = 0.0002;
/* Deviation of one pass: prior, limits, and how fast it is learned. */
static const double SO_TUNE_NOISE = 0.08, SO_TUNE_NOISE_MIN = 0.02, SO_TUNE_NOISE_MAX = 0.3;
static const double SO_TUNE_NOISE_GAIN = 0.03;
static const double SO_TUNE_OUTLIER = 3; /* deviations at which an observation is clipped */
/* A width that is not known well is assumed to be cheaper by this many standard errors of
 * log t (at most OPTIMISM_MAX), so that one unlucky pass does not rule it out for good. */
static const double SO_TUNE_OPTIMISM = 0.5, SO_TUNE_OPTIMISM_MAX = 0.1;
/* Maximum weight of a point of the curve, in passes: learned in this run; read from the file of an
 * earlier one. */
static const double SO_TUNE_POINT_WEIGHT = 64, SO_TUNE_OLD_POINT_WEIGHT = 16;

/* --- costs.c --- */

/* Weight of a new measurement: of the host's time, of catch-up, and of t(1) in a step with a
 * draft. */
static const double SO_TUNE_HOST_PART = 0.1, SO_TUNE_CATCH_UP_PART = 0.15, SO_TUNE_PACE_PART = 0.15;
/* Catch-up tokens that still count as an ordinary level: the last guess of a round was sampled and
 * not fed, and neither was the token after it. A longer catch-up is booked as catch-up. */
enum { SO_TUNE_MAX_LAG = 2 };
enum { SO_TUNE_PROMPT_ROWS = 256 }; /* rows of a typical prefill chunk */
/* Prior of a drafting level, as a fraction of the target's pass: this constant plus the size ratio.
 * Small drafts cost more than their size suggests (barriers, host time). SmolLM2's draft: 0.10 of a
 * pass with 0.07 of the weights. */
static const double SO_TUNE_LEVEL_FIXED = 0.04;
/* trip.c: the fixed part of a round trip with one level: prior and its deviation; limit, so that a
 * level is never free. H200, drafts of SmolLM2: 0.1 to 0.4 (a trip 0.02 to 0.04 ms, a level 0.1
 * or 0.2). The prior is on the high side: if it is too low, levels never share a trip and it is not
 * corrected; if it is too high, the first drafts correct it. */
static const double SO_TUNE_TRIP_FIXED = 0.5, SO_TUNE_TRIP_FIXED_SPREAD = 0.2,
                    SO_TUNE_TRIP_FIXED_MAX = 0.95;
/* Its standard error, at least: within a run, so that it can follow; of an earlier run. */
static const double SO_TUNE_TRIP_ERROR_MIN = 0.005, SO_TUNE_TRIP_OLD_ERROR = 0.05;
/* The time that a draft adds to the following pass: number of passes with a draft, and without one,
 * before it counts; weight of a pass; its limit as a fraction of a pass. Zen 3, SmolLM2 with its
 * draft, 8 requests: 0.06. */
enum { SO_TUNE_AFTER_PASSES = 8 };
static const double SO_TUNE_AFTER_PART = 0.03, SO_TUNE_AFTER_MAX = 0.15;
/* A drafter whose level takes less than this fraction of a pass is treated as free. */
static const double SO_TUNE_LEVEL_FREE = 0.005;

/* --- acceptance.c --- */

/* Counts fade over 500 tests (all requests) and 50 (one request). Simulation: slower fading misses
 * a change of text, faster fading makes plans fluctuate. */
static const float SO_TUNE_SHARED_KEEP = 0.998f, SO_TUNE_OWN_KEEP = 0.98f;
/* Weight of priors, in tests: of the prior of depth 1, and of each depth as prior of the next. */
static const double SO_TUNE_CONFIDENCE_PRIOR = 4, SO_TUNE_DEPTH_PRIOR = 32;
/* Prior of a later sibling, tested after an earlier one was rejected: half the acceptance of the
 * sibling before it, with the weight of SIBLING_PRIOR tests. */
static const double SO_TUNE_SIBLING_FACTOR = 0.5, SO_TUNE_SIBLING_PRIOR = 8;
/* Weight of the shared estimate against a request's own counts, added to its successes and to its
 * failures: at first, and after a sudden change. */
static const float SO_TUNE_OWN_PRIOR = 6, SO_TUNE_CHANGED_PRIOR = 1;
/* A run of outcomes less likely than this is a change: eight failures at a rate of one half. */
static const double SO_TUNE_CHANGE_ALARM = 0.005;
static const double SO_TUNE_CHANCE_MIN = 0.001, SO_TUNE_CHANCE_MAX = 0.998;
/* Tests at which the evidence about a drafter is one half. */
static const double SO_TUNE_EVIDENCE = 3;
/* Acceptance of a drafter with neither a record nor a claim. */
static const double SO_TUNE_UNKNOWN_CHANCE = 0.7;
/* A draft file's claimed agreement was measured greedily on held-out text. Acceptance on users'
 * prompts is lower by this factor: greedy, seed-exact (match), sampled (reject). Measured with
 * SmolLM2's draft on spec_bench; for other drafts a prior that weighs CLAIM_TESTS tests. */
static const double SO_TUNE_CLAIM_FACTOR[] = {0.86, 0.58, 0.66};
static const float SO_TUNE_CLAIM_TESTS = 8;

/* --- record.c, choose_draft.c --- */

static const float SO_TUNE_RECORD_TESTS = 512;      /* maximum tests of a cell on disk */
static const float SO_TUNE_RECORD_PRIOR_TESTS = 24; /* maximum of a cell as prior of a new run */
static const float SO_TUNE_WRITE_TESTS = 0.5f;      /* smaller cells are not written */
/* Choosing among draft files: weight of a claim and of no claim, in tests; number of tests from
 * which a record counts (a draft that is given up early has only a few). */
static const double SO_TUNE_CHOICE_CLAIM = 32, SO_TUNE_CHOICE_NO_CLAIM = 1;
enum { SO_TUNE_CHOICE_TESTS = 4 };

/* --- plan.c --- */

/* The exploration account, in plain passes: initial value, income per token, maximum, and minimum.
 * Simulation: a drafter that is never right costs at most 2 %. */
static const double SO_TUNE_ACCOUNT_START = 0.5, SO_TUNE_ACCOUNT_EARN = 0.0065;
static const double SO_TUNE_ACCOUNT_MAX = 16, SO_TUNE_ACCOUNT_MIN = -1;
/* Risk that is always allowed, in plain passes: plans with well-known drafters continue. */
static const double SO_TUNE_FREE_RISK = 0.02;
/* Maximum fraction of the time that probes of one known drafter may take, and those that would show
 * little. A probe may have to process a whole prompt: with 3 passes every 64 tokens, probes of the
 * second model of `model+model(FILE)` took 5 % of the time (SmolLM2, spec_bench). */
static const double SO_TUNE_PROBE_TIME_MAX = 0.02, SO_TUNE_PROBE_RARELY_MAX = 0.005;
/* Tokens between probes: of a drafter that is rejected too often; of one whose acceptance is above
 * PROBE_BELOW but that costs too much, or in whose place another one drafts. */
static const double SO_TUNE_PROBE_EVERY = 8, SO_TUNE_PROBE_RARELY_EVERY = 64,
                    SO_TUNE_PROBE_BELOW = 0.5;
/* The same for a drafter that would not pay with acceptance BEST_CHANCE at every depth: no probe
 * can change that, unless its costs were measured at a bad moment. */
static const double SO_TUNE_PROBE_HOPELESS_EVERY = 512, SO_TUNE_BEST_CHANCE = 0.95;
/* Minimum expected gain of a plan in tokens: less is within the error of the estimates. */
static const double SO_TUNE_MARGIN = 0.02;
/* The same per request in a batch. A request that gets ahead ends sooner and leaves a smaller
 * batch, whose tokens cost more. Zen 3, 8 requests of 64 tokens: drafts with an expected gain of
 * 2 % gained nothing, and cost 1 % for this reason. */
static const double SO_TUNE_BATCH_MARGIN = 0.04;
/* The shortfall of drafts (learn_shortfall in plan.c): weight of a draft, and what remains of it
 * after a step without one, so that drafting is tried again. */
static const double SO_TUNE_SHORTFALL_PART = 0.05, SO_TUNE_SHORTFALL_KEEP = 0.99;
enum { SO_TUNE_SHORTFALL_PRIOR = 16 };         /* drafts assumed without a shortfall, at first */
static const float SO_TUNE_MIN_VALUE = 0.001f; /* guesses below this are ignored */
/* Weight of a step in g, the running mean from which λ is computed (plan.h): the slow mean and the
 * fast one. A step counts as at most RATE_MAX_PASSES plain passes. */
static const double SO_TUNE_RATE_PART = 0.03, SO_TUNE_RATE_NOW_PART = 0.15;
static const double SO_TUNE_RATE_MAX_PASSES = 8;
/* With several requests a step is decoded without guesses, to measure a plain pass, if the standard
 * error of log t(n) (relative to the width of the latest pass) is above PLAIN_ERROR, speculation
 * gains less than PLAIN_GAIN, and the last plain step was PLAIN_EVERY steps ago. With 8 requests
 * that always drafted, t(8) was estimated 10 % too slow, and drafting lost 6 %. */
static const double SO_TUNE_PLAIN_ERROR = 0.03, SO_TUNE_PLAIN_GAIN = 1.25;
enum { SO_TUNE_PLAIN_EVERY = 4 };
/* Weight of a round in the yield (learn_yield in plan.c) of a drafter with a cost: for one request,
 * for all. */
static const double SO_TUNE_OWN_YIELD_PART = 0.08, SO_TUNE_YIELD_PART = 0.02;
enum { SO_TUNE_YIELD_ROUNDS = 8 }; /* rounds before a yield counts */
/* Evidence from which a drafter is known: it drafts with terms instead of a fixed depth. Seven
 * tests, or a claimed agreement. */
static const double SO_TUNE_KNOWN = 0.7;
/* Free guesses of a known drafter below this acceptance are dropped for the next alternative. */
static const double SO_TUNE_FREE_CHANCE_MIN = 0.15;
/* Tokens of a typical answer: the catch-up of a prompt is paid off over at most this many. */
enum { SO_TUNE_ANSWER_TOKENS = 128 };
/* Levels over which a step of t(n) is averaged when a drafter looks ahead: kernels have tiles of
 * four rows. */
enum { SO_TUNE_LOOK_AHEAD = 4 };
/* Branches over which the cost of one more branch in a level of a tree is averaged. */
enum { SO_TUNE_BRANCHES = 4 };
/* Comparing methods (compare.h); simulation: tests/plan/test_compare.c. Steps of a period, in the mean;
 * half of them at least: fewer would be dominated by the changes, more would lose more with a bad method. Periods after which a method is
 * measured again in any case. Pairs from which a method can be given up: one pair may have met an
 * interruption of the machine. */
enum { SO_TUNE_COMPARE_PERIOD = 8, SO_TUNE_COMPARE_UNUSED = 256, SO_TUNE_COMPARE_FIRST = 3 };
/* What remains of a pair after each period. Scatter of log ratios before it is known, with the weight of
 * PRIOR pairs: in eight rounds of two tokens the number of tokens scatters by 0.23 on each side. A step
 * counts as at most SPIKE times the mean step. */
/* Most pairs that a comparison of an earlier run counts for. With 8 a method that is a tenth slower was
 * measured again in each short run, which cost 1 to 2 %; 64 gain no more. */
static const double SO_TUNE_COMPARE_KEPT = 32;
static const double SO_TUNE_COMPARE_KEEP = 0.999, SO_TUNE_COMPARE_SPREAD = 0.33,
                    SO_TUNE_COMPARE_PRIOR = 6, SO_TUNE_COMPARE_SPIKE = 3;
/* Time after a change of the method that is not counted. A worker 5 ms away hears of it after 5 ms, and then
 * ends its pass. */
static const double SO_TUNE_COMPARE_SETTLE_MS = 16;
/* Standard errors: by which a challenger may be faster than measured; by which it must be faster to
 * become the base. With 1 and 0 the better of two methods is given up for long after bad luck. */
static const double SO_TUNE_COMPARE_HOPE = 2, SO_TUNE_COMPARE_PROOF = 0.5;
/* How often a drafter is used: weight of a step, and of the prior that it always is. */
static const double SO_TUNE_USE_PART = 0.1;
enum { SO_TUNE_USE_PRIOR = 8 };
/* Tokens of a typical speculative step: how fast an investment is used up. */
static const double SO_TUNE_STEP_TOKENS = 2;

#endif

/* Every number of the planner that was fitted or chosen, and where it came from. A number that
 * depends on the model or the machine is a prior only: what is measured replaces it. Confidence
 * scores that drafters compute are in draft/confidence.h; the tables of acceptance.h calibrate
 * them per model, so only their order matters in the long run.
 *
 * "Simulation" means tests/plan/test_plan.c: decoding with known costs and known drafters, whose
 * assertions state what each number must achieve. */
#ifndef SO_PLAN_TUNING_H
#define SO_PLAN_TUNING_H

/* --- curve.c: t(n), the time of a pass over n rows --- */

/* A row adds a tenth of a one-row pass until it was measured: between memory-bound (0.02) and
 * compute-bound (0.4) models on the machines we have seen. */
static const double SO_TUNE_ROW_SLOPE = 0.1, SO_TUNE_SLOPE_SPREAD = 0.06;
static const double SO_TUNE_ROW_STEP = 0.05; /* prior deviation of log t from knot to knot */
/* Deviation of the machine's speed from pass to pass, and how fast ratios of widths may change, as
 * a part of their prior variance per pass. From traces of shared virtual machines. */
static const double SO_TUNE_SPEED_DRIFT = 0.03, SO_TUNE_RATIO_DRIFT = 0.0002;
/* Deviation of one pass: prior and limits; how fast it is learned. */
static const double SO_TUNE_NOISE = 0.08, SO_TUNE_NOISE_MIN = 0.02, SO_TUNE_NOISE_MAX = 0.3;
static const double SO_TUNE_NOISE_GAIN = 0.03;
static const double SO_TUNE_OUTLIER = 3; /* deviations beyond which an observation is cut */
/* A width that is not known well is taken to be this much cheaper (in deviations, at most so much
 * of the logarithm), so that one unlucky pass does not rule it out for good. */
static const double SO_TUNE_HOPE = 0.5, SO_TUNE_HOPE_MAX = 0.1;
/* Passes that a point of the curve may weigh, and that a point from an earlier run may. */
static const double SO_TUNE_POINT_WEIGHT = 64, SO_TUNE_OLD_POINT_WEIGHT = 16;

/* --- costs.c --- */

/* Weight of a new measurement of the host's part and of reading; so_smooth. */
static const double SO_TUNE_HOST_PART = 0.1, SO_TUNE_READ_PART = 0.15, SO_TUNE_PACE_PART = 0.15;
/* Tokens that a draft may be behind before its time is booked as reading: the last guess of a round
 * was drawn and not fed, and so was the token after it. */
enum { SO_TUNE_MAX_LAG = 2 };
enum { SO_TUNE_PROMPT_ROWS = 256 }; /* rows of a usual prompt chunk */
/* A draft step before it was measured: so much of a pass of the target, and its part by size. Small
 * drafts cost more than their size says: waiting, the host's part. SmolLM2's draft: 0.10 of a
 * pass with 0.07 of the weights. */
static const double SO_TUNE_STEP_FIXED = 0.04;
/* What a draft adds to the pass behind it: passes of either kind until it counts, weight of a pass,
 * and the most of a pass that it can be. Zen 3, SmolLM2 with its draft, 8 requests: 0.06. */
enum { SO_TUNE_AFTER_PASSES = 8 };
static const double SO_TUNE_AFTER_PART = 0.03, SO_TUNE_AFTER_MOST = 0.15;
/* A drafter whose step takes less of a pass than this is asked always, like one that is free. */
static const double SO_TUNE_STEP_FREE = 0.005;

/* --- acceptance.c --- */

/* Counts fade over 500 tests (all requests) and 50 (one request). Simulation: slower misses a
 * change of text, faster makes plans restless. */
static const float SO_TUNE_SHARED_KEEP = 0.998f, SO_TUNE_OWN_KEEP = 0.98f;
/* Tests that a prior is worth: the drafter's own confidence for depth 1, a depth for the next. */
static const double SO_TUNE_CONFIDENCE_PRIOR = 4, SO_TUNE_DEPTH_PRIOR = 32;
/* A later sibling, tested after an earlier one failed, is expected to stand half as often as the
 * first, until it was seen: worth so many tests. */
static const double SO_TUNE_SIBLING_FACTOR = 0.5, SO_TUNE_SIBLING_PRIOR = 8;
/* Successes and failures that the shared estimate is worth against a request's own record: at
 * first, and after a sudden change. */
static const float SO_TUNE_OWN_PRIOR = 6, SO_TUNE_CHANGED_PRIOR = 1;
/* A run of outcomes less likely than this is a change: eight failures at a rate of one half. */
static const double SO_TUNE_CHANGE_ALARM = 0.005;
static const double SO_TUNE_CHANCE_MIN = 0.001, SO_TUNE_CHANCE_MAX = 0.998;
/* Tests after which half of the doubt about a drafter is gone. */
static const double SO_TUNE_EVIDENCE = 3;
/* What to expect of a drafter nobody has seen and that claims nothing. */
static const double SO_TUNE_UNKNOWN_CHANCE = 0.7;
/* A draft file's claimed agreement was measured greedily on held-out text. What is left of it on
 * users' prompts: greedy, seed-exact (match), drawn (reject). Measured with SmolLM2's draft on
 * spec_bench; a prior for other drafts, worth so many tests. */
static const double SO_TUNE_CLAIM_KEPT[] = {0.86, 0.58, 0.66};
static const float SO_TUNE_CLAIM_TESTS = 8;

/* --- record.c, choose.c --- */

static const float SO_TUNE_RECORD_TESTS = 512; /* most tests that a cell on disk weighs */
static const float SO_TUNE_LENT_TESTS = 24;    /* most that it weighs as a prior in a new run */
static const float SO_TUNE_WRITE_TESTS = 0.5f; /* fewer are not written */
/* Choosing among draft files: weight of a claim and of no claim, in tests; tests after which a
 * record counts (a draft that is given up early has few). */
static const double SO_TUNE_CHOICE_CLAIM = 32, SO_TUNE_CHOICE_NO_CLAIM = 1;
enum { SO_TUNE_CHOICE_TESTS = 4 };

/* --- plan.c --- */

/* The exploration account, in plain passes: what it starts with, earns per token, holds at most,
 * and may be overdrawn by. Simulation: a hopeless drafter costs at most 2 %. */
static const double SO_TUNE_ACCOUNT_START = 0.5, SO_TUNE_ACCOUNT_EARN = 0.0065;
static const double SO_TUNE_ACCOUNT_MAX = 16, SO_TUNE_ACCOUNT_MIN = -1;
/* Risk that needs no account, in plain passes: plans with well-known drafters go on. */
static const double SO_TUNE_FREE_RISK = 0.02;
/* Part of the time that probes of one drafter that is known may take. */
static const double SO_TUNE_PROBE_SHARE = 0.02;
/* Tokens between probes of a drafter that failed, and of one that stands more often than this and
 * costs too much. */
static const double SO_TUNE_PROBE_EVERY = 8, SO_TUNE_PROBE_SELDOM = 64, SO_TUNE_PROBE_BELOW = 0.5;
/* A plan must promise this part of the step's plain tokens: less is within the error of the
 * estimates. */
static const double SO_TUNE_MARGIN = 0.02;
/* With several requests: whoever gets ahead ends sooner and leaves a smaller batch behind, whose
 * tokens cost more. Zen 3, 8 streams of 64 tokens: drafts that promised 2 % gained nothing, and
 * cost 1 % that way. */
static const double SO_TUNE_BATCH_MARGIN = 0.04;
/* Weight of a draft in what drafts bring less than was expected, and what is left of that after a
 * step without one, so that drafting is tried again. */
static const double SO_TUNE_SHORTFALL_PART = 0.05, SO_TUNE_SHORTFALL_KEEP = 0.99;
enum { SO_TUNE_SHORTFALL_PRIOR = 16 };         /* drafts that are taken to have met it, at first */
static const float SO_TUNE_MIN_VALUE = 0.001f; /* guesses below this are not weighed */
/* Weight of a step in the running rate λ: in the long run, and in the latest steps; the longest
 * step that counts, in plain passes. */
static const double SO_TUNE_RATE_PART = 0.03, SO_TUNE_RATE_NOW_PART = 0.15;
static const double SO_TUNE_RATE_LONGEST = 8;
/* A step is decoded plainly to see what that takes where its time is known less well than this
 * (deviation of the logarithm, against the widths in use), speculation gains less than this, and
 * the last such step is this long ago. With 8 requests that always drafted, t(8) was taken to be 10
 * % slower than it was, and drafting lost 6 %. */
static const double SO_TUNE_PLAIN_DOUBT = 0.03, SO_TUNE_PLAIN_GAIN = 1.25;
enum { SO_TUNE_PLAIN_EVERY = 4 };
/* Weight of a round in what a paid drafter's rounds yield: of one request, of all. */
static const double SO_TUNE_OWN_YIELD_PART = 0.08, SO_TUNE_YIELD_PART = 0.02;
enum { SO_TUNE_YIELD_ROUNDS = 8 }; /* rounds until a yield counts */
/* Evidence from which on a drafter is known: it drafts on terms, not to a fixed depth. Seven tests,
 * or the agreement that a draft's file claims. */
static const double SO_TUNE_KNOWN = 0.7;
/* Free guesses of a known drafter that is this bad are not kept over a paid one. */
static const double SO_TUNE_HOPELESS = 0.15;
/* Tokens of a usual answer: reading a prompt is paid off over no more than that. */
enum { SO_TUNE_ANSWER = 128 };
/* Levels over which a step of t(n) is spread where a drafter looks ahead: kernels have tiles of
 * four rows. */
enum { SO_TUNE_LOOK_AHEAD = 4 };
/* How often a drafter is asked: weight of a step, and of the prior that it always is. */
static const double SO_TUNE_ASKED_PART = 0.1;
enum { SO_TUNE_ASKED_PRIOR = 8 };
/* Tokens that one speculative step usually brings: how fast an investment is used up. */
static const double SO_TUNE_STEP_TOKENS = 2;

#endif

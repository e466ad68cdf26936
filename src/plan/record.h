/* Records: what was learned about drafters, kept between runs. Acceptance by depth, rank and
 * confidence, and the cost of a level, for each drafter that a later run can recognise.
 *
 *   begin   so_record_set_prior  the record becomes the prior of the shared estimates
 *                                (acceptance.h), with at most SO_TUNE_RECORD_PRIOR_TESTS per cell,
 *                                so that a few dozen tokens of another kind of text outweigh it
 *   end     so_record_learn      the tests of this run are added; old counts fade over about 500
 *                                tests
 *
 * Counts are kept, not rates: a run of ten tests must not outweigh one of a thousand. A record
 * changes which guesses are made, and so the speed. It does not change the text with greedy
 * decoding and `match`, nor the distribution of the text with `reject`. store.h has the file
 * format. Plain structs. Thread: the engine thread. */
#ifndef SO_PLAN_RECORD_H
#define SO_PLAN_RECORD_H

#include "plan/acceptance.h"
#include "plan/compare.h"
#include "plan/costs.h"

enum {
    SO_RECORDS_COMPARED = 8, /* kept comparisons of methods */
    SO_RECORDS_MAX = 24,
    SO_RECORD_NAME = SO_COSTS_NAME
};

/* How guesses are made and verified changes their acceptance: each mode has its own record. */
typedef enum so_plan_mode {
    SO_PLAN_GREEDY, /* temperature 0 */
    SO_PLAN_MATCH,  /* points, against the target's sample */
    SO_PLAN_DRAWN,  /* sampled guesses, against the target's distribution */
    SO_PLAN_MODES
} so_plan_mode;

typedef struct so_record {
    char name[SO_RECORD_NAME]; /* "lookup", "model 0123456789abcdef" */
    /* Drafters with a cost: ms of a call that makes one level, by number of chains. */
    so_curve_point level_points[SO_CURVE_KNOTS];
    int n_level_points;
    double trip_fixed_part, trip_error; /* trip.h; error 0: it makes a pass for each level */
    so_mean catch_up_ms;
    so_accept_table cells;
    so_confidence_counts confidences;
} so_record;

/* The most recently used first; the last one is dropped if there are too many. Zero-initialise. */
typedef struct so_records {
    so_record *items[SO_RECORDS_MAX];
    int n;
    so_compare_kept compared[SO_RECORDS_COMPARED]; /* in the same order */
    int n_compared;
} so_records;
void so_records_free(so_records *r);

/* The name of a drafter's record, with its id if it has one; false if a record would mean nothing
 * in another run (a user's function, a table, a model without an id). Greedy has the plain name,
 * the other modes a suffix: "lookup~1", "lookup~2". */
bool so_record_name(const so_drafter *d, so_plan_mode mode, char out[SO_RECORD_NAME]);
/* The same for a draft model that is not opened yet. */
bool so_record_model_name(uint64_t id, so_plan_mode mode, char out[SO_RECORD_NAME]);
/* Whether a name from a file has the form that so_record_name gives. */
bool so_record_is_name(const char *name);
/* NULL: none. */
so_record *so_records_find(const so_records *r, const char *name);
/* Finds or creates the record and moves it to the front. */
so_record *so_records_touch(so_records *r, const char *name);

/* NULL: none. */
const so_compare_kept *so_records_compared(const so_records *r, uint64_t key);
/* Replaces the one of the same key; the oldest is dropped if there are too many. */
void so_records_keep(so_records *r, const so_compare_kept *k);

void so_record_set_prior(const so_record *rec, so_accept_shared *shared, int drafter);
/* For a drafter without a record: the prior is `chance`, derived from its file's claimed
 * agreement. */
void so_record_set_claim(double chance, so_accept_shared *shared, int drafter);
/* Adds the observations of this run to the record and clears them in `shared`. */
void so_record_learn(so_record *rec, so_accept_shared *shared, int drafter);

#endif

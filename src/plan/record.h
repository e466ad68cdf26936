/* What drafters have shown, kept between runs: acceptance by depth, rank and confidence, and what a
 * step took, for each drafter that means the same tomorrow.
 *
 *   begin   so_record_lend    the record becomes the prior of the shared estimates (acceptance.h):
 *                             at most SO_TUNE_LENT_TESTS a cell, so that a few dozen tokens of
 *                             another kind of text outweigh it
 *   end     so_record_learn   what was tested in the meantime is added; old counts fade over some
 *                             five hundred tests
 *
 * Counts, not rates, are kept: a run of ten tests must not outvote one of a thousand. It can change
 * which guesses are tried, and with them the speed; no text depends on it. store.h has the file.
 * Plain structs; one thread. */
#ifndef SO_PLAN_RECORD_H
#define SO_PLAN_RECORD_H

#include "plan/acceptance.h"
#include "plan/costs.h"

enum { SO_RECORDS_MAX = 24, SO_RECORD_NAME = SO_COSTS_NAME };

/* How guesses come about and are tested decides how often they stand: each way has its own record.
 */
typedef enum so_plan_mode {
    SO_PLAN_GREEDY, /* temperature 0 */
    SO_PLAN_MATCH,  /* points, against the target's draw */
    SO_PLAN_DRAWN,  /* draws, against its distribution */
    SO_PLAN_MODES
} so_plan_mode;

typedef struct so_record {
    char name[SO_RECORD_NAME];           /* "lookup", "model 0123456789abcdef" */
    so_curve_point step[SO_CURVE_KNOTS]; /* of a paid drafter: what a level took, by chains */
    int n_step;
    so_mean read_ms;
    so_accept_table cells;
    so_accept_rows rows;
} so_record;

/* The latest first; where there are too many, the oldest goes. Zero-initialise. */
typedef struct so_records {
    so_record *items[SO_RECORDS_MAX];
    int n;
} so_records;
void so_records_free(so_records *r);

/* The name under which a drafter is kept, with its id where it has one; false for those whose
 * record would mean nothing another time (a user's function, a table, a model without an id).
 * Greedy has the name alone, the other modes are marked behind it: "lookup~1", "lookup~2". */
bool so_record_name(const so_drafter *d, so_plan_mode mode, char out[SO_RECORD_NAME]);
/* The same for a draft model that is not made yet. */
bool so_record_model_name(uint64_t id, so_plan_mode mode, char out[SO_RECORD_NAME]);
/* Whether a name read from a file has the form that so_record_name gives. */
bool so_record_is_name(const char *name);
/* NULL where there is none. */
so_record *so_records_find(const so_records *r, const char *name);
/* Found or made, and moved to the front. */
so_record *so_records_touch(so_records *r, const char *name);

void so_record_lend(const so_record *rec, so_accept_shared *shared, int drafter);
/* Of a drafter without a record: the chance that its file claims, worth a few tests. */
void so_record_lend_claim(double chance, so_accept_shared *shared, int drafter);
/* Takes what was seen, and forgets it there. */
void so_record_learn(so_record *rec, so_accept_shared *shared, int drafter);

#endif

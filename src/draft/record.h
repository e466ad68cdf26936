/* What drafters have shown, kept between runs: acceptance by depth and confidence, and what a guess
 * took, for each drafter that means the same tomorrow.
 *
 *   begin   so_record_lend    the record becomes the prior of the shared estimates (estimate.h): at
 *                             most SO_RECORD_LENT tests a cell, so that a few dozen tokens of
 *                             another kind of text outweigh it
 *   end     so_record_learn   what was really tested in the meantime is added; old counts fade over
 *                             some five hundred tests
 *
 * In a file it is lines of text (so_records_print), read with the suspicion that any file deserves:
 * one number out of range and nothing is believed. It can change which guesses are tried, and with
 * them the speed; no text depends on it. Plain structs; one thread. */
#ifndef SO_DRAFT_RECORD_H
#define SO_DRAFT_RECORD_H

#include "base/str.h"
#include "draft/drafter.h"
#include "draft/estimate.h"

enum { SO_RECORDS_MAX = 24, SO_RECORD_NAME = 40, SO_RECORD_LENT = 24 };

typedef struct so_record {
    char name[SO_RECORD_NAME]; /* "lookup", "model 0123456789abcdef": no spaces but that one */
    double step_ms;            /* of a guess; 0: free or not known */
    so_estimate_cell cells[SO_ESTIMATE_DEPTHS][SO_ESTIMATE_LEVELS + 1];
} so_record;

/* The latest first; where there are too many, the oldest goes. Zero-initialise. */
typedef struct so_records {
    so_record *items[SO_RECORDS_MAX];
    int n;
} so_records;
void so_records_free(so_records *r);

/* The name under which a drafter is kept; false for those whose record would mean nothing another
 * time (a user's function, a table, an expectation). `id` tells draft models apart; 0:
 * it cannot be told. `way`: 0 greedy, 1 against the target's draws, 2 drawn itself; each has a
 * record of its own, the last two marked behind the name: "lookup~1". */
enum { SO_RECORD_WAYS = 3 };
bool so_record_name(const so_drafter *d, uint64_t id, int way, char out[SO_RECORD_NAME]);
/* The same for a draft model that is not made yet. */
bool so_record_model_name(uint64_t id, int way, char out[SO_RECORD_NAME]);
/* NULL where there is none. */
so_record *so_records_find(const so_records *r, const char *name);
/* Found or made, and moved to the front. */
so_record *so_records_touch(so_records *r, const char *name);

void so_record_lend(const so_record *rec, so_estimate_shared *shared, int drafter);
/* Of a drafter without a record: the chance of its guesses by its own word, worth a few tests. */
void so_record_believe(double chance, so_estimate_shared *shared, int drafter);
/* Takes what was seen, and forgets it there. */
void so_record_learn(so_record *rec, so_estimate_shared *shared, int drafter, double step_ms);

/*   drafter NAME STEP_MS
 *   DEPTH LEVEL ACCEPTED TESTED      one line for each cell that is not empty */
void so_records_print(const so_records *r, so_buf *out);
/* False, and *out is empty, where the lines are not exactly that. NUL-terminated. */
bool so_records_parse(const char *text, so_records *out);

#endif

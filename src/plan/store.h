/* The file in which costs and records of drafters are kept between runs: one small text file for
 * each model shape, CPU, thread count and cache type, under the cache folder. A run that finds its
 * file plans well from the first token; one that does not learns from its own passes. The text of
 * an answer never depends on it, so a file that is missing, damaged, of an older version or of
 * another machine is ignored, said once at debug level, and written anew.
 *
 *   sooth plan 1
 *   KEY                                      whose it is, in one line
 *   pass ROWS MS WEIGHT                      points of t(n)
 *   draw MS
 *   check MODE MS                            0 match, 1 reject, 2 lenient
 *   drafter NAME                             then, of this drafter:
 *   read MS
 *   step CHAINS MS WEIGHT
 *   cell DEPTH RANK LEVEL ACCEPTED TESTED    each cell that is not empty
 *   end
 *
 * One line that is not exactly that, one number out of range, and nothing is believed. */
#ifndef SO_PLAN_STORE_H
#define SO_PLAN_STORE_H

#include "base/str.h"
#include "model/model.h"
#include "plan/costs.h"
#include "plan/record.h"

/* Whose costs they are, as one line. */
void so_store_key(const so_model *m, so_dtype kv_dtype, so_buf *out);
/* Where they are kept: a path in `dir`/costs. Caller frees. */
char *so_store_path(const char *dir, so_str key);

/* Both must be empty. False, and both stay so, where there is no file, or one for another key, or
 * one that makes no sense; *why then says which, in words for the log. */
bool so_store_read(const char *path, so_str key, so_costs *c, so_records *r, const char **why);
/* Written beside its target and renamed, so that two runs that end together leave one of the two.
 */
int so_store_write(const char *path, so_str key, const so_costs *c, const so_records *r,
                   so_err *err);

/* The lines between KEY and end; NUL-terminated. For so_store_read, and for the fuzzer. */
void so_store_print(const so_costs *c, const so_records *r, so_buf *out);
bool so_store_parse(const char *text, so_costs *c, so_records *r);

#endif

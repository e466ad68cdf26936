/* The file that keeps costs and records of drafters between runs: one small text file per key, in
 * the cache folder. The key consists of the model's shape and size, the type of the KV cache, the
 * backend's description of itself (CPU, level and threads, or the GPU), and the version. A run that
 * finds its file plans well from the first token; a run without one learns from its own passes.
 *
 * The file influences only which guesses are made. So it never changes the text with greedy decoding
 * or `match`, nor the distribution of the text with `reject`, and a bad file is harmless: a file
 * that is damaged or has another key is ignored as a whole, reported once at debug level, and
 * overwritten. The file's name is a hash of the key, so machines that share a cache folder use
 * different files.
 *
 *   sooth plan 1
 *   KEY                                      in one line
 *   pass ROWS MS WEIGHT                      points of t(n)
 *   draw MS                                  per sampled token (costs.h)
 *   check MODE MS                            per tested guess; 0 match, 1 reject, 2 lenient
 *   methods KEY BASE                         a comparison of methods (compare.h), and its pairs:
 *   pair LOW HIGH N TOKENS MS TOKENS MS RATIO SCATTER
 *   drafter NAME                             the following lines belong to this drafter:
 *   read MS                                  catch-up per token
 *   trip PART ERROR                          drafters that make several levels in a round trip: its
 *                                            fixed part with one level, standard error (trip.h)
 *   step CHAINS MS WEIGHT                    points of the cost of a call that makes one level
 *   rows RANK CLASS COUNT                    confidences of first guesses, by class
 *   cell DEPTH RANK CLASS ACCEPTED TESTED    each cell with at least SO_TUNE_WRITE_TESTS tests
 *   end
 *
 * A line of another form or a number out of range makes the whole file invalid. */
#ifndef SO_PLAN_STORE_H
#define SO_PLAN_STORE_H

#include "base/str.h"
#include "model/model.h"
#include "plan/costs.h"
#include "plan/record.h"

/* Appends the key of a model on its backend, as one line. */
void so_store_key(const so_model *m, so_dtype kv_dtype, so_buf *out);
/* The path of the key's file in `dir`/costs. Caller frees. */
char *so_store_path(const char *dir, so_str key);

/* *c and *r must be empty. Returns false, and both stay empty, if there is no file, it is for
 * another key, or it is invalid; *why then has the reason for the log. */
bool so_store_read(const char *path, so_str key, so_costs *c, so_records *r, const char **why);
/* Writes a temporary file and renames it: of two runs that end together one file survives. */
int so_store_write(const char *path, so_str key, const so_costs *c, const so_records *r,
                   so_err *err);

/* Print and parse the lines between KEY and end; NUL-terminated. Public for the fuzzer. */
void so_store_print(const so_costs *c, const so_records *r, so_buf *out);
bool so_store_parse(const char *text, so_costs *c, so_records *r);

#endif

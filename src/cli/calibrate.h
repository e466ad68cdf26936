/* `sooth calibrate`: calibrate.c measures and grows a tree, calibrate_heads.c does what differs for
 * heads, calibrate_show.c shows the tree as text, JSON, SVG or mask. Main thread. */
#ifndef SO_CLI_CALIBRATE_H
#define SO_CLI_CALIBRATE_H

#include "cli/options.h"
#include "draft/shape.h"
#include "engine/bundle.h"
#include "model/heads.h"

/* The rank of a token in a row of n columns, the most likely one 0, at most n_ranks. subset: the tokens
 * of the columns; NULL: 0, 1, … A token without a column has rank n_ranks. */
int so_calibrate_rank(const int32_t *subset, int n, const float *logits, int32_t token,
                      int n_ranks);

/* The heads of --heads. */
typedef struct so_calibrate_heads {
    so_checkpoint *ck;
    so_heads *h; /* NULL: a draft model is calibrated */
} so_calibrate_heads;
int so_calibrate_heads_open(const char *path, const so_bundle *target, so_calibrate_heads *out,
                            so_err *err);
void so_calibrate_heads_close(so_calibrate_heads *h);
const char *so_calibrate_heads_kind(const so_calibrate_heads *h);
/* ranks[i]: that of tokens[i] in the row of head i, for the hidden state from which the token before
 * tokens[0] was sampled. n: at most the number of heads. */
int so_calibrate_heads_rank(so_calibrate_heads *h, const float *state, const int32_t *tokens, int n,
                            int n_ranks, uint8_t *ranks, so_err *err);

/* Prints the tree as --json, --show, --mask and --svg ask. Returns the exit status. */
int so_calibrate_show(const so_args *a, const so_shape *s, const so_shape_table *t);

#endif

/* What the kinds of `bench` that run a model share: one sequence and a pass over it. */
#ifndef SO_CLI_BENCH_RIG_H
#define SO_CLI_BENCH_RIG_H

#include "cli/load.h"
#include "kv/kv.h"

enum { SO_BENCH_WIDEST = 64 /* rows with logits at once */ };

typedef struct so_bench_rig {
    const so_args *a;
    so_bundle b;
    so_kv *kv;
    so_pass *pass;
    so_seq *seq;
    so_row *rows;
    int max_rows, n_ctx, n_repeats;
    bool json;
    bool two; /* set before opening: room for a second sequence as long */
    so_err err;
} so_bench_rig;

/* Room for n_ctx (--ctx-size, else default_ctx) and `extra` tokens; passes of up to max_rows. 0, or
 * the exit status with the message printed; to be closed either way. */
int so_bench_open(so_bench_rig *g, const so_args *a, int default_ctx, int max_rows, int extra);
void so_bench_close(so_bench_rig *g);

/* A chain of n rows behind the sequence, left open, rows from first_logit on with logits. Row i
 * takes ids[i]; without ids tokens are drawn from a fixed seed: the time of a pass does not depend
 * on what they say. */
int so_bench_rows(so_bench_rig *g, const int32_t *ids, int n, int first_logit, unsigned want);
/* Reads n tokens into the cache, max_rows at a time, the last n_logits of them (no more than one
 * pass has) with logits. */
int so_bench_feed(so_bench_rig *g, const int32_t *ids, int n, int n_logits);

/* Sorts v; [0] is then the minimum. */
double so_bench_median(double *v, int n);

/* bench_time.c */
int so_bench_curve(const so_args *a, so_bench_rig *g);
int so_bench_decode(const so_args *a, so_bench_rig *g);
int so_bench_prompt(const so_args *a, so_bench_rig *g);
/* bench_passes.c */
int so_bench_passes(const so_args *a, so_bench_rig *g);

#endif

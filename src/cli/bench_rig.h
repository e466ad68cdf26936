/* What the kinds of `bench` that run a model share: one sequence and a pass over it. */
#ifndef SO_CLI_BENCH_RIG_H
#define SO_CLI_BENCH_RIG_H

#include "cli/load.h"
#include "cli/teacher.h"

enum { SO_BENCH_WIDEST = 64 /* rows with logits at once */ };

typedef struct so_bench_rig {
    const so_args *a;
    so_bundle b;
    so_teacher t;
    int32_t *ids; /* [n_ctx + extra] tokens of a fixed seed, by position */
    int n_ctx, n_repeats;
    bool json;
    bool two; /* set before opening: room for a second sequence as long */
    so_err err;
} so_bench_rig;

/* Room for n_ctx (--ctx-size, else default_ctx) and `extra` tokens; passes of up to max_rows. 0, or
 * the exit status with the message printed; to be closed either way. */
int so_bench_open(so_bench_rig *g, const so_args *a, int default_ctx, int max_rows, int extra);
void so_bench_close(so_bench_rig *g);

/* so_teacher_rows and so_teacher_feed with the tokens of `ids`, all rows of the first with logits:
 * the time of a pass does not depend on which tokens they are. */
int so_bench_rows(so_bench_rig *g, int n, unsigned want);
int so_bench_feed(so_bench_rig *g, int n, int n_logits);

/* bench_time.c */
int so_bench_curve(const so_args *a, so_bench_rig *g);
int so_bench_decode(const so_args *a, so_bench_rig *g);
int so_bench_prompt(const so_args *a, so_bench_rig *g);
/* bench_passes.c */
int so_bench_passes(const so_args *a, so_bench_rig *g);

#endif

/* A model with one sequence and passes over it, for the measurements of `bench` that run a
 * model. */
#ifndef SO_CLI_BENCH_RIG_H
#define SO_CLI_BENCH_RIG_H

#include "cli/load.h"
#include "cli/teacher.h"

enum { SO_BENCH_WIDEST = 64 /* maximum rows with logits in one pass */ };

typedef struct so_bench_rig {
    const so_args *a;
    so_bundle b;
    so_teacher t;
    int32_t *ids; /* [n_ctx + extra] random tokens of a fixed seed */
    int n_ctx, n_repeats;
    /* What timed passes deliver (SO_PASS_…): logits; on a GPU the argmax of each row, as in greedy
     * decoding, so that logits are computed but not downloaded. */
    unsigned want;
    bool json;
    /* Set before opening: the cache has room for a second sequence of equal length, and for this
     * many more. */
    bool two;
    int n_streams;
    /* Encoder-decoder models: what the encoder reads, the first of --prompts or a sentence. With
     * own_source, set before opening, the measurement gives the sources itself (so_teacher_read), of
     * up to n_ctx + extra tokens. */
    so_tokens source;
    bool own_source;
    so_err err;
} so_bench_rig;

/* Allocates a cache for n_ctx (--ctx-size, else default_ctx) + extra tokens and passes of up to
 * max_rows rows. Returns 0, or the exit status with the message printed; in both cases call
 * so_bench_close. */
int so_bench_open(so_bench_rig *g, const so_args *a, int default_ctx, int max_rows, int extra);
void so_bench_close(so_bench_rig *g);

bool so_bench_has_encoder(const so_bench_rig *g);

/* Gives the source to a further sequence, which is empty. t.seq has it. */
int so_bench_read(so_bench_rig *g, so_seq *seq);

/* so_teacher_rows (all rows with logits) and so_teacher_feed over the tokens of `ids`. The time of
 * a pass does not depend on its tokens. */
int so_bench_rows(so_bench_rig *g, int n, unsigned want);
int so_bench_feed(so_bench_rig *g, int n, int n_logits);

/* bench_time.c */
int so_bench_curve(const so_args *a, so_bench_rig *g);
int so_bench_decode(const so_args *a, so_bench_rig *g);
int so_bench_prompt(const so_args *a, so_bench_rig *g);
/* bench_passes.c */
int so_bench_passes(const so_args *a, so_bench_rig *g);

#endif

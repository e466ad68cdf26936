/* `sooth bench pair`: what a draft model gains at given acceptance rates. bench_pair.c measures,
 * bench_pair_print.c compares with the formulas and prints. */
#ifndef SO_CLI_BENCH_PAIR_H
#define SO_CLI_BENCH_PAIR_H

#include "cli/load.h"

enum { SO_PAIR_ALPHAS = 4, SO_PAIR_MAX_GAMMA = 16, SO_PAIR_LEVELS = 8, SO_PAIR_MAX_ROWS = 32 };

/* One alpha and gamma. Arrays have one value for each repeat. */
typedef struct so_pair_cell {
    double *gain;     /* [n_repeats] measured speed-up */
    double *at_alpha; /* [n_repeats] the same with the expected number of tokens per round */
    int64_t rounds, tokens;
    double draft_ms, pass_ms, other_ms; /* sums over the rounds: drafter, target's pass, the rest */
    int64_t looked_up, hits;            /* rounds that were drafted ahead (draft/async.h) */
    double worker_ms;
} so_pair_cell;

/* One draft with the target. Times are medians in milliseconds. */
typedef struct so_pair {
    const char *target, *draft;
    double alphas[SO_PAIR_ALPHAS];
    int n_alphas;
    bool is_ahead; /* drafting ahead is measured, too, with one alpha */
    double hit_rate;
    int fan, wait;   /* outcomes; guesses that are waited for, 0: all */
    bool has_source; /* encoder-decoder models: the prompt is a source, and has its own cache */
    int n_before, n_predict, n_repeats, max_gamma;
    int n_cached;                       /* tokens in the cache when passes were timed */
    double t_ms[SO_PAIR_MAX_GAMMA + 2]; /* [n] a pass over n rows, n ≥ 1 */
    double draft_ms;                    /* a pass of the draft over one row */
    /* If drafting ahead is measured: passes of the draft over n rows; of the target over n rows while the
     * draft computes passes over `fan` rows; of the draft over `fan` rows while the target computes. */
    double draft_n_ms[SO_PAIR_MAX_ROWS + 1];
    double beside_ms[SO_PAIR_MAX_GAMMA + 2], draft_beside_ms;
    /* Time of a pass over one row without the round trip to the host: in one submission, each
     * further level of SO_PAIR_LEVELS takes this long. */
    double device_ms, draft_device_ms;
    double plain_ms; /* a step of plain decoding, with all that the host does */
    so_pair_cell cells[SO_PAIR_ALPHAS][SO_PAIR_MAX_GAMMA + 1];
    so_pair_cell ahead[SO_PAIR_MAX_GAMMA + 1];
    int n_different; /* texts that were not those of plain decoding */
    /* Memory in bytes. */
    double weights, draft_weights;
    double kv_token, draft_kv_token; /* one position in the cache, and one of a source */
    double device_used;              /* on the device, by everything in this run; 0: not known */
    double own_caches;               /* of device_used: the caches of this run */
} so_pair;

int so_bench_pair(const so_args *a);

/* Speed-up of gamma guesses per round at alpha, with the pair's t(n) and `draft_ms` per guess. */
double so_pair_theory(const so_pair *p, double alpha, int gamma, double draft_ms);
/* Time of drafting ahead for one round: the tree's rows, then gamma levels of all outcomes. */
double so_pair_ahead_ms(const so_pair *p, int gamma);
void so_pair_print(so_pair *p, const char *device);
void so_pair_print_json(so_pair *p, const char *device);

#endif

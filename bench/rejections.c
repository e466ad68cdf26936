/* The time of a rejection by the number of guesses drawn from one row (src/verify/reject.c): rows of 49,152
 * tokens, log-normal, all draws rejected, the cases in turns. Prints the median and the quartiles in
 * microseconds, and the median divided by that of one guess.
 *
 *   build/obj/CONFIG/bench/rejections [LEVEL] [SPREAD] [EVERY]
 *
 * LEVEL: scalar, avx2, avx512. SPREAD: how much the logits of p and q differ (1). EVERY: only each EVERY-th
 * token has a q above 0, as with a vocabulary subset (1). */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/cpu.h"
#include "base/mem.h"
#include "base/rng.h"
#include "verify/verify.h"

enum { VOCAB = 49152, MOST = 4, TURNS = 600 };

static double gauss(uint32_t seed, uint32_t i) {
    so_rng_key key = {.seed = seed};
    double u = so_rng_uniform(&key, 2 * i), v = so_rng_uniform(&key, 2 * i + 1);
    return sqrt(-2 * log(u)) * cos(2 * M_PI * v);
}

static float p[VOCAB];
static double scratch[2 * VOCAB];

static bool reject(so_verify_rng *c, uint32_t position, uint32_t index, double a, double b) {
    (void)c, (void)position, (void)index, (void)a, (void)b;
    return false;
}

static const float *row(void *user, int node) {
    (void)user, (void)node;
    return p;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void make_tree(so_tree *t, int n, double spread, int every) {
    so_tree_init(t, VOCAB, 1);
    so_tree_reset(t, 0, 0);
    float *q = so_tree_row(t, so_tree_new_row(t));
    for (uint32_t i = 0; i < VOCAB; i++) {
        double logit = 2 * gauss(1, i);
        p[i] = (float)exp(logit);
        q[i] = i % (unsigned)every ? 0 : (float)exp(logit + spread * gauss(2, i));
    }
    for (int k = 0; k < n; k++)
        so_tree_add(t, 0, every * (7 + 1000 * k), SO_Q_ROW, 0, 0, 0.5f);
}

int main(int argc, char **argv) {
    static double us[MOST][TURNS];
    so_tree t[MOST];
    double spread = argc > 2 ? strtod(argv[2], NULL) : 1;
    long every = argc > 3 ? strtol(argv[3], NULL, 10) : 1;
    so_cpu_level level;
    if (argc > 1 && so_cpu_level_parse(argv[1], &level) && so_cpu_level_usable(level))
        so_cpu_level_set(level);
    for (int n = 1; n <= MOST; n++)
        make_tree(&t[n - 1], n, spread, (int)SO_MAX(1, SO_MIN(every, 10)));
    long sum = 0;
    for (int turn = 0; turn < TURNS; turn++)
        for (int n = 0; n < MOST; n++) {
            so_verify_rng_keyed r;
            so_verdict v;
            so_verify_rng_keyed_init(&r, (uint64_t)turn, 0);
            r.base.accept = reject;
            int64_t from = so_clock_ns();
            for (int k = 0; k < 10; k++)
                so_verify_reject(&t[n], row, NULL, &r.base, 1, scratch, &v);
            us[n][turn] = (double)(so_clock_ns() - from) * 1e-4;
            sum += v.token;
        }
    for (int n = 0; n < MOST; n++) {
        qsort(us[n], TURNS, sizeof us[n][0], by_value);
        printf("%d: %6.2f (%.2f to %.2f)  %.2f\n", n + 1, us[n][TURNS / 2], us[n][TURNS / 4],
               us[n][TURNS * 3 / 4], us[n][TURNS / 2] / us[0][TURNS / 2]);
    }
    printf("tokens %ld\n", sum);
    return 0;
}

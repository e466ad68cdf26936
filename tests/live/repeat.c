/* The same passes many times, chains and trees: every logit equal to that of passes over one row, with ==. Finds
 * results that are wrong now and then, as when thread blocks of a GPU hand over data without barriers; several
 * of these programs at once on one GPU disturb each other's timing.
 *
 *   repeat MODEL.gguf [TIMES [TOKENS [WIDEST]]]       SOOTH_DEVICE=cuda
 *
 * TIMES (1000): repeats of each width. TOKENS (256): cached before the rows. WIDEST (16, at most 512): the largest
 * width; there is memory for twice as many rows of logits. Prints a line for each width and tree; exit 1 on the
 * first difference. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "so_rig.h"
#include "so_test.h"

enum { MOST_ROWS = 512, MOST_TOKENS = 32768, CHUNK = 64 };

static const int WIDTHS[] = {1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 64, 100, 257, 512};
/* Trees: branches of BRANCH nodes each, side by side. */
enum { BRANCH = 3 };
static const int TREES[] = {6, 15, 63};

/* A model after n_prefix tokens of its cache, and the rows that follow. */
typedef struct after {
    so_rig r;
    so_seq *s;
    int n_prefix, widest;
    int32_t *tokens;   /* [n_prefix + widest] */
    float *want, *got; /* [widest][n_vocab] logits */
} after;

static _Noreturn void usage(void) {
    fprintf(stderr, "usage: repeat MODEL.gguf [TIMES [TOKENS [WIDEST]]]\n");
    exit(2);
}

static int argument(int argc, char **argv, int i, int standard, int most) {
    long n = argc > i ? strtol(argv[i], NULL, 10) : standard;
    if (n < 1 || n > most)
        usage();
    return (int)n;
}

static void check(const after *a, const char *kind, int n, int time) {
    size_t n_vocab = (size_t)a->r.n_vocab, i = 0;
    if (memcmp(a->got, a->want, (size_t)n * n_vocab * sizeof *a->got) == 0)
        return;
    while (memcmp(&a->got[i], &a->want[i], sizeof *a->got) == 0)
        i++;
    printf("%s of %d, time %d: row %zu, logit %zu is %.9g and not %.9g\n", kind, n, time,
           i / n_vocab, i % n_vocab, (double)a->got[i], (double)a->want[i]);
    exit(1);
}

static void chains(after *a, int times) {
    so_rig_chunks(&a->r, a->s, a->tokens + a->n_prefix, a->widest, 1, a->want);
    for (size_t w = 0; w < SO_LEN(WIDTHS) && WIDTHS[w] <= a->widest; w++) {
        for (int k = 0; k < times; k++) {
            so_seq_truncate_to(a->s, a->n_prefix);
            so_rig_chain(&a->r, a->s, a->tokens + a->n_prefix, WIDTHS[w], a->got);
            check(a, "chain", WIDTHS[w], k);
        }
        printf("width %d: %d times the same\n", WIDTHS[w], times);
        fflush(stdout);
    }
    so_seq_truncate_to(a->s, a->n_prefix);
}

static void score_tree(after *a, int n) {
    so_row rows[MOST_ROWS];
    so_err err = {0};
    SO_OK_OR_FAIL(so_seq_begin(a->s, n, &err), err);
    for (int i = 0; i < n; i++)
        rows[i] = (so_row){.token = a->tokens[a->n_prefix + i],
                           .pos = a->n_prefix + i % BRANCH,
                           .parent = i % BRANCH ? i - 1 : -1,
                           .want_logits = true};
    SO_OK_OR_FAIL(so_pass_run(a->r.p, &(so_batch){rows, n, &a->s, 1}, SO_PASS_LOGITS, &err), err);
    for (int i = 0; i < n; i++)
        memcpy(a->got + (size_t)i * (size_t)a->r.n_vocab, so_pass_logits(a->r.p, i),
               (size_t)a->r.n_vocab * sizeof *a->got);
    so_seq_abort(a->s);
}

static void trees(after *a, int times) {
    for (int i = 0; i + BRANCH <= a->widest; i += BRANCH) {
        so_rig_chunks(&a->r, a->s, a->tokens + a->n_prefix + i, BRANCH, 1,
                      a->want + (size_t)i * (size_t)a->r.n_vocab);
        so_seq_truncate_to(a->s, a->n_prefix);
    }
    for (size_t w = 0; w < SO_LEN(TREES) && TREES[w] <= a->widest; w++) {
        for (int k = 0; k < times; k++) {
            score_tree(a, TREES[w]);
            check(a, "tree", TREES[w], k);
        }
        printf("tree of %d: %d times the same\n", TREES[w], times);
        fflush(stdout);
    }
}

int main(int argc, char **argv) {
    if (argc < 2 || argc > 5)
        usage();
    int times = argument(argc, argv, 2, 1000, 1000000);
    after a = {.n_prefix = argument(argc, argv, 3, 256, MOST_TOKENS),
               .widest = argument(argc, argv, 4, 16, MOST_ROWS)};
    so_rig_open(&a.r, argv[1],
                &(so_rig_opts){.kv_dtype = SO_DTYPE_F16,
                               .max_rows = MOST_ROWS,
                               .n_pages = so_kv_pages_for(a.n_prefix + a.widest) + 1});
    a.tokens = SO_NEW_N(int32_t, a.n_prefix + a.widest);
    uint32_t x = 1;
    for (int i = 0; i < a.n_prefix + a.widest; i++)
        a.tokens[i] = (int32_t)((x = x * 1664525u + 1013904223u) % (uint32_t)a.r.n_vocab);
    a.want = SO_NEW_N(float, (size_t)a.widest *(size_t)a.r.n_vocab);
    a.got = SO_NEW_N(float, (size_t)a.widest *(size_t)a.r.n_vocab);
    a.s = so_seq_create(a.r.kv);
    so_rig_chunks(&a.r, a.s, a.tokens, a.n_prefix, CHUNK, NULL);
    chains(&a, times);
    trees(&a, times);
    so_seq_free(a.s);
    so_rig_close(&a.r);
    free(a.tokens);
    free(a.want);
    free(a.got);
    return 0;
}

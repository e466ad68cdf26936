/* The same passes many times: every logit equal to that of passes over one row, with ==. Finds results
 * that are wrong now and then, as when thread blocks of a GPU hand over data without barriers; several
 * of these programs at once on one GPU disturb each other's timing.
 *
 *   repeat MODEL.gguf [TIMES [TOKENS [WIDEST]]]       SOOTH_DEVICE=cuda
 *
 * TIMES (1000): repeats of each width. TOKENS (256): cached before the rows. WIDEST (16, at most 512): the largest
 * width; there is memory for twice as many rows of logits. Prints a line per width; exit 1 on the first difference. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "so_rig.h"
#include "so_test.h"

enum { MOST_ROWS = 512, MOST_TOKENS = 32768, CHUNK = 64 };

static const int WIDTHS[] = {1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 64, 100, 257, 512};

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

static void fail_at(int width, int time, const float *got, const float *want, size_t n_vocab) {
    size_t i = 0;
    while (memcmp(&got[i], &want[i], sizeof *got) == 0)
        i++;
    printf("width %d, time %d: row %zu, logit %zu is %.9g and not %.9g\n", width, time, i / n_vocab,
           i % n_vocab, (double)got[i], (double)want[i]);
    exit(1);
}

int main(int argc, char **argv) {
    if (argc < 2 || argc > 5)
        usage();
    int times = argument(argc, argv, 2, 1000, 1000000),
        n_prefix = argument(argc, argv, 3, 256, MOST_TOKENS),
        widest = argument(argc, argv, 4, 16, MOST_ROWS);
    so_rig r;
    so_rig_open(&r, argv[1],
                &(so_rig_opts){.kv_dtype = SO_DTYPE_F16,
                               .max_rows = MOST_ROWS,
                               .n_pages = so_kv_pages_for(n_prefix + widest) + 1});
    size_t n_vocab = (size_t)r.n_vocab, row = n_vocab * sizeof(float);
    int32_t *tokens = SO_NEW_N(int32_t, n_prefix + widest);
    uint32_t x = 1;
    for (int i = 0; i < n_prefix + widest; i++)
        tokens[i] = (int32_t)((x = x * 1664525u + 1013904223u) % (uint32_t)r.n_vocab);
    float *want = SO_NEW_N(float, (size_t)widest *n_vocab),
          *got = SO_NEW_N(float, (size_t)widest *n_vocab);
    so_seq *s = so_seq_create(r.kv);
    so_rig_chunks(&r, s, tokens, n_prefix, CHUNK, NULL);
    so_rig_chunks(&r, s, tokens + n_prefix, widest, 1, want);
    for (size_t w = 0; w < SO_LEN(WIDTHS) && WIDTHS[w] <= widest; w++) {
        for (int k = 0; k < times; k++) {
            so_seq_truncate_to(s, n_prefix);
            so_rig_chain(&r, s, tokens + n_prefix, WIDTHS[w], got);
            if (memcmp(got, want, (size_t)WIDTHS[w] * row) != 0)
                fail_at(WIDTHS[w], k, got, want, n_vocab);
        }
        printf("width %d: %d times the same\n", WIDTHS[w], times);
        fflush(stdout);
    }
    so_seq_free(s);
    so_rig_close(&r);
    free(tokens);
    free(want);
    free(got);
    return 0;
}

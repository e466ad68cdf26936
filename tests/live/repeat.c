/* The same passes many times: every logit equal to that of passes over one row, with ==. Finds results
 * that are wrong now and then, as when thread blocks of a GPU hand over data without barriers; several
 * of these programs at once on one GPU disturb each other's timing.
 *
 *   repeat MODEL.gguf [TIMES]       SOOTH_DEVICE=cuda; TIMES: of each width, 1000
 *
 * Prints a line per width; exit 1 on the first difference. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "so_rig.h"
#include "so_test.h"

enum { PREFIX = 256, WIDEST = 16, CHUNK = 64 };

static const int WIDTHS[] = {1, 2, 3, 4, 5, 8, 9, 16};

static void fail_at(int width, int time, const float *got, const float *want, size_t n_vocab) {
    size_t i = 0;
    while (memcmp(&got[i], &want[i], sizeof *got) == 0)
        i++;
    printf("width %d, time %d: row %zu, logit %zu is %.9g and not %.9g\n", width, time, i / n_vocab,
           i % n_vocab, (double)got[i], (double)want[i]);
    exit(1);
}

int main(int argc, char **argv) {
    int times = argc > 2 ? (int)strtol(argv[2], NULL, 10) : 1000;
    if (argc < 2 || times < 1) {
        fprintf(stderr, "usage: repeat MODEL.gguf [TIMES]\n");
        return 2;
    }
    so_rig r;
    so_rig_open(&r, argv[1], &(so_rig_opts){.kv_dtype = SO_DTYPE_F16, .max_rows = CHUNK});
    size_t n_vocab = (size_t)r.n_vocab, row = n_vocab * sizeof(float);
    int32_t tokens[PREFIX + WIDEST];
    uint32_t x = 1;
    for (int i = 0; i < PREFIX + WIDEST; i++)
        tokens[i] = (int32_t)((x = x * 1664525u + 1013904223u) % (uint32_t)r.n_vocab);
    float *want = SO_NEW_N(float, WIDEST *n_vocab), *got = SO_NEW_N(float, WIDEST *n_vocab);
    so_seq *s = so_seq_create(r.kv);
    so_rig_chunks(&r, s, tokens, PREFIX, CHUNK, NULL);
    so_rig_chunks(&r, s, tokens + PREFIX, WIDEST, 1, want);
    for (size_t w = 0; w < SO_LEN(WIDTHS); w++) {
        for (int k = 0; k < times; k++) {
            so_seq_truncate_to(s, PREFIX);
            so_rig_chain(&r, s, tokens + PREFIX, WIDTHS[w], got);
            if (memcmp(got, want, (size_t)WIDTHS[w] * row) != 0)
                fail_at(WIDTHS[w], k, got, want, n_vocab);
        }
        printf("width %d: %d times the same\n", WIDTHS[w], times);
    }
    so_seq_free(s);
    so_rig_close(&r);
    free(want);
    free(got);
    return 0;
}

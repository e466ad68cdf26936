/* Table files from arbitrary bytes, also with mark and checksum made right so that the rest is
 * reached; what loads is drafted from. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "draft/drafters.h"

static void put32(uint8_t *p, uint64_t v) {
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(v >> 8 * i);
}

/* A header that fits the rest, which stays arbitrary; returns the length it fits. */
static size_t seal(uint8_t *p, size_t len) {
    uint32_t order = 1 + p[12] % 2, n_vocab = 1 + p[16] % 4;
    size_t starts = 4 * (order == 1 ? 2u : n_vocab + 1), n = (len - 56 - starts) / 8;
    len = 56 + starts + 8 * n;
    memcpy(p, "SOOTHTBL\1\0\0", 12);
    put32(p + 12, order);
    put32(p + 16, n_vocab);
    put32(p + 20, 0);
    put32(p + 40, n);
    put32(p + 44, 0);
    uint64_t sum = so_hash_bytes(p, len - 8);
    put32(p + len - 8, sum);
    put32(p + len - 4, sum >> 32);
    return len;
}

/* Takes the table. */
static void draft(so_table *t) {
    static so_tree tree;
    so_err err = {0};
    so_drafter *d = so_table_drafter_create(t, true);
    so_tree_init(&tree, t->n_vocab, 4);
    so_draft_job job = {.tokens = (int32_t[]){0},
                        .n_tokens = 1,
                        .tree = &tree,
                        .max_nodes = 8,
                        .max_depth = 8,
                        .temp = 1};
    if (d->vt->propose(d, &job, 1, &err) == 0)
        so_tree_check(&tree);
    so_tree_deinit(&tree);
    so_drafter_free(d);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    so_table *t = NULL;
    so_err err = {0};
    if (so_table_parse(data, len, "fuzz", &t, &err) == 0)
        so_table_free(t);
    if (len < 80)
        return 0;
    uint8_t *copy = so_alloc(len);
    memcpy(copy, data, len);
    if (so_table_parse(copy, seal(copy, len), "fuzz", &t, &err) == 0)
        draft(t);
    free(copy);
    return 0;
}

/* Table files from arbitrary bytes, also with mark and checksum made right so that the rest is
 * reached; what loads is drafted from. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "draft/drafters.h"

static void seal(uint8_t *p, size_t len) {
    memcpy(p, "SOOTHTBL\1\0\0", 12);
    uint64_t sum = so_hash_bytes(p, len - 8);
    for (int i = 0; i < 8; i++)
        p[len - 8 + (size_t)i] = (uint8_t)(sum >> 8 * i);
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
    if (len < 64)
        return 0;
    uint8_t *copy = so_alloc(len);
    memcpy(copy, data, len);
    seal(copy, len);
    if (so_table_parse(copy, len, "fuzz", &t, &err) == 0) {
        if (t->n_vocab <= 100000)
            draft(t);
        else
            so_table_free(t);
    }
    free(copy);
    return 0;
}

/* --spec from arbitrary bytes: what parses prints, and what is printed parses to the same. */
#include <stdlib.h>

#include "draft/spec.h"

static bool has_files(const so_spec *s) {
    for (int i = 0; i < s->n_nodes; i++)
        if (s->nodes[i].file_len > 0 || s->nodes[i].tree_len > 0 || s->nodes[i].worker_len > 0)
            return true;
    return false;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    static so_spec a, b;
    so_err err = {0};
    so_buf first = {0}, second = {0};
    if (so_spec_parse((so_str){(const char *)data, len}, &a, &err) != 0)
        return 0;
    so_spec_print(&a, &first);
    SO_ASSERT(so_spec_parse(so_buf_str(&first), &b, &err) == 0);
    so_spec_print(&b, &second);
    SO_ASSERT(so_str_eq(so_buf_str(&first), so_buf_str(&second)));
    so_draft_set set;
    so_draft_config cfg = {.n_vocab = 10};
    if (!has_files(&a) && so_spec_build(&a, &cfg, &set, &err) == 0)
        so_draft_set_deinit(&set);
    so_buf_free(&first);
    so_buf_free(&second);
    return 0;
}

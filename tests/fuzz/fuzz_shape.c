/* Tree files from arbitrary bytes; what is read has the form of a tree and reads back the same. */
#include <string.h>

#include "base/mem.h"
#include "draft/shape.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    static so_shape s, back;
    static so_shape_table t;
    int16_t order[SO_SHAPE_MAX];
    so_err err = {0};
    so_buf b = {0};
    if (so_shape_parse((so_str){(const char *)data, len}, "fuzz", &s, &t, &err) != 0)
        return 0;
    SO_ASSERT(s.n_nodes >= 1 && s.n_nodes <= SO_SHAPE_MAX && s.depth <= SO_SHAPE_DEPTHS);
    so_shape_depth_first(&s, order);
    so_shape_print(&s, &t, "model", &b);
    SO_ASSERT(so_shape_parse(so_buf_str(&b), "again", &back, &t, &err) == 0);
    SO_ASSERT(back.n_nodes == s.n_nodes && back.depth == s.depth);
    so_buf_clear(&b);
    so_shape_print_mask(&s, &b);
    so_buf_free(&b);
    return 0;
}

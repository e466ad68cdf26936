/* The records of drafters from arbitrary bytes: what parses prints, what is printed parses to the
 * same, and no estimate that it is lent to leaves [0,1]. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "draft/record.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    static so_estimate_shared shared;
    so_records a, b;
    so_buf first = {0}, second = {0};
    char *text = so_strndup((const char *)data, len);
    if (so_records_parse(text, &a)) {
        so_records_print(&a, &first);
        SO_ASSERT(so_records_parse(so_buf_str(&first).ptr, &b));
        so_records_print(&b, &second);
        SO_ASSERT(so_str_eq(so_buf_str(&first), so_buf_str(&second)));
        for (int i = 0; i < a.n; i++) {
            so_estimate e;
            memset(&shared, 0, sizeof shared);
            so_record_lend(a.items[i], &shared, 0);
            so_estimate_init(&e, &shared);
            for (int depth = 1; depth < 20; depth++) {
                double p = so_estimate_get(&e, 0, depth, -1, 0.5);
                SO_ASSERT(p >= 0 && p <= 1);
            }
        }
        so_records_free(&b);
    }
    so_records_free(&a);
    so_buf_free(&first);
    so_buf_free(&second);
    free(text);
    return 0;
}

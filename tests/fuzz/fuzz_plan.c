/* What the planner keeps, from arbitrary bytes: what parses prints, what is printed parses to the
 * same, and no estimate that it is lent to leaves [0,1]. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "plan/store.h"

static void check_estimates(const so_record *rec) {
    so_accept_shared shared;
    so_accept a;
    so_accept_shared_init(&shared, 1);
    so_record_set_prior(rec, &shared, 0);
    so_accept_init(&a, &shared);
    for (int depth = 1; depth < 20; depth++)
        for (int rank = 0; rank < 4; rank++) {
            so_accept_key k = {0, depth, rank, -1};
            double p = so_accept_get(&a, &k, 0.5);
            SO_ASSERT(p >= 0 && p <= 1);
        }
    so_accept_deinit(&a);
    so_accept_shared_deinit(&shared);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    static so_costs costs[2];
    so_records a = {0}, b = {0};
    so_buf first = {0}, second = {0};
    char *text = so_strndup((const char *)data, len);
    if (so_store_parse(text, &costs[0], &a)) {
        so_store_print(&costs[0], &a, &first);
        SO_ASSERT(so_store_parse(so_buf_str(&first).ptr, &costs[1], &b));
        so_store_print(&costs[1], &b, &second);
        SO_ASSERT(b.n == a.n);
        for (int i = 0; i < a.n; i++)
            check_estimates(a.items[i]);
    }
    so_records_free(&a);
    so_records_free(&b);
    so_costs_deinit(&costs[0]);
    so_costs_deinit(&costs[1]);
    so_buf_free(&first);
    so_buf_free(&second);
    free(text);
    return 0;
}

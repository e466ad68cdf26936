/* The method of each set of drafters (compare.h): drafting ahead, synchronous drafting or plain decoding.
 * Chosen for the next step before its drafts are dispatched, measured by the clock around whole steps. A
 * comparison belongs to a set, a mode and a size of the batch. Thread: the engine thread. */
#include "base/mem.h"
#include "plan/impl.h"
#include "plan/tuning.h"

int so_plan_size_class(int n_requests) {
    int bits = 0;
    for (; n_requests > 0; n_requests /= 2)
        bits++;
    return SO_MIN(bits, SO_PLAN_SIZES - 1);
}

/* The comparison that this step belongs to. */
static so_compare *comparison(so_planner *p, const so_plan_request *r) {
    return &r->set->compare[r->o.mode][so_plan_size_class(p->step.n_requests)];
}

void so_plan_choose_methods(so_planner *p) {
    for (int i = 0; i < p->n_entries; i++) {
        const so_plan_request *r = p->entries[i].r;
        if (r && r->set->may_be_ahead)
            r->set->next_method = so_compare_method(comparison(p, r));
    }
}

/* Steps count for a comparison if all requests are planned and of one set, and if the method is not
 * changing: after a change the drafts of the old method are looked up, or caches catch up. Plain
 * decoding is compared where speculation gains little. */
void so_plan_observe_method(so_planner *p, double gain, double step_ms, int n_tokens) {
    const so_plan_request *first = p->n_entries > 0 ? p->entries[0].r : NULL;
    bool counts = step_ms > 0 && p->step.prompt_rows == 0 && first && first->set->may_be_ahead;
    for (int i = 0; i < p->n_entries && counts; i++) {
        const so_plan_request *r = p->entries[i].r;
        counts = r && r->set == first->set && r->o.length == 0 && r->o.mode == first->o.mode;
    }
    if (counts && first->set->method == first->set->next_method) {
        bool slow = gain < SO_TUNE_PLAIN_GAIN;
        bool may[SO_METHODS] = {[SO_METHOD_AHEAD] = true,
                                [SO_METHOD_SYNC] = first->set->may_be_sync,
                                [SO_METHOD_PLAIN] = slow || !first->set->may_be_sync};
        so_compare_observe(comparison(p, first), n_tokens, step_ms, may);
    }
    for (int i = 0; i < p->n_entries; i++)
        if (p->entries[i].r)
            p->entries[i].r->set->method = p->entries[i].r->set->next_method;
}

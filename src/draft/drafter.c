/* What all drafters share: calls of optional vtable entries, and the limits of a job.
 *
 * Limits and vocabulary are checked here, so that a drafter with ids from outside (a file, a user's
 * function) ends its chain instead of failing so_tree_add's assertion. Stateless. */
#include "draft/drafter.h"

void so_drafter_free(so_drafter *d) {
    if (d)
        d->vt->free(d);
}

int so_drafter_n_ctx(const so_drafter *d) { return d->vt->n_ctx ? d->vt->n_ctx(d) : 0; }

double so_drafter_cache_fraction(const so_drafter *d, int n_tokens) {
    return d->vt->cache_fraction ? d->vt->cache_fraction(d, n_tokens) : 0;
}

void so_drafter_preempt(so_drafter *d, void *state) {
    if (d->vt->preempt)
        d->vt->preempt(d, state);
}

void so_drafter_observe(so_drafter *d, void *state, const int32_t *tokens, int n) {
    if (d->vt->observe && n > 0)
        d->vt->observe(d, state, tokens, n);
}

void so_drafter_add_hidden(so_drafter *d, void *state, int pos, const float *x) {
    if (d->vt->add_hidden)
        d->vt->add_hidden(d, state, pos, x);
}

void so_drafter_add_end_hidden(so_drafter *d, void *state, int pos, int row, const float *x) {
    if (d->vt->add_end_hidden)
        d->vt->add_end_hidden(d, state, pos, row, x);
}

void so_drafter_replace(so_drafter *d, void *state, const int32_t *tokens, int n) {
    if (d->vt->replace)
        d->vt->replace(d, state, tokens, n);
}

so_draft_job so_draft_inner_job(const so_draft_job *job, void *state, so_tree *tree,
                                so_sample_params *greedy) {
    so_draft_job inner = *job;
    so_tree_reset(tree, job->tree->nodes[0].token, job->tree->root_pos);
    inner.state = state;
    inner.tree = tree;
    inner.terms = NULL;            /* its guesses cost neither a row nor a test of the target */
    if (job->tree->max_rows > 0) { /* `reject`: the argmax, which uses no random number */
        inner.temp = 0;
        if (job->sample) {
            *greedy = *job->sample;
            greedy->temp = 0;
            inner.sample = greedy;
        }
    }
    return inner;
}

int so_draft_add(const so_draft_job *job, int parent, int32_t token, so_q_kind kind, int row,
                 int drafter, float confidence) {
    so_tree *t = job->tree;
    if (token < 0 || token >= t->n_vocab || t->nodes[parent].depth >= job->max_depth)
        return -1;
    /* A point may still join an existing node. A sampled token may not: it would be tested because
     * of its value, which biases the output (rule of sight). */
    bool full = t->n_nodes - 1 >= job->max_nodes || t->n_nodes >= SO_TREE_MAX;
    if (full && (kind != SO_Q_POINT || so_tree_child(t, parent, token) < 0))
        return -1;
    return so_tree_add(t, parent, token, kind, row, drafter, confidence);
}

double so_draft_uniform(const so_drafter *d, const so_draft_job *job, int depth, int draw) {
    SO_ASSERT(draw >= 0 && draw < 4096);
    if (job->draws)
        return job->draws->uniform(job->draws, d, depth, draw);
    so_rng_key key = {job->seed, job->choice, (uint32_t)(job->tree->root_pos + depth), SO_RNG_DRAFT,
                      job->round};
    return so_rng_uniform(&key, (uint32_t)d->index << 12 | (uint32_t)draw);
}

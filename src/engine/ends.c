/* Look-ahead rows on the ends of trees: ends.h has what they are and why they change no token. */
#include "engine/ends.h"

#include "engine/drafters.h"

static const so_end_rows *wanted(const so_request *r) {
    return r->spec.plan ? &r->spec.set->drafters.root->end_rows : NULL;
}

int so_ends_max_rows(const so_request *r) {
    const so_end_rows *w = wanted(r);
    return w ? w->n * w->n_ends : 0;
}

/* The chance that the round ends at each node, by the confidences. That of a later sibling is the square
 * root of its chance (draft/model_tree.c). */
static void chances(const so_tree *t, float end[SO_TREE_MAX]) {
    float reach[SO_TREE_MAX] = {1}, left[SO_TREE_MAX];
    for (int i = 0; i < t->n_nodes; i++) {
        const so_node *n = &t->nodes[i];
        left[i] = 1;
        if (i == 0)
            continue;
        const so_node *parent = &t->nodes[n->parent];
        float c = 0;
        for (int k = parent->first; k >= 0; k = t->proposals[k].next)
            if (t->proposals[k].child == i && c == 0)
                c = k == parent->first ? t->proposals[k].confidence
                                       : t->proposals[k].confidence * t->proposals[k].confidence;
        c = SO_MIN(SO_MAX(c, 0), left[n->parent]);
        left[n->parent] -= c;
        reach[i] = reach[n->parent] * c;
    }
    for (int i = 0; i < t->n_nodes; i++)
        end[i] = reach[i] * left[i];
}

/* The last position of rows below `node` is one of the context. */
static bool fits(const so_request *r, const so_end_rows *w, int node) {
    return r->n_tokens - 1 + r->tree->nodes[node].depth + w->n < r->e->o.n_ctx;
}

int so_ends_choose(so_request *r, int room) {
    const so_end_rows *w = wanted(r);
    so_speculation *s = &r->spec;
    float end[SO_TREE_MAX];
    s->n_ends = 0;
    if (!w || w->n == 0 || !s->asked_ends)
        return 0;
    chances(r->tree, end);
    while (s->n_ends < w->n_ends && (s->n_ends + 1) * w->n <= room) {
        int best = -1;
        for (int i = 0; i < r->tree->n_nodes; i++)
            if (end[i] >= 0 && fits(r, w, i) && (best < 0 || end[i] > end[best]))
                best = i;
        if (best < 0)
            break;
        s->ends[s->n_ends++] = (int16_t)best;
        end[best] = -1;
    }
    return s->n_ends * w->n;
}

int so_ends_add_rows(so_request *r, int seq, int root, int at) {
    const so_end_rows *w = wanted(r);
    const so_model *m = r->e->m;
    size_t d = (size_t)so_model_hparams(m)->d_model;
    for (int k = 0; k < r->spec.n_ends; k++) {
        int node = r->spec.ends[k];
        for (int i = 0; i < w->n; i++, at++)
            r->e->step.rows[at] = (so_row){.token = r->tree->nodes[0].token,
                                           .pos = r->n_tokens + r->tree->nodes[node].depth + i,
                                           .seq = seq,
                                           .parent = i > 0 ? at - 1 : root + node,
                                           .want_logits = true,
                                           .embedding = w->inputs + (size_t)i * d};
    }
    return at;
}

void so_ends_observe(so_request *r, int node) {
    const so_end_rows *w = wanted(r);
    int at = r->first_logit + r->tree->n_nodes;
    for (int k = 0; w && k < r->spec.n_ends; k++, at += w->n)
        for (int i = 0; r->spec.ends[k] == node && i < w->n; i++)
            so_drafter_add_end_hidden(r->spec.set->drafters.root, r->spec.state, r->n_tokens, i,
                                      so_pass_hidden(r->e->pass, at + i));
}

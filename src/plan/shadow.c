/* Shadow drafts as flat lists of guesses (shadow.h has the reasons). A guess is kept only if its
 * parent was. One scan is enough, because the proposals of parents come first in a tree. Once the
 * text has deviated from a tree, or has reached the tree's end, the tree costs one comparison per
 * token until the ring overwrites it. */
#include "plan/shadow.h"

#include "base/mem.h"

void so_shadow_add(so_shadow *s, const so_accept *a, const so_tree *t) {
    so_shadow_tree w = {.n = 0, .at = 0};
    bool reached[SO_TREE_MAX] = {true};
    for (int i = 0; i < t->n_proposals && w.n < SO_SHADOW_GUESSES; i++) {
        const so_proposal *p = &t->proposals[i];
        const so_node *child = &t->nodes[p->child];
        if (p->kind != SO_Q_POINT || !reached[child->parent])
            continue;
        reached[p->child] = true;
        w.guesses[w.n++] = (so_shadow_guess){
            .token = child->token,
            .confidence = p->confidence,
            .parent = child->parent,
            .child = p->child,
            .drafter = p->drafter,
            .depth = (uint8_t)SO_MIN(child->depth, UINT8_MAX),
            .rank = (uint8_t)so_accept_rank(a, t, i),
        };
    }
    if (w.n == 0)
        return;
    s->trees[s->next] = w;
    s->next = (s->next + 1) % SO_SHADOW_TREES;
}

/* Whether a verifier would have tested guess i: not if an earlier guess at this node was right. But
 * if another drafter made the same guess earlier, it counts as tested for both. */
static bool is_tested(const so_shadow_tree *w, int i, int32_t token) {
    const so_shadow_guess *g = &w->guesses[i];
    for (int k = 0; k < i; k++) {
        const so_shadow_guess *before = &w->guesses[k];
        if (before->parent != w->at || before->token != token)
            continue;
        if (before->drafter == g->drafter || before->child != g->child)
            return false;
    }
    return true;
}

/* Whether guess i is its drafter's first at this node. */
static bool is_own_first(const so_shadow_tree *w, int i) {
    for (int k = 0; k < i; k++)
        if (w->guesses[k].parent == w->guesses[i].parent &&
            w->guesses[k].drafter == w->guesses[i].drafter)
            return false;
    return true;
}

static void advance_tree(so_shadow_tree *w, so_accept *a, int32_t token) {
    int next = -1;
    for (int i = 0; i < w->n; i++) {
        const so_shadow_guess *g = &w->guesses[i];
        if (g->parent != w->at)
            continue;
        if (g->token == token)
            next = g->child;
        so_accept_key k = {g->drafter, g->depth, g->rank, (double)g->confidence};
        if (is_tested(w, i, token))
            so_accept_add(a, &k, g->token == token);
        if (g->depth == 1 && g->rank > 0 && is_own_first(w, i))
            so_accept_add_as_first(a, &k, g->token == token);
    }
    w->at = next;
}

void so_shadow_advance(so_shadow *s, so_accept *a, const int32_t *tokens, int n) {
    for (int i = 0; i < n; i++)
        for (int t = 0; t < SO_SHADOW_TREES; t++)
            if (s->trees[t].n > 0 && s->trees[t].at >= 0)
                advance_tree(&s->trees[t], a, tokens[i]);
}

/* The token tree: nodes and proposals in two fixed arrays, q rows in one block.
 *
 * Owns only this block. The tree does not grow: so_tree_add returns −1 when it is full, and the
 * drafter stops. Indices are in order of creation, also after pruning: a parent precedes its
 * children, and the proposals of a parent have increasing indices. so_tree_check verifies all of
 * it. One thread at a time. */
#include "token/tree.h"

#include <stdlib.h>

#include "base/mem.h"

void so_tree_init(so_tree *t, int n_vocab, int max_rows) {
    SO_ASSERT_OP(n_vocab, >, 0);
    SO_ASSERT(max_rows >= 0 && max_rows <= SO_TREE_MAX_PROPOSALS);
    size_t n_q;
    SO_ASSERT(so_mul_size((size_t)n_vocab, (size_t)max_rows, &n_q));
    *t = (so_tree){.n_vocab = n_vocab, .max_rows = max_rows};
    t->q = max_rows ? SO_NEW_N(float, n_q) : NULL;
    so_tree_reset(t, 0, 0);
}

void so_tree_deinit(so_tree *t) {
    free(t->q);
    *t = (so_tree){0};
}

void so_tree_reset(so_tree *t, int32_t root_token, int root_pos) {
    t->n_nodes = 1;
    t->n_proposals = t->n_rows = 0;
    t->root_pos = root_pos;
    t->nodes[0] =
        (so_node){.token = root_token, .parent = -1, .first = -1, .last = -1, .chance = 1};
}

int so_tree_child(const so_tree *t, int parent, int32_t token) {
    for (int i = t->nodes[parent].first; i >= 0; i = t->proposals[i].next)
        if (t->nodes[t->proposals[i].child].token == token)
            return t->proposals[i].child;
    return -1;
}

static int add_node(so_tree *t, int parent, int32_t token) {
    if (t->n_nodes == SO_TREE_MAX)
        return -1;
    t->nodes[t->n_nodes] = (so_node){.token = token,
                                     .parent = (int16_t)parent,
                                     .depth = (int16_t)(t->nodes[parent].depth + 1),
                                     .first = -1,
                                     .last = -1,
                                     .chance = -1};
    return t->n_nodes++;
}

static bool valid_q(const so_tree *t, so_q_kind kind, int row) {
    return kind == SO_Q_POINT ? row == -1 : row >= 0 && row < t->n_rows;
}

int so_tree_add(so_tree *t, int parent, int32_t token, so_q_kind kind, int row, int drafter,
                float confidence) {
    SO_ASSERT(parent >= 0 && parent < t->n_nodes);
    SO_ASSERT(token >= 0 && token < t->n_vocab);
    SO_ASSERT(valid_q(t, kind, row));
    SO_ASSERT(drafter >= 0 && drafter <= UINT8_MAX);
    if (t->n_proposals == SO_TREE_MAX_PROPOSALS)
        return -1;
    int child = so_tree_child(t, parent, token);
    if (child < 0 && (child = add_node(t, parent, token)) < 0)
        return -1;
    int i = t->n_proposals++;
    t->proposals[i] = (so_proposal){.child = (int16_t)child,
                                    .next = -1,
                                    .row = (int16_t)row,
                                    .kind = (uint8_t)kind,
                                    .drafter = (uint8_t)drafter,
                                    .confidence = confidence};
    so_node *p = &t->nodes[parent];
    if (p->last >= 0)
        t->proposals[p->last].next = (int16_t)i;
    else
        p->first = (int16_t)i;
    p->last = (int16_t)i;
    return child;
}

int so_tree_new_row(so_tree *t) {
    if (t->n_rows >= t->max_rows)
        return -1;
    t->row_confidence[t->n_rows] = -1;
    return t->n_rows++;
}

/* ---- pruning ---- */

static int prune_nodes(so_tree *t, const bool keep[SO_TREE_MAX], int16_t to[SO_TREE_MAX]) {
    int n = 0;
    for (int i = 0; i < t->n_nodes; i++) {
        to[i] = -1;
        if (!keep[i])
            continue;
        to[i] = (int16_t)n;
        so_node node = t->nodes[i];
        SO_ASSERT(i == 0 || to[node.parent] >= 0);
        node.parent = i == 0 ? -1 : to[node.parent];
        node.first = node.last = -1;
        t->nodes[n++] = node;
    }
    return n;
}

void so_tree_prune(so_tree *t, const bool keep[SO_TREE_MAX]) {
    int16_t to[SO_TREE_MAX];
    int n_nodes = prune_nodes(t, keep, to), n_proposals = 0;
    for (int i = 0; i < t->n_proposals; i++) { /* by index, which is sampling order */
        so_proposal q = t->proposals[i];
        if (to[q.child] < 0)
            continue;
        q.child = to[q.child];
        q.next = -1;
        so_node *parent = &t->nodes[t->nodes[q.child].parent];
        if (parent->last >= 0)
            t->proposals[parent->last].next = (int16_t)n_proposals;
        else
            parent->first = (int16_t)n_proposals;
        parent->last = (int16_t)n_proposals;
        t->proposals[n_proposals++] = q;
    }
    t->n_nodes = n_nodes;
    t->n_proposals = n_proposals;
}

/* ---- checking ---- */

static void check_node(const so_tree *t, int i) {
    const so_node *n = &t->nodes[i];
    SO_ASSERT_OP((n->first < 0), ==, (n->last < 0));
    if (i == 0) {
        SO_ASSERT(n->parent == -1 && n->depth == 0);
        return;
    }
    SO_ASSERT(n->token >= 0 && n->token < t->n_vocab);
    SO_ASSERT(n->parent >= 0 && n->parent < i);
    SO_ASSERT_OP(n->depth, ==, t->nodes[n->parent].depth + 1);
    /* A proposal of its parent leads to it, and no other child of the parent has its token. */
    SO_ASSERT_OP(so_tree_child(t, n->parent, n->token), ==, i);
}

/* Checks one list of proposals and returns its length. Tokens sampled without replacement from one
 * row are distinct. */
static int check_proposals(const so_tree *t, int parent) {
    int n = 0;
    for (int i = t->nodes[parent].first, before = -1; i >= 0;
         before = i, i = t->proposals[i].next) {
        const so_proposal *p = &t->proposals[i];
        SO_ASSERT_OP(i, <, t->n_proposals);
        SO_ASSERT_OP(i, >, before); /* increasing, so the list ends */
        SO_ASSERT(p->child > 0 && p->child < t->n_nodes);
        SO_ASSERT_OP(t->nodes[p->child].parent, ==, parent);
        SO_ASSERT(p->confidence >= 0 && p->confidence <= 1);
        SO_ASSERT(p->kind <= SO_Q_ROW_SET && valid_q(t, (so_q_kind)p->kind, p->row));
        for (int k = t->nodes[parent].first; p->kind == SO_Q_ROW_SET && k != i;
             k = t->proposals[k].next)
            SO_ASSERT(t->proposals[k].kind != SO_Q_ROW_SET || t->proposals[k].row != p->row ||
                      t->proposals[k].child != p->child);
        SO_ASSERT_OP((p->next < 0), ==, (t->nodes[parent].last == i));
        n++;
    }
    return n;
}

void so_tree_check(const so_tree *t) {
    SO_ASSERT(t->n_nodes >= 1 && t->n_nodes <= SO_TREE_MAX);
    SO_ASSERT(t->n_proposals >= 0 && t->n_proposals <= SO_TREE_MAX_PROPOSALS);
    SO_ASSERT(t->n_rows >= 0 && t->n_rows <= t->max_rows);
    int n = 0;
    for (int i = 0; i < t->n_nodes; i++)
        n += check_proposals(t, i);
    SO_ASSERT_OP(n, ==, t->n_proposals);
    for (int i = 0; i < t->n_nodes; i++)
        check_node(t, i);
}

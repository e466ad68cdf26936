/* Verification by the target's own token: greedy, seed-exact, and the lenient form of greedy.
 *
 * Why match is exact (bit for bit, not in distribution):
 *   1. Plain decoding is a function: y(text) is the argmax of the target's row after `text`, or the
 *      draw whose noise is keyed by seed and position. Neither looks at what was drafted.
 *   2. A node stands for the text along its path. Where that is plain decoding's own text, y(node)
 *      is its next token, if the row's bits do not depend on what was computed beside it (row
 *      invariance, the backend's promise).
 *   3. So stepping to the child that holds y, while there is one, keeps 2 true, and where there is
 *      none, y is emitted and the round ends. Every emitted token is plain decoding's.
 * At most one child holds y, so no choice of order can matter, and how a guess was come by (its q)
 * is never asked: drafters may even share the target's noise.
 *
 * Pure; any thread. */
#include <math.h>

#include "base/mem.h"
#include "verify/verify.h"

static void begin(so_verdict *v) { v->n_accepted = v->n_tested = 0; }

static int accept_node(so_verdict *v, int node) {
    v->path[v->n_accepted++] = (int16_t)node;
    return node;
}

/* Compares the proposals of `node` with token y until one has it; that child, or −1. */
static int find_child(const so_tree *t, int node, int32_t y, so_verdict *v) {
    for (int i = t->nodes[node].first; i >= 0; i = t->proposals[i].next) {
        int child = t->proposals[i].child;
        v->tested[v->n_tested++] = (int16_t)i;
        if (t->nodes[child].token == y)
            return child;
    }
    return -1;
}

void so_verify_match(const so_tree *t, so_verify_choose *choose, void *user, so_verdict *out) {
    begin(out);
    for (int node = 0, child;; node = accept_node(out, child)) {
        out->token = choose(user, node);
        out->bonus = t->nodes[node].first < 0;
        if ((child = find_child(t, node, out->token, out)) < 0)
            return;
    }
}

/* --- lenient at temperature 0 (Leviathan et al., appendix A.5) ---
 *
 * The standardised distribution at temperature 0 is a point mass, and min(1, p/(L·q)) with p 0 or 1
 * leaves nothing to be lenient about. So A.5 compares before standardising: x stands where
 * p(x) ≥ L·max p (the paper prints ≤, which would keep the unlikely tokens). p is the softmax at
 * temperature 1, so p(x)/max p = exp(z(x) − max z), and logits decide without an exponential.
 * Of several children that stand the likeliest is taken, ties to the lowest id: the least loss the
 * tree allows, and plain greedy wherever the argmax was drafted. */

static int32_t argmax(const float *z, int n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++)
        if (z[i] > z[best] || isnan(z[best]))
            best = i;
    return best;
}

/* The likeliest drafted token whose logit is at least `least`; y where none is. */
static int32_t likeliest(const so_tree *t, int node, const float *z, double least, int32_t y) {
    int32_t best = -1;
    for (int i = t->nodes[node].first; i >= 0; i = t->proposals[i].next) {
        int32_t x = t->nodes[t->proposals[i].child].token;
        if ((double)z[x] >= least && (best < 0 || z[x] > z[best] || (z[x] == z[best] && x < best)))
            best = x;
    }
    return best < 0 ? y : best;
}

void so_verify_lenient_greedy(const so_tree *t, so_verify_row *logits, void *user, double lenience,
                              so_verdict *out) {
    SO_ASSERT(lenience > 0 && lenience <= 1);
    begin(out);
    for (int node = 0, child;; node = accept_node(out, child)) {
        const float *z = logits(user, node);
        int32_t y = out->token = argmax(z, t->n_vocab);
        out->bonus = t->nodes[node].first < 0;
        if (lenience < 1) /* at 1 a tie with the argmax must not stand */
            y = likeliest(t, node, z, (double)z[y] + log(lenience), y);
        if ((child = find_child(t, node, y, out)) < 0)
            return;
    }
}

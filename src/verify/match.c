/* Verification by the target's own token: greedy, seed-exact, and lenient at temperature 0.
 *
 * Claim. so_verify_match emits bit for bit the text of plain decoding, for any tree of guesses.
 *
 * Proof.
 *   1. Plain decoding is a function y of the text before a position: y(text) is the argmax of the
 *      target's row after `text`, or the token sampled with noise keyed by (seed, position).
 *      Neither depends on guesses.
 *   2. A node represents the text along its path. If that text is what plain decoding produces,
 *      then y(node) is plain decoding's next token, because the bits of a row do not depend on the
 *      other rows of the pass (row invariance, guaranteed by the backend).
 *   3. The root satisfies the condition of 2. Moving to the child that holds y keeps it true. Where
 *      no child holds y, y is emitted and the round ends. So every emitted token is plain
 *      decoding's.
 *
 * At most one child holds y, so the order of the proposals does not matter. q is not used: it does
 * not matter where a guess came from, and a drafter may even use the target's noise.
 *
 * Pure functions; any thread. */
#include <math.h>

#include "base/mem.h"
#include "verify/verify.h"

static void begin(so_verdict *v) { v->n_accepted = v->n_tested = 0; }

static int accept_node(so_verdict *v, int node) {
    v->path[v->n_accepted++] = (int16_t)node;
    return node;
}

/* Compares the proposals of `node` with token y, in order, up to the first match. Returns that
 * child, or −1. */
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
 * At temperature 0 the standardised distribution p is a point mass, so min(1, p/(L·q)) is 0 or 1
 * and lenience would have no effect. A.5 therefore compares before standardising: accept x if
 * p(x) ≥ L·max p. (The paper prints ≤, which would keep the unlikely tokens.)
 *
 * p is the softmax at temperature 1, so p(x)/max p = exp(z(x) − max z), and the test
 * z(x) ≥ max z + log L needs no exponential per token.
 *
 * If several children pass, the most likely one is taken, ties to the lowest id. Of the drafted
 * tokens it loses the least likelihood, and it is the argmax itself where that was drafted. */

static int32_t argmax(const float *z, int n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++)
        if (z[i] > z[best] || isnan(z[best]))
            best = i;
    return best;
}

/* The most likely guess below `node` whose logit is at least `least`; y if there is none. */
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
        if (lenience < 1) /* at 1 a token that ties with the argmax must not be accepted */
            y = likeliest(t, node, z, (double)z[y] + log(lenience), y);
        if ((child = find_child(t, node, y, out)) < 0)
            return;
    }
}

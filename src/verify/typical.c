/* Typical acceptance, the lossy rule of Medusa (Cai et al., 2024, section 2.3.1).
 *
 * Drafts are rejected by `reject` where the target itself might have said something else, although
 * the guess is a sensible one. Typical acceptance asks only whether a guess is one: guess x is accepted
 * if
 *
 *   p(x) ≥ min(E, √E · e^−H(p))      H: entropy of p, in nats
 *
 * Where the target is certain (H near 0) x needs the probability E; where it is uncertain
 * (e^−H < √E), less. √E is the paper's choice for its second parameter.
 *
 * Of all paths whose guesses are accepted the longest is taken, and of several as long the most likely
 * one; the token after it is the target's own sample. So the text is not that of plain decoding, nor
 * distributed like it. What holds: every token of the text is the target's own sample given the text
 * before it, or has at least the probability above; a token with p = 0 is never emitted.
 *
 * Random numbers take no part in the acceptance. Pure functions; any thread. */
#include <math.h>

#include "base/mem.h"
#include "verify/verify.h"

/* The least probability that is accepted, times the row's sum. */
static double least_weight(const float *w, int n, double threshold) {
    double sum = 0, entropy = 0;
    for (int i = 0; i < n; i++)
        sum += w[i] > 0 ? (double)w[i] : 0;
    for (int i = 0; i < n; i++)
        if (w[i] > 0)
            entropy -= (double)w[i] / sum * log((double)w[i] / sum);
    return sum * fmin(threshold, sqrt(threshold) * exp(-entropy));
}

/* Marks the accepted children of a node with the log of their path's weight. */
static void test_children(const so_tree *t, int node, const float *w, double threshold,
                          double *value, bool *passed) {
    double least = least_weight(w, t->n_vocab, threshold);
    for (int i = t->nodes[node].first; i >= 0; i = t->proposals[i].next) {
        int child = t->proposals[i].child;
        double x = (double)w[t->nodes[child].token];
        passed[child] = x > 0 && x >= least;
        value[child] = value[node] + (passed[child] ? log(x) : 0);
    }
}

/* The end of the longest accepted path. */
static int longest(const so_tree *t, const double *value, const bool *passed) {
    int best = 0;
    for (int i = 1; i < t->n_nodes; i++) {
        int deeper = t->nodes[i].depth - t->nodes[best].depth;
        if (passed[i] && (deeper > 0 || (deeper == 0 && value[i] > value[best])))
            best = i;
    }
    return best;
}

/* The tests on the way to `end`: at each node the proposals up to the accepted one. */
static void record(const so_tree *t, int end, so_verdict *v) {
    v->n_accepted = t->nodes[end].depth;
    v->n_tested = 0;
    for (int i = end; i > 0; i = t->nodes[i].parent)
        v->path[t->nodes[i].depth - 1] = (int16_t)i;
    for (int d = 0; d <= v->n_accepted; d++) {
        int node = d == 0 ? 0 : v->path[d - 1];
        for (int i = t->nodes[node].first; i >= 0; i = t->proposals[i].next) {
            v->tested[v->n_tested++] = (int16_t)i;
            if (d < v->n_accepted && t->proposals[i].child == v->path[d])
                break;
        }
    }
}

void so_verify_typical(const so_tree *t, so_verify_row *row, so_verify_choose *choose, void *user,
                       double threshold, so_verdict *out) {
    double value[SO_TREE_MAX] = {0};
    bool passed[SO_TREE_MAX] = {true};
    SO_ASSERT(threshold > 0 && threshold <= 1);
    for (int i = 0; i < t->n_nodes; i++) /* parents come first */
        if (passed[i] && t->nodes[i].first >= 0)
            test_children(t, i, row(user, i), threshold, value, passed);
    int end = longest(t, value, passed);
    record(t, end, out);
    out->bonus = t->nodes[end].first < 0;
    out->token = choose(user, end);
}

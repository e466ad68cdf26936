/* Verification by rejection: the output is distributed exactly as the target's, for any drafter.
 * Speculative sampling (Leviathan et al., Algorithm 1), iterated over the proposals of a node
 * (Stratos, section 2), walked down a tree. At one position, given the text before it:
 *
 *   p           the target's distribution
 *   x₁, x₂, …   the proposals, in draw order
 *   q₁, q₂, …   what each was drawn from
 *   r           what is still owed
 *
 *   r ← p
 *   for each k:  with probability min(1, r(x_k)/q_k(x_k))   emit x_k and go on below its node
 *                else                                       r ← norm(max(0, r − q_k))
 *   at the end:  emit a draw from r; the round is over
 *
 * Knows trees, rows and chance; refuses to know models, caches or time. Pure: any thread with its
 * own scratch. The proof comes first, then eighty lines of code. */
#include <math.h>

#include "base/mem.h"
#include "verify/verify.h"

/* Why the emitted token is distributed as p.
 *
 * 1. One proposal. P(x is accepted) = q(x)·min(1, r(x)/q(x)) = min(q(x), r(x)). A rejection has the
 *    chance 1 − Σ min(q, r), which is also the mass of max(0, r − q) = r − min(q, r). So a draw
 *    from its norm after a rejection adds exactly max(0, r − q), and the sum of both parts is r.
 * 2. Several. The draw after a rejection may be made in any way that has its distribution, so also
 *    by 1 with the next proposal, and so on. Needed: given all that led to its test, x_k is
 *    distributed as q_k. Independent draws in draw order are. Draws that were sorted or dropped by
 *    value, or tested once though made twice, are not.
 * 3. Point mass. A chosen x is a draw from q = 1 on x: accept with r(x), else r(x) ← 0. This is
 *    exact given x, hence however x was come by, so long as no number used below chose it.
 * 4. Without replacement. Given its row's earlier draws, x_k is distributed as q without them,
 *    renormalised. With that as q_k, 2 holds for each value of those draws, so for their mixture.
 * 5. Down the tree. The proposals under a node were drawn given the text up to it, and no test so
 *    far has looked at them; so 1 to 4 hold at the next position with its own p. A node with two
 *    proposals is reached when either is accepted: two draws, two tests.
 * 6. Round after round. Every position is distributed as p given the text before it; what was not
 *    accepted is forgotten unread, and the next round starts from the text alone.
 *
 * Hence the rule of sight for drafters: whether, where and in which order a proposal is tested may
 * depend on the context, on whole rows and on accepted tokens, never on the value of the drawn
 * token nor on a number used below. The lossless suite breaks the rule in every way we know of and
 * must notice each.
 *
 * Lenient, L < 1: accept with min(1, r(x)/(L·q(x))), the residual as above. Claim: s ≤ p/L for the
 * emitted s. Let b = Σ min(q, r/L) be the acceptance, a = Σ min(q, r) ≤ b, r' = max(0, r − q)/(1−a)
 * and s' ≤ r'/L what later proposals make of r'. Then s = min(q, r/L) + (1−b)·s'. Where r ≤ q,
 * s ≤ r/L. Where r > q, s ≤ q + (r − q)/L ≤ r/L. By induction over the proposals, s ≤ p/L.
 * The paper leaves the residual open. max(0, r − L·q) keeps the bound too, but adds mass where the
 * accepted part already exceeds r. Ours adds none there: no choice is nearer to p in variation.
 *
 * Rows from outside. A row is weights: q is row/Σrow, whatever the sum. A proposal that its row
 * cannot have drawn (a negative, NaN or infinite entry, no mass, 0 at the token) is tested as a
 * point mass, exact by 3. Where p is 0 nothing is ever emitted.
 *
 * Rounding. r is kept in double, not normalised, beside its mass. Where a rejection leaves no mass,
 * which only rounding can do, r stays what it was. */

typedef struct walk {
    const so_tree *t;
    so_chance *chance;
    double lenience;
    so_verdict *out;
    double *r, r_mass; /* what is owed at this position, [n_vocab], and its sum */
    double *q, q_mass; /* of the proposal under test; mass 0: a point mass */
} walk;

enum { BLOCK = 64 };

/* Four lanes joined in a fixed order: one lane would wait for its own last addition. */
static double sum(const double *w, int n) {
    double s[4] = {0};
    int i = 0;
    for (; i + 4 <= n; i += 4) {
        s[0] += w[i];
        s[1] += w[i + 1];
        s[2] += w[i + 2];
        s[3] += w[i + 3];
    }
    for (; i < n; i++)
        s[0] += w[i];
    return (s[0] + s[1]) + (s[2] + s[3]);
}

/* A row as doubles, with `other` for what is no weight (negative or NaN); returns the mass. Blocks
 * of a constant length, so that the compiler uses vectors. */
static double load(const float *row, int n, float other, double *out) {
    float w[BLOCK];
    int i = 0;
    for (; i + BLOCK <= n; i += BLOCK) {
        for (int k = 0; k < BLOCK; k++)
            w[k] = row[i + k] >= 0 ? row[i + k] : other;
        for (int k = 0; k < BLOCK; k++)
            out[i + k] = (double)w[k];
    }
    for (; i < n; i++)
        out[i] = (double)(row[i] >= 0 ? row[i] : other);
    return sum(out, n);
}

static void load_p(walk *w, const float *p) {
    w->r_mass = load(p, w->t->n_vocab, 0, w->r);
    SO_ASSERT(w->r_mass > 0 && isfinite(w->r_mass)); /* standardising refuses such logits */
}

/* The distribution that proposal i of `node` was drawn from (steps 3 and 4). */
static void load_q(walk *w, int node, int i) {
    const so_tree *t = w->t;
    const so_proposal *p = &t->proposals[i];
    w->q_mass = 0;
    if (p->kind == SO_Q_POINT)
        return;
    double mass = load(so_tree_row(t, p->row), t->n_vocab, NAN, w->q);
    if (p->kind == SO_Q_ROW_SET) {
        for (int k = t->nodes[node].first; k != i; k = t->proposals[k].next)
            if (t->proposals[k].kind == SO_Q_ROW_SET && t->proposals[k].row == p->row)
                w->q[t->nodes[t->proposals[k].child].token] = 0;
        mass = sum(w->q, t->n_vocab);
    }
    if (isfinite(mass) && w->q[t->nodes[p->child].token] > 0)
        w->q_mass = mass;
}

/* r ← max(0, r − q), both scaled to r's mass. */
static void subtract(walk *w, int32_t x) {
    int n = w->t->n_vocab;
    double mass, was = w->r[x];
    if (w->q_mass > 0) {
        double scale = w->r_mass / w->q_mass, *rest = w->q;
        for (int i = 0; i < n; i++)
            rest[i] = SO_MAX(0, w->r[i] - scale * w->q[i]);
        if ((mass = sum(rest, n)) > 0) {
            w->q = w->r;
            w->r = rest;
            w->r_mass = mass;
        }
        return;
    }
    w->r[x] = 0;
    if ((mass = sum(w->r, n)) > 0)
        w->r_mass = mass;
    else
        w->r[x] = was;
}

static uint32_t position_after(const so_tree *t, int node) {
    return (uint32_t)(t->root_pos + t->nodes[node].depth + 1);
}

/* Tests the proposals of `node` in draw order: the accepted child, or −1 with r what is left. */
static int test_proposals(walk *w, int node) {
    const so_tree *t = w->t;
    uint32_t index = 0;
    for (int i = t->nodes[node].first; i >= 0; i = t->proposals[i].next) {
        int child = t->proposals[i].child;
        int32_t x = t->nodes[child].token;
        load_q(w, node, i);
        double q = w->q_mass > 0 ? w->q[x] / w->q_mass : 1;
        w->out->tested[w->out->n_tested++] = (int16_t)i;
        if (w->chance->accept(w->chance, position_after(t, node), index++, w->r[x] / w->r_mass,
                              w->lenience * q))
            return child;
        subtract(w, x);
    }
    return -1;
}

void so_verify_reject(const so_tree *t, so_verify_row *row, void *user, so_chance *chance,
                      double lenience, double *scratch, so_verdict *out) {
    SO_ASSERT(lenience > 0 && lenience <= 1);
    walk w = {t, chance, lenience, out, scratch, 0, scratch + t->n_vocab, 0};
    int node = 0, child;
    out->n_accepted = out->n_tested = 0;
    for (load_p(&w, row(user, node)); (child = test_proposals(&w, node)) >= 0;
         load_p(&w, row(user, node))) {
        out->path[out->n_accepted++] = (int16_t)child;
        node = child;
    }
    out->token = chance->draw(chance, position_after(t, node), w.r, t->n_vocab, w.r_mass);
    out->bonus = t->nodes[node].first < 0;
}

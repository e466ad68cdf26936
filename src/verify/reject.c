/* Verification by rejection: for any drafter, the emitted text has exactly the distribution that
 * the target alone would give it. This is speculative sampling (Leviathan et al., Algorithm 1),
 * iterated over the proposals of a node (Stratos, section 2) and walked down a tree.
 *
 * At one position, given the text before it:
 *
 *   p           the target's distribution
 *   x₁, x₂, …   the proposals, in the order in which they were drawn
 *   q₁, q₂, …   the distribution that each was drawn from
 *   r           the residual: the distribution that the emitted token must still have
 *
 *   r ← p
 *   for each k:  with probability min(1, r(x_k)/q_k(x_k))   accept: emit x_k, continue at its node
 *                else                                       reject: r ← norm(max(0, r − q_k))
 *   at the end:  emit a token sampled from r; the round is over
 *
 * Uses trees, rows and a source of random numbers; no models, caches or clocks. Pure functions; any
 * thread, with its own scratch memory. The proof comes first, then the code. */
#include <math.h>

#include "base/mem.h"
#include "base/pick.h"
#include "verify/sums.h"
#include "verify/verify.h"

/* Claim. The token emitted at a position is distributed as p, given the text before it.
 *
 * Proof.
 *
 * 1. One proposal. x is drawn from q and accepted with probability min(1, r(x)/q(x)), so it is
 *    emitted by acceptance with probability q(x)·min(1, r(x)/q(x)) = min(q(x), r(x)).
 *    The probability of a rejection is 1 − Σ min(q, r). This is also the mass of
 *    max(0, r − q) = r − min(q, r). So sampling from norm(max(0, r − q)) after a rejection emits x
 *    with probability max(0, r(x) − q(x)). The two parts add up to r(x).
 *
 * 2. Several proposals. After a rejection the token must be sampled from the new r. Any procedure
 *    with that distribution will do, including step 1 with the next proposal, and so on.
 *    Condition: given everything that led to its test, x_k is distributed as q_k.
 *    Independent draws, tested in draw order, satisfy it. Draws that were sorted or dropped by
 *    value do not, nor does a token that was drawn twice and is tested once.
 *    Whether there is a further proposal, and its q, may depend on the values of the earlier ones
 *    (in `a+b` the stage `b` looks at the tree that `a` drafted): with it or without it, the token
 *    emitted after them has the distribution r. The same holds for draws deeper in the tree. If two
 *    proposals of a parent have the same token, they share a node. A rejection of the first leaves
 *    r(x_k) = 0, so the second is rejected too. The node is therefore entered only through its
 *    first proposal, and everything below the node was drawn later than that proposal.
 *
 * 3. Point mass. A token x that was chosen, not drawn, is a draw from the q with q(x) = 1: accept
 *    with probability r(x), else r(x) ← 0. This is exact given x. So it does not matter how x was
 *    chosen, provided that no random number used below took part in the choice.
 *
 * 4. Without replacement. Given the earlier draws from its row, x_k is distributed as q without
 *    those tokens, renormalised. With that distribution as q_k, step 2 holds for each value of the
 *    earlier draws, hence for their mixture.
 *
 * 5. Down the tree. The proposals under a node were drawn given the text up to that node, and no
 *    test so far has depended on them. So steps 1 to 4 hold at the next position with its own p.
 *    If two proposals share a node and the first is rejected, the second is still tested. It is
 *    always rejected (step 2), but its q must be subtracted from r: it was drawn.
 *
 * 6. Bonus token. After a node without proposals, any token sampled from p with random numbers not
 *    used elsewhere is correct. The target's plain sample (so_verify_rng.choose) is one; it does
 *    not need p in memory.
 *
 * 7. Round after round. Every position is distributed as p given the text before it. Proposals that
 *    were not accepted are discarded without influence, and the next round starts from the text
 *    alone.
 *
 * 8. Reused seeds. The probabilities above are over the random numbers used below and in drawing
 *    the proposals. Given everything that decides which proposals are made and whether they are
 *    tested, those numbers must still be uniform. A drafter that has seen a text, or verdicts, made
 *    with the same numbers has information about the numbers: it can propose the token that they
 *    accept. So two requests may share numbers only if their proposals are the same function of
 *    them. Two weaker remedies fail. Fresh numbers for the tests alone are not enough, because
 *    proposals drawn again from known numbers are not draws from q. A key derived from the
 *    proposals is not enough, because a drafter that is rejected under one key can propose under
 *    another. The engine keys all numbers by (seed, nonce): engine/nonce.c has the argument,
 *    tests/engine/test_seed_reuse.c the measurement.
 *
 * Consequence for drafters and planner: the rule of sight (draft/drafter.h). Whether a proposal is
 * made and tested, in which order, and its q may depend on the text, on whole rows, and on earlier
 * proposals and their values. They must not depend on the proposal's own drawn value, nor on a
 * random number used below, in this request or in an earlier one. The lossless test suite breaks
 * the rule in every way we know and must detect each violation.
 *
 * Lenient. With 0 < L < 1, accept with probability min(1, r(x)/(L·q(x))); the residual is as above.
 * Claim: the distribution s of the emitted token satisfies s ≤ p/L.
 * Proof by induction over the proposals. Without proposals s = r ≤ r/L. For one more proposal let
 *    a = Σ min(q, r) and b = Σ min(q, r/L), the probability of acceptance; a ≤ b
 *    r' = max(0, r − q)/(1 − a), the next residual
 *    s' ≤ r'/L, the distribution after a rejection, by induction
 * Then s = min(q, r/L) + (1 − b)·s' ≤ min(q, r/L) + max(0, r − q)/L, since 1 − b ≤ 1 − a.
 *    Where r ≤ q the second term is 0, so s ≤ r/L.
 *    Where r > q, s ≤ q + (r − q)/L ≤ r/L.
 * The first r is p, hence s ≤ p/L.
 * The paper does not define the residual of the lenient form. max(0, r − L·q) keeps the bound too,
 * but it adds mass where the accepted part already exceeds r. Ours adds none there, and no other
 * choice is closer to p in total variation.
 *
 * Rows from outside. A row holds weights: q is row/Σrow for any sum. A proposal that cannot have
 * been drawn from its row (a negative, NaN or infinite entry, no mass, or 0 at the token) is tested
 * as a point mass, which is exact by step 3. A token with p = 0 is never emitted.
 *
 * Rounding. r is kept in double, unnormalised, together with its mass. If a rejection leaves no
 * mass, which only rounding can cause, r keeps its previous value. */

typedef struct walk {
    const so_tree *t;
    so_verify_rng *rng;
    double lenience;
    so_verdict *out;
    const float *p;    /* the target's row at this position, [n_vocab] */
    bool written;      /* r[] holds the residual; if not, `residual` defines it */
    double *r, r_mass; /* the residual, [n_vocab], and its mass */
    double *q, q_mass; /* distribution of the tested proposal; mass 0: a point mass */
    const so_sums_fns *sums;
    so_residual residual; /* the residual, unless it is written; scale 0: p */
    int row;              /* q row of `residual`, and its mass */
    double row_mass;
    bool by_parts; /* r[] holds the sums of the residual's parts */
} walk;

enum { BLOCK = SO_SUMS_PART, LANES = SO_PICK_LANES };

/* Eight lanes, because with one each addition would wait for the one before. */
static double sum(const double *w, int n) {
    double s[LANES] = {0};
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < LANES; k++)
            s[k] += w[i + k];
    for (; i < n; i++)
        s[0] += w[i];
    return so_pick_joined(s);
}

/* Converts a row to doubles, with `other` for entries that are not weights (negative or NaN).
 * Returns the mass. Blocks have a constant length so that the compiler vectorises the loops. */
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

/* --- proposals drawn from one row, the usual case ---
 *
 * After rejections of k proposals from one row q the residual is max(0, p − S·q) with a single number
 * S: the sum of the scales of the rejections, since max(0, max(0, a) − b) = max(0, a − b) for b ≥ 0.
 * This holds without replacement too. There q_k lacks the tokens of earlier draws, but a rejected
 * token has r < q, so its residual is 0 whether it is subtracted again or not; only the mass of q_k
 * differs.
 *
 * Rows are as long as the vocabulary and are usually not in the nearest caches, so they are read as
 * rarely as possible. A test needs one entry of p and of q, and both masses. A rejection needs the
 * mass of the residual and the index at which a sample falls:
 *
 *   by parts    If rng->uniform is given, the sums of parts of 64 entries locate that index, and the
 *               residual is never written to memory.
 *   written     Otherwise, or if a point or another row follows, one pass over p and q writes the
 *               residual to r[].
 *
 * Both add the entries to the same lanes in the same order, so they give the same token. */

/* r ← max(0, p − scale · q); returns the mass of r, added in the order of so_sums_fns.residual. All
 * entries of q must be weights. */
static double subtract_rows(const float *p, const float *q, double scale, int n, double *r) {
    float w[BLOCK];
    double s[LANES] = {0};
    int i = 0;
    for (; i + BLOCK <= n; i += BLOCK) {
        for (int k = 0; k < BLOCK; k++)
            w[k] = p[i + k] >= 0 ? p[i + k] : 0;
        for (int k = 0; k < BLOCK; k++)
            r[i + k] = SO_MAX(0, (double)w[k] - scale * (double)q[i + k]);
        double part[LANES] = {0};
        for (int k = 0; k < BLOCK; k += LANES)
            for (int l = 0; l < LANES; l++)
                part[l] += r[i + k + l];
        for (int l = 0; l < LANES; l++)
            s[l] += part[l];
    }
    for (; i < n; i++) {
        r[i] = SO_MAX(0, (double)(p[i] >= 0 ? p[i] : 0) - scale * (double)q[i]);
        s[0] += r[i];
    }
    return so_pick_joined(s);
}

static void load_p(walk *w, const float *p) {
    w->p = p;
    w->written = w->by_parts = false;
    w->residual = (so_residual){p, NULL, 0};
    w->r_mass = w->sums->mass(p, w->t->n_vocab, 0);
    SO_ASSERT(w->r_mass > 0 && isfinite(w->r_mass)); /* the sampler refuses logits without mass */
}

/* --- any number of proposals, of any kind --- */

static void write_r(walk *w) {
    int n = w->t->n_vocab;
    const so_residual *s = &w->residual;
    if (!w->written)
        w->r_mass =
            s->scale > 0 ? subtract_rows(s->p, s->q, s->scale, n, w->r) : load(w->p, n, 0, w->r);
    w->written = true;
    w->by_parts = false;
}

/* Loads the distribution that proposal i of `node` was drawn from (proof, steps 3 and 4). */
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

/* r ← max(0, r − q), with q scaled to the mass of r. */
static void subtract(walk *w, int32_t x) {
    int n = w->t->n_vocab;
    double mass, was = w->r[x];
    if (w->q_mass > 0) {
        double scale = w->r_mass / w->q_mass, *left = w->q;
        for (int i = 0; i < n; i++)
            left[i] = SO_MAX(0, w->r[i] - scale * w->q[i]);
        if ((mass = sum(left, n)) > 0) {
            w->q = w->r;
            w->r = left;
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

static bool accepts(walk *w, int node, uint32_t index, double p, double q) {
    return w->rng->accept(w->rng, position_after(w->t, node), index, p, w->lenience * q);
}

/* Tests a proposal with r and q written out as doubles. */
static bool test(walk *w, int node, int i, uint32_t index) {
    int32_t x = w->t->nodes[w->t->proposals[i].child].token;
    write_r(w);
    load_q(w, node, i);
    double q = w->q_mass > 0 ? w->q[x] / w->q_mass : 1;
    if (accepts(w, node, index, w->r[x] / w->r_mass, q))
        return true;
    subtract(w, x);
    return false;
}

/* The mass of the row that proposal i was drawn from, without the tokens that earlier draws without
 * replacement took. */
static double mass_left(const walk *w, int node, int i) {
    const so_tree *t = w->t;
    const float *q = w->residual.q;
    double mass = w->row_mass;
    for (int k = t->nodes[node].first; t->proposals[i].kind == SO_Q_ROW_SET && k != i;
         k = t->proposals[k].next)
        if (t->proposals[k].kind == SO_Q_ROW_SET)
            mass -= (double)q[t->nodes[t->proposals[k].child].token];
    return SO_MAX(mass, (double)q[t->nodes[t->proposals[i].child].token]);
}

/* Tests a drawn proposal directly on the rows p and q, if the row is valid and all proposals of the
 * node so far were drawn from it. *done: whether the test was made; if not, `test` has to make it. */
static bool test_row(walk *w, int node, int i, uint32_t index, bool *done) {
    const so_proposal *p = &w->t->proposals[i];
    int32_t x = w->t->nodes[p->child].token;
    int n = w->t->n_vocab;
    *done = false;
    if (p->kind == SO_Q_POINT || w->written || (index > 0 && p->row != w->row))
        return false;
    const float *q = so_tree_row(w->t, p->row);
    if (index == 0) {
        w->row = p->row;
        w->row_mass = w->sums->mass(q, n, NAN);
        w->residual = (so_residual){w->p, q, 0};
    }
    *done = isfinite(w->row_mass) && q[x] > 0;
    if (!*done)
        return false;
    double mass = mass_left(w, node, i);
    if (accepts(w, node, index, so_residual_at(&w->residual, x) / w->r_mass, (double)q[x] / mass))
        return true;
    so_residual next = {w->p, q, w->residual.scale + w->r_mass / mass};
    double left = w->sums->residual(&next, n, w->r);
    w->by_parts = w->rng->uniform && left > 0;
    if (left > 0) {
        w->residual = next;
        w->r_mass = left;
    }
    return false;
}

/* Tests the first proposal of a node with a lower bound of its probability p(x). Returns the
 * accepted child. −1: not decided; the row decides, by the same random number, so nothing is
 * recorded. */
static int accept_by_bound(walk *w, int node) {
    int i = w->t->nodes[node].first, n = w->t->n_vocab;
    const so_proposal *p = &w->t->proposals[i];
    double q = 1, bound = w->rng->first_at_least ? w->rng->first_at_least(w->rng, node) : 0;
    if (!(bound > 0))
        return -1;
    if (p->kind != SO_Q_POINT) {
        const float *row = so_tree_row(w->t, p->row);
        double mass = w->sums->mass(row, n, NAN);
        q = (double)row[w->t->nodes[p->child].token] / mass;
        if (!isfinite(mass) || !(q > 0))
            return -1;
    }
    if (!accepts(w, node, 0, bound, q))
        return -1;
    w->out->tested[w->out->n_tested++] = (int16_t)i;
    return p->child;
}

/* Tests the proposals of `node` in draw order. Returns the accepted child, or −1 with r as the
 * residual. */
static int test_proposals(walk *w, int node) {
    const so_tree *t = w->t;
    uint32_t index = 0;
    for (int i = t->nodes[node].first; i >= 0; i = t->proposals[i].next, index++) {
        bool done = false;
        w->out->tested[w->out->n_tested++] = (int16_t)i;
        bool accepted = test_row(w, node, i, index, &done);
        if (accepted || (!done && test(w, node, i, index)))
            return t->proposals[i].child;
    }
    return -1;
}

/* The residual by parts: r[] holds the sums of whole parts, single entries are computed. */
static double part_sum(const void *w, int32_t first) {
    return ((const walk *)w)->r[first / SO_PICK_PART];
}

static double residual_weight(const void *w, int32_t i) {
    return so_residual_at(&((const walk *)w)->residual, i);
}

/* Gives the token that so_verify_rng_keyed would draw: the sums of parts use the same lanes
 * (sums.h). */
static int32_t sample_by_parts(const walk *w, double u) {
    int32_t i = so_pick(w, w->t->n_vocab, u * w->r_mass, part_sum, residual_weight);
    SO_ASSERT_OP(i, >=, 0);
    return i;
}

/* Samples the token after `node` from the residual. */
static int32_t sample_residual(walk *w, int node) {
    uint32_t position = position_after(w->t, node);
    if (w->by_parts)
        return sample_by_parts(w, w->rng->uniform(w->rng, position));
    write_r(w);
    return w->rng->draw(w->rng, position, w->r, w->t->n_vocab, w->r_mass);
}

void so_verify_reject(const so_tree *t, so_verify_row *row, void *user, so_verify_rng *rng,
                      double lenience, double *scratch, so_verdict *out) {
    SO_ASSERT(lenience > 0 && lenience <= 1);
    walk w = {.t = t, .rng = rng, .lenience = lenience, .out = out, .sums = so_sums()};
    int node = 0;
    w.r = scratch;
    w.q = scratch + t->n_vocab;
    out->n_accepted = out->n_tested = 0;
    while (t->nodes[node].first >= 0) {
        int child = accept_by_bound(&w, node);
        if (child < 0) {
            load_p(&w, row(user, node));
            child = test_proposals(&w, node);
        }
        if (child < 0)
            break;
        out->path[out->n_accepted++] = (int16_t)child;
        node = child;
    }
    out->bonus = t->nodes[node].first < 0;
    if (out->bonus && rng->choose) {
        out->token = rng->choose(rng, node);
        return;
    }
    if (out->bonus)
        load_p(&w, row(user, node));
    out->token = sample_residual(&w, node);
}

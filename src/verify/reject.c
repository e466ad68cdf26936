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
 * own scratch. The proof comes first, then the code. */
#include <math.h>

#include "base/mem.h"
#include "base/pick.h"
#include "verify/sums.h"
#include "verify/verify.h"

/* Why the emitted token is distributed as p.
 *
 * 1. One proposal. P(x is accepted) = q(x)·min(1, r(x)/q(x)) = min(q(x), r(x)). A rejection has the
 *    chance 1 − Σ min(q, r), which is also the mass of max(0, r − q) = r − min(q, r). So a draw
 *    from its norm after a rejection adds exactly max(0, r − q), and the sum of both parts is r.
 * 2. Several. The draw after a rejection may be made in any way that has its distribution, so also
 *    by 1 with the next proposal, and so on. Needed: given all that led to its test, x_k is
 *    distributed as q_k. Independent draws in draw order are. Draws that were sorted or dropped by
 *    value, or tested once though made twice, are not. Whether there is a further proposal, and its
 *    q, may depend on the values of those before it (a merged drafter looks at the tree): with it
 *    or without it, what is emitted after them has the distribution r. The same holds for draws
 *    deeper in the tree: a rejection leaves r(x_k) = 0, so a node is entered by the first of its
 *    proposals or not at all, and everything below it was drawn later than that one.
 * 3. Point mass. A chosen x is a draw from q = 1 on x: accept with r(x), else r(x) ← 0. This is
 *    exact given x, hence however x was come by, so long as no number used below chose it.
 * 4. Without replacement. Given its row's earlier draws, x_k is distributed as q without them,
 *    renormalised. With that as q_k, 2 holds for each value of those draws, so for their mixture.
 * 5. Down the tree. The proposals under a node were drawn given the text up to it, and no test so
 *    far has looked at them; so 1 to 4 hold at the next position with its own p. A node with two
 *    proposals is reached when either is accepted: two draws, two tests.
 * 6. Behind the last node nothing was proposed: any draw from p will do whose numbers nobody has
 *    used, so also the target's plain one (so_chance.choose), which need not write p down.
 * 7. Round after round. Every position is distributed as p given the text before it; what was not
 *    accepted is forgotten unread, and the next round starts from the text alone.
 * 8. Seeds that are used again. All of this is over the numbers used below and in drawing the
 *    proposals: given what decided which proposals are made and whether they are tested, those
 *    numbers must still be uniform. A proposer who has seen a text, or verdicts, that came from
 *    the same numbers has seen the numbers: he proposes the token that they accept. So no two
 *    requests may share them unless their proposals are the same function of them. Keying the tests
 *    afresh is not enough (proposals drawn again from known numbers are no draws from q), nor is a
 *    key made from the proposals (who is refused under one key proposes under another). The engine
 *    keys all of them by (seed, nonce): engine/nonce.c has the argument,
 *    tests/engine/test_seed_reuse.c the measurement.
 *
 * Hence the rule of sight for drafters: whether, where and in which order a proposal is tested may
 * depend on the context, on whole rows, on accepted tokens and on earlier proposals, never on its
 * own drawn value nor on a number used below, in this request or in one before it. The lossless
 * suite breaks the rule in every way we know of and must notice each.
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
    const float *p;    /* the target's row at this position, [n_vocab] */
    bool written;      /* r has been written down; before, it is p */
    double *r, r_mass; /* what is owed at this position, [n_vocab], and its sum */
    double *q, q_mass; /* of the proposal under test; mass 0: a point mass */
    const so_sums_fns *sums;
    so_rest rest; /* where `looked`: r, whose parts' sums stand in place of it */
    bool looked;
} walk;

enum { BLOCK = 64, LANES = 8 };

/* Lanes joined in a fixed order: one lane would wait for its own last addition. */
static double joined(const double s[LANES]) {
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

static double sum(const double *w, int n) {
    double s[LANES] = {0};
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < LANES; k++)
            s[k] += w[i + k];
    for (; i < n; i++)
        s[0] += w[i];
    return joined(s);
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

/* --- one drawn proposal, which is the usual case ---
 *
 * Rows are as long as the vocabulary and come from far away in the cache. One test needs two of
 * their numbers and their masses. A rejection needs r's mass and the place where a draw falls:
 * where chance says by which number it draws and nothing else is tested, sums of parts find that
 * place, and r is not written down at all; else p, q and r are gone through once. All sums run by
 * index in the same lanes, so that either way gives the same token. */

/* r ← max(0, p − scale · q); gives the mass. q has no entry that is no weight. */
static double subtract_rows(const float *p, const float *q, double scale, int n, double *r) {
    float w[BLOCK];
    double s[LANES] = {0};
    int i = 0;
    for (; i + BLOCK <= n; i += BLOCK) {
        for (int k = 0; k < BLOCK; k++)
            w[k] = p[i + k] >= 0 ? p[i + k] : 0;
        for (int k = 0; k < BLOCK; k++)
            r[i + k] = SO_MAX(0, (double)w[k] - scale * (double)q[i + k]);
        for (int k = 0; k < BLOCK; k += LANES)
            for (int l = 0; l < LANES; l++)
                s[l] += r[i + k + l];
    }
    for (; i < n; i++) {
        r[i] = SO_MAX(0, (double)(p[i] >= 0 ? p[i] : 0) - scale * (double)q[i]);
        s[0] += r[i];
    }
    return joined(s);
}

static void load_p(walk *w, const float *p) {
    w->p = p;
    w->written = false;
    w->r_mass = w->sums->mass(p, w->t->n_vocab, 0);
    SO_ASSERT(w->r_mass > 0 && isfinite(w->r_mass)); /* standardising refuses such logits */
}

/* --- any number of proposals, of any kind --- */

static void write_r(walk *w) {
    if (!w->written)
        w->r_mass = load(w->p, w->t->n_vocab, 0, w->r);
    w->written = true;
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

static bool accepts(walk *w, int node, uint32_t index, double p, double q) {
    return w->chance->accept(w->chance, position_after(w->t, node), index, p, w->lenience * q);
}

/* Tests a proposal by r and q as numbers of their own. */
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

/* Tests the first proposal of a node by the rows as they are, where it was drawn from one; *done:
 * whether it was. */
static bool test_first(walk *w, int node, int i, bool *done) {
    const so_proposal *p = &w->t->proposals[i];
    int32_t x = w->t->nodes[p->child].token;
    int n = w->t->n_vocab;
    if (p->kind == SO_Q_POINT || w->written)
        return *done = false;
    const float *q = so_tree_row(w->t, p->row);
    double mass = w->sums->mass(q, n, NAN);
    *done = isfinite(mass) && q[x] > 0;
    if (!*done)
        return false;
    double px = w->p[x] >= 0 ? (double)w->p[x] : 0;
    if (accepts(w, node, 0, px / w->r_mass, (double)q[x] / mass))
        return true;
    w->rest = (so_rest){w->p, q, w->r_mass / mass};
    bool look = w->chance->uniform && p->next < 0;
    double rest =
        look ? w->sums->rest(&w->rest, n, w->r) : subtract_rows(w->p, q, w->rest.scale, n, w->r);
    if (rest > 0) {
        w->r_mass = rest;
        w->looked = look;
        w->written = !look;
    }
    return false;
}

/* Tests the proposals of `node` in draw order: the accepted child, or −1 with r what is left. */
static int test_proposals(walk *w, int node) {
    const so_tree *t = w->t;
    uint32_t index = 0;
    for (int i = t->nodes[node].first; i >= 0; i = t->proposals[i].next, index++) {
        bool done = false;
        w->out->tested[w->out->n_tested++] = (int16_t)i;
        bool stands = index == 0 && test_first(w, node, i, &done);
        if (stands || (!done && test(w, node, i, index)))
            return t->proposals[i].child;
    }
    return -1;
}

/* r where it is `looked`: the sums of its parts stand in place of it. */
static double looked_part(const void *w, int32_t first) {
    return ((const walk *)w)->r[first / SO_PICK_PART];
}

static double looked_weight(const void *w, int32_t i) {
    return so_rest_at(&((const walk *)w)->rest, i);
}

/* As so_chance_keyed draws: its parts have the same lanes (sums.h). */
static int32_t draw_looked(const walk *w, double u) {
    int32_t i = so_pick(w, w->t->n_vocab, u * w->r_mass, looked_part, looked_weight);
    SO_ASSERT_OP(i, >=, 0);
    return i;
}

/* The token after `node`, from r. */
static int32_t draw_rest(walk *w, int node) {
    uint32_t position = position_after(w->t, node);
    if (w->looked)
        return draw_looked(w, w->chance->uniform(w->chance, position));
    write_r(w);
    return w->chance->draw(w->chance, position, w->r, w->t->n_vocab, w->r_mass);
}

void so_verify_reject(const so_tree *t, so_verify_row *row, void *user, so_chance *chance,
                      double lenience, double *scratch, so_verdict *out) {
    SO_ASSERT(lenience > 0 && lenience <= 1);
    walk w = {.t = t, .chance = chance, .lenience = lenience, .out = out, .sums = so_sums()};
    int node = 0;
    w.r = scratch;
    w.q = scratch + t->n_vocab;
    out->n_accepted = out->n_tested = 0;
    while (t->nodes[node].first >= 0) {
        load_p(&w, row(user, node));
        int child = test_proposals(&w, node);
        if (child < 0)
            break;
        out->path[out->n_accepted++] = (int16_t)child;
        node = child;
    }
    out->bonus = t->nodes[node].first < 0;
    if (out->bonus && chance->choose) {
        out->token = chance->choose(chance, node);
        return;
    }
    if (out->bonus)
        load_p(&w, row(user, node));
    out->token = draw_rest(&w, node);
}

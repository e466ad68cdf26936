/* The search over prefixes of the sorted guesses, and the balance (planner.h has the argument).
 *
 * Guesses are put into one heap by the chance of their whole path; popping them gives the order.
 * After each the objective tokens/(t(rows) + drafting) is computed with the real curve, so a step
 * in t(n) is found wherever it is. Guesses below one in a thousand are left out. With drafting
 * steps shared by several chains (step_ms) the order is no longer provably best for more than one
 * request, but no plan is taken that is worse than plain decoding.
 *
 * Risk of a plan = what it costs beyond a plain pass × how little is known of its drafters. What is
 * known well needs no insurance: the objective has already weighed it. */
#include "draft/planner.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

static const double START = 0.5, EARN = 0.0065, MOST = 16, LEAST = -0.15; /* plain passes */
static const double PROBE_EVERY = 8; /* tokens; one that was right is followed up at once */
static const double ALWAYS = 0.02;   /* risked whatever the balance: what is known well goes on */
static const double MARGIN = 1.02;   /* a plan that promises less than this is noise */
static const float MIN_VALUE = 0.001f;

typedef struct guess {
    float value; /* chance of the whole path */
    float sure;  /* evidence for it, of a guess at depth 1; else −1 */
    double cost_ms;
    double later_ms; /* of what is spent on it now: for steps to come */
    int owner, node;
    int depth;
} guess;

struct so_planner {
    int length;
    so_curve curve;
    double balance;
    guess *heap; /* [cap]; popped guesses end up behind the heap, the last popped first */
    int n, cap;
    int turn;           /* whose probe is next */
    double since_probe; /* tokens per request */
    bool probing;       /* in this step; from lengths to observe */
};

so_planner *so_planner_create(int length) {
    SO_ASSERT_OP(length, >=, 0);
    so_planner *p = SO_NEW(so_planner);
    p->length = length;
    p->balance = START;
    return p;
}

void so_planner_free(so_planner *p) {
    if (!p)
        return;
    free(p->heap);
    free(p);
}

so_curve *so_planner_curve(so_planner *p) { return &p->curve; }
double so_planner_balance(const so_planner *p) { return p->balance; }

/* The heap. Equal values come out by owner, then by node, so that parents precede children and the
 * order is a function of the input. */

static bool before(const guess *a, const guess *b) {
    if (a->value != b->value)
        return a->value > b->value;
    return a->owner != b->owner ? a->owner < b->owner : a->node < b->node;
}

static void sift_down(guess *h, int n, int i) {
    guess g = h[i];
    for (int child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && before(&h[child + 1], &h[child]))
            child++;
        if (before(&g, &h[child]))
            break;
        h[i] = h[child];
    }
    h[i] = g;
}

static void heapify(so_planner *p) {
    for (int i = p->n / 2 - 1; i >= 0; i--)
        sift_down(p->heap, p->n, i);
}

/* The next best of n guesses; it goes behind the heap's end, so that the k-th popped of N stays at
 * N − 1 − k. */
static const guess *pop(so_planner *p, int n) {
    guess top = p->heap[0];
    p->heap[0] = p->heap[n - 1];
    p->heap[n - 1] = top;
    if (n > 1)
        sift_down(p->heap, n - 1, 0);
    return &p->heap[n - 1];
}

static void push(so_planner *p, guess g) {
    if (!(g.value >= MIN_VALUE))
        return;
    if (p->n == p->cap) {
        p->cap = p->cap ? 2 * p->cap : 256;
        p->heap = so_realloc(p->heap, (size_t)p->cap * sizeof *p->heap);
    }
    p->heap[p->n++] = g;
}

static float chance(float x) { return x > 0 ? SO_MIN(x, 1.0f) : 0; } /* NaN is none */

/* The state of a growing plan. */
typedef struct sum {
    double tokens, draft_ms, later_ms, sure;
    int rows, depth, n_sure;
} sum;

static void add(sum *s, const guess *g) {
    s->tokens += (double)g->value;
    s->draft_ms += g->cost_ms;
    s->later_ms += g->later_ms;
    s->rows++;
    s->depth = SO_MAX(s->depth, g->depth);
    if (g->sure >= 0) {
        s->sure += (double)g->sure;
        s->n_sure++;
    }
}

static double total_ms(const so_planner *p, const sum *s, const so_plan_env *env) {
    return so_curve_ms(&p->curve, s->rows) + s->draft_ms + env->step_ms * s->depth;
}

static double unsure(const sum *s) { return s->n_sure > 0 ? 1 - s->sure / s->n_sure : 1; }

/* What was spent already is at stake no more. */
static double risk(const sum *s, double ms, double plain_ms, const so_plan_env *env) {
    return ((ms + s->later_ms - env->draft_ms) / plain_ms - 1) * unsure(s);
}

static void note(so_plan *out, const sum *s, double ms) {
    out->tokens = s->tokens;
    out->ms = ms;
    out->n_rows = s->rows;
    out->unsure = unsure(s);
}

/* How many of the heap's guesses to take, best first, beyond what `s` holds. */
static int search(so_planner *p, sum s, const so_plan_env *env, so_plan *out) {
    double ms = total_ms(p, &s, env);
    double base = s.tokens / ms, best = base;
    int take = 0;
    note(out, &s, ms);
    if (!(ms > 0)) /* nothing is known of the costs: a plain pass first */
        return 0;
    heapify(p);
    for (int k = 0; k < p->n && s.rows < env->max_rows; k++) {
        add(&s, pop(p, p->n - k));
        ms = total_ms(p, &s, env);
        double rate = s.tokens / ms;
        if (rate <= best || rate < base * MARGIN ||
            risk(&s, ms, out->plain_ms, env) > SO_MAX(p->balance, ALWAYS))
            continue;
        best = rate;
        take = k + 1;
        note(out, &s, ms);
    }
    return take;
}

static const guess *taken(const so_planner *p, int k) { return &p->heap[p->n - 1 - k]; }

static so_plan start_plan(const so_planner *p, int n, const so_plan_env *env) {
    return (so_plan){.n_requests = n, .plain_ms = so_curve_ms(&p->curve, n + env->other_rows)};
}

/* Lengths before drafting. */

static void fixed_lengths(so_planner *p, so_plan_chain *chains, int n, const so_plan_env *env,
                          so_plan *out) {
    sum s = {.tokens = n, .rows = n + env->other_rows, .draft_ms = env->draft_ms};
    for (int i = 0; i < n; i++) {
        int room = SO_MAX(env->max_rows - s.rows, 0);
        float value = 1;
        chains[i].length = SO_MIN(SO_MIN(p->length, chains[i].max_len), room);
        for (int k = 0; k < chains[i].length; k++) {
            value *= chance(chains[i].accept[k]);
            guess g = {.value = value, .sure = -1, .cost_ms = chains[i].node_ms};
            g.depth = k + 1;
            add(&s, &g);
        }
    }
    note(out, &s, total_ms(p, &s, env));
}

/* A step that speculates uses up some two tokens of the horizon. */
static double now_ms(const so_plan_chain *c) {
    return c->once_ms * SO_MIN(1.0, 2 / SO_MAX(c->horizon, 2.0));
}

static guess chain_guess(const so_plan_chain *c, int k, float value) {
    guess g = {.value = value, .sure = -1, .cost_ms = c->node_ms, .node = k, .depth = k + 1};
    if (k == 0) {
        g.sure = (float)c->sure;
        g.cost_ms += now_ms(c);
        g.later_ms = c->once_ms - now_ms(c);
    }
    return g;
}

static void push_chain(so_planner *p, const so_plan_chain *c, int owner) {
    float value = 1;
    for (int k = 0; k < c->max_len; k++) {
        value *= chance(c->accept[k]);
        guess g = chain_guess(c, k, value);
        g.owner = owner;
        push(p, g);
    }
}

double so_planner_worth(const so_planner *p, const so_plan_chain *c, int n,
                        const so_plan_env *env) {
    sum s = {.tokens = n, .rows = n + env->other_rows};
    double plain_ms = so_curve_ms(&p->curve, s.rows), best = 1;
    float value = 1;
    for (int k = 0; k < c->max_len && s.rows < env->max_rows && plain_ms > 0; k++) {
        value *= chance(c->accept[k]);
        guess g = chain_guess(c, k, value);
        add(&s, &g);
        double ms = total_ms(p, &s, env);
        if (risk(&s, ms, plain_ms, env) <= SO_MAX(p->balance, ALWAYS))
            best = SO_MAX(best, s.tokens / n * plain_ms / ms);
    }
    return best;
}

/* Nothing pays. One token for one chain whose quality only a test can show, if it can be paid. */
static void probe(so_planner *p, so_plan_chain *chains, int n, const so_plan_env *env,
                  so_plan *out) {
    for (int i = 0; i < n; i++) {
        so_plan_chain *c = &chains[(p->turn + i) % n];
        sum s = {.tokens = n, .rows = n + env->other_rows, .draft_ms = env->draft_ms};
        if (c->shadowed || c->max_len < 1 || s.rows >= env->max_rows ||
            (!c->hopeful && p->since_probe < PROBE_EVERY))
            continue;
        guess g = chain_guess(c, 0, chance(c->accept[0]));
        g.sure = 0; /* all of it is at stake: it would not be a probe if more were known */
        add(&s, &g);
        double ms = total_ms(p, &s, env);
        if (risk(&s, ms, out->plain_ms, env) > p->balance)
            continue;
        c->length = 1;
        p->since_probe = 0;
        p->turn = (p->turn + i + 1) % n;
        out->probe = true;
        note(out, &s, ms);
        return;
    }
}

void so_planner_lengths(so_planner *p, so_plan_chain *chains, int n, const so_plan_env *env,
                        so_plan *out) {
    *out = start_plan(p, n, env);
    if (p->length > 0) {
        fixed_lengths(p, chains, n, env, out);
        return;
    }
    p->n = 0;
    for (int i = 0; i < n; i++) {
        chains[i].length = 0;
        push_chain(p, &chains[i], i);
    }
    sum s = {.tokens = n, .rows = n + env->other_rows, .draft_ms = env->draft_ms};
    int take = search(p, s, env, out);
    for (int k = 0; k < take; k++)
        chains[taken(p, k)->owner].length++; /* a chain's guesses come in order */
    if (take == 0 && out->plain_ms > 0)
        probe(p, chains, n, env, out);
    p->probing |= out->probe;
}

/* Nodes after drafting. */

/* The guesses of one tree: into `whole`, if it must be taken as it is, or into the heap. */
static void gather(so_planner *p, so_plan_tree *t, int owner, bool fixed, sum *whole) {
    float value[SO_TREE_MAX];
    value[0] = 1;
    memset(t->keep, 0, sizeof t->keep);
    t->keep[0] = true;
    t->n_keep = 0;
    for (int i = 1; i < t->tree->n_nodes; i++) {
        const so_node *node = &t->tree->nodes[i];
        value[i] = value[node->parent] * chance(t->accept[i]);
        guess g = {.value = value[i],
                   .sure = node->depth == 1 ? (float)t->sure : -1,
                   .cost_ms = t->node_ms,
                   .owner = owner,
                   .node = i};
        if (!fixed) {
            push(p, g);
        } else if (p->length == 0 || node->depth <= p->length) {
            t->keep[i] = true;
            t->n_keep++;
            add(whole, &g);
        }
    }
}

void so_planner_choose(so_planner *p, so_plan_tree *trees, int n, const so_plan_env *env,
                       so_plan *out) {
    *out = start_plan(p, n, env);
    out->probe = p->probing;
    sum whole = {.tokens = n, .rows = n + env->other_rows, .draft_ms = env->draft_ms};
    p->n = 0;
    for (int i = 0; i < n; i++)
        gather(p, &trees[i], i,
               p->length > 0 || trees[i].whole || !so_tree_all_points(trees[i].tree), &whole);
    so_plan_env rest = *env;
    rest.step_ms = 0; /* drafting is over */
    int take = search(p, whole, &rest, out);
    for (int k = 0; k < take; k++) {
        so_plan_tree *t = &trees[taken(p, k)->owner];
        t->keep[taken(p, k)->node] = true;
        t->n_keep++;
    }
}

void so_plan_prune(so_tree *t, const bool keep[SO_TREE_MAX]) {
    int16_t to[SO_TREE_MAX];
    int n_nodes = 0, n_proposals = 0;
    for (int i = 0; i < t->n_nodes; i++) {
        to[i] = -1;
        if (!keep[i])
            continue;
        to[i] = (int16_t)n_nodes;
        so_node node = t->nodes[i];
        SO_ASSERT(i == 0 || to[node.parent] >= 0);
        node.parent = i == 0 ? -1 : to[node.parent];
        node.first = node.last = -1;
        t->nodes[n_nodes++] = node;
    }
    for (int i = 0; i < t->n_proposals; i++) { /* by index, which is draw order */
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

/* The balance is kept with the curve's times, not with the clock's: what counts is the decision,
 * and a page fault is not its fault. Nor is bad luck the fault of a drafter that is known well:
 * losses count as far as the plan was unsure, and the estimates see to the rest. */
void so_planner_observe(so_planner *p, const so_plan *plan, double pass_ms, int n_tokens) {
    if (plan->plain_ms > 0 && plan->n_requests > 0) {
        double plain = (double)n_tokens / plan->n_requests; /* passes the tokens would have taken */
        double gain = plan->ms > plan->plain_ms ? plain - plan->ms / plan->plain_ms : 0;
        if (gain < 0 && !plan->probe)
            gain *= plan->unsure;
        double b = p->balance + EARN * plain + gain;
        p->balance = SO_MAX(LEAST, SO_MIN(b, MOST));
        p->since_probe += plain;
    }
    p->probing = false;
    so_curve_observe(&p->curve, plan->n_rows, pass_ms);
}

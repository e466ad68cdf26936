/* Drafting a tree with a model: one pass of the draft model per level, for all branches of all
 * requests together.
 *
 * The root's row comes out of catch-up, which is that of a chain (model.c). Then each pass computes
 * the rows of the branches of the deepest level and adds their children as the next level. The
 * branches of a request are one speculation of the draft's cache, which every level extends
 * (so_seq_extend). It stays open after the call: the next one knows the accepted path and commits
 * it, so accepted tokens are not computed again. Branches without children are never computed.
 *
 * Shapes. k is the number of children of a branch, `nodes` the budget of the whole tree.
 *
 *   points (temperature 0, `match`)      the tokens are the most likely ones, with the target's
 *                                        noise above temperature 0
 *     k=K     the K best of every row, level by level until the budget is used: a Cartesian product.
 *             Of a level that does not fit, the most likely paths
 *     best    the budget's most likely paths, by the product of chances that come from the draft's
 *             own probabilities. After each level all branches compete and the best `nodes` stay.
 *             A path is never more likely than its beginning, so a branch that drops out cannot
 *             return, and what stays is a tree
 *     tree=FILE  the tokens of the shape's ranks (draft/shape.h)
 *   sampled (`reject`)                   by a shape that is fixed before anything is sampled (rule of
 *                                        sight, draft/drafter.h): the budget counts draws
 *     k=K     K independent draws from every row, level by level until the budget is used. Equal
 *             draws share a branch and are proposals of their own. With `distinct` the draws of a
 *             row are without replacement
 *     best    without replacement, in the shape whose draws would be accepted most often if each
 *             draw of a row had the usual acceptance of its rank (RANK_CHANCE)
 *
 * With terms (so_draft_terms) these are limits: a guess is made where it pays, by the estimated
 * chances of its rank and depth, and sampled shapes follow from them, too. Where rows are expensive
 * such a tree is a chain.
 *
 * A level ends a draft early if the cache of the draft has too few pages; what was drafted stays.
 * Refuses what model.c refuses. Thread: the engine thread. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "draft/model_impl.h"

enum { DEFAULT_WIDTH = 16 }; /* of `best` with points: later children are too unlikely to matter */

/* The acceptance of the draws of one row in the order of their tests, each as a fraction of all
 * tests of the row; the last value holds for all later draws. Chosen, not fitted: the first is near
 * the acceptance of SmolLM2's chains at temperature 1, the others are a guess at how it falls. Only
 * the shape of `best` depends on them. */
static const double RANK_CHANCE[] = {0.55, 0.11, 0.05, 0.03, 0.02};

/* SmolLM2 with its registered draft, 16 nodes, 8 prompts: 3.16 tokens per pass with 1, 3.36 with 1.4,
 * 3.28 with 1.8. */
static const double SHARPNESS = 1.4;

/* --- the shape of drawn trees --- */

static double rank_chance(int rank) {
    return RANK_CHANCE[SO_MIN(rank, (int)SO_LEN(RANK_CHANCE) - 1)];
}

/* Chooses the n draws of highest value. A draw's value is that of its parent times rank_chance; the
 * next one is a further draw from the row of a chosen one, or from the root's. */
static void choose_shape(so_model_growth *g, int n, int max_depth, int max_rank) {
    double value[SO_TREE_MAX] = {1};
    int depth[SO_TREE_MAX] = {0}, n_draws[SO_TREE_MAX] = {0}; /* below each node; 0 is the root */
    for (g->n_shape = 1; g->n_shape <= n; g->n_shape++) {
        int best = -1;
        double most = 0;
        for (int k = 0; k < g->n_shape; k++) {
            double v = value[k] * rank_chance(n_draws[k]);
            if (depth[k] < max_depth && n_draws[k] < max_rank && v > most) {
                best = k;
                most = v;
            }
        }
        if (best < 0)
            return;
        value[g->n_shape] = most;
        depth[g->n_shape] = depth[best] + 1;
        n_draws[best]++;
        g->shape_parent[g->n_shape] = (int16_t)best;
    }
}

/* The first n nodes of a calibrated shape. */
static void copy_shape(so_model_growth *g, const so_model_drafter_opts *o, int n) {
    g->n_shape = 1;
    g->width = 1;
    for (int i = 0; i < SO_MIN(n, o->tree.n); i++, g->n_shape++) {
        g->shape_parent[g->n_shape] = (int16_t)(o->tree.parent[i] + 1);
        g->shape_rank[g->n_shape] = o->tree.rank[i];
        g->width = SO_MAX(g->width, o->tree.rank[i] + 1);
    }
}

/* The node of this rank below node `parent` of the shape; −1: there is none. */
static int shape_child(const so_model_growth *g, int parent, int rank) {
    for (int i = 1; i < g->n_shape; i++)
        if (g->shape_parent[i] == parent && g->shape_rank[i] == rank)
            return i;
    return -1;
}

/* --- branches --- */

/* The tokens of a branch's path after the text, so that penalties and noise see them. branch −1: the
 * root. */
static so_sample_context context_of(const so_model_chain *c, const so_model_growth *g, int branch) {
    int n = c->n_text + (branch < 0 ? 0 : g->kept[branch].depth);
    for (int b = branch, at = n; b >= 0; b = g->kept[b].parent)
        c->s->text[--at] = g->kept[b].token;
    return (so_sample_context){c->s->text, n, c->job->n_prompt};
}

static double value_of(const so_model_growth *g, int branch) {
    return branch < 0 ? g->start_value : g->kept[branch].value;
}

static so_model_branch child_of(const so_model_growth *g, int parent, int32_t token, float chance) {
    return (so_model_branch){.token = token,
                             .parent = (int16_t)parent,
                             .depth = (int16_t)(parent < 0 ? 1 : g->kept[parent].depth + 1),
                             .node = -1,
                             .slot = -1,
                             .chance = chance,
                             .confidence = chance,
                             .value = value_of(g, parent) * (double)chance};
}

static int node_of(const so_model_growth *g, int branch) {
    return branch < 0 ? 0 : g->kept[branch].node;
}

/* --- terms: what pays (so_draft_terms) --- */

/* The value of a guess of this rank below `branch` if it pays, otherwise 0. left: the chance that the
 * earlier siblings are rejected; n_more: guesses since the last level was joined. Decided before a
 * token is sampled. */
static double worth(const so_model_chain *c, const so_model_growth *g, int branch, int rank,
                    double confidence, int n_more, double *left) {
    const so_draft_terms *t = c->job->terms;
    int depth = branch < 0 ? 1 : g->kept[branch].depth + 1;
    double x = so_terms_sibling(t, rank, depth, confidence);
    double value = value_of(g, branch) * *left * x;
    *left *= 1 - x;
    return value > so_terms_row(t, g->n_kept + n_more + 1) ? value : 0;
}

/* Reports the refused row that was the most likely to be reached. */
static void refuse(const so_model_chain *c, so_model_growth *g, int branch, float confidence) {
    double value = value_of(g, branch);
    if (c->job->refused_depth > 0 && value <= g->refused_value)
        return;
    g->refused_value = value;
    c->job->refused_depth = branch < 0 ? 1 : g->kept[branch].depth + 1;
    c->job->refused_confidence = confidence;
}

/* What the next level is expected to gain for a request, before its rows are seen. Branches that gain
 * nothing leave the frontier. */
static double frontier_gain(so_model_chain *c, so_model_growth *g) {
    const so_draft_terms *t = c->job->terms;
    double sum = 0;
    int n = 0;
    for (int i = 0; i < g->n_frontier; i++) {
        double gain = g->kept[g->frontier[i]].value * so_terms_chance(t, c->depth + 1, -1) -
                      so_terms_row(t, g->n_kept + 1);
        gain -= n > 0 ? (double)t->branch_price : 0; /* the first one is in the level's price */
        if (gain <= 0)
            continue;
        g->frontier[n++] = g->frontier[i];
        sum += gain;
    }
    g->n_frontier = n;
    c->done |= n == 0;
    return sum;
}

/* Ends all trees if another level does not pay, as so_model_end_unprofitable (model_levels.c) does for chains; every level of a tree is a pass. */
static void end_unprofitable(so_model_drafter *md, int n) {
    double gain = 0, price = 0;
    bool must = false;
    for (int i = 0; i < n; i++) {
        so_model_chain *c = &md->chains[i];
        if (c->done)
            continue;
        must |= !c->job->terms || c->depth == 0;
        if (!c->job->terms || c->depth == 0)
            continue;
        gain += frontier_gain(c, &md->growths[i]);
        price = SO_MAX(price, so_terms_pass(c->job->terms));
    }
    for (int i = 0; i < n && !must && gain <= price; i++)
        md->chains[i].done = true;
}

/* --- points --- */

/* Chances at temperature 0. The target takes its most likely token, and agrees with the draft's first
 * more often than the draft's probability says, with the others less often. So probabilities are
 * raised to SHARPNESS and normalised; tokens after the last one count with its weight at most. */
static void sharpen(double first, const so_scored *top, int n, float *chance) {
    double w[SO_SAMPLE_TOP_MAX], sum = 0, left = 1, q = 0;
    for (int i = 0; i < n; i++) {
        q = first * exp(top[i].score - top[0].score);
        sum += w[i] = pow(q, SHARPNESS);
        left -= q;
    }
    sum += SO_MAX(left, 0) * pow(q, SHARPNESS - 1);
    for (int i = 0; i < n; i++)
        chance[i] = sum > 0 ? (float)(w[i] / sum) : 0;
}

/* The chances of the best tokens of a row. */
static void point_chances(const so_model_drafter *md, const so_sample_params *p,
                          const so_model_row *r, const float *logits, const so_scored *top, int n,
                          float *chance) {
    float first = so_model_row_chance(md, logits, r, top[0].id);
    if (p->temp == 0)
        sharpen((double)first, top, n, chance);
    else
        so_draft_noisy_chances(top, n, first, chance);
}

/* Adds the best tokens of a branch's row to the candidates of the level. The confidence of a later
 * sibling is the square root of its chance, which spreads small chances over the classes of
 * plan/acceptance.h. */
static void add_points(so_model_drafter *md, so_model_chain *c, so_model_growth *g, int branch,
                       int logit) {
    so_sample_params p = so_model_params(md, c->job);
    const float *logits = so_pass_logits(md->pass, logit);
    so_model_row r = so_model_row_of(md, &p, logits);
    so_sample_context ctx = context_of(c, g, branch);
    so_scored top[SO_SAMPLE_TOP_MAX];
    float chance[SO_SAMPLE_TOP_MAX];
    int n = 0;
    if (so_sample_top(r.sampler, &p, r.logits, &ctx, g->width, top, &n, NULL) != SO_OK)
        return;
    point_chances(md, &p, &r, logits, top, n, chance);
    if (n > 0 && md->o.p_min > 0 && so_model_row_chance(md, logits, &r, top[0].id) < md->o.p_min)
        return;
    double left = 1;
    int own = branch < 0 ? 0 : g->kept[branch].shape, n_siblings = 0, shape = 0;
    for (int i = 0; i < n; i++) {
        if (g->n_shape > 0 && (shape = shape_child(g, own, i)) < 0)
            continue;
        if (i > 0 && !(chance[i] > 0)) /* a token outside the subset */
            continue;
        int32_t token = r.ids ? r.ids[top[i].id] : top[i].id;
        so_model_branch b = child_of(g, branch, token, SO_MIN(chance[i], 1.0f));
        b.confidence = i == 0 ? b.chance : sqrtf(b.chance);
        if (c->job->terms)
            b.value =
                worth(c, g, branch, n_siblings, (double)b.confidence, md->n_candidates, &left);
        if (c->job->terms && b.value == 0) {
            if (n_siblings == 0)
                refuse(c, g, branch, b.confidence);
            return;
        }
        b.shape = (int16_t)shape;
        n_siblings++;
        md->candidates[md->n_candidates++] = b;
    }
}

/* Most likely first; at equal values parents first, then in order of creation. */
static int by_value(const void *a, const void *b) {
    const so_model_branch *x = a, *y = b;
    if (x->value != y->value)
        return x->value > y->value ? -1 : 1;
    return x->depth != y->depth ? x->depth - y->depth : x->order - y->order;
}

static int by_depth(const void *a, const void *b) {
    const so_model_branch *x = a, *y = b;
    return x->depth != y->depth ? x->depth - y->depth : by_value(a, b);
}

/* Keeps the first n branches of the candidates, ordered by depth. Their parents are among them. */
static void keep_candidates(so_model_drafter *md, so_model_growth *g, int n) {
    int16_t to[SO_TREE_MAX];
    qsort(md->candidates, (size_t)n, sizeof *md->candidates, by_depth);
    for (int i = 0; i < n; i++) {
        so_model_branch b = md->candidates[i];
        if (b.old >= 0)
            to[b.old] = (int16_t)i;
        b.parent = b.parent < 0 ? -1 : to[b.parent];
        b.old = (int16_t)i;
        g->kept[i] = b;
    }
    g->n_kept = n;
}

/* The candidates of a level join the branches. Shallower branches keep their numbers: they are
 * sorted the same way every time. */
static void join_points(so_model_drafter *md, so_model_growth *g, bool best) {
    int n_new = md->n_candidates;
    for (int i = 0; i < n_new; i++) {
        md->candidates[i].order = g->n_kept + i;
        md->candidates[i].old = -1;
    }
    qsort(md->candidates, (size_t)n_new, sizeof *md->candidates, by_value);
    if (!best)
        n_new = SO_MIN(n_new, g->max_nodes - g->n_kept);
    memcpy(md->candidates + n_new, g->kept, (size_t)g->n_kept * sizeof *g->kept);
    int n = n_new + g->n_kept;
    if (n > g->max_nodes)
        qsort(md->candidates, (size_t)n, sizeof *md->candidates, by_value);
    keep_candidates(md, g, SO_MIN(n, g->max_nodes));
}

/* Adds the branches to the job's tree: parents first, siblings by their chance. */
static void emit_points(so_model_drafter *md, const so_model_chain *c, so_model_growth *g) {
    for (int i = 0; i < g->n_kept; i++) {
        so_model_branch *b = &g->kept[i];
        int parent = node_of(g, b->parent);
        if (parent >= 0)
            b->node = (int16_t)so_draft_add(c->job, parent, b->token, SO_Q_POINT, -1,
                                            md->base.index, b->confidence);
    }
}

/* --- sampled guesses --- */

/* Whether the next draw may be made. Decided by the number of earlier nodes, before the draw. */
static bool may_draw(const so_model_chain *c, const so_model_growth *g) {
    const so_tree *t = c->job->tree;
    return t->n_nodes - g->nodes_before < g->max_nodes && t->n_nodes <= c->job->max_nodes &&
           t->n_nodes < SO_TREE_MAX && t->n_proposals < SO_TREE_MAX_PROPOSALS;
}

typedef struct so_model_draw {
    int branch, row; /* of the parent; its q row */
    int shape;       /* place in so_model_growth.shape_parent */
    double value;    /* with terms */
} so_model_draw;

/* One draw from md->probs. false: no token is left. */
static bool draw_one(so_model_drafter *md, const so_model_chain *c, so_model_growth *g,
                     const so_model_row *r, so_model_draw d) {
    int branch = d.branch, row = d.row;
    const so_draft_job *job = c->job;
    int depth = branch < 0 ? 1 : g->kept[branch].depth + 1, n_nodes = job->tree->n_nodes;
    bool set = md->o.distinct || md->o.best || md->o.tree.n > 0;
    if (set && !(so_model_row_largest(md->probs, r->n) > 0))
        return false;
    int32_t at = so_sample_pick(md->probs, r->n,
                                so_draft_uniform(&md->base, job, depth, g->n_level_draws++));
    if (at < 0)
        return false;
    int32_t token = r->ids ? r->ids[at] : at;
    float confidence = job->tree->row_confidence[row];
    int node = so_draft_add(job, node_of(g, branch), token, set ? SO_Q_ROW_SET : SO_Q_ROW, row,
                            md->base.index, confidence);
    SO_ASSERT(node > 0);
    if (set)
        md->probs[at] = 0;
    if (job->tree->n_nodes == n_nodes) /* drawn before, or another drafter's guess */
        for (int i = 0; i < g->n_kept; i++)
            if (g->kept[i].node == node) {
                g->kept[i].value += d.value;
                return true;
            }
    so_model_branch *b = &g->kept[g->n_kept++];
    *b = child_of(g, branch, token, confidence);
    b->node = (int16_t)node;
    b->shape = (int16_t)d.shape;
    b->value = d.value;
    return true;
}

/* As many draws as the shape has below the branch. */
static void draw_shape(so_model_drafter *md, const so_model_chain *c, so_model_growth *g,
                       const so_model_row *r, so_model_draw d) {
    int own = d.branch < 0 ? 0 : g->kept[d.branch].shape;
    for (int i = 1; i < g->n_shape; i++) {
        d.shape = i;
        if (g->shape_parent[i] == own && (!may_draw(c, g) || !draw_one(md, c, g, r, d)))
            return;
    }
}

/* With terms: as many draws as pay, decided by the row and by what was drawn from earlier rows. */
static void draw_what_pays(so_model_drafter *md, const so_model_chain *c, so_model_growth *g,
                           const so_model_row *r, so_model_draw d) {
    float confidence = c->job->tree->row_confidence[d.row];
    double left = 1;
    for (int i = 0; i < g->width && may_draw(c, g); i++) {
        d.value = worth(c, g, d.branch, i, (double)confidence, 0, &left);
        if (d.value == 0 && i == 0)
            refuse(c, g, d.branch, confidence);
        if (d.value == 0 || !draw_one(md, c, g, r, d))
            return;
    }
}

/* The draws from a branch's row. */
static void add_draws(so_model_drafter *md, so_model_chain *c, so_model_growth *g, int branch,
                      int logit) {
    so_sample_params p = so_model_params(md, c->job);
    so_tree *t = c->job->tree;
    so_model_row r = so_model_row_of(md, &p, so_pass_logits(md->pass, logit));
    so_sample_context ctx = context_of(c, g, branch);
    if (!may_draw(c, g) ||
        so_sample_distribution(r.sampler, &p, r.logits, &ctx, md->probs, NULL) != SO_OK)
        return;
    float peak = so_model_row_largest(md->probs, r.n);
    int row = peak < md->o.p_min ? -1 : so_tree_new_row(t);
    if (row < 0)
        return;
    t->row_confidence[row] = sqrtf(SO_MIN(peak, 1.0f));
    so_model_row_widen(md, &r, md->probs, so_tree_row(t, row));
    if (c->job->terms)
        draw_what_pays(md, c, g, &r, (so_model_draw){branch, row, 0, 0});
    else if (g->n_shape > 0)
        draw_shape(md, c, g, &r, (so_model_draw){branch, row, 0, 0});
    else
        for (int i = 0; i < g->width && may_draw(c, g); i++)
            if (!draw_one(md, c, g, &r, (so_model_draw){branch, row, 0, 0}))
                break;
}

/* --- levels --- */

static bool is_drawn(const so_model_drafter *md, const so_model_chain *c) {
    return so_model_params(md, c->job).temp > 0 && c->job->tree->max_rows > 0;
}

/* Whether a branch gets children in the next level. */
static bool has_children(const so_model_growth *g, int i) {
    if (g->n_shape == 0)
        return true;
    for (int k = 1; k < g->n_shape; k++)
        if (g->shape_parent[k] == g->kept[i].shape)
            return true;
    return false;
}

/* The branches whose rows the next pass computes: those of the deepest level, the most likely ones
 * if they are too many for a pass or for the context's pages. */
static void find_frontier(so_model_drafter *md, so_model_chain *c, so_model_growth *g) {
    const so_seq *seq = c->s->seq;
    int used = so_seq_len(seq) + so_seq_open_nodes(seq);
    int room = SO_MIN(so_kv_pages_for(md->n_ctx) * SO_KV_PAGE - used, md->max_frontier);
    bool drawn = is_drawn(md, c), full = drawn ? !may_draw(c, g) : g->n_kept == g->max_nodes;
    g->n_frontier = 0;
    if (c->depth >= c->limit || (full && (drawn || !md->o.best)))
        room = 0;
    room = SO_MIN(room, SO_TREE_MAX - so_seq_open_nodes(seq));
    for (int i = 0; i < g->n_kept && g->n_frontier < room; i++)
        if (g->kept[i].depth == c->depth && has_children(g, i))
            g->frontier[g->n_frontier++] = (int16_t)i;
    c->done = g->n_frontier == 0;
}

/* Adds a level: the children of the branches whose rows the pass has computed. branch −1: the root's
 * row. */
static void add_level(so_model_drafter *md, so_model_chain *c, so_model_growth *g, bool root) {
    bool drawn = is_drawn(md, c);
    md->n_candidates = g->n_level_draws = 0;
    for (int i = 0; i < (root ? 1 : g->n_frontier); i++) {
        int branch = root ? -1 : g->frontier[i], logit = c->first_logit + i;
        if (!so_model_row_is_finite(md, c->s, logit, root))
            continue;
        if (drawn)
            add_draws(md, c, g, branch, logit);
        else
            add_points(md, c, g, branch, logit);
    }
    if (!drawn)
        join_points(md, g, md->o.best);
    c->depth++;
    find_frontier(md, c, g);
}

/* The rows of the frontier, and their slots. */
static void add_frontier_rows(so_model_drafter *md, so_model_chain *c, so_model_growth *g, int seq,
                              int at, int *n_logits) {
    so_model_request *s = c->s;
    int slot = so_seq_len(s->seq) + so_seq_open_nodes(s->seq);
    for (int i = 0; i < g->n_frontier; i++) {
        so_model_branch *b = &g->kept[g->frontier[i]];
        int before = b->parent < 0 ? -1 : g->kept[b->parent].slot, n = s->n_open + i;
        b->slot = slot + i;
        s->open_tokens[n] = b->token;
        s->open_parents[n] = before < 0 ? -1 : before - so_seq_len(s->seq);
        md->rows[at + i] = (so_row){.token = b->token,
                                    .pos = c->n_text + b->depth - 1,
                                    .seq = seq,
                                    .parent = before < 0 ? -1 : so_row_after(before),
                                    .want_logits = true};
    }
    c->n_rows = g->n_frontier;
    c->first_logit = *n_logits;
    *n_logits += g->n_frontier;
}

/* Reserves slots for the request's rows of the next pass. */
static int reserve(so_model_chain *c, bool root, so_err *err) {
    so_model_request *s = c->s;
    if (root || so_seq_open_nodes(s->seq) == 0)
        return so_seq_begin(s->seq, c->n_rows, err);
    return so_seq_extend(s->seq, c->n_rows, err);
}

/* One pass for all requests that are not done: catch-up, or a level; *more: there were any. */
static int pass_once(so_model_drafter *md, int n, bool *more, so_err *err) {
    int n_rows = 0, n_seqs = 0, n_logits = 0, budget = md->o.n_batch, rc = SO_OK;
    for (int i = 0; i < n && rc == SO_OK; i++) {
        so_model_chain *c = &md->chains[i];
        so_model_growth *g = &md->growths[i];
        if (c->done)
            continue;
        int logits_before = n_logits, budget_before = budget;
        if (c->depth == 0)
            so_model_add_rows(md, c, n_seqs, n_rows, &n_logits, &budget);
        else
            add_frontier_rows(md, c, g, n_seqs, n_rows, &n_logits);
        if (so_seq_pages_needed(c->s->seq, c->n_rows) > so_kv_available_pages(md->kv)) {
            c->done = true; /* keeps the guesses so far */
            n_logits = logits_before;
            budget = budget_before;
            continue;
        }
        n_rows += c->n_rows;
        rc = reserve(c, c->depth == 0, err);
        if (rc == SO_OK && c->depth > 0)
            c->s->n_open += c->n_rows;
        md->seqs[n_seqs++] = c->s->seq;
    }
    *more = n_seqs > 0;
    so_batch batch = {md->rows, n_rows, md->seqs, n_seqs};
    if (rc == SO_OK && n_seqs > 0)
        rc = so_pass_run(md->pass, &batch, SO_PASS_LOGITS, err);
    return rc;
}

/* Uses the results of a pass. */
static void take_results(so_model_drafter *md, int n) {
    for (int i = 0; i < n; i++) {
        so_model_chain *c = &md->chains[i];
        if (c->done)
            continue;
        bool root = c->depth == 0;
        if (root)
            so_seq_commit_chain(c->s->seq, c->n_rows);
        if (c->first_logit < 0)
            continue;
        md->growths[i].n_rows += root ? 1 : c->n_rows;
        add_level(md, c, &md->growths[i], root);
    }
}

static void begin_growth(so_model_drafter *md, const so_model_chain *c, so_model_growth *g) {
    int room = SO_MIN(c->job->max_nodes + 1, SO_TREE_MAX) - c->job->tree->n_nodes;
    int own = md->o.k > 0 ? md->o.k : DEFAULT_WIDTH;
    g->n_kept = g->n_frontier = g->n_rows = g->n_shape = 0;
    g->start_value = c->job->terms ? (double)c->job->terms->start_value : 1;
    g->nodes_before = c->job->tree->n_nodes;
    g->max_nodes = SO_MIN(room, md->base.tree_nodes);
    g->width = SO_MIN(own, md->n_subset);
    if (md->o.tree.n > 0)
        copy_shape(g, &md->o, g->max_nodes);
    g->width = SO_MIN(g->width, SO_MIN(md->n_subset, (int)SO_SAMPLE_TOP_MAX));
    if (md->o.best && is_drawn(md, c) && !c->job->terms)
        choose_shape(g, g->max_nodes, c->limit, g->width);
}

int so_model_tree_propose(so_model_drafter *md, int n, so_err *err) {
    int rc = SO_OK;
    for (int i = 0; i < n; i++)
        begin_growth(md, &md->chains[i], &md->growths[i]);
    for (bool more = n > 0; more && rc == SO_OK;) {
        rc = pass_once(md, n, &more, err);
        if (rc == SO_OK && more)
            take_results(md, n);
        end_unprofitable(md, n);
    }
    for (int i = 0; i < n; i++)
        md->chains[i].job->n_level_rows = md->growths[i].n_rows;
    for (int i = 0; i < n && rc == SO_OK; i++)
        if (!is_drawn(md, &md->chains[i]))
            emit_points(md, &md->chains[i], &md->growths[i]);
    return rc;
}

/* --- between rounds --- */

void so_model_tree_settle(so_model_request *s, const so_draft_job *job) {
    int32_t path[SO_TREE_MAX];
    int n = 0, len = so_seq_len(s->seq);
    if (so_seq_open_nodes(s->seq) == 0) { /* none, or dropped meanwhile */
        s->n_open = 0;
        return;
    }
    for (int i = 0, last = -1; i < s->n_open && len + n < job->n_tokens; i++)
        if (s->open_parents[i] == last && s->open_tokens[i] == job->tokens[len + n]) {
            s->text[len + n] = s->open_tokens[i];
            path[n++] = last = i;
        }
    so_seq_commit(s->seq, path, n);
    s->n_open = 0;
}

/* Drafting with heads (model/heads.h): one small product per round gives the logits of all depths.
 *
 *   text  t0 … ti   root        the root t(i+1) was sampled from the hidden state h at position i
 *                    │          (so_drafter_vt.add_hidden)
 *   head 1 of h      ├─ level 1: guesses of t(i+2)
 *   head 2 of h      └─ level 2: guesses of t(i+3), the same under every guess of level 1
 *
 * The product is over the state of the one accepted node, never over all rows of a tree. A head knows
 * neither the root nor the guesses before its own, so all parents of a level have the same candidates,
 * and which combinations are worth a row is a matter of shape (draft/shape.h):
 *
 *   chain        the best token of every head (the only form of `blockwise`)
 *   k=K          the Cartesian product of the K best tokens of every head, cut at the budget
 *   nodes=N      the tree grown from the accuracies in the heads' file
 *   tree=FILE    the tree of a file that `sooth calibrate` wrote
 *   best         the N most likely paths by the heads' own probabilities, anew in every round
 *
 * `lookahead`: the target itself guesses, in rows with learned embeddings as inputs, whose states are
 * projected like those of heads. The cache never keeps the rows. Either
 *
 *   a pass of their own  computes the root and one row for every embedding after it. The root's own row
 *                        decides the first level exactly
 *   ends=N               the rows hang on N ends of the tree in the target's pass (engine/ends.h): if the
 *                        round ends there, the row of embedding k guesses level k. Like heads, they
 *                        do not know the root
 *
 * With q rows (`reject`) a chain is sampled, and the children of a tree's node are drawn without
 * replacement from the row of their level, whose q is stored once for all of them. How many are drawn
 * under which node follows from the shape, which whole rows decide before the first draw (rule of
 * sight).
 *
 * Refuses to draft after the prompt, whose hidden states it does not get: the first round has no
 * guesses (`lookahead` with a pass of its own needs none). Rows with NaN or Inf end the draft. Thread: the engine thread. */
#include "draft/heads.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "draft/rows.h"
#include "draft/shape.h"

enum { MAX_LEVELS = SO_HEADS_MAX + 1, DEFAULT_BEST_NODES = 16 };

typedef struct request {
    float *x; /* [rows][d] the state from which the token at `pos` was sampled, or its end rows' */
    int pos;  /* −1: none yet */
    int n_end_rows; /* of x that have arrived */
    int32_t *text;  /* [cap] the text, then the best guess of each level, for penalties */
    int cap;
} request;

/* The candidates of one level. */
typedef struct level {
    const float *logits;
    so_sample_context ctx;
    int n;
    int32_t columns[SO_SAMPLE_TOP_MAX], tokens[SO_SAMPLE_TOP_MAX];
    float chance[SO_SAMPLE_TOP_MAX];
    int row, n_draws; /* drawn trees: its q row, −1: none yet; draws so far */
    float *probs;     /* [n_vocab], of the columns */
} level;

typedef struct heads_drafter {
    so_drafter base;
    so_heads *h;
    const so_heads_info *info;
    const so_model *target;
    so_kv *kv;
    so_pass *pass; /* lookahead */
    so_row *rows;  /* [group · (n_heads + 1)] */
    so_seq **seqs; /* [group] */
    so_heads_drafter_opts o;
    so_draft_rows r;
    int d, n_levels;
    int group;           /* jobs of one run */
    float *x;            /* [group · rows of a job][d] */
    so_draft_job **jobs; /* [group] */
    so_shape *shape;     /* product or grown tree; scratch for `best` */
    level levels[MAX_LEVELS];
    float *work; /* [n_vocab] probabilities without the tokens that were drawn */
} heads_drafter;

static bool is_lookahead(const heads_drafter *hd) { return hd->info->kind == SO_HEADS_LOOKAHEAD; }
static bool has_own_pass(const heads_drafter *hd) { return is_lookahead(hd) && hd->o.ends == 0; }
static int rows_per_job(const heads_drafter *hd) { return is_lookahead(hd) ? hd->n_levels : 1; }

/* --- requests --- */

static void heads_close(so_drafter *d, void *state) {
    request *s = state;
    (void)d;
    free(s->x);
    free(s->text);
    free(s);
}

static int heads_open(so_drafter *d, const so_draft_text *text, void **state, so_err *err) {
    heads_drafter *hd = (heads_drafter *)d;
    request *s = SO_NEW(request);
    s->pos = -1;
    s->cap = SO_MAX(text->max_tokens, text->n_prompt) + SO_TREE_MAX;
    s->x = so_try_alloc((size_t)rows_per_job(hd) * (size_t)hd->d, sizeof *s->x);
    s->text = so_try_alloc((size_t)s->cap, sizeof *s->text);
    if (!s->x || !s->text) {
        so_err_set(err, SO_ENOMEM, "%s: no memory for a text of %d tokens", d->vt->name, s->cap);
        heads_close(d, s);
        return SO_ENOMEM;
    }
    *state = s;
    return SO_OK;
}

static void heads_add_hidden(so_drafter *d, void *state, int pos, const float *x) {
    const heads_drafter *hd = (heads_drafter *)d;
    request *s = state;
    if (!is_lookahead(hd))
        memcpy(s->x, x, (size_t)hd->d * sizeof *x);
    s->pos = pos;
    s->n_end_rows = 0;
}

static void heads_add_end_hidden(so_drafter *d, void *state, int pos, int row, const float *x) {
    const heads_drafter *hd = (heads_drafter *)d;
    request *s = state;
    SO_ASSERT(pos == s->pos && row == s->n_end_rows && row < hd->n_levels);
    memcpy(s->x + (size_t)row * (size_t)hd->d, x, (size_t)hd->d * sizeof *x);
    s->n_end_rows++;
}

/* --- levels --- */

/* Deepest level that the job may have. */
static int limit_of(const heads_drafter *hd, const so_draft_job *job) {
    int room = SO_MIN(job->max_nodes + 1, SO_TREE_MAX) - job->tree->n_nodes;
    return SO_MIN(SO_MIN(job->max_depth, room), SO_MIN(hd->n_levels, hd->o.max_draft));
}

static bool is_drawn(const so_draft_job *job, const so_sample_params *p) {
    return p->temp > 0 && job->tree->max_rows > 0;
}

/* The logits of a level of the group's i-th job; NULL: not finite. */
static const float *logits_of(const heads_drafter *hd, int i, int depth) {
    int state = is_lookahead(hd) ? i * hd->n_levels + depth - 1 : i;
    int head = is_lookahead(hd) ? 0 : depth - 1;
    return so_heads_row_is_finite(hd->h, state, head) ? so_heads_logits(hd->h, state, head) : NULL;
}

/* Chances of points: without noise their probabilities. */
static void point_chances(const so_sample_params *p, const so_scored *top, level *l, float first) {
    if (p->temp > 0) {
        so_draft_noisy_chances(top, l->n, first, l->chance);
        return;
    }
    l->chance[0] = first;
    for (int i = 1; i < l->n; i++)
        l->chance[i] = (float)((double)first * exp(top[i].score - top[0].score));
}

/* Ranks the `width` best tokens of a level: with the noise of p for points; for draws by probability,
 * without any noise, since that noise may decide tokens. */
static bool rank_level(heads_drafter *hd, const so_sample_params *p, bool drawn, int width,
                       level *l) {
    so_draft_row row = so_draft_row_of(&hd->r, p, l->logits);
    so_sample_params own = *p;
    so_scored top[SO_SAMPLE_TOP_MAX];
    own.temp = drawn ? 0 : p->temp;
    width = SO_MIN(width, hd->r.n_subset);
    if (so_sample_top(row.sampler, &own, row.logits, &l->ctx, width, top, &l->n, NULL) != SO_OK ||
        l->n == 0)
        return false;
    for (int i = 0; i < l->n; i++) {
        l->columns[i] = top[i].id;
        l->tokens[i] = row.ids ? row.ids[top[i].id] : top[i].id;
    }
    if (!drawn) {
        point_chances(p, top, l, so_draft_row_chance(&hd->r, l->logits, &row, top[0].id));
        return true;
    }
    if (so_sample_distribution(row.sampler, p, row.logits, &l->ctx, l->probs, NULL) != SO_OK)
        return false;
    for (int i = 0; i < l->n; i++)
        l->chance[i] = l->probs[l->columns[i]];
    return true;
}

/* Ranks the levels of the group's i-th job; returns how many there are. */
static int rank_levels(heads_drafter *hd, const so_draft_job *job, const so_sample_params *p, int i,
                       int limit, int width) {
    request *s = job->state;
    int n = SO_MIN(limit, s->cap - job->n_tokens);
    memcpy(s->text, job->tokens, (size_t)job->n_tokens * sizeof *s->text);
    for (int depth = 1; depth <= n; depth++) {
        level *l = &hd->levels[depth - 1];
        l->logits = logits_of(hd, i, depth);
        l->ctx = (so_sample_context){s->text, job->n_tokens + depth - 1, job->n_prompt};
        l->row = -1;
        l->n_draws = 0;
        if (!l->logits || !rank_level(hd, p, is_drawn(job, p), width, l))
            return depth - 1;
        s->text[job->n_tokens + depth - 1] = l->tokens[0];
    }
    return n;
}

/* --- sampled guesses --- */

/* The level's q row, made at its first draw. false: no more rows. */
static bool make_row(heads_drafter *hd, const so_draft_job *job, const so_sample_params *p,
                     level *l) {
    so_tree *t = job->tree;
    so_draft_row row = so_draft_row_of(&hd->r, p, l->logits);
    if (l->row >= 0)
        return true;
    l->row = so_tree_new_row(t);
    if (l->row < 0)
        return false;
    t->row_confidence[l->row] = sqrtf(SO_MIN(so_draft_row_largest(l->probs, row.n), 1.0f));
    so_draft_row_widen(&hd->r, &row, l->probs, so_tree_row(t, l->row));
    return true;
}

/* Draws a column of the level from `probs`; −1: nothing is left. */
static int32_t draw(heads_drafter *hd, const so_draft_job *job, const so_sample_params *p,
                    int depth, const float *probs) {
    level *l = &hd->levels[depth - 1];
    so_draft_row row = so_draft_row_of(&hd->r, p, l->logits);
    if (!(so_draft_row_largest(probs, row.n) > 0))
        return -1;
    return so_sample_pick(probs, row.n, so_draft_uniform(&hd->base, job, depth, l->n_draws++));
}

static int32_t token_at(const heads_drafter *hd, const so_sample_params *p, const level *l,
                        int32_t column) {
    so_draft_row row = so_draft_row_of(&hd->r, p, l->logits);
    return row.ids ? row.ids[column] : column;
}

/* --- chains --- */

/* Whether a guess that is sampled from this level is worth the price of its test; decided by the row
 * (rule of sight). A refused row is reported to the planner. */
static bool is_worth_drawing(so_draft_job *job, double path, int depth, float confidence) {
    if (!job->terms || path * so_terms_chance(job->terms, depth, (double)confidence) >
                           so_terms_row(job->terms, depth))
        return true;
    job->refused_depth = depth;
    job->refused_confidence = confidence;
    return false;
}

/* Points are left to the planner, which keeps those that pay: more of them cost nothing to make. */
static void add_chain(heads_drafter *hd, so_draft_job *job, const so_sample_params *p, int n) {
    bool drawn = is_drawn(job, p);
    double path = job->terms ? (double)job->terms->start_value : 1;
    for (int depth = 1, node = 0; depth <= n && node >= 0; depth++) {
        level *l = &hd->levels[depth - 1];
        int32_t token = l->tokens[0];
        float confidence = l->chance[0];
        if (drawn) {
            so_draft_row row = so_draft_row_of(&hd->r, p, l->logits);
            confidence = sqrtf(SO_MIN(so_draft_row_largest(l->probs, row.n), 1.0f));
            if (!is_worth_drawing(job, path, depth, confidence) || !make_row(hd, job, p, l))
                return;
            int32_t column = draw(hd, job, p, depth, l->probs);
            if (column < 0)
                return;
            token = token_at(hd, p, l, column);
        }
        node = so_draft_add(job, node, token, so_draft_kind(l->row), l->row, hd->base.index,
                            confidence);
        if (job->terms)
            path *= so_terms_chance(job->terms, depth, (double)confidence);
    }
}

/* --- trees --- */

/* Ranks of a level that a tree of `best` may use: a tree of N nodes holds no rank from N. */
static int best_width(const heads_drafter *hd) {
    return SO_MIN(SO_MAX(hd->o.nodes, 2), (int)SO_SAMPLE_TOP_MAX);
}

/* The most likely paths by the probabilities of these rows. */
static bool grow_best(heads_drafter *hd, int n, int budget) {
    so_shape_table *t = SO_NEW(so_shape_table);
    t->n_depths = SO_MIN(n, (int)SO_SHAPE_DEPTHS);
    t->n_ranks = best_width(hd);
    for (int d = 0; d < t->n_depths; d++)
        for (int i = 0; i < SO_MIN(hd->levels[d].n, t->n_ranks); i++)
            t->accuracy[d][i] = SO_MIN(SO_MAX((double)hd->levels[d].chance[i], 0.0), 1.0);
    int rc = so_shape_grow(t, budget, hd->shape, NULL);
    free(t);
    return rc == SO_OK;
}

/* All points that the shape has: more of them cost nothing to make, and the planner keeps those that
 * pay. The confidence of a later sibling is the square root of its chance, as in model_tree.c. */
static void add_points(heads_drafter *hd, const so_draft_job *job, const so_shape *s, int n) {
    int node[SO_SHAPE_MAX];
    for (int i = 0; i < s->n_nodes; i++) {
        const so_shape_node *x = &s->nodes[i];
        const level *l = &hd->levels[x->depth - 1];
        int parent = x->parent < 0 ? 0 : node[x->parent];
        bool has = parent >= 0 && x->depth <= n && x->rank < l->n && l->chance[x->rank] > 0;
        node[i] = -1;
        if (!has)
            continue;
        float chance = SO_MIN(l->chance[x->rank], 1.0f);
        node[i] = so_draft_add(job, parent, l->tokens[x->rank], SO_Q_POINT, -1, hd->base.index,
                               x->rank == 0 ? chance : sqrtf(chance));
    }
}

/* The drawn nodes of a tree: in the job's tree (−1: none), and with terms the value of each path. */
typedef struct drawn {
    int node[SO_SHAPE_MAX], n;
    double value[SO_SHAPE_MAX];
} drawn;

/* The value of the next draw below `parent`, whose earlier siblings are rejected with chance *left; 0:
 * it does not pay. Decided by the row, before the draw (rule of sight). */
static double worth(so_draft_job *job, const drawn *t, int parent, int rank, int depth,
                    float confidence, double *left) {
    if (!job->terms)
        return 1;
    double x = so_terms_sibling(job->terms, rank, depth, (double)confidence);
    double before = parent < 0 ? (double)job->terms->start_value : t->value[parent];
    double value = before * *left * x;
    *left *= 1 - x;
    if (value > so_terms_row(job->terms, t->n + 1))
        return value;
    if (rank == 0 && job->refused_depth == 0) {
        job->refused_depth = depth;
        job->refused_confidence = confidence;
    }
    return 0;
}

static bool tree_has_room(const so_draft_job *job) {
    const so_tree *t = job->tree;
    return t->n_nodes <= job->max_nodes && t->n_nodes < SO_TREE_MAX &&
           t->n_proposals < SO_TREE_MAX_PROPOSALS;
}

/* Draws the children that the shape has under its node `parent` (−1: the root), as many as pay. */
static void draw_children(heads_drafter *hd, so_draft_job *job, const so_sample_params *p,
                          const so_shape *s, int parent, drawn *t) {
    int depth = parent < 0 ? 1 : s->nodes[parent].depth + 1, rank = 0;
    level *l = &hd->levels[depth - 1];
    so_draft_row row = so_draft_row_of(&hd->r, p, l->logits);
    float confidence = sqrtf(SO_MIN(so_draft_row_largest(l->probs, row.n), 1.0f));
    double left = 1;
    memcpy(hd->work, l->probs, (size_t)row.n * sizeof *hd->work);
    for (int i = parent + 1; i < s->n_nodes; i++) {
        if (s->nodes[i].parent != parent)
            continue;
        double value = worth(job, t, parent, rank++, depth, confidence, &left);
        if (value == 0 || !tree_has_room(job) || !make_row(hd, job, p, l))
            return;
        int32_t column = draw(hd, job, p, depth, hd->work);
        if (column < 0)
            return;
        hd->work[column] = 0;
        t->node[i] = so_draft_add(job, parent < 0 ? 0 : t->node[parent], token_at(hd, p, l, column),
                                  SO_Q_ROW_SET, l->row, hd->base.index, confidence);
        t->value[i] = value;
        t->n++;
    }
}

static void add_draws(heads_drafter *hd, so_draft_job *job, const so_sample_params *p,
                      const so_shape *s, int n) {
    drawn t = {.n = 0};
    for (int i = 0; i < s->n_nodes; i++)
        t.node[i] = -1;
    for (int i = -1; i < s->n_nodes; i++)
        if ((i < 0 ? 0 : s->nodes[i].depth) < n && (i < 0 || t.node[i] > 0))
            draw_children(hd, job, p, s, i, &t);
}

static bool is_tree(const so_heads_drafter_opts *o) { return o->k > 0 || o->best || o->nodes > 0; }

/* Ranks of a level that the tree can use. */
static int width_of(const heads_drafter *hd) {
    if (!is_tree(&hd->o))
        return hd->r.n_subset > 1 ? 2 : 1; /* the second for its distance */
    int width = 2;
    if (hd->o.k > 0)
        return SO_MAX(hd->o.k, 2);
    for (int i = 0; i < hd->shape->n_nodes; i++)
        width = SO_MAX(width, hd->shape->nodes[i].rank + 1);
    return hd->o.best ? best_width(hd) : width;
}

/* Adds the guesses of the group's i-th job. */
static void add_guesses(heads_drafter *hd, so_draft_job *job, int i) {
    so_sample_params p = so_draft_params(job);
    int limit = limit_of(hd, job),
        budget = SO_MIN(job->max_nodes + 1, SO_TREE_MAX) - job->tree->n_nodes;
    int n = rank_levels(hd, job, &p, i, limit, width_of(hd));
    job->n_levels = 1;
    if (n == 0)
        return;
    if (!is_tree(&hd->o)) {
        add_chain(hd, job, &p, n);
        return;
    }
    budget = SO_MIN(budget, hd->base.tree_nodes);
    if (hd->o.best && !grow_best(hd, n, budget))
        return;
    so_shape s = *hd->shape;
    so_shape_cut(&s, budget);
    if (is_drawn(job, &p))
        add_draws(hd, job, &p, &s, n);
    else
        add_points(hd, job, &s, n);
}

/* --- states --- */

/* Whether the look-ahead rows have room in the pages of a context: more would be those of other
 * requests (engine/nonce.c). */
static bool rows_fit(const heads_drafter *hd, const so_draft_job *job) {
    int64_t room = (int64_t)so_kv_pages_for(hd->o.n_ctx) * SO_KV_PAGE;
    return hd->o.n_ctx == 0 || job->n_tokens - 1 + hd->n_levels <= room;
}

/* Whether the job can draft in this round. */
static bool may_draft(const heads_drafter *hd, const so_draft_job *job) {
    const request *s = job->state;
    if (limit_of(hd, job) < 1 || job->n_tokens >= s->cap)
        return false;
    if (!has_own_pass(hd))
        return s->pos == job->n_tokens - 1 &&
               (!is_lookahead(hd) || s->n_end_rows == rows_per_job(hd));
    return job->seq && so_seq_len(job->seq) == job->n_tokens - 1 &&
           so_seq_open_nodes(job->seq) == 0 && rows_fit(hd, job);
}

/* The rows of one job: the root, then the look-ahead rows, as a chain. */
static void look_ahead_rows(heads_drafter *hd, const so_draft_job *job, int seq, so_row *rows) {
    const float *embd = so_heads_embeddings(hd->h);
    for (int i = 0; i < hd->n_levels; i++)
        rows[i] = (so_row){.token = job->tokens[job->n_tokens - 1],
                           .pos = job->n_tokens - 1 + i,
                           .seq = seq,
                           .parent = i ? seq * hd->n_levels + i - 1 : -1,
                           .want_logits = true,
                           .embedding = i ? embd + (size_t)(i - 1) * (size_t)hd->d : NULL};
}

/* Computes the look-ahead rows of n jobs in the target's cache, and their states. The sequences are
 * as before afterwards. *n: jobs that had pages. */
static int look_ahead(heads_drafter *hd, int *n, so_err *err) {
    int n_jobs = 0, rc = SO_OK;
    for (int i = 0; i < *n && rc == SO_OK; i++) {
        so_seq *seq = hd->jobs[i]->seq;
        if (so_seq_pages_needed(seq, hd->n_levels) > so_kv_available_pages(hd->kv))
            continue;
        rc = so_seq_begin(seq, hd->n_levels, err);
        if (rc != SO_OK)
            break;
        look_ahead_rows(hd, hd->jobs[i], n_jobs, hd->rows + n_jobs * hd->n_levels);
        hd->seqs[n_jobs] = seq;
        hd->jobs[n_jobs++] = hd->jobs[i];
    }
    so_batch batch = {hd->rows, n_jobs * hd->n_levels, hd->seqs, n_jobs};
    if (rc == SO_OK && n_jobs > 0)
        rc = so_pass_run(hd->pass, &batch, SO_PASS_HIDDEN, err);
    for (int i = 0; i < batch.n_rows && rc == SO_OK; i++)
        memcpy(hd->x + (size_t)i * (size_t)hd->d, so_pass_hidden(hd->pass, i),
               (size_t)hd->d * sizeof *hd->x);
    for (int i = 0; i < n_jobs; i++)
        so_seq_abort(hd->seqs[i]);
    *n = n_jobs;
    return rc;
}

/* Drafts for the n jobs of the group. */
static int run_group(heads_drafter *hd, int n, so_err *err) {
    int rc = SO_OK;
    size_t width = (size_t)rows_per_job(hd) * (size_t)hd->d;
    if (has_own_pass(hd))
        rc = look_ahead(hd, &n, err);
    else
        for (int i = 0; i < n; i++)
            memcpy(hd->x + (size_t)i * width, ((request *)hd->jobs[i]->state)->x,
                   width * sizeof *hd->x);
    if (rc == SO_OK && n > 0)
        rc = so_heads_run(hd->h, hd->x, n * rows_per_job(hd), err);
    for (int i = 0; i < n && rc == SO_OK; i++)
        add_guesses(hd, hd->jobs[i], i);
    return rc;
}

static int heads_propose(so_drafter *d, so_draft_job *jobs, int n_jobs, so_err *err) {
    heads_drafter *hd = (heads_drafter *)d;
    int n = 0, rc = SO_OK;
    for (int i = 0; i < n_jobs && rc == SO_OK; i++) {
        if (may_draft(hd, &jobs[i]))
            hd->jobs[n++] = &jobs[i];
        if (n == hd->group || (i + 1 == n_jobs && n > 0)) {
            rc = run_group(hd, n, err);
            n = 0;
        }
    }
    return rc;
}

/* --- life --- */

static void heads_free(so_drafter *d) {
    heads_drafter *hd = (heads_drafter *)d;
    so_pass_free(hd->pass);
    so_sampler_free(hd->r.wide);
    so_sampler_free(hd->r.narrow);
    for (int i = 0; i < MAX_LEVELS; i++)
        free(hd->levels[i].probs);
    free(hd->r.logits);
    free(hd->rows);
    free(hd->seqs);
    free(hd->x);
    free(hd->jobs);
    free(hd->shape);
    free(hd->work);
    free(hd);
}

#define HEADS_VT(NAME, ADD_END_HIDDEN)                                                             \
    {                                                                                              \
        .name = NAME, .free = heads_free, .open = heads_open, .close = heads_close,                \
        .propose = heads_propose, .add_hidden = heads_add_hidden, .add_end_hidden = ADD_END_HIDDEN \
    }

static const so_drafter_vt VTS[SO_HEADS_N_KINDS] = {
    [SO_HEADS_MEDUSA] = HEADS_VT("medusa", NULL),
    [SO_HEADS_BLOCKWISE] = HEADS_VT("blockwise", NULL),
    [SO_HEADS_LOOKAHEAD] = HEADS_VT("lookahead", heads_add_end_hidden),
};

int so_heads_opts_from_spec(const so_spec *s, const so_spec_node *n, int budget,
                            so_heads_drafter_opts *o, so_err *err) {
    bool has_nodes = so_spec_has(n, SO_SPEC_OPT_NODES);
    o->k = so_spec_has(n, SO_SPEC_OPT_K) ? (int)n->opt[SO_SPEC_OPT_K] : 0;
    o->best = so_spec_flag(n, SO_SPEC_OPT_BEST);
    o->ends = so_spec_has(n, SO_SPEC_OPT_ENDS) ? (int)n->opt[SO_SPEC_OPT_ENDS] : 0;
    o->nodes = has_nodes                                ? (int)n->opt[SO_SPEC_OPT_NODES]
               : o->k > 0 || o->best || n->tree_len > 0 ? budget
                                                        : 0;
    return so_spec_read_tree(s, n, &o->nodes, &o->tree, err);
}

int so_heads_drafter_rows(const so_heads_info *info, int n_parallel) {
    return n_parallel * (info->kind == SO_HEADS_LOOKAHEAD ? info->n_heads + 1 : 1);
}

/* The accuracies of the file by depth. In a pass of their own look-ahead rows follow the root's row,
 * which is right unless the token is outside the subset. */
static void table_of(const heads_drafter *hd, so_shape_table *t) {
    int first = has_own_pass(hd);
    *t = (so_shape_table){.n_depths = SO_MIN(hd->n_levels, (int)SO_SHAPE_DEPTHS),
                          .n_ranks = SO_MIN(hd->info->n_ranks, (int)SO_SHAPE_RANKS)};
    t->accuracy[0][0] = first ? 1 : 0;
    for (int d = first; d < t->n_depths; d++)
        memcpy(t->accuracy[d], hd->info->accuracy[d - first],
               (size_t)t->n_ranks * sizeof t->accuracy[d][0]);
}

static void copy_shape(const so_heads_drafter_opts *o, so_shape *s) {
    s->n_nodes = o->tree.n;
    for (int i = 0; i < s->n_nodes; i++) {
        int parent = o->tree.parent[i];
        s->nodes[i] =
            (so_shape_node){.parent = (int16_t)parent,
                            .rank = o->tree.rank[i],
                            .depth = (int16_t)(parent < 0 ? 1 : s->nodes[parent].depth + 1),
                            .chance = -1};
        s->depth = SO_MAX(s->depth, s->nodes[i].depth);
    }
}

static int make_shape(heads_drafter *hd, so_err *err) {
    int widths[MAX_LEVELS], n = SO_MIN(hd->n_levels, (int)SO_SHAPE_DEPTHS);
    if (!is_tree(&hd->o) || hd->o.best)
        return SO_OK;
    if (hd->o.k > 0) {
        for (int i = 0; i < n; i++)
            widths[i] = hd->o.k;
        return so_shape_product(widths, n, hd->o.nodes, hd->shape, err);
    }
    if (hd->o.tree.n > 0) {
        copy_shape(&hd->o, hd->shape);
        return SO_OK;
    }
    if (hd->info->n_ranks == 0)
        return so_err_set(err, SO_EINVAL,
                          "the heads' file states no accuracies, so no tree can be grown for "
                          "nodes=%d: give k=N, best or tree=FILE as well",
                          hd->o.nodes);
    so_shape_table *t = SO_NEW(so_shape_table);
    table_of(hd, t);
    int rc = so_shape_grow(t, hd->o.nodes, hd->shape, err);
    free(t);
    return rc;
}

static int make_pass(heads_drafter *hd, so_err *err) {
    int rows = hd->group * hd->n_levels;
    if (!has_own_pass(hd))
        return SO_OK;
    hd->rows = SO_NEW_N(so_row, rows);
    hd->seqs = SO_NEW_N(so_seq *, hd->group);
    int rc = so_pass_create(hd->target, hd->kv, rows, rows, &hd->pass, err);
    return rc == SO_OK ? rc : so_err_prefix(err, "look-ahead rows");
}

static void make_rows(heads_drafter *hd) {
    int n_vocab = so_model_hparams(hd->target)->n_vocab;
    hd->r = (so_draft_rows){.n_vocab = n_vocab,
                            .n_subset = so_heads_logits_len(hd->h),
                            .subset = so_heads_subset(hd->h),
                            .wide = so_sampler_create(n_vocab),
                            .logits = SO_NEW_N(float, n_vocab)};
    hd->r.narrow = so_sampler_create(hd->r.n_subset);
    if (hd->r.subset)
        so_sampler_set_subset(hd->r.narrow, hd->r.subset);
    for (int i = 0; i < n_vocab; i++)
        hd->r.logits[i] = SO_DRAFT_EXCLUDED;
    for (int i = 0; i < hd->n_levels; i++)
        hd->levels[i].probs = SO_NEW_N(float, n_vocab);
    hd->work = SO_NEW_N(float, n_vocab);
}

/* Trees have records of their own: their guesses have other chances. */
static uint64_t id_of(const so_heads_drafter_opts *o) {
    uint64_t shape = so_hash_bytes(o->tree.rank, (size_t)o->tree.n * sizeof *o->tree.rank) ^
                     3 * so_hash_bytes(o->tree.parent, (size_t)o->tree.n * sizeof *o->tree.parent);
    uint64_t ids[3] = {o->id,
                       1 + (uint64_t)o->k * 2 + (uint64_t)o->best + ((uint64_t)o->nodes << 16) +
                           ((uint64_t)o->ends << 32),
                       shape};
    return o->id == 0 || (!is_tree(o) && o->ends == 0) ? o->id : so_hash_bytes(ids, sizeof ids);
}

int so_heads_drafter_create(so_heads *h, const so_model *target, so_kv *kv,
                            const so_heads_drafter_opts *o, so_drafter **out, so_err *err) {
    const so_heads_info *info = so_heads_get_info(h);
    heads_drafter *hd = SO_NEW(heads_drafter);
    bool own_pass = info->kind == SO_HEADS_LOOKAHEAD && o->ends == 0;
    SO_ASSERT(o->n_parallel >= 1 && o->max_draft >= 1);
    *hd = (heads_drafter){.h = h, .info = info, .target = target, .kv = kv, .o = *o};
    hd->d = so_model_hparams(target)->d_model;
    hd->n_levels = info->n_heads + own_pass;
    if (o->best && hd->o.nodes == 0)
        hd->o.nodes = DEFAULT_BEST_NODES;
    hd->group = SO_MIN(o->n_parallel, so_heads_max_rows(h) / rows_per_job(hd));
    size_t bytes = so_heads_weight_bytes(h), all = so_model_weight_bytes(target);
    hd->base = (so_drafter){
        .vt = &VTS[info->kind],
        .draws = true,
        .has_cost = true,
        .flat_cost = true,
        .uses_terms = true,
        .tree_nodes = is_tree(o) ? hd->o.nodes : 0,
        .wants_target_hidden = !own_pass,
        .recorded = o->id != 0,
        .request_only = true,
        .id = id_of(o),
        .size = (double)(bytes + (own_pass ? all : 0)) / (double)SO_MAX(all, (size_t)1),
        .claimed_agreement = own_pass ? 0 : info->accuracy[0][0],
    };
    if (o->ends > 0)
        hd->base.end_rows = (so_end_rows){so_heads_embeddings(h), hd->n_levels, o->ends};
    hd->shape = SO_NEW(so_shape);
    hd->jobs = SO_NEW_N(so_draft_job *, hd->group);
    hd->x = SO_NEW_N(float, (size_t)hd->group *(size_t)rows_per_job(hd) * (size_t)hd->d);
    make_rows(hd);
    int rc = make_shape(hd, err);
    if (rc == SO_OK && o->k > hd->r.n_subset)
        rc = so_err_set(err, SO_ERANGE, "k=%d: the heads have logits for %d tokens only", o->k,
                        hd->r.n_subset);
    if (rc == SO_OK)
        rc = make_pass(hd, err);
    if (rc != SO_OK)
        heads_free(&hd->base);
    else
        *out = &hd->base;
    return rc;
}

/* Drafting with a model: one chain per request, one pass of the draft model per depth for all
 * requests. Trees share the requests, the catch-up and the passes' memory; model_tree.c grows them.
 *
 * Length. A chain ends
 *
 *   - at the job's limits, or when the tree is full;
 *   - at the end of the draft's context, or when its cache has too few pages;
 *   - at a row whose most likely token has a probability below p_min;
 *   - with terms, where another guess (so_model_next_gain, is_worth_drawing) or another pass for all
 *     chains (so_model_end_unprofitable) does not gain more than its price.
 *
 * These conditions are decided by whole rows, before a token is sampled from the row (rule of
 * sight, draft/drafter.h): of a row that a token is sampled from, only the largest probability is
 * used.
 *
 * Catch-up. The draft has its own KV cache with one sequence per request; `text` has the tokens of
 * that sequence. Before drafting, the sequence is truncated to where it agrees with the request's
 * text, and all missing tokens are fed: the whole prompt, the last guess (sampled, never fed), or a
 * round of another drafter. So a prompt is prefilled at its first draft, from shared pages of
 * earlier texts if there are any (kv/prefix.h), and again after a preemption. If pages are short,
 * the request gets no draft; other requests are not affected.
 *
 *   cache: t0 … t4 │ missing: t5 t6 (root) │ drafted: d1 d2 …
 *
 * Each pass feeds missing tokens within a budget of rows. The row of the last missing token gives
 * the next guess, which is then missing itself.
 *
 * Levels together. On a remote backend a pass may have several levels of greedy chains
 * (model_levels.c).
 *
 * How a guess is chosen:
 *   temperature 0      the argmax after bias and penalties; a point
 *   tree with q rows   sampled from the row q after bias, penalties, temperature and cuts, with
 *                      random numbers keyed by position and round (`reject`)
 *   tree without them  with the target's noise at that position (`match`): if q is near p, the
 *                      same noise selects the same token
 *
 * Refuses to go past its own context, to read ids outside its vocabulary and to use rows with NaN
 * or Inf: it makes no guesses there. Thread: the engine thread. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "draft/model_impl.h"
#include "draft/shape.h"
#include "kv/prefix.h"

enum { MAX_LOGITS = 16 << 20 }; /* floats of the results of one pass */

/* --- requests --- */

/* Offers pages of the request's own text to other requests; pages with guesses are left out. */
static void offer_pages(so_model_request *s) {
    if (so_seq_open_nodes(s->seq) > 0)
        so_seq_abort(s->seq);
    so_prefix_offer(s->seq, s->text, SO_MIN(s->n_agreed, so_seq_len(s->seq)));
}

static void model_preempt(so_drafter *d, void *state) {
    so_model_drafter *md = (so_model_drafter *)d;
    so_model_request *s = state;
    if (md->inner)
        so_drafter_preempt(md->inner, s->inner);
    offer_pages(s);
    so_seq_clear(s->seq);
}

static void free_request(so_model_request *s) {
    so_model_beams_free(s->beams);
    free(s->hidden);
    free(s->text);
    free(s->source);
    free(s);
}

static void model_close(so_drafter *d, void *state) {
    so_model_drafter *md = (so_model_drafter *)d;
    so_model_request *s = state;
    if (md->inner && s->inner)
        md->inner->vt->close(md->inner, s->inner);
    offer_pages(s);
    so_seq_free(s->seq);
    free_request(s);
}

/* Encoder-decoder models: a text that the draft's encoder cannot read gets no guesses. */
static int copy_source(const so_model_drafter *md, so_model_request *s, const so_draft_text *text,
                       so_err *err) {
    s->source = so_try_alloc((size_t)text->n_source, sizeof *s->source);
    if (!s->source)
        return so_err_set(err, SO_ENOMEM, "model: no memory for %d tokens", text->n_source);
    memcpy(s->source, text->source, (size_t)text->n_source * sizeof *s->source);
    s->n_source = text->n_source;
    s->disabled = s->n_source < 1 || s->n_source > so_sources_max_len(md->sources);
    for (int i = 0; i < s->n_source; i++)
        s->disabled |= s->source[i] < 0 || s->source[i] >= md->n_vocab;
    return SO_OK;
}

static int model_open(so_drafter *d, const so_draft_text *text, void **state, so_err *err) {
    so_model_drafter *md = (so_model_drafter *)d;
    so_model_request *s = SO_NEW(so_model_request);
    s->cap = SO_MIN(SO_MAX(text->max_tokens, text->n_prompt), md->n_ctx) + SO_TREE_MAX;
    s->text = so_try_alloc((size_t)s->cap, sizeof *s->text);
    s->hidden = so_try_alloc((size_t)SO_MODEL_N_HIDDEN * (size_t)SO_MAX(md->d_hidden, 1),
                             sizeof *s->hidden);
    for (int i = 0; i < SO_MODEL_N_HIDDEN; i++)
        s->hidden_pos[i] = -1;
    int rc = SO_OK;
    if (!s->text || !s->hidden)
        rc = so_err_set(err, SO_ENOMEM,
                        "model: no memory for %d tokens and %d hidden states of width %d", s->cap,
                        SO_MODEL_N_HIDDEN, md->d_hidden);
    if (rc == SO_OK && md->sources)
        rc = copy_source(md, s, text, err);
    if (rc == SO_OK && md->inner)
        rc = md->inner->vt->open(md->inner, text, &s->inner, err);
    if (rc != SO_OK) {
        free_request(s);
        return rc;
    }
    s->seq = so_seq_create(md->kv); /* allocates no pages yet */
    so_seq_reserve(s->seq,
                   SO_MIN(s->cap, md->n_ctx) + SO_KV_PAGE + (md->o.ahead ? SO_TREE_MAX : 0));
    if (md->base.tree_nodes > 0 || md->o.ahead)
        so_seq_reserve_nodes(s->seq, SO_TREE_MAX);
    *state = s;
    return SO_OK;
}

static void model_observe(so_drafter *d, void *state, const int32_t *tokens, int n) {
    so_model_drafter *md = (so_model_drafter *)d;
    if (md->inner)
        so_drafter_observe(md->inner, ((so_model_request *)state)->inner, tokens, n);
}

/* The cache keeps what was computed for its own guesses; sync_text compares tokens alone. */
static void model_replace(so_drafter *d, void *state, const int32_t *tokens, int n) {
    (void)d;
    so_model_request *s = state;
    n = SO_MIN(n, s->cap - s->n_agreed);
    if (n > 0)
        memcpy(s->text + s->n_agreed, tokens, (size_t)n * sizeof *tokens);
}

/* A draft model may read the target's hidden states (so_model_d_target_hidden): with each accepted
 * token the hidden state from which the token was sampled. The latest SO_MODEL_N_HIDDEN states are
 * kept; prompt tokens, guesses and older tokens are fed without a hidden state. Shared pages may
 * hold tokens that were fed with or without one: this changes guesses, not the distribution of the
 * output. */
static void model_add_hidden(so_drafter *d, void *state, int pos, const float *x) {
    so_model_drafter *md = (so_model_drafter *)d;
    so_model_request *s = state;
    size_t width = (size_t)md->d_hidden;
    if (md->inner)
        so_drafter_add_hidden(md->inner, s->inner, pos, x);
    if (width == 0)
        return;
    memcpy(s->hidden + (size_t)(pos % SO_MODEL_N_HIDDEN) * width, x, width * sizeof *x);
    s->hidden_pos[pos % SO_MODEL_N_HIDDEN] = pos;
}

const float *so_model_hidden_of(const so_model_drafter *md, const so_model_request *s, int pos) {
    bool known = md->d_hidden > 0 && s->hidden_pos[pos % SO_MODEL_N_HIDDEN] == pos;
    return known ? s->hidden + (size_t)(pos % SO_MODEL_N_HIDDEN) * (size_t)md->d_hidden : NULL;
}

/* --- before the first pass --- */

/* Reads the source at the request's first draft, and again after a preemption. */
static bool has_source(const so_model_drafter *md, so_model_request *s) {
    if (!md->sources || so_seq_get_source(s->seq))
        return true;
    so_err err = {0};
    return so_sources_set(md->sources, s->seq, s->source, s->n_source, &err) == SO_OK;
}

bool so_model_knows(const so_model_drafter *md, so_model_request *s, const int32_t *tokens, int n) {
    for (; s->n_checked < n && !s->disabled; s->n_checked++)
        s->disabled = tokens[s->n_checked] < 0 || tokens[s->n_checked] >= md->n_vocab;
    return !s->disabled && has_source(md, s);
}

/* The root is always fed again, for its logits. */
void so_model_sync_text(so_model_request *s, const int32_t *tokens, int n) {
    int len = so_seq_len(s->seq), same = SO_MIN(s->n_agreed, len);
    while (same < len && same < n && s->text[same] == tokens[same])
        same++;
    same = SO_MIN(same, n); /* the text may be shorter than the last time */
    so_seq_truncate_to(s->seq, SO_MIN(same, n - 1));
    memcpy(s->text + same, tokens + same, (size_t)(n - same) * sizeof *s->text);
    s->n_agreed = n;
    so_prefix_offer(s->seq, s->text, so_seq_len(s->seq));
    so_prefix_take(s->seq, s->text, n - 1);
}

/* New guesses that the tree can take. Guesses of other drafters fill it, too. If it is full,
 * another row would be computed in vain. */
int so_model_tree_room(const so_draft_job *job) {
    return SO_MIN(job->max_nodes + 1, SO_TREE_MAX) - job->tree->n_nodes;
}

bool so_model_begin_chain(so_model_drafter *md, so_draft_job *job, so_model_chain *c) {
    so_model_request *s = job->state;
    int limit = SO_MIN(SO_MIN(job->max_depth, job->max_nodes), md->o.max_draft);
    limit = SO_MIN(limit, md->n_ctx - job->n_tokens + 1); /* the last guess is never fed */
    bool had_source = so_seq_get_source(s->seq) != NULL;
    if (limit < 1 || so_model_tree_room(job) <= 0 ||
        !so_model_knows(md, s, job->tokens, job->n_tokens))
        return false;
    so_model_tree_settle(s, job);
    so_model_sync_text(s, job->tokens, job->n_tokens);
    *c = (so_model_chain){.job = job, .s = s, .limit = limit, .n_text = job->n_tokens};
    c->path = job->terms ? (double)job->terms->start_value : 1;
    job->n_catch_up = c->n_text - so_seq_len(s->seq) - 1 + (had_source ? 0 : s->n_source);
    return true;
}

/* Prunes the inner drafter's tree to what the first pass can feed. */
static void take_inner_tree(const so_model_drafter *md, so_tree *t, so_model_chain *c) {
    int max = SO_MIN(c->limit - 1, md->n_ctx - c->n_text), n = 0;
    bool keep[SO_TREE_MAX] = {true};
    for (int i = 1; i < t->n_nodes; i++) {
        keep[i] = keep[t->nodes[i].parent] && n < max && t->nodes[i].token < md->n_vocab;
        n += keep[i];
    }
    so_tree_prune(t, keep);
    c->inner = t;
    c->n_guess = n;
}

/* The inner drafter proposes once per round. Its whole tree goes into the first pass, and the path
 * that equals the draft's own guesses is kept, so it changes the number of passes, never a guess. In
 * `reject` it drafts greedily (so_draft_inner_job): the number of rows to feed can end a draft if
 * pages are short, so it must not depend on numbers that decide tokens. The argmax also matches
 * sampled tokens more often. */
static int run_inner(so_model_drafter *md, int n, so_err *err) {
    for (int i = 0; i < n; i++) {
        so_model_chain *c = &md->chains[i];
        md->inner_jobs[i] =
            so_draft_inner_job(c->job, c->s->inner, &md->inner_trees[i], &c->inner_sample);
        md->inner_jobs[i].max_depth = md->inner_jobs[i].max_nodes = c->limit - 1;
    }
    int rc = md->inner->vt->propose(md->inner, md->inner_jobs, n, err);
    for (int i = 0; i < n && rc == SO_OK; i++)
        take_inner_tree(md, &md->inner_trees[i], &md->chains[i]);
    return rc;
}

/* --- sampling --- */

/* Whether a guess from this row is worth the price of its test, decided before sampling by the row
 * alone. A refused row is reported to the planner; otherwise only good rows would be counted and
 * the drafter overestimated. */
static bool is_worth_drawing(const so_model_chain *c) {
    so_draft_job *job = c->job;
    int depth = c->depth + 1;
    if (!job->terms || c->path * so_terms_chance(job->terms, depth, (double)c->confidence) >
                           so_terms_row(job->terms, depth))
        return true;
    job->refused_depth = depth;
    job->refused_confidence = c->confidence;
    return false;
}

/* Samples a column from the row's probabilities, which become the proposal's q; −1: the chain ends.
 * The confidence is derived from the row's largest probability before anything is sampled: if much
 * of q is on one token, p mostly agrees (Σ min(p,q) is 0.25 in the flattest eighth of rows, 0.71 in
 * the most peaked). The square root spreads rows over the classes of acceptance.h. It errs on the
 * high side, so that a low confidence never keeps a class from being tested. */
static int32_t draw_from_chances(so_model_drafter *md, so_model_chain *c, const so_sample_params *p,
                                 const so_model_row *r, int row) {
    so_draft_job *job = c->job;
    so_sample_context ctx = {c->s->text, c->n_text, job->n_prompt};
    if (so_sample_distribution(r->sampler, p, r->logits, &ctx, md->probs, NULL) != SO_OK)
        return -1;
    float peak = so_model_row_largest(md->probs, r->n);
    c->confidence = job->tree->row_confidence[row] = sqrtf(SO_MIN(peak, 1.0f));
    if (peak < md->o.p_min || !is_worth_drawing(c))
        return -1;
    so_model_row_widen(md, r, md->probs, so_tree_row(c->job->tree, row));
    return so_sample_pick(md->probs, r->n, so_draft_uniform(&md->base, c->job, c->depth + 1, 0));
}

/* The most likely column, or the one that the target's noise selects; −1: the chain ends. */
static int32_t draw_point(so_model_drafter *md, const so_model_chain *c, const so_sample_params *p,
                          const so_model_row *r, double *lead) {
    so_sample_context ctx = {c->s->text, c->n_text, c->job->n_prompt};
    int32_t at = -1;
    if (md->o.p_min > 0) {
        so_sample_params soft = *p;
        soft.temp = p->temp > 0 ? p->temp : 1; /* at 0 every row would have probability 1 */
        if (so_sample_distribution(r->sampler, &soft, r->logits, &ctx, md->probs, NULL) != SO_OK ||
            so_model_row_largest(md->probs, r->n) < md->o.p_min)
            return -1;
    }
    return so_sample_token_lead(r->sampler, p, r->logits, &ctx, &at, lead, NULL) == SO_OK ? at : -1;
}

/* The guess that the pass has chosen and weighed. */
static bool draw_weighed(so_model_drafter *md, so_model_chain *c, int logit, int32_t *token) {
    *token = so_pass_argmax(md->pass, logit);
    c->confidence = (float)SO_MIN(1 / so_pass_sampled(md->pass, logit)->mass, 1.0);
    c->node =
        so_draft_add(c->job, c->node, *token, so_draft_kind(-1), -1, md->base.index, c->confidence);
    return c->node >= 0;
}

/* Adds the chain's next guess from its row to the tree; false: the chain ends. */
static bool draw(so_model_drafter *md, so_model_chain *c, int logit, int32_t *token) {
    const so_draft_job *job = c->job;
    if (!so_model_row_is_finite(md, c->s, logit, c->depth == 0))
        return false;
    if (md->weighed)
        return draw_weighed(md, c, logit, token);
    so_sample_params p = so_model_params(md, job);
    bool drawn = p.temp > 0 && job->tree->max_rows > 0;
    const float *logits = so_pass_logits(md->pass, logit);
    so_model_row r = so_model_row_of(md, &p, logits);
    int row = drawn ? so_tree_new_row(job->tree) : -1;
    if (drawn && row < 0)
        return false;
    double lead = 0;
    int32_t at = drawn ? draw_from_chances(md, c, &p, &r, row) : draw_point(md, c, &p, &r, &lead);
    if (at < 0)
        return false;
    *token = r.ids ? r.ids[at] : at;
    if (!drawn)
        c->confidence = so_model_row_chance(md, logits, &r, at);
    if (!drawn && p.temp > 0)
        c->confidence = so_draft_noisy_confidence(c->confidence, lead);
    c->node =
        so_draft_add(job, c->node, *token, so_draft_kind(row), row, md->base.index, c->confidence);
    return c->node >= 0;
}

/* Adds the guess of one row, or ends the chain. If the next row is computed already, its guess costs
 * nothing but its row in the target's pass, and the planner drops it where it is not worth that;
 * unless the tree has sampled guesses, which makes it stay whole. */
static void draw_next(so_model_drafter *md, so_model_chain *c, int logit, bool next_is_computed) {
    int32_t token;
    if (!draw(md, c, logit, &token)) {
        c->done = c->refused = true;
        return;
    }
    c->s->text[c->n_text++] = token;
    c->depth++;
    if (c->job->terms)
        c->path *= so_terms_chance(c->job->terms, c->depth, (double)c->confidence);
    c->done = c->depth == c->limit || so_model_tree_room(c->job) <= 0;
    if (!next_is_computed || c->job->tree->max_rows > 0)
        c->done |= so_model_next_gain(c) <= 0;
}

static int32_t last_token(const so_model_chain *c) { return c->s->text[c->n_text - 1]; }

/* Adds the guesses that this pass allows: one, and one more per correct guess of the inner drafter,
 * down its tree. */
static void draw_chain(so_model_drafter *md, so_model_chain *c) {
    int n_text = c->n_rows - c->n_guess, n = n_text, node = 0;
    for (;;) {
        draw_next(md, c, c->first_logit + node, false);
        node = c->done || c->n_guess == 0 ? -1 : so_tree_child(c->inner, node, last_token(c));
        if (node < 0)
            break;
        md->path[n++] = n_text - 1 + node;
    }
    for (int i = 0; i < n_text; i++)
        md->path[i] = i;
    so_seq_commit(c->s->seq, md->path, n);
    c->n_guess = 0;
}

/* --- passes --- */

static const so_sample_row WEIGH_BEST = {
    .inverse = 1, .top_p = 1, .least = -INFINITY, .guess = SO_SAMPLE_BEST};

int so_model_add_rows(so_model_drafter *md, so_model_chain *c, int seq, int at, int *n_logits,
                      int *budget) {
    int len = so_seq_len(c->s->seq), missing = c->n_text - len;
    int n = SO_MIN(missing, *budget + 1); /* each chain has one row outside the budget */
    bool whole = n == missing;
    *budget -= n - 1;
    if (!whole)
        c->first_logit = -1;
    int n_guess = whole ? c->n_guess : 0;
    for (int i = 0; i < n; i++)
        md->rows[at + i] = (so_row){.token = c->s->text[len + i],
                                    .pos = len + i,
                                    .seq = seq,
                                    .parent = i ? at + i - 1 : -1,
                                    .want_logits = whole && i >= n - 1,
                                    .sample = &WEIGH_BEST,
                                    .target_hidden = so_model_hidden_of(md, c->s, len + i)};
    for (int k = 1; k <= n_guess; k++) {
        const so_node *node = &c->inner->nodes[k];
        int pos = len + n - 1 + node->depth;
        md->rows[at + n - 1 + k] = (so_row){.token = node->token,
                                            .pos = pos,
                                            .seq = seq,
                                            .parent = at + n - 1 + node->parent,
                                            .want_logits = true,
                                            .sample = &WEIGH_BEST,
                                            .target_hidden = so_model_hidden_of(md, c->s, pos)};
    }
    if (whole) {
        c->first_logit = *n_logits;
        *n_logits += 1 + n_guess;
    }
    return c->n_rows = n + n_guess;
}

/* The rows of the levels after the first; n_seqs chains are in the pass. */
static int add_levels(so_model_drafter *md, int n, int at, int n_seqs, int levels) {
    for (int level = 1; level < levels; level++)
        for (int i = 0, seq = 0; i < n; i++) {
            const so_model_chain *c = &md->chains[i];
            if (c->done)
                continue;
            int parent = level == 1 ? c->last_row : at - n_seqs;
            md->rows[at++] = (so_row){.token = SO_ROW_GUESS,
                                      .pos = md->rows[parent].pos + 1,
                                      .seq = seq++,
                                      .parent = parent,
                                      .want_logits = true,
                                      .sample = &WEIGH_BEST};
        }
    return at;
}

/* Takes the guesses of a pass of several levels, level by level. */
static void draw_levels(so_model_drafter *md, int n, int n_seqs, int levels) {
    for (int level = 0; level < levels; level++) {
        for (int i = 0; i < n; i++) {
            so_model_chain *c = &md->chains[i];
            int logit = c->first_logit + level * n_seqs;
            if (c->done) {
                c->n_in_vain += so_seq_open_nodes(c->s->seq) > 0;
                continue;
            }
            draw_next(md, c, logit, level + 1 < levels);
            SO_ASSERT(c->refused || last_token(c) == so_pass_argmax(md->pass, logit));
        }
        for (int i = 0; i < n && level + 1 < levels; i++)
            md->chains[i].n_rows += !md->chains[i].done;
    }
    for (int i = 0; i < n; i++)
        if (so_seq_open_nodes(md->chains[i].s->seq) > 0)
            so_seq_commit_chain(md->chains[i].s->seq, md->chains[i].n_rows);
}

static void abort_all(so_model_drafter *md, int n) {
    for (int i = 0; i < n; i++)
        if (so_seq_open_nodes(md->chains[i].s->seq) > 0)
            so_seq_abort(md->chains[i].s->seq);
}

/* One pass for all chains that are not done; *more: there were any. */
static int pass_once(so_model_drafter *md, int n, bool *more, so_err *err) {
    int n_rows = 0, n_seqs = 0, n_logits = 0, budget = md->o.n_batch, rc = SO_OK;
    int levels = so_model_levels_together(md, n);
    md->weighed = so_model_argmax_is_guess(md, n) && !(md->o.p_min > 0);
    for (int i = 0; i < n && rc == SO_OK; i++) {
        so_model_chain *c = &md->chains[i];
        if (c->done)
            continue;
        int logits_before = n_logits, budget_before = budget;
        so_model_add_rows(md, c, n_seqs, n_rows, &n_logits, &budget);
        int n_nodes = c->n_rows + levels - 1;
        if (so_seq_pages_needed(c->s->seq, n_nodes) > so_kv_available_pages(md->kv)) {
            c->done = true; /* keeps the guesses so far */
            n_logits = logits_before;
            budget = budget_before;
            continue;
        }
        n_rows += c->n_rows;
        c->job->n_passes += c->first_logit >= 0;
        c->last_row = n_rows - 1;
        rc = so_seq_begin(c->s->seq, n_nodes, err);
        md->seqs[n_seqs++] = c->s->seq;
    }
    *more = n_seqs > 0;
    if (n_seqs == 0)
        return SO_OK;
    n_rows = add_levels(md, n, n_rows, n_seqs, levels);
    so_batch batch = {md->rows, n_rows, md->seqs, n_seqs};
    if (rc == SO_OK)
        rc = so_pass_run(md->pass, &batch, md->weighed ? SO_PASS_SAMPLE : SO_PASS_LOGITS, err);
    if (rc != SO_OK)
        return rc;
    if (levels > 1) {
        draw_levels(md, n, n_seqs, levels);
        return SO_OK;
    }
    for (int i = 0; i < n; i++) {
        so_model_chain *c = &md->chains[i];
        if (c->done)
            continue;
        if (c->first_logit >= 0)
            draw_chain(md, c);
        else
            so_seq_commit_chain(c->s->seq, c->n_rows);
    }
    return SO_OK;
}

static int model_propose(so_drafter *d, so_draft_job *jobs, int n_jobs, so_err *err) {
    so_model_drafter *md = (so_model_drafter *)d;
    int n = 0, rc = SO_OK;
    for (int i = 0; i < n_jobs && n < md->o.n_parallel; i++)
        n += so_model_begin_chain(md, &jobs[i], &md->chains[n]);
    if (n > 0 && md->inner)
        rc = run_inner(md, n, err);
    if (md->base.tree_nodes > 0)
        rc = so_model_tree_propose(md, n, err);
    for (bool more = n > 0 && md->base.tree_nodes == 0; more && rc == SO_OK;
         so_model_end_unprofitable(md, n))
        rc = pass_once(md, n, &more, err);
    for (int i = 0; i < n; i++) {
        const so_model_chain *c = &md->chains[i];
        c->job->n_levels = c->depth + c->refused + c->n_in_vain;
    }
    if (rc != SO_OK)
        abort_all(md, n);
    return rc;
}

/* --- life --- */

static int model_n_ctx(const so_drafter *d) { return ((const so_model_drafter *)d)->n_ctx; }

static double model_cache_fraction(const so_drafter *d, int n_tokens) {
    const so_model_drafter *md = (const so_model_drafter *)d;
    double own = so_kv_pages_for(SO_MIN(n_tokens, md->n_ctx)), inner = 0;
    if (md->inner)
        inner = so_drafter_cache_fraction(md->inner, n_tokens);
    return SO_MAX(inner, own / so_kv_get_shape(md->kv)->n_pages);
}

static void model_free(so_drafter *d) {
    so_model_drafter *md = (so_model_drafter *)d;
    so_drafter_free(md->inner);
    so_pass_free(md->pass);
    so_pass_free(md->beam_pass);
    free(md->beam_batch);
    so_kv_free(md->kv);
    so_sources_free(md->sources);
    so_sampler_free(md->wide);
    so_sampler_free(md->narrow);
    for (int i = 0; md->inner_trees && i < md->o.n_parallel; i++)
        so_tree_deinit(&md->inner_trees[i]);
    free(md->chains);
    free(md->inner_jobs);
    free(md->inner_trees);
    free(md->rows);
    free(md->path);
    free(md->seqs);
    free(md->logits);
    free(md->probs);
    free(md->growths);
    free(md->candidates);
    free(md);
}

static const so_drafter_vt MODEL_VT = {
    .name = "model",
    .free = model_free,
    .open = model_open,
    .close = model_close,
    .propose = model_propose,
    .propose_beams = so_model_propose_beams,
    .observe = model_observe,
    .add_hidden = model_add_hidden,
    .replace = model_replace,
    .n_ctx = model_n_ctx,
    .cache_fraction = model_cache_fraction,
    .preempt = model_preempt,
    .ahead_begin = so_model_ahead_begin,
    .ahead_rows = so_model_ahead_rows,
    .ahead_draw = so_model_ahead_draw,
    .ahead_abort = so_model_ahead_abort,
};

static bool is_tree(const so_model_drafter_opts *o) { return o->k > 0 || o->best || o->tree.n > 0; }

static int create_kv(so_model_drafter *md, const so_kv_shape *shape, so_err *err) {
    so_backend *b = so_model_backend(md->m);
    if (md->o.kv_layout == SO_KV_SLOTTED)
        return so_kv_create_slotted(b, shape, md->n_ctx, &md->kv, err);
    int rc = so_kv_create(b, shape, &md->kv, err);
    return rc == SO_OK && md->o.prefix_cache ? so_prefix_enable(md->kv, err) : rc;
}

static int create_cache(so_model_drafter *md, so_err *err) {
    const so_hparams *hp = so_model_hparams(md->m);
    int64_t pages = md->o.n_pages;
    if (pages == 0)
        pages = (int64_t)md->o.n_parallel *
                (so_kv_pages_for(md->n_ctx) + (md->o.ahead ? so_kv_pages_for(SO_TREE_MAX) : 0));
    if (pages > INT32_MAX / SO_KV_PAGE)
        return so_err_set(err, SO_ELIMIT,
                          "the draft's cache would take %lld pages: lower "
                          "--ctx-size or --parallel",
                          (long long)pages);
    so_kv_shape shape = {.n_layers = hp->n_layers,
                         .n_heads_kv = hp->n_heads_kv,
                         .head_dim = hp->head_dim,
                         .n_pages = (int)pages,
                         .dtype = md->o.kv_dtype};
    int rc = create_kv(md, &shape, err);
    if (rc == SO_OK && hp->n_enc_layers > 0)
        rc = so_sources_create(md->m, md->n_ctx, md->o.n_parallel + SO_SOURCES_SPARE,
                               md->o.kv_dtype, &md->sources, err);
    if (rc == SO_OK)
        rc = so_pass_create(md->m, md->kv, md->max_rows, md->max_logits, &md->pass, err);
    return rc == SO_OK ? rc : so_err_prefix(err, "draft model");
}

static int check_encoder(const so_model_drafter *md, so_err *err) {
    bool draft = so_model_hparams(md->m)->n_enc_layers > 0;
    if (draft == md->o.encoder)
        return SO_OK;
    return so_err_set(err, SO_EMISMATCH,
                      draft ? "the draft model has an encoder and the target has none: give a "
                              "draft model of the target's own kind"
                            : "the target has an encoder and the draft model has none: give an "
                              "encoder-decoder model as draft, or --spec lookup");
}

/* Whether the draft can read what the target gives it: a source text, hidden states. */
static int check_kind(const so_model_drafter *md, so_err *err) {
    int rc = check_encoder(md, err);
    if (rc != SO_OK || md->d_hidden == 0 || md->d_hidden == md->o.d_model)
        return rc;
    return so_err_set(err, SO_EMISMATCH,
                      "the draft model takes hidden states of width %d; the target's have width %d",
                      md->d_hidden, md->o.d_model);
}

/* Counts the ids of the draft's vocabulary subset that the target has, too. The subset is in
 * ascending order, so they are a prefix of it. */
static int find_subset(so_model_drafter *md, so_err *err) {
    int n = so_model_logits_len(md->m);
    md->subset = so_model_vocab_subset(md->m);
    while (n > 0 && (md->subset ? md->subset[n - 1] : n - 1) >= md->o.n_vocab)
        n--;
    md->n_subset = n;
    return n > 0 ? SO_OK
                 : so_err_set(err, SO_EMISMATCH,
                              "the draft model has logits for none of the target's ids 0 to %d",
                              md->o.n_vocab - 1);
}

/* Maximum number of rows with logits in one pass: one per request, and more with an inner drafter
 * or several levels. */
static int max_logits_of(const so_model_drafter *md, const so_drafter *inner) {
    const so_model *m = md->m;
    const so_model_drafter_opts *o = &md->o;
    int all = o->n_parallel * o->max_draft;
    if (o->ahead)
        return SO_MAX(
            o->n_parallel * SO_MAX(md->max_frontier, 1),
            SO_MIN(o->n_parallel * SO_AHEAD_OUTCOMES, MAX_LOGITS / so_model_logits_len(m)));
    if (md->max_frontier > 0)
        return o->n_parallel * md->max_frontier;
    if (inner)
        return all;
    if (!so_model_backend(m)->vt->remote)
        return o->n_parallel;
    return SO_MAX(o->n_parallel, SO_MIN(all, MAX_LOGITS / so_model_logits_len(m)));
}

/* With an inner drafter, or as a tree, a level takes a different time and its guesses have other
 * chances, so these have their own records. */
static uint64_t id_of(const so_model_drafter_opts *o, const so_drafter *inner) {
    uint64_t ids[2] = {o->id, inner ? inner->id : 0};
    if (o->id == 0 || (!inner && !is_tree(o)))
        return o->id;
    if (inner)
        ids[1] ^= so_hash_bytes(inner->vt->name, strlen(inner->vt->name));
    else
        ids[1] = 1 + (uint64_t)o->k * 4 + (uint64_t)o->best * 2 + (uint64_t)o->distinct +
                 ((uint64_t)o->nodes << 16);
    for (int i = 0; i < o->tree.n; i++) {
        int16_t node[2] = {o->tree.parent[i], o->tree.rank[i]};
        ids[1] = ids[1] * 31 + so_hash_bytes(node, sizeof node);
    }
    return so_hash_bytes(ids, sizeof ids);
}

/* Rows of one request's tree in one pass. */
static int max_frontier_of(const so_model_drafter *md) {
    if (!is_tree(&md->o))
        return 0;
    int by_memory = MAX_LOGITS / so_model_logits_len(md->m) / md->o.n_parallel;
    return SO_MAX(1, SO_MIN(md->o.nodes, by_memory));
}

static int check_tree(const so_model_drafter *md, so_err *err) {
    if (md->o.k <= md->n_subset)
        return SO_OK;
    return so_err_set(err, SO_ERANGE, "k=%d: the draft model has logits for %d tokens only",
                      md->o.k, md->n_subset);
}

int so_model_opts_from_spec(const so_spec *s, const so_spec_node *n, so_model_drafter_opts *o,
                            so_err *err) {
    o->k = so_spec_has(n, SO_SPEC_OPT_K) ? (int)n->opt[SO_SPEC_OPT_K] : 0;
    o->best = so_spec_flag(n, SO_SPEC_OPT_BEST);
    o->distinct = so_spec_flag(n, SO_SPEC_OPT_DISTINCT);
    if (so_spec_has(n, SO_SPEC_OPT_NODES))
        o->nodes = (int)n->opt[SO_SPEC_OPT_NODES];
    return so_spec_read_tree(s, n, &o->nodes, &o->tree, err);
}

static void set_base(so_model_drafter *md, const so_drafter *inner) {
    const so_model_drafter_opts *o = &md->o;
    so_drafter *d = &md->base;
    d->vt = &MODEL_VT;
    d->draws = d->has_cost = d->is_model = d->uses_terms = true;
    d->tree_nodes = is_tree(o) ? o->nodes : 0;
    d->backend = so_model_backend(md->m);
    d->size = o->size;
    d->id = id_of(o, inner);
    /* With a temperature of its own, or p_min, its acceptance says nothing about other settings. */
    d->recorded = o->id != 0 && o->temp < 0 && !(o->p_min > 0);
    d->claimed_agreement = o->claimed_agreement;
    d->wants_target_hidden = md->d_hidden > 0 || (inner && inner->wants_target_hidden);
    /* Shared pages were computed with the hidden states of other requests. */
    d->request_only = md->d_hidden == 0;
}

int so_model_drafter_create(const so_model *m, const so_model_drafter_opts *o, so_drafter *inner,
                            so_drafter **out, so_err *err) {
    SO_ASSERT(o->max_draft >= 1 && o->max_draft < SO_TREE_MAX && o->n_parallel >= 1);
    so_model_drafter *md = SO_NEW(so_model_drafter);
    int n_par = o->n_parallel;
    md->m = m;
    md->o = *o;
    md->n_vocab = so_model_hparams(m)->n_vocab;
    md->d_hidden = so_model_d_target_hidden(m);
    set_base(md, inner);
    md->n_ctx = SO_MIN(o->n_ctx, so_model_hparams(m)->n_ctx_train);
    md->max_frontier = max_frontier_of(md);
    md->max_logits = max_logits_of(md, inner);
    md->max_rows = o->n_batch + md->max_logits;
    int rc = check_kind(md, err);
    if (rc == SO_OK)
        rc = find_subset(md, err);
    if (rc == SO_OK)
        rc = check_tree(md, err);
    if (rc == SO_OK)
        rc = create_cache(md, err);
    if (rc != SO_OK) {
        model_free(&md->base);
        return rc;
    }
    md->wide = so_sampler_create(o->n_vocab);
    md->narrow = so_sampler_create(md->n_subset);
    if (md->subset && md->n_subset < o->n_vocab) /* if equal, wide_row uses `narrow`, too */
        so_sampler_set_subset(md->narrow, md->subset);
    md->chains = SO_NEW_N(so_model_chain, n_par);
    md->inner_jobs = SO_NEW_N(so_draft_job, n_par);
    md->inner_trees = SO_NEW_N(so_tree, n_par);
    for (int i = 0; i < n_par; i++)
        so_tree_init(&md->inner_trees[i], o->n_vocab, 0);
    md->rows = SO_NEW_N(so_row, md->max_rows);
    md->path = SO_NEW_N(int32_t, md->max_rows);
    md->seqs = SO_NEW_N(so_seq *, n_par);
    md->logits = SO_NEW_N(float, o->n_vocab);
    for (int i = 0; i < o->n_vocab; i++)
        md->logits[i] = SO_DRAFT_EXCLUDED;
    md->probs = SO_NEW_N(float, o->n_vocab);
    if (is_tree(o)) {
        md->growths = SO_NEW_N(so_model_growth, n_par);
        md->candidates =
            SO_NEW_N(so_model_branch, SO_TREE_MAX + md->max_frontier * SO_SAMPLE_TOP_MAX);
    }
    md->inner = inner;
    md->base.levels_per_pass = so_model_levels_per_pass(md);
    *out = &md->base;
    return SO_OK;
}

/* Drafting ahead with a model (ahead.h): the draft's side of async().
 *
 *   begin   the tokens that the cache lacks, then the root and the tree that the target verifies, in
 *           one pass. The rows of the tree's nodes give the candidates: the likeliest tokens that do
 *           not follow the node in the tree already
 *   rows    one level of the drafts of all outcomes of all requests, in one pass
 *   draw    the tokens of that level
 *
 * All of it is one open speculation of the draft's cache, as in model_tree.c:
 *
 *   committed text │ missing … root │ x1 x2 … │ level 1 of each outcome │ level 2 …
 *
 * It stays open. The next call knows the text that came of it and commits the path that agrees
 * (so_model_tree_settle), so what was drafted for the outcome that occurred is not computed again.
 *
 * How tokens are chosen. Candidates are chosen by whole rows: at temperature 0 and in `reject` the
 * tokens of highest probability, in `match` those of highest probability with the target's noise,
 * which foresees the correction. Guesses are chosen as in model.c; sampled guesses leave their q row
 * in the job and are sampled by so_ahead_sample.
 *
 * Hidden states of the target exist for the text of finished rounds only, up to the root; the nodes of the
 * tree and the guesses of the outcomes are fed without one.
 *
 * Refuses what model.c refuses. Thread: whoever holds the drafter (async.h), never two at once. */
#include <math.h>
#include <string.h>

#include "draft/model_impl.h"

enum { MAX_OPEN_TEXT = 16 }; /* missing tokens that share a pass with the tree */

/* --- begin --- */

/* Tokens of the path from the root to `node` go behind the text, for penalties and noise. Returns
 * the number of tokens up to and including the node. */
static int write_path(const so_ahead_job *a, so_model_request *s, int node) {
    int n = a->job.n_tokens + a->tree.nodes[node].depth;
    for (int i = node, at = n; i > 0; i = a->tree.nodes[i].parent)
        s->text[--at] = a->tree.nodes[i].token;
    return n;
}

/* How many nodes of the tree are fed: as many as a pass has rows and the context positions for. */
static int n_nodes_of(const so_model_drafter *md, const so_ahead_job *a, int n_jobs) {
    int most = SO_MIN(SO_MIN(md->max_logits / n_jobs, SO_AHEAD_NODES), a->tree.n_nodes), n = 1;
    while (n < most && a->job.n_tokens - 1 + a->tree.nodes[n].depth < md->n_ctx)
        n++;
    return n;
}

static void end_job(so_ahead_job *a) {
    so_model_request *s = a->job.state;
    if (so_seq_open_nodes(s->seq) > 0)
        so_seq_abort(s->seq);
    s->n_open = 0;
    a->skip = true;
}

/* Brings the cache to the job's text. */
static void start_job(so_model_drafter *md, so_ahead_job *a) {
    so_model_chain c;
    if (!so_model_begin_chain(md, &a->job, &c))
        a->skip = true;
}

/* One pass of catch-up for all jobs that lack more than fits beside their tree. Returns 1 if there
 * was one. */
static int catch_up(so_model_drafter *md, so_ahead_job *jobs, int n, so_err *err) {
    int n_rows = 0, n_seqs = 0, rc = SO_OK;
    int beside_tree = SO_MAX(1, SO_MIN(MAX_OPEN_TEXT, md->o.n_batch / n));
    for (int i = 0; i < n && rc == SO_OK; i++) {
        so_model_request *s = jobs[i].job.state;
        if (jobs[i].skip)
            continue;
        int len = so_seq_len(s->seq), missing = jobs[i].job.n_tokens - 1 - len;
        int rows = SO_MIN(missing, md->o.n_batch - n_rows);
        s->n_ahead_rows = 0;
        if (missing < beside_tree || rows < 1)
            continue;
        if (so_seq_pages_needed(s->seq, rows) > so_kv_available_pages(md->kv)) {
            end_job(&jobs[i]);
            continue;
        }
        for (int k = 0; k < rows; k++)
            md->rows[n_rows + k] = (so_row){.token = s->text[len + k],
                                            .pos = len + k,
                                            .seq = n_seqs,
                                            .parent = k ? n_rows + k - 1 : -1,
                                            .target_hidden = so_model_hidden_of(md, s, len + k)};
        rc = so_seq_begin(s->seq, rows, err);
        s->n_ahead_rows = rows;
        n_rows += rows;
        md->seqs[n_seqs++] = s->seq;
    }
    so_batch batch = {md->rows, n_rows, md->seqs, n_seqs};
    if (rc == SO_OK && n_rows > 0)
        rc = so_pass_run(md->pass, &batch, 0, err);
    for (int i = 0; i < n && rc == SO_OK; i++) {
        so_model_request *s = jobs[i].job.state;
        if (!jobs[i].skip && s->n_ahead_rows > 0)
            so_seq_commit_chain(s->seq, s->n_ahead_rows);
    }
    return rc != SO_OK ? rc : n_rows > 0;
}

/* The rows of one job in the first pass: what its cache lacks, the root, the tree. */
static int add_first_rows(so_model_drafter *md, so_ahead_job *a, int seq, int at, int *n_logits) {
    so_model_request *s = a->job.state;
    int len = so_seq_len(s->seq), missing = a->job.n_tokens - len, root = missing - 1;
    for (int i = 0; i < root + a->n_nodes; i++) {
        const so_node *node = &a->tree.nodes[SO_MAX(i - root, 0)];
        int parent = i <= root ? i - 1 : root + node->parent;
        s->open_tokens[i] = i < root ? s->text[len + i] : node->token;
        s->open_parents[i] = parent;
        md->rows[at + i] =
            (so_row){.token = s->open_tokens[i],
                     .pos = i <= root ? len + i : len + root + node->depth,
                     .seq = seq,
                     .parent = parent < 0 ? -1 : at + parent,
                     .target_hidden = i <= root ? so_model_hidden_of(md, s, len + i) : NULL,
                     .want_logits = i >= root};
    }
    s->n_open = root + a->n_nodes;
    a->first_slot = len + root;
    s->ahead_logit = *n_logits;
    *n_logits += a->n_nodes;
    return s->n_open;
}

static int first_pass(so_model_drafter *md, so_ahead_job *jobs, int n, so_err *err) {
    int n_rows = 0, n_seqs = 0, n_logits = 0, rc = SO_OK;
    for (int i = 0; i < n && rc == SO_OK; i++) {
        so_ahead_job *a = &jobs[i];
        so_model_request *s = a->job.state;
        if (a->skip)
            continue;
        a->n_nodes = n_nodes_of(md, a, n);
        int rows = a->job.n_tokens - so_seq_len(s->seq) - 1 + a->n_nodes;
        if (so_seq_pages_needed(s->seq, rows) > so_kv_available_pages(md->kv)) {
            end_job(a);
            continue;
        }
        rc = so_seq_begin(s->seq, rows, err);
        n_rows += add_first_rows(md, a, n_seqs, n_rows, &n_logits);
        md->seqs[n_seqs++] = s->seq;
    }
    so_batch batch = {md->rows, n_rows, md->seqs, n_seqs};
    if (rc == SO_OK && n_rows > 0)
        rc = so_pass_run(md->pass, &batch, SO_PASS_LOGITS, err);
    return rc;
}

/* The chances of the candidates of one node, given that the accepted path ends there: without the
 * tokens that follow it in the tree. Scores have noise if p has a temperature. At a low temperature
 * all weights may be 0. */
static void set_chances(so_ahead_job *a, int node, const so_scored *top, int n, double slope) {
    double sum = 0;
    int m = 0;
    for (int i = 0; i < n; i++)
        if (so_tree_child(&a->tree, node, top[i].id) < 0)
            sum += exp(slope * (top[i].score - top[0].score));
    for (int i = 0; i < n && m < SO_AHEAD_CANDIDATES; i++) {
        double w = exp(slope * (top[i].score - top[0].score));
        if (so_tree_child(&a->tree, node, top[i].id) < 0)
            a->candidates[node][m++] =
                (so_ahead_candidate){top[i].id, sum > 0 ? (float)(w / sum) : 0};
    }
    a->n_candidates[node] = m;
}

/* In `reject` the noise decides nothing and must not be used (rule of sight): the candidates are the
 * tokens of highest probability. */
static void find_candidates(so_model_drafter *md, so_ahead_job *a, int node) {
    so_model_request *s = a->job.state;
    int logit = s->ahead_logit + node;
    so_scored top[SO_AHEAD_CANDIDATES + 8];
    int n_top = 0, want = SO_MIN((int)SO_LEN(top), md->n_subset);
    a->n_candidates[node] = 0;
    if (!so_model_row_is_finite(md, s, logit, node == 0))
        return;
    so_sample_params p = so_model_params(md, &a->job);
    double slope = p.temp == 0 ? 1 : a->drawn ? 1 / (double)p.temp : SO_DRAFT_LEAD_SLOPE;
    if (a->drawn)
        p.temp = 0;
    const float *logits = so_pass_logits(md->pass, logit);
    so_model_row r = so_model_row_of(md, &p, logits);
    so_sample_context ctx = {s->text, write_path(a, s, node), a->job.n_prompt};
    if (so_sample_top(r.sampler, &p, r.logits, &ctx, want, top, &n_top, NULL) != SO_OK)
        return;
    for (int i = 0; r.ids && i < n_top; i++)
        top[i].id = r.ids[top[i].id];
    set_chances(a, node, top, n_top, slope);
}

int so_model_ahead_begin(so_drafter *d, so_ahead_job *jobs, int n, bool first, so_err *err) {
    so_model_drafter *md = (so_model_drafter *)d;
    for (int i = 0; i < n && first; i++)
        if (!jobs[i].skip)
            start_job(md, &jobs[i]);
    int rc = catch_up(md, jobs, n, err);
    if (rc != 0)
        return rc;
    rc = first_pass(md, jobs, n, err);
    for (int i = 0; i < n && rc == SO_OK; i++)
        for (int node = 0; !jobs[i].skip && node < jobs[i].n_nodes; node++)
            find_candidates(md, &jobs[i], node);
    return rc;
}

/* --- levels --- */

/* Rows of one job's outcomes at a level; returns their number. */
static int add_level_rows(so_model_drafter *md, so_ahead_job *a, int seq, int level, int at,
                          int *n_logits) {
    so_model_request *s = a->job.state;
    int n = 0, slot = so_seq_len(s->seq) + so_seq_open_nodes(s->seq);
    for (int i = 0; i < a->n_outcomes; i++) {
        so_ahead_outcome *o = &a->outcomes[i];
        int pos = so_ahead_root_pos(a, o) + level - 1;
        int before = level == 1 ? a->first_slot + o->node : o->slot;
        o->done |= pos >= md->n_ctx || s->n_open == SO_TREE_MAX || *n_logits == md->max_logits;
        if (o->done)
            continue;
        o->logit = (*n_logits)++;
        o->slot = slot + n;
        s->open_tokens[s->n_open] = o->last;
        s->open_parents[s->n_open++] = before - so_seq_len(s->seq);
        md->rows[at + n++] = (so_row){.token = o->last,
                                      .pos = pos,
                                      .seq = seq,
                                      .parent = so_row_after(before),
                                      .want_logits = true};
    }
    return n;
}

/* The text before an outcome's guess at a level. */
static so_sample_context context_of(const so_ahead_job *a, const so_ahead_outcome *o, int level) {
    so_model_request *s = a->job.state;
    int n = write_path(a, s, o->node);
    s->text[n++] = a->candidates[o->node][o->candidate].token;
    for (int k = 1; k < level; k++)
        s->text[n++] = o->sampled[k - 1];
    return (so_sample_context){s->text, n, a->job.n_prompt};
}

/* The q row of a sampled guess. Its confidence comes from the row alone, as in model.c. */
static void write_q(so_model_drafter *md, so_ahead_job *a, int outcome, int level) {
    so_ahead_outcome *o = &a->outcomes[outcome];
    so_sample_params p = so_model_params(md, &a->job);
    const float *logits = so_pass_logits(md->pass, o->logit);
    so_model_row r = so_model_row_of(md, &p, logits);
    so_sample_context ctx = context_of(a, o, level);
    bool ok = outcome < a->q_outcomes && level <= a->q_depth &&
              so_sample_distribution(r.sampler, &p, r.logits, &ctx, md->probs, NULL) == SO_OK;
    float peak = ok ? so_model_row_largest(md->probs, r.n) : 0;
    if (!ok || peak < md->o.p_min || !(peak > 0)) {
        o->done = true;
        return;
    }
    so_model_row_widen(md, &r, md->probs, so_ahead_q(a, outcome, level));
    o->confidence[level - 1] = sqrtf(SO_MIN(peak, 1.0f));
    o->token_at[level - 1] = 0; /* there is a guess; so_ahead_sample gives it */
}

int so_model_ahead_rows(so_drafter *d, so_ahead_job *jobs, int n, int level, so_err *err) {
    so_model_drafter *md = (so_model_drafter *)d;
    int n_rows = 0, n_seqs = 0, n_logits = 0, rc = SO_OK;
    for (int i = 0; i < n && rc == SO_OK; i++) {
        so_ahead_job *a = &jobs[i];
        if (a->skip)
            continue;
        so_model_request *s = a->job.state;
        if (so_seq_pages_needed(s->seq, a->n_outcomes) > so_kv_available_pages(md->kv)) {
            a->skip = true; /* what was drafted stays */
            continue;
        }
        int rows = add_level_rows(md, a, n_seqs, level, n_rows, &n_logits);
        if (rows == 0) {
            a->skip = true;
            continue;
        }
        rc = so_seq_extend(s->seq, rows, err);
        n_rows += rows;
        md->seqs[n_seqs++] = s->seq;
    }
    so_batch batch = {md->rows, n_rows, md->seqs, n_seqs};
    if (rc == SO_OK && n_rows > 0)
        rc = so_pass_run(md->pass, &batch, SO_PASS_LOGITS, err);
    for (int i = 0; i < n && rc == SO_OK; i++)
        for (int k = 0; !jobs[i].skip && k < jobs[i].n_outcomes; k++) {
            so_ahead_outcome *o = &jobs[i].outcomes[k];
            if (o->done)
                continue;
            o->done = !so_model_row_is_finite(md, jobs[i].job.state, o->logit, false);
            if (!o->done && jobs[i].drawn)
                write_q(md, &jobs[i], k, level);
        }
    return rc != SO_OK ? rc : n_rows > 0;
}

/* The point of an outcome's row at a level. */
static void draw_point(so_model_drafter *md, so_ahead_job *a, so_ahead_outcome *o, int level) {
    so_sample_params p = so_model_params(md, &a->job);
    const float *logits = so_pass_logits(md->pass, o->logit);
    so_model_row r = so_model_row_of(md, &p, logits);
    so_sample_context ctx = context_of(a, o, level);
    double lead = 0;
    int32_t at = -1;
    o->done = so_sample_token_lead(r.sampler, &p, r.logits, &ctx, &at, &lead, NULL) != SO_OK;
    if (o->done || at < 0)
        return;
    float confidence = so_model_row_chance(md, logits, &r, at);
    if (p.temp > 0)
        confidence = so_draft_noisy_confidence(confidence, lead);
    o->last = o->sampled[level - 1] = o->token_at[level - 1] = r.ids ? r.ids[at] : at;
    o->confidence[level - 1] = confidence;
}

void so_model_ahead_draw(so_drafter *d, so_ahead_job *jobs, int n, int level, bool drawn) {
    so_model_drafter *md = (so_model_drafter *)d;
    for (int i = 0; i < n; i++) {
        so_ahead_job *a = &jobs[i];
        if (a->skip || a->drawn != drawn)
            continue;
        for (int k = 0; k < a->n_outcomes; k++) {
            so_ahead_outcome *o = &a->outcomes[k];
            if (o->done)
                continue;
            if (drawn)
                o->last = o->sampled[level - 1] = so_ahead_sample(a, k, level);
            else
                draw_point(md, a, o, level);
            o->done |= o->last < 0;
        }
    }
}

void so_model_ahead_abort(so_drafter *d, so_ahead_job *jobs, int n) {
    (void)d;
    for (int i = 0; i < n; i++)
        if (jobs[i].job.state)
            end_job(&jobs[i]);
}

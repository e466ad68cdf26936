/* Drafting with a model: a chain per request, one pass of the draft per depth for all of them.
 *
 * The draft has a cache of its own, and each request a sequence in it. What the sequence holds is
 * written beside it (`text`), so nothing has to be told: before drafting, the cache is cut back to
 * where it agrees with the request's text, and everything that is missing, be it the whole prompt,
 * the last drafted token (drawn, never fed) or a round that another drafter drafted, is fed first.
 * So a prompt is read when its first draft is wanted and not before, from the pages of texts that
 * began alike where there are any (kv/prefix.h), and a request that was preempted reads its text
 * again. Where pages are short, a request goes without a draft; nobody else notices.
 *
 *   cache: t0 … t4 │ missing: t5 t6 (root) │ drafted: d1 d2 …     every pass feeds what is missing
 *                                                                 and, once nothing is, draws one
 * How a token is drawn:
 *   temperature 0      the argmax after bias and penalties; a point
 *   tree with rows     from the standardised row q, keyed by position and round (`reject`)
 *   tree without rows  with the target's own noise at that position (`match`): where q is near p,
 *                      the same noise picks the same token
 * A draft may be able to say only some of the vocabulary (so_model_vocab_subset). Its rows are then as
 * narrow as that, and are sampled so unless bias or penalties name tokens; the rest of q is 0.
 *
 * A draft may read the target's states beside tokens (so_model_d_target_hidden): with each accepted token
 * the state from which it was drawn. The latest STATES of them are kept; prompts, guesses and what
 * was accepted longer ago are read without. Pages that
 * texts share hold tokens read either way: that changes guesses, never what becomes of them.
 *
 * A drafter for the drafter proposes once per round; its chain goes into the first pass and is kept
 * as far as it says what the draft itself draws. So it changes the number of passes, never a token.
 * In `reject` it drafts greedily: by the target's noise it would look at numbers that later decide
 * tokens, and how much there is to feed can end a draft where pages are short. The argmax is also
 * right more often about a token that is drawn.
 *
 * Where the draft ends depends on budgets, contexts, the job's terms and whole rows, never on a
 * drawn value (rule of sight): of a drawn token only the peak of its row counts. Refuses to go past
 * its own context, to read ids it does not know and to go by rows that are not finite: it falls
 * silent there. One thread. */
#include "draft/model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "kv/prefix.h"

enum { STATES = 64 };
/* The logit of a token that the draft cannot say: finite, since the sampler is slow about rows that
 * are not, and so low that neither bias nor temperature gives it a chance beside another. */
static const float NEVER = -1e30f;

typedef struct request_state {
    so_seq *seq;
    void *inner;
    int32_t *text; /* [cap] what the draft has read or will read; the cache holds a beginning */
    int cap;
    int n_agreed;  /* of `text`: known to be the request's own */
    int n_checked; /* ids looked at */
    bool foreign;  /* has an id that the draft does not know, or knows by NaN alone */
    float *states; /* [STATES][d_state] of the target, each place p of the text at p % STATES … */
    int state_at[STATES]; /* … where this says p */
} request_state;

/* One request's chain while it is drafted. */
typedef struct chain {
    so_draft_job *job;
    request_state *s;
    int node, depth, limit;
    int n_text;                 /* tokens of s->text, drafted ones included */
    int32_t guess[SO_TREE_MAX]; /* of the inner drafter, for the first draw */
    int n_guess;
    so_sample_params inner_sample;
    int n_rows, first_logit; /* in this pass; first_logit −1: still catching up */
    double path;             /* chance of the whole chain so far, by the job's terms */
    float sure;              /* of the latest guess */
    bool done, refused;      /* refused: a step was made and no token drawn */
} chain;

typedef struct model_drafter {
    so_drafter base;
    const so_model *m;
    so_model_drafter_opts o;
    so_drafter *inner;
    so_kv *kv;
    so_pass *pass;
    so_sampler *wide, *narrow; /* of n_vocab of the target, of n_said */
    int n_ctx, n_vocab;        /* of the draft */
    const int32_t *said; /* [n_said] ids that it can say and the target has; NULL: 0, 1, … */
    int n_said;
    int d_state; /* of the target's states that the draft reads; 0: none */
    int max_rows;
    chain *chains;            /* [n_parallel] */
    so_draft_job *inner_jobs; /* [n_parallel] */
    so_tree *inner_trees;     /* [n_parallel] */
    so_row *rows;             /* [max_rows] */
    so_seq **seqs;            /* [n_parallel] */
    float *logits;            /* [n_vocab of the target], NEVER but for what is said */
    float *probs;             /* [n_vocab of the target] */
    bool warned;              /* of rows that are not finite */
} model_drafter;

/* --- requests --- */

/* What is known to be text stays for others; guesses do not. */
static void keep_pages(request_state *s) {
    so_prefix_offer(s->seq, s->text, SO_MIN(s->n_agreed, so_seq_len(s->seq)));
}

static void model_park(so_drafter *d, void *state) {
    model_drafter *md = (model_drafter *)d;
    request_state *s = state;
    if (md->inner)
        so_drafter_park(md->inner, s->inner);
    keep_pages(s);
    so_seq_clear(s->seq);
}

static void free_request(request_state *s) {
    free(s->states);
    free(s->text);
    free(s);
}

static void model_close(so_drafter *d, void *state) {
    model_drafter *md = (model_drafter *)d;
    request_state *s = state;
    if (md->inner && s->inner)
        md->inner->vt->close(md->inner, s->inner);
    keep_pages(s);
    so_seq_free(s->seq);
    free_request(s);
}

static int model_open(so_drafter *d, const so_draft_text *text, void **state, so_err *err) {
    model_drafter *md = (model_drafter *)d;
    request_state *s = SO_NEW(request_state);
    s->cap = SO_MIN(SO_MAX(text->max_tokens, text->n_prompt), md->n_ctx) + SO_TREE_MAX;
    s->text = so_try_alloc((size_t)s->cap, sizeof *s->text);
    s->states = so_try_alloc((size_t)STATES * (size_t)SO_MAX(md->d_state, 1), sizeof *s->states);
    for (int i = 0; i < STATES; i++)
        s->state_at[i] = -1;
    int rc = SO_OK;
    if (!s->text || !s->states)
        rc = so_err_set(err, SO_ENOMEM, "model: no memory for %d tokens and %d states of %d",
                        s->cap, STATES, md->d_state);
    if (rc == SO_OK && md->inner)
        rc = md->inner->vt->open(md->inner, text, &s->inner, err);
    if (rc != SO_OK) {
        free_request(s);
        return rc;
    }
    s->seq = so_seq_create(md->kv); /* takes no pages yet */
    so_seq_reserve(s->seq, SO_MIN(s->cap, md->n_ctx));
    *state = s;
    return SO_OK;
}

static void model_observe(so_drafter *d, void *state, const int32_t *tokens, int n) {
    model_drafter *md = (model_drafter *)d;
    if (md->inner)
        so_drafter_observe(md->inner, ((request_state *)state)->inner, tokens, n);
}

static void model_read_state(so_drafter *d, void *state, int pos, const float *x) {
    model_drafter *md = (model_drafter *)d;
    request_state *s = state;
    size_t width = (size_t)md->d_state;
    if (md->inner)
        so_drafter_read_state(md->inner, s->inner, pos, x);
    if (width == 0)
        return;
    memcpy(s->states + (size_t)(pos % STATES) * width, x, width * sizeof *x);
    s->state_at[pos % STATES] = pos;
}

/* NULL: not known, or no longer. */
static const float *state_of(const model_drafter *md, const request_state *s, int pos) {
    bool known = md->d_state > 0 && s->state_at[pos % STATES] == pos;
    return known ? s->states + (size_t)(pos % STATES) * (size_t)md->d_state : NULL;
}

/* --- before the first pass --- */

static bool knows_text(const model_drafter *md, request_state *s, const so_draft_job *job) {
    for (; s->n_checked < job->n_tokens && !s->foreign; s->n_checked++)
        s->foreign = job->tokens[s->n_checked] < 0 || job->tokens[s->n_checked] >= md->n_vocab;
    return !s->foreign;
}

/* Cuts the cache to where it agrees with the text; the root is always fed again, for its logits. */
static void sync_text(request_state *s, const so_draft_job *job) {
    int len = so_seq_len(s->seq), same = SO_MIN(s->n_agreed, len);
    while (same < len && same < job->n_tokens && s->text[same] == job->tokens[same])
        same++;
    so_seq_truncate_to(s->seq, SO_MIN(same, job->n_tokens - 1));
    memcpy(s->text + same, job->tokens + same, (size_t)(job->n_tokens - same) * sizeof *s->text);
    s->n_agreed = job->n_tokens;
    so_prefix_offer(s->seq, s->text, so_seq_len(s->seq));
    so_prefix_take(s->seq, s->text, job->n_tokens - 1);
}

/* Fills *c; false where the draft has nothing to say. */
static bool begin_chain(model_drafter *md, so_draft_job *job, chain *c) {
    request_state *s = job->state;
    int limit = SO_MIN(SO_MIN(job->max_depth, job->max_nodes), md->o.max_draft);
    limit = SO_MIN(limit, md->n_ctx - job->n_tokens + 1); /* the last one is never fed */
    if (limit < 1 || !knows_text(md, s, job))
        return false;
    sync_text(s, job);
    *c = (chain){.job = job, .s = s, .limit = limit, .n_text = job->n_tokens};
    c->path = job->terms ? (double)job->terms->start : 1;
    job->n_read = c->n_text - so_seq_len(s->seq) - 1;
    return true;
}

/* The first chain of the tree that the inner drafter made. */
static void take_guesses(const model_drafter *md, const so_tree *t, chain *c) {
    int room = SO_MIN(c->limit - 1, md->n_ctx - c->n_text);
    for (int node = 0; t->nodes[node].first >= 0 && c->n_guess < room;) {
        node = t->proposals[t->nodes[node].first].child;
        if (t->nodes[node].token >= md->n_vocab)
            return;
        c->guess[c->n_guess++] = t->nodes[node].token;
    }
}

static const so_sample_params *greedily(const so_sample_params *p, so_sample_params *out) {
    if (!p)
        return NULL;
    *out = *p;
    out->temp = 0;
    return out;
}

static int ask_inner(model_drafter *md, int n, so_err *err) {
    for (int i = 0; i < n; i++) {
        const so_draft_job *job = md->chains[i].job;
        so_tree *t = &md->inner_trees[i];
        so_tree_reset(t, job->tree->nodes[0].token, job->tree->root_pos);
        md->inner_jobs[i] = *job;
        md->inner_jobs[i].terms = NULL; /* its guesses are free of the target: no row, no test */
        md->inner_jobs[i].state = md->chains[i].s->inner;
        md->inner_jobs[i].tree = t;
        if (job->tree->max_rows > 0) { /* `reject`: the argmax, which looks at no number */
            md->inner_jobs[i].temp = 0;
            md->inner_jobs[i].sample = greedily(job->sample, &md->chains[i].inner_sample);
        }
        md->inner_jobs[i].max_depth = md->inner_jobs[i].max_nodes = md->chains[i].limit - 1;
    }
    int rc = md->inner->vt->propose(md->inner, md->inner_jobs, n, err);
    for (int i = 0; i < n && rc == SO_OK; i++)
        take_guesses(md, &md->inner_trees[i], &md->chains[i]);
    return rc;
}

/* --- drawing --- */

/* A row of the draft as it is sampled: as narrow as the draft says it, or as wide as the target's
 * vocabulary. ids: what its places stand for; NULL: themselves. */
typedef struct draft_row {
    const float *logits;
    so_sampler *sampler;
    const int32_t *ids;
    int n;
} draft_row;

static draft_row narrow_row(const model_drafter *md, const float *logits) {
    return (draft_row){logits, md->narrow, md->said, md->n_said};
}

static draft_row wide_row(const model_drafter *md, const float *logits) {
    if (md->n_said == md->o.n_vocab)
        return narrow_row(md, logits);
    for (int i = 0; i < md->n_said; i++)
        md->logits[md->said ? md->said[i] : i] = logits[i];
    return (draft_row){md->logits, md->wide, NULL, md->o.n_vocab};
}

/* Penalties and bias go by ids, and so does noise, of which the narrow sampler knows. */
static bool needs_ids(so_sample_params p) {
    p.temp = 0;
    return !so_sample_is_argmax(&p);
}

/* Lanes, so that the compiler uses vectors. */
static float largest(const float *row, int n) {
    enum { LANES = 16 };
    float m[LANES] = {0}, best = 0;
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < LANES; k++)
            m[k] = row[i + k] > m[k] ? row[i + k] : m[k];
    for (; i < n; i++)
        best = SO_MAX(best, row[i]);
    for (int k = 0; k < LANES; k++)
        best = SO_MAX(best, m[k]);
    return best;
}

static bool row_is_unsure(const model_drafter *md, const float *row, int n) {
    return md->o.p_min > 0 && largest(row, n) < md->o.p_min;
}

/* Chances of a row's places as a row of the target's vocabulary. */
static void spread(const model_drafter *md, const draft_row *r, const float *probs, float *out) {
    if (r->n == md->o.n_vocab) {
        memcpy(out, probs, (size_t)r->n * sizeof *out);
        return;
    }
    memset(out, 0, (size_t)md->o.n_vocab * sizeof *out);
    for (int i = 0; i < r->n; i++)
        out[r->ids ? r->ids[i] : i] = probs[i];
}

static so_sample_params params_of(const model_drafter *md, const so_draft_job *job) {
    so_sample_params p;
    if (job->sample) {
        p = *job->sample;
    } else {
        so_sample_defaults(&p);
        p.temp = job->temp;
        p.seed = job->seed;
        p.choice = job->choice;
    }
    if (p.temp > 0 && md->o.temp >= 0)
        p.temp = md->o.temp;
    return p;
}

/* A row that is not finite ends its chain. Where it is the text's own, all rows behind it will be
 * the same: the draft falls silent for this request. */
static bool row_is_sound(model_drafter *md, chain *c, int logit) {
    so_err err = {0};
    if (so_pass_check(md->pass, logit, &err) == SO_OK)
        return true;
    c->s->foreign |= c->depth == 0;
    if (!md->warned)
        so_log(SO_LOG_WARN, "draft model: %s; behind such a token there are no guesses", err.msg);
    md->warned = true;
    return false;
}

/* Before a token is drawn, by the row alone: whether a test of it is worth its price. A row that is
 * not is told to the planner, or the tested ones would flatter the drafter. */
static bool is_worth_a_draw(const chain *c) {
    so_draft_job *job = c->job;
    int depth = c->depth + 1;
    if (!job->terms || c->path * so_terms_chance(job->terms, depth, (double)c->sure) >
                           so_terms_row(job->terms, depth))
        return true;
    job->refused_depth = depth;
    job->refused_confidence = c->sure;
    return false;
}

/* The place that is drawn, by chances that are written down in the tree as its row; −1 where the
 * chain ends. How sure the draft is of it goes by the row's peak, before anything is drawn: where
 * much of q lies on one token, p mostly agrees (Σ min(p,q) is 0.25 in the flattest eighth of rows,
 * 0.71 in the most peaked). Its root spreads rows over the levels of acceptance.h and is too
 * hopeful rather than not hopeful enough, so no level is left untested by its word alone. */
static int32_t draw_from_chances(model_drafter *md, chain *c, const so_sample_params *p,
                                 const draft_row *r, int row) {
    so_draft_job *job = c->job;
    so_sample_context ctx = {c->s->text, c->n_text, job->n_prompt};
    if (so_sample_distribution(r->sampler, p, r->logits, &ctx, md->probs, NULL) != SO_OK)
        return -1;
    float peak = largest(md->probs, r->n);
    c->sure = job->tree->row_sure[row] = sqrtf(SO_MIN(peak, 1.0f));
    if (peak < md->o.p_min || !is_worth_a_draw(c))
        return -1;
    spread(md, r, md->probs, so_tree_row(c->job->tree, row));
    return so_sample_pick(md->probs, r->n, so_draft_uniform(&md->base, c->job, c->depth + 1, 0));
}

/* The place that is the likeliest, or the target's own noise's choice; −1 where the chain ends. */
static int32_t draw_point(model_drafter *md, const chain *c, const so_sample_params *p,
                          const draft_row *r, double *lead) {
    so_sample_context ctx = {c->s->text, c->n_text, c->job->n_prompt};
    int32_t at = -1;
    if (md->o.p_min > 0) {
        so_sample_params soft = *p;
        soft.temp = p->temp > 0 ? p->temp : 1; /* at 0 the row would always be sure of itself */
        if (so_sample_distribution(r->sampler, &soft, r->logits, &ctx, md->probs, NULL) != SO_OK ||
            row_is_unsure(md, md->probs, r->n))
            return -1;
    }
    return so_sample_token_lead(r->sampler, p, r->logits, &ctx, &at, lead, NULL) == SO_OK ? at : -1;
}

/* How sure the draft is of a token that noise chose: the chance that it gives to it, and its lead
 * over the next one, noise and all, since the target's row differs and its noise does not. Both
 * together tell a guess that stands from one that does not in 76 of 100 pairs, the chance alone in
 * 71 (3,300 guesses for SmolLM2, temperature 1; a logistic fit). */
static float sure_of_noisy(float chance, double lead) {
    double q = SO_MIN(SO_MAX((double)chance, 1e-4), 1 - 1e-4);
    return (float)(1 / (1 + exp(0.6 - 0.6 * lead - 0.18 * log(q / (1 - q)))));
}

/* What the draft's own softmax gives to the token at a place of r. */
static float chance_of(const model_drafter *md, const float *logits, const draft_row *r,
                       int32_t at) {
    if (r->n > md->n_said && md->said) { /* of a wide row: a token, that the draft may not say */
        int32_t token = at;
        at = so_sample_subset_index(md->said, md->n_said, token);
        if (md->said[at] != token)
            return 0;
    }
    return at < md->n_said ? so_sample_prob_estimate(md->narrow, logits, at) : 0;
}

/* Draws the next token of the chain from its row and adds it to the tree; false where the chain
 * ends. */
static bool draw(model_drafter *md, chain *c, int logit, int32_t *token) {
    const so_draft_job *job = c->job;
    if (!row_is_sound(md, c, logit))
        return false;
    so_sample_params p = params_of(md, job);
    bool drawn = p.temp > 0 && job->tree->max_rows > 0;
    const float *logits = so_pass_logits(md->pass, logit);
    draft_row r = needs_ids(p) ? wide_row(md, logits) : narrow_row(md, logits);
    int row = drawn ? so_tree_new_row(job->tree) : -1;
    if (drawn && row < 0)
        return false;
    double lead = 0;
    int32_t at = drawn ? draw_from_chances(md, c, &p, &r, row) : draw_point(md, c, &p, &r, &lead);
    if (at < 0)
        return false;
    *token = r.ids ? r.ids[at] : at;
    if (!drawn)
        c->sure = chance_of(md, logits, &r, at);
    if (!drawn && p.temp > 0)
        c->sure = sure_of_noisy(c->sure, lead);
    c->node = so_draft_add(job, c->node, *token, so_draft_kind(row), row, md->base.index, c->sure);
    return c->node >= 0;
}

/* What another guess would bring beyond its row, before that row is seen; negative: nothing. */
static double next_gain(const chain *c) {
    const so_draft_terms *t = c->job->terms;
    return t ? c->path * so_terms_chance(t, c->depth + 1, -1) - so_terms_row(t, c->depth + 1) : 1;
}

/* Draws as far as this pass allows: one token, and one more for every guess that was right. */
static void draw_chain(model_drafter *md, chain *c) {
    int n_fed = c->n_rows - c->n_guess, n_right = 0;
    for (;;) {
        int32_t token;
        if (!draw(md, c, c->first_logit + n_right, &token)) {
            c->done = c->refused = true;
            break;
        }
        c->s->text[c->n_text++] = token;
        c->depth++;
        if (c->job->terms)
            c->path *= so_terms_chance(c->job->terms, c->depth, (double)c->sure);
        c->done = c->depth == c->limit || next_gain(c) <= 0;
        if (c->done || n_right == c->n_guess || c->guess[n_right] != token)
            break;
        n_right++;
    }
    so_seq_commit_chain(c->s->seq, n_fed + n_right);
    c->n_guess = 0;
}

/* --- passes --- */

/* Rows of one chain, as many as the budget allows: what the cache lacks, then the guesses. */
static int add_rows(model_drafter *md, chain *c, int seq, int at, int *n_logits, int *budget) {
    int len = so_seq_len(c->s->seq), missing = c->n_text - len;
    int n = SO_MIN(missing, *budget + 1); /* one row is everybody's own */
    bool whole = n == missing;
    *budget -= n - 1;
    if (!whole)
        c->first_logit = -1;
    int n_guess = whole ? c->n_guess : 0;
    for (int i = 0; i < n + n_guess; i++)
        md->rows[at + i] = (so_row){.token = i < n ? c->s->text[len + i] : c->guess[i - n],
                                    .pos = len + i,
                                    .seq = seq,
                                    .parent = i ? at + i - 1 : -1,
                                    .want_logits = whole && i >= n - 1,
                                    .target_hidden = state_of(md, c->s, len + i)};
    if (whole) {
        c->first_logit = *n_logits;
        *n_logits += 1 + n_guess;
    }
    return c->n_rows = n + n_guess;
}

static void abort_all(model_drafter *md, int n) {
    for (int i = 0; i < n; i++)
        if (so_seq_open_nodes(md->chains[i].s->seq) > 0)
            so_seq_abort(md->chains[i].s->seq);
}

/* One pass for all chains that go on; *more says whether there were any. */
static int pass_once(model_drafter *md, int n, bool *more, so_err *err) {
    int n_rows = 0, n_seqs = 0, n_logits = 0, budget = md->o.n_batch, rc = SO_OK;
    for (int i = 0; i < n && rc == SO_OK; i++) {
        chain *c = &md->chains[i];
        if (c->done)
            continue;
        int logits_before = n_logits, budget_before = budget;
        add_rows(md, c, n_seqs, n_rows, &n_logits, &budget);
        if (so_seq_pages_needed(c->s->seq, c->n_rows) > so_kv_available_pages(md->kv)) {
            c->done = true; /* with what it has drafted so far */
            n_logits = logits_before;
            budget = budget_before;
            continue;
        }
        n_rows += c->n_rows;
        rc = so_seq_begin(c->s->seq, c->n_rows, err);
        md->seqs[n_seqs++] = c->s->seq;
    }
    *more = n_seqs > 0;
    if (n_seqs == 0)
        return SO_OK;
    so_batch batch = {md->rows, n_rows, md->seqs, n_seqs};
    if (rc == SO_OK)
        rc = so_pass_run(md->pass, &batch, SO_PASS_LOGITS, err);
    if (rc != SO_OK)
        return rc;
    for (int i = 0; i < n; i++) {
        chain *c = &md->chains[i];
        if (c->done)
            continue;
        if (c->first_logit >= 0)
            draw_chain(md, c);
        else
            so_seq_commit_chain(c->s->seq, c->n_rows);
    }
    return SO_OK;
}

/* Another level is one pass of the draft for all chains that go on: made where what they gain by it
 * together is more than its price. Chains without terms go on by themselves, and pay for all. */
static void end_unpaid(model_drafter *md, int n) {
    double gain = 0, price = 0;
    for (int i = 0; i < n; i++) {
        const chain *c = &md->chains[i];
        if (c->done)
            continue;
        if (!c->job->terms || c->first_logit < 0)
            return;
        gain += next_gain(c);
        price = SO_MAX(price, (double)c->job->terms->level);
    }
    for (int i = 0; i < n && gain <= price; i++)
        md->chains[i].done = true;
}

static int model_propose(so_drafter *d, so_draft_job *jobs, int n_jobs, so_err *err) {
    model_drafter *md = (model_drafter *)d;
    int n = 0, rc = SO_OK;
    for (int i = 0; i < n_jobs && n < md->o.n_parallel; i++)
        n += begin_chain(md, &jobs[i], &md->chains[n]);
    if (n > 0 && md->inner)
        rc = ask_inner(md, n, err);
    for (bool more = n > 0; more && rc == SO_OK; end_unpaid(md, n))
        rc = pass_once(md, n, &more, err);
    for (int i = 0; i < n; i++)
        md->chains[i].job->n_levels = md->chains[i].depth + md->chains[i].refused;
    if (rc != SO_OK)
        abort_all(md, n);
    return rc;
}

/* --- life --- */

static int model_n_ctx(const so_drafter *d) { return ((const model_drafter *)d)->n_ctx; }

static double model_share(const so_drafter *d, int n_tokens) {
    const model_drafter *md = (const model_drafter *)d;
    double own = so_kv_pages_for(SO_MIN(n_tokens, md->n_ctx)), inner = 0;
    if (md->inner)
        inner = so_drafter_share(md->inner, n_tokens);
    return SO_MAX(inner, own / so_kv_get_shape(md->kv)->n_pages);
}

static void model_free(so_drafter *d) {
    model_drafter *md = (model_drafter *)d;
    so_drafter_free(md->inner);
    so_pass_free(md->pass);
    so_kv_free(md->kv);
    so_sampler_free(md->wide);
    so_sampler_free(md->narrow);
    for (int i = 0; md->inner_trees && i < md->o.n_parallel; i++)
        so_tree_deinit(&md->inner_trees[i]);
    free(md->chains);
    free(md->inner_jobs);
    free(md->inner_trees);
    free(md->rows);
    free(md->seqs);
    free(md->logits);
    free(md->probs);
    free(md);
}

static const so_drafter_vt MODEL_VT = {
    .name = "model",
    .free = model_free,
    .open = model_open,
    .close = model_close,
    .propose = model_propose,
    .observe = model_observe,
    .read_state = model_read_state,
    .n_ctx = model_n_ctx,
    .share = model_share,
    .park = model_park,
};

static int create_kv(model_drafter *md, const so_kv_shape *shape, so_err *err) {
    so_backend *b = so_model_backend(md->m);
    if (md->o.kv_layout == SO_KV_SLOTTED)
        return so_kv_create_slotted(b, shape, md->n_ctx, &md->kv, err);
    int rc = so_kv_create(b, shape, &md->kv, err);
    return rc == SO_OK && md->o.prefix_cache ? so_prefix_enable(md->kv, err) : rc;
}

static int create_cache(model_drafter *md, int n_logits, so_err *err) {
    const so_hparams *hp = so_model_hparams(md->m);
    int64_t pages = md->o.n_pages;
    if (pages == 0)
        pages = (int64_t)md->o.n_parallel * so_kv_pages_for(md->n_ctx);
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
    if (rc == SO_OK)
        rc = so_pass_create(md->m, md->kv, md->max_rows, n_logits, &md->pass, err);
    return rc == SO_OK ? rc : so_err_prefix(err, "draft model");
}

static int check_states(const model_drafter *md, so_err *err) {
    if (md->d_state == 0 || md->d_state == md->o.d_model)
        return SO_OK;
    return so_err_set(err, SO_EMISMATCH,
                      "the draft reads states of %d numbers; the target's have %d", md->d_state,
                      md->o.d_model);
}

/* Of what the draft says, ids that the target has; they are ascending, so it is a beginning. */
static int find_said(model_drafter *md, so_err *err) {
    int n = so_model_logits_len(md->m);
    md->said = so_model_vocab_subset(md->m);
    while (n > 0 && (md->said ? md->said[n - 1] : n - 1) >= md->o.n_vocab)
        n--;
    md->n_said = n;
    return n > 0 ? SO_OK
                 : so_err_set(err, SO_EMISMATCH,
                              "the draft says no token of the target, which has ids 0 to %d",
                              md->o.n_vocab - 1);
}

/* With a drafter inside, a level takes another time. */
static uint64_t id_of(const so_model_drafter_opts *o, const so_drafter *inner) {
    uint64_t ids[2] = {o->id, inner ? inner->id : 0};
    if (o->id == 0 || !inner)
        return o->id;
    ids[1] ^= so_hash_bytes(inner->vt->name, strlen(inner->vt->name));
    return so_hash_bytes(ids, sizeof ids);
}

int so_model_drafter_create(const so_model *m, const so_model_drafter_opts *o, so_drafter *inner,
                            so_drafter **out, so_err *err) {
    SO_ASSERT(o->max_draft >= 1 && o->max_draft < SO_TREE_MAX && o->n_parallel >= 1);
    model_drafter *md = SO_NEW(model_drafter);
    int n_par = o->n_parallel, n_logits = n_par * (inner ? o->max_draft : 1);
    md->base.vt = &MODEL_VT;
    md->base.draws = md->base.costs = md->base.is_model = md->base.on_terms = true;
    md->base.size = o->size;
    md->base.id = id_of(o, inner);
    md->base.lasting =
        o->id != 0 && o->temp < 0; /* at its own temperature it shows something else */
    md->base.claimed = o->claimed;
    md->m = m;
    md->o = *o;
    md->n_vocab = so_model_hparams(m)->n_vocab;
    md->d_state = so_model_d_target_hidden(m);
    md->base.reads_states = md->d_state > 0 || (inner && inner->reads_states);
    md->base.by_request = md->d_state == 0; /* pages of other texts were read with other states */
    md->n_ctx = SO_MIN(o->n_ctx, so_model_hparams(m)->n_ctx_train);
    md->max_rows = o->n_batch + n_logits;
    int rc = check_states(md, err);
    if (rc == SO_OK)
        rc = find_said(md, err);
    if (rc == SO_OK)
        rc = create_cache(md, n_logits, err);
    if (rc != SO_OK) {
        model_free(&md->base);
        return rc;
    }
    md->wide = so_sampler_create(o->n_vocab);
    md->narrow = so_sampler_create(md->n_said);
    if (md->said && md->n_said < o->n_vocab) /* else wide_row may serve bias with it */
        so_sampler_set_subset(md->narrow, md->said);
    md->chains = SO_NEW_N(chain, n_par);
    md->inner_jobs = SO_NEW_N(so_draft_job, n_par);
    md->inner_trees = SO_NEW_N(so_tree, n_par);
    for (int i = 0; i < n_par; i++)
        so_tree_init(&md->inner_trees[i], o->n_vocab, 0);
    md->rows = SO_NEW_N(so_row, md->max_rows);
    md->seqs = SO_NEW_N(so_seq *, n_par);
    md->logits = SO_NEW_N(float, o->n_vocab);
    for (int i = 0; i < o->n_vocab; i++)
        md->logits[i] = NEVER;
    md->probs = SO_NEW_N(float, o->n_vocab);
    md->inner = inner;
    *out = &md->base;
    return SO_OK;
}

/* --- tokenizers --- */

/* Rows past the shorter vocabulary: padding, or tokens that only one of the two has. */
static int check_rest(const so_tokenizer *t, const char *who, int32_t from, so_err *err) {
    for (int32_t id = from; id < so_tokenizer_n_vocab(t); id++)
        if (!(so_tokenizer_kind(t, id) & (SO_TOKEN_UNUSED | SO_TOKEN_CONTROL)))
            return so_err_set(err, SO_EMISMATCH,
                              "only the %s has token %d ('%.*s'): the two have %d and %d tokens; "
                              "the draft must come from the target's own family",
                              who, id, SO_STR_ARG(so_tokenizer_piece(t, id)), from,
                              so_tokenizer_n_vocab(t));
    return SO_OK;
}

int so_draft_check_tokenizers(const so_tokenizer *target, const so_tokenizer *draft, so_err *err) {
    int32_t n_target = so_tokenizer_n_vocab(target), n_draft = so_tokenizer_n_vocab(draft);
    int32_t n = SO_MIN(n_target, n_draft);
    for (int32_t id = 0; id < n; id++) {
        so_str a = so_tokenizer_piece(target, id), b = so_tokenizer_piece(draft, id);
        if (!so_str_eq(a, b))
            return so_err_set(err, SO_EMISMATCH,
                              "token %d is '%.*s' in the target and '%.*s' in the draft: the draft "
                              "must have the target's vocabulary",
                              id, SO_STR_ARG(a), SO_STR_ARG(b));
    }
    if (so_tokenizer_eos(target) != so_tokenizer_eos(draft))
        return so_err_set(err, SO_EMISMATCH,
                          "the end token is %d in the target and %d in the draft",
                          so_tokenizer_eos(target), so_tokenizer_eos(draft));
    int rc = check_rest(target, "target", n, err);
    return rc == SO_OK ? check_rest(draft, "draft", n, err) : rc;
}

/* Guesses of the drafter `model` for beam search: the draft model's own beam search, u candidates wide,
 * from the live hypotheses of the target's (Leviathan et al., A.4).
 *
 *   live hypotheses     h0       h1
 *                      / | \     |
 *   level 1           c0 c1 c2   c3       the u best continuations by the draft's log-probabilities,
 *                     |     / \           added to the hypotheses' sums
 *   level 2           c4   c5  c6  …      the u best continuations of these
 *
 * Each level is one pass of the draft model over the level before. Of a hypothesis whose row the
 * target has already computed, the target's own continuations are taken. End tokens are never
 * guessed: a finished hypothesis needs no row.
 *
 * Cache. The draft's sequence has what the target's has: the common text is committed, the tree of the
 * hypotheses stays open. Between rounds the open nodes are matched with the target's tree by their
 * tokens, and what no live hypothesis needs is dropped; nodes that are missing are computed before
 * the first level. Where pages, context or the pass do not suffice, there are no guesses.
 *
 * Guesses change the number of passes and nothing else (engine/beam.c), so nothing here has to be
 * exact. Thread: the engine thread. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "draft/model_impl.h"
#include "kv/prefix.h"

enum { PASS_LOGITS = 16 << 20 }; /* floats of the results of one pass */

struct so_model_beams {
    so_seq *seq;
    /* The open nodes of the draft's sequence: token, and the node that it follows; −1: the committed
     * text. */
    int32_t *tokens, *parents; /* [cap] */
    int n_open, cap;
    int32_t *map;         /* [cap] by place in the target's tree: the open node, −1: none */
    int32_t *kept;        /* [cap] */
    so_scored *items;     /* [width] continuations by one row, end tokens among them */
    so_beam_guess *level; /* [width] the best candidates of a level */
    int width;
};

void so_model_beams_free(so_model_beams *b) {
    if (!b)
        return;
    free(b->tokens);
    free(b->parents);
    free(b->map);
    free(b->kept);
    free(b->items);
    free(b->level);
    free(b);
}

static void reserve(so_model_beams *b, int n, int width) {
    if (n > b->cap) {
        b->cap = 2 * n;
        b->tokens = so_realloc(b->tokens, (size_t)b->cap * sizeof *b->tokens);
        b->parents = so_realloc(b->parents, (size_t)b->cap * sizeof *b->parents);
        b->map = so_realloc(b->map, (size_t)b->cap * sizeof *b->map);
        b->kept = so_realloc(b->kept, (size_t)b->cap * sizeof *b->kept);
    }
    if (width <= b->width)
        return;
    b->width = width;
    b->items = so_realloc(b->items, (size_t)width * sizeof *b->items);
    b->level = so_realloc(b->level, (size_t)width * sizeof *b->level);
}

/* --- the tree of the round before --- */

/* The open node with this token after node `parent`; −1: none. */
static int find_open(const so_model_beams *b, int parent, int32_t token) {
    for (int i = parent + 1; i < b->n_open; i++)
        if (b->parents[i] == parent && b->tokens[i] == token)
            return i;
    return -1;
}

static bool is_live(const so_beam_search *s, int32_t node) {
    return s->nodes[node].depth == s->depth;
}

/* Matches the nodes of the target's tree with open ones, `last` being the node before its root. Live
 * hypotheses are left out: their rows are needed, so they are computed in any case. */
static void map_tree(so_model_beams *b, const so_draft_beams *job, int last) {
    const so_beam_search *s = job->search;
    for (int i = 0; i < job->n_tree; i++) {
        const so_beam_node *n = &s->nodes[job->tree[i]];
        int parent = last, k = i;
        while (i > 0 && job->tree[k] != n->parent) /* parents come shortly before */
            k--;
        if (i > 0)
            parent = b->map[k];
        b->map[i] = -1;
        if (!is_live(s, job->tree[i]) && (i == 0 || parent >= 0))
            b->map[i] = find_open(b, parent, n->token);
    }
}

static int ascending(const void *x, const void *y) {
    int32_t a = *(const int32_t *)x, b = *(const int32_t *)y;
    return a < b ? -1 : a > b;
}

/* Keeps the first n_path nodes of b->kept, which are committed, and the n − n_path others. */
static void keep(so_model_beams *b, const so_draft_beams *job, int n, int n_path) {
    qsort(b->kept, (size_t)n, sizeof *b->kept, ascending);
    so_seq_keep(b->seq, b->kept, n, n_path);
    for (int i = n_path; i < n; i++) {
        int32_t parent = b->parents[b->kept[i]], k = i;
        while (k >= n_path && b->kept[k] != parent)
            k--;
        b->tokens[i - n_path] = b->tokens[b->kept[i]];
        b->parents[i - n_path] = k < n_path ? -1 : k - n_path;
    }
    b->n_open = n - n_path;
    for (int i = 0; i < job->n_tree; i++)
        for (int k = n_path; k < n && b->map[i] >= 0; k++)
            if (b->kept[k] == b->map[i]) {
                b->map[i] = k - n_path;
                break;
            }
}

/* Commits the open nodes that have become common text and drops those that no hypothesis needs. */
static void settle(so_model_request *s, so_model_beams *b, const so_draft_beams *job) {
    int len = so_seq_len(b->seq), n_path = 0, last = -1, n;
    if (so_seq_open_nodes(b->seq) == 0)
        b->n_open = 0; /* none, or dropped meanwhile */
    for (int at = len; at < job->n_tokens - 1 && b->n_open > 0; at++) {
        last = find_open(b, last, job->tokens[at]);
        if (last < 0) {
            so_seq_abort(b->seq);
            b->n_open = n_path = 0;
            break;
        }
        b->kept[n_path++] = last;
    }
    if (b->n_open > 0) { /* otherwise so_model_sync_text compares */
        memcpy(s->text, job->tokens, (size_t)job->n_tokens * sizeof *s->text);
        s->n_agreed = job->n_tokens;
    }
    map_tree(b, job, last);
    n = n_path;
    for (int i = 0; i < job->n_tree; i++)
        if (b->map[i] >= 0)
            b->kept[n++] = b->map[i];
    if (so_seq_open_nodes(b->seq) > 0)
        keep(b, job, n, n_path);
}

/* --- passes --- */

static bool fits(const so_model_drafter *md, const so_seq *seq, int n_rows) {
    return n_rows <= md->beam_rows &&
           so_seq_max_nodes(seq, so_kv_available_pages(md->kv)) >= n_rows &&
           so_seq_open_nodes(seq) + n_rows <= md->beam_nodes;
}

static int run_rows(so_model_drafter *md, so_seq *seq, int n, so_err *err) {
    int rc = so_seq_open_nodes(seq) ? so_seq_extend(seq, n, err) : so_seq_begin(seq, n, err);
    so_batch batch = {md->beam_batch, n, &seq, 1};
    return rc == SO_OK ? so_pass_run(md->beam_pass, &batch, SO_PASS_LOGITS, err) : rc;
}

/* Computes the common text that the cache lacks, up to its last token. *ok: it is complete. */
static int catch_up(so_model_drafter *md, so_model_request *s, const so_draft_beams *job, bool *ok,
                    so_err *err) {
    int rc = SO_OK, last = job->n_tokens - 1;
    *ok = true;
    if (so_seq_open_nodes(s->seq) > 0)
        return SO_OK;
    so_model_sync_text(s, job->tokens, job->n_tokens);
    while (so_seq_len(s->seq) < last && rc == SO_OK) {
        int len = so_seq_len(s->seq), n = SO_MIN(last - len, md->o.n_batch);
        *ok = fits(md, s->seq, n);
        if (!*ok)
            break;
        for (int i = 0; i < n; i++)
            md->beam_batch[i] =
                (so_row){.token = job->tokens[len + i], .pos = len + i, .parent = i - 1};
        rc = run_rows(md, s->seq, n, err);
        if (rc == SO_OK)
            so_seq_commit_chain(s->seq, n);
    }
    return rc;
}

/* Adds an open node and its row, at number `at` of the pass. first: the first node of the pass. */
static void add_row(so_model_drafter *md, so_model_beams *b, const so_draft_beams *job, int at,
                    const so_beam_guess *g, bool wanted) {
    int node = b->n_open++, first = node - at, len = job->n_tokens - 1;
    b->tokens[node] = g->token;
    b->parents[node] = g->parent;
    md->beam_batch[at] = (so_row){.token = g->token,
                                  .pos = len + g->depth,
                                  .parent = g->parent < 0        ? -1
                                            : g->parent >= first ? g->parent - first
                                                                 : so_row_after(len + g->parent),
                                  .want_logits = wanted};
}

/* --- candidates --- */

/* Inserts a candidate into the level's list, best first. */
static void offer(so_model_beams *b, int *n, int width, so_beam_guess g) {
    int at = *n;
    if (at == width && !(g.score > b->level[--at].score))
        return;
    for (; at > 0 && g.score > b->level[at - 1].score; at--)
        b->level[at] = b->level[at - 1];
    b->level[at] = g;
    *n += *n < width;
}

static void offer_items(so_model_beams *b, const so_draft_beams *job, int *n, so_beam_guess from,
                        so_beam_row row, const int32_t *ids) {
    double score = from.score;
    for (int i = 0; i < row.n; i++) {
        bool ends = false;
        from.token = ids ? ids[row.items[i].id] : row.items[i].id;
        for (int k = 0; k < job->n_ends && !ends; k++)
            ends = job->ends[k] == from.token;
        from.score = score + row.items[i].score;
        if (!ends)
            offer(b, n, job->width, from);
    }
}

/* The continuations by a row of the draft's logits. */
static void offer_row(so_model_drafter *md, so_model_request *s, const so_draft_beams *job, int *n,
                      so_beam_guess from, int logit) {
    so_model_beams *b = s->beams;
    so_sample_params p;
    so_sample_defaults(&p);
    p.temp = 0;
    so_err err = {0};
    if (so_pass_check(md->beam_pass, logit, &err) != SO_OK)
        return;
    so_model_row r = so_model_row_of(md, &p, so_pass_logits(md->beam_pass, logit));
    so_beam_row row = {b->items, so_sample_continuations(r.sampler, &p, r.logits,
                                                         job->width + job->n_ends, b->items)};
    offer_items(b, job, n, from, row, r.ids);
}

/* --- levels --- */

/* Computes the nodes of the target's tree that are not cached, among them the live hypotheses, and
 * takes the first level from their rows. *n: candidates; 0 if the rows do not fit. */
static int first_level(so_model_drafter *md, so_model_request *s, so_draft_beams *job,
                       int *live_nodes, int *n, so_err *err) {
    so_model_beams *b = s->beams;
    const so_beam_search *search = job->search;
    int n_rows = 0, n_logits = 0, base = search->nodes[job->tree[0]].depth;
    for (int i = 0; i < job->n_tree; i++)
        n_rows += b->map[i] < 0;
    *n = 0;
    if (!fits(md, b->seq, n_rows))
        return SO_OK;
    for (int i = 0, at = 0; i < job->n_tree; i++) {
        const so_beam_node *node = &search->nodes[job->tree[i]];
        int k = i;
        while (i > 0 && job->tree[k] != node->parent)
            k--;
        if (b->map[i] >= 0)
            continue;
        b->map[i] = b->n_open;
        add_row(md, b, job, at++,
                &(so_beam_guess){node->token, i > 0 ? b->map[k] : -1, node->depth - base, 0},
                is_live(search, job->tree[i]));
    }
    int rc = run_rows(md, b->seq, n_rows, err);
    for (int i = 0; i < job->n_tree && rc == SO_OK; i++) {
        if (!is_live(search, job->tree[i]))
            continue;
        int k = 0, logit = n_logits++;
        while (search->live[k] != job->tree[i])
            k++;
        live_nodes[k] = b->map[i];
        so_beam_guess from = {
            .parent = -1 - k, .depth = 1, .score = search->nodes[job->tree[i]].score};
        if (job->known[k].n > 0)
            offer_items(b, job, n, from, job->known[k], NULL);
        else
            offer_row(md, s, job, n, from, logit);
    }
    return rc;
}

/* Computes the latest level, guesses from `first` on, and takes the next one from its rows. */
static int next_level(so_model_drafter *md, so_model_request *s, so_draft_beams *job, int first,
                      const int *live_nodes, int *guess_nodes, int *n, so_err *err) {
    so_model_beams *b = s->beams;
    const so_beam_search *search = job->search;
    int n_rows = job->n_guesses - first, base = search->nodes[job->tree[0]].depth;
    *n = 0;
    if (!fits(md, b->seq, n_rows))
        return SO_OK;
    for (int i = 0; i < n_rows; i++) {
        so_beam_guess g = job->guesses[first + i];
        g.parent = g.parent < 0 ? live_nodes[-1 - g.parent] : guess_nodes[g.parent];
        g.depth += search->depth - base;
        guess_nodes[first + i] = b->n_open;
        add_row(md, b, job, i, &g, true);
    }
    int rc = run_rows(md, b->seq, n_rows, err);
    for (int i = 0; i < n_rows && rc == SO_OK; i++)
        offer_row(md, s, job, n,
                  (so_beam_guess){.parent = first + i,
                                  .depth = job->guesses[first + i].depth + 1,
                                  .score = job->guesses[first + i].score},
                  i);
    return rc;
}

static int grow(so_model_drafter *md, so_model_request *s, so_draft_beams *job, so_err *err) {
    so_model_beams *b = s->beams;
    int live_nodes[SO_BEAM_MAX], guess_nodes[SO_TREE_MAX];
    int n = 0, first = 0, depth = job->search->depth - job->search->nodes[job->tree[0]].depth;
    int rc = first_level(md, s, job, live_nodes, &n, err);
    while (rc == SO_OK && n > 0 && job->n_guesses + n < SO_TREE_MAX) {
        first = job->n_guesses;
        memcpy(job->guesses + first, b->level, (size_t)n * sizeof *job->guesses);
        job->n_guesses += n;
        if (++job->n_levels == job->max_levels ||
            job->n_tokens + depth + job->n_levels >= md->n_ctx)
            break;
        rc = next_level(md, s, job, first, live_nodes, guess_nodes, &n, err);
    }
    return rc;
}

/* A pass of its own, made when it is first needed: levels of beams are wider than those of chains. */
static int make_pass(so_model_drafter *md, so_err *err) {
    int n_logits = SO_MIN(SO_TREE_MAX, PASS_LOGITS / so_model_logits_len(md->m));
    if (md->beam_pass)
        return SO_OK;
    md->beam_rows = md->o.n_batch + n_logits;
    md->beam_nodes = so_kv_get_shape(md->kv)->n_pages * SO_KV_PAGE;
    int rc = so_pass_create(md->m, md->kv, md->beam_rows, n_logits, &md->beam_pass, err);
    if (rc != SO_OK)
        return so_err_prefix(err, "draft model");
    md->beam_logits = n_logits;
    md->beam_batch = SO_NEW_N(so_row, md->beam_rows);
    return SO_OK;
}

int so_model_propose_beams(so_drafter *d, so_draft_beams *job, so_err *err) {
    so_model_drafter *md = (so_model_drafter *)d;
    so_model_request *s = job->state;
    const so_beam_search *search = job->search;
    int n_live = search->n_live, n_deep = search->depth - search->nodes[job->tree[0]].depth;
    int rc = make_pass(md, err);
    bool ok = true;
    job->n_guesses = job->n_levels = 0;
    if (rc != SO_OK || job->max_levels < 1 || n_live > md->beam_logits ||
        job->width > md->beam_logits || job->n_tokens - 1 + n_deep >= md->n_ctx ||
        !so_model_knows(md, s, job->tokens, job->n_tokens))
        return rc;
    for (int i = 0; i < job->n_tree; i++)
        if (search->nodes[job->tree[i]].token >= md->n_vocab)
            return SO_OK;
    if (!s->beams) {
        s->beams = SO_NEW(so_model_beams);
        s->beams->seq = s->seq;
        so_seq_reserve_nodes(s->seq, md->beam_nodes);
    }
    reserve(s->beams, job->n_tokens + s->beams->n_open + job->n_tree + SO_TREE_MAX,
            job->width + job->n_ends);
    settle(s, s->beams, job);
    rc = catch_up(md, s, job, &ok, err);
    if (rc == SO_OK && ok)
        rc = grow(md, s, job, err);
    if (rc != SO_OK)
        so_seq_abort(s->seq);
    return rc;
}

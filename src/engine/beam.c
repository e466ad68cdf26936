/* Beam search within the engine. verify/beam.h decides which hypotheses live on; this file gives it
 * log-probabilities and keeps the hypotheses in the KV cache.
 *
 * All hypotheses of a request share one sequence. What they have in common is the committed text;
 * below it their tokens are a tree, which stays in the cache as an open speculation (kv/kv.h):
 *
 *   cache: t0 … t8 │ base ─┬─ a ─┬─ c          base   the deepest token that all live hypotheses
 *                          │     └─ d                 share, the last one of r->tokens
 *                          └─ b ─── e          c d e  the live hypotheses' last tokens
 *
 * So hypotheses share every entry up to where they part, nothing is computed twice, and a request
 * with beams is scheduled, preempted and resumed like any other: its text, and more rows.
 *
 * One step of the engine:
 *
 *   1. rows    nodes of the tree that are not in the cache, parents first. Usually these are the live
 *              hypotheses' last tokens; after a preemption it is the whole tree. If they do not fit
 *              one pass, the next pass continues.
 *   2. guesses with speculation: levels of candidates of a draft model (propose)
 *   3. pass    of the target over all of them
 *   4. steps   while the row of every live hypothesis is known, a step of the search
 *   5. keep    moves the base down to where the hypotheses part now; the nodes that no live
 *              hypothesis needs are dropped from the cache
 *
 * Speculation (Leviathan et al., A.4) adds to step 4 what a draft model's own beam search with u ≥ w
 * candidates expects. A step of the search is accepted while the target's next w hypotheses are all
 * among the u candidates of that level: then their rows are known too, and another step can be done.
 *
 * Claim. The results are those of plain beam search, bit for bit.
 *   1. A step is a function of the log-probabilities of the live hypotheses' rows (verify/beam.c).
 *   2. A row's bits depend on its path alone, not on the other rows of the pass (row invariance). A
 *      candidate is used for a hypothesis only if their paths are equal, token for token.
 *   3. So every step sees the numbers that it sees in plain search, and by induction decides the
 *      same. Where a hypothesis has no candidate, the search waits for the next pass.
 * Candidates therefore decide how many passes there are, and nothing else. The same holds for chunks,
 * preemption, other requests and the layout of the cache.
 *
 * A hypothesis that was among the candidates while another was not keeps its row: only the others
 * are computed in the next pass.
 *
 * Memory. The tree has at most one branch for each hypothesis, so the cache must have room for the
 * prompt and w answers; submission checks it. Engine thread. */
#include <math.h>
#include <stdlib.h>

#include "base/clock.h"
#include "engine/beam.h"
#include "kv/prefix.h"

enum { NOT_CACHED = -1, NONE = -1, NO_KEY = INT32_MIN };
enum { MAX_PENALTY = 10 };

/* --- opening --- */

void so_beam_opts_defaults(so_beam_opts *o) {
    *o = (so_beam_opts){.n_best = 1, .length_penalty = 1};
}

static int check_sampling(const so_sample_params *p, so_err *err) {
    if (p->temp != 0)
        return so_err_set(
            err, SO_EINVAL,
            "--temp %g with --beams: beam search does not sample; leave --temp out or "
            "set it to 0",
            (double)p->temp);
    if (p->repeat_penalty != 1 || p->presence_penalty != 0 || p->frequency_penalty != 0)
        return so_err_set(err, SO_EINVAL,
                          "penalties for repeated tokens (--repeat-penalty %g, --presence-penalty "
                          "%g, --frequency-penalty %g) do not work with --beams: leave them out",
                          (double)p->repeat_penalty, (double)p->presence_penalty,
                          (double)p->frequency_penalty);
    return SO_OK;
}

int so_beams_check(const so_request_opts *o, so_err *err) {
    const so_beam_opts *b = &o->beams;
    if (b->width == 0)
        return SO_OK;
    if (b->width < 1 || b->width > SO_BEAM_MAX)
        return so_err_set(err, SO_ERANGE, "--beams %d: must be from 1 to %d", b->width,
                          SO_BEAM_MAX);
    if (b->n_best < 1 || b->n_best > b->width)
        return so_err_set(err, SO_ERANGE,
                          "--n-best %d with --beams %d: must be from 1 to the number of beams",
                          b->n_best, b->width);
    if (!(fabs(b->length_penalty) <= MAX_PENALTY))
        return so_err_set(err, SO_ERANGE, "--length-penalty %g: must be from -%d to %d",
                          b->length_penalty, MAX_PENALTY, MAX_PENALTY);
    if (o->max_tokens == 0)
        return so_err_set(err, SO_ERANGE, "--predict 0 with --beams: must be at least 1");
    if (b->candidates != 0 && (b->candidates < b->width || b->candidates > SO_BEAM_MAX_CANDIDATES))
        return so_err_set(err, SO_ERANGE,
                          "--beam-candidates %d with --beams %d: must be from the number of beams "
                          "to %d",
                          b->candidates, b->width, SO_BEAM_MAX_CANDIDATES);
    return check_sampling(&o->sample, err);
}

int so_beams_room(const so_engine *e, const so_request_opts *o, int *max_len, int *max_slots,
                  so_err *err) {
    int w = o->beams.width;
    so_begin_text begin;
    int64_t slots = (int64_t)e->n_pages * SO_KV_PAGE;
    if (e->o.kv_layout == SO_KV_SLOTTED)
        slots = (int64_t)so_kv_pages_for(e->o.n_ctx) * SO_KV_PAGE;
    int64_t n = o->max_tokens;
    if (n < 0) /* up to the end of the context, or as long as w answers fit the cache */
        n = SO_MAX(1, SO_MIN(e->o.n_ctx - o->n_prompt, (slots - o->n_prompt) / w));
    int64_t need = o->n_prompt + w * n;
    if (need > slots)
        return so_err_set(
            err, SO_ELIMIT,
            "%s and %d beams of up to %lld tokens need %lld places in the cache, there are %lld: "
            "lower --beams or --predict, or raise %s",
            so_request_begin_text(e, o->n_prompt, begin), w, (long long)n, (long long)need,
            (long long)slots, e->o.kv_layout == SO_KV_SLOTTED ? "--ctx-size" : "--kv-pages");
    *max_len = o->n_prompt + (int)n;
    *max_slots = (int)need;
    return SO_OK;
}

static int count_ends(const so_request *r) {
    int n = 0, n_vocab = so_model_hparams(r->e->m)->n_vocab;
    for (int32_t id = 0; id < n_vocab; id++)
        n += so_restrict_ends(r, id);
    return n;
}

static void grow_states(so_beams *b) {
    int before = b->cap;
    if (b->search.n_nodes <= before)
        return;
    b->cap = b->search.cap;
    b->states = so_realloc(b->states, (size_t)b->cap * sizeof *b->states);
    if (b->n_top > 0)
        b->tops = so_realloc(b->tops, (size_t)b->cap * (size_t)b->n_top * sizeof *b->tops);
    b->tree = so_realloc(b->tree, (size_t)b->cap * sizeof *b->tree);
    for (int i = before; i < b->cap; i++)
        b->states[i] = (so_beam_state){.slot = NOT_CACHED, .logit = NONE, .key = NO_KEY};
}

void so_beams_open(so_request *r, const so_request_opts *o) {
    if (o->beams.width == 0)
        return;
    so_beams *b = SO_NEW(so_beams);
    so_beam_rule rule = {.width = o->beams.width,
                         .length_penalty = o->beams.length_penalty,
                         .early_stop = o->beams.early_stop,
                         .max_depth = r->max_len - r->n_prompt};
    so_beam_init(&b->search, &rule, r->tokens[r->n_prompt - 1]);
    b->o = o->beams;
    b->detok = r->detok;
    b->n_ends = count_ends(r);
    b->row_len = so_beam_row_len(rule.width, b->n_ends + (r->stops.n_strings ? rule.width : 0));
    b->items = SO_NEW_N(so_scored, (size_t)rule.width * (size_t)b->row_len);
    b->text = SO_NEW_N(int32_t, r->max_len);
    b->n_top = SO_MAX(r->n_logprobs - 1, 0);
    grow_states(b);
    b->tree[0] = 0;
    b->n_tree = 1;
    r->beams = b;
}

void so_beams_free(so_request *r) {
    so_beams *b = r->beams;
    if (!b)
        return;
    for (int i = 0; i < b->n_results; i++) {
        free(b->results[i].tokens);
        free(b->results[i].logprobs);
        so_buf_free(&b->results[i].text);
    }
    so_beam_deinit(&b->search);
    free(b->results);
    free(b->states);
    free(b->tops);
    free(b->tree);
    free(b->kept);
    free(b->items);
    free(b->text);
    free(b->ends);
    free(b);
    r->beams = NULL;
}

/* --- scheduling --- */

int so_beams_tree_size(const so_request *r) { return r->beams ? r->beams->n_tree : 1; }

void so_beams_admit(so_request *r) {
    if (!r->beams)
        return;
    so_seq_reserve(r->seq, r->max_slots + SO_TREE_MAX);
    so_seq_reserve_nodes(r->seq, r->max_slots + SO_TREE_MAX);
}

void so_beams_release(so_request *r) {
    so_beams *b = r->beams;
    if (!b)
        return;
    if (so_seq_open_nodes(r->seq) > 0)
        so_seq_abort(r->seq);
    for (int i = 0; i < b->n_tree; i++)
        b->states[b->tree[i]].slot = NOT_CACHED;
    r->n_beam_rows = 0;
}

void so_beams_gather(so_request *r) {
    so_beams *b = r->beams;
    int n = 0;
    for (int i = 0; i < b->n_tree; i++)
        n += b->states[b->tree[i]].slot == NOT_CACHED;
    r->n_beam_rows = SO_MIN(n, 1 + r->e->beam_rows_left);
    b->n_pending = n - r->n_beam_rows;
    r->e->beam_rows_left -= r->n_beam_rows - 1;
    b->n_guesses = 0;
}

/* --- rows --- */

static int pos_of(const so_request *r, int depth) { return r->n_prompt - 1 + depth; }

/* What a row after `node` names as its parent. first: the batch row of the first node of this
 * pass. */
static int32_t parent_row(const so_request *r, int32_t node, int first) {
    const so_beam_state *s = &r->beams->states[node];
    return s->row >= 0 ? first + s->row : so_row_after(s->slot);
}

/* The index of a live hypothesis; −1: the node is within hypotheses. */
static int live_index(const so_beam_search *s, int32_t node) {
    for (int i = 0; i < s->n_live; i++)
        if (s->live[i] == node)
            return i;
    return -1;
}

static int add_nodes(so_request *r, int seq, int at) {
    so_beams *b = r->beams;
    int n = 0;
    for (int i = 0; i < b->n_tree; i++) {
        int32_t node = b->tree[i];
        so_beam_state *s = &b->states[node];
        const so_beam_node *d = &b->search.nodes[node];
        s->row = s->logit = NONE;
        if (s->slot != NOT_CACHED || n == r->n_beam_rows)
            continue;
        int live = live_index(&b->search, node);
        int32_t parent = r->n_chunk > 0 ? at - 1 : -1;
        if (i > 0) /* not the base */
            parent = parent_row(r, d->parent, at);
        s->row = n++;
        s->logit = live >= 0 && !b->scored[live] ? b->n_logits++ : NONE;
        r->e->step.rows[at + s->row] = (so_row){.token = d->token,
                                                .pos = pos_of(r, d->depth),
                                                .seq = seq,
                                                .parent = parent,
                                                .want_logits = s->logit != NONE,
                                                .logits_to_host = true};
    }
    SO_ASSERT_OP(n, ==, r->n_beam_rows);
    return n;
}

int so_beams_add_rows(so_request *r, int seq, int at) {
    so_beams *b = r->beams;
    b->n_logits = 0;
    int first = at;
    at += add_nodes(r, seq, at);
    for (int i = 0; i < b->n_guesses; i++) {
        so_beam_guess *g = &b->guesses[i];
        int32_t parent = g->parent >= 0 ? first + r->n_beam_rows + g->parent
                                        : parent_row(r, b->search.live[-1 - g->parent], first);
        b->guess_logits[i] = b->n_logits++;
        r->e->step.rows[at + i] = (so_row){.token = g->token,
                                           .pos = pos_of(r, b->search.depth + g->depth),
                                           .seq = seq,
                                           .parent = parent,
                                           .want_logits = true,
                                           .logits_to_host = true};
    }
    return at + b->n_guesses;
}

int so_beams_n_logits(const so_request *r) { return r->beams ? r->beams->n_logits : 0; }

/* --- rows to candidates --- */

/* The text of a hypothesis after the prompt: true if its last token completes a stop string, where
 * the text then ends. whole: also what the end of an answer adds. */
static bool render(const so_request *r, const int32_t *tokens, int n, bool whole, so_buf *out) {
    const so_tokenizer *t = r->e->tok;
    so_buf piece = {0};
    so_detok d = r->beams->detok;
    so_stops stops = {.strings = r->stops.strings, .n_strings = r->stops.n_strings};
    int min = r->restricted.min_tokens;
    bool stop = false;
    for (int i = 0; i < n + whole && !stop; i++) {
        so_buf_clear(&piece);
        if (i == n)
            so_detok_finish(&d, &piece);
        else if (tokens[i] < so_tokenizer_n_vocab(t)) /* padding ids have no text */
            so_detok_push(&d, tokens[i], &piece);
        if (min == 0 || SO_MIN(i + 1, n) > min)
            stop = so_stops_push(&stops, so_buf_str(&piece), out);
        else
            so_buf_append_str(out, so_buf_str(&piece));
    }
    if (!stop)
        so_stops_finish(&stops, out);
    so_stops_free(&stops);
    so_buf_free(&piece);
    return stop;
}

static so_beam_end ends(void *user, int32_t parent, int32_t token) {
    so_request *r = user;
    so_beams *b = r->beams;
    so_buf text = {0};
    if (so_restrict_ends(r, token))
        return SO_BEAM_END_TOKEN;
    if (r->stops.n_strings == 0 || !r->e->tok)
        return SO_BEAM_GOES_ON;
    int n = so_beam_tokens(&b->search, parent, b->text);
    b->text[n++] = token;
    bool stop = render(r, b->text, n, false, &text);
    so_buf_free(&text);
    return stop ? SO_BEAM_STOP_STRING : SO_BEAM_GOES_ON;
}

/* Reads the row of live hypothesis i, if this pass has computed it. False: it is not known, or not
 * finite, which r->err says. */
static bool score(so_request *r, int i) {
    so_beams *b = r->beams;
    so_engine *e = r->e;
    int32_t node = b->search.live[i];
    int at = r->first_logit + b->states[node].logit, depth = b->search.depth;
    if (b->scored[i])
        return true;
    if (b->states[node].logit == NONE || so_pass_check(e->pass, at, &r->err) != SO_OK)
        return false;
    const float *logits = so_pass_logits(e->pass, at);
    so_beam_tokens(&b->search, node, r->tokens + r->n_prompt);
    so_sample_context ctx = {r->tokens, r->n_prompt + depth, r->n_prompt};
    so_sample_params p = so_restrict_at(r, &ctx);
    b->n_items[i] = so_sample_continuations(e->sampler, &p, logits, b->row_len,
                                            b->items + (size_t)i * (size_t)b->row_len);
    if (b->n_top > 0) {
        so_logprob top[SO_LOGPROBS_MAX + 1];
        so_sample_logprobs(e->sampler, logits, 0, b->n_top, top);
        memcpy(b->tops + (size_t)node * (size_t)b->n_top, top + 1, (size_t)b->n_top * sizeof *top);
    }
    b->scored[i] = true;
    return true;
}

static bool score_all(so_request *r) {
    bool all = true;
    for (int i = 0; i < r->beams->search.n_live && r->err.code == SO_OK; i++)
        all &= score(r, i);
    return all && r->err.code == SO_OK;
}

/* --- 4. steps --- */

/* Finds the candidates that the new live hypotheses were guessed as. Returns their number. */
static int bind_guesses(so_request *r, int first_slot) {
    so_beams *b = r->beams;
    int n = 0;
    for (int i = 0; i < b->search.n_live; i++) {
        int32_t node = b->search.live[i];
        int32_t key = b->states[b->search.nodes[node].parent].key;
        for (int k = 0; k < b->n_guesses && key != NO_KEY; k++) {
            if (b->guesses[k].parent != key || b->guesses[k].token != b->search.nodes[node].token)
                continue;
            b->states[node].key = k;
            b->states[node].slot = first_slot + k;
            b->states[node].logit = b->guess_logits[k];
            n++;
            break;
        }
    }
    return n;
}

static void search_step(so_request *r) {
    so_beams *b = r->beams;
    so_beam_row rows[SO_BEAM_MAX];
    for (int i = 0; i < b->search.n_live; i++) {
        rows[i] = (so_beam_row){b->items + (size_t)i * (size_t)b->row_len, b->n_items[i]};
        b->scored[i] = false;
    }
    so_beam_step(&b->search, rows, ends, r);
    grow_states(b);
    b->n_steps++;
}

/* A level of candidates counts as one guess: it is accepted if it has all live hypotheses. */
static void count_level(so_request *r, int level, bool accepted) {
    so_request_stats *s = &r->stats;
    int at = SO_MIN(level, SO_STATS_DEPTHS) - 1;
    r->beams->n_tested++;
    s->tested_n++;
    s->per_depth[at].tested++;
    r->e->step.info.tested++;
    if (!accepted)
        return;
    r->beams->n_accepted++;
    s->draft_n_accepted++;
    s->per_depth[at].accepted++;
    r->e->step.info.accepted++;
}

static void begin_round(so_request *r) {
    so_beams *b = r->beams;
    int n_levels = b->n_guesses ? b->guesses[b->n_guesses - 1].depth : 0;
    r->stats.draft_n += n_levels;
    r->e->step.info.drafted += n_levels;
    for (int i = 0; i < b->search.n_live; i++)
        b->states[b->search.live[i]].key = -1 - i;
    b->n_levels = n_levels;
    b->n_tested = b->n_accepted = 0;
}

static void count_pass(so_request *r, int n_steps) {
    if (n_steps == 0)
        return;
    r->stats.rounds++;
    r->stats.drafted_rounds += r->beams->n_levels > 0;
    if (r->t_first_ns)
        return;
    r->t_first_ns = so_clock_ns();
    r->stats.prompt_ms = (double)(r->t_first_ns - r->t_admitted_ns) * 1e-6;
}

/* Takes the results of the pass: assigns slots and does all steps whose rows are known. */
static void take_steps(so_request *r) {
    so_beams *b = r->beams;
    int first = so_seq_next_slot(r->seq) + r->n_chunk, n_steps = 0;
    begin_round(r);
    for (int i = 0; i < b->n_tree; i++) {
        so_beam_state *s = &b->states[b->tree[i]];
        if (s->row >= 0)
            s->slot = first + s->row;
    }
    while (score_all(r)) {
        search_step(r);
        n_steps++;
        if (b->search.ended)
            break;
        int n = bind_guesses(r, first + r->n_beam_rows);
        if (n_steps <= b->n_levels)
            count_level(r, n_steps, n == b->search.n_live);
    }
    b->n_done_steps = n_steps;
    count_pass(r, n_steps);
}

/* --- 5. keep --- */

static int ascending(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return x < y ? -1 : x > y;
}

/* Lists the nodes of the live hypotheses from the present base on, ascending. */
static void list_tree(so_beams *b) {
    const so_beam_node *nodes = b->search.nodes;
    int32_t base = b->tree[0];
    b->n_tree = 0;
    b->mark++;
    for (int i = 0; i < b->search.n_live; i++)
        for (int32_t k = b->search.live[i]; k >= base; k = nodes[k].parent) {
            if (b->states[k].mark == b->mark)
                break;
            b->states[k].mark = b->mark;
            b->states[k].n_children = 0;
            b->tree[b->n_tree++] = k;
        }
    qsort(b->tree, (size_t)b->n_tree, sizeof *b->tree, ascending);
    for (int i = 1; i < b->n_tree; i++)
        b->states[nodes[b->tree[i]].parent].n_children++;
}

/* The number of nodes in front of the new base: those that have one child. They come first in the
 * list, since all others are below them. */
static int path_length(const so_beams *b) {
    int n = 0;
    while (b->states[b->tree[n]].n_children == 1)
        n++;
    return n;
}

/* Lists in b->kept the numbers in the speculation of the nodes to keep: the chunk, the first n_path
 * nodes of the tree, and all others that are cached; ascending. Their slots change accordingly. */
static int list_kept(so_request *r, int n_path) {
    so_beams *b = r->beams;
    int len = so_seq_len(r->seq), n = r->n_chunk;
    for (int i = 0; i < b->n_tree; i++) {
        int32_t slot = b->states[b->tree[i]].slot;
        SO_ASSERT(slot >= len + r->n_chunk || (slot == NOT_CACHED && i >= n_path));
        if (slot != NOT_CACHED)
            b->kept[n++ - r->n_chunk] = slot - len;
    }
    qsort(b->kept, (size_t)(n - r->n_chunk), sizeof *b->kept, ascending);
    for (int i = 0; i < b->n_tree; i++) {
        so_beam_state *s = &b->states[b->tree[i]];
        int32_t number = s->slot - len;
        if (s->slot == NOT_CACHED)
            continue;
        const int32_t *at =
            bsearch(&number, b->kept, (size_t)(n - r->n_chunk), sizeof *b->kept, ascending);
        s->slot = len + r->n_chunk + (int32_t)(at - b->kept);
    }
    memmove(b->kept + r->n_chunk, b->kept, (size_t)(n - r->n_chunk) * sizeof *b->kept);
    for (int i = 0; i < r->n_chunk; i++)
        b->kept[i] = i;
    return n;
}

static void keep(so_request *r) {
    so_beams *b = r->beams;
    list_tree(b);
    int n_path = path_length(b), need = r->n_chunk + b->n_tree;
    if (need > b->kept_cap) {
        b->kept_cap = 2 * need;
        b->kept = so_realloc(b->kept, (size_t)b->kept_cap * sizeof *b->kept);
    }
    int n = list_kept(r, n_path);
    so_seq_keep(r->seq, b->kept, n, r->n_chunk + n_path);
    for (int i = 1; i <= n_path; i++)
        r->tokens[r->n_tokens++] = b->search.nodes[b->tree[i]].token;
    b->n_tree -= n_path;
    memmove(b->tree, b->tree + n_path, (size_t)b->n_tree * sizeof *b->tree);
}

void so_beams_take(so_request *r) {
    take_steps(r);
    if (r->err.code == SO_OK && !r->beams->search.ended)
        keep(r);
    else
        so_seq_abort(r->seq);
}

bool so_beams_ended(const so_request *r) { return r->beams->search.ended; }

/* --- results --- */

static so_finish finish_of(const so_beam_done *d) {
    return d->why == SO_BEAM_FULL ? SO_FINISH_LENGTH : SO_FINISH_STOP;
}

/* Token and alternatives at each place of the hypothesis that ends in `node`. */
static so_logprob *logprobs_of(const so_request *r, int32_t node) {
    const so_beams *b = r->beams;
    const so_beam_node *nodes = b->search.nodes;
    size_t width = (size_t)r->n_logprobs;
    if (width == 0)
        return NULL;
    so_logprob *all = SO_NEW_N(so_logprob, (size_t)nodes[node].depth * width);
    for (; nodes[node].parent >= 0; node = nodes[node].parent) {
        so_logprob *to = all + (size_t)(nodes[node].depth - 1) * width;
        to[0] = (so_logprob){nodes[node].token, nodes[node].logprob};
        memcpy(to + 1, b->tops + (size_t)nodes[node].parent * (size_t)b->n_top,
               (size_t)b->n_top * sizeof *to);
    }
    return all;
}

static void make_results(so_request *r) {
    so_beams *b = r->beams;
    int n = SO_MIN(b->search.n_done, b->o.n_best);
    b->results = SO_NEW_N(so_beam_result, n);
    for (; b->n_results < n; b->n_results++) {
        const so_beam_done *d = &b->search.done[b->n_results];
        so_beam_result *to = &b->results[b->n_results];
        to->score = d->score;
        to->sum = b->search.nodes[d->node].score;
        to->finish = finish_of(d);
        to->tokens = SO_NEW_N(int32_t, b->search.nodes[d->node].depth);
        to->n_tokens = so_beam_tokens(&b->search, d->node, to->tokens);
        to->n_tokens -= d->why == SO_BEAM_END_TOKEN;
        to->logprobs = logprobs_of(r, d->node);
        if (r->e->tok)
            render(r, to->tokens, to->n_tokens, true, &to->text);
    }
}

/* The request's text becomes the best hypothesis; its tokens are emitted as if they had just been
 * decided. */
void so_beams_finish(so_request *r, so_finish why) {
    so_beams *b = r->beams;
    so_schedule_retire(r); /* its pages are offered by the text that they hold, before it changes */
    if (why == SO_FINISH_CANCELLED)
        so_beam_cut(&b->search);
    make_results(r);
    r->n_tokens = r->n_prompt;
    if (b->n_results == 0 && why != SO_FINISH_CANCELLED) {
        so_err_set(&r->err, SO_EINVAL, "no token is allowed: --logit-bias has banned every one");
        so_engine_finish(r, SO_FINISH_ERROR, false);
        return;
    }
    const so_beam_result *best = b->results;
    r->stats.ttft_ms = (double)(so_clock_ns() - r->t_submitted_ns) * 1e-6;
    for (int i = 0; b->n_results > 0 && i < best->n_tokens; i++) {
        if (r->logprobs)
            memcpy(r->logprobs + (size_t)i * (size_t)r->n_logprobs,
                   best->logprobs + (size_t)i * (size_t)r->n_logprobs,
                   (size_t)r->n_logprobs * sizeof *r->logprobs);
        r->stats.first_n = i == 0;
        if (!so_engine_append(r, best->tokens[i], SO_ORIGIN_PLAIN))
            return;
    }
    if (b->n_results > 0 && b->search.done[0].why == SO_BEAM_END_TOKEN)
        so_counts_end_token(r);
    so_engine_finish(r, why == SO_FINISH_CANCELLED ? why : best->finish, false);
}

int so_request_n_best(const so_request *r) { return r->beams ? r->beams->n_results : 0; }

const so_beam_result *so_request_result(const so_request *r, int i) {
    SO_ASSERT(i >= 0 && i < so_request_n_best(r));
    return &r->beams->results[i];
}

int so_request_beam_width(const so_request *r) {
    return r->beams ? r->beams->search.rule.width : 0;
}

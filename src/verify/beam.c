/* One step of beam search, as Hugging Face's generate does it. With w the width:
 *
 *   1. A candidate is a live hypothesis and a token. Its sum is the hypothesis' sum plus the token's
 *      log-probability. Candidates are visited best first; equal sums in the order of the
 *      hypotheses, then in the order of their rows.
 *   2. A candidate that has finished (end token, stop string, or the maximum length) is a result
 *      only if it is among the first w candidates. Its final score is sum / length^penalty; the
 *      length counts the end token. The best w results are kept; of equal ones the earlier.
 *   3. The first w candidates that have not finished live on.
 *   4. The search ends at the maximum length, or once there are w results and early_stop allows it
 *      (is_over).
 *
 * Hugging Face visits the first (1 + number of end tokens) · w candidates, so that end tokens cannot
 * use up the hypotheses that live on. Here candidates are visited until both lists are full, which
 * is the same: each hypothesis has at most that many ends. It differs where that implementation
 * goes on with hypotheses of score −10⁹ for lack of others, in a vocabulary with fewer than 2w
 * tokens: here fewer hypotheses live on.
 *
 * The heads of the w sorted rows are merged, so the work is proportional to the candidates visited.
 * Nothing depends on how the rows were computed: the result is a function of their numbers, which is
 * what makes speculation exact (engine/beam.c). */
#include "verify/beam.h"

#include <math.h>
#include <stdlib.h>

#include "base/mem.h"

enum { FIRST_CAP = 256 };

void so_beam_init(so_beam_search *s, const so_beam_rule *rule, int32_t root_token) {
    SO_ASSERT(rule->width >= 1 && rule->width <= SO_BEAM_MAX && rule->max_depth >= 1);
    *s = (so_beam_search){.rule = *rule, .n_nodes = 1, .cap = FIRST_CAP, .n_live = 1};
    s->nodes = SO_NEW_N(so_beam_node, FIRST_CAP);
    s->nodes[0] = (so_beam_node){.token = root_token, .parent = -1};
    if (rule->width == 1)
        s->rule.early_stop = SO_EARLY_STOP_YES;
}

void so_beam_deinit(so_beam_search *s) {
    free(s->nodes);
    s->nodes = NULL;
}

/* A hypothesis has at most width continuations among the results of a step, and n_ends ends in front
 * of them. */
int so_beam_row_len(int width, int n_ends) { return width + n_ends; }

static int32_t add_node(so_beam_search *s, int32_t parent, const so_scored *item) {
    if (s->n_nodes == s->cap) {
        s->cap *= 2;
        s->nodes = so_realloc(s->nodes, (size_t)s->cap * sizeof *s->nodes);
    }
    const so_beam_node *p = &s->nodes[parent];
    s->nodes[s->n_nodes] = (so_beam_node){.token = item->id,
                                          .parent = parent,
                                          .depth = p->depth + 1,
                                          .logprob = (float)item->score,
                                          .score = p->score + item->score};
    return s->n_nodes++;
}

/* Step 2 for a finished candidate. */
static void add_done(so_beam_search *s, int32_t node, so_beam_end why) {
    const so_beam_node *n = &s->nodes[node];
    double score = n->score / pow(n->depth, s->rule.length_penalty);
    int at = s->n_done;
    if (at == s->rule.width && !(score > s->done[--at].score))
        return;
    for (; at > 0 && score > s->done[at - 1].score; at--)
        s->done[at] = s->done[at - 1];
    s->done[at] = (so_beam_done){score, node, why};
    s->n_done += s->n_done < s->rule.width;
}

/* The hypothesis with the best unvisited candidate; −1: none is left. */
static int best_head(const so_beam_search *s, const so_beam_row *rows, const int *at) {
    double best = -INFINITY;
    int found = -1;
    for (int i = 0; i < s->n_live; i++) {
        if (at[i] == rows[i].n)
            continue;
        double sum = s->nodes[s->live[i]].score + rows[i].items[at[i]].score;
        if (found < 0 || sum > best) {
            found = i;
            best = sum;
        }
    }
    return found;
}

/* Step 4. */
static bool is_over(const so_beam_search *s) {
    const so_beam_rule *r = &s->rule;
    if (s->depth == r->max_depth || s->n_live == 0)
        return true;
    if (s->n_done < r->width)
        return false;
    if (r->early_stop == SO_EARLY_STOP_YES)
        return true;
    int length =
        r->early_stop == SO_EARLY_STOP_NEVER && r->length_penalty > 0 ? r->max_depth : s->depth;
    double hope = s->nodes[s->live[0]].score / pow(length, r->length_penalty);
    return !(hope > s->done[s->n_done - 1].score);
}

void so_beam_step(so_beam_search *s, const so_beam_row *rows, so_beam_ends_fn *ends, void *user) {
    int at[SO_BEAM_MAX] = {0}, n_next = 0, width = s->rule.width;
    int32_t next[SO_BEAM_MAX];
    bool full = s->depth + 1 == s->rule.max_depth;
    SO_ASSERT(!s->ended);
    for (int rank = 0; rank < width || (n_next < width && !full); rank++) {
        int i = best_head(s, rows, at);
        if (i < 0)
            break;
        const so_scored *item = &rows[i].items[at[i]++];
        int32_t parent = s->live[i];
        so_beam_end why = ends(user, parent, item->id);
        if (why == SO_BEAM_GOES_ON && full)
            why = SO_BEAM_FULL;
        if (why == SO_BEAM_GOES_ON && n_next < width)
            next[n_next++] = add_node(s, parent, item);
        else if (why != SO_BEAM_GOES_ON && rank < width)
            add_done(s, add_node(s, parent, item), why);
    }
    s->n_live = n_next;
    for (int i = 0; i < n_next; i++)
        s->live[i] = next[i];
    s->depth++;
    s->ended = is_over(s);
}

void so_beam_cut(so_beam_search *s) {
    for (int i = 0; i < s->n_live && s->depth > 0 && !s->ended; i++)
        add_done(s, s->live[i], SO_BEAM_FULL);
    s->ended = true;
}

int so_beam_tokens(const so_beam_search *s, int32_t node, int32_t *out) {
    int n = s->nodes[node].depth;
    for (; s->nodes[node].parent >= 0; node = s->nodes[node].parent)
        out[s->nodes[node].depth - 1] = s->nodes[node].token;
    return n;
}

/* Who runs, how many rows each gets, and who gives way. Every step:
 *
 *   1. admit   in order of rank, while slots and pages suffice
 *   2. gather  everyone whose text is in the cache gets a tree; prompts share the chunk budget
 *   3. pages   the step's need is known before the pass; the last in rank are preempted until it
 *              fits, and guesses get what is left, so they are shed before anybody is preempted
 *
 * Rank is (priority, then order of submission). It is total and never changes, and everything goes
 * by it: the queue, the list of those that run, and who is preempted (the last). Invariant: the
 * pages of a step are counted before it begins, so no pass runs out of cache half way.
 *
 * A preempted request keeps its text and loses its entries; its whole pages stay in the prefix tree
 * while nobody needs them. It waits by its rank, before all that came later, and is resumed by
 * computing what is missing of its text: the same rows, the same tokens (row invariance).
 *
 * Everyone finishes. Let r be the first in rank of all requests. If it waits, nobody runs whom its
 * priority does not preempt: who ran before it was ahead of it in rank and has ended, since nobody
 * overtakes. So it is admitted. If it runs, it is not preempted: the others are, until it runs
 * alone, and alone it fits (submission checks that). In every step it computes a token of its text
 * or decides one. So it ends, and the next is first. Only an endless stream of higher priority can
 * hold somebody back, and that is what a priority says.
 *
 * After creation nothing here allocates. Engine thread. */
#include "base/clock.h"
#include "engine/impl.h"
#include "kv/prefix.h"

enum { DECODING_SHARE = 4, FIRST_SHARE = 4 }; /* parts of the chunk budget: one in … */

/* --- rank --- */

static bool goes_before(const so_request *a, const so_request *b) {
    return a->priority != b->priority ? a->priority > b->priority : a->serial < b->serial;
}

static void put(so_request **list, so_request *r) {
    while (*list && goes_before(*list, r))
        list = &(*list)->next;
    r->next = *list;
    *list = r;
}

static void take_out(so_request **list, so_request *r) {
    while (*list != r)
        list = &(*list)->next;
    *list = r->next;
}

static so_request *last(so_request *list) {
    while (list->next)
        list = list->next;
    return list;
}

void so_schedule_enqueue(so_request *r) {
    r->phase = SO_PHASE_WAITING;
    put(&r->e->waiting, r);
    r->e->n_waiting++;
}

/* --- places --- */

/* What the request had computed stays in the prefix tree as far as it is text: behind an end there
 * may be guesses that stood and were never said. */
static void vacate(so_request *r) {
    so_engine *e = r->e;
    if (so_seq_open_nodes(r->seq) == 0) /* else its pass failed */
        so_prefix_offer(r->seq, r->tokens, SO_MIN(so_seq_len(r->seq), r->n_tokens));
    so_seq_clear(r->seq);
    e->slot_used[r->slot] = false;
    r->seq = NULL;
    r->tree = NULL;
    r->has_tree = false;
    r->n_chunk = r->n_score = 0;
    take_out(&e->running, r);
    e->n_running--;
}

void so_schedule_retire(so_request *r) {
    if (r->phase == SO_PHASE_RUNNING) {
        vacate(r);
    } else if (r->phase == SO_PHASE_WAITING) {
        take_out(&r->e->waiting, r);
        r->e->n_waiting--;
    }
    r->phase = SO_PHASE_DONE;
}

static void preempt(so_request *r) {
    vacate(r);
    so_speculate_park(r);
    r->stats.preempted_n++;
    r->e->stats.preemptions++;
    so_schedule_enqueue(r);
}

/* The text and a little growth, as far as it may grow. */
static int len_soon(const so_request *r) { return SO_MIN(r->n_tokens + SO_KV_PAGE, r->max_len); }
static int pages_soon(const so_request *r) { return so_kv_pages_for(len_soon(r)); }

static int pages_held(const so_request *r) {
    int n;
    so_seq_pages(r->seq, &n);
    return n;
}

/* Rows of the prompt that must still be computed for their logprobs. */
static int unscored(const so_request *r) {
    return r->prompt_logprobs ? r->n_prompt - 1 - r->n_scored : 0;
}

/* How much of its text r may take from the prefix tree, which keeps no logits. */
static int takeable(const so_request *r) { return unscored(r) > 0 ? r->n_scored : r->n_tokens - 1; }

static bool fits_target(const so_engine *e, const so_request *r) {
    int n_idle, n_hit = so_prefix_match(e->kv, r->tokens, takeable(r), &n_idle);
    int64_t need = pages_soon(r) - n_hit / SO_KV_PAGE + n_idle;
    if (so_kv_get_layout(e->kv) == SO_KV_SLOTTED)
        return true; /* there is a slot for each place */
    for (const so_request *q = e->running; q; q = q->next)
        need += SO_MAX(0, pages_soon(q) - pages_held(q));
    return need <= so_kv_available_pages(e->kv);
}

/* Drafts are lazy, so what counts is what they will hold, not what they do. */
static bool fits_draft(const so_engine *e, const so_request *r) {
    const so_drafter *d = so_speculate_drafter(r);
    if (!d)
        return true;
    double share = so_drafter_share(d, len_soon(r));
    for (const so_request *q = e->running; q; q = q->next)
        share += q->spec.set == r->spec.set ? so_drafter_share(d, len_soon(q)) : 0;
    return share < 1 + 1e-9;
}

/* Pages are asked for what the request has to compute now, beside what those that run still lack
 * and a page of growth for everyone; not for a whole life, which few live to the end. */
static bool has_place(const so_engine *e, const so_request *r) {
    return e->n_running == 0 ||
           (e->n_running < e->o.n_parallel && fits_target(e, r) && fits_draft(e, r));
}

static void take_prefix(so_request *r) {
    int n = so_prefix_take(r->seq, r->tokens, takeable(r));
    if (r->stats.preempted_n > 0)
        return; /* its own text, mostly: no merit of the cache */
    r->stats.cached_n += n;
    r->e->stats.prefix_hits += n;
}

static void start(so_request *r) {
    so_engine *e = r->e;
    take_out(&e->waiting, r);
    e->n_waiting--;
    r->slot = 0;
    while (e->slot_used[r->slot])
        r->slot++;
    e->slot_used[r->slot] = true;
    r->tree = &e->trees[r->slot];
    r->seq = e->slot_seqs[r->slot];
    so_speculate_admit(r);
    r->phase = SO_PHASE_RUNNING;
    if (r->t_admitted_ns == 0) {
        r->t_admitted_ns = so_clock_ns();
        r->stats.queue_ms = (double)(r->t_admitted_ns - r->t_submitted_ns) * 1e-6;
        e->stats.prefix_queried += so_prefix_enabled(e->kv) ? r->n_prompt : 0;
    }
    put(&e->running, r);
    e->n_running++;
    take_prefix(r);
}

/* Nobody overtakes the first of the queue: a long prompt could wait forever behind short ones.
 * Where there is no place, it takes that of the last in rank, if that one's priority is lower. */
void so_schedule_admit(so_engine *e) {
    while (e->waiting) {
        so_request *r = e->waiting;
        if (has_place(e, r)) {
            start(r);
            continue;
        }
        so_request *other = last(e->running);
        if (other->priority >= r->priority)
            return;
        preempt(other);
    }
}

/* --- rows --- */

static int missing(const so_request *r) { return r->n_tokens - 1 - so_seq_len(r->seq); }

/* Prompts by priority, then the shortest first, then by rank. */
static bool shorter(const so_request *a, const so_request *b) {
    if (a->priority != b->priority)
        return a->priority > b->priority;
    return missing(a) != missing(b) ? missing(a) < missing(b) : a->serial < b->serial;
}

/* Those with something missing into e->order; the first in rank, or NULL. */
static so_request *sort_prompts(so_engine *e, int *n) {
    so_request *first = NULL;
    *n = 0;
    for (so_request *r = e->running; r; r = r->next) {
        r->n_chunk = 0;
        take_prefix(r); /* somebody may have computed it meanwhile */
        if (missing(r) == 0)
            continue;
        if (!first)
            first = r;
        int at = (*n)++;
        for (; at > 0 && shorter(r, e->order[at - 1]); at--)
            e->order[at] = e->order[at - 1];
        e->order[at] = r;
    }
    return first;
}

/* Of the chunk: its rows from the first that was not scored yet. */
static int scored_rows(const so_request *r) {
    return unscored(r) > 0 ? SO_MAX(0, so_seq_len(r->seq) + r->n_chunk - r->n_scored) : 0;
}

/* Up to `most` rows more for the chunk of r, no more of them scored than *scores allows; how many
 * it became. Rows that are given back later (round_chunk) leave their scores unused, no more. */
static int add_chunk(so_request *r, int most, int *scores) {
    int had = scored_rows(r), more = SO_MIN(missing(r) - r->n_chunk, most);
    if (unscored(r) > 0) { /* those that were scored before r was preempted are free */
        int known = SO_MAX(0, r->n_scored - so_seq_len(r->seq) - r->n_chunk);
        more = SO_MIN(more, known + *scores);
    }
    r->n_chunk += more;
    *scores -= scored_rows(r) - had;
    return more;
}

/* A chunk that the budget cuts ends with a page where it can, so that what the first in rank
 * computes of the same text can be taken for the rest. How many rows that frees. */
static int round_chunk(so_request *r) {
    int over = (so_seq_len(r->seq) + r->n_chunk) % SO_KV_PAGE;
    if (r->n_chunk == missing(r) || r->n_chunk <= over)
        return 0;
    r->n_chunk -= over;
    return over;
}

/* A pass takes at most n_batch prompt tokens, a quarter of it where somebody decodes: a token that
 * streams must not wait for a long prompt, and chunks of 64 cost next to nothing more than chunks
 * of 256 (SmolLM2, 512 tokens: 346 and 323 ms; by 32 it is 369). A quarter of that goes to the
 * first in rank, so that no prompt starves; the rest to the shortest first, which makes the mean
 * wait for first tokens smallest. So a prompt of m tokens that is first in rank is through within
 * m / (budget / 4) steps whatever else comes, and a short one does not wait for a long one. Equal
 * shares were considered: equal prompts would all have their first token at the time of the last.
 */
static void gather(so_engine *e) {
    int n = 0, budget = e->o.n_batch, scores = e->max_scores;
    so_request *first = sort_prompts(e, &n);
    if (n < e->n_running)
        budget = SO_MIN(budget, SO_MAX(SO_KV_PAGE, budget / DECODING_SHARE));
    if (first)
        budget -= add_chunk(first, SO_MAX(1, budget / FIRST_SHARE), &scores);
    for (int i = 0; i < n; i++) {
        so_request *r = e->order[i];
        budget -= add_chunk(r, budget, &scores);
        if (r != first) /* whose share is a promise */
            budget += round_chunk(r);
    }
    for (so_request *r = e->running; r; r = r->next) {
        r->n_score = scored_rows(r);
        r->has_tree = r->n_chunk == missing(r);
        if (r->has_tree)
            so_tree_reset(r->tree, r->tokens[r->n_tokens - 1], r->n_tokens - 1);
    }
}

/* --- pages --- */

static int n_rows(const so_request *r) { return r->n_chunk + r->has_tree; }

static int64_t pages_needed(const so_engine *e) {
    int64_t n = 0;
    for (const so_request *r = e->running; r; r = r->next)
        if (n_rows(r) > 0)
            n += so_seq_pages_needed(r->seq, n_rows(r));
    return n;
}

void so_schedule_gather(so_engine *e) {
    gather(e);
    while (pages_needed(e) > so_kv_available_pages(e->kv)) {
        SO_ASSERT_OP(e->n_running, >, 1); /* alone everybody fits */
        preempt(last(e->running));
        gather(e);
    }
    e->n_spare = so_kv_available_pages(e->kv) - pages_needed(e);
}

/* Nobody takes more pages than a context has, so with that many for each request no guess is ever
 * shed: nonce.c relies on it. */
int so_schedule_room(so_request *r, int want) {
    int rows = n_rows(r);
    int64_t need = so_seq_pages_needed(r->seq, rows);
    int64_t room = so_seq_max_nodes(r->seq, need + r->e->n_spare) - rows;
    int64_t own = (int64_t)so_kv_pages_for(r->e->o.n_ctx) * SO_KV_PAGE - so_seq_len(r->seq) - rows;
    want = (int)SO_MAX(0, SO_MIN(want, SO_MIN(room, own)));
    if (want > 0)
        r->e->n_spare -= so_seq_pages_needed(r->seq, rows + want) - need;
    return want;
}

/* --- looking --- */

void so_engine_get_stats(const so_engine *e, so_engine_stats *out) {
    *out = e->stats;
    out->running = e->n_running;
    out->waiting = e->n_waiting;
    out->pages_total = e->n_pages;
    out->pages_cached = so_kv_idle_pages(e->kv);
    out->pages_used = e->n_pages - so_kv_available_pages(e->kv);
}

static void check_list(const so_engine *e, const so_request *list, so_phase phase, int n) {
    int count = 0;
    for (const so_request *r = list; r; r = r->next, count++) {
        SO_ASSERT(r->e == e && r->phase == phase);
        SO_ASSERT(!r->next || goes_before(r, r->next));
        if (phase != SO_PHASE_RUNNING)
            continue;
        SO_ASSERT(e->slot_used[r->slot] && r->seq == e->slot_seqs[r->slot]);
        SO_ASSERT_OP(so_seq_open_nodes(r->seq), ==, 0);
        SO_ASSERT_OP(so_seq_len(r->seq), <, r->n_tokens);
    }
    SO_ASSERT_OP(count, ==, n);
}

void so_engine_check(const so_engine *e) {
    int n_used = 0;
    for (int i = 0; i < e->o.n_parallel; i++) {
        n_used += e->slot_used[i];
        SO_ASSERT(e->slot_used[i] || so_seq_len(e->slot_seqs[i]) == 0);
    }
    SO_ASSERT_OP(n_used, ==, e->n_running);
    check_list(e, e->waiting, SO_PHASE_WAITING, e->n_waiting);
    check_list(e, e->running, SO_PHASE_RUNNING, e->n_running);
    so_kv_check(e->kv);
}

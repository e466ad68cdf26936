/* Scheduling: which requests run, how many rows each gets, and which are preempted. In every step:
 *
 *   1. admit   requests from the queue, in order of rank, while fewer than n_parallel run and pages
 *              suffice. For a request of higher priority, running ones of lower priority are
 *              preempted
 *   2. gather  requests whose text is cached get a tree; requests in prefill share the chunk budget
 *   3. pages   count the pages of all rows; preempt the last in rank until they suffice
 *   4. guesses get only the remaining pages, so guesses are dropped before a request is preempted
 *
 * Rank is (priority, then order of submission). It is a total order and never changes. The queue
 * and the list of running requests are ordered by it, and the last in rank is preempted first.
 *
 * Invariant: the pages of a step are counted before its pass, so no pass runs out of cache.
 *
 * A preempted request keeps its text and loses its cache entries. Its whole pages stay in the
 * prefix tree until their memory is needed. It waits in the queue by its rank, before all later
 * requests, and is resumed by computing what is not cached: the same rows give the same tokens (row
 * invariance).
 *
 * Every request finishes. Let r be the first in rank of all unfinished requests.
 *   1. If r waits, every running request s has a lower priority than r. Otherwise s, which ranks after
 *      r, would have the same priority and a later submission. When s was admitted, it was the head
 *      of the queue, so r was not in the queue: r was running, and was preempted later, while s was
 *      running. But s ranks after r and would have been preempted first.
 *   2. So r is admitted in the next step: running requests of lower priority are preempted until it
 *      fits, at the latest when no other request runs.
 *   3. If r runs, it is not preempted, because it is never the last in rank while others run. The
 *      others are preempted until the pages suffice. Alone it fits: submission checks that.
 *   4. In every step r computes at least one token of its text or decides one. So it finishes, and
 *      the next request becomes the first in rank.
 * Only an endless stream of requests with higher priority can delay a request forever, which is
 * what a priority asks for.
 *
 * Promises. Sampled guesses that were drafted ahead of a step must be tested in it. If they were
 * dropped because of what came meanwhile, and that depended on the moment at which it came, the test
 * could depend on the guesses: the async thread has computed with them, which takes time and memory
 * bandwidth (draft/async.h, step 6). So a request gets such drafts only if the next step is sure to have
 * room for it, and is then not preempted in that step (spec.promised). Step 2 above takes one step
 * longer for it: while a request of higher priority waits, nothing is promised.
 *
 * Nothing here allocates after creation. Engine thread. */
#include "base/clock.h"
#include "engine/impl.h"
#include "kv/prefix.h"

enum { DECODING_DIVISOR = 4, FIRST_DIVISOR = 4 }; /* divisors of the chunk budget, see gather() */

/* --- rank --- */

static bool ranks_before(const so_request *a, const so_request *b) {
    return a->priority != b->priority ? a->priority > b->priority : a->serial < b->serial;
}

static void insert_by_rank(so_request **list, so_request *r) {
    while (*list && ranks_before(*list, r))
        list = &(*list)->next;
    r->next = *list;
    *list = r;
}

static void remove_request(so_request **list, so_request *r) {
    while (*list != r)
        list = &(*list)->next;
    *list = r->next;
}

static so_request *last_in_rank(so_request *list) {
    while (list->next)
        list = list->next;
    return list;
}

void so_schedule_enqueue(so_request *r) {
    r->phase = SO_PHASE_WAITING;
    insert_by_rank(&r->e->waiting, r);
    r->e->n_waiting++;
}

/* --- places of running requests: one tree and one sequence each (r->slot) --- */

/* Computed pages are offered to the prefix tree as far as they belong to the text. After an end
 * token or stop string the cache may hold accepted guesses that were never emitted. */
static void release_slot(so_request *r) {
    so_engine *e = r->e;
    so_beams_release(r);
    if (so_seq_open_nodes(r->seq) == 0) /* otherwise its pass failed */
        so_prefix_offer(r->seq, r->tokens, SO_MIN(so_seq_len(r->seq), r->n_tokens));
    so_seq_clear(r->seq);
    e->slot_used[r->slot] = false;
    r->seq = NULL;
    r->tree = NULL;
    r->has_tree = false;
    r->n_chunk = r->n_score = 0;
    remove_request(&e->running, r);
    e->n_running--;
}

void so_schedule_retire(so_request *r) {
    if (r->phase == SO_PHASE_RUNNING) {
        release_slot(r);
    } else if (r->phase == SO_PHASE_WAITING) {
        remove_request(&r->e->waiting, r);
        r->e->n_waiting--;
    }
    r->phase = SO_PHASE_DONE;
}

static void preempt(so_request *r) {
    release_slot(r);
    so_speculate_preempt(r);
    r->stats.preempted_n++;
    r->e->stats.preemptions++;
    so_schedule_enqueue(r);
}

void so_schedule_restart(so_engine *e) {
    while (e->running)
        preempt(e->running);
    so_prefix_clear(e->kv);
}

/* The positions of the text, with its beams, after at most one more page of growth. */
static int len_with_growth(const so_request *r) {
    return SO_MIN(r->n_tokens - 1 + so_beams_tree_size(r) + SO_KV_PAGE, r->max_slots);
}
static int pages_with_growth(const so_request *r) { return so_kv_pages_for(len_with_growth(r)); }

static int pages_held(const so_request *r) {
    int n;
    so_seq_pages(r->seq, &n);
    return n;
}

/* Prompt rows that must still be computed for their logprobs. */
static int n_unscored(const so_request *r) {
    return r->prompt_logprobs ? r->n_prompt - 1 - r->n_scored : 0;
}

/* How many tokens r may take from the prefix tree. Rows that are still to be scored must be
 * computed, because the tree keeps no logits. */
static int max_prefix_len(const so_request *r) {
    return n_unscored(r) > 0 ? r->n_scored : r->n_tokens - 1;
}

static bool fits_target(const so_engine *e, const so_request *r) {
    int n_idle = 0, n_hit = 0;
    if (!e->sources) /* with one, it is not known yet which prefixes belong to r's */
        n_hit = so_prefix_match(e->kv, r->tokens, max_prefix_len(r), &n_idle);
    int64_t need = pages_with_growth(r) - n_hit / SO_KV_PAGE + n_idle;
    if (so_kv_get_layout(e->kv) == SO_KV_SLOTTED)
        return true; /* every sequence has its own pages */
    for (const so_request *q = e->running; q; q = q->next)
        need += SO_MAX(0, pages_with_growth(q) - pages_held(q));
    return need <= so_kv_available_pages(e->kv);
}

/* The draft's cache is filled lazily, so expected sizes are added up, not current ones. */
static bool fits_draft(const so_engine *e, const so_request *r) {
    const so_drafter *d = so_speculate_drafter(r);
    if (!d)
        return true;
    double fraction = so_drafter_cache_fraction(d, len_with_growth(r));
    for (const so_request *q = e->running; q; q = q->next)
        fraction +=
            q->spec.set == r->spec.set ? so_drafter_cache_fraction(d, len_with_growth(q)) : 0;
    return fraction < 1 + 1e-9;
}

bool so_schedule_exceeds_context(const so_request *r) { return r->max_slots > r->e->o.n_ctx; }

/* A hashed nonce is exact only if the request never loses a guess (nonce.c), but beams may use the pages
 * that its guesses need. So the two never run together; the one later in rank waits. A request submitted
 * while beams run or wait gets a random nonce, so beams wait only for requests submitted before them. */
static bool may_run_together(const so_engine *e, const so_request *r) {
    for (const so_request *q = e->running; q; q = q->next)
        if ((r->hashed_nonce && so_schedule_exceeds_context(q)) ||
            (q->hashed_nonce && so_schedule_exceeds_context(r)))
            return false;
    return true;
}

/* Counts the pages that r needs now, the pages that running requests still lack, and one page of
 * growth for each. Counting pages for the longest possible answer would admit fewer requests, and
 * most answers end earlier. */
static bool can_admit(const so_engine *e, const so_request *r) {
    return e->n_running == 0 || (e->n_running < e->o.n_parallel && may_run_together(e, r) &&
                                 fits_target(e, r) && fits_draft(e, r));
}

static void attach_prefix(so_request *r) {
    if (so_seq_open_nodes(r->seq) > 0)
        return; /* beams: all of the text is cached */
    int n = so_prefix_take(r->seq, r->tokens, max_prefix_len(r));
    if (r->stats.preempted_n > 0)
        return; /* mostly its own text, which is not counted as a hit */
    r->stats.cached_n += n;
    r->e->stats.prefix_hits += n;
}

/* An error of the encoder is stored in r->err. */
static void attach_source(so_request *r) {
    so_engine *e = r->e;
    if (e->sources)
        so_sources_set(e->sources, r->seq, r->source, r->n_source, &r->err);
}

static void admit(so_request *r) {
    so_engine *e = r->e;
    remove_request(&e->waiting, r);
    e->n_waiting--;
    r->slot = 0;
    while (e->slot_used[r->slot])
        r->slot++;
    e->slot_used[r->slot] = true;
    r->tree = &e->trees[r->slot];
    r->seq = e->slot_seqs[r->slot];
    so_speculate_admit(r);
    so_beams_admit(r);
    r->phase = SO_PHASE_RUNNING;
    if (r->t_admitted_ns == 0) {
        r->t_admitted_ns = so_clock_ns();
        r->stats.queue_ms = (double)(r->t_admitted_ns - r->t_submitted_ns) * 1e-6;
        e->stats.prefix_queried += so_prefix_enabled(e->kv) ? r->n_prompt : 0;
    }
    insert_by_rank(&e->running, r);
    e->n_running++;
    attach_source(r);
    if (r->err.code == SO_OK)
        attach_prefix(r);
    else
        so_engine_finish(r, SO_FINISH_ERROR, false);
}

/* The head of the queue is never overtaken: otherwise short prompts could delay a long one forever.
 * If there is no room for the head, the last in rank is preempted, provided that its priority is
 * lower. */
void so_schedule_admit(so_engine *e) {
    while (e->waiting) {
        so_request *r = e->waiting;
        if (can_admit(e, r)) {
            admit(r);
            continue;
        }
        so_request *other = last_in_rank(e->running);
        if (other->priority >= r->priority || other->spec.promised)
            return;
        preempt(other);
    }
}

/* --- rows --- */

static int n_uncached(const so_request *r) { return r->n_tokens - 1 - so_seq_len(r->seq); }

/* Order of prefill: by priority, then the fewest uncached tokens, then by submission. */
static bool prefill_before(const so_request *a, const so_request *b) {
    if (a->priority != b->priority)
        return a->priority > b->priority;
    return n_uncached(a) != n_uncached(b) ? n_uncached(a) < n_uncached(b) : a->serial < b->serial;
}

/* Collects the requests with uncached tokens in e->order. Returns the first of them in rank, or
 * NULL. */
static so_request *sort_prefills(so_engine *e, int *n) {
    so_request *first = NULL;
    *n = 0;
    for (so_request *r = e->running; r; r = r->next) {
        r->n_chunk = 0;
        attach_prefix(r); /* another request may have computed these pages since the last step */
        if (n_uncached(r) == 0)
            continue;
        if (!first)
            first = r;
        int at = (*n)++;
        for (; at > 0 && prefill_before(r, e->order[at - 1]); at--)
            e->order[at] = e->order[at - 1];
        e->order[at] = r;
    }
    return first;
}

/* Rows at the end of the chunk whose logprobs are wanted: all from the first unscored row on. */
static int n_rows_to_score(const so_request *r) {
    return n_unscored(r) > 0 ? SO_MAX(0, so_seq_len(r->seq) + r->n_chunk - r->n_scored) : 0;
}

/* Adds up to max_rows rows to the chunk of r; at most *scores of them are rows to score, and
 * *scores is reduced by their number. Returns the number of rows added. Rows to score that
 * round_chunk_to_page removes later are not added back to *scores: this step then scores fewer rows
 * than it could. */
static int add_chunk(so_request *r, int max_rows, int *scores) {
    int had = n_rows_to_score(r), more = SO_MIN(n_uncached(r) - r->n_chunk, max_rows);
    if (n_unscored(r) > 0) { /* rows that were scored before a preemption need no score again */
        int known = SO_MAX(0, r->n_scored - so_seq_len(r->seq) - r->n_chunk);
        more = SO_MIN(more, known + *scores);
    }
    r->n_chunk += more;
    *scores -= n_rows_to_score(r) - had;
    return more;
}

/* If the budget cut r's chunk short, shortens it to the last page border that it reaches. From a
 * border r can take the next pages from the prefix tree if another request with the same text
 * computes them first (attach_prefix). Returns the rows removed. */
static int round_chunk_to_page(so_request *r) {
    int over = (so_seq_len(r->seq) + r->n_chunk) % SO_KV_PAGE;
    if (r->n_chunk == n_uncached(r) || r->n_chunk <= over)
        return 0;
    r->n_chunk -= over;
    return over;
}

/* Divides the rows of a pass among the requests in prefill.
 *
 *   1. A pass takes at most n_batch prompt tokens, and a quarter of that while a request decodes:
 *      streaming tokens must not wait for a long prompt. Small chunks cost little: SmolLM2, 512
 *      tokens, takes 323 ms in chunks of 256, 346 ms in chunks of 64 and 369 ms in chunks of 32.
 *   2. A quarter of the budget goes to the first in rank, so that no prompt starves: m tokens are
 *      computed within m / (budget / 4) steps regardless of other requests.
 *   3. The other rows go to the shortest prompts first, which minimises the mean time to the first
 *      token. A short prompt does not wait for a long one.
 *
 * Equal parts for all were rejected: equal prompts would then all get their first token at the time
 * of the last. */
static void gather(so_engine *e) {
    int n = 0, budget = e->o.n_batch, scores = e->max_scores;
    e->beam_rows_left = e->max_beam_rows;
    so_request *first = sort_prefills(e, &n);
    if (n < e->n_running)
        budget = SO_MIN(budget, SO_MAX(SO_KV_PAGE, budget / DECODING_DIVISOR));
    if (first)
        budget -= add_chunk(first, SO_MAX(1, budget / FIRST_DIVISOR), &scores);
    for (int i = 0; i < n; i++) {
        so_request *r = e->order[i];
        budget -= add_chunk(r, budget, &scores);
        if (r != first) /* the first in rank keeps its guaranteed part */
            budget += round_chunk_to_page(r);
    }
    for (so_request *r = e->running; r; r = r->next) {
        r->n_score = n_rows_to_score(r);
        r->has_tree = r->n_chunk == n_uncached(r);
        r->n_beam_rows = 0;
        if (r->has_tree && r->beams) {
            r->has_tree = false;
            so_beams_gather(r);
        }
        if (r->has_tree)
            so_tree_reset(r->tree, r->tokens[r->n_tokens - 1], r->n_tokens - 1);
    }
}

/* --- pages --- */

static int n_rows(const so_request *r) { return r->n_chunk + r->has_tree + r->n_beam_rows; }

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
        SO_ASSERT_OP(e->n_running, >, 1); /* a single request always fits */
        preempt(last_in_rank(e->running));
        gather(e);
    }
    e->n_spare_pages = so_kv_available_pages(e->kv) - pages_needed(e);
}

bool so_schedule_has_all_pages(const so_engine *e) {
    return so_kv_get_layout(e->kv) == SO_KV_SLOTTED || e->o.n_parallel == 1 ||
           e->n_pages >= (int64_t)e->o.n_parallel * so_kv_pages_for(e->o.n_ctx);
}

bool so_schedule_can_promise(const so_request *r) {
    const so_engine *e = r->e;
    if (!so_schedule_has_all_pages(e) || (e->waiting && e->waiting->priority > r->priority))
        return false;
    for (const so_request *q = e->running; q; q = q->next)
        if (so_schedule_exceeds_context(q))
            return false;
    return true;
}

/* No request gets more pages than a context needs. If there are that many pages for each request,
 * no guess is ever dropped for lack of pages; nonce.c relies on this. */
int so_schedule_reserve(so_request *r, int want) {
    int rows = n_rows(r);
    int64_t need = so_seq_pages_needed(r->seq, rows);
    int64_t room = so_seq_max_nodes(r->seq, need + r->e->n_spare_pages) - rows;
    int64_t in_context =
        (int64_t)so_kv_pages_for(SO_MAX(r->e->o.n_ctx, r->max_slots)) * SO_KV_PAGE -
        so_seq_len(r->seq) - so_seq_open_nodes(r->seq) - rows;
    want = (int)SO_MAX(0, SO_MIN(want, SO_MIN(room, in_context)));
    if (want > 0)
        r->e->n_spare_pages -= so_seq_pages_needed(r->seq, rows + want) - need;
    return want;
}

/* --- statistics and checks --- */

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
        SO_ASSERT(!r->next || ranks_before(r, r->next));
        if (phase != SO_PHASE_RUNNING)
            continue;
        SO_ASSERT(e->slot_used[r->slot] && r->seq == e->slot_seqs[r->slot]);
        SO_ASSERT(r->beams || so_seq_open_nodes(r->seq) == 0);
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

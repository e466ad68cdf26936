/* Scheduling: fairness, priorities, preemption, the smallest cache, cancellation in every phase,
 * prefix hits. Tiny models. With every schedule a request has the same tokens as when it runs
 * alone. */
#include "so_test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "engine/engine.h"
#include "so_cases.h"

enum { CTX = 256, MAX_OUT = 256, MAX_REQS = 64 };

/* One request and what the test observed of it. */
typedef struct tracked {
    so_request *req;
    int32_t prompt[CTX], want[MAX_OUT];
    int n_prompt, n_want;
    int first_step, end_step; /* values of w->step; −1: not yet */
    int n_seen;
    int cancel_after; /* events; 0: never */
    struct fixture *w;
} tracked;

typedef struct fixture {
    so_rig target, draft;
    so_engine *e;
    tracked tracked_reqs[MAX_REQS];
    int n, step, n_ended;
    int ended[MAX_REQS]; /* in order of ending */
    int max_rows;
} fixture;

static int open_fixture(void **state) {
    fixture *w = SO_NEW(fixture);
    so_rig_opts o = {.level = so_cpu_best_level(), .max_rows = 1, .n_pages = 1};
    so_rig_open(&w->target, so_test_data("golden/models/llama"), &o);
    so_rig_open(&w->draft, so_test_data("golden/models/qwen2"), &o);
    *state = w;
    return 0;
}

static void end_engine(fixture *w) {
    for (int i = 0; i < w->n; i++)
        so_request_free(w->tracked_reqs[i].req);
    if (w->e) {
        so_engine_stats s;
        so_engine_get_stats(w->e, &s);
        so_engine_check(w->e);
        assert_int_equal(s.pages_used, 0);
        assert_int_equal(s.running + s.waiting, 0);
    }
    so_engine_free(w->e);
    w->e = NULL;
    w->n = w->step = w->n_ended = w->max_rows = 0;
}

static int close_fixture(void **state) {
    fixture *w = *state;
    end_engine(w);
    so_rig_close(&w->target);
    so_rig_close(&w->draft);
    free(w);
    return 0;
}

static void on_step(void *user, const so_step_info *info) {
    fixture *w = user;
    w->max_rows = SO_MAX(w->max_rows, info->n_rows);
}

static so_engine_opts usual(const fixture *w) {
    return (so_engine_opts){.n_ctx = CTX,
                            .n_parallel = 4,
                            .n_batch = 64,
                            .kv_dtype = SO_DTYPE_F32,
                            .max_draft = 8,
                            .draft = w->draft.m,
                            .draft_temp = -1};
}

static void begin_engine(fixture *w, so_engine_opts o) {
    so_err err = {0};
    end_engine(w);
    o.on_step = on_step;
    o.step_user = w;
    SO_OK_OR_FAIL(so_engine_create(w->target.m, NULL, &o, &w->e, &err), err);
}

static bool on_event(void *user, const so_event *ev) {
    tracked *p = user;
    fixture *w = p->w;
    if (ev->finish != SO_FINISH_NONE) {
        p->end_step = w->step;
        w->ended[w->n_ended++] = (int)(p - w->tracked_reqs);
        return true;
    }
    if (p->n_seen++ == 0)
        p->first_step = w->step;
    return p->n_seen != p->cancel_after;
}

/* A prompt of n tokens generated from `seed`; the first n_same are those of seed 0. */
static void fill_prompt(const fixture *w, tracked *p, int n, int seed, int n_same) {
    p->n_prompt = n;
    for (int i = 0; i < n; i++) {
        so_rng_key key = {.seed = (uint64_t)(i < n_same ? 0 : seed), .purpose = SO_RNG_TEST};
        p->prompt[i] = (int32_t)(so_rng_uniform(&key, (uint32_t)i) * w->target.n_vocab);
    }
}

static so_request_opts opts_of(const tracked *p, int max_tokens) {
    so_request_opts o = {.prompt = p->prompt, .n_prompt = p->n_prompt, .max_tokens = max_tokens};
    so_sample_defaults(&o.sample);
    o.sample.temp = 0.9f;
    o.sample.seed = 5;
    return o;
}

/* The text of the request alone, without speculation, with an empty cache. */
static void decode_alone(const fixture *w, tracked *p, int max_tokens) {
    so_engine_opts eo = {.n_ctx = CTX, .n_parallel = 1, .n_batch = 64, .kv_dtype = SO_DTYPE_F32};
    so_engine *e = NULL;
    so_err err = {0};
    SO_OK_OR_FAIL(so_engine_create(w->target.m, NULL, &eo, &e, &err), err);
    so_request_opts o = opts_of(p, max_tokens);
    so_request *r = so_case_finish(e, &o);
    const int32_t *out = so_request_output(r, &p->n_want);
    memcpy(p->want, out, (size_t)p->n_want * sizeof *out);
    so_request_free(r);
    so_engine_free(e);
}

static tracked *submit_as(fixture *w, int n_prompt, int n_same, int max_tokens, int priority,
                          const char *drafter) {
    so_err err = {0};
    tracked *p = &w->tracked_reqs[w->n];
    memset(p, 0, sizeof *p);
    p->w = w;
    p->first_step = p->end_step = -1;
    fill_prompt(w, p, n_prompt, 1 + w->n, n_same);
    decode_alone(w, p, max_tokens);
    so_request_opts o = opts_of(p, max_tokens);
    o.priority = priority;
    o.spec = (so_spec_opts){.drafter = drafter, .length = drafter ? 3 : 0};
    o.on_event = on_event;
    o.user = p;
    SO_OK_OR_FAIL(so_engine_submit(w->e, &o, &p->req, &err), err);
    w->n++;
    return p;
}

static tracked *submit(fixture *w, int n_prompt, int max_tokens) {
    return submit_as(w, n_prompt, 0, max_tokens, 0, NULL);
}

static int step(fixture *w) {
    so_err err = {0};
    w->step++;
    int rc = so_engine_step(w->e, &err);
    if (rc < 0)
        fail_msg("step: %s", err.msg);
    so_engine_check(w->e);
    return rc;
}

static void expect_alone(const tracked *p) {
    assert_int_equal(so_request_finish(p->req), SO_FINISH_LENGTH);
    so_case_expect(p->req, p->want, p->n_want);
}

static void run_out(fixture *w) {
    while (step(w) > 0)
        assert_true(w->step < 10000);
    for (int i = 0; i < w->n; i++)
        if (so_request_finish(w->tracked_reqs[i].req) != SO_FINISH_CANCELLED)
            expect_alone(&w->tracked_reqs[i]);
}

static const so_request_stats *stats_of(const tracked *p) { return so_request_get_stats(p->req); }

/* --- fairness --- */

/* A short prompt that arrives during a long prefill has its first token in the next step. */
static void test_short_prompt_overtakes(void **state) {
    fixture *w = *state;
    so_engine_opts o = usual(w);
    o.n_batch = 16;
    begin_engine(w, o);
    tracked *l = submit(w, 200, 3);
    step(w);
    tracked *s = submit(w, 9, 2);
    step(w);
    assert_int_equal(s->first_step, 2);
    assert_int_equal(l->first_step, -1);
    run_out(w);
}

/* A steady stream of short prompts does not starve a long one: it gets a quarter of the budget. */
static void test_long_prompt_is_bounded(void **state) {
    fixture *w = *state;
    so_engine_opts o = usual(w);
    o.n_batch = 16;
    begin_engine(w, o);
    tracked *l = submit(w, 160, 2), *s = NULL;
    for (int i = 0; i < 45 && l->first_step < 0; i++) {
        assert_true(!s || s->first_step >= i - 1); /* short prompts have twelve rows */
        s = submit(w, 11 + i % 3, 1);
        step(w);
    }
    assert_in_range(l->first_step, 2, 160 / (16 / 4) + 1);
    assert_true(l->first_step > 160 / 16 + 4); /* it had to share the budget */
    run_out(w);
}

/* Among competing prompts the shortest gets its first token first; all finish. */
static void test_shortest_first(void **state) {
    fixture *w = *state;
    so_engine_opts o = usual(w);
    o.n_batch = 8;
    begin_engine(w, o);
    tracked *a = submit(w, 60, 2), *b = submit(w, 40, 2), *c = submit(w, 20, 2),
            *d = submit(w, 30, 2);
    run_out(w);
    assert_true(c->first_step < d->first_step);
    assert_true(d->first_step < b->first_step);
    assert_true(b->first_step < a->first_step);
}

/* During a long prefill a decoding request gets a token in every step, and steps stay short. */
static void test_decoding_continues_during_prefill(void **state) {
    fixture *w = *state;
    so_engine_opts o = usual(w);
    o.n_batch = 200;
    begin_engine(w, o);
    tracked *d = submit(w, 5, 40);
    step(w);
    tracked *l = submit(w, 220, 2);
    w->max_rows = 0;
    while (l->first_step < 0) {
        int before = d->n_seen;
        step(w);
        assert_int_equal(d->n_seen, before + 1);
    }
    assert_int_equal(l->first_step, 1 + (220 + 49) / 50);
    assert_true(w->max_rows <= 200 / 4 + 2);
    run_out(w);
}

/* --- priorities --- */

static void test_priorities(void **state) {
    fixture *w = *state;
    so_engine_opts o = usual(w);
    o.n_parallel = 1;
    begin_engine(w, o);
    tracked *a = submit_as(w, 20, 0, 20, 0, NULL);
    for (int i = 0; i < 5; i++)
        step(w);
    tracked *b = submit_as(w, 10, 0, 4, 0, NULL), *c = submit_as(w, 10, 0, 4, 5, NULL);
    tracked *d = submit_as(w, 10, 0, 4, 5, NULL), *x = submit_as(w, 10, 0, 4, -3, NULL);
    step(w);
    assert_int_equal(c->first_step, w->step); /* a was preempted at once; b waits */
    assert_int_equal(stats_of(a)->preempted_n, 1);
    run_out(w);
    const tracked *order[] = {c, d, a, b, x};
    for (int i = 0; i < 5; i++)
        assert_int_equal(w->ended[i], order[i] - w->tracked_reqs);
    assert_int_equal(stats_of(a)->preempted_n, 1);
}

/* If both requests fit, no request is preempted for a priority. */
static void test_priority_without_need(void **state) {
    fixture *w = *state;
    begin_engine(w, usual(w));
    tracked *a = submit_as(w, 20, 0, 20, 0, NULL);
    step(w);
    submit_as(w, 10, 0, 4, 5, NULL);
    run_out(w);
    assert_int_equal(stats_of(a)->preempted_n, 0);
}

/* --- preemption --- */

/* Four growing texts in a cache for two: the last submitted are preempted first, the first never,
 * and a preempted request is resumed before later ones start. */
static void test_last_in_rank_is_preempted(void **state) {
    fixture *w = *state;
    so_engine_opts o = usual(w);
    so_engine_stats s;
    o.n_pages = 10;
    begin_engine(w, o);
    for (int i = 0; i < 4; i++)
        submit(w, 30, 100); /* 5 pages each at the end, 2 of them at admission */
    tracked *late = submit(w, 10, 5);
    run_out(w);
    so_engine_get_stats(w->e, &s);
    assert_true(s.preemptions >= 2);
    assert_int_equal(stats_of(&w->tracked_reqs[0])->preempted_n, 0);
    assert_int_equal(stats_of(&w->tracked_reqs[1])->preempted_n, 0);
    assert_true(stats_of(&w->tracked_reqs[3])->preempted_n >= 1);
    assert_true(stats_of(&w->tracked_reqs[3])->preempted_n >=
                stats_of(&w->tracked_reqs[2])->preempted_n);
    for (int i = 0; i < 4; i++)
        assert_int_equal(w->ended[i] < 4 || w->ended[i] == 4, true);
    assert_true(late->first_step > w->tracked_reqs[0].end_step);
    assert_int_equal(s.pages_total, 10);
}

static void test_lowest_priority_is_preempted(void **state) {
    fixture *w = *state;
    so_engine_opts o = usual(w);
    o.n_pages = 9;
    begin_engine(w, o);
    tracked *low = submit_as(w, 30, 0, 100, -1, NULL);
    tracked *a = submit(w, 30, 100), *b = submit(w, 30, 100);
    run_out(w);
    assert_true(stats_of(low)->preempted_n >= 1); /* although it was submitted first */
    assert_int_equal(stats_of(a)->preempted_n, 0);
    assert_true(a->end_step < low->end_step && b->end_step < low->end_step);
}

/* A cache that holds exactly one request: all requests finish, with every drafter. */
static void test_smallest_pool(void **state) {
    fixture *w = *state;
    static const char *const drafters[] = {NULL, "model", "ngram", "random", "model+lookup"};
    for (int prefix = 0; prefix < 2; prefix++) {
        so_engine_opts o = usual(w);
        o.n_pages = 4;
        o.prefix_cache = prefix;
        begin_engine(w, o);
        for (int i = 0; i < 10; i++)
            submit_as(w, 20 + 9 * i, 16, 128 - (20 + 9 * i), 0, drafters[i % 5]);
        run_out(w);
        for (int i = 0; i < 10; i++)
            assert_int_equal(w->ended[i] >= 0, 1);
    }
}

/* Guesses take only free pages: without free pages there are no guesses, and no request is
 * preempted for them. */
static void test_guesses_are_dropped_before_preemption(void **state) {
    fixture *w = *state;
    so_engine_opts o = usual(w);
    so_engine_stats s;
    o.n_pages = 4; /* exactly two texts of 64 tokens */
    o.n_parallel = 2;
    begin_engine(w, o);
    submit_as(w, 33, 0, 31, 0, "random");
    submit_as(w, 33, 0, 31, 0, "random");
    run_out(w);
    so_engine_get_stats(w->e, &s);
    assert_int_equal(s.preemptions, 0);
    assert_true(s.drafted > 0); /* while the requests' own pages had room */
}

/* The draft's cache has as many pages as the target's, and admission counts both. If it is full
 * anyway, texts continue without drafts. */
static void test_draft_pool(void **state) {
    fixture *w = *state;
    so_engine_opts o = usual(w);
    o.n_pages = 8;
    begin_engine(w, o);
    for (int i = 0; i < 6; i++)
        submit_as(w, 40, 0, 80, 0, "model");
    run_out(w);
    int n = 0;
    for (int i = 0; i < 6; i++)
        n += stats_of(&w->tracked_reqs[i])->draft_n;
    assert_true(n > 0);
}

/* Combinations of small limits: no request that fits is refused, and all finish. */
static void test_extremes(void **state) {
    fixture *w = *state;
    static const char *const drafters[] = {"model", NULL, "random"};
    for (int i = 0; i < 36; i++) {
        so_engine_opts o = usual(w);
        o.n_pages = 1 + i % 3;
        o.n_batch = i % 2 ? 1 : 40;
        o.n_parallel = i % 4 < 2 ? 1 : 7;
        o.prefix_cache = i % 5 > 1;
        o.kv_layout = i % 6 == 5 ? SO_KV_SLOTTED : SO_KV_PAGED;
        o.n_ctx = o.n_pages * SO_KV_PAGE;
        begin_engine(w, o);
        submit_as(w, 1, 1, o.n_ctx - 1, 0, drafters[i % 3]);
        submit_as(w, o.n_ctx - 1, 20, 1, i % 2, drafters[i % 3]);
        submit_as(w, o.n_ctx / 2, 20, 0, 0, drafters[i % 3]);
        submit_as(w, o.n_ctx / 2, 20, o.n_ctx / 2, -1, drafters[i % 3]);
        run_out(w);
    }
}

/* Without a limit an answer may fill the cache; a prompt that leaves no room is refused. */
static void test_pool_below_context(void **state) {
    fixture *w = *state;
    so_engine_opts o = usual(w);
    so_request *r = NULL;
    so_err err = {0};
    o.n_pages = 2;
    begin_engine(w, o);
    tracked *p = submit(w, 10, -1);
    while (step(w) > 0)
        ;
    int n;
    so_request_output(p->req, &n);
    assert_int_equal(n, 64 - 10);
    so_case_expect(p->req, p->want, n);
    fill_prompt(w, p, 64, 1, 0);
    so_request_opts ro = opts_of(p, -1);
    assert_int_equal(so_engine_submit(w->e, &ro, &r, &err), SO_ELIMIT);
    assert_non_null(strstr(err.msg, "--kv-pages"));
    ro.n_prompt = 63;
    SO_OK_OR_FAIL(so_engine_submit(w->e, &ro, &r, &err), err);
    SO_OK_OR_FAIL(so_engine_run(w->e, r, &err), err);
    so_request_free(r);
}

/* --- cancelling --- */

static void test_cancel_in_every_phase(void **state) {
    fixture *w = *state;
    for (int slotted = 0; slotted < 2; slotted++) {
        so_engine_opts o = usual(w);
        o.n_batch = 8;
        o.n_parallel = 3;
        o.prefix_cache = true;
        o.kv_layout = slotted ? SO_KV_SLOTTED : SO_KV_PAGED;
        begin_engine(w, o);
        tracked *stays = submit_as(w, 12, 0, 60, 2, "model");
        tracked *decoding = submit_as(w, 9, 0, 60, 1, "ngram");
        while (decoding->first_step < 0)
            step(w);
        tracked *reading = submit(w, 150, 10), *waiting = submit(w, 20, 10);
        step(w);
        tracked *high = submit_as(w, 10, 0, 3, 3, NULL); /* preempts `reading`, the last in rank */
        step(w);
        assert_int_equal(stats_of(reading)->preempted_n, 1);
        so_request_cancel(reading->req); /* while preempted */
        so_request_cancel(waiting->req); /* before it was admitted */
        so_request_cancel(decoding->req);
        step(w);
        tracked *half = submit(w, 150, 10), *in_callback = submit(w, 10, 30);
        in_callback->cancel_after = 3; /* in the callback */
        while (high->end_step < 0)
            step(w);
        step(w);
        step(w);
        assert_int_equal(half->first_step, -1);
        so_request_cancel(half->req); /* during its prefill */
        tracked *never = submit(w, 5, 5);
        so_request_cancel(never->req); /* before any step */
        run_out(w);
        const tracked *gone[] = {reading, waiting, decoding, half, in_callback, never};
        for (size_t i = 0; i < SO_LEN(gone); i++)
            assert_int_equal(so_request_finish(gone[i]->req), SO_FINISH_CANCELLED);
        assert_int_equal(in_callback->n_seen, 3);
        so_case_expect(in_callback->req, in_callback->want, 3);
        expect_alone(stays);
        expect_alone(high);
    }
}

/* --- prefixes --- */

static so_engine_opts with_prefixes(const fixture *w) {
    so_engine_opts o = usual(w);
    o.prefix_cache = true;
    return o;
}

static void test_hits_are_counted_and_exact(void **state) {
    fixture *w = *state;
    so_engine_stats s;
    begin_engine(w, with_prefixes(w));
    submit_as(w, 100, 70, 10, 0, NULL);
    run_out(w);
    tracked *half = submit_as(w, 100, 70, 10, 0, "model"); /* 70 common tokens: two whole pages */
    tracked *same = submit_as(w, 96, 96, 10, 0, NULL), *none = submit(w, 80, 10);
    run_out(w);
    assert_int_equal(stats_of(half)->cached_n, 64);
    assert_int_equal(stats_of(same)->cached_n, 64);
    assert_int_equal(stats_of(none)->cached_n, 0);
    tracked *again = submit_as(w, 96, 96, 10, 0, NULL);
    run_out(w);
    assert_int_equal(stats_of(again)->cached_n, 64); /* the last token is always computed */
    so_engine_get_stats(w->e, &s);
    assert_int_equal(s.prefix_queried, 100 + 100 + 96 + 80 + 96);
    assert_int_equal(s.prefix_hits, 3 * 64);
    assert_true(s.pages_cached > 0);
}

/* Generated tokens are kept in the prefix tree too, rejected guesses are not: the next turn of a
 * conversation. */
static void test_next_turn_hits_the_answer(void **state) {
    fixture *w = *state;
    static const char *const drafters[] = {NULL, "random", "model", "ngram"};
    for (size_t d = 0; d < SO_LEN(drafters); d++) {
        begin_engine(w, with_prefixes(w));
        tracked *a = submit_as(w, 40, 0, 60, 0, drafters[d]);
        run_out(w);
        tracked *b = &w->tracked_reqs[w->n];
        memset(b, 0, sizeof *b);
        b->w = w;
        memcpy(b->prompt, a->prompt, sizeof b->prompt);
        memcpy(b->prompt + 40, a->want, 60 * sizeof *a->want);
        b->n_prompt = 103; /* three more tokens */
        decode_alone(w, b, 20);
        so_request_opts o = opts_of(b, 20);
        o.on_event = on_event;
        o.user = b;
        so_err err = {0};
        SO_OK_OR_FAIL(so_engine_submit(w->e, &o, &b->req, &err), err);
        w->n++;
        run_out(w);
        assert_int_equal(stats_of(b)->cached_n, 96);
    }
}

/* Equal prompts at once: the later ones take the pages that the first has computed. */
static void test_equal_prompts_at_once(void **state) {
    fixture *w = *state;
    so_engine_opts o = with_prefixes(w);
    so_engine_stats s;
    o.n_batch = 64;
    begin_engine(w, o);
    for (int i = 0; i < 4; i++)
        submit_as(w, 200, 200, 8, 0, NULL);
    run_out(w);
    so_engine_get_stats(w->e, &s);
    assert_true(s.prefix_hits >= 2 * 192);
    int n = 0;
    for (int i = 0; i < 4; i++)
        n += stats_of(&w->tracked_reqs[i])->cached_n;
    assert_int_equal(n, s.prefix_hits);
}

/* A resumed request finds its own pages if their memory was not needed. */
static void test_resuming_hits(void **state) {
    fixture *w = *state;
    so_engine_opts o = with_prefixes(w);
    so_engine_stats s;
    o.n_parallel = 1;
    begin_engine(w, o);
    tracked *a = submit_as(w, 100, 0, 20, 0, "model");
    for (int i = 0; i < 8; i++)
        step(w);
    submit_as(w, 10, 0, 3, 1, NULL);
    step(w);
    assert_int_equal(stats_of(a)->preempted_n, 1);
    so_engine_get_stats(w->e, &s);
    int64_t before = s.rows_sum;
    run_out(w);
    so_engine_get_stats(w->e, &s);
    assert_true(s.rows_sum - before < 100);
    assert_int_equal(stats_of(a)->cached_n, 0); /* its own pages are not counted as hits */
    assert_int_equal(s.prefix_hits, 0);
}

/* --- slots --- */

static void test_slots(void **state) {
    fixture *w = *state;
    so_engine_opts o = usual(w);
    so_engine_stats s;
    so_err err = {0};
    so_engine *e = NULL;
    o.kv_layout = SO_KV_SLOTTED;
    o.n_pages = 7; /* less than one slot of 256 tokens */
    assert_int_equal(so_engine_create(w->target.m, NULL, &o, &e, &err), SO_ERANGE);
    assert_non_null(strstr(err.msg, "page run"));
    o.n_pages = 8 * 2 + 3; /* two slots for n_parallel 4 */
    o.prefix_cache = true; /* ignored for slots */
    begin_engine(w, o);
    for (int i = 0; i < 6; i++)
        submit_as(w, 64, 64, 40, 0, i % 2 ? "model" : "random");
    step(w);
    so_engine_get_stats(w->e, &s);
    assert_int_equal(s.running, 2);
    assert_int_equal(s.pages_used, 16);
    assert_int_equal(s.pages_total, 16);
    run_out(w);
    so_engine_get_stats(w->e, &s);
    assert_int_equal(s.preemptions, 0);
    assert_int_equal(s.prefix_hits + s.pages_cached, 0);
}

int main(void) {
#define IN_WORLD(t) cmocka_unit_test_setup_teardown(t, open_fixture, close_fixture)
    const struct CMUnitTest tests[] = {
        IN_WORLD(test_short_prompt_overtakes),
        IN_WORLD(test_long_prompt_is_bounded),
        IN_WORLD(test_shortest_first),
        IN_WORLD(test_decoding_continues_during_prefill),
        IN_WORLD(test_priorities),
        IN_WORLD(test_priority_without_need),
        IN_WORLD(test_last_in_rank_is_preempted),
        IN_WORLD(test_lowest_priority_is_preempted),
        IN_WORLD(test_smallest_pool),
        IN_WORLD(test_guesses_are_dropped_before_preemption),
        IN_WORLD(test_draft_pool),
        IN_WORLD(test_extremes),
        IN_WORLD(test_pool_below_context),
        IN_WORLD(test_cancel_in_every_phase),
        IN_WORLD(test_hits_are_counted_and_exact),
        IN_WORLD(test_next_turn_hits_the_answer),
        IN_WORLD(test_equal_prompts_at_once),
        IN_WORLD(test_resuming_hits),
        IN_WORLD(test_slots),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

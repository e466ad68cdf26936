/* async(X) in the engine: whatever the worker does, and whenever, the text is that of plain decoding,
 * token for token, greedy and with `match`. The faults are those of so_async_faults: a worker that is
 * slow, that does nothing for a while with a batch in hand (then both batches are busy), that gives
 * a batch up half way, that answers nonsense. test_async_mutants.c has `reject`. */
#include "so_test.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "base/rng.h"
#include "so_cases.h"

static so_rig target, draft;
static so_case cases[SO_CASES];

static int open_all(void **state) {
    (void)state;
    so_case_open(&target, "llama", &draft, "llama", cases);
    return 0;
}

static int close_all(void **state) {
    (void)state;
    so_rig_close(&target);
    so_rig_close(&draft);
    return 0;
}

/* After a step the caller is busy for a while, as a slow target would be. */
typedef struct pause {
    uint64_t seed;
    uint32_t n;
    double max_ms;
    double longest_draft_ms; /* of a step: what the engine waited for drafts, and drafted itself */
} pause;

static void on_step(void *user, const so_step_info *info) {
    pause *p = user;
    so_rng_key key = {.seed = p->seed, .purpose = SO_RNG_TEST};
    double ms = p->max_ms * so_rng_uniform(&key, p->n++);
    p->longest_draft_ms = SO_MAX(p->longest_draft_ms, info->draft_ms);
    if (p->max_ms > 0)
        nanosleep(&(struct timespec){.tv_nsec = (long)(ms * 1e6)}, NULL);
}

static so_engine *open_engine(const so_async_faults *faults, pause *p, int n_parallel) {
    return so_case_engine(&target, &(so_case_engine_opts){.draft = &draft,
                                                          .n_parallel = n_parallel,
                                                          .n_batch = 16,
                                                          .draft_temp = -1,
                                                          .async_faults = faults,
                                                          .on_step = on_step,
                                                          .step_user = p});
}

/* All cases at once, each with the next of the specs. Returns the sum of their counts. */
static so_async_counts run_all(so_engine *e, const char *const *specs, int n_specs, int length) {
    so_request *r[SO_CASES];
    so_async_counts sum = {0};
    for (int c = 0; c < SO_CASES; c++)
        r[c] = so_case_submit(e, &cases[c],
                              &(so_spec_opts){.drafter = specs[c % n_specs], .length = length});
    so_case_run(e);
    for (int c = 0; c < SO_CASES; c++) {
        if (!so_case_same(r[c], &cases[c]))
            fail_msg("case %d, %s, length %d: the text differs", c, specs[c % n_specs], length);
        so_async_counts_add(&sum, &so_request_get_stats(r[c])->async);
        so_request_free(r[c]);
    }
    return sum;
}

static const char *const SPECS[] = {"async(model)",
                                    "async(model,wait=2)",
                                    "async(model,fan=3,fallback=none)",
                                    "async(model,fallback=lookup,ngram)",
                                    "async(model),lookup",
                                    "lookup,async(model,fallback=sync)",
                                    "async(ngram)",
                                    "async(lookup,wait=1)",
                                    "async(oracle(0.7),wait=1)",
                                    "async(random)",
                                    "async(oracle(0.7,hit=0.6,model),fan=4,wait=2)",
                                    "async(model(ngram))",
                                    "async(model(k=3,nodes=8))"};

static void every_spec_gives_the_plain_text(void **state) {
    (void)state;
    for (size_t i = 0; i < SO_LEN(SPECS); i++)
        for (int n_parallel = 1; n_parallel <= 4; n_parallel += 3)
            for (int length = 0; length <= 3; length += 3) {
                pause p = {.seed = 11 + i, .max_ms = 0.4};
                so_engine *e = open_engine(NULL, &p, n_parallel);
                so_async_counts n = run_all(e, &SPECS[i], 1, length);
                assert_true(n.hits + n.late + n.absent == n.rounds);
                assert_true(n.rounds + n.skipped > 0);
                so_engine_free(e);
            }
}

/* A draft model and async drafters on one backend, several specs at once. */
static void specs_share_a_backend(void **state) {
    static const char *const mixed[] = {"async(model,wait=1)", "model", "async(ngram),model"};
    (void)state;
    for (int length = 0; length <= 4; length += 2) {
        pause p = {.seed = 5, .max_ms = 0.2};
        so_engine *e = open_engine(NULL, &p, 4);
        for (int k = 0; k < 3; k++)
            run_all(e, mixed, (int)SO_LEN(mixed), length);
        so_engine_free(e);
    }
}

/* Sets with a draft model of their own are freed while the async thread drafts for another set on the same
 * backend: there are more specs than an engine keeps. */
static void sets_are_freed_while_another_drafts(void **state) {
    pause p = {.seed = 9, .max_ms = 0.1};
    so_engine *e = open_engine(NULL, &p, 3);
    so_request *other = NULL;
    so_err err = {0};
    int n_hits = 0;
    (void)state;
    for (int i = 0; i < 120; i++) {
        char spec[64];
        snprintf(spec, sizeof spec, "async(%s,fan=%d),model(%s)", i % 2 ? "ngram" : "model",
                 1 + i / 2 % 64, i % 4 < 2 ? "ngram" : "lookup");
        if (!other)
            other = so_case_submit(e, &cases[i % SO_CASES],
                                   &(so_spec_opts){.drafter = "async(model)", .length = 3});
        so_request *r =
            so_case_submit(e, &cases[0], &(so_spec_opts){.drafter = spec, .length = 1 + i % 3});
        for (int step = 0; step < 4; step++)
            so_engine_step(e, &err);
        so_request_free(r);
        if (so_request_finish(other) != SO_FINISH_NONE) {
            n_hits += so_request_get_stats(other)->async.hits;
            so_request_free(other);
            other = NULL;
        }
    }
    so_case_run(e);
    so_request_free(other);
    so_engine_free(e);
    assert_true(n_hits > 0);
}

/* Delays from nothing to ten times the length of a step, and every other fault. */
static void faults_change_no_token(void **state) {
    static const char *const specs[] = {"async(model)", "async(model,wait=1)",
                                        "async(ngram),model"};
    int64_t happened = 0, all = 0;
    (void)state;
    for (int k = 0; all < 1000 && k < 400; k++) {
        so_async_faults f = {.seed = 100 + (uint64_t)k, .happened = &happened};
        switch (k % 5) {
        case 0:
            f.delay_rate = 0.7;
            f.delay_ms = 0.05 * (k / 5 % 10);
            break;
        case 1:
            f.abandon_rate = 0.3;
            break;
        case 2:
            f.nonsense_rate = 0.6;
            break;
        case 3:
            f.stop_rate = 0.1;
            f.stop_ms = 3;
            break;
        default:
            f.delay_rate = f.abandon_rate = f.nonsense_rate = 0.2;
            f.delay_ms = 0.3;
        }
        pause p = {.seed = (uint64_t)k, .max_ms = k % 3 ? 0.1 : 0};
        so_engine *e = open_engine(&f, &p, 1 + k % 4);
        run_all(e, &specs[k / 5 % 3], 1, k / 2 % 2 ? 3 : 0);
        so_engine_free(e);
        all += happened;
        happened = 0;
    }
    print_message("%d faults\n", (int)all);
    assert_true(all >= 1000);
}

/* The worker drafts for all running requests. If it stands still for a quarter of a second with each
 * batch, the engine never waits for it: a step drafts in its own time, which takes these models less than
 * a millisecond, or not at all. */
static void a_worker_that_stops_holds_nobody_up(void **state) {
    so_async_faults f = {.seed = 3, .stop_rate = 1, .stop_ms = 250};
    (void)state;
    for (int stops = 0; stops < 2; stops++) {
        pause p = {.max_ms = 0};
        so_engine *e = open_engine(stops ? &f : NULL, &p, SO_CASES);
        so_request *r[SO_CASES];
        for (int c = 0; c < SO_CASES; c++)
            r[c] = so_case_submit(
                e, &cases[c],
                &(so_spec_opts){.drafter = stops ? "async(model)" : "async(model,wait=2)",
                                .length = 3});
        so_case_run(e);
        for (int c = 0; c < SO_CASES; c++) {
            const so_async_counts *n = &so_request_get_stats(r[c])->async;
            assert_true(so_case_same(r[c], &cases[c]));
            assert_true(stops ? n->hits <= 2 : n->outcomes > 0 && n->drafted > 0);
            so_request_free(r[c]);
        }
        if (stops)
            assert_true(p.longest_draft_ms < 100);
        so_engine_free(e);
    }
}

/* Requests that end in the middle: cancelled, or freed while the worker may have them. */
static void requests_may_end_at_any_time(void **state) {
    (void)state;
    for (int k = 0; k < 60; k++) {
        pause p = {.seed = (uint64_t)k, .max_ms = 0.1};
        so_async_faults f = {.seed = (uint64_t)k, .delay_rate = 0.5, .delay_ms = 0.2};
        so_engine *e = open_engine(&f, &p, 3);
        so_request *r[SO_CASES];
        so_err err = {0};
        for (int c = 0; c < SO_CASES; c++)
            r[c] = so_case_submit(e, &cases[c], &(so_spec_opts){.drafter = "async(model)"});
        for (int step = 0; step < k % 20; step++)
            so_engine_step(e, &err);
        for (int c = 0; c < SO_CASES; c += 2) {
            if (c == 0)
                so_request_cancel(r[c]);
            else {
                so_request_free(r[c]);
                r[c] = NULL;
            }
        }
        so_case_run(e);
        for (int c = 0; c < SO_CASES; c++) {
            if (r[c] && c % 2 == 1)
                assert_true(so_case_same(r[c], &cases[c]));
            so_request_free(r[c]);
        }
        so_engine_free(e);
    }
}

/* The draft is the target, so every guess that is served is right, and nearly every round is hit. */
static void a_perfect_draft_is_hit(void **state) {
    (void)state;
    pause p = {0};
    so_engine *e = open_engine(NULL, &p, 1);
    for (int c = 0; c < SO_CASES; c++) {
        so_request *r = so_case_submit(
            e, &cases[c], &(so_spec_opts){.drafter = "async(model,wait=3)", .length = 3});
        so_case_run(e);
        const so_request_stats *s = so_request_get_stats(r);
        assert_true(so_case_same(r, &cases[c]));
        assert_true(s->draft_n_accepted == s->tested_n);
        assert_in_range(s->rounds, 1, SO_CASE_PREDICT / 2);
        assert_true(s->async.hits >= s->rounds - 3);
        assert_true(so_stats_rates(s).hit_rate > 0.5);
        so_request_free(r);
    }
    so_engine_free(e);
}

/* The oracle's hit rate is what it was told, and so is its acceptance, ahead and in the engine's time. */
static void an_oracle_simulates_hits(void **state) {
    static const char *const specs[] = {"async(oracle(1,hit=0,model),fan=4,wait=3)",
                                        "async(oracle(1,hit=1,model),fan=4,wait=3)",
                                        "async(oracle(0,hit=1,model),fan=4,wait=3)",
                                        "async(oracle(0.7,hit=0.5,model),fan=4,wait=3)"};
    (void)state;
    for (int k = 0; k < 4; k++) {
        pause p = {0};
        so_engine *e = open_engine(NULL, &p, 1);
        so_request_stats sum = {0};
        for (int c = 0; c < SO_CASES; c++) {
            so_request *r =
                so_case_submit(e, &cases[c], &(so_spec_opts){.drafter = specs[k], .length = 3});
            so_case_run(e);
            assert_true(so_case_same(r, &cases[c]));
            so_stats_add(&sum, so_request_get_stats(r));
            so_request_free(r);
        }
        double hit_rate = (double)sum.async.hits / sum.async.rounds;
        double alpha = (double)sum.draft_n_accepted / sum.tested_n;
        print_message("%s: hit rate %.2f, alpha %.2f\n", specs[k], hit_rate, alpha);
        if (k == 0)
            assert_int_equal(sum.async.hits, 0);
        else if (k < 3) /* the last round of a text has no end that the oracle knows */
            assert_true(sum.async.hits >= sum.async.rounds - SO_CASES);
        else
            assert_true(hit_rate > 0.25 && hit_rate < 0.75);
        assert_true(k == 3 ? alpha > 0.5 && alpha < 0.9 : alpha == (k < 2));
        so_engine_free(e);
    }
}

/* --- drafts that must be tested --- */

static so_request_opts drawn_opts(so_verify_mode verify) {
    so_request_opts o = so_case_opts(
        &cases[0],
        &(so_spec_opts){.drafter = "async(model,wait=3)", .length = 3, .verify = verify});
    o.sample = (so_sample_params){.temp = 1, .seed = 5, .top_p = 1, .repeat_penalty = 1};
    return o;
}

/* A request of higher priority that comes while sampled guesses are made ahead waits until they have been
 * tested: for one step. With points it does not. */
static void drawn_drafts_are_tested_before_a_preemption(void **state) {
    static const so_verify_mode modes[] = {SO_VERIFY_REJECT, SO_VERIFY_MATCH};
    (void)state;
    for (int k = 0; k < 12; k++) {
        pause p = {0};
        so_err err = {0};
        so_engine *e = open_engine(NULL, &p, 1);
        so_request_opts o = drawn_opts(modes[k % 2]),
                        first = so_case_opts(&cases[2], &(so_spec_opts){0});
        so_request *r = NULL, *other = NULL;
        SO_OK_OR_FAIL(so_engine_submit(e, &o, &r, &err), err);
        while (so_request_get_stats(r)->rounds < 2 + k / 2 % 2)
            so_engine_step(e, &err);
        first.priority = 1;
        SO_OK_OR_FAIL(so_engine_submit(e, &first, &other, &err), err);
        int rounds = so_request_get_stats(r)->rounds;
        so_engine_step(e, &err);
        assert_int_equal(so_request_get_stats(r)->preempted_n, k % 2);
        assert_int_equal(so_request_get_stats(r)->rounds, rounds + 1 - k % 2);
        so_engine_step(e, &err);
        assert_int_equal(so_request_get_stats(r)->preempted_n, 1);
        so_case_run(e);
        assert_true(so_case_same(other, &cases[2]));
        so_request_free(r);
        so_request_free(other);
        so_engine_free(e);
    }
}

/* Where pages may be short, a request that is admitted can take those of the guesses: sampled ones are not
 * made ahead then. Points are. */
static void drawn_drafts_need_sure_pages(void **state) {
    int n_one = so_kv_pages_for(SO_CASE_CTX);
    (void)state;
    for (int k = 0; k < 4; k++) {
        bool drawn = k % 2 == 0, enough = k < 2;
        so_engine *e = so_case_engine(
            &target, &(so_case_engine_opts){.draft = &draft,
                                            .n_parallel = 2,
                                            .n_batch = 16,
                                            .n_pages = enough ? 2 * n_one : 2 * n_one - 1,
                                            .draft_temp = -1});
        so_request_opts o = drawn_opts(drawn ? SO_VERIFY_REJECT : SO_VERIFY_MATCH);
        so_request *r = so_case_finish(e, &o);
        const so_request_stats *s = so_request_get_stats(r);
        assert_int_equal(s->async.rounds > 0, enough || !drawn);
        assert_int_equal(s->preempted_n, 0);
        so_request_free(r);
        so_engine_free(e);
    }
}

/* One backend for target and draft is refused, and the message says what to do. */
static void needs_hardware_of_its_own(void **state) {
    (void)state;
    pause p = {0};
    so_rig same = target;
    so_engine *e = so_case_engine(
        &target,
        &(so_case_engine_opts){
            .draft = &same, .n_parallel = 1, .n_batch = 16, .on_step = on_step, .step_user = &p});
    so_request_opts o = so_case_opts(&cases[0], &(so_spec_opts){.drafter = "async(model)"});
    so_request *r = NULL;
    so_err err = {0};
    assert_int_equal(so_engine_submit(e, &o, &r, &err), SO_EINVAL);
    assert_non_null(strstr(err.msg, "--draft-cores N"));
    so_engine_free(e);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_spec_gives_the_plain_text),
        cmocka_unit_test(specs_share_a_backend),
        cmocka_unit_test(sets_are_freed_while_another_drafts),
        cmocka_unit_test(faults_change_no_token),
        cmocka_unit_test(a_worker_that_stops_holds_nobody_up),
        cmocka_unit_test(requests_may_end_at_any_time),
        cmocka_unit_test(a_perfect_draft_is_hit),
        cmocka_unit_test(an_oracle_simulates_hits),
        cmocka_unit_test(drawn_drafts_are_tested_before_a_preemption),
        cmocka_unit_test(drawn_drafts_need_sure_pages),
        cmocka_unit_test(needs_hardware_of_its_own),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}

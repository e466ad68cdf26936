/* The worker of async(X) and requests that end: X is a fake that notes what is done to the states it
 * has opened. A state may be closed once, and not while a batch may still draft for it. */
#include "rig.h"

#include <stdatomic.h>
#include <time.h>

#include "draft/ahead.h"
#include "draft/async.h"
#include "draft/spec.h"

enum { STATES = 8 };

typedef struct fake {
    so_drafter base;
    int n_opened;
    atomic_int n_closed[STATES], n_begun, n_late, n_preempting;
    atomic_bool may_preempt;
    int n_hidden; /* states of the target that were right */
} fake;

typedef struct fake_state {
    fake *f;
    int index;
} fake_state;

static fake_state states[2][STATES];
static fake fakes[2];

static void nap(void) { nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL); }

static void wait_for(atomic_int *n, int least) {
    for (int i = 0; atomic_load(n) < least; i++) {
        assert_true(i < 20000);
        nap();
    }
}

static int fake_open(so_drafter *d, const so_draft_text *text, void **state, so_err *err) {
    fake *f = (fake *)d;
    (void)text;
    (void)err;
    fake_state *s = &states[f - fakes][f->n_opened];
    *s = (fake_state){f, f->n_opened++};
    *state = s;
    return SO_OK;
}

static void fake_close(so_drafter *d, void *state) {
    atomic_fetch_add(&((fake *)d)->n_closed[((fake_state *)state)->index], 1);
}

static void fake_preempt(so_drafter *d, void *state) {
    fake *f = (fake *)d;
    (void)state;
    atomic_fetch_add(&f->n_preempting, 1);
    while (!atomic_load(&f->may_preempt))
        nap();
}

static int fake_propose(so_drafter *d, so_draft_job *jobs, int n_jobs, so_err *err) {
    (void)d;
    (void)jobs;
    (void)n_jobs;
    (void)err;
    return SO_OK;
}

/* Counts uses of a state that was closed. */
static void check_jobs(fake *f, const so_ahead_job *jobs, int n) {
    for (int i = 0; i < n; i++) {
        const fake_state *s = jobs[i].job.state;
        if (!jobs[i].skip && atomic_load(&f->n_closed[s->index]) > 0)
            atomic_fetch_add(&f->n_late, 1);
    }
}

static int fake_begin(so_drafter *d, so_ahead_job *jobs, int n, bool first, so_err *err) {
    fake *f = (fake *)d;
    (void)first;
    (void)err;
    check_jobs(f, jobs, n);
    for (int i = 0; i < n; i++) {
        jobs[i].n_nodes = jobs[i].n_candidates[0] = 1;
        jobs[i].candidates[0][0] = (so_ahead_candidate){5, 0.9f};
    }
    atomic_fetch_add(&f->n_begun, 1);
    return 0;
}

static int fake_rows(so_drafter *d, so_ahead_job *jobs, int n, int level, so_err *err) {
    (void)level;
    (void)err;
    check_jobs((fake *)d, jobs, n);
    return 1;
}

static void fake_draw(so_drafter *d, so_ahead_job *jobs, int n, int level, bool drawn) {
    (void)d;
    for (int i = 0; i < n && !drawn; i++)
        for (int k = 0; k < jobs[i].n_outcomes; k++)
            jobs[i].outcomes[k].token_at[level - 1] = 7;
}

static void fake_abort(so_drafter *d, so_ahead_job *jobs, int n) {
    (void)d;
    (void)jobs;
    (void)n;
}

static void fake_free(so_drafter *d) { (void)d; }

/* The state of position p is (p, p + 0.5). */
static void fake_add_hidden(so_drafter *d, void *state, int pos, const float *x) {
    (void)state;
    ((fake *)d)->n_hidden += x[0] == (float)pos && x[1] == (float)pos + 0.5f;
}

static const so_drafter_vt FAKE_VT = {
    .name = "fake",
    .free = fake_free,
    .open = fake_open,
    .close = fake_close,
    .propose = fake_propose,
    .preempt = fake_preempt,
    .add_hidden = fake_add_hidden,
    .ahead_begin = fake_begin,
    .ahead_rows = fake_rows,
    .ahead_draw = fake_draw,
    .ahead_abort = fake_abort,
};

static so_drafter *create(so_async_host *h, int i) {
    so_drafter *cached = NULL, *sync = NULL;
    memset(&fakes[i], 0, sizeof fakes[i]);
    fakes[i].base.vt = &FAKE_VT;
    so_async_create(
        h,
        &(so_async_opts){
            .inner = &fakes[i].base, .n_vocab = RIG_VOCAB, .n_parallel = STATES, .d_hidden = 2},
        &cached, &sync);
    so_async_set_index(cached, NULL, 0);
    return cached;
}

static const int32_t PROMPT[] = {1, 2, 3};

static void *open_request(so_drafter *d) {
    void *state = NULL;
    so_err err = {0};
    so_draft_text text = {.prompt = PROMPT, .n_prompt = 3, .max_tokens = 64};
    SO_OK_OR_FAIL(d->vt->open(d, &text, &state, &err), err);
    return state;
}

/* One round of n requests is verified. */
static void dispatch(so_drafter *d, void *const *requests, int n) {
    so_draft_job jobs[STATES];
    so_tree tree;
    so_sample_params greedy = {0};
    so_tree_init(&tree, RIG_VOCAB, 0);
    so_tree_reset(&tree, PROMPT[2], 2);
    for (int i = 0; i < n; i++)
        jobs[i] = (so_draft_job){.state = requests[i],
                                 .tokens = PROMPT,
                                 .n_tokens = 3,
                                 .n_prompt = 3,
                                 .tree = &tree,
                                 .max_nodes = 8,
                                 .max_depth = 8,
                                 .round = 1,
                                 .sample = &greedy};
    d->vt->dispatch(d, jobs, n);
    so_tree_deinit(&tree);
}

/* X has the target's states as of the dispatch before it begins, and none that came later. */
static void states_of_the_target_come_with_the_job(void **state) {
    so_async_faults slow = {.seed = 1, .delay_rate = 1, .delay_ms = 20};
    so_async_host *h = NULL;
    so_err err = {0};
    (void)state;
    SO_OK_OR_FAIL(so_async_host_create(&slow, &h, &err), err);
    so_drafter *d = create(h, 0);
    assert_true(d->wants_target_hidden);
    void *r[2] = {open_request(d), open_request(d)};
    for (int pos = 0; pos < 3; pos++)
        d->vt->add_hidden(d, r[1], pos, (float[]){(float)pos, (float)pos + 0.5f});
    dispatch(d, r, 2);
    d->vt->add_hidden(d, r[1], 3, (float[]){3, 3.5f});
    d->vt->add_hidden(d, r[1], 2, (float[]){-1, -1});
    wait_for(&fakes[0].n_begun, 1);
    so_async_lock(h);
    assert_int_equal(fakes[0].n_hidden, 3);
    so_async_unlock(h);
    for (int i = 0; i < 2; i++)
        d->vt->close(d, r[i]);
    so_drafter_free(d);
    so_async_host_free(h);
}

/* The worker is busy with the preemption of one request; meanwhile another, which waits for the same,
 * ends. Both are closed, once. */
static void a_preempted_request_may_end(void **state) {
    so_async_host *h = NULL;
    so_err err = {0};
    void *r[2];
    (void)state;
    SO_OK_OR_FAIL(so_async_host_create(NULL, &h, &err), err);
    so_drafter *d = create(h, 0);
    for (int i = 0; i < 2; i++)
        r[i] = open_request(d);
    dispatch(d, r, 2);
    wait_for(&fakes[0].n_begun, 1); /* X has opened both */
    so_async_lock(h);               /* holds the worker up until both wait */
    d->vt->preempt(d, r[0]);
    d->vt->preempt(d, r[1]);
    so_async_unlock(h);
    wait_for(&fakes[0].n_preempting, 1);
    d->vt->close(d, r[0]);
    d->vt->close(d, r[1]);
    atomic_store(&fakes[0].may_preempt, true);
    for (int i = 0; i < 2; i++)
        wait_for(&fakes[0].n_closed[i], 1);
    so_drafter_free(d);
    so_async_host_free(h);
    for (int i = 0; i < 2; i++)
        assert_int_equal(atomic_load(&fakes[0].n_closed[i]), 1);
}

/* A request ends while the worker drafts for it, and then another async drafter of the same worker is
 * freed: the request stays open until its batch is over. */
static void a_freed_drafter_leaves_others_alone(void **state) {
    so_async_faults slow = {.seed = 1, .delay_rate = 1, .delay_ms = 20};
    so_async_host *h = NULL;
    so_err err = {0};
    (void)state;
    SO_OK_OR_FAIL(so_async_host_create(&slow, &h, &err), err);
    so_drafter *other = create(h, 0), *d = create(h, 1);
    void *r = open_request(d);
    dispatch(d, &r, 1);
    wait_for(&fakes[1].n_begun, 1);
    d->vt->close(d, r);
    so_drafter_free(other);
    wait_for(&fakes[1].n_closed[0], 1);
    for (int i = 0; i < 200; i++)
        nap();
    so_drafter_free(d);
    so_async_host_free(h);
    assert_int_equal(atomic_load(&fakes[1].n_late), 0);
    assert_int_equal(atomic_load(&fakes[1].n_closed[0]), 1);
}

/* A draft model that is one too many. */
static int refuse(void *user, const so_spec *s, const so_spec_node *n, so_drafter *inner,
                  so_drafter **out, so_err *err) {
    (void)user;
    (void)s;
    (void)n;
    (void)inner;
    (void)out;
    return so_err_set(err, SO_ELIMIT, "too many files");
}

/* A fallback that cannot be made, by a limit too, is not freed, and the error is its own. */
static void a_fallback_that_fails_is_reported(void **state) {
    static const char *const TEXTS[] = {"async(ngram,fallback=model(x))",
                                        "async(ngram,fallback=lookup,model(x),sync)"};
    so_async_host *h = NULL;
    (void)state;
    for (size_t i = 0; i < SO_LEN(TEXTS); i++) {
        so_spec spec;
        so_err err = {0};
        so_draft_set set = {0};
        so_draft_config cfg = {.n_parallel = 1, .host = &h, .n_vocab = RIG_VOCAB, .make = refuse};
        SO_OK_OR_FAIL(so_spec_parse(so_str_c(TEXTS[i]), &spec, &err), err);
        assert_int_equal(so_spec_build(&spec, &cfg, &set, &err), SO_ELIMIT);
        assert_non_null(strstr(err.msg, "too many files"));
    }
    so_async_host_free(h);
}

/* The synchronous drafter beside it runs X, so the planner is told of it what it is told of X. */
static void the_synchronous_drafter_is_that_of_x(void **state) {
    (void)state;
    so_async_host *h = NULL;
    so_drafter *cached = NULL, *sync = NULL;
    so_err err = {0};
    SO_OK_OR_FAIL(so_async_host_create(NULL, &h, &err), err);
    memset(&fakes[0], 0, sizeof fakes[0]);
    so_drafter *inner = &fakes[0].base;
    *inner = (so_drafter){.vt = &FAKE_VT,
                          .has_cost = true,
                          .is_model = true,
                          .uses_terms = true,
                          .levels_per_pass = 8,
                          .tree_nodes = 3,
                          .size = 0.25,
                          .id = 5};
    so_async_opts o = {.inner = inner, .n_vocab = RIG_VOCAB, .n_parallel = STATES, .sync = true};
    so_async_create(h, &o, &cached, &sync);
    assert_true(sync->has_cost && sync->is_model && sync->uses_terms);
    assert_int_equal(sync->levels_per_pass, 8);
    assert_int_equal(sync->tree_nodes, 3);
    assert_true(sync->size == 0.25 && sync->id == 5);
    assert_int_equal(cached->levels_per_pass, 0); /* it looks up what is there */
    so_drafter_free(sync);
    so_drafter_free(cached);
    so_async_host_free(h);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(states_of_the_target_come_with_the_job),
        cmocka_unit_test(a_preempted_request_may_end),
        cmocka_unit_test(a_freed_drafter_leaves_others_alone),
        cmocka_unit_test(a_fallback_that_fails_is_reported),
        cmocka_unit_test(the_synchronous_drafter_is_that_of_x),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

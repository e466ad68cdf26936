/* A device that fails: the k-th sync returns an error, and what was queued since the sync before is
 * lost, as after a failed launch, lack of memory or a lost device. For every k: a request ends with
 * the tokens of plain decoding or with the error, never with other tokens; the engine goes on, and
 * its prefix cache holds nothing wrong. */
#include "so_test.h"

#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "engine/bundle.h"
#include "engine/engine.h"
#include "so_cases.h"
#include "so_tiny.h"

enum { MAX_STEPS = 2000, N_KINDS = 3 };

typedef struct fixture {
    so_rig target, draft;
    so_case cases[SO_CASES];
} fixture;

/* --- the failing device --- */

static const so_backend_vt *real_vt;
static so_backend_vt faulty_vt;
static int n_syncs, fail_from, fail_to; /* numbers of the syncs that fail, from 1 */

static bool fails(int sync) { return sync >= fail_from && sync < fail_to; }

static void faulty_submit(so_backend *b, const so_op *op) {
    if (!fails(n_syncs + 1))
        real_vt->submit(b, op);
}

static int faulty_sync(so_backend *b, so_err *err) {
    if (fails(++n_syncs))
        return so_err_set(err, SO_EIO, "the GPU failed: injected, sync %d", n_syncs);
    return real_vt->sync(b, err);
}

static void set_fault(int from, int to) {
    n_syncs = 0;
    fail_from = from;
    fail_to = to;
}

static void use_faults(so_backend *b) {
    faulty_vt = *real_vt;
    faulty_vt.submit = faulty_submit;
    faulty_vt.sync = faulty_sync;
    b->vt = &faulty_vt;
}

static int open_fixture(void **state) {
    fixture *f = SO_NEW(fixture);
    so_case_open(&f->target, "llama", &f->draft, "llama", f->cases);
    real_vt = f->target.b->vt;
    use_faults(f->target.b);
    *state = f;
    return 0;
}

static int close_fixture(void **state) {
    fixture *f = *state;
    f->target.b->vt = real_vt;
    so_rig_close(&f->target);
    so_rig_close(&f->draft);
    free(f);
    return 0;
}

/* --- requests --- */

static so_engine *open_engine(const fixture *f) {
    so_engine_opts o = {.n_ctx = SO_CASE_CTX,
                        .n_parallel = 3,
                        .n_batch = 16,
                        .kv_dtype = SO_DTYPE_F32,
                        .max_draft = 8,
                        .prefix_cache = true,
                        .draft = f->target.m, /* on the same device */
                        .draft_temp = -1};
    so_err err = {0};
    so_engine *e = NULL;
    SO_OK_OR_FAIL(so_engine_create(f->target.m, NULL, &o, &e, &err), err);
    return e;
}

/* Runs all cases together. Returns how many ended with the error; the others must be right. */
static int run_all(const fixture *f, so_engine *e, const char *drafter, int *n_failed_steps) {
    so_request *r[SO_CASES];
    int n_errors = 0, more = 1;
    *n_failed_steps = 0;
    for (int c = 0; c < SO_CASES; c++)
        r[c] = so_case_submit(e, &f->cases[c],
                              &(so_spec_opts){.drafter = drafter, .length = drafter ? 3 : 0});
    for (int step = 0; more != 0; step++) {
        so_err err = {0};
        if (step > MAX_STEPS)
            fail_msg("%s: no end after %d steps", drafter ? drafter : "plain", step);
        more = so_engine_step(e, &err);
        *n_failed_steps += more < 0;
        if (more < 0)
            assert_non_null(strstr(err.msg, "injected"));
    }
    for (int c = 0; c < SO_CASES; c++) {
        if (so_request_finish(r[c]) == SO_FINISH_ERROR) {
            assert_non_null(strstr(so_request_error(r[c])->msg, "the GPU failed: injected"));
            n_errors++;
        } else if (!so_case_same(r[c], &f->cases[c])) {
            fail_msg("%s, syncs %d to %d fail: case %d has other tokens",
                     drafter ? drafter : "plain", fail_from, fail_to - 1, c);
        }
        if (fail_from == 0) /* nothing is left of earlier failures */
            assert_int_equal(so_request_get_stats(r[c])->preempted_n, 0);
        so_request_free(r[c]);
    }
    return n_errors;
}

static const char *const DRAFTERS[N_KINDS] = {NULL, "model", "ngram+model+predict"};

/* One sync fails, at every place. */
static void one_failure(void **state) {
    const fixture *f = *state;
    for (int i = 0; i < N_KINDS; i++) {
        int n_steps, n_failed = 0, n_survived = 0;
        for (int k = 1;; k++) {
            so_engine *e = open_engine(f);
            so_err err = {0};
            set_fault(k, k + 1);
            int n_errors = run_all(f, e, DRAFTERS[i], &n_steps);
            bool reached = n_syncs >= k;
            set_fault(0, 0);
            /* a draft's failure ends no request, a failed pass all that are running */
            assert_true(n_errors <= 3 && (n_errors > 0) == (n_steps > 0) && n_steps <= 1);
            n_failed += n_errors > 0;
            n_survived += reached && n_errors == 0;
            SO_OK_OR_FAIL(so_engine_check_device(e, &err), err);
            assert_int_equal(run_all(f, e, DRAFTERS[i], &n_steps), 0);
            so_engine_free(e);
            if (!reached)
                break;
        }
        assert_true(n_failed > 5);
        assert_true((n_survived > 0) == (DRAFTERS[i] != NULL));
    }
}

/* The device is lost: every request ends with the error. */
static void lost_device(void **state) {
    const fixture *f = *state;
    for (int i = 0; i < N_KINDS; i++)
        for (int k = 1; k < 20; k += 6) {
            int n_steps;
            so_engine *e = open_engine(f);
            so_err err = {0};
            set_fault(k, INT32_MAX);
            assert_true(run_all(f, e, DRAFTERS[i], &n_steps) > 0);
            assert_int_equal(so_engine_check_device(e, &err), SO_EIO);
            assert_non_null(strstr(err.msg, "injected"));
            assert_int_equal(run_all(f, e, DRAFTERS[i], &n_steps), SO_CASES);
            set_fault(0, 0);
            so_engine_free(e);
        }
}

/* Failures before an engine was created do not concern it. */
static void earlier_failures(void **state) {
    const fixture *f = *state;
    so_err err = {0};
    f->target.b->n_failed += 3;
    so_engine *e = open_engine(f);
    so_request *r =
        so_case_submit(e, &f->cases[1], &(so_spec_opts){.drafter = "model", .length = 3});
    SO_OK_OR_FAIL(so_engine_run(e, r, &err), err);
    assert_true(so_case_same(r, &f->cases[1]));
    assert_int_equal(so_request_get_stats(r)->preempted_n, 0);
    so_request_free(r);
    so_engine_free(e);
}

/* Two draft models, one on the target's device, and both devices are lost: the failure of the
 * second does not make the first one be asked again, with a restart each time. */
static void two_lost_devices(void **state) {
    const so_backend_vt *vt_before = real_vt;
    char *dir = so_test_tmp(), *path = so_path_join(dir, "tiny.gguf");
    so_bundle target = {0}, other = {0};
    so_bundle_opts bo;
    so_engine_opts o;
    so_engine *e = NULL;
    so_err err = {0};
    so_buf spec = {0};
    (void)state;
    so_tiny_write(path, NULL);
    so_bundle_defaults(&bo);
    bo.n_threads = 1;
    SO_OK_OR_FAIL(so_bundle_open(path, &bo, &target, &err), err);
    SO_OK_OR_FAIL(so_bundle_open(path, &bo, &other, &err), err);
    so_backend *devices[] = {so_model_backend(target.model), so_model_backend(other.model)};
    so_engine_defaults(target.model, &o);
    o.max_draft = 4;
    o.draft = target.model;
    o.draft_tok = target.tok;
    o.draft_backend = devices[1];
    SO_OK_OR_FAIL(so_engine_create(target.model, target.tok, &o, &e, &err), err);
    so_buf_printf(&spec, "model+model(%s)", path);
    so_case c = {.prompt = {1, 5, 6, 5}, .n_prompt = 4, .sample = target.sample};
    so_request *r = so_case_submit(e, &c, &(so_spec_opts){.drafter = spec.data, .length = 2});
    real_vt = devices[0]->vt;
    use_faults(devices[0]);
    use_faults(devices[1]);
    set_fault(2, INT32_MAX); /* the first is the prompt's */
    for (int step = 0; so_request_finish(r) == SO_FINISH_NONE; step++) {
        assert_true(step < MAX_STEPS);
        so_engine_step(e, &err);
    }
    assert_int_equal(so_request_finish(r), SO_FINISH_ERROR);
    set_fault(0, 0);
    devices[0]->vt = devices[1]->vt = real_vt;
    real_vt = vt_before;
    so_request_free(r);
    so_engine_free(e);
    so_bundle_close(&target);
    so_bundle_close(&other);
    so_buf_free(&spec);
    free(path);
    so_test_tmp_free(dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(one_failure), cmocka_unit_test(lost_device),
                                       cmocka_unit_test(earlier_failures),
                                       cmocka_unit_test(two_lost_devices)};
    return cmocka_run_group_tests(tests, open_fixture, close_fixture);
}

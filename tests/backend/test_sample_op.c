/* SO_OP_SAMPLE: the token is the one that the host samples from the same row, for every sampler
 * setting and every kind of row; on the CPU backend, the deferred one and the one that SOOTH_DEVICE
 * names. Where the operation gives no token (SO_SAMPLE_UNKNOWN) the host decides; the tests bound how
 * often. */
#include "so_test.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "base/mem.h"
#include "sample/noise.h"
#include "sample/sample.h"
#include "so_rig.h"
#include "verify/sums.h"

static const float TEMPS[] = {1e-40f, 1e-6f, 0.1f, 0.7f, 1, 1.7f, 100};
static const float TOP_P[] = {1, 0, 1e-7f, 0.1f, 0.5f, 0.9f, 0.95f, 0.999999f, 0x1.fffffep-1f};
static const float MIN_P[] = {0, 1e-9f, 0.05f, 1};
enum { N_TOP_K = 7, N_SETTINGS = 7 * N_TOP_K * 9 * 4, MAX_ROWS = 256 };

typedef enum kind {
    NORMAL,
    PEAKED,
    FLAT,
    TIES,
    EQUAL,
    HUGE_RANGE,
    TINY,
    ZEROS,
    ONE_HOT, /* finite */
    WITH_NAN,
    WITH_INF,
    WITH_MINUS_INF,
    N_KINDS
} kind;

static uint32_t n_drawn;
static double uniform(void) {
    return so_rng_uniform(&(so_rng_key){.seed = 11, .purpose = SO_RNG_TEST}, n_drawn++);
}

static float normal(void) {
    return (float)(uniform() + uniform() + uniform() + uniform() - 2) * 1.7320508f;
}

static float logit_of(kind k, int i, int d) {
    switch (k) {
    case PEAKED:
        return i == d / 3 ? 30 : 3 * normal();
    case FLAT:
        return 1e-3f * normal();
    case TIES:
        return roundf(3 * normal()) / 2;
    case EQUAL:
        return -7.25f;
    case HUGE_RANGE:
        return normal() * 0.9e38f;
    case TINY:
        return normal() * 1e-40f;
    case ZEROS:
        return uniform() < 0.5 ? 0.0f : -0.0f;
    case ONE_HOT:
        return i == d - 1 ? FLT_MAX : -FLT_MAX;
    default:
        return 3 * normal();
    }
}

static void make_row(kind k, float *x, int d) {
    for (int i = 0; i < d; i++)
        x[i] = logit_of(k, i, d);
    float odd = k == WITH_NAN ? NAN : k == WITH_INF ? INFINITY : -INFINITY;
    if (k >= WITH_NAN)
        x[(int)(uniform() * d)] = odd;
}

static so_sample_params setting(int i, int d) {
    const int top_k[N_TOP_K] = {0, 1, 2, 40, d - 1, d, d + 1};
    so_sample_params p;
    so_sample_defaults(&p);
    p.temp = TEMPS[i % 7];
    p.top_k = SO_MAX(top_k[i / 7 % N_TOP_K], 0);
    p.top_p = TOP_P[i / 7 / N_TOP_K % 9];
    p.min_p = MIN_P[i / 7 / N_TOP_K / 9];
    p.seed = 1 + (uint64_t)i * 0x123456789u;
    p.choice = (uint32_t)i % 3;
    return p;
}

/* Rows of one operation. */
typedef struct batch {
    int n, d;
    float *x;
    kind kinds[MAX_ROWS];
    so_sample_params params[MAX_ROWS];
    int position[MAX_ROWS];
    so_sample_row rows[MAX_ROWS];
    so_sample_result out[MAX_ROWS];
} batch;

static void submit(so_backend *b, so_op op) { so_submit(b, &op); }

static so_view buffer(so_backend *b, const void *src, size_t n_bytes) {
    so_err err = {0};
    so_view v = {0};
    SO_OK_OR_FAIL(b->vt->buffer_create(b, n_bytes, &v.buf, &err), err);
    if (src)
        submit(b, (so_op){.kind = SO_OP_UPLOAD, .n = 1, .upload = {v, src, n_bytes}});
    return v;
}

static void run(so_backend *b, batch *t, int first, int n) {
    so_err err = {0};
    size_t d = (size_t)t->d, m = (size_t)n;
    so_view x = buffer(b, t->x + (size_t)first * d, m * d * 4);
    so_view rows = buffer(b, t->rows + first, m * sizeof *t->rows), best = buffer(b, NULL, m * 4);
    so_view out = buffer(b, NULL, m * sizeof *t->out);
    submit(b, (so_op){.kind = SO_OP_ARGMAX, .n = n, .argmax = {best, x, t->d}});
    submit(b, (so_op){.kind = SO_OP_SAMPLE, .n = n, .sample = {out, x, best, rows, t->d}});
    submit(b, (so_op){.kind = SO_OP_DOWNLOAD,
                      .n = n,
                      .download = {out, t->out + first, m * sizeof *t->out}});
    SO_OK_OR_FAIL(b->vt->sync(b, &err), err);
    so_buffer *all[] = {x.buf, rows.buf, best.buf, out.buf};
    for (size_t i = 0; i < SO_LEN(all); i++)
        b->vt->buffer_free(b, all[i]);
}

static batch *batch_create(int d, int n) {
    batch *t = SO_NEW(batch);
    SO_ASSERT_OP(n, <=, MAX_ROWS);
    t->n = n;
    t->d = d;
    t->x = SO_NEW_N(float, (size_t)n *(size_t)d);
    return t;
}

static void batch_free(batch *t) {
    free(t->x);
    free(t);
}

/* Row i: a kind, and setting number `at`. */
static void set_row(batch *t, int i, kind k, int at) {
    t->kinds[i] = k;
    t->params[i] = setting(at, t->d);
    t->position[i] = 5 + at;
    make_row(k, t->x + (size_t)i * (size_t)t->d, t->d);
    assert_true(so_sample_on_device(&t->params[i], t->position[i], &t->rows[i]));
}

static int32_t host_token(so_sampler *s, const batch *t, int i) {
    so_err err = {0};
    int32_t token = -1;
    so_sample_context ctx = {.n_tokens = t->position[i]};
    if (t->kinds[i] >= WITH_NAN)
        return -1;
    SO_OK_OR_FAIL(
        so_sample_token(s, &t->params[i], t->x + (size_t)i * (size_t)t->d, &ctx, &token, &err),
        err);
    return token;
}

/* Compares all rows with the host. Returns how many are unknown. */
static int check(so_backend *b, so_sampler *s, const batch *t) {
    int unknown = 0;
    for (int i = 0; i < t->n; i++) {
        const so_sample_params *p = &t->params[i];
        int32_t want = host_token(s, t, i), got = t->out[i].token;
        bool may_be_unknown = want >= 0 && (p->top_p < 1 || (p->top_k > 0 && p->top_k < t->d));
        if (got == SO_SAMPLE_UNKNOWN && may_be_unknown)
            unknown++;
        else if (got != want)
            fail_msg("%s: %d tokens, kind %d, temp %g, top-k %d, top-p %.9g, min-p %g: token %d, "
                     "the host samples %d",
                     b->vt->name, t->d, t->kinds[i], (double)p->temp, p->top_k, (double)p->top_p,
                     (double)p->min_p, got, want);
    }
    return unknown;
}

typedef void per_backend(so_backend *b);

static void on_every_backend(per_backend *fn) {
    const char *names[] = {"cpu", "deferred", so_test_device()};
    for (size_t i = 0; i < SO_LEN(names); i++) {
        so_backend *b = NULL;
        so_err err = {0};
        if (i == 2 && (strcmp(names[2], "cpu") == 0 || strcmp(names[2], "deferred") == 0))
            continue;
        SO_OK_OR_FAIL(so_backend_open(names[i], &(so_backend_opts){.n_threads = 2}, &b, &err), err);
        n_drawn = 0;
        fn(b);
        so_backend_free(b);
    }
}

/* Every setting with every kind of row, over short rows of awkward lengths. */
static void every_setting(so_backend *b) {
    static const int LENGTHS[] = {1, 2, 3, 5, 31, 32, 33, 100, 257};
    for (size_t l = 0; l < SO_LEN(LENGTHS); l++) {
        int d = LENGTHS[l];
        batch *t = batch_create(d, MAX_ROWS);
        so_sampler *s = so_sampler_create(d);
        for (int k = 0; k < N_KINDS; k++)
            for (int at = 0; at < N_SETTINGS; at += MAX_ROWS) {
                t->n = SO_MIN(MAX_ROWS, N_SETTINGS - at);
                for (int i = 0; i < t->n; i++)
                    set_row(t, i, (kind)k, at + i);
                run(b, t, 0, t->n);
                check(b, s, t);
            }
        so_sampler_free(s);
        batch_free(t);
    }
}

static void test_every_setting(void **state) {
    (void)state;
    on_every_backend(every_setting);
}

/* Long rows, random settings. Rows that a model could give are almost never unknown. */
static void long_rows(so_backend *b) {
    static const int LENGTHS[] = {1000, 4097, 32003, 50257, 128256};
    int n_usual = 0, n_unknown = 0;
    for (size_t l = 0; l < SO_LEN(LENGTHS); l++) {
        int d = LENGTHS[l], n = so_test_full() ? MAX_ROWS : 48;
        batch *t = batch_create(d, n);
        so_sampler *s = so_sampler_create(d);
        for (int i = 0; i < n; i++)
            set_row(t, i, (kind)(i % N_KINDS), (int)(uniform() * N_SETTINGS));
        run(b, t, 0, n);
        check(b, s, t);
        for (int i = 0; i < n; i++) { /* usual ones */
            set_row(t, i, i % 2 ? PEAKED : NORMAL, 0);
            t->params[i].temp = 0.5f + (float)uniform();
            t->params[i].top_k = i % 3 ? 0 : 40;
            t->params[i].top_p = i % 4 ? 0.9f + 0.09f * (float)uniform() : 1;
            so_sample_on_device(&t->params[i], t->position[i], &t->rows[i]);
        }
        run(b, t, 0, n);
        n_unknown += check(b, s, t);
        n_usual += n;
        so_sampler_free(s);
        batch_free(t);
    }
    if (n_unknown * 50 > n_usual)
        fail_msg("%s: %d of %d usual rows are unknown", b->vt->name, n_unknown, n_usual);
}

static void test_long_rows(void **state) {
    (void)state;
    on_every_backend(long_rows);
}

/* A row gives the same result alone, in any batch, and when repeated. */
static void rows_alone(so_backend *b) {
    int d = 3001, n = 60;
    batch *t = batch_create(d, n);
    for (int i = 0; i < n; i++) {
        set_row(t, i, (kind)(i % N_KINDS), (int)(uniform() * N_SETTINGS));
        t->rows[i].guess = i % 5 == 0 && t->kinds[i] < WITH_NAN ? i
                           : i % 5 == 1                         ? SO_SAMPLE_BEST
                                                                : -1;
    }
    run(b, t, 0, n);
    so_sample_result all[60];
    memcpy(all, t->out, sizeof all);
    for (int turn = 0; turn < 8; turn++)
        for (int first = 0, m = 1 + turn * 3; first + m <= n; first += m) {
            run(b, t, first, m);
            for (int i = first; i < first + m; i++) {
                assert_int_equal(t->out[i].token, all[i].token);
                assert_true(t->out[i].mass == all[i].mass);
            }
        }
    batch_free(t);
}

static void test_rows_alone(void **state) {
    (void)state;
    on_every_backend(rows_alone);
}

static int32_t argmax(const float *x, int d) {
    int32_t best = 0;
    for (int32_t i = 1; i < d; i++)
        best = x[i] > x[best] ? i : best;
    return best;
}

/* Weights of a guess, or of the argmax: the logits exactly, and a mass that is never below the
 * verifier's. */
static void guesses(so_backend *b) {
    static const int LENGTHS[] = {1, 7, 64, 1000, 128256};
    for (size_t l = 0; l < SO_LEN(LENGTHS); l++) {
        int d = LENGTHS[l], n = d > 10000 ? 12 : 84;
        batch *t = batch_create(d, n);
        so_sampler *s = so_sampler_create(d);
        float *weights = SO_NEW_N(float, d);
        for (int i = 0; i < n; i++) {
            set_row(t, i, (kind)(i % WITH_NAN), i % 7);
            t->rows[i].guess = i % 3 == 2 ? SO_SAMPLE_BEST : (int32_t)(uniform() * d);
        }
        run(b, t, 0, n);
        for (int i = 0; i < n; i++) {
            const float *x = t->x + (size_t)i * (size_t)d;
            so_err err = {0};
            so_sample_context ctx = {.n_tokens = t->position[i]};
            SO_OK_OR_FAIL(so_sample_weights(s, &t->params[i], x, &ctx, weights, &err), err);
            double mass = so_sums()->mass(weights, d, 0);
            const so_sample_result *r = &t->out[i];
            int32_t guess = t->rows[i].guess;
            assert_int_equal(r->token, guess >= 0 ? SO_SAMPLE_UNKNOWN : argmax(x, d));
            guess = guess >= 0 ? guess : r->token;
            assert_true(r->logit == x[guess]);
            assert_true(r->mass >= mass && r->mass <= mass * (1 + 1e-6));
            double p = (double)weights[guess] / mass;
            double least = so_sample_prob_at_least(&t->params[i], r);
            assert_true(least <= p && least >= p * (1 - 1e-6));
        }
        free(weights);
        so_sampler_free(s);
        batch_free(t);
    }
}

static void test_guesses(void **state) {
    (void)state;
    on_every_backend(guesses);
}

/* Temperature 0 in a batch with others: the argmax. */
static void test_greedy_rows(void **state) {
    (void)state;
    so_backend *b = NULL;
    so_err err = {0};
    SO_OK_OR_FAIL(so_backend_open(so_test_device(), &(so_backend_opts){0}, &b, &err), err);
    batch *t = batch_create(777, 3);
    so_sampler *s = so_sampler_create(777);
    for (int i = 0; i < 3; i++) {
        set_row(t, i, TIES, 4);
        t->params[i].temp = i == 1 ? 0 : 1;
        so_sample_on_device(&t->params[i], t->position[i], &t->rows[i]);
    }
    run(b, t, 0, 3);
    assert_int_equal(check(b, s, t), 0);
    so_sampler_free(s);
    batch_free(t);
    so_backend_free(b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_setting), cmocka_unit_test(test_long_rows),
        cmocka_unit_test(test_rows_alone),    cmocka_unit_test(test_guesses),
        cmocka_unit_test(test_greedy_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Sampling against a simple reference: every step with sorts and full sums, no bins, no bounds.
 * Statistical tests have fixed seeds; their thresholds are the chi-square values with a false-alarm
 * rate of 1e-6. */
#include "so_test.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/cpu.h"
#include "base/mem.h"
#include "sample/noise.h"
#include "sample/sample.h"

enum { MAX_N = 3000 };

static float noise_f(uint64_t seed, uint32_t i) {
    so_rng_key key = {.seed = seed, .purpose = SO_RNG_TEST};
    return (float)so_rng_uniform(&key, i);
}

/* A row shaped like a model's: most tokens well below a few good ones. */
static void make_row(uint64_t seed, int n, float *out) {
    for (int i = 0; i < n; i++)
        out[i] = -8 * logf(noise_f(seed, (uint32_t)i)) * (i % 3 ? -0.3f : 0.4f);
}

/* --- the reference --- */

typedef struct ref {
    int id;
    double y;
} ref;

static int by_y_then_id(const void *a, const void *b) {
    const ref *x = a, *y = b;
    if (x->y != y->y)
        return x->y > y->y ? -1 : 1;
    return x->id - y->id;
}

/* The support of the row, best first; returns its size. */
static int ref_support(const so_sample_params *p, const float *logits, int n, ref *out) {
    int m = 0;
    float top = -INFINITY;
    for (int i = 0; i < n; i++)
        if (logits[i] > top)
            top = logits[i];
    for (int i = 0; i < n; i++)
        if (isfinite(logits[i]))
            out[m++] = (ref){i, (float)(((double)logits[i] - (double)top) * (1 / (double)p->temp))};
    qsort(out, (size_t)m, sizeof *out, by_y_then_id);
    if (p->top_k > 0 && p->top_k < m)
        m = p->top_k;
    if (p->top_p < 1) {
        double total = 0, sum = 0;
        int kept = 0;
        for (int i = 0; i < m; i++)
            total += exp(out[i].y);
        while (kept < m && (kept == 0 || sum < (double)p->top_p * total))
            sum += exp(out[kept++].y);
        m = kept;
    }
    if (p->min_p > 0) {
        int kept = 0;
        while (kept < m && exp(out[kept].y) >= (double)p->min_p * (1 - 1e-12))
            kept++;
        m = kept;
    }
    return m;
}

static int ref_draw(const so_sample_params *p, const ref *sup, int m, int position) {
    int best = -1;
    double top = 0;
    for (int i = 0; i < m; i++) {
        double score = sup[i].y + so_sample_noise(p, position, sup[i].id);
        if (best < 0 || score > top || (score == top && sup[i].id < best)) {
            best = sup[i].id;
            top = score;
        }
    }
    return best;
}

static const so_sample_context EMPTY = {0};

static so_sample_params plain(float temp) {
    so_sample_params p;
    so_sample_defaults(&p);
    p.temp = temp;
    return p;
}

static int32_t sample(so_sampler *s, const so_sample_params *p, const float *row,
                      const so_sample_context *ctx) {
    so_err err = {0};
    int32_t id = -1;
    SO_OK_OR_FAIL(so_sample_token(s, p, row, ctx, &id, &err), err);
    return id;
}

/* --- tests --- */

static void test_draw_equals_reference(void **state) {
    (void)state;
    static const float temps[] = {0.05f, 0.7f, 1, 3, 50};
    static const int ks[] = {0, 1, 2, 40, 999, MAX_N};
    static const float ps[] = {1, 0.95f, 0.3f, 0}, mins[] = {0, 0.05f, 1};
    float row[MAX_N];
    static ref sup[MAX_N];
    so_sampler *s = so_sampler_create(MAX_N);
    int position = 0;
    for (size_t t = 0; t < SO_LEN(temps); t++)
        for (size_t k = 0; k < SO_LEN(ks); k++)
            for (size_t a = 0; a < SO_LEN(ps) * SO_LEN(mins); a++) {
                so_sample_params p = plain(temps[t]);
                p.top_k = ks[k];
                p.top_p = ps[a / SO_LEN(mins)];
                p.min_p = mins[a % SO_LEN(mins)];
                p.seed = 7 + (uint64_t)a;
                make_row(t * 100 + k, MAX_N, row);
                int m = ref_support(&p, row, MAX_N, sup);
                for (int rep = 0; rep < 3; rep++, position++) {
                    so_sample_context ctx = {NULL, position, 0};
                    p.repeat_last_n = 0;
                    assert_int_equal(sample(s, &p, row, &ctx), ref_draw(&p, sup, m, position));
                }
            }
    so_sampler_free(s);
}

enum { N_LEVELS = 3, N_KINDS = 9 };

/* The CPU levels of this machine, scalar first. */
static int list_levels(const so_noise_fns *out[N_LEVELS]) {
    int n = 0;
    out[n++] = &so_noise_scalar;
#if defined(__x86_64__)
    if (so_cpu_level_usable(SO_CPU_AVX2))
        out[n++] = &so_noise_avx2;
    if (so_cpu_level_usable(SO_CPU_AVX512))
        out[n++] = &so_noise_avx512;
#endif
    return n;
}

static void test_a_forced_level_is_used(void **state) {
    (void)state;
    const so_noise_fns *levels[N_LEVELS];
    int n_levels = list_levels(levels);
    assert_ptr_equal(so_noise(), levels[n_levels - 1]); /* the best */
    so_cpu_level_set(SO_CPU_SCALAR);
    assert_ptr_equal(so_noise(), &so_noise_scalar);
#if defined(__x86_64__)
    if (so_cpu_level_usable(SO_CPU_AVX2)) {
        so_cpu_level_set(SO_CPU_AVX2);
        assert_ptr_equal(so_noise(), &so_noise_avx2);
    }
#endif
    so_cpu_level_set(SO_CPU_AUTO);
    assert_ptr_equal(so_noise(), levels[n_levels - 1]);
}

/* Rows with many ties, with −∞ entries, flat ones; sizes that end in the middle of every vector
 * loop. */
static void odd_row(int kind, int n, float *out) {
    make_row(1000 + (uint64_t)kind, n, out);
    for (int i = 0; i < n; i++)
        switch (kind) {
        case 0:
            break;
        case 1:
            out[i] = roundf(out[i]); /* ties, also at the borders of cuts */
            break;
        case 2:
            out[i] = 3;
            break;
        case 3: /* mass near the border of top-p, and mass below its floor */
            out[i] = i == 0        ? 4
                     : i % 97 == 1 ? -(float)(i % 13) * 0.1f
                                   : -7.5f - noise_f(5, (uint32_t)i);
            break;
        case 4:
            out[i] = i % 7 == 3 ? -INFINITY : i % 11 == 5 ? NAN : out[i];
            break;
        case 5:
            out[i] *= 1e36f;
            break;
        case 6: /* one logit very high, one very low */
            out[i] = i == n / 2 ? 1e30f : i == n / 3 ? -1e30f : out[i];
            break;
        case 7: /* numbers of all magnitudes, whose differences are rounded */
            out[i] = ldexpf(out[i], i % 71 - 66);
            break;
        default: /* all −∞ except a few */
            out[i] = i % 1009 == n / 2 % 1009 ? out[i] : -INFINITY;
        }
}

static void test_levels_sample_the_same(void **state) {
    (void)state;
    enum { N = 20011 };
    static const int sizes[] = {1, 5, 31, 257, 1031, N};
    static const struct {
        float temp, top_p, min_p;
        int top_k;
    } cases[] = {{0.8f, 1, 0, 0},      {0.8f, 0.95f, 0, 0}, {1, 0.5f, 0, 0},      {1, 0, 0, 0},
                 {1, 1, 0.02f, 0},     {1, 1, 0, 40},       {1, 0.9f, 0.1f, 7},   {100, 1, 0, 0},
                 {1e-40f, 1, 0, 0},    {0.01f, 1, 0, 0},    {1, 1, 0, 0},         {7, 1, 0, 0},
                 {1e-40f, 0.9f, 0, 3}, {100, 0.999f, 0, 0}, {2, 0.9999999f, 0, 0}};
    float *row = SO_NEW_N(float, N);
    ref *sup = SO_NEW_N(ref, N);
    const so_noise_fns *levels[N_LEVELS];
    int n_levels = list_levels(levels);
    for (size_t z = 0; z < SO_LEN(sizes); z++)
        for (int kind = 0; kind < N_KINDS; kind++) {
            so_sampler *s[N_LEVELS];
            for (int l = 0; l < n_levels; l++)
                s[l] = so_sampler_create_at_level(sizes[z], levels[l]);
            odd_row(kind, sizes[z], row);
            for (size_t c = 0; c < SO_LEN(cases); c++) {
                so_sample_params p = plain(cases[c].temp);
                p.top_p = cases[c].top_p;
                p.min_p = cases[c].min_p;
                p.top_k = cases[c].top_k;
                p.repeat_last_n = 0;
                int m = ref_support(&p, row, sizes[z], sup);
                for (int position = 0; position < 12; position++) {
                    so_sample_context ctx = {NULL, position, 0};
                    int32_t want = ref_draw(&p, sup, m, position);
                    for (int l = 0; l < n_levels; l++)
                        assert_int_equal(sample(s[l], &p, row, &ctx), want);
                }
            }
            for (int l = 0; l < n_levels; l++)
                so_sampler_free(s[l]);
        }
    free(row);
    free(sup);
}

/* Constructed scores: the token with the largest noise of a position against the most likely token,
 * slightly above or below it, all others without a chance. A bound that is slightly too low loses
 * the former. */
static void test_close_scores(void **state) {
    (void)state;
    enum { N = 3001 };
    static const float temps[] = {0.01f, 0.5f, 1, 30, 100};
    static const double hairs[] = {-1e-4, 1e-4};
    const so_noise_fns *levels[N_LEVELS];
    int n_levels = list_levels(levels);
    float row[N];
    static ref sup[N];
    for (int position = 0; position < 300; position++) {
        so_sample_params p = plain(temps[position % (int)SO_LEN(temps)]);
        double loudest = -1e9, hair = hairs[position / 5 % 2];
        int32_t loud = 0, best = (position * 37) % N;
        p.repeat_last_n = 0;
        for (int32_t i = 0; i < N; i++) {
            double noise = i == best ? -1e9 : so_sample_noise(&p, position, i);
            loud = noise > loudest ? i : loud;
            loudest = SO_MAX(loudest, noise);
            row[i] = -40 * p.temp;
        }
        row[best] = 0;
        row[loud] = (float)((so_sample_noise(&p, position, best) - loudest + hair) * p.temp);
        if (row[loud] > 0)
            continue; /* it is also the most likely token */
        int want = ref_draw(&p, sup, ref_support(&p, row, N, sup), position);
        assert_int_equal(want, hair > 0 ? loud : best);
        for (int l = 0; l < n_levels; l++) {
            so_sampler *s = so_sampler_create_at_level(N, levels[l]);
            so_sample_context ctx = {NULL, position, 0};
            assert_int_equal(sample(s, &p, row, &ctx), want);
            so_sampler_free(s);
        }
    }
}

/* A row of a vocabulary subset gives the token and the lead of the whole row in which the other
 * tokens are −∞, with and without cuts. */
static void test_subset_rows(void **state) {
    (void)state;
    enum { N = 9001 };
    static const float temps[] = {0.01f, 0.8f, 1, 5, 100};
    static const int steps[] = {1, 2, 3, 7, 1500, 8000};
    const so_noise_fns *levels[N_LEVELS];
    int n_levels = list_levels(levels);
    float *wide = SO_NEW_N(float, N), *narrow = SO_NEW_N(float, N), *row = SO_NEW_N(float, N);
    int32_t *subset = SO_NEW_N(int32_t, N);
    for (int i = 0; i < (int)SO_LEN(steps) * N_KINDS * n_levels; i++) {
        int kind = i % N_KINDS, step = steps[i / N_KINDS % (int)SO_LEN(steps)], n = 0;
        const so_noise_fns *level = levels[i / N_KINDS / (int)SO_LEN(steps)];
        odd_row(kind, N, row);
        for (int32_t id = 0; id < N; id++) {
            bool in_subset = id >= 5 && (id * 7919) % (2 * step) < SO_MIN(step, 50);
            wide[id] = in_subset ? row[id] : -INFINITY;
            if (in_subset) {
                subset[n] = id;
                narrow[n++] = row[id];
            }
        }
        narrow[n - 1] = wide[subset[n - 1]] = 1;
        so_sampler *a = so_sampler_create_at_level(N, level),
                   *b = so_sampler_create_at_level(n, level);
        so_sampler_set_subset(b, subset);
        for (int k = 0; k < 20; k++) {
            so_sample_params p = plain(temps[k % (int)SO_LEN(temps)]);
            so_sample_context ctx = {NULL, k, 0};
            int32_t id, index;
            double lead[2];
            p.repeat_last_n = 0;
            p.top_p = k < 12 ? 1 : 0.9f;
            p.min_p = k < 16 ? 0 : 0.01f;
            assert_int_equal(so_sample_token_lead(a, &p, wide, &ctx, &id, lead, NULL), SO_OK);
            assert_int_equal(so_sample_token_lead(b, &p, narrow, &ctx, &index, lead + 1, NULL),
                             SO_OK);
            assert_in_range(index, 0, n - 1);
            assert_int_equal(subset[index], id);
            assert_true(lead[0] == lead[1]);
        }
        so_sampler_free(a);
        so_sampler_free(b);
    }
    free(wide);
    free(narrow);
    free(row);
    free(subset);
}

static int by_score(const void *a, const void *b) {
    const so_scored *x = a, *y = b;
    return x->score != y->score ? (x->score > y->score ? -1 : 1) : x->id - y->id;
}

/* The best k against a full sort of the reference's scores, with and without noise and cuts; the
 * first is the sampled token. A subset gives the same tokens. */
static void test_top(void **state) {
    (void)state;
    enum { N = 2500 };
    static const float temps[] = {0, 0.01f, 0.8f, 1, 5, 100};
    static const int sizes[] = {1, 2, 5, SO_SAMPLE_TOP_MAX};
    static float row[N], narrow[N];
    static ref sup[N];
    static so_scored all[N];
    static int32_t subset[N];
    so_sampler *s = so_sampler_create(N), *sub = so_sampler_create(N / 2);
    for (int i = 0; i < N / 2; i++)
        subset[i] = 2 * i + 1;
    so_sampler_set_subset(sub, subset);
    for (int i = 0; i < 300; i++) {
        so_sample_params p = plain(temps[i % 6]), q;
        so_sample_context ctx = {NULL, i, 0};
        so_scored got[SO_SAMPLE_TOP_MAX];
        int k = sizes[i / 6 % 4], n = 0;
        make_row((uint64_t)i, N, row);
        for (int id = 0; id < N; id++)
            row[id] = i % 2 && id % 2 == 0 ? -INFINITY : roundf(row[id] * 4) / 4; /* ties */
        p.repeat_last_n = 0;
        p.top_k = i / 24 % 3 == 1 ? 20 : 0;
        p.top_p = i / 24 % 3 == 2 ? 0.9f : 1;
        q = p;
        q.temp = p.temp > 0 ? p.temp : 1;
        q.top_k = p.temp > 0 ? p.top_k : 0;
        q.top_p = p.temp > 0 ? p.top_p : 1;
        int m = ref_support(&q, row, N, sup);
        for (int j = 0; j < m; j++)
            all[j] =
                (so_scored){p.temp > 0 ? (double)(float)sup[j].y + so_sample_noise(&p, i, sup[j].id)
                                       : (double)row[sup[j].id],
                            sup[j].id};
        qsort(all, (size_t)m, sizeof *all, by_score);
        assert_int_equal(so_sample_top(s, &p, row, &ctx, k, got, &n, NULL), SO_OK);
        assert_int_equal(n, SO_MIN(k, m));
        for (int j = 0; j < n; j++) {
            assert_int_equal(got[j].id, all[j].id);
            assert_true(got[j].score == all[j].score);
        }
        assert_int_equal(got[0].id, sample(s, &p, row, &ctx));
        for (int j = 0; j < N / 2 && i % 2; j++)
            narrow[j] = row[subset[j]];
        if (i % 2 == 0)
            continue;
        assert_int_equal(so_sample_top(sub, &p, narrow, &ctx, k, got, &n, NULL), SO_OK);
        assert_int_equal(n, SO_MIN(k, m));
        for (int j = 0; j < n; j++)
            assert_int_equal(subset[got[j].id], all[j].id);
    }
    so_sampler_free(s);
    so_sampler_free(sub);
}

/* The bound holds: every token whose score reaches the bar is a candidate, on every CPU level. */
static void test_candidates_include_every_winner(void **state) {
    (void)state;
    enum { N = 4099 };
    const so_noise_fns *levels[N_LEVELS];
    int n_levels = list_levels(levels);
    float *row = SO_NEW_N(float, N);
    int32_t *ids = SO_NEW_N(int32_t, N);
    so_sample_params p = plain(20);
    make_row(77, N, row);
    float top = so_noise_scalar.largest(row, N);
    for (int position = 0; position < 40; position++)
        for (int l = 0; l < n_levels; l++) {
            so_noise_row r = {.x = row,
                              .top = top,
                              .inverse = 1 / p.temp,
                              .key = {.position = (uint32_t)position, .purpose = SO_RNG_TOKEN}};
            float bar = (float)(position % 10) - 4;
            int at = 0, n = levels[l]->candidates(&r, 0, N, bar, ids), n_true = 0;
            for (int32_t id = 0; id < N; id++) {
                if ((double)((row[id] - top) * r.inverse) + so_sample_noise(&p, position, id) <
                    (double)bar)
                    continue;
                while (at < n && ids[at] < id)
                    at++;
                assert_true(at < n && ids[at] == id);
                n_true++;
            }
            assert_true(n <= 2 * n_true + 10); /* and few other tokens */
        }
    free(row);
    free(ids);
}

static void test_distribution_equals_reference(void **state) {
    (void)state;
    enum { N = 500 };
    float row[N], probs[N];
    ref sup[N];
    so_sampler *s = so_sampler_create(N);
    for (int c = 0; c < 60; c++) {
        so_sample_params p = plain(0.3f + 0.1f * (float)(c % 10));
        so_err err = {0};
        p.top_k = c % 4 ? c * 5 : 0;
        p.top_p = c % 3 ? 0.8f : 1;
        p.min_p = c % 5 ? 0 : 0.02f;
        make_row((uint64_t)c, N, row);
        int m = ref_support(&p, row, N, sup);
        double total = 0, sum = 0;
        for (int i = 0; i < m; i++)
            total += exp(sup[i].y);
        SO_OK_OR_FAIL(so_sample_distribution(s, &p, row, &EMPTY, probs, &err), err);
        for (int i = 0; i < N; i++)
            sum += (double)probs[i];
        assert_true(fabs(sum - 1) < 1e-5);
        int n_positive = 0;
        for (int i = 0; i < N; i++)
            n_positive += probs[i] > 0;
        assert_int_equal(n_positive, m);
        for (int i = 0; i < m; i++)
            assert_true(fabs((double)probs[sup[i].id] - exp(sup[i].y) / total) < 1e-6);
    }
    so_sampler_free(s);
}

static double weight_of(float x, double top, float temp) {
    return isnan(x) ? 0 : exp((double)(float)(((double)x - top) * (1 / (double)temp)));
}

/* All CPU levels agree bit for bit, and with the exp of libm within the rounding of a float. */
static void test_levels_weigh_the_same(void **state) {
    (void)state;
    enum { N = 20011 };
    static const int sizes[] = {1, 3, 8, 13, 64, 1031, N};
    static const float temps[] = {1, 0.7f, 100, 1e-3f, 1e-40f};
    float *row = SO_NEW_N(float, N), *a = SO_NEW_N(float, N), *b = SO_NEW_N(float, N);
    const so_noise_fns *levels[N_LEVELS];
    int n_levels = list_levels(levels);
    for (size_t z = 0; z < SO_LEN(sizes); z++)
        for (int kind = 0; kind < N_KINDS; kind++)
            for (size_t t = 0; t < SO_LEN(temps); t++) {
                int n = sizes[z];
                so_sample_params p = plain(temps[t]);
                double top = -INFINITY, total = 0;
                so_err err = {0};
                odd_row(kind, n, row);
                for (int l = 0; l < n_levels; l++) {
                    so_sampler *s = so_sampler_create_at_level(n, levels[l]);
                    float *out = l ? b : a;
                    SO_OK_OR_FAIL(so_sample_distribution(s, &p, row, &EMPTY, out, &err), err);
                    assert_memory_equal(a, out, (size_t)n * sizeof *a);
                    so_sampler_free(s);
                }
                for (int i = 0; i < n; i++)
                    top = fmax(top, (double)row[i]); /* fmax ignores NaN */
                for (int i = 0; i < n; i++)
                    total += weight_of(row[i], top, temps[t]);
                for (int i = 0; i < n; i++) {
                    double want = weight_of(row[i], top, temps[t]) / total;
                    assert_true(fabs((double)a[i] - want) <= 3e-7 * want + 1e-37);
                }
            }
    free(row);
    free(a);
    free(b);
}

/* 16 tokens, 400,000 draws at consecutive positions. */
static void chi_square(const so_sample_params *p, const float *row, double threshold) {
    enum { N = 16, DRAWS = 400000 };
    so_sampler *s = so_sampler_create(N);
    float probs[N];
    int counts[N] = {0};
    so_err err = {0};
    SO_OK_OR_FAIL(so_sample_distribution(s, p, row, &EMPTY, probs, &err), err);
    for (int i = 0; i < DRAWS; i++) {
        so_sample_context ctx = {NULL, i, i};
        counts[sample(s, p, row, &ctx)]++;
    }
    double chi2 = 0;
    for (int i = 0; i < N; i++) {
        double want = (double)probs[i] * DRAWS;
        if (want == 0)
            assert_int_equal(counts[i], 0);
        else
            chi2 += (counts[i] - want) * (counts[i] - want) / want;
    }
    if (chi2 > threshold)
        fail_msg("chi-square %g above %g", chi2, threshold);
    so_sampler_free(s);
}

static void test_chi_square_against_softmax(void **state) {
    (void)state;
    float row[16];
    for (int i = 0; i < 16; i++)
        row[i] = 0.35f * (float)((i * 7) % 16);
    so_sample_params p = plain(1);
    p.seed = 12345;
    p.repeat_last_n = 0;
    chi_square(&p, row, 56.5); /* 15 degrees of freedom */
    p.temp = 0.6f;
    p.choice = 3;
    chi_square(&p, row, 56.5);
    p.top_k = 6;
    chi_square(&p, row, 36.0); /* at most 5 */
    p.top_k = 0;
    p.top_p = 0.7f;
    chi_square(&p, row, 56.5);
}

static void test_keys_are_independent(void **state) {
    (void)state;
    enum { N = 64, DRAWS = 20000 };
    float row[N] = {0};
    so_sampler *s = so_sampler_create(N);
    so_sample_params a = plain(1), b = plain(1), c = plain(1);
    a.repeat_last_n = b.repeat_last_n = c.repeat_last_n = 0;
    b.choice = 1;
    c.seed = 1;
    int same_b = 0, same_c = 0;
    for (int i = 0; i < DRAWS; i++) {
        so_sample_context ctx = {NULL, i, 0};
        int32_t t = sample(s, &a, row, &ctx);
        assert_int_equal(t, sample(s, &a, row, &ctx));
        same_b += t == sample(s, &b, row, &ctx);
        same_c += t == sample(s, &c, row, &ctx);
    }
    double want = (double)DRAWS / N, sigma = sqrt(want); /* 5 sigma: false alarm under 1e-6 */
    assert_true(fabs(same_b - want) < 5 * sigma);
    assert_true(fabs(same_c - want) < 5 * sigma);
    so_sampler_free(s);
}

static void test_greedy_ties_and_nan(void **state) {
    (void)state;
    so_sampler *s = so_sampler_create(5);
    so_sample_params p = plain(0);
    const float ties[] = {1, 3, 3, 3, 2}, nan_row[] = {NAN, -INFINITY, 2, NAN, 1};
    const float inf_row[] = {0, INFINITY, 5, INFINITY, 1};
    assert_int_equal(sample(s, &p, ties, &EMPTY), 1);
    assert_int_equal(sample(s, &p, nan_row, &EMPTY), 2);
    assert_int_equal(sample(s, &p, inf_row, &EMPTY), 1);
    p.temp = 1;
    for (int i = 0; i < 200; i++) {
        so_sample_context ctx = {NULL, i, i};
        int32_t a = sample(s, &p, nan_row, &ctx), b = sample(s, &p, inf_row, &ctx);
        assert_true(a == 2 || a == 4);
        assert_true(b == 1 || b == 3);
    }
    const float none[] = {NAN, NAN, INFINITY, -INFINITY, NAN};
    so_err err = {0};
    int32_t id = 77;
    assert_int_equal(so_sample_token(s, &p, none, &EMPTY, &id, &err), SO_EINVAL);
    assert_int_equal(id, 77);
    so_sampler_free(s);
}

static void test_cut_ties_go_to_lowest_ids(void **state) {
    (void)state;
    enum { N = 100 };
    float row[N] = {0}, probs[N];
    so_sampler *s = so_sampler_create(N);
    so_sample_params p = plain(1);
    so_err err = {0};
    p.top_k = 7;
    SO_OK_OR_FAIL(so_sample_distribution(s, &p, row, &EMPTY, probs, &err), err);
    for (int i = 0; i < N; i++)
        assert_true((probs[i] > 0) == (i < 7));
    p.top_k = 0;
    p.top_p = 0.105f; /* ten of a hundred do not suffice, eleven do */
    SO_OK_OR_FAIL(so_sample_distribution(s, &p, row, &EMPTY, probs, &err), err);
    for (int i = 0; i < N; i++)
        assert_true((probs[i] > 0) == (i < 11));
    p.top_p = 0;
    SO_OK_OR_FAIL(so_sample_distribution(s, &p, row, &EMPTY, probs, &err), err);
    assert_true(probs[0] == 1);
    so_sampler_free(s);
}

/* Each row distinguishes two orders of the steps. */
static void test_order_of_transforms(void **state) {
    (void)state;
    so_sampler *s = so_sampler_create(4);
    float probs[4];
    so_err err = {0};
    /* Temperature before top-p: at T = 1 the first token alone holds 0.95, at T = 2 it does not. */
    const float row[] = {3, 0, 0, -40};
    so_sample_params p = plain(1);
    p.top_p = 0.9f;
    SO_OK_OR_FAIL(so_sample_distribution(s, &p, row, &EMPTY, probs, &err), err);
    assert_true(probs[0] == 1);
    p.temp = 2;
    SO_OK_OR_FAIL(so_sample_distribution(s, &p, row, &EMPTY, probs, &err), err);
    assert_true(probs[1] > 0);
    /* top-k before top-p: of two equal tokens left by k = 2, p = 0.5 keeps one; of four, two. */
    const float flat[] = {0, 0, 0, 0};
    p = plain(1);
    p.top_k = 2;
    p.top_p = 0.5f;
    SO_OK_OR_FAIL(so_sample_distribution(s, &p, flat, &EMPTY, probs, &err), err);
    assert_true(probs[0] == 1);
    /* Bias before penalties: 1 + 1 halved is 1; halved first it would be 1.5. */
    const float one[] = {1, 1.2f, -50, -50};
    const so_bias bias[] = {{0, 1}};
    const int32_t tokens[] = {0};
    so_sample_context ctx = {tokens, 1, 1};
    p = plain(0);
    p.bias = bias;
    p.n_bias = 1;
    p.repeat_penalty = 2;
    assert_int_equal(sample(s, &p, one, &ctx), 1);
    so_sampler_free(s);
}

static double ratio_after(const so_sample_params *p, const float *row, const int32_t *tokens, int n,
                          int n_prompt) {
    float probs[3];
    so_err err = {0};
    so_sampler *s = so_sampler_create(3);
    so_sample_context ctx = {tokens, n, n_prompt};
    SO_OK_OR_FAIL(so_sample_distribution(s, p, row, &ctx, probs, &err), err);
    so_sampler_free(s);
    return log((double)probs[0] / (double)probs[2]);
}

static void test_penalties(void **state) {
    (void)state;
    const float pos[] = {2, 0, 0}, neg[] = {-2, 0, 0};
    const int32_t prompt[] = {0, 1, 1}, output[] = {1, 0, 0};
    so_sample_params p = plain(1);
    p.repeat_penalty = 2;
    assert_true(fabs(ratio_after(&p, pos, prompt, 3, 3) - 1) < 1e-5);
    assert_true(fabs(ratio_after(&p, neg, prompt, 3, 3) + 4) < 1e-5);
    p.repeat_last_n = 2; /* the token has left the window */
    assert_true(fabs(ratio_after(&p, pos, prompt, 3, 3) - 2) < 1e-5);
    p.repeat_last_n = 0;
    assert_true(fabs(ratio_after(&p, pos, prompt, 3, 3) - 2) < 1e-5);
    p = plain(1);
    p.repeat_last_n = -1;
    p.presence_penalty = 0.5f;
    p.frequency_penalty = 0.25f;
    assert_true(fabs(ratio_after(&p, pos, prompt, 3, 3) - 2) < 1e-5); /* no penalty on the prompt */
    assert_true(fabs(ratio_after(&p, pos, output, 3, 1) - (2 - 0.5 - 2 * 0.25)) < 1e-5);
    p.repeat_last_n = 1;
    assert_true(fabs(ratio_after(&p, pos, output, 3, 1) - (2 - 0.5 - 0.25)) < 1e-5);
}

static void test_bias_bans_and_check_names_flags(void **state) {
    (void)state;
    const float row[] = {5, 1, 0};
    const so_bias ban[] = {{0, -INFINITY}},
                  all[] = {{0, -INFINITY}, {1, -INFINITY}, {2, -INFINITY}};
    const so_bias outside[] = {{3, 1}};
    so_sampler *s = so_sampler_create(3);
    so_sample_params p = plain(0);
    so_err err = {0};
    int32_t id;
    p.bias = ban;
    p.n_bias = 1;
    SO_OK_OR_FAIL(so_sample_check(&p, 3, &err), err);
    assert_int_equal(sample(s, &p, row, &EMPTY), 1);
    p.bias = all;
    p.n_bias = 3;
    assert_int_equal(so_sample_token(s, &p, row, &EMPTY, &id, &err), SO_EINVAL);
    p.bias = outside;
    p.n_bias = 1;
    assert_int_equal(so_sample_check(&p, 3, &err), SO_ERANGE);
    p = plain(NAN);
    assert_int_equal(so_sample_check(&p, 3, &err), SO_ERANGE);
    assert_non_null(strstr(err.msg, "--temp"));
    p = plain(1);
    p.top_p = 1.5f;
    assert_int_equal(so_sample_check(&p, 3, &err), SO_ERANGE);
    assert_non_null(strstr(err.msg, "--top-p"));
    so_sampler_free(s);
}

static void test_extreme_temperatures(void **state) {
    (void)state;
    const float row[] = {-FLT_MAX, 1, 1.0001f, FLT_MAX};
    so_sampler *s = so_sampler_create(4);
    so_sample_params p = plain(1e-30f);
    assert_int_equal(sample(s, &p, row, &EMPTY), 3);
    p.temp = 100;
    assert_int_equal(sample(s, &p, row, &EMPTY), 3);
    so_sampler_free(s);
}

static void test_logprob(void **state) {
    (void)state;
    const float row[] = {1, 2, NAN, -INFINITY};
    double z = log(exp(1) + exp(2));
    assert_true(fabs(so_sample_logprob(row, 4, 0) - (1 - z)) < 1e-12);
    assert_true(fabs(so_sample_logprob(row, 4, 1) - (2 - z)) < 1e-12);
    assert_true(so_sample_logprob(row, 4, 2) == -INFINITY);
}

/* Close to the exact probability on rows of every length, flat and steep, with −∞ entries. */
static void test_prob_estimate(void **state) {
    (void)state;
    enum { N = 1003 };
    float row[N];
    so_rng_key key = {.seed = 6, .purpose = SO_RNG_TEST};
    for (int n = 1; n <= N; n += n < 40 ? 1 : 107) {
        so_sampler *s = so_sampler_create(n);
        for (int steep = 1; steep <= 100; steep *= 10) {
            for (int i = 0; i < n; i++)
                row[i] = (float)steep * (float)so_rng_uniform(&key, (uint32_t)i);
            if (n > 2)
                row[n / 2] = -INFINITY;
            for (int i = 0; i < n; i += 1 + n / 7) {
                double truth = exp(so_sample_logprob(row, n, i));
                assert_true(fabs((double)so_sample_prob_estimate(s, row, i) - truth) <=
                            1e-3 * truth + 1e-30);
            }
        }
        so_sampler_free(s);
    }
}

static void test_logprobs(void **state) {
    (void)state;
    enum { N = 300 };
    float row[N];
    so_logprob out[1 + N], same[1 + N];
    double sum = 0;
    so_rng_key key = {.seed = 5, .purpose = SO_RNG_TEST};
    for (int i = 0; i < N; i++) /* steps of a quarter: ties everywhere */
        row[i] = 0.25f * (float)(int)(40 * so_rng_uniform(&key, (uint32_t)i));
    so_sampler *s = so_sampler_create(N), *twin = so_sampler_create_at_level(N, &so_noise_scalar);
    so_sample_logprobs(twin, row, 17, N, same);
    so_sample_logprobs(s, row, 17, N, out);
    assert_memory_equal(same, out, sizeof out);
    assert_int_equal(out[0].token, 17);
    for (int i = 1; i <= N; i++) {
        int32_t id = out[i].token, prev = out[i - 1].token;
        sum += exp((double)out[i].logprob);
        assert_true(fabs((double)out[i].logprob - so_sample_logprob(row, N, id)) < 1e-6);
        if (i > 1)
            assert_true(row[prev] > row[id] || (row[prev] == row[id] && prev < id));
        if (id == 17)
            assert_true(out[0].logprob == out[i].logprob);
    }
    assert_true(fabs(sum - 1) < 1e-6);
    so_logprob shorter[1 + 7];
    so_sample_logprobs(s, row, 17, 7, shorter);
    assert_memory_equal(shorter, out,
                        sizeof shorter); /* a shorter list is a prefix of a longer one */
    so_sample_logprobs(s, row, 18, 0, shorter);
    assert_int_equal(shorter[0].token, 18);
    assert_int_equal(shorter[1].token, out[1].token); /* untouched */
    so_sampler_free(s);
    so_sampler_free(twin);
}

/* Rows that no working model gives: results stay finite numbers. */
static void test_logprobs_of_odd_rows(void **state) {
    (void)state;
    so_logprob out[5];
    so_sampler *s = so_sampler_create(4);
    const float steep[] = {FLT_MAX, -FLT_MAX, 0, INFINITY};
    so_sample_logprobs(s, steep, 1, 4, out);
    assert_true(out[0].logprob == -FLT_MAX);
    assert_int_equal(out[1].token, 0); /* +∞ counts as the largest float: a tie with token 0 */
    assert_int_equal(out[2].token, 3);
    assert_true(fabs((double)out[1].logprob + log(2)) < 1e-7);
    const float none[] = {NAN, -INFINITY, NAN, NAN};
    so_sample_logprobs(s, none, 2, 4, out);
    for (int i = 0; i < 5; i++)
        assert_true(out[i].logprob == -FLT_MAX);
    assert_int_equal(out[4].token, 3);
    const float large[] = {1e7f, 1e7f, 1e7f - 1, -1e7f};
    double z = log(2 + exp(-1));
    so_sample_logprobs(s, large, 2, 2, out);
    assert_true(fabs((double)out[0].logprob - (-1 - z)) < 1e-6);
    assert_true(fabs((double)out[2].logprob + z) < 1e-6);
    so_sampler_free(s);
}

/* `reject` and drafts use the same steps as so_sample_token, not a second implementation. */
static void test_adjusted_and_pick(void **state) {
    (void)state;
    enum { N = 5 };
    float logits[N] = {1, 2, 3, -1, 0}, out[N], row[N] = {0, 0.25f, 0, 0.75f, 0};
    so_bias bias[] = {{0, 2.5f}, {4, -INFINITY}};
    int32_t text[] = {2, 2, 3}, token;
    so_sample_params p;
    so_sample_defaults(&p);
    p.temp = 0;
    assert_true(so_sample_is_argmax(&p));
    p.bias = bias;
    p.n_bias = 2;
    p.repeat_penalty = 2;
    p.frequency_penalty = 0.25f;
    assert_false(so_sample_is_argmax(&p));
    so_sampler *s = so_sampler_create(N);
    so_sample_context ctx = {text, 3, 1};
    assert_int_equal(so_sample_adjusted(s, &p, logits, &ctx, out, NULL), SO_OK);
    assert_true(out[0] == 3.5f && out[1] == 2 && out[2] == 1.25f && out[3] == -2.25f);
    assert_true(out[4] == -INFINITY);
    assert_int_equal(so_sample_token(s, &p, logits, &ctx, &token, NULL), SO_OK);
    assert_int_equal(token, 0);
    assert_int_equal(so_sample_pick(row, N, 0.2), 1);
    assert_int_equal(so_sample_pick(row, N, 0.26), 3);
    assert_int_equal(so_sample_pick(row, N, 0.9999999999), 3);
    assert_int_equal(so_sample_pick(row, 1, 0.5), -1);
    so_sampler_free(s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_draw_equals_reference),
        cmocka_unit_test(test_a_forced_level_is_used),
        cmocka_unit_test(test_levels_sample_the_same),
        cmocka_unit_test(test_close_scores),
        cmocka_unit_test(test_subset_rows),
        cmocka_unit_test(test_top),
        cmocka_unit_test(test_candidates_include_every_winner),
        cmocka_unit_test(test_distribution_equals_reference),
        cmocka_unit_test(test_levels_weigh_the_same),
        cmocka_unit_test(test_chi_square_against_softmax),
        cmocka_unit_test(test_keys_are_independent),
        cmocka_unit_test(test_greedy_ties_and_nan),
        cmocka_unit_test(test_cut_ties_go_to_lowest_ids),
        cmocka_unit_test(test_order_of_transforms),
        cmocka_unit_test(test_penalties),
        cmocka_unit_test(test_bias_bans_and_check_names_flags),
        cmocka_unit_test(test_extreme_temperatures),
        cmocka_unit_test(test_logprob),
        cmocka_unit_test(test_prob_estimate),
        cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_logprobs_of_odd_rows),
        cmocka_unit_test(test_adjusted_and_pick),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* `sooth bench kernels`: the matrix products alone, without a model.
 *
 * For every dtype (with --quantize TYPE only that one) and a few row lengths, matrices of random
 * bytes that together fill WORKING_SET are packed as in a model and multiplied with n activation
 * rows. Float types are not packed: their matrices share the bytes of one, at most a quarter of
 * WORKING_SET. Printed are the time, weight bytes per second, multiply-adds per second, and the
 * ratio of the roofline max(bytes / bandwidth, multiply-adds / peak) to the time. Bandwidth and
 * peak are measured in the same run. The bandwidth is that of memory, or that of the last cache
 * level if the working set fits it; both are printed (backend/probe.h). Each repeat times every
 * width n once, and medians over the repeats are printed. Main thread only. */
#include "cli/bench_kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/prefetch.h"
#include "backend/probe.h"
#include "base/clock.h"
#include "base/env.h"
#include "base/mem.h"
#include "base/rng.h"
#include "base/statistics.h"
#include "cli/report.h"

static const int WIDTHS[] = {1, 2, 4, 5, 8, 16, 32, 64};
static const int LENGTHS[] = {576, 1536, 8960};
static const so_dtype DTYPES[] = {SO_DTYPE_F32,  SO_DTYPE_F16,  SO_DTYPE_BF16, SO_DTYPE_Q8_0,
                                  SO_DTYPE_Q5_1, SO_DTYPE_Q5_0, SO_DTYPE_Q4_1, SO_DTYPE_Q4_0,
                                  SO_DTYPE_Q6_K, SO_DTYPE_Q5_K, SO_DTYPE_Q4_K, SO_DTYPE_Q3_K,
                                  SO_DTYPE_Q2_K};
enum {
    N_WIDTHS = SO_LEN(WIDTHS),
    WIDEST = 64,
    WORKING_SET = 96 << 20,
    OUTPUTS = 4, /* consecutive products write to different buffers, so that they need no barrier */
    MAX_ROWS = 4096,
    REPEATS_MAX = 1000
};

typedef struct bench {
    const so_args *a;
    so_backend *b;
    so_probe probe;
    bool cached;               /* the working set fits the last cache level */
    double within_gb, past_gb; /* bandwidth of the last cache level and of memory, GB/s */
    int n_repeats;
    so_err err;
} bench;

/* Matrices of one dtype and row length. */
typedef struct set {
    so_dtype dtype;
    int k, m, n_weights;
    so_weight **weights;
    so_buffer *x, *out;
    unsigned char *bytes; /* source of all matrices of the set */
    double ms[N_WIDTHS][REPEATS_MAX];
} set;

/* Random bytes. Floats and fp16 numbers, also in blocks, are between 1/2 and 2: with subnormal
 * numbers the CPU is slower, and the result would measure that. */
static void fill(so_dtype dtype, unsigned char *p, size_t n_bytes) {
    bool whole = dtype == SO_DTYPE_F32;
    uint32_t keep = whole ? 0x80FFFFFFu : dtype == SO_DTYPE_BF16 ? 0x80FF80FFu : 0x87FF87FFu;
    uint32_t exponent = whole ? 0x3F000000u : dtype == SO_DTYPE_BF16 ? 0x3F003F00u : 0x38003800u;
    so_rng_key key = {.seed = 5, .purpose = SO_RNG_TEST};
    for (size_t i = 0; i + 16 <= n_bytes; i += 16) {
        uint32_t w[4];
        so_rng_block(&key, (uint32_t)(i / 16), w);
        for (int j = 0; j < 4; j++)
            w[j] = (w[j] & keep) | exponent;
        memcpy(p + i, w, sizeof w);
    }
}

static int set_open(bench *g, so_dtype dtype, int k, set *s) {
    size_t row_bytes = so_dtype_row_bytes(dtype, k);
    int m = (int)SO_MIN((size_t)MAX_ROWS, WORKING_SET / 4 / row_bytes / 16 * 16), rc;
    size_t n_bytes = row_bytes * (size_t)m;
    *s = (set){.dtype = dtype, .k = k, .m = m};
    s->bytes = so_calloc(n_bytes + 16, 1);
    fill(dtype, s->bytes, n_bytes);
    so_tensor t = {.name = SO_STR("bench"),
                   .dtype = dtype,
                   .n_dims = 2,
                   .dims = {k, m, 1, 1},
                   .data = s->bytes,
                   .n_bytes = n_bytes};
    int n = (int)SO_MAX(WORKING_SET / n_bytes, (size_t)1);
    s->weights = SO_NEW_N(so_weight *, n);
    rc = g->b->vt->buffer_create(g->b, (size_t)WIDEST * (size_t)k * 4, &s->x, &g->err);
    if (rc == SO_OK)
        rc = g->b->vt->buffer_create(g->b, (size_t)OUTPUTS * WIDEST * (size_t)m * 4, &s->out,
                                     &g->err);
    for (; s->n_weights < n && rc == SO_OK; s->n_weights++) {
        rc = g->b->vt->weight_create(g->b, &t, &s->weights[s->n_weights], &g->err);
        if (rc != SO_OK)
            break;
        g->b->vt->weight_pack(g->b, s->weights[s->n_weights]);
    }
    float *x = SO_NEW_N(float, WIDEST *k);
    fill(SO_DTYPE_F32, (unsigned char *)x, (size_t)WIDEST * (size_t)k * 4);
    if (rc == SO_OK)
        so_submit(g->b, &(so_op){.kind = SO_OP_UPLOAD,
                                 .n = 1,
                                 .upload = {{s->x, 0}, x, (size_t)WIDEST * (size_t)k * sizeof *x}});
    free(x);
    return rc;
}

static void set_close(bench *g, set *s) {
    for (int i = 0; i < s->n_weights; i++)
        g->b->vt->weight_free(g->b, s->weights[i]);
    g->b->vt->buffer_free(g->b, s->x);
    g->b->vt->buffer_free(g->b, s->out);
    free(s->weights);
    free(s->bytes);
}

static int multiply(bench *g, const set *s, int n, double *ms) {
    int64_t t = so_clock_ns();
    for (int i = 0; i < s->n_weights; i++) {
        size_t out = (size_t)(i % OUTPUTS) * WIDEST * (size_t)s->m * sizeof(float);
        so_submit(g->b,
                  &(so_op){.kind = SO_OP_MATMUL,
                           .n = n,
                           .matmul = {.out = {s->out, out}, .x = {s->x, 0}, .w = s->weights[i]}});
    }
    int rc = g->b->vt->sync(g->b, &g->err);
    *ms = so_clock_ms_since(t);
    return rc;
}

static void print_row(const bench *g, const set *s, int n, double ms) {
    double weights = (double)s->n_weights * s->m * s->k;
    double bytes = (double)s->n_weights * s->m * (double)so_dtype_row_bytes(s->dtype, s->k);
    double gb = bytes / (ms * 1e6), giga = weights * n / (ms * 1e6);
    double percent = 100 * so_probe_floor(&g->probe, bytes, weights * n) / (ms * 1e-3);
    const char *name = so_dtype_get((int)s->dtype)->name;
    if (so_args_has(g->a, SO_OPT_JSON))
        so_report_print_json(
            json_pack("{s:s, s:i, s:i, s:i, s:f, s:f, s:f, s:f, s:f, s:f}", "type", name, "k", s->k,
                      "m", s->m * s->n_weights, "n", n, "ms", ms, "gb_per_second", gb,
                      "gmac_per_second", giga, "roofline_percent", percent, "read_gb_per_second",
                      g->probe.read_gb, "peak_gmac_per_second", g->probe.mac_giga));
    else
        printf("%-5s %6d %4d %9.2f %8.1f %8.1f %6.0f %%\n", name, s->k, n, ms, gb, giga, percent);
}

static int time_set(bench *g, so_dtype dtype, int k) {
    set *s = SO_NEW(set);
    int rc = set_open(g, dtype, k, s);
    for (int rep = -1; rep < g->n_repeats && rc == SO_OK; rep++)
        for (int w = 0; w < N_WIDTHS && rc == SO_OK; w++) {
            double ms;
            rc = multiply(g, s, WIDTHS[w], &ms);
            if (rep >= 0)
                s->ms[w][rep] = ms;
        }
    for (int w = 0; w < N_WIDTHS && rc == SO_OK; w++)
        print_row(g, s, WIDTHS[w], so_median(s->ms[w], g->n_repeats));
    set_close(g, s);
    free(s);
    return rc;
}

/* Chooses how weights are prefetched, as is done when a model is opened. */
static int choose_prefetch(bench *g) {
    set *s = SO_NEW(set);
    char *dir = so_env_cache_dir();
    int rc = set_open(g, SO_DTYPE_Q4_1, LENGTHS[1], s);
    if (rc == SO_OK)
        so_prefetch_choose(g->b, dir);
    set_close(g, s);
    free(s);
    free(dir);
    return rc;
}

/* Measures both bandwidths and chooses the one for the roofline. */
static int take_probe(bench *g) {
    so_probe within = {0}, past;
    size_t n_within = so_probe_bytes_within();
    int rc = so_backend_probe(g->b, so_probe_bytes_past(), &past, &g->err);
    if (rc == SO_OK && n_within > 0)
        rc = so_backend_probe(g->b, n_within, &within, &g->err);
    if (rc != SO_OK)
        return rc;
    g->cached = so_cpu_cache_bytes() >= WORKING_SET;
    g->within_gb = within.read_gb;
    g->past_gb = past.read_gb;
    g->probe = g->cached ? within : past;
    return SO_OK;
}

static void print_head(const bench *g) {
    so_buf how = {0};
    so_prefetch_describe(g->b, &how);
    if (so_args_has(g->a, SO_OPT_JSON))
        so_report_print_json(json_pack("{s:s#, s:f, s:f}", "prefetch", how.data, (int)how.len,
                                       "memory_gb_per_second", g->past_gb, "cache_gb_per_second",
                                       g->within_gb));
    else
        printf("prefetch of packed weights: %.*s\n"
               "reading memory %.1f GB/s, reading the cache %.1f GB/s, multiplying %.1f G/s; the "
               "roofline uses %s\n"
               "%d MB of weights, %d repeats\n"
               "type       k    n        ms     GB/s G mac/s  roofline\n",
               (int)how.len, how.data, g->past_gb, g->within_gb, g->probe.mac_giga,
               g->cached ? "the cache" : "memory", WORKING_SET >> 20, g->n_repeats);
    so_buf_free(&how);
}

static int time_all(bench *g, bool one_type, so_dtype only) {
    int rc = choose_prefetch(g);
    if (rc == SO_OK)
        rc = take_probe(g);
    if (rc == SO_OK)
        print_head(g);
    for (size_t d = 0; d < SO_LEN(DTYPES) && rc == SO_OK; d++)
        for (size_t l = 0; l < SO_LEN(LENGTHS) && rc == SO_OK; l++)
            if ((!one_type || only == DTYPES[d]) &&
                LENGTHS[l] % so_dtype_get((int)DTYPES[d])->block_len == 0)
                rc = time_set(g, DTYPES[d], LENGTHS[l]);
    return rc;
}

int so_bench_kernels(const so_args *a) {
    bench g = {.a = a, .n_repeats = (int)SO_MIN(so_args_int(a, SO_OPT_REPEATS, 9), REPEATS_MAX)};
    const char *type = so_args_str(a, SO_OPT_QUANTIZE, NULL);
    so_dtype dtype = SO_DTYPE_F32;
    so_backend_opts bo = {.n_threads = (int)so_args_int(a, SO_OPT_THREADS, 0)};
    if (type && !so_dtype_parse(type, &dtype))
        return so_args_bad(a, "--quantize '%.40s': no such type", type);
    so_cpu_level_parse(so_args_str(a, SO_OPT_CPU_LEVEL, "auto"), &bo.level);
    int rc = so_backend_open(NULL, &bo, &g.b, &g.err);
    if (rc == SO_OK)
        rc = time_all(&g, type != NULL, dtype);
    so_backend_free(g.b);
    return rc == SO_OK ? 0 : so_args_fail(a, &g.err);
}

/* Time of whole passes: `bench curve`, `bench decode` and `bench prompt`.
 *
 * Everything is measured --repeats times, after two repeats as a warm-up. A repeat times each width
 * (number of rows) once, so that a slow second of the machine affects all of them, and measures
 * bandwidth and peak (bench_roof.c). Prints medians, minima, and the ratio of the roofline
 * max(bytes / bandwidth, multiply-adds / peak) to the median. Main thread only. */
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/statistics.h"
#include "cli/bench_rig.h"
#include "cli/bench_roof.h"
#include "cli/progress.h"
#include "cli/report.h"

enum { WARM_UP = 2, SETTLE_PASSES = 10, SETTLE_MS = 60 };

/* --- curve --- */

static const int WIDTHS[] = {1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64};
enum { N_WIDTHS = SO_LEN(WIDTHS) };

static so_dtype kv_dtype(const so_bench_rig *g) { return so_kv_get_shape(g->t.kv)->dtype; }

/* Runs SETTLE_PASSES passes of one width, or fewer if they take longer than SETTLE_MS, so that the
 * caches hold what these passes read, as in decoding. Then times one more. A large cache that is
 * shared with other machines fills slowly: over ten passes that read 100 MB each, the time of a
 * pass fell from 9 to 4 ms. */
static int time_settled(so_bench_rig *g, int n, double *ms) {
    int64_t begin = so_clock_ns();
    int rc = SO_OK;
    bool last = false;
    for (int i = 0; !last && rc == SO_OK; i++) {
        last = i > 0 && (i == SETTLE_PASSES || so_clock_ms_since(begin) > SETTLE_MS);
        int64_t t = so_clock_ns();
        rc = so_bench_rows(g, n, g->want);
        *ms = so_clock_ms_since(t);
        so_seq_abort(g->t.seq);
    }
    return rc;
}

static int time_widths(so_bench_rig *g, so_roof *roof, double *ms /* [N_WIDTHS][n_repeats] */) {
    so_progress bar;
    int rc = so_bench_feed(g, g->n_ctx, 0);
    so_progress_begin(&bar, "curve");
    for (int rep = -WARM_UP; rep < g->n_repeats && rc == SO_OK; rep++) {
        for (int w = 0; w < N_WIDTHS && rc == SO_OK; w++) {
            double t;
            rc = time_settled(g, WIDTHS[w], &t);
            if (rep >= 0)
                ms[w * g->n_repeats + rep] = t;
        }
        if (rep >= 0)
            so_roof_take(roof);
        so_progress_set(&bar, (double)(rep + WARM_UP + 1) / (g->n_repeats + WARM_UP));
    }
    so_progress_end(&bar);
    return rc;
}

static void print_curve(so_bench_rig *g, const so_roof *roof, double *ms) {
    double base = 0;
    if (!g->json) {
        so_roof_print(roof);
        printf("rows after %d tokens, %d repeats\n"
               "   n       ms   min ms   ratio  limit ms  of limit\n",
               g->n_ctx, g->n_repeats);
    }
    for (int w = 0; w < N_WIDTHS; w++) {
        double *v = ms + w * g->n_repeats, mid = so_median(v, g->n_repeats);
        so_work work = so_model_work(g->b.model, kv_dtype(g), g->n_ctx, WIDTHS[w], WIDTHS[w]);
        double limit = so_roof_ms(roof, work);
        base = w == 0 ? mid : base;
        if (g->json) {
            json_t *o = json_pack("{s:i, s:f, s:f, s:f}", "n", WIDTHS[w], "ms", mid, "min_ms", v[0],
                                  "ratio", mid / base);
            so_roof_json(roof, work, mid, o);
            so_report_print_json(o);
        } else {
            printf("%4d %8.2f %8.2f %7.2f %9.2f %5.0f %%\n", WIDTHS[w], mid, v[0], mid / base,
                   limit, 100 * limit / mid);
        }
    }
}

int so_bench_curve(const so_args *a, so_bench_rig *g) {
    int status = so_bench_open(g, a, 256, SO_BENCH_WIDEST, SO_BENCH_WIDEST);
    if (status != 0)
        return status;
    so_roof roof = {0};
    double *ms = SO_NEW_N(double, N_WIDTHS * g->n_repeats);
    int rc = so_roof_open(&roof, g, g->n_repeats, &g->err);
    if (rc == SO_OK)
        rc = time_widths(g, &roof, ms);
    if (rc == SO_OK) {
        so_roof_settle(&roof);
        print_curve(g, &roof, ms);
    }
    free(ms);
    so_roof_close(&roof);
    return rc == SO_OK ? 0 : so_args_fail(a, &g->err);
}

/* --- decode and prompt --- */

/* n tokens as a prompt, with logits for the last one. An encoder reads them as a source, which it
 * has not read before, and the logits are those of the decoder's start token: in both cases all that
 * comes before the first token of an answer. */
static int read_prompt(so_bench_rig *g, int n) {
    so_teacher *t = &g->t;
    if (!so_bench_has_encoder(g))
        return so_bench_feed(g, n, 1);
    int32_t start = so_model_hparams(g->b.model)->decoder_start;
    so_sources_forget(t->sources);
    int rc = so_teacher_read(t, t->seq, g->ids, n, &g->err);
    return rc == SO_OK ? so_teacher_feed(t, t->seq, &start, 1, 1, &g->err) : rc;
}

/* One timed run: n tokens one by one, or a prompt of n tokens. The sequence is truncated to its old
 * length afterwards. */
static int time_once(so_bench_rig *g, int n, bool one_by_one, double *ms) {
    int len = so_seq_len(g->t.seq), rc = SO_OK;
    int64_t t = so_clock_ns();
    if (one_by_one) {
        for (int i = 0; i < n && rc == SO_OK; i++) {
            rc = so_bench_rows(g, 1, SO_PASS_ARGMAX);
            if (rc == SO_OK)
                so_seq_commit_chain(g->t.seq, 1);
        }
    } else {
        rc = read_prompt(g, n);
    }
    *ms = so_clock_ms_since(t);
    if (rc == SO_OK)
        so_seq_truncate_to(g->t.seq, len);
    return rc;
}

static int time_runs(so_bench_rig *g, so_roof *roof, int n, bool decode, double *ms) {
    so_progress bar;
    int rc = decode ? so_bench_feed(g, g->n_ctx, 0) : SO_OK;
    so_progress_begin(&bar, decode ? "decode" : "prompt");
    for (int rep = -WARM_UP; rep < g->n_repeats && rc == SO_OK; rep++) {
        double t;
        rc = time_once(g, n, decode, &t);
        if (rep >= 0) {
            ms[rep] = t;
            so_roof_take(roof);
        }
        so_progress_set(&bar, (double)(rep + WARM_UP + 1) / (g->n_repeats + WARM_UP));
    }
    so_progress_end(&bar);
    return rc;
}

static so_work add_work(so_work a, so_work b) {
    return (so_work){a.n_bytes + b.n_bytes, a.n_macs + b.n_macs};
}

/* A prompt is counted as one pass, although it may take several. */
static so_work work_of(const so_bench_rig *g, int n, bool decode) {
    const so_model *m = g->b.model;
    so_work sum = {0};
    if (!decode && so_bench_has_encoder(g))
        return add_work(so_model_source_work(m, n), so_model_work(m, kv_dtype(g), 0, 1, 1));
    if (!decode)
        return so_model_work(m, kv_dtype(g), 0, n, 1);
    for (int i = 0; i < n; i++)
        sum = add_work(sum, so_model_work(m, kv_dtype(g), g->n_ctx + i, 1, 1));
    return sum;
}

static void print_rate(so_bench_rig *g, const so_roof *roof, int n, bool decode, double *ms) {
    double mid = so_median(ms, g->n_repeats);
    size_t read = so_model_weight_bytes(g->b.model);
    if (decode)
        read -= so_model_source_bytes(g->b.model);
    double bytes = (double)read, gbps = bytes / (mid * 1e6);
    const char *label = decode ? "decode" : "prompt";
    int ctx = decode ? g->n_ctx : 0;
    so_work work = work_of(g, n, decode);
    gbps *= decode ? n : 1;
    if (g->json) {
        json_t *o = json_pack("{s:s, s:i, s:i, s:f, s:f, s:f, s:f}", "kind", label, "n", n, "ctx",
                              ctx, "ms", mid, "min_ms", ms[0], "tokens_per_second", 1000 * n / mid,
                              "weight_gb_per_second", gbps);
        so_roof_json(roof, work, mid, o);
        so_report_print_json(o);
        return;
    }
    double limit = so_roof_ms(roof, work);
    so_roof_print(roof);
    printf("%s: %d tokens after %d, %.1f ms (best %.1f), %.1f tokens/s, weights read at %.1f "
           "GB/s; roofline %.1f ms, %.0f %% of the time\n",
           label, n, ctx, mid, ms[0], 1000 * n / mid, gbps, limit, 100 * limit / mid);
}

static int bench_rate(const so_args *a, so_bench_rig *g, bool decode) {
    int n = (int)so_args_int(a, SO_OPT_PREDICT, decode ? 32 : 512);
    if (n < 1)
        return so_args_bad(a, "--predict %d: must be 1 or more here", n);
    g->own_source = !decode; /* the prompt */
    int rows = decode ? SO_BENCH_WIDEST : (int)so_args_int(a, SO_OPT_BATCH, 256);
    int status = decode ? so_bench_open(g, a, 256, rows, n) : so_bench_open(g, a, 1, rows, n - 1);
    if (status != 0)
        return status;
    so_roof roof = {0};
    double *ms = SO_NEW_N(double, g->n_repeats);
    int rc = so_roof_open(&roof, g, g->n_repeats, &g->err);
    if (rc == SO_OK)
        rc = time_runs(g, &roof, n, decode, ms);
    if (rc == SO_OK) {
        so_roof_settle(&roof);
        print_rate(g, &roof, n, decode, ms);
    }
    free(ms);
    so_roof_close(&roof);
    return rc == SO_OK ? 0 : so_args_fail(a, &g->err);
}

int so_bench_decode(const so_args *a, so_bench_rig *g) { return bench_rate(a, g, true); }
int so_bench_prompt(const so_args *a, so_bench_rig *g) { return bench_rate(a, g, false); }

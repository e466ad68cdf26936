/* `sooth bench passes`: times passes requested on standard input, one per line. Another program can
 * alternate them with its own measurements while the model stays loaded (bench/peer_llamacpp.py).
 *
 *   request                      answer
 *   pass CTX ROWS LOGITS TIMES   { "ms": [one, two, …], "bytes": …, "macs": … }
 *   probe                        { "read_gb_per_second": …, "peak_gmac_per_second": …,
 *                                  "memory_gb_per_second": …, "cache_gb_per_second": … }
 *
 * `pass` runs a chain of ROWS rows after CTX cached tokens, with logits for the last LOGITS rows,
 * TIMES times. The first runs may be slow because of what ran before; the client drops those it
 * does not want. More than --batch-size rows are computed in several passes, as in prefill, and
 * timed as one. CTX + ROWS must fit --ctx-size. `probe` measures the memory bandwidth and the
 * arithmetic peak (bench_roof.h).
 *
 * Each answer is one line of JSON, flushed at once. A first line, before any request, reports that
 * the model is loaded. Threads sleep between lines. Any other request ends the program with an
 * error. Main thread only. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "cli/bench_rig.h"
#include "cli/bench_roof.h"

enum { MAX_LINE = 128, MAX_TIMES = 1000 };

typedef struct pass_request {
    int n_ctx, n_rows, n_logits, n_times;
} pass_request;

static int bad_line(so_bench_rig *g, const char *line, const char *why) {
    return so_err_set(&g->err, SO_EINVAL, "line '%.60s': %s", line, why);
}

static int parse_pass(so_bench_rig *g, const char *line, pass_request *q) {
    int *fields[] = {&q->n_ctx, &q->n_rows, &q->n_logits, &q->n_times};
    const char *at = line + strlen("pass");
    for (size_t i = 0; i < SO_LEN(fields); i++) {
        char *end;
        errno = 0;
        long v = strtol(at, &end, 10);
        if (end == at || errno != 0 || v < 0 || v > INT32_MAX)
            return bad_line(g, line, "must be pass CTX ROWS LOGITS TIMES");
        *fields[i] = (int)v;
        at = end;
    }
    if (at[strspn(at, " \n")] != '\0')
        return bad_line(g, line, "has more fields than pass CTX ROWS LOGITS TIMES");
    if (q->n_rows < 1 || q->n_rows > g->n_ctx || q->n_ctx > g->n_ctx - q->n_rows)
        return bad_line(g, line, "ROWS must be at least 1, and CTX + ROWS at most --ctx-size");
    if (q->n_logits > SO_MIN(q->n_rows, (int)SO_BENCH_WIDEST))
        return bad_line(g, line, "LOGITS must be at most ROWS and at most 64");
    if (q->n_times < 1 || q->n_times > MAX_TIMES)
        return bad_line(g, line, "TIMES must be 1 to 1000");
    return SO_OK;
}

/* The sequence is as long as the longest context requested so far; a request runs on a fork of
 * it. */
static int answer_pass(so_bench_rig *g, const pass_request *q) {
    int len = so_seq_len(g->t.seq);
    int rc = len < q->n_ctx ? so_bench_feed(g, q->n_ctx - len, 0) : SO_OK;
    if (rc != SO_OK)
        return rc;
    so_seq *whole = g->t.seq;
    json_t *times = json_array();
    g->t.seq = so_seq_fork(whole, q->n_ctx);
    for (int i = 0; i < q->n_times && rc == SO_OK; i++) {
        int64_t t = so_clock_ns();
        rc = so_bench_feed(g, q->n_rows, q->n_logits);
        json_array_append_new(times, json_real(so_clock_ms_since(t)));
        if (rc == SO_OK)
            so_seq_truncate_to(g->t.seq, q->n_ctx);
    }
    so_seq_free(g->t.seq);
    g->t.seq = whole;
    so_work w = so_model_work(g->b.model, so_kv_get_shape(g->t.kv)->dtype, q->n_ctx, q->n_rows,
                              q->n_logits);
    if (rc == SO_OK)
        so_report_print_json(
            json_pack("{s:o, s:f, s:f}", "ms", times, "bytes", w.n_bytes, "macs", w.n_macs));
    else
        json_decref(times);
    return rc;
}

static void answer_probe(so_roof *roof) {
    roof->n = 0;
    so_probe p = so_roof_take(roof);
    so_report_print_json(json_pack("{s:f, s:f, s:f, s:o}", "read_gb_per_second", p.read_gb,
                                   "peak_gmac_per_second", p.mac_giga, "memory_gb_per_second",
                                   roof->past_gb, "cache_gb_per_second", so_roof_cache_json(roof)));
}

static int answer_all(so_bench_rig *g, so_roof *roof) {
    char line[MAX_LINE];
    pass_request q = {0};
    int rc = SO_OK;
    while (rc == SO_OK && fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = '\0';
        if (strcmp(line, "probe") == 0) {
            answer_probe(roof);
        } else if (strncmp(line, "pass ", 5) == 0) {
            rc = parse_pass(g, line, &q);
            if (rc == SO_OK)
                rc = answer_pass(g, &q);
        } else {
            rc = bad_line(g, line, "must be `probe` or `pass CTX ROWS LOGITS TIMES`");
        }
        fflush(stdout);
    }
    return rc;
}

int so_bench_passes(const so_args *a, so_bench_rig *g) {
    int rows = SO_MAX((int)so_args_int(a, SO_OPT_BATCH, 256), (int)SO_BENCH_WIDEST);
    g->two = true;
    int status = so_bench_open(g, a, 1024, rows, 0);
    if (status != 0)
        return status;
    so_roof roof = {0};
    int rc = so_roof_open(&roof, g, 1, &g->err);
    if (rc == SO_OK) {
        so_buf what = {0};
        char cpu[SO_CPU_NAME_MAX];
        so_cpu_name(cpu);
        g->b.backend->vt->describe(g->b.backend, &what);
        so_report_print_json(json_pack("{s:s, s:s#, s:I, s:I}", "cpu", cpu, "backend", what.data,
                                       (int)what.len, "weight_bytes",
                                       (json_int_t)so_model_weight_bytes(g->b.model), "read_bytes",
                                       (json_int_t)roof.read_bytes));
        fflush(stdout);
        so_buf_free(&what);
        rc = answer_all(g, &roof);
    }
    so_roof_close(&roof);
    return rc == SO_OK ? 0 : so_args_fail(a, &g->err);
}

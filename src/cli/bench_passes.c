/* `sooth bench passes`: times the passes that standard input asks for, one line at a time, so that
 * another program can alternate them with something else while the model stays loaded
 * (bench/peer_llamacpp.py does).
 *
 *   pass CTX ROWS LOGITS TIMES    a chain of ROWS rows behind CTX tokens, logits of the last LOGITS
 *   probe                         what the machine can do now
 *   { "ms": [one, two, …], "bytes": …, "macs": … }
 *   { "read_gb_per_second": …, "peak_gmac_per_second": …, "memory_gb_per_second": … }
 *
 * Each line is answered by one of JSON, written out at once; the first line, before any question,
 * says that the model is loaded. The same pass runs TIMES times, the first of them right after
 * whatever the machine did before: the asker leaves those out that it does not want. Rows beyond
 * --batch-size go in several passes, as a prompt does, and count as one. CTX and ROWS together fit
 * --ctx-size. Between lines the threads sleep. A line that asks for something else ends the
 * program. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "cli/bench_rig.h"
#include "cli/bench_roof.h"

enum { MAX_LINE = 128, MAX_TIMES = 1000 };

typedef struct question {
    int n_ctx, n_rows, n_logits, n_times;
} question;

static int bad_line(so_bench_rig *g, const char *line, const char *why) {
    return so_err_set(&g->err, SO_EINVAL, "line '%.60s': %s", line, why);
}

static int parse_pass(so_bench_rig *g, const char *line, question *q) {
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
        return bad_line(g, line, "has more than pass CTX ROWS LOGITS TIMES");
    if (q->n_rows < 1 || q->n_rows > g->n_ctx || q->n_ctx > g->n_ctx - q->n_rows)
        return bad_line(g, line, "CTX and ROWS together must be 1 to --ctx-size");
    if (q->n_logits > SO_MIN(q->n_rows, (int)SO_BENCH_WIDEST))
        return bad_line(g, line, "LOGITS must be no more than ROWS, and 64");
    if (q->n_times < 1 || q->n_times > MAX_TIMES)
        return bad_line(g, line, "TIMES must be 1 to 1000");
    return SO_OK;
}

/* The sequence grows to the longest context that was asked for; shorter ones are forks of it. */
static int answer_pass(so_bench_rig *g, const question *q) {
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
    so_report_print_json(json_pack("{s:f, s:f, s:o}", "read_gb_per_second", p.read_gb,
                                   "peak_gmac_per_second", p.mac_giga, "memory_gb_per_second",
                                   roof->far_bytes > 0 ? json_real(roof->far_gb) : json_null()));
}

static int answer_all(so_bench_rig *g, so_roof *roof) {
    char line[MAX_LINE];
    question q = {0};
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
                                       (json_int_t)roof.near_bytes));
        fflush(stdout);
        so_buf_free(&what);
        rc = answer_all(g, &roof);
    }
    so_roof_close(&roof);
    return rc == SO_OK ? 0 : so_args_fail(a, &g->err);
}

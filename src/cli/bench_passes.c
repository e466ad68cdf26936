/* `sooth bench passes`: times passes requested on standard input, one per line. Another program can
 * alternate them with its own measurements while the model stays loaded (bench/peer_llamacpp.py).
 *
 *   request                      answer
 *   pass CTX ROWS LOGITS TIMES   { "ms": [one, two, …], "bytes": …, "macs": … }
 *   streams CTX SEQS TIMES       the same
 *   probe                        { "read_gb_per_second": …, "peak_gmac_per_second": …,
 *                                  "memory_gb_per_second": …, "cache_gb_per_second": … }
 *
 * `pass` runs a chain of ROWS rows after CTX cached tokens, with logits for the last LOGITS rows,
 * TIMES times. The first runs may be slow because of what ran before; the client drops those it
 * does not want. More than --batch-size rows are computed in several passes, as in prefill, and
 * timed as one. CTX + ROWS must fit --ctx-size. `streams` runs passes over one row of each of SEQS
 * sequences that have CTX tokens in pages of their own, at most --parallel of them: a step of
 * parallel decoding. `probe` measures the memory bandwidth and the
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

/* Sequences of `streams`, as many as were requested so far. */
typedef struct streams {
    so_seq *seqs[SO_BENCH_WIDEST];
    int n;
} streams;

static int bad_line(so_bench_rig *g, const char *line, const char *why) {
    return so_err_set(&g->err, SO_EINVAL, "line '%.60s': %s", line, why);
}

/* Reads n numbers after the first word; form: what the line must be. */
static int parse_numbers(so_bench_rig *g, const char *line, const char *form, int *const *fields,
                         int n) {
    const char *at = line + strcspn(line, " ");
    char why[80];
    snprintf(why, sizeof why, "must be %s", form);
    for (int i = 0; i < n; i++) {
        char *end;
        errno = 0;
        long v = strtol(at, &end, 10);
        if (end == at || errno != 0 || v < 0 || v > INT32_MAX)
            return bad_line(g, line, why);
        *fields[i] = (int)v;
        at = end;
    }
    snprintf(why, sizeof why, "has more fields than %s", form);
    return at[strspn(at, " \n")] == '\0' ? SO_OK : bad_line(g, line, why);
}

static int check_times(so_bench_rig *g, const char *line, const pass_request *q) {
    if (q->n_times < 1 || q->n_times > MAX_TIMES)
        return bad_line(g, line, "TIMES must be 1 to 1000");
    return SO_OK;
}

static int parse_pass(so_bench_rig *g, const char *line, pass_request *q) {
    int *const fields[] = {&q->n_ctx, &q->n_rows, &q->n_logits, &q->n_times};
    int rc = parse_numbers(g, line, "pass CTX ROWS LOGITS TIMES", fields, SO_LEN(fields));
    if (rc != SO_OK)
        return rc;
    if (q->n_rows < 1 || q->n_rows > g->n_ctx || q->n_ctx > g->n_ctx - q->n_rows)
        return bad_line(g, line, "ROWS must be at least 1, and CTX + ROWS at most --ctx-size");
    if (q->n_logits > SO_MIN(q->n_rows, (int)SO_BENCH_WIDEST))
        return bad_line(g, line, "LOGITS must be at most ROWS and at most 64");
    return check_times(g, line, q);
}

static int parse_streams(so_bench_rig *g, const char *line, pass_request *q) {
    int *const fields[] = {&q->n_ctx, &q->n_rows, &q->n_times};
    int rc = parse_numbers(g, line, "streams CTX SEQS TIMES", fields, SO_LEN(fields));
    if (rc != SO_OK)
        return rc;
    if (q->n_rows < 1 || q->n_rows > g->n_streams)
        return bad_line(g, line, "SEQS must be at least 1 and at most --parallel");
    if (q->n_ctx < 1 || q->n_ctx > g->n_ctx - 1)
        return bad_line(g, line, "CTX must be at least 1 and less than --ctx-size");
    return check_times(g, line, q);
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

static int run_streams(so_bench_rig *g, const streams *s, const pass_request *q) {
    int rc = SO_OK;
    for (int i = 0; i < q->n_rows && rc == SO_OK; i++) {
        g->t.rows[i] = (so_row){.token = g->ids[i % g->n_ctx],
                                .pos = q->n_ctx,
                                .seq = i,
                                .parent = -1,
                                .want_logits = true};
        rc = so_seq_begin(s->seqs[i], 1, &g->err);
    }
    so_batch batch = {.rows = g->t.rows, .n_rows = q->n_rows, .seqs = s->seqs, .n_seqs = q->n_rows};
    return rc == SO_OK ? so_pass_run(g->t.pass, &batch, g->want, &g->err) : rc;
}

/* Makes the sequences as long as requested. */
static int prepare_streams(so_bench_rig *g, streams *s, const pass_request *q) {
    int rc = SO_OK;
    for (; s->n < q->n_rows && rc == SO_OK; s->n++) {
        s->seqs[s->n] = so_seq_create(g->t.kv);
        rc = so_bench_read(g, s->seqs[s->n]);
    }
    for (int i = 0; i < q->n_rows && rc == SO_OK; i++) {
        int len = so_seq_len(s->seqs[i]);
        if (len > q->n_ctx)
            so_seq_truncate_to(s->seqs[i], q->n_ctx);
        else if (len < q->n_ctx)
            rc = so_teacher_feed(&g->t, s->seqs[i], g->ids + len, q->n_ctx - len, 0, &g->err);
    }
    return rc;
}

static int answer_streams(so_bench_rig *g, streams *s, const pass_request *q) {
    int rc = prepare_streams(g, s, q);
    json_t *times = json_array();
    for (int k = 0; k < q->n_times && rc == SO_OK; k++) {
        int64_t t = so_clock_ns();
        rc = run_streams(g, s, q);
        json_array_append_new(times, json_real(so_clock_ms_since(t)));
        for (int i = 0; i < q->n_rows; i++)
            if (so_seq_open_nodes(s->seqs[i]) > 0)
                so_seq_abort(s->seqs[i]);
    }
    so_dtype kv = so_kv_get_shape(g->t.kv)->dtype;
    so_work one = so_model_work(g->b.model, kv, q->n_ctx, 1, 1);
    double cache = one.n_bytes - so_model_work(g->b.model, kv, 0, 1, 1).n_bytes;
    if (rc == SO_OK)
        so_report_print_json(json_pack("{s:o, s:f, s:f}", "ms", times, "bytes",
                                       one.n_bytes + (q->n_rows - 1) * cache, "macs",
                                       q->n_rows * one.n_macs));
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
    streams s = {0};
    int rc = SO_OK;
    while (rc == SO_OK && fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = '\0';
        if (strcmp(line, "probe") == 0) {
            answer_probe(roof);
        } else if (strncmp(line, "pass ", 5) == 0) {
            rc = parse_pass(g, line, &q);
            if (rc == SO_OK)
                rc = answer_pass(g, &q);
        } else if (strncmp(line, "streams ", 8) == 0) {
            rc = parse_streams(g, line, &q);
            if (rc == SO_OK)
                rc = answer_streams(g, &s, &q);
        } else {
            rc = bad_line(g, line,
                          "must be `probe`, `pass CTX ROWS LOGITS TIMES` or `streams CTX SEQS "
                          "TIMES`");
        }
        fflush(stdout);
    }
    for (int i = 0; i < s.n; i++)
        so_seq_free(s.seqs[i]);
    return rc;
}

int so_bench_passes(const so_args *a, so_bench_rig *g) {
    int rows = SO_MAX((int)so_args_int(a, SO_OPT_BATCH, 256), (int)SO_BENCH_WIDEST);
    g->two = true;
    g->n_streams = so_args_has(a, SO_OPT_PARALLEL) ? (int)so_args_int(a, SO_OPT_PARALLEL, 1) : 0;
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

/* The access log: one line per request, key=value or JSON, with the request's speculation figures.
 * Lines of jobs are written by the housekeeper thread, all others by HTTP threads. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "server/impl.h"

static json_t *time_json(void) {
    struct timespec t;
    struct tm tm;
    char text[40], whole[56];
    clock_gettime(CLOCK_REALTIME, &t);
    gmtime_r(&t.tv_sec, &tm);
    strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &tm);
    snprintf(whole, sizeof whole, "%s.%03ldZ", text, t.tv_nsec / 1000000);
    return json_string(whole);
}

/* A value for key=value: bare if that is unambiguous, else as a JSON string. */
static void put_value(const json_t *v, so_buf *out) {
    const char *s = json_string_value(v);
    bool bare = s && *s && strlen(s) == json_string_length(v);
    for (const char *p = s; bare && *p; p++)
        bare = *p > ' ' && *p < 127 && *p != '"' && *p != '=' && *p != '\\';
    if (bare) {
        so_buf_append_c(out, s);
        return;
    }
    char *text = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(6));
    so_buf_append_c(out, text ? text : "?");
    free(text);
}

/* Writes o without its null members, and releases it. */
static void write_line(const so_server *s, json_t *o) {
    so_buf line = {0};
    const char *key;
    json_t *v;
    void *next;
    json_object_foreach_safe(o, next, key, v) {
        if (json_is_null(v))
            json_object_del(o, key);
    }
    if (s->o.log_json) {
        json_t *copy = json_incref(o);
        so_format_json(copy, &line);
    } else {
        json_object_foreach(o, key, v) {
            so_buf_printf(&line, "%s%s=", line.len ? " " : "", key);
            put_value(v, &line);
        }
    }
    s->o.log(s->o.log_user, so_buf_str(&line));
    json_decref(o);
    so_buf_free(&line);
}

static json_t *text_json(const char *text, size_t cap) {
    json_t *o = json_stringn(text, strnlen(text, cap));
    return o ? o : json_string("?"); /* not UTF-8 */
}

static json_t *rounded(double x) {
    return x < 0 ? json_null() : json_real((double)(int64_t)(x * 1000 + 0.5) / 1000);
}

void so_log_exchange(so_server *s, const so_exchange *x) {
    if (!s->o.log)
        return;
    write_line(s, json_pack("{s:o, s:s, s:o, s:o, s:i, s:o, s:o}", "time", time_json(), "client",
                            x->c->client, "method", text_json(x->method, 16), "path",
                            text_json(x->path, 120), "status", x->status, "ms",
                            rounded(so_clock_ms_since(x->t_start_ns)), "ignored",
                            x->ignored[0] ? json_string(x->ignored) : json_null()));
}

static const char *finish_of(const so_job *j) {
    so_finish f = j->choices[0].finish;
    return f == SO_FINISH_NONE ? "refused" : so_finish_name(f);
}

void so_log_job(so_server *s, const so_job *j) {
    if (!s->o.log)
        return;
    so_job_totals t = so_job_total(j);
    so_rates r = so_stats_rates(&t.stats);
    const so_request_stats *st = &t.stats;
    json_t *o =
        json_pack("{s:o, s:s, s:s, s:s, s:i, s:o, s:s, s:i, s:i}", "time", time_json(), "client",
                  j->client, "method", "POST", "path", j->path, "status", j->status, "ms",
                  rounded(so_clock_ms_since(j->t_created_ns)), "id", j->id, "prompt_tokens",
                  t.prompt_tokens, "completion_tokens", t.completion_tokens);
    json_object_set_new(o, "cached_tokens",
                        t.cached_tokens ? json_integer(t.cached_tokens) : json_null());
    json_object_set_new(o, "finish", json_string(finish_of(j)));
    json_object_set_new(o, "ttft_ms", rounded(st->predicted_n > 0 ? st->ttft_ms : -1));
    json_object_set_new(o, "tokens_per_second", rounded(r.tokens_per_second));
    json_object_set_new(o, "drafter", json_string(t.label.drafter));
    json_object_set_new(o, "drafted", json_integer(st->draft_n));
    json_object_set_new(o, "accepted", json_integer(st->draft_n_accepted));
    json_object_set_new(o, "acceptance", rounded(r.acceptance_rate));
    json_object_set_new(o, "tokens_per_pass", rounded(r.tokens_per_pass));
    json_object_set_new(o, "error", j->err.status ? text_json(j->err.msg, 200) : json_null());
    json_object_set_new(o, "ignored",
                        j->rq.ignored.len ? json_string(j->rq.ignored.data) : json_null());
    write_line(s, o);
}

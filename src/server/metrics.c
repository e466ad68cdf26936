/* See metrics.h. Label values are constants of the program or come from the operator, never from a
 * client, so the number of time series is bounded. */
#include "server/metrics.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"

enum { MAX_BOUNDS = 16, MAX_HTTP = 160, MAX_REFUSED = 8, N_FINISH = SO_FINISH_ERROR + 1 };

typedef struct histogram {
    const double *bounds; /* ascending, the last one is infinity */
    uint64_t n[MAX_BOUNDS];
    double sum;
} histogram;

/* From half a millisecond (a token of a tiny model) to minutes (a full queue). */
static const double TOKEN_S[] = {0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025,   0.05,
                                 0.1,    0.25,  0.5,    1,     2.5,  INFINITY};
static const double REQUEST_S[] = {0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,     1,
                                   2.5,   5,    10,    30,   60,  300,  INFINITY};
static const double ROWS[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, INFINITY};

typedef struct counted {
    const char *what;
    int status;
    uint64_t n;
} counted;

struct so_metrics {
    pthread_mutex_t lock;
    double started_s;
    counted http[MAX_HTTP], refused[MAX_REFUSED];
    uint64_t finished[N_FINISH];
    uint64_t prompt_tokens, generated_tokens;
    uint64_t steps, drafts, drafted, tested, accepted, accepted_at[SO_STATS_DEPTHS];
    int max_depth;
    double pass_seconds, draft_seconds, ahead_seconds;
    uint64_t looked_up, hits, drafted_ahead, served;
    histogram queue, first, token, request, http_seconds, rows;
};

so_metrics *so_metrics_create(void) {
    so_metrics *m = SO_NEW(so_metrics);
    struct timespec t;
    pthread_mutex_init(&m->lock, NULL);
    clock_gettime(CLOCK_REALTIME, &t);
    m->started_s = (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
    m->queue.bounds = m->first.bounds = m->request.bounds = m->http_seconds.bounds = REQUEST_S;
    m->token.bounds = TOKEN_S;
    m->rows.bounds = ROWS;
    return m;
}

void so_metrics_free(so_metrics *m) {
    if (!m)
        return;
    pthread_mutex_destroy(&m->lock);
    free(m);
}

/* --- counting --- */

static void observe(histogram *h, double x, uint64_t times) {
    int i = 0;
    while (x > h->bounds[i])
        i++;
    h->n[i] += times;
    h->sum += x * (double)times;
}

static void count(counted *list, int cap, const char *what, int status) {
    for (int i = 0; i < cap; i++) {
        if (list[i].n == 0)
            list[i] = (counted){what, status, 0};
        if (list[i].what == what && list[i].status == status) {
            list[i].n++;
            return;
        }
    }
}

void so_metrics_http(so_metrics *m, const char *path, int status, double seconds) {
    pthread_mutex_lock(&m->lock);
    count(m->http, MAX_HTTP, path, status);
    observe(&m->http_seconds, seconds, 1);
    pthread_mutex_unlock(&m->lock);
}

void so_metrics_refused(so_metrics *m, const char *why) {
    pthread_mutex_lock(&m->lock);
    count(m->refused, MAX_REFUSED, why, 0);
    pthread_mutex_unlock(&m->lock);
}

void so_metrics_step(so_metrics *m, const so_step_info *s) {
    pthread_mutex_lock(&m->lock);
    m->steps++;
    m->pass_seconds += s->pass_ms * 1e-3;
    m->draft_seconds += s->draft_ms * 1e-3;
    m->ahead_seconds += s->ahead_ms * 1e-3;
    m->looked_up += (uint64_t)s->looked_up;
    m->hits += (uint64_t)s->hits;
    m->drafted_ahead += (uint64_t)s->drafted_ahead;
    m->served += (uint64_t)s->served;
    observe(&m->rows, s->n_rows, 1);
    pthread_mutex_unlock(&m->lock);
}

void so_metrics_guesses(so_metrics *m, const so_request_stats *now, so_request_stats *known) {
    if (now->draft_n == known->draft_n)
        return;
    pthread_mutex_lock(&m->lock);
    m->drafts += (uint64_t)(now->drafted_rounds - known->drafted_rounds);
    m->drafted += (uint64_t)(now->draft_n - known->draft_n);
    m->tested += (uint64_t)(now->tested_n - known->tested_n);
    m->accepted += (uint64_t)(now->draft_n_accepted - known->draft_n_accepted);
    for (int i = 0; i < SO_STATS_DEPTHS && now->per_depth[i].tested > 0; i++) {
        m->max_depth = SO_MAX(m->max_depth, i + 1);
        m->accepted_at[i] += (uint64_t)(now->per_depth[i].accepted - known->per_depth[i].accepted);
    }
    pthread_mutex_unlock(&m->lock);
    *known = *now;
}

void so_metrics_first(so_metrics *m, double seconds) {
    pthread_mutex_lock(&m->lock);
    observe(&m->first, seconds, 1);
    pthread_mutex_unlock(&m->lock);
}

/* Tokens of one pass arrive together: the time since the previous pass is divided among them. */
void so_metrics_tokens(so_metrics *m, int n, double seconds) {
    pthread_mutex_lock(&m->lock);
    m->generated_tokens += (uint64_t)n;
    if (seconds >= 0 && n > 0)
        observe(&m->token, seconds / n, (uint64_t)n);
    pthread_mutex_unlock(&m->lock);
}

void so_metrics_finish(so_metrics *m, so_finish why, const so_request_stats *s, double seconds) {
    pthread_mutex_lock(&m->lock);
    m->finished[why]++;
    m->prompt_tokens += (uint64_t)s->prompt_n;
    observe(&m->queue, s->queue_ms * 1e-3, 1);
    observe(&m->request, seconds, 1);
    pthread_mutex_unlock(&m->lock);
}

/* --- text --- */

static void head(so_buf *b, const char *name, const char *type, const char *help) {
    so_buf_printf(b, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void one(so_buf *b, const char *name, const char *type, const char *help, double x) {
    head(b, name, type, help);
    so_buf_printf(b, "%s %.17g\n", name, x);
}

static void put_histogram(so_buf *b, const char *name, const char *help, const histogram *h) {
    uint64_t sum = 0;
    head(b, name, "histogram", help);
    for (int i = 0;; i++) {
        sum += h->n[i];
        if (isinf(h->bounds[i]))
            break;
        so_buf_printf(b, "%s_bucket{le=\"%g\"} %llu\n", name, h->bounds[i],
                      (unsigned long long)sum);
    }
    so_buf_printf(b, "%s_bucket{le=\"+Inf\"} %llu\n%s_sum %.17g\n%s_count %llu\n", name,
                  (unsigned long long)sum, name, h->sum, name, (unsigned long long)sum);
}

/* Escapes a label value: the operator may give the model any name. */
static void put_label(so_buf *b, const char *text) {
    for (; *text; text++) {
        if (*text == '"' || *text == '\\')
            so_buf_append_char(b, '\\');
        if (*text == '\n')
            so_buf_append_c(b, "\\n");
        else
            so_buf_append_char(b, *text);
    }
}

static void put_speculation(const so_metrics *m, so_buf *b) {
#define SPEC "sooth_spec_decode_num_"
    one(b, SPEC "drafts_total", "counter", "Rounds with guesses.", (double)m->drafts);
    one(b, SPEC "draft_tokens_total", "counter", "Guesses that were computed in a pass.",
        (double)m->drafted);
    one(b, SPEC "tested_tokens_total", "counter",
        "Guesses that were tested: all guesses before them had been accepted.", (double)m->tested);
    one(b, SPEC "accepted_tokens_total", "counter",
        "Guesses that were accepted and became part of an answer.", (double)m->accepted);
    head(b, SPEC "accepted_tokens_per_pos_total", "counter",
         "Accepted guesses by their position in the draft.");
    for (int i = 0; i < m->max_depth; i++)
        so_buf_printf(b, SPEC "accepted_tokens_per_pos_total{position=\"%d\"} %llu\n", i,
                      (unsigned long long)m->accepted_at[i]);
#undef SPEC
}

static void put_ahead(const so_metrics *m, so_buf *b) {
    one(b, "sooth_async_rounds_total", "counter",
        "Rounds that looked for a draft that had been made ahead.", (double)m->looked_up);
    one(b, "sooth_async_hits_total", "counter", "Rounds that found one.", (double)m->hits);
    one(b, "sooth_async_draft_tokens_total", "counter",
        "Guesses that were made ahead, for all outcomes.", (double)m->drafted_ahead);
    one(b, "sooth_async_served_tokens_total", "counter",
        "Guesses that were made ahead and used; the others were wasted.", (double)m->served);
    one(b, "sooth_async_draft_seconds_total", "counter",
        "Time of drafting ahead, hidden behind passes.", m->ahead_seconds);
}

static void put_requests(const so_metrics *m, so_buf *b) {
    static const so_finish ends[] = {SO_FINISH_STOP, SO_FINISH_LENGTH, SO_FINISH_CANCELLED,
                                     SO_FINISH_ERROR};
    head(b, "sooth_requests_finished_total", "counter", "Answers by the reason they ended.");
    for (size_t i = 0; i < SO_LEN(ends); i++)
        so_buf_printf(b, "sooth_requests_finished_total{reason=\"%s\"} %llu\n",
                      so_finish_name(ends[i]), (unsigned long long)m->finished[ends[i]]);
    head(b, "sooth_requests_refused_total", "counter",
         "Requests refused before they reached the engine.");
    for (int i = 0; i < MAX_REFUSED && m->refused[i].n; i++)
        so_buf_printf(b, "sooth_requests_refused_total{reason=\"%s\"} %llu\n", m->refused[i].what,
                      (unsigned long long)m->refused[i].n);
    one(b, "sooth_prompt_tokens_total", "counter", "Prompt tokens of finished answers.",
        (double)m->prompt_tokens);
    one(b, "sooth_generation_tokens_total", "counter", "Generated tokens.",
        (double)m->generated_tokens);
    put_histogram(b, "sooth_queue_seconds", "Time from submission to admission into the batch.",
                  &m->queue);
    put_histogram(b, "sooth_time_to_first_token_seconds",
                  "Time from the request's arrival to its first token.", &m->first);
    put_histogram(b, "sooth_inter_token_seconds",
                  "Time per token after the first pass; tokens of one pass share its time.",
                  &m->token);
    put_histogram(b, "sooth_request_seconds", "Time from the request's arrival to its end.",
                  &m->request);
}

static void put_engine(const so_metrics *m, so_buf *b) {
    one(b, "sooth_engine_steps_total", "counter", "Forward passes of the target.",
        (double)m->steps);
    one(b, "sooth_engine_pass_seconds_total", "counter", "Time in forward passes.",
        m->pass_seconds);
    one(b, "sooth_engine_draft_seconds_total", "counter", "Time in drafters.", m->draft_seconds);
    put_histogram(b, "sooth_engine_batch_rows", "Rows (tokens) per forward pass.", &m->rows);
}

static void put_http(const so_metrics *m, so_buf *b) {
    head(b, "sooth_http_requests_total", "counter", "HTTP requests by path and status.");
    for (int i = 0; i < MAX_HTTP && m->http[i].n; i++)
        so_buf_printf(b, "sooth_http_requests_total{path=\"%s\",code=\"%d\"} %llu\n",
                      m->http[i].what, m->http[i].status, (unsigned long long)m->http[i].n);
    put_histogram(b, "sooth_http_request_seconds",
                  "Time from a request's head to the last byte of its response.", &m->http_seconds);
}

static double resident_bytes(void) {
    FILE *f = fopen("/proc/self/statm", "r");
    long size = 0, resident = 0;
    if (f && fscanf(f, "%ld %ld", &size, &resident) != 2)
        resident = 0;
    if (f)
        fclose(f);
    return (double)resident * (double)sysconf(_SC_PAGESIZE);
}

static void put_process(const so_metrics *m, so_buf *b) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    one(b, "process_resident_memory_bytes", "gauge", "Resident memory.", resident_bytes());
    one(b, "process_start_time_seconds", "gauge", "Start time of the server since the epoch.",
        m->started_s);
    one(b, "process_cpu_seconds_total", "counter", "Processor time, user and system.",
        (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
            (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6);
}

static void put_cache(const so_engine_stats *e, so_buf *b) {
    one(b, "sooth_kv_pages", "gauge", "Pages of the KV cache.", e->pages_total);
    one(b, "sooth_kv_pages_used", "gauge", "Pages in use by running answers.", e->pages_used);
    one(b, "sooth_kv_pages_cached", "gauge", "Pages kept only for the prefix cache.",
        e->pages_cached);
    one(b, "sooth_kv_usage_ratio", "gauge", "Fraction of the pages in use by running answers.",
        e->pages_total ? (double)e->pages_used / e->pages_total : 0);
    one(b, "sooth_prefix_cache_queries_total", "counter",
        "Prompt tokens looked up in the prefix cache.", (double)e->prefix_queried);
    one(b, "sooth_prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.",
        (double)e->prefix_hits);
    one(b, "sooth_preemptions_total", "counter",
        "Times a running answer was preempted, to be resumed later.", (double)e->preemptions);
}

static void put_device(const so_gauges *g, so_buf *b) {
    if (g->device) {
        head(b, "sooth_device_info", "gauge", "The device that computes the model's passes.");
        so_buf_append_c(b, "sooth_device_info{name=\"");
        put_label(b, g->device);
        so_buf_append_c(b, "\"} 1\n");
    }
    if (g->device_total == 0)
        return;
    one(b, "sooth_device_memory_bytes", "gauge", "The device's own memory.",
        (double)g->device_total);
    one(b, "sooth_device_memory_free_bytes", "gauge",
        "What is free of it, as seen after a step, at most once a second.", (double)g->device_free);
}

static void put_gauges(const so_gauges *g, so_buf *b) {
    static const char *const states[] = {"loading", "ready", "draining", "failed", "lost"};
    head(b, "sooth_build_info", "gauge", "Version and model.");
    so_buf_printf(b, "sooth_build_info{version=\"%s\",model=\"", g->version);
    put_label(b, g->model);
    so_buf_append_c(b, "\"} 1\n");
    head(b, "sooth_state", "gauge", "1 for the current state of the server.");
    for (size_t i = 0; i < SO_LEN(states); i++)
        so_buf_printf(b, "sooth_state{state=\"%s\"} %d\n", states[i],
                      strcmp(states[i], g->state) == 0);
    one(b, "sooth_requests_running", "gauge", "Answers in the batch.", g->running);
    one(b, "sooth_requests_waiting", "gauge", "Answers waiting for admission.", g->waiting);
    one(b, "sooth_engine_slots", "gauge", "Largest number of answers in the batch (--parallel).",
        g->slots);
    one(b, "sooth_http_connections", "gauge", "Open connections.", g->connections);
    put_device(g, b);
    put_cache(&g->engine, b);
}

void so_metrics_write(so_metrics *m, const so_gauges *g, so_buf *out) {
    put_gauges(g, out);
    pthread_mutex_lock(&m->lock);
    put_requests(m, out);
    put_speculation(m, out);
    put_ahead(m, out);
    put_engine(m, out);
    put_http(m, out);
    put_process(m, out);
    pthread_mutex_unlock(&m->lock);
}

/* `sooth trace FILE… --svg OUT`: the timeline of runs, one pair of lanes per file.
 *
 *   a.jsonl   draft   ▂▂  ▂▂  ▂▂           drafting, then one verifying pass of the target
 *                       ▂▂▂ ▂▂▂            with async(X): drafting ahead during a pass, in another colour
 *             target    ████  ████  ████   the box of a step shows the number of emitted tokens
 *             an encoder-decoder model and its draft begin with boxes of their own, for the encoders
 *
 * All files have the same scale, so that runs with different draft lengths, and plain decoding, can
 * be compared by eye (as in figure 5 of Leviathan et al.). A summary of each run is printed in any
 * case. Trace files are untrusted input: every line is checked, and sizes are limited. Main thread
 * only. */
#include "cli/trace.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "cli/options.h"
#include "cli/report.h"
#include "format/describe.h"
#include "token/utf8.h"

enum { MAX_BYTES = 256 << 20, MAX_STEPS = 1 << 20, LANE = 22, ROW = 74, LEFT = 150, WIDTH = 1100 };

void so_trace_write(void *user, const so_step_info *s) {
    fprintf(user,
            "{\"step\":%lld,\"t_ms\":%.3f,\"encode_ms\":%.4f,\"draft_ms\":%.4f,"
            "\"draft_encode_ms\":%.4f,\"pass_ms\":%.4f,\"host_ms\":%.4f,"
            "\"rows\":%d,\"requests\":%d,\"expected_tokens\":%.4f,\"expected_ms\":%.4f,"
            "\"plain_ms\":%.4f,\"probe\":%s,\"drafted\":%d,\"tested\":%d,\"accepted\":%d,"
            "\"emitted\":%d,\"ended\":%d,\"looked_up\":%d,\"hits\":%d,\"ahead_ms\":%.4f}\n",
            (long long)s->step, s->t_ms, s->encode_ms, s->draft_ms, s->draft_encode_ms, s->pass_ms,
            s->host_ms, s->n_rows, s->n_requests, s->plan.tokens, s->plan.ms, s->plan.plain_ms,
            s->plan.probe ? "true" : "false", s->drafted, s->tested, s->accepted, s->emitted,
            s->ended, s->looked_up, s->hits, s->ahead_ms);
}

void so_trace_write_round(FILE *f, const so_round *round) {
    const so_tree *t = round->tree;
    const so_verdict *v = round->verdict;
    const char *fate[SO_TREE_MAX];
    if (t->n_nodes < 2)
        return;
    for (int i = 0; i < t->n_nodes; i++)
        fate[i] = "untested";
    for (int i = 0; i < v->n_tested; i++)
        fate[t->proposals[v->tested[i]].child] = "rejected";
    for (int i = 0; i < v->n_accepted; i++)
        fate[v->path[i]] = "accepted";
    fprintf(f, "{\"round\":%d,\"tree\":[", round->index);
    for (int i = 1; i < t->n_nodes; i++) {
        const so_node *n = &t->nodes[i];
        fprintf(f, "%s{\"token\":%d,\"parent\":%d,\"chance\":", i > 1 ? "," : "", (int)n->token,
                n->parent - 1);
        fprintf(f, n->chance >= 0 ? "%.4f" : "null", (double)n->chance);
        fprintf(f, ",\"fate\":\"%s\"}", fate[i]);
    }
    fprintf(f, "]}\n");
}

/* --- reading --- */

typedef struct step {
    double t_ms, encode_ms, draft_ms, draft_encode_ms, pass_ms, host_ms, ahead_ms;
    int looked_up, hits;
    int requests, drafted, accepted, emitted, ended;
} step;

typedef struct run_trace {
    const char *path;
    step *steps;
    int n;
    double ms, encode_ms, draft_ms, pass_ms, ahead_ms; /* of all steps with a decoding request */
    int64_t looked_up, hits;
    int64_t rounds; /* sum of their decoding requests */
    int64_t drafted, accepted, emitted, ended;
} run_trace;

static bool get_ms(const json_t *o, const char *key, double *out) {
    const json_t *v = json_object_get(o, key);
    *out = json_number_value(v);
    return json_is_number(v) && *out >= 0 && *out < 1e12;
}

static bool get_count(const json_t *o, const char *key, int *out) {
    const json_t *v = json_object_get(o, key);
    json_int_t i = json_integer_value(v);
    *out = (int)i;
    return json_is_integer(v) && i >= 0 && i < 1 << 24;
}

static bool read_step(const json_t *o, step *s) {
    return get_ms(o, "t_ms", &s->t_ms) && get_ms(o, "draft_ms", &s->draft_ms) &&
           get_ms(o, "pass_ms", &s->pass_ms) && get_ms(o, "host_ms", &s->host_ms) &&
           get_count(o, "requests", &s->requests) && get_count(o, "drafted", &s->drafted) &&
           get_count(o, "accepted", &s->accepted) && get_count(o, "emitted", &s->emitted) &&
           get_count(o, "ended", &s->ended) && get_count(o, "looked_up", &s->looked_up) &&
           get_count(o, "hits", &s->hits) && get_ms(o, "ahead_ms", &s->ahead_ms) &&
           get_ms(o, "encode_ms", &s->encode_ms) &&
           get_ms(o, "draft_encode_ms", &s->draft_encode_ms) && s->draft_encode_ms <= s->draft_ms;
}

static void add_step(run_trace *t, const step *s) {
    if (t->n % 1024 == 0)
        t->steps = so_realloc(t->steps, (size_t)(t->n + 1024) * sizeof *t->steps);
    t->steps[t->n++] = *s;
    t->ms += s->encode_ms + s->draft_ms + s->pass_ms + s->host_ms;
    t->encode_ms += s->encode_ms;
    t->draft_ms += s->draft_ms;
    t->pass_ms += s->pass_ms;
    t->drafted += s->drafted;
    t->accepted += s->accepted;
    t->emitted += s->emitted;
    t->ended += s->ended;
    t->ahead_ms += s->ahead_ms;
    t->looked_up += s->looked_up;
    t->hits += s->hits;
    t->rounds += s->requests;
}

static int read_trace(const char *path, run_trace *t, so_err *err) {
    so_buf text = {.max = MAX_BYTES};
    int rc = so_file_read(path, MAX_BYTES, &text, err), line = 0;
    t->path = path;
    const char *at = so_buf_str(&text).ptr, *end = at + text.len;
    while (rc == SO_OK && at < end) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        stop = stop ? stop : end;
        json_error_t je;
        json_t *o = json_loadb(at, (size_t)(stop - at), 0, &je);
        step s = {0}; /* requests 0: prefill only */
        line++;
        if (o && json_is_array(json_object_get(o, "tree"))) /* of a round */
            s.requests = -1;
        else if (!o || !read_step(o, &s))
            rc = so_err_set(err, SO_EFORMAT, "%s:%d: not a step of a trace of this version", path,
                            line);
        else if (t->n == MAX_STEPS)
            rc = so_err_set(err, SO_ELIMIT, "%s: more than %d steps", path, MAX_STEPS);
        else if (s.requests > 0)
            add_step(t, &s);
        json_decref(o);
        at = stop + 1;
    }
    so_buf_free(&text);
    if (rc == SO_OK && t->n == 0)
        rc = so_err_set(err, SO_EFORMAT, "%s: the trace has no step that emitted a token", path);
    return rc;
}

/* --- drawing --- */

static void draw_box(FILE *f, double x, double y, double w, const char *fill) {
    fprintf(f,
            "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%d\" fill=\"%s\" "
            "stroke=\"#fff\" stroke-width=\"0.5\"/>\n",
            x, y, w, LANE, fill);
}

/* A text of any bytes, such as a file name; XML must be UTF-8. */
static void draw_label(FILE *f, double x, double y, const char *text) {
    so_buf whole = {0};
    so_utf8_repair(so_str_c(text), &whole);
    fprintf(f, "<text x=\"%.2f\" y=\"%.2f\">", x, y);
    for (const char *p = so_buf_str(&whole).ptr; *p; p++) {
        if (*p == '<' || *p == '&')
            fprintf(f, "&#%d;", *p);
        else if ((unsigned char)*p >= ' ')
            fputc(*p, f);
    }
    fputs("</text>\n", f);
    so_buf_free(&whole);
}

static void draw_run(FILE *f, const run_trace *t, double top, double scale) {
    const char *slash = strrchr(t->path, '/');
    double x = LEFT;
    char text[64];
    draw_label(f, 8, top + 14, slash ? slash + 1 : t->path);
    draw_label(f, LEFT - 50, top + 14, "draft");
    draw_label(f, LEFT - 50, top + LANE + 16, "target");
    for (int i = 0; i < t->n; i++) {
        const step *s = &t->steps[i];
        double encode = s->draft_encode_ms * scale;
        if (s->encode_ms > 0)
            draw_box(f, x, top + LANE + 2, s->encode_ms * scale, "#c0504d");
        x += s->encode_ms * scale;
        if (encode > 0)
            draw_box(f, x, top, encode, "#e08a5f");
        if (s->draft_ms > 0 && s->drafted > 0)
            draw_box(f, x + encode, top, s->draft_ms * scale - encode, "#e8b73a");
        x += s->draft_ms * scale;
        double w = (s->pass_ms + s->host_ms) * scale;
        if (i + 1 < t->n && s[1].ahead_ms > 0) /* known in the next step, which looks it up */
            draw_box(f, x, top, SO_MIN(s[1].ahead_ms * scale, w),
                     s[1].hits > 0 ? "#8a5fb5" : "#c9b8dd");
        draw_box(f, x, top + LANE + 2, w, s->accepted > 0 ? "#2f7d4f" : "#4a6fa5");
        snprintf(text, sizeof text, "%d", s->emitted);
        if (w > 14)
            draw_label(f, x + w / 2 - 4, top + LANE + 17, text);
        x += w;
    }
    snprintf(text, sizeof text, "%lld tokens, %d passes, %.1f ms", (long long)t->emitted, t->n,
             t->ms);
    draw_label(f, LEFT, top + 2 * LANE + 18, text);
}

static int draw(const char *path, const run_trace *runs, int n, so_err *err) {
    FILE *f = fopen(path, "w");
    double longest = 0;
    if (!f)
        return so_err_set(err, SO_EIO, "%s: cannot open for writing", path);
    for (int i = 0; i < n; i++)
        longest = SO_MAX(longest, runs[i].ms);
    fprintf(f,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
            "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" "
            "fill=\"#fff\"/>\n",
            LEFT + WIDTH + 20, n * ROW + 20);
    for (int i = 0; i < n; i++)
        draw_run(f, &runs[i], 10 + (double)i * ROW, longest > 0 ? WIDTH / longest : 0);
    fputs("</svg>\n", f);
    bool bad = ferror(f) != 0;
    bad |= fclose(f) != 0;
    return bad ? so_err_set(err, SO_EIO, "%s: writing failed", path) : SO_OK;
}

static void print_run(const run_trace *t, bool json) {
    double per_pass =
        (double)(t->emitted + t->ended) / (double)t->rounds; /* as in engine/counts.c */
    if (json) {
        json_t *hit_rate =
            t->looked_up > 0 ? json_real((double)t->hits / (double)t->looked_up) : json_null();
        so_report_print_json(
            json_pack("{s:o, s:i, s:I, s:f, s:f, s:f, s:f, s:f, s:I, s:I, s:f, s:o}", "file",
                      so_describe_json_text(so_str_c(t->path)), "passes", t->n, "tokens",
                      (json_int_t)t->emitted, "tokens_per_pass", per_pass, "ms", t->ms, "encode_ms",
                      t->encode_ms, "draft_ms", t->draft_ms, "pass_ms", t->pass_ms, "drafted",
                      (json_int_t)t->drafted, "accepted", (json_int_t)t->accepted, "ahead_ms",
                      t->ahead_ms, "hit_rate", hit_rate));
        return;
    }
    printf("%s: %lld tokens in %d passes (%.2f per pass), %.1f ms: drafting %.1f, passes %.1f; "
           "%lld guesses, %lld accepted\n",
           t->path, (long long)t->emitted, t->n, per_pass, t->ms, t->draft_ms, t->pass_ms,
           (long long)t->drafted, (long long)t->accepted);
    if (t->encode_ms > 0)
        printf("  reading the source: %.1f ms\n", t->encode_ms);
    if (t->looked_up > 0)
        printf("  drafting ahead: %.1f ms, %lld of %lld rounds found their draft\n", t->ahead_ms,
               (long long)t->hits, (long long)t->looked_up);
}

int so_cmd_trace(int argc, char **argv) {
    so_args a;
    so_err err = {0};
    if (!so_args_parse(&a, SO_CMD_TRACE, argc, argv))
        return a.status;
    run_trace *runs = SO_NEW_N(run_trace, a.n_pos);
    int rc = SO_OK;
    for (int i = 0; i < a.n_pos && rc == SO_OK; i++)
        rc = read_trace(a.pos[i], &runs[i], &err);
    if (rc == SO_OK && so_args_has(&a, SO_OPT_SVG))
        rc = draw(so_args_str(&a, SO_OPT_SVG, ""), runs, a.n_pos, &err);
    for (int i = 0; i < a.n_pos && rc == SO_OK; i++)
        print_run(&runs[i], so_args_has(&a, SO_OPT_JSON));
    int status = rc == SO_OK ? 0 : so_args_fail(&a, &err);
    for (int i = 0; i < a.n_pos; i++)
        free(runs[i].steps);
    free(runs);
    so_args_free(&a);
    return status;
}

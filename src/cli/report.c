/* One place for the names of result fields, so that run, bench and demo agree (and the server can
 * be compared with them). Rates are null where nothing was measured, never 0 or NaN. */
#include "cli/report.h"

#include <stdio.h>
#include <string.h>

#include "token/utf8.h"

static json_t *logprob_json(const so_tokenizer *t, const so_logprob *p) {
    so_str bytes = so_tokenizer_text(t, p->token);
    so_buf text = {0};
    json_t *list = json_array();
    so_utf8_repair(bytes, &text);
    for (size_t i = 0; i < bytes.len; i++)
        json_array_append_new(list, json_integer((unsigned char)bytes.ptr[i]));
    json_t *o =
        json_pack("{s:o, s:i, s:f, s:o}", "token", json_stringn(so_buf_str(&text).ptr, text.len),
                  "id", (int)p->token, "logprob", (double)p->logprob, "bytes", list);
    so_buf_free(&text);
    return o;
}

static void add_logprobs(so_report *r, const so_request *req, const so_tokenizer *t) {
    int n, n_each;
    const so_logprob *p = so_request_logprobs(req, &n_each);
    so_request_output(req, &n);
    if (!p)
        return;
    r->logprobs = r->logprobs ? r->logprobs : json_array();
    for (int i = 0; i < n; i++, p += n_each) {
        json_t *o = logprob_json(t, p), *top = json_array();
        for (int k = 1; k < n_each; k++)
            json_array_append_new(top, logprob_json(t, p + k));
        json_object_set_new(o, "top_logprobs", top);
        json_array_append_new(r->logprobs, o);
    }
}

void so_report_add(so_report *r, const so_request *req, const so_tokenizer *t, so_str text) {
    int n;
    const int32_t *ids = so_request_output(req, &n);
    if (r->stats.rounds > 0)
        so_buf_append_char(&r->text, '\n');
    so_buf_append_str(&r->text, text);
    so_tokens_append(&r->tokens, ids, (size_t)n);
    add_logprobs(r, req, t);
    r->finish = so_request_finish(req);
    r->seed = so_request_seed(req);
    so_stats_add(&r->stats, so_request_get_stats(req));
    snprintf(r->drafter, sizeof r->drafter, "%s", so_request_drafter(req));
    r->verify = so_request_verify(req, &r->lenience);
}

void so_report_add_stats(so_report *r, const so_report *from) {
    so_stats_add(&r->stats, &from->stats);
    memcpy(r->drafter, from->drafter, sizeof r->drafter);
    r->verify = from->verify;
}

void so_report_free(so_report *r) {
    so_buf_free(&r->text);
    so_tokens_free(&r->tokens);
    json_decref(r->logprobs);
}

static json_t *rate_json(double x) { return x >= 0 ? json_real(x) : json_null(); }

static json_t *timings_json(const so_request_stats *s) {
    return json_pack(
        "{s:i, s:f, s:i, s:f, s:o, s:i, s:i}", "prompt_n", s->prompt_n, "prompt_ms", s->prompt_ms,
        "predicted_n", s->predicted_n, "predicted_ms", s->predicted_ms, "predicted_per_second",
        rate_json(s->predicted_ms > 0 ? 1000.0 * s->predicted_n / s->predicted_ms : -1), "draft_n",
        s->draft_n, "draft_n_accepted", s->draft_n_accepted);
}

static json_t *per_depth_json(const so_request_stats *s) {
    json_t *list = json_array();
    for (int i = 0; i < SO_STATS_DEPTHS && s->per_depth[i].tested > 0; i++)
        json_array_append_new(list, json_pack("{s:i, s:i}", "tested", s->per_depth[i].tested,
                                              "accepted", s->per_depth[i].accepted));
    return list;
}

/* "lenient=0.3" says by itself that the text is not exact; `lossy` says it to programs. */
static json_t *verify_json(const so_report *r) {
    return r->verify == SO_VERIFY_LENIENT ? json_sprintf("lenient=%g", r->lenience)
                                          : json_string(so_verify_mode_name(r->verify));
}

/* Without a drafter every round makes one token, and nothing was tested. */
static json_t *spec_json(const so_report *r) {
    const so_request_stats *s = &r->stats;
    bool none = strcmp(r->drafter, "none") == 0;
    so_rates x = so_stats_rates(s);
    json_t *o = json_pack("{s:s, s:o, s:i, s:o, s:o, s:o, s:o, s:o, s:f, s:f, s:o}", "drafter",
                          none ? "none" : r->drafter, "verify", none ? json_null() : verify_json(r),
                          "rounds", s->rounds, "tokens_per_pass", rate_json(x.tokens_per_pass),
                          "mean_accepted", rate_json(x.mean_accepted), "alpha", rate_json(x.alpha),
                          "acceptance_rate", rate_json(x.acceptance_rate), "round_rate",
                          rate_json(x.round_rate), "draft_ms", s->draft_ms, "verify_ms",
                          s->verify_ms, "per_depth", per_depth_json(s));
    if (!none && r->verify == SO_VERIFY_LENIENT && r->lenience < 1)
        json_object_set_new(o, "lossy", json_true());
    return o;
}

json_t *so_report_json(const so_report *r) {
    so_str text = so_buf_str(&r->text);
    json_t *ids = json_array();
    for (size_t i = 0; i < r->tokens.len; i++)
        json_array_append_new(ids, json_integer(r->tokens.ids[i]));
    json_t *o =
        json_pack("{s:o, s:o, s:s, s:I, s:o, s:o}", "text", json_stringn(text.ptr, text.len),
                  "tokens", ids, "finish_reason", so_finish_name(r->finish), "seed",
                  (json_int_t)r->seed, "timings", timings_json(&r->stats), "spec", spec_json(r));
    if (r->logprobs)
        json_object_set_new(o, "logprobs", json_pack("{s:O}", "content", r->logprobs));
    return o;
}

void so_report_print_json(json_t *o) {
    json_dumpf(o, stdout, JSON_COMPACT | JSON_REAL_PRECISION(9));
    putchar('\n');
    fflush(stdout);
    json_decref(o);
}

static void print_guesses(const so_report *r) {
    const so_request_stats *s = &r->stats;
    static const char *const notes[] = {[SO_VERIFY_MATCH] = "",
                                        [SO_VERIFY_REJECT] = ", reject",
                                        [SO_VERIFY_LENIENT] = ", lenient (lossy)"};
    if (s->draft_n > 0)
        fprintf(stderr,
                "%s%s: %d passes, %.2f tokens per pass; %d guesses, %d tested, %d accepted (alpha "
                "%.2f)\n",
                r->drafter, notes[r->verify], s->rounds, so_stats_rates(s).tokens_per_pass,
                s->draft_n, s->tested_n, s->draft_n_accepted,
                s->tested_n ? so_stats_rates(s).alpha : 0);
}

void so_report_print_timings(const so_report *r) {
    const so_request_stats *s = &r->stats;
    fprintf(stderr,
            "prompt: %d tokens, %.0f ms (%.1f/s); answer: %d tokens, %.0f ms (%.1f/s), %s; seed "
            "%llu\n",
            s->prompt_n, s->prompt_ms, s->prompt_ms > 0 ? 1000.0 * s->prompt_n / s->prompt_ms : 0,
            s->predicted_n, s->predicted_ms,
            s->predicted_ms > 0 ? 1000.0 * s->predicted_n / s->predicted_ms : 0,
            so_finish_name(r->finish), (unsigned long long)r->seed);
    print_guesses(r);
}

void so_report_print_total(const so_report *r, int n_prompts, double ms) {
    const so_request_stats *s = &r->stats;
    fprintf(stderr, "total: %d prompts, %d + %d tokens in %.0f ms (%.1f/s)\n", n_prompts,
            s->prompt_n, s->predicted_n, ms, ms > 0 ? 1000.0 * s->predicted_n / ms : 0);
    print_guesses(r);
}

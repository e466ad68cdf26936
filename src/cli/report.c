/* Sums up the turns of a prompt and prints the result as JSON or as text. engine/figures.c has the
 * names of the fields. Main thread only. */
#include "cli/report.h"

#include <stdio.h>

#include "cli/view.h"

static void add_logprobs(so_report *r, const so_request *req, const so_tokenizer *t) {
    int n, n_each;
    const so_logprob *p = so_request_logprobs(req, &n_each);
    so_request_output(req, &n);
    if (!p)
        return;
    r->logprobs = r->logprobs ? r->logprobs : json_array();
    for (int i = 0; i < n; i++, p += n_each)
        json_array_append_new(r->logprobs, so_figures_logprobs(t, p, n_each));
}

static json_t *best_json(const so_request *req, const so_tokenizer *t) {
    json_t *list = json_array();
    int n_each;
    so_request_logprobs(req, &n_each);
    for (int i = 0; i < so_request_n_best(req); i++) {
        const so_beam_result *b = so_request_result(req, i);
        so_str text = so_buf_str(&b->text);
        json_t *ids = json_array(), *logprobs = json_array();
        for (int k = 0; k < b->n_tokens; k++)
            json_array_append_new(ids, json_integer(b->tokens[k]));
        for (int k = 0; b->logprobs && k < b->n_tokens; k++)
            json_array_append_new(logprobs,
                                  so_figures_logprobs(t, b->logprobs + (size_t)k * n_each, n_each));
        json_t *o = json_pack("{s:o, s:o, s:f, s:f, s:s}", "text", json_stringn(text.ptr, text.len),
                              "tokens", ids, "score", b->score, "logprob", b->sum, "finish_reason",
                              so_finish_name(b->finish));
        if (b->logprobs)
            json_object_set_new(o, "logprobs", json_pack("{s:O}", "content", logprobs));
        json_decref(logprobs);
        json_array_append_new(list, o);
    }
    return list;
}

void so_report_add(so_report *r, const so_request *req, const so_tokenizer *t, so_str text) {
    int n;
    const int32_t *ids = so_request_output(req, &n);
    if (r->stats.rounds > 0)
        so_buf_append_char(&r->text, '\n');
    so_buf_append_str(&r->text, text);
    so_tokens_append(&r->tokens, ids, (size_t)n);
    add_logprobs(r, req, t);
    json_decref(r->best);
    r->best = so_request_beam_width(req) > 0 ? best_json(req, t) : NULL;
    r->finish = so_request_finish(req);
    r->seed = so_request_seed(req);
    r->has_nonce = so_request_nonce(req, &r->nonce);
    so_stats_add(&r->stats, so_request_get_stats(req));
    r->label = so_figures_label(req);
}

void so_report_add_stats(so_report *r, const so_report *from) {
    so_stats_add(&r->stats, &from->stats);
    r->label = from->label;
}

void so_report_free(so_report *r) {
    so_buf_free(&r->text);
    so_tokens_free(&r->tokens);
    json_decref(r->logprobs);
    json_decref(r->best);
}

json_t *so_report_json(const so_report *r) {
    so_str text = so_buf_str(&r->text);
    json_t *ids = json_array();
    for (size_t i = 0; i < r->tokens.len; i++)
        json_array_append_new(ids, json_integer(r->tokens.ids[i]));
    json_t *o =
        json_pack("{s:o, s:o, s:s, s:I, s:o, s:o, s:o}", "text", json_stringn(text.ptr, text.len),
                  "tokens", ids, "finish_reason", so_finish_name(r->finish), "seed",
                  (json_int_t)r->seed, "nonce", so_figures_nonce(r->has_nonce, r->nonce), "timings",
                  so_figures_timings(&r->stats), "spec", so_figures_spec(&r->label, &r->stats));
    if (r->logprobs)
        json_object_set_new(o, "logprobs", json_pack("{s:O}", "content", r->logprobs));
    if (r->best)
        json_object_set(o, "n_best", r->best);
    return o;
}

void so_report_print_best(const so_report *r) {
    size_t i;
    json_t *o;
    json_array_foreach(r->best, i, o) {
        json_t *text = json_object_get(o, "text");
        printf("# %zu: score %.6f, %s\n", i + 1, json_number_value(json_object_get(o, "score")),
               json_string_value(json_object_get(o, "finish_reason")));
        so_view_print((so_str){json_string_value(text), json_string_length(text)});
        putchar('\n');
    }
}

void so_report_print_json(json_t *o) {
    json_dumpf(o, stdout, JSON_COMPACT | JSON_REAL_PRECISION(9));
    putchar('\n');
    fflush(stdout);
    json_decref(o);
}

static void print_guesses(const so_report *r) {
    const so_request_stats *s = &r->stats;
    char verify[SO_VERIFY_TEXT];
    so_verify_mode_print(r->label.verify, r->label.lenience, verify);
    if (s->draft_n > 0)
        fprintf(
            stderr,
            "%s, %s: %d passes, %.2f tokens per pass; %d guesses, %d tested, %d accepted (alpha "
            "%.2f)\n",
            r->label.drafter, verify, s->rounds, so_stats_rates(s).tokens_per_pass, s->draft_n,
            s->tested_n, s->draft_n_accepted, s->tested_n ? so_stats_rates(s).alpha : 0);
}

const char *so_report_rate(double rate, char out[SO_RATE_TEXT]) {
    out[0] = '\0';
    if (rate >= 0)
        snprintf(out, SO_RATE_TEXT, " (%.1f/s)", rate);
    return out;
}

void so_report_print_timings(const so_report *r) {
    const so_request_stats *s = &r->stats;
    char rate[SO_RATE_TEXT];
    fprintf(
        stderr, "prompt: %d tokens, %.0f ms (%.1f/s); answer: %d tokens, %.0f ms%s, %s; seed %llu",
        s->prompt_n, s->prompt_ms, s->prompt_ms > 0 ? 1000.0 * s->prompt_n / s->prompt_ms : 0,
        s->predicted_n, s->predicted_ms, so_report_rate(so_stats_rates(s).tokens_per_second, rate),
        so_finish_name(r->finish), (unsigned long long)r->seed);
    if (r->has_nonce)
        fprintf(stderr, ", nonce %llu", (unsigned long long)r->nonce);
    fputc('\n', stderr);
    print_guesses(r);
}

void so_report_print_total(const so_report *r, int n_prompts, double ms) {
    const so_request_stats *s = &r->stats;
    fprintf(stderr, "total: %d prompts, %d + %d tokens in %.0f ms (%.1f/s)\n", n_prompts,
            s->prompt_n, s->predicted_n, ms, ms > 0 ? 1000.0 * s->predicted_n / ms : 0);
    print_guesses(r);
}

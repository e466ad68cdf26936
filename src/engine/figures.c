/* The only place that names the fields of results, so that run, bench, demo and the server
 * agree. */
#include "engine/figures.h"

#include <stdio.h>
#include <string.h>

#include "format/describe.h"
#include "token/utf8.h"

so_spec_label so_figures_label(const so_request *r) {
    so_spec_label l;
    snprintf(l.drafter, sizeof l.drafter, "%s", so_request_drafter(r));
    l.verify = so_request_verify(r, &l.lenience);
    return l;
}

json_t *so_figures_nonce(bool has, uint64_t nonce) {
    return has ? json_integer((json_int_t)nonce) : json_null();
}

static json_t *rate_json(double x) { return x >= 0 ? json_real(x) : json_null(); }

json_t *so_figures_timings(const so_request_stats *s) {
    return json_pack("{s:i, s:i, s:f, s:f, s:o, s:i, s:f, s:o, s:i, s:i}", "prompt_n", s->prompt_n,
                     "cache_n", s->cached_n, "queue_ms", s->queue_ms, "prompt_ms", s->prompt_ms,
                     "ttft_ms", rate_json(s->predicted_n > 0 ? s->ttft_ms : -1), "predicted_n",
                     s->predicted_n, "predicted_ms", s->predicted_ms, "predicted_per_second",
                     rate_json(so_stats_rates(s).tokens_per_second), "draft_n", s->draft_n,
                     "draft_n_accepted", s->draft_n_accepted);
}

static json_t *per_depth_json(const so_request_stats *s) {
    json_t *list = json_array();
    for (int i = 0; i < SO_STATS_DEPTHS && s->per_depth[i].tested > 0; i++)
        json_array_append_new(list, json_pack("{s:i, s:i}", "tested", s->per_depth[i].tested,
                                              "accepted", s->per_depth[i].accepted));
    return list;
}

/* "lenient=0.3" tells people that the text is not exact; the field `lossy` tells programs. */
static json_t *verify_json(const so_spec_label *who) {
    const char *name = so_verify_mode_name(who->verify);
    bool has_number = who->verify == SO_VERIFY_LENIENT || who->verify == SO_VERIFY_TYPICAL;
    return has_number ? json_sprintf("%s=%g", name, who->lenience) : json_string(name);
}

/* hidden: the part of all drafting time that the target did not wait for. */
static json_t *async_json(const so_request_stats *s) {
    const so_async_counts *a = &s->async;
    json_t *ranks = json_array();
    double all_ms = a->worker_ms + s->draft_ms;
    for (int i = 0; i < SO_ASYNC_RANKS; i++)
        json_array_append_new(ranks, json_integer(a->by_rank[i]));
    return json_pack("{s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:o, s:f, s:o}", "rounds",
                     a->rounds, "hits", a->hits, "late", a->late, "absent", a->absent, "skipped",
                     a->skipped, "off", a->off, "outcomes", a->outcomes, "drafted", a->drafted,
                     "served", a->served, "hits_by_rank", ranks, "worker_ms", a->worker_ms,
                     "hidden", rate_json(all_ms > 0 ? a->worker_ms / all_ms : -1));
}

/* Without a drafter every round decides one token and no guess is tested. */
json_t *so_figures_spec(const so_spec_label *who, const so_request_stats *s) {
    bool none = strcmp(who->drafter, "none") == 0;
    so_rates x = so_stats_rates(s);
    json_t *o =
        json_pack("{s:o, s:o, s:i, s:o, s:o, s:o, s:o, s:o, s:f, s:f, s:o}", "drafter",
                  so_describe_json_text(so_str_c(who->drafter)), "verify",
                  none ? json_null() : verify_json(who), "rounds", s->rounds, "tokens_per_pass",
                  rate_json(x.tokens_per_pass), "mean_accepted", rate_json(x.mean_accepted),
                  "alpha", rate_json(x.alpha), "acceptance_rate", rate_json(x.acceptance_rate),
                  "round_rate", rate_json(x.round_rate), "draft_ms", s->draft_ms, "verify_ms",
                  s->verify_ms, "per_depth", per_depth_json(s));
    if (s->async.rounds + s->async.skipped + s->async.off > 0) {
        json_object_set_new(o, "hit_rate", rate_json(x.hit_rate));
        json_object_set_new(o, "async", async_json(s));
    }
    if (!none && so_verify_mode_is_lossy(who->verify, who->lenience))
        json_object_set_new(o, "lossy", json_true());
    return o;
}

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

json_t *so_figures_logprobs(const so_tokenizer *t, const so_logprob *p, int n_each) {
    json_t *o = logprob_json(t, p), *top = json_array();
    for (int k = 1; k < n_each; k++)
        json_array_append_new(top, logprob_json(t, p + k));
    json_object_set_new(o, "top_logprobs", top);
    return o;
}

/* Requests, admission and the step. See engine.h for the shape of a step.
 *
 * Invariants: a running request holds a sequence whose committed length is below its token count
 * (the root is never in the cache), and a promise of pages for its whole life, so that a pass never
 * runs out of cache half way: admission is the only place that can say "not now". Requests are
 * admitted in the order of submission. After creation, submission and admission a step
 * allocates nothing.
 *
 * Refuses: to preempt, to reorder, to look at randomness other than through keys. */
#include <stdlib.h>

#include "base/clock.h"
#include "base/log.h"
#include "engine/impl.h"

/* --- creation --- */

void so_engine_defaults(const so_model *m, so_engine_opts *o) {
    *o = (so_engine_opts){.n_ctx = SO_MIN(4096, so_model_hparams(m)->n_ctx_train),
                          .n_parallel = 1,
                          .n_batch = 256,
                          .kv_dtype = SO_DTYPE_F16,
                          .draft_temp = -1};
}

static int check_opts(const so_model *m, const so_engine_opts *o, so_err *err) {
    int most = so_model_hparams(m)->n_ctx_train;
    if (o->n_ctx < 2 || o->n_ctx > most)
        return so_err_set(err, SO_ERANGE,
                          "--ctx-size %d: must be from 2 to the model's own context of %d",
                          o->n_ctx, most);
    if (o->n_parallel < 1 || o->n_parallel > 1024)
        return so_err_set(err, SO_ERANGE, "--parallel %d: must be from 1 to 1024", o->n_parallel);
    if (o->n_batch < 1 || o->n_batch > 4096)
        return so_err_set(err, SO_ERANGE, "--batch-size %d: must be from 1 to 4096", o->n_batch);
    if (o->n_pages < 0)
        return so_err_set(err, SO_ERANGE, "KV pages %d: must not be negative", o->n_pages);
    if (o->max_draft < 0 || o->max_draft > SO_MAX_DRAFT)
        return so_err_set(err, SO_ERANGE, "--draft-max %d: must be from 1 to %d", o->max_draft,
                          SO_MAX_DRAFT);
    return SO_OK;
}

static int create_cache(so_engine *e, so_err *err) {
    const so_hparams *hp = so_model_hparams(e->m);
    int64_t pages = e->o.n_pages;
    if (pages == 0)
        pages = (int64_t)e->o.n_parallel * so_kv_pages_for(e->o.n_ctx);
    if (pages > INT32_MAX / SO_KV_PAGE)
        return so_err_set(err, SO_ELIMIT,
                          "--parallel %d with --ctx-size %d asks for %lld cache pages: lower one",
                          e->o.n_parallel, e->o.n_ctx, (long long)pages);
    so_kv_shape shape = {.n_layers = hp->n_layers,
                         .n_heads_kv = hp->n_heads_kv,
                         .head_dim = hp->head_dim,
                         .n_pages = (int)pages,
                         .dtype = e->o.kv_dtype};
    e->n_pages = (int)pages;
    int rc = so_kv_create(so_model_backend(e->m), &shape, &e->kv, err);
    if (rc != SO_OK)
        return so_err_prefix(
            err, "KV cache for --ctx-size %d, --parallel %d (%.1f MB)", e->o.n_ctx, e->o.n_parallel,
            (double)so_kv_bytes_per_token(&shape) * shape.n_pages * SO_KV_PAGE / 1e6);
    return SO_OK;
}

int so_engine_create(const so_model *m, const so_tokenizer *t, const so_engine_opts *opts,
                     so_engine **out, so_err *err) {
    int rc = check_opts(m, opts, err);
    if (rc != SO_OK)
        return rc;
    so_engine *e = SO_NEW(so_engine);
    int n_vocab = so_model_hparams(m)->n_vocab;
    e->m = m;
    e->tok = t;
    e->o = *opts;
    e->t_created_ns = so_clock_ns();
    e->max_guesses = opts->max_draft ? so_speculate_max_guesses(e) : 0;
    int max_logits = opts->n_parallel + e->max_guesses; /* a root for everyone, and guesses */
    e->max_rows = opts->n_batch + max_logits;
    rc = create_cache(e, err);
    if (rc == SO_OK)
        rc = so_pass_create(m, e->kv, e->max_rows, max_logits, &e->pass, err);
    if (rc != SO_OK) {
        so_engine_free(e);
        return rc;
    }
    e->sampler = so_sampler_create(n_vocab);
    e->trees = SO_NEW_N(so_tree, opts->n_parallel);
    for (int i = 0; i < opts->n_parallel; i++)
        so_tree_init(&e->trees[i], n_vocab, 0);
    e->tree_used = SO_NEW_N(bool, opts->n_parallel);
    e->rows = SO_NEW_N(so_row, e->max_rows);
    e->seqs = SO_NEW_N(so_seq *, opts->n_parallel);
    e->path = SO_NEW_N(int32_t, e->max_rows);
    if (opts->max_draft > 0)
        so_speculate_init(e);
    so_memory_warn(e, opts->draft);
    *out = e;
    return SO_OK;
}

void so_engine_free(so_engine *e) {
    if (!e)
        return;
    SO_ASSERT_OP(e->n_requests, ==, 0);
    so_speculate_deinit(e);
    so_sampler_free(e->sampler);
    so_pass_free(e->pass);
    so_kv_free(e->kv);
    for (int i = 0; e->trees && i < e->o.n_parallel; i++)
        so_tree_deinit(&e->trees[i]);
    free(e->trees);
    free(e->tree_used);
    free(e->rows);
    free(e->seqs);
    free(e->path);
    so_buf_free(&e->piece);
    so_buf_free(&e->out);
    free(e);
}

int so_engine_n_ctx(const so_engine *e) { return e->o.n_ctx; }

/* --- submission --- */

static int check_prompt(const so_engine *e, const so_request_opts *o, so_err *err) {
    int n_vocab = so_model_hparams(e->m)->n_vocab, most = so_model_hparams(e->m)->n_ctx_train;
    if (o->n_prompt < 1)
        return so_err_set(err, SO_EINVAL,
                          "the prompt is empty: the model needs at least one token");
    if (o->n_prompt >= e->o.n_ctx)
        return so_err_set(err, SO_ELIMIT,
                          "the prompt has %d tokens, the context %d with room for an answer: "
                          "shorten the prompt or raise --ctx-size (this model allows %d)",
                          o->n_prompt, e->o.n_ctx, most);
    for (int i = 0; i < o->n_prompt; i++)
        if (o->prompt[i] < 0 || o->prompt[i] >= n_vocab)
            return so_err_set(err, SO_ERANGE,
                              "token %d of the prompt is %d: the vocabulary has ids 0 to %d", i,
                              o->prompt[i], n_vocab - 1);
    return SO_OK;
}

static int check_length(const so_engine *e, const so_request_opts *o, so_err *err) {
    if (o->max_tokens < -1)
        return so_err_set(err, SO_ERANGE, "--predict %d: must be -1 (no limit) or more",
                          o->max_tokens);
    if (o->max_tokens > e->o.n_ctx - o->n_prompt)
        return so_err_set(err, SO_ELIMIT,
                          "--predict %d after a prompt of %d tokens does not fit the context of "
                          "%d: lower it (-1: as many as fit) or raise --ctx-size (this model "
                          "allows %d)",
                          o->max_tokens, o->n_prompt, e->o.n_ctx,
                          so_model_hparams(e->m)->n_ctx_train);
    return SO_OK;
}

/* A draft that cannot follow the text to its end is refused where nobody would take over; with no
 * limit on the answer it drafts as far as it can, and the rest is decoded plainly. */
static int check_draft_length(const so_request *r, so_err *err) {
    int most = r->spec.set ? so_drafter_n_ctx(r->spec.set->drafters.root) : 0;
    int n = r->n_prompt + SO_MAX(r->max_tokens, 0);
    if (most == 0 || n <= most)
        return SO_OK;
    if (r->n_prompt > most)
        return so_err_set(err, SO_ELIMIT,
                          "the prompt has %d tokens, the draft model's context %d: shorten it, or "
                          "speculate without the model (--spec lookup)",
                          r->n_prompt, most);
    return so_err_set(err, SO_ELIMIT,
                      "--predict %d after a prompt of %d tokens does not fit the draft model's "
                      "context of %d: lower it, or name a drafter for the rest (--spec %s,lookup)",
                      r->max_tokens, r->n_prompt, most, so_request_drafter(r));
}

static int check_request(const so_engine *e, const so_request_opts *o, so_err *err) {
    int rc = check_prompt(e, o, err);
    if (rc == SO_OK)
        rc = so_sample_check(&o->sample, so_model_hparams(e->m)->n_vocab, err);
    if (rc == SO_OK)
        rc = check_length(e, o, err);
    if (rc != SO_OK)
        return rc;
    if (o->n_stops < 0 || o->n_stops > SO_REQUEST_MAX_STOPS)
        return so_err_set(err, SO_ELIMIT, "%d stop strings: at most %d", o->n_stops,
                          SO_REQUEST_MAX_STOPS);
    for (int i = 0; i < o->n_stops; i++)
        if (o->stops[i].len == 0)
            return so_err_set(err, SO_EINVAL, "stop string %d is empty", i + 1);
    if (o->n_logprobs < 0 || o->n_logprobs > SO_LOGPROBS_MAX)
        return so_err_set(err, SO_ERANGE, "--logprobs %d: must be from 0 to %d", o->n_logprobs,
                          SO_LOGPROBS_MAX);
    return SO_OK;
}

static void copy_lists(so_request *r, const so_request_opts *o) {
    so_bias *bias = so_arena_alloc(&r->arena, (size_t)o->sample.n_bias, sizeof *bias);
    so_str *stops = so_arena_alloc(&r->arena, (size_t)o->n_stops, sizeof *stops);
    for (int i = 0; i < o->sample.n_bias; i++)
        bias[i] = o->sample.bias[i];
    for (int i = 0; i < o->n_stops; i++) {
        size_t len = o->stops[i].len;
        stops[i] = (so_str){so_arena_strndup(&r->arena, o->stops[i].ptr, len), len};
    }
    r->sample.bias = bias;
    r->stops = (so_stops){.strings = stops, .n_strings = o->n_stops};
}

static void make_texts(so_request *r, const so_request_opts *o, int max_len) {
    int n_vocab = so_model_hparams(r->e->m)->n_vocab;
    r->tokens = SO_NEW_N(int32_t, max_len + SO_TREE_MAX);
    memcpy(r->tokens, o->prompt, (size_t)o->n_prompt * sizeof *o->prompt);
    r->n_tokens = r->n_prompt = o->n_prompt;
    r->max_len = max_len;
    if (o->n_logprobs == 0)
        return;
    r->n_logprobs = 1 + SO_MIN(o->n_logprobs, n_vocab);
    r->logprobs = SO_NEW_N(so_logprob, (size_t)(max_len - o->n_prompt) * r->n_logprobs);
}

static void enqueue(so_request **list, so_request *r) {
    while (*list)
        list = &(*list)->next;
    r->next = NULL;
    *list = r;
}

static void unlink_from(so_request **list, so_request *r) {
    while (*list && *list != r)
        list = &(*list)->next;
    if (*list)
        *list = r->next;
}

int so_engine_submit(so_engine *e, const so_request_opts *o, so_request **out, so_err *err) {
    int rc = check_request(e, o, err);
    if (rc != SO_OK)
        return rc;
    int max_len = o->max_tokens < 0 ? e->o.n_ctx : o->n_prompt + o->max_tokens;
    int n_pages = so_kv_pages_for(max_len);
    if (n_pages > e->n_pages)
        return so_err_set(err, SO_ELIMIT,
                          "prompt and answer of up to %d tokens need %d cache pages, there are %d: "
                          "lower --predict",
                          max_len, n_pages, e->n_pages);
    so_request *r = SO_NEW(so_request);
    r->e = e;
    r->sample = o->sample;
    r->greedy = so_sample_is_argmax(&o->sample);
    r->max_tokens = o->max_tokens;
    r->ignore_end = o->ignore_end;
    r->on_event = o->on_event;
    r->on_round = o->on_round;
    r->user = o->user;
    copy_lists(r, o);
    make_texts(r, o, max_len);
    r->n_promised = n_pages;
    r->detok = (so_detok){.t = e->tok, .started = o->continues};
    r->stats.prompt_n = o->n_prompt;
    e->n_requests++;
    rc = so_speculate_open(r, &o->spec, err);
    if (rc == SO_OK)
        rc = check_draft_length(r, err);
    if (rc != SO_OK) {
        r->phase = SO_PHASE_DONE;
        so_request_free(r);
        return rc;
    }
    enqueue(&e->waiting, r);
    *out = r;
    return SO_OK;
}

/* --- the end of a request --- */

static bool emit(so_request *r, int32_t token, so_origin origin) {
    so_event ev = {.req = r,
                   .token = token,
                   .origin = origin,
                   .text = so_buf_str(&r->e->out),
                   .finish = r->finish};
    if (r->logprobs && token != SO_TOKEN_NONE)
        ev.logprobs = r->logprobs + (size_t)(r->n_tokens - r->n_prompt - 1) * r->n_logprobs;
    return !r->on_event || r->on_event(r->user, &ev);
}

/* Gives back what a running request holds. */
static void retire(so_request *r) {
    so_engine *e = r->e;
    if (r->phase == SO_PHASE_RUNNING) {
        so_seq_free(r->seq);
        r->seq = NULL;
        e->n_promised -= r->n_promised;
        e->tree_used[r->tree - e->trees] = false;
        e->n_running--;
        unlink_from(&e->running, r);
    } else if (r->phase == SO_PHASE_WAITING) {
        unlink_from(&e->waiting, r);
    }
    r->phase = SO_PHASE_DONE;
}

static void log_end(const so_request *r) {
    const so_request_stats *s = &r->stats;
    so_log(SO_LOG_INFO,
           "request: %s, %d + %d tokens, %d passes, %s (%s): drafted %d, tested %d, accepted %d "
           "(%.1f %%)",
           so_finish_name(r->finish), s->prompt_n, s->predicted_n, s->rounds, so_request_drafter(r),
           so_verify_mode_name(r->spec.verify), s->draft_n, s->tested_n, s->draft_n_accepted,
           s->draft_n ? 100.0 * s->draft_n_accepted / s->draft_n : 0);
}

/* The last event carries what was held back, unless a stop string swallowed it. */
static void finish(so_request *r, so_finish why, bool stop_string) {
    so_engine *e = r->e;
    r->finish = why;
    if (r->t_first_ns)
        r->stats.predicted_ms = so_clock_ms_since(r->t_first_ns);
    so_buf_clear(&e->out);
    if (e->tok && !stop_string) {
        so_buf_clear(&e->piece);
        so_detok_finish(&r->detok, &e->piece);
        if (!so_stops_push(&r->stops, so_buf_str(&e->piece), &e->out))
            so_stops_finish(&r->stops, &e->out);
    }
    so_speculate_tell(r);
    so_speculate_close(r);
    retire(r);
    emit(r, SO_TOKEN_NONE, SO_ORIGIN_PLAIN);
    log_end(r); /* after what the caller prints */
}

void so_request_cancel(so_request *r) { r->cancelled = true; }

void so_request_free(so_request *r) {
    if (!r)
        return;
    retire(r);
    so_speculate_release(r);
    r->e->n_requests--;
    so_stops_free(&r->stops);
    so_arena_free(&r->arena);
    free(r->tokens);
    free(r->logprobs);
    free(r);
}

static void drop_cancelled(so_request *list) {
    for (so_request *r = list, *next; r; r = next) {
        next = r->next;
        if (r->cancelled)
            finish(r, SO_FINISH_CANCELLED, false);
    }
}

/* --- the step --- */

static void admit(so_engine *e) {
    while (e->waiting && e->n_running < e->o.n_parallel &&
           e->n_promised + e->waiting->n_promised <= e->n_pages) {
        so_request *r = e->waiting;
        e->waiting = r->next;
        int slot = 0;
        while (e->tree_used[slot])
            slot++;
        e->tree_used[slot] = true;
        r->tree = &e->trees[slot];
        so_speculate_admit(r);
        r->seq = so_seq_create(e->kv);
        so_seq_reserve(r->seq, r->n_promised * SO_KV_PAGE);
        r->phase = SO_PHASE_RUNNING;
        r->t_admitted_ns = so_clock_ns();
        e->n_promised += r->n_promised;
        e->n_running++;
        enqueue(&e->running, r);
    }
}

/* How many rows each request gets: everyone whose text is in the cache a tree, then prompts in
 * order of admission until the chunk budget is spent. */
static void gather(so_engine *e) {
    int budget = e->o.n_batch;
    for (so_request *r = e->running; r; r = r->next) {
        int missing = r->n_tokens - 1 - so_seq_len(r->seq);
        r->n_chunk = SO_MIN(missing, budget);
        budget -= r->n_chunk;
        r->has_tree = r->n_chunk == missing;
        if (r->has_tree)
            so_tree_reset(r->tree, r->tokens[r->n_tokens - 1], r->n_tokens - 1);
    }
}

/* Rows of one request: the chunk as a chain, then the tree, whose nodes keep their order. */
static int add_rows(so_engine *e, so_request *r, int seq, int at) {
    int len = so_seq_len(r->seq), root = at + r->n_chunk;
    for (int i = 0; i < r->n_chunk; i++)
        e->rows[at + i] = (so_row){
            .token = r->tokens[len + i], .pos = len + i, .seq = seq, .parent = i ? at + i - 1 : -1};
    for (int i = 0; r->has_tree && i < r->tree->n_nodes; i++) {
        const so_node *n = &r->tree->nodes[i];
        int parent = i ? root + n->parent : r->n_chunk ? root - 1 : -1;
        e->rows[root + i] = (so_row){.token = n->token,
                                     .pos = len + r->n_chunk + n->depth,
                                     .seq = seq,
                                     .parent = parent,
                                     .want_logits = true};
    }
    return root + (r->has_tree ? r->tree->n_nodes : 0);
}

static int forward(so_engine *e, so_err *err) {
    int n_rows = 0, n_seqs = 0, n_logits = 0, rc = SO_OK;
    unsigned want = 0;
    for (so_request *r = e->running; r && rc == SO_OK; r = r->next) {
        int end = add_rows(e, r, n_seqs, n_rows);
        if (end == n_rows)
            continue; /* the chunk budget went to others */
        rc = so_seq_begin(r->seq, end - n_rows, err);
        e->seqs[n_seqs++] = r->seq;
        n_rows = end;
        if (r->has_tree) {
            r->first_logit = n_logits;
            n_logits += r->tree->n_nodes;
            want |= r->greedy ? SO_PASS_ARGMAX : SO_PASS_LOGITS;
            want |= r->n_logprobs > 0 ? SO_PASS_LOGITS : 0u;
        }
    }
    so_batch batch = {.rows = e->rows, .n_rows = n_rows, .seqs = e->seqs, .n_seqs = n_seqs};
    return rc == SO_OK ? so_pass_run(e->pass, &batch, want, err) : rc;
}

static void commit(so_engine *e, so_request *r) {
    int n = 0;
    for (int i = 0; i < r->n_chunk; i++)
        e->path[n++] = i;
    if (r->has_tree) {
        e->path[n++] = r->n_chunk; /* the root */
        for (int i = 0; i < r->verdict.n_accepted; i++)
            e->path[n++] = r->n_chunk + r->verdict.path[i];
        int next = r->verdict.n_accepted ? e->path[n - 1] + 1 : r->n_chunk + 1;
        if (e->mutant == SO_MUTANT_KEEP_ROW && next < r->n_chunk + r->tree->n_nodes)
            e->path[n - 1] = next;
    }
    if (so_seq_open_nodes(r->seq) > 0)
        so_seq_commit(r->seq, e->path, n);
}

/* Takes one token, told after `node`, into the text; false when the request has ended with it. */
static bool take(so_request *r, int node, int32_t token, so_origin origin) {
    so_engine *e = r->e;
    bool stop = false;
    if (r->stats.predicted_n == r->max_tokens) { /* max_tokens 0: only the prompt was wanted */
        finish(r, SO_FINISH_LENGTH, false);
        return false;
    }
    if (e->tok && !r->ignore_end && so_tokenizer_is_end(e->tok, token)) {
        finish(r, SO_FINISH_STOP, false);
        return false;
    }
    so_verdict_logprobs(r, node, token);
    r->tokens[r->n_tokens++] = token;
    r->stats.predicted_n++;
    e->info.emitted++;
    so_buf_clear(&e->out);
    if (e->tok && token < so_tokenizer_n_vocab(e->tok)) { /* padding ids have no text */
        so_buf_clear(&e->piece);
        so_detok_push(&r->detok, token, &e->piece);
        stop = so_stops_push(&r->stops, so_buf_str(&e->piece), &e->out);
    }
    bool go_on = emit(r, token, origin);
    if (stop || !go_on || r->n_tokens == r->max_len) {
        finish(r, stop ? SO_FINISH_STOP : !go_on ? SO_FINISH_CANCELLED : SO_FINISH_LENGTH, stop);
        return false;
    }
    return true;
}

/* Emits the accepted path and the token after it; what lies behind an end is discarded. */
static void emit_round(so_request *r) {
    const so_verdict *v = &r->verdict;
    if (!r->t_first_ns) {
        r->t_first_ns = so_clock_ns();
        r->stats.prompt_ms = (double)(r->t_first_ns - r->t_admitted_ns) * 1e-6;
    }
    so_verdict_count(r);
    if (r->on_round)
        r->on_round(r->user, &(so_round){r, r->stats.rounds - 1, r->tree, v});
    int node = 0;
    for (int i = 0; i < v->n_accepted; node = v->path[i++])
        if (!take(r, node, r->tree->nodes[v->path[i]].token, SO_ORIGIN_DRAFT))
            return;
    so_origin last = r->tree->n_nodes == 1 ? SO_ORIGIN_PLAIN
                     : v->bonus            ? SO_ORIGIN_BONUS
                                           : SO_ORIGIN_CORRECTION;
    if (r->err.code != SO_OK)
        finish(r, SO_FINISH_ERROR, false);
    else if (take(r, node, v->token, last))
        so_speculate_tell(r);
}

static void fail_all(so_engine *e, const so_err *err) {
    for (so_request *r = e->running, *next; r; r = next) {
        next = r->next;
        r->err = *err;
        finish(r, SO_FINISH_ERROR, false); /* an open speculation is aborted with its sequence */
    }
}

static void begin_info(so_engine *e) {
    e->info = (so_step_info){.step = e->info.step, .t_ms = so_clock_ms_since(e->t_created_ns)};
}

/* Before tokens are emitted: a request that ends leaves the list. */
static void count_step(so_engine *e, double pass_ms, double verify_ms) {
    so_step_info *s = &e->info;
    s->pass_ms = pass_ms;
    s->verify_ms = verify_ms;
    if (e->planner && e->plan.n_requests > 0)
        s->plan = e->plan;
    for (const so_request *r = e->running; r; r = r->next) {
        s->n_rows += r->n_chunk;
        if (!r->has_tree)
            continue;
        s->n_requests++;
        s->n_rows += r->tree->n_nodes;
        s->drafted += r->tree->n_nodes - 1;
        s->tested += r->verdict.n_tested;
        s->accepted += r->verdict.n_accepted;
    }
}

int so_engine_step(so_engine *e, so_err *err) {
    so_err local = {0};
    drop_cancelled(e->waiting);
    drop_cancelled(e->running);
    admit(e);
    if (!e->running)
        return e->waiting != NULL;
    begin_info(e);
    gather(e);
    if (e->planner)
        so_speculate_step(e);
    int64_t t_start = so_clock_ns();
    int rc = forward(e, &local);
    if (rc != SO_OK) {
        fail_all(e, &local);
        return so_err_set(err, rc, "%s", local.msg);
    }
    double pass_ms = so_clock_ms_since(t_start);
    int64_t t_pass = so_clock_ns();
    for (so_request *r = e->running; r; r = r->next) {
        if (r->has_tree) {
            so_verdict_reach(r);
            r->stats.verify_ms += pass_ms;
        }
        commit(e, r);
    }
    if (e->planner)
        so_speculate_observe(e, pass_ms);
    count_step(e, pass_ms, so_clock_ms_since(t_pass));
    for (so_request *r = e->running, *next; r; r = next) {
        next = r->next;
        if (r->has_tree)
            emit_round(r);
    }
    if (e->o.on_step)
        e->o.on_step(e->o.step_user, &e->info);
    e->info.step++;
    return e->running || e->waiting;
}

int so_engine_run(so_engine *e, so_request *r, so_err *err) {
    while (r->finish == SO_FINISH_NONE) {
        int rc = so_engine_step(e, err);
        if (rc < 0)
            return rc;
    }
    return so_request_check(r, err);
}

/* --- looking at a request --- */

static double rate(double a, double b) { return b > 0 ? a / b : -1; }

so_rates so_stats_rates(const so_request_stats *s) {
    return (so_rates){.tokens_per_pass = rate(s->rounds + s->draft_n_accepted, s->rounds),
                      .mean_accepted = rate(s->draft_n_accepted, s->rounds),
                      .alpha = rate(s->draft_n_accepted, s->tested_n),
                      .acceptance_rate = rate(s->draft_n_accepted, s->draft_n),
                      .round_rate = rate(s->round_rate_sum, s->drafted_rounds)};
}

void so_stats_add(so_request_stats *to, const so_request_stats *s) {
    to->prompt_n += s->prompt_n;
    to->predicted_n += s->predicted_n;
    to->prompt_ms += s->prompt_ms;
    to->predicted_ms += s->predicted_ms;
    to->rounds += s->rounds;
    to->draft_n += s->draft_n;
    to->draft_n_accepted += s->draft_n_accepted;
    to->draft_ms += s->draft_ms;
    to->verify_ms += s->verify_ms;
    to->tested_n += s->tested_n;
    to->drafted_rounds += s->drafted_rounds;
    to->round_rate_sum += s->round_rate_sum;
    for (int i = 0; i < SO_STATS_DEPTHS; i++) {
        to->per_depth[i].tested += s->per_depth[i].tested;
        to->per_depth[i].accepted += s->per_depth[i].accepted;
    }
}

const char *so_finish_name(so_finish f) {
    static const char *const names[] = {"", "stop", "length", "cancelled", "error"};
    return names[f];
}

so_finish so_request_finish(const so_request *r) { return r->finish; }
const so_err *so_request_error(const so_request *r) { return &r->err; }

int so_request_check(const so_request *r, so_err *err) {
    return r->finish == SO_FINISH_ERROR ? so_err_set(err, r->err.code, "%s", r->err.msg) : SO_OK;
}

const so_request_stats *so_request_get_stats(const so_request *r) { return &r->stats; }
uint64_t so_request_seed(const so_request *r) { return r->sample.seed; }
void *so_request_user(const so_request *r) { return r->user; }

const char *so_verify_mode_name(so_verify_mode m) {
    static const char *const names[] = {"match", "reject", "lenient"};
    return names[m];
}

const char *so_request_drafter(const so_request *r) {
    return r->spec.set ? r->spec.set->text : "none";
}

so_verify_mode so_request_verify(const so_request *r, double *lenience) {
    *lenience = r->spec.lenience;
    return r->spec.verify;
}

const int32_t *so_request_output(const so_request *r, int *n) {
    *n = r->n_tokens - r->n_prompt;
    return r->tokens + r->n_prompt;
}

const so_logprob *so_request_logprobs(const so_request *r, int *n_each) {
    *n_each = r->n_logprobs;
    return r->logprobs;
}

/* Creation of the engine, its step, and the end of a request. engine.h has the shape of a step.
 *
 * Invariants:
 *   - The committed length of a running request's sequence is below its token count: the root is
 *     never in the cache.
 *   - The pages of all rows are counted before the pass (schedule.c), so a pass cannot run out of
 *     cache.
 *   - Each of the n_parallel places for running requests has a sequence and a tree, created once.
 *     After creation, submission and the first round of each drafter a step allocates nothing, even
 *     if it admits, preempts or finishes requests.
 *
 * This file does not decide which requests run (schedule.c) and samples nothing itself
 * (verifier.c). Engine thread. */
#include <stdlib.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mutant.h"
#include "engine/ends.h"
#include "kv/prefix.h"

/* Rows of prompt logits in one pass. Their memory is touched only if prompt logprobs are requested.
 * A larger value would hardly be faster. */
enum { MAX_SCORES = 32 };
/* Logits rows of beam searches in one pass, beyond one of each request: as many as beams with a draft
 * can use, limited by the memory of their logits. */
enum { MAX_BEAM_ROWS = 128, MAX_BEAM_LOGITS = 8 << 20 };
enum { NODES_PER_DEPTH = 2 }; /* times --draft-max: room for two merged drafters */
/* Source texts that are kept for later requests with the same text. */

/* --- creation --- */

void so_engine_defaults(const so_model *m, so_engine_opts *o) {
    *o = (so_engine_opts){.n_ctx = SO_MIN(4096, so_model_hparams(m)->n_ctx_train),
                          .n_parallel = 1,
                          .n_batch = 256,
                          .kv_dtype = SO_DTYPE_F16,
                          .prefix_cache = true,
                          .draft_temp = -1};
}

static int check_opts(const so_model *m, const so_engine_opts *o, so_err *err) {
    int max_ctx = so_model_hparams(m)->n_ctx_train;
    if (o->n_ctx < 2 || o->n_ctx > max_ctx)
        return so_err_set(err, SO_ERANGE,
                          "--ctx-size %d: must be from 2 to the model's own context of %d",
                          o->n_ctx, max_ctx);
    if (o->n_parallel < 1 || o->n_parallel > 1024)
        return so_err_set(err, SO_ERANGE, "--parallel %d: must be from 1 to 1024", o->n_parallel);
    if (o->n_batch < 1 || o->n_batch > 4096)
        return so_err_set(err, SO_ERANGE, "--batch-size %d: must be from 1 to 4096", o->n_batch);
    if (o->n_pages < 0)
        return so_err_set(err, SO_ERANGE, "--kv-pages %d: must not be negative", o->n_pages);
    if (o->max_draft < 0 || o->max_draft > SO_MAX_DRAFT)
        return so_err_set(err, SO_ERANGE, "--draft-max %d: must be from 1 to %d", o->max_draft,
                          SO_MAX_DRAFT);
    if (o->max_nodes != 0 && (o->max_nodes < o->max_draft || o->max_nodes >= SO_TREE_MAX))
        return so_err_set(err, SO_ERANGE, "--draft-nodes %d: must be from %d (--draft-max) to %d",
                          o->max_nodes, o->max_draft, SO_TREE_MAX - 1);
    return SO_OK;
}

/* Slotted cache: n_parallel is limited to the number of page runs of n_ctx tokens that fit. */
static int create_slots(so_engine *e, const so_kv_shape *shape, so_err *err) {
    int rc = so_kv_create_slotted(so_model_backend(e->m), shape, e->o.n_ctx, &e->kv, err);
    if (rc != SO_OK)
        return rc;
    e->n_pages = so_kv_free_pages(e->kv);
    e->o.n_parallel = SO_MIN(e->o.n_parallel, e->n_pages / so_kv_pages_for(e->o.n_ctx));
    return SO_OK;
}

static int create_pages(so_engine *e, const so_kv_shape *shape, so_err *err) {
    int rc = so_kv_create(so_model_backend(e->m), shape, &e->kv, err);
    if (rc == SO_OK && e->o.prefix_cache)
        rc = so_prefix_enable(e->kv, err);
    return rc;
}

static int create_cache(so_engine *e, so_err *err) {
    const so_hparams *hp = so_model_hparams(e->m);
    int64_t pages = e->o.n_pages;
    if (pages == 0)
        pages = (int64_t)e->o.n_parallel * so_kv_pages_for(e->o.n_ctx);
    if (pages > INT32_MAX / SO_KV_PAGE)
        return so_err_set(
            err, SO_ELIMIT,
            "--parallel %d with --ctx-size %d needs %lld cache pages, which is too many: "
            "lower one of them",
            e->o.n_parallel, e->o.n_ctx, (long long)pages);
    so_kv_shape shape = {.n_layers = hp->n_layers,
                         .n_heads_kv = hp->n_heads_kv,
                         .head_dim = hp->head_dim,
                         .n_pages = (int)pages,
                         .dtype = e->o.kv_dtype};
    e->n_pages = (int)pages;
    int rc = e->o.kv_layout == SO_KV_SLOTTED ? create_slots(e, &shape, err)
                                             : create_pages(e, &shape, err);
    if (rc != SO_OK)
        return so_err_prefix(
            err, "KV cache for --ctx-size %d, --parallel %d (%.1f MB)", e->o.n_ctx, e->o.n_parallel,
            (double)so_kv_bytes_per_token(&shape) * shape.n_pages * SO_KV_PAGE / 1e6);
    return SO_OK;
}

/* Encoder-decoder models: a source may be as long as the context. */
static int create_sources(so_engine *e, so_err *err) {
    if (so_model_hparams(e->m)->n_enc_layers == 0)
        return SO_OK;
    int rc = so_sources_create(e->m, e->o.n_ctx, e->o.n_parallel + SO_SOURCES_SPARE, e->o.kv_dtype,
                               &e->sources, err);
    return rc == SO_OK ? rc : so_err_prefix(err, "source texts");
}

/* Sequences and trees of the places for running requests, and the buffers of a step. */
static void create_slot_parts(so_engine *e) {
    int n = e->o.n_parallel, n_vocab = so_model_hparams(e->m)->n_vocab;
    e->sampler = so_sampler_create(n_vocab);
    e->trees = SO_NEW_N(so_tree, n);
    e->slot_seqs = SO_NEW_N(so_seq *, n);
    for (int i = 0; i < n; i++) {
        so_tree_init(&e->trees[i], n_vocab, 0);
        e->slot_seqs[i] = so_seq_create(e->kv);
        so_seq_reserve(e->slot_seqs[i], e->o.n_ctx + SO_TREE_MAX);
    }
    e->slot_used = SO_NEW_N(bool, n);
    e->order = SO_NEW_N(so_request *, n);
    e->step.rows = SO_NEW_N(so_row, e->max_rows);
    e->step.samples = SO_NEW_N(so_sample_row, e->max_rows);
    e->step.seqs = SO_NEW_N(so_seq *, n);
    e->step.path = SO_NEW_N(int32_t, e->max_rows);
}

int so_engine_create(const so_model *m, const so_tokenizer *t, const so_engine_opts *opts,
                     so_engine **out, so_err *err) {
    int rc = check_opts(m, opts, err);
    if (rc != SO_OK)
        return rc;
    so_engine *e = SO_NEW(so_engine);
    e->m = m;
    e->tok = t;
    e->o = *opts;
    if (e->o.max_nodes == 0)
        e->o.max_nodes = SO_MIN(NODES_PER_DEPTH * opts->max_draft, SO_TREE_MAX - 1);
    e->n_failed_seen = so_model_backend(m)->n_failed;
    e->t_created_ns = so_clock_ns();
    rc = create_cache(e, err);
    if (rc == SO_OK)
        rc = create_sources(e, err);
    e->max_guesses = opts->max_draft ? so_speculate_max_guesses(e) : 0;
    e->max_scores = SO_MIN(opts->n_batch, MAX_SCORES);
    e->max_beam_rows = SO_MIN(MAX_BEAM_ROWS, MAX_BEAM_LOGITS / so_model_hparams(m)->n_vocab);
    int max_logits = e->o.n_parallel + e->max_guesses + e->max_beam_rows; /* one root per request */
    e->max_rows = opts->n_batch + max_logits;
    if (rc == SO_OK)
        rc = so_pass_create(m, e->kv, e->max_rows, max_logits + e->max_scores, &e->pass, err);
    if (rc != SO_OK) {
        so_engine_free(e);
        return rc;
    }
    create_slot_parts(e);
    if (opts->max_draft > 0) {
        e->spec = so_speculate_create(e);
        e->verifier = so_verifier_create(so_model_hparams(m)->n_vocab);
    }
    so_memory_warn(e, opts->draft);
    *out = e;
    return SO_OK;
}

void so_engine_free(so_engine *e) {
    if (!e)
        return;
    SO_ASSERT_OP(e->n_requests, ==, 0);
    so_speculate_free(e);
    so_verifier_free(e->verifier);
    so_sampler_free(e->sampler);
    so_pass_free(e->pass);
    for (int i = 0; e->trees && i < e->o.n_parallel; i++) {
        so_tree_deinit(&e->trees[i]);
        so_seq_free(e->slot_seqs[i]);
    }
    so_kv_free(e->kv);
    so_sources_free(e->sources);
    free(e->trees);
    free(e->slot_seqs);
    free(e->slot_used);
    free(e->order);
    free(e->step.rows);
    free(e->step.samples);
    free(e->step.seqs);
    free(e->step.path);
    so_buf_free(&e->step.piece);
    so_buf_free(&e->step.out);
    free(e);
}

int so_engine_n_ctx(const so_engine *e) { return e->o.n_ctx; }

/* --- the end of a request --- */

static bool emit(so_request *r, int32_t token, so_origin origin) {
    so_event ev = {.req = r,
                   .token = token,
                   .origin = origin,
                   .text = so_buf_str(&r->e->step.out),
                   .finish = r->finish};
    if (r->logprobs && token != SO_TOKEN_NONE)
        ev.logprobs = r->logprobs + (size_t)(r->n_tokens - r->n_prompt - 1) * r->n_logprobs;
    return !r->on_event || r->on_event(r->user, &ev);
}

/* Appends step.piece, the text of a token, to step.out, except an end that may be the beginning of
 * a stop string. Returns true if a stop string is complete, which ends the answer. */
static bool push_text(so_request *r) {
    so_step *s = &r->e->step;
    if (so_restrict_may_stop(r))
        return so_stops_push(&r->stops, so_buf_str(&s->piece), &s->out);
    so_buf_append_str(&s->out, so_buf_str(&s->piece));
    return false;
}

static void log_end(const so_request *r) {
    const so_request_stats *s = &r->stats;
    char verify[SO_VERIFY_TEXT];
    so_verify_mode_print(r->spec.verify, r->spec.lenience, verify);
    so_log(SO_LOG_INFO,
           "request: %s, %d + %d tokens, %d passes, %s (%s): drafted %d, tested %d, accepted %d "
           "(%.1f %%)",
           so_finish_name(r->finish), s->prompt_n, s->predicted_n, s->rounds, so_request_drafter(r),
           verify, s->draft_n, s->tested_n, s->draft_n_accepted,
           s->draft_n ? 100.0 * s->draft_n_accepted / s->draft_n : 0);
}

void so_engine_finish(so_request *r, so_finish why, bool stop_string) {
    so_engine *e = r->e;
    r->finish = why;
    if (r->t_first_ns)
        r->stats.predicted_ms = so_clock_ms_since(r->t_first_ns);
    so_buf_clear(&e->step.out);
    if (e->tok && !stop_string) {
        so_buf_clear(&e->step.piece);
        so_detok_finish(&r->detok, &e->step.piece);
        if (!push_text(r))
            so_stops_finish(&r->stops, &e->step.out);
    }
    so_speculate_observe_tokens(r);
    so_speculate_close(r);
    so_schedule_retire(r);
    emit(r, SO_TOKEN_NONE, SO_ORIGIN_PLAIN);
    log_end(r); /* after the callback, so that the log line follows what the caller prints */
}

static void drop_cancelled(so_request *list) {
    for (so_request *r = list, *next; r; r = next) {
        next = r->next;
        if (r->cancelled && r->beams)
            so_beams_finish(r, SO_FINISH_CANCELLED);
        else if (r->cancelled)
            so_engine_finish(r, SO_FINISH_CANCELLED, false);
    }
}

/* --- the step --- */

/* Adds the rows of one request: the chunk as a chain, then the tree. Returns the index after the
 * last row. Adds the results that the tree needs to *want. */
static int add_rows(so_engine *e, so_request *r, int seq, int at, unsigned *want) {
    int len = so_seq_len(r->seq), root = at + r->n_chunk;
    for (int i = 0; i < r->n_chunk; i++)
        e->step.rows[at + i] = (so_row){.token = r->tokens[len + i],
                                        .pos = len + i,
                                        .seq = seq,
                                        .parent = i ? at + i - 1 : -1,
                                        .want_logits = i >= r->n_chunk - r->n_score,
                                        .logits_to_host = true};
    for (int i = 0; r->has_tree && i < r->tree->n_nodes; i++) {
        const so_node *n = &r->tree->nodes[i];
        int parent = i ? root + n->parent : r->n_chunk ? root - 1 : -1;
        e->step.rows[root + i] = (so_row){.token = n->token,
                                          .pos = len + r->n_chunk + n->depth,
                                          .seq = seq,
                                          .parent = parent,
                                          .want_logits = true};
        *want |= so_verifier_want(r, i, &e->step.samples[root + i], &e->step.rows[root + i]);
    }
    if (r->n_beam_rows > 0)
        return so_beams_add_rows(r, seq, root);
    return r->has_tree ? so_ends_add_rows(r, seq, root, root + r->tree->n_nodes) : root;
}

static int forward(so_engine *e, so_err *err) {
    int n_rows = 0, n_seqs = 0, n_logits = 0, rc = SO_OK;
    unsigned want = 0;
    for (so_request *r = e->running; r && rc == SO_OK; r = r->next) {
        int end = add_rows(e, r, n_seqs, n_rows, &want);
        if (end == n_rows)
            continue; /* no rows: the chunk budget went to other requests */
        rc = so_seq_open_nodes(r->seq) ? so_seq_extend(r->seq, end - n_rows, err)
                                       : so_seq_begin(r->seq, end - n_rows, err);
        e->step.seqs[n_seqs++] = r->seq;
        int n_rows_before = n_rows;
        n_rows = end;
        r->first_score = n_logits;
        n_logits += r->n_score;
        if (r->has_tree) {
            r->first_logit = n_logits;
            n_logits += end - n_rows_before - r->n_chunk;
            want |= so_speculate_reads_hidden(r) ? SO_PASS_HIDDEN : 0u;
        }
        if (r->n_beam_rows > 0) {
            r->first_logit = n_logits;
            n_logits += so_beams_n_logits(r);
        }
    }
    so_batch batch = {
        .rows = e->step.rows, .n_rows = n_rows, .seqs = e->step.seqs, .n_seqs = n_seqs};
    return rc == SO_OK ? so_pass_run(e->pass, &batch, want, err) : rc;
}

static void commit(so_engine *e, so_request *r) {
    int n = 0;
    if (r->n_beam_rows > 0) {
        so_beams_take(r);
        return;
    }
    for (int i = 0; i < r->n_chunk; i++)
        e->step.path[n++] = i;
    if (r->has_tree) {
        e->step.path[n++] = r->n_chunk; /* the root */
        for (int i = 0; i < r->verdict.n_accepted; i++)
            e->step.path[n++] = r->n_chunk + r->verdict.path[i];
        int next = r->verdict.n_accepted ? e->step.path[n - 1] + 1 : r->n_chunk + 1;
        if (SO_MUTANT(KEEP_ROW) && next < r->n_chunk + r->tree->n_nodes)
            e->step.path[n - 1] = next;
    }
    if (so_seq_open_nodes(r->seq) > 0)
        so_seq_commit(r->seq, e->step.path, n);
}

/* Adds one token, sampled from the logits row of `node`, to the text. Returns false if this token
 * ended the request. */
static bool append_token(so_request *r, int node, int32_t token, so_origin origin) {
    if (r->stats.predicted_n == r->max_tokens) { /* max_tokens is 0: compute the prompt only */
        so_engine_finish(r, SO_FINISH_LENGTH, false);
        return false;
    }
    if (so_restrict_ends(r, token)) {
        so_counts_end_token(r);
        so_engine_finish(r, SO_FINISH_STOP, false);
        return false;
    }
    so_verifier_token_logprobs(r, node, token);
    so_speculate_observe_hidden(r, node);
    return so_engine_append(r, token, origin);
}

bool so_engine_append(so_request *r, int32_t token, so_origin origin) {
    so_engine *e = r->e;
    bool stop = false;
    r->tokens[r->n_tokens++] = token;
    so_counts_token(r);
    so_buf_clear(&e->step.out);
    if (e->tok && token < so_tokenizer_n_vocab(e->tok)) { /* padding ids have no text */
        so_buf_clear(&e->step.piece);
        so_detok_push(&r->detok, token, &e->step.piece);
        stop = push_text(r);
    }
    bool keep_going = emit(r, token, origin);
    if (stop || !keep_going || r->n_tokens == r->max_len) {
        so_engine_finish(r,
                         stop          ? SO_FINISH_STOP
                         : !keep_going ? SO_FINISH_CANCELLED
                                       : SO_FINISH_LENGTH,
                         stop);
        return false;
    }
    return true;
}

/* Emits the accepted path and the token after it, up to the end of the request. */
static void emit_round(so_request *r) {
    const so_verdict *v = &r->verdict;
    if (!r->t_first_ns) {
        r->t_first_ns = so_clock_ns();
        r->stats.prompt_ms = (double)(r->t_first_ns - r->t_admitted_ns) * 1e-6;
        r->stats.ttft_ms = (double)(r->t_first_ns - r->t_submitted_ns) * 1e-6;
    }
    so_counts_begin(r);
    if (r->on_round)
        r->on_round(r->user, &(so_round){r, r->stats.rounds - 1, r->tree, v});
    int node = 0;
    for (int i = 0; i < v->n_accepted; node = v->path[i++]) {
        so_counts_depth(r, i + 1);
        if (!append_token(r, node, r->tree->nodes[v->path[i]].token, SO_ORIGIN_DRAFT))
            return;
    }
    so_origin last = r->tree->n_nodes == 1 ? SO_ORIGIN_PLAIN
                     : v->bonus            ? SO_ORIGIN_BONUS
                                           : SO_ORIGIN_CORRECTION;
    if (r->err.code != SO_OK) { /* the last row failed, so the guesses after it were not verified */
        so_engine_finish(r, SO_FINISH_ERROR, false);
        return;
    }
    so_counts_depth(r, v->n_accepted + 1);
    if (append_token(r, node, v->token, last))
        so_speculate_observe_tokens(r);
}

static void fail_all(so_engine *e, const so_err *err) {
    for (so_request *r = e->running, *next; r; r = next) {
        next = r->next;
        r->err = *err;
        /* retiring the request also aborts its open rows in the cache */
        so_engine_finish(r, SO_FINISH_ERROR, false);
    }
}

/* A pass failed. Copies within the cache, which the last commit submitted, may be lost too, so
 * nothing in the cache can be used again. */
static void forget_cache(so_engine *e) {
    so_schedule_restart(e);
    if (e->sources)
        so_sources_forget(e->sources);
    e->n_failed_seen = so_model_backend(e->m)->n_failed;
}

static bool cache_is_whole(const so_engine *e) {
    return so_model_backend(e->m)->n_failed == e->n_failed_seen;
}

int so_engine_check_device(so_engine *e, so_err *err) {
    so_backend *b = so_model_backend(e->m);
    return b->vt->sync(b, err);
}

static void begin_info(so_engine *e) {
    e->step.info =
        (so_step_info){.step = e->step.info.step, .t_ms = so_clock_ms_since(e->t_created_ns)};
}

/* Call before tokens are emitted, because a request that ends leaves the list. */
static void count_step(so_engine *e, double pass_ms, double host_ms) {
    so_step_info *s = &e->step.info;
    s->pass_ms = pass_ms;
    s->host_ms = host_ms;
    for (const so_request *r = e->running; r; r = r->next) {
        s->n_rows += r->n_chunk + r->n_beam_rows;
        s->n_requests += r->has_tree || r->n_beam_rows > 0;
        if (!r->has_tree)
            continue;
        s->n_rows += r->tree->n_nodes;
    }
}

static void sum_step(so_engine *e) {
    so_engine_stats *sum = &e->stats;
    const so_step_info *s = &e->step.info;
    sum->steps++;
    sum->rows = s->n_rows;
    sum->rows_sum += s->n_rows;
    sum->drafted += s->drafted;
    sum->tested += s->tested;
    sum->accepted += s->accepted;
    sum->emitted += s->emitted;
    if (e->o.on_step)
        e->o.on_step(e->o.step_user, s);
    e->step.info.step++;
}

/* Batches of requests that have ended are sealed (draft/async.c): after this pass there is no other. */
void so_engine_settle(so_engine *e) {
    if (!e->spec)
        return;
    so_speculate_lock(e);
    so_speculate_unlock(e);
}

int so_engine_step(so_engine *e, so_err *err) {
    so_err local = {0};
    drop_cancelled(e->waiting);
    drop_cancelled(e->running);
    begin_info(e);
    double encoded = so_model_backend(e->m)->encode_ms;
    so_schedule_admit(e);
    if (!e->running)
        return 0;
    e->step.info.encode_ms = so_model_backend(e->m)->encode_ms - encoded;
    so_schedule_gather(e);
    if (e->spec) {
        so_speculate_step(e);
        so_beams_propose(e);
    }
    if (!cache_is_whole(e)) { /* a draft model's pass on the same device failed */
        forget_cache(e);
        return 1;
    }
    unsigned n_unusual = so_model_backend(e->m)->n_unusual;
    int64_t t_start = so_clock_ns();
    int rc = forward(e, &local);
    if (rc != SO_OK) {
        fail_all(e, &local);
        forget_cache(e);
        return so_err_set(err, rc, "%s", local.msg);
    }
    double pass_ms = so_clock_ms_since(t_start);
    int64_t t_pass = so_clock_ns();
    for (so_request *r = e->running; r; r = r->next) {
        so_verifier_prompt_logprobs(r);
        if (r->has_tree)
            so_verifier_run(r);
        if (r->has_tree || r->n_beam_rows > 0)
            r->stats.verify_ms += pass_ms;
        commit(e, r);
    }
    if (e->spec) {
        so_speculate_observe_pass(e, pass_ms, n_unusual);
        so_beams_observe_pass(e, pass_ms);
    }
    count_step(e, pass_ms, so_clock_ms_since(t_pass));
    for (so_request *r = e->running, *next; r; r = next) {
        next = r->next;
        if (r->has_tree)
            emit_round(r);
        else if (r->err.code != SO_OK)
            so_engine_finish(r, SO_FINISH_ERROR, false);
        else if (r->beams && so_beams_ended(r))
            so_beams_finish(r, SO_FINISH_STOP);
    }
    for (so_request *r = e->running; r; r = r->next)
        if (so_seq_open_nodes(r->seq) == 0)
            so_prefix_offer(r->seq, r->tokens, so_seq_len(r->seq));
    sum_step(e);
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

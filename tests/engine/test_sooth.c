/* The public library, used as a program would use it: through sooth.h. (The tiny model comes from
 * the test support.) */
#include "so_test.h"

#include <pthread.h>
#include <sooth.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/pool.h"
#include "sample/noise.h"
#include "so_rig.h"
#include "so_tiny.h"
#include "verify/sums.h"

typedef struct fixture {
    char *dir, *path;
    sooth_model *model;
    sooth_engine *engine;
} fixture;

static int open_fixture(void **state) {
    fixture *f = SO_NEW(fixture);
    sooth_error err;
    f->dir = so_test_tmp();
    f->path = so_path_join(f->dir, "tiny.gguf");
    so_tiny_write(f->path, NULL);
    sooth_model_params mp;
    sooth_model_params_init(&mp);
    mp.n_threads = 2;
    assert_int_equal(sooth_model_load(f->path, &mp, &f->model, &err), SOOTH_OK);
    assert_int_equal(sooth_engine_create(f->model, NULL, &f->engine, &err), SOOTH_OK);
    *state = f;
    return 0;
}

static int close_fixture(void **state) {
    fixture *f = *state;
    sooth_engine_free(f->engine);
    sooth_model_free(f->model);
    so_test_tmp_free(f->dir);
    free(f->path);
    free(f);
    return 0;
}

static sooth_params seeded(uint64_t seed, int max_tokens) {
    sooth_params p;
    sooth_params_init(&p);
    p.has_seed = 1;
    p.seed = seed;
    p.max_tokens = max_tokens;
    p.ignore_end = 1;
    return p;
}

typedef struct collected {
    so_buf text;
    int n_tokens, n_ends, cancel_after;
} collected;

static int collect(void *user, const sooth_event *ev) {
    collected *h = user;
    so_buf_append(&h->text, ev->text, ev->text_len);
    h->n_tokens += ev->token >= 0;
    h->n_ends += ev->finish != SOOTH_FINISH_NONE;
    return h->cancel_after && h->n_tokens == h->cancel_after;
}

static void test_model_facts(void **state) {
    fixture *f = *state;
    assert_string_equal(sooth_model_arch(f->model), "llama");
    assert_int_equal(sooth_model_n_ctx(f->model), SO_TINY_CTX);
    assert_true(sooth_model_n_params(f->model) > 10000);
    assert_true(sooth_model_has_chat(f->model));
    assert_non_null(strchr(sooth_version(), '.'));
}

static void test_tokenize_both_ways(void **state) {
    fixture *f = *state;
    static const char text[] = "hello \xE2\x82\xAC world";
    sooth_error err;
    int32_t ids[64];
    char back[64];
    size_t n = 0, n_again = 0, n_back = 0, len = sizeof text - 1;
    assert_int_equal(sooth_tokenize(f->model, text, len, 0, 0, NULL, 0, &n, &err), SOOTH_OK);
    assert_true(n > 0 && n <= 64);
    assert_int_equal(sooth_tokenize(f->model, text, len, 0, 0, ids, 64, &n_again, &err), SOOTH_OK);
    assert_int_equal(n, n_again);
    assert_int_equal(sooth_detokenize(f->model, ids, n, back, sizeof back, &n_back, &err),
                     SOOTH_OK);
    const char *got = n_back == len + 1 && back[0] == ' ' ? back + 1 : back;
    assert_memory_equal(got, text, len);
    ids[0] = 1 << 30;
    assert_int_equal(sooth_detokenize(f->model, ids, 1, back, sizeof back, &n_back, &err),
                     SOOTH_ERANGE);
}

static void test_generate_streams_what_it_returns(void **state) {
    fixture *f = *state;
    sooth_error err;
    collected h = {0};
    sooth_result r, again;
    sooth_result_init(&r);
    sooth_result_init(&again);
    sooth_params p = seeded(7, 40);
    assert_int_equal(sooth_generate(f->engine, "the sea", &p, collect, &h, &r, &err), SOOTH_OK);
    assert_int_equal(r.n_tokens, 40);
    assert_int_equal(h.n_tokens, 40);
    assert_int_equal(h.n_ends, 1);
    assert_int_equal(r.finish, SOOTH_FINISH_LENGTH);
    assert_int_equal(r.seed, 7);
    assert_int_equal(h.text.len, r.text_len);
    assert_memory_equal(h.text.data, r.text, r.text_len);
    assert_int_equal(strlen(r.text), r.text_len);
    assert_int_equal(r.timings.predicted_n, 40);
    assert_int_equal(sooth_generate(f->engine, "the sea", &p, NULL, NULL, &again, &err), SOOTH_OK);
    assert_memory_equal(again.tokens, r.tokens, 40 * sizeof *r.tokens);
    p.seed = 8;
    assert_int_equal(sooth_generate(f->engine, "the sea", &p, NULL, NULL, &again, &err), SOOTH_OK);
    assert_memory_not_equal(again.tokens, r.tokens, 40 * sizeof *r.tokens);
    sooth_result_deinit(&r);
    sooth_result_deinit(&again);
    so_buf_free(&h.text);
}

static void test_callback_cancels(void **state) {
    fixture *f = *state;
    sooth_error err;
    collected h = {.cancel_after = 5};
    sooth_result r;
    sooth_result_init(&r);
    sooth_params p = seeded(1, -1);
    assert_int_equal(sooth_generate(f->engine, "the sea", &p, collect, &h, &r, &err), SOOTH_OK);
    assert_int_equal(r.finish, SOOTH_FINISH_CANCELLED);
    assert_int_equal(r.n_tokens, 5);
    sooth_result_deinit(&r);
    so_buf_free(&h.text);
}

static void test_stop_string_ends_before_itself(void **state) {
    fixture *f = *state;
    sooth_error err;
    sooth_result whole, cut;
    sooth_result_init(&whole);
    sooth_result_init(&cut);
    sooth_params p = seeded(7, 60);
    assert_int_equal(sooth_generate(f->engine, "the sea", &p, NULL, NULL, &whole, &err), SOOTH_OK);
    assert_true(whole.text_len > 12);
    char stop[4] = {0};
    memcpy(stop, whole.text + 8, 3);
    const char *stops[] = {stop};
    p.stop = stops;
    p.n_stop = 1;
    assert_int_equal(sooth_generate(f->engine, "the sea", &p, NULL, NULL, &cut, &err), SOOTH_OK);
    size_t want = (size_t)(strstr(whole.text, stop) - whole.text);
    assert_int_equal(cut.finish, SOOTH_FINISH_STOP);
    assert_int_equal(cut.text_len, want);
    assert_memory_equal(cut.text, whole.text, want);
    sooth_result_deinit(&whole);
    sooth_result_deinit(&cut);
}

static void test_chat_uses_the_template(void **state) {
    fixture *f = *state;
    sooth_error err;
    sooth_message talk[] = {{"system", "be brief"}, {"user", "the sea"}};
    sooth_result chat, raw;
    sooth_result_init(&chat);
    sooth_result_init(&raw);
    sooth_params p = seeded(3, 16);
    assert_int_equal(sooth_chat(f->engine, talk, 2, &p, NULL, NULL, &chat, &err), SOOTH_OK);
    assert_int_equal(sooth_generate(f->engine, "the sea", &p, NULL, NULL, &raw, &err), SOOTH_OK);
    assert_true(chat.timings.prompt_n > raw.timings.prompt_n);
    sooth_message bad = {"user", "\xFF"};
    assert_int_equal(sooth_chat(f->engine, &bad, 1, &p, NULL, NULL, &chat, &err), SOOTH_EINVAL);
    assert_non_null(strstr(err.message, "UTF-8"));
    sooth_result_deinit(&chat);
    sooth_result_deinit(&raw);
}

static void test_many_at_once_equal_one_by_one(void **state) {
    fixture *f = *state;
    enum { N = 6 };
    static const char *const prompts[N] = {"a", "the", "the sea", "world", "in the sea", "ea"};
    sooth_error err;
    sooth_engine *many;
    sooth_engine_params ep;
    sooth_engine_params_init(&ep);
    ep.n_parallel = 4;
    ep.n_batch = 3;
    ep.n_ctx = 64;
    assert_int_equal(sooth_engine_create(f->model, &ep, &many, &err), SOOTH_OK);
    sooth_request *reqs[N];
    for (int i = 0; i < N; i++) {
        sooth_params p = seeded((uint64_t)i, 20);
        assert_int_equal(sooth_submit(many, prompts[i], NULL, 0, &p, NULL, NULL, &reqs[i], &err),
                         SOOTH_OK);
    }
    while (sooth_step(many, &err) > 0)
        ;
    for (int i = 0; i < N; i++) {
        sooth_result a, b;
        sooth_result_init(&a);
        sooth_result_init(&b);
        sooth_params p = seeded((uint64_t)i, 20);
        assert_int_equal(sooth_request_result(reqs[i], &a, &err), SOOTH_OK);
        assert_int_equal(sooth_generate(f->engine, prompts[i], &p, NULL, NULL, &b, &err), SOOTH_OK);
        assert_int_equal(a.n_tokens, 20);
        assert_memory_equal(a.tokens, b.tokens, 20 * sizeof *a.tokens);
        assert_string_equal(a.text, b.text);
        sooth_result_deinit(&a);
        sooth_result_deinit(&b);
    }
    sooth_engine_free(many); /* frees its requests too */
}

typedef struct worker {
    fixture *f;
    int32_t tokens[24];
} worker;

static void *work(void *arg) {
    worker *w = arg;
    sooth_error err;
    sooth_engine *e;
    sooth_result r;
    sooth_result_init(&r);
    sooth_params p = seeded(5, 24);
    if (sooth_engine_create(w->f->model, NULL, &e, &err) != SOOTH_OK)
        return NULL;
    if (sooth_generate(e, "the sea", &p, NULL, NULL, &r, &err) == SOOTH_OK)
        memcpy(w->tokens, r.tokens, sizeof w->tokens);
    sooth_result_deinit(&r);
    sooth_engine_free(e);
    return w;
}

static void test_threads_take_turns(void **state) {
    enum { N = 4 };
    pthread_t t[N];
    worker w[N];
    memset(w, 0, sizeof w);
    for (int i = 0; i < N; i++) {
        w[i].f = *state;
        assert_int_equal(pthread_create(&t[i], NULL, work, &w[i]), 0);
    }
    for (int i = 0; i < N; i++) {
        void *ok;
        pthread_join(t[i], &ok);
        assert_non_null(ok);
        assert_memory_equal(w[i].tokens, w[0].tokens, sizeof w[0].tokens);
    }
    assert_true(w[0].tokens[0] != w[0].tokens[1] || w[0].tokens[1] != w[0].tokens[2]);
}

static void test_errors_name_the_cause(void **state) {
    fixture *f = *state;
    sooth_error err = {0};
    sooth_model *m = NULL;
    assert_int_equal(sooth_model_load("/nonexistent/x.gguf", NULL, &m, &err), SOOTH_ENOTFOUND);
    assert_non_null(strstr(err.message, "/nonexistent/x.gguf"));
    assert_null(m);
    assert_int_equal(sooth_model_load("/nonexistent/x.gguf", NULL, &m, NULL), SOOTH_ENOTFOUND);
    sooth_model_params mp;
    sooth_model_params_init(&mp);
    mp.cpu_level = "mmx";
    assert_int_equal(sooth_model_load(f->path, &mp, &m, &err), SOOTH_EINVAL);
    assert_non_null(strstr(err.message, "mmx"));
    sooth_params p = {0}; /* never initialised */
    assert_int_equal(sooth_generate(f->engine, "a", &p, NULL, NULL, NULL, &err), SOOTH_EINVAL);
    assert_non_null(strstr(err.message, "sooth_params_init"));
    char text[1001] = {0};
    memset(text, 'q', sizeof text - 1);
    p = seeded(1, 5);
    assert_int_equal(sooth_generate(f->engine, text, &p, NULL, NULL, NULL, &err), SOOTH_ELIMIT);
    p.top_p = 3;
    assert_int_equal(sooth_generate(f->engine, "a", &p, NULL, NULL, NULL, &err), SOOTH_ERANGE);
    assert_non_null(strstr(err.message, "top-p"));
}

/* Also of the kernels outside the backend. */
static void test_cpu_level_reaches_all_kernels(void **state) {
    fixture *f = *state;
    sooth_error err;
    sooth_model *m;
    sooth_model_params mp;
    sooth_model_params_init(&mp);
    mp.n_threads = 1;
    mp.cpu_level = "scalar";
    so_log_set_level(SO_LOG_ERROR);
    assert_int_equal(sooth_model_load(f->path, &mp, &m, &err), SOOTH_OK);
    so_log_set_level(SO_LOG_WARN);
    assert_int_equal(so_cpu_level_in_use(), SO_CPU_SCALAR);
    assert_ptr_equal(so_noise(), &so_noise_scalar);
    assert_ptr_equal(so_sums(), &so_sums_scalar);
    sooth_model_free(m);
    mp.cpu_level = NULL;
    assert_int_equal(sooth_model_load(f->path, &mp, &m, &err), SOOTH_OK);
    assert_int_equal(so_cpu_level_in_use(), so_cpu_best_level());
    sooth_model_free(m);
}

/* A program built when the struct was shorter: fields past its size keep their defaults. */
static void test_old_struct_size(void **state) {
    fixture *f = *state;
    sooth_error err;
    sooth_params p = seeded(7, 5), old;
    size_t size = offsetof(sooth_params, bias);
    memset(&old, 0xEE, sizeof old);
    sooth_params_init_sized(&old, size);
    assert_int_equal(((unsigned char *)&old)[size], 0xEE);
    old.has_seed = 1;
    old.seed = 7;
    old.max_tokens = 5;
    sooth_result a, b;
    sooth_result_init(&a);
    sooth_result_init(&b);
    p.ignore_end = 0;
    assert_int_equal(sooth_generate(f->engine, "the sea", &p, NULL, NULL, &a, &err), SOOTH_OK);
    assert_int_equal(sooth_generate(f->engine, "the sea", &old, NULL, NULL, &b, &err), SOOTH_OK);
    assert_int_equal(a.n_tokens, b.n_tokens);
    assert_memory_equal(a.tokens, b.tokens, a.n_tokens * sizeof *a.tokens);
    sooth_result_deinit(&a);
    sooth_result_deinit(&b);
}

/* --- logprobs --- */

typedef struct scores {
    sooth_result *want;
    size_t n;
} scores;

static int check_scores(void *user, const sooth_event *ev) {
    scores *s = user;
    if (ev->token < 0) {
        assert_int_equal(ev->n_top, 0);
        return 0;
    }
    assert_true(ev->logprob == s->want->logprobs[s->n]);
    assert_int_equal(ev->n_top, s->want->n_top);
    assert_memory_equal(ev->top, s->want->top + s->n * ev->n_top, ev->n_top * sizeof *ev->top);
    s->n++;
    return 0;
}

static void test_logprobs(void **state) {
    fixture *f = *state;
    sooth_error err;
    sooth_params p = seeded(3, 24);
    sooth_result plain, got;
    sooth_result_init(&plain);
    sooth_result_init(&got);
    assert_int_equal(sooth_generate(f->engine, "the sea", &p, NULL, NULL, &got, &err), SOOTH_OK);
    assert_null(got.logprobs);
    assert_null(got.top);
    p.logprobs = 4;
    assert_int_equal(sooth_generate(f->engine, "the sea", &p, NULL, NULL, &plain, &err), SOOTH_OK);
    assert_int_equal(plain.n_tokens, 24);
    assert_int_equal(plain.n_top, 4);
    p.spec = "lookup,ngram,random";
    p.spec_length = 3;
    scores s = {.want = &plain};
    assert_int_equal(sooth_generate(f->engine, "the sea", &p, check_scores, &s, &got, &err),
                     SOOTH_OK);
    assert_int_equal(s.n, 24);
    assert_true(got.timings.draft_n > 0);
    assert_memory_equal(got.logprobs, plain.logprobs, 24 * sizeof *got.logprobs);
    assert_memory_equal(got.top, plain.top, 24 * 4 * sizeof *got.top);
    for (size_t i = 0; i < 24; i++)
        assert_true(plain.logprobs[i] <= plain.top[4 * i].logprob && plain.logprobs[i] < 0);
    p.logprobs = 21;
    assert_int_equal(sooth_generate(f->engine, "x", &p, NULL, NULL, NULL, &err), SOOTH_ERANGE);
    sooth_result_deinit(&plain);
    sooth_result_deinit(&got);
}

static void test_beams(void **state) {
    fixture *f = *state;
    sooth_error err;
    sooth_params p;
    sooth_result got, again;
    sooth_params_init(&p);
    sooth_result_init(&got);
    sooth_result_init(&again);
    p.max_tokens = 12;
    p.beams = 4;
    p.n_best = 3;
    assert_int_equal(sooth_generate(f->engine, "the sea", &p, NULL, NULL, &got, &err), SOOTH_OK);
    assert_int_equal(got.n_best, 3);
    assert_string_equal(got.best[0].text, got.text);
    assert_int_equal(got.best[0].n_tokens, got.n_tokens);
    for (size_t i = 0; i < 3; i++) {
        size_t n = got.best[i].n_tokens + (got.best[i].finish == SOOTH_FINISH_STOP);
        assert_true(i == 0 || got.best[i].score <= got.best[i - 1].score);
        assert_true(got.best[i].score == got.best[i].logprob / (double)n);
        assert_int_equal(strlen(got.best[i].text), got.best[i].text_len);
    }
    p.spec = "lookup";
    assert_int_equal(sooth_generate(f->engine, "the sea", &p, NULL, NULL, &again, &err), SOOTH_OK);
    assert_true(again.best[2].score == got.best[2].score);
    /* A stop string ends a hypothesis where its text begins; text of another one may be best then. */
    char stop[4] = {0};
    const char *stops[] = {stop};
    assert_true(got.text_len > 12);
    memcpy(stop, got.text + 6, 3);
    p.stop = stops;
    p.n_stop = 1;
    assert_int_equal(sooth_generate(f->engine, "the sea", &p, NULL, NULL, &again, &err), SOOTH_OK);
    int n_stopped = 0;
    for (size_t i = 0; i < again.n_best; i++) {
        assert_null(strstr(again.best[i].text, stop));
        n_stopped += again.best[i].finish == SOOTH_FINISH_STOP;
    }
    assert_true(n_stopped > 0);
    assert_string_equal(again.text, again.best[0].text);
    p.n_stop = 0;
    p.early_stopping = 3;
    assert_int_equal(sooth_generate(f->engine, "x", &p, NULL, NULL, NULL, &err), SOOTH_ERANGE);
    p.early_stopping = SOOTH_EARLY_STOPPING_TRUE;
    p.temp = 0.5f;
    assert_int_equal(sooth_generate(f->engine, "x", &p, NULL, NULL, NULL, &err), SOOTH_EINVAL);
    p.temp = 0;
    p.beams = 65;
    assert_int_equal(sooth_generate(f->engine, "x", &p, NULL, NULL, NULL, &err), SOOTH_ERANGE);
    p.beams = 0;
    assert_int_equal(sooth_generate(f->engine, "the sea", &p, NULL, NULL, &got, &err), SOOTH_OK);
    assert_int_equal(got.n_best, 0);
    assert_null(got.best);
    sooth_result_deinit(&got);
    sooth_result_deinit(&again);
}

/* A program whose sooth_result ends before the logprobs gets none, and nothing is written there. */
static void test_old_result_without_logprobs(void **state) {
    fixture *f = *state;
    sooth_error err;
    sooth_params p = seeded(3, 8);
    sooth_result old;
    size_t size = offsetof(sooth_result, logprobs);
    memset(&old, 0xEE, sizeof old);
    sooth_result_init_sized(&old, size);
    p.logprobs = 2;
    for (int i = 0; i < 2; i++)
        assert_int_equal(sooth_generate(f->engine, "the sea", &p, NULL, NULL, &old, &err),
                         SOOTH_OK);
    assert_int_equal(old.n_tokens, 8);
    for (size_t i = size; i < sizeof old; i++)
        assert_int_equal(((unsigned char *)&old)[i], 0xEE);
    sooth_result_deinit(&old);
}

/* --- speculation --- */

typedef struct script {
    const int32_t *text; /* the text that will be generated */
    int n_text, n_calls;
    bool fail;
} script;

static int mostly_right(void *user, const int32_t *tokens, int n_tokens, int n_prompt, int32_t *out,
                        int max) {
    script *p = user;
    int at = n_tokens - n_prompt, n = 0;
    assert_true(tokens != NULL && at >= 0);
    p->n_calls++;
    for (; n < max && at + n < p->n_text; n++)
        out[n] = p->text[at + n] + (n == 2 && at % 5 == 0); /* sometimes wrong */
    return p->fail ? -1 : n;
}

static void generate(sooth_engine *e, const sooth_params *p, sooth_result *r) {
    sooth_error err;
    sooth_result_init(r);
    if (sooth_generate(e, "the sea", p, NULL, NULL, r, &err) != SOOTH_OK)
        fail_msg("%s", err.message);
}

/* Each cache type gives the same text with and without guesses, and is selected by its name. */
static void test_cache_types(void **state) {
    fixture *f = *state;
    static const char *const types[] = {NULL, "f16", "F32", "q8_0"};
    sooth_error err;
    sooth_result named[SO_LEN(types)], got;
    sooth_engine_params ep;
    for (size_t i = 0; i < SO_LEN(types); i++) {
        sooth_params p = seeded(4, 30);
        sooth_engine *e = NULL;
        sooth_engine_params_init(&ep);
        ep.draft_model = f->path;
        ep.kv_type = types[i];
        assert_int_equal(sooth_engine_create(f->model, &ep, &e, &err), SOOTH_OK);
        p.spec = "none";
        generate(e, &p, &named[i]);
        p.spec = "model";
        p.spec_length = 4;
        generate(e, &p, &got);
        assert_int_equal(got.n_tokens, named[i].n_tokens);
        assert_memory_equal(got.tokens, named[i].tokens, got.n_tokens * sizeof *got.tokens);
        assert_true(got.timings.draft_n_accepted > 10);
        sooth_result_deinit(&got);
        sooth_engine_free(e);
    }
    assert_string_equal(named[0].text, named[1].text);
    for (size_t i = 0; i < SO_LEN(types); i++)
        sooth_result_deinit(&named[i]);
    static const char *const bad[] = {"q8", "Q4_0", ""};
    for (size_t i = 0; i < SO_LEN(bad); i++) {
        sooth_engine *e = NULL;
        ep.kv_type = bad[i];
        assert_int_equal(sooth_engine_create(f->model, &ep, &e, &err), SOOTH_EINVAL);
        assert_non_null(strstr(err.message, "must be f16, f32, q8_0 or bf16"));
        assert_null(e);
    }
    sooth_engine *e = NULL;
    if (so_test_on_gpu())
        return;
    ep.kv_type = "bf16"; /* of a GPU */
    assert_int_equal(sooth_engine_create(f->model, &ep, &e, &err), SOOTH_EUNSUPPORTED);
    assert_non_null(strstr(err.message, "BF16 needs a GPU; 'cpu' has F16, F32 and Q8_0"));
}

/* With `reject` the result has a nonce, which replays the text; otherwise it has none. */
static void test_nonce(void **state) {
    fixture *f = *state;
    sooth_params p = seeded(4, 30);
    sooth_result plain, first, second;
    p.has_nonce = 1;
    p.nonce = 9;
    generate(f->engine, &p, &plain);
    assert_int_equal(plain.has_nonce, 0);
    p.has_nonce = 0;
    p.spec = "random";
    p.verify = "reject";
    for (p.spec_length = 0; p.spec_length <= 3; p.spec_length += 3) {
        generate(f->engine, &p, &first);
        generate(f->engine, &p, &second);
        assert_true(first.has_nonce && first.nonce > 0 && first.nonce < (uint64_t)1 << 53);
        assert_true((first.nonce == second.nonce) == (p.spec_length > 0));
        assert_int_equal(first.seed, 4);
        sooth_result_deinit(&second);
        sooth_result_deinit(&first);
    }
    p.spec_length = 2;
    generate(f->engine, &p, &first);
    p.has_nonce = 1;
    p.nonce = first.nonce;
    generate(f->engine, &p, &second);
    assert_true(second.has_nonce && second.nonce == first.nonce);
    assert_string_equal(first.text, second.text);
    sooth_result_deinit(&plain);
    sooth_result_deinit(&first);
    sooth_result_deinit(&second);
}

/* Draft cores: the model drafts for itself on one of two, ahead, and the text stays the same. Too many
 * cores, and both kinds of hardware at once, are refused with the numbers. */
static void test_draft_cores(void **state) {
    fixture *f = *state;
    sooth_error err;
    sooth_model *m = NULL;
    sooth_engine *e = NULL;
    sooth_result plain, got;
    sooth_params p = seeded(4, 30);
    sooth_model_params mp;
    sooth_engine_params ep;
    sooth_model_params_init(&mp);
    mp.draft_cores = so_cpu_count();
    assert_int_equal(sooth_model_load(f->path, &mp, &m, &err), SOOTH_ERANGE);
    assert_non_null(strstr(err.message, "for drafts"));
    mp.draft_cores = -1;
    assert_int_equal(sooth_model_load(f->path, &mp, &m, &err), SOOTH_ERANGE);
    assert_non_null(strstr(err.message, "draft_cores -1"));
    mp.draft_cores = 1;
    mp.draft_device = "cpu";
    assert_int_equal(sooth_model_load(f->path, &mp, &m, &err), SOOTH_EINVAL);
    assert_non_null(strstr(err.message, "set one of them"));
    if (so_cpu_count() < 2 || so_test_on_gpu())
        return;
    mp.draft_device = NULL;
    assert_int_equal(sooth_model_load(f->path, &mp, &m, &err), SOOTH_OK);
    sooth_engine_params_init(&ep);
    ep.draft_model = f->path;
    assert_int_equal(sooth_engine_create(m, &ep, &e, &err), SOOTH_OK);
    generate(e, &p, &plain);
    p.spec = "async(model,wait=3)";
    p.spec_length = 3;
    generate(e, &p, &got);
    assert_int_equal(got.n_tokens, plain.n_tokens);
    assert_memory_equal(got.tokens, plain.tokens, plain.n_tokens * sizeof *plain.tokens);
    assert_true(got.timings.draft_n_accepted > 10);
    assert_true(plain.hit_rate < 0 && got.hit_rate > 0.5 && got.hit_rate <= 1);
    assert_int_equal(sooth_generate(f->engine, "x", &p, NULL, NULL, NULL, &err), SOOTH_EINVAL);
    sooth_result_deinit(&plain);
    sooth_result_deinit(&got);
    sooth_engine_free(e);
    sooth_model_free(m);
}

static void test_own_drafter(void **state) {
    fixture *f = *state;
    sooth_error err;
    sooth_params p = seeded(4, 30);
    sooth_result plain, got;
    generate(f->engine, &p, &plain);
    script known = {.text = plain.tokens, .n_text = (int)plain.n_tokens};
    sooth_engine_params ep;
    sooth_engine *e = NULL;
    sooth_engine_params_init(&ep);
    ep.drafter = mostly_right;
    ep.drafter_user = &known;
    ep.draft_model = f->path;
    assert_int_equal(sooth_engine_create(f->model, &ep, &e, &err), SOOTH_OK);
    static const char *const specs[] = {"user", "model", "auto", "user"};
    for (int i = 0; i < 4; i++) {
        p.spec = specs[i];
        p.spec_length = i == 2 ? 0 : 4;
        known.fail = i == 3;
        generate(e, &p, &got);
        assert_int_equal(got.n_tokens, plain.n_tokens);
        assert_memory_equal(got.tokens, plain.tokens, plain.n_tokens * sizeof *plain.tokens);
        assert_string_equal(got.text, plain.text);
        if (i < 2)
            assert_true(got.timings.rounds < 20 && got.timings.draft_n_accepted > 10);
        if (i == 3)
            assert_int_equal(got.timings.draft_n, 0);
        sooth_result_deinit(&got);
    }
    assert_true(known.n_calls > 4);
    p.spec = "user";
    assert_int_equal(sooth_generate(f->engine, "x", &p, NULL, NULL, NULL, &err), SOOTH_EINVAL);
    p.spec = "ngram";
    static const struct {
        const char *verify;
        int length, code;
    } bad[] = {{"strictly", 4, SOOTH_EINVAL},    {"lenient", 4, SOOTH_EINVAL},
               {"lenient=", 4, SOOTH_EINVAL},    {"lenient=0.5x", 4, SOOTH_EINVAL},
               {"lenient=0", 4, SOOTH_ERANGE},   {"lenient=1.01", 4, SOOTH_ERANGE},
               {"lenient=nan", 4, SOOTH_ERANGE}, {NULL, -1, SOOTH_ERANGE},
               {NULL, 17, SOOTH_ERANGE},         {NULL, 1 << 30, SOOTH_ERANGE}};
    for (size_t i = 0; i < SO_LEN(bad); i++) {
        p.verify = bad[i].verify;
        p.spec_length = bad[i].length;
        assert_int_equal(sooth_generate(e, "x", &p, NULL, NULL, NULL, &err), bad[i].code);
        if (bad[i].verify)
            assert_non_null(strstr(err.message, "lenient"));
        else
            assert_non_null(strstr(err.message, "--spec-length"));
    }
    sooth_engine *none = NULL;
    ep.draft_model = "/no/such/draft.gguf";
    assert_int_equal(sooth_engine_create(f->model, &ep, &none, &err), SOOTH_ENOTFOUND);
    assert_non_null(strstr(err.message, "/no/such/draft.gguf"));
    assert_null(none);
    sooth_result_deinit(&plain);
    sooth_engine_free(e);
}

/* Two siblings per position, the right token second. */
static int two_per_depth(void *user, const sooth_draft *d) {
    const script *p = user;
    int at = d->n_tokens - d->n_prompt, n = 0;
    assert_true(d->size >= sizeof *d && d->max >= d->max_depth && d->max_depth > 0);
    for (int k = 0; k < d->max_depth && at + k < p->n_text && n + 2 <= d->max; k++, n += 2) {
        d->ids[n] = (p->text[at + k] + 1) % 200;
        d->ids[n + 1] = p->text[at + k];
        d->parents[n] = d->parents[n + 1] = k ? n - 1 : -1;
    }
    return n;
}

static void test_own_tree(void **state) {
    fixture *f = *state;
    sooth_error err;
    sooth_params p = seeded(4, 30);
    sooth_result plain, got;
    generate(f->engine, &p, &plain);
    script known = {.text = plain.tokens, .n_text = (int)plain.n_tokens};
    sooth_engine_params ep;
    sooth_engine *e = NULL;
    sooth_engine_params_init(&ep);
    ep.tree_drafter = two_per_depth;
    ep.drafter_user = &known;
    assert_int_equal(sooth_engine_create(f->model, &ep, &e, &err), SOOTH_OK);
    p.spec = "user";
    p.spec_length = 4;
    generate(e, &p, &got);
    assert_int_equal(got.n_tokens, plain.n_tokens);
    assert_memory_equal(got.tokens, plain.tokens, plain.n_tokens * sizeof *plain.tokens);
    assert_int_equal(got.timings.rounds, 6); /* 30 tokens, five per round */
    assert_int_equal(got.timings.tested_n, 2 * got.timings.draft_n_accepted);
    sooth_result_deinit(&got);
    sooth_engine_free(e);
    e = NULL;
    ep.drafter = mostly_right;
    assert_int_equal(sooth_engine_create(f->model, &ep, &e, &err), SOOTH_EINVAL);
    assert_non_null(strstr(err.message, "drafter and tree_drafter are both set"));
    assert_null(e);
    sooth_result_deinit(&plain);
}

typedef struct end_event {
    int n_ends, n_early;
    sooth_timings timings;
    sooth_metrics metrics;
} end_event;

static int keep_end(void *user, const sooth_event *ev) {
    end_event *t = user;
    if (ev->finish == SOOTH_FINISH_NONE) {
        t->n_early += ev->timings || ev->metrics;
        return 0;
    }
    t->n_ends++;
    t->timings = *ev->timings;
    t->metrics = *ev->metrics;
    return 0;
}

static void test_prediction_and_metrics(void **state) {
    fixture *f = *state;
    sooth_error err;
    sooth_params p = seeded(4, 30);
    sooth_result plain, got;
    p.temp = 0;
    generate(f->engine, &p, &plain);
    assert_true(plain.metrics.tokens_per_pass == 1 && plain.metrics.alpha < 0);
    p.spec = "predict";
    p.spec_length = 3;
    for (int with = 0; with < 2; with++) {
        end_event t = {0};
        p.prediction = with ? plain.text : NULL;
        sooth_result_init(&got);
        assert_int_equal(sooth_generate(f->engine, "the sea", &p, keep_end, &t, &got, &err),
                         SOOTH_OK);
        assert_string_equal(got.text, plain.text);
        assert_int_equal(t.n_ends, 1);
        assert_int_equal(t.n_early, 0);
        assert_memory_equal(&t.timings, &got.timings, sizeof t.timings);
        assert_memory_equal(&t.metrics, &got.metrics, sizeof t.metrics);
        assert_true(with ? got.timings.draft_n_accepted > 4 : got.timings.draft_n == 0);
        if (with)
            assert_true(got.metrics.alpha ==
                        (double)got.timings.draft_n_accepted / got.timings.tested_n);
        sooth_result_deinit(&got);
    }
    sooth_result_deinit(&plain);
}

/* --- the cache, priorities --- */

static sooth_engine *cache_of(const fixture *f, int n_parallel, int kv_pages, const char *layout) {
    sooth_engine_params ep;
    sooth_error err;
    sooth_engine *e = NULL;
    sooth_engine_params_init(&ep);
    ep.n_parallel = n_parallel;
    ep.kv_pages = kv_pages;
    ep.kv_layout = layout;
    assert_int_equal(sooth_engine_create(f->model, &ep, &e, &err), SOOTH_OK);
    return e;
}

static sooth_request *submit(sooth_engine *e, const char *prompt, const sooth_params *p,
                             collected *h) {
    sooth_error err;
    sooth_request *r = NULL;
    assert_int_equal(sooth_submit(e, prompt, NULL, 0, p, collect, h, &r, &err), SOOTH_OK);
    return r;
}

/* The prediction fails after some of its tokens were made; the leak sanitizer checks that they are
 * freed. */
static void test_prediction_too_long(void **state) {
    fixture *f = *state;
    enum { LEN = (64 << 20) + 16 }; /* one word longer than the tokenizer accepts */
    sooth_params p = seeded(1, 5);
    sooth_error err = {0};
    char *text = so_alloc(LEN + 1);
    memset(text, 'q', LEN);
    memcpy(text, "a b ", 4);
    text[LEN] = '\0';
    p.spec = "predict";
    p.prediction = text;
    assert_int_equal(sooth_generate(f->engine, "a", &p, NULL, NULL, NULL, &err), SOOTH_ELIMIT);
    assert_non_null(strstr(err.message, "a word of"));
    free(text);
}

/* With pages and slots for all requests, or for some at a time, the texts are the same. */
static void test_cache_settings(void **state) {
    fixture *f = *state;
    enum { N = 4, TOKENS = 80 };
    static const struct {
        int pages;
        const char *layout;
    } variants[] = {{0, NULL}, {4, "paged"}, {0, "slotted"}, {9, "slotted"}};
    so_buf want = {0};
    for (size_t w = 0; w < SO_LEN(variants); w++) {
        sooth_engine *e = cache_of(f, N, variants[w].pages, variants[w].layout);
        collected h[N] = {0};
        sooth_error err;
        for (int i = 0; i < N; i++) {
            sooth_params p = seeded((uint64_t)i, TOKENS);
            submit(e, "the sea", &p, &h[i]);
        }
        while (sooth_step(e, &err) > 0)
            ;
        so_buf all = {0};
        for (int i = 0; i < N; i++) {
            assert_int_equal(h[i].n_tokens, TOKENS);
            so_buf_append_str(&all, so_buf_str(&h[i].text));
            so_buf_free(&h[i].text);
        }
        if (w == 0)
            so_buf_append_str(&want, so_buf_str(&all));
        assert_int_equal(all.len, want.len);
        assert_memory_equal(all.data, want.data, want.len);
        so_buf_free(&all);
        sooth_engine_free(e);
    }
    so_buf_free(&want);
}

static void test_cache_limits(void **state) {
    fixture *f = *state;
    sooth_engine_params ep;
    sooth_error err;
    sooth_engine *e = cache_of(f, 1, 2, NULL), *none = NULL;
    sooth_request *r = NULL;
    sooth_params p = seeded(1, 100);
    assert_int_equal(sooth_submit(e, "the sea", NULL, 0, &p, NULL, NULL, &r, &err), SOOTH_ELIMIT);
    assert_non_null(strstr(err.message, "there are 2"));
    sooth_engine_free(e);
    sooth_engine_params_init(&ep);
    ep.kv_pages = -1;
    assert_int_equal(sooth_engine_create(f->model, &ep, &none, &err), SOOTH_ERANGE);
    assert_non_null(strstr(err.message, "kv_pages -1"));
    ep.kv_pages = 0;
    ep.kv_layout = "round";
    assert_int_equal(sooth_engine_create(f->model, &ep, &none, &err), SOOTH_EINVAL);
    assert_non_null(strstr(err.message, "'round'"));
    ep.kv_layout = "slotted";
    ep.kv_pages = 1; /* less than one slot */
    assert_true(sooth_engine_create(f->model, &ep, &none, &err) < 0);
    assert_null(none);
}

/* One slot: the highest priority is answered first, although it was submitted last. */
static void test_priority(void **state) {
    fixture *f = *state;
    sooth_engine *e = cache_of(f, 1, 0, NULL);
    sooth_request *r[3];
    collected h[3] = {0};
    sooth_error err;
    static const int priority[] = {-1, 0, 7}, rank[] = {2, 1, 0};
    for (int i = 0; i < 3; i++) {
        sooth_params p = seeded(1, 6);
        p.priority = priority[i];
        r[i] = submit(e, "the sea", &p, &h[i]);
    }
    int n_done = 0;
    while (sooth_step(e, &err) > 0 || n_done < 3)
        for (int i = 0; i < 3; i++)
            if (r[i] && sooth_request_finish(r[i]) != SOOTH_FINISH_NONE) {
                assert_int_equal(rank[i], n_done++);
                sooth_request_free(r[i]);
                r[i] = NULL;
            }
    for (int i = 0; i < 3; i++)
        so_buf_free(&h[i].text);
    sooth_engine_free(e);
}

int main(void) {
#define WITH_FIXTURE(t) cmocka_unit_test_setup_teardown(t, open_fixture, close_fixture)
    const struct CMUnitTest tests[] = {
        WITH_FIXTURE(test_model_facts),
        WITH_FIXTURE(test_tokenize_both_ways),
        WITH_FIXTURE(test_generate_streams_what_it_returns),
        WITH_FIXTURE(test_callback_cancels),
        WITH_FIXTURE(test_stop_string_ends_before_itself),
        WITH_FIXTURE(test_chat_uses_the_template),
        WITH_FIXTURE(test_many_at_once_equal_one_by_one),
        WITH_FIXTURE(test_threads_take_turns),
        WITH_FIXTURE(test_errors_name_the_cause),
        WITH_FIXTURE(test_cpu_level_reaches_all_kernels),
        WITH_FIXTURE(test_old_struct_size),
        WITH_FIXTURE(test_logprobs),
        WITH_FIXTURE(test_beams),
        WITH_FIXTURE(test_old_result_without_logprobs),
        WITH_FIXTURE(test_cache_types),
        WITH_FIXTURE(test_nonce),
        WITH_FIXTURE(test_draft_cores),
        WITH_FIXTURE(test_own_drafter),
        WITH_FIXTURE(test_own_tree),
        WITH_FIXTURE(test_prediction_and_metrics),
        WITH_FIXTURE(test_prediction_too_long),
        WITH_FIXTURE(test_cache_settings),
        WITH_FIXTURE(test_cache_limits),
        WITH_FIXTURE(test_priority),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

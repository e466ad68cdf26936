/* Exact under load, with a real model: many requests of mixed lengths, temperatures, penalties,
 * drafters, priorities and shared beginnings, cancelled and freed at random, in a cache that forces
 * preemption, paged and slotted. Every token is the one that the request has alone, with ==.
 *
 *   load MODEL [--requests N] [--tokens N] [--seed N]
 *
 * MODEL is a file or a pulled model's name; its own weights, rounded to Q4_0, are its draft. By
 * default 28 requests of up to 64 tokens (a minute at most); tests/engine/test_load does the same
 * with tiny models. Prints a line per cache; exit 1 on any difference. */
#include "so_rig.h"
#include "so_test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "engine/bundle.h"
#include "so_load.h"

enum { N_CTX = 256, MAX_PROMPT = 120, AT_ONCE = 6 };

static const char SOURCE[] =
    "The harbour lies at the mouth of the river, where the water is deep and the wind is seldom "
    "strong. In the morning the boats go out, in the evening the boats come in, and in between the "
    "men who are too old to go mend the nets and talk about the weather. The weather is good, they "
    "say, when the hills are far away, and bad when the hills are near. def count(words): return "
    "{w: words.count(w) for w in set(words)} def longest(words): return max(words, key=len) Nobody "
    "knows why this is so, but it is so. The first boat of the day is the boat of the pilot; the "
    "second boat of the day is the boat of the priest; the third boat of the day takes the post. "
    "One, two, three, four, five, six, seven, eight, nine, ten; one, two, three, four, five.";

static const char *g_model;
static int g_requests = 28, g_tokens = 64, g_seed = 1;

typedef struct fixture {
    so_bundle target, draft;
    so_tokens source;
    so_load *load;
} fixture;

/* backend NULL: one of its own, and the weights as they are. */
static void open_bundle(const char *path, so_backend *backend, so_bundle *out) {
    so_bundle_opts o;
    so_err err = {0};
    so_bundle_defaults(&o);
    o.device = so_test_device();
    o.backend = backend;
    o.quantize = backend != NULL;
    o.dtype = SO_DTYPE_Q4_0;
    SO_OK_OR_FAIL(so_bundle_open(path, &o, out, &err), err);
}

static int open_fixture(void **state) {
    static fixture f;
    so_err err = {0};
    char path[1024];
    const char *pulled = so_test_model(g_model);
    snprintf(path, sizeof path, "%s", pulled ? pulled : g_model);
    open_bundle(path, NULL, &f.target);
    open_bundle(path, f.target.backend, &f.draft);
    SO_OK_OR_FAIL(so_tokenizer_encode(f.target.tok, so_str_c(SOURCE), 0, &f.source, &err), err);
    f.load = so_load_create(&(so_load_opts){.target = f.target.model,
                                            .tok = f.target.tok,
                                            .kv_dtype = SO_DTYPE_F16,
                                            .n_requests = g_requests,
                                            .n_ctx = N_CTX,
                                            .max_prompt = MAX_PROMPT,
                                            .max_tokens = g_tokens,
                                            .source = f.source.ids,
                                            .n_source = (int)f.source.len,
                                            .with_draft = true,
                                            .seed = (uint64_t)g_seed});
    *state = &f;
    return 0;
}

static int close_fixture(void **state) {
    fixture *f = *state;
    so_load_free(f->load);
    so_tokens_free(&f->source);
    so_bundle_close(&f->draft);
    so_bundle_close(&f->target);
    return 0;
}

static void run(fixture *f, so_kv_layout layout, int n_pages, const char *name) {
    so_engine_opts o;
    so_load_result got;
    so_engine_defaults(f->target.model, &o);
    o.n_ctx = N_CTX;
    o.n_parallel = layout == SO_KV_SLOTTED ? 3 : AT_ONCE; /* few: so that priorities preempt */
    o.n_batch = 64;
    o.n_pages = n_pages;
    o.kv_layout = layout;
    o.max_draft = 8;
    o.draft = f->draft.model;
    o.draft_tok = f->draft.tok;
    so_load_run(f->load, &o, name, &got);
    assert_true(got.stats.preemptions > 0);
}

static void test_pages(void **state) {
    run(*state, SO_KV_PAGED, so_kv_pages_for(MAX_PROMPT + g_tokens) + 2, "paged");
}

static void test_slots(void **state) { run(*state, SO_KV_SLOTTED, 0, "slotted"); }

static bool take_number(const char *arg, const char *value, const char *name, int most, int *out) {
    if (strcmp(arg, name) != 0)
        return false;
    long n = value ? strtol(value, NULL, 10) : 0;
    if (n < 1 || n > most) {
        fprintf(stderr, "load: %s takes a number from 1 to %d\n", name, most);
        exit(2);
    }
    *out = (int)n;
    return true;
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *value = argv[i + 1]; /* argv ends with NULL */
        if (take_number(argv[i], value, "--requests", 10000, &g_requests) ||
            take_number(argv[i], value, "--tokens", N_CTX - MAX_PROMPT - 1, &g_tokens) ||
            take_number(argv[i], value, "--seed", 1 << 30, &g_seed))
            i++;
        else
            g_model = argv[i];
    }
    if (!g_model) {
        fprintf(stderr, "usage: load MODEL [--requests N] [--tokens N] [--seed N]\n");
        return 2;
    }
    if (!so_test_model(g_model) && !so_file_exists(g_model)) {
        so_test_note_skip("model %s is not here (sooth pull %s)", g_model, g_model);
        return 0;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_pages), cmocka_unit_test(test_slots)};
    return cmocka_run_group_tests(tests, open_fixture, close_fixture);
}

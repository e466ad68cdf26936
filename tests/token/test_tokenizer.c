/* Ids compared with those of Hugging Face tokenizers and llama.cpp: golden files
 * (tools/golden_tokenizers.py), and vocabularies with expected ids from the shared material. */
#include "so_test.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"
#include "token/tokenizer.h"
#include "token/utf8.h"

static const json_t *field(const json_t *o, const char *key) {
    const json_t *j = json_object_get(o, key);
    if (!j)
        fail_msg("golden file has no %s", key);
    return j;
}

static json_t *golden(const char *name) {
    char path[128];
    json_error_t je;
    snprintf(path, sizeof path, "golden/tokenizers/%s.json", name);
    json_t *j = json_load_file(so_test_data(path), JSON_ALLOW_NUL, &je);
    if (!j)
        fail_msg("%s: %s", path, je.text);
    return j;
}

static int sextet(char c) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const char *p = c ? strchr(digits, c) : NULL;
    return p ? (int)(p - digits) : -1;
}

static void unbase64(const char *s, so_buf *out) {
    unsigned bits = 0, n = 0;
    for (int v; (v = sextet(*s)) >= 0; s++) {
        bits = bits << 6 | (unsigned)v;
        n += 6;
        if (n >= 8) {
            n -= 8;
            so_buf_append_char(out, (char)(bits >> n & 0xFF));
        }
    }
}

/* Encodes text and compares with `ids` between `prefix` and `suffix` (either may be NULL). */
static void check_ids(const so_tokenizer *t, so_str text, unsigned flags, const json_t *prefix,
                      const json_t *ids, const json_t *suffix, const char *what) {
    so_tokens got = {0}, want = {0};
    so_err err;
    SO_OK_OR_FAIL(so_tokenizer_encode(t, text, flags, &got, &err), err);
    const json_t *parts[3] = {prefix, ids, suffix};
    for (int p = 0; p < 3; p++)
        for (size_t i = 0; i < json_array_size(parts[p]); i++)
            so_tokens_push(&want, (int32_t)json_integer_value(json_array_get(parts[p], i)));
    for (size_t i = 0; i < SO_MAX(got.len, want.len); i++)
        if (i >= got.len || i >= want.len || got.ids[i] != want.ids[i])
            fail_msg("%s: token %zu of \"%.*s\" is %d, the reference says %d (%zu and %zu tokens)",
                     what, i, SO_STR_ARG(text), i < got.len ? got.ids[i] : -1,
                     i < want.len ? want.ids[i] : -1, got.len, want.len);
    so_tokens_free(&got);
    so_tokens_free(&want);
}

/* Streaming must return whole characters, and together the same text as decoding at once. */
static void check_streaming(const so_tokenizer *t, so_str text) {
    so_tokens ids = {0};
    so_buf whole = {0}, repaired = {0}, streamed = {0}, piece = {0};
    so_err err;
    SO_OK_OR_FAIL(so_tokenizer_encode(t, text, SO_ENCODE_PARSE_SPECIAL, &ids, &err), err);
    so_tokenizer_decode(t, ids.ids, ids.len, false, &whole);
    so_utf8_repair(so_buf_str(&whole), &repaired);
    so_detok d = {.t = t};
    for (size_t i = 0; i <= ids.len; i++) {
        so_buf_clear(&piece);
        if (i < ids.len)
            so_detok_push(&d, ids.ids[i], &piece);
        else
            so_detok_finish(&d, &piece);
        assert_int_equal(so_utf8_valid_len(so_buf_str(&piece)), piece.len);
        so_buf_append_str(&streamed, so_buf_str(&piece));
    }
    assert_true(so_str_eq(so_buf_str(&streamed), so_buf_str(&repaired)));
    so_tokens_free(&ids);
    so_buf_free(&whole);
    so_buf_free(&repaired);
    so_buf_free(&streamed);
    so_buf_free(&piece);
}

static void check_corpus(const so_tokenizer *t, const json_t *g, const char *name) {
    json_t *corpus = golden("corpus");
    const json_t *texts = field(corpus, "texts"), *ids = field(g, "ids");
    assert_int_equal(json_array_size(texts), json_array_size(ids));
    assert_true(json_array_size(texts) > 150);
    so_buf text = {0};
    for (size_t i = 0; i < json_array_size(texts); i++) {
        so_buf_clear(&text);
        unbase64(json_string_value(json_array_get(texts, i)), &text);
        so_str s = so_buf_str(&text);
        const json_t *want = json_array_get(ids, i);
        check_ids(t, s, SO_ENCODE_PARSE_SPECIAL, NULL, want, NULL, name);
        if (json_object_get(g, "prefix"))
            check_ids(t, s, SO_ENCODE_PARSE_SPECIAL | SO_ENCODE_ADD_SPECIAL, field(g, "prefix"),
                      want, field(g, "suffix"), name);
        check_streaming(t, s);
    }
    so_buf_free(&text);
    json_decref(corpus);
}

/* A folder of the shared material with its configs, unpacked into dir. */
static bool unpack_folder(const char *name, const char *dir) {
    char shared[160];
    so_err err;
    so_buf config = {0};
    snprintf(shared, sizeof shared, "tokenizers/%s/tokenizer.json.xz", name);
    char *path = so_test_unxz(shared, dir);
    if (!path)
        return false;
    free(path);
    snprintf(shared, sizeof shared, "tokenizers/%s/tokenizer_config.json", name);
    if (so_test_shared(shared)) {
        SO_OK_OR_FAIL(so_file_read(so_test_shared(shared), 1 << 20, &config, &err), err);
        char *to = so_path_join(dir, "tokenizer_config.json");
        so_out_file *out;
        SO_OK_OR_FAIL(so_out_begin(to, &out, &err), err);
        SO_OK_OR_FAIL(so_out_write(out, config.data, config.len, &err), err);
        SO_OK_OR_FAIL(so_out_commit(out, &err), err);
        free(to);
    }
    so_buf_free(&config);
    return true;
}

typedef struct expected {
    const char *name;
    int32_t bos, eos;
    bool adds_bos;
    int32_t ends[4]; /* up to the first -1 */
    bool has_template;
} expected;

static void real_tokenizer(void **state) {
    const expected *e = *state;
    char *dir = so_test_tmp();
    if (!unpack_folder(e->name, dir)) {
        so_test_tmp_free(dir);
        SO_SKIP("shared/tokenizers/%s is not here", e->name);
    }
    so_tokenizer *t;
    so_err err;
    SO_OK_OR_FAIL(so_tokenizer_open(dir, &t, &err), err);
    json_t *g = golden(e->name);
    check_corpus(t, g, e->name);
    assert_int_equal(so_tokenizer_bos(t), e->bos);
    assert_int_equal(so_tokenizer_eos(t), e->eos);
    assert_int_equal(so_tokenizer_adds_bos(t), e->adds_bos);
    int n_ends = 0, n_wanted = 0;
    for (int32_t id = 0; id < so_tokenizer_n_vocab(t); id++)
        n_ends += so_tokenizer_is_end(t, id);
    for (; n_wanted < 4 && e->ends[n_wanted] >= 0; n_wanted++)
        assert_true(so_tokenizer_is_end(t, e->ends[n_wanted]));
    assert_int_equal(n_ends, n_wanted);
    assert_int_equal(so_tokenizer_chat_template(t).len > 0, e->has_template);
    json_decref(g);
    so_tokenizer_free(t);
    so_test_tmp_free(dir);
}

static void real_gguf(void **state) {
    (void)state;
    const char *path = so_test_model("smollm2");
    if (!path)
        SO_SKIP("the model smollm2 is not pulled");
    so_tokenizer *t;
    so_err err;
    SO_OK_OR_FAIL(so_tokenizer_open(path, &t, &err), err);
    json_t *g = golden("gguf-smollm2");
    check_corpus(t, g, "smollm2.gguf");
    assert_true(so_tokenizer_is_end(t, 2) && so_tokenizer_is_end(t, 0) &&
                !so_tokenizer_is_end(t, 1));
    json_decref(g);
    so_tokenizer_free(t);
}

/* ---- synthetic tokenizers ---- */

static so_tokenizer *make_small(const json_t *spec, const json_t *models) {
    static const char *const parts[] = {"normalizer", "pre_tokenizer", "post_processor", "decoder",
                                        "added_tokens"};
    json_t *j = json_object(),
           *model = json_copy(json_object_get(models, json_string_value(field(spec, "model"))));
    json_object_update(model, json_object_get(spec, "model_options"));
    json_object_set_new(j, "model", model);
    for (size_t i = 0; i < SO_LEN(parts); i++)
        json_object_set(j, parts[i], json_object_get(spec, parts[i]));
    char *dir = so_test_tmp(), *path = so_path_join(dir, "tokenizer.json");
    assert_int_equal(json_dump_file(j, path, 0), 0);
    so_tokenizer *t;
    so_err err;
    int rc = so_tokenizer_open(path, &t, &err);
    if (rc)
        fail_msg("%s: %s", json_string_value(field(spec, "name")), err.msg);
    free(path);
    so_test_tmp_free(dir);
    json_decref(j);
    return t;
}

static void check_decoded(const so_tokenizer *t, const json_t *ids, const json_t *want,
                          const char *what) {
    so_tokens tokens = {0};
    so_buf raw = {0}, text = {0};
    for (size_t i = 0; i < json_array_size(ids); i++)
        so_tokens_push(&tokens, (int32_t)json_integer_value(json_array_get(ids, i)));
    so_tokenizer_decode(t, tokens.ids, tokens.len, false, &raw);
    so_utf8_repair(so_buf_str(&raw), &text);
    so_str w = {json_string_value(want), json_string_length(want)};
    if (!so_str_eq(so_buf_str(&text), w))
        fail_msg("%s: decoded \"%.*s\", the reference says \"%.*s\"", what,
                 SO_STR_ARG(so_buf_str(&text)), SO_STR_ARG(w));
    so_tokens_free(&tokens);
    so_buf_free(&raw);
    so_buf_free(&text);
}

static void check_small(const json_t *spec, const json_t *g) {
    const char *name = json_string_value(field(spec, "name"));
    const json_t *texts = field(g, "texts"), *special = field(spec, "special");
    const json_t *unparsed = json_object_get(spec, "unparsed");
    so_tokenizer *t = make_small(spec, field(g, "models"));
    so_buf text = {0};
    for (size_t i = 0; i < json_array_size(texts); i++) {
        so_buf_clear(&text);
        unbase64(json_string_value(json_array_get(texts, i)), &text);
        so_str s = so_buf_str(&text);
        const json_t *ids = json_array_get(field(spec, "ids"), i);
        check_ids(t, s, SO_ENCODE_PARSE_SPECIAL, NULL, ids, NULL, name);
        check_ids(t, s, SO_ENCODE_PARSE_SPECIAL | SO_ENCODE_ADD_SPECIAL, json_array_get(special, 0),
                  ids, json_array_get(special, 1), name);
        if (json_is_array(unparsed))
            check_ids(t, s, 0, NULL, json_array_get(unparsed, i), NULL, name);
        if (json_is_array(field(spec, "decoded")))
            check_decoded(t, ids, json_array_get(field(spec, "decoded"), i), name);
        check_streaming(t, s);
    }
    so_buf_free(&text);
    so_tokenizer_free(t);
}

static void made_tokenizers(void **state) {
    const char *file = *state;
    json_t *g = golden(file);
    const json_t *specs = field(g, "tokenizers_made");
    assert_true(json_array_size(specs) > 5);
    for (size_t i = 0; i < json_array_size(specs); i++)
        check_small(json_array_get(specs, i), g);
    json_decref(g);
}

/* ---- vocabularies with expected ids ---- */

static so_str next_case(so_str *rest) {
    static const char mark[] = "\n__ggml_vocab_test__\n";
    const char *end = memmem(rest->ptr, rest->len, mark, sizeof mark - 1);
    assert_non_null(end);
    so_str text = {rest->ptr, (size_t)(end - rest->ptr)};
    size_t used = text.len + sizeof mark - 1;
    *rest = (so_str){rest->ptr + used, rest->len - used};
    return text;
}

static json_t *ids_of_line(so_str *rest) {
    json_t *ids = json_array();
    const char *nl = memchr(rest->ptr, '\n', rest->len);
    assert_non_null(nl);
    for (char *p = (char *)rest->ptr, *end; p < nl; p = end) {
        json_array_append_new(ids, json_integer(strtol(p, &end, 10)));
        assert_true(end > p);
    }
    size_t used = (size_t)(nl - rest->ptr) + 1;
    *rest = (so_str){nl + 1, rest->len - used};
    return ids;
}

typedef struct vocab {
    const char *name;   /* of the .inp and .out */
    const char *folder; /* a tokenizer.json to check instead of a GGUF file */
} vocab;

static void shared_vocab(void **state) {
    const vocab *v = *state;
    char name[160], *dir = so_test_tmp(), *path = NULL;
    so_tokenizer *t;
    so_err err;
    if (v->folder) {
        if (unpack_folder(v->folder, dir))
            path = so_strdup(dir);
    } else {
        snprintf(name, sizeof name, "vocabs/ggml-vocab-%s.gguf.xz", v->name);
        path = so_test_unxz(name, dir);
    }
    if (!path) {
        so_test_tmp_free(dir);
        SO_SKIP("the vocabulary %s is not here", v->name);
    }
    SO_OK_OR_FAIL(so_tokenizer_open(path, &t, &err), err);
    so_buf inp = {0}, out = {0};
    snprintf(name, sizeof name, "vocabs/ggml-vocab-%s.gguf.inp", v->name);
    SO_OK_OR_FAIL(so_file_read(so_test_shared(name), 1 << 20, &inp, &err), err);
    snprintf(name, sizeof name, "vocabs/ggml-vocab-%s.gguf.out", v->name);
    SO_OK_OR_FAIL(so_file_read(so_test_shared(name), 1 << 20, &out, &err), err);
    so_str texts = so_buf_str(&inp), lines = so_buf_str(&out);
    int n = 0;
    for (; texts.len; n++) {
        so_str text = next_case(&texts);
        json_t *ids = ids_of_line(&lines);
        check_ids(t, text, SO_ENCODE_PARSE_SPECIAL, NULL, ids, NULL, v->name);
        json_decref(ids);
    }
    assert_int_equal(n, 46);
    so_buf_free(&inp);
    so_buf_free(&out);
    so_tokenizer_free(t);
    free(path);
    so_test_tmp_free(dir);
}

static const expected real[] = {
    {"gpt2", 50256, 50256, false, {50256, -1}, false},
    {"llama2", 1, 2, true, {2, -1}, false},
    {"llama3_2", 128000, 128009, true, {128001, 128008, 128009, -1}, true},
    {"qwen2_5", SO_TOKEN_NONE, 151645, false, {151643, 151645, -1}, true},
    {"qwen3", SO_TOKEN_NONE, 151645, false, {151643, 151645, -1}, true},
};
static const vocab vocabs[] = {
    {"deepseek-coder", NULL}, {"gpt-2", NULL},           {"llama-spm", NULL},  {"phi-3", NULL},
    {"starcoder", NULL},      {"llama-bpe", "llama3_2"}, {"qwen2", "qwen2_5"},
};

int main(void) {
    static char small[] = "small", unigram[] = "unigram";
    struct CMUnitTest tests[3 + SO_LEN(real) + SO_LEN(vocabs)] = {
        {"small_tokenizers", made_tokenizers, NULL, NULL, small},
        {"unigram_tokenizers", made_tokenizers, NULL, NULL, unigram},
        cmocka_unit_test(real_gguf),
    };
    size_t n = 3;
    for (size_t i = 0; i < SO_LEN(real); i++)
        tests[n++] =
            (struct CMUnitTest){real[i].name, real_tokenizer, NULL, NULL, (void *)&real[i]};
    for (size_t i = 0; i < SO_LEN(vocabs); i++)
        tests[n++] =
            (struct CMUnitTest){vocabs[i].name, shared_vocab, NULL, NULL, (void *)&vocabs[i]};
    return cmocka_run_group_tests_name("tokenizer", tests, NULL, NULL);
}

/* The parts of the tokenizer: UTF-8, byte-level characters, patterns, merging compared with a
 * simple implementation, generated GGUF vocabularies, hostile files, long words, threads. No
 * fixtures. */
#include "so_test.h"

#include <jansson.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/rng.h"
#include "token/bytemap.h"
#include "token/pattern.h"
#include "token/pretok.h"
#include "token/tokenizer.h"
#include "token/utf8.h"

/* ---- small parts ---- */

static void utf8_repair(void **state) {
    (void)state;
    static const struct {
        const char *in, *out; /* '?' means U+FFFD */
    } cases[] = {
        {"ok \xC3\xA4 \xE2\x82\xAC \xF0\x9F\x98\x80", "ok \xC3\xA4 \xE2\x82\xAC \xF0\x9F\x98\x80"},
        {"\x80", "?"},
        {"\xC3", "?"},
        {"\xC3(", "?("},
        {"\xC0\xAF", "??"},
        {"\xE2\x82", "?"},
        {"\xE2\x82x", "?x"},
        {"\xE0\x80\x80", "???"},
        {"\xED\xA0\x80", "???"},
        {"\xF0\x9F\x98", "?"},
        {"\xF0\x9F\x98\xF0\x9F\x98\x80", "?\xF0\x9F\x98\x80"},
        {"\xF0\x8F\xBF\xBF", "????"},
        {"\xF4\x90\x80\x80", "????"},
        {"\xF8\x88\x80\x80\x80", "?????"},
    };
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        so_buf got = {0}, want = {0};
        so_utf8_repair(so_str_c(cases[i].in), &got);
        for (const char *p = cases[i].out; *p; p++)
            so_buf_append_c(&want, *p == '?' ? SO_UTF8_REPLACEMENT : (char[]){*p, 0});
        assert_string_equal(got.data, want.data);
        assert_int_equal(so_utf8_valid_len(so_buf_str(&got)), got.len);
        so_buf_free(&got);
        so_buf_free(&want);
    }
}

static void byte_spelling(void **state) {
    (void)state;
    char all[256];
    for (int b = 0; b < 256; b++) {
        all[b] = (char)b;
        assert_int_equal(so_char_byte(so_byte_char((unsigned char)b)), b);
    }
    assert_int_equal(so_byte_char(' '), 0x120);
    assert_int_equal(so_byte_char('\n'), 0x10A);
    assert_int_equal(so_char_byte(0x144), -1);
    assert_int_equal(so_char_byte(' '), -1);
    so_buf spelled = {0}, back = {0};
    so_bytes_spell((so_str){all, 256}, &spelled);
    assert_true(so_bytes_unspell(so_buf_str(&spelled), &back));
    assert_int_equal(back.len, 256);
    assert_memory_equal(back.data, all, 256);
    so_buf_append_char(&spelled, ' ');
    assert_false(so_bytes_unspell(so_buf_str(&spelled), &back));
    assert_int_equal(back.len, 256);
    so_buf_free(&spelled);
    so_buf_free(&back);
}

static void patterns_refused(void **state) {
    (void)state;
    static const struct {
        const char *pattern;
        int code;
        const char *says;
    } cases[] = {
        {"(abc", SO_EFORMAT, "does not compile"},
        {"[a[^b]]", SO_EUNSUPPORTED, "negated class within a class at byte 2"},
        {"[a&&b]", SO_EUNSUPPORTED, "intersection"},
        {"[\\W]", SO_EUNSUPPORTED, "negated set within a class"},
        {"a{1,3}+", SO_EUNSUPPORTED, "repeated interval at byte 1"},
        {"\\C", SO_EFORMAT, "does not compile"},
        {"\\p{Nonsense}", SO_EFORMAT, "does not compile"},
    };
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        so_pattern *p = NULL;
        so_err err;
        assert_int_equal(so_pattern_compile(so_str_c(cases[i].pattern), &p, &err), cases[i].code);
        if (!strstr(err.msg, cases[i].says))
            fail_msg("\"%s\" does not say \"%s\"", err.msg, cases[i].says);
        assert_null(p);
    }
}

static void patterns_bounded(void **state) {
    (void)state;
    so_pattern *p;
    so_err err;
    char text[64];
    size_t start, end;
    SO_OK_OR_FAIL(so_pattern_compile(SO_STR("(?:a+)+(?:a+)+$"), &p, &err), err);
    memset(text, 'a', sizeof text);
    text[sizeof text - 1] = 'b';
    so_matching *m = so_matching_create(sizeof text);
    so_find f = {.pattern = p, .matching = m, .text = {text, sizeof text}};
    assert_int_equal(so_find_next(&f, &start, &end, &err), SO_ELIMIT);
    assert_non_null(strstr(err.msg, "failed at byte"));
    so_matching_free(m);
    so_pattern_free(p);
}

/* The patterns of every name must compile, and their pieces must cover the text. */
static void pretok_names(void **state) {
    (void)state;
    static const char *const names[] = {
        "gpt-2",       "llama-bpe", "qwen2",       "smollm", "deepseek-coder", "deepseek-llm",
        "deepseek-v3", "starcoder", "refact",      "falcon", "command-r",      "mpt",
        "olmo",        "dbrx",      "tekken",      "bloom",  "gpt-4o",         "smaug-bpe",
        "default",     "viking",    "qwen35",      "exaone", "seed-coder",     "bailingmoe",
        "superbpe",    "stablelm2", "chatglm-bpe", "llama4", "gpt3-finnish",   "minerva-7b",
    };
    so_str text = SO_STR("Hello WORLD's 12345 \xC3\xA4\xE4\xBD\xA0\xE5\xA5\xBD!!\n\n  x\t(y) ''");
    for (size_t i = 0; i < SO_LEN(names); i++) {
        so_pretok p = {0};
        so_pretok_traits traits;
        so_pieces pieces = {0};
        so_err err;
        so_buf back = {0};
        SO_OK_OR_FAIL(so_pretok_by_name(so_str_c(names[i]), &p, &traits, &err), err);
        so_matching *m = so_matching_create(text.len);
        SO_OK_OR_FAIL(so_pretok_run(&p, m, text, true, &pieces, &err), err);
        assert_true(pieces.n > 3);
        for (size_t k = 0; k < pieces.n; k++)
            assert_true(so_bytes_unspell(
                (so_str){pieces.text.data + pieces.spans[k].off, pieces.spans[k].len}, &back));
        assert_true(so_str_eq(so_buf_str(&back), text));
        so_matching_free(m);
        so_pieces_deinit(&pieces);
        so_pretok_deinit(&p);
        so_buf_free(&back);
    }
    so_pretok p = {0};
    so_pretok_traits traits;
    so_err err;
    assert_int_equal(so_pretok_by_name(SO_STR("gpt-9"), &p, &traits, &err), SO_EUNSUPPORTED);
    assert_non_null(strstr(err.msg, "\"gpt-9\""));
    assert_int_equal(so_pretok_by_name(SO_STR("gpt-2 phi-2"), &p, &traits, &err), SO_EUNSUPPORTED);
}

/* ---- generated files ---- */

static int load_json(const char *json, so_tokenizer **out, so_err *err) {
    char *dir = so_test_tmp(), *path = so_path_join(dir, "tokenizer.json");
    so_out_file *f;
    SO_OK_OR_FAIL(so_out_begin(path, &f, err), *err);
    SO_OK_OR_FAIL(so_out_write(f, json, strlen(json), err), *err);
    SO_OK_OR_FAIL(so_out_commit(f, err), *err);
    int rc = so_tokenizer_open(dir, out, err);
    free(path);
    so_test_tmp_free(dir);
    return rc;
}

static int load_gguf(so_gguf_writer *w, so_tokenizer **out, so_err *err) {
    char *dir = so_test_tmp(), *path = so_path_join(dir, "v.gguf");
    SO_OK_OR_FAIL(so_gguf_writer_begin(w, path, err), *err);
    SO_OK_OR_FAIL(so_gguf_writer_commit(w, err), *err);
    so_gguf_writer_free(w);
    int rc = so_tokenizer_open(path, out, err);
    free(path);
    so_test_tmp_free(dir);
    return rc;
}

static void assert_ids(const so_tokenizer *t, so_str text, unsigned flags, const int32_t *want,
                       size_t n) {
    so_tokens got = {0};
    so_err err;
    SO_OK_OR_FAIL(so_tokenizer_encode(t, text, flags, &got, &err), err);
    for (size_t i = 0; i < SO_MAX(n, got.len); i++)
        if (i >= n || i >= got.len || got.ids[i] != want[i])
            fail_msg("token %zu of \"%.*s\": %d, wanted %d (%zu and %zu tokens)", i,
                     SO_STR_ARG(text), i < got.len ? got.ids[i] : -1, i < n ? want[i] : -1, got.len,
                     n);
    so_tokens_free(&got);
}
#define IDS(t, text, flags, ...)                                       \
    assert_ids(t, SO_STR(text), flags, (const int32_t[]){__VA_ARGS__}, \
               SO_LEN(((const int32_t[]){__VA_ARGS__})))

/* Ids: 0 <unk>, 1 <s>, 2 </s>, 3…258 bytes, then the list. */
enum { SPM_FIRST = 259, SPM_MAX = 400 };
typedef struct spm {
    so_str pieces[SPM_MAX];
    float scores[SPM_MAX];
    int32_t types[SPM_MAX];
    size_t n;
    char bytes[256][8];
} spm;

static void spm_add(spm *v, const char *piece, float score, int type) {
    v->pieces[v->n] = so_str_c(piece);
    v->scores[v->n] = score;
    v->types[v->n++] = type;
}

static void spm_init(spm *v) {
    v->n = 0;
    spm_add(v, "<unk>", 0, 2);
    spm_add(v, "<s>", 0, 3);
    spm_add(v, "</s>", 0, 3);
    for (int b = 0; b < 256; b++) {
        snprintf(v->bytes[b], sizeof v->bytes[b], "<0x%02X>", (unsigned)b);
        spm_add(v, v->bytes[b], 0, 6);
    }
}

static so_gguf_writer *spm_writer(const spm *v) {
    so_gguf_writer *w = so_gguf_writer_create();
    so_gguf_writer_str(w, "general.architecture", SO_STR("llama"));
    so_gguf_writer_str(w, "tokenizer.ggml.model", SO_STR("llama"));
    so_gguf_writer_strs(w, "tokenizer.ggml.tokens", v->pieces, v->n);
    so_gguf_writer_f32s(w, "tokenizer.ggml.scores", v->scores, v->n);
    so_gguf_writer_i32s(w, "tokenizer.ggml.token_type", v->types, v->n);
    return w;
}

static void spm_gguf(void **state) {
    (void)state;
    spm v;
    spm_init(&v);
    static const char *const pieces[] = {
        "\xE2\x96\x81", "a", "b", "c", "s", "<", ">", "/", "ab", "\u2581ab", "<s", "bc", "\xFF"};
    for (size_t i = 0; i < SO_LEN(pieces); i++)
        spm_add(&v, pieces[i], -(float)i, 1);
    spm_add(&v, "@@", 0, 4);
    enum { SP = SPM_FIRST, A, B, C, S, LT, GT, SLASH, AB, SP_AB, LT_S, BC, BAD, ADDED };
    so_tokenizer *t;
    so_err err;
    SO_OK_OR_FAIL(load_gguf(spm_writer(&v), &t, &err), err);
    assert_int_equal(so_tokenizer_bos(t), 1);
    assert_int_equal(so_tokenizer_eos(t), 2);
    assert_true(so_tokenizer_adds_bos(t));
    assert_true(so_tokenizer_is_end(t, 2) && !so_tokenizer_is_end(t, 1));
    assert_int_equal(so_tokenizer_kind(t, 3 + 'x'), SO_TOKEN_BYTE);
    assert_int_equal(so_tokenizer_kind(t, BAD), SO_TOKEN_UNUSED);
    assert_int_equal(so_tokenizer_find(t, SO_STR("ab")), AB);
    assert_int_equal(so_tokenizer_find(t, SO_STR("zz")), SO_TOKEN_NONE);
    IDS(t, "abc", SO_ENCODE_ADD_SPECIAL, 1, SP_AB, C); /* ab (−8) before bc (−11) */
    IDS(t, "abc ab", 0, SP_AB, C, SP_AB);
    IDS(t, "x\xC3\xA4", 0, SP, 3 + 'x', 3 + 0xC3, 3 + 0xA4);
    IDS(t, "<s>a", SO_ENCODE_PARSE_SPECIAL, 1, SP, A);
    IDS(t, "<s>a", 0, SP, LT_S, GT, A); /* text never produces a control token */
    IDS(t, "a@@b", 0, SP, A, ADDED, SP, B);
    so_buf text = {0};
    so_tokenizer_decode(t, (const int32_t[]){1, SP_AB, C, SP, ADDED, 3 + 0xC3, 3 + 0xA4, 9999, -1},
                        9, false, &text);
    assert_string_equal(text.data, "abc @@\xC3\xA4");
    so_buf_clear(&text);
    so_tokenizer_decode(t, (const int32_t[]){1, SP_AB}, 2, true, &text);
    assert_string_equal(text.data, "<s> ab");
    so_buf_free(&text);
    so_tokenizer_free(t);

    so_gguf_writer *w = spm_writer(&v);
    so_gguf_writer_bool(w, "tokenizer.ggml.add_space_prefix", false);
    so_gguf_writer_bool(w, "tokenizer.ggml.add_bos_token", false);
    so_gguf_writer_bool(w, "tokenizer.ggml.add_eos_token", true);
    so_gguf_writer_u32(w, "tokenizer.ggml.eot_token_id", ADDED);
    so_gguf_writer_str(w, "tokenizer.chat_template", SO_STR("{{ x }}"));
    SO_OK_OR_FAIL(load_gguf(w, &t, &err), err);
    IDS(t, "ab c", SO_ENCODE_ADD_SPECIAL, AB, SP, C, 2);
    assert_true(so_tokenizer_is_end(t, ADDED));
    assert_true(so_str_eq_c(so_tokenizer_chat_template(t), "{{ x }}"));
    so_tokenizer_free(t);
}

/* SentencePiece's rule literally: merge the pair whose text is the piece with the highest score. */
static size_t plain_merge(const spm *v, so_str text, so_str *parts) {
    size_t n = 0;
    for (size_t i = 0, len; i < text.len; i += len) {
        so_utf8_at(text.ptr + i, &len);
        parts[n++] = (so_str){text.ptr + i, len};
    }
    for (;;) {
        size_t best = n;
        float best_score = 0;
        for (size_t i = 0; i + 1 < n; i++) {
            so_str both = {parts[i].ptr, parts[i].len + parts[i + 1].len};
            for (size_t k = SPM_FIRST; k < v->n; k++)
                if (so_str_eq(v->pieces[k], both) && (best == n || v->scores[k] > best_score)) {
                    best = i;
                    best_score = v->scores[k];
                }
        }
        if (best == n)
            return n;
        parts[best].len += parts[best + 1].len;
        memmove(&parts[best + 1], &parts[best + 2], (n - best - 2) * sizeof *parts);
        n--;
    }
}

static uint32_t draw(uint32_t *i, uint32_t n) {
    so_rng_key key = {.seed = 11, .purpose = SO_RNG_TEST};
    return (uint32_t)(so_rng_uniform(&key, (*i)++) * n);
}

/* Random texts and vocabularies of a few letters, with equal scores, pieces that contain a space,
 * and letters that are not pieces. */
static void spm_random(void **state) {
    (void)state;
    static const char letters[][4] = {"a", "b", "c", "\xE2\x96\x81", "\xC3\xA4"};
    uint32_t at = 0;
    for (int round = 0; round < 60; round++) {
        spm v;
        char made[100][32];
        so_err err;
        so_tokenizer *t;
        spm_init(&v);
        for (size_t i = 0; i < SO_LEN(letters) - (round % 3 == 0); i++)
            spm_add(&v, letters[i], -100, 1);
        for (int i = 0; i < 60; i++) {
            size_t len = 0;
            for (uint32_t k = 0, n = 2 + draw(&at, 3); k < n; k++)
                len +=
                    (size_t)snprintf(made[i] + len, 8, "%s", letters[draw(&at, SO_LEN(letters))]);
            bool known = false;
            for (size_t k = SPM_FIRST; k < v.n; k++)
                known = known || so_str_eq_c(v.pieces[k], made[i]);
            if (!known)
                spm_add(&v, made[i], -(float)draw(&at, 20), 1);
        }
        so_gguf_writer *w = spm_writer(&v);
        so_gguf_writer_bool(w, "tokenizer.ggml.add_space_prefix", false);
        SO_OK_OR_FAIL(load_gguf(w, &t, &err), err);
        for (int k = 0; k < 50; k++) {
            char text[400], spaced[400];
            so_str parts[100];
            so_tokens got = {0};
            size_t len = 0, n_spaced = 0;
            for (uint32_t i = 0, n = draw(&at, 40); i < n; i++)
                len += (size_t)snprintf(text + len, 8, "%s", letters[draw(&at, SO_LEN(letters))]);
            for (size_t i = 0; i < len;) {
                bool space = (unsigned char)text[i] == 0xE2;
                spaced[n_spaced++] = space ? ' ' : text[i];
                i += space ? 3 : 1;
            }
            SO_OK_OR_FAIL(so_tokenizer_encode(t, (so_str){spaced, n_spaced}, 0, &got, &err), err);
            size_t n = plain_merge(&v, (so_str){text, len}, parts), g = 0;
            for (size_t i = 0; i < n; i++) {
                int32_t id = so_tokenizer_find(t, parts[i]);
                if (id != SO_TOKEN_NONE) {
                    assert_true(g < got.len && got.ids[g++] == id);
                    continue;
                }
                for (size_t b = 0; b < parts[i].len; b++)
                    assert_true(g < got.len && got.ids[g++] == 3 + (unsigned char)parts[i].ptr[b]);
            }
            assert_int_equal(g, got.len);
            so_tokens_free(&got);
        }
        so_tokenizer_free(t);
    }
}

/* ---- byte-level vocabularies ---- */

static const char bpe_json[] =
    "{\"added_tokens\":[{\"id\":9,\"content\":\"<|im_end|>\",\"special\":true},"
    "{\"id\":10,\"content\":\"</s>\",\"special\":false,\"normalized\":false}],"
    "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},"
    "\"decoder\":{\"type\":\"ByteLevel\"},"
    "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"c\":2,\"\\u0120\":3,\"ab\":4,"
    "\"\\u0120a\":5,"
    "\"bc\":6,\"abc\":7,\"\\u0120ab\":8},\"merges\":[\"b c\",\"a b\",[\"\\u0120\",\"a\"],\"a "
    "bc\",\"\\u0120a b\"]}}";

static so_gguf_writer *bpe_writer(void) {
    static const so_str tokens[] = {
        {"a", 1},
        {"b", 1},
        {"c", 1},
        {"\xC4\xA0", 2},
        {"ab", 2},
        {"\xC4\xA0"
         "a",
         3},
        {"bc", 2},
        {"abc", 3},
        {"\xC4\xA0"
         "ab",
         4},
        {"<|im_end|>", 10},
        {"</s>", 4},
        {"[PAD11]", 7},
    };
    static const int32_t types[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 3, 4, 5};
    static const so_str merges[] = {{"b c", 3},
                                    {"a b", 3},
                                    {"\xC4\xA0 a", 4},
                                    {"a bc", 4},
                                    {"\xC4\xA0"
                                     "a b",
                                     5}};
    so_gguf_writer *w = so_gguf_writer_create();
    so_gguf_writer_str(w, "general.architecture", SO_STR("llama"));
    so_gguf_writer_str(w, "tokenizer.ggml.model", SO_STR("gpt2"));
    so_gguf_writer_str(w, "tokenizer.ggml.pre", SO_STR("gpt-2"));
    so_gguf_writer_strs(w, "tokenizer.ggml.tokens", tokens, SO_LEN(tokens));
    so_gguf_writer_i32s(w, "tokenizer.ggml.token_type", types, SO_LEN(types));
    so_gguf_writer_strs(w, "tokenizer.ggml.merges", merges, SO_LEN(merges));
    return w;
}

static void bpe_both_forms(void **state) {
    (void)state;
    so_tokenizer *t[3];
    so_err err;
    SO_OK_OR_FAIL(load_json(bpe_json, &t[0], &err), err);
    SO_OK_OR_FAIL(load_gguf(bpe_writer(), &t[1], &err), err);
    for (int i = 0; i < 2; i++) {
        IDS(t[i], "abc", 0, 7);
        IDS(t[i], " abc ab", 0, 5, 6, 3, 4);
        IDS(t[i], "ab<|im_end|></s>", SO_ENCODE_PARSE_SPECIAL, 4, 9, 10);
        IDS(t[i], "ab</s>zc", SO_ENCODE_ADD_SPECIAL, 4, 10, 2);
        assert_int_equal(so_tokenizer_bos(t[i]), SO_TOKEN_NONE);
        assert_true(so_tokenizer_is_end(t[i], 9));
        assert_false(
            so_tokenizer_is_end(t[i], 10)); /* an added token that is printed does not end a turn */
        so_tokenizer_add_end(t[i], 10);
        so_tokenizer_add_end(t[i], 4000);
        assert_true(so_tokenizer_is_end(t[i], 10) && !so_tokenizer_is_end(t[i], 4000));
        assert_int_equal(so_tokenizer_kind(t[i], 9), SO_TOKEN_CONTROL);
        assert_int_equal(so_tokenizer_kind(t[i], 10), SO_TOKEN_ADDED);
    }
    assert_int_equal(so_tokenizer_n_vocab(t[0]), 11);
    assert_int_equal(so_tokenizer_n_vocab(t[1]), 12);
    assert_true(so_tokenizer_hash(t[0]) == so_tokenizer_hash(t[1]));

    static const so_str other[] = {{"a b", 3},
                                   {"b c", 3},
                                   {"\xC4\xA0 a", 4},
                                   {"a bc", 4},
                                   {"\xC4\xA0"
                                    "a b",
                                    5}};
    so_gguf_writer *w = bpe_writer();
    so_gguf_writer_strs(w, "tokenizer.ggml.merges", other, SO_LEN(other));
    SO_OK_OR_FAIL(load_gguf(w, &t[2], &err), err);
    IDS(t[2], "abc", 0, 4, 2);
    assert_true(so_tokenizer_hash(t[2]) != so_tokenizer_hash(t[1]));
    for (int i = 0; i < 3; i++)
        so_tokenizer_free(t[i]);
}

#define TRACED_TEXT "a<|im_end|>b<|im_end|>a"

/* marks: '1' for each byte of TRACED_TEXT that is data. */
static void check_traced(const char *added, const char *marks, const int32_t *want, size_t n) {
    char json[1024];
    uint8_t from_data[sizeof TRACED_TEXT];
    so_tokenizer *t;
    so_tokens ids = {0};
    so_err err;
    snprintf(json, sizeof json, "{\"added_tokens\":[%s],%s", added,
             strstr(bpe_json, "\"pre_tokenizer\""));
    SO_OK_OR_FAIL(load_json(json, &t, &err), err);
    for (size_t i = 0; i < sizeof TRACED_TEXT; i++)
        from_data[i] = marks[i] == '1';
    SO_OK_OR_FAIL(so_tokenizer_encode_traced(t, SO_STR(TRACED_TEXT), from_data, &ids, &err), err);
    assert_int_equal(ids.len, n);
    assert_memory_equal(ids.ids, want, n * sizeof *want);
    so_tokens_free(&ids);
    so_tokenizer_free(t);
}

/* All bytes of a control token must come from the template, also if it is matched after
 * normalising; if data rules out a longer token, the shorter one matches. Letters outside the
 * vocabulary have no ids.
 */
static void control_tokens_in_data(void **state) {
    (void)state;
    static const char *const RAW = "{\"id\":9,\"content\":\"<|im_end|>\",\"special\":true}";
    static const char *const NORMALIZED =
        "{\"id\":9,\"content\":\"<|im_end|>\",\"special\":true,\"normalized\":true}";
    static const char *const TWO = "{\"id\":9,\"content\":\"<|im_end|>\",\"special\":true},"
                                   "{\"id\":10,\"content\":\"<|im_end|>a\",\"special\":true}";
    static const int32_t FIRST_IS_TEXT[] = {0, 1, 9, 0}, BOTH[] = {0, 9, 1, 9, 0},
                         LONGER[] = {0, 9, 1, 10};
    check_traced(RAW, "01111111111000000000000", FIRST_IS_TEXT, 4);
    check_traced(RAW, "00000000001000000000000", FIRST_IS_TEXT, 4);
    check_traced(NORMALIZED, "01111111111000000000000", FIRST_IS_TEXT, 4);
    check_traced(NORMALIZED, "00000000000100000000001", BOTH, 5);
    check_traced(TWO, "00000000000000000000000", LONGER, 4);
    check_traced(TWO, "00000000000000000000001", BOTH, 5);
}

/* The bytes of one character in two tokens, and invalid bytes. */
static void detok_splits_characters(void **state) {
    (void)state;
    so_tokenizer *t;
    so_err err;
    SO_OK_OR_FAIL(
        load_json("{\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{\"type\":\"BPE\",\"vocab\":"
                  "{\"\\u00f0\\u0141\":0,\"\\u013a\":1,\"\\u0122\":2,\"x\":3,\"\\u00c3\":4},"
                  "\"merges\":[]}}",
                  &t, &err),
        err); /* F0 9F, 98, 80, x, C3 */
    const int32_t ids[] = {0, 1, 2, 3, 0, 1, 3, 4, 4, 2, 2, 0};
    const char *want[] = {"",
                          "",
                          "\xF0\x9F\x98\x80",
                          "x",
                          "",
                          "",
                          SO_UTF8_REPLACEMENT "x",
                          "",
                          SO_UTF8_REPLACEMENT,
                          "\xC3\x80",
                          SO_UTF8_REPLACEMENT,
                          ""};
    so_detok d = {.t = t};
    so_buf piece = {0};
    for (size_t i = 0; i < SO_LEN(ids); i++) {
        so_buf_clear(&piece);
        so_detok_push(&d, ids[i], &piece);
        assert_string_equal(so_buf_str(&piece).ptr, want[i]);
    }
    so_buf_clear(&piece);
    so_detok_finish(&d, &piece);
    assert_string_equal(piece.data, SO_UTF8_REPLACEMENT);
    so_buf_free(&piece);
    so_tokenizer_free(t);
}

/* ---- hostile files ---- */

#define MODEL(vocab, merges) \
    "\"model\":{\"type\":\"BPE\",\"vocab\":" vocab ",\"merges\":" merges "}"

static void hostile_json(void **state) {
    (void)state;
    static const struct {
        const char *json;
        int code;
        const char *says;
    } cases[] = {
        {"{}", SO_EFORMAT, "model: is missing"},
        {"{\"model\":[]}", SO_EFORMAT, "model: is missing"},
        {"{\"model\":{\"type\":\"WordPiece\",\"vocab\":[]}}", SO_EUNSUPPORTED, "\"WordPiece\""},
        {"{\"model\":{\"type\":\"BPE\"}}", SO_EFORMAT, "model.vocab"},
        {"{" MODEL("{}", "[]") "}", SO_EFORMAT, "model.vocab: is empty"},
        {"{" MODEL("{\"a\":\"x\"}", "[]") "}", SO_EFORMAT, "\"a\" has no integer id"},
        {"{" MODEL("{\"a\":-1}", "[]") "}", SO_ERANGE, "id -1 of \"a\""},
        {"{" MODEL("{\"a\":2000000000}", "[]") "}", SO_ERANGE, "id 2000000000 of \"a\""},
        {"{" MODEL("{\"a\":1,\"b\":1}", "[]") "}", SO_EFORMAT, "both have id 1"},
        {"{" MODEL("{\"a\":0}", "{}") "}", SO_EFORMAT, "model.merges: must be an array"},
        {"{" MODEL("{\"a\":0}", "[\"a b\"]") "}", SO_EFORMAT, "entry 0 needs \"b\""},
        {"{" MODEL("{\"a\":0}", "[\"a a\"]") "}", SO_EFORMAT, "entry 0 needs \"aa\""},
        {"{" MODEL("{\"a\":0}", "[\"a\"]") "}", SO_EFORMAT, "entry 0 is not a pair"},
        {"{" MODEL("{\"a\":0}", "[\"a a a\"]") "}", SO_EFORMAT, "entry 0 is not a pair"},
        {"{" MODEL("{\"a\":0}", "[[\"a\",1]]") "}", SO_EFORMAT, "entry 0 is not a pair"},
        {"{\"added_tokens\":7," MODEL("{\"a\":0}", "[]") "}", SO_EFORMAT, "added_tokens: must be"},
        {"{\"added_tokens\":[7]," MODEL("{\"a\":0}", "[]") "}", SO_EFORMAT,
         "added_tokens[0].content"},
        {"{\"added_tokens\":[{\"content\":\"x\"}]," MODEL("{\"a\":0}", "[]") "}", SO_EFORMAT,
         "added_tokens[0].id"},
        {"{\"added_tokens\":[{\"content\":\"x\",\"id\":0}]," MODEL("{\"a\":0}", "[]") "}",
         SO_EFORMAT, "belongs to \"a\""},
        {"{\"added_tokens\":[{\"content\":\"a\",\"id\":1}]," MODEL("{\"a\":0}", "[]") "}",
         SO_EFORMAT, "has id 0 already"},
        {"{\"added_tokens\":[{\"content\":\"x\",\"id\":1,\"special\":1}]," MODEL("{\"a\":0}",
                                                                                 "[]") "}",
         SO_EFORMAT, "special: must be true or false"},
        {"{\"normalizer\":{\"type\":\"Nmt\"}," MODEL("{\"a\":0}", "[]") "}", SO_EUNSUPPORTED,
         "normalizer.type \"Nmt\""},
        {"{\"normalizer\":[]," MODEL("{\"a\":0}", "[]") "}", SO_EFORMAT,
         "normalizer.type: must be a string"},
        {"{\"normalizer\":{\"type\":\"Replace\",\"content\":\"\"}," MODEL("{\"a\":0}", "[]") "}",
         SO_EFORMAT, "normalizer.pattern"},
        {"{\"normalizer\":{\"type\":\"Replace\",\"content\":\"\",\"pattern\":{\"Regex\":\"(\"}}"
         "," MODEL("{\"a\":0}", "[]") "}",
         SO_EFORMAT, "normalizer.pattern: pattern \"(\" does not compile"},
        {"{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\","
         "\"pattern\":{\"String\":\"x\"},\"behavior\":\"Lost\"}]}," MODEL("{\"a\":0}", "[]") "}",
         SO_EFORMAT, "pre_tokenizer.pretokenizers[0].behavior: \"Lost\""},
        {"{\"pre_tokenizer\":{\"type\":\"UnicodeScripts\"}," MODEL("{\"a\":0}", "[]") "}",
         SO_EUNSUPPORTED, "\"UnicodeScripts\""},
        {"{\"decoder\":{\"type\":\"CTC\"}," MODEL("{\"a\":0}", "[]") "}", SO_EUNSUPPORTED,
         "decoder.type \"CTC\""},
        {"{\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{"
         "\"id\":\"<s>\"}}]}," MODEL("{\"a\":0}", "[]") "}",
         SO_EFORMAT, "no ids for \"<s>\""},
        {"{\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"Sequence\":{\"id\":"
         "\"A\"}},{\"SpecialToken\":{\"id\":\"<s>\"}}],\"special_tokens\":{\"<s>\":{\"ids\":[77]}}}"
         "," MODEL("{\"a\":0}", "[]") "}",
         SO_EFORMAT, "must be the id of a token"},
        {"{\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[]}," MODEL("{\"a\":0}",
                                                                                      "[]") "}",
         SO_EFORMAT, "does not name the text"},
        {"{\"model\":{\"type\":\"BPE\",\"unk_token\":\"?\",\"vocab\":{\"a\":0},\"merges\":[]}}",
         SO_EFORMAT, "unk_token: \"?\""},
        {"{\"model\":{\"type\":\"BPE\",\"dropout\":0.1,\"vocab\":{\"a\":0},\"merges\":[]}}",
         SO_EUNSUPPORTED, "dropout"},
        {"{\"model\":{\"type\":\"BPE\",\"end_of_word_suffix\":\"</"
         "w>\",\"vocab\":{\"a\":0},\"merges\":[]}}",
         SO_EUNSUPPORTED, "end_of_word_suffix"},
    };
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        so_tokenizer *t = NULL;
        so_err err = {0};
        int rc = load_json(cases[i].json, &t, &err);
        if (rc != cases[i].code || !strstr(err.msg, cases[i].says) || !strstr(err.msg, "/tmp/"))
            fail_msg("%s\ngave %d \"%s\", wanted %d \"%s\"", cases[i].json, rc, err.msg,
                     cases[i].code, cases[i].says);
        assert_null(t);
    }
}

static void nested_too_deep(void **state) {
    (void)state;
    so_buf json = {0};
    so_tokenizer *t = NULL;
    so_err err;
    so_buf_append_c(&json, "{" MODEL("{\"a\":0}", "[]") ",\"normalizer\":");
    for (int i = 0; i < 200; i++)
        so_buf_append_c(&json, "{\"type\":\"Sequence\",\"normalizers\":[");
    for (int i = 0; i < 200; i++)
        so_buf_append_c(&json, "]}");
    so_buf_append_c(&json, "}");
    assert_int_equal(load_json(json.data, &t, &err), SO_EFORMAT);
    assert_non_null(strstr(err.msg, "nested"));
    so_buf_free(&json);
    for (int n = 30; n <= 40; n += 10) {
        so_buf_append_c(&json,
                        "{" MODEL("{\"a\":0}",
                                  "[]") ",\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[");
        for (int i = 0; i < n; i++)
            so_buf_printf(&json, "%s{\"type\":\"NFC\"}", i ? "," : "");
        so_buf_append_c(&json, "]}}");
        assert_int_equal(load_json(json.data, &t, &err), n <= 32 ? SO_OK : SO_ELIMIT);
        if (n <= 32)
            so_tokenizer_free(t);
        so_buf_free(&json);
    }
}

/* A replacement that makes the text grow without end reaches the limit. */
static void growth_bounded(void **state) {
    (void)state;
    so_buf json = {0};
    so_tokenizer *t;
    so_tokens ids = {0};
    so_err err;
    so_buf_append_c(
        &json,
        "{" MODEL("{\"a\":0}", "[]") ",\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[");
    for (int i = 0; i < 8; i++)
        so_buf_printf(
            &json,
            "%s{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"a\"},\"content\":\"%0100d\"},{"
            "\"type\":\"Replace\",\"pattern\":{\"String\":\"0\"},\"content\":\"a\"}",
            i ? "," : "", 0);
    so_buf_append_c(&json, "]}}");
    SO_OK_OR_FAIL(load_json(json.data, &t, &err), err);
    so_tokens_push(&ids, 42);
    assert_int_equal(so_tokenizer_encode(t, SO_STR("a"), 0, &ids, &err), SO_ELIMIT);
    assert_int_equal(ids.len, 1); /* untouched on failure */
    so_tokens_free(&ids);
    so_tokenizer_free(t);
    so_buf_free(&json);
}

static void hostile_gguf(void **state) {
    (void)state;
    static const so_str two[] = {{"a", 1}, {"b", 1}};
    static const so_str bad_merge[] = {{"a q", 3}};
    static const so_str no_space[] = {{"ab", 2}};
    const float nan_scores[2] = {0, __builtin_nanf("")};
    static const struct {
        int code;
        const char *says;
    } want[] = {
        {SO_ENOTFOUND, "tokenizer.ggml.model is missing"},
        {SO_EUNSUPPORTED, "tokenizer.ggml.model \"rwkv\""},
        {SO_ENOTFOUND, "tokenizer.ggml.tokens is missing"},
        {SO_EFORMAT, "tokenizer.ggml.tokens is not an array of strings"},
        {SO_EFORMAT, "tokenizer.ggml.token_type has 12 entries for 2"},
        {SO_ERANGE, "tokenizer.ggml.token_type[0] is 99"},
        {SO_EFORMAT, "merges[0] \"a q\""},
        {SO_EFORMAT, "merges[0] \"ab\""},
        {SO_EUNSUPPORTED, "tokenizer.ggml.pre: unknown pre-tokenizer name \"nope\""},
        {SO_ERANGE, "tokenizer.ggml.bos_token_id is 12"},
        {SO_EFORMAT, "tokenizer.ggml.add_bos_token"},
        {SO_ENOTFOUND, "tokenizer.ggml.scores is missing"},
        {SO_EFORMAT, "tokenizer.ggml.scores[1] is not a finite number"},
        {SO_EFORMAT, "tokenizer.ggml.merges"},
    };
    for (size_t i = 0; i < SO_LEN(want); i++) {
        so_gguf_writer *w = i == 0 || i == 2 || i >= 11 ? so_gguf_writer_create() : bpe_writer();
        so_gguf_writer_str(w, "general.architecture", SO_STR("llama"));
        if (i == 2 || i >= 11)
            so_gguf_writer_str(w, "tokenizer.ggml.model",
                               i == 13 ? SO_STR("gpt2") : SO_STR("llama"));
        if (i == 1)
            so_gguf_writer_str(w, "tokenizer.ggml.model", SO_STR("rwkv"));
        if (i == 3)
            so_gguf_writer_u32(w, "tokenizer.ggml.tokens", 3);
        if (i == 4 || i >= 11)
            so_gguf_writer_strs(w, "tokenizer.ggml.tokens", two, 2);
        if (i == 5)
            so_gguf_writer_i32s(w, "tokenizer.ggml.token_type", (const int32_t[12]){99}, 12);
        if (i == 6)
            so_gguf_writer_strs(w, "tokenizer.ggml.merges", bad_merge, 1);
        if (i == 7)
            so_gguf_writer_strs(w, "tokenizer.ggml.merges", no_space, 1);
        if (i == 8)
            so_gguf_writer_str(w, "tokenizer.ggml.pre", SO_STR("nope"));
        if (i == 9)
            so_gguf_writer_u32(w, "tokenizer.ggml.bos_token_id", 12);
        if (i == 10)
            so_gguf_writer_str(w, "tokenizer.ggml.add_bos_token", SO_STR("yes"));
        if (i == 12)
            so_gguf_writer_f32s(w, "tokenizer.ggml.scores", nan_scores, 2);
        if (i == 13)
            so_gguf_writer_u32(w, "tokenizer.ggml.merges", 1);
        so_tokenizer *t = NULL;
        so_err err = {0};
        int rc = load_gguf(w, &t, &err);
        if (rc != want[i].code || !strstr(err.msg, want[i].says))
            fail_msg("case %zu gave %d \"%s\", wanted %d \"%s\"", i, rc, err.msg, want[i].code,
                     want[i].says);
        assert_null(t);
    }
}

/* ---- size and threads ---- */

static double cpu_seconds(void) {
    struct timespec ts;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

/* A megabyte that cannot be cut. Quadratic merging would take minutes. */
static void long_word(void **state) {
    (void)state;
    enum { N = 1 << 20 };
    so_tokenizer *t;
    so_err err;
    so_tokens ids = {0};
    so_buf back = {0};
    char *text = so_alloc(N);
    uint32_t at = 0;
    for (int i = 0; i < N; i++)
        text[i] = (char)('a' + draw(&at, 3));
    SO_OK_OR_FAIL(load_json(bpe_json, &t, &err), err);
    double begin = cpu_seconds();
    SO_OK_OR_FAIL(so_tokenizer_encode(t, (so_str){text, N}, 0, &ids, &err), err);
    assert_true(cpu_seconds() - begin < 30);
    so_tokenizer_decode(t, ids.ids, ids.len, false, &back);
    assert_int_equal(back.len, N);
    assert_memory_equal(back.data, text, N);
    for (size_t i = 0; i + 1 < ids.len; i++) /* no pair that can be merged is left */
        assert_false(ids.ids[i] == 1 && ids.ids[i + 1] == 2);
    free(text);
    so_buf_free(&back);
    so_tokens_free(&ids);
    so_tokenizer_free(t);
}

typedef struct job {
    const so_tokenizer *t;
    so_tokens ids;
} job;

static void *encode_many(void *arg) {
    job *j = arg;
    for (int i = 0; i < 50; i++) {
        so_err err;
        j->ids.len = 0;
        if (so_tokenizer_encode(j->t, SO_STR("abc ab cab bca abcabc </s> <|im_end|> ab"),
                                SO_ENCODE_PARSE_SPECIAL, &j->ids, &err) != 0)
            j->ids.len = 0;
    }
    return NULL;
}

static void many_threads(void **state) {
    (void)state;
    enum { N = 4 };
    pthread_t threads[N];
    job jobs[N] = {0};
    so_tokenizer *t;
    so_err err;
    SO_OK_OR_FAIL(load_json(bpe_json, &t, &err), err);
    for (int i = 0; i < N; i++) {
        jobs[i].t = t;
        assert_int_equal(pthread_create(&threads[i], NULL, encode_many, &jobs[i]), 0);
    }
    for (int i = 0; i < N; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < N; i++) {
        assert_true(jobs[i].ids.len > 8 && jobs[i].ids.len == jobs[0].ids.len);
        assert_memory_equal(jobs[i].ids.ids, jobs[0].ids.ids, jobs[0].ids.len * sizeof(int32_t));
    }
    for (int i = 0; i < N; i++)
        so_tokens_free(&jobs[i].ids);
    so_tokenizer_free(t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(utf8_repair),
        cmocka_unit_test(byte_spelling),
        cmocka_unit_test(patterns_refused),
        cmocka_unit_test(patterns_bounded),
        cmocka_unit_test(pretok_names),
        cmocka_unit_test(spm_gguf),
        cmocka_unit_test(spm_random),
        cmocka_unit_test(bpe_both_forms),
        cmocka_unit_test(control_tokens_in_data),
        cmocka_unit_test(detok_splits_characters),
        cmocka_unit_test(hostile_json),
        cmocka_unit_test(nested_too_deep),
        cmocka_unit_test(growth_bounded),
        cmocka_unit_test(hostile_gguf),
        cmocka_unit_test(long_word),
        cmocka_unit_test(many_threads),
    };
    return cmocka_run_group_tests_name("tokenizer_parts", tests, NULL, NULL);
}

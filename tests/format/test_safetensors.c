/* Safetensors and Hugging Face folders: valid ones are read, invalid ones rejected with a message
 * that names the cause. */
#include "so_test.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"
#include "format/checkpoint.h"
#include "format/safetensors.h"

/* The bytes of a file: length, header, n zero bytes of data. */
static so_buf file_of(const char *header, size_t n_data) {
    so_buf b = {0};
    uint64_t n = strlen(header);
    so_buf_append(&b, &n, sizeof n);
    so_buf_append_c(&b, header);
    for (size_t i = 0; i < n_data; i++)
        so_buf_append_char(&b, (char)i);
    return b;
}

static const char sound[] =
    "{\"__metadata__\":{\"format\":\"pt\"},"
    "\"w\":{\"dtype\":\"BF16\",\"shape\":[3,2],\"data_offsets\":[8,20]},"
    "\"ids\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[0,8]},"
    "\"none\":{\"dtype\":\"F32\",\"shape\":[0,4],\"data_offsets\":[20,20]},"
    "\"scalar\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[20,24]},"
    "\"five\":{\"dtype\":\"F16\",\"shape\":[1,1,1,1,1],\"data_offsets\":[24,26]}}";

static void reads(void **state) {
    (void)state;
    so_buf b = file_of(sound, 26);
    so_safetensors *s;
    so_err err;
    SO_OK_OR_FAIL(so_safetensors_open_memory(b.data, b.len, "x", &s, &err), err);
    assert_int_equal(s->n_tensors, 2);
    assert_int_equal(s->n_skipped, 3);
    const so_tensor *w = &s->tensors[0];
    assert_true(so_str_eq_c(w->name, "w"));
    assert_int_equal(w->dtype, SO_DTYPE_BF16);
    assert_int_equal(w->n_dims, 2);
    assert_int_equal(w->dims[0], 2); /* fastest first: 3 rows of 2 */
    assert_int_equal(w->dims[1], 3);
    assert_int_equal(w->dims[3], 1);
    assert_int_equal(w->n_bytes, 12);
    assert_int_equal(((const unsigned char *)w->data)[0], 8);
    assert_int_equal(so_tensor_count(&s->tensors[1]), 1);
    so_safetensors_close(s);
    for (size_t len = 0; len < b.len; len++) {
        void *exact = so_alloc(len);
        memcpy(exact, b.data, len);
        int rc = so_safetensors_open_memory(exact, len, "cut", &s, &err);
        free(exact);
        if (rc == SO_OK || !strstr(err.msg, "cut"))
            fail_msg("cut at %zu: %d %s", len, rc, err.msg);
    }
    so_buf_free(&b);
}

static void refuses(void **state) {
    (void)state;
    static const struct {
        const char *header;
        size_t n_data;
        const char *needle;
    } cases[] = {
        {"[]", 0, "not a JSON object"},
        {"{", 0, "not valid JSON"},
        {"{\"w\":1}", 0, "w: dtype is missing"},
        {"{\"w\":{\"dtype\":\"Q9\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
         "dtype 'Q9' is unknown"},
        {"{\"w\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "w: shape is not an array"},
        {"{\"w\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4,
         "w: shape contains"},
        {"{\"w\":{\"dtype\":\"F32\",\"shape\":[1.5],\"data_offsets\":[0,4]}}", 4,
         "w: shape contains"},
        {"{\"w\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,4]}}", 4,
         "w: shape overflows"},
        {"{\"w\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904],\"data_offsets\":[0,0]}}", 0,
         "data_offsets give 0 bytes"},
        {"{\"w\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "w: data_offsets is not a pair"},
        {"{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 4, "ascending"},
        {"{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", 4, "ascending"},
        {"{\"w\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 4, "end at 8"},
        {"{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,8]}}", 8, "give 8 bytes"},
        {"{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", 8, "a gap"},
        {"{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 8, "cover 4 bytes"},
        {"{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
         "\"v\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
         4, "overlap"},
        {"{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
         "\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
         8, "duplicate"},
    };
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        so_buf b = file_of(cases[i].header, cases[i].n_data);
        so_safetensors *s;
        so_err err = {0};
        if (so_safetensors_open_memory(b.data, b.len, "bad.st", &s, &err) == SO_OK)
            fail_msg("case %zu accepted: %s", i, cases[i].header);
        if (!strstr(err.msg, "bad.st") || !strstr(err.msg, cases[i].needle))
            fail_msg("case %zu: '%s' lacks '%s'", i, err.msg, cases[i].needle);
        so_buf_free(&b);
    }
    so_buf b = file_of("{}", 0);
    uint64_t huge = UINT64_MAX;
    memcpy(b.data, &huge, sizeof huge);
    so_safetensors *s;
    so_err err;
    assert_int_equal(so_safetensors_open_memory(b.data, b.len, "bad.st", &s, &err), SO_EFORMAT);
    assert_non_null(strstr(err.msg, "header length 18446744073709551615"));
    so_buf_free(&b);
}

static void put(const char *dir, const char *name, const void *p, size_t len) {
    char *path = so_path_join(dir, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(p, 1, len, f), len);
    fclose(f);
    free(path);
}

static void put_text(const char *dir, const char *name, const char *text) {
    put(dir, name, text, strlen(text));
}

static void put_shard(const char *dir, const char *name, const char *tensor, const char *dtype) {
    char header[256];
    snprintf(header, sizeof header,
             "{\"%s\":{\"dtype\":\"%s\",\"shape\":[2],\"data_offsets\":[0,%d]}}", tensor, dtype,
             dtype[1] == '6' ? 16 : 8);
    so_buf b = file_of(header, dtype[1] == '6' ? 16 : 8);
    put(dir, name, b.data, b.len);
    so_buf_free(&b);
}

/* Opening must fail with a message that contains `needle`. */
static void fails(const char *path, so_checkpoint_need need, const char *needle) {
    so_checkpoint *ck;
    so_err err = {0};
    if (so_checkpoint_open(path, need, &ck, &err) == SO_OK)
        fail_msg("%s opened; expected '%s'", path, needle);
    if (!strstr(err.msg, needle))
        fail_msg("'%s' lacks '%s'", err.msg, needle);
}

static void folder(void **state) {
    (void)state;
    char *dir = so_test_tmp();
    so_checkpoint *ck;
    so_err err;
    fails(dir, SO_CHECKPOINT_ALL, "no config.json");
    fails(dir, SO_CHECKPOINT_TOKENIZER, "no tokenizer.json");
    put_text(dir, "config.json", "{\"a\": 1, \"a\": 2}");
    fails(dir, SO_CHECKPOINT_ALL, "config.json: line 1: not valid JSON: duplicate");
    put_text(dir, "config.json", "[1]");
    fails(dir, SO_CHECKPOINT_ALL, "not a JSON object");
    put_text(dir, "config.json", "{\"hidden_size\": 64}");
    fails(dir, SO_CHECKPOINT_ALL, "neither model.safetensors nor model.safetensors.index.json");
    SO_OK_OR_FAIL(so_checkpoint_open(dir, SO_CHECKPOINT_CONFIG, &ck, &err), err);
    assert_int_equal(json_integer_value(json_object_get(so_checkpoint_config(ck), "hidden_size")),
                     64);
    assert_null(so_checkpoint_gguf(ck));
    assert_null(so_checkpoint_tokenizer(ck));
    so_checkpoint_close(ck);

    so_buf b = file_of(sound, 26);
    put(dir, "model.safetensors", b.data, b.len);
    put_text(dir, "generation_config.json", "{}");
    put_text(dir, "chat_template.jinja", "{{ x }}");
    SO_OK_OR_FAIL(so_checkpoint_open(dir, SO_CHECKPOINT_ALL, &ck, &err), err);
    assert_int_equal(so_checkpoint_n_tensors(ck), 2);
    assert_int_equal(so_checkpoint_bytes(ck), b.len);
    assert_true(so_str_eq_c(so_checkpoint_template_file(ck), "{{ x }}"));
    const so_tensor *t;
    SO_OK_OR_FAIL(so_checkpoint_require(ck, "w", &t, &err), err);
    assert_int_equal(so_checkpoint_require(ck, "ids", &t, &err), SO_EUNSUPPORTED);
    assert_non_null(strstr(err.msg, "tensor ids cannot be used: dtype I64 is not supported"));
    assert_int_equal(so_checkpoint_require(ck, "five", &t, &err), SO_EUNSUPPORTED);
    assert_int_equal(so_checkpoint_require(ck, "w2", &t, &err), SO_ENOTFOUND);
    so_checkpoint_close(ck);
    char *lone = so_path_join(dir, "model.safetensors");
    fails(lone, SO_CHECKPOINT_ALL, "single safetensors");
    free(lone);
    so_buf_free(&b);
    so_test_tmp_free(dir);
}

static void sharded(void **state) {
    (void)state;
    char *dir = so_test_tmp();
    so_checkpoint *ck;
    so_err err;
    static const char index[] = "model.safetensors.index.json";
    put_text(dir, "config.json", "{}");
    put_text(dir, index, "{}");
    fails(dir, SO_CHECKPOINT_ALL, "weight_map is missing");
    put_text(dir, index, "{\"weight_map\":{\"a\":1}}");
    fails(dir, SO_CHECKPOINT_ALL, "tensor a is not a file name");
    put_text(dir, index, "{\"weight_map\":{\"a\":\"../x.safetensors\"}}");
    fails(dir, SO_CHECKPOINT_ALL, "not a plain file name");
    put_text(dir, index, "{\"weight_map\":{\"a\":\"sub/x.safetensors\"}}");
    fails(dir, SO_CHECKPOINT_ALL, "not a plain file name");
    put_text(dir, index, "{\"weight_map\":{\"a\":\"x\\u0000y\"}}");
    fails(dir, SO_CHECKPOINT_ALL, "not a plain file name");
    put_text(dir, index,
             "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\",\"c\":\"3."
             "safetensors\"}}");
    put_shard(dir, "1.safetensors", "a", "F32");
    put_shard(dir, "2.safetensors", "b", "F32");
    fails(dir, SO_CHECKPOINT_ALL, "3.safetensors");
    put_shard(dir, "3.safetensors", "c", "F64");
    SO_OK_OR_FAIL(so_checkpoint_open(dir, SO_CHECKPOINT_ALL, &ck, &err), err);
    assert_int_equal(so_checkpoint_n_tensors(ck), 2);
    assert_non_null(so_checkpoint_tensor(ck, "b"));
    const so_tensor *t;
    assert_int_equal(so_checkpoint_require(ck, "c", &t, &err), SO_EUNSUPPORTED);
    assert_non_null(strstr(err.msg, "3.safetensors: tensor c"));
    so_checkpoint_close(ck);
    put_shard(dir, "3.safetensors", "d", "F32");
    fails(dir, SO_CHECKPOINT_ALL, "3.safetensors: tensor c is not in this file");
    put_shard(dir, "3.safetensors", "a", "F32");
    fails(dir, SO_CHECKPOINT_ALL, "3.safetensors: tensor a is also in another file");
    so_test_tmp_free(dir);
}

static void tokenizer_alone(void **state) {
    (void)state;
    char *dir = so_test_tmp(), *path = so_path_join(dir, "tokenizer.json");
    so_checkpoint *ck;
    so_err err;
    put_text(dir, "tokenizer.json", "\n {\"version\": \"1.0\"}");
    SO_OK_OR_FAIL(so_checkpoint_open(path, SO_CHECKPOINT_TOKENIZER, &ck, &err), err);
    assert_non_null(so_checkpoint_tokenizer(ck));
    so_checkpoint_close(ck);
    SO_OK_OR_FAIL(so_checkpoint_open(dir, SO_CHECKPOINT_TOKENIZER, &ck, &err), err);
    so_checkpoint_close(ck);
    fails(path, SO_CHECKPOINT_ALL, "is a JSON file");
    put_text(dir, "tokenizer.json", "hello");
    fails(path, SO_CHECKPOINT_TOKENIZER, "not a GGUF file");
    free(path);
    so_test_tmp_free(dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads),   cmocka_unit_test(refuses),         cmocka_unit_test(folder),
        cmocka_unit_test(sharded), cmocka_unit_test(tokenizer_alone),
    };
    return cmocka_run_group_tests_name("safetensors", tests, NULL, NULL);
}

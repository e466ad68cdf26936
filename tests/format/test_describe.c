/* Descriptions of checkpoints: totals, JSON, and sanitised text from hostile files. */
#include "so_test.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"
#include "format/describe.h"
#include "gguf_bytes.h"

static void expect_text(const char *in, size_t len, size_t max, const char *want) {
    so_buf b = {0};
    so_describe_text((so_str){in, len}, max, &b);
    assert_string_equal(so_buf_str(&b).ptr, want);
    so_buf_free(&b);
}

static void harmless_text(void **state) {
    (void)state;
    expect_text("plain ä", 8, 99, "plain ä");
    expect_text("a\nb\tc", 5, 99, "a\\nb\\tc");
    expect_text("\033[2J\007", 5, 99, "\\u001b[2J\\u0007");
    expect_text("\xC2\x9B", 2, 99, "\\u009b"); /* the one-character form of ESC [ */
    expect_text("\xE2\x80\xAE", 3, 99, "\\u202e");
    expect_text("x\xFFy\xC3", 4, 99, "x\\xffy\\xc3");
    expect_text("\0", 1, 99, "\\u0000");
    expect_text("ääää", 8, 3, "äää…");
    expect_text("", 0, 3, "");
}

/* A file with strange values, opened through a checkpoint. */
static so_checkpoint *strange(const char *dir) {
    so_buf b = {0};
    g_head(&b, 3, 2, 6);
    g_kv_str(&b, "general.architecture", "odd\033arch");
    g_kv_str(&b, "bad\xFFkey", "bad\xFFvalue");
    g_str(&b, "nan");
    g_u32(&b, SO_GGUF_F32);
    g_u32(&b, 0x7FC00000);
    g_str(&b, "eps");
    g_u32(&b, SO_GGUF_F32);
    float eps = 1e-5f;
    so_buf_append(&b, &eps, sizeof eps);
    g_array(&b, "long", SO_GGUF_U8, 100);
    g_data(&b, 1, 100);
    g_array(&b, "short", SO_GGUF_BOOL, 2);
    so_buf_append(&b, "\0\1", 2);
    g_tensor(&b, "t\xFF", SO_DTYPE_F32, 4, 2, 0);
    g_tensor(&b, "q", SO_DTYPE_Q8_0, 32, 1, 32);
    g_data(&b, 32, 66);
    char *path = so_path_join(dir, "x.gguf");
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(b.data, 1, b.len, f), b.len);
    fclose(f);
    so_buf_free(&b);
    so_checkpoint *ck;
    so_err err;
    SO_OK_OR_FAIL(so_checkpoint_open(path, SO_CHECKPOINT_ALL, &ck, &err), err);
    free(path);
    return ck;
}

static void json(void **state) {
    (void)state;
    char *dir = so_test_tmp();
    so_checkpoint *ck = strange(dir);
    json_t *o = so_describe_json(ck), *meta = json_object_get(o, "metadata");
    assert_non_null(o);
    char *dumped = json_dumps(o, JSON_COMPACT); /* everything in it is representable */
    assert_non_null(dumped);
    free(dumped);
    assert_string_equal(json_string_value(json_object_get(o, "format")), "GGUF v3");
    assert_string_equal(json_string_value(json_object_get(o, "arch")), "odd\\u001barch");
    assert_int_equal(json_integer_value(json_object_get(o, "parameters")), 40);
    assert_string_equal(json_string_value(json_object_get(meta, "bad\xEF\xBF\xBDkey")),
                        "bad\xEF\xBF\xBDvalue");
    assert_true(json_is_null(json_object_get(meta, "nan")));
    assert_true(json_real_value(json_object_get(meta, "eps")) == 1e-5);
    assert_int_equal(json_integer_value(json_object_get(json_object_get(meta, "long"), "length")),
                     100);
    assert_int_equal(json_array_size(json_object_get(json_object_get(meta, "long"), "first")), 8);
    assert_true(json_is_true(json_array_get(json_object_get(meta, "short"), 1)));
    json_t *t = json_array_get(json_object_get(o, "tensors"), 0);
    assert_string_equal(json_string_value(json_object_get(t, "name")), "t\xEF\xBF\xBD");
    assert_string_equal(json_string_value(json_object_get(t, "dtype")), "F32");
    assert_int_equal(json_integer_value(json_array_get(json_object_get(t, "shape"), 0)), 4);
    assert_int_equal(json_integer_value(json_object_get(t, "bytes")), 32);
    json_t *q8 = json_object_get(json_object_get(o, "types"), "Q8_0");
    assert_int_equal(json_integer_value(json_object_get(q8, "bytes")), 34);
    json_decref(o);
    so_checkpoint_close(ck);
    so_test_tmp_free(dir);
}

static void in_words(void **state) {
    (void)state;
    char *dir = so_test_tmp();
    so_checkpoint *ck = strange(dir);
    const so_gguf *g = so_checkpoint_gguf(ck);
    so_buf b = {0};
    so_describe_value(so_gguf_find(g, "long"), 20, &b);
    assert_string_equal(b.data, "0, 1, 2, 3, 4, 5, 6, 7, …");
    so_buf_clear(&b);
    so_describe_type(so_gguf_find(g, "long"), &b);
    assert_string_equal(b.data, "u8[100]");
    so_buf_clear(&b);
    so_describe_value(so_gguf_find(g, "eps"), 20, &b);
    assert_string_equal(b.data, "1e-05");
    so_buf_clear(&b);
    so_describe_value(so_gguf_find(g, "short"), 20, &b);
    assert_string_equal(b.data, "false, true");
    so_buf_free(&b);
    so_checkpoint_close(ck);
    so_test_tmp_free(dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(harmless_text),
        cmocka_unit_test(json),
        cmocka_unit_test(in_words),
    };
    return cmocka_run_group_tests_name("describe", tests, NULL, NULL);
}

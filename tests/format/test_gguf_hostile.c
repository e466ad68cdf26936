/* Invalid GGUF files. Every case must return an error whose message names the file and the field,
 * without a crash (address sanitizer) and without allocating much more than the file's size. */
#include "so_test.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "base/file.h"
#include "base/mem.h"
#include "gguf_bytes.h"

/* A valid file with every type of value and two tensors; most cases modify it. */
static so_buf sound(uint32_t version) {
    so_buf b = {0};
    g_head(&b, version, 2, 7);
    g_kv_str(&b, "general.architecture", "llama");
    g_kv_u32(&b, "general.alignment", 64);
    g_array(&b, "names", SO_GGUF_STRING, 2);
    g_str(&b, "ab");
    g_str(&b, "");
    g_array(&b, "bools", SO_GGUF_BOOL, 2);
    so_buf_append(&b, "\0\1", 2);
    g_array(&b, "nested", SO_GGUF_ARRAY, 2);
    g_u32(&b, SO_GGUF_I32);
    g_u64(&b, 1);
    g_u32(&b, 7);
    g_u32(&b, SO_GGUF_STRING);
    g_u64(&b, 1);
    g_str(&b, "x");
    g_str(&b, "big");
    g_u32(&b, SO_GGUF_U64);
    g_u64(&b, UINT64_MAX);
    g_kv_u16(&b, "small", 9);
    g_tensor(&b, "a", SO_DTYPE_F32, 4, 2, 0);
    g_tensor(&b, "b", SO_DTYPE_Q8_0, 32, 1, 64);
    g_data(&b, 64, 64 + 34);
    return b;
}

static int open_bytes(const void *data, size_t len, so_err *err) {
    so_gguf *g = NULL;
    *err = (so_err){0};
    int rc = so_gguf_open_memory(data, len, "bad.gguf", &g, err);
    if (rc == SO_OK)
        so_gguf_close(g);
    return rc;
}

/* The file must be rejected with a message that names the file and contains `needle`. Frees b. */
static void refused(so_buf *b, const char *needle) {
    so_err err;
    /* a copy of exactly this size, so that the sanitizer detects any read beyond its end */
    void *exact = so_alloc(b->len);
    memcpy(exact, b->data, b->len);
    int rc = open_bytes(exact, b->len, &err);
    free(exact);
    so_buf_free(b);
    if (rc == SO_OK)
        fail_msg("accepted; expected a message with '%s'", needle);
    if (!strstr(err.msg, "bad.gguf") || !strstr(err.msg, needle))
        fail_msg("message '%s' does not name the file or '%s'", err.msg, needle);
}

static void sound_file(void **state) {
    (void)state;
    for (uint32_t version = 2; version <= 3; version++) {
        so_buf b = sound(version);
        so_gguf *g;
        so_err err;
        int64_t v;
        double f;
        bool flag;
        SO_OK_OR_FAIL(so_gguf_open_memory(b.data, b.len, "x", &g, &err), err);
        assert_int_equal(so_gguf_version(g), version);
        assert_int_equal(so_gguf_n_kv(g), 7);
        assert_int_equal(so_gguf_find(g, "names")->n, 2);
        assert_true(so_str_eq_c(so_gguf_find(g, "names")->strings[0], "ab"));
        assert_int_equal(so_gguf_find(g, "nested")->elem, SO_GGUF_ARRAY);
        SO_OK_OR_FAIL(so_gguf_get_i64(g, "small", &v, &err), err);
        assert_int_equal(v, 9);
        assert_int_equal(so_gguf_get_i64(g, "big", &v, &err), SO_EFORMAT);
        assert_non_null(strstr(err.msg, "big"));
        SO_OK_OR_FAIL(so_gguf_get_f64(g, "big", &f, &err), err);
        assert_true(f == 18446744073709551615.0);
        assert_int_equal(so_gguf_get_bool(g, "small", &flag, &err), SO_EFORMAT);
        assert_int_equal(so_gguf_get_bool(g, "names", &flag, &err), SO_EFORMAT);
        const so_tensor *t = so_gguf_tensor(g, "b");
        assert_int_equal(t->n_bytes, 34);
        assert_int_equal(((const unsigned char *)t->data)[1], 65);
        so_gguf_close(g);
        so_buf_free(&b);
    }
}

/* Truncated at every byte: always rejected, never read beyond the end. */
static void truncated(void **state) {
    (void)state;
    so_buf b = sound(3);
    for (size_t len = 0; len < b.len; len++) {
        void *exact = so_alloc(len);
        memcpy(exact, b.data, len);
        so_err err;
        int rc = open_bytes(exact, len, &err);
        free(exact);
        if (rc == SO_OK || !strstr(err.msg, "bad.gguf"))
            fail_msg("cut at %zu: rc %d, message '%s'", len, rc, err.msg);
    }
    so_buf_free(&b);
}

/* Every byte replaced by several values: accepted or rejected, but never a crash. */
static void flipped(void **state) {
    (void)state;
    static const unsigned char values[] = {0x00, 0x01, 0x7F, 0x80, 0xFF};
    so_buf b = sound(3);
    so_err err;
    size_t n_refused = 0;
    for (size_t i = 0; i < b.len; i++) {
        char old = b.data[i];
        for (size_t k = 0; k < sizeof values; k++) {
            b.data[i] = (char)values[k];
            n_refused += open_bytes(b.data, b.len, &err) != SO_OK;
        }
        b.data[i] = old;
    }
    assert_true(n_refused > 500);
    so_buf_free(&b);
}

static void wrong_start(void **state) {
    (void)state;
    so_buf b = {0};
    so_buf_append_c(&b, "MZ\x90 this is something else entirely");
    refused(&b, "not a GGUF file");
    so_buf_append_c(&b, "FUGG................");
    refused(&b, "big-endian");
    g_head(&b, 0x03000000, 0, 0);
    refused(&b, "big-endian");
    so_buf_append_c(&b, "tjgg................");
    refused(&b, "before GGUF");
    g_head(&b, 1, 0, 0);
    refused(&b, "version 1 is not supported");
    g_head(&b, 4, 0, 0);
    refused(&b, "version 4 is not supported");
    g_head(&b, 0, 0, 0);
    refused(&b, "version 0 is not supported");
}

static void absurd_counts(void **state) {
    (void)state;
    so_buf b = {0};
    g_head(&b, 3, UINT64_MAX, 0);
    refused(&b, "tensor count 18446744073709551615");
    g_head(&b, 3, 0, UINT64_MAX / 2);
    refused(&b, "metadata count 9223372036854775807");
    g_head(&b, 3, 0, 3);
    g_data(&b, 1, 30);
    refused(&b, "metadata count 3");
    static const uint32_t elems[] = {SO_GGUF_U8, SO_GGUF_STRING, SO_GGUF_F64, SO_GGUF_ARRAY};
    for (size_t i = 0; i < SO_LEN(elems); i++) {
        g_head(&b, 3, 0, 1);
        g_array(&b, "tokens", elems[i], UINT64_MAX - 1);
        g_data(&b, 1, 64);
        refused(&b, "tokens");
    }
    g_head(&b, 3, 0, 1);
    g_u64(&b, UINT64_MAX);
    g_data(&b, 1, 32);
    refused(&b, "metadata key");
    g_head(&b, 3, 0, 1);
    g_u64(&b, 2000);
    g_data(&b, 1, 4000);
    refused(&b, "length 2000");
    g_head(&b, 3, 0, 1);
    g_str(&b, "");
    g_data(&b, 1, 32);
    refused(&b, "length 0");
    g_head(&b, 3, 0, 1);
    g_u64(&b, 3);
    so_buf_append(&b, "a\0b", 3);
    g_data(&b, 1, 32);
    refused(&b, "metadata key at offset 24 contains a zero byte");
}

static void bad_values(void **state) {
    (void)state;
    so_buf b = {0};
    g_head(&b, 3, 0, 1);
    g_str(&b, "strange");
    g_u32(&b, 13);
    g_data(&b, 1, 16);
    refused(&b, "strange: value type 13");
    g_head(&b, 3, 0, 1);
    g_array(&b, "strange", 99, 1);
    g_data(&b, 1, 16);
    refused(&b, "strange: value type 99");
    g_head(&b, 3, 0, 1);
    g_str(&b, "flag");
    g_u32(&b, SO_GGUF_BOOL);
    so_buf_append_char(&b, 2);
    refused(&b, "flag: bool is 2");
    g_head(&b, 3, 0, 1);
    g_str(&b, "text");
    g_u32(&b, SO_GGUF_STRING);
    g_u64(&b, 1000);
    refused(&b, "text: needs 1000 bytes");
    g_head(&b, 3, 0, 2);
    g_kv_u32(&b, "twice", 1);
    g_kv_u32(&b, "twice", 1);
    refused(&b, "twice appears twice");
    g_head(&b, 3, 0, 1);
    g_array(&b, "deep", SO_GGUF_ARRAY, 1);
    for (int i = 0; i < 8; i++) {
        g_u32(&b, SO_GGUF_ARRAY);
        g_u64(&b, 1);
    }
    refused(&b, "deep: arrays nested deeper");
}

static void bad_alignment(void **state) {
    (void)state;
    static const uint32_t values[] = {0, 1, 4, 24, 33, 1u << 21, UINT32_MAX};
    for (size_t i = 0; i < SO_LEN(values); i++) {
        so_buf b = {0};
        g_head(&b, 3, 0, 1);
        g_kv_u32(&b, "general.alignment", values[i]);
        char want[64];
        snprintf(want, sizeof want, "general.alignment is %u", values[i]);
        refused(&b, want);
    }
    so_buf b = {0};
    g_head(&b, 3, 0, 1);
    g_kv_str(&b, "general.alignment", "32");
    refused(&b, "general.alignment is of type string");
}

/* A file with one tensor of the given header and 256 bytes of data. */
static so_buf one_tensor(uint32_t type, uint64_t d0, uint64_t d1, uint64_t offset) {
    so_buf b = {0};
    g_head(&b, 3, 1, 0);
    g_tensor(&b, "w", type, d0, d1, offset);
    g_data(&b, 32, 256);
    return b;
}

static void bad_tensors(void **state) {
    (void)state;
    static const struct {
        uint32_t type;
        uint64_t d0, d1, offset;
        const char *needle;
    } cases[] = {
        {4, 32, 1, 0, "type 4 (Q4_2) is not supported"},
        {23, 32, 1, 0, "type 23 (IQ4_XS) is not supported"},
        {31, 32, 1, 0, "type 31 (unknown)"},
        {UINT32_MAX, 32, 1, 0, "type 4294967295"},
        {SO_DTYPE_F32, 0, 1, 0, "w: dimension 0 is 0"},
        {SO_DTYPE_F32, 4, UINT64_MAX, 0, "w: dimension 1 is -1"},
        {SO_DTYPE_F32, 1ull << 40, 1ull << 40, 0, "w: the dimensions overflow"},
        {SO_DTYPE_F32, 1ull << 62, 1, 0, "w: the dimensions overflow"},
        {SO_DTYPE_Q4_0, 33, 1, 0, "rows of 33 elements are not a multiple of Q4_0's block of 32"},
        {SO_DTYPE_Q4_K, 32, 8, 0, "block of 256"},
        {SO_DTYPE_F32, 4, 1, 8, "offset 8 is not a multiple of the alignment 32"},
        {SO_DTYPE_F32, 65, 1, 0, "w: 260 bytes at offset 0 run past"},
        {SO_DTYPE_F32, 4, 1, 256, "at offset 256 run past"},
        {SO_DTYPE_F32, 4, 1, UINT64_MAX - 31, "run past"},
    };
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        so_buf b = one_tensor(cases[i].type, cases[i].d0, cases[i].d1, cases[i].offset);
        refused(&b, cases[i].needle);
    }
    for (uint32_t n_dims = 0; n_dims <= 5; n_dims += 5) {
        so_buf b = {0};
        g_head(&b, 3, 1, 0);
        g_str(&b, "w");
        g_u32(&b, n_dims);
        g_data(&b, 32, 256);
        refused(&b, n_dims ? "w: 5 dimensions" : "w: 0 dimensions");
    }
}

static void bad_pairs(void **state) {
    (void)state;
    so_buf b = {0};
    g_head(&b, 3, 2, 0);
    g_tensor(&b, "w", SO_DTYPE_F32, 4, 1, 0);
    g_tensor(&b, "w", SO_DTYPE_F32, 4, 1, 32);
    g_data(&b, 32, 64);
    refused(&b, "tensor w appears twice");
    g_head(&b, 3, 2, 0);
    g_tensor(&b, "late", SO_DTYPE_F32, 4, 1, 32);
    g_tensor(&b, "early", SO_DTYPE_F32, 9, 1, 0);
    g_data(&b, 32, 64);
    refused(&b, "tensors early and late overlap");
    g_head(&b, 3, 2, 0);
    g_tensor(&b, "one", SO_DTYPE_F32, 4, 1, 0);
    g_tensor(&b, "two", SO_DTYPE_F32, 4, 1, 0);
    g_data(&b, 32, 64);
    refused(&b, "overlap");
}

static void not_files(void **state) {
    (void)state;
    so_gguf *g;
    so_err err;
    char *dir = so_test_tmp(), *empty = so_path_join(dir, "empty.gguf");
    assert_int_not_equal(so_gguf_open(dir, &g, &err), SO_OK);
    assert_non_null(strstr(err.msg, "is a directory"));
    FILE *f = fopen(empty, "wb");
    fclose(f);
    assert_int_not_equal(so_gguf_open(empty, &g, &err), SO_OK);
    assert_non_null(strstr(err.msg, "empty.gguf: file is empty"));
    assert_int_equal(so_gguf_open("no/such/file.gguf", &g, &err), SO_ENOTFOUND);
    assert_non_null(strstr(err.msg, "no/such/file.gguf"));
    free(empty);
    so_test_tmp_free(dir);
}

/* Writes one part of a split file, with one tensor named after the part. */
static void write_part(const char *dir, int no, int of, uint16_t split_no, uint16_t split_count,
                       uint32_t total, const char *tensor) {
    so_buf b = {0};
    char name[64];
    g_head(&b, 3, 1, 3);
    g_kv_u16(&b, "split.no", split_no);
    g_kv_u16(&b, "split.count", split_count);
    g_kv_u32(&b, "split.tensors.count", total);
    g_tensor(&b, tensor, SO_DTYPE_F32, 4, 1, 0);
    g_data(&b, 32, 16);
    snprintf(name, sizeof name, "m-%05d-of-%05d.gguf", no + 1, of);
    char *path = so_path_join(dir, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(b.data, 1, b.len, f), b.len);
    fclose(f);
    free(path);
    so_buf_free(&b);
}

static int open_split(const char *dir, const char *name, so_err *err, size_t *n_tensors) {
    char *path = so_path_join(dir, name);
    so_gguf *g;
    int rc = so_gguf_open(path, &g, err);
    if (rc == SO_OK) {
        *n_tensors = so_gguf_n_tensors(g);
        assert_non_null(so_gguf_tensor(g, "t2"));
        so_gguf_close(g);
    }
    free(path);
    return rc;
}

static void split_files(void **state) {
    (void)state;
    char *dir = so_test_tmp();
    static const char *const first = "m-00001-of-00003.gguf";
    size_t n = 0;
    so_err err;
    write_part(dir, 0, 3, 0, 3, 3, "t0");
    write_part(dir, 1, 3, 1, 3, 3, "t1");
    assert_int_not_equal(open_split(dir, first, &err, &n), SO_OK);
    assert_non_null(strstr(err.msg, "m-00003-of-00003.gguf"));
    assert_non_null(strstr(err.msg, "part 3 of 3"));
    write_part(dir, 2, 3, 2, 3, 3, "t2");
    SO_OK_OR_FAIL(open_split(dir, first, &err, &n), err);
    assert_int_equal(n, 3);
    assert_int_equal(open_split(dir, "m-00002-of-00003.gguf", &err, &n), SO_EINVAL);
    assert_non_null(strstr(err.msg, "split.no is 1"));

    write_part(dir, 1, 3, 2, 3, 3, "t1");
    assert_int_equal(open_split(dir, first, &err, &n), SO_EMISMATCH);
    assert_non_null(strstr(err.msg, "m-00002-of-00003.gguf: split.no is 2"));
    write_part(dir, 1, 3, 1, 4, 3, "t1");
    assert_int_equal(open_split(dir, first, &err, &n), SO_EMISMATCH);
    write_part(dir, 1, 3, 1, 3, 3, "t0");
    assert_int_equal(open_split(dir, first, &err, &n), SO_EFORMAT);
    assert_non_null(strstr(err.msg, "m-00002-of-00003.gguf: tensor t0 appears twice"));
    write_part(dir, 1, 3, 1, 3, 3, "t1");
    write_part(dir, 0, 3, 0, 3, 9, "t0");
    assert_int_equal(open_split(dir, first, &err, &n), SO_EMISMATCH);
    assert_non_null(strstr(err.msg, "split.tensors.count is 9, but the parts hold 3"));
    write_part(dir, 0, 3, 5, 3, 3, "t0");
    assert_int_equal(open_split(dir, first, &err, &n), SO_EFORMAT);
    assert_non_null(strstr(err.msg, "split.no 5 of split.count 3"));
    write_part(dir, 0, 3, 0, 60000, 3, "t0");
    assert_int_equal(open_split(dir, first, &err, &n), SO_EFORMAT);
    write_part(dir, 0, 3, 0, 4, 3, "t0");
    assert_int_equal(open_split(dir, first, &err, &n), SO_EINVAL);
    assert_non_null(strstr(err.msg, "does not end in -00001-of-00004.gguf"));
    so_test_tmp_free(dir);
}

static void split_from_memory(void **state) {
    (void)state;
    so_buf b = {0};
    g_head(&b, 3, 0, 1);
    g_kv_u16(&b, "split.count", 2);
    refused(&b, "split.count is 2");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sound_file),    cmocka_unit_test(truncated),
        cmocka_unit_test(flipped),       cmocka_unit_test(wrong_start),
        cmocka_unit_test(absurd_counts), cmocka_unit_test(bad_values),
        cmocka_unit_test(bad_alignment), cmocka_unit_test(bad_tensors),
        cmocka_unit_test(bad_pairs),     cmocka_unit_test(not_files),
        cmocka_unit_test(split_files),   cmocka_unit_test(split_from_memory),
    };
    return cmocka_run_group_tests_name("gguf hostile", tests, NULL, NULL);
}

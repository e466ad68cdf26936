/* The reader reads what the writer wrote; a file that was not committed leaves nothing behind. */
#include "so_test.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"
#include "gguf_bytes.h"

static int n_files(const char *dir) {
    int n = 0;
    DIR *d = opendir(dir);
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));)
        n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

static so_gguf_writer *example(void) {
    static const so_str words[] = {{"ab", 2}, {"", 0}, {"c\0d", 3}};
    static const int32_t ids[] = {-1, 2};
    static const float scores[] = {0.5f, -2};
    static const int64_t dims[] = {32, 3}, one[] = {5};
    so_gguf_writer *w = so_gguf_writer_create();
    so_gguf_writer_str(w, "general.architecture", SO_STR("llama"));
    so_gguf_writer_u32(w, "count", 1);
    so_gguf_writer_f32(w, "rate", 0.25f);
    so_gguf_writer_bool(w, "flag", true);
    so_gguf_writer_strs(w, "words", words, SO_LEN(words));
    so_gguf_writer_i32s(w, "ids", ids, SO_LEN(ids));
    so_gguf_writer_f32s(w, "scores", scores, SO_LEN(scores));
    so_gguf_writer_u32(w, "count", 7); /* replaces the first value */
    so_gguf_writer_tensor(w, "odd", SO_DTYPE_F32, 1, one);
    so_gguf_writer_tensor(w, "matrix", SO_DTYPE_Q8_0, 2, dims);
    return w;
}

static void fill(so_gguf_writer *w, const char *path) {
    so_err err;
    unsigned char bytes[102];
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (unsigned char)(i * 7);
    SO_OK_OR_FAIL(so_gguf_writer_begin(w, path, &err), err);
    SO_OK_OR_FAIL(so_gguf_writer_data(w, bytes, 20, &err), err);
    SO_OK_OR_FAIL(so_gguf_writer_data(w, bytes, 34, &err), err);
    SO_OK_OR_FAIL(so_gguf_writer_data(w, bytes + 34, 68, &err), err);
}

static void round_trip(void **state) {
    (void)state;
    char *dir = so_test_tmp(), *path = so_path_join(dir, "x.gguf");
    so_err err;
    so_gguf *g;
    int64_t v;
    double f;
    so_gguf_writer *w = example();
    fill(w, path);
    assert_false(so_file_exists(path));
    SO_OK_OR_FAIL(so_gguf_writer_commit(w, &err), err);
    so_gguf_writer_free(w);
    SO_OK_OR_FAIL(so_gguf_open(path, &g, &err), err);
    assert_int_equal(so_gguf_n_kv(g), 7);
    SO_OK_OR_FAIL(so_gguf_get_i64(g, "count", &v, &err), err);
    assert_int_equal(v, 7);
    SO_OK_OR_FAIL(so_gguf_get_f64(g, "rate", &f, &err), err);
    assert_true(f == 0.25);
    const so_gguf_kv *words = so_gguf_find(g, "words");
    assert_int_equal(words->strings[2].len, 3);
    assert_memory_equal(words->strings[2].ptr, "c\0d", 3);
    assert_true(so_gguf_elem_i64(so_gguf_find(g, "ids"), 0, &v));
    assert_int_equal(v, -1);
    assert_true(so_gguf_elem_f64(so_gguf_find(g, "scores"), 1, &f));
    assert_true(f == -2);
    const so_tensor *t = so_gguf_tensor(g, "matrix");
    assert_int_equal(t->n_bytes, 102);
    assert_int_equal((uintptr_t)t->data % 32, 0);
    for (size_t i = 0; i < 102; i++)
        assert_int_equal(((const unsigned char *)t->data)[i], (unsigned char)(i * 7));
    so_gguf_close(g);
    assert_int_equal(n_files(dir), 1);
    free(path);
    so_test_tmp_free(dir);
}

/* Every metadata type survives a copy, also arrays of arrays. general.alignment is not copied. */
static void copies_all_types(void **state) {
    (void)state;
    char *dir = so_test_tmp(), *path = so_path_join(dir, "x.gguf");
    so_buf b = {0};
    static const uint8_t sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    g_head(&b, 2, 0, 11 + 11 + 1);
    for (uint32_t t = 0; t <= SO_GGUF_F64; t++) {
        if (!sizes[t])
            continue;
        g_str(&b, so_gguf_type_name((so_gguf_type)t));
        g_u32(&b, t);
        so_buf_append(&b, "\1\0\0\0\0\0\0\0", sizes[t]);
        char name[16];
        snprintf(name, sizeof name, "a%s", so_gguf_type_name((so_gguf_type)t));
        g_array(&b, name, t, 2);
        so_buf_append(&b, "\1\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0", 2 * sizes[t]);
    }
    g_array(&b, "nested", SO_GGUF_ARRAY, 1);
    g_u32(&b, SO_GGUF_STRING);
    g_u64(&b, 1);
    g_str(&b, "deep");
    so_gguf *g, *h;
    so_err err;
    SO_OK_OR_FAIL(so_gguf_open_memory(b.data, b.len, "x", &g, &err), err);
    so_gguf_writer *w = so_gguf_writer_create();
    for (size_t i = 0; i < so_gguf_n_kv(g); i++)
        so_gguf_writer_copy_kv(w, so_gguf_kv_at(g, i));
    so_gguf_kv alignment = {.key = SO_STR("general.alignment"), .type = SO_GGUF_U32};
    so_gguf_writer_copy_kv(w, &alignment);
    SO_OK_OR_FAIL(so_gguf_writer_begin(w, path, &err), err);
    SO_OK_OR_FAIL(so_gguf_writer_commit(w, &err), err);
    so_gguf_writer_free(w);
    SO_OK_OR_FAIL(so_gguf_open(path, &h, &err), err);
    assert_int_equal(so_gguf_n_kv(h), so_gguf_n_kv(g));
    for (size_t i = 0; i < so_gguf_n_kv(g); i++) {
        const so_gguf_kv *x = so_gguf_kv_at(g, i), *y = so_gguf_kv_at(h, i);
        assert_true(so_str_eq(x->key, y->key));
        assert_int_equal(x->type, y->type);
        assert_int_equal(x->elem, y->elem);
        assert_int_equal(x->n, y->n);
        assert_int_equal(x->n_bytes, y->n_bytes);
        assert_memory_equal(x->data, y->data, x->n_bytes);
    }
    so_gguf_close(g);
    so_gguf_close(h);
    so_buf_free(&b);
    free(path);
    so_test_tmp_free(dir);
}

static void nothing_left(void **state) {
    (void)state;
    char *dir = so_test_tmp(), *path = so_path_join(dir, "x.gguf");
    so_gguf_writer *w = example();
    fill(w, path);
    assert_int_equal(n_files(dir), 1); /* the partial file */
    so_gguf_writer_free(w);
    assert_int_equal(n_files(dir), 0);
    w = example();
    so_err err;
    assert_int_equal(so_gguf_writer_begin(w, dir, &err), SO_EINVAL);
    assert_non_null(strstr(err.msg, "is a directory"));
    so_gguf_writer_free(w);
    free(path);
    so_test_tmp_free(dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trip),
        cmocka_unit_test(copies_all_types),
        cmocka_unit_test(nothing_left),
    };
    return cmocka_run_group_tests_name("gguf writer", tests, NULL, NULL);
}

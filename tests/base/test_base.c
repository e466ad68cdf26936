/* The base layer: errors, memory, maps, half floats, counter rng, files. */
#include "so_test.h"

#include <fcntl.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/cgroup.h"
#include "base/exact.h"
#include "base/file.h"
#include "base/half.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/rng.h"

static void err_messages(void **state) {
    (void)state;
    so_err err = {0};
    assert_int_equal(so_err_set(&err, SO_EFORMAT, "%s: bad", "x"), SO_EFORMAT);
    assert_int_equal(so_err_prefix(&err, "file %d", 7), SO_EFORMAT);
    assert_string_equal(err.msg, "file 7: x: bad");
    assert_int_equal(so_err_set(NULL, SO_EIO, "quiet"), SO_EIO);

    /* a message longer than the buffer is truncated between two characters */
    char longtext[2000];
    for (size_t i = 0; i + 2 < sizeof longtext; i += 2)
        memcpy(longtext + i, "\xC3\xA4", 3);
    so_err_set(&err, SO_EIO, "x%s", longtext);
    size_t len = strlen(err.msg);
    assert_true(len <= sizeof err.msg - 1);
    assert_int_equal((len - 1) % 2, 0);
    so_err_prefix(&err, "%s", longtext);
    assert_true(strlen(err.msg) < sizeof err.msg);
    assert_string_equal(so_err_text(SO_EIO), "input or output failed");
    assert_string_equal(so_err_text(-999), "unknown error");
}

static void arena_limits(void **state) {
    (void)state;
    so_arena a = {.max = 1000};
    assert_non_null(so_arena_alloc(&a, 100, 1));
    assert_null(so_arena_alloc(&a, 1000, 1));
    assert_null(so_arena_alloc(&a, SIZE_MAX / 2, 4));
    char *s = so_arena_strndup(&a, "hello", 3);
    assert_string_equal(s, "hel");
    so_arena_free(&a);
    assert_null(so_try_alloc(SIZE_MAX, 16));
    assert_true(so_in_range(3, 4, 7));
    assert_false(so_in_range(3, 5, 7));
    assert_false(so_in_range(UINT64_MAX, 2, 7));
}

static void buf_maximum(void **state) {
    (void)state;
    so_buf b = {.max = 8};
    so_buf_append_c(&b, "12345");
    so_buf_printf(&b, "%d", 678);
    assert_string_equal(b.data, "12345678");
    assert_false(b.full);
    so_buf_append_char(&b, '9');
    assert_true(b.full);
    assert_int_equal(b.len, 8);
    so_buf_clear(&b);
    assert_false(b.full);
    so_buf_free(&b);
}

static void maps_grow(void **state) {
    (void)state;
    enum { N = 5000 };
    so_map *m = so_map_create(0);
    so_map64 *m64 = so_map64_create(0);
    char(*keys)[16] = so_calloc(N, sizeof *keys);
    for (int i = 0; i < N; i++) {
        snprintf(keys[i], sizeof keys[i], "k%d", i);
        assert_true(so_map_add(m, so_str_c(keys[i]), i));
        assert_true(so_map64_add(m64, (uint64_t)i << 32, -i));
    }
    assert_false(so_map_add(m, SO_STR("k7"), 1));
    assert_false(so_map64_add(m64, 0, 1));
    assert_int_equal(so_map_count(m), N);
    int64_t v;
    for (int i = 0; i < N; i++) {
        assert_true(so_map_get(m, so_str_c(keys[i]), &v) && v == i);
        assert_true(so_map64_get(m64, (uint64_t)i << 32, &v) && v == -i);
    }
    assert_false(so_map_get(m, SO_STR("absent"), &v));
    assert_false(so_map64_get(m64, 1, &v));
    so_map_set(m, SO_STR("k7"), 70);
    assert_true(so_map_get(m, SO_STR("k7"), &v) && v == 70);
    assert_true(so_map_add(m, (so_str){NULL, 0}, 9));
    assert_true(so_map_get(m, SO_STR(""), &v) && v == 9);
    so_map_free(m);
    so_map64_free(m64);
    free(keys);
}

/* Every half converts to float and back to itself; a float between two halves converts to the
 * nearer one. */
static void halves(void **state) {
    (void)state;
    for (uint32_t h = 0; h < 0x10000; h++) {
        float f = so_f16_to_f32((uint16_t)h);
        if ((h & 0x7FFF) > 0x7C00) {
            assert_true(isnan(f));
            assert_true(isnan(so_f16_to_f32(so_f32_to_f16(f))));
            continue;
        }
        assert_int_equal(so_f32_to_f16(f), h);
        if ((h & 0x7FFF) >= 0x7BFF)
            continue;
        float g = so_f16_to_f32((uint16_t)(h + 1)), mid = (f + g) / 2;
        assert_int_equal(so_f32_to_f16(mid), h & 1 ? h + 1 : h); /* ties to even */
        assert_int_equal(so_f32_to_f16(nextafterf(mid, f)), h);
        assert_int_equal(so_f32_to_f16(nextafterf(mid, g)), h + 1);
        if (so_bf16_to_f32((uint16_t)h) == so_bf16_to_f32((uint16_t)h))
            assert_int_equal(so_f32_to_bf16(so_bf16_to_f32((uint16_t)h)), h);
    }
    assert_int_equal(so_f32_to_f16(65520.0f), 0x7C00);
    assert_int_equal(so_f32_to_f16(65519.0f), 0x7BFF);
    assert_int_equal(so_f32_to_bf16(1.00390625f), 0x3F80); /* tie to even */
}

/* Known answers of Philox-4x32-10 published with Random123: all zeros, all ones, digits of pi. */
static void rng_known_answers(void **state) {
    (void)state;
    uint32_t w[4];
    so_rng_block(&(so_rng_key){0}, 0, w);
    const uint32_t zeros[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
    assert_memory_equal(w, zeros, sizeof w);

    so_rng_key k = {.seed = 42, .position = 3};
    double sum = 0;
    for (uint32_t i = 0; i < 100000; i++) {
        double u = so_rng_uniform(&k, i);
        assert_true(u > 0 && u < 1);
        sum += u;
    }
    assert_true(fabs(sum / 100000 - 0.5) < 0.005);
    so_rng_key other = k;
    other.purpose = SO_RNG_DRAFT;
    assert_true(so_rng_uniform(&k, 0) != so_rng_uniform(&other, 0));
}

static void files(void **state) {
    (void)state;
    char *dir = so_test_tmp(), *path = so_path_join(dir, "a/b");
    so_err err;
    so_map_file map;
    assert_int_equal(so_file_map(dir, &map, &err), SO_EINVAL);
    assert_int_equal(so_file_map(path, &map, &err), SO_ENOTFOUND);
    char *sub = so_path_join(dir, "a");
    SO_OK_OR_FAIL(so_dir_create(sub, &err), err);
    SO_OK_OR_FAIL(so_dir_create(sub, &err), err);

    so_out_file *out;
    SO_OK_OR_FAIL(so_out_begin(path, &out, &err), err);
    SO_OK_OR_FAIL(so_out_write(out, "hello", 5, &err), err);
    assert_false(so_file_exists(path));
    so_out_abort(out);
    assert_int_equal(rmdir(sub), 0); /* the folder is empty: abort removed its file */
    SO_OK_OR_FAIL(so_dir_create(sub, &err), err);
    SO_OK_OR_FAIL(so_out_begin(path, &out, &err), err);
    SO_OK_OR_FAIL(so_out_write(out, "hello", 5, &err), err);
    SO_OK_OR_FAIL(so_out_commit(out, &err), err);
    SO_OK_OR_FAIL(so_file_map(path, &map, &err), err);
    assert_int_equal(map.len, 5);
    assert_memory_equal(map.data, "hello", 5);
    assert_true(so_file_drop(&map, map.data, 5)); /* less than a page: nothing is released */
    assert_false(so_file_drop(&map, map.data, 6));
    assert_false(so_file_drop(&map, &map, 1));
    assert_memory_equal(map.data, "hello", 5);
    so_file_unmap(&map);
    so_buf b = {0};
    assert_int_equal(so_file_read(path, 4, &b, &err), SO_ELIMIT);
    so_buf_clear(&b);
    SO_OK_OR_FAIL(so_file_read(path, 5, &b, &err), err);
    assert_string_equal(b.data, "hello");
    so_buf_free(&b);
    free(sub);
    free(path);
    so_test_tmp_free(dir);
}

static void write_to(const char *path, const char *text) {
    so_err err;
    so_out_file *out;
    SO_OK_OR_FAIL(so_out_begin(path, &out, &err), err);
    SO_OK_OR_FAIL(so_out_write(out, text, strlen(text), &err), err);
    SO_OK_OR_FAIL(so_out_commit(out, &err), err);
}

static mode_t kind_of(const char *path) {
    struct stat st;
    assert_int_equal(lstat(path, &st), 0);
    return st.st_mode & S_IFMT;
}

/* Devices, pipes and links are written in place, never replaced by a regular file. */
static void outputs_that_are_no_files(void **state) {
    (void)state;
    char *dir = so_test_tmp(), *null = so_path_join(dir, "null"), *pipe = so_path_join(dir, "pipe");
    char *file = so_path_join(dir, "file"), *link = so_path_join(dir, "link");
    char got[8] = "";
    so_err err;
    so_out_file *out;
    assert_int_equal(symlink("/dev/null", null), 0);
    write_to(null, "hello");
    assert_int_equal(kind_of(null), S_IFLNK);
    assert_int_equal(mkfifo(pipe, 0600), 0);
    int fd = open(pipe, O_RDONLY | O_NONBLOCK);
    assert_true(fd >= 0);
    write_to(pipe, "hello");
    assert_int_equal(read(fd, got, sizeof got), 5);
    assert_memory_equal(got, "hello", 5);
    SO_OK_OR_FAIL(so_out_begin(pipe, &out, &err), err);
    so_out_abort(out);
    assert_int_equal(kind_of(pipe), S_IFIFO);
    close(fd);
    write_to(file, "old");
    assert_int_equal(symlink("file", link), 0);
    write_to(link, "new");
    assert_int_equal(kind_of(link), S_IFLNK);
    so_buf b = {0};
    SO_OK_OR_FAIL(so_file_read(file, 100, &b, &err), err);
    assert_string_equal(b.data, "new");
    so_buf_free(&b);
    free(null);
    free(pipe);
    free(file);
    free(link);
    so_test_tmp_free(dir);
}

/* Released pages are read from the file again. */
static void dropped_pages_come_back(void **state) {
    (void)state;
    char *dir = so_test_tmp(), *path = so_path_join(dir, "pages");
    so_err err;
    so_map_file map;
    so_out_file *out;
    char block[40000];
    for (size_t i = 0; i < sizeof block; i++)
        block[i] = (char)(i * 7);
    SO_OK_OR_FAIL(so_out_begin(path, &out, &err), err);
    SO_OK_OR_FAIL(so_out_write(out, block, sizeof block, &err), err);
    SO_OK_OR_FAIL(so_out_commit(out, &err), err);
    SO_OK_OR_FAIL(so_file_map(path, &map, &err), err);
    assert_memory_equal(map.data, block, sizeof block);
    assert_true(so_file_drop(&map, map.data + 1, sizeof block - 1));
    assert_memory_equal(map.data, block, sizeof block);
    so_file_unmap(&map);
    free(path);
    so_test_tmp_free(dir);
}

static void memory_left(void **state) {
    (void)state;
    size_t before = so_mem_available();
    assert_true(before > 1 << 20);
    if (SO_SANITIZED)
        SO_SKIP("a sanitizer's address space passes every limit");
    struct rlimit old, tight;
    assert_int_equal(getrlimit(RLIMIT_AS, &old), 0);
    tight = old;
    tight.rlim_cur = (rlim_t)1 << 30;
    assert_int_equal(setrlimit(RLIMIT_AS, &tight), 0);
    assert_true(so_mem_available() < (size_t)1 << 30);
    tight.rlim_cur = 4096; /* less than the process uses already */
    assert_int_equal(setrlimit(RLIMIT_AS, &tight), 0);
    size_t none = so_mem_available();
    assert_int_equal(setrlimit(RLIMIT_AS, &old), 0);
    assert_int_equal(none, 0);
}

/* base/exact.h against libm, which is correct to one unit in the last place or better. */
static void exact_functions(void **state) {
    (void)state;
    for (uint64_t w = 0; w <= UINT32_MAX; w += 65521) {
        double u = ((double)(uint32_t)w + 0.5) * 0x1p-32;
        assert_true(fabs(so_exact_log(u) / log(u) - 1) < 1e-15);
        assert_true(fabs(so_exact_gumbel((uint32_t)w) + log(-log(u))) < 1e-14);
    }
    for (double y = -699.5; y <= 0; y += 0.0137)
        assert_true(fabs(so_exact_exp(y) / exp(y) - 1) < 3e-10);
    assert_true(so_exact_exp(0) == 1);
    assert_true(so_exact_exp(-701) == 0 && so_exact_exp(-INFINITY) == 0);
    assert_true(so_exact_log(1) == 0);
    assert_true(so_exact_gumbel(UINT32_MAX) < 22.88); /* the largest noise (backend/sample_row.h) */
    assert_true(so_exact_y(-FLT_MAX, (double)FLT_MAX, 1) == -INFINITY);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(err_messages),
        cmocka_unit_test(arena_limits),
        cmocka_unit_test(buf_maximum),
        cmocka_unit_test(maps_grow),
        cmocka_unit_test(halves),
        cmocka_unit_test(rng_known_answers),
        cmocka_unit_test(exact_functions),
        cmocka_unit_test(files),
        cmocka_unit_test(outputs_that_are_no_files),
        cmocka_unit_test(dropped_pages_come_back),
        cmocka_unit_test(memory_left),
    };
    return cmocka_run_group_tests_name("base", tests, NULL, NULL);
}

/* Recipes and conversion: the rule of recipe.h case by case, and so_convert on a small model. */
#include "so_test.h"

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"
#include "format/convert.h"
#include "format/quant.h"

static so_dtype chosen(const char *recipe, int n_layers, bool has_output, const char *tensor,
                       int n_dims, int64_t row) {
    so_recipe r;
    int64_t dims[] = {row, 4};
    if (!so_recipe_parse(recipe, &r))
        fail_msg("no recipe %s", recipe);
    char last[32];
    snprintf(last, sizeof last, "blk.%d.attn_q.weight", n_layers - 1);
    so_recipe_observe(&r, so_str_c(last));
    if (has_output)
        so_recipe_observe(&r, SO_STR("output.weight"));
    return so_recipe_choose(&r, so_str_c(tensor), n_dims, dims).dtype;
}

static void rule(void **state) {
    (void)state;
    static const struct {
        const char *recipe, *tensor;
        int n_dims;
        int64_t row;
        so_dtype want; /* in a model of 16 layers with an output matrix */
    } cases[] = {
        {"Q4_0", "blk.0.attn_q.weight", 2, 64, SO_DTYPE_Q4_0},
        {"q4_0", "output.weight", 2, 64, SO_DTYPE_Q4_0},
        {"Q4_0", "token_embd.weight", 2, 64, SO_DTYPE_Q4_0},
        {"Q4_0", "blk.0.attn_norm.weight", 1, 64, SO_DTYPE_F32},
        {"Q4_0", "blk.0.attn_q_norm.weight", 2, 64, SO_DTYPE_F32},
        {"Q4_0", "blk.0.attn_q.bias", 2, 64, SO_DTYPE_F32},
        {"Q4_0", "position_embd.weight", 2, 64, SO_DTYPE_F32},
        {"Q4_0", "blk.0.ffn_up_exps.weight", 3, 64, SO_DTYPE_Q4_0},
        {"Q4_0", "blk.0.attn_q.weight", 2, 48, SO_DTYPE_F16},
        {"Q8_0", "blk.0.attn_q.weight", 2, 33, SO_DTYPE_F16},
        {"Q4_K", "blk.0.attn_q.weight", 2, 256, SO_DTYPE_Q4_K},
        {"Q2_K", "blk.0.attn_q.weight", 2, 576, SO_DTYPE_Q4_0},
        {"Q3_K", "blk.0.attn_q.weight", 2, 576, SO_DTYPE_Q4_0},
        {"Q4_K", "blk.0.attn_q.weight", 2, 576, SO_DTYPE_Q4_0},
        {"Q5_K", "blk.0.attn_q.weight", 2, 576, SO_DTYPE_Q5_0},
        {"Q6_K", "blk.0.attn_q.weight", 2, 576, SO_DTYPE_Q5_1},
        {"Q4_K_M", "output.weight", 2, 576, SO_DTYPE_Q5_1},
        {"Q4_K", "blk.0.attn_q.weight", 2, 48, SO_DTYPE_F16},
        {"Q4_K", "output.weight", 2, 256, SO_DTYPE_Q4_K},
        {"Q4_K_S", "output.weight", 2, 256, SO_DTYPE_Q6_K},
        {"Q4_K_S", "token_embd.weight", 2, 256, SO_DTYPE_Q4_K},
        {"Q4_K_S", "blk.0.attn_v.weight", 2, 256, SO_DTYPE_Q4_K},
        {"Q4_K_M", "output.weight", 2, 256, SO_DTYPE_Q6_K},
        {"Q4_K_M", "blk.0.attn_v.weight", 2, 256, SO_DTYPE_Q6_K},
        {"Q4_K_M", "blk.1.ffn_down.weight", 2, 256, SO_DTYPE_Q6_K},
        {"Q4_K_M", "blk.2.ffn_down.weight", 2, 256, SO_DTYPE_Q4_K},
        {"Q4_K_M", "blk.4.ffn_down.weight", 2, 256, SO_DTYPE_Q6_K},
        {"Q4_K_M", "blk.13.ffn_down.weight", 2, 256, SO_DTYPE_Q6_K},
        {"Q4_K_M", "blk.12.ffn_down.weight", 2, 256, SO_DTYPE_Q4_K},
        {"Q4_K_M", "blk.15.ffn_down.weight", 2, 256, SO_DTYPE_Q6_K},
        {"Q4_K_M", "blk.0.ffn_up.weight", 2, 256, SO_DTYPE_Q4_K},
        {"Q5_K_M", "blk.0.attn_v.weight", 2, 256, SO_DTYPE_Q6_K},
        {"Q3_K_M", "blk.0.attn_v.weight", 2, 256, SO_DTYPE_Q5_K},
        {"Q3_K_L", "blk.2.attn_v.weight", 2, 256, SO_DTYPE_Q5_K},
        {"Q2_K_M", "output.weight", 2, 256, SO_DTYPE_Q4_K},
        {"F16", "blk.0.attn_q.weight", 2, 33, SO_DTYPE_F16},
        {"BF16", "blk.0.attn_norm.weight", 1, 33, SO_DTYPE_F32},
    };
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        so_dtype got =
            chosen(cases[i].recipe, 16, true, cases[i].tensor, cases[i].n_dims, cases[i].row);
        if (got != cases[i].want)
            fail_msg("%s %s row %d: %s", cases[i].recipe, cases[i].tensor, (int)cases[i].row,
                     so_dtype_get((int)got)->name);
    }
    /* without output.weight the embedding is the output matrix */
    assert_int_equal(chosen("Q4_K_S", 16, false, "token_embd.weight", 2, 256), SO_DTYPE_Q6_K);
    so_recipe r;
    assert_false(so_recipe_parse("Q4_K_XL", &r));
    assert_false(so_recipe_parse("", &r));
}

/* Every name in the list for messages is a recipe. */
static void names(void **state) {
    (void)state;
    char *list = so_strdup(so_recipe_names());
    int n = 0;
    for (char *save = NULL, *name = strtok_r(list, " ", &save); name;
         name = strtok_r(NULL, " ", &save)) {
        so_recipe r;
        if (!so_recipe_parse(name, &r))
            fail_msg("%s", name);
        assert_string_equal(r.name, name);
        n++;
    }
    assert_int_equal(n, 22);
    free(list);
}

/* A fallback from Q4_K or larger takes no more bytes than the dtype that was asked for. */
static void fallbacks_do_not_grow(void **state) {
    (void)state;
    for (int t = SO_DTYPE_Q4_K; t <= SO_DTYPE_Q6_K; t++) {
        so_dtype got = chosen(so_dtype_get(t)->name, 16, true, "blk.0.attn_q.weight", 2, 32);
        assert_true(so_dtype_row_bytes(got, 256) <= so_dtype_row_bytes((so_dtype)t, 256));
    }
}

/* A model of three tensors; element `bad` of the matrix is replaced by `value`. */
static void write_model(const char *path, size_t bad, float value) {
    static const int64_t matrix[] = {256, 8}, odd[] = {48, 2}, norm[] = {256};
    so_gguf_writer *w = so_gguf_writer_create();
    so_err err;
    so_gguf_writer_str(w, "general.architecture", SO_STR("llama"));
    so_gguf_writer_u32(w, "general.file_type", 0);
    so_gguf_writer_u32(w, "split.count", 1);
    so_gguf_writer_tensor(w, "blk.0.attn_q.weight", SO_DTYPE_F32, 2, matrix);
    so_gguf_writer_tensor(w, "blk.0.odd.weight", SO_DTYPE_F32, 2, odd);
    so_gguf_writer_tensor(w, "blk.0.attn_norm.weight", SO_DTYPE_F32, 1, norm);
    SO_OK_OR_FAIL(so_gguf_writer_begin(w, path, &err), err);
    float x[256 * 8];
    for (size_t i = 0; i < SO_LEN(x); i++)
        x[i] = sinf((float)i);
    if (bad < SO_LEN(x))
        x[bad] = value;
    SO_OK_OR_FAIL(so_gguf_writer_data(w, x, sizeof x, &err), err);
    SO_OK_OR_FAIL(so_gguf_writer_data(w, x, 48 * 2 * 4, &err), err);
    SO_OK_OR_FAIL(so_gguf_writer_data(w, x, 256 * 4, &err), err);
    SO_OK_OR_FAIL(so_gguf_writer_commit(w, &err), err);
    so_gguf_writer_free(w);
}

static int convert_with(const char *in, const char *out, const char *recipe,
                        const so_convert_opts *opts, so_convert_report *report, so_err *err) {
    so_gguf *g;
    so_convert_source src;
    so_recipe r;
    SO_OK_OR_FAIL(so_gguf_open(in, &g, err), *err);
    assert_true(so_recipe_parse(recipe, &r));
    so_convert_from_gguf(g, &src);
    int rc = so_convert(&src, &r, out, opts, report, err);
    so_convert_source_free(&src);
    so_gguf_close(g);
    return rc;
}

static int convert(const char *in, const char *out, const char *recipe, so_convert_report *report,
                   so_err *err) {
    return convert_with(in, out, recipe, NULL, report, err);
}

static void converts(void **state) {
    (void)state;
    char *dir = so_test_tmp(), *in = so_path_join(dir, "in.gguf"),
         *out = so_path_join(dir, "out.gguf"), *again = so_path_join(dir, "again.gguf");
    so_err err;
    so_convert_report report;
    so_gguf *g, *h;
    int64_t v;
    write_model(in, SIZE_MAX, 0);
    SO_OK_OR_FAIL(convert(in, out, "Q4_K", &report, &err), err);
    assert_int_equal(report.n_fallbacks, 1);
    assert_string_equal(report.fallbacks[0].tensor, "blk.0.odd.weight");
    assert_int_equal(report.fallbacks[0].wanted, SO_DTYPE_Q4_K);
    assert_int_equal(report.fallbacks[0].dtype, SO_DTYPE_F16);
    assert_int_equal(report.n_requantised, 0);
    assert_int_equal(report.bytes_in, (256 * 8 + 96 + 256) * 4);
    assert_int_equal(report.bytes_out, 8 * 144 + 96 * 2 + 256 * 4);
    assert_int_equal(report.n_tensors[SO_DTYPE_Q4_K], 1);
    so_convert_report_free(&report);

    SO_OK_OR_FAIL(so_gguf_open(in, &g, &err), err);
    SO_OK_OR_FAIL(so_gguf_open(out, &h, &err), err);
    SO_OK_OR_FAIL(so_gguf_get_i64(h, "general.file_type", &v, &err), err);
    assert_int_equal(v, 14);
    SO_OK_OR_FAIL(so_gguf_get_i64(h, "general.quantization_version", &v, &err), err);
    assert_int_equal(v, 2);
    assert_null(so_gguf_find(h, "split.count"));
    const so_tensor *a = so_gguf_tensor(g, "blk.0.attn_q.weight");
    const so_tensor *b = so_gguf_tensor(h, "blk.0.attn_q.weight");
    float x[256 * 8], y[256 * 8];
    so_dequantize_row(a->dtype, a->data, x, 256 * 8);
    so_dequantize_row(b->dtype, b->data, y, 256 * 8);
    for (size_t i = 0; i < SO_LEN(x); i++)
        assert_true(fabsf(x[i] - y[i]) < 0.12f);
    const so_tensor *n = so_gguf_tensor(h, "blk.0.attn_norm.weight");
    assert_int_equal(n->dtype, SO_DTYPE_F32);
    assert_memory_equal(n->data, so_gguf_tensor(g, "blk.0.attn_norm.weight")->data, 1024);
    so_gguf_close(g);
    so_gguf_close(h);

    /* to the dtype that it already has: the bytes are unchanged */
    SO_OK_OR_FAIL(convert(out, again, "Q4_K", &report, &err), err);
    so_convert_report_free(&report);
    so_buf p = {0}, q = {0};
    SO_OK_OR_FAIL(so_file_read(out, 1 << 20, &p, &err), err);
    SO_OK_OR_FAIL(so_file_read(again, 1 << 20, &q, &err), err);
    assert_int_equal(p.len, q.len);
    assert_memory_equal(p.data, q.data, p.len);
    so_buf_free(&p);
    so_buf_free(&q);
    SO_OK_OR_FAIL(convert(out, again, "Q8_0", &report, &err), err);
    assert_int_equal(report.n_requantised, 1);
    so_convert_report_free(&report);
    free(in);
    free(out);
    free(again);
    so_test_tmp_free(dir);
}

static void last_progress(void *user, double done) {
    double *at = user;
    assert_true(done >= *at && done <= 1);
    *at = done;
}

static void same_bytes_with_threads(void **state) {
    (void)state;
    char *dir = so_test_tmp(), *in = so_path_join(dir, "in.gguf"),
         *one = so_path_join(dir, "one.gguf"), *many = so_path_join(dir, "many.gguf");
    so_err err;
    double at = 0;
    so_convert_opts opts = {.n_threads = 3, .progress = last_progress, .user = &at};
    write_model(in, SIZE_MAX, 0);
    SO_OK_OR_FAIL(convert(in, one, "Q5_K", NULL, &err), err);
    SO_OK_OR_FAIL(convert_with(in, many, "Q5_K", &opts, NULL, &err), err);
    assert_true(at == 1);
    so_buf p = {0}, q = {0};
    SO_OK_OR_FAIL(so_file_read(one, 1 << 20, &p, &err), err);
    SO_OK_OR_FAIL(so_file_read(many, 1 << 20, &q, &err), err);
    assert_int_equal(p.len, q.len);
    assert_memory_equal(p.data, q.data, p.len);
    so_buf_free(&p);
    so_buf_free(&q);
    free(in);
    free(one);
    free(many);
    so_test_tmp_free(dir);
}

static void refuses(void **state) {
    (void)state;
    char *dir = so_test_tmp(), *in = so_path_join(dir, "in.gguf"),
         *out = so_path_join(dir, "out.gguf");
    static const struct {
        float value;
        const char *recipe, *needle;
    } cases[] = {
        {NAN, "Q8_0", "in.gguf: tensor blk.0.attn_q.weight: element 300 is "},
        {INFINITY, "Q4_K_M", "element 300 is inf"},
        {-INFINITY, "F32", "element 300 is -inf"},
        {1e5f, "F16", "element 300 is 100000, beyond the range of F16"},
    };
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        so_err err = {0};
        write_model(in, 300, cases[i].value);
        assert_int_not_equal(convert(in, out, cases[i].recipe, NULL, &err), SO_OK);
        if (!strstr(err.msg, cases[i].needle))
            fail_msg("'%s' lacks '%s'", err.msg, cases[i].needle);
    }
    so_err err;
    assert_int_equal(convert(in, in, "Q8_0", NULL, &err), SO_EINVAL);
    assert_non_null(strstr(err.msg, "same file"));
    assert_int_not_equal(convert(in, "no/such/folder/x.gguf", "F32", NULL, &err), SO_OK);
    assert_non_null(strstr(err.msg, "no/such/folder/x.gguf"));
    int n = 0;
    DIR *d = opendir(dir);
    for (struct dirent *e; (e = readdir(d));)
        n += e->d_name[0] != '.';
    closedir(d);
    assert_int_equal(n, 1); /* only the input */
    free(in);
    free(out);
    so_test_tmp_free(dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rule),     cmocka_unit_test(names),
        cmocka_unit_test(converts), cmocka_unit_test(same_bytes_with_threads),
        cmocka_unit_test(refuses),  cmocka_unit_test(fallbacks_do_not_grow),
    };
    return cmocka_run_group_tests_name("convert", tests, NULL, NULL);
}

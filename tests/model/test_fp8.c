/* Folders with matrices of 8-bit floats: a golden folder is written twice, with such matrices and
 * their scales, and with the same values as F32. Both must be the same model. */
#include "so_test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/half.h"
#include "base/mem.h"
#include "format/quant.h"
#include "format/safetensors.h"
#include "model/convert.h"
#include "so_rig.h"

enum { N = 40, N_VOCAB = 131 };

#define UP "model.layers.0.mlp.up_proj.weight"

/* What is wrong with matrix UP or with a norm of the folder. */
typedef enum fault {
    NO_FAULT,
    SCALE_I32,
    TWO_SCALES,
    SCALE_NAN,
    SCALE_MISNAMED,
    BOTH_NAMES,
    WEIGHT_NAN,
    VECTOR,
    THREE_DIMS
} fault;

/* Which numbers share a scale, and how the folder says so. */
typedef struct layout {
    const char *ending; /* of the scale tensor's name; NULL: no scales */
    const char *dtype;  /* of the scales */
    int rows, cols;     /* of a block; 0: all */
    int n_dims;         /* of the scale tensor */
    const char *config; /* added to config.json */
    bool input_scale;
    fault fault;
} layout;

#define CONFIG(METHOD) "{\"quantization_config\": {\"quant_method\": \"" METHOD "\"}}"
#define BLOCKS(SIDES) \
    "{\"quantization_config\": {\"quant_method\": \"fp8\", \"weight_block_size\": [" SIDES "]}}"
#define GROUPS(TEXT)                                                        \
    "{\"quantization_config\": {\"quant_method\": \"compressed-tensors\", " \
    "\"config_groups\": {\"group_0\": {\"weights\": {" TEXT "}}}}}"
static const layout layouts[] = {
    {"_scale", "F32", 0, 0, 0, CONFIG("compressed-tensors"), true, NO_FAULT},
    {"_scale", "F32", 0, 0, 1, CONFIG("fp8"), false, NO_FAULT},
    {"_scale", "BF16", 1, 0, 2, CONFIG("fbgemm_fp8"), false, NO_FAULT},
    {"_scale", "F16", 1, 0, 1, CONFIG("compressed-tensors"), false, NO_FAULT},
    {"_scale_inv", "F32", 16, 40, 2, BLOCKS("16, 40"), true, NO_FAULT},
    {"_scale_inv", "BF16", 128, 128, 2, BLOCKS("128, 128"), false, NO_FAULT},
    {"_scale", "F32", 1, 16, 2, GROUPS("\"group_size\": 16"), false, NO_FAULT},
    {"_scale", "F32", 40, 48, 2, GROUPS("\"block_structure\": [40, 48]"), false, NO_FAULT},
    {NULL, NULL, 0, 0, 0, "{}", false, NO_FAULT},
};

/* A folder being written. */
typedef struct folder {
    char *path;
    so_buf head, data;
} folder;

static folder folder_begin(const char *golden, const char *config) {
    folder f = {.path = so_test_tmp()};
    char sub[128], *to = so_path_join(f.path, "config.json");
    json_error_t je;
    snprintf(sub, sizeof sub, "golden/models/%s/config.json", golden);
    json_t *have = json_load_file(so_test_data(sub), 0, &je), *more = json_loads(config, 0, &je);
    assert_int_equal(json_object_update(have, more), 0);
    assert_int_equal(json_dump_file(have, to, 0), 0);
    json_decref(have);
    json_decref(more);
    free(to);
    return f;
}

/* shape: slowest dimension first, as in the file. */
static void put(folder *f, const char *name, const char *dtype, const char *shape, const void *data,
                size_t n_bytes) {
    so_buf_printf(&f->head, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
                  f->head.len ? "," : "{", name, dtype, shape, f->data.len, f->data.len + n_bytes);
    so_buf_append(&f->data, data, n_bytes);
}

static void folder_end(folder *f) {
    char *path = so_path_join(f->path, "model.safetensors");
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    so_buf_append_c(&f->head, "}");
    uint64_t len = f->head.len;
    fwrite(&len, sizeof len, 1, out);
    fwrite(f->head.data, 1, f->head.len, out);
    fwrite(f->data.data, 1, f->data.len, out);
    fclose(out);
    free(path);
    so_buf_free(&f->head);
    so_buf_free(&f->data);
}

/* The number whose value is nearest. */
static uint8_t nearest(float x) {
    uint8_t best = 0;
    for (int v = 0; v < 256; v++)
        if (fabsf(so_e4m3_to_f32((uint8_t)v) - x) < fabsf(so_e4m3_to_f32(best) - x))
            best = (uint8_t)v;
    return best;
}

static const char *shape_of(int n_dims, int64_t rows, int64_t cols, char buf[64]) {
    if (n_dims == 0)
        buf[0] = 0;
    else if (n_dims == 1)
        snprintf(buf, 64, "%lld", (long long)(rows * cols));
    else
        snprintf(buf, 64, "%lld, %lld", (long long)rows, (long long)cols);
    return buf;
}

static void put_scales(folder *f, const char *name, const layout *l, const float *scales,
                       int64_t rows, int64_t cols) {
    char full[300], shape[64];
    so_dtype dtype;
    fault wrong = strcmp(name, UP) == 0 ? l->fault : NO_FAULT;
    snprintf(full, sizeof full, "%s%s%s", name, l->ending, wrong == SCALE_MISNAMED ? "s" : "");
    assert_true(so_dtype_parse(l->dtype, &dtype));
    unsigned char *stored = so_alloc((size_t)(rows * cols) * 4);
    so_quantize_row(dtype, scales, stored, rows * cols);
    if (wrong == TWO_SCALES)
        put(f, full, "F32", "7", (float[7]){1}, 28);
    else if (wrong == SCALE_NAN)
        put(f, full, "F32", "1", (float[]){NAN}, 4);
    else
        put(f, full, wrong == SCALE_I32 ? "I32" : l->dtype, shape_of(l->n_dims, rows, cols, shape),
            stored, so_dtype_row_bytes(dtype, rows * cols));
    if (wrong == BOTH_NAMES)
        put(f, UP "_scale_inv", "F32", "1", (float[]){1}, 4);
    free(stored);
}

/* Writes matrix t to both folders, with scales of a power of two and a bit, so that some products
 * are rounded. */
static void put_matrix(folder *fp8, folder *f32, const char *name, const so_tensor *t,
                       const layout *l) {
    int64_t m = t->dims[1], k = t->dims[0];
    int64_t br = l->rows ? l->rows : m, bc = l->cols ? l->cols : k;
    int64_t rows = (m + br - 1) / br, cols = (k + bc - 1) / bc;
    float *scales = SO_NEW_N(float, rows *cols), *x = SO_NEW_N(float, m *k);
    uint8_t *bytes = so_alloc((size_t)(m * k));
    char shape[64];
    for (int64_t i = 0; i < rows * cols; i++)
        scales[i] = l->ending ? 0x1p-10f * (1 + 0.125f * (float)(i % 7)) : 1;
    memcpy(x, t->data, (size_t)(m * k) * sizeof *x);
    for (int64_t r = 0; r < m; r++)
        for (int64_t c = 0; c < k; c++) {
            float s = scales[r / br * cols + c / bc], *at = &x[r * k + c];
            bytes[r * k + c] = nearest(*at / s);
            *at = so_e4m3_to_f32(bytes[r * k + c]) * s;
        }
    if (l->fault == WEIGHT_NAN)
        bytes[k + 2] = 0x7F;
    shape_of(2, m, k, shape);
    put(f32, name, "F32", shape, x, (size_t)(m * k) * sizeof *x);
    if (l->fault == THREE_DIMS)
        snprintf(shape, sizeof shape, "1, %lld, %lld", (long long)m, (long long)k);
    put(fp8, name, "F8_E4M3", shape, bytes, (size_t)(m * k));
    if (l->ending)
        put_scales(fp8, name, l, scales, rows, cols);
    if (l->input_scale) {
        char full[256];
        snprintf(full, sizeof full, "%.*sinput_scale", (int)(strlen(name) - strlen("weight")),
                 name);
        put(fp8, full, "F32", "1", scales, sizeof *scales);
    }
    free(scales);
    free(x);
    free(bytes);
}

/* Embeddings as F16, which no conversion below changes; vectors unchanged. */
static void put_other(folder *fp8, folder *f32, const char *name, const so_tensor *t,
                      const layout *l) {
    char shape[64];
    int64_t n = so_tensor_count(t);
    uint16_t *half = SO_NEW_N(uint16_t, n);
    shape_of(t->n_dims, t->n_dims == 1 ? 1 : t->dims[1], t->dims[0], shape);
    so_quantize_row(SO_DTYPE_F16, t->data, half, n);
    for (int i = 0; i < 2; i++)
        if (l->fault == VECTOR && i == 0 && t->n_dims == 1)
            put(fp8, name, "F8_E4M3", shape, half, (size_t)n);
        else if (t->n_dims == 2)
            put(i ? f32 : fp8, name, "F16", shape, half, (size_t)n * 2);
        else
            put(i ? f32 : fp8, name, "F32", shape, t->data, t->n_bytes);
    free(half);
}

/* Writes both folders. The paths are temporary folders. */
static void write_both(const char *golden, const layout *l, char **fp8_path, char **f32_path) {
    char sub[128];
    so_err err = {0};
    so_safetensors *s;
    snprintf(sub, sizeof sub, "golden/models/%s/model.safetensors", golden);
    SO_OK_OR_FAIL(so_safetensors_open(so_test_data(sub), &s, &err), err);
    folder fp8 = folder_begin(golden, l->config), f32 = folder_begin(golden, "{}");
    for (size_t i = 0; i < s->n_tensors; i++) {
        const so_tensor *t = &s->tensors[i];
        char name[256];
        snprintf(name, sizeof name, "%.*s", SO_STR_ARG(t->name));
        assert_int_equal(t->dtype, SO_DTYPE_F32);
        if (strstr(name, "_proj.weight"))
            put_matrix(&fp8, &f32, name, t, l);
        else
            put_other(&fp8, &f32, name, t, l);
    }
    so_safetensors_close(s);
    folder_end(&fp8);
    folder_end(&f32);
    *fp8_path = fp8.path;
    *f32_path = f32.path;
}

static void run(const char *path, const so_model_opts *opts, float *logits) {
    int32_t tokens[N];
    so_rig r;
    for (int i = 0; i < N; i++)
        tokens[i] = (i * 37 + 11) % N_VOCAB;
    so_rig_open(&r, path, &(so_rig_opts){.level = SO_CPU_AUTO, .model = *opts});
    so_seq *s = so_seq_create(r.kv);
    so_rig_chain(&r, s, tokens, N, logits);
    so_seq_free(s);
    so_rig_close(&r);
}

/* Scale of every layout: F32 weights, the default conversion, and a smaller type. */
static void the_same_model_as_its_values(void **state) {
    (void)state;
    static const so_model_opts none = {0}, f32 = {.quantize = true, .dtype = SO_DTYPE_F32},
                               q8 = {.quantize = true, .dtype = SO_DTYPE_Q8_0},
                               q4 = {.quantize = true, .dtype = SO_DTYPE_Q4_0};
    const struct {
        const so_model_opts *fp8, *plain;
    } cases[] = {{&f32, &f32}, {&none, &q8}, {&q4, &q4}};
    float *want = SO_NEW_N(float, N *N_VOCAB), *got = SO_NEW_N(float, N *N_VOCAB);
    for (size_t i = 0; i < SO_LEN(layouts); i++) {
        char *fp8, *plain;
        write_both(i % 2 ? "llama" : "qwen3", &layouts[i], &fp8, &plain);
        for (size_t c = 0; c < SO_LEN(cases); c++) {
            run(plain, cases[c].plain, want);
            run(fp8, cases[c].fp8, got);
            assert_memory_equal(want, got, (size_t)N * N_VOCAB * sizeof *want);
        }
        so_test_tmp_free(fp8);
        so_test_tmp_free(plain);
    }
    free(want);
    free(got);
}

/* The folder as a GGUF file, rows of q and k rotated (Llama) or not. */
static void converts_to_gguf(void **state) {
    (void)state;
    static const char *const golden[] = {"qwen3", "llama"};
    so_model_opts none = {0};
    char *dir = so_test_tmp();
    float *logits[2] = {SO_NEW_N(float, N *N_VOCAB), SO_NEW_N(float, N *N_VOCAB)};
    for (size_t g = 0; g < SO_LEN(golden); g++) {
        char *path[2];
        write_both(golden[g], &layouts[4], &path[0], &path[1]);
        for (int i = 0; i < 2; i++) {
            so_err err = {0};
            so_checkpoint *ck;
            so_convert_source src;
            so_recipe recipe;
            char *out = so_path_join(dir, "m.gguf");
            SO_OK_OR_FAIL(so_checkpoint_open(path[i], SO_CHECKPOINT_ALL, &ck, &err), err);
            SO_OK_OR_FAIL(so_model_convert_source(ck, &src, &err), err);
            assert_true(so_recipe_parse("F32", &recipe));
            SO_OK_OR_FAIL(so_convert(&src, &recipe, out, NULL, NULL, &err), err);
            so_model_convert_source_free(&src);
            so_checkpoint_close(ck);
            run(out, &none, logits[i]);
            free(out);
            so_test_tmp_free(path[i]);
        }
        assert_memory_equal(logits[0], logits[1], (size_t)N * N_VOCAB * sizeof(float));
    }
    free(logits[0]);
    free(logits[1]);
    so_test_tmp_free(dir);
}

/* All 256 numbers by the definition of the format. */
static void every_number(void **state) {
    (void)state;
    for (int v = 0; v < 256; v++) {
        int exp = v >> 3 & 15, man = v & 7;
        float x = so_e4m3_to_f32((uint8_t)v);
        double want = exp ? ldexp(8 + man, exp - 10) : ldexp(man, -9);
        if ((v & 127) == 127)
            assert_true(isnan(x));
        else
            assert_true((double)x == (v & 128 ? -want : want));
    }
    so_dtype t;
    assert_false(so_dtype_parse("F8_E4M3", &t)); /* nothing is converted to it */
}

static void expect_layout_refused(const layout *l, int code, const char *text) {
    char *fp8, *plain;
    so_err err = {0};
    so_checkpoint *ck;
    so_backend *b;
    so_model *m = NULL;
    write_both("qwen3", l, &fp8, &plain);
    SO_OK_OR_FAIL(so_checkpoint_open(fp8, SO_CHECKPOINT_ALL, &ck, &err), err);
    SO_OK_OR_FAIL(so_backend_open(NULL, &(so_backend_opts){.n_threads = 1}, &b, &err), err);
    int rc = so_model_load(ck, b, NULL, &m, &err);
    if (rc != code || !strstr(err.msg, text))
        fail_msg("%d '%s'; expected %d '%s'", rc, err.msg, code, text);
    so_backend_free(b);
    so_checkpoint_close(ck);
    so_test_tmp_free(fp8);
    so_test_tmp_free(plain);
}

static void expect_refused(fault f, int code, const char *text) {
    layout l = layouts[1];
    l.fault = f;
    expect_layout_refused(&l, code, text);
}

static void refuses_what_it_would_misread(void **state) {
    (void)state;
    expect_refused(SCALE_I32, SO_EUNSUPPORTED, UP "_scale cannot be used: dtype I32");
    expect_refused(TWO_SCALES, SO_EUNSUPPORTED, "has 7 x 1 scales for 80 rows of 48");
    expect_refused(THREE_DIMS, SO_EFORMAT, "has 3 dimensions; a matrix has two");
    layout l = layouts[4];
    l.config = CONFIG("fp8"); /* blocks of a size that is not stated, or of another one */
    expect_layout_refused(&l, SO_EUNSUPPORTED, "block of 0 x 0, which config.json states");
    l.config = BLOCKS("16, 32");
    expect_layout_refused(&l, SO_EUNSUPPORTED, "block of 16 x 32, which config.json states");
    expect_refused(SCALE_NAN, SO_EFORMAT, UP "_scale holds NaN or infinity at element 0");
    expect_refused(SCALE_MISNAMED, SO_EUNSUPPORTED, UP "_scales is not part of");
    expect_refused(BOTH_NAMES, SO_EFORMAT, UP " has both");
    expect_refused(WEIGHT_NAN, SO_EFORMAT, "at row 1, column 2");
    expect_refused(VECTOR, SO_EUNSUPPORTED, "F8_E4M3 is supported only for the matrices");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_number),
        cmocka_unit_test(the_same_model_as_its_values),
        cmocka_unit_test(converts_to_gguf),
        cmocka_unit_test(refuses_what_it_would_misread),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Dequantisation against the golden files, bit for bit, from an unaligned source. */
#include "so_test.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/half.h"
#include "base/mem.h"
#include "format/quant.h"

static const so_dtype all[] = {SO_DTYPE_F32,  SO_DTYPE_F16,  SO_DTYPE_BF16, SO_DTYPE_Q4_0,
                               SO_DTYPE_Q4_1, SO_DTYPE_Q5_0, SO_DTYPE_Q5_1, SO_DTYPE_Q8_0,
                               SO_DTYPE_Q2_K, SO_DTYPE_Q3_K, SO_DTYPE_Q4_K, SO_DTYPE_Q5_K,
                               SO_DTYPE_Q6_K};

static void dtype_table(void **state) {
    (void)state;
    so_dtype t;
    for (size_t i = 0; i < SO_LEN(all); i++) {
        const so_dtype_info *info = so_dtype_get((int)all[i]);
        assert_non_null(info);
        assert_true(so_dtype_parse(info->name, &t));
        assert_int_equal(t, all[i]);
    }
    assert_true(so_dtype_parse("q4_k", &t));
    assert_int_equal(t, SO_DTYPE_Q4_K);
    assert_false(so_dtype_parse("Q9_9", &t));
    assert_null(so_dtype_get(4));
    assert_null(so_dtype_get(-1));
    assert_null(so_dtype_get(SO_DTYPE_COUNT));
    assert_int_equal(so_dtype_row_bytes(SO_DTYPE_Q6_K, 512), 420);
    assert_int_equal(so_dtype_row_bytes(SO_DTYPE_F16, 3), 6);
}

static void golden_dtype(so_dtype dtype) {
    const so_dtype_info *info = so_dtype_get((int)dtype);
    char name[64];
    snprintf(name, sizeof name, "golden/quant/%s.bin", info->name);
    so_buf file = {0};
    so_err err;
    SO_OK_OR_FAIL(so_file_read(so_test_data(name), 1 << 20, &file, &err), err);
    size_t per_block = (size_t)info->block_bytes + (size_t)info->block_len * sizeof(float);
    size_t n_blocks = file.len / per_block, n = n_blocks * (size_t)info->block_len;
    assert_int_equal(file.len % per_block, 0);
    assert_true(n_blocks >= 3);
    size_t raw = n_blocks * (size_t)info->block_bytes;
    unsigned char *odd = so_alloc(raw + 1); /* no alignment at all */
    memcpy(odd + 1, file.data, raw);
    float *y = SO_NEW_N(float, n);
    so_dequantize_row(dtype, odd + 1, y, (int64_t)n);
    for (size_t i = 0; i < n; i++) {
        float want;
        memcpy(&want, file.data + raw + i * sizeof want, sizeof want);
        if (so_f32_bits(y[i]) != so_f32_bits(want) && !(y[i] == 0 && want == 0))
            fail_msg("%s element %zu: %a, expected %a", info->name, i, (double)y[i], (double)want);
    }
    free(odd);
    free(y);
    so_buf_free(&file);
}

static void golden(void **state) {
    (void)state;
    for (size_t i = 0; i < SO_LEN(all); i++)
        golden_dtype(all[i]);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(dtype_table), cmocka_unit_test(golden)};
    return cmocka_run_group_tests_name("quant", tests, NULL, NULL);
}

/* The table of dtypes (see dtype.h). Block sizes are taken from the structs in blocks.h, so each
 * size is stated only once. */
#include "format/dtype.h"

#include <strings.h>

#include "format/blocks.h"

#define ROW(T, len, size) [SO_DTYPE_##T] = {#T, len, (int)(size)}

static const so_dtype_info table[SO_DTYPE_COUNT] = {
    ROW(F32, 1, sizeof(float)),
    ROW(F16, 1, sizeof(uint16_t)),
    ROW(BF16, 1, sizeof(uint16_t)),
    ROW(F8_E4M3, 1, sizeof(uint8_t)),
    ROW(Q4_0, SO_QK, sizeof(so_block_q4_0)),
    ROW(Q4_1, SO_QK, sizeof(so_block_q4_1)),
    ROW(Q5_0, SO_QK, sizeof(so_block_q5_0)),
    ROW(Q5_1, SO_QK, sizeof(so_block_q5_1)),
    ROW(Q8_0, SO_QK, sizeof(so_block_q8_0)),
    ROW(Q2_K, SO_QK_K, sizeof(so_block_q2_k)),
    ROW(Q3_K, SO_QK_K, sizeof(so_block_q3_k)),
    ROW(Q4_K, SO_QK_K, sizeof(so_block_q4_k)),
    ROW(Q5_K, SO_QK_K, sizeof(so_block_q5_k)),
    ROW(Q6_K, SO_QK_K, sizeof(so_block_q6_k)),
};

const so_dtype_info *so_dtype_get(int dtype) {
    if (dtype < 0 || dtype >= SO_DTYPE_COUNT || !table[dtype].name)
        return NULL;
    return &table[dtype];
}

bool so_dtype_parse(const char *name, so_dtype *out) {
    for (int i = 0; i < SO_DTYPE_COUNT; i++) {
        if (so_dtype_in_gguf(i) && strcasecmp(table[i].name, name) == 0) {
            *out = (so_dtype)i;
            return true;
        }
    }
    return false;
}

size_t so_dtype_row_bytes(so_dtype dtype, int64_t n) {
    const so_dtype_info *info = so_dtype_get((int)dtype);
    SO_ASSERT(info != NULL);
    SO_ASSERT_OP(n % info->block_len, ==, 0);
    return (size_t)(n / info->block_len) * (size_t)info->block_bytes;
}

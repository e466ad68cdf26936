/* Precompiled charsmaps from hostile bytes, then text through whatever is read. The last two bytes
 * are the length of the text, which stands before them. */
#include "base/mem.h"
#include "token/charsmap.h"
#include "token/utf8.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    if (len < 2)
        return 0;
    size_t n_text = (size_t)data[len - 2] | (size_t)data[len - 1] << 8;
    len -= 2;
    n_text = SO_MIN(n_text, len);
    so_str bytes = {(const char *)data, len - n_text}, text = {bytes.ptr + bytes.len, n_text};
    so_charsmap *map;
    so_err err;
    if (so_charsmap_read(bytes, &map, &err) != 0)
        return 0;
    so_buf repaired = {0}, out = {.max = 1 << 22};
    so_utf8_repair(text, &repaired);
    so_charsmap_apply(map, so_buf_str(&repaired), &out);
    if (so_utf8_valid_len(so_buf_str(&out)) != out.len)
        __builtin_trap();
    so_buf_free(&repaired);
    so_buf_free(&out);
    so_charsmap_free(map);
    return 0;
}

/* Messages of draft workers from arbitrary bytes: what reads is written as it was. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "draft/wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    static so_wire_msg m;
    static unsigned char out[SO_WIRE_BYTES];
    so_err err = {0};
    if (so_wire_read(data, len, &m, &err) != SO_OK) {
        SO_ASSERT(err.msg[0] != '\0');
        return 0;
    }
    SO_ASSERT(so_wire_write(&m, out) == len);
    SO_ASSERT(memcmp(data, out, len) == 0);
    return 0;
}

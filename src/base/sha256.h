/* Streaming SHA-256 (FIPS 180-4). Implemented here because no linked library has it. */
#ifndef SO_BASE_SHA256_H
#define SO_BASE_SHA256_H

#include <stddef.h>
#include <stdint.h>

typedef struct so_sha256 {
    uint32_t h[8];
    uint64_t n_bytes;
    unsigned char block[64];
} so_sha256;

void so_sha256_init(so_sha256 *s);
void so_sha256_add(so_sha256 *s, const void *p, size_t len);
/* Writes the sum as 64 lower-case hex digits and a NUL. Initialise s again before reusing it. */
void so_sha256_hex(so_sha256 *s, char out[65]);

#endif

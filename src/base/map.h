/* Hash maps with open addressing: bytes → int64 and uint64 → int64. Entries cannot be removed. Any
 * number of threads may read a map while none writes it. */
#ifndef SO_BASE_MAP_H
#define SO_BASE_MAP_H

#include "base/str.h"

typedef struct so_map so_map; /* borrows the bytes of its keys: they must outlive the map */
so_map *so_map_create(size_t expected);
void so_map_free(so_map *m);
/* Returns false and keeps the old value if the key exists. */
bool so_map_add(so_map *m, so_str key, int64_t value);
void so_map_set(so_map *m, so_str key, int64_t value);
bool so_map_get(const so_map *m, so_str key, int64_t *value);
size_t so_map_count(const so_map *m);

typedef struct so_map64 so_map64;
so_map64 *so_map64_create(size_t expected);
void so_map64_free(so_map64 *m);
bool so_map64_add(so_map64 *m, uint64_t key, int64_t value);
bool so_map64_get(const so_map64 *m, uint64_t key, int64_t *value);

#endif

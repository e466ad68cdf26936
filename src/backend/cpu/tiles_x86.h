/* Dispatch to tile functions by size. In this file a tile is a group of activation rows or queries
 * whose sums stay in registers; for that its size must be a compile-time constant. */
#ifndef SO_BACKEND_CPU_TILES_X86_H
#define SO_BACKEND_CPU_TILES_X86_H

#include "base/loops.h"

/* Runs TILE(n) for the constant n that equals `size`, 1 … 12; sizes above
 * `max` are not compiled. */
#define TILE_CASES(size, max) \
    switch (size) {           \
        TILE_CASE(1, max)     \
        TILE_CASE(2, max)     \
        TILE_CASE(3, max)     \
        TILE_CASE(4, max)     \
        TILE_CASE(5, max)     \
        TILE_CASE(6, max)     \
        TILE_CASE(7, max)     \
        TILE_CASE(8, max)     \
        TILE_CASE(9, max)     \
        TILE_CASE(10, max)    \
        TILE_CASE(11, max)    \
        TILE_CASE(12, max)    \
    }
#define TILE_CASE(n, max) \
    case n:               \
        if (n <= max)     \
            TILE(n);      \
        break;

/* Number of rows or queries in the next tile: `left` divided evenly into tiles of at most `max`. */
INLINE int tile_size(int left, int max) {
    int tiles = (left + max - 1) / max;
    return (left + tiles - 1) / tiles;
}

#endif
